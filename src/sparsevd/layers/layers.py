"""Sparse VD layers: a torch layer whose weights each carry a learned Gaussian noise.

A layer is built from its plain torch twin and takes over its parameters as they are: `weight` is θ, `bias` stays a
plain parameter without noise, and `log_sigma2` (log σ², float32) is new. In training the output is sampled (eq. 17,
18); in eval mode it is the twin's output with every weight of log α > threshold put to zero. `plain()` gives that twin.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.sampling import sample, sample_part, worth_bfloat16
from sparsevd.posterior import equations
from sparsevd.posterior.divergence import summed_kl

# log α = 3 is a Binary Dropout rate of 0.95: the paper's threshold.
THRESHOLD = 3.0
# Small against a usual weight (σ = 0.018), so that a converted network starts out almost as itself.
INITIAL_LOG_SIGMA2 = -8.0
# log σ² of a weight that was dropped for good: no noise, and with θ = 0 a log α above any threshold.
DROPPED_LOG_SIGMA2 = -60.0


def checked_threshold(threshold: float) -> float:
    """The threshold as a float; NaN compares false with everything and would prune nothing without a word."""
    if math.isnan(threshold):
        raise ArgumentError("threshold is NaN; give a number, such as the paper's 3.0")
    return float(threshold)


@dataclass(frozen=True)
class Part:
    """The inputs and units of a layer that still have weights; the layer's weight is then that part of the whole."""

    inputs: Tensor
    units: Tensor
    width: int  # inputs of the whole layer


