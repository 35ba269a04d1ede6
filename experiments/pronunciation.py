"""Sparse VD on words and how they are spoken: a GRU encoder and decoder on the CMU dictionary, beside the dense one.

    OMP_NUM_THREADS=1 python experiments/pronunciation.py trials          # settings, on a tenth of the training words
    OMP_NUM_THREADS=1 python experiments/pronunciation.py run --seed 0    # the chosen ones on all training words
    OMP_NUM_THREADS=1 python experiments/pronunciation.py cost            # seconds of a step, dense and sparse
    python experiments/pronunciation.py table

126,052 words, letter by letter, and the phonemes of their first pronunciation, without stress. A tenth of them, by a
permutation with a fixed seed, is for test; each spelling is there once, so none is in two parts. Training gives the
decoder the right phonemes before each one; the word error is that of greedy decoding, where it reads its own, and a
word with one wrong phoneme is wrong. The likelihood is that of a phoneme, so N is the number of phonemes to predict,
the end of each word among them.

A trial of the dense network is a rate of dropout and a number of epochs; one of Sparse VD, from the dense network that
was best on the held-out words, is the weight β of the KL, a number of epochs, and the weight of that network as a
teacher. There are as many of one as of the other. Training has its products in bfloat16 (autocast), which takes two
thirds of the time; what is measured is float32. Each unit is a record in results/pronunciation.json, and one that is
there is not done again; `runs/pronunciation` keeps checkpoints, from which a stopped unit goes on.
"""

import argparse
import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, spread
from settings import best, picked, untried
from stopwatch import Stopwatch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, IterableDataset

import sparsevd
from sparsevd.zoo import datasets

RUNS = Path("runs/pronunciation")
PADDING = END = 0  # after the last letter or phoneme: no input, but a class to predict
TEST = HELD_OUT = 10  # one of so many words, and then one of so many training words
SPLIT_SEED = 0
TRIALS = "trials"  # where their checkpoints lie; there held-out words are watched, test words are shown to no training
BATCH = 256  # words
THRESHOLDS = (3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0)  # of log α; a record has the error and the ratio of each
LONGEST = 40  # phonemes that greedy decoding may take; the longest word has 28

Pair = tuple[Tensor, Tensor]  # letters (words, longest) and phonemes (words, longest), padded


@dataclass(frozen=True)
class Dense:
    """A setting of the dense network."""

    dropout: float
    epochs: int
    rate: float = 4e-3

    def name(self) -> str:
        return f"dense-dropout{self.dropout:g}-epochs{self.epochs}-rate{self.rate:g}"


@dataclass(frozen=True)
class Sparse:
    """A setting of Sparse VD; rate and first noise are those that `fit` chooses."""

    beta: float
    epochs: int
    warm_up_end: float = 0.4
    taught: float = 0.0  # the weight of the dense network as a teacher ...
    temperature: float = 3.0  # ... and its temperature
    share: float | None = None  # of weights to remove: then `fit` chooses β
    noise: bool | None = None  # False: weights go by their size, as gradual magnitude pruning has it
    fresh: bool = False  # from random weights instead of the dense network's
    threshold: float = 3.0  # of log α
    polish: int = 0  # epochs of plain fine-tuning of what pruning has left ...
    polish_rate: float = 1e-3  # ... at this rate ...
    polish_taught: float = 0.0  # ... with this weight of the dense network as a teacher

    def __post_init__(self) -> None:
        if self.share and self.beta != 1:
            raise ValueError("with a share `fit` chooses β: leave it at 1")

    def name(self) -> str:
        """Of what is trained with noise; where it is cut and polished is not in it."""
        name = f"sparse-share{self.share:g}" if self.share else f"sparse-beta{self.beta:g}"
        name += "-fresh" if self.fresh else ""
        name += {None: "", False: "-without-noise", True: "-with-noise"}[self.noise]
        taught = f"-taught{self.taught:g}-temperature{self.temperature:g}" if self.taught else ""
        return f"{name}-epochs{self.epochs}-warm-up{self.warm_up_end:g}{taught}"


