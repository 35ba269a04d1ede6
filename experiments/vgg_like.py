"""Figure 3 of the paper: VGG-like networks on CIFAR, pre-trained with Binary Dropout and weight decay, then Sparse VD.

    OMP_NUM_THREADS=1 python experiments/vgg_like.py run --data cifar10      # about two hours on one slow core; goes on
    python experiments/vgg_like.py thresholds      # of the runs that are there: some minutes
    python experiments/vgg_like.py table

Training images are shifted by up to four pixels and mirrored. k = 0.25 fits two cores; --k 1 is the same command for
larger machines. The run stays in runs/vgg-like-<k>-<data>-<epochs>-<warm-up>-seed<s>, with a line per epoch in
metrics.jsonl; --dense takes the pre-trained network from the folder of an earlier run. `thresholds` measures what lower
thresholds of log α would give: the whole way from a run's sparsity to too much of it.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from records import Records, chart, train

import sparsevd
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import load_weights
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

PRETRAIN = {"epochs": 15, "learning-rate": 2e-3, "weight-decay": 0.02}
RATE = 1e-3
SIZES = ("0.25", "0.5", "1", "1.5")
DATA = ("cifar10", "cifar100")
RATIOS = (2, 3, 5, 10, 20, 30, 50)  # of the axis
AXIS = (10, 20, 30, 50, 100)
THRESHOLDS = (3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0)
COLOURS = ("#c1272d", "#0000a7", "#008176", "#555555", "#eecc16")
UNIT = ("net", "data", "seed", "epochs", "warm_up_end")


def net_of(k: str) -> str:
    return "vgg-like" if k == "1" else f"vgg-like-{k}"


def folder(net: str, data: str, seed: int, epochs: int, warm_up_end: float) -> Path:
    return Path("runs") / f"{net}-{data}-{epochs}-{warm_up_end}-seed{seed}"


def run(unit: dict[str, Any], earlier: Path | None) -> dict[str, Any]:
    model, data, seed, epochs, warm_up_end = (unit[key] for key in UNIT)
    out = folder(**unit)
    options = ["--shift", "4", "--mirror", "--batch-size", "128", "--seed", str(seed)]
    if earlier:
        options += ["--init-from", str(earlier / "pretrain" / "checkpoint.safetensors")]
    else:
        options += [part for name, value in PRETRAIN.items() for part in (f"--pretrain-{name}", str(value))]
    options += ["--epochs", str(epochs), "--learning-rate", str(RATE), "--warm-up-end", str(warm_up_end)]
    result = train("--model", model, "--data", data, *options, out=out)
    splits = load(data)
    dense = MODELS[model](splits.classes)
    pretrain = (earlier or out) / "pretrain"
    load_weights(dense, pretrain / "checkpoint.safetensors")
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    pretraining = [json.loads(line) for line in (pretrain / "metrics.jsonl").read_text().splitlines()]
    return {
        **unit,
        "method": "sparse-vd from a dense network",
        "dense_error": sparsevd.evaluate(dense, splits.test).error,
        **result,
        "seconds": round(result["seconds"] + sum(m["seconds"] for m in pretraining)),
        "curve": [
            {key: m[key] for key in ("epoch", "train_error", "ratio", "elbo", "alive", "seconds")} for m in metrics
        ],
        "pretraining": [{key: m[key] for key in ("epoch", "train_error", "seconds")} for m in pretraining],
    }


def sweep(record: dict[str, Any]) -> list[dict[str, float]]:
    """Test error and sparsity of a finished run by threshold."""
    found, test = [], load(record["data"]).test
    for threshold in THRESHOLDS:
        network = Run(folder(**{key: record[key] for key in UNIT})).network(threshold).network
        error = sparsevd.evaluate(network, test).error
        found.append({"threshold": threshold, "ratio": sparsevd.summary(network).ratio, "error": error})
    return found


def figure(records: Records, sweeps: Records) -> None:
    drawing, axes, path = chart("vgg_like", 3, figsize=(12, 3.4))
    for record, colour in zip(records.all(), itertools.cycle(COLOURS)):
        first = len(record["pretraining"])
        label = f"{record['net']}, {record['data']}, {record['epochs']} epochs: {record['error']:.2f} %"
        dense = [(m["epoch"], m["train_error"]) for m in record["pretraining"]]
        sparse = [(first + m["epoch"], m["train_error"]) for m in record["curve"]]
        axes[0].plot(*zip(*dense, strict=True), ":", color=colour)
        axes[0].plot(*zip(*sparse, strict=True), color=colour)
        tests = {first: record["dense_error"], first + len(sparse): record["error"]}
        axes[0].plot(list(tests), list(tests.values()), "o", color=colour)
        axes[1].plot([e for e, _ in sparse], [m["ratio"] for m in record["curve"]], color=colour, label=label)
        for swept in sweeps.find(**{key: record[key] for key in UNIT}):
            curve = [(point["ratio"], point["error"]) for point in swept["thresholds"]]
            axes[2].plot(*zip(*curve, strict=True), ".-", color=colour)
            axes[2].axhline(record["dense_error"], color=colour, linestyle=":")
    axes[0].set(xlabel="epoch", ylabel="error, %", title="training images (dense dotted), points: test")
    axes[1].set(xlabel="epoch", ylabel="|W| / |W≠0|", title="fewer weights", yscale="log")
    axes[1].set_yticks(RATIOS, [f"{ratio}×" for ratio in RATIOS])
    axes[2].set(xlabel="|W| / |W≠0|", ylabel="error, %", title="test images, by threshold; dotted: dense", xscale="log")
    axes[2].set_ylim(0, 100)
    axes[2].set_xticks(AXIS, [f"{ratio}×" for ratio in AXIS])
    for axis in axes[1:]:
        axis.minorticks_off()
    axes[1].legend(fontsize=7)
    drawing.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "thresholds", "table"])
    parser.add_argument("--data", choices=DATA, default="cifar10")
    parser.add_argument("--k", choices=SIZES, default="0.25")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=28, help="of Sparse VD")
    parser.add_argument("--warm-up-end", type=float, default=0.4, help="part of them from which the KL counts fully")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="of an earlier run of the same network and data")
    arguments = parser.parse_args()
    records = Records("vgg_like")
    unit = {"net": net_of(arguments.k)} | {key: getattr(arguments, key) for key in UNIT[1:]}
    if arguments.action == "run" and not records.find(**unit):
        records.add(**run(unit, arguments.dense))
    sweeps = Records("vgg_like_thresholds")
    if arguments.action == "thresholds":
        for record in records.all():
            unit = {key: record[key] for key in UNIT}
            if (folder(**unit) / "summary.json").exists() and not sweeps.find(**unit):
                sweeps.add(**unit, method=record["method"], thresholds=sweep(record))
    print("| network | data | epochs | warm-up | dense % | Sparse VD % | before the threshold | fewer weights |")
    print("|---|---|---|---|---|---|---|---|")
    for k, data in itertools.product(SIZES, DATA):
        rows = records.find(net=net_of(k), data=data)
        for r in rows:
            errors = " | ".join(f"{r[key]:.2f}" for key in ("dense_error", "error", "error_before_threshold"))
            epochs = f"{len(r['pretraining'])} + {r['epochs']} | {r['warm_up_end']:.0%}"
            print(f"| {r['net']} | {r['data']} | {epochs} | {errors} | {r['ratio']:.1f}× |")
        if not rows:
            print(f"| {net_of(k)} | {data} | not run | | | | | |")
    if records.all():
        figure(records, sweeps)


if __name__ == "__main__":
    main()
