"""Do the units of y decide what is learned? Two regressions with y × 0.01, 0.1, 1 and 100, with two likelihoods.

    OMP_NUM_THREADS=1 python experiments/regression_scale.py run [--data diabetes] [--loss gaussian] [--seeds 0 1 2]
    python experiments/regression_scale.py table

`Gaussian()` learns the variance of the noise and works in the units of y; `F.mse_loss` is a Gaussian of variance ½.
Data: scikit-learn's diabetes (442 examples of ten features) and friedman1 (2,000 examples, five of the ten features are
noise). A fifth of the examples is held out; R² is that of the pruned network on these. Inputs are standardised, y is
not. Network 10-50-50-1, the default recipe but for epochs and batch size. No setting was chosen by these figures.
"""

import argparse
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, spread
from torch import Tensor, nn

import sparsevd

SCALES = (0.01, 0.1, 1.0, 100.0)
SEEDS = range(3)
RECIPES = {
    "diabetes": sparsevd.FitConfig(epochs=200, batch_size=32),
    "friedman1": sparsevd.FitConfig(epochs=60, batch_size=50),
}
LOSSES = {"gaussian": sparsevd.Gaussian, "mse": lambda: F.mse_loss}
Pair = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--data", choices=RECIPES, action="append")
    parser.add_argument("--loss", choices=LOSSES, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    records = Records("regression_scale")
    if arguments.action == "run":
        for data in arguments.data or RECIPES:
            for loss in arguments.loss or LOSSES:
                for seed in arguments.seeds:
                    for scale in SCALES:
                        if not records.find(data=data, loss=loss, seed=seed, scale=scale):
                            records.add(**unit(data, loss, seed, scale))
    print(table(records))


def unit(data: str, loss: str, seed: int, scale: float) -> dict[str, Any]:
    train, held_out = load(data, scale)
    torch.manual_seed(seed)
    layers = [nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)]
    model = sparsevd.sparsify(nn.Sequential(*layers))
    config = sparsevd.FitConfig(**{**vars(RECIPES[data]), "seed": seed})
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sparsevd.SparseVDWarning)  # of mse_loss, and of layers that it empties
        sparsevd.fit(model, train, None, config, loss=LOSSES[loss](), progress=False)
        pruned = sparsevd.prune(model)
    return {
        "data": data,
        "loss": loss,
        "seed": seed,
        "scale": scale,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "r2": round(sparsevd.evaluate(pruned, held_out, sparsevd.Gaussian()).r2 or 0.0, 5),
        "zeros": round(100 * (1 - sparsevd.summary(model).kept / sparsevd.summary(model).weights), 3),
        "seconds": round(time.monotonic() - begun, 1),
    }


def load(name: str, scale: float) -> tuple[Pair, Pair]:
    """Training and held-out examples; the same split for every seed."""
    from sklearn import datasets

    numbers = (
        datasets.load_diabetes(return_X_y=True)
        if name == "diabetes"
        else datasets.make_friedman1(2000, n_features=10, noise=1.0, random_state=0)
    )
    x, y = (torch.from_numpy(part).float() for part in numbers)
    x, y = (x - x.mean(0)) / x.std(0), scale * y.unsqueeze(1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
    return (x[train], y[train]), (x[held_out], y[held_out])


def table(records: Records) -> str:
    """Markdown: mean over the seeds for each scale, and how far a seed's four runs are apart at most."""
    lines = ["| data | loss | y × | R² held out | zeros % |", "|---|---|---|---|---|"]
    for data in RECIPES:
        for loss in LOSSES:
            for scale in SCALES:
                found = records.find(data=data, loss=loss, scale=scale)
                if found:
                    cells = [spread([r[key] for r in found]) for key in ("r2", "zeros")]
                    lines.append(f"| {data} | {loss} | {scale:g} | {' | '.join(cells)} |")
            apart = [range_over_scales(records.find(data=data, loss=loss, seed=s)) for s in SEEDS]
            lines.append(
                f"| {data} | {loss} | apart | {max(a[0] for a in apart):.4f} | {max(a[1] for a in apart):.2f} |"
            )
    return "\n".join(lines)


def range_over_scales(found: list[dict[str, Any]]) -> tuple[float, float]:
    """Of R² and of the zeros."""
    values = [[r[key] for r in found] or [0.0] for key in ("r2", "zeros")]
    return max(values[0]) - min(values[0]), max(values[1]) - min(values[1])


if __name__ == "__main__":
    main()
