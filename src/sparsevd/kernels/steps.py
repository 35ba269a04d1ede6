"""A network as the kernels compute it: activations with their places in scratch memory, and steps between them.

A plan runs these steps, and the exported C file is written from them.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.kernels.inference import Geometry, Ints, Planes, in_order

INFINITY = float("inf")
MOST_NUMBERS = 1 << 28  # of all activations of one image, each of which has its place
OVERREAD = 64  # floats that a tile may read past the last plane
_ROUNDING = 16  # floats: activations begin at whole cache lines


@dataclass
class Value:
    """An activation: one plane per channel, its rows `pitch` positions apart, its first pixel `first` into it."""

    channels: int
    height: int
    width: int
    pitch: int = 0
    plane: int = 0
    first: int = 0
    planes: int = 0  # floats before the first plane
    padding: tuple[int, int] = (0, 0)  # rows of zeros above and below, positions of zeros beside

    @property
    def numbers(self) -> int:
        return self.channels * self.height * self.width

    def offsets(self) -> Ints:
        """Of every number in its logical order, in positions from the first plane."""
        return cast(Ints, (np.arange(self.channels)[:, None] * self.plane + self.pixels()).reshape(-1))

    def pixels(self) -> Ints:
        """The same of the first channel."""
        rows, columns = np.arange(self.height)[:, None] * self.pitch, np.arange(self.width)
        return cast(Ints, (self.first + rows + columns).reshape(-1))


@dataclass
class Window:
    """Of a pooling."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    count_padding: bool = False


class StepKind(enum.IntEnum):
    """`enum step_kind` of inference.h, in its order."""

    PRODUCT = 0
    REPACK = 1
    MAX_POOL = 2
    AVERAGE_POOL = 3
    AFFINE = 4
    ADD = 5


@dataclass
class Step:
    """One operation, of which there is a class for each kind; its results are clamped to the bounds."""

    kind: ClassVar[StepKind]
    name: str
    inputs: tuple[Value, ...]
    out: Value
    bounds: tuple[float, float] = field(default=(-INFINITY, INFINITY), kw_only=True)

    @property
    def source(self) -> Value:
        return self.inputs[0]


@dataclass
class Product(Step):
    """A convolution; or, where it is linear, a product with all numbers of its input."""

    kind = StepKind.PRODUCT
    weight: Tensor  # [outputs, inputs of a group, kernel_y, kernel_x]
    bias: Tensor | None
    geometry: Geometry = field(default_factory=Geometry)
    linear: bool = False
    phases: Planes | None = None  # how its input lies, if a Repack came before

    @property
    def kernel(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[3]

    def biases(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.zeros(self.out.channels, np.float32) if self.bias is None else self.bias.numpy()


@dataclass
class Repack(Step):
    """The pixels of an image laid out for a convolution, by the phases of its stride."""

    kind = StepKind.REPACK
    phases: Planes


@dataclass
class Pool(Step):
    window: Window


@dataclass
class MaxPool(Pool):
    kind = StepKind.MAX_POOL


@dataclass
class AveragePool(Pool):
    kind = StepKind.AVERAGE_POOL


@dataclass
class Affine(Step):
    """scale · x + shift, for each channel."""

    kind = StepKind.AFFINE
    scale: Tensor
    shift: Tensor


@dataclass
class Add(Step):
    kind = StepKind.ADD


@dataclass
class Network:
    """The steps in their order, and where input and output lie."""

    steps: list[Step]
    values: list[Value]
    input: Value
    output: Value
    output_shape: tuple[int, ...]

    def placed(self, images: int) -> int:
        """Give every activation its place for groups of this many images; returns the floats of scratch memory."""
        floats = 0
        for value in self.values:
            value.planes = floats
            size = value.channels * value.plane * images + OVERREAD
            floats += -(-size // _ROUNDING) * _ROUNDING
        if floats >= 2**31 or floats // images > MOST_NUMBERS:
            raise GraphError(
                f"the activations of {images} images need {floats:,} numbers, which is more than a plan holds; use "
                "sparsevd.accelerate"
            )
        return floats


def nonzeros_of(step: Product, images: int) -> dict[str, Any]:
    """Order, starts and nonzeros of a product, with offsets into the planes that its input has."""
    weight = step.weight.numpy()
    source, geometry = step.source, step.geometry
    filters, inputs, y, x = np.nonzero(weight)
    values = weight[filters, inputs, y, x]
    inputs = inputs + filters // (weight.shape[0] // geometry.groups) * weight.shape[1]
    y, x = y * geometry.dilation[0], x * geometry.dilation[1]
    if step.linear:  # it reads all numbers of its input, wherever they lie
        offsets = source.offsets()[inputs]
    elif step.phases is not None:
        offsets = inputs * source.plane + step.phases.position(y, x)
    else:
        top, left = source.padding
        origin = (top - geometry.padding[0]) * source.pitch + left - geometry.padding[2]
        offsets = inputs * source.plane + origin + y * source.pitch + x
    return in_order(weight.shape[0], filters, offsets * images, values)
