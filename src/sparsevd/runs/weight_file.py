"""A file of weights, read without the code of its network: a checkpoint, plain safetensors, or a model file (.spvd)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd import modelfile
from sparsevd.errors import CheckpointError
from sparsevd.files.tensors import read_tensors
from sparsevd.posterior import checked_threshold, equations, label_of, threshold_for
from sparsevd.reporting.summary import LayerSummary, ModelSummary, summarise_layer
from sparsevd.training.checkpoint import FLOATING, KEY, Checkpoint
from sparsevd.training.price import cheap_threshold

# Torch cannot count the zeros of others, such as float8 and uint16.
_COUNTED = (*FLOATING, torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


# A checkpoint names its buffers. Of other files only these are known to be none of the parameters.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        return self.checkpoint is not None and bool(self.checkpoint.posteriors)

    def pruned(self, threshold: float | str | None = None) -> dict[str, Tensor]:
        """The tensors of the plain network, with zeros where log α exceeds the threshold."""
        limits = self._thresholds(threshold)
        return self._plain() | {name: equations.pruned(*self._pair(name), limit) for name, limit in limits.items()}

    def summary(self, threshold: float | str | None = None) -> ModelSummary:
        """What is left of each layer: by log α, or of a plain network by its zeros."""
        layers, divergence = [], 0.0
        for name, limit in self._thresholds(threshold).items():
            known = self._posteriors[name]
            if known["of"] == name:  # a shared one counts once
                layers.append(summarise_layer(label_of(name), known["type"], *self._pair(name), threshold=limit))
                divergence += equations.kl(*self._pair(name)).item()
        tensors = self._plain()
        layers = layers or self._plain_layers(tensors)
        if self.checkpoint:
            left_out = {*self.checkpoint.buffers, *self.checkpoint.aliases}
        else:
            left_out = {key for key in tensors if _last(key) in _STATISTICS}
        counted = {key: t for key, t in tensors.items() if key not in left_out and t.is_floating_point()}
        others = sum(t.numel() for t in counted.values()) - sum(layer.weights for layer in layers)
        unsure = not self.checkpoint and not all("weight" in _last(key) or "bias" in _last(key) for key in counted)
        dense = [(label_of(key), t.numel()) for key, t in counted.items() if t.ndim > 1 and key not in self._posteriors]
        return ModelSummary(
            tuple(layers),
            others,
            divergence if self.is_sparse else None,
            with_buffers=unsure,
            dense=tuple(dense) if self.is_sparse else (),
        )

    def noisy(self) -> dict[str, tuple[Tensor, Tensor, float]]:
        """θ, log σ² and threshold of every posterior by its label, a shared one once."""
        own = self._thresholds(None)
        return {
            label_of(name): (*self._pair(name), own[name])
            for name, known in self._posteriors.items()
            if known["of"] == name
        }

    def threshold_of_sparsity(self, sparsity: float) -> float:
        """Where to cut log α, so that this share of all weights is zero."""
        if not self.is_sparse:
            raise CheckpointError(f"{self.path} holds a plain network: it has no log α that says which weights to drop")
        return threshold_for(self._pairs(), sparsity)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """θ and log σ² of every posterior, a shared one once."""
        return [self._pair(name) for name, known in self._posteriors.items() if known["of"] == name]

    def _plain(self) -> dict[str, Tensor]:
        return self.checkpoint.plain() if self.checkpoint else dict(self.tensors)

    @property
    def _posteriors(self) -> dict[str, dict[str, Any]]:
        return self.checkpoint.posteriors if self.checkpoint else {}

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """θ and log σ²."""
        return self.tensors[name], self.tensors[self._posteriors[name]["noise"]]

    def _thresholds(self, threshold: float | str | None) -> dict[str, float]:
        """Where to cut each θ: at its own threshold, or at the one that is asked for; "auto" by the price."""
        own = {name: known["threshold"] for name, known in self._posteriors.items()}
        if threshold is None:
            return own
        if not self.is_sparse:
            raise CheckpointError(f"{self.path} holds a plain network: it has no log α for a threshold to act on")
        if isinstance(threshold, str):
            return dict.fromkeys(own, cheap_threshold(self._pairs(), max(own.values())))
        return dict.fromkeys(own, checked_threshold(threshold))

    def _plain_layers(self, tensors: dict[str, Tensor]) -> list[LayerSummary]:
        weights = {key: t for key, t in tensors.items() if _last(key) == "weight" and t.ndim >= 2}
        if not weights:
            raise CheckpointError(f"{self.path} holds no weight of a Linear or Conv layer")
        for key, tensor in weights.items():
            if tensor.dtype not in _COUNTED:
                raise CheckpointError(
                    f"{self.path}: {key} is {tensor.dtype}, which is not supported; convert it to float32"
                )
        return [summarise_layer(label_of(key), "plain", tensor) for key, tensor in weights.items()]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
