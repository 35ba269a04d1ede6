"""The folder of a run: the state of training as a checkpoint, and its metrics as lines of JSON.

The checkpoint is the truth and holds the whole history. metrics.jsonl gets a line after it; where it does not hold the
lines before, as after a crash, it is put right from the checkpoint. One training at a time is in the folder; who only
reads it finds a whole checkpoint at any moment.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, CheckpointError, WriteError
from sparsevd.files import atomic, lock
from sparsevd.files.json_object import is_whole, shown
from sparsevd.training import history, restoration
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.history import LARGEST_INTEGER, History
from sparsevd.training.likelihood import Likelihood
from sparsevd.training.metrics_file import MetricsFile
from sparsevd.training.schedule import Schedule

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
# What a checkpoint of before a setting was there was made with.
BEFORE_IT_WAS_THERE = {"autocast": False}


@dataclass
class State:
    """How far training is: whole epochs, batches and examples within the present one, and its sums."""

    epoch: int = 0
    batch: int = 0
    seen: int = 0
    loss: float = 0.0
    wrong: float | None = 0
    seconds: float = 0.0
    bfloat16: bool | None = None  # whether large variance products are in it; None before the run has begun
    history: History = field(default_factory=History.empty)

    def add(self, loss: float, wrong: float | None, examples: int) -> None:
        """One more batch of so many examples: its mean loss, and how many were classified wrongly, if that is known."""
        self.batch += 1
        self.seen += examples
        self.loss += loss * examples
        self.wrong = self.wrong + wrong if self.wrong is not None and wrong is not None else None


class TrainingFolder:
    """The run's folder: the checkpoint, and the metrics that it holds as lines of JSON."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any], *, writes: bool = True):
        self.path = Path(path) if path is not None else None
        self._writes = writes  # of several processes only one
        self.settings = settings  # a run can only be resumed with the same ones
        self._metrics = MetricsFile(self.path / METRICS) if self.path else None

    def locked(self) -> AbstractContextManager[None]:
        """Makes the folder, and keeps every other training out of it."""
        if self.path is None or not self._writes:
            return nullcontext()
        try:
            atomic.make_folder(self.path)
        except OSError as error:
            raise WriteError(f"{self.path} cannot be written to: {error.strerror or error}") from error
        return lock.only_training(self.path)

    def settings_then(self) -> dict[str, Any]:
        """What the run in the folder began with; nothing, where there is none."""
        path = self.path / CHECKPOINT if self.path else None
        if path is None or not path.exists():
            return {}
        settings = Checkpoint.load(path).progress.get("settings")
        return settings if isinstance(settings, dict) else {}

    def damaged(self, what: str) -> CheckpointError:
        """Of the checkpoint in the folder."""
        return CheckpointError.damaged((self.path or Path()) / CHECKPOINT, what)

    def refuse_to_overwrite(self) -> None:
        if self.path and (self.path / CHECKPOINT).exists():
            raise CheckpointError(f"{self.path} already holds a run; resume it, or remove it first")

    def last_good(self) -> str:
        if self.path is None:
            return "There is no checkpoint, since run_dir= was not given."
        if (self.path / CHECKPOINT).exists():
            return f"The last good state is in {self.path / CHECKPOINT}."
        return "No epoch was finished, so there is no checkpoint."

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: State,
        rng: Tensor | None = None,
        schedule: Schedule | None = None,
        loss: object = None,
    ) -> None:
        if self.path is None or self._metrics is None or not self._writes:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        slots = {
            f"{names[parameter]}/{slot}": value
            for parameter, values in optimizer.state.items()
            for slot, value in values.items()
        }
        progress = {
            "settings": self.settings,
            "state": {name: value for name, value in vars(state).items() if name != "history"},
            "history_layers": state.history.layers,
            "metrics": self._metrics.prepare(state.history),
        }
        checkpoint = Checkpoint(
            model=dict(model.state_dict()),
            optimizer=slots,
            schedule=schedule.state_dict() if schedule else {},
            likelihood=loss.state_dict() if isinstance(loss, Likelihood) else {},
            rng=rng,
            posteriors=restoration.described(model),
            buffers=[name for name, _ in model.named_buffers(remove_duplicate=False)],
            aliases=[name for name, _ in model.named_parameters(remove_duplicate=False) if name not in names.values()],
            progress=progress,
            history=state.history.tensors(),
        )
        try:
            checkpoint.save(self.path / CHECKPOINT)
            self._metrics.write(state.history)
        except WriteError as error:
            raise WriteError(f"{error}. {self.last_good()} Once it can be written, resume the run") from error

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | None = None,
        loss: object = None,
    ) -> tuple[State, Tensor | None]:
        """The state to go on from; the beginning if no checkpoint was written yet."""
        if self.path is None or self._metrics is None:
            raise ArgumentError("resume=True needs the run_dir to resume from")
        for name in (CHECKPOINT, METRICS) if self._writes else ():
            atomic.remove_leftovers(self.path / name)
        path = self.path / CHECKPOINT
        if not path.exists():
            return State(), None
        checkpoint = Checkpoint.load(path)
        settings = checkpoint.progress.get("settings")
        if not isinstance(settings, dict):
            raise CheckpointError.damaged(path, f"its settings are {shown(settings)}")
        settings = BEFORE_IT_WAS_THERE | settings
        differing = [
            f"{name}: {shown(settings.get(name))} then, {value!r} now"
            for name, value in self.settings.items()
            if not _same(settings.get(name), value)
        ]
        if differing:
            raise CheckpointError(
                f"{path} belongs to a run with other settings ({'; '.join(differing)}); use those, or start a new run"
            )
        state = _state(checkpoint, self.settings["epochs"], path)
        begun = state.epoch > 0 or state.batch > 0
        restoration.check_model(checkpoint, model, path)
        restoration.check_history(state.history, model, path)
        noise = self.settings.get("noise") is not False
        restoration.check_optimizer(checkpoint, model, optimizer, begun, path, noise)
        problem = schedule.problem_of(checkpoint.schedule) if schedule else ", ".join(checkpoint.schedule)
        if problem:
            raise CheckpointError.damaged(path, f"the state of its schedule does not fit: {problem}")
        likelihood = loss if isinstance(loss, Likelihood) else None
        learned = checkpoint.likelihood
        problem = likelihood.problem_of(learned) if likelihood else ", ".join(learned)
        if problem:
            raise CheckpointError.damaged(path, f"what its likelihood has learned does not fit: {problem}")
        if checkpoint.rng is not None:
            restoration.check_generator(checkpoint.rng, path)
        restoration.put_back(checkpoint, model, optimizer)
        if schedule:
            schedule.load_state_dict(checkpoint.schedule)
        if likelihood:
            likelihood.load_state_dict(learned)
        if self._writes:
            self._metrics.repair(state.history, checkpoint.progress.get("metrics"))
        return state, checkpoint.rng


