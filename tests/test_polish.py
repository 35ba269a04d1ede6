"""Plain fine-tuning of what is left: it learns, and zeros stay exactly zero."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError
from sparsevd.training.progress import Callback
from sparsevd.training.zeros import Zeros
from test_budget import problem


def pruned_network(norm=False):
    torch.manual_seed(1)
    layers = [nn.Linear(30, 24), nn.BatchNorm1d(24) if norm else nn.Identity(), nn.ReLU(), nn.Linear(24, 2)]
    model = sparsevd.sparsify(nn.Sequential(*layers))
    config = sparsevd.FitConfig(epochs=10, batch_size=50, learning_rate=1e-2)
    sparsevd.fit(model, problem(), None, config, progress=False)
    return sparsevd.prune(model, sparsity=0.95)


def test_it_learns_and_zeros_stay():
    pruned = pruned_network()
    zero = {name: weight == 0 for name, weight in pruned.state_dict().items() if weight.ndim > 1}
    before, dense = sparsevd.evaluate(pruned, problem()), copy.deepcopy(pruned)
    history = sparsevd.polish(pruned, problem(), problem(500, 7), epochs=4, progress=False)
    assert [each.epoch for each in history] == [1, 2, 3, 4]
    assert history[0].learning_rate < 4e-4
    assert history[-1].val_loss is not None
    assert sparsevd.evaluate(pruned, problem()).loss < before.loss
    for name, weight in pruned.state_dict().items():
        if name in zero:
            assert torch.equal(weight == 0, zero[name])
            assert not torch.equal(weight, dense.state_dict()[name])
    assert not pruned.training
    sparsevd.fit_dense(dense, problem(), None, sparsevd.FitConfig(epochs=1), progress=False, keep_zeros=False)
    assert (dense[0].weight[zero["0.weight"]] != 0).any()  # else the test could not fail


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p)])
def test_against_momentum(make):
    """Its speed carries a weight on, even without a gradient of its own: not over a zero."""
    model = nn.Linear(30, 2)
    with torch.no_grad():
        model.weight[:, ::2] = 0
        model.bias.zero_()
    zeros, optimizer = Zeros(model), make(model.parameters())
    x, y = problem(100)
    for step in range(20):
        loss = nn.functional.cross_entropy(model(x), y) * (step < 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 10:
            assert (model.weight[:, ::2] != 0).any()  # so it has to be put back
        zeros.put_back()
        assert (model.weight[:, ::2] == 0).all()
        assert (model.weight[:, 1::2] != 0).all()
        assert (model.bias != 0).all()


def test_a_teacher_is_learned_from():
    """Of a teacher that says the opposite of the labels, at all of the weight, only its opinion counts."""
    pruned, (x, y) = pruned_network(), problem()
    opinion = 10.0 * nn.functional.one_hot(1 - y, 2).float()
    config = sparsevd.FitConfig(learning_rate=1e-2)
    told = copy.deepcopy(pruned)
    sparsevd.polish(
        told, (x, y), epochs=30, config=config, teacher=opinion, temperature=1.0, teacher_weight=1.0, progress=False
    )
    alone = copy.deepcopy(pruned)
    sparsevd.polish(alone, (x, y), epochs=30, config=config, progress=False)
    assert sparsevd.evaluate(told, (x, 1 - y)).error < 25
    assert sparsevd.evaluate(alone, (x, y)).error < 25
    assert torch.equal(told[0].weight == 0, pruned[0].weight == 0)
    with pytest.raises(ArgumentError, match="teacher_weight=2"):
        sparsevd.polish(pruned, (x, y), teacher=opinion, teacher_weight=2.0, progress=False)


def test_on_data_that_does_not_know_its_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            x, y = problem(200)
            yield from zip(x.split(50), y.split(50), strict=True)

    pruned, data = pruned_network(), torch.utils.data.DataLoader(Stream(), batch_size=None)
    with pytest.raises(ArgumentError, match="give n_train"):
        sparsevd.polish(pruned, data, progress=False)
    assert len(sparsevd.polish(pruned, data, epochs=2, n_train=200, progress=False)) == 2


def test_at_every_step_and_with_a_callback_of_ones_own():
    pruned = pruned_network()
    kept = int((pruned[0].weight != 0).sum())
    counts = []

    class Counts(Callback):
        def on_step(self, moment):
            counts.append(int((pruned[0].weight != 0).sum()))

    sparsevd.polish(pruned, problem(200), epochs=2, progress=False, callbacks=[Counts()])
    assert counts == [kept] * 4


def test_batch_norm_keeps_its_statistics_and_the_recipe_is_the_users():
    pruned = pruned_network(norm=True)
    before = {name: value.clone() for name, value in pruned.state_dict().items()}
    config = sparsevd.FitConfig(epochs=40, batch_size=30, learning_rate=1e-3)
    history = sparsevd.polish(pruned, problem(), epochs=1, config=config, progress=False)
    assert len(history) == 1
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(before[name], pruned.state_dict()[name])
    assert not torch.equal(before["1.weight"], pruned[1].weight)
    again = pruned_network(norm=True)
    sparsevd.polish(again, problem(), epochs=1, config=dataclasses.replace(config, epochs=7), progress=False)
    assert torch.equal(again[0].weight, pruned[0].weight)


def test_a_noisy_network_is_refused():
    with pytest.raises(ArgumentError, match="prune it first"):
        sparsevd.polish(sparsevd.sparsify(nn.Linear(30, 2)), problem(50))
    with pytest.raises(ArgumentError, match="epochs=0 must be a positive integer"):
        sparsevd.polish(nn.Linear(30, 2), problem(50), epochs=0)
