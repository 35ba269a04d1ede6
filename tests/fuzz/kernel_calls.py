"""Random shapes, strides, offsets, types and devices through every door to C.

Each call either is refused with an ArgumentError (by a layer, also with torch's own error), or gives what torch gives
for the same numbers. Many tensors lie in the middle of a larger piece of memory, whose other numbers must stay. What
was made right and plain must be taken. On sanitised kernels (see `sanitised`), wrong reads show as well.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsevd
from fuzz.trial import Trial
from sparsevd import kernels
from sparsevd.errors import ArgumentError, SparseVDError
from sparsevd.kernels import lanes
from sparsevd.kernels.coder import NativeCoder
from sparsevd.kernels.inference import Geometry, SparseProduct
from sparsevd.posterior import equations
from sparsevd.runtime.layers import InferenceLayer
from sparsevd.runtime.plan import Plan

CANARY = 12345.678
ODD_KINDS = (
    *("shape", "strided", "turned", "expanded", "half", "double", "bfloat16", "int", "negated", "zeros", "meta"),
    *("foreign", "sparse", "scalar", "empty", "channels_last", "inference"),
)
FREED_KINDS = ("freed", "short")


class Foreign(Tensor):
    """A subclass of a user's own."""


@dataclass
class Made:
    """A tensor, whether there is nothing odd about it, and the memory around it."""

    tensor: Tensor
    plain: bool
    around: list[Tensor]
    freed: bool = False

    def copy(self) -> Tensor:
        """What it holds before a call; torch itself must not be asked for numbers that are not there."""
        return torch.zeros(()) if self.freed else self.tensor.clone()

    def intact(self) -> None:
        assert not self.freed, "memory that is not there was taken"
        for piece in self.around:
            assert (piece == CANARY).all(), "memory beside a tensor was written to"


