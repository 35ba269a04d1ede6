"""Training data in any of its forms, as mini-batches.

In-memory tensors are indexed directly: these data sets fit in memory, and a Python call per sample costs more than the
arithmetic of a small net.
"""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from sparsevd.errors import ArgumentError
from sparsevd.training.inputs import TARGETS, as_inputs, as_target, changed, tensors
from sparsevd.training.processes import Alone

# A pair (x, y), where x may be several tensors; or what makes such pairs, or dicts with the target among the rest.
Data = tuple[Any, Tensor] | Dataset[Any] | DataLoader[Any]
Batch = tuple[Any, Tensor]
_FORMS = "a pair (x, y) of tensors or arrays, where x may also be a tuple or a dict of them, a Dataset or a DataLoader"


class Share(NamedTuple):
    """What one of several processes takes of a batch. Where there is nothing for it, it computes with all of the batch
    for show: its examples are none, but what all do together it must do too."""

    batch: Batch
    examples: int
    whole: int  # examples of all processes

    def weight(self, processes: int) -> float:
        """Of the mean over its examples, so that the mean over the processes is that over all examples."""
        return self.examples * processes / self.whole if processes > 1 else 1.0


class Augmented(tuple[Tensor, Tensor]):
    """A pair of images (N, channels, height, width) and targets; training sees the images shifted and mirrored.

    Each is shifted by up to `shift` pixels either way, with zeros at the edges; with `mirror`, half of them mirrored.
    """

    shift: int
    mirror: bool

    def __new__(cls, pair: tuple[Tensor, Tensor], *, shift: int = 0, mirror: bool = False) -> "Augmented":
        x, y = pair
        if x.ndim != 4:
            raise ArgumentError(f"images to shift or mirror must have four dimensions, not {x.ndim}")
        if isinstance(shift, bool) or not isinstance(shift, int) or not 0 <= shift < max(x.shape[2:]):
            raise ArgumentError(f"shift={shift!r} must be a number of pixels from 0 to below the size of the image")
        self = super().__new__(cls, (x, y))
        self.shift, self.mirror = shift, mirror
        return self

    def changed(self, images: Tensor) -> Tensor:
        """Some of the images, as training sees them this time."""
        n, _, height, width = images.shape
        top, left = torch.randint(0, 2 * self.shift + 1, (2, n, 1), device=images.device)
        rows = top + torch.arange(height, device=images.device)
        columns = left + torch.arange(width, device=images.device)
        if self.mirror:
            columns = torch.where(torch.rand(n, 1, device=images.device) < 0.5, columns.flip(1), columns)
        which = torch.arange(n, device=images.device)[:, None, None]
        padded = F.pad(images, [self.shift] * 4).permute(0, 2, 3, 1)
        return padded[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Taught(tuple[Any, Tensor]):
    """A pair (x, y), or a batch of one, with a teacher's logits of each example."""

    logits: Tensor

    def __new__(cls, pair: tuple[Any, Tensor], logits: Tensor) -> "Taught":
        self = super().__new__(cls, pair)
        self.logits = logits
        return self


def checked(data: object, name: str) -> Data:
    """The data if it has one of the forms that are understood; a TensorDataset of two becomes its pair."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, Augmented | Dataset | DataLoader):
        return data
    if not isinstance(data, tuple | list):
        raise ArgumentError(f"{name} is a {type(data).__name__}; give {_FORMS}")
    if len(data) != 2:
        raise ArgumentError(f"{name} has {len(data)} parts; give {_FORMS}")
    x, y = as_inputs(data[0], f"the x of {name}"), as_target(data[1], f"the y of {name}")
    sizes = {len(part) if part.ndim else 0 for part in (*tensors(x), y)}
    if len(sizes) != 1 or 0 in sizes:
        counts = " and ".join(str(len(part) if part.ndim else 0) for part in tensors(x))
        raise ArgumentError(f"{name} has {counts} inputs and {len(y)} targets; there must be as many, and some")
    return x, y


def size(data: Data, name: str) -> int:
    """How many examples there are."""
    if isinstance(data, tuple):
        return len(data[1])
    counted: object = data
    if isinstance(data, DataLoader):
        if data.batch_size is None and data.batch_sampler is None:  # the data set makes whole batches itself
            raise ArgumentError(f"{name} does not know its number of examples; give n_train")
        whole = isinstance(data.dataset, IterableDataset) or split_by_process(data) is not None
        counted = data.dataset if whole else data.sampler
    try:
        n = len(cast(Sized, counted))
    except TypeError:
        raise ArgumentError(f"{name} does not know its length; give n_train, its number of examples") from None
    if n == 0:
        raise ArgumentError(f"{name} is empty")
    return n


def known_sizes(data: Data) -> set[int]:
    """How many examples the data set has, and how many a pass over it gives: a sampler may make these differ."""
    counted: list[object] = [data[1] if isinstance(data, tuple) else data]
    if isinstance(data, DataLoader):
        if data.batch_size is None and data.batch_sampler is None:
            return set()  # the data set makes whole batches itself, and counts these
        counted = [data.dataset] if isinstance(data.dataset, IterableDataset) else [data.dataset, data.sampler]
    found = set()
    for each in counted:
        try:
            found.add(len(cast(Sized, each)))
        except TypeError:  # it does not know
            continue
    return found


def number_of_examples(train: Data, n_train: int | None, *, or_more: bool = False) -> int:
    """N of the bound: as the data says it, or where it cannot, as given. `or_more`: as many targets as were given may
    belong to the examples, of which only a batch will tell."""
    if n_train is None:
        return size(train, "train")
    if isinstance(n_train, bool) or not isinstance(n_train, int) or n_train < 1:
        raise ArgumentError(f"n_train={n_train!r} must be a positive integer")
    known = known_sizes(train)
    if (
        known and n_train not in known and not (or_more and n_train > max(known))
    ):  # with another N the KL would have another weight, without a word
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


def split(train: Data, val_size: int, seed: int) -> tuple[Data, Data]:
    """Training and held-out examples; a seed holds out the same ones each time, and more of them for a larger size."""
    if isinstance(train, DataLoader | IterableDataset):
        raise ArgumentError(
            f"examples cannot be held out of a {type(train).__name__}, which has an order of its own; give the "
            "training data as a Dataset with a length, or as a pair (x, y)"
        )
    if val_size < 1:
        raise ArgumentError(f"val_size={val_size} must be positive: it is a number of examples")
    n = size(train, "train")
    if val_size >= n:
        raise ArgumentError(f"val_size={val_size} out of {n} examples leave nothing to train on")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return _part(train, order[val_size:]), _part(train, order[:val_size])


def _part(data: Data, where: Tensor) -> Data:
    if not isinstance(data, tuple):
        return Subset(cast(Dataset[Any], data), where.tolist())
    x, y = data
    return changed(x, lambda tensor: tensor[where]), y[where]


def batches(data: Data, batch_size: int, *, shuffle: bool) -> Iterator[Batch]:
    """One pass over the data. The order comes from torch's global generator; a DataLoader has its own way."""
    return (share.batch for share in shares(data, batch_size, Alone(), shuffle=shuffle))


def shares(data: Data, batch_size: int, team: Alone, *, shuffle: bool) -> Iterator[Share]:
    """The same, of each batch the part of one process. They must draw the same order: only the first batch tells that
    it was drawn."""
    if isinstance(data, tuple):
        yield from _slices(data, batch_size, shuffle, team)
        return
    if isinstance(data, IterableDataset):
        shuffle = False  # a stream has its own order
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size, shuffle=shuffle)
    if loader is not data and not isinstance(data, IterableDataset) and size(data, "data") % batch_size == 1:
        loader = DataLoader(loader.dataset, batch_sampler=_NoBatchOfOne(loader.batch_sampler))
    if team.size == 1:
        yield from (Share(pair, len(pair[1]), len(pair[1])) for pair in map(_pair, loader))
    elif split_by_process(loader) is not None:
        yield from (Share(pair, len(pair[1]), len(pair[1]) * team.size) for pair in map(_pair, loader))
    elif loader is data or isinstance(data, IterableDataset):
        yield from (_share_of(pair, team) for pair in map(_pair, loader))
    else:  # each loads what is its own
        parts = _Parts(loader.batch_sampler, team)
        for batch in DataLoader(loader.dataset, batch_sampler=parts):
            yield Share(_pair(batch), parts.examples, parts.whole)


