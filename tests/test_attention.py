"""Attention: the plain module in eval mode with every option, noise on each projection, masks, whole runs."""

import copy
import itertools
import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.conversion import preview
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.layers import INITIAL_LOG_SIGMA2, SPARSE_TYPES, attention
from sparsevd.layers.attention import SparseMultiheadAttention
from sparsevd.layers.linear import SparseOutputProjection
from sparsevd.posterior import posteriors, switch_noise
from sparsevd.training.progress import Callback

WIDTH, HEADS, BATCH, TARGETS, SOURCES = 8, 2, 3, 4, 5

# Constructor arguments, and whether query, key and value are one tensor, two or three.
KINDS = {
    "self": ({}, 1),
    "batch first": ({"batch_first": True}, 1),
    "no bias": ({"bias": False, "batch_first": True}, 2),
    "decoder": ({"batch_first": True}, 2),
    "three": ({}, 3),
    "sizes": ({"kdim": 6, "vdim": 7, "batch_first": True}, 3),
    "bias_kv": ({"add_bias_kv": True}, 2),
    "zero": ({"add_zero_attn": True, "batch_first": True}, 2),
    "both": ({"add_bias_kv": True, "add_zero_attn": True}, 3),
}
MASKS = ["none", "attention", "per head", "padding", "both", "float", "causal"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def plain(kind, **settings):
    torch.manual_seed(1)
    made = nn.MultiheadAttention(WIDTH, HEADS, **KINDS[kind][0], **settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return made


def inputs(kind, batched=True, dtype=torch.float32):
    arguments, tensors = KINDS[kind]
    sources = TARGETS if tensors == 1 else SOURCES
    sizes = [(TARGETS, WIDTH), (sources, arguments.get("kdim", WIDTH)), (sources, arguments.get("vdim", WIDTH))]

    def one(places, width):
        if not batched:
            return torch.randn(places, width, dtype=dtype)
        shape = (BATCH, places) if arguments.get("batch_first") else (places, BATCH)
        return torch.randn(*shape, width, dtype=dtype)

    first, *others = [one(*size) for size in sizes]
    return {1: (first, first, first), 2: (first, others[0], others[0]), 3: (first, *others)}[tensors]


def masks(name, kind, batched=True):
    sources, n = TARGETS if KINDS[kind][1] == 1 else SOURCES, BATCH if batched else 1
    attention = torch.rand(TARGETS, sources) < 0.4
    attention[:, 0] = False  # every target sees a source
    padding = torch.zeros(n, sources, dtype=torch.bool)
    padding[0, -1] = True
    padding = padding if batched else padding[0]
    causal = torch.triu(torch.ones(TARGETS, sources, dtype=torch.bool), 1)
    return {
        "none": {},
        "attention": {"attn_mask": attention},
        "per head": {"attn_mask": attention.repeat(n * HEADS, 1, 1) & (torch.rand(n * HEADS, TARGETS, 1) < 0.7)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": attention, "key_padding_mask": padding},
        "float": {"attn_mask": torch.randn(TARGETS, sources), "key_padding_mask": torch.randn(padding.shape)},
        "causal": {"attn_mask": causal, "is_causal": True},
    }[name]


WEIGHTS = [{"need_weights": False}, {}, {"average_attn_weights": False}]


def whole(module, **settings):
    return sparsevd.sparsify(module, **settings)


def spread_noise(model):
    with torch.no_grad():
        for each in posteriors(model):
            each.log_sigma2.copy_(2 * each.theta.abs().log() + 3 + 4 * torch.randn_like(each.theta))
    return model


def same(ours, theirs, check):
    assert (ours[1] is None) == (theirs[1] is None)
    assert all(check(a, b) is not False for a, b in zip(ours, theirs, strict=True) if a is not None)


@every_kind
@pytest.mark.parametrize("batched", [True, False])
def test_eval_mode_is_the_plain_module(kind, batched):
    """Bit for bit with every weight, and after pruning; without noise, training mode too."""
    dense = plain(kind).eval()
    model, pruning = whole(dense, threshold=math.inf), spread_noise(whole(dense))
    pruned = sparsevd.prune(pruning)
    quiet, exact = whole(dense, initial_log_sigma2=-60.0).double().train(), copy.deepcopy(dense).double()
    for mask, asked in itertools.product(MASKS, WEIGHTS):
        given, settings = inputs(kind, batched), masks(mask, kind, batched) | asked
        same(model(*given, **settings), dense(*given, **settings), torch.equal)
        same(pruning(*given, **settings), pruned(*given, **settings), torch.equal)
        with torch.no_grad():  # torch may add up in another order
            same(model(*given, **settings), dense(*given, **settings), torch.testing.assert_close)
        copies = {id(x): x.double() for x in given}
        wide = [copies[id(x)] for x in given]  # one where it was one
        settings = {
            name: x.double() if name[:4] in ("attn", "key_") and x.dtype.is_floating_point else x
            for name, x in settings.items()
        }
        same(
            quiet(*wide, **settings), exact(*wide, **settings), partial(torch.testing.assert_close, rtol=0, atol=1e-10)
        )


@every_kind
def test_it_comes_back_plain_with_its_keys(kind):
    dense = plain(kind, dropout=0.25)
    model = whole(dense)
    assert isinstance(model, SparseMultiheadAttention)
    assert isinstance(model.out_proj, SparseOutputProjection)
    names = ["in_proj"] if kind != "sizes" else ["q_proj", "k_proj", "v_proj"]
    assert {each.noise_beside(each.name) for each in posteriors(model)} == {
        *(f"{name}_log_sigma2" for name in names),
        "out_proj.log_sigma2",
    }
    assert set(model.load_state_dict(dense.state_dict(), strict=False).missing_keys) == {
        each.noise_beside(each.name) for each in posteriors(model)
    }
    assert not preview(dense).skipped
    assert preview(dense).dropout_removed == ("",)
    assert whole(dense, keep_dropout=True).dropout == 0.25
    back = sparsevd.prune(model, threshold=math.inf)
    assert type(back) is nn.MultiheadAttention
    assert type(back.out_proj) is type(dense.out_proj)
    assert list(back.state_dict()) == list(dense.state_dict())
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in dense.state_dict().items())
    assert back.__dict__.keys() == dense.__dict__.keys()
    assert {n for n, p in back.named_parameters()} == {n for n, p in dense.named_parameters()}
    assert (back.dropout, dense.dropout) == (0.0, 0.25)


def sampled_by_hand(model, given, epsilons, mask):
    """The formula as it stands, in the order of torch's documentation: softmax(q·kᵀ/√d + mask)·v, eq. 17 four times."""

    def noisy(x, theta, log_sigma2, bias, epsilon):
        return x @ theta.t() + bias + (x.square() @ log_sigma2.exp().t()).sqrt() * epsilon

    q, k, v = (
        noisy(*each)
        for each in zip(
            given,
            model.in_proj_weight.chunk(3),
            model.in_proj_log_sigma2.chunk(3),
            model.in_proj_bias.chunk(3),
            epsilons[:3],
            strict=True,
        )
    )
    size = WIDTH // HEADS
    heads = []
    for i in range(HEADS):
        part = slice(i * size, (i + 1) * size)
        scores = torch.einsum("nld,nsd->nls", q[..., part], k[..., part]) / math.sqrt(size)
        heads.append(torch.softmax(scores.masked_fill(mask, -math.inf), -1) @ v[..., part])
    last = model.out_proj
    return noisy(torch.cat(heads, -1), last.weight, last.log_sigma2, last.bias, epsilons[3])


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_are_those_of_the_sampled_formula(need_weights, monkeypatch):
    model = whole(plain("decoder"), initial_log_sigma2=-1.0).double().train()
    x, y, z = inputs("decoder")[0].double(), torch.randn(BATCH, SOURCES, WIDTH).double(), None
    z = torch.randn_like(y)
    shapes = [(BATCH, TARGETS, WIDTH), (BATCH, SOURCES, WIDTH), (BATCH, SOURCES, WIDTH), (BATCH, TARGETS, WIDTH)]
    epsilons = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    draws = iter(epsilons)
    monkeypatch.setattr(torch, "randn_like", lambda like: next(draws).reshape(like.shape))
    mask = torch.rand(TARGETS, SOURCES) < 0.3
    mask[:, 0] = False
    given = [each.requires_grad_() for each in (x, y, z)]
    ours = model(*given, attn_mask=mask, need_weights=need_weights)[0]
    theirs = sampled_by_hand(model, given, epsilons, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    gradients = [torch.autograd.grad(out.square().sum(), [*given, *model.parameters()]) for out in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@every_kind
def test_projections_have_the_moments_of_sampled_weights(kind):
    """Brute force: w ~ N(θ, σ²) for whole matrices, which the plain projection then takes (eq. 11)."""
    draws = 2000
    model = whole(plain(kind), initial_log_sigma2=-1.5).train()
    given = inputs(kind)
    with torch.no_grad():
        ours = [torch.stack(found) for found in zip(*(model._projections(*given) for _ in range(draws)), strict=True)]
        packed = model._qkv_same_embed_dim
        thetas = model.in_proj_weight.chunk(3) if packed else [model.get_parameter(f"{n}_proj_weight") for n in "qkv"]
        biases = model.in_proj_bias.chunk(3) if model.in_proj_bias is not None else [torch.zeros(())] * 3
        for found, x, theta, bias in zip(ours, given, thetas, biases, strict=True):
            theirs = torch.stack(
                [x @ (theta + math.exp(-0.75) * torch.randn_like(theta)).t() + bias for _ in range(draws)]
            )
            deviation = theirs.std(0)
            assert ((found.mean(0) - theirs.mean(0)).abs() <= 5 * deviation * math.sqrt(2 / draws)).all()
            assert ((found.std(0) / deviation).log().abs() < 5 * math.sqrt(1 / draws)).all()


def test_wrong_masks_are_refused_in_training_too():
    model = whole(plain("decoder")).train()
    given = inputs("decoder")
    with pytest.raises(ArgumentError, match=r"attn_mask has shape \(1, 5\); it must be \(4, 5\), or \(6, 4, 5\)"):
        model(*given, attn_mask=torch.zeros(1, SOURCES))
    with pytest.raises(ArgumentError, match=r"key_padding_mask has shape \(1, 5\); it must be \(3, 5\)"):
        model(*given, key_padding_mask=torch.zeros(1, SOURCES))
    with pytest.raises(ArgumentError, match="give attn_mask too"):
        model(*given, is_causal=True)
    with pytest.raises(ArgumentError, match=r"a mask is of torch.int64; it must be of bool, True where"):
        model(*given, key_padding_mask=torch.ones(BATCH, SOURCES, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="have 3, 1 and 1 examples, of 4, 5 and 5 places"):
        model(given[0], given[1][:1], given[2][:1])


def test_added_keys_and_values_are_biases():
    """They have three axes, of which two are of size 1."""
    model = whole(plain("self", add_bias_kv=True))
    assert model.bias_k.ndim == 3
    assert sparsevd.summary(model).dense == ()
    groups = sparsevd.parameter_groups(model, 1e-2, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
    assert model.bias_k in set(groups[0]["params"])


def test_dropout_that_is_kept_acts_where_the_noise_is_off():
    model = whole(plain("self", dropout=0.5), keep_dropout=True).train()
    given = inputs("self")
    switch_noise(model, False)
    assert not torch.allclose(model(*given)[0], model(*given)[0])
    same(model.eval()(*given), model(*given), torch.equal)


def test_dropout_that_is_kept_acts_in_training():
    model = whole(plain("self", dropout=0.5), keep_dropout=True, initial_log_sigma2=-60.0).train()
    given = inputs("self")
    for asked in WEIGHTS[:2]:
        assert not torch.allclose(model(*given, **asked)[0], model(*given, **asked)[0])
    weights = model(*given, average_attn_weights=False)[1]
    assert 0.2 < (weights == 0).float().mean() < 0.8


def test_the_last_projection_may_stay_dense():
    dense = plain("self").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = whole(dense, exclude="out_proj", threshold=math.inf)
    assert [each.name for each in posteriors(model)] == ["in_proj_weight"]
    given = inputs("self")
    same(model(*given), dense(*given), torch.equal)
    back = sparsevd.prune(model, threshold=math.inf)
    same(back(*given), dense(*given), torch.equal)


def test_an_exchanged_last_projection_is_named():
    dense = plain("self")
    dense.out_proj = nn.Linear(WIDTH, WIDTH)
    skipped = preview(dense).skipped
    assert "its out_proj is a Linear" in skipped["(model)"]
    assert "reads its weight" in skipped["out_proj"]


@every_kind
@pytest.mark.parametrize("case", ["zero", "log alpha -40", "log alpha 40"])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_nan_in_value_or_gradient(kind, case, autocast):
    model = whole(plain(kind)).train()
    given = inputs(kind)
    with torch.no_grad():
        for each in posteriors(model):
            if case == "zero":
                each.theta.zero_()
            else:
                each.log_sigma2.copy_(2 * each.theta.abs().clamp_min(1e-6).log() + float(case.split()[-1]))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for asked in WEIGHTS[:2]:
            out = model(*given, **masks("both", kind), **asked)[0]
            assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
            (out.float().mean() + sparsevd.kl(model) / 1000).backward()
            assert out.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("hidden", ["some places", "all places of an example"])
def test_written_out_in_bfloat16_it_is_torchs_own(hidden, monkeypatch):
    model = whole(plain("self")).train()
    x = inputs("self")[0]
    padding = torch.zeros(BATCH, TARGETS, dtype=torch.bool)
    padding[0, 1:] = True
    padding[0, 0] = hidden != "some places"
    found, fused, instructions = [], F.scaled_dot_product_attention, [False, True]
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given: calls.append(given) or fused(*given))
    for each in instructions:  # of the CPU; without them it is torch's function in any case
        monkeypatch.setattr(attention, "multiplies_bfloat16", lambda each=each: each)
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        out.float().square().sum().backward()
        found.append([out.float(), *(p.grad.clone() for p in model.parameters())])
    assert len(calls) == (1 if hidden == "some places" else 2)
    for first, second in zip(*found, strict=True):
        assert first.isfinite().all()
        torch.testing.assert_close(first, second, rtol=0.05, atol=0.02 * second.detach().abs().max().item())


class Translator(nn.Module):
    """nn.Transformer whole: encoder, decoder, self and cross attention, a causal mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.net = nn.Transformer(WIDTH, HEADS, 1, 1, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, pair):
        source, target = pair[..., 0], pair[..., 1]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.net(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


def pairs(n=16):
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, 11, (n, 5, 2), generator=draw)


def test_all_of_a_transformer_is_converted_and_trained_by_any_loop(tmp_path):
    torch.manual_seed(3)
    dense = Translator()
    model = whole(dense)
    assert sparsevd.summary(model).dense == ()
    matrices = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
    assert sparsevd.summary(model).weights == sum(each.theta.numel() for each in posteriors(model)) == matrices
    optimizer = torch.optim.Adam(sparsevd.parameter_groups(model, lr=1e-2))
    sparsevd.attach(optimizer, model, n_train=80, total_steps=15)
    x = pairs()
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(x).flatten(0, 1), x[..., 0].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    spread_noise(model).eval()
    pruned = sparsevd.prune(model)
    assert torch.equal(pruned(x), model(x))  # with gradients: torch's fast path is not taken
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), model(x))
    assert list(pruned.state_dict()) == list(dense.state_dict())
    assert sparsevd.summary(pruned).kept == sparsevd.summary(model).kept
    sparsevd.save(model, tmp_path / "net.spvd")
    again = sparsevd.load(tmp_path / "net.spvd", into=Translator()).eval()
    assert torch.equal(again(x), pruned(x))
    other = whole(Translator()).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


class Stop(Callback):
    def on_epoch(self, moment):
        raise KeyboardInterrupt


def test_fit_trains_and_goes_on_after_an_interruption(tmp_path):
    x = pairs()
    config = sparsevd.FitConfig(epochs=2, batch_size=8, learning_rate=1e-3)
    settings = {"loss": lambda output, y: F.cross_entropy(output.transpose(1, 2), y), "progress": False}
    models = []
    for interrupted in (False, True):
        torch.manual_seed(3)
        model = whole(Translator())
        given = {**settings, "run_dir": tmp_path / str(interrupted)}
        torch.manual_seed(4)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                sparsevd.fit(model, (x, x[..., 0]), config=config, callbacks=[Stop()], **given)
            torch.manual_seed(3)
            model = whole(Translator())
        sparsevd.fit(model, (x, x[..., 0]), config=config, resume=interrupted, **given)
        models.append(model.state_dict())
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_compiled_it_is_the_same():
    model = whole(plain("decoder"), initial_log_sigma2=-40.0).train()
    given = inputs("decoder")
    for asked in WEIGHTS[:2]:
        compiled = torch.compile(model, backend="eager", fullgraph=True)(*given, **asked)[0]
        torch.testing.assert_close(compiled, model(*given, **asked)[0])


def test_half_precision_and_meta_device():
    half = whole(plain("self").bfloat16()).train()
    cast_later = whole(plain("self")).to(torch.bfloat16).train()
    for model in (half, cast_later):
        assert model.in_proj_log_sigma2.dtype == torch.float32
        given = inputs("self")[0].bfloat16()
        out, _ = model(given, given, given)
        assert out.dtype == torch.bfloat16
        (out.float().sum() + sparsevd.kl(model)).backward()
        assert model.in_proj_log_sigma2.grad.isfinite().all()
    meta = whole(nn.MultiheadAttention(WIDTH, HEADS, device="meta")).to_empty(device="cpu")
    meta.reset_parameters()
    assert meta.in_proj_weight.std() > 0.01
    assert (meta.in_proj_log_sigma2 == INITIAL_LOG_SIGMA2).all()
    before = torch.get_rng_state()
    half.plain()
    assert torch.equal(before, torch.get_rng_state())


def test_export_in_eval_mode():
    model = spread_noise(whole(plain("batch first"))).eval()
    given = inputs("batch first")
    exported = torch.export.export(model, given).module()
    torch.testing.assert_close(exported(*given)[0], model(*given)[0])


def test_it_is_registered():
    assert SPARSE_TYPES[nn.MultiheadAttention] is SparseMultiheadAttention
    with pytest.warns(SparseVDWarning, match="frozen"):
        model = whole(plain("self").requires_grad_(False))
    assert not any(p.requires_grad for p in model.parameters())