def _same(then: object, now: object) -> bool:
    """Whether a setting has not changed; True is not 1 here."""
    return then == now and isinstance(then, bool) == isinstance(now, bool)


def _is_count(value: object, most: int) -> bool:
    """Of examples; of some the half may count."""
    return is_whole(value, 0, most) or (isinstance(value, float) and 0 <= value <= most)


def history_of(checkpoint: Checkpoint, path: Path) -> History:
    """The epochs that are over, checked; `path` is where the checkpoint comes from."""
    if checkpoint.format == 1:
        stored = checkpoint.progress.get("state")
        return history.from_entries(stored.get("history") if isinstance(stored, dict) else None, path)
    layers = checkpoint.progress.get("history_layers")
    return history.from_tensors(checkpoint.history, layers, path, checkpoint.format)


def _state(checkpoint: Checkpoint, epochs: int, path: Path) -> State:
    """How far a run of so many epochs is, with every number in its range."""
    stored = checkpoint.progress.get("state")
    if not isinstance(stored, dict):
        raise CheckpointError.damaged(path, f"its state is {shown(stored)}")
    stored, past = dict(stored), history_of(checkpoint, path)
    if checkpoint.format == 1:
        del stored["history"]
        stored["bfloat16"] = None  # it was not kept then
    expected = set(vars(State())) - {"history"}
    if stored.keys() != expected:
        raise CheckpointError.damaged(path, f"its state has not exactly {', '.join(sorted(expected))}")
    seen = stored["seen"]
    valid = {
        "epoch": is_whole(stored["epoch"], 0, epochs),
        "seen": is_whole(seen, 0, LARGEST_INTEGER),
        "batch": is_whole(seen, 0, LARGEST_INTEGER) and is_whole(stored["batch"], 0, seen),
        "wrong": stored["wrong"] is None or (is_whole(seen, 0, LARGEST_INTEGER) and _is_count(stored["wrong"], seen)),
        "loss": isinstance(stored["loss"], float) and math.isfinite(stored["loss"]),
        "seconds": isinstance(stored["seconds"], float) and 0 <= stored["seconds"] < math.inf,
        "bfloat16": stored["bfloat16"] is None or isinstance(stored["bfloat16"], bool),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise CheckpointError.damaged(path, f"its state has {name} {shown(stored[name])}")
    state = State(**stored, history=past)
    if len(past) != state.epoch:
        raise CheckpointError.damaged(path, f"it is after epoch {state.epoch} and has a history of {len(past)}")
    if state.seen and (checkpoint.rng is None or state.epoch == epochs):
        raise CheckpointError.damaged(
            path, f"it is inside an epoch, after batch {state.batch}, but lacks what that needs"
        )
    return state
