"""Training state on disk: one safetensors file, written atomically and checked when read. No pickle."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd import atomic
from sparsevd.errors import CheckpointError
from sparsevd.layers import SparseLayer

FORMAT = 1
_KEY = "sparsevd"
_MODEL, _OPTIMIZER, _RNG = "model.", "optimizer.", "rng"


@dataclass
class Checkpoint:
    """Everything that training needs to go on.

    model: the state_dict; optimizer: "<parameter>/<Adam's name>" → tensor; rng: the state of torch's generator, for a
    checkpoint inside an epoch; layers: name → type, threshold and first name of each Sparse VD layer; buffers: which of
    the model's tensors are not parameters; progress: what `fit` keeps.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rng: Tensor | None = None
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        tensors = {_MODEL + key: tensor for key, tensor in self.model.items()}
        tensors |= {_OPTIMIZER + key: tensor for key, tensor in self.optimizer.items()}
        if self.rng is not None:
            tensors[_RNG] = self.rng
        about = {"format": FORMAT, "layers": self.layers, "buffers": self.buffers, "progress": self.progress}
        write_tensors(path, tensors, {_KEY: json.dumps(about)})

    def plain(self) -> dict[str, Tensor]:
        """The tensors of the plain network: all but the noise of its Sparse VD layers."""
        noise = {f"{name}.log_sigma2" if name else "log_sigma2" for name in self.layers}
        return {key: tensor for key, tensor in self.model.items() if key not in noise}

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        tensors, metadata = read_tensors(path)
        if _KEY not in metadata:
            raise CheckpointError(f"{path} is not a checkpoint of sparsevd: it holds tensors but no training state")
        try:
            about = json.loads(metadata[_KEY])
            version, layers, progress = about["format"], dict(about["layers"]), about["progress"]
            buffers = [str(name) for name in about["buffers"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: its description cannot be read ({error})") from error
        if version != FORMAT:
            raise CheckpointError(f"{path} has format {version!r}; this version of sparsevd reads format {FORMAT}")
        model = {key.removeprefix(_MODEL): t for key, t in tensors.items() if key.startswith(_MODEL)}
        for name, layer in layers.items():
            prefix = f"{name}." if name else ""
            missing = {f"{prefix}weight", f"{prefix}log_sigma2"} - model.keys()
            known = isinstance(layer, dict) and isinstance(layer.get("threshold"), float) and layer.get("of") in layers
            if missing or not known:
                raise CheckpointError(f"{path} is damaged: layer {name!r} lacks {sorted(missing) or 'its threshold'}")
        return cls(
            model=model,
            optimizer={key.removeprefix(_OPTIMIZER): t for key, t in tensors.items() if key.startswith(_OPTIMIZER)},
            rng=tensors.get(_RNG),
            layers=layers,
            buffers=buffers,
            progress=progress,
        )


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Tensors that share memory are written once each."""
    from safetensors.torch import save_file

    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        shares = storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size()
        separate[key] = plain.clone() if shares else plain
        seen.add(storage.data_ptr())
    with atomic.replacing(path) as temporary:
        save_file(separate, temporary, metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            # Clones: the file's own tensors are a view of the file, which the next checkpoint replaces.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Pickled files (.pt, .pth) are not read; "
            "save the state_dict with safetensors.torch.save_file instead"
        ) from error


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Put the weights of a checkpoint or of any safetensors state_dict into a model.

    Only means are taken: the noise of a Sparse VD model stays as it is, so that training starts with every weight free.
    """
    if path.is_dir():
        path = path / "checkpoint.safetensors"
    tensors, metadata = read_tensors(path)
    if _KEY in metadata:
        tensors = Checkpoint.load(path).plain()
    noise = {
        f"{name}.log_sigma2".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparseLayer)
    }
    expected = {key: tensor for key, tensor in model.state_dict().items() if key not in noise}
    missing = [key for key in expected if key not in tensors]
    extra = [key for key in tensors if key not in expected]
    shapes = [
        f"{key} {tuple(tensors[key].shape)} for {tuple(expected[key].shape)}"
        for key in expected
        if key in tensors and tensors[key].shape != expected[key].shape
    ]
    if missing or extra or shapes:
        problems = {"missing": missing, "not in the model": extra, "of another shape": shapes}
        listed = "; ".join(f"{what}: {', '.join(keys[:5])}" for what, keys in problems.items() if keys)
        raise CheckpointError(f"{path} does not fit the model ({listed})")
    model.load_state_dict(tensors, strict=False)
