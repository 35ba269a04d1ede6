"""Sparse VD on texts: an LSTM on 20 newsgroups and a Transformer's encoder on R52, beside their dense networks.

    python experiments/text.py trials lstm          # settings, on a sixth of the training texts held out
    python experiments/text.py run lstm --seed 0    # dense, then Sparse VD from it, on all training texts
    python experiments/text.py control encoder      # its matrices zeroed, and the head or all the rest trained again
    python experiments/text.py vocabulary lstm      # what the dense network errs with fewer of its words
    python experiments/text.py words lstm           # TF-IDF with logistic regression (scikit-learn)
    python experiments/text.py table

A trial of the dense network is a rate of dropout and a number of epochs, after which training stops; one of Sparse VD
is the weight β of the KL and a number of epochs, from the dense network that was best on the held-out texts. There are
as many of one as of the other. Products are in bfloat16 (autocast), which halves the time of a step on CPUs that have
it. Each unit is a record in results/text.json, and one that is there is not done again; `runs/text` keeps checkpoints,
from which a stopped unit goes on.
"""

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, spread
from safetensors.torch import load_file, save_file
from settings import best, picked, untried
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import sparsevd
from sparsevd.training.data import split
from sparsevd.zoo import datasets, text
from sparsevd.zoo.text_models import TextEncoder, TextLSTM

RUNS = Path("runs/text")
HELD_OUT = 6  # one of so many training texts
SPLIT_SEED = 0
THRESHOLDS = (3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0)  # that a record has the error and the ratio of
TRIALS = "trials"  # where their checkpoints lie
VOCABULARIES = (2_000, 4_000, 6_000, 8_000, 10_000, 14_000)
HEAD_ONLY = "control, head"  # of the two controls the weaker one


@dataclass(frozen=True)
class Dense:
    """A setting of the dense network."""

    dropout: float
    epochs: int
    rate: float = 4e-3
    words: float = 0.0  # dropout of whole words (LSTM)

    def name(self) -> str:
        words = f"-words{self.words:g}" if self.words else ""
        return f"dense-dropout{self.dropout:g}-epochs{self.epochs}-rate{self.rate:g}{words}"

    def network(self, task: "Task", classes: int) -> nn.Module:
        return task.network(classes, dropout=self.dropout, **({"word_dropout": self.words} if self.words else {}))


@dataclass(frozen=True)
class Sparse:
    """A setting of Sparse VD; the first noise is what `fit` chooses, and so is the rate unless given.

    With a share of weights to remove (`Budget(sparsity=…)`) `fit` chooses β too.
    """

    beta: float | None
    epochs: int
    warm_up_end: float = 0.4
    rate: float | None = None
    keep_dropout: bool = False  # of the dense network, beside the noise
    share: float | None = None
    noise: bool | None = None  # False: weights go by their size, as gradual magnitude pruning has it
    threshold: float = 3.0  # of log α
    polish: int = 0  # epochs of plain fine-tuning, with that dropout, of what pruning has left ...
    polish_rate: float = 1e-3  # ... at this rate ...
    polish_taught: float = 0.0  # ... with this weight of the dense network as a teacher ...
    polish_own: bool = False  # ... and the dropout that was beside the noise instead of the dense network's
    taught: float = 0.0  # the weight of the dense network as a teacher ...
    temperature: float = 3.0  # ... and its temperature
    thinned: bool = False  # of each text a part of its words is read, the teacher reads the same: it is less sure then
    held: float | None = None  # part of the run before the rate falls; None: what `fit` chooses
    fresh: bool = False  # from random weights instead of the dense network's ...
    dropout: float | None = None  # ... and with another dropout ...
    words: float | None = None  # ... of words, too
    # A second run, without noise: from what the first has left to this share of zeros, in so many epochs, with that
    # dropout and that teacher.
    cut_to: float | None = None
    cut_epochs: int = 0

    def name(self) -> str:
        """Of the first run."""
        name = f"sparse-share{self.share:g}" if self.share else f"sparse-beta{self.beta:g}"
        name += "-fresh" if self.fresh else ""
        name += {None: "", False: "-without-noise", True: "-with-noise"}[self.noise]
        name += f"-epochs{self.epochs}-warm-up{self.warm_up_end:g}"
        name += f"-taught{self.taught:g}-temperature{self.temperature:g}" if self.taught_first else ""
        name += "-thinned" if self.thinned else ""
        name += f"-held{self.held:g}" if self.held is not None else ""
        name += f"-rate{self.rate:g}" if self.rate else ""
        name += f"-words{self.words:g}" if self.words is not None else ""
        return name + (f"-dropout{'' if self.dropout is None else self.dropout}" if self.keep_dropout else "")

    @property
    def taught_first(self) -> bool:
        return bool(self.taught) and not self.cut_to

    @property
    def copies(self) -> int:
        """How often the training texts are there, so that β is one of so many: a teacher's term cannot be divided by β
        as a loss can, but N can be larger."""
        return round(1 / self.beta) if self.taught_first and self.beta and not self.thinned else 1


