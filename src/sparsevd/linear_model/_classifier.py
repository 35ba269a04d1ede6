"""Sparse Variational Dropout logistic regression, binary and multinomial."""

# ruff: noqa: N803, N806  (X is scikit-learn's name for it)

import warnings
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.special import expit, log_expit, softmax
from sklearn.exceptions import ConvergenceWarning

from sparsevd.linear_model._checks import (
    check_positive,
    check_threshold,
    dense_columns,
    one_column_per_logit,
    training_data,
)
from sparsevd.linear_model._design import Design
from sparsevd.linear_model._equations import LARGEST_LOG_ALPHA, Array
from sparsevd.linear_model._estimator import LogitClassifier
from sparsevd.linear_model._problem import Problem, State
from sparsevd.linear_model._search import nested, refine
from sparsevd.posterior import THRESHOLD

# Nats: below this gain per round the supports are looked at again.
QUIET = 0.1
# Features to start with when all are too many: those most related to the labels.
SCREENED = 20


@dataclass
class Logit:
    """One linear function z = intercept + Σ xⱼwⱼ under the posterior, on the scale of the data."""

    support: Array
    log_alpha: Array
    price: float  # −KL of the weights and log p(S)
    coef: Array
    variance: Array
    mean: Array  # the point around which the weights' uncertainty acts: there the intercept makes up for it
    intercept: float

    def moments(self, X: Any) -> tuple[Array, Array]:
        """E z and Var z for every row."""
        columns = dense_columns(X, self.support)
        return columns @ self.coef + self.intercept, (columns - self.mean) ** 2 @ self.variance


def curvature(xi: Array) -> Array:
    """2λ(ξ) = tanh(ξ/2) / 2ξ of Jaakkola and Jordan (2000): log σ(z) ≥ log σ(ξ) + (z − ξ)/2 − λ(ξ)·(z² − ξ²)."""
    return np.where(xi > 1e-6, np.tanh(xi / 2) / (2 * np.maximum(xi, 1e-6)), 0.25)


class Fit:
    """Coordinate ascent on the bound, for one logit (two classes) or one per class.

    Two classes: log σ is bounded by a parabola in z (Jaakkola and Jordan, 2000). More: log Σₖ exp zₖ is first bounded
    by a + Σₖ log(1 + exp(zₖ − a)) (Bouchard, 2007), which parts the classes. Either way each logit is left with
    a regression of known noise 1, sample weights 2λ(ξ) and target κ/2λ(ξ), where eq. 16 is the inner step as before.
    """

    def __init__(self, X: Any, labels: Array, weight: Array, settings: "SparseVDClassifier") -> None:
        self.X, self.labels, self.weight, self.settings = X, labels, weight, settings  # labels: (N, logits), 0 or 1
        self.multinomial = labels.shape[1] > 1
        # Every class as likely as any other: where Σₖ log(1 + exp(zₖ − a)) + a touches log Σ exp zₖ most closely.
        self.a = np.full(len(labels), np.log(labels.shape[1] - 1) if self.multinomial else 0.0)
        self.xi = np.abs(np.repeat(self.a[:, None], labels.shape[1], axis=1))
        self.z = np.zeros(labels.shape)
        self.variance = np.zeros(labels.shape)
        self.logits: list[Logit] = []
        self.n_solved = 0

    def problem(self, k: int) -> tuple[Problem, float]:
        omega = curvature(self.xi[:, k])
        design = Design(self.X, self.weight * omega, self.settings.fit_intercept)
        target, offset = design.centred_target((self.labels[:, k] - 0.5) / omega + self.a)
        problem = Problem(
            design,
            target,
            learn_noise=False,
            multiplicity=self.settings.multiplicity,
            threshold=self.settings.threshold,
        )
        return problem, offset

    def take(self, k: int, problem: Problem, offset: float, state: State) -> None:
        """Make this state the posterior of logit k."""
        design, kept = problem.design, state.support
        coef = state.theta / design.norm[kept]
        self.logits[k] = Logit(
            kept,
            state.log_alpha,
            problem.score(state) + 0.5 * state.energy,
            coef,
            np.exp(state.log_alpha) * coef**2,
            design.mean[kept],
            offset - float(design.mean[kept] @ coef),
        )
        self.n_solved += problem.n_solved
        self.z[:, k], self.variance[:, k] = self.logits[k].moments(self.X)

    def tighten(self) -> None:
        """The best ξ, and in between the best a, for the present posterior: the bound touches the likelihood there."""
        self.xi = np.sqrt((self.z - self.a[:, None]) ** 2 + self.variance)
        if self.multinomial:
            omega = curvature(self.xi)
            self.a = (0.5 * self.labels.shape[1] - 1 + (omega * self.z).sum(axis=1)) / omega.sum(axis=1)
            self.xi = np.sqrt((self.z - self.a[:, None]) ** 2 + self.variance)

    def elbo(self) -> float:
        z, a = self.z, self.a[:, None]
        bound = self.labels * z - 0.5 * (z - a - self.xi) + log_expit(-self.xi)
        total = bound.sum(axis=1) - (self.a if self.multinomial else 0.0)
        return float(self.weight @ total) + sum(logit.price for logit in self.logits)

    def climb(self, start: Array) -> bool:
        """Rounds over the logits until the bound gains less than tol; whether it did so within max_iter rounds.

        From nothing, features may enter in every round. From everything, they leave first, and supports are looked at
        again whenever the bound is quiet.
        """
        zero = np.zeros(len(start))
        self.logits = [Logit(start, zero, 0.0, zero, zero, zero, 0.0)] * self.labels.shape[1]
        saved, before, stride = self.snapshot(), -np.inf, 1.0
        shrink, look = len(start) > 0, False
        for _ in range(self.settings.max_iter):
            supports = [logit.support for logit in self.logits]
            for k in range(len(self.logits)):
                problem, offset = self.problem(k)
                state = problem.settle(self.logits[k].support, self.logits[k].log_alpha, 0.1 * self.settings.tol)
                if look and shrink:
                    state = nested(problem, state)
                if look or not len(start):
                    state = refine(problem, state, max_moves=5)
                self.take(k, problem, offset, state)
            self.tighten()
            bound = self.elbo()
            if bound < before and stride > 1:
                self.restore(saved)
                stride = 1.0
                continue
            gain, before = bound - before, bound
            shrink = shrink and not look
            same = all(np.array_equal(old, new.support) for old, new in zip(supports, self.logits, strict=True))
            if gain < self.settings.tol and look and same:
                return True
            look = gain < QUIET
            # ξ and a creep in one direction when classes separate well. Longer and longer strides that way save most
            # of the rounds; one that lowers the bound is taken back above.
            stride *= 1.5
            previous, saved = saved, self.snapshot()
            growth = (self.xi + 1e-9) / (previous.xi + 1e-9)
            self.xi = self.xi * np.clip(growth, 0.5, 2) ** (stride - 1)
            self.a = self.a + (stride - 1) * (self.a - previous.a)
        self.restore(saved)
        return False

    def snapshot(self) -> "Snapshot":
        return Snapshot(list(self.logits), self.z.copy(), self.variance.copy(), self.xi, self.a)

    def restore(self, saved: "Snapshot") -> None:
        self.logits, self.z, self.variance = list(saved.logits), saved.z.copy(), saved.variance.copy()
        self.xi, self.a = saved.xi, saved.a


