"""Fewer units: the same function as a smaller network.

A pruned network has units that nothing reads and units that are always the same. `compact` removes them, and folds
what the latter add into the biases behind them. That is exact arithmetic on the graph, not a choice by importance, so
it is done here. torch-pruning, the library for structured pruning, was tried: it finds which channels depend on each
other, but looks at no values. Taking a constant unit out with it changes the outputs, and a layer that lost every unit
it will not remove. Folding needs the graph, and with the graph the dependencies are the smaller part.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsevd.errors import GraphError
from sparsevd.graph import Graph, capture, cost, to_module
from sparsevd.graph.norms import fold_batch_norms
from sparsevd.graph.outputs import parts
from sparsevd.graph.removal import merge_constants, needed, without_units
from sparsevd.graph.units import Analysis, Read

TOLERANCE = 1e-5  # of the largest output
# Each pass may free a layer more, from the last to the first. A pass takes a microsecond for each unit and a
# millisecond for each node; after so many of both the graph stays as it is by then, which is right at any time.
MOST_WORK = 1 << 25
_NODE_WORK = 1 << 10  # units that take as long as a node

_LAYERS = ("linear", "conv", "conv_transpose", "embedding")


@dataclass(frozen=True)
class LayerCompaction:
    """One layer: its units before and after, and why dead units stayed (reason → how many)."""

    name: str
    before: int
    after: int
    stayed: dict[str, int]


@dataclass(frozen=True)
class Compaction:
    """What compaction did. `unread` has for each input how many of its channels or pixels no weight reads, of how many.

    `note` is empty, or says why the network was left as it was.
    """

    layers: tuple[LayerCompaction, ...]
    unread: dict[str, tuple[int, int]]
    cost_before: cost.Cost
    cost_after: cost.Cost
    note: str = ""

    @property
    def units(self) -> str:
        """Like 300-100-10 → 120-47-10."""
        before, after = ("-".join(str(getattr(layer, when)) for layer in self.layers) for when in ("before", "after"))
        return f"{before} → {after}"

    def __str__(self) -> str:
        lines = [f"units: {self.units}"]
        lines += [
            f"input {name}: {unread:,} of {size:,} read by no weight" for name, (unread, size) in self.unread.items()
        ]
        dense, now = self.cost_before, self.cost_after
        times = f" ({dense.dense / now.dense:.1f}× fewer)" if now.dense else ""
        lines.append(
            f"multiply-adds: {dense.dense:,} dense, {dense.nonzero:,} without zeros, {now.dense:,} compacted{times}"
        )
        lines.append(f"bytes of all tensors: {dense.bytes:,} → {now.bytes:,}")
        for layer in self.layers:
            lines += [f"{layer.name}: {count} dead units stay: {reason}" for reason, count in layer.stayed.items()]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def compact(pruned: nn.Module | Graph, example: Tensor | tuple[Tensor, ...]) -> nn.Module:
    """A plain torch network of the same function with fewer units.

        small = sparsevd.compact(pruned, torch.zeros(1, 1, 28, 28))
        print(small.compaction)    # units per layer, multiply-adds, what stayed and why

    Units with only zero weights behind them are removed; units with only zero weights before them are constants, and
    are folded into the biases behind them where that is exact. Before a convolution that pads with zeros it is not, and
    such units become one. Batch norms are folded into the layer before them. The outputs on `example` agree to 1e-5 of
    the largest, or the network comes back as it was, with the reason in `compaction.note`. The given network is left
    alone.

    Args:
        pruned: a plain network, as `sparsevd.prune` returns it, or its graph.
        example: an input with the batch as its first axis; a tuple for several inputs.
    """
    graph = capture(pruned, example)
    examples = example if isinstance(example, tuple) else (example,)
    small, report = compact_graph(graph)
    difference = _difference(graph, small, examples)
    if not difference <= TOLERANCE:
        note = f"left as it was: compacted outputs would differ by {difference:.1e} of the largest"
        small, report = graph, _report(graph.to("cpu"), graph.to("cpu"), note)
    module = to_module(small)
    module.compaction = report  # type: ignore[assignment]
    return module


def compact_graph(graph: Graph) -> tuple[Graph, Compaction]:
    """The graph with fewer units, and what was done. Pure: computes nothing but constants."""
    device, graph = graph.device, graph.to("cpu")  # where all types are, and small tensors are quick
    small, work, note = needed(graph), 0, ""
    while True:
        merged = merge_constants(Analysis(fold_batch_norms(small)))
        analysis = Analysis(merged)
        smaller = without_units(analysis)
        if _size(smaller) == _size(small):
            break
        small = smaller
        work += analysis.count + _NODE_WORK * len(small.nodes)
        if work > MOST_WORK:
            note = "not all that could go is gone: each pass over this network finds a little more, and they take long"
            break
    small = small.check()
    return small.to(device), _report(graph, small, note)


def _size(graph: Graph) -> tuple[int, int, int]:
    """Each pass makes this smaller, or there is nothing more to do."""
    constants = sum(tensor.numel() for tensor in graph.constants.values())
    computed = sum(node.op != "expand" for node in graph.nodes)
    return constants, computed, len(graph.nodes)


def _difference(graph: Graph, small: Graph, examples: tuple[Tensor, ...]) -> float:
    """The largest difference, relative to the largest output."""
    outputs = ([tensor.cpu().double() for tensor in parts(each(*examples))[1]] for each in (small, graph))
    ratios = [
        ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()
        for one, other in zip(*outputs, strict=True)
        if other.numel()
    ]
    return max(ratios, default=0.0)


def _report(graph: Graph, small: Graph, note: str = "") -> Compaction:
    analysis = Analysis(small)
    after = {node.name: node for node in small.nodes}
    reads: dict[str, list[Read]] = defaultdict(list)
    for read in analysis.reads:
        reads[read.value].append(read)
    readers = Counter(name for node in small.nodes for name in set(node.inputs))
    outputs = set(small.outputs)
    layers = []
    for node in graph.nodes:
        if node.op not in _LAYERS:
            continue
        now = after.get(node.name)
        axis = len(node.shape) - 1 if node.op in ("linear", "embedding") else 1
        alive = 0 if now is None or now.op == "expand" else now.shape[axis]
        stayed = {} if node.name in outputs else _stayed(analysis, node.name, reads[node.name], readers[node.name])
        layers.append(LayerCompaction(node.name, node.shape[axis], alive, stayed))
    return Compaction(tuple(layers), _unread(analysis), cost.cost(graph), cost.cost(small), note)


def _stayed(analysis: Analysis, name: str, reads: list[Read], readers: int) -> dict[str, int]:
    """Units of a layer that are constant or unread, and still there: why, and how many."""
    units = analysis.units.get(name)
    if units is None:
        return {}
    dead = units.known.clone()
    if reads and len(reads) == readers:
        dead |= torch.stack([read.unread for read in reads]).all(0)
    found: dict[str, int] = {}
    for reason in analysis.reasons(units.ids[dead]):
        found[reason] = found.get(reason, 0) + 1
    return found


def _unread(analysis: Analysis) -> dict[str, tuple[int, int]]:
    """For each input that only layers read, directly or in another shape, what they have no weight for."""
    found = {}
    for node in analysis.graph.inputs:
        names = {node.name}
        for other in analysis.graph.nodes:
            if other.op in ("reshape", "cast") and other.inputs[0] in names:
                names.add(other.name)
        readers = [other for other in analysis.graph.nodes if names & set(other.inputs) and other.name not in names]
        reads = [read for read in analysis.reads if read.value in names]
        sizes = {len(read.unread) for read in reads}
        if not readers:
            size = abs(node.shape[1]) if len(node.shape) > 1 else 1
            found[node.name] = (size, size)
        elif len(reads) == len(readers) and len(sizes) == 1:
            unread = torch.stack([read.unread for read in reads]).all(0)
            found[node.name] = (int(unread.sum()), len(unread))
    return found


__all__ = ["Compaction", "GraphError", "LayerCompaction", "compact", "compact_graph"]
