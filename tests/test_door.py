"""Nothing unchecked reaches C: what does not fit is refused, or takes torch's own way with torch's own answer."""

import ast
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import sparsevd
from networks import pruned
from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.kernels.coder import NativeCoder
from sparsevd.kernels.inference import Geometry, SparseProduct
from sparsevd.runtime import acceleration, timing
from sparsevd.runtime.layers import InferenceLayer

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
PACKAGE = Path(sparsevd.__file__).parent


def odd_tensors(shape):
    """Tensors that C must not be given as they lie, by what is odd about them."""
    values = torch.randn(shape)
    freed, short = torch.randn(shape), torch.randn(shape)
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(4)
    return {
        "half": values.half(),
        "double": values.double(),
        "strided": torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
        "expanded": torch.randn(*shape[:-1], 1).expand(shape),
        "negated": torch._neg_view(values),
        "zeros without memory": torch._efficientzerotensor(shape),
        "freed": freed,
        "short": short,
        "meta": values.to("meta"),
        "sparse": values.to_sparse(),
        "subclass": values.as_subclass(type("Own", (torch.Tensor,), {})),
    }


@pytest.mark.parametrize("kind", odd_tensors((3, 4)))
def test_odd_tensors_are_not_read_as_they_lie(kind):
    tensor = odd_tensors((3, 4))[kind]
    assert not door.readable(tensor) or not tensor.is_contiguous()
    with pytest.raises(ArgumentError, match="x must be a contiguous float32 tensor of shape"):
        door.address("x", tensor, (3, 4))


def test_plain_tensors_pass():
    for tensor in (torch.randn(3, 4), nn.Parameter(torch.randn(3, 4)), torch.randn(6, 4)[2:5], torch.empty(0, 4)):
        assert door.suits(tensor)
        assert door.address("x", tensor, tensor.shape) == tensor.data_ptr()
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert door.suits(images)
    assert door.addresses("images", [images]) == [images.data_ptr()]


@pytest.mark.parametrize(
    "kind", ["half", "double", "strided", "expanded", "negated", "zeros without memory", "subclass"]
)
def test_a_plain_copy_has_the_same_numbers(kind):
    tensor = odd_tensors((3, 4))[kind]
    copy = door.plain(tensor)
    assert door.address("copy", copy, (3, 4)) == copy.data_ptr()
    assert torch.equal(copy, torch.zeros(3, 4).add(tensor.float()))


@pytest.mark.parametrize("kind", ["freed", "short", "meta", "sparse"])
def test_what_has_no_numbers_is_not_copied(kind):
    with pytest.raises(ArgumentError):
        door.plain(odd_tensors((3, 4))[kind])


# ---- the layers ----


@pytest.mark.parametrize("shape", [(4, 6), (400, 1600), (4, 9), (0, 6), (4, 0), ()])
def test_an_input_of_another_width_is_refused(shape):
    layer = sparsevd.sparsify(nn.Linear(8, 500)).train()
    with pytest.raises((RuntimeError, ArgumentError), match="shape|mat1|size|dimension|1D"):
        layer(torch.randn(shape))


def test_training_on_data_of_another_width_is_refused():
    data = torch.randn(100, 6), torch.randint(0, 2, (100,))
    for dtype in ("float32", "bfloat16"):
        config = sparsevd.FitConfig(epochs=1, variance_dtype=dtype)
        with pytest.raises(RuntimeError, match="100x6 and 8x2"):
            sparsevd.fit(sparsevd.sparsify(nn.Linear(8, 2)), data, None, config, progress=False)


@pytest.mark.parametrize("kind", ["expanded", "strided", "size one", "half", "other size"])
def test_odd_biases_give_what_torch_gives(kind):
    layer = sparsevd.sparsify(nn.Linear(8, 500), initial_log_sigma2=-80.0).train()
    layer.bias = nn.Parameter(
        {
            "expanded": torch.randn(1).expand(500),
            "strided": torch.randn(1000)[::2],
            "size one": torch.randn(1),
            "half": torch.randn(500).half(),
            "other size": torch.randn(499),
        }[kind]
    )
    x = torch.randn(4, 8)
    if kind in ("half", "other size"):
        with pytest.raises(RuntimeError):
            layer(x)
        return
    out = layer(x)
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    out.sum().backward()
    assert layer.bias.grad.shape == layer.bias.shape


