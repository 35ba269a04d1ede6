"""What loops with parts are compared with: the plain formula, mean NLL + β·KL/N, with real noise.

All of them take the same batches in the same parts (micro-batches or processes), and the noise of a part is that of its
seed, so that after some steps the weights must be the same but for rounding. Trainers that draw and cut batches
themselves are compared with by_hand.py, where the noise is fixed; eq. 14 is written out there.
"""

import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from by_hand import divergence
from sparsevd.posterior import posteriors
from sparsevd.training.schedule import Schedule

STEPS, N, RATE = 20, 60, 5e-3
# The KL grows, log σ² catches up on the way, and nothing is dropped.
CONFIG = sparsevd.FitConfig(
    warm_up_end=0.5, late_from=0.7, log_sigma2_lr_ratio=0.3, drop_from=1.0, variance_dtype="float32"
)
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    # A large ε: else rounding decides about the first steps, which are as long as the rate whatever the gradient.
    "adam": lambda groups: torch.optim.Adam(groups, eps=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, eps=1e-3, weight_decay=0),
    "fused": lambda groups: torch.optim.AdamW(groups, eps=1e-3, weight_decay=0, fused=True),
}


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    return sparsevd.sparsify(net).train()


def batch(step, part, parts):
    """The part of a batch, with the generator as that part's noise needs it."""
    torch.manual_seed(step)
    x, y = torch.randn(8, 12), torch.randint(0, 3, (8,))
    torch.manual_seed(1000 + parts * step + part)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def formula(optimizer, parts=1, mistake=1.0, wrap=lambda model: model):
    """The weights after so many steps by autograd through the whole objective, in a loop of nothing else.

    A mistake is what the KL would be multiplied with.
    """
    model = network()
    net = wrap(model)
    optimizer = OPTIMIZERS[optimizer](sparsevd.parameter_groups(model, RATE))
    schedule = Schedule(model, CONFIG, N)
    for step in range(STEPS):
        phase = schedule.at(step / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * (phase.noise_ratio if group["noise"] else 1)
        optimizer.zero_grad()
        for part in range(parts):
            x, y = batch(step, part, parts)
            (F.cross_entropy(net(x), y) / parts).backward()
        terms = [divergence(each.theta, each.log_sigma2) for each in posteriors(model)]
        (mistake * phase.kl_weight * torch.stack(terms).sum()).backward()
        optimizer.step()
    return weights(model)


def rate(step):
    """It falls, so that whoever takes the rate of log σ² from another step is found out."""
    return RATE * (1 - step / STEPS)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=2e-5):
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def differ(one, other):
    """Whether the formula would notice."""
    return max((one[name] - other[name]).abs().max().item() for name in one) > 1e-3
