"""From files back to networks, and the commands that need the network itself: info and export."""

import json
import sys

import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import sparsevd
from sparsevd.cli import app
from sparsevd.errors import ArgumentError, CheckpointError
from sparsevd.runs.restore import restore
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.zoo import models

USER_CODE = """
from torch import nn

def network():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of LeNet-300-100, as `sparsevd train` leaves it, with few weights kept."""
    model = sparsevd.sparsify(models.lenet_300_100())
    for layer in (model.fc1, model.fc2, model.fc3):
        nn.init.uniform_(layer.log_sigma2, -12, 40)
    layers = {name: {"type": "SparseLinear", "threshold": 3.0, "of": name} for name in ("fc1", "fc2", "fc3")}
    run = tmp_path / "run"
    run.mkdir()
    Checkpoint(dict(model.state_dict()), layers=layers).save(run / "checkpoint.safetensors")
    save_file(dict(sparsevd.prune(model).state_dict()), run / "pruned.safetensors")
    (run / "summary.json").write_text(json.dumps({"model": "lenet-300-100", "data": "mnist"}))
    (tmp_path / "restored_nets.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return run, model


def test_the_folder_of_a_run_is_enough(folder):
    run, model = folder
    x = torch.rand(3, 1, 28, 28)
    for path, threshold in ((run, None), (run / "pruned.safetensors", None), (run, 1.0)):
        restored = restore(path, threshold=threshold)
        expected = sparsevd.prune(model, threshold=threshold).eval()
        assert torch.equal(restored.network(x), expected(x))
        assert restored.example.shape == (1, 1, 28, 28)


def test_info_shows_units_and_multiply_adds(folder):
    run, model = folder
    shown = CliRunner().invoke(app, ["info", str(run)])
    assert shown.exit_code == 0, shown.output
    report = sparsevd.compact(sparsevd.prune(model), torch.zeros(1, 1, 28, 28)).compaction
    assert str(report) in shown.output
    assert "units: 300-100-10 → " in shown.output
    assert "multiply-adds: 266,200 dense, " in shown.output
    (run / "summary.json").unlink()
    less = CliRunner().invoke(app, ["info", str(run)])
    assert less.exit_code == 0
    assert "units and multiply-adds are not shown" in less.output
    assert "give --model and --input-shape" in less.output


def test_export_of_networks_of_the_paper_and_of_ones_own(folder):
    run, model = folder
    made = CliRunner().invoke(app, ["export", str(run), "--to", "onnx", "-o", "lenet.onnx", "--compact"])
    assert made.exit_code == 0, made.output
    assert "outputs equal in onnxruntime" in made.output
    session = onnxruntime.InferenceSession("lenet.onnx")
    x = torch.rand(3, 1, 28, 28)
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    torch.testing.assert_close(found, sparsevd.prune(model).eval()(x), rtol=1e-4, atol=1e-5)

    import restored_nets

    save_file(dict(restored_nets.network().state_dict()), "own.safetensors")
    arguments = ["export", "own.safetensors", "-o", "own.onnx", "--sparse-initializers"]
    own = CliRunner().invoke(app, [*arguments, "--model", "restored_nets:network", "--input-shape", "6"])
    assert own.exit_code == 0, own.output


def test_code_is_never_named_by_a_file(folder):
    run, _ = folder
    (run / "summary.json").write_text(json.dumps({"model": "restored_nets:network", "data": "mnist"}))
    with pytest.raises(ArgumentError, match="give --model"):
        restore(run)


def test_mistakes(folder):
    run, _ = folder
    with pytest.raises(ArgumentError, match="does not fit the network lenet-5-caffe"):
        restore(run, model="lenet-5-caffe")
    runner = CliRunner()
    for arguments, message in [
        (["--to", "tflite"], "--to tflite: there are onnx and c"),
        (["--input-shape", "1,28"], "must look like 1x28x28"),
    ]:
        result = runner.invoke(app, ["export", str(run), "-o", "x.onnx", *arguments])
        assert message in str(result.exception)


def test_a_model_file_needs_nothing_else(tmp_path):
    """`info`, `export` and `bench` take a .spvd that carries its graph."""
    pruned = sparsevd.prune(sparsevd.sparsify(models.lenet_300_100()))
    x = torch.randn(3, 1, 28, 28)
    sparsevd.save(pruned, tmp_path / "net.spvd", example=x)
    restored = restore(tmp_path / "net.spvd")
    assert restored.example.shape == (1, 1, 28, 28)
    torch.testing.assert_close(restored.network(x), pruned.eval()(x))
    with pytest.raises(CheckpointError, match="threshold"):
        restore(tmp_path / "net.spvd", threshold=2.0)
