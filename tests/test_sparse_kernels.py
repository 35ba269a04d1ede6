"""The sparse inference kernels against torch, over odd shapes, on every instruction set that this machine has."""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparsevd import kernels
from sparsevd.kernels.inference import Geometry, SparseProduct

SETS = st.sampled_from(kernels.instruction_sets() or [kernels.BEST])
pytestmark = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
INFINITY = float("inf")


def weight_with_zeros(zeros, *shape):
    weight = torch.randn(shape)
    return weight * (torch.rand(shape) >= zeros)


def agrees(ours, expected, weight):
    """To the rounding of sums of this many products."""
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=3e-6 * max(1, weight[0].numel()) ** 0.5)


small = st.integers(1, 3)
zeros_of = st.sampled_from([0.0, 0.5, 0.9, 0.98, 1.0])


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    channels=st.integers(1, 9),
    outputs=st.integers(1, 20),
    groups=st.sampled_from([1, 1, 2, 3]),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(small, small),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.tuples(small, small),
    size=st.tuples(st.integers(1, 36), st.integers(1, 36)),
    batch=st.integers(1, 19),
    vectors=st.integers(0, 3),
    zeros=zeros_of,
    bias=st.booleans(),
    bounds=st.sampled_from([(-INFINITY, INFINITY), (0.0, INFINITY), (0.0, 6.0), (-1.0, 1.0)]),
    threads=st.integers(1, 3),
    instruction_set=SETS,
)
def test_convolution_equals_torch(
    channels, outputs, groups, kernel, stride, padding, dilation, size, batch, vectors, zeros, bias, bounds, threads,
    instruction_set,
):  # fmt: skip
    top, bottom, left, right = padding
    assume(size[0] + top + bottom > dilation[0] * (kernel[0] - 1))
    assume(size[1] + left + right > dilation[1] * (kernel[1] - 1))
    torch.manual_seed(0)
    weight = weight_with_zeros(zeros, outputs * groups, channels, *kernel)
    b = torch.randn(outputs * groups) if bias else None
    x = torch.randn(batch, channels * groups, *size)
    expected = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, b, stride, 0, dilation, groups).clamp(*bounds)
    images = vectors * kernels.lanes(instruction_set) or 1
    geometry = Geometry(stride, padding, dilation, groups)
    layer = SparseProduct(weight, b, geometry, size, batch, images, *bounds, instruction_set=instruction_set)
    agrees(layer(x, expected.shape, threads), expected, weight)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    features=st.integers(1, 100),
    outputs=st.integers(1, 100),
    batch=st.integers(1, 120),
    vectors=st.integers(0, 12),
    zeros=zeros_of,
    threads=st.integers(1, 3),
    instruction_set=SETS,
)
def test_linear_equals_torch(features, outputs, batch, vectors, zeros, threads, instruction_set):
    torch.manual_seed(0)
    weight, bias, x = weight_with_zeros(zeros, outputs, features), torch.randn(outputs), torch.randn(batch, features)
    images = vectors * kernels.lanes(instruction_set) or 1
    layer = SparseProduct(weight, bias, Geometry(), (1, 1), batch, images, instruction_set=instruction_set)
    agrees(layer(x, (batch, outputs), threads), F.linear(x, weight, bias), weight)


@pytest.mark.parametrize("images", [1, 16])
def test_large_layers(images):
    """Many tiles, wide rows, more channels than a strip."""
    for weight, size in (
        (weight_with_zeros(0.98, 70, 90, 3, 3), (45, 97)),
        (weight_with_zeros(0.9, 40, 33, 7, 1), (200, 3)),
        (weight_with_zeros(0.98, 130, 200, 1, 1), (14, 14)),
    ):
        x = torch.randn(3, weight.shape[1], *size)
        layer = SparseProduct(weight, None, Geometry(), size, 3, images)
        expected = F.conv2d(x, weight)
        agrees(layer(x, expected.shape, 2), expected, weight)


@pytest.mark.parametrize("images", [1, 16])
def test_threads_change_nothing(images):
    weight, x = weight_with_zeros(0.9, 30, 20, 3, 3), torch.randn(5, 20, 9, 9)
    layer = SparseProduct(weight, torch.randn(30), Geometry(padding=(1, 1, 1, 1)), (9, 9), 5, images)
    one, two, many = (layer(x, (5, 30, 9, 9), threads) for threads in (1, 2, 7))
    assert torch.equal(one, two)
    assert torch.equal(one, many)


def test_nan_is_not_hidden_by_the_activation():
    weight, x = torch.ones(3, 2), torch.full((1, 2), float("nan"))
    for images in (1, 16):
        assert SparseProduct(weight, None, Geometry(), (1, 1), 1, images, 0.0, 6.0)(x, (1, 3)).isnan().all()


def test_several_threads_may_call_one_layer():
    weight = weight_with_zeros(0.8, 40, 30, 3, 3)
    layer = SparseProduct(weight, None, Geometry(), (12, 12), 20)
    inputs = torch.randn(8, 20, 30, 12, 12)
    expected = [F.conv2d(x, weight) for x in inputs]
    results = [None] * len(inputs)

    def work(i):
        for _ in range(10):
            results[i] = layer(inputs[i], (20, 40, 10, 10), 1 + i % 2)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for ours, theirs in zip(results, expected, strict=True):
        agrees(ours, theirs, weight)


FOLDER = Path(kernels.__file__).parent
SOURCES = [str(path) for path in sorted(FOLDER.glob("*.c"))]
OPTIONS = ["-std=gnu11", "-g", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{FOLDER}"]
PROGRAM = str(Path(__file__).parent / "sparse_under_sanitisers.c")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_kernels_are_clean_under_the_sanitisers(tmp_path):
    trivial = tmp_path / "trivial.c"
    trivial.write_text("int main(void) { return 0; }")
    checks = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    trial = ["cc", *OPTIONS, *checks, str(trivial), "-o", str(tmp_path / "trivial")]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("this compiler has no OpenMP or no sanitisers")
    program = tmp_path / "check"
    subprocess.run(["cc", *OPTIONS, *checks, *SOURCES, PROGRAM, "-o", str(program), "-lm"], check=True)
    result = subprocess.run([program, "300"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-gcc") is None or shutil.which("qemu-aarch64") is None,
    reason="no cross compiler or no emulator for AArch64",
)
def test_kernels_on_neon(tmp_path):
    program = tmp_path / "check"
    options = [*OPTIONS, "-O1", "-static"]
    subprocess.run(["aarch64-linux-gnu-gcc", *options, *SOURCES, PROGRAM, "-o", str(program), "-lm"], check=True)
    result = subprocess.run(["qemu-aarch64", program, "100"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr + result.stdout
