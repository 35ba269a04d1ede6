"""Embeddings: the noise is drawn for each token that is looked up, so a token twice in a text has two samples."""

from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.layers.layer import SparseLayer


class SparseTable(SparseLayer):
    """What both embeddings share: a table of a vector for each token."""

    others = ()
    unit_axis = 1  # the rows are tokens

    weight: Tensor
    log_sigma2: Tensor
    padding_idx: int | None
    scale_grad_by_freq: bool

    @classmethod
    def refusal(cls, twin: nn.Module) -> str:
        if twin.max_norm is not None:
            return f"max_norm={twin.max_norm} changes its rows in place when they are looked up, noise and all"
        if twin.sparse:
            return "sparse=True makes sparse gradients, but the KL has one for every row; set sparse=False"
        return ""

    @classmethod
    def refusal_untied(cls, twin: nn.Module) -> str:
        """A vector for padding learns nothing when looked up; as a row of a tied output layer it does."""
        padding, weight = twin.padding_idx, cast(Tensor, twin.weight)
        if padding is not None and not weight.is_meta and bool(weight[cast(int, padding)].any()):
            return "its vector for padding is not zero, and the KL would move it; set that row to zero, or exclude it"
        return ""

    @torch.no_grad()
    def _fill_padding_idx_with_zero(self) -> None:
        """Called by the twin's own `reset_parameters`."""
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()

    def sampled(self, tokens: Tensor) -> Tensor:
        """θ + σ·ε of the row of each token; the row for padding has no noise."""
        by_frequency = self.scale_grad_by_freq
        theta = F.embedding(tokens, self.weight, self.padding_idx, scale_grad_by_freq=by_frequency)
        log_sigma2 = F.embedding(tokens, self.log_sigma2, self.padding_idx, scale_grad_by_freq=by_frequency)
        noise = torch.exp(0.5 * log_sigma2) * torch.randn_like(log_sigma2)
        if self.padding_idx is not None:
            noise = noise.masked_fill((tokens == self.padding_idx).unsqueeze(-1), 0.0)
        return theta + noise.to(theta.dtype)


@final
class SparseEmbedding(SparseTable):
    """Sparse VD twin of `nn.Embedding`."""

    plain_type = nn.Embedding
    options = ("num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq")

    def forward(self, input: Tensor) -> Tensor:
        if not self.draws_noise:
            by_frequency = self.scale_grad_by_freq
            return F.embedding(input, self.pruned_weight(), self.padding_idx, scale_grad_by_freq=by_frequency)
        return self.sampled(input)


@final
class SparseEmbeddingBag(SparseTable):
    """Sparse VD twin of `nn.EmbeddingBag`."""

    plain_type = nn.EmbeddingBag
    options = (
        "num_embeddings",
        "embedding_dim",
        "scale_grad_by_freq",
        "mode",
        "include_last_offset",
        "padding_idx",
    )

    embedding_dim: int
    mode: str
    include_last_offset: bool

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if not self.draws_noise:
            table, by_frequency = self.pruned_weight(), self.scale_grad_by_freq
            return self._bags(input, table, offsets, per_sample_weights, self.padding_idx, by_frequency)
        # Each place in the bags has a row of its own, its sample; those of padding share the last one, which is empty.
        rows = self.sampled(input).reshape(-1, self.embedding_dim)
        places = torch.arange(input.numel(), device=input.device).view_as(input)
        if self.padding_idx is not None:
            places = places.masked_fill(input == self.padding_idx, len(rows))
        rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return self._bags(places, rows, offsets, per_sample_weights, len(rows) - 1)

    def _bags(
        self,
        input: Tensor,
        table: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        padding: int | None,
        by_frequency: bool = False,
    ) -> Tensor:
        return F.embedding_bag(
            input,
            table,
            offsets,
            scale_grad_by_freq=by_frequency,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
