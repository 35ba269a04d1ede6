"""The numbers of every epoch, live in TensorBoard.

sparsevd.fit(model, train, val, callbacks=[sparsevd.integrations.tensorboard.TensorBoard("runs/demo/tensorboard")])
"""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsevd.errors import MissingPackageError
from sparsevd.training.progress import Callback, Moment


class TensorBoard(Callback):
    """Writes loss, β, sparsity and all other numbers of an epoch, and how many inputs and units of each layer live.

    Args:
        writer: the folder to write to, or a SummaryWriter that is there already; that one stays open.
    """

    def __init__(self, writer: Any):
        self._own = isinstance(writer, str | Path)
        self._writer = _writer(writer) if self._own else writer

    def on_epoch(self, moment: Moment) -> None:
        metrics = moment.metrics
        if metrics is None:
            return
        for name, value in vars(metrics).items():
            if isinstance(value, int | float) and name != "epoch" and math.isfinite(value):
                self._writer.add_scalar(name, value, metrics.epoch)
        for layer, (inputs, units) in (metrics.alive or {}).items():
            self._writer.add_scalar(f"inputs alive/{layer}", inputs, metrics.epoch)
            self._writer.add_scalar(f"units alive/{layer}", units, metrics.epoch)
        self._writer.flush()

    def on_end(self, remarks: Sequence[str]) -> None:
        if self._own:
            self._writer.close()


def _writer(folder: str | Path) -> Any:
    try:
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ModuleNotFoundError as error:
        raise MissingPackageError('tensorboard is not installed; run: pip install "sparsevd[tensorboard]"') from error
    return writer(str(folder))
