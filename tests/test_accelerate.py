"""accelerate: the same answers from every model, whichever way its layers take, and what stays as it was is named."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsevd
from networks import WayAround, pruned
from sparsevd import kernels
from sparsevd.runtime import acceleration as module
from sparsevd.runtime import timing
from sparsevd.runtime.folding import followers
from sparsevd.runtime.layers import InferenceLayer
from sparsevd.zoo import models

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Choices do not depend on how fast this machine is right now: the sparse way always measures faster."""
    sparse_first(monkeypatch)


def sparse_first(monkeypatch, factor=0.5):
    def measured(calls, **_):
        for call in calls:
            call()
        return [timing.Timing(seconds, seconds, seconds) for seconds in [1.0] + [factor] * (len(calls) - 1)]

    monkeypatch.setattr(module, "timings", measured)


def plan_first(monkeypatch):
    """Of the whole network's ways the last one measures fastest, which is the plan where there is one."""

    def measured(calls, **_):
        for call in calls:
            call()
        return [timing.Timing(1 / i, 1 / i, 1 / i) for i in range(1, len(calls) + 1)]

    monkeypatch.setattr(module, "timings", measured)


def same(fast, model, *inputs):
    with torch.no_grad():
        expected = model(*inputs)
        torch.testing.assert_close(fast(*inputs), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@built
@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5-caffe", "vgg-like-0.25"])
@pytest.mark.parametrize("batch", [1, 16])
def test_networks_of_the_paper(name, batch):
    model = pruned(models.MODELS[name](10))
    shape = (3, 32, 32) if name.startswith("vgg") else (1, 28, 28)
    fast = sparsevd.accelerate(model, torch.randn(batch, *shape))
    assert {choice.choice for choice in fast.choices} == {"sparse"}
    for other in (batch, 1, 3, 40):
        same(fast, model, torch.randn(other, *shape))


@built
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(30, 20), (7, 30)),
        (nn.Linear(30, 20, bias=False), (30,)),
        (nn.Linear(30, 20), (2, 3, 4, 30)),
        (nn.Conv1d(6, 9, 3, padding=1, stride=2), (5, 6, 17)),
        (nn.Conv1d(6, 9, 4, padding="same"), (6, 17)),
        (nn.Conv2d(6, 9, (4, 3), padding="same", dilation=(1, 2)), (5, 6, 11, 13)),
        (nn.Conv2d(6, 9, 3, padding="valid", groups=3), (6, 11, 13)),
        (nn.Conv2d(6, 8, 2, stride=(2, 1), padding=(1, 0)), (3, 6, 7, 7)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_layers_by_themselves(layer, shape):
    model = pruned(layer, 0.7)
    fast = sparsevd.accelerate(model, torch.randn(shape))
    assert isinstance(fast.model, InferenceLayer)
    same(fast, model, torch.randn(shape))
    same(lambda x: fast.model.dense(x), model, torch.randn(shape))


@built
@pytest.mark.parametrize("zeros", [0.0, 1.0])
def test_fully_dense_and_fully_pruned(zeros):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4)).eval()
    for layer in (model[0], model[3]):
        layer.weight.data *= torch.rand(layer.weight.shape) >= zeros
    fast = sparsevd.accelerate(model, torch.randn(2, 3, 8, 8))
    same(fast, model, torch.randn(2, 3, 8, 8))
    assert fast.choices[0].kept == 1 - zeros


