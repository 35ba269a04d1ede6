"""How fast model files are written and read: MB of dense float32 per second.

    python benchmarks/file_speed.py

Networks of 98 % zeros: scattered at random, which is the worst case since every place is coded, and as Sparse VD leaves
them, with dead rows and columns. Lossless and with 6 bits, whole files with header and checksum, one thread, the C
coder and (on a small part) its Python twin. Repetitions are interleaved; median and range are shown.
"""

import statistics
import time

import torch
from torch import nn

from sparsevd import pack
from sparsevd.pack import native

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
    cases = [(name, s, p) for name, s in (("scattered", False), ("structured", True)) for p in ("lossless", 6)]
    models = {structured: network(structured) for structured in (False, True)}
    megabytes = sum(parameter.numel() for parameter in models[False].parameters()) * 4 / 1e6
    times: dict[tuple[str, object, str], list[float]] = {}
    for _ in range(REPEAT):
        for name, structured, precision in cases:
            started = time.perf_counter()
            data, _ = pack.pack(models[structured], precision=precision)
            between = time.perf_counter()
            pack.unpack(data)
            ended = time.perf_counter()
            times.setdefault((name, precision, "encode"), []).append(megabytes / (between - started))
            times.setdefault((name, precision, "decode"), []).append(megabytes / (ended - between))
    print(f"{megabytes:.0f} MB of dense float32, 98 % zeros, {'C' if native._library() else 'Python'} coder")
    for (name, precision, way), speeds in times.items():
        spread = f"({min(speeds):.1f}–{max(speeds):.1f})"
        print(f"{name:11} {precision!s:9} {way}: {statistics.median(speeds):6.1f} MB/s {spread}")
    small = nn.Linear(400, 300)
    with torch.no_grad():
        small.weight[torch.rand_like(small.weight) >= 0.02] = 0
    with_c, native._library = native._library, lambda: None  # type: ignore[assignment]
    started = time.perf_counter()
    data, _ = pack.pack(small)
    pack.unpack(data)
    seconds = time.perf_counter() - started
    native._library = with_c
    print(f"without the C coder, there and back: {2 * small.weight.numel() * 4 / 1e6 / seconds:.2f} MB/s")


if __name__ == "__main__":
    main()
