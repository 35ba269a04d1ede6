"""Section 5.4 of the paper: random labels. Binary Dropout learns them by heart, Sparse VD drops every weight.

    OMP_NUM_THREADS=1 python experiments/random_labels.py run
    python experiments/random_labels.py table

A fully-connected network (two layers of 1,000 units) on the first N images of MNIST, labels drawn at random: there is
nothing to learn. Units: Binary Dropout 0.5; Sparse VD from random weights with β = 1 from the start; Sparse VD from a
dense network that has memorised the labels. The bound of the empty network, −N·log 10, is what the last must be
compared with: a lower bound means that the empty network is the better model.
"""

import argparse
import math
import time
from typing import Any

import torch
from records import Records
from torch import Tensor, nn

import sparsevd
from sparsevd import baselines
from sparsevd.baselines.binary_dropout import BinaryDropout
from sparsevd.baselines.dense import Dense
from sparsevd.data import load
from sparsevd.models import MODELS

N = 10_000
CLASSES = 10
EPOCHS = 60


def data(seed: int) -> tuple[Tensor, Tensor]:
    x = load("mnist").train[0][:N]
    return x, torch.randint(0, CLASSES, (N,), generator=torch.Generator().manual_seed(seed))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS["fc-1000-1000"](CLASSES)


def binary_dropout(seed: int) -> dict[str, Any]:
    train = data(seed)
    method = BinaryDropout(rate=0.5, input_rate=0.0)
    outcome = baselines.train(method, network(seed), train, epochs=2 * EPOCHS, seed=seed)
    return measured(outcome.network, train) | {"epochs": 2 * EPOCHS}


def sparse_vd(seed: int) -> dict[str, Any]:
    """β = 1 from the start, and nothing else changed."""
    return _sparse_vd(network(seed), data(seed), seed)


def sparse_vd_from_memory(seed: int) -> dict[str, Any]:
    train = data(seed)
    memorised = baselines.train(Dense(), network(seed), train, epochs=EPOCHS, seed=seed).network
    before = measured(memorised, train)
    return _sparse_vd(memorised, train, seed, learning_rate=1e-4) | {"error_of_start": before["error"]}


def _sparse_vd(dense: nn.Module, train: tuple[Tensor, Tensor], seed: int, **settings: float) -> dict[str, Any]:
    model = sparsevd.sparsify(dense)
    config = sparsevd.FitConfig(epochs=EPOCHS, warm_up_end=0.0, drop_from=1.0, contract=False, seed=seed, **settings)
    sparsevd.fit(model, train, None, config)
    torch.manual_seed(seed)
    bound = sparsevd.elbo(model, train)
    pruned = sparsevd.prune(model)
    return measured(pruned, train) | {"epochs": EPOCHS, "elbo": bound, "elbo_of_empty_network": -N * math.log(CLASSES)}


def measured(model: nn.Module, train: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Error on the random labels themselves, what is left of the weights, and whether every prediction is the same."""
    left = sparsevd.summary(model)
    with torch.no_grad():
        outputs = model.eval()(train[0])
    return {
        "error": sparsevd.evaluate(model, train).error,
        "sparsity": left.sparsity,
        "ratio": left.ratio if left.kept else None,
        "per_layer": [{"name": r.name, "weights": r.weights, "kept": r.kept} for r in left.layers],
        "constant": bool((outputs == outputs[:1]).all()),
    }


UNITS = {
    "Binary Dropout 0.5": binary_dropout,
    "Sparse VD": sparse_vd,
    "Sparse VD from a network that memorised": sparse_vd_from_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = Records("random_labels")
    if arguments.action == "run":
        for method, unit in UNITS.items():
            if not records.find(method=method, seed=arguments.seed):
                start = time.monotonic()
                result = unit(arguments.seed)
                records.add(
                    net="fc-1000-1000",
                    data=f"the first {N} images of mnist, random labels",
                    method=method,
                    seed=arguments.seed,
                    **result,
                    seconds=round(time.monotonic() - start),
                    command="python experiments/random_labels.py run",
                )
    print("| method | error on the random labels | zeros | constant | bound | bound of the empty network |")
    print("|---|---|---|---|---|---|")
    for r in records.all():
        bounds = [f"{r[key]:,.0f}" if r.get(key) else "–" for key in ("elbo", "elbo_of_empty_network")]
        constant = "yes" if r["constant"] else "no"
        print(f"| {r['method']} | {r['error']:.1f} % | {r['sparsity']:.2f} % | {constant} | {' | '.join(bounds)} |")


if __name__ == "__main__":
    main()