@built
def test_slower_stays_dense(monkeypatch):
    sparse_first(monkeypatch, factor=1.5)
    model = pruned(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    fast = sparsevd.accelerate(model, torch.randn(2, 5))
    assert [choice.choice for choice in fast.choices] == ["dense", "dense"]
    assert not any(isinstance(layer, InferenceLayer) for layer in fast.modules())
    same(fast, model, torch.randn(2, 5))


@built
def test_faster_layers_in_a_slower_whole_are_given_back(monkeypatch):
    turns = iter([(1.0, 0.5), (1.0, 2.0, 3.0)])

    def measured(calls, **_):
        return [timing.Timing(s, s, s) for _, s in zip(calls, next(turns), strict=True)]

    monkeypatch.setattr(module, "timings", measured)
    fast = sparsevd.accelerate(pruned(nn.Sequential(nn.Linear(5, 4))), torch.randn(1, 5))
    assert not any(isinstance(layer, InferenceLayer) for layer in fast.modules())
    assert "as it was" in fast.left_alone["(model)"]


@built
@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5-caffe", "vgg-like-0.25"])
def test_the_whole_network_as_one_plan_where_that_is_fastest(name, monkeypatch):
    plan_first(monkeypatch)
    model = pruned(models.MODELS[name](10))
    shape = (3, 32, 32) if name.startswith("vgg") else (1, 28, 28)
    fast = sparsevd.accelerate(model, torch.randn(2, *shape))
    assert fast.chosen == "as one plan"
    assert not fast.no_plan
    for batch in (2, 1, 3, 40):
        x = torch.randn(batch, *shape)
        same(fast, model, x)
        assert torch.equal(fast(x), fast.plan(x))  # and not by way of the layers


@built
def test_what_the_plan_was_not_made_for_goes_through_the_layers(monkeypatch):
    plan_first(monkeypatch)
    model = pruned(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 0.3)
    fast = sparsevd.accelerate(model, torch.randn(2, 2, 8, 8))
    through = []
    fast.model.register_forward_hook(lambda *_: through.append(1))
    same(fast, model, torch.randn(5, 2, 8, 8))
    assert not through
    same(fast, model, torch.randn(2, 2, 9, 7))  # other images
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), x)[0])
    same(lambda x: fast(input=x), model, torch.randn(2, 2, 8, 8))  # Sequential calls it so
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(torch.randn(2, 2, 8, 8)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):  # torch's own message: the layers are float32
        fast(torch.randn(2, 2, 8, 8, dtype=torch.float64))
    assert fast(torch.empty(0, 2, 8, 8)).shape == (0, 3)
    assert len(through) == 4


@built
def test_a_plan_has_no_other_weights_and_no_other_type(monkeypatch):
    plan_first(monkeypatch)
    model, x = pruned(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), 0.3), torch.randn(3, 6)
    fast = sparsevd.accelerate(model, x)
    double = copy.deepcopy(fast).double()
    same(double, copy.deepcopy(model).double(), x.double())
    assert "another type" in str(double)
    parent = nn.Sequential(fast)
    parent.load_state_dict({key: 2 * value for key, value in parent.state_dict().items()})
    for parameter in model.parameters():
        parameter.data *= 2
    same(fast, model, x)
    assert fast.chosen == "layer by layer"
    assert "other weights were loaded" in str(fast)


@built
def test_what_changes_nothing_keeps_the_plan_and_loading_through_the_model_does_not(monkeypatch):
    plan_first(monkeypatch)
    model, x = pruned(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), 0.3), torch.randn(3, 6)
    for kept in (lambda fast: fast.to("cpu"), lambda fast: fast.float(), lambda fast: nn.Sequential(fast).cpu()):
        fast = sparsevd.accelerate(model, x)
        kept(fast)
        assert fast.chosen == "as one plan"
        same(fast, model, x)
    for part in (lambda fast: fast.model, lambda fast: fast.model[0]):
        again = sparsevd.accelerate(model, x)
        for fast in (pickle.loads(pickle.dumps(again)), copy.deepcopy(again), again):
            loaded = part(fast)
            loaded.load_state_dict({key: 2 * value for key, value in loaded.state_dict().items()})
            assert "other weights were loaded" in fast.no_plan
            with torch.no_grad():
                torch.testing.assert_close(fast(x), fast.model(x))
    assert sparsevd.accelerate(model, x).to(torch.float64).plan is None
    assert sparsevd.accelerate(model, x).to("meta").plan is None


@built
def test_copies_of_a_network_with_a_plan(monkeypatch):
    plan_first(monkeypatch)
    model, x = pruned(WayAround(), 0.3), torch.randn(3, 3, 6, 7)
    fast = sparsevd.accelerate(model, x)
    fast(x)  # made ready, with memory and addresses
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert again.chosen == "as one plan"
        assert again.plan is not fast.plan
        same(again, model, x)
    called = []
    fast.register_forward_hook(lambda *_: called.append(1))
    fast(x)
    assert called


class Summing(nn.Sequential):
    def forward(self, x):
        return super().forward(x).cumsum(1)


class InATuple(nn.Sequential):
    def forward(self, x):
        return (super().forward(x),)


