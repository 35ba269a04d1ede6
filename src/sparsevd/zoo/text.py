"""Texts as tensors: tables of labelled texts, a dictionary of pronunciations, and words as numbers.

Of every row of tokens, 0 is padding, at the end.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sparsevd.errors import ArgumentError, DataError

WORDS = 20_000  # of a vocabulary
LENGTH = 200  # tokens that are read of a text
PADDING, UNKNOWN = 0, 1
_HEADER = ["Category\tText", "d\tstring", "class\t"]  # the first lines of a table: names, types, what is the label
_TEST_EVERY = 10  # of the words of the dictionary

Pair = tuple[Tensor, Tensor]


class Texts(NamedTuple):
    """Texts and the number of the class of each."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Corpus:
    """Labelled texts for training and for test, and the names of the classes."""

    train: Texts
    test: Texts
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Words by their number: the first one has number 2, since 0 is padding and 1 a word that is not here."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str], most: int = WORDS) -> "Vocabulary":
        """The most frequent words; of equally frequent ones, the first in the alphabet."""
        counted = Counter(word for text in texts for word in text.split())
        return cls(tuple(sorted(counted, key=lambda word: (-counted[word], word))[:most]))

    def __len__(self) -> int:
        """How many different tokens there are: the rows of an embedding."""
        return len(self.words) + 2

    def tokens(self, texts: Sequence[str], length: int = LENGTH) -> Tensor:
        """A row of so many numbers for each text: its first words, then padding."""
        if length < 1:
            raise ArgumentError(f"length={length} must be a positive number of tokens")
        numbers = {word: number for number, word in enumerate(self.words, start=2)}
        return _padded([[numbers.get(word, UNKNOWN) for word in text.split()[:length]] for text in texts], length)


def parse_corpus(files: Mapping[str, bytes]) -> Corpus:
    """From two tables "…-train.tab" and "…-test.tab" of rows "class⇥text", after a header of three lines."""
    tables = {name.removesuffix(".tab").rpartition("-")[2]: _rows(name, content) for name, content in files.items()}
    names = tuple(sorted({label for label, _ in tables["train"]}))
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted({label for label, _ in tables["test"]} - set(names))
    if unknown:
        raise DataError(f"the test texts have classes that the training texts lack: {', '.join(unknown)[:200]}")
    train, test = (
        Texts([text for _, text in rows], [numbers[label] for label, _ in rows])
        for rows in (tables["train"], tables["test"])
    )
    return Corpus(train, test, names)


def parse_texts(files: Mapping[str, bytes]) -> tuple[Pair, Pair]:
    """Tokens of the training texts' most frequent words, and classes."""
    corpus = parse_corpus(files)
    vocabulary = Vocabulary.of(corpus.train.texts)
    train, test = (
        (vocabulary.tokens(each.texts), torch.tensor(each.labels, dtype=torch.int64))
        for each in (corpus.train, corpus.test)
    )
    return train, test


def _rows(name: str, content: bytes) -> list[tuple[str, str]]:
    lines = _text(name, content).split("\n")
    if lines[:3] != _HEADER:
        raise DataError(f"{name} is not a table of labelled texts: it begins with {lines[0][:40]!r}")
    rows = []
    for number, line in enumerate(lines[3:], start=4):
        label, *rest = line.split("\t")
        if not line.strip():
            continue
        if len(rest) != 1 or not label:
            raise DataError(f"line {number} of {name} is not a class, a tab and a text: {line[:40]!r}")
        rows.append((label, rest[0]))
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def pronunciations(files: Mapping[str, bytes]) -> dict[str, list[str]]:
    """The first pronunciation of each word, in the order of the dictionary, without the digits of stress.

    Lines are "word PH ON EME", further pronunciations "word(2) …", and a "#" begins a comment.
    """
    [(name, content)] = files.items()
    spoken: dict[str, list[str]] = {}
    for number, line in enumerate(_text(name, content).splitlines(), start=1):
        word, *phonemes = line.partition("#")[0].split()
        if not phonemes:
            raise DataError(f"line {number} of {name} is not a word and its phonemes: {line[:40]!r}")
        if not word.endswith(")"):
            spoken.setdefault(word, [phoneme.rstrip("012") for phoneme in phonemes])
    return spoken


def parse_pronunciations(files: Mapping[str, bytes]) -> tuple[Pair, Pair]:
    """Letters and phonemes of each word, both numbered from 1 in the order of the alphabet; every tenth is for test."""
    spoken = pronunciations(files)
    letters = {letter: number for number, letter in enumerate(sorted(set("".join(spoken))), start=1)}
    phonemes = {each: number for number, each in enumerate(sorted({p for ps in spoken.values() for p in ps}), start=1)}
    x = _padded([[letters[letter] for letter in word] for word in spoken])
    y = _padded([[phonemes[phoneme] for phoneme in said] for said in spoken.values()])
    test = torch.arange(len(x)) % _TEST_EVERY == 0
    return (x[~test], y[~test]), (x[test], y[test])


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not a text in UTF-8 ({error})") from error


def _padded(rows: Sequence[Sequence[int]], length: int | None = None) -> Tensor:
    tokens = torch.full((len(rows), max(map(len, rows)) if length is None else length), PADDING, dtype=torch.int64)
    counts = torch.tensor([len(row) for row in rows])
    tokens[torch.arange(tokens.shape[1]) < counts.unsqueeze(1)] = torch.tensor(list(chain.from_iterable(rows)))
    return tokens
