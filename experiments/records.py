"""Where the experiments keep what they measured: results/<item>.json, a list of records, one per finished unit."""

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import sparsevd
from sparsevd.files import atomic, lock

HERE = Path(__file__).parent


class Records:
    """The records of one item, on disk as soon as they are added."""

    def __init__(self, item: str):
        self.item = item
        self.path = HERE / "results" / f"{item}.json"
        self.commit = commit()  # now, when the code of the unit was loaded, and not when it ends

    def all(self) -> list[dict[str, Any]]:
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """Those with these values."""
        return [r for r in self.all() if all(r.get(key) == value for key, value in wanted.items())]

    def add(self, **record: Any) -> dict[str, Any]:
        """Add a record, signed with command, versions and commit. Another unit that ends at the same time waits."""
        command = " ".join(["python", *sys.argv])  # of this script, unless the record has that of its training
        signed = {"item": self.item, "commit": self.commit, "command": command, **record, "versions": versions()}
        with lock.one_at_a_time(self.path.parent):
            lines = ",\n".join(json.dumps(r, ensure_ascii=False, allow_nan=False) for r in [*self.all(), signed])
            atomic.write(self.path, f"[\n{lines}\n]\n")
        return signed


def train(*arguments: str, out: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """`sparsevd train` with these arguments, going on where a stopped run was: what a record says of the result."""
    command = ["train", *arguments, "--out", str(out)]
    environment = environment or {}
    begun_with = out / "commit"  # a run that is continued or read again is of the code that began it
    if not begun_with.exists():
        out.mkdir(parents=True, exist_ok=True)
        begun_with.write_text(commit())
    program = [sys.executable, "-m", "sparsevd.cli"]
    subprocess.run([*program, *command, "--resume"], check=True, env={**os.environ, **environment})
    summary = json.loads((out / "summary.json").read_text())
    layers = summary["summary"]["layers"]
    return {
        "settings": summary["config"],
        "error": summary["test_error"],
        "error_before_threshold": summary["test_error_before_pruning"],
        "ratio": summary["ratio"],
        "per_layer": [{key: layer[key] for key in ("name", "weights", "kept")} for layer in layers],
        "elbo": summary["elbo"],
        "seconds": round(summary["training_seconds"], 1),
        "threads": summary["machine"]["threads"],
        "commit": begun_with.read_text(),
        "command": " ".join([*(f"{key}={value}" for key, value in environment.items()), "sparsevd", *command]),
    }


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def versions() -> dict[str, str]:
    return {"sparsevd": sparsevd.__version__, "torch": torch.__version__, "python": platform.python_version()}


def commit() -> str:
    """Of the code; "-dirty" if any of it is not committed. Results that came since do not matter."""
    head = _git("describe", "--always")
    code = ("../src", "../setup.py", "*.py")
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", *code) else "")


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=HERE, text=True).strip()


def chart(name: str, columns: int, **size: Any) -> tuple[Any, Any, Path]:
    """A matplotlib figure with some axes, the axes, and where it belongs; the same bytes for the same records."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#e6e6e6", "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, columns, layout="constrained", **size)
    return figure, axes, HERE / "results" / f"{name}.svg"
