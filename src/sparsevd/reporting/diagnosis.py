"""What happened to a network, in words: each diagnosis looks at a summary and says a sentence with numbers, or nothing.

A diagnosis is a function with the decorator below; its name is its entry in `DIAGNOSES`. It may ask `summary.course`
how the run went, if that is known. `summary` prints what they say under its table, and `fit` at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsevd.reporting.summary import LayerSummary, ModelSummary

Diagnosis = Callable[["ModelSummary"], str | None]
DIAGNOSES: dict[str, Diagnosis] = {}
# What is known, and can be mended, before the first step.
BEFORE_A_RUN = ("too_few_steps", "noise_at_the_start")

# What a run with a budget can still be told: it weighs the KL as it needs, and is judged by what it lost.
WITH_A_BUDGET = ("lost_everything", "stayed_dense")

MUCH_NOISE = 0.5  # times the weights, by their squares
LITTLE_NOISE = 0.05
MUCH_DENSE = 0.1  # of all parameters
CLIFF = 2.0  # times as many weights with a threshold one higher as with one lower ...
FEW = 20  # ... unless these are a handful
HEAVY_KL, POOR_FIT = 0.1, 0.1  # nats per example: so much of either is a lot in any likelihood


@dataclass(frozen=True)
class Course:
    """How a run went; `beta` and `loss` are known at its end.

    Args:
        start: the network before the first step.
        n_train: N, the number of training examples.
        epochs: passes over them.
        steps: of the optimizer, in all.
        steps_needed: for a superfluous weight of usual size to get beyond the threshold.
        reach: how far Adam can move a weight, and how far its log σ², in all these steps.
        beta: the weight of the KL in the last epoch.
        loss: the mean loss of the last epoch, with noise.
    """

    start: ModelSummary
    n_train: int
    epochs: int
    steps: int
    steps_needed: int
    reach: tuple[float, float]
    beta: float | None = None
    loss: float | None = None


def diagnose(summary: ModelSummary, names: Iterable[str] | None = None) -> list[str]:
    """What there is to say: by all diagnoses, or by those of these names."""
    found = (DIAGNOSES[name](summary) for name in names or DIAGNOSES)
    return [sentence for sentence in found if sentence]


def diagnosis(function: Diagnosis) -> Diagnosis:
    """Enters a function into the registry."""
    DIAGNOSES[function.__name__] = function
    return function


@diagnosis
def too_few_steps(summary: ModelSummary) -> str | None:
    """Adam moves nothing by more than its rate in a step, so a short run cannot make weights superfluous."""
    run = summary.course
    if run is None or run.steps >= run.steps_needed:
        return None
    epochs = math.ceil(run.steps_needed * run.epochs / run.steps)
    return (
        f"{run.steps:,} steps in {run.epochs:,} epochs are few for this recipe: at its rates they move a weight by at "
        f"most {run.reach[0]:.2g} and its log σ² by {run.reach[1]:.2g}. About {run.steps_needed:,} steps would let "
        f"superfluous weights go and the others learn: epochs={epochs}, or a smaller batch_size"
    )


@diagnosis
def noise_at_the_start(summary: ModelSummary) -> str | None:
    """log σ² starts at the same value everywhere; where weights are small, that is more noise than weight."""
    start = summary.course.start if summary.course else summary
    loud = [
        (layer, layer.noise)
        for layer in start.layers
        if layer.first_log_sigma2 is not None and layer.noise is not None and layer.noise > MUCH_NOISE
    ]
    if not loud:
        return None
    beyond = 100 * (1 - sum(layer.kept for layer, _ in loud) / sum(layer.weights for layer, _ in loud))
    lower = min((layer.first_log_sigma2 or 0.0) + math.log(LITTLE_NOISE / noise) for layer, noise in loud)
    return (
        f"before any training the noise is up to {max(noise for _, noise in loud):.2g} times as large as the weights "
        f"(by their squares) in {_names(layer for layer, _ in loud)}, and {beyond:.1f} % of the weights there are "
        "beyond the threshold. Random weights grow out of that; a trained network forgets. For one, give sparsify a "
        f"lower start: initial_log_sigma2={math.floor(lower):g}"
    )


@diagnosis
def lost_everything(summary: ModelSummary) -> str | None:
    """A layer without weights."""
    empty = _emptied(summary)
    if not empty:
        return None
    weights = sum(layer.weights for layer in empty)
    return (
        f"{_names(empty)} lost every weight ({weights:,} in all): the output is the bias alone, whatever comes in, and "
        "where no path leads around it the network predicts the same for everything. A budget holds against that, "
        "fit(budget=sparsevd.Budget(max_error_increase=1)); so does leaving the layer dense, sparsify(exclude=...)"
    )


@diagnosis
def beta_below_one(summary: ModelSummary) -> str | None:
    """Anything but β = 1 is no bound."""
    beta = summary.course.beta if summary.course else None
    if beta is None or beta >= 1:
        return None
    return (
        f"β ended at {beta:.2g}, not at 1: the KL weighed less than in the variational bound, so more weights are kept "
        "than it asks for, and the numbers are no bound. That is as it should be with a budget; else end the warm-up "
        "earlier (warm_up_end=)"
    )


@diagnosis
def threshold_at_a_cliff(summary: ModelSummary) -> str | None:
    """Usually the weights part into needed and superfluous, and few lie about the threshold."""
    noisy = [(layer, layer.around) for layer in summary.layers if layer.around]
    low, high = (sum(around[side] for _, around in noisy) for side in (0, 1))
    if high - low < FEW or high < CLIFF * low:
        return None
    kept = sum(layer.kept for layer, _ in noisy)
    return (
        f"the threshold of log α lies at a cliff: {kept:,} weights are kept, but {low:,} with one lower by 1 and "
        f"{high:,} with one higher by 1, so what is left is nearly arbitrary. Train longer until the weights part, or "
        "let held-out data choose: prune(budget=...) or prune(threshold='auto', data=...)"
    )


@diagnosis
def stayed_dense(summary: ModelSummary) -> str | None:
    """What has no noise cannot become sparse, and limits how small the whole can be."""
    dense = sum(count for _, count in summary.dense)
    if dense < MUCH_DENSE * summary.parameters:
        return None
    noisy = sum(layer.weights for layer in summary.layers if layer.noisy)
    limit = summary.parameters / (summary.parameters - noisy)
    share = 100 * dense / summary.parameters
    largest = [name for name, _ in sorted(summary.dense, key=lambda each: -each[1])]
    return (
        f"{dense:,} of {summary.parameters:,} parameters ({share:.0f} %) stayed dense, in {_listed(largest)}: even "
        f"without a single other weight the network would be only {limit:.1f} times smaller. "
        "sparsevd.conversion.preview(model) says why each layer that could not be converted stays as it is"
    )


@diagnosis
def heavy_kl(summary: ModelSummary) -> str | None:
    """With few examples the bound asks for more sparsity than a user would."""
    run, kl = summary.course, summary.kl
    if run is None or run.loss is None or kl is None or run.loss < POOR_FIT:
        return None
    if run.steps < run.steps_needed:  # that comes first: the KL may yet fall
        return None
    if kl / run.n_train < HEAVY_KL and not _emptied(summary):
        return None
    return (
        f"the KL is heavy: {kl:,.0f} nats, {kl / run.n_train:.2g} for each of N = {run.n_train:,} examples, beside a "
        f"loss of {run.loss:.2g}. That is the bound itself: a weight must be worth its nats in the likelihood of all "
        "examples together, and few examples pay for few weights. To keep the accuracy instead, give a budget: "
        "fit(budget=sparsevd.Budget(max_error_increase=1))"
    )


def _emptied(summary: ModelSummary) -> list[LayerSummary]:
    """Those through which nothing passes any more; without its recurrent matrix a layer still reads its input."""
    return [layer for layer in summary.layers if layer.weights and not layer.kept and "weight_hh" not in layer.name]


def _names(layers: Iterable[LayerSummary]) -> str:
    return _listed([layer.name or "(model)" for layer in layers])


def _listed(names: list[str], most: int = 3) -> str:
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
