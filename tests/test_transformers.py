"""The callback for the Trainer of Transformers: the plain formula, metrics, checkpoints, saved models."""

import json
import logging
import math
import re
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset

import by_hand
import sparsevd
from sparsevd.errors import ArgumentError, CheckpointError, MissingPackageError, SparseVDWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        DistilBertConfig,
        DistilBertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from sparsevd.integrations.transformers import STATE_FILE, SparseVD, SparseVDTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


class Net(nn.Module):
    """A network with the interface that the Trainer wants."""

    def __init__(self, model=None):
        super().__init__()
        self.net = model if model is not None else by_hand.network()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data():
    return [{"x": x, "labels": y} for x, y in zip(*by_hand.examples(), strict=True)]


def arguments(folder, **settings):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "seed": 1}
    run = {
        "per_device_train_batch_size": by_hand.BATCH,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "logging_strategy": "no",
    }
    return TrainingArguments(str(folder), **quiet | run | settings)


def trainer(folder, model, callback=None, optimizer="AdamW", kind=Trainer, dataset=None, **settings):
    groups = sparsevd.parameter_groups(model, lr=by_hand.RATE)
    return kind(
        model,
        arguments(folder, **settings),
        train_dataset=data() if dataset is None else dataset,
        optimizers=(by_hand.OPTIMIZERS[optimizer](groups), None),
        callbacks=[callback if callback is not None else SparseVD(by_hand.CONFIG)],
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", by_hand.OPTIMIZERS)
def test_it_is_the_plain_formula(optimizer, accumulate, tmp_path, monkeypatch):
    by_hand.fix_noise(monkeypatch)
    callback, model = SparseVD(by_hand.CONFIG), Net()
    settings = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 2 * accumulate}
    trainer(tmp_path, model, callback, optimizer, max_grad_norm=by_hand.CLIP, **settings).train()

    def expected(mistake=None):
        given = {"accumulate": accumulate, "clip": by_hand.CLIP, "mistake": mistake}
        return by_hand.train(by_hand.network(), by_hand.cross_entropy, by_hand.batches(), optimizer, **given)

    assert (callback.schedule.steps, callback.schedule.total_steps) == (by_hand.STEPS, by_hand.STEPS)
    assert callback.schedule.steps_per_epoch == 10 // accumulate
    assert callback.schedule.n_train == by_hand.EXAMPLES
    assert by_hand.difference(model.net, expected()) < 5e-4
    for mistake in by_hand.MISTAKES:
        if mistake != "KL per micro-batch" or accumulate > 1:
            assert by_hand.difference(model.net, expected(mistake)) > 1e-2, mistake


def bert(kind=BertForSequenceClassification, **settings):
    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return kind(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes, **settings)).train()


def sentences():
    draw = torch.Generator().manual_seed(6)
    tokens = torch.randint(1, 20, (by_hand.EXAMPLES, 6), generator=draw)
    return [{"input_ids": each, "labels": (each.sum() % 2)} for each in tokens]


def test_it_is_the_plain_formula_for_bert_too(tmp_path, monkeypatch):
    """With the trainer that makes the optimizer itself, where Transformers' own would decay log σ²."""
    by_hand.fix_noise(monkeypatch)
    model = sparsevd.sparsify(bert())
    given = arguments(tmp_path, learning_rate=by_hand.RATE, weight_decay=0.1, adam_beta2=0.99, max_grad_norm=0)
    made = SparseVDTrainer(model, given, train_dataset=sentences(), callbacks=[SparseVD(by_hand.CONFIG)])
    made.train()
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.0, 0.0]

    def loss(model, batch):
        return model(**{name: torch.stack([each[name] for each in batch]) for name in batch[0]}).loss

    examples = sentences()
    batches = [examples[i : i + by_hand.BATCH] for i in range(0, len(examples), by_hand.BATCH)]
    expected = by_hand.train(sparsevd.sparsify(bert()), loss, batches, "AdamW")
    assert by_hand.difference(model, expected) < 5e-3


