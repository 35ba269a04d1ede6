"""What `sparsevd doctor` finds, and what it says of it; the faults are provoked one by one."""

import json
import warnings

import pytest
from typer.testing import CliRunner

from sparsevd import kernels
from sparsevd.cli import app
from sparsevd.kernels import loading, openmp
from sparsevd.runs import doctor
from sparsevd.zoo import datasets

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")


def finding(name, **arguments):
    (found,) = [each for each in doctor.examine(**arguments).findings if each.name == name]
    return found


@pytest.fixture
def unloaded():
    """The kernels are looked for anew, in the test and after it."""
    loading.library.cache_clear()
    loading.lanes.cache_clear()
    yield
    loading.library.cache_clear()
    loading.lanes.cache_clear()


def test_a_healthy_installation():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["healthy"]
    states = {each["name"]: each["state"] for each in said["findings"]}
    assert {"sparsevd", "python", "torch", "kernels", "bfloat16", "threads", "openmp", "data mnist"} <= states.keys()
    assert states["torch"] == "ok"
    assert states["data mnist"] == "note"  # no test has data
    assert "extra onnx" in states
    assert not {"extra test", "extra package"} & states.keys()
    assert "all that sparsevd needs is here" in CliRunner().invoke(app, ["doctor"]).output


def test_kernels_that_were_not_built_are_a_note(unloaded, monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSEVD_KERNELS", raising=False)
    monkeypatch.setattr(loading, "BUILT", tmp_path / "nothing")
    found = finding("kernels")
    assert found.state == "note"
    assert "C compiler" in found.advice
    loading.library.cache_clear()
    with pytest.warns(match="this installation has no C kernels: everything works"):
        assert not kernels.available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.available()  # said once


def test_kernels_that_do_not_load_are_a_problem(unloaded, monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSEVD_KERNELS", raising=False)
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(loading, "BUILT", tmp_path / "broken.so")
    found = finding("kernels")
    assert found.state == "problem"
    assert "broken.so" in found.found
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_kernels_may_be_switched_off(unloaded, monkeypatch):
    monkeypatch.setenv("SPARSEVD_KERNELS", "0")
    assert finding("kernels").state == "note"


@built
def test_kernels_that_compute_something_else_are_a_problem(monkeypatch):
    right = kernels.kl_with_gradients
    monkeypatch.setattr(kernels, "kl_with_gradients", lambda *pair: tuple(2 * each for each in right(*pair)))
    assert finding("kernels").state == "problem"


@built
def test_torch_and_the_kernels_share_one_runtime():
    assert openmp.of_torch() is not None
    assert openmp.of_torch() == openmp.of_kernels()
    assert finding("openmp").state in ("ok", "note")  # another library of the tests may have brought its own


@built
@pytest.mark.parametrize(
    ("loaded", "ours", "state"),
    [(None, "a", "ok"), (["a"], "a", "ok"), (["a", "b"], "a", "note"), (["a", "b"], "b", "problem")],
)
def test_two_runtimes_are_noticed(loaded, ours, state, monkeypatch, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    monkeypatch.setattr(openmp, "loaded", lambda: loaded)
    monkeypatch.setattr(openmp, "of_torch", lambda: str(tmp_path / "a"))
    monkeypatch.setattr(openmp, "of_kernels", lambda: str(tmp_path / ours))
    assert finding("openmp").state == state


def test_packages_too_old_or_missing(monkeypatch):
    needed = ["torch>=99.1", "nowhere>=2; extra == 'sklearn'", 'numpy>=1.26; python_version > "3" and extra == "onnx"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    found = {each.name: each for each in doctor.examine().findings}
    assert found["torch"].state == "problem"
    assert found["torch"].advice == "Install torch>=99.1"
    assert found["extra sklearn"].state == "note"
    assert "nowhere>=2" in found["extra sklearn"].advice
    assert found["extra onnx"].state == "ok"


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(doctor, "cores_of_this_process", lambda: 0)
    assert finding("threads").state == "note"


def test_data_that_is_there_damaged_or_lost(monkeypatch, tmp_path):
    assert finding("data", data_dir=tmp_path / "nowhere").state == "problem"
    monkeypatch.setattr(datasets, "find", lambda folder, dataset: {"file": b""} if folder == tmp_path else None)
    assert finding("data mnist", data_dir=tmp_path).state == "ok"
    monkeypatch.undo()
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(b"")
    found = finding("data mnist", data_dir=tmp_path)
    assert found.state == "problem"
    assert "remove or replace it" in found.found
