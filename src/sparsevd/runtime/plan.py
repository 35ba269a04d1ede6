"""A whole network as one call: no Python between its layers, and no memory taken but for the output."""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.graph import Graph, capture
from sparsevd.kernels import BEST, inference
from sparsevd.kernels.inference import ENOUGH, LayerStruct
from sparsevd.runtime.layers import grouped, lanes
from sparsevd.runtime.network import Network, Step, Value, network, nonzeros_of
from sparsevd.runtime.timing import timings

KINDS = ("PRODUCT", "REPACK", "MAX_POOL", "AVERAGE_POOL", "AFFINE", "ADD")  # enum step_kind
_SHAPES_KEPT = 64  # that a plan stays ready for


class _Value(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ["channels", "height", "width", "pitch", "plane", "planes", "first"]
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("input", _Value),
        ("second", _Value),
        ("out", _Value),
        *(
            (name, ctypes.c_int32)
            for name in ["kernel_y", "kernel_x", "stride_y", "stride_x", "top", "left", "dilation_y", "dilation_x"]
        ),
        ("count_padding", ctypes.c_int32),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("layer", ctypes.c_void_p),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("images", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("out_planes", ctypes.c_int32),
        ("out_size", ctypes.c_int32),
        ("scratch", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("input_planes", ctypes.c_int32),
        ("step", ctypes.c_void_p),
    )


class Plan:
    """A network for any batch size: call it with a float32 tensor on the CPU. Safe to call from several threads."""

    def __init__(self, graph: Graph, images: int = 1, instruction_set: int = BEST) -> None:
        if inference.library() is None:
            raise ArgumentError(
                "a plan needs the compiled kernels; install with a C compiler, or use sparsevd.accelerate"
            )
        self.network = network(graph)
        self.input_shape = tuple(graph.inputs[0].shape[1:])
        self.images, self.instruction_set = images, instruction_set
        self._programs: dict[int, _Program] = {}
        self._ready: dict[torch.Size, _Ready] = {}
        self._making = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        ready = self._ready.get(x.shape) or self._made_ready(x.shape)
        if x.dtype is not torch.float32 or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            raise ArgumentError(f"a plan takes float32 on the CPU without gradients, not {x.dtype} on {x.device}")
        return ready.program(x if x.is_contiguous() else x.contiguous(), ready.out_shape, ready.batch)

    def _made_ready(self, shape: torch.Size) -> "_Ready":
        if tuple(shape[1:]) != self.input_shape or not shape:
            raise ArgumentError(f"the plan takes [batch, {', '.join(map(str, self.input_shape))}], not {tuple(shape)}")
        images = grouped(self.images, shape[0]) if shape[0] > 0 else 1
        with self._making:  # laying out a network changes it
            if images not in self._programs:
                self._programs[images] = _Program(self.network, images, self.instruction_set)
            if len(self._ready) >= _SHAPES_KEPT:
                self._ready.clear()
            ready = _Ready(self._programs[images], (shape[0], *self.network.output_shape), shape[0])
            self._ready[shape] = ready
        return ready


@dataclass(frozen=True)
class _Ready:
    """What one shape of input asks for."""

    program: "_Program"
    out_shape: tuple[int, ...]
    batch: int


class _Program:
    """A network laid out for groups of so many images."""

    def __init__(self, net: Network, images: int, instruction_set: int) -> None:
        built = inference.library()
        assert built is not None
        self._kept: list[Any] = []  # what the structs point to
        floats = net.placed(images)
        self.floats, self.instruction_set = -(-floats // 16) * 16, instruction_set
        self.images = images
        steps = (_Step * len(net.steps))(*(self._step(step) for step in net.steps))
        self._plan = _Plan(
            images=images,
            steps=len(steps),
            out_planes=net.output.planes,
            out_size=net.output.numbers,
            scratch=self.floats,
            input=ctypes.addressof(self._packing(net.input)),
            input_planes=net.input.planes,
            step=ctypes.addressof(steps),
        )
        self._kept.append(steps)
        self._address = ctypes.addressof(self._plan)
        self._run = built.sparsevd_plan_run
        self._free: list[tuple[int, int, Tensor]] = []  # scratch memory that no call uses now
        self.work = images * sum(
            int(torch.count_nonzero(cast(Tensor, step.weight))) * step.out.height * step.out.width
            for step in net.steps
            if step.kind == "PRODUCT"
        )

    def __call__(self, x: Tensor, out_shape: tuple[int, ...], batch: int) -> Tensor:
        out = x.new_empty(out_shape)
        threads = torch.get_num_threads()
        if threads > 1 and self.work * -(-batch // self.images) < ENOUGH:
            threads = 1
        try:
            room, address, memory = self._free.pop()
        except IndexError:
            room = 0
        if room < threads:
            memory = torch.zeros(threads * self.floats + 16, dtype=torch.float32, device="cpu")
            room, address = threads, -(-memory.data_ptr() // 64) * 64
        self._run(self.instruction_set, threads, self._address, batch, x.data_ptr(), out.data_ptr(), address)
        self._free.append((room, address, memory))
        return out

    def _pointer(self, array: Any) -> int:
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return int(array.ctypes.data)

    def _packing(self, value: Value) -> LayerStruct:
        """How the input gets into its planes."""
        pixels = value.offsets()[: value.height * value.width]
        layer = LayerStruct(
            channels=value.channels,
            height=value.height,
            width=value.width,
            images=self.images,
            used=value.channels,
            stride_x=1,
            pitch=value.pitch,
            plane=value.plane,
            slot=self._pointer(np.arange(value.channels, dtype=np.int32)),
            place=self._pointer(pixels.astype(np.int32)),
        )
        self._kept.append(layer)
        return layer

    def _layer(self, step: Step) -> LayerStruct:
        source, out = step.inputs[0], step.out
        arrays = {name: self._pointer(array) for name, array in nonzeros_of(step, self.images).items()}
        bias = np.zeros(out.channels, np.float32) if step.shift is None else step.shift.numpy()
        layer = LayerStruct(
            channels=source.channels,
            height=source.height,
            width=source.width,
            outputs=out.channels,
            out_height=out.height,
            out_width=out.width,
            images=self.images,
            used=source.channels,
            stride_x=step.geometry.stride[1],
            pitch=source.pitch,
            plane=source.plane,
            out_pitch=out.pitch,
            out_plane=out.plane,
            low=step.bounds[0],
            high=step.bounds[1],
            bias=self._pointer(bias),
            **arrays,
        )
        self._kept.append(layer)
        return layer

    def _step(self, step: Step) -> _Step:
        result = _Step(
            kind=KINDS.index(step.kind),
            input=_value(step.inputs[0]),
            second=_value(step.inputs[-1]),
            out=_value(step.out),
            low=step.bounds[0],
            high=step.bounds[1],
        )
        if step.kind == "PRODUCT":
            result.layer = ctypes.addressof(self._layer(step))
        elif step.kind == "REPACK":
            assert step.phases is not None
            layer = LayerStruct(place=self._pointer(step.phases.pixels.astype(np.int32)))
            self._kept.append(layer)
            result.layer = ctypes.addressof(layer)
        elif step.kind == "AFFINE":
            result.scale = self._pointer(cast(Tensor, step.scale).numpy())
            result.shift = self._pointer(cast(Tensor, step.shift).numpy())
        if step.window is not None:
            window = step.window
            (result.kernel_y, result.kernel_x), (result.stride_y, result.stride_x) = window.kernel, window.stride
            (result.top, result.left), (result.dilation_y, result.dilation_x) = window.padding, window.dilation
            result.count_padding = window.count_padding
        return result


def _value(value: Value) -> _Value:
    return _Value(value.channels, value.height, value.width, value.pitch, value.plane, value.planes, value.first)


@torch.no_grad()
def plan(model: nn.Module | Graph, example: Tensor) -> Plan:
    """The whole network as one call, for networks of the operations that `sparsevd.runtime.network` knows.

        run = sparsevd.plan(pruned, torch.randn(1, 1, 28, 28))
        y = run(x)

    How many images lie beside each other is timed with the example, which should have the batch size of later use.
    """
    graph = model if isinstance(model, Graph) else capture(model, example)
    made = Plan(graph)
    choices = sorted({grouped(images, len(example)) for images in (1, lanes(), 2 * lanes())})
    if len(choices) > 1:

        def with_images(images: int) -> Any:
            variant = Plan(graph, images)
            return lambda: variant(example)

        seconds = [timing.median for timing in timings([with_images(images) for images in choices])]
        made.images = choices[seconds.index(min(seconds))]
    return made
