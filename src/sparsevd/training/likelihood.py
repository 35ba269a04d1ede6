"""Losses that are no mean negative log-likelihood of the targets: recognised where that is possible, and refused."""

import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError


def check_loss(loss: object) -> None:
    """The KL is weighed against the mean over the examples of a batch."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ArgumentError(
            f"the loss has reduction={reduction!r}, and the KL is weighed against the mean over a batch; give one with "
            "reduction='mean'"
        )


def check_targets(loss: object, target: Tensor) -> None:
    """torch's cross-entropy takes floating-point targets for probabilities, and a number to be predicted is none."""
    cross_entropy = loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
    if not (cross_entropy and target.is_floating_point()):
        return
    probabilities = target.ndim > 1 and bool((target >= 0).all()) and bool(((target.sum(1) - 1).abs() < 1e-3).all())
    if not probabilities:
        raise ArgumentError(
            f"the targets are {target.dtype} of shape {tuple(target.shape)}, and cross-entropy takes these for the "
            "probabilities of classes, which they are not; for classes give integers, for numbers another loss, such "
            "as loss=F.mse_loss on targets of unit scale"
        )
