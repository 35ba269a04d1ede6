"""`threshold="auto"`: the price of a zero in the bound, the cut that it chooses, and the data that checks it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior import equations, posteriors
from sparsevd.training.price import PRICE_SHARE, cheap_threshold, harm
from test_budget import error, problem, zeros

KNOWN = {3.0: 0.0012, 2.0: 0.0075, 1.0: 0.048, 0.5: 0.12, 0.0: 0.29, -1.0: 1.29}


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2)))
    sparsevd.fit(
        model, problem(), None, sparsevd.FitConfig(epochs=30, batch_size=50, learning_rate=1e-2), progress=False
    )
    return model


@pytest.mark.parametrize("log_alpha", KNOWN)
def test_the_price_is_what_a_minimiser_finds(log_alpha):
    """The bound of one weight under a quadratic likelihood, minimised from scratch; no formula of the price in it."""
    assert equations.price(torch.tensor(log_alpha)).item() == pytest.approx(KNOWN[log_alpha], rel=0.05)
    a = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(equations.negative_kl(a), a)[0].item()
    theta0, alpha = 0.7, math.exp(log_alpha)
    h = 2 * slope / (alpha * theta0**2)  # the curvature and the optimum of the data for which log α ends there
    best = theta0 * (1 + alpha)
    pair = torch.tensor([theta0 * 1.3, math.log(alpha * theta0**2) - 0.2], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([pair], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        theta, log_sigma2 = pair
        expected = 0.5 * h * ((theta - best) ** 2 + log_sigma2.exp())
        return expected - equations.negative_kl(log_sigma2 - 2 * theta.abs().log())

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    assert pair[0].item() == pytest.approx(theta0, rel=1e-3)
    gone = 0.5 * h * best**2  # θ = 0 without noise, and no KL
    assert equations.price(torch.tensor(log_alpha)).item() == pytest.approx(gone - loss().item(), rel=1e-3)


def test_the_price_of_extremes():
    prices = equations.price(torch.tensor([-80.0, -4.0, 40.0, 175.0]))
    assert prices.dtype is torch.float64
    assert prices[0] > 1e30
    assert prices[1] > 20
    assert 0 <= prices[3] <= prices[2] < 1e-15
    grid = equations.price(torch.linspace(-10, 10, 500))
    assert (grid.diff() <= 0).all()  # the larger α, the cheaper


def test_the_cut_spends_its_sum_and_no_more(trained):
    pairs = [(each.theta, each.log_sigma2) for each in posteriors(trained)]
    log_alpha = torch.cat([each.log_alpha().flatten() for each in posteriors(trained)]).double()
    for share in (1e-4, 1e-3, 1e-2, 0.1):
        threshold = cheap_threshold(pairs, 3.0, share)
        allowed = share * sparsevd.kl(trained).item()
        spent = equations.price(log_alpha[log_alpha > threshold + 1e-6]).sum().item()
        dearest_left = equations.price(log_alpha[log_alpha <= threshold + 1e-6].max()).item()
        assert threshold <= 3
        assert spent <= allowed * (1 + 1e-5) < spent + dearest_left + 1e-9


def test_auto_finds_more_zeros_at_the_same_error(trained):
    own, auto = sparsevd.prune(trained), sparsevd.prune(trained, threshold="auto", data=problem(1000, 7))
    assert zeros(auto) >= zeros(own)
    assert error(auto) <= error(own) + 0.3
    assert zeros(sparsevd.prune(trained, threshold="auto")) == zeros(auto)  # the same without data, unchecked


def test_auto_never_keeps_more_than_the_threshold_of_the_network():
    """What lies just beyond that costs too, and may use up the sum; what is zero costs nothing."""
    model = sparsevd.sparsify(nn.Linear(10, 10))
    pair = [(model.weight, model.log_sigma2)]
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.log_sigma2.fill_(3.5)
    assert cheap_threshold(pair, 3.0) == 3.0  # an empty network has nothing to spend
    with torch.no_grad():
        model.log_sigma2[0] = -4.0
        model.log_sigma2[1, 0] = 2.5
    assert cheap_threshold(pair) == 3.5
    assert cheap_threshold(pair, 3.0) == 3.0
    assert sparsevd.summary(sparsevd.prune(model, threshold="auto")).kept == 11
    with torch.no_grad():
        model.weight[2:] = 0
        model.weight[1, 1:] = 0
    assert cheap_threshold(pair, 3.0) == -4.0
    assert sparsevd.summary(sparsevd.prune(model, threshold="auto")).kept == 10


def test_data_that_objects_is_heard():
    """A network far from its optimum: noise on the weights that it needs makes them look cheap."""
    model = sparsevd.sparsify(nn.Linear(30, 2))
    with torch.no_grad():
        model.weight.fill_(1e-4)
        model.weight[:, :3] = torch.tensor([[-1.0, -0.7, 0.5], [1.0, 0.7, -0.5]])
        model.log_sigma2.fill_(-40.0)
        model.log_sigma2[:, :3] = 2 * model.weight[:, :3].abs().log() + 2.9
        model.bias.zero_()
    with pytest.warns(SparseVDWarning, match=r"the error rises from .* to .* % \(\d+ examples lost, .*own threshold"):
        checked = sparsevd.prune(model, threshold="auto", data=problem(1000, 7))
    assert zeros(checked) == 0
    assert error(checked) < 1
    assert zeros(sparsevd.prune(model, threshold="auto")) == 0.1  # nobody objects


def test_harm_is_paired():
    """Half of the examples are wrong in both networks: that is no noise in their difference."""
    x, y = problem(1000)

    class Says(nn.Module):
        def __init__(self, wrong):
            super().__init__()
            self.register_buffer("wrong", wrong)
            self.at = 0

        def forward(self, rows):
            where = slice(self.at, self.at + len(rows))
            self.at = (self.at + len(rows)) % 1000
            return F.one_hot(torch.where(self.wrong[where], 1 - y[where], y[where]), 2).float()

    half = torch.arange(1000) % 2 == 0
    worse, equal = half.clone(), half.clone()
    worse[1:21:2] = True  # ten more
    equal[1:21:2], equal[0:20:2] = True, False
    assert harm(Says(half), Says(half), (x, y)) is None
    assert harm(Says(half), Says(equal), (x, y)) is None
    assert harm(Says(half), Says(worse), (x, y)) == "the error rises from 50.00 to 51.00 % (10 examples lost, 0 won)"


def test_harm_of_a_loss():
    x = torch.randn(500, 3)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(500, 1)
    networks = [nn.Linear(3, 1, bias=False) for _ in range(3)]
    for network, value in zip(networks, (1.0, 1.0001, 1.3), strict=True):
        nn.init.constant_(network.weight, value)
    assert harm(networks[0], networks[1], (x, y), F.mse_loss) is None
    assert harm(networks[0], networks[2], (x, y), F.mse_loss).startswith("the loss rises from 0.0")


def test_mistakes(trained):
    with pytest.raises(ArgumentError, match="threshold='lowest' must be a number or 'auto'"):
        sparsevd.prune(trained, threshold="lowest")
    with pytest.raises(ArgumentError, match="give one of them"):
        sparsevd.prune(trained, threshold="auto", sparsity=0.5)
    with pytest.raises(ArgumentError, match="data: only a budget is measured"):
        sparsevd.prune(trained, threshold=1.0, data=problem(10))
    assert 0 < PRICE_SHARE < 0.01