@dataclass(frozen=True)
class Task:
    data: str
    length: int  # tokens read of a text
    network: Callable[..., nn.Module]
    dense: tuple[Dense, ...]
    sparse: tuple[Sparse, ...]
    windows: int = 1  # at most so many examples of each training text, one after the other, of that length each


# From random weights, by a teacher who reads the same parts of the texts: each word is seen among few others.
TAUGHT_IN_PART = Sparse(
    0.3,
    60,
    rate=1e-2,
    fresh=True,
    keep_dropout=True,
    dropout=0.0,
    words=0.0,
    taught=0.9,
    temperature=2.0,
    thinned=True,
)

TASKS = {
    "lstm": Task(
        "20newsgroups",
        64,
        TextLSTM,
        (
            Dense(0.5, 6),
            Dense(0.3, 6),
            Dense(0.5, 10),
            Dense(0.5, 20),
            Dense(0.3, 10),
            Dense(0.5, 10, 2e-3),
            Dense(0.5, 20, 2e-3),
            Dense(0.6, 15),
            Dense(0.3, 10, words=0.3),
            Dense(0.3, 20, words=0.3),
            Dense(0.3, 20, words=0.5),
        ),
        (
            Sparse(0.1, 30, keep_dropout=True, polish=3),
            Sparse(0.3, 30, keep_dropout=True, polish=3),
            Sparse(None, 30, keep_dropout=True, share=1 - 1 / 320),
            Sparse(None, 30, keep_dropout=True, share=1 - 1 / 300, noise=False),
            Sparse(None, 30, share=1 - 1 / 300, noise=False),
            Sparse(None, 30, keep_dropout=True, share=1 - 1 / 300, noise=False, taught=0.9),
            Sparse(0.1, 30, keep_dropout=True, taught=0.9, cut_to=1 - 1 / 300, cut_epochs=20),
            Sparse(None, 40, keep_dropout=True, share=1 - 1 / 300, taught=0.9, held=0.75),
            # 30 epochs are 2,800 steps, a tenth of what a LeNet has.
            Sparse(None, 100, keep_dropout=True, share=1 - 1 / 300, noise=False, taught=0.9),
            Sparse(None, 100, keep_dropout=True, share=1 - 1 / 300, noise=True, taught=0.9),
            Sparse(0.3, 60, fresh=True, polish=3),
            Sparse(0.3, 60, fresh=True, keep_dropout=True, polish=3),
            Sparse(1.0, 60, fresh=True, polish=3),
            Sparse(0.1, 60, fresh=True, keep_dropout=True, polish=3),
            Sparse(1.0, 60, fresh=True, keep_dropout=True, taught=0.9, polish=3),
            Sparse(0.1, 60, fresh=True, keep_dropout=True, dropout=0.5, polish=3),
            Sparse(0.1, 60, keep_dropout=True, polish=3),
            Sparse(0.1, 120, fresh=True, keep_dropout=True, polish=3),
            Sparse(0.05, 60, fresh=True, keep_dropout=True, polish=3),
            Sparse(0.1, 60, fresh=True, keep_dropout=True, dropout=0.1, polish=3),
            Sparse(0.1, 60, fresh=True, keep_dropout=True, dropout=0.3, words=0.3, polish=3),
            Sparse(0.05, 60, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=3),
            Sparse(0.1, 120, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=3),
            Sparse(0.2, 60, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, taught=0.9, polish=3),
            Sparse(0.05, 240, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=3),
            Sparse(0.1, 120, fresh=True, keep_dropout=True, dropout=0.0, words=0.5, polish=3),
            Sparse(0.05, 240, fresh=True, keep_dropout=True, dropout=0.0, words=0.5, polish=3),
            Sparse(0.1, 60, rate=1e-2, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=3),
            Sparse(0.05, 60, rate=1e-2, fresh=True, keep_dropout=True, dropout=0.0, words=0.5, polish=3),
            # What a few words explain teaches no others: with more of them left out, more have to be known.
            Sparse(0.1, 60, rate=1e-2, fresh=True, keep_dropout=True, dropout=0.0, words=0.5),
            Sparse(0.1, 60, rate=1e-2, fresh=True, keep_dropout=True, dropout=0.0, words=0.7),
            Sparse(0.1, 60, rate=2e-2, fresh=True, keep_dropout=True, dropout=0.0, words=0.6),
            TAUGHT_IN_PART,
            replace(TAUGHT_IN_PART, beta=0.15, epochs=80),
            replace(TAUGHT_IN_PART, beta=0.1, epochs=80, temperature=1.0),
        ),
    ),
    # The same, but each training text is up to four examples: its first 64 words, the next 64, ...
    "lstm-windows": Task(
        "20newsgroups",
        64,
        TextLSTM,
        (
            Dense(0.3, 8, words=0.3),
            Dense(0.5, 8, words=0.3),
            Dense(0.3, 12, words=0.5),
        ),
        (
            Sparse(0.1, 45, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=2),
            Sparse(0.1, 45, fresh=True, keep_dropout=True, dropout=0.0, words=0.5, polish=2),
            Sparse(0.05, 90, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=2),
            replace(TAUGHT_IN_PART, epochs=40, rate=None),
            Sparse(0.2, 45, fresh=True, keep_dropout=True, dropout=0.0, words=0.3, polish=2),
            Sparse(0.2, 45, fresh=True, keep_dropout=True, dropout=0.0, words=0.5, polish=2),
            # As for whole texts; the teacher also says of a window how little it tells of the class.
            replace(TAUGHT_IN_PART, epochs=45),
            replace(TAUGHT_IN_PART, epochs=45, polish=3, polish_own=True, polish_taught=0.9),
        ),
        windows=4,
    ),
    "encoder": Task(
        "r52",
        64,
        TextEncoder,
        (Dense(0.1, 8, 1e-3), Dense(0.3, 8, 1e-3), Dense(0.3, 16, 1e-3), Dense(0.3, 16, 5e-4)),
        (  # an epoch is 55 steps
            Sparse(0.3, 40),
            Sparse(1.0, 40),
            Sparse(None, 40, share=1 - 1 / 32, taught=0.9),
            Sparse(None, 40, keep_dropout=True, share=1 - 1 / 32, noise=False, taught=0.9),
            Sparse(0.1, 60, fresh=True, keep_dropout=True, polish=3),
            Sparse(0.3, 60, fresh=True, keep_dropout=True, polish=3),
            Sparse(0.3, 24, polish=2),
            Sparse(0.1, 24, polish=2),
            # As the LSTM: taught in parts, from random weights and from the dense network's.
            replace(TAUGHT_IN_PART, beta=0.1, epochs=60, rate=2e-3),
            Sparse(0.1, 40, taught=0.9, temperature=2.0, thinned=True),
        ),
    ),
}

