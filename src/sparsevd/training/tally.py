"""What a step has found; several processes add it up while the gradients are made, so that all know the same."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sparsevd.training.processes import Alone


class Tally(NamedTuple):
    """Over the examples of all processes."""

    loss: float  # the mean
    wrong: float | None
    examples: int
    finite: bool
    interrupted: bool


def count(
    team: Alone,
    nll: Tensor,
    objective: Tensor,
    wrong: Callable[[], float | None],
    examples: int,
    interrupted: Callable[[], bool],
) -> Callable[[], Tally]:
    """Begins to count before the backward pass; what it returns gives the result after it."""

    def finite() -> bool:
        return objective is nll or bool(objective.isfinite())

    if team.size == 1:
        return lambda: Tally(nll.item(), wrong(), examples, finite(), interrupted())
    missed = wrong()
    loss = nll.item() * examples if examples else 0.0
    missed = math.nan if missed is None else missed if examples else 0.0
    sums = team.total([loss, missed, examples, not finite(), interrupted(), 0])

    def counted() -> Tally:
        loss, missed, seen, infinite, interrupted, _ = sums()
        return Tally(loss / seen, None if math.isnan(missed) else missed, int(seen), not infinite, interrupted > 0)

    return counted


def all_have_ended(team: Alone) -> bool:
    """After the last batch of an epoch. A process that still counts a step adds its numbers to these."""
    return team.size == 1 or team.total([0, 0, 0, 0, 0, 1])()[-1] == team.size
