"""What a weight with noise is: the paper's equations, and the tensors that carry them."""

from sparsevd.posterior.posterior import (
    BELOW_WEIGHTS,
    THRESHOLD,
    NoisyModule,
    Posterior,
    biases,
    checked_sparsity,
    checked_threshold,
    is_noisy,
    label_of,
    named_posteriors,
    noise_name,
    noisy_modules,
    posteriors,
    required_posteriors,
    switch_noise,
    threshold_for,
)

__all__ = [
    "BELOW_WEIGHTS",
    "THRESHOLD",
    "NoisyModule",
    "Posterior",
    "biases",
    "checked_sparsity",
    "checked_threshold",
    "is_noisy",
    "label_of",
    "named_posteriors",
    "noise_name",
    "noisy_modules",
    "posteriors",
    "required_posteriors",
    "switch_noise",
    "threshold_for",
]
