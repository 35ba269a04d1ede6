"""New graphs from old: units removed, constant values put in place of what computes them."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsevd.graph import Graph, Node
from sparsevd.graph.operations import ARITHMETIC
from sparsevd.graph.units import CPU, Analysis, Read


def needed(graph: Graph) -> Graph:
    """Without what the outputs do not depend on; inputs stay, since they are the network's signature."""
    wanted = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
    nodes = tuple(node for node in graph.nodes if node.name in wanted or node.op == "input")
    constants = {name: tensor for name, tensor in graph.constants.items() if name in wanted}
    return replace(graph, nodes=nodes, constants=constants, parameters=graph.parameters & constants.keys())


def free_name(wanted: str, taken: set[str]) -> str:
    """A name that is not taken; from now on it is."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def merge_constants(analysis: Analysis) -> Graph:
    """One constant unit in place of several, where a bias cannot take them.

    A convolution that pads with zeros sees the border of a constant image, so what it adds is not a constant. But all
    constant images look the same up to a factor: their weights can be summed onto one of them.
    """
    graph = analysis.graph
    readers = torch.zeros(len(analysis.joined), dtype=torch.long, device=CPU)
    for read in analysis.reads:
        ids = analysis.roots(analysis.units[read.value].ids[~read.unread])
        readers.index_add_(0, ids, torch.ones_like(ids))
    for ids, _ in analysis.blocked:
        readers[analysis.roots(ids)] = -1
    constants = dict(graph.constants)
    nodes = {node.name: node for node in graph.nodes}
    for read in analysis.reads:
        node, units = nodes[read.reader], analysis.units[read.value]
        alone = readers[analysis.roots(units.ids)] == 1
        stuck = (units.known & ~read.unread & ~read.foldable & alone).nonzero().flatten()
        if len(stuck) < 2 or node.attributes.get("groups") != 1:
            continue
        largest = stuck[units.values[stuck].abs().argmax()]
        factors = units.values[stuck] / units.values[largest]
        old = constants[node.inputs[1]]
        weight = old.double().movedim(1 if node.op == "conv" else 0, 0).clone()  # inputs first
        total = (weight[stuck] * factors.view(-1, *[1] * (weight.ndim - 1))).sum(0)
        weight[stuck] = 0
        weight[largest] = total
        constants[node.inputs[1]] = weight.movedim(0, 1 if node.op == "conv" else 0).to(old.dtype)
    return replace(graph, constants=constants)


def without_units(analysis: Analysis) -> Graph:
    """The graph without the units that the analysis finds removable, and without what became constant."""
    return _Removal(analysis).graph()


@dataclass
class _Removal:
    analysis: Analysis
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.old = self.analysis.graph
        self.constants = dict(self.old.constants)
        self.parameters = set(self.old.parameters)
        self.outputs = set(self.old.outputs)
        self.taken = {*self.constants, *(node.name for node in self.old.nodes)}
        gone = self.analysis.removable()
        self.keep = {name: ~gone[self.analysis.roots(units.ids)] for name, units in self.analysis.units.items()}
        self.reads: dict[str, Read] = {read.reader: read for read in self.analysis.reads}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.expanded: dict[str, str] = {}  # a node that is constant → the constant it expands

    def graph(self) -> Graph:
        for node in self.old.nodes:
            units = self.analysis.units.get(node.name)
            constant = units is not None and len(units.ids) > 0 and bool(units.known.all())
            new = self._expanded(node) if constant and node.op not in ("input", "expand") else self._narrowed(node)
            if new is not None:
                self.nodes.append(new)
                self.shapes[new.name] = new.shape
        return needed(
            replace(
                self.old,
                nodes=tuple(self.nodes),
                constants=self.constants,
                parameters=frozenset(self.parameters),
            )
        )

    def shape(self, node: Node) -> tuple[int, ...]:
        if node.name not in self.keep:
            return node.shape
        axis = self.analysis.units[node.name].axis
        return (*node.shape[:axis], int(self.keep[node.name].sum()), *node.shape[axis + 1 :])

    def _expanded(self, node: Node) -> Node:
        """A value that is always the same: a constant in its place."""
        units = self.analysis.units[node.name]
        values = units.values[self.keep[node.name]].to(self._dtype())
        shape = [1] * len(node.shape)
        shape[units.axis] = len(values)
        name = free_name(f"{node.name}.value", self.taken)
        self.constants[name] = values.view(shape)
        self.expanded[node.name] = name
        return Node(node.name, "expand", (name,), {"shape": self.shape(node)}, self.shape(node))

    def _dtype(self) -> torch.dtype:
        return next(t.dtype for t in self.old.constants.values() if t.is_floating_point())

    def _narrowed(self, node: Node) -> Node | None:
        inputs = tuple(self.renamed.get(name, name) for name in node.inputs)
        shape, attributes = self.shape(node), dict(node.attributes)
        keep = self.keep.get(node.name)
        tracked = keep is not None and not bool(keep.all())
        before = self.keep.get(node.inputs[0]) if node.inputs else None
        if node.op in ("linear", "conv", "conv_transpose"):
            return self._layer(node, inputs, shape)
        if node.op == "concat":
            return self._concat(node, inputs, shape)
        if node.op in ARITHMETIC:
            return self._binary(node, inputs, shape)
        if node.op == "expand" and tracked:
            self.constants[inputs[0]] = self._take(self.constants[inputs[0]], node, keep)
        if node.op == "embedding" and tracked:
            self.constants[inputs[1]] = self.constants[inputs[1]][:, keep]
        if node.op in ("batch_norm", "prelu") and tracked:
            for name in inputs[1:]:
                if len(self.constants[name]) > 1:
                    self.constants[name] = self.constants[name][keep]
        if node.op == "slice" and before is not None and self._unit_axis(node.inputs[0]) == attributes["axis"]:
            attributes["start"] = int(before[: node.integer("start")].sum())
            attributes["stop"] = int(before[: node.integer("stop")].sum())
        if "shape" in attributes:
            attributes["shape"] = shape
        return Node(node.name, node.op, inputs, attributes, shape)

    def _unit_axis(self, name: str) -> int:
        return self.analysis.units[name].axis

    def _take(self, constant: Tensor, node: Node, keep: Tensor | None) -> Tensor:
        """The kept part of a constant that is broadcast to the value of a node."""
        if keep is None:
            return constant
        axis = self._unit_axis(node.name) - (len(node.shape) - constant.ndim)
        if axis < 0 or constant.shape[axis] != len(keep):
            return constant
        return constant.index_select(axis, keep.nonzero().flatten())

    def _binary(self, node: Node, inputs: tuple[str, ...], shape: tuple[int, ...]) -> Node | None:
        new = list(inputs)
        for position, name in enumerate(inputs):
            other = inputs[1 - position]
            if name in self.expanded and other not in self.constants and self.shapes[other] == shape:
                # Broadcasting does what the expansion did. A copy, so that each use can lose units by itself.
                new[position] = free_name(f"{node.name}.value", self.taken)
                self.constants[new[position]] = self.constants[self.expanded[name]].clone()
            elif name in self.constants:
                self.constants[name] = self._take(self.constants[name], node, self.keep.get(node.name))
        for position, name in enumerate(new):
            other = new[1 - position]
            nothing = node.op == "add" and name in self.constants and not self.constants[name].any()
            if nothing and self.shapes.get(other) == shape and node.name not in self.outputs:
                self.renamed[node.name] = other
                return None
        return Node(node.name, node.op, tuple(new), dict(node.attributes), shape)

    def _concat(self, node: Node, inputs: tuple[str, ...], shape: tuple[int, ...]) -> Node | None:
        axis = node.integer("axis")
        parts = tuple(name for name in inputs if name in self.constants or self.shapes[name][axis] != 0)
        if len(parts) == 1 and parts[0] not in self.constants and node.name not in self.outputs:
            self.renamed[node.name] = parts[0]
            return None
        return Node(node.name, node.op, parts or inputs, dict(node.attributes), shape)

    def _layer(self, node: Node, inputs: tuple[str, ...], shape: tuple[int, ...]) -> Node:
        attributes = dict(node.attributes)
        after, read = self.keep.get(node.name), self.reads.get(node.name)
        if after is None or not {*inputs[1:]} <= self.constants.keys():
            return Node(node.name, node.op, inputs, attributes, shape)
        before = self.keep.get(node.inputs[0]) if read is not None else None
        weight = self.constants[inputs[1]]
        bias = self.constants[inputs[2]] if len(inputs) > 2 else None
        groups = 1 if node.op == "linear" else node.integer("groups")
        if read is not None and before is not None and not bool(before.all()):
            bias = self._with_known(node, read, weight, bias, before, groups)
        weight = _narrow(node.op, weight, before, after, groups)
        if groups > 1:
            kept = after.view(groups, -1).any(1)
            attributes["groups"] = int(kept.sum())
        if bias is not None:
            name = inputs[2] if len(inputs) > 2 else free_name(f"{node.name}.bias", self.taken)
            self.constants[name] = bias[after]
            if inputs[1] in self.parameters:
                self.parameters.add(name)
            inputs = (inputs[0], inputs[1], name)
        self.constants[inputs[1]] = weight.contiguous()
        return Node(node.name, node.op, inputs, attributes, shape)

    def _with_known(
        self, node: Node, read: Read, weight: Tensor, bias: Tensor | None, before: Tensor, groups: int
    ) -> Tensor | None:
        """The bias with what the removed inputs always add."""
        units = self.analysis.units[node.inputs[0]]
        known = units.known & ~before & ~read.unread
        values = torch.where(known, units.values, 0.0)
        if not values.any():
            return bias
        taps = weight.double().flatten(2).sum(2) if weight.ndim > 2 else weight.double()
        if node.op == "conv_transpose":
            return bias  # only zeros are foldable there
        per_group = len(taps) // groups
        added = (taps * values.view(groups, -1).repeat_interleave(per_group, 0)).sum(1)
        return (added if bias is None else bias.double() + added).to(weight.dtype)


def _narrow(op: str, weight: Tensor, before: Tensor | None, after: Tensor, groups: int) -> Tensor:
    """The weight for the inputs and outputs that stay."""
    if op == "conv_transpose":
        weight = weight[:, after]
        return weight if before is None else weight[before]
    if before is None:
        return weight[after]
    if groups == 1:
        return weight[after][:, before]
    per_group = len(after) // groups
    rows = []
    for group, inputs in enumerate(before.view(groups, -1)):
        outputs = after.view(groups, -1)[group]
        rows.append(weight[group * per_group : (group + 1) * per_group][outputs][:, inputs])
    return torch.cat([row for row in rows if len(row)]) if any(len(row) for row in rows) else weight[:0]
