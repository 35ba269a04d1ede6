"""What it costs that glibc gives the memory of large tensors back at every step: training with and without.

    python benchmarks/memory_kept.py --rounds 5
    python benchmarks/memory_kept.py table      # the results once more

The command `sparsevd` lets freed memory stay with the process (sparsevd_command.py); "kept" is that, "given back" is
what a script of one's own has unless it sets the variables of docs/training-cost.md. Every measurement is a process of
its own with one thread, whose CPU seconds count: what else the machine does hardly changes them. A round measures both,
in random order, and the ratio is taken within a round; given are the median and the quartiles.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "memory_kept.json"
STEPS = 30
NETS = {  # shape of an example, and how many are a batch
    "text-lstm": ((64,), 100),
    "text-encoder": ((64,), 32),
    "lenet-300-100": ((1, 28, 28), 100),
    "lenet-5-caffe": ((1, 28, 28), 100),
    "vgg-like-0.25": ((3, 32, 32), 128),
}
METHODS = ("dense", "sparse")


def measure(net: str, method: str, kept: bool) -> dict[str, float]:
    """CPU milliseconds of a step, and the most memory that the process ever had; in this process."""
    if kept:
        import sparsevd_command

        sparsevd_command.keep_memory()
    import resource
    import time

    import torch

    import sparsevd
    from sparsevd.training.progress import Callback
    from sparsevd.zoo.models import MODELS

    times: list[float] = []

    class Watch(Callback):
        def on_step(self, moment: Any) -> None:
            times.append(time.process_time())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, batch = NETS[net]
    count = STEPS * batch
    x = torch.randint(1, 20_000, (count, *shape)) if net.startswith("text") else torch.rand(count, *shape)
    data = x, torch.randint(0, 10, (count,))
    config = sparsevd.FitConfig(epochs=1, batch_size=batch, learning_rate=1e-3)
    model = MODELS[net](10)
    if method == "dense":
        sparsevd.fit_dense(model, data, None, config, progress=False, callbacks=[Watch()])
    else:
        sparsevd.fit(sparsevd.sparsify(model), data, None, config, progress=False, callbacks=[Watch()])
    first = 4  # which make room in memory
    return {
        "milliseconds": 1000 * (times[-1] - times[first]) / (len(times) - 1 - first),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(net: str, method: str, kept: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "measure", "--net", net, "--method", method, *(["--kept"] if kept else [])]
    return json.loads(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).splitlines()[-1])


def run(rounds: int) -> None:
    import torch

    found = []
    for net in NETS:
        for method in METHODS:
            pairs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for _ in range(rounds):
                for kept in random.sample([True, False], 2):
                    pairs[kept].append(in_a_process(net, method, kept))
            found.append(
                {
                    "net": net,
                    "method": method,
                    "ratios": [
                        a["milliseconds"] / b["milliseconds"] for a, b in zip(pairs[True], pairs[False], strict=True)
                    ],
                    "kept": pairs[True],
                    "given_back": pairs[False],
                }
            )
            print(row(found[-1]), flush=True)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    record = {
        "command": " ".join(["python", *sys.argv]),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "versions": versions,
        "networks": found,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def row(record: dict[str, Any]) -> str:
    low, middle, high = statistics.quantiles(record["ratios"], n=4)
    memory = [statistics.median(each["megabytes"] for each in record[key]) for key in ("kept", "given_back")]
    return (
        f"| {record['net']}, {record['method']} | {middle:.2f} ({low:.2f}–{high:.2f}) "
        f"| {memory[0]:.0f} MB instead of {memory[1]:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table", "measure"], nargs="?", default="run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--net", choices=NETS, default="text-lstm", help="of `measure`")
    parser.add_argument("--method", choices=METHODS, default="dense", help="of `measure`")
    parser.add_argument("--kept", action="store_true", help="of `measure`")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        print(json.dumps(measure(arguments.net, arguments.method, arguments.kept)))
        return
    if arguments.action == "run":
        run(max(2, arguments.rounds))
    print("| network | kept, of given back: CPU time of a step | most memory |\n|---|---|---|")
    print("\n".join(row(record) for record in json.loads(RESULTS.read_text())["networks"]))


if __name__ == "__main__":
    main()
