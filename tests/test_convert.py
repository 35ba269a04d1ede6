"""sparsify and prune on all sorts of networks: what can be converted is, what cannot is named."""

import copy
import logging
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.prune import random_unstructured

import sparsevd
from sparsevd.conversion import preview
from sparsevd.errors import ArgumentError, ConversionError, SparseVDWarning
from sparsevd.layers import SparseLayer
from sparsevd.layers.convolution import SparseConv2d
from sparsevd.layers.linear import SparseLinear
from sparsevd.posterior import posteriors
from sparsevd.training.progress import Callback


class SharedBlock(nn.Module):
    """A residual net whose middle convolution is used twice, by name and by call."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.again = self.block
        self.drop = nn.Dropout2d(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + F.relu(self.block(x))
        x = x + F.relu(self.again(self.drop(x)))
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 1),
            nn.ReLU6(),
            nn.Conv2d(6, 6, 3, groups=6, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 8, 1),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x, mask=None):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


NETS = {
    "residual": (SharedBlock, lambda: torch.randn(8, 3, 6, 6), set()),
    "depthwise": (Depthwise, lambda: torch.randn(8, 3, 6, 6), set()),
    "encoder": (Encoder, lambda: torch.randn(8, 5, 16), set()),
    "recurrent": (Recurrent, lambda: torch.randint(0, 20, (8, 5)), set()),
}


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)
        return function(*args, **kwargs)


def spread_noise(model):
    """Put log α of every layer well around the threshold, so that pruning removes about half."""
    with torch.no_grad():
        for each in posteriors(model):
            each.log_sigma2.copy_(2 * each.theta.abs().log() + 3 + 4 * torch.randn_like(each.theta))
    return model


@pytest.mark.parametrize("name", NETS)
def test_whole_way_of_a_network(name, tmp_path):
    """sparsify, 20 steps, prune, state_dict into a fresh dense model: the same answers bit for bit."""
    factory, example, expected_skips = NETS[name]
    dense = factory()
    assert set(preview(dense).skipped) == expected_skips
    model = quietly(sparsevd.sparsify, dense)
    x, y = example(), torch.randint(0, 4, (8,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = sparsevd.elbo_loss(F.cross_entropy(model(x), y), model, n_train=8, beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model = spread_noise(model).eval()
    pruned = quietly(sparsevd.prune, model)
    assert not any(isinstance(module, SparseLayer) for module in pruned.modules())
    assert list(pruned.state_dict()) == list(dense.state_dict())
    fresh = factory().eval()
    fresh.load_state_dict(pruned.state_dict())
    assert torch.equal(fresh(x), pruned(x))
    torch.testing.assert_close(pruned(x), model(x))
    assert 0.2 < sparsevd.summary(pruned).sparsity / 100 < 0.8
    assert sparsevd.summary(pruned).kept == sparsevd.summary(model).kept


@pytest.mark.parametrize("name", NETS)
def test_untrained_round_trip_gives_back_the_dense_model(name):
    factory, example, _ = NETS[name]
    dense = factory().eval()
    back = sparsevd.prune(quietly(sparsevd.sparsify, dense), threshold=math.inf)
    assert [type(m) for m in back.modules() if list(m.parameters(recurse=False))] == [
        type(m) for m in dense.modules() if list(m.parameters(recurse=False))
    ]
    for key, tensor in dense.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    x = example()
    assert torch.equal(dense(x), back(x))


def test_the_original_is_untouched_unless_inplace():
    dense = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model = sparsevd.sparsify(dense)
    assert type(dense[0]) is nn.Linear
    assert model[0].weight is not dense[0].weight
    weight = dense[0].weight
    assert sparsevd.sparsify(dense, inplace=True) is dense
    assert dense[0].weight is weight
    assert sparsevd.prune(dense, inplace=True) is dense
    assert type(dense[0]) is nn.Linear


def test_keys_gain_log_sigma2_and_nothing_else():
    dense = SharedBlock()
    model = sparsevd.sparsify(dense)
    added = [key for key in model.state_dict() if not key.endswith("log_sigma2")]
    assert added == list(dense.state_dict())
    missing = model.load_state_dict(dense.state_dict(), strict=False)
    assert all(key.endswith("log_sigma2") for key in missing.missing_keys)
    assert not missing.unexpected_keys


def test_a_shared_module_stays_shared():
    model = sparsevd.sparsify(SharedBlock())
    assert model.block is model.again
    assert isinstance(model.block, SparseConv2d)
    pruned = sparsevd.prune(model)
    assert pruned.block is pruned.again
    assert type(pruned.block) is nn.Conv2d


def test_the_model_itself_may_be_a_layer():
    model = sparsevd.sparsify(nn.Linear(3, 2))
    assert isinstance(model, SparseLinear)
    assert type(sparsevd.prune(model)) is nn.Linear


def test_dropout_stays_with_a_rate_of_zero():
    """Not Identity: models read `p`, as BERT of Transformers does."""
    dense = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2), nn.AlphaDropout(0.1))
    model = sparsevd.sparsify(dense)
    assert [type(module) for module in model] == [SparseLinear, nn.Dropout, SparseLinear, nn.AlphaDropout]
    assert [model[1].p, model[3].p] == [0.0, 0.0]
    assert [dense[1].p, dense[3].p] == [0.5, 0.1]
    assert preview(dense).dropout_removed == ("1", "3")
    x = torch.randn(5, 3)
    assert torch.equal(model[1].train()(x), x)
    kept = sparsevd.sparsify(dense, keep_dropout=True)
    assert kept[1].p == 0.5


def test_frozen_layers_stay_frozen():
    dense = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    with pytest.warns(SparseVDWarning, match="frozen: 0: its weights require no gradient"):
        model = sparsevd.sparsify(dense)
    assert preview(dense).frozen == ("0",)
    assert not any(p.requires_grad for p in model[0].parameters())
    assert all(p.requires_grad for p in model[1].parameters())
    assert not sparsevd.prune(model)[0].weight.requires_grad


def test_training_mode_is_kept():
    assert not sparsevd.sparsify(nn.Sequential(nn.Linear(2, 2)).eval())[0].training
    assert not sparsevd.prune(sparsevd.sparsify(nn.Sequential(nn.Linear(2, 2)).eval()))[0].training


def test_half_precision_and_meta_device():
    half = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 2)).bfloat16())
    assert half[0].log_sigma2.dtype == torch.float32
    assert sparsevd.prune(half)[0].weight.dtype == torch.bfloat16
    meta = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 2, device="meta")))
    assert meta[0].log_sigma2.is_meta
    assert sparsevd.prune(meta)[0].weight.is_meta


def test_include_and_exclude_by_name_wildcard_and_type():
    dense = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)), "b": nn.Linear(2, 2), "c": nn.Conv2d(2, 2, 1)}
    )
    assert preview(dense).replaced == ("a.0", "a.1", "b", "c")
    assert preview(dense, include="a").replaced == ("a.0", "a.1")
    assert preview(dense, include=["a.*", "b"], exclude=nn.Conv1d).replaced == ("a.0", "b")
    assert preview(dense, exclude=["a", nn.Conv2d]).replaced == ("b",)
    assert preview(dense, include=nn.Linear).replaced == ("a.0", "b")
    model = sparsevd.sparsify(dense, exclude="a")
    assert [type(m) for m in model["a"]] == [nn.Linear, nn.Conv1d]
    with pytest.raises(ArgumentError, match="'fc9' selects no module.*a.0, a.1, b, c"):
        sparsevd.sparsify(dense, exclude="fc9")


def test_a_shared_module_excluded_under_one_name_is_excluded():
    assert preview(SharedBlock(), exclude="again").replaced == ("stem", "head")


class Tied(nn.Module):
    """A language model whose words are read and written by one table, padding and all."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0)
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 10)
        self.bias = self.out.bias
        self.out.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.normal_()  # the vector for padding learns, as a row of the output

    def forward(self, tokens):
        return self.out(F.relu(self.fc(self.embed(tokens))))


