"""What a checkpoint holds: its summary and its pruning from the tensors alone, without the code of its model."""

from pathlib import Path

from torch import Tensor

from sparsevd import functional
from sparsevd.checkpoint import Checkpoint, read_tensors, write_tensors
from sparsevd.errors import CheckpointError
from sparsevd.layers import checked_threshold
from sparsevd.run_folder import CHECKPOINT
from sparsevd.summary import LayerSummary, ModelSummary, summarise_layer

_KINDS = ("weight", "bias")


def info(path: Path, threshold: float | None = None) -> ModelSummary:
    """The summary of a checkpoint, or of any safetensors file with weights in it, by its zeros."""
    path = _file(path)
    tensors, metadata = read_tensors(path)
    if "sparsevd" in metadata:
        checkpoint = Checkpoint.load(path)
        if checkpoint.layers:
            return _summary(checkpoint, threshold)
        tensors = checkpoint.model
    if threshold is not None:
        raise CheckpointError(f"{path} holds a plain network: it has no log α for a threshold to act on")
    layers = [
        summarise_layer(key.removesuffix(".weight"), "plain", tensor)
        for key, tensor in tensors.items()
        if key.split(".")[-1] == "weight" and tensor.ndim >= 2
    ]
    if not layers:
        raise CheckpointError(f"{path} holds no weight of a Linear or Conv layer")
    return _totals(layers, tensors)


def prune_file(path: Path, output: Path, threshold: float | None = None) -> ModelSummary:
    """Write the pruned network of a checkpoint as safetensors with plain keys, and return its summary."""
    checkpoint = Checkpoint.load(_file(path))
    if not checkpoint.layers:
        raise CheckpointError(f"{path} has no Sparse VD layer; it is a dense network, and nothing says what to prune")
    write_tensors(output, pruned_tensors(checkpoint, threshold))
    return _summary(checkpoint, threshold)


def pruned_tensors(checkpoint: Checkpoint, threshold: float | None = None) -> dict[str, Tensor]:
    """The tensors of the plain network, with zeros where log α exceeds the threshold."""
    pruned = checkpoint.plain()
    for name, layer in checkpoint.layers.items():
        weight, log_sigma2 = _layer(checkpoint, name)
        limit = layer["threshold"] if threshold is None else checked_threshold(threshold)
        pruned[_key(name, "weight")] = functional.pruned(weight, log_sigma2, limit)
    return pruned


def _file(path: Path) -> Path:
    return path / CHECKPOINT if path.is_dir() else path


def _key(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter


def _layer(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor]:
    return checkpoint.model[_key(name, "weight")], checkpoint.model[_key(name, "log_sigma2")]


def _summary(checkpoint: Checkpoint, threshold: float | None) -> ModelSummary:
    layers = []
    divergence = 0.0
    for name, layer in checkpoint.layers.items():
        if layer["of"] != name:
            continue  # a shared layer counts once
        weight, log_sigma2 = _layer(checkpoint, name)
        limit = layer["threshold"] if threshold is None else checked_threshold(threshold)
        layers.append(summarise_layer(name, layer["type"], weight, log_sigma2, limit))
        divergence += functional.kl(weight, log_sigma2).item()
    aliases = {_key(name, kind) for name, layer in checkpoint.layers.items() if layer["of"] != name for kind in _KINDS}
    left_out = {*checkpoint.buffers, *aliases}
    return _totals(layers, {key: t for key, t in checkpoint.plain().items() if key not in left_out}, divergence)


def _totals(layers: list[LayerSummary], tensors: dict[str, Tensor], kl: float | None = None) -> ModelSummary:
    counted = sum(layer.weights for layer in layers)
    floating = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    return ModelSummary(tuple(layers), floating - counted, kl)
