"""What a checkpoint holds: its summary and its pruning from the tensors alone, without the code of its model."""

from pathlib import Path

import torch
from torch import Tensor

from sparsevd import modelfile
from sparsevd.errors import CheckpointError
from sparsevd.layers import checked_threshold
from sparsevd.posterior import equations
from sparsevd.reporting.summary import LayerSummary, ModelSummary, summarise_layer
from sparsevd.training.checkpoint import FLOATING, KEY, Checkpoint, read_tensors, write_tensors
from sparsevd.training.folder import CHECKPOINT

_KINDS = ("weight", "bias")
# Torch cannot count the zeros of others, such as float8 and uint16.
_COUNTED = (*FLOATING, torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def info(path: Path, threshold: float | None = None) -> ModelSummary:
    """The summary of a checkpoint; by its zeros that of a model file, or of any safetensors file with weights in it."""
    path = _file(path)
    if path.suffix == modelfile.SUFFIX:
        tensors, metadata = modelfile.unpack(modelfile.read(path), path), dict[str, str]()
    else:
        tensors, metadata = read_tensors(path)
    if KEY in metadata:
        checkpoint = Checkpoint.of(tensors, metadata, path)
        if checkpoint.layers:
            return _summary(checkpoint, threshold)
        tensors = checkpoint.model
    if threshold is not None:
        raise CheckpointError(f"{path} holds a plain network: it has no log α for a threshold to act on")
    weights = {key: t for key, t in tensors.items() if key.split(".")[-1] == "weight" and t.ndim >= 2}
    for key, tensor in weights.items():
        if tensor.dtype not in _COUNTED:
            raise CheckpointError(f"{path}: {key} is {tensor.dtype}, which is not supported; convert it to float32")
    layers = [summarise_layer(key.removesuffix(".weight"), "plain", tensor) for key, tensor in weights.items()]
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
        pruned[_key(name, "weight")] = equations.pruned(weight, log_sigma2, limit)
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
        divergence += equations.kl(weight, log_sigma2).item()
    aliases = {_key(name, kind) for name, layer in checkpoint.layers.items() if layer["of"] != name for kind in _KINDS}
    left_out = {*checkpoint.buffers, *aliases}
    return _totals(layers, {key: t for key, t in checkpoint.plain().items() if key not in left_out}, divergence)


def _totals(layers: list[LayerSummary], tensors: dict[str, Tensor], kl: float | None = None) -> ModelSummary:
    counted = sum(layer.weights for layer in layers)
    floating = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    return ModelSummary(tuple(layers), floating - counted, kl)
