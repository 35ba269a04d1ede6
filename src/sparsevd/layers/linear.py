"""Fully-connected layers (eq. 17)."""

from typing import final

from torch import Tensor, nn

from sparsevd.layers.linear_map import MatrixProduct
from sparsevd.layers.product_layer import ProductLayer

_PRODUCT = MatrixProduct()


@final
class SparseLinear(ProductLayer):
    """Sparse VD twin of `nn.Linear`."""

    plain_type = nn.Linear
    options = ("in_features", "out_features")

    def forward(self, input: Tensor) -> Tensor:
        return self.output(input, _PRODUCT)

    def can_contract(self) -> bool:
        return True