@dataclass(frozen=True)
class Snapshot:
    """Where a climb stood."""

    logits: list[Logit]
    z: Array
    variance: Array
    xi: Array
    a: Array


class SparseVDClassifier(LogitClassifier):
    """Logistic regression, binary or multinomial, that finds the relevant features by variational inference.

    The prior, the posterior and the price of a support are those of `SparseVDRegressor`, whose parameters these are;
    each class of a multinomial model keeps its own features. `tol` is in nats per round over the classes.

    Attributes
    ----------
    classes_ : the labels.
    coef_, intercept_ : θ of shape (1, D) for two classes and (K, D) for more; exactly zero where dropped.
    alpha_, log_alpha_ : dropout rates in the same shape; 1/ε, which stands for ∞, where dropped.
    relevant_ : mask of the features kept for some class.
    elbo_ : the bound, with log p(S) when `multiplicity` is set.
    n_iter_ : how often eq. 16 was solved in all.
    """

    def __init__(
        self,
        *,
        threshold: float = THRESHOLD,
        multiplicity: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-3,
        max_iter: int = 1000,
    ) -> None:
        self.threshold = threshold
        self.multiplicity = multiplicity
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        check_threshold(self.threshold)
        check_positive(tol=self.tol, max_iter=self.max_iter)
        X, y, weight, _ = training_data(self, X, y, sample_weight, numeric=False)
        self.classes_, labels = one_column_per_logit(self, y)
        # From nothing, a parabola undervalues what the first features are worth; so a start with features as well.
        design = Design(X, weight, self.fit_intercept)
        relation = np.abs(design.times_transposed(labels * design.root_weight[:, None])).max(axis=1)
        varies = np.flatnonzero(design.varies)
        many = len(varies) if len(varies) < 0.8 * design.total_weight else SCREENED
        strongest = varies[np.argsort(-relation[varies], kind="stable")[:many]]
        starts = [np.empty(0, dtype=np.intp), np.sort(strongest)]
        fits = [Fit(X, labels, weight, self) for _ in starts]
        converged = [fit.climb(start) for fit, start in zip(fits, starts, strict=True)]
        best = max(range(len(fits)), key=lambda i: fits[i].elbo())
        if not converged[best]:
            warnings.warn(
                f"The bound still gained more than tol={self.tol} nats in round max_iter={self.max_iter}. "
                "Raise one of them.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self._keep(fits[best], X.shape[1])
        self.n_iter_ = sum(fit.n_solved for fit in fits)
        return self

    def _keep(self, fit: Fit, features: int) -> None:
        shape = (len(fit.logits), features)
        self.log_alpha_ = np.full(shape, LARGEST_LOG_ALPHA)
        self.coef_ = np.zeros(shape)
        for k, logit in enumerate(fit.logits):
            self.log_alpha_[k, logit.support] = logit.log_alpha
            self.coef_[k, logit.support] = logit.coef
        self.alpha_ = np.exp(self.log_alpha_)
        self.relevant_ = (self.log_alpha_ < LARGEST_LOG_ALPHA).any(axis=0)
        self.intercept_ = np.array([logit.intercept for logit in fit.logits])
        self.elbo_ = fit.elbo()
        self._logits = fit.logits

    def _moments(self, X: Any) -> list[tuple[Array, Array]]:
        return [logit.moments(X) for logit in self._logits]

    def predict_proba(self, X: Any) -> Array:
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([expit(-scores), expit(scores)])
        return softmax(scores, axis=1)
