"""Weights that are read outside of their layer in ways that no source tells: seen in one pass, said, and left whole."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import sparsevd
from sparsevd.errors import SparseVDWarning
from sparsevd.layers.watched_use import Watch
from sparsevd.posterior import posteriors, switch_noise
from sparsevd.training.first_look import agree, holds_compiled, mark, watched_by_itself
from sparsevd.training.inputs import call
from sparsevd.training.processes import Alone
from sparsevd.training.progress import Callback

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CPU = torch.device("cpu")


def score(h, layer):
    return F.linear(h, layer.weight)


class Net(nn.Module):
    """The weight of `a` is read once more, by what follows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) + self.again(x) ** 2)

    def again(self, x):
        return score(x, self.a)


class ByTwoNames(Net):
    def again(self, x):
        first, _ = self.a, self.b
        return F.linear(x, first.weight)


class ByProperty(Net):
    @property
    def matrix(self):
        return self.a.weight

    def again(self, x):
        return x @ self.matrix.t()


class ByPath(Net):
    def again(self, x):
        return F.linear(x, self.get_submodule("a").weight.detach())


class ByList(Net):
    def again(self, x):
        found = dict(self.named_parameters())
        return x @ torch.cat([found["a.weight"][:4], found["a.weight"][4:]]).mT


