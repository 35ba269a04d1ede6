"""How a run begins: the rate and the first noise, from what the network can do already."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsevd
from sparsevd.errors import ArgumentError
from sparsevd.posterior import posteriors
from sparsevd.posterior.posterior import BELOW_WEIGHTS
from sparsevd.training import start
from sparsevd.training.evaluation import Evaluation
from sparsevd.training.inputs import call
from sparsevd.training.recipes import LEARNING_RATE
from sparsevd.training.task import Task

CONFIG = sparsevd.FitConfig(epochs=6, batch_size=50)
X = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + X[:, 1] > 0).long()


def network(seed=0, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.fixture(scope="module")
def trained():
    net = network()
    sparsevd.fit_dense(net, (X, Y), None, sparsevd.FitConfig(epochs=20, learning_rate=2e-3), progress=False)
    return net


def begun(net, config=CONFIG, y=Y, loss=F.cross_entropy, sensitive=1.0):
    model = sparsevd.sparsify(net)
    return model, start.begin(Task(model, (X, y), None, config, loss, call, None, None), config)


def test_a_fresh_network_gets_the_recipe_as_it_is():
    model, found = begun(network())
    assert not found.knows
    assert found.config == dataclasses.replace(CONFIG, learning_rate=LEARNING_RATE)
    assert found.text == ""
    assert all((each.log_sigma2 == -8).all() for each in posteriors(model))


@pytest.mark.parametrize("scale", [1, 10, 1000])
def test_random_weights_know_nothing_however_large_the_loss(scale):
    x, y = torch.randn(500, 20), torch.randint(52, (500,))
    for seed in range(10):
        torch.manual_seed(seed)
        model = sparsevd.sparsify(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 52)))
        task = Task(model, (x, y), None, CONFIG, lambda out, y: scale * F.cross_entropy(out, y), call, None, None)
        assert not start.begin(task, CONFIG).knows


@pytest.mark.parametrize("batch", [2, 8, 50])
def test_a_trained_network_is_known_by_small_batches_too(trained, batch):
    config = dataclasses.replace(CONFIG, batch_size=batch)
    model = sparsevd.sparsify(trained)
    assert start.begin(Task(model, (X, Y), None, config, F.cross_entropy, call, None, None), config).knows


def test_of_large_outputs_the_first_batch_tells(trained, monkeypatch):
    monkeypatch.setattr(start, "MOST_REMEMBERED", 1)
    seen = []

    def forward(model, x):
        seen.append(len(x))
        return model(x)

    task = Task(sparsevd.sparsify(trained), (X, Y), None, CONFIG, F.cross_entropy, forward, None, None)
    assert start._knows(task, start._first(task, CONFIG, start.BATCHES))
    assert len(seen) == start.BATCHES  # each is computed once


def test_a_rate_that_was_given_is_not_touched(trained):
    config = dataclasses.replace(CONFIG, learning_rate=0.5)
    model, found = begun(trained, config)
    assert found.config == config
    assert all((each.log_sigma2 == -8).all() for each in posteriors(model))


def test_a_trained_network_gets_noise_below_its_weights_that_can_grow_in_time(trained):
    model, found = begun(trained)
    assert found.knows
    assert "predicts already (error 0" in found.text
    for each in posteriors(model):
        expected = each.theta.square().mean().log().item() - BELOW_WEIGHTS
        assert each.log_sigma2.mean().item() == pytest.approx(expected, abs=1e-4)
    steps = 6 * 20
    noise = found.config.log_sigma2_lr_ratio * found.config.learning_rate
    assert noise == pytest.approx(min(start.FASTEST_NOISE, start.TRAVEL / steps))


def test_the_steps_of_a_loader_are_its_own_whatever_the_recipe_says(trained):
    batches = [((X[part], Y[part])) for part in torch.arange(len(X)).split(250)]
    for loader, n in (
        (DataLoader(TensorDataset(X, Y), 250), None),
        (DataLoader(batches, batch_size=None), len(X)),
    ):
        task = Task(sparsevd.sparsify(trained), loader, None, CONFIG, F.cross_entropy, call, None, n)
        assert task.steps_per_epoch(CONFIG.batch_size) == 4
        config = dataclasses.replace(CONFIG, epochs=300)
        found = start.begin(task, config).config
        assert found.log_sigma2_lr_ratio * found.learning_rate == pytest.approx(start.TRAVEL / (300 * 4))


@pytest.fixture
def fragile(trained):
    """The same function with weights a hundredth as large in one layer, and a hundred times as large in the next."""
    net = network()
    net.load_state_dict(trained.state_dict())
    with torch.no_grad():
        net[0].weight.mul_(0.01)
        net[0].bias.mul_(0.01)
        net[2].weight.mul_(100)
    return net


def test_a_network_that_bears_little_gets_a_smaller_rate(trained, fragile):
    _, usual = begun(trained)
    _, small = begun(fragile)
    assert small.config.learning_rate < usual.config.learning_rate
    assert f"learning_rate={small.config.learning_rate:g}, the largest" in small.text


def test_trials_that_take_long_are_said(fragile, monkeypatch):
    task, lines = Task(sparsevd.sparsify(fragile), (X, Y), None, CONFIG, F.cross_entropy, call, None, None), []
    monkeypatch.setattr(start, "LONG", math.inf)
    rate = start.begin(task, CONFIG, say=lines.append).config.learning_rate
    assert not lines
    monkeypatch.setattr(start, "LONG", 0.0)
    start.begin(task, CONFIG, say=lines.append)
    assert lines[-1].startswith(f"learning_rate={2 * rate:g} harms")


def test_fit_does_not_destroy_what_bears_little(fragile):
    before = sparsevd.evaluate(fragile, (X, Y)).error
    model = sparsevd.sparsify(fragile)
    history = sparsevd.fit(model, (X, Y), (X, Y), CONFIG, progress=False)
    assert history[0].val_error <= before + 5
    reckless = sparsevd.sparsify(fragile)
    config = dataclasses.replace(CONFIG, learning_rate=LEARNING_RATE)
    assert sparsevd.fit(reckless, (X, Y), (X, Y), config, progress=False)[0].val_error > before + 5


def test_weights_that_the_first_noise_would_drown_get_less_of_it():
    """As those of a fresh BERT, with a deviation of 0.02."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    nn.init.normal_(net[0].weight, std=0.01)
    model, found = begun(net)
    assert not found.knows
    small, usual = posteriors(model)
    assert (small.log_sigma2 < -12).all()
    assert (usual.log_sigma2 == -8).all()
    chosen = sparsevd.sparsify(net, initial_log_sigma2=-7.0)  # said by the user
    start.begin(Task(chosen, (X, Y), None, CONFIG, F.cross_entropy, call, None, None), CONFIG)
    assert (chosen[0].log_sigma2 == -7).all()


