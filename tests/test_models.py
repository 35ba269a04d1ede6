import pytest
import torch
from torch import nn

import sparsevd
from sparsevd.zoo.models import MODELS, PAPER, vgg_like

SHAPES = {"lenet-300-100": (1, 28, 28), "lenet-5-caffe": (1, 28, 28), "fc-1000-1000": (1, 28, 28)}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_a_batch(name):
    model = MODELS[name](7).eval()
    images = torch.randn(2, *SHAPES.get(name, (3, 32, 32)))
    assert model(torch.randint(0, 99, (2, 30)) if name.startswith("text-") else images).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "weights"), [("lenet-300-100", 266_200), ("lenet-5-caffe", 430_500), ("fc-1000-1000", 1_794_000)]
)
def test_number_of_weights(name, weights):
    assert sparsevd.summary(MODELS[name](10)).weights == weights


def test_vgg_has_13_convolutions_2_linear_layers_norms_and_dropout():
    model = vgg_like(k=0.25)
    kinds = [type(layer) for layer in model]
    assert kinds.count(nn.Conv2d) == 13
    assert kinds.count(nn.Linear) == 2
    assert kinds.count(nn.BatchNorm2d) == 13
    assert kinds.count(nn.Dropout) == 10
    sparse = sparsevd.sparsify(model)
    assert [layer.p for layer in sparse if isinstance(layer, nn.Dropout)] == [0.0] * 10
    assert sparse(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_the_papers_networks_are_there():
    assert all(model in MODELS for model, _ in PAPER)
