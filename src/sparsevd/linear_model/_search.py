"""Which features to keep: the bound has many local optima, and the bound itself chooses among them.

Supports are proposed by growing from nothing and by shrinking from everything, without chance, and then refined by
single moves (add, remove, exchange) until none of them raises the score, which is the bound plus log p(S).
"""

import numpy as np

from sparsevd.linear_model._equations import Array, best_log_alpha, negative_kl, solve
from sparsevd.linear_model._problem import Problem, State

# Nats: how closely the bound is followed while supports are compared, and what a move must gain to count.
ROUGH = 1e-2
LEAST_GAIN = 1e-6
# How many features have a turn to be first. That, and exchanges, are for supports smaller than `FEW`.
FIRST_FEATURES = 8
FEW = 30


def best_state(problem: Problem, tol: float, max_iter: int) -> State:
    """The support and posterior with the highest score found, settled to `tol` nats."""
    order = np.argsort(-np.abs(problem.xty), kind="stable")
    proposals = [forward(problem, order[0])]
    if len(proposals[0].support) < FEW:
        # A wrong first feature is often never left again, so the runners-up get their turn as well.
        proposals += [forward(problem, first) for first in order[1:FIRST_FEATURES]]
    if problem.candidates < 0.8 * problem.n:
        # With more samples than features, least squares ranks all features jointly, where one at a time is misled.
        everything = np.flatnonzero(problem.design.varies)
        proposals.append(nested(problem, problem.settle(everything, np.zeros(len(everything)), ROUGH)))
    distinct = {tuple(np.sort(state.support)): state for state in proposals}.values()
    best = max((refine(problem, state) for state in distinct), key=problem.score)
    return problem.settle(best.support, best.log_alpha, tol, max_iter)


def forward(problem: Problem, first: int) -> State:
    """Add the feature that fits the residual best, again and again; return the best-scoring support on the way.

    It goes on for a while after the score has fallen: features that are worth little alone can be worth much together.
    Large supports grow by a tenth at a time.
    """
    state = best = problem.empty()
    best_size = 0
    limit = min(problem.candidates, int(0.8 * problem.n) if problem.learn_noise else problem.candidates)
    while len(state.support) < min(limit, 2 * best_size + 10):
        residual = problem.xty - problem.gram_columns(state.support) @ state.theta
        residual[state.support] = 0
        count = max(1, len(state.support) // 10)
        new = np.argsort(-np.abs(residual), kind="stable")[:count] if len(state.support) else np.array([first])
        log_alpha = best_log_alpha(residual[new] ** 2 / problem.noise_variance(state.energy))
        new, log_alpha = new[log_alpha <= problem.threshold], log_alpha[log_alpha <= problem.threshold]
        grown = problem.settle(np.r_[state.support, new], np.r_[state.log_alpha, log_alpha], ROUGH)
        if len(grown.support) <= len(state.support):
            break
        state = grown
        if problem.score(state) > problem.score(best):
            best, best_size = state, len(state.support)
    return best


def nested(problem: Problem, state: State) -> State:
    """Shrink a support by its weakest features, a tenth at a time; return the best-scoring support on the way."""
    best = state
    while len(state.support) > 1:
        keep = np.argsort(state.log_alpha, kind="stable")[: len(state.support) - max(1, len(state.support) // 10)]
        state = problem.settle(state.support[keep], state.log_alpha[keep], ROUGH)
        if problem.score(state) > problem.score(best):
            best = state
    return best


def refine(problem: Problem, state: State, max_moves: int = 200) -> State:
    """Make the best single move while one raises the score."""
    for _ in range(max_moves):
        for support, log_alpha in moves(problem, state):
            moved = problem.settle(support, log_alpha, ROUGH)
            if problem.score(moved) > problem.score(state) + LEAST_GAIN:
                state = moved
                break
        else:
            return state
    return state


def moves(problem: Problem, state: State) -> list[tuple[Array, Array]]:
    """The most promising removal, addition and exchange, best first, as starts (support, log α).

    Their gains are worked out exactly for the other α fixed, from A = X̃ᵀX̃ + diag(α) on the support. Writing P = A⁻¹,
    removing i changes θ by −P[:, i]·θᵢ/Pᵢᵢ and raises the energy by θᵢ²/Pᵢᵢ; adding j with residual correlation cⱼ and
    v = 1 − gⱼᵀP·gⱼ, the part of its length outside the support, lowers the energy by cⱼ²/(v + αⱼ).
    """
    support, log_alpha, kept = state.support, state.log_alpha, len(state.support)
    columns = problem.gram_columns(support)
    inverse = solve(columns[support] + np.diag(np.exp(log_alpha)), np.eye(kept))
    projected = columns @ inverse
    residual = problem.xty - columns @ state.theta
    outside = 1 - np.einsum("ij,ij->i", projected, columns)
    candidate = problem.design.varies.copy()
    candidate[support] = False
    now = problem.log_likelihood(state.energy)

    proposals: list[tuple[float, Array, Array]] = []
    if candidate.any():
        gain, alpha = addition_gains(problem, residual, outside, state.energy)
        gain[~candidate] = -np.inf
        j = int(np.argmax(gain))
        value = gain[j] + problem.support_price(kept + 1) - problem.support_price(kept)
        proposals.append((value, np.r_[support, j], np.r_[log_alpha, alpha[j]]))
    if kept:
        diagonal = np.diag(inverse)
        energy = state.energy + state.theta**2 / diagonal
        loss = problem.log_likelihood(energy) - now - negative_kl(log_alpha)
        refund = problem.support_price(kept - 1) - problem.support_price(kept)
        i = int(np.argmax(loss))
        proposals.append((loss[i] + refund, np.delete(support, i), np.delete(log_alpha, i)))
    if 0 < kept < FEW and candidate.any():  # an exchange costs as many additions as there are features to take out
        best = (-np.inf, 0, 0, 0.0)
        for i in range(kept):
            gain, alpha = addition_gains(
                problem,
                residual + projected[:, i] * (state.theta[i] / diagonal[i]),
                outside + projected[:, i] ** 2 / diagonal[i],
                float(energy[i]),
            )
            gain[~candidate] = -np.inf
            j = int(np.argmax(gain))
            best = max(best, (float(loss[i] + gain[j]), i, j, float(alpha[j])))
        value, i, j, entering = best
        proposals.append((value, np.r_[np.delete(support, i), j], np.r_[np.delete(log_alpha, i), entering]))
    proposals.sort(key=lambda proposal: -proposal[0])
    # A predicted gain is a lower bound for its support, up to rounding; a clear loss can still turn into a gain once
    # the other α follow, but hardly from below minus two nats.
    return [(support, log_alpha) for value, support, log_alpha in proposals if value > -2]


def addition_gains(problem: Problem, residual: Array, outside: Array, energy: float) -> tuple[Array, Array]:
    """What each feature would add to the bound, and the log α it would enter with, for the other α fixed."""
    length = np.clip(outside, 1e-10, 1)
    s2 = problem.noise_variance(energy)
    for _ in range(2 if problem.learn_noise else 1):  # the second time with the noise that would be left
        # In units of the length outside the support the problem is that of a lone feature, with α/v in place of α.
        log_alpha = best_log_alpha(residual**2 / (length * s2)) + np.log(length)
        left = np.maximum(energy - residual**2 / (length + np.exp(log_alpha)), 0)
        s2 = problem.noise_variance(left)
    return problem.log_likelihood(left) - problem.log_likelihood(energy) + negative_kl(log_alpha), log_alpha
