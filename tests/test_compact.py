"""Compaction: the same function with fewer units, over random networks of all the shapes that couple units."""

import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import networks
import sparsevd
from sparsevd.graph import Graph, Node, evaluate, to_module
from sparsevd.graph.compaction import compact_graph

pytestmark = pytest.mark.usefixtures("one_thread")


class RandomNetwork:
    """A random graph in float64, so that a wrong fold cannot hide behind rounding.

    Layers lose weights at random, whole rows, whole columns, or all of them; some biases are zero.
    """

    rarer = ("up", "gate", "pad", "residual")

    def __init__(self, seed, images):
        self.source = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.nodes, self.constants = [], {}
        shape = (-1, self.source.randint(1, 4), 6, 6) if images else (-1, self.source.randint(1, 8))
        self.nodes.append(Node("x", "input", (), {"dtype": "float64"}, shape))
        self.values = ["x"]
        for _ in range(self.source.randint(3, 12)):
            self.step()
        if self.source.random() < 0.7:
            self.head()
        self.graph = Graph(tuple(self.nodes), self.constants, (self.values[-1],)).check()

    def shape(self, name):
        return next(node.shape for node in self.nodes if node.name == name)

    def constant(self, *shape, positive=False):
        name = f"c{len(self.constants)}"
        tensor = torch.randn(shape, generator=self.generator, dtype=torch.double)
        self.constants[name] = tensor.abs() + 0.5 if positive else tensor
        return name

    def weight(self, *shape):
        name = self.constant(*shape)
        tensor = self.constants[name]
        kind = self.source.choice(["some", "rows", "columns", "all", "none", "rows", "columns"])
        chance = lambda *size: torch.rand(size, generator=self.generator) < 0.6  # noqa: E731
        if kind == "some":
            tensor[chance(*shape)] = 0
        if kind == "rows":
            tensor[chance(shape[0])] = 0
        if kind == "columns":
            tensor[:, chance(shape[1])] = 0
        if kind == "all":
            tensor.zero_()
        return name

    def bias(self, size):
        kind = self.source.choice(["none", "some", "zero"])
        if kind == "none":
            return []
        name = self.constant(size)
        if kind == "zero":
            self.constants[name][torch.rand(size, generator=self.generator) < 0.5] = 0
        return [name]

    def add(self, op, inputs, **attributes):
        name = f"{op}{len(self.nodes)}"
        node = Node(name, op, tuple(inputs), attributes, ())
        results = []
        for batch in (3, 5):
            tensors = [
                self.constants[key]
                if key in self.constants
                else torch.zeros(
                    *[size if size >= 0 else -size * batch for size in self.shape(key)], dtype=torch.double
                )
                for key in inputs
            ]
            results.append(evaluate(node, tensors, batch).shape)
        shape = tuple(a if a == b else -1 for a, b in zip(*results, strict=True))
        self.nodes.append(Node(name, op, tuple(inputs), attributes, shape))
        self.values.append(name)
        return name

    def step(self):
        x = self.values[-1] if self.source.random() < 0.6 else self.source.choice(self.values)
        getattr(self, "image" if len(self.shape(x)) == 4 else "vector")(x)

    def pointwise(self, x):
        op, attributes = self.source.choice(
            [
                ("relu", {}),
                ("sigmoid", {}),
                ("tanh", {}),
                ("leaky_relu", {"slope": 0.1}),
                ("hardswish", {}),
                ("exp", {}),
            ]
        )
        if op == "exp":  # keep values of ordinary size
            x = self.add("tanh", [x])
        return self.add(op, [x], **attributes)

    def norm(self, x):
        size = self.shape(x)[1]
        constants = [self.constant(size), self.constant(size, positive=True), self.weight(size, 1), self.constant(size)]
        self.constants[constants[2]] = self.constants[constants[2]].flatten()
        return self.add("batch_norm", [x, *constants], eps=1e-3)

    def binary(self, x):
        partners = [name for name in self.values if self.shape(name) == self.shape(x)]
        op = self.source.choice(["add", "add", "sub", "mul", "maximum"])
        if self.source.random() < 0.2:
            size = self.shape(x)[1]
            other = self.constant(*self.source.choice([(), (size, *[1] * (len(self.shape(x)) - 2))]))
        else:
            other = self.source.choice(partners)
        return self.add(op, self.source.sample([x, other], 2))

    def image(self, x):
        _, channels, height, _ = self.shape(x)
        choice = self.source.choice(
            (
                *("conv",) * 3,
                "depthwise",
                "grouped",
                "norm",
                "pointwise",
                "pool",
                "binary",
                "concat",
                "split",
                *self.rarer,
            )
        )
        padding = self.source.randint(0, 1)
        window = {"stride": (1, 1), "dilation": (1, 1)}
        if choice == "conv" and height + 2 * padding >= 3:
            outputs = self.source.randint(1, 6)
            tensors = [self.weight(outputs, channels, 3, 3), *self.bias(outputs)]
            self.add("conv", [x, *tensors], padding=(padding, padding), groups=1, **window)
        elif choice == "residual":
            tensors = [self.weight(channels, channels, 3, 3), *self.bias(channels)]
            y = self.pointwise(self.add("conv", [x, *tensors], padding=(1, 1), groups=1, **window))
            self.add("add", [x, self.norm(y) if self.source.random() < 0.5 else y])
        elif choice == "depthwise":
            times = self.source.randint(1, 2)
            tensors = [self.weight(channels * times, 1, 3, 3), *self.bias(channels * times)]
            self.add("conv", [x, *tensors], padding=(1, 1), groups=channels, **window)
        elif choice == "grouped" and channels % 2 == 0:
            outputs = 2 * self.source.randint(1, 4)
            tensors = [self.weight(outputs, channels // 2, 1, 1), *self.bias(outputs)]
            self.add("conv", [x, *tensors], padding=(0, 0), groups=2, **window)
        elif choice == "up" and height < 8:
            outputs = self.source.randint(1, 4)
            tensors = [self.weight(channels, outputs, 2, 2), *self.bias(outputs)]
            self.add("conv_transpose", [x, *tensors], padding=(0, 0), output_padding=(0, 0), groups=1, **window)
        elif choice == "norm":
            self.norm(x)
        elif choice == "pool" and height >= 4:
            attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": (padding, padding), "ceil_mode": False}
            if self.source.random() < 0.5:
                self.add("max_pool", [x], dilation=(1, 1), **attributes)
            else:
                self.add("avg_pool", [x], count_padding=self.source.random() < 0.5, **attributes)
        elif choice == "binary":
            self.binary(x)
        elif choice == "concat":
            others = [name for name in self.values if len(self.shape(name)) == 4]
            others = [name for name in others if self.shape(name)[2:] == self.shape(x)[2:]]
            self.add("concat", [x, self.source.choice(others)], axis=1)
        elif choice == "split" and channels > 1:
            middle = self.source.randint(1, channels - 1)
            first = self.add("slice", [x], axis=1, start=0, stop=middle, step=1)
            second = self.add("slice", [x], axis=1, start=middle, stop=channels, step=1)
            self.add("concat", [self.pointwise(second), first], axis=1)
        elif choice == "gate":
            squeezed = self.add("mean", [x], axes=(2, 3), keep=True)
            tensors = [self.weight(channels, channels, 1, 1), *self.bias(channels)]
            gate = self.add("conv", [squeezed, *tensors], padding=(0, 0), groups=1, **window)
            self.add("mul", [x, self.add("sigmoid", [gate])])
        elif choice == "pad":
            self.add("pad", [x], before=(0, 1), after=(1, 0), mode="constant", value=self.source.choice([0.0, 1.0]))
        else:
            self.pointwise(x)

    def vector(self, x):
        size = self.shape(x)[-1]
        choice = self.source.choice(["linear", "linear", "linear", "pointwise", "norm", "binary", "concat", "residual"])
        if choice == "norm":
            self.norm(x)
        elif choice == "binary":
            self.binary(x)
        elif choice == "concat":
            others = [name for name in self.values if len(self.shape(name)) == 2]
            self.add("concat", [x, self.source.choice(others)], axis=1)
        elif choice == "residual":
            y = self.add("relu", [self.add("linear", [x, self.weight(8, size), *self.bias(8)])])
            self.add("add", [x, self.add("linear", [y, self.weight(size, 8), *self.bias(size)])])
        elif choice == "linear":
            outputs = self.source.randint(1, 8)
            self.add("linear", [x, self.weight(outputs, size), *self.bias(outputs)])
        else:
            self.pointwise(x)

    def head(self):
        x = self.values[-1]
        if len(self.shape(x)) == 4:
            _, channels, height, width = self.shape(x)
            if self.source.random() < 0.5:
                x = self.add("reshape", [x], shape=(-1, channels * height * width))
            else:
                x = self.add("mean", [x], axes=(2, 3), keep=False)
        x = self.add("linear", [x, self.weight(6, self.shape(x)[1]), *self.bias(6)])
        x = self.add("relu", [x])
        x = self.add("linear", [x, self.weight(3, 6), *self.bias(3)])
        self.add("log_softmax", [x], axis=1)


def removed(report):
    return sum(layer.before - layer.after for layer in report.layers)


@pytest.mark.parametrize("images", [False, True])
def test_random_networks_keep_their_function(images):
    """Chains, residuals, concatenations, groups, norms before and after, dead layers and dead branches."""
    gone = 0
    for seed in range(100):
        graph = RandomNetwork(seed, images).graph
        small, report = compact_graph(graph)
        x = torch.randn(4, *graph.inputs[0].shape[1:], dtype=torch.double)
        expected = graph(x)
        scale = max(1.0, expected.abs().max().item())
        assert (small(x) - expected).abs().max().item() <= 1e-9 * scale, seed
        gone += removed(report)
        if seed % 10 == 0:
            assert torch.allclose(to_module(small)(x), expected, rtol=1e-9, atol=1e-9 * scale)
            again, _ = compact_graph(small)
            assert [node.shape for node in again.nodes] == [node.shape for node in small.nodes]  # a fixed point
    assert gone > 500


def test_units_go_and_constants_are_folded():
    """By hand: unit 0 is read by nothing, unit 1 is always relu(0.5), unit 2 is needed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0, 2], [0, 0, 0], [3, 0, 0]]))
        model[0].bias.copy_(torch.tensor([0.1, 0.5, -0.2]))
        model[2].weight.copy_(torch.tensor([[0.0, 4, 5], [0, 0, 6]]))
        model[2].bias.copy_(torch.tensor([1.0, 2.0]))
    small = sparsevd.compact(model, torch.zeros(1, 3))
    first, second = small.get_submodule("0"), small.get_submodule("2")
    assert torch.equal(first.weight, torch.tensor([[3.0, 0, 0]]))
    assert torch.equal(first.bias, torch.tensor([-0.2]))
    assert torch.equal(second.weight, torch.tensor([[5.0], [6.0]]))
    assert torch.equal(second.bias, torch.tensor([1.0 + 4 * 0.5, 2.0]))
    report = small.compaction
    assert report.units == "3-2 → 1-2"
    assert report.unread == {"input": (2, 3)}
    assert (report.cost_before.dense, report.cost_before.nonzero, report.cost_after.dense) == (15, 6, 5)
    assert (report.cost_before.bytes, report.cost_after.bytes) == (80, 32)
    assert str(report).splitlines()[:2] == ["units: 3-2 → 1-2", "input input: 2 of 3 read by no weight"]


def dead_channel(*rest, bias=0.7):
    """A convolution whose channel 1 is a constant image, and what follows."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), *rest, nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 1, 8, 8))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = bias
    return model


@pytest.mark.parametrize(
    ("rest", "bias", "channels", "reason"),
    [
        ([nn.Conv2d(3, 2, 3)], 0.7, 2, ""),
        ([nn.Conv2d(3, 2, 3, padding=1)], 0.7, 3, "it is not zero, and 1 pads with zeros"),
        ([nn.Conv2d(3, 2, 3, padding=1)], 0.0, 2, ""),
        ([nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)], -0.7, 2, ""),
        ([nn.ConvTranspose2d(3, 2, 3)], 0.7, 3, "it is not zero, and 1 pads with zeros"),
        ([nn.AvgPool2d(2)], 0.7, 2, ""),
        ([nn.AvgPool2d(2, padding=1)], 0.7, 3, "joined to units that 3 reads"),
        ([nn.AvgPool2d(2, padding=1, count_include_pad=False)], 0.7, 2, ""),
        ([nn.MaxPool2d(2, padding=1)], 0.7, 2, ""),
        ([nn.ZeroPad2d(1)], 0.7, 3, "joined to units that 3 reads"),
        ([nn.Softmax(1)], 0.7, 3, "softmax 1 needs all of them"),
        ([nn.GroupNorm(1, 3)], 0.7, 3, "group_norm 1 needs all of them"),
    ],
    ids=str,
)
def test_constants_are_folded_only_where_that_is_exact(rest, bias, channels, reason):
    model = dead_channel(*rest, bias=bias)
    small = sparsevd.compact(model, torch.zeros(1, 1, 8, 8))
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)
    assert small.compaction.layers[0].after == channels
    assert list(small.compaction.layers[0].stayed.values()) == ([1] if reason else [])
    assert reason in str(small.compaction)


