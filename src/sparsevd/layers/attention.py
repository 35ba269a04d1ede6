"""Multi-head attention: the noise is drawn per output of each projection, then torch's own attention runs on them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsevd.errors import ArgumentError
from sparsevd.layers.layer import SparseLayer
from sparsevd.layers.linear_map import MatrixProduct
from sparsevd.layers.product_layer import variance_dtype
from sparsevd.layers.sampling import NoisyWeight, multiplies_bfloat16, sample
from sparsevd.posterior import NoisyModule, Posterior, noise_name

_PRODUCT = MatrixProduct()
_PACKED, _SEPARATE = "in_proj_weight", ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@final
class SparseMultiheadAttention(SparseLayer):
    """Sparse VD twin of `nn.MultiheadAttention`.

    Its `out_proj` stays a layer of its own, with noise if it was converted too.
    """

    plain_type = nn.MultiheadAttention
    options = ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first", "add_zero_attn")
    children_kept = ("out_proj",)

    embed_dim: int
    num_heads: int
    dropout: float
    kdim: int
    vdim: int
    batch_first: bool
    add_zero_attn: bool
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Module

    def __init__(self, twin: nn.Module, **settings: Any):
        super().__init__(twin, **settings)
        self.head_dim = self.embed_dim // self.num_heads
        self._qkv_same_embed_dim = _PACKED in self.weights  # read by torch's encoder
        for name in (_PACKED, *_SEPARATE):
            if name not in self.weights:
                self.register_parameter(name, None)
        if "bias_k" not in self.others:
            self.bias_k = self.bias_v = None
        self.out_proj = cast(nn.Module, twin.out_proj)
        self.training = twin.training

    @classmethod
    def names(cls, twin: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        weights = (_PACKED,) if twin.kdim == twin.vdim == twin.embed_dim else _SEPARATE
        added = () if getattr(twin, "bias_k", None) is None else ("bias_k", "bias_v")
        return weights, ("in_proj_bias", *added)

    @classmethod
    def refusal(cls, twin: nn.Module) -> str:
        if type(twin.out_proj) is NonDynamicallyQuantizableLinear:
            return ""
        return f"its out_proj is a {type(twin.out_proj).__name__}, of which torch reads no more than the weight"

    def arguments(self) -> dict[str, Any]:
        given = {"bias": self.in_proj_bias is not None, "add_bias_kv": self.bias_k is not None}
        return super().arguments() | given

    def plain(self, threshold: float | None = None) -> nn.Module:
        """Without noise but for that of `out_proj`, which is handed over as it was taken over."""
        twin = super().plain(threshold)
        twin.out_proj = self.out_proj
        return twin

    def reset_parameters(self) -> None:
        nn.MultiheadAttention._reset_parameters(cast(nn.MultiheadAttention, self))
        for posterior in self.posteriors():
            nn.init.constant_(posterior.log_sigma2, self.initial_log_sigma2)

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
        """As for `nn.MultiheadAttention`."""
        if self.draws_noise:
            answer = self._sampled(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        else:
            answer = self._pruned(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        output, weights = answer
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)  # over the heads
        return output, weights

    def _pruned(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Torch's own function, with the weights as eval mode uses them; its dropout acts in training mode."""
        transposed = self.batch_first and query.dim() == 3
        if transposed:  # a tensor given twice stays one: torch then has one product for both
            turned = {id(each): each.transpose(0, 1) for each in (query, key, value)}
            query, key, value = (turned[id(each)] for each in (query, key, value))
        weights = {posterior.weight: posterior.pruned() for posterior in self.posteriors()}
        last = self.out_proj
        last_weight = Posterior(last).pruned() if isinstance(last, NoisyModule) else cast(Tensor, last.weight)
        output, attention = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            weights.get(_PACKED),
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            last_weight,
            cast(Tensor, last.bias),
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=weights.get("q_proj_weight"),
            k_proj_weight=weights.get("k_proj_weight"),
            v_proj_weight=weights.get("v_proj_weight"),
            average_attn_weights=False,
            is_causal=is_causal,
        )
        return output.transpose(0, 1) if transposed else output, attention

    def _sampled(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention on noisy projections."""
        masks = Masks(key_padding_mask, attn_mask, is_causal)
        projected = self._projections(query, key, value)
        return attend(cast(Attending, self), query, projected, masks, need_weights=need_weights)

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """A sample of each; one product for what is given twice, where the weights lie side by side."""
        given = (query, key, value)
        if not self._qkv_same_embed_dim:
            return [self._sample(x, name, i, i + 1) for i, (name, x) in enumerate(zip(_SEPARATE, given, strict=True))]
        if query is key is value:
            return list(self._sample(query, _PACKED, 0, 3).chunk(3, -1))
        if key is value:
            return [self._sample(query, _PACKED, 0, 1), *self._sample(key, _PACKED, 1, 3).chunk(2, -1)]
        return [self._sample(x, _PACKED, i, i + 1) for i, x in enumerate(given)]

    def _sample(self, input: Tensor, name: str, first: int, end: int) -> Tensor:
        """By the weight of this name, of the packed one by its part for these of query, key and value."""
        theta, log_sigma2 = cast(Tensor, getattr(self, name)), cast(Tensor, getattr(self, noise_name(name)))
        rows = slice(first * self.embed_dim, end * self.embed_dim)
        if name == _PACKED and end - first < 3:
            theta, log_sigma2 = theta[rows], log_sigma2[rows]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        dtype = variance_dtype(self, _PRODUCT, input, theta, log_sigma2)
        return sample(_PRODUCT, input, NoisyWeight(theta, bias, log_sigma2, dtype))


class Attending(Protocol):
    """What `attend` asks of a module: the options of `nn.MultiheadAttention`, and its last projection."""

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Module


class Masks(NamedTuple):
    """What is not to be seen, as `nn.MultiheadAttention` takes it."""

    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool


def attend(
    module: Attending, query: Tensor, projected: Sequence[Tensor], masks: Masks, *, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention on projections of query, key and value, step by step as torch's function has it, but for the order of
    axes. The weights are those of each head."""
    key_padding_mask, attn_mask, is_causal = masks
    if is_causal and attn_mask is None:
        raise ArgumentError("is_causal=True says that attn_mask is the causal mask; give attn_mask too")
    batched = query.dim() == 3
    batch = (0 if module.batch_first else 1) if batched else None
    q, k, v = (_heads(module, each, batch) for each in projected)  # [batch, head, place, …]
    n, _, targets, _ = q.shape
    if not len(k) == len(v) == n or k.shape[2] != v.shape[2]:
        raise ArgumentError(
            f"query, key and value have {n}, {len(k)} and {len(v)} examples, of {targets}, {k.shape[2]} and "
            f"{v.shape[2]} places; examples must be as many in all of them, places in key and value"
        )
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = False
        mask = _merged(attn_mask, key_padding_mask, (n, module.num_heads, targets, k.shape[2]), q.dtype)
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([each, bias.view(1, module.num_heads, 1, -1).expand(n, -1, -1, -1).to(each.dtype)], 2)
            for each, bias in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))  # what was added is seen by all
    weights = None
    if need_weights or _faster_written_out(q, k, mask, is_causal):
        scores = (q * math.sqrt(1 / module.head_dim)) @ k.transpose(-2, -1)
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), module.dropout)
        found = weights.to(v.dtype) @ v
        weights = weights if need_weights else None
    else:
        found = F.scaled_dot_product_attention(q, k, v, mask, module.dropout, is_causal)
    # Back to the axes of the query, so that the memory is in their order.
    found = found.permute(2, 0, 1, 3) if batch == 1 else found.transpose(1, 2)
    output = module.out_proj(found.reshape(*query.shape[:-1], module.embed_dim))
    return output, weights if batched or weights is None else weights.squeeze(0)


