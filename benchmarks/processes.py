"""Samples a second of `fit` on two processes with a thread each against one process with one thread, interleaved.

    python benchmarks/processes.py                          # VGG-like k = 0.25 on CIFAR-10; starts torchrun itself
    python benchmarks/processes.py --steps 4 --rounds 2     # to see that it works
    python benchmarks/processes.py --processes 4            # on a machine with four cores

A round trains for some steps on process 0 alone while the others sleep, then for as many on all of them, with the same
batch size in all; the ratio of samples a second is taken within a round, and given as median and quartiles over the
rounds. The first steps of a training are not timed: they set up torch's averaging. Bytes sent per step and rank are
computed, from the gradients (a ring sends 2(n − 1)/n of them) and the statistics of batch norm. Beside them stands what
the loopback device has counted, with the headers of all packets and whatever else the machine says to itself.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.training import processes
from sparsevd.training.inputs import call
from sparsevd.training.loop import Loop
from sparsevd.training.processes import Alone
from sparsevd.training.progress import Callback, Moment
from sparsevd.training.task import Task
from sparsevd.zoo import datasets
from sparsevd.zoo.models import MODELS

RESULTS = Path(__file__).parent / "results" / "processes.json"
UNTIMED = 3  # steps: the first is averaged by hand, in the second torch makes its buckets anew


class Clock(Callback):
    """When the steps were over, and what the loopback device had sent then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def on_step(self, moment: Moment) -> None:
        self.seconds.append(time.perf_counter())
        self.bytes.append(loopback_bytes())

    def per_step(self) -> tuple[float, float]:
        steps = len(self.seconds) - UNTIMED
        sent = self.bytes[-1] - self.bytes[UNTIMED - 1]
        return (self.seconds[-1] - self.seconds[UNTIMED - 1]) / steps, sent / steps


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def train(net: str, data: Any, batch: int, team: Alone) -> tuple[float, float]:
    """Seconds, and bytes over the loopback device, of a step."""
    torch.manual_seed(0)
    config = sparsevd.FitConfig(epochs=1, batch_size=batch, learning_rate=1e-4)
    task = Task(sparsevd.sparsify(MODELS[net](10)), data, None, config, F.cross_entropy, call, None, None)
    clock = Clock()
    Loop(task, None, [clock], None, team).run(False, False)
    return clock.per_step()


def to_send(model: nn.Module, count: int) -> dict[str, int]:
    """What each of so many processes has to send in a step, on the average."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    ring, tree = 2 * (count - 1) / count, (count - 1) / count
    return {
        "gradients": gradients,
        "gradients_sent": round(ring * gradients),
        "buffers_sent": round(tree * buffers),
        "sent": round(ring * gradients + tree * buffers),
    }


def measure(arguments: argparse.Namespace, team: Alone) -> dict[str, Any]:
    x, y = datasets.load(arguments.data).train
    examples = arguments.batch * (arguments.steps + UNTIMED)
    data = x[:examples], y[:examples]
    alone: list[float] = []
    together: list[float] = []
    counted: list[float] = []
    for round_number in range(arguments.rounds + 1):
        if team.main:
            seconds, _ = train(arguments.net, data, arguments.batch, Alone())
        dist.barrier()  # the others have slept here
        both, sent = train(arguments.net, data, arguments.batch, team)
        if team.main and round_number:  # the first warms up
            alone.append(arguments.batch / seconds)
            together.append(arguments.batch / both)
            counted.append(sent / team.size)
            print(f"round {round_number}: {alone[-1]:.1f} alone, {together[-1]:.1f} on {team.size}", flush=True)
    if not team.main:
        return {}
    ratios = [b / a for a, b in zip(alone, together, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "smallest_and_largest": [round(min(ratios), 3), round(max(ratios), 3)],
        "samples_per_second_alone": round(statistics.median(alone), 1),
        "samples_per_second_together": round(statistics.median(together), 1),
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "bytes_per_step_and_rank": {
            **to_send(sparsevd.sparsify(MODELS[arguments.net](10)), team.size),
            "counted_on_loopback": round(statistics.median(counted)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=MODELS, default="vgg-like-0.25")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
        os.environ |= {"OMP_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, *run, __file__, *sys.argv[1:]])
    torch.set_num_threads(1)
    with processes.joined() as team:
        record = measure(arguments, team)
        if not team.main:
            return
        records: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        records["about"] = {
            "command": "python benchmarks/processes.py",
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "sparsevd": sparsevd.__version__,
        }
        records[f"{arguments.net}, {team.size} processes"] = record
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
