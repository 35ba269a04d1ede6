"""Budgets while training: β, the zeros and the state at the end follow what may be lost, or must be reached."""

import copy
import dataclasses
import math
import re
from typing import ClassVar

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError, SparseVDWarning
from sparsevd.posterior import posteriors, switch_noise
from sparsevd.training import steering
from sparsevd.training.judge import Judge
from sparsevd.training.progress import Callback
from sparsevd.training.steering import Steering
from sparsevd.training.weights_read import read_by_an_example

CONFIG = sparsevd.FitConfig(epochs=12, batch_size=50)


def problem(n=1500, seed=0):
    """Three of thirty inputs decide the class."""
    x = torch.randn(n, 30, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + 0.7 * x[:, 1] - 0.5 * x[:, 2] > 0).long()


TRAIN, HELD_OUT, TEST = problem(), problem(1000, 7), problem(2000, 8)


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2))
    sparsevd.fit_dense(net, TRAIN, None, sparsevd.FitConfig(epochs=8, learning_rate=5e-3), progress=False)
    return net.eval()


def error(network, data=TEST):
    return sparsevd.evaluate(network, data).error


def zeros(network):
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def fitted(dense, budget, config=CONFIG, val=HELD_OUT, **how):
    model = sparsevd.sparsify(dense)
    history = sparsevd.fit(model, TRAIN, val, config, budget=budget, progress=False, **how)
    return model, history


@pytest.mark.parametrize("allowed", [0.5, 2.0])
def test_an_error_is_kept_with_few_weights(dense, allowed):
    model, history = fitted(dense, sparsevd.Budget(max_error_increase=allowed))
    pruned = sparsevd.prune(model)
    assert error(pruned, HELD_OUT) <= error(dense, HELD_OUT) + allowed
    assert error(pruned) <= error(dense) + allowed + 1.5  # data that chose nothing, two standard errors of 2,000
    assert zeros(pruned) > 0.8  # 27 of 30 inputs are noise
    assert history[-1].sparsity == pytest.approx(100 * zeros(pruned), abs=1e-3)
    assert history[-1].val_error == error(pruned, HELD_OUT)
    assert error(model, HELD_OUT) == error(pruned, HELD_OUT)
    assert history[-1].elbo is None  # β is not 1, so there is no bound to quote


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_a_sparsity_is_hit(dense, share):
    model, _ = fitted(dense, sparsevd.Budget(sparsity=share), val=None)
    pruned = sparsevd.prune(model)
    assert zeros(pruned) == pytest.approx(share, abs=1 / 768)
    assert error(pruned) <= error(dense) + 3


def test_the_cut_of_a_sparsity_costs_less_than_one_after_training(dense):
    """What is left has learned to do without the rest."""
    model, _ = fitted(dense, sparsevd.Budget(sparsity=0.95))
    plain = sparsevd.sparsify(dense)
    sparsevd.fit(plain, TRAIN, None, dataclasses.replace(CONFIG, drop_from=1.0), progress=False)
    assert error(sparsevd.prune(model)) <= error(sparsevd.prune(plain, sparsity=0.95))


def test_beta_follows_a_sparsity(dense):
    _, few = fitted(dense, sparsevd.Budget(sparsity=0.2))
    _, many = fitted(dense, sparsevd.Budget(sparsity=0.98))
    assert few[-1].beta < many[-1].beta <= 1


WITHOUT_NOISE = dataclasses.replace(CONFIG, noise=False)


def test_without_noise_weights_go_by_their_size(dense):
    """The noise is never drawn, and of two weights of a layer that were both trained on, the larger one stays."""

    class Modes(Callback):
        seen: ClassVar = set()

        def on_step(self, moment):
            self.seen |= {module.draws_noise for module in sparse}

    model = sparsevd.sparsify(dense)
    sparse = [each.layer for each in posteriors(model)]
    config = dataclasses.replace(WITHOUT_NOISE, epochs=1, learning_rate=1e-9)  # so that sizes stay as they are
    history = sparsevd.fit(
        model, TRAIN, None, config, budget=sparsevd.Budget(sparsity=0.5), progress=False, callbacks=[Modes()]
    )
    assert Modes.seen == {False}
    assert history[-1].beta == 0
    sizes = torch.cat([dense[0].weight.abs().flatten(), dense[2].weight.abs().flatten()])
    for place in (0, 2):
        kept = sparsevd.prune(model)[place].weight != 0
        assert torch.equal(kept, dense[place].weight.abs() > sizes.median())


def test_a_budget_is_kept_without_noise(dense):
    model, history = fitted(dense, sparsevd.Budget(max_error_increase=1.0), WITHOUT_NOISE)
    pruned = sparsevd.prune(model)
    assert error(pruned, HELD_OUT) <= error(dense, HELD_OUT) + 1.0
    assert zeros(pruned) > 0.6
    assert all(module.threshold == 3.0 for module in model.modules() if hasattr(module, "threshold"))
    assert history[-1].val_error == error(pruned, HELD_OUT)


def test_what_was_zero_stays_so_without_noise(dense):
    model, _ = fitted(dense, sparsevd.Budget(sparsity=0.5), WITHOUT_NOISE)
    gone = [each.theta == 0 for each in posteriors(model)]
    sparsevd.fit(model, TRAIN, None, WITHOUT_NOISE, budget=sparsevd.Budget(sparsity=0.7), progress=False)
    assert all((each.theta[mask] == 0).all() for each, mask in zip(posteriors(model), gone, strict=True))
    assert zeros(sparsevd.prune(model)) == pytest.approx(0.7, abs=1 / 768)


def test_noise_is_a_question_of_budgets(dense):
    with pytest.raises(ArgumentError, match="noise=False is for a run with a budget"):
        sparsevd.fit(sparsevd.sparsify(dense), TRAIN, None, WITHOUT_NOISE, progress=False)
    with pytest.raises(ArgumentError, match="max_bytes counts a file that is rounded"):
        fitted(dense, sparsevd.Budget(max_bytes=600), WITHOUT_NOISE)
    with pytest.raises(ArgumentError, match=r"noise='off' must be True, False or None"):
        dataclasses.replace(CONFIG, noise="off")


@pytest.mark.filterwarnings("ignore:of .* kept weights:sparsevd.errors.SparseVDWarning")
@pytest.mark.parametrize("error", [None, 5.0])
def test_bytes(dense, error):
    from sparsevd import modelfile

    model, _ = fitted(dense, sparsevd.Budget(max_bytes=600, max_error_increase=error))
    assert 0.2 < zeros(sparsevd.prune(model)) < 1, "what the noise has drowned goes in any case"
    assert len(modelfile.pack(model, precision="posterior")[0]) <= 600
    with pytest.warns(SparseVDWarning, match=r"\(max_bytes=20\) cannot be kept; .* bytes"):
        fitted(dense, sparsevd.Budget(max_bytes=20), dataclasses.replace(CONFIG, epochs=1))


def test_a_loss_and_a_metric(dense):
    def accuracy(output, target):
        return (output.argmax(1) == target).float().mean()

    model, _ = fitted(dense, sparsevd.Budget(max_loss_increase=0.05))
    base = sparsevd.evaluate(dense, HELD_OUT).loss
    assert sparsevd.evaluate(sparsevd.prune(model), HELD_OUT).loss <= base + 0.05
    assert zeros(sparsevd.prune(model)) > 0.7
    model, _ = fitted(dense, sparsevd.Budget(max_metric_decrease=0.01, metric=accuracy))
    assert error(sparsevd.prune(model), HELD_OUT) <= error(dense, HELD_OUT) + 1 + 1e-6
    assert zeros(sparsevd.prune(model)) > 0.7


def test_without_held_out_data_a_part_of_the_training_data_is_held_out_and_said(dense):
    with pytest.warns(SparseVDWarning, match=r"measured on 300 of the training examples.*since there is no val"):
        model, history = fitted(dense, sparsevd.Budget(max_error_increase=1.0), val=None)
    assert history[-1].val_error is not None
    assert zeros(sparsevd.prune(model)) > 0.5


def test_a_network_that_knows_nothing_is_no_reference():
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2))
    for config in (CONFIG, dataclasses.replace(CONFIG, learning_rate=1e-2)):
        with pytest.raises(ArgumentError, match=r"knows nothing of the data yet.*fit_dense.*reference="):
            fitted(fresh, sparsevd.Budget(max_error_increase=1.0), config)
    model, _ = fitted(fresh, sparsevd.Budget(max_error_increase=3.0, reference=5.0))
    assert error(sparsevd.prune(model), HELD_OUT) <= 8.0


