"""Which features are relevant: Sparse VD regression against empirical Bayes (RVM, ARDRegression) and LassoCV.

    OMP_NUM_THREADS=1 python experiments/relevance.py             # everything, about an hour on a slow core
    OMP_NUM_THREADS=1 python experiments/relevance.py real noise  # or some parts, see --help

Needs scikit-learn; fastrvm 0.1.5 is left out where it is not installed. Synthetic data: N samples of D standard
normal features (`correlated`: neighbours 0.5), five of which carry weights ±U(0.5, 1.5); noise with a quarter of the
signal's variance. Draw i is the same data for every method. A slow method stops after `--budget` seconds per cell, so
draws are counted; comparisons use the draws both methods have. Every finished unit is written to results/relevance.json
and not run again; a larger budget adds draws.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from records import chart
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ARDRegression, LassoCV, LogisticRegressionCV
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from sparsevd.files import atomic
from sparsevd.linear_model import RVMClassifier, RVMRegressor, SparseVDClassifier, SparseVDRegressor

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "relevance.json"
DRAWS = 50
RELEVANT = 5
SIGNAL_TO_NOISE = 4.0
CELLS = [("independent", n, d) for d in (20, 100, 500, 2000) for n in (20, 50, 100, 500, 2000)]
CELLS += [("correlated", n, d) for d in (100, 500) for n in (100, 500)]
NOISE_CELLS = [("independent", n, d) for n, d in ((100, 20), (1000, 100), (100, 500), (1000, 500))]
TIME_SIZES = (125, 250, 500)
TIME_REPETITIONS = 5


class FastRVM:
    """fastrvm's core on the features themselves. Its public class only takes square kernel matrices."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> "FastRVM":
        from fastrvm import _sparsebayes_bindings as core

        machine = core.SparseBayes(core.Likelihood.Gaussian, 10_000, True, False, False, True, False, None)
        result = machine.inference(np.asfortranarray(x), y)
        kept, mean = np.ravel(result["relevant_idx"])[:-1].astype(int), np.ravel(result["mean"])
        self.coef_ = np.zeros(x.shape[1])
        self.coef_[kept] = mean[:-1]
        self.intercept_, self.beta_, self.covariance_, self.kept_ = mean[-1], result["beta"], result["covariance"], kept
        return self

    def predict(self, x: np.ndarray, return_std: bool = False) -> Any:
        mean = x @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        phi = np.column_stack([x[:, self.kept_], np.ones(len(x))])
        return mean, np.sqrt(np.einsum("ij,ij->i", phi @ self.covariance_, phi) + 1 / self.beta_)


REGRESSORS: dict[str, Callable[[], Any]] = {
    "Sparse VD": SparseVDRegressor,
    "Sparse VD, paper's bound": lambda: SparseVDRegressor(multiplicity=False),
    "RVM": RVMRegressor,
    "fastrvm": FastRVM,
    "ARDRegression": ARDRegression,
    "LassoCV": LassoCV,
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "Sparse VD": SparseVDClassifier,
    "Sparse VD, paper's bound": lambda: SparseVDClassifier(multiplicity=False),
    "RVM": RVMClassifier,
    "L1 logistic, CV": lambda: LogisticRegressionCV(
        l1_ratios=(1.0,), solver="saga", Cs=6, cv=3, max_iter=300, use_legacy_attributes=False, scoring="neg_log_loss"
    ),
}
if not any(d.metadata["Name"] == "fastrvm" for d in importlib.metadata.distributions()):
    del REGRESSORS["fastrvm"]


class Store:
    """Records by key, on disk after every change."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def put(self, key: str, value: Any) -> None:
        self.records["about"] = {
            "command": "OMP_NUM_THREADS=1 python experiments/relevance.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared; one thread",
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in ("numpy", "scipy", "scikit-learn")},
        }
        self.records[key] = value
        lines = (f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in self.records.items())
        atomic.write(RESULTS, "{\n" + ",\n".join(lines) + "\n}\n")


def draw(design: str, n: int, d: int, relevant: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X, y and the true weights."""
    generator = np.random.default_rng([seed, n, d, len(design), relevant])
    x = generator.standard_normal((n, d))
    if design == "correlated":
        for j in range(1, d):
            x[:, j] = 0.5 * x[:, j - 1] + np.sqrt(0.75) * x[:, j]
    weights = np.zeros(d)
    support = generator.choice(d, relevant, replace=False)
    weights[support] = generator.choice([-1, 1], relevant) * generator.uniform(0.5, 1.5, relevant)
    signal = x @ weights
    noise = np.sqrt(signal.var() / SIGNAL_TO_NOISE) if relevant else 1.0
    return x, signal + noise * generator.standard_normal(n), weights


