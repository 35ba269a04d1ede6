"""The command `sparsevd`: what must be settled before torch is imported, then the command line itself.

Outside the package, whose import brings torch, and torch its OpenMP, which reads its settings then and never again.
"""

import os

# Any of these means that the user has chosen how threads wait.
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def settle_waiting() -> None:
    """Let threads sleep while they wait: those that spin all but stop beside one busy process (docs/reliability.md)."""
    if not any(name in os.environ for name in CHOSEN):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def main() -> None:
    settle_waiting()
    from sparsevd.cli import main as run

    run()
