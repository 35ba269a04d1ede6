"""An attached schedule when its optimizer loads a state, when several step in turn, and when its network is copied."""

import copy
import io

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.training.optimizer import BoundAdam, BoundStep


def attached(**settings):
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, lr=1e-2))
    return model, optimizer, sparsevd.attach(optimizer, model, n_train=100, total_steps=20, **settings)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(5, 8)).square().mean().backward()
    optimizer.step()


def test_the_rates_are_those_of_the_groups_that_a_loaded_state_brings():
    """load_state_dict gives an optimizer new groups, and whoever kept the old ones would step at their rates."""
    model, optimizer, _ = attached()
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    optimizer.param_groups[0]["lr"] = 1e-3
    step(model, optimizer)
    assert optimizer.param_groups[-1]["lr"] == 1e-3 * sparsevd.FitConfig().log_sigma2_lr_ratio


def test_bound_adam_too():
    model, _, schedule = attached()
    schedule.detach()
    optimizer = BoundAdam(model, 1e-2)
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.set_learning_rate(0.0, 1.0)
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("frozen", ["weight", "log_sigma2"])
def test_half_a_posterior_that_was_frozen_for_a_time(frozen, monkeypatch):
    """θ and log σ² have taken different numbers of steps then, and Adam corrects each for its own."""

    def trained():
        torch.manual_seed(0)
        model, optimizer, _ = attached()
        for number in range(8):
            for layer in (model[0], model[2]):
                getattr(layer, frozen).requires_grad_(number >= 5)
            step(model, optimizer)
        return model.state_dict()

    found = trained()
    monkeypatch.setattr(BoundStep, "_fits", lambda *_: False)  # torch's own Adam
    for name, expected in trained().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def frozen_at_first():
    torch.manual_seed(0)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, lr=1e-2))
    config = sparsevd.FitConfig(warm_up_end=0.0)
    schedule = sparsevd.attach(optimizer, model, n_train=100, total_steps=20, config=config)
    step(model, optimizer)
    model[0].requires_grad_(True)
    return model, optimizer, schedule


def test_a_layer_that_the_optimizer_gets_later_has_its_kl_and_rate():
    model, optimizer, schedule = frozen_at_first()
    for group in sparsevd.parameter_groups(model[0], lr=1e-3):
        optimizer.add_param_group(group)
    optimizer.param_groups[-2]["lr"] = 5e-3  # as a scheduler would
    optimizer.zero_grad()
    (0 * model(torch.ones(5, 8)).sum()).backward()
    noise = model[0].log_sigma2
    (expected,) = torch.autograd.grad(schedule.posteriors[0].kl() / 100, noise)
    rate = 5e-3 * schedule.at(schedule.progress).noise_ratio
    optimizer.step()
    assert optimizer.param_groups[-1]["lr"] == rate
    torch.testing.assert_close(noise.grad, expected)


def test_a_later_group_without_a_rate_of_its_own_for_the_noise_is_refused():
    """As Lightning's BackboneFinetuning makes it."""
    model, optimizer, _ = frozen_at_first()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(sparsevd.SparseVDError, match=r"0\.log_sigma2 shares a group"):
        step(model, optimizer)


def test_a_copy_of_the_network_leaves_the_schedule_behind():
    """Else each copy, such as `prune` makes, would hold a copy of the optimizer and its memory."""
    model, optimizer, schedule = attached(budget=sparsevd.Budget(sparsity=0.5))
    schedule.marker = lambda: None  # no copy of this can be pickled
    for other in (copy.deepcopy(model), sparsevd.prune(model)):
        hooks = [*other._load_state_dict_post_hooks.values(), *other._forward_pre_hooks.values()]
        assert hooks
        assert all(hook._method is None for hook in hooks)
        other.load_state_dict(other.state_dict())
        other(torch.ones(1, 8))
    torch.save(model, io.BytesIO())
    step(model, optimizer)
    assert schedule.steps == 1


def test_optimizers_that_step_in_turn_are_in_the_same_phase():
    """Whichever comes first; and one that steps now and then is where the run is."""
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    first, second = (torch.optim.SGD(sparsevd.parameter_groups(layer, lr=1e-2)) for layer in (model[0], model[2]))
    schedule = sparsevd.attach([first, second], model, n_train=100, total_steps=20)
    seen = []
    schedule.at = lambda progress: seen.append(round(20 * progress)) or type(schedule).at(schedule, progress)
    for order in ([first, second], [second, first], [first], [first], [first, second]):
        model.zero_grad()
        model(torch.ones(5, 8)).square().mean().backward()
        for optimizer in order:
            optimizer.step()
    assert seen == [0, 0, 1, 1, 2, 3, 4, 4]
    assert schedule.steps == 5