# The first four of the dense network showed that lower rates and less dropout are better, so two more try that; the
# last has as many epochs as a dense network and the Sparse VD after it.
DENSE = (
    Dense(0.3, 16),
    Dense(0.1, 16),
    Dense(0.3, 16, 2e-3),
    Dense(0.5, 24),
    Dense(0.1, 16, 1e-3),
    Dense(0.2, 40, 1e-3),
)
SPARSE = (
    Sparse(1.0, 24),
    Sparse(0.3, 24),
    Sparse(1.0, 24, taught=0.5),
    Sparse(1.0, 48),
    Sparse(2.0, 24),
    Sparse(2.0, 48),
    Sparse(1.0, 32, taught=0.5, share=1 - 1 / 8.2, noise=False),
    Sparse(1.0, 32, taught=0.5, share=1 - 1 / 8.2, noise=True),
    Sparse(1.0, 32, fresh=True),
    Sparse(2.0, 32, fresh=True),
    Sparse(3.0, 32, fresh=True, taught=0.9, temperature=2.0),
    Sparse(3.0, 32, taught=0.9, temperature=2.0),
)


class Speller(nn.Module):
    """Letters are read both ways; the decoder looks back at them (attention by a bilinear product, Luong et al. 2015).

    The attention comes after the recurrence and not into it, so that all steps of a known word are one call.
    """

    def __init__(
        self, letters: int, phonemes: int, *, width: int = 64, hidden: int = 160, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.start = phonemes  # what the decoder reads before the first phoneme; classes are END and phonemes
        self.letters = nn.Embedding(letters, width, padding_idx=PADDING)
        self.phonemes = nn.Embedding(phonemes + 1, width, padding_idx=PADDING)
        self.encoder = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * hidden, 2 * hidden)
        self.decoder = nn.GRU(width, 2 * hidden, batch_first=True)
        self.attention = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.mixture = nn.Linear(4 * hidden, 2 * hidden)
        self.head = nn.Linear(2 * hidden, phonemes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, letters: Tensor, before: Tensor) -> Tensor:
        """Logits (phonemes in all, classes), of a batch in the order of its words, without padding.

        `before` (words, longest) has the phoneme before each that is to be predicted, and padding.
        """
        memory, state = self.encode(letters)
        outputs, _ = self.decode(before, state, memory, letters)
        return outputs[before != PADDING]

    def encode(self, letters: Tensor) -> Pair:
        """What is known of each letter (words, letters, 2·hidden), and the decoder's first state."""
        lengths = (letters != PADDING).sum(1)
        packed = pack_padded_sequence(
            self.dropout(self.letters(letters)), lengths, batch_first=True, enforce_sorted=False
        )
        outputs, state = self.encoder(packed)
        memory, _ = pad_packed_sequence(outputs, batch_first=True, total_length=letters.shape[1])
        both = torch.cat([state[0], state[1]], 1)  # (words, 2·hidden)
        return memory, torch.tanh(self.bridge(both)).unsqueeze(0)

    def decode(self, before: Tensor, state: Tensor, memory: Tensor, letters: Tensor) -> Pair:
        """Logits (words, steps, classes) and the state after the last step."""
        outputs, state = self.decoder(self.dropout(self.phonemes(before)), state)
        scores = self.attention(outputs) @ memory.transpose(1, 2)  # (words, steps, letters)
        scores = scores.masked_fill((letters == PADDING).unsqueeze(1), -1e4)
        context = scores.softmax(-1).to(memory.dtype) @ memory
        mixed = torch.tanh(self.mixture(torch.cat([context, outputs], 2)))
        return self.head(self.dropout(mixed)), state

    @torch.no_grad()
    def spoken(self, letters: Tensor) -> Tensor:
        """The likeliest phoneme at each step, after those said before (words, steps); END fills what is left."""
        memory, state = self.encode(letters)
        last = torch.full((len(letters), 1), self.start)
        said, ended = [], torch.zeros(len(letters), dtype=torch.bool)
        while not ended.all() and len(said) < LONGEST:
            outputs, state = self.decode(last, state, memory, letters)
            best = outputs[:, 0].argmax(1).masked_fill(ended, END)
            ended = ended | (best == END)
            said.append(best)
            last = best.unsqueeze(1)  # a word that has ended reads padding, and no one reads what it says then
        return torch.stack(said, 1)


