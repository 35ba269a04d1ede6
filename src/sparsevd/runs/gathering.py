"""All that a report shows of one run, read from its folder and measured on its data.

What cannot be read or measured is left out, and `missing` says so in a sentence: a folder that was carried to another
machine, without the data or the user's own code, still has a page.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd.conversion import prune
from sparsevd.errors import CheckpointError, SparseVDError
from sparsevd.graph import Graph, capture
from sparsevd.graph.compaction import compact
from sparsevd.posterior import equations
from sparsevd.posterior.posterior import DROPPED_LOG_SIGMA2
from sparsevd.reporting.findings import Findings, Inputs, LogAlpha, Mask, Time, TradeOff
from sparsevd.runs import trade_off
from sparsevd.runs.run import PRETRAIN, Restored, Run
from sparsevd.runs.sources import Sources
from sparsevd.training.folder import CHECKPOINT
from sparsevd.zoo import models

BIN = 0.5  # of log α
FURTHEST = 14.0  # from the threshold: what lies beyond is counted in the last bin
MOST_POINTS = 800  # of a mask, in height and width
MOST_FILTERS = 64  # are drawn one by one


def gather(run: Run, *, time: bool = False, say: Callable[[str], None] = print) -> Findings:
    """Read and measure. Only a folder that holds no run is an error."""
    check(run)
    say(f"{run.path}: reading")
    noisy, summary = run.noisy(), run.summary()
    thresholds = {threshold for *_, threshold in noisy.values()}
    found = Findings(
        name=run.path.name or str(run.path),
        path=str(run.path),
        summary=summary,
        threshold=max(thresholds) if thresholds else None,
        finished=run.is_finished(),
        epochs=list(run.history()),
        dense_bytes=4 * summary.parameters,
    )
    if len(thresholds) > 1:
        found.missing.append("The layers have thresholds of their own; where one is named, it is the highest.")
    _say_where_from(found, run)
    found.log_alpha = [_log_alpha(name, *each) for name, each in noisy.items()]
    tensors = {name: equations.pruned(*each) for name, each in noisy.items()} or _plain(run)
    found.masks = [_mask(name, tensor) for name, tensor in tensors.items()]
    if not noisy:
        found.missing.append("It is a plain network: it has no log α, and nothing to move a threshold over.")
    restored, graph = _network(found, run)
    if restored is not None:
        found.inputs = _inputs(restored.example, tensors)
        with _part(found, "the size of its file"):
            found.bytes = trade_off.packed_size(restored.network, graph)
    _measure(found, run, graph, bool(noisy), say)
    if time and restored is not None:
        with _part(found, "how fast it is"):
            say(f"{run.path}: timing")
            found.times = _times(restored)
    return found


def check(run: Run) -> None:
    """Refuse a folder that holds no run."""
    if run.file.is_file():
        return
    if (run.path / PRETRAIN / CHECKPOINT).is_file():
        raise CheckpointError(
            f"{run.path} is still in its pre-training; there is nothing to report before that is over"
        )
    if not run.path.exists():
        raise CheckpointError(f"{run.path} does not exist; give the folder of a run, as sparsevd train makes it")
    raise CheckpointError(f"{run.path} holds no run: it has no {CHECKPOINT}; give the folder that training wrote to")


@contextmanager
def _part(found: Findings, what: str, *more: type[Exception]) -> Iterator[None]:
    """What cannot be had is a sentence on the page."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (SparseVDError, *more)):
            raise
        text = str(error).strip() or type(error).__name__
        found.missing.append(f"Not shown: {what}: {text.removesuffix('.')}.")


