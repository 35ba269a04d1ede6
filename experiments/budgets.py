"""Budgets while training: are they kept on data that chose nothing, and how near to the best of a sweep over β?

    OMP_NUM_THREADS=1 python experiments/budgets.py run [--task digits] [--kind budget] [--weights resnet20.safetensors]
    python experiments/budgets.py table

For each task a dense network is trained first, or given. Then `fit(budget=…)` from it, in so many epochs, once for each
budget and seed; and, for comparison, `fit` with β = 0.003 … 3 (by dividing the loss), whose networks are cut by
`prune(budget=…)` or `prune(sparsity=…)` on the same held-out data; and gradual magnitude pruning. The test data judges
only. On the small sets a run is repeated over random splits into 60 % to train on, 20 % held out and 20 % to test on.
"""

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import resnet20
import torch
import torch.nn.functional as F
from records import Records, commit
from torch import Tensor, nn

import sparsevd
from sparsevd.baselines.gradual import GradualPruning
from sparsevd.baselines.training import Training
from sparsevd.errors import SparseVDWarning
from sparsevd.training.data import Augmented
from sparsevd.training.teacher import Teacher
from sparsevd.zoo import datasets, models

Pair = tuple[Tensor, Tensor]
BETAS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SPARSITIES = (0.8, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Task:
    """A network and its data: (seed) → dense network, train, held out, test."""

    make: Callable[[int], tuple[nn.Module, Any, Pair, Pair]]
    epochs: int
    points: tuple[float, ...]
    seeds: range
    sparsities: tuple[float, ...] = ()
    betas: tuple[float, ...] = BETAS
    gradual: tuple[float, ...] = ()  # sparsities for gradual magnitude pruning ...
    gradual_rate: float = 2e-3  # ... and its rate
    regression: bool = False
    taught: float = 0.0  # the weight of a teacher, the dense network, for Sparse VD and for its rival
    autocast: bool = False  # both in bfloat16
    long: bool = False  # a run is an hour: it says how far it is, and goes on after a stop


def mnist(build: Callable[[], nn.Module], name: str, size: int = 50_000) -> Callable[[int], Any]:
    def make(seed: int) -> tuple[nn.Module, Any, Pair, Pair]:
        data = datasets.load("mnist")
        x, y = data.train
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        held_out, rest = order[:10_000], order[10_000 : 10_000 + size]
        if size < 10_000:
            held_out = held_out[: size // 5]
        train = x[rest], y[rest]
        torch.manual_seed(seed)
        return dense(build(), train, 15, f"{name}-{seed}"), train, (x[held_out], y[held_out]), data.test

    return make


def small(name: str) -> Callable[[int], Any]:
    def make(seed: int) -> tuple[nn.Module, Any, Pair, Pair]:
        import sklearn.datasets as sk

        x, y = (
            sk.make_friedman1(1500, noise=1.0, random_state=0)
            if name == "friedman1"
            else getattr(sk, f"load_{name}")(return_X_y=True)
        )
        order = np.random.default_rng(seed).permutation(len(y))
        first, second = int(0.6 * len(y)), int(0.8 * len(y))
        mean, deviation = x[order[:first]].mean(0), x[order[:first]].std(0)
        x = ((x - mean) / np.where(deviation > 1e-6, deviation, 1)).clip(-10, 10)
        inputs = torch.tensor(x[order], dtype=torch.float32)
        target = torch.tensor(y[order], dtype=torch.float32)[:, None] if name == "friedman1" else torch.tensor(y[order])
        parts = [slice(0, first), slice(first, second), slice(second, None)]
        train, held_out, test = [(inputs[part], target[part]) for part in parts]
        torch.manual_seed(seed)
        outputs = 1 if name == "friedman1" else int(target.max()) + 1
        net = nn.Sequential(
            nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, outputs)
        )
        loss = sparsevd.Gaussian() if name == "friedman1" else F.cross_entropy
        return dense(net, train, 100, f"{name}-{seed}", loss), train, held_out, test

    return make


def resnet(seed: int) -> tuple[nn.Module, Any, Pair, Pair]:
    train, held_out, test = resnet20.data()
    return resnet20.trained(WEIGHTS), Augmented(train, shift=4, mirror=True), held_out, test


def resnet8(seed: int) -> tuple[nn.Module, Any, Pair, Pair]:
    """CIFAR-10 at half its resolution: 45,000 images to train on, 5,000 held out."""
    cifar = datasets.load("cifar10")
    (x, y), (x_test, y_test) = cifar.train, cifar.test
    x, x_test = F.avg_pool2d(x, 2), F.avg_pool2d(x_test, 2)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:5000], order[5000:]
    train = Augmented((x[rest], y[rest]), shift=2, mirror=True)
    torch.manual_seed(seed)
    net = dense(resnet20.ResNet8(), train, 20, f"resnet-8-{seed}", rate=4e-3, weight_decay=0.02)
    return net, train, (x[held_out], y[held_out]), (x_test, y_test)


