"""The rate of log σ² in the optimizers of others: a group of its own, at so many times the rate of its weights."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior import Posterior
from sparsevd.training.optimizer import BoundStep


class NoiseRates:
    """Which groups hold log σ², and whose rate each of them follows; looked at anew when a loop adds a group."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        bounds: Sequence[BoundStep],
        posteriors: Sequence[Posterior],
    ):
        self._optimizers, self._bounds, self._posteriors = optimizers, bounds, posteriors
        self._count = 0  # of groups, when they were looked at
        self.look()

    def look(self) -> None:
        """Refuse groups that cannot have the rates, and say what decay would do."""
        count = sum(len(each.param_groups) for each in self._optimizers)
        if count != self._count:
            self._pairs = self._noise_and_weights()
            self._check_decay()
            self._count = count

    def set(self, ratio: float) -> None:
        """Give log σ² so many times the rate that its weights have now; where these are frozen, the first group's."""
        for noise, theta in self._pairs:
            mine = self._group(noise)
            theirs = self._group(theta) if theta is not None else self._optimizers[0].param_groups[0]
            assert mine is not None
            assert theirs is not None
            rate = float(theirs["lr"]) * ratio
            if isinstance(mine["lr"], Tensor):
                mine["lr"].fill_(rate)
            else:
                mine["lr"] = rate

    def _noise_and_weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """A log σ² of each of its groups, with a weight from the group whose rate it follows."""
        pairs: dict[int, tuple[Tensor, Tensor | None]] = {}
        noise = {each.log_sigma2 for each in self._posteriors}
        for each in self._posteriors:
            name = each.noise_beside(each.name)
            mine, theirs = self._group(each.log_sigma2, name), self._group(each.theta, each.name)
            if mine is None:
                continue
            if any(p not in noise for p in mine["params"]):
                raise ArgumentError(
                    f"{name} shares a group with other parameters, but log σ² learns at a rate of its own: make the "
                    "optimizer by torch.optim.AdamW(sparsevd.parameter_groups(model, lr=…))"
                )
            theta = each.theta if theirs is not None else None
            first = pairs.setdefault(id(mine), (each.log_sigma2, theta))[1]
            if (None if first is None else self._group(first)) is not theirs:
                raise ArgumentError(
                    f"the weights of one group of log σ² are in several groups ({each.name} is in another one than "
                    "those before it), which may have different rates: give each of these its own group of log σ², "
                    "as sparsevd.parameter_groups(part, lr=…) does for a part of the network"
                )
        return list(pairs.values())

    def _group(self, parameter: Tensor, name: str = "") -> dict[str, Any] | None:
        found = [group for bound in self._bounds if (group := bound.group_of(parameter)) is not None]
        if len(found) > 1:
            raise ArgumentError(f"{name} is in {len(found)} of the optimizers; one should train it")
        if not found and parameter.requires_grad:
            raise ArgumentError(
                f"no optimizer has {name}, so it would never learn: make the optimizer of "
                "sparsevd.parameter_groups(model, lr=…) after the network has its final parameters (sparsify, "
                "fully_shard), or freeze this one"
            )
        return found[0] if found else None

    def _check_decay(self) -> None:
        for each in self._posteriors:
            for parameter, name, what in (
                (each.theta, each.name, "pulls weights to zero that the KL would keep"),
                (each.log_sigma2, each.noise_beside(each.name), "pulls log σ² to 0, a noise of 1"),
            ):
                group = self._group(parameter, name)
                if group is not None and group.get("weight_decay"):
                    warnings.warn(
                        f"{name} is in a group with weight_decay={group['weight_decay']:g}: it {what}, and the KL "
                        "takes its place. Make the groups by sparsevd.parameter_groups(model, lr=…, weight_decay=…)",
                        SparseVDWarning,
                        stacklevel=6,
                    )
                    return
