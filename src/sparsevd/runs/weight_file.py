"""A file of weights, read without the code of its network: a checkpoint, plain safetensors, or a model file (.spvd)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparsevd import modelfile
from sparsevd.errors import CheckpointError
from sparsevd.files.tensors import read_tensors
from sparsevd.layers import checked_threshold
from sparsevd.posterior import equations
from sparsevd.reporting.summary import LayerSummary, ModelSummary, summarise_layer
from sparsevd.training.checkpoint import FLOATING, KEY, Checkpoint

# Torch cannot count the zeros of others, such as float8 and uint16.
_COUNTED = (*FLOATING, torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


class _Layer(NamedTuple):
    """A Sparse VD layer of a checkpoint. A shared one is there under all its names, each of which says the first."""

    name: str
    first: str
    type: str
    weight: Tensor
    log_sigma2: Tensor
    threshold: float


class WeightFile:
    """Its tensors, and of a checkpoint the description of its Sparse VD layers."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoint: Checkpoint | None = None
        if path.suffix == modelfile.SUFFIX:
            self.tensors = modelfile.unpack(modelfile.read(path), path)
            return
        self.tensors, metadata = read_tensors(path)
        if KEY in metadata:
            self.checkpoint = Checkpoint.of(self.tensors, metadata, path)
            self.tensors = self.checkpoint.model

    @property
    def is_sparse(self) -> bool:
        """Whether something says which weights to prune."""
        return self.checkpoint is not None and bool(self.checkpoint.layers)

    def pruned(self, threshold: float | None = None) -> dict[str, Tensor]:
        """The tensors of the plain network, with zeros where log α exceeds the threshold."""
        tensors = self._plain()
        for layer in self._layers(threshold):
            tensors[_key(layer.name, "weight")] = equations.pruned(layer.weight, layer.log_sigma2, layer.threshold)
        return tensors

    def summary(self, threshold: float | None = None) -> ModelSummary:
        """What is left of each layer: by log α, or of a plain network by its zeros."""
        left_out = set(self.checkpoint.buffers if self.checkpoint else ())
        layers, divergence = [], 0.0
        for layer in self._layers(threshold):
            if layer.name != layer.first:  # a shared layer counts once
                left_out |= {_key(layer.name, "weight"), _key(layer.name, "bias")}
                continue
            layers.append(
                summarise_layer(layer.name, layer.type, layer.weight, layer.log_sigma2, threshold=layer.threshold)
            )
            divergence += equations.kl(layer.weight, layer.log_sigma2).item()
        tensors = self._plain()
        layers = layers or self._plain_layers(tensors)
        floating = sum(t.numel() for key, t in tensors.items() if key not in left_out and t.is_floating_point())
        kl = divergence if self.is_sparse else None
        return ModelSummary(tuple(layers), floating - sum(layer.weights for layer in layers), kl)

    def _plain(self) -> dict[str, Tensor]:
        return self.checkpoint.plain() if self.checkpoint else dict(self.tensors)

    def _layers(self, threshold: float | None) -> Iterator[_Layer]:
        if self.checkpoint is None or not self.checkpoint.layers:
            if threshold is not None:
                raise CheckpointError(f"{self.path} holds a plain network: it has no log α for a threshold to act on")
            return
        for name, layer in self.checkpoint.layers.items():
            weight, log_sigma2 = (self.tensors[_key(name, parameter)] for parameter in ("weight", "log_sigma2"))
            limit = layer["threshold"] if threshold is None else checked_threshold(threshold)
            yield _Layer(name, layer["of"], layer["type"], weight, log_sigma2, limit)

    def _plain_layers(self, tensors: dict[str, Tensor]) -> list[LayerSummary]:
        weights = {key: t for key, t in tensors.items() if key.split(".")[-1] == "weight" and t.ndim >= 2}
        if not weights:
            raise CheckpointError(f"{self.path} holds no weight of a Linear or Conv layer")
        for key, tensor in weights.items():
            if tensor.dtype not in _COUNTED:
                raise CheckpointError(
                    f"{self.path}: {key} is {tensor.dtype}, which is not supported; convert it to float32"
                )
        return [summarise_layer(key.removesuffix(".weight"), "plain", tensor) for key, tensor in weights.items()]


def _key(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter
