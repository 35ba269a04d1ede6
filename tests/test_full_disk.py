"""A full disk ends a training with a sentence; the last good checkpoint stays, and the run can go on from it."""

import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from fuzz.writers import small_disk
from sparsevd import cli
from sparsevd.errors import WriteError
from sparsevd.training.checkpoint import Checkpoint

CONFIG = sparsevd.FitConfig(epochs=4, batch_size=20)


def data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def network():
    torch.manual_seed(0)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2)))


def test_a_training_stops_with_the_last_good_checkpoint_and_goes_on_to_the_same_bits(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = tmp_path / "checkpoint.safetensors"

    def fill(output, target):
        if checkpoint.exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        return F.cross_entropy(output, target)

    try:
        with pytest.raises(WriteError) as raised:
            sparsevd.fit(network(), data(), None, CONFIG, loss=fill, run_dir=tmp_path, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(raised.value) == (
        f"{checkpoint} cannot be written: File too large. The last good state is in {checkpoint}. "
        "Once it can be written, resume the run"
    )
    assert Checkpoint.load(checkpoint).progress["state"]["epoch"] == 1
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.safetensors", "metrics.jsonl"]
    resumed, whole = network(), network()
    history = sparsevd.fit(resumed, data(), None, CONFIG, run_dir=tmp_path, resume=True, progress=False)
    expected = sparsevd.fit(whole, data(), None, CONFIG, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    assert [dataclasses.replace(epoch, seconds=0) for epoch in history] == [
        dataclasses.replace(epoch, seconds=0) for epoch in expected
    ]


CODE = """
    import torch
    from torch import nn
    network = lambda: nn.Linear(4000, 100)
    data = lambda: ((torch.ones(4, 4000), torch.arange(4)), None)
"""


def test_the_command_line_says_it_in_a_sentence_with_exit_code_2(tmp_path):
    """A disk of 16 MB has room for one checkpoint of this network (10 MB), and not for the next one beside it."""
    command = small_disk()
    if command is None:
        pytest.skip("this system lets no user mount a small disk (unshare --user --mount)")
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
    train = [sys.executable, "-m", "sparsevd.cli", "train", "--model", "mine:network", "--data", "mine:data"]
    # The disk is there for the command alone.
    script = f'"$@"; code=$?; ls -A run; cp run/checkpoint.safetensors {tmp_path}; exit $code'
    with tempfile.TemporaryDirectory() as disk:
        done = subprocess.run(
            [*command, disk, "sh", "-c", script, "sh", *train, "--out", "run"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stderr == (
        "error: run/checkpoint.safetensors cannot be written: No space left on device. "
        "The last good state is in run/checkpoint.safetensors. Once it can be written, resume the run\n"
    )
    assert done.returncode == 2
    assert done.stdout.splitlines()[-3:] == ["checkpoint.safetensors", "metrics.jsonl", "run.json"]
    assert Checkpoint.load(tmp_path / "checkpoint.safetensors").progress["state"]["epoch"] == 1


def test_output_that_cannot_be_written_is_said_too(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "argv", ["sparsevd", "train", "--recipe", "list"])
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr("warnings.showwarning", None)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


def test_a_mistake_is_still_said_when_the_output_cannot_be_written(monkeypatch, capsys, tmp_path):
    (tmp_path / "talking.py").write_text("def data():\n    print('reading')\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "argv", ["sparsevd", "train", "--data", "talking:data"])
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr("warnings.showwarning", None)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "talking:data must return (train, test)" in first
    assert "the output cannot be written" in second
