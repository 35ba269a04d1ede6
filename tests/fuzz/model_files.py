"""Damaged and hostile model files, with their checksums put right so that they get past it; and the graphs in them.

    cd tests
    python -m fuzz.model_files --inputs 1000000                     # through the decoder in C
    python -m fuzz.model_files --inputs 10000 --decoder python      # through its twin, both compared
    python -m fuzz.model_files --inputs 5000 --sanitised            # C with every read, write and overflow watched
    python -m fuzz.model_files --inputs 1000000 --guided            # atheris: what reaches new lines is built upon

The files are good ones with changes: in the bytes of the stream, in the bytes of the header or of the graph, in the
fields of a tensor's entry, in a node of the graph. A change in a graph is carried on through the shapes behind it where
that is possible, so that it gets past the checks. All go through the decoder and what reads the graph; one in some goes
on to be computed, compacted, planned and exported (`SHARES`). What is not read is refused with a FormatError, what has
no answer (an index that no table has) with a GraphError, within 10 seconds, and the memory stays within what
docs/format.md says.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparsevd
from fuzz import small_graphs
from fuzz.costly import sealed, with_header
from fuzz.trial import Trial
from sparsevd import kernels, modelfile
from sparsevd.errors import ArgumentError, FormatError, GraphError, SparseVDError, SparseVDWarning, WriteError
from sparsevd.graph import DTYPES, OPS, Graph, Node, to_module
from sparsevd.graph.compaction import compact, compact_graph
from sparsevd.graph.cost import footprint, operations
from sparsevd.graph.shapes import result_shape
from sparsevd.kernels.coder import NativeCoder
from sparsevd.modelfile import container, native
from sparsevd.modelfile.container import FRAME, Entry, Form, Packed
from sparsevd.modelfile.description import described
from sparsevd.modelfile.quantisation import entries_of
from sparsevd.modelfile.symbols import PythonCoder
from sparsevd.runs.run import Run

# One input in so many goes so deep: decoded and its graph checked; computed, compacted and planned; rebuilt as a module
# and exported to C; from a file through `load`, `info` and `restore`, accelerated and captured again.
SHARES = (1, 40, 400, 4000)
_SMALL = 1 << 24  # bytes of a run: larger ones are right, but take long
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 127, 128, 255, 1000, 2**14, 2**16, 2**20, 2**26, 2**31 - 1, 2**31, 2**62)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-5, -1e-5, 1e30, 1e308, math.inf, -math.inf, math.nan, 5e-324, 0.5, 2.0)
NAMES = (
    "",
    ".",
    "..",
    ".weight",
    "weight",
    "a..b",
    "forward.weight",
    "lambda.weight",
    "graph.weight",
    "conv-1",
    "é",
    "ﬁ",
)
NAMES += (
    'x") or print("hello',
    "self",
    "torch",
    "training",
    "_modules.weight",
    "input_0",
    "relu_1",
    "a b",
    "x\\",
    "'",
    "*/",
)
NAMES += ("a." * 400, "w" * 5000, "x_" + "9" * 5000, "\0", "\u2028", "%s{}", "__class__.__init__", "0", "None.bias")


def good_files() -> list[tuple[bytes, Packed]]:
    """Small files that together hold every form and every operation, with graphs and without."""
    torch.manual_seed(0)
    files = []
    for make in small_graphs.ALL:
        graph = make()
        for precision in ("lossless", 3):
            entries = entries_of(graph.constants, precision, {})
            packed = Packed(entries, described(graph, list(graph.constants)))
            files.append((container.encode(packed), packed))
    dense = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5))
    tied = nn.ModuleDict({"a": nn.Linear(5, 5).half(), "b": nn.Linear(3, 2).double(), "n": nn.BatchNorm1d(3)})
    tied["c"] = tied["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)  # of weights that rounding loses
        files.append(modelfile.pack(sparsevd.sparsify(dense, initial_log_sigma2=-4.0), precision="posterior"))
    files.append(modelfile.pack(tied))
    files.append(modelfile.pack(nn.Linear(40, 30), precision=2))
    return files


class Mutants:
    """Files made from good ones."""

    def __init__(self) -> None:
        self.files = good_files()
        self.graphs = [make() for make in small_graphs.ALL]

    def make(self, draw: random.Random) -> bytes:
        data, packed = draw.choice(self.files)
        kind = draw.random()
        if kind < 0.35:
            return sealed(changed(data[FRAME:], draw))
        if kind < 0.5:
            return with_header(changed(container.header_of(packed), draw), draw.randbytes(draw.choice((0, 5, 100))))
        if kind < 0.58 and packed.graph:
            other = replace(packed, graph=changed(packed.graph, draw), extra=draw.choice((0, 0, 0, 1, 200)))
            return container.encode(other, choose_widths=False)
        if kind < 0.75:
            return self.with_other_entry(packed, draw)
        return self.with_other_node(draw.choice(self.graphs), draw)

    def with_other_entry(self, packed: Packed, draw: random.Random) -> bytes:
        """One tensor is said to be another: of another name, type, shape, form or precision."""
        entries = [replace(entry) for entry in packed.entries]
        for _ in range(draw.choice((1, 1, 2))):
            place = draw.randrange(len(entries))
            entries[place] = _changed_entry(entries[place], place, draw)
        other = replace(packed, entries=entries)
        if all(_has_its_values(entry) for entry in entries) and draw.random() < 0.8:
            # The bits of a float are too large for an integer, or images are wider than their matrix.
            with suppress(WriteError, ArgumentError):
                return container.encode(other, choose_widths=False)
        return with_header(container.header_of(other), draw.randbytes(draw.choice((0, 5, 100))))

    def with_other_node(self, graph: Graph, draw: random.Random) -> bytes:
        """A graph with a changed node, or several; shapes follow as far as they can."""
        if draw.random() < 0.1:
            graph = small_graphs.of_type(graph, draw.choice(("float16", "bfloat16", "float64", "int64", "bool")))
        nodes, constants = list(graph.nodes), dict(graph.constants)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            change = draw.choice(
                (_other_attribute, _other_attribute, _other_inputs, _other_op, _other_shape, _other_constant)
            )
            change(nodes, constants, draw)
        if draw.random() < 0.9:
            nodes = _with_shapes(nodes, constants)
        outputs = graph.outputs if draw.random() < 0.9 else tuple(draw.choice(nodes).name for _ in range(2))
        names = list(constants)
        if draw.random() < 0.1:
            place = draw.randrange(len(names))
            other = draw.choice(NAMES)
            if other not in constants:
                constants = {other if name == names[place] else name: tensor for name, tensor in constants.items()}
                nodes = [_renamed(node, names[place], other) for node in nodes]
        made = Graph(tuple(nodes), constants, outputs, frozenset(draw.sample(list(constants), len(constants) // 2)))
        packed = Packed(entries_of(constants, "lossless", {}))
        packed.graph = described(made, [entry.name for entry in packed.entries])
        return container.encode(packed, choose_widths=False)


def changed(data: bytes, draw: random.Random) -> bytes:
    """Bytes with a few of them flipped, replaced, put in, taken away or repeated."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        kind, place = draw.randrange(5), draw.randrange(len(out) + 1)
        if kind == 0 and out:
            out[place % len(out)] ^= 1 << draw.randrange(8)
        elif kind == 1 and out:
            out[place % len(out)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        elif kind == 2:
            out[place:place] = draw.randbytes(draw.choice((1, 2, 9)))
        elif kind == 3:
            del out[place : place + draw.choice((1, 2, 20))]
        else:
            other = draw.randrange(len(out) + 1)
            out[place:place] = out[other : other + 12]
    return bytes(out)


def _changed_entry(entry: Entry, place: int, draw: random.Random) -> Entry:
    match draw.choice(("name", "dtype", "shape", "form", "mantissa", "step", "width", "alias")):
        case "name":
            entry.name = draw.choice(NAMES)
        case "dtype":
            entry.dtype = draw.randrange(12)
        case "shape":
            sizes = list(entry.shape)
            if sizes and draw.random() < 0.6:
                sizes[draw.randrange(len(sizes))] = draw.choice(NUMBERS)
            else:
                sizes = [draw.choice(NUMBERS[:12]) for _ in range(draw.choice((0, 1, 2, 3, 5, 16, 17)))]
            entry.shape = tuple(sizes)
            if entry.form in (Form.FLOAT, Form.GRID) and math.prod(max(1, size) for size in sizes) <= 1 << 16:
                entry.values = np.random.default_rng(0).integers(-3, 3, entry.matrix_shape).astype(np.int32)
        case "form":
            entry.form = Form(draw.randrange(4))
        case "mantissa":
            entry.mantissa = draw.choice((0, 1, 22, 23, 24, 255))
        case "step":
            entry.step = draw.choice((0, 1, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xFFFF))
        case "width":
            entry.width = draw.choice(NUMBERS)
        case "alias":
            entry.form, entry.alias = Form.ALIAS, draw.choice((0, max(0, place - 1), place, 10**6))
    return entry


def _has_its_values(entry: Entry) -> bool:
    """Whether a tensor is one that the encoder takes, and small."""
    if entry.dtype >= len(container.DTYPE_SIZES) or math.prod(max(1, size) for size in entry.shape) > 1 << 20:
        return False
    if entry.form == Form.ALIAS:
        return True
    if entry.form == Form.RAW:
        return isinstance(entry.values, bytearray)
    fits = isinstance(entry.values, np.ndarray) and entry.values.shape == entry.matrix_shape and entry.mantissa < 24
    return fits and entry.width <= entry.matrix_shape[1]


Nodes, Constants = list[Node], dict[str, Tensor]


def _other_attribute(nodes: Nodes, constants: Constants, draw: random.Random) -> None:
    place = draw.randrange(len(nodes))
    attributes: dict[str, Any] = dict(nodes[place].attributes)
    if not attributes:
        return
    key = draw.choice(sorted(attributes))
    kind, value = OPS[nodes[place].op].attributes[key], attributes[key]
    match kind:
        case "float" | "eps":
            value = draw.choice(FLOATS)
        case "bool":
            value = not value
        case "dtype":
            value = draw.choice(list(DTYPES))
        case "gelu" | "padding":
            value = draw.choice(("none", "tanh", "constant", "reflect", "replicate", "circular", "other"))
        case "shape":
            value = _other_sizes(value, draw, signs=True)
        case "naturals" | "positives" | "axes":
            value = _other_sizes(value, draw)
        case _:
            value = draw.choice(NUMBERS)
    nodes[place] = replace(nodes[place], attributes={**attributes, key: value})


def _other_sizes(sizes: tuple[int, ...], draw: random.Random, signs: bool = False) -> tuple[int, ...]:
    new = list(sizes)
    kind = draw.random()
    if new and kind < 0.7:
        place = draw.randrange(len(new))
        new[place] = draw.choice((*NUMBERS, new[place] + 1, new[place] * 2))
        if signs and draw.random() < 0.2:
            new[place] = -new[place]
    elif kind < 0.8:
        draw.shuffle(new)
    elif kind < 0.9:
        new.insert(draw.randrange(len(new) + 1), draw.choice((0, 1, 2)))
    elif new:
        del new[draw.randrange(len(new))]
    return tuple(new)


def _other_inputs(nodes: Nodes, constants: Constants, draw: random.Random) -> None:
    place = draw.randrange(1, len(nodes))
    inputs = list(nodes[place].inputs)
    known = [*(node.name for node in nodes[:place]), *constants]
    kind = draw.random()
    if inputs and kind < 0.7:
        inputs[draw.randrange(len(inputs))] = draw.choice(known)
    elif kind < 0.8:
        inputs.append(draw.choice(known))
    elif kind < 0.9 and inputs:
        inputs.pop()
    else:
        draw.shuffle(inputs)
    nodes[place] = replace(nodes[place], inputs=tuple(inputs))


def _other_op(nodes: Nodes, constants: Constants, draw: random.Random) -> None:
    """Another operation, with attributes that may do."""
    place = draw.randrange(len(nodes))
    node, op = nodes[place], draw.choice(list(OPS))
    rank = max(1, len(node.shape) - 2)
    usual: dict[str, Callable[[], Any]] = {
        "float": lambda: draw.choice(FLOATS[2:7]),
        "eps": lambda: 1e-5,
        "bool": lambda: draw.random() < 0.5,
        "dtype": lambda: draw.choice(list(DTYPES)),
        "gelu": lambda: "none",
        "padding": lambda: draw.choice(("constant", "reflect", "replicate", "circular")),
        "shape": lambda: node.shape,
        "naturals": lambda: (draw.choice((0, 0, 1)),) * rank,
        "positives": lambda: (draw.choice((1, 1, 2)),) * rank,
        "axes": lambda: tuple(range(draw.choice((0, 1)), len(node.shape))),
        "axis": lambda: draw.choice((0, 1, 2)),
        "natural": lambda: draw.choice((0, 1, 2)),
        "positive": lambda: 1,
    }
    attributes = {
        key: node.attributes[key] if key in node.attributes and draw.random() < 0.7 else usual[kind]()
        for key, kind in OPS[op].attributes.items()
    }
    inputs = node.inputs
    known = [*(other.name for other in nodes[:place]), *constants]
    if known and draw.random() < 0.8:
        wanted = draw.randint(OPS[op].least, min(OPS[op].most, 5))
        inputs = (*inputs[:wanted], *(draw.choice(known) for _ in range(wanted - len(inputs))))
    nodes[place] = replace(node, op=op, attributes=attributes, inputs=inputs)


def _other_shape(nodes: Nodes, constants: Constants, draw: random.Random) -> None:
    place = draw.choice([0, draw.randrange(len(nodes))])
    nodes[place] = replace(nodes[place], shape=_other_sizes(nodes[place].shape, draw, signs=True))


def _other_constant(nodes: Nodes, constants: Constants, draw: random.Random) -> None:
    name = draw.choice(list(constants))
    tensor = constants[name]
    match draw.randrange(6):
        case 0:
            tensor = tensor.to(draw.choice(list(DTYPES.values())))
        case 1:
            tensor = tensor[:-1] if tensor.ndim else tensor[None]
        case 2:
            tensor = tensor[None]
        case 3:
            tensor = tensor.sum()
        case 4:
            tensor = tensor * draw.choice(FLOATS)
        case 5:
            tensor = torch.cat([tensor, tensor]) if tensor.ndim else tensor
    constants[name] = tensor


def _with_shapes(nodes: Nodes, constants: Constants) -> Nodes:
    """Shapes as the operations give them, up to where they give none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in constants.items()}
    made = []
    for node in nodes:
        shape = node.shape
        if node.op != "input":
            with suppress(ValueError, TypeError, IndexError, ZeroDivisionError):
                shape = result_shape(node.op, [shapes[name] for name in node.inputs], dict(node.attributes))
        shapes[node.name] = shape
        made.append(replace(node, shape=shape))
    return made


def _renamed(node: Node, old: str, new: str) -> Node:
    return replace(node, inputs=tuple(new if name == old else name for name in node.inputs))


class Taker:
    """Gives a file to everything that may read it, each of which may refuse it; `trial` counts how far they get."""

    def __init__(self, trial: Trial, folder: Path, depth: int) -> None:
        self.trial, self.folder, self.depth = trial, folder, depth

    def take(self, data: bytes, number: int) -> None:
        try:
            graph = modelfile.unpack_graph(data)
        except FormatError as error:
            if "holds no graph" not in str(error):
                raise
            state = modelfile.unpack(data)
            assert sum(tensor.numel() * 4 for tensor in state.values()) <= 2 * container.allowed_bytes(data, None)
            self.trial.count("read")
            return
        self.trial.count("graphs")
        depth = max(level for level in range(self.depth + 1) if number % SHARES[level] == 0)
        if depth == 0 or footprint(graph) > _SMALL or operations(graph) > _SMALL:
            return
        examples = tuple(
            torch.zeros([max(1, size) for size in node.shape], dtype=DTYPES[str(node.attributes["dtype"])])
            for node in graph.inputs
        )
        self.computed(graph, examples)
        if depth > 1:
            self.exported(graph, examples)
        if depth > 2:
            self.from_a_file(data, graph, examples)

    def computed(self, graph: Graph, examples: tuple[Tensor, ...]) -> None:
        """What passed the check computes, compacts to the same, and is planned to the same."""
        self.trial.count("computed")
        expected = graph(*examples)
        with suppress(SparseVDError):
            small, report = compact_graph(graph)
            str(report)
            small(*examples)
            self.trial.count("compacted")
        with suppress(SparseVDError):
            ours = sparsevd.plan(graph, examples[0])(examples[0])
            self.trial.count("planned")
            # Nothing overflows on the way.
            usual = all(tensor.abs().max() < 100 for tensor in graph.constants.values() if tensor.numel())
            if usual and isinstance(expected, Tensor) and expected.numel() and expected.isfinite().all():
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * max(1.0, float(expected.abs().max())))

    def exported(self, graph: Graph, examples: tuple[Tensor, ...]) -> None:
        module = to_module(graph)
        with torch.no_grad():
            module(*examples)
        with suppress(SparseVDError):
            sparsevd.export_c(graph, examples[0], self.folder / "network.c")
            self.trial.count("exported")

    def from_a_file(self, data: bytes, graph: Graph, examples: tuple[Tensor, ...]) -> None:
        path = self.folder / "file.spvd"
        path.write_bytes(data)
        module = sparsevd.load(path)
        with suppress(SparseVDError):
            str(Run(path).summary())
        with suppress(SparseVDError):
            restored = Run(path).network()
            str(compact(restored.graph or restored.network, restored.example).compaction)
        with suppress(SparseVDError):
            sparsevd.accelerate(module, examples)
        with suppress(SparseVDError):
            compact(module, examples)
        self.trial.count("from a file")


@contextmanager
def decoding_with(decoder: str) -> Iterator[None]:
    """Decode with the twin in Python, which takes a hundred times as long; files are still made with C."""
    before = container.coder

    def chosen(data: bytes | None = None) -> native.Coder:
        return PythonCoder(data) if data is not None or not kernels.available() else NativeCoder()

    container.coder = chosen if decoder == "python" else before
    try:
        yield
    finally:
        container.coder = before


def compared(data: bytes) -> None:
    """Both decoders read the same, or both refuse; but the one in Python may find that it takes too long."""
    found = []
    for decoder in ("python", "c"):
        with decoding_with(decoder):
            try:
                found.append(modelfile.unpack(data))
            except FormatError as error:
                found.append(str(error))
    ours, theirs = found
    if isinstance(ours, str) or isinstance(theirs, str):
        too_long = isinstance(ours, str) and "compiled kernels" in ours
        assert too_long or isinstance(ours, str) == isinstance(theirs, str), (ours, theirs)
        return
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(_bytes(tensor), _bytes(theirs[name])), name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def resident(field: str = "VmHWM") -> int:
    """Bytes of memory of this process at their peak, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def run(inputs: int, seed: int, decoder: str = "c", depth: int = 3, progress: int = 0) -> Trial:
    """So many files from this seed. `depth` is how far they go at most: see `SHARES`."""
    trial = Trial(f"model files, decoder in {decoder}")
    draw = random.Random(seed)
    mutants = Mutants()
    before, largest = resident(), 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), decoding_with(decoder):
        # Torch's, of zero-element tensors and the like.
        warnings.simplefilter("ignore")
        taker = Taker(trial, Path(folder), depth)
        for number in range(inputs):
            data = mutants.make(draw)
            largest = max(largest, len(data))
            with trial.one(data.hex(), FormatError, GraphError):
                taker.take(data, number)
                if decoder == "python" and kernels.available():
                    compared(data)
            if progress and (number + 1) % progress == 0:
                print(trial, flush=True)
    torch.set_num_threads(threads)
    # Six times what the tensors may take, and a run.
    allowed = 6 * container.allowed_bytes(bytes(FRAME + largest), None) + (1 << 30)
    if resident() - before > allowed:
        raise MemoryError(f"{resident() - before:,} bytes at the peak, and {allowed:,} are allowed: {trial}")
    return trial


