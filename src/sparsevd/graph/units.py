"""Which units of a graph can go: what is always the same, who reads whom, and what must stay together.

A unit is an index along one axis of a value: an output of a linear layer, a channel of an image. Most operations keep
units apart (activations, pooling, batch norm, additions), so a unit runs through many values; it leaves the network
only if it leaves all of them. Each value therefore has an id for each of its units, ids that must go together are
joined, and three facts are collected on the way through the graph:

- known: the unit has the same value for every input, at every position (its weights are all zero, say);
- reads: a layer reads a unit; its weights may all be zero, or a known value may be folded into its bias;
- pins: something needs the unit as it is: the network's output, a softmax over the units, and so on.

Everything is exact for finite inputs: 0 · x is taken to be 0. The graph must be on the CPU: these are many small
tensors, and doubles, which not every device has.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.graph import Graph, Node, evaluate
from sparsevd.graph.operations import ARITHMETIC, POINTWISE

# Units of all values together; each takes about a microsecond and a hundred bytes.
MOST_UNITS = 1 << 23
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Units:
    """The units of a value: their axis, their ids, which are known, and the known values (float64)."""

    axis: int
    ids: Tensor
    known: Tensor
    values: Tensor

    def only_zero(self) -> "Units":
        """Known only where the known value is zero: what padding with zeros leaves alone."""
        return Units(self.axis, self.ids, self.known & (self.values == 0), self.values)

    def unknown(self) -> "Units":
        return Units(self.axis, self.ids, torch.zeros_like(self.known), torch.zeros_like(self.values))


@dataclass(frozen=True)
class Read:
    """A layer reads the units of a value: which with zero weights only, and which it can fold into its bias."""

    reader: str
    value: str
    unread: Tensor
    foldable: Tensor


@dataclass
class Analysis:
    """What one walk over the graph finds. `removable` draws the conclusion."""

    graph: Graph
    units: dict[str, Units] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    grouped: list[Node] = field(default_factory=list)  # convolutions in groups, which must stay of equal size
    blocked: list[tuple[Tensor, str]] = field(default_factory=list)  # ids, and why they stay
    joined: list[int] = field(default_factory=list)  # a forest: id → an id it is joined to, or itself

    def __post_init__(self) -> None:
        uses = Counter(name for node in self.graph.nodes for name in set(node.inputs) if name in self.graph.constants)
        self.shared = {name for name, count in uses.items() if count > 1}
        self.shapes = {node.name: node.shape for node in self.graph.nodes}
        self.count = 0
        for node in self.graph.nodes:
            found = _RULES.get(node.op, _mixes)(self, node)
            if found is not None:
                self.units[node.name] = found
                self.count += len(found.ids)
                self.check_room(node, 0)
        for name in self.graph.outputs:
            self.pin(name, "it is the network's output")

    def check_room(self, node: Node, more: int) -> None:
        """GraphError if the units so far, and so many more, are more than is reasonable."""
        if self.count + more > MOST_UNITS:
            raise GraphError(
                f"up to {node.op} {node.name!r} there are {self.count + more:,} units, and compaction looks at "
                f"{MOST_UNITS:,} at most"
            )

    def fresh(self, axis: int, known: Tensor, values: Tensor) -> Units:
        first = len(self.joined)
        self.joined += range(first, first + len(known))
        return Units(axis, torch.arange(first, first + len(known), device=CPU), known, values)

    def find(self, identity: int) -> int:
        while self.joined[identity] != identity:
            self.joined[identity] = identity = self.joined[self.joined[identity]]
        return identity

    def roots(self, ids: Tensor) -> Tensor:
        """One id for all that are joined."""
        return torch.tensor([self.find(identity) for identity in ids.tolist()], dtype=torch.long, device=CPU)

    def join(self, first: Tensor, second: Tensor) -> None:
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            self.joined[self.find(one)] = self.find(other)

    def pin(self, value: str, reason: str) -> None:
        if value in self.units:
            self.blocked.append((self.units[value].ids, reason))

    def constant(self, name: str) -> Tensor | None:
        return self.graph.constants[name].double() if name in self.graph.constants else None

    def removable(self) -> Tensor:
        """For each id, by its root, whether it can leave the network."""
        gone = torch.ones(len(self.joined), dtype=torch.bool, device=CPU)
        for ids, _ in self.blocked:
            gone[self.roots(ids)] = False
        for read in self.reads:
            stays = ~(read.unread | read.foldable)
            gone[self.roots(self.units[read.value].ids[stays])] = False
        while sum(self._balance(node, gone) for node in self.grouped):  # all of them each time: they pull at each other
            pass
        return gone

    def _balance(self, node: Node, gone: Tensor) -> bool:
        """Groups that stay must keep equally many inputs and equally many outputs; True if that took units back."""
        groups = node.integer("groups")
        sides = [self.roots(self.units[name].ids).view(groups, -1) for name in (node.inputs[0], node.name)]
        stays = [~gone[side] for side in sides]
        alive = stays[0].any(1) | stays[1].any(1)
        changed = False
        for side, kept in zip(sides, stays, strict=True):
            target = max(1, int(kept.sum(1).max())) if alive.any() else 0
            for group in alive.nonzero().flatten().tolist():
                missing = target - int(kept[group].sum())
                if missing > 0:
                    gone[side[group][~kept[group]][:missing]] = False
                    changed = True
        return changed

    def reasons(self, ids: Tensor) -> list[str]:
        """Why each of these ids stays; an empty text where nothing keeps it."""
        return [self._reasons.get(root, "") for root in self.roots(ids).tolist()]

    @functools.cached_property
    def _reasons(self) -> dict[int, str]:
        """Of each root, the first reason."""
        found: dict[int, str] = {}
        for blocked, reason in self.blocked:
            for root in self.roots(blocked).tolist():
                found.setdefault(root, reason)
        for read in self.reads:
            units = self.units[read.value]
            inexact = units.known & ~read.unread & ~read.foldable
            for root in self.roots(units.ids[inexact]).tolist():
                found.setdefault(root, f"it is not zero, and {read.reader} pads with zeros")
            for root in self.roots(units.ids[~(read.unread | read.foldable)]).tolist():
                found.setdefault(root, f"it is joined to units that {read.reader} reads")
        for node in self.grouped:
            for name in (node.inputs[0], node.name):
                for root in self.roots(self.units[name].ids).tolist():
                    found.setdefault(root, f"the groups of {node.name} must be of equal size")
        return found


def _mixes(a: Analysis, node: Node) -> Units | None:
    """Each result depends on all units in ways of its own: they stay."""
    for name in node.inputs:
        a.pin(name, f"{node.op} {node.name} needs all of them")
    return None


def _input(a: Analysis, node: Node) -> Units | None:
    if len(node.shape) < 2:
        return None
    size = node.shape[1]
    a.check_room(node, size)
    units = a.fresh(1, *(torch.zeros(size, dtype=dtype, device=CPU) for dtype in (torch.bool, torch.double)))
    a.blocked.append((units.ids, "it is the network's input"))
    return units


def _weights(a: Analysis, node: Node, outputs: int) -> tuple[Tensor, Tensor] | None:
    """Weight and bias, if they are constants of this layer alone."""
    if any(name not in a.graph.constants or name in a.shared for name in node.inputs[1:]):
        return None
    weight, *bias = (a.graph.constants[name].double() for name in node.inputs[1:])
    return weight, bias[0] if bias else torch.zeros(outputs, dtype=torch.double, device=CPU)


def _opaque(a: Analysis, node: Node) -> Units | None:
    for name in node.inputs:
        a.pin(name, f"the weights of {node.name} are shared, computed, or in transposed groups")
    return None


def _linear(a: Analysis, node: Node) -> Units | None:
    x, axis = a.units.get(node.inputs[0]), len(node.shape) - 1
    tensors = _weights(a, node, node.shape[-1])
    if tensors is None:
        return _opaque(a, node)
    weight, bias = tensors
    if x is None or x.axis != axis:
        a.pin(node.inputs[0], f"{node.name} works along another axis")
        return a.fresh(axis, ~weight.any(1), bias)
    a.reads.append(Read(node.name, node.inputs[0], ~weight.any(0), x.known))
    known = ~weight[:, ~x.known].any(1)
    return a.fresh(axis, known, bias + weight[:, x.known] @ x.values[x.known])


def _conv(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    groups = node.integer("groups")
    tensors = _weights(a, node, node.shape[1])
    if tensors is None:
        return _opaque(a, node)
    weight, bias = tensors
    taps = weight.flatten(2).sum(2)  # of a constant image, only the sum over a filter matters
    used = weight.flatten(2).any(2)  # (outputs, inputs per group)
    if x is None or x.axis != 1:
        a.pin(node.inputs[0], f"{node.name} works along another axis")
        units = a.fresh(1, ~used.any(1), bias)
        if groups > 1:
            a.blocked.append((units.ids, f"the groups of {node.name} must be of equal size"))
        return units
    if any(node.integers("padding")):
        x = x.only_zero()
    per_group = len(bias) // groups
    inputs = weight.shape[1]
    source = (
        torch.arange(len(x.ids), device=CPU).view(groups, inputs).repeat_interleave(per_group, 0)
    )  # output → its inputs
    known = ~(used & ~x.known[source]).any(1)
    values = bias + (taps * torch.where(x.known, x.values, 0.0)[source]).sum(1)
    if groups > 1 and inputs == 1:  # depthwise: an output belongs to its input, as in batch norm
        return Units(1, x.ids.repeat_interleave(per_group), known, values)
    read_by_any = used.view(groups, per_group, inputs).any(1).flatten()
    a.reads.append(Read(node.name, node.inputs[0], ~read_by_any, x.known))
    if groups > 1:
        a.grouped.append(node)
    return a.fresh(1, known, values)


def _conv_transpose(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    tensors = _weights(a, node, node.shape[1])
    if tensors is None or node.integer("groups") != 1:
        return _opaque(a, node)
    weight, bias = tensors
    used = weight.flatten(2).any(2)  # (inputs, outputs)
    if x is None or x.axis != 1:
        a.pin(node.inputs[0], f"{node.name} works along another axis")
        return a.fresh(1, ~used.any(0), bias)
    x = x.only_zero()  # at the borders fewer taps meet
    a.reads.append(Read(node.name, node.inputs[0], ~used.any(1), x.known))
    return a.fresh(1, ~(used & ~x.known[:, None]).any(0), bias)


def _embedding(a: Analysis, node: Node) -> Units | None:
    a.pin(node.inputs[0], f"{node.name} takes them as indices")
    if _weights(a, node, 0) is None:
        return None
    table = a.graph.constants[node.inputs[1]].double()
    return a.fresh(len(node.shape) - 1, (table == table[:1]).all(0), table[0])


def _apart(a: Analysis, node: Node) -> Units | None:
    """Pointwise functions of one value: known units stay known."""
    x = a.units.get(node.inputs[0])
    if x is None:
        return None
    values = evaluate(node, [x.values], 1).double()
    known = x.known & values.isfinite()
    return Units(x.axis, x.ids, known, torch.where(known, values, 0.0))


def _per_unit(a: Analysis, node: Node) -> Units | None:
    """Batch norm and PReLU: pointwise, with tensors of one number for each unit."""
    x = a.units.get(node.inputs[0])
    tensors = [a.constant(name) for name in node.inputs[1:]]
    if x is None:
        return None
    if x.axis != 1 or any(tensor is None for tensor in tensors) or a.shared & set(node.inputs[1:]):
        return _mixes(a, node)
    values = evaluate(node, [x.values[None], *[t for t in tensors if t is not None]], 1)[0]
    known = x.known
    if node.op == "batch_norm":
        known = known | (a.graph.constants[node.inputs[3]] == 0)
        values = torch.where(x.known, values, a.graph.constants[node.inputs[4]].double())
    return Units(1, x.ids, known, torch.where(known, values, 0.0))


def _binary(a: Analysis, node: Node) -> Units | None:
    tracked = [a.units[name] for name in node.inputs if name in a.units]
    rank = len(node.shape)
    axes = {a.units[name].axis + rank - len(a.shapes[name]) for name in node.inputs if name in a.units}
    untracked = [name for name in node.inputs if name not in a.units and name not in a.graph.constants]
    whole = all(len(units.ids) == node.shape[units_axis] for units_axis in axes for units in tracked)
    if len(axes) != 1 or untracked or not whole or a.shared & set(node.inputs):
        return _mixes(a, node)
    (axis,) = axes
    sides = [_side(a, name, axis, rank, node.shape[axis]) for name in node.inputs]
    if len(tracked) == 2:
        a.join(tracked[0].ids, tracked[1].ids)
    (left, left_values), (right, right_values) = sides
    known = left & right
    values = evaluate(node, [left_values, right_values], 1)
    if node.op == "mul":  # zero times anything
        zero = (left & (left_values == 0)) | (right & (right_values == 0))
        known, values = known | zero, torch.where(zero, 0.0, values)
    known = known & values.isfinite()
    return Units(axis, tracked[0].ids, known, torch.where(known, values, 0.0))


def _side(a: Analysis, name: str, axis: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Which units of an operand are known, and their values; of a constant, those that are the same everywhere."""
    if name in a.units:
        return a.units[name].known, a.units[name].values
    tensor = a.graph.constants[name].double()
    tensor = tensor.reshape((1,) * (rank - tensor.ndim) + tuple(tensor.shape)).movedim(axis, 0).flatten(1)
    return (tensor == tensor[:, :1]).all(1).expand(size), tensor[:, 0].expand(size)


