"""The long trainings behind the paper's open claims, as a queue beside other work: hours of one core, in any pieces.

    python experiments/long_runs.py list          # units in order, their state, CPU hours left
    python experiments/long_runs.py run           # until the queue is empty; after a stop, the same again
    python experiments/long_runs.py run --stage A
    python experiments/long_runs.py run --only dense-0.5-cifar10
    python experiments/long_runs.py estimate      # measure short epochs of all that could run

For hours in the background, from a clone that nobody changes: nohup setsid python experiments/long_runs.py run &
`list` names the process group: kill -STOP -- -GROUP pauses it, -CONT goes on, -TERM saves and ends it. A kill costs
what was done since the last epoch (for a rival, its unit). One unit at a time, one thread, lowest priority; work in
progress is in runs/long_runs, and each finished unit is a record in results/. The hours are CPU hours: a busy machine
takes longer.

Dense starts: trials with k = 0.25 on held-out images choose the setting of those with k = 0.5 and 1. LeNet-5-Caffe: the
recipe of table 1 on images as they are, then trials on held-out images. Rivals of table 1: their whole curve, by the
strength that decides their sparsity.
"""

import argparse
import contextlib
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dense_start import HELD_OUT, DenseStart, Setting
from lenet_works import Rival, SparseLeNet
from unit_queue import Queue
from work import Unit, do, measure

from sparsevd import FitConfig
from sparsevd.baselines import Method
from sparsevd.baselines.gradual import GradualPruning
from sparsevd.baselines.pruning import Pruning
from sparsevd.baselines.soft_weight_sharing import SoftWeightSharing
from sparsevd.baselines.surgery import Surgery
from sparsevd.errors import SparseVDError
from sparsevd.training.recipes import RECIPES

FOLDER = Path("runs/long_runs")

DENSE_SETTINGS = {
    "adamw-cosine": Setting("adamw", rate=2e-3, weight_decay=0.02, peak_at=0.0),  # as vgg_like.py pre-trains
    "sgd": Setting("sgd", rate=0.1, weight_decay=5e-4, peak_at=0.25),
    "sgd-smoothing": Setting("sgd", rate=0.1, weight_decay=5e-4, peak_at=0.25, smoothing=0.1),
    "adamw-smoothing": Setting("adamw", rate=4e-3, weight_decay=0.05, peak_at=0.25, smoothing=0.1),
}
DENSE_TRIALS = [
    Unit(
        f"trial-dense-{name}", "A", "trials", DenseStart("vgg-like-0.25", epochs=10, setting=setting, held_out=HELD_OUT)
    )
    for name, setting in DENSE_SETTINGS.items()
]
TRIED = tuple(unit.name for unit in DENSE_TRIALS)


def dense(name: str, net: str, epochs: int, data: str = "cifar10") -> Unit:
    return Unit(name, "A", "dense_starts", DenseStart(net, epochs, data=data), needs=TRIED)


# As in table 1, where the images are shifted.
LENET_5 = FitConfig(epochs=40, drop_from=0.4)
UNSHIFTED = [
    Unit(
        f"lenet-5-caffe-unshifted-seed{seed}",
        "A",
        "lenet_5_caffe",
        SparseLeNet("lenet-5-caffe", replace(LENET_5, seed=seed)),
    )
    for seed in range(5)
]


SHORT = replace(LENET_5, epochs=20)


def lenet_5_trial(name: str, fit: FitConfig = SHORT, **start: Any) -> Unit:
    """On 50,000 images, measured on the other 10,000."""
    return Unit(f"trial-lenet-5-{name}", "A", "trials", SparseLeNet("lenet-5-caffe", fit, held_out=10_000, **start))


LENET_5_TRIALS = [
    lenet_5_trial("as-it-is"),
    lenet_5_trial("pretrained", pretrain_epochs=10),
    lenet_5_trial("rate-0.002", replace(SHORT, learning_rate=2e-3)),
    lenet_5_trial("rate-0.001", replace(SHORT, learning_rate=1e-3)),
    lenet_5_trial("batch-50", replace(SHORT, batch_size=50)),
    lenet_5_trial("batch-200", replace(SHORT, batch_size=200)),
    lenet_5_trial("log-sigma2-10", initial_log_sigma2=-10.0),
    lenet_5_trial("log-sigma2-6", initial_log_sigma2=-6.0),
    lenet_5_trial("log-sigma2-relative", relative_log_sigma2=-4.0),
    lenet_5_trial("kaiming", initialisation="kaiming"),
    lenet_5_trial("late-drop", replace(SHORT, drop_from=0.7)),
    lenet_5_trial("paper", RECIPES["paper"].fit),  # 200 epochs
]

# Each rival by what decides its sparsity. The defaults, and surgery with 3.6, are in table 1.
CURVES: dict[str, list[Method]] = {
    "surgery": [Surgery(c=c) for c in (1.0, 1.5, 2.0, 2.8, 3.2, 4.2)],
    "pruning": [Pruning(quality=quality) for quality in (2.7, 3.2, 3.7, 4.2, 4.8)],
    "soft-weight-sharing": [
        SoftWeightSharing(tau=tau, zero_proportion=zero) for tau, zero in ((0.05, 0.9998), (0.1, 0.999), (0.2, 0.999))
    ],
}


