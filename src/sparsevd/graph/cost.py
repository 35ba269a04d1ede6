"""What a graph costs: multiply-adds for one example, with and without zero weights, and bytes; and what a run takes."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from sparsevd.graph.operations import DTYPES
from sparsevd.graph.structure import Graph, Node


@dataclass(frozen=True)
class Cost:
    """`dense` and `nonzero` count multiply-adds, as papers count FLOPs; `bytes` is the size of all constants."""

    dense: int
    nonzero: int
    bytes: int


def cost(graph: Graph) -> Cost:
    """Of layers with weights, and of products of two values; all else is small beside them."""
    shapes = {node.name: node.shape for node in graph.nodes}
    shapes |= {name: tuple(tensor.shape) for name, tensor in graph.constants.items()}
    dense = nonzero = 0
    for node in graph.nodes:
        times = _times(node, shapes)
        if node.op in ("linear", "conv", "conv_transpose") and node.inputs[1] in graph.constants:
            weight = graph.constants[node.inputs[1]]
            dense += times * weight.numel()
            nonzero += times * int(weight.count_nonzero())
        elif times:
            dense += times * _inner(node, shapes)
            nonzero += times * _inner(node, shapes)
    tensors = graph.constants.values()
    return Cost(dense, nonzero, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _times(node: Node, shapes: dict[str, tuple[int, ...]]) -> int:
    """How often a weight is used for one example; for a product of two values, the number of results."""
    match node.op:
        case "linear":
            return _elements(node.shape[:-1])
        case "conv":
            return _elements(node.shape[2:])
        case "conv_transpose":
            return _elements(shapes[node.inputs[0]][2:])
        case "matmul" | "attention":
            return _elements(node.shape)
    return 0


def _inner(node: Node, shapes: dict[str, tuple[int, ...]]) -> int:
    """Multiply-adds for one result of a product of two values, or of layers whose weights are computed."""
    first, second = shapes[node.inputs[0]], shapes[node.inputs[1]]
    if node.op == "attention":  # one row of scores, then the sum over the values
        return second[-2] * (first[-1] + node.shape[-1]) // node.shape[-1]
    return first[-1] if node.op == "matmul" else _elements(second)


def operations(graph: Graph) -> int:
    """What a run of one example computes: multiply-adds with all weights, windows, and every number once."""
    shapes = {node.name: node.shape for node in graph.nodes}
    windows = 0
    for node in graph.nodes:
        kernel = node.attributes.get("kernel")
        windows += _elements(node.shape) * math.prod(kernel) if isinstance(kernel, tuple) else 0
    numbers = sum(
        _elements(node.shape) + sum(_elements(shapes[name]) for name in node.inputs if name in shapes)
        for node in graph.nodes
    )
    return cost(graph).dense + windows + numbers


def footprint(graph: Graph) -> int:
    """The bytes that a run of one example takes beside the constants: values that are still needed, and scratch memory.

    It is rather more than torch takes: every number is taken to be of the widest type in the graph, and every value to
    be copied by the operation that reads it.
    """
    types = [tensor.dtype for tensor in graph.constants.values()]
    types += [DTYPES[node.word("dtype")] for node in graph.nodes if "dtype" in node.attributes]
    width = max((dtype.itemsize for dtype in types), default=4)
    shapes = {node.name: node.shape for node in graph.nodes}
    shapes |= {name: tuple(tensor.shape) for name, tensor in graph.constants.items()}
    uses = Counter(name for node in graph.nodes for name in node.inputs) + Counter(graph.outputs)
    alive = most = 0
    for node in graph.nodes:
        alive += _elements(node.shape)
        values = [name for name in node.inputs if name not in graph.constants]
        copies = sum(_elements(shapes[name]) for name in values)
        most = max(most, alive + copies + _scratch(node, [shapes[name] for name in node.inputs], width))
        for name in values:
            uses[name] -= 1
            alive -= _elements(shapes[name]) if not uses[name] else 0
        alive -= _elements(node.shape) if not uses[node.name] else 0
    return most * width


def _scratch(node: Node, shapes: list[tuple[int, ...]], width: int) -> int:
    """Numbers that an operation takes beside its inputs and its result, for one example."""
    settings: dict[str, Any] = dict(node.attributes)
    match node.op:
        case "conv":
            padded = tuple(size + 2 * pad for size, pad in zip(shapes[0][2:], settings["padding"], strict=True))
            return _blocked(shapes[1], shapes[0][:2] + padded, node.shape) + _unfolded(shapes[1], node.shape, width)
        case "conv_transpose":
            sizes = zip(shapes[0][2:], settings["stride"], settings["dilation"], shapes[1][2:], strict=True)
            whole = tuple((size - 1) * stride + dilation * (kernel - 1) + 1 for size, stride, dilation, kernel in sizes)
            return _blocked(shapes[1], shapes[0], node.shape[:2] + whole) + _unfolded(shapes[1], shapes[0], width)
        case "matmul":
            return _elements(node.shape[:-2]) * (_elements(shapes[0][-2:]) + _elements(shapes[1][-2:]))
        case "attention":
            return 2 * _elements(shapes[0][:-1]) * shapes[1][-2]
    return 0


def _blocked(weight: tuple[int, ...], *images: tuple[int, ...]) -> int:
    """Copies of images and weight in which channels come in blocks of 16, as torch's convolutions have them.

    Of the weight there may be three: it is also transformed.
    """
    rows, columns = (-(-size // 16) * 16 for size in weight[:2])
    return 3 * rows * columns * _elements(weight[2:]) + sum(
        -(-shape[1] // 16) * 16 * _elements(shape[2:]) for shape in images
    )


def _unfolded(weight: tuple[int, ...], image: tuple[int, ...], width: int) -> int:
    """Torch writes the inputs of every place beside each other, except for float32, which has kernels of its own."""
    return 0 if width == torch.float32.itemsize else _elements(weight) * _elements(image[2:])


def _elements(shape: tuple[int, ...]) -> int:
    """Elements for one example: k times the batch size counts k."""
    return math.prod(abs(size) for size in shape)
