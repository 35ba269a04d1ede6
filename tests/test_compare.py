"""The comparison: one record per method, continued after a stop, and one table."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from networks import small_network as network
from networks import small_problem as problem
from sparsevd import baselines
from sparsevd.baselines.pruning import Pruning
from sparsevd.cli import app
from sparsevd.errors import ArgumentError, FormatError
from sparsevd.runs import comparison

pytestmark = pytest.mark.usefixtures("one_thread")


def data():
    return problem(400), problem(100)


def config(folder, **settings):
    settings = {"methods": ("dense", "pruning", "sparse-vd"), "epochs": 2, "out": folder, **settings}
    return comparison.CompareConfig(net="test_baselines:network", data="test_compare:data", **settings)


def test_records_say_what_came_out(tmp_path):
    # After two epochs the weights are still uniform: above √3 deviations there is none.
    settings = {"pruning": Pruning(quality=1.0)}
    records = comparison.compare(config(tmp_path), say=lambda line: None, settings=settings)
    assert [record["method"] for record in records] == ["dense", "pruning", "sparse-vd"]
    assert records == json.loads((tmp_path / "compare.json").read_text())
    dense, pruned, ours = records
    assert dense["ratio"] == 1
    assert pruned["ratio"] > 1
    assert sum(layer["weights"] for layer in dense["per_layer"]) == sum(
        p.numel() for p in network().parameters() if p.ndim > 1
    )
    assert ours["elbo"] < 0
    assert ours["error_before_threshold"] is not None
    assert dense["error_before_threshold"] is None


def test_a_stopped_comparison_goes_on(tmp_path, monkeypatch):
    trained = []
    train = baselines.train

    def watched(method, *arguments, **keywords):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(method.title)
        return train(method, *arguments, **keywords)

    monkeypatch.setattr(baselines, "train", watched)
    with pytest.raises(KeyboardInterrupt):
        comparison.compare(config(tmp_path), say=lambda line: None)
    assert len(comparison.read(tmp_path)) == 2
    monkeypatch.setattr(baselines, "train", train)
    said = []
    assert len(comparison.compare(config(tmp_path), say=said.append)) == 3
    assert said == ["Sparse VD: 2 epochs"]
    # Other settings are another record.
    again = comparison.compare(config(tmp_path, methods=("pruning",)), said.append, {"pruning": Pruning(quality=0.5)})
    assert len(comparison.read(tmp_path)) == 4
    assert again[0]["settings"]["quality"] == 0.5


def test_held_out_examples_take_the_place_of_the_test_set(tmp_path, monkeypatch):
    measured, evaluate = [], comparison.evaluate

    def watched(network, data):
        measured.append(data[0])
        return evaluate(network, data)

    monkeypatch.setattr(comparison, "evaluate", watched)
    (record,) = comparison.compare(config(tmp_path, methods=("dense",), val_size=50), say=lambda line: None)
    assert record["held_out"] == 50
    (examples,) = measured
    assert len(examples) == 50
    known = {tuple(image.flatten().tolist()) for image in problem(400)[0]}
    assert all(tuple(image.flatten().tolist()) in known for image in examples)


def test_two_comparisons_in_one_folder_keep_each_others_records(tmp_path, monkeypatch):
    train = baselines.train

    def meanwhile(method, *arguments, **keywords):
        monkeypatch.setattr(baselines, "train", train)
        comparison.compare(config(tmp_path, methods=("pruning",)), say=lambda line: None)
        return train(method, *arguments, **keywords)

    monkeypatch.setattr(baselines, "train", meanwhile)
    comparison.compare(config(tmp_path, methods=("dense",)), say=lambda line: None)
    assert [record["method"] for record in comparison.read(tmp_path)] == ["pruning", "dense"]


def test_the_settings_of_sparse_vd_leave_out_what_the_comparison_decides(tmp_path):
    (record,) = comparison.compare(config(tmp_path, methods=("sparse-vd",), seed=3), say=lambda line: None)
    assert not {"epochs", "batch_size", "seed"} & set(record["settings"]["recipe"])
    assert (record["epochs"], record["seed"]) == (2, 3)


def small_data():
    images, labels = problem(100)
    return (images[..., :3], labels), None


def test_what_cannot_work_is_refused_before_any_training(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "train", None)
    with pytest.raises(ArgumentError, match="no method 'magic'"):
        comparison.compare(config(tmp_path, methods=("dense", "magic")))
    small = replace(config(tmp_path, val_size=10), data="test_compare:small_data")
    with pytest.raises(ArgumentError, match="does not fit the data"):
        comparison.compare(small)
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written to"):
        comparison.compare(config(tmp_path / "file"))


def test_the_table_has_a_line_for_every_method():
    layers = [{"name": "a", "weights": 200, "kept": 50}, {"name": "b", "weights": 10, "kept": 0}]
    records = [
        {"method": "dense", "error": 1.5, "per_layer": layers, "ratio": 4.2, "seconds": 90},
        {"method": "sparse-vd", "error": None, "per_layer": layers, "ratio": None, "seconds": 6},
    ]
    header, rule, dense, ours = comparison.table(records).splitlines()
    assert header.split() == ["method", "error", "sparsity", "per", "layer", "fewer", "weights", "time"]
    assert len(rule) == len(header)
    assert dense.split() == ["dense", "1.50", "%", "75.0", "–", "100.0", "4.2×", "1.5", "min"]
    assert ours.split() == ["Sparse", "VD", "–", "75.0", "–", "100.0", "∞", "0.1", "min"]


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no method 'magic'"):
        comparison.methods_named("dense, magic")
    assert comparison.methods_named("all") == tuple(baselines.METHODS)
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(FormatError, match="is not JSON"):
        comparison.read(tmp_path)
    (tmp_path / "compare.json").write_text("[3]")
    with pytest.raises(FormatError, match="list of records"):
        comparison.read(tmp_path)


def test_the_command(tmp_path):
    options = ["--net", "test_baselines:network", "--data", "test_compare:data", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["compare", *options, "--epochs", "1", "--methods", "dense,pruning"])
    assert result.exit_code == 0, result.output
    assert "Pruning (Han et al.)" in result.output
    assert f"written to {tmp_path / 'compare.json'}" in result.output
    cards = CliRunner().invoke(app, ["compare", "--cards"])
    assert cards.exit_code == 0
    assert all(name in cards.output for name in baselines.METHODS)
    assert cards.output.count("original, multiplicative parametrisation") == 1
