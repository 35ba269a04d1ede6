"""Networks that return tensors by name, in a dict or a class of their own: what is built on the graph keeps them."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd import kernels
from sparsevd.errors import ExportError, GraphError
from sparsevd.graph import Graph, capture, to_module
from sparsevd.graph.outputs import difference

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
pytestmark = pytest.mark.usefixtures("one_thread")


class ModelOutput(OrderedDict):
    """As in transformers: a dict whose keys are attributes too. torch does not know it."""

    def __getattr__(self, name):
        return self[name]


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


KINDS = {
    "dict": dict,
    "ordered": OrderedDict,
    "model output": ModelOutput,
    "dataclass": lambda items: Answer(**dict(items)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Named(nn.Module):
    """The order of the names is not that of the alphabet."""

    def __init__(self, kind, several):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.kind, self.several = KINDS[kind], several

    def forward(self, x):
        hidden = self.body(x).relu()
        items = [("logits", self.head(hidden))]
        return self.kind([*items, ("hidden", hidden)] if self.several else items)


def named(kind, several=False):
    torch.manual_seed(0)
    model = Named(kind, several).eval()
    model.body.weight.data[2:] = 0
    return model, torch.randn(4, 6)


def expected_of(model, x):
    with torch.no_grad():
        output = model(x)
    items = vars(output) if isinstance(output, Answer) else output
    return {key: value for key, value in items.items() if value is not None}


def assert_same(ours, expected):
    assert type(ours) is dict
    assert list(ours) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(ours[key].detach(), value)


@every_kind
@pytest.mark.parametrize("several", [False, True])
def test_graph_module_compaction_and_file_return_a_dict(kind, several, tmp_path):
    model, x = named(kind, several)
    expected = expected_of(model, x)
    graph = capture(model, x)
    assert_same(graph(x), expected)
    assert_same(to_module(graph)(x), expected)
    assert_same(Graph.from_dict(graph.as_dict(), graph.constants)(x), expected)
    small = sparsevd.compact(model, x)
    assert_same(small(x), expected)
    assert small.body.weight.shape[0] < 5 or several
    sparsevd.save(model, tmp_path / "net.spvd", example=x)
    assert_same(sparsevd.load(tmp_path / "net.spvd")(x), expected)
    assert not model._forward_hooks


@built
@every_kind
def test_plan_and_c(kind, tmp_path):
    model, x = named(kind)
    assert_same(sparsevd.plan(model, x)(x), expected_of(model, x))
    source, _ = sparsevd.export_c(model, x, tmp_path / "net.c")
    assert source.read_text() == sparsevd.export_c(bare(model), x, tmp_path / "net.c")[0].read_text()
    several, x = named(kind, several=True)
    for build in (sparsevd.plan, lambda *given: sparsevd.export_c(*given, tmp_path / "net.c")):
        with pytest.raises(GraphError, match="one output, and this network 1 and 2"):
            build(several, x)


def bare(model):
    """The same network with a bare tensor."""
    return nn.Sequential(OrderedDict(body=model.body, relu=nn.ReLU(), head=model.head)).eval()


@every_kind
def test_accelerate_returns_what_the_network_returns(kind):
    for several in (False, True):
        model, x = named(kind, several)
        fast = sparsevd.accelerate(model, x)
        assert type(fast(x)) is type(model(x))
        assert_same(expected_of(fast, x), expected_of(model, x))


@every_kind
def test_onnx_has_the_names(kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = named(kind, several=True)
    sparsevd.export_onnx(model, x, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_same(dict(zip(names, map(torch.from_numpy, found), strict=True)), expected_of(model, x))


class Odd(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(6, 3), make

    def forward(self, x):
        return self.make(self.layer(x))


ODD = {
    "a dict that holds tuple": lambda y: {"a": y, "b": (y, y)},
    "a dict that holds int as key": lambda y: {0: y},
    "a tuple that holds NoneType": lambda y: (y, None),
    "a list that holds list": lambda y: [[y]],
    "a str;": lambda y: "text",
    "a dict;": lambda y: {},
}


@pytest.mark.parametrize("words", ODD)
def test_what_cannot_be_carried_is_said_in_a_sentence(words, tmp_path):
    model, x = Odd(ODD[words]).eval(), torch.randn(2, 6)
    for build in (
        capture,
        sparsevd.compact,
        sparsevd.plan,
        lambda *given: sparsevd.save(given[0], tmp_path / "net.spvd", example=given[1]),
        lambda *given: sparsevd.export_c(*given, tmp_path / "net.c"),
    ):
        with pytest.raises(GraphError, match=f"^the network returns {words}.*Wrap it"):
            build(model, x)
    assert not model._forward_hooks
    assert not list(tmp_path.iterdir())
    if words != "a str;":
        assert sparsevd.accelerate(model, x)(x) is not None
    pytest.importorskip("onnxruntime")
    with pytest.raises(ExportError, match=words):
        sparsevd.export_onnx(model, x, tmp_path / "net.onnx")


def test_keys_of_a_graph_are_checked():
    graph = capture(*named("dict", several=True))
    assert str(graph).endswith("returns logits: head, hidden: relu")
    for keys in (["a"], ["a", "a"], ["a", "b\n"], ["a", 3]):
        with pytest.raises(GraphError):
            Graph.from_dict({**graph.as_dict(), "keys": keys}, graph.constants)


def test_keys_are_never_code():
    key = "'}; raise SystemExit #"
    graph = Graph.from_dict({**capture(*named("dict")).as_dict(), "keys": [key]}, capture(*named("dict")).constants)
    assert list(to_module(graph)(torch.randn(1, 6))) == [key]


def test_the_difference_of_outputs_is_relative_and_sees_nan_and_structure():
    one, nan, infinite = torch.tensor([1.0, 4.0]), torch.tensor([float("nan"), 4.0]), torch.tensor([1.0, float("inf")])
    assert difference(one, one) == difference(nan, nan) == difference(infinite, infinite) == 0
    assert difference(one * 1e-9, one * 2e-9) == pytest.approx(0.5)
    assert difference({"a": one, "b": one}, {"a": one, "b": one * 2}) == pytest.approx(0.5)
    assert difference(nan, one) == difference(one, nan) == difference(one, infinite) == float("inf")
    assert difference(one, (one, one)) == difference(one, {"a": one}) == difference(one, one[:1]) == float("inf")
    assert difference(one + 1e-6, torch.zeros(2)) == pytest.approx(4, rel=1e-3)  # nothing to be relative to
    assert difference(torch.empty(0), torch.empty(0)) == 0
