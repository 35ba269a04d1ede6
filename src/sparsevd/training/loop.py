"""The training loop: Adam on the variational bound, with exact resume. What the recipe asks for is in `schedule`.

Read `Loop.run` from top to bottom. All randomness of an epoch comes from (seed, epoch), so a checkpoint between epochs
needs no generator state; one inside an epoch, as Ctrl-C leaves it, keeps it and the number of batches already seen.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError, SparseVDWarning
from sparsevd.layers.modes import noise_restored
from sparsevd.layers.recurrent import one_sample, recurrent_layers
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.layers.watched_use import Watch
from sparsevd.posterior import is_noisy, noisy_modules, required_posteriors, switch_noise
from sparsevd.reporting.diagnosis import BEFORE_A_RUN, WITH_A_BUDGET, Course, diagnose
from sparsevd.reporting.summary import summary
from sparsevd.training import course, first_look, generator, processes, start, tally, threads
from sparsevd.training.averaging import Averaging
from sparsevd.training.budget import Budget, cut_at
from sparsevd.training.data import Batch, Data, Share, shares, split_by_process
from sparsevd.training.evaluation import Loss, Metric, bound_on, evaluate, wrong
from sparsevd.training.folder import State, TrainingFolder
from sparsevd.training.gaussian import Gaussian
from sparsevd.training.history import EpochMetrics
from sparsevd.training.inputs import Forward, call, in_bfloat16
from sparsevd.training.interruption import interruptible
from sparsevd.training.likelihood import Likelihood
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.processes import Alone
from sparsevd.training.progress import Callback, Moment, Silence, display
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
        n_train: N, where the data cannot say it (an iterable of unknown length): what the mean of the loss is over, in
            the whole training set. Of texts and images with a class for each token or pixel these are the targets; in a
            pair (x, y) they are counted.
        run_dir: a folder for checkpoint.safetensors and metrics.jsonl, written after each epoch. It is locked for the
            time of the training (not on Windows): a second one in it is refused.
        resume: go on from the checkpoint in run_dir, if there is one, to the very result of an unbroken run (on the
            CPU, for data whose randomness comes from torch's global generator alone).
        progress: show a bar on a terminal, or a line per epoch elsewhere.
        callbacks: told about every step and every epoch; see `sparsevd.training.progress.Callback`.
        budget: what may be lost, or must be reached: the weight of the KL follows it, and the sparsest state that
            keeps to it is what is left at the end. It is measured on `val`, or on a part of `train` that is held out,
            against its reference or the network at its start.

    On several processes, as torchrun starts them, each calls this with the same arguments and takes its part of every
    batch. Process 0 writes and shows; every one has the network, the history and its own callbacks.
    """
    with processes.joined() as team:
        with team.together():
            required_posteriors(model)  # says so if there are none
            config = config or FitConfig()
            if config.weight_decay:
                raise ArgumentError(
                    f"weight_decay={config.weight_decay} is for fit_dense; in Sparse VD the KL takes its place"
                )
            if budget is not None and not isinstance(budget, Budget):
                raise ArgumentError(
                    f"budget={budget!r} must be a sparsevd.Budget, such as Budget(max_error_increase=0.5)"
                )
            start.check_noise(config.noise, budget)
            if budget is not None and budget.measures and val is None:
                train, val = start.held_out(train, config.seed)
            taught = Teacher(teacher, temperature, teacher_weight) if teacher is not None else None
            task = Task(model, train, val, config, loss, forward, metric, n_train, taught)
            loop = Loop(task, run_dir, callbacks, budget, team)
        return loop.run(resume, progress)


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
    with processes.joined() as team:
        with team.together():
            if is_noisy(model):
                raise ArgumentError("fit_dense trains a plain network; this one has Sparse VD layers, which fit trains")
            task = Task(model, train, val, config or FitConfig(), loss, forward, metric, n_train)
            zeros = (lambda model: Zeros(model, whole=False)) if keep_zeros else None
            loop = Loop(task, run_dir, callbacks, team=team, zeros=zeros)
        return loop.run(resume, progress)


