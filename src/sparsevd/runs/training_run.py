"""One run of the command line: data, model, training, pruning and a folder with the results.

The folder holds run.json from the beginning on (what is trained, and where), checkpoint.safetensors and metrics.jsonl
(as `fit` writes them), then pruned.safetensors with the plain keys of the pruned network, and summary.json. It is
locked until then: a second run in it is refused and changes nothing.
"""

import errno
import importlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsevd import kernels
from sparsevd.conversion import plan, prune, sparsify
from sparsevd.errors import ArgumentError, FormatError
from sparsevd.files import atomic, json_object, lock
from sparsevd.layers import THRESHOLD
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.reporting.summary import ModelSummary, summary
from sparsevd.training.checkpoint import load_weights, write_tensors
from sparsevd.training.data import Augmented, Data, batches, checked, size
from sparsevd.training.evaluation import Evaluation, elbo, evaluate
from sparsevd.training.folder import CHECKPOINT, METRICS
from sparsevd.training.loop import FitConfig, fit, fit_dense
from sparsevd.zoo import datasets, models

RUN = "run.json"
PRUNED = "pruned.safetensors"
SUMMARY = "summary.json"
BEGUN = ("asked", "command", "begun", "versions", "machine")  # what run.json says
PRETRAIN = "pretrain"
FILES = (METRICS, SUMMARY, CHECKPOINT, PRUNED)
_STATE = (CHECKPOINT, f"{PRETRAIN}/{CHECKPOINT}")


@dataclass(frozen=True)
class RunConfig:
    """What to train, on what, and where to put it."""

    model: str = "lenet-300-100"
    data: str = "mnist"
    out: Path = Path("runs/train")
    fit: FitConfig = field(default_factory=FitConfig)
    data_dir: Path | None = None
    val_size: int = 0  # examples held out of the training set
    pretrain_epochs: int = 0  # dense training before Sparse VD
    pretrain_learning_rate: float = 1e-3
    pretrain_weight_decay: float = 0.0
    shift: int = 0  # train on images shifted by up to so many pixels
    mirror: bool = False  # ... and half of them mirrored
    init_from: Path | None = None
    threshold: float = THRESHOLD
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class RunResult:
    """What came out. `paper` is the paper's (ratio, error) for the same network and data, where it has one."""

    summary: ModelSummary
    test: Evaluation | None
    test_before_pruning: Evaluation | None
    elbo: float
    training_seconds: float
    paper: tuple[float, float] | None


def run(config: RunConfig, say: Callable[[str], None] = print) -> RunResult:
    """Train, prune, evaluate and write everything down."""
    _check_folder(config)
    train, val, test, classes = load_data(config)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.fit.seed)
        dense = build_model(config.model, classes)
        if config.init_from:
            load_weights(dense, config.init_from)
        try_one_batch(dense, train, config)
        make_folder(config.out)
        with lock.only_training(config.out):
            _check_folder(config)  # again: a run may have begun and ended here since
            _make_room(config)
            return _run(config, dense, train, val, test, say)


def _run(
    config: RunConfig,
    dense: nn.Module,
    train: Data,
    val: Data | None,
    test: Data | None,
    say: Callable[[str], None],
) -> RunResult:
    begun = _begin(config)
    if config.pretrain_epochs:
        say(f"pre-training the dense network for {config.pretrain_epochs} epochs")
        recipe = replace(
            config.fit,
            epochs=config.pretrain_epochs,
            learning_rate=config.pretrain_learning_rate,
            weight_decay=config.pretrain_weight_decay,
        )
        fit_dense(dense, train, val, recipe, run_dir=config.out / PRETRAIN, resume=config.resume)
    conversion = plan(dense)
    model = sparsify(dense, threshold=config.threshold, inplace=True)
    n = size(checked(train, "train"), "train")
    say(
        f"{config.model} on {config.data}: {summary(model).weights:,} weights in {len(conversion.replaced)} "
        f"Sparse VD layers, {n:,} training examples, {config.fit.epochs} epochs"
    )
    if not kernels.available():
        say("the C kernels are not built (no C compiler at installation): training works, at about half the speed")
    history = fit(model, train, val, config.fit, run_dir=config.out, resume=config.resume)
    seconds = sum(metrics.seconds for metrics in history)

    pruned = prune(model)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.fit.seed)  # the bound is sampled: the same again for a finished run
        bound = elbo(model, train)
    result = RunResult(
        summary=summary(model),
        test=evaluate(pruned, test) if test is not None else None,
        test_before_pruning=evaluate(prune(model, threshold=float("inf")), test) if test is not None else None,
        elbo=bound,
        training_seconds=seconds,
        paper=models.PAPER.get((config.model, config.data)),
    )
    write_tensors(config.out / PRUNED, dict(pruned.state_dict()))
    atomic.write(
        config.out / SUMMARY, json.dumps(_as_dict(config, result) | begun, indent=2, ensure_ascii=False) + "\n"
    )
    return result