class SparseLayer(nn.Module):
    """What all Sparse VD layers share: the parameters, the KL and the forward equation."""

    plain_type: ClassVar[type[nn.Module]]
    options: ClassVar[tuple[str, ...]]  # constructor arguments of the plain twin, kept as attributes of the same name
    channel: int  # the dimension of the output that the bias belongs to, counted from the end

    weight: Tensor
    bias: Tensor | None
    log_sigma2: Tensor

    def __init__(
        self,
        twin: nn.Module,
        *,
        threshold: float = THRESHOLD,
        initial_log_sigma2: float = INITIAL_LOG_SIGMA2,
        variance_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for option in self.options:
            setattr(self, option, getattr(twin, option))
        self.weight = cast(nn.Parameter, twin.weight)
        self.bias = cast(nn.Parameter | None, twin.bias)
        self.threshold = checked_threshold(threshold)
        self.initial_log_sigma2 = initial_log_sigma2
        self.part: Part | None = None  # set while `progressive` has made the weight smaller
        # Of A² and σ² in δ = A²·σ²; None: that of log σ², or where it is faster and `fit` found the CPU fit for it ...
        self.variance_dtype = variance_dtype
        self.bfloat16_where_faster = False  # ... bfloat16
        # Half precision is too coarse for log σ², which Adam moves in small steps.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.log_sigma2 = nn.Parameter(
            torch.full_like(self.weight, initial_log_sigma2, dtype=dtype),
            requires_grad=self.weight.requires_grad,  # a frozen layer stays frozen as a whole
        )
        self.train(twin.training)

    @abstractmethod
    def product(self, *args: Any, **kwargs: Any) -> Tensor:
        """product(input, weight, bias): the twin's linear map with another weight; A·W, or A ∗ w for a filter."""

    @abstractmethod
    def gradients(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        """gradients(grad, input, weight, wants): those of the product, for `sampling`."""

    def forward(self, input: Tensor, *shape: Any) -> Tensor:
        if not self.training:
            return self.product(input, self.pruned_weight(), self.bias, *shape)
        variance_dtype = self.variance_dtype or self.log_sigma2.dtype
        if self.bfloat16_where_faster and self.variance_dtype is None and worth_bfloat16(self, input, self.weight):
            variance_dtype = torch.bfloat16
        if self.part is None:
            return sample(self, input, self.weight, self.bias, self.log_sigma2, variance_dtype, *shape)
        if input.shape[self.channel] != self.part.width:  # any wider input would be read in part
            raise ArgumentError(
                f"the layer takes {self.part.width} inputs, and its input of shape {tuple(input.shape)} has "
                f"{input.shape[self.channel]}"
            )
        part = (self.part.inputs, self.part.units, self._units())
        return sample_part(self, input, self.weight, self.bias, self.log_sigma2, variance_dtype, part, *shape)

    def can_contract(self) -> bool:
        """Whether the layer can compute with a part of its inputs and units: `weight` is [unit, input, ...] then."""
        return False

    def _units(self) -> int:
        """How many outputs, or channels of outputs, the layer has."""
        raise NotImplementedError

    def log_alpha(self) -> Tensor:
        """log α of every weight."""
        return equations.log_alpha(self.weight, self.log_sigma2)

    def pruned_weight(self, threshold: float | None = None) -> Tensor:
        """The weight with exact zeros where log α exceeds the threshold (the layer's own by default)."""
        limit = self.threshold if threshold is None else checked_threshold(threshold)
        return equations.pruned(self.weight, self.log_sigma2, limit)

    @torch.no_grad()
    def drop(self, which: Tensor) -> None:
        """Make these weights zero for good: θ = 0 and σ = 0 up to rounding.

        Training must then keep θ there, by multiplying it with `alive()` after each step.
        """
        self.weight.masked_fill_(which, 0)
        self.log_sigma2.masked_fill_(which, DROPPED_LOG_SIGMA2)

    @torch.no_grad()
    def alive(self) -> Tensor:
        """False for every weight that was dropped for good."""
        return (self.weight != 0) | (self.log_sigma2 > DROPPED_LOG_SIGMA2 + 1)

    @torch.no_grad()
    def inputs_and_units(self) -> list[int]:
        """How many inputs, and how many outputs, have a weight that is not pruned; of one group for a grouped layer."""
        kept = self.pruned_weight() != 0
        kept = kept.flatten(2).any(2) if kept.ndim > 2 else kept
        return [int(kept.any(0).sum()), int(kept.any(1).sum())]

    def kl(self) -> Tensor:
        """KL(q ‖ p) of the whole layer, a scalar (eq. 14)."""
        return summed_kl([(self.weight, self.log_sigma2)])

    def plain(self, threshold: float | None = None) -> nn.Module:
        """The plain torch layer with exact zeros, which computes what this layer computes in eval mode."""
        arguments = {option: getattr(self, option) for option in self.options}
        twin = self.plain_type(**arguments, bias=self.bias is not None, device="meta")
        weight = self.pruned_weight(threshold).detach()
        twin.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        twin.bias = copy.deepcopy(self.bias)  # type: ignore[assignment]
        return twin.train(self.training)

    def reset_parameters(self) -> None:
        """Fresh weights as the plain twin would draw them, and fresh noise: for layers made on the meta device."""
        cast(Any, self.plain_type).reset_parameters(self)
        nn.init.constant_(self.log_sigma2, self.initial_log_sigma2)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """Move or cast the parameters, as `.to()` and `.half()` do; log σ² never becomes narrower than float32."""
        before = self.log_sigma2.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.log_sigma2.dtype.itemsize < 4:
            self.log_sigma2.data = before.to(self.log_sigma2.device, torch.float32)
        return self

    def extra_repr(self) -> str:
        settings = {option: getattr(self, option) for option in self.options}
        settings |= {"bias": self.bias is not None, "threshold": self.threshold}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


@final
class SparseLinear(SparseLayer):
    """Sparse VD twin of `nn.Linear` (eq. 17)."""

    plain_type = nn.Linear
    options = ("in_features", "out_features")
    channel = -1

    out_features: int

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_input = grad @ weight if wants[0] else None
        if grad.ndim != 2:
            grad, input = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        return grad_input, grad.t() @ input if wants[1] else None

    def can_contract(self) -> bool:
        return True

    def _units(self) -> int:
        return self.out_features


def _convolution_gradients(
    grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool], settings: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight; settings: stride, padding, dilation, transposed, output_padding, groups."""
    batched = input.ndim == weight.ndim
    if not batched:
        grad, input = grad.unsqueeze(0), input.unsqueeze(0)
    backward = torch.ops.aten.convolution_backward
    grad_input, grad_weight, _ = backward(grad, input, weight, None, *settings, [*wants, False])
    return grad_input if batched or grad_input is None else grad_input.squeeze(0), grad_weight


class SparseConv(SparseLayer):
    """Sparse VD convolution (eq. 18) in any number of dimensions."""

    options = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    convolve: ClassVar[Callable[..., Tensor]]

    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    @property
    def channel(self) -> int:  # type: ignore[override]
        return -1 - len(self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        if self._pads_before():
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, self._both_sides(), mode=mode)
        return super().forward(input)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return type(self).convolve(input, weight, bias, self.stride, self._padding(), self.dilation, self.groups)

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        settings = (self.stride, self._padding(), self.dilation, False, [0], self.groups)
        return _convolution_gradients(grad, input, weight, wants, settings)

    def can_contract(self) -> bool:
        return self.groups == 1

    def _units(self) -> int:
        return self.out_channels

    def _pads_before(self) -> bool:
        """Whether the padding is more than a number of zeros on both sides, and so a step of its own."""
        sides = self._both_sides()
        return self.padding_mode != "zeros" or sides[::2] != sides[1::2]

    def _padding(self) -> list[int]:
        return [0] * len(self.kernel_size) if self._pads_before() else self._both_sides()[::2][::-1]

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


class SparseConvTranspose(SparseLayer):
    """Sparse VD transposed convolution in any number of dimensions; eq. 18 with ∗ read as its transpose."""

    options = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "output_padding",
        "groups",
        "dilation",
        "padding_mode",
    )
    convolve: ClassVar[Callable[..., Tensor]]

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    dilation: tuple[int, ...]

    @property
    def channel(self) -> int:  # type: ignore[override]
        return -1 - len(self.kernel_size)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return super().forward(input, self._output_padding(input, output_size))

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: tuple[int, ...]) -> Tensor:
        settings = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return type(self).convolve(input, weight, bias, *settings)

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool], output_padding: tuple[int, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        settings = (self.stride, self.padding, self.dilation, True, output_padding, self.groups)
        return _convolution_gradients(grad, input, weight, wants, settings)

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


# Every final class by the exact type of its plain twin; a new layer enters here, and the contract tests find it.
SPARSE_TYPES: dict[type[nn.Module], type[SparseLayer]] = {
    layer.plain_type: layer
    for layer in (
        SparseLinear,
        SparseConv1d,
        SparseConv2d,
        SparseConv3d,
        SparseConvTranspose1d,
        SparseConvTranspose2d,
        SparseConvTranspose3d,
    )
}
