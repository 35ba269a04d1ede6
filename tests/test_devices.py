"""What goes through torch works wherever the network is; what goes through C says that it is for the CPU."""

import pytest
import torch
from torch import nn

import networks
import sparsevd
from sparsevd import kernels
from sparsevd.errors import ConversionError, GraphError
from sparsevd.graph import capture, to_module
from sparsevd.graph.relevance import relevant

built = pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
pytestmark = pytest.mark.usefixtures("one_thread")


def convolutions():
    norm = nn.BatchNorm2d(4, affine=False)
    layers = [nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    model = networks.with_statistics(nn.Sequential(*layers)).eval()
    model[0].weight.data[1:3] = 0
    return model, torch.randn(2, 3, 8, 8)


def test_a_network_without_numbers_has_a_graph():
    model, x = convolutions()
    graph = capture(model, x)
    meta = capture(model.to("meta"), x.to("meta"))
    assert meta.nodes == graph.nodes
    assert meta.device.type == "meta"
    assert all(tensor.is_meta for tensor in meta.constants.values())
    assert all(tensor.is_meta for tensor in to_module(meta).state_dict().values())
    assert meta(x.to("meta")).shape == (2, 5)
    assert to_module(meta)(x.to("meta")).is_meta
    assert all(mask.is_meta for mask in relevant(meta).values())
    assert meta.to("meta").device.type == "meta"
    assert graph.to("meta").nodes == graph.nodes


def test_what_needs_numbers_says_so(tmp_path):
    model, x = convolutions()
    model, x = model.to("meta"), x.to("meta")
    with pytest.raises(GraphError, match="no numbers"):
        sparsevd.compact(model, x)
    with pytest.raises(GraphError, match="on the CPU, and the network is on meta"):
        sparsevd.export_c(model, x, tmp_path / "net.c")
    with pytest.raises(ConversionError, match="float32 on meta"):
        sparsevd.accelerate(model, x)
    assert not list(tmp_path.iterdir())


@built
def test_a_plan_says_so_too():
    model, x = convolutions()
    run = sparsevd.plan(model, x)
    with pytest.raises(sparsevd.SparseVDError, match="float32 on meta"):
        run(x.to("meta"))
    assert run.attempt(x.to("meta")) is None
    with pytest.raises(GraphError, match="the network is on meta"):
        sparsevd.plan(model.to("meta"), x.to("meta"))


@pytest.mark.long
@pytest.mark.parametrize("make", [convolutions, *networks.NETWORKS.values()])
def test_no_tensor_is_made_where_torch_happens_to_make_them(make):
    """Another default device: a tensor made without saying where would be there, and meet those on the CPU."""
    model, example = make()
    model.eval()
    examples = example if isinstance(example, tuple) else (example,)
    expected, masks = sparsevd.compact(model, example)(*examples), relevant(capture(model, example))
    with torch.device("meta"):
        graph = capture(model, example)
        found, found_masks = sparsevd.compact(graph, example)(*examples), relevant(graph)
    pairs = zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert all(torch.equal(found_masks[name], mask) for name, mask in masks.items())


@built
def test_nor_in_the_runtime():
    model, x = convolutions()
    expected = model(x).detach()
    with torch.device("meta"):
        fast, run = sparsevd.accelerate(model, x), sparsevd.plan(model, x)
        torch.testing.assert_close(fast(x), expected)
        torch.testing.assert_close(run(x), expected)