def test_a_budget_that_cannot_be_kept_ends_in_the_best_and_a_sentence(dense):
    with pytest.warns(
        SparseVDWarning,
        match=r"increase=0, reference=0\) cannot be kept; the best .* zeros, error .*reference",
    ):
        model, _ = fitted(dense, sparsevd.Budget(max_error_increase=0.0, reference=0.0))
    assert error(model) < 20
    with pytest.warns(SparseVDWarning, match=r"cannot be kept"):
        fitted(dense, sparsevd.Budget(max_error_increase=0.5, sparsity=0.9999))


def test_the_end_says_what_beta_was(dense, capsys):
    model = sparsevd.sparsify(dense)
    config = dataclasses.replace(CONFIG, epochs=2)
    sparsevd.fit(model, TRAIN, HELD_OUT, config, budget=sparsevd.Budget(max_error_increase=1.0))
    assert re.search(r"β ended at [\d.]+; .* zeros, error .* % \(the reference: error .* %\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sparsevd.Budget(sparsity="0.9"), "sparsity='0.9' must be a number"),
        (lambda: sparsevd.Budget(max_error_increase=True), "max_error_increase=True must be a number"),
        (lambda: sparsevd.Budget(max_error_increase=1, reference="dense"), "reference is a str"),
        (lambda: sparsevd.Budget(max_error_increase=1, reference=-1.0), "reference=-1.0 must be an error in %"),
        (lambda: sparsevd.Budget(max_metric_decrease=1, metric="acc"), "metric='acc' must be a function"),
    ],
)
def test_budgets_that_mean_nothing(make, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make()


def test_what_is_no_budget_or_no_held_out_data(dense):
    for wrong in ("0.5", 0.5, [sparsevd.Budget(sparsity=0.5)]):
        with pytest.raises(ArgumentError, match=r"must be a sparsevd\.Budget"):
            fitted(dense, wrong)
        with pytest.raises(ArgumentError, match=r"must be a sparsevd\.Budget"):
            sparsevd.prune(sparsevd.sparsify(dense), budget=wrong, data=HELD_OUT)
    nothing = HELD_OUT[0] * math.nan, HELD_OUT[1]
    with pytest.raises(ArgumentError, match="the loss of the reference is not a finite number.*look at val"):
        fitted(dense, sparsevd.Budget(max_error_increase=1.0), val=nothing)
    loader = torch.utils.data.DataLoader(list(zip(*TRAIN, strict=True)), 50)
    with pytest.raises(ArgumentError, match="none can be taken from a DataLoader; give val"):
        sparsevd.fit(sparsevd.sparsify(dense), loader, budget=sparsevd.Budget(max_error_increase=1.0))


def test_the_threshold_is_as_before_and_the_next_fit_prunes_again(dense):
    model, _ = fitted(dense, sparsevd.Budget(sparsity=0.5))
    assert {each.threshold for each in posteriors(model)} == {3.0}
    kept = zeros(sparsevd.prune(model))
    sparsevd.fit(model, TRAIN, None, CONFIG, progress=False)
    assert zeros(sparsevd.prune(model)) > kept


def test_each_layer_gets_its_own_threshold_back(dense):
    model = sparsevd.sparsify(dense)
    model[0].threshold, model[2].threshold = 1.0, 4.0
    sparsevd.fit(model, TRAIN, None, CONFIG, budget=sparsevd.Budget(sparsity=0.9), progress=False)
    assert [each.threshold for each in posteriors(model)] == [1.0, 4.0]
    assert zeros(sparsevd.prune(model)) == pytest.approx(0.9, abs=1 / 768)


def test_a_run_that_is_there_is_refused_before_the_network_changes(dense, tmp_path):
    config = dataclasses.replace(CONFIG, epochs=1)
    fitted(dense, sparsevd.Budget(sparsity=0.5), config, run_dir=tmp_path)
    model = sparsevd.sparsify(dense)
    with pytest.raises(CheckpointError, match="already holds a run"):
        sparsevd.fit(model, TRAIN, None, config, run_dir=tmp_path, progress=False)
    assert all((each.log_sigma2 == -8).all() for each in posteriors(model))


def test_a_strict_judge_says_so(dense, capsys):
    config, few = dataclasses.replace(CONFIG, epochs=1), (HELD_OUT[0][:60], HELD_OUT[1][:60])
    sparsevd.fit(sparsevd.sparsify(dense), TRAIN, few, config, budget=sparsevd.Budget(max_error_increase=1.0))
    assert "held-out examples are few for a budget of 1 points: the search may use 0.5" in capsys.readouterr().out


class Kill(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch(self, moment):
        if moment.epoch == self.epoch:
            raise RuntimeError("killed")


@pytest.mark.parametrize("epoch", [2, 8, 12])
@pytest.mark.parametrize(
    ("limits", "noise"),
    [({"max_error_increase": 1.0}, None), ({"sparsity": 0.95}, None), ({"max_error_increase": 1.0}, False)],
    ids=["error", "sparsity", "error without noise"],
)
def test_resume_gives_the_same_bits(dense, tmp_path, limits, noise, epoch):
    budget, config = sparsevd.Budget(**limits), dataclasses.replace(CONFIG, noise=noise)
    whole, _ = fitted(dense, budget, config)
    with pytest.raises(RuntimeError, match="killed"):
        fitted(dense, budget, config, run_dir=tmp_path, callbacks=[Kill(epoch)])
    # Whoever resumes need not have the trained network: the reference is in the checkpoint too.
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2)))
    sparsevd.fit(model, TRAIN, HELD_OUT, CONFIG, budget=budget, run_dir=tmp_path, resume=True, progress=False)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert [each.threshold for each in posteriors(model)] == [3.0, 3.0]
    other = noise is False
    with pytest.raises(CheckpointError, match=rf"noise: {not other} then, {other} now"):
        fitted(dense, budget, dataclasses.replace(CONFIG, noise=other), run_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"budget: .* then, None now"):
        fitted(dense, None, run_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"budget: .* then, 'max_error_increase=2' now"):
        fitted(dense, sparsevd.Budget(max_error_increase=2.0), run_dir=tmp_path, resume=True)


