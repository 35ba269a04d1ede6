"""Figure 2 of the paper: the original, multiplicative parametrisation (θ, α) against the additive one (θ, σ²).

    OMP_NUM_THREADS=1 python experiments/variance_reduction.py run --method additive      # an hour or so each; goes on
    python experiments/variance_reduction.py figure

Two layers of 1,000 units on MNIST, the same random weights and the same first posterior for both, Adam at a rate of
1e-4, the KL with its full weight from the start. The bound and the sparsity after every epoch; and, at points of the
additive run, the variance over the noise of the gradient of θ, in both parametrisations of the same posterior, on the
same mini-batch.

The original changes log α by about a step of Adam at a time, 1e-4: from where it starts, 42,000 steps (70 epochs) can
bring at most some 70 % of the weights beyond log α = 3, whatever the gradients are. That is part of what the additive
parametrisation is better at: its log α = log σ² − log θ² also grows as θ shrinks.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from records import Records, chart
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import sparsevd
from sparsevd.baselines.noise import noisy_outputs
from sparsevd.baselines.variational_dropout import multiplicative_noise
from sparsevd.posterior import equations, posteriors
from sparsevd.posterior.divergence import summed_kl
from sparsevd.training.optimizer import BoundAdam
from sparsevd.zoo.datasets import load
from sparsevd.zoo.models import MODELS

N = 60_000
BATCH = 100
RATE = 1e-4
DRAWS = 50
INITIAL_LOG_SIGMA2 = -8.0
BINS = [(-8.0, -4.0), (-4.0, 0.0), (0.0, 4.0), (4.0, 8.0), (8.0, 20.0)]


class Additive:
    """(θ, log σ²) for every weight: the library's layers, and its Adam, which adds the gradient of the KL itself."""

    def __init__(self, network: nn.Module):
        self.model = sparsevd.sparsify(network, initial_log_sigma2=INITIAL_LOG_SIGMA2)
        self.optimizer: torch.optim.Optimizer = BoundAdam(self.model, RATE, kl_weight=1 / N)

    def noise(self) -> AbstractContextManager[None]:
        return nullcontext()

    def objective(self, nll: Tensor) -> Tensor:
        return nll

    def log_alphas(self) -> list[Tensor]:
        return [each.log_alpha() for each in posteriors(self.model)]

    def kl(self) -> Tensor:
        return sparsevd.kl(self.model)


class Original:
    """(θ, log α) for every weight, started at the same posterior."""

    def __init__(self, network: nn.Module):
        self.model = network
        self.layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
        thetas = [layer.weight.detach() for layer in self.layers]
        size = [theta.abs().clamp(min=1e-8).log() for theta in thetas]  # some of a million random weights are zero
        self.alphas = [(INITIAL_LOG_SIGMA2 - 2 * s).requires_grad_() for s in size]
        self.ones = [torch.ones_like(theta) for theta in thetas]
        parameters = [*network.parameters(), *self.alphas]
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def noise(self) -> AbstractContextManager[None]:
        return noisy_outputs({layer: multiplicative_noise(layer, a) for layer, a in self._pairs()})

    def _pairs(self) -> list[tuple[nn.Linear, Tensor]]:
        return list(zip(self.layers, self.alphas, strict=True))

    def objective(self, nll: Tensor) -> Tensor:
        return nll + self.kl() / N

    def log_alphas(self) -> list[Tensor]:
        return [log_alpha.detach() for log_alpha in self.alphas]

    def kl(self) -> Tensor:
        """The KL is a function of α alone; with θ = 1 it is that of log σ² = log α."""
        return summed_kl(list(zip(self.ones, self.alphas, strict=True)))


PARAMETRISATIONS: dict[str, type[Additive] | type[Original]] = {"additive": Additive, "original": Original}


