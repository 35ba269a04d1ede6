"""Weights that a forward reads by itself, as in `F.linear(x, self.embed.weight)`: found in its source, by name."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

from torch import nn

# What tells of a weight without using its numbers.
_HARMLESS = {"device", "dim", "dtype", "grad", "is_cuda", "is_floating_point", "is_meta", "ndim", "numel"}
_HARMLESS |= {"requires_grad", "requires_grad_", "shape", "size", "storage"}


def modules_read(module: nn.Module) -> list[nn.Module]:
    """The modules below this one whose weight its forward reads, as far as its source says so."""
    home = type(module).forward.__module__ or ""  # None for what `exec` made in a namespace without a name
    if home.startswith("torch."):  # its fused paths are known
        return []
    found = []
    for path in _paths(type(module).forward):
        try:
            below = module.get_submodule(path)
        except AttributeError:
            continue
        found.append(below)
    return found


@functools.cache
def _paths(forward: Callable[..., object]) -> tuple[str, ...]:
    """`a.b` for each use of `self.a.b.weight`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # typed into a terminal, or made by a program
        return ()
    harmless = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.attr in _HARMLESS}
    names = [
        ast.unparse(each.value)
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and each.attr == "weight" and id(each) not in harmless
    ]
    return tuple(dict.fromkeys(name.removeprefix("self.") for name in names if name.startswith("self.")))
