"""The callback for Lightning: the plain formula however the trainer is set, metrics, checkpoints."""

import csv
import logging
import math
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import by_hand
import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError, MissingPackageError, SparseVDWarning
from sparsevd.integrations.attaching import examples_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from sparsevd.integrations.lightning import SparseVD

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.usefixtures("one_thread"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(LightningModule):
    """One optimizer, stepped by Lightning."""

    def __init__(self, optimizer="AdamW", model=None):
        super().__init__()
        self.net, self.kind = model if model is not None else by_hand.network(), optimizer

    def training_step(self, batch, _):
        return by_hand.cross_entropy(self.net, batch)

    def configure_optimizers(self):
        optimizer = by_hand.OPTIMIZERS[self.kind](sparsevd.parameter_groups(self, lr=by_hand.RATE))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, by_hand.falling)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Net):
    """Two optimizers, one per layer, stepped by hand."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        loss = by_hand.cross_entropy(self.net, batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self):
        parts = [sparsevd.parameter_groups(layer, lr=by_hand.RATE) for layer in (self.net[0], self.net[2])]
        optimizers = [by_hand.OPTIMIZERS[self.kind](groups) for groups in parts]
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(each, by_hand.falling) for each in optimizers]


def loader(**settings):
    return DataLoader(TensorDataset(*by_hand.examples()), batch_size=by_hand.BATCH, **settings)


def trainer(callback=None, *others, **settings):
    given = [callback if callback is not None else SparseVD(by_hand.CONFIG), *others]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return Trainer(**quiet | {"callbacks": given, "enable_model_summary": False, "max_epochs": 2} | settings)


def run(module, *args, data=None, ckpt_path=None, **settings):
    trainer(*args, **settings).fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", by_hand.OPTIMIZERS)
def test_it_is_the_plain_formula(optimizer, accumulate, monkeypatch):
    by_hand.fix_noise(monkeypatch)
    callback = SparseVD(by_hand.CONFIG)
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": by_hand.CLIP}
    found = run(Net(optimizer), callback, max_epochs=2 * accumulate, **settings).net

    def expected(mistake=None):
        data = by_hand.batches()
        given = {"accumulate": accumulate, "clip": by_hand.CLIP, "mistake": mistake}
        return by_hand.train(by_hand.network(), by_hand.cross_entropy, data, optimizer, **given)

    assert (callback.schedule.steps, callback.schedule.total_steps) == (by_hand.STEPS, by_hand.STEPS)
    assert callback.schedule.steps_per_epoch == 10 // accumulate
    assert callback.schedule.n_train == by_hand.EXAMPLES
    assert by_hand.difference(found, expected()) < 5e-4
    for mistake in by_hand.MISTAKES:
        if mistake != "KL per micro-batch" or accumulate > 1:
            assert by_hand.difference(found, expected(mistake)) > 1e-2, mistake


def test_several_optimizers_stepped_by_hand(monkeypatch):
    by_hand.fix_noise(monkeypatch)
    found = run(Manual("SGD")).net
    expected = by_hand.train(by_hand.network(), by_hand.cross_entropy, by_hand.batches(), "SGD")
    assert by_hand.difference(found, expected) < 5e-4


def test_bfloat16(monkeypatch):
    """Autocast rounds what the data says; the KL, here much larger, it leaves alone."""
    by_hand.fix_noise(monkeypatch)
    found = run(Net("SGD"), precision="bf16-mixed").net
    expected = by_hand.train(by_hand.network(), by_hand.cross_entropy, by_hand.batches(), "SGD")
    assert 0 < by_hand.difference(found, expected) < 0.05
    assert all(p.dtype is torch.float32 for p in found.parameters())


def saving(folder):
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1)


DROPPING = sparsevd.FitConfig(warm_up_end=0.1, drop_from=0.2)


def test_a_run_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    """Bit for bit as if it had not been interrupted, and with the same zeros."""
    by_hand.fix_noise(monkeypatch)
    by_hand_zeros = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, module):
            by_hand_zeros.append(by_hand.zeros(module.net))

    unbroken = SparseVD(DROPPING)
    settings = {"max_epochs": 4, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    whole = run(Net(model=by_hand.almost_superfluous()), unbroken, Watch(), saving(tmp_path), **settings).net
    dropped = by_hand_zeros[1]
    assert all(0.3 < each.float().mean() < 0.9 for each in dropped)

    callback = SparseVD(DROPPING)
    again = Net(model=by_hand.network())
    run(again, callback, saving(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt", **settings)
    assert callback.schedule.steps == unbroken.schedule.steps == by_hand.STEPS
    assert by_hand.difference(again.net, whole) == 0
    assert all((now | ~before).all() for now, before in zip(by_hand.zeros(again.net), dropped, strict=True))
    mine, theirs = callback.state_dict(), unbroken.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_momentum_does_not_move_zeros_after_a_checkpoint(tmp_path):
    """With noise; the rate stays, so momentum would show at once."""

    class Constant(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(sparsevd.parameter_groups(self, lr=by_hand.RATE), momentum=0.9)

    module = Constant(model=by_hand.almost_superfluous())
    settings = {"max_epochs": 4, "enable_checkpointing": True}
    run(module, SparseVD(DROPPING), saving(tmp_path), **settings)
    again = Constant()
    stored = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    dropped = {name: value == 0 for name, value in stored.items() if name.endswith(".weight")}
    assert sum(int(each.sum()) for each in dropped.values()) > 20
    run(again, SparseVD(DROPPING), saving(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt", **settings)
    assert all((again.state_dict()[name][which] == 0).all() for name, which in dropped.items())


def test_fitting_once_more_goes_on():
    callback = SparseVD(by_hand.CONFIG, total_steps=40)
    module, twice = Net(), trainer(callback)
    twice.fit(module, loader())
    assert callback.schedule.steps == 20
    twice.fit_loop.max_epochs = 4
    twice.fit(module, loader())
    assert callback.schedule.steps == 40


def test_a_checkpoint_without_a_schedule_is_refused(tmp_path):
    run(Net(), enable_checkpointing=True, callbacks=[saving(tmp_path)])
    settings = {"enable_checkpointing": True, "max_epochs": 4, "ckpt_path": tmp_path / "epoch=1.ckpt"}
    with pytest.raises(CheckpointError, match="goes on from step 20, but its checkpoint has no state of SparseVD"):
        run(Net(), None, saving(tmp_path), **settings)


def test_its_numbers_are_logged(tmp_path):
    callback = SparseVD(DROPPING)
    module = Net(model=by_hand.almost_superfluous())
    given = trainer(callback, logger=CSVLogger(tmp_path, name="", version="run"))
    given.fit(module, loader())
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 2
    last = {name: float(value) for name, value in rows[-1].items()}
    now = callback.schedule.report()
    assert last["sparsevd/ratio"] == pytest.approx(now["ratio"], rel=1e-4)
    assert last["sparsevd/ratio"] > 1.4
    assert last["sparsevd/sparsity"] == pytest.approx(now["sparsity"], rel=1e-4)
    assert last["sparsevd/kl"] == pytest.approx(now["kl"], rel=1e-4)
    assert last["sparsevd/beta"] == 1
    assert last["sparsevd/sparsity/net.0"] > 30
    assert given.callback_metrics["sparsevd/sparsity/net.2"] > 30
    assert "sparsevd/sparsity/net.0" not in SparseVD(log_layers=False).metrics()


class Failing(Net):
    def training_step(self, batch, index):
        if index == 5:
            raise RuntimeError("no more memory")
        return super().training_step(batch, index)


@pytest.mark.parametrize("kind", [Net, Failing])
def test_it_lets_go_at_the_end(kind):
    module, callback = kind(), SparseVD(by_hand.CONFIG)
    with pytest.raises(RuntimeError, match="memory") if kind is Failing else nullcontext():
        run(module, callback)
    before = callback.schedule.steps
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    module.trainer.optimizers[0].step()
    assert callback.schedule.steps == before == (5 if kind is Failing else 20)


def test_an_optimizer_without_groups_is_refused_with_the_line_to_write():
    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    line = r"in configure_optimizers, return torch.optim.AdamW\(sparsevd.parameter_groups\(self, lr=…\)\)"
    with pytest.raises(ArgumentError, match=line):
        run(Plain())


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*by_hand.examples(), strict=True)


def test_what_the_trainer_does_not_know_must_be_given():
    stream = DataLoader(Stream(), batch_size=by_hand.BATCH)
    with pytest.raises(ArgumentError, match=r"give SparseVD\(n_train=…\)"):
        run(Net(), data=stream)
    with pytest.raises(ArgumentError, match=r"give SparseVD\(total_steps=…\)"):
        run(Net(), SparseVD(n_train=40), data=stream)
    with pytest.raises(ArgumentError, match=r"give SparseVD\(total_steps=…\)"):
        run(Net(), None, GradientAccumulationScheduler({0: 1, 1: 2}))
    with pytest.raises(ArgumentError, match=r"give SparseVD\(total_steps=…\)"):
        run(Manual(), max_steps=10)  # 5 of each optimizer, or what is it?
    with pytest.raises(ArgumentError, match="n_train=0 must be the number of examples"):
        run(Net(), SparseVD(n_train=0))
    given = SparseVD(n_train=40, total_steps=20, steps_per_epoch=7)
    run(Net(), given, data=stream)
    assert (given.schedule.steps, given.schedule.steps_per_epoch) == (20, 7)
    limited = SparseVD(n_train=40)
    run(Net(), limited, data=stream, max_steps=6)
    assert limited.schedule.total_steps == limited.schedule.steps == 6


class PerToken(Net):
    """With a target for each of two tokens."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).unsqueeze(2).expand(-1, -1, 2), y)


