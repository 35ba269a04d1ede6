"""LeNet-300-100 on MNIST, seeds 0–4: weights kept and test error of the default recipe, and of variants of it.

    python experiments/lenet_300_100.py                        # the default recipe
    python experiments/lenet_300_100.py --variant plain        # without kernels and progressive pruning; see --help
    python experiments/lenet_300_100.py table

One record per seed goes to results/lenet_300_100.json when the seed is finished; seeds that are there are not repeated.
"""

import argparse
from pathlib import Path
from typing import Any

from records import Records, spread, train

NET = "lenet-300-100"
SEEDS = range(5)
# What a variant adds to the command, and to the environment.
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "recipe": ([], {}),
    "bfloat16": (["--variance-dtype", "bfloat16"], {}),
    "plain": (["--drop-from", "1"], {"SPARSEVD_KERNELS": "0"}),
    "fast": (["--recipe", "fast"], {}),
    "thorough": (["--recipe", "thorough"], {}),
    "sparsest": (["--recipe", "sparsest"], {}),
    "paper": (["--recipe", "paper"], {}),
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
                records.add(**unit(arguments.variant, seed))
    for variant in VARIANTS:
        print(describe(variant, sorted(records.find(variant=variant), key=lambda record: record["seed"])))


def unit(variant: str, seed: int) -> dict[str, Any]:
    name = f"{NET}-seed{seed}" if variant == "recipe" else f"{NET}-{variant}-seed{seed}"
    options, environment = VARIANTS[variant]
    arguments = ["--model", NET, "--data", "mnist", "--seed", str(seed), *options]
    result = train(*arguments, out=Path("runs") / name, environment=environment)
    of = {"net": NET, "data": "mnist", "method": "sparse-vd", "epochs": result["settings"]["epochs"]}
    return {**of, "variant": variant, "seed": seed, **result}


def describe(variant: str, records: list[dict[str, Any]]) -> str:
    """Markdown: a row with mean ± standard deviation over the seeds, then the seeds one by one."""
    if not records:
        return f"| {variant} | not run |"
    keys = ("error", "error_before_threshold", "ratio", "elbo", "seconds")
    cells = [spread([r[key] for r in records]) for key in keys]
    singly = ", ".join(f"{r['ratio']:.1f}× at {r['error']:.2f} %" for r in records)
    return f"| {variant} | {' | '.join(cells)} | {singly} |"


if __name__ == "__main__":
    main()
