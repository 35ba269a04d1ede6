"""The report of a run: what is on the page, that it needs nothing else, and what it says of what is missing."""

import json
import math
import re
import shutil
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import small_runs
import sparsevd
from sparsevd.cli import app
from sparsevd.errors import ArgumentError, CheckpointError, GraphError, MissingPackageError, SparseVDError, WriteError
from sparsevd.posterior import noisy_modules
from sparsevd.reporting import bitmap, figures, wording
from sparsevd.reporting.findings import LogAlpha, Point, TradeOff
from sparsevd.reporting.page import page
from sparsevd.reporting.svg import Scale, short
from sparsevd.runs.gathering import gather
from sparsevd.runs.run import Run
from sparsevd.training.checkpoint import Checkpoint, load_weights
from sparsevd.training.progress import Callback
from sparsevd.training.restoration import described

VOID = {"meta", "link", "br", "img", "input", "hr", "line", "rect", "circle", "path", "image"}


def quiet(line):
    """Of what is being done."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain run; one with pre-training, held-out examples and a budget; one of filters."""
    here = tmp_path_factory.mktemp("runs")
    small_runs.train(here / "plain")
    small_runs.train(
        here / "budget", pretrain_epochs=2, pretrain_learning_rate=1e-2, max_error_increase=2.0, val_size=100
    )
    small_runs.train(here / "filters", model="small_runs:filters")
    return here


@pytest.fixture(scope="module")
def found(folders):
    return {name: gather(Run(folders / name, say=quiet), say=quiet) for name in ("plain", "budget", "filters")}


@pytest.fixture
def no_graph(monkeypatch):
    """Quicker: torch.export takes its time. It is also what a network that has no graph gets."""

    def refuse(*given):
        raise GraphError("it branches")

    monkeypatch.setattr("sparsevd.runs.gathering.capture", refuse)


