"""How a run begins: what the network can do already decides its rate and its first noise.

A fresh network has nothing to lose, and the recipe's rate is the best one. One that predicts already is destroyed by it
within a few steps, so that rate is tried on a copy for a few steps, and halved until the copy survives. Its first noise
is relative to the weights of each layer, and may grow as fast as the number of steps asks for. With a budget, a network
that cannot do without its smallest weights even for a moment trains without noise: in the few epochs that it has, the
noise would cost more than it takes (ResNet-20 in experiments/README.md). What is cut heals at a rate that does a little
harm.
"""

import copy
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.layers.layer import INITIAL_LOG_SIGMA2
from sparsevd.layers.recurrent import one_sample
from sparsevd.posterior import Posterior, posteriors
from sparsevd.training.budget import Budget, cut_at
from sparsevd.training.data import Batch, Data, batches, checked, size, split
from sparsevd.training.evaluation import EVALUATION_BATCH, Evaluation, evaluate_batches
from sparsevd.training.judge import BEARABLE, COLLAPSE_NATS, COLLAPSE_POINTS
from sparsevd.training.likelihood import Likelihood
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.recipes import LEARNING_RATE, FitConfig
from sparsevd.training.task import Task
from sparsevd.training.weights_read import has_tables, read_by_an_example

RATES = ("learning_rate", "log_sigma2_lr_ratio", "late_log_sigma2_lr_ratio")
CHOSEN = (*RATES, "noise")
# What a budget is measured on where there is no val: a part of the training examples.
HELD_OUT, LARGEST_HELD_OUT = 0.2, 10_000
BATCHES = 5  # to measure on
KNOWS = 0.1  # nats that the right targets must be better than shuffled ones ...
SHUFFLES, DEVIATIONS = 32, 3  # ... and so many standard deviations of so many shuffles
# Numbers in the outputs that this is asked of, beyond those of the first batch: logits of a vocabulary are many.
MOST_REMEMBERED = 1 << 24
TRIAL = 0.01  # of the steps of the run, for each rate ...
TRIAL_STEPS = (5, 60)  # ... but so many
SMALLEST_RATE = LEARNING_RATE / 64
LONG = 5.0  # seconds of a trial: someone waits for the first epoch
# A network with many superfluous weights survives for a moment without so many of its smallest ones.
SUPERFLUOUS = 0.6
# Cuts by size do more harm than the rate, and heal faster at a higher rate than the harmless one. Where there is no
# noise and held-out data tells, that is a rate that harms it a little: by BEARABLE of its error, or by a point.
# Up to so many examples tell, and fewer than so many tell nothing.
LEAST_POINTS, MOST_EXAMPLES, LEAST_EXAMPLES = 1.0, 5_000, 200
# Where it does not, so many times the harmless rate: of a regression, found on friedman1; of a classification, on a
# ResNet-8 (both in experiments/results/budget_trials.json).
BOLD, BOLD_FOR_CLASSES = 4, 2
DROWNED = 0.12  # of a layer's weights beyond the threshold before any training: the first noise is too large then
# What log σ² should be able to rise by in a run, and how far a step may take it.
TRAVEL, FASTEST_NOISE = 28.0, 0.05
# Of a run without noise: the part in which the rate is held, and most weights go. A rate that falls heals no more cuts:
# friedman1 keeps half of the weights so, and a ResNet-8 a quarter fewer (experiments/results/budget_trials.json).
HELD = 0.6
WITHOUT_NOISE = (
    f"The network cannot do without the smallest {100 * SUPERFLUOUS:.0f} % of its weights, so there is no noise: "
    "weights go by their size"
)


@dataclass(frozen=True)
class Start:
    """The recipe with everything chosen, whether the network predicts already, and what to tell."""

    config: FitConfig
    knows: bool
    text: str = ""


