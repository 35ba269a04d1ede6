"""A network as one self-contained C file and its header: the kernels of the plan, and the weights as constants.

Only the name of the file goes into the C code, and only if it can be a function's name there; whatever else comes from
the network is a number, or is escaped within a comment. All names of the file begin with the network's own, so that
they meet neither those of the program nor those of another network.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, GraphError
from sparsevd.files import atomic
from sparsevd.graph import Graph, capture
from sparsevd.graph.outputs import parts
from sparsevd.kernels import inference
from sparsevd.kernels.steps import Affine, Network, Pool, Product, Repack, Value, Window, nonzeros_of
from sparsevd.runtime import c_names
from sparsevd.runtime.lowering import C_FILE, network

SOURCES = Path(inference.__file__).parent
TOLERANCE = 1e-4  # of the self-test, relative to the largest output
LONGEST_COMMENT = 80  # characters of a layer's name

HEADER = """\
/* {title}

   {name}(in, out) computes one image; it uses memory of its own and is not for several threads at once.
   {name}_with(in, out, scratch) is, with {macro}_SCRATCH floats of scratch memory for each thread, zero before their
   first use and left alone in between. */
#ifndef {macro}_H
#define {macro}_H

#define {macro}_INPUTS {inputs}   /* floats: {input_shape} */
#define {macro}_OUTPUTS {outputs} /* floats: {output_shape} */
#define {macro}_SCRATCH {scratch}

#ifdef __cplusplus
extern "C" {{
#endif

void {name}(const float *in, float *out);
void {name}_with(const float *in, float *out, float *scratch);

#ifdef __cplusplus
}}
#endif

#endif
"""

PROLOGUE = """\
/* {title}

   C99, for GCC and Clang; nothing but the compiler is needed. Build it for the processor that will run it:
       cc -std=gnu99 -O3 -march=native -c {name}.c
   A program that tests it, with an input and the output expected for it:
       cc -std=gnu99 -O3 -march=native -D{macro}_SELF_TEST {name}.c -o test && ./test */

#include "{name}.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define {name}_LANES 16
#elif defined(__AVX2__)
#define {name}_LANES 8
#else
#define {name}_LANES 4 /* NEON and SSE, and what the compiler makes of it elsewhere */
#endif
#define {name}_TARGET

"""

RUN = """
void {name}_with(const float *in, float *out, float *scratch) {{
  const struct {name}_sparse_kernels kernels = {name}_SPARSE_KERNELS;
  kernels.{name}_pack(&{name}_input_layer, in, 0, 1, scratch + {input_planes}, 0, {input_channels});
  for (int i = 0; i < (int)(sizeof {name}_steps / sizeof *{name}_steps); i++) {{
    const struct {name}_step *step = {name}_steps + i;
    const int parts = step->kind == {name}_PRODUCT ? step->layer->outputs : step->input.channels;
    kernels.{name}_step(step, scratch, 1, 0, parts);
  }}
  for (int i = 0; i < {macro}_OUTPUTS; i++) out[i] = scratch[{output_planes} + i];
}}

void {name}(const float *in, float *out) {{
  static float scratch[{macro}_SCRATCH];
  {name}_with(in, out, scratch);
}}
"""

# The network is called before main has any names of its own, which could hide it.
SELF_TEST = """
#ifdef {macro}_SELF_TEST
#include <stdio.h>
{arrays}
static float {name}_test_result[{macro}_OUTPUTS];

