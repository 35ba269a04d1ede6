"""A captured graph as the steps that the kernels know: what a plan runs and what the C file is written from.

Every activation gets its place in the scratch memory of a call, with as many zeros around its images as the
convolutions that read it ask for, so that a layer writes where the next one reads. Batch norms and clamping activations
are folded into the layer before them; flattening only renames.
"""

import math
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.graph import Graph, Node
from sparsevd.kernels.inference import Geometry, Planes
from sparsevd.kernels.steps import Network, Step, Value, Window

INFINITY = float("inf")
KNOWN = "linear, conv, batch_norm, relu, clamp, max_pool, avg_pool, mean, add, reshape"


def network(graph: Graph) -> Network:
    """The steps of a graph; what is not among the known operations is refused by name."""
    return _Builder(graph).build()


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
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
            raise GraphError("a plan takes one input and returns one output; use sparsevd.accelerate for this network")
        (output,) = self.graph.outputs
        for node in self.graph.nodes:
            if node.name not in self.done:
                getattr(self, f"_{node.op}", self._refused)(node)
        value = self.values[output]
        self._lay_out(value)
        values = list({id(v): v for step in self.steps for v in (*step.inputs, step.out)}.values())
        source = self.values[self.graph.inputs[0].name]
        if all(v is not source for v in values):
            values.append(source)
        return Network(self.steps, values, source, value, tuple(self.shapes[output][1:]))

    # ---- one method per operation ----

    def _refused(self, node: Node) -> None:
        raise GraphError(
            f"{node.op} {node.name!r} is not among the operations of a plan ({KNOWN}); "
            "use sparsevd.accelerate, which takes any network"
        )

    def _input(self, node: Node) -> None:
        if node.attributes["dtype"] != "float32":
            raise GraphError(f"a plan takes float32, and input {node.name!r} is {node.attributes['dtype']}")
        self.values[node.name] = self._new(node)

    def _linear(self, node: Node) -> None:
        source = self._of(node)
        if len(node.shape) != 2:
            self._refused(node)
        weight, bias = self._constants(node)
        out = Value(weight.shape[0], 1, 1)
        self._finish(
            node, Step("PRODUCT", (source,), out, weight[:, :, None, None], None, bias, linear=True, name=node.name)
        )

    def _conv(self, node: Node) -> None:
        source = self._image(node)
        weight, bias = self._constants(node)
        if weight.ndim > 4:
            self._refused(node)
        if weight.ndim == 3:
            weight = weight[:, :, None]
        (top, left), stride, dilation = (_pair(node.attributes[key], fill) for key, fill in _CONV)
        groups = cast(int, node.attributes["groups"])
        geometry = Geometry(stride, (top, top, left, left), dilation, groups)
        step = Step("PRODUCT", (source,), self._new(node), weight, None, bias, geometry=geometry, name=node.name)
        if stride != (1, 1):
            size = (source.height, source.width)
            phases = _planes(node.name, size, (weight.shape[2], weight.shape[3]), geometry)
            packed = Value(source.channels, *size, phases.pitch, phases.size)
            self.steps.append(Step("REPACK", (source,), packed, phases=phases))
            step.inputs, step.phases = (packed,), phases
        self._finish(node, step)

    def _batch_norm(self, node: Node) -> None:
        source = self._channels_first(node)
        scale, shift = (tensor.float() for tensor in self._affine(node))
        self._finish(node, Step("AFFINE", (source,), self._new(node), None, scale, shift, name=node.name))

    def _relu(self, node: Node) -> None:
        source = self._of(node)
        one = torch.ones(source.channels)
        out = Value(source.channels, source.height, source.width)
        step = Step("AFFINE", (source,), out, None, one, torch.zeros(source.channels), _bounds(node), name=node.name)
        self.steps.append(step)
        self.values[node.name] = out

    _clamp = _relu

    def _add(self, node: Node) -> None:
        if any(name not in self.values for name in node.inputs) or len({self.shapes[n] for n in node.inputs}) != 1:
            self._refused(node)
        first, second = (self.values[name] for name in node.inputs)
        if (first.channels, first.height, first.width) != (second.channels, second.height, second.width):
            self._refused(node)
        out = Value(first.channels, first.height, first.width)
        self._finish(node, Step("ADD", (first, second), out, name=node.name))

    def _max_pool(self, node: Node) -> None:
        window = self._window(node)
        window.dilation = _pair(node.attributes["dilation"], 1)
        self.steps.append(Step("MAX_POOL", (self._image(node),), self._new(node), window=window, name=node.name))
        self.values[node.name] = self.steps[-1].out

    def _avg_pool(self, node: Node) -> None:
        window = self._window(node)
        window.count_padding = bool(node.attributes["count_padding"])
        self.steps.append(Step("AVERAGE_POOL", (self._image(node),), self._new(node), window=window, name=node.name))
        self.values[node.name] = self.steps[-1].out

    def _mean(self, node: Node) -> None:
        axes = cast(tuple[int, ...], node.attributes["axes"])
        source = self._image(node)
        if axes != tuple(range(2, len(self.shapes[node.inputs[0]]))):
            self._refused(node)
        size = (source.height, source.width)
        out = Value(source.channels, 1, 1)
        self.steps.append(Step("AVERAGE_POOL", (source,), out, window=Window(size, size, (0, 0)), name=node.name))
        self.values[node.name] = out

    def _reshape(self, node: Node) -> None:
        source = self._of(node)
        if node.shape[0] != -1:
            self._refused(node)
        self.values[node.name] = source

    # ---- what they share ----

    def _of(self, node: Node) -> Value:
        """What a node reads first; a constant has no place among the activations."""
        if node.inputs[0] not in self.values:
            self._refused(node)
        return self.values[node.inputs[0]]

    def _new(self, node: Node) -> Value:
        channels, height, width = _image_shape(node.shape)
        return Value(channels, height, width)

    def _image(self, node: Node) -> Value:
        """The input as images, which a reshape before it must not have renamed."""
        value, shape = self._of(node), self.shapes[node.inputs[0]]
        if len(shape) not in (3, 4) or _image_shape(shape) != (value.channels, value.height, value.width):
            self._refused(node)
        return value

    def _channels_first(self, node: Node) -> Value:
        value, shape = self._of(node), self.shapes[node.inputs[0]]
        if _image_shape(shape) != (value.channels, value.height, value.width):
            self._refused(node)
        return value

    def _constants(self, node: Node) -> tuple[Tensor, Tensor | None]:
        if any(name not in self.graph.constants for name in node.inputs[1:]):
            self._refused(node)
        weight, *bias = (self.graph.constants[name].float() for name in node.inputs[1:])
        return weight, bias[0] if bias else None

    def _affine(self, node: Node) -> tuple[Tensor, Tensor]:
        """A batch norm as scale and shift of each channel; in double, so that nothing is lost on the way."""
        if any(name not in self.graph.constants for name in node.inputs[1:]):
            self._refused(node)
        mean, variance, weight, bias = (self.graph.constants[name].double() for name in node.inputs[1:])
        scale = weight * torch.rsqrt(variance + cast(float, node.attributes["eps"]))
        return scale, bias - mean * scale

    def _window(self, node: Node) -> Window:
        a = node.attributes
        return Window(_pair(a["kernel"], 1), _pair(a["stride"], 1), _pair(a["padding"], 0))

    def _finish(self, node: Node, step: Step) -> None:
        """Fold what alone reads the result: a batch norm into a product, then a clamping activation into anything."""
        self.steps.append(step)
        reader = self._only_reader(node.name)
        if step.kind == "PRODUCT" and reader and reader.op == "batch_norm" and len(reader.shape) == len(node.shape):
            scale, shift = self._affine(reader)
            weight, bias = cast(Tensor, step.weight), step.shift
            step.weight = (weight.double() * scale.view(-1, 1, 1, 1)).float()
            # Summed before it is rounded: where a filter varies little, its scale is large and the two nearly cancel.
            step.shift = (shift if bias is None else bias.double() * scale + shift).float()
            node = self._folded(node, reader)
            reader = self._only_reader(node.name)
        if reader and reader.op in ("relu", "clamp"):
            step.bounds = _bounds(reader)
            node = self._folded(node, reader)
        self.values[node.name] = step.out

    def _only_reader(self, name: str) -> Node | None:
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.graph.outputs else None

    def _folded(self, node: Node, reader: Node) -> Node:
        self.done.add(reader.name)
        return reader

    def _lay_out(self, output: Value) -> None:
        """Zeros around each activation as the convolutions that read it ask for; the output has none."""
        convolutions: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            if step.kind == "PRODUCT" and step.phases is None and not step.linear:
                convolutions[id(step.inputs[0])].append(step)
        for step in list(self.steps):
            if step in convolutions[id(output)]:  # read by a convolution and by the caller
                size = (output.height, output.width)
                phases = _planes(step.name, size, _kernel(step), step.geometry)
                packed = Value(output.channels, *size, phases.pitch, phases.size)
                self.steps.insert(self.steps.index(step), Step("REPACK", (output,), packed, phases=phases))
                step.inputs, step.phases = (packed,), phases
        convolutions.pop(id(output), None)
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


_CONV = (("padding", 0), ("stride", 1), ("dilation", 1))


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


def _pair(attribute: Any, fill: int) -> tuple[int, int]:
    values = cast(tuple[int, ...], attribute)
    return (values[0], values[1]) if len(values) == 2 else (fill, values[0])


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of a value: [N, C], [N, C, L] or [N, C, H, W], others as one long row."""
    if shape[0] != -1 or len(shape) > 4:
        return math.prod(shape[1:]), 1, 1
    return cast(
        tuple[int, int, int],
        {1: (1, 1, 1), 2: (*shape[1:], 1, 1), 3: (shape[1], 1, shape[-1])}.get(len(shape), shape[1:]),
    )


def _bounds(node: Node) -> tuple[float, float]:
    if node.op == "relu":
        return 0.0, INFINITY
    return cast(float, node.attributes["least"]), cast(float, node.attributes["most"])


def _kernel(step: Step) -> tuple[int, int]:
    weight = cast(Tensor, step.weight)
    return weight.shape[2], weight.shape[3]
