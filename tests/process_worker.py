"""What each of two processes does in test_processes.py: all that needs no start of its own, in one go.

python process_worker.py FOLDER all|die
"""

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import sparsevd
from sparsevd.errors import SparseVDError
from sparsevd.runs.sources import Sources
from sparsevd.training import processes
from sparsevd.training.data import Augmented
from sparsevd.training.progress import Callback

RECIPE = sparsevd.FitConfig(epochs=3, batch_size=7, learning_rate=0.01, warm_up_end=0.0, drop_from=1, contract=False)


def problem(examples: int = 51) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(examples, 6)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def network(log_sigma2: float | None = None) -> nn.Module:
    torch.manual_seed(2)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    if log_sigma2 is not None:
        for name, parameter in model.named_parameters():
            if name.endswith("log_sigma2"):
                parameter.data.fill_(log_sigma2)
    return model


def classifier(classes: int = 3) -> nn.Module:
    """For the command line."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


def sources() -> Sources:
    """For the command line."""
    return problem(), problem(20)


def train_without_noise(**options: object) -> tuple[list[Tensor], list[sparsevd.training.history.EpochMetrics]]:
    """The noise is too small to matter, so that one process must come to the same weights. No batch can be
    halved, and the last of an epoch has two examples, which leave nothing for a second process."""
    model = network(-30.0)
    history = sparsevd.fit(model, problem(), problem(20), RECIPE, progress=False, **options)
    return [parameter.detach() for parameter in model.parameters()], history


def digest(model: nn.Module, loss: sparsevd.Gaussian | None = None) -> str:
    tensors = [*model.state_dict().values(), *(loss.state_dict().values() if loss else ())]
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def like_one_process(folder: Path) -> object:
    parameters, history = train_without_noise()
    figures = [(each.train_loss, each.train_error, each.val_loss) for each in history]
    return [parameter.tolist() for parameter in parameters], figures


def noise(folder: Path) -> object:
    """The first outputs of each of four steps on examples that are all the same."""
    outputs: list[list[float]] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        if torch.is_grad_enabled():
            outputs.append(output[:3].flatten().tolist())
        return output

    same = torch.ones(32, 6), torch.zeros(32, dtype=torch.long)
    config = sparsevd.FitConfig(epochs=1, batch_size=8, learning_rate=1e-6)
    sparsevd.fit(network(-2.0), same, config=config, forward=forward, progress=False)
    return outputs


class Examples(Dataset):
    """A data set that is no pair of tensors; the first input of each example is its number."""

    tensors = problem(37)
    tensors[0][:, 0] = torch.arange(37)

    def __len__(self) -> int:
        return 37

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][i], self.tensors[1][i]


def every_example_once(folder: Path) -> object:
    """For each kind of data, which examples a process has seen, epoch by epoch; and the weights at the end."""
    x, y = Examples.tensors
    data = TensorDataset(x, y)
    kinds = {
        "pair": (x, y),
        "dataset": Examples(),
        "loader": DataLoader(data, 8, shuffle=True),
        "distributed": DataLoader(data, 8, sampler=DistributedSampler(data, seed=3)),
    }
    result = {}
    for kind, train in kinds.items():
        seen: list[int] = []

        def forward(model: nn.Module, x: Tensor, seen: list[int] = seen) -> Tensor:
            if torch.is_grad_enabled():
                seen += x[:, 0].int().tolist()
            return model(x)

        model = network()
        config = sparsevd.FitConfig(epochs=2, batch_size=8, learning_rate=1e-3)
        history = sparsevd.fit(model, train, config=config, forward=forward, progress=False)
        result[kind] = seen, digest(model), history[-1].train_loss
    return result


class Convolution(nn.Module):
    """With batch norm, and a head that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def kinds_of_networks(folder: Path) -> object:
    """Weights, buffers and what the likelihood has learned, at the end."""
    torch.manual_seed(4)
    images = Augmented((torch.randn(20, 1, 6, 6), torch.randint(0, 3, (20,))), shift=1, mirror=True)
    model = sparsevd.sparsify(Convolution())
    config = sparsevd.FitConfig(epochs=2, batch_size=8, warm_up_end=0.2, drop_from=0.4)
    sparsevd.fit(model, images, images[:2], config, progress=False)
    result = {"convolution": digest(model)}

    x, y = problem()
    target = 100 + 5 * y[:, None] + torch.randn(51, 1)
    loss = sparsevd.Gaussian()
    torch.manual_seed(5)
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    sparsevd.fit(model, DataLoader(TensorDataset(x, target), 8), config=config, loss=loss, progress=False)
    result["regression"] = digest(model, loss)

    dense = classifier()
    sparsevd.fit_dense(dense, (x, y), config=sparsevd.FitConfig(epochs=20, batch_size=10), progress=False)
    result["dense"] = digest(dense)
    budgets = {"sparsity": sparsevd.Budget(sparsity=0.5), "error": sparsevd.Budget(max_error_increase=5)}
    config = sparsevd.FitConfig(epochs=7)  # so that the noise goes off inside an epoch
    judged = hashlib.sha256()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        if not model.training:
            judged.update(digest(model).encode())
        return model(x)

    for name, budget in budgets.items():
        model = sparsevd.sparsify(dense)
        kept = {"budget": budget, "forward": forward, "progress": False}
        sparsevd.fit(model, (x, y), (x, y), replace(config, batch_size=10), **kept)
        result[name] = digest(model)
    result["judged"] = judged.hexdigest()

    y[1::2] = (y[1::2] + 1) % 3  # on its own examples the second process finds a network that knows nothing
    loader = DataLoader(TensorDataset(x, y), 4, sampler=DistributedSampler(y, shuffle=False))
    model = sparsevd.sparsify(dense)
    sparsevd.fit(model, loader, config=config, progress=False)
    result["chosen"] = digest(model)
    return result


