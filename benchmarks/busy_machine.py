"""What OpenMP's waiting costs: training and inference alone on the machine, and beside one busy process.

    python benchmarks/busy_machine.py --all         # about 50 minutes; the machine must be idle
    python benchmarks/busy_machine.py --quick --rounds 2 --busy-rounds 1     # a try; writes nothing without --save
    python benchmarks/busy_machine.py table         # the results once more

A thread that waits for the others spins for a while before it sleeps. If another process wants the core, it spins in
the way of the thread it waits for. OMP_WAIT_POLICY and GOMP_SPINCOUNT say for how long; OpenMP reads them once, when it
is loaded, so every measurement is a process of its own. A round measures every policy once, in an order that changes
from round to round, and ratios are taken within a round. Their geometric mean is given with a 95 % interval (bootstrap
over the rounds). "unset again" is the control: the same settings as "unset", so its ratio shows what chance does.

Training is one epoch of random examples of MNIST's shape, 4,000 for LeNet-300-100 and 1,000 for LeNet-5-Caffe, batches
of 100; the first seconds of a process, in which memory and threads are made, are not counted. "sparsevd train" is the
command with ten epochs, and the time that it says itself; there "unset" means that it looks how busy the cores are, and
chooses. Inference is of networks with 5 % of their weights, for small batches.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "busy_machine.json"
EXAMPLES = {"lenet-300-100": 4_000, "lenet-5-caffe": 1_000}
POLICIES: dict[str, dict[str, str]] = {
    "unset": {},
    "unset again": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 300,000": {"GOMP_SPINCOUNT": "300000"},  # what unset means to the library; the command keeps to it
    "active": {"OMP_WAIT_POLICY": "active"},
    "spin 0": {"GOMP_SPINCOUNT": "0"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 100,000": {"GOMP_SPINCOUNT": "100000"},
}
COMPARED = ("unset again", "passive", "spin 300,000")  # with unset, in every workload; the others only in the first
FIRST = "train lenet-300-100"
COMMAND = "sparsevd train"
LONGEST = 300  # seconds for one process; what takes longer is null in the results
REPETITIONS = {"alone": 3, "beside a busy process": 1}  # in a process; their median counts

Call = Callable[[], float]  # seconds


# ---- one process ----


def random_data(net: str = "lenet-300-100") -> tuple[Any, Any]:
    """Training examples, and a few to test on; also for `sparsevd train --data busy_machine:random_data`."""
    import torch

    torch.manual_seed(0)
    count = EXAMPLES[net]
    x, y = torch.rand(count, 1, 28, 28), torch.randint(0, 10, (count,))
    return (x, y), (x[:100], y[:100])


def training(net: str) -> Call:
    """An epoch; the network has trained on a few examples before."""
    import sparsevd
    from sparsevd.zoo.models import MODELS

    (x, y), few = random_data(net)
    model, config = sparsevd.sparsify(MODELS[net](10)), sparsevd.FitConfig(epochs=1)
    sparsevd.fit(model, few, None, config, progress=False)

    def seconds() -> float:
        started = time.perf_counter()
        sparsevd.fit(model, (x, y), None, config, progress=False)
        return time.perf_counter() - started

    return seconds


def inference(way: str, net: str, batch: int) -> Call:
    """A call of a network with 5 % of its weights, made ready by this function of sparsevd."""
    import torch

    import sparsevd
    from sparsevd.zoo.models import MODELS

    torch.manual_seed(0)
    network, x = MODELS[net](10).eval(), torch.rand(batch, 1, 28, 28)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.05)
    run = getattr(sparsevd, way)(network, x)

    def seconds() -> float:
        calls, started = 0, time.perf_counter()
        with torch.no_grad():
            while (spent := time.perf_counter() - started) < 0.2 or calls < 3:
                run(x)
                calls += 1
        return spent / calls

    seconds()
    return seconds


WORKLOADS: dict[str, Callable[[], Call]] = {
    **{f"train {net}": partial(training, net) for net in EXAMPLES},
    **{
        f"{way} {net}, batch {batch}": partial(inference, way, net, batch)
        for net in EXAMPLES
        for way in ("accelerate", "plan")
        for batch in (1, 16)
    },
}


def measured(repetitions: int, names: list[str]) -> dict[str, float]:
    """Seconds by workload, in this process."""
    found: dict[str, float] = {}
    for name in names:
        call = WORKLOADS[name]()
        found[name] = statistics.median(call() for _ in range(repetitions))
    return found


# ---- all of them ----


@contextmanager
def busy_process() -> Iterator[None]:
    """A process with one thread that always wants a core. It ends with this one, however that ends."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def environment(policy: str, threads: int) -> dict[str, str]:
    """This one's, without what says how OpenMP is to wait."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    return {**kept, "OMP_NUM_THREADS": str(threads), **POLICIES[policy]}


def processes(names: list[str], policy: str, threads: int, repetitions: int) -> dict[str, float]:
    """Seconds by workload, each policy in processes of its own: one for the library's, one for the command."""
    found: dict[str, float] = {}
    library = [name for name in names if name != COMMAND]
    with tempfile.TemporaryDirectory() as folder:
        options = {"env": environment(policy, threads), "cwd": HERE, "timeout": LONGEST, "check": True}
        try:
            if library:
                command = [sys.executable, Path(__file__).resolve(), "worker", str(repetitions), *library]
                worker = subprocess.run(command, **options, capture_output=True, text=True)
                found |= json.loads(worker.stdout)
            if COMMAND in names:
                program = Path(sys.executable).with_name("sparsevd")
                command = [program, "train", "--data", "busy_machine:random_data", "--epochs", "10", "--out", folder]
                subprocess.run([*command, "--overwrite"], **options, capture_output=True)
                found[COMMAND] = json.loads((Path(folder) / "summary.json").read_text())["training_seconds"]
        except subprocess.TimeoutExpired:
            return dict.fromkeys(names, math.inf) | found
        except subprocess.CalledProcessError as error:
            sys.exit(f"{error}\n{error.stderr}")
    return found