def make(
    draw: random.Random, shape: tuple[int, ...], odd: float = 0.15, scale: float = 1.0, freed: bool = True
) -> Made:
    """A tensor of this shape, or with the given probability of another shape, type, order or kind.

    `freed`: also without the memory that it claims; not where torch's own operations are reached, which then crash.
    """
    if draw.random() >= odd:
        return _in_the_middle(draw, shape, scale)
    kind = draw.choice(ODD_KINDS + FREED_KINDS if freed else ODD_KINDS)
    values = scale * torch.randn(shape)
    tensor = {
        "shape": lambda: scale * torch.randn(_other_shape(draw, shape)),
        "strided": lambda: (scale * torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]) if shape else values,
        "turned": lambda: values.transpose(0, -1).contiguous().transpose(0, -1) if shape else values,
        "expanded": lambda: (scale * torch.randn(1, *shape[1:])).expand(shape) if shape else values,
        "half": values.half,
        "double": values.double,
        "bfloat16": values.bfloat16,
        "int": values.int,
        "negated": lambda: torch._neg_view(values),
        "zeros": lambda: torch._efficientzerotensor(shape),
        "meta": lambda: values.to("meta"),
        "foreign": lambda: values.as_subclass(Foreign),
        "freed": lambda: _resized(values, 0),
        "short": lambda: _resized(values, 4 * (values.numel() // 2)),
        "sparse": values.to_sparse if shape else values.clone,
        "scalar": lambda: torch.tensor(scale),
        "empty": lambda: torch.empty((0, *shape[1:])) if shape else values,
        "channels_last": lambda: values.to(memory_format=torch.channels_last) if len(shape) == 4 else values,
        "inference": lambda: _inference(values),
    }[kind]()
    return Made(tensor, False, [], kind in FREED_KINDS and tensor.numel() > 0)


def _in_the_middle(draw: random.Random, shape: tuple[int, ...], scale: float) -> Made:
    before, after, n = draw.choice((0, 1, 3, 16)), draw.choice((0, 1, 5, 64)), math.prod(shape)
    memory = torch.full((before + n + after,), CANARY)
    inside = memory[before : before + n]
    inside.copy_(scale * torch.randn(n))
    return Made(inside.view(shape), True, [memory[:before], memory[before + n :]])


def _other_shape(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    changed = list(shape)
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.randrange(len(changed) + 1)
        how = draw.randrange(3)
        if how == 0:
            changed.insert(place, draw.choice((1, 2, 7)))
        elif how == 1 and changed:
            changed.pop(place % len(changed))
        elif changed:
            changed[place % len(changed)] = max(0, changed[place % len(changed)] + draw.choice((-1, 1, 30, 700)))
    return tuple(changed)


def _resized(tensor: Tensor, nbytes: int) -> Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _size(draw: random.Random) -> int:
    return draw.choice((1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100))


def _same(ours: Tensor, theirs: Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


# ---- one function a door: it makes its arguments, calls, compares, and says whether all of them were plain ----


def linear(draw: random.Random) -> tuple[Callable[[], None], bool]:
    rows, ins, outs = _size(draw), _size(draw), _size(draw)
    made = [make(draw, shape, 0.08) for shape in ((rows, ins), (outs, ins), (outs, ins), (outs,))]
    x, weight, log_sigma2, bias = (m.tensor for m in made)
    with_bias = draw.random() < 0.7
    if made[2].plain:
        log_sigma2.fill_(-80.0)  # no noise to speak of

    def call() -> None:
        out, slope = kernels.linear_forward(x, weight, bias if with_bias else None, log_sigma2, 7)
        if made[2].plain:
            _same(out, F.linear(x, weight, bias if with_bias else None), ins**0.5)
        grad = make(draw, (rows, outs), 0.2)
        wants = draw.random() < 0.5
        grad_x, grad_weight, grad_bias, _ = kernels.linear_backward(
            grad.tensor, slope, x, weight, log_sigma2, with_bias, wants
        )
        _same(grad_weight, grad.tensor.t() @ x, rows**0.5)
        if grad_x is not None and made[2].plain:
            _same(grad_x, grad.tensor @ weight, outs**0.5)
        if grad_bias is not None:
            _same(grad_bias, grad.tensor.sum(0), rows**0.5)
        for m in (*made[: 4 if with_bias else 3], grad):
            m.intact()

    return call, all(m.plain for m in made) and False  # the gradient may be odd


def layer(draw: random.Random) -> tuple[Callable[[], None], bool]:
    """The layer itself, forward and backward: it must do what torch does, or fail as torch does."""
    ins, outs, rows = _size(draw), _size(draw), _size(draw)
    twin = nn.Linear(ins, outs, bias=draw.random() < 0.7)
    sparse = sparsevd.sparsify(twin, initial_log_sigma2=-80.0).train()
    x = make(draw, (rows, ins), 0.4, freed=False)
    if draw.random() < 0.2 and twin.bias is not None:
        bias = make(draw, (outs,), 1.0, freed=False).tensor
        if bias.is_floating_point() and not bias.is_sparse and bias.device.type == "cpu" and type(bias) is Tensor:
            sparse.bias = nn.Parameter(bias.detach(), requires_grad=not bias.is_inference())
    if draw.random() < 0.1:
        sparse.log_sigma2 = nn.Parameter(torch.full(_other_shape(draw, (outs, ins)), -80.0))

    def call() -> None:
        out = sparse(x.tensor)
        _same(out.detach(), F.linear(x.tensor, sparse.weight, sparse.bias).detach(), ins**0.5)
        out.square().sum().backward()
        assert sparse.weight.grad is not None
        x.intact()

    return call, False


def kl(draw: random.Random) -> tuple[Callable[[], None], bool]:
    shape = tuple(_size(draw) for _ in range(draw.choice((1, 2, 4))))
    shape = shape if math.prod(shape) < 50_000 else (draw.randrange(9000),)
    theta, log_sigma2 = make(draw, shape), make(draw, shape, scale=4.0)

    def call() -> None:
        value, grad_theta, grad_log_sigma2 = kernels.kl_with_gradients(theta.tensor, log_sigma2.tensor)
        wide = [t.tensor.detach().double().requires_grad_() for t in (theta, log_sigma2)]
        expected = equations.kl(*wide)
        _same(value, expected.detach(), max(1.0, expected.abs().item()))
        _same(grad_log_sigma2, torch.autograd.grad(expected, wide[1])[0])
        assert grad_theta.shape == theta.tensor.shape
        through = kernels.kl([(theta.tensor, log_sigma2.tensor)])
        _same(through, value, max(1.0, abs(value.item())))
        theta.intact()
        log_sigma2.intact()

    return call, theta.plain and log_sigma2.plain


def adam(draw: random.Random) -> tuple[Callable[[], None], bool]:
    shape = (_size(draw), _size(draw))
    made = [make(draw, shape, 0.04) for _ in range(8)]
    for place in (2, 3, 6, 7):  # Adam's averages, from the start
        if made[place].plain:
            made[place].tensor.zero_()

    def call() -> None:
        before = made[0].copy()
        kernels.adam_step_(*(m.tensor for m in made), settings=(0.0, 0.0, 0.0, 1.0, 1e-8, 0.1, 0.1))
        # With β₁ = β₂ = 0 the step is the rate times the sign of the gradient.
        if made[2].plain and made[3].plain:
            _same(made[0].tensor, before - 0.1 * made[1].tensor / (made[1].tensor.abs() + 1e-8))
        for m in made:
            m.intact()

    return call, all(m.plain for m in made)


def noise(draw: random.Random) -> tuple[Callable[[], None], bool]:
    shape = (draw.choice((1, 7, 255, 256, 257, 300)), _size(draw))
    gamma, delta, epsilon = (make(draw, shape, 0.1) for _ in range(3))
    if delta.plain:
        delta.tensor.abs_()

    def call() -> None:
        expected = gamma.copy(), delta.copy()
        kernels.sample_(gamma.tensor, delta.tensor, draw.getrandbits(63), epsilon.tensor)
        _same(gamma.tensor, equations.noisy_output(*expected, epsilon.tensor))
        for m in (gamma, delta, epsilon):
            m.intact()

    return call, gamma.plain and delta.plain and epsilon.plain


def variance(draw: random.Random) -> tuple[Callable[[], None], bool]:
    shape = (_size(draw), _size(draw))
    log_sigma2, gradient = make(draw, shape), make(draw, shape)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float64))

    def call() -> None:
        ours, theirs = kernels.variance(log_sigma2.tensor, dtype).float(), log_sigma2.tensor.exp().to(dtype).float()
        step = 2**-7 if dtype is torch.bfloat16 else 1e-5  # the last bit of float32 may decide how bfloat16 is rounded
        torch.testing.assert_close(ours, theirs, rtol=step, atol=1e-30, equal_nan=True)
        before = gradient.copy()
        kernels.times_variance_(gradient.tensor, log_sigma2.tensor)
        _same(gradient.tensor, before * log_sigma2.tensor.exp(), 10)
        for m in (log_sigma2, gradient):
            m.intact()

    return call, log_sigma2.plain and gradient.plain and dtype is not torch.float64


def sparse_product(draw: random.Random) -> tuple[Callable[[], None], bool]:
    channels, outputs, batch = draw.randrange(1, 6), draw.randrange(1, 9), draw.randrange(1, 5)
    size, kernel = (draw.randrange(1, 12), draw.randrange(1, 20)), (draw.randrange(1, 4), draw.randrange(1, 4))
    weight = make(draw, (outputs, channels, *kernel), 0.05)
    bias, x = make(draw, (outputs,), 0.15), make(draw, (batch, channels, *size), 0.15)
    padding = tuple(draw.randrange(3) for _ in range(4))
    stride, dilation = ((draw.choice((0, 1, 1, 1, 2, 3)), draw.choice((1, 1, 2))) for _ in range(2))
    images = draw.choice((0, 1, 1, lanes(), 2 * lanes(), 3))

    def call() -> None:
        geometry = Geometry(stride, padding, dilation)
        layer = SparseProduct(weight.tensor, bias.tensor, geometry, size, batch, images)
        ours = layer(x.tensor, (batch, outputs, *layer.out_size), draw.randrange(1, 4))
        top, bottom, left, right = padding
        padded = F.pad(x.tensor.view(batch, channels, *size), (left, right, top, bottom))
        shape = weight.tensor.shape  # with three axes it is that of images of one row
        filters = weight.tensor.reshape(*shape[:2], *(1,) * (4 - len(shape)), *shape[2:])
        wide = [t.to(torch.float32) for t in (padded, filters, bias.tensor)]
        _same(ours, F.conv2d(*wide, stride, 0, dilation), 10)
        x.intact()

    return call, False


def inference_layer(draw: random.Random) -> tuple[Callable[[], None], bool]:
    ins, outs, rows = _size(draw), _size(draw), _size(draw)
    twin = nn.Linear(ins, outs)
    twin.weight.data.mul_(torch.rand(outs, ins) < 0.3)
    bias, x = make(draw, (outs,), 0.3, freed=False), make(draw, (rows, ins), 0.3, freed=False)

    def call() -> None:
        with torch.no_grad():
            ours = InferenceLayer(twin, twin.weight, bias.tensor)(x.tensor)
            theirs = F.linear(x.tensor, twin.weight, bias.tensor)
            # The bias may come in another type where torch takes that.
            _same(torch.as_tensor(ours).float(), torch.as_tensor(theirs).float(), ins**0.5)
        x.intact()

    return call, False


def plan(draw: random.Random) -> tuple[Callable[[], None], bool]:
    x = make(draw, (draw.choice((1, 2, 17)), 3, 9, 8), 0.5)

    def call() -> None:
        ours = _plan()(x.tensor)
        assert x.tensor.dtype is torch.float32
        copied = torch.empty(x.tensor.shape).copy_(x.tensor)
        _same(ours, _network()(copied).detach(), 10)
        x.intact()

    return call, x.plain


_MADE: dict[str, object] = {}


def _network() -> nn.Module:
    if "network" not in _MADE:
        torch.manual_seed(0)
        _MADE["network"] = nn.Sequential(
            nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 7)
        ).eval()
    network = _MADE["network"]
    assert isinstance(network, nn.Module)
    return network


