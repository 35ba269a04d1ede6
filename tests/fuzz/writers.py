"""Writers that are killed, meet each other or run out of disk: files are whole at any moment, and nothing stays behind.

Every save holds one number, in all its elements and in its length, so that a file made of two saves shows. Children
come from multiprocessing's fork server, which imports torch (and what its optimizers import) once for all of them and
starts no threads.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from torch import nn

import sparsevd
from fuzz.trial import Trial
from sparsevd import modelfile
from sparsevd.errors import WriteError
from sparsevd.files import atomic
from sparsevd.files.tensors import read_tensors, write_tensors
from sparsevd.graph import capture
from sparsevd.runtime.c_export import export_c
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.folder import State, TrainingFolder
from sparsevd.training.optimizer import BoundAdam

BYTES = 2_000_000  # of a save, at the least


def run(inputs: int, seed: int) -> Trial:
    """A part of each kind, in one trial."""
    trial = Trial("writers")
    draw = random.Random(seed)
    _kills(trial, inputs - inputs // 2, draw)
    _concurrent(trial, inputs // 4, draw)
    _full_disk(trial, inputs // 4, draw)
    return trial


def run_kills(inputs: int, seed: int) -> Trial:
    """SIGKILL at random moments of processes that save, one in three beside another writer of the same file."""
    trial = Trial("kills of a save")
    _kills(trial, inputs, random.Random(seed))
    return trial


def run_training_kills(inputs: int, seed: int) -> Trial:
    """SIGKILL at random moments of `sparsevd train`, up to three in a run, which is then resumed to its end."""
    trial = Trial("kills of a training")
    _training_kills(trial, inputs, random.Random(seed))
    return trial


def run_concurrent(inputs: int, seed: int) -> Trial:
    """Threads, and processes that believe to have one number, save to one file while it is read."""
    trial = Trial("concurrent writers")
    _concurrent(trial, inputs, random.Random(seed))
    return trial


def run_full_disk(inputs: int, seed: int, *, mount: bool = True) -> Trial:
    """Every kind of file that we write, where the disk has room for a part of it.

    Half of the inputs meet a limit of the process (EFBIG); half a small disk that is really full (ENOSPC), where the
    system lets a user mount one. A new process does the latter, which takes a few seconds to begin.
    """
    trial = Trial("full disk")
    draw = random.Random(seed)
    command = small_disk() if mount else None
    if command is None:
        trial.count("without a small disk")
        _full_disk(trial, inputs, draw)
        return trial
    _full_disk(trial, inputs - inputs // 2, draw)
    code = f"from fuzz import writers; writers.fill_this_disk({inputs // 2}, {draw.randrange(2**31)})"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [*command, folder, sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"on the small disk: {done.stderr}")
        figures = json.loads(done.stdout)
    trial.inputs += figures["inputs"]
    trial.refused += figures["refused"]
    trial.counts["on a small disk"] = figures["inputs"]
    return trial


def small_disk() -> list[str] | None:
    """What comes before a folder and a command, for which the folder is a disk of 16 MB; None where users may not."""
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=16m none "$0" && cd "$0" && exec "$@"']
    if shutil.which("unshare") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        works = subprocess.run([*mounted, folder, "true"], capture_output=True, check=False).returncode == 0
    return mounted if works else None


@cache
def children() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "sparsevd.cli", "sparsevd.run", "safetensors.torch", "torch._dynamo"])
    return context


# What is saved


def content(number: int) -> dict[str, torch.Tensor]:
    length = BYTES // 4 + 1000 * (number % 13)
    return {"a": torch.full((length,), float(number)), "b": torch.full((7, 5), number)}


def number_in(path: Path) -> int:
    tensors, _ = read_tensors(path)
    number = int(tensors["b"][0, 0])
    for name, tensor in content(number).items():
        assert torch.equal(tensor, tensors[name]), f"{path} holds {name!r} of two saves"
    return number


# Kills


class Diary:
    """The number of the save that a process has begun, and of the last one it has finished; both outlive it."""

    def __init__(self, path: Path):
        path.touch()
        self._handle = os.open(path, os.O_RDWR)

    def begin(self, number: int) -> None:
        os.pwrite(self._handle, number.to_bytes(8, "little"), 0)

    def finish(self, number: int) -> None:
        os.pwrite(self._handle, number.to_bytes(8, "little"), 8)

    def read(self) -> tuple[int, int]:
        noted = os.pread(self._handle, 16, 0).ljust(16, b"\0")
        return int.from_bytes(noted[:8], "little"), int.from_bytes(noted[8:], "little")

    def close(self) -> None:
        os.close(self._handle)


def save_until(path: Path, notes: Path, first: int, stop: Path) -> None:
    """Save the numbers first, first + 2, … until there is a file `stop`."""
    torch.set_num_threads(1)
    diary = Diary(notes)
    number = first
    while not stop.exists():
        tensors = content(number)
        diary.begin(number)
        write_tensors(path, tensors)
        diary.finish(number)
        number += 2


def _kills(trial: Trial, inputs: int, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        path, stop = folder / "file.safetensors", Path(name) / "stop"
        number = 0
        for i in range(inputs):
            delay, beside = draw.uniform(0, 0.03), draw.random() < 1 / 3
            with trial.one(f"kill after {1000 * delay:.1f} ms{' beside another writer' * beside}"):
                write_tensors(path, content(number))
                notes = [Path(name) / f"notes{i}.{k}" for k in range(1 + beside)]
                diaries = [Diary(note) for note in notes]
                writers = [
                    children().Process(target=save_until, args=(path, note, number + 1 + k, stop))
                    for k, note in enumerate(notes)
                ]
                for writer in writers:
                    writer.start()
                _wait(lambda diaries=diaries: all(diary.read()[0] for diary in diaries), writers)
                time.sleep(delay)
                writers[0].kill()
                writers[0].join()
                if beside:
                    time.sleep(draw.uniform(0, 0.03))
                    stop.touch()
                    writers[1].join()
                    assert writers[1].exitcode == 0, "a living writer was disturbed by a dead one"
                    stop.unlink()
                noted = [diary.read() for diary in diaries]
                assert number_in(path) in {number, *(n for pair in noted for n in pair)}
                if not beside:  # exactly the last save that was finished, or the one that was cut off
                    assert number_in(path) in (noted[0] if noted[0][1] else (number, noted[0][0]))
                if len(os.listdir(folder)) > 1:
                    trial.count("inside a save")
                number = max(n for pair in noted for n in pair) + 2
                write_tensors(path, content(number))
                assert os.listdir(folder) == [path.name]
                assert number_in(path) == number
                for diary, note in zip(diaries, notes, strict=True):
                    diary.close()
                    note.unlink()


def _wait(ready: Callable[[], bool], processes: list[multiprocessing.Process]) -> None:
    while not ready():
        assert all(process.is_alive() for process in processes), "a process ended before it was killed"
        time.sleep(0.0005)


# Kills of the command line

USER_CODE = """
    import torch
    from torch import nn

    def network():
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def data():
        x = torch.randn(700, 20, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] * x[:, 1] > 0).long()
        return (x[:500], y[:500]), (x[500:], y[500:])