class Loop:
    """One training: the network, its optimizer and schedule, and how far they are."""

    def __init__(
        self,
        task: Task,
        run_dir: str | Path | None,
        callbacks: Iterable[Callback],
        budget: Budget | None = None,
        team: Alone | None = None,
        zeros: Callable[[nn.Module], Zeros] | None = None,
    ):
        self._find_zeros, self._zeros = zeros, Zeros(nn.Module())
        self.task, self.model, self.config, self._budget = task, task.model, task.config, budget
        self.team = team or Alone()
        _check_samplers(task, self.team)
        if not isinstance(callbacks, Iterable) or not all(isinstance(each, Callback) for each in callbacks):
            raise ArgumentError("callbacks must be a list of sparsevd.training.progress.Callback")
        self._callbacks = list(callbacks)
        self.folder = TrainingFolder(run_dir, {}, writes=self.team.main)
        self.team.last_good = self.folder.last_good
        self.state = State()
        self._last: EpochMetrics | None = None
        self._begun = False  # the first step of this process was taken
        self._looked = not is_noisy(self.model)  # at a pass, for weights that are read outside of their layer
        # Of a step; what is measured, a budget above all, is float32 in any case.
        self._forward = in_bfloat16(task.forward, task.device.type) if task.config.autocast else task.forward
        self._averaging = Averaging(task.called, self._forward) if self.team.size > 1 else None
        self._noisy = True  # in the last step
        self._recurrent = bool(recurrent_layers(self.model))  # asked once: small networks take many steps
        self._heard = False  # that one of several processes was interrupted

    def run(self, resume: bool, show: bool) -> list[EpochMetrics]:
        """All epochs that are left."""
        with (
            self._holding_the_folder(resume),
            display(show) if self.team.main else Silence() as shown,
            self.task.in_memory_format(),
            generator.reserved(self.task.device),
            interruptible(terminated=self.team.size > 1) as self._interrupt,
            closing(self._averaging) if self._averaging is not None else nullcontext(),
            noise_restored(self.model),  # a budget may end without, or be interrupted
        ):
            self._callbacks.insert(0, shown)
            self._say = shown.say
            self.team.same_network(self.model)
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
                if self._told_to_stop():
                    self._stop(begun)
                self._finish_epoch(first, begun)
            self._remark(run, at_end=True)
        self.model.eval()
        return list(self.state.history)

    @contextmanager
    def _holding_the_folder(self, resume: bool) -> Iterator[None]:
        with ExitStack() as held:
            with self.team.together():
                held.enter_context(self.folder.locked())
                if not resume:
                    self.folder.refuse_to_overwrite()  # before the network is changed
            yield

    def _choose(self, resume: bool) -> None:
        """The recipe for this network, as it is at its start, and what follows it."""
        then = self.folder.settings_then() if resume else {}
        names = [*(start.RATES if self.config.learning_rate is None else ())]
        names += [name for name in ("noise", "held") if getattr(self.config, name) is None]
        if then:  # as it was chosen then; what else differs is noticed when the run is restored
            chosen_then: dict[str, Any] = {name: then.get(name) for name in names}
            try:
                self.config = replace(self.config, **chosen_then)
            except ArgumentError as error:
                raise self.folder.damaged(f"its settings are none: {error}") from error
        else:
            with self.team.together():
                chosen = start.begin(self.task, self.config, self._budget, self._say)
                self.config = chosen.config
                if self._budget is not None and not resume:
                    start.check_reference(self._budget, chosen, self.task.val)
            if chosen.text:
                self._say(chosen.text)
        self._choose_the_same()
        if not then:
            self.config = start.holding(self.config, self._budget)
        config, task = self.config, self.task
        settings = {**asdict(config), "n_train": task.n, "budget": None, **task.settings()}
        judge = None
        if self._budget is not None:
            settings["budget"] = str(self._budget)
            if self._budget.measures and task.val is not None:
                with cut_at(self.model, math.inf):  # the network at its start, as it was before it had noise
                    steady = config.noise is False
                    judge = self._budget.judge(
                        self.model,
                        task.val,
                        task.loss,
                        task.forward,
                        strict=True,
                        steady=steady,
                        agreed=self.team.agreed,
                    )
                if remark := judge.remark():
                    self._say(f"note: {remark}")
        self.folder.settings = settings
        self.team.same_text("the settings", str(settings))
        rate = config.rate(0.0)
        self.optimizer = BoundAdam(self.model, rate, beta2=config.adam_beta2, weight_decay=config.weight_decay)
        if self.team.size > 1 and config.contract:
            config = replace(config, contract=False)  # gradients of other shapes could not be averaged
            if is_noisy(self.model):
                self._say(
                    f"{self.team.size} processes: each takes its part of a batch; inputs and units without weights "
                    "stay in the computation (no contraction)"
                )
        read = None
        if self._budget is not None and not then:  # else the weight of the KL is known
            read = self.team.agreed([start.weights_read(task, config) or 0.0])[0] or None
        self.schedule = Schedule(self.model, config, task.n, self._budget, judge, read)

    def _choose_the_same(self) -> None:
        """What the first process has chosen, on all: with data of their own, others may have chosen otherwise."""
        if self.team.size == 1:
            return
        rates = [getattr(self.config, name) for name in start.CHOSEN]
        rates = self.team.agreed([math.nan if rate is None else rate for rate in rates])
        chosen: dict[str, Any] = {
            name: None if math.isnan(rate) else bool(rate) if name == "noise" else rate
            for name, rate in zip(start.CHOSEN, rates, strict=True)
        }
        self.config = replace(self.config, **chosen)
        self.team.share(self.model.parameters())  # the first noise

    def _remark(self, run: Course | None, at_end: bool = False) -> None:
        """What there is to say of a run of Sparse VD, before its first step or after its last."""
        remarks: list[str] = []
        if run and at_end:
            found = replace(summary(self.model), course=course.ended(run, self.state.history))
            remarks = diagnose(found, WITH_A_BUDGET if self._budget else None)
        elif run and self.config.noise is not False:  # they are about the noise
            remarks = diagnose(replace(run.start, course=run), BEFORE_A_RUN)
        for callback in self._callbacks:
            (callback.on_end if at_end else callback.on_begin)(remarks)

    def _begin(self, resume: bool) -> Tensor | None:
        """The state to start from; inside an epoch also that of the generator."""
        rng = None
        if resume:
            with self.team.together():
                self.state, rng = self.folder.restore(self.model, self.optimizer, self.schedule, self.task.loss)
            self.team.same_text(f"what is in {self.folder.path}", f"{self.state.epoch} {self.state.batch}")
        if self.state.epoch == 0 and self.state.batch == 0:
            self.schedule.begin()
        self._last = self.state.history[-1] if self.state.history else None
        if self.state.bfloat16 is None:  # a run that goes on elsewhere computes as it began
            bfloat16 = self.task.device.type == "cpu" and multiplies_bfloat16()
            self.state.bfloat16 = bool(self.team.agreed([bfloat16])[0])
        if self.config.autocast and self.task.device.type == "cpu" and not multiplies_bfloat16():
            self._say("note: this CPU has no instructions for bfloat16, so autocast makes training slower here")
        switch_noise(self.model, True)  # whatever another run has left
        choose_variance(self.model, self.config.variance_dtype, self.state.bfloat16)
        if self.config.autocast and any(
            layer.variance_dtype is torch.float32 for layer in noisy_modules(self.model).values()
        ):
            raise ArgumentError(
                "variance_dtype=float32 and autocast=True contradict each other: autocast computes the variance "
                "product in bfloat16 too; leave one of them out"
            )
        if self._find_zeros is not None:
            self._zeros = self._find_zeros(self.model)
            if self._zeros.share > WORTH_A_WORD:
                self._say(f"{100 * self._zeros.share:.1f} % of the weights are zero and stay so")
        return rng

    def _epoch(self, rng: Tensor | None) -> list[Share]:
        """The steps of an epoch that are left; gives its first batches."""
        generator.seed_epoch(self.config.seed, self.state.epoch)
        if self._averaging is not None:
            self._averaging.begin_anew()
            if (sampler := split_by_process(self.task.train)) is not None:
                sampler.set_epoch(self.state.epoch)
        self.model.train()
        for module in self.task.in_eval_mode:
            module.training = False
        first: list[Share] = []
        given = shares(self.task.train, self.config.batch_size, self.team, shuffle=True)
        remaining = _keeping(first, given)
        if rng is not None:  # pass over what an interrupted epoch has done, then draw on from where it was
            self._pass_over(remaining)
            torch.set_rng_state(rng)
            self._seed_noise()
        if not self._looked and (self.schedule.makes_smaller() or first_look.holds_compiled(self.task.called)):
            remaining = self._looked_at(remaining)
        with self.schedule.epoch(self.optimizer):
            parameters = list(self.model.parameters())
            for share in remaining:
                if self.state.batch == 0:  # the order is drawn; the noise is each process's own
                    self._seed_noise()
                self._step(share, parameters)
                self._seed_noise()  # a run that is resumed here draws the same
                if self._told_to_stop():
                    break
                if self.state.batch == STEPS_BEFORE_LOOKING:
                    threads.warn_if_they_spin()
            else:
                if not tally.all_have_ended(self.team):
                    raise ArgumentError(
                        f"process {self.team.rank} has got {self.state.batch} batches in epoch {self.state.epoch + 1}, "
                        "and another one more; give every process as many"
                    )
        return first

    def _looked_at(self, given: Iterator[Share]) -> Iterator[Share]:
        """The same batches, after a look at a pass of the first one, where the pass of its step would come too late."""
        first = list(islice(given, 1))
        inputs = [self.task.placed(share.batch)[0] for share in first]
        seen = first_look.watched_by_itself(self.model, self._forward, inputs, self.task.device)
        if text := first_look.mark(self.model, seen):
            warnings.warn(text, SparseVDWarning, stacklevel=5)
        self._looked = bool(first)
        return chain(first, given)

    def _seed_noise(self) -> None:
        self.team.seed_noise(self.config.seed, self.state.epoch, self.state.batch)

    def _told_to_stop(self) -> bool:
        """Ctrl-C came; of several processes, all have heard of it with the last step."""
        return self._interrupt.is_set() if self.team.size == 1 else self._heard

    def _step(self, share: Share, parameters: list[nn.Parameter]) -> None:
        batch = self.task.placed(share.batch)
        x, y = batch
        if not self._begun:
            begun = self.state.epoch > 0 or self.state.batch > 0
            self.optimizer.units = self.task.units(self.team.same_batch(batch), begun=begun, processes=self.team.size)
            self._begun = True
        phase = self.schedule.at(self.progress)
        self.optimizer.set_learning_rate(self.config.rate(self.progress) * phase.rate_factor, phase.noise_ratio)
        self.optimizer.kl_weight = phase.kl_weight
        if self._budget is not None:
            if phase.noisy != self._noisy:
                switch_noise(self.model, phase.noisy)
            if self._averaging is not None and phase.noisy != self._noisy:
                self._averaging.begin_anew()  # without noise log σ² has no gradient
            self._noisy = phase.noisy

        with one_sample(self.model) if self._recurrent else nullcontext():
            output = self._output(x)
            nll = self.task.loss(output, y)
            teacher = self.task.teacher
            objective = nll if teacher is None else teacher.mixed(nll, output, batch, self._forward)
            for parameter in parameters:
                parameter.grad = None
            counted = tally.count(
                self.team,
                nll,
                objective,
                lambda: wrong(output, y, self.task.loss),
                share.examples,
                self._interrupt.is_set,
            )
            weight = share.weight(self.team.size)
            (objective if weight == 1 else weight * objective).backward()  # type: ignore[no-untyped-call]
        if self._averaging is not None:
            self._averaging.finish()
        found = counted()
        if not math.isfinite(found.loss) or not found.finite:
            value = objective.item()
            self._diverged(math.nan if math.isfinite(value) else value)  # it may be another process's
        self._heard = found.interrupted
        self.optimizer.step()
        self.schedule.keep_zeros()
        self._zeros.put_back()
        self.schedule.remember_step()
        if isinstance(self.task.loss, Likelihood):
            self.team.average(self.task.loss.running_means(), share.examples)

        self.state.add(found.loss, found.wrong, found.examples)
        if self.progress < 1:
            if self.schedule.looks_at(self.progress):
                # Else each has its own statistics of batch norm.
                self.team.share([*self.model.buffers(), *self.schedule.statistics()])
            self.schedule.look(self.progress, self.optimizer)
        moment = self._moment()
        for callback in self._callbacks:
            callback.on_step(moment)

    def _output(self, x: Any) -> Any:
        """Of a step. The first one is looked at."""
        if not self._looked:
            self._looked = True
            seen = Watch(self.model)
            with first_look.watching(seen):
                output = self._output(x)
            if text := first_look.mark(self.model, seen):
                warnings.warn(text, SparseVDWarning, stacklevel=6)
            return output
        return self._forward(self.task.called, x) if self._averaging is None else self._averaging(x)

    def _finish_epoch(self, first: list[Share], begun: float) -> None:
        """After the last step of an epoch: measure, drop what is superfluous, write it all down."""
        state = self.state
        if state.seen == 0:
            raise ArgumentError(f"train gave no batch in epoch {state.epoch + 1}")
        self._check_parameters()
        self.team.share([*self.model.buffers(), *self.schedule.statistics()])
        done = (state.epoch + 1) / self.config.epochs
        if done == 1:
            self.schedule.look(done, self.optimizer)
            ended = self.schedule.finish()
        metrics = self._metrics(done)
        if self.team.size > 1:
            first_look.agree(self.model, self.team)
        if self.schedule.drops_at(done):
            before = self._bound_on(first)
            dropped = self.schedule.drop(done)
            metrics = replace(metrics, dropped=dropped, elbo_before_drop=before, elbo_after_drop=self._bound_on(first))
        metrics = replace(metrics, seconds=time.monotonic() - begun)
        self._last = metrics
        self.state = State(epoch=state.epoch + 1, history=state.history.add(metrics), bfloat16=state.bfloat16)
        self._save()
        for callback in self._callbacks:
            callback.on_epoch(self._moment())
        if done == 1 and ended:
            self._say(ended)
        threads.warn_if_they_spin()
        if any(self.team.total([float(self._interrupt.is_set())])()):
            raise KeyboardInterrupt

    def _save(self, rng: Tensor | None = None) -> None:
        with self.team.together():
            self.folder.save(self.model, self.optimizer, self.state, rng, self.schedule, self.task.loss)

    def _stop(self, begun: float) -> None:
        """Ctrl-C came inside an epoch: save what is needed to go on with the very next batch."""
        self._check_parameters()
        self.state.seconds = time.monotonic() - begun
        self.team.share(self.model.buffers())
        self._save(torch.get_rng_state())
        raise KeyboardInterrupt

    def _pass_over(self, remaining: Iterator[Share]) -> None:
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

    def _bound_on(self, data: list[Share]) -> float:
        """The bound from a few batches, with the same noise each time."""
        torch.manual_seed(self.config.seed)
        self.team.seed_noise(self.config.seed)
        task, mine = self.task, [share for share in data if share.examples]
        if self.team.size == 1:
            return bound_on(self.model, _together(mine), task.loss, task.n, task.forward)
        examples = sum(share.examples for share in mine)
        bound = bound_on(self.model, _together(mine), task.loss, task.n, task.forward) if mine else 0.0
        total, count = self.team.total([bound * examples, examples])()
        return total / count

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
            ("β {:.3g}", (self.schedule.beta(self.progress) or None) if self._budget else None),  # none without noise
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


def _check_samplers(task: Task, team: Alone) -> None:
    """On several processes: each gets its own part of the training data, and all of what is held out."""
    if team.size == 1:
        return
    sampler = split_by_process(task.train)
    if sampler is not None and sampler.num_replicas != team.size:
        raise ArgumentError(
            f"the DistributedSampler of train is for {sampler.num_replicas} processes, and there are {team.size}"
        )
    if task.val is not None and split_by_process(task.val) is not None:
        raise ArgumentError("val has a DistributedSampler; every process must see all of it, to decide the same")


def _together(kept: list[Share]) -> list[Batch]:
    """Batches of tensors of one shape as one, which is faster; others, such as texts padded each, as they are."""
    data = [share.batch for share in kept]
    shapes = {tuple(x.shape[1:]) if isinstance(x, Tensor) else None for x, _ in data}
    if len(shapes) > 1 or None in shapes:
        return data
    return [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]


def _keeping(first: list[Share], data: Iterator[Share]) -> Iterator[Share]:
    """The same batches; those that the bound will be measured on are kept as they pass."""
    for share in data:
        if len(first) < BATCHES_FOR_BOUND:
            first.append(share)
        yield share
