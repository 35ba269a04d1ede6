"""README and pages keep their word: every block of code is run or checked, every link, name and command exists."""

import importlib
import importlib.util
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sparsevd
from sparsevd.moved import MOVED

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "experiments/*.md")
    for path in ROOT.glob(pattern)
)
# Here blocks follow each other, as a reader types them, and what they print stands below them.
STORIES = [name for name in DOCUMENTS if name.startswith("docs/tutorials/") or name == "docs/index.md"]
LONG = os.environ.get("SPARSEVD_LONG") == "1"


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language."""
    text = text_of(document)
    found = [
        Block(match[1], match[2], text[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]
    return [block for block in found if language in (None, block.language)]


def prose(document: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What makes a block true: python is run, bash is checked word by word, eval-rst names what Sphinx describes. Text is
# what programs print (in a story it is compared), or a layout; bibtex is for other programs.
RULES = {"python", "bash", "{eval-rst}", "text", "bibtex"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_has_a_rule(document):
    for block in blocks(document):
        assert block.language in RULES, f"{document}:{block.line}: no rule for a block of {block.language!r}"
    assert text_of(document).count("\n```") % 2 == 0, "a block is not closed"
    before = ""
    for line in prose(document).splitlines():
        assert not (line.startswith("    ") and not before.strip()), f"give this block a language: {line}"
        before = line


def test_readme_is_short():
    """The page of a project, not its ledger: numbers belong on the pages it leads to."""
    assert len(text_of("README.md").split()) <= 800
    (block,) = blocks("README.md", "python")
    assert len([line for line in block.code.splitlines() if line.strip()]) <= 10


@pytest.fixture
def small_data(monkeypatch, tmp_path):
    """Random data of MNIST's shape instead of MNIST, and a folder to write to."""
    images, labels = torch.rand(300, 1, 28, 28), torch.randint(0, 10, (300,))
    splits = type("Splits", (), {"train": (images, labels), "test": (images, labels)})
    monkeypatch.setattr("sparsevd.zoo.datasets.load", lambda name: splits)
    monkeypatch.chdir(tmp_path)


def run(block: Block, document: str, names: dict[str, object], epochs: int | None) -> None:
    code = block.code if epochs is None else re.sub(r"(epochs ?= ?)\d+", rf"\g<1>{epochs}", block.code)
    exec(compile("\n" * block.line + code, document, "exec"), names)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own, as the next ones
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in STORIES and blocks(name, "python")])
def test_code_in_documents_runs(document, small_data, capsys):
    """Each block by itself, on random data; where it trains for 40 epochs, for one."""
    for block in blocks(document, "python"):
        if block.code.startswith("# torchrun"):
            continue  # test_distributed.py runs these
        epochs = 1 if "epochs=40" in block.code else None
        run(block, document, {"__name__": "__main__"}, epochs)
    shown = capsys.readouterr().out
    assert shown
    if document == "README.md":
        assert "fewer weights" in shown


def words(printed: str) -> list[str]:
    """What was printed, whatever its numbers, the width of its columns and its rules."""
    return re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "0", printed.replace("─", "")).split()


def stories(document: str) -> list[tuple[Block, Block | None]]:
    """Each block of Python with the text that it prints, which follows it."""
    found = blocks(document)
    after = [*found[1:], None]
    pairs = [(block, next_one) for block, next_one in zip(found, after, strict=True) if block.language == "python"]
    return [(block, shown if shown and shown.language == "text" else None) for block, shown in pairs]


