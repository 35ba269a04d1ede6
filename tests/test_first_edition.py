"""What commit a615c58 of the first edition wrote: model files, a finished run and a stopped one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import sparsevd
from sparsevd import modelfile
from sparsevd.cli import app
from sparsevd.runs.run import Run

DATA = Path(__file__).parent / "data" / "first_edition"
FILES = sorted(path.stem for path in DATA.glob("*.spvd"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of one of the two runs, where its network's module can be imported."""
    monkeypatch.syspath_prepend(DATA)

    def copied(name):
        shutil.copytree(DATA / name, tmp_path / name)
        return tmp_path / name

    return copied


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", FILES)
def test_model_files_load_to_the_same_bits(name):
    expected = load_file(DATA / "expected.safetensors")
    found = modelfile.unpack(modelfile.read(DATA / f"{name}.spvd"))
    assert found
    for key, tensor in found.items():
        before = expected[f"{name}/{key}"]
        assert tensor.dtype is before.dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)), key
    if f"{name}/output" in expected:
        x = expected["attention.input" if name == "attention" else "input"]
        torch.testing.assert_close(sparsevd.load(DATA / f"{name}.spvd")(x), expected[f"{name}/output"])


def test_info_prune_export_and_compress_read_a_finished_run(run, tmp_path):
    folder = run("finished")
    told = json.loads((folder / "summary.json").read_text())
    assert f"{told['ratio']:.1f}× fewer weights" in command("info", folder)
    command("prune", folder, "-o", tmp_path / "again.safetensors")
    again, before = load_file(tmp_path / "again.safetensors"), load_file(folder / "pruned.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], before[key]) for key in before)
    command("export", folder, "--to", "c", "-o", tmp_path / "mine.c", "--input-shape", "6")
    assert (tmp_path / "mine.c").exists()
    assert "pruned network" in command("compress", folder, "-o", tmp_path / "mine.spvd", "--val-size", 20)
    assert torch.equal(sparsevd.load(tmp_path / "mine.spvd")(torch.zeros(2, 6)).isfinite(), torch.ones(2, 3).bool())


def test_a_stopped_run_goes_on_to_the_same_network(run):
    folder = run("stopped")
    settings = ["--epochs", 6, "--batch-size", 20, "--learning-rate", 0.02, "--drop-patience", 2, "--seed", 1]
    names = ["--model", "first_edition_network:network", "--data", "first_edition_network:data", "--val-size", 20]
    command("train", *names, *settings, "--out", folder, "--resume")
    ours, theirs = (load_file(path / "pruned.safetensors") for path in (folder, DATA / "finished"))
    for key, tensor in theirs.items():  # other machines round differently
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours[key] == 0, tensor == 0)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in metrics] == [1, 2, 3, 4, 5, 6]


def test_a_stopped_run_with_other_settings_is_refused_in_a_sentence(run):
    folder = run("stopped")
    names = ["--model", "first_edition_network:network", "--data", "first_edition_network:data", "--val-size", "20"]
    result = CliRunner().invoke(app, ["train", *names, "--epochs", "7", "--out", str(folder), "--resume"])
    assert result.exit_code != 0
    assert "other settings" in str(result.exception)
    assert Run(folder).summary().weights == 72
