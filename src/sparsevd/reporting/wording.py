"""What the figures of a report say, in sentences with their numbers, and how numbers are written."""

import math
from collections.abc import Sequence

from sparsevd.reporting.findings import Changes, Findings, Point, TradeOff
from sparsevd.reporting.summary import times

LITTLE = 0.05  # of the bytes: not worth another threshold


def percent(share: float) -> str:
    """A share as a percentage of two or three digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.2g} %"


def number(value: float) -> str:
    """A number of three digits, with a minus sign and not a hyphen."""
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}".replace("-", "−")


def kilobytes(count: float) -> str:
    """Bytes as people say them; a kB has 1,000."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            value = count / limit
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{count:,.0f} bytes"


def points_of(rise: float) -> str:
    """A difference of two errors in %, with its sign."""
    return f"{rise:+.2f} points".replace("-", "−")


def largest_layer(run: Findings) -> str:
    """Which layer holds most of what is left."""
    summary = run.summary
    if not summary.kept:
        return "No layer has a weight left."
    largest = max(summary.layers, key=lambda layer: layer.kept)
    share = percent(largest.kept / summary.kept)
    text = f"{largest.name or 'The network'} holds {share} of the kept weights: {largest.kept:,} of {summary.kept:,}"
    first = max(summary.layers, key=lambda layer: layer.weights)
    if first is not largest:
        return f"{text}. Before pruning it was {first.name}, with {first.weights:,} of {summary.weights:,}."
    return f"{text}. Before pruning it held {percent(largest.weights / summary.weights)}."


def cost(run: Findings) -> str:
    """What pruning cost in error, and the whole in time."""
    parts = []
    if run.changes is not None:
        parts.append(_against(run.changes))
    elif run.error is not None and run.error_before is not None:
        rise = points_of(run.error - run.error_before)
        parts.append(f"{rise} of test error against the same network before pruning ({run.error:.2f} %).")
    else:
        parts.append("What it cost in error was not measured.")
    if "training" in run.facts:
        parts.append(f"Training took {run.facts['training']}.")
    return " ".join(parts)


def _against(changes: Changes) -> str:
    rise = points_of(changes.error - changes.reference_error)
    return (
        f"{rise}: {changes.error:.2f} % of {changes.measured_on} are wrong, and {changes.reference_error:.2f} % with "
        f"{changes.reference} ({changes.lost:,} lost, {changes.won:,} won)."
    )


def lower_threshold(found: TradeOff) -> str:
    """Whether a lower threshold would pay: the lowest that is not worse by more than the noise of measuring."""
    own = found.points[found.chosen]
    below = list(reversed(found.points[: found.chosen]))
    if not below:
        return "No lower threshold was measured."
    good: list[Point] = []
    for point in below:  # down to the first that harms
        if point.harms:
            break
        good.append(point)
    on = f"measured on {found.measured_on}"
    if not good:
        return f"No. Already threshold {number(below[0].threshold)} costs {_price(found, own, below[0])}, {on}."
    best = good[-1]
    saved = 1 - _size(best) / _size(own) if _size(own) else 0.0
    if saved < LITTLE:
        return (
            f"Hardly. Down to {number(best.threshold)} it would save {percent(saved)} of the size "
            f"for {_price(found, own, best)}, {on}."
        )
    sizes = f"{kilobytes(best.bytes)} instead of {kilobytes(own.bytes)}" if best.bytes and own.bytes else ""
    advice = "" if found.held_out else " These are the test data: before you choose by them, hold out examples to ask."
    return (
        f"Yes. Threshold {number(best.threshold)} would keep {percent(1 - best.kept / own.kept)} fewer weights"
        f"{f' ({sizes})' if sizes else ''} for {_price(found, own, best)}, which is within the noise of measuring; "
        f"{on}.{advice}"
    )


def _price(found: TradeOff, own: Point, other: Point) -> str:
    if not found.is_error:
        return f"a loss of {other.score:.4g} instead of {own.score:.4g}"
    counted = f" ({other.lost:,} examples lost, {other.won:,} won)" if other.lost is not None else ""
    return f"{points_of(other.score - own.score)}{counted}"


def _size(point: Point) -> float:
    return float(point.bytes if point.bytes is not None else point.kept)


def thresholds(found: TradeOff) -> str:
    """How far one can go down, and what `threshold="auto"` would do, if it would do anything."""
    own = found.points[found.chosen]
    harmful = next((point for point in reversed(found.points[: found.chosen]) if point.harms), None)
    text = "No threshold that was measured costs more than the noise of measuring."
    if harmful is not None:
        text = f"The first lower one that costs more than the noise of measuring is {number(harmful.threshold)}: "
        text += f"{_price(found, own, harmful)}."
    if found.auto is None or not own.kept:
        return text
    point = min(found.points, key=lambda each: abs(each.threshold - (found.auto or 0.0)))
    return (
        f'{text} prune(threshold="auto"), which asks the bound and no data, would cut at {number(found.auto)}: '
        f"{percent(1 - point.kept / own.kept)} fewer weights for {_price(found, own, point)}."
    )


