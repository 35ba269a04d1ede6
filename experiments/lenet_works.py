"""Units on MNIST for the queue: LeNets with Sparse VD on images as they are, and their rivals at any strength."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from work import Images, Work

import sparsevd
from sparsevd import baselines
from sparsevd.baselines import METHODS, Method
from sparsevd.posterior import posteriors
from sparsevd.runs.sources import split
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

INITIALISATIONS = {
    "xavier": lambda weight: None,  # as the networks come
    "kaiming": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}
PRETRAINING_RATE = 1e-3


def _images(held_out: int) -> Images:
    splits = load("mnist")
    return Images(*split(splits.train, held_out, seed=0)) if held_out else Images(splits.train, splits.test)


def _network(net: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[net](10)


def what_is_left(network: nn.Module) -> dict[str, Any]:
    """The ratio; the effective one, which counts only weights between an input and an output; weights per layer."""
    left = sparsevd.summary(network)
    small = sparsevd.compact(network, torch.zeros(2, 1, 28, 28))  # without any layer, if its output is constant
    layers = [layer for layer in small.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    effective = sum(int(layer.weight.count_nonzero()) for layer in layers)
    return {
        "ratio": left.ratio if left.kept else None,
        "effective_ratio": left.weights / effective if effective else None,
        "per_layer": left.per_layer(),
    }


@dataclass(frozen=True)
class SparseLeNet(Work):
    """Sparse VD on images as they are, neither shifted nor mirrored."""

    net: str
    fit: sparsevd.FitConfig
    held_out: int = 0  # above 0, a trial
    initialisation: str = "xavier"
    initial_log_sigma2: float | None = None  # None: the package's
    relative_log_sigma2: float | None = None  # instead: so much above log of the mean square of a layer's first weights
    pretrain_epochs: int = 0

    part_for_estimate: ClassVar[float] = 0.1

    @property
    def epochs(self) -> int:
        return self.fit.epochs

    @property
    def all_epochs(self) -> int:
        return self.pretrain_epochs + self.fit.epochs

    def shortened(self, epochs: int) -> Self:
        return replace(self, fit=replace(self.fit, epochs=epochs), pretrain_epochs=0)

    def cost(self) -> str:
        return f"sparse-vd-{self.net}-without-{self.held_out}-batch-{self.fit.batch_size}"

    def images(self) -> Images:
        return _images(self.held_out)

    def run(self, images: Images, folder: Path) -> dict[str, Any]:
        dense = _network(self.net, self.fit.seed)
        for parameter in dense.parameters():
            if parameter.ndim > 1:
                INITIALISATIONS[self.initialisation](parameter)
        if self.pretrain_epochs:
            recipe = replace(self.fit, epochs=self.pretrain_epochs, learning_rate=PRETRAINING_RATE)
            sparsevd.fit_dense(dense, images.train, None, recipe, run_dir=folder / "pretrain", resume=True)
        model = sparsevd.sparsify(dense)
        for each in posteriors(model):
            if self.initial_log_sigma2 is not None:
                each.log_sigma2.data.fill_(self.initial_log_sigma2)
            elif self.relative_log_sigma2 is not None:
                each.log_sigma2.data.fill_(each.theta.square().mean().log().item() + self.relative_log_sigma2)
        val = images.measured if self.held_out else None
        history = sparsevd.fit(model, images.train, val, self.fit, run_dir=folder, resume=True)
        pruned = sparsevd.prune(model)
        return {
            "net": self.net,
            "data": "mnist",
            "method": "sparse-vd",
            "seed": self.fit.seed,
            "epochs": self.fit.epochs,
            "held_out": self.held_out,
            "settings": {
                **asdict(self.fit),
                "shift": 0,
                "initialisation": self.initialisation,
                "initial_log_sigma2": self.initial_log_sigma2,
                "relative_log_sigma2": self.relative_log_sigma2,
                "pretrain_epochs": self.pretrain_epochs,
            },
            "error": sparsevd.evaluate(pruned, images.measured).error,
            "error_before_threshold": sparsevd.evaluate(
                sparsevd.prune(model, threshold=float("inf")), images.measured
            ).error,
            "train_error": sparsevd.evaluate(pruned, images.train).error,
            **what_is_left(pruned),
            "curve": [
                {"epoch": m.epoch, "train_error": m.train_error, "held_out_error": m.val_error, "ratio": m.ratio}
                for m in history
            ],
        }


@dataclass(frozen=True)
class Rival(Work):
    """One of the paper's rivals. It keeps no checkpoint: a stop costs the whole unit, some minutes."""

    method: Method
    seed: int = 0
    net: str = "lenet-300-100"
    epochs: int = 40

    part_for_estimate: ClassVar[float] = 0.2

    @property
    def method_name(self) -> str:
        return next(name for name, kind in METHODS.items() if kind is type(self.method))

    def cost(self) -> str:
        return f"{self.method_name}-{self.net}"

    def images(self) -> Images:
        return _images(0)

    def run(self, images: Images, folder: Path) -> dict[str, Any]:
        network = _network(self.net, self.seed)
        outcome = baselines.train(self.method, network, images.train, epochs=self.epochs, seed=self.seed)
        before = outcome.before_threshold
        return {
            "net": self.net,
            "data": "mnist",
            "method": self.method_name,
            "seed": self.seed,
            "epochs": self.epochs,
            "settings": {**self.method.settings(), "shift": 0},
            "error": sparsevd.evaluate(outcome.network, images.measured).error,
            "error_before_threshold": sparsevd.evaluate(before, images.measured).error if before is not None else None,
            "train_error": sparsevd.evaluate(outcome.network, images.train).error,
            **what_is_left(outcome.network),
        }
