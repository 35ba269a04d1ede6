"""The queue of long trainings: order, states, estimates, and that no stop of any kind loses more than it says."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("fcntl", reason="the queue needs the file locks of Unix")

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
sys.path.append(str(EXPERIMENTS))

import dense_start  # noqa: E402
import lenet_works  # noqa: E402
import long_runs  # noqa: E402
from dense_start import DenseStart, Setting  # noqa: E402
from records import Records  # noqa: E402
from unit_queue import Queue, QueueError  # noqa: E402
from work import Images, Unit, Work, do, measure  # noqa: E402

from sparsevd.errors import ArgumentError  # noqa: E402
from sparsevd.training.data import Augmented  # noqa: E402
from sparsevd.zoo.models import MODELS  # noqa: E402

# The process of a unit, without torch: epochs of a twentieth of a second, and trouble where its name asks for it.
PROCESS = """
import json, os, pathlib, signal, sys, time
action, name, folder, epochs = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if action == "measure":
    (folder.parent / "costs").mkdir(exist_ok=True)
    (folder.parent / "costs" / "toy.json").write_text('{"seconds_an_epoch": 1800}')
    (folder.parent / "measured").open("a").write(name + "\\n")
    sys.exit()
if "broken" in name:
    sys.exit("it is broken")
while "busy" in name and time.process_time() < 0.4:
    pass
metrics = folder / "metrics.jsonl"
while (done := len(metrics.read_text().splitlines()) if metrics.exists() else 0) < epochs:
    time.sleep(0.05)
    with metrics.open("a") as file:
        file.write(json.dumps({"epoch": done + 1}) + "\\n")
    if "killed" in name and done + 1 == 2:
        os.kill(os.getpid(), signal.SIGKILL)
(folder / "result.json").write_text('{"error": 1.5}')
"""


@dataclass(frozen=True)
class Toy(Work):
    epochs: int = 3

    def cost(self):
        return "toy"

    def images(self):
        pair = torch.zeros(40, 1), torch.zeros(40)
        return Images(pair, pair)

    def run(self, images, folder):
        return {"error": 1.5, "epochs": self.epochs, "images": len(images.train[0])}


def toy(name, **settings):
    return Unit(name, "A", "toys", **{"work": Toy(), **settings})


@pytest.fixture
def make(tmp_path):
    """A queue of toy units, with what it says in `said`."""
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "results").mkdir()

    def records(item):
        found = Records(item)
        found.path = tmp_path / "results" / f"{item}.json"
        return found

    def command(action, unit):
        folder = tmp_path / "queue" / unit.name
        return [sys.executable, str(tmp_path / "process.py"), action, unit.name, str(folder), str(unit.work.epochs)]

    def build(*units):
        said = []
        queue = Queue(units, tmp_path / "queue", command, records, said.append, watch_every=0.01)
        queue.said, queue.toys = said, lambda: [r["unit"] for r in records("toys").all()]
        return queue

    return build


def test_units_run_in_order_and_once(make, tmp_path):
    queue = make(toy("b"), toy("a"), toy("c"))
    assert queue.run() == []
    assert queue.toys() == ["b", "a", "c"]
    assert [queue.state_of(unit) for unit in queue.units] == ["finished"] * 3
    queue.said.clear()
    assert queue.run() == []
    assert queue.toys() == ["b", "a", "c"]
    assert queue.said == []


def test_a_record_says_how_it_came_about(make, tmp_path):
    make(toy("busy")).run()
    (record,) = json.loads((tmp_path / "results" / "toys.json").read_text())
    assert record["error"] == 1.5
    assert record["command"] == "python experiments/long_runs.py run --only busy"
    assert record["commit"]
    assert 0.4 <= record["cpu_seconds"] < 1


def test_stage_and_only_choose(make):
    queue = make(toy("a"), replace(toy("b"), stage="B"), toy("c"))
    queue.run(stage="B")
    assert queue.toys() == ["b"]
    queue.run(only="c")
    assert queue.toys() == ["b", "c"]
    with pytest.raises(ArgumentError, match="no unit 'd'"):
        queue.run(only="d")


def test_a_failure_is_reported_and_the_next_goes_on(make):
    queue = make(toy("a-broken"), toy("b"), toy("c", needs=("a-broken",)))
    assert queue.run() == ["a-broken"]
    assert queue.toys() == ["b"]
    assert queue.state_of(queue.find("a-broken")) == "failed, 0 of 3 epochs done: exit code 1, it is broken"
    assert queue.state_of(queue.find("c")) == "waits for a-broken"
    assert any("FAILED, exit code 1, it is broken" in line for line in queue.said)


def test_a_unit_that_is_killed_goes_on_from_its_last_epoch(make, tmp_path):
    queue = make(toy("killed", work=Toy(epochs=4)), toy("b"))
    assert queue.run() == []
    assert queue.toys() == ["killed", "b"]
    lines = (tmp_path / "queue" / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]
    assert any("was killed, goes on from epoch 2" in line for line in queue.said)


def test_a_result_without_its_record_is_not_worked_for_again(make, tmp_path):
    """As a queue leaves it that is killed between the two."""
    queue = make(toy("a"))
    queue.run()
    (tmp_path / "results" / "toys.json").unlink()
    (tmp_path / "process.py").write_text("raise SystemExit('not again')")
    assert queue.run() == []
    assert queue.toys() == ["a"]


def test_needs_come_first_and_a_unit_without_work_gives_its_reason(make):
    with pytest.raises(ArgumentError, match="b needs a: they must come before it"):
        make(toy("b", needs=("a",)), toy("a"))
    with pytest.raises(ArgumentError, match="the same name"):
        make(toy("a"), toy("a"))
    with pytest.raises(ArgumentError, match="must have work, or the reason"):
        make(toy("a", work=None))
    queue = make(toy("a", work=None, waits_for="code to come"), toy("b"))
    assert queue.state_of(queue.units[0]) == "waits for code to come"
    assert queue.hours_left(queue.units[0]) is None
    queue.run()
    assert queue.toys() == ["b"]


def test_hours_come_from_short_epochs_first_and_then_from_its_own(make, tmp_path):
    queue = make(toy("a", work=Toy(epochs=4)), toy("b"))
    unit = queue.units[0]
    assert queue.hours_left(unit) is None
    queue.estimate()
    assert queue.hours_left(unit) == 4 * 1800 / 3600
    assert (tmp_path / "queue" / "measured").read_text() == "a\n"  # b costs the same: measured once
    assert queue.said[0] == "a: 0 of 4 epochs done, 2.00 h left"
    assert queue.state_of(unit) == "waiting"
    folder = tmp_path / "queue" / "a"
    (folder / "metrics.jsonl").write_text("{}\n" * 3)
    (folder / "state.json").write_text(json.dumps({"commit": "abc", "marks": [[1, 100], [3, 820]], "cpu_seconds": 820}))
    assert queue.hours_left(unit) == 360 / 3600
    assert queue.state_of(unit) == "stopped, 3 of 4 epochs done"


QUEUE_PROCESS = """
import sys
sys.path[:0] = [{experiments!r}, {tests!r}]
from pathlib import Path
from records import Records
from test_long_runs import Toy, toy
from unit_queue import Queue
def command(action, unit):
    return [sys.executable, {process!r}, action, unit.name, {folder!r} + "/" + unit.name, str(unit.work.epochs)]
