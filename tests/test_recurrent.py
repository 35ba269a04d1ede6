"""Recurrent layers: every option of torch's, one sample of the weights a call, the whole way of a network with one."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves

import sparsevd
from sparsevd import baselines
from sparsevd.conversion import preview
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.layers import SPARSE_TYPES
from sparsevd.posterior import posteriors
from sparsevd.reporting.diagnosis import diagnose
from sparsevd.training.contraction import part_left
from sparsevd.training.progress import Callback

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS = [nn.RNN, nn.LSTM, nn.GRU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]
OPTIONS = [
    {},
    {"bias": False},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True},
]
LAYERS = [(kind, options) for kind in KINDS for options in OPTIONS]
LAYERS += [(nn.RNN, {"nonlinearity": "relu"})]
LAYERS += [(nn.LSTM, {"proj_size": 2, **options}) for options in OPTIONS]
every_layer = pytest.mark.parametrize(("kind", "options"), LAYERS)


def twins(kind, options, noise=-60.0):
    """A plain layer, and a Sparse VD one of the same weights."""
    plain = kind(3, 4, **options)
    return plain, SPARSE_TYPES[kind](copy.deepcopy(plain), initial_log_sigma2=noise, threshold=math.inf)


def half_pruned(layer):
    with torch.no_grad():
        for each in layer.posteriors():
            each.log_sigma2.copy_(2 * each.theta.abs().log() + 3 + 4 * torch.randn_like(each.theta))
    layer.threshold = 3.0
    return layer


def states(plain, *batch):
    """A state to start from, of a layer or a cell."""
    if isinstance(plain, nn.RNNCellBase):
        shapes = [(*batch, 4)] * 2
    else:
        count = plain.num_layers * (2 if plain.bidirectional else 1)
        shapes = [(count, *batch, plain.proj_size or 4), (count, *batch, 4)]
    found = tuple(torch.randn(shape) for shape in shapes)
    return found if isinstance(plain, nn.LSTM | nn.LSTMCell) else found[0]


def inputs(plain):
    """Inputs of every kind: a batch, one sequence, sequences of several lengths; with and without a state."""
    sequences = [torch.randn(length, 3) for length in (2, 5, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    in_order = pack_sequence(sorted(sequences, key=len, reverse=True))
    batch = torch.randn(2, 5, 3) if plain.batch_first else torch.randn(5, 2, 3)
    return [
        *((x, None) for x in (batch, sequences[0], packed, in_order)),
        (batch, states(plain, 2)),
        (sequences[0], states(plain)),
        (packed, states(plain, 3)),
        (in_order, states(plain, 3)),
    ]


def assert_equal(ours, theirs, exact=True):
    assert type(ours) is type(theirs)
    pairs = list(zip(tree_leaves(tuple(ours)), tree_leaves(tuple(theirs)), strict=True))
    if isinstance(ours[0], PackedSequence):
        pairs += list(zip(ours[0], theirs[0], strict=True))
    for our, their in pairs:
        if isinstance(our, torch.Tensor):
            torch.testing.assert_close(our, their, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


@every_layer
def test_the_output_is_the_plain_layers(kind, options):
    """In eval mode to the bit; in training mode, where the noise is none to speak of, but for rounding."""
    plain, layer = twins(kind, options)
    for x, hx in inputs(plain):
        assert_equal(layer.eval()(x, hx), plain(x, hx))
        assert_equal(layer.train()(x, hx), plain(x, hx), exact=False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_so_is_a_cells(kind, bias):
    plain, cell = twins(kind, {"bias": bias})
    for x, hx in [(torch.randn(2, 3), states(plain, 2)), (torch.randn(3), states(plain)), (torch.randn(2, 3), None)]:
        theirs = plain(x, hx)
        assert_equal(cell.eval()(x, hx), theirs)
        assert_equal(cell.train()(x, hx), theirs, exact=False)


@every_layer
def test_gradients_are_those_of_the_sampled_formula(kind, options):
    """w = θ + exp(log σ² / 2)·ε with the same ε, in the plain layer."""
    plain, layer = twins(kind, options, noise=-2.0)
    x, hx = inputs(plain)[-2]
    torch.manual_seed(1)
    loss = sum(tensor.square().sum() for tensor in tensors(layer.train()(x, hx)))
    ours = torch.autograd.grad(loss, list(layer.parameters()))
    torch.manual_seed(1)
    drawn = {}
    for name in [name for name, _ in plain.named_parameters() if name.startswith("weight")]:
        noise = layer.get_parameter(name.replace("weight", "log_sigma2"))
        drawn[name] = layer.get_parameter(name) + torch.exp(noise / 2) * torch.randn(noise.shape)
    others = {name: layer.get_parameter(name) for name, _ in plain.named_parameters() if name not in drawn}
    expected = sum(t.square().sum() for t in tensors(torch.func.functional_call(plain, drawn | others, (x, hx))))
    torch.testing.assert_close(loss, expected)
    for our, their in zip(ours, torch.autograd.grad(expected, list(layer.parameters())), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def tensors(out):
    """The output and the state after it; a packed one by its numbers."""
    output, last = out
    return [output.data if isinstance(output, PackedSequence) else output, *tree_leaves(last)]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_the_same_at_all_steps_and_fresh_at_each_call(kind):
    """Without memory, the same input gives the same output at each step of one call and in the whole batch."""
    plain, layer = twins(kind, {}, noise=0.0)
    if kind is not nn.RNN:  # only the plain one has no other memory than its recurrent weights
        assert not torch.equal(layer.train()(torch.ones(5, 2, 3))[0], layer(torch.ones(5, 2, 3))[0])
        return
    for each in layer.posteriors():
        if "hh" in each.weight:
            each.drop(torch.ones_like(each.theta, dtype=torch.bool))
    first, second = (layer.train()(torch.ones(5, 2, 3))[0] for _ in range(2))
    torch.testing.assert_close(first, first[:1, :1].expand_as(first), rtol=0, atol=1e-6)
    assert (first[0, 0] - second[0, 0]).abs().min() > 1e-4
    assert not torch.allclose(first[0, 0], plain(torch.ones(5, 2, 3))[0][0, 0], atol=0.01)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_draws_at_each_call_and_its_bias_has_no_noise(kind):
    _, cell = twins(kind, {}, noise=0.0)
    x = torch.ones(2, 3)
    assert not torch.equal(tree_leaves(cell.train()(x))[0], tree_leaves(cell(x))[0])
    assert torch.equal(tree_leaves(cell(0 * x))[0], tree_leaves(cell(0 * x))[0])


@every_layer
def test_pruning_gives_the_plain_layer_with_its_keys(kind, options):
    plain = kind(3, 4, **options)
    layer = half_pruned(sparsevd.sparsify(plain)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)  # of a matrix that lost everything
        pruned = sparsevd.prune(layer)
    assert type(pruned) is kind
    assert list(pruned.state_dict()) == list(plain.state_dict())
    assert [key for key in layer.state_dict() if "log_sigma2" not in key] == list(plain.state_dict())
    assert pruned.all_weights[0][0] is pruned.weight_ih_l0
    assert 0 < sparsevd.summary(pruned).kept == sparsevd.summary(layer).kept < sparsevd.summary(plain).kept
    fresh = kind(3, 4, **options).eval()
    fresh.load_state_dict(pruned.state_dict())
    for x, hx in inputs(plain):
        assert_equal(layer(x, hx), pruned(x, hx))
        assert_equal(fresh(x, hx), pruned(x, hx))
    pruned.flatten_parameters()
    assert torch.equal(tree_leaves(copy.deepcopy(pruned)(x, hx)[1])[0], tree_leaves(pruned(x, hx)[1])[0])


def test_every_matrix_has_a_posterior_of_its_own():
    layer = sparsevd.sparsify(nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2))
    found = posteriors(layer)
    assert len(found) == 12
    assert {each.noise for each in found} >= {"log_sigma2_ih_l0", "log_sigma2_hh_l1_reverse", "log_sigma2_hr_l0"}
    assert not any("bias" in name and "sigma" in name for name, _ in layer.named_parameters())
    torch.testing.assert_close(sparsevd.kl(layer), torch.stack([each.kl() for each in found]).sum())
    assert all(part_left(each) is None for each in found)  # the layer cannot compute with a part of its units
    assert "hidden_size=4" in repr(layer)
    assert "threshold=3.0" in repr(layer)


def test_dropout_between_layers_is_removed():
    dense = nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.5))
    assert preview(dense).dropout_removed == preview(dense).replaced == ("0",)
    assert "dropout set to p = 0: 0" in str(preview(dense))
    model = sparsevd.sparsify(dense, initial_log_sigma2=-60.0).train()
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(model(x)[0], model(x)[0])
    assert dense[0].dropout == 0.5
    assert model[0].dropout == sparsevd.prune(model)[0].dropout == 0.0
    kept = sparsevd.sparsify(dense, keep_dropout=True, initial_log_sigma2=-60.0).train()
    assert not torch.allclose(kept(x)[0], kept(x)[0])
    assert sparsevd.prune(kept)[0].dropout == 0.5
    assert preview(dense, keep_dropout=True).dropout_removed == ()


def test_what_torch_refuses_is_refused():
    _, lstm = twins(nn.LSTM, {})
    _, cell = twins(nn.GRUCell, {})
    for layer in (lstm, cell):
        with pytest.raises(ArgumentError, match=r"the last of size 3, and was given one of shape \(5, 2, 4\)"):
            layer(torch.randn(5, 2, 4))
    with pytest.raises(ArgumentError, match=r"has shape \(1, 3, 4\); with this input it must have \(1, 2, 4\)"):
        lstm(torch.randn(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)))
    with pytest.raises(ArgumentError, match="a state of 2 tensors, not 1"):
        lstm(torch.randn(5, 2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ArgumentError, match=r"must have \(2, 4\)"):
        cell(torch.randn(2, 3), torch.zeros(3, 4))


def test_layers_that_cannot_be_converted_are_named():
    tied, other, computed = nn.LSTM(4, 4, 2), nn.LSTM(4, 4), nn.GRU(4, 4)
    tied.weight_hh_l1 = other.weight_hh_l0
    nn.utils.parametrizations.weight_norm(computed, "weight_hh_l0")
    model = nn.ModuleDict({"tied": tied, "other": other, "computed": computed, "fine": nn.RNN(4, 4)})
    skipped = preview(model, exclude="other").skipped
    assert "tied.weight_hh_l1 = other.weight_hh_l0" in skipped["tied"]
    assert "parametrization" in skipped["computed"]
    assert set(skipped) == {"tied", "computed"}


def test_layers_on_top_of_each_other_may_share_a_matrix():
    dense = nn.LSTM(4, 4, 2)
    dense.weight_hh_l1 = dense.weight_hh_l0
    layer = sparsevd.sparsify(dense)
    assert layer.log_sigma2_hh_l1 is layer.log_sigma2_hh_l0
    assert [each.weight for each in posteriors(layer)] == ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1"]
    with torch.no_grad():
        layer.log_sigma2_hh_l0[:8] = 30.0
    pruned = sparsevd.prune(layer)
    assert pruned.weight_hh_l1 is pruned.weight_hh_l0
    assert pruned._flat_weights[5] is pruned.weight_hh_l0
    assert not pruned.weight_hh_l0[:8].any()
    x = torch.randn(3, 2, 4)
    assert torch.equal(pruned(x)[0], layer.eval()(x)[0])


def test_a_matrix_that_lost_everything_is_named():
    layer = sparsevd.sparsify(nn.Sequential(nn.GRU(3, 4)))
    with torch.no_grad():
        layer[0].log_sigma2_hh_l0.fill_(30.0)
    with pytest.warns(SparseVDWarning, match="weight_hh_l0 of layer 0 lost every one of its 48 weights"):
        sparsevd.prune(layer)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_log_sigma2_in_float32(kind, dtype):
    _, layer = twins(kind, {}, noise=-8.0)
    layer = layer.to(dtype).train()
    out = layer(torch.randn(2, 3, dtype=dtype))
    assert all(tensor.dtype == dtype for tensor in tree_leaves(out))
    (sum(tensor.float().sum() for tensor in tree_leaves(out)) + sparsevd.kl(layer)).backward()
    for each in layer.posteriors():
        assert each.theta.grad.dtype == dtype
        assert each.log_sigma2.dtype == torch.float32
        assert each.log_sigma2.grad.isfinite().all()
    assert layer.plain().weight_hh_l0.dtype == dtype if kind in KINDS else True


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_layers_made_on_meta_draw_fresh_weights(kind):
    layer = SPARSE_TYPES[kind](kind(3, 4, device="meta")).to_empty(device="cpu")
    layer.reset_parameters()
    assert all(0.1 < each.theta.std() < 0.5 and (each.log_sigma2 == -8).all() for each in layer.posteriors())


class Remembers(nn.Module):
    """What the first step of a sequence said, by the state after the last one."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(6, 4), kind(4, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, tokens):
        self.rnn.flatten_parameters()
        return self.head(self.rnn(self.words(tokens))[0][:, -1])