def test_an_odd_gradient_is_copied():
    layer = sparsevd.sparsify(nn.Linear(8, 5), initial_log_sigma2=-80.0).train()
    x = torch.randn(4, 8)
    for gradient in (torch._neg_view(torch.ones(4, 5)), torch.ones(1, 1).expand(4, 5)):
        layer.zero_grad()
        layer(x).backward(gradient)
        torch.testing.assert_close(layer.weight.grad, gradient.clone().t() @ x)


def test_weights_and_noise_of_different_shapes_are_refused():
    layer = sparsevd.sparsify(nn.Linear(8, 1200)).train()
    for shape in ((600, 8), (1, 8), (8,), (1200, 1)):
        layer.log_sigma2 = nn.Parameter(torch.full(shape, -8.0))
        with pytest.raises(ArgumentError, match="1200, 8"):
            sparsevd.kl(layer)
        with pytest.raises(ArgumentError, match="1200, 8"):
            layer(torch.randn(3, 8))


def test_a_contracted_layer_knows_its_width():
    from sparsevd.posterior import posteriors
    from sparsevd.training.contraction import contracted

    model = sparsevd.sparsify(nn.Linear(8, 6)).train()
    gone = torch.zeros(6, 8, dtype=torch.bool)
    gone[:, :5] = True
    posteriors(model)[0].drop(gone)
    optimizer = torch.optim.Adam(model.parameters())
    with contracted(model, posteriors(model), optimizer):
        assert model.part is not None
        assert model(torch.randn(2, 8)).shape == (2, 6)
        with pytest.raises(ArgumentError, match="takes 8 inputs"):
            model(torch.randn(2, 11))


# ---- the kernels themselves ----


@built
def test_kernels_compare_shapes():
    long, short = torch.randn(1200, 8), torch.randn(600, 8)
    with pytest.raises(ArgumentError, match="log_σ².*1200, 8.*600, 8"):
        kernels.kl_with_gradients(long, short)
    with pytest.raises(ArgumentError, match="δ.*1200, 8"):
        kernels.sample_(long, short, 1)
    with pytest.raises(ArgumentError, match="ε"):
        kernels.sample_(long, long.clone(), 1, short)
    with pytest.raises(ArgumentError, match="gradient"):
        kernels.times_variance_(short, long)
    eight = [torch.rand(1200, 8) for _ in range(8)]
    for place in range(8):
        tensors = [*eight]
        tensors[place] = short
        with pytest.raises(ArgumentError):
            kernels.adam_step_(*tensors, settings=[0.1] * 7)
    with pytest.raises(ArgumentError, match="8 tensors and 7 settings"):
        kernels.adam_step_(*eight, settings=[0.1] * 6)
    with pytest.raises(ArgumentError, match="as float32 or bfloat16"):
        kernels.variance(long, torch.float16)
    with pytest.raises(ArgumentError, match="instruction set 99"):
        kernels.variance(long, torch.float32, 99)
    with pytest.raises(ArgumentError, match="bias"):
        kernels.linear_forward(torch.randn(2, 8), short, torch.randn(1), short.clone(), 0)


@built
def test_an_optimizer_state_of_another_shape_is_refused():
    from sparsevd.training.optimizer import BoundAdam

    model = sparsevd.sparsify(nn.Linear(8, 4)).train()
    optimizer = BoundAdam(model, 1e-3)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(1, 8)
    model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(ArgumentError, match="1, 8"):
        optimizer.step()


@built
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_no_number_stays_no_number_as_bfloat16(bits):
    nan = torch.tensor([bits] * 20, dtype=torch.int32).view(torch.float32)
    for instruction_set in kernels.instruction_sets():
        assert kernels.variance(nan, torch.bfloat16, instruction_set).isnan().all()


# ---- inference ----


