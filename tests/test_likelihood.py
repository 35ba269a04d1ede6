"""Likelihoods of ours: their formulas, that the units of y do not matter, what is shown, and what is said of others."""

import copy
import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError, SparseVDWarning
from sparsevd.training.evaluation import wrong
from sparsevd.training.gaussian import RSquared
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.progress import Callback

torch.manual_seed(0)
X = torch.randn(200, 8)
Y = 2 * X[:, :1] - X[:, 1:2] + 0.3 * torch.randn(200, 1)
CONFIG = sparsevd.FitConfig(epochs=20, batch_size=20, learning_rate=0.02)


def network(outputs=1, seed=1):
    torch.manual_seed(seed)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, outputs)))


def trained(y=Y, model=None, config=CONFIG, **how):
    model = model or network(y.shape[1])
    loss = sparsevd.Gaussian()
    history = sparsevd.fit(model, (X, y), (X, y), config, loss=loss, progress=False, **how)
    return model, history, loss


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_nll_is_that_of_normal_distributions():
    output, y = torch.randn(50, 3, requires_grad=True), 5 * torch.randn(50, 3)
    loss = sparsevd.Gaussian()
    value = loss(output, y)
    deviation = (y - output).square().mean(0).sqrt()
    expected = -torch.distributions.Normal(output, deviation).log_prob(y).sum(1).mean()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(loss.variance, deviation.detach().square())
    (gradient,) = torch.autograd.grad(value, output)  # the variance counts as known
    torch.testing.assert_close(gradient, ((output - y) / deviation**2 / 50).detach())


def test_the_variance_is_learned_with_a_gradient_and_used_without():
    loss = sparsevd.Gaussian()
    y = torch.zeros(1000, 1)
    assert loss(torch.ones(1000, 1), y).item() == pytest.approx(0.5 * (1 + math.log(2 * math.pi)))  # suits it best
    for _ in range(300):
        loss((2 * torch.randn(1000, 1)).requires_grad_(), y)
    assert loss.variance.item() == pytest.approx(4, rel=0.02)
    assert loss(torch.zeros(1000, 1), y).item() == pytest.approx(0.5 * math.log(2 * math.pi * 4), rel=0.02)
    assert loss.variance.item() == pytest.approx(4, rel=0.02)
    with pytest.raises(ArgumentError, match="not learned"):
        sparsevd.Gaussian().variance  # noqa: B018


def test_outputs_are_columns_channels_or_what_axis_says():
    for shape, axis, outputs in (((6, 3), 1, 3), ((6,), 1, 1), ((6, 2, 4, 4), 1, 2), ((6, 5, 3), -1, 3)):
        loss = sparsevd.Gaussian(axis)
        loss(torch.randn(shape, requires_grad=True), torch.randn(shape))
        assert loss.variance.shape == (outputs,)
    with pytest.raises(ArgumentError, match="axis=0"):
        sparsevd.Gaussian(axis=0)


def test_a_column_stands_for_a_vector_and_nothing_else_is_spread():
    assert sparsevd.Gaussian()(X[:, :1], X[:, 0]).item() == sparsevd.Gaussian()(X[:, 0], X[:, 0]).item()
    for likelihood in (sparsevd.Gaussian(), sparsevd.Bernoulli()):
        with pytest.raises(ArgumentError, match="one target for each output"):
            likelihood(torch.zeros(5, 3), torch.zeros(5))


def test_r2_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    output, y = torch.randn(90, 3), 1000 + torch.randn(90, 3) * torch.tensor([0.1, 1.0, 10.0])
    r2 = RSquared(sparsevd.Gaussian())
    for part in (slice(0, 40), slice(40, 90)):
        r2.add(output[part], y[part])
    assert r2.value() == pytest.approx(metrics.r2_score(y.double(), output.double()), rel=1e-6)


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**10])
def test_a_power_of_two_changes_next_to_nothing(factor):
    """Such a factor is exact in binary; only log σ², which gets a logarithm of it added, is rounded otherwise."""
    reference, before, _ = trained()
    model, history, loss = trained(Y * factor)
    torch.testing.assert_close(model[0].weight, reference[0].weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model[2].weight, reference[2].weight * factor, rtol=1e-3, atol=1e-4 * factor)
    assert history[-1].val_r2 == pytest.approx(before[-1].val_r2, abs=1e-4)
    assert history[-1].sparsity == before[-1].sparsity
    assert loss.variance.sqrt().item() == pytest.approx(0.3 * factor, rel=0.4)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_units_of_y_matter_neither_for_r2_nor_for_the_zeros(scale):
    (_, before, _), (_, after, _) = trained(Y), trained(scale * Y + 7 * scale)
    assert before[-1].val_r2 > 0.9
    assert before[-1].sparsity > 40
    assert abs(after[-1].val_r2 - before[-1].val_r2) < 0.01
    assert abs(after[-1].sparsity - before[-1].sparsity) < 5


