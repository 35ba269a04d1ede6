"""Attention in bfloat16 on a CPU, forward and backward: its steps one by one against torch's fused function.

    python benchmarks/attention.py

Sparse VD layers write it out where that is faster (layers/attention.py). A round times both, one after the other, in
CPU time of one thread; the ratio is taken within a round, and given as median and quartiles.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsevd.layers.sampling import multiplies_bfloat16

RESULTS = Path(__file__).parent / "results" / "attention.json"
SHAPES = (
    (100, 4, 64, 32),
    (32, 12, 128, 32),
    (8, 8, 512, 64),
    (4, 8, 1024, 64),
)  # batch, heads, places, width of a head


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return F.softmax(scores + mask, -1).to(v.dtype) @ v


def step_of(attention: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> Callable[[], float]:
    """Takes one forward and backward pass, and says how long it took."""
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(shape[0], 1, 1, shape[2], dtype=torch.bfloat16)

    def step() -> float:
        begun = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attention(q, k, v, mask).sum().backward()
        return time.process_time() - begun

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        fused, ours = step_of(F.scaled_dot_product_attention, shape), step_of(written_out, shape)
        fused(), ours()
        pairs = [(fused(), ours()) for _ in range(rounds)]
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        rows.append(
            {
                "shape": shape,
                "ratio": round(middle, 3),
                "quartiles": [round(low, 3), round(high, 3)],
                "fused_ms": round(1000 * statistics.median(a for a, _ in pairs), 2),
                "rounds": rounds,
            }
        )
        print(f"{shape}: {middle:.2f} ({low:.2f}–{high:.2f}) of {rows[-1]['fused_ms']} ms")
    about = {
        "command": "python benchmarks/attention.py",
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread, shared",
        "bfloat16 instructions": multiplies_bfloat16(),
        "torch": torch.__version__,
    }
    RESULTS.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
