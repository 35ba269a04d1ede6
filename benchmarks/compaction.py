"""What compaction gives on trained networks: units, multiply-adds, and the measured time of dense inference.

    python benchmarks/compaction.py runs/lenet-300-100-seed0 runs/lenet-5-caffe runs/vgg-like-0.25
    python benchmarks/compaction.py --random        # ResNet-18, MobileNet-like and Transformer encoder, 90 % zeros

Each argument is the folder of a run, or its pruned.safetensors. Times are of plain dense torch before and after, on one
thread, interleaved in one process: each repetition times both, and the ratio is the median of the ratios, with the 10
and 90 % quantiles. Results go to results/compaction.json, a record for each network; records of other networks stay.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsevd
from sparsevd.runs.run import Run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "compaction.json"
BATCHES = (1, 64)
REPETITIONS = 60


def seconds(network: nn.Module, x: Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        network(x)
    return (time.perf_counter() - start) / calls


@torch.no_grad()
def times(before: nn.Module, after: nn.Module, x: Tensor) -> dict[str, Any]:
    """Interleaved times in µs, and the ratio of each pair."""
    for network in (before, after):
        seconds(network, x, 3)
    calls = max(1, round(2e-3 / seconds(before, x, 3)))
    pairs = []
    for repetition in range(REPETITIONS):
        first, second = (before, after) if repetition % 2 else (after, before)
        measured = {id(network): seconds(network, x, calls) for network in (first, second)}
        pairs.append((measured[id(before)], measured[id(after)]))
    ratios = sorted(old / new for old, new in pairs)
    return {
        "batch": len(x),
        "before_us": 1e6 * statistics.median(old for old, _ in pairs),
        "after_us": 1e6 * statistics.median(new for _, new in pairs),
        "ratio": statistics.median(ratios),
        "ratio_10_90": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
    }


def record(name: str, network: nn.Module, sample: Callable[[int], Tensor], *, timed: bool) -> dict[str, Any]:
    network.eval()
    x = sample(64)
    small = sparsevd.compact(network, x)
    with torch.no_grad():
        expected = network(x)
        difference = ((small(x) - expected).abs().max() / expected.abs().max()).item()
    report: Any = small.compaction
    old, new = report.cost_before, report.cost_after
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    # The plain network is also traced, so that both sides run through the same kind of module.
    same = sparsevd.graph.to_module(sparsevd.capture(network, x))
    result = {
        "name": name,
        "units": report.units,
        "unread_inputs": report.unread,
        "multiply_adds": {"dense": old.dense, "nonzero": old.nonzero, "compacted": new.dense},
        "fewer_multiply_adds": old.dense / new.dense if new.dense else None,
        "bytes": {"before": old.bytes, "after": new.bytes},
        "stayed": {layer.name: layer.stayed for layer in report.layers if layer.stayed},
        "note": report.note,
        "largest_relative_difference": difference,
        "times": [times(same, small, sample(batch)) for batch in BATCHES] if timed else [],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/compaction.py", *(["..."] if timed else ["--random"])]),
    }
    print(f"\n{name}\n{report}\nlargest relative difference {difference:.1e}")
    for entry in result["times"]:
        low, high = entry["ratio_10_90"]
        print(
            f"batch {entry['batch']}: {entry['before_us']:.0f} → {entry['after_us']:.0f} µs, "
            f"{entry['ratio']:.2f}× ({low:.2f}–{high:.2f})"
        )
    return result


def random_networks() -> list[dict[str, Any]]:
    """Structure rather than training: captured, compacted where exact, and equal in onnxruntime."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import tempfile

    import networks

    def image(batch: int) -> Tensor:
        return torch.randn(batch, 3, 32, 32)

    def words(batch: int) -> Tensor:
        return torch.randint(0, 30, (batch, 7))

    records = []
    for name, network, sample in [
        ("ResNet-18, width 64, 90 % zeros at random", networks.resnet(64, stages=4, blocks=2), image),
        ("MobileNet-like, 90 % zeros at random", networks.mobilenet(24, 96), image),
        ("Transformer encoder, 90 % zeros at random", networks.Encoder(width=64), words),
    ]:
        torch.manual_seed(0)
        networks.pruned_at_random(network, 0.9)
        entry = record(name, network, sample, timed=False)
        with tempfile.TemporaryDirectory() as folder:
            for key, sparse in (("onnx_bytes", False), ("onnx_sparse_bytes", True)):
                path = Path(folder) / f"{key}.onnx"
                sparsevd.export_onnx(network, sample(2), path, sparse_initializers=sparse)  # refuses if not equal
                entry[key] = path.stat().st_size
        print(f"ONNX: {entry['onnx_bytes']:,} bytes, {entry['onnx_sparse_bytes']:,} with sparse initializers")
        records.append(entry)
    return records


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:] == ["--random"]:
        new = random_networks()
    elif sys.argv[1:] and not any(argument.startswith("-") for argument in sys.argv[1:]):
        new = []
        for argument in sys.argv[1:]:
            path = Path(argument)
            path = path / "pruned.safetensors" if path.is_dir() else path
            restored = Run(path).network()
            shape = restored.example.shape[1:]
            new.append(record(path.parent.name, restored.network, lambda n, s=shape: torch.rand(n, *s), timed=True))
    else:
        sys.exit(__doc__)
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    names = {entry["name"] for entry in new}
    kept = [entry for entry in old if entry["name"] not in names]
    RESULTS.write_text(json.dumps(sorted(kept + new, key=lambda e: e["name"]), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