class Page(HTMLParser):
    """Elements with their attributes, that all are closed, and the text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += f" {data}"

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_a_page_that_needs_nothing_else(folders, tmp_path):
    html = sparsevd.report(folders / "plain", tmp_path / "made" / "page.html", say=quiet).read_text()
    read = Page(html)
    assert not read.all("script")
    assert len(html) < 2_000_000
    for tag, attributes in read.elements:
        for name in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    drawings = read.all("svg")
    assert len(drawings) >= 10
    assert all(each["role"] == "img" and len(each["aria-label"]) > 20 for each in drawings)
    assert len(re.findall(r"<svg[^>]*><title>[^<]+</title><desc>[^<]+</desc>", html)) == len(drawings)
    assert all("scope" in each for each in read.all("th"))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_what_is_on_it(folders, found):
    run = found["plain"]
    text = Page(page([run], "1.2")).text
    summary = Run(folders / "plain", say=quiet).summary()
    assert f"{summary.kept:,}" in text
    assert "small_runs:network trained on small_runs:data" in text
    assert run.facts["command"] in text
    written = json.loads((folders / "plain" / "summary.json").read_text())
    assert f"{written['test_error']:.2f} %" in text
    for layer in summary.layers:
        assert f"{layer.kept:,}" in text
    for question in ("Which layer is largest now?", "What did it cost?", "Would a lower threshold pay?"):
        assert question in text
    assert not run.missing


def test_numbers_are_those_of_the_network(folders, found):
    run, pruned = found["plain"], Run(folders / "plain", say=quiet).network().network
    _, test = small_runs.data()
    sparsevd.save(pruned, folders / "file.spvd", example=torch.zeros(1, 1, 6, 6))
    assert run.bytes == (folders / "file.spvd").stat().st_size
    curve = run.trade_off
    own = curve.points[curve.chosen]
    assert own.threshold == 3.0
    assert own.bytes == run.bytes
    assert own.score == pytest.approx(sparsevd.evaluate(pruned, test).error)
    assert (own.lost, own.won, own.harms) == (0, 0, False)
    for point in curve.points[:: len(curve.points) // 3]:
        other = Run(folders / "plain", say=quiet).network(point.threshold).network
        assert sum(int(p.count_nonzero()) for p in other.parameters() if p.ndim > 1) == point.kept
        assert sparsevd.evaluate(other, test).error == pytest.approx(point.score)
    kept = [point.kept for point in curve.points]
    assert kept == sorted(set(kept))  # a higher threshold keeps more, and each point is another network
    for each, layer in zip(run.log_alpha, run.summary.layers, strict=True):
        assert each.counts.sum() + each.gone == layer.weights
        assert each.counts[each.edges[:-1] < each.threshold - 1e-9].sum() == layer.kept
    counts = (pruned[1].weight != 0).sum(0).reshape(6, 6)
    assert np.array_equal(run.inputs.counts, counts.numpy())


def test_held_out_data_and_the_dense_network_where_there_are_any(folders, found):
    assert found["plain"].trade_off.measured_on == "300 test examples"
    assert not found["plain"].trade_off.held_out
    assert found["plain"].changes.reference == "the same network before pruning"
    budget = found["budget"]
    assert budget.trade_off.measured_on == "100 held-out examples"
    assert budget.changes.reference == "the dense network after pre-training"
    dense = small_runs.network()
    load_weights(dense, folders / "budget" / "pretrain")
    assert budget.changes.reference_error == pytest.approx(sparsevd.evaluate(dense, small_runs.data()[1]).error)
    assert "max error increase 2.0" in Page(page([budget], "1")).text


def test_changed_predictions(folders, found):
    changes, (_, (x, y)) = found["budget"].changes, small_runs.data()
    dense = small_runs.network()
    load_weights(dense, folders / "budget" / "pretrain")
    before = dense.eval()(x).argmax(1)
    after = Run(folders / "budget", say=quiet).network().network(x).argmax(1)
    assert changes.lost == int(((before == y) & (after != y)).sum())
    assert changes.won == int(((before != y) & (after == y)).sum())
    assert changes.lost + changes.won + changes.other == int((before != after).sum())
    for each in changes.shown:
        assert (each.before, each.after, each.label) == (before[each.index], after[each.index], y[each.index])
        assert np.array_equal(each.image, x[each.index].numpy())


def test_several_runs_side_by_side(folders, found, tmp_path, monkeypatch):
    def gathered(run, **more):
        return replace(found[run.path.name], path=str(run.path))

    monkeypatch.setattr("sparsevd.runs.gathering.gather", gathered)
    paths = [folders / name for name in ("plain", "budget", "filters")]
    html = sparsevd.report(paths, tmp_path / "page.html", say=quiet).read_text()
    read = Page(html)
    assert "3 runs side by side" in read.text
    assert "Error and size of every run" in html
    assert read.text.count("Which layer is largest now?") == 3
    assert "is the smallest" in read.text
    twice = shutil.copytree(folders / "plain", tmp_path / "other" / "plain")
    named = Page(sparsevd.report([paths[0], twice], tmp_path / "two.html", say=quiet).read_text()).text
    assert str(twice) in named.split("Side by side")[0]  # their names alone would not tell them apart


def test_strings_of_a_run_are_escaped(folders, tmp_path, no_graph):
    evil = "<script>alert('x')</script>\"&"
    folder = shutil.copytree(folders / "plain", tmp_path / "<b>run&")
    for name in ("summary.json", "run.json"):
        said = json.loads((folder / name).read_text())
        said |= {
            "command": evil,
            "remarks": [evil],
            "begun": evil,
            "versions": {evil: evil},
            "machine": {"vectors": evil},
        }
        (folder / name).write_text(json.dumps(said))
    html = sparsevd.report(folder, say=quiet).read_text()
    assert (folder / "report.html").is_file()
    assert "<script" not in html
    assert "<b>run" not in html
    assert "&lt;script&gt;alert" in html
    layer = LogAlpha(evil, np.arange(-3.0, 6.0), np.ones(8, int), 0, 3.0)
    assert "<script" not in figures.log_alpha(layer)


def test_without_the_data_there_is_still_a_page(folders, tmp_path, monkeypatch, no_graph):
    folder = shutil.copytree(folders / "plain", tmp_path / "run")

    def gone():
        raise FileNotFoundError("no such pictures")

    monkeypatch.setattr(small_runs, "data", gone)
    text = Page(sparsevd.report(folder, tmp_path / "page.html", say=quiet).read_text()).text
    assert "Not shown: what was measured on data" in text
    assert "it branches" in text
    assert "no such pictures" in text
    assert "Which layer is largest now?" in text
    for name in ("summary.json", "run.json"):  # as `fit(run_dir=)` leaves a folder
        (folder / name).unlink()
    text = Page(sparsevd.report(folder, tmp_path / "page.html", say=quiet).read_text()).text
    assert "not finished" not in text
    assert "does not say" in text
    assert "β ended at 1" in text


def test_a_run_that_was_stopped(tmp_path):
    class Stop(Callback):
        def on_epoch(self, moment):
            if moment.epoch == 2:
                raise KeyboardInterrupt

    model = sparsevd.sparsify(small_runs.network())
    with pytest.raises(KeyboardInterrupt):
        sparsevd.fit(
            model, small_runs.data()[0], None, small_runs.FIT, progress=False, run_dir=tmp_path, callbacks=[Stop()]
        )
    text = Page(sparsevd.report(tmp_path, say=quiet).read_text()).text
    assert "not finished, this is as far as it got" in text
    assert "2 epochs in" in text


def test_model_and_data_can_be_named(folders, tmp_path, no_graph):
    folder = shutil.copytree(folders / "filters", tmp_path / "run")
    for name in ("summary.json", "run.json", "pruned.safetensors"):
        (folder / name).unlink()
    asked = ["report", str(folder), "-o", str(tmp_path / "page.html"), "--model", "small_runs:filters"]
    shown = CliRunner().invoke(app, [*asked, "--data", "small_runs:data"])
    assert shown.exit_code == 0, shown.output
    assert f"written to {tmp_path / 'page.html'}" in shown.output
    assert "Would another threshold pay?" in (tmp_path / "page.html").read_text()


def test_a_plain_network_and_a_file_of_weights(folders, tmp_path, no_graph):
    text = Page(
        sparsevd.report(folders / "plain" / "pruned.safetensors", tmp_path / "p.html", say=quiet).read_text()
    ).text
    assert "it has no log α" in text
    assert "What is kept of each layer" in text
    assert "Would another threshold pay?" not in text


def test_what_is_no_run_is_refused_in_a_sentence(folders, tmp_path, no_graph):
    with pytest.raises(CheckpointError, match="nowhere does not exist; give the folder of a run"):
        sparsevd.report(tmp_path / "nowhere", say=quiet)
    with pytest.raises(CheckpointError, match=r"holds no run: it has no checkpoint\.safetensors"):
        sparsevd.report(tmp_path, say=quiet)
    (tmp_path / "pretrain").mkdir()
    shutil.copy(folders / "budget" / "pretrain" / "checkpoint.safetensors", tmp_path / "pretrain")
    with pytest.raises(CheckpointError, match="still in its pre-training"):
        sparsevd.report(tmp_path, say=quiet)
    with pytest.raises(ArgumentError, match="is a folder; give the name of a file"):
        sparsevd.report(folders / "plain", tmp_path, say=quiet)
    with pytest.raises(ArgumentError, match="no run to report on"):
        sparsevd.report([], say=quiet)
    for given in (nn.Sequential(nn.Linear(2, 2)), [nn.Linear(2, 2)]):
        with pytest.raises(ArgumentError, match="takes the folder of a run.* was given a .*; of a network in memory"):
            sparsevd.report(given, say=quiet)
    for given in (None, 3, [folders / "plain", None]):
        with pytest.raises(ArgumentError, match="takes the folder of a run.* was given a (NoneType|int)$"):
            sparsevd.report(given, say=quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        sparsevd.report(folders / "plain", tmp_path / "file" / "page.html", say=quiet)


def test_milliseconds_if_asked(folders, found, monkeypatch, no_graph):
    assert not found["plain"].times
    measured = type("M", (), {"way": "accelerate", "batch": 1, "times_faster": 3.0})()
    measured.timing = type("T", (), {"median": 2e-5})()
    report = type("R", (), {"measurements": [measured]})
    monkeypatch.setattr("sparsevd.runs.benchmark.bench", lambda *given, **more: report)
    run = gather(Run(folders / "plain", say=quiet), time=True, say=quiet)
    text = Page(page([run], "1")).text
    assert "0.02 ms" in text
    assert "3.0× faster than dense torch" in text


def curve(*rest, held_out=True):
    """Points below the run's own, the highest threshold first: (threshold, kept, lost, won, harms)."""
    own = Point(3.0, 1000, 5000, 2.0, 0, 0)
    points = [Point(t, k, 5 * k, 2.0 + (lost - won) / 100, lost, won, harms) for t, k, lost, won, harms in rest]
    return TradeOff((*reversed(points), own), len(points), True, "10,000 examples", held_out)


