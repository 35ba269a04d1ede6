"""The recipe as a state machine: what it says at each part of a run, what it drops, and that zeros stay."""

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import CheckpointError
from sparsevd.posterior import posteriors
from sparsevd.training.schedule import Schedule


def convolutions():
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten()]
    return sparsevd.sparsify(nn.Sequential(*layers)).train()


def matrices():
    torch.manual_seed(2)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2, bias=False))).train()


def schedule(model, n=100, **settings):
    return Schedule(model, sparsevd.FitConfig(**settings), n)


def test_what_holds_at_each_part_of_a_run():
    plan = schedule(
        matrices(),
        n=50,
        warm_up_start=0.1,
        warm_up_end=0.3,
        late_from=0.6,
        log_sigma2_lr_ratio=0.2,
        late_log_sigma2_lr_ratio=5.0,
    )
    assert [plan.at(t).beta for t in (0.0, 0.1, 0.2, 0.3, 1.0)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert [plan.at(t).kl_weight for t in (0.2, 1.0)] == pytest.approx([0.01, 0.02])
    assert [plan.at(t).noise_ratio for t in (0.0, 0.59, 0.6, 1.0)] == [0.2, 0.2, 5.0, 5.0]


def test_when_it_drops():
    plan = schedule(matrices(), warm_up_end=0.3)
    assert [plan.drops_at(t) for t in (0.1, 0.3, 0.9, 1.0)] == [False, True, True, False]
    assert not schedule(matrices(), drop_from=1.0).drops_at(0.5)
    assert not schedule(nn.Linear(2, 2)).drops_at(0.5)


def test_patience_counts_epochs_in_a_row():
    model = convolutions()
    posterior = posteriors(model)[0]
    plan = schedule(model, drop_patience=3, drop_from=0.9)
    with torch.no_grad():
        for each in posteriors(model):
            each.theta.fill_(1.0)
            each.log_sigma2.fill_(0.0)
    above, below = 4.0, 0.0
    course = {0: [above] * 4, 1: [above, above, below, above], 2: [below, above, above, above]}  # whole units
    for epoch in range(4):
        for unit, values in course.items():
            if posterior.alive()[unit].any():
                posterior.log_sigma2.data[unit] = values[epoch]
        assert plan.drop(0.5) == {0: 0, 1: 0, 2: 27, 3: 27}[epoch]
    assert [bool(posterior.alive()[unit].any()) for unit in (0, 1, 2)] == [False, True, False]


def test_whole_inputs_and_units_go_before_single_weights():
    model = convolutions()
    posterior = posteriors(model)[1]
    plan = schedule(model, drop_patience=1, drop_from=0.5)
    with torch.no_grad():
        for each in posteriors(model):
            each.theta.fill_(1.0)
            each.log_sigma2.fill_(0.0)
        posterior.log_sigma2[2] = posterior.log_sigma2[:, 5] = 4.0  # a unit and an input
        posterior.log_sigma2[0, 0, 1, 1] = 4.0  # a single weight
    assert plan.drop(0.4) == 8 * 9 + 4 * 9 - 9
    assert not posterior.alive()[2].any()
    assert not posterior.alive()[:, 5].any()
    assert posterior.alive()[0, 0, 1, 1]
    assert plan.drop(0.5) == 1
    assert not posterior.alive()[0, 0, 1, 1]


def test_an_embedding_loses_single_weights_only():
    """Its rows are tokens, not units that a layer computes."""
    model = sparsevd.sparsify(nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)))
    plan = schedule(model, drop_patience=1, drop_from=0.5)
    with torch.no_grad():
        model[0].log_sigma2[2] = 40.0
        model[2].log_sigma2.fill_(-20.0)
    assert plan.drop(0.4) == 0
    assert plan.drop(0.5) == 3


def test_zeros_stay_zero_against_momentum():
    model = matrices()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = schedule(model, contract=False)
    x = torch.randn(8, 12)
    model(x).square().sum().backward()
    optimizer.step()
    posterior = posteriors(model)[0]
    gone = torch.rand_like(posterior.theta) < 0.5
    posterior.drop(gone)
    with plan.epoch(optimizer):
        optimizer.step()
        assert (posterior.theta[gone] != 0).any()  # its momentum
        plan.keep_zeros()
    assert (posterior.theta[gone] == 0).all()
    assert (posterior.theta[~gone] != 0).all()


def test_a_frozen_layer_loses_nothing():
    model = matrices()
    model[0].requires_grad_(False)
    with torch.no_grad():
        for each in posteriors(model):
            each.log_sigma2.fill_(40.0)
    assert schedule(model, drop_from=0.0, warm_up_end=0.0).drop(0.5) == 32
    assert posteriors(model)[0].alive().all()


def test_frozen_weights_with_free_noise_are_not_made_zero():
    model = matrices()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].log_sigma2.fill_(40.0)
    schedule(model, drop_from=0.0, warm_up_end=0.0).drop(0.5)
    assert (model[0].weight != 0).all()


def test_it_saves_and_restores_itself():
    model = matrices()
    plan = schedule(model, drop_patience=3)
    with torch.no_grad():
        model[0].log_sigma2[3] = 40.0
    plan.drop(0.5)
    plan.drop(0.5)
    again = schedule(model, drop_patience=3)
    again.load_state_dict(plan.state_dict())
    assert again.drop(0.5) == 12
    assert schedule(model, drop_patience=3).drop(0.5) == 0


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"9.weight": torch.zeros(1, dtype=torch.int16)}, "'9.weight' is no tensor of weights"),
        ({"0.weight": torch.zeros(16, 12)}, "another type or shape"),
        ({"0.weight": torch.zeros(12, 16, dtype=torch.int16)}, "another type or shape"),
        ({"0.weight": torch.full((16, 12), 4, dtype=torch.int16)}, "more epochs than the patience"),
    ],
)
def test_a_state_of_another_network_is_refused(state, sentence):
    plan = schedule(matrices(), drop_patience=3)
    with pytest.raises(CheckpointError, match=sentence):
        plan.load_state_dict(state)
    assert plan.state_dict() == {}


def test_report_counts_what_is_left():
    model = matrices()
    with torch.no_grad():
        model[0].log_sigma2[:8] = 40.0
        model[2].log_sigma2.fill_(-20.0)
        model[0].log_sigma2[8:] = -20.0
    report = schedule(model).report()
    left = sparsevd.summary(model)
    assert report["ratio"] == left.ratio == pytest.approx((192 + 32) / (96 + 32))
    assert report["sparsity"] == pytest.approx(left.sparsity)
    assert report["kl"] == pytest.approx(left.kl)
