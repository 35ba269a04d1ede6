"""The report as one page of HTML: self-contained, without a script, and every text from a run escaped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsevd.reporting import figures, wording
from sparsevd.reporting.findings import Example, Findings
from sparsevd.reporting.summary import times
from sparsevd.reporting.svg import Point

MOST_LAYERS = 12  # of a network are drawn one by one; the tables have all
_HERE = Path(__file__).parent
Figure = tuple[str, Any]  # its caption, and the drawing


@dataclass(frozen=True)
class _Shown:
    """A run as the template asks for it: sentences and drawings."""

    found: Findings
    headline: list[tuple[str, str, str]]
    answers: list[tuple[str, str]]
    layers_say: str
    layers: Any
    thresholds_say: str
    thresholds: Any
    histogram: str
    log_alpha: list[Figure]
    training: str
    course: list[Figure]
    pictures_say: str
    pictures: list[Figure]
    not_drawn: str
    changed: str
    examples: list[tuple[Any, Example]]


def page(runs: Sequence[Findings], version: str) -> str:
    """The HTML of a report about one run, or about several side by side."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    names = [run.name for run in runs]
    one = runs[0]
    shown = [_shown(run, Markup) for run in runs]
    return environment.get_template("page.html").render(
        title=f"{one.name}: what is left" if len(runs) == 1 else " and ".join(names) if len(runs) < 4 else "Runs",
        about=_about(one) if len(runs) == 1 else f"{len(runs)} runs side by side",
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        runs=shown,
        comparison=_comparison(runs, Markup) if len(runs) > 1 else None,
        any_trade_off=any(run.trade_off for run in runs),
        any_log_alpha=any(run.log_alpha for run in runs),
        any_course=any(run.epochs for run in runs),
        any_changes=any(run.changes for run in runs),
        any_times=any(run.times for run in runs),
        version=version,
    )


def _about(run: Findings) -> str:
    network, data = run.facts.get("network"), run.facts.get("data")
    text = f"{network or 'A network'} trained on {data or 'data that the folder does not name'} with Sparse VD"
    if not run.epochs:
        text = f"{network or 'A network'}{f' for {data}' if data else ''}"
    return text + ("" if run.finished or not run.epochs else "; not finished, this is as far as it got")


def _shown(run: Findings, markup: Any) -> _Shown:
    largest = wording.largest_layer(run)
    pays = wording.lower_threshold(run.trade_off) if run.trade_off else "Not measured; the end of the page says why."
    pictures = [("Inputs still read", markup(figures.inputs(run.inputs)))] if run.inputs else []
    pictures += [(mask.layer or "(model)", markup(figures.mask(mask))) for mask in run.masks[:MOST_LAYERS]]
    left = len(run.masks) - MOST_LAYERS
    drawn = [each for each in run.changes.shown if each.image is not None] if run.changes else []
    return _Shown(
        found=run,
        headline=wording.headline(run),
        answers=[
            ("Which layer is largest now?", largest),
            ("What did it cost?", wording.cost(run)),
            ("Would a lower threshold pay?", pays),
        ],
        layers_say=wording.layers(run),
        layers=markup(figures.layers(run.summary.layers)),
        thresholds_say=wording.thresholds(run.trade_off) if run.trade_off else "",
        thresholds=markup(figures.thresholds(run.trade_off)) if run.trade_off else "",
        histogram=wording.histogram(run),
        log_alpha=[(each.layer, markup(figures.log_alpha(each))) for each in run.log_alpha[:MOST_LAYERS]],
        training=wording.training(run) if run.epochs else "",
        course=[(caption, markup(drawing)) for caption, drawing in _course(run)],
        pictures_say=wording.pictures(run),
        pictures=pictures,
        not_drawn=f"{left} more layers are in the table above and not drawn." if left > 0 else "",
        changed=wording.changed(run.changes) if run.changes else "",
        examples=[(markup(figures.example(each)), each) for each in drawn],
    )


def _course(run: Findings) -> list[tuple[str, str]]:
    """What training writes down after each epoch, as far as it does."""

    def points(name: str) -> list[Point]:
        return [(e.epoch, getattr(e, name)) for e in run.epochs if getattr(e, name) is not None]

    losses = [("training", points("train_loss")), ("held out", points("val_loss"))]
    errors = [("training", points("train_error")), ("held out", points("val_error"))]
    layers = list(run.epochs[0].alive or {}) if run.epochs else []
    alive = [(name, [(e.epoch, e.alive[name][1]) for e in run.epochs if e.alive]) for name in layers[: figures.COLOURS]]
    found = [
        ("Loss", figures.course("Loss", losses)),
        ("Error, %", figures.course("Error in %", errors)),
        ("β, the weight of the KL", figures.course("β, the weight of the KL", [("β", points("beta"))])),
        ("Zeros, % of the weights", figures.course("Zeros in % of the weights", [("sparsity", points("sparsity"))])),
        ("Units alive", figures.course("Units alive", alive, log=True)),
    ]
    return [(caption, drawing) for caption, drawing in found if drawing]


def _comparison(runs: Sequence[Findings], markup: Any) -> dict[str, Any]:
    """A row for each number, a column for each run."""

    def row(name: str, cell: Any) -> tuple[str, list[str]]:
        return name, [cell(run) for run in runs]

    def formatted(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    def fact(name: str) -> tuple[str, list[str]]:
        return row(name, lambda run: run.facts.get(name, "–"))

    rows = [
        fact("network"),
        fact("data"),
        row("weights kept", lambda run: f"{run.summary.kept:,}"),
        row("times fewer", lambda run: times(run.summary.ratio)),
        row("times smaller as a whole", lambda run: times(run.summary.whole_ratio)),
        row("bytes, lossless", lambda run: formatted(run.bytes, "{:,}")),
        row("test error", lambda run: formatted(run.error, "{:.2f} %")),
        row("the same before pruning", lambda run: formatted(run.error_before, "{:.2f} %")),
        row("units left", lambda run: run.units.rpartition(" ")[2] if run.units else "–"),
        row("multiply-adds, compacted", lambda run: f"{run.multiply_adds[1]:,}" if run.multiply_adds else "–"),
        row("threshold", lambda run: "–" if run.threshold is None else wording.number(run.threshold)),
        row("β at the end", lambda run: formatted(run.epochs[-1].beta, "{:.3g}") if run.epochs else "–"),
        fact("budget"),
        fact("training"),
    ]
    rows = [(name, cells) for name, cells in rows if set(cells) != {"–"}]
    return {"rows": rows, "sentence": wording.best_of(runs), "figure": markup(figures.comparison(runs))}
