"""Contraction: layers that compute with the inputs and units that are left."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior import posteriors
from sparsevd.training import contraction
from sparsevd.training.progress import Callback


def problem(n=400):
    """Only the first two of twelve inputs matter; the last two are always zero."""
    x = torch.randn(n, 12, generator=torch.Generator().manual_seed(0))
    x[:, 10:] = 0
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network():
    torch.manual_seed(1)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)))


def adam(model):
    """An optimizer that has made a step, so that it has a state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    (model(torch.randn(8, *INPUTS[model.kind])).square().sum() + sparsevd.kl(model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


INPUTS = {"linear": (12,), "convolution": (3, 6, 6), "channels last": (3, 6, 6)}


def sparse_model(kind):
    torch.manual_seed(2)
    if kind == "linear":
        layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2, bias=False)]
    else:
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten()]
    model = sparsevd.sparsify(nn.Sequential(*layers)).train()
    model.kind = kind
    return model.to(memory_format=torch.channels_last) if kind == "channels last" else model


def drop_inputs_and_units(model):
    """Some inputs and units without any weight, and some holes besides."""
    for layer in posteriors(model):
        which = torch.rand_like(layer.theta) < 0.3
        which[1::3] = True
        which[:, ::2] = True
        layer.drop(which)


every_kind = pytest.mark.parametrize("kind", list(INPUTS))


@every_kind
def test_a_contracted_network_is_the_same_network(kind):
    """Without noise: the output, the KL and all gradients, those of the dead units' biases too."""
    model = sparse_model(kind)
    optimizer = adam(model)
    drop_inputs_and_units(model)
    layers = posteriors(model)
    for layer in layers:
        with torch.no_grad():
            layer.log_sigma2.clamp_max_(-40.0)
    x = torch.randn(8, *INPUTS[kind], requires_grad=True)
    biases = [each.layer.bias for each in layers if each.layer.bias is not None]

    def results():
        output, kl = model(x), sparsevd.kl(model)
        weights = [each.theta for each in layers]
        return output, kl, weights, torch.autograd.grad(output.square().sum() + kl, [x, *biases, *weights])

    output, kl, weights, gradients = results()
    shapes = [weight.shape for weight in weights]
    alive = [layer.alive() for layer in layers]
    with contraction.contracted(model, layers, optimizer):
        small_output, small_kl, small_weights, small_gradients = results()
        assert all(small.numel() < shape.numel() / 2 for small, shape in zip(small_weights, shapes, strict=True))
        parts = [each.layer.part for each in layers]
    torch.testing.assert_close(small_output, output)
    torch.testing.assert_close(small_kl, kl)
    n = len(gradients) - len(layers)
    torch.testing.assert_close(small_gradients[:n], gradients[:n])
    for part, mask, small, whole in zip(parts, alive, small_gradients[n:], gradients[n:], strict=True):
        where = torch.meshgrid(part.units, part.inputs, indexing="ij")
        torch.testing.assert_close(small * mask[where], whole[where] * mask[where])


@pytest.mark.parametrize("channels", [1, 3])
def test_contraction_keeps_channels_last(channels):
    """And so do the gradients. Between two orders in memory torch copies, and convolutions are slower in the other."""
    torch.manual_seed(0)
    model = sparsevd.sparsify(nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3))).train()
    model = model.to(memory_format=torch.channels_last)
    layers = posteriors(model)
    for layer in layers:
        which = torch.zeros_like(layer.theta, dtype=torch.bool)
        which[::2] = True
        layer.drop(which)
    x = torch.randn(64, channels, 16, 16).to(memory_format=torch.channels_last)
    with contraction.contracted(model, layers, torch.optim.Adam(model.parameters())):
        outputs = [model[0](x)]
        outputs += [model[1](outputs[0])]
        outputs += [model[2](outputs[1])]
        gradients = []
        for output in outputs:
            output.register_hook(gradients.append)
        outputs[-1].square().sum().backward()
    assert len(gradients) == 3
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in outputs + gradients)


