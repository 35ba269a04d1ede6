"""What a runtime does with zeros: one network without zeros, with zeros at random, and with half its units removed.

    python benchmarks/zeros.py            # measures for some minutes
    python benchmarks/zeros.py tables     # prints the tables of docs/deployment.md from the record

One thread, all contenders in one process, in turns and in random order; ratios are of times measured in the same turn.
The times are CPU seconds of the process, so that other work on the machine counts as little as it can. A runtime that
is not installed (OpenVINO) or does not work here (torch.compile without a C++ compiler) is named with the reason. Files
are written once each. Results go to results/zeros.json.
"""

import contextlib
import copy
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sparsevd
from sparsevd.files.atomic import write
from sparsevd.zoo import models

RESULTS = Path(__file__).parent / "results" / "zeros.json"
ZEROS = 0.98
TURNS = 31
SLICE = 4e-3  # seconds of calls per turn

Call = Callable[[], object]


def weights(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.dim() > 1]


def with_zeros(network: nn.Module) -> nn.Module:
    """A copy in which each weight is zero with the same probability."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        for weight in weights(network):
            weight *= torch.rand_like(weight) >= ZEROS
    return network


def with_dead_units(network: nn.Module) -> nn.Module:
    """A copy in which every second unit of all layers but the last has no weights and no bias."""
    network = copy.deepcopy(network)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        for layer in layers[:-1]:
            layer.weight[::2] = 0
            layer.bias[::2] = 0  # type: ignore[index]
    return network


def torch_call(network: nn.Module, x: Tensor) -> Call:
    return lambda: network(x)


def compiled_call(network: nn.Module, x: Tensor) -> Call:
    compiled = torch.compile(network)
    compiled(x)
    return lambda: compiled(x)


def onnx_call(network: nn.Module, x: Tensor) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_file(network, x), options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds)


def openvino_call(network: nn.Module, x: Tensor) -> Call:
    import openvino

    core = openvino.Core()
    model = core.read_model(io.BytesIO(onnx_file(network, x)))
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}).create_infer_request()
    inputs = [x.numpy()]
    return lambda: request.infer(inputs)


def plan_call(network: nn.Module, x: Tensor) -> Call:
    run = sparsevd.plan(network, x)
    return lambda: run(x)


def accelerated_call(network: nn.Module, x: Tensor) -> Call:
    fast = sparsevd.accelerate(network, x)
    return lambda: fast(x)


RUNTIMES: dict[str, Callable[[nn.Module, Tensor], Call]] = {
    "torch": torch_call,
    "torch.compile": compiled_call,
    "ONNX Runtime": onnx_call,
    "OpenVINO": openvino_call,
    "accelerate": accelerated_call,
    "plan": plan_call,
}


def onnx_file(network: nn.Module, x: Tensor, **how: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "net.onnx"
        sparsevd.export_onnx(network, x, path, **how)
        return path.read_bytes()


def sizes(network: nn.Module, x: Tensor) -> dict[str, int]:
    """Bytes of the files of one network; lossless, all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / "safetensors")
        torch.save(network.state_dict(), folder / "torch.save")
        with zipfile.ZipFile(folder / "safetensors, zipped", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.write(folder / "safetensors", "net")
        (folder / "ONNX").write_bytes(onnx_file(network, x))
        (folder / "ONNX, sparse initializers").write_bytes(onnx_file(network, x, sparse_initializers=True))
        sparsevd.export_c(network, x, folder / "net.c")
        (folder / "net.c").rename(folder / "C source")
        sparsevd.save(network, folder / ".spvd", example=x)
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != "net.h"}


def seconds(call: Call, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def ratio(old: list[float], new: list[float]) -> dict[str, float]:
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


@torch.no_grad()
def case(network: nn.Module, x: Tensor) -> dict[str, Any]:
    network.eval()
    variants = {
        "no zeros": network,
        "zeros": with_zeros(network),
        "compacted": sparsevd.compact(with_dead_units(network), x),
    }
    calls: dict[tuple[str, str], Call] = {}
    absent = {}
    for runtime, make in RUNTIMES.items():
        try:
            calls |= {(runtime, variant): make(module, x) for variant, module in variants.items()}
        except Exception as error:  # whatever another library raises, it is the answer here
            absent[runtime] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    counts = {}
    for key, call in calls.items():
        seconds(call, 3)
        counts[key] = max(1, round(SLICE / seconds(call, 3)))
    measured: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    order = list(calls)
    for turn in range(TURNS):
        random.Random(turn).shuffle(order)  # nobody always comes first after another runtime has used the caches
        for key in order:
            calls[key]()
            measured[key].append(seconds(calls[key], counts[key]))
    present = [runtime for runtime in RUNTIMES if runtime not in absent]
    return {
        "batch": len(x),
        "units_compacted": str(variants["compacted"].compaction.units),
        "microseconds": {
            runtime: {variant: round(1e6 * statistics.median(measured[runtime, variant]), 1) for variant in variants}
            for runtime in present
        },
        "times_faster": {
            runtime: {
                variant: ratio(measured[runtime, "no zeros"], measured[runtime, variant])
                for variant in ("zeros", "compacted")
            }
            for runtime in present
        },
        "bytes": {variant: sizes(module, x) for variant, module in variants.items()},
        "not_measured": absent,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "sparsevd": sparsevd.__version__}
    for name in ("onnxruntime", "openvino"):
        with contextlib.suppress(ImportError):
            found[name] = __import__(name).__version__
    return found


def times(found: dict[str, float]) -> str:
    return f"{found['median']:.2g}× ({found['low']:.2g}–{found['high']:.2g})"


def tables(record: dict[str, Any]) -> str:
    """What the page shows of the record."""
    cases = record["cases"]
    lines = [f"| times faster than without zeros | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for variant, title in (
        ("zeros", f"{record['zeros']:.0%} zeros at random"),
        ("compacted", "half the units, compacted"),
    ):
        for runtime in RUNTIMES:
            cells = [
                times(found["times_faster"][runtime][variant]) if runtime in found["times_faster"] else "not measured"
                for found in cases.values()
            ]
            lines.append(f"| {title}: {runtime} | {' | '.join(cells)} |")
    found = cases["linear 1024-1024-1024-10, batch 16"]["bytes"]
    lines += [
        "",
        "| bytes, linear 1024-1024-1024-10 | no zeros | zeros at random | half the units, compacted |",
        "|---|---|---|---|",
    ]
    for kind in found["zeros"]:
        lines.append(f"| {kind} | {' | '.join(f'{found[variant][kind]:,}' for variant in found)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["tables"]:
        print(tables(json.loads(RESULTS.read_text(encoding="utf-8"))), end="")
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    linear = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    cases = {
        "LeNet-5-Caffe, batch 1": case(models.lenet_5_caffe(), torch.randn(1, 1, 28, 28)),
        "LeNet-5-Caffe, batch 16": case(models.lenet_5_caffe(), torch.randn(16, 1, 28, 28)),
        "linear 1024-1024-1024-10, batch 16": case(linear, torch.randn(16, 1024)),
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    record = {
        "command": "python benchmarks/zeros.py",
        "clock": "CPU time of the process",
        "machine": {
            "processor": platform.machine(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": 1,
            "versions": versions(),
            "commit": commit.stdout.strip(),
        },
        "zeros": ZEROS,
        "turns": TURNS,
        "cases": cases,
    }
    write(RESULTS, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(tables(record), end="")


if __name__ == "__main__":
    main()
