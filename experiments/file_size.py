"""How small a trained network gets as a file, and at what error: size–error curves, comparisons, and an ablation.

    python experiments/file_size.py runs/lenet-300-100-seed{0,1,2,3,4} [runs/lenet-5-caffe-seed0 ...]

For every run folder: lossless against safetensors + zstd-19, the posterior at a range of steps, numbers of bits,
NNCodec where it is installed (it wants torchvision), and what `sparsevd compress` chooses (on examples of the training
set). The error is that of the network read back from the bytes. The ablation takes one coding choice away at a time.
Records go to results/file_size.json, one per folder; folders that are there are not repeated, and without folders the
table is printed.
"""

import argparse
import contextlib
import io
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import Records, chart

import sparsevd
from sparsevd import modelfile
from sparsevd.modelfile import container, native, quantisation, symbols
from sparsevd.modelfile.container import Form
from sparsevd.runs import compression
from sparsevd.runs.compression import CompressConfig
from sparsevd.runs.run import Run
from sparsevd.runs.sources import build_model
from sparsevd.zoo import datasets

STEPS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
BITS = (8, 6, 5, 4)
NNCODEC = ((-24, True), (-18, True), (-16, True), (-16, False))  # its quality, and whether dependent quantisation
LIMITS = (0.05, 0.1, 0.2)  # --max-error-increase