def train(method: str, epochs: int, seed: int) -> dict[str, Any]:
    images = load("mnist")
    x, y = images.train
    torch.manual_seed(seed)
    network = MODELS["fc-1000-1000"](10)
    posterior = PARAMETRISATIONS[method](copy.deepcopy(network))
    checkpoint = Path("runs") / f"variance-reduction-{method}-seed{seed}.safetensors"
    state = restored(checkpoint, posterior.optimizer)
    state = state or {"history": [row(posterior, 0, x, y)], "gradient_variance": [], "seconds": 0.0}
    if len(state["history"]) > epochs + 1:
        raise SystemExit(f"{checkpoint} has {len(state['history']) - 1} epochs, more than {epochs}; remove it")
    while (epoch := len(state["history"])) <= epochs:
        start = time.monotonic()
        if method == "additive" and epoch - 1 in (1, epochs // 2, epochs - 1):
            network.load_state_dict(posterior.model.state_dict(), strict=False)
            bins = gradient_variance(network, posterior.log_alphas(), x[:BATCH], y[:BATCH])
            state["gradient_variance"].append({"epoch": epoch - 1, "bins": bins})
        torch.manual_seed(1000 * seed + epoch)
        posterior.model.train()
        with posterior.noise():
            for chosen in torch.randperm(N).split(BATCH):
                nll = F.cross_entropy(posterior.model(x[chosen]), y[chosen])
                posterior.optimizer.zero_grad()
                posterior.objective(nll).backward()  # type: ignore[no-untyped-call]
                posterior.optimizer.step()
        state["history"].append(row(posterior, epoch, x, y))
        state["seconds"] += time.monotonic() - start
        save(checkpoint, posterior.optimizer, state)
        print(method, state["history"][-1], flush=True)
    network.load_state_dict(posterior.model.state_dict(), strict=False)
    return state | {"seconds": round(state["seconds"])} | measured(network, posterior.log_alphas(), images.test)


@torch.no_grad()
def measured(network: nn.Module, log_alphas: list[Tensor], test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The test error of the means, with all of them and without those of log α > 3, and what is left of each layer."""
    before = sparsevd.evaluate(network, test).error
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    for layer, log_alpha in zip(layers, log_alphas, strict=True):
        layer.weight.masked_fill_(log_alpha > 3, 0)
    return {
        "error": sparsevd.evaluate(network, test).error,
        "error_before_threshold": before,
        "per_layer": sparsevd.summary(network).per_layer(),
    }


@torch.no_grad()
def row(posterior: Additive | Original, epoch: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The bound, from one sample per image, and the sparsity."""
    posterior.model.train()
    with posterior.noise():
        parts = zip(x.split(1000), y.split(1000), strict=True)
        nll = sum(F.cross_entropy(posterior.model(a), b, reduction="sum").item() for a, b in parts)
    above = torch.cat([log_alpha.flatten() for log_alpha in posterior.log_alphas()]) > 3
    sparsity = 100 * above.double().mean().item()
    return {"epoch": epoch, "elbo": -nll - posterior.kl().item(), "nll": nll, "sparsity": sparsity}


def save(path: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {f"{i}": p.detach() for i, p in enumerate(parameters)}
    tensors |= {f"{i}.{slot}": value for i, p in enumerate(parameters) for slot, value in optimizer.state[p].items()}
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, {"state": json.dumps(state)})
    temporary.replace(path)


def restored(path: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with safe_open(path, "pt") as file, torch.no_grad():
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            parameter.copy_(file.get_tensor(f"{i}"))
            slots = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {slot: file.get_tensor(f"{i}.{slot}") for slot in slots}
        return dict(json.loads(file.metadata()["state"]))


def additive_noise(layer: nn.Linear, log_sigma2: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean γ = A·θ + bias, variance δ = A²·σ² (eq. 17)."""
    return lambda input, output: equations.noisy_output(
        output, F.linear(input * input, log_sigma2.exp()), torch.randn_like(output)
    )


def gradient_variance(network: nn.Module, log_alphas: list[Tensor], x: Tensor, y: Tensor) -> list[dict[str, float]]:
    """Variance over the noise of ∂NLL/∂θ, mean over the weights of each range of log α, in both parametrisations."""
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    theta = [layer.weight for layer in layers]
    log_alphas = [log_alpha.detach() for log_alpha in log_alphas]
    log_sigma2 = [a + 2 * t.detach().abs().log() for a, t in zip(log_alphas, theta, strict=True)]
    moments = {}
    for name, make, second in (
        ("additive", additive_noise, log_sigma2),
        ("original", multiplicative_noise, log_alphas),
    ):
        noise = {layer: make(layer, s) for layer, s in zip(layers, second, strict=True)}
        first, square = ([torch.zeros_like(t, dtype=torch.float64) for t in theta] for _ in range(2))
        torch.manual_seed(0)
        with noisy_outputs(noise):
            network.train()
            for _ in range(DRAWS):
                gradients = torch.autograd.grad(F.cross_entropy(network(x), y), theta)
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
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--method", choices=PARAMETRISATIONS, action="append")
    arguments = parser.parse_args()
    records = Records("variance_reduction")
    if arguments.action == "run":
        for method in arguments.method or PARAMETRISATIONS:
            if not records.find(method=method, epochs=arguments.epochs):
                result = train(method, arguments.epochs, seed=0)
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
                    command=f"python experiments/variance_reduction.py run --method {method} --epochs {last['epoch']}",
                    **result,
                )
    figure(records)


if __name__ == "__main__":
    main()
