"""A whole training: data, network, Sparse VD, pruning, test, and a folder with the results (see `Run`).

The folder is locked until the end: a second training in it is refused and changes nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from sparsevd.conversion import preview, prune, sparsify
from sparsevd.errors import ArgumentError
from sparsevd.files import lock
from sparsevd.posterior import THRESHOLD
from sparsevd.reporting.summary import ModelSummary, summary, times
from sparsevd.runs import sources
from sparsevd.runs.origin import describe_example
from sparsevd.runs.run import HELD_OUT, PRETRAIN, Run
from sparsevd.runs.sources import Sources
from sparsevd.training import processes
from sparsevd.training.budget import Budget
from sparsevd.training.checkpoint import load_weights
from sparsevd.training.data import checked, size
from sparsevd.training.evaluation import Evaluation, elbo, evaluate
from sparsevd.training.folder import TrainingFolder
from sparsevd.training.history import EpochMetrics
from sparsevd.training.loop import fit, fit_dense
from sparsevd.training.processes import Alone
from sparsevd.training.progress import Callback
from sparsevd.training.recipes import FitConfig
from sparsevd.training.start import CHOSEN
from sparsevd.training.teacher import TEMPERATURE, WEIGHT
from sparsevd.zoo import models

# What the data and the start depend on: a run can only be resumed with the same.
ASKED = ("model", "data", "val_size", "shift", "mirror", "init_from", "pretrain_epochs")
# Where a budget asks for a trained network and nobody gave one.
PRETRAIN_EPOCHS = 10


@dataclass(frozen=True)
class RunConfig:
    """What to train, on what, and where to put it. What stands beside a type is the help of its option."""

    model: Annotated[str, "A network by name, such as lenet-5-caffe, or package.module:factory."] = "lenet-300-100"
    data: Annotated[str, "mnist, 20newsgroups, …, or package.module:factory returning (train, test)."] = "mnist"
    out: Annotated[Path, "Folder for the results."] = Path("runs/train")
    fit: FitConfig = field(default_factory=FitConfig)
    threshold: Annotated[float, "Weights of log α above it are dropped."] = THRESHOLD
    val_size: Annotated[int, "Training examples held out for validation."] = 0
    pretrain_epochs: Annotated[int, "Epochs of dense training first."] = 0
    pretrain_learning_rate: Annotated[float, "Adam's rate in the dense training."] = 1e-3
    pretrain_weight_decay: Annotated[float, "Weight decay in the dense training."] = 0.0
    shift: Annotated[int, "Train on images shifted by up to so many pixels."] = 0
    mirror: Annotated[bool, "Train on mirror images too."] = False
    init_from: Annotated[Path | None, "Checkpoint or safetensors file to take the first weights from."] = None
    # A budget: β and what is dropped follow it, and the sparsest network that keeps to it is the result.
    sparsity: Annotated[float | None, "Budget: make this share of the weights zero, such as 0.95."] = None
    max_error_increase: Annotated[
        float | None,
        "Budget: lose at most so many points of %, on held-out examples, against the first network.",
    ] = None
    teacher: Annotated[Path | None, "Finished run or model file of a network to learn from, beside the labels."] = None
    temperature: Annotated[float, "What the logits of both are divided by in the teacher's term."] = TEMPERATURE
    teacher_weight: Annotated[float, "Weight of that term; the labels have the rest."] = WEIGHT
    data_dir: Annotated[Path | None, "Folder with the data set. [env: SPARSEVD_DATA]"] = None
    resume: Annotated[bool, "Go on with the run in the folder, if there is one."] = False
    overwrite: Annotated[bool, "Replace the run in the folder."] = False


@dataclass(frozen=True)
class RunResult:
    """What came out. `paper` is the paper's (ratio, error) for the same network and data, where it has one."""

    summary: ModelSummary
    test: Evaluation | None
    test_before_pruning: Evaluation | None
    elbo: float | None  # with a budget the KL has another weight than in the bound
    beta: float
    training_seconds: float
    paper: tuple[float, float] | None


