"""The recipe in a loop of one's own: the same as the plain formula, whatever the loop does to its gradients."""

import copy
import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import by_hand
import loops
import sparsevd
from loops import CONFIG, OPTIMIZERS, RATE, STEPS, N, assert_same, batch, differ, falling, formula, network, weights
from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError, SparseVDWarning
from sparsevd.layers import SparseLayer
from sparsevd.posterior import posteriors
from sparsevd.posterior.posterior import DROPPED_LOG_SIGMA2
from sparsevd.training.optimizer import BoundAdam


def attached(name="adamw", model=None, config=CONFIG, **options):
    model = model if model is not None else network()
    optimizer = OPTIMIZERS[name](sparsevd.parameter_groups(model, RATE))
    schedule = sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS, config=config, **options)
    return model, optimizer, schedule


def trained(model, optimizer, parts=1, steps=range(STEPS), scheduler=None):
    scheduler = scheduler or falling(optimizer)
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            x, y = batch(step, part, parts)
            (F.cross_entropy(model(x), y) / parts).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


# The contract.


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "accumulated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_the_plain_formula(name, parts):
    model, optimizer, _ = attached(name)
    assert_same(trained(model, optimizer, parts), formula(name, parts))


def test_so_are_those_of_fit(monkeypatch):
    """All examples in one batch, since `fit` has an order of its own."""
    by_hand.fix_noise(monkeypatch)
    config = dataclasses.replace(
        by_hand.CONFIG,
        epochs=by_hand.STEPS,
        batch_size=by_hand.EXAMPLES,
        learning_rate=by_hand.RATE,
        decay="linear",
        variance_dtype="float32",
    )
    model = by_hand.network()
    sparsevd.fit(model, by_hand.examples(), None, config, progress=False)
    expected = by_hand.train(by_hand.network(), by_hand.cross_entropy, [by_hand.examples()], "AdamW")
    assert by_hand.difference(model, expected) < 5e-4


def test_the_formula_notices_a_kl_that_is_counted_otherwise():
    right = formula("adamw", 2)
    for wrong in (0.0, 0.5, 2.0):  # left out, divided by the world size, per micro-batch
        assert differ(right, formula("adamw", 2, mistake=wrong))


def test_a_closure_that_computes_the_gradients():
    model, optimizer, _ = attached()
    scheduler = falling(optimizer)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            x, y = batch(step, 0, 1)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        value = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert isinstance(value, torch.Tensor)
        scheduler.step()
    assert_same(weights(model), formula("adamw"))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw", "fused"])
def test_a_grad_scaler(name, unscaled):
    model, optimizer, schedule = attached(name)
    scheduler = falling(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, 0, 1)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert_same(weights(model), formula(name))
    assert schedule.steps == STEPS


@pytest.mark.parametrize("name", ["adamw", "fused"])
def test_a_step_that_overflows_is_none(name):
    model, optimizer, schedule = attached(name)
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = batch(0, 0, 1)
    scaler.scale(F.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(weights(model), before, 0)
    assert schedule.steps == 0


def test_clipping_is_for_the_data_alone():
    model, optimizer, _ = attached("sgd")
    theirs = network()
    twin = OPTIMIZERS["sgd"](sparsevd.parameter_groups(theirs, RATE))
    schedule = sparsevd.training.schedule.Schedule(theirs, CONFIG, N)
    scheduler = falling(optimizer)
    for step in range(STEPS):
        for net, one in ((model, optimizer), (theirs, twin)):
            one.zero_grad()
            x, y = batch(step, 0, 1)
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        phase = schedule.at(step / STEPS)
        (phase.kl_weight * sparsevd.kl(theirs)).backward()
        for group in twin.param_groups:
            group["lr"] = loops.rate(step) * (phase.noise_ratio if group["noise"] else 1)
        optimizer.step()
        twin.step()
        scheduler.step()
    assert_same(weights(model), weights(theirs))


def test_a_loop_of_ones_own_has_the_noise_of_its_layers():
    model = sparsevd.sparsify(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, lr=1e-3))
    with pytest.raises(ArgumentError, match="noise=False is for fit with a budget"):
        sparsevd.attach(optimizer, model, n_train=10, total_steps=5, config=sparsevd.FitConfig(noise=False))


