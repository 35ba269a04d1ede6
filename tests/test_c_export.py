"""The C file whatever the network and its layers are called: refused in a sentence, or clean and without effect.

The long form compiles and runs all names, not some: SPARSEVD_LONG=1 pytest tests/test_c_export.py
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ArgumentError, GraphError
from sparsevd.graph import capture
from sparsevd.runtime import c_names
from sparsevd.runtime.c_export import export_c

LONG = os.environ.get("SPARSEVD_LONG") == "1"
FLAGS = ["-std=gnu99", "-O0", "-Wall", "-Wextra", "-Werror"]
compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
cpp_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

# Names of the file's own kernels, constants, parameters and local variables, of libraries and of C's future.
ACCEPTED = """
    net in out load store vf vi splat steps step step_kind layer_0 test_input test_output test_result scratch
    kernels sparse_kernels sparse_layer input_layer largest difference expected off size i t k tile value nonzero
    product pack unpack pool tiles pixels add copy clear zeros clamp lanes target name row plane place slot order starts
    bias low high
    Net LeNet5 vgg16 x1 a data end begin map vector list std export_c sparsevd uint8 int32 mem str is final
    override module import error_net my_net resnet_18 SparseVD sPARSE sem_seg timers small near huge data_in
"""
REFUSED = """
    string math stdint features immintrin
    int main float double void return struct union if inline restrict bool true nullptr alignas typeof asm auto const
    class new delete template and xor this public wchar_t concept co_await linux unix i386 complex noreturn NAME TARGET
    LANES INFINITY NAN NULL EOF I A VGG16 INT _net _Net __net net__2 net_ _ __ size_t int32_t pthread_t my_t exp sqrtf
    sinl log2f32x printf abs malloc memcpy exit select read write time index y0 gamma lgamma_r strtok_r getc_unlocked
    mempcpy gettext sincos pthread_create atomic_load posix_memalign va va_copy atomic environ errno stdin assert
    net_with Net_INPUTS net_H net_SELF_TEST 9net 1 my-net my.net é naïve λ *.c {0} %s $net net# net;evil() "net
    a\\b net?? my\xa0net
