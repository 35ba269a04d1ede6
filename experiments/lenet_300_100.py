"""LeNet-300-100 on MNIST, seeds 0–4: weights kept and test error of the default recipe, and of variants of it.

    python experiments/lenet_300_100.py                        # the default recipe
    python experiments/lenet_300_100.py --variant plain        # without kernels and progressive pruning; see --help
    python experiments/lenet_300_100.py table

One record per seed goes to results/lenet_300_100.json when the seed is finished; seeds that are there are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from records import Records

SEEDS = range(5)
# What a variant adds to the command, and to the environment.
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "recipe": ([], {}),
    "bfloat16": (["--variance-dtype", "bfloat16"], {}),
    "plain": (["--drop-from", "1"], {"SPARSEVD_KERNELS": "0"}),
    "fast": (["--recipe", "fast"], {}),
    "sparsest": (["--recipe", "sparsest"], {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--variant", choices=VARIANTS, default="recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    arguments = parser.parse_args()
    records = Records("lenet_300_100")
    if arguments.action == "run":
        for seed in arguments.seeds:
            if not records.find(variant=arguments.variant, seed=seed):
                records.add(**train(arguments.variant, seed))
    for variant in VARIANTS:
        print(describe(variant, sorted(records.find(variant=variant), key=lambda record: record["seed"])))


def train(variant: str, seed: int) -> dict[str, Any]:
    name = f"lenet-300-100-seed{seed}" if variant == "recipe" else f"lenet-300-100-{variant}-seed{seed}"
    out = Path("runs") / name
    options, environment = VARIANTS[variant]
    command = ["train", "--model", "lenet-300-100", "--data", "mnist", "--seed", str(seed), "--out", str(out), *options]
    program = [sys.executable, "-m", "sparsevd.cli"]
    subprocess.run([*program, *command, "--resume"], check=True, env={**os.environ, **environment})
    summary = json.loads((out / "summary.json").read_text())
    return {
        "variant": variant,
        "seed": seed,
        "command": " ".join([*(f"{key}={value}" for key, value in environment.items()), "sparsevd", *command]),
        **{key: value for key, value in summary.items() if key not in ("command", "summary", "finished", "versions")},
        "per_layer": [
            {"name": layer["name"], "weights": layer["weights"], "kept": layer["kept"]}
            for layer in summary["summary"]["layers"]
        ],
    }


def describe(variant: str, records: list[dict[str, Any]]) -> str:
    """Markdown: a row with mean ± standard deviation over the seeds, then the seeds one by one."""
    if len(records) < 2:
        return f"| {variant} | {len(records)} seeds yet |"
    cells = [
        f"{statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}"
        for v in (
            [r[key] for r in records]
            for key in ("test_error", "test_error_before_pruning", "ratio", "elbo", "training_seconds")
        )
    ]
    singly = ", ".join(f"{r['ratio']:.1f}× at {r['test_error']:.2f} %" for r in records)
    return f"| {variant} | {' | '.join(cells)} | {singly} |"


if __name__ == "__main__":
    main()
