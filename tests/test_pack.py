"""The model file: round trips, the two coders against each other, and files that are not what they should be."""

import copy
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import time
import zlib
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune

import sparsevd
from fuzz import costly, model_files, small_graphs
from sparsevd import kernels, modelfile
from sparsevd.errors import ArgumentError, FormatError, GraphError, SparseVDWarning, WriteError
from sparsevd.graph import Graph, Node
from sparsevd.kernels.coder import NativeCoder
from sparsevd.modelfile import adaptive, container
from sparsevd.modelfile.container import FRAME, MAGIC, VERSION
from sparsevd.modelfile.description import described, graph_of
from sparsevd.modelfile.quantisation import entries_of
from sparsevd.modelfile.symbols import INTEGERS, PythonCoder
from sparsevd.zoo import models

needs_c = pytest.mark.skipif(not kernels.available(), reason="the C kernels are not built")
CODERS = [PythonCoder, pytest.param(NativeCoder, marks=needs_c)]
quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def sealed(content: bytes) -> bytes:
    """A file of this content with the right checksum, as docs/format.md says."""
    head = MAGIC + bytes([VERSION])
    return head + zlib.crc32(head + content).to_bytes(4, "little") + content


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    both = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*both)


def sparse_tensor(shape: tuple[int, ...], density: float) -> torch.Tensor:
    """Random numbers with zeros, dead rows and dead columns."""
    values = torch.randn(shape) * (torch.rand(shape) < density)
    if len(shape) > 1:
        values[torch.rand(shape[0]) < 0.3] = 0
        values[:, torch.rand(shape[1]) < 0.3] = 0
    return values


def small_model() -> nn.Module:
    """A pruned network with convolutions, batch normalisation and buffers of integers."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 20),
        nn.ReLU(),
        nn.Linear(20, 4),
    )
    with torch.no_grad():
        for layer in (model[0], model[4], model[6]):
            layer.weight.copy_(sparse_tensor(tuple(layer.weight.shape), 0.2) + 0.0)  # and no −0.0
        model(torch.randn(8, 1, 8, 8))
    return model.eval()


def trained_posterior() -> nn.Module:
    """A Sparse VD model as training leaves it: most weights drowned in noise, the others with their own σ."""
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5)))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.randn_like(layer.weight))
            layer.bias.normal_()
            kept = torch.rand_like(layer.weight) < 0.2
            sigma = 0.02 + 0.06 * torch.rand_like(layer.weight)
            layer.log_sigma2.copy_(torch.where(kept, 2 * sigma.log(), layer.weight.square().log() + 5))
    return model


# The coder


@st.composite
def matrices(draw):
    mantissa = draw(st.sampled_from([INTEGERS, 23, 7, 0]))
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if mantissa == INTEGERS:
        scale = draw(st.sampled_from([1, 30, 2**29]))
        values = np.rint(np.clip(rng.standard_normal((rows, columns)), -2, 2) * scale).astype(np.int32)
    else:
        values = rng.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32) & ~((1 << (23 - mantissa)) - 1)
    values = np.where(rng.random((rows, columns)) < draw(st.floats(0, 1)), values, 0).astype(np.int32)
    hint = rng.integers(0, 9, columns).astype(np.int32) if draw(st.booleans()) else None
    width, plane = draw(st.integers(0, columns)), draw(st.integers(0, columns))
    return np.ascontiguousarray(values), width, plane, hint, mantissa


@needs_c
@quick
@given(st.lists(matrices(), max_size=4), st.binary(max_size=40))
def test_both_coders_write_the_same_bytes_and_read_each_other(items, text):
    written = []
    for kind in (NativeCoder, PythonCoder):
        with closing(kind()) as coder:
            coder.prime(b"what both know")
            coder.code_bytes(bytearray(text))
            for values, *how in items:
                coder.code_matrix(values.copy(), *how)
            written.append(coder.finish())
    assert written[0] == written[1]
    for kind in (NativeCoder, PythonCoder):
        with closing(kind(written[0])) as coder:
            coder.prime(b"what both know")
            read = bytearray(len(text))
            coder.code_bytes(read)
            assert read == text
            for values, *how in items:
                decoded = np.zeros_like(values)
                coder.code_matrix(decoded, *how)
                np.testing.assert_array_equal(decoded, values)


def test_carries_run_through_many_bytes():
    """A long row of likely ones, then an unlikely zero: the carry must reach far back."""
    data = [bytearray([255] * 300 + [tail]) for tail in (0, 1, 254)]
    for text in data:
        with closing(PythonCoder()) as coder:
            coder.code_bytes(bytearray(text))
            written = coder.finish()
        with closing(PythonCoder(written)) as decoder:
            read = bytearray(len(text))
            decoder.code_bytes(read)
        assert read == text


@pytest.mark.parametrize("kind", CODERS)
def test_coder_is_near_the_entropy_of_its_model(kind):
    """The account sums −log₂ of the probabilities, which is what an ideal coder would write."""
    values = sparse_tensor((60, 90), 0.1).numpy().view(np.int32)
    with closing(kind()) as coder:
        coder.code_matrix(np.ascontiguousarray(values), 0, 0, None, 23)
        ideal, size = sum(coder.account()) / 8, len(coder.finish())
    assert ideal * 0.999 < size < ideal * 1.005 + 2


@pytest.mark.parametrize("kind", CODERS)
def test_decoder_stops_when_the_bytes_cannot_hold_what_is_asked(kind):
    values = np.zeros((4000, 4000), dtype=np.int32)
    started = time.perf_counter()
    with closing(kind(b"")) as coder, pytest.raises(FormatError, match="promises"):
        coder.code_matrix(values, 0, 0, None, 0)
    assert time.perf_counter() - started < 20


# Round trips


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-38, 3.4e38, 1.0]


@st.composite
def states(draw):
    """State_dicts of random tensors: any type, any shape, any pattern of zeros."""
    state = {}
    for i in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        torch.manual_seed(draw(st.integers(0, 10**6)))
        values = sparse_tensor(shape, draw(st.floats(0, 1))) if shape else torch.randn(())
        if draw(st.booleans()) and values.numel():
            values.view(-1)[0] = draw(st.sampled_from(SPECIAL))
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]))
        state[f"{draw(st.sampled_from(['fc', 'конв', '0']))}{i}.weight"] = values.to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        if draw(st.booleans()):
            state[f"buffer.{dtype}"] = torch.randint(0, 2, tuple(draw(st.lists(st.integers(0, 3), max_size=2)))).to(
                dtype
            )
    return state


class Holder(nn.Module):
    """A module whose state_dict is the given one."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(state.values()):
            self.register_buffer(f"tensor{i}", tensor)
        self.names = list(state)


