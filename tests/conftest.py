import os

import pytest
import torch

import networks
from sparsevd.graph import capture


def pytest_collection_modifyitems(items):
    """Tests marked as long are for `make test-all`: `make test` stays below five minutes."""
    if os.environ.get("SPARSEVD_LONG") != "1":
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="the long form: SPARSEVD_LONG=1, as in make test-all"))


@pytest.fixture(autouse=True)
def deterministic():
    """Every test starts from the same generator state."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def captured():
    """Network, example and graph by name; torch.export takes its time, so once for all tests."""
    result = {}
    for name, make in networks.NETWORKS.items():
        torch.manual_seed(0)
        model, example = make()
        result[name] = (model.eval(), example, capture(model, example))
    return result


@pytest.fixture
def one_thread():
    """For many small tensors: on a busy machine the threads of each step wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_machine_state(monkeypatch, tmp_path):
    """No test reads or writes the user's cache or data."""
    monkeypatch.delenv("SPARSEVD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
