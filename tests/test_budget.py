"""What the user can afford, after training: a share of zeros, an error, a loss, a metric, bytes."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd import modelfile
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior import posteriors


def problem(n=1500, seed=0):
    """Three of thirty inputs decide the class."""
    x = torch.randn(n, 30, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + 0.7 * x[:, 1] - 0.5 * x[:, 2] > 0).long()


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2)))
    config = sparsevd.FitConfig(epochs=12, batch_size=50, learning_rate=1e-2, drop_from=1.0)
    sparsevd.fit(model, problem(), None, config, progress=False)
    return model


def zeros(network):
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def error(network, seed=7):
    return sparsevd.evaluate(network, problem(1000, seed)).error


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.98])
def test_a_sparsity_is_hit_over_all_layers(trained, share):
    for pruned in (
        sparsevd.prune(trained, sparsity=share),
        sparsevd.prune(trained, budget=sparsevd.Budget(sparsity=share)),
    ):
        assert zeros(pruned) == pytest.approx(share, abs=1 / 768)
    log_alpha = torch.cat([each.log_alpha().flatten() for each in posteriors(trained)])
    gone = torch.cat([(sparsevd.prune(trained, sparsity=share)[i].weight == 0).flatten() for i in (0, 2)])
    assert not gone.any() or log_alpha[gone].min() >= log_alpha[~gone].max()  # the largest first


def test_all_weights_can_go(trained):
    with pytest.warns(SparseVDWarning, match="lost every one"):
        assert zeros(sparsevd.prune(trained, sparsity=1.0)) == 1.0


@pytest.mark.parametrize("share", [95, 1.5, -0.1, math.nan])
def test_a_sparsity_that_is_no_share_is_refused(trained, share):
    meant = r".*did you mean 0\.95\?" if share == 95 else ""
    for ask in (lambda: sparsevd.prune(trained, sparsity=share), lambda: sparsevd.Budget(sparsity=share)):
        with pytest.raises(ArgumentError, match=f"sparsity={share!r} must be a share.*0 to 1{meant}"):
            ask()


def test_what_is_lost_for_good_does_not_come_back(trained):
    model = copy.deepcopy(trained)
    for each in posteriors(model):
        each.drop(torch.arange(each.theta.numel()).view_as(each.theta) % 4 != 0)
    with pytest.warns(SparseVDWarning, match=r"sparsity=0.5 is below the 75.00 % of the weights"):
        assert zeros(sparsevd.prune(model, sparsity=0.5)) == 0.75


@pytest.mark.parametrize("allowed", [0.3, 1.0, 5.0])
def test_the_sparsest_network_within_an_error(trained, allowed):
    base = error(sparsevd.prune(trained, threshold=math.inf))
    budget = sparsevd.Budget(max_error_increase=allowed)
    pruned = sparsevd.prune(trained, budget=budget, data=problem(1000, 7))
    assert error(pruned) <= base + allowed
    assert zeros(pruned) >= zeros(sparsevd.prune(trained))  # the paper's threshold costs nothing here
    # And hardly any sparser one would do: no cut that leaves a fifth fewer weights keeps to it.
    left = 1 - zeros(pruned)
    assert error(sparsevd.prune(trained, sparsity=1 - 0.8 * left)) > base + allowed


def test_more_may_be_lost_for_more_zeros(trained):
    data = problem(1000, 7)
    shares = [
        zeros(sparsevd.prune(trained, budget=sparsevd.Budget(max_error_increase=allowed), data=data))
        for allowed in (0.0, 1.0, 10.0)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]


def test_the_reference_may_be_a_network_or_its_error(trained):
    data = problem(1000, 7)
    worse = sparsevd.prune(trained, sparsity=0.995)
    by_network = sparsevd.Budget(max_error_increase=0.5, reference=worse)
    by_error = sparsevd.Budget(max_error_increase=0.5, reference=error(worse))
    first, second = (zeros(sparsevd.prune(trained, budget=each, data=data)) for each in (by_network, by_error))
    assert first == second
    assert first > zeros(sparsevd.prune(trained, budget=sparsevd.Budget(max_error_increase=0.5), data=data))


def test_loss_and_metric(trained):
    data = problem(1000, 7)

    def accuracy(output, target):
        return (output.argmax(1) == target).float().mean()

    pruned = sparsevd.prune(trained, budget=sparsevd.Budget(max_loss_increase=0.02), data=data, loss=F.cross_entropy)
    base = sparsevd.evaluate(sparsevd.prune(trained, threshold=math.inf), data)
    assert sparsevd.evaluate(pruned, data).loss <= base.loss + 0.02
    by_metric = sparsevd.Budget(max_metric_decrease=0.01, metric=accuracy)
    by_error = sparsevd.Budget(max_error_increase=1.0)
    assert zeros(sparsevd.prune(trained, budget=by_metric, data=data)) == pytest.approx(
        zeros(sparsevd.prune(trained, budget=by_error, data=data)), abs=0.01
    )


@pytest.mark.filterwarnings("ignore:of .* kept weights:sparsevd.errors.SparseVDWarning")  # with no cut at all
def test_bytes(trained):
    """As few zeros as fit."""

    def size_at(threshold):
        model = copy.deepcopy(trained)
        model[0].threshold = model[2].threshold = threshold
        return len(modelfile.pack(model, precision="posterior")[0])

    limit = int(0.8 * size_at(math.inf))
    pruned = sparsevd.prune(trained, budget=sparsevd.Budget(max_bytes=limit))
    assert size_at(sparsevd.Budget(max_bytes=limit).threshold_of(trained)) <= limit
    with pytest.warns(SparseVDWarning, match=r"bytes"):
        sparsevd.prune(trained, budget=sparsevd.Budget(max_bytes=10))
    assert 0 < zeros(pruned) < 1
    assert zeros(sparsevd.prune(trained, budget=sparsevd.Budget(max_bytes=10**6))) == 0
    within = sparsevd.Budget(max_bytes=10**6, max_error_increase=0.5)
    assert error(sparsevd.prune(trained, budget=within, data=problem(1000, 7))) < 6


def test_a_budget_that_cannot_be_kept_ends_in_the_best_and_a_sentence(trained):
    data = problem(1000, 7)
    with pytest.warns(SparseVDWarning, match=r"cannot be kept; the best that was found has .* zeros, error .*\n"):
        pruned = sparsevd.prune(trained, budget=sparsevd.Budget(max_error_increase=0.0, reference=0.0), data=data)
    assert error(pruned) == error(sparsevd.prune(trained, threshold=math.inf))


def test_the_search_leaves_the_model_as_it_was(trained):
    before = copy.deepcopy(trained.state_dict())
    training = trained.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsevd.prune(trained, budget=sparsevd.Budget(max_error_increase=1.0), data=problem(500, 7))
    assert [layer.threshold for layer in (trained[0], trained[2])] == [3.0, 3.0]
    assert trained.training == training
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.state_dict().items())


def test_mistakes(trained):
    with pytest.raises(ArgumentError, match="a budget needs a limit: give sparsity"):
        sparsevd.Budget()
    with pytest.raises(ArgumentError, match="max_error_increase=-1 must be zero or a positive"):
        sparsevd.Budget(max_error_increase=-1)
    with pytest.raises(ArgumentError, match="give metric="):
        sparsevd.Budget(max_metric_decrease=0.1)
    with pytest.raises(ArgumentError, match="give held-out data"):
        sparsevd.prune(trained, budget=sparsevd.Budget(max_error_increase=1.0))
    with pytest.raises(ArgumentError, match="give one of them"):
        sparsevd.prune(trained, threshold=3.0, sparsity=0.5)
    with pytest.raises(ArgumentError, match="data: only a budget is measured"):
        sparsevd.prune(trained, sparsity=0.5, data=problem(10))
    by_loss, by_error = sparsevd.Budget(max_loss_increase=1.0, reference=5.0), sparsevd.Budget(max_error_increase=1.0)
    with pytest.raises(ArgumentError, match="reference=5.0 is an error"):
        sparsevd.prune(trained, budget=by_loss, data=problem(10))
    numbers = torch.randn(20, 30), torch.randn(20, 2)
    with pytest.raises(ArgumentError, match="max_error_increase is for classification"):
        sparsevd.prune(trained, budget=by_error, data=numbers, loss=F.mse_loss)


def test_held_out_examples_of_one_class_are_said(trained):
    x, y = problem(300, 3)
    budget = sparsevd.Budget(max_error_increase=5.0)
    with pytest.warns(SparseVDWarning, match=r"all \d+ held-out examples are of class 1, so the budget says nothing"):
        sparsevd.prune(trained, budget=budget, data=(x[y == 1], y[y == 1]))


def test_held_out_data_of_another_shape_is_refused_in_a_sentence(trained):
    budget = sparsevd.Budget(max_error_increase=5.0, reference=nn.Linear(7, 2))
    with pytest.raises(ArgumentError, match="that a budget is compared with cannot be measured on the held-out data"):
        sparsevd.prune(trained, budget=budget, data=problem(100))
