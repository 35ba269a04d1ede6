"""The benchmark command: every way is in the table, or the reason why not."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from networks import pruned
from sparsevd.cli import app
from sparsevd.errors import ArgumentError
from sparsevd.runs import benchmark as bench
from sparsevd.runtime import timing
from sparsevd.zoo import models


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    quick = timing.timings
    monkeypatch.setattr(bench, "timings", lambda calls: quick(calls, turns=2, slice_of=1e-5))


@pytest.mark.long
def test_every_way_gives_the_same(monkeypatch):
    model = pruned(models.lenet_300_100(), 0.9)
    report = bench.bench(model, torch.zeros(1, 1, 28, 28), batches=(1, 3), threads=(1,), compiler=False)
    ways = [m.way for m in report.measurements]
    assert ways[:2] == ["torch", "ONNX Runtime"] or "ONNX Runtime" in report.missing
    assert ways.count("accelerate") == 2
    assert all(m.difference < 1e-5 for m in report.measurements)
    assert all(m.way in str(report) for m in report.measurements)
    assert [m.times_faster for m in report.measurements if m.way == "torch"] == [1, 1]


def test_what_a_way_cannot_do_is_said():
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    report = bench.bench(model, torch.zeros(1, 4), batches=(1,), threads=(1,), compiler=False)
    assert "gelu" in report.missing["plan"]
    assert "without plan" in str(report)
    with pytest.raises(ArgumentError, match="at least 1"):
        bench.bench(model, torch.zeros(1, 4), batches=(0,))


def test_inputs_may_be_whole_numbers():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    report = bench.bench(model, torch.ones(1, 3, dtype=torch.int64), batches=(2,), threads=(1,), compiler=False)
    assert "torch" in [m.way for m in report.measurements]


class Tokens(nn.Module):
    """Reads token numbers and returns a dict of two."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        read = self.words(tokens).mean(1)
        return {"logits": self.head(read), "read": read}


def test_tokens_in_and_dicts_out():
    model = pruned(Tokens(), 0.5)
    example = torch.randint(0, 7, (2, 5))
    report = bench.bench(model, example, batches=(1, 3), threads=(1,), compiler=False)
    assert {m.way for m in report.measurements} >= {"torch", "accelerate"}
    assert all(m.difference < 1e-5 for m in report.measurements)
    assert "plan" in report.missing
    with pytest.raises(ArgumentError, match="at least one input"):
        bench.bench(model, example[:0], batches=(1,), threads=(1,), compiler=False)


def test_timings_are_taken_in_turns():
    order = []
    one, two = timing.timings([lambda: order.append(1), lambda: order.append(2)], turns=3, slice_of=1e-9)
    assert order[4:] == [1, 1, 2, 2] * 3  # after two calls of each to see how long they take
    assert one.low <= one.median <= one.high
    assert two.median > 0


def test_commands(tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "pruned.safetensors"
    model = pruned(models.lenet_300_100(), 0.95)
    save_file(model.state_dict(), file)
    named = ["--model", "lenet-300-100", "--input-shape", "1x28x28"]
    options = ["--batch", "1", "--threads", "1", "--no-compile"]
    shown = CliRunner().invoke(app, ["bench", str(file), *named, *options])
    assert shown.exit_code == 0, shown.output
    assert "accelerate" in shown.output
    shown = CliRunner().invoke(app, ["export", str(file), *named, "--to", "c", "-o", str(tmp_path / "lenet.c")])
    assert shown.exit_code == 0, shown.output
    assert "lenet.h" in shown.output
    wrong = ["export", str(file), *named, "--to", "c", "-o", str(tmp_path / "no.c"), "--sparse-initializers"]
    shown = CliRunner().invoke(app, wrong)
    assert isinstance(shown.exception, ArgumentError)
    assert "is for to=onnx" in str(shown.exception)
    assert not (tmp_path / "no.c").exists()
    assert "one self-contained C file" in " ".join(CliRunner().invoke(app, ["export", "--help"]).output.split())
    assert (tmp_path / "lenet.c").exists()