def test_the_generator_and_the_network_are_left_alone(trained):
    model = sparsevd.sparsify(trained)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "log_sigma2" not in name}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    start.begin(Task(model, (X, Y), None, CONFIG, F.cross_entropy, call, None, None), CONFIG)
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_regression_in_any_unit_gets_the_same_rate():
    y = X[:, :1] - 0.5 * X[:, 1:2]
    rates = set()
    for unit in (0.01, 1.0, 100.0):
        net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
        torch.manual_seed(0)
        net[0].reset_parameters()
        net[2].reset_parameters()
        config = sparsevd.FitConfig(epochs=10, learning_rate=2e-3)
        sparsevd.fit_dense(net, (X, unit * y), None, config, loss=sparsevd.Gaussian(), progress=False)
        _, found = begun(net, y=unit * y, loss=sparsevd.Gaussian())
        assert found.knows
        rates.add(found.config.learning_rate)
    assert len(rates) == 1


def test_a_run_goes_on_with_the_rate_that_was_chosen(trained, tmp_path):
    model = sparsevd.sparsify(trained)
    config = dataclasses.replace(CONFIG, epochs=3)
    sparsevd.fit(model, (X, Y), None, config, run_dir=tmp_path, progress=False)
    again = sparsevd.sparsify(network(5))  # not trained: it would get another one
    history = sparsevd.fit(again, (X, Y), None, config, run_dir=tmp_path, resume=True, progress=False)
    assert len(history) == 3
    assert math.isfinite(history[-1].train_loss)


def test_with_a_budget_a_network_that_cannot_lose_its_smallest_weights_has_no_noise(trained):
    """A network whose weights all matter alike: its large ones are as many as its small ones."""
    budget = sparsevd.Budget(sparsity=0.5)
    torch.manual_seed(0)
    lean = nn.Linear(20, 2)
    with torch.no_grad():
        lean.weight.copy_(torch.randn(20) * torch.tensor([[1.0], [-1.0]]))
        lean.bias.zero_()
    y = (X @ lean.weight[0] > 0).long().neg() + 1
    for net, target, noise in ((trained, Y, True), (lean, y, False), (network(), Y, True)):
        model = sparsevd.sparsify(net)
        before = [each.theta.clone() for each in posteriors(model)]
        for config in (CONFIG, dataclasses.replace(CONFIG, learning_rate=1e-3)):
            task = Task(model, (X, target), None, config, F.cross_entropy, call, None, None)
            found = start.begin(task, config, budget)
            assert found.config.noise is noise
            assert ("no noise" in found.text) is not noise
            asked = dataclasses.replace(config, noise=not noise)
            assert start.begin(task, asked, budget).config.noise is not noise
            assert start.begin(task, config).config.noise is None
            assert start.begin(task, config, sparsevd.Budget(max_bytes=99)).config.noise is None
        assert all(torch.equal(each.theta, theta) for each, theta in zip(posteriors(model), before, strict=True))


