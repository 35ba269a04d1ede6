"""Convolutions, and transposed ones, in one to three dimensions (eq. 18)."""

from collections.abc import Callable, Sequence
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.linear_map import Convolution
from sparsevd.layers.product_layer import ProductLayer

_OPTIONS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class SparseConv(ProductLayer):
    """Sparse VD convolution in any number of dimensions."""

    options = _OPTIONS
    convolve: ClassVar[Callable[..., Tensor]]

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    def forward(self, input: Tensor) -> Tensor:
        if self._pads_before():
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, self._both_sides(), mode=mode)
        return self.output(input, self._map())

    def _map(self) -> Convolution:
        none = (0,) * len(self.kernel_size)
        padding = none if self._pads_before() else tuple(self._both_sides()[::2][::-1])
        return Convolution(type(self).convolve, self.stride, padding, self.dilation, self.groups)

    def can_contract(self) -> bool:
        return self.groups == 1

    def _pads_before(self) -> bool:
        """Whether the padding is more than a number of zeros on both sides, and so a step of its own."""
        sides = self._both_sides()
        return self.padding_mode != "zeros" or sides[::2] != sides[1::2]

    def _both_sides(self) -> list[int]:
        """Padding before and after each dimension, the last dimension first, as F.pad wants it."""
        sides: list[int] = []
        for axis in reversed(range(len(self.kernel_size))):
            if self.padding == "same":
                total = self.dilation[axis] * (self.kernel_size[axis] - 1)
                sides += [total // 2, total - total // 2]
            elif self.padding == "valid":
                sides += [0, 0]
            else:
                sides += [int(self.padding[axis])] * 2
        return sides


@final
class SparseConv1d(SparseConv):
    """Sparse VD twin of `nn.Conv1d`."""

    plain_type = nn.Conv1d
    convolve = F.conv1d


@final
class SparseConv2d(SparseConv):
    """Sparse VD twin of `nn.Conv2d`."""

    plain_type = nn.Conv2d
    convolve = F.conv2d


@final
class SparseConv3d(SparseConv):
    """Sparse VD twin of `nn.Conv3d`."""

    plain_type = nn.Conv3d
    convolve = F.conv3d


class SparseConvTranspose(ProductLayer):
    """Sparse VD transposed convolution in any number of dimensions; eq. 18 with ∗ read as its transpose."""

    options = (*_OPTIONS, "output_padding")
    unit_axis = 1
    convolve: ClassVar[Callable[..., Tensor]]

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    dilation: tuple[int, ...]

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return self.output(input, self._map(self._output_padding(input, output_size)))

    def _map(self, output_padding: tuple[int, ...]) -> Convolution:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return Convolution(type(self).convolve, *settings, output_padding=output_padding)

    def _output_padding(self, input: Tensor, output_size: Sequence[int] | None) -> tuple[int, ...]:
        """What must be added at the end of each dimension to get the output size that the caller asks for."""
        if output_size is None:
            return self.output_padding
        dimensions = len(self.kernel_size)
        wanted = tuple(output_size)[-dimensions:]
        smallest = [
            (size - 1) * self.stride[i] - 2 * self.padding[i] + self.dilation[i] * (self.kernel_size[i] - 1) + 1
            for i, size in enumerate(input.shape[-dimensions:])
        ]
        largest = [size + self.stride[i] - 1 for i, size in enumerate(smallest)]
        if len(wanted) != dimensions or not all(
            low <= size <= high for low, size, high in zip(smallest, wanted, largest, strict=True)
        ):
            raise ArgumentError(
                f"output_size {tuple(output_size)} cannot be had from an input of shape {tuple(input.shape)}; "
                f"the last {dimensions} sizes may be from {smallest} to {largest}"
            )
        return tuple(size - low for size, low in zip(wanted, smallest, strict=True))


@final
class SparseConvTranspose1d(SparseConvTranspose):
    """Sparse VD twin of `nn.ConvTranspose1d`."""

    plain_type = nn.ConvTranspose1d
    convolve = F.conv_transpose1d


@final
class SparseConvTranspose2d(SparseConvTranspose):
    """Sparse VD twin of `nn.ConvTranspose2d`."""

    plain_type = nn.ConvTranspose2d
    convolve = F.conv_transpose2d


@final
class SparseConvTranspose3d(SparseConvTranspose):
    """Sparse VD twin of `nn.ConvTranspose3d`."""

    plain_type = nn.ConvTranspose3d
    convolve = F.conv_transpose3d
