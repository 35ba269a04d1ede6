import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError, ConversionError
from sparsevd.training.objective import constant, warm_up


@pytest.fixture
def model():
    return sparsevd.sparsify(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))


def test_kl_sums_the_layers(model):
    torch.testing.assert_close(sparsevd.kl(model), sparsevd.kl(model[0]) + sparsevd.kl(model[2]))


def test_kl_counts_a_shared_layer_once():
    shared = nn.Linear(3, 3)
    model = sparsevd.sparsify(nn.Sequential(shared, nn.ReLU(), shared))
    torch.testing.assert_close(sparsevd.kl(model), sparsevd.kl(model[0]))


def test_kl_of_a_dense_model_is_an_error():
    with pytest.raises(ConversionError, match="sparsify"):
        sparsevd.kl(nn.Linear(2, 2))


def test_elbo_loss_is_mean_nll_plus_beta_kl_over_n(model):
    nll = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 2, (8,)))
    expected = nll.item() + 0.25 * sparsevd.kl(model).item() / 5000
    assert sparsevd.elbo_loss(nll, model, n_train=5000, beta=0.25).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n_train", [0, -1, 1.0, 2.5, "100", None, True, math.nan])
def test_elbo_loss_refuses_a_wrong_n_train(model, n_train):
    with pytest.raises(ArgumentError, match="n_train"):
        sparsevd.elbo_loss(torch.tensor(1.0), model, n_train=n_train)


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf])
def test_elbo_loss_refuses_a_wrong_beta(model, beta):
    with pytest.raises(ArgumentError, match="beta"):
        sparsevd.elbo_loss(torch.tensor(1.0), model, n_train=10, beta=beta)


def test_elbo_loss_refuses_a_loss_per_example(model):
    with pytest.raises(ArgumentError, match="mean over the batch"):
        sparsevd.elbo_loss(torch.ones(3), model, n_train=10)


def test_warm_up_is_zero_then_linear_then_one():
    beta = warm_up(0.2, 0.6)
    assert [round(beta(t), 6) for t in (0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)] == [0, 0, 0.25, 0.5, 1, 1, 1]
    assert warm_up(0.0, 0.0)(0.0) == 1.0
    assert constant(0.7)(0.3) == 0.7


@pytest.mark.parametrize(("start", "end"), [(0.5, 0.4), (-0.1, 0.5), (0.1, 1.5), (math.nan, 1.0)])
def test_warm_up_refuses_a_wrong_range(start, end):
    with pytest.raises(ArgumentError, match="warm-up"):
        warm_up(start, end)
