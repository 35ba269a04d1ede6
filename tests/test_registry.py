"""Layers of one's own: registered, converted like torch's, and given back."""

import copy
import math

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.conversion import preview
from sparsevd.errors import ArgumentError
from sparsevd.layers import registry
from sparsevd.layers.embedding import SparseTable
from sparsevd.layers.linear import SparseLinear
from sparsevd.layers.product_layer import ProductLayer


class Scaled(nn.Linear):
    """A constructor of its own, and something to remember."""

    def __init__(self, width, note):
        super().__init__(width, width)
        self.note = note


class Further(Scaled):
    """Who knows what it does."""


class FromScratch(nn.Module):
    """No relative of nn.Linear, but it has all that one has."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = nn.Parameter(torch.randn(out_features, in_features)), None

    def forward(self, x):
        return x @ self.weight.t()


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", {})


def test_a_registered_layer_is_converted_and_given_back():
    dense = nn.Sequential(Scaled(4, "first"), FromScratch(4, 3), Further(3, "else"))
    assert preview(dense).replaced == ()
    assert "sparsevd.register(Scaled, like=nn.Linear)" in preview(dense).skipped["0"]
    sparsevd.register(Scaled, like=nn.Linear)
    sparsevd.register(FromScratch, like=nn.Linear)
    assert preview(dense).replaced == ("0", "1")
    assert "Further is a subclass of Linear" in preview(dense).skipped["2"]
    with pytest.warns(sparsevd.SparseVDWarning, match="left dense: 2"):
        model = sparsevd.sparsify(dense, threshold=math.inf)
    assert [type(each) for each in model] == [SparseLinear, SparseLinear, Further]
    x = torch.randn(5, 4)
    assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), dense(x))
    assert copy.deepcopy(model)[0].plain_type is Scaled
    assert sparsevd.summary(model).weights == sparsevd.summary(dense).weights == 28
    back = sparsevd.prune(model)
    assert [type(each) for each in back] == [Scaled, FromScratch, Further]
    assert back[0].note == "first"
    assert back[0].__dict__.keys() == dense[0].__dict__.keys()
    assert list(back.state_dict()) == list(dense.state_dict())
    assert torch.equal(back(x), dense(x))


def test_a_twin_of_ones_own_may_be_given():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), None

        def forward(self, x):
            return nn.functional.linear(x * x, self.weight)

    class SparseSquared(ProductLayer):
        plain_type = Squared
        options = ()

        def forward(self, x):
            return self.output(x * x, SparseLinear.product)

        def arguments(self):
            return {}

    sparsevd.register(Squared, like=SparseSquared)
    dense = nn.Sequential(Squared())
    model = sparsevd.sparsify(dense, threshold=math.inf)
    x = torch.randn(4, 3)
    assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), dense(x))
    assert type(sparsevd.prune(model)[0]) is Squared


class Louder(nn.Embedding):
    """As the scaled embedding of BART in Transformers."""

    def __init__(self, tokens, width, scale):
        super().__init__(tokens, width)
        self.scale = scale

    def forward(self, input):
        return self.scale * super().forward(input)


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


@pytest.mark.parametrize(
    ("plain", "like", "method"), [(Louder, nn.Embedding, "forward"), (Standardised, nn.Conv2d, "_conv_forward")]
)
def test_a_forward_that_would_not_be_called_is_said(plain, like, method):
    layer = Louder(5, 3, 8.0) if plain is Louder else Standardised(2, 2, 3)
    advice = preview(nn.Sequential(layer)).skipped["0"]
    assert f"a {method} of its own, which a Sparse VD layer does not call: what it adds, such as a scale" in advice
    assert f"Only if it computes the very same, call sparsevd.register({plain.__name__}, like=nn." in advice
    with pytest.warns(sparsevd.SparseVDWarning, match=f"{plain.__name__} has a {method} of its own.*lost in training"):
        sparsevd.register(plain, like=like)
    assert preview(nn.Sequential(layer)).replaced == ("0",)  # its owner was told


def test_a_scaled_embedding_keeps_its_scale_with_a_twin_of_its_own():
    class SparseLouder(SparseTable):
        plain_type, options = nn.Embedding, ("num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq")

        def forward(self, input):
            rows = self.sampled(input) if self.draws_noise else nn.functional.embedding(input, self.pruned_weight())
            return self.scale * rows

    sparsevd.register(Louder, like=SparseLouder)
    dense, tokens = nn.Sequential(Louder(5, 3, 8.0)), torch.arange(5)
    model = sparsevd.sparsify(dense, threshold=math.inf)
    assert not torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model(tokens), dense(tokens), rtol=0, atol=8 * 6 * math.exp(-4))  # 6 deviations
    assert torch.equal(model.eval()(tokens), dense(tokens))
    back = sparsevd.prune(model)
    assert (type(back[0]), back[0].scale) == (Louder, 8.0)
    assert torch.equal(back(tokens), dense(tokens))


class Wordy(nn.LSTM):
    def __init__(self, note):
        super().__init__(4, 8, 2, dropout=0.5)
        self.note = note


class Narrow(nn.MultiheadAttention):
    def __init__(self, width):
        super().__init__(8, 2, kdim=width, vdim=width)


@pytest.mark.parametrize("width", [8, 5])
def test_layers_with_several_weights_may_be_registered(width):
    sparsevd.register(Wordy, like=nn.LSTM)
    sparsevd.register(Narrow, like=nn.MultiheadAttention)
    dense = nn.ModuleList([Wordy("first"), Narrow(width)]).eval()
    assert preview(dense).remarks() == []
    back = sparsevd.prune(copy.deepcopy(sparsevd.sparsify(dense, threshold=math.inf)))
    assert [type(each) for each in back] == [Wordy, Narrow]
    assert back[0].note == "first"
    assert list(back.state_dict()) == list(dense.state_dict())
    for old, new in zip(dense, back, strict=True):
        assert new.__dict__.keys() == old.__dict__.keys()
    x, key = torch.randn(3, 2, 4), torch.randn(5, 2, width)
    output, _ = dense[0](x)
    assert torch.equal(back[0](x)[0], output)
    assert torch.equal(back[1](output, key, key)[0], dense[1](output, key, key)[0])


def test_what_cannot_be_registered():
    with pytest.raises(ArgumentError, match="must be a class of modules"):
        sparsevd.register(Scaled(2, ""), like=nn.Linear)
    with pytest.raises(ArgumentError, match="Linear is a layer that Sparse VD knows already"):
        sparsevd.register(nn.Linear, like=nn.Conv1d)
    with pytest.raises(ArgumentError, match="must be one of Linear, Conv1d"):
        sparsevd.register(Scaled, like=nn.ReLU)
    for like, lacking in {
        nn.Conv2d: "in_channels, out_channels, kernel_size",
        nn.LSTM: "input_size, hidden_size",
        nn.GRUCell: "input_size, hidden_size",
        nn.MultiheadAttention: "embed_dim, num_heads",
    }.items():
        sparsevd.register(FromScratch, like=like)
        assert f"FromScratch lacks {lacking}" in preview(nn.Sequential(FromScratch(2, 2))).skipped["0"]
