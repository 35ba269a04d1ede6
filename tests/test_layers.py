"""The contract of every Sparse VD layer: moments, gradients, eval mode, numerics. A new layer joins by SPARSE_TYPES."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_leaves

import sparsevd
from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.layers import INITIAL_LOG_SIGMA2, SPARSE_TYPES, SparseLayer, sampling
from sparsevd.layers.attention import SparseMultiheadAttention
from sparsevd.layers.linear import SparseConv1D
from sparsevd.layers.product_layer import ProductLayer
from sparsevd.posterior import Posterior, equations
from sparsevd.posterior.posterior import DROPPED_LOG_SIGMA2


class Conv1D(nn.Module):
    """As Transformers has it, for GPT-2: its weight is [input, unit], and its constructor like no other."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


TWINS = {**SPARSE_TYPES, Conv1D: SparseConv1D}

# For every plain type: constructor arguments and the shape of an input. Together they touch every option.
CASES: list[tuple[type[nn.Module], dict, tuple[int, ...]]] = [
    (nn.Linear, {"in_features": 5, "out_features": 3}, (4, 5)),
    (nn.Linear, {"in_features": 5, "out_features": 3, "bias": False}, (2, 4, 5)),
    (Conv1D, {"nf": 3, "nx": 5}, (2, 4, 5)),
    (Conv1D, {"nf": 4, "nx": 4}, (6, 4)),
    (NonDynamicallyQuantizableLinear, {"in_features": 5, "out_features": 3}, (4, 5)),
    (nn.Conv1d, {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "dilation": 2}, (2, 4, 9)),
    (nn.Conv1d, {"in_channels": 2, "out_channels": 3, "kernel_size": 4, "padding": "same"}, (2, 2, 9)),
    (nn.Conv2d, {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 2), "stride": (2, 1)}, (2, 2, 7, 6)),
    (nn.Conv2d, {"in_channels": 3, "out_channels": 3, "kernel_size": 3, "groups": 3, "padding": 1}, (3, 6, 6)),
    (nn.Conv3d, {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "bias": False}, (1, 2, 4, 4, 4)),
    (nn.ConvTranspose1d, {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "stride": 2}, (2, 2, 5)),
    (
        nn.ConvTranspose2d,
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "stride": 2, "output_padding": 1, "groups": 2},
        (1, 4, 4, 4),
    ),
    (nn.ConvTranspose3d, {"in_channels": 2, "out_channels": 1, "kernel_size": 2, "padding": 1}, (1, 2, 4, 4, 4)),
    (nn.Embedding, {"num_embeddings": 9, "embedding_dim": 4, "padding_idx": 2}, (3, 5)),
    (nn.Embedding, {"num_embeddings": 9, "embedding_dim": 4}, ()),
    (nn.EmbeddingBag, {"num_embeddings": 9, "embedding_dim": 4, "mode": "mean", "padding_idx": 2}, (3, 5)),
    (nn.EmbeddingBag, {"num_embeddings": 9, "embedding_dim": 4, "mode": "sum"}, (3, 5)),
    (nn.EmbeddingBag, {"num_embeddings": 9, "embedding_dim": 4, "mode": "max"}, (3, 5)),
    (nn.RNN, {"input_size": 3, "hidden_size": 4, "num_layers": 2}, (5, 2, 3)),
    (nn.LSTM, {"input_size": 3, "hidden_size": 4, "bidirectional": True, "batch_first": True}, (2, 3, 3)),
    (nn.LSTM, {"input_size": 3, "hidden_size": 4, "proj_size": 2, "bias": False}, (3, 2, 3)),
    (nn.GRU, {"input_size": 3, "hidden_size": 4}, (4, 3)),
    (nn.RNNCell, {"input_size": 3, "hidden_size": 4, "nonlinearity": "relu"}, (2, 3)),
    (nn.LSTMCell, {"input_size": 3, "hidden_size": 4}, (2, 3)),
    (nn.GRUCell, {"input_size": 3, "hidden_size": 4, "bias": False}, (3,)),
    # One place alone: noise per output is noise per weight there. More in test_attention.py.
    (nn.MultiheadAttention, {"embed_dim": 4, "num_heads": 2}, (1, 3, 4)),
    (nn.MultiheadAttention, {"embed_dim": 4, "num_heads": 2, "bias": False, "batch_first": True}, (3, 1, 4)),
    (nn.MultiheadAttention, {"embed_dim": 6, "num_heads": 3, "kdim": 4, "vdim": 5}, (1, 3, 6)),
] + [
    (nn.Conv2d, {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": p, "padding_mode": m}, (2, 2, 6, 6))
    for p, m in [((1, 2), "reflect"), ("same", "replicate"), (1, "circular"), ("valid", "reflect")]
]
# torch itself says that an even kernel with padding="same" is slower, and an LSTM with projections.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
IDS = [f"{plain.__name__}-{i}" for i, (plain, _, _) in enumerate(CASES)]
every_layer = pytest.mark.parametrize(("plain", "arguments", "shape"), CASES, ids=IDS)


def make(plain, arguments, **options) -> SparseLayer:
    return TWINS[plain](plain(**arguments), **options)


def an_input(arguments, shape, dtype=torch.float32):
    """Numbers, or for an embedding tokens; none twice in a bag, where noise per token is not noise per weight."""
    if "num_embeddings" not in arguments:
        return torch.randn(shape, dtype=dtype)
    rows = [torch.randperm(arguments["num_embeddings"]) for _ in range(math.prod(shape[:-1]))]
    return torch.stack(rows)[:, : shape[-1]] if shape else rows[0][0]


def run(module, x):
    """What a module gives out, as one tensor: of a recurrent one the output and the state after it."""
    return in_one(module(*given(module, x)))


def given(module, x):
    """The arguments of a call: attention takes key and value beside the query."""
    if not isinstance(module, nn.MultiheadAttention | SparseMultiheadAttention):
        return (x,)
    return x, x[..., : module.kdim], x[..., : module.vdim]


def in_one(out):
    return out if isinstance(out, torch.Tensor) else torch.cat([tensor.flatten() for tensor in tree_leaves(out)])


def with_gradient(x):
    return [x.requires_grad_()] if x.is_floating_point() else []


def half_pruned(layer: SparseLayer) -> SparseLayer:
    """With log α well spread around the threshold."""
    with torch.no_grad():
        for each in layer.posteriors():
            each.log_sigma2.copy_(2 * each.theta.abs().log() + 3 + 4 * torch.randn_like(each.theta))
    return layer


def test_every_registered_layer_has_a_case():
    assert {plain for plain, _, _ in CASES} == set(TWINS)


@every_layer
def test_without_noise_training_output_is_the_twins(plain, arguments, shape):
    twin = plain(**arguments).double()
    layer = TWINS[plain](copy.deepcopy(twin), initial_log_sigma2=-60.0).train()
    x = an_input(arguments, shape, torch.float64)
    torch.testing.assert_close(run(layer, x), run(twin, x), rtol=0, atol=1e-10)


@every_layer
def test_eval_equals_the_pruned_plain_layer_bit_for_bit(plain, arguments, shape):
    layer = half_pruned(make(plain, arguments)).eval()
    pruned = layer.plain()
    assert type(pruned) is plain
    for name in layer.weights:
        assert 0 < (getattr(pruned, name) == 0).float().mean() < 1
    x = an_input(arguments, shape)
    assert torch.equal(run(layer, x), run(pruned, x))
    for option in layer.options:
        assert getattr(pruned, option) == getattr(plain(**arguments), option)


@every_layer
def test_files_give_the_pruned_layer_back(plain, arguments, shape, tmp_path):
    layer = half_pruned(make(plain, arguments)).eval()
    sparsevd.save(layer, tmp_path / "layer.spvd")
    again = sparsevd.load(tmp_path / "layer.spvd", into=plain(**arguments))
    assert type(again) is plain
    x = an_input(arguments, shape)
    assert torch.equal(run(again.eval(), x), run(layer, x))


@every_layer
def test_output_has_the_moments_of_sampled_weights(plain, arguments, shape):
    """Brute force: draw w ~ N(θ, σ²) for the whole layer and run the plain twin with it (eq. 11)."""
    layer = make(plain, arguments, initial_log_sigma2=-1.5).double().train()
    x = an_input(arguments, shape, torch.float64)
    draws = 3000 if len(layer.weights) == 1 else 1000
    twin = copy.deepcopy(layer).eval().plain(math.inf)
    with torch.no_grad():
        ours = torch.stack([run(layer, x) for _ in range(draws)])
        theirs = []
        for _ in range(draws):
            for each in layer.posteriors():
                noise = torch.exp(each.log_sigma2 / 2) * torch.randn_like(each.theta)
                if arguments.get("padding_idx") is not None:
                    noise[arguments["padding_idx"]] = 0  # a vector for padding is no random one
                getattr(twin, each.weight).copy_(each.theta + noise)
            theirs.append(run(twin, x))
        sampled = torch.stack(theirs)
    deviation = sampled.std(0)
    # Five standard errors of the difference of two means and of two log-deviations, over all outputs at once. Those of
    # a recurrence have products of weights in them, and so more outliers than a Gaussian.
    outliers = ((sampled - sampled.mean(0)) ** 4).mean(0) / deviation**4
    error = ((outliers.clamp_min(3) - 1) / (2 * draws)).sqrt()
    assert ((ours.mean(0) - sampled.mean(0)).abs() <= 5 * deviation * math.sqrt(2 / draws) + 1e-12).all()
    noisy = deviation > 1e-12  # output padding is reached by no weight
    assert ((ours.std(0) / deviation).log().abs() < 5 * error)[noisy].all()
    assert (ours.std(0)[~noisy] < 1e-12).all()


@every_layer
def test_gradients_pass_gradcheck(plain, arguments, shape):
    layer = make(plain, arguments, initial_log_sigma2=-1.0).double().train()
    x = an_input(arguments, shape, torch.float64)
    if plain is nn.Embedding and "padding_idx" in arguments:  # whose vector gets no gradient, as in torch
        x[x == arguments["padding_idx"]] = 0
    inputs = with_gradient(x)
    names = [name for name, _ in layer.named_parameters()]

    def with_fixed_noise(*tensors):
        torch.manual_seed(3)
        parameters = dict(zip(names, tensors[len(inputs) :], strict=True))
        return in_one(torch.func.functional_call(layer, parameters, given(layer, tensors[0] if inputs else x)))

    assert torch.autograd.gradcheck(with_fixed_noise, (*inputs, *layer.parameters()), fast_mode=True)


@every_layer
@pytest.mark.parametrize("case", ["zero weight", "zero input", "all zero", "log alpha -40", "log alpha 40"])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_nan_in_value_or_gradient(plain, arguments, shape, case, autocast):
    layer = make(plain, arguments).train()
    x = an_input(arguments, shape)
    with torch.no_grad():
        if case in ("zero weight", "all zero"):
            for parameter in layer.parameters():
                parameter.zero_()
        if case in ("zero input", "all zero"):
            x = torch.zeros_like(x)
        if case.startswith("log alpha"):
            for each in layer.posteriors():
                magnitude = each.theta.abs().clamp_min(1e-6)  # the vector for padding is zero
                each.log_sigma2.copy_(2 * magnitude.log() + float(case.split()[-1]))
    inputs = with_gradient(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(layer, x)
        loss = (out.float() ** 2).mean() if case != "log alpha 40" else out.float().mean()
        loss = loss + sum(each.kl() for each in layer.posteriors()) / 1000
    loss.backward()
    assert loss.isfinite()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_the_bias_has_no_noise():
    layer = make(nn.Linear, {"in_features": 5, "out_features": 3}, initial_log_sigma2=2.0).train()
    with torch.no_grad():
        layer.bias.fill_(100.0)
        out = torch.stack([layer(torch.zeros(4, 5)) for _ in range(50)])
    assert torch.equal(out, torch.full_like(out, 100.0))


def test_variance_is_of_the_squared_input():
    """One input of −3 and σ² = 0.25: the output varies with deviation 3·0.5."""
    layer = make(nn.Linear, {"in_features": 1, "out_features": 1}, initial_log_sigma2=math.log(0.25)).train()
    with torch.no_grad():
        out = layer(torch.full((100_000, 1), -3.0))
    assert out.std().item() == pytest.approx(1.5, rel=0.02)


def test_kl_is_the_sum_over_the_weights():
    layer = half_pruned(make(nn.Linear, {"in_features": 5, "out_features": 3}))
    (posterior,) = layer.posteriors()
    expected = -equations.negative_kl(posterior.log_alpha()).sum()
    torch.testing.assert_close(posterior.kl(), expected)


def test_threshold_prunes_above_and_keeps_below():
    layer = make(nn.Linear, {"in_features": 2, "out_features": 1})
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.log_sigma2.copy_(torch.tensor([[2.99, 3.01]]))
    (posterior,) = layer.posteriors()
    assert posterior.pruned().tolist() == layer.pruned_weight().tolist() == [[1.0, 0.0]]
    assert posterior.pruned(threshold=4.0).tolist() == [[1.0, 1.0]]
    assert posterior.kept().tolist() == [[True, False]]


def test_a_dropped_weight_has_no_kl_no_noise_and_no_gradient():
    layer = half_pruned(make(nn.Linear, {"in_features": 40, "out_features": 30})).train()
    before = layer.pruned_weight().clone()
    (posterior,) = layer.posteriors()
    posterior.drop(before == 0)
    assert torch.equal(layer.pruned_weight(), before)
    assert torch.equal(posterior.alive(), before != 0)
    gone = ~posterior.alive()
    assert 0 < gone.float().mean() < 1
    (layer(torch.randn(8, 40)).sum() + posterior.kl()).backward()
    assert (layer.log_sigma2.grad[gone].abs() < 1e-20).all()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        layer.log_sigma2.fill_(DROPPED_LOG_SIGMA2)
        assert posterior.kl() == 0
        assert layer(torch.randn(8, 40)).abs().max() < 1e-10


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
@every_layer
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_and_composed_ways_agree(plain, arguments, shape, channels_last, autocast, monkeypatch):
    """Outputs and all gradients with the same noise: the seed's noise stands in for torch's own in the composed way."""
    layer = half_pruned(make(plain, arguments)).train()
    if not isinstance(layer, ProductLayer):
        pytest.skip("it has one way")
    x = torch.randn(shape)
    if channels_last:
        if x.ndim != 4 or plain not in (nn.Conv2d, nn.ConvTranspose2d):
            pytest.skip("only for images")
        x, layer = x.to(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
    x.requires_grad_()
    torch.manual_seed(3)
    seed = kernels.fresh_seed()

    def noise(like):
        epsilon = torch.empty_like(like)
        kernels.sample_(torch.zeros_like(like), torch.ones_like(like), seed, epsilon)
        return epsilon

    def outputs(way, autocast=autocast):
        torch.manual_seed(3)
        for ask in ("_can_fuse", "_can_fuse_in_bfloat16"):
            monkeypatch.setattr(sampling, ask, lambda *_, ask=ask: way is sampling.fused and autocast == ("in" in ask))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer(x)
        assert out.dtype is (torch.bfloat16 if autocast else torch.float32)
        weight = torch.linspace(0.5, 1.5, out.numel()).view_as(out)
        return [out.float(), *torch.autograd.grad((out * weight).square().sum(), [x, *layer.parameters()])]

    monkeypatch.setattr(torch, "randn_like", noise)
    exact = outputs(sampling.composed, autocast=False)
    for ours, theirs, all_digits in zip(outputs(sampling.fused), outputs(sampling.composed), exact, strict=True):
        if autocast:  # no further from all digits than torch's own bfloat16
            rounding = (theirs - all_digits).abs().max().item() + 0.01 * all_digits.abs().max().item()
            torch.testing.assert_close(ours, all_digits, rtol=0, atol=2 * rounding)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("plain", "arguments", "x"),
    [
        (nn.Linear, {"in_features": 5, "out_features": 3}, torch.randn(5)),
        (nn.Conv3d, {"in_channels": 4, "out_channels": 3, "kernel_size": 2}, torch.randn(2, 4, 5, 5, 5)),
    ],
)
def test_autocast_takes_what_it_takes_without_noise(plain, arguments, x):
    """One example alone, and images of three dimensions in the order channels_last_3d."""
    layer = make(plain, arguments).train()
    if x.ndim == 5:
        x = x.to(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.float().sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())


@every_layer
def test_bfloat16_variance_product_is_close(plain, arguments, shape):
    """The rounding of the variance changes the deviation of the output by less than a hundredth."""
    layer = make(plain, arguments, initial_log_sigma2=-1.0).train()
    if not isinstance(layer, ProductLayer):
        pytest.skip("it has no variance product")
    x = torch.randn(shape)
    outs = []
    for layer.variance_dtype in (None, torch.bfloat16):
        torch.manual_seed(1)
        with torch.no_grad():
            outs.append(layer(x) - layer.plain(math.inf)(x))
    assert not torch.equal(*outs)
    torch.testing.assert_close(outs[1], outs[0], rtol=0.01, atol=1e-5)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(layer(x).sum(), [layer.weight, layer.log_sigma2])
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not built")
def test_bfloat16_without_instructions_rounds_as_with_them(monkeypatch):
    results = []
    for instructions in (True, False):
        monkeypatch.setattr(sampling, "multiplies_bfloat16", lambda instructions=instructions: instructions)
        torch.manual_seed(0)
        layer = make(
            nn.Linear, {"in_features": 64, "out_features": 32}, initial_log_sigma2=-1.0, variance_dtype=torch.bfloat16
        ).train()
        x = torch.randn(16, 64, requires_grad=True)
        out = layer(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, layer.weight, layer.log_sigma2])])
    # Both sum in float32, in another order: at most the last of the eight bits differs.
    torch.testing.assert_close(*results, rtol=2**-7, atol=1e-3)
    assert sum(int((a != b).sum()) for a, b in zip(*results, strict=True)) < 0.01 * sum(a.numel() for a in results[0])