def test_tied_weights_stay_tied_with_one_noise_one_kl_and_one_set_of_zeros():
    dense = Tied()
    model = sparsevd.sparsify(dense)
    assert preview(dense).replaced == ("embed", "fc", "out")
    assert not preview(dense).skipped
    assert model.out.weight is model.embed.weight is not dense.embed.weight
    assert model.out.log_sigma2 is model.embed.log_sigma2
    assert [each.name for each in posteriors(model)] == ["embed.weight", "fc.weight"]
    assert sparsevd.summary(model).weights == 56
    spread_noise(model)
    torch.testing.assert_close(sparsevd.kl(model), sum(each.kl() for each in posteriors(model)))
    tokens = torch.randint(0, 10, (3, 5))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert (model.out.log_sigma2.grad != 0).any(1).all()  # every row, looked up or not: it is an output
    copied = copy.deepcopy(model)
    assert copied.out.log_sigma2 is copied.embed.log_sigma2
    copied.to(torch.bfloat16)
    assert copied.out.log_sigma2 is copied.embed.log_sigma2
    assert copied.out.log_sigma2.dtype == torch.float32
    pruned = sparsevd.prune(model.eval())
    assert pruned.out.weight is pruned.embed.weight
    assert pruned.out.bias is pruned.bias
    assert 0.2 < (pruned.out.weight == 0).float().mean() < 0.8
    assert torch.equal(pruned(tokens), model(tokens))
    assert list(pruned.state_dict()) == list(dense.state_dict())
    fresh = Tied().eval()
    fresh.load_state_dict(pruned.state_dict())
    assert torch.equal(fresh(tokens), pruned(tokens))