# In bfloat16 on a CPU torch's fused attention takes up to five times as long as its steps one by one
# (benchmarks/results/attention.json). They keep all scores, so only up to so many.
_MOST_SCORES = 1 << 26


def _faster_written_out(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if q.device.type != "cpu" or q.dtype is not torch.bfloat16 or not multiplies_bfloat16():
        return False
    if is_causal or torch.compiler.is_compiling() or q.shape[:-1].numel() * k.shape[2] > _MOST_SCORES:
        return False
    # A place that sees nothing gets zeros from the fused one, but no number from a softmax.
    return mask is None or not bool((mask == -math.inf).all(-1).any())


def _heads(module: Attending, projected: Tensor, batch: int | None) -> Tensor:
    """[batch, head, place, one of the head's numbers], from any order of batch and places."""
    if batch is None:
        projected = projected.unsqueeze(0)
    heads = projected.view(*projected.shape[:-1], module.num_heads, module.head_dim)
    return heads.permute(1, 2, 0, 3) if batch == 1 else heads.transpose(1, 2)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores of this shape [batch, head, target, source]."""
    n, heads, targets, sources = shape
    mask = None
    if attn_mask is not None:
        given = tuple(attn_mask.shape)
        if given not in ((targets, sources), (n * heads, targets, sources)):
            raise ArgumentError(
                f"attn_mask has shape {given}; it must be {(targets, sources)}, or {(n * heads, targets, sources)}, "
                "one for each head of each example"
            )
        mask = _added(attn_mask, dtype).view(*(n, heads) if len(given) == 3 else (1, 1), targets, sources)
    if key_padding_mask is not None:
        given, wanted = tuple(key_padding_mask.shape), (n, sources)
        if given != wanted and (n != 1 or given != (sources,)):
            raise ArgumentError(f"key_padding_mask has shape {given}; it must be {wanted}, a place for each key")
        padding = _added(key_padding_mask, dtype).view(n, 1, 1, sources)
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to a score: −∞ where a mask of booleans is true."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():  # ones and zeros would be added to the scores
        raise ArgumentError(f"a mask is of {mask.dtype}; it must be of bool, True where nothing may be seen, or float")
    return mask.to(dtype)
