"""The metrics of all epochs as a table of numbers, which goes into a checkpoint as it is.

As text, 100,000 epochs would take seconds to write and to read, for every epoch. As tensors they take milliseconds, and
all rows are checked at once.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import repeat
from pathlib import Path
from types import NoneType
from typing import Any, overload

import torch
from torch import Tensor

from sparsevd.errors import CheckpointError
from sparsevd.files.json_object import is_whole

# Integers up to here are exact as float64.
LARGEST_INTEGER = 2**53


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch. Training figures are averages over the epoch, with noise; `elbo` is the bound they give with β = 1.

    `alive` has, for each Sparse VD layer, how many of its inputs and of its units have a weight below the threshold.
    Where weights were dropped for good after the epoch, `dropped` is how many, and the bound before and after that is
    that of its first batches with the same noise. Without Sparse VD layers (`fit_dense`) all of these are None.
    """

    epoch: int
    learning_rate: float
    beta: float
    train_loss: float
    train_error: float | None
    kl: float | None
    elbo: float | None
    sparsity: float | None
    ratio: float | None
    val_loss: float | None
    val_error: float | None
    seconds: float
    alive: dict[str, list[int]] | None = None
    dropped: int | None = None
    elbo_before_drop: float | None = None
    elbo_after_drop: float | None = None
    val_metric: float | None = None  # the user's own, on held-out data
    train_r2: float | None = None  # of numbers: R², with noise as for the other training figures ...
    val_r2: float | None = None  # ... and on held-out data, without
    val_perplexity: float | None = None  # of texts

    def line(self) -> bytes:
        """The epoch as a line of JSON."""
        return json.dumps(vars(self)).encode() + b"\n"


# All fields but `alive`, in this order, are the columns of the table.
_COLUMNS = tuple(field.name for field in fields(EpochMetrics) if field.name != "alive")
# The last columns, by the format that has them first.
_SINCE = {3: ("val_metric",), 4: ("train_r2", "val_r2", "val_perplexity")}
_REQUIRED = ("epoch", "learning_rate", "beta", "train_loss", "seconds")
_INTEGERS = ("epoch", "dropped")
_INTEGER_COLUMNS = tuple(_COLUMNS.index(name) for name in _INTEGERS)
_ALIVE_AT = [field.name for field in fields(EpochMetrics)].index("alive")
_DEFAULTS = {field.name for field in fields(EpochMetrics) if field.default is not MISSING}
# What the numbers lie between. The others may be infinite or NaN, as a loss on held-out data may: training goes on.
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "epoch": (1, LARGEST_INTEGER),
    "learning_rate": (0, None),
    "beta": (0, None),
    "train_loss": (None, None),
    "train_error": (0, 100),
    "sparsity": (0, 100),
    "ratio": (1, None),
    "val_error": (0, 100),
    "seconds": (0, None),
    "dropped": (0, LARGEST_INTEGER),
}