def sequences():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (1000, 3), generator=generator)
    return tokens, (tokens[:, 0] > 2).long()


CONFIG = sparsevd.FitConfig(epochs=10, batch_size=20, learning_rate=1e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_fit_learns_and_prunes(kind, tmp_path):
    torch.manual_seed(0)
    model = sparsevd.sparsify(Remembers(kind))
    sparsevd.fit(model, sequences(), None, CONFIG, run_dir=tmp_path, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)
        pruned = sparsevd.prune(model)
    tokens, answers = sequences()
    assert (pruned.eval()(tokens).argmax(1) == answers).float().mean() > 0.95
    assert sparsevd.summary(pruned).sparsity > 80
    path = tmp_path / "net.spvd"
    sparsevd.save(model, path)
    loaded = sparsevd.load(path, into=Remembers(kind)).eval()
    assert torch.equal(loaded(tokens), pruned(tokens))
    sparsevd.save(model, path, precision="posterior")
    loaded = sparsevd.load(path, into=Remembers(kind)).eval()
    assert (loaded(tokens).argmax(1) == answers).float().mean() > 0.9


def test_resuming_is_exact(tmp_path):
    def run(folder, **options):
        torch.manual_seed(0)
        model = sparsevd.sparsify(Remembers(nn.GRU))
        config = sparsevd.FitConfig(epochs=4, batch_size=64, drop_patience=1, drop_from=0.25)
        sparsevd.fit(model, sequences(), None, config, run_dir=folder, progress=False, **options)
        return model.state_dict()

    class Stop(Callback):
        def on_epoch(self, moment):
            if moment.metrics.epoch == 2:
                raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", callbacks=[Stop()])
    resumed = run(tmp_path / "parts", resume=True)
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())