class Interrupts(Callback):
    """Ctrl-C on the second process alone, inside the second epoch."""

    def on_step(self, moment):
        if moment.epoch == 2 and moment.batch == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)


def resuming(folder: Path) -> object:
    quietly = {"config": RECIPE, "progress": False}
    whole = network()
    sparsevd.fit(whole, problem(), **quietly, run_dir=folder / "whole")
    try:
        sparsevd.fit(network(), problem(), **quietly, run_dir=folder / "broken", callbacks=[Interrupts()])
    except KeyboardInterrupt:
        interrupted = True
    with processes.joined() as team, team.together():
        if team.main:
            shutil.copytree(folder / "broken", folder / "for_one_process")
    model = network()
    history = sparsevd.fit(model, problem(), **quietly, run_dir=folder / "broken", resume=True)
    begun_alone = network()
    sparsevd.fit(begun_alone, problem(), **quietly, run_dir=folder / "begun_alone", resume=True)
    return interrupted, digest(whole), digest(model), len(history), digest(begun_alone)


def refusals(folder: Path) -> object:
    """What each process says of what cannot work, and whether it leaves that to another."""
    rank = int(os.environ["RANK"])
    for_three = DistributedSampler(range(40), num_replicas=3, rank=0)
    said = {}
    for name, options in {
        "there is a run": {"run_dir": folder / "whole"},
        "other seeds": {"config": sparsevd.FitConfig(seed=rank)},
        "other layers": {"model": network() if rank else sparsevd.sparsify(nn.Sequential(nn.Linear(6, 3)))},
        "sampler": {"train": DataLoader(TensorDataset(*problem(40)), 8, sampler=for_three)},
        "one fails": {"run_dir": folder / "file" / "folder"},
    }.items():
        (folder / "file").touch()
        try:
            sparsevd.fit(**{"model": network(), "train": problem(), "config": RECIPE, "progress": False, **options})
        except SparseVDError as error:
            said[name] = type(error).__name__, str(error), error.told
    return said


class Dies(Callback):
    def on_step(self, moment):
        if moment.epoch == 2 and os.environ["RANK"] == "1":
            os._exit(1)


def die(folder: Path) -> None:
    """The second process dies, and the first says so."""
    try:
        sparsevd.fit(network(), problem(), config=RECIPE, progress=False, run_dir=folder / "lost", callbacks=[Dies()])
    except SparseVDError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def end_of_group(destroy: Callable[[], None] = dist.destroy_process_group) -> None:
    """What still averages then may wait for the group's threads for ever, and Python with it."""
    assert not any(type(each) is DistributedDataParallel for each in gc.get_objects())
    destroy()


CHECKS = [like_one_process, noise, every_example_once, kinds_of_networks, resuming, refusals]

if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", sparsevd.SparseVDWarning)
    torch.set_num_threads(1)
    gc.disable()  # by itself it would hide what is left behind
    dist.destroy_process_group = end_of_group
    folder = Path(sys.argv[1])
    found = {}
    for check in CHECKS:
        if check is every_example_once:
            dist.init_process_group("gloo")  # by the user; before, `fit` did it
        found[check.__name__] = check(folder)
    dist.destroy_process_group()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    die(folder)
