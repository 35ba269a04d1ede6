"""Small files with good checksums that ask for much: memory, decisions, shapes, nodes. `COSTLY` has them by name.

cd tests
python -m fuzz.costly                       # what each of them takes: a line of JSON
SPARSEVD_KERNELS=0 python -m fuzz.costly    # the same through the decoder in Python
"""

import json
import resource
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from sparsevd import kernels, load
from sparsevd.errors import SparseVDError
from sparsevd.graph import OPS, Attribute, Graph, Node
from sparsevd.graph.compaction import compact
from sparsevd.modelfile import container
from sparsevd.modelfile.container import (
    DTYPE_SIZES,
    FRAME,
    MAGIC,
    VERSION,
    Entry,
    Form,
    Packed,
    header_of,
    with_context,
)
from sparsevd.modelfile.description import described
from sparsevd.modelfile.fields import varint
from sparsevd.modelfile.native import coder
from sparsevd.modelfile.prime import PRIME
from sparsevd.runs.run import Run

MOST_MEMORY = 3 << 29  # bytes that reading and running any of them may take: a run of 1 GiB, and half of that
RELU_7 = b"relu\n\x01\x00\x00"  # a whole node: it reads the one before it


def sealed(content: bytes) -> bytes:
    """A file of this content with the right checksum."""
    head = MAGIC + bytes([VERSION])
    return head + zlib.crc32(head + content).to_bytes(4, "little") + content


def with_header(header: bytes, tail: bytes = b"") -> bytes:
    """A file of this header; the tensors after it are what `tail` makes of them."""
    with closing(coder()) as stream:
        stream.prime(PRIME)
        for byte in varint(len(header)):
            stream.code_bytes(bytearray([byte]))
        stream.code_bytes(bytearray(header))
        return sealed(stream.finish() + bytes(4) + tail)  # so that the tail does not reach into the header


def of_graph(*nodes: Node, constants: dict[str, tuple[int, ...]] | None = None, tail: bytes = b"") -> bytes:
    """A file of this graph, whose constants are float32 of these shapes; nothing is checked, nothing computed."""
    shapes = constants or {}
    tensors = {
        name: torch.empty(0).expand(0) if 0 in shape else torch.empty(1).expand(shape) for name, shape in shapes.items()
    }
    entries = [Entry(name, 0, shape, Form.FLOAT, mantissa=0) for name, shape in shapes.items()]
    graph = Graph(nodes, tensors, (nodes[-1].name,), frozenset(shapes))
    return with_header(header_of(Packed(entries, described(graph, list(shapes)))), tail)


def node(name: str, op: str, inputs: tuple[str, ...], gives: tuple[int, ...], /, **attributes: Attribute) -> Node:
    assert attributes.keys() == OPS[op].attributes.keys(), OPS[op].attributes
    return Node(name, op, inputs, attributes, gives)


def source(*shape: int) -> Node:
    return node("x", "input", (), (-1, *shape), dtype="float32")


def _zeros(*entries: Entry, size: int = 0) -> bytes:
    """A file of these tensors, in which every number is zero, filled up to this size with bytes that mean nothing."""
    for entry in entries:
        if entry.form == Form.RAW:
            entry.values = bytearray(entry.numel * DTYPE_SIZES[entry.dtype])
        elif entry.form != Form.ALIAS:
            entry.values = np.zeros(entry.matrix_shape, np.int32)  # memory that is only read takes none
    header = header_of(Packed(list(entries)))
    with closing(coder()) as stream:
        stream.prime(PRIME)
        for byte in varint(len(header)):
            stream.code_bytes(bytearray([byte]))
        stream.code_bytes(bytearray(header))
        for entry, plane, hint in with_context(list(entries)):
            container._code(stream, entry, plane, hint)
        return sealed(stream.finish().ljust(size - FRAME, b"\0"))


def _chain(count: int) -> bytes:
    """So many activations one after the other, in very few bytes: each is told as the one before it."""
    return with_header(_chained(count))


def _chained(count: int) -> bytes:
    head = varint(count + 1) + b"input\n\x00float32\n\x01\x02\x01\x08"
    graph = head + RELU_7 * count + varint(1) + varint(0) + varint(0)
    return varint(len(graph)) + graph + varint(0) + varint(0)


def _peeled(count: int) -> bytes:
    """A chain of layers of zeros: nothing reads the last, so nothing reads the one before it, and so on."""
    nodes = [source(2)]
    shapes = {}
    for i in range(count):
        shapes[f"{i}.weight"] = (2, 2)
        nodes.append(node(f"n{i}", "linear", (nodes[-1].name, f"{i}.weight"), (-1, 2)))
    return of_graph(*nodes, constants=shapes, tail=b"\xff" * 100)


def _image(height: int, width: int, op: str, gives: tuple[int, ...], **attributes: Attribute) -> bytes:
    return of_graph(source(1, height, width), node("y", op, ("x",), gives, **attributes))


def _conv(size: int, kernel: int, out: int, stride: int, padding: int, dilation: int) -> bytes:
    settings = {"stride": (stride,) * 2, "padding": (padding,) * 2, "dilation": (dilation,) * 2, "groups": 1}
    layer = node("y", "conv", ("x", "conv.weight"), (-1, 1, out, out), **settings)  # type: ignore[arg-type]
    return of_graph(source(1, size, size), layer, constants={"conv.weight": (1, 1, kernel, kernel)}, tail=b"\xff" * 100)


