"""`TripletLearner`: a linear map learned from class labels, as a scikit-learn estimator.

    minimize over A [d, m]   Σ wᵢ μ·softplus((|A uᵢ|² - |A vᵢ|² + α)/μ),   uᵢ = x - x_target,  vᵢ = x - x_impostor

Targets and impostors are near rows of the same class and of other classes, chosen again as A changes.

A is initialized from the data:

    "pca"       the d directions of largest variance
    "lda"       the directions that maximize between-class over within-class variance, filled up with "pca"
    "identity"  the first d features

A = 0 is stationary for every triplet loss, so no row of A is initialized to 0. "pca" may stay in directions of large
variance that carry no information about the classes, because the loss does not couple them with others.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from nearfar._utils.checks import check_choice, check_positive
from nearfar.linear._fitting import Adam, Plan, Problem, Run, Step, anneal
from nearfar.linear._neighbors import KINDS
from nearfar.sets import KL, UncertaintySet

Matrix = NDArray[np.float64]

INITS = ("lda", "pca", "identity")
FILL = 0.3  # length of the rows that fill up "lda", relative to its own: LDA found their directions of no use
SOLVERS = ("auto", "gd", "ccp", "sgd", "convex")
STEPS = {"auto": 600, "sgd": 600, "gd": 200, "ccp": 10, "convex": 300}
REFRESH = {"auto": 10, "sgd": 10, "gd": 20, "ccp": 2, "convex": 100}
POLISH = 20  # certified steps at the end of solver="auto"
PARTIAL = 0.2  # share of the learning rate in `partial_fit`, which cannot follow a schedule: its end is unknown


class TripletLearner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Learn A [d, m] that brings rows close to their class and a margin away from others; `transform` is x ↦ A x.

    Args:
        n_components: d; the number of features if None.
        solver: "sgd" (Adam on drawn anchors), "gd" (gradient descent with certified steps), "ccp" (the convex-concave
            procedure), "convex" (the global minimum over M = A'A, cut to rank d), or "auto": sgd, then certified gd.
        margin: α, in squared units of the map; A is scaled to it at the start, whatever the units of the data.
        mu: μ, the temperature of the softplus, or "annealed": from 1 to 0.3 margins. 0 is the hinge.
        triplets: "neighbors" (near targets, near impostors), "hard" (farthest target, nearest impostor), "all"
            (drawn uniformly), or "dro": neighbors, weighted by the worst case over a set.
        robust: a set from `nearfar.sets` for the weights of the triplets; None is KL(1) with triplets="dro".
        n_neighbors: targets per anchor.
        n_impostors: impostors per anchor.
        init: "lda" (filled up with principal directions beyond classes - 1), "pca" or "identity".
        max_iter: steps; by default 600 (auto, sgd), 200 (gd), 10 (ccp) or 300 (convex).
        tol: gd and ccp end a round if |∇f| is at most this, sgd ends the run if its loss is.
        batch_size: anchors drawn at each choice of triplets by sgd.
        refresh: steps between two choices of triplets; by default 10 (sgd), 20 (gd), 2 (ccp), 100 (convex).
        max_triplets: the most triplets that gd, ccp and convex hold (16·m bytes each); more are subsampled.
        verbose: 1 prints a line per round.
        random_state: seed of the draws.

    Attributes:
        components_: A, [d, m].
        history_: a list of `Step`, which tells whether each step was certified.
        n_iter_: steps taken.
        classes_: the labels seen.
        n_features_in_: m.
        feature_names_in_: names of the features, if X had names.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> learner = TripletLearner(n_components=2, random_state=0, max_iter=50).fit(X, y)
    >>> learner.transform(X).shape, {step.stage for step in learner.history_ if step.certified}
    ((150, 2), {'gd'})
    """

    components_: NDArray[np.float64]
    history_: list[Step]
    n_iter_: int
    classes_: NDArray[Any]
    n_features_in_: int
    _adam: Adam | None

    def __init__(
        self,
        n_components: int | None = None,
        *,
        solver: str = "auto",
        margin: float = 1.0,
        mu: float | str = "annealed",
        triplets: str = "neighbors",
        robust: UncertaintySet | None = None,
        n_neighbors: int = 3,
        n_impostors: int = 10,
        init: str = "lda",
        max_iter: int | None = None,
        tol: float = 1e-7,
        batch_size: int = 512,
        refresh: int | None = None,
        max_triplets: int = 20000,
        verbose: int = 0,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.solver = solver
        self.margin = margin
        self.mu = mu
        self.triplets = triplets
        self.robust = robust
        self.n_neighbors = n_neighbors
        self.n_impostors = n_impostors
        self.init = init
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.refresh = refresh
        self.max_triplets = max_triplets
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn A from rows X [n, m] and their classes y [n]."""
        rows, labels = self._validate(X, y, reset=True)
        run, A = self._begin(rows, labels)
        steps, refresh = self.max_iter or STEPS[self.solver], self.refresh or REFRESH[self.solver]
        if self.solver in ("auto", "sgd"):
            A = run.run_stochastic(A, steps)
        if self.solver == "auto":
            A = run.run_certified("gd", A, min(POLISH, steps), REFRESH["gd"], polish=True)
        elif self.solver != "sgd":
            A = run.run_certified(self.solver, A, steps, refresh)
        return self._finish(run, A)

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Run a round of sgd on these rows only: choose triplets among them, and take `refresh` steps.

        The first call initializes A as `fit` does and fixes the scale of the features; after `fit` it continues. Each
        call needs two classes, and two rows of one of them.
        """
        first = not hasattr(self, "components_")
        rows, labels = self._validate(X, y, reset=first)
        if first:
            run, A = self._begin(rows, labels)
        else:
            run, A = self._run(rows, labels), torch.tensor(self.components_ * self._scale)
        if self._adam is None:
            self._adam = Adam.start(A.float())
        mu = anneal(run.plan.mu, run.plan.margin, 1.0)
        run.adam_round(self._adam, run.problem.x.float(), mu, [PARTIAL] * run.plan.refresh)
        return self._finish(run, self._adam.A.double(), self._adam)

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Map rows: X A', [n, d], in the precision of X."""
        check_is_fitted(self)
        rows: NDArray[Any] = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return np.asarray(rows @ self.components_.T.astype(rows.dtype))

    def pair_distance(self, pairs: ArrayLike) -> NDArray[np.float64]:
        """Distances |A(x - x')|, [n], of pairs [n, 2, m]."""
        check_is_fitted(self)
        both: NDArray[np.float64] = check_array(pairs, allow_nd=True, ensure_2d=False, dtype=np.float64, estimator=self)
        if both.ndim != 3 or both.shape[1:] != (2, self.n_features_in_):
            raise ValueError(
                f"TripletLearner: pairs must have shape [n, 2, {self.n_features_in_}], "
                f"but came with shape {list(both.shape)}."
            )
        return np.asarray(np.linalg.norm((both[:, 0] - both[:, 1]) @ self.components_.T, axis=1))

    def score_pairs(self, pairs: ArrayLike) -> NDArray[np.float64]:
        """Scores -|A(x - x')|, [n], of pairs [n, 2, m]: larger = more similar."""
        return -self.pair_distance(pairs)

    def get_mahalanobis_matrix(self) -> NDArray[np.float64]:
        """The matrix M = A'A, [m, m]: distances are √((x - x')' M (x - x'))."""
        check_is_fitted(self)
        return np.asarray(self.components_.T @ self.components_)

    def _validate(self, X: ArrayLike, y: ArrayLike, *, reset: bool) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Check the inputs: X [n, m] in float64 and classes 0, 1, ... [n]."""
        self._check_parameters()
        rows, targets = validate_data(self, X, y, reset=reset, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(targets)
        names, labels = np.unique(targets, return_inverse=True)
        if len(names) < 2:
            raise ValueError("TripletLearner: y must hold at least two classes, but only one class came.")
        if np.bincount(labels).max() < 2:
            raise ValueError(
                f"TripletLearner: some class must have at least two rows, but each of the {len(names)} has one sample; "
                "so no row has a target."
            )
        if self.n_components is not None and self.n_components > rows.shape[1]:
            raise ValueError(
                f"TripletLearner: n_components must be at most n_features = {rows.shape[1]}, "
                f"but came as {self.n_components}."
            )
        self.classes_ = names if reset else np.union1d(self.classes_, names)
        return rows, labels

    def _check_parameters(self) -> None:
        owner = type(self).__name__
        for name, allowed in (("solver", SOLVERS), ("triplets", KINDS), ("init", INITS)):
            check_choice(owner, name, getattr(self, name), allowed)
        for name in ("n_components", "n_neighbors", "n_impostors", "max_iter", "batch_size", "refresh", "max_triplets"):
            value = getattr(self, name)
            may_be_none = name in ("n_components", "max_iter", "refresh")
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and may_be_none):
                kind = "a whole number above zero" + (" or None" if may_be_none else "")
                raise ValueError(f"{owner}: {name} must be {kind}, but came as {value!r}.")
        check_positive(owner, "margin", self.margin, zero=True)
        check_positive(owner, "tol", self.tol, zero=True)
        if isinstance(self.mu, str):
            check_choice(owner, "mu", self.mu, ("annealed",))
        else:
            check_positive(owner, "mu", self.mu, zero=True)
        if self.robust is not None and not isinstance(self.robust, UncertaintySet):
            raise TypeError(f"{owner}: robust must be a set from nearfar.sets or None, but came as {self.robust!r}.")

    def _plan(self) -> Plan:
        over = KL(1.0) if self.robust is None and self.triplets == "dro" else self.robust
        return Plan(
            margin=float(self.margin),
            mu=None if isinstance(self.mu, str) else float(self.mu),
            kind=self.triplets,
            targets=int(self.n_neighbors),
            impostors=int(self.n_impostors),
            over=over,
            batch=int(self.batch_size),
            refresh=int(self.refresh or REFRESH["sgd"]),
            tolerance=float(self.tol),
        )

    def _begin(self, rows: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[Run, torch.Tensor]:
        """Start a run: its state and the initial A [d, m], in units where every feature has variance 1."""
        deviation = rows.std(axis=0)
        # the deviation of a constant feature is a rounding error, not a unit
        constant = deviation <= 1e-12 * np.abs(rows).max(axis=0)
        self._scale = np.where(constant, 1.0, deviation)
        self._random = check_random_state(self.random_state)
        self._adam = None
        self.history_ = []
        A = initialize(self.init, rows - rows.mean(axis=0), labels, self.n_components or rows.shape[1])
        run = self._run(rows, labels)
        return run, run.scale(torch.tensor(A * self._scale))

    def _run(self, rows: NDArray[np.float64], labels: NDArray[np.int64]) -> Run:
        seed = int(self._random.randint(2**31 - 1))
        problem = Problem.of(rows, labels, self._scale)
        return Run(problem, self._plan(), int(self.max_triplets), seed, int(self.verbose), self.history_)

    def _finish(self, run: Run, A: torch.Tensor, adam: Adam | None = None) -> Self:
        self.components_ = A.numpy() / self._scale
        self.history_ = run.history
        self.n_iter_ = max(1, len(run.history))
        self._adam = adam
        self._n_features_out = len(self.components_)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def initialize(init: str, X: Matrix, labels: NDArray[np.int64], components: int) -> Matrix:
    """Compute the initial A [components, m] for centered rows X [n, m] with classes 0, 1, ...

    >>> initialize("pca", np.array([[3.0, 0.1], [-3.0, -0.1], [0.0, 0.0]]), np.array([0, 1, 1]), 1).round(2)
    array([[1.  , 0.03]])
    """
    if init == "identity":
        return np.eye(components, X.shape[1])
    return principal(X, components) if init == "pca" else discriminant(X, labels, components)


def principal(X: Matrix, components: int) -> Matrix:
    """Eigenvectors of X'X with the largest eigenvalues, as rows; signs such that the largest entry is positive."""
    _, vectors = np.linalg.eigh(X.T @ X)
    rows = vectors.T[::-1][:components]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return np.asarray(rows * np.where(largest < 0, -1.0, 1.0))


def discriminant(X: Matrix, labels: NDArray[np.int64], components: int) -> Matrix:
    """Fisher's discriminant directions, followed by principal ones scaled to `FILL` times the mean length."""
    rows = X[:0]
    if X.any():
        rows = LinearDiscriminantAnalysis().fit(X, labels).scalings_.T[:components]
    rows = rows[np.isfinite(rows).all(axis=1) & (np.abs(rows).max(axis=1, initial=0.0) > 0)]
    if len(rows) == components:
        return np.asarray(rows, dtype=np.float64)
    length = FILL * np.linalg.norm(rows, axis=1).mean() if len(rows) else 1.0
    return np.concatenate([rows, length * principal(X, components - len(rows))])
