"""How a wheel is named and what is in it; `make wheel-test` installs one."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import sparsevd
from sparsevd import kernels
from sparsevd.kernels import loading

ROOT = Path(__file__).parent.parent
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def build(tmp_path, compiler=None, leftovers=()):
    """The wheel that a copy of the sources gives with one C file, of no kernels, so that it takes no time."""
    source = tmp_path / "source"
    (source / "src" / "sparsevd" / "kernels").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "src" / "sparsevd_command.py").touch()
    (source / "src" / "sparsevd" / "__init__.py").write_text(f'__version__ = "{sparsevd.__version__}"')
    (source / "src" / "sparsevd" / "kernels" / "__init__.py").touch()
    (source / "src" / "sparsevd" / "kernels" / "library.c").write_text("int nothing(void) { return 0; }\n")
    for left in leftovers:
        (source / left).parent.mkdir(parents=True)
        (source / left).write_bytes(b"of an earlier build")
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", "build", "bdist_wheel", "-d", str(tmp_path)]
    environment = {**os.environ, **({"CC": compiler} if compiler else {})}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_wheel_with_kernels_serves_every_python_of_its_platform(tmp_path):
    wheel = build(tmp_path)
    assert re.fullmatch(rf"sparsevd-{re.escape(sparsevd.__version__)}-py3-none-(?!any).+\.whl", wheel.name)
    assert f"sparsevd/kernels/{loading.BUILT.name}" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.long
def test_without_a_compiler_the_wheel_is_pure(tmp_path):
    """Even where an earlier build has left a library behind."""
    wheel = build(tmp_path, "/nowhere/cc", [f"build/sparsevd/kernels/{loading.BUILT.name}"])
    assert wheel.name == f"sparsevd-{sparsevd.__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.skipif(sys.platform != "linux" or not kernels.available(), reason="of the kernels on Linux")
def test_the_kernels_name_no_openmp_of_their_own():
    """So that they take the one of torch, and load where there is no other one."""
    needed = subprocess.run(["readelf", "-d", loading.BUILT], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert "omp" not in needed


def test_the_version_is_written_once_and_cited():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert f"\nversion: {sparsevd.__version__}\n" in CITATION
    assert f"## {sparsevd.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has_with_few_rights(workflow):
    text = workflow.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"run: make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "\npermissions:\n  contents: read\n" in text
    assert all(re.search(r"@v\d+$", line) for line in re.findall(r"uses: (\S+)", text))
