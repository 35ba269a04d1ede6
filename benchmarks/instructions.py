"""The instructions that the same work takes in two versions of the package: counts that a busy machine does not change.

    python benchmarks/instructions.py OLD/src NEW/src --json benchmarks/results/instructions.json

Needs valgrind, whose cachegrind counts them; it knows AVX2 at most, and the kernels choose that by themselves. The work
is that of two_versions.py, in one thread. Each version is started once and forks for each count: a case done once, and
done three times (10 and 30 training steps). What a case takes is half the difference, so that start-up cancels out: 10
steps with batches of 100, 2,000 calls of a plan with one image, a file of 4.5 million weights. Minutes for each case.

results/instructions.json compares e135bbc, the commit before the second edition, with 14683ec, one case at a time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from two_versions import WORK

COUNTED = """
for case in sys.argv[1:]:
    for times in (1, 3):
        child = os.fork()
        if child == 0:
            work = made(*case.split())
            if case.startswith("steps"):
                work(1_000 * times)
            else:
                for _ in range(times):
                    work()
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{case} failed")
        print(case, times, child, sep=",", flush=True)
"""
CASES = ["steps lenet-300-100", "plan lenet-5-caffe", "file write", "file read"]


def instructions(source: str, cases: list[str]) -> dict[str, float]:
    """What each case takes, in millions."""
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        counter = ["valgrind", "-q", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={folder}/%p"]
        work = [sys.executable, "-W", "ignore", "-c", WORK + COUNTED, *cases]
        done = subprocess.run([*counter, *work], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        totals = {}
        for line in done.stdout.splitlines():
            case, times, process = line.split(",")
            summary = re.search(r"^summary: (\d+)", Path(folder, process).read_text(errors="replace"), re.MULTILINE)
            assert summary, f"cachegrind counted nothing for {case}"
            totals[case, times] = int(summary[1])
    return {case: round((totals[case, "3"] - totals[case, "1"]) / 2e6, 2) for case in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    old, new = (instructions(source, arguments.cases) for source in (arguments.old, arguments.new))
    rows = [
        {"case": case, "old_millions": old[case], "new_millions": new[case], "ratio": round(new[case] / old[case], 4)}
        for case in arguments.cases
    ]
    for row in rows:
        print("{case:24} old {old_millions:10.2f}  new {new_millions:10.2f} million  ratio {ratio:.4f}".format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
