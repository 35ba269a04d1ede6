"""The optimizer itself, under the wrappers of others; and hooks on a network."""

from collections.abc import Callable, Sequence

import torch

from sparsevd.errors import ArgumentError


def bare_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer or several, each without what Accelerate or Lightning wraps around it, where hooks never run."""
    found = []
    for each in given if isinstance(given, Sequence) else [given]:
        while wrapped := {"optimizer", "_optimizer"} & set(getattr(each, "__dict__", ())):
            each = getattr(each, wrapped.pop())
        if not isinstance(each, torch.optim.Optimizer):
            raise ArgumentError(
                f"optimizer must be a torch.optim.Optimizer, or a list of them, not a {type(each).__name__}"
            )
        found.append(each)
    if not found:
        raise ArgumentError("optimizer is an empty list; give the one that trains the network")
    return found


class Hook:
    """A hook on the network that a copy of it, or a file, does not take along: the schedule is not theirs."""

    def __init__(self, method: Callable[..., None] | None = None):
        self._method = method

    def __call__(self, *args: object) -> None:
        if self._method is not None:
            self._method(*args)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()
