"""What a checkpoint must hold for training to go on from it. Everything is checked before anything is changed."""

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import CheckpointError
from sparsevd.files.json_object import shown
from sparsevd.posterior import named_posteriors, noisy_modules, posteriors
from sparsevd.training.checkpoint import Checkpoint, check_fit
from sparsevd.training.history import History

# What an optimizer keeps for each parameter, by its name in torch's state.
_ADAM, _SGD = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}
_MERSENNE_TWISTER = 624  # numbers that torch's generator makes at a time


def described(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of the posteriors, by the name of θ; a shared one has several, `of` is the first."""
    return {
        name: {
            "type": type(posterior.layer).__name__,
            "threshold": posterior.threshold,
            "noise": posterior.noise_beside(name),
            "of": posterior.name,
        }
        for name, posterior in named_posteriors(model).items()
    }


def check_model(checkpoint: Checkpoint, model: nn.Module, path: Path) -> None:
    """The checkpoint's tensors are those of this very network."""
    check_fit(checkpoint.model, model.state_dict(), f"{path} belongs to another network", exact=True)
    known = described(model)
    for name, each in known.items():
        if checkpoint.posteriors.get(name, {}).get("threshold") == math.inf:  # a run with a budget has settled
            each["threshold"] = math.inf
    if checkpoint.posteriors != known:
        raise CheckpointError(
            f"{path} has Sparse VD layers of other names, types or thresholds than the model; use the same ones"
        )


def check_history(history: History, model: nn.Module, path: Path) -> None:
    """The epochs that are over counted the units of the same layers, in the same order, as the next will."""
    names = tuple(posterior.label for posterior in posteriors(model))
    if history and history.layers != (names or None):
        raise CheckpointError.damaged(path, "its history has other layers than the network")


def check_optimizer(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begun: bool,
    path: Path,
    noise: bool = True,
) -> None:
    """The optimizer's numbers are whole, and such as training writes them.

    A parameter that the network does not use has none. Those of a Sparse VD layer have them once training has begun:
    their KL has a gradient in any case. In a run without `noise` it has not, and log σ² is never changed.
    """
    kept = _SGD if isinstance(optimizer, torch.optim.SGD) else _ADAM
    parameters = dict(model.named_parameters())
    found: dict[str, set[str]] = {}
    noisy = {id(parameter) for each in posteriors(model) for parameter in (each.theta, each.log_sigma2)}
    if not noise:
        noisy = {id(each.theta) for each in posteriors(model)}
    never_missing = noisy if begun else set()
    for key, value in checkpoint.optimizer.items():
        name, _, slot = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise CheckpointError.damaged(path, f"no parameter {shown(name)} for its optimizer state")
        if slot not in kept or not _is_valid(slot, value, parameter):
            raise CheckpointError.damaged(path, f"{shown(key)} is no state that the optimizer can have for it")
        found.setdefault(name, set()).add(slot)
    for name, parameter in parameters.items():
        missing = kept - found.get(name, set())
        if missing and (name in found or (parameter.requires_grad and id(parameter) in never_missing)):
            raise CheckpointError.damaged(path, f"{name} lacks the optimizer's {', '.join(sorted(missing))}")


def _is_valid(slot: str, value: Tensor, parameter: Tensor) -> bool:
    if slot == "step":
        if value.ndim or value.dtype is not torch.float32:
            return False
        count = float(value)
        return count >= 1 and count.is_integer()  # not NaN, not infinite
    if value.shape != parameter.shape or value.dtype is not parameter.dtype:
        return False
    if slot in ("exp_avg", "momentum_buffer") or value.is_complex():
        return bool(value.isfinite().all())
    return bool((value >= 0).all())  # a square may be infinite; the step is zero then


def check_generator(rng: Tensor, path: Path) -> None:
    """The state is one that torch's generator can have: torch itself takes some that make it read past their end."""
    damaged = CheckpointError.damaged(path, "the state of its random numbers is none that torch can have")
    plain = torch.Generator().get_state()
    if rng.dtype is not plain.dtype or rng.shape != plain.shape:
        raise damaged
    # The seed, how many numbers are left before new ones are made, whether there is a seed, and which number is next.
    _, left, seeded, following = struct.unpack_from("<QiiQ", rng.numpy().tobytes())
    unused = left == 1 and following == 0
    if seeded != 1 or not (unused or (1 <= left <= _MERSENNE_TWISTER and left + following == _MERSENNE_TWISTER + 1)):
        raise damaged
    try:
        torch.Generator().set_state(rng)
    except RuntimeError as error:
        raise damaged from error


def put_back(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After the checks: the model and the optimizer as they were when the checkpoint was written."""
    model.load_state_dict(checkpoint.model)
    for prefix, layer in noisy_modules(model).items():  # not each posterior: layers that share one have their own each
        for each in layer.posteriors():
            name = f"{prefix}.{each.weight}" if prefix else each.weight
            layer.threshold = checkpoint.posteriors[name]["threshold"]
    parameters = dict(model.named_parameters())
    for key, value in checkpoint.optimizer.items():
        name, _, slot = key.rpartition("/")
        # In the order in memory of the parameter: Adam's fused kernel takes both as they lie there.
        like = parameters[name].detach() if value.ndim else value
        optimizer.state[parameters[name]][slot] = torch.empty_like(like, dtype=value.dtype).copy_(value)
