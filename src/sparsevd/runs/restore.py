"""The network of a run or of a file of weights, pruned and ready for use, with an example of its input.

The folder of a run says which network of the paper it is and which data it saw. Networks of the user's own are code,
and code is only run when it is named by the user: `model` is then needed, and `input_shape`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsevd import modelfile
from sparsevd.errors import ArgumentError, CheckpointError, FormatError
from sparsevd.files import json_object
from sparsevd.graph import DTYPES, Graph, to_module
from sparsevd.graph.cost import operations
from sparsevd.runs.checkpoint_info import pruned_tensors
from sparsevd.runs.training_run import SUMMARY, build_model
from sparsevd.training.checkpoint import KEY, Checkpoint, check_fit, read_tensors
from sparsevd.training.folder import CHECKPOINT

MOST_OPERATIONS = 1 << 37  # for one example of a network from a file, which is run to be reported on; VGG-16 has 2³⁴

# Shape of one example, and number of classes.
_DATA = {"mnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100)}


@dataclass(frozen=True)
class Restored:
    """A plain network with its zeros, in eval mode, an input for it, and its graph if that is known."""

    network: nn.Module
    example: Tensor
    graph: Graph | None = None


def restore(
    path: Path,
    *,
    model: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    threshold: float | None = None,
) -> Restored:
    """The pruned network of a run's folder, a checkpoint, a safetensors file with plain keys, or a model file (.spvd).

    Args:
        path: what to read.
        model: a network of the paper, or "package.module:factory"; by default the one that the run names.
        input_shape: of one example, without the batch; by default that of the data that the run names.
        threshold: for checkpoints of Sparse VD, drop weights of log α above it.
    """
    if path.suffix == modelfile.SUFFIX and model is None:
        return _from_model_file(path, threshold)
    file = path / CHECKPOINT if path.is_dir() else path
    tensors, metadata = read_tensors(file)
    if KEY in metadata:
        tensors = pruned_tensors(Checkpoint.of(tensors, metadata, file), threshold)
    elif threshold is not None:
        raise CheckpointError(f"{file} holds a plain network: it has no log α for a threshold to act on")
    told_model, told_data = _told(file.parent)
    known_shape, classes = _DATA.get(told_data or "", (None, 10))
    # A file does not fit the network that the caller named, or is at odds with its own summary.
    error = ArgumentError if model else CheckpointError
    model = model or told_model
    shape = input_shape or known_shape
    if model is None or shape is None:
        missing = [name for name, value in (("--model", model), ("--input-shape", shape)) if value is None]
        raise ArgumentError(f"{path} does not say all about its network; give {' and '.join(missing)}")
    network = build_model(model, classes).eval()
    check_fit(tensors, network.state_dict(), f"{file} does not fit the network {model}", error=error)
    network.load_state_dict(tensors)
    return Restored(network, torch.zeros(1, *shape))


def _from_model_file(path: Path, threshold: float | None) -> Restored:
    if threshold is not None:
        raise CheckpointError(f"{path} holds a pruned network: it has no log α for a threshold to act on")
    graph = modelfile.unpack_graph(modelfile.read(path), path)
    if len(graph.inputs) != 1:
        raise ArgumentError(f"{path} takes {len(graph.inputs)} inputs; only networks of one are supported here")
    (node,) = graph.inputs
    if operations(graph) > MOST_OPERATIONS:
        raise FormatError(
            f"{path} takes {operations(graph):,} operations for one example, and only networks of up to "
            f"{MOST_OPERATIONS:,} are run here; use sparsevd.load and an example of your own"
        )
    shape = [max(1, size) for size in node.shape]  # −1 is the batch
    return Restored(to_module(graph), torch.zeros(shape, dtype=DTYPES[str(node.attributes["dtype"])]), graph)


def _told(folder: Path) -> tuple[str | None, str | None]:
    """The network and the data that a run's summary names; names of the user's own code are not taken from a file."""
    try:
        summary = json_object.read(folder / SUMMARY)
    except FormatError:  # a file of weights is enough if the caller names the rest
        return None, None
    names = summary.get("model"), summary.get("data")
    model, data = (name if isinstance(name, str) and ":" not in name else None for name in names)
    return model, data