def _plan() -> Plan:
    if "plan" not in _MADE:
        _MADE["plan"] = Plan(sparsevd.capture(_network(), torch.zeros(2, 3, 9, 8)))
    made = _MADE["plan"]
    assert isinstance(made, Plan)
    return made


def coder(draw: random.Random) -> tuple[Callable[[], None], bool]:
    rows, columns = draw.randrange(5), draw.randrange(12)
    values = np.random.default_rng(draw.getrandbits(32)).integers(-3, 4, (rows, columns)).astype(np.int32)
    hint = np.arange(columns, dtype=np.int32) if draw.random() < 0.5 else None
    width, plane = draw.choice((0, 0, 1, 3, columns)), draw.choice((0, 0, 2, columns))
    mantissa = draw.choice((-1, -1, -1, 0, 5, 23))
    plain = max(width, plane) <= columns or rows * columns == 0
    if draw.random() < 0.4:
        plain = False
        changes: list[Callable[[], object]] = [
            lambda: np.asfortranarray(values),
            lambda: values.astype(np.int64),
            lambda: values[:, ::2],
            lambda: values.reshape(-1),
            lambda: np.zeros((rows, columns), np.float32),
        ]
        how = draw.randrange(9)
        if how < 5:
            values = changes[how]()  # type: ignore[assignment]
        elif how == 5:
            hint = np.arange(columns + draw.choice((-1, 1, 5)) if columns else 3, dtype=np.int32)
        elif how == 6:
            width = draw.choice((-1, columns + 1, 2**40))
        elif how == 7:
            mantissa = draw.choice((-2, 24, 32, 1000))
        else:
            hint = np.arange(columns, dtype=np.int64)

    def call() -> None:
        numbers = values
        if mantissa >= 0:  # float32 bits with as many zeros at their end
            bits = values.astype(np.float32).view(np.int32) & -(1 << (23 - min(mantissa, 23)))
            numbers = bits if values.dtype == np.int32 else values
        encoder = NativeCoder()
        encoder.code_matrix(numbers, width, plane, hint, mantissa)
        written = encoder.finish()
        encoder.close()
        decoder, read = NativeCoder(written), np.zeros_like(numbers)
        decoder.code_matrix(read, width, plane, hint, mantissa)
        decoder.close()
        assert np.array_equal(read, numbers)
        closed = draw.choice((encoder, decoder))
        try:
            closed.code_bytes(bytearray(3))
        except ArgumentError:
            return
        raise AssertionError("a closed coder was used")

    return call, plain


DOORS: tuple[Callable[[random.Random], tuple[Callable[[], None], bool]], ...] = (
    linear, layer, kl, adam, noise, variance, sparse_product, inference_layer, plan, coder,
)  # fmt: skip
# Here torch's own operations are reached too, and say in their own words what does not fit together.
MEET_TORCH = (layer, inference_layer, linear, sparse_product)


def run(inputs: int, seed: int) -> Trial:
    """So many calls, the doors in turn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    trial = Trial("kernel calls")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernels for several threads are given their number
    try:
        for number in range(inputs):
            door = DOORS[number % len(DOORS)]
            state = draw.getrandbits(64)
            call, plain = door(random.Random(state))
            with trial.one(f"{door.__name__}, seed {state}"):
                _call(call, plain, door in MEET_TORCH, trial)
    finally:
        torch.set_num_threads(threads)
    return trial


def _call(call: Callable[[], None], plain: bool, meets_torch: bool, trial: Trial) -> None:
    try:
        call()
    except SparseVDError:
        assert not plain, "a plain call was refused"
        trial.refused += 1
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        if not meets_torch:
            raise
        trial.count("refused by torch")
