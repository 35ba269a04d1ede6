"""How many weights go at a look, in a run without noise: gradual pruning whose end the held-out data decides.

A cut costs at first, and training brings most of that back while the rate falls. So what a look shows is compared with
what the search aims at plus what is still hoped for. That hope is measured: the looks before the first cut show what
the rate alone costs, and all of that comes back. From the first cut on, the hope falls with the square of what is left
of the rate, as the cost of the rate does (seen on a ResNet-8). Where more than that is lost for long, what went last
comes back. A cut asks for more caution: what goes in the middle of a run has little time to heal, so the hope for cuts
falls with the fourth power. The rate is held for a part of the run (`start`), and most weights go then.

It knows numbers only; `steering` cuts.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from sparsevd.training.judge import Verdict


@dataclass
class GradualCuts:
    """Where such a run is: a handful of numbers."""

    ROUND: ClassVar[float] = 0.02  # of the run, from one look to the next
    FIRST_CUT: ClassVar[float] = 0.05  # of the run: the looks before show what the rate costs ...
    LEAST_COST: ClassVar[float] = 0.1  # ... and it counts as so much of a collapse at least
    # Of what is left of the rate, in both hopes. With 0.7 of the cost and the square in both, a ResNet-20 whose rate
    # costs more than its budget was hardly cut in half of its run; with all of the cost and the square in both it was
    # cut too far; with the fourth power in both, what was cut came back too soon
    # (experiments/results/budget_trials.json).
    POWER_BEFORE_GOING_BACK: ClassVar[int] = 2
    POWER_FOR_CUTS: ClassVar[int] = 4
    CUT: ClassVar[float] = 0.13  # of the weights, at the first rate; a low rate brings back less at a time
    PATIENCE: ClassVar[int] = 4  # rounds in which it was hoped for more than came

    cost: float = 0.0  # of the rate: the mean over the looks before the first cut
    looks: int = 0  # how many these were
    in_vain: int = 0  # rounds in a row
    has_cut: bool = False  # at any time: what came back since has not been there all along

    def part(self, verdict: Verdict, progress: float, decayed: float, few: bool = False) -> float:
        """The part of the weights to cut now, 0 to wait; `decayed` is what is left of the first rate.

        With few held-out examples a mistake more is luck as often as not, and nothing is hoped for.
        """
        # After the rate has risen to its height.
        if not self.has_cut and progress > 0.9 * self.ROUND and math.isfinite(verdict.rise):
            self.looks += 1
            self.cost += (min(verdict.rise, 1.0) - self.cost) / self.looks
        if progress < self.FIRST_CUT:
            return 0.0
        hope = 0.0 if few else max(self.cost, self.LEAST_COST)
        lost = verdict.beyond > hope * decayed**self.POWER_BEFORE_GOING_BACK or (few and not verdict.keeps)
        self.in_vain = self.in_vain + 1 if lost else 0
        left = decayed**self.POWER_FOR_CUTS if self.has_cut else 1.0
        if verdict.excess > hope * left or (few and not verdict.keeps):
            return 0.0
        self.has_cut = True
        return self.CUT * (0.25 + 0.75 * decayed)

    def goes_back(self) -> bool:
        """Whether the last cuts were too many; asked after each look that cuts nothing."""
        if self.in_vain < self.PATIENCE:
            return False
        self.in_vain = 0
        return True
