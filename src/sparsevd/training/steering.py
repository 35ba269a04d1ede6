"""How a run follows its budget: what the KL weighs, which weights go and when, which state is returned.

A run has two parts. While it *learns*, the noise is on and β follows the budget: for an error it grows as long as the
held-out error leaves room, and a state that collapses is left for the last good one, with half of β and of the rate;
for a sparsity it follows the share of weights that the noise leaves (Gale, Elsen, Hooker 2019: sparsity rises smoothly
with log β). While it *settles*, the noise is off: weights go for good in the order of log α, those that the
noise has drowned first, and then a few more at every look that keeps to the budget; what is left is trained plainly, at
a rate that falls to zero. At the end the sparsest state that kept to the budget comes back.

A run without noise only settles. Its log σ² is the same for all weights, so that they go by their size. How many go at
a look is said in `gradual_cuts`. Where they were too many, the last ones to go come back: they are zero, and may learn.
Where an error decides, it looks at the mean of the weights since the last look (`weight_mean`).

It knows no loop: `Schedule` asks it.
"""

import math
import warnings
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import SparseVDWarning
from sparsevd.posterior import BELOW_WEIGHTS, Posterior, noisy_modules, threshold_for
from sparsevd.training.budget import Budget, Point, Search, cut_at, packed_size
from sparsevd.training.evaluation import Evaluation
from sparsevd.training.gradual_cuts import GradualCuts
from sparsevd.training.judge import Judge, Verdict
from sparsevd.training.weight_mean import WeightMean

_DOUBLE = torch.float64

LEARNING = 0.6  # of the run, at most
WARM_UP = 0.1  # of the run: β grows to its first value
LOOKS = 30  # at the held-out data while it learns
ROUND = 0.0125  # of the run, from one look and cut to the next while it settles
UP = 1.25  # what a look may do to β
CUT = 0.85  # what a round leaves of the weights, while there is room
NEAR = 4  # cuts
PATIENCE = 3  # rounds beyond the budget, before the last good state comes back and cuts become smaller
# β begins at 1, or lower where the weights that an example reads are more than so many times the examples, which makes
# the KL heavy: found on breast cancer and wine, where β ∝ N/W destroyed what was learned, and its square did not.
MANY_WEIGHTS = 5.0
# Noise that takes less than this part of what is left, in a tenth of the run in which β did not grow, only costs:
# the learning ends. A deep network's noise stops so after a quarter of the run or so, and it needs the rest to recover
# (seen on a ResNet-8 with noise); that of a fully-connected one goes on.
STALLED, TENTH = 0.1, 0.1
SPARE = 0.6  # a sparsity to reach: this power of the share of weights that it leaves may be there when learning ends
# What a cut may cost at once, at the first rate, since training gets it back as long as it can: budgets, or parts of a
# collapse, where a small budget is less than the rate itself costs.
RECOVERY, DENT = 1.0, 0.33
WAITING = 0.65  # of the settling: a first state that keeps to the budget is worth waiting for
# Without noise: a new point to go back to, once this share of the weights of the last one is left; and how many.
RUNG, RUNGS = 0.8, 4
LEAST, LEAST_RANGE = 0.002, (2, 1000)  # of a layer's weights stay in any case; a vocabulary has millions of them
LAST_CUTS = 6  # bisections at the end
RAMP_OF_RATE = 0.02  # of the run: Adam's first steps are as long as its rate, whatever the gradient


