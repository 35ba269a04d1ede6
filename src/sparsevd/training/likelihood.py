"""What `loss=` may be: a likelihood of ours, cross-entropy, or any mean negative log-likelihood of the user's.

The KL is weighed against the mean over the examples of the negative log-likelihood (NLL) of an example, and of all of
it: a loss that leaves out a factor, or averages over the parts of an example too, gives the KL another weight. Losses
that do so are recognised where that is possible, and answered with the right choice.
"""

import functools
import warnings
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.training.data import Batch
from sparsevd.training.inputs import Forward
from sparsevd.training.output_units import OutputUnits

IGNORED = -100  # torch's own, where a loss names no other


class Likelihood:
    """A mean NLL that says more of the output than its value."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the examples of the NLL of all that belongs to one."""
        raise NotImplementedError

    def wrong(self, output: Tensor, target: Tensor) -> float | None:
        """How many examples are predicted wrongly, in parts where only some of an example is; None if that is no
        question here."""
        return None

    def check(self, target: Tensor) -> None:
        """Refuse targets that it cannot be the likelihood of."""

    def begin(
        self, model: nn.Module, forward: Forward, batch: Batch, all_targets: Tensor | None, per_epoch: int
    ) -> OutputUnits | None:
        """A training of this model begins, with this batch. Gives the units of its output, if they are not 1."""
        return None

    def go_on(self, model: nn.Module, forward: Forward, batch: Batch) -> OutputUnits | None:
        """The same for one that is resumed."""
        return None

    def running_means(self) -> list[Tensor]:
        """What it has learned as a mean over the batches; several processes average it in place after each step."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """What it has learned."""
        return {}

    def problem_of(self, state: dict[str, Tensor]) -> str:
        """Why it cannot have learned this, or an empty string."""
        return f"{', '.join(state)} is nothing that {self} learns" if state else ""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with what `state_dict` gave."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Bernoulli(Likelihood):
    """Several labels per example, each there (1) or not (0), from logits of the same shape.

        sparsevd.fit(model, (x, y), loss=sparsevd.Bernoulli())

    The NLL of an example is the sum over its labels. The error that is shown is the share of labels predicted wrongly.
    """

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        target = like(output, target)
        return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)

    def wrong(self, output: Tensor, target: Tensor) -> float | None:
        missed = (output.detach() > 0) != (like(output, target) > 0.5)
        return missed.sum().item() * len(missed) / missed.numel()

    def check(self, target: Tensor) -> None:
        if not ((target >= 0) & (target <= 1)).all():
            raise ArgumentError(
                f"the targets lie between {target.min().item():g} and {target.max().item():g}; for Bernoulli() give 0 "
                "or 1 for each label, for one class per example leave loss out, for numbers give sparsevd.Gaussian()"
            )


def like(output: Tensor, target: Tensor) -> Tensor:
    """The target in the shape and type of the output; a column stands for a vector. torch would spread any others."""
    if output.shape == (*target.shape, 1) or (*output.shape, 1) == target.shape:
        target = target.reshape(output.shape)
    if output.shape != target.shape:
        raise ArgumentError(
            f"the network's output is {tuple(output.shape)} and the targets are {tuple(target.shape)}; there must be "
            "one target for each output"
        )
    return target.to(output.dtype)


def is_cross_entropy(loss: object) -> bool:
    return _is(loss, F.cross_entropy, nn.CrossEntropyLoss)


def counted_in(loss: object, target: Tensor) -> int:
    """Over how many predictions this loss is the mean: examples, or of a cross-entropy all targets that it does not
    ignore, whether an example has one or one for each of its tokens or pixels."""
    if not is_cross_entropy(loss) or target.is_floating_point():
        return len(target)
    return int(counts(loss, target).sum())


def counts(loss: object, target: Tensor) -> Tensor:
    """Which classes are not ignored."""
    return target.long() != ignored_by(loss)  # as a byte −100 is 156


def ignored_by(loss: object) -> int:
    """The target that a loss leaves out."""
    if isinstance(loss, functools.partial):
        named = loss.keywords.get("ignore_index", ignored_by(loss.func))
    else:
        named = getattr(loss, "ignore_index", IGNORED)
    return named if isinstance(named, int) else IGNORED  # losses of others have None there


def check_loss(loss: object, *, weighed: bool, stacklevel: int = 2) -> None:
    """Refuse what is no mean over the examples. `weighed`: against a KL, so that its scale matters."""
    if isinstance(loss, type):
        raise ArgumentError(f"loss is the class {loss.__name__}; give one of it: {loss.__name__}()")
    reduction = getattr(loss, "reduction", getattr(loss, "keywords", {}).get("reduction", "mean"))
    if reduction != "mean":
        raise ArgumentError(
            f"the loss has reduction={reduction!r}, and the KL is weighed against the mean over a batch; give one with "
            "reduction='mean'"
        )
    if weighed and _is(loss, F.mse_loss, nn.MSELoss):
        warnings.warn(
            "the mean squared error is the likelihood of a noise of variance ½ in y, so that the units of y decide how "
            "many weights are dropped; give loss=sparsevd.Gaussian(), which learns the variance",
            SparseVDWarning,
            stacklevel=stacklevel + 1,
        )


def check_targets(loss: object, target: Tensor, *, weighed: bool, stacklevel: int = 2) -> None:
    """Of a first batch: the targets are such as the loss is for."""
    if isinstance(loss, Likelihood):
        loss.check(target)
    labels = target[0].numel() if target.ndim else 1
    if weighed and labels > 1 and _is(loss, F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss):
        warnings.warn(
            f"this loss is the mean over the {labels} labels of an example, and the KL is weighed against their sum: "
            f"it has {labels} times its weight; give loss=sparsevd.Bernoulli()",
            SparseVDWarning,
            stacklevel=stacklevel + 1,
        )
    if is_cross_entropy(loss) and target.is_floating_point() and not _are_probabilities(target):
        raise ArgumentError(
            f"the targets are {target.dtype} of shape {tuple(target.shape)}, and cross-entropy takes these for the "
            "probabilities of classes, which they are not; for classes give integers, for several labels of 0 or 1 "
            "loss=sparsevd.Bernoulli(), for numbers loss=sparsevd.Gaussian()"
        )


def _are_probabilities(target: Tensor) -> bool:
    return target.ndim > 1 and bool((target >= 0).all()) and bool(((target.sum(1) - 1).abs() < 1e-3).all())


def _is(loss: object, function: Callable[..., Tensor], module: type[nn.Module]) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss is function or isinstance(loss, module)