@built
def test_why_there_is_no_plan_is_a_sentence(monkeypatch):
    plan_first(monkeypatch)
    x = torch.randn(2, 4)
    hooked = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    hooked[1].register_forward_hook(lambda *_: None)
    cases = {
        "gelu": (nn.Sequential(nn.Linear(4, 3), nn.GELU()), x),
        "forward hooks": (hooked, x),
        "cumsum": (Summing(nn.Linear(4, 3)), x),
        "one input": (nn.Sequential(nn.Linear(4, 3)), {"input": x}),
        "returns a tuple": (InATuple(nn.Linear(4, 3)), x),
    }
    for words, (model, example) in cases.items():
        fast = sparsevd.accelerate(model.eval(), example)
        assert fast.plan is None
        assert words in fast.no_plan
        (line,) = [line for line in str(fast).splitlines() if line.startswith("no plan: ")]
        assert words in line
        assert len(line) < 200
        assert "still works" not in line
    monkeypatch.setattr(
        module,
        "timings",
        lambda calls: [timing.Timing(1 + 2 * i, 0, 0) for i, call in enumerate(calls) if call() is not None],
    )
    assert "when sparse" in sparsevd.accelerate(nn.Linear(4, 3), x).no_plan


class Branching(nn.Module):
    """What torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.layer(x)) if x.sum() > 0 else self.layer(x)


@built
def test_batch_norm_is_folded_only_where_that_is_exact():
    model = pruned(WayAround(), 0.3)
    fast = sparsevd.accelerate(model, torch.randn(2, 3, 6, 6))
    assert [choice.folded for choice in fast.choices] == [(), ("norm2", "act")]
    same(fast, model, 10 * torch.randn(4, 3, 6, 6))

    model = pruned(Branching(), 0.3)
    fast = sparsevd.accelerate(model, torch.ones(2, 6))
    assert "cannot trace" in fast.left_alone["batch norm"]
    same(fast, model, torch.ones(2, 6))
    same(fast, model, -torch.ones(2, 6))


class Optional(nn.Module):
    """Whose example leaves out an argument, and so takes another branch than a trace where it is something."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x, skip=None, *, normed=False):
        h = self.conv(x)
        h = self.act(h) if skip is None and not normed else self.act(self.norm(h)) + (0 if skip is None else skip)
        return {"out": self.head(h.mean((2, 3)))}


class Guarded(Optional):
    """Which does with a tensor what it does not do with what stands for it in a trace."""

    def forward(self, x):
        h = self.act(self.conv(x)) if isinstance(x, torch.Tensor) else self.act(self.norm(self.conv(x)))
        return [self.head(h.mean((2, 3))), "and a word"]


def with_statistics(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


@built
def test_the_branch_that_the_example_takes_is_the_one_that_is_folded():
    model, x = pruned(with_statistics(Optional()), 0.5), torch.randn(2, 3, 8, 8)
    for example, folded in (
        (x, ("act",)),
        ({"x": x}, ("act",)),
        ((x, None), ("act",)),
        ((x, torch.randn(2, 8, 6, 6)), ("norm", "act")),
        ({"x": x, "normed": True}, ("norm", "act")),
    ):
        fast = sparsevd.accelerate(model, example)
        named = example if isinstance(example, dict) else {}
        given = () if named else example if isinstance(example, tuple) else (example,)
        with torch.no_grad():
            torch.testing.assert_close(fast(*given, **named)["out"], model(*given, **named)["out"])
            torch.testing.assert_close(fast.model(*given, **named)["out"], model(*given, **named)["out"])
        assert fast.choices[0].folded == folded


@built
def test_what_answers_otherwise_is_not_taken(monkeypatch):
    model, x = pruned(with_statistics(Guarded()), 0.5), torch.randn(2, 3, 8, 8)
    fast = sparsevd.accelerate(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x)[0], model(x)[0])
    assert [choice.folded for choice in fast.choices] == [(), ()]
    assert fast.chosen == "layer by layer"
    assert "other answers" in str(fast)
    monkeypatch.setattr(InferenceLayer, "dense", lambda self, x: 2 * F.linear(x, self.weight, self.bias))
    monkeypatch.setattr(InferenceLayer, "forward", lambda self, x: self.dense(x))
    wrong = sparsevd.accelerate(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    assert not any(isinstance(layer, InferenceLayer) for layer in wrong.modules())
    assert "stays as it was" in wrong.left_alone["(model)"]
    monkeypatch.setattr(module, "plan", lambda model, x: lambda x: 2 * model(x))
    assert "other answers" in sparsevd.accelerate(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)).no_plan


