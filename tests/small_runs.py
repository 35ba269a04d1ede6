"""Runs that are trained in a moment, on small pictures: for tests of what is made from a run."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from sparsevd.runs import training_run
from sparsevd.runs.training_run import RunConfig
from sparsevd.training.recipes import FitConfig

FIT = FitConfig(epochs=6, batch_size=50, learning_rate=1e-2)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))


def filters():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def pictures(size: int = 6, n: int = 900):
    """A bright column, left, middle or right: the class. (x, y)."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (n,), generator=generator)
    x = 0.8 * torch.randn(n, 1, size, size, generator=generator)
    x[torch.arange(n), 0, :, y * (size // 2 - 1)] += 0.9
    return x, y


def data():
    x, y = pictures()
    return (x[:600], y[:600]), (x[600:], y[600:])


def large_data():
    x, y = pictures(28, 2000)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def train(folder: Path, **changes) -> Path:
    """A finished run in this folder."""
    if str(Path(__file__).parent) not in sys.path:
        sys.path.insert(0, str(Path(__file__).parent))
    config = RunConfig(model="small_runs:network", data="small_runs:data", out=folder, fit=FIT)
    training_run.run(replace(config, **changes), say=lambda line: None)
    return folder
