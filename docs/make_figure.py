"""Draw docs/how-it-works.svg from a finished run of LeNet-300-100 on MNIST.

    python docs/make_figure.py runs/demo

Left: the KL term of eq. 14 beside its exact value. Middle: log α after training. Right: which pixels are still read.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from sparsevd.posterior import THRESHOLD, equations
from sparsevd.training.checkpoint import Checkpoint

INK, BLUE, RED, GREY = "#22272e", "#2f6fb3", "#c8452f", "#9aa4b0"


def draw_kl(axes):
    log_alpha = torch.linspace(-8, 8, 400, dtype=torch.float64)
    exact, ours = equations.negative_kl_exact(log_alpha), equations.negative_kl(log_alpha)
    axes.plot(log_alpha, exact, color=GREY, linewidth=5, label="exact, eq. 13")
    axes.plot(log_alpha, ours, color=BLUE, linewidth=1.6, label="approximation, eq. 14")
    small = log_alpha <= 0.6
    kingma = equations.negative_kl_kingma_cubic(log_alpha)
    axes.plot(
        log_alpha[small], kingma[small], color=RED, linewidth=1.2, linestyle="--", label="Kingma et al., for α ≤ 1"
    )
    axes.set(title="1. the prior rewards noise", xlabel="log α", ylabel="−KL per weight")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def draw_log_alpha(axes, log_alpha):
    kept = int((log_alpha <= THRESHOLD).sum())
    _, _, bars = axes.hist(log_alpha.clamp(-9.9, 14.9).numpy(), bins=torch.linspace(-10, 15, 51).tolist(), log=True)
    for bar in bars:
        bar.set_facecolor(BLUE if bar.get_x() < THRESHOLD else GREY)
    axes.axvline(THRESHOLD, color=RED, linewidth=1.2)
    top = axes.get_ylim()[1]
    axes.text(THRESHOLD + 0.5, top * 0.5, "log α > 3:\nnoise drowns\nthe weight", fontsize=8, va="top")
    axes.text(14, top * 0.01, f"{len(log_alpha) - kept:,}\ndropped", fontsize=8, ha="right")
    axes.text(-9.5, top * 0.01, f"{kept:,} kept", fontsize=8, color=BLUE)
    axes.set(title="2. training sorts the weights", xlabel="log α after training", ylabel="weights")


def draw_pixels(axes, kept):
    per_pixel = kept.sum(0).reshape(28, 28)
    image = axes.imshow(per_pixel, cmap="Blues", interpolation="nearest")
    read = int((per_pixel > 0).sum())
    axes.set(title="3. what is left", xlabel=f"{read} of 784 pixels are still read", xticks=[], yticks=[])
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.046)
    bar.set_label("weights kept per pixel", fontsize=8)
    bar.outline.set_visible(False)


def main() -> None:
    checkpoint = Checkpoint.load(Path(sys.argv[1]) / "checkpoint.safetensors")
    layers = {
        name: equations.log_alpha(checkpoint.model[f"{name}.weight"], checkpoint.model[f"{name}.log_sigma2"])
        for name in checkpoint.layers
    }
    log_alpha = torch.cat([layer.flatten() for layer in layers.values()])
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "sparsevd", "axes.edgecolor": GREY, "text.color": INK})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    draw_kl(axes[0])
    draw_log_alpha(axes[1], log_alpha)
    draw_pixels(axes[2], layers["fc1"] <= THRESHOLD)
    for panel in axes[:2]:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parent / "how-it-works.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
