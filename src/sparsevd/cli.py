"""The command line: parse, call, print. What the commands do is in `run` and `checkpoint_info`."""

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsevd.errors import ArgumentError, SparseVDError, SparseVDWarning
from sparsevd.runs.training_run import RunConfig
from sparsevd.training.recipes import FitConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sparse Variational Dropout: learn which weights a network does not need, and drop them.",
)

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}

_RUN = RunConfig()
_FIT = FitConfig()


@app.command(
    epilog="Example: sparsevd train --model lenet-5-caffe --data mnist --out runs/lenet5 --epochs 30 --val-size 5000"
)
def train(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A network of the paper, or package.module:factory.")] = _RUN.model,
    data: Annotated[
        str, typer.Option(help="mnist, cifar10, cifar100, or package.module:factory returning (train, test).")
    ] = _RUN.data,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = _RUN.out,
    recipe: Annotated[
        str, typer.Option(help="Named settings, which the options below override; --recipe list describes them.")
    ] = "default",
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = _FIT.epochs,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order.")] = _FIT.seed,
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = _FIT.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Adam's rate, falling to zero.")] = _FIT.learning_rate,
    decay: Annotated[str, typer.Option(help="How the rate falls: cosine or linear.")] = _FIT.decay,
    log_sigma2_lr_ratio: Annotated[
        float, typer.Option(help="Rate of log σ², relative to the learning rate.")
    ] = _FIT.log_sigma2_lr_ratio,
    late_log_sigma2_lr_ratio: Annotated[
        float, typer.Option(help="The same at the end of the run, where log σ² catches up.")
    ] = _FIT.late_log_sigma2_lr_ratio,
    late_from: Annotated[float, typer.Option(help="Part of the run from which it does; 1: never.")] = _FIT.late_from,
    drop_from: Annotated[
        float, typer.Option(help="Part of the run from which pruned weights are zero for good; 1: never.")
    ] = _FIT.drop_from,
    drop_patience: Annotated[
        int, typer.Option(help="Epochs in a row after which inputs and units without weights are dropped.")
    ] = _FIT.drop_patience,
    contract: Annotated[
        bool, typer.Option(help="Leave inputs and units without any weight out of the computation.")
    ] = _FIT.contract,
    channels_last: Annotated[
        bool, typer.Option(help="Keep images in this order in memory: faster convolutions on a CPU.")
    ] = _FIT.channels_last,
    variance_dtype: Annotated[
        str | None, typer.Option(help="Type of the variance product: float32 or bfloat16; else as the CPU is fast.")
    ] = _FIT.variance_dtype,
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
    pretrain_weight_decay: Annotated[
        float, typer.Option(help="Weight decay in the dense training.")
    ] = _RUN.pretrain_weight_decay,
    shift: Annotated[int, typer.Option(help="Train on images shifted by up to so many pixels.")] = _RUN.shift,
    mirror: Annotated[bool, typer.Option("--mirror", help="Train on mirror images too.")] = _RUN.mirror,
    init_from: Annotated[
        Path | None, typer.Option(help="Checkpoint or safetensors file to take the first weights from.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
) -> None:
    """Train a network with Sparse VD, prune it, and test it."""
    from sparsevd.runs import training_run
    from sparsevd.training import recipes

    if recipe == "list":
        print("\n".join(f"{name:<18}{each.about}" for name, each in recipes.RECIPES.items()))
        return
    chosen = recipes.recipe(recipe)
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    settings = replace(chosen.fit, **{name: value for name, value in given.items() if name in _FIT.__dict__})
    config = RunConfig(
        model=model,
        data=data,
        out=out,
        fit=settings,
        data_dir=data_dir,
        val_size=val_size,
        pretrain_epochs=given.get("pretrain_epochs", chosen.pretrain_epochs),
        pretrain_learning_rate=pretrain_learning_rate,
        pretrain_weight_decay=pretrain_weight_decay,
        shift=shift,
        mirror=mirror,
        init_from=init_from,
        threshold=threshold,
        resume=resume,
        overwrite=overwrite,
    )
    try:
        result = training_run.run(config)
    except KeyboardInterrupt:
        print(f"\n{training_run.interrupted(config)}", file=sys.stderr)
        raise typer.Exit(130) from None
    print()
    print(result.summary)
    print()
    print(training_run.describe(result))
    print(f"written to {out}: {', '.join(training_run.FILES)}")


_MODEL = typer.Option(help="The network, if the folder does not say: one of the paper, or package.module:factory.")
_INPUT_SHAPE = typer.Option(help="Shape of one example, as 1x28x28, if the folder does not say.")


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.replace("×", "x").split("x"))
    except ValueError as error:
        raise ArgumentError(f"--input-shape {text} must look like 1x28x28") from error


@app.command(epilog="Example: sparsevd info runs/demo/checkpoint.safetensors")
def info(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    threshold: Annotated[float | None, typer.Option(help="Count with another threshold of log α.")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
) -> None:
    """Show, layer by layer, how many weights are kept; then units, multiply-adds and bytes after compaction."""
    from sparsevd.graph.compaction import compact
    from sparsevd.runs import checkpoint_info, restore

    shape = _sizes(input_shape)
    print(checkpoint_info.info(checkpoint, threshold), flush=True)
    try:
        restored = restore.restore(checkpoint, model=model, input_shape=shape, threshold=threshold)
        report = compact(restored.graph or restored.network, restored.example).compaction
    except SparseVDError as error:
        if model or input_shape:
            raise
        print(f"units and multiply-adds are not shown: {error}")
    else:
        print(f"\n{report}")


@app.command(epilog="Example: sparsevd prune runs/demo/checkpoint.safetensors -o lenet.safetensors --threshold 2")
def prune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of Sparse VD training, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the pruned network.")],
    threshold: Annotated[float | None, typer.Option(help="Drop weights of log α above it.")] = None,
) -> None:
    """Write the pruned network: safetensors with exact zeros and the keys of the plain torch model."""
    from sparsevd.runs import checkpoint_info

    print(checkpoint_info.prune_file(checkpoint, output, threshold))
    print(f"written to {output}")


@app.command(epilog="Example: sparsevd export runs/demo --to onnx -o lenet.onnx --sparse-initializers")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")],
    to: Annotated[str, typer.Option(help="The format: onnx, or c for one self-contained C file.")] = "onnx",
    smaller: Annotated[bool, typer.Option("--compact", help="Remove dead units first.")] = False,
    sparse_initializers: Annotated[
        bool, typer.Option("--sparse-initializers", help="ONNX: store mostly-zero tensors as sparse ones.")
    ] = False,
    threshold: Annotated[float | None, typer.Option(help="Drop weights of log α above it.")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
) -> None:
    """Write the pruned network in another format, checked against the network itself."""
    from sparsevd.graph.compaction import compact
    from sparsevd.runs import restore
    from sparsevd.runtime.onnx import export_onnx

    if to not in ("onnx", "c"):
        raise ArgumentError(f"--to {to}: there are onnx and c")
    restored = restore.restore(checkpoint, model=model, input_shape=_sizes(input_shape), threshold=threshold)
    network = restored.network
    if smaller:
        network = compact(restored.graph or network, restored.example)
        print(network.compaction)
    if to == "c":
        from sparsevd.runtime.c_export import export_c

        written = export_c(network, restored.example, output)
        print(f"written to {' and '.join(map(str, written))}; the C file says how to build and test it")
        return
    export_onnx(network, restored.example, output, sparse_initializers=sparse_initializers)
    print(f"written to {output}: {output.stat().st_size:,} bytes, outputs equal in onnxruntime")


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
    from sparsevd.runs.compression import CompressConfig
    from sparsevd.runs.compression import compress as compressed

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


@app.command(epilog="Example: sparsevd bench runs/demo --batch 1 --batch 64 --threads 1")
def bench(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be given again. Default: 1, 16, 64.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Threads; may be given again. Default: 1, 2.")] = None,
    compiler: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile too.")] = True,
    threshold: Annotated[float | None, typer.Option(help="Drop weights of log α above it.")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
) -> None:
    """Time the pruned network on this machine: dense torch, ONNX Runtime, and our ways; and compare their outputs."""
    from sparsevd.runs import benchmark, restore

    restored = restore.restore(checkpoint, model=model, input_shape=_sizes(input_shape), threshold=threshold)
    batches, counts = batch or (1, 16, 64), threads or (1, 2)
    print(benchmark.bench(restored.network, restored.example, batches=batches, threads=counts, compiler=compiler))


@app.command(
    epilog="Example: sparsevd compare --net lenet-300-100 --methods pruning,surgery,sparse-vd --out runs/compare"
)
def compare(
    net: Annotated[str, typer.Option(help="A network of the paper, or package.module:factory.")] = _RUN.model,
    data: Annotated[
        str, typer.Option(help="mnist, cifar10, cifar100, or package.module:factory returning (train, test).")
    ] = _RUN.data,
    methods: Annotated[str, typer.Option(help="all, or names with commas between; --cards lists them.")] = "all",
    out: Annotated[Path, typer.Option(help="Folder for the records; what is there is not trained again.")] = Path(
        "runs/compare"
    ),
    epochs: Annotated[int, typer.Option(help="Passes over the training set, for every method.")] = _FIT.epochs,
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = _FIT.batch_size,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise and order.")] = _FIT.seed,
    val_size: Annotated[
        int, typer.Option(help="Measure on so many held-out training examples instead of the test set.")
    ] = _RUN.val_size,
    shift: Annotated[int, typer.Option(help="Train on images shifted by up to so many pixels.")] = _RUN.shift,
    mirror: Annotated[bool, typer.Option("--mirror", help="Train on mirror images too.")] = _RUN.mirror,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
    cards: Annotated[bool, typer.Option("--cards", help="Describe the methods, and train nothing.")] = False,
) -> None:
    """Train Sparse VD and its rivals on the same data and budget, and print one table."""
    from sparsevd import baselines
    from sparsevd.runs import comparison as comparison

    names = comparison.methods_named(methods)
    if cards:
        described: dict[str, list[str]] = {}  # two methods may share a card
        for name in names:
            described.setdefault(baselines.card(baselines.METHODS[name]), []).append(name)
        titles = {", ".join(alike): card for card, alike in described.items()}
        print("\n\n".join(f"{title}\n{'─' * len(title)}\n{card}" for title, card in titles.items()))
        return
    config = comparison.CompareConfig(
        net=net,
        data=data,
        methods=names,
        out=out,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        val_size=val_size,
        shift=shift,
        mirror=mirror,
        data_dir=data_dir,
    )
    try:
        records = comparison.compare(config)
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished methods are in {out}. The same command goes on with the next", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"\n{comparison.table(records)}\nwritten to {out / comparison.RECORDS}")


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
        try:
            app()
        except SparseVDError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _DISK:
            raise
        # Files are written through `atomic`, whose errors are ours: what is left is the output, into a file or a pipe.
        print(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        sys.exit(2)


if __name__ == "__main__":
    main()