class Stop(Callback):
    def on_epoch(self, moment):
        raise KeyboardInterrupt


def test_tied_weights_in_files_and_in_a_run_that_goes_on(tmp_path):
    x = torch.randint(0, 10, (64, 5))
    config = sparsevd.FitConfig(epochs=3, batch_size=16, learning_rate=1e-2, warm_up_end=0.1, drop_from=0.2)
    models = []
    for interrupted in (False, True):
        given = {"loss": lambda output, y: F.cross_entropy(output.transpose(1, 2), y), "progress": False}
        given |= {"config": config, "run_dir": tmp_path / str(interrupted)}
        torch.manual_seed(1)
        dense = Tied()
        torch.manual_seed(2)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                sparsevd.fit(sparsevd.sparsify(dense), (x, x), callbacks=[Stop()], **given)
        models.append(sparsevd.sparsify(dense))
        sparsevd.fit(models[-1], (x, x), resume=interrupted, **given)
    model, again = models
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.out.log_sigma2 is model.embed.log_sigma2
    sparsevd.save(model, tmp_path / "net.spvd")
    read = sparsevd.load(tmp_path / "net.spvd", into=Tied()).eval()
    assert read.out.weight is read.embed.weight
    assert torch.equal(read(x), model.eval()(x))
    sparsevd.save(model, tmp_path / "graph.spvd", example=x[:2])
    torch.testing.assert_close(sparsevd.load(tmp_path / "graph.spvd")(x), model(x))


def test_a_weight_tied_to_what_stays_dense_stays_dense():
    conversion = preview(Tied(), exclude="out")
    assert conversion.replaced == ("fc",)
    assert "embed.weight = out.weight): out.weight stays dense" in conversion.skipped["embed"]
    model = Tied()
    model.table = model.embed.weight  # used by a forward that nobody knows
    conversion = preview(model)
    assert conversion.replaced == ("fc",)
    assert set(conversion.skipped) == {"embed", "out", "(model)"}
    assert "table = embed.weight = out.weight" in conversion.skipped["embed"]


