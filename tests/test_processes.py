"""Trainings on two processes, started as torchrun does it; what each of them does is in process_worker.py."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import process_worker
import sparsevd
from sparsevd.training.folder import CHECKPOINT
from sparsevd.training.processes import Several
from sparsevd.training.schedule import Schedule

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo here"),
    pytest.mark.usefixtures("one_thread"),
]
WORKER = Path(process_worker.__file__)


def two_processes(folder: Path) -> list[tuple[int, str]]:
    """Exit codes and output, with torchrun's environment: the store in which they find each other is ours."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, folder],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(process.wait(), text) for process in processes for text in [process.communicate(timeout=120)[0]]]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both processes have found, by the name of the check; in which folder; and what the first said at last."""
    folder = tmp_path_factory.mktemp("processes")
    first = process_worker.problem()
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(
            process_worker.network(),
            first,
            config=process_worker.RECIPE,
            progress=False,
            run_dir=folder / "begun_alone",
            callbacks=[InterruptsItself()],
        )
    (code, text), (died, nothing) = two_processes(folder)
    assert (code, died, nothing) == (0, 1, ""), f"{text}\n{nothing}"
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [one[name] for one in each] for name in each[0]}, folder, text


class InterruptsItself(process_worker.Interrupts):
    def on_step(self, moment):
        if moment.epoch == 2 and moment.batch == 2:
            raise KeyboardInterrupt


class Rank(Several):
    """One of several processes that are not there."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("examples", [1, 2, 3, 4, 5, 7, 16, 100])
def test_parts_are_a_partition_without_single_examples(examples, size):
    parts = [list(range(examples))[Rank(rank, size).part(examples)] for rank in range(size)]
    assert [example for part in parts for example in part] == list(range(examples))
    assert parts[0]  # others compute with its batch for show
    assert min(len(part) for part in parts if part) >= min(2, examples)
    assert max(map(len, parts)) - min(len(part) for part in parts if part) <= 1


@pytest.mark.parametrize(("factor", "same"), [(1, True), (2, False), (0.5, False)])
def test_two_processes_come_to_the_weights_of_one(found, monkeypatch, factor, same):
    """Also where a batch leaves nothing for one of them. With another weight of the KL they would not."""
    at = Schedule.at

    def weighed(self, progress):
        phase = at(self, progress)
        return replace(phase, kl_weight=factor * phase.kl_weight)

    monkeypatch.setattr(Schedule, "at", weighed)
    expected, history = process_worker.train_without_noise()
    for parameters, figures in found[0]["like_one_process"]:
        difference = max((torch.tensor(p) - e).abs().max().item() for p, e in zip(parameters, expected, strict=True))
        assert (difference < 1e-4) if same else (difference > 1e-2)
        if same:
            figures_alone = [(each.train_loss, each.train_error, each.val_loss) for each in history]
            assert torch.tensor(figures) == pytest.approx(torch.tensor(figures_alone), rel=1e-4)


def test_noise_is_another_on_every_process_and_in_every_step(found):
    outputs = [tuple(output) for process in found[0]["noise"] for output in process]
    assert len(outputs) == 8
    assert len(set(outputs)) == 8


def test_every_example_is_seen_once_by_one_process(found):
    first, second = found[0]["every_example_once"]
    for kind in first:
        (seen, *result), (seen_too, *result_too) = first[kind], second[kind]
        assert result == result_too
        (epoch, next_epoch), (epoch_too, next_epoch_too) = halves(seen), halves(seen_too)
        assert epoch != next_epoch  # in another order
        count = 38 if kind == "distributed" else 37  # DistributedSampler fills up
        for both in (epoch + epoch_too, next_epoch + next_epoch_too):
            assert (len(both), set(both)) == (count, set(range(37))), kind


def halves(values: list[int]) -> tuple[list[int], list[int]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def test_weights_buffers_and_likelihood_are_the_same_to_the_bit(found):
    first, second = found[0]["kinds_of_networks"]
    assert first == second
    assert len(set(first.values())) == len(first) == 7


def test_an_interrupted_run_goes_on_to_the_same_bits(found):
    (interrupted, whole, resumed, epochs, begun_alone), second = found[0]["resuming"]
    assert second == [interrupted, whole, resumed, epochs, begun_alone]
    assert interrupted
    assert whole == resumed
    assert epochs == process_worker.RECIPE.epochs


def test_one_process_goes_on_with_what_two_began(found):
    folder = found[1] / "for_one_process"
    arguments = {"config": process_worker.RECIPE, "progress": False, "run_dir": folder, "resume": True}
    history = sparsevd.fit(process_worker.network(), process_worker.problem(), **arguments)
    assert [each.epoch for each in history] == [1, 2, 3]


def test_both_refuse_the_same_and_one_says_it(found):
    first, second = found[0]["refusals"]
    for name, words in {
        "there is a run": "already holds a run",
        "other seeds": "the settings of process 1 differ",
        "other layers": "the layers of process 1 differ",
        "sampler": "is for 3 processes, and there are 2",
        "one fails": "cannot be written",
    }.items():
        said = [first[name], second[name]]
        assert all(words in text for _, text, _ in said), said
        assert sorted(told for _, _, told in said) == [False, True], said


def test_a_process_that_dies_ends_the_run_with_a_sentence(found):
    _, folder, said = found
    assert said.startswith("ProcessError: another process of this training has ended")
    assert f"The last good state is in {folder / 'lost' / CHECKPOINT}." in said
    assert "resume=True" in said
    assert said.count("\n") == 1  # and nothing else, from both processes and all checks
    arguments = {"config": process_worker.RECIPE, "progress": False, "run_dir": folder / "lost", "resume": True}
    history = sparsevd.fit(process_worker.network(), process_worker.problem(), **arguments)
    assert len(history) == 3


@pytest.mark.long
def test_the_command_line_says_everything_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    what = ["--model", "process_worker:classifier", "--data", "process_worker:sources", "--out", tmp_path / "run"]
    done = subprocess.run(
        [*torchrun, "-m", "sparsevd", "train", *what, "--epochs", "2", "--batch-size", "8"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2/2") == 1
    assert done.stdout.count("2 processes: each takes its part") == 1
    assert done.stdout.count("written to") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model"] == "process_worker:classifier"
    assert not list(tmp_path.glob("run/.*"))
    shutil.rmtree(tmp_path / "run")
