"""Pruned means smaller: a model as one small file, quantised if wished and entropy-coded. No pickle.

sparsevd.save(pruned, "lenet.spvd", example=x)                   # every number that can matter, bit for bit
sparsevd.save(model, "lenet.spvd", example=x, precision="posterior")  # a Sparse VD model: precision from its σ
network = sparsevd.load("lenet.spvd")                            # plain torch, without any class of yours or ours
sparsevd.load("lenet.spvd", into=my_model)                       # any architecture, with or without `example`
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import overload

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from sparsevd.conversion import prune
from sparsevd.errors import ArgumentError, FormatError, SparseVDWarning
from sparsevd.files import atomic
from sparsevd.graph import Graph, capture, to_module
from sparsevd.graph.cost import footprint
from sparsevd.graph.relevance import relevant
from sparsevd.layers.wrapping import bare_model
from sparsevd.modelfile.container import FREE_VALUES, Entry, Form, Packed, allowed_bytes, decode, encode
from sparsevd.modelfile.description import described, graph_of
from sparsevd.modelfile.quantisation import (
    DTYPES,
    PosteriorSteps,
    Precision,
    checked,
    entries_of,
    posterior_steps,
    tensor_of,
)
from sparsevd.posterior import is_noisy, named_posteriors

SUFFIX = ".spvd"
MOST_LOST = 0.2  # the share of the kept weights that rounding may turn into zeros without a word

__all__ = [
    "SUFFIX",
    "PosteriorSteps",
    "Precision",
    "load",
    "pack",
    "read",
    "rebuild",
    "save",
    "tensors_of",
    "unpack",
    "unpack_graph",
]

Example = Tensor | tuple[Tensor, ...]


def save(
    model: nn.Module, path: str | Path, *, example: Example | None = None, precision: Precision = "lossless"
) -> None:
    """Write a model to a small file: its zeros cost next to nothing, and its numbers what they are worth.

    Args:
        model: any network; of a Sparse VD network a pruned copy is written.
        path: where to; by custom it ends in .spvd.
        example: an input, with the batch as first axis. The network's graph then travels in the file, `load` needs no
            model, and numbers that cannot matter (of units that nothing reads) are written as zeros.
        precision: "lossless" keeps every number bit for bit, but for −0.0, which multiplying by a mask leaves (as
            torch.nn.utils.prune does) and which becomes 0.0. A number of bits from 2 to 16 rounds each weight matrix to
            so many levels. "posterior", for a Sparse VD network, rounds each layer to multiples of 1.5 times its median
            σ. Nothing is measured: of weights that the posterior is unsure of (log α near 1 and above), that step can
            cost many, which is warned of; `PosteriorSteps(0.5)` is finer, and `sparsevd compress` looks for the
            coarsest step that data allows.
    """
    data, _ = pack(model, example=example, precision=precision)
    atomic.write(Path(path), data)


def pack(
    model: nn.Module,
    *,
    example: Example | None = None,
    precision: Precision = "lossless",
    graph: Graph | None = None,
) -> tuple[bytes, Packed]:
    """The bytes of the file that `save` writes, and what its parts cost. `graph` saves capturing it from `example`."""
    precision = checked(precision)
    model = bare_model(model)
    _refuse_masks(model)
    steps = posterior_steps(model, precision) if isinstance(precision, PosteriorSteps) else {}
    noisy = named_posteriors(model)
    if is_noisy(model):
        model = prune(model)
    state = dict(model.state_dict())
    if graph is None and example is not None:
        graph = capture(model, example)
    extra = {name: tensor for name, tensor in graph.constants.items() if name not in state} if graph else {}
    packed = Packed(entries_of(state | extra, precision, steps), extra=len(extra))
    if isinstance(precision, PosteriorSteps):
        _warn_of_lost(packed.entries, {name: state[name] for name in noisy}, precision)
    if graph is not None:
        packed.graph = described(graph, [entry.name for entry in packed.entries])
        packed.values = footprint(graph)
        _forget_irrelevant(packed.entries, graph)
    return encode(packed), packed


@overload
def load(path: str | Path, *, max_bytes: int | None = None) -> nn.Module: ...
@overload
def load(path: str | Path, *, into: nn.Module, max_bytes: int | None = None) -> nn.Module: ...
def load(path: str | Path, *, into: nn.Module | None = None, max_bytes: int | None = None) -> nn.Module:
    """The network in a file: rebuilt from its graph, or its numbers put into a model of the same architecture.

    A file that is damaged, or does not fit, is a FormatError, and the model stays as it was.

    Args:
        path: the file.
        into: a model to put the numbers into; needed for a file that was saved without an example.
        max_bytes: what the tensors may take in memory. By default 64 MiB and 4096 bytes for each byte of the file,
            which is enough for every file that `save` writes; a file that needs more is refused, and says how much.
            The same bounds what one example takes on its way through the network, of which 1 GiB is always allowed.
            While a file is read, up to six times as much is in use.
    """
    data = read(path)
    if into is None:
        return rebuild(data, path, max_bytes)
    network = bare_model(into)
    network.load_state_dict(unpack(data, path, dict(network.state_dict()), max_bytes))
    return into


def read(path: str | Path) -> bytes:
    """The bytes of a file, or a FormatError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error