def describe(result: RunResult) -> str:
    """The result in two lines, beside the paper's where there is one."""
    times = f"{result.summary.ratio:.1f}×" if result.summary.kept else "infinitely"
    lines = [f"trained in {result.training_seconds / 60:.1f} min; variational bound {result.elbo:,.0f} nats"]
    ours = f"ours: {times} fewer weights"
    if result.test and result.test.error is not None:
        ours += f" at {result.test.error:.2f} % test error"
    elif result.test:
        ours += f" at a test loss of {result.test.loss:.4f}"
    if result.test_before_pruning and result.test_before_pruning.error is not None:
        lines[0] += f"; test error before pruning {result.test_before_pruning.error:.2f} %"
    if result.paper:
        ours += f" (paper: {result.paper[0]:g}× at {result.paper[1]} %)"
    return "\n".join([*lines, ours])


def interrupted(config: RunConfig) -> str:
    """What to say after Ctrl-C."""
    if any((config.out / name).exists() for name in _STATE):
        return f"interrupted; the state is saved in {config.out}. The same command with --resume goes on"
    return "interrupted before the first step; nothing was saved"


def _check_folder(config: RunConfig) -> None:
    if config.resume and config.overwrite:
        raise ArgumentError("--resume and --overwrite exclude each other")
    if config.pretrain_epochs < 0:
        raise ArgumentError(f"--pretrain-epochs {config.pretrain_epochs} must be zero or more")
    if config.out.exists() and not config.out.is_dir():
        raise ArgumentError(f"{config.out} is a file; give a folder")
    lock.refuse_if_training(config.out)  # neither --resume nor --overwrite would help
    if not (config.resume or config.overwrite) and any((config.out / name).exists() for name in _STATE):
        raise ArgumentError(f"{config.out} already holds a run; --resume continues it, --overwrite starts anew")


