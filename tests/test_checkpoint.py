import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

import sparsevd
from sparsevd.checkpoint import DTYPES, Checkpoint, little_endian, load_weights, read_tensors, write_tensors
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


def test_tensors_that_share_memory_are_written_whole(tmp_path):
    base = torch.arange(6.0)
    write_tensors(tmp_path / "f", {"a": base, "b": base, "c": base[2:4], "d": base.view(2, 3).T})
    tensors, _ = read_tensors(tmp_path / "f")
    assert torch.equal(tensors["a"], tensors["b"])
    assert tensors["c"].tolist() == [2, 3]
    assert tensors["d"].tolist() == [[0, 3], [1, 4], [2, 5]]


def every_type():
    """Tensors of all types that safetensors knows, in many shapes, and names that JSON has to escape."""
    unsigned = {torch.uint16, torch.uint32, torch.uint64}
    return {
        f'é"\\\n{number % 3} {dtype} {shape}': torch.ones(shape, dtype=torch.int64 if dtype in unsigned else None).to(
            dtype
        )
        for number, dtype in enumerate(DTYPES)
        for shape in ((3,), (), (0, 2), (2, 3))
    }


def test_the_file_is_byte_for_byte_that_of_safetensors(tmp_path):
    write_tensors(tmp_path / "f", every_type(), {"about": 'é"\x01'})
    assert (tmp_path / "f").read_bytes() == save(every_type(), {"about": 'é"\x01'})
    write_tensors(tmp_path / "f", {})
    assert (tmp_path / "f").read_bytes() == save({})


def test_tensors_are_written_as_torch_shows_them(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "parameter": nn.Parameter(torch.ones(2))}
    write_tensors(tmp_path / "f", state)
    tensors, _ = read_tensors(tmp_path / "f")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


def test_other_byte_orders_are_turned_round(monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    assert bytes(little_endian(torch.tensor([1, 2], dtype=torch.int16))) == b"\0\1\0\2"
    assert bytes(little_endian(torch.tensor([1j]))) == b"\0\0\0\0\x3f\x80\0\0"


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_a_tensor_that_safetensors_cannot_hold_is_named(tmp_path, tensor):
    with pytest.raises(WriteError, match=r"'a' is a (sparse|complex128) tensor"):
        write_tensors(tmp_path / "f", {"a": tensor})


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path, monkeypatch):
    """safetensors opens a file twice, and training does not wait for readers."""
    path = tmp_path / "f"
    write_tensors(path, {"a": torch.zeros(10), "b": torch.zeros(10)})
    opened_again = torch.UntypedStorage.from_file

    def late(*arguments, **options):
        write_tensors(path, {"b": torch.ones(20)})
        return opened_again(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    tensors, _ = read_tensors(path)
    assert tensors["a"].tolist() == tensors["b"].tolist() == [0] * 10
    assert read_tensors(path)[0]["b"].tolist() == [1] * 20


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