def test_a_weight_that_another_layer_reads_transposed_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    conversion = preview(model)
    assert conversion.replaced == ("2",)
    assert "same memory as 1.weight" in conversion.skipped["0"]
    assert "same memory as 0.weight" in conversion.skipped["1"]
    assert "transposed" in conversion.skipped["1"]


class Bypassed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.ModuleDict({"table": nn.Embedding(10, 4)})
        self.fc = nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.fc(self.words.table(tokens).to(self.fc.weight.dtype))
        return F.linear(x, self.words.table.weight)


def test_a_weight_that_a_forward_reads_by_itself_is_named():
    assert preview(Bypassed()).read_elsewhere == {"words.table": "Bypassed"}
    with pytest.warns(SparseVDWarning, match=r"read elsewhere: words.table: the forward of Bypassed uses its weight"):
        sparsevd.sparsify(Bypassed())
    assert not preview(Bypassed(), exclude=nn.Embedding).read_elsewhere
    assert not preview(Encoder()).remarks()  # torch's own readers are kept off their paths


class ReadsMany(nn.Module):
    """Weights of other names, in a list, in a dictionary, and by a method that its forward calls."""

    def __init__(self):
        super().__init__()
        self.cell, self.attention = nn.GRUCell(4, 4), nn.MultiheadAttention(4, 2)
        self.stack = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"last": nn.Linear(4, 4), "free": nn.Linear(4, 4)})

    def forward(this, x):  # noqa: N805
        x = F.linear(this.named["free"](x), this.cell.weight_ih[:4]) @ this.attention.in_proj_weight[:4]
        return this.end(F.linear(x, this.stack[1].weight))

    def end(self, x):
        return F.linear(self.stack[0](x), self.named["last"].weight) + self.cell.bias_ih.sum()


class ReadsMore(ReadsMany):
    """The last of a list, one by a variable, each in a loop, and under another name."""

    def __init__(self):
        super().__init__()
        self.ends, self.some, self.all = (nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]) for _ in range(3))
        self.alias, self.called, self.sizes = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)

    def forward(self, x):
        x = F.linear(super().forward(x), self.ends[-1].weight)
        for i, _ in enumerate(self.some):
            x = F.linear(x, self.some[i].weight)
        x = x + sum(F.linear(x, layer.weight) for layer in self.all)
        for layer in self.called:
            x = layer(x)
        other = self.alias
        return F.linear(x, other.weight) * self.sizes.weight.shape[0]


def test_weights_that_a_forward_reads_are_found_by_any_name():
    found = {"cell", "attention", "stack.1", "named.last"}
    assert set(preview(ReadsMany()).read_elsewhere) == found
    found |= {"ends.1", "some.0", "some.1", "all.0", "all.1", "alias"}
    assert set(preview(ReadsMore()).read_elsewhere) == found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_network_with_a_script_module_is_converted():
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    model[1].bias.requires_grad_(False)
    with pytest.warns(SparseVDWarning, match="left dense: 1: RecursiveScriptModule"):
        model = sparsevd.sparsify(model)
    assert model(torch.randn(2, 3)).shape == (2, 3)
    before = model[1].weight.clone()
    config = sparsevd.FitConfig(epochs=1, learning_rate=1e-2, batch_size=2)
    sparsevd.fit(model, (torch.randn(6, 3), torch.tensor([0, 1, 2] * 2)), None, config, progress=False)
    assert not torch.equal(model[1].weight, before)
    assert not model[1].bias.requires_grad


def test_what_an_owner_put_on_a_layer_stays_there():
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 2), nn.LSTM(2, 2))
    for module in model:
        module.scale = 2.0
    sparse = sparsevd.sparsify(model)
    assert [module.scale for module in sparse] == [2.0] * 3
    sparse[0].scale = 5.0
    back = sparsevd.prune(sparse)
    assert [module.scale for module in back] == [5.0, 2.0, 2.0]
    assert (sparse[1].max_norm, sparse[1].sparse, sparse[2].mode) == (None, False, "LSTM")
    assert [set(vars(one)) for one in back] == [set(vars(one)) for one in model]


