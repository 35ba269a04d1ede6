"""LeNet-300-100 with and without a teacher, at the same ratio: 50,000 images of MNIST to train on, 10,000 held out.

    OMP_NUM_THREADS=1 python experiments/teacher.py run [--variant taught] [--seeds 0 1 2]
    python experiments/teacher.py table

The teacher is LeNet-5-Caffe, trained dense on the same 50,000 images, shifted by up to two pixels; the student sees the
images as they are, so the teacher's logits are computed once. The default recipe's 100-fold sparsity is beyond where a
teacher helps. To come to 50–60×, the untaught network's loss is multiplied (β = 1/3 and 1/3.5); the teacher's T² does
that for the taught one. A run gives one network; each is also cut, by `prune(sparsity=…)`, to ratios that several
reach, where they can be compared. Settings are those of the first trials, not chosen here; the error on the test set is
recorded too, and chose nothing.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, spread
from torch import Tensor, nn

import sparsevd
from sparsevd.training.data import Augmented
from sparsevd.zoo import datasets, models

HELD_OUT = 10_000
SEEDS = range(3)
RATIOS = (55, 60, 70)
TEACHER_EPOCHS = 20
# What the loss is multiplied by, and what the teacher is told.
VARIANTS: dict[str, tuple[float, dict[str, float] | None]] = {
    "taught": (1.0, {"temperature": 3.0, "teacher_weight": 0.5}),
    "alone": (3.0, None),
    "alone, lighter KL": (3.5, None),
    "taught, T = 2, w = 0.9": (1.0, {"temperature": 2.0, "teacher_weight": 0.9}),
}


class Scaled:
    """Cross-entropy times a number: β = 1 over that number in the bound."""

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(output, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    records = Records("teacher")
    if arguments.action == "run":
        data = split()
        logits = teacher_logits(data, records)
        for seed in arguments.seeds:
            for variant in arguments.variant or VARIANTS:
                if not records.find(variant=variant, seed=seed):
                    records.add(**unit(variant, seed, data, logits))
    print(table(records))


def split() -> dict[str, tuple[Tensor, Tensor]]:
    """The last 10,000 training images are held out."""
    mnist = datasets.load("mnist")
    x, y = mnist.train
    return {"train": (x[:-HELD_OUT], y[:-HELD_OUT]), "held out": (x[-HELD_OUT:], y[-HELD_OUT:]), "test": mnist.test}


def teacher_logits(data: dict[str, tuple[Tensor, Tensor]], records: Records) -> Tensor:
    """Of the training images, by the teacher, which is trained first if there is none."""
    torch.manual_seed(0)
    teacher = models.lenet_5_caffe()
    config = sparsevd.FitConfig(epochs=TEACHER_EPOCHS, learning_rate=1e-3)
    folder = Path("runs") / "teacher"
    sparsevd.fit_dense(teacher, Augmented(data["train"], shift=2), None, config, run_dir=folder, resume=True)
    if not records.find(variant="teacher"):
        errors = {f"error, {name}": sparsevd.evaluate(teacher, data[name]).error for name in data}
        records.add(variant="teacher", net="lenet-5-caffe", epochs=TEACHER_EPOCHS, shift=2, seed=0, **errors)
    with torch.no_grad():
        return torch.cat([teacher(x) for x in data["train"][0].split(1000)])


def unit(variant: str, seed: int, data: dict[str, tuple[Tensor, Tensor]], logits: Tensor) -> dict[str, Any]:
    scale, teaching = VARIANTS[variant]
    torch.manual_seed(seed)
    model = sparsevd.sparsify(models.lenet_300_100())
    config = sparsevd.FitConfig(seed=seed)
    taught: dict[str, Any] = {"teacher": logits, **teaching} if teaching else {}
    history = sparsevd.fit(model, data["train"], None, config, loss=Scaled(scale), progress=False, **taught)
    ratio = sparsevd.summary(model).ratio
    cuts = [measured(sparsevd.prune(model, sparsity=1 - 1 / cut), cut, data) for cut in RATIOS if cut > ratio]
    return {
        "variant": variant,
        "seed": seed,
        "net": "lenet-300-100",
        "epochs": config.epochs,
        "loss_scale": scale,
        "teaching": teaching,
        **measured(sparsevd.prune(model), ratio, data),
        "cuts": cuts,
        "seconds": round(sum(epoch.seconds for epoch in history), 1),
    }


def measured(pruned: nn.Module, ratio: float, data: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    errors = {f"error, {name}": sparsevd.evaluate(pruned, data[name]).error for name in ("held out", "test")}
    return {"ratio": round(ratio, 2), **errors}


def table(records: Records) -> str:
    """Markdown: as trained, then cut to equal ratios; mean ± standard deviation over the seeds."""
    lines = ["| | seeds | fewer weights | held-out error % | test error % |", "|---|---|---|---|---|"]
    for variant in VARIANTS:
        runs = records.find(variant=variant)
        for cut in (None, *RATIOS):
            found = runs if cut is None else [c for r in runs for c in r["cuts"] if c["ratio"] == cut]
            if found:
                ratios = spread([r["ratio"] for r in found]) if cut is None else f"cut to {cut}"
                errors = [spread([r[f"error, {name}"] for r in found]) for name in ("held out", "test")]
                lines.append(f"| {variant} | {len(found)} | {ratios}× | {' | '.join(errors)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
