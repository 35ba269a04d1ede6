"""The recipe as a callback of other people's trainers, and ours for what others show; each is loaded on use, since it
needs a package of its own.

    sparsevd.integrations.lightning.SparseVD          pip install "sparsevd[lightning]"
    sparsevd.integrations.transformers.SparseVD       pip install "sparsevd[transformers]"
    sparsevd.integrations.tensorboard.TensorBoard     pip install "sparsevd[tensorboard]"

Whatever has a torch optimizer and a loop of its own, such as one with Accelerate, needs no more than `sparsevd.attach`.
"""

import importlib
from types import ModuleType

_MODULES = ("lightning", "tensorboard", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