def _say_where_from(found: Findings, run: Run) -> None:
    """What the folder says of the run, each of it only if it is of the kind that training writes."""
    said = run.said
    asked = said.get("asked") if isinstance(said.get("asked"), dict) else {}
    versions, machine = said.get("versions"), said.get("machine")
    with _part(found, "which network and data it is of"):
        found.facts["network"], found.facts["data"] = run.model_name or "", run.data_name or ""
    texts = {
        "command": said.get("command"),
        "begun": said.get("begun"),
        "finished": said.get("finished"),
        "first weights": asked.get("init_from") if isinstance(asked, dict) else None,
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else None,
        "machine": ", ".join(str(machine[k]) for k in ("processor", "vectors") if k in machine)
        if isinstance(machine, dict)
        else None,
    }
    found.facts |= {name: text for name, text in texts.items() if isinstance(text, str)}
    if isinstance(asked, dict) and asked.get("pretrain_epochs"):
        found.facts["pre-training"] = f"{asked['pretrain_epochs']} epochs"
    budget = said.get("budget")
    if isinstance(budget, dict):
        limits = [f"{name.replace('_', ' ')} {value}" for name, value in budget.items() if value is not None]
        found.facts["budget"] = ", ".join(limits)
    if found.epochs:
        minutes = sum(each.seconds for each in found.epochs) / 60
        found.facts["training"] = f"{len(found.epochs):,} epochs in {minutes:.1f} min"
    found.facts = {name: text for name, text in found.facts.items() if text}
    found.error, found.error_before = (_number(said.get(key)) for key in ("test_error", "test_error_before_pruning"))
    found.paper = models.PAPER.get((found.facts.get("network", ""), found.facts.get("data", "")))
    remarks = said.get("remarks")
    if isinstance(remarks, list):
        found.remarks = [remark for remark in remarks if isinstance(remark, str)]
    else:
        found.remarks = found.summary.remarks
        if found.epochs:
            found.missing.append("What was remarked while it trained: only sparsevd train keeps that in its folder.")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _plain(run: Run) -> dict[str, Tensor]:
    """The weights of a plain network by layer."""
    tensors = run.pruned_tensors()
    return {name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith("weight") and t.ndim > 1}


def _network(found: Findings, run: Run) -> tuple[Restored | None, Graph | None]:
    """The pruned network and its graph, as far as they can be had, and what compaction makes of them."""
    restored: Restored | None = None
    with _part(found, "units, bytes, and what needs the network itself", ImportError):
        restored = run.network()
        graph = restored.graph or capture(restored.network, restored.example)
        compaction = compact(graph, restored.example).compaction
        assert not isinstance(compaction, Tensor | nn.Module)
        found.units = compaction.units
        found.multiply_adds = compaction.cost_before.dense, compaction.cost_after.dense
        return restored, graph
    return restored, None


@torch.no_grad()
def _log_alpha(layer: str, theta: Tensor, log_sigma2: Tensor, threshold: float) -> LogAlpha:
    there = (theta != 0) | (log_sigma2 > DROPPED_LOG_SIGMA2 + 1)
    values = equations.log_alpha(theta, log_sigma2)[there].float()
    centre = threshold if math.isfinite(threshold) else 3.0
    near = values.clamp(centre - FURTHEST, centre + FURTHEST).numpy()
    low, high = (float(near.min()), float(near.max())) if len(near) else (centre, centre)
    first = centre - BIN * math.ceil((centre - min(low, centre - 1)) / BIN)  # the threshold is an edge
    count = max(1, math.ceil((max(high, centre + 1) - first) / BIN))
    edges = first + BIN * np.arange(count + 1)
    counts, _ = np.histogram(np.clip(near, edges[0], edges[-1]), edges)
    return LogAlpha(layer, edges, counts, int((~there).sum()), threshold)


