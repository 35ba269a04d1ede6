"""What a graph costs: multiply-adds for one example, with and without zero weights, and bytes."""

import math
from dataclasses import dataclass

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


def _elements(shape: tuple[int, ...]) -> int:
    """Elements for one example: k times the batch size counts k."""
    return math.prod(abs(size) for size in shape)
