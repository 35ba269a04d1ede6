"""What each operation of ATen, torch's own list, becomes in a graph; `HANDLERS` is the table.

`t` is the translation so far and `a` the arguments of the call, by the names of ATen's schema.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from sparsevd.graph.operations import ARITHMETIC, DTYPE_NAMES, POINTWISE, Attribute
from sparsevd.graph.structure import describe_shape
from sparsevd.graph.translation import Arguments, Handler, Translation


def _same(t: Translation, a: Arguments) -> Any:
    """Nothing happens in inference."""
    return a.value("self" if "self" in a else "input")


def _pointwise(op: str, **attributes: str) -> Handler:
    """One value, with attributes named as keys here and as values in ATen."""

    def handler(t: Translation, a: Arguments) -> str:
        given: dict[str, Attribute] = {}
        for ours, theirs in attributes.items():
            value = a.raw(theirs)
            given[ours] = value if isinstance(value, str) else float(value)
        return t.add(op, [a.value("self" if "self" in a else "input")], given)

    return handler


def _binary(op: str) -> Handler:
    def handler(t: Translation, a: Arguments) -> str:
        left, right = a.value("self"), a.value("other")
        if "alpha" in a and a.raw("alpha") != 1:
            right = t.add("mul", [right, t.number(a.raw("alpha"))], shape=a.shape("other"))
        if "rounding_mode" in a and a.raw("rounding_mode") is not None:
            t.refuse(f"{a.node.target} with rounding")
        return t.add(op, [left, right])

    return handler


def _reversed_sub(t: Translation, a: Arguments) -> str:
    if a.raw("alpha") != 1:
        t.refuse("rsub with alpha")
    return t.add("sub", [a.value("other"), a.value("self")])


def _linear(t: Translation, a: Arguments) -> str:
    weight = a.value("weight")
    bias = a.optional("bias")
    return t.add("linear", [a.value("input"), weight, *([bias] if bias else [])])


def _conv(t: Translation, a: Arguments) -> str:
    kernel = a.shape("weight")[2:]
    count = len(kernel)
    x = a.value("input")
    stride, dilation = a.per_axis("stride", count), a.per_axis("dilation", count)
    padding = a.given.get("padding")
    if padding == "valid":
        widths = (0,) * count
    elif padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        widths = tuple(total // 2 for total in totals)
        if any(total % 2 for total in totals):  # torch pads the odd one at the end
            shape = a.shape("input")
            padded = (*shape[:2], *(size + total for size, total in zip(shape[2:], totals, strict=True)))
            after = tuple(total - width for total, width in zip(totals, widths, strict=True))
            attributes: dict[str, Attribute] = {"before": widths, "after": after, "mode": "constant", "value": 0.0}
            x = t.add("pad", [x], attributes, shape=padded)
            widths = (0,) * count
    else:
        widths = a.per_axis("padding", count, (0,) * count)
    bias = a.optional("bias")
    attributes = {"stride": stride, "padding": widths, "dilation": dilation, "groups": int(a.raw("groups"))}
    return t.add("conv", [x, a.value("weight"), *([bias] if bias else [])], attributes)


def _conv_transpose(t: Translation, a: Arguments) -> str:
    count = len(a.shape("weight")) - 2
    bias = a.optional("bias")
    attributes: dict[str, Attribute] = {
        "stride": a.per_axis("stride", count),
        "padding": a.per_axis("padding", count, (0,) * count),
        "output_padding": a.per_axis("output_padding", count, (0,) * count),
        "dilation": a.per_axis("dilation", count),
        "groups": int(a.raw("groups")),
    }
    return t.add("conv_transpose", [a.value("input"), a.value("weight"), *([bias] if bias else [])], attributes)


def _affine(t: Translation, a: Arguments, shape: tuple[int, ...]) -> list[str]:
    """Weight and bias of a normalisation; ones and zeros where it has none, so that it always has both."""
    like = a.given["input"].meta["val"]
    place = t.place("norm")
    return [
        a.optional(name)
        or t.constant(f"{place}.{name}", torch.full(shape, neutral, dtype=like.dtype, device=like.device))
        for name, neutral in (("weight", 1.0), ("bias", 0.0))
    ]


def _batch_norm(t: Translation, a: Arguments) -> tuple[str]:
    if a.optional("running_mean") is None or a.optional("running_var") is None:
        t.refuse("batch norm without running statistics")
    inputs = [a.value("input"), a.value("running_mean"), a.value("running_var")]
    affine = _affine(t, a, (a.shape("input")[1],))
    return (t.add("batch_norm", [*inputs, *affine], {"eps": float(a.raw("eps"))}, shape=a.shape("input")),)


def _layer_norm(t: Translation, a: Arguments) -> str:
    affine = _affine(t, a, tuple(a.raw("normalized_shape")))
    return t.add("layer_norm", [a.value("input"), *affine], {"eps": float(a.raw("eps"))})


def _group_norm(t: Translation, a: Arguments) -> str:
    affine = _affine(t, a, (a.shape("input")[1],))
    attributes: dict[str, Attribute] = {"groups": int(a.raw("num_groups")), "eps": float(a.raw("eps"))}
    return t.add("group_norm", [a.value("input"), *affine], attributes)


def _embedding(t: Translation, a: Arguments) -> str:
    return t.add("embedding", [a.value("indices"), a.value("weight")])


def _prelu(t: Translation, a: Arguments) -> str:
    return t.add("prelu", [a.value("self"), a.value("weight")])


def _elu(t: Translation, a: Arguments) -> str:
    if a.raw("scale") != 1 or a.raw("input_scale") != 1:
        t.refuse("elu with a scale")
    return t.add("elu", [a.value("self")], {"alpha": float(a.raw("alpha"))})


def _clamp(t: Translation, a: Arguments) -> str:
    least, most = a.raw("min"), a.raw("max")
    bounds: dict[str, Attribute] = {
        "least": -math.inf if least is None else float(least),
        "most": math.inf if most is None else float(most),
    }
    return t.add("clamp", [a.value("self")], bounds)


def _relu6(t: Translation, a: Arguments) -> str:
    return t.add("clamp", [a.value("self")], {"least": 0.0, "most": 6.0})


def _hardtanh(t: Translation, a: Arguments) -> str:
    return t.add("clamp", [a.value("self")], {"least": float(a.raw("min_val")), "most": float(a.raw("max_val"))})


def _pow(t: Translation, a: Arguments) -> str:
    exponent = a.raw("exponent")
    return t.add("pow", [a.value("self")], {"exponent": float(exponent)})


def _square(t: Translation, a: Arguments) -> str:
    return t.add("pow", [a.value("self")], {"exponent": 2.0})


def _reciprocal(t: Translation, a: Arguments) -> str:
    return t.add("pow", [a.value("self")], {"exponent": -1.0})


def _cast(t: Translation, a: Arguments) -> str:
    dtype = t.current.meta["val"].dtype
    if dtype == a.given["self"].meta["val"].dtype:
        return a.value("self")
    if dtype not in DTYPE_NAMES:
        t.refuse(f"a conversion to {dtype}")
    return t.add("cast", [a.value("self")], {"dtype": DTYPE_NAMES[dtype]})


def _matmul(t: Translation, a: Arguments) -> str:
    return t.add("matmul", [a.value("self"), a.value("other" if "other" in a else "mat2")])


def _addmm(t: Translation, a: Arguments) -> str:
    if a.raw("beta") != 1 or a.raw("alpha") != 1:
        t.refuse("addmm with alpha or beta")
    product = t.add("matmul", [a.value("mat1"), a.value("mat2")])
    return t.add("add", [product, a.value("self")])


def _attention(t: Translation, a: Arguments) -> str:
    if a.raw("dropout_p") != 0:
        t.refuse("attention with dropout in eval mode")
    if a.raw("enable_gqa"):
        t.refuse("attention with grouped queries")
    scale = a.raw("scale")
    mask = a.optional("attn_mask")
    attributes: dict[str, Attribute] = {
        "scale": float(scale) if scale is not None else a.shape("query")[-1] ** -0.5,
        "causal": bool(a.raw("is_causal")),
    }
    return t.add(
        "attention", [a.value("query"), a.value("key"), a.value("value"), *([mask] if mask else [])], attributes
    )


def _window(a: Arguments, count: int) -> dict[str, Attribute]:
    kernel = a.per_axis("kernel_size", count)
    return {
        "kernel": kernel,
        "stride": a.per_axis("stride", count, kernel),
        "padding": a.per_axis("padding", count, (0,) * count),
        "ceil_mode": bool(a.raw("ceil_mode")),
    }


def _max_pool(count: int, *, several: bool = False) -> Handler:
    """Variants that also return the positions have several values; only the first is known here."""

    def handler(t: Translation, a: Arguments) -> Any:
        attributes = {**_window(a, count), "dilation": a.per_axis("dilation", count)}
        value = t.current.meta["val"]
        shape = tuple(t.size(size) for size in (value[0] if several else value).shape)
        name = t.add("max_pool", [a.value("self")], attributes, shape=shape)
        return (name, None) if several else name

    return handler


def _avg_pool(count: int) -> Handler:
    def handler(t: Translation, a: Arguments) -> str:
        if "divisor_override" in a and a.raw("divisor_override") is not None:
            t.refuse("average pooling with divisor_override")
        attributes = {**_window(a, count), "count_padding": bool(a.raw("count_include_pad"))}
        return t.add("avg_pool", [a.value("self")], attributes)

    return handler


def _adaptive(op: str, count: int) -> Handler:
    """Sizes are fixed, so adaptive pooling is ordinary pooling, as long as they divide."""

    def handler(t: Translation, a: Arguments) -> Any:
        several = op == "max_pool"
        value = t.current.meta["val"]
        result = tuple(t.size(size) for size in (value[0] if several else value).shape)
        before, after = a.shape("self")[-count:], result[-count:]
        if any(not new or old % new for old, new in zip(before, after, strict=True)):
            t.refuse(
                f"adaptive pooling from {describe_shape(before)} to {describe_shape(after)}, which does not divide,"
            )
        kernel = tuple(old // new for old, new in zip(before, after, strict=True))
        attributes: dict[str, Attribute] = {
            "kernel": kernel,
            "stride": kernel,
            "padding": (0,) * count,
            "ceil_mode": False,
        }
        attributes |= {"dilation": (1,) * count} if op == "max_pool" else {"count_padding": True}
        name = t.add(op, [a.value("self")], attributes, shape=result)
        return (name, None) if several else name

    return handler


def _reduce(op: str) -> Handler:
    def handler(t: Translation, a: Arguments) -> str:
        rank = len(a.shape("self"))
        given = a.raw("dim") if "dim" in a else None
        axes = [given] if isinstance(given, int) else given or range(rank)
        if "dtype" in a and a.raw("dtype") is not None:
            t.refuse(f"{op} with a type")
        reduced = tuple(sorted(axis % rank for axis in axes))
        if any(a.shape("self")[axis] < 0 for axis in reduced):
            t.refuse(f"{op} over the batch")
        return t.add(
            op, [a.value("self")], {"axes": reduced, "keep": bool(a.raw("keepdim")) if "keepdim" in a else False}
        )

    return handler


def _softmax(op: str) -> Handler:
    def handler(t: Translation, a: Arguments) -> str:
        if "dtype" in a and a.raw("dtype") not in (None, t.current.meta["val"].dtype):
            t.refuse(f"{op} with a type")
        axis = a.axis("dim")
        if a.shape("self")[axis] < 0:
            t.refuse(f"{op} over the batch")
        return t.add(op, [a.value("self")], {"axis": axis})

    return handler


def _reshape(t: Translation, a: Arguments) -> str:
    shape = t.shape(t.current)
    x = a.value("self")
    return x if shape == a.shape("self") else t.add("reshape", [x], {"shape": shape})


def _expand(t: Translation, a: Arguments) -> str:
    shape = t.shape(t.current)
    x = a.value("self")
    return x if shape == a.shape("self") else t.add("expand", [x], {"shape": shape})


def _permute(t: Translation, a: Arguments) -> str:
    rank = len(a.shape("self"))
    return t.add("permute", [a.value("self")], {"axes": tuple(axis % rank for axis in a.raw("dims"))})


def _transpose(t: Translation, a: Arguments) -> str:
    rank = len(a.shape("self"))
    axes = list(range(rank))
    first, second = (a.axis("dim0"), a.axis("dim1")) if "dim0" in a else (0, rank - 1)
    axes[first], axes[second] = axes[second], axes[first]
    return t.add("permute", [a.value("self")], {"axes": tuple(axes)})


def _slice(t: Translation, a: Arguments) -> str:
    shape = a.shape("self")
    if t.shape(t.current) == shape:
        return a.value("self")
    axis = a.axis("dim")
    if shape[axis] < 0:
        t.refuse("a slice of the batch")
    start, stop, step = slice(a.raw("start"), a.raw("end"), a.raw("step")).indices(shape[axis])
    return t.add("slice", [a.value("self")], {"axis": axis, "start": start, "stop": max(start, stop), "step": step})


def _select(t: Translation, a: Arguments) -> str:
    shape, axis = a.shape("self"), a.axis("dim")
    if shape[axis] < 0:
        t.refuse("one example out of the batch")
    return t.add("select", [a.value("self")], {"axis": axis, "index": int(a.raw("index")) % shape[axis]})


def _unbind(t: Translation, a: Arguments) -> tuple[str, ...]:
    shape, axis = a.shape("self"), a.axis("dim")
    if shape[axis] < 0:
        t.refuse("a loop over the batch")
    rest = (*shape[:axis], *shape[axis + 1 :])
    return tuple(
        t.add("select", [a.value("self")], {"axis": axis, "index": index}, shape=rest) for index in range(shape[axis])
    )


def _split(t: Translation, a: Arguments) -> tuple[str, ...]:
    """split, chunk and their kin: consecutive slices, whose sizes are those of the results."""
    axis = a.axis("dim")
    parts = [tuple(t.size(size) for size in value.shape) for value in t.current.meta["val"]]
    if a.shape("self")[axis] < 0:
        t.refuse("a split of the batch")
    names, start = [], 0
    for part in parts:
        attributes: dict[str, Attribute] = {"axis": axis, "start": start, "stop": start + part[axis], "step": 1}
        names.append(t.add("slice", [a.value("self")], attributes, shape=part))
        start += part[axis]
    return tuple(names)


def _concat(t: Translation, a: Arguments) -> str:
    values = [t.values[value] for value in a.given["tensors"]]
    rank = len(t.shape(t.current))
    axis = int(a.raw("dim")) % rank
    if t.shape(t.current)[axis] < 0:
        t.refuse("a concatenation along the batch")
    return t.add("concat", values, {"axis": axis})


def _stack(t: Translation, a: Arguments) -> str:
    shape = t.shape(t.current)
    axis = int(a.raw("dim")) % len(shape)
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = [t.add("reshape", [t.values[value]], {"shape": single}, shape=single) for value in a.given["tensors"]]
    return t.add("concat", parts, {"axis": axis})


def _pad(t: Translation, a: Arguments) -> str:
    widths = list(a.raw("pad"))
    if min(widths) < 0:
        t.refuse("padding by a negative width")
    attributes: dict[str, Attribute] = {
        "before": tuple(reversed(widths[::2])),
        "after": tuple(reversed(widths[1::2])),
        "mode": a.raw("mode") if "mode" in a else "constant",
        "value": float(a.raw("value") or 0.0) if "value" in a else 0.0,
    }
    return t.add("pad", [a.value("self")], attributes)


def _names(names: Iterable[str], handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(names, handler)


HANDLERS: dict[str, Handler] = {
    **_names(("alias", "clone", "contiguous", "detach", "dropout", "feature_dropout", "alpha_dropout"), _same),
    **_names(("to", "_to_copy", "type_as"), _cast),
    "linear": _linear,
    **_names(("conv1d", "conv2d", "conv3d"), _conv),
    **_names(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    "_native_batch_norm_legit_no_training": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "embedding": _embedding,
    "prelu": _prelu,
    **{name: _pointwise(name) for name, operation in POINTWISE.items() if not operation.attributes},
    "leaky_relu": _pointwise("leaky_relu", slope="negative_slope"),
    "gelu": _pointwise("gelu", approximate="approximate"),
    "softplus": _pointwise("softplus", beta="beta", threshold="threshold"),
    "elu": _elu,
    **_names(("clamp", "clamp_min", "clamp_max"), _clamp),
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "pow": _pow,
    "square": _square,
    "reciprocal": _reciprocal,
    **{name: _binary(name) for name in ARITHMETIC},
    "rsub": _reversed_sub,
    **_names(("matmul", "mm", "bmm"), _matmul),
    "addmm": _addmm,
    "scaled_dot_product_attention": _attention,
    **{f"max_pool{n}d": _max_pool(n) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _max_pool(n, several=True) for n in (2, 3)},
    **{f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive("avg_pool", n) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": _adaptive("avg_pool", n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive("max_pool", n) for n in (1, 2, 3)},
    **{name: _reduce(name) for name in ("mean", "sum", "amax")},
    **_names(("softmax", "_softmax"), _softmax("softmax")),
    **_names(("log_softmax", "_log_softmax"), _softmax("log_softmax")),
    **_names(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    **_names(("expand", "expand_as"), _expand),
    "permute": _permute,
    **_names(("transpose", "t"), _transpose),
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **_names(("split", "split_with_sizes", "chunk"), _split),
    "cat": _concat,
    "stack": _stack,
    **_names(("pad", "constant_pad_nd"), _pad),
}