def test_each_output_has_units_of_its_own():
    y = torch.cat([Y, X[:, 2:3] + 0.3 * torch.randn(200, 1)], 1)
    _, before, _ = trained(y)
    _, after, loss = trained(y * torch.tensor([1e-3, 1e3]) + torch.tensor([0.0, 1e4]))
    assert abs(after[-1].val_r2 - before[-1].val_r2) < 0.01
    assert abs(after[-1].sparsity - before[-1].sparsity) < 5
    assert loss.variance[1] / loss.variance[0] > 1e9


def test_contracted_layers_take_their_steps_in_the_same_units():
    """Units of the output that have no weight left sit the epochs out; the others go on."""
    y = torch.cat([Y, torch.randn(200, 3), 50 * Y], 1) * 1000
    config = sparsevd.FitConfig(epochs=60, batch_size=20, learning_rate=0.02, drop_patience=1)
    histories = [trained(y * factor, config=config)[1] for factor in (1.0, 0.001)]
    assert any(epoch.dropped for epoch in histories[0])
    assert histories[0][-1].alive["2"][1] < 5
    assert abs(histories[0][-1].val_r2 - histories[1][-1].val_r2) < 0.01
    assert abs(histories[0][-1].sparsity - histories[1][-1].sparsity) < 5


class Stop(Callback):
    """Ctrl-C after so many steps, or after an epoch."""

    def __init__(self, steps=None, epoch=None):
        self.steps, self.epoch = steps, epoch

    def on_step(self, moment):
        if self.steps is not None:
            self.steps -= 1
            if self.steps == 0:
                import signal

                signal.raise_signal(signal.SIGINT)

    def on_epoch(self, moment):
        if moment.epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [{"steps": 5}, {"epoch": 1}, {"epoch": 14}, {"steps": 155}])
def test_a_resumed_run_gives_the_bits_of_an_unbroken_one(tmp_path, stop):
    y = 1000 * Y + 50
    unbroken, history, loss = trained(y)
    with pytest.raises(KeyboardInterrupt):
        trained(y, run_dir=tmp_path, callbacks=[Stop(**stop)])
    resumed, again, learned = trained(y, model=network(seed=2), run_dir=tmp_path, resume=True)
    assert same(resumed, unbroken)
    assert torch.equal(learned.variance, loss.variance)
    assert [epoch.val_r2 for epoch in again] == [epoch.val_r2 for epoch in history]
    finished, _, learned = trained(y, model=network(seed=3), run_dir=tmp_path, resume=True)
    assert same(finished, unbroken)
    assert torch.equal(learned.variance, loss.variance)
    with pytest.raises(CheckpointError, match="likelihood"):
        sparsevd.fit(network(), (X, y.long().flatten() % 1), None, CONFIG, run_dir=tmp_path, resume=True)


def test_a_network_that_predicts_already_keeps_its_weights():
    y = 1000 * Y
    torch.manual_seed(3)
    dense = nn.Linear(8, 1)
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([X, torch.ones(200, 1)], 1), y).solution
        dense.weight.copy_(solution[:8].T)
        dense.bias.copy_(solution[8])
    one = sparsevd.FitConfig(epochs=1, batch_size=20, learning_rate=1e-6)
    model = sparsevd.sparsify(copy.deepcopy(dense))
    sparsevd.fit(model, (X, y), None, one, loss=sparsevd.Gaussian(), progress=False)
    torch.testing.assert_close(model.weight, dense.weight, rtol=1e-3, atol=0.1)
    assert model.log_sigma2.mean().item() == pytest.approx(-8 + 2 * math.log(y.std().item()), abs=0.1)


def test_the_network_predicts_y_itself_at_any_moment():
    y = 1000 * Y + 5000
    seen = []

    class Watch(Callback):
        def on_step(self, moment):
            seen.append(model.eval()(X).mean().item())
            model.train()

    model = network()
    trained(y, model=model, callbacks=[Watch()])
    assert min(seen) > 4000
    assert max(seen) < 6000
    pruned = sparsevd.prune(model)
    assert sparsevd.evaluate(pruned, (X, y), sparsevd.Gaussian()).r2 > 0.9


class Exponential(nn.Sequential):
    def forward(self, x):
        return super().forward(x).exp()