WEIGHTS = "resnet20-cifar10.safetensors"
TASKS = {
    "lenet-300-100": Task(
        mnist(models.lenet_300_100, "lenet-300-100"), 20, (0.25, 0.5, 1.0), range(2), SPARSITIES, BETAS[3:]
    ),
    "lenet-5-caffe": Task(mnist(models.lenet_5_caffe, "lenet-5-caffe"), 8, (0.25, 0.5), range(2), (), BETAS[3:]),
    "mnist-6000": Task(mnist(models.lenet_300_100, "mnist-6000", 6000), 40, (1.0,), range(5), (), BETAS[2:6]),
    "digits": Task(small("digits"), 40, (0.5, 1.0), range(10), SPARSITIES[:3]),
    "wine": Task(small("wine"), 40, (0.5, 1.0), range(100)),
    "breast_cancer": Task(small("breast_cancer"), 40, (0.5, 1.0), range(100)),
    "friedman1": Task(small("friedman1"), 40, (0.05, 0.1), range(10), regression=True),
    "resnet-8": Task(resnet8, 12, (1.0,), range(1), (0.8,), (), (0.8,), 1e-3),
    "resnet-20": Task(
        resnet,
        12,
        (0.5, 1.5),
        range(3),
        (0.77,),
        (),
        (0.7, 0.77, 0.8, 0.85, 0.87),
        1e-3,
        taught=0.9,
        autocast=True,
        long=True,
    ),
}


def dense(
    net: nn.Module,
    train: Any,
    epochs: int,
    name: str,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    rate: float = 1e-3,
    weight_decay: float = 0.0,
) -> nn.Module:
    config = sparsevd.FitConfig(epochs=epochs, learning_rate=rate, weight_decay=weight_decay)
    folder = Path("runs") / "budgets" / name
    sparsevd.fit_dense(net, train, None, config, loss=loss, run_dir=folder, resume=True, progress=False)
    return net.eval()


def main() -> None:
    global WEIGHTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--kind", choices=["budget", "sparsity", "sweep", "gradual"], action="append")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--points", type=float, nargs="+", help="budgets of this size only")
    parser.add_argument("--shares", type=float, nargs="+", help="of zeros to reach: these only")
    parser.add_argument("--weights", default=WEIGHTS, help="of ResNet-20")
    arguments = parser.parse_args()
    WEIGHTS = arguments.weights
    records = Records("budgets")
    if arguments.action == "run":
        for name in arguments.task or [name for name in TASKS if not name.startswith("resnet")]:
            for unit in units(name, arguments.kind, arguments.seeds):
                wanted = arguments.points is None or unit.get("points") in arguments.points
                wanted = wanted and (arguments.shares is None or unit.get("share") in arguments.shares)
                if wanted and not records.find(**unit):
                    records.add(**unit, **measured(**unit))
    print(table(records))


def units(name: str, kinds: list[str] | None, seeds: list[int] | None) -> Iterator[dict[str, Any]]:
    task = TASKS[name]
    for seed in seeds or task.seeds:
        found: dict[str, list[dict[str, Any]]] = {
            "budget": [{"points": points} for points in task.points],
            "sparsity": [{"share": share} for share in task.sparsities],
            "sweep": [{"beta": beta} for beta in task.betas],
            "gradual": [{"share": share} for share in task.gradual],
        }
        for kind, settings in found.items():
            if kinds is None or kind in kinds:
                yield from ({"task": name, "kind": kind, "seed": seed, **setting} for setting in settings)


