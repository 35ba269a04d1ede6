"""The commands as a user types them, in processes of their own where that matters."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import fields
from typing import Annotated, get_origin, get_type_hints

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from sparsevd import cli_misspelling
from sparsevd.cli import app
from sparsevd.cli_help import group_of
from sparsevd.cli_options import in_options
from sparsevd.runs.benchmark import Measurement, Report
from sparsevd.runs.comparison import CompareConfig
from sparsevd.runs.compression import CompressConfig
from sparsevd.runs.training_run import RunConfig
from sparsevd.runtime.timing import Timing
from sparsevd.training.checkpoint import Checkpoint
from sparsevd.training.data import size, split
from sparsevd.training.loop import FitConfig

USER_CODE = """
    import torch
    from torch import nn

    def network():
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def data():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2200, 20, generator=generator)
        y = (x[:, 0] * x[:, 1] > 0).long()
        return (x[:2000], y[:2000]), (x[2000:], y[2000:])

    def not_a_model():
        return 3

    def of_width(width):
        return nn.Linear(20, width)

    def no_test():
        return data()[0], None

    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(12, 8), nn.Embedding(3, 8)
            self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, numbers, words):
            return {"logits": self.out(self.norm(torch.relu(self.left(numbers) + self.right(words).mean(1))))}

    def two_inputs(named=False):
        def parts(x):
            numbers, words = x[:, :12], x[:, 12:].clamp(-1, 1).round().long() + 1
            return {"numbers": numbers, "words": words} if named else (numbers, words)
        return tuple((parts(x[:200]), y[:200]) for x, y in data())

    def named_inputs():
        return two_inputs(named=True)

    class Examples(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.y)

        def __getitem__(self, i):
            return self.x[i], self.y[i]

    def dataset():
        return tuple(Examples(x[:200], y[:200]) for x, y in data())

    def loaders():
        return tuple(torch.utils.data.DataLoader(part, 20) for part in dataset())

    constant = 3
