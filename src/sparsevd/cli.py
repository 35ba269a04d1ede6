"""The command line: parse, call, print. What the commands do is in `run` and `checkpoint_info`."""

import io
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsevd.errors import SparseVDError, SparseVDWarning
from sparsevd.fit import FitConfig
from sparsevd.run import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sparse Variational Dropout: learn which weights a network does not need, and drop them.",
)

_RUN = RunConfig()
_FIT = FitConfig()


@app.command(
    epilog="Example: sparsevd train --model lenet-5-caffe --data mnist --out runs/lenet5 --epochs 30 --val-size 5000"
)
def train(
    model: Annotated[str, typer.Option(help="A network of the paper, or package.module:factory.")] = _RUN.model,
    data: Annotated[
        str, typer.Option(help="mnist, cifar10, cifar100, or package.module:factory returning (train, test).")
    ] = _RUN.data,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = _RUN.out,
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = _FIT.epochs,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order.")] = _FIT.seed,
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = _FIT.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Adam's rate, falling to zero.")] = _FIT.learning_rate,
    decay: Annotated[str, typer.Option(help="How the rate falls: cosine or linear.")] = _FIT.decay,
    log_sigma2_lr_ratio: Annotated[
        float, typer.Option(help="Rate of log σ², relative to the learning rate.")
    ] = _FIT.log_sigma2_lr_ratio,
    drop_from: Annotated[
        float, typer.Option(help="Part of the run from which pruned weights are zero for good.")
    ] = _FIT.drop_from,
    adam_beta2: Annotated[float, typer.Option(help="Decay of Adam's mean square.")] = _FIT.adam_beta2,
    warm_up_start: Annotated[
        float, typer.Option(help="Part of the run up to which the KL has no weight.")
    ] = _FIT.warm_up_start,
    warm_up_end: Annotated[
        float, typer.Option(help="Part of the run from which the KL has its full weight.")
    ] = _FIT.warm_up_end,
    threshold: Annotated[float, typer.Option(help="Weights of log α above it are dropped.")] = _RUN.threshold,
    val_size: Annotated[int, typer.Option(help="Training examples held out for validation.")] = _RUN.val_size,
    pretrain_epochs: Annotated[int, typer.Option(help="Epochs of dense training first.")] = _RUN.pretrain_epochs,
    pretrain_learning_rate: Annotated[
        float, typer.Option(help="Adam's rate in the dense training.")
    ] = _RUN.pretrain_learning_rate,
    init_from: Annotated[
        Path | None, typer.Option(help="Checkpoint or safetensors file to take the first weights from.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
) -> None:
    """Train a network with Sparse VD, prune it, and test it."""
    from sparsevd import run

    recipe = FitConfig(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        decay=decay,
        log_sigma2_lr_ratio=log_sigma2_lr_ratio,
        drop_from=drop_from,
        adam_beta2=adam_beta2,
        warm_up_start=warm_up_start,
        warm_up_end=warm_up_end,
        seed=seed,
    )
    config = RunConfig(
        model=model,
        data=data,
        out=out,
        fit=recipe,
        data_dir=data_dir,
        val_size=val_size,
        pretrain_epochs=pretrain_epochs,
        pretrain_learning_rate=pretrain_learning_rate,
        init_from=init_from,
        threshold=threshold,
        resume=resume,
        overwrite=overwrite,
    )
    try:
        result = run.run(config)
    except KeyboardInterrupt:
        print(f"\n{run.interrupted(config)}", file=sys.stderr)
        raise typer.Exit(130) from None
    print()
    print(result.summary)
    print()
    print(run.describe(result))
    print(f"written to {out}: {', '.join(run.FILES)}")


@app.command(epilog="Example: sparsevd info runs/demo/checkpoint.safetensors")
def info(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    threshold: Annotated[float | None, typer.Option(help="Count with another threshold of log α.")] = None,
) -> None:
    """Show, layer by layer, how many weights are kept."""
    from sparsevd import checkpoint_info

    print(checkpoint_info.info(checkpoint, threshold))


@app.command(epilog="Example: sparsevd prune runs/demo/checkpoint.safetensors -o lenet.safetensors --threshold 2")
def prune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of Sparse VD training, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the pruned network.")],
    threshold: Annotated[float | None, typer.Option(help="Drop weights of log α above it.")] = None,
) -> None:
    """Write the pruned network: safetensors with exact zeros and the keys of the plain torch model."""
    from sparsevd import checkpoint_info

    print(checkpoint_info.prune_file(checkpoint, output, threshold))
    print(f"written to {output}")


@app.command(epilog="Example: sparsevd compress runs/demo -o lenet.spvd --max-error-increase 0.05")
def compress(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model file (.spvd).")],
    precision: Annotated[str, typer.Option(help="posterior, lossless, or a number of bits.")] = "posterior",
    max_error_increase: Annotated[
        float, typer.Option(help="What rounding may cost, in points of %, on examples of the training set.")
    ] = 0.1,
    model: Annotated[
        str | None, typer.Option(help="The network, as for train; by default the run's, unless that is code.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data, as for train; by default the run's, unless that is code.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
    val_size: Annotated[int, typer.Option(help="Training examples to choose the rounding on.")] = 10_000,
) -> None:
    """Write the smallest model file that is good enough, and test that file."""
    from sparsevd.compress import CompressConfig
    from sparsevd.compress import compress as compressed

    config = CompressConfig(
        checkpoint=checkpoint,
        output=output,
        precision=precision,
        max_error_increase=max_error_increase,
        model=model,
        data=data,
        data_dir=data_dir,
        val_size=val_size,
    )
    print(compressed(config))
    print(f"written to {output}")


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
    if issubclass(category, SparseVDWarning):
        print(f"note: {message}", file=sys.stderr)
    else:
        _python_warning(message, category, *where, **rest)


_python_warning: Callable[..., None] = warnings.showwarning


def main() -> None:
    """Entry point: what a user can do wrong ends in one sentence and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × and α still gets its table
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warnings.showwarning = _show_warning
    try:
        app()
    except SparseVDError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
