"""Files are whole or not there at all: two writers, killed ones, planted names, full disks."""

import errno
import os
import resource
import stat
import threading

import pytest
import torch

from sparsevd.errors import WriteError
from sparsevd.files import atomic, lock
from sparsevd.files.tensors import read_tensors, write_tensors


def names(folder):
    return sorted(os.listdir(folder))


def permissions(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture
def leftover():
    """Makes what a process killed in the midst of writing a file leaves: a temporary file that nobody has locked."""

    def make(path):
        before = set(os.listdir(path.parent))
        with atomic.replacing(path) as file:
            (name,) = set(os.listdir(path.parent)) - before
            file.write(b"half")
            file.flush()
            os.link(path.parent / name, path.parent / "kept")
        path.unlink()
        return (path.parent / "kept").rename(path.parent / name)

    return make


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic.write(path, "old")

    def fail():
        with atomic.replacing(path) as file:
            file.write(b"half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_threads_that_save_to_one_path_do_not_disturb_each_other(tmp_path):
    """With one temporary name per process they took each other's files away, and most saves failed."""
    path = tmp_path / "file"
    failures, saved = [], threading.Event()

    def save(value):
        try:
            for _ in range(25):
                write_tensors(path, {"a": torch.full((20_000 + 1000 * value,), float(value))})
                saved.set()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    assert saved.wait(60)
    while any(thread.is_alive() for thread in threads):
        tensor = read_tensors(path)[0]["a"]
        assert len(tensor) == 20_000 + 1000 * int(tensor[0])
        assert (tensor == tensor[0]).all()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(tmp_path) == ["file"]


def test_two_writers_with_the_same_process_number_both_succeed(tmp_path, monkeypatch):
    """As in two containers that share a folder. The one that ends last wins."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    first, second = tmp_path / "file", tmp_path / "." / "file"
    with atomic.replacing(first) as one:
        one.write(b"one, ")
        with atomic.replacing(second) as two:
            two.write(b"two")
        assert first.read_bytes() == b"two"
        one.write(b"completed")
    assert first.read_bytes() == b"one, completed"
    assert names(tmp_path) == ["file"]


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f".file.{os.getpid()}.tmp").symlink_to(target)
    atomic.write(folder / "file", "new")
    assert not (folder / "file").is_symlink()
    # Nor would it be if somebody could foresee the name.
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    (folder / f".file.{'0' * 16}.tmp").symlink_to(target)
    with pytest.raises(WriteError, match="File exists"):
        atomic.write(folder / "file", "newer")
    assert target.read_text() == "precious"
    assert (folder / "file").read_text() == "new"


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)])
def test_a_new_file_has_the_permissions_of_the_users_umask(tmp_path, umask, mask, expected):
    umask(mask)
    atomic.write(tmp_path / "file", "new")
    write_tensors(tmp_path / "tensors", {"a": torch.ones(2)})
    assert permissions(tmp_path / "file") == permissions(tmp_path / "tensors") == oct(expected)


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444, 0o755])
def test_an_existing_file_keeps_its_permissions(tmp_path, umask, mode):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    with atomic.replacing(path) as file:
        (temporary,) = set(names(tmp_path)) - {"file"}
        assert permissions(tmp_path / temporary) == oct(0o600)  # never more than the file itself allows
        file.write(b"new")
    assert permissions(path) == oct(mode)
    assert path.read_text() == "new"


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "n" * 234, "[ab]*?", " ", "line\nbreak"])
def test_any_name_that_the_file_system_takes_can_be_written(tmp_path, name, leftover):
    path = tmp_path / name
    leftover(path)
    atomic.write(path, "old")
    atomic.write(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == [name]


def test_a_link_at_the_final_path_is_replaced_and_its_target_kept(tmp_path):
    target = tmp_path / "target"
    target.write_text("another's")
    for link, to in (("link", target), ("dangling", tmp_path / "nowhere")):
        (tmp_path / link).symlink_to(to)
        atomic.write(tmp_path / link, "new")
        assert not (tmp_path / link).is_symlink()
        assert (tmp_path / link).read_text() == "new"
    assert target.read_text() == "another's"


def test_a_folder_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    atomic.write(tmp_path / "runs" / "file", "new")
    assert (tmp_path / "disk" / "file").read_text() == "new"


def test_what_is_not_a_file_is_refused_and_stays(tmp_path):
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to("/dev/null")  # as /dev/stdout is one
    for path in (pipe, folder, link):
        with pytest.raises(WriteError, match="cannot be written: it exists, and is not a file"):
            atomic.write(path, "new")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert names(tmp_path) == ["folder", "link", "pipe"]


def test_the_file_and_every_new_folder_are_synced(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def watched(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    atomic.write(tmp_path / "a" / "b" / "file", "new")
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]
    assert synced[2].startswith(str(tmp_path / "a" / "b" / ".file."))
    assert synced[3:] == [str(tmp_path / "a" / "b")]


def test_leftovers_of_this_file_only_are_removed(tmp_path, leftover):
    mine, others = leftover(tmp_path / "checkpoint"), leftover(tmp_path / "checkpoint.old")
    strange = [".checkpoint.12.tmp", ".checkpoint.tmp", ".checkpoint.0123456789abcdef.tmp.gz", ".tmpAbCdEf"]
    for name in strange:
        (tmp_path / name).touch()
    (tmp_path / f".checkpoint.{'0' * 16}.tmp").symlink_to(tmp_path / strange[0])
    atomic.remove_leftovers(tmp_path / "checkpoint")
    assert not mine.exists()
    assert names(tmp_path) == sorted([*strange, others.name, f".checkpoint.{'0' * 16}.tmp"])
    atomic.remove_leftovers(tmp_path / "no folder" / "file")


def test_the_temporary_file_of_a_live_writer_stays(tmp_path):
    path = tmp_path / "file"
    with atomic.replacing(path) as file:
        file.write(b"of the slow writer")
        atomic.remove_leftovers(path)
        atomic.write(path, "of the quick one")
        assert len(names(tmp_path)) == 2
    assert path.read_text() == "of the slow writer"
    assert names(tmp_path) == ["file"]


def test_a_writer_that_is_taken_for_dead_before_it_has_its_lock_begins_again(tmp_path, monkeypatch):
    """Another process cleans up between the creation of the temporary file and the lock on it."""
    path = tmp_path / "file"
    take, calls = lock.take, []

    def late(handle):
        calls.append(handle)
        if len(calls) == 1:
            atomic.remove_leftovers(path)
            assert names(tmp_path) == []
        return take(handle)

    monkeypatch.setattr(lock, "take", late)
    atomic.write(path, "new")
    assert len(calls) == 3  # ours, the other's, ours again
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_without_locks_files_are_written_and_nothing_is_removed(tmp_path, monkeypatch, leftover):
    """As on Windows, or on a network file system that has none."""
    left = leftover(tmp_path / "file")
    monkeypatch.setattr(lock, "fcntl", None)
    atomic.write(tmp_path / "file", "new")
    assert names(tmp_path) == sorted(["file", left.name])


@pytest.fixture
def small_files():
    """The largest size of a file is lowered: writing more is an error, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 100, 8191, 8192, 39_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, small_files, room):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.zeros(10_000)})
    before = path.read_bytes()
    small_files(room)
    with pytest.raises(WriteError, match=f"{path} cannot be written: File too large"):
        write_tensors(path, {"a": torch.ones(10_000)})
    with pytest.raises(WriteError, match="File too large"):
        atomic.write(path, bytes(40_000))
    assert path.read_bytes() == before
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_at_the_very_end_leaves_the_old_file(tmp_path, monkeypatch, number):
    """Network and quota errors may come as late as fsync."""
    path = tmp_path / "file"
    atomic.write(path, "old")

    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match=f"{path} cannot be written: {os.strerror(number)}"):
        atomic.write(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_what_stands_in_the_place_of_a_folder_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot be written"):
        atomic.write(tmp_path / "file" / "new", "new")
