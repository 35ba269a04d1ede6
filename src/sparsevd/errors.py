"""The errors a user can cause. Each says what happened, with which value, and what to do."""

from pathlib import Path


class SparseVDError(Exception):
    """The parent of every error that this package raises on purpose."""

    told = False  # on several processes: whether another one says it


class ArgumentError(SparseVDError, ValueError):
    """An argument has a value that cannot work."""


class ConversionError(SparseVDError, ValueError):
    """There is nothing to sparsify, prune or sum up in this model."""


class GraphError(SparseVDError, ValueError):
    """A network has no graph of known operations, or a graph is not well-formed."""


class ExportError(SparseVDError):
    """A network cannot be written in another format."""


class DataError(SparseVDError):
    """A data set could not be found, fetched or read."""


class FormatError(SparseVDError, ValueError):
    """A file of ours is damaged, of another format, or does not fit the model."""


class CheckpointError(FormatError):
    """A checkpoint is missing, damaged, or belongs to another run."""

    @classmethod
    def damaged(cls, path: Path, what: str) -> "CheckpointError":
        return cls(f"{path} is damaged: {what}. Use a backup of it, or train again")


class WriteError(SparseVDError):
    """A file cannot be written."""


class DivergenceError(SparseVDError, ArithmeticError):
    """The loss or a gradient is no longer a finite number."""


class MissingPackageError(SparseVDError, ImportError):
    """Something was asked for that needs a package which is not installed."""


class ProcessError(SparseVDError):
    """Another process of the same training has ended."""

    def __init__(self, text: str, *, told: bool = False):
        super().__init__(text)
        self.told = told


class SparseVDWarning(UserWarning):
    """Something the user should know of: a layer left dense, a layer that lost every weight."""
