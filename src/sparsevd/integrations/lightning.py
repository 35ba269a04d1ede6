"""A callback that brings the recipe into Lightning's Trainer.

    class Net(LightningModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(sparsevd.parameter_groups(self, lr=4e-3))

    trainer = Trainer(max_epochs=40, callbacks=[sparsevd.integrations.lightning.SparseVD()])

The KL enters at the optimizer's own step, so it is counted once where gradients are accumulated, and never clipped.
"""

import math
import warnings
from typing import Any

from sparsevd.errors import CheckpointError, MissingPackageError, SparseVDWarning
from sparsevd.integrations.attaching import Attaching, examples_in, target_of

try:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError:  # the same under its older name
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
except ModuleNotFoundError as error:
    raise MissingPackageError(f'{error.name} is not installed; run: pip install "sparsevd[lightning]"') from error

_GROUPS = "in configure_optimizers, return torch.optim.AdamW(sparsevd.parameter_groups(self, lr=…))"


class SparseVD(Attaching, Callback):
    __doc__ = Attaching.__doc__

    _loaded: dict[str, Any] | None = None  # from a checkpoint, before there is a schedule
    _looked = False  # at a batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizers are there, and whatever a checkpoint holds was put back."""
        before = self.schedule.state_dict() if self.schedule is not None and trainer.global_step else None
        schedule = self.begin(
            trainer.optimizers,
            pl_module,
            n_train=examples_in(trainer.train_dataloader),
            total_steps=_total_steps(trainer),
            steps_per_epoch=_steps_per_epoch(trainer),
            groups=_GROUPS,
        )
        state, self._loaded = self._loaded or before, None
        if state is not None:
            schedule.load_state_dict(state)
        elif trainer.global_step:
            raise CheckpointError(
                f"the run goes on from step {trainer.global_step:,}, but its checkpoint has no state of SparseVD: it "
                "was trained without. Load the weights by load_from_checkpoint and begin a new run"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The loss is the module's own, so that more cannot be known than that this may be a mistake."""
        if not self._looked and (doubt := self.look_at(target_of(batch))):
            warnings.warn(doubt, SparseVDWarning, stacklevel=2)
        self._looked = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict(self.metrics(), sync_dist=trainer.world_size > 1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.schedule.state_dict() if self.schedule is not None else self._loaded or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _total_steps(trainer: Trainer) -> int | None:
    """Steps of the optimizer, as far as Lightning can tell."""
    if _changes_accumulation(trainer):
        return None
    if len(trainer.optimizers) > 1 and trainer.max_steps != -1:
        return None  # its steps are then those of all optimizers together
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < math.inf else None  # −1 or infinite for a stream without max_steps


def _steps_per_epoch(trainer: Trainer) -> int | None:
    batches = trainer.num_training_batches
    if batches == math.inf or _changes_accumulation(trainer):
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches)


def _changes_accumulation(trainer: Trainer) -> bool:
    """Whether a GradientAccumulationScheduler makes some epochs have fewer steps than others."""
    return any(len(set(getattr(each, "scheduling", {}).values())) > 1 for each in trainer.callbacks)  # type: ignore[attr-defined]
