"""The shape that an operation gives, from the shapes of its inputs, or ValueError if they do not fit.

Written out for each operation, rather than asked of torch, because graphs come from files: what passes here can be
computed, and code may be generated from it. Torch asks less of tensors without memory than of real ones, takes seconds
to load what it needs for them, and knows no batch size that is left open. Sizes of -k are k times the batch size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sparsevd.graph.operations import ARITHMETIC, OPS

Shape = tuple[int, ...]
MOST_AXES = 16  # as many as a tensor of a model file; torch takes no more than 64, and less in places
MOST_ELEMENTS = 2**40  # of a value, for one example


def result_shape(op: str, shapes: Sequence[Shape], attributes: dict[str, Any]) -> Shape:
    for key, kind in OPS[op].attributes.items():
        axes = {"axis": (attributes[key],), "axes": attributes[key]}.get(kind, ())
        _require(
            len(set(axes)) == len(axes) and all(axis < len(shapes[0]) for axis in axes), f"{key} {axes} is no axis"
        )
    rule: Callable[..., Shape] = _RULES.get(op, _same)
    result = rule(*shapes, **attributes)
    check_size(result)
    return result


def check_size(shape: Shape) -> None:
    """ValueError for what no tensor can be."""
    _require(len(shape) <= MOST_AXES, f"its result would have {len(shape)} axes")
    _require(elements(shape)[0] < MOST_ELEMENTS, f"its result would have {elements(shape)[0]:,} elements")


def elements(shape: Shape) -> tuple[int, int]:
    """The number of elements for a batch of one, and the power of the batch size in it."""
    return math.prod(abs(size) for size in shape), sum(size < 0 for size in shape)


def _require(fits: bool, otherwise: str) -> None:
    if not fits:
        raise ValueError(otherwise)


def _same(x: Shape, **attributes: Any) -> Shape:
    return x


def _linear(x: Shape, weight: Shape, bias: Shape | None = None) -> Shape:
    _require(len(weight) == 2 and len(x) >= 1 and x[-1] == weight[1], f"a weight of {weight} for a value of {x}")
    _require(bias in (None, weight[:1]), f"a bias of {bias} for a weight of {weight}")
    return (*x[:-1], weight[0])


def _spatial(x: Shape, count: int) -> Shape:
    """The sizes of the axes after batch and channels, of which there must be `count`."""
    _require(len(x) == count + 2 and 1 <= count <= 3, f"settings for {count} axes, a value of {x}")
    _require(all(size > 0 for size in x[1:]), f"a value of {x}")
    return x[2:]


def _conv(x: Shape, weight: Shape, bias: Shape | None = None, **a: Any) -> Shape:
    sizes = _spatial(x, len(a["stride"]))
    groups = a["groups"]
    _require(len(weight) == len(x), f"a weight of {weight} for a value of {x}")
    _require(x[1] == weight[1] * groups and weight[0] % groups == 0, f"a weight of {weight} in {groups} groups for {x}")
    _require(bias in (None, weight[:1]), f"a bias of {bias} for a weight of {weight}")
    result = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(
            sizes, weight[2:], a["stride"], a["padding"], a["dilation"], strict=True
        )
    ]
    _require(min(weight) > 0 and min(result) > 0, f"a kernel of {weight[2:]} for {sizes}")
    return (x[0], weight[0], *result)


def _conv_transpose(x: Shape, weight: Shape, bias: Shape | None = None, **a: Any) -> Shape:
    sizes = _spatial(x, len(a["stride"]))
    groups = a["groups"]
    _require(len(weight) == len(x), f"a weight of {weight} for a value of {x}")
    _require(x[1] == weight[0] and weight[0] % groups == 0, f"a weight of {weight} in {groups} groups for {x}")
    _require(bias in (None, (weight[1] * groups,)), f"a bias of {bias} for a weight of {weight}")
    settings = zip(a["stride"], a["padding"], a["output_padding"], a["dilation"], strict=True)
    result = []
    for size, kernel, (stride, padding, extra, dilation) in zip(sizes, weight[2:], settings, strict=True):
        _require(extra < max(stride, dilation), f"an output padding of {extra} for stride {stride}")
        result.append((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1)
    _require(min(weight) > 0 and min(result) > 0, f"a kernel of {weight[2:]} for {sizes}")
    return (x[0], weight[1] * groups, *result)


def _batch_norm(x: Shape, *tensors: Shape, eps: float) -> Shape:
    _require(2 <= len(x) <= 5 and all(tensor == x[1:2] for tensor in tensors), f"tensors of {tensors} for {x}")
    return x


def _group_norm(x: Shape, *tensors: Shape, groups: int, eps: float) -> Shape:
    _require(len(x) >= 2 and all(tensor == x[1:2] for tensor in tensors), f"tensors of {tensors} for {x}")
    _require(x[1] > 0 and x[1] % groups == 0 and elements(x)[0] > 0, f"{groups} groups for a value of {x}")
    return x


def _layer_norm(x: Shape, weight: Shape, bias: Shape, *, eps: float) -> Shape:
    _require(
        weight == bias and 0 < len(weight) < len(x) and x[-len(weight) :] == weight, f"a weight of {weight} for {x}"
    )
    return x


def _embedding(x: Shape, weight: Shape) -> Shape:
    _require(len(weight) == 2 and weight[0] > 0, f"a table of {weight}")
    return (*x, weight[1])


def _prelu(x: Shape, weight: Shape) -> Shape:
    _require(weight == (1,) or (len(x) >= 2 and weight == x[1:2]), f"a weight of {weight} for a value of {x}")
    return x


def _broadcast(first: Shape, second: Shape) -> Shape:
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    result = []
    for one, other in pairs:
        _require(one == other or 1 in (one, other), f"{first} and {second} together")
        result.append(other if one == 1 else one)
    return tuple(result)


def _matmul(first: Shape, second: Shape) -> Shape:
    _require(len(first) >= 2 and len(second) >= 2 and first[-1] == second[-2], f"the product of {first} and {second}")
    return (*_broadcast(first[:-2], second[:-2]), first[-2], second[-1])


def _attention(query: Shape, key: Shape, value: Shape, mask: Shape | None = None, **a: Any) -> Shape:
    _require(len(query) == len(key) == len(value) >= 3, f"attention of {query}, {key} and {value}")
    _require(query[:-2] == key[:-2] == value[:-2], f"attention of {query}, {key} and {value}")
    _require(query[-1] == key[-1] and key[-2] == value[-2], f"attention of {query}, {key} and {value}")
    scores = (*query[:-1], key[-2])
    _require(min(scores) != 0 and not (a["causal"] and mask), "attention over nothing, or causal with a mask")
    _require(mask is None or (len(mask) >= 2 and _broadcast(mask, scores) == scores), f"a mask of {mask} for {scores}")
    return (*query[:-1], value[-1])


def _pool(x: Shape, *, kernel: Shape, stride: Shape, padding: Shape, ceil_mode: bool, **a: Any) -> Shape:
    sizes = _spatial(x, len(kernel))
    dilations = a.get("dilation", (1,) * len(kernel))
    result = []
    for size, window, step, width, dilation in zip(sizes, kernel, stride, padding, dilations, strict=True):
        _require(width <= window // 2, f"a padding of {width} for a window of {window}")
        room = size + 2 * width - dilation * (window - 1) - 1
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= size + width:
            count -= 1  # a window must begin inside
        _require(room >= 0 and count > 0, f"a window of {window} for a size of {size}")
        result.append(count)
    return (*x[:2], *result)


def _reduce(x: Shape, *, axes: Shape, keep: bool) -> Shape:
    _require(len(axes) > 0 and all(x[axis] > 0 for axis in axes), f"the axes {axes} of {x}")
    if keep:
        return tuple(1 if axis in axes else size for axis, size in enumerate(x))
    return tuple(size for axis, size in enumerate(x) if axis not in axes)


def _softmax(x: Shape, *, axis: int) -> Shape:
    _require(x[axis] > 0, f"axis {axis} of {x}")
    return x


def _reshape(x: Shape, *, shape: Shape) -> Shape:
    _require(elements(x) == elements(shape) and elements(x)[0] > 0, f"{x} as {shape}")
    return shape


def _expand(x: Shape, *, shape: Shape) -> Shape:
    _require(len(x) <= len(shape) and _broadcast(x, shape) == shape, f"{x} to {shape}")
    return shape


def _permute(x: Shape, *, axes: Shape) -> Shape:
    _require(sorted(axes) == list(range(len(x))), f"the axes {axes} of {x}")
    return tuple(x[axis] for axis in axes)


def _slice(x: Shape, *, axis: int, start: int, stop: int, step: int) -> Shape:
    _require(start <= stop <= x[axis], f"{start} to {stop} of {x[axis]}")
    return (*x[:axis], math.ceil((stop - start) / step), *x[axis + 1 :])


def _select(x: Shape, *, axis: int, index: int) -> Shape:
    _require(index < x[axis], f"index {index} of {x[axis]}")
    return (*x[:axis], *x[axis + 1 :])


def _concat(*values: Shape, axis: int) -> Shape:
    first = values[0]
    rest = {(len(shape), shape[:axis], shape[axis + 1 :]) for shape in values}
    _require(len(rest) == 1 and all(shape[axis] >= 0 for shape in values), f"{', '.join(map(str, values))} together")
    return (*first[:axis], sum(shape[axis] for shape in values), *first[axis + 1 :])


def _pad(x: Shape, *, before: Shape, after: Shape, mode: str, value: float) -> Shape:
    count = len(before)
    _require(len(after) == count <= len(x), f"padding of {count} and {len(after)} axes")
    result = list(x)
    for axis, low, high in zip(range(len(x) - count, len(x)), before, after, strict=True):
        size = x[axis]
        _require(size >= 0 or low == high == 0, "padding of the batch")
        most = {"reflect": size - 1, "circular": size}.get(mode, max(low, high))
        _require(max(low, high) <= most, f"padding {low} and {high} of {size} by {mode}")
        result[axis] = size + low + high
    if mode != "constant":
        _spatial(x, count)
    return tuple(result)


_RULES: dict[str, Callable[..., Shape]] = {
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "embedding": _embedding,
    "prelu": _prelu,
    **dict.fromkeys(ARITHMETIC, _broadcast),
    "matmul": _matmul,
    "attention": _attention,
    "max_pool": _pool,
    "avg_pool": _pool,
    **dict.fromkeys(("mean", "sum", "amax"), _reduce),
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reshape": _reshape,
    "expand": _expand,
    "permute": _permute,
    "slice": _slice,
    "select": _select,
    "concat": _concat,
    "pad": _pad,
}
