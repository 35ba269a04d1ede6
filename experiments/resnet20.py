"""ResNet-20 for CIFAR-10 (He et al., 2016; the original shortcuts, which pad with zeros), as others have trained it.

The weights are a safetensors file with the names of this module; the images are standardised as its authors did it, by
the mean and deviation of ImageNet.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsevd.zoo import datasets

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_OURS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # what the loader subtracts and divides by


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (inputs, outputs) in enumerate([(16, 16), (16, 32), (32, 64)], start=1):
            first = Block(inputs, outputs, 1 if i == 1 else 2)
            self.add_module(f"layer{i}", nn.Sequential(first, Block(outputs, outputs, 1), Block(outputs, outputs, 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for i in (1, 2, 3):
            x = self.get_submodule(f"layer{i}")(x)
        return self.linear(x.mean((2, 3)))


class ResNet8(nn.Module):
    """One block of each width; for images of 16 × 16 pixels it is a deep network that trains in minutes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.blocks(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


def trained(weights: str | Path) -> ResNet20:
    """The network with the weights of a file."""
    net = ResNet20()
    net.load_state_dict(load_file(weights))
    return net.eval()


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training images; the first half of the test images, to choose on; the other half, to report on.

    Its authors have trained on all training images, so none of them is held out.
    """
    cifar = datasets.load("cifar10")
    (x, y), (x_test, y_test) = cifar.train, cifar.test
    x, x_test = _standardised(x), _standardised(x_test)
    half = len(y_test) // 2
    return (x, y), (x_test[:half], y_test[:half]), (x_test[half:], y_test[half:])


def _standardised(x: Tensor) -> Tensor:
    mean, deviation, our_mean, our_deviation = (
        torch.tensor(each).view(3, 1, 1) for each in (_MEAN, _DEVIATION, *_OURS)
    )
    return (x * our_deviation + our_mean - mean) / deviation
