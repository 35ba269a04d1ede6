"""Data and models in the forms that people have: arrays, several inputs, names, a metric and a forward of their own."""

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sparsevd
from sparsevd.errors import ArgumentError
from sparsevd.posterior import posteriors
from sparsevd.training.data import batches, checked
from sparsevd.training.progress import Callback

CONFIG = sparsevd.FitConfig(epochs=3, batch_size=20, learning_rate=1e-2, warm_up_end=0.3, drop_from=0.5)
A = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
B = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
Y = (A[:, 0] + B[:, 0] > 0).long()


class Two(nn.Module):
    """Takes two inputs, or one tensor with both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, a, b=None):
        if b is None:
            a, b = a.split([4, 3], 1)
        return self.head(torch.tanh(self.first(a) + self.second(b)))


class Named(Two):
    """As models of Transformers: named inputs, and an output that is a mapping."""

    def forward(self, a, b):
        return OrderedDict(hidden=a, logits=super().forward(a, b))


class Examples(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return {
            "pairs": ((A[i], B[i]), Y[i]),
            "dicts": {"a": A[i], "b": B[i], "labels": Y[i]},
            "dict and target": ({"a": A[i], "b": B[i]}, Y[i]),
        }[self.form]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(network, data, **settings):
    model = sparsevd.sparsify(network)
    history = sparsevd.fit(model, data, data, CONFIG, progress=False, **settings)
    return weights(model), history[-1], sparsevd.evaluate(model, data).loss, sparsevd.elbo(model, data, n_train=100)


def test_every_form_of_the_same_data_gives_the_same_network():
    together, apart = trained(Two(), (torch.cat([A, B], 1), Y)), trained(Two(), ((A, B), Y))
    forms = {
        "numpy": (together, Two(), (torch.cat([A, B], 1).double().numpy(), Y.numpy())),
        "list of arrays": (apart, Two(), [[A.numpy(), B.numpy()], Y.numpy()]),
        "dict": (apart, Named(), ({"a": A, "b": B}, Y)),
    }
    for name, (expected, network, data) in forms.items():
        found = trained(network, data)
        torch.testing.assert_close(found[0], expected[0], msg=name)
        assert found[1].dropped == expected[1].dropped
        assert found[1].val_error == expected[1].val_error
        assert found[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("form", ["pairs", "dicts", "dict and target"])
def test_datasets_and_loaders_may_give_several_inputs(form):
    network = Two() if form == "pairs" else Named()
    for data in (Examples(form), DataLoader(Examples(form), batch_size=20)):
        _, last, loss, bound = trained(network, data)
        assert last.val_error < 40
        assert np.isfinite([loss, bound]).all()


def test_a_forward_of_ones_own():
    data = ({"a": A, "b": B}, Y)
    expected = trained(Named(), data)[0]
    model = sparsevd.sparsify(Two())
    calls = []

    def forward(model, inputs):
        calls.append(sorted(inputs))
        return model(inputs["a"], inputs["b"])

    sparsevd.fit(model, data, data, CONFIG, progress=False, forward=forward)
    torch.testing.assert_close(weights(model), expected)
    assert calls[0] == ["a", "b"]
    assert sparsevd.evaluate(model, data, forward=forward).loss > 0
    assert sparsevd.elbo(model, data, forward=forward) < 0


def test_a_metric_of_ones_own_is_measured_shown_and_kept(tmp_path):
    data = ((A, B), Y)
    texts = []

    class Watch(Callback):
        def on_epoch(self, moment):
            texts.append(moment.text)

    def share_of_ones(output, target):
        return (output.argmax(1) == 1).float().mean()

    model = sparsevd.sparsify(Two())
    history = sparsevd.fit(
        model, data, data, CONFIG, progress=False, metric=share_of_ones, callbacks=[Watch()], run_dir=tmp_path
    )
    assert 0 < history[-1].val_metric < 1
    assert f"share of ones {history[-1].val_metric:.4g}" in texts[-1]
    assert history[-1].val_metric == sparsevd.evaluate(model, data, metric=share_of_ones).metric
    again = sparsevd.fit(sparsevd.sparsify(Two()), data, data, CONFIG, progress=False, run_dir=tmp_path, resume=True)
    assert [epoch.val_metric for epoch in again] == [epoch.val_metric for epoch in history]
    with pytest.raises(ArgumentError, match="there is no val"):
        sparsevd.fit(model, data, None, CONFIG, progress=False, metric=share_of_ones)


def test_what_a_callback_hears_of():
    heard = []

    class Watch(Callback):
        def on_step(self, moment):
            heard.append(("step", moment.epoch, moment.batch, moment.metrics and moment.metrics.epoch))

        def on_epoch(self, moment):
            heard.append(("epoch", moment.epoch, round(moment.progress, 6), moment.metrics.epoch))

    sparsevd.fit(sparsevd.sparsify(Two()), ((A, B), Y), None, CONFIG, progress=False, callbacks=[Watch()])
    assert heard[:2] == [("step", 1, 1, None), ("step", 1, 2, None)]
    assert heard[5:7] == [("epoch", 1, 0.333333, 1), ("step", 2, 1, 1)]
    assert heard[-1] == ("epoch", 3, 1.0, 3)
    assert len(heard) == 18


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (((A, B[:50]), Y), "100 and 50 inputs and 100 targets"),
        ((np.array(["a", "b"]), Y[:2]), "the x of train is an array of <U1"),
        (({"a": A, "b": [1]}, Y), r"the x of train\['b'\] is a list"),
        ((A, B, Y), "train has 3 parts"),
    ],
)
def test_data_that_cannot_be_is_refused(data, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        sparsevd.fit(sparsevd.sparsify(Two()), data, None, CONFIG, progress=False)


def test_a_dict_without_a_target_says_what_to_call_it():
    class Nameless(Examples):
        def __getitem__(self, i):
            return {"a": A[i], "answer": Y[i]}

    with pytest.raises(ArgumentError, match="'a', 'answer' and no target; call it one of labels"):
        next(batches(checked(Nameless("dicts"), "train"), 10, shuffle=False))


class Padded(nn.Module):
    """Texts of any length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(50, 6, padding_idx=0), nn.Linear(6, 2)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


