"""A teacher beside the labels: what the objective is, who sees what, and that a run without one stays as it was."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError
from sparsevd.training.data import Augmented
from sparsevd.training.progress import Callback
from sparsevd.training.teacher import Teacher

torch.manual_seed(0)
X = torch.randn(120, 6)
Y = (X[:, 0] > X[:, 1]).long()
CONFIG = sparsevd.FitConfig(epochs=3, batch_size=20, learning_rate=0.02)
TEACHER = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))


def student():
    torch.manual_seed(1)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))


def trained(data=(X, Y), **how):
    model = student()
    history = sparsevd.fit(model, data, (X, Y), CONFIG, progress=False, **how)
    return model, history


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def logits():
    with torch.no_grad():
        return copy.deepcopy(TEACHER).eval()(X)


def test_the_divergence_is_that_of_two_distributions():
    """Against the sum over the classes, written out."""
    output, given, t = torch.randn(7, 3), torch.randn(7, 3), 2.5
    p, q = (given.double() / t).softmax(1), (output.double() / t).softmax(1)
    expected = t**2 * sum((p[i, k] * (p[i, k].log() - q[i, k].log())) for i in range(7) for k in range(3)) / 7
    assert Teacher(given, t).divergence(output, given).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_objective_mixes_teacher_and_labels():
    output, given = torch.randn(4, 3), torch.randn(4, 3)
    nll = F.cross_entropy(output, torch.tensor([0, 1, 2, 0]))
    batch = Teacher(given, 3.0, 0.9).beside((torch.zeros(4, 1), torch.zeros(4)))
    mixed = Teacher(given, 3.0, 0.9).mixed(nll, output, batch, None)
    expected = 0.9 * Teacher(given, 3.0).divergence(output, given) + 0.1 * nll
    assert mixed.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_gradient_of_the_teachers_term_keeps_its_size_at_high_temperatures():
    """As T → ∞ it is that of half the squared distance of the centred logits, over the classes."""
    output, given = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(Teacher(given, 1e4).divergence(output, given), output)
    centred = (output - output.mean(1, keepdim=True)) - (given - given.mean(1, keepdim=True))
    torch.testing.assert_close(gradient, centred.detach() / 3 / 4, rtol=1e-3, atol=1e-6)


def test_a_network_and_its_logits_teach_the_same():
    by_network, _ = trained(teacher=TEACHER)
    by_logits, _ = trained(teacher=logits())
    for name, value in by_network.state_dict().items():  # but for the rounding of logits of other batches
        torch.testing.assert_close(by_logits.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    without, _ = trained()
    assert (without[0].weight - by_network[0].weight).abs().max() > 0.01


def test_with_weight_zero_the_teacher_changes_nothing():
    assert same(trained(teacher=TEACHER, teacher_weight=0.0)[0], trained()[0])


def test_the_teacher_is_in_eval_mode_and_gets_its_modes_back():
    seen = []
    teacher = copy.deepcopy(TEACHER).train()
    teacher[1].eval()
    teacher.register_forward_hook(lambda module, args, out: seen.append((module.training, out.requires_grad)))
    before = copy.deepcopy(teacher.state_dict())
    trained(teacher=teacher)
    assert set(seen) == {(False, False)}
    assert teacher.training
    assert teacher[2].training
    assert not teacher[1].training
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


def test_the_teacher_sees_the_very_images_that_the_student_sees():
    images = torch.randn(60, 1, 4, 4)
    seen = {"student": [], "teacher": []}
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    model = sparsevd.sparsify(copy.deepcopy(teacher))
    teacher.register_forward_pre_hook(lambda module, args: seen["teacher"].append(args[0]))
    model.register_forward_pre_hook(lambda module, args: seen["student"].append(args[0]) if module.training else None)
    config = dataclasses.replace(CONFIG, epochs=1)
    train = Augmented((images, Y[:60]), shift=1)
    sparsevd.fit(model, train, None, config, teacher=teacher, progress=False)
    assert len(seen["teacher"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen["student"][:3], seen["teacher"], strict=True))


def test_the_loss_that_is_shown_is_that_of_the_labels():
    model, history = trained(teacher=TEACHER, teacher_weight=1.0)
    assert history[-1].val_loss == pytest.approx(sparsevd.evaluate(model, (X, Y)).loss)
    # A teacher that knows nothing of the labels: its own term falls, theirs does not.
    assert history[-1].train_loss > 0.5


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"teacher": "lenet"}, "give a network, or a tensor"),
        ({"teacher": torch.zeros(120, dtype=torch.int64)}, "logits are floating-point"),
        ({"teacher": torch.zeros(100, 2)}, "100 rows of logits for 120 examples"),
        ({"teacher": torch.zeros(120, 3)}, "both must be"),
        ({"teacher": TEACHER, "temperature": 0.0}, "temperature=0.0"),
        ({"teacher": TEACHER, "teacher_weight": 1.5}, "teacher_weight=1.5"),
        ({"teacher": nn.LSTM(6, 2)}, "a tuple"),
    ],
)
def test_what_cannot_teach_is_refused(how, words):
    with pytest.raises(ArgumentError, match=words):
        trained(**how)


def test_logits_need_data_that_says_which_example_is_which():
    pairs = list(zip(X, Y, strict=True))
    with pytest.raises(ArgumentError, match="which row of the teacher's logits"):
        trained(DataLoader(pairs, 20), teacher=logits())
    with pytest.raises(ArgumentError, match="training changes them"):
        trained(Augmented((X.view(120, 1, 2, 3), Y), shift=1), teacher=logits())
    model = student()
    with pytest.raises(ArgumentError, match="the very network"):
        sparsevd.fit(model, (X, Y), None, CONFIG, teacher=model, progress=False)


class Stop(Callback):
    def on_epoch(self, moment):
        if moment.epoch == 1:
            raise KeyboardInterrupt


def test_a_run_goes_on_with_the_same_teacher_only(tmp_path):
    unbroken, _ = trained(teacher=logits())
    with pytest.raises(KeyboardInterrupt):
        trained(teacher=logits(), run_dir=tmp_path, callbacks=[Stop()])
    for other in ({}, {"teacher": logits() + 1}, {"teacher": logits(), "temperature": 2.0}):
        with pytest.raises(CheckpointError, match="other settings.*teacher"):
            trained(run_dir=tmp_path, resume=True, **other)
    assert same(trained(teacher=logits(), run_dir=tmp_path, resume=True)[0], unbroken)


def test_the_run_names_its_teacher(capsys):
    sparsevd.fit(student(), (X, Y), None, CONFIG, teacher=logits(), teacher_weight=0.25)
    assert capsys.readouterr().out.startswith("taught by logits (120, 2) (")
    sparsevd.fit(student(), (X, Y), None, CONFIG)
    assert "taught" not in capsys.readouterr().out