@pytest.mark.parametrize("last", [nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(0)])
def test_the_layer_that_gives_the_output_is_found_behind_views_only(last):
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(8, 1), last))
    config = sparsevd.FitConfig(epochs=1, batch_size=20)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = sparsevd.Gaussian()
        sparsevd.fit(model, (X, 100 * Y.flatten()), None, config, loss=loss, progress=False)
    assert ("standardise y" in " ".join(str(each.message) for each in said)) == isinstance(last, nn.ReLU)


def test_where_the_last_layer_cannot_be_found_standardised_targets_need_no_word():
    model = sparsevd.sparsify(Exponential(nn.Linear(8, 1)))
    config = sparsevd.FitConfig(epochs=1, batch_size=20)
    sparsevd.fit(model, (X, Y / Y.std()), None, config, loss=sparsevd.Gaussian(), progress=False)
    with pytest.warns(SparseVDWarning, match="standardise y") as said:
        sparsevd.fit(model, (X, 100 * Y), None, config, loss=sparsevd.Gaussian(), progress=False)
    assert said[0].filename == __file__


def test_an_output_that_is_no_tensor_needs_a_forward():
    class Two(nn.Linear):
        def forward(self, x):
            return {"mean": super().forward(x)}

    one = sparsevd.FitConfig(epochs=1, batch_size=20)
    model = nn.Sequential(sparsevd.sparsify(nn.Sequential(nn.Linear(8, 8))), Two(8, 1))
    with pytest.raises(ArgumentError, match="is a dict; give its tensor by forward="):
        sparsevd.fit(model, (X, Y), None, one, loss=sparsevd.Gaussian(), progress=False)
    loss, forward = sparsevd.Gaussian(), lambda model, x: model(x)["mean"]
    sparsevd.fit(model, (X, Y / Y.std()), None, one, loss=loss, forward=forward, progress=False)


def test_images_and_loaders():
    images, y = torch.randn(60, 1, 6, 6), 1000 + 50 * torch.randn(60, 2, 4, 4)
    model = sparsevd.sparsify(nn.Conv2d(1, 2, 3))
    config = sparsevd.FitConfig(epochs=2, batch_size=20)
    loss = sparsevd.Gaussian()
    loader = DataLoader(list(zip(images, y, strict=True)), 20, shuffle=True)
    history = sparsevd.fit(model, loader, loader, config, loss=loss, progress=False)
    assert loss.variance.shape == (2,)
    assert model.bias.mean().item() == pytest.approx(1000, rel=0.05)
    assert history[-1].val_r2 > -1  # 0 would be the mean, and in other units it is −400
    assert history[-1].train_r2 > -1


def test_a_dense_network_is_trained_with_it_too():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
    config = sparsevd.FitConfig(epochs=20, batch_size=20, learning_rate=0.01)
    y = 1e4 * Y
    history = sparsevd.fit_dense(model, (X, y), (X, y), config, loss=sparsevd.Gaussian(), progress=False)
    assert history[-1].val_r2 > 0.95
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsevd.fit_dense(model, (X, Y), None, config, loss=F.mse_loss, progress=False)


def test_what_takes_a_loss_takes_a_likelihood():
    model, _, loss = trained(100 * Y)
    data = (X, 100 * Y)
    assert math.isfinite(sparsevd.elbo(model, data, loss))
    found = sparsevd.evaluate(model, data, loss)
    assert found.r2 > 0.9
    assert found.error is None
    budget = sparsevd.Budget(max_loss_increase=0.5)
    pruned = sparsevd.prune(model, budget=budget, data=data, loss=loss)
    assert (
        sparsevd.evaluate(pruned, data, loss).loss
        <= sparsevd.evaluate(sparsevd.prune(model, threshold=math.inf), data, loss).loss + 0.5
    )


def test_the_progress_line_shows_r2(capsys):
    sparsevd.fit(network(), (X, Y), (X, Y), sparsevd.FitConfig(epochs=2, batch_size=20), loss=sparsevd.Gaussian())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert "train R² " in lines[0]
    assert "validation R² " in lines[-1]


LABELS = (X[:, :3] > 0).long()


def test_bernoulli_sums_over_labels():
    output = torch.randn(20, 3)
    target = torch.randint(0, 2, (20, 3))
    expected = -torch.distributions.Bernoulli(logits=output).log_prob(target.float()).sum(1).mean()
    for given in (target, target.float(), target.bool()):
        assert sparsevd.Bernoulli()(output, given).item() == pytest.approx(expected.item(), rel=1e-5)
    wrong = ((output > 0).long() != target).sum().item() / 3
    assert sparsevd.Bernoulli().wrong(output, target) == pytest.approx(wrong)