Times = dict[str, dict[str, dict[str, list[float]]]]  # place → workload → policy → seconds by round


def measure(rounds: dict[str, int], threads: int, names: list[str], tried: list[str]) -> Times:
    times: Times = {place: {} for place in rounds}
    order = random.Random(0)
    for number in range(max(rounds.values())):
        for place in (place for place in rounds if number < rounds[place]):
            policies = [*tried]
            order.shuffle(policies)
            for policy in policies:
                compared = place == "alone" and policy in ("unset", *COMPARED)
                chosen = names if compared else [name for name in names if name in (FIRST, COMMAND)]
                started = time.perf_counter()
                with nullcontext() if place == "alone" else busy_process():
                    found = processes(chosen, policy, threads, REPETITIONS[place])
                for name, seconds in found.items():
                    times[place].setdefault(name, {}).setdefault(policy, []).append(seconds)
                print(f"round {number + 1}, {place}, {policy}: {time.perf_counter() - started:.1f} s", flush=True)
    return times


def interval(ratios: list[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Geometric mean of the ratios, and the 95 % interval of it over the rounds."""
    if not all(map(math.isfinite, ratios)):
        return math.inf, math.inf, math.inf
    logs, draw = [math.log(ratio) for ratio in ratios], random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples)]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None  # JSON has no infinity


def summarised(times: Times) -> dict[str, Any]:
    """Median seconds of every case, and its ratio to unset within the rounds."""
    result: dict[str, Any] = {}
    for place, workloads_ in times.items():
        for name, policies in workloads_.items():
            for policy, seconds in policies.items():
                pairs = zip(seconds, policies["unset"], strict=True)
                mean, low, high = interval([mine / base if math.isfinite(base) else math.inf for mine, base in pairs])
                result.setdefault(place, {}).setdefault(name, {})[policy] = {
                    "median_ms": rounded(1000 * statistics.median(seconds), 4),
                    "ratio_to_unset": rounded(mean, 4),
                    "interval_95": [rounded(low, 4), rounded(high, 4)],
                    "seconds": [rounded(value, 9) for value in seconds],
                }
    return result


def table(record: dict[str, Any]) -> str:
    """Markdown: a row per case."""
    lines = ["| where | what | policy | time | ratio to unset (95 %) |", "|---|---|---|---|---|"]
    for place in REPETITIONS:
        for name, policies in record.get(place, {}).items():
            for policy, cell in policies.items():
                low, high = cell["interval_95"]
                took = "too long" if cell["median_ms"] is None else f"{cell['median_ms']:,.3f} ms"
                ratio = "–" if low is None else f"{cell['ratio_to_unset']:.3f} ({low:.3f}–{high:.3f})"
                lines.append(f"| {place} | {name} | {policy} | {took} | {ratio} |")
    return "\n".join(lines)


def about(rounds: dict[str, int], threads: int) -> dict[str, Any]:
    import torch

    import sparsevd
    from sparsevd import kernels

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "../setup.py", "*.py")
    return {
        "command": " ".join(["python", "benchmarks/busy_machine.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernels": kernels.available(),
        "threads": threads,
        "rounds": rounds,
        "torch": torch.__version__,
        "sparsevd": sparsevd.__version__,
        "python": platform.python_version(),
        "commit": git("describe", "--always") + ("-dirty" if changed else ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "table"], default="measure")
    parser.add_argument("--rounds", type=int, default=20, help="alone on the machine (default: 20)")
    parser.add_argument("--busy-rounds", type=int, default=5, help="beside a busy process (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="also active waiting and several GOMP_SPINCOUNT")
    parser.add_argument("--quick", action="store_true", help="only LeNet-300-100 and the command; nothing is written")
    parser.add_argument("--save", type=Path, help=f"where to write the results; else {RESULTS.name} unless --quick")
    arguments = parser.parse_args()
    if arguments.what == "table":
        print(table(json.loads(RESULTS.read_text())))
        return
    rounds = {"alone": arguments.rounds, "beside a busy process": arguments.busy_rounds}
    record = {"about": about(rounds, arguments.threads)}
    names = [FIRST, COMMAND] if arguments.quick else [*WORKLOADS, COMMAND]
    tried = [policy for policy in POLICIES if arguments.all or policy in ("unset", *COMPARED)]
    record |= summarised(measure(rounds, arguments.threads, names, tried))
    out = arguments.save or (None if arguments.quick else RESULTS)
    if out:
        out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(measured(int(sys.argv[2]), sys.argv[3:])))
    else:
        main()
