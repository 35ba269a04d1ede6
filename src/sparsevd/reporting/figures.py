"""The figures of a report, each a drawing with a title and a sentence for those who do not see it.

All are 360 units wide: on a phone one unit is one pixel, and the letters are as large as the page's.
"""

import math
from collections.abc import Sequence

from sparsevd.reporting import bitmap
from sparsevd.reporting.findings import Example, Findings, Inputs, LogAlpha, Mask, TradeOff
from sparsevd.reporting.summary import LayerSummary
from sparsevd.reporting.svg import Drawing, Point, Scale, padded, short
from sparsevd.reporting.wording import number, percent

WIDTH = 360
LEFT, RIGHT = 46, WIDTH - 10
MOST_BARS = 40
COLOURS = 6  # classes series-0 … of the style sheet
Series = tuple[str, list[Point]]


def layers(rows: Sequence[LayerSummary]) -> str:
    """What is kept of each layer: a bar for its share of all that is kept, and how much of the layer that is."""
    shown = sorted(rows, key=lambda row: -row.kept)[:MOST_BARS]
    shown = [row for row in rows if row in shown]
    total = sum(row.kept for row in rows) or 1
    drawing = Drawing(WIDTH, 34 * len(shown) + 4)
    widest = max(row.kept for row in shown) or 1
    for i, row in enumerate(shown):
        y = 34 * i
        kept = f"{row.kept:,} of {row.weights:,}"
        drawing.label((0, y + 13), _cut(row.name or "(model)", 24), "strong")
        drawing.label((WIDTH, y + 13), f"{kept} · {percent(row.kept / total)}", "quiet", "end")
        drawing.bar((0, y + 18), WIDTH, 9, "track")
        hint = f"{row.name}: {kept} weights, {percent(row.kept / total)} of all that is kept"
        drawing.bar((0, y + 18), WIDTH * row.kept / widest, 9, "series-0", hint)
    described = "; ".join(f"{row.name}: {row.kept:,} of {row.weights:,}" for row in shown[:12])
    return drawing.text("Kept weights of each layer", f"Kept weights: {described}")


def log_alpha(found: LogAlpha) -> str:
    """How the weights of one layer lie about the threshold."""
    drawing = Drawing(WIDTH, 190)
    top, bottom = 22, 146
    x = Scale(float(found.edges[0]), float(found.edges[-1]), LEFT, RIGHT)
    counts, starts = found.counts, found.edges[:-1]
    kept = starts < found.threshold - 1e-9
    most = int(counts.max()) or 1
    log = bool(counts[kept].any() and counts[~kept].any()) and max(counts[kept].max(), 1) * 20 < most
    y = Scale(0.6 if log else 0.0, most * 1.08, bottom, top, log=log)
    drawing.left_axis(y, LEFT, RIGHT, 4)
    for count, start, end, is_kept in zip(counts, starts, found.edges[1:], kept, strict=True):
        if count:
            hint = f"log α from {start:.1f} to {end:.1f}: {count:,} weights {'kept' if is_kept else 'dropped'}"
            place = x(float(start)) + 0.5, y(float(count))
            drawing.bar(place, x(end) - x(start) - 1, bottom - place[1], "series-0" if is_kept else "dropped", hint)
    if math.isfinite(found.threshold):
        at = x(found.threshold)
        drawing.line((at, top - 8), (at, bottom), "mark")
        drawing.label((at, top - 12), f"threshold {number(found.threshold)}", "mark-text", "middle")
    drawing.bottom_axis(x, bottom, f"log α of the weights of {_cut(found.layer, 24)}{', log scale' if log else ''}")
    below, above = int(counts[kept].sum()), int(counts[~kept].sum())
    gone = f", {found.gone:,} were dropped in training and have no log α" if found.gone else ""
    return drawing.text(
        f"log α in {found.layer}",
        f"{below:,} weights are below the threshold of {number(found.threshold)}, {above:,} above{gone}",
    )


