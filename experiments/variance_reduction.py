"""Figure 2 of the paper: the original, multiplicative parametrisation (θ, α) against the additive one (θ, σ²).

    OMP_NUM_THREADS=1 python experiments/variance_reduction.py run      # two units, one per parametrisation
    python experiments/variance_reduction.py figure

Two layers of 1,000 units on MNIST, the same random weights and the same first posterior for both, Adam at a rate of
1e-4, the KL with its full weight from the start. The bound and the sparsity after every epoch; and, at points of the
additive run, the variance over the noise of the gradient of θ, in both parametrisations of the same posterior, on the
same mini-batch.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, chart
from torch import Tensor, nn

from sparsevd import functional
from sparsevd.baselines.noise import noisy_outputs
from sparsevd.baselines.variational_dropout import multiplicative_noise
from sparsevd.data import load
from sparsevd.models import MODELS

BATCH = 100
RATE = 1e-4
DRAWS = 50
INITIAL_LOG_SIGMA2 = -8.0
BINS = [(-8.0, -4.0), (-4.0, 0.0), (0.0, 4.0), (4.0, 8.0), (8.0, 20.0)]


class Posterior:
    """A network with (θ, log σ²) or (θ, log α) for every weight, and the noise that belongs to it."""

    def __init__(self, additive: bool, seed: int):
        torch.manual_seed(seed)
        self.network = MODELS["fc-1000-1000"](10)
        self.additive = additive
        self.layers: list[nn.Linear] = [m for m in self.network.modules() if isinstance(m, nn.Linear)]
        self.second = [torch.full_like(layer.weight, INITIAL_LOG_SIGMA2).detach() for layer in self.layers]
        if not additive:  # the same posterior, said otherwise
            self.second = [
                s - 2 * layer.weight.detach().abs().log() for s, layer in zip(self.second, self.layers, strict=True)
            ]
        for tensor in self.second:
            tensor.requires_grad_()

    def noise(self) -> dict[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
        make = additive_noise if self.additive else multiplicative_noise
        return {layer: make(layer, second) for layer, second in zip(self.layers, self.second, strict=True)}

    def log_alphas(self) -> list[Tensor]:
        if not self.additive:
            return self.second
        return [functional.log_alpha(layer.weight, s) for layer, s in zip(self.layers, self.second, strict=True)]

    def kl(self) -> Tensor:
        return torch.stack([-functional.negative_kl(log_alpha).sum() for log_alpha in self.log_alphas()]).sum()

    def sparsity(self) -> float:
        pruned = sum(int((log_alpha > 3).sum()) for log_alpha in self.log_alphas())
        return 100 * pruned / sum(s.numel() for s in self.second)


def additive_noise(layer: nn.Linear, log_sigma2: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean γ = A·θ + bias, variance δ = A²·σ² (eq. 17)."""
    return lambda input, output: functional.noisy_output(
        output, F.linear(input * input, log_sigma2.exp()), torch.randn_like(output)
    )


