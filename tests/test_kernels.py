"""Every kernel against its twin in `functional`, on every instruction set that this machine has."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import sparsevd
from sparsevd import kernels
from sparsevd.errors import SparseVDWarning
from sparsevd.kernels import loading, structs
from sparsevd.kernels.steps import StepKind
from sparsevd.posterior import equations
from sparsevd.posterior.divergence import summed_kl

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
every_set = pytest.mark.parametrize("instruction_set", kernels.instruction_sets(), ids=lambda one: one.name)
FOLDER = Path(kernels.__file__).parent
SIZES = [1, 3, 4, 7, 16, 63, 64, 65, 100, 4095, 4096, 4097, 20_000]


def weights(n):
    theta = 0.1 * torch.randn(n)
    log_sigma2 = 2 * theta.abs().log() + 60 * (torch.rand(n) - 0.5)
    if n > 50:
        theta[:6] = torch.tensor([0.0, -0.0, 1e-45, 1e-39, -1e-37, 1e3])
        log_sigma2[:6] = -10.0
    return theta, log_sigma2


@built
@every_set
@pytest.mark.parametrize("n", SIZES)
def test_kl_and_gradients_equal_the_twin(instruction_set, n):
    theta, log_sigma2 = weights(n)
    value, grad_theta, grad_log_sigma2 = kernels.kl_with_gradients(theta, log_sigma2, instruction_set)
    wide = [tensor.double().requires_grad_() for tensor in (theta, log_sigma2)]
    # In double the twin goes on below the smallest float32, where the kernel takes the limit.
    with torch.no_grad():
        wide[0][wide[0].abs() < torch.finfo(torch.float32).tiny] = 0.0
    expected = equations.kl(*wide)
    expected.backward()
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_log_sigma2.double(), wide[1].grad, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(grad_theta.double(), wide[0].grad, rtol=5e-5, atol=1e-6)


@built
@every_set
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(instruction_set, bad):
    """A loss of a user's own must show it, as the twin does."""
    one = torch.ones(20)
    one[7] = bad
    value, _, _ = kernels.kl_with_gradients(one, torch.zeros(20), instruction_set)
    twin = equations.kl(one, torch.zeros(20))
    assert value == twin or (value.isnan() and twin.isnan())
    if bad != bad:
        assert kernels.kl_with_gradients(torch.ones(20), one, instruction_set)[0].isnan()
        gamma = torch.ones(20)
        kernels.sample_(gamma, one, 1, None, instruction_set)
        assert gamma[7].isnan()