@every_kind
def test_contraction_gives_everything_back(kind):
    model = sparse_model(kind)
    optimizer = adam(model)
    drop_inputs_and_units(model)
    layers = posteriors(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    kept = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters}
    with contraction.contracted(model, layers, optimizer):
        assert any(p.shape != before[name].shape for name, p in model.named_parameters())
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in model.parameters()
        }
        for p in model.parameters():  # their numbers in the optimizer are as small as they are
            assert {v.shape for k, v in optimizer.state[p].items() if k != "step"} == {p.shape}
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert [p for group in optimizer.param_groups for p in group["params"]] == parameters
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    for layer in layers:
        for parameter in (layer.theta, layer.log_sigma2):
            for slot in ("exp_avg", "exp_avg_sq"):
                alive = layer.alive()
                assert torch.equal(optimizer.state[parameter][slot][alive], kept[parameter][slot][alive])
            assert optimizer.state[parameter]["step"] == 1


@every_kind
def test_a_step_inside_is_a_step_outside(kind):
    """The same gradients give the same weights, Adam's memory included."""
    results = []
    for inside in (False, True):
        model = sparse_model(kind)
        optimizer = adam(model)
        drop_inputs_and_units(model)
        layers = posteriors(model)
        alive = [layer.alive() for layer in layers]
        if inside:
            with contraction.contracted(model, layers, optimizer):
                sparsevd.kl(model).backward()
                optimizer.step()
        else:
            sparsevd.kl(model).backward()
            optimizer.step()
        results.append([(each.theta * mask, each.layer.bias) for each, mask in zip(layers, alive, strict=True)])
    torch.testing.assert_close(results[0], results[1])


def test_a_weight_that_another_module_reads_stays_whole():
    torch.manual_seed(2)
    model = nn.ModuleDict({"head": nn.Linear(12, 16, bias=False), "other": nn.Linear(3, 3)})
    sparse = sparsevd.sparsify(model, include="head")
    sparse.kind = "linear"
    sparse["other"].weight = sparse["head"].weight
    layers = posteriors(sparse)
    layers[0].drop(torch.ones_like(layers[0].theta, dtype=torch.bool))
    with contraction.contracted(sparse, layers, torch.optim.Adam(sparse.parameters())):
        assert layers[0].theta.shape == (16, 12)


class ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return nn.functional.linear(self.fc(x), self.fc.weight)


def test_a_weight_that_a_forward_reads_by_itself_stays_whole():
    with pytest.warns(SparseVDWarning, match="read elsewhere: fc"):
        model = sparsevd.sparsify(ReadTwice())
    layers = posteriors(model)
    gone = torch.zeros(6, 6, dtype=torch.bool)
    gone[:4] = True
    layers[0].drop(gone)
    x = torch.randn(3, 6)
    before = model.eval()(x)
    with contraction.contracted(model, layers, torch.optim.Adam(model.parameters())):
        torch.testing.assert_close(model(x), before)


def test_a_layer_without_any_weight_gives_its_bias():
    model = sparse_model("linear")
    optimizer = adam(model)
    layers = posteriors(model)
    for layer in layers:
        layer.drop(torch.ones_like(layer.theta, dtype=torch.bool))
    with contraction.contracted(model, layers, optimizer):
        out = model[0](torch.randn(5, 12))
    torch.testing.assert_close(out, model[0].bias.expand(5, 16), rtol=0, atol=1e-9)


def test_fit_reports_what_is_alive_and_the_bound_before_and_after():
    model = network()
    config = sparsevd.FitConfig(epochs=12, batch_size=50, learning_rate=2e-2, drop_from=0.3, drop_patience=2)
    history = sparsevd.fit(model, problem(2000), None, config, progress=False)
    assert all(set(epoch.alive) == {"0", "2"} for epoch in history)
    (first_inputs, first_units), (inputs, units) = history[0].alive["0"], history[-1].alive["0"]
    assert 2 <= inputs < first_inputs <= 12
    assert 1 <= units <= first_units <= 16
    dropping = [epoch for epoch in history if epoch.dropped]
    assert dropping
    assert dropping[0].epoch >= 4  # β = 1 from 0.2 of 12 epochs on, and two epochs in a row
    for epoch in dropping:
        assert epoch.elbo_before_drop != epoch.elbo_after_drop
        assert abs(epoch.elbo_after_drop - epoch.elbo_before_drop) < 0.2 * abs(epoch.elbo_before_drop)
    assert history[-1].dropped is None