def test_would_a_lower_threshold_pay():
    yes = wording.lower_threshold(curve((2.0, 900, 5, 4, False), (1.0, 700, 9, 6, False), (-1.0, 500, 90, 6, True)))
    assert yes.startswith("Yes. Threshold 1 would keep 30 % fewer weights (3.5 kB instead of 5 kB) for +0.03 points")
    assert "test data" not in yes
    assert "test data" in wording.lower_threshold(curve((1.0, 700, 9, 6, False), held_out=False))
    no = wording.lower_threshold(curve((-1.0, 900, 90, 4, True), (-2.0, 700, 9, 6, False)))
    assert no.startswith("No. Already threshold −1 costs +0.86 points (90 examples lost, 4 won)")
    assert wording.lower_threshold(curve((1.0, 990, 1, 1, False))).startswith("Hardly.")
    assert wording.lower_threshold(curve()) == "No lower threshold was measured."


def test_a_network_that_lost_everything_and_one_without_a_threshold(tmp_path, no_graph):
    model = sparsevd.sparsify(small_runs.network(), threshold=math.inf)
    sparsevd.fit(model, small_runs.data()[0], None, small_runs.FIT, progress=False, run_dir=tmp_path / "all")
    given = {"model": "small_runs:network", "data": "small_runs:data", "say": quiet}
    run = gather(Run(tmp_path / "all", **given), say=quiet)
    assert run.trade_off.points[run.trade_off.chosen].kept == run.summary.kept
    assert not re.search(r"\b(inf|nan)\b", Page(page([run], "1")).text)
    for module in noisy_modules(model).values():
        module.threshold = -50.0
    (tmp_path / "none").mkdir()
    Checkpoint(dict(model.state_dict()), posteriors=described(model)).save(tmp_path / "none" / "checkpoint.safetensors")
    run = gather(Run(tmp_path / "none", **given), say=quiet)
    assert run.summary.kept == 0
    assert "No layer has a weight left" in Page(page([run], "1")).text


