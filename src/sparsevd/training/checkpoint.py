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
from sparsevd.posterior import named_posteriors

# Of what can be read; the last is what is written. In format 1 the history of training is in the description. In 1 and
# 2 layers are described instead of posteriors, and what the schedule counts is among the optimizer's numbers. Since 4
# there is what a likelihood has learned.
FORMATS = (1, 2, 3, 4)
KEY = "sparsevd"  # of the description, in a file's metadata
_MODEL, _OPTIMIZER, _SCHEDULE, _HISTORY, _RNG = "model.", "optimizer.", "schedule.", "history.", "rng"
_LIKELIHOOD = "likelihood."
_EPOCHS_ABOVE = "epochs_above"  # the schedule's counter in formats 1 and 2
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Kind = TypeVar("_Kind")


@dataclass
class Checkpoint:
    """Everything that training needs to go on.

    model: the state_dict; optimizer: "<parameter>/<Adam's name>" → tensor; schedule, likelihood: their state_dicts;
    rng: the state of torch's generator, for a checkpoint inside an epoch; posteriors: name of θ → name of its log σ²,
    threshold, type of the layer, and `of`, the first name where a tensor has several; buffers: which of the model's
    tensors are not parameters; aliases: which are parameters under a second name; progress: what `fit` keeps, as JSON
    holds it; history: what it keeps as tensors; format: the one that it was read in.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    schedule: dict[str, Tensor] = field(default_factory=dict)
    likelihood: dict[str, Tensor] = field(default_factory=dict)
    rng: Tensor | None = None
    posteriors: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Tensor] = field(default_factory=dict)
    format: int = FORMATS[-1]

    def save(self, path: Path) -> None:
        tensors = {_MODEL + key: tensor for key, tensor in self.model.items()}
        tensors |= {_OPTIMIZER + key: tensor for key, tensor in self.optimizer.items()}
        tensors |= {_SCHEDULE + key: tensor for key, tensor in self.schedule.items()}
        tensors |= {_LIKELIHOOD + key: tensor for key, tensor in self.likelihood.items()}
        tensors |= {_HISTORY + key: tensor for key, tensor in self.history.items()}
        if self.rng is not None:
            tensors[_RNG] = self.rng
        about = {
            "format": FORMATS[-1],
            "posteriors": self.posteriors,
            "buffers": self.buffers,
            "aliases": self.aliases,
            "progress": self.progress,
        }
        write_tensors(path, tensors, {KEY: json.dumps(about)})

    def plain(self) -> dict[str, Tensor]:
        """The tensors of the plain network: all but the noise of its Sparse VD layers."""
        noise = {each["noise"] for each in self.posteriors.values()}
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
        if version < 3:
            about |= _from_layers(_entry(about, "layers", dict, path), path)
        checkpoint = cls(
            model=_part(tensors, _MODEL),
            optimizer=_part(tensors, _OPTIMIZER),
            schedule=_part(tensors, _SCHEDULE),
            likelihood=_part(tensors, _LIKELIHOOD),
            rng=tensors.get(_RNG),
            posteriors=_entry(about, "posteriors", dict, path),
            buffers=_entry(about, "buffers", list, path),
            aliases=_entry(about, "aliases", list, path),
            progress=_entry(about, "progress", dict, path),
            history=_part(tensors, _HISTORY),
            format=version,
        )
        if not all(isinstance(name, str) for name in (*checkpoint.buffers, *checkpoint.aliases)):
            raise CheckpointError.damaged(path, "its buffers or aliases are not all names")
        buffers = set(checkpoint.buffers)
        for name, tensor in checkpoint.model.items():
            # Training stops before it would write such a parameter. What a buffer holds is the network's own affair.
            if name not in buffers and tensor.dtype in FLOATING and not tensor.isfinite().all():
                raise CheckpointError.damaged(path, f"{name} holds NaN or infinity")
        for name in checkpoint.posteriors:
            checkpoint._check_posterior(name, path)
        if version < 3:
            checkpoint._take_counters_from_the_optimizer()
        return checkpoint

    def _take_counters_from_the_optimizer(self) -> None:
        weights = {each["noise"]: name for name, each in self.posteriors.items() if each["of"] == name}
        for key in [key for key in self.optimizer if key.rpartition("/")[2] == _EPOCHS_ABOVE]:
            name = key.rpartition("/")[0]
            self.schedule[weights.get(name, name)] = self.optimizer.pop(key)

    def _check_posterior(self, name: str, path: Path) -> None:
        known = self.posteriors[name]
        if not isinstance(known, dict) or not all(isinstance(known.get(key), str) for key in ("type", "noise", "of")):
            raise CheckpointError.damaged(
                path, f"{shown(name)} lacks the type of its layer, its noise or its first name"
            )
        threshold, first = known.get("threshold"), known["of"]
        if not isinstance(threshold, float) or math.isnan(threshold):
            raise CheckpointError.damaged(path, f"{shown(name)} lacks its threshold")
        owner = self.posteriors.get(first)
        if not isinstance(owner, dict) or owner.get("of") != first:
            raise CheckpointError.damaged(path, f"{shown(name)} does not say which tensor it is")
        keys = [(name, first), (known["noise"], owner.get("noise"))]
        for (key, of), types in zip(keys, (FLOATING, (torch.float32, torch.float64)), strict=True):
            tensor, same = self.model.get(key), self.model.get(str(of))
            if tensor is None:
                raise CheckpointError.damaged(path, f"it lacks {shown(key)}")
            if tensor.dtype not in types or tensor.ndim < 2:
                raise CheckpointError.damaged(path, f"{shown(key)} is {tensor.dtype} {tuple(tensor.shape)}")
            if same is None or tensor.dtype is not same.dtype or not torch.equal(tensor, same):
                raise CheckpointError.damaged(path, f"{shown(key)} is the same as {shown(of)} but has other numbers")
        shapes = [tuple(self.model[key].shape) for key, _ in keys]
        if shapes[0] != shapes[1]:
            raise CheckpointError.damaged(path, f"{shown(name)} has shape {shapes[0]} and its log σ² {shapes[1]}")


def _from_layers(layers: dict[str, Any], path: Path) -> dict[str, Any]:
    """The posteriors of a checkpoint that describes layers: each had one, of its `weight`. Only layers were shared."""
    found, aliases = {}, []
    for name, layer in layers.items():
        if not isinstance(layer, dict) or not isinstance(layer.get("of"), str):
            raise CheckpointError.damaged(path, f"layer {shown(name)} does not say which layer it is")
        weight, noise, bias = (f"{name}.{key}" if name else key for key in ("weight", "log_sigma2", "bias"))
        found[weight] = {**layer, "of": f"{layer['of']}.weight" if layer["of"] else "weight", "noise": noise}
        aliases += [weight, noise, bias] if layer["of"] != name else []
    return {"posteriors": found, "aliases": aliases}


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
    noise = {posterior.noise_beside(name) for name, posterior in named_posteriors(model).items()}
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