def guided(inputs: int, seed: int) -> None:
    """The first byte says which kind of file; the rest is the header, the graph or the content itself."""
    import atheris

    for module in ("container", "description", "fields"):
        for item in vars(sys.modules[f"sparsevd.modelfile.{module}"]).values():
            if isinstance(item, FunctionType) and item.__module__ == f"sparsevd.modelfile.{module}":
                atheris.instrument_func(item)
    files = good_files()
    trial = Trial("model files, guided")
    taker = Taker(trial, Path(tempfile.mkdtemp()), depth=1)
    started = time.perf_counter()

    def one(data: bytes) -> None:
        kind, rest = (data[0], data[1:]) if data else (0, b"")
        if kind % 3 == 0:
            made = sealed(rest)
        elif kind % 3 == 1:
            made = with_header(rest, b"tail")
        else:
            made = container.encode(replace(files[kind % 8][1], graph=rest), choose_widths=False)
        with trial.one(made.hex(), FormatError, GraphError):
            taker.take(made, trial.inputs)
        if trial.inputs % 50_000 == 0 or trial.inputs == inputs:
            print(trial, f"{time.perf_counter() - started:.0f} s", flush=True)

    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=2000", "-rss_limit_mb=8000"], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder", choices=("c", "python"), default="c")
    parser.add_argument("--depth", type=int, choices=range(len(SHARES)), default=len(SHARES) - 1)
    parser.add_argument("--guided", action="store_true", help="with atheris, if it is installed")
    parser.add_argument("--sanitised", action="store_true", help="on kernels with sanitisers")
    options = parser.parse_args()
    if options.sanitised:
        from fuzz import sanitised

        with tempfile.TemporaryDirectory() as folder:
            environment = sanitised.environment(Path(folder))
            if environment is None:
                sys.exit("this compiler has no sanitisers")
            arguments = [argument for argument in sys.argv[1:] if argument != "--sanitised"]
            command = [sys.executable, "-m", "fuzz.model_files", *arguments]
            sys.exit(subprocess.run(command, env=os.environ | environment, check=False).returncode)
    if options.guided:
        guided(options.inputs, options.seed)
        return
    print(run(options.inputs, options.seed, options.decoder, options.depth, progress=50_000))


if __name__ == "__main__":
    main()