def test_a_loop_of_ones_own():
    torch.manual_seed(0)
    model = sparsevd.sparsify(Remembers()).train()
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, 1e-2))
    tokens, answers = sequences()
    sparsevd.attach(optimizer, model, n_train=1000, total_steps=250)
    for step in range(250):
        chosen = torch.arange(20) + 20 * (step % 50)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[chosen]), answers[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert (model.eval()(tokens).argmax(1) == answers).float().mean() > 0.9


class StepByStep(nn.Module):
    """A cell in a loop, and a layer that is called for each step: what it computed with at each is kept."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.cell, self.rnn = nn.LSTMCell(6, 5), nn.GRU(5, 5)
        self.head = nn.Linear(5, 2)
        self.samples: list[list[torch.Tensor]] = []

    def forward(self, tokens):
        state, memory = None, None
        weights = []
        for step in self.embed(tokens).unbind(1):
            weights += [each.drawn()["weight_ih"] for each in [self.cell] if hasattr(each, "drawn")]
            state = self.cell(step, state)
            output, memory = self.rnn(state[0].unsqueeze(0), memory)
        self.samples.append(weights)
        return self.head(output[0])


def test_a_pass_of_fit_has_one_sample_of_a_cell_and_the_next_another():
    tokens, answers = (each[:40] for each in sequences())
    model = sparsevd.sparsify(StepByStep())
    seen = model.samples

    def check(passes):
        assert len(seen) >= passes
        for weights in seen[:passes]:
            assert all(torch.equal(each, weights[0]) for each in weights)
        assert (seen[0][0] - seen[1][0]).abs().max() > 1e-3  # more than the weights have moved
        seen.clear()

    config = sparsevd.FitConfig(epochs=1, batch_size=10, learning_rate=1e-9)
    sparsevd.fit(model, (tokens, answers), config=config, progress=False)
    check(4)
    optimizer = torch.optim.Adam(sparsevd.parameter_groups(model.train(), 1e-9))
    attached = sparsevd.attach(optimizer, model, n_train=40, total_steps=6)
    for way in (model, model.forward):  # the second, as in a part of a larger module, is not seen to begin
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(way(tokens), answers).backward()
            optimizer.step()
        check(3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.samples.clear()
        other(tokens)
        assert not torch.equal(other.samples[0][0], other.samples[0][1])  # nobody would let go of it
    attached.detach()
    model(tokens)
    assert not torch.equal(seen[0][0], seen[0][1])  # nobody holds it


def test_one_sample_of_a_loop_of_ones_own():
    _, cell = twins(nn.GRUCell, {}, noise=0.0)
    x = torch.ones(2, 3)
    with sparsevd.one_sample(cell.train()):
        first = cell(x)
        assert torch.equal(cell(x), first)
        (cell(x).sum() + cell(2 * x).sum()).backward()
    assert cell.log_sigma2_ih.grad.any()
    with pytest.raises(ArgumentError), sparsevd.one_sample(cell):
        cell(torch.ones(2, 7))
    assert not torch.equal(cell(x), cell(x))
    assert not torch.equal(cell(x), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_is_computed_twice_to_save_memory_has_one_sample(reentrant):
    """Gradients with and without `torch.utils.checkpoint`, with other noise after it."""
    model = sparsevd.sparsify(nn.Sequential(nn.GRUCell(3, 4), nn.Linear(4, 3)), initial_log_sigma2=0.0).train()
    x = torch.randn(2, 3, requires_grad=True)

    def steps(x):
        state = None
        for _ in range(3):
            state = model[0](x, state)
            x = F.dropout(model[1](state), 0.2)
        return x

    found = []
    for whole in (steps, lambda x: torch.utils.checkpoint.checkpoint(steps, x, use_reentrant=reentrant)):
        torch.manual_seed(4)
        model.zero_grad()
        with sparsevd.one_sample(model):
            whole(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_samples_inside_of_one_another():
    _, cell = twins(nn.GRUCell, {}, noise=0.0)
    x = torch.ones(2, 3)
    with sparsevd.one_sample(cell.train()):
        first = cell(x)
        with sparsevd.one_sample(cell):
            assert not torch.equal(cell(x), first)
        assert torch.equal(cell(x), first)


def test_copies_and_state_dicts():
    model = sparsevd.sparsify(Remembers()).eval()
    for each in posteriors(model):
        each.drop(torch.rand_like(each.theta) < 0.5)
    other = sparsevd.sparsify(Remembers()).eval()
    other.load_state_dict(model.state_dict())
    tokens, _ = sequences()
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    assert torch.equal(other(tokens), model(tokens))
    missing = model.load_state_dict(Remembers().state_dict(), strict=False)
    assert missing.missing_keys == [key for key in model.state_dict() if "log_sigma2" in key]
    assert not missing.unexpected_keys


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch itself
def test_export_in_eval_mode_and_a_compiled_step():
    tokens, _ = sequences()
    model = sparsevd.sparsify(Remembers(), initial_log_sigma2=-60.0).eval()
    torch.testing.assert_close(torch.export.export(model, (tokens,)).module()(tokens), model(tokens))
    compiled = torch.compile(model.train(), backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_bf16_autocast_trains():
    model = sparsevd.sparsify(Remembers()).train()
    tokens, answers = sequences()
    with torch.autocast("cpu", torch.bfloat16):
        loss = sparsevd.elbo_loss(F.cross_entropy(model(tokens), answers), model, n_train=1000)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["pruning", "gradual", "surgery", "soft-weight-sharing"])
def test_rivals_remove_recurrent_weights_too(name):
    settings = {"gradual": {"sparsity": 0.8}, "surgery": {"dense_part": 0.5}}.get(name, {})
    method = baselines.METHODS[name](**settings)
    net = baselines.train(method, Remembers(), sequences(), epochs=2, batch_size=100, progress=False).network
    assert all((weight == 0).any() for weights in net.rnn.all_weights for weight in weights if weight.ndim == 2)


def test_a_layer_without_memory_is_no_reason_to_worry():
    model = sparsevd.sparsify(nn.Sequential(nn.GRU(3, 4)))
    gate, recurrent = posteriors(model)
    recurrent.drop(torch.ones_like(recurrent.theta, dtype=torch.bool))
    assert "lost every weight" not in "".join(diagnose(sparsevd.summary(model)))
    gate.drop(torch.ones_like(gate.theta, dtype=torch.bool))
    assert "0.weight_ih_l0 lost every weight" in "".join(diagnose(sparsevd.summary(model)))