def _pool(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    if x is None:
        return None
    if x.axis >= len(node.shape) - len(node.integers("kernel")):
        return _mixes(a, node)
    pads = node.op == "avg_pool" and any(node.integers("padding")) and node.flag("count_padding")
    return x.only_zero() if pads else x


def _reduce(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    axes = node.integers("axes")
    if x is None:
        return None
    if x.axis in axes:
        return _mixes(a, node)
    axis = x.axis if node.flag("keep") else x.axis - sum(reduced < x.axis for reduced in axes)
    moved = Units(axis, x.ids, x.known, x.values)
    return moved.only_zero() if node.op == "sum" else moved


def _softmax(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    if x is None or x.axis == node.integer("axis"):
        return _mixes(a, node)
    return x.unknown()


def _reshape(a: Analysis, node: Node) -> Units | None:
    """Units stay apart if the new axis counts (others, unit, others): index j is then unit j // inner % units."""
    x = a.units.get(node.inputs[0])
    if x is None:
        return None
    before = a.shapes[node.inputs[0]]
    size = before[x.axis]
    outer, inner = _product(before[: x.axis]), _product(before[x.axis + 1 :])
    for axis, length in enumerate(node.shape):
        left, right = _product(node.shape[:axis]), _product(node.shape[axis + 1 :])
        if length <= 0 or left[1] != outer[1] or right[1] != inner[1] or outer[0] % left[0] or inner[0] % right[0]:
            continue
        repeats, within = outer[0] // left[0], inner[0] // right[0]
        if repeats * size * within == length:
            a.check_room(node, length)
            index = torch.arange(length, device=CPU) // within % size
            return Units(axis, x.ids[index], x.known[index], x.values[index])
    return _mixes(a, node)


def _product(shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of elements, and how often the batch size is in it."""
    return math.prod(abs(size) for size in shape), sum(size < 0 for size in shape)


def _permute(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    axes = node.integers("axes")
    return None if x is None else Units(axes.index(x.axis), x.ids, x.known, x.values)


def _slice(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    if x is None or x.axis != node.integer("axis"):
        return x
    if node.integer("step") != 1:
        return _mixes(a, node)
    part = slice(node.integer("start"), node.integer("stop"))
    return Units(x.axis, x.ids[part], x.known[part], x.values[part])


def _select(a: Analysis, node: Node) -> Units | None:
    x, axis = a.units.get(node.inputs[0]), node.integer("axis")
    if x is None or x.axis == axis:
        return _mixes(a, node)
    return Units(x.axis - (axis < x.axis), x.ids, x.known, x.values)


def _concat(a: Analysis, node: Node) -> Units | None:
    parts = [a.units[name] for name in node.inputs if name in a.units]
    if len(parts) != len(node.inputs) or len({part.axis for part in parts}) != 1:
        return _mixes(a, node)
    axis = parts[0].axis
    if axis == node.integer("axis"):
        return Units(axis, *(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "known", "values")))
    known, values = parts[0].known, parts[0].values
    for part in parts[1:]:
        a.join(parts[0].ids, part.ids)
        known = known & part.known & (values == part.values)
    return Units(axis, parts[0].ids, known, torch.where(known, values, 0.0))


def _pad(a: Analysis, node: Node) -> Units | None:
    x = a.units.get(node.inputs[0])
    if x is None:
        return None
    if x.axis >= len(node.shape) - len(node.integers("before")):
        return _mixes(a, node)
    same = x.values == node.real("value") if node.word("mode") == "constant" else True
    return Units(x.axis, x.ids, x.known & same, x.values)


def _expand(a: Analysis, node: Node) -> Units | None:
    """A constant, the same for the whole batch; units along the one axis where it differs."""
    tensor = a.constant(node.inputs[0])
    if tensor is None or node.inputs[0] in a.shared:
        return _mixes(a, node)
    axes = [axis for axis, size in enumerate(tensor.shape) if size != 1]
    if len(axes) > 1 or tensor.ndim != len(node.shape):
        return None
    axis = axes[0] if axes else min(1, len(node.shape) - 1)
    if node.shape[axis] != tensor.shape[axis]:
        return None
    return a.fresh(axis, torch.ones(tensor.shape[axis], dtype=torch.bool, device=CPU), tensor.flatten())


_RULES: dict[str, Callable[[Analysis, Node], Units | None]] = {
    "input": _input,
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "embedding": _embedding,
    "batch_norm": _per_unit,
    "prelu": _per_unit,
    **dict.fromkeys(POINTWISE, _apart),
    **dict.fromkeys(ARITHMETIC, _binary),
    "max_pool": _pool,
    "avg_pool": _pool,
    "mean": _reduce,
    "sum": _reduce,
    "amax": _reduce,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "select": _select,
    "concat": _concat,
    "pad": _pad,
    "expand": _expand,
}