def begin(
    task: Task, config: FitConfig, budget: Budget | None = None, say: Callable[[str], None] = lambda line: None
) -> Start:
    """The recipe for this network, and its first noise, where `learning_rate` was left open; with a budget also whether
    to have noise at all, where `noise` was. What takes long is said before the next step of it."""
    found = posteriors(task.model)
    noise_is_open = budget is not None and budget.max_bytes is None and config.noise is None
    asked = noise_is_open or (budget is not None and budget.measures and budget.reference is None)
    if found and config.learning_rate is not None and not asked:
        return Start(config, knows=True)
    if not found:
        return Start(replace(config, learning_rate=config.learning_rate or LEARNING_RATE), knows=False)
    measured = _first(task, config, BATCHES)
    try:
        with cut_at(task.model, math.inf):  # the first noise may be beyond every threshold where weights are small
            before = evaluate_batches(task.model, measured, task.loss, task.forward)
            knows = _knows(task, measured)
    except Exception:  # the first step will say it in a sentence
        return Start(replace(config, learning_rate=config.learning_rate or LEARNING_RATE), knows=True)
    said = ""
    if noise_is_open:
        with cut_at(task.model, math.inf):
            config = replace(config, noise=not knows or _can_lose(task, SUPERFLUOUS, measured, before))
        said = "" if config.noise else WITHOUT_NOISE
    if config.learning_rate is not None:
        return Start(config, knows, said)
    if not knows:
        for each in found:
            if _beyond(each) > DROWNED and _untouched(each):
                each.quieten()
        return Start(replace(config, learning_rate=LEARNING_RATE), knows)
    for each in found:
        if _untouched(each):
            each.quieten()
    training = _first(task, config, BATCHES + TRIAL_STEPS[1])[BATCHES:] or measured
    steps = config.epochs * task.steps_per_epoch(config.batch_size)
    harm = _Harm(measured, before)
    if config.noise is False and before.error is not None:
        harm = _harm_to_held_out_data(task) or harm
    rate = harmless = _harmless_rate(task, config, steps, training, harm, say)
    if config.noise is False and harm.bearable is None:
        rate = min(LEARNING_RATE, (BOLD if before.error is None else BOLD_FOR_CLASSES) * rate)
    noise = min(FASTEST_NOISE, max(config.log_sigma2_lr_ratio * LEARNING_RATE, TRAVEL / steps))
    chosen = replace(
        config,
        learning_rate=rate,
        log_sigma2_lr_ratio=noise / rate,
        late_log_sigma2_lr_ratio=max(noise / rate, config.late_log_sigma2_lr_ratio),
    )
    no_harm = "does no harm" if harm.bearable is None else f"does little harm to {harm.size:,} held-out examples"
    why = f", the largest of {LEARNING_RATE:g}, half of it and so on that {no_harm}"
    why = "" if harmless == LEARNING_RATE else why
    if rate > harmless:
        why = f" ({harmless:g} would do no harm, but what is cut heals faster at a higher rate)"
    error = f"error {before.error:.2f} %" if before.error is not None else f"loss {before.loss:.3g}"
    text = f"the network predicts already ({error} on {BATCHES} training batches): learning_rate={rate:g}{why}"
    return Start(chosen, knows, f"{text}. {said}" if said else text)


def _harmless_rate(
    task: Task, config: FitConfig, steps: int, training: list[Batch], harm: "_Harm", say: Callable[[str], None]
) -> float:
    """The recipe's rate, or half of it and so on."""
    rate = LEARNING_RATE
    while rate > SMALLEST_RATE:
        begun = time.monotonic()
        if _survives(task, config, rate, steps, training, harm):
            break
        if (seconds := time.monotonic() - begun) > LONG:
            say(f"learning_rate={rate:g} harms a copy of the network; trying half of it (about {seconds:.0f} s)")
        rate /= 2
    return rate