def train(additive: bool, epochs: int, seed: int) -> dict[str, Any]:
    x, y = load("mnist").train
    posterior = Posterior(additive, seed)
    optimizer = torch.optim.Adam([*posterior.network.parameters(), *posterior.second], lr=RATE, fused=True)
    history, variances = [], []
    start = time.monotonic()
    for epoch in range(epochs):
        if additive and epoch in (1, epochs // 2, epochs - 1):
            variances.append({"epoch": epoch, "bins": gradient_variance(posterior, x[:BATCH], y[:BATCH])})
        torch.manual_seed(1000 * seed + epoch)
        total = 0.0
        with noisy_outputs(posterior.noise()):
            for chosen in torch.randperm(len(x)).split(BATCH):
                nll = F.cross_entropy(posterior.network(x[chosen]), y[chosen])
                loss = nll + posterior.kl() / len(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += nll.item() * len(chosen)
        with torch.no_grad():
            bound = -total - posterior.kl().item()
        history.append({"epoch": epoch + 1, "elbo": bound, "nll": total, "sparsity": posterior.sparsity()})
        print(f"{'additive' if additive else 'original'} {history[-1]}", flush=True)
    return {"history": history, "gradient_variance": variances, "seconds": round(time.monotonic() - start)}


def gradient_variance(posterior: Posterior, x: Tensor, y: Tensor) -> list[dict[str, float]]:
    """Variance over the noise of ∂NLL/∂θ, mean over the weights of each range of log α, in both parametrisations."""
    theta = [layer.weight for layer in posterior.layers]
    log_alphas = [log_alpha.detach() for log_alpha in posterior.log_alphas()]
    moments = {}
    for name, make, second in (
        ("additive", additive_noise, [s.detach() for s in posterior.second]),
        ("original", multiplicative_noise, log_alphas),
    ):
        noise = {layer: make(layer, s) for layer, s in zip(posterior.layers, second, strict=True)}
        first, square = ([torch.zeros_like(t, dtype=torch.float64) for t in theta] for _ in range(2))
        torch.manual_seed(0)
        with noisy_outputs(noise):
            posterior.network.train()
            for _ in range(DRAWS):
                gradients = torch.autograd.grad(F.cross_entropy(posterior.network(x), y), theta)
                for f, s, g in zip(first, square, gradients, strict=True):
                    f += g
                    s += g.double() ** 2
        moments[name] = [s / DRAWS - (f / DRAWS) ** 2 for f, s in zip(first, square, strict=True)]
    rows = []
    for low, high in BINS:
        inside = [(a > low) & (a <= high) for a in log_alphas]
        count = sum(int(i.sum()) for i in inside)
        if count:
            means = {
                name: sum(v[i].sum().item() for v, i in zip(values, inside, strict=True)) / count
                for name, values in moments.items()
            }
            rows.append({"from": low, "to": high, "weights": count, **means})
    return rows


def figure(records: Records) -> None:
    chart_, axes, path = chart("variance_reduction", 3, figsize=(12, 3.2))
    for record in records.all():
        colour = "#c1272d" if record["method"] == "additive" else "#0000a7"
        epochs = [row["epoch"] for row in record["history"]]
        axes[0].plot(epochs, [row["elbo"] / 1000 for row in record["history"]], color=colour, label=record["method"])
        axes[1].plot(epochs, [row["sparsity"] for row in record["history"]], color=colour, label=record["method"])
        if record["gradient_variance"]:
            bins = record["gradient_variance"][-1]["bins"]
            places = range(len(bins))
            for name, tint in (("additive", "#c1272d"), ("original", "#0000a7")):
                axes[2].plot(places, [row[name] for row in bins], "o-", color=tint, label=name)
            axes[2].set_xticks(places, [f"{row['from']:.0f} to {row['to']:.0f}" for row in bins])
    axes[0].set(xlabel="epoch", ylabel="bound, 1,000 nats", title="variational bound")
    axes[1].set(xlabel="epoch", ylabel="log α > 3, % of weights", title="sparsity")
    axes[2].set(xlabel="log α", yscale="log", title="variance of the gradient of θ", ylabel="mean over weights")
    axes[0].legend()
    chart_.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "figure"])
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    records = Records("variance_reduction")
    if arguments.action == "run":
        for method in ("additive", "original"):
            if not records.find(method=method, epochs=arguments.epochs):
                result = train(method == "additive", arguments.epochs, seed=0)
                last = result["history"][-1]
                records.add(
                    net="fc-1000-1000",
                    data="mnist",
                    method=method,
                    seed=0,
                    epochs=arguments.epochs,
                    elbo=last["elbo"],
                    sparsity=last["sparsity"],
                    ratio=None if math.isclose(last["sparsity"], 100) else 100 / (100 - last["sparsity"]),
                    command=f"python experiments/variance_reduction.py run --epochs {arguments.epochs}",
                    **result,
                )
    figure(records)


if __name__ == "__main__":
    main()
