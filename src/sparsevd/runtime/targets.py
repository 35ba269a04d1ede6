"""The formats that a network can be exported to: a name, a line for people, and the function that writes the file."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparsevd.errors import ArgumentError
from sparsevd.graph import Graph
from sparsevd.runtime.c_export import export_c
from sparsevd.runtime.onnx import export_onnx


@dataclass(frozen=True)
class Target:
    """One format. `write` takes the network, an example and a path, and what the format can be asked for by name; it
    returns the files if there are others than the path. `note` is said of them when they are there."""

    about: str
    write: Callable[..., Any]
    note: str


TARGETS: dict[str, Target] = {
    "onnx": Target("ONNX", export_onnx, "outputs equal in onnxruntime"),
    "c": Target("one self-contained C file", export_c, "the C file says how to build and test it"),
}


def target(name: str, options: dict[str, bool]) -> Target:
    """The format of this name, if it has all the options that are asked for."""
    if name not in TARGETS:
        raise ArgumentError(f"to={name}: there are {' and '.join(TARGETS)}")
    known = inspect.signature(TARGETS[name].write).parameters
    for option, wanted in options.items():
        if wanted and option not in known:
            having = [other for other, each in TARGETS.items() if option in inspect.signature(each.write).parameters]
            raise ArgumentError(f"{option}=True is for to={' and '.join(having)}; to={name} has no such thing")
    return TARGETS[name]


def export(chosen: Target, network: nn.Module | Graph, example: Any, path: Path, options: dict[str, bool]) -> str:
    """Write the file; returns a sentence that says what is there now."""
    files = chosen.write(network, example, path, **{name: True for name, wanted in options.items() if wanted}) or (
        path,
    )
    return f"written to {' and '.join(f'{file} ({file.stat().st_size:,} bytes)' for file in files)}; {chosen.note}"