class Batches(IterableDataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Batches of words of about the same length, grouped anew at each pass: inputs (letters, phonemes before), and all
    phonemes to predict in a row, so that each of them is an example."""

    def __init__(self, words: Pair, start: int):
        self.letters, self.phonemes = words
        self.start = start
        self.lengths = [(tokens != PADDING).sum(1) for tokens in words]

    def __len__(self) -> int:
        return math.ceil(len(self.letters) / BATCH)

    @property
    def tokens(self) -> int:
        """How many phonemes there are to predict in a pass, with the end of each word."""
        return int(self.lengths[1].sum()) + len(self.phonemes)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        size = self.lengths[0] * 100 + self.lengths[1]  # sorted by letters, then by phonemes, then by chance
        groups = (size + torch.rand(len(size))).argsort().split(BATCH)
        for number in torch.randperm(len(groups)).tolist():
            yield self.batch(groups[number])

    def batch(self, words: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        letters, phonemes = (
            tokens[words, : int(lengths[words].max())]
            for tokens, lengths in zip((self.letters, self.phonemes), self.lengths, strict=True)
        )
        before = F.pad(phonemes, (1, 0), value=self.start)  # padding where the word has ended
        return (letters, before), F.pad(phonemes, (0, 1), value=END)[before != PADDING]


def loader(words: Pair, start: int) -> tuple[Any, int]:
    """The data for `fit`, and N: it makes its batches itself, so it cannot say how many examples they have."""
    batches = Batches(words, start)
    return DataLoader(batches, batch_size=None), batches.tokens


def load() -> tuple[Pair, Pair, int, int]:
    """Words to train on and to test on, and how many different letters and classes there are, with padding or end."""
    found = datasets.load("cmudict")
    letters, phonemes = (torch.cat([found.train[i], found.test[i]]) for i in (0, 1))
    (train, test) = parted((letters, phonemes), TEST)
    return train, test, int(letters.max()) + 1, found.classes


def parted(words: Pair, every: int) -> tuple[Pair, Pair]:
    """The words but one of so many, and these."""
    order = torch.randperm(len(words[0]), generator=torch.Generator().manual_seed(SPLIT_SEED))
    few, rest = order[: len(order) // every], order[len(order) // every :]
    return (words[0][rest], words[1][rest]), (words[0][few], words[1][few])


@torch.no_grad()
def mistakes(model: Any, words: Pair) -> Tensor:
    """100 for each word that is spoken wrongly, else 0: its mean is the word error in %."""
    found = []
    by_length = (words[0] != PADDING).sum(1).argsort()
    for part in by_length.split(1000):
        letters, phonemes = words[0][part], words[1][part]
        said = model.eval().spoken(letters[:, : int((letters != PADDING).sum(1).max())])
        longest = max(said.shape[1], phonemes.shape[1])
        said, right = (F.pad(each, (0, longest - each.shape[1]), value=END) for each in (said, phonemes))
        found.append((said != right).any(1))
    wrong = torch.cat(found)[by_length.argsort()]  # in the order of the words, for a comparison word by word
    return 100.0 * wrong.double()


def trained_dense(
    setting: Dense, words: tuple[Pair, Pair], sizes: tuple[int, int], seed: int, place: str
) -> tuple[Speller, float]:
    """The dense network, and seconds. One that was trained before comes from its folder."""
    train, measured = words
    torch.manual_seed(seed)
    model = Speller(*sizes, dropout=setting.dropout)
    data, n = loader(train, model.start)
    watched = loader(measured, model.start)[0] if place == TRIALS else None
    config = sparsevd.FitConfig(epochs=setting.epochs, learning_rate=setting.rate, autocast=True, seed=seed)
    folder = RUNS / place / setting.name()
    history = sparsevd.fit_dense(model, data, watched, config, n_train=n, run_dir=folder, resume=True)
    return model.eval(), sum(epoch.seconds for epoch in history)


def trained_sparse(
    setting: Sparse, dense: Speller, words: tuple[Pair, Pair], sizes: tuple[int, int], seed: int, place: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Sparse VD from a dense network or random weights: what is left of it, and what else a record says."""
    train, measured = words
    data, n = loader(train, dense.start)
    watched = loader(measured, dense.start)[0] if place == TRIALS else None
    torch.manual_seed(seed)
    model = sparsevd.sparsify(Speller(*sizes) if setting.fresh else dense)
    history = sparsevd.fit(
        model,
        data,
        watched,
        sparsevd.FitConfig(
            epochs=setting.epochs, warm_up_end=setting.warm_up_end, noise=setting.noise, autocast=True, seed=seed
        ),
        n_train=round(n / setting.beta),  # the KL weighs β/N, beside a teacher's term too
        budget=sparsevd.Budget(sparsity=setting.share) if setting.share else None,
        teacher=copy.deepcopy(dense) if setting.taught else None,
        teacher_weight=setting.taught,
        temperature=setting.temperature,
        run_dir=RUNS / place / setting.name(),
        resume=True,
    )
    more = {"thresholds": trade_off(model, dense, measured), "seconds": round(sum(e.seconds for e in history), 1)}
    pruned = sparsevd.prune(model, threshold=setting.threshold)
    if setting.polish:
        pruned = polished(pruned, setting, dense, train, seed)
    return pruned, more


def polished(pruned: nn.Module, setting: Sparse, dense: Speller, train: Pair, seed: int) -> nn.Module:
    """The pruned network in the shape of the dense one, so that its dropout acts, fine-tuned."""
    network = copy.deepcopy(dense)
    network.load_state_dict(pruned.state_dict())
    data, n = loader(train, dense.start)
    sparsevd.polish(
        network,
        data,
        epochs=setting.polish,
        config=sparsevd.FitConfig(learning_rate=setting.polish_rate, autocast=True, seed=seed),
        teacher=copy.deepcopy(dense) if setting.polish_taught else None,
        teacher_weight=setting.polish_taught,
        n_train=n,
    )
    return network.eval()


def trade_off(model: nn.Module, dense: nn.Module, words: Pair) -> list[dict[str, float]]:
    """Error and ratio, without polishing, by where log α is cut."""
    found = []
    for threshold in THRESHOLDS:
        cut = described(sparsevd.prune(model, threshold=threshold), dense, words)
        found.append({"threshold": threshold, "error": cut["error"], "ratio": cut["ratio"]})
    return found


def described(pruned: nn.Module, dense: nn.Module, words: Pair) -> dict[str, Any]:
    """What a record says of a pruned network: errors, paired with those of the dense one, and sizes."""
    errors = mistakes(pruned, words)
    lost = errors - mistakes(dense, words)
    layers = [
        {"name": name, "weights": weight.numel(), "kept": int((weight != 0).sum())}
        for name, weight in pruned.named_parameters()
        if weight.ndim > 1
    ]
    return {
        "error": round(errors.mean().item(), 3),
        "lost": round(lost.mean().item(), 3),
        "standard_error": round(lost.std().item() / math.sqrt(len(lost)), 3),
        "ratio": ratio(layers),
        "ratio_without_embedding": ratio(
            [layer for layer in layers if not layer["name"].startswith(("letters.", "phonemes."))]
        ),
        "per_layer": layers,
    }


def ratio(layers: list[dict[str, Any]]) -> float:
    return sum(layer["weights"] for layer in layers) / max(1, sum(layer["kept"] for layer in layers))


def trials(method: str, chosen: list[int], records: Records) -> None:
    """Settings of a method, by their numbers, measured on held-out training words: first the dense network's."""
    everything, _, *sizes = load()
    words = parted(everything, HELD_OUT)
    for setting in untried(picked(DENSE, chosen) if method != "sparse" else [], records, method="dense"):
        model, seconds = trained_dense(setting, words, tuple(sizes), 0, TRIALS)
        found = {"error": round(mistakes(model, words[1]).mean().item(), 3), "seconds": round(seconds, 1)}
        records.add(kind="trial", method="dense", setting=asdict(setting), seed=0, **found)
    if method == "dense":
        return
    dense, _ = trained_dense(Dense(**best(records, "dense")), words, tuple(sizes), 0, TRIALS)
    for setting in untried(picked(SPARSE, chosen), records, method="sparse"):
        pruned, more = trained_sparse(setting, dense, words, tuple(sizes), 0, TRIALS)
        found = described(pruned, dense, words[1]) | more
        records.add(kind="trial", method="sparse", setting=asdict(setting), seed=0, **found)


def run(seed: int, records: Records) -> None:
    """The chosen settings on all training words, measured on the test words."""
    train, test, *sizes = load()
    place = f"seed{seed}"
    setting, sparse = Dense(**best(records, "dense")), Sparse(**best(records, "sparse"))
    dense, seconds = trained_dense(setting, (train, test), tuple(sizes), seed, place)
    if not records.find(kind="run", method="dense", seed=seed):
        found = {"error": round(mistakes(dense, test).mean().item(), 3), "seconds": round(seconds, 1)}
        records.add(kind="run", method="dense", setting=asdict(setting), seed=seed, **found)
    if not records.find(kind="run", method="sparse", seed=seed):
        pruned, more = trained_sparse(sparse, dense, (train, test), tuple(sizes), seed, place)
        found = described(pruned, dense, test) | more
        records.add(kind="run", method="sparse", setting=asdict(sparse), seed=seed, **found)


def cost(steps: int) -> str:
    """CPU seconds of a step and of an epoch."""
    train, _, *sizes = load()
    whole = Batches(train, 0)
    few = train[0][: steps * BATCH], train[1][: steps * BATCH]
    config = sparsevd.FitConfig(epochs=1, learning_rate=1e-3, autocast=True)
    dense = Speller(*sizes)
    data, n = loader(few, dense.start)
    lines = []
    for method in ("dense", "sparse", "sparse, taught"):
        watch = Stopwatch()
        if method == "dense":
            sparsevd.fit_dense(dense, data, None, config, n_train=n, callbacks=[watch], progress=False)
        else:
            model, teacher = sparsevd.sparsify(dense), dense if method == "sparse, taught" else None
            sparsevd.fit(model, data, None, config, n_train=n, callbacks=[watch], progress=False, teacher=teacher)
        lines.append(f"{method}: {watch.read(len(whole))}")
    weights = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
    return "\n".join([*lines, f"{weights:,} weights, {whole.tokens:,} phonemes to predict"])


def table(records: Records) -> str:
    header = ("method", "word error %", "lost, points", "fewer weights", "without the embeddings", "seeds")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for kind in ("run", "trial"):
        for method in ("dense", "sparse"):
            found = records.find(kind=kind, method=method)
            for setting in {str(record["setting"]): record["setting"] for record in found}.values():
                same = [record for record in found if record["setting"] == setting]
                cells = [
                    spread([record[key] for record in same]) if key in same[0] else ""
                    for key in ("error", "lost", "ratio", "ratio_without_embedding")
                ]
                seeds = ", ".join(str(record["seed"]) for record in same)
                name = (Dense if method == "dense" else Sparse)(**setting).name()
                where = name if kind == "run" else f"held out: {name}"
                lines.append(f"| {where} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["trials", "run", "cost", "table"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", choices=["dense", "sparse", "both"], default="both", help="of the trials")
    parser.add_argument("--settings", type=int, nargs="+", default=[], help="trials of these numbers, from 0; else all")
    parser.add_argument("--steps", type=int, default=20, help="to take the time of")
    arguments = parser.parse_args()
    records = Records("pronunciation")
    if arguments.action == "trials":
        trials(arguments.method, arguments.settings, records)
    elif arguments.action == "run":
        run(arguments.seed, records)
    print(cost(arguments.steps) if arguments.action == "cost" else table(records))


if __name__ == "__main__":
    main()
