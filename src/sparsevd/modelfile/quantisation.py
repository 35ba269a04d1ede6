"""Tensors as the file holds them, and back: exactly, with a number of bits, or as coarsely as the posterior allows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.modelfile.container import FLOATS, Entry, Form
from sparsevd.modelfile.symbols import Matrix
from sparsevd.posterior import named_posteriors

# The number of a type is its place here; part of the format.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_EXACT = 23  # mantissa bits of a float32
_PLAIN_MANTISSA = 8  # of parameters without a posterior beside quantised ones: a relative error below 0.2 %
_NEGATIVE_ZERO = np.int32(-(1 << 31))
_LARGEST = 1 << 24  # integers that a float32 holds exactly


@dataclass(frozen=True)
class PosteriorSteps:
    """Every weight of a Sparse VD layer is rounded to a multiple of `steps`·σ, with the median σ of the kept ones.

    The bias has no posterior and feels every input, so its step is half of that. What else the network has is
    rounded to 8 mantissa bits.
    """

    steps: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.steps < float("inf"):
            raise ArgumentError(f"steps={self.steps} must be a positive number: the rounding step in units of σ")


BIAS_STEP = 0.5  # of the step of the layer's weights
Precision = str | int | PosteriorSteps


def checked(precision: Precision) -> Precision:
    """The precision, or an ArgumentError."""
    if precision == "posterior":
        return PosteriorSteps()
    whole = isinstance(precision, int) and not isinstance(precision, bool) and 2 <= precision <= 16
    if precision == "lossless" or whole or isinstance(precision, PosteriorSteps):
        return precision
    raise ArgumentError(f'precision={precision!r} must be "lossless", a number of bits from 2 to 16, or "posterior"')


def posterior_steps(model: nn.Module, precision: PosteriorSteps) -> dict[str, float]:
    """The step of every parameter of the Sparse VD layers, by name in the pruned network."""
    steps: dict[str, float] = {}
    for name, posterior in named_posteriors(model).items():
        kept = posterior.log_alpha().detach() <= posterior.threshold
        sigma = torch.exp(0.5 * posterior.log_sigma2.detach()[kept])
        steps[name] = precision.steps * sigma.median().item() if len(sigma) else 0.0
        for other in posterior.layer.others:
            beside = name.removesuffix(posterior.weight) + other
            steps[beside] = min(steps.get(beside, math.inf), steps[name] * BIAS_STEP)
    if not steps:
        raise ArgumentError(
            f'precision="posterior" needs a Sparse VD model, and {type(model).__name__} has no Sparse VD layer; give '
            "the model before pruning, or a number of bits"
        )
    return steps


def entries_of(
    state: Mapping[str, Tensor], precision: str | int | PosteriorSteps, steps: Mapping[str, float]
) -> list[Entry]:
    """The entries of a state_dict. `steps` holds the rounding steps of the posterior by name."""
    entries: list[Entry] = []
    places: dict[tuple[object, ...], int] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ArgumentError(f"{name} cannot be saved: it is not a dense tensor of a known type")
        if tensor.is_meta:
            raise ArgumentError(f"{name} cannot be saved: it is on the meta device and has no numbers")
        if "\n" in name or name.encode(errors="replace").decode() != name:
            raise ArgumentError(f"{name!r} cannot be saved: a name may not hold a line break or half a character")
        dtype = DTYPES.index(tensor.dtype)
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if tensor.numel() and place in places:
            entries.append(Entry(name, dtype, tuple(tensor.shape), Form.ALIAS, alias=places[place]))
            continue
        places[place] = len(entries)
        entries.append(_entry(name, dtype, tensor.detach().cpu().contiguous(), precision, steps.get(name)))
    return entries


def tensor_of(entry: Entry) -> Tensor:
    """The tensor of a decoded entry that is not an alias."""
    if entry.form == Form.RAW:
        assert isinstance(entry.values, bytearray)
        if not entry.values:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        if DTYPES[entry.dtype] == torch.bool:
            return torch.frombuffer(entry.values, dtype=torch.uint8).reshape(entry.shape) != 0
        return torch.frombuffer(entry.values, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
    assert isinstance(entry.values, np.ndarray)
    if entry.form == Form.FLOAT:
        numbers = entry.values.view(np.float32)
    else:
        with np.errstate(over="ignore"):  # a file may say what only infinity can hold
            numbers = np.multiply(entry.values, np.float32(entry.step_value), dtype=np.float32, casting="unsafe")
    return torch.from_numpy(numbers).reshape(entry.shape).to(DTYPES[entry.dtype])


def _entry(name: str, dtype: int, tensor: Tensor, precision: str | int | PosteriorSteps, step: float | None) -> Entry:
    shape = tuple(tensor.shape)
    if dtype not in FLOATS:
        return Entry(name, dtype, shape, Form.RAW, values=_raw(tensor))
    exact = np.ascontiguousarray(tensor.to(torch.float32).numpy())
    if precision == "lossless":
        return _exact(name, dtype, tensor, exact)
    if not np.isfinite(exact).all():
        raise ArgumentError(f"{name} holds numbers that are not finite; only precision='lossless' can save them")
    if step is None and isinstance(precision, int) and len(shape) > 1:
        step = float(np.abs(exact).max(initial=0.0)) / (2 ** (precision - 1) - 1)
    if step is not None:
        stored = _upper_half(step)
        entry = Entry(name, dtype, shape, Form.GRID, step=stored)
        if 0 < entry.step_value < np.inf and np.abs(exact).max(initial=0.0) / entry.step_value < _LARGEST:
            entry.values = np.rint(exact / np.float32(entry.step_value)).astype(np.int32).reshape(entry.matrix_shape)
            return entry
        return _exact(name, dtype, tensor, exact)
    mantissa = precision if isinstance(precision, int) else _PLAIN_MANTISSA
    rounded = _rounded(exact, mantissa)
    return _exact(name, dtype, tensor, rounded if np.isfinite(rounded).all() else exact)


def _exact(name: str, dtype: int, tensor: Tensor, numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Entry:
    """Float32 bits, without the mantissa bits that are zero in all of them. −0.0, as a mask leaves it, is a zero."""
    entry = Entry(name, dtype, tuple(tensor.shape), Form.FLOAT)
    bits: Matrix = np.ascontiguousarray(numbers).view(np.int32).reshape(entry.matrix_shape)
    negative_zeros = bits == _NEGATIVE_ZERO
    if negative_zeros.any():
        bits = np.where(negative_zeros, np.int32(0), bits)
    used = int(np.bitwise_or.reduce(bits, axis=None)) & 0x7FFFFF if bits.size else 0
    entry.mantissa = 23 - ((used & -used).bit_length() - 1) if used else 0
    entry.values = bits
    # A NaN of a half type need not survive the conversion.
    if dtype and not _same_bytes(tensor, tensor_of(entry)):
        return Entry(name, dtype, tuple(tensor.shape), Form.RAW, values=_raw(tensor))
    return entry


def _same_bytes(tensor: Tensor, other: Tensor) -> bool:
    return not tensor.isnan().any() or _raw(tensor) == _raw(other)


def _raw(tensor: Tensor) -> bytearray:
    return bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def _rounded(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]], mantissa: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """To the nearest number with so many mantissa bits."""
    drop = 23 - mantissa
    bits = numbers.view(np.uint32)
    half = np.uint32(1 << drop >> 1)
    return ((bits + half) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)


def _upper_half(step: float) -> int:
    """The nearest float32 of which the lower 16 bits are zero, as its upper 16 bits."""
    bits = int(np.array([step], dtype=np.float32).view(np.uint32)[0])
    return min(bits + 0x8000 >> 16, 0x7F7F)
