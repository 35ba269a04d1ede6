"""What happened, in words: each diagnosis is provoked, and a healthy network hears none."""

import copy
import dataclasses
import logging
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sparsevd
from sparsevd.posterior import posteriors
from sparsevd.reporting.diagnosis import BEFORE_A_RUN, DIAGNOSES, Course, diagnose
from sparsevd.training.progress import Callback
from test_budget import problem


class Heard(Callback):
    def __init__(self):
        self.begin, self.end = None, None

    def on_begin(self, remarks):
        self.begin = list(remarks)

    def on_end(self, remarks):
        self.end = list(remarks)


def network(**how):
    torch.manual_seed(1)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2)), **how)


def fitted(model, data, **settings):
    heard = Heard()
    config = sparsevd.FitConfig(**{"batch_size": 50, "learning_rate": 1e-2, **settings})
    sparsevd.fit(model, data, None, config, progress=False, callbacks=[heard])
    return heard


@pytest.fixture(scope="module")
def healthy():
    model = network()
    return model, fitted(model, problem(3000), epochs=20)


def test_a_healthy_run_is_silent(healthy):
    """A network that learns, drops most weights, and has enough examples and steps for that."""
    model, heard = healthy
    assert (heard.begin, heard.end) == ([], [])
    assert sparsevd.summary(model).remarks == []
    assert str(sparsevd.summary(model)) == sparsevd.summary(model).table()
    assert sparsevd.summary(model).sparsity > 80
    assert sparsevd.summary(sparsevd.prune(model)).remarks == []


def course_of(model, **known):
    return Course(
        **{
            "start": sparsevd.summary(model),
            "n_train": 5000,
            "epochs": 10,
            "steps": 1000,
            "steps_needed": 500,
            "reach": (1.0, 1.0),
            **known,
        }
    )


def said(name, model, **known):
    summary = sparsevd.summary(model)
    return DIAGNOSES[name](dataclasses.replace(summary, course=course_of(model, **known)) if known else summary)


def test_the_registry():
    assert set(BEFORE_A_RUN) < set(DIAGNOSES)
    assert all(function.__doc__ for function in DIAGNOSES.values())
    assert diagnose(sparsevd.summary(nn.Linear(3, 3))) == []


def test_too_few_steps(healthy):
    """Said before the first step, and again at the end; with the epochs that it asks for, no longer."""
    heard = fitted(network(), problem(150), epochs=8)
    (before,) = heard.begin
    assert before in heard.end
    assert before.startswith(
        "24 steps in 8 epochs are few for this recipe: at its rates they move a weight by at most 0.12"
    )
    epochs = int(before.partition("epochs=")[2].partition(",")[0])
    needed = int(before.partition("About ")[2].partition(" ")[0].replace(",", ""))
    assert 3 * (epochs - 1) < needed <= 3 * epochs
    assert fitted(network(), problem(150), epochs=epochs).begin == []
    assert said("too_few_steps", healthy[0]) is None  # nothing is known of a run


def test_slow_rates_need_more_steps():
    """At a hundredth of the rate a hundred times as many, unless another reason sets the number."""
    needed = []
    for rate in (1e-3, 1e-5):
        (before,) = fitted(network(), problem(150), epochs=1, learning_rate=rate).begin
        needed.append(int(before.partition("About ")[2].partition(" ")[0].replace(",", "")))
    assert needed[1] == pytest.approx(100 * needed[0], rel=0.01)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*problem(150), strict=True))


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (problem(150), 6),
        (DataLoader(TensorDataset(*problem(150)), batch_size=10), 30),
        (DataLoader(Stream(), batch_size=50), 6),
    ],
    ids=["pair", "loader", "stream"],
)
def test_steps_are_those_that_are_taken(data, steps):
    heard = Heard()
    config = sparsevd.FitConfig(epochs=2, batch_size=50)
    sparsevd.fit(network(), data, None, config, n_train=150, progress=False, callbacks=[heard])
    assert heard.begin[0].startswith(f"{steps} steps in 2 epochs")


