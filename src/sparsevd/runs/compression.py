"""From a checkpoint to the smallest file that is still good enough, and what it came to.

The coarseness is chosen on examples of the training set (those that `train` holds out, with the same seed and
`val_size`); the test set only judges the file that was written.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from torch import Tensor, nn

from sparsevd import modelfile
from sparsevd.conversion import prune, threshold_of_sparsity
from sparsevd.errors import ArgumentError, GraphError, SparseVDWarning
from sparsevd.files import atomic
from sparsevd.files.tensors import write_tensors
from sparsevd.graph import Graph, capture
from sparsevd.modelfile.container import FRAME, Packed
from sparsevd.posterior import is_noisy, noisy_modules, required_posteriors
from sparsevd.reporting.table import table
from sparsevd.runs.run import HELD_OUT, Run
from sparsevd.training.data import Data, batches, size, split
from sparsevd.training.evaluation import Evaluation, evaluate

# In units of σ; the search goes up to the first that costs too much.
STEPS = (0.12, 0.25, 0.35, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8, 3.4, 4.0, 4.8, 5.7, 6.8, 8.0)


@dataclass(frozen=True)
class CompressConfig:
    """What to compress, how far, and where to. Without model and data, the run's own summary names them."""

    checkpoint: Path
    output: Path
    precision: Annotated[str, "posterior, lossless, or a number of bits."] = "posterior"
    max_error_increase: Annotated[float, "What rounding may cost, in points of %, on examples of the training set."] = (
        0.1
    )
    sparsity: Annotated[float | None, "Budget: first make this share of the weights zero, such as 0.99."] = None
    max_bytes: Annotated[int | None, "Budget: of the file; weights go until it fits, whatever that costs."] = None
    model: Annotated[str | None, "The network, as for train; by default the run's."] = None
    data: Annotated[str | None, "The data, as for train; by default the run's."] = None
    data_dir: Annotated[Path | None, "Folder with the data set. [env: SPARSEVD_DATA]"] = None
    val_size: Annotated[int, "Training examples to choose the rounding on."] = HELD_OUT


@dataclass(frozen=True)
class LayerBytes:
    """What one layer costs: where its weights are, what they are, and its other tensors."""

    name: str
    weights: int
    kept: int
    positions: float
    values: float
    rest: float


@dataclass(frozen=True)
class Compression:
    """The file that was written, and how it compares. Errors are in %, sizes in bytes."""

    size: int
    layers: tuple[LayerBytes, ...]
    frame: float  # frame, header and graph
    graph: bool
    steps: float | None  # chosen, in units of σ
    dense_size: int
    zstd_size: int | None  # safetensors + zstd-19 of the same pruned network; None without the library
    test: Evaluation | None  # of the file
    test_before: Evaluation | None  # of the pruned network

    def __str__(self) -> str:
        header = ("layer", "weights", "kept", "positions", "values", "rest", "bytes")
        rows = [
            (
                layer.name or "(model)",
                f"{layer.weights:,}",
                f"{layer.kept:,}",
                *(f"{part:,.0f}" for part in (layer.positions, layer.values, layer.rest)),
                f"{layer.positions + layer.values + layer.rest:,.0f}",
            )
            for layer in self.layers
        ]
        rows.append(("header, graph" if self.graph else "header", "", "", "", "", "", f"{self.frame:,.0f}"))
        total = ("total", "", "", "", "", "", f"{self.size:,}")
        lines = [table(header, rows, right=range(1, 7), total=total), ""]
        if self.steps is not None:
            lines.append(f"weights rounded to multiples of {self.steps:g} σ")
        lines.append(f"dense float32: {self.dense_size:,} bytes, {self.dense_size / self.size:.0f}× larger")
        if self.zstd_size is not None:
            lines.append(f"safetensors + zstd-19: {self.zstd_size:,} bytes, {self.zstd_size / self.size:.1f}× larger")
        else:
            lines.append("safetensors + zstd-19: not compared; pip install zstandard")
        if self.test and self.test.error is not None and self.test_before:
            lines.append(
                f"test error of the file: {self.test.error:.2f} % (pruned network: {self.test_before.error:.2f} %)"
            )
        elif self.test and self.test_before:
            lines.append(f"test loss of the file: {self.test.loss:.4f} (pruned network: {self.test_before.loss:.4f})")
        return "\n".join(lines)


