"""A network as plain data: nodes in the order of computation, and constants by name."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.graph.operations import ARITHMETIC, DTYPES, KINDS, OPS, Attribute
from sparsevd.graph.outputs import Output, returned
from sparsevd.graph.shapes import check_size, result_shape
from sparsevd.reporting.table import table

FORMAT = 1
MOST_NODES = 10_000  # the largest networks in use have 3,000; to rebuild one takes a fraction of a millisecond a node

# These take values of any type; the others want floats.
_ANY_TYPE = ("reshape", "expand", "permute", "slice", "select", "concat")

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Node:
    """One operation: `inputs` are names of nodes before it or of constants, `shape` is that of its result.

    A size of -k in a shape is k times the batch size, so (-1, 3, 32, 32) is a batch of images.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    attributes: dict[str, Attribute]
    shape: tuple[int, ...]

    def integer(self, key: str) -> int:
        return self._attribute(key, int)

    def integers(self, key: str) -> tuple[int, ...]:
        return self._attribute(key, tuple)

    def real(self, key: str) -> float:
        return self._attribute(key, float)

    def flag(self, key: str) -> bool:
        return self._attribute(key, bool)

    def word(self, key: str) -> str:
        return self._attribute(key, str)

    def _attribute(self, key: str, kind: type[_Kind]) -> _Kind:
        value = self.attributes.get(key)
        if not isinstance(value, kind):
            raise GraphError(f"{self.op} {self.name!r}: {key}={value!r} should be of type {kind.__name__}")
        return value


