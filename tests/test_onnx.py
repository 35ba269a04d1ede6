"""ONNX files: the network's outputs in onnxruntime, its exact zeros, any batch size, and nothing written otherwise."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import networks
import sparsevd
from sparsevd.errors import ExportError
from sparsevd.runtime import onnx as exporter

pytestmark = pytest.mark.usefixtures("one_thread")


def outputs(path, *inputs):
    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0])


def nonzeros(path):
    """Of all weights with two axes and more, dense and sparse."""
    graph = onnx.load(path).graph
    dense = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
    sparse = [onnx.numpy_helper.to_array(tensor.values) for tensor in graph.sparse_initializer]
    return sum(int((array != 0).sum()) for array in dense if array.ndim >= 2) + sum(map(len, sparse))


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "encoder"])
def test_known_networks_pruned_at_random(name, tmp_path):
    model, example = networks.NETWORKS[name]()
    model.train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    path = tmp_path / "net.onnx"
    sparsevd.export_onnx(model, example[:1], path)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    x = torch.cat([example, example.flip(0), example[:1]])
    with torch.no_grad():
        expected = model.eval()(x)
    assert (outputs(path, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    weights = sum(int(p.count_nonzero()) for p in model.parameters() if p.ndim >= 2)
    assert nonzeros(path) == weights


def test_sparse_initializers(tmp_path):
    model = networks.pruned_at_random(nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)), 0.95)
    x = torch.randn(3, 200)
    dense, sparse = tmp_path / "dense.onnx", tmp_path / "sparse.onnx"
    sparsevd.export_onnx(model, x, dense)
    sparsevd.export_onnx(model, x, sparse, sparse_initializers=True)
    onnx.checker.check_model(sparse)
    assert sparse.stat().st_size < dense.stat().st_size / 4
    assert (
        nonzeros(sparse) == nonzeros(dense) == sum(int(layer.weight.count_nonzero()) for layer in (model[0], model[2]))
    )
    assert torch.equal(outputs(sparse, x), outputs(dense, x))


def test_a_compiled_network_is_written_as_the_one_inside(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    sparsevd.export_onnx(torch.compile(model, backend="eager"), x, tmp_path / "net.onnx")
    torch.testing.assert_close(outputs(tmp_path / "net.onnx", x), model(x).detach())


def test_nothing_is_written_unless_the_outputs_agree(tmp_path, monkeypatch):
    model = nn.Linear(4, 3)
    path = tmp_path / "net.onnx"

    def wrong(content, _):
        content.graph.initializer[0].raw_data = bytes(len(content.graph.initializer[0].raw_data))

    monkeypatch.setattr(exporter, "_make_sparse", wrong)
    with pytest.raises(ExportError, match="differ by .* nothing was written"):
        sparsevd.export_onnx(model, torch.ones(1, 4), path, sparse_initializers=True)
    assert not list(tmp_path.iterdir())


def test_mistakes(tmp_path, monkeypatch):
    with pytest.raises(ExportError, match="call sparsevd.prune first"):
        sparsevd.export_onnx(sparsevd.sparsify(nn.Linear(4, 3)), torch.ones(1, 4), tmp_path / "x")
    with pytest.raises(ExportError, match="example must be a tensor"):
        sparsevd.export_onnx(nn.Linear(4, 3), 3, tmp_path / "x")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ExportError, match='run: pip install "sparsevd\\[onnx\\]"'):
        sparsevd.export_onnx(nn.Linear(4, 3), torch.ones(1, 4), tmp_path / "x")