@built
def test_random_numbers_in_eval_mode_are_no_other_answer():
    class Noisy(nn.Sequential):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, training=True)

    fast = sparsevd.accelerate(pruned(Noisy(nn.Linear(9, 8)), 0.5), torch.randn(2, 9))
    assert fast.chosen == "layer by layer"


def test_what_follows_a_layer():
    conv, norm, relu = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()
    assert followers(nn.Sequential(conv, norm, relu).eval())[0]["0"].norm == "1"
    assert not followers(nn.Sequential(conv, norm, relu).train())[0]["0"].norm  # batch statistics
    assert not followers(nn.Sequential(conv, norm, conv, norm).eval())[0]  # each is called twice
    stateless = nn.BatchNorm2d(2, track_running_stats=False)
    assert not followers(nn.Sequential(conv, stateless).eval())[0]["0"].norm
    assert followers(nn.Sequential(conv, relu, norm).eval())[0]["0"].activation == "1"
    assert not followers(nn.Sequential(conv, relu, norm).eval())[0]["0"].norm


@built
def test_folded_batch_norm_refuses_axes_it_would_treat_otherwise():
    model = pruned(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 0.2)
    fast = sparsevd.accelerate(model, torch.randn(3, 4))
    with pytest.raises(sparsevd.SparseVDError, match="batch norm folded"):
        fast(torch.randn(2, 4, 4))
    fast = sparsevd.accelerate(model, torch.randn(2, 4, 4))
    assert fast.choices[0].folded == ()
    same(fast, model, torch.randn(2, 4, 4))


@built
def test_attention_is_swapped_and_its_fast_path_left():
    model = pruned(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), 0.8)
    x = torch.randn(3, 5, 16)
    fast = sparsevd.accelerate(model, x)
    parts = ("self_attn", "linear1", "linear2")
    assert [choice.name for choice in fast.choices] == [f"layers.{i}.{part}" for i in (0, 1) for part in parts]
    assert "fused path" in fast.left_alone["layers.1"]
    same(fast, model, x)
    called = []
    fast.model.layers[0].linear1.register_forward_hook(lambda *_: called.append(1))
    fast(x)
    assert called
    assert model.layers[0].activation_relu_or_gelu  # the given model keeps its own


@built
def test_fast_paths_stay_where_the_network_stays_as_it_was(monkeypatch):
    seconds = iter([[1.0, 0.5]] * 5 + [[1.0, 2.0]])  # two products of attention, itself, two layers, the whole

    def measured(calls, **_):
        return [timing.Timing(s, s, s) for _, s in zip(calls, next(seconds), strict=False)]

    monkeypatch.setattr(module, "timings", measured)
    model = pruned(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 0.8)
    fast = sparsevd.accelerate(model, torch.randn(3, 5, 16))
    assert fast.chosen == "as it was"
    assert fast.model.activation_relu_or_gelu
    assert "fused path" not in str(fast)


@built
def test_a_compiled_network_is_accelerated_as_the_one_inside():
    plain, x = pruned(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))).eval(), torch.randn(4, 64)
    fast = sparsevd.accelerate(torch.compile(plain, backend="eager"), x)
    assert [choice.name for choice in fast.choices] == ["0", "2"]
    same(fast, plain, x)


def test_named_and_several_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    model, x, y = pruned(Two(), 0.5), torch.randn(2, 3), torch.randn(2, 4)
    same(sparsevd.accelerate(model, (x, y)), model, x, y)
    same(sparsevd.accelerate(model, {"y": y, "x": x}), model, x, y)


@built
def test_shared_layers_stay_shared():
    layer = nn.Linear(4, 4)
    model = pruned(nn.Sequential(layer, nn.ReLU(), layer), 0.5)
    fast = sparsevd.accelerate(model, torch.randn(2, 4))
    assert fast.model[0] is fast.model[2]
    same(fast, model, torch.randn(2, 4))


