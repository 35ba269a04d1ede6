"""From a graph back to plain torch: a traced module with ordinary layers inside.

Layers whose tensors are constants become `nn.Linear`, `nn.Conv2d` and so on under their old names, so state_dict keys,
`sparsevd.summary`, `torch.compile` and further training work as on any network; all else is a call of a torch function.
"""

from collections import Counter, defaultdict
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from sparsevd.graph import names
from sparsevd.graph.outputs import returned
from sparsevd.graph.structure import Graph, Node, evaluate

_DEEPEST = 32  # words of a name that become modules in each other

# What identifies a layer: two nodes with the same are one module called twice.
_Layer = tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]


def to_module(graph: Graph) -> nn.Module:
    """A torch module that computes the graph, in eval mode. It has its own copies of the tensors.

    Their names are the graph's wherever torch can have them; see `sparsevd.graph.names`.
    """
    tree = _Tree()
    traced = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(traced)
    values: dict[str, fx.Proxy] = {}
    arguments: set[str] = set()
    for i, node in enumerate(graph.inputs):
        argument = names.argument(node.name, i, arguments)
        arguments.add(argument)
        values[node.name] = fx.Proxy(traced.placeholder(argument), tracer)
    batch: Any = _Batch(values[graph.inputs[0].name])
    layers = _layers(graph)
    paths: dict[_Layer, str] = {}
    for node in graph.nodes:
        if node.op == "input":
            continue
        if node.name in layers:
            key = layers[node.name]
            if key not in paths:
                paths[key] = tree.put(_path_of(node), _build(graph, node))
            call = traced.create_node(
                "call_module", paths[key], (values[node.inputs[0]].node,), name=_variable(paths[key])
            )
            values[node.name] = fx.Proxy(call, tracer)
            continue
        for name in node.inputs:
            if name not in values:
                tensor = graph.constants[name].clone()
                trained = name in graph.parameters and tensor.is_floating_point()
                path = tree.put(name, nn.Parameter(tensor) if trained else tensor)
                values[name] = fx.Proxy(traced.create_node("get_attr", path, name=_variable(path)), tracer)
        proxies: Any = [values[name] for name in node.inputs]  # which stand in for tensors
        values[node.name] = cast(Any, evaluate(node, proxies, batch))
    results: Any = returned(graph.keys, tuple(values[name].node for name in graph.outputs))
    traced.output(results)
    return fx.GraphModule(tree.root, traced, "Network").eval()


def _variable(path: str) -> str:
    """What the value of a module or tensor is called in the code; torch.fx sees to the rest."""
    return f"{path}_" if path == "self" else path


class _Batch:
    """The batch size in a traced module, asked for only where a shape needs it."""

    def __init__(self, first_input: fx.Proxy) -> None:
        self.first_input = first_input

    def __rmul__(self, times: int) -> Any:
        size: Any = self.first_input.size(0)
        return size if times == 1 else size * times


def _layers(graph: Graph) -> dict[str, _Layer]:
    """The nodes that can be a module: their tensors are constants that no other layer reads."""
    keys: dict[str, _Layer] = {}
    readers: dict[str, set[Any]] = defaultdict(set)
    for node in graph.nodes:
        key: _Layer = (node.op, node.inputs[1:], tuple(sorted(node.attributes.items())))
        for name in node.inputs[1:]:
            readers[name].add(key)
        if node.inputs:
            readers[node.inputs[0]].add(node.name)
        if node.op in _BUILDERS and all(name in graph.constants for name in node.inputs[1:]):
            keys[node.name] = key
    return {
        name: key
        for name, key in keys.items()
        if all(readers[constant] == {key} for constant in key[1]) and len(set(key[1])) == len(key[1])
    }


def _path_of(node: Node) -> str:
    """Where a layer was: its weight's name says so."""
    weight = node.inputs[_BUILDERS[node.op][1].index("weight") + 1]
    return weight.removesuffix(".weight") if weight.endswith(".weight") else node.name


