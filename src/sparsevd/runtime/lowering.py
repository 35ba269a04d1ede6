"""A captured graph as the steps that the kernels know: what a plan runs and what the C file is written from.

Every activation gets its place in the scratch memory of a call, with as many zeros around its images as the
convolutions that read it ask for, so that a layer writes where the next one reads. Batch norms and clamping activations
are folded into the layer before them; flattening only renames.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.graph import Graph, Node
from sparsevd.graph.norms import ChannelNorm, fold_batch_norms
from sparsevd.kernels.inference import Geometry, Planes
from sparsevd.kernels.steps import Add, Affine, AveragePool, MaxPool, Network, Product, Repack, Step, Value, Window

INFINITY = float("inf")


@dataclass(frozen=True)
class Purpose:
    """What the steps are for, and what there is for networks that it is not for: the words of refusals."""

    name: str
    instead: str


PLAN = Purpose("a plan", "use sparsevd.accelerate, which takes any network")
C_FILE = Purpose("a C file", "sparsevd.export_onnx takes any network")


def network(graph: Graph, purpose: Purpose = PLAN) -> Network:
    """The steps of a graph; what is not among the known operations is refused by name."""
    if graph.device.type != "cpu":
        raise GraphError(f"{purpose.name} is made on the CPU, and the network is on {graph.device}; move it there")
    return _Builder(fold_batch_norms(graph, copying=True), purpose).build()


class _Builder:
    def __init__(self, graph: Graph, purpose: Purpose) -> None:
        self.graph, self.purpose = graph, purpose
        self.readers: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for name in node.inputs:
                self.readers[name].append(node)
        self.values: dict[str, Value] = {}  # by node; a renamed one has the same
        self.shapes = {node.name: node.shape for node in graph.nodes}
        self.steps: list[Step] = []
        self.done: set[str] = set()  # folded into a step before

    def build(self) -> Network:
        if len(self.graph.inputs) != 1 or len(self.graph.outputs) != 1:
            raise GraphError(
                f"{self.purpose.name} has one input and one output, and this network {len(self.graph.inputs)} and "
                f"{len(self.graph.outputs)}. Wrap it in a module with one of each, or {self.purpose.instead}"
            )
        (output,) = self.graph.outputs
        for node in self.graph.nodes:
            if node.name not in self.done:
                _RULES.get(node.op, _Builder.refuse)(self, node)
        value = self.values[output]
        self._lay_out(value)
        values = list({id(v): v for step in self.steps for v in (*step.inputs, step.out)}.values())
        source = self.values[self.graph.inputs[0].name]
        if all(v is not source for v in values):
            values.append(source)
        return Network(self.steps, values, source, value, tuple(self.shapes[output][1:]))

    def refuse(self, node: Node) -> NoReturn:
        raise GraphError(
            f"{node.op} {node.name!r} is not among the operations of {self.purpose.name}, or not in this form. "
            f"There are {', '.join(_RULES)}; {self.purpose.instead}"
        )

    # ---- one method per operation ----

    def input(self, node: Node) -> None:
        if node.word("dtype") != "float32":
            raise GraphError(f"{self.purpose.name} takes float32, and input {node.name!r} is {node.word('dtype')}")
        self.values[node.name] = self._new(node)

    def linear(self, node: Node) -> None:
        if len(node.shape) != 2:
            self.refuse(node)
        source, (weight, bias) = self._of(node), self._weight_and_bias(node)
        out = Value(weight.shape[0], 1, 1)
        self._take(node, Product(node.name, (source,), out, weight[:, :, None, None], bias, linear=True))

    def conv(self, node: Node) -> None:
        source = self._image(node)
        weight, bias = self._weight_and_bias(node)
        if weight.ndim > 4:
            self.refuse(node)
        if weight.ndim == 3:
            weight = weight[:, :, None]
        top, left = _pair(node, "padding", 0)
        geometry = Geometry(
            _pair(node, "stride", 1), (top, top, left, left), _pair(node, "dilation", 1), node.integer("groups")
        )
        step = Product(node.name, (source,), self._new(node), weight, bias, geometry)
        if geometry.stride != (1, 1):
            self.steps.append(_repacked(step))
        self._take(node, step)

    def batch_norm(self, node: Node) -> None:
        source = self._channels_first(node)
        mean, variance, weight, bias = self._constants(node)
        scale, shift = ChannelNorm.of(mean, variance, weight, bias, node.real("eps")).affine()
        self._take(node, Affine(node.name, (source,), self._new(node), scale.float(), shift.float()))

    def clamp(self, node: Node) -> None:
        source = self._of(node)
        one, zero = (make(source.channels, device="cpu") for make in (torch.ones, torch.zeros))
        out = Value(source.channels, source.height, source.width)
        self._take(node, Affine(node.name, (source,), out, one, zero, bounds=_bounds(node)))

    def add(self, node: Node) -> None:
        if any(name not in self.values for name in node.inputs) or len({self.shapes[n] for n in node.inputs}) != 1:
            self.refuse(node)
        first, second = (self.values[name] for name in node.inputs)
        if (first.channels, first.height, first.width) != (second.channels, second.height, second.width):
            self.refuse(node)
        self._take(node, Add(node.name, (first, second), Value(first.channels, first.height, first.width)))

    def max_pool(self, node: Node) -> None:
        window = Window(*_window(node), dilation=_pair(node, "dilation", 1))
        self._take(node, MaxPool(node.name, (self._image(node),), self._new(node), window))

    def avg_pool(self, node: Node) -> None:
        window = Window(*_window(node), count_padding=node.flag("count_padding"))
        self._take(node, AveragePool(node.name, (self._image(node),), self._new(node), window))

    def mean(self, node: Node) -> None:
        source = self._image(node)
        if node.integers("axes") != tuple(range(2, len(self.shapes[node.inputs[0]]))):
            self.refuse(node)
        size = (source.height, source.width)
        window = Window(size, size, (0, 0))
        self._take(node, AveragePool(node.name, (source,), Value(source.channels, 1, 1), window))

    def reshape(self, node: Node) -> None:
        source = self._of(node)
        if node.shape[0] != -1:
            self.refuse(node)
        self.values[node.name] = source

    # ---- what they share ----

    def _of(self, node: Node) -> Value:
        """What a node reads first; a constant has no place among the activations."""
        if node.inputs[0] not in self.values:
            self.refuse(node)
        return self.values[node.inputs[0]]

    def _new(self, node: Node) -> Value:
        channels, height, width = _image_shape(node.shape)
        return Value(channels, height, width)

    def _image(self, node: Node) -> Value:
        """The input as images, which a reshape before it must not have renamed."""
        value, shape = self._of(node), self.shapes[node.inputs[0]]
        if len(shape) not in (3, 4) or _image_shape(shape) != (value.channels, value.height, value.width):
            self.refuse(node)
        return value

    def _channels_first(self, node: Node) -> Value:
        value, shape = self._of(node), self.shapes[node.inputs[0]]
        if _image_shape(shape) != (value.channels, value.height, value.width):
            self.refuse(node)
        return value

    def _constants(self, node: Node) -> list[Tensor]:
        """The tensors of a layer; computed ones are refused."""
        if any(name not in self.graph.constants for name in node.inputs[1:]):
            self.refuse(node)
        return [self.graph.constants[name] for name in node.inputs[1:]]

    def _weight_and_bias(self, node: Node) -> tuple[Tensor, Tensor | None]:
        weight, *bias = (tensor.float() for tensor in self._constants(node))
        return weight, bias[0] if bias else None

    def _take(self, node: Node, step: Step) -> None:
        """Put a step in. A clamping activation that alone reads its result is done by the step itself."""
        self.steps.append(step)
        readers = self.readers[node.name]
        clamped = len(readers) == 1 and readers[0].op in ("relu", "clamp") and node.name not in self.graph.outputs
        if clamped and isinstance(step, Product | Affine | Add) and step.bounds == (-INFINITY, INFINITY):
            node = readers[0]
            step.bounds = _bounds(node)
            self.done.add(node.name)
        self.values[node.name] = step.out

    def _lay_out(self, output: Value) -> None:
        """Zeros around each activation as the convolutions that read it ask for; the output has none."""
        convolutions: dict[int, list[Product]] = defaultdict(list)
        for step in self.steps:
            if isinstance(step, Product) and step.phases is None and not step.linear:
                convolutions[id(step.source)].append(step)
        for step in convolutions.pop(id(output), []):  # read by a convolution and by the caller
            self.steps.insert([each is step for each in self.steps].index(True), _repacked(step))
        for value in {id(v): v for step in self.steps for v in (*step.inputs, step.out)}.values():
            if value.plane:
                continue  # the phases of a stride
            readers = convolutions[id(value)]
            top = max((step.geometry.padding[0] for step in readers), default=0)
            left = max((step.geometry.padding[2] for step in readers), default=0)
            widest = max((step.out.width for step in readers), default=0)
            value.padding = (top, left)
            value.pitch = max(value.width + left, widest)
            value.plane = (value.height + 2 * top) * value.pitch + left
            value.first = top * value.pitch + left
        if not output.plane:  # the network only renames its input
            raise GraphError("the network computes nothing that a plan could run")


_RULES: dict[str, Callable[[_Builder, Node], None]] = {
    "input": _Builder.input,
    "linear": _Builder.linear,
    "conv": _Builder.conv,
    "batch_norm": _Builder.batch_norm,
    "relu": _Builder.clamp,
    "clamp": _Builder.clamp,
    "max_pool": _Builder.max_pool,
    "avg_pool": _Builder.avg_pool,
    "mean": _Builder.mean,
    "add": _Builder.add,
    "reshape": _Builder.reshape,
}


def _repacked(step: Product) -> Repack:
    """A step that lays out what a convolution reads; the convolution then reads that."""
    source = step.source
    phases = _planes(step.name, (source.height, source.width), step.kernel, step.geometry)
    packed = Value(source.channels, source.height, source.width, phases.pitch, phases.size)
    step.inputs, step.phases = (packed,), phases
    return Repack("", (source,), packed, phases)


def _planes(name: str, size: tuple[int, int], kernel: tuple[int, int], geometry: Geometry) -> Planes:
    """Where the pixels of a strided convolution lie. A position takes a microsecond, so many of them must be pixels."""
    (height, width), (stride_y, stride_x) = size, geometry.stride
    top, bottom, left, right = geometry.padding
    positions = (height + top + bottom + stride_y) * (width + left + right + stride_x)
    if positions > min(4 * height * width + (1 << 16), 1 << 22):
        raise GraphError(
            f"conv {name!r} has {height}×{width} pixels on {positions:,} positions, with padding and stride, which is "
            "more than a plan takes; use sparsevd.accelerate"
        )
    return Planes(size, kernel, geometry)


def _pair(node: Node, key: str, fill: int) -> tuple[int, int]:
    """A setting of height and width; where there is one axis only, it is the width."""
    *above, last = node.integers(key)
    return (above[0] if above else fill), last


def _window(node: Node) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return _pair(node, "kernel", 1), _pair(node, "stride", 1), _pair(node, "padding", 0)


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of a value: [N, C], [N, C, L] or [N, C, H, W], others as one long row."""
    if shape[0] != -1 or len(shape) > 4:
        return math.prod(shape[1:]), 1, 1
    return cast(
        tuple[int, int, int],
        {1: (1, 1, 1), 2: (*shape[1:], 1, 1), 3: (shape[1], 1, shape[-1])}.get(len(shape), shape[1:]),
    )


def _bounds(node: Node) -> tuple[float, float]:
    return (0.0, INFINITY) if node.op == "relu" else (node.real("least"), node.real("most"))
