"""A whole network as one call: no Python between its layers, and no memory taken but for the output."""

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.graph import Graph, capture
from sparsevd.kernels import BEST, door
from sparsevd.kernels.program import Program
from sparsevd.runtime.layers import group_choices, grouped, plain
from sparsevd.runtime.lowering import network
from sparsevd.runtime.timing import timings

_SHAPES_KEPT = 64  # that a plan stays ready for
NOT_BUILT = "a plan needs the compiled kernels. Install with a C compiler, or use sparsevd.accelerate"


def reason(error: Exception) -> str:
    """Why something is not possible, without the rest of the message: what else there is."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0]


class Plan:
    """A network for any batch size: call it with a float32 tensor on the CPU. Safe to call from several threads.

    It returns a tensor, or a dict with one tensor where the network returned a dict.

    Copies and pickles lay the network out again, for the machine that they are on.
    """

    def __init__(self, graph: Graph, images: int = 1, instruction_set: int = BEST) -> None:
        if not kernels.available():
            raise ArgumentError(NOT_BUILT)
        self.network = network(graph)
        self.input_shape, self.keys = tuple(graph.inputs[0].shape[1:]), graph.keys
        self.images, self.instruction_set = images, instruction_set
        self._lay_out_again()

    def _lay_out_again(self) -> None:
        self._programs: dict[int, Program] = {}
        self._ready: dict[torch.Size, _Ready] = {}
        self._making = threading.Lock()

    def __call__(self, x: Tensor) -> Any:
        ready = self._ready.get(x.shape) or self._made_ready(x.shape)
        wanted = x.dtype is torch.float32 and x.is_cpu and not (x.requires_grad and torch.is_grad_enabled())
        if ready is None or not wanted or door.looked_on():
            raise ArgumentError(self._why_not(x))
        answer = ready.program(x, ready.out_shape)
        return {self.keys[0]: answer} if self.keys else answer

    def attempt(self, x: Any) -> Any:
        """The answer to this input, or None if it is not one that the plan was made for."""
        if not plain(x):
            return None
        ready = self._ready.get(x.shape) or self._made_ready(x.shape)
        if ready is None:
            return None
        answer = ready.program(x, ready.out_shape)
        return {self.keys[0]: answer} if self.keys else answer

    def _made_ready(self, shape: torch.Size) -> "_Ready | None":
        if not shape or tuple(shape[1:]) != self.input_shape or not kernels.available():
            return None
        images = grouped(self.images, shape[0]) if shape[0] > 0 else 1
        with self._making:  # laying out a network changes it
            if images not in self._programs:
                self._programs[images] = Program(self.network, images, self.instruction_set)
            if len(self._ready) >= _SHAPES_KEPT:
                self._ready.clear()
            ready = _Ready(self._programs[images], (shape[0], *self.network.output_shape))
            self._ready[shape] = ready
        return ready

    def _why_not(self, x: Tensor) -> str:
        if not kernels.available():
            return NOT_BUILT
        if not x.shape or tuple(x.shape[1:]) != self.input_shape:
            return f"the plan takes [batch, {', '.join(map(str, self.input_shape))}], not {tuple(x.shape)}"
        if door.looked_on():
            return "a plan is one call into C, which torch cannot compile, trace, map or differentiate"
        return f"a plan takes float32 on the CPU without gradients, not {x.dtype} on {x.device}"

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds addresses, and without the lock."""
        return {key: self.__dict__[key] for key in ("network", "input_shape", "keys", "images", "instruction_set")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lay_out_again()


@dataclass(frozen=True)
class _Ready:
    """What one shape of input asks for."""

    program: Program
    out_shape: tuple[int, ...]


@torch.no_grad()
def plan(model: nn.Module | Graph, example: Tensor | tuple[Tensor]) -> Plan:
    """The whole network as one call, for networks of the operations that `sparsevd.runtime.lowering` knows.

        run = sparsevd.plan(pruned, torch.randn(1, 1, 28, 28))
        y = run(x)

    How many images lie beside each other is timed with the example, which should have the batch size of later use.
    """
    graph = capture(model, example)
    first = Plan(graph)  # which says what a plan cannot do
    (x,) = example if isinstance(example, tuple) else (example,)
    plans = [first, *(Plan(graph, images) for images in group_choices(len(x)) if images > 1)]
    if len(plans) == 1:
        return first
    seconds = [timing.median for timing in timings([functools.partial(each, x) for each in plans])]
    return plans[seconds.index(min(seconds))]
