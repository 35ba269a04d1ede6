"""The contract that all four linear models share: scikit-learn's checks, its tools, and inputs that break solvers."""

import pickle

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.base import clone, is_classifier
from sklearn.datasets import load_iris, make_classification
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sparsevd.errors import SparseVDError
from sparsevd.linear_model import RVMClassifier, RVMRegressor, SparseVDClassifier, SparseVDRegressor

ESTIMATORS = [SparseVDRegressor(), SparseVDClassifier(), RVMRegressor(), RVMClassifier()]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)


def expected_failures(estimator):
    """Only a kernel machine has any: the check's 15 samples are fitted exactly by as many kernels, and without
    noise the choice among them is made by rounding errors, which repeated samples change."""
    if type(estimator) is not RVMRegressor or estimator.kernel == "linear":
        return {}
    reason = "more kernels than samples fit the targets exactly, and rounding chooses among them"
    return {f"check_sample_weight_equivalence_on_{kind}_data": reason for kind in ("dense", "sparse")}


@parametrize_with_checks(
    [*ESTIMATORS, SparseVDRegressor(multiplicity=False), RVMRegressor(kernel="rbf")],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def problem_for(estimator, n=120, d=12, seed=0):
    """Features 1 and 4 matter; the target fits the kind of estimator."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, d))
    y = 3 * x[:, 1] - 2 * x[:, 4] + generator.standard_normal(n)
    return x, (y > 0).astype(int) if is_classifier(estimator) else y


@every_estimator
def test_relevant_features_are_found(estimator):
    x, y = problem_for(estimator)
    model = clone(estimator).fit(x, y)
    assert model.relevant_[[1, 4]].all()
    assert model.score(x, y) > 0.85
    assert np.array_equal(np.atleast_2d(model.coef_).any(axis=0), model.relevant_)
    assert model.n_iter_ >= 1


@every_estimator
def test_scale_of_features_does_not_matter(estimator):
    """The diag(XᵀX) of eq. 16 says so."""
    x, y = problem_for(estimator)
    scale = 10.0 ** np.random.default_rng(1).uniform(-8, 8, x.shape[1])
    plain, scaled = clone(estimator).fit(x, y), clone(estimator).fit(x * scale, y)
    assert np.array_equal(plain.relevant_, scaled.relevant_)
    np.testing.assert_allclose(scaled.coef_ * scale, plain.coef_, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(scaled.predict(x * scale), plain.predict(x), rtol=1e-6, atol=1e-6)


@every_estimator
def test_sparse_input_gives_the_dense_result(estimator):
    x, y = problem_for(estimator)
    x = np.where(np.abs(x) > 0.7, x, 0)
    dense = clone(estimator).fit(x, y)
    for container in (sparse.csr_array, sparse.csc_matrix):
        model = clone(estimator).fit(container(x), y)
        np.testing.assert_allclose(model.coef_, dense.coef_, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(model.predict(container(x)), dense.predict(x), rtol=1e-6)


@every_estimator
def test_single_precision_gives_nearly_the_same(estimator):
    x, y = problem_for(estimator)
    double, single = clone(estimator).fit(x, y), clone(estimator).fit(x.astype(np.float32), y)
    np.testing.assert_allclose(single.coef_, double.coef_, rtol=1e-3, atol=1e-4)


@every_estimator
def test_pandas_pipeline_grid_search_and_pickle(estimator):
    pd = pytest.importorskip("pandas")
    x, y = problem_for(estimator, n=60, d=5)
    frame = pd.DataFrame(x, columns=list("abcde"))
    search = GridSearchCV(
        make_pipeline(StandardScaler().set_output(transform="pandas"), clone(estimator)),
        {f"{type(estimator).__name__.lower()}__fit_intercept": [True, False]},
        cv=2,
    ).fit(frame, y)
    best = search.best_estimator_[-1]
    assert list(best.feature_names_in_) == list("abcde")
    again = pickle.loads(pickle.dumps(search))
    assert np.array_equal(again.predict(frame), search.predict(frame))


def hard_inputs():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((30, 6))
    hilbert = 1 / (np.arange(30)[:, None] + np.arange(6)[None, :] + 1)
    yield "constant column", np.column_stack([x, np.full(30, 7.3)])
    yield "all columns constant", np.ones((30, 3))
    yield "zero column", np.column_stack([x, np.zeros(30)])
    yield "duplicated columns", np.column_stack([x, x, x[:, :1]])
    yield "collinear columns", np.column_stack([x, x[:, 0] + x[:, 1], x @ np.arange(6)])
    yield "nearly equal columns", np.column_stack([x, x + 1e-9 * generator.standard_normal(x.shape)])
    yield "ill-conditioned", hilbert
    yield "far from the origin", x + 1e6
    yield "more features than samples", generator.standard_normal((30, 90))
    yield "one feature", x[:, :1]
    yield "three samples", x[:3]
    yield "huge and tiny", x * np.array([1e12, 1e-12, 1, 1e6, 1e-6, 1])


@pytest.mark.parametrize(
    "estimator", [*ESTIMATORS, SparseVDRegressor(multiplicity=False), SparseVDClassifier(multiplicity=False)], ids=repr
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("name", "x"), list(hard_inputs()), ids=lambda value: value if isinstance(value, str) else "")
def test_hard_inputs_give_a_sound_result(estimator, name, x, exact):
    """Finite, and as good as the mean at least; `exact` targets leave no noise."""
    noise = 0 if exact else np.random.default_rng(1).standard_normal(len(x))
    y = x[:, 0] / max(np.abs(x[:, 0] - x[:, 0].mean()).max(), 1e-20) + 0.3 * noise
    if is_classifier(estimator):
        y = (y > np.median(y)).astype(int)
        y[0], y[1] = 0, 1
    model = clone(estimator).fit(x, y)
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.intercept_).all()
    if is_classifier(estimator):
        assert np.isfinite(model.predict_proba(x)).all()
        assert model.score(x, y) >= max(y.mean(), 1 - y.mean()) - 0.1
    else:
        mean, std = model.predict(x, return_std=True)
        assert np.isfinite(mean).all()
        assert np.isfinite(std).all()
        assert model.score(x, y) > -1e-6


@every_estimator
def test_bad_input_is_refused_with_a_reason(estimator):
    x, y = problem_for(estimator, n=20, d=6)
    with_nan = x.copy()
    with_nan[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        clone(estimator).fit(with_nan, y)
    with pytest.raises(ValueError, match="at least one non-zero"):
        clone(estimator).fit(x, y, sample_weight=np.zeros(20))
    with pytest.raises(SparseVDError, match="tol must be greater than 0, but it is -1"):
        clone(estimator).set_params(tol=-1).fit(x, y)
    if is_classifier(estimator):
        with pytest.raises(SparseVDError, match="at least 2 classes, but y holds only one class"):
            clone(estimator).fit(x, np.ones(20))


@every_estimator
def test_unfinished_fit_warns(estimator):
    from sklearn.exceptions import ConvergenceWarning

    x, y = problem_for(estimator)
    with pytest.warns(ConvergenceWarning, match="max_iter=1"):
        clone(estimator).set_params(max_iter=1).fit(x, y)


@pytest.mark.parametrize("classifier", [SparseVDClassifier(), RVMClassifier()], ids=["SparseVD", "RVM"])
def test_more_than_two_classes(classifier):
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = clone(classifier).fit(x, names)
    assert model.score(x, names) > 0.93
    assert model.coef_.shape == model.alpha_.shape == (3, 4)
    assert model.predict_proba(x).shape == (150, 3)
    np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1)


@pytest.mark.parametrize("classifier", [SparseVDClassifier(), RVMClassifier()], ids=["SparseVD", "RVM"])
def test_class_probabilities_are_calibrated(classifier):
    """Drawn from a logistic model, labels are as frequent as their probabilities say."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4000, 10))
    p = 1 / (1 + np.exp(-(2 * x[:, 0] - x[:, 1] + 0.5)))
    y = (generator.random(4000) < p).astype(int)
    model = clone(classifier).fit(x[:400], y[:400])
    assert np.abs(model.predict_proba(x[400:])[:, 1] - p[400:]).mean() < 0.04


def test_separable_classes_stay_finite():
    x, y = make_classification(100, 20, n_informative=3, class_sep=4, random_state=0)
    for classifier in (SparseVDClassifier(), RVMClassifier()):
        model = classifier.fit(x, y)
        assert model.score(x, y) > 0.95
        assert np.isfinite(model.coef_).all()


def test_documentation_runs():
    import doctest
    import re
    from pathlib import Path

    from sparsevd.linear_model import _regressor

    assert doctest.testmod(_regressor).failed == 0
    page = (Path(__file__).parent.parent / "docs" / "linear_models.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "linear_models.md", "exec"), {})
