"""A training in its folder: the one reader and the one writer of what is there.

    run.json                 what was asked, by which command, where and when: from the beginning on
    checkpoint.safetensors   the state of training, with metrics.jsonl beside it: as `fit` writes them
    pretrain/                the same of the dense training before, if there was one
    pruned.safetensors       the pruned network, with the keys of the plain torch model
    summary.json             what came out, and all of run.json again

A single file of weights is read in the same way: a checkpoint, a safetensors file with plain keys, or a model file.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd import modelfile
from sparsevd.conversion import Cut, sparsify
from sparsevd.errors import ArgumentError, CheckpointError, FormatError
from sparsevd.files import atomic, json_object, lock
from sparsevd.files.tensors import write_tensors
from sparsevd.graph import DTYPES, Graph, to_module
from sparsevd.graph.cost import operations
from sparsevd.layers.registry import sparse_type
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.reporting.summary import ModelSummary
from sparsevd.runs import sources
from sparsevd.runs.origin import Origin
from sparsevd.runs.sources import Sources
from sparsevd.runs.weight_file import WeightFile
from sparsevd.training.checkpoint import check_fit, load_weights
from sparsevd.training.data import Data, size, split
from sparsevd.training.evaluation import evaluate
from sparsevd.training.fine_tuning import POLISH_RATE, polish
from sparsevd.training.folder import CHECKPOINT, METRICS, history_of
from sparsevd.training.history import EpochMetrics
from sparsevd.training.price import Auto
from sparsevd.training.recipes import FitConfig

RUN = "run.json"
PRUNED = "pruned.safetensors"
SUMMARY = "summary.json"
PRETRAIN = "pretrain"
FILES = (METRICS, SUMMARY, CHECKPOINT, PRUNED)  # what a finished run leaves
_STATE = (CHECKPOINT, f"{PRETRAIN}/{CHECKPOINT}")

HELD_OUT = 10_000  # examples of the training set that something is measured on, unless said otherwise
MOST_OPERATIONS = 1 << 37  # for one example of a network from a file, which is run to be reported on; VGG-16 has 2³⁴


@dataclass(frozen=True)
class Restored:
    """A plain network with its zeros, in eval mode, an input for it, and its graph if that is known."""

    network: nn.Module
    example: Any  # a tensor, or a tuple of them for a network of several inputs
    graph: Graph | None = None


class Run:
    """A run's folder, or a single file of weights.

    Args:
        path: the folder, which may not be there yet, or the file.
        model: a network of the paper, or "package.module:factory"; by default the one that the folder names.
        data: the same for the data.
        data_dir: where a data set is looked for.
        input_shape: of one example, without the batch; by default as the folder says.
        say: told which factory of the user's own is taken from the folder.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: str | None = None,
        data: str | None = None,
        data_dir: Path | None = None,
        input_shape: tuple[int, ...] | None = None,
        say: Callable[[str], None] = print,
    ):
        self.path = Path(path)
        self._model, self._data, self._data_dir, self._input_shape = model, data, data_dir, input_shape
        self._say = say

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    @property
    def file(self) -> Path:
        """The weights: the checkpoint of a folder."""
        return self.path / CHECKPOINT if self.path.is_dir() else self.path

    @cached_property
    def _weights(self) -> WeightFile:
        return WeightFile(self.file)

    @cached_property
    def _origin(self) -> Origin | None:
        return Origin.read(self.folder / SUMMARY, self.folder / RUN)

    @cached_property
    def model_name(self) -> str | None:
        return self._model or (self._origin.name("model", self._say) if self._origin else None)

    @cached_property
    def data_name(self) -> str | None:
        return self._data or (self._origin.name("data", self._say) if self._origin else None)

    def seed(self) -> int:
        """The seed of the training, or 0 for a file that nothing is known of."""
        settings = self._weights.checkpoint.progress.get("settings") if self._weights.checkpoint else None
        seed = settings.get("seed") if isinstance(settings, dict) else None
        if isinstance(seed, int) and json_object.is_whole(seed, 0, 2**31 - 1):
            return seed
        return self._origin.seed() if self._origin else 0

    def data(self) -> Sources:
        """The data of the run, whole: nothing is held out, shifted or mirrored."""
        if self.model_name is None or self.data_name is None:  # both, before anything is loaded for nothing
            raise self._incomplete("which network and data it is of", model=self.model_name, data=self.data_name)
        return sources.load_data(self.data_name, self._data_dir)

    def summary(self, threshold: float | str | None = None) -> ModelSummary:
        """What is left of the network, layer by layer; read without its code."""
        return self._weights.summary(threshold)

    def noisy(self) -> dict[str, tuple[Tensor, Tensor, float]]:
        """θ, log σ² and threshold by layer; empty for a plain network. Read without its code."""
        return self._weights.noisy()

    def history(self) -> Sequence[EpochMetrics]:
        """The epochs of training that are over; none in a file of weights alone."""
        checkpoint = self._weights.checkpoint
        return history_of(checkpoint, self.file) if checkpoint and checkpoint.progress else ()

    @property
    def said(self) -> dict[str, Any]:
        """What the folder says of itself, as its JSON has it and unchecked; nothing where it says nothing."""
        return self._origin.said if self._origin else {}

    def is_finished(self) -> bool:
        """Whether training came to its end: the result was written down, or all epochs are over."""
        if (self.folder / SUMMARY).is_file():
            return True
        settings = self._weights.checkpoint.progress.get("settings") if self._weights.checkpoint else None
        asked = settings.get("epochs") if isinstance(settings, dict) else None
        return isinstance(asked, int) and len(self.history()) >= asked

    def pruned_tensors(self, threshold: float | str | None = None) -> dict[str, Tensor]:
        """The tensors of the plain network with its zeros; read without its code."""
        return self._weights.pruned(threshold)

    def write_pruned(self, output: Path, threshold: float | str | None = None, polish_epochs: int = 0) -> ModelSummary:
        """Write the pruned network of a checkpoint as safetensors with plain keys, and return its summary.

        With `polish_epochs` it is fine-tuned before, on the data of the run; the file then says so.
        """
        if self._weights.checkpoint is None:
            raise CheckpointError(
                f"{self.file} is not a checkpoint of sparsevd: it holds tensors but no training state"
            )
        if not self._weights.is_sparse:
            raise CheckpointError(
                f"{self.path} has no Sparse VD layer; it is a dense network, and nothing says what to prune"
            )
        tensors, about = self.pruned_tensors(threshold), None
        if polish_epochs:
            tensors, about = self._polished(tensors, polish_epochs), {"polish_epochs": str(polish_epochs)}
        write_tensors(output, tensors, about)
        return self.summary(threshold)

    def _polished(self, tensors: dict[str, Tensor], epochs: int) -> dict[str, Tensor]:
        """The same network after some epochs of plain training on what the run has trained on."""
        if self.model_name is None or self.data_name is None:
            raise self._incomplete("which network and data it is of", model=self.model_name, data=self.data_name)
        asked = {name: self._origin.asked(name) if self._origin else 0 for name in ("val_size", "shift")}
        mirror = self._origin is not None and self._origin.switched("mirror")
        data = sources.load_data(self.data_name, self._data_dir, seed=self.seed(), mirror=mirror, **asked)
        network = sources.build_model(self.model_name, data.classes)
        check_fit(tensors, network.state_dict(), f"{self.file} does not fit the network {self.model_name}")
        network.load_state_dict(tensors)
        before = evaluate(network, data.val) if data.val is not None else None
        polish(network, data.train, data.val, epochs, config=self._polishing())
        if before is not None and before.error is not None and data.val is not None:
            after = evaluate(network, data.val).error or 0.0
            held_out = f"{size(data.val, 'val'):,} held-out examples"
            self._say(f"polished: error on {held_out} {before.error:.2f} % before, {after:.2f} % after")
        return dict(network.state_dict())

    def _polishing(self) -> FitConfig:
        """Batches, seed and a part of the rate of the run, where the checkpoint says them."""
        settings = self._weights.checkpoint.progress.get("settings") if self._weights.checkpoint else None
        known = settings if isinstance(settings, dict) else {}
        names = ("batch_size", "learning_rate", "adam_beta2", "seed")
        config = FitConfig(**{name: known[name] for name in names if name in known})
        return replace(config, learning_rate=POLISH_RATE * config.rate(0.0))

    def threshold_of_sparsity(self, sparsity: float) -> float:
        """Where to cut log α, so that this share of the weights is zero; read without the network's code."""
        return self._weights.threshold_of_sparsity(sparsity)

    def cheap_threshold(self) -> float | str | None:
        """Where to cut log α by the price in the bound, checked on what the run has held out, if it has."""
        held_out = self._origin.asked("val_size") if self._origin else 0
        if held_out and self._weights.is_sparse:
            return self.threshold_within(Auto(), held_out)
        self._say("cut by the price in the bound alone: the run has held out no examples to check that on")
        return "auto"

    def threshold_within(self, budget: Cut, val_size: int = HELD_OUT) -> float | None:
        """Where to cut log α to keep to a budget, measured on examples of the training set.

        They are those that the same seed and `val_size` hold out in training, if the run held out any.
        """
        data = self.data()
        unseen = self._origin.asked("val_size") if self._origin else 0
        _, held_out = split(data.train, min(val_size, unseen or size(data.train, "train") // 2), self.seed())
        measured = size(held_out, "train")
        whether = "held out in training" if unseen >= measured else "that the run has trained on"
        self._say(f"measured on {measured:,} examples of the training set, {whether}")
        return budget.threshold_of(self.model(data.classes), held_out)

    def network(self, threshold: float | str | None = None) -> Restored:
        """The pruned network, ready for use."""
        if self.file.suffix == modelfile.SUFFIX and self._model is None:
            return self._from_model_file(threshold)
        tensors, name, example = self.pruned_tensors(threshold), self.model_name, self._example()
        if name is None or example is None:
            raise self._incomplete("all about its network", model=name, input_shape=example)
        known = self._origin.classes() if self._origin and not sources.is_factory(name) else None
        network = sources.build_model(name, known or sources.USUAL_CLASSES).eval()
        # A file does not fit the network that the caller named, or is at odds with its own summary.
        error = ArgumentError if self._model else CheckpointError
        check_fit(tensors, network.state_dict(), f"{self.file} does not fit the network {name}", error=error)
        network.load_state_dict(tensors)
        return Restored(network, example)

    def _example(self) -> Tensor | tuple[Tensor, ...] | None:
        if self._input_shape is not None:
            return torch.zeros(1, *self._input_shape, dtype=self._origin.dtype() if self._origin else None)
        return self._origin.example() if self._origin else None

    def _incomplete(self, what: str, **known: object) -> ArgumentError:
        missing = [f"{name}=" for name, value in known.items() if value is None]
        return ArgumentError(f"{self.path} does not say {what}; give {' and '.join(missing)}")

    def _from_model_file(self, threshold: float | str | None) -> Restored:
        if threshold is not None:
            raise CheckpointError(f"{self.file} holds a pruned network: it has no log α for a threshold to act on")
        graph = modelfile.unpack_graph(
            modelfile.read(self.file), self.file, otherwise="give the network it is of (model=, and input_shape=)"
        )
        if operations(graph) > MOST_OPERATIONS:
            raise FormatError(
                f"{self.file} takes {operations(graph):,} operations for one example, and only networks of up to "
                f"{MOST_OPERATIONS:,} are run here; use sparsevd.load and an example of your own"
            )
        inputs = tuple(
            torch.zeros([max(1, size) for size in node.shape], dtype=DTYPES[str(node.attributes["dtype"])])  # −1: batch
            for node in graph.inputs
        )
        return Restored(to_module(graph), inputs if len(inputs) > 1 else inputs[0], graph)

    def model(self, classes: int) -> nn.Module:
        """The Sparse VD network of a checkpoint, or the plain one of another file, of a network of so many classes."""
        if self.model_name is None:
            raise self._incomplete("which network it is of", model=None)
        network = sources.build_model(self.model_name, classes)
        tensors, checkpoint = self._weights.tensors, self._weights.checkpoint
        if checkpoint and checkpoint.posteriors:
            layers = {name.rpartition(".")[0]: known["threshold"] for name, known in checkpoint.posteriors.items()}
            modules = dict(network.named_modules(remove_duplicate=False))
            unknown = [name for name in layers if sparse_type(modules.get(name)) is None]
            if unknown:
                raise CheckpointError(
                    f"{self.file} belongs to another network: that has no layer {', '.join(unknown[:5])}"
                )
            network = sparsify(network, include=list(layers), inplace=True)
            for name, threshold in layers.items():
                network.get_submodule(name).threshold = threshold
        check_fit(tensors, dict(network.state_dict()), f"{self.file} does not fit the model")
        network.load_state_dict(tensors)
        return network

    def dense(self, classes: int) -> tuple[nn.Module, str] | None:
        """The trained dense network that the run began with, and what it is; None if it began with none."""
        asked = self.said.get("asked")
        given = asked.get("init_from") if isinstance(asked, dict) else None
        if (self.folder / PRETRAIN / CHECKPOINT).is_file():
            path, what = self.folder / PRETRAIN, "the dense network after pre-training"
        elif isinstance(given, str):
            path, what = Path(given), "the dense network that the run began with"
        else:
            return None
        if self.model_name is None:
            raise self._incomplete("which network it is of", model=None)
        network = sources.build_model(self.model_name, classes).eval()
        load_weights(network, path)
        return network, what

    def held_out(self, data: Sources) -> Data | None:
        """The examples that the run has not trained on, of its whole data; None if it has held out none."""
        unseen = self._origin.asked("val_size") if self._origin else 0
        return split(data.train, unseen, self.seed())[1] if unseen else None

    def has_begun(self) -> bool:
        """Whether there is a state of training that could be resumed."""
        return any((self.folder / name).exists() for name in _STATE)

    def locked(self) -> AbstractContextManager[None]:
        """Makes the folder, and keeps every other training out of it."""
        atomic.make_writable_folder(self.folder)
        return lock.only_training(self.folder)

    def remove(self) -> None:
        """All that a run leaves, and nothing else that lies in the folder."""
        try:
            for name in (*FILES, *_STATE, f"{PRETRAIN}/{METRICS}", RUN):
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{self.folder} cannot be written to ({error.strerror})") from error

    def begin(self, asked: dict[str, Any], facts: dict[str, Any], *, resume: bool = False) -> dict[str, Any]:
        """Write run.json: what is asked for, by which command, where and when, and what else is known of the run.

        If there is a run to resume, it stays as it was when that began; what is asked for must be the same. The
        checkpoint itself knows the settings of the training: this is what the data and the start depend on.
        """
        path = self.folder / RUN
        if resume and path.exists() and self.has_begun():
            begun = json_object.read(path)
            before = begun.get("asked")
            if not isinstance(before, dict) or not asked.keys() <= before.keys():
                raise FormatError(f"{path} does not say how the run began; start in another folder")
            for name, value in asked.items():
                if before[name] != value:
                    raise ArgumentError(
                        f"{self.folder} holds a run with {name}={json_object.shown(before[name])}, not {value}; "
                        "give the same to go on with it, or another folder (out=)"
                    )
            return {"asked": before, **facts, **{name: begun.get(name) for name in _provenance()}}
        begun = {"asked": asked, **facts, **_provenance()}
        _write(path, begun)
        return begun

    def finish(self, pruned: nn.Module, result: dict[str, Any], begun: dict[str, Any]) -> None:
        """Write the pruned network, then summary.json: what came out, beside how it began."""
        write_tensors(self.folder / PRUNED, dict(pruned.state_dict()))
        _write(self.folder / SUMMARY, result | begun)


def _provenance() -> dict[str, Any]:
    """By which command, when, with which versions and on which machine."""
    from sparsevd import __version__

    return {
        "command": " ".join(["sparsevd", *sys.argv[1:]]),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "sparsevd": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "bfloat16": multiplies_bfloat16(),
            "threads": torch.get_num_threads(),
            "waiting": os.environ.get("OMP_WAIT_POLICY"),  # how threads wait for each other, if that was chosen
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    atomic.write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
