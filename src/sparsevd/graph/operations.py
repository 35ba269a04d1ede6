"""The closed list of operations a graph may hold: for each its inputs, its attributes and what it computes in torch.

`OPS` is the whole list: what reads a graph (compaction, code generation, files) can be sure that nothing else comes.
Attributes are plain: int, float, bool, str, or a tuple of ints; each has a kind that says which values are allowed.
Axes count from 0, never from the end. Input 0 is the value the operation acts on; weights and the like follow in the
order of the function's arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attribute = int | float | bool | str | tuple[int, ...]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


_MOST = 2**31 - 1


def _int(least: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= _MOST


def _ints(least: int) -> Callable[[object], bool]:
    return lambda value: type(value) is tuple and all(map(_int(least), value))


# Kind of an attribute → is this value allowed?
KINDS: dict[str, Callable[[object], bool]] = {
    "natural": _int(0),
    "positive": _int(1),
    "naturals": _ints(0),
    "positives": _ints(1),
    "axis": _int(0),
    "axes": _ints(0),
    "shape": _ints(-_MOST),  # sizes; -k stands for k times the batch size
    "float": lambda value: type(value) is float and not math.isnan(value),
    "eps": lambda value: type(value) is float and 0 <= value < math.inf,
    "bool": lambda value: type(value) is bool,
    "dtype": lambda value: type(value) is str and value in DTYPES,
    "gelu": lambda value: value in ("none", "tanh"),
    "padding": lambda value: value in ("constant", "reflect", "replicate", "circular"),
}


@dataclass(frozen=True)
class Operation:
    """One operation: how many inputs it takes, its attributes and their kinds, and what it computes."""

    compute: Callable[..., Tensor]
    least: int
    most: int
    attributes: dict[str, str]


# The functions ask nothing of the tensors themselves, so that torch.fx can trace them (see `to_module`).
def _conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, **attributes: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[len(attributes["stride"]) - 1](x, weight, bias, **attributes)


def _conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None = None, **attributes: Any) -> Tensor:
    kinds = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return kinds[len(attributes["stride"]) - 1](x, weight, bias, **attributes)


def _batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, eps=eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _max_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return pool(x, kernel, stride, padding, dilation, ceil_mode)


def _avg_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_padding: bool) -> Tensor:
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    return pool(x, kernel, stride, padding, ceil_mode, count_padding)


def _pad(x: Tensor, *, before: Any, after: Any, mode: str, value: float) -> Tensor:
    """`before` and `after` hold one number for each of the last axes, in the order of the axes."""
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return F.pad(x, widths, mode, value if mode == "constant" else None)


def _slice(x: Tensor, *, axis: int, start: int, stop: int, step: int) -> Tensor:
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)


_WINDOW = {"kernel": "positives", "stride": "positives", "padding": "naturals"}

# Element by element: each number of the result depends on the number in its place, and on nothing else.
POINTWISE: dict[str, Operation] = {
    "relu": Operation(F.relu, 1, 1, {}),
    "leaky_relu": Operation(lambda x, *, slope: F.leaky_relu(x, slope), 1, 1, {"slope": "float"}),
    "elu": Operation(F.elu, 1, 1, {"alpha": "float"}),
    "selu": Operation(F.selu, 1, 1, {}),
    "gelu": Operation(F.gelu, 1, 1, {"approximate": "gelu"}),
    "silu": Operation(F.silu, 1, 1, {}),
    "mish": Operation(F.mish, 1, 1, {}),
    "hardswish": Operation(F.hardswish, 1, 1, {}),
    "hardsigmoid": Operation(F.hardsigmoid, 1, 1, {}),
    "softplus": Operation(F.softplus, 1, 1, {"beta": "float", "threshold": "float"}),
    "sigmoid": Operation(torch.sigmoid, 1, 1, {}),
    "tanh": Operation(torch.tanh, 1, 1, {}),
    "clamp": Operation(lambda x, *, least, most: x.clamp(least, most), 1, 1, {"least": "float", "most": "float"}),
    "exp": Operation(torch.exp, 1, 1, {}),
    "log": Operation(torch.log, 1, 1, {}),
    "sqrt": Operation(torch.sqrt, 1, 1, {}),
    "rsqrt": Operation(torch.rsqrt, 1, 1, {}),
    "abs": Operation(torch.abs, 1, 1, {}),
    "neg": Operation(torch.neg, 1, 1, {}),
    "erf": Operation(torch.erf, 1, 1, {}),
    "pow": Operation(torch.pow, 1, 1, {"exponent": "float"}),
    "cast": Operation(lambda x, *, dtype: x.to(DTYPES[dtype]), 1, 1, {"dtype": "dtype"}),
}

# Two values, element by element, broadcast as in torch; a number is a constant without axes.
ARITHMETIC: dict[str, Operation] = {
    "add": Operation(torch.add, 2, 2, {}),
    "sub": Operation(torch.sub, 2, 2, {}),
    "mul": Operation(torch.mul, 2, 2, {}),
    "div": Operation(torch.div, 2, 2, {}),
    "maximum": Operation(torch.maximum, 2, 2, {}),
    "minimum": Operation(torch.minimum, 2, 2, {}),
}

OPS: dict[str, Operation] = {
    # Where data comes in. The shape is the node's own.
    "input": Operation(lambda: torch.empty(0), 0, 0, {"dtype": "dtype"}),
    # Layers with weights.
    "linear": Operation(F.linear, 2, 3, {}),
    "conv": Operation(
        _conv, 2, 3, {"stride": "positives", "padding": "naturals", "dilation": "positives", "groups": "positive"}
    ),
    "conv_transpose": Operation(
        _conv_transpose,
        2,
        3,
        {
            "stride": "positives",
            "padding": "naturals",
            "output_padding": "naturals",
            "dilation": "positives",
            "groups": "positive",
        },
    ),
    "batch_norm": Operation(_batch_norm, 5, 5, {"eps": "eps"}),
    "layer_norm": Operation(_layer_norm, 3, 3, {"eps": "eps"}),
    "group_norm": Operation(_group_norm, 3, 3, {"groups": "positive", "eps": "eps"}),
    "embedding": Operation(F.embedding, 2, 2, {}),
    "prelu": Operation(F.prelu, 2, 2, {}),
    **POINTWISE,
    **ARITHMETIC,
    "matmul": Operation(torch.matmul, 2, 2, {}),
    "attention": Operation(_attention, 3, 4, {"scale": "float", "causal": "bool"}),
    # Windows and whole axes.
    "max_pool": Operation(_max_pool, 1, 1, {**_WINDOW, "dilation": "positives", "ceil_mode": "bool"}),
    "avg_pool": Operation(_avg_pool, 1, 1, {**_WINDOW, "ceil_mode": "bool", "count_padding": "bool"}),
    "mean": Operation(lambda x, *, axes, keep: x.mean(axes, keep), 1, 1, {"axes": "axes", "keep": "bool"}),
    "sum": Operation(lambda x, *, axes, keep: x.sum(axes, keep), 1, 1, {"axes": "axes", "keep": "bool"}),
    "amax": Operation(lambda x, *, axes, keep: x.amax(axes, keep), 1, 1, {"axes": "axes", "keep": "bool"}),
    "softmax": Operation(lambda x, *, axis: x.softmax(axis), 1, 1, {"axis": "axis"}),
    "log_softmax": Operation(lambda x, *, axis: x.log_softmax(axis), 1, 1, {"axis": "axis"}),
    # Moving elements.
    "reshape": Operation(lambda x, *, shape: x.reshape(shape), 1, 1, {"shape": "shape"}),
    "expand": Operation(lambda x, *, shape: x.expand(shape), 1, 1, {"shape": "shape"}),
    "permute": Operation(lambda x, *, axes: x.permute(axes), 1, 1, {"axes": "axes"}),
    "slice": Operation(_slice, 1, 1, {"axis": "axis", "start": "natural", "stop": "natural", "step": "positive"}),
    "select": Operation(lambda x, *, axis, index: x.select(axis, index), 1, 1, {"axis": "axis", "index": "natural"}),
    "concat": Operation(lambda *values, axis: torch.cat(values, axis), 1, 2**31, {"axis": "axis"}),
    "pad": Operation(_pad, 1, 1, {"before": "naturals", "after": "naturals", "mode": "padding", "value": "float"}),
}