@pytest.mark.filterwarnings("ignore::sparsevd.SparseVDWarning" if not LONG else "default")  # too few epochs
@pytest.mark.parametrize("document", STORIES)
def test_tutorials_run(document, small_data, capsys, one_thread):
    """From top to bottom. In two epochs for `make test`; as they are, with what they print, for `make test-all`."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block, shown in stories(document):
        run(block, document, names, None if LONG else 2)
        printed = capsys.readouterr().out
        assert bool(printed) == (shown is not None), f"{document}:{block.line}: what it prints stands below it"
        if LONG and shown is not None:
            assert words(printed) == words(shown.code), f"{document}:{shown.line}"


def test_readme_says_how_to_start():
    lines = "\n".join(block.code for block in blocks("README.md", "bash"))
    assert {"demo", "test"} <= set(re.findall(r"^make (\w+)", lines, re.MULTILINE))


def check_make(rest: str) -> None:
    target = rest.split()[0]
    assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE), f"make {target}"


def check_sparsevd(rest: str) -> None:
    from typer.testing import CliRunner

    from sparsevd.cli import app

    name = rest.split()[0]
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0, name
    for option in re.findall(r"(?<!\S)--[\w-]+", rest):
        assert option in shown.output, (name, option)


def check_python(rest: str) -> None:
    script, *arguments = rest.split()
    assert (ROOT / script).exists(), script
    for option in (each for each in arguments if each.startswith("--")):
        assert f'"{option}"' in text_of(script), (script, option)


def check_torchrun(rest: str) -> None:
    started = re.fullmatch(r"--nproc-per-node \d+ (?:-m sparsevd (?P<command>.*)|train\.py)", rest)
    assert started, rest
    if started["command"]:
        check_sparsevd(started["command"])


def check_pip(rest: str) -> None:
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    installed = re.fullmatch(r'install --constraint (\S+) "?\.(?:\[([\w,]+)\])?"?', rest)
    assert installed, f"pip {rest}: every install names the constraints"
    assert (ROOT / installed[1]).exists()
    assert set((installed[2] or "").split(",")) - {""} <= set(extras)


COMMANDS = {
    "make": check_make,
    "sparsevd": check_sparsevd,
    ".venv/bin/sparsevd": check_sparsevd,
    "python": check_python,
    "torchrun": check_torchrun,
    "pip": check_pip,
}


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks(name, "bash")])
def test_commands_in_blocks_exist(document):
    """Every line, its target or command, its options, its script."""
    for block in blocks(document, "bash"):
        for line in block.code.splitlines():
            command, _, rest = re.sub(r"(^|\s)#.*", "", line).strip().partition(" ")
            assert not line.strip() or command in COMMANDS, f"{document}:{block.line}: no rule for {line!r}"
            if command:
                COMMANDS[command](rest.strip())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_sentences_exist(document):
    """`make demo`, `sparsevd info`, `python experiments/table1.py run`: what begins like a command is one."""
    found = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(document))
    for text in found:
        command, _, rest = text.partition(" ")
        if command in ("make", "sparsevd", "python") and re.match(r"[a-z]", rest):
            COMMANDS[command](rest)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_documents_exist(document):
    """`sparsevd.zoo.models` is somewhere. A name of the first edition is an error here."""
    for dotted in set(re.findall(r"(?<![\w/])sparsevd((?:\.\w+)+)", text_of(document))):
        found, place = importlib.import_module("sparsevd"), "sparsevd"
        for part in dotted[1:].split("."):
            place = f"{place}.{part}"
            assert place not in MOVED, f"{place} is now {MOVED[place][0]}"
            if not hasattr(found, part):
                importlib.import_module(place)
            found = getattr(found, part)


def test_readme_has_no_placeholders():
    assert not re.search(r"RESULT|TODO|XXX", text_of("README.md"))


def anchors(document: str) -> set[str]:
    """The names that a page's headings have in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if target.startswith("https://"):
            continue
        page, _, anchor = target.partition("#")
        path = ((ROOT / document).parent / page if page else ROOT / document).resolve()
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.relative_to(ROOT).as_posix()), target


def test_every_page_is_in_the_navigation():
    navigation = module_at(ROOT / "docs" / "_site" / "navigation.py")
    listed = [page for pages in navigation.NAVIGATION.values() for page in pages]
    assert len(set(listed)) == len(listed)
    pages = {name.removesuffix(".md") for name in DOCUMENTS} - {"README", navigation.FIRST_PAGE}
    assert set(listed) == pages, "a page needs a line in docs/_site/navigation.py"


def test_every_public_name_is_described():
    described = "".join(block.code for name in DOCUMENTS for block in blocks(name, "{eval-rst}"))
    public = [f"sparsevd.{name}" for name in sparsevd.__all__]
    public += [f"sparsevd.linear_model.{name}" for name in importlib.import_module("sparsevd.linear_model").__all__]
    missing = [name for name in public if not re.search(rf":: {re.escape(name)}$", described, re.MULTILINE)]
    assert not missing, "docs/api says nothing of them"
    from sparsevd.baselines import METHODS

    assert all(re.search(rf"\.{method.__name__}$", described, re.MULTILINE) for method in METHODS.values())


def test_the_page_of_runtimes_shows_its_record():
    zeros = module_at(ROOT / "benchmarks" / "zeros.py")
    record = json.loads(zeros.RESULTS.read_text(encoding="utf-8"))
    assert zeros.tables(record) in text_of("docs/deployment.md"), "python benchmarks/zeros.py tables prints them"
