"""Sparse inference against dense: layers over density, the pair of large Linear layers, and the paper's networks.

    python benchmarks/inference.py layers      # 3×3 convolutions of VGG-like, 98 to 70 % zeros, batch 1 and 16
    python benchmarks/inference.py linear --deepsparse-python ENV/bin/python
    python benchmarks/inference.py networks
    python benchmarks/inference.py figure

Each case is measured in one run, its contenders in turns, and written to results/inference.json when it is done;
what is there already is not measured again (--again does). `--minutes` stops early, to be continued. A case names its
machine and commit; those that do not are of the first edition, on the machine named beside them.
Times are seconds per call from Python, with numbers in [N, C, H, W] in and out for everybody; the exported C file
alone is called from C, as it would be where it is used.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import onnxruntime
import torch
from torch import Tensor, nn

import sparsevd
from sparsevd.zoo import models

RESULTS = Path(__file__).parent / "results" / "inference.json"
FIGURE = Path(__file__).parent / "results" / "inference.svg"
ZEROS = (98, 95, 90, 80, 70)
VGG_LAYERS = [  # channels in and out, height and width
    (3, 64, 32), (64, 64, 32), (64, 128, 16), (128, 128, 16), (128, 256, 8), (256, 256, 8),
    (256, 512, 4), (512, 512, 4), (512, 512, 2),
]  # fmt: skip
PAPER_SPARSITY = {"lenet-300-100": (98.9, 97.2, 62.0), "lenet-5-caffe": (67.0, 98.0, 99.8, 95.0)}
ONNX_NAMES = {
    nn.Conv2d: "Conv", nn.Linear: "Gemm", nn.ReLU: "Relu", nn.MaxPool2d: "MaxPool", nn.Flatten: "Flatten",
    nn.BatchNorm1d: "BatchNormalization", nn.BatchNorm2d: "BatchNormalization", nn.Dropout: "Identity",
}  # fmt: skip
TURNS = 11
SLICE = 5e-3  # seconds of calls per turn

Call = Callable[[], object]


def in_turns(calls: dict[str, Call], timed: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Seconds per call in each turn; `timed` are contenders that run calls and tell the time by themselves."""

    def here(call: Call) -> Callable[[int], float]:
        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count

        return run

    runs = {name: here(call) for name, call in calls.items()} | timed
    counts = {}
    for name, run in runs.items():
        run(2)
        counts[name] = max(1, round(SLICE / run(2)))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            run(1)
            seconds[name].append(run(counts[name]))
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratios(seconds: dict[str, list[float]], ours: str) -> dict[str, dict[str, float]]:
    """How many times faster ours is, turn by turn, than each other contender."""
    return {
        name: spread([a / b for a, b in zip(turns, seconds[ours], strict=True)])
        for name, turns in seconds.items()
        if name != ours
    }


def with_zeros(model: nn.Module, percents: list[float], seed: int = 0) -> nn.Module:
    """The model in eval mode with uniformly random zeros."""
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for layer, percent in zip(layers, percents, strict=True):
        keep = torch.rand(layer.weight.shape, generator=generator) >= percent / 100
        # Scaled up, so that the signal survives the layers and a difference in the output would show.
        layer.weight.data.mul_(keep / (1 - percent / 100) ** 0.5)
        layer.bias.data.normal_(0, 0.1, generator=generator)
    return model.eval()


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with the statistics of these inputs in its batch norms: else the signal would die on the way."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    spread_of = model(x).std(0).mean() if norms else 1
    assert spread_of > 1e-2, "the output does not depend on the input, so comparing outputs would show nothing"
    return model.eval()


