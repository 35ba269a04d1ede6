"""`attach` on two processes, DDP and FSDP2: the same as one process by the plain formula, and a checkpoint that one
process can read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import sparsevd
from loops import RATE, STEPS, N, assert_same, differ, formula, network
from on_two_processes import DROPPING
from sparsevd.errors import ArgumentError
from sparsevd.posterior import posteriors
from sparsevd.training.attachment import _make_noise_differ

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch cannot run on several processes")
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All cases in one go: starting two processes takes longer than what they do."""
    folder = tmp_path_factory.mktemp("two_processes")
    run_on_two(Path(__file__).parent / "on_two_processes.py", str(folder), cwd=folder)
    return folder


def run_on_two(script, *arguments, cwd):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    search = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def load(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("micro", [1, 2], ids=["whole", "accumulated"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_do_what_the_formula_says(folder, kind, name, micro):
    found = [load(folder / f"{kind}-{name}-{micro}-{rank}.pt") for rank in range(2)]
    assert_same(found[0], found[1], 0)
    assert_same(found[0], formula(name, parts=2 * micro))


@pytest.mark.parametrize("wrong", [0.5, 2.0], ids=["divided by the processes", "once per process"])
def test_the_formula_would_notice(wrong):
    assert differ(formula("sgd", 2), formula("sgd", 2, mistake=wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_differs_and_zeros_do_not(folder, kind):
    (first, noise, report), (second, other, _) = [load(folder / f"{kind}-dropping-{rank}.pt") for rank in range(2)]
    assert_same(first, second, 0)
    assert not torch.equal(noise, other)
    zeros = sum(int((value == 0).sum()) for name, value in first.items() if name.endswith("weight"))
    assert 0 < zeros < 0.95 * sum(value.numel() for name, value in first.items() if name.endswith("weight"))
    assert report["sparsity"] > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_processes_is_read_by_one(folder, kind, tmp_path):
    model = network()
    for each in posteriors(model):
        each.layer.threshold = -4.5
    optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, RATE))
    schedule = sparsevd.attach(optimizer, model, n_train=N, total_steps=STEPS, steps_per_epoch=2, config=DROPPING)
    whole = load(folder / f"{kind}-dropping-0.pt")[0]
    state = {"model": model.state_dict(), "schedule": {}}
    known = dcp.FileSystemReader(folder / kind).read_metadata().state_dict_metadata
    for name, about in known.items():
        if name.startswith("schedule."):
            state["schedule"][name.removeprefix("schedule.")] = torch.zeros(about.size, dtype=about.properties.dtype)
    dcp.load(state, checkpoint_id=folder / kind)
    model.load_state_dict(state["model"])
    schedule.load_state_dict(state["schedule"])
    assert schedule.steps == STEPS
    assert_same(dict(model.named_parameters()), whole, 0)
    assert sparsevd.summary(model).kept < sparsevd.summary(model).weights
    pruned = sparsevd.prune(model)
    x = torch.randn(4, 12)
    sparsevd.save(pruned, tmp_path / "net.spvd", example=x)
    again = sparsevd.load(tmp_path / "net.spvd")
    torch.testing.assert_close(again(x), model.eval()(x))


@pytest.mark.parametrize("same", [True, False])
def test_processes_compare_their_noise_without_tensors_of_the_cpu(same, monkeypatch):
    """A group of NCCL takes none; torch itself puts objects on the device that the group takes."""

    def gather(found, mine):
        found[:] = [mine if same else mine + 1, mine]

    def refuse(*_, **__):
        raise RuntimeError("No backend type associated with device type cpu")

    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "all_gather", refuse)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _make_noise_differ()
    assert torch.equal(torch.get_rng_state(), before) != same


def test_a_spread_network_says_what_to_do(monkeypatch):
    """Its parameters are in parts: what needs them whole says so."""
    model = network()
    monkeypatch.setattr("sparsevd.training.objective.is_spread", lambda tensor: True)
    with pytest.raises(ArgumentError, match="attach"):
        sparsevd.kl(model)


PAGE = (Path(__file__).parents[1] / "docs" / "loops.md").read_text(encoding="utf-8")
SCRIPTS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code.startswith("# torchrun")]


@pytest.mark.long
@pytest.mark.parametrize(("script", "shown"), [*zip(SCRIPTS, ["fewer weights", ""], strict=True)], ids=KINDS)
def test_the_scripts_of_the_page_run(script, shown, tmp_path):
    # gloo's threads may outlive the interpreter, so it ends before they do.
    (tmp_path / "train.py").write_text(script + "import os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    assert shown in run_on_two(tmp_path / "train.py", cwd=tmp_path)
    assert shown or (tmp_path / "checkpoint" / ".metadata").exists()
