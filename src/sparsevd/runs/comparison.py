"""Sparse VD and its rivals on the same data with the same number of epochs: train each, and one table of what came out.

Every finished method is a record in compare.json in the folder of the comparison, and is not trained again.
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsevd import baselines
from sparsevd.baselines import METHODS, Method
from sparsevd.errors import ArgumentError, FormatError
from sparsevd.files import atomic, lock
from sparsevd.reporting.summary import summary
from sparsevd.runs.training_run import RunConfig, build_model, load_data, make_folder, try_one_batch
from sparsevd.training.evaluation import evaluate
from sparsevd.training.loop import FitConfig

RECORDS = "compare.json"


@dataclass(frozen=True)
class CompareConfig:
    """What to compare on what."""

    net: str = "lenet-300-100"
    data: str = "mnist"
    methods: tuple[str, ...] = tuple(METHODS)
    out: Path = Path("runs/compare")
    epochs: int = 40
    batch_size: int = 100
    seed: int = 0
    val_size: int = 0  # above 0, errors are those on so many held-out training examples: for choosing settings
    shift: int = 0  # as in RunConfig
    mirror: bool = False
    data_dir: Path | None = None


def methods_named(text: str) -> tuple[str, ...]:
    """Names of methods from "all" or a list with commas."""
    names = tuple(METHODS) if text == "all" else tuple(name.strip() for name in text.split(","))
    _check_names(names)
    return names


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in METHODS:
            raise ArgumentError(f"no method {name!r}; there are {', '.join(METHODS)}, or all")


def compare(
    config: CompareConfig, say: Callable[[str], None] = print, settings: dict[str, Method] | None = None
) -> list[dict[str, Any]]:
    """Train what is not yet in the folder, and return the records of all the methods asked for, in their order.

    `settings` gives a method other hyper-parameters than its own.
    """
    _check_names(config.methods)
    records = read(config.out)
    run = RunConfig(
        model=config.net,
        data=config.data,
        data_dir=config.data_dir,
        val_size=config.val_size,
        shift=config.shift,
        mirror=config.mirror,
        fit=FitConfig(seed=config.seed),
    )
    train, val, test, classes = load_data(run)
    measured_on = val if config.val_size else test
    if measured_on is None:
        raise ArgumentError(f"{config.data} has no test data; give a number of held-out examples (--val-size)")
    with torch.random.fork_rng([]):
        try_one_batch(build_model(config.net, classes), train, run)
    make_folder(config.out)
    chosen: list[dict[str, Any]] = []
    for name in config.methods:
        method = (settings or {}).get(name) or METHODS[name]()
        asked = {
            "net": config.net,
            "data": config.data,
            "method": name,
            "seed": config.seed,
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "held_out": config.val_size,
            "shift": config.shift,
            "mirror": config.mirror,
            "settings": json.loads(json.dumps(method.settings())),  # as a file gives it back
        }
        known = next((r for r in records if all(r.get(key) == value for key, value in asked.items())), None)
        if known is None:
            say(f"{method.title}: {config.epochs} epochs")
            with torch.random.fork_rng([]):
                torch.manual_seed(config.seed)
                model = build_model(config.net, classes)
            start = time.monotonic()
            outcome = baselines.train(
                method, model, train, epochs=config.epochs, batch_size=config.batch_size, seed=config.seed
            )
            seconds = time.monotonic() - start
            left = summary(outcome.network)
            before = outcome.before_threshold
            known = {
                **asked,
                "error": evaluate(outcome.network, measured_on).error,
                "error_before_threshold": evaluate(before, measured_on).error if before is not None else None,
                "ratio": left.ratio if left.kept else None,
                "per_layer": left.per_layer(),
                "elbo": outcome.elbo,
                "seconds": round(seconds, 1),
                "threads": torch.get_num_threads(),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
            with lock.one_at_a_time(config.out):
                records = [*read(config.out), known]  # another comparison may have added to them since
                lines = ",\n".join(json.dumps(record) for record in records)
                atomic.write(config.out / RECORDS, f"[\n{lines}\n]\n")
        chosen.append(known)
    return chosen


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder; none if there is no file yet."""
    path = folder / RECORDS
    if not path.exists():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}); remove it to start anew") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise FormatError(f"{path} does not hold a list of records; remove it to start anew")
    return records


def table(records: list[dict[str, Any]]) -> str:
    """One line per method."""
    header = ("method", "error", "sparsity per layer", "fewer weights", "time")
    rows = [
        (
            METHODS[record["method"]].title,
            f"{record['error']:.2f} %" if record["error"] is not None else "–",
            " – ".join(f"{100 * (1 - r['kept'] / r['weights']):.1f}" for r in record["per_layer"]),
            f"{record['ratio']:.1f}×" if record["ratio"] else "∞",
            f"{record['seconds'] / 60:.1f} min",
        )
        for record in records
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column in (1, 3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