def course(title: str, series: Sequence[Series], *, log: bool = False, axis: str = "epoch") -> str:
    """Lines over epochs, each with its name at its end or, if they are several, in a line above."""
    drawn = [(name, [p for p in points if math.isfinite(p[1]) and (p[1] > 0 or not log)]) for name, points in series]
    drawn = [(name, points) for name, points in drawn if points]
    drawing = Drawing(WIDTH, 190)
    if not drawn:
        return ""
    top, bottom = 24, 146
    values = [value for _, points in drawn for _, value in points]
    low, high = padded(values)
    if log:
        low, high = min(values) * 0.85, max(values) * 1.15
    elif min(values) >= 0 and min(values) < 0.75 * max(values):
        low = 0.0
    last = max(place for _, points in drawn for place, _ in points)
    first = min(place for _, points in drawn for place, _ in points)
    x, y = Scale(first, max(last, first + 1), LEFT, RIGHT), Scale(low, high, bottom, top, log=log)
    drawing.left_axis(y, LEFT, RIGHT, 4)
    texts = {tick: short(tick) for tick in x.ticks(7) if float(tick).is_integer()}
    drawing.bottom_axis(x, bottom, axis, texts)
    place = float(LEFT)
    for i, (name, points) in enumerate(drawn):
        style = f"series-{i % COLOURS}"
        drawing.path([(x(at), y(value)) for at, value in points], style)
        drawing.dot((x(points[-1][0]), y(points[-1][1])), 3, style, f"{name}: {points[-1][1]:.4g}")
        if len(drawn) > 1:
            drawing.bar((place, 3), 9, 9, style)
            drawing.label((place + 13, 12), _cut(name, 14), "quiet")
            place += 24 + 6.6 * min(len(name), 14)
    ends = "; ".join(f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in drawn)
    return drawing.text(title, ends)


def thresholds(found: TradeOff) -> str:
    """Error above, bytes below, over the threshold; the run's own is marked."""
    drawing = Drawing(WIDTH, 330)
    points, own = found.points, found.points[found.chosen]
    x = Scale(*padded([point.threshold for point in points], 0.03), LEFT, RIGHT)
    middle, bottom = 134, 286
    measure = "error, %" if found.is_error else "loss"
    # What went wrong altogether would flatten all the rest: it leaves the frame above.
    highest = max(p.score for p in points if p.score <= max(2.5 * own.score, own.score + 1.0))
    errors = Scale(*padded([min(p.score for p in points), highest], 0.15), middle, 24)
    drawing.label((LEFT, 14), measure, "quiet")
    drawing.left_axis(errors, LEFT, RIGHT, 4)
    _marked(drawing, [(x(p.threshold), max(18.0, errors(p.score))) for p in points], found, "series-1", 24.0)
    sizes = [(p.threshold, float(p.bytes if p.bytes is not None else p.kept)) for p in points]
    unit = "bytes of the file" if points[0].bytes is not None else "kept weights"
    drawing.label((LEFT, 166), unit, "quiet")
    y = Scale(0.0, 1.08 * max(value for _, value in sizes), bottom, 176)
    drawing.left_axis(y, LEFT, RIGHT, 4)
    _marked(drawing, [(x(at), y(value)) for at, value in sizes], found, "series-0", 0.0)
    drawing.line((x(own.threshold), 22), (x(own.threshold), bottom), "mark")
    drawing.bottom_axis(x, bottom, "threshold of log α")
    size = f"{own.bytes:,} bytes" if own.bytes is not None else f"{own.kept:,} weights"
    return drawing.text(
        "What the threshold costs and saves",
        f"At the chosen threshold {own.threshold:.3g}: {measure.rstrip(' %')} {own.score:.4g}, {size}, "
        f"measured on {found.measured_on}",
    )


def _marked(drawing: Drawing, places: list[Point], found: TradeOff, style: str, top: float) -> None:
    drawing.path(places, style)
    for i, (place, point) in enumerate(zip(places, found.points, strict=True)):
        if place[1] < top:
            continue  # outside the frame
        score = f"error {point.score:.2f} %" if found.is_error else f"loss {point.score:.4g}"
        size = f", {point.bytes:,} bytes" if point.bytes is not None else ""
        hint = f"threshold {point.threshold:.2f}: {point.kept:,} weights{size}, {score}"
        drawing.dot(place, 5.5 if i == found.chosen else 2.6, "chosen" if i == found.chosen else style, hint)


