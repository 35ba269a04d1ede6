"""A callback that brings the recipe into the Trainer of Transformers.

    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, lr=1e-4))
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[SparseVD()])

The Trainer's own optimizer decays log σ² and has one rate for all, and exists before any callback runs: so it must be
given, or made by `SparseVDTrainer`. The Trainer then makes the scheduler that `args` ask for, by default one that falls
to zero.
"""

import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from sparsevd.errors import ArgumentError, CheckpointError, MissingPackageError, SparseVDWarning
from sparsevd.files.tensors import read_tensors, write_tensors
from sparsevd.integrations.attaching import Attaching, examples_in, target_of
from sparsevd.layers.wrapping import bare_model
from sparsevd.training.optimizer import parameter_groups

try:
    import accelerate  # noqa: F401  the Trainer needs it
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise MissingPackageError(f'{error.name} is not installed; run: pip install "sparsevd[transformers]"') from error

# What the schedule remembers, beside the other files of a checkpoint.
STATE_FILE = "sparsevd_schedule.safetensors"

_GROUPS = (
    "give the Trainer optimizers=(torch.optim.AdamW(sparsevd.parameter_groups(model, lr=…)), None), or take "
    "sparsevd.integrations.transformers.SparseVDTrainer, which makes such an optimizer"
)

# Models whose loss is a mean over tokens, by the names that Transformers gives their kinds: these are refused before
# anything begins, others by their first batch.
_PER_TOKEN = re.compile(r"LMHead|CausalLM|MaskedLM|TokenClassification|ConditionalGeneration|PreTraining|DoubleHeads")


class SparseVD(Attaching, TrainerCallback):
    __doc__ = f"""{Attaching.__doc__}
    `resume_from` is the folder of the checkpoint that a run goes on from, where it is not in `args.output_dir`.
    """

    def __init__(self, *args: Any, resume_from: str | Path | None = None, **settings: Any):
        super().__init__(*args, **settings)
        self.resume_from = resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Network, optimizer and scheduler are as the checkpoint has them, if the run goes on from one."""
        model, loader = bare_model(kwargs["model"]), kwargs["train_dataloader"]
        if self.n_train is None and _PER_TOKEN.search(type(model).__name__):
            raise ArgumentError(
                f"the loss of {type(model).__name__} is a mean over tokens, so N, which weighs the KL, counts these: "
                "give SparseVD(n_train=…), the tokens with a label in the training set"
            )
        schedule = self.begin(
            kwargs["optimizer"],
            model,
            n_train=examples_in(loader),
            total_steps=state.max_steps,
            steps_per_epoch=_steps_per_epoch(args, loader),
            groups=_GROUPS,
        )
        if state.global_step:
            schedule.load_state_dict(self._read(args, state))
        if self.n_train is None:
            self._look_at_first_batch(model)

    def _look_at_first_batch(self, model: nn.Module) -> None:
        """Names do not tell all: what the model is given does. Its losses are means over all targets there are."""

        def look(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
            if not module.training:
                return
            seen.remove()
            target = target_of(inputs)
            if not (doubt := self.look_at(target) or _of_numbers(module, target)):
                return
            if isinstance(target, torch.Tensor) and target.is_floating_point():  # or the probabilities of classes
                warnings.warn(doubt, SparseVDWarning, stacklevel=2)
            else:
                raise ArgumentError(doubt)

        seen = model.register_forward_pre_hook(look, with_kwargs=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Our numbers join those of training: for the history, and for the callbacks that come after this one."""
        if logs is None or not {"loss", "train_loss"} & set(logs):
            return
        found = self.metrics()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if self.schedule is not None and args.should_save and not args.save_only_model and folder.is_dir():
            write_tensors(folder / STATE_FILE, self.schedule.state_dict())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()

    def _read(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """The Trainer does not tell its callbacks which folder it goes on from; most often it is one of its own."""
        path = Path(self.resume_from or _checkpoint(args, state)) / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"the run goes on from step {state.global_step:,}, but there is no {path}: if the checkpoint lies "
                "elsewhere, give SparseVD(resume_from=…), its folder; if it was trained without SparseVD, load its "
                "weights and begin a new run"
            )
        return read_tensors(path)[0]


def _of_numbers(model: nn.Module, target: object) -> str:
    """What is to be said of a model of Transformers that predicts one number: its loss is the mean squared error."""
    one = getattr(getattr(model, "config", None), "num_labels", None) == 1
    if not one or not isinstance(target, torch.Tensor) or not target.is_floating_point():
        return ""
    return (
        "the mean squared error is the likelihood of a noise of variance ½ in the labels, so that their units decide "
        "how many weights are dropped: divide them by 1.4 times the error that you expect, or standardise them"
    )


class SparseVDTrainer(Trainer):
    """A Trainer whose optimizer has the groups of `sparsevd.parameter_groups`, with the rate and decay of `args`.

    `SparseVD` among the callbacks, or a new one, becomes the first of them, so that all loggers get its numbers; it is
    `trainer.sparsevd`. With another Trainer: `class Mine(SparseVDTrainer, Seq2SeqTrainer)`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        given = self.pop_callback(SparseVD)
        self.sparsevd = given if isinstance(given, SparseVD) else SparseVD()
        self.callback_handler.callbacks.insert(0, self.sparsevd)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            network = cast(PreTrainedModel, self.model if model is None else model)
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, network)
            groups = parameter_groups(network, self.args.learning_rate, self.args.weight_decay)
            self.optimizer = kind(groups, **settings)
        return super().create_optimizer(model)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _steps_per_epoch(args: TrainingArguments, loader: Any) -> int | None:
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):  # a stream
        return None
    return max(1, -(-batches // args.gradient_accumulation_steps))
