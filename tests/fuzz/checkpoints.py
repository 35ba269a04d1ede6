"""Changed checkpoints, run.json and summary.json, through everything that reads them.

A checkpoint is taken apart into its description and its tensors, a few things in it are changed to what a wrong or
hostile program might write, and it is put together again. Each goes through `Checkpoint.load` and one reader more. What
is refused must leave the model and the optimizer as they were.
"""

import json
import random
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsevd
from fuzz.trial import Trial
from sparsevd.errors import ArgumentError, CheckpointError, DivergenceError, FormatError
from sparsevd.runs.run import RUN, SUMMARY, Run
from sparsevd.training.checkpoint import Checkpoint, load_weights
from sparsevd.training.folder import CHECKPOINT, TrainingFolder
from sparsevd.training.loop import fit, fit_dense
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.recipes import FitConfig
from sparsevd.training.schedule import Schedule

CONFIG = FitConfig(
    epochs=4, batch_size=10, learning_rate=4e-3, drop_from=0.5, drop_patience=2, warm_up_end=0.25, channels_last=False
)
N = 30


class Shared(nn.Module):
    """One layer under two names, batch normalisation, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = self.a
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.b(F.relu(self.a(x))))) * self.scale


def shared() -> nn.Module:
    return Shared()


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4, 3))


SHAPES = {"shared": (6,), "convolutions": (1, 4, 4)}


@dataclass(frozen=True)
class Entry:
    """A tensor as a safetensors file has it; what is claimed need not be true."""

    dtype: str
    shape: list[Any]
    content: bytes


@dataclass(frozen=True)
class File:
    """A checkpoint in parts, and the network that it is of."""

    network: str
    sparse: bool
    about: dict[str, Any]
    tensors: dict[str, Entry]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        network = FACTORIES[self.network]()
        return sparsevd.sparsify(network) if self.sparse else network


FACTORIES: dict[str, Callable[[], nn.Module]] = {"shared": shared, "convolutions": convolutions}


def data_for(network: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, *SHAPES[network], generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def originals(folder: Path) -> list[File]:
    """Checkpoints of real runs: after an epoch and inside one, sparse and dense, in both formats."""
    files = []
    for network in FACTORIES:
        for sparse, batches in ((True, 9), (True, 8), (False, 5)):  # three to an epoch
            path = folder / f"{network}-{sparse}-{batches}"
            calls = 0

            def interrupting(output: Tensor, target: Tensor, stop: int = batches) -> Tensor:
                nonlocal calls
                if torch.is_grad_enabled():
                    calls += 1
                    if calls == stop:
                        signal.raise_signal(signal.SIGINT)
                return F.cross_entropy(output, target)

            model = File(network, sparse, {}, {}).build()
            try:
                (fit if sparse else fit_dense)(
                    model, data_for(network), None, CONFIG, loss=interrupting, run_dir=path, progress=False
                )
            except KeyboardInterrupt:
                files.append(taken_apart((path / CHECKPOINT).read_bytes(), network, sparse))
    return [*files, *map(in_format_1, files)]


def taken_apart(content: bytes, network: str, sparse: bool) -> File:
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header.pop("__metadata__")["sparsevd"])
    body = content[8 + length :]
    tensors = {
        name: Entry(entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    return File(network, sparse, about, tensors)


def in_format_1(file: File) -> File:
    """The same run as the first format has it: the history is a list in the description, and layers are described."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CHECKPOINT
        path.write_bytes(put_together(file.about, file.tensors))
        state, _ = restored(path.parent, file, file.build())
    about = json.loads(json.dumps(file.about))
    about["format"] = 1
    del about["progress"]["history_layers"], about["progress"]["metrics"]
    entries = [asdict(metrics) for metrics in state.history]
    for entry in entries:
        for later in ("val_metric", "train_r2", "val_r2", "val_perplexity"):
            del entry[later]
    about["progress"]["state"]["history"] = entries
    posteriors = about.pop("posteriors")
    del about["aliases"]
    about["layers"] = {
        name.removesuffix("weight").removesuffix("."): {
            "type": known["type"],
            "threshold": known["threshold"],
            "of": known["of"].removesuffix("weight").removesuffix("."),
        }
        for name, known in posteriors.items()
    }
    counters = {f"schedule.{name}": f"optimizer.{known['noise']}/epochs_above" for name, known in posteriors.items()}
    tensors = {
        counters.get(name, name): entry for name, entry in file.tensors.items() if not name.startswith("history.")
    }
    return replace(file, about=about, tensors=tensors)


