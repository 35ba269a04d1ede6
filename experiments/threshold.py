"""Where to cut log α after training: what a threshold costs, and where `threshold="auto"` puts it.

    OMP_NUM_THREADS=1 python experiments/threshold.py run [--net lenet-300-100] [--seed 0]
    OMP_NUM_THREADS=1 python experiments/threshold.py polish [--net lenet-300-100] [--seed 0]
    python experiments/threshold.py table

Each network is trained on 50,000 images and pruned at several thresholds and by the price in the bound. Errors are
those of the 10,000 images held out of training. The share of the KL that "auto" may spend (`PRICE_SHARE`) was chosen on
LeNet-300-100 with 30 epochs, seeds 0-2, of which no records are kept. That weights beyond the network's own threshold
count in the sum was decided when the run without dropping was seen. LeNet-5-Caffe was not run.

"polish" fine-tunes the networks of these runs for three epochs after two cuts: the one by the price, and a harsh one.
"""

import argparse
import math
from pathlib import Path

import torch
from records import Records, train

import sparsevd
from sparsevd.posterior import equations, posteriors
from sparsevd.runs import sources
from sparsevd.runs.run import Run
from sparsevd.training.price import Auto, harm

OPTIONS = {
    "lenet-300-100": "--epochs 40",
    "lenet-300-100, nothing dropped": "--epochs 40 --drop-from 1",
    "lenet-5-caffe": "--epochs 20",
}
THRESHOLDS = (math.inf, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0)
HELD_OUT = 10_000
HARSH = 0.994  # zeros, beyond what the network bears
EPOCHS = 3  # of polishing


def cuts(folder: Path, seed: int) -> list[dict]:
    """The network of a run at every threshold; "auto" is last."""
    run = Run(folder)
    data = run.data()
    model = run.model(data.classes).eval()
    _, held_out = sources.split(data.train, HELD_OUT, seed)
    log_alpha = torch.cat([each.log_alpha().flatten() for each in posteriors(model)]).detach()
    prices, kl = equations.price(log_alpha), sparsevd.kl(model).item()
    own = sparsevd.prune(model)
    auto = Auto().threshold_of(model)
    found = []
    for threshold in (*THRESHOLDS, auto):
        pruned = sparsevd.prune(model, threshold=threshold)
        left = sparsevd.summary(pruned)
        measured = sparsevd.evaluate(pruned, held_out)
        found.append(
            {
                "threshold": threshold if math.isfinite(threshold) else None,
                "kept": left.kept,
                "ratio": left.ratio,
                "held_out_error": measured.error,
                "held_out_loss": measured.loss,
                "price": prices[log_alpha > threshold].sum().item(),
                "of_the_kl": prices[log_alpha > threshold].sum().item() / kl,
                "harm": harm(own, pruned, held_out),
            }
        )
    return found


def polished(folder: Path, seed: int) -> dict[str, dict]:
    """Held-out errors before and after plain fine-tuning of what two cuts have left."""
    run = Run(folder)
    data = run.data()
    model = run.model(data.classes).eval()
    train_on, held_out = sources.split(data.train, HELD_OUT, seed)
    found = {}
    for name, cut in (("auto", {"threshold": "auto"}), ("harsh", {"sparsity": HARSH})):
        pruned = sparsevd.prune(model, **cut)
        before, ratio = sparsevd.evaluate(pruned, held_out).error, sparsevd.summary(pruned).ratio
        sparsevd.polish(pruned, train_on, epochs=EPOCHS, progress=False)
        after = sparsevd.evaluate(pruned, held_out).error
        found[name] = {**cut, "ratio": ratio, "held_out_error": before, "after_polishing": after}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "polish", "table"])
    parser.add_argument("--net", choices=OPTIONS, action="append")
    parser.add_argument("--seed", type=int, action="append")
    arguments = parser.parse_args()
    records, polishing = Records("threshold"), Records("polish")
    for net in (arguments.net or OPTIONS) if arguments.action != "table" else ():
        for seed in arguments.seed or (0, 1, 2):
            out = Path("runs") / f"threshold-{net.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            if arguments.action == "polish" and not polishing.find(net=net, seed=seed):
                polishing.add(net=net, seed=seed, epochs=EPOCHS, **polished(out, seed))
            elif arguments.action == "run" and not records.find(net=net, seed=seed):
                options = f"--data mnist --val-size {HELD_OUT} --seed {seed} {OPTIONS[net]}".split()
                result = train("--model", net.partition(",")[0], *options, out=out)
                for unneeded in ("error", "error_before_threshold", "per_layer"):  # of the test set
                    del result[unneeded]
                *tried, auto = cuts(out, seed)
                records.add(net=net, seed=seed, cuts=tried, auto=auto, **result, commit_of_the_cuts=records.commit)
    print("| network | seed | threshold 3 | 1 | auto | of the KL at auto |\n|---|---|---|---|---|---|")
    for r in sorted(records.all(), key=lambda r: (r["net"], r["seed"])):
        at = {cut["threshold"]: cut for cut in r["cuts"]}
        cells = [f"{cut['ratio']:.1f}× at {cut['held_out_error']:.2f} %" for cut in (at[3.0], at[1.0], r["auto"])]
        cells[2] = f"log α {r['auto']['threshold']:.2f}: {cells[2]}"
        print(f"| {r['net']} | {r['seed']} | {' | '.join(cells)} | {100 * r['auto']['of_the_kl']:.3f} % |")
    for r in sorted(polishing.all(), key=lambda r: (r["net"], r["seed"])):
        for name in ("auto", "harsh"):
            cut = r[name]
            errors = f"{cut['held_out_error']:.2f} % → {cut['after_polishing']:.2f} %"
            print(f"{r['net']}, seed {r['seed']}, {name}: {cut['ratio']:.1f}×, polished {errors}")


if __name__ == "__main__":
    main()
