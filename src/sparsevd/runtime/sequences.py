"""Attention and recurrent layers with zeros, ready to run faster: for inference, with the answers of the plain layer.

Attention gets its projections from the sparse kernels. A recurrence stays torch's own, which is one fused operation,
but reads only those of its inputs that have a weight. A lookup in an embedding takes as long whatever is in the row.
"""

from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence

from sparsevd.layers.attention import Attending, Masks, attend
from sparsevd.runtime.layers import InferenceLayer, plain

RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
SEQUENCE_TYPES: tuple[type[nn.Module], ...] = (*RECURRENT, nn.MultiheadAttention)

# The fastest way of a product, of its weight, its bias and the shape of its input.
Product = Callable[[Tensor, Tensor | None, tuple[int, ...]], InferenceLayer]


@final
class InferenceAttention(nn.Module):
    """An `nn.MultiheadAttention` in eval mode, with its products as layers. It takes what that one takes."""

    def __init__(self, twin: nn.MultiheadAttention, product: Product, query: Tensor, key: Tensor, value: Tensor):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = twin.embed_dim, twin.num_heads, twin.head_dim
        self.batch_first, self.add_zero_attn, self.dropout = twin.batch_first, twin.add_zero_attn, 0.0
        self._qkv_same_embed_dim = twin._qkv_same_embed_dim  # this and the next are read by torch's encoder
        for name in ("in_proj_bias", "bias_k", "bias_v"):
            bias = cast(Tensor | None, getattr(twin, name))
            self.register_buffer(name, None if bias is None else bias.detach().clone())
        biases = [None] * 3 if twin.in_proj_bias is None else twin.in_proj_bias.chunk(3)
        given = (query, key, value)
        if twin._qkv_same_embed_dim:
            # What was given twice is one product; other calls, for which it is too wide, take parts of its weight.
            self.self_attention = query is key is value
            parts = cast(Tensor, twin.in_proj_weight).chunk(3)
            if self.self_attention:
                self.projections = nn.ModuleList(
                    [product(cast(Tensor, twin.in_proj_weight), twin.in_proj_bias, tuple(query.shape))]
                )
            else:
                self.projections = self._separate(product, parts, biases, given)
        else:
            self.self_attention = False
            parts = tuple(cast(Tensor, getattr(twin, f"{name}_proj_weight")) for name in "qkv")
            self.projections = self._separate(product, parts, biases, given)
        self.out_proj = product(
            twin.out_proj.weight, cast(Tensor | None, twin.out_proj.bias), (*query.shape[:-1], twin.embed_dim)
        )
        self.training = False

    @staticmethod
    def _separate(
        product: Product, weights: tuple[Tensor, ...], biases: Any, given: tuple[Tensor, ...]
    ) -> nn.ModuleList:
        parts = zip(weights, biases, given, strict=True)
        return nn.ModuleList([product(weight, bias, tuple(x.shape)) for weight, bias, x in parts])

    @property
    def way(self) -> str:
        layers = [cast(InferenceLayer, layer) for layer in (*self.projections, self.out_proj)]
        return "sparse" if any(layer.way != "dense" for layer in layers) else "dense"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = Masks(key_padding_mask, attn_mask, is_causal)
        projected = self._projected(query, key, value)
        output, weights = attend(cast(Attending, self), query, projected, masks, need_weights=need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)  # over the heads
        return output, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if not self.self_attention:
            return [layer(x) for layer, x in zip(self.projections, (query, key, value), strict=True)]
        (packed,) = (cast(InferenceLayer, layer) for layer in self.projections)
        if query is key is value:
            return list(packed(query).chunk(3, -1))
        biases = [None] * 3 if packed.bias is None else packed.bias.chunk(3)
        given = zip((query, key, value), packed.weight.chunk(3), biases, strict=True)
        return [torch.nn.functional.linear(x, weight, bias) for x, weight, bias in given]


@final
class InferenceRecurrent(nn.Module):
    """An `nn.RNN`, `nn.LSTM` or `nn.GRU` that reads only inputs with a weight. It takes what that one takes."""

    def __init__(self, twin: nn.RNNBase, inputs: Tensor):
        super().__init__()
        self.input_size = twin.input_size
        self.register_buffer("inputs", inputs)
        options = {
            name: getattr(twin, name) for name in ("hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
        }
        if isinstance(twin, nn.RNN):
            options["nonlinearity"] = twin.nonlinearity
        if twin.proj_size:
            options["proj_size"] = twin.proj_size
        with torch.device("meta"):
            self.layer = cast(Any, type(twin))(len(inputs), **options)
        read = {name: getattr(twin, name).detach().clone() for name in twin._parameters}
        for name in _first_weights(twin):
            read[name] = read[name].index_select(1, inputs)
        self.layer.load_state_dict(read, assign=True)
        self.layer.requires_grad_(False)
        self.eval()

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            data, *rest = input
            return self.layer(PackedSequence(self._read(data), *rest), hx)
        return self.layer(self._read(input), hx)

    def _read(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.input_size:  # torch would say it of the fewer ones
            raise RuntimeError(f"input must have {self.input_size} features, not {input.shape[-1]}")
        return input.index_select(-1, cast(Tensor, self.inputs))


def faster(module: nn.Module, arguments: dict[str, Any], product: Product) -> nn.Module | None:
    """The module in the way that may be faster for such arguments, as its forward names them; None if there is none."""
    if isinstance(module, nn.RNNBase):
        weights = [cast(Tensor, getattr(module, name)) for name in _first_weights(module)]
        read = torch.stack([weight.any(0) for weight in weights]).any(0).nonzero().flatten()
        return InferenceRecurrent(module, read) if 0 < len(read) < module.input_size else None
    given = [arguments.get(name) for name in ("query", "key", "value")]
    if not all(isinstance(x, Tensor) and plain(x) for x in given):
        return None
    attention = InferenceAttention(cast(nn.MultiheadAttention, module), product, *cast(list[Tensor], given))
    return attention if attention.way == "sparse" else None


def way(module: nn.Module) -> str:
    """What the way of one of these modules is called."""
    return module.way if isinstance(module, InferenceAttention) else "fewer inputs"


def kept(module: nn.Module) -> float:
    """Share of the weights of a plain module that are not zero."""
    weights = [parameter for name, parameter in module.named_parameters() if "weight" in name]
    return sum(int(torch.count_nonzero(w)) for w in weights) / max(1, sum(w.numel() for w in weights))


def why_not(module: nn.Module) -> str:
    """Why such a module stays exactly as it is, or an empty string."""
    parts = [module]
    if isinstance(module, nn.MultiheadAttention):
        if type(module.out_proj) not in (nn.Linear, NonDynamicallyQuantizableLinear):
            return f"its out_proj is a {type(module.out_proj).__name__}"
        parts.append(module.out_proj)
    for part in parts:
        weights = [name for name in (*part._parameters, *vars(part)) if "weight" in name and not name.startswith("_")]
        if "forward" in part.__dict__ or any(name not in part._parameters for name in weights):
            return "its weight or its forward is computed in another way"
        if part._forward_hooks or part._forward_pre_hooks:
            return "it has forward hooks, which a swap would lose"
        for name, tensor in part._parameters.items():
            if tensor is not None and (tensor.dtype != torch.float32 or tensor.device.type != "cpu"):
                return f"its {name} is not float32 on the CPU ({tensor.dtype} on {tensor.device})"
    return ""


def _first_weights(layer: nn.RNNBase) -> list[str]:
    return ["weight_ih_l0", *(["weight_ih_l0_reverse"] if layer.bidirectional else [])]