def measure(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoint.safetensors"
    run = Run(folder)
    name, seed, splits = run.model_name, run.seed(), datasets.load(run.data_name)
    model = run.model(splits.classes)
    pruned = sparsevd.prune(model)
    graph = sparsevd.capture(pruned, splits.test[0][:2])

    def point(precision: Any) -> dict[str, Any]:
        packed, _ = modelfile.pack(model, precision=precision, graph=graph)
        result = sparsevd.evaluate(modelfile.rebuild(packed), splits.test)
        return {"bytes": len(packed), "error": result.error, "loss": result.loss}

    exact, parts = modelfile.pack(model, graph=graph)
    zstd = compression.zstd_size(dict(pruned.state_dict()))
    entropy = (parts.header_bits + sum(sum(entry.bits) for entry in parts.entries)) / 8 + container.FRAME
    record = {
        "run": folder.name,
        "model": name,
        "seed": seed,
        "ratio": sparsevd.summary(pruned).ratio,
        "pruned_error": sparsevd.evaluate(pruned, splits.test).error,
        "dense_bytes": 4 * sum(parameter.numel() for parameter in pruned.parameters()),
        "lossless": {"bytes": len(exact), "zstd_bytes": zstd, "over_entropy": len(exact) / entropy},
        "posterior": {str(steps): point(modelfile.PosteriorSteps(steps)) for steps in STEPS},
        "bits": {str(bits): point(bits) for bits in BITS},
        "nncodec": nncodec(dict(pruned.state_dict()), name, splits) or {},
        "chosen": {},
        "ablation": ablation(model, graph),
    }
    with tempfile.TemporaryDirectory() as temporary:
        for limit in LIMITS:
            config = CompressConfig(path, Path(temporary) / "m.spvd", max_error_increase=limit)
            result = compression.compress(config)
            record["chosen"][str(limit)] = {"bytes": result.size, "steps": result.steps, "error": result.test.error}
    return record


def ablation(model: torch.nn.Module, graph: Any) -> dict[str, float]:
    """Bytes of the file at 1.5 σ, with one choice taken away at a time, and by other coders."""
    precision = modelfile.PosteriorSteps(1.5)
    whole, packed = modelfile.pack(model, precision=precision, graph=graph)
    results: dict[str, float] = {"whole": len(whole)}
    results["without the graph (dead biases stored)"] = len(modelfile.pack(model, precision=precision)[0])
    results["without the layer before as hint"] = _one_by_one(packed, as_vectors=False)
    results["without living rows and columns, nor hints"] = _one_by_one(packed, as_vectors=True)
    for entry in packed.entries:
        entry.width = 0
    results["without image neighbours"] = len(container.encode(packed, choose_widths=False))
    finer, quantisation.BIAS_STEP = quantisation.BIAS_STEP, 1.0
    results["biases as coarse as weights"] = len(modelfile.pack(model, precision=precision, graph=graph)[0])
    quantisation.BIAS_STEP = finer
    results["units sorted by density (not done)"] = _sorted_units(model, graph, precision)
    static = _constriction(modelfile.pack(model, precision=precision, graph=graph)[1])
    if static is not None:
        results["static tables per layer, constriction"] = static
    return results


def _one_by_one(packed: container.Packed, as_vectors: bool) -> float:
    """Without hints; as vectors each zero is coded, also in dead rows and columns."""
    with contextlib.closing(native.coder()) as stream:
        for entry, plane, _ in container.with_context(packed.entries):
            if isinstance(entry.values, np.ndarray):
                values = entry.values.reshape(1, -1) if as_vectors else entry.values
                stream.code_matrix(np.ascontiguousarray(values), entry.width, plane, None, symbols.INTEGERS)
        return container.FRAME + packed.header_bits / 8 + len(stream.finish())


def _sorted_units(model: torch.nn.Module, graph: Any, precision: Any) -> float:
    """Hidden units of a chain of linear layers in the order of their density; only for such chains."""
    packed = modelfile.pack(model, precision=precision, graph=graph)[1]
    layers = [entry for entry in packed.entries if len(entry.shape) == 2]
    biases = {entry.name: entry for entry in packed.entries if len(entry.shape) == 1}
    for before, after in itertools.pairwise(layers):
        if before.shape[0] != after.shape[1]:
            continue
        order = np.argsort(-np.count_nonzero(before.values, axis=1), kind="stable")
        bias = biases[before.name.removesuffix("weight") + "bias"]
        before.values = np.ascontiguousarray(before.values[order])
        bias.values = np.ascontiguousarray(bias.values[:, order])
        after.values = np.ascontiguousarray(after.values[:, order])
    return len(container.encode(packed))


def _constriction(packed: container.Packed) -> float | None:
    """The same numbers with a library's range coder: living rows and columns, then for each layer one table of counts.

    Tables are counted as 12 bits for each symbol that occurs; header and frame as ours.
    """
    try:
        import constriction
    except ImportError:
        return None
    total = container.FRAME + packed.header_bits / 8
    for entry in packed.entries:
        if entry.form != Form.GRID:
            continue
        values = entry.values
        rows, columns = values.any(axis=1), values.any(axis=0)
        streams = [values[np.ix_(rows, columns)].ravel()]
        if len(entry.shape) > 1:
            streams += [rows.astype(np.int32), columns.astype(np.int32)]
        for stream in streams:
            symbols, indices, counts = np.unique(stream, return_inverse=True, return_counts=True)
            if len(symbols) > 1:
                table = constriction.stream.model.Categorical(counts / counts.sum(), perfect=False)
                encoder = constriction.stream.queue.RangeEncoder()
                encoder.encode(indices.astype(np.int32), table)
                total += 4 * len(encoder.get_compressed())
            total += 1.5 * len(symbols)
    return total


def nncodec(state: dict[str, torch.Tensor], name: str, splits: datasets.Splits) -> dict[str, Any] | None:
    """The same pruned network by NNCodec, if it is installed: without a graph, and with the biases of dead units."""
    try:
        from nncodec import nn as codec
    except ImportError:
        return None
    points = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for qp, dependent in NNCODEC:
            settings = {"qp": qp, "nonweight_qp": qp, "use_dq": dependent, "row_skipping": True, "results": folder}
            plain = {"sparsity": 0, "tca": False, "opt_qp": False, "bnf": False, "lsa": False, "wandb": False}
            coded = codec.encode({key: tensor.numpy().copy() for key, tensor in state.items()}, settings | plain)
            decoded = codec.decode(coded, {"wandb": False})
            network = build_model(name, splits.classes)
            network.load_state_dict({key: torch.tensor(np.asarray(decoded[key])) for key in state})
            result = sparsevd.evaluate(network, splits.test)
            kind = "dependent" if dependent else "plain"
            points[f"{qp} {kind}"] = {"bytes": len(coded), "error": result.error, "loss": result.loss}
    return points


def table(records: list[dict[str, Any]]) -> None:
    recipe = {record["run"]: record["run"].rpartition("-seed")[0] for record in records}
    for name in sorted(set(recipe.values())):
        runs = [record for record in records if recipe[record["run"]] == name]
        print(f"\n{name}: {len(runs)} runs, pruned error {_mean(r['pruned_error'] for r in runs)} %")
        ratio = _mean(r["lossless"]["zstd_bytes"] / r["lossless"]["bytes"] for r in runs)
        print(f"lossless {_mean(r['lossless']['bytes'] for r in runs)} bytes, {ratio} times smaller than zstd-19")
        print(f"bytes over the entropy of the coder's own model: {_mean(r['lossless']['over_entropy'] for r in runs)}")
        for kind in ("posterior", "bits", "nncodec", "chosen"):
            for key in runs[0][kind]:
                sizes, errors = ([r[kind][key][what] for r in runs] for what in ("bytes", "error"))
                each = " ".join(f"({size}, {error})" for size, error in zip(sizes, errors, strict=True))
                print(f"{kind:9} {key:>13}  {_mean(sizes)} bytes at {_mean(errors)} %  {each}")
        for choice in runs[0]["ablation"]:
            print(f"ablation  {choice}: {_mean(r['ablation'][choice] for r in runs)}")


# Complete files of others, in bytes, and their test errors in %.
PUBLISHED = {
    "lenet-300-100": [("entropy-penalised\nreparametrisation", 8560, 1.9)],
    "lenet-5-caffe": [("MIRACLE", 1520, 0.96), ("MIRACLE", 3030, 0.69), ("Bayesian Compression", 2300, 1.0)],
}


def figure(records: list[dict[str, Any]]) -> None:
    """Size against error: the posterior at all steps, a curve per run, and the others' points."""
    drawing, axes, path = chart("file_size", len(PUBLISHED), figsize=(9, 3.4))
    for axis, (model, points) in zip(axes, PUBLISHED.items(), strict=True):
        for run in (record for record in records if record["model"] == model):
            usable = [p for p in run["posterior"].values() if p["error"] < 1.6 * run["pruned_error"]]
            curve = [(point["bytes"] / 1000, point["error"]) for point in usable]
            present = run["run"].startswith(f"{model}-seed")
            ours, lossless = ("#c1272d", "#0000a7") if present else ("#e8b4b6", "#b4b4dd")
            axis.plot(*zip(*curve, strict=True), "o-", color=ours, markersize=3, linewidth=1)
            axis.plot([run["lossless"]["bytes"] / 1000], [run["pruned_error"]], "s", color=lossless, markersize=4)
        for name, size, error in points:
            axis.plot([size / 1000], [error], "k*")
            left = size > 5000  # of the point, where there is room
            place = {"xytext": (-5 if left else 5, -14 if left else -9), "ha": "right" if left else "left"}
            axis.annotate(name, (size / 1000, error), textcoords="offset points", fontsize=7, **place)
        axis.set(xlabel="bytes of the complete file, thousands", ylabel="test error, %", title=model, xscale="log")
        ticks = [1.5, 2, 3, 4, 6, 8, 12]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    told = "posterior, from 0.5 σ on; a line per run (pale: earlier recipes)"
    axes[0].plot([], [], "o-", color="#c1272d", markersize=3, label=told)
    axes[0].plot([], [], "s", color="#0000a7", markersize=4, label="lossless")
    axes[0].plot([], [], "k*", label="published by others")
    axes[0].legend(fontsize=7)
    drawing.savefig(path, metadata={"Date": None})


def _mean(values: Any) -> str:
    values = list(values)
    digits = 0 if min(values) > 100 else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args()
    records = Records("file_size")
    for folder in options.runs:
        if not records.find(run=folder.name):
            records.add(**measure(folder))
    table(records.all())
    figure(records.all())


if __name__ == "__main__":
    main()
