"""A run, or several side by side, as one page that needs nothing but a browser."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path

from torch import nn

from sparsevd.errors import ArgumentError
from sparsevd.files import atomic
from sparsevd.reporting.findings import Findings
from sparsevd.runs import sources
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import check_fit

PAGE, COMPARISON = "report.html", "comparison.html"


def report(
    runs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    time: bool = False,
    model: str | None = None,
    data: str | None = None,
    data_dir: str | Path | None = None,
    input_shape: tuple[int, ...] | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write a report of a run, or of several side by side, and return where it is.

        sparsevd.report("runs/demo", "report.html")
        sparsevd.report(["runs/demo", "runs/other"], "comparison.html")

    What is left of each layer, log α, the course of training, what other thresholds would cost and save, where the kept
    weights are, and whose prediction changed. The page is one file, and looks at no other when it is read.

    Args:
        runs: the folder of a run, or several of them; a single file of weights will do.
        output: where to write; by default report.html, or comparison.html for several, in the folder of the first run.
        time: measure milliseconds on this machine too.
        model: the network, where a folder does not say: one of the paper, or "package.module:factory".
        data: the data, in the same way.
        data_dir: where a data set is looked for.
        input_shape: the shape of one example, where a folder does not say.
        say: told what is being done.
    """
    from sparsevd import __version__
    from sparsevd.reporting.page import page
    from sparsevd.runs.gathering import check, gather

    paths = _paths(runs)
    folder = Path(data_dir) if data_dir is not None else None
    opened = [Run(path, model=model, data=data, data_dir=folder, input_shape=input_shape, say=say) for path in paths]
    for run in opened:  # all of them, before any is measured
        check(run)
        _check_what_was_named(run, model, data)
    target = Path(output) if output is not None else opened[0].folder / (PAGE if len(opened) == 1 else COMPARISON)
    if target.is_dir():
        raise ArgumentError(f"{target} is a folder; give the name of a file for the page, such as {target / PAGE}")
    found = [gather(run, time=time, say=say) for run in opened]
    atomic.write(target, page(_named_apart(found), __version__))
    return target


def _paths(runs: object) -> list[Path]:
    """The runs as paths. A network is no list of them, though a Sequential can be read like one."""
    given = [runs] if isinstance(runs, str | PathLike | nn.Module) or not isinstance(runs, Iterable) else list(runs)
    if not given:
        raise ArgumentError("there is no run to report on; give at least one folder")
    paths = []
    for each in given:
        if not isinstance(each, str | PathLike):
            instead = "; of a network in memory, sparsevd.summary says what is left" * isinstance(each, nn.Module)
            raise ArgumentError(
                "report takes the folder of a run, as fit(…, run_dir=…) writes it, or a list of such folders, and was "
                f"given a {type(each).__name__}{instead}"
            )
        paths.append(Path(each))
    return paths


def _check_what_was_named(run: Run, model: str | None, data: str | None) -> None:
    """What the caller names must be there and fit; what a folder itself lacks is said on the page."""
    if data is not None:
        run.data()
    if model is not None:
        network = sources.build_model(model, sources.USUAL_CLASSES)
        if sources.is_factory(model):
            problem = f"{run.file} does not fit the network {model}"
            check_fit(run.pruned_tensors(), network.state_dict(), problem, error=ArgumentError)


def _named_apart(found: list[Findings]) -> list[Findings]:
    """Runs whose folders have the same name go by their whole paths."""
    names = [each.name for each in found]
    for each in found:
        if names.count(each.name) > 1:
            each.name = each.path
    return found