def test_batches_may_differ_in_shape():
    """Texts are padded to the longest of their batch."""
    torch.manual_seed(0)
    texts = [(torch.randint(1, 50, (int(length),)), i % 2) for i, length in enumerate(torch.randint(3, 30, (80,)))]

    def padded(examples):
        tokens = nn.utils.rnn.pad_sequence([text for text, _ in examples], batch_first=True)
        return tokens, torch.tensor([label for _, label in examples])

    loader = DataLoader(texts, 20, collate_fn=padded)
    config = dataclasses.replace(CONFIG, epochs=4, drop_from=0.3, warm_up_end=0.2)
    history = sparsevd.fit(sparsevd.sparsify(Padded()), loader, loader, config, progress=False)
    assert any(epoch.elbo_before_drop is not None for epoch in history)


def test_numbers_to_predict_are_not_taken_for_probabilities():
    model = sparsevd.sparsify(nn.Linear(4, 3))
    for y in (torch.randn(100, 3), torch.rand(100), torch.randn(100, 1)):
        for data in ((A, y), DataLoader(list(zip(A, y, strict=True)), 20)):
            with pytest.raises(ArgumentError, match="cross-entropy takes these for the probabilities of classes"):
                sparsevd.fit(model, data, None, CONFIG, progress=False)
    sparsevd.fit(model, (A, torch.rand(100, 3).softmax(1)), None, CONFIG, progress=False)
    sparsevd.fit(model, (A, torch.randn(100, 3)), None, CONFIG, progress=False, loss=sparsevd.Gaussian())


def test_a_loss_that_is_no_mean_is_refused():
    loss = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ArgumentError, match="reduction='sum'"):
        sparsevd.fit(sparsevd.sparsify(nn.Linear(4, 2)), (A, Y), None, CONFIG, progress=False, loss=loss)
    with pytest.raises(ArgumentError, match="n_train=-5 must be a positive integer"):
        sparsevd.elbo(sparsevd.sparsify(nn.Linear(4, 2)), (A, Y), n_train=-5)