@pytest.mark.parametrize("labels", [LABELS, LABELS.float()])
def test_several_labels_are_learned(labels, tmp_path):
    model, loss = network(3), sparsevd.Bernoulli()
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(
            model, (X, labels), None, CONFIG, loss=loss, run_dir=tmp_path, progress=False, callbacks=[Stop(steps=13)]
        )
    history = sparsevd.fit(
        network(3), (X, labels), (X, labels), CONFIG, loss=loss, run_dir=tmp_path, resume=True, progress=False
    )
    assert history[-1].val_error < 10
    assert 0 < history[0].train_error < 100
    with pytest.raises(ArgumentError, match="between -"):
        sparsevd.fit(network(), (X, Y), None, CONFIG, loss=loss, progress=False)


def test_bernoulli_of_one_label_is_binary_cross_entropy():
    output, y = torch.randn(30), torch.randint(0, 2, (30,))
    expected = F.binary_cross_entropy_with_logits(output, y.float())
    assert sparsevd.Bernoulli()(output, y).item() == pytest.approx(expected.item())


def said_of(loss, y, outputs):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one = sparsevd.FitConfig(epochs=1, batch_size=50)
        sparsevd.fit(network(outputs), (X, y), None, one, loss=loss, progress=False)
    assert all(each.filename == __file__ for each in said if each.category is SparseVDWarning)
    return " ".join(str(each.message) for each in said if each.category is SparseVDWarning)


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), functools.partial(F.mse_loss)])
def test_a_squared_error_is_answered_with_a_gaussian(loss):
    assert "loss=sparsevd.Gaussian()" in said_of(loss, Y, 1)


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()])
def test_a_mean_over_labels_is_answered_with_bernoulli(loss):
    assert "3 times its weight; give loss=sparsevd.Bernoulli()" in said_of(loss, LABELS.float(), 3)
    assert said_of(loss, LABELS[:, :1].float(), 1) == ""  # of one label it is right


def test_likelihoods_of_the_users_are_taken_as_they_are():
    assert said_of(lambda output, y: (output - y).square().mean(), Y, 1) == ""


def test_wrong_losses_are_refused():
    with pytest.raises(ArgumentError, match=r"give one of it: Gaussian\(\)"):
        said_of(sparsevd.Gaussian, Y, 1)
    with pytest.raises(ArgumentError, match="reduction='sum'"):
        said_of(functools.partial(F.cross_entropy, reduction="sum"), LABELS[:, 0], 2)
    with pytest.raises(ArgumentError, match="for numbers loss=sparsevd.Gaussian"):
        said_of(F.cross_entropy, Y, 1)


class Next(nn.Module):
    """The next word, for each position."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.table(x)).transpose(1, 2)


def words_and_labels():
    words = torch.randint(0, 5, (40, 6), generator=torch.Generator().manual_seed(0))
    return words, words.masked_fill(torch.arange(6) > 3, -100)  # 160 targets in 40 examples


def test_a_mean_over_tokens_is_weighed_by_their_number(monkeypatch):
    """The KL is divided by what the loss is a mean over; by the number of examples it would be four times as heavy."""
    weights = []
    step = BoundAdam.step
    monkeypatch.setattr(BoundAdam, "step", lambda self: weights.append(self.kl_weight) or step(self))
    config = sparsevd.FitConfig(epochs=2, batch_size=40, learning_rate=1e-3, warm_up_end=0.0)
    last = sparsevd.fit(sparsevd.sparsify(Next()), words_and_labels(), None, config, progress=False)[-1]
    assert weights == [1 / 160, 1 / 160]
    assert (-last.elbo - last.kl) / last.train_loss == pytest.approx(160)


def test_data_that_comes_in_batches_must_say_how_many_tokens_it_has():
    words, labels = words_and_labels()
    loader = DataLoader(TensorDataset(words, labels), batch_size=10)
    few = sparsevd.FitConfig(epochs=1, learning_rate=1e-3)

    def fitted(data, n_train=None):
        model = sparsevd.sparsify(Next())
        return sparsevd.fit(model, data, None, few, n_train=n_train, progress=False)[-1]

    with pytest.raises(ArgumentError, match=r"example of the first batch has 4, .* \(about 160\)"):
        fitted(loader)
    with pytest.raises(ArgumentError, match="about 160"):
        fitted(loader, 40)
    assert fitted(loader, 160).elbo < 0
    assert fitted((words, labels), 160).elbo < 0
    with pytest.raises(ArgumentError, match="n_train=40 but the loss is a mean over the 160 targets of 40 examples"):
        fitted((words, labels), 40)
    with pytest.raises(ArgumentError, match="all targets of train are such as the loss ignores"):
        fitted((words, torch.full_like(labels, -100)))
    one_each = DataLoader(TensorDataset(X, LABELS[:, 0]), batch_size=10)
    with pytest.raises(ArgumentError, match=f"n_train=5000 but train has {len(X)} examples"):
        sparsevd.fit(network(2), one_each, None, few, n_train=5000, progress=False)


def test_the_bound_is_that_of_all_targets_in_whatever_form_they_come():
    words, labels = words_and_labels()
    model = sparsevd.sparsify(Next())
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(words, labels), batch_size=10)
    bounds = [sparsevd.elbo(model, data) for data in ((words, labels), loader)]
    assert bounds == [pytest.approx(sparsevd.elbo(model, (words, labels), n_train=160), rel=0.01)] * 2  # other noise


def test_texts_have_a_perplexity(capsys):
    words = torch.randint(0, 5, (40, 6))

    torch.manual_seed(0)
    model = sparsevd.sparsify(Next())
    history = sparsevd.fit(model, (words, words), (words, words), sparsevd.FitConfig(epochs=2, batch_size=10))
    found = sparsevd.evaluate(model, (words, words))
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert history[-1].val_perplexity == pytest.approx(found.perplexity)
    assert "validation perplexity" in capsys.readouterr().out
    assert sparsevd.evaluate(network(2), (X, LABELS[:, 0])).perplexity is None


class Shown(nn.Module):
    """Its inputs are its outputs: logits that a test has chosen."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + 0 * self.nothing