class Steering:
    """The state of one run with a budget."""

    def __init__(
        self,
        model: nn.Module,
        posteriors: list[Posterior],
        budget: Budget,
        judge: Judge | None,
        n_train: int,
        noisy: bool = True,
        read: float | None = None,  # weights that an example reads; None: all
    ):
        self._model, self._posteriors, self._budget, self._judge = model, posteriors, budget, judge
        self.weights = sum(each.theta.numel() for each in posteriors)
        self._log_beta = math.log(min(1.0, (MANY_WEIGHTS * n_train / (read or self.weights)) ** 2))
        self.rate_factor = 1.0  # halved by every collapse
        self.learning = True
        self._next = 0.0  # progress of the next look
        self._learns_until = LEARNING
        self._mark = (WARM_UP, 1.0, 0.0)  # progress, and then: the share of weights that the noise left, log β
        self._beyond = 0  # rounds in a row
        self._cut = CUT
        self._target = budget.sparsity if judge is None else None
        self._own = {module: module.threshold for module in noisy_modules(model).values()}  # thresholds
        self._first = 0.0  # the zeros that settling began with
        self._good: dict[str, Tensor] = {}  # the last state that kept to the budget while it learned
        self._best: dict[str, Tensor] = {}  # the sparsest one while it settled ...
        self._best_zeros = -1.0  # ... and its share of zeros
        self._noisy = noisy
        self._cuts = GradualCuts()  # without noise
        self._rungs: list[dict[str, Tensor]] = []  # which weights were there before some of them
        by_mean = not noisy and judge is not None and budget.max_error_increase is not None
        self.mean = WeightMean(model) if by_mean else None
        if not noisy:
            self.learning, self._learns_until, self._log_beta = False, 0.0, -math.inf
        if noisy and judge is not None and judge.look(model).keeps:
            self._good = self._snapshot()

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step of a run that does not go on from elsewhere."""
        if self._noisy:
            return
        for module in self._own:
            module.threshold = math.inf  # what is there counts
        square = sum(each.theta.double().square().sum().item() for each in self._posteriors) / self.weights
        level = math.log(max(square, 1e-30)) - BELOW_WEIGHTS
        for each in self._posteriors:
            each.log_sigma2.masked_fill_(each.alive(), level)
        if self._judge is not None and self._accepts(self._judge.look(self._model)):
            self._good = self._snapshot()

    # What the schedule asks.

    def beta(self, progress: float) -> float:
        """The weight of the KL; none while the run settles."""
        return math.exp(self._log_beta) * min(1.0, progress / WARM_UP) if self.learning else 0.0

    @property
    def last_beta(self) -> float:
        """What the KL weighed when the noise was on last."""
        return math.exp(self._log_beta)

    def rate(self, progress: float) -> float:
        """What the rate of the weights is multiplied with."""
        return self.rate_factor * min(1.0, max(progress, 1e-3 * RAMP_OF_RATE) / RAMP_OF_RATE)

    def wants_to_look(self, progress: float) -> bool:
        return progress >= self._next or (self.learning and progress >= self._learns_until) or progress >= 1

    def look(self, progress: float, decayed: float, optimizer: torch.optim.Optimizer) -> None:
        """Look at the held-out data, or at log α, and act. `decayed` is what is left of the first rate."""
        if self.learning and progress < self._learns_until:
            self._look_while_learning(progress, optimizer)
            self._end_where_noise_stalls(progress)
            self._next = progress + LEARNING / LOOKS if progress >= WARM_UP / 2 else max(2 * progress, 0.002)
            return
        if self.learning:
            self._settle()
        elif self._judge is None:
            self._cut_towards_target(progress)
        else:
            self._round(progress, decayed, optimizer)
        self._next = progress + (ROUND if self._noisy else GradualCuts.ROUND)

    def finish(self) -> str:
        """After the last step: the state to return. Gives a sentence about it."""
        if self._judge is None:
            self._drop_to(self._target or 0.0)
        elif self._best:
            self._put_back(self._best)
        elif self._good:
            self._back_to_learning()
        self._last_cut()
        size = self._cut_until_it_fits()
        if not self._noisy:
            for each in self._posteriors:
                each.drop(each.theta == 0)  # what came back and has not learned
            self._leave_some_noise()
        self._put_threshold_back()
        found = self._judge.measure(self._model) if self._judge is not None else None
        result = Point(self.zeros(), 0, found, size)
        beside = f" (the reference: {_shown(self._judge)})" if self._judge is not None else ""
        reached = self._budget.sparsity is None or self.zeros() >= self._budget.sparsity - 1e-3
        fits = size is None or size <= (self._budget.max_bytes or 0)
        if not (reached and fits and (self._judge is None or self._judge.within(found))):
            warnings.warn(
                f"the budget ({self._budget}) cannot be kept; the best that was found has {result}{beside}. More "
                "epochs, a larger budget or more data may help",
                SparseVDWarning,
                stacklevel=6,
            )
        said = f"β ended at {self.last_beta:.3g}" if self.last_beta else "trained without noise"
        return f"{said}; {result}{beside}"

    def _cut_until_it_fits(self) -> int | None:
        """Bytes come last: what is left of the noise decides how many a weight takes."""
        if self._budget.max_bytes is None:
            return None
        before = -1.0
        while (size := packed_size(self._model)) > self._budget.max_bytes and self.zeros() > before:
            before = self.zeros()
            self._drop_to(1 - 0.95 * (1 - before))
        return size

    @torch.no_grad()
    def _leave_some_noise(self) -> None:
        """After a run without: small against the weights of each layer, as a trained network begins with."""
        for each in self._posteriors:
            kept = each.theta != 0
            if kept.any():
                square = each.theta[kept].double().square().mean().item()
                each.log_sigma2.masked_fill_(kept, math.log(square) - BELOW_WEIGHTS)

    @torch.no_grad()
    def _put_threshold_back(self) -> None:
        """What is kept stays so with it: noise that was learned for other weights may not say otherwise."""
        for each in self._posteriors:
            largest = 2 * each.theta.abs().log() + self._own[each.layer] - 0.01
            each.log_sigma2.copy_(
                torch.where(each.theta == 0, each.log_sigma2, torch.minimum(each.log_sigma2, largest))
            )
        for module, own in self._own.items():
            module.threshold = own

    # While it learns.

    def _look_while_learning(self, progress: float, optimizer: torch.optim.Optimizer) -> None:
        if self._judge is None:
            if progress >= WARM_UP:
                target = max(1 - (self._target or 0.0), 1e-9) ** SPARE
                self._log_beta = min(0.0, self._log_beta + _bounded(math.log(self._softly_kept() / target), 0.25))
            return
        verdict = self._judge.look(self._model)
        if verdict.keeps:
            self._good = self._snapshot()
        if verdict.damage > 1 and self._good:
            self._put_back(self._good)
            _forget(optimizer)
            self.rate_factor /= 2
            self._log_beta -= math.log(2) if progress >= WARM_UP else 0.0
            return
        if progress < WARM_UP:
            return
        # Only upwards: what the rate and the noise cost comes back when both are gone.
        self._log_beta += math.log(UP) * max(0.0, min(1.0, self._judge.room(verdict.evaluation)))

    def _end_where_noise_stalls(self, progress: float) -> None:
        begun, left, log_beta = self._mark
        if progress < begun + (TENTH if left < 1 else 0.0):
            return
        now = self._softly_kept()
        if left < 1 and now > (1 - STALLED) * left and self._log_beta < log_beta + STALLED:
            self._learns_until = progress
        self._mark = (progress, now, self._log_beta)

    @torch.no_grad()
    def _softly_kept(self) -> float:
        """The share of weights that the noise leaves, a weight at the threshold counted as half of one."""
        kept = sum(torch.sigmoid(each.threshold - each.log_alpha()).sum().item() for each in self._posteriors)
        return max(kept / self.weights, 1e-6)

    # While it settles.

    def _settle(self) -> None:
        """The noise goes off; what it has drowned goes for good."""
        self.learning, self._beyond = False, 0
        drowned = 1 - sum(int(each.kept().sum()) for each in self._posteriors) / self.weights
        if self._judge is not None:
            with_them = self._at(math.inf).room
            as_it_is = self._judge.look(self._model).room
            if as_it_is < min(with_them, 0.0) - 0.2:
                drowned = 0.0  # they are not noise yet
        elif self._budget.max_bytes is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SparseVDWarning)  # whether it fits is said at the end
                found = Search(self._budget, self._model).run()
            self._target = max(found.sparsity, drowned, self._target or 0.0)
        if self._target is not None:
            drowned = min(drowned, self._target)
        for module in self._own:
            module.threshold = math.inf  # from now on, what is there counts
        self._drop_to(drowned)
        self._first = self.zeros()

    def _cut_towards_target(self, progress: float) -> None:
        """As gradual magnitude pruning does: many at first, ever fewer, and none in the last half."""
        part = min(1.0, 2 * (progress - self._learns_until) / (1 - self._learns_until))
        target = self._target or 0.0
        self._drop_to(self._first + (target - self._first) * (1 - (1 - part) ** 3))

    def _round(self, progress: float, decayed: float, optimizer: torch.optim.Optimizer) -> None:
        assert self._judge is not None
        if not self._noisy:
            self._round_without_noise(progress, decayed, optimizer)
            return
        verdict, zeros = self._judge.look(self._model), self.zeros()
        if verdict.keeps and zeros >= self._best_zeros:
            self._best, self._best_zeros = self._snapshot(), zeros
        dented = not self._judge.few and verdict.damage <= DENT * decayed
        if dented or verdict.room >= -RECOVERY * decayed:
            self._beyond = 0
            if progress < 1:
                self._drop_to(1 - self._cut * (1 - zeros))
            return
        self._beyond += 1
        if self._beyond < PATIENCE:
            return
        if self._best and self._best_zeros < zeros and (self._is_near(self._best_zeros) or verdict.damage > 1):
            self._put_back(self._best)
            _forget(optimizer)
            self._cut **= 0.5
            self._beyond = 0
        elif (
            not self._best
            and self._good
            and (self._beyond * ROUND >= WAITING * (1 - self._learns_until) or verdict.damage > 1)
        ):
            self._back_to_learning()
            _forget(optimizer)
            self._beyond = 0

    def _round_without_noise(self, progress: float, decayed: float, optimizer: torch.optim.Optimizer) -> None:
        assert self._judge is not None
        few, zeros = self._judge.few, self.zeros()
        with self.mean.shown() if self.mean is not None else nullcontext():
            verdict = self._judge.look(self._model)
            if zeros >= self._best_zeros and self._accepts(verdict):
                self._best, self._best_zeros = self._snapshot(), zeros
        if self.mean is not None:
            self.mean.begin_anew()  # what is cut now was there in the steps before
        if progress < GradualCuts.FIRST_CUT and self._judge.is_destroyed(verdict) and self._good:
            self._put_back(self._good)  # the rate alone destroys it
            _forget(optimizer)
            self.rate_factor /= 2
            self._cuts = GradualCuts()
            return
        part = self._cuts.part(verdict, progress, decayed, few, by_mean=self.mean is not None)
        if progress >= 1:
            return
        if part:
            if not self._rungs or 1 - zeros <= RUNG * _share_of(self._rungs[-1]):
                self._rungs = [*self._rungs[1 - RUNGS :], {each.name: each.alive() for each in self._posteriors}]
            self._drop_to(1 - (1 - part) * (1 - zeros))
        elif self._cuts.goes_back():
            self._bring_back()

    def _accepts(self, verdict: Verdict) -> bool:
        """Without noise."""
        return verdict.keeps if self._judge is not None and self._judge.few else verdict.beyond <= 0

    @torch.no_grad()
    def _bring_back(self) -> None:
        """What the last cuts took may learn again, from zero, since what stayed has learned to do without."""
        alive = sum(int(each.alive().sum()) for each in self._posteriors) / self.weights
        while self._rungs and _share_of(self._rungs[-1]) <= alive:
            self._rungs.pop()
        if not self._rungs:
            return
        then = self._rungs.pop()
        # The same for all that are there.
        level = max(each.log_sigma2.max().item() for each in self._posteriors if each.log_sigma2.numel())
        for each in self._posteriors:
            each.log_sigma2.masked_fill_(then[each.name].to(each.theta.device) & ~each.alive(), level)

    def _is_near(self, zeros: float) -> bool:
        """Whether a state with so many zeros is a few cuts from the present one; from further, it is worth waiting for
        what the falling rate brings back."""
        return 1 - zeros <= (1 - self.zeros()) / self._cut**NEAR

    @torch.no_grad()
    def _back_to_learning(self) -> None:
        """The last good state of that part, without what its own threshold took."""
        self._put_back(self._good)
        for each in self._posteriors if self._noisy else ():
            each.drop(each.log_alpha() > self._own[each.layer])

    def _last_cut(self) -> None:
        """What can still go at once, from the state that is returned."""
        first = good = self.zeros()
        bad = 1 - (1 - good) / 2
        if self._judge is None or not self._may_be_cut(self._judge.look(self._model)):
            return
        for _ in range(LAST_CUTS):
            middle = 1 - math.sqrt((1 - good) * (1 - bad))
            if self._may_be_cut(self._at(self._threshold(middle))):
                good = middle
            else:
                bad = middle
        if good > first:
            before = self._snapshot()
            self._drop_to(good)  # it leaves some weights of every layer, and cuts others instead
            if not self._may_be_cut(self._judge.look(self._model)):
                self._put_back(before)

    def _may_be_cut(self, verdict: Verdict) -> bool:
        return verdict.keeps if self._noisy else verdict.keeps and verdict.excess <= 0

    def _at(self, threshold: float) -> Verdict:
        """The network with another threshold."""
        assert self._judge is not None
        with cut_at(self._model, threshold):
            return self._judge.look(self._model)

    # Weights and states.

    @torch.no_grad()
    def zeros(self) -> float:
        """The share of weights that are zero."""
        return 1 - sum(int((each.theta != 0).sum()) for each in self._posteriors) / self.weights

    def _threshold(self, zeros: float) -> float:
        return threshold_for([(each.theta, each.log_sigma2) for each in self._posteriors], min(1.0, zeros))

    @torch.no_grad()
    def _drop_to(self, zeros: float) -> None:
        if zeros <= self.zeros():
            return
        scores = [_with_the_best_kept(each.log_alpha()) for each in self._posteriors]
        limit = torch.cat([score.flatten().cpu() for score in scores])
        kept = max(1, round((1 - zeros) * len(limit)))
        threshold = limit.kthvalue(kept).values.item()
        for each, score in zip(self._posteriors, scores, strict=True):
            each.drop(score > threshold)

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def _put_back(self, state: dict[str, Tensor]) -> None:
        self._model.load_state_dict(state)

    # Resuming.

    def state_dict(self) -> dict[str, Tensor]:
        target = math.nan if self._target is None else self._target
        numbers = [self._log_beta, self.rate_factor, float(self.learning), self._next, float(self._beyond)]
        numbers += [self._cut, target, self._first, self._best_zeros, self._learns_until, *self._mark]
        numbers += self._judge.worth if self._judge is not None else (0.0, 0.0)
        numbers += map(float, astuple(self._cuts))
        state = {"steering": torch.tensor(numbers, dtype=torch.float64)}
        if self._judge is not None:
            base = self._judge.base
            known = (base.loss, base.error, base.metric, self._judge.base_calibrated)
            state["reference"] = torch.tensor([math.nan if v is None else v for v in known], dtype=torch.float64)
        for place, rung in enumerate(self._rungs):
            state |= {f"{_rung(place)}{name}": mask for name, mask in rung.items()}
        state |= {f"good/{name}": tensor for name, tensor in self._good.items()}
        state |= self.mean.state_dict() if self.mean is not None else {}
        return state | {f"best/{name}": tensor for name, tensor in self._best.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        numbers = state["steering"].tolist()
        self._log_beta, self.rate_factor, learning, self._next, beyond = numbers[:5]
        self._cut, target, self._first, self._best_zeros, self._learns_until = numbers[5:10]
        self._mark = (numbers[10], numbers[11], numbers[12])
        cost, looks, in_vain, has_cut = numbers[15:]
        self._cuts = GradualCuts(cost, int(looks), int(in_vain), bool(has_cut))
        self.learning, self._beyond = bool(learning), int(beyond)
        self._target = None if math.isnan(target) else target
        if self._judge is not None:
            known = [None if math.isnan(value) else value for value in state["reference"].tolist()]
            loss = math.nan if known[0] is None else known[0]
            self._judge.compare_with(Evaluation(loss, *known[1:3]), known[3])
            self._judge.worth = (numbers[13], numbers[14])
        self._good, self._best = _network_in(state, "good/"), _network_in(state, "best/")
        self._rungs = [_network_in(state, kind) for kind in _rungs_in(state)]
        if self.mean is not None:
            self.mean.load_state_dict(state)

    def problem_of(self, state: dict[str, Any]) -> str:
        """Why this is no state that it can have, or an empty string."""
        numbers = state.get("steering")
        if not isinstance(numbers, Tensor) or numbers.shape != (19,) or numbers.dtype is not _DOUBLE:
            return "it lacks the nineteen numbers of a run with a budget"
        reference = state.get("reference", torch.zeros(0) if self._judge is None else None)
        if not isinstance(reference, Tensor) or (self._judge and (reference.shape, reference.dtype) != ((4,), _DOUBLE)):
            return "it lacks what its budget is compared with"
        known = _shapes(self._model.state_dict())
        for kind in ("good/", "best/"):
            if (found := _network_in(state, kind)) and _shapes(found) != known:
                return f"the network in {kind!r} is another one"
        masks = {each.name: (each.theta.shape, torch.bool) for each in self._posteriors}
        for kind in _rungs_in(state):
            if _shapes(_network_in(state, kind)) != masks:
                return f"{kind!r} does not say of each weight whether it was there"
        return self.mean.problem_of(state) if self.mean is not None else ""


def _network_in(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(kind): value.clone() for name, value in state.items() if name.startswith(kind)}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _share_of(rung: dict[str, Tensor]) -> float:
    """The weights that were there."""
    return sum(int(mask.sum()) for mask in rung.values()) / sum(mask.numel() for mask in rung.values())


def _rung(place: int) -> str:
    return f"rung{place}/"


def _rungs_in(state: dict[str, Tensor]) -> list[str]:
    """What the names of each begin with, in their order."""
    count = len({name.partition("/")[0] for name in state if name.startswith("rung")})
    return [_rung(place) for place in range(count)]


def _with_the_best_kept(log_alpha: Tensor) -> Tensor:
    """log α, but that of a layer's best weights so low that they stay: a layer without any is the end of a network."""
    few, many = LEAST_RANGE
    least = min(log_alpha.numel(), max(few, min(many, int(LEAST * log_alpha.numel()))))
    best = log_alpha.flatten().topk(least, largest=False).indices
    return log_alpha.flatten().index_fill(0, best, -math.inf).view_as(log_alpha)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    """The way that the optimizer was going; it keeps how long its steps should be."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if isinstance(state.get(name), Tensor):
                state[name].zero_()


def _bounded(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def _shown(judge: Judge) -> str:
    return str(Point(0.0, 0, judge.base)).partition(", ")[2]
