"""The command `sparsevd`: what must be settled before torch is imported or takes memory, then the command line.

Outside the package, whose import brings torch, and torch its OpenMP, which reads its settings then and never again.
"""

import ctypes
import os
import time
from pathlib import Path

# Any of these means that the user has chosen how threads wait.
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_LOOK = 0.1  # seconds
# Any of these means that the user has chosen how memory is kept.
MEMORY_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what glibc's mallopt calls them
_ALL = 2**31 - 1


def settle_waiting() -> None:
    """Let threads sleep while they wait, if other processes keep the cores busy that they would run on.

    On an idle machine threads that spin are faster, by half on a small network; beside a busy process they wait for
    whole time slices (docs/reliability.md has the figures).
    """
    if any(name in os.environ for name in CHOSEN):
        return
    cores = os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() else cores
    if threads > 1 and busy_cores() > cores - threads + 0.5:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def keep_memory() -> None:
    """Let memory that was freed stay with the process.

    glibc gives that of large tensors back to the system and asks for it anew at every step, which then clears it page
    by page: of a network with a vocabulary a third of the time (docs/training-cost.md). Other C libraries, and other
    allocators in its place, are left as they are.
    """
    if any(name in os.environ for name in MEMORY_CHOSEN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # only glibc has it  # noqa: B018
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, _ALL)
    mallopt(_MMAP_THRESHOLD, _ALL)


def busy_cores() -> float:
    """How many cores other processes keep busy, as Linux counts; 0 where nobody says."""
    first = _ticks()
    time.sleep(_LOOK)
    second = _ticks()
    if first is None or second is None:
        return 0.0
    passed = sum(second) - sum(first)
    idle = sum(second[3:5]) - sum(first[3:5])  # waiting for a disk is idle too
    return (1 - idle / passed) * (os.cpu_count() or 1) if passed > 0 else 0.0


def _ticks() -> list[int] | None:
    """What all cores have spent so far: user, nice, system, idle, waiting for disks, interrupts, other guests."""
    try:
        return [int(ticks) for ticks in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):  # another system
        return None


def main() -> None:
    settle_waiting()
    keep_memory()
    from sparsevd.cli import main as run

    run()
