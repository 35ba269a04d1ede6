"""Which layer has which Sparse VD twin: torch's own in `SPARSE_TYPES`, those of other libraries, and what users add."""

import warnings

from torch import nn

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.layers import SPARSE_TYPES
from sparsevd.layers.layer import SparseLayer
from sparsevd.layers.linear import SparseConv1D

# By the name of the class, so that nobody has to import it.
OF_OTHER_LIBRARIES: dict[str, type[SparseLayer]] = {"transformers.pytorch_utils.Conv1D": SparseConv1D}
REGISTERED: dict[type[nn.Module], type[SparseLayer]] = {}
# Where torch's layers compute; a subclass with one of its own may compute something else.
_COMPUTE = ("forward", "_conv_forward")


def register(plain: type[nn.Module], *, like: type[nn.Module]) -> None:
    """Let `sparsify` convert a layer of your own, as it converts the one that it is like.

        sparsevd.register(MyLinear, like=nn.Linear)

    Args:
        plain: the class, this very one and none derived from it. It must hold the parameters and options of the other
            under the same names, and compute the same from them: in training, its own `forward` is not called, and what
            that adds, such as a scale, is lost. `prune` gives it back with all its attributes.
        like: a layer that Sparse VD knows, such as nn.Linear; or a `SparseLayer` that you wrote for it.
    """
    if not (isinstance(plain, type) and issubclass(plain, nn.Module)):
        raise ArgumentError(f"{plain!r} must be a class of modules, such as MyLinear (not one of its instances)")
    if plain in SPARSE_TYPES:
        raise ArgumentError(f"{plain.__name__} is a layer that Sparse VD knows already")
    if isinstance(like, type) and issubclass(like, SparseLayer):
        REGISTERED[plain] = like
    elif like in SPARSE_TYPES:
        if method := overridden(plain, like):
            warnings.warn(
                f"{plain.__name__} has a {method} of its own, which a Sparse VD layer does not call: unless it "
                f"computes the very same as that of {like.__name__}, what it adds, such as a scale, is lost in "
                "training. For a layer that computes something else, give as like= a SparseLayer that you write for it",
                SparseVDWarning,
                stacklevel=2,
            )
        REGISTERED[plain] = SPARSE_TYPES[like]
    else:
        raise ArgumentError(f"like={like!r} must be one of {', '.join(each.__name__ for each in SPARSE_TYPES)}")


def overridden(kind: type[nn.Module], parent: type[nn.Module]) -> str:
    """The method in which a subclass may compute something else than its parent, or an empty string. A class that is no
    relative has a forward of its own in any case, and its owner knows."""
    if not issubclass(kind, parent):
        return ""
    return next((name for name in _COMPUTE if getattr(kind, name, None) is not getattr(parent, name, None)), "")


def sparse_type(module: nn.Module | None) -> type[SparseLayer] | None:
    """The type of a module's Sparse VD twin, by its exact type; None if there is none."""
    if module is None:
        return None
    kind = type(module)
    by_name = OF_OTHER_LIBRARIES.get(f"{kind.__module__}.{kind.__qualname__}")
    return SPARSE_TYPES.get(kind) or REGISTERED.get(kind) or by_name