def comparison(runs: Sequence[Findings]) -> str:
    """Every run's curve of bytes and error, and where it cut."""
    drawing = Drawing(WIDTH, 250 + 18 * len(runs))
    curves = [run.trade_off for run in runs if run.trade_off and run.trade_off.is_error and run.trade_off.points]
    sized = all(point.bytes is not None for curve in curves for point in curve.points)
    chosen = [curve.points[curve.chosen] for curve in curves]
    if len(curves) < 2:
        return ""
    limit = max(max(2.0 * point.score, point.score + 0.8) for point in chosen)
    near = [[p for p in curve.points if p.score <= limit] for curve in curves]
    size = [[float(p.bytes or 0) if sized else float(p.kept) for p in points] for points in near]
    x = Scale(0.85 * min(map(min, size)), 1.15 * max(map(max, size)), LEFT, RIGHT, log=True)
    y = Scale(*padded([p.score for points in near for p in points], 0.1), 196, 24)
    drawing.label((LEFT, 14), "error, %", "quiet")
    drawing.left_axis(y, LEFT, RIGHT, 5)
    drawing.bottom_axis(x, 196, f"{'bytes of the file' if sized else 'kept weights'}, log scale")
    names = [run.name for run in runs if run.trade_off in curves]
    for i, (name, curve, points, sizes) in enumerate(zip(names, curves, near, size, strict=True)):
        style, own = f"series-{i % COLOURS}", curve.points[curve.chosen]
        drawing.path([(x(s), y(p.score)) for s, p in zip(sizes, points, strict=True)], style)
        for s, p in zip(sizes, points, strict=True):
            hint = f"{name}, threshold {p.threshold:.2f}: {p.kept:,} weights, error {p.score:.2f} %"
            drawing.dot((x(s), y(p.score)), 6 if p is own else 2.4, style, hint)
        drawing.bar((LEFT, 240 + 18 * i), 10, 10, style)
        at = f"{own.bytes:,} bytes" if own.bytes is not None else f"{own.kept:,} weights"
        drawing.label((LEFT + 16, 249 + 18 * i), f"{_cut(name, 16)}: {at} at {own.score:.2f} %", "quiet")
    ends = "; ".join(f"{n}: {c.points[c.chosen].score:.2f} %" for n, c in zip(names, curves, strict=True))
    return drawing.text("Error and size of every run", f"Each line is a run at several thresholds. Chosen: {ends}")


def mask(found: Mask) -> str:
    """Where the kept weights of a layer are."""
    tallest = 260.0
    width = min(float(WIDTH), max(tallest / found.aspect, 30.0))
    height = min(max(width * found.aspect, 14.0), tallest)
    drawing = Drawing(WIDTH, height + 22)
    drawing.bar((0, 0), width, height, "paper")
    drawing.image((0, 0), width, height, bitmap.density(found.shares))
    drawing.label((0, height + 15), found.caption, "quiet")
    share = percent(float(found.shares.mean()))
    return drawing.text(f"Kept weights of {found.layer}", f"{found.caption}; {share} of the area is filled")


def inputs(found: Inputs) -> str:
    """Which pixels are still read: the darker, the more weights."""
    height, width = found.counts.shape
    side = 200.0
    drawing = Drawing(WIDTH, side * height / width + 22)
    across = side
    drawing.bar((0, 0), across, side * height / width, "paper")
    shares = found.counts / max(1.0, float(found.counts.max()))
    drawing.image((0, 0), across, side * height / width, bitmap.density(shares))
    most = f"the darkest is read by {int(found.counts.max())} weights"
    drawing.label((0, side * height / width + 15), f"{found.read:,} of {found.of:,} inputs; {most}", "quiet")
    return drawing.text(
        "The inputs still read",
        f"{found.read:,} of {found.of:,} inputs have a weight in {found.layer} that is kept; {most}",
    )


def example(found: Example) -> str:
    """One input as an image."""
    assert found.image is not None
    _, height, width = found.image.shape
    drawing = Drawing(84, 84 * height / width)
    drawing.image((0, 0), 84, 84 * height / width, bitmap.picture(found.image))
    return drawing.text(
        f"Example {found.index}", f"It is class {found.label}; predicted {found.before} before and {found.after} after"
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