@quick
@given(states())
def test_lossless_gives_back_every_bit(state):
    holder = Holder(state)
    data, _ = modelfile.pack(holder)
    found = modelfile.unpack(data)
    assert list(found) == list(holder.state_dict())
    for name, tensor in holder.state_dict().items():
        coded = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) and not tensor.isnan().any()
        assert same_bits(tensor.where(tensor != 0, 0.0) if coded else tensor, found[name])  # −0.0 is a zero


def test_the_zeros_of_torchs_own_pruning_cost_nothing():
    """It multiplies by a mask, and a negative weight becomes −0.0."""
    torch.manual_seed(0)
    layer = torch_prune.l1_unstructured(nn.Linear(60, 40), "weight", 0.95)
    torch_prune.remove(layer, "weight")
    assert (torch.signbit(layer.weight) & (layer.weight == 0)).any()
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        plain.weight.add_(0.0)
    assert not (torch.signbit(plain.weight) & (plain.weight == 0)).any()
    data, again = modelfile.pack(layer)[0], modelfile.pack(plain)[0]
    assert data == again
    assert torch.equal(modelfile.unpack(data)["weight"], layer.weight)


def test_torchs_own_pruning_must_be_over(tmp_path):
    """Until then the state_dict holds every weight, and a mask."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), torch_prune.l1_unstructured(nn.Linear(4, 2), "weight", 0.5))
    with pytest.raises(ArgumentError, match=r'^2 holds .*prune\.remove\(model\.get_submodule\("2"\), "weight"\)'):
        sparsevd.save(model, tmp_path / "a.spvd")
    assert not (tmp_path / "a.spvd").exists()
    torch_prune.remove(model[2], "weight")
    sparsevd.save(model, tmp_path / "a.spvd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", [2, 5, 16])
def test_bits_bound_the_error(dtype, precision):
    model = nn.Linear(40, 30).to(dtype)
    data, _ = modelfile.pack(model, precision=precision)
    found = modelfile.unpack(data)
    exact = model.weight.detach().float()
    step = exact.abs().max() / (2 ** (precision - 1) - 1)
    storing = 0.01 * exact.abs().max()  # the step and the type have 8 bits or more
    assert found["weight"].dtype == dtype
    assert (found["weight"].float() - exact).abs().max() <= step / 2 + storing
    assert len(found["weight"].unique()) <= 2**precision - 1
    assert (found["bias"] - model.bias).abs().max() <= 2.0**-precision * model.bias.abs().max()


def test_posterior_rounds_by_sigma():
    model = trained_posterior()
    data, _ = modelfile.pack(model, precision=modelfile.PosteriorSteps(steps=2.0))
    found = modelfile.unpack(data)
    pruned = sparsevd.prune(model).state_dict()
    assert found.keys() == pruned.keys()
    for i in (0, 2):
        sigma = torch.exp(model[i].log_sigma2[pruned[f"{i}.weight"] != 0] / 2).median()
        weight_error = (found[f"{i}.weight"] - pruned[f"{i}.weight"]).abs().max()
        bias_error = (found[f"{i}.bias"] - pruned[f"{i}.bias"]).abs().max()
        assert 0.4 * sigma < weight_error <= 1.01 * sigma  # half of two steps, the step itself rounded a little
        assert bias_error <= 0.51 * sigma


def test_coarser_is_smaller():
    model = trained_posterior()
    sizes = [
        len(modelfile.pack(model, precision=p)[0]) for p in ("lossless", modelfile.PosteriorSteps(0.5), "posterior", 2)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_rounding_that_loses_many_of_the_kept_weights_is_warned_of(tmp_path):
    model = trained_posterior()
    sparsevd.save(model, tmp_path / "sure.spvd", precision="posterior")  # without a word
    with torch.no_grad():
        for layer in (model[0], model[2]):
            unsure = layer.weight.square().log() + 1 + 0.1 * torch.randn_like(layer.weight)  # log α near 1
            layer.log_sigma2.copy_(torch.where(layer.log_sigma2 < -4, unsure, 10))
    pruned = sparsevd.prune(model)
    kept = sum(int(pruned[i].weight.count_nonzero()) for i in (0, 2))
    with pytest.warns(SparseVDWarning, match=r"PosteriorSteps\(0\.5\).*`sparsevd compress`") as said:
        sparsevd.save(model, tmp_path / "unsure.spvd", precision="posterior")
    found = sparsevd.load(tmp_path / "unsure.spvd", into=pruned)
    left = sum(int(found[i].weight.count_nonzero()) for i in (0, 2))
    assert left < 0.8 * kept
    assert f"of {kept} kept weights {left} are left" in str(said[0].message)
    assert Path(said[0].filename) == Path(__file__)
    sparsevd.save(model, tmp_path / "fine.spvd", precision=modelfile.PosteriorSteps(0.1))


def test_posterior_needs_sparse_vd():
    with pytest.raises(ArgumentError, match="no Sparse VD layer"):
        modelfile.pack(small_model(), precision="posterior")


@pytest.mark.parametrize("precision", ["lossy", 1, 17, 4.0, True, None])
def test_unknown_precision_is_refused(precision):
    with pytest.raises(ArgumentError, match="precision"):
        modelfile.pack(small_model(), precision=precision)


def test_posterior_steps_must_be_positive():
    with pytest.raises(ArgumentError, match="steps"):
        modelfile.PosteriorSteps(0.0)


@pytest.mark.parametrize("precision", [8, "posterior"])
def test_numbers_that_are_not_finite_are_refused_by_name(precision):
    model = trained_posterior()
    with torch.no_grad():
        model[0].bias[0] = math.nan
    with pytest.raises(ArgumentError, match=r"0\.bias"):
        modelfile.pack(model, precision=precision)


def test_a_layer_that_lost_everything(recwarn):
    model = trained_posterior()
    with torch.no_grad():
        model[2].log_sigma2.fill_(20.0)
    found = modelfile.unpack(modelfile.pack(model, precision="posterior")[0])
    assert not found["2.weight"].any()
    assert torch.equal(found["2.bias"], model[2].bias)


def test_a_sparse_vd_model_is_pruned_inside():
    model = trained_posterior()
    expected = sparsevd.prune(model).state_dict()
    found = modelfile.unpack(modelfile.pack(model)[0])
    assert all(same_bits(expected[name], found[name]) for name in expected)
    assert any(isinstance(layer, sparsevd.layers.SparseLayer) for layer in model)  # the given one stays


def test_shared_tensors_are_stored_once():
    tied = nn.ModuleDict({"a": nn.Linear(50, 50), "b": nn.Linear(50, 50)})
    separate = len(modelfile.pack(tied)[0])
    tied["b"] = tied["a"]
    data, packed = modelfile.pack(tied)
    assert [entry.form.name for entry in packed.entries] == ["FLOAT", "FLOAT", "ALIAS", "ALIAS"]
    assert len(data) < 0.6 * separate
    assert torch.equal(modelfile.unpack(data)["b.weight"], tied["a"].weight)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 2, 2), (2, 3, 0, 2), (0, 3, 2, 2), (2, 3, 2, 0, 1)])
@pytest.mark.parametrize("precision", ["lossless", 4])
def test_empty_tensors_come_back(shape, precision):
    state = Holder({"before": torch.ones(3, 2), "empty": torch.zeros(shape), "after": torch.ones(2, 6)})
    found = modelfile.unpack(modelfile.pack(state, precision=precision)[0])
    for name, tensor in state.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0 if precision == "lossless" else 0.01, atol=0)


def test_a_view_of_another_shape_is_not_an_alias():
    whole = torch.randn(4, 4)
    state = Holder({"a": whole, "b": whole.t(), "c": whole[:2]})
    found = modelfile.unpack(modelfile.pack(state)[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in state.state_dict().items())


def test_without_the_kernels_the_file_is_the_same(monkeypatch):
    model = small_model()
    with_c, _ = modelfile.pack(model)
    monkeypatch.setattr(kernels, "available", lambda: False)
    without, _ = modelfile.pack(model)
    assert with_c == without
    assert all(
        same_bits(a, b) for a, b in zip(modelfile.unpack(with_c).values(), model.state_dict().values(), strict=True)
    )


def test_dead_rows_and_columns_cost_next_to_nothing():
    weight = torch.zeros(400, 1000)
    weight[:3, :20] = torch.randn(3, 20)
    _, packed = modelfile.pack(Holder({"w": weight}))
    assert packed.entries[0].bits[0] / 8 < 12


def test_images_are_found_in_the_columns():
    """The columns of a layer that reads 20×24 images: which pixels matter is alike one image row further."""
    middle = torch.zeros(20, 24)
    middle[5:15, 6:18] = 0.3
    weight = torch.randn(60, 480) * (torch.rand(60, 480) < middle.reshape(-1))
    _, packed = modelfile.pack(Holder({"w": weight}))
    assert packed.entries[0].width == 24


def test_padding_pays_for_what_unpacks_to_much(monkeypatch):
    monkeypatch.setattr(container, "FREE_BYTES", 0)
    monkeypatch.setattr(container, "MOST_PER_BYTE", 1000)
    state = Holder({"w": torch.zeros(500, 500)})
    data, _ = modelfile.pack(state)
    assert len(data) == FRAME + 1000
    assert not modelfile.unpack(data)["tensor0"].any()
    with pytest.raises(FormatError, match="claim to hold"):
        modelfile.unpack(sealed(data[FRAME:-1]))


# Files


def test_save_and_load(tmp_path):
    model = small_model()
    sparsevd.save(model, tmp_path / "model.spvd")
    other = small_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    assert sparsevd.load(tmp_path / "model.spvd", into=other) is other
    assert all(same_bits(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["model.spvd"]


def test_a_file_of_a_compiled_network_has_the_names_of_the_bare_one(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = sparsevd.sparsify(plain)
    path, other = tmp_path / "model.spvd", copy.deepcopy(plain)
    for saved in (plain, model):
        sparsevd.save(torch.compile(saved, backend="eager"), path, precision="lossless" if saved is plain else 8)
        assert list(modelfile.unpack(path.read_bytes())) == list(plain.state_dict())
        wrapper = torch.compile(other, backend="eager")
        for into in (other, wrapper):
            nn.init.zeros_(other[0].weight)
            assert sparsevd.load(path, into=into) is into
            torch.testing.assert_close(other[0].weight, plain[0].weight, rtol=0, atol=0 if saved is plain else 0.02)


def test_a_file_that_does_not_fit_leaves_the_model_alone(tmp_path):
    sparsevd.save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), tmp_path / "model.spvd")
    for other in (nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)), nn.Sequential(nn.Linear(3, 4))):
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(FormatError, match="does not fit the model"):
            sparsevd.load(tmp_path / "model.spvd", into=other)
        assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    half = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    with pytest.raises(FormatError, match="float32 for .* torch.float16"):
        sparsevd.load(tmp_path / "model.spvd", into=half)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        sparsevd.load(tmp_path / "missing.spvd", into=nn.Linear(1, 1))
    (tmp_path / "other.spvd").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(FormatError, match="not a sparsevd model file"):
        sparsevd.load(tmp_path / "other.spvd", into=nn.Linear(1, 1))
    data, _ = modelfile.pack(nn.Linear(1, 1))
    (tmp_path / "future.spvd").write_bytes(MAGIC + bytes([VERSION + 1]) + data[5:])
    with pytest.raises(FormatError, match=f"has format {VERSION + 1}"):
        sparsevd.load(tmp_path / "future.spvd", into=nn.Linear(1, 1))
    with pytest.raises(WriteError, match="cannot be written"):
        sparsevd.save(nn.Linear(1, 1), tmp_path / "other.spvd" / "below.spvd")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("complex", torch.zeros(2, dtype=torch.complex64)), ("meta", torch.zeros(2, device="meta"))],
)
def test_what_cannot_be_saved_is_named(name, tensor):
    model = nn.Module()
    model.register_buffer(name, tensor)
    with pytest.raises(ArgumentError, match=name):
        modelfile.pack(model)


def test_names_with_line_breaks_are_refused():
    with pytest.raises(ArgumentError, match="line break"):
        modelfile.pack(nn.ModuleDict({"a\nb": nn.Linear(1, 1)}))


GOLDEN = bytes.fromhex(
    "5350564401f11876c2005a2ae25cf85408e44286bd8f6f54680c91e4fe82801db8133abbecde7fa1553e3d2c141895219b31"
    "9533442548e328dd26dbd981f30f9c03fa0b27efccb5536ec296a790b24000ded0b03d24ee617b29639ddc6ccc70a5cdb332"
    "9c8ce43030d0f6976dcd1be23bf1e5153679f08f76195992a39e15c8dff07623084f03f8a04cea2d"
)


def test_files_of_today_are_read_tomorrow():
    """A file as format 1 is; if this fails, the format has changed and needs another number."""
    found = modelfile.unpack(GOLDEN)
    expected = {
        "0.weight": torch.tensor([0.5, 0, -0.25, 0, 0, 1.5, 0, 0]).reshape(2, 1, 2, 2),
        "0.bias": torch.tensor([0.1, -0.2]),
        "1.weight": torch.tensor([1.0, 2.0]),
        "1.bias": torch.zeros(2),
        "1.running_mean": torch.zeros(2),
        "1.running_var": torch.ones(2),
        "1.num_batches_tracked": torch.tensor(0),
        "4.weight": (torch.arange(24.0) - 11).mul(torch.arange(24) % 3 == 0).reshape(3, 8),
        "4.bias": torch.tensor([1.0, 0.0, -1.0]),
    }
    assert list(found) == list(expected)
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    torch.testing.assert_close(
        outputs(modelfile.rebuild(GOLDEN), image), [torch.tensor([[-59.7997, 60.9997, 55.6997]])]
    )


def test_the_page_about_the_format_names_these_bytes():
    page = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
    assert hashlib.sha256(container.PRIME).hexdigest() in page


# The graph in the file


class Grouped(nn.Module):
    """A branching network: convolutions in groups, a way around, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.fc1, self.fc2 = nn.Linear(8 * 9, 12), nn.Linear(24, 3)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.nn.functional.avg_pool2d(x + self.conv2(x), 2)
        y = self.fc1(x.flatten(1))
        return self.fc2(torch.cat([torch.relu(y), torch.tanh(y)], 1)), y * self.scale + 0.5


