"""Tensors that several processes hold a part of each, as FSDP2 has them (DTensor); all others are as they are."""

from typing import cast

import torch
from torch import Tensor


def is_spread(tensor: Tensor) -> bool:
    """Whether other processes hold parts of it."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds: what is done to every number by itself may be done to it."""
    return cast(Tensor, tensor.to_local()) if is_spread(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of it; where it is spread, each process must ask for it."""
    return cast(Tensor, tensor.full_tensor()) if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def part_for(tensor: Tensor, found: Tensor) -> Tensor:
    """Of something found for the whole tensor, this process's part."""
    if not is_spread(tensor):
        return found
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    return distribute_tensor(found, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
