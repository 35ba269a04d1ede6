"""The command line: parse, call, print. What the commands do is in `runs`."""

import errno
import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsevd.cli_help import Command, CommandGroup
from sparsevd.cli_options import changed, given, in_options, options_from
from sparsevd.errors import ArgumentError, SparseVDError, SparseVDWarning
from sparsevd.files import json_object
from sparsevd.runs import comparison, compression, training_run
from sparsevd.runs.comparison import CompareConfig
from sparsevd.runs.compression import CompressConfig
from sparsevd.runs.run import FILES, HELD_OUT, Run
from sparsevd.runs.training_run import RunConfig
from sparsevd.runtime import targets
from sparsevd.training import processes, recipes
from sparsevd.training.budget import Budget

app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sparse Variational Dropout: learn which weights a network does not need, and drop them.",
)
_command = functools.partial(app.command, cls=Command)

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


@_command(
    epilog="Example: sparsevd train --model lenet-5-caffe --data mnist --out runs/lenet5 --epochs 30 --val-size 5000"
)
@options_from(RunConfig)
def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Option(help="Named settings, which the options below override; --recipe list describes them.")
    ] = "default",
    **settings: Any,
) -> None:
    """Train a network with Sparse VD, prune it, and test it."""
    if recipe == "list":
        print("\n".join(f"{name:<18}{each.about}" for name, each in recipes.RECIPES.items()))
        return
    chosen = recipes.recipe(recipe)
    config = changed(RunConfig(fit=chosen.fit, pretrain_epochs=chosen.pretrain_epochs), given(context))
    try:
        result = training_run.run(config)
    except KeyboardInterrupt:
        if processes.is_main():
            print(f"\n{_interrupted(config)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not processes.is_main():
        return
    print(
        f"\n{result.summary.table()}\n\n{training_run.describe(result)}"
    )  # its remarks were made at the end of the run
    print(f"written to {config.out}: {', '.join(FILES)}")


def _interrupted(config: RunConfig) -> str:
    if Run(config.out).has_begun():
        return f"interrupted; the state is saved in {config.out}. The same command with --resume goes on"
    return "interrupted before the first step; nothing was saved"


_JSON = typer.Option("--json", help="Print one JSON object instead of a table, and nothing else there.")


@contextmanager
def _stdout_for(as_json: bool) -> Iterator[None]:
    """What is said on the way goes to the standard error, if the standard output is for JSON."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _cut(text: str) -> float | str:
    """A threshold as it is typed."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is neither a number nor auto") from error


def _threshold(text: str) -> Any:
    return typer.Option(
        help=f"{text}; auto: as low as costs next to nothing in the bound.", parser=_cut, metavar="FLOAT|auto"
    )


_MODEL = typer.Option(help="The network, if the folder does not say: one of the paper, or package.module:factory.")
_INPUT_SHAPE = typer.Option(help="Shape of one example, as 1x28x28, if the folder does not say.")


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.replace("×", "x").split("x"))
    except ValueError as error:
        raise ArgumentError(f"--input-shape {text} must look like 1x28x28") from error