def one_by_one(x, y):
    return DataLoader([(a, b) for a, b in zip(x, y, strict=True)], batch_size=1)


@pytest.mark.parametrize("ignored", [-100, 2])
def test_each_token_counts_once_however_texts_are_batched(ignored):
    torch.manual_seed(0)
    logits, words = 3 * torch.randn(3, 5, 100), torch.randint(0, 5, (3, 100))
    words[words == ignored] = 3
    words[0, 1:] = words[1] = ignored  # 1, 0 and 100 words
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    total = sum(
        -logits[i, :, j].log_softmax(0)[words[i, j]].item()
        for i in range(3)
        for j in range(100)
        if words[i, j] != ignored
    )
    whole = sparsevd.evaluate(Shown(), (logits, words), loss)
    apart = sparsevd.evaluate(Shown(), one_by_one(logits, words), loss)
    partial = functools.partial(F.cross_entropy, ignore_index=ignored)
    for found in (whole, apart, sparsevd.evaluate(Shown(), one_by_one(logits, words), partial)):
        assert found.loss == pytest.approx(total / 101, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(total / 101), rel=1e-4)


def test_the_bound_is_the_same_however_texts_are_batched():
    torch.manual_seed(0)
    logits, words = torch.randn(3, 5, 10), torch.randint(0, 5, (3, 10))
    words[0, 1:] = words[1] = -100
    model = sparsevd.sparsify(nn.Linear(10, 10), threshold=math.inf, initial_log_sigma2=-60.0)
    whole = sparsevd.elbo(model, (logits, words))
    assert math.isfinite(whole)
    assert sparsevd.elbo(model, one_by_one(logits, words), n_train=11) == pytest.approx(whole, rel=1e-6)


def test_ignored_examples_are_no_errors():
    logits = torch.eye(4)
    y = torch.tensor([0, 3, -100, -100])  # one right, one wrong
    assert sparsevd.evaluate(Shown(), (logits, y)).error == 50
    assert sparsevd.evaluate(Shown(), one_by_one(logits, y)).error == 50
    assert wrong(logits, y) == 2  # of four, as the half of what counts
    assert wrong(logits, torch.full((4,), -100)) == 0
    assert wrong(logits, y, nn.CrossEntropyLoss(ignore_index=0)) == 4
    assert wrong(torch.zeros(1, 200), torch.tensor([156], dtype=torch.uint8)) == 1


def test_data_with_nothing_to_evaluate_on_is_refused():
    with pytest.raises(ArgumentError, match="every target is -100, which the loss ignores"):
        sparsevd.evaluate(Shown(), (torch.eye(3), torch.full((3,), -100)))


def test_a_loss_of_ones_own_is_a_mean_over_examples():
    """Nobody can say which of its targets it passes over."""
    logits, y = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([0, -100, 0])
    assert sparsevd.evaluate(Shown(), (logits, y), lambda output, _: output.mean()).loss == pytest.approx(3)