def run(config: RunConfig, say: Callable[[str], None] = print) -> RunResult:
    """Train, prune, evaluate and write everything down.

    On several processes, as torchrun starts them, all train; process 0 writes and talks.
    """
    with processes.joined() as team:
        return _run(config, say if team.main else _silence, team)


def _silence(line: str) -> None:
    """Of a process that another one talks for."""


def _run(config: RunConfig, say: Callable[[str], None], team: Alone) -> RunResult:
    folder = Run(config.out)
    with torch.random.fork_rng([]), ExitStack() as held:
        with team.together():
            _check_folder(config, folder)
            config = _for_its_budget(config, say)
            data = _data(config)
            torch.manual_seed(config.fit.seed)
            dense = sources.build_model(config.model, data.classes)
            if config.init_from:
                load_weights(dense, config.init_from)
            misfit = f"{config.model} does not fit the data {config.data}"
            example = sources.try_one_batch(dense, data.train, misfit)
            facts = {"classes": data.classes, "example": describe_example(example)}
        with team.together():
            if team.main:
                held.enter_context(folder.locked())
                _check_folder(config, folder)  # again: a run may have begun and ended here since
                if config.overwrite:  # once everything else is known to be in order
                    folder.remove()
                asked = {name: getattr(config, name) for name in ASKED}
                asked["init_from"] = str(config.init_from) if config.init_from else None
                begun = folder.begin(asked, facts, resume=config.resume)
        model, history, remarks = _train(config, dense, data, say)
        pruned = prune(model)
        result = _tested(config, model, pruned, data, history)
        with team.together():
            if team.main:
                folder.finish(pruned, _as_dict(config, result) | {"remarks": remarks}, begun)
        return result


def _data(config: RunConfig) -> Sources:
    return sources.load_data(
        config.data,
        config.data_dir,
        val_size=config.val_size,
        seed=config.fit.seed,
        shift=config.shift,
        mirror=config.mirror,
    )


