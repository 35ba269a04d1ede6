"""How a run goes, for those who diagnose it: where it starts, how many steps it has, and how many it needs."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsevd.reporting.diagnosis import Course
from sparsevd.reporting.summary import summary
from sparsevd.training.history import EpochMetrics
from sparsevd.training.schedule import Schedule
from sparsevd.training.task import Task

# Fewer are no training, whatever the rates.
FEWEST_STEPS = 300
# How many times longer a weight takes than if every step led straight to zero. Seen on wine, breast cancer and digits,
# networks of 50 units: with ten times as many the loss is close to that of longer runs, with a third of that it is not.
DETOURS = 10
# Of the weights: so many can go.
MOST = 0.95


def begun(task: Task, schedule: Schedule) -> Course:
    """What is known before the first step."""
    steps = schedule.config.epochs * task.steps_per_epoch(schedule.config.batch_size)
    parts = [(i + 0.5) / 200 for i in range(200)]
    rate = sum(schedule.config.rate(part) for part in parts) / len(parts)
    noise_rate = sum(schedule.config.rate(part) * schedule.at(part).noise_ratio for part in parts) / len(parts)
    return Course(
        start=summary(task.model),
        n_train=task.n,
        epochs=schedule.config.epochs,
        steps=steps,
        steps_needed=steps_needed(schedule, rate, noise_rate),
        reach=(steps * rate, steps * noise_rate),
    )


def ended(course: Course, history: Sequence[EpochMetrics]) -> Course:
    """The same, when the run is over. β is that of the whole last epoch: it may have got to 1 with the last step."""
    last = history[-2:]
    return replace(course, beta=min(each.beta for each in last), loss=last[-1].train_loss)


@torch.no_grad()
def steps_needed(schedule: Schedule, rate: float, noise_rate: float) -> int:
    """How many steps a superfluous weight takes to get beyond the threshold, at these mean rates.

    Adam's step is at most about its rate. A weight gets there when θ has gone to zero, or log σ² up to the threshold,
    whichever is faster.
    """
    longest = 0.0
    for each in schedule.posteriors:
        theta, log_alpha = each.theta.flatten(), each.log_alpha().flatten()
        inside = (log_alpha <= each.threshold) & (theta != 0)
        if not inside.any():
            continue
        ways = torch.minimum(theta[inside].abs() / rate, (each.threshold - log_alpha[inside]) / noise_rate)
        longest = max(longest, ways.float().kthvalue(math.ceil(MOST * len(ways))).values.item())
    return max(FEWEST_STEPS, math.ceil(DETOURS * longest))