def test_tensors_without_memory_take_the_other_way():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = sparsevd.sparsify(nn.Linear(3, 2))
    with torch.device("meta"):
        assert sparsevd.kl(layer).isfinite()
        assert layer(torch.ones(2, 3, device="cpu")).shape == (2, 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(layer.weight.detach())
        assert summed_kl([(fake, fake)]).shape == ()


@built
@every_set
@pytest.mark.parametrize("n", SIZES)
def test_noise_equals_the_twin_with_the_same_epsilon(instruction_set, n):
    gamma, delta = torch.randn(n), torch.rand(n)
    delta[:: max(1, n // 5)] = 0.0
    epsilon = torch.empty(n)
    out, slope = gamma.clone(), delta.clone()
    kernels.sample_(out, slope, 42, epsilon, instruction_set)
    delta.requires_grad_()
    expected = equations.noisy_output(gamma, delta, epsilon)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-6, atol=1e-6)
    grad = torch.randn(n)
    expected.backward(grad)
    torch.testing.assert_close(grad * slope, delta.grad, rtol=1e-5, atol=1e-7)


@built
@every_set
@pytest.mark.parametrize("n", SIZES)
def test_variance_equals_the_exponential(instruction_set, n):
    log_sigma2 = 180 * (torch.rand(n) - 0.5)
    sigma2 = kernels.variance(log_sigma2, torch.float32, instruction_set)
    expected = torch.exp(log_sigma2)
    expected[log_sigma2 < -87] = 0  # no normal number any more
    torch.testing.assert_close(sigma2, expected, rtol=3e-7, atol=0)
    assert torch.equal(kernels.variance(log_sigma2, torch.bfloat16, instruction_set), sigma2.bfloat16())
    grad = torch.randn(n)
    scaled = grad.clone()
    kernels.times_variance_(scaled, log_sigma2, instruction_set)
    assert torch.equal(scaled, grad * sigma2)


@built
@every_set
def test_variance_of_what_is_not_finite(instruction_set):
    log_sigma2 = torch.tensor([float("nan"), float("inf"), -float("inf"), 88.7, 89.5, -60.0])
    expected = torch.exp(log_sigma2)
    torch.testing.assert_close(
        kernels.variance(log_sigma2, torch.float32, instruction_set), expected, equal_nan=True, rtol=3e-7, atol=0
    )


def epsilon_of(seed, n, instruction_set=kernels.BEST):
    epsilon = torch.empty(n)
    kernels.sample_(torch.zeros(n), torch.ones(n), seed, epsilon, instruction_set)
    return epsilon


@built
def test_noise_is_standard_normal_and_uncorrelated():
    epsilon = epsilon_of(7, 1_000_000).double().numpy()
    assert stats.kstest(epsilon, "norm").pvalue > 1e-3
    assert abs(epsilon.mean()) < 4e-3
    assert stats.kurtosis(epsilon) == pytest.approx(0, abs=0.02)
    for lag in (1, 2, 16, 32, 48, 64):
        assert abs(np.corrcoef(epsilon[:-lag], epsilon[lag:])[0, 1]) < 4e-3
    other = epsilon_of(8, 1_000_000).double().numpy()
    assert abs(np.corrcoef(epsilon, other)[0, 1]) < 4e-3


def threefry(counter, key):
    """Threefry-4x32-20 in plain Python integers, after the description in the paper of Salmon et al."""
    mask = 2**32 - 1
    rotations = [(10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)]
    schedule = [*key, 0x1BD11BDA]
    for word in key:
        schedule[4] ^= word
    x = [(c + k) & mask for c, k in zip(counter, key, strict=True)]
    for r in range(20):
        first, second = (1, 3) if r % 2 == 0 else (3, 1)
        for target, source, turn in ((0, first, rotations[r % 8][0]), (2, second, rotations[r % 8][1])):
            x[target] = (x[target] + x[source]) & mask
            x[source] = ((x[source] << turn | x[source] >> (32 - turn)) & mask) ^ x[target]
        if r % 4 == 3:
            s = r // 4 + 1
            x = [(x[i] + schedule[(s + i) % 5] + (s if i == 3 else 0)) & mask for i in range(4)]
    return x


def test_reference_generator_gives_the_published_numbers():
    """Known answers for zero and for all-ones input, published with the generator's reference code."""
    assert [f"{word:08x}" for word in threefry([0] * 4, [0] * 4)] == ["9c6ca96a", "e17eae66", "fc10ecd4", "5256a7d8"]
    ones = [2**32 - 1] * 4
    assert [f"{word:08x}" for word in threefry(ones, ones)] == ["2a881696", "57012287", "f6c7446e", "a16a6732"]


@built
@every_set
def test_noise_comes_from_the_documented_counters(instruction_set):
    """Number 16·w + l of block b is made from word w of counter 16·b + l, by Box and Muller."""
    seed = 0x0123456789ABCDEF
    epsilon = epsilon_of(seed, 256, instruction_set).double().numpy()
    key = [seed & (2**32 - 1), seed >> 32, 0, 0]
    for block in range(4):
        for lane in range(16):
            words = threefry([16 * block + lane, 0, 0, 0], key)
            for pair in (0, 2):
                radius = np.sqrt(-2 * np.log(((words[pair] >> 8) + 1) / 2**24))
                angle = 2 * np.pi * (words[pair + 1] >> 8) / 2**24
                start = 64 * block + lane
                assert epsilon[start + 16 * pair] == pytest.approx(radius * np.cos(angle), abs=2e-6)
                assert epsilon[start + 16 * (pair + 1)] == pytest.approx(radius * np.sin(angle), abs=2e-6)


@built
def test_threads_change_nothing():
    theta, log_sigma2 = weights(50_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([epsilon_of(3, 50_000), *kernels.kl_with_gradients(theta, log_sigma2)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@built
def test_autograd_passes_through_the_kernels():
    """The same loss through kernels and through the twin with the noise the kernel used."""
    layer = sparsevd.sparsify(nn.Linear(30, 20), initial_log_sigma2=-4.0)
    x = torch.randn(16, 30, requires_grad=True)
    torch.manual_seed(11)
    seed = kernels.fresh_seed()
    torch.manual_seed(11)
    loss = layer(x).square().sum() + sparsevd.kl(layer)
    ours = torch.autograd.grad(loss, [x, *layer.parameters()])
    gamma = nn.functional.linear(x, layer.weight, layer.bias)
    delta = nn.functional.linear(x.square(), layer.log_sigma2.exp())
    epsilon = epsilon_of(seed, gamma.numel()).view_as(gamma)
    twin = equations.noisy_output(gamma, delta, epsilon).square().sum()
    twin = twin + equations.kl(layer.weight, layer.log_sigma2)
    theirs = torch.autograd.grad(twin, [x, *layer.parameters()])
    torch.testing.assert_close(loss, twin)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_without_kernels_everything_works(tmp_path):
    """The fallback trains the same model, and one line says what is missing; a process that never saw the library."""
    code = """
import torch, sparsevd
from torch import nn
from sparsevd import kernels
from sparsevd.kernels import loading
kernels.library.cache_clear()
loading.BUILT = loading.BUILT.with_name("nothing")
assert not kernels.available()
x = torch.randn(200, 4); y = (x[:, 0] > 0).long()
history = sparsevd.fit(sparsevd.sparsify(nn.Linear(4, 2)), (x, y), None, sparsevd.FitConfig(epochs=2), progress=False)
print(len(history))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "2"
    assert result.stderr.count("this installation has no C kernels") == 1


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_kernels_are_clean_under_the_sanitisers(tmp_path):
    sources = sorted(str(path) for path in FOLDER.glob("*.c"))
    program = tmp_path / "check"
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    options = ["-std=gnu11", "-O0", "-g", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", f"-I{FOLDER}"]
    trivial = tmp_path / "trivial.c"
    trivial.write_text("int main(void) { return 0; }")
    trial = ["cc", *options, *checks, str(trivial), "-o", str(tmp_path / "trivial")]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("this compiler has no OpenMP or no sanitisers")
    source = Path(__file__).parent / "kernels_under_sanitisers.c"
    subprocess.run(["cc", *options, *checks, *sources, str(source), "-o", str(program), "-lm"], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) > 400


def enumerated(header, name):
    """The words of an enum in C, in their order."""
    (words,) = re.findall(rf"enum {name} \{{(.*?)\}}", (FOLDER / header).read_text(encoding="utf-8"), re.DOTALL)
    return re.findall(r"\w+", words)


def test_python_and_c_spell_the_same_kinds():
    sets = [one.name for one in kernels.InstructionSet]
    assert [*sets, "INSTRUCTION_SETS"] == enumerated("kernels.h", "instruction_set")
    assert list(kernels.InstructionSet) == list(range(len(sets)))
    assert [kind.name for kind in StepKind] == enumerated("inference.h", "step_kind")


def fields(struct):
    """Name and type of every field of a struct in C, in their order; a pointer is one whatever it points to."""
    text = "".join((FOLDER / header).read_text(encoding="utf-8") for header in ("kernels.h", "inference.h", "plan.h"))
    (body,) = re.findall(rf"^struct {struct} {{\n(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    for declaration in re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";")[:-1]:
        kind, *names = re.sub(r"^\s*(const )?(struct )?", "", declaration).replace("*", " * ").split(None, 1)
        for name in names[0].split(","):
            yield name.strip(" *"), "pointer" if "*" in name else kind


C_TYPES = {
    ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_float: "float",
    ctypes.c_void_p: "pointer", structs.ValueStruct: "value",
}  # fmt: skip


@pytest.mark.parametrize("name", structs.STRUCTS)
def test_python_and_c_have_the_same_fields(name):
    assert [(field, C_TYPES[kind]) for field, kind in structs.STRUCTS[name]._fields_] == list(fields(name))


@built
@pytest.mark.parametrize("name", [*structs.STRUCTS, "unknown"])
def test_a_library_with_other_structs_is_refused(name, monkeypatch):
    """Sizes and the places of the last fields are compared when it is loaded."""
    before = structs.STRUCTS.get(name, ctypes.Structure)
    last = {"_fields_": [("one_more", ctypes.c_void_p)]}
    monkeypatch.setitem(structs.STRUCTS, name, type(before.__name__, (before,), last))
    with pytest.warns(SparseVDWarning, match=rf"struct {name} has .* in C, .* in Python. Install a wheel"):
        assert loading.library.__wrapped__() is None


@built
@pytest.mark.parametrize("content", [b"no library", None])
def test_a_library_that_does_not_load_is_named(content, monkeypatch, tmp_path):
    path = tmp_path / "_kernels.so"
    if content:
        path.write_bytes(content)
    monkeypatch.setenv("SPARSEVD_KERNELS", str(path))
    with pytest.warns(SparseVDWarning, match=re.escape(str(path))):
        assert loading.library.__wrapped__() is None


@built
def test_the_best_instruction_set_is_the_widest():
    widths = [kernels.lanes(one) for one in kernels.instruction_sets()]
    assert kernels.lanes() == max(widths)
    assert kernels.InstructionSet.GENERIC in kernels.instruction_sets()
    assert [kernels.lanes(number) for number in (-1, len(kernels.InstructionSet), 99)] == [0, 0, 0]
