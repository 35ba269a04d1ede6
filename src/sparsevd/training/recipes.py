"""Named ways to train: the default, the paper's own, and ours for special wishes.

All of them maximise the same bound: the weight of the KL is 1/N once the warm-up is over.
"""

from dataclasses import dataclass, field, replace

from sparsevd.errors import ArgumentError
from sparsevd.training.loop import FitConfig


@dataclass(frozen=True)
class Recipe:
    """What to do, and what for."""

    about: str
    fit: FitConfig = field(default_factory=FitConfig)
    pretrain_epochs: int = 0


# As the paper says: nothing is dropped before the end. Where it does not say: Adam's own β₂, our warm-up of β over the
# first fifth and first log σ², and that the rate falls to zero from a pre-trained network too.
_PAPER = FitConfig(
    epochs=200,
    learning_rate=1e-4,
    decay="linear",
    log_sigma2_lr_ratio=1.0,
    late_from=1.0,
    drop_from=1.0,
    contract=False,
    adam_beta2=0.999,
)

RECIPES: dict[str, Recipe] = {
    "default": Recipe("good sparsity and error in few epochs"),
    "fast": Recipe(
        "half of the epochs, about as much error, a quarter less sparse: a longer warm-up",
        FitConfig(epochs=20, warm_up_end=0.4),
    ),
    "thorough": Recipe(
        "half more epochs and a longer warm-up: a tenth of a point less error on held-out images, as sparse",
        FitConfig(epochs=60, warm_up_end=0.25),
    ),
    "sparsest": Recipe(
        "fewer weights and more error: twice the rate, log σ² as slow as before until it catches up, an earlier drop",
        FitConfig(learning_rate=8e-3, log_sigma2_lr_ratio=0.05, drop_from=0.4),
    ),
    "paper": Recipe("the paper's: 200 epochs from random weights, the rate linearly from 1e-4 to zero", _PAPER),
    "paper-pretrained": Recipe(
        "the paper's for networks that do not start well: dense training first, then 30 epochs at 1e-5",
        replace(_PAPER, epochs=30, learning_rate=1e-5, warm_up_end=0.0),
        pretrain_epochs=40,
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ArgumentError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
