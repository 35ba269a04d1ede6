"""A graph as bytes, and back. What comes from a file is checked before torch sees it.

Names of nodes are not kept: a layer is called after its weight, everything else after its operation. Shapes are kept
only where the operation does not give them away.
"""

import struct
from dataclasses import replace

from torch import Tensor

from sparsevd.errors import FormatError, GraphError
from sparsevd.graph import OPS, Attribute, Graph, Node
from sparsevd.graph.cost import footprint
from sparsevd.graph.structure import shape_of
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
        out += b"\0" if _left_out(node, read) else b"\1" + _attribute("shape", node.shape)
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
        try:
            nodes.append(_node(reader, i, nodes, names, used, constants, taken))
        except GraphError as error:
            raise FormatError(f"its graph is damaged: {error}") from error
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
    said = reader.numbers(signs=True) if reader.byte() else None
    weights = [name.removesuffix(".weight") for name in inputs if name.endswith(".weight")]
    name = weights[0] if weights and weights[0] not in taken else f"{op}_{i}"
    while name in taken:
        name += "_"
    taken.add(name)
    node = Node(name, op, tuple(inputs), attributes, said or ())
    return node if said is not None else replace(node, shape=shape_of(node, shapes))


def _place(place: int, limit: int) -> int:
    if not 0 <= place < limit:
        raise FormatError("its graph reads something that is not there")
    return place


def _attribute(kind: str, value: Attribute) -> bytes:
    if isinstance(value, tuple):
        return varint(len(value)) + b"".join(varint(unsigned(item) if kind == "shape" else item) for item in value)
    if isinstance(value, str):
        return value.encode() + b"\n"
    return struct.pack(">d", value) if isinstance(value, float) else varint(value)


def _parsed(reader: Reader, kind: str) -> Attribute:
    if kind in _LISTS:
        return reader.numbers(signs=kind == "shape")
    if kind in _WORDS:
        return reader.line()
    if kind in _FLOATS:
        return float(struct.unpack(">d", reader.take(8))[0])
    value = reader.varint()
    return value != 0 if kind == "bool" else value


def _left_out(node: Node, read: list[tuple[int, ...]]) -> bool:
    """Whether the file does not say a node's shape.

    Every shape could be left out, since the operation gives it; but the first files say most of them, and the same
    network shall always be the same bytes. So these stay the only ones.
    """
    if node.op in ("reshape", "linear", "conv"):
        return True
    if node.op in ("max_pool", "avg_pool"):
        try:
            return node.shape == shape_of(replace(node, attributes={**node.attributes, "ceil_mode": False}), read)
        except GraphError:  # which a reader shall find
            return False
    return bool(read) and bool(read[0]) and node.shape == read[0]