int main(void) {{
  {name}({name}_test_input, {name}_test_result);
  {name}({name}_test_input, {name}_test_result); /* a second call must find its memory as the first one did */
  float largest = 0, difference = 0;
  for (int i = 0; i < {macro}_OUTPUTS; i++) {{
    const float expected = {name}_test_output[i], off = {name}_test_result[i] - expected;
    const float size = expected < 0 ? -expected : expected;
    if (!((off < 0 ? -off : off) <= difference)) difference = off < 0 ? -off : off;
    if (size > largest) largest = size;
  }}
  printf("largest difference %g, largest output %g\\n", (double)difference, (double)largest);
  return !(difference <= {tolerance}f * largest);
}}
#endif
"""


@torch.no_grad()
def export_c(model: nn.Module | Graph, example: Tensor, path: str | Path) -> tuple[Path, Path]:
    """Write `path` (name.c) and name.h beside it; returns both. The function in it is called `name`.

    The network must consist of the operations that a plan knows. The first image of the example becomes the input of
    the self-test.
    """
    source = Path(path)
    name = _function_name(source)
    graph = capture(model, example)
    net = network(graph, C_FILE)
    if not net.input.numbers or not net.output.numbers:
        raise GraphError(f"a network from {net.input.numbers} to {net.output.numbers} numbers has nothing to compute")
    image, expected = _test_case(graph, example)
    scratch = net.placed(images=1)
    kept = sum(int(torch.count_nonzero(step.weight)) for step in net.steps if isinstance(step, Product))
    constants = _Constants(name)
    words: dict[str, Any] = {
        "name": name,
        # As C writes macros; a name with capitals stays as it is, so that the macros of net and Net differ.
        "macro": name.upper() if name == name.lower() else name,
        "title": f"A pruned network of {kept:,} weights, written by sparsevd.",
        "inputs": net.input.numbers,
        "outputs": net.output.numbers,
        "input_shape": " x ".join(map(str, graph.inputs[0].shape[1:])) or "1",
        "output_shape": " x ".join(map(str, net.output_shape)) or "1",
        "scratch": scratch,
        "input_planes": net.input.planes,
        "input_channels": net.input.channels,
        "output_planes": net.output.planes,
        "tolerance": TOLERANCE,
        "arrays": "\n".join(
            [
                constants.array("float", "test_input", _floats(image)),
                constants.array("float", "test_output", _floats(expected)),
            ]
        ),
    }
    parts = [
        PROLOGUE.format_map(words),
        _kernels(name),
        *constants.of(net),
        RUN.format_map(words),
        SELF_TEST.format_map(words),
    ]
    header = source.with_suffix(".h")
    atomic.write(source, "\n".join(parts))
    atomic.write(header, HEADER.format_map(words))
    return source, header


def _function_name(source: Path) -> str:
    """The name of the file as that of a function, or ArgumentError."""
    reason = c_names.why_not(source.stem) if source.suffix == ".c" else "the file does not end with .c"
    if reason:
        better = c_names.suggestion(source.stem)
        raise ArgumentError(f"a network cannot be written to {source.name!r}: {reason}; call the file {better}.c")
    return source.stem


def _test_case(graph: Graph, example: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the self-test and the output expected for it, both finite: no others can be compared."""
    if not isinstance(example, Tensor) or not example.ndim or not example.shape[0]:
        found = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise ArgumentError(f"the example must be a tensor [batch, ...] with at least one image, not {found}")
    image = example[:1]
    (expected,) = parts(graph(image))[1]
    for what, tensor in (("the first image of the example", image), ("the network's output for the example", expected)):
        if not tensor.isfinite().all():
            raise ArgumentError(f"{what} is not finite, and the self-test needs numbers; look for NaN and infinity")
    return image, expected


_PARTS = ("inference", "vectors", "tiles", "product", "packing", "steps")  # each uses those before it
# What the kernels define for the whole file: macros, types, functions, tables; and how the names begin that they paste.
_DEFINITION = re.compile(
    r"^#define (\w+)|^typedef .* (\w+) __attribute__|^(?:struct|enum) (\w+) \{"
    r"|^(?:INLINE|TARGET|static|typedef)\b[\w *]*?(\w+)[(\[]|(?<!#)\b(\w+)##",
    re.MULTILINE,
)
_ENUM = re.compile(r"^enum \w+ \{(.*?)\}", re.MULTILINE | re.DOTALL)
_TOKEN = re.compile(r'/\*.*?\*/|"[^"\n]*"|\b[A-Za-z_]\w*', re.DOTALL)


def _kernels(name: str) -> str:
    """The kernels of inference as one text, with the network's name before each of theirs."""
    text = "\n".join((SOURCES / f"{part}.h").read_text(encoding="utf-8") for part in _PARTS)
    text = re.sub(r'^#include "\w+\.h"\n', "", text, flags=re.MULTILINE)
    own = {"LANES", "TARGET"} | {word for match in _DEFINITION.findall(text) for word in match if word}
    own |= {word for constants in _ENUM.findall(text) for word in re.findall(r"\w+", constants)}
    return _TOKEN.sub(lambda token: f"{name}_{token[0]}" if token[0] in own else token[0], text)


def _comment(text: str) -> str:
    """Text from outside for a comment: plain characters as they are, others by their number, and not without end."""
    shown = re.sub(r"[^\w .:,()\[\]-]", lambda c: f"<{ord(c[0]):X}>", text[:LONGEST_COMMENT], flags=re.ASCII)
    return shown + "..." * (len(text) > LONGEST_COMMENT)