@torch.no_grad()
def _mask(layer: str, weight: Tensor) -> Mask:
    """Units by inputs; of filters each one by itself if they are few, else how much of each is kept."""
    kept = (weight != 0).float()
    if kept.ndim < 2:
        kept = kept[None]
    units, inputs = kept.shape[:2]
    if kept.ndim == 4 and units * inputs <= MOST_FILTERS and kept[0, 0].numel() > 1:
        tiles, size = _tiles(kept), "×".join(map(str, kept.shape[2:]))
        return Mask(layer, tiles, tiles.shape[0] / tiles.shape[1], f"{units * inputs} filters of {size} weights")
    caption = f"{units:,} units (down) × {inputs:,} inputs (across)"
    if kept.ndim > 2:
        kept, caption = kept.flatten(2).mean(2), f"{caption}; {math.prod(weight.shape[2:])} weights to a point"
    block = [math.ceil(size / MOST_POINTS) for size in kept.shape]
    if max(block) > 1:
        kept = nn.functional.avg_pool2d(kept[None, None], block, ceil_mode=True)[0, 0]
        caption = f"{caption}, {block[0]}×{block[1]} together"
    return Mask(layer, kept.numpy(), units / inputs, caption)


def _tiles(kept: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Filters in rows, an empty line between them."""
    filters = nn.functional.pad(kept.flatten(0, 1), (0, 1, 0, 1))  # (n, h + 1, w + 1)
    across = min(len(filters), 10)
    down = math.ceil(len(filters) / across)
    filters = torch.cat([filters, filters.new_zeros(across * down - len(filters), *filters.shape[1:])])
    height, width = filters.shape[1:]
    grid = filters.reshape(down, across, height, width).transpose(1, 2).reshape(down * height, across * width)
    return grid[:-1, :-1].numpy()


def _inputs(example: object, tensors: dict[str, Tensor]) -> Inputs | None:
    """For an image that the first layer reads pixel by pixel: how many kept weights each pixel has."""
    if not isinstance(example, Tensor) or example.ndim != 4 or not tensors:
        return None
    layer, weight = next(iter(tensors.items()))
    if weight.ndim != 2 or weight.shape[1] != example[0].numel():
        return None
    counts = (weight != 0).sum(0)
    pixels = counts.reshape(example.shape[1:]).sum(0)
    return Inputs(layer, pixels.double().numpy(), int((counts > 0).sum()), len(counts))


def _measure(found: Findings, run: Run, graph: Graph | None, noisy: bool, say: Callable[[str], None]) -> None:
    """What needs the data: the curve of thresholds, and the examples whose prediction changed."""
    what = "what was measured on data: the curve of thresholds and the changed predictions"
    with _part(found, what, Exception):  # the user's own code may raise anything
        data = run.data()
        model = run.model(data.classes)
        if noisy:
            found.trade_off = _trade_off(run, model, data, graph, say)
            if found.trade_off is not None and found.bytes is None:  # the network itself could not be had without data
                found.bytes = found.trade_off.points[found.trade_off.chosen].bytes
        reference = run.dense(data.classes)
        if data.test is None or (reference is None and not noisy):
            return
        network, described = reference or (prune(model, threshold=math.inf), "the same network before pruning")
        sample = trade_off.sample(data.test, "test examples", False, 2, graph)
        pruned = prune(model) if noisy else model
        found.changes = trade_off.changes(pruned, network, described, reference is not None, sample)


def _trade_off(
    run: Run, model: nn.Module, data: Sources, graph: Graph | None, say: Callable[[str], None]
) -> TradeOff | None:
    held_out = run.held_out(data)
    if held_out is None and data.test is None:
        return None
    networks = trade_off.NETWORKS
    if held_out is not None:
        sample = trade_off.sample(held_out, "held-out examples", True, networks, graph)
    else:
        assert data.test is not None
        sample = trade_off.sample(data.test, "test examples", False, networks, graph)
    return trade_off.trade_off(model, sample, graph, say)


def _times(restored: Restored) -> list[Time]:
    from sparsevd.runs.benchmark import bench

    measured = bench(restored.network, restored.example, batches=(1, 64), threads=(1,), compiler=False)
    return [Time(m.way, m.batch, 1e3 * m.timing.median, m.times_faster) for m in measured.measurements]