def _build(graph: Graph, node: Node) -> nn.Module:
    make, places = _BUILDERS[node.op]
    tensors = [graph.constants[name] for name in node.inputs[1:]]
    with torch.device("meta"):  # no time for initial values
        layer: nn.Module = make(node, *tensors)
    for name, key, tensor in zip(places, node.inputs[1:], tensors, strict=False):
        if name in layer._buffers:
            setattr(layer, name, tensor.clone())
        else:
            setattr(layer, name, nn.Parameter(tensor.clone(), requires_grad=key in graph.parameters))
    if "num_batches_tracked" in layer._buffers:
        layer.num_batches_tracked = torch.tensor(0, device=tensors[0].device)
    return layer


def _linear(node: Node, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None)


def _conv(node: Node, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    options: dict[str, Any] = dict(node.attributes)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.ndim - 3]
    inputs = weight.shape[1] * options["groups"]
    layer: nn.Module = kind(inputs, weight.shape[0], tuple(weight.shape[2:]), bias=bias is not None, **options)
    return layer


def _conv_transpose(node: Node, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    options: dict[str, Any] = dict(node.attributes)
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[weight.ndim - 3]
    outputs = weight.shape[1] * options["groups"]
    layer: nn.Module = kind(weight.shape[0], outputs, tuple(weight.shape[2:]), bias=bias is not None, **options)
    return layer


def _batch_norm(node: Node, mean: Tensor, *rest: Tensor) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(node.shape) - 2]
    return kind(len(mean), eps=node.real("eps"))


def _layer_norm(node: Node, weight: Tensor, bias: Tensor) -> nn.Module:
    return nn.LayerNorm(tuple(weight.shape), eps=node.real("eps"))


def _group_norm(node: Node, weight: Tensor, bias: Tensor) -> nn.Module:
    return nn.GroupNorm(node.integer("groups"), len(weight), node.real("eps"))


def _embedding(node: Node, weight: Tensor) -> nn.Module:
    return nn.Embedding(*weight.shape)


def _prelu(node: Node, weight: Tensor) -> nn.Module:
    return nn.PReLU(len(weight))


# Operation → the layer for a node, and what its inputs after the first are called there.
_BUILDERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (_linear, ("weight", "bias")),
    "conv": (_conv, ("weight", "bias")),
    "conv_transpose": (_conv_transpose, ("weight", "bias")),
    "batch_norm": (_batch_norm, ("running_mean", "running_var", "weight", "bias")),
    "layer_norm": (_layer_norm, ("weight", "bias")),
    "group_norm": (_group_norm, ("weight", "bias")),
    "embedding": (_embedding, ("weight",)),
    "prelu": (_prelu, ("weight",)),
}


class _Tree:
    """Modules and tensors at their paths."""

    def __init__(self) -> None:
        self.root = nn.Module()
        self._parents: dict[tuple[nn.Module, str], str] = {}
        self._numbers: Counter[tuple[nn.Module, str]] = Counter()

    def put(self, wanted: str, item: nn.Module | Tensor) -> str:
        """Put a layer or a tensor at a path; the path is another one if something is there already."""
        *parents, last = (names.word(text) for text in wanted.split(".", _DEEPEST))
        place, path = self.root, []
        for parent in parents:
            name = parent if parent in place._modules else self._parents.get((place, parent), "")
            if not name:
                name = self._parents[place, parent] = self._free(place, parent)
                place.add_module(name, nn.Module())
            path.append(name)
            place = place.get_submodule(name)
        name = self._free(place, last)
        if isinstance(item, nn.Module):
            place.add_module(name, item)
        elif isinstance(item, nn.Parameter):
            place.register_parameter(name, item)
        else:
            place.register_buffer(name, item)
        return ".".join([*path, name])

    def _free(self, place: nn.Module, wanted: str) -> str:
        name = wanted
        while hasattr(place, name) or (place is self.root and name in names.reserved(at_top=True)):
            self._numbers[place, wanted] += 1
            name = f"{wanted}_{self._numbers[place, wanted]}"
        return name
