"""TripletLearner: scikit-learn's own checks, every solver, certificates, robust weights, and degenerate input."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearfar.linear import TripletLearner
from nearfar.linear._fitting import START, Problem, Run
from nearfar.linear._initialization import initialize
from nearfar.linear._stochastic import Plan
from nearfar.sets import KL, Mean, TopK

SOLVERS = ("auto", "sgd", "gd", "ccp", "convex")
FEW = {"auto": 30, "sgd": 30, "gd": 20, "ccp": 2, "convex": 20}


@parametrize_with_checks(
    [TripletLearner(), *(TripletLearner(solver=solver, max_iter=FEW[solver]) for solver in SOLVERS[1:])]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def easy(n=300, seed=0):
    """Three classes, told apart by 3 of 8 features; the other 5 are louder and say nothing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return np.hstack([4 * np.eye(3)[y] + rng.standard_normal((n, 3)), 5 * rng.standard_normal((n, 5))]), y


def three_nn(fit, X, y):
    half = len(X) // 2
    Z = fit.transform(X) if fit is not None else X
    return KNeighborsClassifier(3).fit(Z[:half], y[:half]).score(Z[half:], y[half:])


@pytest.fixture(scope="module")
def data():
    X, y = easy()
    X.flags.writeable = False
    return X, y


