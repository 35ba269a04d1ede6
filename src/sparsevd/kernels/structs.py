"""The structs that Python fills and C reads: field by field those of kernels.h, inference.h and plan.h.

`loading` compares sizes and refuses a library that has others; tests/test_kernels.py compares every field.
"""

import ctypes
from typing import Any

import numpy as np

_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_Fields = tuple[tuple[str, Any], ...]


def _all(kind: Any, names: str) -> _Fields:
    return tuple((name, kind) for name in names.split())


class AdamStruct(ctypes.Structure):
    """struct adam"""

    _fields_ = _all(_FLOAT, "kl_weight beta1 beta2 deviation epsilon theta_rate log_sigma2_rate")


class TrainedStruct(ctypes.Structure):
    """struct trained"""

    _fields_ = _all(_POINTER, "x grad mean square")


class LinearStruct(ctypes.Structure):
    """struct linear"""

    _fields_ = (*_all(_INT32, "rows ins outs"), *_all(_POINTER, "sgemm x theta log_sigma2 x2 sigma2"))


class NonzeroStruct(ctypes.Structure):
    """struct nonzero"""

    _fields_ = (("offset", _INT32), ("weight", _FLOAT))


NONZERO = np.dtype(NonzeroStruct)


class LayerStruct(ctypes.Structure):
    """struct sparse_layer"""

    _fields_ = (
        *_all(_INT32, "channels height width outputs out_height out_width images used stride_x pitch plane"),
        *_all(_INT32, "zero_runs direct out_pitch out_plane"),
        *_all(_FLOAT, "low high"),
        *_all(_POINTER, "slot place zero order starts nonzeros bias"),
    )


class ValueStruct(ctypes.Structure):
    """struct value"""

    _fields_ = _all(_INT32, "channels height width pitch plane planes first")


class StepStruct(ctypes.Structure):
    """struct step"""

    _fields_ = (
        ("kind", _INT32),
        *_all(ValueStruct, "input second out"),
        *_all(_INT32, "kernel_y kernel_x stride_y stride_x top left dilation_y dilation_x count_padding"),
        *_all(_FLOAT, "low high"),
        *_all(_POINTER, "scale shift layer"),
    )


class PlanStruct(ctypes.Structure):
    """struct plan"""

    _fields_ = (
        *_all(_INT32, "images steps out_planes out_size"),
        ("scratch", _INT64),
        ("input", _POINTER),
        ("input_planes", _INT32),
        ("step", _POINTER),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "adam": AdamStruct,
    "trained": TrainedStruct,
    "linear": LinearStruct,
    "nonzero": NonzeroStruct,
    "sparse_layer": LayerStruct,
    "value": ValueStruct,
    "step": StepStruct,
    "plan": PlanStruct,
}


class _Layout(ctypes.Structure):
    """struct layout"""

    _fields_ = (("name", ctypes.c_char_p), ("size", ctypes.c_size_t), ("last", ctypes.c_size_t))


def difference(kernels: ctypes.CDLL) -> str | None:
    """What a library's structs have otherwise than these: sizes, and where their last fields begin."""
    kernels.sparsevd_layouts.restype = ctypes.POINTER(_Layout)
    theirs, ours = {}, {}
    for layout in kernels.sparsevd_layouts():
        if layout.name is None:  # the end
            break
        theirs[layout.name.decode()] = (layout.size, layout.last)
    for name, struct in STRUCTS.items():
        ours[name] = (ctypes.sizeof(struct), getattr(struct, struct._fields_[-1][0]).offset)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"struct {name} has size and last offset {theirs.get(name)} in C, {ours.get(name)} in Python"
    return None
