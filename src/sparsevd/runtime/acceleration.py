"""A pruned network made faster: as one plan, or layer by layer, or as it was, whichever measures fastest."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsevd.conversion import copied
from sparsevd.errors import ArgumentError, ConversionError
from sparsevd.graph.outputs import difference, tensors_in
from sparsevd.layers.registry import sparse_type
from sparsevd.layers.surgery import leave_fast_paths, restore_fast_paths, swap
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import is_noisy
from sparsevd.reporting.table import table as text_table
from sparsevd.runtime import sequences
from sparsevd.runtime.folding import Followers, arguments_of, channel_norm, followers
from sparsevd.runtime.layers import LAYER_TYPES, InferenceLayer, ways
from sparsevd.runtime.plan import Plan, plan, reason
from sparsevd.runtime.sequences import SEQUENCE_TYPES, InferenceRecurrent
from sparsevd.runtime.timing import timings

WORTH = 0.97  # a layer stays dense unless the sparse way takes at most this part of the time
TOLERANCE = 1e-4  # by which answers may differ, of the largest output
HOPELESS = 2.0  # times as long as dense: a plan of layers that are so slow when sparse is not tried

_SWAPPED = (InferenceLayer, InferenceRecurrent)  # one of them is in everything that is swapped
DENSE, LAYERS, PLAN = "as it was", "layer by layer", "as one plan"


@dataclass(frozen=True)
class LayerChoice:
    """One layer: the share of weights kept, seconds per call both ways, and which way it takes by itself."""

    name: str
    kept: float
    dense_seconds: float
    sparse_seconds: float | None
    choice: str
    folded: tuple[str, ...] = ()


class Accelerated(nn.Module):
    """A network that takes its fastest way; call it as the network it was made from. For inference only.

    It is a snapshot: weights and biases were copied when it was made, and what later becomes of the network it was made
    from does not change it. To have it follow, call `accelerate` again. A plan has its own copy of the weights: loading
    others, into this or into a module of `model`, and moving it or giving it another type give up the plan. Changing
    tensors of `model` in place does not, and neither do hooks on its modules, which a plan does not call; hooks on the
    accelerated network itself are called.

    `measured` has the seconds of each way, `chosen` the way taken, `no_plan` the reason if the whole network is not one
    plan; `choices` what was measured layer by layer, `left_alone` what was not touched and why. Printing it shows all.
    Inputs that the plan was not made for go through `model`, where the layers take their own ways. Other attributes are
    those of the network.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: Plan | None,
        measured: dict[str, float],
        no_plan: str,
        choices: tuple[LayerChoice, ...],
        left_alone: dict[str, str],
    ) -> None:
        super().__init__()
        self.model = model
        self.plan = whole
        self.measured, self.no_plan = measured, no_plan
        self.choices, self.left_alone = choices, left_alone
        self.training = False
        for module in self.modules():  # weights can be loaded through any of them
            module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    @property
    def chosen(self) -> str:
        layered = any(isinstance(module, _SWAPPED) for module in self.model.modules())
        return PLAN if self.plan is not None else LAYERS if layered else DENSE

    @property
    def dense_seconds(self) -> float:
        return self.measured[DENSE]

    @property
    def seconds(self) -> float:
        return self.measured[self.chosen]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.plan is None or self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*arguments, **named)
        return self.forward(*arguments, **named)  # torch's way of calling a module takes as long as a small layer

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.plan is not None and len(arguments) == 1 and not named:
            answer = self.plan.attempt(arguments[0])
            if answer is not None:
                return answer
        return cast(nn.Module, self._modules["model"])(*arguments, **named)  # past __getattr__, which takes its time

    def train(self, mode: bool = True) -> "Accelerated":
        if mode:
            raise ArgumentError("an accelerated network is for inference; train the one it was made from")
        return self

    def _apply(self, *arguments: Any, **options: Any) -> "Accelerated":
        """`double`, `to` and their kin change the model, unless all is so already; a plan is float32 on the CPU for
        good."""
        before = [tensor.detach() for tensor in self._tensors()]
        result = cast(Accelerated, super()._apply(*arguments, **options))  # type: ignore[no-untyped-call]
        if not all(map(_same, before, self._tensors())):
            self._forget_plan("the network was moved or got another type")
        return result

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]

    def _loaded(self, module: nn.Module, _: object) -> None:
        self._forget_plan("other weights were loaded")

    def _forget_plan(self, reason: str) -> None:
        if self.plan is not None:
            self.plan, self.no_plan = None, f"{reason} after it was made"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # while a copy is being made
                raise
            return getattr(self.model, name)

    def __repr__(self) -> str:
        return table(self)


