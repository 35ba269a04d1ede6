"""One training at a time is in a folder; the others are told, and whoever reads is let in."""

import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd import cli
from sparsevd.errors import ArgumentError, CheckpointError, SparseVDWarning, WriteError
from sparsevd.files import lock
from sparsevd.runs.run import Run
from sparsevd.runs.training_run import RunConfig, run

CONFIG = sparsevd.FitConfig(epochs=3, batch_size=20)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return x, (x[:, 0] > 0).long()


def network():
    torch.manual_seed(0)
    return sparsevd.sparsify(nn.Linear(6, 2))


def in_a_thread(function):
    """What the function raised in another thread, or None."""
    raised = []

    def call():
        try:
            function()
        except (Exception, SystemExit) as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_training_is_refused_and_changes_nothing(tmp_path, resume):
    refusals = []

    def second():
        sparsevd.fit(network(), data(), None, CONFIG, run_dir=tmp_path, resume=resume, progress=False)

    def loss(output, target):
        if (tmp_path / "checkpoint.safetensors").exists() and not refusals:
            before = content(tmp_path)
            refusals.append(in_a_thread(second))
            assert content(tmp_path) == before
            assert Run(tmp_path).summary().weights == 12  # reading is not a training
            Run(tmp_path).write_pruned(tmp_path / "pruned.safetensors")
        return nn.functional.cross_entropy(output, target)

    sparsevd.fit(network(), data(), None, CONFIG, loss=loss, run_dir=tmp_path, progress=False)
    (refusal,) = refusals
    assert isinstance(refusal, CheckpointError)
    assert re.search(
        rf"{tmp_path} is in use: process {os.getpid()} on \S+ has been training in it since 2", str(refusal)
    )
    assert lock.TRAINING not in os.listdir(tmp_path)
    assert in_a_thread(lambda: sparsevd.fit(network(), data(), None, CONFIG, run_dir=tmp_path, resume=True)) is None


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_the_command_line_is_refused_before_it_changes_anything(tmp_path, monkeypatch, capsys, option):
    code = """
        import torch
        from torch import nn
        network = lambda: nn.Linear(6, 2)
        data = lambda: ((torch.randn(40, 6), torch.arange(40) % 2), None)
    """
    (tmp_path / "locked_run.py").write_text(textwrap.dedent(code))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.safetensors").write_text("of the training that goes on")
    names = ["--model", "locked_run:network", "--data", "locked_run:data"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["sparsevd", "train", *names, "--out", "run", option])
    monkeypatch.setattr("warnings.showwarning", None)
    with lock.only_training(tmp_path / "run"):
        before = content(tmp_path / "run")
        ended = in_a_thread(cli.main)
        assert content(tmp_path / "run") == before
    errors = capsys.readouterr().err
    assert isinstance(ended, SystemExit)
    assert ended.code == 2
    assert errors.startswith(f"error: run is in use: process {os.getpid()} on ")
    assert len(errors.splitlines()) == 1


HOLDING = """
    import os, sys, time
    from pathlib import Path
    import importlib.util

    # The module alone: without torch a process starts in no time.
    sys.modules["sparsevd"] = importlib.util.module_from_spec(importlib.util.find_spec("sparsevd"))
    from sparsevd.files import lock

    with lock.only_training(Path(sys.argv[1])):
        child = os.fork()  # as one that loads data
        if child:
            print(child, flush=True)
        time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_gone_even_if_its_children_live(tmp_path):
    code = textwrap.dedent(HOLDING)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(CheckpointError, match=f"process {process.pid} on"), lock.only_training(tmp_path):
            pass
        time.sleep(0.05)  # for the child to let go of what it inherited
        process.kill()
        process.wait()
        os.kill(child, 0)
        assert lock.TRAINING in os.listdir(tmp_path)
        with lock.only_training(tmp_path):
            pass
        assert os.listdir(tmp_path) == []
    finally:
        os.kill(child, 9)
        process.kill()
        process.communicate()


def test_the_thread_that_holds_a_folder_may_take_it_again(tmp_path):
    with lock.only_training(tmp_path):
        with lock.only_training(tmp_path / "." / ".." / tmp_path.name):
            pass
        refusal = in_a_thread(lambda: lock.only_training(tmp_path).__enter__())
        assert isinstance(refusal, CheckpointError)
    with lock.only_training(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_one_that_ends_while_another_begins_does_not_leave_both_inside(tmp_path, monkeypatch):
    """The second opens the lock file of the first, which is then removed: its lock on that would mean nothing."""
    first = lock.only_training(tmp_path)
    in_a_thread(first.__enter__)
    take, calls = lock.take, []

    def late(handle):
        calls.append(handle)
        if len(calls) == 1:
            first.__exit__(None, None, None)
        return take(handle)

    monkeypatch.setattr(lock, "take", late)
    with lock.only_training(tmp_path):
        assert len(calls) == 2
        assert lock.TRAINING in os.listdir(tmp_path)
        assert isinstance(in_a_thread(lambda: lock.only_training(tmp_path).__enter__()), CheckpointError)


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"process": 3}', b"\xff"])
def test_a_holder_without_a_note_is_another_process(tmp_path, note):
    with lock.only_training(tmp_path):
        (tmp_path / lock.TRAINING).write_bytes(note)
        refusal = in_a_thread(lambda: lock.only_training(tmp_path).__enter__())
    assert "another process is training in it" in str(refusal)


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / lock.TRAINING).symlink_to(tmp_path / "target")
    with pytest.raises(WriteError, match="cannot be written"), lock.only_training(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "precious"


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    with pytest.warns(SparseVDWarning, match="do not train twice in it"), lock.only_training(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said_before_the_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot be written to"):
        sparsevd.fit(network(), data(), None, CONFIG, run_dir=tmp_path / "file" / "run", progress=False)


@pytest.mark.skipif(lock.fcntl is None, reason="no locks on this system")
def test_who_trains_is_said_before_what_the_folder_holds(tmp_path):
    """Neither --resume nor --overwrite, which the other sentence proposes, would be let in."""
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    begun, over = threading.Event(), threading.Event()

    def training():
        with lock.only_training(tmp_path):
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=training)
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(CheckpointError, match="is in use: process"):
            run(RunConfig(out=tmp_path))
    finally:
        over.set()
        thread.join()
    with pytest.raises(ArgumentError, match="already holds a run"):
        run(RunConfig(out=tmp_path))
