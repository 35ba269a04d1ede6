"""The variance product in bfloat16 against float32, layer by layer and for whole networks: where does it pay?

    python benchmarks/variance_dtype.py               # some ten minutes; needs a CPU with bfloat16 instructions
    python benchmarks/variance_dtype.py --rounds 5 --threads 1

A case is timed in three ways in turns: float32, bfloat16 everywhere, and as `fit` chooses by the size of each product
(`worth_bfloat16` in layers/sampling.py, whose two limits were read off this table). For a layer a step is forward and
backward, for a network it is all of training's step, as in train_step.py. Ratios to float32 are taken within a round.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsevd
from sparsevd.files import atomic
from sparsevd.layers import SparseLayer
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.training.optimizer import BoundAdam
from sparsevd.zoo.models import MODELS

RESULTS = Path(__file__).parent / "results" / "variance_dtype.json"
WAYS = ("float32", "bfloat16", "chosen")
# name → batch size and shape of an input
NETS = {"lenet-300-100": (100, (1, 28, 28)), "lenet-5-caffe": (100, (1, 28, 28)), "vgg-like-0.25": (128, (3, 32, 32))}
# inputs, outputs; each with several batch sizes
LINEAR = (
    (100, 10),
    (300, 100),
    (500, 10),
    (784, 300),
    (512, 512),
    (800, 500),
    (1024, 1024),
    (2048, 1024),
    (2048, 2048),
)
ROWS = (32, 100, 256, 1024)
# channels, filters, size of the filter, of the image, batch size
CONVOLUTIONS = (
    *((1, 4, 3, 8, 8), (8, 8, 3, 8, 32), (64, 64, 1, 8, 8), (16, 16, 3, 8, 16), (32, 32, 3, 8, 8), (3, 16, 3, 32, 8)),
    *((1, 20, 5, 28, 10), (1, 20, 5, 28, 100), (20, 50, 5, 12, 10), (20, 50, 5, 12, 100), (64, 64, 3, 8, 4)),
    *((3, 16, 3, 32, 128), (16, 16, 3, 32, 128), (32, 32, 3, 16, 128), (64, 64, 3, 8, 128), (128, 128, 3, 4, 128)),
    *((64, 64, 3, 32, 32), (256, 256, 3, 8, 32), (512, 512, 3, 4, 32), (64, 256, 1, 8, 32), (256, 256, 1, 8, 32)),
)


def in_the_way(model: nn.Module, way: str) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            layer.variance_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(way)
            layer.bfloat16_where_faster = way == "chosen"
    return model.train().to(memory_format=torch.channels_last)


def layer_step(make: Callable[[], nn.Module], x: Tensor, way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = in_the_way(sparsevd.sparsify(make()), way)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    parameters = [x, *layer.parameters()]

    def step() -> None:
        out = layer(x)
        out.backward(torch.ones_like(out))
        for parameter in parameters:
            parameter.grad = None

    return step


def network_step(net: str, way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    batch, shape = NETS[net]
    model = in_the_way(sparsevd.sparsify(MODELS[net](10)), way)
    optimizer = BoundAdam(model, 1e-4, kl_weight=1 / 60_000)
    x = torch.rand(batch, *shape).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,))

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def cases() -> dict[str, Callable[[str], Callable[[], None]]]:
    found: dict[str, Callable[[str], Callable[[], None]]] = {
        net: lambda way, net=net: network_step(net, way) for net in NETS
    }
    for ins, outs in LINEAR:
        for rows in ROWS:
            x = torch.randn(rows, ins)
            found[f"linear {ins} to {outs}, batch {rows}"] = lambda way, x=x, sizes=(ins, outs): layer_step(
                lambda: nn.Linear(*sizes), x, way
            )
    for channels, filters, kernel, size, batch in CONVOLUTIONS:
        x = torch.randn(batch, channels, size, size).to(memory_format=torch.channels_last)
        made = (channels, filters, kernel, 1, kernel // 2 if kernel < 5 else 0)
        name = f"convolution {channels} to {filters}, {kernel}×{kernel}, images {size}×{size}, batch {batch}"
        found[name] = lambda way, x=x, made=made: layer_step(lambda: nn.Conv2d(*made), x, way)
    return found


def measure(make: Callable[[str], Callable[[], None]], rounds: int) -> dict[str, Any]:
    steps = {way: make(way) for way in WAYS}
    for step in steps.values():
        step()
    start = time.perf_counter()
    steps["float32"]()
    repetitions = max(1, round(0.02 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, step in steps.items():
            start = time.perf_counter()
            for _ in range(repetitions):
                step()
            times[way].append((time.perf_counter() - start) / repetitions)
    result: dict[str, Any] = {"float32_ms": round(1000 * statistics.median(times["float32"]), 3)}
    for way in WAYS[1:]:
        ratios = [mine / base for mine, base in zip(times[way], times["float32"], strict=True)]
        result[way] = [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    if not multiplies_bfloat16():
        parser.exit(1, "this CPU has no instructions for bfloat16, and `fit` does not choose it here\n")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    records: dict[str, Any] = {
        "about": {
            "command": f"python benchmarks/variance_dtype.py --rounds {arguments.rounds}",
            "commit": commit.stdout.strip(),
            "ratios": "time against float32: lower quartile, median, upper quartile over the rounds",
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()} with bfloat16, shared",
            "torch": torch.__version__,
        }
    }
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, make in cases().items():
            key = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            records[key] = measure(make, arguments.rounds)
            print(key, records[key], flush=True)
            lines = ",\n".join(f" {json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in records.items())
            atomic.write(RESULTS, "{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
