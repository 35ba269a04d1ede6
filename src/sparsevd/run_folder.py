"""The folder of a run: the state of training as a checkpoint, and its metrics as lines of JSON.

The checkpoint is the truth and holds the whole history; metrics.jsonl is written anew from it. One training at a time
is in the folder; who only reads it finds whole files at any moment.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd import atomic, lock
from sparsevd.checkpoint import Checkpoint
from sparsevd.errors import ArgumentError, CheckpointError, WriteError
from sparsevd.layers import SparseLayer

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch. Training figures are averages over the epoch, with noise; `elbo` is the bound they give with β = 1.

    `alive` has, for each Sparse VD layer, how many of its inputs and of its units have a weight below the threshold.
    Where weights were dropped for good after the epoch, `dropped` is how many, and the bound before and after that is
    that of its first batches with the same noise. Without Sparse VD layers (`fit_dense`) all of these are None.
    """

    epoch: int
    learning_rate: float
    beta: float
    train_loss: float
    train_error: float | None
    kl: float | None
    elbo: float | None
    sparsity: float | None
    ratio: float | None
    val_loss: float | None
    val_error: float | None
    seconds: float
    alive: dict[str, list[int]] | None = None
    dropped: int | None = None
    elbo_before_drop: float | None = None
    elbo_after_drop: float | None = None


@dataclass
class State:
    """How far training is: whole epochs, batches and examples within the present one, and its sums."""

    epoch: int = 0
    batch: int = 0
    seen: int = 0
    loss: float = 0.0
    wrong: int | None = 0
    seconds: float = 0.0
    bfloat16: bool | None = None  # whether large variance products are in it; None before the run has begun
    history: list[EpochMetrics] = field(default_factory=list)


def _layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Type and threshold of the Sparse VD layers by name; a shared one has several, and `of` says which came first."""
    first: dict[nn.Module, str] = {}
    return {
        name: {"type": type(module).__name__, "threshold": module.threshold, "of": first.setdefault(module, name)}
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparseLayer)
    }


class RunFolder:
    """The run's folder: the checkpoint, and the metrics that it holds as lines of JSON."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any]):
        self.path = Path(path) if path is not None else None
        self._settings = settings  # a run can only be resumed with the same ones

    def locked(self) -> AbstractContextManager[None]:
        """Makes the folder, and keeps every other training out of it."""
        if self.path is None:
            return nullcontext()
        try:
            atomic.make_folder(self.path)
        except OSError as error:
            raise WriteError(f"{self.path} cannot be written to: {error.strerror or error}") from error
        return lock.only_training(self.path)

    def refuse_to_overwrite(self) -> None:
        if self.path and (self.path / CHECKPOINT).exists():
            raise CheckpointError(f"{self.path} already holds a run; resume it, or remove it first")

    def last_good(self) -> str:
        if self.path and (self.path / CHECKPOINT).exists():
            return f"The last good state is in {self.path / CHECKPOINT}."
        return "No epoch was finished, so there is no checkpoint."

    def save(self, model: nn.Module, optimizer: torch.optim.Adam, state: State, rng: Tensor | None = None) -> None:
        if self.path is None:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        slots = {
            f"{names[parameter]}/{slot}": value
            for parameter, values in optimizer.state.items()
            for slot, value in values.items()
        }
        layers = _layers(model)
        progress = {"settings": self._settings, "state": asdict(state)}
        buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        checkpoint = Checkpoint(dict(model.state_dict()), slots, rng, layers, buffers, progress)
        try:
            checkpoint.save(self.path / CHECKPOINT)
            self._write_metrics(state)
        except WriteError as error:
            raise WriteError(f"{error}. {self.last_good()} Once it can be written, resume the run") from error

    def _write_metrics(self, state: State) -> None:
        assert self.path is not None
        lines = [json.dumps(asdict(metrics)) + "\n" for metrics in state.history]
        atomic.write(self.path / METRICS, "".join(lines))

    def restore(self, model: nn.Module, optimizer: torch.optim.Adam) -> tuple[State, Tensor | None]:
        """The state to go on from; the beginning if no checkpoint was written yet."""
        if self.path is None:
            raise ArgumentError("resume=True needs the run_dir to resume from")
        for name in (CHECKPOINT, METRICS):
            atomic.remove_leftovers(self.path / name)
        path = self.path / CHECKPOINT
        if not path.exists():
            return State(), None
        checkpoint = Checkpoint.load(path)
        try:
            settings = dict(checkpoint.progress["settings"])
            stored: dict[str, Any] = checkpoint.progress["state"]
            history = [EpochMetrics(**metrics) for metrics in stored.pop("history")]
            state = State(**stored, history=history)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: its progress cannot be read ({error})") from error
        differing = [
            f"{name}: {settings.get(name)!r} then, {value!r} now"
            for name, value in self._settings.items()
            if settings.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"{path} belongs to a run with other settings ({'; '.join(differing)}); use those, or start a new run"
            )
        try:
            model.load_state_dict(checkpoint.model)
        except RuntimeError as error:
            raise CheckpointError(f"{path} belongs to another network: {error}") from error
        if checkpoint.layers != _layers(model):
            raise CheckpointError(
                f"{path} has Sparse VD layers of other names, types or thresholds than the model; use the same ones"
            )
        parameters = dict(model.named_parameters())
        for key, value in checkpoint.optimizer.items():
            name, _, slot = key.rpartition("/")
            if name not in parameters or (value.ndim and value.shape != parameters[name].shape):
                raise CheckpointError(f"{path} is damaged: no parameter {name!r} for its optimizer state")
            # In the order in memory of the parameter: Adam's fused kernel takes both as they lie there.
            like = parameters[name].detach() if value.ndim else value
            optimizer.state[parameters[name]][slot] = torch.empty_like(like, dtype=value.dtype).copy_(value)
        self._write_metrics(state)
        return state, checkpoint.rng