def test_noise_at_the_start(healthy):
    """Weights as small as BERT's under the default noise: 16 % of them are beyond the threshold before training."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    nn.init.normal_(dense[0].weight, std=0.02)
    fresh = sparsevd.sparsify(dense)
    sentence = said("noise_at_the_start", fresh)
    pattern = r"up to ([\d.]+) times as large as the weights \(by their squares\) in 0, and ([\d.]+) % of the weights"
    ratio, beyond = (float(number) for number in re.search(pattern, sentence).groups())
    assert ratio == pytest.approx(math.exp(-8) / 0.02**2, abs=0.02)
    assert beyond == pytest.approx(100 * math.erf(math.exp((-8 - 3) / 2) / 0.02 / math.sqrt(2)), abs=0.5)
    assert f"note: {sentence}" in str(sparsevd.summary(fresh))
    lower = float(sentence.rpartition("=")[2])
    assert said("noise_at_the_start", sparsevd.sparsify(dense, initial_log_sigma2=lower)) is None
    x = torch.randn(60, 300)
    heard = fitted(fresh, (x, (x[:, 0] > 0).long()), epochs=1)
    assert sentence in heard.begin
    assert sentence in heard.end  # of the start, although the noise has moved since
    assert said("noise_at_the_start", fresh) is None
    assert said("noise_at_the_start", healthy[0]) is None


def test_a_layer_that_lost_everything(healthy):
    model = copy.deepcopy(healthy[0])
    assert said("lost_everything", model) is None
    posteriors(model)[1].drop(torch.ones(2, 24, dtype=torch.bool))
    assert said("lost_everything", model).startswith("2 lost every weight (48 in all): the output is the bias alone")
    with pytest.warns(sparsevd.SparseVDWarning, match="lost every one"):
        pruned = sparsevd.prune(model)
    assert said("lost_everything", pruned) == said("lost_everything", model)
    x = torch.randn(20, 30)
    assert (pruned(x) == pruned[2].bias).all()  # as it says


def test_beta_below_one(healthy):
    heard = fitted(network(), problem(1000), epochs=20, warm_up_start=0.5, warm_up_end=1.0)
    (sentence,) = [each for each in heard.end if "β" in each]
    assert sentence.startswith("β ended at 0.9, not at 1")  # over the last epoch; at its very end it is 1
    assert said("beta_below_one", healthy[0], beta=1.0) is None
    assert said("beta_below_one", healthy[0]) is None


def test_a_threshold_at_a_cliff(healthy):
    model = copy.deepcopy(healthy[0])
    first = posteriors(model)[0]
    with torch.no_grad():
        first.theta.fill_(0.5)
        spread = torch.linspace(2.1, 3.9, first.theta.numel()).view_as(first.theta)
        first.log_sigma2.copy_(2 * math.log(0.5) + spread)
    second = int(posteriors(model)[1].kept().sum())
    kept, high = 360 + second, 720 + second
    sentence = said("threshold_at_a_cliff", model)
    assert f"{kept:,} weights are kept, but {second} with one lower by 1 and {high:,} with one higher" in sentence
    assert said("threshold_at_a_cliff", healthy[0]) is None
    assert said("threshold_at_a_cliff", network()) is None


def test_what_stayed_dense(healthy):
    model = sparsevd.sparsify(
        nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 20), nn.LayerNorm(20)), exclude="0"
    )
    sentence = said("stayed_dense", model)
    everything = 30 * 24 + 24 + 24 * 20 + 20 + 40
    assert sentence.startswith(f"720 of {everything:,} parameters (56 %) stayed dense, in 0: even without")
    assert f"only {everything / (everything - 480):.1f} times smaller" in sentence
    attention = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, dropout=0.0)
    assert "self_attn.in_proj_weight" in said(
        "stayed_dense", sparsevd.sparsify(attention, include=["linear1", "linear2"])
    )
    assert said("stayed_dense", healthy[0]) is None
    assert said("stayed_dense", nn.Linear(5, 5)) is None  # of a plain network nobody knows


def test_a_heavy_kl(healthy):
    """Few examples of something that cannot be told for sure; a thousand times as many pay for the same weights."""
    x, y = problem(60)
    y = torch.where(torch.arange(60) % 5 == 0, 1 - y, y)
    model = network()
    heard = fitted(model, (x, y), epochs=160, batch_size=20)
    (sentence,) = [each for each in heard.end if "heavy" in each]
    assert "for each of N = 60 examples" in sentence
    assert "fit(budget=sparsevd.Budget(max_error_increase=1))" in sentence
    assert said("heavy_kl", healthy[0], loss=0.4, n_train=60_000) is None
    assert said("heavy_kl", healthy[0], loss=0.4, n_train=60)
    assert said("heavy_kl", healthy[0], loss=0.04, n_train=60) is None
    assert said("heavy_kl", healthy[0], loss=0.4, n_train=60, steps=400) is None  # of too few steps that says nothing
    assert said("heavy_kl", healthy[0]) is None


def test_a_person_sees_the_remarks(capsys, caplog):
    config = sparsevd.FitConfig(epochs=2, batch_size=50)
    sparsevd.fit(network(), problem(150), None, config)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("note: 6 steps in 2 epochs")
    assert any(line.startswith("note: ") for line in shown[3:])
    with caplog.at_level(logging.INFO, "sparsevd"):
        sparsevd.fit(network(), problem(150), None, config, progress=False)
    assert not capsys.readouterr().out
    assert any(record.message.startswith("note: 6 steps") for record in caplog.records)


def test_plain_training_has_no_remarks():
    heard = Heard()
    config = sparsevd.FitConfig(epochs=1)
    sparsevd.fit_dense(nn.Linear(30, 2), problem(50), None, config, progress=False, callbacks=[heard])
    assert (heard.begin, heard.end) == ([], [])