@pytest.mark.parametrize("triplets", ["neighbors", "hard", "all", "dro"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_improves_the_neighbors(data, solver, triplets):
    """From the identity, which is Euclid: what is gained is learnt."""
    X, y = data
    half = len(X) // 2
    learner = TripletLearner(solver=solver, triplets=triplets, init="identity", random_state=0, max_triplets=3000)
    learner.set_params(max_iter={"auto": 100, "sgd": 100, "gd": 60, "ccp": 6, "convex": 60}[solver])
    gain = three_nn(learner.fit(X[:half], y[:half]), X, y) - three_nn(None, X, y)
    assert gain > (0.0 if triplets == "hard" else 0.15)  # the hardest triplets mislead, as they are known to


@pytest.mark.parametrize("solver", SOLVERS)
def test_history_says_what_is_certified(data, solver):
    X, y = data
    learner = TripletLearner(3, solver=solver, max_iter=FEW[solver], random_state=0, max_triplets=2000).fit(X, y)
    stages = {step.stage for step in learner.history_}
    assert stages == ({"sgd", "gd"} if solver == "auto" else {solver})
    for step in learner.history_:
        assert step.certified == (step.stage != "sgd")
        assert np.isnan(step.decrease) != step.certified
        assert np.isfinite([step.value, step.mu, step.norm]).all()
    assert learner.n_iter_ == len(learner.history_)
    if solver == "ccp":
        assert all(step.gap <= 1e-6 for step in learner.history_)


def run_of(X, labels, **changes):
    options = {"margin": 1.0, "mu": None, "kind": "neighbors", "targets": 3, "impostors": 5, "over": None}
    plan = Plan(**{**options, "batch": 64, "refresh": 5, "tolerance": 0.0, **changes})
    return Run(Problem.of(X, labels, X.std(axis=0) + 1e-9), plan, 400, 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    mu=st.sampled_from([0.03, 0.3, 1.0, 5.0]),
    margin=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    length=st.sampled_from([1e-3, 1.0, 30.0]),
    stage=st.sampled_from(["gd", "ccp"]),
    over=st.sampled_from([None, KL(0.5), TopK(fraction=0.2)]),
)
def test_objective_never_rises_between_refreshes(seed, mu, margin, length, stage, over):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([[0, 0, 1], rng.integers(0, 3, 27)])
    X = rng.standard_normal((30, 4)) * 10.0 ** rng.uniform(-2, 2, 4)
    run = run_of(X, labels, mu=mu, margin=margin, over=over)
    A = length * torch.tensor(rng.standard_normal((2, 4)))
    steps = 6 if stage == "gd" else 2
    before = float(run.objective(A, mu).value(A))
    run.generator.manual_seed(run.seed)
    run.run_certified(stage, A, 2 * steps, steps)
    first = [step for step in run.history if step.round == 0]
    for number in (0, 1):
        values = [step.value for step in run.history if step.round == number]
        assert values == sorted(values, reverse=True)
    for before_value, step in pairwise([before, *first]):
        value = before_value if isinstance(before_value, float) else before_value.value
        assert step.value <= value - step.decrease + 1e-9 * abs(value)


def test_start_is_scaled_to_the_margin_whatever_the_units():
    X, y = easy()
    for unit, margin in ((1.0, 1.0), (1e6, 1.0), (1e-6, 4.0)):
        run = run_of(X * unit, y, margin=margin)
        A = run.scale(torch.eye(8, dtype=torch.float64))
        run.generator.manual_seed(run.seed)
        chosen = run.plan.choose(run.problem.x, A, run.problem.classes, run.generator)
        z = run.problem.x @ A.T
        mean = (z[chosen.anchors][:, None] - z[chosen.targets]).square().sum(dim=2).mean()
        assert float(mean) == pytest.approx(START * margin, rel=0.1)


def test_units_and_offsets_of_the_features_do_not_change_the_learnt_distances(data):
    X, y = data
    units = 10.0 ** np.random.default_rng(1).uniform(-3, 3, X.shape[1])
    plain, other = (
        TripletLearner(2, random_state=0, max_iter=50).fit(rows, y).pair_distance(np.stack([rows[:-1], rows[1:]], 1))
        for rows in (X, X * units + 5)
    )
    assert np.allclose(plain, other, rtol=1e-2, atol=1e-2)


def test_dro_weights_come_from_the_set(data):
    X, y = data
    run = run_of(X, y, over=KL(0.4), kind="dro")
    A = run.scale(torch.eye(8, dtype=torch.float64))
    objective = run.objective(A, 0.5)
    losses = 0.5 * torch.nn.functional.softplus(objective.products(A)[2] / 0.5)
    assert torch.allclose(objective.weights, KL(0.4).weights(losses[None])[0])
    assert float(objective.weights.std()) > 0
    plain = TripletLearner(3, random_state=0, max_iter=20).fit(X, y).components_
    given = {"random_state": 0, "max_iter": 20}
    assert np.allclose(TripletLearner(3, robust=Mean(), **given).fit(X, y).components_, plain, atol=1e-4)
    dro = TripletLearner(3, triplets="dro", **given).fit(X, y).components_
    assert np.array_equal(dro, TripletLearner(3, triplets="dro", robust=KL(1.0), **given).fit(X, y).components_)
    assert not np.allclose(dro, plain, atol=1e-3)


def test_a_set_that_drops_every_triplet_leaves_even_weights(data):
    X, y = data
    run = run_of(X, y, over=TopK(3, zero="drop"), mu=0.0, margin=0.0)
    A = 1e-12 * torch.eye(8, dtype=torch.float64)
    run.problem.x.mul_(0)  # no row differs from another: no triplet has a loss
    assert torch.allclose(run.objective(A, 0.0).weights, torch.tensor(1 / 400, dtype=torch.float64))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_seed_gives_one_answer(data, solver):
    X, y = data
    fits = [
        TripletLearner(3, solver=solver, max_iter=FEW[solver], max_triplets=500, random_state=seed).fit(X, y)
        for seed in (3, 3, 4)
    ]
    assert np.array_equal(fits[0].components_, fits[1].components_)
    assert not np.array_equal(fits[0].components_, fits[2].components_)


def test_partial_fit_learns_resumes_and_pickles(data):
    X, y = data
    half = len(X) // 2
    learner = TripletLearner(4, random_state=0)
    for _ in range(20):
        learner.partial_fit(X[:half], y[:half])
    assert three_nn(learner, X, y) > three_nn(None, X, y) + 0.1
    copy = pickle.loads(pickle.dumps(learner))
    for each in (learner, copy):
        each.partial_fit(X[half:], y[half:])
    assert np.array_equal(learner.components_, copy.components_)
    assert len(learner.history_) == learner._adam.count == 21 * 10  # one run: the moments go on
    assert learner.history_[-1].round == 20
    after = TripletLearner(4, random_state=0, max_iter=30).fit(X[:half], y[:half])
    before = after.components_.copy()
    after.partial_fit(X[half:], np.where(y[half:] == 0, 9, y[half:]))
    assert 0 < np.abs(after.components_ - before).max() < np.abs(before).max()
    assert after.classes_.tolist() == [0, 1, 2, 9]


def test_pipeline_grid_search_and_clone(data):
    X, y = data
    pipeline = make_pipeline(StandardScaler(), TripletLearner(max_iter=20, random_state=0), KNeighborsClassifier(3))
    search = GridSearchCV(pipeline, {"tripletlearner__n_components": [1, 3]}, cv=2).fit(X, y)
    assert search.best_params_ == {"tripletlearner__n_components": 3}
    names = search.best_estimator_[:-1].get_feature_names_out()
    assert names.tolist() == [f"tripletlearner{i}" for i in range(3)]
    learner = TripletLearner(2, robust=KL(0.3), mu=0.5)
    assert repr(clone(learner)) == repr(learner)
    assert "KL" in repr(learner)


def test_distances_agree_with_the_matrix_and_the_map(data):
    X, y = data
    learner = TripletLearner(3, max_iter=20, random_state=0).fit(X, y)
    pairs = np.stack([X[:50], X[50:100]], axis=1)
    difference = pairs[:, 0] - pairs[:, 1]
    M = learner.get_mahalanobis_matrix()
    expected = np.sqrt(np.einsum("ni,ij,nj->n", difference, M, difference))
    assert np.allclose(learner.pair_distance(pairs), expected)
    assert np.allclose(np.linalg.norm(learner.transform(X[:50]) - learner.transform(X[50:100]), axis=1), expected)
    assert np.array_equal(learner.score_pairs(pairs), -learner.pair_distance(pairs))
    with pytest.raises(ValueError, match=r"pairs must have shape \[n, 2, 8\], but came with shape \[50, 8\]"):
        learner.pair_distance(X[:50])


def test_float32_stays_float32_and_tells_the_same(data):
    X, y = data
    wide = TripletLearner(3, max_iter=20, random_state=0).fit(X, y)
    narrow = TripletLearner(3, max_iter=20, random_state=0).fit(X.astype(np.float32), y)
    assert narrow.transform(X.astype(np.float32)).dtype == np.float32
    assert np.allclose(wide.components_, narrow.components_, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("init", ["lda", "pca", "identity"])
def test_starts(init):
    X, y = load_wine(return_X_y=True)
    X = X - X.mean(axis=0)
    for d in (1, 2, 5, 13):
        A = initialize(init, X, y, d)
        assert A.shape == (d, 13)
        assert np.linalg.matrix_rank(A) == d
    if init == "pca":
        variances = (X @ initialize(init, X, y, 13).T).var(axis=0)
        assert (np.diff(variances) <= 1e-9).all()
    if init == "lda":
        fisher = LinearDiscriminantAnalysis().fit(X, y).scalings_.T
        assert np.allclose(initialize(init, X, y, 5)[:2], fisher)
        assert np.allclose(
            np.abs(np.corrcoef(initialize(init, X, y, 5)[2:], initialize("pca", X, y, 3))[:3, 3:]).diagonal(), 1
        )


BAD = [
    ({"solver": "adam"}, "solver must be one of"),
    ({"triplets": "neighbours"}, "did you mean 'neighbors'"),
    ({"init": "auto"}, "init must be one of"),
    ({"mu": "anealed"}, "did you mean 'annealed'"),
    ({"mu": -1.0}, "mu must be a number zero or more"),
    ({"margin": np.nan}, "margin must be a number zero or more"),
    ({"n_components": 17}, "n_components must be at most n_features = 8, but came as 17"),
    ({"n_components": 0}, "n_components must be a whole number above zero or None, but came as 0"),
    ({"n_neighbors": None}, "n_neighbors must be a whole number above zero, but"),
    ({"max_iter": 1.5}, "max_iter must be a whole number"),
    ({"batch_size": True}, "batch_size must be a whole number"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_parameters(data, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        TripletLearner(**options).fit(*data)


def test_bad_robust(data):
    with pytest.raises(TypeError, match="robust must be a set"):
        TripletLearner(robust="kl").fit(*data)


def test_input_that_holds_nothing_to_learn_from(data):
    X, y = data
    with pytest.raises(ValueError, match="y must hold at least two classes, but only one class came"):
        TripletLearner().fit(X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="each of the 5 has one sample"):
        TripletLearner().fit(X[:5], np.arange(5))
    with pytest.raises(ValueError, match="NaN"):
        TripletLearner().fit(np.where(X > 3, np.nan, X), y)
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        TripletLearner().fit(scipy.sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match="requires y to be passed"):
        TripletLearner().fit(X, None)
    with pytest.raises(ValueError, match="continuous"):
        TripletLearner().fit(X, X[:, 0])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", ["constant", "duplicates", "all equal", "lone", "wide", "huge"])
def test_degenerate_rows_give_a_finite_map(case, solver):
    X, y = easy(60)
    if case == "constant":
        X[:, [0, 5]] = 1e8 / 3
    elif case == "duplicates":
        X = np.repeat(X[:20], 3, axis=0)
        y = np.repeat(y[:20], 3)
    elif case == "all equal":
        X[:] = 7.0
    elif case == "lone":
        y = np.maximum(np.arange(60) - 35, 0)
    elif case == "wide":
        X = np.hstack([X[:10]] * 2)
        y = y[:10]
    else:
        X[:, 3] *= 1e15
    learner = TripletLearner(solver=solver, max_iter=FEW[solver], random_state=0).fit(X, y)
    assert np.isfinite(learner.components_).all()
    assert np.isfinite(learner.transform(X)).all()
    assert np.abs(learner.components_).max() > 0


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("mu", "margin"), [(0.0, 1.0), (0.5, 0.0)])
def test_hinge_and_no_margin(data, solver, mu, margin):
    X, y = data
    half = len(X) // 2
    learner = TripletLearner(2, solver=solver, mu=mu, margin=margin, init="lda", random_state=0, max_triplets=500)
    learner.set_params(max_iter=2 * FEW[solver]).fit(X[:half], y[:half])
    assert three_nn(learner, X, y) > 0.9
    assert {step.mu for step in learner.history_} == {mu}


def test_verbose_prints_a_line_a_round(data, capsys):
    X, y = data
    TripletLearner(2, max_iter=20, random_state=0, verbose=1).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "stochastic" in lines[0]
    assert "certified decrease" in lines[-1]
