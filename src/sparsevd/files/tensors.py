"""Tensors as safetensors files: written atomically, read whole or refused in a sentence."""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparsevd.errors import CheckpointError, WriteError
from sparsevd.files import atomic

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
            raise CheckpointError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
        with path.open("rb") as opened, safe_open(_name_of(opened), framework="pt") as file:
            # Clones: the file's own tensors are a view of the file, which the next checkpoint replaces.
            return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except CheckpointError:
        raise
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