def restored(folder: Path, file: File, model: nn.Module) -> tuple[Any, BoundAdam]:
    optimizer = BoundAdam(model, CONFIG.learning_rate)
    schedule = Schedule(model, CONFIG, N)
    state, _ = TrainingFolder(folder, {**asdict(CONFIG), "n_train": N}).restore(model, optimizer, schedule)
    return state, optimizer


def put_together(about: object, tensors: dict[str, Entry], text: str | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"sparsevd": json.dumps(about) if text is None else text}}
    at = 0
    for name, entry in tensors.items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [at, at + len(entry.content)],
        }
        at += len(entry.content)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(entry.content for entry in tensors.values())


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 4, 5, 31, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, -0.0),
    *(float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, "", "a", "0", "weight", "b", "\ud800", "é" * 50),
    *([], [None], [[]], [0, 1], {}, {"": {}}, {"a": None}, [1, 2, 3], ["a", "a"], [{}], "x" * 100_000),
    *("a:b", "os:name"),
)
SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
DTYPES = (*SIZES, "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "nonsense")
DEEP = ("[" * 100_000, '{"a":' * 50_000, '{"format": 2, "layers": ' + "[" * 3000 + "]" * 3000 + "}")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside a JSON value."""
    if isinstance(value, dict):
        inner = [place for key, item in value.items() for place in places(item, (*path, key))]
    elif isinstance(value, list):
        inner = [place for key, item in enumerate(value) for place in places(item, (*path, key))]
    else:
        inner = []
    return [path, *inner] if path else inner


def changed_json(value: Any, draw: random.Random) -> Any:
    """A copy with one thing in it replaced, removed, moved or added."""
    value = json.loads(json.dumps(value))
    path = draw.choice(places(value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], draw.random()
    if kind < 0.6:
        holder[key] = draw.choice(VALUES)
    elif kind < 0.7 and isinstance(holder[key], int | float):
        holder[key] += draw.choice((-1, 1, 0.5, 1000, -1000))
    elif kind < 0.85:
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw.choice(("", "a", "new", "b", "alive", f"{key}x"))] = draw.choice((holder[key], *VALUES[:12]))
    else:
        holder.insert(0, draw.choice((holder[key], *VALUES[:12])))
    return value


NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0**24, 1e30, -1e30, 3e38, float("nan"), float("inf"), -float("inf"))
PACKED = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "BOOL": "<B"}


def changed_content(entry: Entry, draw: random.Random) -> Entry:
    """Another number in one place, or in all."""
    content = bytearray(entry.content)
    if not content:
        return entry
    form = PACKED.get(entry.dtype)
    if form is None or draw.random() < 0.3:
        for _ in range(draw.choice((1, 1, 8))):
            content[draw.randrange(len(content))] = draw.choice((0, 1, 2, 127, 128, 255, draw.randrange(256)))
        return replace(entry, content=bytes(content))
    size = struct.calcsize(form)
    number: Any = draw.choice(NUMBERS)
    if form[1] not in "dfe":
        low, high = (0, 255) if form == "<B" else (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1)
        number = draw.choice((low, high, 0, 1, 2, 3, high // 2))
    elif form == "<e":
        number = max(-6e4, min(6e4, number))
    whole = draw.random() < 0.3
    for at in range(0, len(content), size) if whole else [size * draw.randrange(len(content) // size)]:
        struct.pack_into(form, content, at, number)
    return replace(entry, content=bytes(content))


def changed_tensors(tensors: dict[str, Entry], draw: random.Random) -> dict[str, Entry]:
    """One tensor removed, renamed, added, swapped with another, or of another type, shape, size or content."""
    tensors = dict(tensors)
    name, other = draw.choice(list(tensors)), draw.choice(list(tensors))
    entry, kind = tensors[name], draw.randrange(10)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[draw.choice((f"{name}x", name[1:], f"model.{name}", "rng", "optimizer./", "optimizer.a/b", ""))] = entry
    elif kind == 2:
        tensors[name], tensors[other] = tensors[other], entry
    elif kind == 3:  # the same bytes as numbers of another type
        dtype = draw.choice(DTYPES)
        count = len(entry.content) // SIZES.get(dtype, 1)
        keep = draw.random() < 0.3
        tensors[name] = replace(entry, dtype=dtype, shape=entry.shape if keep else [count])
    elif kind == 4:  # the same numbers converted: the type alone is wrong
        dtype = draw.choice(DTYPES)
        numbers = 1
        for size in entry.shape:
            numbers *= size
        tensors[name] = replace(entry, dtype=dtype, content=bytes(numbers * SIZES.get(dtype, 1)))
    elif kind == 5:
        wrong = ([], [1], [0], [-1], [2**62, 0], [2**63], [2**32, 2**32], entry.shape[::-1], [1, *entry.shape], [None])
        tensors[name] = replace(entry, shape=draw.choice(wrong))
    elif kind == 6:  # consistent, of another shape
        size = SIZES.get(entry.dtype, 1)
        shape = draw.choice(([], [1], [0], [2, 3], [1, 1, 1, 1], [0, 3], [6, 6], [5056], [5055]))
        count = 1
        for length in shape:
            count *= length
        tensors[name] = replace(entry, shape=shape, content=(entry.content * count)[: count * size].ljust(count * size))
    else:
        tensors[name] = changed_content(entry, draw)
    return tensors


def with_other_layers(file: File, draw: random.Random) -> File:
    """The history is of a network with other layers: whole in itself, but not of this network."""
    about = json.loads(json.dumps(file.about))
    names = draw.choice((["a"], ["a", "head", "more"], ["head", "a"], ["4", "0"], [], None))
    tensors = dict(file.tensors)
    if about["format"] == 1:
        for entry in about["progress"]["state"]["history"]:
            entry["alive"] = {name: [1, 1] for name in names} if names is not None else None
    else:
        about["progress"]["history_layers"] = names
        epochs, layers = tensors["history.numbers"].shape[0], len(names or ())
        tensors["history.alive"] = Entry("I64", [epochs, layers, 2], bytes(epochs * layers * 16))
    return replace(file, about=about, tensors=tensors)


def mutant(file: File, draw: random.Random) -> bytes:
    if draw.random() < 0.03:
        changed = with_other_layers(file, draw)
        return put_together(changed.about, changed.tensors)
    about, tensors, text = file.about, file.tensors, None
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        kind = draw.random()
        if kind < 0.5:
            about = changed_json(about, draw) if isinstance(about, dict) and about else about
        elif kind < 0.95:
            tensors = changed_tensors(tensors, draw) if tensors else tensors
        else:
            whole = json.dumps(about)
            text = draw.choice((*DEEP, whole[: draw.randrange(len(whole))], "null", "3", "[]", "", f"{whole} x"))
    content = bytearray(put_together(about, tensors, text))
    if draw.random() < 0.1:
        for _ in range(draw.choice((1, 3))):
            content[draw.randrange(draw.choice((8, len(content))))] = draw.randrange(256)
    if draw.random() < 0.02:
        del content[draw.randrange(len(content)) :]
    return bytes(content)


class Readers:
    """Everything that reads a checkpoint, on a folder of its own."""

    def __init__(self, folder: Path, trial: Trial):
        self.folder, self.trial = folder, trial
        self.path = folder / CHECKPOINT
        self.models: dict[tuple[str, bool], tuple[nn.Module, dict[str, Tensor]]] = {}

    def model(self, file: File) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model of this kind, and its state, which it still has."""
        key = (file.network, file.sparse)
        if key not in self.models:
            model = file.build()
            self.models[key] = model, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return self.models[key]

    def try_one(self, file: File, content: bytes, draw: random.Random, described: str) -> None:
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        self.path.write_bytes(content)
        with self.trial.one(f"load {described}", CheckpointError):
            Checkpoint.load(self.path)
        kind = draw.random()
        if kind < 0.5:
            self.restore_run(file, described)
        elif kind < 0.6:
            with self.trial.one(f"info {described}", CheckpointError):
                str(Run(self.path).summary(draw.choice((None, 1.0))))
        elif kind < 0.65:
            with self.trial.one(f"prune {described}", CheckpointError):
                Run(self.path).write_pruned(self.folder / "pruned.safetensors")
        elif kind < 0.75:
            network = f"{__name__}:{file.network}"
            with self.trial.one(f"restore {described}", CheckpointError, ArgumentError):
                Run(self.path, model=network, input_shape=SHAPES[file.network]).network()
        elif kind < 0.82:
            with self.trial.one(f"load_weights {described}", CheckpointError):
                load_weights(FACTORIES[file.network](), self.path)
        elif kind < 0.9:
            with self.trial.one(f"compress {described}", CheckpointError):
                Run(self.path, model=f"{__name__}:{file.network}").model(classes=3)
        else:
            self.resume(file, described)

    def restore_run(self, file: File, described: str) -> None:
        model, before = self.model(file)
        optimizer = BoundAdam(model, CONFIG.learning_rate)
        refused = True
        with self.trial.one(f"restore run {described}", CheckpointError):
            schedule = Schedule(model, CONFIG, N)
            TrainingFolder(self.folder, {**asdict(CONFIG), "n_train": N}).restore(model, optimizer, schedule)
            refused = False
        if not refused:
            self.trial.count("restored")
            del self.models[file.network, file.sparse]
        elif optimizer.state or not all(torch.equal(before[name], t) for name, t in model.state_dict().items()):
            raise AssertionError(f"a refused checkpoint changed the model or the optimizer: {described}")

    def resume(self, file: File, described: str) -> None:
        with self.trial.one(f"fit {described}", CheckpointError, DivergenceError):
            train = fit if file.sparse else fit_dense
            train(file.build(), data_for(file.network), None, CONFIG, run_dir=self.folder, resume=True, progress=False)
            self.trial.count("resumed")


FINISHED = {
    "model": "lenet-5",
    "data": "mnist",
    "config": {"seed": 3, "epochs": 4},
    "ratio": 3.5,
    "asked": {"shift": 0},
}


def try_json(folder: Path, trial: Trial, draw: random.Random, described: str) -> None:
    """A changed run.json or summary.json."""
    asked = {"model": "lenet-5", "data": "mnist", "val_size": 0, "shift": 0, "mirror": False}
    asked |= {"init_from": None, "pretrain_epochs": 0}
    about = {"command": "sparsevd train", "begun": "2026", "versions": {"torch": "2"}, "machine": {"threads": 1}}
    facts = {"classes": 3, "example": [{"shape": [6], "dtype": "float32"}]}
    name = draw.choice((RUN, SUMMARY))
    whole = {"asked": asked, **about, **facts} | (FINISHED if name == SUMMARY else {})
    text = json.dumps(changed_json(whole, draw)).encode()
    if draw.random() < 0.2:
        text = draw.choice((*(deep.encode() for deep in DEEP), text[: draw.randrange(len(text))], b"\xff", b"[]", b"1"))
    (folder / name).write_bytes(text)
    if name == RUN:
        with trial.one(f"run.json {described}", FormatError, ArgumentError):
            Run(folder).begin(asked, facts, resume=True)
    plain = folder / "plain.safetensors"
    for read in (Run(plain).network, Run(plain, data=f"{__name__}:pairs").data, Run(plain).seed):
        with trial.one(f"{name} {described}", FormatError, ArgumentError):
            read()
    (folder / name).unlink()


def pairs() -> tuple[tuple[Tensor, Tensor], None]:
    return data_for("shared"), None


def run(inputs: int, seed: int) -> Trial:
    trial = Trial("checkpoints")
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("error")  # a cast that loses numbers, or an empty table
        folder = Path(name)
        files = originals(folder)
        readers = Readers(folder, trial)
        readers.path.write_bytes(put_together(files[0].about, files[0].tensors))
        Run(readers.path).write_pruned(folder / "plain.safetensors")
        number = 0
        while trial.inputs < inputs:
            draw = random.Random(f"{seed} {number}")
            described = f"seed {seed} number {number}"
            if number % 10 == 9:
                try_json(folder, trial, draw, described)
            else:
                file = draw.choice(files)
                readers.try_one(file, mutant(file, draw), draw, described)
            number += 1
    return trial