def training(run: Findings) -> str:
    """How the run went, from its first epoch to its last."""
    first, last = run.epochs[0], run.epochs[-1]
    parts = [f"The loss fell from {first.train_loss:.3g} to {last.train_loss:.3g}"]
    if last.train_loss > first.train_loss:
        parts = [f"The loss rose from {first.train_loss:.3g} to {last.train_loss:.3g}"]
    if last.sparsity is not None:
        parts.append(f"β ended at {last.beta:.3g}")
        half = next((each.epoch for each in run.epochs if each.sparsity >= last.sparsity / 2), last.epoch)
        parts.append(f"{last.sparsity:.1f} % of the weights are zero, half of that by epoch {half}")
    ended = "" if run.finished else " The run is not finished: this is as far as it got."
    return f"{'; '.join(parts)}.{ended}"


def changed(found: Changes) -> str:
    total = found.lost + found.won + found.other
    if not total:
        return f"No prediction changed on {found.measured_on}, against {found.reference}."
    return (
        f"{total:,} of {found.measured_on} are predicted otherwise than by {found.reference}. Right before and wrong "
        f"now: {found.lost:,}. Wrong before and right now: {found.won:,}. Wrong in another way: {found.other:,}."
    )


def layers(run: Findings) -> str:
    """Which layer gave most, and which least."""
    known = [layer for layer in run.summary.layers if layer.weights]
    if len(known) < 2:
        return f"{percent(run.summary.kept / run.summary.weights)} of the weights are kept." if known else ""
    sparsest, densest = (pick(known, key=lambda layer: layer.kept / layer.weights) for pick in (min, max))
    return (
        f"{densest.name} is the densest, with {percent(densest.kept / densest.weights)} of its weights kept, and "
        f"{sparsest.name} the sparsest, with {percent(sparsest.kept / sparsest.weights)}."
    )


def histogram(run: Findings) -> str:
    """How clearly the weights part."""
    kept = sum(layer.kept for layer in run.summary.layers)
    low, high = (sum(layer.around[side] for layer in run.summary.layers if layer.around) for side in (0, 1))
    gone = sum(each.gone for each in run.log_alpha)
    text = f"{kept:,} weights are kept; {low:,} would be with a threshold lower by 1, {high:,} with one higher by 1."
    return text + (f" {gone:,} were dropped for good in training and are not in the figures." if gone else "")


def pictures(run: Findings) -> str:
    parts = []
    if run.inputs:
        parts.append(f"{run.inputs.read:,} of {run.inputs.of:,} inputs are still read by {run.inputs.layer}.")
    if run.units:
        parts.append(f"Without dead units the layers have {run.units} units.")
    if run.multiply_adds:
        dense, now = run.multiply_adds
        parts.append(f"Compacted, an example takes {now:,} multiply-adds instead of {dense:,}.")
    return " ".join(parts) or "Every point is a weight that is kept, or a share of several."


def headline(run: Findings) -> list[tuple[str, str, str]]:
    """The large numbers: value, what it is, and a word more."""
    summary = run.summary
    found = [(f"{summary.kept:,}", "weights kept", f"of {summary.weights:,}: {times(summary.ratio)} fewer")]
    found.append((times(summary.whole_ratio), "smaller as a whole", f"counting all {summary.parameters:,} parameters"))
    if run.bytes is not None:
        ratio = f", {run.dense_bytes / run.bytes:,.0f}× more" if run.bytes else ""
        found.append((kilobytes(run.bytes), "as a model file", f"lossless; dense {kilobytes(run.dense_bytes)}{ratio}"))
    if run.error is not None:
        paper = f"paper: {run.paper[0]:g}× at {run.paper[1]} %" if run.paper else "of the pruned network"
        found.append((f"{run.error:.2f} %", "test error", paper))
    elif run.changes is not None:
        found.append((f"{run.changes.error:.2f} %", "test error", f"of {run.changes.measured_on}"))
    elif run.trade_off is not None:
        own = run.trade_off.points[run.trade_off.chosen]
        value = f"{own.score:.2f} %" if run.trade_off.is_error else f"{own.score:.4g}"
        found.append((value, "error" if run.trade_off.is_error else "loss", f"of {run.trade_off.measured_on}"))
    fast = [each for each in run.times if each.batch == 1 and each.way == "accelerate"]
    if fast:
        found.append(
            (
                f"{fast[0].milliseconds:.3g} ms",
                "for one example",
                f"{fast[0].times_faster:.1f}× faster than dense torch",
            )
        )
    return found


def best_of(runs: Sequence[Findings]) -> str:
    """Which run is smallest, and which has the lowest error."""
    smallest = min(runs, key=lambda run: run.bytes if run.bytes is not None else run.summary.kept)
    text = f"{smallest.name} is the smallest ({times(smallest.summary.ratio)} fewer weights"
    text += f", {kilobytes(smallest.bytes)})" if smallest.bytes is not None else ")"
    known = [run for run in runs if run.error is not None]
    if not known:
        return f"{text}."
    best = min(known, key=lambda run: run.error if run.error is not None else math.inf)
    if best is smallest:
        return f"{text} and has the lowest error, {best.error:.2f} %."
    other = f" ({smallest.name}: {smallest.error:.2f} %)" if smallest.error is not None else ""
    return f"{text}; {best.name} has the lowest error, {best.error:.2f} %{other}."
