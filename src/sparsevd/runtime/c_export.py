"""A network as one self-contained C file and its header: the kernels of the plan, and the weights as constants."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd import atomic
from sparsevd.errors import ArgumentError
from sparsevd.graph import Graph, capture
from sparsevd.kernels import inference
from sparsevd.kernels.steps import Network, Step, Value, nonzeros_of
from sparsevd.runtime.network import network

SOURCES = Path(inference.__file__).parent
TOLERANCE = 1e-4  # of the self-test, relative to the largest output

HEADER = """\
/* {title}

   {name}(in, out) computes one image; it uses memory of its own and is not for several threads at once.
   {name}_with(in, out, scratch) is, with {NAME}_SCRATCH floats of scratch memory for each thread, zero before their
   first use and left alone in between. */
#ifndef {NAME}_H
#define {NAME}_H

#define {NAME}_INPUTS {inputs}   /* floats: {input_shape} */
#define {NAME}_OUTPUTS {outputs} /* floats: {output_shape} */
#define {NAME}_SCRATCH {scratch}

void {name}(const float *in, float *out);
void {name}_with(const float *in, float *out, float *scratch);

#endif
"""

PROLOGUE = """\
/* {title}

   C99, for GCC and Clang; nothing but the compiler is needed. Build it for the processor that will run it:
       cc -std=gnu99 -O3 -march=native -c {file}
   A program that tests it, with an input and the output expected for it:
       cc -std=gnu99 -O3 -march=native -D{NAME}_SELF_TEST {file} -o test && ./test */

#include "{name}.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4 /* NEON and SSE, and what the compiler makes of it elsewhere */
#endif
#define TARGET
#define NAME(f) f##_{name}

"""

RUN = """
void {name}_with(const float *in, float *out, float *scratch) {{
  const struct sparse_kernels *kernels = &NAME(sparse_kernels);
  kernels->pack(&input_layer, in, 0, 1, scratch + {input_planes}, 0, {input_channels});
  for (int i = 0; i < (int)(sizeof steps / sizeof *steps); i++)
    kernels->step(&steps[i], scratch, 1, 0, steps[i].kind == PRODUCT ? steps[i].layer->outputs : steps[i].in.channels);
  for (int i = 0; i < {NAME}_OUTPUTS; i++) out[i] = scratch[{output_planes} + i];
}}