DROPPING = sparsevd.FitConfig(warm_up_end=0.1, drop_from=0.2)


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    """Bit for bit as if it had not been interrupted, noise and order too, and with the same zeros."""
    settings = {"num_train_epochs": 4, "gradient_accumulation_steps": 2, "save_strategy": "epoch"}
    settings["train_sampling_strategy"] = "random"
    whole, unbroken = Net(by_hand.almost_superfluous()), SparseVD(DROPPING)
    seen = {}

    class Watch(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen[state.global_step] = by_hand.zeros(whole.net)

    first = trainer(tmp_path, whole, unbroken, **settings)
    first.add_callback(Watch())
    first.train()
    assert all(0.3 < each.float().mean() < 0.9 for each in seen[10])

    again, callback = Net(), SparseVD(DROPPING)
    torch.manual_seed(9)
    trainer(tmp_path, again, callback, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert callback.schedule.steps == unbroken.schedule.steps == by_hand.STEPS
    assert by_hand.difference(again, whole) == 0
    assert all((now | ~before).all() for now, before in zip(by_hand.zeros(again.net), seen[10], strict=True))
    mine, theirs = callback.schedule.state_dict(), unbroken.schedule.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_elsewhere_must_be_named(tmp_path):
    settings = {"num_train_epochs": 4, "save_strategy": "epoch"}
    trainer(tmp_path / "a", Net(), **settings).train()
    moved = shutil.copytree(tmp_path / "a" / "checkpoint-20", tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=r"from step 20, but there is no .*b/checkpoint-20/.*give SparseVD\(resume_from"
    ):
        trainer(tmp_path / "b", Net(), **settings).train(resume_from_checkpoint=str(moved))
    callback = SparseVD(by_hand.CONFIG, resume_from=moved)
    trainer(tmp_path / "b", Net(), callback, **settings).train(resume_from_checkpoint=str(moved))
    assert callback.schedule.steps == 40


def test_only_what_can_go_on_has_a_state(tmp_path):
    trainer(tmp_path, Net(), save_strategy="epoch", save_only_model=True).train()
    assert not list(tmp_path.rglob(STATE_FILE))


def test_bert_goes_on_from_a_checkpoint(tmp_path):
    """log σ² is saved and read by the Trainer's own means, in a model of Transformers' own."""
    settings = {"num_train_epochs": 2, "save_strategy": "epoch", "dataset": sentences()}
    whole, again = sparsevd.sparsify(bert()), sparsevd.sparsify(bert())
    trainer(tmp_path, whole, **settings).train()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    trainer(tmp_path, again, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert by_hand.difference(again, whole) == 0


class Reporter(TrainerCallback):
    """As the callbacks of W&B and TensorBoard, which stand before those that the user gives."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


@pytest.mark.parametrize("kind", [Trainer, SparseVDTrainer])
def test_its_numbers_are_logged(kind, tmp_path, capsys):
    callback, reporter = SparseVD(DROPPING), Reporter()
    model = Net(by_hand.almost_superfluous())
    made = trainer(tmp_path, model, callback, kind=kind, logging_strategy="epoch", save_strategy="epoch")
    place = 0 if kind is Trainer else 1  # before our own, which SparseVDTrainer has put first
    made.callback_handler.callbacks.insert(place, reporter)
    result = made.train()
    now = callback.schedule.report()
    history = [row for row in made.state.log_history if "loss" in row]
    assert len(history) == 2
    stored = json.loads((tmp_path / "checkpoint-20" / "trainer_state.json").read_text())["log_history"]
    for last in (history[-1], stored[-1], result.metrics):
        assert last["sparsevd/ratio"] == now["ratio"] > 1.4
        assert last["sparsevd/sparsity"] == now["sparsity"]
        assert last["sparsevd/kl"] == now["kl"]
        assert last["sparsevd/beta"] == 1
        assert last["sparsevd/sparsity/net.0"] > 30
    assert "sparsevd/ratio" in capsys.readouterr().out
    assert all(("sparsevd/ratio" in row) == (kind is SparseVDTrainer) for row in reporter.rows)


def test_evaluations_are_left_alone(tmp_path):
    made = trainer(tmp_path, Net())
    made.train()
    assert not [name for name in made.evaluate(data()) if name.startswith("sparsevd")]


def test_the_trainer_makes_the_groups(tmp_path):
    model = Net(nn.Sequential(by_hand.network(), nn.Linear(3, 3)))  # the last layer has no noise
    given = arguments(tmp_path, learning_rate=1e-3, weight_decay=0.1, adam_beta1=0.8, adam_epsilon=1e-6)
    made = SparseVDTrainer(model, given, train_dataset=data())
    made.train()
    assert made.sparsevd.schedule.steps == 20
    groups = made.create_optimizer().param_groups
    assert [(group["weight_decay"], group["noise"]) for group in groups] == [(0, False), (0.1, False), (0, True)]
    assert [p is model.net[1].weight for p in groups[1]["params"]] == [True]
    assert all(group["betas"] == (0.8, 0.999) and group["eps"] == 1e-6 for group in groups)
    assert [group["initial_lr"] for group in groups] == [1e-3, 1e-3, 1e-4]


def test_it_lets_go_at_the_end(tmp_path):
    callback = SparseVD(by_hand.CONFIG)
    made = trainer(tmp_path, Net(), callback)
    made.train()
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.optimizer.step()  # one too many would be a warning
    assert callback.schedule.steps == 20


def test_an_optimizer_without_groups_is_refused_with_the_line_to_write(tmp_path):
    line = "optimizers=(torch.optim.AdamW(sparsevd.parameter_groups(model, lr=…)), None)"
    with pytest.raises(ArgumentError, match=re.escape(line)):
        Trainer(Net(), arguments(tmp_path), train_dataset=data(), callbacks=[SparseVD()]).train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def test_what_the_trainer_does_not_know_must_be_given(tmp_path):
    with pytest.raises(ArgumentError, match=r"give SparseVD\(n_train=…\)"):
        trainer(tmp_path, Net(), dataset=Stream(), max_steps=6).train()
    callback = SparseVD(n_train=40)
    trainer(tmp_path, Net(), callback, dataset=Stream(), max_steps=6).train()
    assert callback.schedule.steps == callback.schedule.total_steps == 6


def words():
    return [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in sentences()]


def test_tokens_must_be_counted_where_the_loss_is_a_mean_over_them(tmp_path):
    model = sparsevd.sparsify(bert(BertForMaskedLM))
    with pytest.raises(ArgumentError, match=r"BertForMaskedLM is a mean over tokens, .* give SparseVD\(n_train=…\)"):
        trainer(tmp_path, model, dataset=words()).train()
    callback = SparseVD(n_train=240)
    trainer(tmp_path, model, callback, dataset=words()).train()
    assert callback.schedule.steps == 20


class PerToken(nn.Module):
    """A network of no known name, with a target for each token, or several numbers for an example."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids, labels):
        logits = self.out(self.words(input_ids))
        if labels.is_floating_point():
            return {"loss": nn.functional.mse_loss(logits[:, 0, :3], labels), "logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def test_targets_that_do_not_look_like_one_for_each_example_are_asked_about(tmp_path):
    model = sparsevd.sparsify(PerToken())
    with pytest.raises(ArgumentError, match="first batch has 6 targets: .* give SparseVD"):
        trainer(tmp_path, model, dataset=words()).train()
    assert not model._forward_pre_hooks
    callback = SparseVD(n_train=240)
    trainer(tmp_path, model, callback, dataset=words()).train()
    assert callback.schedule.steps == 20
    numbers = [{**each, "labels": torch.ones(3)} for each in words()]
    with pytest.warns(SparseVDWarning, match="first batch has 3 targets"):
        trainer(tmp_path, sparsevd.sparsify(PerToken()), dataset=numbers).train()


def test_a_regression_is_told_what_its_units_decide(tmp_path):
    numbers = [{**each, "labels": 250.0} for each in sentences()]
    with pytest.warns(SparseVDWarning, match="variance ½ in the labels"):
        trainer(tmp_path, sparsevd.sparsify(bert(num_labels=1)), dataset=numbers).train()


def gpt2():
    torch.manual_seed(5)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, bos_token_id=0, eos_token_id=0, **sizes))


def distilbert():
    torch.manual_seed(5)
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": 8}
    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=20, **sizes))