def test_embeddings_that_cannot_be_converted_are_named():
    vectors = torch.ones(4, 3)
    model = nn.ModuleDict(
        {
            "bounded": nn.Embedding(4, 3, max_norm=1.0),
            "sparse": nn.EmbeddingBag(4, 3, sparse=True),
            "padded": nn.Embedding.from_pretrained(vectors, freeze=False, padding_idx=1),
            "fine": nn.Embedding(4, 3, padding_idx=1),
        }
    )
    skipped = preview(model).skipped
    assert "max_norm=1.0" in skipped["bounded"]
    assert "sparse=True" in skipped["sparse"]
    assert "vector for padding is not zero" in skipped["padded"]
    assert preview(model).replaced == ("fine",)


def test_reasons_are_given():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = nn.LazyLinear(3)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
            self.hooked = nn.Linear(3, 3)
            self.hooked.register_forward_hook(lambda *_: None)
            self.lstm = type("Peephole", (nn.LSTM,), {})(3, 3, num_layers=2, dropout=0.2)
            self.position = nn.Parameter(torch.zeros(2, 3))
            self.masked = random_unstructured(nn.Linear(3, 3), "weight", 0.5)
            self.patched = nn.Linear(3, 3)
            self.patched.register_buffer("scale", torch.ones(1))
            self.limited = nn.Linear(3, 3)
            self.limited.threshold = 0.25
            self.fine = nn.Linear(3, 3)

    skipped = preview(Lazy()).skipped
    assert "have a threshold of their own; give this attribute another name" in skipped.pop("limited")
    assert "run the model once" in skipped["lazy"]
    assert "parametrization" in skipped["normed"]
    assert "forward hooks" in skipped["hooked"]
    assert "dropout of 0.2" in skipped["lstm"]
    assert "Peephole is a subclass of LSTM" in skipped["lstm"]
    assert "position" in skipped["(model)"]
    assert "torch's pruning" in skipped["masked"]
    assert set(skipped) == {"lazy", "normed", "hooked", "lstm", "(model)", "masked", "patched"}
    assert "more than a weight and a bias (scale)" in skipped["patched"]
    assert preview(Lazy()).replaced == ("fine",)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_weights_that_are_no_real_numbers_stay_dense(dtype):
    odd = nn.Linear(3, 3)
    odd.weight = nn.Parameter(odd.weight.detach().to(dtype), requires_grad=False)
    with pytest.warns(SparseVDWarning, match=f"left dense: 0: its weight is {dtype}, and the noise is for real"):
        model = sparsevd.sparsify(nn.Sequential(odd, nn.Linear(3, 3)))
    assert [type(layer) for layer in model] == [nn.Linear, SparseLinear]
    with pytest.raises(ConversionError, match=rf"nothing to convert in Linear(.|\n)*its weight is {dtype}"):
        sparsevd.sparsify(odd)
    attention = nn.MultiheadAttention(4, 2, dtype=torch.complex64)
    assert "its in_proj_weight is torch.complex64" in preview(attention).skipped["(model)"]


def test_attention_that_stays_dense_is_named_with_its_dropout():
    class Mine(nn.MultiheadAttention):
        pass

    skipped = preview(nn.Sequential(Mine(8, 2, dropout=0.1))).skipped
    assert "register(Mine, like=nn.MultiheadAttention)" in skipped["0"]
    assert "functional dropout of 0.1" in skipped["0"]
    assert "Mine 0 reads its weight, and stays dense" in skipped["0.out_proj"]
    without = preview(Encoder(), exclude=nn.MultiheadAttention)
    assert not without.skipped
    only_last = preview(Encoder(), include="*.out_proj")
    assert not only_last.replaced
    assert "reads its weight, and stays dense" in only_last.skipped["encoder.layers.0.self_attn.out_proj"]