def strength(method: Method) -> str:
    chosen = {Surgery: ("c",), Pruning: ("quality",), SoftWeightSharing: ("tau", "zero_proportion")}[type(method)]
    return "-".join(str(method.settings()[name]) for name in chosen)


RIVALS = [
    Unit(f"curve-{name}-{strength(method)}-seed{seed}", "A", "trade_off", Rival(method, seed))
    for seed in range(3)
    for name, methods in CURVES.items()
    for method in methods
]

GRADUAL = [
    Unit(f"curve-gradual-{ratio}x-seed{seed}", "B", "trade_off", Rival(GradualPruning(sparsity=1 - 1 / ratio), seed))
    for seed in range(3)
    for ratio in (20, 40, 64, 87, 103, 150, 200)
]

PRETRAINED_START = "a start of Sparse VD that keeps what a dense network has learned (not in the package yet)"
NO_LEVER = "code that does not exist yet: "


def waiting(name: str, item: str, reason: str) -> Unit:
    return Unit(name, "B", item, waits_for=reason)


LEVERS = {
    "polish": "a polish of the weights that are kept",
    "threshold-by-price": "a threshold that weighs what a weight costs",
    "second-round": "a second round from the compacted network with fresh noise",
    "averaging": "averaging of weights",
    "fading-noise": "noise that fades out at the end of a run",
    "teacher": "a teacher's term in the loss",
}

UNITS = [
    *DENSE_TRIALS,
    dense("dense-0.5-cifar10", "vgg-like-0.5", 24),
    UNSHIFTED[0],
    *RIVALS[: len(RIVALS) // 3],  # seed 0
    *UNSHIFTED[1:],
    *LENET_5_TRIALS,
    *RIVALS[len(RIVALS) // 3 :],
    dense("dense-0.5-cifar10-control", "vgg-like-0.5", 44),  # as many epochs as dense start and Sparse VD together
    dense("dense-1-cifar10", "vgg-like", 24),
    dense("dense-0.5-cifar100", "vgg-like-0.5", 24, data="cifar100"),
    waiting("sparse-0.5-cifar10", "vgg_like", PRETRAINED_START),
    *[waiting(f"lenet-300-100-{name}", "trials", NO_LEVER + what) for name, what in LEVERS.items()],
    *GRADUAL,
    waiting("sparse-1-cifar10", "vgg_like", PRETRAINED_START),
    waiting("sparse-0.5-cifar100", "vgg_like", PRETRAINED_START),
]


def command(action: str, unit: Unit) -> list[str]:
    return [sys.executable, "-u", __file__, action, unit.name]


def listing(queue: Queue) -> str:
    lines = []
    for stage, units in itertools.groupby(queue.units, key=lambda unit: unit.stage):
        lines.append(f"stage {stage}")
        for unit in units:
            hours = queue.hours_left(unit)
            lines.append(f"  {unit.name:45}{f'{hours:7.2f} h' if hours is not None else '':10} {queue.state_of(unit)}")
    group = queue.process_group()
    lines.append(
        f"at work: process group {group}; kill -STOP -- -{group} pauses it, -CONT goes on, -TERM saves and ends it"
        if group
        else "nobody is at work on it"
    )
    return "\n".join(lines)


def give_way() -> None:
    """Run behind everything else on the machine.

    Linux may share the cores among sessions first (autogroup), and weigh a process by its own niceness only within its
    session: the session then has to be nice too.
    """
    os.nice(19)
    session = Path("/proc/self/autogroup")
    with contextlib.suppress(OSError):
        if session.exists():
            session.write_text("19")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="units in order, their state, CPU hours left")
    for name, text in (("run", "go through the queue until it is empty"), ("estimate", "measure short epochs")):
        action = actions.add_parser(name, help=text)
        action.add_argument("--stage", choices=sorted({unit.stage for unit in UNITS}))
        if name == "run":
            action.add_argument("--only", metavar="UNIT", help="this one, as `list` has it")
    for name in ("work", "measure"):  # the queue's own calls
        actions.add_parser(name).add_argument("unit")
    arguments = parser.parse_args()
    queue = Queue(UNITS, FOLDER, command, say=lambda text: print(text, flush=True))
    if arguments.action == "list":
        print(listing(queue))
        return
    give_way()
    try:
        if arguments.action == "run":
            sys.exit(1 if queue.run(arguments.stage, arguments.only) else 0)
        elif arguments.action == "estimate":
            queue.estimate(arguments.stage)
        else:
            unit = queue.find(arguments.unit)
            if unit.work is None:
                parser.error(f"{unit.name} waits for {unit.waits_for}")
            if arguments.action == "work":
                do(unit.work, queue.folder_of(unit))
            else:
                measure(unit.work, queue.cost_file(unit.work))
    except SparseVDError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
