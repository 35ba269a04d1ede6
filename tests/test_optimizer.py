"""The optimizer's one pass against its twin: the KL through autograd, and torch's Adam."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd import kernels
from sparsevd.training.optimizer import BoundAdam
from sparsevd.zoo.models import lenet_5_caffe

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")


def small_net():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 4, 17), nn.ReLU())
    return sparsevd.sparsify(net.append(nn.Linear(17, 5)))


def steps(model, optimizer, count=5, seed=0):
    """Steps on the data term alone; the optimizer knows the rest."""
    torch.manual_seed(seed)
    for _ in range(count):
        x, y = torch.rand(8, 1, 6, 6), torch.randint(0, 5, (8,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def twin_steps(model, learning_rate, ratio, beta2, kl_weight, count=5, seed=0):
    """The same with the whole objective through autograd."""
    noise = [p for name, p in model.named_parameters() if name.endswith("log_sigma2")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("log_sigma2")]
    groups = [{"params": rest}, {"params": noise, "lr": learning_rate * ratio}]
    optimizer = torch.optim.Adam(groups, lr=learning_rate, betas=(0.9, beta2))
    torch.manual_seed(seed)
    for _ in range(count):
        x, y = torch.rand(8, 1, 6, 6), torch.randint(0, 5, (8,))
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + kl_weight * sparsevd.kl(model)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("with_kernels", [pytest.param(True, marks=built), False])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_step_is_that_of_adam_on_the_whole_objective(with_kernels, channels_last, monkeypatch):
    model = small_net().train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    expected = twin_steps(twin, 1e-2, 0.3, 0.99, 0.01)
    optimizer = BoundAdam(model, 1e-2, 0.3, 0.99, kl_weight=0.01)
    if not with_kernels:  # of the step; the noise must be the same
        monkeypatch.setattr(optimizer._bound, "_fits", lambda *_: False)
    for mine, theirs in zip(steps(model, optimizer), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)  # rounding grows from step to step
    # The weight of the KL matters here, or the test would not see it.
    other = twin_steps(copy.deepcopy(small_net().train()), 1e-2, 0.3, 0.99, 0.0)
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(other, expected, strict=True))


@built
@pytest.mark.parametrize("instruction_set", kernels.instruction_sets(), ids=lambda one: one.name)
@pytest.mark.parametrize("n", [1, 7, 255, 256, 257, 4099])
def test_every_instruction_set_gives_the_same_step(instruction_set, n):
    theta, log_sigma2 = 0.1 * torch.randn(n), torch.randn(n) - 5
    gradients = torch.randn(2, n).unbind()
    averages = [torch.randn(n), torch.rand(n), torch.randn(n), torch.rand(n)]
    settings = (0.2, 0.9, 0.99, 0.3, 1e-8, 1e-2, 3e-3)
    mine = [t.clone() for t in (theta, gradients[0], *averages[:2], log_sigma2, gradients[1], *averages[2:])]
    kernels.adam_step_(*mine, settings=settings, instruction_set=instruction_set)
    _, *of_kl = kernels.kl_with_gradients(theta, log_sigma2)
    for i, (x, g, extra, rate) in enumerate(zip((theta, log_sigma2), gradients, of_kl, settings[5:], strict=True)):
        g = (g + 0.2 * extra).double()
        m = 0.9 * averages[2 * i].double() + 0.1 * g
        v = 0.99 * averages[2 * i + 1].double() + 0.01 * g * g
        expected = x.double() - rate * m / (v.sqrt() / 0.3 + 1e-8)
        for got, wanted in zip((mine[4 * i], *mine[4 * i + 2 : 4 * i + 4]), (expected, m, v), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_frozen_unused_and_shared_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)

        def forward(self, x):
            return self.tied(self.frozen(self.used(x)))

    net = sparsevd.sparsify(Net())
    net.frozen.requires_grad_(False)
    net.tied.weight = net.used.weight
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    twin = copy.deepcopy(net)
    optimizer, theirs = BoundAdam(net, 1e-2, kl_weight=0.1), torch.optim.Adam(twin.parameters(), lr=1e-2)
    for _ in range(3):
        for model, adam, weight in ((net, optimizer, 0.0), (twin, theirs, 0.1)):
            torch.manual_seed(1)
            adam.zero_grad()
            loss = model.train()(torch.ones(2, 4)).square().mean()
            (loss + weight * sparsevd.kl(model) if weight else loss).backward()
            adam.step()
    expected = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) == (name.startswith("frozen") or name == "unused.bias")
        torch.testing.assert_close(parameter, expected[name], rtol=1e-3, atol=1e-5)


@built
def test_its_state_is_that_of_adam():
    """A checkpoint may be written with kernels and read without them."""
    model = small_net().train()
    optimizer = BoundAdam(model, 1e-2, kl_weight=0.01)
    steps(model, optimizer)
    plain = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups], lr=1e-2, fused=True)
    steps(copy.deepcopy(model), plain)
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=False
    ):
        assert {k: (v.shape, v.dtype) for k, v in mine.items()} == {k: (v.shape, v.dtype) for k, v in theirs.items()}


@built
def test_a_step_holds_no_gradient_of_the_kl():
    """What the pass is for: no second gradient of θ and log σ², and none that survives the step."""
    model = sparsevd.sparsify(lenet_5_caffe()).train()
    optimizer = BoundAdam(model, 1e-3, kl_weight=1e-4)
    F.cross_entropy(model(torch.rand(2, 1, 28, 28)), torch.tensor([0, 1])).backward()
    optimizer.step()
    layers = [module for module in model.modules() if hasattr(module, "log_sigma2")]
    assert layers
    assert all(layer.weight.grad is None and layer.log_sigma2.grad is None for layer in layers)