@built
def test_what_the_kernels_cannot_do_is_done_densely():
    model = pruned(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), 0.3)
    fast = sparsevd.accelerate(model, torch.randn(1, 2, 5, 5))
    x = torch.randn(2, 2, 5, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), x)[0])
    assert fast(torch.empty(0, 2, 5, 5)).shape == (0, 3, 3, 3)
    same(fast, model, torch.randn(2, 5, 2, 5).transpose(1, 2))  # not contiguous
    same(fast, model, torch.randn(2, 2, 5, 5).to(memory_format=torch.channels_last))
    with pytest.raises(RuntimeError):  # torch's own message
        fast(torch.randn(1, 4, 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(torch.randn(1, 2, 5, 5)).dtype == torch.bfloat16
    double = copy.deepcopy(fast).double()
    same(double, copy.deepcopy(model).double(), torch.randn(1, 2, 5, 5, dtype=torch.float64))


@built
def test_copies_and_new_weights():
    model = pruned(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), 0.5)
    fast = sparsevd.accelerate(model, torch.randn(1, 6))
    x = torch.randn(3, 6)
    same(copy.deepcopy(fast), model, x)
    same(pickle.loads(pickle.dumps(fast)), model, x)
    stored = io.BytesIO()
    torch.save(fast.state_dict(), stored)
    state = {key: 2 * value for key, value in fast.state_dict().items()}
    fast.load_state_dict(state)
    twice = copy.deepcopy(model)
    for parameter in twice.parameters():
        parameter.data *= 2
    same(fast, twice, x)


@built
def test_it_prints_and_keeps_the_models_interface():
    model = pruned(models.lenet_300_100())
    model.classes = 10
    fast = sparsevd.accelerate(model, torch.randn(1, 1, 28, 28))
    text = str(fast)
    assert "fc1" in text
    assert "sparse" in text
    assert "whole network" in text
    assert fast.classes == 10
    assert not fast.training
    assert fast.eval() is fast
    with pytest.raises(sparsevd.SparseVDError, match="inference"):
        fast.train()
    with pytest.raises(AttributeError):
        _ = fast.nothing_of_the_kind


def test_mistakes_are_named():
    with pytest.raises(sparsevd.SparseVDError, match="prune"):
        sparsevd.accelerate(sparsevd.sparsify(nn.Linear(3, 2)), torch.randn(1, 3))
    with pytest.raises(sparsevd.SparseVDError, match="nothing to accelerate"):
        sparsevd.accelerate(nn.ReLU(), torch.randn(1, 3))
    with pytest.raises(sparsevd.SparseVDError, match="does not run on the example"):
        sparsevd.accelerate(nn.Linear(3, 2), torch.randn(1, 4))
    fast = sparsevd.accelerate(
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(32, 2)),
        torch.randn(1, 2, 4, 4),
    )
    assert "reflect" in fast.left_alone["0"]


@pytest.mark.long
def test_without_kernels_linear_layers_take_csr():
    """In a process that never saw the library."""
    code = """
import torch, sparsevd
from torch import nn
from sparsevd import kernels
from sparsevd.runtime import acceleration as module
assert not kernels.available()
from sparsevd.runtime.timing import Timing
def measured(calls):
    for call in calls: call()
    return [Timing(s, s, s) for s in [1.0, .5][:len(calls)]]
module.timings = measured
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 9)).eval()
model[3].weight.data *= torch.rand_like(model[3].weight) > 0.9
fast = sparsevd.accelerate(model, torch.randn(4, 1, 8, 8))
print([c.choice for c in fast.choices])
x = torch.randn(3, 1, 8, 8)
torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
"""
    without = {**os.environ, "SPARSEVD_KERNELS": "0"}
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "['dense', 'CSR']", result.stderr


@built
@pytest.mark.filterwarnings("ignore::sparsevd.SparseVDWarning")
def test_documentation_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "inference.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "inference.md", "exec"), {})
    assert (tmp_path / "lenet.h").exists()


def test_weights_that_are_computed_are_named_before_anything_is_copied():
    model = nn.Sequential(nn.Linear(5, 4))
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    model(torch.randn(2, 5))
    with pytest.raises(sparsevd.SparseVDError, match="cannot be copied; remove what is named"):
        sparsevd.accelerate(model, torch.randn(2, 5))
