"""LeNet-300-100 on MNIST with the default recipe, seeds 0–4: weights kept and test error.

    python experiments/lenet_300_100.py

One record per seed goes to results/lenet_300_100.json when the seed is finished; seeds that are there are not repeated.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "lenet_300_100.json"
SEEDS = range(5)


def main() -> None:
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed in SEEDS:
        if any(record["seed"] == seed for record in records):
            continue
        out = Path("runs") / f"lenet-300-100-seed{seed}"
        command = ["train", "--model", "lenet-300-100", "--data", "mnist", "--seed", str(seed), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "sparsevd.cli", *command, "--resume"], check=True)
        summary = json.loads((out / "summary.json").read_text())
        records.append(
            {
                "item": "lenet-300-100, default recipe",
                "seed": seed,
                "command": "sparsevd " + " ".join(command),
                "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip(),
                **{key: value for key, value in summary.items() if key not in ("command", "summary", "finished")},
                "per_layer": [
                    {"name": layer["name"], "weights": layer["weights"], "kept": layer["kept"]}
                    for layer in summary["summary"]["layers"]
                ],
            }
        )
        RESULTS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    for name in ("ratio", "test_error", "test_error_before_pruning", "training_seconds"):
        values = [record[name] for record in records]
        print(
            f"{name}: {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}  {[round(v, 2) for v in values]}"
        )


if __name__ == "__main__":
    main()
