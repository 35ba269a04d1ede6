"""Small graphs that together have every operation, put together by hand: no network is captured for them."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparsevd.graph import DTYPES, OPS, Attribute, Graph, Node
from sparsevd.graph.shapes import result_shape


class Sketch:
    """A graph that grows: shapes are worked out."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.random = torch.Generator().manual_seed(seed)

    def input(self, *shape: int, dtype: str = "float32") -> str:
        return self._add(Node(f"x{len(self.nodes)}", "input", (), {"dtype": dtype}, (-1, *shape)))

    def tensor(self, name: str, *shape: int) -> str:
        """Random numbers, half of them zero, with a row of zeros; or positive ones for a variance."""
        values = torch.randn(shape, generator=self.random)
        if len(shape) > 1:
            values *= torch.rand(shape, generator=self.random) < 0.5
            values[0] = 0
        self.constants[name] = values.abs() + 0.1 if name.endswith("_var") else values
        self.shapes[name] = shape
        return name

    def __call__(self, op: str, *inputs: str, **attributes: Attribute) -> str:
        given = {key: attributes[key] for key in OPS[op].attributes}
        shape = result_shape(op, [self.shapes[name] for name in inputs], given)
        return self._add(Node(f"{op}{len(self.nodes)}", op, inputs, given, shape))

    def _add(self, node: Node) -> str:
        self.nodes.append(node)
        self.shapes[node.name] = node.shape
        return node.name

    def graph(self, *outputs: str) -> Graph:
        parameters = frozenset(name for name in self.constants if "running" not in name)
        return Graph(tuple(self.nodes), self.constants, outputs, parameters).check()


def images() -> Graph:
    """What a plan knows: convolutions, batch norm, pooling, a way around, a head."""
    g = Sketch(0)
    plain = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x = g.input(2, 8, 8)
    x = g("conv", x, g.tensor("conv1.weight", 4, 2, 3, 3), g.tensor("conv1.bias", 4), **plain)
    norm = [g.tensor(f"norm.{name}", 4) for name in ("running_mean", "running_var", "weight", "bias")]
    x = g("relu", g("batch_norm", x, *norm, eps=1e-5))
    y = g("conv", x, g.tensor("conv2.weight", 4, 2, 3, 3), **{**plain, "groups": 2})
    x = g("clamp", g("add", x, y), least=0.0, most=6.0)
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False}
    x = g("max_pool", x, dilation=(1, 1), **window)
    x = g("conv", x, g.tensor("conv3.weight", 6, 4, 2, 2), **{**plain, "stride": (2, 2)})
    x = g("avg_pool", x, count_padding=True, **{**window, "kernel": (1, 2), "stride": (1, 1)})
    x = g("reshape", x, shape=(-1, math.prod(g.shapes[x][1:])))
    x = g("linear", x, g.tensor("fc1.weight", 7, g.shapes[x][1]), g.tensor("fc1.bias", 7))
    x = g("linear", g("relu", x), g.tensor("fc2.weight", 3, 7))
    return g.graph(x)


def functions() -> Graph:
    """Every function of one value or of two."""
    g = Sketch(1)
    x = g.input(6)
    settings: dict[str, dict[str, Attribute]] = {
        "leaky_relu": {"slope": 0.1},
        "elu": {"alpha": 0.7},
        "gelu": {"approximate": "tanh"},
        "softplus": {"beta": 2.0, "threshold": 20.0},
        "clamp": {"least": -1.0, "most": math.inf},
        "pow": {"exponent": 2.0},
    }
    plain = ["relu", "selu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh"]
    plain += ["exp", "log", "sqrt", "rsqrt", "abs", "neg", "erf"]
    parts = [g(op, x, **settings.get(op, {})) for op in (*plain, *settings)]
    parts.append(g("prelu", x, g.tensor("prelu.weight", 6)))
    parts.append(g("cast", g("cast", x, dtype="float64"), dtype="float32"))
    binary = ("add", "sub", "mul", "div", "maximum", "minimum")
    parts += [g(op, x, g.tensor(f"{op}_by", 6)) for op in binary]
    x = g("concat", *parts, axis=1)
    x = g("linear", x, g.tensor("head.weight", 4, g.shapes[x][1]), g.tensor("head.bias", 4))
    return g.graph(g("log_softmax", x, axis=1))


def words() -> Graph:
    """A Transformer's parts, on whole numbers; two outputs."""
    g = Sketch(2)
    x = g("embedding", g.input(5, dtype="int64"), g.tensor("embed.weight", 9, 8))
    x = g("layer_norm", x, g.tensor("norm.weight", 8), g.tensor("norm.bias", 8), eps=1e-5)
    start = g("expand", g.tensor("start", 1, 1, 8), shape=(-1, 1, 8))
    x = g("concat", start, x, axis=1)
    q, k, v = (g("linear", x, g.tensor(f"{name}.weight", 8, 8), g.tensor(f"{name}.bias", 8)) for name in "qkv")
    y = g("attention", q, k, v, scale=0.3, causal=False)
    x = g("add", x, y)
    scores = g("softmax", g("matmul", x, g("permute", x, axes=(0, 2, 1))), axis=2)
    x = g("group_norm", x, g.tensor("groups.weight", 6), g.tensor("groups.bias", 6), groups=3, eps=1e-5)
    padded = g("pad", x, before=(1,), after=(2,), mode="constant", value=0.5)
    part = g("slice", padded, axis=2, start=1, stop=9, step=2)
    first = g("select", x, axis=1, index=0)
    whole = g("concat", g("sum", part, axes=(1,), keep=False), g("amax", x, axes=(1,), keep=False), first, axis=1)
    return g.graph(g("linear", whole, g.tensor("head.weight", 3, g.shapes[whole][1])), scores)


def volumes() -> Graph:
    """Convolutions along one axis and three, and transposed ones."""
    g = Sketch(3)
    one = {"stride": (1,), "padding": (1,), "dilation": (1,), "groups": 1}
    x = g("conv", g.input(3, 8), g.tensor("one.weight", 4, 3, 3), g.tensor("one.bias", 4), **one)
    up = {**one, "stride": (2,), "output_padding": (1,), "groups": 2}
    x = g("conv_transpose", x, g.tensor("up.weight", 4, 3, 3), g.tensor("up.bias", 6), **up)
    x = g("pad", x, before=(1,), after=(1,), mode="reflect", value=0.0)
    x = g("reshape", x, shape=(-1, 1, 6, 6, 3))
    three = {"stride": (1, 2, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "groups": 1}
    x = g("conv", x, g.tensor("three.weight", 2, 1, 2, 2, 2), **three)
    x = g("mean", x, axes=(2, 3, 4), keep=False)
    return g.graph(g("linear", x, g.tensor("head.weight", 3, 2), g.tensor("head.bias", 3)))


def of_type(graph: Graph, dtype: str) -> Graph:
    """The same in another type of floats; not checked."""
    constants = {name: tensor.to(DTYPES[dtype]) for name, tensor in graph.constants.items()}
    nodes = tuple(
        replace(node, attributes={"dtype": dtype}) if node.attributes.get("dtype") == "float32" else node
        for node in graph.nodes
    )
    return Graph(nodes, constants, graph.outputs, graph.parameters)


ALL = (images, functions, words, volumes)