def masked():
    return bert(BertForMaskedLM)


# The weight of the output layer, which is that of the embedding.
TIED = {
    "BertForMaskedLM": "cls.predictions.decoder.weight",
    "DistilBertForMaskedLM": "vocab_projector.weight",
    "GPT2LMHeadModel": "lm_head.weight",
}
every_model = pytest.mark.parametrize("make", [bert, masked, distilbert, gpt2])


@every_model
def test_every_matrix_is_converted_and_eval_mode_is_the_same(make):
    dense = make().eval()
    model = sparsevd.sparsify(dense, threshold=math.inf)
    matrices = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
    assert sparsevd.summary(model).dense == ()
    assert sum(each.theta.numel() for each in sparsevd.posterior.posteriors(model)) == matrices
    tokens = torch.randint(1, 20, (2, 6))
    assert torch.equal(model(tokens).logits, dense(tokens).logits)
    if name := TIED.get(type(dense).__name__):
        noise = name.replace("weight", "log_sigma2")
        assert model.get_parameter(name) is model.get_input_embeddings().weight
        assert model.get_parameter(noise) is model.get_input_embeddings().log_sigma2


@pytest.mark.parametrize("make", [masked, distilbert, gpt2])
def test_tied_models_train_are_stored_and_go_on(make, tmp_path):
    """Each tensor is once in the file, though it has two names; a run goes on as if it had not been interrupted."""
    settings = {"num_train_epochs": 2, "save_strategy": "epoch", "train_sampling_strategy": "sequential"}
    runs = []
    for broken in (False, True):
        model = sparsevd.sparsify(make().train(), initial_log_sigma2="relative")
        made = trainer(tmp_path, model, SparseVD(DROPPING, n_train=240), dataset=words(), **settings)
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10") if broken else None)
        runs.append(model)
    stored = load_file(tmp_path / "checkpoint-20" / "model.safetensors")
    assert len(stored) == len(list(model.parameters()))
    for name, value in runs[0].state_dict().items():
        assert torch.equal(value, runs[1].state_dict()[name]), name
    pruned = sparsevd.prune(model.eval())
    tied = TIED[type(pruned).__name__]
    assert pruned.get_parameter(tied) is pruned.get_input_embeddings().weight
    fresh = sparsevd.sparsify(make()).eval()
    fresh.load_state_dict(stored, strict=False)
    tokens = torch.randint(1, 20, (2, 6))
    assert torch.equal(fresh(tokens).logits, model(tokens).logits)
    assert torch.equal(pruned(tokens).logits, model(tokens).logits)