"""
TRAIN = ["train", "--model", "mine:network", "--data", "mine:data", "--batch-size", "20", "--epochs", "8"]


def train(folder: Path, *options: str) -> None:
    """`sparsevd train` with its code in the folder, as in a process of its own."""
    from sparsevd import cli

    torch.set_num_threads(1)
    os.chdir(folder)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sys.argv = ["sparsevd", *TRAIN, *options]
    cli.main()


def _training_kills(trial: Trial, inputs: int, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.py").write_text(textwrap.dedent(USER_CODE))
        _finish(folder, "--out", "whole")
        started = time.perf_counter()  # the first one waits for the fork server
        _finish(folder, "--out", "timed")
        duration = time.perf_counter() - started
        done = 0
        while done < inputs:
            delays = [draw.uniform(0, duration) for _ in range(min(draw.randint(1, 3), inputs - done))]
            done += len(delays)
            broken = folder / "broken"
            for delay in delays:
                with trial.one(f"kill after {1000 * delay:.0f} ms"):
                    process = children().Process(target=train, args=(folder, "--out", "broken", "--resume"))
                    process.start()
                    process.join(delay)
                    process.kill()
                    process.join()
                    assert process.exitcode in (0, -9)
                    trial.count("after its end" if process.exitcode == 0 else "in its course")
                    if any(path.suffix == ".tmp" for path in broken.rglob(".*")):
                        trial.count("inside a save")
            _finish(folder, "--out", "broken", "--resume")
            _compare(broken, folder / "whole")
            shutil.rmtree(broken)


def _finish(folder: Path, *options: str) -> None:
    process = children().Process(target=train, args=(folder, *options))
    process.start()
    process.join()
    assert process.exitcode == 0, f"sparsevd train {' '.join(options)} ended with {process.exitcode}"


def _compare(broken: Path, whole: Path) -> None:
    """The same bits and the same files as in a run without kills."""
    assert sorted(os.listdir(broken)) == sorted(os.listdir(whole))
    assert (broken / "pruned.safetensors").read_bytes() == (whole / "pruned.safetensors").read_bytes()
    ours, theirs = (Checkpoint.load(folder / "checkpoint.safetensors") for folder in (broken, whole))
    for mine, other in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in other)


# Writers at one time


def save_as_process_one(path: Path, first: int, saves: int) -> None:
    """In two containers, two processes do have the same number."""
    os.getpid = lambda: 1
    torch.set_num_threads(1)
    for number in range(first, first + saves):
        write_tensors(path, content(number))


def _concurrent(trial: Trial, inputs: int, draw: random.Random) -> None:
    """An input is a save. They come in rounds of four writers: threads and processes in turn."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file.safetensors"
        done = 0
        for writers in itertools.cycle((_in_threads, _in_processes)):
            if done >= inputs:
                break
            saves = min(draw.randint(2, 25), max(1, (inputs - done) // 4))
            firsts = (1000, 2000, 3000, 4000)
            with trial.one(f"{saves} saves by each of four writers, {writers.__name__.removeprefix('_')}"):
                for seen in writers(path, firsts, saves):
                    assert any(first <= seen < first + saves for first in firsts)
                    trial.count("reads")
                assert number_in(path) in {first + saves - 1 for first in firsts}
                assert os.listdir(name) == [path.name]
            trial.inputs += 4 * saves - 1
            done += 4 * saves
            path.unlink()


def _in_threads(path: Path, firsts: tuple[int, ...], saves: int) -> Iterator[int]:
    failures: list[Exception] = []

    def save(first: int) -> None:
        try:
            for number in range(first, first + saves):
                write_tensors(path, content(number))
        except Exception as error:  # of whatever kind: raised below, in the thread that tests
            failures.append(error)

    writers = [threading.Thread(target=save, args=(first,)) for first in firsts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            yield number_in(path)
    for writer in writers:
        writer.join()
    if failures:
        raise failures[0]


def _in_processes(path: Path, firsts: tuple[int, ...], saves: int) -> Iterator[int]:
    writers = [children().Process(target=save_as_process_one, args=(path, first, saves)) for first in firsts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            yield number_in(path)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0, "a writer was disturbed by another"


# Full disks


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows larger: writing more is EFBIG, as Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@cache
def file_writers() -> dict[str, Callable[[Path, int], object]]:
    """Every kind of file that the package writes, by name: a function that writes version 1 or 2 into a folder."""
    example = torch.zeros(2, 40)
    networks: dict[int, nn.Module] = {}
    for version in (1, 2):
        torch.manual_seed(version)
        networks[version] = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5)).eval()
    graphs = {version: capture(network, example) for version, network in networks.items()}
    sparse = {version: sparsevd.sparsify(network) for version, network in networks.items()}

    def save_run(folder: Path, version: int) -> None:
        model = sparse[version]
        TrainingFolder(folder, {}).save(model, BoundAdam(model, 1e-3), State(epoch=version))

    return {
        "text": lambda folder, version: atomic.write(folder / "summary.json", f"{version}" * 3000),
        "tensors": lambda folder, version: write_tensors(folder / "pruned.safetensors", content(version)),
        "checkpoint and metrics": save_run,
        "model file": lambda folder, version: modelfile.save(networks[version], folder / "net.spvd"),
        "C": lambda folder, version: export_c(graphs[version], example, folder / "net.c"),
    }


def _full_disk(trial: Trial, inputs: int, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory() as name:
        for _ in range(inputs):
            _one_full_disk(trial, draw, Path(name), lambda room: largest_file(room))


def fill_this_disk(inputs: int, seed: int) -> None:
    """The same in the present folder, which must be a disk of its own: it is filled up to its last bytes."""
    trial = Trial("full disk")
    draw = random.Random(seed)
    ballast = Path("ballast")

    @contextlib.contextmanager
    def room_for(size: int) -> Iterator[None]:
        disk = os.statvfs(".")
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, disk.f_bavail * disk.f_bsize - size))
        try:
            yield
        finally:
            ballast.unlink()

    for _ in range(inputs):
        _one_full_disk(trial, draw, Path("."), room_for)
    assert trial.refused, "the disk was never full"
    print(json.dumps({"inputs": trial.inputs, "refused": trial.refused}))


def _one_full_disk(
    trial: Trial, draw: random.Random, place: Path, room_for: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    name, write = draw.choice(list(file_writers().items()))
    folder = place / "folder"
    write(folder, 1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write(place / "new", 2)
    after = {path.name: path.read_bytes() for path in (place / "new").iterdir()}
    shutil.rmtree(place / "new")
    room = draw.randrange(int(1.2 * max(map(len, after.values()))))
    with trial.one(f"{name} with room for {room} bytes", WriteError), room_for(room):
        write(folder, 2)
        trial.count("written")
    now = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert now.keys() == before.keys(), f"{name}: {sorted(now)}"
    for file, content_now in now.items():
        assert content_now in (before[file], after[file]), f"{name}: {file} is neither the old nor the new one"
    shutil.rmtree(folder)
