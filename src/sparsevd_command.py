"""The command `sparsevd`: what must be settled before torch is imported, then the command line itself.

Outside the package, whose import brings torch, and torch its OpenMP, which reads its settings then and never again.
"""

import os
import time
from pathlib import Path

# Any of these means that the user has chosen how threads wait.
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_LOOK = 0.1  # seconds


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
    from sparsevd.cli import main as run

    run()
