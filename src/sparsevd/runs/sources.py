"""What a name stands for: a network or data, of the paper or of the user's own code ("package.module:factory")."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.modes import in_eval_mode
from sparsevd.training.data import Augmented, Data, batches, checked, split
from sparsevd.training.inputs import Forward, Inputs, call
from sparsevd.zoo import datasets, models

USUAL_CLASSES = 10  # where neither labels nor a data set say


@dataclass(frozen=True)
class Sources:
    """The data of a run: what is trained on, what is watched, what is tested on, and how many classes there are."""

    train: Data
    val: Data | None
    test: Data | None
    classes: int


def is_factory(name: str) -> bool:
    """Whether a name is of the user's own code, and not of the paper."""
    return ":" in name


def build_model(name: str, classes: int = USUAL_CLASSES) -> nn.Module:
    """A network of the paper by name, or what package.module:factory returns."""
    if is_factory(name):
        model = called(name)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"{name} returned a {type(model).__name__}, not a torch module")
        return model
    if name not in models.MODELS:
        raise ArgumentError(f"no model {name!r}; there are {', '.join(models.MODELS)}, or give package.module:factory")
    return models.MODELS[name](classes)


def load_data(
    name: str,
    data_dir: Path | None = None,
    *,
    val_size: int = 0,
    seed: int = 0,
    shift: int = 0,
    mirror: bool = False,
) -> Sources:
    """A data set by name, or what package.module:factory returns; the arguments are those of a run."""
    if is_factory(name):
        parts = called(name)
        if not isinstance(parts, tuple) or len(parts) != 2:
            raise ArgumentError(f"{name} must return (train, test), each (x, y), a Dataset or a DataLoader")
        train, test, classes = parts[0], parts[1], 0
    else:
        splits = datasets.load(name, data_dir)
        train, test, classes = splits.train, splits.test, splits.classes
    train = checked(train, "train")
    test = checked(test, "test") if test is not None else None
    classes = classes or _classes_of(train)
    val: Data | None = None
    if val_size:
        train, val = split(train, val_size, seed)
    if shift or mirror:
        if not isinstance(train, tuple) or not isinstance(train[0], Tensor):
            raise ArgumentError("to shift and mirror images, the training data must be a pair of tensors (x, y)")
        train = Augmented(train, shift=shift, mirror=mirror)
    return Sources(train, val, test, classes)


def _classes_of(train: Data) -> int:
    labels = train[1] if isinstance(train, tuple) else None
    return USUAL_CLASSES if labels is None or labels.is_floating_point() else int(labels.max()) + 1


def try_one_batch(model: nn.Module, train: Data, described: str, forward: Forward = call) -> Inputs:
    """The first inputs. A model that does not fit its data fails here, in a sentence, and not while it trains."""
    try:
        x, y = next(batches(train, 2, shuffle=False), (None, None))
        if x is None or y is None:
            raise ValueError("it gives no batch")
        with torch.no_grad(), in_eval_mode(model):
            F.cross_entropy(forward(model, x), y)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ArgumentError(f"{described}: {error}") from error
    return cast(Inputs, x)


def called(reference: str) -> Any:
    """What the factory behind "package.module:factory" returns."""
    factory = imported(reference)
    needed = _needed_arguments(factory)
    if needed:
        module, _, name = reference.partition(":")
        values = ", ".join(f"{each}=…" for each in needed)
        raise ArgumentError(
            f"{reference} is called without arguments, and needs {' and '.join(needed)}. Write a function that fills "
            f"in what it needs, def mine(): return {name}({values}), in {module}, and give {module}:mine"
        )
    return factory()


def _needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """The arguments without a default. Asked before the call: what the factory itself raises stays the user's own."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # something built in, which does not say what it takes
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def imported(reference: str) -> Callable[..., Any]:
    """The factory itself, looked for in the present folder too."""
    module_name, _, attribute = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ArgumentError(f"{reference!r} cannot be imported: {error}; write package.module:factory") from error
    if not callable(factory):
        raise ArgumentError(f"{reference!r} is a {type(factory).__name__}, not a function")
    return factory  # type: ignore[no-any-return]
