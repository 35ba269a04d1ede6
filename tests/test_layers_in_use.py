"""What is done with layers beside computing: each family is counted, copied, contracted, trained, exported."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import sparsevd
from sparsevd.layers import sampling
from sparsevd.posterior import equations, posteriors, switch_noise
from sparsevd.training.contraction import contracted
from test_layers import CASES, TWINS, an_input, given, half_pruned, in_one, make, pytestmark, run  # noqa: F401

# Of each family the first case.
FAMILIES = {plain: (arguments, shape) for plain, arguments, shape in reversed(CASES)}
every_family = pytest.mark.parametrize("plain", FAMILIES, ids=lambda plain: plain.__name__)


class Reader(nn.Module):
    """A layer inside of a network: one output for each example of the batch, whatever the layer gives out."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = torch.cat([in_one(self.layer(*given(self.layer, each))).flatten().unsqueeze(0) for each in x])
        return torch.stack([out.sin().sum(1), out.cos().sum(1)], 1)


def a_network(plain) -> nn.Module:
    torch.manual_seed(5)
    return Reader(make(plain, FAMILIES[plain][0]))


def inputs(plain, count=6):
    torch.manual_seed(7)
    return torch.stack([an_input(*FAMILIES[plain]) for _ in range(count)])


@every_family
def test_kl_and_summary_count_every_weight_once(plain):
    layer = half_pruned(make(plain, FAMILIES[plain][0]))
    found = layer.posteriors()
    log_alpha = torch.cat([each.log_alpha().flatten() for each in found])
    weights = torch.cat([each.theta.flatten() for each in found])
    alive = (log_alpha <= 3) & (weights != 0)
    expected = -sum(equations.negative_kl(each.log_alpha()).sum() for each in found)
    torch.testing.assert_close(sparsevd.kl(layer), expected)
    summed = sparsevd.summary(layer)
    dense = layer.out_proj.weight.numel() if plain is nn.MultiheadAttention else 0
    weights, kept = alive.numel() + dense, int(alive.sum()) + dense
    assert (sum(row.weights for row in summed.layers), sum(row.kept for row in summed.layers)) == (weights, kept)
    assert 0 < alive.sum() < alive.numel()
    assert summed.ratio == pytest.approx(weights / kept)


@every_family
def test_a_copy_and_a_loaded_state_draw_the_same_noise(plain):
    arguments, shape = FAMILIES[plain]
    layer, x = half_pruned(make(plain, arguments)).train(), an_input(arguments, shape)
    loaded = make(plain, arguments).train()
    assert set(layer.state_dict()) - set(plain(**arguments).state_dict()) == {each.noise for each in layer.posteriors()}
    loaded.load_state_dict(layer.state_dict())
    outs = []
    for each in (layer, copy.deepcopy(layer), loaded):
        torch.manual_seed(2)
        outs.append(run(each, x))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], run(layer, x))


@every_family
def test_a_layer_contracts_to_the_same_or_stays_whole(plain):
    """In either case with whole units and inputs gone."""
    arguments, shape = FAMILIES[plain]
    layer, x = make(plain, arguments).train(), an_input(arguments, shape)
    for each in layer.posteriors():
        gone = torch.zeros_like(each.theta, dtype=torch.bool)
        gone[1] = gone[:, 0] = True
        each.drop(gone)
    optimizer = torch.optim.Adam(layer.parameters())
    switch_noise(layer, False)
    before = run(layer, x)
    with contracted(layer, posteriors(layer), optimizer) as inside:
        whole = [each.theta.numel() for each in make(plain, arguments).posteriors()]
        smaller = [each.theta.numel() < size for each, size in zip(posteriors(layer), whole, strict=True)]
        assert smaller == [layer.can_contract()] * len(whole)
        assert bool(inside) == layer.can_contract()
        torch.testing.assert_close(run(layer, x), before)
    assert [p.shape for p in layer.parameters()] == [p.shape for p in make(plain, arguments).parameters()]


