"""How a run came about, as its folder says: which network, which data, what an input looks like.

A factory of the user's own is code, and its name in a file is a request to run that code. It is believed if it is a
plain "package.module:factory" and nobody but the present user can have written the file. Else the caller has to name
the factory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd.errors import ArgumentError, CheckpointError
from sparsevd.files import json_object
from sparsevd.files.json_object import is_whole, shown
from sparsevd.files.tensors import DTYPES
from sparsevd.runs import sources
from sparsevd.training.inputs import Inputs
from sparsevd.zoo.datasets import DATASETS

_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
MOST_ELEMENTS = 1 << 28  # of one input that a file describes: it is made, and given to the network


@dataclass(frozen=True)
class Origin:
    """What one of a run's files says, none of it checked before it is asked for."""

    path: Path
    said: dict[str, Any]
    owned: bool  # nobody but the present user can have written it

    @classmethod
    def read(cls, *paths: Path) -> "Origin | None":
        """From the first of these files that exists."""
        for path in paths:
            if path.is_file():
                return cls(path, *json_object.read_owned(path, CheckpointError))
        return None

    def name(self, of: str, say: Callable[[str], None]) -> str | None:
        """The name of the "model" or of the "data", or None where the file does not say."""
        asked = self.said.get("asked")
        name = self.said.get(of) or (asked.get(of) if isinstance(asked, dict) else None)
        if not isinstance(name, str):
            return None
        if sources.is_factory(name):
            self._check_factory(name, of)
            say(f"{of}: {name}, as {self.path} says")
        return name

    def asked(self, setting: str) -> int:
        """A number that the command was given, or 0 where the file does not say."""
        asked = self.said.get("asked")
        value = asked.get(setting) if isinstance(asked, dict) else None
        return value if isinstance(value, int) and is_whole(value, 0, 1 << 53) else 0

    def switched(self, setting: str) -> bool:
        """Whether the command was given a switch."""
        asked = self.said.get("asked")
        return isinstance(asked, dict) and asked.get(setting) is True

    def _check_factory(self, name: str, of: str) -> None:
        module, _, attribute = name.partition(":")
        if not (self.owned and all(part.isidentifier() for part in [*module.split("."), attribute])):
            raise ArgumentError(
                f"{self.path} names {shown(name)} as its {of}; that is code, and only run if the name is "
                f"package.module:factory in a file of your own that no other can write. Give {of}= yourself"
            )
        try:
            sources.imported(name)
        except ArgumentError as error:
            raise ArgumentError(
                f"{self.path} says that the {of} is {name}, which cannot be imported from here "
                f"({error.__cause__ or error}); go where it can, or name it with {of}=package.module:factory"
            ) from error

    def seed(self) -> int:
        settings = self.said.get("config")
        seed = settings.get("seed") if isinstance(settings, dict) else None
        if not isinstance(seed, int) or not is_whole(seed, 0, 2**31 - 1):
            raise CheckpointError(f"{self.path} is damaged: it lacks the seed. Remove it, and give model= and data=")
        return seed

    def classes(self) -> int | None:
        data, classes = self._dataset(), self.said.get("classes")
        if isinstance(classes, int) and is_whole(classes, 1, 2**31 - 1):
            return classes
        return DATASETS[data].classes if data else None

    def example(self) -> Tensor | tuple[Tensor, ...] | None:
        """One input of zeros in a batch of one, or several as a tuple; None where the file does not say."""
        described, data = self.said.get("example"), self._dataset()
        if described is None:
            return torch.zeros(1, *DATASETS[data].shape, dtype=DATASETS[data].dtype) if data else None
        if isinstance(described, dict) and described and all(isinstance(each, dict) for each in described.values()):
            names = ", ".join(map(shown, list(described)[:5]))
            raise ArgumentError(
                f"{self.path} says that the network takes its inputs by name ({names}), and only inputs by position "
                "can be followed through it; if it takes one by position too, give input_shape="
            )
        if not isinstance(described, list) or not all(isinstance(each, dict) for each in described) or not described:
            raise CheckpointError.damaged(self.path, f"its example is {shown(described)}")
        inputs = tuple(self._zeros(each, MOST_ELEMENTS // len(described)) for each in described)
        return inputs if len(inputs) > 1 else inputs[0]

    def _zeros(self, described: dict[str, Any], most: int) -> Tensor:
        shape, dtype = described.get("shape"), described.get("dtype")
        sizes = shape if isinstance(shape, list) else [0]
        known = _TYPES.get(dtype) if isinstance(dtype, str) else None
        if known is None or not all(is_whole(size, 1, most) for size in sizes) or math.prod(sizes) > most:
            raise CheckpointError.damaged(self.path, f"its example has shape {shown(shape)} and type {shown(dtype)}")
        return torch.zeros(1, *sizes, dtype=known)

    def dtype(self) -> torch.dtype | None:
        """The type of a network's one input, where the file says it."""
        described = self.said.get("example")
        each = list(described.values()) if isinstance(described, dict) else described
        first = each[0] if isinstance(each, list) and len(each) == 1 else None
        dtype = first.get("dtype") if isinstance(first, dict) else None
        return _TYPES.get(dtype) if isinstance(dtype, str) else None

    def _dataset(self) -> str | None:
        asked = self.said.get("asked")
        names = self.said.get("data"), asked.get("data") if isinstance(asked, dict) else None
        return next((name for name in names if isinstance(name, str) and name in DATASETS), None)


def describe_example(x: Inputs) -> list[dict[str, Any]] | dict[str, dict[str, Any]] | None:
    """What run.json keeps of a batch of inputs: a list, as a network may take several, or a dict of named ones.

    None if they are not all tensors: zeros could not stand for them.
    """
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    if not all(isinstance(part, Tensor) and part.ndim for part in parts):
        return None
    described = [{"shape": list(part.shape[1:]), "dtype": str(part.dtype).removeprefix("torch.")} for part in parts]
    return dict(zip(x, described, strict=True)) if isinstance(x, dict) else described
