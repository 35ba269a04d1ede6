"""Section 5.1 of the paper: where to start. Random weights, random weights with a warm-up of the KL, a trained network.

    OMP_NUM_THREADS=1 python experiments/initialisation.py run --net lenet-5-caffe [--start warm-up]
    python experiments/initialisation.py table

The start is chosen as the paper says: by the bound at the end, which needs no test set. All have the same rate, and
nothing is dropped before the end: without warm-up, units would be given up from the first epochs on. LeNet-5-Caffe is
pre-trained for as many epochs; VGG-like starts from the dense network of a run of vgg_like.py (--dense). Those dense
epochs come on top.
"""

import argparse
from pathlib import Path

from records import Records, train

EPOCHS = {"lenet-5-caffe": 20, "vgg-like-0.25": 5}
OPTIONS = {
    "lenet-5-caffe": "--data mnist --shift 1 --learning-rate 1e-3 --drop-from 1",
    "vgg-like-0.25": "--data cifar10 --shift 4 --mirror --batch-size 128 --learning-rate 1e-3 --drop-from 1",
}
STARTS = {"random": "--warm-up-end 0", "warm-up": "", "pre-trained": "--warm-up-end 0"}
PRETRAINED = {
    "lenet-5-caffe": f"--pretrain-epochs {EPOCHS['lenet-5-caffe']}",
    "vgg-like-0.25": "--init-from {dense}/pretrain/checkpoint.safetensors",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--net", choices=EPOCHS, action="append")
    parser.add_argument("--start", choices=STARTS, action="append")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="of a run of vgg_like.py, for VGG-like")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = Records("initialisation")
    if arguments.action == "run":
        for net in arguments.net or EPOCHS:
            for start in arguments.start or STARTS:
                unit = {"net": net, "start": start, "epochs": EPOCHS[net], "seed": arguments.seed}
                if not records.find(**unit):
                    options = f"--epochs {EPOCHS[net]} --seed {arguments.seed} {OPTIONS[net]} {STARTS[start]}"
                    if start == "pre-trained":
                        if "{dense}" in PRETRAINED[net] and not arguments.dense:
                            parser.error(f"{net}, pre-trained: name a run of vgg_like.py (--dense FOLDER)")
                        options += f" {PRETRAINED[net]}".format(dense=arguments.dense)
                    out = Path("runs") / f"{net}-{start}-seed{arguments.seed}"
                    result = train("--model", net, *options.split(), out=out)
                    records.add(**unit, data=OPTIONS[net].split()[1], method="sparse-vd", **result)
    print("| network | start | epochs | bound | fewer weights | error % |\n|---|---|---|---|---|---|")
    for r in sorted(records.all(), key=lambda r: (r["net"], -r["elbo"])):
        fewer = f"{r['ratio']:.1f}×" if r["ratio"] else "all"
        print(f"| {r['net']} | {r['start']} | {r['epochs']} | {r['elbo']:,.0f} | {fewer} | {r['error']:.2f} |")


if __name__ == "__main__":
    main()
