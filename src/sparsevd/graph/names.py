"""Names of modules and tensors, where they meet torch.fx and torch.export, which write them into code that they run.

A graph may come from anywhere, and so may its names. Here they become words that mean nothing but themselves.
"""

import builtins
import functools
import keyword
import re
import unicodedata

from torch import fx, nn

_LONGEST = 200  # of a word
_HIDDEN_BY_NONE = ("self", "torch", "device", "inf", "nan")  # what the code may use, beside Python's own


@functools.cache
def reserved(at_top: bool) -> frozenset[str]:
    """What a module has already; at the top, what the module has that torch.fx makes."""
    return frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()) if at_top else nn.Module()))


def word(text: str) -> str:
    """A word of a name as it can be in code: itself, if it has letters, digits, _ and - only and is no word of Python.

    Python reads letters that look alike as the same, so they are written as it reads them.
    """
    plain = re.sub(r"[^\w-]", "_", unicodedata.normalize("NFKC", text[:_LONGEST])) or "_"
    return f"{plain}_" if keyword.iskeyword(plain) else plain


def argument(name: str, number: int, taken: set[str]) -> str:
    """The name of an input in the code: its own, if that hides nothing which the code may use."""
    text = name.replace(".", "_")
    plain = re.fullmatch(r"[A-Za-z]\w{0,99}", text, re.ASCII) and not keyword.iskeyword(text) and text not in taken
    hides = text in _HIDDEN_BY_NONE or (hasattr(builtins, text) and text != "input")
    return text if plain and not hides else f"argument_{number}"


def unfit(path: str) -> str | None:
    """The word of a path that cannot be in code as it is, or None."""
    for depth, text in enumerate(path.split(".")):
        if word(text) != text or text in reserved(depth == 0):
            return text
    return None
