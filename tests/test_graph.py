"""The graph of a network: it computes what the network computes, survives plain data, and refuses what it must."""

import itertools
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import networks
import sparsevd
from fuzz import small_graphs
from sparsevd.errors import GraphError
from sparsevd.graph import DTYPES, OPS, Graph, Node, capture, to_module
from sparsevd.graph.cost import footprint

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs_of_batch(example, batch):
    """Other data of the same kind, of another batch size."""
    values = example if isinstance(example, tuple) else (example,)
    return tuple(
        torch.randint_like(value[:1].expand(batch, *value.shape[1:]), 0, 30)
        if value.dtype == torch.int64
        else torch.randn(batch, *value.shape[1:])
        for value in values
    )


def flat(result):
    return torch.cat([value.flatten() for value in (result if isinstance(result, tuple) else (result,))])


def assert_same(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, theirs.nan_to_num().abs().max().item()))


@pytest.mark.parametrize("name", networks.NETWORKS)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_graph_and_module_compute_the_network(captured, name, batch):
    model, example, graph = captured[name]
    inputs = inputs_of_batch(example, batch)
    with torch.no_grad():
        expected = model(*inputs)
        assert_same(graph(*inputs), expected)
        assert_same(to_module(graph)(*inputs), expected)


def test_the_networks_use_every_operation(captured):
    used = {node.op for _, _, graph in captured.values() for node in graph.nodes}
    assert used == set(OPS)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_plain_data_and_back(captured, name):
    _, example, graph = captured[name]
    again = Graph.from_dict(json.loads(json.dumps(graph.as_dict())), graph.constants)
    assert again.nodes == graph.nodes
    assert again.outputs == graph.outputs
    inputs = inputs_of_batch(example, 3)
    assert torch.equal(flat(again(*inputs)).nan_to_num(), flat(graph(*inputs)).nan_to_num())


def test_the_model_is_left_alone_and_the_graph_has_its_own_tensors():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    model[1].eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    graph = capture(model, torch.randn(1, 3))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    first = graph(torch.ones(2, 3))
    nn.init.zeros_(model[0].weight)
    assert torch.equal(graph(torch.ones(2, 3)), first)
    module = to_module(graph)
    nn.init.zeros_(module.get_submodule("0").weight)
    assert torch.equal(graph(torch.ones(2, 3)), first)


def test_module_has_ordinary_layers_with_the_old_keys(captured):
    model, example, graph = captured["resnet"]
    module = to_module(graph)
    assert module.state_dict().keys() == model.state_dict().keys()
    assert isinstance(module.get_submodule("3.conv1"), nn.Conv2d)
    assert sparsevd.summary(module).as_dict() == sparsevd.summary(model).as_dict()
    module.train()
    flat(module(*inputs_of_batch(example, 2))).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_shared_layers_stay_shared():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    graph = capture(model, torch.randn(1, 4))
    module = to_module(graph)
    x = torch.randn(5, 4)
    assert torch.equal(module(x), model(x))
    assert len(list(module.parameters())) == 2


def test_what_depends_on_no_input_becomes_a_constant():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
            self.mask = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.layer(x) * torch.fft.fft(self.mask).abs() + torch.arange(3)

    model = Normalised()
    graph = capture(model, torch.randn(1, 4))
    assert [node.op for node in graph.nodes] == ["input", "linear", "mul", "add"]
    x = torch.randn(5, 4)
    torch.testing.assert_close(graph(x), model(x))


def test_table():
    graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.ReLU()), torch.randn(1, 3, 2, 2))
    assert str(graph).splitlines() == [
        "name   operation  shape    reads                       attributes",
        "─" * 68,
        "input  input      N×3×2×2                              dtype=float32",
        "0      reshape    N×12     input                       shape=-1×12",
        "1      linear     N×3      0, 1.weight 3×12, 1.bias 3",
        "2      relu       N×3      1",
        "returns 2",
    ]


