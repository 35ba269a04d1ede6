"""Locks that end with the process that holds them, whatever stops it: the system's own (flock), on an open file.

Containers on one machine see each other's locks. So do machines that share a folder over NFS, unless it is mounted with
`local_lock` or `nolock`. Where there are no locks (Windows, some network file systems) nobody can tell a live writer
from a dead one: a second training in a folder is not refused, and leftovers of killed processes are not removed. Each
file is still replaced in one step.
"""

import json
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from sparsevd.errors import CheckpointError, SparseVDWarning, WriteError

TRAINING = ".training.lock"
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none

# The folders that trainings of this process hold: in which thread, and by which open file.
_held: dict[Path, tuple[int, int]] = {}


def take(handle: int) -> bool | None:
    """Take the lock of an open file without waiting. False: another has it. None: there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL: as the file system likes
        return None
    return True


def leads_to(path: Path, handle: int) -> bool:
    """Whether the name is still that of the open file: before its lock was taken, another may have removed it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process is here for the same folder: what it reads, adds to and writes is its own."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def only_training(folder: Path) -> Iterator[None]:
    """Holds the folder for one training; another one, in a thread or in a process, is refused with a sentence.

    The thread that holds it may take it again: a run of the command line holds it around `fit`, which does so too.
    Whoever only reads is not kept out.
    """
    key = folder.resolve()
    thread = threading.get_ident()
    if key in _held and _held[key][0] == thread:
        yield
        return
    path = folder / TRAINING
    try:
        handle = _taken(path)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error
    _held[key] = (thread, handle)
    try:
        yield
    finally:
        if key in _held:  # else this is a fork, which holds nothing
            del _held[key]
            with suppress(OSError):  # a read-only disk: without its lock the file means nothing
                path.unlink()  # before the lock ends, or it could be the next one's
            os.close(handle)


def refuse_if_training(folder: Path) -> None:
    """Says who trains in a folder, if anybody but this thread does; nothing is taken or written."""
    path = folder / TRAINING
    held = _held.get(folder.resolve())
    if (held is not None and held[0] == threading.get_ident()) or not path.is_file():
        return
    try:
        handle = os.open(path, os.O_RDWR | NO_LINK)
    except OSError:  # it ended just now, or belongs to another user
        return
    try:
        if take(handle) is False:
            raise _in_use(path)
    finally:
        os.close(handle)


def _taken(path: Path) -> int:
    """The lock file, open, locked, and with a note of who has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        taken = take(handle)
        if taken is False:
            os.close(handle)
            raise _in_use(path)
        if leads_to(path, handle):
            break
        os.close(handle)  # the one before removed it at its end
    if taken is None:
        warnings.warn(
            SparseVDWarning(f"{path.parent} cannot be locked on this system: do not train twice in it at one time"),
            stacklevel=2,
        )
    holder = {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # a full disk: the lock holds without the note
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(holder).encode())
    return handle


def _in_use(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.parent} is in use: {_holder(path)}. Wait until it ends, stop it, or use another folder"
    )


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes()[:1000])
        return f"process {holder['process']} on {holder['host']} has been training in it since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the note is not written yet, or could not be
        return "another process is training in it"


def _leave_to_parent() -> None:
    """A fork (a worker that loads data) must not keep the folder when the training itself is killed."""
    for _, handle in _held.values():
        os.close(handle)
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_leave_to_parent)
