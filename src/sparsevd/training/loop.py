"""The training loop: Adam on the variational bound, with exact resume. What the recipe asks for is in `schedule`.

Read `Loop.run` from top to bottom. All randomness of an epoch comes from (seed, epoch), so a checkpoint between epochs
needs no generator state; one inside an epoch, as Ctrl-C leaves it, keeps it and the number of batches already seen.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.posterior import is_noisy, required_posteriors
from sparsevd.reporting.diagnosis import BEFORE_A_RUN, WITH_A_BUDGET, Course, diagnose
from sparsevd.reporting.summary import summary
from sparsevd.training import course, generator, start, threads
from sparsevd.training.budget import Budget, cut_at
from sparsevd.training.data import Batch, Data, batches
from sparsevd.training.evaluation import Loss, Metric, bound_on, evaluate, wrong
from sparsevd.training.folder import State, TrainingFolder
from sparsevd.training.gaussian import Gaussian
from sparsevd.training.history import EpochMetrics
from sparsevd.training.inputs import Forward, call
from sparsevd.training.interruption import interruptible
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.progress import Callback, Moment, display
from sparsevd.training.recipes import FitConfig
from sparsevd.training.schedule import Schedule, choose_variance
from sparsevd.training.task import Task
from sparsevd.training.teacher import TEMPERATURE, WEIGHT, Teacher
from sparsevd.training.zeros import Zeros

# The bound before and after dropping weights is measured on this many batches.
BATCHES_FOR_BOUND = 10
# Then it shows whether the threads get on beside what else the machine does.
STEPS_BEFORE_LOOKING = 20
# A share of zeros that does not come about by chance.
WORTH_A_WORD = 0.001


def fit(
    model: nn.Module,
    train: Data,
    val: Data | None = None,
    config: FitConfig | None = None,
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward = call,
    metric: Metric | None = None,
    teacher: nn.Module | Tensor | None = None,
    temperature: float = TEMPERATURE,
    teacher_weight: float = WEIGHT,
    n_train: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    budget: Budget | None = None,
) -> list[EpochMetrics]:
    """Train a Sparse VD network in place, and return the metrics of every epoch.

        history = sparsevd.fit(model, (x, y), (x_val, y_val), sparsevd.FitConfig(epochs=40))
        history = sparsevd.fit(model, (x, y), (x_val, y_val), budget=sparsevd.Budget(max_error_increase=0.5))

    Args:
        model: the result of `sparsevd.sparsify`.
        train: a pair (x, y) of tensors or numpy arrays, where x may be a tuple or a dict of them; a Dataset; or a
            DataLoader (which keeps its own batch size and order). A batch may also be a dict with "labels" in it.
        val: data to watch, in the same forms, or None.
        config: the recipe; its defaults are good ones.
        loss: mean negative log-likelihood of a batch, cross-entropy unless given: `sparsevd.Gaussian()` for numbers,
            `sparsevd.Bernoulli()` for several labels per example, or a function of yours of output and target.
        forward: how to call the model, (model, inputs) → output. Unless given, model(x), model(*x) or model(**x).
        metric: a number to watch on `val` beside loss and error: the mean over a batch, of the output and the target.
        teacher: a classifier to learn from beside the labels: a network, which sees each batch as the model does, or
            its logits, one row per example of a pair (x, y). The loss that is shown stays that of the labels.
        temperature: what both networks' logits are divided by in the teacher's term.
        teacher_weight: the weight of that term; the labels have the rest.
        n_train: N, where the data cannot say it (an iterable of unknown length).
        run_dir: a folder for checkpoint.safetensors and metrics.jsonl, written after each epoch. It is locked for the
            time of the training (not on Windows): a second one in it is refused.
        resume: go on from the checkpoint in run_dir, if there is one, to the very result of an unbroken run (on the
            CPU, for data whose randomness comes from torch's global generator alone).
        progress: show a bar on a terminal, or a line per epoch elsewhere.
        callbacks: told about every step and every epoch; see `sparsevd.training.progress.Callback`.
        budget: what may be lost, or must be reached: the weight of the KL follows it, and the sparsest state that
            keeps to it is what is left at the end. It is measured on `val`, or on a part of `train` that is held out,
            against its reference or the network at its start.
    """
    required_posteriors(model)  # says so if there are none
    config = config or FitConfig()
    if config.weight_decay:
        raise ArgumentError(f"weight_decay={config.weight_decay} is for fit_dense; in Sparse VD the KL takes its place")
    if budget is not None and not isinstance(budget, Budget):
        raise ArgumentError(f"budget={budget!r} must be a sparsevd.Budget, such as Budget(max_error_increase=0.5)")
    if budget is not None and budget.measures and val is None:
        train, val = start.held_out(train, config.seed)
    taught = Teacher(teacher, temperature, teacher_weight) if teacher is not None else None
    task = Task(model, train, val, config, loss, forward, metric, n_train, taught)
    return Loop(task, run_dir, callbacks, budget).run(resume, progress)


def fit_dense(
    model: nn.Module,
    train: Data,
    val: Data | None = None,
    config: FitConfig | None = None,
    *,
    loss: Loss = F.cross_entropy,
    forward: Forward = call,
    metric: Metric | None = None,
    n_train: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    keep_zeros: bool = True,
) -> list[EpochMetrics]:
    """The same loop on the plain likelihood, for a pre-trained start, a dense baseline, or what pruning has left.

    Arguments as for `fit`. Weights that are zero at the start stay zero, and it says so, unless keep_zeros=False; a
    tensor of nothing but zeros may learn, since some layers begin so.
    """
    if is_noisy(model):
        raise ArgumentError("fit_dense trains a plain network; this one has Sparse VD layers, which fit trains")
    task = Task(model, train, val, config or FitConfig(), loss, forward, metric, n_train)
    zeros = (lambda model: Zeros(model, whole=False)) if keep_zeros else None
    return Loop(task, run_dir, callbacks, zeros=zeros).run(resume, progress)


class Loop:
    """One training: the network, its optimizer and schedule, and how far they are."""

    def __init__(
        self,
        task: Task,
        run_dir: str | Path | None,
        callbacks: Iterable[Callback],
        budget: Budget | None = None,
        zeros: Callable[[nn.Module], Zeros] | None = None,
    ):
        self._find_zeros, self._zeros = zeros, Zeros(nn.Module())
        self.task, self.model, self.config, self._budget = task, task.model, task.config, budget
        if not isinstance(callbacks, Iterable) or not all(isinstance(each, Callback) for each in callbacks):
            raise ArgumentError("callbacks must be a list of sparsevd.training.progress.Callback")
        self._callbacks = list(callbacks)
        self.folder = TrainingFolder(run_dir, {})
        self.state = State()
        self._last: EpochMetrics | None = None
        self._begun = False  # the first step of this process was taken

    def run(self, resume: bool, show: bool) -> list[EpochMetrics]:
        """All epochs that are left."""
        with (
            self.folder.locked(),
            display(show) as shown,
            self.task.in_memory_format(),
            generator.reserved(self.task.device),
            interruptible() as self._interrupt,
        ):
            self._callbacks.insert(0, shown)
            self._say = shown.say
            if not resume:
                self.folder.refuse_to_overwrite()  # before the network is changed
            self._choose(resume)
            run = course.begun(self.task, self.schedule) if self.schedule.posteriors else None
            if self.task.teacher is not None:
                self._say(f"taught by {self.task.teacher}")
            rng = self._begin(resume)
            if self.state.epoch < self.config.epochs:
                self._remark(run)
            while self.state.epoch < self.config.epochs:
                begun = time.monotonic() - self.state.seconds
                first = self._epoch(rng)
                rng = None
                if self._interrupt.is_set():
                    self._stop(begun)
                self._finish_epoch(first, begun)
            self._remark(run, at_end=True)
        self.model.eval()
        return list(self.state.history)

    def _choose(self, resume: bool) -> None:
        """The recipe for this network, as it is at its start, and what follows it."""
        then = self.folder.settings_then() if resume and self.config.learning_rate is None else {}
        if then:  # as it was chosen then; what else differs is noticed when the run is restored
            chosen_then: dict[str, Any] = {name: then.get(name) for name in start.CHOSEN}
            self.config = replace(self.config, **chosen_then)
        else:
            chosen = start.begin(self.task, self.config, self._budget)
            self.config = chosen.config
            if self._budget is not None and not resume:
                start.check_reference(self._budget, chosen, self.task.val)
            if chosen.text:
                self._say(chosen.text)
        config, task = self.config, self.task
        settings = {**asdict(config), "n_train": task.n, "budget": None, **task.settings()}
        judge = None
        if self._budget is not None:
            settings["budget"] = str(self._budget)
            if self._budget.measures and task.val is not None:
                with cut_at(self.model, math.inf):  # the network at its start, as it was before it had noise
                    judge = self._budget.judge(self.model, task.val, task.loss, task.forward, strict=True)
                if remark := judge.remark():
                    self._say(f"note: {remark}")
        self.folder.settings = settings
        rate = config.rate(0.0)
        self.optimizer = BoundAdam(self.model, rate, beta2=config.adam_beta2, weight_decay=config.weight_decay)
        self.schedule = Schedule(self.model, config, task.n, self._budget, judge)

    def _remark(self, run: Course | None, at_end: bool = False) -> None:
        """What there is to say of a run of Sparse VD, before its first step or after its last."""
        remarks: list[str] = []
        if run and at_end:
            found = replace(summary(self.model), course=course.ended(run, self.state.history))
            remarks = diagnose(found, WITH_A_BUDGET if self._budget else None)
        elif run:
            remarks = diagnose(replace(run.start, course=run), BEFORE_A_RUN)
        for callback in self._callbacks:
            (callback.on_end if at_end else callback.on_begin)(remarks)

    def _begin(self, resume: bool) -> Tensor | None:
        """The state to start from; inside an epoch also that of the generator."""
        rng = None
        if resume:
            self.state, rng = self.folder.restore(self.model, self.optimizer, self.schedule, self.task.loss)
        self._last = self.state.history[-1] if self.state.history else None
        if self.state.bfloat16 is None:  # a run that goes on elsewhere computes as it began
            self.state.bfloat16 = self.task.device.type == "cpu" and multiplies_bfloat16()
        choose_variance(self.schedule.posteriors, self.config.variance_dtype, self.state.bfloat16)
        if self._find_zeros is not None:
            self._zeros = self._find_zeros(self.model)
            if self._zeros.share > WORTH_A_WORD:
                self._say(f"{100 * self._zeros.share:.1f} % of the weights are zero and stay so")
        return rng

    def _epoch(self, rng: Tensor | None) -> list[Batch]:
        """The steps of an epoch that are left; gives its first batches."""
        generator.seed_epoch(self.config.seed, self.state.epoch)
        self.model.train()
        for module in self.task.in_eval_mode:
            module.training = False
        first: list[Batch] = []
        remaining = _keeping(first, batches(self.task.train, self.config.batch_size, shuffle=True))
        if rng is not None:  # pass over what an interrupted epoch has done, then draw on from where it was
            self._pass_over(remaining)
            torch.set_rng_state(rng)
        with self.schedule.epoch(self.optimizer):
            parameters = list(self.model.parameters())
            for batch in remaining:
                self._step(batch, parameters)
                if self._interrupt.is_set():
                    break
                if self.state.batch == STEPS_BEFORE_LOOKING:
                    threads.warn_if_they_spin()
        return first

    def _step(self, batch: Batch, parameters: list[nn.Parameter]) -> None:
        batch = self.task.placed(batch)
        x, y = batch
        if not self._begun:
            self.optimizer.units = self.task.units(batch, begun=self.state.epoch > 0 or self.state.batch > 0)
            self._begun = True
        phase = self.schedule.at(self.progress)
        self.optimizer.set_learning_rate(self.config.rate(self.progress) * phase.rate_factor, phase.noise_ratio)
        self.optimizer.kl_weight = phase.kl_weight
        if self._budget is not None:
            for posterior in self.schedule.posteriors:
                posterior.layer.training = phase.noisy

        output = self.task.forward(self.model, x)
        nll = self.task.loss(output, y)
        teacher = self.task.teacher
        objective = nll if teacher is None else teacher.mixed(nll, output, batch, self.task.forward)
        for parameter in parameters:
            parameter.grad = None
        objective.backward()  # type: ignore[no-untyped-call]
        value = nll.item()
        if not math.isfinite(value) or not (objective is nll or objective.isfinite()):
            self._diverged(objective.item())
        self.optimizer.step()
        self.schedule.keep_zeros()
        self._zeros.put_back()

        self.state.add(value, wrong(output, y, self.task.loss), len(y))
        if self.progress < 1:
            self.schedule.look(self.progress, self.optimizer)
        moment = self._moment()
        for callback in self._callbacks:
            callback.on_step(moment)

    def _finish_epoch(self, first: list[Batch], begun: float) -> None:
        """After the last step of an epoch: measure, drop what is superfluous, write it all down."""
        state = self.state
        if state.seen == 0:
            raise ArgumentError(f"train gave no batch in epoch {state.epoch + 1}")
        self._check_parameters()
        done = (state.epoch + 1) / self.config.epochs
        if done == 1:
            self.schedule.look(done, self.optimizer)
            ended = self.schedule.finish()
        metrics = self._metrics(done)
        if self.schedule.drops_at(done):
            before = self._bound_on(first)
            dropped = self.schedule.drop(done)
            metrics = replace(metrics, dropped=dropped, elbo_before_drop=before, elbo_after_drop=self._bound_on(first))
        metrics = replace(metrics, seconds=time.monotonic() - begun)
        self._last = metrics
        self.state = State(epoch=state.epoch + 1, history=state.history.add(metrics), bfloat16=state.bfloat16)
        self.folder.save(self.model, self.optimizer, self.state, schedule=self.schedule, loss=self.task.loss)
        for callback in self._callbacks:
            callback.on_epoch(self._moment())
        if done == 1 and ended:
            self._say(ended)
        threads.warn_if_they_spin()
        if self._interrupt.is_set():
            raise KeyboardInterrupt

    def _stop(self, begun: float) -> None:
        """Ctrl-C came inside an epoch: save what is needed to go on with the very next batch."""
        self._check_parameters()
        self.state.seconds = time.monotonic() - begun
        self.folder.save(self.model, self.optimizer, self.state, torch.get_rng_state(), self.schedule, self.task.loss)
        raise KeyboardInterrupt

    def _pass_over(self, remaining: Iterator[Batch]) -> None:
        passed = sum(1 for _ in islice(remaining, self.state.batch))
        if passed < self.state.batch:
            raise CheckpointError(
                f"the run was interrupted after batch {self.state.batch}, but an epoch of train has only {passed}; "
                "resume it with the data that it began with"
            )

    @property
    def progress(self) -> float:
        """The part of the run that is over, from 0 to 1."""
        return (self.state.epoch + min(1.0, self.state.seen / self.task.per_epoch)) / self.config.epochs

    @torch.no_grad()
    def _metrics(self, done: float) -> EpochMetrics:
        task, state = self.task, self.state
        train_loss = state.loss / state.seen
        left = self.schedule.report() if self.schedule.posteriors else None
        held_out = None
        if task.val is not None:
            held_out = evaluate(self.model, task.val, task.loss, forward=task.forward, metric=task.metric)
        return EpochMetrics(
            epoch=state.epoch + 1,
            learning_rate=self.config.rate(done),
            beta=self.schedule.beta(done),
            train_loss=train_loss,
            train_error=100 * state.wrong / state.seen if state.wrong is not None else None,
            kl=left["kl"] if left else None,
            elbo=-(task.n * train_loss + left["kl"]) if left and self._budget is None else None,
            sparsity=left["sparsity"] if left else None,
            ratio=left["ratio"] if left and math.isfinite(left["ratio"]) else None,
            val_loss=held_out.loss if held_out else None,
            val_error=held_out.error if held_out else None,
            seconds=0.0,
            alive={each.label: each.inputs_and_units() for each in self.schedule.posteriors} if left else None,
            val_metric=held_out.metric if held_out else None,
            train_r2=task.loss.r2 if isinstance(task.loss, Gaussian) else None,
            val_r2=held_out.r2 if held_out else None,
            val_perplexity=held_out.perplexity if held_out else None,
        )

    def _bound_on(self, data: list[Batch]) -> float:
        """The bound from a few batches, with the same noise each time."""
        torch.manual_seed(self.config.seed)
        return bound_on(self.model, _together(data), self.task.loss, self.task.n, self.task.forward)

    def _moment(self) -> Moment:
        state, config = self.state, self.config
        epoch = min(state.epoch + (state.seen > 0), config.epochs)
        text = f"epoch {epoch}/{config.epochs}  {self._figures()}".rstrip()
        return Moment(self.progress, epoch, state.batch, text, self._last)

    def _figures(self) -> str:
        """The state in a line, e.g. "loss 0.213  train error 6.10 %  7.4× fewer weights"."""
        state = self.state
        last = self._last
        loss = state.loss / state.seen if state.seen else last.train_loss if last else None
        missed = 100 * state.wrong / state.seen if state.seen and state.wrong is not None else None
        if not state.seen and last:
            missed = last.train_error
        figures = [
            ("loss {:.3f}", loss),
            ("train error {:.2f} %", missed),
            ("train R² {:.3f}", last.train_r2 if last else None),
            ("validation error {:.2f} %", last.val_error if last else None),
            ("validation R² {:.3f}", last.val_r2 if last else None),
            ("validation perplexity {:.2f}", last.val_perplexity if last else None),
            (f"{_name(self.task.metric)} {{:.4g}}", last.val_metric if last else None),
            ("{:.1f}× fewer weights", last.ratio if last else None),
            ("β {:.3g}", self.schedule.beta(self.progress) if self._budget else None),
        ]
        return "  ".join(text.format(value) for text, value in figures if value is not None)

    def _diverged(self, loss: float) -> None:
        """The loss shows what went wrong in this step, or in the previous one, whose gradients are not checked."""
        bad = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        where = f"{', '.join(bad)} not finite since the step before" if bad else "every parameter is finite yet"
        raise DivergenceError(
            f"training diverged in epoch {self.state.epoch + 1}, batch {self.state.batch + 1}: the loss is {loss}, "
            f"{where}. {self.folder.last_good()} Lower the learning rate, or look for NaN in the data"
        )

    def _check_parameters(self) -> None:
        """The last step of an epoch has no next loss to show that it went wrong; no bad checkpoint is ever written."""
        bad = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        if bad:
            raise DivergenceError(
                f"training diverged in epoch {self.state.epoch + 1}: {', '.join(bad)} not finite. "
                f"{self.folder.last_good()} Lower the learning rate"
            )


def _name(metric: Metric | None) -> str:
    return str(getattr(metric, "__name__", "metric")).replace("_", " ")


def _together(data: list[Batch]) -> list[Batch]:
    """Batches of tensors of one shape as one, which is faster; others, such as texts padded each, as they are."""
    shapes = {tuple(x.shape[1:]) if isinstance(x, Tensor) else None for x, _ in data}
    if len(shapes) > 1 or None in shapes:
        return data
    return [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]


def _keeping(first: list[Batch], data: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; those that the bound will be measured on are kept as they pass."""
    for batch in data:
        if len(first) < BATCHES_FOR_BOUND:
            first.append(batch)
        yield batch
