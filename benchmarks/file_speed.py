"""How fast model files are written and read: MB of dense float32 per second.

    python benchmarks/file_speed.py

Networks of 98 % zeros: scattered at random, which is the worst case since every place is coded, and as Sparse VD leaves
them, with dead rows and columns. Lossless and with 6 bits, whole files with header and checksum, one thread, the C
coder and (on a small part) its Python twin. Repetitions are interleaved; median and range are shown and written to
results/file_speed.json.
"""

import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from sparsevd import kernels, modelfile
from sparsevd.files import atomic

RESULTS = Path(__file__).parent / "results" / "file_speed.json"
REPEAT = 5


def network(structured: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.Linear(1024, 1024))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                continue
            density = 0.02
            if structured:
                rows = torch.rand(parameter.shape[0]) < 0.3
                columns = torch.rand(parameter.shape[1]) < 0.5
                parameter[~rows] = 0
                parameter[:, ~columns] = 0
                density = 0.02 / 0.15
            # Not by multiplication: that leaves −0.0, which a lossless file keeps, at the cost of a number.
            parameter[torch.rand_like(parameter) >= density] = 0
    return model


def main() -> None:
    if not kernels.available():
        raise SystemExit("the C coder is not built; there is nothing to measure")
    cases = [(name, s, p) for name, s in (("scattered", False), ("structured", True)) for p in ("lossless", 6)]
    models = {structured: network(structured) for structured in (False, True)}
    megabytes = sum(parameter.numel() for parameter in models[False].parameters()) * 4 / 1e6
    times: dict[tuple[str, object, str], list[float]] = {}
    for _ in range(REPEAT):
        for name, structured, precision in cases:
            started = time.perf_counter()
            data, _ = modelfile.pack(models[structured], precision=precision)
            between = time.perf_counter()
            modelfile.unpack(data)
            ended = time.perf_counter()
            times.setdefault((name, precision, "encode"), []).append(megabytes / (between - started))
            times.setdefault((name, precision, "decode"), []).append(megabytes / (ended - between))
    print(f"{megabytes:.0f} MB of dense float32, 98 % zeros, C coder")
    measured = []
    for (name, precision, way), speeds in times.items():
        measured.append({"zeros": name, "precision": precision, "way": way, "megabytes_per_second": speeds})
        spread = f"({min(speeds):.1f}–{max(speeds):.1f})"
        print(f"{name:11} {precision!s:9} {way}: {statistics.median(speeds):6.1f} MB/s {spread}")
    small = nn.Linear(400, 300)
    with torch.no_grad():
        small.weight[torch.rand_like(small.weight) >= 0.02] = 0
    with_c, kernels.available = kernels.available, lambda: False  # type: ignore[assignment]
    started = time.perf_counter()
    data, _ = modelfile.pack(small)
    modelfile.unpack(data)
    seconds = time.perf_counter() - started
    kernels.available = with_c
    without = 2 * small.weight.numel() * 4 / 1e6 / seconds
    print(f"without the C coder, there and back: {without:.2f} MB/s")
    machine = {"processor": platform.machine(), "vectors": torch.backends.cpu.get_cpu_capability()}
    found = {"command": "python benchmarks/file_speed.py", "machine": machine, "cases": measured}
    atomic.write(RESULTS, json.dumps(found | {"without_c_megabytes_per_second": without}, indent=1) + "\n")


if __name__ == "__main__":
    main()
