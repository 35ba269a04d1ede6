"""Which numbers of a network can matter at all, from its graph: those of a unit that nothing reads cannot.

Backwards through the graph, each value gets a mask of its elements (without the batch axis) that may reach an output.
What is not known in detail counts as needing everything.

This is not the analysis of `units` seen from behind. A unit there is an index along one axis, and it may go only if all
that it is joined to goes; here each number has its own answer (a pixel behind a flatten may be read where its
neighbours are not), and nothing need go together, since a zero takes no room in a file. What is written depends on
it, so it must not change with what compaction learns. Both take what an operation is from `operations`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsevd.graph import Graph, Node
from sparsevd.graph.operations import ARITHMETIC, POINTWISE


def relevant(graph: Graph) -> dict[str, Tensor]:
    """For every constant, where its numbers can matter."""
    device = graph.device
    # The sizes of a value for one example of the batch; values that mix examples are not looked into.
    shapes = {
        node.name: node.shape[1:]
        for node in graph.nodes
        if node.shape[:1] == (-1,) and min(node.shape[1:], default=0) >= 0
    }
    sizes = shapes | {name: tuple(tensor.shape) for name, tensor in graph.constants.items()}
    needed = {
        name: torch.ones(shapes[name], dtype=torch.bool, device=device) for name in graph.outputs if name in shapes
    }
    for node in reversed(graph.nodes):
        if node.name in shapes and node.name not in needed:  # nothing reads it
            needed[node.name] = torch.zeros(shapes[node.name], dtype=torch.bool, device=device)
        rule = _RULES.get(node.op) if node.name in shapes else None
        masks = rule(node, needed[node.name], graph, shapes) if rule else None
        for i, name in enumerate(node.inputs):
            mask = masks[i] if masks is not None else None
            if name not in sizes:
                continue
            if mask is None:
                needed[name] = torch.ones(sizes[name], dtype=torch.bool, device=device)
            else:
                needed[name] = needed[name] | mask if name in needed else mask.expand(sizes[name])
        needed.pop(node.name, None)  # all who read it have been seen
    return {
        name: needed.get(name, torch.zeros(tensor.shape, dtype=torch.bool, device=device))
        for name, tensor in graph.constants.items()
    }


_Masks = Sequence[Tensor | None] | None
_Rule = Callable[[Node, Tensor, Graph, dict[str, tuple[int, ...]]], _Masks]


def _units(wanted: Tensor, axis: int) -> Tensor:
    """Which units are wanted anywhere."""
    return wanted.movedim(axis, 0).flatten(1).any(dim=1) if wanted.ndim > 1 else wanted


def _spread(units: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """Each unit's mask in all its places."""
    view = [1] * len(shape)
    view[axis] = len(units)
    return units.view(view).expand(shape)


def _linear(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    source, weight = node.inputs[:2]
    if source not in shapes or weight not in graph.constants or wanted.ndim < 1:
        return None
    units = _units(wanted, -1)
    reads = units.unsqueeze(1) & (graph.constants[weight] != 0)
    masks = (_spread(reads.any(dim=0), shapes[source], -1), units.unsqueeze(1).expand(reads.shape), units)
    return masks[: len(node.inputs)]


def _conv(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    source, weight = node.inputs[:2]
    if source not in shapes or weight not in graph.constants:
        return None
    kernel = graph.constants[weight]
    units = _units(wanted, 0)
    rows = units.view(-1, *[1] * (kernel.ndim - 1))
    channels = None
    if node.integer("groups") == 1:
        reads = (rows & (kernel != 0)).transpose(0, 1).flatten(1).any(dim=1)
        channels = _spread(reads, shapes[source], 0)
    masks = (channels, rows.expand(kernel.shape), units)
    return masks[: len(node.inputs)]


def _batch_norm(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    return [wanted, *[_units(wanted, 0)] * 4] if all(name in graph.constants for name in node.inputs[1:]) else None


def _pool(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    source = node.inputs[0]
    return [_spread(_units(wanted, 0), shapes[source], 0)] if source in shapes else None


def _reshape(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    source = node.inputs[0]
    if source not in shapes or wanted.numel() != math.prod(shapes[source]):
        return None
    return [wanted.reshape(shapes[source])]


def _elementwise(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    same = [name in shapes and shapes[name] == tuple(wanted.shape) for name in node.inputs]
    return [wanted if is_same else None for is_same in same]


def _concat(node: Node, wanted: Tensor, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> _Masks:
    axis = node.integer("axis")
    if axis < 1 or any(name not in shapes for name in node.inputs):
        return None
    return torch.split(wanted, [shapes[name][axis - 1] for name in node.inputs], dim=axis - 1)


_RULES: dict[str, _Rule] = {
    "linear": _linear,
    "conv": _conv,
    "batch_norm": _batch_norm,
    "max_pool": _pool,
    "avg_pool": _pool,
    "reshape": _reshape,
    "concat": _concat,
    **dict.fromkeys((*POINTWISE, *ARITHMETIC), _elementwise),
}
