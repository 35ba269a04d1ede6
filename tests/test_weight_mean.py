"""The mean of the weights over some steps, which a budget looks at: exact, zeros and all, and gone after a look."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.posterior import posteriors
from sparsevd.training.steering import Steering
from sparsevd.training.weight_mean import WeightMean


def network():
    torch.manual_seed(0)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))


def stepped(model, mean, count=4):
    """Some steps, and what the weights and statistics were after each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.5), []
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(20, 4)), torch.randint(3, (20,))).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight[0, 0] = 0  # as what was dropped is kept
        mean.add()
        seen.append(copy.deepcopy(model.state_dict()))
    return seen


def test_the_mean_is_shown_and_then_gone():
    model = network()
    mean = WeightMean(model)
    seen = stepped(model, mean)
    with mean.shown():
        for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var", "3.weight"):
            wanted = torch.stack([state[name] for state in seen]).mean(0)
            torch.testing.assert_close(model.state_dict()[name], wanted)
            assert not torch.equal(model.state_dict()[name], seen[-1][name])
        assert model[0].weight[0, 0] == 0
        assert torch.equal(model[0].log_sigma2, seen[-1]["0.log_sigma2"])  # the noise says what was dropped
    for name, value in model.state_dict().items():
        assert torch.equal(value, seen[-1][name]), name
    mean.begin_anew()
    with mean.shown():
        assert torch.equal(model[0].weight, seen[-1]["0.weight"])
    assert [each.shape for each in mean.statistics()] == []


def test_a_mask_of_minus_infinity_stays_one():
    model = network()
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    mean = WeightMean(model)
    stepped(model, mean)
    with mean.shown():
        assert torch.equal(model.mask, torch.full((3, 3), -torch.inf).triu(1))


def test_it_goes_on_from_its_state_and_refuses_another():
    model = network()
    mean, again = WeightMean(model), WeightMean(model)
    stepped(model, mean)
    state = copy.deepcopy(mean.state_dict())
    assert again.problem_of(state) == ""
    again.load_state_dict(state)
    for each in (mean, again):
        each.add()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in mean.state_dict().items())
    assert again.problem_of({"steering": torch.zeros(19)}) == ""  # of a time before there were means
    again.load_state_dict({})
    assert again.state_dict().keys() == {"mean/steps"}
    assert "how many steps" in again.problem_of({name: value for name, value in state.items() if "steps" not in name})
    assert "how many steps" in again.problem_of(state | {"mean/steps": torch.tensor(-1)})
    assert "another network" in again.problem_of({**state, "mean/of/0.bias": torch.zeros(2)})
    assert "another network" in again.problem_of({"mean/steps": torch.tensor(3)})


@pytest.mark.parametrize("noisy", [True, False])
def test_a_budget_looks_at_the_mean_where_an_error_decides_without_noise(noisy):
    model = network()
    data = torch.randn(300, 4), torch.randint(3, (300,))
    budget = sparsevd.Budget(max_error_increase=50.0)
    judge = budget.judge(model, data, F.cross_entropy)
    steered = Steering(model, posteriors(model), budget, judge, 300, noisy=noisy)
    assert (steered.mean is None) == noisy
    if steered.mean is not None:
        steered.begin()
        seen = stepped(model, steered.mean)
        steered.look(0.01, 1.0, torch.optim.SGD(model.parameters(), 0.1))
        assert steered._best  # what comes back at the end is what was looked at
        torch.testing.assert_close(steered._best["3.weight"], torch.stack([s["3.weight"] for s in seen]).mean(0))
        torch.testing.assert_close(model.state_dict()["3.weight"], seen[-1]["3.weight"])
