"""The door to a whole network in C: its steps as structs, checked against the memory that they will work in."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.kernels.inference import ENOUGH
from sparsevd.kernels.loading import lanes, required
from sparsevd.kernels.steps import (
    OVERREAD,
    Add,
    Affine,
    Network,
    Pool,
    Product,
    Repack,
    Step,
    Value,
    Window,
    nonzeros_of,
)
from sparsevd.kernels.structs import NONZERO, LayerStruct, PlanStruct, StepStruct, ValueStruct


class Program:
    """A network laid out for groups of so many images. Safe to call from several threads."""

    def __init__(self, net: Network, images: int, instruction_set: int) -> None:
        built = required()
        vector = lanes(instruction_set)
        if vector == 0 or images < 1 or (images > 1 and images % vector):
            raise ArgumentError(
                f"instruction set {instruction_set!r} with {images} images side by side: the machine must have it, "
                f"and they must be 1 or a multiple of its {vector or 'numbers in a register'}"
            )
        self._kept: list[Any] = []  # what the structs point to
        floats = net.placed(images)
        self.floats, self.instruction_set, self.images = -(-floats // 16) * 16, instruction_set, images
        in_phases = {id(step.out) for step in net.steps if isinstance(step, Repack)}
        for value in net.values:
            self._check(value, id(value) in in_phases)
        steps = (StepStruct * len(net.steps))(*(self._step(step) for step in net.steps))
        self._plan = PlanStruct(
            images=images,
            steps=len(steps),
            out_planes=net.output.planes,
            out_size=door.int32("outputs", net.output.numbers),
            scratch=self.floats,
            input=ctypes.addressof(self._packing(net.input)),
            input_planes=net.input.planes,
            step=ctypes.addressof(steps),
        )
        self._kept.append(steps)
        self._address = ctypes.addressof(self._plan)
        self._inputs, self._outputs = net.input.numbers, net.output.numbers
        self._run = built.sparsevd_plan_run
        self._free: list[tuple[int, int, Tensor]] = []  # scratch memory that no call uses now
        self.work = images * sum(
            int(torch.count_nonzero(step.weight)) * step.out.height * step.out.width
            for step in net.steps
            if isinstance(step, Product)
        )

    def __call__(self, x: Tensor, out_shape: tuple[int, ...]) -> Tensor:
        """x and out_shape have the batch first; the rest has the numbers of the network's input and output."""
        x = door.plain(x)
        batch = out_shape[0]
        out = torch.empty(*out_shape, dtype=torch.float32, device=door.CPU)
        if x.numel() != batch * self._inputs or out.numel() != batch * self._outputs:
            raise ArgumentError(
                f"a batch of {batch} has {batch * self._inputs} numbers and gives {batch * self._outputs}, "
                f"not {tuple(x.shape)} and {tuple(out_shape)}"
            )
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

    # ---- what C will read and write lies where it may ----

    def _check(self, value: Value, in_phases: bool) -> None:
        """An activation fits its planes, and these the scratch memory. In phases, `_places` looks at each pixel."""
        last = value.first + (value.height - 1) * value.pitch + value.width
        rows_fit = in_phases or (value.width <= value.pitch and last <= value.plane)
        end = value.planes + value.channels * value.plane * self.images + OVERREAD
        sound = min(value.channels, value.height, value.width, value.first, value.planes) >= 0
        if not (sound and rows_fit and end <= self.floats):
            raise ArgumentError(f"an activation has no room: {value} for {self.images} images in {self.floats} floats")

    def _check_reads(self, step: Product, offsets: Any) -> None:
        """A product reads its input's planes; its last vector of a row may go past them by less than OVERREAD."""
        source, out = step.source, step.out
        reach = ((out.height - 1) * source.pitch + out.width) * self.images
        end = source.channels * source.plane * self.images
        if len(offsets) and not (offsets.min() >= 0 and offsets.max() + reach <= end):
            raise ArgumentError(
                f"layer {step.name!r} would read {offsets.min()} to {offsets.max() + reach} of {end} floats"
            )

    # ---- the structs ----

    def _pointer(self, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> int:
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return door.array_address(name, array, shape, dtype)

    def _places(self, positions: Any, value: Value) -> int:
        """Where the pixels of a channel lie in its plane."""
        if len(positions) and not (positions.min() >= 0 and positions.max() < value.plane):
            raise ArgumentError(f"pixels at {positions.min()} to {positions.max()} of a plane of {value.plane}")
        return self._pointer("place", positions.astype(np.int32), (value.height * value.width,), np.int32)

    def _packing(self, value: Value) -> LayerStruct:
        """How the input gets into its planes."""
        layer = LayerStruct(
            channels=value.channels,
            height=value.height,
            width=value.width,
            images=self.images,
            used=value.channels,
            stride_x=1,
            pitch=value.pitch,
            plane=value.plane,
            slot=self._pointer("slot", np.arange(value.channels, dtype=np.int32), (value.channels,), np.int32),
            place=self._places(value.pixels(), value),
        )
        self._kept.append(layer)
        return layer

    def _layer(self, step: Product) -> LayerStruct:
        source, out = step.source, step.out
        arrays = nonzeros_of(step, self.images)
        self._check_reads(step, arrays["nonzeros"]["offset"])
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
            bias=self._pointer("bias", step.biases(), (out.channels,), np.float32),
            order=self._pointer("order", arrays["order"], (out.channels,), np.int32),
            starts=self._pointer("starts", arrays["starts"], (out.channels + 1,), np.int32),
            nonzeros=self._pointer("nonzeros", arrays["nonzeros"], (arrays["starts"][-1],), NONZERO),
        )
        self._kept.append(layer)
        return layer

    def _step(self, step: Step) -> StepStruct:
        source, out = step.source, step.out
        sizes = {(value.channels, value.height, value.width) for value in (*step.inputs, out)}
        same_size = len(sizes) == 1 or not isinstance(step, Add | Affine | Repack)
        if not same_size or (source.channels != out.channels and not isinstance(step, Product)):
            raise ArgumentError(f"{step.kind.name} {step.name!r} cannot go from {step.inputs} to {out}")
        result = StepStruct(
            kind=step.kind,
            input=_value(source),
            second=_value(step.inputs[-1]),
            out=_value(out),
            low=step.bounds[0],
            high=step.bounds[1],
        )
        match step:
            case Product():
                result.layer = ctypes.addressof(self._layer(step))
            case Repack():
                layer = LayerStruct(place=self._places(step.phases.pixels, out))
                self._kept.append(layer)
                result.layer = ctypes.addressof(layer)
            case Affine():
                result.scale = self._pointer("scale", step.scale.numpy(), (source.channels,), np.float32)
                result.shift = self._pointer("shift", step.shift.numpy(), (source.channels,), np.float32)
            case Pool():
                _put_window(result, step.window, out)
        return result


def _put_window(step: StepStruct, window: Window, out: Value) -> None:
    for size, *axis in zip((out.height, out.width), window.kernel, window.stride, window.dilation, strict=True):
        kernel, stride, dilation = (door.int32("of a window", number, least=1) for number in axis)
        door.int32("the reach of a window", (size - 1) * stride + (kernel - 1) * dilation)
    (step.kernel_y, step.kernel_x), (step.stride_y, step.stride_x) = window.kernel, window.stride
    step.top, step.left = (door.int32("padding", number) for number in window.padding)
    step.dilation_y, step.dilation_x = window.dilation
    step.count_padding = window.count_padding


def _value(value: Value) -> ValueStruct:
    fields = (value.channels, value.height, value.width, value.pitch, value.plane, value.planes, value.first)
    return ValueStruct(*(door.int32("a size of an activation", field) for field in fields))