def test_a_token_twice_has_two_samples_and_padding_has_none():
    layer = make(nn.Embedding, {"num_embeddings": 5, "embedding_dim": 2, "padding_idx": 0}, initial_log_sigma2=0.0)
    out = layer.train()(torch.tensor([3, 3, 0]))
    assert not torch.equal(out[0], out[1])
    assert torch.equal(out[2], torch.zeros(2))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_offsets_and_with_weights_are_those_of_the_twin(mode):
    arguments = {"num_embeddings": 9, "embedding_dim": 4, "mode": mode, "include_last_offset": True, "padding_idx": 1}
    twin = nn.EmbeddingBag(**arguments)
    layer = SPARSE_TYPES[nn.EmbeddingBag](copy.deepcopy(twin), initial_log_sigma2=-60.0)
    tokens, offsets = torch.tensor([3, 1, 4, 1, 5, 8, 2]), torch.tensor([0, 2, 2, 7])
    weights = torch.rand(7) if mode == "sum" else None
    for state in (layer.train(), layer.eval()):
        torch.testing.assert_close(state(tokens, offsets, weights), twin(tokens, offsets, weights))


def test_gradients_by_frequency_are_those_of_the_twin():
    twin = nn.Embedding(6, 3, scale_grad_by_freq=True)
    layer = SPARSE_TYPES[nn.Embedding](copy.deepcopy(twin), initial_log_sigma2=-60.0).train()
    tokens = torch.tensor([1, 1, 4])
    for module in (twin, layer):
        module(tokens).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)