def test_classes_of_any_integer_type():
    for dtype in (np.int32, np.int16, np.uint8, np.int64):
        model = sparsevd.sparsify(nn.Linear(4, 2))
        sparsevd.fit(model, (A.numpy(), Y.numpy().astype(dtype)), None, CONFIG, progress=False)


def test_what_its_owner_put_into_eval_mode_stays_there():
    dense = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).train()
    dense[1].eval()
    model = sparsevd.sparsify(dense)
    before = model[1].running_mean.clone()
    sparsevd.fit(model, (A + 3, Y), (A, Y), CONFIG, progress=False)
    assert torch.equal(model[1].running_mean, before)
    whole = sparsevd.sparsify(dense.eval())  # and a network that comes in eval mode is trained
    sparsevd.fit(whole, (A + 3, Y), None, CONFIG, progress=False)
    assert not torch.equal(whole[1].running_mean, before)


def test_a_last_example_alone_joins_the_batch_before_in_a_dataset_too():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    data = [(A[i], Y[i]) for i in range(81)]

    class Of(Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, i):
            return data[i]

    assert [len(y) for _, y in batches(Of(), 20, shuffle=True)] == [20, 20, 20, 21]
    seen = torch.cat([x for x, _ in batches(Of(), 20, shuffle=True)])
    torch.testing.assert_close(seen.sort(0).values, A[:81].sort(0).values)
    sparsevd.fit(model, Of(), None, CONFIG, progress=False)


def test_a_callback_may_evaluate_inside_an_epoch_and_prunes_after_it():
    """While steps are made, layers hold only what has weights left."""
    torch.manual_seed(1)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2)))
    config = sparsevd.FitConfig(
        epochs=8, batch_size=20, learning_rate=2e-2, warm_up_end=0.1, drop_from=0.2, drop_patience=1
    )
    found = {"contracted": 0, "refused": 0, "pruned": 0}

    class Curious(Callback):
        def on_step(self, moment):
            if model[0].part is None:
                return
            found["contracted"] += 1
            assert sparsevd.evaluate(model, (A, Y)).loss < 10
            with pytest.raises(ArgumentError, match="after an epoch"):
                sparsevd.prune(model)
            found["refused"] += 1

        def on_epoch(self, moment):
            inside = sparsevd.evaluate(model, (A, Y)).loss
            assert sparsevd.evaluate(sparsevd.prune(model), (A, Y)).loss == pytest.approx(inside, rel=1e-5)
            found["pruned"] += 1
            if moment.epoch == 2:  # as the schedule does where units have died
                first, second = posteriors(model)
                first.drop(torch.arange(40)[:, None].expand(40, 4) >= 10)
                second.drop(torch.arange(40)[None].expand(2, 40) >= 10)

    sparsevd.fit(model, (A, Y), None, config, progress=False, callbacks=[Curious()])
    assert found["contracted"] == found["refused"] > 0
    assert found["pruned"] == 8


def test_callbacks_that_are_none_are_refused():
    for callbacks in (print, [print], Callback()):
        with pytest.raises(ArgumentError, match="a list of sparsevd.training.progress.Callback"):
            sparsevd.fit(sparsevd.sparsify(nn.Linear(4, 2)), (A, Y), None, CONFIG, progress=False, callbacks=callbacks)


def test_an_exception_leaves_the_weights_in_their_order_in_memory():
    class Stop(Exception, Callback):
        def on_step(self, moment):
            raise self

    images = torch.randn(40, 3, 8, 8), torch.arange(40) % 2
    model = sparsevd.sparsify(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)))
    with pytest.raises(Stop):
        sparsevd.fit(model, images, None, CONFIG, progress=False, callbacks=[Stop()])
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_units_and_inputs_are_counted_by_the_layout_of_the_layer():
    layers = {"linear": nn.Linear(3, 5), "transposed": nn.ConvTranspose2d(3, 5, 2), "words": nn.Embedding(3, 5)}
    for name, layer in layers.items():
        (posterior,) = posteriors(sparsevd.sparsify(layer))
        assert posterior.inputs_and_units() == [3, 5], name
