"""The whole recipe in a loop of anyone's: `attach` hooks it to the steps of an optimizer.

Before a step, when gradients have been accumulated, averaged over processes, unscaled and clipped, the KL's gradient
joins them with the schedule's weight, and log σ² gets its rate from that of the weights. After it, what was dropped is
zero again; now and then more is dropped. A step that is given a closure computes its gradients inside, so there the
closure is wrapped.
"""

import math
import warnings
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError, SparseVDWarning
from sparsevd.layers.recurrent import recurrent_layers
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import required_posteriors, switch_noise
from sparsevd.posterior.posterior import DROPPED_LOG_SIGMA2
from sparsevd.posterior.spread import is_spread, local, part_for
from sparsevd.training.budget import Budget, cut_at
from sparsevd.training.data import Data
from sparsevd.training.evaluation import Loss
from sparsevd.training.inputs import Forward, call
from sparsevd.training.judge import Judge
from sparsevd.training.noise_rates import NoiseRates
from sparsevd.training.optimizer import BoundAdam, BoundStep
from sparsevd.training.recipes import FitConfig
from sparsevd.training.schedule import Schedule, choose_variance
from sparsevd.training.weights_read import has_tables
from sparsevd.training.wrappers import Hook, bare_optimizers

# Where the length of an epoch is not given, the run is cut into so many parts, after each of which weights may go.
PARTS = 20

_PROGRESS = "progress"  # of the state: no parameter has this name, since a weight's ends in "weight"


def attach(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: nn.Module,
    *,
    n_train: int,
    total_steps: int | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    config: FitConfig | None = None,
    budget: Budget | None = None,
    val: Data | None = None,
    loss: Loss = F.cross_entropy,
    forward: Forward = call,
) -> "Attached":
    """Bring Sparse VD into a training loop of your own. The loop minimises its mean loss and knows nothing of it.

        optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, lr=4e-3), betas=(0.9, 0.99))
        schedule = sparsevd.attach(optimizer, model, n_train=len(data), epochs=40, steps_per_epoch=len(loader))

    It is right under gradient accumulation, clipping, autocast, GradScaler, torch.compile, DistributedDataParallel and
    FSDP2, with any scheduler of the learning rate: the KL enters once per step of the optimizer. The rate should fall
    to zero by the end. Save `schedule.state_dict()` with those of the network and the optimizer.

    Args:
        optimizer: any of torch's, with the groups of `sparsevd.parameter_groups`; or a list, if several train the
            network.
        model: the result of `sparsevd.sparsify`; wrapped by others or not.
        n_train: N, the number of examples in the whole training set, not of this process or batch. Where the loss is a
            mean over tokens or pixels, the number of these.
        total_steps: how many steps of the optimizer the run has; or give the next two.
        epochs: passes over the data.
        steps_per_epoch: steps of the optimizer in one of them; weights are dropped after an epoch. Unless it is given,
            after a twentieth of the run.
        config: the recipe's numbers. Those that are the loop's business, such as rate and batch size, are not read.
        budget: what may be lost, or must be reached; the sparsest state that keeps to it is there after the last step.
        val: held-out data, where the budget has to be measured.
        loss: mean negative log-likelihood of a batch, for the same.
        forward: how to call the model, for the same.

    Returns the schedule: `report()`, `state_dict()`, `load_state_dict()`, `steps`, `detach()`.
    """
    found, bare = bare_optimizers(optimizer), bare_model(model)
    required_posteriors(bare)  # says so if there are none
    total, per_epoch = _steps(total_steps, epochs, steps_per_epoch)
    if not _counts(n_train):
        raise ArgumentError(f"n_train={n_train!r} must be the number of examples in the training set, an integer")
    if steps_per_epoch is not None and steps_per_epoch > 1 and n_train <= steps_per_epoch:
        warnings.warn(
            f"n_train={n_train} with {steps_per_epoch} steps per epoch is a batch of one or less: n_train counts "
            "examples, not batches. Too small a number makes the KL too heavy, and too many weights go",
            SparseVDWarning,
            stacklevel=2,
        )
    _check_optimizers(found)
    judge = read = None
    if budget is not None:
        _check_budget(budget, bare, val)
        if budget.measures and val is not None:
            with cut_at(bare, math.inf):  # the network as it was before it had noise
                judge = budget.judge(bare, val, loss, forward, strict=True)
            if has_tables(bare):
                read = judge.read_by_an_example(bare)
    config = replace(config or FitConfig(), contract=False)
    if config.noise is not None:
        raise ArgumentError(
            f"noise={config.noise} is for fit with a budget; a loop of your own has the noise of its layers"
        )
    return Attached(found, bare, config, int(n_train), budget, judge, int(total), int(per_epoch), read)


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for each in optimizers:
        if isinstance(each, BoundAdam):
            raise ArgumentError("BoundAdam adds the KL by itself; attach to a torch.optim.AdamW, which goes as fast")
        if isinstance(each, torch.optim.LBFGS):
            raise ArgumentError(
                "LBFGS takes several looks per step, each with other noise; attach to Adam, AdamW or SGD"
            )
        if any(group.get("maximize") for group in each.param_groups):
            raise ArgumentError("maximize=True would maximise the KL too; minimise the negative of what it maximises")


