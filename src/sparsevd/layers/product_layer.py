"""Layers whose output is linear in the weight: the noise is drawn per output (local reparametrisation, eq. 17, 18)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.layer import SparseLayer
from sparsevd.layers.linear_map import LinearMap
from sparsevd.layers.sampling import NoisyWeight, sample, sample_part, worth_bfloat16
from sparsevd.layers.selection import select, spread


@dataclass(frozen=True)
class Part:
    """The inputs and units of a layer that still have weights; the layer's weight is then that part of the whole."""

    inputs: Tensor
    units: Tensor
    width: int  # inputs of the whole layer
    size: int  # its units


class ProductLayer(SparseLayer):
    """The forward equation, written once; each family calls `output` with its linear map."""

    weight: Tensor
    bias: Tensor | None
    log_sigma2: Tensor

    def __init__(self, twin: nn.Module, **settings: Any):
        super().__init__(twin, **settings)
        self.part: Part | None = None  # set while `contraction` has made the weight smaller

    def output(self, input: Tensor, linear_map: LinearMap) -> Tensor:
        """γ + √δ·ε in training mode, the product with the pruned weight in eval mode or without noise."""
        part = self.part
        if part is not None and input.shape[linear_map.channel] != part.width:  # any wider input would be read in part
            raise ArgumentError(
                f"the layer takes {part.width} inputs, and its input of shape {tuple(input.shape)} has "
                f"{input.shape[linear_map.channel]}"
            )
        if self.draws_noise:
            dtype = variance_dtype(self, linear_map, input, self.weight, self.log_sigma2)
            noisy = NoisyWeight(self.weight, self.bias, self.log_sigma2, dtype)
            if part is None:
                return sample(linear_map, input, noisy)
            return sample_part(linear_map, input, noisy, part.inputs, part.units, part.size)
        weight = self.weight if self.threshold == math.inf else self.pruned_weight()
        if part is None:
            return linear_map.product(input, weight, self.bias)
        chosen = select(input, linear_map.channel, part.inputs)
        output = linear_map.product(chosen, weight, None)
        return spread(output, linear_map.channel, part.units, part.size, self.bias)

    def plain(self, threshold: float | None = None) -> nn.Module:
        if self.part is not None:
            raise ArgumentError(
                "while an epoch trains, layers hold only the inputs and units that have weights left; prune, save or "
                "copy the network after an epoch (Callback.on_epoch), or train with contract=False"
            )
        return super().plain(threshold)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"bias": self.bias is not None}


def variance_dtype(
    layer: SparseLayer, linear_map: LinearMap, input: Tensor, theta: Tensor, log_sigma2: Tensor
) -> torch.dtype:
    """The type of A² and σ² in this product of a layer's."""
    if layer.variance_dtype is not None:
        return layer.variance_dtype
    if layer.bfloat16_where_faster and worth_bfloat16(linear_map, input, theta):
        return torch.bfloat16
    return log_sigma2.dtype