Pair = tuple[Tensor, Tensor]


class Thinned(IterableDataset[Pair]):
    """Batches of texts of which a part of the words is left, in their order: a tenth to all, drawn anew each time."""

    def __init__(self, texts: Pair, batch_size: int):
        self.tokens, self.classes = texts
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.classes) / self.batch_size)

    def __iter__(self) -> Iterator[Pair]:
        for batch in torch.randperm(len(self.classes)).split(self.batch_size):
            tokens = self.tokens[batch]
            share = 0.1 + 0.9 * torch.rand(len(batch), 1)
            left = (torch.rand(tokens.shape) < share) & (tokens != text.PADDING)
            first = (~left).to(torch.uint8).argsort(dim=1, stable=True)  # what is left moves to the front
            yield tokens.where(left, text.PADDING).gather(1, first), self.classes[batch]


def in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()  # type: ignore[no-any-return]


def load(task: Task, held_out: int | None = None) -> tuple[Pair, Pair, int]:
    """Tokens and classes to train on and to measure on, and how many classes there are.

    What is measured are the test texts, or one of so many training texts, on which nothing trains.
    """
    corpus = datasets.load_corpus(task.data)
    vocabulary = text.Vocabulary.of(corpus.train.texts)
    train, measured = (
        (vocabulary.tokens(part.texts, task.length * task.windows), torch.tensor(part.labels))
        for part in (corpus.train, corpus.test)
    )
    if held_out:
        train, measured = split(train, len(train[1]) // held_out, SPLIT_SEED)
    return in_windows(train, task), (measured[0][:, : task.length].contiguous(), measured[1]), len(corpus.classes)


def in_windows(texts: Pair, task: Task) -> Pair:
    """Each text as its windows: the first, and others that are no shorter than a quarter of the length."""
    tokens = texts[0].view(-1, task.length)
    first = torch.arange(len(tokens)) % task.windows == 0
    long_enough = first | ((tokens != text.PADDING).sum(1) >= task.length / 4)
    return tokens[long_enough], texts[1].repeat_interleave(task.windows)[long_enough]


def seen_in_training(place: str, measured: Pair) -> Pair | None:
    """Held-out texts may be watched in a trial; test texts are not shown to anything that trains."""
    return measured if place.startswith(TRIALS) else None


def trained_dense(name: str, setting: Dense, train: Pair, measured: Pair, seed: int, classes: int, place: str) -> Any:
    """The dense network, and its error."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model = setting.network(task, classes)
    kept = RUNS / name / place / setting.name() / "dense.safetensors"
    if kept.exists():
        model.load_state_dict(load_file(kept))
    else:
        config = sparsevd.FitConfig(epochs=setting.epochs, learning_rate=setting.rate, seed=seed)
        watched = seen_in_training(place, measured)
        sparsevd.fit_dense(model, train, watched, config, forward=in_bfloat16, run_dir=kept.parent, resume=True)
        save_file(model.state_dict(), kept)
    return model.eval(), sparsevd.evaluate(model, measured, forward=in_bfloat16).error


def trained_sparse(
    name: str, setting: Sparse, dense: nn.Module, train: Pair, measured: Pair, seed: int, place: str
) -> dict[str, Any]:
    """Sparse VD from a dense network: what a record says of it."""
    begun_with = fresh(setting, TASKS[name], dense, seed) if setting.fresh else dense
    model = sparsevd.sparsify(copy.deepcopy(begun_with), keep_dropout=setting.keep_dropout)
    divided_by = setting.beta if setting.beta and not setting.taught_first else 1.0
    config = sparsevd.FitConfig(
        epochs=setting.epochs // setting.copies,
        warm_up_end=setting.warm_up_end,
        learning_rate=setting.rate,
        noise=setting.noise,
        held=setting.held,
        seed=seed,
    )
    examples, n = (train[0].repeat(setting.copies, 1), train[1].repeat(setting.copies)), None
    if setting.thinned:  # a loader makes its own batches, and so many examples as N says
        thinned = Thinned(train, config.batch_size)
        examples, n = DataLoader(thinned, batch_size=None), round(len(train[1]) / (setting.beta or 1.0))
        divided_by = 1.0
    history = sparsevd.fit(
        model,
        examples,
        seen_in_training(place, measured),
        config,
        n_train=n,
        loss=lambda output, target: F.cross_entropy(output, target) / divided_by,
        budget=sparsevd.Budget(sparsity=setting.share) if setting.share else None,
        forward=in_bfloat16,
        teacher=copy.deepcopy(dense) if setting.taught_first else None,
        teacher_weight=setting.taught,
        temperature=setting.temperature,
        run_dir=RUNS / name / place / setting.name(),
        resume=True,
    )
    if setting.cut_to:
        model = cut_further(setting, sparsevd.prune(model), dense, train, seed)
    pruned = sparsevd.prune(model, threshold=setting.threshold)
    found = sparsevd.summary(pruned)
    before = sparsevd.evaluate(pruned, measured, forward=in_bfloat16).error
    if setting.polish:
        pruned = polished(pruned, setting, TASKS[name], dense, train, seed)
    layers = [{"name": layer.name, "weights": layer.weights, "kept": layer.kept} for layer in found.layers]
    others = [layer for layer in layers if "embedding" not in layer["name"] and "places" not in layer["name"]]
    return {
        "error": sparsevd.evaluate(pruned, measured, forward=in_bfloat16).error,
        "error_before_polish": before,
        "error_float32": sparsevd.evaluate(pruned, measured).error,
        "ratio": found.ratio,
        "ratio_without_embedding": sum(x["weights"] for x in others) / max(1, sum(x["kept"] for x in others)),
        "words_left": int(pruned.embedding.weight.any(1).sum()),
        "per_layer": layers,
        "thresholds": trade_off(model, measured),
        "seconds": round(sum(epoch.seconds for epoch in history), 1),
    }


def trade_off(model: nn.Module, measured: Pair) -> list[dict[str, float]]:
    """Error, without polishing, and ratio, by where log α is cut."""
    found = []
    for threshold in THRESHOLDS:
        pruned = sparsevd.prune(model, threshold=threshold)
        error = sparsevd.evaluate(pruned, measured, forward=in_bfloat16).error
        found.append({"threshold": threshold, "error": error, "ratio": sparsevd.summary(pruned).ratio})
    return found


def fresh(setting: Sparse, task: Task, dense: nn.Module, seed: int) -> nn.Module:
    """Random weights, and the dense network's dropout unless the setting has another."""
    torch.manual_seed(seed)
    dropout = dense.dropout.p if setting.dropout is None else setting.dropout
    words = getattr(dense, "word_dropout", nn.Dropout1d(0.0)).p if setting.words is None else setting.words
    return Dense(dropout, epochs=0, words=words).network(task, dense.head.out_features)


def cut_further(setting: Sparse, pruned: nn.Module, dense: nn.Module, train: Pair, seed: int) -> nn.Module:
    """What Sparse VD has left, cut by size to more zeros, taught by the dense network."""
    network = copy.deepcopy(dense)
    network.load_state_dict(pruned.state_dict())
    model = sparsevd.sparsify(network, keep_dropout=setting.keep_dropout)
    sparsevd.fit(
        model,
        train,
        None,
        sparsevd.FitConfig(epochs=setting.cut_epochs, noise=False, seed=seed),
        budget=sparsevd.Budget(sparsity=setting.cut_to),
        forward=in_bfloat16,
        teacher=copy.deepcopy(dense) if setting.taught else None,
        teacher_weight=setting.taught,
    )
    return model


def polished(pruned: nn.Module, setting: Sparse, task: Task, dense: nn.Module, train: Pair, seed: int) -> nn.Module:
    """The pruned network in the shape of a dense one, so that its dropout acts, fine-tuned."""
    network = fresh(setting, task, dense, seed) if setting.polish_own else copy.deepcopy(dense)
    network.load_state_dict(pruned.state_dict())
    config = sparsevd.FitConfig(learning_rate=setting.polish_rate, seed=seed)
    sparsevd.polish(
        network,
        DataLoader(Thinned(train, config.batch_size), batch_size=None) if setting.thinned else train,
        epochs=setting.polish,
        config=config,
        forward=in_bfloat16,
        teacher=copy.deepcopy(dense) if setting.polish_taught else None,
        teacher_weight=setting.polish_taught,
        temperature=setting.temperature,
        n_train=len(train[1]),
    )
    return network.eval()


def trials(name: str, method: str, chosen: list[int], records: Records) -> None:
    """Settings of a method, by their numbers, measured on held-out training texts: first the dense network's."""
    task = TASKS[name]
    train, held_out, classes = load(task, HELD_OUT)
    dense_settings = picked(task.dense, chosen) if method != "sparse" else []
    for setting in untried(dense_settings, records, task=name, method="dense"):
        _, error = trained_dense(name, setting, train, held_out, 0, classes, TRIALS)
        records.add(task=name, kind="trial", method="dense", setting=asdict(setting), seed=0, error=error)
    if method == "dense":
        return
    begun_with = Dense(**best(records, "dense", task=name))
    dense, _ = trained_dense(name, begun_with, train, held_out, 0, classes, TRIALS)
    place = f"{TRIALS}/{begun_with.name()}"  # whose dropout a setting has that names none of its own
    for setting in untried(picked(task.sparse, chosen), records, task=name, method="sparse"):
        result = trained_sparse(name, setting, dense, train, held_out, 0, place)
        result["dense"] = asdict(begun_with)
        records.add(task=name, kind="trial", method="sparse", setting=asdict(setting), seed=0, **result)


def run(name: str, seed: int, method: str, records: Records) -> None:
    """The chosen settings on all training texts, measured on the test texts; the dense network comes first."""
    task = TASKS[name]
    train, test, classes = load(task)
    place = f"seed{seed}"
    setting = Dense(**best(records, "dense", task=name))
    dense, error = trained_dense(name, setting, train, test, seed, classes, place)
    if not records.find(task=name, kind="run", method="dense", seed=seed):
        records.add(task=name, kind="run", method="dense", setting=asdict(setting), seed=seed, error=error)
    if method != "dense" and not records.find(task=name, kind="run", method="sparse", seed=seed):
        sparse = Sparse(**best(records, "sparse", task=name))
        result = trained_sparse(name, sparse, dense, train, test, seed, place)
        records.add(task=name, kind="run", method="sparse", setting=asdict(sparse), seed=seed, **result)


def control(name: str, seed: int, records: Records) -> None:
    """The dense network with the encoder's matrices zeroed, and its head trained again, or all but these: what the
    encoder is for."""
    task = TASKS[name]
    train, test, classes = load(task)
    for method in (HEAD_ONLY, "control"):
        if records.find(task=name, kind="run", method=method, seed=seed):
            continue
        setting = Dense(**best(records, "dense", task=name))
        model, _ = trained_dense(name, setting, train, test, seed, classes, f"seed{seed}")
        model.requires_grad_(method != HEAD_ONLY)
        model.head.requires_grad_(True)
        for parameter in model.encoder.parameters():
            if parameter.dim() > 1:
                parameter.requires_grad_(False).zero_()  # else `fit_dense` would let a matrix of only zeros learn
        config = sparsevd.FitConfig(epochs=setting.epochs, learning_rate=setting.rate, seed=seed)
        sparsevd.fit_dense(model, train, None, config, forward=in_bfloat16)
        error = sparsevd.evaluate(model.eval(), test, forward=in_bfloat16).error
        records.add(task=name, kind="run", method=method, setting=asdict(setting), seed=seed, error=error)


def vocabulary(name: str, records: Records) -> None:
    """What the dense network, as it was trained, errs on held-out texts when it reads only its most frequent words."""
    train, held_out, classes = load(TASKS[name], HELD_OUT)
    setting = Dense(**best(records, "dense", task=name))
    dense, _ = trained_dense(name, setting, train, held_out, 0, classes, TRIALS)
    frequent = torch.bincount(train[0].flatten(), minlength=dense.embedding.num_embeddings).argsort(descending=True)
    for count in VOCABULARIES:
        if records.find(task=name, kind="vocabulary", words=count, setting=asdict(setting)):
            continue
        reading = copy.deepcopy(dense)
        reading.embedding.weight.data[frequent[count:]] = 0
        error = sparsevd.evaluate(reading, held_out, forward=in_bfloat16).error
        records.add(task=name, kind="vocabulary", words=count, setting=asdict(setting), seed=0, error=error)


def words(name: str, records: Records) -> None:
    """TF-IDF of all words of the texts and of those that the network reads, with logistic regression."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    task = TASKS[name]
    corpus = datasets.load_corpus(task.data)
    for length in (task.length, None):
        if records.find(task=name, kind="run", method="tf-idf", length=length):
            continue
        train, test = ([" ".join(each.split()[:length]) for each in part.texts] for part in (corpus.train, corpus.test))
        vectorizer = TfidfVectorizer(max_features=text.WORDS, sublinear_tf=True, token_pattern=r"\S+")
        x, x_test = vectorizer.fit_transform(train), vectorizer.transform(test)
        search = GridSearchCV(LogisticRegression(max_iter=300), {"C": [3.0, 30.0]}, cv=3)
        search.fit(x, corpus.train.labels)
        error = 100 * (1 - search.score(x_test, corpus.test.labels))
        records.add(
            task=name,
            kind="run",
            method="tf-idf",
            length=length,
            seed=0,
            setting=search.best_params_,
            error=error,
            weights=search.best_estimator_.coef_.size,
        )


def table(records: Records) -> str:
    lines = [
        "| task | method | test error % | fewer weights | without the embedding | words left | seeds |",
        "|---" * 7 + "|",
    ]
    for name in TASKS:
        for method in ("tf-idf", "dense", HEAD_ONLY, "control", "sparse"):
            found = records.find(task=name, kind="run", method=method)
            for length in dict.fromkeys(record.get("length") for record in found):
                same = [record for record in found if record.get("length") == length]
                cells = [spread([record["error"] for record in same])]
                for key in ("ratio", "ratio_without_embedding", "words_left"):
                    cells += [spread([record[key] for record in same]) if key in same[0] else ""]
                seeds = ", ".join(str(record["seed"]) for record in same)
                label = f"{method}, {length or 'all'} words" if method == "tf-idf" else method
                lines.append(f"| {name} | {label} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["trials", "run", "control", "vocabulary", "words", "table"])
    parser.add_argument("task", choices=TASKS, nargs="?", default="lstm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", choices=["dense", "sparse", "both"], default="both", help="of `trials` and `run`")
    parser.add_argument("--settings", type=int, nargs="+", default=[], help="trials of these numbers, from 0; else all")
    arguments = parser.parse_args()
    records = Records("text")
    if arguments.action == "table":
        print(table(records))
    elif arguments.action == "trials":
        trials(arguments.task, arguments.method, arguments.settings, records)
    elif arguments.action in ("vocabulary", "words"):
        {"vocabulary": vocabulary, "words": words}[arguments.action](arguments.task, records)
    elif arguments.action == "run":
        run(arguments.task, arguments.seed, arguments.method, records)
    else:
        control(arguments.task, arguments.seed, records)


if __name__ == "__main__":
    main()