def _same(before: Tensor, after: Tensor) -> bool:
    alike = before.device == after.device and before.dtype == after.dtype
    return alike and not after.is_meta and torch.equal(before, after)


@torch.no_grad()
def accelerate(model: nn.Module, example: Any) -> Accelerated:
    """The same network in eval mode, the fastest way this machine has for it.

        fast = sparsevd.accelerate(pruned, torch.randn(1, 3, 32, 32))
        print(fast)  # what each layer and each way took, and what was chosen

    Three ways are timed, with torch's number of threads: the whole network as one plan, where its operations allow
    that (see `sparsevd.plan`); its Linear, Conv1d and Conv2d layers and the products of MultiheadAttention one by one,
    each sparse where that is faster, RNN, LSTM and GRU without the inputs that they give no weight, with batch norm
    folded in where that is exact; and as it was. The example should have the batch size of later use; other inputs work
    too. Without the compiled kernels Linear layers take torch's CSR product where that is faster.

    A way that answers the example otherwise than the network is not taken. What a forward puts aside between a layer
    and the batch norm or ReLU that is folded into it (`self.last = h`) is what comes after these.

    Args:
        model: a plain torch network, such as `prune` returns; it is copied. Of one that torch.compile wraps, the
            network inside is taken and timed.
        example: an input, a tuple of positional arguments, or a dict of named ones.
    """
    if is_noisy(model):
        raise ConversionError("the model still has Sparse VD layers; give sparsevd.prune(model) to accelerate")
    original = copied(bare_model(model)).eval()
    layered, choices, left_alone, off_path = _checked_layers(original, example)
    whole, no_plan = _whole(original, example, choices)
    candidates: dict[str, Callable[..., Any]] = {DENSE: original, LAYERS: layered}
    if whole is not None:
        candidates[PLAN] = whole
    spent = timings([_bound(candidate, example) for candidate in candidates.values()])
    measured = {way: timing.median for way, timing in zip(candidates, spent, strict=True)}
    if measured[LAYERS] <= measured[DENSE]:
        for name, parent in off_path.items():
            reason = f"{type(parent).__name__} kept off its fused path, which would not call its layers"
            left_alone[name or "(model)"] = reason
    else:
        spent_so = f"{_time(measured[LAYERS])} instead of {_time(measured[DENSE])} as it was"
        left_alone.setdefault("(model)", f"layer by layer all of it takes {spent_so}")
        layered, choices = original, _all_dense(choices)
    if min(measured, key=measured.__getitem__) != PLAN:
        whole = None
    return Accelerated(layered, whole, measured, no_plan, tuple(choices), left_alone)


def _whole(model: nn.Module, example: Any, choices: list[LayerChoice]) -> tuple[Plan | None, str]:
    """The network as one plan; or None, and why there is none."""
    if isinstance(example, Mapping) or (isinstance(example, tuple | list) and len(example) != 1):
        return None, "a plan takes one input, without a name"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None, "the network has forward hooks, which a plan would not call"
    sparse = sum(choice.sparse_seconds or choice.dense_seconds for choice in choices)
    dense = sum(choice.dense_seconds for choice in choices)
    if sparse > HOPELESS * dense:
        return None, f"all layers together take {_time(sparse)} when sparse, and {_time(dense)} when dense"
    (x,) = example if isinstance(example, tuple | list) else (example,)
    returned = type(model(x))
    if not issubclass(returned, Tensor) and returned is not dict:
        return None, f"the network returns a {returned.__name__}, and a plan a tensor or a dict"
    try:
        whole = plan(model, x)
        return (whole, "") if _agree(whole, model, example) else (None, "it gives other answers to the example")
    except Exception as error:  # whatever a model does while being captured: its layers one by one still work
        return None, reason(error)