"""
TRAIN = ["train", "--model", "mine:network", "--data", "mine:data", "--batch-size", "20"]


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("mine", None)
    return tmp_path


def sparsevd(*arguments):
    """Run the command in a process; one thread, as results are promised for a fixed number of threads."""
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, check=False)


def command(*arguments):
    return [sys.executable, "-m", "sparsevd.cli", *map(str, arguments)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def without_time(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{**line, "seconds": 0} for line in lines]


@pytest.fixture
def trained(user_folder):
    result = sparsevd(*TRAIN, "--out", "run", "--epochs", 3, "--val-size", 200)
    assert result.returncode == 0, result.stderr
    return user_folder / "run", result.stdout


def test_train_writes_and_says_everything(trained):
    folder, output = trained
    assert "mine:network on mine:data: 1,408 weights in 2 Sparse VD layers, 1,800 training examples" in output
    assert "epoch 3/3  loss" in output
    assert "validation error" in output
    assert "ours: " in output
    assert "× counting every parameter) at " in output
    assert "% test error" in output
    assert "paper" not in output
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.safetensors",
        "metrics.jsonl",
        "pruned.safetensors",
        "run.json",
        "summary.json",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["config"]["epochs"] == 3
    assert summary["summary"]["weights"] == 1408
    plain = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    plain.load_state_dict(load_file(folder / "pruned.safetensors"))
    import mine

    x, y = mine.data()[1]
    error = 100 * (plain(x).argmax(1) != y).float().mean().item()
    assert error == pytest.approx(summary["test_error"], abs=1e-4)
    kept = sum(int((layer.weight != 0).sum()) for layer in (plain[0], plain[2]))
    assert kept == summary["summary"]["kept"]


def test_info_and_prune_of_a_checkpoint(trained, user_folder):
    folder, output = trained
    table = output[output.index("layer ") : output.index("fewer weights in these layers")].rpartition("\n")[0]
    runner = CliRunner()
    shown = runner.invoke(app, ["info", str(folder)])
    assert shown.exit_code == 0
    assert table in shown.output
    written = runner.invoke(app, ["prune", str(folder / "checkpoint.safetensors"), "-o", "out/pruned.safetensors"])
    assert written.exit_code == 0
    ours, theirs = load_file(user_folder / "out/pruned.safetensors"), load_file(folder / "pruned.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    everything = runner.invoke(app, ["prune", str(folder), "-o", "all.safetensors", "--threshold", "inf"])
    assert everything.exit_code == 0
    assert all((tensor != 0).all() for tensor in load_file("all.safetensors").values())
    plain = runner.invoke(app, ["info", str(folder / "pruned.safetensors")])
    (totals,) = [line for line in plain.output.splitlines() if line.startswith("total")]
    assert table.splitlines()[-1].split()[:3] == totals.split()[:3]


def test_prune_to_a_share_or_within_an_error(trained, user_folder):
    folder, _ = trained
    runner = CliRunner()
    shares = {}
    for options in (["--sparsity", "0.9"], ["--max-error-increase", "2", "--val-size", "100"]):
        result = runner.invoke(app, ["prune", str(folder), "-o", "small.safetensors", *options])
        assert result.exit_code == 0, result.output
        weights = [tensor for tensor in load_file("small.safetensors").values() if tensor.ndim > 1]
        zeros, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
        shares[options[0]] = zeros / total
    assert shares["--sparsity"] == pytest.approx(0.9, abs=1 / total)
    assert 0 < shares["--max-error-increase"] < 1
    assert "measured on 100 examples of the training set, held out in training" in result.output
    both = runner.invoke(app, ["prune", str(folder), "-o", "x", "--sparsity", "0.9", "--threshold", "3"])
    assert "give one of them" in str(both.exception)
    percent = runner.invoke(app, ["prune", str(folder), "-o", "x", "--sparsity", "90"])
    assert "did you mean 0.9?" in str(percent.exception)


@pytest.mark.parametrize("options", [["--max-error-increase", "3"], ["--sparsity", "0.9"]], ids=["error", "sparsity"])
def test_a_budget_while_training(user_folder, options):
    result = CliRunner().invoke(app, [*TRAIN, *options, "--out", "run", "--epochs", "4", "--seed", "3"])
    assert result.exit_code == 0, result.output
    summary = json.loads((user_folder / "run" / "summary.json").read_text())
    assert summary["budget"][options[0][2:].replace("-", "_")] == float(options[1])
    assert summary["elbo"] is None
    assert f"β ended at {summary['beta']:.3g}" in result.output
    pruned = [tensor for tensor in load_file("run/pruned.safetensors").values() if tensor.ndim > 1]
    share = sum(int((w == 0).sum()) for w in pruned) / sum(w.numel() for w in pruned)
    assert 1 / summary["ratio"] == pytest.approx(1 - share)
    if options[0] == "--sparsity":
        assert share == pytest.approx(0.9, abs=0.001)
    else:
        assert "against a trained network: pretrain_epochs=10" in result.output
        assert "on held-out examples: val_size=400" in result.output
    again = CliRunner().invoke(app, [*TRAIN, *options, "--out", "run", "--epochs", "4", "--seed", "3", "--resume"])
    assert again.exit_code == 0, again.output
    other = CliRunner().invoke(app, [*TRAIN, "--out", "run", "--epochs", "4", "--seed", "3", "--resume"])
    assert other.exit_code != 0


def test_threshold_auto(trained, user_folder):
    """By the price alone, or checked on what the run held out; the counts are those of the written file."""
    folder, _ = trained
    runner = CliRunner()
    checked = runner.invoke(app, ["prune", str(folder), "-o", "auto.safetensors", "--threshold", "auto"])
    assert checked.exit_code == 0, checked.output
    assert "examples of the training set, held out in training" in checked.output
    (user_folder / "alone").mkdir()
    shutil.copy(folder / "checkpoint.safetensors", user_folder / "alone")
    alone = runner.invoke(
        app, ["prune", "alone/checkpoint.safetensors", "-o", "price.safetensors", "--threshold", "auto"]
    )
    assert "the run has held out no examples to check that on" in alone.output
    kept = [sum(int((w != 0).sum()) for w in load_file(f"{name}.safetensors").values()) for name in ("auto", "price")]
    own = sum(int((w != 0).sum()) for w in load_file(folder / "pruned.safetensors").values())
    assert 0 < kept[1] <= kept[0] <= own
    shown = runner.invoke(app, ["info", str(folder), "--threshold", "auto"]).output
    assert shown.splitlines()[:3] == alone.output.splitlines()[1:4]
    assert "lowest is neither a number nor auto" in runner.invoke(app, ["info", "x", "--threshold", "lowest"]).output


def test_prune_and_polish(trained, user_folder):
    folder, _ = trained
    result = CliRunner().invoke(app, ["prune", str(folder), "-o", "polished.safetensors", "--polish", "2"])
    assert result.exit_code == 0, result.output
    assert re.search(r"polished: error on \d+ held-out examples [\d.]+ % before, [\d.]+ % after", result.output)
    plain, polished = load_file(folder / "pruned.safetensors"), load_file("polished.safetensors")
    assert plain.keys() == polished.keys()
    for name, tensor in plain.items():
        if tensor.ndim > 1:
            assert torch.equal(tensor == 0, polished[name] == 0)
            assert not torch.equal(tensor, polished[name])
    with safe_open("polished.safetensors", "pt") as file:
        assert file.metadata() == {"polish_epochs": "2"}
    alone = user_folder / "elsewhere"
    alone.mkdir()
    shutil.copy(folder / "checkpoint.safetensors", alone)
    unknown = CliRunner().invoke(app, ["prune", str(alone), "-o", "x", "--polish", "2"])
    assert "does not say which network and data it is of; give model= and data=" in str(unknown.exception)


def test_a_run_of_ones_own_code_needs_no_further_arguments(trained, user_folder):
    folder, _ = trained
    begun = json.loads((folder / "run.json").read_text())
    assert begun["classes"] == 2
    assert begun["example"] == [{"shape": [20], "dtype": "float32"}]
    runner = CliRunner()
    for arguments, text in [
        (["info", "run"], "multiply-adds: 1,408 dense"),
        (["export", "run", "--to", "c", "-o", "mine.c"], "written to mine.c"),
        (["bench", "run", "--batch", "1", "--threads", "1", "--no-compile"], "accelerate"),
        (["compress", "run", "-o", "mine.spvd", "--max-error-increase", "100"], "test error of the file"),
    ]:
        shown = runner.invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
        assert text in shown.output
        assert "model: mine:network, as run/summary.json says" in shown.output
    assert "data: mine:data, as run/summary.json says" in shown.output
    # An unfinished run has no summary yet.
    (folder / "summary.json").unlink()
    assert "model: mine:network, as run/run.json says" in runner.invoke(app, ["info", "run"]).output
    (user_folder / "mine.py").unlink()
    sys.modules.pop("mine")
    gone = runner.invoke(app, ["info", "run"])
    assert gone.exit_code == 0
    assert "name it with --model package.module:factory" in gone.output


def test_a_seed_holds_out_the_same_examples_of_every_form():
    x = torch.arange(30.0)
    whole = {"pair": (x, x), "tuple": ((x, 2 * x), x), "dict": ({"a": x}, x), "dataset": TensorDataset(x, x, x)}
    found = {}
    for name, data in whole.items():
        train, held_out = split(data, 10, seed=4)
        targets = [held_out[i][2] for i in range(10)] if name == "dataset" else held_out[1]
        found[name] = [float(y) for y in targets]
        assert size(train, "train") == 20
    assert all(targets == found["pair"] for targets in found.values())


def runs(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    ("model", "data"),
    [("TwoInputs", "two_inputs"), ("TwoInputs", "named_inputs"), ("network", "dataset")],
)
def test_the_commands_take_what_fit_takes(user_folder, model, data):
    """Several inputs, by position or by name; outputs with names; a Dataset, out of which examples are held."""
    runs("train", "--model", f"mine:{model}", "--data", f"mine:{data}", "--out", "run", "--epochs", 1, "--val-size", 40)
    begun = json.loads((user_folder / "run" / "run.json").read_text())
    numbers, words = {"shape": [12], "dtype": "float32"}, {"shape": [8], "dtype": "int64"}
    assert (
        begun["example"]
        == {
            "two_inputs": [numbers, words],
            "named_inputs": {"numbers": numbers, "words": words},
            "dataset": [{"shape": [20], "dtype": "float32"}],
        }[data]
    )
    runs("compress", "run", "-o", "a.spvd", "--max-error-increase", 100)
    pruned = runs("prune", "run", "-o", "a.safetensors", "--max-error-increase", 100, "--val-size", 40)
    assert "measured on 40 examples of the training set, held out in training" in pruned
    for shown in (runs("info", "run"), runs("info", "a.spvd")):
        assert ("multiply-adds: " in shown) == (data != "named_inputs")
    if data == "two_inputs":
        bench = CliRunner().invoke(app, ["bench", "run"])
        assert "only networks of one input" in str(bench.exception)
        assert "equal in onnxruntime" in runs("export", "a.spvd", "-o", "a.onnx")
    if data == "named_inputs":
        assert "its inputs by name ('numbers', 'words')" in runs("info", "run")
        assert "holds no graph; give the network it is of (--model, and --input-shape)" in runs("info", "a.spvd")


def test_a_run_that_an_earlier_version_began_goes_on(trained):
    """Its run.json says neither the classes nor what an input looks like."""
    folder, output = trained
    begun = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({k: v for k, v in begun.items() if k not in ("classes", "example")}))
    (folder / "summary.json").unlink()
    again = sparsevd(*TRAIN, "--out", "run", "--epochs", 3, "--val-size", 200, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-2] == output.splitlines()[-2]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["classes"], summary["example"]) == (begun["classes"], begun["example"])


def test_resume_of_a_finished_run_shows_its_result(trained, user_folder):
    folder, output = trained
    before = (folder / "pruned.safetensors").read_bytes()
    command = json.loads((folder / "summary.json").read_text())["command"]
    again = sparsevd(*TRAIN, "--out", "run", "--epochs", 3, "--val-size", 200, "--resume")
    assert again.returncode == 0
    assert not re.search(r"^epoch", again.stdout, re.MULTILINE)
    assert again.stdout.count("note: 270 steps") == 1  # nothing begins, but what there is to say of the run holds
    assert output.splitlines()[-2] == again.stdout.splitlines()[-2]
    assert (folder / "pruned.safetensors").read_bytes() == before
    assert json.loads((folder / "summary.json").read_text())["command"] == command  # not that of reading it again


def test_pretraining_and_starting_from_a_file(user_folder):
    pretrained = sparsevd(*TRAIN, "--out", "run", "--epochs", 1, "--pretrain-epochs", 2)
    assert pretrained.returncode == 0, pretrained.stderr
    assert "pre-training the dense network for 2 epochs" in pretrained.stdout
    dense = user_folder / "run" / "pretrain" / "checkpoint.safetensors"
    assert not Checkpoint.load(dense).posteriors
    again = sparsevd(*TRAIN, "--out", "other", "--epochs", 1, "--init-from", dense)
    assert again.returncode == 0, again.stderr
    first, second = (load_file(user_folder / name / "pruned.safetensors") for name in ("run", "other"))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "signals",
    [
        [0.02, 0.3],
        pytest.param([0.0], marks=pytest.mark.long),
        pytest.param([0.31, 0.05, 0.17], marks=pytest.mark.long),
    ],
)
def test_killed_runs_go_on_to_the_same_bits(user_folder, signals):
    """SIGKILL at several moments: before the first checkpoint, and at all sorts of times after one."""
    arguments = [*TRAIN, "--epochs", "6"]
    assert sparsevd(*arguments, "--out", "whole").returncode == 0
    broken = user_folder / "broken"
    for delay in signals:
        before = (broken / "metrics.jsonl").stat().st_mtime_ns if (broken / "metrics.jsonl").exists() else None
        process = subprocess.Popen(
            command(*arguments, "--out", "broken", "--resume"), env=environment(), stdout=subprocess.PIPE, text=True
        )
        if delay:  # wait for an epoch of this very process, then a little more
            while process.poll() is None:
                now = (broken / "metrics.jsonl").stat().st_mtime_ns if (broken / "metrics.jsonl").exists() else None
                if now != before:
                    break
                time.sleep(0.005)
            time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    result = sparsevd(*arguments, "--out", "broken", "--resume")
    assert result.returncode == 0, result.stderr
    whole = user_folder / "whole"
    assert (broken / "pruned.safetensors").read_bytes() == (whole / "pruned.safetensors").read_bytes()
    ours, theirs = (Checkpoint.load(path / "checkpoint.safetensors") for path in (broken, whole))
    assert all(torch.equal(ours.model[key], theirs.model[key]) for key in theirs.model)
    assert all(torch.equal(ours.optimizer[key], theirs.optimizer[key]) for key in theirs.optimizer)
    assert without_time(broken) == without_time(whole)
    assert sorted(path.name for path in broken.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_ctrl_c_saves_and_exits_cleanly(user_folder):
    arguments = [*TRAIN, "--epochs", "300", "--out", "run"]
    process = subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (user_folder / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    state = Checkpoint.load(user_folder / "run" / "checkpoint.safetensors").progress["state"]
    assert state["epoch"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "lenet"], "no model 'lenet'; there are lenet-300-100"),
        (["train", "--data", "imagenet"], "no data set 'imagenet'"),
        (["train", "--data", "mine:data", "--model", "mine:nothing"], "'mine:nothing' cannot be imported"),
        (["train", "--data", "mine:data", "--model", "nowhere:net"], "'nowhere:net' cannot be imported"),
        (["train", "--data", "mine:data", "--model", "mine:not_a_model"], "returned a int, not a torch module"),
        (["train", "--data", "mine:data", "--model", "mine:constant"], "not a function"),
        (["train", "--data", "mine:data", "--model", "mine:of_width"], "and needs width. Write a function"),
        (["train", "--data", "mine:of_width"], "mine:of_width is called without arguments"),
        (["compare", "--data", "mine:data", "--net", "mine:of_width"], "def mine(): return of_width(width=…), in mine"),
        (["compare", "--data", "mine:two_inputs", "--net", "mine:TwoInputs"], "rivals take one tensor and return one"),
        (["train", "--data", "mine:not_a_model", "--model", "mine:network"], "must return (train, test)"),
        (["train", "--epochs", "0"], "--epochs 0 must be a positive integer"),
        (["train", "--epochs", "many"], "Invalid value for '--epochs'"),
        (["train", "--learning-rate", "nan"], "--learning-rate nan must be a positive number"),
        (["train", "--threshold", "nan", "--data", "mine:data", "--model", "mine:network"], "threshold is NaN"),
        (["train", "--data-dir", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["train", "--resume", "--overwrite"], "exclude each other"),
        ([*TRAIN, "--val-size", "5000"], "--val-size 5000 out of 2000 examples leave nothing to train on"),
        ([*TRAIN, "--val-size", "-5"], "--val-size -5 must be positive"),
        ([*TRAIN, "--data", "mine:loaders", "--val-size", "5"], "cannot be held out of a DataLoader"),
        ([*TRAIN, "--data", "mine:two_inputs", "--shift", "1"], "must be a pair of tensors"),
        ([*TRAIN, "--init-from", "mine.py"], "mine.py is not a whole safetensors file"),
        (["train", "--data", "mine:data", "--model", "lenet-300-100"], "lenet-300-100 does not fit the data mine:data"),
        ([*TRAIN, "--recipe", "cake"], "no recipe 'cake'; there are default, fast, thorough, sparsest, paper"),
        ([*TRAIN, "--pretrain-epochs", "-3"], "--pretrain-epochs -3 must be zero or more"),
        (["info", "missing.safetensors"], "error: missing.safetensors does not exist"),
        (["info", "runs/nowhere"], "error: runs/nowhere does not exist"),
        (["compress", ".", "-o", "x", "--model", "mine:network", "--data", "mine:data"], "does not exist"),
        (["info", "mine.py"], "mine.py is not a whole safetensors file"),
        (["prune", "plain.safetensors", "-o", "x"], "is not a checkpoint of sparsevd"),
        (["export", "plain.safetensors", "-o", "x"], "give --model and --input-shape"),
        (["compress", "plain.safetensors", "-o", "x"], "give --model and --data"),
        (["compress", "plain.safetensors", "-o", "x", "--precision", "fine"], "--precision fine must be"),
        (["compress", "plain.safetensors", "-o", "x", "--max-error-increase", "-1"], "--max-error-increase -1.0 must"),
        (["compare", "--data", "mine:no_test", "--net", "mine:network"], "held-out examples (--val-size)"),
        (["info", "plain.safetensors", "--threshold", "2"], "no log α"),
        (["prune", "mine.py"], "Missing option '--output'"),
        (["fly"], "No such command 'fly'. There are train, info"),
        (["trian"], "No such command 'trian'. Did you mean train?"),
        (["benchmark", "x"], "Did you mean bench?"),
        (["train", "--lr", "1"], "No such option: --lr. Did you mean --learning-rate?"),
        (["train", "--epoch", "1"], "Did you mean --epochs?"),
        (["train", "--Batch_Size", "1"], "Did you mean --batch-size?"),
        (["bench", "x", "--batch-size", "1"], "Did you mean --batch?"),
        (["prune", "x", "--out", "y"], "Did you mean --output?"),
        (["train", "--device", "cuda"], "--device. The commands compute on the CPU; in Python"),
        (["info", "x", "--polish", "1"], "--polish. It is an option of sparsevd prune."),
        (["info", "x", "--zzz"], "No such option: --zzz"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(arguments, message, capsys, monkeypatch):
    from sparsevd import cli

    save_file({"fc.weight": torch.ones(2, 2)}, "plain.safetensors")
    monkeypatch.setattr(sys, "argv", ["sparsevd", *arguments])
    monkeypatch.setattr("warnings.showwarning", None)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    errors = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in " ".join(errors.replace("│", "").split())
    assert "Traceback" not in errors
    assert "Pickled" not in errors or "does not exist" not in errors


@pytest.mark.long
def test_overwrite_keeps_the_old_run_until_the_new_one_can_start(trained):
    folder, _ = trained
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for mistake in (["--model", "mine:nothing"], ["--epochs", "0"], ["--init-from", "missing"]):
        assert sparsevd(*TRAIN, "--out", "run", "--overwrite", *mistake).returncode == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.long
def test_a_run_is_not_overwritten_by_accident(trained, user_folder):
    refused = sparsevd(*TRAIN, "--out", "run", "--epochs", 1)
    assert refused.returncode == 2
    assert "--resume continues it, --overwrite starts anew" in refused.stderr
    changed = sparsevd(*TRAIN, "--out", "run", "--epochs", 1, "--val-size", 200, "--resume")
    assert changed.returncode == 2
    assert "epochs: 3 then, 1 now" in changed.stderr
    other_data = sparsevd(*TRAIN, "--out", "run", "--epochs", 3, "--resume")
    assert other_data.returncode == 2
    assert "a run with --val-size 200, not 0" in other_data.stderr
    replaced = sparsevd(*TRAIN, "--out", "run", "--epochs", 1, "--overwrite")
    assert replaced.returncode == 0
    assert len(without_time(user_folder / "run")) == 1


@pytest.mark.parametrize("name", ["train", "info", "prune", "export"])
def test_help_has_an_example(name):
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"Example: sparsevd {name} " in " ".join(shown.output.split())


def test_a_run_teaches_another(trained, user_folder):
    taught = [*TRAIN, "--out", "taught", "--epochs", "2", "--teacher"]
    result = CliRunner().invoke(app, [*taught, str(trained[0]), "--temperature", "2"])
    assert result.exit_code == 0, result.output
    assert "taught by Sequential (" in result.output
    assert ", temperature 2, weight 0.5" in result.output
    summary = json.loads((user_folder / "taught" / "summary.json").read_text())
    assert summary["teacher"] == {"path": str(trained[0]), "temperature": 2.0, "weight": 0.5}
    again = CliRunner().invoke(app, [*taught, str(trained[0]), "--resume"])  # at another temperature
    assert "other settings" in str(again.exception)
    nobody = CliRunner().invoke(app, [*TRAIN, "--out", "other", "--teacher", "nobody"])
    assert "nobody" in str(nobody.exception)


def test_recipes_are_named_and_options_override_them(user_folder):
    def run(*options):
        result = CliRunner().invoke(app, [*TRAIN, *options, "--out", "run", "--overwrite"])
        assert result.exit_code == 0, result.output
        return json.loads((user_folder / "run" / "summary.json").read_text())["config"]

    paper = run("--recipe", "paper", "--epochs", "1")
    assert paper["epochs"] == 1
    assert paper["batch_size"] == 20
    assert paper["learning_rate"] == 1e-4
    assert paper["drop_from"] == 1
    # An option with its default value is still an option that was given.
    assert run("--recipe", "paper", "--epochs", "1", "--learning-rate", "0.004")["learning_rate"] == 0.004
    assert run("--epochs", "1")["learning_rate"] == 0.004
    listed = CliRunner().invoke(app, ["train", "--recipe", "list"])
    assert "paper-pretrained" in listed.output


def options_of(name):
    command = typer.main.get_command(app).commands[name]
    return {each.name: each for each in command.params if each.param_type_name == "option"}


@pytest.mark.parametrize(
    ("name", "configs"),
    [("train", (RunConfig, FitConfig)), ("compress", (CompressConfig,)), ("compare", (CompareConfig,))],
)
def test_every_setting_with_a_help_text_is_an_option_with_its_default(name, configs):
    options = options_of(name)
    for config in configs:
        types = get_type_hints(config, include_extras=True)
        described = {field.name: field for field in fields(config) if get_origin(types[field.name]) is Annotated}
        assert described
        for field in described.values():
            option = options.pop(field.name)
            assert option.default == field.default
            assert option.opts == [f"--{field.name.replace('_', '-')}"]
            assert option.help == types[field.name].__metadata__[0]
            # --no-contract and --no-noise, but no --no-mirror
            assert bool(option.secondary_opts) == (field.default is True or field.name == "noise")
    own = {"train": {"recipe"}, "compress": {"output"}, "compare": {"methods", "cards", "as_json"}}
    assert options.keys() - {"help"} == own[name]


def test_an_option_has_one_spelling_in_all_commands():
    """So that a setting in an error can be turned into its option wherever it comes from."""
    spellings = {}
    for name in typer.main.get_command(app).commands:
        for option in options_of(name).values():
            assert spellings.setdefault(option.name, option.opts[0]) == option.opts[0]


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("val_size=5 must be less", "--val-size 5 must be less"),
        ("give model= and input_shape=", "give --model and --input-shape"),
        ("another folder (out=)", "another folder (--out)"),
        ("resume=True continues it, overwrite=True starts anew", "--resume continues it, --overwrite starts anew"),
        ("shift=True must be a number", "--shift must be a number"),
        ("variance_dtype='x' must be", "--variance-dtype 'x' must be"),
        ("n_train=3 contradicts the data", "n_train=3 contradicts the data"),
        ("the model of runs/seed=3 is damaged", "the model of runs/seed=3 is damaged"),
    ],
)
def test_settings_in_errors_become_options(library, command):
    assert in_options(library, app) == command


def test_every_option_is_shown_in_a_group():
    """A new one gets its place in `cli_help.GROUPS`; the help shows each of them once."""
    commands = typer.main.get_command(app).commands
    for name in commands:
        for option in options_of(name).values():
            assert option.name == "help" or group_of(option.name) != "Options", (name, option.name)
        shown = CliRunner().invoke(app, [name, "--help"]).output
        assert all(f"{option.opts[0]} " in shown for option in options_of(name).values())
    first = CliRunner().invoke(app, ["--help"]).output
    assert "Commands:" not in first  # each command has its place too
    assert all(re.search(rf"^  {name} ", first, re.MULTILINE) for name in commands)


def test_suggestions_exist():
    """What others call it is no option of ours, and what is suggested for it is one."""
    commands = typer.main.get_command(app).commands
    options = {opt for name in commands for option in options_of(name).values() for opt in option.opts}
    assert {name for names in cli_misspelling.OPTIONS.values() for name in names} <= options
    assert {name for names in cli_misspelling.COMMANDS.values() for name in names} <= commands.keys()
    assert not cli_misspelling.COMMANDS.keys() & commands.keys()


def json_of(*arguments):
    """What a command writes to its standard output, all of it."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_is_all_that_is_printed(user_folder, monkeypatch):
    short = ["--data", "mine:data", "--epochs", "1", "--out"]
    CliRunner().invoke(app, ["train", "--model", "mine:network", *short, "run"], catch_exceptions=False)
    info = json_of("info", "run")
    assert info["weights"] == 1408
    assert [layer["name"] for layer in info["layers"]] == ["0", "2"]
    assert info["compaction"]["cost_before"]["dense"] == 1408
    assert info["no_compaction_because"] is None
    save_file({"fc.weight": torch.zeros(2, 2)}, "zeros.safetensors")
    unknown = json_of("info", "zeros.safetensors")
    assert unknown["ratio"] is None  # infinite
    assert unknown["compaction"] is None
    assert "--model" in unknown["no_compaction_because"]
    timed = Report((Measurement("torch", 1, 1, Timing(3e-5, 2e-5, 4e-5), 1.0, math.nan),), {"plan": "no kernels"})
    monkeypatch.setattr("sparsevd.runs.benchmark.bench", lambda *_, **__: print("on the way") or timed)
    bench = json_of("bench", "run", "--batch", 1, "--threads", 1, "--no-compile")
    assert {"way", "batch", "threads", "timing", "times_faster", "difference"} == bench["measurements"][0].keys()
    assert bench["measurements"][0]["timing"] == {"median": 3e-5, "low": 2e-5, "high": 4e-5}
    assert bench["measurements"][0]["difference"] is None
    assert bench["missing"] == {"plan": "no kernels"}
    compare = json_of("compare", "--net", "mine:network", "--methods", "dense", *short, "compare")
    assert compare["records"][0]["method"] == "dense"
    assert compare["written_to"] == "compare/compare.json"
