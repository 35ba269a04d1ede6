"""Rules the whole project keeps: the order of imports, a light import, built kernels."""

import ast
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sparsevd import kernels

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sparsevd"

# Each module may import those above it in this list, so data never flows back along a model's way.
ORDER = [
    "errors",
    "files",
    "kernels",
    "posterior",
    "layers",
    "conversion",
    "reporting",
    "graph",
    "runtime",
    "modelfile",
    "training",
    "integrations",
    "baselines",
    "linear_model",
    "zoo",
    "runs",
    "moved",
    "cli_options",
    "cli_misspelling",
    "cli_help",
    "cli",
]


def files_of(name: str) -> list[Path]:
    """A module is a file, or a folder of files."""
    return [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else list((PACKAGE / name).glob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module == "sparsevd":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sparsevd."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sparsevd.")}
    return found


def test_every_module_has_its_place():
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert set(ORDER) == modules - {"__init__", "__main__"}


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name):
    allowed = {*ORDER[: ORDER.index(name)], name}
    for path in files_of(name):
        assert imports_of(path) <= allowed


def test_import_is_light():
    """torch and numpy at import; command line, progress bars and file formats only where they are used."""
    code = "import sys, sparsevd; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {
        "typer",
        "rich",
        "safetensors",
        "matplotlib",
        "scipy",
        "sklearn",
        "hypothesis",
        "lightning",
        "transformers",
    } & set(loaded)


def test_the_library_knows_no_options():
    """Its errors name arguments; only the command line speaks of --options."""
    spoken = {
        (path.name, node.value)
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("cli") and path.name not in ("wheels.py", "loading.py")  # they name other commands
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"(?<!\w)--[a-z]", node.value)
    }
    assert not spoken


def compiler() -> str | None:
    """What builds the kernels: the compiler that is asked for, Python's own, or the system's."""
    names = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    return next((name for name in names if name and shutil.which(name.split()[0])), None)


@pytest.mark.skipif(compiler() is None, reason="no C compiler on the PATH: the kernels cannot be built")
@pytest.mark.skipif("SPARSEVD_KERNELS" in os.environ, reason="SPARSEVD_KERNELS chooses other kernels, or none")
def test_kernels_are_built_from_these_sources():
    """Else all their tests would be skipped, or would test other kernels, and all would look well."""
    again = f"{compiler()} is here; see why with: python setup.py build_ext --inplace --force"
    library = kernels.library()
    assert library is not None, f"the kernels were not built, or lack a function. {again}"
    files = sorted((PACKAGE / "kernels").glob("*.[ch]"))
    declared = {name for path in files for name in re.findall(r"\b(sparsevd_\w+)\(", path.read_text(encoding="utf-8"))}
    missing = [name for name in sorted(declared) if not exported(library, name)]
    assert not missing, f"the kernels lack {', '.join(missing)}. {again}"
    library.sparsevd_sources.restype = ctypes.c_char_p
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert library.sparsevd_sources().decode() == digest, f"the kernels were built from other sources. {again}"


def exported(library: ctypes.CDLL, name: str) -> bool:
    try:
        library[name]
    except AttributeError:
        return False
    return True