def _for_its_budget(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """An error that may rise needs a trained network to compare with, and examples that it has not seen."""
    budget = _budget(config)
    if budget is None or not budget.measures:
        return config
    if not (config.init_from or config.pretrain_epochs):
        config = replace(config, pretrain_epochs=PRETRAIN_EPOCHS)
        say(f"the budget is measured against a trained network: pretrain_epochs={PRETRAIN_EPOCHS}, or give init_from=")
    if not config.val_size:
        n = size(checked(_data(config).train, "train"), "train")
        config = replace(config, val_size=max(1, min(HELD_OUT, n // 5)))
        say(f"the budget is measured on held-out examples: val_size={config.val_size}")
    return config


def _budget(config: RunConfig) -> Budget | None:
    if config.sparsity is None and config.max_error_increase is None:
        return None
    return Budget(sparsity=config.sparsity, max_error_increase=config.max_error_increase)


def _check_folder(config: RunConfig, folder: Run) -> None:
    if config.resume and config.overwrite:
        raise ArgumentError("resume=True and overwrite=True exclude each other")
    if config.pretrain_epochs < 0:
        raise ArgumentError(f"pretrain_epochs={config.pretrain_epochs} must be zero or more")
    if config.out.exists() and not config.out.is_dir():
        raise ArgumentError(f"{config.out} is a file; give a folder")
    lock.refuse_if_training(config.out)  # neither resuming nor overwriting would help
    if not (config.resume or config.overwrite) and folder.has_begun():
        raise ArgumentError(f"{config.out} already holds a run; resume=True continues it, overwrite=True starts anew")


def _train(
    config: RunConfig, dense: nn.Module, data: Sources, say: Callable[[str], None]
) -> tuple[nn.Module, list[EpochMetrics], list[str]]:
    """The Sparse VD network, how its training went, and what there is to say of it."""
    teacher = Run(config.teacher, say=say).network().network if config.teacher else None
    if config.pretrain_epochs:
        say(f"pre-training the dense network for {config.pretrain_epochs} epochs")
        recipe = replace(
            config.fit,
            epochs=config.pretrain_epochs,
            learning_rate=config.pretrain_learning_rate,
            weight_decay=config.pretrain_weight_decay,
        )
        fit_dense(dense, data.train, data.val, recipe, run_dir=config.out / PRETRAIN, resume=config.resume)
    conversion = preview(dense)
    model = sparsify(dense, threshold=config.threshold, inplace=True)
    n = size(checked(data.train, "train"), "train")
    say(
        f"{config.model} on {config.data}: {summary(model).weights:,} weights in {len(conversion.replaced)} "
        f"Sparse VD layers, {n:,} training examples, {config.fit.epochs} epochs"
    )
    remarks = _Remarks()
    history = fit(
        model,
        data.train,
        data.val,
        config.fit,
        teacher=teacher,
        temperature=config.temperature,
        teacher_weight=config.teacher_weight,
        run_dir=config.out,
        resume=config.resume,
        callbacks=[remarks],
        budget=_budget(config),
    )
    return model, history, remarks.said


class _Remarks(Callback):
    """What `fit` has said at its end, for summary.json."""

    def on_end(self, remarks: Sequence[str]) -> None:
        self.said = list(remarks)


def _tested(
    config: RunConfig, model: nn.Module, pruned: nn.Module, data: Sources, history: list[EpochMetrics]
) -> RunResult:
    with torch.random.fork_rng([]):
        torch.manual_seed(config.fit.seed)  # the bound is sampled: the same again for a finished run
        bound = elbo(model, data.train) if _budget(config) is None else None
    unpruned = prune(model, threshold=math.inf)
    return RunResult(
        summary=summary(model),
        test=evaluate(pruned, data.test) if data.test is not None else None,
        test_before_pruning=evaluate(unpruned, data.test) if data.test is not None else None,
        elbo=bound,
        beta=history[-1].beta,
        training_seconds=sum(metrics.seconds for metrics in history),
        paper=models.PAPER.get((config.model, config.data)),
    )


def describe(result: RunResult) -> str:
    """The result in two lines, beside the paper's where there is one."""
    weighed = f"β ended at {result.beta:.3g}" if result.beta else "trained without noise"
    if result.elbo is not None:
        weighed = f"variational bound {result.elbo:,.0f} nats"
    lines = [f"trained in {result.training_seconds / 60:.1f} min; {weighed}"]
    left = result.summary
    ours = f"ours: {times(left.ratio)} fewer weights ({times(left.whole_ratio)} counting every parameter)"
    if result.test and result.test.error is not None:
        ours += f" at {result.test.error:.2f} % test error"
    elif result.test:
        ours += f" at a test loss of {result.test.loss:.4f}"
    if result.test_before_pruning and result.test_before_pruning.error is not None:
        lines[0] += f"; test error before pruning {result.test_before_pruning.error:.2f} %"
    if result.paper:
        ours += f" (paper: {result.paper[0]:g}× at {result.paper[1]} %)"
    return "\n".join([*lines, ours])


def _taught(config: RunConfig) -> dict[str, Any] | None:
    if config.teacher is None:
        return None
    return {"path": str(config.teacher), "temperature": config.temperature, "weight": config.teacher_weight}


def _as_dict(config: RunConfig, result: RunResult) -> dict[str, Any]:
    then = TrainingFolder(config.out, {}).settings_then()
    chosen = {name: then[name] for name in CHOSEN if name in then}  # the rates that were really taken
    return {
        "model": config.model,
        "data": config.data,
        "config": asdict(config.fit) | chosen,
        "teacher": _taught(config),
        "threshold": config.threshold if math.isfinite(config.threshold) else str(config.threshold),
        "ratio": result.summary.ratio if result.summary.kept else None,
        "test_error": result.test.error if result.test else None,
        "test_error_before_pruning": result.test_before_pruning.error if result.test_before_pruning else None,
        "elbo": result.elbo,
        "beta": result.beta,
        "budget": budget.limits() if (budget := _budget(config)) else None,
        "training_seconds": result.training_seconds,
        "summary": result.summary.as_dict(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