def test_what_stays_dense_is_warned_of_and_what_changes_is_logged(caplog):
    with (
        caplog.at_level(logging.INFO, "sparsevd"),
        pytest.warns(SparseVDWarning, match="left dense: 1: Bilinear has no Sparse VD twin"),
    ):
        sparsevd.sparsify(nn.ModuleList([nn.LSTM(3, 3), nn.Bilinear(2, 2, 2), nn.Linear(2, 2)]))
    assert "to Sparse VD: 0, 2" in caplog.text


def test_hooks_that_pruning_loses_are_warned_of():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 3)))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.warns(SparseVDWarning, match="hooks of layer 0"):
        sparsevd.prune(model)


def test_nothing_to_convert_is_an_error():
    with pytest.raises(ConversionError, match="nothing to convert in Sequential.*Linear"):
        sparsevd.sparsify(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConversionError, match="no Sparse VD layer"):
        sparsevd.prune(nn.Linear(2, 2))
    with pytest.raises(ConversionError, match=r"converted already, and its Sparse VD layers are \(model\)$"):
        sparsevd.sparsify(sparsevd.sparsify(nn.Linear(2, 2)))
    with pytest.raises(ConversionError, match="converted already, and its Sparse VD layers are 0, 2$"):
        sparsevd.sparsify(sparsevd.sparsify(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("compute", [lambda layer: random_unstructured(layer, "weight", 0.5), nn.utils.weight_norm])
def test_a_model_that_torch_cannot_copy_is_named(compute):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(compute(nn.Linear(3, 3))))
    with pytest.raises(ConversionError, match=r"inplace=True\n1\.0: its weight is computed .*remove that first"):
        sparsevd.sparsify(model)
    assert type(model[0]) is nn.Linear
    with pytest.warns(SparseVDWarning, match=r"left dense: 1\.0"):
        sparsevd.sparsify(model, inplace=True)
    with pytest.raises(ConversionError, match=r"1\.0: its weight"):
        sparsevd.prune(model)
    assert sparsevd.prune(model, inplace=True)(torch.zeros(1, 3)).shape == (1, 3)


def test_prune_refuses_nan_and_warns_of_an_empty_layer():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="NaN"):
        sparsevd.prune(model, threshold=math.nan)
    with torch.no_grad():
        model[1].log_sigma2.fill_(30.0)
    with pytest.warns(SparseVDWarning, match="layer 1 lost every one of its 4 weights"):
        pruned = sparsevd.prune(model)
    assert (pruned[1].weight == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"norm_first": True}])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_fast_path_gives_the_pruned_answer(options, masked):
    """In eval mode without gradients torch hands linear1.weight to a fused operator; it must not see unpruned ones."""
    dense = Encoder(**options).eval()
    model = spread_noise(quietly(sparsevd.sparsify, dense)).eval()
    pruned = sparsevd.prune(model)
    x = torch.randn(3, 6, 16)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    arguments = (x, mask) if masked else (x,)
    assert torch.equal(model(*arguments), pruned(*arguments))  # with gradients there is no fast path
    with torch.no_grad():
        answer = model(*arguments)
        assert not torch.allclose(answer, dense(*arguments), atol=1e-3)
        torch.testing.assert_close(answer, pruned(*arguments))  # zeros at masked places, where torch puts them
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(model(*arguments), pruned(*arguments))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    layer, original = pruned.encoder.layers[0], dense.encoder.layers[0]
    assert layer.activation_relu_or_gelu == original.activation_relu_or_gelu
    assert pruned.encoder.use_nested_tensor == dense.encoder.use_nested_tensor
    assert set(layer.__dict__) == set(original.__dict__)


def test_deepcopy_and_state_dict_round_trip():
    model = spread_noise(sparsevd.sparsify(SharedBlock())).eval()
    x = torch.randn(2, 3, 6, 6)
    other = sparsevd.sparsify(SharedBlock()).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(other(x), model(x))


