"""Sparse VD layers, one file a family. `SPARSE_TYPES` is the registry: a new layer enters there, and the contract tests
of tests/test_layers.py ask for its case."""

from torch import nn

from sparsevd.layers.attention import SparseMultiheadAttention
from sparsevd.layers.convolution import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
)
from sparsevd.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from sparsevd.layers.layer import INITIAL_LOG_SIGMA2, SparseLayer
from sparsevd.layers.linear import SparseLinear, SparseOutputProjection
from sparsevd.layers.recurrent import (
    SparseGRU,
    SparseGRUCell,
    SparseLSTM,
    SparseLSTMCell,
    SparseRNN,
    SparseRNNCell,
)

# Every final class by the exact type of its plain twin.
SPARSE_TYPES: dict[type[nn.Module], type[SparseLayer]] = {
    layer.plain_type: layer
    for layer in (
        SparseLinear,
        SparseConv1d,
        SparseConv2d,
        SparseConv3d,
        SparseConvTranspose1d,
        SparseConvTranspose2d,
        SparseConvTranspose3d,
        SparseEmbedding,
        SparseEmbeddingBag,
        SparseRNN,
        SparseLSTM,
        SparseGRU,
        SparseRNNCell,
        SparseLSTMCell,
        SparseGRUCell,
        SparseMultiheadAttention,
        SparseOutputProjection,
    )
}

__all__ = ["INITIAL_LOG_SIGMA2", "SPARSE_TYPES", "SparseLayer"]