@every_model
def test_a_pruned_model_is_saved_and_read_as_any_other(make, tmp_path):
    model = sparsevd.sparsify(make())
    with torch.no_grad():
        for each in sparsevd.posterior.posteriors(model):
            each.log_sigma2.view(-1)[::3] = 4.0
    pruned = sparsevd.prune(model)
    assert sum(int((p == 0).sum()) for p in pruned.parameters() if p.ndim > 1) > 20
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path)
    assert type(again) is type(make())
    assert list(again.state_dict()) == list(pruned.state_dict()) == list(make().state_dict())
    assert all(torch.equal(pruned.state_dict()[name], value) for name, value in again.state_dict().items())
    tokens = torch.randint(1, 20, (2, 6))
    assert torch.equal(again.eval()(tokens).logits, pruned.eval()(tokens).logits)


def test_a_network_that_asks_a_weight_for_its_type_may_have_it_sparse():
    """T5 does so in each of its layers, and was told to leave them dense."""
    config = T5Config(d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, vocab_size=20)
    assert not sparsevd.conversion.preview(T5ForConditionalGeneration(config)).remarks()


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delattr(sparsevd.integrations, "transformers")
    monkeypatch.delitem(sys.modules, "sparsevd.integrations.transformers")
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not there
    with pytest.raises(
        MissingPackageError, match=r'accelerate is not installed; run: pip install "sparsevd\[transformers\]"'
    ):
        sparsevd.integrations.transformers  # noqa: B018
