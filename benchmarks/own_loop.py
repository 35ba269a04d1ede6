"""What a step costs in a loop of one's own with `attach`, against a step of `fit`, before anything is dropped.

    OMP_NUM_THREADS=1 python benchmarks/own_loop.py --rounds 30

Both are timed in turns in one process, on random images; a round gives the ratio of the time per step. Shown are the
median of the times, and the geometric mean of the ratios with its 95 % interval; results/own_loop.json keeps them.
"""

import argparse
import contextlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import sparsevd
from sparsevd.training.progress import Callback, Moment
from sparsevd.zoo.models import MODELS

SHAPES = {"lenet-300-100": (1, 28, 28), "lenet-5-caffe": (1, 28, 28)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.99)),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}
FIRST, LAST, BATCH, N = 20, 120, 100, 12_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "own_loop.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, shape in SHAPES.items():
        data = torch.rand(N, *shape), torch.randint(0, 10, (N,))
        times: dict[str, list[float]] = {"fit": [], **{way: [] for way in OPTIMIZERS}}
        for _ in range(arguments.rounds):
            times["fit"].append(of_fit(name, data))
            for way, make in OPTIMIZERS.items():
                times[way].append(of_own_loop(name, data, make))
        for way in OPTIMIZERS:
            logs = [math.log(a / b) for a, b in zip(times[way], times["fit"], strict=True)]
            mean, half = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
            ratio, low, high = (round(math.exp(value), 3) for value in (mean, mean - half, mean + half))
            micro = {each: round(1e6 * statistics.median(times[each])) for each in (way, "fit")}
            print(f"{name:14}  {way:18} {micro[way]:6} µs  fit {micro['fit']:6} µs  {ratio} ({low}–{high})")
            found.append({"network": name, "way": way, "µs": micro[way], "µs of fit": micro["fit"], "ratio": ratio})
            found[-1] |= {"95 %": [low, high], "rounds": arguments.rounds, "machine": platform.machine()}
    arguments.out.write_text("[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in found) + "\n]\n")


class EnoughError(Exception):
    """The steps that are timed are over."""


class Clock(Callback):
    """When the steps came that are timed."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, moment: Moment) -> None:
        self.count += 1
        if self.count == FIRST:
            self.begun = time.perf_counter()
        if self.count == LAST:
            self.seconds = time.perf_counter() - self.begun
            raise EnoughError


def of_fit(name: str, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    torch.manual_seed(0)
    clock = Clock()
    config = sparsevd.FitConfig(learning_rate=4e-3, batch_size=BATCH)
    with contextlib.suppress(EnoughError):
        sparsevd.fit(sparsevd.sparsify(MODELS[name]()), data, None, config, progress=False, callbacks=[clock])
    return clock.seconds / (LAST - FIRST)


def of_own_loop(
    name: str, data: tuple[torch.Tensor, torch.Tensor], make: Callable[..., torch.optim.Optimizer]
) -> float:
    """As people write it; like `fit` it looks at the loss, counts what is wrong and keeps images in one order."""
    torch.manual_seed(0)
    model = sparsevd.sparsify(MODELS[name]())
    if name == "lenet-5-caffe":
        model = model.to(memory_format=torch.channels_last)
    model.train()
    optimizer = make(sparsevd.parameter_groups(model, lr=4e-3))
    sparsevd.attach(optimizer, model, n_train=N, epochs=40, steps_per_epoch=N // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40 * N // BATCH)
    wrong, total = 0.0, 0.0
    for step, batch in enumerate(torch.randperm(N).split(BATCH)[:LAST], start=1):
        x, y = data[0][batch], data[1][batch]
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
        wrong += (output.argmax(1) != y).sum().item()
        if step == FIRST:
            begun = time.perf_counter()
    return (time.perf_counter() - begun) / (LAST - FIRST)


if __name__ == "__main__":
    main()
