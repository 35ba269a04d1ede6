"""The training loop: what it learns, the forms of data it takes, and that a broken run goes on to the same result."""

import copy
import dataclasses
import itertools
import json
import math
import re
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError, ConversionError, DivergenceError, SparseVDWarning
from sparsevd.posterior import Posterior
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.data import Augmented, batches
from sparsevd.training.evaluation import wrong
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.progress import Callback
from sparsevd.training.recipes import DECAYS

FEW_AND_FAST = sparsevd.FitConfig(epochs=20, learning_rate=2e-2)
FEW = sparsevd.FitConfig(epochs=4, batch_size=50, learning_rate=4e-3)


def problem(n=500, features=12, relevant=2):
    """Classes that depend on the first few features only."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, features, generator=generator)
    y = (x[:, :relevant].sum(1) > 0).long()
    return x, y


def network(features=12, norm=False):
    torch.manual_seed(5)
    layers = [nn.Linear(features, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 2)]
    return sparsevd.sparsify(nn.Sequential(*layers))


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def without_time(history):
    return [dataclasses.replace(metrics, seconds=0.0) for metrics in history]


def test_it_finds_the_relevant_inputs():
    model = network()
    config = sparsevd.FitConfig(epochs=60, batch_size=50, learning_rate=2e-2)
    history = sparsevd.fit(model, problem(2000), problem(500), config, progress=False)
    kept = sparsevd.prune(model)[0].weight.abs().sum(0) > 0
    assert kept[:2].all()
    assert kept[2:].sum() <= 1
    assert history[-1].val_error < 5
    assert history[-1].elbo > history[0].elbo


def test_history_says_what_happened(tmp_path):
    model = network()
    history = sparsevd.fit(model, problem(), problem(100), FEW, run_dir=tmp_path, progress=False)
    assert [metrics.epoch for metrics in history] == [1, 2, 3, 4]
    last = history[-1]
    assert last.learning_rate == 0
    assert last.beta == 1
    assert last.kl == pytest.approx(sparsevd.kl(model).item())
    assert last.elbo == pytest.approx(-(500 * last.train_loss + last.kl))  # N comes from the data
    assert last.ratio == pytest.approx(sparsevd.summary(model).ratio)
    assert last.val_error == pytest.approx(sparsevd.evaluate(model, problem(100)).error)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [dataclasses.asdict(metrics) for metrics in history]
    assert not model.training


def test_the_same_seed_gives_the_same_bits_and_leaves_the_generator_alone():
    first, second, third = network(), network(), network()
    before = torch.get_rng_state()
    sparsevd.fit(first, problem(), None, FEW, progress=False)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(7)
    sparsevd.fit(second, problem(), None, FEW, progress=False)
    sparsevd.fit(third, problem(), None, dataclasses.replace(FEW, seed=1), progress=False)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(third))


class Pairs(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, i):
        x, y = problem()
        return x[i], y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*problem(), strict=True))


@pytest.mark.parametrize(
    "data",
    [
        problem(),
        TensorDataset(*problem()),
        Pairs(),
        DataLoader(TensorDataset(*problem()), batch_size=25, shuffle=True, drop_last=True),
    ],
    ids=["pair", "tensors", "dataset", "loader"],
)
def test_forms_of_data(data):
    history = sparsevd.fit(network(), data, data, dataclasses.replace(FEW, epochs=2), progress=False)
    assert len(history) == 2
    assert history[-1].elbo == pytest.approx(-(500 * history[-1].train_loss + history[-1].kl))


def test_data_of_unknown_length_needs_n_train():
    loader = DataLoader(Stream(), batch_size=50)
    with pytest.raises(ArgumentError, match="n_train"):
        sparsevd.fit(network(), loader, None, FEW, progress=False)
    history = sparsevd.fit(network(), loader, None, FEW, n_train=500, progress=False)
    assert history[-1].elbo == pytest.approx(-(500 * history[-1].train_loss + history[-1].kl))


@pytest.mark.parametrize("n_train", [499, 0, -1, 2.5, True])
def test_a_wrong_n_train_is_refused(n_train):
    with pytest.raises(ArgumentError, match="n_train"):
        sparsevd.fit(network(), problem(), None, FEW, n_train=n_train, progress=False)


@pytest.mark.parametrize("form", [DataLoader, lambda data: data])
def test_n_train_must_agree_with_the_length_of_the_data(form):
    """With another N the KL would have another weight, and the schedules another length."""
    data = form(Subset(TensorDataset(*problem()), range(500)))
    with pytest.raises(ArgumentError, match="n_train=5000 but train has 500 examples; leave n_train out"):
        sparsevd.fit(network(), data, None, FEW, n_train=5000, progress=False)


def test_a_sampler_may_give_other_examples_than_there_are():
    """N is then either; the schedules go by what a pass really gives."""
    dataset = TensorDataset(*problem())
    betas = {}
    for n_train in (200, 500, None):
        sampler = torch.utils.data.RandomSampler(dataset, num_samples=200)
        loader = DataLoader(dataset, batch_size=50, sampler=sampler)
        rates, step = [], BoundAdam.step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoundAdam, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))  # noqa: B023
            history = sparsevd.fit(network(), loader, None, FEW, n_train=n_train, progress=False)
        assert len(rates) == 16
        assert all(later < earlier for earlier, later in itertools.pairwise(rates))
        betas[n_train] = rates
        n = n_train or 200
        assert history[-1].elbo == pytest.approx(-(n * history[-1].train_loss + history[-1].kl))
    assert betas[200] == betas[500] == betas[None]
    with pytest.raises(ArgumentError, match="200 or 500"):
        sparsevd.fit(network(), loader, None, FEW, n_train=300, progress=False)


def test_bfloat16_is_chosen_by_size_and_kept_for_resume(tmp_path, monkeypatch):
    """Never for small layers; a run that goes on where the CPU has no such instructions computes the same."""
    import sparsevd.layers.sampling as sampling

    large, used = nn.Conv2d(1, 64, 3), []
    from sparsevd.training import loop as fit

    original = sampling.sample

    def watched(linear_map, input, noisy):
        used.append((type(linear_map).__name__, noisy.variance_dtype))
        return original(linear_map, input, noisy)

    monkeypatch.setattr("sparsevd.layers.product_layer.sample", watched)
    data = torch.randn(100, 1, 30, 30), torch.randint(0, 2, (100,))
    config = sparsevd.FitConfig(epochs=2, batch_size=100, drop_from=1.0)

    def trained(instructions, **settings):
        monkeypatch.setattr(fit, "multiplies_bfloat16", lambda: instructions)
        torch.manual_seed(0)
        model = sparsevd.sparsify(
            nn.Sequential(copy.deepcopy(large), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
        )
        used.clear()
        sparsevd.fit(model, data, None, config, progress=False, **settings)
        return model, dict(used)

    chosen = {"Convolution": torch.bfloat16, "MatrixProduct": torch.float32}
    unbroken, way = trained(True)
    assert way == chosen
    assert set(trained(False)[1].values()) == {torch.float32}
    with monkeypatch.context() as patch:
        patch.setattr(fit.TrainingFolder, "save", stopped_after(fit.TrainingFolder.save, 1))
        with pytest.raises(KeyboardInterrupt):
            trained(True, run_dir=tmp_path)
    resumed, way = trained(False, run_dir=tmp_path, resume=True)
    assert way == chosen
    assert torch.equal(weights(resumed), weights(unbroken))


def stopped_after(save, count):
    """A writer of checkpoints that is interrupted after so many."""
    calls = itertools.count(1)

    def saving(self, *arguments, **named):
        save(self, *arguments, **named)
        if next(calls) == count:
            raise KeyboardInterrupt

    return saving


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3), r"a pair \(x, y\)"),
        ((torch.zeros(3), torch.zeros(4)), "3 inputs and 4 targets"),
        ((torch.zeros(0, 2), torch.zeros(0)), "0 inputs"),
        ([1, 2], "the x of train is a int"),
        (TensorDataset(torch.zeros(5, 12)), "pair"),
        (None, "NoneType"),
    ],
)
def test_wrong_data_is_refused(data, message):
    with pytest.raises(ArgumentError, match=message):
        sparsevd.fit(network(), data, None, FEW, progress=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", 2.5),
        ("batch_size", -1),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("log_sigma2_lr_ratio", -1.0),
        ("adam_beta2", 1.0),
        ("decay", "never"),
        ("weight_decay", -0.5),
        ("drop_from", 1.5),
        ("drop_from", "0.5"),
        ("contract", "no"),
        ("learning_rate", True),
        ("late_from", -0.1),
        ("late_log_sigma2_lr_ratio", 0.0),
        ("warm_up_end", 2.0),
        ("seed", -1),
    ],
)
def test_a_wrong_setting_is_refused(field, value):
    named = "warm-up from 0.0 to 2.0" if field == "warm_up_end" else f"{field}={value!r} must"
    with pytest.raises(ArgumentError, match=re.escape(named)):
        sparsevd.FitConfig(**{field: value})


def test_dropped_weights_stay_zero():
    """From drop_from on, what is pruned after an epoch never comes back, and the rest goes on learning."""
    model = network()
    config = sparsevd.FitConfig(epochs=20, batch_size=50, learning_rate=2e-2, drop_from=0.5, drop_patience=1)
    gone = []

    class Watch(Callback):
        def on_epoch(self, moment):
            gone.append(~Posterior(model[0]).alive())

    sparsevd.fit(model, problem(2000), None, config, progress=False, callbacks=[Watch()])
    assert not any(mask.any() for mask in gone[:3])  # β < 1
    for mask in gone[3:9]:  # whole inputs and units only
        assert torch.equal(mask, mask.all(0, keepdim=True) | mask.all(1, keepdim=True))
    assert gone[10].any()
    assert all((after | ~before).all() for before, after in itertools.pairwise(gone))
    assert (model[0].weight[gone[-1]] == 0).all()
    assert (model[0].pruned_weight()[gone[-1]] == 0).all()
    never = network()
    sparsevd.fit(never, problem(), None, dataclasses.replace(FEW, drop_from=1.0), progress=False)
    assert Posterior(never[0]).alive().all()


def test_log_sigma2_catches_up_late_in_the_run(monkeypatch):
    rates = []
    monkeypatch.setattr(BoundAdam, "step", lambda self: rates.append([group["lr"] for group in self.param_groups]))
    config = sparsevd.FitConfig(epochs=10, batch_size=100, log_sigma2_lr_ratio=0.2, late_log_sigma2_lr_ratio=5.0)
    sparsevd.fit(network(), problem(), None, dataclasses.replace(config, late_from=0.6, drop_from=1.0), progress=False)
    ratios = [noise / rest for rest, noise in rates]
    begin = round(0.6 * len(ratios))
    assert ratios[:begin] == pytest.approx([0.2] * begin)
    assert ratios[begin:] == pytest.approx([5.0] * (len(ratios) - begin))


def test_decays_go_from_one_to_zero():
    for decay in DECAYS.values():
        assert decay(0.0) == 1
        assert decay(0.5) == pytest.approx(0.5)
        assert decay(1.0) == pytest.approx(0, abs=1e-12)


def test_a_dense_or_frozen_model_is_refused():
    with pytest.raises(ConversionError, match="sparsify"):
        sparsevd.fit(nn.Linear(12, 2), problem(), progress=False)
    with pytest.raises(ArgumentError, match="frozen"):
        sparsevd.fit(network().requires_grad_(False), problem(), progress=False)
    with pytest.raises(ArgumentError, match="fit_dense"):
        sparsevd.fit_dense(network(), problem(), progress=False)


def test_dense_training_is_the_same_loop_without_the_kl():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
    history = sparsevd.fit_dense(model, problem(), problem(200), FEW_AND_FAST, progress=False)
    assert history[-1].kl is None
    assert history[-1].sparsity is None
    assert history[-1].val_error < 5


def test_regression_with_another_loss():
    x = torch.randn(300, 12)
    y = x[:, :1] * 2
    model = sparsevd.sparsify(nn.Linear(12, 1))
    config = sparsevd.FitConfig(epochs=30, batch_size=30, learning_rate=0.05)
    with pytest.warns(SparseVDWarning, match="Gaussian"):
        history = sparsevd.fit(model, (x, y), (x, y), config, loss=F.mse_loss, progress=False)
    assert history[-1].val_error is None
    assert history[-1].val_loss < 0.5


class Stop(Exception, Callback):
    """Ends a training after so many epochs."""

    def on_epoch(self, moment):
        if moment.epoch == self.args[0]:
            raise self


class Press(Callback):
    """Ctrl-C after so many steps."""

    def __init__(self, when):
        self.steps, self.when = 0, when

    def on_step(self, moment):
        self.steps += 1
        if self.steps == self.when:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stop_after", [1, 3])
def test_resume_gives_the_same_bits(tmp_path, stop_after):
    whole = network(norm=True)
    expected = sparsevd.fit(whole, problem(), problem(100), FEW, run_dir=tmp_path / "whole", progress=False)

    broken = network(norm=True)
    with pytest.raises(Stop):
        sparsevd.fit(
            broken,
            problem(),
            problem(100),
            FEW,
            run_dir=tmp_path / "broken",
            progress=False,
            callbacks=[Stop(stop_after)],
        )
    torch.manual_seed(99)
    fresh = network(norm=True)
    history = sparsevd.fit(
        fresh, problem(), problem(100), FEW, run_dir=tmp_path / "broken", resume=True, progress=False
    )
    assert torch.equal(weights(whole), weights(fresh))
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), fresh.buffers(), strict=True))
    assert without_time(history) == without_time(expected)


@pytest.mark.parametrize("when", [1, 17, 20, 31])
def test_interruption_inside_an_epoch_loses_no_step(tmp_path, when):
    """Ctrl-C is looked at between steps; the checkpoint then holds the batches of the epoch that are done."""
    whole = network()
    expected = sparsevd.fit(whole, problem(), None, FEW, progress=False)

    press = Press(when)  # ten steps an epoch
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(network(), problem(), None, FEW, run_dir=tmp_path, progress=False, callbacks=[press])
    assert press.steps == when
    assert Checkpoint.load(tmp_path / "checkpoint.safetensors").progress["state"]["batch"] == (when - 1) % 10 + 1
    resumed = network()
    history = sparsevd.fit(
        resumed, problem(), None, FEW, run_dir=tmp_path, resume=True, progress=False, callbacks=[press]
    )
    assert press.steps == 40
    assert torch.equal(weights(whole), weights(resumed))
    assert without_time(history) == without_time(expected)


class Noisy(Pairs):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.randn_like(x), y


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(TensorDataset(*problem()), batch_size=50, shuffle=True), Noisy],
    ids=["shuffling loader", "noisy data"],
)
def test_resume_inside_an_epoch_of_data_with_randomness_of_its_own(tmp_path, make):
    config = dataclasses.replace(FEW, epochs=2)
    whole = network()
    sparsevd.fit(whole, make(), None, config, progress=False)

    steps = 2 * len(list(batches(make(), config.batch_size, shuffle=False)))
    press = Press(round(0.65 * steps))
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(network(), make(), None, config, run_dir=tmp_path, progress=False, callbacks=[press])
    resumed = network()
    sparsevd.fit(resumed, make(), None, config, run_dir=tmp_path, resume=True, progress=False)
    assert torch.equal(weights(whole), weights(resumed))


def test_outputs_that_are_no_classification_have_no_error():
    assert wrong(torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)) is None
    assert wrong((torch.zeros(2, 3), None), torch.zeros(2, dtype=torch.long)) is None
    assert wrong(torch.eye(3), torch.tensor([0, 1, 0])) == 1


def test_a_last_batch_of_one_joins_the_one_before():
    x, y = problem(101)
    assert [len(a) for a, _ in batches((x, y), 50, shuffle=True)] == [50, 51]
    assert [len(a) for a, _ in batches((x[:1], y[:1]), 50, shuffle=False)] == [1]
    sparsevd.fit(network(norm=True), (x, y), None, FEW, progress=False)


def test_augmented_images_are_windows_of_the_padded_image():
    images = torch.randn(40, 2, 6, 5)
    numbers = torch.arange(40)  # as targets: which image it was
    padded = F.pad(images, [4] * 4)
    seen = set()
    for x, y in batches(Augmented((images, numbers), shift=4, mirror=True), 16, shuffle=True):
        for image, number in zip(x, y, strict=True):
            found = [
                (top, left, mirrored)
                for top, left, mirrored in itertools.product(range(9), range(9), (False, True))
                if torch.equal(image.flip(-1) if mirrored else image, padded[number, :, top : top + 6, left : left + 5])
            ]
            assert found
            seen.add(found[0])
    assert len(seen) > 20
    assert {mirrored for _, _, mirrored in seen} == {False, True}
    # What is measured is the image itself.
    assert torch.equal(next(batches(Augmented((images, numbers), shift=4), 40, shuffle=False))[0], images)


def test_fit_trains_on_augmented_images():
    data = Augmented((torch.randn(60, 1, 4, 4), torch.randint(0, 2, (60,))), shift=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    plain, augmented = copy.deepcopy(model), copy.deepcopy(model)
    sparsevd.fit_dense(plain, tuple(data), None, FEW, progress=False)
    sparsevd.fit_dense(augmented, data, None, FEW, progress=False)
    assert not torch.equal(plain[1].weight, augmented[1].weight)
    with pytest.raises(ArgumentError, match="shift=9"):
        Augmented(data, shift=9)
    with pytest.raises(ArgumentError, match="four dimensions, not 2"):
        Augmented(problem(), mirror=True)


def test_weight_decay_is_for_dense_training():
    config = dataclasses.replace(FEW, weight_decay=1.0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
    without = copy.deepcopy(model)
    sparsevd.fit_dense(model, problem(), None, config, progress=False)
    sparsevd.fit_dense(without, problem(), None, FEW, progress=False)
    assert model[0].weight.norm() < without[0].weight.norm()
    with pytest.raises(ArgumentError, match=r"weight_decay=1.0 is for fit_dense"):
        sparsevd.fit(network(), problem(), None, config)


def test_loaders_that_cannot_be_counted_or_give_nothing():
    with pytest.raises(ArgumentError, match="n_train"):
        sparsevd.fit(network(), DataLoader(TensorDataset(*problem()), batch_size=None), None, FEW, progress=False)
    empty = DataLoader(TensorDataset(*problem(10)), batch_size=50, drop_last=True)
    with pytest.raises(ArgumentError, match="no batch"):
        sparsevd.evaluate(network(), empty)
    history = sparsevd.fit(network(), Stream(), None, FEW, n_train=500, progress=False)
    assert len(history) == 4


def test_resume_checks_what_it_resumes(tmp_path):
    sparsevd.fit(network(), problem(), None, FEW, run_dir=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="already holds a run"):
        sparsevd.fit(network(), problem(), None, FEW, run_dir=tmp_path, progress=False)
    other = dataclasses.replace(FEW, learning_rate=1e-5)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.\d+ then, 1e-05 now"):
        sparsevd.fit(network(), problem(), None, other, run_dir=tmp_path, resume=True, progress=False)
    with pytest.raises(CheckpointError, match="n_train: 500 then, 400 now"):
        sparsevd.fit(network(), problem(400), None, FEW, run_dir=tmp_path, resume=True, progress=False)
    with pytest.raises(CheckpointError, match="another network"):
        sparsevd.fit(network(6), problem(features=6), None, FEW, run_dir=tmp_path, resume=True, progress=False)
    changed = network()
    changed[0].threshold = 1.0
    with pytest.raises(CheckpointError, match="thresholds"):
        sparsevd.fit(changed, problem(), None, FEW, run_dir=tmp_path, resume=True, progress=False)
    with pytest.raises(ArgumentError, match="run_dir"):
        sparsevd.fit(network(), problem(), None, FEW, resume=True, progress=False)


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    history = sparsevd.fit(network(), problem(), None, FEW, run_dir=tmp_path, resume=True, progress=False)
    assert len(history) == 4


def test_nan_stops_with_the_last_good_checkpoint(tmp_path):
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        value = F.cross_entropy(output, target)
        return value * math.nan if calls == 25 else value

    config = dataclasses.replace(FEW, drop_from=1.0)  # measuring the bound would call the loss as well
    with pytest.raises(DivergenceError, match="epoch 3, batch 5: the loss is nan.*last good state is in"):
        sparsevd.fit(network(), problem(), None, config, loss=loss, run_dir=tmp_path, progress=False)
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.safetensors")
    assert checkpoint.progress["state"]["epoch"] == 2
    assert all(tensor.isfinite().all() for tensor in checkpoint.model.values())


def test_without_a_folder_nobody_says_that_no_epoch_was_finished():
    losses = iter([1.0] * 25 + [math.nan] * 100)
    config = dataclasses.replace(FEW, drop_from=1.0)
    with pytest.raises(DivergenceError, match="epoch 3.*no checkpoint, since run_dir= was not given"):
        sparsevd.fit(
            network(), problem(), None, config, loss=lambda *pair: F.cross_entropy(*pair) * next(losses), progress=False
        )


def test_infinite_gradient_of_a_finite_loss_stops():
    model = network()

    def loss(output, target):
        return F.cross_entropy(output, target) + torch.sqrt(0 * model[0].bias.abs().sum())

    with pytest.raises(DivergenceError, match="batch 2: the loss is nan, 0.bias not finite since the step before"):
        sparsevd.fit(model, problem(), None, FEW, loss=loss, progress=False)


def test_nan_in_the_data_is_reported():
    x, y = problem()
    x[3, 2] = math.nan
    with pytest.raises(DivergenceError, match="look for NaN in the data"):
        sparsevd.fit(network(), (x, y), None, FEW, progress=False)


def test_training_outside_the_main_thread():
    result = []
    thread = threading.Thread(
        target=lambda: result.append(sparsevd.fit(network(), problem(), None, FEW, progress=False))
    )
    thread.start()
    thread.join()
    assert len(result[0]) == 4


def test_lines_are_printed_where_there_is_no_terminal(capsys):
    sparsevd.fit(network(), problem(), problem(50), FEW)
    shown = capsys.readouterr().out.splitlines()
    lines = [line for line in shown if not line.startswith("note: ")]  # of so short a run
    assert len(lines) == 4
    assert lines[-1].startswith("epoch 4/4  loss ")
    assert "validation error" in lines[-1]
    assert "fewer weights" in lines[-1]


def test_elbo_keeps_modes_and_statistics():
    model = network(norm=True)
    sparsevd.fit(model, problem(), None, FEW, progress=False)
    model[3].train()
    before = [buffer.clone() for buffer in model.buffers()]
    bound = sparsevd.elbo(model, problem())
    assert bound < 0
    assert [module.training for module in model] == [False, False, False, True]
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def image_problem(n=120):
    x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0].mean(dim=(1, 2)) > 0).long()


def image_network():
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 2)]
    return sparsevd.sparsify(nn.Sequential(*layers))


def test_channels_last_is_for_the_training_only_and_survives_a_resume(tmp_path):
    """Adam's state comes back in the order of its parameter, and the user's model as it was."""
    config = sparsevd.FitConfig(epochs=4, batch_size=20, drop_from=0.5)
    whole, broken = image_network(), image_network()
    sparsevd.fit(whole, image_problem(), None, config, progress=False)
    assert all(parameter.is_contiguous() for parameter in whole.parameters())
    stop_after(2, broken, tmp_path, config)
    resumed = image_network()
    sparsevd.fit(resumed, image_problem(), None, config, run_dir=tmp_path, resume=True, progress=False)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_computes_in_bfloat16_and_measures_in_float32(tmp_path):
    """The products of a step are bfloat16; what is shown of held-out data is what the network does in float32."""
    seen = set()

    def forward(model, x):
        output = model(x)
        seen.add((model.training, output.dtype))
        return output

    config = sparsevd.FitConfig(epochs=4, batch_size=20, drop_from=0.5, autocast=True)
    data = image_problem()
    whole, broken, plain = image_network(), image_network(), image_network()
    history = sparsevd.fit(whole, data, data, config, forward=forward, progress=False)
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}
    assert all(parameter.dtype is torch.float32 for parameter in whole.parameters())
    assert history[-1].val_loss == pytest.approx(sparsevd.evaluate(whole, data).loss)
    sparsevd.fit(plain, data, None, dataclasses.replace(config, autocast=False), progress=False)
    assert not torch.equal(plain[0].weight, whole[0].weight)
    torch.testing.assert_close(plain[0].weight, whole[0].weight, rtol=0.1, atol=0.1)
    stop_after(2, broken, tmp_path, config)
    resumed = image_network()
    sparsevd.fit(resumed, data, None, config, run_dir=tmp_path, resume=True, progress=False)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_on_a_cpu_without_bfloat16_is_said(monkeypatch, capsys):
    monkeypatch.setattr("sparsevd.training.loop.multiplies_bfloat16", lambda: False)
    sparsevd.fit(image_network(), image_problem(), None, sparsevd.FitConfig(epochs=1, autocast=True))
    assert "no instructions for bfloat16" in capsys.readouterr().out


def stop_after(epochs, model, folder, config):
    with pytest.raises(Stop):
        sparsevd.fit(model, image_problem(), None, config, run_dir=folder, progress=False, callbacks=[Stop(epochs)])


def test_a_compiled_network_is_trained_as_such_and_kept_under_its_own_names(tmp_path):
    """A run that was trained with torch.compile is found again without."""
    x, y = problem()
    config = dataclasses.replace(FEW, epochs=2)
    calls = []

    def backend(graph, examples):
        def run(*inputs):
            calls.append(1)
            return graph(*inputs)

        return run

    begun = network()
    sparsevd.fit(torch.compile(begun, backend=backend), (x, y), None, config, progress=False, run_dir=tmp_path)
    assert len(calls) >= 2 * len(x) // FEW.batch_size
    again = network()
    sparsevd.fit(again, (x, y), None, config, progress=False, run_dir=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(begun.parameters(), again.parameters(), strict=True))
