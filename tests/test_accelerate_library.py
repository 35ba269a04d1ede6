"""Hugging Face's Accelerate, not `sparsevd.accelerate`: it needs no more than `attach`, before or after `prepare`."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import by_hand
import sparsevd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh():
    """It keeps its settings for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """A loop as Accelerate's documents have it."""

    def __init__(self, model, optimizer="AdamW", accumulate=1, config=by_hand.CONFIG, attach_first=False, **settings):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
        optimizer = by_hand.OPTIMIZERS[optimizer](sparsevd.parameter_groups(model, lr=by_hand.RATE))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, by_hand.falling)
        loader = DataLoader(TensorDataset(*by_hand.examples()), batch_size=by_hand.BATCH)
        per_epoch = len(loader) // accumulate
        run = {"n_train": by_hand.EXAMPLES, "total_steps": by_hand.STEPS, "steps_per_epoch": per_epoch}
        if attach_first:
            self.schedule = sparsevd.attach(optimizer, model, config=config, **run)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        if not attach_first:
            self.schedule = sparsevd.attach(self.optimizer, self.model, config=config, **run)
        self.epochs = by_hand.STEPS // per_epoch
        self.accelerator.register_for_checkpointing(self.schedule)

    def epoch(self, clip=None):
        self.model.train()
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(by_hand.cross_entropy(self.model, batch))
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("attach_first", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", by_hand.OPTIMIZERS)
def test_it_is_the_plain_formula(optimizer, accumulate, attach_first, monkeypatch):
    by_hand.fix_noise(monkeypatch)
    model = by_hand.network()
    run = Run(model, optimizer, accumulate, attach_first=attach_first)
    for _ in range(run.epochs):
        run.epoch(by_hand.CLIP)

    def expected(mistake=None):
        given = {"accumulate": accumulate, "clip": by_hand.CLIP, "mistake": mistake}
        return by_hand.train(by_hand.network(), by_hand.cross_entropy, by_hand.batches(), optimizer, **given)

    assert run.schedule.steps == by_hand.STEPS
    assert by_hand.difference(model, expected()) < 5e-4
    for mistake in by_hand.MISTAKES:
        if mistake != "KL per micro-batch" or accumulate > 1:
            assert by_hand.difference(model, expected(mistake)) > 1e-2, mistake


def test_bfloat16(monkeypatch):
    by_hand.fix_noise(monkeypatch)
    model = by_hand.network()
    run = Run(model, "SGD", mixed_precision="bf16")
    for _ in range(run.epochs):
        run.epoch()
    expected = by_hand.train(by_hand.network(), by_hand.cross_entropy, by_hand.batches(), "SGD")
    assert 0 < by_hand.difference(model, expected) < 0.05


@pytest.mark.parametrize("attach_first", [False, True])
def test_a_run_goes_on_from_a_checkpoint(attach_first, tmp_path):
    """`save_state` keeps all of it, noise too, once the schedule is registered with it."""
    dropping = sparsevd.FitConfig(warm_up_end=0.1, drop_from=0.2)
    whole = Run(by_hand.almost_superfluous(), accumulate=2, config=dropping)
    for epoch in range(whole.epochs):
        if epoch == 2:
            whole.accelerator.save_state(tmp_path)
            dropped = by_hand.zeros(whole.model)
        whole.epoch()
    assert all(0.3 < each.float().mean() < 0.9 for each in dropped)

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    again = Run(by_hand.network(), accumulate=2, config=dropping, attach_first=attach_first)
    again.accelerator.load_state(tmp_path)
    assert again.schedule.steps == 10
    for _ in range(2):
        again.epoch()
    assert again.schedule.steps == by_hand.STEPS
    assert by_hand.difference(again.model, whole.model) == 0
    assert all((now | ~before).all() for now, before in zip(by_hand.zeros(again.model), dropped, strict=True))