@torch.no_grad()
def _can_lose(task: Task, share: float, measured: list[Batch], before: Evaluation) -> bool:
    """Whether a copy of the network is still good without this share of its weights, the smallest."""
    model = copy.deepcopy(task.model)
    weights = [each.theta for each in posteriors(model)]
    sizes = torch.cat([weight.abs().flatten().cpu() for weight in weights])
    sizes = sizes[sizes > 0]  # what it has lost already does not count
    if not len(sizes):
        return True
    limit = sizes.kthvalue(max(1, round(share * len(sizes)))).values.item()
    for weight in weights:
        weight.masked_fill_(weight.abs() <= limit, 0)
    return not _collapsed(before, evaluate_batches(model, measured, copy.deepcopy(task.loss), task.forward))


@dataclass(frozen=True)
class _Harm:
    """What a rate may do: the batches that show it, how the network does on them, and by which part of itself its error
    may rise; None: anything but a collapse."""

    shown_by: list[Batch]
    before: Evaluation
    bearable: float | None = None

    @property
    def size(self) -> int:
        return sum(len(y) for _, y in self.shown_by)

    def is_done(self, after: Evaluation) -> bool:
        before = self.before.error
        if self.bearable is None or before is None or after.error is None:
            return _collapsed(self.before, after)
        standard_error = 100 * math.sqrt(max(1.0, before / 100 * self.size)) / self.size
        bearable = max(LEAST_POINTS, self.bearable * before) + standard_error
        return not math.isfinite(after.loss) or after.error - before > bearable


def _harm_to_held_out_data(task: Task) -> _Harm | None:
    """None where there are no examples with a class, or too few. Training data that the network knows by heart shows
    more harm than there is."""
    if task.val is None:
        return None
    shown_by: list[Batch] = []
    try:
        for batch in batches(task.val, EVALUATION_BATCH, shuffle=False):
            shown_by.append(batch)
            if sum(len(y) for _, y in shown_by) >= MOST_EXAMPLES:
                break
        with cut_at(task.model, math.inf):
            before = evaluate_batches(task.model, shown_by, copy.deepcopy(task.loss), task.forward)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the judge of the budget will say it in a sentence
        return None
    found = _Harm(shown_by, before, BEARABLE)
    return found if before.error is not None and found.size >= LEAST_EXAMPLES else None


def _collapsed(before: Evaluation, after: Evaluation) -> bool:
    if before.error is not None and after.error is not None:
        return after.error - before.error > COLLAPSE_POINTS
    return not after.loss - before.loss <= COLLAPSE_NATS


