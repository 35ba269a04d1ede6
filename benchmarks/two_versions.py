"""The same work by two versions of the package, in turns: is the new one slower?

    python benchmarks/two_versions.py OLD/src NEW/src --rounds 24
    python benchmarks/two_versions.py OLD/src NEW/src --rounds 150 --cases "plan lenet-5-caffe"

Each version has a process of its own, with built kernels and one thread. A round times both, in random order; the ratio
new / old is taken within a round. Given are its median, its geometric mean and the 95 % interval of that mean. Two
processes differ in how their memory lies, by some per cent of a call of microseconds: start it again to see that.
"""

import argparse
import math
import os
import random
import statistics
import subprocess
import sys

WORK = """
import os, sys, tempfile, time, torch, sparsevd
from torch import nn
torch.set_num_threads(1)
try:
    from sparsevd.zoo.models import MODELS
except ImportError:  # the first edition
    from sparsevd.models import MODELS
SHAPES = {"lenet-300-100": (1, 28, 28), "lenet-5-caffe": (1, 28, 28), "vgg-like-0.25": (3, 32, 32)}
EXAMPLES = {"lenet-300-100": 10_000, "lenet-5-caffe": 1_000, "vgg-like-0.25": 200}

def sparse(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.where(torch.rand_like(p) < 0.02, p, 0.0))
    return model.eval()

def training(name, **settings):
    n = EXAMPLES[name]
    data = torch.randn(n, *SHAPES[name]), torch.randint(0, 10, (n,))
    config = sparsevd.FitConfig(batch_size=100, variance_dtype="float32", **settings)
    def work(examples=n):
        torch.manual_seed(0)
        some = tuple(each[:examples] for each in data)
        sparsevd.fit(sparsevd.sparsify(MODELS[name]()), some, None, config, progress=False)
    return work

def inference(way, name):
    x = torch.randn(1, *SHAPES[name])
    run = getattr(sparsevd, way)(sparse(MODELS[name]()), x)
    calls = 30 if name.startswith("vgg") else 2000
    def work():
        with torch.no_grad():
            for _ in range(calls):
                run(x)
    return work

def file(way):
    model = sparse(nn.Sequential(nn.Linear(2000, 1500), nn.ReLU(), nn.Linear(1500, 1000)))
    path = os.path.join(tempfile.mkdtemp(), "model.spvd")
    sparsevd.save(model, path)
    return lambda: sparsevd.save(model, path) if way == "write" else sparsevd.load(path, into=model)

def made(kind, name):
    torch.manual_seed(0)
    if kind == "train":  # weights, inputs and units are dropped on the way
        return training(name, epochs=3, warm_up_end=0.0, drop_patience=1, drop_from=0.6)
    if kind == "steps":
        return training(name, epochs=1, drop_from=1.0)
    return file(name) if kind == "file" else inference(kind, name)
"""
IN_TURNS = """
work = made(*sys.argv[1].split())
work()
for _ in sys.stdin:
    start = time.perf_counter()
    work()
    print(time.perf_counter() - start, flush=True)
"""
NETS = ("lenet-300-100", "lenet-5-caffe", "vgg-like-0.25")
CASES = [*(f"{kind} {net}" for kind in ("train", "plan", "accelerate") for net in NETS), "file write", "file read"]


def started(source: str, case: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-W", "ignore", "-c", WORK + IN_TURNS, case]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def seconds(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--cases", nargs="+", default=CASES)
    arguments = parser.parse_args()
    for case in arguments.cases:
        processes = [started(source, case) for source in (arguments.old, arguments.new)]
        logs = []
        for _ in range(arguments.rounds):
            order = random.sample((0, 1), 2)
            taken = {which: seconds(processes[which]) for which in order}
            logs.append(math.log(taken[1] / taken[0]))
        for process in processes:
            process.kill()
        mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        low, middle, high, median = (math.exp(x) for x in (mean - error, mean, mean + error, statistics.median(logs)))
        print(
            f"{case:28} median {median:.3f}  mean {middle:.3f}  95 % {low:.3f}–{high:.3f}  {len(logs)} rounds",
            flush=True,
        )


if __name__ == "__main__":
    main()