class History(Sequence[EpochMetrics]):
    """One row for each epoch: `numbers` (n, columns) in float64, which of them are `known`, `alive` (n, layers, 2).

    `layers` are the names of the Sparse VD layers, None for a plain network. A history does not change: `add` gives a
    longer one.
    """

    def __init__(self, numbers: Tensor, known: Tensor, alive: Tensor, layers: tuple[str, ...] | None):
        self._numbers, self._known, self._alive, self.layers = numbers, known, alive, layers

    @classmethod
    def empty(cls, layers: tuple[str, ...] | None = None) -> "History":
        numbers = torch.empty(0, len(_COLUMNS), dtype=torch.float64, device="cpu")
        alive = torch.empty(0, len(layers or ()), 2, dtype=torch.int64, device="cpu")
        return cls(numbers, torch.empty_like(numbers, dtype=torch.bool), alive, layers)

    @classmethod
    def of(cls, epochs: Sequence[EpochMetrics]) -> "History":
        """The table of these epochs, all of one network."""
        if not epochs:
            return cls.empty()
        alive = epochs[0].alive
        layers = tuple(alive) if alive is not None else None
        values = [[getattr(metrics, name) for name in _COLUMNS] for metrics in epochs]
        numbers = [[math.nan if value is None else value for value in row] for row in values]
        known = [[value is not None for value in row] for row in values]
        counts = [[(metrics.alive or {})[name] for name in layers or ()] for metrics in epochs]
        return cls(
            torch.tensor(numbers, dtype=torch.float64, device="cpu"),
            torch.tensor(known, device="cpu"),
            torch.tensor(counts, dtype=torch.int64, device="cpu").reshape(len(epochs), len(layers or ()), 2),
            layers,
        )

    def add(self, metrics: EpochMetrics) -> "History":
        """The history with one more epoch."""
        row = History.of([metrics])
        if not len(self):
            return row
        return History(
            torch.cat([self._numbers, row._numbers]),
            torch.cat([self._known, row._known]),
            torch.cat([self._alive, row._alive]),
            self.layers,
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, beside the names of the layers."""
        return {"numbers": self._numbers, "known": self._known, "alive": self._alive}

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> EpochMetrics: ...
    @overload
    def __getitem__(self, index: slice) -> list[EpochMetrics]: ...
    def __getitem__(self, index: int | slice) -> EpochMetrics | list[EpochMetrics]:
        if isinstance(index, slice):
            return list(self._rows(index))
        if not -len(self) <= index < len(self):
            raise IndexError(f"epoch {index} of {len(self)}")
        return next(self._rows(slice(index, index + 1 or None)))

    def __iter__(self) -> Iterator[EpochMetrics]:
        return self._rows(slice(None))

    def _rows(self, which: slice) -> Iterator[EpochMetrics]:
        columns: list[Iterable[Any]] = []  # by columns, which torch turns into lists: there may be 100,000 rows
        for column, name in enumerate(_COLUMNS):
            numbers, known = self._numbers[which, column], self._known[which, column]
            whole = numbers.nan_to_num().to(torch.int64) if name in _INTEGERS else numbers
            values = whole.tolist()
            columns.append(
                values if known.all() else [v if k else None for v, k in zip(values, known.tolist(), strict=True)]
            )
        counts: Iterable[Any] = repeat(None)
        if self.layers is not None:
            layers = self.layers
            counts = (dict(zip(layers, row, strict=True)) for row in self._alive[which].tolist())
        columns.insert(_ALIVE_AT, counts)
        return map(EpochMetrics, *columns)


def from_tensors(tensors: dict[str, Tensor], layers: object, path: Path, version: int) -> History:
    """The history of a checkpoint of this format, checked; `path` is where it comes from."""
    later = sum(len(columns) for since, columns in _SINCE.items() if version < since)
    tensors = {name: _with_later_columns(name, tensor, later) for name, tensor in tensors.items()}
    if layers is not None and not (isinstance(layers, list) and all(isinstance(name, str) for name in layers)):
        raise CheckpointError.damaged(path, "the layers of its history are no list of names")
    names = tuple(layers) if layers is not None else None
    if names is not None and len(set(names)) < len(names):
        raise CheckpointError.damaged(path, "a layer of its history has several entries")
    expected = History.empty(names).tensors()
    epochs = len(tensors["numbers"]) if "numbers" in tensors and tensors["numbers"].ndim else 0
    for name, like in expected.items():
        shape = (epochs, *like.shape[1:])
        found = tensors.get(name)
        if found is None or found.dtype is not like.dtype or tuple(found.shape) != shape:
            actual = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise CheckpointError.damaged(path, f"its history's {name} are {actual} instead of {like.dtype} {shape}")
    if (tensors["known"].view(torch.uint8) > 1).any():
        raise CheckpointError.damaged(path, "its history's known are not all true or false")
    return _checked(History(tensors["numbers"], tensors["known"], tensors["alive"], names), path)


def _with_later_columns(name: str, tensor: Tensor, count: int) -> Tensor:
    if name not in ("numbers", "known") or tensor.ndim != 2 or not count:
        return tensor
    missing = math.nan if tensor.is_floating_point() else False
    return torch.cat([tensor, torch.full((len(tensor), count), missing, dtype=tensor.dtype)], 1)


def from_entries(entries: object, path: Path) -> History:
    """The history as format 1 has it: a list of objects, one for each epoch."""
    if not isinstance(entries, list):
        raise CheckpointError.damaged(path, f"its history is a {type(entries).__name__} instead of a list")
    names = {*_COLUMNS, "alive"}
    for epoch, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not names - _DEFAULTS <= entry.keys() <= names:
            raise CheckpointError.damaged(path, f"epoch {epoch} of its history does not hold an epoch's metrics")
    # By columns, and mostly without a loop in Python: there may be 100,000 epochs.
    numbers, known = [], []
    for name in _COLUMNS:
        column = [entry.get(name) for entry in entries]
        allowed = {int, NoneType} if name in _INTEGERS else {float, int, NoneType}
        if not set(map(type, column)) <= allowed or any(type(n) is int and abs(n) > LARGEST_INTEGER for n in column):
            raise CheckpointError.damaged(path, f"a {name} of its history is not a number such as training writes")
        numbers.append(torch.tensor([math.nan if number is None else number for number in column], dtype=torch.float64))
        known.append(torch.tensor([number is not None for number in column], dtype=torch.bool))
    counts = [entry.get("alive") for entry in entries]
    layers = tuple(counts[0]) if counts and isinstance(counts[0], dict) else None
    alive = [_counts(epoch, layers) for epoch in counts]
    if None in alive:
        epoch = 1 + alive.index(None)
        raise CheckpointError.damaged(path, f"epoch {epoch} of its history does not count each layer's units")
    table = torch.tensor(alive, dtype=torch.int64).reshape(len(entries), len(layers or ()), 2)
    return _checked(History(torch.stack(numbers, 1), torch.stack(known, 1), table, layers), path)


def _counts(alive: Any, layers: tuple[str, ...] | None) -> list[list[int]] | None:
    """Two integers for each layer, or None where they are anything else."""
    if layers is None:
        return [] if alive is None else None
    if not isinstance(alive, dict) or tuple(alive) != layers:
        return None
    pairs = list(alive.values())
    valid = all(type(p) is list and len(p) == 2 and all(is_whole(n, 0, LARGEST_INTEGER) for n in p) for p in pairs)
    return pairs if valid else None


def _checked(history: History, path: Path) -> History:
    """Every number is one that training can have written; only the first that is not is named."""
    parts = history.tensors()
    for column, name in enumerate(_COLUMNS):
        numbers, known = parts["numbers"][:, column], parts["known"][:, column]
        bad = ~known if name in _REQUIRED else torch.zeros_like(known)
        if name in _BOUNDS:
            low, high = _BOUNDS[name]
            bad |= known & ~numbers.isfinite()
            bad |= known & (numbers < low) if low is not None else bad
            bad |= known & (numbers > high) if high is not None else bad
        if name in _INTEGERS:
            bad |= known & (numbers != numbers.trunc())
        if name == "epoch":
            bad |= numbers != torch.arange(1, len(history) + 1, dtype=torch.float64, device="cpu")
        if bad.any():
            row = int(bad.nonzero()[0])
            value = numbers[row].item() if known[row] else None
            raise CheckpointError.damaged(path, f"epoch {row + 1} of its history has {name} {value}")
    if (parts["alive"] < 0).any():
        raise CheckpointError.damaged(path, "its history counts fewer than no units")
    return history
