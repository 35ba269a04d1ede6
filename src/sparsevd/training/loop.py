"""The training loop: Adam on the variational bound, with KL warm-up, a rate that falls to zero, and exact resume.

Read `_fit` from top to bottom. All randomness of an epoch comes from (seed, epoch), so a checkpoint between epochs
needs no generator state; one inside an epoch, as Ctrl-C leaves it, keeps it and the number of batches already seen.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError
from sparsevd.layers import SparseLayer
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.reporting.summary import summary
from sparsevd.training import generator, threads
from sparsevd.training import progress as progress_
from sparsevd.training.contraction import contracted, drop, zero_for_good
from sparsevd.training.data import Data, batches, checked, known_sizes, size
from sparsevd.training.evaluation import Loss, device_of, elbo, evaluate, wrong
from sparsevd.training.folder import RunFolder, State
from sparsevd.training.history import EpochMetrics
from sparsevd.training.objective import kl, sparse_layers, warm_up
from sparsevd.training.optimizer import BoundAdam

VARIANCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The bound before and after dropping weights is measured on this many batches.
BATCHES_FOR_BOUND = 10
# Then it shows whether the threads get on beside what else the machine does.
STEPS_BEFORE_LOOKING = 20

# What is left of the learning rate when a part of the run, from 0 to 1, is over.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class FitConfig:
    """The recipe. Only `epochs` needs a thought: the schedules are parts of the run.

    What stands beside a type is the help of the option that `sparsevd train` makes of it.

    Adam's |step| sets how small a useless weight can become, so most of the sparsity appears as the rate goes to zero;
    log σ² follows slowly, at its own rate, so that no weight is given up before it was tried; at the end it catches up.
    """

    epochs: Annotated[int, "Passes over the training set."] = 40
    batch_size: Annotated[int, "Examples per step."] = 100
    learning_rate: Annotated[float, "Adam's rate, falling to zero."] = 4e-3
    decay: Annotated[str, "How the rate falls: cosine or linear."] = "cosine"  # half a cosine; the paper's is linear
    log_sigma2_lr_ratio: Annotated[float, "Rate of log σ², relative to the learning rate."] = 0.1
    # When most is decided, log σ² catches up with the weights ...
    late_log_sigma2_lr_ratio: Annotated[float, "The same at the end of the run, where log σ² catches up."] = 3.0
    late_from: Annotated[float, "Part of the run from which it does; 1: never."] = 0.7
    # β is 0 up to the first of these parts of the run and 1 from the second on; 0 and 0 mean β = 1 from the start.
    warm_up_start: Annotated[float, "Part of the run up to which the KL has no weight."] = 0.0
    warm_up_end: Annotated[float, "Part of the run from which the KL has its full weight."] = 0.2
    # What is above the threshold is dropped for good: once β = 1, inputs and units without any weight below it ...
    drop_patience: Annotated[int, "Epochs in a row after which inputs and units without weights are dropped."] = 3
    # ... and single weights from a part of the run on, at once. 1: nothing is dropped, not even units
    drop_from: Annotated[float, "Part of the run from which pruned weights are zero for good; 1: never."] = 0.7
    contract: Annotated[bool, "Leave inputs and units without any weight out of the computation."] = True
    channels_last: Annotated[bool, "Keep images in this order in memory: faster convolutions on a CPU."] = True
    # None: as the layers have it, and where they do not say float32, or bfloat16 for large products on such a CPU.
    variance_dtype: Annotated[
        str | None, "Type of the variance product: float32 or bfloat16; else as the CPU is fast."
    ] = None
    weight_decay: float = 0.0  # of `fit_dense`, decoupled from the gradient; for `fit`, the KL is the regulariser
    # Adam's usual 0.999 remembers the early, large gradients for too long.
    adam_beta2: Annotated[float, "Decay of Adam's mean square."] = 0.99
    seed: Annotated[int, "Seed of weights, noise and order."] = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "drop_patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r} must be a positive integer")
        for name in ("learning_rate", "log_sigma2_lr_ratio", "late_log_sigma2_lr_ratio"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ArgumentError(f"{name}={value!r} must be a positive number")
        if not (isinstance(self.weight_decay, int | float) and 0 <= self.weight_decay < math.inf):
            raise ArgumentError(f"weight_decay={self.weight_decay!r} must be zero or a positive number")
        for name in ("drop_from", "late_from"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be a part of the run, from 0 to 1")
        if self.variance_dtype not in (None, *VARIANCE_DTYPES):
            raise ArgumentError(f"variance_dtype={self.variance_dtype!r} must be None, {' or '.join(VARIANCE_DTYPES)}")
        if self.decay not in DECAYS:
            raise ArgumentError(f"decay={self.decay!r} must be one of {', '.join(DECAYS)}")
        if not 0 < self.adam_beta2 < 1:
            raise ArgumentError(f"adam_beta2={self.adam_beta2!r} must lie between 0 and 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ArgumentError(f"seed={self.seed!r} must be an integer from 0 to 2³¹ − 1")
        warm_up(self.warm_up_start, self.warm_up_end)


def fit(
    model: nn.Module,
    train: Data,
    val: Data | None = None,
    config: FitConfig | None = None,
    *,
    loss: Loss = F.cross_entropy,
    n_train: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[EpochMetrics]:
    """Train a Sparse VD network in place, and return the metrics of every epoch.

        history = sparsevd.fit(model, (x, y), (x_val, y_val), sparsevd.FitConfig(epochs=40))

    Args:
        model: the result of `sparsevd.sparsify`.
        train: a pair of tensors (x, y), a Dataset, or a DataLoader (which keeps its own batch size and order).
        val: data to watch, in the same forms, or None.
        config: the recipe; its defaults are good ones.
        loss: mean negative log-likelihood of a batch, cross-entropy unless given.
        n_train: N, where the data cannot say it (an iterable of unknown length).
        run_dir: a folder for checkpoint.safetensors and metrics.jsonl, written after each epoch. It is locked for the
            time of the training (not on Windows): a second one in it is refused.
        resume: go on from the checkpoint in run_dir, if there is one, to the very result of an unbroken run (on the
            CPU, for data whose randomness comes from torch's global generator alone).
        progress: show a bar on a terminal, or a line per epoch elsewhere.
    """
    sparse_layers(model)  # says so if there are none
    config = config or FitConfig()
    if config.weight_decay:
        raise ArgumentError(f"weight_decay={config.weight_decay} is for fit_dense; in Sparse VD the KL takes its place")
    return _fit(model, train, val, config, loss, n_train, run_dir, resume, progress)


def fit_dense(
    model: nn.Module,
    train: Data,
    val: Data | None = None,
    config: FitConfig | None = None,
    *,
    loss: Loss = F.cross_entropy,
    n_train: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[EpochMetrics]:
    """The same loop on the plain likelihood, for a pre-trained start or a dense baseline. Arguments as for `fit`."""
    if any(isinstance(module, SparseLayer) for module in model.modules()):
        raise ArgumentError("fit_dense trains a plain network; this one has Sparse VD layers, which fit trains")
    return _fit(model, train, val, config or FitConfig(), loss, n_train, run_dir, resume, progress)


def _fit(
    model: nn.Module,
    train: Data,
    val: Data | None,
    config: FitConfig,
    loss: Loss,
    n_train: int | None,
    run_dir: str | Path | None,
    resume: bool,
    show_progress: bool,
) -> list[EpochMetrics]:
    train = checked(train, "train")
    val = checked(val, "val") if val is not None else None
    layers = [module for module in model.modules() if isinstance(module, SparseLayer)]
    n = number_of_examples(train, n_train)
    per_epoch = examples_per_epoch(train, n)
    device = device_of(model)
    in_memory = torch.channels_last if config.channels_last and device.type == "cpu" else torch.contiguous_format
    _set_memory_format(model, in_memory)
    optimizer = BoundAdam(model, config.learning_rate, beta2=config.adam_beta2, weight_decay=config.weight_decay)
    beta_at = warm_up(config.warm_up_start, config.warm_up_end)
    folder = RunFolder(run_dir, {**asdict(config), "n_train": n})

    with (
        folder.locked(),
        progress_.choose(show_progress) as progress,
        generator.reserved(device),
        _interruptible() as interrupt,
    ):
        if not resume:
            folder.refuse_to_overwrite()
        state, rng = folder.restore(model, optimizer) if resume else (State(), None)
        if state.bfloat16 is None:  # a run that goes on elsewhere computes as it began
            state.bfloat16 = device.type == "cpu" and multiplies_bfloat16()
        _choose_variance(layers, config.variance_dtype, state.bfloat16)
        while state.epoch < config.epochs:
            begun = time.monotonic() - state.seconds
            generator.seed_epoch(config.seed, state.epoch)
            model.train()
            first: list[tuple[Tensor, Tensor]] = []
            remaining = _keeping(first, batches(train, config.batch_size, shuffle=True))
            if rng is not None:  # pass over what an interrupted epoch has done, then draw on from where it was
                passed = sum(1 for _ in islice(remaining, state.batch))
                if passed < state.batch:
                    raise CheckpointError(
                        f"the run was interrupted after batch {state.batch}, but an epoch of train has only {passed}; "
                        "resume it with the data that it began with"
                    )
                torch.set_rng_state(rng)
                rng = None
            with contracted(model, layers, optimizer) if config.contract else nullcontext():
                dropped = zero_for_good(layers)
                parameters = list(model.parameters())
                for x, y in remaining:
                    x, y = x.to(device), y.to(device)
                    if x.ndim == 4:
                        x = x.to(memory_format=in_memory)
                    done = (state.epoch + min(1.0, state.seen / per_epoch)) / config.epochs
                    late = done >= config.late_from
                    ratio = config.late_log_sigma2_lr_ratio if late else config.log_sigma2_lr_ratio
                    optimizer.set_learning_rate(config.learning_rate * DECAYS[config.decay](done), ratio)
                    optimizer.kl_weight = beta_at(done) / n  # mean NLL + β·KL/N: eq. 3 and 4 divided by −N

                    output = model(x)
                    nll = loss(output, y)
                    for parameter in parameters:
                        parameter.grad = None
                    nll.backward()  # type: ignore[no-untyped-call]
                    value = nll.item()
                    if not math.isfinite(value):
                        _diverged(value, model, state, folder)
                    optimizer.step()
                    for layer, alive in dropped:
                        layer.weight.data.mul_(alive)

                    state.batch += 1
                    state.seen += len(y)
                    state.loss += value * len(y)
                    missed = wrong(output, y)
                    state.wrong = state.wrong + missed if state.wrong is not None and missed is not None else None
                    done = (state.epoch + min(1.0, state.seen / per_epoch)) / config.epochs
                    progress.step(done, _describe(state, config))
                    if interrupt.is_set():
                        break
                    if state.batch == STEPS_BEFORE_LOOKING:
                        threads.warn_if_they_spin()
            if interrupt.is_set():
                _check_parameters(model, state, folder)
                state.seconds = time.monotonic() - begun
                folder.save(model, optimizer, state, torch.get_rng_state())
                raise KeyboardInterrupt
            if state.seen == 0:
                raise ArgumentError(f"train gave no batch in epoch {state.epoch + 1}")
            _check_parameters(model, state, folder)
            metrics = _epoch_metrics(model, val, loss, config, state, n)
            # Never before β has its final value: until then a large α means little.
            part = metrics.epoch / config.epochs
            if layers and config.drop_from < 1 and config.warm_up_end <= part < 1:
                bound = partial(_bound_on, model, first, loss, n, config.seed)
                before = bound()
                whole_only = part < config.drop_from
                count = drop(layers, optimizer, config.drop_patience if whole_only else 1, whole_only)
                metrics = replace(metrics, dropped=count, elbo_before_drop=before, elbo_after_drop=bound())
            metrics = replace(metrics, seconds=time.monotonic() - begun)
            state = State(epoch=state.epoch + 1, history=state.history.add(metrics), bfloat16=state.bfloat16)
            folder.save(model, optimizer, state)
            progress.epoch(_describe(state, config))
            threads.warn_if_they_spin()
            if interrupt.is_set():
                raise KeyboardInterrupt
    _set_memory_format(model, torch.contiguous_format)
    model.eval()
    return list(state.history)


def _choose_variance(layers: list[SparseLayer], dtype: str | None, bfloat16: bool) -> None:
    """The type of every layer's variance product: the one asked for, or bfloat16 where that is allowed and faster."""
    for layer in layers:
        if dtype is not None:
            layer.variance_dtype = VARIANCE_DTYPES[dtype]
        # Over five seeds bfloat16 changes neither sparsity nor error: experiments/results/lenet_300_100.json.
        layer.bfloat16_where_faster = bfloat16 and layer.log_sigma2.dtype is torch.float32


def _set_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Of everything with four dimensions: images and the filters for them.

    `to`, not `contiguous`: with one channel a tensor is both already, and only its strides tell torch which is meant.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.grad = None
            parameter.data = parameter.data.to(memory_format=memory_format)


def number_of_examples(train: Data, n_train: int | None) -> int:
    """N of the bound: as the data says it, or where it cannot, as given."""
    if n_train is None:
        return size(train, "train")
    if isinstance(n_train, bool) or not isinstance(n_train, int) or n_train < 1:
        raise ArgumentError(f"n_train={n_train!r} must be a positive integer")
    known = known_sizes(train)
    if known and n_train not in known:  # with another N the KL would have another weight, without a word
        raise ArgumentError(
            f"n_train={n_train} but train has {' or '.join(map(str, sorted(known)))} examples; leave n_train out, or "
            "give the data as an IterableDataset if it repeats or leaves out examples"
        )
    return n_train


def examples_per_epoch(train: Data, n: int) -> int:
    """How many examples one pass gives, which a sampler decides; N where the data does not say."""
    try:
        return size(train, "train")
    except ArgumentError:
        return n


def _keeping(
    first: list[tuple[Tensor, Tensor]], data: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; those that the bound will be measured on are kept as they pass."""
    for batch in data:
        if len(first) < BATCHES_FOR_BOUND:
            first.append(batch)
        yield batch


def _bound_on(model: nn.Module, data: list[tuple[Tensor, Tensor]], loss: Loss, n: int, seed: int) -> float:
    """The bound from a few batches, with the same noise each time."""
    torch.manual_seed(seed)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    return elbo(model, (x, y), loss, n)


def _diverged(loss: float, model: nn.Module, state: State, folder: RunFolder) -> None:
    """The loss shows what went wrong in this step or in the one before, whose gradients are looked at by nobody."""
    bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    where = f"{', '.join(bad)} not finite since the step before" if bad else "every parameter is finite yet"
    raise DivergenceError(
        f"training diverged in epoch {state.epoch + 1}, batch {state.batch + 1}: the loss is {loss}, {where}. "
        f"{folder.last_good()} Lower the learning rate, or look for NaN in the data"
    )


def _check_parameters(model: nn.Module, state: State, folder: RunFolder) -> None:
    """The last step of an epoch has no next loss to show that it went wrong; no bad checkpoint is ever written."""
    bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if bad:
        raise DivergenceError(
            f"training diverged in epoch {state.epoch + 1}: {', '.join(bad)} not finite. {folder.last_good()} "
            "Lower the learning rate"
        )


@torch.no_grad()
def _epoch_metrics(
    model: nn.Module,
    val: Data | None,
    loss: Loss,
    config: FitConfig,
    state: State,
    n: int,
) -> EpochMetrics:
    done = (state.epoch + 1) / config.epochs
    train_loss = state.loss / state.seen
    sparse = any(isinstance(module, SparseLayer) for module in model.modules())
    left = summary(model) if sparse else None
    divergence = kl(model).item() if sparse else None
    held_out = evaluate(model, val, loss) if val is not None else None
    return EpochMetrics(
        epoch=state.epoch + 1,
        learning_rate=config.learning_rate * DECAYS[config.decay](done),
        beta=warm_up(config.warm_up_start, config.warm_up_end)(done),
        train_loss=train_loss,
        train_error=100 * state.wrong / state.seen if state.wrong is not None else None,
        kl=divergence,
        elbo=-(n * train_loss + divergence) if divergence is not None else None,
        sparsity=left.sparsity if left else None,
        ratio=left.ratio if left and left.kept else None,
        val_loss=held_out.loss if held_out else None,
        val_error=held_out.error if held_out else None,
        seconds=0.0,
        alive={name: layer.inputs_and_units() for name, layer in sparse_layers(model).items()} if sparse else None,
    )


def _describe(state: State, config: FitConfig) -> str:
    """The state in a line, e.g. "epoch 3/40  loss 0.213  train error 6.10 %  7.4× fewer weights"."""
    last = state.history[-1] if state.history else None
    parts = [f"epoch {min(state.epoch + (state.seen > 0), config.epochs)}/{config.epochs}"]
    loss = state.loss / state.seen if state.seen else last.train_loss if last else None
    missed = 100 * state.wrong / state.seen if state.seen and state.wrong is not None else None
    if not state.seen and last:
        missed = last.train_error
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if missed is not None:
        parts.append(f"train error {missed:.2f} %")
    if last and last.val_error is not None:
        parts.append(f"validation error {last.val_error:.2f} %")
    if last and last.ratio is not None:
        parts.append(f"{last.ratio:.1f}× fewer weights")
    return "  ".join(parts)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a flag that is looked at between steps; a second one interrupts at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested  # only the main thread may handle signals
        return

    def handle(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)
