"""A graph as bytes, and back. What comes from a file is checked before torch sees it.

Names of nodes are not kept: a layer is called after its weight, everything else after its operation. Shapes are kept
only where the operation does not give them away.
"""

import struct

from torch import Tensor

from sparsevd.errors import FormatError, GraphError
from sparsevd.graph import OPS, Attribute, Graph, Node
from sparsevd.graph.cost import footprint
from sparsevd.modelfile.fields import Reader, signed, unsigned, varint

_LISTS = ("naturals", "positives", "axes", "shape")
_WORDS = ("dtype", "gelu", "padding")
_FLOATS = ("float", "eps")


def described(graph: Graph, constants: list[str]) -> bytes:
    """The bytes of a graph; `constants` are the names of the file's tensors, in their order."""
    places = {node.name: i for i, node in enumerate(graph.nodes)}
    numbers = {name: i for i, name in enumerate(constants)}
    shapes = {node.name: node.shape for node in graph.nodes}
    tensors = {name: tuple(tensor.shape) for name, tensor in graph.constants.items()}
    out = bytearray(varint(len(graph.nodes)))
    expected = 0
    for i, node in enumerate(graph.nodes):
        out += node.op.encode() + b"\n" + varint(len(node.inputs))
        for name in node.inputs:
            if name in places:
                out += varint(2 * (i - 1 - places[name]))
            else:
                out += varint(2 * unsigned(numbers[name] - expected) + 1)
                expected = numbers[name] + 1
        for key, kind in OPS[node.op].attributes.items():
            out += _attribute(kind, node.attributes[key])
        read = [shapes[name] if name in shapes else tensors[name] for name in node.inputs]
        guess = _guess(node.op, read, node.attributes)
        out += b"\0" if guess == node.shape else b"\1" + _attribute("shape", node.shape)
    out += varint(len(graph.outputs)) + b"".join(varint(len(graph.nodes) - 1 - places[name]) for name in graph.outputs)
    frozen = [i for i, name in enumerate(constants) if name in graph.constants and name not in graph.parameters]
    out += varint(len(frozen)) + b"".join(map(varint, frozen))
    return bytes(out) + b"".join(key.encode() + b"\n" for key in graph.keys)


def graph_of(data: bytes, constants: dict[str, Tensor], max_bytes: int) -> Graph:
    """The graph of these bytes, or a FormatError; `constants` are the file's tensors in their order.

    One example may take `max_bytes` on its way through the graph.
    """
    names = list(constants)
    reader = Reader(data, "graph")
    nodes: list[Node] = []
    used: list[int] = []
    taken = set(names)
    for i in range(reader.varint()):
        nodes.append(_node(reader, i, nodes, names, used, constants, taken))
    outputs = tuple(nodes[_place(len(nodes) - 1 - reader.varint(), len(nodes))].name for _ in range(reader.varint()))
    frozen = {reader.varint() for _ in range(reader.varint())}
    keys = () if reader.finished() else tuple(reader.line() for _ in outputs)
    if not reader.finished():
        raise FormatError("its graph is longer than what it describes")
    kept = {names[i]: constants[names[i]] for i in sorted(set(used))}
    parameters = frozenset(name for i, name in enumerate(names) if name in kept and i not in frozen)
    try:
        graph = Graph(tuple(nodes), kept, outputs, parameters, keys).check()
    except GraphError as error:
        raise FormatError(f"its graph is damaged: {error}") from error
    needed = footprint(graph)
    if needed > max_bytes:
        raise FormatError(
            f"one example takes {needed:,} bytes on its way through the graph, and {max_bytes:,} are allowed; if you "
            f"trust the file, give max_bytes={needed}"
        )
    return graph


def _node(
    reader: Reader,
    i: int,
    nodes: list[Node],
    names: list[str],
    used: list[int],
    constants: dict[str, Tensor],
    taken: set[str],
) -> Node:
    op = reader.line()
    if op not in OPS:
        raise FormatError(f"its graph has the unknown operation {op!r}")
    inputs: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for _ in range(reader.varint()):
        code = reader.varint()
        if code % 2 == 0:
            node = nodes[_place(i - 1 - code // 2, i)]
            inputs.append(node.name)
            shapes.append(node.shape)
        else:
            place = _place((used[-1] + 1 if used else 0) + signed(code // 2), len(names))
            used.append(place)
            inputs.append(names[place])
            shapes.append(tuple(constants[names[place]].shape))
    attributes = {key: _parsed(reader, kind) for key, kind in OPS[op].attributes.items()}
    if reader.byte():
        shape = reader.numbers(signs=True)
    else:
        guess = _guess(op, shapes, attributes)
        if guess is None:
            raise FormatError(f"its graph does not say the shape of a {op}")
        shape = guess
    weights = [name.removesuffix(".weight") for name in inputs if name.endswith(".weight")]
    name = weights[0] if weights and weights[0] not in taken else f"{op}_{i}"
    while name in taken:
        name += "_"
    taken.add(name)
    return Node(name, op, tuple(inputs), attributes, shape)


def _place(place: int, limit: int) -> int:
    if not 0 <= place < limit:
        raise FormatError("its graph reads something that is not there")
    return place


def _attribute(kind: str, value: Attribute) -> bytes:
    if kind in _LISTS:
        assert isinstance(value, tuple)
        return varint(len(value)) + b"".join(varint(unsigned(item) if kind == "shape" else item) for item in value)
    if kind in _WORDS:
        return str(value).encode() + b"\n"
    if kind in _FLOATS:
        return struct.pack(">d", value)
    assert isinstance(value, int)
    return varint(value)


def _parsed(reader: Reader, kind: str) -> Attribute:
    if kind in _LISTS:
        return reader.numbers(signs=kind == "shape")
    if kind in _WORDS:
        return reader.line()
    if kind in _FLOATS:
        return float(struct.unpack(">d", reader.take(8))[0])
    value = reader.varint()
    return value != 0 if kind == "bool" else value


def _guess(op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Attribute]) -> tuple[int, ...] | None:
    """The shape that an operation most likely gives: right for the usual ones, and checked for all."""
    if op == "reshape":
        shape = attributes["shape"]
        return shape if isinstance(shape, tuple) else None
    if not shapes or not shapes[0]:
        return None
    first = shapes[0]
    if op == "linear" and len(shapes) > 1 and shapes[1]:
        return (*first[:-1], shapes[1][0])
    kernel = shapes[1][2:] if op == "conv" and len(shapes) > 1 and shapes[1] else attributes.get("kernel")
    if op in ("conv", "max_pool", "avg_pool") and isinstance(kernel, tuple) and len(kernel) == len(first) - 2:
        rest = []
        for axis, (size, width) in enumerate(zip(first[2:], kernel, strict=True)):
            settings = [attributes.get(key, (1,) * len(kernel)) for key in ("stride", "padding", "dilation")]
            if any(not isinstance(value, tuple) or len(value) != len(kernel) for value in settings):
                return None
            stride, padding, dilation = (value[axis] for value in settings if isinstance(value, tuple))
            if stride < 1:
                return None
            rest.append((size + 2 * padding - dilation * (width - 1) - 1) // stride + 1)
        return (first[0], shapes[1][0] if op == "conv" else first[1], *rest)
    return first
