"""A Linear or Conv layer with zeros, ready to run in the way that measured fastest."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.kernels import door, lanes
from sparsevd.kernels.inference import GROUP_LIMIT, Geometry, SparseProduct

LAYER_TYPES: dict[type[nn.Module], int] = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2}  # and how many axes an image has
INFINITY = float("inf")
UNBOUNDED = (-INFINITY, INFINITY)
_SIZES_KEPT = 8  # sizes of images that a layer stays ready for
_OFFSETS = 2**31  # what an offset into the planes can hold


class InferenceLayer(nn.Module):
    """clamp(Wx + b, low, high), by the sparse kernel for groups of `images`, or densely where that is None.

    Takes what the layer it stands for takes. What the kernels cannot do (another type or device, gradients,
    torch.compile, torch.jit.trace, torch.func) is done densely, so the answers are always there. Weight and bias are
    copies, made when the layer is: torch's own operations on them in place are noticed, writing past torch (`.data`,
    numpy) is not.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        weight: Tensor,
        bias: Tensor | None,
        bounds: tuple[float, float] = UNBOUNDED,
        *,
        batched_only: bool = False,
    ) -> None:
        super().__init__()
        self.axes = LAYER_TYPES[type(layer)]
        self.register_buffer("weight", weight.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.low, self.high = bounds
        self.batched_only = batched_only  # where a batch norm was folded, which sees other axes in other inputs
        self.images: int | None = 1
        self.csr: Tensor | None = None
        self.stride, self.padding, self.dilation, self.groups = geometry_of(layer)
        self._ready: dict[torch.Size, _Ready] = {}  # by shape of the input

    def taking(self, images: int | None, csr: Tensor | None = None) -> "InferenceLayer":
        """The same layer, with the same tensors, in another way."""
        other = copy.copy(self)
        other.images, other.csr = images, csr
        return other

    @property
    def way(self) -> str:
        return "CSR" if self.csr is not None else "dense" if self.images is None else "sparse"

    @property
    def kept(self) -> float:
        """Share of weights that are not zero."""
        return float(torch.count_nonzero(self.weight)) / max(1, self.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        ready = self._ready.get(x.shape)
        if ready is None or not plain(x) or ready.version != self._copied_version():
            return self._unprepared(x)
        return ready.product(x, ready.out_shape)

    def _unprepared(self, x: Tensor) -> Tensor:
        """An input that is the first of its shape, or not for the kernel."""
        if self.batched_only and x.ndim != max(2, self.axes + 2):
            raise ArgumentError(
                f"this layer has a batch norm folded in and takes inputs of {max(2, self.axes + 2)} axes, "
                f"not {tuple(x.shape)}; accelerate the model with an example of that shape"
            )
        if self.csr is not None and x.ndim == 2 and plain(x):
            return self._by_csr(x)
        if self.images is None or not self._fits(x):
            return self.dense(x)
        if len(self._ready) >= _SIZES_KEPT:
            self._ready.clear()
        ready = self._ready[x.shape] = self._made_ready(x.shape)
        return ready.product(x, ready.out_shape)

    def dense(self, x: Tensor) -> Tensor:
        """The same with torch's dense operators."""
        if not self.axes:
            return self._activated(F.linear(x, self.weight, self.bias))
        top, bottom, left, right = self.padding
        convolution = cast(Callable[..., Tensor], (F.conv1d, F.conv2d)[self.axes - 1])
        padding = (top, left)[-self.axes :]
        if (top, left) != (bottom, right):  # padding="same" of an even kernel
            x, padding = F.pad(x, (left, right, top, bottom)[: 2 * self.axes]), (0, 0)[-self.axes :]
        stride, dilation = self.stride[-self.axes :], self.dilation[-self.axes :]
        return self._activated(convolution(x, self.weight, self.bias, stride, padding, dilation, self.groups))

    def _activated(self, y: Tensor) -> Tensor:
        if (self.low, self.high) == UNBOUNDED:
            return y
        return y.relu() if (self.low, self.high) == (0, INFINITY) else y.clamp(self.low, self.high)

    def _by_csr(self, x: Tensor) -> Tensor:
        y = torch.mm(cast(Tensor, self.csr), x.T).T
        return self._activated(y if self.bias is None else y + self.bias)

    def _fits(self, x: Tensor) -> bool:
        if not kernels.available() or not plain(x) or x.numel() == 0:
            return False
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return False
        if self.bias is not None and (self.bias.shape != self.weight.shape[:1] or self.bias.dtype != torch.float32):
            return False  # torch spreads it, or says what is wrong
        if not self.axes:
            return x.ndim > 0 and x.shape[-1] == self.weight.shape[1]
        channels = self.weight.shape[1] * self.groups
        if x.ndim not in (self.axes + 1, self.axes + 2) or x.shape[-self.axes - 1] != channels:
            return False
        top, bottom, left, right = self.padding
        size = (1, *x.shape[-1:]) if self.axes == 1 else x.shape[-2:]
        kernel = (1, *self.weight.shape[2:]) if self.axes == 1 else self.weight.shape[2:]
        tall = size[0] + top + bottom - self.dilation[0] * (kernel[0] - 1)
        wide = size[1] + left + right - self.dilation[1] * (kernel[1] - 1)
        positions = (size[0] + top + bottom + self.stride[0]) * (size[1] + left + right + self.stride[1])
        room = channels * positions * (self.images or 1) < _OFFSETS
        return tall > 0 and wide > 0 and room

    def _made_ready(self, shape: torch.Size) -> "_Ready":
        geometry = Geometry(self.stride, self.padding, self.dilation, self.groups)
        if self.axes:
            batch = shape[0] if len(shape) == self.axes + 2 else 1
            size = (1, shape[-1]) if self.axes == 1 else (shape[-2], shape[-1])
            images = grouped(self.images or 1, batch)
        else:
            batch, size = shape[:-1].numel(), (1, 1)
            images = linear_group(batch)
        product = SparseProduct(self.weight, self.bias, geometry, size, batch, images, self.low, self.high)
        if self.axes:
            out_shape = (*shape[: -self.axes - 1], product.outputs, *product.out_size[-self.axes :])
        else:
            out_shape = (*shape[:-1], product.outputs)
        return _Ready(product, out_shape, self._copied_version())

    def _copied_version(self) -> tuple[int, ...]:
        """Changes when weight or bias do."""
        bias = self._buffers["bias"]
        weight = _version(cast(Tensor, self._buffers["weight"]))
        return weight if bias is None else weight + _version(bias)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own products: they hold addresses."""
        return {**self.__dict__, "_ready": {}}

    def extra_repr(self) -> str:
        return f"{self.way}, {tuple(self.weight.shape)}, {100 * self.kept:.1f} % kept"


@dataclass(frozen=True)
class _Ready:
    """A layer made ready for one shape of input, and for the weights as they were then."""

    product: SparseProduct
    out_shape: tuple[int, ...]
    version: tuple[int, ...]


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes when its numbers do, unless these are written to past torch."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def plain(x: Tensor) -> bool:
    """Whether the kernels take this: float32 on the CPU, of which nobody wants gradients, a trace or another type."""
    return (
        (type(x) is Tensor or type(x) is nn.Parameter)
        and x.dtype is torch.float32
        and x.is_cpu
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and not door.looked_on()
    )


def geometry_of(layer: nn.Module) -> tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int], int]:
    """Stride, padding (top, bottom, left, right), dilation and groups; a Linear or Conv1d layer has height 1."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d):
        return (1, 1), (0, 0, 0, 0), (1, 1), 1
    sides = list(layer._reversed_padding_repeated_twice)  # the last axis first
    left, right, top, bottom = sides if len(sides) == 4 else (*sides, 0, 0)
    stride, dilation = (1, *layer.stride)[-2:], (1, *layer.dilation)[-2:]
    return (stride[0], stride[1]), (top, bottom, left, right), (dilation[0], dilation[1]), layer.groups


def linear_group(batch: int) -> int:
    """Images beside each other for a Linear layer: as many vectors as needed, in groups that a tile holds."""
    if batch * 4 <= lanes():
        return 1
    vectors = -(-batch // lanes())
    groups = -(-vectors // GROUP_LIMIT)
    return -(-vectors // groups) * lanes()


def grouped(images: int, batch: int) -> int:
    """Images beside each other for a convolution: as asked, unless the batch would leave most lanes empty.

    What was measured on a machine of other lanes, and travelled in a pickle, falls back to one image.
    """
    while images > 1 and (batch * 2 < images or images % lanes()):
        images = images // 2 if images // 2 >= lanes() else 1
    return images


def group_choices(batch: int) -> list[int]:
    """The groups of images worth timing for this batch."""
    return sorted({grouped(images, batch) for images in (1, lanes(), 2 * lanes())})


def ways(layer: InferenceLayer, shape: tuple[int, ...]) -> list[InferenceLayer]:
    """The layer in every way worth timing for inputs of this shape; first the dense one, which always works."""
    dense = layer.taking(None)
    if kernels.available():
        groups = group_choices(shape[0]) if layer.axes else [linear_group(math.prod(shape[:-1]))]
        return [dense, *map(layer.taking, groups)]
    if layer.axes or len(shape) != 2:
        return [dense]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its CSR is in beta
        return [dense, layer.taking(None, layer.weight.to_sparse_csr())]
