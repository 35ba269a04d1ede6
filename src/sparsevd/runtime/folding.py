"""What directly follows a layer and can be computed inside it: batch norm in eval mode, and a clamping activation."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from sparsevd.graph.norms import ChannelNorm
from sparsevd.runtime.layers import INFINITY, LAYER_TYPES, UNBOUNDED

NORM_TYPES = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Followers:
    """Names of the modules that alone read a layer's output, one after the other, and the activation as a clamp."""

    norm: str = ""
    activation: str = ""
    bounds: tuple[float, float] = UNBOUNDED


def clamp_bounds(module: nn.Module) -> tuple[float, float] | None:
    """The activation as clamp(x, low, high), or None if it is none."""
    if type(module) is nn.ReLU:
        return (0.0, INFINITY)
    if type(module) is nn.ReLU6:
        return (0.0, 6.0)
    if type(module) is nn.Hardtanh:
        return (float(module.min_val), float(module.max_val))
    return None


def followers(model: nn.Module, example: Any = ()) -> tuple[dict[str, Followers], str]:
    """For each layer what can be folded into it; and if the model cannot be traced, why nothing can.

    Only a trace shows that nothing else reads a layer's output. Arguments that the example leaves out, or that hold no
    tensor, have in the trace the values that they have in the call. What is called twice stays as it is.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.fx would check values that it cannot
            graph = fx.Tracer().trace(model, concrete_args=_fixed_arguments(model, example))
    except Exception as error:  # whatever a model does while being traced
        has_norms = any(type(module) in NORM_TYPES for module in model.modules())
        reason = f"not folded, because torch.fx cannot trace the model ({type(error).__name__}: {error})"
        return {}, reason.splitlines()[0] if has_norms else ""
    names: dict[nn.Module, str] = {}
    calls: dict[nn.Module, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            module = model.get_submodule(node.target)
            names[module] = node.target
            calls[module] = calls.get(module, 0) + 1
    read_directly = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}

    def only_reader(node: fx.Node) -> tuple[fx.Node, nn.Module] | None:
        """The module that reads this output, if it is the only reader, in its only call."""
        readers = list(node.users)
        if len(readers) != 1 or readers[0].op != "call_module" or readers[0].args != (node,):
            return None
        module = model.get_submodule(str(readers[0].target))
        if calls[module] != 1 or str(readers[0].target) in read_directly or _watched(module):
            return None
        return readers[0], module

    found: dict[str, Followers] = {}
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        layer = model.get_submodule(node.target)
        if type(layer) not in LAYER_TYPES or calls[layer] != 1:
            continue
        norm, activation, bounds = "", "", UNBOUNDED
        reader = only_reader(node)
        if reader and type(reader[1]) in NORM_TYPES and _foldable(reader[1], layer):
            norm = str(reader[0].target)
            reader = only_reader(reader[0])
        if reader and (clamp := clamp_bounds(reader[1])) is not None:
            activation, bounds = str(reader[0].target), clamp
        found[node.target] = Followers(norm, activation, bounds)
    # Modules have several names where they are shared; layers go by the first.
    first = {module: name for name, module in model.named_modules()}
    return {first[model.get_submodule(name)]: after for name, after in found.items()}, ""


def _fixed_arguments(model: nn.Module, example: Any) -> dict[str, Any]:
    """The arguments without tensors in a call of the model with this example, by name; defaults are among them."""
    positional, named = arguments_of(example)
    signature = inspect.signature(model.forward)
    call = signature.bind_partial(*positional, **named)
    call.apply_defaults()
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return {
        name: value
        for name, value in call.arguments.items()
        if signature.parameters[name].kind not in several
        and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and named arguments: a dict has the named ones, a tuple or list several."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _foldable(norm: nn.Module, layer: nn.Module) -> bool:
    outputs = cast(Tensor, layer.weight).shape[0]
    return norm.running_mean is not None and not norm.training and bool(norm.num_features == outputs)


def channel_norm(norm: nn.Module) -> ChannelNorm:
    """What a batch norm in eval mode does to each channel."""
    mean, variance, weight, bias = (
        cast(Tensor | None, getattr(norm, name)) for name in ("running_mean", "running_var", "weight", "bias")
    )
    return ChannelNorm.of(cast(Tensor, mean), cast(Tensor, variance), weight, bias, cast(float, norm.eps))