def unpack(
    data: bytes,
    name: str | Path = "the file",
    expected: dict[str, Tensor] | None = None,
    max_bytes: int | None = None,
) -> dict[str, Tensor]:
    """The state_dict in the bytes of a file. With `expected`, names, shapes and types must be the same as there."""

    def accept(packed: Packed) -> None:
        if expected is not None:
            _check_fit(_state_of(packed), expected)

    try:
        packed = decode(data, accept, max_bytes)
    except FormatError as error:
        raise FormatError(f"{name} cannot be loaded: {error}") from error
    tensors = _taken_from(packed.entries)
    return {entry.name: tensors[entry.name] for entry in _state_of(packed)}


def rebuild(data: bytes, name: str | Path = "the file", max_bytes: int | None = None) -> nn.Module:
    """The network in the bytes of a file that carries its graph: plain torch, in eval mode."""
    return to_module(unpack_graph(data, name, max_bytes))


def unpack_graph(
    data: bytes,
    name: str | Path = "the file",
    max_bytes: int | None = None,
    otherwise: str = "give load(path, into=model)",
) -> Graph:
    """The graph in the bytes of a file that carries it; `otherwise` says what to do about one that does not."""

    def accept(packed: Packed) -> None:
        if not packed.graph:
            raise FormatError(f"it was saved without an example and holds no graph; {otherwise}")

    try:
        packed = decode(data, accept, max_bytes)
        values = max(FREE_VALUES, allowed_bytes(data, max_bytes))
        return graph_of(packed.graph, _taken_from(packed.entries), values)
    except FormatError as error:
        raise FormatError(f"{name} cannot be loaded: {error}") from error


def _state_of(packed: Packed) -> list[Entry]:
    return packed.entries[: len(packed.entries) - packed.extra]


def tensors_of(entries: list[Entry]) -> dict[str, Tensor]:
    """The tensors of decoded entries, by name."""
    tensors: list[Tensor] = []
    for entry in entries:
        tensors.append(tensors[entry.alias] if entry.form == Form.ALIAS else tensor_of(entry))
    return {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}


def _taken_from(entries: list[Entry]) -> dict[str, Tensor]:
    """The same, out of the entries: what they held is let go one by one, so that not all of it is there twice."""
    tensors: list[Tensor] = []
    for entry in entries:
        tensors.append(tensors[entry.alias] if entry.form == Form.ALIAS else tensor_of(entry))
        entry.values = None
    return {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}


def _refuse_masks(model: nn.Module) -> None:
    """Torch's own pruning keeps every weight, and a mask beside it, until it is told that it is over."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                key, where = hook._tensor_name, f'model.get_submodule("{name}")' if name else "model"
                raise ArgumentError(
                    f"{name or 'the model'} holds its {key} from before torch's pruning, and a mask; call "
                    f'torch.nn.utils.prune.remove({where}, "{key}") first, which leaves the pruned {key}'
                )


def _warn_of_lost(entries: list[Entry], weights: Mapping[str, Tensor], precision: PosteriorSteps) -> None:
    """Say so if rounding makes zeros of many of the kept weights, all layers together."""
    kept = left = 0
    for entry in entries:
        if entry.name in weights and isinstance(entry.values, np.ndarray):  # of shared ones the first
            kept += int(weights[entry.name].count_nonzero())
            left += int(np.count_nonzero(entry.values))
    if kept - left > MOST_LOST * kept:
        warnings.warn(
            f"of {kept:,} kept weights {left:,} are left: rounded to multiples of {precision.steps:g} σ, the others "
            "are zero, and the network may no longer work. Give a finer precision, such as PosteriorSteps(0.5) or a "
            "number of bits, or let `sparsevd compress` look for the coarsest step that data allows",
            SparseVDWarning,
            stacklevel=4,
        )


def _forget_irrelevant(entries: list[Entry], graph: Graph) -> None:
    """Put to zero what cannot matter once the numbers are rounded: weights and bias of units that nothing reads."""
    tensors = tensors_of(entries)
    masks = relevant(replace(graph, constants={name: tensors[name] for name in graph.constants}))
    shared = {entry.alias for entry in entries if entry.form == Form.ALIAS}
    for i, entry in enumerate(entries):
        if entry.name in masks and i not in shared and isinstance(entry.values, np.ndarray):
            mask = masks[entry.name].numpy().reshape(entry.matrix_shape)
            entry.values = np.where(mask, entry.values, 0).astype(np.int32)


def _check_fit(entries: list[Entry], expected: dict[str, Tensor]) -> None:
    tensors = {key: tensor for key, tensor in expected.items() if isinstance(tensor, Tensor)}  # not get_extra_state's
    found = {entry.name: entry for entry in entries}
    problems = {
        "missing": [key for key in expected if key not in found],
        "not in the model": [key for key in found if key not in tensors],
        "of another shape or type": [
            f"{key} {found[key].shape} {DTYPES[found[key].dtype]} for {tuple(tensor.shape)} {tensor.dtype}"
            for key, tensor in tensors.items()
            if key in found and (found[key].shape != tuple(tensor.shape) or DTYPES[found[key].dtype] != tensor.dtype)
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {', '.join(keys[:5])}" for what, keys in problems.items() if keys)
        raise FormatError(f"it does not fit the model ({listed})")