class Layered(NamedTuple):
    """A network layer by layer: what was measured, what was left alone and why, and what is off its fused path."""

    model: nn.Module
    choices: list[LayerChoice]
    left_alone: dict[str, str]
    off_path: dict[str, nn.Module]


def _checked_layers(original: nn.Module, example: Any) -> Layered:
    """A copy layer by layer that answers the example as the original does: if it must be, with less done to it."""
    layered = _layer_by_layer(copy.deepcopy(original), example)
    if _agree(layered.model, original, example):
        return layered
    if any(choice.folded for choice in layered.choices):
        layered = _layer_by_layer(copy.deepcopy(original), example, folding=False)
        layered.left_alone["batch norm and activations"] = "not folded, because the example then gets other answers"
        if _agree(layered.model, original, example):
            return layered
    layered.left_alone["(model)"] = "layer by layer the example gets other answers, so it stays as it was"
    return Layered(copy.deepcopy(original), _all_dense(layered.choices), layered.left_alone, {})


def _agree(ours: Callable[..., Any], original: nn.Module, example: Any) -> bool:
    """Whether both give the same to the example, with the same random numbers if they use any."""
    answers = []
    for candidate in (ours, original):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            answers.append(tensors_in(_bound(candidate, example)()))
    return [a.shape for a in answers[0]] == [b.shape for b in answers[1]] and all(
        difference(a, b) <= TOLERANCE for a, b in zip(*answers, strict=True)
    )


def _all_dense(choices: list[LayerChoice]) -> list[LayerChoice]:
    return [replace(choice, choice="dense", folded=()) for choice in choices]


def _layer_by_layer(model: nn.Module, example: Any, *, folding: bool = True) -> Layered:
    """The model with its layers swapped where that is faster; what was measured; and what was left alone, and why."""
    calls = _first_calls(model, example)
    left_alone = {name: why for name, module in model.named_modules() if (why := _why_not(module, name in calls))}
    if not calls.keys() - left_alone.keys():
        raise ConversionError(
            f"nothing to accelerate in {type(model).__name__}: the example reaches no Linear, Conv1d or Conv2d layer, "
            "no recurrent layer and no attention"
            + "".join(f"\nleft alone: {name}: {reason}" for name, reason in left_alone.items())
        )
    after, why_not_folded = followers(model, example) if folding else ({}, "")
    if why_not_folded:
        left_alone["batch norm"] = why_not_folded
    choices: list[LayerChoice] = []
    swaps: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if name not in calls or name in left_alone:
            continue
        if type(module) in SEQUENCE_TYPES:
            choice, replacements = _fastest_sequence(name, module, calls[name])
        else:
            shape = tuple(calls[name][0][0].shape)
            choice, replacements = _fastest(name, module, model, shape, after.get(name, Followers()))
        choices.append(choice)
        swaps |= replacements
    model = swap(model, swaps)
    return Layered(model, choices, left_alone, leave_fast_paths(model, lambda module: isinstance(module, _SWAPPED)))


def _fastest(
    name: str, layer: nn.Module, model: nn.Module, shape: tuple[int, ...], after: Followers
) -> tuple[LayerChoice, dict[nn.Module, nn.Module]]:
    """The fastest way of one layer with what follows it, and which modules that puts in place of which."""
    weight, bias = cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)
    if after.norm and len(shape) != max(2, LAYER_TYPES[type(layer)] + 2):
        after = Followers()  # the norm sees other axes than the layer's outputs
    if after.norm:
        weight, bias = channel_norm(model.get_submodule(after.norm)).folded(weight, bias)
    candidates = ways(InferenceLayer(layer, weight, bias, after.bounds, batched_only=bool(after.norm)), shape)
    x = torch.randn(shape, device="cpu")
    seconds = [timing.median for timing in timings([functools.partial(candidate, x) for candidate in candidates])]
    fastest = min(range(len(seconds)), key=lambda i: seconds[i] if i else WORTH * seconds[0])
    folded = tuple(place for place in (after.norm, after.activation) if place)
    if not fastest and not after.norm:  # it stays, and what follows it too
        folded, swaps = (), {}
    else:
        swaps = {layer: candidates[fastest], **{model.get_submodule(place): nn.Identity() for place in folded}}
    sparse = min(seconds[1:], default=None)
    chosen = candidates[fastest]
    return LayerChoice(name, chosen.kept, seconds[0], sparse, chosen.way, folded), swaps