def _doubled(times: int) -> bytes:
    """Each node puts two of the one before it together."""
    nodes = [source(64)]
    for i in range(times):
        nodes.append(node(f"n{i}", "concat", (nodes[-1].name,) * 2, (-1, 64 << (i + 1)), axis=1))
    return of_graph(*nodes)


COSTLY: dict[str, Callable[[], bytes]] = {
    # Tensors
    "a matrix of zeros": lambda: _zeros(Entry("w", 0, (12_000, 12_000), Form.GRID, step=0x3F80), size=8_900),
    "a vector of zeros": lambda: _zeros(Entry("w", 0, (16_000_000,), Form.FLOAT)),
    "two long rows": lambda: _zeros(Entry("w", 0, (2, 8_000_000), Form.FLOAT, width=8_000_000)),
    "a long column": lambda: _zeros(Entry("w", 0, (16_000_000, 1), Form.FLOAT)),
    "a row too long for its bytes": lambda: with_header(header_of(Packed([Entry("w", 0, (2, 8_000_000), Form.FLOAT)]))),
    "many bytes": lambda: _zeros(Entry("w", 8, (750_000,), Form.RAW)),
    "many decisions": lambda: _zeros(Entry("w", 0, (6_000_000,), Form.FLOAT)),
    "many names for a tensor": lambda: _zeros(
        Entry("w", 4, (100_000,), Form.RAW), *(Entry(f"a{i}", 4, (100_000,), Form.ALIAS) for i in range(100))
    ),
    "many tensors": lambda: _zeros(*(Entry(f"{i}", 0, (), Form.FLOAT) for i in range(3_000))),
    # Graphs
    "many nodes": lambda: _chain(3_000),
    "too many nodes": lambda: with_header(_chained(11_000), b"\xff" * 300),
    "a chain of dead layers": lambda: _peeled(700),
    "a large input": lambda: of_graph(source(2**31 - 1), node("y", "relu", ("x",), (-1, 2**31 - 1))),
    "many units": lambda: of_graph(source(2**26), node("y", "relu", ("x",), (-1, 2**26))),
    "a long reshape": lambda: of_graph(
        source(1, 2**26 - 1), node("y", "reshape", ("x",), (-1, 2**26 - 1), shape=(-1, 2**26 - 1))
    ),
    "a reshape that fits nowhere": lambda: of_graph(
        source(2, 3, 2**22), node("y", "reshape", ("x",), (-1, 3 * 2**22, 2), shape=(-1, 3 * 2**22, 2))
    ),
    "expanded": lambda: of_graph(source(1), node("y", "expand", ("x",), (-1, 2**31 - 1), shape=(-1, 2**31 - 1))),
    "expanded on 16 axes": lambda: of_graph(
        source(*[1] * 15), node("y", "expand", ("x",), (-1, *[4] * 15), shape=(-1, *[4] * 15))
    ),
    "expanded, then taken together": lambda: of_graph(
        source(1, 1),
        node("y", "expand", ("x",), (-1, 2**15, 2**15), shape=(-1, 2**15, 2**15)),
        node("z", "matmul", ("y", "y"), (-1, 2**15, 2**15)),
        node("s", "sum", ("z",), (-1,), axes=(1, 2), keep=False),
    ),
    "doubled": lambda: _doubled(24),
    "padded": lambda: of_graph(
        source(1, 1),
        node(
            "y", "pad", ("x",), (-1, 1, 2**31 - 1), before=(2**30 - 1,), after=(2**30 - 1,), mode="constant", value=0.0
        ),
    ),
    "averaged": lambda: _image(
        8192,
        8192,
        "avg_pool",
        (-1, 1, 4097, 4097),
        kernel=(4096, 4096),
        stride=(1, 1),
        padding=(0, 0),
        ceil_mode=False,
        count_padding=False,
    ),
    "a wide kernel": lambda: _conv(4096, 2048, 2049, 1, 0, 1),
    "a wide padding": lambda: _conv(8, 2, 9, 1, 1 << 20, (1 << 21) - 1),
    "a wide stride": lambda: _conv(8, 2, 1, 1 << 30, 0, 1),
    "a wide dilation": lambda: _conv(2**14, 2, 1, 1, 0, 2**14 - 1),
    "attention": lambda: of_graph(
        source(2**16, 1), node("y", "attention", ("x", "x", "x"), (-1, 2**16, 1), scale=1.0, causal=False)
    ),
}


def attempt(data: bytes, folder: Path) -> list[str]:
    """Everything that the command line does with a file on its own; what refuses it says why."""
    path = folder / "costly.spvd"
    path.write_bytes(data)
    answers = []

    def run(network: Callable[[], object]) -> None:
        try:
            network()
        except SparseVDError as error:
            answers.append(str(error))

    run(lambda: Run(path).summary())
    run(lambda: load(path))
    run(lambda: _report(path))
    return answers


def _report(path: Path) -> str:
    restored = Run(path).network()
    return str(compact(restored.graph or restored.network, restored.example).compaction)


def main() -> None:
    """Every costly file in turn, by both decoders, with the memory of this process limited."""
    torch.set_num_threads(1)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    present = next(int(line.split()[1]) for line in lines if line.startswith("VmSize"))
    files = {name: make() for name, make in COSTLY.items()}
    most = (present << 10) + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    decoder = "c" if kernels.available() else "python"
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            started = time.thread_time()
            answers = attempt(data, Path(folder))
            seconds = round(time.thread_time() - started, 2)
            print(
                json.dumps({"file": name, "bytes": len(data), "decoder": decoder, "seconds": seconds, "says": answers})
            )


if __name__ == "__main__":
    main()
