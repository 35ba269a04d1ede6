"""A whole network as one call: no Python between its layers, and no memory taken but for the output."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.graph import Graph, capture
from sparsevd.kernels import BEST, lanes
from sparsevd.kernels.program import Program
from sparsevd.runtime.layers import grouped
from sparsevd.runtime.lowering import network
from sparsevd.runtime.timing import timings

_SHAPES_KEPT = 64  # that a plan stays ready for


class Plan:
    """A network for any batch size: call it with a float32 tensor on the CPU. Safe to call from several threads."""

    def __init__(self, graph: Graph, images: int = 1, instruction_set: int = BEST) -> None:
        if not kernels.available():
            raise ArgumentError(
                "a plan needs the compiled kernels; install with a C compiler, or use sparsevd.accelerate"
            )
        self.network = network(graph)
        self.input_shape = tuple(graph.inputs[0].shape[1:])
        self.images, self.instruction_set = images, instruction_set
        self._programs: dict[int, Program] = {}
        self._ready: dict[torch.Size, _Ready] = {}
        self._making = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        ready = self._ready.get(x.shape) or self._made_ready(x.shape)
        if x.dtype is not torch.float32 or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            raise ArgumentError(f"a plan takes float32 on the CPU without gradients, not {x.dtype} on {x.device}")
        return ready.program(x, ready.out_shape)

    def _made_ready(self, shape: torch.Size) -> "_Ready":
        if tuple(shape[1:]) != self.input_shape or not shape:
            raise ArgumentError(f"the plan takes [batch, {', '.join(map(str, self.input_shape))}], not {tuple(shape)}")
        images = grouped(self.images, shape[0]) if shape[0] > 0 else 1
        with self._making:  # laying out a network changes it
            if images not in self._programs:
                self._programs[images] = Program(self.network, images, self.instruction_set)
            if len(self._ready) >= _SHAPES_KEPT:
                self._ready.clear()
            ready = _Ready(self._programs[images], (shape[0], *self.network.output_shape))
            self._ready[shape] = ready
        return ready


@dataclass(frozen=True)
class _Ready:
    """What one shape of input asks for."""

    program: Program
    out_shape: tuple[int, ...]


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
