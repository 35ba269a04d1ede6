"""Training data in any of its forms, as mini-batches.

In-memory tensors are indexed directly: these data sets fit in memory, and a Python call per sample costs more than the
arithmetic of a small net.
"""

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sparsevd.errors import ArgumentError

Data = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
Batch = tuple[Tensor, Tensor]


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


def checked(data: object, name: str) -> Data:
    """The data if it has one of the forms that are understood; a TensorDataset of two becomes its pair."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            raise ArgumentError(f"{name} must be a pair of tensors (x, y), a Dataset or a DataLoader")
        x, y = data
        if len(x) != len(y) or len(x) == 0:
            raise ArgumentError(f"{name} has {len(x)} inputs and {len(y)} targets; there must be as many, and some")
        return data if isinstance(data, Augmented) else (x, y)
    if isinstance(data, Dataset | DataLoader):
        return data
    raise ArgumentError(f"{name} is a {type(data).__name__}; give a pair of tensors (x, y), a Dataset or a DataLoader")


def size(data: Data, name: str) -> int:
    """How many examples there are."""
    if isinstance(data, tuple):
        return len(data[0])
    counted: object = data
    if isinstance(data, DataLoader):
        if data.batch_size is None and data.batch_sampler is None:  # the data set makes whole batches itself
            raise ArgumentError(f"{name} does not know its number of examples; give n_train")
        counted = data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler
    try:
        n = len(cast(Sized, counted))
    except TypeError:
        raise ArgumentError(f"{name} does not know its length; give n_train, its number of examples") from None
    if n == 0:
        raise ArgumentError(f"{name} is empty")
    return n


def known_sizes(data: Data) -> set[int]:
    """How many examples the data set has, and how many a pass over it gives: a sampler may make these differ."""
    counted: list[object] = [data[0] if isinstance(data, tuple) else data]
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


def batches(data: Data, batch_size: int, *, shuffle: bool) -> Iterator[Batch]:
    """One pass over the data. The order comes from torch's global generator; a DataLoader has its own way."""
    if isinstance(data, tuple):
        x, y = data
        order = torch.randperm(len(x)) if shuffle else None
        start = 0
        while start < len(x):
            end = start + batch_size
            if len(x) - end == 1:
                end += 1  # batch normalisation cannot train on a last batch of one
            if order is None:
                yield x[start:end], y[start:end]
            else:
                chosen = order[start:end].to(x.device)
                yield data.changed(x[chosen]) if isinstance(data, Augmented) else x[chosen], y[chosen]
            start = end
        return
    if isinstance(data, IterableDataset):
        shuffle = False  # a stream has its own order
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size, shuffle=shuffle)
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ArgumentError(f"a batch must be a pair (x, y); the data gave a {type(batch).__name__}")
        yield batch[0], batch[1]
