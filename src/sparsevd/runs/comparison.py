"""Sparse VD and its rivals on the same data with the same number of epochs: train each, and one table of what came out.

Every finished method is a record in compare.json in the folder of the comparison, and is not trained again.
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from sparsevd import baselines
from sparsevd.baselines import METHODS, Method
from sparsevd.errors import ArgumentError, FormatError
from sparsevd.files import atomic, lock
from sparsevd.reporting.summary import summary
from sparsevd.reporting.table import table as text_table
from sparsevd.runs import sources
from sparsevd.runs.sources import Sources
from sparsevd.runs.training_run import RunConfig
from sparsevd.training.data import Data
from sparsevd.training.evaluation import evaluate
from sparsevd.training.recipes import FitConfig

RECORDS = "compare.json"


@dataclass(frozen=True)
class CompareConfig:
    """What to compare on what."""

    net: Annotated[str, "A network by name, such as lenet-5-caffe, or package.module:factory."] = RunConfig.model
    data: Annotated[str, "mnist, 20newsgroups, …, or package.module:factory returning (train, test)."] = RunConfig.data
    methods: tuple[str, ...] = tuple(METHODS)
    out: Annotated[Path, "Folder for the records; what is there is not trained again."] = Path("runs/compare")
    epochs: Annotated[int, "Passes over the training set, for every method."] = FitConfig.epochs
    batch_size: Annotated[int, "Examples per step."] = FitConfig.batch_size
    seed: Annotated[int, "Seed of weights, noise and order."] = FitConfig.seed
    # For choosing settings: errors are then those on the held-out examples.
    val_size: Annotated[int, "Measure on so many held-out training examples instead of the test set."] = 0
    shift: Annotated[int, "Train on images shifted by up to so many pixels."] = RunConfig.shift
    mirror: Annotated[bool, "Train on mirror images too."] = RunConfig.mirror
    data_dir: Annotated[Path | None, "Folder with the data set. [env: SPARSEVD_DATA]"] = None


def methods_named(text: str) -> tuple[str, ...]:
    """Names of methods from "all" or a list with commas."""
    names = tuple(METHODS) if text == "all" else tuple(name.strip() for name in text.split(","))
    _check_names(names)
    return names


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in METHODS:
            raise ArgumentError(f"no method {name!r}; there are {', '.join(METHODS)}, or all")


def cards(names: tuple[str, ...]) -> str:
    """What the methods are; two may share a card."""
    described: dict[str, list[str]] = {}
    for name in names:
        described.setdefault(baselines.card(METHODS[name]), []).append(name)
    titles = {", ".join(alike): card for card, alike in described.items()}
    return "\n\n".join(f"{title}\n{'─' * len(title)}\n{card}" for title, card in titles.items())


def compare(
    config: CompareConfig, say: Callable[[str], None] = print, settings: dict[str, Method] | None = None
) -> list[dict[str, Any]]:
    """Train what is not yet in the folder, and return the records of all the methods asked for, in their order.

    `settings` gives a method other hyper-parameters than its own.
    """
    _check_names(config.methods)
    records = read(config.out)
    data = sources.load_data(
        config.data,
        config.data_dir,
        val_size=config.val_size,
        seed=config.seed,
        shift=config.shift,
        mirror=config.mirror,
    )
    measured_on = data.val if config.val_size else data.test
    if measured_on is None:
        raise ArgumentError(f"{config.data} has no test data; give a number of held-out examples (val_size=)")
    with torch.random.fork_rng([]):
        model = sources.build_model(config.net, data.classes)
        misfit = f"{config.net} does not fit the data {config.data}; rivals take one tensor and return one"
        sources.try_one_batch(model, data.train, misfit, forward=lambda model, x: model(x))
    atomic.make_writable_folder(config.out)
    chosen: list[dict[str, Any]] = []
    for name in config.methods:
        method = (settings or {}).get(name) or METHODS[name]()
        asked = _asked(config, name, method)
        known = next((r for r in records if all(r.get(key) == value for key, value in asked.items())), None)
        if known is None:
            say(f"{method.title}: {config.epochs} epochs")
            known = asked | _outcome(config, method, data, measured_on)
            with lock.one_at_a_time(config.out):
                records = [*read(config.out), known]  # another comparison may have added to them since
                lines = ",\n".join(json.dumps(record) for record in records)
                atomic.write(config.out / RECORDS, f"[\n{lines}\n]\n")
        chosen.append(known)
    return chosen


def _asked(config: CompareConfig, name: str, method: Method) -> dict[str, Any]:
    """What a record is of; one with the same is not made again."""
    return {
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


def _outcome(config: CompareConfig, method: Method, data: Sources, measured_on: Data) -> dict[str, Any]:
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        model = sources.build_model(config.net, data.classes)
    start = time.monotonic()
    outcome = baselines.train(
        method, model, data.train, epochs=config.epochs, batch_size=config.batch_size, seed=config.seed
    )
    seconds = time.monotonic() - start
    left = summary(outcome.network)
    before = outcome.before_threshold
    return {
        "error": evaluate(outcome.network, measured_on).error,
        "error_before_threshold": evaluate(before, measured_on).error if before is not None else None,
        "ratio": left.ratio if left.kept else None,
        "per_layer": left.per_layer(),
        "elbo": outcome.elbo,
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


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
    return text_table(header, rows, right=(1, 3, 4))
