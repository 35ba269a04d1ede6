"""Rules the whole project keeps: the order of imports, a light import, built kernels, documentation that runs."""

import ast
import ctypes
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from sparsevd import kernels
from sparsevd.moved import MOVED

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
        if path.name not in ("cli.py", "cli_options.py", "wheels.py", "loading.py")  # two name other commands
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


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "experiments/*.md")
    for path in ROOT.glob(pattern)
)


def test_readme_is_short():
    """The page of a project, not its ledger: numbers belong on the pages it leads to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own, as the next ones
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks(ROOT / name, "python")])
def test_code_in_documents_runs(document, monkeypatch, tmp_path, capsys):
    """The examples of README and pages, on random data of MNIST's shape and for one epoch."""
    images, labels = torch.rand(300, 1, 28, 28), torch.randint(0, 10, (300,))
    splits = type("Splits", (), {"train": (images, labels), "test": (images, labels)})
    monkeypatch.setattr("sparsevd.zoo.datasets.load", lambda name: splits)
    monkeypatch.chdir(tmp_path)
    for code in blocks(ROOT / document, "python"):
        if code.startswith("# torchrun"):
            continue  # test_distributed.py runs these
        exec(compile(code.replace("epochs=40", "epochs=1"), document, "exec"), {})
    shown = capsys.readouterr().out
    assert shown
    if document == "README.md":
        assert "fewer weights" in shown


def test_readme_says_how_to_start():
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "bash")), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_exist(document):
    """In blocks and inside sentences: every target of make, every command, every option."""
    from typer.testing import CliRunner

    from sparsevd.cli import app

    text = (ROOT / document).read_text(encoding="utf-8")
    lines = "\n".join([*blocks(ROOT / document, "bash"), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", lines, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = re.findall(r"^(?:\.venv/bin/)?sparsevd (\w+)(.*)$", lines, re.MULTILINE)
    assert commands or document != "README.md"
    for name, rest in commands:
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0, name
        for option in re.findall(r"--[\w-]+", rest.partition("#")[0]):
            assert option in shown.output, (name, option)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_documents_exist(document):
    """`sparsevd.zoo.models` is somewhere. A name of the first edition is an error here."""
    for dotted in set(re.findall(r"(?<![\w/])sparsevd((?:\.\w+)+)", (ROOT / document).read_text(encoding="utf-8"))):
        found, place = importlib.import_module("sparsevd"), "sparsevd"
        for part in dotted[1:].split("."):
            place = f"{place}.{part}"
            assert place not in MOVED, f"{place} is now {MOVED[place][0]}"
            if not hasattr(found, part):
                importlib.import_module(place)
            found = getattr(found, part)


def test_readme_has_no_placeholders():
    assert not re.search(r"RESULT|TODO|XXX", (ROOT / "README.md").read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The names that a page's headings have in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        page, _, anchor = target.partition("#")
        path = (ROOT / document).parent / page if page else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target