def split_by_process(data: Data) -> DistributedSampler[Any] | None:
    """The sampler that gives each process other examples, if the data has one."""
    if isinstance(data, DataLoader):
        for sampler in (data.sampler, getattr(data.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                return sampler
    return None


def _share_of(pair: Batch, team: Alone) -> Share:
    """The part of a batch that is there already."""
    x, y = pair
    mine = team.part(len(y))
    if mine.stop > mine.start:
        pair = changed(x, lambda tensor: tensor[mine] if tensor.shape[:1] == y.shape[:1] else tensor), y[mine]
    return Share(pair, mine.stop - mine.start, len(y))


class _Parts:
    """The part of one process of lists of examples, and how many these were."""

    def __init__(self, batches: Any, team: Alone):
        self._batches, self._team = batches, team
        self.examples = self.whole = 0  # of the list that was given last: it is loaded at once

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            mine = self._team.part(len(batch))
            self.examples, self.whole = mine.stop - mine.start, len(batch)
            yield batch[mine] or batch


class _NoBatchOfOne:
    """The same batches, but that a last one of one example joins the one before: batch norm cannot train on it."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        waiting: list[int] = []
        for batch in self._batches:
            if waiting and len(batch) == 1:
                waiting = waiting + batch
                continue
            if waiting:
                yield waiting
            waiting = batch
        if waiting:
            yield waiting


def _slices(data: tuple[Any, Tensor], batch_size: int, shuffle: bool, team: Alone) -> Iterator[Share]:
    x, y = data
    order = torch.randperm(len(y)) if shuffle else None
    start = 0
    while start < len(y):
        end = start + batch_size
        if len(y) - end == 1:
            end += 1  # batch normalisation cannot train on a last batch of one
        end = min(end, len(y))
        mine = team.part(end - start)
        examples = mine.stop - mine.start
        if not examples:
            mine = slice(0, end - start)
        where: slice | Tensor = slice(start + mine.start, start + mine.stop)
        if order is not None:
            where = order[where].to(y.device)
        chosen = changed(x, lambda tensor, where=where: tensor[where])  # type: ignore[misc]
        if order is not None and isinstance(data, Augmented):
            chosen = data.changed(cast(Tensor, chosen))
        batch = chosen, y[where]
        yield Share(Taught(batch, data.logits[where]) if isinstance(data, Taught) else batch, examples, end - start)
        start = end


def _pair(batch: object) -> Batch:
    """Inputs and target of what a DataLoader gave."""
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if name in batch), None)
        if name is None:
            raise ArgumentError(
                f"a batch has {', '.join(map(repr, batch))} and no target; call it one of {', '.join(TARGETS)}, or "
                "give pairs (x, y)"
            )
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ArgumentError(f"a batch must be a pair (x, y) or a dict; the data gave a {type(batch).__name__}")
    x, y = batch
    if not isinstance(y, Tensor):
        raise ArgumentError(f"the target of a batch is a {type(y).__name__}; a batch must be a pair (x, y) of tensors")
    return tuple(x) if isinstance(x, list) else dict(x) if isinstance(x, Mapping) else x, y