def measured(task: str, kind: str, seed: int, **setting: float) -> dict[str, Any]:
    about = TASKS[task]
    net, train, held_out, test = about.make(seed)
    model = sparsevd.sparsify(net)
    config = sparsevd.FitConfig(epochs=about.epochs, seed=seed, autocast=about.autocast)
    teacher = Teacher(copy.deepcopy(net), weight=about.taught) if about.taught else None
    loss: Any = sparsevd.Gaussian() if about.regression else F.cross_entropy
    begun = time.monotonic()
    if kind == "gradual":
        method = GradualPruning(sparsity=setting["share"], learning_rate=about.gradual_rate, l1=0.0)
        training = Training(
            train, epochs=about.epochs, seed=seed, progress=about.long, autocast=about.autocast, teacher=teacher
        )
        cut = method.train(copy.deepcopy(net), training).network
        seconds = round(time.monotonic() - begun, 1)
        return {"epochs": about.epochs, "seconds": seconds, **judged(cut, net, held_out, test, loss)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SparseVDWarning)
        if kind == "sweep":
            weighed = divided(setting["beta"], net, held_out, about.regression)
            sparsevd.fit(model, train, held_out, config, loss=weighed, progress=False)
            seconds = time.monotonic() - begun
            cuts = [
                {
                    "points": points,
                    **judged(pruned(model, budget(about, points, net), held_out, loss), net, held_out, test, loss),
                }
                for points in about.points
            ]
            cuts += [
                {"share": share, **judged(sparsevd.prune(model, sparsity=share), net, held_out, test, loss)}
                for share in about.sparsities
            ]
            return {"epochs": config.epochs, "seconds": round(seconds, 1), "cuts": cuts}
        asked = sparsevd.Budget(sparsity=setting["share"]) if kind == "sparsity" else budget(about, setting["points"])
        unit = f"{task}-{seed}-{asked}".replace(" ", "_")
        folder = Path("runs") / "budgets" / commit() / unit if about.long else None  # no run goes on with other rules
        history = sparsevd.fit(
            model,
            train,
            held_out,
            config,
            loss=loss,
            budget=asked,
            progress=about.long,
            run_dir=folder,
            resume=about.long,
            teacher=teacher.source if teacher else None,
            teacher_weight=about.taught,
        )
    return {
        "epochs": config.epochs,
        "seconds": round(sum(epoch.seconds for epoch in history), 1),
        "beta": history[-1].beta,
        "worst_epoch": max(epoch.val_error or 0.0 for epoch in history),
        "said": [str(each.message).splitlines()[0] for each in said],
        **judged(sparsevd.prune(model), net, held_out, test, loss),
    }


