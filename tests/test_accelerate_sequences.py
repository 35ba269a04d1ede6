"""accelerate on attention and recurrent layers: the same answers, in fewer products or from fewer inputs."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import sparsevd
from sparsevd import kernels
from sparsevd.graph.outputs import tensors_in
from sparsevd.runtime import acceleration
from sparsevd.runtime.sequences import InferenceAttention, InferenceRecurrent
from sparsevd.zoo.text_models import TextEncoder, TextLSTM
from test_accelerate import sparse_first

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Layer by layer alone: following such a network for a plan takes seconds, and there is none for it."""
    sparse_first(monkeypatch)
    monkeypatch.setattr(acceleration, "_whole", lambda *_: (None, "not tried"))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layer = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.attention(x, x, x)[0])


def pruned(model, zeros):
    """In eval mode, with zeros in every matrix."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand_like(parameter) >= zeros)
    return model.eval()


def assert_same(fast, model, *arguments, **named):
    with torch.no_grad():
        ours, theirs = tensors_in(fast(*arguments, **named)), tensors_in(model(*arguments, **named))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def without_inputs(layer, dead=(0, 3)):
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith("weight_ih_l0"):
                weight[:, list(dead)] = 0
    return layer.eval()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
def test_a_recurrent_layer_reads_only_inputs_with_a_weight(kind, options):
    layer = without_inputs(kind(6, 4, **options))
    x = torch.randn(5, 3, 6)
    fast = sparsevd.accelerate(layer, x)
    assert isinstance(fast.model, InferenceRecurrent)
    assert fast.model.layer.input_size == 4
    assert [choice.choice for choice in fast.choices] == ["fewer inputs"]
    assert fast.chosen == "layer by layer"
    assert_same(fast, layer, x)
    assert_same(pickle.loads(pickle.dumps(copy.deepcopy(fast))), layer, x)
    _, state = layer(x)
    assert_same(fast, layer, torch.randn(5, 3, 6), state)
    assert_same(fast, layer, pack_padded_sequence(torch.randn(5, 3, 6), [5, 4, 2]))
    assert_same(fast, layer, torch.randn(7, 6))
    with pytest.raises(RuntimeError, match="6 features, not 5"):
        fast(torch.randn(5, 3, 5))


def test_a_recurrent_layer_that_reads_all_stays():
    layer = nn.LSTM(6, 4).eval()
    fast = sparsevd.accelerate(layer, torch.randn(5, 3, 6))
    assert fast.chosen == "as it was"
    assert [(choice.choice, choice.sparse_seconds) for choice in fast.choices] == [("dense", None)]


ATTENTIONS = {
    "packed": {},
    "separate": {"kdim": 6, "vdim": 10},
    "with everything": {"add_bias_kv": True, "add_zero_attn": True, "bias": False, "batch_first": True},
}


@pytest.mark.parametrize("options", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_takes_its_products_from_the_kernels(options):
    attention = pruned(nn.MultiheadAttention(8, 2, **options), 0.7)
    query = torch.randn(5, 3, 8)
    given = (query, *(torch.randn(5, 3, options.get(name, 8)) for name in ("kdim", "vdim")))
    for example in (given, (query, query, query)) if "kdim" not in options else (given,):
        fast = sparsevd.accelerate(attention, example)
        assert isinstance(fast.model, InferenceAttention)
        assert [choice.choice for choice in fast.choices] == ["sparse"]
        assert_same(fast, attention, *given)
        assert_same(fast, attention, *example)
        assert_same(fast, attention, *given, need_weights=False)
        assert_same(fast, attention, *given, average_attn_weights=False)
        batch, places = (5, 3) if options.get("batch_first") else (3, 5)
        hidden = torch.zeros(batch, places, dtype=torch.bool)
        hidden[:, -1] = True
        causal = nn.Transformer.generate_square_subsequent_mask(places)
        assert_same(fast, attention, *given, key_padding_mask=hidden)
        assert_same(fast, attention, *given, attn_mask=causal, is_causal=True, need_weights=False)
        assert_same(pickle.loads(pickle.dumps(fast)), attention, *example)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_follows(norm_first):
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=norm_first)
    model = pruned(model, 0.7)
    example = (torch.randn(2, 5, 8), torch.randn(2, 4, 8))
    fast = sparsevd.accelerate(model, example)
    swapped = [type(module) for module in fast.model.modules()]
    assert swapped.count(InferenceAttention) == 3
    assert_same(fast, model, *example)


def test_hooks_and_other_types_are_left_alone():
    model = pruned(Attends(), 0.7)
    model.attention.register_forward_hook(lambda *_: None)
    fast = sparsevd.accelerate(model, torch.randn(5, 3, 8))
    assert fast.left_alone["attention"] == "it has forward hooks, which a swap would lose"
    double = nn.LSTM(6, 4).double().eval()
    with pytest.raises(sparsevd.SparseVDError, match="not float32 on the CPU"):
        sparsevd.accelerate(double, torch.randn(5, 3, 6, dtype=torch.float64))


@pytest.mark.parametrize("network", [TextLSTM, TextEncoder])
def test_networks_for_texts_and_their_files(network, tmp_path):
    """All of it in one: zeros, the file and back, faster, with the same answers."""
    model = pruned(network(3, 50, width=8), 0.9)
    tokens = torch.randint(0, 50, (4, 12))
    sparsevd.save(model, tmp_path / "net.spvd")
    again = sparsevd.load(tmp_path / "net.spvd", into=network(3, 50, width=8)).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
    assert_same(sparsevd.accelerate(again, tokens), model, tokens)


def test_layers_without_another_way_are_named():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(5, 8), nn.GRUCell(8, 8), nn.Linear(8, 2)
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, tokens):
            x = self.cell(self.embed(tokens)).unsqueeze(1)
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    fast = sparsevd.accelerate(Mixed(), torch.tensor([1, 2, 3]))
    reasons = {name: why for name, why in fast.left_alone.items() if name != "(model)"}
    assert reasons == {
        "embed": "a lookup takes as long, whatever is in the row",
        "cell": "there is no faster way for layers of its type yet",
    }
