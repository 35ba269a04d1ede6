"""Wall time of the demo's whole run (LeNet-300-100 on MNIST, our recipe), with and without what makes it faster.

    python benchmarks/time_to_result.py                  # every variant once, about 15 minutes on two slow cores
    python benchmarks/time_to_result.py --rounds 3       # more of them, in turn
    OMP_NUM_THREADS=1 python benchmarks/time_to_result.py
    python benchmarks/time_to_result.py table

Each finished run is a record in results/time_to_result.json and is not run again; ratios are to the dense run of the
same round and number of threads. The cores that it uses should do nothing else meanwhile.
"""

import argparse
import dataclasses
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sparsevd
from sparsevd import kernels
from sparsevd.training.evaluation import evaluate
from sparsevd.training.loop import fit_dense
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

RESULTS = Path(__file__).parent / "results" / "time_to_result.json"
RECIPE = sparsevd.FitConfig()
UNDROPPED = dataclasses.replace(RECIPE, drop_from=1.0, contract=False)
VARIANTS: dict[str, tuple[sparsevd.FitConfig, bool]] = {  # the settings, and whether with the kernels
    "dense": (RECIPE, True),
    "sparsevd, the recipe": (RECIPE, True),
    "bfloat16 variance": (dataclasses.replace(RECIPE, variance_dtype="bfloat16"), True),
    "dead inputs and units still computed": (dataclasses.replace(RECIPE, contract=False), True),
    "nothing dropped before the end": (UNDROPPED, True),
    "nothing dropped, no kernels": (UNDROPPED, False),
}


def run(variant: str) -> dict[str, Any]:
    config, with_kernels = VARIANTS[variant]
    splits = load("mnist")
    torch.manual_seed(config.seed)
    model = MODELS["lenet-300-100"](10)
    train: Callable[..., Any] = fit_dense
    if variant != "dense":
        model, train = sparsevd.sparsify(model), sparsevd.fit
    before = kernels.available
    if not with_kernels:
        kernels.available = lambda: False
    try:
        start = time.perf_counter()
        train(model, splits.train, None, config, progress=False)
        seconds = time.perf_counter() - start
    finally:
        kernels.available = before
    return {
        "variant": variant,
        "seconds": round(seconds, 1),
        "ratio": None if variant == "dense" else round(sparsevd.summary(model).ratio, 1),
        "error": evaluate(model, splits.test).error,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, shared",
        "settings": dataclasses.asdict(config),
    }


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: time as a ratio to the dense run of the same round, median and range over the rounds."""
    dense = {(r["round"], r["threads"]): r["seconds"] for r in records if r["variant"] == "dense"}
    lines = [
        "| run of 40 epochs | threads | time, dense = 1 | seconds | fewer weights | test error |",
        "|---" * 6 + "|",
    ]
    for threads, variant in itertools.product(sorted({threads for _, threads in dense}), VARIANTS):
        mine = [r for r in records if r["variant"] == variant and (r["round"], threads) in dense]
        mine = [r for r in mine if r["threads"] == threads]
        if not mine:
            continue
        ratios = [r["seconds"] / dense[r["round"], threads] for r in mine]
        spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
        seconds = statistics.median(record["seconds"] for record in mine)
        fewer, error = mine[0]["ratio"], mine[0]["error"]
        cells = [
            str(threads),
            f"{statistics.median(ratios):.2f}{spread}",
            f"{seconds:.0f}",
            f"{fewer}×" if fewer else "",
            f"{error:.2f} %",
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if arguments.action == "run":
        for number in range(arguments.rounds):
            for variant in arguments.variants:
                wanted = {"variant": variant, "round": number, "threads": torch.get_num_threads()}
                if any(all(record[key] == value for key, value in wanted.items()) for record in records):
                    continue
                records.append({"round": number, **run(variant)})
                temporary = RESULTS.with_suffix(".tmp")
                temporary.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
                temporary.replace(RESULTS)
                print(json.dumps(records[-1]), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
