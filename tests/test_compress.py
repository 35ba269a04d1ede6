"""`sparsevd compress`: from a run to a model file, judged as it was written."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sparsevd
from sparsevd import graph, modelfile
from sparsevd.errors import ArgumentError, CheckpointError, FormatError, SparseVDWarning
from sparsevd.files.tensors import write_tensors
from sparsevd.runs import compression
from sparsevd.runs.compression import CompressConfig
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.restoration import described

USER_CODE = """
    import torch
    from torch import nn

    def network():
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def teacher():
        generator = torch.Generator().manual_seed(1)
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                kept = torch.rand(parameter.shape, generator=generator) < (0.2 if parameter.ndim > 1 else 1)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * kept)
        return model

    class Strange(nn.Module):  # it has no graph: what it does depends on the numbers
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x if x.sum() > -1e9 else -x)

    def data():
        x = torch.randn(2200, 20, generator=torch.Generator().manual_seed(0))
        y = teacher()(x).argmax(1)
        return (x[:2000], y[:2000]), (x[2000:], y[2000:])

    def no_test():
        return data()[0], None
"""


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("mine", None)
    return tmp_path


def finished_run(folder: Path, model: str = "mine:network") -> Path:
    """The folder of a run whose network has learned everything: what it says is what is right."""
    import mine

    network = mine.network() if model == "mine:network" else mine.Strange()
    solution = network if model == "mine:network" else network.inner
    solution.load_state_dict(mine.teacher().state_dict())
    sparse = sparsevd.sparsify(network, initial_log_sigma2=-6.0)
    Checkpoint(dict(sparse.state_dict()), posteriors=described(sparse)).save(folder / "checkpoint.safetensors")
    write_tensors(folder / "pruned.safetensors", dict(sparsevd.prune(sparse).state_dict()))
    (folder / "summary.json").write_text(json.dumps({"model": model, "data": "mine:data", "config": {"seed": 5}}))
    return folder


def of_mine(*paths: Path, **options: object) -> CompressConfig:
    return CompressConfig(*paths, **{"model": "mine:network", "data": "mine:data", **options})


@pytest.fixture
def trained(tmp_path):
    return finished_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def one_capture(monkeypatch):
    """torch.export takes seconds, and the networks here are all alike."""

    def cached(model, example):
        if type(model) not in graphs:
            graphs[type(model)] = graph.capture(model, example)
        return graphs[type(model)]

    monkeypatch.setattr(compression, "capture", cached)


graphs: dict[type, graph.Graph] = {}


def test_compress_a_run(trained, tmp_path):
    target = tmp_path / "small.spvd"
    result = compression.compress(of_mine(trained, target, max_error_increase=3.0))
    import mine

    _, test = mine.data()
    assert result.size == target.stat().st_size
    assert result.graph
    assert result.test == sparsevd.evaluate(sparsevd.load(target), test)  # of the file, not of the model in memory
    assert result.test.error <= result.test_before.error + 6
    parts = sum(layer.positions + layer.values + layer.rest for layer in result.layers) + result.frame
    assert parts == pytest.approx(result.size, abs=4 + 0.01 * result.size)
    assert [layer.name for layer in result.layers] == ["0", "2"]
    assert result.layers[0].weights == 20 * 64
    shown = str(result)
    for text in (
        "positions",
        "header, graph",
        f"{result.size:,}",
        "dense float32",
        "zstd-19",
        "test error of the file",
    ):
        assert text in shown


def test_a_budget_of_zeros_and_of_bytes(trained, tmp_path):
    target = tmp_path / "small.spvd"
    sparse = compression.compress(of_mine(trained, target, max_error_increase=3.0, sparsity=0.97))
    assert sum(layer.kept for layer in sparse.layers) <= 0.03 * sum(layer.weights for layer in sparse.layers) + 1
    free = compression.compress(of_mine(trained, target, max_error_increase=3.0))
    limit = int(0.8 * free.size)
    small = compression.compress(of_mine(trained, target, max_error_increase=3.0, max_bytes=limit))
    assert target.stat().st_size == small.size <= limit
    assert small.size > 0.5 * limit  # no more than need be
    with pytest.raises(ArgumentError, match=r"max_bytes=10: even with no weight left"):
        compression.compress(of_mine(trained, target, max_error_increase=3.0, max_bytes=10))
    with pytest.raises(ArgumentError, match="is pruned already"):
        compression.compress(of_mine(trained / "pruned.safetensors", target, precision="8", sparsity=0.9))


def test_what_rounding_loses_in_the_search_is_measured_and_not_warned_of(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "STEPS", (0.12, 40.0))
    result = compression.compress(of_mine(trained, tmp_path / "a.spvd", max_error_increase=100.0, val_size=500))
    assert result.steps == 40.0
    assert sum(layer.kept for layer in result.layers) < 200
    with pytest.warns(SparseVDWarning, match="are left"):
        modelfile.pack(Run(trained, model="mine:network").model(2), precision=modelfile.PosteriorSteps(40.0))


def test_more_error_allows_a_smaller_file(trained, tmp_path):
    sizes = [
        compression.compress(of_mine(trained, tmp_path / "a.spvd", max_error_increase=increase, val_size=500)).size
        for increase in (1.0, 5.0, 100.0)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_the_test_set_has_no_part_in_the_search(trained, tmp_path, monkeypatch):
    first = compression.compress(of_mine(trained, tmp_path / "a.spvd", max_error_increase=3.0))
    import mine

    train, (x, y) = mine.data()
    monkeypatch.setattr(mine, "data", lambda: (train, (x, 1 - y)))
    second = compression.compress(of_mine(trained, tmp_path / "b.spvd", max_error_increase=3.0))
    assert (tmp_path / "a.spvd").read_bytes() == (tmp_path / "b.spvd").read_bytes()
    assert second.test.error == pytest.approx(100 - first.test.error)


@pytest.mark.parametrize("precision", ["lossless", "6"])
def test_other_precisions(trained, tmp_path, precision):
    result = compression.compress(of_mine(trained, tmp_path / "a.spvd", precision=precision, val_size=500))
    assert result.steps is None
    assert result.test.error == pytest.approx(result.test_before.error, abs=2)
    if precision == "lossless":
        assert result.test == result.test_before


def test_compress_the_pruned_network_of_a_run(trained, tmp_path):
    config = of_mine(trained / "pruned.safetensors", tmp_path / "a.spvd", precision="lossless")
    assert compression.compress(config).size > 0
    with pytest.raises(ArgumentError, match="no Sparse VD layer"):
        compression.compress(of_mine(trained / "pruned.safetensors", tmp_path / "a.spvd", val_size=500))


def test_a_network_without_a_graph(tmp_path):
    finished_run(tmp_path / "run", model="mine:Strange")
    result = compression.compress(
        of_mine(tmp_path / "run", tmp_path / "a.spvd", max_error_increase=100, model="mine:Strange")
    )
    assert not result.graph
    assert result.test is not None
    with pytest.raises(FormatError, match="holds no graph"):
        sparsevd.load(tmp_path / "a.spvd")


def test_data_without_a_test_set(tmp_path):
    finished_run(tmp_path / "run")
    result = compression.compress(
        of_mine(tmp_path / "run", tmp_path / "a.spvd", max_error_increase=100, data="mine:no_test")
    )
    assert result.test is None
    assert "test" not in str(result)


def test_model_data_and_seed_are_those_of_the_run(trained, tmp_path):
    said = []
    named = compression.compress(CompressConfig(trained, tmp_path / "a.spvd", max_error_increase=3.0), said.append)
    summary = trained / "summary.json"
    assert said == [f"model: mine:network, as {summary} says", f"data: mine:data, as {summary} says"]
    assert named == compression.compress(of_mine(trained, tmp_path / "b.spvd", max_error_increase=3.0))
    assert Run(trained).seed() == 5
    told = {"model": "lenet-300-100", "data": "mnist", "config": {"seed": 3}}
    summary.write_text(json.dumps(told))
    run = Run(trained)
    assert (run.model_name, run.data_name, run.seed()) == ("lenet-300-100", "mnist", 3)


def test_code_is_not_run_because_a_file_of_somebody_else_names_it(trained, tmp_path, monkeypatch):
    (trained / "summary.json").chmod(0o646)
    monkeypatch.setattr("importlib.import_module", None)
    with pytest.raises(ArgumentError, match="Give model= yourself"):
        compression.compress(CompressConfig(trained, tmp_path / "a.spvd"))


def test_what_is_missing_is_said(tmp_path):
    save_file({"weight": torch.randn(3, 3)}, tmp_path / "alone.safetensors")
    with pytest.raises(ArgumentError, match="give model= and data="):
        compression.compress(CompressConfig(tmp_path / "alone.safetensors", tmp_path / "a.spvd"))
    config = CompressConfig(tmp_path / "alone.safetensors", tmp_path / "a.spvd", model="mine:network", data="mine:data")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        compression.compress(CompressConfig(**{**vars(config), "val_size": 500}))
    for change, message in (({"precision": "fine"}, "precision=fine"), ({"max_error_increase": -1.0}, "-1.0")):
        with pytest.raises(ArgumentError, match=message):
            compression.compress(CompressConfig(**{**vars(config), **change}))
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        compression.compress(CompressConfig(tmp_path / "alone.safetensors", tmp_path / "a.spvd"))


def test_a_limit_that_nothing_meets(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "STEPS", (500.0,))
    with pytest.raises(ArgumentError, match="already steps of 500"):
        compression.compress(of_mine(trained, tmp_path / "a.spvd", max_error_increase=0.0, val_size=500))


def test_info_reads_model_files(tmp_path):
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        network[0].weight[:, :3] = 0
    sparsevd.save(network, tmp_path / "a.spvd")
    shown = Run(tmp_path / "a.spvd").summary()
    assert [(layer.name, layer.weights, layer.kept) for layer in shown.layers] == [("0", 24, 12), ("2", 8, 8)]
    (tmp_path / "b.spvd").write_bytes((tmp_path / "a.spvd").read_bytes()[:-1])
    with pytest.raises(FormatError, match="b.spvd"):
        Run(tmp_path / "b.spvd").summary()


def test_posterior_is_public():
    assert modelfile.PosteriorSteps().steps > 0