def test_contraction_changes_neither_what_is_learned_nor_the_shapes(tmp_path):
    """Rounding and the order of the noise differ, the result does not; a checkpoint has the original shapes."""
    kept = []
    for contract in (False, True):
        model = network()
        config = sparsevd.FitConfig(epochs=14, batch_size=50, learning_rate=2e-2, drop_from=0.3, contract=contract)
        history = sparsevd.fit(
            model, problem(2000), problem(500), config, run_dir=tmp_path / str(contract), progress=False
        )
        kept.append(history[-1].alive["0"][0])
        assert history[-1].val_error < 4
        assert model[0].weight.shape == model[0].log_sigma2.shape == (16, 12)
        assert sparsevd.prune(model)[0].weight.shape == (16, 12)
    assert abs(kept[0] - kept[1]) <= 1


def test_resume_with_contraction_gives_the_same_bits(tmp_path):
    config = sparsevd.FitConfig(epochs=8, batch_size=50, learning_rate=2e-2, drop_from=0.3, drop_patience=2)
    whole = network()
    sparsevd.fit(whole, problem(), None, config, progress=False)

    class Stop(Exception, Callback):
        def on_epoch(self, moment):
            if moment.epoch == 6:
                raise self

    with pytest.raises(Stop):
        sparsevd.fit(network(), problem(), None, config, run_dir=tmp_path, progress=False, callbacks=[Stop()])
    resumed = network()
    sparsevd.fit(resumed, problem(), None, config, run_dir=tmp_path, resume=True, progress=False)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_settings_are_checked():
    with pytest.raises(ArgumentError, match="drop_patience"):
        sparsevd.FitConfig(drop_patience=0)
    with pytest.raises(ArgumentError, match="variance_dtype"):
        sparsevd.FitConfig(variance_dtype="float16")
    with pytest.raises(ArgumentError, match="variance_dtype"):
        sparsevd.sparsify(nn.Linear(2, 2), variance_dtype=torch.int8)
    for model, dtype in (
        (sparsevd.sparsify(nn.Linear(2, 2), variance_dtype=torch.float32), None),
        (sparsevd.sparsify(nn.Linear(2, 2)), "float32"),
    ):
        config = sparsevd.FitConfig(epochs=1, variance_dtype=dtype, autocast=True)
        with pytest.raises(ArgumentError, match="contradict each other"):
            sparsevd.fit(model, (torch.randn(8, 2), torch.arange(8) % 2), None, config, progress=False)
    model = network()
    config = dataclasses.replace(sparsevd.FitConfig(epochs=1), variance_dtype="bfloat16")
    sparsevd.fit(model, problem(), None, config, progress=False)
    assert model[0].variance_dtype == torch.bfloat16


@pytest.mark.parametrize("instructions", [True, False])
def test_bfloat16_is_allowed_where_the_cpu_has_it(monkeypatch, instructions):
    monkeypatch.setattr(sys.modules["sparsevd.training.loop"], "multiplies_bfloat16", lambda: instructions)
    config = sparsevd.FitConfig(epochs=1)
    model = network()
    sparsevd.fit(model, problem(), None, config, progress=False)
    assert model[0].variance_dtype is None
    assert model[0].bfloat16_where_faster is instructions
    model = network()
    sparsevd.fit(model, problem(), None, dataclasses.replace(config, variance_dtype="float32"), progress=False)
    assert model[0].variance_dtype == torch.float32
    double = network().double()
    sparsevd.fit(double, tuple(t.double() if t.is_floating_point() else t for t in problem()), None, config)
    assert double[0].variance_dtype is None
    assert not double[0].bfloat16_where_faster
