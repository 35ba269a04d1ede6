"""Fully-connected layers (eq. 17)."""

from typing import ClassVar, cast, final

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsevd.layers.linear_map import ColumnProduct, LinearMap, MatrixProduct
from sparsevd.layers.product_layer import ProductLayer


class SparseMatrix(ProductLayer):
    """What twins of `nn.Linear` and of its namesakes share."""

    options = ("in_features", "out_features")
    product: ClassVar[LinearMap] = MatrixProduct()

    def forward(self, input: Tensor) -> Tensor:
        return self.output(input, self.product)


@final
class SparseLinear(SparseMatrix):
    """Sparse VD twin of `nn.Linear`."""

    plain_type = nn.Linear

    def can_contract(self) -> bool:
        return True


@final
class SparseOutputProjection(SparseMatrix):
    """Sparse VD twin of the linear layer that `nn.MultiheadAttention` ends with, and whose weight that reads."""

    plain_type = NonDynamicallyQuantizableLinear


@final
class SparseConv1D(ProductLayer):
    """Sparse VD twin of the Conv1D of Transformers, as GPT-2 has it: a linear layer whose weight is [input, unit]."""

    plain_type = nn.Module  # none of torch's: that of the module it is made from
    options = ("nf", "nx")
    unit_axis = 1
    product: ClassVar[LinearMap] = ColumnProduct()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x, self.product)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(cast(Tensor, self.bias))
        nn.init.constant_(self.log_sigma2, self.initial_log_sigma2)
