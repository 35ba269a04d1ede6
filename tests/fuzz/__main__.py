"""The long form of the trials: hostile files, wrong shapes, kills and full disks, in numbers.

    make fuzz                                          # all of them, about an hour on two cores
    cd tests && python -m fuzz --only kills --inputs 50 --seed 7
    cd tests && python -m fuzz --part 0.1              # a tenth of each: what `make test-all` runs

Each trial is a process of its own, so that its peak of memory is its own too. It ends at the first crash, at the first
error that is not one of ours, at a wrong answer, and at an input that takes too long; what it was is then said. With
--record the results go to a JSON file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fuzz import checkpoints, kernel_calls, model_files, sanitised, writers
from fuzz.trial import Trial
from sparsevd.files import atomic


@dataclass(frozen=True)
class Row:
    """A trial: what runs, how many inputs its long form has, and whether the kernels are those with sanitisers."""

    run: Callable[[int, int], Trial]
    inputs: int
    sanitised: bool = False


ROWS = {
    "model-files": Row(partial(model_files.run, decoder="c"), 1_000_000),
    "model-files-python": Row(partial(model_files.run, decoder="python"), 10_000),
    "model-files-sanitised": Row(partial(model_files.run, decoder="c"), 50_000, sanitised=True),
    "kernel-calls": Row(kernel_calls.run, 100_000),
    "kernel-calls-sanitised": Row(kernel_calls.run, 20_000, sanitised=True),
    "checkpoints": Row(checkpoints.run, 50_000),
    "kills": Row(writers.run_kills, 200),
    "training-kills": Row(writers.run_training_kills, 40),
    "concurrent": Row(writers.run_concurrent, 1_000),
    "full-disk": Row(writers.run_full_disk, 400),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=ROWS, action="append", help="this trial; may be given several times")
    parser.add_argument("--inputs", type=int, help="of each trial, instead of those of its long form")
    parser.add_argument("--part", type=float, default=1.0, help="of the inputs of the long form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a JSON file for the results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one trial, in this process
    options = parser.parse_args()
    names = options.only or list(ROWS)
    counts = {name: options.inputs or max(1, round(options.part * ROWS[name].inputs)) for name in names}
    if options.here:
        for name, inputs in counts.items():
            run_here(name, inputs, options.seed)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, inputs in counts.items():
            result = run_apart(name, inputs, options.seed, Path(folder))
            if result is not None:
                print(json.dumps({"trial": name, **result}, ensure_ascii=False), flush=True)
                results.append({"trial": name, "seed": options.seed, **result})
    if options.record:
        atomic.write(options.record, json.dumps({**about(), "trials": results}, indent=1, ensure_ascii=False) + "\n")


def run_here(name: str, inputs: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(ROWS[name].run(inputs, seed))


def run_apart(name: str, inputs: int, seed: int, folder: Path) -> dict[str, object] | None:
    """The figures of a trial in a process of its own; what it says of an input that broke it ends everything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ROWS[name].sanitised:
        changes = sanitised.environment(folder)
        if changes is None:
            print(f"{name} is left out: the compiler here has no sanitisers", flush=True)
            return None
        environment |= changes
    command = [sys.executable, "-m", "fuzz", "--here", "--only", name, "--inputs", str(inputs), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{name} failed with {done.returncode}; again with: python -m fuzz {' '.join(command[4:])}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def about() -> dict[str, object]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", "-m", "fuzz", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": {"vectors": torch.backends.cpu.get_cpu_capability(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