@_command(epilog="Example: sparsevd info runs/demo/checkpoint.safetensors")
def info(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    threshold: Annotated[Any, _threshold("Count with another threshold of log α")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show, layer by layer, how many weights are kept; then units, multiply-adds and bytes after compaction."""
    from sparsevd.graph.compaction import compact

    run = Run(checkpoint, model=model, input_shape=_sizes(input_shape))
    summary, missing, compaction = run.summary(threshold), None, None
    if not as_json:
        print(summary, flush=True)
    try:
        with _stdout_for(as_json):
            restored = run.network(threshold)
            compaction = compact(restored.graph or restored.network, restored.example).compaction
    except SparseVDError as error:
        if model or input_shape:
            raise
        missing = in_options(str(error), app)
    if as_json:
        small = asdict(compaction) if compaction else None  # type: ignore[call-overload]
        print(json_object.text({**summary.as_dict(), "compaction": small, "no_compaction_because": missing}))
    elif missing is None:
        print(f"\n{compaction}")
    else:
        print(f"units and multiply-adds are not shown: {missing}")


@_command(epilog="Example: sparsevd prune runs/demo -o lenet.safetensors --max-error-increase 0.5")
def prune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of Sparse VD training, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the pruned network.")],
    threshold: Annotated[Any, _threshold("Drop weights of log α above it")] = None,
    sparsity: Annotated[float | None, typer.Option(help="Or drop this share of the weights, such as 0.95.")] = None,
    max_error_increase: Annotated[
        float | None, typer.Option(help="Or drop as many as cost at most so many points of %, on held-out examples.")
    ] = None,
    val_size: Annotated[int, typer.Option(help="Examples of the training set to measure that on.")] = HELD_OUT,
    polish: Annotated[
        int, typer.Option(help="Epochs of plain fine-tuning of what is left, on the run's data; zeros stay.", min=0)
    ] = 0,
    model: Annotated[str | None, _MODEL] = None,
    data: Annotated[str | None, typer.Option(help="The data, if the folder does not say: as for train.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
) -> None:
    """Write the pruned network: safetensors with exact zeros and the keys of the plain torch model."""
    if sum(given is not None for given in (threshold, sparsity, max_error_increase)) > 1:
        raise ArgumentError("threshold, sparsity and max_error_increase each say where to cut; give one of them")
    run = Run(checkpoint, model=model, data=data, data_dir=data_dir)
    if sparsity is not None:
        threshold = run.threshold_of_sparsity(sparsity)
    elif max_error_increase is not None:
        threshold = run.threshold_within(Budget(max_error_increase=max_error_increase), val_size)
    elif threshold == "auto":
        threshold = run.cheap_threshold()
    print(run.write_pruned(output, threshold, polish))
    print(f"written to {output}")


_FORMATS = ", ".join(f"{name} ({each.about})" for name, each in targets.TARGETS.items())


@_command(epilog="Example: sparsevd export runs/demo --to onnx -o lenet.onnx --sparse-initializers")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")],
    to: Annotated[str, typer.Option(help=f"The format: {_FORMATS}.")] = "onnx",
    smaller: Annotated[bool, typer.Option("--compact", help="Remove dead units first.")] = False,
    sparse_initializers: Annotated[
        bool, typer.Option("--sparse-initializers", help="ONNX: store mostly-zero tensors as sparse ones.")
    ] = False,
    threshold: Annotated[Any, _threshold("Drop weights of log α above it")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
) -> None:
    """Write the pruned network in another format, checked against the network itself."""
    from sparsevd.graph.compaction import compact

    options = {"sparse_initializers": sparse_initializers}
    target = targets.target(to, options)
    restored = Run(checkpoint, model=model, input_shape=_sizes(input_shape)).network(threshold)
    network = restored.network
    if smaller:
        network = compact(restored.graph or network, restored.example)
        print(network.compaction)
    print(targets.export(target, network, restored.example, output, options))


@_command(epilog="Example: sparsevd report runs/demo runs/other -o comparison.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run; several are shown side by side.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write. Default: report.html (comparison.html) in the first folder."
        ),
    ] = None,
    time: Annotated[bool, typer.Option("--time", help="Measure milliseconds on this machine too.")] = False,
    model: Annotated[str | None, _MODEL] = None,
    data: Annotated[str | None, typer.Option(help="The data, if the folder does not say: as for train.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data set. [env: SPARSEVD_DATA]")] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
) -> None:
    """Write what a run came to as a page of HTML that needs nothing but a browser."""
    from sparsevd.runs import reports

    shape = _sizes(input_shape)
    page = reports.report(runs, output, time=time, model=model, data=data, data_dir=data_dir, input_shape=shape)
    print(f"written to {page}")


@_command(epilog="Example: sparsevd compress runs/demo -o lenet.spvd --max-error-increase 0.05")
@options_from(CompressConfig)
def compress(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model file (.spvd).")],
    **settings: Any,
) -> None:
    """Write the smallest model file that is good enough, and test that file."""
    print(compression.compress(CompressConfig(checkpoint, output, **settings)))
    print(f"written to {output}")


@_command(epilog="Example: sparsevd bench runs/demo --batch 1 --batch 64 --threads 1")
def bench(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a pruned network, or the folder of a run.")],
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be given again. Default: 1, 16, 64.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Threads; may be given again. Default: 1, 2.")] = None,
    compiler: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile too.")] = True,
    threshold: Annotated[Any, _threshold("Drop weights of log α above it")] = None,
    model: Annotated[str | None, _MODEL] = None,
    input_shape: Annotated[str | None, _INPUT_SHAPE] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Time the pruned network on this machine: dense torch, ONNX Runtime, and our ways; and compare their outputs."""
    from sparsevd.runs import benchmark

    with _stdout_for(as_json):
        restored = Run(checkpoint, model=model, input_shape=_sizes(input_shape)).network(threshold)
        batches, counts = batch or (1, 16, 64), threads or (1, 2)
        report = benchmark.bench(restored.network, restored.example, batches=batches, threads=counts, compiler=compiler)
    print(json_object.text(asdict(report)) if as_json else report)


@_command(epilog="Example: sparsevd compare --net lenet-300-100 --methods pruning,surgery,sparse-vd --out runs/compare")
@options_from(CompareConfig)
def compare(
    methods: Annotated[str, typer.Option(help="all, or names with commas between; --cards lists them.")] = "all",
    cards: Annotated[bool, typer.Option("--cards", help="Describe the methods, and train nothing.")] = False,
    as_json: Annotated[bool, _JSON] = False,
    **settings: Any,
) -> None:
    """Train Sparse VD and its rivals on the same data and budget, and print one table."""
    names = comparison.methods_named(methods)
    if cards:
        print(comparison.cards(names))
        return
    config = CompareConfig(methods=names, **settings)
    try:
        with _stdout_for(as_json):
            records = comparison.compare(config)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; finished methods are in {config.out}. The same command goes on with the next",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    written = config.out / comparison.RECORDS
    if as_json:
        print(json_object.text({"records": records, "written_to": str(written)}))
    else:
        print(f"\n{comparison.table(records)}\nwritten to {written}")


@_command(epilog="Example: sparsevd doctor || echo broken")
def doctor(
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets. [env: SPARSEVD_DATA]")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Check this installation: versions, kernels, threads, extras, data. Exit code 1 if something must be mended."""
    from sparsevd.runs.doctor import examine

    diagnosis = examine(data_dir)
    print(json_object.text(diagnosis.as_dict()) if as_json else diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(1)


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
            if not error.told:
                print(f"error: {in_options(str(error), app)}", file=sys.stderr)
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
