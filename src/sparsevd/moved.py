"""The modules of the first edition that users import, under their old names for one more version, with a warning."""

import importlib
import sys
import types
import warnings
from typing import Any

# Old module → new module, and the names that changed on the way.
MOVED: dict[str, tuple[str, dict[str, str]]] = {
    "sparsevd.convert": ("sparsevd.conversion", {"plan": "preview"}),
    "sparsevd.data": ("sparsevd.zoo.datasets", {}),
    "sparsevd.models": ("sparsevd.zoo.models", {}),
    "sparsevd.pack": ("sparsevd.modelfile", {"Posterior": "PosteriorSteps"}),
}


class MovedModule(types.ModuleType):
    """Stands where a module was; what is asked of it is looked up in the new place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        place, renamed = MOVED[self.__name__]
        found = getattr(importlib.import_module(place), renamed.get(name, name))
        warnings.warn(
            f"{self.__name__}.{name} is now {place}.{renamed.get(name, name)}; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return found


def keep_old_names(package: types.ModuleType) -> None:
    """Let `import sparsevd.data` and `from sparsevd import data` find what was there."""
    for old in MOVED:
        module = MovedModule(old)
        sys.modules[old] = module
        setattr(package, old.rpartition(".")[2], module)