def test_an_interrupted_run_leaves_the_thresholds_and_goes_on_with_the_same_network(dense, tmp_path):
    budget, config = sparsevd.Budget(max_error_increase=1.0), dataclasses.replace(CONFIG, noise=False)
    whole, _ = fitted(dense, budget, config)
    model = sparsevd.sparsify(dense)
    about = {"budget": budget, "run_dir": tmp_path, "progress": False}
    with pytest.raises(RuntimeError, match="killed"):
        sparsevd.fit(model, TRAIN, HELD_OUT, config, callbacks=[Kill(8)], **about)
    assert [each.threshold for each in posteriors(model)] == [3.0, 3.0]
    sparsevd.fit(model, TRAIN, HELD_OUT, config, resume=True, **about)
    assert [each.threshold for each in posteriors(model)] == [3.0, 3.0]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_a_state_that_is_none_is_refused(dense):
    model = sparsevd.sparsify(dense)
    budget = sparsevd.Budget(max_error_increase=1.0)
    found = Steering(model, posteriors(model), budget, budget.judge(model, HELD_OUT), 1500)
    state = found.state_dict()
    assert found.problem_of(state) == ""
    for name in ("steering", "reference"):
        assert found.problem_of({key: value for key, value in state.items() if key != name})
        assert found.problem_of(state | {name: torch.zeros(2)})
    assert found.problem_of(state | {"good/0.weight": torch.zeros(3, 3)})


def test_a_collapse_is_undone_at_half_the_rate(dense):
    model = sparsevd.sparsify(dense)
    budget = sparsevd.Budget(max_error_increase=1.0)
    found = Steering(model, posteriors(model), budget, budget.judge(model, HELD_OUT), 1500)
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    found.look(0.2, 1.0, optimizer)
    with torch.no_grad():
        model[0].weight.mul_(-1)
    beta = found.last_beta
    found.look(0.3, 1.0, optimizer)
    assert found.rate_factor == 0.5
    assert found.last_beta == pytest.approx(beta / 2)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())