def records(item):
    found = Records(item)
    found.path = Path({results!r}) / (item + ".json")
    return found
Queue([toy("long", work=Toy(epochs=30)), toy("b")], Path({folder!r}), command, records, watch_every=0.01).run()
"""


def started(tmp_path):
    """A queue in a process of its own, which leads a group; returned when its first unit has done some epochs."""
    paths = {"process": tmp_path / "process.py", "folder": tmp_path / "queue", "results": tmp_path / "results"}
    places = {"experiments": EXPERIMENTS, "tests": Path(__file__).parent, **paths}
    script = tmp_path / "queue.script"
    script.write_text(QUEUE_PROCESS.format(**{name: str(path) for name, path in places.items()}))
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    metrics = tmp_path / "queue" / "long" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_whole_queue_may_be_stopped_at_any_time(make, tmp_path, how):
    queue = make(toy("long", work=Toy(epochs=30)), toy("b"))
    process = started(tmp_path)
    assert queue.running() == "long"
    assert queue.process_group() == process.pid
    assert queue.state_of(queue.units[0]).startswith("running, ")
    with pytest.raises(QueueError, match="is at work"):
        queue.run()
    os.killpg(process.pid, how)
    assert process.wait() == (0 if how == signal.SIGTERM else -how)
    while queue.running():  # a killed unit needs a moment to be gone
        time.sleep(0.01)
    assert queue.state_of(queue.units[0]).startswith("stopped, ")
    before = queue.epochs_done(queue.units[0])
    assert queue.run() == []
    assert queue.toys() == ["long", "b"]
    assert 3 <= before < 30 == queue.epochs_done(queue.units[0])


def test_a_unit_that_outlives_its_queue_keeps_others_out(make, tmp_path):
    queue = make(toy("long", work=Toy(epochs=30)), toy("b"))
    process = started(tmp_path)
    process.kill()
    process.wait()
    with pytest.raises(QueueError, match="outlived its queue"):
        queue.run()
    os.killpg(process.pid, signal.SIGKILL)
    while queue.running():
        time.sleep(0.01)


def test_work_is_done_or_measured_on_a_part_of_the_images(tmp_path, one_thread):
    do(Toy(), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == {"error": 1.5, "epochs": 3, "images": 40}
    seen = []

    class Watched(Toy):
        def run(self, images, folder):
            seen.append((self.epochs, len(images.train[0])))
            return {}

    measure(Watched(epochs=50), tmp_path / "cost.json")
    assert seen == [(1, 2), (1, 2), (3, 2)]
    assert json.loads((tmp_path / "cost.json").read_text())["seconds_an_epoch"] >= 0


def test_declared_units_are_in_order_and_those_without_work_say_what_they_wait_for(tmp_path):
    queue = Queue(long_runs.UNITS, tmp_path, long_runs.command)  # refuses what cannot be
    assert [unit.stage for unit in queue.units] == sorted(unit.stage for unit in queue.units)
    assert all(unit.waits_for for unit in queue.units if unit.work is None)
    assert "waits for a start of Sparse VD that keeps what a dense network has learned" in long_runs.listing(queue)


def test_trials_never_see_the_test_set(monkeypatch):
    """Of a data set whose test images are minus one, all that trials train on and measure is something else."""
    n = 20_000
    train, test = (torch.arange(float(n)), torch.arange(n)), (-torch.ones(100), torch.ones(100))
    splits = type("Splits", (), {"train": train, "test": test})
    monkeypatch.setattr(dense_start, "load", lambda name: splits)
    monkeypatch.setattr(lenet_works, "load", lambda name: splits)
    trials = [unit.work for unit in long_runs.UNITS if unit.work and unit.item == "trials"]
    assert len(trials) >= 4
    for work in trials:
        images = work.images()
        assert len(images.measured[0]) == work.held_out > 0
        assert torch.equal(torch.cat([images.train[0], images.measured[0]]).sort().values, train[0])
    assert all(unit.work.images().measured is test for unit in long_runs.UNITS if unit.work and unit.item != "trials")


def test_the_rate_rises_to_its_peak_and_falls_to_zero():
    setting = Setting("sgd", rate=0.4, weight_decay=0.0, peak_at=0.25)
    assert [setting.rate_at(done) for done in (0, 0.125, 0.25, 0.625, 1)] == pytest.approx([0, 0.2, 0.4, 0.2, 0])
    assert replace(setting, peak_at=0.0).rate_at(0.5) == pytest.approx(0.2)


def on_paths(weights):
    """How many weights lie between an input and an output, layer by layer."""
    reached = [torch.ones(weights[0].shape[1], dtype=torch.bool)]
    for weight in weights:
        reached.append(((weight != 0) & reached[-1]).any(1))
    needed, count = torch.ones(weights[-1].shape[0], dtype=torch.bool), 0
    for weight, before in zip(weights[::-1], reached[-2::-1], strict=True):
        used = (weight != 0) & needed[:, None]
        count += int((used & before).sum())
        needed = used.any(0)
    return count


def test_the_effective_ratio_counts_weights_between_an_input_and_an_output():
    network = MODELS["lenet-300-100"](10).eval()
    weights = [layer.weight for layer in network if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(torch.rand_like(weight) < 0.01)
    left = lenet_works.what_is_left(network)
    assert left["ratio"] < left["effective_ratio"] == 266_200 / on_paths(weights)
    nn.init.zeros_(weights[1])
    cut_off = lenet_works.what_is_left(network)
    assert cut_off["ratio"] > 100
    assert cut_off["effective_ratio"] is None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_dense_start_stopped_inside_an_epoch_ends_as_if_it_had_not_been(tmp_path, one_thread, optimizer):
    x, y = torch.randn(600, 3, 8, 8), torch.randint(0, 10, (600,))
    data = Augmented((x, y), shift=1, mirror=True)
    setting = Setting(optimizer, rate=0.01, weight_decay=1e-3, peak_at=0.25, smoothing=0.1)
    work = DenseStart("toy", epochs=3, setting=setting)

    def train(folder, stop_at=None):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 8, 3)
        model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 10))
        steps = []

        def stop(module, inputs):
            steps.append(1)
            if len(steps) == stop_at:
                signal.raise_signal(signal.SIGINT)

        conv.register_forward_pre_hook(stop)
        return model, dense_start.train(model, data, None, work, setting, folder)

    unbroken, history = train(tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", stop_at=8)  # five batches an epoch: the third of the second
    resumed, resumed_history = train(tmp_path / "stopped")
    for key, tensor in unbroken.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key]), key
    assert [m.train_loss for m in resumed_history] == [m.train_loss for m in history]
    assert len(resumed_history) == 3


def test_the_trial_with_the_lowest_held_out_error_gives_the_setting(monkeypatch):
    settings = [Setting("sgd", 0.1, 5e-4, 0.25), Setting("adamw", 2e-3, 0.02, 0.0, 0.1)]
    trials = [
        {"error": error, "settings": {**setting.__dict__, "batch_size": 128}}
        for setting, error in zip(settings, (12.5, 11.0), strict=True)
    ]
    monkeypatch.setattr(Records, "find", lambda self, **wanted: trials)
    assert dense_start.chosen() == settings[1]
    trials.clear()
    with pytest.raises(ArgumentError, match="no trial"):
        dense_start.chosen()
