"""How many weights go at a look, in a run without noise: gradual pruning whose end the held-out data decides.

A cut costs at first, and training brings most of that back while the rate falls. So what a look shows is compared with
what the search aims at plus what is still hoped for. That hope is measured: the looks before the first cut show what
the rate alone costs, and all of that comes back. From the first cut on, the hope falls with the square of what is left
of the rate, as the cost of the rate does (seen on a ResNet-8). Where more than that is lost for long, what went last
comes back. A cut asks for more caution: what goes in the middle of a run has little time to heal, so the hope for cuts
falls with the fourth power. The rate is held for a part of the run (`start`), and most weights go then.

A look at the mean of the weights is nearly what the end of the run will show, so there is little to hope for: on a
ResNet-8 with 67 % zeros the rise fell from 0.28 of a collapse at the held rate to 0.23 at the end, and not before the
rate was nearly gone. What training on costs before the first cut, it costs with any number of zeros: where that is more
than the search aims at, it is left out of account; what of it is beyond the budget must go with the rate. Cuts near to
the limit are smaller, and late in the run nothing comes back: it could not learn any more.

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
    # Where looks see means: what the end brings, in parts of a collapse; how far from the limit cuts become smaller, to
    # what part of them; and until when, of the run, weights may come back.
    HOPE_BY_MEAN: ClassVar[float] = 0.05
    NEAR: ClassVar[float] = 0.1
    SMALLEST: ClassVar[float] = 0.25
    LAST_RETURN: ClassVar[float] = 0.8

    cost: float = 0.0  # of the rate: the mean over the looks before the first cut
    looks: int = 0  # how many these were
    in_vain: int = 0  # rounds in a row
    has_cut: bool = False  # at any time: what came back since has not been there all along

    def part(
        self, verdict: Verdict, progress: float, decayed: float, few: bool = False, by_mean: bool = False
    ) -> float:
        """The part of the weights to cut now, 0 to wait; `decayed` is what is left of the first rate.

        With few held-out examples a mistake more is luck as often as not, and nothing is hoped for. `by_mean`: the look
        saw the mean of the weights.
        """
        # After the rate has risen to its height; the first mean is of the steps in which it rose.
        at_its_height = progress > (1.9 if by_mean else 0.9) * self.ROUND
        if not self.has_cut and at_its_height and math.isfinite(verdict.rise):
            self.looks += 1
            self.cost += (min(verdict.rise, 1.0) - self.cost) / self.looks
        if progress < self.FIRST_CUT:
            return 0.0
        after_cuts = decayed**self.POWER_FOR_CUTS if self.has_cut else 1.0
        after_all = decayed**self.POWER_BEFORE_GOING_BACK
        aim = verdict.rise - verdict.excess
        if few:
            hope = patience = 0.0
        elif by_mean:
            hope = (self.HOPE_BY_MEAN + max(0.0, self.cost - aim)) * after_cuts
            patience = self.HOPE_BY_MEAN + max(0.0, self.cost - aim - verdict.reserve) * after_all
        else:
            cost = max(self.cost, self.LEAST_COST)
            hope, patience = cost * after_cuts, cost * after_all
        lost = verdict.beyond > patience or (few and not verdict.keeps)
        in_time = not by_mean or progress < self.LAST_RETURN
        self.in_vain = self.in_vain + 1 if lost and in_time else 0
        room = hope - verdict.excess
        waits = lost and (few or (by_mean and self.has_cut))
        if waits or not room >= 0:  # NaN, too
            return 0.0
        self.has_cut, self.in_vain = True, 0
        part = self.CUT * (0.25 + 0.75 * decayed)
        return part * max(self.SMALLEST, min(1.0, room / self.NEAR)) if by_mean and not few else part

    def goes_back(self) -> bool:
        """Whether the last cuts were too many; asked after each look that cuts nothing."""
        if self.in_vain < self.PATIENCE:
            return False
        self.in_vain = 0
        return True
