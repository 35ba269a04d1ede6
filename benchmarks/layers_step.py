"""One training step of Sparse VD layers that read sequences, against the same dense ones.

    python benchmarks/layers_step.py

A step is forward, a loss, backward and Adam, on random sequences. A round times dense and Sparse VD one after the
other, so that a slow moment of the machine hits both; the ratio is taken within a round, and given as median and
quartiles over the rounds. It is the CPU time of one thread, which waiting for a busy machine does not add to. Dropout
is 0 in both.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsevd
from sparsevd.training.optimizer import BoundAdam

RESULTS = Path(__file__).parent / "results" / "layers_step.json"
BATCH, PLACES = 32, 64


class Last(nn.Module):
    """A recurrent layer's output without its state."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


# name → the network, and the width of its input; None for tokens
LAYERS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "LSTM, 300 inputs, 128 units": (lambda: Last(nn.LSTM(300, 128, batch_first=True)), 300),
    "GRU, 300 inputs, 128 units": (lambda: Last(nn.GRU(300, 128, batch_first=True)), 300),
    "TransformerEncoderLayer, 128 wide": (lambda: nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 128),
    "TransformerEncoderLayer, 256 wide": (lambda: nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True), 256),
    "Embedding, 20,000 words, 300 wide": (lambda: nn.Embedding(20_000, 300), None),
}


def step_of(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """Takes one step, and says how long it took."""
    optimizer = BoundAdam(model.train(), 1e-4, kl_weight=1e-4)

    def step() -> float:
        begun = time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    return step


def measure(name: str, rounds: int) -> dict[str, Any]:
    make, width = LAYERS[name]
    x = torch.randint(0, 20_000, (BATCH, PLACES)) if width is None else torch.randn(BATCH, PLACES, width)
    dense, sparse = step_of(make(), x), step_of(sparsevd.sparsify(make()), x)
    for _ in range(2):
        dense(), sparse()
    pairs = [(dense(), sparse()) for _ in range(rounds)]
    low, middle, high = statistics.quantiles([s / d for d, s in pairs], n=4)
    return {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "dense_ms": round(1000 * statistics.median(d for d, _ in pairs), 2),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    records: dict[str, Any] = {
        "about": {
            "command": "python benchmarks/layers_step.py",
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread, shared",
            "batch": BATCH,
            "places": PLACES,
            "torch": torch.__version__,
            "sparsevd": sparsevd.__version__,
        }
    }
    for name in LAYERS:
        records[name] = measure(name, rounds)
        low, high = records[name]["quartiles"]
        print(f"{name}: {records[name]['ratio']:.2f} ({low:.2f}–{high:.2f}) of a dense step", flush=True)
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
