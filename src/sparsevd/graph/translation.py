"""One translation of a graph of torch.export into ours: names, constants, shapes, and how to refuse."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsevd.errors import GraphError
from sparsevd.graph.operations import DTYPE_NAMES, OPS, Attribute
from sparsevd.graph.structure import Graph, Node

STILL_WORKS = "what needs no graph still works for this network: prune, summary, accelerate, save without an example"


class Translation:
    """The state of one translation: nodes and constants so far, and what stands for each of torch's nodes."""

    def __init__(self, program: Any, handlers: "dict[str, Handler]") -> None:
        self.program = program
        self.handlers = handlers
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self.parameters: set[str] = set()
        # A node of torch → our name for it; or names, where it gives several values; or a size, or None.
        self.values: dict[Any, Any] = {}
        self.taken: set[str] = set()
        self.numbering: Counter[str] = Counter()
        self.current: Any = None
        self.symbol: Any = None

    def graph(self) -> Graph:
        signature = self.program.graph_signature
        state = {**self.program.state_dict, **self.program.constants}
        attributes = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise GraphError(f"the network changes a buffer or its input in eval mode. {STILL_WORKS}")
        output: Any = None
        for node in self.program.graph.nodes:
            self.current = node
            if node.op == "placeholder" and node.name in attributes:
                name = attributes[node.name]
                self.values[node] = self.constant(name, state[name])
                if node.name in signature.inputs_to_parameters:
                    self.parameters.add(self.values[node])
            elif node.op == "placeholder":
                self._input(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                output = node.args[0]
            else:
                self.refuse(f"{node.op} {node.target}")
        outputs: list[str] = []
        for value in output:
            name = self.values.get(value) if isinstance(value, torch.fx.Node) else None
            if not isinstance(name, str):
                raise GraphError("the network must return a tensor or a tuple of tensors")
            outputs.append(name)
        nodes = self._whole(outputs)
        used = {name for node in nodes for name in node.inputs}
        constants = {name: tensor for name, tensor in self.constants.items() if name in used}
        return Graph(nodes, constants, tuple(outputs), frozenset(self.parameters & used)).check()

    def _whole(self, outputs: list[str]) -> tuple[Node, ...]:
        """The nodes that the outputs need, and every input."""
        needed = set(outputs)
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        for name in needed & self.constants.keys() & set(outputs):
            raise GraphError(f"the network returns {name!r}, which does not depend on its input")
        return tuple(node for node in self.nodes if node.name in needed or node.op == "input")

    def _input(self, node: Any) -> None:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise GraphError(f"input {node.name} is a {type(value).__name__}, not a tensor")
        size = value.shape[0]
        if isinstance(size, int) or size.node.expr.is_Integer:
            raise GraphError(
                f"the network works for one batch size only: it fixes the first axis of {node.name}, perhaps by a "
                f"number in a view or by a loop over the batch. {STILL_WORKS}"
            )
        if self.symbol is None:
            self.symbol = size.node.expr
        dtype = DTYPE_NAMES.get(value.dtype)
        if dtype is None:
            raise GraphError(f"input {node.name} has the type {value.dtype}")
        self.values[node] = self.add("input", [], {"dtype": dtype}, name=node.name)

    def _call(self, node: Any) -> None:
        value = node.meta.get("val")
        if isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool) or value is None:
            self.values[node] = None  # sizes: shapes are read from the results instead
            return
        target = str(node.target)
        if "getitem" in target:
            source, index = node.args
            self.values[node] = self.values[source][index]
            return
        if self._fold(node):
            return
        kind = target.removeprefix("aten.").split(".")[0]
        if kind not in self.handlers or not target.startswith("aten."):
            self.refuse(target)
        self.values[node] = self.handlers[kind](self, Arguments(self, node))

    def _fold(self, node: Any) -> bool:
        """Compute what depends on constants only, whatever the operation."""
        if not all(isinstance(self.values.get(source), str) for source in node.all_input_nodes):
            return False
        if not all(self.values[source] in self.constants for source in node.all_input_nodes):
            return False
        if not isinstance(node.meta["val"], Tensor) or "rand" in str(node.target):
            return False
        known = {source: self.constants[self.values[source]] for source in node.all_input_nodes}
        arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: known[source])
        self.values[node] = self.constant(node.name, node.target(*arguments, **options))
        return True

    def constant(self, name: str, tensor: Tensor) -> str:
        """Put a copy of a tensor in, under a name that is still free."""
        name = self._name(name)
        self.constants[name] = tensor.detach().clone().contiguous()
        return name

    def number(self, value: float | bool) -> str:
        """A number as a constant of the result's type, which it then does not change."""
        like = self.current.meta["val"]
        return self.constant("number", torch.tensor(value, dtype=like.dtype, device=like.device))

    def add(
        self,
        op: str,
        inputs: list[str],
        attributes: dict[str, Attribute] | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        name: str | None = None,
    ) -> str:
        """Append a node. Its shape is that of torch's node unless it is given."""
        node = Node(
            name=self._name(name or self.place(op)),
            op=op,
            inputs=tuple(inputs),
            attributes=attributes or {},
            shape=self.shape(self.current) if shape is None else shape,
        )
        self.nodes.append(node)
        return node.name

    def shape(self, node: Any) -> tuple[int, ...]:
        """The shape of torch's node, with -k for k times the batch size."""
        return tuple(self.size(size) for size in node.meta["val"].shape)

    def size(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        ratio = expression / self.symbol
        if not ratio.is_Integer:
            self.refuse(f"a shape of {expression} for batch size {self.symbol}")
        return -int(ratio)

    def _name(self, wanted: str) -> str:
        """A name that is still free, and from now on taken."""
        name = wanted
        while name in self.taken:
            self.numbering[wanted] += 1
            name = f"{wanted}_{self.numbering[wanted]}"
        self.taken.add(name)
        return name

    def place(self, op: str) -> str:
        """The path of the module for torch's own layers; elsewhere the operation, below the path."""
        path, kind = self._module()
        if not path:
            return op
        leaf = kind.startswith("torch.nn.modules") and not any(
            key.startswith(f"{path}.") and key.count(".") > path.count(".") + 1 for key in self.program.state_dict
        )
        return path if leaf else f"{path}.{op}"

    def _module(self) -> tuple[str, str]:
        stack = self.current.meta.get("nn_module_stack") or {}
        path, kind = list(stack.values())[-1] if stack else ("", "")
        return (path, kind) if not path.startswith("_empty") else ("", "")

    def refuse(self, what: str) -> NoReturn:
        path, kind = self._module()
        place = f" in module {path} ({kind.rsplit('.', 1)[-1]})" if path else ""
        frames = [line for line in (self.current.meta.get("stack_trace") or "").splitlines() if "File " in line]
        own = [line for line in frames if "/torch/" not in line.replace("\\", "/")]
        where = f", {own[-1].strip()}" if own else ""
        raise GraphError(
            f"{what} is not among the operations of a graph{place}{where}. There are {', '.join(OPS)}; {STILL_WORKS}"
        )


class Arguments:
    """The arguments of an ATen call by name, with defaults; values as our names for them."""

    def __init__(self, translation: Translation, node: Any) -> None:
        self.translation = translation
        self.node = node
        schema = node.target._schema.arguments
        self.given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        self.given |= dict(zip([argument.name for argument in schema], node.args, strict=False)) | node.kwargs

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def raw(self, name: str) -> Any:
        """A number, a flag, a text or a list of them; never something that depends on the batch."""
        value = self.given[name]
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, torch.fx.Node):
                self.translation.refuse(f"{self.node.target} with {name} computed from the batch size or the data")
        return value

    def value(self, name: str) -> str:
        found = self.optional(name)
        if found is None:
            self.translation.refuse(f"{self.node.target} without {name}")
        return found

    def optional(self, name: str) -> str | None:
        given = self.given.get(name)
        if given is None:
            return None
        if not isinstance(given, torch.fx.Node):
            return self.translation.number(given)
        found = self.translation.values[given]
        if not isinstance(found, str):
            self.translation.refuse(f"{self.node.target} with {name} computed from the batch size")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self.translation.shape(self.given[name])

    def axis(self, name: str, of: str = "self") -> int:
        axis = int(self.raw(name))
        return axis % max(1, len(self.shape(of)))

    def per_axis(self, name: str, count: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A setting for each spatial axis, given once or for each."""
        given = self.raw(name) if name in self else None
        if given is None or given == []:
            return default or (1,) * count
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        return values * count if len(values) == 1 else values


# What an ATen call becomes: the name of a node, or names, where it gives several values.
Handler = Callable[[Translation, Arguments], Any]