def compress(config: CompressConfig, say: Callable[[str], None] = print) -> Compression:
    """Write the file, read it back, and judge what was read."""
    precision = _precision(config.precision)
    if not config.max_error_increase >= 0:
        raise ArgumentError(f"max_error_increase={config.max_error_increase} must be zero or more")
    run = Run(config.checkpoint, model=config.model, data=config.data, data_dir=config.data_dir, say=say)
    seed, data = run.seed(), run.data()
    train, test = data.train, data.test
    model = run.model(data.classes)
    if (config.sparsity is not None or config.max_bytes is not None) and not is_noisy(model):
        raise ArgumentError(
            f"sparsity= and max_bytes= need a run of Sparse VD, and {config.checkpoint} is pruned already"
        )
    if config.sparsity is not None:
        _cut(model, threshold_of_sparsity(model, config.sparsity))
    pruned = prune(model) if is_noisy(model) else model
    example, _ = next(batches(train, 2, shuffle=False))
    graph = _graph(pruned, example)

    steps = None
    if precision == "posterior":
        _, held_out = split(train, min(config.val_size, size(train, "train") // 2), seed)
        chosen = _coarsest(model, pruned, graph, held_out, config.max_error_increase)
        precision, steps = chosen, chosen.steps
    content, packed = _packed(model, precision, graph)
    if config.max_bytes is not None and len(content) > config.max_bytes:
        content, packed = _fitting(model, precision, example, config.max_bytes)
        pruned = prune(model)
    atomic.write(config.output, content)
    written = modelfile.load(config.output) if graph else modelfile.load(config.output, into=copy.deepcopy(pruned))
    return Compression(
        size=len(content),
        layers=tuple(_layers(packed)),
        frame=FRAME + packed.header_bits / 8,
        graph=graph is not None,
        steps=steps,
        dense_size=4 * sum(parameter.numel() for parameter in pruned.parameters()),
        zstd_size=zstd_size(dict(pruned.state_dict())),
        test=evaluate(written, test) if test is not None else None,
        test_before=evaluate(pruned, test) if test is not None else None,
    )


def _cut(model: nn.Module, threshold: float) -> None:
    for module in noisy_modules(model).values():
        module.threshold = threshold


def _fitting(model: nn.Module, precision: modelfile.Precision, example: Tensor, max_bytes: int) -> tuple[bytes, Packed]:
    """The file of the largest network that fits, by steps of a tenth of its weights."""
    posteriors = required_posteriors(model)
    total = sum(each.theta.numel() for each in posteriors)
    kept = sum(int(each.kept().sum()) for each in posteriors)
    while kept > 1:
        kept = int(0.9 * kept)
        _cut(model, threshold_of_sparsity(model, 1 - kept / total))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparseVDWarning)  # of layers that are emptied on the way
            pruned = prune(model)
        content, packed = _packed(model, precision, _graph(pruned, example))
        if len(content) <= max_bytes:
            return content, packed
    raise ArgumentError(f"max_bytes={max_bytes}: even with no weight left the file has {len(content):,} bytes")


def _precision(text: str) -> modelfile.Precision:
    if text.isdecimal():
        return int(text)
    if text in ("lossless", "posterior"):
        return text
    raise ArgumentError(f'precision={text} must be "lossless", "posterior" or a number of bits')


def _graph(pruned: nn.Module, example: Tensor) -> Graph | None:
    """The graph, or None for a network that has none: its file then needs the model's code to be read."""
    try:
        return capture(pruned, example)
    except GraphError:
        return None


def _packed(model: nn.Module, precision: modelfile.Precision, graph: Graph | None) -> tuple[bytes, Packed]:
    """Without a word of weights that rounding loses: what that costs is measured here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)
        return modelfile.pack(model, precision=precision, graph=graph)


def _coarsest(
    model: nn.Module, pruned: nn.Module, graph: Graph | None, held_out: Data, max_increase: float
) -> modelfile.PosteriorSteps:
    """The last of the steps before the first that costs more than it may."""
    limit = _score(evaluate(pruned, held_out)) + max_increase
    chosen = None
    for steps in STEPS:
        precision = modelfile.PosteriorSteps(steps)
        data, _ = _packed(model, precision, graph)
        candidate = modelfile.rebuild(data) if graph else copy.deepcopy(pruned)
        if not graph:
            candidate.load_state_dict(modelfile.unpack(data))
        if _score(evaluate(candidate, held_out)) > limit:
            break
        chosen = precision
    if chosen is None:
        raise ArgumentError(
            f"already steps of {STEPS[0]} σ cost more than {max_increase} on the held-out examples; "
            "allow more with max_error_increase=, or take precision=lossless"
        )
    return chosen


def _score(evaluation: Evaluation) -> float:
    """The error in %, or the loss where there is none."""
    return evaluation.loss if evaluation.error is None else evaluation.error


def _layers(packed: Packed) -> Iterator[LayerBytes]:
    """By the module that the tensors belong to."""
    modules: dict[str, list[int]] = {}
    for i, entry in enumerate(packed.entries):
        modules.setdefault(entry.name.rpartition(".")[0], []).append(i)
    for name, members in modules.items():
        entries = [packed.entries[i] for i in members]
        matrices = [entry for entry in entries if len(entry.shape) > 1]
        yield LayerBytes(
            name=name,
            weights=sum(entry.numel for entry in matrices),
            kept=sum(int(np.count_nonzero(entry.values)) for entry in matrices if isinstance(entry.values, np.ndarray)),
            positions=sum(entry.bits[0] for entry in matrices) / 8,
            values=sum(entry.bits[1] for entry in matrices) / 8,
            rest=sum(sum(entry.bits) for entry in entries if len(entry.shape) <= 1) / 8,
        )


def zstd_size(state: dict[str, Tensor]) -> int | None:
    """The size of the tensors as safetensors + zstd-19, or None without the library."""
    try:
        import zstandard
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pruned.safetensors"
        write_tensors(path, state)
        return len(zstandard.ZstdCompressor(level=19).compress(path.read_bytes()))
