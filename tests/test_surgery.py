"""Modules swapped in all their places, and parents kept off their fused paths."""

import torch
from torch import nn

from sparsevd.layers.surgery import leave_fast_paths, restore_fast_paths, swap


def test_every_place_of_a_module_gets_its_replacement():
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, other), nn.ReLU())
    new = nn.Identity()
    assert swap(model, {shared: new}) is model
    assert model[0] is new
    assert model[1][0] is new
    assert model[1][1] is other
    assert swap(shared, {shared: new}) is new


def test_a_compiled_wrapper_calls_the_replacement():
    old, new, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.randn(3, 2)
    model = nn.Sequential(torch.compile(old, backend="eager"))
    assert torch.equal(model(x), old(x))
    swap(model, {old: new})
    assert torch.equal(model(x), new(x))


def test_a_place_that_is_empty_stays_so():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("nothing", None)
    swap(model, {model[0]: nn.Identity()})
    assert model._modules["nothing"] is None


def test_parents_leave_their_fused_path_only_where_a_module_counts():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    before = [layer.activation_relu_or_gelu for layer in model.layers]
    nested = model.use_nested_tensor
    assert all(before)
    counted = model.layers[1].linear1
    left = leave_fast_paths(model, lambda module: module is counted)
    assert list(left) == ["", "layers.1"]
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [before[0], 0]
    assert not model.use_nested_tensor
    assert not leave_fast_paths(model, lambda module: module is counted)  # a second time changes nothing
    restore_fast_paths([left["layers.1"]])
    assert [layer.activation_relu_or_gelu for layer in model.layers] == before
    assert not model.use_nested_tensor  # it was not among those given
    restore_fast_paths(model.modules())
    assert model.use_nested_tensor == nested


def test_layers_are_called_while_the_fused_path_is_left():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    called = []
    layer.linear1.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        leave_fast_paths(layer, lambda module: module is layer.linear1)
        off = layer(torch.ones(1, 3, 8))
        assert called
        restore_fast_paths([layer])
        torch.testing.assert_close(layer(torch.ones(1, 3, 8)), off)