def _first(task: Task, config: FitConfig, count: int) -> list[Batch]:
    """The first batches of an epoch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        return list(itertools.islice(batches(task.train, config.batch_size, shuffle=True), count))


def held_out(train: Data, seed: int) -> tuple[Data, Data]:
    """A part of the training data to measure a budget on, and a word about it."""
    train = checked(train, "train")
    if isinstance(train, DataLoader):
        raise ArgumentError("a budget is measured on held-out data, and none can be taken from a DataLoader; give val")
    count = min(LARGEST_HELD_OUT, max(1, round(HELD_OUT * size(train, "train"))))
    parts = split(train, count, seed)
    warnings.warn(
        f"the budget is measured on {count:,} of the training examples, which are held out, since there is no val; if "
        "the network was trained on them before, they flatter it",
        SparseVDWarning,
        stacklevel=3,
    )
    return parts


def check_noise(noise: bool | None, budget: Budget | None) -> None:
    """Whether to have noise is a question only where a budget is what it serves."""
    if noise is not None and budget is None:
        raise ArgumentError(f"noise={noise} is for a run with a budget; without one the noise is the method")
    if noise is False and budget is not None and budget.max_bytes is not None:
        raise ArgumentError(
            "max_bytes counts a file that is rounded as the learned noise asks for, and noise=False learns none"
        )


def holding(config: FitConfig, budget: Budget | None) -> FitConfig:
    """The recipe with the part of the run in which the rate does not fall, where that was left open."""
    if config.held is not None or config.noise is not False or budget is None:
        return config
    return replace(config, held=HELD)


def weights_read(task: Task, config: FitConfig) -> float | None:
    """How many weights one of the first training examples reads; None where it reads all, or cannot be asked."""
    if has_tables(task.model):
        with suppress(Exception):  # the first step will say it in a sentence
            first = [task.placed(batch) for batch in _first(task, config, BATCHES)]
            return read_by_an_example(task.model, first, task.forward)
    return None


def check_reference(budget: Budget, chosen: Start, val: Data | None) -> None:
    """A network that knows nothing yet is nothing to compare with."""
    if budget.measures and budget.reference is None and val is not None and not chosen.knows:
        raise ArgumentError(
            "the budget is about what may be lost, and the network at its start knows nothing of the data yet; train "
            "it first (sparsevd.fit_dense), or give the budget a reference= to compare with"
        )


def _knows(task: Task, data: list[Batch]) -> bool:
    """Whether the outputs fit their own targets better than those of other examples, and by more than chance.

    By chance random weights fit some targets better than others: where the loss is large, by many nats (divided by a
    β of 0.1, of 52 classes, by 0.1 and more).
    """
    outputs: list[Any] = []
    full = False

    def remember(model: Any, x: Any) -> Any:
        nonlocal full
        output = task.forward(model, x)
        full = full or (bool(outputs) and sum(map(_numbers, [*outputs, output])) > MOST_REMEMBERED)
        if not full:
            outputs.append(output)
        return output

    evaluate_batches(task.model, data, task.loss, remember)
    data = data[: len(outputs)]
    generator = torch.Generator().manual_seed(0)

    def loss(batches: list[Batch]) -> float:
        remembered = iter(outputs)
        return evaluate_batches(task.model, batches, task.loss, lambda *_: next(remembered)).loss

    others = [loss([(x, _exchanged(y, generator)) for x, y in data]) for _ in range(SHUFFLES)]
    gain = statistics.mean(others) - loss(data)
    return gain > KNOWS and gain > DEVIATIONS * statistics.stdev(others)


def _numbers(output: Any) -> int:
    return output.numel() if isinstance(output, Tensor) else 0


def _exchanged(y: Tensor, generator: torch.Generator) -> Tensor:
    """The targets in a random order in which none keeps its place."""
    order = torch.randperm(len(y), generator=generator)
    exchanged = y.clone()
    exchanged[order] = y[order.roll(1)]
    return exchanged


@torch.no_grad()
def _beyond(posterior: Posterior) -> float:
    return (posterior.log_alpha() > posterior.threshold).float().mean().item()


def _untouched(posterior: Posterior) -> bool:
    """Whether log σ² is as `sparsify` makes it when nobody says otherwise."""
    return bool((posterior.log_sigma2 == INITIAL_LOG_SIGMA2).all())


def _survives(
    task: Task,
    config: FitConfig,
    rate: float,
    steps: int,
    training: list[Batch],
    harm: _Harm,
) -> bool:
    """Whether a copy of the network is still good after some steps at this rate, without the KL."""
    model = copy.deepcopy(task.model)
    optimizer, measure = BoundAdam(model, rate, beta2=config.adam_beta2), copy.deepcopy(task.loss)
    if isinstance(measure, Likelihood):
        every = task.train[1] if isinstance(task.train, tuple) else None
        optimizer.units = measure.begin(model, task.forward, task.placed(training[0]), every, task.per_epoch)
    count = int(min(max(TRIAL * steps, TRIAL_STEPS[0]), TRIAL_STEPS[1]))
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        model.train()
        for step, batch in enumerate(itertools.islice(itertools.cycle(training), count)):
            x, y = task.placed(batch)
            optimizer.set_learning_rate(rate * min(1.0, 2 * (step + 1) / count), 1.0)
            optimizer.zero_grad()
            with one_sample(model):
                loss: Tensor = measure(task.forward(model, x), y)
                if not loss.isfinite():
                    return False
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with cut_at(model, math.inf):
        after = evaluate_batches(model, harm.shown_by, copy.deepcopy(task.loss), task.forward)
    return not harm.is_done(after)
