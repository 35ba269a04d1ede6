"""Training state on disk: one safetensors file, written atomically and checked when read. No pickle."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsevd.errors import CheckpointError, SparseVDError
from sparsevd.files.json_object import is_whole, parse, shown
from sparsevd.files.tensors import read_tensors, write_tensors
from sparsevd.layers import SparseLayer

# Of what can be read; the last is what is written. In format 1 the history of training is in the description.
FORMATS = (1, 2)
KEY = "sparsevd"  # of the description, in a file's metadata
_MODEL, _OPTIMIZER, _HISTORY, _RNG = "model.", "optimizer.", "history.", "rng"
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Kind = TypeVar("_Kind")


@dataclass
class Checkpoint:
    """Everything that training needs to go on.

    model: the state_dict; optimizer: "<parameter>/<Adam's name>" → tensor; rng: the state of torch's generator, for a
    checkpoint inside an epoch; layers: name → type, threshold and first name of each Sparse VD layer; buffers: which of
    the model's tensors are not parameters; progress: what `fit` keeps, as JSON holds it; history: what it keeps as
    tensors; format: the one that it was read in.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rng: Tensor | None = None
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Tensor] = field(default_factory=dict)
    format: int = FORMATS[-1]

    def save(self, path: Path) -> None:
        tensors = {_MODEL + key: tensor for key, tensor in self.model.items()}
        tensors |= {_OPTIMIZER + key: tensor for key, tensor in self.optimizer.items()}
        tensors |= {_HISTORY + key: tensor for key, tensor in self.history.items()}
        if self.rng is not None:
            tensors[_RNG] = self.rng
        about = {"format": FORMATS[-1], "layers": self.layers, "buffers": self.buffers, "progress": self.progress}
        write_tensors(path, tensors, {KEY: json.dumps(about)})

    def plain(self) -> dict[str, Tensor]:
        """The tensors of the plain network: all but the noise of its Sparse VD layers."""
        noise = {f"{name}.log_sigma2" if name else "log_sigma2" for name in self.layers}
        return {key: tensor for key, tensor in self.model.items() if key not in noise}

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        return cls.of(*read_tensors(path), path)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> "Checkpoint":
        """The checkpoint that these tensors and their metadata are; `path` is where they came from."""
        if KEY not in metadata:
            raise CheckpointError(f"{path} is not a checkpoint of sparsevd: it holds tensors but no training state")
        about = parse(metadata[KEY], f"{path} is damaged: its description", CheckpointError)
        version = about.get("format")
        if not isinstance(version, int) or not is_whole(version, FORMATS[0], FORMATS[-1]):
            raise CheckpointError(
                f"{path} has format {shown(version)}; this version of sparsevd reads formats "
                f"{' and '.join(map(str, FORMATS))}. Read it with the version that wrote it"
            )
        checkpoint = cls(
            model=_part(tensors, _MODEL),
            optimizer=_part(tensors, _OPTIMIZER),
            rng=tensors.get(_RNG),
            layers=_entry(about, "layers", dict, path),
            buffers=_entry(about, "buffers", list, path),
            progress=_entry(about, "progress", dict, path),
            history=_part(tensors, _HISTORY),
            format=version,
        )
        if not all(isinstance(name, str) for name in checkpoint.buffers):
            raise CheckpointError.damaged(path, "its buffers are not all names")
        buffers = set(checkpoint.buffers)
        for name, tensor in checkpoint.model.items():
            # Training stops before it would write such a parameter. What a buffer holds is the network's own affair.
            if name not in buffers and tensor.dtype in FLOATING and not tensor.isfinite().all():
                raise CheckpointError.damaged(path, f"{name} holds NaN or infinity")
        for name in checkpoint.layers:
            checkpoint._check_layer(name, path)
        return checkpoint

    def _check_layer(self, name: str, path: Path) -> None:
        layer = self.layers[name]
        if not isinstance(layer, dict) or not isinstance(layer.get("type"), str):
            raise CheckpointError.damaged(path, f"layer {shown(name)} lacks its type")
        threshold = layer.get("threshold")
        if not isinstance(threshold, float) or math.isnan(threshold):
            raise CheckpointError.damaged(path, f"layer {shown(name)} lacks its threshold")
        first = layer.get("of")
        owner = self.layers.get(first) if isinstance(first, str) else None
        if not isinstance(owner, dict) or owner.get("of") != first:
            raise CheckpointError.damaged(path, f"layer {shown(name)} does not say which layer it is")
        prefixes = [f"{of}." if of else "" for of in (name, first)]
        for parameter, types in (("weight", FLOATING), ("log_sigma2", (torch.float32, torch.float64))):
            tensor, same = (self.model.get(prefix + parameter) for prefix in prefixes)
            if tensor is None:
                raise CheckpointError.damaged(path, f"layer {shown(name)} lacks its {parameter}")
            if tensor.dtype not in types or tensor.ndim < 2:
                raise CheckpointError.damaged(
                    path, f"the {parameter} of layer {shown(name)} is {tensor.dtype} {tuple(tensor.shape)}"
                )
            if same is None or tensor.dtype is not same.dtype or not torch.equal(tensor, same):
                raise CheckpointError.damaged(
                    path, f"layer {shown(name)} is the same as {shown(first)} but has another {parameter}"
                )
        shapes = [tuple(self.model[prefixes[0] + parameter].shape) for parameter in ("weight", "log_sigma2")]
        if shapes[0] != shapes[1]:
            raise CheckpointError.damaged(
                path, f"layer {shown(name)} has a weight of shape {shapes[0]} and a log σ² of {shapes[1]}"
            )


