"""Section 5.4 of the paper: random labels. Binary Dropout learns them by heart, Sparse VD drops every weight.

    OMP_NUM_THREADS=1 python experiments/random_labels.py run
    python experiments/random_labels.py table

A fully-connected network (two layers of 1,000 units) on the first images of MNIST, and VGG-like (k = 0.25) on the first
images of CIFAR-10, with N to match; the labels are drawn at random, so there is nothing to learn. (The paper has all of
MNIST; to memorise 60,000 labels under dropout takes hours here.) Units: Binary Dropout 0.5 before every fully-connected
layer that does not read the image; Sparse VD from random weights with β = 1 from the start; Sparse VD from a dense
network that has memorised the labels, fine-tuned at 1e-5 with a far faster log σ². The bound of the empty
network, −N·log 10, is what the last must be compared with: a lower bound means that the empty network is the better
model. `error_before_threshold` says whether it still knows the labels by heart.
"""

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from records import Records
from torch import Tensor, nn

import sparsevd
from sparsevd import baselines
from sparsevd.baselines import Method
from sparsevd.baselines.binary_dropout import BinaryDropout
from sparsevd.baselines.dense import Dense
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, so many images, and how long to train."""

    net: str
    data: str
    n: int
    epochs: int
    dropout_epochs: int  # Binary Dropout needs more to learn labels by heart
    batch_size: int = 100

    def train(self, seed: int) -> tuple[Tensor, Tensor]:
        x = load(self.data).train[0][: self.n]
        return x, torch.randint(0, CLASSES, (self.n,), generator=torch.Generator().manual_seed(seed))

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = MODELS[self.net](CLASSES)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model


CASES = [
    Case("fc-1000-1000", "mnist", n=10_000, epochs=60, dropout_epochs=120),
    Case("vgg-like-0.25", "cifar10", n=500, epochs=150, dropout_epochs=150, batch_size=50),
]


def binary_dropout(case: Case, seed: int) -> dict[str, Any]:
    return _baseline(BinaryDropout(rate=0.5, input_rate=0.0), case, case.dropout_epochs, seed)[1]


def sparse_vd(case: Case, seed: int) -> dict[str, Any]:
    """β = 1 from the start. Nothing is dropped before the end, so that the bound alone decides."""
    return _sparse_vd(case.network(seed), case, seed)


def sparse_vd_from_memory(case: Case, seed: int) -> dict[str, Any]:
    memorised, start = _baseline(Dense(), case, case.epochs, seed)
    result = _sparse_vd(memorised, case, seed, learning_rate=1e-5, log_sigma2_lr_ratio=1e3, late_from=1.0)
    return result | {"error_of_start": start["error"], "dense_epochs": start["epochs"]}


def _baseline(method: Method, case: Case, epochs: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    train = case.train(seed)
    options = {"epochs": epochs, "batch_size": case.batch_size, "seed": seed}
    model = baselines.train(method, case.network(seed), train, **options).network
    return model, measured(model, train) | {"epochs": epochs}


def _sparse_vd(dense: nn.Module, case: Case, seed: int, **settings: float) -> dict[str, Any]:
    train = case.train(seed)
    model = sparsevd.sparsify(dense)
    torch.manual_seed(seed)
    first = sparsevd.elbo(model, train)
    options = {"epochs": case.epochs, "batch_size": case.batch_size, "seed": seed, **settings}
    config = sparsevd.FitConfig(warm_up_end=0.0, drop_from=1.0, contract=False, **options)
    history = sparsevd.fit(model, train, None, config)
    torch.manual_seed(seed)
    bound, empty = sparsevd.elbo(model, train), -case.n * math.log(CLASSES)
    before = sparsevd.evaluate(sparsevd.prune(model, threshold=math.inf), train).error
    bounds = {"elbo_of_start": first, "elbo": bound, "elbo_of_empty_network": empty}
    bounds["elbo_by_epoch"] = [epoch.elbo for epoch in history]
    return measured(sparsevd.prune(model), train) | {"epochs": case.epochs, "error_before_threshold": before, **bounds}


def measured(model: nn.Module, train: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Error on the random labels themselves, what is left of the weights, and whether every prediction is the same."""
    left = sparsevd.summary(model)
    with torch.no_grad():
        outputs = model.eval()(train[0])
    return {
        "error": sparsevd.evaluate(model, train).error,
        "sparsity": left.sparsity,
        "ratio": left.ratio if left.kept else None,
        "per_layer": left.per_layer(),
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
    parser.add_argument("--net", choices=[case.net for case in CASES])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = Records("random_labels")
    if arguments.action == "run":
        for case in CASES if arguments.net is None else [case for case in CASES if case.net == arguments.net]:
            for method, unit in UNITS.items():
                if records.find(net=case.net, method=method, seed=arguments.seed):
                    continue
                start = time.monotonic()
                result = unit(case, arguments.seed)
                records.add(
                    net=case.net,
                    data=f"the first {case.n:,} images of {case.data}, random labels",
                    method=method,
                    seed=arguments.seed,
                    **result,
                    seconds=round(time.monotonic() - start),
                    command=f"python experiments/random_labels.py run --net {case.net} --seed {arguments.seed}",
                )
    print("| network | method | error, before the threshold | zeros | constant | bound | of the empty network |")
    print("|---|---|---|---|---|---|---|")
    for r in records.all():
        bounds = [f"{r[key]:,.0f}" if r.get(key) else "–" for key in ("elbo", "elbo_of_empty_network")]
        errors = f"{r['error']:.1f} %, {r.get('error_before_threshold', r['error']):.1f} %"
        row = (r["net"], r["method"], errors, f"{r['sparsity']:.2f} %", "yes" if r["constant"] else "no")
        print(f"| {' | '.join([*row, *bounds])} |")


if __name__ == "__main__":
    main()