def grouped() -> nn.Module:
    model = Grouped()
    with torch.no_grad():
        for layer in (model.conv1, model.conv2, model.fc1, model.fc2):
            layer.weight.copy_(sparse_tensor(tuple(layer.weight.shape), 0.4))
        model(torch.randn(20, 2, 6, 6))
    return model.eval()


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model(x)
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize(("make", "shape"), [(small_model, (1, 8, 8)), (grouped, (2, 6, 6))])
def test_the_network_comes_back_without_its_class(make, shape, tmp_path):
    model = make()
    example = torch.randn(2, *shape)
    sparsevd.save(model, tmp_path / "model.spvd", example=example)
    again = sparsevd.load(tmp_path / "model.spvd")
    x = torch.randn(7, *shape)
    for ours, theirs in zip(outputs(again, x), outputs(model, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    other = make()
    sparsevd.load(tmp_path / "model.spvd", into=other)  # with a graph or without, `into` serves as well
    for ours, theirs in zip(outputs(other, x), outputs(model, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_lenet_5_comes_back():
    model = models.lenet_5_caffe().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.05)
    x = torch.rand(3, 1, 28, 28)
    again = modelfile.rebuild(modelfile.pack(model, example=x)[0])
    torch.testing.assert_close(outputs(again, x), outputs(model, x), rtol=1e-5, atol=1e-6)
    assert set(again.state_dict()) <= set(model.state_dict())


def test_what_nothing_reads_is_not_stored():
    """Unit 3 of the first layer has no reader: its weights and its bias cost nothing, and nothing changes."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[3].weight[:, 3] = 0
    x = torch.randn(5, 3, 4)
    data, packed = modelfile.pack(model, example=x)
    found = modelfile.unpack(data)
    assert not found["1.weight"][3].any()
    assert found["1.bias"][3] == 0
    kept = [i for i in range(8) if i != 3]
    assert same_bits(found["1.weight"][kept], model[1].weight[kept])
    torch.testing.assert_close(outputs(modelfile.rebuild(data), x), outputs(model, x), rtol=0, atol=0)
    assert len(data) < len(modelfile.pack(model)[0]) - 12 * 2 + len(packed.graph)


def test_a_posterior_file_with_its_graph():
    model = trained_posterior()
    x = torch.randn(4, 30)
    again = modelfile.rebuild(modelfile.pack(model, example=x, precision=modelfile.PosteriorSteps(0.01))[0])
    torch.testing.assert_close(outputs(again, x), outputs(model.eval(), x), rtol=0.02, atol=0.02)


def test_without_a_graph_load_asks_for_a_model(tmp_path):
    sparsevd.save(small_model(), tmp_path / "model.spvd")
    with pytest.raises(FormatError, match="into=model"):
        sparsevd.load(tmp_path / "model.spvd")


CARRIED = ["conv-1", "é", "名前", "0", "self", "torch", "input", "x", "number", "relu", "weight", "args_0", "getattr"]
REFUSED = [
    "forward",
    "lambda",
    "class",
    "None",
    "graph",
    "code",
    "parameters",
    "register_buffer",
    "_modules",
    "ﬁ",
    "a b",
]
REFUSED += ['x") or print("hello', "x\\", "'", "\t", "😀", "%s", "{x}", "__class__", "", "*/"]


class Called(nn.Module):
    """Layers of these names, one after the other, at the top and below; names that nn.Module takes no other way too."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.below, self.names = nn.Module(), names
        for name in names:
            self._modules[name], self.below._modules[name] = nn.Linear(4, 4), nn.Linear(4, 4)
            self.below._parameters[f"{name}-scale"] = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.below._modules[name](self._modules[name](x)) * self.below._parameters[f"{name}-scale"]
        return x


def test_names_that_can_be_in_code_are_carried(tmp_path):
    model, x = Called(CARRIED), torch.randn(3, 4)
    sparsevd.save(model, tmp_path / "model.spvd", example=x)
    again = sparsevd.load(tmp_path / "model.spvd")
    assert set(again.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(outputs(again, x), outputs(model, x))


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_cannot_are_refused_when_the_graph_is_saved(name):
    with pytest.raises(GraphError, match="needs another name"):
        modelfile.pack(Called([name]), example=torch.zeros(1, 4))


def test_any_name_is_carried_without_a_graph(tmp_path):
    model, other = Called(CARRIED + REFUSED), Called(CARRIED + REFUSED)
    sparsevd.save(model, tmp_path / "model.spvd")
    sparsevd.load(tmp_path / "model.spvd", into=other)
    assert all(same_bits(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    half_a_character = nn.Module()
    half_a_character.register_buffer("\ud800", torch.zeros(1))
    with pytest.raises(ArgumentError, match="half a character"):
        modelfile.pack(half_a_character)


def test_names_from_a_file_are_never_code(capsys):
    """torch.fx writes names into code; what cannot be there becomes another name, and computes the same."""
    graph = small_graphs.images()
    x = torch.randn(2, 2, 8, 8)
    for names in (
        model_files.NAMES,
        [f"{name}.weight" for name in model_files.NAMES],
        [*"ab", "a.b", "a.b.c", "a.b_1"],
    ):
        new = dict(zip(graph.constants, names, strict=False))
        constants = {new.get(name, name): tensor for name, tensor in graph.constants.items()}
        nodes = tuple(replace(node, inputs=tuple(new.get(n, n) for n in node.inputs)) for node in graph.nodes)
        packed = container.Packed(entries_of(constants, "lossless", {}))
        renamed = Graph(nodes, constants, graph.outputs, graph.parameters)
        packed.graph = described(renamed, [entry.name for entry in packed.entries])
        torch.testing.assert_close(outputs(modelfile.rebuild(container.encode(packed)), x), [graph(x)])
    assert capsys.readouterr().out == ""


def test_integers_and_negative_eps_in_a_graph(tmp_path):
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.offset)

    model, x = Counts().eval(), torch.randn(3, 2)
    sparsevd.save(model, tmp_path / "model.spvd", example=x)
    torch.testing.assert_close(outputs(sparsevd.load(tmp_path / "model.spvd"), x), outputs(model, x))
    model.norm.eps = -1e-5
    with pytest.raises(GraphError, match="eps must be non-negative, but got -1e-05"):
        modelfile.pack(model, example=x)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("images", "0d22258895bb7545"),
        ("functions", "2afac91bdee45b1c"),
        ("words", "cea660354d5f63db"),
        ("volumes", "06557d0c31c93fa0"),
    ],
)
def test_graphs_are_the_bytes_that_they_were_in_the_first_files(name, digest):
    graph = getattr(small_graphs, name)()
    data = described(graph, list(graph.constants))
    assert hashlib.sha256(data).hexdigest()[:16] == digest
    again = graph_of(data, graph.constants, 2**40)
    assert [(node.op, node.attributes, node.shape) for node in again.nodes] == [
        (node.op, node.attributes, node.shape) for node in graph.nodes
    ]


def test_a_convolution_by_a_number_is_refused():
    settings = {"stride": (), "padding": (), "dilation": (), "groups": 1}
    graph = Graph(
        (costly.source(3), Node("y", "conv", ("x", "w"), settings, (-1, 3))), {"w": torch.tensor(1.0)}, ("y",)
    )
    packed = container.Packed(entries_of(graph.constants, "lossless", {}), described(graph, ["w"]))
    with pytest.raises(FormatError, match="conv 'conv_1' does not fit its inputs"):
        modelfile.rebuild(container.encode(packed))


@functools.cache
def with_graph() -> container.Packed:
    torch.manual_seed(0)
    return modelfile.pack(small_model(), example=torch.zeros(1, 1, 8, 8), precision=2)[1]


@quick
@given(st.data())
def test_damaged_graphs_never_crash(data):
    packed = replace(with_graph())
    changed = bytearray(packed.graph)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    packed.graph = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    packed.extra = data.draw(st.integers(0, 1))
    with suppress(FormatError):
        modelfile.rebuild(container.encode(packed, choose_widths=False))


# Damaged and hostile files


def test_every_truncation_and_every_flipped_bit_is_noticed():
    data, _ = modelfile.pack(small_model(), precision=4)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            modelfile.unpack(data[:length])
    for i in range(len(data)):
        with pytest.raises(FormatError):
            modelfile.unpack(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])


def survives(data: bytes) -> str:
    """Decode; anything but a state_dict or a FormatError is a bug."""
    try:
        state = modelfile.unpack(data)
    except FormatError:
        return "refused"
    assert (
        sum(tensor.numel() for tensor in state.values()) * 4
        <= container.FREE_BYTES + len(data) * container.MOST_PER_BYTE
    )
    return "read"


@quick
@given(st.data())
def test_resealed_changes_never_crash(data):
    """The checksum is put right again, so that the changes get past it."""
    torch.manual_seed(0)
    content = bytearray(modelfile.pack(small_model(), precision=4)[0][FRAME:])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    survives(sealed(bytes(content[: data.draw(st.integers(0, len(content)))])))


@quick
@given(st.binary(max_size=200))
def test_random_content_never_crashes(content):
    survives(sealed(content))


def header_file(header: bytes) -> bytes:
    """A file with this header and nothing after it."""
    with closing(PythonCoder()) as coder:
        coder.prime(container.PRIME)
        coder.code_bytes(bytearray([len(header)]))
        coder.code_bytes(bytearray(header))
        return sealed(coder.finish())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "cut off"),
        (b"\x05ab", "cut off"),
        (b"\x00\x01name", "name in its header is cut off"),
        (b"\x00\x01\xff\xfe\n\x01\x00\x17", "not text"),
        (b"\x00\x02a\n\x01\x00\x17a\n\x01\x00\x17", "twice"),
        (b"\x00\x01a\n\x3d\x00\x17", "unknown type"),
        (b"\x00\x01a\n\x0e\x00\x17", "unknown type"),
        (b"\x00\x01a\n\x03\x00", "does not come before"),
        (b"\x00\x01a\n\x01\x11" + b"\x01" * 17 + b"\x17", "17 dimensions"),
        (b"\x00\x01a\n\x01\x00\x18", "24 mantissa bits"),
        (b"\x00\x01a\n\x02\x01\x05\x00\x00", "step 0"),
        (b"\x00\x01a\n\x02\x01\x05\x7f\x80", "step inf"),
        (b"\x00\x01a\n\x02\x01\x05\xbf\x80", "step -1"),
        (b"\x00\x01a\n\x01\x02\x05\x05\x17\x06", "wider than its 5 columns"),
        (b"\x00\x01a\n\x01\x01" + b"\xff" * 10 + b"\x01\x17", "number in its header is damaged"),
        (b"\x00\x01a\n\x01\x01\x80\x80\x80\x80\x10\x17", "claim to hold"),
        (b"\x00\x01a\n\x00\x02\x80\x80\x80\x80\x10\x00", "claim to hold"),
        (b"\x00\x00extra", "longer than what it describes"),
    ],
)
def test_hostile_headers_are_refused(header, message):
    with pytest.raises(FormatError, match=message):
        modelfile.unpack(header_file(header))