@every_family
def test_without_noise_training_mode_has_the_pruned_weights(plain):
    arguments, shape = FAMILIES[plain]
    layer, x = half_pruned(make(plain, arguments)), an_input(arguments, shape)
    wanted = run(layer.eval(), x)
    switch_noise(layer.train(), False)
    assert torch.equal(run(layer, x), wanted)
    switch_noise(layer, True)
    assert not torch.equal(run(layer, x), wanted)


@every_family
def test_bfloat16_weights_train_and_keep_log_sigma2_in_float32(plain):
    arguments, shape = FAMILIES[plain]
    layer, x = make(plain, arguments).to(torch.bfloat16).train(), an_input(arguments, shape)
    x = x.bfloat16() if x.is_floating_point() else x
    out = layer(*given(layer, x))
    assert all(each.dtype is torch.bfloat16 for each in tree_leaves(out))
    in_one(out).float().square().sum().backward()
    for each in layer.posteriors():
        assert each.log_sigma2.dtype is torch.float32
        assert each.theta.grad.isfinite().all()
    assert any(each.log_sigma2.grad.any() for each in layer.posteriors())
    assert {p.dtype for p in layer.plain().parameters()} == {torch.bfloat16}


@every_family
def test_layers_made_on_meta_draw_fresh_weights(plain):
    arguments, shape = FAMILIES[plain]
    if not hasattr(TWINS[plain].plain_type, "reset_parameters") and plain is not nn.MultiheadAttention:
        pytest.skip("its constructor draws")
    with torch.device("meta"):
        layer = make(plain, arguments)
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():
        module.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert all((each.log_sigma2 == layer.initial_log_sigma2).all() for each in layer.posteriors())
    assert all(each.theta.std() > 0 for each in layer.posteriors())
    run(layer, an_input(arguments, shape))


@every_family
def test_fit_goes_on_from_a_checkpoint_to_the_same_bits(plain, tmp_path):
    x, y = inputs(plain), torch.arange(6) % 2
    config = sparsevd.FitConfig(epochs=2, batch_size=3, learning_rate=1e-2, warm_up_end=0.5)
    whole = a_network(plain)
    sparsevd.fit(whole, (x, y), config=config, progress=False, run_dir=tmp_path / "whole")

    class Stop(sparsevd.training.progress.Callback):
        def on_epoch(self, metrics):
            raise KeyboardInterrupt

    parts = a_network(plain)
    for callbacks in ([Stop()], []):
        try:
            sparsevd.fit(
                parts,
                (x, y),
                config=config,
                progress=False,
                run_dir=tmp_path / "parts",
                callbacks=callbacks,
                resume=not callbacks,
            )
        except KeyboardInterrupt:
            parts = a_network(plain)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert not torch.equal(one, dict(a_network(plain).named_parameters())[name]), name


@pytest.mark.long
@every_family
def test_a_compiled_layer_draws_noise_and_has_the_same_gradients(plain, monkeypatch):
    monkeypatch.setattr(sampling, "_can_fuse", lambda *_: False)  # the kernels have a generator of their own
    torch._dynamo.reset()
    arguments, shape = FAMILIES[plain]
    layer, x = make(plain, arguments, initial_log_sigma2=-1.0).train(), an_input(arguments, shape)
    found = []
    for module in (layer, torch.compile(layer, backend="eager")):
        torch.manual_seed(3)
        out = in_one(module(*given(layer, x)))
        found.append([out, *torch.autograd.grad(out.square().sum(), [each.theta for each in layer.posteriors()])])
    torch.testing.assert_close(*found)
    assert not torch.equal(in_one(module(*given(layer, x))), found[1][0])


@pytest.mark.long
@every_family
def test_an_exported_layer_has_the_pruned_weights(plain):
    torch.manual_seed(1)
    arguments, shape = FAMILIES[plain]
    layer, x = half_pruned(make(plain, arguments)).eval(), an_input(arguments, shape)
    exported = torch.export.export(layer, given(layer, x)).module()
    torch.testing.assert_close(in_one(exported(*given(layer, x))), run(layer.plain(), x))
    assert not torch.equal(run(layer, x), run(layer.plain(threshold=100.0), x))