def timed_fit(make: Callable[[], Any], x: np.ndarray, y: np.ndarray) -> tuple[Any, float]:
    """A fitted model and its seconds of CPU time, which other users of the machine disturb less than the clock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        start = time.process_time()
        model = make().fit(x, y)
        return model, time.process_time() - start


def recover(
    store: Store, part: str, cells: list[tuple[str, int, int]], relevant: int, options: argparse.Namespace
) -> None:
    """F1 of the support, features kept and seconds per draw, for every cell and method."""
    methods = {name: REGRESSORS[name] for name in options.method or REGRESSORS}
    for (design, n, d), (name, make) in itertools.product(sorted(cells, key=lambda c: c[1] * c[2]), methods.items()):
        key = f"{part}/{design} N={n} D={d}/{name}"
        record = store.records.get(key, {"f1": [], "kept": [], "weight_error": [], "seconds": []})
        # D³ per iteration: one such fit would take longer than all else together.
        if name == "ARDRegression" and min(n, d) >= 2000:
            continue
        for seed in range(len(record["f1"]), DRAWS):
            if record["seconds"] and sum(record["seconds"]) + record["seconds"][-1] > options.budget:
                break
            x, y, weights = draw(design, n, d, relevant, seed)
            model, seconds = timed_fit(make, x, y)
            kept, true = model.coef_ != 0, weights != 0
            # Both empty: everything there was to find has been found.
            f1 = 2 * float((kept & true).sum()) / float(kept.sum() + true.sum()) if (kept | true).any() else 1.0
            record["f1"].append(round(f1, 4))
            record["kept"].append(int(kept.sum()))
            error = model.coef_ - weights
            scale = float(weights @ weights) or 1.0
            record["weight_error"].append(round(float(error @ error) / scale, 6))
            record["seconds"].append(round(seconds, 4))
        store.put(key, record)
        print(f"{key}: {len(record['f1'])} draws, F1 {statistics.mean(record['f1']):.3f}", flush=True)


def search(store: Store, budget: float) -> None:
    """Whether the bound is to blame for a wrong support, or the search: the score found minus that of the true support.

    The bound of the true support is that of a fit on its features alone, plus log p(S).
    """
    for design, n, d in sorted(CELLS, key=lambda c: c[1] * c[2]):
        key = f"search/{design} N={n} D={d}"
        gaps = store.records.get(key, [])
        start = time.perf_counter()
        for seed in range(len(gaps), DRAWS):
            if time.perf_counter() - start > budget:
                break
            x, y, weights = draw(design, n, d, RELEVANT, seed)
            true = SparseVDRegressor(multiplicity=False).fit(x[:, weights != 0], y)
            price = math.log(math.comb(d, int(true.relevant_.sum()))) + math.log(d + 1)
            gaps.append(round(SparseVDRegressor().fit(x, y).elbo_ - (true.elbo_ - price), 3))
        store.put(key, gaps)
        print(f"{key}: below the true support's score in {sum(gap < -0.01 for gap in gaps)} of {len(gaps)}", flush=True)


def regression_scores(model: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    mean = model.predict(x)
    scores = {"error": float(np.sqrt(np.mean((y - mean) ** 2))), "kept": int((model.coef_ != 0).sum())}
    if not isinstance(model, LassoCV):
        _, std = model.predict(x, return_std=True)
        z = (y - mean) / std
        scores["nll"] = float(np.mean(0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi)))
        scores["calibration"] = float(np.mean(np.abs(z) <= 1.6448536))  # coverage of the 90 % interval
    return scores


def classification_scores(model: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    p = model.predict_proba(x)
    confidence, right = p.max(axis=1), model.classes_[p.argmax(axis=1)] == y
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(10)]
    return {
        "error": float(100 * (1 - right.mean())),
        "kept": int((model.coef_ != 0).any(axis=0).sum()),
        "nll": float(-np.mean(np.log(np.maximum(p[np.arange(len(y)), np.searchsorted(model.classes_, y)], 1e-300)))),
        "calibration": float(sum(gaps) / len(y)),  # expected calibration error, ten bins
    }


def real(store: Store) -> None:
    """Five-fold cross-validation on scikit-learn's data sets; features standardised on the training folds."""
    diabetes = load_diabetes(return_X_y=True)
    squares = PolynomialFeatures(2, include_bias=False).fit_transform(diabetes[0]), diabetes[1]
    regression = {"diabetes": diabetes, "diabetes, degree 2": squares}
    classification = {
        "breast cancer": load_breast_cancer(return_X_y=True),
        "wine": load_wine(return_X_y=True),
        "digits": load_digits(return_X_y=True),
    }
    jobs = [(name, data, method, REGRESSORS, KFold) for name, data in regression.items() for method in REGRESSORS]
    jobs += [
        (name, data, method, CLASSIFIERS, StratifiedKFold)
        for name, data in classification.items()
        for method in CLASSIFIERS
    ]
    for name, (x, y), method, makers, folds in jobs:
        key = f"real/{name}/{method}"
        if key in store.records:
            continue
        scores = []
        for train, test in folds(5, shuffle=True, random_state=0).split(x, y):
            scaler = StandardScaler().fit(x[train])
            model, seconds = timed_fit(makers[method], scaler.transform(x[train]), y[train])
            score = regression_scores if makers is REGRESSORS else classification_scores
            scores.append({**score(model, scaler.transform(x[test]), y[test]), "seconds": seconds})
        store.put(key, {m: [round(s[m], 5) for s in scores] for m in scores[0]} | {"features": x.shape[1]})
        print(key, {m: round(statistics.mean(s[m] for s in scores), 3) for m in scores[0]}, flush=True)


