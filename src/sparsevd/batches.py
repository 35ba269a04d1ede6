"""Training data in any of its forms, as mini-batches.

In-memory tensors are indexed directly: these data sets fit in memory, and a Python call per sample costs more than the
arithmetic of a small net.
"""

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sparsevd.errors import ArgumentError

Data = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
Batch = tuple[Tensor, Tensor]


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
        return x, y
    if isinstance(data, Dataset | DataLoader):
        return data
    raise ArgumentError(f"{name} is a {type(data).__name__}; give a pair of tensors (x, y), a Dataset or a DataLoader")


def size(data: Data, name: str) -> int:
    """How many examples there are."""
    if isinstance(data, tuple):
        return len(data[0])
    counted = data.sampler if isinstance(data, DataLoader) else data
    try:
        n = len(cast(Sized, counted))
    except TypeError:
        raise ArgumentError(f"{name} does not know its length; give n_train, its number of examples") from None
    if n == 0:
        raise ArgumentError(f"{name} is empty")
    return n


def batches(data: Data, batch_size: int, *, shuffle: bool) -> Iterator[Batch]:
    """One pass over the data. The order comes from torch's global generator; a DataLoader has its own way."""
    if isinstance(data, tuple):
        x, y = data
        order = torch.randperm(len(x)) if shuffle else None
        for start in range(0, len(x), batch_size):
            if order is None:
                yield x[start : start + batch_size], y[start : start + batch_size]
            else:
                chosen = order[start : start + batch_size].to(x.device)
                yield x[chosen], y[chosen]
        return
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size, shuffle=shuffle)
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ArgumentError(f"a batch must be a pair (x, y); the data gave a {type(batch).__name__}")
        yield batch[0], batch[1]
