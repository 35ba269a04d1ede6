import json
import math

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ConversionError
from sparsevd.reporting.table import table


def test_counts_by_hand():
    model = sparsevd.sparsify(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Conv1d(1, 2, 2, bias=False)))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].log_sigma2.fill_(5.0)
        model[0].log_sigma2[0] = -5.0
    summary = sparsevd.summary(model)
    first, second = summary.layers
    assert (first.name, first.type, first.shape, first.weights, first.kept) == ("0", "SparseLinear", (3, 4), 12, 4)
    assert first.sparsity == pytest.approx(100 * 8 / 12)
    assert (second.weights, second.kept) == (4, 4)
    assert summary.ratio == pytest.approx(16 / 8)
    assert summary.other_parameters == 3 + 6
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters()) - 16  # without the noise
    assert summary.whole_ratio == pytest.approx(25 / 17)
    assert "2.0× fewer weights in these layers; 1.5× counting every parameter of the network (9 others" in str(summary)
    assert summary.as_dict()["parameters"] == 25
    assert summary.as_dict()["whole_ratio"] == summary.whole_ratio
    assert summary.kl == pytest.approx(sparsevd.kl(model).item())
    assert first.log_alpha == pytest.approx((-5.0, -5.0, -5.0))


def test_a_pruned_model_is_counted_by_its_zeros():
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 2.0, 0.0]]))
    summary = sparsevd.summary(model)
    assert summary.kept == 2
    assert summary.kl is None
    assert "2.0× fewer weights" in str(summary)


def test_an_empty_network_has_an_infinite_ratio():
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    summary = sparsevd.summary(model)
    assert summary.ratio == math.inf
    assert json.loads(json.dumps(summary.as_dict()))["ratio"] is None
    assert "infinitely fewer weights" in str(summary)


def test_what_stays_dense_shows_in_the_ratio_of_the_whole():
    """Positions have numbers that no layer of ours holds."""
    dense = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dense.register_parameter("positions", nn.Parameter(torch.zeros(32, 8)))
    with pytest.warns(sparsevd.SparseVDWarning, match="no Sparse VD twin for positions"):
        model = sparsevd.sparsify(dense)
    for layer in model:
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(layer.log_sigma2, 9.0)
        with torch.no_grad():
            layer.log_sigma2[0, 0] = -9.0
    summary = sparsevd.summary(model)
    assert [layer.name for layer in summary.layers] == ["0", "1"]
    assert summary.ratio == 64
    assert summary.whole_ratio < summary.parameters / dense.positions.numel() < 3


def test_a_tied_weight_counts_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    summary = sparsevd.summary(model)
    assert [layer.name for layer in summary.layers] == ["0"]
    assert (summary.weights, summary.other_parameters, summary.parameters) == (16, 8, 24)


def test_no_parameter_is_left():
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    summary = sparsevd.summary(model)
    assert summary.as_dict()["whole_ratio"] is None
    assert "infinitely counting every parameter" in str(summary)


def test_a_table_holds_whatever_is_in_it():
    text = table(("name", "size"), [("a", "1"), ("b" * 300, "1,000")], right=(1,), total=("both", "1,001"))
    header, rule, one, two, again, total = text.splitlines()
    assert two == f"{'b' * 300}  1,000"
    assert header == f"{'name':<300}   size"
    assert one == f"{'a':<300}      1"
    assert rule == again == "─" * len(two)
    assert total == f"{'both':<300}  1,001"
    assert table(("only", "headers"), []) == "only  headers\n─────────────"
    with pytest.raises(ValueError, match="zip"):
        table(("one", "two"), [("cell",)])


def test_the_table_is_aligned():
    lines = str(sparsevd.summary(sparsevd.sparsify(nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 2))))).splitlines()
    assert lines[0].startswith("layer  type")
    assert lines[2].index("12,000") + len("12,000") == lines[3].index("600") + len("600")


def test_nothing_to_sum_up():
    with pytest.raises(ConversionError, match="nothing to sum up"):
        sparsevd.summary(nn.ReLU())
