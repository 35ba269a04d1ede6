"""One quadratic problem: the expected log-likelihood of a linear model in standard units, and its bound."""

from dataclasses import dataclass

import numpy as np

from sparsevd.linear_model._design import Design
from sparsevd.linear_model._equations import (
    LARGEST_LOG_ALPHA,
    Array,
    best_log_alpha,
    best_log_alpha_given_theta,
    log_support_prior,
    negative_kl,
    theta,
)

# The noise is not believed to be below this share of the target's variance: there, rounding is all that is left.
SMALLEST_NOISE = 1e-12


@dataclass(frozen=True)
class State:
    """A support with its posterior: the features kept, their θ and log α, the energy left and the bound."""

    support: Array
    theta: Array
    log_alpha: Array
    energy: float
    bound: float


class Problem:
    """Features in standard units, a target, and the price of a support.

    `energy` is E = ‖y − X̃θ‖² + Σ αᵢθᵢ², which eq. 16 makes equal to yᵀy − θᵀX̃ᵀy. The noise variance is either
    learned, s² = E / n, or known to be 1, as in the quadratic bounds of the classifiers.
    """

    def __init__(self, design: Design, target: Array, *, learn_noise: bool, multiplicity: bool, threshold: float):
        self.design = design
        self.xty = design.times_transposed(target)
        self.yty = float(target @ target)
        self.n = design.total_weight
        self.learn_noise = learn_noise
        self.threshold = min(threshold, LARGEST_LOG_ALPHA - 1)  # α = ∞ is dropped, whatever the threshold
        self.candidates = int(design.varies.sum())
        self.n_solved = 0
        self.converged = True
        self._multiplicity = multiplicity
        self._gram = np.empty((design.n_features, 0))
        self._slot = np.full(design.n_features, -1)

    def gram_columns(self, index: Array) -> Array:
        """X̃ᵀX̃[:, index]. Columns are computed when first asked for: only features that were ever tried cost time."""
        missing = index[self._slot[index] < 0]
        if len(missing):
            used = int((self._slot >= 0).sum())
            if used + len(missing) > self._gram.shape[1]:
                room = min(self.design.n_features, 2 * (used + len(missing)))
                grown = np.empty((self.design.n_features, room), order="F")
                grown[:, :used] = self._gram[:, :used]
                self._gram = grown
            slots = np.arange(used, used + len(missing))
            self._gram[:, slots] = self.design.times_transposed(self.design.columns(missing))
            self._slot[missing] = slots
        return self._gram[:, self._slot[index]]

    def gram(self, index: Array) -> Array:
        self.gram_columns(index[self._slot[index] < 0])
        return self._gram[np.ix_(index, self._slot[index])]

    def noise_variance(self, energy: float | Array) -> float | Array:
        floor = SMALLEST_NOISE * self.yty / self.n or 1.0
        return np.maximum(energy / self.n, floor) if self.learn_noise else np.ones_like(energy)

    def log_likelihood(self, energy: float | Array) -> float | Array:
        """E log p(y | X, w) at the best noise variance. With known noise, constants of y are left to the caller."""
        if not self.learn_noise:
            return -0.5 * energy
        s2 = self.noise_variance(energy)
        return -0.5 * self.n * np.log(2 * np.pi * s2) - 0.5 * energy / s2

    def support_price(self, kept: int) -> float:
        """log p(S), or 0 without `multiplicity`: then every support is equally likely, and the constant is left out."""
        return float(log_support_prior(kept, self.candidates)) if self._multiplicity else 0.0

    def score(self, state: State) -> float:
        return state.bound + self.support_price(len(state.support))

    def empty(self) -> State:
        nothing = np.empty(0)
        bound = float(self.log_likelihood(self.yty))
        return State(np.empty(0, dtype=np.intp), nothing, nothing, self.yty, bound)

    def settle(self, support: Array, log_alpha: Array, tol: float, max_iter: int = 1000) -> State:
        """Climb the bound over (θ, α, s²) from a start until it gains less than `tol` nats; prune on the way.

        Given α, θ and s² have closed forms (eq. 16, s² = E / n). Given those, the best αᵢ for θ₋ᵢ fixed follows from
        t = θᵢ(1 + αᵢ)/s. Taking it for all i at once is fast but can overshoot for correlated features; then the step
        is replaced by the best α for θ fixed, which cannot.
        """
        gram, xty = self.gram(support), self.xty[support]
        state, careful = None, log_alpha
        for _ in range(max_iter):
            self.n_solved += 1
            alpha = np.exp(log_alpha)
            weights = theta(gram, xty, alpha)
            energy = max(self.yty - float(xty @ weights), 0.0)
            bound = float(self.log_likelihood(energy)) + float(negative_kl(log_alpha).sum())
            if state is not None and bound < state.bound and log_alpha is not careful:
                log_alpha = careful
                continue
            gain = np.inf if state is None else bound - state.bound
            state = State(support, weights, log_alpha, energy, bound)
            if gain < tol:
                self.converged = True
                return state
            s2 = self.noise_variance(energy)
            careful = best_log_alpha_given_theta(weights**2 / s2)
            log_alpha = best_log_alpha((weights * (1 + alpha)) ** 2 / s2)
            kept = log_alpha <= self.threshold
            if not kept.all():
                support, log_alpha, careful = support[kept], log_alpha[kept], careful[kept]
                gram, xty, state = gram[np.ix_(kept, kept)], xty[kept], None
        self.converged = False
        return state or self.empty()
