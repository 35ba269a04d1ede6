"""The door to the sparse inference kernels: a weight with zeros, made ready for one size of image, and its product.

What the C side computes is said in `inference.h`. Here the nonzeros of a weight become offsets into its planes.
"""

import ctypes
import functools
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsevd import kernels

GROUP_LIMIT = 12  # vectors of images beside each other: what a tile of the kernel holds
_INTS = "channels height width outputs out_height out_width images used stride_x pitch plane"
_POINTERS = "slot place zero order starts nonzeros bias"


class _Layer(ctypes.Structure):
    """struct sparse_layer"""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (*_INTS.split(), "zero_runs", "direct")),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None without them."""
    built = kernels.library()
    if built is None:
        return None
    try:
        built.sparsevd_sparse_lanes.argtypes, built.sparsevd_sparse_lanes.restype = [ctypes.c_int], ctypes.c_int
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        built.sparsevd_sparse_scratch.argtypes, built.sparsevd_sparse_scratch.restype = [pointer], size
        run = built.sparsevd_sparse_run
        run.argtypes, run.restype = [ctypes.c_int, ctypes.c_int, pointer, size, pointer, pointer, pointer], None
    except AttributeError:  # built from other sources than these
        return None
    return built


@dataclass(frozen=True)
class Geometry:
    """What a convolution does besides its weights. A Linear layer is one of 1×1 images, and a Conv1d one of height 1."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, bottom, left, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class SparseProduct:
    """One layer for images of one size, `images` of them beside each other: call it with [N, C, H, W] or [N, C].

    Output is clamp(Wx + b, low, high), float32, on the CPU. Safe to call from several threads.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        size: tuple[int, int],
        images: int = 1,
        low: float = -float("inf"),
        high: float = float("inf"),
        instruction_set: int = kernels.BEST,
    ) -> None:
        built = library()
        assert built is not None
        lanes = built.sparsevd_sparse_lanes(instruction_set)
        assert lanes and (images == 1 or images % lanes == 0), (lanes, images)
        self.instruction_set, self.images = instruction_set, images
        dense = weight.detach().cpu().float().numpy().reshape(*weight.shape[:2], *((1,) * (4 - weight.ndim)), *weight.shape[2:])
        self.outputs, self.channels = dense.shape[0], dense.shape[1] * geometry.groups
        (height, width), (stride_y, stride_x), (dilation_y, dilation_x) = size, geometry.stride, geometry.dilation
        top, bottom, left, right = geometry.padding
        self.in_size = size
        reach_y, reach_x = dilation_y * (dense.shape[2] - 1), dilation_x * (dense.shape[3] - 1)
        out_height = (height + top + bottom - reach_y - 1) // stride_y + 1
        out_width = (width + left + right - reach_x - 1) // stride_x + 1
        assert out_height > 0 and out_width > 0, (out_height, out_width)
        self.out_size = (out_height, out_width)

        # The phases of a stride lie one after the other, each with its own rows.
        rows = -(-(height + top + bottom) // stride_y)
        if stride_x == 1:  # zeros at the end of a row are those at the beginning of the next
            pitch, overrun = max(width + max(left, right), out_width), max(left, right)
        else:
            pitch, overrun = -(-(width + left + right) // stride_x), 0
        plane = stride_y * stride_x * rows * pitch + overrun

        def position(y: np.ndarray, x: np.ndarray) -> np.ndarray:
            """Where in a plane the pixel (y, x) of the image with its zeros lies."""
            phase = (y % stride_y) * stride_x + x % stride_x
            return (phase * rows + y // stride_y) * pitch + x // stride_x

        y, x = np.divmod(np.arange(height * width), width)
        place = position(y + top, x + left)
        zero = _runs(np.setdiff1d(np.arange(plane), place))
        filters, channels, kernel_y, kernel_x = np.nonzero(dense)
        values = dense[filters, channels, kernel_y, kernel_x]
        channels = channels + filters // (self.outputs // geometry.groups) * dense.shape[1]
        single_output = out_height * out_width * images == 1
        direct = not len(zero) and plane == height * width and images == 1
        direct = direct and stride_x == stride_y == 1 and (single_output or out_width % lanes == 0)
        read = np.zeros(self.channels, bool)
        read[channels] = True
        read |= direct
        slot = np.where(read, np.cumsum(read) - 1, -1)
        offsets = (slot[channels] * plane + position(kernel_y * dilation_y, kernel_x * dilation_x)) * images
        counts = np.bincount(filters, minlength=self.outputs)
        order = np.argsort(counts, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(self.outputs)
        by_filter = np.argsort(rank[filters], kind="stable")
        nonzeros = np.empty(len(values), dtype=[("offset", np.int32), ("weight", np.float32)])
        nonzeros["offset"], nonzeros["weight"] = offsets[by_filter], values[by_filter]
        self._arrays = {
            "slot": slot.astype(np.int32),
            "place": place.astype(np.int32),
            "zero": zero.astype(np.int32),
            "order": order.astype(np.int32),
            "starts": np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int32),
            "nonzeros": nonzeros,
            "bias": np.zeros(self.outputs, np.float32) if bias is None else bias.detach().cpu().float().numpy().copy(),
        }
        self._layer = _Layer(
            channels=self.channels,
            height=height,
            width=width,
            outputs=self.outputs,
            out_height=out_height,
            out_width=out_width,
            images=images,
            used=int(read.sum()),
            stride_x=stride_x,
            pitch=pitch,
            plane=plane,
            zero_runs=len(zero),
            direct=direct,
            low=low,
            high=high,
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self._address = ctypes.addressof(self._layer)
        self._scratch = built.sparsevd_sparse_scratch(self._address)
        self._run = built.sparsevd_sparse_run

    def __call__(self, x: Tensor, threads: int | None = None) -> Tensor:
        """x is contiguous [N, C, H, W] or [N, C] of the right size."""
        threads = threads or torch.get_num_threads()
        out = torch.empty((x.shape[0], self.outputs, *(self.out_size if x.ndim == 4 else ())), dtype=torch.float32)
        self._run(
            self.instruction_set,
            threads,
            self._address,
            x.shape[0],
            x.data_ptr(),
            out.data_ptr(),
            scratch(threads * self._scratch),
        )
        return out


def _runs(positions: np.ndarray) -> np.ndarray:
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
