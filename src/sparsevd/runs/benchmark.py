"""How fast a network runs here: dense torch, its compiler, ONNX Runtime, and our ways, measured in turns in one run."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, SparseVDError
from sparsevd.graph import capture
from sparsevd.graph.outputs import difference, tensors_in
from sparsevd.reporting.table import table
from sparsevd.runtime.acceleration import accelerate
from sparsevd.runtime.c_export import export_c
from sparsevd.runtime.onnx import export_onnx
from sparsevd.runtime.plan import plan, reason
from sparsevd.runtime.timing import Timing, timings

Call = Callable[[], Any]


@dataclass(frozen=True)
class Measurement:
    """One way at one batch size and number of threads; `difference` is relative to torch's largest output."""

    way: str
    batch: int
    threads: int
    timing: Timing
    times_faster: float
    difference: float


@dataclass(frozen=True)
class Report:
    """All measurements, and which ways could not be taken and why."""

    measurements: tuple[Measurement, ...]
    missing: dict[str, str]

    def __str__(self) -> str:
        header = ("batch", "threads", "way", "time", "middle half", "faster", "difference")
        rows = [
            (
                str(m.batch),
                str(m.threads),
                m.way,
                f"{m.timing.median * 1e6:,.1f} µs",
                f"{m.timing.low * 1e6:,.1f} – {m.timing.high * 1e6:,.1f}",
                f"{m.times_faster:.2f}×",
                f"{m.difference:.0e}" if m.difference else "0",
            )
            for m in self.measurements
        ]
        missing = [f"without {way}: {reason}" for way, reason in self.missing.items()]
        return "\n".join([table(header, rows, right=(0, 1, 3, 4, 5, 6)), *missing])


@torch.no_grad()
def bench(
    model: nn.Module,
    example: Tensor,
    *,
    batches: Sequence[int] = (1, 16, 64),
    threads: Sequence[int] = (1, 2),
    compiler: bool = True,
) -> Report:
    """Time a network in every way there is. "faster" is against dense torch at the same batch size and threads.

    Args:
        model: a plain torch network, such as `prune` returns.
        example: an input; its first axis is the batch, which is replaced by those of `batches`. Numbers are made up if
            it has floating point, and else its rows are repeated, since they stand for tokens.
        compiler: try torch.compile too, which takes its time.
    """
    if min((*batches, *threads), default=0) < 1:
        raise ArgumentError(f"batch sizes {tuple(batches)} and threads {tuple(threads)} must be at least 1")
    if not isinstance(example, Tensor):
        raise ArgumentError("only networks of one input are timed here, and this one takes several")
    model = model.eval()
    missing: dict[str, str] = {}
    found: list[Measurement] = []
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for count in threads:
                torch.set_num_threads(count)
                for batch in batches:
                    x = _batch_of(example, batch)
                    ways = dict(_ways(model, x, count, Path(folder), compiler, missing))
                    expected = ways["torch"]()
                    measured = timings(list(ways.values()))
                    found += [
                        Measurement(
                            way,
                            batch,
                            count,
                            timing,
                            measured[0].median / timing.median,
                            _difference(call(), expected),
                        )
                        for (way, call), timing in zip(ways.items(), measured, strict=True)
                    ]
    finally:
        torch.set_num_threads(before)
    return Report(tuple(found), missing)


def _batch_of(example: Tensor, batch: int) -> Tensor:
    """As many inputs of the example's shape and type: random numbers, or its own rows where they are no fractions."""
    if not len(example):
        raise ArgumentError("the example must hold at least one input")
    if example.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        return torch.randn((batch, *example.shape[1:]), generator=generator).to(example.dtype)
    return example[torch.arange(batch) % len(example)]


def _difference(ours: Any, theirs: Any) -> float:
    """By their tensors in turn: ONNX Runtime and C know no dicts."""
    return difference(tuple(tensors_in(ours)), tuple(tensors_in(theirs)))


def _ways(
    model: nn.Module, x: Tensor, threads: int, folder: Path, compiler: bool, missing: dict[str, str]
) -> Iterator[tuple[str, Call]]:
    yield "torch", lambda: model(x)
    if compiler:
        with _noted(missing, "torch.compile"):
            compiled = torch.compile(model)
            compiled(x)
            yield "torch.compile", lambda: compiled(x)
    with _noted(missing, "ONNX Runtime"):
        yield "ONNX Runtime", _onnxruntime(model, x, threads, folder)
    fast = accelerate(model, x)
    yield "accelerate", lambda: fast(x)
    with _noted(missing, "plan"):
        run = plan(model, x)
        yield "plan", lambda: run(x)
    if len(x) == 1 and threads == 1:
        with _noted(missing, "exported C"):
            yield "exported C", _exported_c(model, x, folder)


@contextmanager
def _noted(missing: dict[str, str], way: str) -> Iterator[None]:
    """What a way cannot do is a line in the report, not an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (SparseVDError, ImportError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        missing[way] = reason(error)


def _onnxruntime(model: nn.Module, x: Tensor, threads: int, folder: Path) -> Call:
    import onnxruntime  # type: ignore[import-untyped,unused-ignore]

    path = folder / "network.onnx"
    if not path.exists():
        export_onnx(model, x, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name, array = session.get_inputs()[0].name, x.numpy()
    return lambda: tuple(map(torch.from_numpy, session.run(None, {name: array})))


def _exported_c(model: nn.Module, x: Tensor, folder: Path) -> Call:
    """The exported file, compiled for this processor and called through ctypes."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        raise ArgumentError("no C compiler")
    graph = capture(model, x)
    source, _ = export_c(graph, x, folder / "network.c")
    library = folder / "network.so"
    options = ["-std=gnu99", "-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).network
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    shape = (1, *graph.nodes[[node.name for node in graph.nodes].index(graph.outputs[0])].shape[1:])

    def call() -> Tensor:
        out = x.new_empty(shape)
        function(x.data_ptr(), out.data_ptr())
        return out

    return call
