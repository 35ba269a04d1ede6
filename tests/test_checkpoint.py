import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsevd
from sparsevd import atomic
from sparsevd.checkpoint import Checkpoint, load_weights, read_tensors, write_tensors
from sparsevd.checkpoint_info import info, prune_file
from sparsevd.errors import CheckpointError, SparseVDError, WriteError
from sparsevd.layers import INITIAL_LOG_SIGMA2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a small real checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    model = sparsevd.sparsify(nn.Linear(3, 2))
    data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
    sparsevd.fit(model, data, None, sparsevd.FitConfig(epochs=1), run_dir=folder, progress=False)
    return (folder / "checkpoint.safetensors").read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic.write(path, "old")

    def fail():
        with atomic.replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_this_file_only_are_removed(tmp_path):
    for name in (".checkpoint.12.tmp", ".mine.tmp", "checkpoint"):
        (tmp_path / name).touch()
    atomic.remove_leftovers(tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "checkpoint"]


def test_what_cannot_be_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(WriteError, match="cannot be written"):
        atomic.write(tmp_path, "a folder stands here")


def test_tensors_that_share_memory_are_written_whole(tmp_path):
    base = torch.arange(6.0)
    write_tensors(tmp_path / "f", {"a": base, "b": base, "c": base[2:4], "d": base.view(2, 3).T})
    tensors, _ = read_tensors(tmp_path / "f")
    assert torch.equal(tensors["a"], tensors["b"])
    assert tensors["c"].tolist() == [2, 3]
    assert tensors["d"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("length", [0, 7, 8, 100, 1000, -1])
def test_a_truncated_checkpoint_is_refused(tmp_path, whole, length):
    path = tmp_path / "checkpoint"
    path.write_bytes(whole[:length])
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoint.load(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_checkpoint_never_crashes(tmp_path_factory, whole, data):
    """Whatever is flipped, loading and resuming either work or raise an error of ours."""
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "checkpoint.safetensors").write_bytes(content)
    try:
        Checkpoint.load(folder / "checkpoint.safetensors")
        pair = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        model = sparsevd.sparsify(nn.Linear(3, 2))
        config = sparsevd.FitConfig(epochs=1)
        sparsevd.fit(model, pair, None, config, run_dir=folder, resume=True, progress=False)
    except SparseVDError:
        pass


def test_weights_go_into_dense_and_sparse_models(tmp_path):
    dense = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    write_tensors(tmp_path / "dense", dict(dense.state_dict()))
    sparse = sparsevd.sparsify(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    load_weights(sparse, tmp_path / "dense")
    assert torch.equal(sparse[0].weight, dense[0].weight)
    assert (sparse[0].log_sigma2 == INITIAL_LOG_SIGMA2).all()
    layers = {"0": {"type": "SparseLinear", "threshold": 3.0, "of": "0"}}
    Checkpoint(dict(sparse.state_dict()), layers=layers).save(tmp_path / "sparse")
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    load_weights(other, tmp_path / "sparse")
    assert torch.equal(other[0].weight, dense[0].weight)


def test_pruning_a_file_prunes_a_shared_layer_under_all_its_names(tmp_path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.norm = nn.BatchNorm1d(4)
            self.log_sigma2 = nn.Parameter(torch.zeros(1))  # a name of the user's own

        def forward(self, x):
            return self.norm(self.b(self.a(x))) + self.log_sigma2

    model = sparsevd.sparsify(Shared())
    data = (torch.randn(40, 4), torch.randint(0, 4, (40,)))
    sparsevd.fit(model, data, None, sparsevd.FitConfig(epochs=1), run_dir=tmp_path, progress=False)
    with torch.no_grad():
        expected = sparsevd.prune(model, threshold=-3.0)
    prune_file(tmp_path, tmp_path / "pruned", -3.0)
    tensors, _ = read_tensors(tmp_path / "pruned")
    assert tensors.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.state_dict().items())
    assert info(tmp_path).layers == sparsevd.summary(model).layers
    assert info(tmp_path).other_parameters == sparsevd.summary(model).other_parameters


def test_starting_from_a_sparse_run_frees_every_weight(tmp_path):
    model = sparsevd.sparsify(nn.Linear(3, 2))
    with torch.no_grad():
        model.log_sigma2.fill_(9.0)
    model.drop(model.pruned_weight() == 0)
    Checkpoint(dict(model.state_dict()), layers={"": {"type": "x", "threshold": 3.0, "of": ""}}).save(tmp_path / "c")
    fresh = sparsevd.sparsify(nn.Linear(3, 2))
    load_weights(fresh, tmp_path / "c")
    assert fresh.alive().all()


def test_weights_that_do_not_fit_are_named(tmp_path):
    write_tensors(tmp_path / "f", dict(nn.Sequential(nn.Linear(3, 2)).state_dict()))
    with pytest.raises(CheckpointError, match=r"of another shape: 0.weight \(2, 3\) for \(2, 4\)"):
        load_weights(nn.Sequential(nn.Linear(4, 2)), tmp_path / "f")
    with pytest.raises(CheckpointError, match=r"missing: 1.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), tmp_path / "f")
    with pytest.raises(CheckpointError, match=r"not in the model: 0.bias"):
        load_weights(nn.Linear(3, 2), tmp_path / "f")