def test_autocast_leaves_the_kl_in_full_precision():
    """Inside and outside of autocast the KL's gradient is the same; only the data term has fewer digits."""
    found = []
    for inside in (False, True):
        model, optimizer, _ = attached("sgd")
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                x, y = batch(step, 0, 1)
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                optimizer.step()
        found.append(weights(model))
    assert_same(*found, 0)
    assert_same(found[0], formula("sgd") | found[0], 0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of dynamo itself
@pytest.mark.parametrize("what", ["model", "step"])
def test_compiled(what):
    torch._dynamo.reset()
    model, optimizer, schedule = attached()
    wrap = functools.partial(torch.compile, backend="eager") if what == "model" else lambda model: model
    expected = formula("adamw", wrap=wrap)  # a compiled network draws its noise by torch
    scheduler = falling(optimizer)
    net = wrap(model)
    step_of = torch.compile(lambda: optimizer.step(), backend="eager") if what == "step" else optimizer.step
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, 0, 1)
        F.cross_entropy(net(x), y).backward()
        step_of()
        scheduler.step()
    assert schedule.steps == STEPS
    assert_same(weights(model), expected)


def test_a_compiled_or_wrapped_network_has_the_names_of_the_bare_one():
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    schedule = sparsevd.attach(optimizer, torch.compile(model, backend="eager"), n_train=N, total_steps=STEPS)
    assert [each.name for each in schedule.posteriors] == [each.name for each in posteriors(model)]


def test_two_optimizers_one_for_the_noise():
    model = network()
    groups = sparsevd.parameter_groups(model, RATE)
    noise = torch.optim.SGD([g for g in groups if g["noise"]], momentum=0.9)
    rest = torch.optim.SGD([g for g in groups if not g["noise"]], momentum=0.9)
    schedule = sparsevd.attach([rest, noise], model, n_train=N, total_steps=STEPS, config=CONFIG)
    schedulers = falling(rest), falling(noise)
    for step in range(STEPS):
        rest.zero_grad(), noise.zero_grad()
        x, y = batch(step, 0, 1)
        F.cross_entropy(model(x), y).backward()
        for each in (rest, noise, *schedulers):
            each.step()
    assert schedule.steps == STEPS
    # Whoever steps second sees what the first has done: not the very same, but near.
    assert_same(weights(model), formula("sgd"), 5e-3)
    assert differ(weights(model), formula("sgd", mistake=0))


def test_two_optimizers_each_for_some_layers():
    model = network()
    halves = [nn.ModuleList([model[0]]), nn.ModuleList([model[2], model[4]])]
    pair = [OPTIMIZERS["adamw"](sparsevd.parameter_groups(half, RATE)) for half in halves]
    sparsevd.attach(pair, model, n_train=N, total_steps=STEPS, config=CONFIG)
    schedulers = [falling(each) for each in pair]
    for step in range(STEPS):
        for each in pair:
            each.zero_grad()
        x, y = batch(step, 0, 1)
        F.cross_entropy(model(x), y).backward()
        for each in (*pair, *schedulers):
            each.step()
    assert_same(weights(model), formula("adamw"))


def test_a_layer_frozen_on_the_way_stays():
    model, optimizer, _ = attached()
    scheduler = falling(optimizer)
    trained(model, optimizer, steps=range(5), scheduler=scheduler)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = weights(model[0])
    trained(model, optimizer, steps=range(5, STEPS), scheduler=scheduler)
    assert_same(weights(model[0]), before, 0)