def test_png_is_what_it_should_be():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    data = bitmap.png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert int.from_bytes(data[at + 8 + size : at + 12 + size], "big") == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert chunks[b"IHDR"] == bytes([0, 0, 0, 3, 0, 0, 0, 2, 8, 6, 0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(2, 13)
    assert np.array_equal(rows[:, 1:].reshape(2, 3, 4), pixels)


def test_scales():
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(1, 100, 0, 1, log=True)(10) == pytest.approx(0.5)
    assert Scale(0, 10, 0, 1).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert Scale(-0.3, 0.3, 0, 1).ticks(3) == [-0.2, 0.0, 0.2]
    assert Scale(2, 2, 0, 1)(2) == 0.5
    assert Scale(5, 5000, 0, 1, log=True).ticks() == [10, 100, 1000]
    assert Scale(12000, 45000, 0, 1, log=True).ticks() == [20000, 30000, 40000]
    assert Scale(1.7, 73, 0, 1, log=True).ticks() == [2, 5, 10, 20, 50]
    assert [short(value) for value in (0, 1500, -2, 2e6)] == ["0", "1.5k", "−2", "2M"]


class Writer:
    """Stands for torch's SummaryWriter."""

    def __init__(self):
        self.scalars, self.flushed, self.closed = {}, 0, False

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, {})[step] = value

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True


def test_numbers_for_tensorboard(monkeypatch, tmp_path):
    from sparsevd.integrations.tensorboard import TensorBoard

    writer, model = Writer(), sparsevd.sparsify(small_runs.network())
    config = replace(small_runs.FIT, epochs=2)
    history = sparsevd.fit(model, small_runs.data()[0], None, config, progress=False, callbacks=[TensorBoard(writer)])
    assert writer.scalars["train_loss"] == {each.epoch: each.train_loss for each in history}
    assert writer.scalars["units alive/1"] == {each.epoch: each.alive["1"][1] for each in history}
    assert {"beta", "sparsity", "kl"} <= writer.scalars.keys()
    assert "val_loss" not in writer.scalars  # nothing was held out
    assert (writer.flushed, writer.closed) == (2, False)
    made = Writer()
    module = type("tensorboard", (), {"SummaryWriter": staticmethod(lambda folder: made)})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    TensorBoard(tmp_path).on_end([])
    assert made.closed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install .sparsevd\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_what_the_caller_names_must_be_there(folders, tmp_path):
    with pytest.raises(SparseVDError, match="nope"):
        sparsevd.report(folders / "plain", tmp_path / "page.html", model="nope", say=quiet)
    with pytest.raises(SparseVDError, match="nope"):
        sparsevd.report(folders / "plain", tmp_path / "page.html", data="nope", say=quiet)
    assert not (tmp_path / "page.html").exists()


def test_every_folder_is_looked_at_before_any_is_measured(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsevd.runs.gathering.gather", lambda *_, **__: pytest.fail("measured too early"))
    with pytest.raises(SparseVDError, match="does not exist"):
        sparsevd.report([folders / "plain", tmp_path / "none"], say=quiet)
