"""What is left of a network: plain data, layer by layer, and how it prints."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsevd.errors import ConversionError
from sparsevd.layers.registry import sparse_type
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import THRESHOLD, NoisyModule, Posterior, biases, equations, label_of, posteriors
from sparsevd.reporting.diagnosis import Course, diagnose
from sparsevd.reporting.table import table


@dataclass(frozen=True)
class LayerSummary:
    """One layer. What comes after `kept` is of Sparse VD layers only.

    `log_alpha` holds the 5, 50 and 95 % quantiles over the kept weights; `around` how many would be kept with a
    threshold lower and higher by 1; `noise` is Σσ²/Σθ²; `first_log_sigma2` that of all weights, if nothing has changed
    it since `sparsify`.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    weights: int
    kept: int
    log_alpha: tuple[float, float, float] | None = None
    around: tuple[int, int] | None = None
    noise: float | None = None
    first_log_sigma2: float | None = None

    @property
    def noisy(self) -> bool:
        """Whether it is a Sparse VD layer."""
        return self.around is not None

    @property
    def sparsity(self) -> float:
        """Share of zero weights, in %."""
        return 100 * (1 - self.kept / self.weights) if self.weights else 0.0


@dataclass(frozen=True)
class ModelSummary:
    """All layers and their totals.

    As in the paper, only the weights of these layers count in `ratio`. `whole_ratio` is that of all parameters: what
    stays dense shows in it. `dense` has the tensors of a Sparse VD network that carry no noise and could: matrices and
    filters, not biases. `course` is that of its run, where it is known: diagnoses ask for it.
    """

    layers: tuple[LayerSummary, ...]
    other_parameters: int
    kl: float | None = None
    with_buffers: bool = False  # the others may hold buffers: a file that was counted does not say which they are
    dense: tuple[tuple[str, int], ...] = ()
    course: Course | None = field(default=None, repr=False)

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

    @property
    def parameters(self) -> int:
        """All that the network holds, without the noise."""
        return self.weights + self.other_parameters

    @property
    def whole_ratio(self) -> float:
        """How many times fewer parameters, with those of no layer in the list all kept."""
        left = self.kept + self.other_parameters
        return self.parameters / left if left else math.inf

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
            "parameters": self.parameters,
            "whole_ratio": self.whole_ratio if math.isfinite(self.whole_ratio) else None,
            "kl": self.kl,
            "layers": layers,
            "remarks": self.remarks,
        }

    @property
    def remarks(self) -> list[str]:
        """What happened, in words (see `diagnosis`); usually nothing."""
        return diagnose(self)

    def __str__(self) -> str:
        return "\n".join([self.table(), *(f"note: {remark}" for remark in self.remarks)])

    def table(self) -> str:
        """The layers and the headline, without remarks."""
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
        return f"{table(header, rows, right=(3, 4, 5), total=total)}\n{self.headline()}"

    def headline(self) -> str:
        """How many times fewer: of these layers, as the paper counts, and of all that the network holds."""
        everything = "parameter and buffer" if self.with_buffers else "parameter"
        return (
            f"{times(self.ratio)} fewer weights in these layers; {times(self.whole_ratio)} counting every {everything} "
            f"of the network ({self.other_parameters:,} others: biases, norms, what stays dense)"
        )


def times(ratio: float) -> str:
    """How many times, in words: of nothing, everything is infinitely many."""
    return f"{ratio:.1f}×" if math.isfinite(ratio) else "infinitely"


def summary(model: nn.Module) -> ModelSummary:
    """Layer by layer, how many weights are kept: of a Sparse VD network by log α, of a plain one by its zeros."""
    model = bare_model(model)
    found = posteriors(model)
    noisy = {id(each.theta): each for each in found}
    rows: dict[int, LayerSummary] = {}  # by their tensor, so that tied ones count once
    for name, module in model.named_modules():
        for key in _weights(module):
            weight = cast(Tensor, getattr(module, key))
            if id(weight) in noisy:
                rows.setdefault(id(weight), summarise_posterior(noisy[id(weight)]))
            else:
                label = label_of(f"{name}.{key}" if name else key)
                rows.setdefault(id(weight), summarise_layer(label, type(module).__name__, weight))
    if not rows:
        raise ConversionError(f"no layer with a Sparse VD twin in {type(model).__name__}; there is nothing to sum up")
    noise = sum(each.log_sigma2.numel() for each in found)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        kl = sum(each.kl().item() for each in found) if found else None
    others = parameters - noise - sum(row.weights for row in rows.values())
    return ModelSummary(tuple(rows.values()), others, kl, dense=_dense(model, found))


def _dense(model: nn.Module, found: Sequence[Posterior]) -> tuple[tuple[str, int], ...]:
    """The matrices and filters without noise of a network that has some with it."""
    known = {id(parameter) for each in found for parameter in (each.theta, each.log_sigma2)}
    known |= {id(bias) for bias in biases(model)}
    return tuple(
        (label_of(name), parameter.numel())
        for name, parameter in model.named_parameters()
        if found and parameter.ndim > 1 and id(parameter) not in known
    )


def _weights(module: nn.Module) -> Sequence[str]:
    """The names of the tensors of a module that count as weights: those with noise, or that would get it."""
    if isinstance(module, NoisyModule):
        return [posterior.weight for posterior in module.posteriors()]
    kind = sparse_type(module)
    return kind.names(module)[0] if kind else ()


def summarise_posterior(posterior: Posterior) -> LayerSummary:
    kind = type(posterior.layer).__name__
    return summarise_layer(posterior.label, kind, posterior.theta, posterior.log_sigma2, posterior.threshold)


@torch.no_grad()
def summarise_layer(
    name: str, type_name: str, weight: Tensor, log_sigma2: Tensor | None = None, threshold: float = THRESHOLD
) -> LayerSummary:
    """One tensor of weights: kept is what the threshold leaves, or without noise what is not zero."""
    if log_sigma2 is None:
        return LayerSummary(name, type_name, tuple(weight.shape), weight.numel(), int(torch.count_nonzero(weight)))
    log_alpha = equations.log_alpha(weight, log_sigma2)
    kept = (log_alpha <= threshold) & (weight != 0)
    left = log_alpha[kept]
    low, high = (int(((log_alpha <= threshold + by) & (weight != 0)).sum()) for by in (-1, 1))
    noise = (log_sigma2.exp().mean() / weight.to(log_sigma2.dtype).square().mean()).item() if weight.numel() else 0.0
    first = log_sigma2.flatten()[0].item() if weight.numel() and (log_sigma2 == log_sigma2.flatten()[0]).all() else None
    return LayerSummary(
        name,
        type_name,
        tuple(weight.shape),
        weight.numel(),
        int(kept.sum()),
        _quantiles(left) if len(left) else None,
        (low, high),
        noise if math.isfinite(noise) else None,
        first,
    )


def _quantiles(values: Tensor) -> tuple[float, float, float]:
    """The 5, 50 and 95 % quantiles, by kthvalue: unlike quantile it has no limit on the size."""
    low, middle, high = (values.kthvalue(1 + int(q * (len(values) - 1))).values.item() for q in (0.05, 0.5, 0.95))
    return low, middle, high