def test_nan_threshold_is_refused():
    with pytest.raises(ArgumentError, match="NaN"):
        make(nn.Linear, {"in_features": 2, "out_features": 1}, threshold=math.nan)


def test_output_size_of_a_transposed_convolution():
    twin = nn.ConvTranspose2d(2, 3, 3, stride=2)
    layer = SPARSE_TYPES[nn.ConvTranspose2d](copy.deepcopy(twin), initial_log_sigma2=-40.0)
    x = torch.randn(1, 2, 4, 4)
    for mode in (layer.train(), layer.eval()):
        torch.testing.assert_close(mode(x, output_size=(10, 10)), twin(x, output_size=(10, 10)))
    with pytest.raises(ArgumentError, match=r"output_size \(20, 20\)"):
        layer(x, output_size=(20, 20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_log_sigma2_in_float32(dtype):
    layer = SPARSE_TYPES[nn.Linear](nn.Linear(4, 3).to(dtype)).train()
    cast_later = make(nn.Linear, {"in_features": 4, "out_features": 3}).to(dtype).train()
    for half in (layer, cast_later):
        assert half.weight.dtype == dtype
        assert half.log_sigma2.dtype == torch.float32
        out = half(torch.randn(5, 4, dtype=dtype))
        assert out.dtype == dtype
        (out.float().sum() + Posterior(half).kl()).backward()
        assert half.weight.grad.dtype == dtype
        assert half.log_sigma2.grad.isfinite().all()


def test_float16_autocast_does_not_lose_the_variance():
    """σ² = e⁻²⁰ is zero in float16; the product is done in float32 there."""
    layer = make(nn.Linear, {"in_features": 4, "out_features": 3}, initial_log_sigma2=-20.0).train()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        layer.weight.zero_()
        layer.bias.zero_()
        out = layer(torch.ones(2000, 4))
    assert out.float().std().item() == pytest.approx(2 * math.exp(-10), rel=0.1)


def test_reset_parameters_draws_fresh_weights():
    layer = SPARSE_TYPES[nn.Conv2d](nn.Conv2d(2, 3, 3, device="meta")).to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.weight.std() > 0.01
    assert (layer.log_sigma2 == INITIAL_LOG_SIGMA2).all()


def test_repr_tells_the_options():
    text = repr(make(nn.Conv2d, {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "stride": 2}))
    assert "stride=(2, 2)" in text
    assert "threshold=3.0" in text


def test_prune_does_not_touch_the_generator():
    layer = make(nn.Linear, {"in_features": 4, "out_features": 3})
    before = torch.get_rng_state()
    layer.plain()
    assert torch.equal(before, torch.get_rng_state())
