"""Training state on disk: one safetensors file, written atomically and checked when read. No pickle."""

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from sparsevd.errors import CheckpointError, SparseVDError, WriteError
from sparsevd.files import atomic
from sparsevd.files.json_object import is_whole, parse, shown
from sparsevd.layers import SparseLayer

# Of what can be read; the last is what is written. In format 1 the history of training is in the description.
FORMATS = (1, 2)
KEY = "sparsevd"  # of the description, in a file's metadata
_MODEL, _OPTIMIZER, _HISTORY, _RNG = "model.", "optimizer.", "history.", "rng"
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Kind = TypeVar("_Kind")

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

    try:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist or is not a file")
        with path.open("rb") as opened, safe_open(_name_of(opened), framework="pt") as file:
            # Clones: the file's own tensors are a view of the file, which the next checkpoint replaces.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Pickled files (.pt, .pth) are not read; "
            "save the state_dict with safetensors.torch.save_file instead"
        ) from error
    except (RuntimeError, MemoryError) as error:  # torch's, where there is no memory for a tensor
        raise CheckpointError(f"{path} cannot be read into memory ({error})") from error


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
