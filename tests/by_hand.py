"""What every trainer must compute, written out: mean NLL + β·KL/N at the schedule's rates, with the noise fixed."""

import torch
import torch.nn.functional as F
from torch import nn

import sparsevd
from sparsevd.layers import sampling
from sparsevd.training.schedule import Schedule

STEPS = 20
RATE = 0.05
EXAMPLES, BATCH = 40, 4
# β and the rate of log σ² change within the run; nothing is dropped.
CONFIG = sparsevd.FitConfig(warm_up_end=0.5, late_from=0.7, log_sigma2_lr_ratio=0.4, drop_from=1.0)
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.99)),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.5),
}
# What loops get wrong.
MISTAKES = ("KL per micro-batch", "KL clipped", "decay on log σ²")
CLIP = 0.02


def fix_noise(monkeypatch):
    """ε is 0.7 everywhere, so log σ² learns from the data too, and all runs see the same."""
    for ask in ("_can_fuse", "_can_fuse_in_bfloat16"):
        monkeypatch.setattr(sampling, ask, lambda *_: False)
    monkeypatch.setattr(torch, "randn_like", lambda tensor, **_: torch.full_like(tensor, 0.7))


def network():
    torch.manual_seed(3)
    return sparsevd.sparsify(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def examples():
    draw = torch.Generator().manual_seed(4)
    return torch.randn(EXAMPLES, 6, generator=draw), torch.randint(0, 3, (EXAMPLES,), generator=draw)


def falling(step):
    """The rate falls to zero, linearly."""
    return 1 - step / STEPS


def divergence(theta, log_sigma2):
    """Eq. 14 with the paper's constants; a weight of zero, as for padding, has none."""
    some = theta != 0
    log_alpha = log_sigma2[some] - theta[some].square().log()
    negative = 0.63576 * torch.sigmoid(1.87320 + 1.48695 * log_alpha) - 0.5 * F.softplus(-log_alpha) - 0.63576
    return -negative.sum()


def train(model, loss, batches, optimizer, *, accumulate=1, clip=None, mistake=None):
    """The run by hand; `batches` are repeated until it is over. With a mistake, what a wrong loop would compute."""
    schedule = Schedule(model, CONFIG, EXAMPLES)
    noise = [p for name, p in model.named_parameters() if "log_sigma2" in name]
    others = [p for name, p in model.named_parameters() if "log_sigma2" not in name]
    decay = 0.1 if mistake == "decay on log σ²" else 0.0
    optimizer = OPTIMIZERS[optimizer](
        [{"params": others, "lr": RATE, "weight_decay": 0.0}, {"params": noise, "lr": RATE, "weight_decay": decay}]
    )
    rounds = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    for step in range(STEPS):
        phase = schedule.at(step / STEPS)
        optimizer.param_groups[0]["lr"] = RATE * falling(step)
        optimizer.param_groups[1]["lr"] = RATE * falling(step) * phase.noise_ratio
        optimizer.zero_grad()
        part = rounds[step % len(rounds)]
        for batch in part:
            (loss(model, batch) / len(part)).backward()
        if clip is not None and mistake != "KL clipped":
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        divergences = [divergence(each.theta, each.log_sigma2) for each in schedule.posteriors]
        times = accumulate if mistake == "KL per micro-batch" else 1
        (times * phase.kl_weight * torch.stack(divergences).sum()).backward()
        if clip is not None and mistake == "KL clipped":
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches():
    return list(zip(*(tensor.split(BATCH) for tensor in examples()), strict=True))


def difference(model, other):
    """The largest one between parameters, relative to what a step moves."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs) / RATE


def almost_superfluous():
    """A network in which every third weight is noise: dropped as soon as that may happen."""
    model = network()
    with torch.no_grad():
        for each in sparsevd.posterior.posteriors(model):
            each.log_sigma2.view(-1)[::3] = 4.0
    return model


def zeros(model):
    return [each.theta == 0 for each in sparsevd.posterior.posteriors(model)]