def data(n=60):
    x = torch.randn(n, 12, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def config(epochs=2, **settings):
    return sparsevd.FitConfig(epochs=epochs, batch_size=30, learning_rate=1e-3, **settings)


def look(model, x=None):
    return mark(model, watched_by_itself(model, call, [data()[0] if x is None else x], ON_CPU))


def without_three_units(model):
    """So that contraction would make the layer smaller from the first epoch on, and a look must come before."""
    gone = torch.zeros(8, 12, dtype=torch.bool)
    gone[:3] = True
    posteriors(model)[0].drop(gone)
    return model


@pytest.mark.parametrize("smaller", [False, True], ids=["fresh", "smaller"])
@pytest.mark.parametrize("kind", [Net, ByTwoNames, ByProperty, ByPath, ByList], ids=lambda kind: kind.__name__)
def test_a_weight_that_is_read_elsewhere_is_named_and_stays_whole(kind, smaller):
    """Without a word, training ended with shapes that do not fit."""
    model = sparsevd.sparsify(kind())
    model = without_three_units(model) if smaller else model
    with pytest.warns(SparseVDWarning, match="read elsewhere: a: .* uses its weight by itself") as caught:
        history = sparsevd.fit(model, data(), None, config(), progress=False)
    assert len(history) == 2
    assert "sparsify(model, exclude=['a'])" in str(caught[0].message)
    assert caught[0].filename == __file__
    line = score.__code__.co_firstlineno + 1
    reader = f"score (line {line} of {Path(__file__).name})" if kind is Net else "again (line "
    assert reader in str(caught[0].message)
    assert [each.contractible for each in posteriors(model)] == [False, True]
    without_three_units(model)
    sparsevd.fit(model, data(), None, config(), progress=False)  # once is enough


def test_what_the_source_has_said_is_not_said_again():
    class Bypassed(Net):
        def __init__(self):
            super().__init__()
            self.tied = nn.Linear(12, 8)
            self.tied.weight = self.a.weight

        def again(self, x):
            return self.tied(x) + F.linear(x, self.a.weight)

    with pytest.warns(SparseVDWarning, match="read elsewhere: a: the forward of Bypassed"):
        model = sparsevd.sparsify(Bypassed())
    sparsevd.fit(model, data(), None, config(), progress=False)


def length(layer):
    return len(layer.weight) * layer.weight.detach().dim()


class Asks(Net):
    """As T5 does: nothing of a weight but what it is."""

    def again(self, x):
        if isinstance(self.a.weight, torch.Tensor) and x.dtype != self.a.weight.dtype and self.a.weight.is_cuda:
            x = x.to(self.a.weight.dtype)
        if self.a.weight is None or not torch.is_floating_point(self.a.weight) or not hasattr(self.a.weight, "grad"):
            return x
        x = x.to(self.a.weight).type_as(self.b.weight) + self.a.weight.new_zeros(self.a.weight.size(1))
        x = x + torch.zeros_like(self.a.weight)[0] + self.b.weight.numel() + self.b.weight.stride(0) + length(self.b)
        return x[:, : self.a.weight.shape[0]] * self.a.weight.data.element_size()


def test_asking_for_type_or_shape_is_no_reading():
    assert not sparsevd.conversion.preview(Asks()).read_elsewhere
    model = without_three_units(sparsevd.sparsify(Asks()))
    sparsevd.fit(model, data(), None, config(), progress=False)
    assert not model.a.read_elsewhere
    assert model.a.measured_elsewhere  # contracted, it would have another shape


def test_a_layer_that_is_asked_only_for_its_type_may_be_smaller():
    class AsksTheType(Net):
        def again(self, x):
            return 0 * x.to(self.a.weight).to(self.a.weight.dtype)[:, :1] * self.a.weight.dim()

    model = without_three_units(sparsevd.sparsify(AsksTheType()))
    sparsevd.fit(model, data(), None, config(), progress=False)
    assert all(each.contractible for each in posteriors(model))


@pytest.mark.parametrize(
    "read",
    [
        lambda x, w: x.copy_(w[:1]),
        lambda x, w: x.__setitem__(slice(1), w[:1].detach()),
        lambda x, w: x.__setitem__(slice(8), w),
        lambda x, w: torch.stack([w, w]),
        lambda x, w: w.to(torch.float64),
        lambda x, w: w.data.max(0),
        lambda x, w: w.detach().numpy(),
        lambda x, w: w.tolist(),
        lambda x, w: F.linear(input=x, weight=w.to(w.dtype)),
    ],
)
def test_other_ways_to_read(read):
    model = sparsevd.sparsify(Net())
    with Watch(model) as watch:
        read(torch.randn(10, 12), model.a.weight)
    assert list(watch.read) == [model.a]


class Itself(nn.Module):
    """Layers that are called in all sorts of ways."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.out.weight = self.words.weight
        self.attention, self.encoder = nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8)
        self.lstm, self.cell = nn.LSTM(4, 4), nn.GRUCell(4, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.words(tokens)
        x = self.encoder(self.attention(x, x, x)[0])
        x, _ = self.lstm(x)
        x = self.cell(x[0], self.cell(x[0])) + sparsevd.kl(self)
        x = (
            self.fc.forward(x)
            + checkpoint(self.fc, x, use_reentrant=False)
            + checkpoint(self.fc, x, use_reentrant=True)
        )
        return self.out(torch.func.functional_call(self.fc, dict(self.fc.named_parameters()), x))


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_layers_read_their_own(noise, training):
    """Attention also the weight of its last projection; and the KL is no use that lacks the noise."""
    model = sparsevd.sparsify(Itself()).train(training)
    switch_noise(model, noise)
    assert not look(model, torch.randint(9, (3, 5)))


def test_a_weight_tied_to_a_dense_layer_is_read_by_that():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)), exclude="1")
    model[1].weight = model[0].weight
    assert "read elsewhere: 0: the forward of Linear" in look(model)


def test_what_cannot_be_watched_is_passed_over():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    computed = sparsevd.sparsify(Asks())
    register_parametrization(computed.a, "weight", Double())  # a new tensor each time
    assert not look(computed)
    assert not look(sparsevd.sparsify(Net()), torch.randn(3, 5))  # the first step has the error


def test_a_compiled_network_is_watched_and_not_compiled_for_that():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = torch.compile(sparsevd.sparsify(Net()), backend=backend)
    assert "read elsewhere: a: score" in look(model)
    assert not compiled
    assert holds_compiled(model)  # then no step is looked at: it would have other bits
    assert not holds_compiled(model._orig_mod)


class Counting(nn.Module):
    """Much that a pass in training mode changes."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(12, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.passes, self.kept, self.by_size = 0, [], {}

    def forward(self, x):
        self.passes += 1
        self.seen = self.seen + len(x)
        self.last = self.drop(self.norm(self.fc(x)))
        self.kept.append(self.last)
        self.by_size[len(x)] = self.last
        return self.last


def test_the_pass_leaves_no_trace():
    model = sparsevd.sparsify(Counting(), keep_dropout=True).train()
    before, buffer = {name: value.clone() for name, value in model.state_dict().items()}, model.seen
    generator = torch.get_rng_state()
    assert not look(model)
    assert (model.passes, model.kept, model.by_size, hasattr(model, "last")) == (0, [], {}, False)
    assert model.seen is buffer
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    sparsevd.fit(model, data(), None, config(1), progress=False)
    assert model.passes == model.norm.num_batches_tracked == 2  # the look was at the first of them


def test_what_one_process_has_seen_holds_for_all():
    class WithAnother(Alone):
        def total(self, numbers):
            return lambda: [number + other for number, other in zip(numbers, [1, 0, 0, 0], strict=True)]

    model = sparsevd.sparsify(Asks())
    look(model)
    agree(model, WithAnother())
    assert [each.read_elsewhere for each in (model.a, model.b)] == [True, False]
    assert [each.measured_elsewhere for each in (model.a, model.b)] == [True, True]


@pytest.mark.filterwarnings("ignore:read elsewhere")
def test_a_run_that_goes_on_knows_before_any_layer_is_smaller(tmp_path):
    class Stop(Callback):
        def on_step(self, moment):
            if moment.epoch == 2:
                raise KeyboardInterrupt

    def network():
        torch.manual_seed(1)
        return without_three_units(sparsevd.sparsify(Net()))

    whole, again = network(), network()
    sparsevd.fit(whole, data(), None, config(3), progress=False)
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(network(), data(), None, config(3), run_dir=tmp_path, progress=False, callbacks=[Stop()])
    sparsevd.fit(again, data(), None, config(3), run_dir=tmp_path, resume=True, progress=False)
    assert again.a.read_elsewhere
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole.parameters(), again.parameters(), strict=True))
