"""A pruned network made faster, layer by layer: sparse wherever that measures faster than dense."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsevd import kernels
from sparsevd.conversion import FAST_PATHS
from sparsevd.errors import ArgumentError, ConversionError
from sparsevd.posterior import is_noisy
from sparsevd.reporting.table import table as text_table
from sparsevd.runtime.folding import Followers, followers, with_batch_norm
from sparsevd.runtime.layers import LAYER_TYPES, InferenceLayer, group_choices
from sparsevd.runtime.timing import timings

WORTH = 0.97  # a layer stays dense unless the sparse way takes at most this part of the time


@dataclass(frozen=True)
class LayerChoice:
    """One layer: the share of weights kept, seconds per call both ways, and which way it now takes."""

    name: str
    kept: float
    dense_seconds: float
    sparse_seconds: float | None
    choice: str
    folded: tuple[str, ...] = ()


class Accelerated(nn.Module):
    """A network whose layers take their faster way; call it as the network it was made from. For inference only.

    It is a snapshot: weights and biases were copied when it was made, and what later becomes of the network it was made
    from does not change it. To have it follow, call `accelerate` again.

    `choices` holds what was measured, `left_alone` what was not touched and why; printing it shows both. Other
    attributes are those of the network.
    """

    def __init__(
        self,
        model: nn.Module,
        choices: tuple[LayerChoice, ...],
        left_alone: dict[str, str],
        seconds: tuple[float, float],
    ) -> None:
        super().__init__()
        self.model = model
        self.choices, self.left_alone = choices, left_alone
        self.dense_seconds, self.seconds = seconds
        self.training = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return cast(nn.Module, self._modules["model"])(*arguments, **named)  # past __getattr__, which takes its time

    def train(self, mode: bool = True) -> "Accelerated":
        if mode:
            raise ArgumentError("an accelerated network is for inference; train the one it was made from")
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # while a copy is being made
                raise
            return getattr(self.model, name)

    def __repr__(self) -> str:
        return table(self.choices, self.left_alone, self.dense_seconds, self.seconds)


@torch.no_grad()
def accelerate(model: nn.Module, example: Any) -> Accelerated:
    """The same network in eval mode, each Linear, Conv1d and Conv2d layer sparse where that is faster here.

        fast = sparsevd.accelerate(pruned, torch.randn(1, 3, 32, 32))
        print(fast)  # layer by layer: kept, dense time, sparse time, choice

    Every layer is timed on this machine with torch's number of threads and the shapes that the example gives it, so
    the example should have the batch size of later use; other sizes work too. Where it is exact, batch norm is folded
    into the layer before it. Without the compiled kernels Linear layers take torch's CSR product where that is faster.

    Args:
        model: a plain torch network, such as `prune` returns; it is copied.
        example: an input, a tuple of positional arguments, or a dict of named ones.
    """
    if is_noisy(model):
        raise ConversionError("the model still has Sparse VD layers; give sparsevd.prune(model) to accelerate")
    original = copy.deepcopy(model).eval()
    fast = copy.deepcopy(original)
    shapes = _input_shapes(fast, example)
    left_alone = {name: reason for name, module in fast.named_modules() if (reason := _why_not(module, name in shapes))}
    layers = {
        name: module
        for name, module in fast.named_modules()
        if type(module) in LAYER_TYPES and name not in left_alone and name in shapes
    }
    if not layers:
        raise ConversionError(
            f"nothing to accelerate in {type(model).__name__}: the example reaches no Linear, Conv1d or Conv2d layer"
            + "".join(f"\nleft alone: {name}: {reason}" for name, reason in left_alone.items())
        )
    after, why_not_folded = followers(fast)
    if why_not_folded:
        left_alone["batch norm"] = why_not_folded
    choices = []
    for name, layer in layers.items():
        choice, swaps = _chosen(name, layer, fast, shapes[name], after.get(name, Followers()))
        choices.append(choice)
        for place, replacement in swaps.items():
            fast = _put(fast, place, replacement)
    off_path = _leave_fast_paths(fast)
    dense, ours = timings([_bound(original, example), _bound(fast, example)])
    if ours.median > dense.median:
        reason = (
            f"all of it: {ours.median * 1e3:.3g} ms instead of {dense.median * 1e3:.3g} ms as it was, so it stays so"
        )
        left_alone["(model)"], fast, ours = reason, original, dense
        choices = [LayerChoice(c.name, c.kept, c.dense_seconds, c.sparse_seconds, "dense") for c in choices]
    else:
        left_alone |= off_path
    return Accelerated(fast, tuple(choices), left_alone, (dense.median, ours.median))


def _bound(model: nn.Module, example: Any) -> Callable[[], Any]:
    if isinstance(example, Mapping):
        return lambda: model(**example)
    arguments = tuple(example) if isinstance(example, tuple | list) else (example,)
    return lambda: model(*arguments)


def _input_shapes(model: nn.Module, example: Any) -> dict[str, tuple[int, ...]]:
    """The shape of the input that each layer gets first."""
    shapes: dict[str, tuple[int, ...]] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], Tensor):
                shapes.setdefault(name, tuple(arguments[0].shape))

        return hook

    hooks = [
        module.register_forward_pre_hook(remember(name))
        for name, module in model.named_modules()
        if type(module) in LAYER_TYPES
    ]
    before = _leave_fast_paths(model, everywhere=True)  # which would hand weights over without calling the layers
    try:
        _bound(model, example)()
    except Exception as error:
        raise ArgumentError(f"the model does not run on the example: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        _restore(model, before)
    return shapes


def _why_not(module: nn.Module, reached: bool) -> str:
    """Why a layer stays exactly as it is, or an empty string."""
    if isinstance(module, nn.MultiheadAttention):
        return "MultiheadAttention reads its projections' weights directly, so they stay dense"
    if type(module) not in LAYER_TYPES:
        return ""
    weight = module.weight
    if "weight" not in module._parameters or "forward" in module.__dict__:
        return "its weight or its forward is computed in another way"
    if not isinstance(weight, Tensor) or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return f"its weight is not float32 on the CPU ({weight.dtype} on {weight.device})"
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which a swap would lose"
    return "" if reached else "the example does not reach it"


def _chosen(
    name: str, layer: nn.Module, model: nn.Module, shape: tuple[int, ...], after: Followers
) -> tuple[LayerChoice, dict[str, nn.Module]]:
    """The faster way of one layer, and which modules that puts where."""
    weight, bias = cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)
    swaps: dict[str, nn.Module] = {}
    folds = bool(after.norm) and len(shape) == max(2, LAYER_TYPES[type(layer)] + 2)
    if folds:
        weight, bias = with_batch_norm(weight, bias, model.get_submodule(after.norm))
        swaps[after.norm] = nn.Identity()
    low, high = after.bounds if folds or not after.norm else Followers().bounds
    sparse, dense = InferenceLayer(layer, weight, bias, low, high), InferenceLayer(layer, weight, bias, low, high)
    dense.images = None
    sparse.batched_only = dense.batched_only = folds
    x = torch.randn(shape)
    batch = shape[0] if sparse.axes else x.numel() // shape[-1]
    candidates: list[Callable[[], object]] = [lambda: dense(x)]
    groups: list[int] = []
    if kernels.available():
        groups = group_choices(sparse, batch)
        candidates += [_with_group(sparse, images, x) for images in groups]
    elif not sparse.axes and len(shape) == 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that its CSR is in beta
            sparse.csr = weight.detach().to_sparse_csr()
        candidates.append(lambda: sparse(x))
    measured = [timing.median for timing in timings(candidates)]
    best = min(range(1, len(measured)), key=measured.__getitem__, default=0)
    faster = best > 0 and measured[best] <= WORTH * measured[0]
    if groups and best > 0:
        sparse.images = groups[best - 1]
    folded: tuple[str, ...] = (after.norm,) if folds else ()
    if faster:
        swaps[name] = sparse
        if after.activation and (low, high) == after.bounds:
            swaps[after.activation] = nn.Identity()
            folded += (after.activation,)
    elif folds:
        dense.low, dense.high = Followers().bounds
        swaps[name] = dense
    way = ("CSR" if sparse.csr is not None else "sparse") if faster else "dense"
    return LayerChoice(name, sparse.kept, measured[0], measured[best] if best else None, way, folded), swaps


def _with_group(layer: InferenceLayer, images: int, x: Tensor) -> Callable[[], object]:
    def call() -> object:
        return variant(x)

    variant = copy.copy(layer)
    variant.images, variant._ready = images, {}
    return call


def _put(model: nn.Module, name: str, replacement: nn.Module) -> nn.Module:
    """The model with this module instead, in all the places where the old one stands."""
    old = model.get_submodule(name)
    if old is model:
        return replacement
    for module in model.modules():
        for child_name, child in module._modules.items():
            if child is old:
                module._modules[child_name] = replacement
    return model


def _leave_fast_paths(model: nn.Module, *, everywhere: bool = False) -> dict[str, str]:
    """Keep parents that would hand their children's weights to a fused operator from doing so."""
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        for kind, (attribute, off) in FAST_PATHS.items():
            swapped = everywhere or any(isinstance(child, InferenceLayer) for child in module.modules())
            if isinstance(module, kind) and swapped and getattr(module, attribute) != off:
                module.__dict__["_fast_path_before"] = getattr(module, attribute)
                setattr(module, attribute, off)
                left[name or "(model)"] = f"{kind.__name__} kept off its fused path, which would not call its layers"
    return left


def _restore(model: nn.Module, names: dict[str, str]) -> None:
    for name in names:
        module = model.get_submodule("" if name == "(model)" else name)
        for kind, (attribute, _) in FAST_PATHS.items():
            if isinstance(module, kind):
                setattr(module, attribute, module.__dict__.pop("_fast_path_before"))


def table(choices: tuple[LayerChoice, ...], left_alone: dict[str, str], dense_seconds: float, seconds: float) -> str:
    """What was measured, one line per layer."""
    header = ("layer", "kept", "dense", "sparse", "choice", "folded in")
    rows = [
        (
            c.name or "(model)",
            f"{100 * c.kept:.2f} %",
            _time(c.dense_seconds),
            _time(c.sparse_seconds),
            c.choice,
            ", ".join(c.folded),
        )
        for c in choices
    ]
    total = f"whole network: {_time(dense_seconds)} before, {_time(seconds)} now ({dense_seconds / seconds:.1f}×)"
    notes = [f"left alone: {name}: {reason}" for name, reason in left_alone.items()]
    return "\n".join([text_table(header, rows, right=(1, 2, 3)), total, *notes])


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
