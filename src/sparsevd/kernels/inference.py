"""The door to the sparse inference kernels: a weight with zeros, made ready for one size of image, and its product.

What the C side computes is said in `inference.h`. Here the nonzeros of a weight become offsets into its planes.
"""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.kernels.loading import BEST, lanes, required
from sparsevd.kernels.structs import NONZERO, LayerStruct

ENOUGH = 1_000_000  # multiplications that make a second thread worth waking
GROUP_LIMIT = 12  # vectors of images beside each other: what a tile of the kernel holds
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Geometry:
    """What a convolution does besides its weights. A Linear layer is one of 1×1 images, a Conv1d one of height 1."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, bottom, left, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        if min(*self.stride, *self.dilation, self.groups) < 1 or min(self.padding) < 0:
            raise ArgumentError(f"{self}: stride, dilation and groups must be at least 1, padding at least 0")


class Planes:
    """Where the pixels of one channel lie, with the zeros around them: row by row, for each phase of the stride."""

    def __init__(self, size: tuple[int, int], kernel: tuple[int, int], geometry: Geometry) -> None:
        (height, width), (self.stride_y, self.stride_x) = size, geometry.stride
        top, bottom, left, right = geometry.padding
        tall, wide = height + top + bottom, width + left + right
        self.out_height = (tall - geometry.dilation[0] * (kernel[0] - 1) - 1) // self.stride_y + 1
        self.out_width = (wide - geometry.dilation[1] * (kernel[1] - 1) - 1) // self.stride_x + 1
        self.rows = -(-tall // self.stride_y)
        if self.stride_x == 1:  # the zeros at the end of a row are those at the beginning of the next
            self.pitch, beyond = max(width + max(left, right), self.out_width), max(left, right)
        else:
            self.pitch, beyond = -(-wide // self.stride_x), 0
        self.size = self.stride_y * self.stride_x * self.rows * self.pitch + beyond
        door.int32("positions in a plane", self.size)  # before memory is taken for them
        y, x = np.divmod(np.arange(height * width), width)
        self.pixels = self.position(y + top, x + left)
        self.zeros = np.setdiff1d(np.arange(self.size), self.pixels)

    def position(self, y: Ints, x: Ints) -> Ints:
        """Where the pixel (y, x) of the image with its zeros lies."""
        phase = (y % self.stride_y) * self.stride_x + x % self.stride_x
        return (phase * self.rows + y // self.stride_y) * self.pitch + x // self.stride_x


def _with_four_axes(weight: Tensor, groups: int) -> Floats:
    """Outputs, inputs of a group, height and width of a filter."""
    if not 2 <= weight.ndim <= 4 or weight.shape[0] % groups:
        raise ArgumentError(f"a weight of shape {tuple(weight.shape)} in {groups} groups is no layer")
    four_axes = (*weight.shape[:2], *(1,) * (4 - weight.ndim), *weight.shape[2:])
    return door.plain(weight.detach()).numpy().reshape(four_axes)


def _nonzeros(dense: Floats, groups: int) -> tuple[Any, ...]:
    """Output, input of all groups, row, column and value of each weight that is not zero."""
    filters, inputs, y, x = np.nonzero(dense)
    inputs_of_all = inputs + filters // (dense.shape[0] // groups) * dense.shape[1]
    return filters, inputs_of_all, y, x, dense[filters, inputs, y, x]


def _layer(planes: Planes, **fields: Any) -> LayerStruct:
    """The struct of a layer whose images lie in these planes."""
    return LayerStruct(
        out_height=planes.out_height,
        out_width=planes.out_width,
        stride_x=planes.stride_x,
        pitch=planes.pitch,
        plane=planes.size,
        out_pitch=planes.out_width,
        out_plane=planes.out_height * planes.out_width,
        **fields,
    )


class SparseProduct:
    """One layer for images of one size, `batch` at a call, `images` of them beside each other.

    Output is clamp(Wx + b, low, high), float32, on the CPU. Safe to call from several threads.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        size: tuple[int, int],
        batch: int,
        images: int = 1,
        low: float = -float("inf"),
        high: float = float("inf"),
        instruction_set: int = BEST,
    ) -> None:
        built = required()
        vector = lanes(instruction_set)
        if vector == 0 or images < 1 or (images > 1 and images % vector) or batch < 0 or min(size) < 1:
            raise ArgumentError(
                f"instruction set {instruction_set!r} with batch {batch}, images of {size}, {images} side by side: the "
                f"machine must have it, and these must be 1 or a multiple of its {vector or 'numbers in a register'}"
            )
        self.instruction_set, self.batch = instruction_set, batch
        dense = _with_four_axes(weight, geometry.groups)
        self.outputs, channels = dense.shape[0], dense.shape[1] * geometry.groups
        if bias is not None and bias.shape != (self.outputs,):
            raise ArgumentError(f"a bias of shape {tuple(bias.shape)} for {self.outputs} outputs")
        door.int32("pixels of a group of images", channels * size[0] * size[1] * images)
        planes = Planes(size, dense.shape[2:], geometry)
        self.out_size = (planes.out_height, planes.out_width)
        if min(self.out_size) < 1:
            raise ArgumentError(f"a filter of {dense.shape[2:]} does not fit images of {size}")
        door.int32("numbers in the planes", channels * planes.size * images)
        door.int32("numbers in the outputs", self.outputs * planes.out_height * planes.out_width * images)

        filters, inputs, y, x, values = _nonzeros(dense, geometry.groups)
        # Read in place what has no zeros around it, unless tiles would read past its end.
        whole_tiles = planes.out_width % vector == 0 or self.out_size == (1, 1)
        direct = images == 1 and geometry.stride == (1, 1) and planes.size == size[0] * size[1] and whole_tiles
        read = np.full(channels, direct)
        read[inputs] = True
        slot = np.where(read, np.cumsum(read) - 1, -1)
        offsets = planes.position(y * geometry.dilation[0], x * geometry.dilation[1])
        offsets = (slot[inputs] * planes.size + offsets) * images
        zero_runs = _runs(planes.zeros)
        self._arrays = {
            "slot": slot.astype(np.int32),
            "place": planes.pixels.astype(np.int32),
            "zero": zero_runs.astype(np.int32),
            **in_order(self.outputs, filters, offsets, values),
            "bias": np.zeros(self.outputs, np.float32) if bias is None else door.plain(bias.detach()).numpy().copy(),
        }
        self._layer = _layer(
            planes,
            **{"channels": channels, "height": size[0], "width": size[1], "outputs": self.outputs, "images": images},
            **{"used": int(read.sum()), "zero_runs": len(zero_runs), "direct": direct, "low": low, "high": high},
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self._address = ctypes.addressof(self._layer)
        self._scratch, self._run = built.sparsevd_sparse_scratch(self._address), built.sparsevd_sparse_run
        self._inputs = batch * channels * size[0] * size[1]
        self._outputs = batch * self.outputs * planes.out_height * planes.out_width
        self.small = len(values) * planes.out_height * planes.out_width * batch < ENOUGH

    def __call__(self, x: Tensor, out_shape: tuple[int, ...], threads: int | None = None) -> Tensor:
        """x has batch × channels × height × width numbers; out_shape is how the answer's numbers are laid out."""
        x = door.plain(x)
        out = torch.empty(*out_shape, dtype=torch.float32, device=door.CPU)
        if x.numel() != self._inputs or out.numel() != self._outputs:
            raise ArgumentError(
                f"the layer was made for {self._inputs} numbers and gives {self._outputs}, "
                f"not {tuple(x.shape)} and {tuple(out_shape)}"
            )
        threads = max(1, threads or (1 if self.small else torch.get_num_threads()))
        memory = scratch(threads * self._scratch)
        self._run(self.instruction_set, threads, self._address, self.batch, x.data_ptr(), out.data_ptr(), memory)
        return out


def in_order(outputs: int, filters: Ints, offsets: Ints, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The nonzeros as the kernel reads them. Filters of as many nonzeros follow each other: the processor then predicts
    where their loops end."""
    counts = np.bincount(filters, minlength=outputs)
    order = np.argsort(counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(outputs)
    by_rank = np.argsort(rank[filters], kind="stable")
    nonzeros = np.empty(len(values), dtype=NONZERO)
    nonzeros["offset"], nonzeros["weight"] = offsets[by_rank], values[by_rank]
    starts = np.concatenate([[0], np.cumsum(counts[order])])
    return {"order": order.astype(np.int32), "starts": starts.astype(np.int32), "nonzeros": nonzeros}


def _runs(positions: Ints) -> Ints:
    """Ascending positions as [runs, 2]: the first of each run of neighbours, and their number."""
    firsts = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
    return np.stack([positions[firsts], np.diff(firsts, append=len(positions))], axis=1)


_OWN = threading.local()


def scratch(floats: int) -> int:
    """The address of scratch memory of the calling thread, a multiple of 64; it grows as needed and is kept."""
    if floats > getattr(_OWN, "floats", -1):
        _OWN.memory = torch.empty(floats + 16, dtype=torch.float32, device="cpu")
        _OWN.floats, _OWN.address = floats, -(-_OWN.memory.data_ptr() // 64) * 64
    return int(_OWN.address)
