"""Training state on disk: one safetensors file, written atomically and checked when read. No pickle."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparsevd import atomic
from sparsevd.errors import CheckpointError, WriteError
from sparsevd.layers import SparseLayer

FORMAT = 1
_KEY = "sparsevd"
_MODEL, _OPTIMIZER, _RNG = "model.", "optimizer.", "rng"

# What safetensors calls torch's types, in the order in which it puts their tensors into a file.
DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    """Write a safetensors file atomically, tensor by tensor. Tensors that share memory are written once each.

    The library's own `save_file` has a temporary file that a killed process leaves behind, under a name nobody knows;
    its `save` copies everything twice in memory.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            kind = f"{tensor.dtype}".removeprefix("torch.") if tensor.layout is torch.strided else "sparse"
            raise WriteError(f"{path} cannot be written: {name!r} is a {kind} tensor, which safetensors does not hold")
    # The types with the largest elements first: each tensor then begins at a multiple of its element's size.
    types = list(DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (types.index(item[1].dtype), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(little_endian(tensor))


def little_endian(tensor: Tensor) -> memoryview:
    """The elements in order, without a copy where they lie so already."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if sys.byteorder == "big":
        parts = 2 if plain.is_complex() else 1
        size = plain.element_size() // parts
        plain = plain.view(torch.uint8).reshape(-1, size).flip(1).reshape(-1)
    return plain.view(torch.uint8).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with path.open("rb") as opened, safe_open(_name_of(opened), framework="pt") as file:
            # Clones: the file's own tensors are a view of the file, which the next checkpoint replaces.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Pickled files (.pt, .pth) are not read; "
            "save the state_dict with safetensors.torch.save_file instead"
        ) from error


def _name_of(opened: BinaryIO) -> str:
    """A name that leads to the open file for as long as it is open.

    safetensors opens a file by its name twice, for the header and for the tensors. In between, training may put the
    next checkpoint there.
    """
    name = f"/dev/fd/{opened.fileno()}"
    return name if os.path.exists(name) else opened.name


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
