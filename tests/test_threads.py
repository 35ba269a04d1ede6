"""Two trainings at once, and threads beside a busy process."""

import os
import platform
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsevd
import sparsevd_command
from sparsevd.baselines import METHODS, train
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.training import threads

X, Y = torch.randn(40, 4), torch.randint(0, 2, (40,))


class Gate(torch.utils.data.Dataset):
    """Data that waits, in the middle of an epoch, until the test lets it go."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.reached.set()
        assert self.go_on.wait(60)
        return X[i], Y[i]


def test_a_second_training_in_the_process_is_refused():
    data, config = Gate(), sparsevd.FitConfig(epochs=1)
    network = sparsevd.sparsify(nn.Linear(4, 2))
    first = threading.Thread(target=sparsevd.fit, args=(network, data, None, config), kwargs={"progress": False})
    first.start()
    try:
        assert data.reached.wait(60)
        other = sparsevd.sparsify(nn.Linear(4, 2))
        with pytest.raises(ArgumentError, match="another thread of this process is training"):
            sparsevd.fit(other, (X, Y), None, config, progress=False)
        with pytest.raises(ArgumentError, match="another thread"):
            sparsevd.fit_dense(nn.Linear(4, 2), (X, Y), None, config, progress=False)
        with pytest.raises(ArgumentError, match="another thread"):
            train(METHODS["dense"](), nn.Sequential(nn.Linear(4, 2)), (X, Y), epochs=1)
    finally:
        data.go_on.set()
        first.join()
    assert len(sparsevd.fit(other, (X, Y), None, config, progress=False)) == 1  # and free again


def seconds(shared):
    """Stands in for the clock: what the shared loop takes for what one thread takes in 1 µs a loop."""
    return lambda count: shared if count == threads._SHARED else 1e-6


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "_said", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


def test_threads_that_spin_are_told_once(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_median_seconds", seconds(shared=24e-3))
    with pytest.warns(SparseVDWarning, match="1500 times as long as one.*OMP_WAIT_POLICY=passive"):
        threads.warn_if_they_spin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads.warn_if_they_spin()


@pytest.mark.parametrize("shared", [8e-6, 16e-6, 30e-6])
def test_threads_that_get_on_are_left_in_peace(two_threads, monkeypatch, shared):
    monkeypatch.setattr(threads, "_median_seconds", seconds(shared))
    threads.warn_if_they_spin()


def test_nothing_is_measured_where_nothing_spins(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_median_seconds", lambda count: pytest.fail("measured"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    threads.warn_if_they_spin()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    threads.warn_if_they_spin()


def test_training_looks_at_its_threads(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_median_seconds", seconds(shared=1.0))
    with pytest.warns(SparseVDWarning, match="spin"):
        sparsevd.fit(nn.Sequential(sparsevd.sparsify(nn.Linear(4, 2))), (X, Y), progress=False,
                     config=sparsevd.FitConfig(epochs=1))  # fmt: skip


@pytest.mark.parametrize(
    ("busy", "given", "policy"),
    [
        (0.1, {}, None),  # alone: threads that spin are faster
        (1.0, {}, "passive"),
        (2.0, {}, "passive"),
        (1.0, {"OMP_NUM_THREADS": "1"}, None),
        (1.0, {"OMP_WAIT_POLICY": "active"}, "active"),
        (1.0, {"GOMP_SPINCOUNT": "100"}, None),
    ],
)
def test_the_command_line_lets_threads_sleep_beside_a_busy_process(monkeypatch, busy, given, policy):
    for name in (*sparsevd_command.CHOSEN, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sparsevd_command, "busy_cores", lambda: busy)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sparsevd_command.settle_waiting()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


def test_busy_cores_are_counted(monkeypatch):
    """Two cores for 100 ms in ticks: 5 idle, 5 waiting for a disk, 10 at work."""
    seen = iter([[100, 0, 10, 500, 5, 0, 0, 0], [107, 2, 11, 505, 10, 0, 0, 0]])
    monkeypatch.setattr(sparsevd_command, "_ticks", lambda: next(seen))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert sparsevd_command.busy_cores() == pytest.approx(1.0)
    monkeypatch.setattr(sparsevd_command, "_ticks", lambda: None)
    assert sparsevd_command.busy_cores() == 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux says how busy its cores are")
def test_a_busy_process_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert max(sparsevd_command.busy_cores() for _ in range(5)) > 0.5
        finally:
            busy.kill()


def test_it_is_settled_before_torch_is_imported():
    code = "import sys, sparsevd_command; sparsevd_command.settle_waiting(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


CHURN = """
import resource, sys, sparsevd_command, numpy
sparsevd_command.keep_memory()
def work():
    numpy.ones(12_000_000)  # 96 MB, above what glibc learns to keep by itself
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc is what gives memory back")
def test_freed_memory_stays_unless_the_user_has_chosen():
    """Told by the pages that the system has to clear anew: 4 kB each, or 2 MB."""

    def faults(**chosen):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC", "GLIBC"))}
        command = [sys.executable, "-c", CHURN]
        return int(subprocess.check_output(command, env=environment | chosen, text=True))

    kept, given_back = faults(), faults(MALLOC_MMAP_THRESHOLD_="1000000")
    assert kept < 100 < given_back
    assert faults(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1000000") > 100


def test_memory_of_another_c_library_is_left_alone(monkeypatch):
    for name in (*sparsevd_command.MEMORY_CHOSEN, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sparsevd_command.ctypes, "CDLL", lambda _: object())
    sparsevd_command.keep_memory()


def test_the_installed_command_is_the_one_that_settles_it():
    from importlib.metadata import entry_points

    (command,) = entry_points(group="console_scripts", name="sparsevd")
    assert command.value == "sparsevd_command:main"