def test_bf16_autocast_trains():
    model = sparsevd.sparsify(SharedBlock())
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(4, 3, 6, 6))
        loss = sparsevd.elbo_loss(F.cross_entropy(out, torch.randint(0, 4, (4,))), model, n_train=4)
    assert out.dtype == torch.bfloat16
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_export_in_eval_mode():
    model = spread_noise(sparsevd.sparsify(Depthwise())).eval()
    x = torch.randn(2, 3, 6, 6)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_with_fullgraph():
    """The compiled step has the same KL, and the same gradients where the noise is negligible."""
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), initial_log_sigma2=-30.0)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def step(x, y):
        return sparsevd.elbo_loss(F.cross_entropy(model(x), y), model, n_train=8)

    loss = torch.compile(step, fullgraph=True)(x, y)
    loss.backward()
    compiled = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    eager = step(x, y)
    eager.backward()
    torch.testing.assert_close(loss, eager)
    for name, parameter in model.named_parameters():
        if not name.endswith("log_sigma2"):
            torch.testing.assert_close(compiled[name], parameter.grad, rtol=1e-3, atol=1e-5)


def compiled(model):
    return torch.compile(model, backend="eager")


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_a_compiled_network_is_the_one_inside():
    dense = small()
    model = sparsevd.sparsify(compiled(dense), include="0")
    assert type(model) is nn.Sequential
    assert preview(compiled(dense)).replaced == ("0", "2")
    spread_noise(model)
    pruned = sparsevd.prune(compiled(model), sparsity=0.5)
    assert type(pruned) is nn.Sequential
    assert list(pruned.state_dict()) == list(dense.state_dict())
    small().load_state_dict(pruned.state_dict())
    assert [layer.name for layer in sparsevd.summary(compiled(model)).layers] == ["0", "2"]
    assert sparsevd.summary(compiled(pruned)) == sparsevd.summary(pruned)
    assert type(model[0]) is SparseLinear  # both were copied
    assert type(dense[0]) is nn.Linear


def test_a_compiled_network_is_changed_in_place_and_stays_compiled():
    dense, x = small(), torch.randn(4, 6)
    wrapper = compiled(dense)
    assert sparsevd.sparsify(wrapper, inplace=True) is dense
    assert not torch.equal(wrapper(x), wrapper(x))
    spread_noise(dense)
    wrapper.eval()
    before = wrapper(x)
    assert sparsevd.prune(wrapper, inplace=True) is dense
    assert type(dense[0]) is nn.Linear
    torch.testing.assert_close(wrapper(x), before)
    assert 0 < sparsevd.summary(wrapper).sparsity < 100


def test_a_layer_that_was_compiled_by_itself_is_called_with_noise_and_without():
    """The wrapper inside of a network stays, and so do its keys."""
    dense, x = nn.Sequential(compiled(nn.Linear(6, 5)), nn.ReLU()), torch.randn(4, 6)
    dense(x)
    model = sparsevd.sparsify(dense)
    assert not torch.equal(model(x), model(x))
    pruned = sparsevd.prune(model, sparsity=1.0 - 1 / 30)
    assert torch.count_nonzero(pruned[0]._orig_mod.weight) == 1
    torch.testing.assert_close(pruned(x), F.relu(F.linear(x, pruned[0]._orig_mod.weight, dense[0].bias)))
    assert list(pruned.state_dict()) == list(dense.state_dict())


def test_the_first_noise_may_be_relative_to_the_weights():
    net = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    with torch.no_grad():
        net[1].weight.mul_(100)
    model = sparsevd.sparsify(net, initial_log_sigma2="relative")
    for layer in model:
        assert layer.log_sigma2.unique().numel() == 1
        assert layer.log_sigma2[0, 0].item() == pytest.approx(layer.weight.square().mean().log().item() - 6, abs=1e-4)
    with pytest.raises(ArgumentError, match='must be a number or "relative"'):
        sparsevd.sparsify(net, initial_log_sigma2="small")


def test_nan_is_not_taken_for_sparsity():
    model = sparsevd.sparsify(nn.Linear(4, 3))
    with torch.no_grad():
        model.log_sigma2[0, 0] = math.nan
    with pytest.raises(ArgumentError, match="holds NaN"):
        sparsevd.prune(model)