def without_noise(net, val, y=Y, loss=F.cross_entropy):
    config = dataclasses.replace(CONFIG, noise=False)
    task = Task(sparsevd.sparsify(net), (X, y), val, config, loss, call, None, None)
    return start.begin(task, config, sparsevd.Budget(max_error_increase=1.0))


def test_without_noise_a_rate_may_harm_held_out_data_a_little():
    """By 0.4 of its error, or a point, and a standard error: √(0.1 · 1000) / 1000 = 1 % if 100 of 1,000 are wrong."""
    examples = [(X, Y)]
    harm = start._Harm(examples, Evaluation(0.3, 10.0), 0.4)
    assert not harm.is_done(Evaluation(0.3, 14.9))
    assert harm.is_done(Evaluation(0.3, 15.1))
    assert harm.is_done(Evaluation(math.nan, 10.0))
    assert not start._Harm(examples, Evaluation(0.3, 0.0), 0.4).is_done(Evaluation(0.3, 1.05))
    assert start._Harm(examples, Evaluation(0.3, 0.0), 0.4).is_done(Evaluation(0.3, 1.15))
    assert start._Harm(examples, Evaluation(0.3, 10.0)).is_done(Evaluation(0.3, 13.1))  # else a collapse counts


def test_without_noise_held_out_data_decides_the_rate(trained, fragile):
    """Half of its labels are wrong at random, so that a rate cannot harm it; what it is trained on would be."""
    wrong = X, torch.where(torch.rand(1000, generator=torch.Generator().manual_seed(1)) < 0.5, 1 - Y, Y)
    assert without_noise(fragile, wrong).config.learning_rate == LEARNING_RATE
    found = without_noise(fragile, (X, Y))
    assert found.config.learning_rate < LEARNING_RATE
    assert "the largest of 0.004, half of it and so on that does little harm to 1,000 held-out examples" in found.text


def test_without_noise_and_held_out_data_the_rate_is_a_multiple_of_the_harmless_one(trained, fragile):
    harmless = begun(fragile)[1].config.learning_rate
    few = X[:20], Y[:20]
    other = X[:, :5], Y  # the judge of the budget refuses it in a sentence
    loader = DataLoader(TensorDataset(*few), 1)
    for val in (None, few, other, loader):
        found = without_noise(fragile, val)
        assert found.config.learning_rate == start.BOLD_FOR_CLASSES * harmless
        assert f"({harmless:g} would do no harm" in found.text


def test_without_noise_the_rate_of_a_regression_is_a_multiple_too():
    torch.manual_seed(0)
    y = (X @ torch.randn(20, 1)).tanh()
    net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
    sparsevd.fit_dense(net, (X, y), None, sparsevd.FitConfig(epochs=30), loss=F.mse_loss, progress=False)
    with torch.no_grad():
        net[0].weight.mul_(1e-3)
        net[0].bias.mul_(1e-3)
        net[2].weight.mul_(1000)
    rates = {}
    for noise in (None, False):
        config = dataclasses.replace(CONFIG, noise=noise)
        task = Task(sparsevd.sparsify(net), (X, y), (X, y), config, sparsevd.Gaussian(), call, None, None)
        budget = sparsevd.Budget(max_loss_increase=0.1) if noise is False else None
        rates[noise] = start.begin(task, config, budget).config.learning_rate
    assert rates[False] == start.BOLD * rates[None] < LEARNING_RATE


@pytest.mark.parametrize(
    ("budget", "settings", "rates"),
    [
        (sparsevd.Budget(sparsity=0.5), {}, [1, 1, 0.5, 0]),
        (sparsevd.Budget(max_loss_increase=0.1), {}, [1, 1, 0.5, 0]),
        (sparsevd.Budget(max_error_increase=1.0), {}, [1, 1, 0.5, 0]),
        (sparsevd.Budget(sparsity=0.5), {"held": 0.2}, [1, 1, 0.146, 0]),
        (sparsevd.Budget(sparsity=0.5), {"noise": True}, [1, 0.905, 0.095, 0]),
    ],
)
def test_without_noise_the_rate_is_held(budget, settings, rates):
    config = start.holding(sparsevd.FitConfig(learning_rate=1.0, **{"noise": False} | settings), budget)
    assert [config.rate(part) for part in (0, 0.2, 0.8, 1)] == pytest.approx(rates, abs=1e-3)
    with pytest.raises(ArgumentError, match="held=1 must be a part of the run"):
        sparsevd.FitConfig(held=1)
