"""The recipe as a state machine that knows no loop.

Told how far a run is, it says what the KL weighs and how fast the noise may change, drops what has been superfluous for
long enough, and keeps the zeros. Its numbers are those of `FitConfig` (recipes.py). Whoever has a loop asks it:

    for each epoch:
        with schedule.epoch(optimizer):
            for each step:
                phase = schedule.at(progress)      # from 0, the first step, to 1, the end
                ...                                # a step with these rates on mean NLL + phase.kl_weight · KL
                schedule.keep_zeros()              # after each step ...
                schedule.remember_step()           # ... and then, once
                schedule.look(progress, optimizer) # where there is a budget
        if schedule.drops_at(progress):
            schedule.drop(progress)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import CheckpointError
from sparsevd.posterior import Posterior, noisy_modules, posteriors
from sparsevd.training.budget import Budget
from sparsevd.training.contraction import contracted, parts_left
from sparsevd.training.judge import Judge
from sparsevd.training.objective import warm_up
from sparsevd.training.recipes import VARIANCE_DTYPES, FitConfig
from sparsevd.training.steering import Steering


@dataclass(frozen=True)
class Phase:
    """What holds at one moment of a run."""

    beta: float  # the weight of the KL in the bound ...
    kl_weight: float  # ... and beside the mean loss of an example: β/N, eq. 3 and 4 divided by −N
    noise_ratio: float  # the rate of log σ² relative to that of the weights
    rate_factor: float = 1.0  # what the rate of the weights is multiplied with
    noisy: bool = True  # whether the noise is drawn


class Schedule:
    """The recipe of one run of one network.

    Args:
        model: the network; without Sparse VD layers there is nothing to weigh and nothing to drop.
        config: the recipe.
        n_train: N, the number of training examples.
        budget: what may be lost, or must be reached. β, what is dropped and the state at the end follow it.
        judge: who measures what is lost; `Budget.judge` gives one.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FitConfig,
        n_train: int,
        budget: Budget | None = None,
        judge: Judge | None = None,
        read: float | None = None,
    ):
        self.config, self.n_train = config, n_train
        self.posteriors = posteriors(model)
        self._model = model
        self.steering = None
        if budget is not None:
            noisy = config.noise is not False
            self.steering = Steering(model, self.posteriors, budget, judge, n_train, noisy=noisy, read=read)
        self._beta_at = warm_up(config.warm_up_start, config.warm_up_end)
        self._zeros: list[tuple[Tensor, Tensor]] = []  # θ, and what to multiply it with
        # How many epochs in a row a weight has been above the threshold, by the name of its posterior.
        self._epochs_above: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before the first step of a run that does not go on from elsewhere."""
        if self.steering is not None:
            self.steering.begin()

    def at(self, progress: float) -> Phase:
        """What holds when this part of the run, from 0 to 1, is over."""
        config = self.config
        if (steering := self.steering) is not None:
            beta, ratio = steering.beta(progress), config.log_sigma2_lr_ratio / steering.rate_factor
            return Phase(beta, beta / self.n_train, ratio, steering.rate(progress), steering.learning)
        beta = self._beta_at(progress)
        late = progress >= config.late_from
        ratio = config.late_log_sigma2_lr_ratio if late else config.log_sigma2_lr_ratio
        return Phase(beta, beta / self.n_train, ratio)

    @contextmanager
    def epoch(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around the steps of an epoch: without the inputs and units that have no weight left, if that is asked for."""
        if not self._contracts:
            self._find_zeros()
            yield
            return
        with contracted(self._model, self.posteriors, optimizer) as inside:
            self._find_zeros()
            try:
                yield
            finally:
                self._zeros = []  # of the smaller tensors
        for name, mask in inside.items():  # what sat the epoch out counts anew
            if name in self._epochs_above:
                self._epochs_above[name] = self._epochs_above[name].where(mask, 0)

    @property
    def _contracts(self) -> bool:
        return bool(self.config.contract and self.posteriors) and self.steering is None

    def makes_smaller(self) -> bool:
        """Whether an epoch that began now would have a layer that is smaller."""
        return self._contracts and bool(parts_left(self._model, self.posteriors))

    def keep_zeros(self) -> None:
        """After each step: momentum may have moved what was dropped."""
        for theta, alive in self._zeros:
            theta.data.mul_(alive)

    def remember_step(self) -> None:
        """After each step: what a look sees the mean of."""
        if self.steering is not None and self.steering.mean is not None:
            self.steering.mean.add()

    def beta(self, progress: float) -> float:
        """The weight of the KL; once a run with a budget has settled, the last one."""
        if self.steering is not None and not self.steering.learning:
            return self.steering.last_beta
        return self.at(progress).beta

    def looks_at(self, progress: float) -> bool:
        """Whether `look` will do anything here."""
        return self.steering is not None and self.steering.wants_to_look(progress)

    def look(self, progress: float, optimizer: torch.optim.Optimizer) -> None:
        """After each step of a run with a budget: see whether it is kept, and act."""
        if self.steering is not None and self.steering.wants_to_look(progress):
            self.steering.look(progress, self.config.decayed(progress), optimizer)
            self._find_zeros()

    def finish(self) -> str:
        """After the last step: the state that a budget asks for, and a sentence about it; else an empty one."""
        return self.steering.finish() if self.steering is not None else ""

    def statistics(self) -> list[Tensor]:
        """What a look reads beside the network, and each process has its own of."""
        return self.steering.mean.statistics() if self.steering is not None and self.steering.mean is not None else []

    def _find_zeros(self) -> None:
        masks = [(each.theta, each.alive()) for each in self.posteriors]
        self._zeros = [(theta, alive.to(theta.dtype)) for theta, alive in masks if not alive.all()]

    def drops_at(self, progress: float) -> bool:
        """Whether to call `drop` here. Never before β has its final value: until then a large α means little."""
        if self.steering is not None:
            return False  # it drops as the budget says
        return bool(self.posteriors) and self.config.drop_from < 1 and self.config.warm_up_end <= progress < 1

    def drop(self, progress: float) -> int:
        """At the end of an epoch: makes what is superfluous zero for good, and returns how many weights that were.

        Before `drop_from` only inputs and units whose weights have all been above the threshold for `drop_patience`
        epochs: these are what costs time, and while the learning rate is high a single weight may still come back.
        From then on every weight above the threshold.
        """
        whole_only = progress < self.config.drop_from
        patience = self.config.drop_patience if whole_only else 1
        trained = [each for each in self.posteriors if each.theta.requires_grad and each.log_sigma2.requires_grad]
        return sum(self._drop(each, patience, whole_only) for each in trained)

    @torch.no_grad()
    def _drop(self, posterior: Posterior, patience: int, whole_only: bool) -> int:
        above = posterior.log_alpha() > posterior.threshold
        before = self._epochs_above.get(posterior.name, torch.zeros_like(above, dtype=torch.int16))
        epochs = torch.where(above, (before + 1).clamp_max(patience), 0).to(torch.int16)
        self._epochs_above[posterior.name] = epochs
        superfluous = epochs >= patience
        if whole_only:
            superfluous = _whole(superfluous) if posterior.contractible else torch.zeros_like(superfluous)
        superfluous = superfluous & posterior.alive()
        posterior.drop(superfluous)
        return int(superfluous.sum())

    def report(self) -> dict[str, float]:
        """What is left now: the KL, the share of zeros in %, and |W| / |W≠0| (infinite if nothing is kept)."""
        weights = sum(each.theta.numel() for each in self.posteriors)
        kept = sum(int(each.kept().sum()) for each in self.posteriors)
        with torch.no_grad():
            divergence = sum(each.kl().item() for each in self.posteriors)
        return {
            "kl": divergence,
            "sparsity": 100 * (1 - kept / weights) if weights else 0.0,
            "ratio": weights / kept if kept else float("inf"),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """What it must remember between epochs, beside what the network itself holds."""
        return dict(self._epochs_above) | (self.steering.state_dict() if self.steering is not None else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; what does not fit is refused, and nothing changes."""
        if problem := self.problem_of(state):
            raise CheckpointError(f"the state of the schedule does not fit: {problem}")
        if self.steering is not None:
            self.steering.load_state_dict(state)
            return
        devices = {each.name: each.theta.device for each in self.posteriors}
        self._epochs_above = {name: value.to(devices[name]).clone() for name, value in state.items()}

    def problem_of(self, state: dict[str, Any]) -> str:
        """Why this is no state that the schedule can have, or an empty string."""
        if self.steering is not None:
            return self.steering.problem_of(state)
        shapes = {each.name: each.theta.shape for each in self.posteriors}
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dtype is not torch.int16 or value.shape != shapes.get(name):
                return f"{name!r} is no tensor of weights, or of another type or shape"
            if ((value < 0) | (value > self.config.drop_patience)).any():
                return f"{name!r} counts more epochs than the patience of the recipe"
        return ""


def _whole(mask: Tensor) -> Tensor:
    """The part of a mask over [unit, input, ...] that covers whole units or whole inputs."""
    matrix = mask.flatten(2).all(2) if mask.ndim > 2 else mask
    covered = matrix.all(1, keepdim=True) | matrix.all(0, keepdim=True)
    return covered.view(*covered.shape, *[1] * (mask.ndim - 2)).expand_as(mask)


def choose_variance(model: nn.Module, dtype: str | None, bfloat16: bool) -> None:
    """The type of every layer's variance product: the one asked for, or bfloat16 where that is allowed and faster."""
    for layer in noisy_modules(model).values():  # not of each tensor: two layers may have one
        if dtype is not None:
            layer.variance_dtype = VARIANCE_DTYPES[dtype]
        narrow = all(posterior.log_sigma2.dtype is torch.float32 for posterior in layer.posteriors())
        # Over five seeds bfloat16 changes neither sparsity nor error: experiments/results/lenet_300_100.json.
        layer.bfloat16_where_faster = bfloat16 and narrow
