"""Runs without noise: how many weights go at a look, what a look counts for, and what comes back."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.errors import SparseVDWarning
from sparsevd.posterior import posteriors
from sparsevd.training.evaluation import Evaluation
from sparsevd.training.gradual_cuts import GradualCuts
from sparsevd.training.judge import LOSS_OF_A_POINT, Judge, Verdict
from sparsevd.training.steering import Steering


def seen(rise, aim=0.2, budget=0.3):
    """A look at a network that has lost so many parts of a collapse."""
    return Verdict(Evaluation(1.0, 10.0), 0.0, rise, rise, rise - aim, rise - budget, budget - aim)


def test_the_first_looks_show_what_the_rate_costs_and_nothing_goes():
    cuts = GradualCuts()
    for progress, rise in ((0.0, 0.0), (0.02, 0.6), (0.04, 0.4)):
        assert cuts.part(seen(rise), progress, 1.0) == 0
    assert cuts.cost == pytest.approx(0.5)  # the look before the first step does not count


def test_it_cuts_while_the_falling_rate_can_bring_it_back():
    cuts = GradualCuts(cost=0.5, looks=2, has_cut=True)
    assert cuts.part(seen(0.69), 0.1, 1.0) == pytest.approx(GradualCuts.CUT)
    assert cuts.part(seen(0.71), 0.1, 1.0) == 0  # beyond the aim, 0.2, and the cost of the rate
    assert cuts.part(seen(0.23), 0.5, 0.5) == pytest.approx(GradualCuts.CUT * 0.625)
    assert cuts.part(seen(0.24), 0.5, 0.5) == 0  # a sixteenth is left of the hope
    assert cuts.part(seen(0.2), 0.9, 0.0) == pytest.approx(GradualCuts.CUT / 4)
    assert cuts.part(seen(0.21), 0.9, 0.0) == 0
    assert cuts.cost == 0.5


def test_it_waits_longer_before_it_goes_back_than_before_it_cuts():
    """At 0.7 of the rate, half of its cost may come back, but cuts hope for a quarter of it."""
    cuts = GradualCuts(cost=0.5, looks=2, has_cut=True)
    for _ in range(2 * GradualCuts.PATIENCE):
        assert cuts.part(seen(0.45), 0.3, 0.7) == 0
        assert not cuts.goes_back()
    for _ in range(GradualCuts.PATIENCE):
        cuts.part(seen(0.56), 0.3, 0.7)
    assert cuts.goes_back()


def test_what_an_uncut_network_has_lost_never_keeps_it_from_being_cut():
    """A rate that costs more than the budget, for as long as it lasts; it fell too slowly for a smaller hope."""
    cuts = GradualCuts()
    rises = [0.6, 0.4, 0.6, 0.5]
    parts = [cuts.part(seen(rise, aim=0.05), 0.02 * i, 0.7) for i, rise in enumerate(rises, start=1)]
    assert [part > 0 for part in parts] == [False, False, False, True]
    assert cuts.cost == pytest.approx(sum(rises) / len(rises))
    assert cuts.part(seen(0.5, aim=0.05), 0.1, 0.7) == 0  # from now on it is what the cut has cost
    assert cuts.looks == len(rises)


def test_a_rate_that_seems_to_cost_nothing_leaves_some_hope():
    cuts = GradualCuts(cost=-0.3, looks=2, has_cut=True)
    assert cuts.part(seen(0.2 + GradualCuts.LEAST_COST - 0.01), 0.1, 1.0) > 0


def test_looks_at_a_destroyed_network_do_not_become_hope():
    cuts = GradualCuts()
    cuts.part(seen(math.inf), 0.02, 1.0)
    assert (cuts.cost, cuts.looks) == (0, 0)
    cuts.part(seen(8.0), 0.04, 1.0)
    assert cuts.cost == 1


def test_few_examples_leave_no_hope():
    cuts = GradualCuts(cost=0.5, looks=2, has_cut=True)
    kept, missed = (dataclasses.replace(seen(0.1), room=room) for room in (0.0, -1.0))
    assert cuts.part(kept, 0.1, 1.0, few=True) > 0
    assert cuts.part(dataclasses.replace(seen(0.25), room=0.0), 0.1, 1.0, few=True) == 0
    for _ in range(GradualCuts.PATIENCE):
        assert cuts.part(missed, 0.1, 1.0, few=True) == 0
    assert cuts.goes_back()


def test_it_goes_back_after_long_waiting_beyond_the_budget_itself():
    cuts = GradualCuts(cost=0.5, looks=2, has_cut=True)
    for _ in range(3 * GradualCuts.PATIENCE):  # more than it aims at, but within the budget
        cuts.part(seen(0.25), 0.9, 0.0)
        assert not cuts.goes_back()
    went = []
    for _ in range(2 * GradualCuts.PATIENCE):
        cuts.part(seen(0.35), 0.9, 0.0)
        went.append(cuts.goes_back())
    assert [place for place, back in enumerate(went, start=1) if back] == [4, 8]


def by_mean(cuts, verdict, progress, decayed=1.0):
    return cuts.part(verdict, progress, decayed, by_mean=True)


def test_a_mean_leaves_little_to_hope_for():
    """It is about what the end will show: the aim, 0.2, and a twentieth of a collapse; near to that, cuts are small."""
    cuts = GradualCuts(cost=0.1, looks=2, has_cut=True)
    assert by_mean(cuts, seen(0.26), 0.1) == 0
    assert by_mean(cuts, seen(0.24), 0.1) == pytest.approx(GradualCuts.CUT / 4)
    assert by_mean(cuts, seen(0.2), 0.1) == pytest.approx(GradualCuts.CUT / 2)
    assert by_mean(cuts, seen(0.1), 0.1) == pytest.approx(GradualCuts.CUT)
    assert by_mean(cuts, seen(0.21), 0.9, 0.0) == 0  # at the end there is nothing to hope for


def test_what_training_on_costs_by_itself_is_left_out_of_account():
    cuts = GradualCuts(cost=0.28, looks=2, has_cut=True)  # more than the aim, 0.2
    assert by_mean(cuts, seen(0.32), 0.1) > 0
    assert by_mean(cuts, seen(0.34), 0.1) == 0
    costly = GradualCuts(cost=0.5, looks=2, has_cut=True)  # more than the budget, 0.3: it must go with the rate
    for _ in range(2 * GradualCuts.PATIENCE):
        assert by_mean(costly, seen(0.54), 0.1) > 0
        assert not costly.goes_back()
    assert by_mean(costly, seen(0.56), 0.1) == 0
    for _ in range(GradualCuts.PATIENCE):  # a quarter is left of what the rate costs beyond the budget
        assert by_mean(costly, seen(0.41), 0.7, 0.5) == 0
    assert costly.goes_back()


def test_the_first_mean_is_of_steps_in_which_the_rate_rose_and_does_not_count():
    cuts = GradualCuts()
    for progress, rise in ((0.0, 0.0), (0.02, 0.9), (0.04, 0.4), (0.06, 0.4)):
        part = by_mean(cuts, seen(rise), progress)
    assert cuts.cost == pytest.approx(0.4)
    assert part == pytest.approx(GradualCuts.CUT / 2)  # an uncut network is cut, though the rate costs too much
    assert by_mean(GradualCuts(), seen(0.4), 0.3, 0.1) > 0  # and however little is left of the rate
    assert by_mean(GradualCuts(), seen(math.nan), 0.1) == by_mean(GradualCuts(), seen(math.inf), 0.1) == 0


def test_few_examples_and_means_bring_nothing_back_late_either():
    cuts = GradualCuts(cost=0.1, looks=2, has_cut=True)
    missed = dataclasses.replace(seen(0.1), room=-1.0)
    for _ in range(2 * GradualCuts.PATIENCE):
        assert cuts.part(missed, 0.9, 0.0, few=True, by_mean=True) == 0
        assert not cuts.goes_back()


def test_late_in_a_run_by_means_nothing_comes_back():
    cuts = GradualCuts(cost=0.1, looks=2, has_cut=True)
    for _ in range(GradualCuts.PATIENCE):
        by_mean(cuts, seen(0.36), 0.7, 0.8)
    assert cuts.goes_back()
    for _ in range(3 * GradualCuts.PATIENCE):
        by_mean(cuts, seen(0.36), 0.81, 0.5)
        assert not cuts.goes_back()
    for _ in range(3 * GradualCuts.PATIENCE):
        by_mean(cuts, seen(0.34), 0.5)  # beyond the budget, but less than the end brings
        assert not cuts.goes_back()


def problem(n, seed):
    x = torch.randn(n, 30, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + 0.7 * x[:, 1] - 0.5 * x[:, 2] > 0).long()


TRAIN, HELD_OUT = problem(1500, 0), problem(1000, 7)


@pytest.fixture
def dense():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2))
    sparsevd.fit_dense(net, TRAIN, None, sparsevd.FitConfig(epochs=4, learning_rate=5e-3), progress=False)
    return net.eval()


def test_a_steady_judge_takes_half_of_it_from_the_loss(dense):
    """Written out: the mean of the rise in error and of the rise in loss at the best temperature, in points."""
    judge = sparsevd.Budget(max_error_increase=4.0).judge(dense, HELD_OUT, strict=True, steady=True)
    assert judge.withheld == pytest.approx(100 * math.sqrt(0.5 * judge.base.error / 100 / 1000), rel=1e-6)
    assert judge.withheld < 2  # a standard error is in reserve, not half of the budget

    def best_temperature(net):
        with torch.no_grad():
            logits = net(HELD_OUT[0])
        return min(F.cross_entropy(logits / 2 ** (step / 2), HELD_OUT[1]).item() for step in range(-4, 9))

    base, base_error = best_temperature(dense), judge.base.error
    products, squares = 1e-4 / LOSS_OF_A_POINT, 1e-4
    for factor in (0.95, 0.95, 0.95):
        with torch.no_grad():
            dense[0].weight[:, 0] *= factor
        verdict = judge.look(dense)
        points, nats = verdict.evaluation.error - base_error, best_temperature(dense) - base
        products, squares = products + points * nats, squares + nats * nats
        expected = (points + products / squares * nats) / 2
        assert points < 3  # else it would not count
        assert verdict.rise * max(3.0, 4.0) == pytest.approx(expected, rel=1e-4)
        assert verdict.excess == pytest.approx(verdict.rise - (4 - judge.withheld) / 4, abs=1e-6)
        assert verdict.beyond == pytest.approx(max(verdict.rise, points / 4) - 1, abs=1e-6)


def test_a_judge_that_is_not_steady_goes_by_the_error_alone(dense):
    judge = sparsevd.Budget(max_error_increase=4.0).judge(dense, HELD_OUT, strict=True)
    assert judge.withheld == 0
    with torch.no_grad():
        dense[0].weight[:, 0] *= 0.2
    verdict = judge.look(dense)
    assert verdict.rise == pytest.approx((verdict.evaluation.error - judge.base.error) / 4)


def test_a_metric_of_the_users_is_measured_beside_the_temperatures(dense):
    def accuracy(output, target):
        return (output.argmax(1) == target).float().mean()

    budget = sparsevd.Budget(max_error_increase=4.0, max_metric_decrease=0.1, metric=accuracy)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    assert judge.base.metric == pytest.approx(1 - judge.base.error / 100)
    assert judge.look(dense).evaluation.metric == pytest.approx(judge.base.metric)


def without_noise(dense):
    """A run that has begun."""
    model = sparsevd.sparsify(dense)
    budget = sparsevd.Budget(max_error_increase=4.0)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    steered = Steering(model, posteriors(model), budget, judge, 1500, noisy=False)
    steered.begin()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, budget, judge, steered, optimizer


def test_what_was_cut_too_much_comes_back_as_zeros_that_may_learn(dense, monkeypatch):
    model, budget, judge, steered, optimizer = without_noise(dense)

    def look(rise, progress):
        monkeypatch.setattr(Judge, "look", lambda self, network: seen(rise))
        steered.look(progress, 0.5, optimizer)
        return [each.alive() for each in posteriors(model)]

    before = look(0.0, 0.1)  # a cut
    for _ in range(20):
        after = look(0.0, 0.2)
    lost = sum(int((~mask).sum()) for mask in after)
    assert lost > 0.7 * 768
    for _ in range(GradualCuts.PATIENCE):
        back = look(5.0, 0.6)
    kept = [each.theta.clone() for each in posteriors(model)]
    assert sum(int((~mask).sum()) for mask in back) < lost  # some of them ...
    assert all((there | ~mask).all() for there, mask in zip(before, back, strict=True))  # ... of those that were there
    for theta, mask, then in zip(kept, back, after, strict=True):
        assert (theta[mask & ~then] == 0).all()
        assert (theta[then] != 0).all()
    levels = torch.cat([each.log_sigma2[mask] for each, mask in zip(posteriors(model), back, strict=True)])
    assert (levels == levels[0]).all()  # so that weights go by their size as before
    state = copy.deepcopy(steered.state_dict())
    assert steered.problem_of(state) == ""
    steered._best, steered._good = {}, {}  # so that the network as it is comes back
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)  # it keeps to nothing
        steered.finish()
    assert all(torch.equal(each.alive(), each.theta != 0) for each in posteriors(model))  # what learned nothing is gone
    again = Steering(model, posteriors(model), budget, judge, 1500, noisy=False)
    again.load_state_dict(state)
    for name, value in again.state_dict().items():
        assert torch.equal(value.nan_to_num(), state[name].nan_to_num()), name
    assert "does not say of each weight" in steered.problem_of(state | {"rung0/0.weight": torch.zeros(2)})


def test_a_network_whose_cuts_all_came_back_is_no_uncut_one(dense, monkeypatch):
    """Near the end of a run there is no hope left; it would be cut at once again for all that the rate once cost."""
    model, _, _, steered, optimizer = without_noise(dense)

    def zeros_after(rise, progress):
        monkeypatch.setattr(Judge, "look", lambda self, network: seen(rise))
        steered.look(progress, 0.1, optimizer)
        return sum(int((~each.alive()).sum()) for each in posteriors(model))

    assert zeros_after(0.3, 0.1) > 0  # more than the aim, 0.2, but all of it is what the rate costs
    for _ in range(GradualCuts.PATIENCE):
        back = zeros_after(5.0, 0.7)
    assert back == 0
    assert zeros_after(0.3, 0.9) == 0


def test_the_reserve_of_the_error_is_none_of_the_loss(dense):
    budget = sparsevd.Budget(max_error_increase=50.0, max_loss_increase=0.01)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    assert judge.withheld > 0
    worse = dataclasses.replace(judge.base, loss=judge.base.loss + 0.02)
    assert not judge.within(worse)
    assert judge.within(dataclasses.replace(judge.base, loss=judge.base.loss + 0.009, error=judge.base.error + 49))


def test_a_loss_that_falls_says_nothing_of_what_cuts_cost(dense):
    judge = sparsevd.Budget(max_error_increase=4.0).judge(dense, HELD_OUT, strict=True, steady=True)
    judge.worth = (-1.0, 1.0)
    with torch.no_grad():
        dense[0].weight[:, 0] *= 0.5
    verdict = judge.look(dense)
    assert verdict.rise == pytest.approx((verdict.evaluation.error - judge.base.error) / 4, abs=1e-6)


def test_looks_at_nothing_leave_the_worth_of_a_nat_alone(dense):
    judge = sparsevd.Budget(max_error_increase=4.0).judge(dense, HELD_OUT, strict=True, steady=True)
    with torch.no_grad():
        dense[0].weight.fill_(math.nan)
    assert judge.look(dense).rise == math.inf
    assert judge.worth == (0.0, 0.0)


@pytest.mark.parametrize("loss", [sparsevd.Bernoulli(), nn.CrossEntropyLoss(ignore_index=255)])
def test_what_has_no_temperature_or_ignores_a_class(loss):
    torch.manual_seed(0)
    x, y = HELD_OUT
    y = y.clone()
    net = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))
    if isinstance(loss, sparsevd.Bernoulli):
        net = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))  # one label, whole numbers
    else:
        y[::7] = 255
    judge = sparsevd.Budget(max_error_increase=4.0).judge(net, (x, y), loss, strict=True, steady=True)
    assert math.isfinite(judge.look(net).rise)


def test_a_rate_may_cost_a_part_of_the_error_before_the_first_cut(dense):
    judge = sparsevd.Budget(max_error_increase=1.0).judge(dense, HELD_OUT, strict=True, steady=True)
    for base, found, destroyed in ((5.0, 7.9, False), (5.0, 8.1, True), (20.0, 27.9, False), (20.0, 28.1, True)):
        judge.compare_with(Evaluation(0.1, base), None)
        verdict = Verdict(Evaluation(0.1, found), 0.0, (found - base) / 3, 0.0, 0.0, 0.0)
        assert judge.is_destroyed(verdict) is destroyed
    assert judge.is_destroyed(Verdict(Evaluation(math.nan, 25.0), 0.0, 2.0, 0.0, 0.0, 0.0))


def test_a_bearable_error_does_not_excuse_another_limit(dense):
    budget = sparsevd.Budget(max_error_increase=1.0, max_loss_increase=0.05)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    judge.compare_with(Evaluation(0.5, 20.0), None)
    for loss, destroyed in ((0.6, False), (1.2, True)):
        assert judge.is_destroyed(Verdict(Evaluation(loss, 24.0), 0.0, 2.0, 0.0, 0.0, 0.0)) is destroyed


def test_of_several_limits_rise_and_excess_are_those_of_the_tightest(dense):
    """Half of a loss budget that is large says nothing against an error that is beyond its own."""
    budget = sparsevd.Budget(max_error_increase=0.5, max_loss_increase=1.0)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    with torch.no_grad():
        dense[0].weight[:, 0] *= 0.5
    verdict = judge.look(dense)
    assert verdict.evaluation.error - judge.base.error > 0.5
    assert verdict.reserve == pytest.approx(judge.withheld / 3)  # of the error, whose collapse is three points
    assert verdict.rise - verdict.excess == pytest.approx((0.5 - judge.withheld) / 3)


def test_a_rate_that_destroys_is_halved(dense):
    model = sparsevd.sparsify(dense)
    budget = sparsevd.Budget(max_error_increase=1.0)
    judge = budget.judge(dense, HELD_OUT, strict=True, steady=True)
    steered = Steering(model, posteriors(model), budget, judge, 1500, noisy=False)
    steered.begin()
    before = model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.mul_(-1)
    steered.look(0.02, 1.0, torch.optim.SGD(model.parameters(), 0.1))
    assert steered.rate_factor == 0.5
    assert torch.equal(model[0].weight, before)
    levels = torch.cat([each.log_sigma2.flatten() for each in posteriors(model)])
    assert (levels == levels[0]).all()  # weights go by their size from here on, too


def test_a_layer_with_one_weight():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2), nn.Unflatten(1, (2, 1)), nn.Linear(1, 1), nn.Flatten()
    )
    sparsevd.fit_dense(net, TRAIN, None, sparsevd.FitConfig(epochs=12, learning_rate=1e-2), progress=False)
    model = sparsevd.sparsify(net)
    config = sparsevd.FitConfig(epochs=3, noise=False, learning_rate=1e-3)
    sparsevd.fit(model, TRAIN, HELD_OUT, config, budget=sparsevd.Budget(max_error_increase=5.0), progress=False)
    assert model[4].weight.item() != 0
