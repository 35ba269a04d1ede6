"""Weights that a forward reads by itself, as in `F.linear(x, self.embed.weight)`: found in its source, by name."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

# What tells of a weight without using its numbers: its attributes and methods, beside `is_…` and `new_…`, ...
_HARMLESS = {"data_ptr", "device", "dim", "dtype", "element_size", "grad", "itemsize", "layout", "nbytes", "ndim"}
_HARMLESS |= {"nelement", "numel", "requires_grad", "requires_grad_", "shape", "size", "storage", "stride"}
# ... and functions that it is given to, beside `is_…` and `…_like`: `x.to(weight)` takes its type and place.
_ASKING = {"expand_as", "hasattr", "id", "isinstance", "len", "reshape_as", "to", "type", "type_as", "view_as"}
# Of a ModuleList or ModuleDict: a constant, or what only a run can say.
_INDEX, _ANY_INDEX = re.compile(r"\[['\"]?(-?\w+)['\"]?\]"), re.compile(r"\[[^\]]*\]")
_EACH = "*"


def weights_read(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules below this one, each with a parameter of it that the forward of this one reads, as far as its source
    and that of the methods it calls say so."""
    return [(below, name) for path, name in _read_by(type(module)) for below in _at(module, path.split("."))]


def _at(module: nn.Module, path: list[str]) -> Iterator[nn.Module]:
    """The modules at a path, of which a part may stand for each child, or count from the last one."""
    if not path:
        yield module
        return
    first, *rest = path
    children = dict(module.named_children())
    if re.fullmatch(r"-\d+", first):
        found = [*children.values()][int(first) :][:1]
    elif first == _EACH or (first not in children and first.isidentifier() and isinstance(module, nn.ModuleList)):
        found = [*children.values()]  # by a variable
    else:
        found = [children[first]] if first in children else []
    for child in found:
        yield from _at(child, rest)


class _Reads(NamedTuple):
    parameters: tuple[tuple[str, str], ...]  # (`a.b`, `weight`) for each use of `self.a.b.weight`
    methods: tuple[str, ...]  # `c` for each call of `self.c(…)`
    asks_above: bool  # it calls a method of the class above


def _read_by(kind: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """What the forward of a class reads, and the methods that it calls, and those that they call."""
    found: dict[tuple[str, str], None] = {}
    known, waiting = {"forward"}, ["forward"]
    while waiting:
        name = waiting.pop()
        for function in (each.__dict__[name] for each in kind.__mro__ if name in each.__dict__):
            if not inspect.isfunction(function):  # a ScriptModule, for one, has no source to read
                break
            if (function.__module__ or "").startswith("torch."):  # its fused paths are known; None: made by `exec`
                break
            reads = _reads(function)
            found.update(dict.fromkeys(reads.parameters))
            waiting += [method for method in reads.methods if method not in known]
            known.update(reads.methods)
            if not reads.asks_above:
                break
    return tuple(found)


@functools.cache
def _reads(function: Callable[..., object]) -> _Reads:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # typed into a terminal, or made by a program
        return _Reads((), (), asks_above=False)
    this = next(iter(inspect.signature(function).parameters), "self")
    every = list(ast.walk(tree))
    harmless = {id(part) for each in every for part in _only_asked(each)}
    names = {this: ""} | _names(every, this)
    parameters, methods = [], []
    for each in every:
        if isinstance(each, ast.Attribute) and "weight" in each.attr and id(each) not in harmless:
            path = _path(each.value, names)
            if path:
                parameters.append((path, each.attr))
        called = each.func if isinstance(each, ast.Call) else None
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == this:
            methods.append(called.attr)
    above = any(isinstance(each, ast.Name) and each.id == "super" for each in every)
    return _Reads(tuple(dict.fromkeys(parameters)), tuple(dict.fromkeys(methods)), above)


def _only_asked(expression: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression whose numbers it cannot use."""
    asked: list[ast.AST] = []
    if isinstance(expression, ast.Attribute):
        name = expression.attr
        asked = [expression.value] if name in _HARMLESS or name.startswith(("is_", "new_")) else []
    elif isinstance(expression, ast.Call):
        name = ast.unparse(expression.func).rpartition(".")[2]
        asked = [*expression.args] if name in _ASKING or name.startswith("is_") or name.endswith("_like") else []
    elif isinstance(expression, ast.Compare) and all(isinstance(each, ast.Is | ast.IsNot) for each in expression.ops):
        asked = [expression.left, *expression.comparators]
    for each in asked:
        while isinstance(each, ast.Attribute) and each.attr == "data":  # `weight.data.dtype`
            each = each.value
        yield each


def _names(every: list[ast.AST], this: str) -> dict[str, str]:
    """Other names for modules: `layer = self.layer`, and `for layer in self.layers`."""
    found: dict[str, str] = {}
    for each in every:
        if isinstance(each, ast.Assign) and len(each.targets) == 1:
            target, value, end = each.targets[0], each.value, ""
        elif isinstance(each, ast.For | ast.comprehension):
            target, value, end = each.target, each.iter, f".{_EACH}"
        else:
            continue
        if isinstance(target, ast.Name) and (path := _path(value, {this: ""})):
            found[target.id] = path + end
    return found


def _path(expression: ast.AST, names: dict[str, str]) -> str:
    """Where the module of an expression lies below the network, or an empty string."""
    if not isinstance(expression, ast.Attribute | ast.Subscript | ast.Name):
        return ""
    written = _ANY_INDEX.sub(f".{_EACH}", _INDEX.sub(r".\1", ast.unparse(expression)))
    first, *rest = written.split(".")
    if first not in names or not all(part == _EACH or re.fullmatch(r"-?\w+", part) for part in rest):
        return ""
    return ".".join(part for part in (names[first], *rest) if part)