class Calls(nn.Module):
    """A network of one function, below a module with a name."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = function
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(self.layer(x))


REFUSED = {
    "sort": (lambda x: x.sort(1).values, ["aten.sort", "test_graph.py"]),
    "fft": (lambda x: torch.fft.rfft(x).abs(), ["aten.fft_rfft", "summary, accelerate, save"]),
    "control flow": (lambda x: x if x.sum() > 0 else -x, ["torch.export cannot follow Calls"]),
    "one batch size": (lambda x: x.reshape(13, 4), ["one batch size only"]),
    "over the batch": (lambda x: x - x.mean(0), ["mean over the batch", "test_graph.py"]),
    "the batch as a number": (lambda x: x / x.shape[0], ["computed from the batch size"]),
    "one example": (lambda x: x + x[0], ["one example out of the batch"]),
    "dictionary": (lambda x: {"a": x, "b": 3}, ["must return a tensor or a tuple"]),
    "adaptive": (lambda x: F.adaptive_avg_pool1d(x.unsqueeze(1), 3), ["from 4 to 3, which does not divide"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name_and_place(case):
    function, words = REFUSED[case]
    with pytest.raises(GraphError) as refusal:
        capture(Calls(function), torch.randn(3, 4))
    for word in words:
        assert word in str(refusal.value)


def test_wrong_arguments():
    model = nn.Linear(4, 4)
    with pytest.raises(GraphError, match="call sparsevd.prune first"):
        capture(sparsevd.sparsify(model), torch.randn(1, 4))
    with pytest.raises(GraphError, match="same batch size"):
        capture(model, (torch.randn(1, 4), torch.randn(2, 4)))
    with pytest.raises(GraphError, match="same batch size"):
        capture(model, 3)
    graph = capture(model, torch.randn(1, 4))
    with pytest.raises(GraphError, match="must be N×4 of float32, not 2×5 of float32"):
        graph(torch.randn(2, 5))
    with pytest.raises(GraphError, match="takes 1 inputs, not 2"):
        graph(torch.randn(2, 4), torch.randn(2, 4))


def small():
    weight = torch.randn(3, 4)
    nodes = (
        Node("x", "input", (), {"dtype": "float32"}, (-1, 4)),
        Node("fc", "linear", ("x", "fc.weight"), {}, (-1, 3)),
        Node("p", "softmax", ("fc",), {"axis": 1}, (-1, 3)),
    )
    return Graph(nodes, {"fc.weight": weight}, ("p",)).check()


def change(description, path, value):
    *parents, last = path
    for key in parents:
        description = description[key]
    description[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 7, "format 7"),
        (("nodes", 1, "op"), "lstm", "there is no operation 'lstm'"),
        (("nodes", 1, "op"), ["linear"], "is not a name"),
        (("nodes", 1, "inputs"), ["x"], "has 1 inputs; it takes 2 to 3"),
        (("nodes", 1, "inputs"), ["x", "gone"], "reads 'gone', which is no constant"),
        (("nodes", 1, "inputs"), ["x", "p"], "reads 'p', which is no constant and no node before"),
        (("nodes", 1, "inputs"), 3, "damaged"),
        (("nodes", 1, "attributes"), {"axis": 1}, "has the attributes"),
        (("nodes", 1, "shape"), [-1, 5], "said to give N×5"),
        (("nodes", 1, "shape"), [3, 3], "said to give 3×3, but it gives N×3"),
        (("nodes", 1, "shape"), ["a"], "is no shape"),
        (("nodes", 1, "name"), "x", "'x' stands for two things"),
        (("nodes", 2, "attributes"), {}, "has the attributes"),
        (("nodes", 2, "attributes", "axis"), "1", "axis='1' is not allowed"),
        (("nodes", 2, "attributes", "axis"), True, "axis=True is not allowed"),
        (("nodes", 2, "attributes", "axis"), -1, "axis=-1 is not allowed"),
        (("nodes", 2, "attributes", "axis"), 9, "is no axis"),
        (("nodes", 0, "shape"), [4, 4], "only its first axis is the batch"),
        (("nodes", 0, "attributes", "dtype"), "complex64", "dtype='complex64' is not allowed"),
        (("nodes",), [], "outputs"),
        (("nodes",), None, "damaged"),
        (("outputs",), ["fc.weight"], "must be nodes"),
        (("outputs",), [], "must be nodes"),
        (("parameters",), ["other"], "are no constants"),
        (("nodes", 0, "shape"), [-1] + [1] * 16, "17 axes"),
        (("nodes", 0, "shape"), [-1, 2**30, 2**20], "elements"),
        (("outputs",), ["p"] * 10_001, "10,000 at most"),
    ],
)
def test_damaged_descriptions_are_refused(path, value, message):
    graph = small()
    description = graph.as_dict()
    change(description, path, value)
    with pytest.raises(GraphError, match=message):
        Graph.from_dict(description, graph.constants)


def mutated(graph, source):
    """The same graph with one random fault: in an attribute, a shape, an input or the size of a constant."""
    description, constants = graph.as_dict(), dict(graph.constants)
    node = source.choice(description["nodes"][1:])
    match source.choice(["attribute", "shape", "input", "constant"]):
        case "attribute" if node["attributes"]:
            key = source.choice(sorted(node["attributes"]))
            value = node["attributes"][key]
            fault = source.choice([0, 1, 2, 7, 2**30, 2**40, -1])
            node["attributes"][key] = [fault, *value[1:]] if isinstance(value, list) else fault
        case "shape" if node["shape"]:
            node["shape"][source.randrange(len(node["shape"]))] = source.choice([0, 1, -2, 2**30])
        case "input" if node["inputs"]:
            node["inputs"][source.randrange(len(node["inputs"]))] = source.choice([*sorted(constants), "x"])
        case "constant":
            name = source.choice(sorted(constants))
            tensor = constants[name]
            constants[name] = source.choice(
                [tensor[:-1] if tensor.ndim else tensor[None], tensor[None], tensor.sum(), tensor.int()]
            )
    return description, constants


@pytest.mark.parametrize("name", ["shapes", "convolutions", "mobilenet", "encoder"])
def test_what_passes_the_check_can_be_computed(captured, name):
    """Files come from anywhere: a fault is refused, or it is a graph of other meaning that computes what it says."""
    _, example, graph = captured[name]
    source = random.Random(name)
    inputs = inputs_of_batch(example, 2)
    refused = 0
    for _ in range(60):
        description, constants = mutated(graph, source)
        try:
            other = Graph.from_dict(description, constants)
        except GraphError:
            refused += 1
            continue
        other(*inputs)
    assert refused > 20


@pytest.mark.parametrize("name", ["w';x='", "self", "getattr", "torch", "print", "lambda", "", "é", "argument_0"])
def test_names_are_never_code(name):
    """torch.fx makes Python code from names; a graph may come from a file. Here: an input, a layer and a constant."""
    weight, scale = torch.randn(3, 4), torch.randn(3)
    nodes = (
        Node(name, "input", (), {"dtype": "float32"}, (-1, 4)),
        Node(f"{name}.0", "linear", (name, f"{name}.weight"), {}, (-1, 3)),
        Node("y", "mul", (f"{name}.0", f"{name}.scale"), {}, (-1, 3)),
    )
    graph = Graph(nodes, {f"{name}.weight": weight, f"{name}.scale": scale}, ("y",)).check()
    x = torch.randn(2, 4)
    torch.testing.assert_close(to_module(graph)(x), graph(x))


@pytest.mark.parametrize(
    ("op", "types", "attributes", "message"),
    [
        ("embedding", (torch.float32, torch.float32), {}, "a table of torch.float32 with indices of torch.float32"),
        ("embedding", (torch.int64, torch.int64), {}, "a table of torch.int64"),
        ("batch_norm", (torch.float32,) * 5, {"eps": -1e-5}, "eps=-1e-05 is not allowed"),
        ("batch_norm", (torch.float32,) * 5, {"eps": math.inf}, "eps=inf is not allowed"),
        ("batch_norm", (torch.float32,) * 5, {"eps": math.nan}, "eps=nan is not allowed"),
        ("sub", (torch.float32, torch.bool), {}, "a difference of truth values"),
        ("leaky_relu", (torch.float32,), {"slope": 1e308}, "slope=1e[+]308 is too large for torch.float32"),
        ("clamp", (torch.float16,), {"least": -1e6, "most": 1.0}, "least=-1000000.0 is too large for torch.float16"),
    ],
)
def test_what_cannot_be_computed_is_refused(op, types, attributes, message):
    names = {dtype: name for name, dtype in DTYPES.items()}
    constants = {f"c{i}": torch.ones(4, dtype=dtype) for i, dtype in enumerate(types[1:])}
    if op == "embedding":
        constants["c0"] = constants["c0"][None]
    shape = (-1, 4, 4) if op == "embedding" else (-1, 4)
    nodes = (
        Node("x", "input", (), {"dtype": names[types[0]]}, (-1, 4)),
        Node("y", op, ("x", *constants), attributes, shape),
    )
    with pytest.raises(GraphError, match=message):
        Graph(nodes, constants, ("y",)).check()


@pytest.mark.parametrize("make", small_graphs.ALL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_operation_computes_in_every_type_that_passes_the_check(make, dtype):
    graph = small_graphs.of_type(make(), dtype)
    inputs = [torch.zeros(1, *node.shape[1:], dtype=DTYPES[node.attributes["dtype"]]) for node in graph.check().inputs]
    found = graph(*inputs)
    assert (found if isinstance(found, torch.Tensor) else found[0]).dtype == DTYPES[dtype]


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_arithmetic_of_two_types_computes_or_is_refused(op, left):
    for right in DTYPES.values():
        nodes = (Node("x", "input", (), {"dtype": left}, (-1, 3)), Node("y", op, ("x", "c"), {}, (-1, 3)))
        graph = Graph(nodes, {"c": torch.ones(3).to(right)}, ("y",))
        try:
            graph.check()
        except GraphError:
            continue
        graph(torch.ones(1, 3, dtype=DTYPES[left]))


def test_an_index_that_no_table_has_is_named():
    graph = capture(nn.Embedding(5, 3), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(GraphError, match="has 5 rows, and is asked for those from 1 to 7"):
        graph(torch.tensor([[1, 7]]))


def test_no_run_takes_more_than_its_footprint(captured):
    """Torch's own account of the memory it takes."""
    for name, (_, example, graph) in captured.items():
        inputs = inputs_of_batch(example, 1)
        with torch.profiler.profile(profile_memory=True) as profile:
            graph(*inputs)
        alive = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                most = max(most, alive)
        assert 0 < most <= footprint(graph), name


class Stepping(nn.Module):
    """Gives other small numbers each time it is called, as torch.export cannot see."""

    def __init__(self):
        super().__init__()
        self.calls, self.layer = itertools.count(1), nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) * (1e-7 * next(self.calls))


def test_small_outputs_are_compared_by_their_own_size():
    with pytest.raises(GraphError, match="differs from the network"):
        capture(Stepping(), torch.randn(2, 3))
    tiny = nn.Linear(3, 2)
    with torch.no_grad():
        tiny.weight *= 1e-7
        tiny.bias *= 1e-7
    assert len(capture(tiny, torch.randn(2, 3)).outputs) == 1
    nothing = nn.Linear(3, 2)
    nn.init.zeros_(nothing.weight)
    nn.init.zeros_(nothing.bias)
    assert len(capture(nothing, torch.randn(2, 3)).outputs) == 1
