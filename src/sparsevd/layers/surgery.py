"""Modules swapped in all their places; parents kept off their fused paths meanwhile, and put back.

Which modules are swapped, and which count as swapped, the caller says.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.layers.wrapping import compile_anew, is_compiled

# Parents that in eval mode hand the weights of their children to a fused operator, and so never call the children.
# With the attribute set to this value they call them.
FAST_PATHS: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_BEFORE = "fast_path_before_surgery"
_HOOK = "zeros_of_the_fast_path"  # on the last layer of an encoder that is kept off its path


def swap(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The model with every replacement in all the places where its original stands; the model itself may be one.

    A replacement may have taken children over from its original, which are exchanged too, but not that original itself.
    """
    inside = [module for each in (model, *replacements.values()) for module in each.modules()]
    for module in inside:
        for name, child in module._modules.items():
            if child is not None and child in replacements and replacements[child] is not module:
                module._modules[name] = replacements[child]
                if is_compiled(module):
                    compile_anew(module)
    return replacements.get(model, model)


def leave_fast_paths(model: nn.Module, counts: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Keep parents of modules that count off their fused path; returned are, by name, those that were on it."""
    left: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for kind, (attribute, off) in FAST_PATHS.items():
            if isinstance(module, kind) and getattr(module, attribute) != off and any(map(counts, module.modules())):
                module.__dict__[_BEFORE] = getattr(module, attribute)
                setattr(module, attribute, off)
                if isinstance(module, nn.TransformerEncoder):
                    last = module.layers[-1]
                    last.__dict__[_HOOK] = last.register_forward_hook(_padding_is_zero, with_kwargs=True)
                left[name] = module
    return left


def restore_fast_paths(modules: Iterable[nn.Module]) -> None:
    """Put those among these modules back that were kept off their fused path."""
    for module in modules:
        for kind, (attribute, _) in FAST_PATHS.items():
            if isinstance(module, kind) and _BEFORE in module.__dict__:
                setattr(module, attribute, module.__dict__.pop(_BEFORE))
                if isinstance(module, nn.TransformerEncoder):
                    module.layers[-1].__dict__.pop(_HOOK).remove()


def _padding_is_zero(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """What an encoder on its fused path has at padded places, where it would be on it.

    There it leaves padding out (as a nested tensor) and puts zeros in its place. A network that reads those places, as
    a mean over all of them does, is another one with these zeros: what is measured must be what `prune` gives back.
    """
    padding = kwargs.get("src_key_padding_mask")
    if layer.training or padding is None or kwargs.get("src_mask") is not None or output.dim() != 3:
        return None
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in layer.parameters()):
        return None
    if torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled() or torch.compiler.is_compiling():
        return None
    padded = padding != 0  # by now the encoder has made numbers of it: 0, or −∞ where a place is padded
    if (padded[:, :-1] & ~padded[:, 1:]).any():  # not only at the ends of the sequences
        return None
    return output.masked_fill(padded.unsqueeze(-1), 0.0)
