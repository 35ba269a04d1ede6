"""What is left of a network: plain data, layer by layer, and how it prints."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsevd.errors import ConversionError
from sparsevd.layers import SPARSE_TYPES
from sparsevd.posterior import THRESHOLD, NoisyModule, Posterior, equations, posteriors


@dataclass(frozen=True)
class LayerSummary:
    """One layer. `log_alpha` holds the 5, 50 and 95 % quantiles over the kept weights, for Sparse VD layers only."""

    name: str
    type: str
    shape: tuple[int, ...]
    weights: int
    kept: int
    log_alpha: tuple[float, float, float] | None = None

    @property
    def sparsity(self) -> float:
        """Share of zero weights, in %."""
        return 100 * (1 - self.kept / self.weights) if self.weights else 0.0


@dataclass(frozen=True)
class ModelSummary:
    """All layers and their totals. Only weights of Linear and Conv layers count in the ratio, as in the paper."""

    layers: tuple[LayerSummary, ...]
    other_parameters: int
    kl: float | None = None

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers)

    @property
    def kept(self) -> int:
        return sum(layer.kept for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Share of zero weights in all layers together, in %."""
        return 100 * (1 - self.kept / self.weights) if self.weights else 0.0

    @property
    def ratio(self) -> float:
        """|W| / |W≠0|: how many times fewer weights."""
        return self.weights / self.kept if self.kept else math.inf

    def per_layer(self) -> list[dict[str, Any]]:
        """Weights and kept weights of each layer, as a record of an experiment has them."""
        return [{"name": layer.name, "weights": layer.weights, "kept": layer.kept} for layer in self.layers]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it; an infinite ratio is None."""
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers]
        return {
            "weights": self.weights,
            "kept": self.kept,
            "sparsity": self.sparsity,
            "ratio": self.ratio if self.kept else None,
            "other_parameters": self.other_parameters,
            "kl": self.kl,
            "layers": layers,
        }

    def __str__(self) -> str:
        header = ("layer", "type", "shape", "weights", "kept", "sparsity", "log α of the kept, 5 / 50 / 95 %")
        rows = [
            (
                layer.name or "(model)",
                layer.type,
                "×".join(str(size) for size in layer.shape),
                f"{layer.weights:,}",
                f"{layer.kept:,}",
                f"{layer.sparsity:.2f} %",
                " / ".join(f"{quantile:.1f}" for quantile in layer.log_alpha) if layer.log_alpha else "–",
            )
            for layer in self.layers
        ]
        total = ("total", "", "", f"{self.weights:,}", f"{self.kept:,}", f"{self.sparsity:.2f} %", "")
        widths = [max(len(row[column]) for row in [header, *rows, total]) for column in range(len(header))]

        def line(row: tuple[str, ...]) -> str:
            cells = [
                cell.rjust(width) if 3 <= column <= 5 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        rule = "─" * len(line(header))
        times = f"{self.ratio:.1f}×" if self.kept else "infinitely"
        tail = f"{times} fewer weights; {self.other_parameters:,} other parameters (biases, norms, what stays dense)"
        return "\n".join([line(header), rule, *map(line, rows), rule, line(total), tail])


def summary(model: nn.Module) -> ModelSummary:
    """Layer by layer, how many weights are kept: of a Sparse VD network by log α, of a plain one by its zeros."""
    found = posteriors(model)
    noisy = {id(each.theta): each for each in found}
    rows: dict[int, LayerSummary] = {}  # by their tensor, so that tied ones count once
    for name, module in model.named_modules():
        for key in _weights(module):
            weight = cast(Tensor, getattr(module, key))
            if id(weight) in noisy:
                rows.setdefault(id(weight), summarise_posterior(noisy[id(weight)]))
            else:
                label = name if key == "weight" else f"{name}.{key}"
                rows.setdefault(id(weight), summarise_layer(label, type(module).__name__, weight))
    if not rows:
        raise ConversionError(f"no layer with a Sparse VD twin in {type(model).__name__}; there is nothing to sum up")
    noise = sum(each.log_sigma2.numel() for each in found)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        kl = sum(each.kl().item() for each in found) if found else None
    others = parameters - noise - sum(row.weights for row in rows.values())
    return ModelSummary(tuple(rows.values()), others, kl)


def _weights(module: nn.Module) -> Sequence[str]:
    """The names of the tensors of a module that count as weights: those with noise, or that would get it."""
    if isinstance(module, NoisyModule):
        return [posterior.weight for posterior in module.posteriors()]
    return SPARSE_TYPES[type(module)].weights if type(module) in SPARSE_TYPES else ()


def summarise_posterior(posterior: Posterior) -> LayerSummary:
    kind = type(posterior.layer).__name__
    return summarise_layer(posterior.label, kind, posterior.theta, posterior.log_sigma2, posterior.threshold)


@torch.no_grad()
def summarise_layer(
    name: str, type_name: str, weight: Tensor, log_sigma2: Tensor | None = None, threshold: float = THRESHOLD
) -> LayerSummary:
    """One tensor of weights: kept is what the threshold leaves, or without noise what is not zero."""
    quantiles = None
    kept = weight
    if log_sigma2 is not None:
        kept = equations.pruned(weight, log_sigma2, threshold)
        log_alpha = equations.log_alpha(weight, log_sigma2)[kept != 0]
        if len(log_alpha):
            quantiles = _quantiles(log_alpha)
    return LayerSummary(name, type_name, tuple(weight.shape), weight.numel(), int(torch.count_nonzero(kept)), quantiles)


def _quantiles(values: Tensor) -> tuple[float, float, float]:
    """The 5, 50 and 95 % quantiles, by kthvalue: unlike quantile it has no limit on the size."""
    low, middle, high = (values.kthvalue(1 + int(q * (len(values) - 1))).values.item() for q in (0.05, 0.5, 0.95))
    return low, middle, high
