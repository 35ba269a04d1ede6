"""One training on several processes, as torchrun starts them: which of them this one is, and what they agree on.

Each takes its part of every batch and draws noise of its own; the gradients are averaged, so that all of them have the
same weights after every step. Process 0 writes and talks. On one process nothing here does anything.
"""

import hashlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from sparsevd.errors import ArgumentError, ProcessError, SparseVDError, SparseVDWarning
from sparsevd.training.inputs import changed

# Fewer examples are no part: batch normalisation cannot train on one.
LEAST_PART = 2


class Alone:
    """The one process of a training. What several do together costs nothing here, and changes nothing."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.last_good: Callable[[], str] = str  # a sentence: where the last state of the training is

    @property
    def main(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    def part(self, examples: int) -> slice:
        """Which of so many examples are this process's."""
        return slice(0, examples)

    def together(self) -> AbstractContextManager[None]:
        """Around what every process does by itself: if one of them fails, all of them end here."""
        return nullcontext()

    def agreed(self, numbers: list[float]) -> list[float]:
        """The numbers of process 0."""
        return numbers

    def total(self, numbers: list[float]) -> Callable[[], list[float]]:
        """Begins to add up the numbers of all processes; what it returns waits for the sums."""
        return lambda: numbers

    def same_text(self, what: str, text: str) -> None:
        """Refuse to go on where a process has another text than process 0."""

    def same_batch(self, batch: Any) -> Any:
        """The batch of process 0."""
        return batch

    def same_network(self, model: nn.Module) -> None:
        """Refuse other networks than that of process 0, and take over its numbers."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the tensors of process 0."""

    def average(self, tensors: Iterable[Tensor], examples: int) -> None:
        """Make tensors the mean over the processes, each of which has seen so many examples."""

    def seed_noise(self, *numbers: int) -> None:
        """Draw other noise than process 0 from here on: on each process its own, the same for the same numbers."""


class Several(Alone):
    """One of several processes with the same arguments; every method is called by all of them, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Numbers are on the CPU, where NCCL cannot add them up.
        self._group = None if "gloo" in dist.get_backend() else dist.new_group(backend="gloo")

    def part(self, examples: int) -> slice:
        parts = min(self.size, max(1, examples // LEAST_PART))
        if self.rank >= parts:
            return slice(0, 0)
        return slice(examples * self.rank // parts, examples * (self.rank + 1) // parts)

    @contextmanager
    def together(self) -> Iterator[None]:
        error: SparseVDError | None = None
        try:
            yield
        except SparseVDError as caught:
            error = caught
        failed = [float(error is not None and rank == self.rank) for rank in range(self.size)]
        failed = self.total(failed)()
        if not any(failed):
            return
        first = failed.index(1)
        said = self._text(str(error), first)
        if error is None:
            raise ProcessError(f"process {first} has ended: {said}", told=True)
        error.told = self.rank != first
        raise error

    def agreed(self, numbers: list[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(tensor, 0, group=self._group)
        return tensor.tolist()

    def total(self, numbers: list[float]) -> Callable[[], list[float]]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)

        def waited() -> list[float]:
            work.wait()
            return tensor.tolist()

        return waited

    def same_text(self, what: str, text: str) -> None:
        checksum = float(zlib.crc32(text.encode()))
        first = self.agreed([checksum])
        with self.together():
            if first != [checksum]:
                raise ArgumentError(
                    f"{what} of process {self.rank} differ from those of process 0; give every process the same"
                )

    def same_batch(self, batch: Any) -> Any:
        x, y = batch
        return changed(x, self._first), self._first(y)

    def same_network(self, model: nn.Module) -> None:
        with self.together():
            if isinstance(model, DistributedDataParallel):
                raise ArgumentError("the network is wrapped in DistributedDataParallel; give its .module: fit wraps it")
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        self.same_text("the layers", "\n".join(shapes))
        self.share(tensors.values())

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if not tensors:
            return
        content = torch.cat([tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(content, 0, group=self._group)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(content, sizes), strict=True):
            tensor.data.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor], examples: int) -> None:
        tensors = list(tensors)
        if not tensors:
            return
        sums = torch.cat([torch.full((1,), float(examples)), *(t.detach().cpu().flatten() * examples for t in tensors)])
        dist.all_reduce(sums, group=self._group)
        means = sums[1:] / sums[0]
        for tensor, mean in zip(tensors, torch.split(means, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def seed_noise(self, *numbers: int) -> None:
        if self.main:
            return
        digest = hashlib.blake2b(repr((*numbers, self.rank)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest) >> 1
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device, at each step
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)

    def _first(self, tensor: Tensor) -> Tensor:
        """The tensor of process 0, which may have more or fewer examples."""
        shape = [int(size) for size in self.agreed([float(size) for size in tensor.shape])]
        received = tensor.detach().clone() if self.main else tensor.new_empty(shape)
        self.share([received])
        return received

    def _text(self, text: str, source: int) -> str:
        content = torch.tensor(list(text.encode()[:4000]), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        dist.broadcast(length, source, group=self._group)
        if self.rank != source:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, source, group=self._group)
        return bytes(content.tolist()).decode(errors="replace")


def is_main() -> bool:
    """Whether this process is the one that talks, before and after a training too."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return not _started_by_torchrun() or os.environ["RANK"] == "0"


@contextmanager
def joined() -> Iterator[Alone]:
    """The processes of this training: those of torch.distributed, or those that torchrun has started, or this one."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            yield Alone()
            return
        with _watched(Several()) as team:
            yield team
    elif _started_by_torchrun():
        _initialise()
        try:
            with _watched(Several()) as team:
                yield team
                dist.barrier()
        finally:
            dist.destroy_process_group()
    else:
        yield Alone()


def _started_by_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched() and os.environ.get("WORLD_SIZE", "1") != "1"


_store: tuple[Any, int, int] | None = None  # where processes find each other: one store for all trainings
_groups = 0


def _initialise() -> None:
    """torch's own, but that a second group finds no addresses of the first."""
    global _store, _groups
    if _store is None:
        _store = next(rendezvous("env://"))
    store, rank, size = _store
    _groups += 1
    dist.init_process_group("gloo", store=PrefixStore(f"sparsevd/{_groups}", store), rank=rank, world_size=size)


@contextmanager
def _watched(team: Several) -> Iterator[Several]:
    """Only process 0 warns; and what torch says of another process that is gone becomes a sentence."""
    with warnings.catch_warnings():
        if not team.main:
            warnings.simplefilter("ignore", SparseVDWarning)
        try:
            yield team
        except RuntimeError as error:
            if "finished reduction" in str(error):
                raise ArgumentError(
                    "which parameters get a gradient changes from step to step, and several processes cannot average "
                    "them then; train on one process, or freeze these parameters"
                ) from error
            if not _is_lost(error):
                raise
            raise ProcessError(
                f"another process of this training has ended, or cannot be reached any more. {team.last_good()} Start "
                "all processes again, with resume=True if there is a checkpoint"
            ) from error.with_traceback(None)  # whose frames hold what must end before the group does


def _is_lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "by peer" in str(error)