def test_an_alias_has_the_type_of_what_it_is():
    with pytest.raises(FormatError, match="of another type"):
        modelfile.unpack(header_file(b"\x00\x02a\n\x00\x01\x01b\n\x27\x00"))


# What a file may take


def test_a_file_that_needs_more_says_how_much_and_is_read_when_that_is_allowed(tmp_path):
    path = tmp_path / "large.spvd"
    state = Holder({"w": torch.zeros(1 << 12, 1 << 13)})  # 128 MiB
    sparsevd.save(state, path)
    assert path.stat().st_size == FRAME + (1 << 14)  # padded: 4096 bytes of tensor for each of the file
    assert not sparsevd.load(path, into=state).tensor0.any()
    path.write_bytes(sealed(path.read_bytes()[FRAME:-8]))  # as a file of other writers may be
    with pytest.raises(FormatError, match="take 134,217,728 bytes, and 134,184,960 are allowed.*max_bytes=134217728"):
        sparsevd.load(path, into=state)
    assert not sparsevd.load(path, into=state, max_bytes=1 << 27).tensor0.any()
    with pytest.raises(FormatError, match="and 1,000 are allowed"):
        sparsevd.load(path, into=state, max_bytes=1000)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ArgumentError, match="max_bytes"):
            sparsevd.load(path, into=state, max_bytes=wrong)


