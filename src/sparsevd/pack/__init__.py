"""Pruned means smaller: a model as one small file, quantised if wished and entropy-coded. No pickle.

    sparsevd.save(pruned, "lenet.spvd")                              # every number bit for bit
    sparsevd.save(model, "lenet.spvd", precision="posterior")        # a Sparse VD model: precision from its σ
    sparsevd.load("lenet.spvd", into=my_model)
"""

from pathlib import Path

from torch import Tensor, nn

from sparsevd import atomic
from sparsevd.convert import prune
from sparsevd.errors import FormatError
from sparsevd.layers import SparseLayer
from sparsevd.pack.container import Entry, Form, Packed, decode, encode
from sparsevd.pack.quantise import DTYPES, Posterior, Precision, checked, entries_of, posterior_steps, tensor_of

SUFFIX = ".spvd"

__all__ = ["SUFFIX", "Posterior", "Precision", "load", "pack", "read", "save", "unpack"]


def save(model: nn.Module, path: str | Path, *, precision: Precision = "lossless") -> None:
    """Write a model to a small file: its zeros cost next to nothing, and its numbers what they are worth.

    Args:
        model: any network; a Sparse VD network is pruned first (a copy of it).
        path: where to; by custom it ends in .spvd.
        precision: "lossless" keeps every number bit for bit. A number of bits from 2 to 16 rounds each weight matrix to
            so many levels. "posterior", for a Sparse VD network, rounds each layer as coarsely as its σ allows.
    """
    data, _ = pack(model, precision=precision)
    atomic.write(Path(path), data)


def pack(model: nn.Module, *, precision: Precision = "lossless") -> tuple[bytes, Packed]:
    """The bytes of the file that `save` writes, and what its parts cost."""
    precision = checked(precision)
    steps = posterior_steps(model, precision) if isinstance(precision, Posterior) else {}
    if any(isinstance(module, SparseLayer) for module in model.modules()):
        model = prune(model)
    packed = Packed(entries_of(model.state_dict(), precision, steps))
    return encode(packed), packed


def load(path: str | Path, *, into: nn.Module) -> nn.Module:
    """Put the parameters and buffers of a file into a model of the same architecture, and return it.

    A file that is damaged, or does not fit, is a FormatError, and the model stays as it was.
    """
    into.load_state_dict(unpack(read(path), path, into.state_dict()))
    return into


def read(path: str | Path) -> bytes:
    """The bytes of a file, or a FormatError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error


def unpack(data: bytes, name: str | Path = "the file", expected: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state_dict in the bytes of a file. With `expected`, names and shapes must be the same as there."""

    def accept(entries: list[Entry]) -> None:
        if expected is not None:
            _check_fit(entries, expected)

    try:
        packed = decode(data, accept)
    except FormatError as error:
        raise FormatError(f"{name} cannot be loaded: {error}") from error
    tensors: list[Tensor] = []
    for entry in packed.entries:
        tensors.append(tensors[entry.alias] if entry.form == Form.ALIAS else tensor_of(entry))
    return {entry.name: tensor for entry, tensor in zip(packed.entries, tensors, strict=True)}


def _check_fit(entries: list[Entry], expected: dict[str, Tensor]) -> None:
    found = {entry.name: entry for entry in entries}
    problems = {
        "missing": [key for key in expected if key not in found],
        "not in the model": [key for key in found if key not in expected],
        "of another shape or type": [
            f"{key} {found[key].shape} {DTYPES[found[key].dtype]} for {tuple(tensor.shape)} {tensor.dtype}"
            for key, tensor in expected.items()
            if key in found and (found[key].shape != tuple(tensor.shape) or DTYPES[found[key].dtype] != tensor.dtype)
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {', '.join(keys[:5])}" for what, keys in problems.items() if keys)
        raise FormatError(f"it does not fit the model ({listed})")