@built
@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(6), torch.ones(5, 1)])
def test_a_sparse_product_looks_at_its_bias(bias):
    with pytest.raises(ArgumentError, match="bias"):
        SparseProduct(torch.randn(5, 3), bias, Geometry(), (1, 1), 2)


@built
def test_a_sparse_product_looks_at_its_sizes():
    weight = torch.randn(6, 3, 3, 3)
    for arguments in (
        {"size": (0, 5)},
        {"size": (2, 2)},
        {"images": 3},
        {"images": -16},
        {"batch": -1},
        {"geometry": Geometry(groups=4)},
        {"instruction_set": 99},
        {"size": (50_000, 50_000)},
    ):
        with pytest.raises(ArgumentError):
            SparseProduct(weight, None, **{"geometry": Geometry(), "size": (5, 5), "batch": 1, **arguments})
    for settings in ({"stride": (0, 1)}, {"padding": (-1, 0, 0, 0)}, {"dilation": (1, 0)}, {"groups": 0}):
        with pytest.raises(ArgumentError):
            Geometry(**settings)
    product = SparseProduct(weight, None, Geometry(), (5, 5), 2)
    with pytest.raises(ArgumentError, match="150 numbers"):
        product(torch.randn(1, 3, 5, 5), (2, 6, 3, 3))
    with pytest.raises(ArgumentError, match="108"):
        product(torch.randn(2, 3, 5, 5), (1, 6, 3, 3))


@built
def test_a_plan_takes_odd_tensors_for_what_they_mean():
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU()).eval()
    plan = sparsevd.plan(model, torch.randn(3, 8))
    for kind, x in odd_tensors((3, 8)).items():
        if kind in ("half", "double", "meta", "sparse", "freed", "short"):
            with pytest.raises(ArgumentError):
                plan(x)
        else:
            torch.testing.assert_close(plan(x), model(x.as_subclass(torch.Tensor)).detach())


@built
@pytest.mark.parametrize("kind", ["half", "size one", "expanded", "strided"])
def test_accelerate_with_an_odd_bias_gives_what_torch_gives(kind):
    model = nn.Sequential(nn.Linear(64, 500)).eval()
    model[0].weight.data.mul_(torch.rand(500, 64) < 0.02)
    biases = {"size one": torch.randn(1), "expanded": torch.randn(1).expand(500), "strided": torch.randn(1000)[::2]}
    x = torch.randn(2, 64)
    if kind == "half":
        model[0].bias = nn.Parameter(torch.randn(500).half())
        with pytest.raises(ArgumentError, match="does not run on the example"):
            sparsevd.accelerate(model, x)
        return
    model[0].bias = nn.Parameter(biases[kind])
    torch.testing.assert_close(sparsevd.accelerate(model, x)(x), model(x).detach(), rtol=1e-4, atol=1e-4)


@built
def test_an_accelerated_network_is_a_snapshot(monkeypatch):
    from sparsevd.runtime.layers import InferenceLayer

    model = nn.Linear(64, 50).eval()
    x = torch.randn(3, 64)
    before = model(x).detach()
    layer = InferenceLayer(model, model.weight, model.bias)
    torch.testing.assert_close(layer(x), before)
    with torch.no_grad():
        model.bias.add_(1)
        model.weight.zero_()
    torch.testing.assert_close(layer(x), before)
    for name in ("bias", "weight"):  # and what is done to its own tensors is noticed
        getattr(layer, name).add_(1.0)
        torch.testing.assert_close(layer(x), layer.dense(x), rtol=1e-4, atol=1e-4)


# ---- the coder ----


