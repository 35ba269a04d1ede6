"""One training step of a Sparse VD network against the same dense one, ours and the peers', in one interleaved run.

    pip install --no-deps cplxmodule==2022.6 pytorch-ard==0.2.4     # the peers; left out where they are not installed
    python benchmarks/train_step.py                                 # all nets; --nets lenet-300-100 for one

A step is forward, loss, backward and Adam on random data of the net's usual shape, images channels last in memory, as
`fit` has them. Adam is torch's fused one for everybody, but that `fit` has one with the KL in the same pass; the row
"elbo_loss and torch's Adam" is what a training loop of one's own costs. A round times every contender once, one after
the other, so that a slow moment of the machine hits all; ratios are taken within a round, and given as median and
interquartile range over the rounds. Peak bytes are those of all tensors that a step holds at once: parameters,
gradients, Adam's state, data and what torch's profiler sees being allocated.
"""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsevd
from sparsevd import kernels
from sparsevd.training.optimizer import BoundAdam
from sparsevd.zoo.models import MODELS

RESULTS = Path(__file__).parent / "results" / "train_step.json"
# name → batch size, shape of an input, steps in one timing
NETS = {
    "lenet-300-100": (100, (1, 28, 28), 20),
    "lenet-5-caffe": (100, (1, 28, 28), 3),
    "vgg-like-0.25": (128, (3, 32, 32), 1),
}
N_TRAIN = 60_000

Objective = Callable[[Tensor, Tensor], Tensor]
Contender = tuple[nn.Module, Objective, torch.optim.Optimizer | None]


def replaced(model: nn.Module, linear: type[nn.Module], convolution: type[nn.Module]) -> nn.Module:
    """A peer's twin: layers of the same shape (fresh weights, as the peers make them), no Dropout, as ours."""
    for name, layer in list(model.named_modules()):
        new: nn.Module | None = None
        if type(layer) is nn.Linear:
            new = linear(layer.in_features, layer.out_features)
        elif type(layer) is nn.Conv2d:
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
            new = convolution(*sizes)
        elif isinstance(layer, nn.Dropout):
            new = nn.Identity()
        if new is not None:
            model.set_submodule(name, new)
    return model


def ours(name: str, variance_dtype: torch.dtype | None = None) -> Contender:
    model = sparsevd.sparsify(MODELS[name](10), variance_dtype=variance_dtype)
    return model, F.cross_entropy, BoundAdam(model, 1e-4, kl_weight=1 / N_TRAIN)


def own_loop(name: str) -> Contender:
    model = sparsevd.sparsify(MODELS[name](10))
    return model, lambda output, y: sparsevd.elbo_loss(F.cross_entropy(output, y), model, n_train=N_TRAIN), None


def cplxmodule(name: str) -> Contender:
    from cplxmodule.nn.relevance import Conv2dVD, LinearVD, penalties

    model = replaced(MODELS[name](10), LinearVD, Conv2dVD)
    return model, lambda output, y: F.cross_entropy(output, y) + sum(penalties(model)) / N_TRAIN, None


def pytorch_ard(name: str) -> Contender:
    from torch_ard import Conv2dARD, ELBOLoss, LinearARD

    model = replaced(MODELS[name](10), LinearARD, Conv2dARD)
    objective = ELBOLoss(model, F.cross_entropy)
    return model, lambda output, y: objective(output, y, 1.0, 1.0 / N_TRAIN), None


def dense(name: str) -> Contender:
    """Without Dropout, which Sparse VD takes away as well."""
    model = MODELS[name](10)
    for part, layer in list(model.named_modules()):
        if isinstance(layer, nn.Dropout):
            model.set_submodule(part, nn.Identity())
    return model, F.cross_entropy, None


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    before, kernels.available = kernels.available, lambda: False
    try:
        yield
    finally:
        kernels.available = before


CONTENDERS: dict[str, Callable[[str], Contender]] = {
    "dense": dense,
    "sparsevd, float32": ours,
    "sparsevd, bfloat16 variance": lambda name: ours(name, torch.bfloat16),
    "sparsevd, elbo_loss and torch's Adam": own_loop,
    "sparsevd without its kernels": ours,
    "cplxmodule 2022.6": cplxmodule,
    "pytorch-ard 0.2.4": pytorch_ard,
}


class Step:
    """A contender, ready to make one training step after the other."""

    def __init__(self, contender: str, net: str):
        torch.manual_seed(0)
        batch, shape, self.repetitions = NETS[net]
        self.model, self.objective, optimizer = CONTENDERS[contender](net)
        self.model.train().to(memory_format=torch.channels_last)
        self.optimizer = optimizer or torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        x = torch.rand(batch, *shape)
        self.x, self.y = x.contiguous(memory_format=torch.channels_last), torch.randint(0, 10, (batch,))
        self.context = without_kernels if "without" in contender else contextlib.nullcontext

    def __call__(self) -> None:
        loss = self.objective(self.model(self.x), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def seconds(self) -> float:
        with self.context():
            start = time.perf_counter()
            for _ in range(self.repetitions):
                self()
            return (time.perf_counter() - start) / self.repetitions

    def peak_bytes(self) -> int:
        """Everything held at the start of a step, and the most that is allocated on top of it."""
        self.optimizer.zero_grad()
        state = [t for slots in self.optimizer.state.values() for t in slots.values() if isinstance(t, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state, self.x, self.y]
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        with self.context(), torch.profiler.profile(profile_memory=True) as profiler:
            self()
        changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = highest = 0
        for event in sorted(changes, key=lambda event: event.start_ns()):
            now += event.nbytes()
            highest = max(highest, now)
        return held + highest


def measure(net: str, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    steps: dict[str, Step] = {}
    for contender in CONTENDERS:
        try:
            steps[contender] = Step(contender, net)
        except ImportError:
            print(f"{contender} is not installed: left out")
    for step in steps.values():
        step.seconds()
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(rounds):
        for contender, step in steps.items():
            times[contender].append(step.seconds())
    result: dict[str, Any] = {}
    for contender, step in steps.items():
        ratios = [mine / base for mine, base in zip(times[contender], times["dense"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[contender] = {
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "median_ms": round(1000 * statistics.median(times[contender]), 3),
            "peak_bytes": step.peak_bytes(),
            "rounds": rounds,
        }
    return result


def table(records: dict[str, Any]) -> str:
    """Markdown: a row per contender, a column per net and number of threads."""
    keys = [key for key in records if key != "about"]
    lines = ["| ratio to dense | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for contender in CONTENDERS:
        cells = []
        for key in keys:
            if contender not in records[key]:
                cells.append("–")
                continue
            cell, base = records[key][contender], records[key]["dense"]
            low, high = cell["quartiles"]
            memory = cell["peak_bytes"] / base["peak_bytes"]
            cells.append(f"{cell['ratio']:.2f} ({low:.2f}–{high:.2f}), bytes {memory:.2f}")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    records: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    records["about"] = {
        "command": "python benchmarks/train_step.py",
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, shared",
        "bfloat16_instructions": bool(torch.cpu.get_capabilities().get("avx512_bf16", False)),
        "torch": torch.__version__,
        "sparsevd": importlib.metadata.version("sparsevd"),
    }
    for net in arguments.nets:
        for threads in arguments.threads:
            records[f"{net}, {threads} thread{'s' if threads > 1 else ''}"] = measure(net, threads, arguments.rounds)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")
            print(table(records), flush=True)


if __name__ == "__main__":
    main()
