"""Networks by name, as plain torch models: the paper's, with what it reports for them, and those for texts.

The weights of the paper's start Xavier-normal, biases at zero. Inputs are as `datasets` gives them.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import nn

from sparsevd.zoo.text_models import TextEncoder, TextLSTM


def lenet_300_100(classes: int = 10) -> nn.Module:
    """LeNet-300-100 for 28×28 images: 266,200 weights."""
    return _fully_connected(784, 300, 100, classes)


def fc_1000_1000(classes: int = 10) -> nn.Module:
    """Two layers of 1,000 units for 28×28 images: the net of the paper's variance-reduction figure."""
    return _fully_connected(784, 1000, 1000, classes)


def lenet_5_caffe(classes: int = 10) -> nn.Module:
    """LeNet-5 with Caffe's widths for 28×28 images: 430,500 weights.

    Caffe's own has no ReLU after the convolutions; that of the paper's authors, in their published code, has.
    """
    return _initialised(
        nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(20, 50, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(800, 500),
                relu3=nn.ReLU(),
                fc2=nn.Linear(500, classes),
            )
        )
    )


def vgg_like(classes: int = 10, k: float = 1.0) -> nn.Module:
    """The VGG-like net for 32×32 colour images (Zagoruyko, 2015): 13 convolutions and 2 fully-connected layers.

    Every layer but the last is followed by batch normalisation and ReLU, with Binary Dropout between layers. `k`
    scales the number of units in each, and below 1 the dropout rates too: few units do not learn under the full rates.
    """
    dropout = min(1.0, k)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for block, (width, depth) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        units = max(1, round(width * k))
        for i in range(1, depth + 1):
            layers[f"conv{block}_{i}"] = nn.Conv2d(channels, units, 3, padding=1)
            layers[f"norm{block}_{i}"] = nn.BatchNorm2d(units)
            layers[f"relu{block}_{i}"] = nn.ReLU()
            if i < depth:
                layers[f"dropout{block}_{i}"] = nn.Dropout(dropout * (0.3 if block == 1 else 0.4))
            channels = units
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["dropout6"] = nn.Dropout(dropout * 0.5)
    layers["fc1"] = nn.Linear(channels, channels)
    layers["norm6"] = nn.BatchNorm1d(channels)
    layers["relu6"] = nn.ReLU()
    layers["dropout7"] = nn.Dropout(dropout * 0.5)
    layers["fc2"] = nn.Linear(channels, classes)
    return _initialised(nn.Sequential(layers))


# By name, each called with the number of classes.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "lenet-300-100": lenet_300_100,
    "lenet-5-caffe": lenet_5_caffe,
    "fc-1000-1000": fc_1000_1000,
    "vgg-like": vgg_like,
    **{f"vgg-like-{k}": partial(vgg_like, k=k) for k in (0.25, 0.5, 1.5)},
    "text-lstm": TextLSTM,
    "text-encoder": TextEncoder,
}

# (model, data) → |W|/|W≠0| and test error in %, table 1 of the paper.
PAPER: dict[tuple[str, str], tuple[float, float]] = {
    ("lenet-300-100", "mnist"): (68, 1.92),
    ("lenet-5-caffe", "mnist"): (280, 0.75),
}


def _fully_connected(*widths: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    last = len(widths) - 1
    for i in range(1, last + 1):
        layers[f"fc{i}"] = nn.Linear(widths[i - 1], widths[i])
        if i < last:
            layers[f"relu{i}"] = nn.ReLU()
    return _initialised(nn.Sequential(layers))


def _initialised(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
