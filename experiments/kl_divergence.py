"""Figure 1 of the paper: approximations of −KL against the exact value, and the deviations that it claims.

    python experiments/kl_divergence.py          # a second; results/kl_divergence.json and .svg

The exact value (eq. 13) is an integral, done to about 1e-12. The constant C is free: the deviation is given with the C
that each approximation was published with, and with the C that suits it best.
"""

import torch
from records import Records, chart

from sparsevd.posterior import equations

LOG_ALPHA = torch.linspace(-12, 12, 4801, dtype=torch.float64)
APPROXIMATIONS = {
    "Sparse VD, eq. 14": (equations.negative_kl, "#c1272d", float("inf"), 0.009),
    "Kingma et al., polynomial": (equations.negative_kl_kingma_cubic, "#0000a7", 0.0, 0.04),
    "Kingma et al., bound": (equations.negative_kl_kingma_bound, "#008176", 0.0, None),
}


def main() -> None:
    records = Records("kl_divergence")
    records.path.unlink(missing_ok=True)
    exact = equations.negative_kl_exact(LOG_ALPHA)
    for name, (approximation, _, limit, claimed) in APPROXIMATIONS.items():
        value = approximation(LOG_ALPHA)
        error = value - exact
        inside = limit >= LOG_ALPHA
        # The best constant halves the range of the error.
        constant = ((error[inside].max() + error[inside].min()) / 2).item()
        record = records.add(
            approximation=name,
            log_alpha_up_to=None if limit == float("inf") else limit,
            largest_deviation=error[inside].abs().max().item(),
            largest_deviation_with_best_constant=(error[inside] - constant).abs().max().item(),
            claimed=claimed,
            curve={"log_alpha": _some(LOG_ALPHA), "exact": _some(exact), "approximation": _some(value)},
        )
        print(
            f"{name}: largest deviation {record['largest_deviation']:.4f}, with the best constant "
            f"{record['largest_deviation_with_best_constant']:.4f}; the paper says {claimed}"
        )
    figure(records)


def _some(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values[::40].tolist()]


def figure(records: Records) -> None:
    drawing, axes, path = chart("kl_divergence", 2, figsize=(9, 3.2))
    for number, record in enumerate(records.all()):
        _, colour, limit, _ = APPROXIMATIONS[record["approximation"]]
        log_alpha, exact, value = record["curve"].values()
        if number == 0:
            axes[0].plot(log_alpha, exact, color="black", linewidth=3, label="exact, eq. 13")
        axes[0].plot(log_alpha, value, "--", color=colour, label=record["approximation"])
        error = [(a, v - e) for a, e, v in zip(log_alpha, exact, value, strict=True) if a <= limit]
        axes[1].plot(*zip(*error, strict=True), color=colour, label=record["approximation"])
    axes[0].set(xlabel="log α", ylabel="−KL", ylim=(-6.5, 1), title="−KL of one weight")
    axes[0].legend(fontsize=8)
    axes[1].set(xlabel="log α", ylabel="deviation from the exact value", ylim=(-0.1, 0.1), title="deviations")
    drawing.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
