"""Networks for the tests of everything that goes through a graph. Together they use every operation of the list."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pointwise(nn.Module):
    """Every function of one value, with shapes of one axis and of several."""

    def __init__(self):
        super().__init__()
        self.prelu = nn.PReLU(6)

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.relu(x), F.leaky_relu(x, 0.2), F.elu(x, 0.7), F.selu(x), F.gelu(x), F.gelu(x, approximate="tanh")]
        parts += [F.silu(x), F.mish(x), F.hardswish(x), F.hardsigmoid(x), F.softplus(x, 2.0), torch.sigmoid(x)]
        parts += [torch.tanh(x), F.relu6(x), F.hardtanh(x), x.clamp(min=-0.5), x.exp(), self.prelu(x), -x, x**3]
        parts += [x.abs().log(), x.abs().sqrt(), (x * x + 1).rsqrt(), torch.erf(x), 2 - x, x / 3, 1 / (x.abs() + 1)]
        parts += [torch.maximum(x, x.flip(1) if False else -x), torch.minimum(x, x * 2), x.double().float()]
        return torch.cat(parts, 1)


class Shapes(nn.Module):
    """Moving elements, reductions, several inputs and outputs, and a constant that the batch is expanded to."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 6))
        self.register_buffer("positions", torch.randn(20, 6))
        self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.groups = nn.GroupNorm(3, 6)

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.start.expand(x.size(0), -1, -1), x], 1)
        x = self.norm(x + self.positions[: x.size(1)].abs())
        first, second = x.transpose(1, 2).chunk(2, 1)
        one, two, three = first.unbind(1)
        stacked = torch.stack([one, two, three], -1).flatten(1)
        x = torch.matmul(x, x.transpose(1, 2)) * gate.unsqueeze(-1)
        pooled = self.groups(torch.cat([second, first], 1)).sum(2) + x.amax((1, 2), keepdim=False).unsqueeze(1)
        padded = F.pad(x, (1, 2), value=0.5)[:, :, 1::2]
        return F.softmax(pooled, -1), torch.cat([stacked, x[:, 0], padded.mean((1, 2)).unsqueeze(-1)], -1)


class Convolutions(nn.Module):
    """One and three axes, transposed, "same" with an even kernel, reflected padding, and ways to pool."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(3, 4, 4, padding="same", dilation=1, bias=False)
        self.reflect = nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect", groups=2)
        self.up = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.three = nn.Conv3d(1, 2, (1, 2, 2), stride=(1, 2, 2))
        self.head = nn.Linear(2 * 6 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(self.reflect(self.one(x))))
        x = F.avg_pool1d(F.max_pool1d(x, 3, 2, padding=1), 2, padding=1, count_include_pad=False)
        x = x.view(x.size(0), 1, 6, -1, 1).expand(-1, -1, -1, -1, 4)
        x = F.adaptive_max_pool3d(self.three(x), (6, 2, 2))
        return self.head(x.flatten(1)).log_softmax(1)


class Residual(nn.Module):
    """A block of a ResNet: two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Sequential() if same else around

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        y += self.around(x)
        return F.relu_(y)


def resnet(width: int = 8, stages: int = 3, blocks: int = 1) -> nn.Module:
    """For small images: a stem, then stages of blocks; four stages of two blocks are ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    channels = width
    for stage in range(stages):
        for block in range(blocks):
            outputs = width * 2**stage
            layers.append(Residual(channels, outputs, 2 if stage and not block else 1))
            channels = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return with_statistics(nn.Sequential(*layers))


class Inverted(nn.Module):
    """A block of MobileNet: widen, filter each channel by itself, weigh the channels, narrow, and add."""

    def __init__(self, channels: int, wide: int):
        super().__init__()
        self.widen = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        self.depthwise = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.squeeze = nn.Conv2d(wide, 4, 1)
        self.excite = nn.Conv2d(4, wide, 1)
        self.narrow = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.depthwise(self.widen(x))))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.narrow(y)


def mobilenet(channels: int = 8, wide: int = 24) -> nn.Module:
    return with_statistics(
        nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardswish(),
            Inverted(channels, wide),
            Inverted(channels, wide),
            nn.Conv2d(channels, 2 * wide, 1),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * wide, 10),
        )
    )


class Encoder(nn.Module):
    """A Transformer encoder over words."""

    def __init__(self, width: int = 16, words: int = 30, length: int = 7):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(words) + self.positions).mean(1))


def with_statistics(model: nn.Module) -> nn.Module:
    """Batch norms as after training: none has the mean 0, variance 1, weight 1 and bias 0 that it starts from."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model


def pruned_at_random(model: nn.Module, sparsity: float) -> nn.Module:
    """Set this share of the weights of every Linear, Conv and attention layer to zero, in place."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d):
                module.weight[torch.rand_like(module.weight) < sparsity] = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.in_proj_weight[torch.rand_like(module.in_proj_weight) < sparsity] = 0.0
    return model


def pruned(model, zeros=0.9):
    """In eval mode, with zeros, biases and batch norms that do something."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            layer.weight.data *= (torch.rand(layer.weight.shape) >= zeros) / (1 - zeros) ** 0.5
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
            if layer.affine:
                layer.weight.data.uniform_(-1, 2)
                layer.bias.data.normal_()
    return model.eval()


class WayAround(nn.Module):
    """A batch norm whose input is read twice must stay; the other one goes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second, self.norm2, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU6()

    def forward(self, x):
        y = self.first(x)
        return self.act(self.norm2(self.second(self.norm1(y) + y)))


def small_problem(n=1000):
    """Images of 4×4, of which two pixels decide the class."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 4, 4, generator=generator)
    return x, (x[:, 0, 0, :2].sum(1) > 0).long()


def small_network():
    """For them."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)
    )


# Name → a network and an example for it. The last three are pruned.
NETWORKS = {
    "pointwise": lambda: (Pointwise(), torch.randn(2, 6)),
    "shapes": lambda: (Shapes(), (torch.randn(2, 4, 6), torch.randn(2, 5))),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 3, 16)),
    "resnet": lambda: (pruned_at_random(resnet(), 0.9), torch.randn(2, 3, 16, 16)),
    "mobilenet": lambda: (pruned_at_random(mobilenet(), 0.9), torch.randn(2, 3, 16, 16)),
    "encoder": lambda: (pruned_at_random(Encoder(), 0.9), torch.randint(0, 30, (2, 7))),
}
