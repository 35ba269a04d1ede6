"""Batch norms in eval mode: what they compute for each channel, and how that goes into the layer before them."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsevd.graph.removal import free_name, needed
from sparsevd.graph.structure import Graph, Node


@dataclass(frozen=True)
class ChannelNorm:
    """(x − mean) · scale + shift for each channel, in double.

    The mean stays apart: where a filter varies little its scale is large, and a bias that the mean nearly cancels must
    meet it before anything is rounded.
    """

    mean: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(
        cls, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> "ChannelNorm":
        """From the tensors of a batch norm, which may have no weight and no bias."""
        mean, deviation = mean.double(), (variance.double() + eps).sqrt()
        scale = deviation.reciprocal() if weight is None else weight.double() / deviation
        return cls(mean, scale, torch.zeros_like(mean) if bias is None else bias.double())

    @classmethod
    def of_node(cls, graph: Graph, node: Node) -> "ChannelNorm":
        mean, variance, weight, bias = (graph.constants[name] for name in node.inputs[1:])
        return cls.of(mean, variance, weight, bias, node.real("eps"))

    def affine(self) -> tuple[Tensor, Tensor]:
        """The norm as scale · x + shift."""
        return self.scale, self.shift - self.mean * self.scale

    def folded(self, weight: Tensor, bias: Tensor | None, *, transposed_groups: int = 0) -> tuple[Tensor, Tensor]:
        """Weight and bias of a layer with the norm in it, in the weight's own type.

        The outputs are the first axis of the weight; or the second in a transposed convolution of so many groups.
        """
        rest = [1] * (weight.ndim - 2)
        if transposed_groups:
            grouped = weight.double().view(transposed_groups, -1, *weight.shape[1:])
            scaled = (grouped * self.scale.view(transposed_groups, 1, -1, *rest)).flatten(0, 1)
        else:
            scaled = weight.double() * self.scale.view(-1, 1, *rest)
        before = torch.zeros_like(self.mean) if bias is None else bias.double()
        shift = (before - self.mean) * self.scale + self.shift
        return scaled.to(weight.dtype), shift.to(weight.dtype)


def fold_batch_norms(graph: Graph, *, copying: bool = False) -> Graph:
    """Put each batch norm into the layer before it, where nothing else reads that layer.

    Tensors that something else reads too stay as they are, and so does their norm; with `copying` the layer gets
    tensors of its own instead.
    """
    uses = Counter(name for node in graph.nodes for name in node.inputs) + Counter(graph.outputs)
    layers = {node.name: node for node in graph.nodes if node.op in ("linear", "conv", "conv_transpose")}
    constants, parameters = dict(graph.constants), set(graph.parameters)
    folded: dict[str, Node] = {}  # layer → the layer with the norm in it
    names: dict[str, str] = {}  # batch norm → layer
    taken = {*constants, *(node.name for node in graph.nodes)}
    for node in graph.nodes:
        layer = layers.get(node.inputs[0]) if node.op == "batch_norm" else None
        if layer is None or uses[layer.name] != 1 or len(layer.shape) != _rank(layer):
            continue
        own = [*layer.inputs[1:], *node.inputs[1:]]
        if any(name not in constants or (uses[name] != 1 and not copying) for name in own):
            continue
        weight, *bias = layer.inputs[1:]
        new = [weight, *(bias or [free_name(f"{layer.name}.bias", taken)])]
        new = [free_name(name, taken) if uses[name] > 1 else name for name in new]
        tensors = ChannelNorm.of_node(graph, node).folded(
            graph.constants[weight],
            graph.constants[bias[0]] if bias else None,
            transposed_groups=layer.integer("groups") if layer.op == "conv_transpose" else 0,
        )
        constants.update(zip(new, tensors, strict=True))
        parameters.update(new if weight in parameters else ())
        folded[layer.name] = replace(layer, inputs=(layer.inputs[0], *new))
        names[node.name] = layer.name
    nodes = [folded.get(node.name, node) for node in graph.nodes if node.name not in names]
    return needed(
        replace(
            graph,
            nodes=tuple(replace(node, inputs=tuple(names.get(name, name) for name in node.inputs)) for node in nodes),
            constants=constants,
            outputs=tuple(names.get(name, name) for name in graph.outputs),
            parameters=frozenset(parameters),
        )
    )


def _rank(layer: Node) -> int:
    """The rank that a layer's result must have for axis 1 to be its units."""
    return 2 if layer.op == "linear" else 2 + len(layer.integers("stride"))
