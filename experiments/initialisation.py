"""Section 5.1 of the paper: where to start. Random weights, random weights with a warm-up of the KL, a trained network.

    OMP_NUM_THREADS=1 python experiments/initialisation.py run --net lenet-5-caffe [--start warm-up]
    python experiments/initialisation.py table

The start is chosen as the paper says: by the bound at the end, which needs no test set. Pre-training has 15 epochs of
its own.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from records import Records

NETS = {
    "lenet-5-caffe": ["--data", "mnist"],
    "vgg-like-0.25": [
        "--data",
        "cifar10",
        "--shift",
        "4",
        "--mirror",
        "--batch-size",
        "128",
        "--learning-rate",
        "1e-3",
    ],
}
STARTS = {
    "random": ["--warm-up-end", "0"],
    "warm-up": [],
    "pre-trained": ["--warm-up-end", "0", "--pretrain-epochs", "15", "--pretrain-weight-decay", "0.02"],
}


def train(net: str, start: str, epochs: int, seed: int) -> dict[str, Any]:
    out = Path("runs") / f"{net}-{start}-seed{seed}"
    command = ["train", "--model", net, *NETS[net], *STARTS[start], "--epochs", str(epochs), "--seed", str(seed)]
    command += ["--out", str(out)]
    subprocess.run([sys.executable, "-m", "sparsevd.cli", *command, "--resume"], check=True)
    summary = json.loads((out / "summary.json").read_text())
    layers = summary["summary"]["layers"]
    return {
        "data": summary["data"],
        "method": "sparse-vd",
        "error": summary["test_error"],
        "error_before_threshold": summary["test_error_before_pruning"],
        "ratio": summary["ratio"],
        "per_layer": [{key: layer[key] for key in ("name", "weights", "kept")} for layer in layers],
        "elbo": summary["elbo"],
        "seconds": round(summary["training_seconds"]),
        "command": " ".join(["sparsevd", *command]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--net", choices=NETS, action="append")
    parser.add_argument("--start", choices=STARTS, action="append")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = Records("initialisation")
    if arguments.action == "run":
        for net in arguments.net or NETS:
            for start in arguments.start or STARTS:
                unit = {"net": net, "start": start, "epochs": arguments.epochs, "seed": arguments.seed}
                if not records.find(**unit):
                    records.add(**unit, **train(net, start, arguments.epochs, arguments.seed))
    print("| network | start | epochs | bound | fewer weights | error % |\n|---|---|---|---|---|---|")
    for r in sorted(records.all(), key=lambda r: (r["net"], -r["elbo"])):
        fewer = f"{r['ratio']:.1f}×" if r["ratio"] else "all"
        print(f"| {r['net']} | {r['start']} | {r['epochs']} | {r['elbo']:,.0f} | {fewer} | {r['error']:.2f} |")


if __name__ == "__main__":
    main()
