"""A whole network as one call and as one C file: the answers of the graph, for every operation a plan knows."""

import copy
import pickle
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsevd
from networks import WayAround, pruned
from sparsevd import kernels
from sparsevd.errors import GraphError
from sparsevd.graph import capture
from sparsevd.kernels import lanes, program
from sparsevd.kernels.steps import StepKind
from sparsevd.runtime import plan as module
from sparsevd.runtime import timing
from sparsevd.runtime.c_export import export_c
from sparsevd.runtime.plan import Plan
from sparsevd.zoo import models

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Everything(nn.Module):
    """Strides, groups, dilation, branches, padding of several kinds, batch norms that fold and that do not."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.conv3 = nn.Conv2d(8, 8, (5, 3), padding=(2, 2), dilation=(1, 2))
        self.conv4 = nn.Conv2d(8, 12, 1)
        self.pool, self.norm2, self.average = nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(12), nn.AvgPool2d(2, ceil_mode=True)
        self.padded = nn.AvgPool2d(3, 2, 1)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        y = (self.conv2(x) + self.conv3(x) + x).relu()
        y = self.norm2(self.pool(self.conv4(y)))
        return self.fc(self.padded(self.average(y.clamp(-2, 3))).mean((2, 3)))


NETWORKS = {
    "lenet-300-100": (models.lenet_300_100, (1, 28, 28)),
    "lenet-5-caffe": (models.lenet_5_caffe, (1, 28, 28)),
    "vgg-like": (lambda: models.vgg_like(k=0.1), (3, 32, 32)),
    "residual": (WayAround, (3, 6, 7)),
    "everything": (Everything, (3, 33, 29)),
    "one axis": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 5, 4, stride=2, padding=1), nn.ReLU6(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(35, 3)
        ),
        (3, 29),
    ),
    "images out": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 5)), (2, 9, 11)),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def example(name, batch=2):
    make, shape = NETWORKS[name]
    return pruned(make(), 0.7), torch.randn(batch, *shape)


def same(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@built
@every_network
def test_same_answers(name):
    model, x = example(name, 37)
    graph = capture(model, x)
    with torch.no_grad():
        expected = model(x)
    assert float((expected - expected[:1]).abs().max()) > 1e-3  # the output depends on the input
    before = torch.get_num_threads()
    try:
        for images in (1, lanes(), 2 * lanes()):
            run = Plan(graph, images)
            for threads, batch in ((1, 1), (1, 37), (2, 37), (2, 3), (3, 1)):
                torch.set_num_threads(threads)
                same(run(x[:batch]), expected[:batch])
    finally:
        torch.set_num_threads(before)


@built
def test_batch_norm_of_a_filter_that_hardly_varies():
    """Its scale is large, and its mean nearly cancels its bias: rounding either by itself would show."""
    model = pruned(nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)), 0.0)
    model[0].bias.data.fill_(0.7)
    model[1].running_mean.fill_(0.7)
    model[1].running_var.zero_()
    x = 1e-4 * torch.randn(5, 4)
    expected = copy.deepcopy(model).double()(x.double()).detach()
    torch.testing.assert_close(Plan(capture(model, x))(x).double(), expected, rtol=1e-4, atol=1e-6)


@built
def test_large_work_is_shared_by_the_threads(monkeypatch):
    monkeypatch.setattr(program, "ENOUGH", 0)
    model, x = example("everything", 5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        same(Plan(capture(model, x), 1)(x[:1]), model(x[:1]).detach())
        same(Plan(capture(model, x), lanes())(x), model(x).detach())
    finally:
        torch.set_num_threads(before)


@built
def test_several_threads_may_call_one_plan():
    model, _ = example("everything")
    inputs = torch.randn(6, 9, 3, 33, 29)
    run = sparsevd.plan(model, inputs[0])
    results = [None] * len(inputs)

    def work(i):
        for _ in range(5):
            results[i] = run(inputs[i])

    callers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for ours, x in zip(results, inputs, strict=True):
        same(ours, model(x).detach())


@built
def test_what_measures_faster_is_taken(monkeypatch):
    def measured(calls, **_):
        return [timing.Timing(1 / (1 + i), 0, 0) for i in range(len(calls))]

    monkeypatch.setattr(module, "timings", measured)
    model, x = example("lenet-300-100", 64)
    assert sparsevd.plan(model, x).images == 2 * lanes()
    assert sparsevd.plan(model, x[:1]).images == 1


def test_kinds_of_steps_are_those_of_the_kernels():
    text = (Path(program.__file__).parent / "inference.h").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum step_kind \{(.*?)\}", text)
    assert [name.strip() for name in names.split(",")] == [kind.name for kind in StepKind]
    assert [kind.value for kind in StepKind] == list(range(len(StepKind)))


@built
def test_a_norm_of_shared_layers_is_folded_in_each_place():
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    model = pruned(nn.Sequential(conv, norm, nn.ReLU(), conv, norm), 0.3)
    x = torch.randn(2, 3, 5, 6)
    run = Plan(capture(model, x))
    assert [step.kind.name for step in run.network.steps] == ["PRODUCT", "PRODUCT"]
    same(run(x), model(x).detach())


@built
@every_network
def test_copies_and_pickles(name):
    model, x = example(name, 3)
    run = Plan(capture(model, x), lanes())
    expected = run(x)
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert torch.equal(again(x), expected)
        assert again.network is not run.network


@built
def test_a_pickle_from_a_machine_of_other_lanes(monkeypatch):
    model, x = example("lenet-5-caffe", 64)
    run = Plan(capture(model, x))
    run.images = 3 * lanes() // 2  # as many as no register here holds
    again = pickle.loads(pickle.dumps(run))
    same(again(x), model(x).detach())
    monkeypatch.setattr(kernels, "available", lambda: False)
    again = pickle.loads(pickle.dumps(run))
    assert again.attempt(x) is None
    with pytest.raises(sparsevd.SparseVDError, match="compiled kernels"):
        again(x)


@built
def test_nan_passes_through_the_pools():
    model = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2))
    x = torch.randn(1, 1, 8, 12)
    x[0, 0, 1, 2] = float("nan")
    for images in (1, lanes()):
        ours = Plan(capture(model, torch.zeros(1, 1, 8, 12)), images)(x)
        assert torch.equal(ours.isnan(), model(x).isnan())


@built
def test_mistakes_are_named():
    run = sparsevd.plan(nn.Linear(3, 2), torch.randn(1, 3))
    with pytest.raises(sparsevd.SparseVDError, match=r"\[batch, 3\], not \(2, 4\)"):
        run(torch.randn(2, 4))
    with pytest.raises(sparsevd.SparseVDError, match="float64"):
        run(torch.randn(2, 3, dtype=torch.float64))
    assert run(torch.empty(0, 3)).shape == (0, 2)
    for layers in ([nn.Linear(3, 2), nn.GELU()], [nn.Linear(3, 2), nn.Softmax(1)]):
        with pytest.raises(GraphError, match="sparsevd.accelerate"):
            sparsevd.plan(nn.Sequential(*layers), torch.randn(1, 3))


FLAGS = ["-Wall", "-Wextra", "-Werror"]


def compiled(source, *flags):
    program = source.with_suffix(".out")
    command = ["cc", *FLAGS, *flags, f"-D{source.stem.upper()}_SELF_TEST", str(source), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return subprocess.run([program], capture_output=True, text=True, check=False)


@compiler
@pytest.mark.parametrize("name", ["lenet-5-caffe", "everything"])
def test_c_file_is_clean_and_gives_the_same(name, tmp_path):
    source, header = export_c(*example(name), tmp_path / "net.c")
    checks = ["-std=gnu99", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    for flags in [checks] if name == "everything" else [checks, ["-std=c99", "-O1"]]:
        result = compiled(source, *flags)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "malloc" not in source.read_text()
    assert header.read_text().count("\n") < 30


@compiler
def test_c_self_test_can_fail(tmp_path):
    source, _ = export_c(*example("lenet-300-100"), tmp_path / "net.c")
    text = source.read_text()
    start = text.index("test_output[] = {") + len("test_output[] = {")
    source.write_text(text[:start] + " 9e9f," + text[start:])
    assert compiled(source, "-std=c99", "-O0").returncode == 1


@compiler
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-gcc") is None or shutil.which("qemu-aarch64") is None, reason="no emulator"
)
def test_c_file_on_neon(tmp_path):
    source, _ = export_c(*example("everything"), tmp_path / "net.c")
    program = tmp_path / "net"
    command = ["aarch64-linux-gnu-gcc", "-std=c99", *FLAGS, "-O0", "-static", "-DNET_SELF_TEST", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    assert subprocess.run(["qemu-aarch64", program], check=False).returncode == 0