def test_many_weights_and_few_examples_begin_with_a_small_beta(dense):
    model = sparsevd.sparsify(dense)
    betas = [
        Steering(model, posteriors(model), sparsevd.Budget(sparsity=0.9), None, n).last_beta for n in (10, 100, 10_000)
    ]
    assert betas[0] < betas[1] < betas[2] == 1


class OfTokens(nn.Module):
    """Tokens, each at a place, and a table that the output layer reads in whole."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(100, 6), nn.Embedding(4, 6), nn.Linear(6, 100)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head((self.embed(tokens) + self.places(torch.arange(4))).mean(1))


def test_an_example_reads_the_rows_of_its_tokens():
    """Three different ones of the hundred; every place; and every weight of other layers."""
    tokens = torch.tensor([[5, 7, 7, 9], [0, 1, 2, 1]]).repeat(30, 1)
    y = tokens[:, 0]
    for tied, expected in ((False, 3 * 6 + 4 * 6 + 600), (True, 600 + 4 * 6)):
        model = sparsevd.sparsify(OfTokens(tied)).train()
        assert read_by_an_example(model, [(tokens, y)], lambda model, x: model(x)) == pytest.approx(expected)
        assert model.training
        assert not model.embed._forward_pre_hooks
    config = sparsevd.FitConfig(epochs=1, batch_size=20, learning_rate=1e-9, noise=True)
    model = sparsevd.sparsify(OfTokens())
    history = sparsevd.fit(model, (tokens, y), config=config, budget=sparsevd.Budget(sparsity=0.01), progress=False)
    assert history[-1].beta == pytest.approx((5 * 60 / (3 * 6 + 4 * 6 + 600)) ** 2, rel=0.3)
    optimizer = torch.optim.Adam(sparsevd.parameter_groups(model, 1e-3))
    reference = sparsevd.Budget(max_error_increase=1.0, reference=100.0)
    attached = sparsevd.attach(optimizer, model, n_train=60, total_steps=9, budget=reference, val=(tokens, y))
    assert attached.steering.last_beta == pytest.approx((5 * 60 / (3 * 6 + 4 * 6 + 600)) ** 2)


@pytest.mark.parametrize(
    ("table", "call", "rows"),
    [
        (nn.Embedding(100, 6), lambda table, x: [table(step) for step in x.unbind(1)], 4),  # by steps: at most
        (nn.Embedding(100, 6), lambda table, x: table(x.t()), 4),  # time first
        (nn.EmbeddingBag(100, 6), lambda table, x: table(x.flatten(), torch.arange(0, x.numel(), 4)), 4),
        (nn.EmbeddingBag(100, 6), lambda table, x: table(x), 3),
        (nn.Embedding(100, 6), lambda table, x: table(x.flatten()[:7]), 100),  # whose they are, is not clear
    ],
)
def test_rows_that_are_read_in_other_ways(table, call, rows):
    tokens = torch.tensor([[5, 7, 7, 9], [0, 1, 2, 1]]).repeat(3, 1)
    model = sparsevd.sparsify(table)
    assert read_by_an_example(model, [(tokens, tokens[:, 0])], call) == pytest.approx(6 * rows)


def test_few_examples_are_judged_more_strictly(dense):
    few, many = ((HELD_OUT[0][:n], HELD_OUT[1][:n]) for n in (60, 1000))
    strict, plain = (
        Judge(dense, few, nn.functional.cross_entropy, lambda m, x: m(x), error=1.0, strict=s) for s in (True, False)
    )
    assert strict.withheld > 0
    assert strict.few
    assert not plain.few
    assert not Judge(dense, many, nn.functional.cross_entropy, lambda m, x: m(x), error=3.0, strict=True).few
    sure = copy.deepcopy(dense)  # as many errors, but each a very sure one
    with torch.no_grad():
        sure[2].weight.mul_(20)
        sure[2].bias.mul_(20)
    assert strict.look(sure).keeps  # its temperature is another one, and that is all
    with torch.no_grad():
        sure[2].weight[0].mul_(0.3)
    assert strict.look(sure).room < plain.look(sure).room


def test_noise_is_off_while_it_settles_and_zeros_stay(dense):
    seen = []

    class Watch(Callback):
        def __init__(self, model):
            self.model = model

        def on_step(self, moment):
            alive = [int((each.theta != 0).sum()) for each in posteriors(self.model)]
            seen.append((moment.progress, self.model[0].draws_noise, self.model.training, sum(alive)))

    model = sparsevd.sparsify(dense)
    sparsevd.fit(
        model, TRAIN, None, CONFIG, budget=sparsevd.Budget(sparsity=0.9), progress=False, callbacks=[Watch(model)]
    )
    late = [each for each in seen if not each[1]]
    assert seen[-len(late) :] == late  # once off, it stays off
    assert steering.WARM_UP + steering.TENTH <= late[0][0] <= steering.LEARNING + 0.01
    assert all(training for *_, training, _ in late[:-1])
    counts = [alive for *_, alive in late]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("left", "ends"), [([0.8, 0.5, 0.3, 0.2, 0.1, 0.05], None), ([0.8, 0.6, 0.57, 0.5], 0.303)])
def test_learning_ends_where_the_noise_takes_no_more(dense, monkeypatch, left, ends):
    model = sparsevd.sparsify(dense)
    steered = steering.Steering(model, posteriors(model), sparsevd.Budget(sparsity=0.9), None, 1000)
    for tenth, share in enumerate(left, start=1):
        monkeypatch.setattr(steered, "_softly_kept", lambda share=share: share)
        steered.look(min(0.101 * tenth, steering.LEARNING - 0.01), 1.0, torch.optim.SGD(model.parameters(), 0.1))
        if steered.learning and steered._learns_until < steering.LEARNING:
            break
    assert steered._learns_until == pytest.approx(ends or steering.LEARNING)


class Tied(nn.Module):
    """One matrix, read forwards by a table and an output layer, beside a layer that its owner keeps in eval mode."""

    def __init__(self):
        super().__init__()
        self.embed, self.frozen, self.out = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.frozen(self.embed(tokens)).relu())


def test_without_noise_no_layer_has_any_and_a_frozen_one_never():
    """Layers that share a weight are asked one by one; modes of training and eval stay the owner's."""
    torch.manual_seed(0)
    net = Tied()
    tokens = torch.arange(600) % 6
    data = tokens, (tokens + 1) % 6
    sparsevd.fit_dense(net, data, None, sparsevd.FitConfig(epochs=10, learning_rate=1e-2), progress=False)
    model = sparsevd.sparsify(net)
    drawn = []

    def forward(model, x):
        if model.training:
            drawn.append([each.draws_noise for each in (model.embed, model.out, model.frozen)])
            assert [each.training for each in (model.embed, model.out, model.frozen)] == [True, True, False]
        return model(x)

    for noise in (False, True):
        drawn.clear()
        model.train().frozen.eval()
        config = sparsevd.FitConfig(epochs=6, noise=noise, learning_rate=1e-3)
        sparsevd.fit(model, data, data, config, budget=sparsevd.Budget(sparsity=0.3), forward=forward, progress=False)
        assert drawn
        if noise is False:
            assert not any(any(each) for each in drawn)
        else:  # first with noise, then without
            assert [True, True, False] in drawn
            assert drawn[-1] == [False] * 3
        assert all(each.noise_is_on for each in (model.embed, model.out, model.frozen))


def test_the_start_is_remembered_for_any_network(dense):
    budget = sparsevd.Budget(max_error_increase=1.0)
    for noisy in (True, False):
        model = sparsevd.sparsify(dense)
        steered = Steering(model, posteriors(model), budget, budget.judge(model, HELD_OUT), 1500, noisy=noisy)
        steered.begin()
        optimizer = torch.optim.Adam(model.parameters())
        with torch.no_grad():
            model[0].weight.normal_()
        steered.look(0.004, 1.0, optimizer)
        assert torch.equal(model[0].weight, dense[0].weight)
        assert steered.rate_factor == 0.5


def test_a_copy_of_a_network_without_noise_has_it():
    model = sparsevd.sparsify(nn.Linear(3, 2)).train()
    switch_noise(model, False)
    assert not model.draws_noise
    assert copy.deepcopy(model).draws_noise


@pytest.mark.parametrize(("weights", "kept"), [(1, 1), (100, 2), (10_000, 20), (1_000_000, 1000)])
def test_no_layer_is_cut_to_nothing(weights, kept):
    assert int((steering._with_the_best_kept(torch.randn(weights)) == -math.inf).sum()) == kept
