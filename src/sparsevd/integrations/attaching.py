"""What the callbacks share: what they are told, how they attach, what they log."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, SubsetRandomSampler

from sparsevd.errors import ArgumentError
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import required_posteriors
from sparsevd.posterior.posterior import label_of
from sparsevd.training.attachment import Attached, attach
from sparsevd.training.budget import Budget
from sparsevd.training.data import Data
from sparsevd.training.evaluation import Loss
from sparsevd.training.inputs import TARGETS, Forward, call
from sparsevd.training.recipes import FitConfig
from sparsevd.training.wrappers import bare_optimizers


class Attaching:
    """The recipe for a trainer. What `attach` must know of the run, the trainer tells, unless it is given here.

    Args:
        config: the recipe's numbers. Those that are the trainer's business, such as rate and epochs, are not read.
        n_train: N, the number of examples in the whole training set, of which the loss is a mean. Where it is a mean
            over tokens, as in language models, the number of these.
        total_steps: steps of the optimizer in the whole run.
        steps_per_epoch: steps of the optimizer in a pass over the data, after which weights may be dropped.
        budget: what may be lost, or must be reached.
        val, loss, forward: held-out data, the loss and how to call the model, where the budget has to be measured.
        log_layers: log the sparsity of every layer too.

    `schedule` is what `attach` returned, once training has begun.
    """

    def __init__(
        self,
        config: FitConfig | None = None,
        *,
        n_train: int | None = None,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        budget: Budget | None = None,
        val: Data | None = None,
        loss: Loss = F.cross_entropy,
        forward: Forward = call,
        log_layers: bool = True,
    ):
        self.config, self.n_train = config, n_train
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.budget, self.val, self.loss, self.forward = budget, val, loss, forward
        self.log_layers = log_layers
        self.schedule: Attached | None = None

    def begin(
        self,
        optimizers: Any,
        model: nn.Module,
        *,
        n_train: int | None,
        total_steps: int | None,
        steps_per_epoch: int | None,
        groups: str,
    ) -> Attached:
        """Attach with what was given and what the trainer knows; `groups` says how its optimizer gets the groups."""
        _require_groups(bare_optimizers(optimizers), model, groups)
        n_train, total_steps = _first(self.n_train, n_train), _first(self.total_steps, total_steps)
        if n_train is None:
            raise ArgumentError(
                "the training data does not say how many examples it has, which weighs the KL: give SparseVD(n_train=…)"
            )
        if total_steps is None:
            raise ArgumentError(
                "the trainer does not know how many steps of the optimizer the run has: give SparseVD(total_steps=…)"
            )
        self.detach()
        self.schedule = attach(
            optimizers,
            model,
            n_train=n_train,
            total_steps=total_steps,
            steps_per_epoch=_first(self.steps_per_epoch, steps_per_epoch),
            config=self.config,
            budget=self.budget,
            val=self.val,
            loss=self.loss,
            forward=self.forward,
        )
        return self.schedule

    def detach(self) -> None:
        """Leave the optimizer alone; `schedule` stays, to be asked."""
        if self.schedule is not None:
            self.schedule.detach()

    def look_at(self, target: object) -> str:
        """Of a first batch: what is wrong if the trainer's number of examples is N, or nothing."""
        if self.n_train is not None or not isinstance(target, Tensor) or target.ndim < 2:
            return ""
        of_one = target[:1].numel()
        if of_one < 2:
            return ""
        return (
            f"an example of the first batch has {of_one:,} targets: if the loss is a mean over these too, N, which "
            "weighs the KL, counts them: give SparseVD(n_train=…), all targets of the training set that count"
        )

    def metrics(self) -> dict[str, float]:
        """What there is to log now."""
        schedule = self.schedule
        if schedule is None:
            return {}
        found = schedule.report()
        for each in schedule.posteriors if self.log_layers else ():
            kept = each.kept()
            label = label_of(each.name) or each.name
            found[f"sparsity/{label}"] = 100 * (1 - int(kept.sum()) / max(1, kept.numel()))
        return {f"sparsevd/{name}": value for name, value in found.items()}


def target_of(batch: object) -> object:
    """What a batch is to learn, as far as its form tells."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def _first(given: int | None, found: int | None) -> int | None:
    return found if given is None else given


def examples_in(loader: object) -> int | None:
    """N: what an epoch of all processes goes through; None where the loader does not know."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        found: Any = sampler.dataset
    else:
        found = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(found)
    except (TypeError, NotImplementedError):  # it comes as a stream, or is no loader of torch's
        return None


def _require_groups(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, groups: str) -> None:
    """Trainers make an optimizer with one rate for all; no callback can change that any more."""
    noise = {each.log_sigma2 for each in required_posteriors(bare_model(model))}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if len(noise.intersection(group["params"])) not in (0, len(group["params"])):
                raise ArgumentError(
                    f"log σ² shares a group with other parameters, but learns at its own rate: {groups}"
                )