def _make_room(config: RunConfig) -> None:
    """Once everything else is known to be in order, remove the run that is to be replaced."""
    try:
        if config.overwrite:
            for name in (*FILES, *_STATE, f"{PRETRAIN}/{METRICS}", RUN):
                (config.out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ArgumentError(f"{config.out} cannot be written to ({error.strerror})") from error


def make_folder(path: Path) -> None:
    """A folder to write to, or a sentence; before the training, not after it."""
    try:
        atomic.make_folder(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written to ({error.strerror})") from error


def _begin(config: RunConfig) -> dict[str, Any]:
    """What is asked for, by which command, where and when: as it was when the run began, if this one resumes it.

    The checkpoint itself knows the settings of the training; this is what the data and the start depend on.
    """
    from sparsevd import __version__

    path = config.out / RUN
    names = ("model", "data", "val_size", "shift", "mirror", "init_from", "pretrain_epochs")
    asked = {name: getattr(config, name) for name in names}
    asked["init_from"] = str(config.init_from) if config.init_from else None
    if config.resume and path.exists() and any((config.out / name).exists() for name in _STATE):
        begun = json_object.read(path)
        before = begun.get("asked")
        if not isinstance(before, dict) or not asked.keys() <= before.keys():
            raise FormatError(f"{path} does not say how the run began; start in another folder")
        for name, value in asked.items():
            if before[name] != value:
                option = f"--{name.replace('_', '-')}"
                raise ArgumentError(
                    f"{config.out} holds a run with {option} {json_object.shown(before[name])}, not {value}; "
                    "give the same to go on with it, or another folder (--out)"
                )
        return {name: begun.get(name) for name in BEGUN}
    begun = {
        "asked": asked,
        "command": " ".join(["sparsevd", *sys.argv[1:]]),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "sparsevd": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "bfloat16": multiplies_bfloat16(),
            "threads": torch.get_num_threads(),
            "waiting": os.environ.get("OMP_WAIT_POLICY"),  # how threads wait for each other, if that was chosen
        },
    }
    atomic.write(path, json.dumps(begun, indent=2, ensure_ascii=False) + "\n")
    return begun


def try_one_batch(model: nn.Module, train: Data, config: RunConfig) -> None:
    """A model that does not fit its data fails here, in a sentence, and not in the middle of the training."""
    modes = {module: module.training for module in model.modules()}
    try:
        x, y = next(batches(train, 2, shuffle=False), (None, None))
        if x is None or y is None:
            raise ValueError("it gives no batch")
        with torch.no_grad():
            F.cross_entropy(model.eval()(x), y)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ArgumentError(f"{config.model} does not fit the data {config.data}: {error}") from error
    finally:
        for module, training in modes.items():
            module.training = training


def load_data(config: RunConfig) -> tuple[Data, Data | None, Data | None, int]:
    """Training, validation and test data, and the number of classes (10 where the labels do not say)."""
    if ":" in config.data:
        parts = load_object(config.data)()
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise ArgumentError(f"{config.data} must return (train, test), each (x, y), a Dataset or a DataLoader")
        train, test, classes = parts[0], parts[1], 0
    else:
        splits = datasets.load(config.data, config.data_dir)
        train, test, classes = splits.train, splits.test, splits.classes
    train = checked(train, "train")
    test = checked(test, "test") if test is not None else None
    if not classes:
        labels = train[1] if isinstance(train, tuple) else None
        integers = labels is not None and not labels.is_floating_point()
        classes = int(labels.max()) + 1 if labels is not None and integers else 10
    val: Data | None = None
    if config.val_size:
        train, val = split(train, config.val_size, config.fit.seed)
    if config.shift or config.mirror:
        if not isinstance(train, tuple):
            raise ArgumentError("--shift and --mirror need the training data as a pair of tensors (x, y)")
        train = Augmented(train, shift=config.shift, mirror=config.mirror)
    return train, val, test, classes


def split(train: Data, val_size: int, seed: int) -> tuple[datasets.Pair, datasets.Pair]:
    """Training and held-out examples; a seed holds out the same ones each time, and more of them for a larger size."""
    if not isinstance(train, tuple):
        raise ArgumentError("a validation split needs the training data as a pair of tensors (x, y)")
    x, y = train
    if not 0 < val_size < len(x):
        raise ArgumentError(f"{val_size} validation examples out of {len(x)} leave nothing to train on")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[:val_size], order[val_size:]
    return (x[kept], y[kept]), (x[held_out], y[held_out])


def build_model(name: str, classes: int) -> nn.Module:
    """A network of the paper by name, or what package.module:factory returns."""
    if ":" in name:
        model = load_object(name)()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"{name} returned a {type(model).__name__}, not a torch module")
        return model
    if name not in models.MODELS:
        raise ArgumentError(f"no model {name!r}; there are {', '.join(models.MODELS)}, or give package.module:factory")
    return models.MODELS[name](classes)


def load_object(reference: str) -> Callable[[], Any]:
    """The factory behind "package.module:factory", looked for in the present folder too."""
    module_name, _, attribute = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ArgumentError(f"{reference!r} cannot be imported: {error}; write package.module:factory") from error
    if not callable(factory):
        raise ArgumentError(f"{reference!r} is a {type(factory).__name__}, not a function")
    return factory  # type: ignore[no-any-return]


def _as_dict(config: RunConfig, result: RunResult) -> dict[str, Any]:
    return {
        "model": config.model,
        "data": config.data,
        "config": asdict(config.fit),
        "threshold": config.threshold if math.isfinite(config.threshold) else str(config.threshold),
        "ratio": result.summary.ratio if result.summary.kept else None,
        "test_error": result.test.error if result.test else None,
        "test_error_before_pruning": result.test_before_pruning.error if result.test_before_pruning else None,
        "elbo": result.elbo,
        "training_seconds": result.training_seconds,
        "summary": result.summary.as_dict(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