def test_a_step_without_any_gradient_is_none():
    model, optimizer, schedule = attached()
    before = weights(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(weights(model), before, 0)
    assert schedule.steps == 0


def test_detach_leaves_the_loop_alone():
    model, optimizer, schedule = attached()
    schedule.detach()
    plain = network()
    theirs = OPTIMIZERS["adamw"](sparsevd.parameter_groups(plain, RATE))
    assert_same(trained(model, optimizer), trained(plain, theirs), 0)
    assert schedule.steps == 0


# Dropping, zeros, what is remembered.

DROPPING = sparsevd.FitConfig(warm_up_end=0.0, drop_from=0.2, late_from=0.2, drop_patience=1, variance_dtype="float32")


def dropping(name="adamw", threshold=-2.0, **options):
    """Most weights are beyond this threshold, so that some are dropped early."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    model = sparsevd.sparsify(net, threshold=threshold, initial_log_sigma2=-5.0).train()
    return attached(name, model, DROPPING, steps_per_epoch=2, **options)


def dead(model):
    return {each.name: ~each.alive() for each in posteriors(model)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_dropped_stays_zero(name):
    model, optimizer, schedule = dropping(name)
    seen = {name: torch.zeros_like(mask) for name, mask in dead(model).items()}
    scheduler = falling(optimizer)
    for step in range(STEPS):
        trained(model, optimizer, steps=[step], scheduler=scheduler)
        now = dead(model)
        assert all((now[key] >= seen[key]).all() for key in seen)
        assert all((each.theta[now[each.name]] == 0).all() for each in posteriors(model))
        assert all((each.log_sigma2[now[each.name]] == DROPPED_LOG_SIGMA2).all() for each in posteriors(model))
        seen = now
    dropped = sum(int(mask.sum()) for mask in seen.values())
    assert 20 < dropped < sum(mask.numel() for mask in seen.values())
    assert schedule.report()["sparsity"] > 0


def test_momentum_and_decay_do_not_bring_zeros_back():
    """Where the hook did not put them back, they would drift: the test can fail."""
    model, optimizer, schedule = dropping("sgd")
    scheduler = falling(optimizer)
    trained(model, optimizer, steps=range(10), scheduler=scheduler)
    gone = dead(model)
    assert any(mask.any() for mask in gone.values())
    for handle in schedule._handles:
        handle.remove()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    trained(model, optimizer, steps=range(10, 14), scheduler=scheduler)
    assert any((each.theta[gone[each.name]] != 0).any() for each in posteriors(model))


def test_resume_is_the_unbroken_run():
    model, optimizer, schedule = dropping()
    scheduler = falling(optimizer)
    trained(model, optimizer, steps=range(11), scheduler=scheduler)
    saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, schedule, scheduler)])
    expected = trained(model, optimizer, steps=range(11, STEPS), scheduler=scheduler)

    again, theirs, other = dropping()
    theirs_scheduler = falling(theirs)
    for each, state in zip((again, theirs, other, theirs_scheduler), saved, strict=True):
        each.load_state_dict(state)
    assert other.steps == 11
    assert_same(trained(again, theirs, steps=range(11, STEPS), scheduler=theirs_scheduler), expected, 0)
    assert all((a == b).all() for a, b in zip(dead(model).values(), dead(again).values(), strict=True))


def test_weights_that_are_loaded_after_attach_bring_their_zeros():
    model, optimizer, _ = dropping()
    trained(model, optimizer)
    again, theirs, _ = dropping()
    again.load_state_dict(model.state_dict())
    gone = dead(again)
    trained(again, theirs, steps=range(3))
    assert all((dead(again)[name] >= mask).all() for name, mask in gone.items())


def test_the_state_is_checked():
    _, _, schedule = dropping()
    with pytest.raises(CheckpointError, match="no 4 numbers"):
        schedule.load_state_dict({})
    state = schedule.state_dict()
    with pytest.raises(CheckpointError, match="no tensor of weights"):
        schedule.load_state_dict(state | {"0.weight": torch.zeros(2, dtype=torch.int16)})
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    longer = sparsevd.attach(optimizer, model, n_train=N, total_steps=2 * STEPS, config=DROPPING)
    with pytest.warns(SparseVDWarning, match="was to have 20 steps and now has 40"):
        longer.load_state_dict(state)


def test_a_state_of_another_network_is_refused():
    _, _, schedule = attached()
    state = schedule.state_dict()
    model = sparsevd.sparsify(nn.Linear(12, 3))
    with pytest.raises(CheckpointError, match="of another network"):
        attached(model=model)[2].load_state_dict(state)


def test_a_schedule_that_was_not_loaded_is_missed():
    model, optimizer, _ = attached()
    trained(model, optimizer, steps=range(5))
    again, theirs, _ = attached()
    again.load_state_dict(model.state_dict())
    theirs.load_state_dict(optimizer.state_dict())
    with pytest.warns(SparseVDWarning, match="load the state of the schedule too"):
        trained(again, theirs, steps=[5])


def test_numbers_that_are_none_end_the_run():
    model, optimizer, _ = dropping()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(DivergenceError, match="0.weight or its log σ² is not finite"):
        trained(model, optimizer)


def test_batches_taken_for_examples():
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    with pytest.warns(SparseVDWarning, match="counts examples, not batches"):
        sparsevd.attach(optimizer, model, n_train=30, epochs=2, steps_per_epoch=30)


def test_the_report_says_how_far_the_run_is():
    model, optimizer, schedule = attached()
    trained(model, optimizer, steps=range(5))
    assert schedule.report()["progress"] == 0.25
    assert schedule.report()["beta"] == 0.5


def test_a_moving_average_takes_over_the_zeros():
    model, optimizer, schedule = dropping()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    trained(model, optimizer)
    gone = dead(model)
    assert any((each.theta[gone[each.name]] != 0).any() for each in posteriors(average.module))
    schedule.share_zeros(average)
    assert all((each.theta[gone[each.name]] == 0).all() for each in posteriors(average.module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)  # a whole layer may be gone
        kept = sparsevd.prune(average.module)
    assert all((kept.get_parameter(name)[mask] == 0).all() for name, mask in gone.items())


def test_a_budget_of_zeros_is_reached():
    model, optimizer, schedule = attached("adamw", budget=sparsevd.Budget(sparsity=0.5))
    trained(model, optimizer)
    assert schedule.report()["sparsity"] == pytest.approx(50, abs=1)
    assert "β ended at" in schedule.ended
    assert model.training


def test_a_budget_switches_the_noise_off_however_the_network_is_called():
    """A Lightning module calls the network that it holds, and not itself."""
    model, optimizer, schedule = attached("adamw", budget=sparsevd.Budget(sparsity=0.5))
    wanted, seen = [], []
    for step in range(STEPS):
        wanted.append(schedule.at(schedule.progress).noisy)
        seen += [{module.draws_noise for module in model.modules() if isinstance(module, SparseLayer)}]
        optimizer.zero_grad()
        x, y = batch(step, 0, 1)
        F.cross_entropy(model.train().forward(x), y).backward()
        optimizer.step()
    assert seen == [{on} for on in wanted]
    assert {True, False} == set(wanted)
    schedule.detach()
    assert all(module.draws_noise for module in model.modules() if isinstance(module, SparseLayer))


def test_a_budget_of_error_is_kept():
    torch.manual_seed(0)
    x = torch.randn(400, 12)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    sparsevd.fit_dense(
        net, (x[:200], y[:200]), config=sparsevd.FitConfig(epochs=30, learning_rate=1e-2), progress=False
    )
    before = sparsevd.evaluate(net, (x[200:], y[200:])).error
    model = sparsevd.sparsify(net)
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, 1e-3), betas=(0.9, 0.99))
    total = 300
    budget = sparsevd.Budget(max_error_increase=3)
    schedule = sparsevd.attach(optimizer, model, n_train=200, total_steps=total, budget=budget, val=(x[200:], y[200:]))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for _ in range(total):
        model.train()
        part = torch.randint(0, 200, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        scheduler.step()
    pruned = sparsevd.prune(model)
    assert sparsevd.evaluate(pruned, (x[200:], y[200:])).error <= before + 3
    assert schedule.report()["sparsity"] > 30


# What is refused, and what is said.


def test_plain_parameters_are_refused_with_the_line_to_write():
    model = network()
    with pytest.raises(ArgumentError, match=r"sparsevd.parameter_groups\(model, lr="):
        sparsevd.attach(torch.optim.Adam(model.parameters()), model, n_train=N, total_steps=STEPS)


def test_what_no_optimizer_has_is_refused():
    model = network()
    groups = [g for g in sparsevd.parameter_groups(model, RATE) if not g["noise"]]
    with pytest.raises(ArgumentError, match="no optimizer has 0.log_sigma2"):
        sparsevd.attach(torch.optim.Adam(groups), model, n_train=N, total_steps=STEPS)


def test_several_rates_need_several_groups_of_noise():
    model = network()
    groups = sparsevd.parameter_groups(model, RATE)
    first = [p for p in groups[0]["params"] if p is model[0].weight]
    groups[0]["params"] = [p for p in groups[0]["params"] if p is not model[0].weight]
    with pytest.raises(ArgumentError, match="give each of these its own group"):
        sparsevd.attach(torch.optim.SGD([{"params": first, "lr": 1e-4}, *groups]), model, n_train=N, total_steps=STEPS)


@pytest.mark.parametrize("noise", [False, True])
def test_decay_of_a_posterior_is_said(noise):
    model = network()
    groups = sparsevd.parameter_groups(model, RATE)
    next(group for group in groups if group["noise"] == noise)["weight_decay"] = 0.01
    with pytest.warns(SparseVDWarning, match="pulls log σ² to 0" if noise else "the KL would keep"):
        sparsevd.attach(torch.optim.AdamW(groups), model, n_train=N, total_steps=STEPS)


def test_adamw_decays_nothing_that_has_a_posterior():
    """Its own default is 0.01 for every group that does not say otherwise."""
    model = nn.Sequential(network(), nn.LayerNorm(3))
    model.append(nn.Bilinear(3, 3, 2))
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, RATE, weight_decay=0.1))
    decayed = {p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {model[2].weight}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS)
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "how long is the run"),
        ({"epochs": 3}, "how long is the run"),
        ({"total_steps": 0}, "positive integer"),
        ({"total_steps": 7, "epochs": 2, "steps_per_epoch": 3}, "is not epochs"),
        ({"total_steps": 7, "n_train": 0}, "number of examples"),
        ({"total_steps": 7, "n_train": 50.0}, "an integer"),
        ({"total_steps": True}, "positive integer"),
        ({"total_steps": 7, "budget": 0.9}, "must be a sparsevd.Budget"),
        ({"total_steps": 7, "budget": sparsevd.Budget(max_error_increase=1)}, "give val="),
    ],
)
def test_bad_arguments(options, words):
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    with pytest.raises(ArgumentError, match=words):
        sparsevd.attach(optimizer, model, **{"n_train": N} | options)


def test_counts_of_numpy_are_integers_too():
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    count = np.int64(7)
    schedule = sparsevd.attach(optimizer, model, n_train=9 * count, epochs=count, steps_per_epoch=count)
    assert {type(each) for each in (schedule.n_train, schedule.total_steps, schedule.steps_per_epoch)} == {int}


def test_what_processes_would_measure_differently_is_refused(monkeypatch):
    monkeypatch.setattr("sparsevd.training.attachment._world_size", lambda: 2)
    model = network()
    optimizer = torch.optim.SGD(sparsevd.parameter_groups(model, RATE))
    for budget in (sparsevd.Budget(max_error_increase=1), sparsevd.Budget(max_bytes=10_000)):
        with pytest.raises(ArgumentError, match="only a budget of sparsity"):
            sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS, budget=budget, val=batch(0, 0, 1))


def test_optimizers_that_cannot_be_attached_to():
    model = network()
    with pytest.raises(ArgumentError, match="BoundAdam adds the KL by itself"):
        sparsevd.attach(BoundAdam(model, RATE), model, n_train=N, total_steps=STEPS)
    with pytest.raises(ArgumentError, match="must be a torch.optim.Optimizer, or a list of them, not a str"):
        sparsevd.attach("adam", model, n_train=N, total_steps=STEPS)
    uphill = torch.optim.SGD(sparsevd.parameter_groups(model, RATE), maximize=True)
    with pytest.raises(ArgumentError, match="would maximise the KL too"):
        sparsevd.attach(uphill, model, n_train=N, total_steps=STEPS)
    plain = nn.Linear(3, 2)
    with pytest.raises(sparsevd.SparseVDError, match="call sparsevd.sparsify first"):
        sparsevd.attach(torch.optim.SGD(plain.parameters()), plain, n_train=N, total_steps=STEPS)


def test_attaching_twice_would_count_the_kl_twice():
    model, optimizer, schedule = attached()
    with pytest.raises(ArgumentError, match="attached already"):
        sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS)
    schedule.detach()
    sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS)
    attached(model=model)  # another optimizer of the same network


def test_more_steps_than_were_said():
    model, optimizer, schedule = attached()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trained(model, optimizer, scheduler=scheduler)
    with pytest.warns(SparseVDWarning, match="was to have 20 steps and goes on"):
        trained(model, optimizer, steps=[0], scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer, steps=[1], scheduler=scheduler)  # once is enough
    assert schedule.progress == 1


# BoundAdam, the same step as an optimizer of its own.


def test_bound_adam_takes_a_closure_and_calls_hooks_once():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on torch's own method calls hooks too
    model = network()
    optimizer = BoundAdam(model, RATE, kl_weight=0.01)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure():
        optimizer.zero_grad()
        x, y = batch(0, 0, 1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    value = optimizer.step(closure)
    twin = network()
    theirs = BoundAdam(twin, RATE, kl_weight=0.01)
    x, y = batch(0, 0, 1)
    F.cross_entropy(twin(x), y).backward()
    theirs.step()
    assert value.item() > 0
    assert calls == [1]
    assert_same(weights(model), weights(twin), 0)


def test_bound_adam_honours_a_scaler():
    found = []
    for scale in (None, 1024.0):
        model = network()
        optimizer = BoundAdam(model, RATE, kl_weight=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step, 0, 1)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(weights(model))
    assert_same(*found, 1e-4)