def timing(store: Store) -> None:
    """Seconds of Sparse VD and ARDRegression at N = 1,000, interleaved, on sparse data with ten relevant features."""
    for d in TIME_SIZES:
        key = f"time/N=1000 D={d}"
        if key in store.records:
            continue
        seconds: dict[str, list[float]] = {
            name: [] for name in ("Sparse VD", "Sparse VD, paper's bound", "ARDRegression")
        }
        for repetition in range(TIME_REPETITIONS):
            x, y, _ = draw("independent", 1000, d, 10, repetition)
            for name in seconds:
                seconds[name].append(round(timed_fit(REGRESSORS[name], x, y)[1], 4))
        store.put(key, seconds)
        print(key, {name: statistics.median(s) for name, s in seconds.items()}, flush=True)


def theory(store: Store) -> None:
    """θᵢ = Θ(1/αᵢ) (below eq. 16), and Binary Dropout regression as eq. 20 with α = p/(1 − p)."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((50, 6)), generator.standard_normal(50)
    gram, xty = x.T @ x, x.T @ y
    alphas = 10.0 ** np.arange(0, 13)
    thetas = []
    for alpha in alphas:
        others = np.full(6, 0.5)
        others[2] = alpha
        thetas.append(np.linalg.solve(gram + np.diag(np.diag(gram) * others), xty)[2])
    slopes = np.diff(np.log(np.abs(thetas))) / np.diff(np.log(alphas))
    p = generator.uniform(0.1, 0.9, 6)
    risk_gram, risk_xty = np.zeros((6, 6)), np.zeros(6)
    for mask in itertools.product((0, 1), repeat=6):  # the expectation over all 2⁶ dropout masks, no formula
        probability = np.prod(np.where(mask, 1 - p, p))
        dropped = x * (np.array(mask) / (1 - p))
        risk_gram += probability * dropped.T @ dropped
        risk_xty += probability * dropped.T @ y
    dropout = np.linalg.solve(risk_gram, risk_xty)
    sparse_vd = np.linalg.solve(gram + np.diag(np.diag(gram) * p / (1 - p)), xty)
    store.put(
        "theory",
        {
            "alpha": alphas.tolist(),
            "theta_times_alpha": (alphas * np.array(thetas)).tolist(),
            "local_slope_of_log_theta": slopes.round(6).tolist(),
            "largest_difference_to_binary_dropout": float(np.abs(dropout - sparse_vd).max()),
        },
    )


def table(store: Store) -> None:
    """The results as the Markdown tables of docs/linear_models.md."""

    def print_rows(part: str, cells: list[tuple[str, int, int]], metric: str) -> None:
        print(f"\n| {part}: {metric} | " + " | ".join(REGRESSORS) + " |\n" + "|---" * (len(REGRESSORS) + 1) + "|")
        for design, n, d in cells:
            row = [f"{'correlated, ' if design == 'correlated' else ''}N = {n}, D = {d}"]
            for name in REGRESSORS:
                values = store.records.get(f"{part}/{design} N={n} D={d}/{name}", {}).get(metric, [])
                few = "" if len(values) >= DRAWS else f" ({len(values)})"
                row.append(f"{statistics.mean(values):.2f}{few}" if values else "–")
            print("| " + " | ".join(row) + " |")

    print_rows("synthetic", CELLS, "f1")
    print_rows("noise", NOISE_CELLS, "kept")
    print("\n| data, method | error | features kept | nll | calibration |\n|---|---|---|---|---|")
    for key, record in store.records.items():
        if key.startswith("real/"):
            values = [record.get(m, []) for m in ("error", "kept", "nll", "calibration")]
            shown = [f"{statistics.mean(v):.3g} ± {statistics.stdev(v):.2g}" if v else "–" for v in values]
            print(f"| {key[5:].replace('/', ', ')} of {record['features']} | " + " | ".join(shown) + " |")
    print()
    for d in TIME_SIZES:
        if (seconds := store.records.get(f"time/N=1000 D={d}")) is not None:
            ratios = np.array(seconds["Sparse VD"]) / np.array(seconds["ARDRegression"])
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            ratio = f"{ratios.mean():.3f} ± {ratios.std(ddof=1):.3f}"
            print(f"N = 1000, D = {d}: {medians} s; Sparse VD / ARDRegression {ratio}")
    for key, gaps in store.records.items():
        if key.startswith("search/"):
            print(f"{key}: below the true support's score in {sum(gap < -0.01 for gap in gaps)} of {len(gaps)} draws")


def figure(store: Store) -> None:
    colours = dict(zip(REGRESSORS, ("#c1272d", "#e8a09a", "#0000a7", "#6f8fd6", "#008176", "#b3a000"), strict=False))
    sizes = sorted({d for design, _, d in CELLS if design == "independent"})
    drawing, axes, path = chart("relevance", len(sizes) + 1, figsize=(15, 3.2))
    for axis, d in zip(axes, sizes, strict=False):
        for name, colour in colours.items():
            points = [
                (n, statistics.mean(store.records[key]["f1"]))
                for design, n, size in CELLS
                if design == "independent"
                and size == d
                and (key := f"synthetic/independent N={n} D={d}/{name}") in store.records
            ]
            axis.plot([n for n, _ in points], [f1 for _, f1 in points], "o-", markersize=3, color=colour, label=name)
        axis.set(xscale="log", ylim=(0, 1.03), title=f"D = {d}", xlabel="samples N", ylabel="F1 of the support")
    axes[0].legend(fontsize=7)
    for i, name in enumerate(colours):
        shares = [
            statistics.mean(store.records[f"noise/independent N={n} D={d}/{name}"]["kept"]) for _, n, d in NOISE_CELLS
        ]
        axes[-1].bar(np.arange(len(shares)) + 0.14 * (i - 2.5), shares, 0.14, color=colours[name])
    axes[-1].set_xticks(range(len(NOISE_CELLS)), [f"N={n}\nD={d}" for _, n, d in NOISE_CELLS])
    axes[-1].set(yscale="symlog", title="targets of pure noise", ylabel="features kept")
    drawing.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("theory", "synthetic", "search", "noise", "real", "time", "table", "figure")
    parser.add_argument("parts", nargs="*", default=parts, help=f"some of: {' '.join(parts)}")
    parser.add_argument("--budget", type=float, default=40, help="seconds per cell and method")
    parser.add_argument(
        "--method", action="append", choices=list(REGRESSORS), help="only this method (synthetic, noise)"
    )
    arguments = parser.parse_args()
    store = Store()
    run = {
        "theory": lambda: theory(store),
        "synthetic": lambda: recover(store, "synthetic", CELLS, RELEVANT, arguments),
        "search": lambda: search(store, arguments.budget),
        "noise": lambda: recover(store, "noise", NOISE_CELLS, 0, arguments),
        "real": lambda: real(store),
        "time": lambda: timing(store),
        "table": lambda: table(store),
        "figure": lambda: figure(store),
    }
    for part in arguments.parts:
        if part not in run:
            parser.error(f"there is no part {part!r}; choose from {', '.join(parts)}")
        run[part]()


if __name__ == "__main__":
    main()