def _fastest_sequence(name: str, module: nn.Module, call: "Call") -> tuple[LayerChoice, dict[nn.Module, nn.Module]]:
    """The same for attention or a recurrent layer, by the very call that it gets from the example."""
    positional, named = call
    arguments = inspect.signature(module.forward).bind(*positional, **named).arguments
    other = sequences.faster(module, arguments, _fastest_product)
    candidates = [module] if other is None else [module, other]
    calls = [functools.partial(candidate, *positional, **named) for candidate in candidates]
    dense, *rest = (timing.median for timing in timings(calls))
    sparse = rest[0] if rest else None
    swapped = other is not None and sparse is not None and sparse <= WORTH * dense
    way = sequences.way(other) if other is not None and swapped else "dense"
    choice = LayerChoice(name, sequences.kept(module), dense, sparse, way)
    return choice, {module: other} if other is not None and swapped else {}


def _fastest_product(weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> InferenceLayer:
    """A product with a matrix that is not a layer's own."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    candidates = ways(InferenceLayer(linear, weight, bias), shape)
    x = torch.randn(shape, device="cpu")
    seconds = [timing.median for timing in timings([functools.partial(candidate, x) for candidate in candidates])]
    return candidates[min(range(len(seconds)), key=lambda i: seconds[i] if i else WORTH * seconds[0])]


def _bound(model: Callable[..., Any], example: Any) -> Callable[[], Any]:
    arguments, named = arguments_of(example)
    return lambda: model(*arguments, **named)


Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, and named ones


def _first_calls(model: nn.Module, example: Any) -> dict[str, Call]:
    """The arguments that each layer gets first."""
    calls: dict[str, Call] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if type(module) in SEQUENCE_TYPES or (arguments and isinstance(arguments[0], Tensor)):
                calls.setdefault(name, (arguments, named))

        return hook

    known = (*LAYER_TYPES, *SEQUENCE_TYPES)
    hooks = [
        module.register_forward_pre_hook(remember(name), with_kwargs=True)
        for name, module in model.named_modules()
        if type(module) in known
    ]
    off_path = leave_fast_paths(model, lambda module: type(module) in known)  # else layers are not called
    try:
        _bound(model, example)()
    except Exception as error:
        raise ArgumentError(f"the model does not run on the example: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        restore_fast_paths(off_path.values())
    return calls


_UNKNOWN = "there is no faster way for layers of its type yet"
_LOOKUP = "a lookup takes as long, whatever is in the row"
_NO_OTHER_WAY: dict[type[nn.Module], str] = {
    nn.Embedding: _LOOKUP,
    nn.EmbeddingBag: _LOOKUP,
    NonDynamicallyQuantizableLinear: "",  # a part of attention
}


def _why_not(module: nn.Module, reached: bool) -> str:
    """Why a layer stays exactly as it is, or an empty string."""
    if type(module) in SEQUENCE_TYPES:
        return sequences.why_not(module) or ("" if reached else "the example does not reach it")
    if type(module) not in LAYER_TYPES:
        return _NO_OTHER_WAY.get(type(module), _UNKNOWN) if sparse_type(module) is not None else ""
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


def table(network: Accelerated) -> str:
    """What was measured: one line per layer, then each way of the whole network, and the reasons."""
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
        for c in network.choices
    ]
    total = "whole network: " + ", ".join(f"{_time(spent)} {way}" for way, spent in network.measured.items())
    chosen = f"chosen: {network.chosen} ({network.dense_seconds / network.seconds:.1f}× as fast as it was)"
    notes = [f"no plan: {network.no_plan}"] if network.no_plan else []
    notes += [f"left alone: {name}: {reason}" for name, reason in network.left_alone.items()]
    return "\n".join([text_table(header, rows, right=(1, 2, 3)), total, chosen, *notes])


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