class _Constants:
    """Weights, layers and steps as C arrays and structs, with the network's name before theirs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, net: Network) -> list[str]:
        parts, steps = [], []
        pixels = net.input.offsets()[: net.input.height * net.input.width]
        parts.append(self.array("int32_t", "input_slot", map(str, range(net.input.channels))))
        parts.append(self.array("int32_t", "input_place", map(str, pixels.tolist())))
        layer = {**_sizes(net.input), "images": 1, "used": net.input.channels, "stride_x": 1}
        layer |= {"pitch": net.input.pitch, "plane": net.input.plane}
        layer |= {"slot": self.own("input_slot"), "place": self.own("input_place")}
        parts.append(self.layer("input_layer", layer))
        for number, step in enumerate(net.steps):
            fields: dict[str, Any] = {
                "kind": self.own(step.kind.name),
                "input": _value(step.source),
                "second": _value(step.inputs[-1]),
                "out": _value(step.out),
                "low": _float(step.bounds[0]),
                "high": _float(step.bounds[1]),
            }
            match step:
                case Product():
                    parts += self.product(step, number)
                    fields["layer"] = "&" + self.own(f"layer_{number}")
                case Repack():
                    parts.append(self.array("int32_t", f"place_{number}", map(str, step.phases.pixels.tolist())))
                    parts.append(self.layer(f"layer_{number}", {"place": self.own(f"place_{number}")}))
                    fields["layer"] = "&" + self.own(f"layer_{number}")
                case Affine():
                    parts.append(self.array("float", f"scale_{number}", _floats(step.scale)))
                    parts.append(self.array("float", f"shift_{number}", _floats(step.shift)))
                    fields |= {"scale": self.own(f"scale_{number}"), "shift": self.own(f"shift_{number}")}
                case Pool():
                    fields |= _window(step.window)
            steps.append(_initialiser(fields))
        lines = ",\n".join(f"  {step}" for step in steps)
        parts.append(f"static const struct {self.own('step')} {self.own('steps')}[] = {{\n{lines}}};\n")
        return parts

    def product(self, step: Product, number: int) -> list[str]:
        source, out, arrays = step.source, step.out, nonzeros_of(step, images=1)
        pairs = [f"{{{offset}, {_float(weight)}}}" for offset, weight in arrays["nonzeros"].tolist()]
        fields = {
            **_sizes(source),
            "outputs": out.channels,
            "out_height": out.height,
            "out_width": out.width,
            "images": 1,
            "used": source.channels,
            "stride_x": step.geometry.stride[1],
            "pitch": source.pitch,
            "plane": source.plane,
            "out_pitch": out.pitch,
            "out_plane": out.plane,
            "low": _float(step.bounds[0]),
            "high": _float(step.bounds[1]),
            **{kind: self.own(f"{kind}_{number}") for kind in ("order", "starts", "nonzeros", "bias")},
        }
        return [
            f"/* {_comment(step.name)} */",
            self.array("int32_t", f"order_{number}", map(str, arrays["order"].tolist())),
            self.array("int32_t", f"starts_{number}", map(str, arrays["starts"].tolist())),
            self.array(f"struct {self.own('nonzero')}", f"nonzeros_{number}", pairs or ["{0, 0}"]),
            self.array("float", f"bias_{number}", map(_float, step.biases().tolist())),
            self.layer(f"layer_{number}", fields),
        ]

    def layer(self, word: str, fields: dict[str, Any]) -> str:
        return f"static const struct {self.own('sparse_layer')} {self.own(word)} = {_initialiser(fields)};\n"

    def array(self, kind: str, word: str, items: Iterable[str]) -> str:
        lines, line = [], " "
        for item in items:
            if len(line) + len(item) > 116:
                lines.append(line)
                line = " "
            line += f" {item},"
        return f"static const {kind} {self.own(word)}[] = {{\n" + "\n".join([*lines, line]) + "};\n"

    def own(self, word: str) -> str:
        return f"{self.name}_{word}"


def _sizes(value: Value) -> dict[str, Any]:
    return {"channels": value.channels, "height": value.height, "width": value.width}


def _value(value: Value) -> str:
    fields = {"pitch": value.pitch, "plane": value.plane, "planes": value.planes, "first": value.first}
    return _initialiser({**_sizes(value), **fields})


def _window(window: Window) -> dict[str, Any]:
    fields = {"kernel_y": window.kernel[0], "kernel_x": window.kernel[1], "stride_y": window.stride[0]}
    fields |= {"stride_x": window.stride[1], "top": window.padding[0], "left": window.padding[1]}
    fields |= {"dilation_y": window.dilation[0], "dilation_x": window.dilation[1]}
    return {**fields, "count_padding": int(window.count_padding)}


def _initialiser(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f".{name} = {value}" for name, value in fields.items()) + "}"


def _floats(tensor: Tensor) -> list[str]:
    return [_float(number) for number in tensor.flatten().tolist()]


def _float(number: float) -> str:
    """Exactly this float32 in C; what is too large for one is infinite, as in torch."""
    with np.errstate(over="ignore"):
        single = np.float32(number)
    if np.isinf(single):
        return "INFINITY" if single > 0 else "-INFINITY"
    if np.isnan(single):
        return "NAN"
    text = np.format_float_scientific(single, unique=True, trim="0")
    return f"{text}f"