def _check_budget(budget: Budget, model: nn.Module, val: Data | None) -> None:
    if not isinstance(budget, Budget):
        raise ArgumentError(f"budget={budget!r} must be a sparsevd.Budget, such as Budget(max_error_increase=0.5)")
    if budget.measures and val is None:
        raise ArgumentError("a budget of error or loss is measured on held-out data: give val=, and loss= if needed")
    if any(is_spread(p) for p in model.parameters()):
        raise ArgumentError("a budget needs the whole network on every process, which FSDP has not; use DDP")
    if (budget.measures or budget.max_bytes is not None) and _world_size() > 1:
        raise ArgumentError(  # batch norm has other statistics on each process, and they would decide differently
            "on several processes only a budget of sparsity is the same for all of them; for another one use "
            "sparsevd.fit, which trains on several processes too"
        )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _counts(value: object) -> bool:
    """Whether it is a positive integer, of Python's or numpy's kind."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _steps(total: int | None, epochs: int | None, per_epoch: int | None) -> tuple[int, int]:
    """The steps of the run, and those after which weights may go."""
    for name, value in {"total_steps": total, "epochs": epochs, "steps_per_epoch": per_epoch}.items():
        if value is not None and not _counts(value):
            raise ArgumentError(f"{name}={value!r} must be a positive integer")
    if total is None:
        if epochs is None or per_epoch is None:
            raise ArgumentError("how long is the run? Give total_steps=, or epochs= and steps_per_epoch=")
        return epochs * per_epoch, per_epoch
    if epochs is not None and per_epoch is not None and epochs * per_epoch != total:
        raise ArgumentError(
            f"total_steps={total} is not epochs·steps_per_epoch = {epochs * per_epoch}; give one of them"
        )
    return total, per_epoch or max(1, math.ceil(total / (epochs or PARTS)))


_attached: "weakref.WeakSet[Attached]" = weakref.WeakSet()  # and not detached


class Attached(Schedule):
    """The schedule of a run whose steps it counts itself."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module,
        config: FitConfig,
        n_train: int,
        budget: Budget | None,
        judge: Judge | None,
        total_steps: int,
        steps_per_epoch: int,
        read: float | None = None,
    ):
        super().__init__(model, config, n_train, budget, judge, read)
        self.steps = 0  # of the optimizer; of the one with the most, where there are several
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.ended = ""  # what a budget says at the end
        self._optimizers = list(optimizers)
        self._refuse_another()
        self._bounds = {each: BoundStep(each, self.posteriors) for each in optimizers}
        self._rates = NoiseRates(self._optimizers, list(self._bounds.values()), self.posteriors)
        self._counts = dict.fromkeys(optimizers, 0)
        self._skipped: set[torch.optim.Optimizer] = set()
        self._begun = False
        self._stale = True  # the zeros must be looked for
        self._masks: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        # With a budget: the rates of the loop, while others hold, and the highest one there was.
        self._put_aside: dict[torch.optim.Optimizer, list[Any]] = {}
        self._highest = 0.0
        on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        choose_variance(model, config.variance_dtype, on_cpu and multiplies_bfloat16())
        _make_noise_differ()
        self._recurrent = recurrent_layers(model)
        self._handles = self._hooks()
        self._begin_sample()
        self._switch_noise()
        _attached.add(self)

    def _hooks(self) -> list[Any]:
        handles: list[Any] = [
            self._model.register_load_state_dict_post_hook(Hook(self._loaded))  # type: ignore[no-untyped-call]
        ]
        for each in self._optimizers:
            handles += [each.register_step_pre_hook(self._before), each.register_step_post_hook(self._after)]
        if self._recurrent:
            handles.append(self._model.register_forward_pre_hook(Hook(self._begin_sample)))
        return handles

    def _begin_sample(self, *_: object) -> None:
        """One sample of the weights of recurrent layers from one step to the next; and for each pass, where the network
        is called as a whole. It lasts through the backward pass, which may compute layers once more."""
        if self._model.training:
            for layer in self._recurrent:
                layer.hold(True)

    def _refuse_another(self) -> None:
        layers = {each.layer for each in self.posteriors}
        for other in _attached:
            if any(each in self._optimizers for each in other._optimizers) and any(
                each.layer in layers for each in other.posteriors
            ):
                raise ArgumentError(
                    "this optimizer and network are attached already, and the KL would count twice: call detach() of "
                    "what the first attach returned, or make a new optimizer"
                )

    @property
    def progress(self) -> float:
        """The part of the run that is over, from 0 to 1."""
        return min(1.0, self.steps / self.total_steps)

    def report(self) -> dict[str, float]:
        """What is left now, and how far the run is: its progress, and the weight β of the KL."""
        return super().report() | {"progress": self.progress, "beta": self.beta(self.progress)}

    def detach(self) -> None:
        """Leave the loop alone; the network stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        switch_noise(self._model, True)
        for layer in self._recurrent:
            layer.hold(False)
        _attached.discard(self)

    # At the optimizer's step.

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._join(optimizer)
            return None

        def with_kl() -> Any:
            value = closure()
            self._join(optimizer)
            return value

        if len(args) > 1:
            return (args[0], with_kl, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_kl}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        bound = self._bounds[optimizer]
        idle = all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        if idle or bound.overflows:
            self._skipped.add(optimizer)
            return
        self._rates.look()
        if self._stale:
            self._look_for_zeros()
        if not self._begun:
            self._warn_of_a_lost_state(optimizer)
        if self.steps == self.total_steps and self._counts[optimizer] == self.steps:
            warnings.warn(
                f"the run was to have {self.total_steps:,} steps and goes on: the weight of the KL stays, nothing more "
                "is dropped on the way. Give attach the number of all steps",
                SparseVDWarning,
                stacklevel=4,
            )
        # Where several optimizers step in turn, what held for the first of a round holds for all of it.
        done = self.steps if self._counts[optimizer] == self.steps else self.steps - 1
        phase = self.at(min(1.0, done / self.total_steps))
        if phase.rate_factor != 1:
            self._put_aside[optimizer] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * phase.rate_factor
        self._rates.set(phase.noise_ratio)
        bound.join(phase.kl_weight)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._begin_sample()
        if optimizer in self._skipped:
            self._skipped.discard(optimizer)
            return
        for group, rate in zip(optimizer.param_groups, self._put_aside.pop(optimizer, []), strict=False):
            group["lr"] = rate
        self.keep_zeros()
        self._counts[optimizer] += 1
        if self._counts[optimizer] <= self.steps:
            return
        self.steps = self._counts[optimizer]
        if self.steps > self.total_steps:
            return
        if self.steering is not None:
            self._follow_budget(optimizer)
            self._switch_noise()
        elif self.steps % self.steps_per_epoch == 0:
            self._check_numbers()
            _make_noise_differ()
            if self.drops_at(self.progress):
                self.drop(self.progress)
                self._stale = True

    def _warn_of_a_lost_state(self, optimizer: torch.optim.Optimizer) -> None:
        """A run that goes on from a checkpoint, but for its schedule, would begin with a KL of no weight again."""
        self._begun = True
        if self.steps == 0 and any(optimizer.state.values()):
            warnings.warn(
                "the optimizer has taken steps before, and the schedule begins at 0: if this run goes on from a "
                "checkpoint, load the state of the schedule too (its state_dict and load_state_dict)",
                SparseVDWarning,
                stacklevel=5,
            )

    def _check_numbers(self) -> None:
        """NaN compares false with every threshold, and would look like sparsity."""
        for each in self.posteriors:
            if not (local(each.theta).isfinite().all() and local(each.log_sigma2).isfinite().all()):
                raise DivergenceError(
                    f"training diverged before step {self.steps:,}: {each.name} or its log σ² is not finite. Go back "
                    "to the last checkpoint, with a lower rate; or look for NaN in the data"
                )

    def _follow_budget(self, optimizer: torch.optim.Optimizer) -> None:
        """Its looks evaluate the network, after which it is as the loop had it."""
        assert self.steering is not None
        modes = {module: module.training for module in self._model.modules()}
        first = optimizer.param_groups[0]
        self._highest = max(self._highest, float(first["lr"]))
        if self.steering.wants_to_look(self.progress):
            self.steering.look(self.progress, float(first["lr"]) / (self._highest or 1.0), optimizer)
            self._stale = True
        if self.steps == self.total_steps:
            self.ended = self.finish()
            self._stale = True
        for module, mode in modes.items():
            module.training = mode

    def _switch_noise(self) -> None:
        switch_noise(self._model, self.at(self.progress).noisy)

    # Zeros.

    def _loaded(self, *_: object) -> None:
        self._stale = True

    @torch.no_grad()
    def _look_for_zeros(self) -> None:
        masks = [(each, each.alive()) for each in self.posteriors]
        self._masks = []
        for each, alive in masks:
            if not alive.all():
                here = part_for(each.theta, alive)
                self._masks.append((each.theta, each.log_sigma2, here.to(each.theta.dtype), ~here))
        self._stale = False

    @torch.no_grad()
    def keep_zeros(self) -> None:
        """Momentum, decay and the optimizer's memory may have moved what was dropped, and its noise."""
        for theta, log_sigma2, alive, dead in self._masks:
            local(theta).mul_(alive)
            local(log_sigma2).masked_fill_(dead, DROPPED_LOG_SIGMA2)

    @torch.no_grad()
    def share_zeros(self, other: nn.Module) -> None:
        """Drop in a copy of the network, such as a moving average of it, what was dropped here.

        An average of weights that were dropped lies between what they were and zero: call this before `prune(average)`.
        """
        theirs = {each.name.removeprefix("module."): each for each in required_posteriors(bare_model(other))}
        for each in self.posteriors:
            if each.name not in theirs:
                raise ArgumentError(f"{each.name} is not in the other network; give a copy of the one that is trained")
            theirs[each.name].drop(~each.alive())

    # What it remembers.

    def state_dict(self) -> dict[str, Tensor]:
        numbers = [self._fingerprint(), self.steps, self.total_steps, *self._counts.values()]
        return super().state_dict() | {_PROGRESS: torch.tensor(numbers, dtype=torch.int64)}

    def _fingerprint(self) -> int:
        """Of the network: what its posteriors are called, and their shapes."""
        return zlib.crc32(repr([(each.name, tuple(each.theta.shape)) for each in self.posteriors]).encode())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        numbers = state.pop(_PROGRESS, None)
        wanted = (3 + len(self._counts),)
        if not isinstance(numbers, Tensor) or numbers.dtype is not torch.int64 or numbers.shape != wanted:
            raise CheckpointError(
                f"the state of the schedule does not fit: it has no {wanted[0]} numbers of a run with "
                f"{len(self._counts)} optimizer(s)"
            )
        fingerprint, steps, total, *counts = numbers.tolist()
        if fingerprint != self._fingerprint():
            raise CheckpointError("the state of the schedule does not fit: it is of another network")
        super().load_state_dict(state)
        self.steps = steps
        self._counts = dict(zip(self._counts, counts, strict=True))
        self._stale = True
        self._switch_noise()
        if total != self.total_steps:
            warnings.warn(
                f"the run was to have {total:,} steps and now has {self.total_steps:,}: the schedule goes on as if it "
                "had had these from the start",
                SparseVDWarning,
                stacklevel=2,
            )


def _make_noise_differ() -> None:
    """Processes that were given the same seed would draw the same noise: a batch's worth of it instead of several."""
    if _world_size() == 1:
        return
    mine = torch.get_rng_state().to(torch.int64)
    fingerprint = int((mine * torch.arange(1, len(mine) + 1)).sum())
    theirs = [0] * dist.get_world_size()
    dist.all_gather_object(theirs, fingerprint)  # on the device that the backend takes: NCCL has none on the CPU
    rank = dist.get_rank()
    if fingerprint in theirs[:rank]:
        torch.manual_seed((torch.initial_seed() + 1_000_003 * rank) % 2**63)
