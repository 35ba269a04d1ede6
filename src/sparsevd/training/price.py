"""`threshold="auto"`: cut where what is lost in the bound stays below a stated sum.

The order of the weights is that of log α, whatever the threshold; only the cut is open. Each weight has a price in nats
of the bound (`equations.price`), and the cheapest go as long as together they cost at most a share of the network's KL.
The KL is what all weights cost in the same bound. So the share means the same for small and large networks, for few and
many examples, and for any β, which weighs prices and KL alike; and it needs no data. Where there is data, it checks.
"""

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.conversion import prune
from sparsevd.errors import SparseVDWarning
from sparsevd.layers.modes import in_eval_mode
from sparsevd.posterior import equations, required_posteriors
from sparsevd.training.data import Data, batches, checked
from sparsevd.training.evaluation import Loss, device_of, evaluate
from sparsevd.training.inputs import Forward, call, changed

logger = logging.getLogger("sparsevd")

# Of the KL. On LeNet-300-100 it puts the cut near log α = 1 (experiments/threshold.py). The true price is higher than
# the formula's, since no run ends at the optimum: there, several times. So half a thousandth, and not one per cent.
PRICE_SHARE = 5e-4
# A rise of the error is more than the noise of measuring beyond so many standard errors of the paired difference.
STANDARD_ERRORS = 2.0
PAIRED_BATCH = 50  # small, so that there are many differences of losses, whose spread says how sure their mean is


@torch.no_grad()
def cheap_threshold(
    pairs: Sequence[tuple[Tensor, Tensor]], most: float = math.inf, share: float = PRICE_SHARE
) -> float:
    """The lowest cut of log α at which all that it takes costs at most this share of the KL; at most `most`.

    `pairs` are (θ, log σ²). A weight that is zero already costs nothing.
    """
    log_alpha = torch.cat([equations.log_alpha(*pair).flatten().cpu() for pair in pairs]).sort(descending=True).values
    allowed = share * -equations.negative_kl(log_alpha.to(torch.float64)).sum()
    taken = int((equations.price(log_alpha).cumsum(0) <= allowed).sum())
    return min(most, log_alpha[taken].item()) if taken < len(log_alpha) else most


@dataclass(frozen=True)
class Auto:
    """The cut that `prune(threshold="auto")` asks for."""

    share: float = PRICE_SHARE

    def threshold_of(
        self, model: nn.Module, data: Data | None = None, loss: Loss = F.cross_entropy, forward: Forward = call
    ) -> float | None:
        """Where to cut log α; None for the model's own threshold, where data shows that the cheap one costs too much.

        Checked on `data`, example by example against the network at its own threshold, if there is any.
        """
        found = required_posteriors(model)
        own = max(each.threshold for each in found)
        threshold = cheap_threshold([(each.theta, each.log_sigma2) for each in found], own, self.share)
        logger.info("threshold='auto' is log α = %.3f, for %g of the KL", threshold, self.share)
        if data is None or threshold == own:
            return threshold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparseVDWarning)  # of layers that are empty; the last cut says so again
            before, after = prune(model), prune(model, threshold=threshold)
        worse = harm(before, after, data, loss, forward)
        if worse is None:
            return threshold
        warnings.warn(
            f"threshold='auto' is log α = {threshold:.2f} by its price in the bound, but there {worse} on the data "
            "given; the network's own threshold is kept. Longer training brings weights closer to the optimum that the "
            "price assumes",
            SparseVDWarning,
            stacklevel=4,
        )
        return None


@torch.no_grad()
def harm(
    before: nn.Module, after: nn.Module, data: Data, loss: Loss = F.cross_entropy, forward: Forward = call
) -> str | None:
    """What is worse in the second network, if that is more than the noise of measuring.

    The two are compared on the same examples: what both get wrong says nothing about their difference, so it is known
    better than the error of either.
    """
    device = device_of(before)
    lost, gained, classification = 0, 0, True
    losses: list[tuple[float, float]] = []
    with in_eval_mode(before), in_eval_mode(after):
        for inputs, target in batches(checked(data, "data"), PAIRED_BATCH, shuffle=False):
            x, y = changed(inputs, lambda tensor: tensor.to(device)), target.to(device)
            first, second = forward(before, x), forward(after, x)
            losses.append((loss(first, y).item(), loss(second, y).item()))
            misses = _missed(first, y), _missed(second, y)
            classification = classification and misses[0] is not None
            if misses[0] is not None and misses[1] is not None:
                lost += int((misses[1] & ~misses[0]).sum())
                gained += int((misses[0] & ~misses[1]).sum())
    if classification:
        if lost - gained <= STANDARD_ERRORS * math.sqrt(lost + gained):
            return None
        errors = [evaluate(each, data, loss, forward=forward).error or 0.0 for each in (before, after)]
        return f"the error rises from {errors[0]:.2f} to {errors[1]:.2f} % ({lost:,} examples lost, {gained:,} won)"
    pairs = torch.tensor(losses, dtype=torch.float64)
    rises = pairs[:, 1] - pairs[:, 0]
    noise = rises.std().item() / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
    if not rises.mean().item() > STANDARD_ERRORS * noise:
        return None
    return f"the loss rises from {pairs[:, 0].mean():.4g} to {pairs[:, 1].mean():.4g}"


def _missed(output: object, target: Tensor) -> Tensor | None:
    """Which examples are classified wrongly; None where this is no classification of one class per example."""
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    return output.argmax(dim=1) != target
