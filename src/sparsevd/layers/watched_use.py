"""Weights that a forward pass reads outside of their layer, by whatever name: seen in the calls of torch's functions.

The source of a forward (`functional_use`) says so before any pass, but only where it names the weight itself. A helper
that is given the layer, a property, `get_submodule` or `named_parameters` show themselves only in a pass.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sparsevd.posterior import NoisyModule, noisy_modules

# What gives a tensor with the same numbers, of which often no more is asked than the type: it is watched likewise.
_ALIASES = {"data", "detach"}
# What gives numbers in another form than a tensor.
_NUMBERS = {"__array__", "__dlpack__", "__float__", "item", "numpy", "tolist"}
# What tells a shape, and what takes only that, or the type, from a tensor that is not the first argument.
_SHAPES = {"__len__", "nbytes", "nelement", "numel", "shape", "size", "stride"}
_LIKE_ANOTHER, _OF_ITS_TYPE = {"expand_as", "is_same_size", "reshape_as", "view_as"}, {"to", "type_as"}
# Rooms whose code knows of the noise.
_OURS = ("sparsevd.layers.", "sparsevd.posterior.")


class Watch(TorchFunctionMode):
    """While it lasts: which layers of a network are asked for their weights by others, that is while they are not at
    work themselves. It sees what its own thread calls, but not inside of what is compiled."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.read: dict[NoisyModule, str] = {}  # and by whom
        self.measured: dict[NoisyModule, str] = {}  # no more than the shape was asked
        self._weights: dict[int, Tensor] = {}  # by id: the tensors as they are, and while they live
        self._holders: dict[int, list[NoisyModule]] = defaultdict(list)
        self._may_read: dict[int, list[NoisyModule]] = defaultdict(list)  # attention reads its out_proj's
        for layer in noisy_modules(model).values():
            for below in noisy_modules(layer).values():
                for weight in _weights(below):
                    self._may_read[id(weight)].append(layer)
                    if below is layer:
                        self._weights[id(weight)] = weight
                        self._holders[id(weight)].append(layer)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with suppress(Exception):  # a network must not fail for being watched
            for each in tree_leaves((args, kwargs)):
                if id(each) in self._weights:
                    self._look(_name(func), each, args, result)
        return result

    def _look(self, name: str, weight: Tensor, args: tuple[Any, ...], result: Any) -> None:
        """At one call of a function that was given a weight."""
        if name in _ALIASES and isinstance(result, Tensor):
            self._weights[id(result)] = result
            for places in (self._holders, self._may_read):
                places[id(result)] = places[id(weight)]
        elif _shape_is_used(name, weight, args):
            self._note(weight, self.measured)
        elif _numbers_are_used(name, weight, args, result):
            self._note(weight, self.read)

    def _note(self, weight: Tensor, noted: dict[NoisyModule, str]) -> None:
        reader = _reader(self._may_read[id(weight)])
        for layer in self._holders[id(weight)] if reader else ():
            noted.setdefault(layer, reader)


def _weights(layer: NoisyModule) -> list[nn.Parameter]:
    """Those that stay one tensor for a whole pass: a parametrization computes a new one each time."""
    return [theta for each in layer.posteriors() if isinstance(theta := each.theta, nn.Parameter)]


def _name(func: Callable[..., Any]) -> str:
    """What a function of torch is called; of a getter, its attribute."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name


def _shape_is_used(name: str, weight: Tensor, args: tuple[Any, ...]) -> bool:
    return name in _SHAPES or name.endswith("_like") or (name in _LIKE_ANOTHER and not _is_first(weight, args))


def _numbers_are_used(name: str, weight: Tensor, args: tuple[Any, ...], result: Any) -> bool:
    """Whether what a function gave, or changed, can depend on the numbers in a weight that it was given."""
    if name.startswith("new_") or (name in _OF_ITS_TYPE and not _is_first(weight, args)):
        return False
    if name == "__setitem__":
        return not _is_first(weight, args)
    tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    return name in _NUMBERS or any(each is not weight for each in tensors)  # itself: `to` of the type it has


def _is_first(weight: Tensor, args: tuple[Any, ...]) -> bool:
    return bool(args) and args[0] is weight


def _reader(layers: list[NoisyModule]) -> str:
    """Whose code uses a weight, or an empty string if that is one of these layers, or what they are made of: whoever
    calls for a sample or for the KL has the noise.

    Told by the frames, not by hooks: who calls `layer.forward(x)` passes by all hooks.
    """
    frame: FrameType | None = sys._getframe(1)
    reader = ""
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if any(owner is layer for layer in layers):
            return ""
        if module.startswith(_OURS) and module != __name__ and not reader:
            return ""
        if not reader and isinstance(owner, nn.Module):
            reader = f"the forward of {type(owner).__name__}"
        elif not reader and module != __name__ and module.partition(".")[0] != "torch":
            reader = f"{code.co_name} (line {frame.f_lineno} of {Path(code.co_filename).name})"
        frame = frame.f_back
    return reader or "the forward pass"