void {name}(const float *in, float *out) {{
  static float scratch[{NAME}_SCRATCH];
  {name}_with(in, out, scratch);
}}
"""

SELF_TEST = """
#ifdef {NAME}_SELF_TEST
#include <stdio.h>
{arrays}
int main(void) {{
  float out[{NAME}_OUTPUTS], largest = 0, difference = 0;
  {name}(test_input, out);
  {name}(test_input, out); /* a second call must find its memory as the first one did */
  for (int i = 0; i < {NAME}_OUTPUTS; i++) {{
    const float off = out[i] - test_output[i], size = test_output[i] < 0 ? -test_output[i] : test_output[i];
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
    name = source.stem
    if source.suffix != ".c" or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ArgumentError(f"the file {source.name!r} must be called NAME.c, where NAME can be a name in C")
    graph = model if isinstance(model, Graph) else capture(model, example)
    net = network(graph)
    scratch = net.placed(images=1)
    kept = sum(int(torch.count_nonzero(step.weight)) for step in net.steps if step.weight is not None)
    words: dict[str, Any] = {
        "name": name,
        "NAME": name.upper(),
        "file": source.name,
        "title": f"A pruned network of {kept:,} weights, written by sparsevd.",
        "inputs": net.input.numbers,
        "outputs": net.output.numbers,
        "input_shape": " x ".join(map(str, graph.inputs[0].shape[1:])),
        "output_shape": " x ".join(map(str, net.output_shape)) or "1",
        "scratch": scratch,
        "input_planes": net.input.planes,
        "input_channels": net.input.channels,
        "output_planes": net.output.planes,
        "tolerance": TOLERANCE,
    }
    image = example[:1]
    expected = cast(Tensor, graph(image))
    words["arrays"] = "\n".join(
        [_array("float", "test_input", _floats(image)), _array("float", "test_output", _floats(expected))]
    )
    parts = [
        PROLOGUE.format_map(words),
        *(_kernel_source(file) for file in ("inference.h", "vectors.h", "sparse.h")),
        *_constants(net),
        RUN.format_map(words),
        SELF_TEST.format_map(words),
    ]
    header = source.with_suffix(".h")
    atomic.write(source, "\n".join(parts))
    atomic.write(header, HEADER.format_map(words))
    return source, header


def _kernel_source(file: str) -> str:
    """A kernel file without the includes of its fellows."""
    text = (SOURCES / file).read_text(encoding="utf-8")
    return re.sub(r'^#include "\w+\.h"\n', "", text, flags=re.MULTILINE)


def _constants(net: Network) -> list[str]:
    """Weights, layers and steps as C arrays and structs."""
    parts, steps = [], []
    pixels = net.input.offsets()[: net.input.height * net.input.width]
    parts.append(_array("int32_t", "input_slot", map(str, range(net.input.channels))))
    parts.append(_array("int32_t", "input_place", map(str, pixels.tolist())))
    layer = {**_sizes(net.input), "images": 1, "used": net.input.channels, "stride_x": 1}
    layer |= {"pitch": net.input.pitch, "plane": net.input.plane, "slot": "input_slot", "place": "input_place"}
    parts.append(_struct("sparse_layer", "input_layer", layer))
    for number, step in enumerate(net.steps):
        fields: dict[str, Any] = {
            "kind": step.kind,
            "in": _value(step.inputs[0]),
            "second": _value(step.inputs[-1]),
            "out": _value(step.out),
            "low": _float(step.bounds[0]),
            "high": _float(step.bounds[1]),
        }
        if step.kind == "PRODUCT":
            parts += _layer(step, number)
            fields["layer"] = f"&layer_{number}"
        elif step.kind == "REPACK":
            assert step.phases is not None
            parts.append(_array("int32_t", f"place_{number}", map(str, step.phases.pixels.tolist())))
            parts.append(_struct("sparse_layer", f"layer_{number}", {"place": f"place_{number}"}))
            fields["layer"] = f"&layer_{number}"
        elif step.kind == "AFFINE":
            parts.append(_array("float", f"scale_{number}", _floats(cast(Tensor, step.scale))))
            parts.append(_array("float", f"shift_{number}", _floats(cast(Tensor, step.shift))))
            fields |= {"scale": f"scale_{number}", "shift": f"shift_{number}"}
        if step.window is not None:
            window = step.window
            fields |= {"kernel_y": window.kernel[0], "kernel_x": window.kernel[1], "stride_y": window.stride[0]}
            fields |= {"stride_x": window.stride[1], "top": window.padding[0], "left": window.padding[1]}
            fields |= {"dilation_y": window.dilation[0], "dilation_x": window.dilation[1]}
            fields["count_padding"] = int(window.count_padding)
        steps.append(_initialiser(fields))
    parts.append("static const struct step steps[] = {\n" + ",\n".join(f"  {step}" for step in steps) + "};\n")
    return parts


def _layer(step: Step, number: int) -> list[str]:
    source, out, arrays = step.inputs[0], step.out, nonzeros_of(step, images=1)
    bias = np.zeros(out.channels, np.float32) if step.shift is None else step.shift.numpy()
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
        "order": f"order_{number}",
        "starts": f"starts_{number}",
        "nonzeros": f"nonzeros_{number}",
        "bias": f"bias_{number}",
    }
    return [
        f"/* {step.name} */",
        _array("int32_t", f"order_{number}", map(str, arrays["order"].tolist())),
        _array("int32_t", f"starts_{number}", map(str, arrays["starts"].tolist())),
        _array("struct nonzero", f"nonzeros_{number}", pairs or ["{0, 0}"]),
        _array("float", f"bias_{number}", map(_float, bias.tolist())),
        _struct("sparse_layer", f"layer_{number}", fields),
    ]


def _sizes(value: Value) -> dict[str, Any]:
    return {"channels": value.channels, "height": value.height, "width": value.width}


def _value(value: Value) -> str:
    fields = {"pitch": value.pitch, "plane": value.plane, "planes": value.planes, "first": value.first}
    return _initialiser({**_sizes(value), **fields})


def _initialiser(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f".{name} = {value}" for name, value in fields.items()) + "}"


def _struct(kind: str, name: str, fields: dict[str, Any]) -> str:
    return f"static const struct {kind} {name} = {_initialiser(fields)};\n"


def _array(kind: str, name: str, items: Iterable[str]) -> str:
    lines, line = [], " "
    for item in items:
        if len(line) + len(item) > 116:
            lines.append(line)
            line = " "
        line += f" {item},"
    return f"static const {kind} {name}[] = {{\n" + "\n".join([*lines, line]) + "};\n"


def _floats(tensor: Tensor) -> list[str]:
    return [_float(number) for number in tensor.flatten().tolist()]


def _float(number: float) -> str:
    """Exactly this float32 in C."""
    if np.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    if np.isnan(number):
        return "NAN"
    text = np.format_float_scientific(np.float32(number), unique=True, trim="0")
    return f"{text}f"
