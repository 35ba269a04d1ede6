import json
import resource
import struct
import sys
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

import sparsevd
from sparsevd.errors import CheckpointError, FormatError, SparseVDError, WriteError
from sparsevd.files.tensors import DTYPES, little_endian, read_tensors, write_tensors
from sparsevd.layers import INITIAL_LOG_SIGMA2
from sparsevd.posterior import Posterior
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import Checkpoint, load_weights
from sparsevd.training.folder import State, TrainingFolder
from sparsevd.training.history import EpochMetrics, History
from sparsevd.training.optimizer import BoundAdam
from sparsevd.training.restoration import described
from sparsevd.training.schedule import Schedule


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


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of this process, as Linux does")
def test_a_file_larger_than_the_memory_is_refused(tmp_path):
    """4 GB that take no space on the disk, where 1 GB is allowed."""
    count = 1_000_000_000
    header = json.dumps({"a": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    with (tmp_path / "c").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * count)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000_000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be read into memory"):
            read_tensors(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
    Checkpoint(dict(sparse.state_dict()), posteriors=described(sparse)).save(tmp_path / "sparse")
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
    Run(tmp_path).write_pruned(tmp_path / "pruned", -3.0)
    tensors, _ = read_tensors(tmp_path / "pruned")
    assert tensors.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.state_dict().items())
    assert Run(tmp_path).summary().layers == sparsevd.summary(model).layers
    assert Run(tmp_path).summary().other_parameters == sparsevd.summary(model).other_parameters


def test_starting_from_a_sparse_run_frees_every_weight(tmp_path):
    model = sparsevd.sparsify(nn.Linear(3, 2))
    with torch.no_grad():
        model.log_sigma2.fill_(9.0)
    Posterior(model).drop(model.pruned_weight() == 0)
    Checkpoint(dict(model.state_dict()), posteriors=described(model)).save(tmp_path / "c")
    fresh = sparsevd.sparsify(nn.Linear(3, 2))
    load_weights(fresh, tmp_path / "c")
    assert Posterior(fresh).alive().all()


def test_weights_that_do_not_fit_are_named(tmp_path):
    write_tensors(tmp_path / "f", dict(nn.Sequential(nn.Linear(3, 2)).state_dict()))
    with pytest.raises(CheckpointError, match=r"of another shape: 0.weight \(2, 3\) for \(2, 4\)"):
        load_weights(nn.Sequential(nn.Linear(4, 2)), tmp_path / "f")
    with pytest.raises(CheckpointError, match=r"missing: 1.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), tmp_path / "f")
    with pytest.raises(CheckpointError, match=r"not in the model: 0.bias"):
        load_weights(nn.Linear(3, 2), tmp_path / "f")


CONFIG = sparsevd.FitConfig(epochs=3, learning_rate=4e-3, drop_from=0.3, warm_up_end=0.1, drop_patience=2)
SETTINGS = {**asdict(CONFIG), "n_train": 20}
DATA = (torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2)


def small_model():
    torch.manual_seed(0)
    return sparsevd.sparsify(nn.Linear(3, 2))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """The folder of a run of three epochs that has done two, as if it had been killed then."""
    folder = tmp_path_factory.mktemp("run")

    class Killed(Exception):
        pass

    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == 3:
            raise Killed
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(Killed):
        sparsevd.fit(small_model(), DATA, DATA, CONFIG, loss=loss, run_dir=folder, progress=False)
    return folder


def copied(folder, to):
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return Checkpoint.load(to / "checkpoint.safetensors")


def generator_state(left, following):
    """A state of torch's generator with these two counters, which torch itself accepts."""
    state = torch.Generator().get_state()
    content = bytearray(state.numpy().tobytes())
    struct.pack_into("<iiQ", content, 8, left, 1, following)
    return torch.frombuffer(content, dtype=torch.uint8)


def changed(part, **values):
    """A change of entries of the checkpoint's progress, by the name of the dictionary there."""
    return lambda checkpoint: checkpoint.progress[part].update(values)


def number(name, row, value):
    """A change of one number of the history."""

    def change(checkpoint):
        columns = [column for column in vars(EpochMetrics(*[0] * 12)) if column != "alive"]
        checkpoint.history["numbers"][row, columns.index(name)] = value

    return change


def slot(name, value):
    def change(checkpoint):
        if value is None:
            del checkpoint.optimizer[name]
        else:
            checkpoint.optimizer[name] = value

    return change


def tensor(name, value):
    return lambda checkpoint: checkpoint.model.update({name: value})


def counter(name, value):
    """The schedule's counter of a tensor of weights."""
    return lambda checkpoint: checkpoint.schedule.update({name: value})


DAMAGES = {
    "epoch beyond the run": (changed("state", epoch=4), "epoch 4"),
    "epoch without history": (changed("state", epoch=1), "history of 2"),
    "negative epoch": (changed("state", epoch=-1), "epoch -1"),
    "a truth value for a number": (changed("state", epoch=True), "epoch True"),
    "batch outside an epoch": (changed("state", batch=1, seen=10), "inside an epoch"),
    "negative examples": (changed("state", seen=-5), "seen -5"),
    "more batches than examples": (changed("state", batch=9, seen=5), "batch 9"),
    "huge integer": (changed("state", seen=10**300), "seen 1000"),
    "more wrong than seen": (changed("state", wrong=3), "wrong 3"),
    "loss of text": (changed("state", loss="0.0"), "loss '0.0'"),
    "loss not a number": (changed("state", loss=float("nan")), "loss nan"),
    "negative time": (changed("state", seconds=-1.0), "seconds -1.0"),
    "state with more": (changed("state", other=1), "has not exactly"),
    "no settings": (lambda checkpoint: checkpoint.progress.update(settings=[1]), "settings are a list"),
    "no state": (lambda checkpoint: checkpoint.progress.update(state=None), "state is None"),
    "other settings": (changed("settings", epochs=30), "epochs: 30 then, 3 now"),
    "settings of a wrong type": (changed("settings", seed=False), "seed: False then, 0 now"),
    "nested settings": (changed("settings", seed=[[[[0]]]]), "seed: a list then"),
    "history of layers": (lambda checkpoint: checkpoint.progress.update(history_layers="ab"), "list of names"),
    "history of more layers": (lambda checkpoint: checkpoint.progress.update(history_layers=["", "b"]), "alive"),
    "history of another layer": (
        lambda checkpoint: checkpoint.progress.update(history_layers=["other"]),
        "other layers than the network",
    ),
    "history of a plain network": (
        lambda checkpoint: (
            checkpoint.progress.update(history_layers=None),
            checkpoint.history.update(alive=checkpoint.history["alive"][:, :0]),
        ),
        "other layers than the network",
    ),
    "history of two networks": (
        lambda checkpoint: (
            checkpoint.progress.update(history_layers=["", "b"]),
            checkpoint.history.update(alive=checkpoint.history["alive"].repeat(1, 2, 1)),
        ),
        "other layers than the network",
    ),
    "history missing": (lambda checkpoint: checkpoint.history.pop("known"), "known are missing"),
    "history of half numbers": (
        lambda checkpoint: checkpoint.history.update(numbers=checkpoint.history["numbers"].half()),
        "torch.float16",
    ),
    "history: loss not a number": (number("train_loss", 1, float("nan")), "epoch 2 of its history has train_loss nan"),
    "history: epochs in another order": (number("epoch", 0, 2.0), "epoch 1 of its history has epoch 2"),
    "history: half a weight": (number("dropped", 0, 0.5), "dropped 0.5"),
    "history: error above 100 %": (number("train_error", 0, 101.0), "train_error 101"),
    "history: fewer than no units": (lambda checkpoint: checkpoint.history["alive"].fill_(-1), "fewer than no units"),
    "weight not a number": (tensor("weight", torch.full((2, 3), float("nan"))), "weight holds NaN or infinity"),
    "weight of another shape": (tensor("weight", torch.zeros(3, 2)), "and its log σ²"),
    "weight of another type": (tensor("weight", torch.zeros(2, 3, dtype=torch.float64)), "of another type: weight"),
    "weight of integers": (tensor("weight", torch.zeros(2, 3, dtype=torch.int64)), "torch.int64"),
    "bias of another shape": (tensor("bias", torch.zeros(3)), r"bias \(3,\) for \(2,\)"),
    "log σ² of another shape": (tensor("log_sigma2", torch.zeros(1, 3)), "log σ²"),
    "log σ² of integers": (tensor("log_sigma2", torch.zeros(2, 3, dtype=torch.int32)), "log_sigma2"),
    "log σ² missing": (lambda checkpoint: checkpoint.model.pop("log_sigma2"), "lacks 'log_sigma2'"),
    "bias missing": (lambda checkpoint: checkpoint.model.pop("bias"), "missing: bias"),
    "one tensor more": (tensor("more", torch.zeros(2)), "not in the model: more"),
    "another threshold": (lambda checkpoint: checkpoint.posteriors["weight"].update(threshold=2.0), "thresholds"),
    "threshold of text": (lambda checkpoint: checkpoint.posteriors["weight"].update(threshold="3"), "threshold"),
    "threshold not a number": (
        lambda checkpoint: checkpoint.posteriors["weight"].update(threshold=float("nan")),
        "threshold",
    ),
    "first name of a list": (lambda checkpoint: checkpoint.posteriors["weight"].update(of=[]), "its first name"),
    "step negative": (slot("weight/step", torch.tensor(-1.0)), "weight/step"),
    "step not a number": (slot("weight/step", torch.tensor(float("nan"))), "weight/step"),
    "step infinite": (slot("weight/step", torch.tensor(float("inf"))), "weight/step"),
    "step and a half": (slot("weight/step", torch.tensor(1.5)), "weight/step"),
    "step of a wrong shape": (slot("weight/step", torch.ones(2, 3)), "weight/step"),
    "step of a wrong type": (slot("weight/step", torch.tensor(2)), "weight/step"),
    "step missing": (slot("weight/step", None), "weight lacks the optimizer's step"),
    "moment missing": (slot("bias/exp_avg_sq", None), "bias lacks the optimizer's exp_avg_sq"),
    "moment of a wrong type": (slot("bias/exp_avg", torch.zeros(2, dtype=torch.float64)), "bias/exp_avg"),
    "moment not a number": (slot("bias/exp_avg", torch.full((2,), float("nan"))), "bias/exp_avg"),
    "square below zero": (slot("bias/exp_avg_sq", torch.tensor([1.0, -1.0])), "bias/exp_avg_sq"),
    "another slot": (slot("bias/other", torch.zeros(2)), "bias/other"),
    "slot of no parameter": (slot("nothing/step", torch.tensor(1.0)), "no parameter 'nothing'"),
    "all slots missing": (lambda checkpoint: checkpoint.optimizer.clear(), "lacks the optimizer's"),
    "another first name": (
        lambda checkpoint: checkpoint.posteriors["weight"].update(of="b"),
        "does not say which tensor",
    ),
    "another name of the noise": (
        lambda checkpoint: checkpoint.posteriors["weight"].update(noise="bias"),
        r"'bias' is torch.float32 \(2,\)",
    ),
    "aliases that are no names": (lambda checkpoint: setattr(checkpoint, "aliases", [1]), "not all names"),
    "patience exceeded": (counter("weight", torch.full((2, 3), 3, dtype=torch.int16)), "more epochs than the patience"),
    "patience of a wrong type": (
        counter("weight", torch.ones(2, 3)),
        "'weight' is no tensor of weights, or of another",
    ),
    "patience of a bias": (counter("bias", torch.ones(2, dtype=torch.int16)), "'bias' is no tensor of weights"),
    "generator too short": (lambda checkpoint: setattr(checkpoint, "rng", torch.zeros(9, dtype=torch.uint8)), "random"),
    "generator of floats": (lambda checkpoint: setattr(checkpoint, "rng", torch.zeros(5056)), "random"),
    "generator of zeros": (
        lambda checkpoint: setattr(checkpoint, "rng", torch.zeros(5056, dtype=torch.uint8)),
        "random",
    ),
    "generator past its end": (lambda checkpoint: setattr(checkpoint, "rng", generator_state(624, 624)), "random"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path, two_epochs, damage):
    checkpoint = copied(two_epochs, tmp_path)
    change, message = DAMAGES[damage]
    change(checkpoint)
    checkpoint.save(tmp_path / "checkpoint.safetensors")
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = BoundAdam(model, CONFIG.learning_rate)
    with pytest.raises(CheckpointError, match=message) as error:
        TrainingFolder(tmp_path, SETTINGS).restore(model, optimizer, Schedule(model, CONFIG, len(DATA[0])))
    assert str(tmp_path) in str(error.value)
    assert isinstance(error.value, FormatError)
    assert not optimizer.state
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_states_of_the_generator_that_occur_are_accepted(tmp_path, two_epochs):
    for draws in (0, 1, 2, 623, 624, 625, 1248, 5000):
        checkpoint = copied(two_epochs, tmp_path)
        generator = torch.Generator().manual_seed(3)
        torch.rand(draws, generator=generator)
        checkpoint.rng = generator.get_state()
        checkpoint.save(tmp_path / "checkpoint.safetensors")
        model = small_model()
        TrainingFolder(tmp_path, SETTINGS).restore(
            model, BoundAdam(model, CONFIG.learning_rate), Schedule(model, CONFIG, len(DATA[0]))
        )


@pytest.mark.parametrize(
    "description",
    [
        "[" * 100_000,
        '{"format": ' + "[" * 100_000,
        "null",
        "[]",
        "",
        '{"format": true}',
        '{"format": 2}',
        '{"format": 3}',
        '{"format": 2, "layers": [], "buffers": [], "progress": {}}',
        '{"format": 2, "layers": {}, "buffers": {}, "progress": {}}',
        '{"format": 2, "layers": {}, "buffers": [1], "progress": {}}',
        '{"format": 2, "layers": {}, "buffers": [], "progress": []}',
        '{"format": 2, "layers": {"a": 3}, "buffers": [], "progress": {}}',
        '{"format": 2, "layers": {"a": {"type": "x", "threshold": 3.0, "of": "a"}}, "buffers": [], "progress": {}}',
        '{"format": ' + "9" * 10_000 + "}",
    ],
    ids=lambda text: text[:60],
)
def test_a_description_that_is_none_is_refused(tmp_path, description):
    write_tensors(tmp_path / "c", {"model.weight": torch.zeros(2, 3)}, {"sparsevd": description})
    for read in (Checkpoint.load, lambda path: Run(path).summary(), lambda path: load_weights(nn.Linear(3, 2), path)):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read(tmp_path / "c")


def test_a_run_whose_data_has_become_smaller_is_not_resumed(tmp_path, two_epochs):
    checkpoint = copied(two_epochs, tmp_path)
    checkpoint.progress["state"].update(batch=5, seen=500)
    checkpoint.rng = torch.get_rng_state()
    checkpoint.save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="after batch 5, but an epoch of train has only 1"):
        sparsevd.fit(small_model(), DATA, DATA, CONFIG, run_dir=tmp_path, resume=True, progress=False)


def test_weights_of_another_kind_are_refused_and_of_another_precision_taken(tmp_path):
    write_tensors(tmp_path / "half", {"weight": torch.ones(2, 3).half(), "bias": torch.ones(2).double()})
    model = nn.Linear(3, 2)
    load_weights(model, tmp_path / "half")
    assert model.weight.dtype is torch.float32
    assert (model.weight == 1).all()
    write_tensors(tmp_path / "wrong", {"weight": torch.zeros(2, 3, dtype=torch.complex64), "bias": torch.ones(2)})
    with pytest.raises(CheckpointError, match="of another type: weight torch.complex64 for torch.float32"):
        load_weights(model, tmp_path / "wrong")
    write_tensors(tmp_path / "eight", {"weight": torch.zeros(2, 3).to(torch.float8_e5m2)})
    with pytest.raises(CheckpointError, match="torch.float8_e5m2, which is not supported"):
        Run(tmp_path / "eight").summary()


# The numbers of an epoch that a format and those after it have, and those before it lack.
LATER = {4: ("train_r2", "val_r2", "val_perplexity")}
LATER[3] = ("val_metric", *LATER[4])


def as_format(folder, version):
    """What an earlier format wrote for the same run."""
    checkpoint = Checkpoint.load(folder / "checkpoint.safetensors")
    model = small_model()
    schedule = Schedule(model, CONFIG, len(DATA[0]))
    state, _ = TrainingFolder(folder, SETTINGS).restore(model, BoundAdam(model, CONFIG.learning_rate), schedule)
    progress = dict(checkpoint.progress)
    progress["settings"] = {k: v for k, v in progress["settings"].items() if k not in ("teacher", "likelihood")}
    described = {"layers": {"": {"type": "SparseLinear", "threshold": 3.0, "of": ""}}}
    if version == 3:
        described = {"posteriors": checkpoint.posteriors, "aliases": checkpoint.aliases}
    tensors = {f"model.{key}": value for key, value in checkpoint.model.items()}
    tensors |= {f"optimizer.{key}": value for key, value in checkpoint.optimizer.items()}
    if "weight" in checkpoint.schedule:
        counter = "optimizer.log_sigma2/epochs_above" if version < 3 else "schedule.weight"
        tensors[counter] = checkpoint.schedule["weight"]
    if version == 1:
        progress = {"settings": progress["settings"], "state": dict(progress["state"])}
        entries = [asdict(metrics) for metrics in state.history]
        progress["state"]["history"] = [{k: v for k, v in entry.items() if k not in LATER[3]} for entry in entries]
    else:
        columns = len(checkpoint.history["numbers"][0]) - len(LATER[version + 1])
        parts = {name: part if name == "alive" else part[:, :columns] for name, part in checkpoint.history.items()}
        tensors |= {f"history.{name}": part for name, part in parts.items()}
    about = {"format": version, **described, "buffers": checkpoint.buffers, "progress": progress}
    write_tensors(folder / "checkpoint.safetensors", tensors, {"sparsevd": json.dumps(about)})


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_runs_of_all_formats_go_on_to_the_same_bits(tmp_path, two_epochs, version):
    unbroken = small_model()
    history = sparsevd.fit(unbroken, DATA, DATA, CONFIG, run_dir=tmp_path / "unbroken", progress=False)
    copied(two_epochs, tmp_path)
    if version < 4:
        as_format(tmp_path, version)
    model = small_model()
    resumed = sparsevd.fit(model, DATA, DATA, CONFIG, run_dir=tmp_path, resume=True, progress=False)
    assert all(torch.equal(unbroken.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert [replace(m, seconds=0.0) for m in resumed] == [replace(m, seconds=0.0) for m in history]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [asdict(metrics) for metrics in resumed]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: None,
        lambda lines: b"",
        lambda lines: lines[0],
        lambda lines: lines[0] + lines[1][:20],
        lambda lines: lines[0] + lines[1] + lines[1][:20],
        lambda lines: lines[0][:-5] + b"9999}\n" + lines[1],
        lambda lines: lines[1] + lines[0],
        lambda lines: b"\xff" * 10_000,
    ],
    ids=["gone", "empty", "a line less", "torn", "too long", "changed", "swapped", "garbage"],
)
def test_metrics_are_put_right_from_the_checkpoint(tmp_path, two_epochs, damage):
    copied(two_epochs, tmp_path)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    damaged = damage(whole.splitlines(keepends=True))
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    model = small_model()
    TrainingFolder(tmp_path, SETTINGS).restore(
        model, BoundAdam(model, CONFIG.learning_rate), Schedule(model, CONFIG, len(DATA[0]))
    )
    assert path.read_bytes() == whole


def test_metrics_are_not_written_through_a_link(tmp_path, two_epochs):
    copied(two_epochs, tmp_path)
    (tmp_path / "target").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "target")
    before = (tmp_path / "target").read_bytes()
    sparsevd.fit(small_model(), DATA, DATA, CONFIG, run_dir=tmp_path, resume=True, progress=False)
    assert (tmp_path / "target").read_bytes() == before
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_long_history_is_resumed_and_saved_in_under_a_second(tmp_path, two_epochs):
    """100,000 epochs, as a run leaves them."""
    checkpoint = copied(two_epochs, tmp_path)
    epochs = 100_000
    model = small_model()
    state, _ = TrainingFolder(tmp_path, SETTINGS).restore(
        model, BoundAdam(model, CONFIG.learning_rate), Schedule(model, CONFIG, len(DATA[0]))
    )
    rows = {name: part[:1].repeat(epochs, *[1] * (part.ndim - 1)) for name, part in state.history.tensors().items()}
    rows["numbers"][:, 0] = torch.arange(1, epochs + 1)
    history = History(rows["numbers"], rows["known"], rows["alive"], state.history.layers)
    first = state.history[0].line()
    lines = [first.replace(b'"epoch": 1,', b'"epoch": %d,' % epoch) for epoch in range(1, epochs + 1)]
    text = b"".join(lines)
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert lines[-1] == history[-1].line()
    checkpoint.history = history.tensors()
    checkpoint.progress["state"]["epoch"] = epochs
    checkpoint.progress["settings"]["epochs"] = epochs + 2
    checkpoint.progress["metrics"] = [epochs, len(text), zlib.crc32(text)]
    checkpoint.save(tmp_path / "checkpoint.safetensors")

    optimizer = BoundAdam(model, CONFIG.learning_rate)
    folder = TrainingFolder(tmp_path, SETTINGS | {"epochs": epochs + 2})
    begun = time.process_time()
    state, _ = folder.restore(model, optimizer, Schedule(model, CONFIG, len(DATA[0])))
    assert time.process_time() - begun < 1
    begun = time.process_time()
    more = state.history.add(replace(history[-1], epoch=epochs + 1))
    folder.save(model, optimizer, State(epoch=epochs + 1, history=more))
    assert time.process_time() - begun < 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == text + more[-1].line()


def test_a_history_is_a_sequence_of_epochs():
    plain = EpochMetrics(1, 0.1, 1.0, 0.5, None, None, None, None, None, float("inf"), 2.0, 1.5)
    sparse = replace(plain, kl=3.0, alive={"a": [1, 2], "b": [3, 4]}, dropped=7)
    for metrics in (plain, sparse):
        history = History.empty().add(metrics).add(replace(metrics, epoch=2))
        assert list(history) == [metrics, replace(metrics, epoch=2)]
        assert history[-1].epoch == history[1].epoch == 2
        assert history[:1] == [metrics]
        with pytest.raises(IndexError):
            history[2]
    assert not History.empty()


@pytest.mark.parametrize(
    "damage",
    [
        {"means": None},
        {"means": torch.zeros(2, 1)},
        {"means": torch.full((3, 1), torch.nan)},
        {"centre": torch.zeros(1, 1)},
        {"size": torch.zeros(1)},
        {"steps": torch.tensor([0, 100])},
        {"steps": torch.tensor([1.0, 100.0])},
        {"other": torch.zeros(1)},
    ],
)
def test_what_a_likelihood_has_learned_is_checked(tmp_path, damage):
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    model = sparsevd.sparsify(torch.nn.Linear(3, 1))
    sparsevd.fit(model, (x, y), None, CONFIG, loss=sparsevd.Gaussian(), run_dir=tmp_path, progress=False)
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.safetensors")
    checkpoint.likelihood = {k: v for k, v in (checkpoint.likelihood | damage).items() if v is not None}
    checkpoint.save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="what its likelihood has learned does not fit"):
        sparsevd.fit(
            model, (x, y), None, CONFIG, loss=sparsevd.Gaussian(), run_dir=tmp_path, resume=True, progress=False
        )