def _entry(about: dict[str, Any], name: str, kind: type[_Kind], path: Path) -> _Kind:
    value = about.get(name)
    if not isinstance(value, kind):
        raise CheckpointError.damaged(path, f"its description has {name} {shown(value)}")
    return value


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Put the weights of a checkpoint or of any safetensors state_dict into a model.

    Only means are taken: the noise of a Sparse VD model stays as it is, so that training starts with every weight free.
    """
    if path.is_dir():
        path = path / "checkpoint.safetensors"
    tensors, metadata = read_tensors(path)
    if KEY in metadata:
        tensors = Checkpoint.of(tensors, metadata, path).plain()
    noise = {
        f"{name}.log_sigma2".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparseLayer)
    }
    expected = {key: tensor for key, tensor in model.state_dict().items() if key not in noise}
    check_fit(tensors, expected, f"{path} does not fit the model")
    model.load_state_dict(tensors, strict=False)


def check_fit(
    tensors: dict[str, Tensor],
    expected: dict[str, Tensor],
    sentence: str,
    *,
    exact: bool = False,
    error: type[SparseVDError] = CheckpointError,
) -> None:
    """Refuse tensors that have other names, shapes or types than expected; floats may be of another size if not exact.

    `sentence` begins the error.
    """
    both = [(key, tensors[key], expected[key]) for key in expected if key in tensors]
    problems = {
        "missing": [key for key in expected if key not in tensors],
        "not in the model": [key for key in tensors if key not in expected],
        "of another shape": [f"{k} {tuple(t.shape)} for {tuple(e.shape)}" for k, t, e in both if t.shape != e.shape],
        "of another type": [f"{k} {t.dtype} for {e.dtype}" for k, t, e in both if not _fits(t.dtype, e.dtype, exact)],
    }
    listed = "; ".join(f"{what}: {', '.join(keys[:5])}" for what, keys in problems.items() if keys)
    if listed:
        raise error(f"{sentence} ({listed})")


def _fits(found: torch.dtype, expected: torch.dtype, exact: bool) -> bool:
    return found is expected or (not exact and found in FLOATING and expected in FLOATING)