@dataclass(frozen=True)
class Graph:
    """A network: `graph(x)` computes it in plain torch for any batch size.

    The inputs of the network are the nodes of op "input", in their order; `outputs` names what it returns, and `keys`
    what these are called if it returns a dict. Constants are tensors without gradient under names such as "fc1.weight";
    those that were parameters of the network, and may be trained further, are in `parameters`. See `sparsevd.graph` for
    how to use it.
    """

    nodes: tuple[Node, ...]
    constants: dict[str, Tensor]
    outputs: tuple[str, ...]
    parameters: frozenset[str] = field(default=frozenset())
    keys: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.op == "input")

    @property
    def device(self) -> torch.device:
        """Where its constants are; the CPU if it has none."""
        return next((tensor.device for tensor in self.constants.values()), torch.device("cpu"))

    def to(self, device: torch.device | str) -> "Graph":
        """The same graph with its constants there."""
        if self.device.type == "meta" and torch.device(device).type != "meta":
            raise GraphError("the network is on the meta device, and has shapes but no numbers; load its weights first")
        return replace(self, constants={name: tensor.to(device) for name, tensor in self.constants.items()})

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Output:
        expected = self.inputs
        if len(inputs) != len(expected):
            raise GraphError(f"the network takes {len(expected)} inputs, not {len(inputs)}")
        for node, value in zip(expected, inputs, strict=True):
            batch = inputs[0].shape[0] if inputs[0].ndim else 0
            if tuple(value.shape) != sizes(node.shape, batch) or value.dtype != DTYPES[node.word("dtype")]:
                raise GraphError(
                    f"input {node.name} must be {describe_shape(node.shape)} of {node.attributes['dtype']}, "
                    f"not {describe_shape(tuple(value.shape))} of {str(value.dtype).removeprefix('torch.')}"
                )
        given = {node.name: value for node, value in zip(expected, inputs, strict=True)}
        values = dict(self._values(given, self.constants))
        return returned(self.keys, tuple(values[name] for name in self.outputs))

    def _values(self, given: dict[str, Tensor], constants: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every value in turn, but only outputs are kept: what nothing reads any more is forgotten."""
        uses = Counter(name for node in self.nodes for name in node.inputs)
        values: dict[str, Tensor] = {}
        batch = next(iter(given.values())).shape[0]
        outputs = set(self.outputs)
        for node in self.nodes:
            if node.op == "input":
                value = given[node.name]
            else:
                arguments = [constants[name] if name in constants else values[name] for name in node.inputs]
                if node.op == "embedding":
                    _check_indices(node, *arguments)
                value = evaluate(node, arguments, batch)
            values[node.name] = value
            if node.name in outputs:
                yield node.name, value
            for name in node.inputs:
                uses[name] -= 1
                if not uses[name]:
                    values.pop(name, None)

    def check(self) -> "Graph":
        """Raise GraphError unless this is a well-formed graph; for graphs from files, and after every rewriting.

        Checked are names, operations, number of inputs, attributes and their values, and that each shape is the one
        the operation gives, for any batch size. Nothing is computed.
        """
        if len(self.nodes) > MOST_NODES or len(self.outputs) > MOST_NODES:
            raise GraphError(f"the graph has {len(self.nodes):,} operations; there may be {MOST_NODES:,} at most")
        self._check_names()
        if not self.inputs:
            raise GraphError("the graph has no input")
        for node in self.inputs:
            _check_node(node)
            if not node.shape or node.shape[0] != -1 or min(node.shape[1:], default=0) < 0:
                raise GraphError(f"input {node.name!r} of shape {node.shape}: only its first axis is the batch, -1")
        self._check_shapes()
        return self

    def _check_names(self) -> None:
        for name, constant in self.constants.items():
            if not isinstance(constant, Tensor):
                raise GraphError(f"constant {name!r} is a {type(constant).__name__}, not a tensor")
        known = set(self.constants)
        for node in self.nodes:
            if node.name in known:
                raise GraphError(f"the name {node.name!r} stands for two things")
            for name in node.inputs:
                if name not in known:
                    raise GraphError(
                        f"{node.op} {node.name!r} reads {name!r}, which is no constant and no node before it"
                    )
            known.add(node.name)
        if not self.outputs or not set(self.outputs) <= {node.name for node in self.nodes}:
            raise GraphError(f"the outputs {self.outputs} must be nodes of the graph")
        if self.keys and (len(self.keys) != len(self.outputs) or len({*self.keys}) != len(self.keys)):
            raise GraphError(f"the keys {self.keys} must be as many as the outputs {self.outputs}, and all different")
        if any("\n" in key for key in self.keys):
            raise GraphError(f"a key of {self.keys} has a line break")
        if not self.parameters <= self.constants.keys():
            raise GraphError(f"the parameters {sorted(self.parameters - self.constants.keys())} are no constants")

    def _check_shapes(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.constants.items()}
        types = {name: tensor.dtype for name, tensor in self.constants.items()}
        for node in self.nodes:
            shape = node.shape if node.op == "input" else shape_of(node, [shapes[name] for name in node.inputs])
            try:
                if node.op == "input":
                    check_size(shape)
                    shapes[node.name], types[node.name] = shape, DTYPES[node.word("dtype")]
                    continue
                types[node.name] = _result_type(node, [types[name] for name in node.inputs])
                _check_numbers(node, types[node.name])
            except (ValueError, TypeError) as error:
                raise _misfit(node, error) from error
            if shape != node.shape:
                raise GraphError(
                    f"{node.op} {node.name!r} is said to give {describe_shape(node.shape)}, but it gives "
                    f"{describe_shape(shape)}"
                )
            shapes[node.name] = shape

    def as_dict(self) -> dict[str, Any]:
        """Everything but the constants, as JSON can hold it; `Graph.from_dict` is the way back."""
        return {
            "format": FORMAT,
            "nodes": [
                {
                    "name": node.name,
                    "op": node.op,
                    "inputs": list(node.inputs),
                    "attributes": {
                        key: list(value) if isinstance(value, tuple) else value
                        for key, value in node.attributes.items()
                    },
                    "shape": list(node.shape),
                }
                for node in self.nodes
            ],
            "outputs": list(self.outputs),
            "parameters": sorted(self.parameters),
            **({"keys": list(self.keys)} if self.keys else {}),
        }

    @classmethod
    def from_dict(cls, description: dict[str, Any], constants: dict[str, Tensor]) -> "Graph":
        """The graph of a description from anywhere; it is checked, and GraphError says what is wrong with it."""
        try:
            if description["format"] != FORMAT:
                raise GraphError(f"the graph has format {description['format']!r}; this version reads format {FORMAT}")
            nodes = tuple(
                Node(
                    name=_text(node["name"]),
                    op=_text(node["op"]),
                    inputs=tuple(map(_text, node["inputs"])),
                    attributes={
                        key: tuple(value) if isinstance(value, list) else value
                        for key, value in node["attributes"].items()
                    },
                    shape=tuple(node["shape"]),
                )
                for node in description["nodes"]
            )
            outputs = tuple(map(_text, description["outputs"]))
            parameters = frozenset(map(_text, description["parameters"]))
            keys = tuple(map(_text, description.get("keys", ())))
        except (KeyError, TypeError, AttributeError) as error:
            raise GraphError(f"the description of the graph is damaged: {type(error).__name__} {error}") from error
        return cls(nodes, dict(constants), outputs, parameters, keys).check()

    def __str__(self) -> str:
        """A table: name, operation, shape, inputs with the shapes of constants, attributes."""
        rows = []
        for node in self.nodes:
            reads = [
                f"{name} {describe_shape(tuple(self.constants[name].shape))}" if name in self.constants else name
                for name in node.inputs
            ]
            attributes = " ".join(f"{key}={_plain(value)}" for key, value in node.attributes.items())
            rows.append((node.name, node.op, describe_shape(node.shape), ", ".join(reads), attributes))
        header = ("name", "operation", "shape", "reads", "attributes")
        results = (
            [f"{key}: {name}" for key, name in zip(self.keys, self.outputs, strict=True)] if self.keys else self.outputs
        )
        return f"{table(header, rows)}\nreturns {', '.join(results)}"


def shape_of(node: Node, inputs: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that a node gives to inputs of these shapes; GraphError if they do not fit, or it is no such node."""
    _check_node(node)
    if node.op == "input":
        raise GraphError(f"the shape of input {node.name!r} follows from nothing")
    try:
        return result_shape(node.op, inputs, node.attributes)
    except (ValueError, TypeError, IndexError) as error:
        raise _misfit(node, error) from error


def _misfit(node: Node, error: Exception) -> GraphError:
    return GraphError(f"{node.op} {node.name!r} does not fit its inputs: {error}")


def evaluate(node: Node, arguments: list[Tensor], batch: int) -> Tensor:
    """One operation on tensors."""
    attributes: dict[str, Any] = dict(node.attributes)
    if "shape" in attributes:
        attributes["shape"] = sizes(attributes["shape"], batch)
    return OPS[node.op].compute(*arguments, **attributes)


def _check_indices(node: Node, indices: Tensor, table: Tensor) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < len(table):
        raise GraphError(
            f"embedding {node.name!r} has {len(table)} rows, and is asked for those from {int(indices.min())} to "
            f"{int(indices.max())}"
        )


def sizes(shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
    """A shape with the batch size put in."""
    return tuple(size if size >= 0 else -size * batch for size in shape)


def describe_shape(shape: tuple[int, ...]) -> str:
    """As people write it: N×3×32×32, where N is the batch size."""
    parts = [str(size) if size >= 0 else "N" if size == -1 else f"{-size}N" for size in shape]
    return "×".join(parts) or "number"


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a name")
    return value


def _plain(value: Attribute) -> str:
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _result_type(node: Node, types: list[torch.dtype]) -> torch.dtype:
    """The type of a result, or TypeError. Only lookups, casts, arithmetic and moves take anything but floats."""
    if node.op == "cast":
        return DTYPES[node.word("dtype")]
    if node.op == "embedding":
        if types[0] not in (torch.int64, torch.int32) or not types[1].is_floating_point:
            raise TypeError(f"a table of {types[1]} with indices of {types[0]}")
        return types[1]
    if node.op == "attention" and types[3:] == [torch.bool]:
        types = types[:3]
    if node.op in _ANY_TYPE and len(set(types)) == 1:
        return types[0]
    if node.op == "sub" and torch.bool in types:
        raise TypeError("a difference of truth values")
    if node.op == "avg_pool" and len(node.integers("kernel")) == 3 and types[0].itemsize < 4:
        raise TypeError(f"an average over three axes of {types[0]}, which torch does not have")
    if node.op in ARITHMETIC:
        result = torch.promote_types(*types)
        return result if result.is_floating_point or node.op != "div" else torch.get_default_dtype()
    if len(set(types)) != 1 or not types[0].is_floating_point:
        raise TypeError(f"types {', '.join(map(str, types))}")
    return types[0]


def _check_numbers(node: Node, dtype: torch.dtype) -> None:
    """TypeError for a number that the values' type does not have."""
    for key, value in node.attributes.items():
        if type(value) is float and math.isfinite(value) and abs(value) > torch.finfo(dtype).max:
            raise TypeError(f"{key}={value} is too large for {dtype}")


def _check_node(node: Node) -> None:
    if node.op not in OPS:
        raise GraphError(f"node {node.name!r}: there is no operation {node.op!r}; the operations are {', '.join(OPS)}")
    operation = OPS[node.op]
    if not operation.least <= len(node.inputs) <= operation.most:
        raise GraphError(
            f"{node.op} {node.name!r} has {len(node.inputs)} inputs; it takes {operation.least} to {operation.most}"
        )
    if node.attributes.keys() != operation.attributes.keys():
        found, taken = sorted(node.attributes), sorted(operation.attributes)
        raise GraphError(f"{node.op} {node.name!r} has the attributes {found}; it takes {taken}")
    for key, kind in operation.attributes.items():
        if not KINDS[kind](node.attributes[key]):
            raise GraphError(f"{node.op} {node.name!r}: {key}={node.attributes[key]!r} is not allowed (kind: {kind})")
    if not KINDS["shape"](node.shape):
        raise GraphError(f"{node.op} {node.name!r}: {node.shape!r} is no shape")
