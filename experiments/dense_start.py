"""Dense VGG-like networks on CIFAR that Sparse VD can start from: good, and as cheap as a CPU allows.

Flips and crops, Binary Dropout as the network has it, SGD with momentum or AdamW, a rate that rises to its peak and
falls to zero along half a cosine, label smoothing; bfloat16 where the CPU has instructions for it, channels last. The
setting is chosen by the trials among the records: k = 0.25, held-out training images, the lowest error.
"""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from records import Records
from torch import nn
from work import Images, Work

from sparsevd.errors import ArgumentError, DivergenceError
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.runs.sources import split
from sparsevd.training.data import Augmented, Data, batches
from sparsevd.training.evaluation import evaluate, wrong
from sparsevd.training.folder import State, TrainingFolder
from sparsevd.training.history import EpochMetrics
from sparsevd.training.recipes import DECAYS
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

SHIFT = 4
BATCH_SIZE = 128
HELD_OUT = 5000
METHOD = "dense start"


@dataclass(frozen=True)
class Setting:
    """How to train. Weight decay is L2 in the gradient for SGD, and decoupled from it for AdamW."""

    optimizer: str  # "sgd", with Nesterov's momentum 0.9, or "adamw"
    rate: float  # at its peak
    weight_decay: float
    peak_at: float  # part of the run; 0: the rate only falls
    smoothing: float = 0.0

    def rate_at(self, done: float) -> float:
        if done < self.peak_at:
            return self.rate * done / self.peak_at
        return self.rate * DECAYS["cosine"]((done - self.peak_at) / (1 - self.peak_at))

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        shared: dict[str, Any] = {"lr": self.rate, "weight_decay": self.weight_decay, "fused": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **shared)
        return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), **shared)


@dataclass(frozen=True)
class DenseStart(Work):
    """One training. Without a setting of its own, with the one that the trials chose."""

    net: str
    epochs: int
    setting: Setting | None = None
    data: str = "cifar10"
    held_out: int = 0  # above 0, a trial: the error is that on so many training images, and not on the test set
    seed: int = 0

    def cost(self) -> str:
        return f"dense-{self.net}-{self.data}-without-{self.held_out}"

    def images(self) -> Images:
        splits = load(self.data)
        if self.held_out:
            return Images(*split(splits.train, self.held_out, seed=0))
        return Images(splits.train, splits.test)

    def shortened(self, epochs: int) -> Self:
        """With any setting, if none is chosen yet: they cost the same."""
        return replace(self, epochs=epochs, setting=self.setting or Setting("sgd", 0.1, 5e-4, peak_at=0.0))

    def run(self, images: Images, folder: Path) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        model = MODELS[self.net](100 if self.data == "cifar100" else 10)
        setting = self.setting or chosen()
        val = images.measured if self.held_out else None
        history = train(model, Augmented(images.train, shift=SHIFT, mirror=True), val, self, setting, folder)
        return {
            "net": self.net,
            "data": self.data,
            "method": METHOD,
            "seed": self.seed,
            "epochs": self.epochs,
            "held_out": self.held_out,
            "settings": {
                **asdict(setting),
                "batch_size": BATCH_SIZE,
                "shift": SHIFT,
                "mirror": True,
                "bfloat16": multiplies_bfloat16(),
            },
            "error": evaluate(model, images.measured).error,
            "curve": [{"epoch": m.epoch, "train_error": m.train_error, "held_out_error": m.val_error} for m in history],
        }


def chosen() -> Setting:
    """The setting of the trial with the lowest error on held-out images."""
    trials = Records("trials").find(method=METHOD)
    if not trials:
        raise ArgumentError("no trial of dense starts is among the records; run those of the queue first")
    best = min(trials, key=lambda trial: trial["error"])["settings"]
    return Setting(**{name: best[name] for name in Setting.__dataclass_fields__})


def train(
    model: nn.Module, data: Data, val: Data | None, work: DenseStart, setting: Setting, folder: Path
) -> list[EpochMetrics]:
    """Train in place, or go on from the folder; as `sparsevd.fit_dense`, and to the same result after any stop."""
    n = len(data[0])
    model.to(memory_format=torch.channels_last)
    optimizer = setting.build(model)
    settings = {**asdict(setting), "net": work.net, "data": work.data, "epochs": work.epochs, "seed": work.seed}
    run_folder = TrainingFolder(folder, {**settings, "n_train": n})
    state, rng = run_folder.restore(model, optimizer)
    bfloat16 = multiplies_bfloat16()
    with _interruptible() as interrupt:
        while state.epoch < work.epochs:
            begun = time.process_time() - state.seconds
            torch.manual_seed(work.seed * 1_000_003 + state.epoch)
            model.train()
            remaining = batches(data, BATCH_SIZE, shuffle=True)
            if rng is not None:  # pass over what a stopped epoch has done, then draw on from where it was
                deque(islice(remaining, state.batch), maxlen=0)
                torch.set_rng_state(rng)
                rng = None
            for x, y in remaining:
                rate = setting.rate_at(min(1.0, (state.epoch + state.seen / n) / work.epochs))
                for group in optimizer.param_groups:
                    group["lr"] = rate
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    output = model(x.to(memory_format=torch.channels_last))
                loss = F.cross_entropy(output.float(), y, label_smoothing=setting.smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.batch += 1
                state.seen += len(y)
                state.loss += loss.item() * len(y)
                state.wrong = (state.wrong or 0) + (wrong(output, y) or 0)
                if interrupt.is_set():
                    break
            if not math.isfinite(state.loss):
                raise DivergenceError(f"training diverged in epoch {state.epoch + 1}; lower the rate of {setting}")
            state.seconds = time.process_time() - begun
            if interrupt.is_set():
                run_folder.save(model, optimizer, state, torch.get_rng_state())
                raise KeyboardInterrupt
            state = State(epoch=state.epoch + 1, history=state.history.add(_metrics(model, val, state, rate)))
            run_folder.save(model, optimizer, state)
            last = state.history[-1]
            print(f"epoch {last.epoch}/{work.epochs}: train error {last.train_error:.2f} %, held out {last.val_error}")
    model.to(memory_format=torch.contiguous_format)
    return list(state.history)


def _metrics(model: nn.Module, val: Data | None, state: State, rate: float) -> EpochMetrics:
    held_out = evaluate(model, val) if val is not None else None
    return EpochMetrics(
        epoch=state.epoch + 1,
        learning_rate=rate,
        beta=0.0,
        train_loss=state.loss / state.seen,
        train_error=100 * (state.wrong or 0) / state.seen,
        kl=None,
        elbo=None,
        sparsity=None,
        ratio=None,
        val_loss=held_out.loss if held_out else None,
        val_error=held_out.error if held_out else None,
        seconds=state.seconds,
    )


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C only sets a flag, which is looked at between steps."""
    requested = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: requested.set())
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)