def test_targets_that_do_not_look_like_one_for_each_example_are_asked_about():
    x, y = loader().dataset.tensors
    several = DataLoader(TensorDataset(x, torch.stack([y, y], 1)), batch_size=10)
    with pytest.warns(SparseVDWarning, match="first batch has 2 targets: .* give SparseVD"):
        run(PerToken(), data=several)
    run(PerToken(), SparseVD(n_train=2 * len(y)), data=several)


def test_n_counts_the_whole_data_set():
    data = TensorDataset(*by_hand.examples())
    assert examples_in(loader()) == 40
    assert examples_in(DataLoader(data, sampler=SubsetRandomSampler(range(15)))) == 15
    ranks = torch.utils.data.DistributedSampler(data, num_replicas=4, rank=1)
    assert (examples_in(DataLoader(data, sampler=ranks)), len(ranks)) == (40, 10)
    assert examples_in(DataLoader(Stream())) is None
    assert examples_in([loader(), loader()]) is None


def test_a_budget_is_kept():
    callback = SparseVD(budget=sparsevd.Budget(sparsity=0.75))
    module = run(Net(), callback, max_epochs=10)
    assert callback.schedule.report()["sparsity"] >= 74.9
    assert "β ended at" in callback.schedule.ended
    assert math.isfinite(F.cross_entropy(module.net(by_hand.examples()[0]), by_hand.examples()[1]).item())


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delattr(sparsevd.integrations, "lightning")
    monkeypatch.delitem(sys.modules, "sparsevd.integrations.lightning")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(MissingPackageError, match=r'is not installed; run: pip install "sparsevd\[lightning\]"'):
        sparsevd.integrations.lightning  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        sparsevd.integrations.keras  # noqa: B018
    assert {"lightning", "transformers"} <= set(dir(sparsevd.integrations))
