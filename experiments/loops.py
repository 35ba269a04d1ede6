"""The same training by every loop: LeNet-300-100 on MNIST, 10 epochs, one row per way and seed.

    OMP_NUM_THREADS=1 python experiments/loops.py run [--way attach] [--seeds 0 1 2 3 4]
    python experiments/loops.py table

All ways have the recipe's rate (a cosine from 4e-3 to 0), β₂ = 0.99 and batches of 100, and none leaves dead units out
of the computation. `ddp` and `fit-ddp` are two processes with 50 images of each batch. A seed is that of weights, order
and noise; the ways draw their noise in different orders, so they agree on average only.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from records import Records
from torch import Tensor, nn

import sparsevd
from sparsevd.zoo import datasets, models

EPOCHS, BATCH, RATE, BETAS = 10, 100, 4e-3, (0.9, 0.99)
N = 60_000
STEPS = EPOCHS * N // BATCH
CONFIG = sparsevd.FitConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=RATE, contract=False)
Pair = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["run", "table", "worker"], default="run")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--out", type=Path, help="of a worker")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.action == "worker":
        worker(arguments.way[0], arguments.seeds[0], arguments.out)
        return
    records = Records("loops")
    if arguments.action == "run":
        for seed in arguments.seeds:
            for way in arguments.way or WAYS:
                if not records.find(way=way, seed=seed):
                    print(records.add(way=way, seed=seed, epochs=EPOCHS, **measured(way, seed)))
    print(table(records))


def measured(way: str, seed: int) -> dict[str, Any]:
    data = datasets.load("mnist")
    begun = time.monotonic()
    if way in ON_TWO:
        model = on_two_processes(way, seed)
    else:
        model = network(seed)
        WAYS[way](model, data.train, seed)
    seconds = time.monotonic() - begun
    found = sparsevd.summary(model)
    error = sparsevd.evaluate(sparsevd.prune(model), data.test).error
    return {"error": error, "ratio": round(found.ratio, 2), "kept": found.kept, "seconds": round(seconds, 1)}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return sparsevd.sparsify(models.lenet_300_100())


# The ways.


def by_fit(model: nn.Module, train: Pair, seed: int) -> None:
    sparsevd.fit(model, train, None, sparsevd.FitConfig(**{**vars(CONFIG), "seed": seed}), progress=False)


def by_attach(model: nn.Module, train: Pair, seed: int) -> None:
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, RATE), betas=BETAS)
    sparsevd.attach(optimizer, model, n_train=N, epochs=EPOCHS, steps_per_epoch=N // BATCH, config=CONFIG)
    own_loop(model, optimizer, train, torch.Generator().manual_seed(seed))


def own_loop(net: nn.Module, optimizer: torch.optim.Optimizer, train: Pair, order: torch.Generator) -> None:
    """A plain loop; of several processes, each takes its part of a batch."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, y = train
    net.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(N, generator=order).split(BATCH):
            part = batch.chunk(world)[rank]
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
            scheduler.step()


def by_lightning(model: nn.Module, train: Pair, seed: int) -> None:
    import lightning.pytorch as lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Pair, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(sparsevd.parameter_groups(self, RATE), betas=BETAS)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[sparsevd.integrations.lightning.SparseVD(CONFIG)],
    )
    trainer.fit(Net(), batches(train, seed))


def by_transformers(model: nn.Module, train: Pair, seed: int) -> None:
    import transformers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(pixels), labels)}

    class Named(Images):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return {"pixels": x, "labels": y}

    net = Net()
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(net, RATE), betas=BETAS)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="cosine",
            max_grad_norm=0.0,
            seed=seed,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=STEPS // EPOCHS,
            disable_tqdm=True,
        )
        callback = sparsevd.integrations.transformers.SparseVD(CONFIG)
        trainer = transformers.Trainer(
            net, settings, train_dataset=Named(train), optimizers=(optimizer, None), callbacks=[callback]
        )
        trainer.train()


class Images(torch.utils.data.Dataset[Pair]):
    """A whole batch at once: collating single images would cost more than the training."""

    def __init__(self, train: Pair):
        self._x, self._y = train

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, indices: Any) -> Pair:
        return self._x[indices], self._y[indices]


def batches(train: Pair, seed: int) -> torch.utils.data.DataLoader[Pair]:
    images = Images(train)
    order = torch.utils.data.RandomSampler(images, generator=torch.Generator().manual_seed(seed))
    sampler = torch.utils.data.BatchSampler(order, BATCH, drop_last=False)
    return torch.utils.data.DataLoader(images, batch_size=None, sampler=sampler)


def worker(way: str, seed: int, out: Path) -> None:
    """One of two processes."""
    dist.init_process_group("gloo")
    model, train = network(seed), datasets.load("mnist").train
    if way == "ddp":
        net = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, RATE), betas=BETAS)
        sparsevd.attach(optimizer, net, n_train=N, epochs=EPOCHS, steps_per_epoch=N // BATCH, config=CONFIG)
        own_loop(net, optimizer, train, torch.Generator().manual_seed(seed))
    else:
        by_fit(model, train, seed)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), out)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter


def on_two_processes(way: str, seed: int) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "weights.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run([*command, "worker", "--way", way, "--seeds", str(seed), "--out", str(out)], check=True)
        model = network(seed)
        model.load_state_dict(torch.load(out, weights_only=True))
    return model.eval()


ON_TWO = ("ddp", "fit-ddp")
WAYS: dict[str, Callable[[nn.Module, Pair, int], None]] = {
    "fit": by_fit,
    "attach": by_attach,
    "lightning": by_lightning,
    "transformers": by_transformers,
    "ddp": lambda *_: None,
    "fit-ddp": lambda *_: None,
}


def table(records: Records) -> str:
    """Markdown: mean error and ratio of each way, and against `fit`."""
    lines = ["| way | seeds | error % | ratio | against `fit`: error, ratio |", "|---|---|---|---|---|"]
    fit = records.find(way="fit")
    for way in WAYS:
        if runs := records.find(way=way):
            errors, ratios = [run["error"] for run in runs], [run["ratio"] for run in runs]
            seeds = {run["seed"] for run in runs}
            beside = [run for run in fit if run["seed"] in seeds]
            lines.append(f"| {way} | {len(runs)} | {_spread(errors, 2)} | {_spread(ratios, 1)} |")
            if beside and way != "fit":
                points = statistics.mean(errors) - statistics.mean(run["error"] for run in beside)
                times = _geometric(ratios) / _geometric([run["ratio"] for run in beside])
                lines[-1] += f" {points:+.2f} points, {100 * (times - 1):+.1f} % |"
            else:
                lines[-1] += " |"
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _geometric(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(value) for value in values))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    main()