def test_a_graph_whose_values_need_more_says_how_much(tmp_path):
    wide = costly.of_graph(costly.source(1), costly.node("y", "expand", ("x",), (-1, 1 << 28), shape=(-1, 1 << 28)))
    with pytest.raises(FormatError, match=r"one example takes 1,073,741,832 bytes .* max_bytes=1073741832"):
        modelfile.rebuild(wide)
    assert modelfile.unpack_graph(wide, max_bytes=1073741832).nodes[1].shape == (-1, 1 << 28)


def test_large_values_are_paid_for_when_a_graph_is_saved():
    graph = Graph(
        (
            costly.source(1),
            costly.node("y", "expand", ("x",), (-1, 1 << 28), shape=(-1, 1 << 28)),
            costly.node("z", "sum", ("y",), (-1,), axes=(1,), keep=False),
        ),
        {},
        ("z",),
    ).check()
    data, packed = modelfile.pack(nn.Module(), graph=graph)
    assert packed.values == 2 * (1 << 30) + 4
    assert len(data) == FRAME + -(-(packed.values - container.FREE_BYTES) // 4096)
    assert len(modelfile.unpack_graph(data).nodes) == 3


def test_without_c_a_file_of_many_decisions_is_read_only_if_allowed(monkeypatch):
    """The encoder pays for them, so that every file it makes can be read; what does not pay is refused at once."""
    monkeypatch.setattr(adaptive, "FREE_DECISIONS", 1 << 16)
    monkeypatch.setattr(container, "FREE_DECISIONS", 1 << 16)
    model = Holder({"w": torch.zeros(100_000), "ones": torch.ones(60, 60), "grid": torch.ones(50, 60)})
    data, _ = modelfile.pack(model)
    unpaid = sealed(data[FRAME:].rstrip(b"\0"))
    assert len(unpaid) < len(data) < 300
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert modelfile.unpack(data)["tensor1"].all()
    started = time.thread_time()
    with pytest.raises(FormatError, match="long without the compiled kernels.* give max_bytes"):
        modelfile.unpack(unpaid)
    assert time.thread_time() - started < 2  # not that of a hundred thousand decisions
    assert modelfile.unpack(unpaid, max_bytes=1 << 20)["tensor1"].all()


@pytest.mark.long
def test_small_files_that_ask_for_much_take_little():
    """Each of them took seconds to minutes, or gigabytes; here in a process of its own, whose memory is limited."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "fuzz.costly"]
    result = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["file"] for one in found] == list(costly.COSTLY)
    slowest = max(found, key=lambda one: one["seconds"])
    assert slowest["seconds"] < 10, slowest


@needs_c
@pytest.mark.parametrize(
    "name", ["a vector of zeros", "two long rows", "a long column", "many decisions", "many bytes"]
)
def test_small_files_that_ask_for_much_take_little_without_c(name):
    data = costly.COSTLY[name]()
    started = time.thread_time()
    with model_files.decoding_with("python"), pytest.raises(FormatError, match="long without the compiled kernels"):
        modelfile.unpack(data)
    assert time.thread_time() - started < 2


@needs_c
@pytest.mark.parametrize(("decoder", "inputs"), [("c", 301), ("python", 20)])
def test_mutants_are_read_or_refused(decoder, inputs, monkeypatch):
    """The short form of `python -m fuzz.model_files`."""
    monkeypatch.setattr(model_files, "SHARES", (1, 10, 50, 300))
    trial = model_files.run(inputs, seed=0, decoder=decoder)
    assert trial.inputs == inputs
    assert 0 < trial.refused < inputs


def test_a_header_of_impossible_length_is_refused():
    for length, message in ((b"\xff\xff\xff\x7f", "its header claims"), (b"\xff" * 6, "length of its header")):
        with closing(PythonCoder()) as coder:
            coder.prime(container.PRIME)
            for byte in length:
                coder.code_bytes(bytearray([byte]))
            content = coder.finish()
        with pytest.raises(FormatError, match=message):
            modelfile.unpack(sealed(content))


def test_the_decoder_is_clean_under_the_sanitisers(tmp_path):
    """Random bytes through the C decoder, with every read, write and overflow watched."""
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    trivial = tmp_path / "trivial.c"
    trivial.write_text("int main(void) { return 0; }")
    trial = ["cc", *checks, str(trivial), "-o", str(tmp_path / "trivial")]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("this compiler has no sanitisers")
    sources = [str(Path(kernels.__file__).parent / "coder.c"), str(Path(__file__).parent / "coder_under_sanitisers.c")]
    subprocess.run(["cc", "-std=gnu11", "-O1", "-g", *checks, *sources, "-o", str(tmp_path / "check")], check=True)
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) > 400