def onnx_file(model: nn.Module, x: Tensor, folder: str) -> str:
    """The model as ONNX, of a version that DeepSparse reads too."""
    import onnx
    from onnx import helper, numpy_helper

    nodes, constants, last = [], [], "x"
    for name, module in model.named_children() if isinstance(model, nn.Sequential) else [("layer", model)]:
        inputs, attributes = [last], {}
        for key, tensor in module.state_dict().items():
            if key != "num_batches_tracked":
                constants.append(numpy_helper.from_array(tensor.numpy(), f"{name}.{key}"))
                inputs.append(f"{name}.{key}")
        if isinstance(module, nn.Conv2d):
            attributes = {"pads": list(module.padding) * 2, "strides": module.stride}
        elif isinstance(module, nn.Linear):
            attributes = {"transB": 1}
        elif isinstance(module, nn.MaxPool2d):
            attributes = {"kernel_shape": [module.kernel_size] * 2, "strides": [module.stride] * 2}
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            attributes = {"epsilon": module.eps}
        nodes.append(helper.make_node(ONNX_NAMES[type(module)], inputs, [name], **attributes))
        last = name
    tensor = onnx.TensorProto.FLOAT
    x_info = helper.make_tensor_value_info("x", tensor, x.shape)
    graph = helper.make_graph(
        nodes, "model", [x_info], [helper.make_tensor_value_info(last, tensor, model(x).shape)], constants
    )
    path = str(Path(folder) / "model.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def onnxruntime_call(path: str, x: Tensor, threads: int) -> tuple[Call, numpy.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name, array = session.get_inputs()[0].name, x.numpy()
    return lambda: session.run(None, {name: array}), session.run(None, {name: array})[0]


def prepacked(model: nn.Module, x: Tensor) -> Call | None:
    """torch with oneDNN's own layout of weights, as far as it goes."""
    from torch.utils import mkldnn

    try:
        packed = mkldnn.to_mkldnn(copy.deepcopy(model))
        packed(x.to_mkldnn())
    except (RuntimeError, NotImplementedError):
        return None
    return lambda: packed(x.to_mkldnn()).to_dense()


def dense_calls(model: nn.Module, x: Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {"torch": lambda: model(x)}
    if x.ndim == 4:
        last, x_last = channels_last(model), x.to(memory_format=torch.channels_last)
        calls["torch channels_last"] = lambda: last(x_last)
    if packed := prepacked(model, x):
        calls["torch prepacked"] = packed
    return calls


def channels_last(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(memory_format=torch.channels_last)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest output."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


class Worker:
    """Another program that runs calls and tells the seconds per call: one line in, one line out."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        while (line := self.process.stdout.readline()) and line.strip() != "ready":
            pass
        if not line:
            raise SystemExit(f"{command[0]} did not start; try by hand: {' '.join(command)}")

    def __call__(self, count: int) -> float:
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


C_WORKER = """
#include <stdio.h>
#include <time.h>
#include "net.h"
static float in[NET_INPUTS], out[NET_OUTPUTS];
int main(void) {
  long count;
  for (int i = 0; i < NET_INPUTS; i++) in[i] = (float)(i % 7) / 7.0f;
  net(in, out);
  puts("ready"), fflush(stdout);
  while (scanf("%ld", &count) == 1) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0; i < count; i++) net(in, out);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    printf("%.12f\\n", seconds / (double)count), fflush(stdout);
  }
  return 0;
}
"""


def c_worker(model: nn.Module, x: Tensor, folder: str) -> Worker:
    """The exported C, called from C."""
    sparsevd.export_c(model, x, Path(folder) / "net.c")
    main = Path(folder) / "main.c"
    main.write_text(C_WORKER)
    program = f"{folder}/net"
    subprocess.run(
        ["cc", "-std=gnu99", "-O3", "-march=native", f"{folder}/net.c", str(main), "-o", program], check=True
    )
    return Worker([program])


OURS = ("accelerate", "plan", "exported C")


def compare(
    model: nn.Module, x: Tensor, threads: int, deepsparse: str | None = None, whole: bool = True
) -> dict[str, object]:
    """One model, all contenders, in turns; `whole` has our whole-network ways too."""
    torch.set_num_threads(threads)
    fast = sparsevd.accelerate(model, x)
    expected = model(x)
    outputs = {"accelerate": difference(fast(x), expected)}
    calls: dict[str, Call] = {"accelerate": lambda: fast(x)}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        if whole:
            plan = sparsevd.plan(model, x)
            outputs["plan"] = difference(plan(x), expected)
            calls["plan"] = lambda: plan(x)
            if len(x) == 1 and threads == 1:
                workers["exported C"] = c_worker(model, x, folder)
        calls |= dense_calls(model, x)
        path = onnx_file(model, x, folder)
        calls["onnxruntime"], theirs = onnxruntime_call(path, x, threads)
        outputs["onnxruntime"] = difference(torch.from_numpy(theirs), expected)
        if deepsparse:
            numpy.save(Path(folder) / "x.npy", x.numpy())
            script = str(Path(__file__).parent / "deepsparse_worker.py")
            arguments = [path, f"{folder}/x.npy", str(threads), f"{folder}/y.npy"]
            workers["deepsparse"] = Worker([deepsparse, script, *arguments])
            outputs["deepsparse"] = difference(torch.from_numpy(numpy.load(f"{folder}/y.npy")), expected)
        seconds = in_turns(calls, dict(workers))
        for worker in workers.values():
            worker.close()
    dense = {name: statistics.median(s) for name, s in seconds.items() if name not in (*OURS, "deepsparse")}
    best = min(dense, key=dense.__getitem__)
    return {
        "threads": threads,
        "batch": len(x),
        "choices": [choice.choice for choice in fast.choices],
        "chosen": fast.chosen,
        "seconds": {name: spread(turns) for name, turns in seconds.items()},
        "ratios": {ours: ratios(seconds, ours) for ours in OURS if ours in seconds},
        "best_dense": best,
        "ratio": ratios(seconds, "plan" if whole else "accelerate")[best],
        "max_relative_difference": outputs,
    }


def layer_cases() -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    for zeros in ZEROS:
        for batch in (1, 16):
            for channels, outputs, size in VGG_LAYERS:

                def case(channels=channels, outputs=outputs, size=size, zeros=zeros, batch=batch):
                    torch.manual_seed(0)
                    layer = with_zeros(nn.Conv2d(channels, outputs, 3, padding=1), [zeros])
                    record = compare(layer, torch.randn(batch, channels, size, size), threads=1, whole=False)
                    return {"layer": [channels, outputs, size], "zeros": zeros, **record}

                yield f"layer {channels}-{outputs}-{size}x{size} zeros {zeros} batch {batch}", case


def linear_cases(deepsparse: str | None) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    for threads in (1, 2):

        def case(threads=threads):
            torch.manual_seed(0)
            pair = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
            return compare(with_zeros(pair, [98, 98]), torch.randn(64, 2048), threads, deepsparse)

        yield f"linear 2048-2048-2048 zeros 98 batch 64 threads {threads}", case


def network_cases() -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    for name, batches in (("lenet-300-100", (1, 64)), ("lenet-5-caffe", (1, 64)), ("vgg-like", (1, 16))):
        for batch in batches:
            for threads in (1, 2):

                def case(name=name, batch=batch, threads=threads):
                    torch.manual_seed(0)
                    shape = (3, 32, 32) if name == "vgg-like" else (1, 28, 28)
                    percents = PAPER_SPARSITY.get(name, (98.0,) * 15)
                    model = calibrated(with_zeros(models.MODELS[name](10), list(percents)), torch.randn(64, *shape))
                    return compare(model, torch.randn(batch, *shape), threads)

                yield f"network {name} batch {batch} threads {threads}", case


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
        flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
        cpu += ", AVX-512" if "avx512f" in flags else ", AVX2" if "avx2" in flags else ""
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "sparsevd": sparsevd.__version__}
    show = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(show, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **versions,
        "commit": commit or "unknown",
    }


def figure(cases: dict[str, dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sparsevd"  # the same figure, the same file
    from matplotlib import pyplot

    drawing, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for panel, batch in zip(panels, (1, 16), strict=True):
        for number, (channels, outputs, size) in enumerate(VGG_LAYERS):
            points = [
                (case["zeros"], case["ratio"])
                for case in cases.values()
                if case.get("layer") == [channels, outputs, size] and case["batch"] == batch
            ]
            points.sort(key=lambda point: point[0])
            if points:
                x, y = [zeros for zeros, _ in points], [ratio["median"] for _, ratio in points]
                colour = pyplot.cm.viridis(number / len(VGG_LAYERS))
                panel.plot(x, y, "o-", color=colour, label=f"{channels}→{outputs}, {size}×{size}")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(yscale="log", xlabel="zeros, %", title=f"batch {batch}, one thread")
        panel.set_yticks([1, 2, 5, 10, 20], ["1×", "2×", "5×", "10×", "20×"])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("faster than the best dense")
    panels[1].legend(fontsize="x-small", title="3×3 convolution", title_fontsize="x-small")
    drawing.savefig(FIGURE, metadata={"Date": None})


def write(results: dict) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    temporary = RESULTS.with_suffix(".new")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(RESULTS)


def shown(key: str, record: dict) -> str:
    ratio, times = record["ratio"], record["seconds"]
    rest = "  ".join(f"{name} {value['median'] * 1e6:.0f}" for name, value in times.items())
    spread_of = f"{ratio['low']:.1f}–{ratio['high']:.1f}"
    return f"{key}: {ratio['median']:.1f}× ({spread_of}) against {record['best_dense']}  [µs: {rest}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "linear", "networks", "figure"])
    parser.add_argument("--deepsparse-python", help="Python of an environment with deepsparse==1.8.0")
    parser.add_argument("--again", action="store_true", help="measure what is there already too")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time; run again to go on")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cases": {}}
    if options.what == "figure":
        figure(stored["cases"])
        return
    cases = {
        "layers": layer_cases,
        "linear": lambda: linear_cases(options.deepsparse_python),
        "networks": network_cases,
    }[options.what]
    end = time.monotonic() + 60 * options.minutes
    torch.set_grad_enabled(False)
    for key, case in cases():
        if options.only not in key or (key in stored["cases"] and not options.again):
            continue
        if time.monotonic() > end:
            print("not finished; run the same command again to go on", file=sys.stderr)
            break
        record = {**case(), "machine": machine()}
        stored["command"] = "python benchmarks/inference.py layers|linear|networks"
        stored["cases"][key] = record
        write(stored)
        print(shown(key, record), flush=True)


if __name__ == "__main__":
    main()
