"""Weights that a forward reads by itself, as in `F.linear(x, self.embed.weight)`: found in its source, by name."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

# What tells of a weight without using its numbers.
_HARMLESS = {"device", "dim", "dtype", "grad", "is_cuda", "is_floating_point", "is_meta", "ndim", "numel"}
_HARMLESS |= {"requires_grad", "requires_grad_", "shape", "size", "storage"}
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")  # of a ModuleList or ModuleDict, where it is a constant


def weights_read(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules below this one, each with a parameter of it that the forward of this one reads, as far as its source
    and that of the methods it calls say so."""
    found = []
    for path, name in _read_by(type(module)):
        try:
            found.append((module.get_submodule(path), name))
        except AttributeError:
            continue
    return found


class _Reads(NamedTuple):
    parameters: tuple[tuple[str, str], ...]  # (`a.b`, `weight`) for each use of `self.a.b.weight`
    methods: tuple[str, ...]  # `c` for each call of `self.c(…)`


def _read_by(kind: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """What the forward of a class reads, and the methods that it calls, and those that they call."""
    found: dict[tuple[str, str], None] = {}
    known, waiting = {"forward"}, ["forward"]
    while waiting:
        function = getattr(kind, waiting.pop(), None)
        if not inspect.isfunction(function):  # a ScriptModule, for one, has no source to read
            continue
        if (function.__module__ or "").startswith("torch."):  # its fused paths are known; None: made by `exec`
            continue
        reads = _reads(function)
        found.update(dict.fromkeys(reads.parameters))
        waiting += [name for name in reads.methods if name not in known]
        known.update(reads.methods)
    return tuple(found)


@functools.cache
def _reads(function: Callable[..., object]) -> _Reads:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # typed into a terminal, or made by a program
        return _Reads((), ())
    this = next(iter(inspect.signature(function).parameters), "self") + "."
    every = list(ast.walk(tree))
    harmless = {id(each.value) for each in every if isinstance(each, ast.Attribute) and each.attr in _HARMLESS}
    parameters, methods = [], []
    for each in every:
        if isinstance(each, ast.Attribute) and "weight" in each.attr and id(each) not in harmless:
            owner = _INDEX.sub(r".\1", ast.unparse(each.value))
            if owner.startswith(this):
                parameters.append((owner.removeprefix(this), each.attr))
        called = each.func if isinstance(each, ast.Call) else None
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) + "." == this:
            methods.append(called.attr)
    return _Reads(tuple(dict.fromkeys(parameters)), tuple(dict.fromkeys(methods)))