def test_constants_before_padding_become_one():
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with torch.no_grad():
        model[0].weight[1:5] = 0
        model[0].bias[1:5] = torch.tensor([0.7, -0.3, 0.2, 1.3])
    small = sparsevd.compact(model, torch.zeros(1, 1, 8, 8))
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)
    assert small.compaction.units == "6-4-2 → 3-4-2"  # two that are needed, and one for the three constants
    assert small.compaction.layers[0].stayed == {"it is not zero, and 2 pads with zeros": 1}


def test_sums_over_an_axis_are_not_mistaken_for_the_constant():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = dead_channel()[0]
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.conv(x).sum((2, 3)))

    model = Sum()
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(sparsevd.compact(model, x)(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_dead_branch_and_a_dead_network():
    model = networks.resnet(4, stages=1, blocks=2).eval()
    nn.init.zeros_(model[3].conv2.weight)  # the branch is its batch norm's bias
    nn.init.zeros_(model[4].norm2.weight)
    nn.init.zeros_(model[4].norm2.bias)  # the branch is nothing: the addition goes
    x = torch.randn(3, 3, 8, 8)
    small = sparsevd.compact(model, x)
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)
    left = dict(small.named_modules())
    assert not {"3.conv1", "3.conv2", "4.conv1", "4.conv2"} & left.keys()
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in left.values())
    nn.init.zeros_(model[-1].weight)
    nothing = sparsevd.compact(model, x)
    assert torch.equal(nothing(x), model[-1].bias.expand(3, -1))
    assert [name for name, _ in nothing.named_buffers()] == ["7.value"]
    assert nothing.compaction.unread == {"input": (3, 3)}


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "encoder"])
def test_known_networks_pruned_at_random(captured, name):
    """90 % of the weights at random leave dead units in narrow layers, and hardly any in wide ones: all of them go."""
    model, example, graph = captured[name]
    small, report = compact_graph(graph)
    with torch.no_grad():
        expected, found = model(example), to_module(small)(example)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert report.cost_after.dense < report.cost_before.dense
    assert removed(report) > 0
    assert "batch_norm" not in {node.op for node in small.nodes}
    assert compact_graph(small)[1].cost_after == report.cost_after


def test_what_would_not_be_exact_is_left_as_it_was(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    nn.init.zeros_(model[0].weight)

    def broken(graph):
        constants = {name: tensor + 1 for name, tensor in graph.constants.items()}
        return Graph(graph.nodes, constants, graph.outputs), None

    monkeypatch.setitem(sparsevd.compact.__globals__, "compact_graph", broken)
    small = sparsevd.compact(model, torch.ones(1, 3))
    assert "left as it was: compacted outputs would differ by" in small.compaction.note
    torch.testing.assert_close(small(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_compiled_network_is_compacted_as_the_one_inside():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[:, 1] = 0
    small, x = sparsevd.compact(torch.compile(model, backend="eager"), torch.ones(1, 3)), torch.randn(5, 3)
    assert small.compaction.units == "4-2 → 3-2"
    assert list(small.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(small(x), model(x))


def test_documentation_runs(monkeypatch, tmp_path, capsys):
    text = (Path(__file__).parent.parent / "docs" / "compaction.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "compaction.md", "exec"), {})
    assert "units: 300-100-10 → " in capsys.readouterr().out
    assert (tmp_path / "lenet.onnx").exists()
