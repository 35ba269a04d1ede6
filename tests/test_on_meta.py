"""Every path through torch takes the device of its tensors. `meta` stands for a GPU: it has shapes and no numbers."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import sparsevd
from sparsevd import kernels
from sparsevd.layers import SPARSE_TYPES
from sparsevd.posterior import posteriors
from sparsevd.training.contraction import part_left

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding="same"), lambda: torch.randn(2, 2, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 3), lambda: torch.randn(2, 2, 5)),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), lambda: torch.tensor([[0, 1]])),
    "recurrent": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), lambda: torch.randn(5, 2, 4)),
    "cell": (lambda: nn.GRUCell(4, 3), lambda: torch.randn(2, 4)),
    "bag": (lambda: nn.EmbeddingBag(5, 3, padding_idx=1), lambda: torch.tensor([[0, 1]])),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_on_no_device_at_all(name):
    """Forward in both modes, backward, KL, dropping: the shapes and the device of the input, and nothing on the CPU."""
    make, example = LAYERS[name]
    layer = make()
    sparse = SPARSE_TYPES[type(layer)](layer.to("meta")).to("meta")
    x = example().to("meta")
    expected = [tensor.shape for tensor in tree_leaves(make()(example()))]
    for mode in (True, False):
        out = tree_leaves(sparse.train(mode)(x))
        assert all(tensor.is_meta for tensor in out)
        assert [tensor.shape for tensor in out] == expected
    loss = sum(tensor.sum() for tensor in tree_leaves(sparse.train()(x))) + sparsevd.kl(sparse)
    assert loss.is_meta
    loss.backward()
    assert all(p.grad.is_meta for p in sparse.parameters())
    for posterior in posteriors(sparse):
        for tensor in (posterior.log_alpha(), posterior.pruned(), posterior.kept(), posterior.alive()):
            assert tensor.is_meta
        posterior.drop(posterior.alive())
        assert sparse.plain().get_parameter(posterior.weight).is_meta


def test_conversion_and_pruning_keep_the_device():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Conv1d(4, 2, 1)).to("meta"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.device.type for p in sparsevd.prune(model).parameters()} == {"meta"}


def test_the_kernels_take_tensors_of_the_cpu_only():
    assert not kernels.can_take(torch.empty(2, device="meta"))
    assert not kernels.can_take_pair(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


def test_contraction_picks_indices_on_the_device_of_the_weights():
    model = sparsevd.sparsify(nn.Linear(8, 8))
    (posterior,) = posteriors(model)
    posterior.drop(torch.arange(8).remainder(2).bool().expand(8, 8))
    part = part_left(posterior)
    assert part.inputs.device == part.units.device == posterior.theta.device