@built
def test_the_coder_looks_at_its_arrays():
    values = np.zeros((3, 4), np.int32)
    good = {"values": values, "width": 0, "plane": 0, "hint": None, "mantissa": -1}
    for wrong in (
        {"values": values.astype(np.int64)},
        {"values": np.asfortranarray(values)},
        {"values": values.reshape(-1)},
        {"values": values[:, ::2]},
        {"width": -1},
        {"width": 5},
        {"plane": 2**40},
        {"mantissa": 24},
        {"mantissa": -2},
        {"hint": np.zeros(3, np.int32)},
        {"hint": np.zeros(4, np.int64)},
        {"hint": np.full(4, -1, np.int32)},
    ):
        with pytest.raises(ArgumentError):
            NativeCoder().code_matrix(**{**good, **wrong})
    for empty in ((3, 0), (0, 4)):  # of a tensor such as 3×0×5×7
        NativeCoder().code_matrix(np.zeros(empty, np.int32), 7, 35, None, -1)
    frozen = np.zeros((3, 4), np.int32)
    frozen.flags.writeable = False
    NativeCoder().code_matrix(**{**good, "values": frozen})  # an encoder only reads
    with pytest.raises(ArgumentError, match="decoder"):
        NativeCoder(b"abc").code_matrix(**{**good, "values": frozen})
    closed = NativeCoder()
    closed.close()
    for use in (closed.finish, closed.account, lambda: closed.code_matrix(**good), lambda: closed.prime(b"a")):
        with pytest.raises(ArgumentError, match="closed"):
            use()


@built
def test_a_forgotten_coder_gives_its_memory_back():
    resource = pytest.importorskip("resource")
    NativeCoder()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        NativeCoder()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; each holds 1,000


def test_only_this_package_calls_c():
    """Everything that reaches C goes through `sparsevd.kernels`; `bench` calls the C file of the user's network."""
    elsewhere = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if path.parent.name != "kernels" and ("ctypes" in names or any(n.startswith("sparsevd_") for n in names)):
            elsewhere.append(path.relative_to(PACKAGE).as_posix())
    assert elsewhere == ["runs/benchmark.py"]


def looked_at(x, v):
    """Each way in which torch does more with a network than compute it: its name, and what it makes of the network."""

    def dual(network):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(network(forward_ad.make_dual(x, v))).tangent

    return {
        "jit.trace": lambda network: torch.jit.trace(network, x, check_trace=False)(2 * x),
        "jvp": lambda network: torch.func.jvp(network, (x,), (v,))[1],
        "forward_ad": dual,
        "vmap": lambda network: torch.vmap(network, randomness="same")(x),
        "func.grad": lambda network: torch.func.grad(lambda z: network(z).sum())(x),
        "make_fx": lambda network: make_fx(network)(x)(2 * x),
    }


@built
@pytest.mark.parametrize("way", [*looked_at(None, None)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_sees_what_the_network_does(way, monkeypatch):
    """Kernels leave no trace and carry no tangents: whoever asks for them gets torch's own operations."""
    torch.manual_seed(0)
    model = pruned(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)), 0.5)
    x, v = torch.randn(3, 40), torch.randn(3, 40)
    look = looked_at(x, v)[way]
    monkeypatch.setattr(acceleration, "timings", last_is_fastest)
    fast = sparsevd.accelerate(model, x)
    assert fast.plan is not None
    assert {layer.way for layer in fast.modules() if isinstance(layer, InferenceLayer)} == {"sparse"}
    with torch.set_grad_enabled(way == "func.grad"):
        expected = look(model)
        torch.testing.assert_close(look(fast), expected)
        torch.testing.assert_close(look(fast.model), expected)
    with pytest.raises(ArgumentError, match="plan"):
        look(lambda z: fast.plan(z))


@built
def test_training_layers_under_torch_func():
    torch.manual_seed(0)
    layer = sparsevd.sparsify(nn.Linear(6, 5), initial_log_sigma2=-40.0).train()
    x, v = torch.randn(4, 6), torch.randn(4, 6)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(torch.func.jvp(layer, (x,), (v,))[1], v @ layer.weight.T)
    close(torch.vmap(layer, randomness="different")(x), x @ layer.weight.T + layer.bias)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent, v @ layer.weight.T)
    values = dict(layer.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x,)).sum())(values)
    close(found["weight"], x.sum(0).expand(5, 6))


def last_is_fastest(calls, **_):
    for call in calls:
        call()
    return [timing.Timing(1 / i, 1 / i, 1 / i) for i in range(1, len(calls) + 1)]
