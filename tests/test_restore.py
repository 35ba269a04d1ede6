"""From files back to networks, and the commands that need the network itself: info and export."""

import importlib
import json
import os
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
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.restoration import described
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
    run = tmp_path / "run"
    run.mkdir()
    Checkpoint(dict(model.state_dict()), posteriors=described(model)).save(run / "checkpoint.safetensors")
    save_file(dict(sparsevd.prune(model).state_dict()), run / "pruned.safetensors")
    (run / "summary.json").write_text(json.dumps({"model": "lenet-300-100", "data": "mnist"}))
    (tmp_path / "restored_nets.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("restored_nets", None)
    return run, model


def test_the_folder_of_a_run_is_enough(folder):
    run, model = folder
    x = torch.rand(3, 1, 28, 28)
    for path, threshold in ((run, None), (run / "pruned.safetensors", None), (run, 1.0)):
        restored = Run(path).network(threshold)
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


def own_run(folder, **said):
    """A folder that names the user's own network."""
    import restored_nets

    own = folder.parent / "own"
    own.mkdir()
    save_file(dict(restored_nets.network().state_dict()), own / "checkpoint.safetensors")
    example = [{"shape": [6], "dtype": "float32"}]
    begun = {"asked": {"model": "restored_nets:network", "data": "restored_nets:data"}, "example": example, **said}
    (own / "run.json").write_text(json.dumps(begun))
    return own


def test_a_factory_of_ones_own_is_remembered_and_named(folder):
    own, said = own_run(folder[0]), []
    restored = Run(own, say=said.append).network()
    assert restored.example.shape == (1, 6)
    assert restored.network(torch.randn(3, 6)).shape == (3, 2)
    assert said == [f"model: restored_nets:network, as {own / 'run.json'} says"]
    given = Run(own, model="restored_nets:network", say=said.append)
    assert given.network().example.shape == (1, 6)
    assert len(said) == 1  # whoever names the code need not be told


def test_inputs_may_be_whole_numbers(folder):
    own = own_run(folder[0], example=[{"shape": [6], "dtype": "int64"}])
    assert Run(own).network().example.dtype is torch.int64
    restored = Run(own, input_shape=(9,)).network()
    assert restored.example.dtype is torch.int64
    assert restored.example.shape == (1, 9)
    (own / "run.json").write_text(json.dumps({"asked": {"model": "restored_nets:network"}, "example": [{"dtype": []}]}))
    assert Run(own, input_shape=(9,)).network().example.dtype is torch.float32


def test_inputs_may_be_several(folder):
    own = own_run(folder[0], example=[{"shape": [6], "dtype": "float32"}, {"shape": [], "dtype": "int64"}])
    first, second = Run(own).network().example
    assert (first.shape, first.dtype) == ((1, 6), torch.float32)
    assert (second.shape, second.dtype) == ((1,), torch.int64)


@pytest.mark.parametrize(
    "example",
    [
        3,
        [3],
        [],
        {},
        {"x": 3},
        [{}],
        [{"shape": [6], "dtype": "float32"}, {}],
        [{"shape": [1 << 27], "dtype": "float32"}] * 3,
        [{"shape": [6], "dtype": "object"}],
        [{"shape": [6], "dtype": []}],
        [{"shape": "6", "dtype": "float32"}],
        [{"shape": [-1], "dtype": "float32"}],
        [{"shape": [True], "dtype": "float32"}],
        [{"shape": [1 << 20, 1 << 20], "dtype": "float32"}],
    ],
)
def test_an_example_that_is_none_is_refused(folder, example):
    own = own_run(folder[0], example=example)
    with pytest.raises(CheckpointError, match="damaged: its example"):
        Run(own).network()


IMPORT = importlib.import_module


def refuse_import(name, package=None):
    if package is None:
        raise AssertionError("this code must not be run")
    return IMPORT(name, package)  # of a library that imports its own parts when they are needed


@pytest.mark.parametrize("name", ["restored_nets:network()", "restored_nets:", ":network", "a b:c", "..x:y", "a:b:c"])
def test_what_is_no_plain_name_is_not_imported(folder, monkeypatch, name):
    own = own_run(folder[0], asked={"model": name})
    monkeypatch.setattr("importlib.import_module", refuse_import)
    with pytest.raises(ArgumentError, match="Give model= yourself"):
        Run(own).network()


def test_code_is_not_named_by_a_file_of_somebody_else(folder, monkeypatch):
    own = own_run(folder[0])
    assert Run(own).network()
    owner = os.getuid()
    with monkeypatch.context() as other:
        other.setattr("os.getuid", lambda: owner + 1)
        other.setattr("importlib.import_module", refuse_import)
        for asked in (lambda: Run(own).network(), lambda: Run(own, model="restored_nets:network").data()):
            with pytest.raises(ArgumentError, match="= yourself"):
                asked()
        shown = CliRunner().invoke(app, ["info", str(own)])
        assert "Give --model yourself" in shown.output
    (own / "run.json").chmod(0o666)
    with pytest.raises(ArgumentError, match="Give model= yourself"):
        Run(own).network()
    monkeypatch.delattr("os.getuid")  # a system without users
    assert Run(own).network()


def test_a_factory_that_cannot_be_imported_is_named(folder):
    own = own_run(folder[0], asked={"model": "gone_nets:network"})
    with pytest.raises(ArgumentError, match=r"gone_nets:network.*\(No module.*model=package.module:factory"):
        Run(own).network()


def test_the_number_of_classes_is_remembered(tmp_path):
    save_file(dict(models.lenet_300_100(classes=7).state_dict()), tmp_path / "checkpoint.safetensors")
    asked = {"model": "lenet-300-100", "data": "somewhere:data"}
    example = [{"shape": [1, 28, 28], "dtype": "float32"}]
    (tmp_path / "run.json").write_text(json.dumps({"asked": asked, "classes": 7, "example": example}))
    restored = Run(tmp_path).network()  # the data is not asked for, nor imported
    assert restored.network(restored.example).shape == (1, 7)


def test_all_files_of_a_run_say_the_same_of_its_network(tmp_path):
    """The statistics of batch norm are no parameters, also where no checkpoint says so."""
    model = sparsevd.sparsify(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3)))
    pruned = sparsevd.prune(model)
    buffers = [name for name, _ in model.named_buffers()]
    state = dict(model.state_dict())
    Checkpoint(state, posteriors=described(model), buffers=buffers).save(tmp_path / "checkpoint.safetensors")
    save_file(dict(pruned.state_dict()), tmp_path / "pruned.safetensors")
    sparsevd.save(pruned, tmp_path / "a.spvd")
    headlines = [
        Run(tmp_path / n).summary().headline() for n in ("checkpoint.safetensors", "pruned.safetensors", "a.spvd")
    ]
    assert headlines == [sparsevd.summary(model).headline()] * 3
    assert "every parameter of the network (27 others" in headlines[0]

    pruned.register_buffer("table", torch.zeros(5))  # which no file without a list of buffers can tell from the rest
    sparsevd.save(pruned, tmp_path / "a.spvd")
    assert "every parameter and buffer of the network (32 others" in Run(tmp_path / "a.spvd").summary().headline()


def test_mistakes(folder):
    run, _ = folder
    with pytest.raises(ArgumentError, match="does not fit the network lenet-5-caffe"):
        Run(run, model="lenet-5-caffe").network()
    runner = CliRunner()
    for arguments, message in [
        (["--to", "tflite"], "to=tflite: there are onnx and c"),
        (["--input-shape", "1,28"], "must look like 1x28x28"),
    ]:
        result = runner.invoke(app, ["export", str(run), "-o", "x.onnx", *arguments])
        assert message in str(result.exception)


def test_a_model_file_needs_nothing_else(tmp_path):
    """`info`, `export` and `bench` take a .spvd that carries its graph."""
    pruned = sparsevd.prune(sparsevd.sparsify(models.lenet_300_100()))
    x = torch.randn(3, 1, 28, 28)
    sparsevd.save(pruned, tmp_path / "net.spvd", example=x)
    restored = Run(tmp_path / "net.spvd").network()
    assert restored.example.shape == (1, 1, 28, 28)
    torch.testing.assert_close(restored.network(x), pruned.eval()(x))
    with pytest.raises(CheckpointError, match="threshold"):
        Run(tmp_path / "net.spvd").network(2.0)
