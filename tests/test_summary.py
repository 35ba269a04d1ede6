import json
import math

import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.errors import ConversionError


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


def test_the_table_is_aligned():
    lines = str(sparsevd.summary(sparsevd.sparsify(nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 2))))).splitlines()
    assert lines[0].startswith("layer  type")
    assert lines[2].index("12,000") + len("12,000") == lines[3].index("600") + len("600")


def test_nothing_to_sum_up():
    with pytest.raises(ConversionError, match="nothing to sum up"):
        sparsevd.summary(nn.ReLU())