def divided(beta: float, net: nn.Module, held_out: Pair, regression: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The likelihood divided by β; a regression's has the variance that the dense network leaves on held-out data."""
    if not regression:
        return lambda output, target: F.cross_entropy(output, target) / beta
    with torch.no_grad():
        variance = (net(held_out[0]) - held_out[1]).square().mean().item()
    return lambda output, target: 0.5 * (output - target).square().mean() / variance / beta


def budget(task: Task, points: float, reference: nn.Module | None = None) -> sparsevd.Budget:
    if task.regression:
        return sparsevd.Budget(max_loss_increase=points, reference=reference)
    return sparsevd.Budget(max_error_increase=points, reference=reference)


def pruned(model: nn.Module, budget: sparsevd.Budget, held_out: Pair, loss: Any) -> nn.Module:
    fresh = sparsevd.Gaussian() if isinstance(loss, sparsevd.Gaussian) else loss
    return sparsevd.prune(model, budget=budget, data=held_out, loss=fresh)


def judged(pruned: nn.Module, net: nn.Module, held_out: Pair, test: Pair, loss: Any) -> dict[str, Any]:
    """Zeros, what is measured on the data that chose, and the paired difference on the data that did not."""
    weights = [p for p in pruned.parameters() if p.ndim > 1]
    kept = sum(int((weight != 0).sum()) for weight in weights)
    sizes = {"zeros": round(1 - kept / sum(weight.numel() for weight in weights), 5), "kept": kept}
    lost = paired(pruned, net, test, loss)
    chosen = paired(pruned, net, held_out, loss)
    return sizes | {
        "held_out": round(chosen.mean().item(), 4),
        "test": round(lost.mean().item(), 4),
        "standard_error": round(lost.std().item() / math.sqrt(len(lost)), 4),
        "n": len(lost),
    }


@torch.no_grad()
def paired(pruned: nn.Module, net: nn.Module, data: Pair, loss: Any) -> Tensor:
    """What is lost on each example: points of error, or nats at the variance that suits each network."""
    x, y = data
    outputs = [torch.cat([each.eval()(part) for part in x.split(1000)]) for each in (pruned, net)]
    if y.is_floating_point():
        squares = [(output - y).square().flatten() for output in outputs]
        first, second = (0.5 * (s / s.mean() + s.mean().log()) for s in squares)
        return (first - second).double()
    first, second = (100.0 * (output.argmax(1) != y).double() for output in outputs)
    return first - second


def table(records: Records) -> str:
    """Markdown: for each task and budget what was lost, and the weights against the best of the sweep."""
    header = ("task", "budget", "runs", "lost on test data", "zeros %", "against the sweep's best", "time")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, task in TASKS.items():
        asked = [("budget", "points", value) for value in task.points]
        asked += [("sparsity", "share", value) for value in task.sparsities]
        asked += [("gradual", "share", value) for value in task.gradual]
        for kind, key, value in asked:
            if runs := records.find(task=name, kind=kind, **{key: value}):
                what = f"{value:g}" + (" zeros" if key == "share" else "")
                what += ", gradual magnitude pruning" if kind == "gradual" else ""
                lines += [f"| {name} | {what} | {len(runs)} | {_row(records, name, runs, key, value)}"]
    return "\n".join(lines)


def _row(records: Records, name: str, runs: list[dict[str, Any]], key: str, value: float) -> str:
    """The best of the sweep is a β whose networks, over the same seeds, keep to the budget on test data within two
    standard errors, and have the fewest weights; for a sparsity the one with the lowest error on held-out data."""
    lost, error = _mean(runs)
    zeros = [100 * run["zeros"] for run in runs]
    shown = f"{lost:.2f} ± {error:.2f} | {sum(zeros) / len(zeros):.1f} ({min(zeros):.1f}–{max(zeros):.1f}) | "
    betas = TASKS[name].betas
    swept = {seed: records.find(task=name, kind="sweep", seed=seed) for seed in {run["seed"] for run in runs}}
    both = [run for run in runs if betas and len(swept[run["seed"]]) == len(betas)]  # seeds that have the whole sweep
    if not both:
        return shown + "| |"
    sweeps = {
        beta: [
            next(
                cut
                for unit in swept[run["seed"]]
                if unit["beta"] == beta
                for cut in unit["cuts"]
                if cut.get(key) == value
            )
            for run in both
        ]
        for beta in betas
    }
    plain = [unit["seconds"] for run in both for unit in swept[run["seed"]]]
    some = f"; {len(both)} of {len(runs)} runs" if len(both) < len(runs) else ""
    time = f"{sum(run['seconds'] for run in both) / len(both) / (sum(plain) / len(plain)):.2f}×{some}"
    if key == "share":
        beta = min(sweeps, key=lambda beta: sum(cut["held_out"] for cut in sweeps[beta]))
        lost = _mean(both)[0] - _mean(sweeps[beta])[0]
        return shown + f"{lost:+.2f} points of test error (β = {beta:g}) | {time} |"
    keeping = [beta for beta, cuts in sweeps.items() if _mean(cuts)[0] <= value + 2 * _mean(cuts)[1]]
    if not keeping:
        return shown + f"no β keeps to it | {time} |"
    beta = min(keeping, key=lambda beta: _kept(sweeps[beta]))
    return shown + f"{_kept(both) / _kept(sweeps[beta]):.2f}× its weights (β = {beta:g}) | {time} |"


def _mean(found: list[dict[str, Any]]) -> tuple[float, float]:
    """What was lost, over all runs, and its standard error."""
    error = math.sqrt(sum(each["standard_error"] ** 2 for each in found)) / len(found)
    return sum(each["test"] for each in found) / len(found), error


def _kept(found: list[dict[str, Any]]) -> float:
    """The geometric mean of the weights that are left."""
    return math.exp(sum(math.log(max(each["kept"], 1)) for each in found) / len(found))


if __name__ == "__main__":
    main()