"""
ACCEPTED = ACCEPTED.split()
REFUSED = [*re.split(r"[ \n]+", REFUSED.strip()), "", " ", "a b", "net\n", "a" * 64]


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    return capture(model, IMAGE)


IMAGE = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def macro(name):
    return name.upper() if name == name.lower() else name


def run(*command, **options):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_names_enough():
    assert len({*ACCEPTED, *REFUSED}) >= 60


@pytest.mark.parametrize("name", REFUSED)
def test_refused_name_comes_with_one_that_works(name, graph, tmp_path):
    with pytest.raises(ArgumentError, match=r"call the file \w+\.c$") as error:
        export_c(graph, IMAGE, f"{tmp_path}/{name}.c")
    assert list(tmp_path.iterdir()) == []
    better = re.search(r"(\w+)\.c$", str(error.value))[1]
    assert c_names.why_not(better) is None  # and it is compiled in the long form


@pytest.mark.parametrize("file", ["net", "net.h", "net.cc", "net.C", "net.c ", ".c", "net.c\n"])
def test_file_must_end_with_c(file, graph, tmp_path):
    with pytest.raises(ArgumentError, match=r"call the file (net|c)\.c"):
        export_c(graph, IMAGE, f"{tmp_path}/{file}")


def pass_their_tests(names, graph, folder):
    def passes(name):
        source, _ = export_c(graph, IMAGE, folder / f"{name}.c")
        run("cc", *FLAGS, f"-D{macro(name)}_SELF_TEST", source, "-o", folder / f"{name}.out")
        assert "largest difference" in run(folder / f"{name}.out")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(passes, names))


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_name_is_not_refused(name):
    assert c_names.why_not(name) is None


@compiler
def test_accepted_names_compile(graph, tmp_path):
    pass_their_tests(ACCEPTED if LONG else ["in", "out", "load", "steps"], graph, tmp_path)


@compiler
@pytest.mark.skipif(not LONG, reason="the long form: SPARSEVD_LONG=1")
def test_suggested_names_compile(graph, tmp_path):
    pass_their_tests(sorted({c_names.suggestion(name) for name in REFUSED}), graph, tmp_path)


def test_every_name_has_a_suggestion_that_works():
    """Names put together from those that are refused."""
    words = sorted(c_names.C_KEYWORDS | c_names.CPP_KEYWORDS | c_names.LIBRARY | c_names.FAMILIES)
    for i, word in enumerate(words):
        for name in (word, word.upper(), f"_{word}", f"{word}_with", f"{word}_{words[i - 7]}", f"{word}_" * 20):
            assert c_names.why_not(name) is None or c_names.why_not(c_names.suggestion(name)) is None


MAIN = """
{includes}
int main(void) {{
  static const float image[36] = {{1}};
  static float result[{count}][3];
{calls}
  for (int i = 1; i < {count}; i++)
    for (int j = 0; j < 3; j++)
      if (result[i][j] != result[0][j]) return 1;
  return 0;
}}
"""
TOGETHER = ["net", "Net", "load"]


def program_of(names):
    """It calls them all on the same image; a header may be included twice, and has sizes of its own."""
    includes = "".join(f'#include "{name}.h"\n#include "{name}.h"\n' for name in names)
    sizes = "".join(f"typedef char {name}_takes_36[{macro(name)}_INPUTS == 36 ? 1 : -1];\n" for name in names)
    calls = "\n".join(f"  {name}(image, result[{i}]);" for i, name in enumerate(names))
    return MAIN.format(includes=includes + sizes, calls=calls, count=len(names))


@compiler
def test_networks_share_a_program(graph, tmp_path):
    """Each as a file of its own, and all in one translation unit: no name of one is a name of another."""
    for name in TOGETHER:
        export_c(graph, IMAGE, tmp_path / f"{name}.c")
    (tmp_path / "main.c").write_text(program_of(TOGETHER))
    files = [tmp_path / f"{name}.c" for name in TOGETHER]
    run("cc", *FLAGS, tmp_path / "main.c", *files, "-o", tmp_path / "program")
    run(tmp_path / "program")
    (tmp_path / "all.c").write_text("".join(f'#include "{name}.c"\n' for name in [*TOGETHER, "main"]))
    run("cc", *FLAGS, tmp_path / "all.c", "-fsyntax-only")


@compiler
@cpp_compiler
def test_header_is_for_cpp_too(graph, tmp_path):
    for name in TOGETHER:
        export_c(graph, IMAGE, tmp_path / f"{name}.c")
        run("cc", *FLAGS, "-c", f"{name}.c", cwd=tmp_path)
    (tmp_path / "main.cpp").write_text(program_of(TOGETHER))
    objects = [f"{name}.o" for name in TOGETHER]
    run("c++", "-Wall", "-Wextra", "-Werror", "main.cpp", *objects, "-o", "program", cwd=tmp_path)
    run(tmp_path / "program")


@compiler
@pytest.mark.parametrize("name", ["net", "LeNet"])
def test_nothing_leaks(name, graph, tmp_path):
    """The file defines names that begin with its own, and lends out two of them; the header has no others."""
    source, header = export_c(graph, IMAGE, tmp_path / f"{name}.c")
    empty = tmp_path / "empty.c"
    libraries = re.findall("^#include <.*>$", source.read_text(), re.MULTILINE)
    empty.write_text("\n".join(libraries) + "\n")

    def macros(file):
        text = run("cc", "-std=gnu99", "-E", "-dM", "-x", "c", file)
        return {re.match(r"#define (\w+)", line)[1] for line in text.splitlines()}

    own = (f"{name}_", f"{macro(name)}_")
    assert all(word.startswith(own) for word in macros(source) - macros(empty))
    empty.write_text("")
    header_macros = macros(header) - macros(empty)
    assert header_macros == {f"{macro(name)}_{what}" for what in ("H", "INPUTS", "OUTPUTS", "SCRATCH")}
    if shutil.which("nm"):
        run("cc", *FLAGS, "-c", source, "-o", tmp_path / "net.o")
        symbols = [line.split()[-2:] for line in run("nm", tmp_path / "net.o").splitlines()]
        assert {symbol for kind, symbol in symbols if kind in "TDBRC"} == {name, f"{name}_with"}
        assert {symbol for kind, symbol in symbols if kind == "U"} <= {"memcpy", "_GLOBAL_OFFSET_TABLE_"}


EVIL = "__attribute__((constructor)) static void evil(void) { __builtin_exit(42); }"
HOSTILE = [
    f"*/ {EVIL} /*",
    f"*/\n{EVIL}\n/*",
    f"*\\\n/ {EVIL}",
    f"*\\\r\n/ {EVIL} /\\\n*",
    f"*??/\n/ {EVIL} /*",
    f"*\x00/ {EVIL} /*",
    "/*",
    "//",
    "ends with \\",
    "ends with ??/",
    "\n#error evil\n",
    "\r#error evil\r",
    "{name} {0} {{ }} %s %n $HOME `x`",
    "\x1b[31m\x07\x7f\u202e\u2066é\ud800",
    f"{'a' * 10_000} */ {EVIL} /*",
    "*/" * 5_000,
]


def renamed(graph, text):
    """The graph with this text at the end of every name."""
    named = {name: f"{name} {text}" for name in [*graph.constants, *(node.name for node in graph.nodes)]}
    nodes = [replace(node, name=named[node.name], inputs=tuple(map(named.get, node.inputs))) for node in graph.nodes]
    return replace(
        graph,
        nodes=tuple(nodes),
        constants={named[name]: tensor for name, tensor in graph.constants.items()},
        outputs=tuple(map(named.get, graph.outputs)),
        parameters=frozenset(map(named.get, graph.parameters)),
    )


COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_layer_names_stay_comments(text, graph, tmp_path):
    """The code is that of the network with other names; what is left of the name is harmless, short and to be known."""
    plain = [file.read_text() for file in export_c(graph, IMAGE, tmp_path / "net.c")]
    hostile = [file.read_text() for file in export_c(renamed(graph, text), IMAGE, tmp_path / "net.c")]
    assert [COMMENT.sub("", file) for file in plain] == [COMMENT.sub("", file) for file in hostile]
    comments = set(COMMENT.findall(hostile[0])) - set(COMMENT.findall(plain[0]))
    assert len(comments) == 2  # of the convolution and of the linear layer
    for comment in comments:
        assert re.fullmatch(r"/\* [\w .:,()<>\[\]-]{1,500} \*/", comment, re.ASCII)


@compiler
def test_layer_names_are_not_compiled(graph, tmp_path):
    tried = HOSTILE if LONG else HOSTILE[:1]
    for text in tried:
        source, _ = export_c(renamed(graph, text), IMAGE, tmp_path / "net.c")
        run("cc", *FLAGS, "-trigraphs", "-DNET_SELF_TEST", source, "-o", tmp_path / "program")
        assert "largest difference" in run(tmp_path / "program")


class Keyed(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(3, 2)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.parametrize("key", HOSTILE)
def test_key_of_a_module_is_refused_before_it_is_written(key, tmp_path):
    """torch.export would write it into code of its own."""
    with pytest.raises(GraphError, match="needs another name"):
        export_c(Keyed(key).eval(), torch.randn(1, 3), tmp_path / "net.c")
    assert not list(tmp_path.iterdir())


@compiler
@pytest.mark.parametrize("folder", ['quote" quote', "new\nline", "back\\slash", "%s{name}*/", "é"])
def test_folder_may_be_called_anything(folder, graph, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    source, header = export_c(graph, IMAGE, tmp_path / folder / "net.c")
    assert source.parent == header.parent == tmp_path / folder
    assert source.read_text() == export_c(graph, IMAGE, tmp_path / "net.c")[0].read_text()
    run("cc", *FLAGS, "-fsyntax-only", source)


def test_wrong_examples_are_named(graph, tmp_path):
    path = tmp_path / "net.c"
    for wrong in (torch.zeros(0, 1, 6, 6), torch.tensor(1.0), [1.0], (IMAGE,)):
        with pytest.raises(ArgumentError, match="at least one image"):
            export_c(graph, wrong, path)
    for value in ("nan", "inf", "-inf"):
        with pytest.raises(ArgumentError, match="not finite"):
            export_c(graph, torch.full((1, 1, 6, 6), float(value)), path)
    for wrong in (torch.zeros(1, 1, 6, 7), torch.zeros(1, 36), torch.zeros(1, 1, 6, 6).double()):
        with pytest.raises(GraphError, match="must be N×1×6×6 of float32"):
            export_c(graph, wrong, path)
    with pytest.raises(GraphError, match="batch size"):
        export_c(nn.Linear(3, 2), torch.zeros(0, 3), path)
    for wrong in (torch.zeros(1, 4), torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(GraphError):
            export_c(nn.Linear(3, 2), wrong, path)
    with pytest.raises(GraphError, match="takes float32"):
        export_c(nn.Linear(3, 2).double(), torch.zeros(1, 3).double(), path)
    broken = nn.Linear(3, 2)
    broken.weight.data.fill_(float("nan"))
    with pytest.raises(ArgumentError, match="output for the example is not finite"):
        export_c(broken, torch.zeros(1, 3), path)
    assert not path.exists()


def test_network_without_numbers_is_refused(tmp_path):
    for model, x in (
        (nn.Sequential(nn.Flatten(), nn.ReLU()), torch.zeros(1, 0)),
        (nn.Sequential(nn.Conv1d(2, 3, 1)), torch.zeros(1, 2, 0)),
    ):
        with pytest.raises(sparsevd.SparseVDError):
            export_c(model, x, tmp_path / "net.c")


@compiler
def test_numbers_at_the_edge_of_float(tmp_path):
    """Infinity, the largest number and numbers that are not normal."""

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(x).clamp(-3.4e38, float("inf"))

    model = Clamped()
    model.fc.weight.data.copy_(torch.tensor([[3.4028235e38, 1e-45, -1e-38, 0.1], [1.0, -0.0, 1e30, -3.4e38]]))
    source, _ = export_c(model, torch.full((1, 4), 0.25), tmp_path / "net.c")
    run("cc", *FLAGS, "-DNET_SELF_TEST", source, "-o", tmp_path / "program")
    assert "largest difference" in run(tmp_path / "program")


def test_what_a_c_file_needs_is_said_of_a_c_file(tmp_path):
    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y + 1

    for model, words in ((Two(3, 2), "a C file has one input and one output, and this network 1 and 2"),
                         (nn.Sequential(nn.Linear(3, 2), nn.GELU()), "operations of a C file")):  # fmt: skip
        with pytest.raises(GraphError, match=words) as error:
            sparsevd.export_c(model.eval(), torch.randn(1, 3), tmp_path / "net.c")
        assert "plan" not in str(error.value)
        assert "accelerate" not in str(error.value)
