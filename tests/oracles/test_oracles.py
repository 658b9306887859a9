"""The reference implementations against numbers worked by hand, linear and convex programs, and limits."""

import ast
import functools
import inspect
import pathlib
import sys
from math import cos, exp, log, log1p, radians, sin, sqrt, tan

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from oracles import FOUND, losses, oracle_of, pairs, plain, sets, similarity
from oracles.gradient import gradient

FOLDER = pathlib.Path(__file__).parent
GENERATOR = 20240607

# Two batches on the unit circle once normalized; the lengths differ from 1 on purpose.
#   THREE: x0 = (1, 0), x1 = (.6, .8), x2 = (0, 1).   cosines s01 = .6, s02 = 0, s12 = .8
#   |x - y|^2 = 2 - 2 s:                              d01^2 = .8, d02^2 = 2, d12^2 = .4
#   labels 0, 0, 1: positive pairs (0,1), (1,0); negative pairs (0,2), (2,0), (1,2), (2,1).
THREE = np.array([[2.0, 0.0], [3.0, 4.0], [0.0, 0.5]])
THREE_LABELS = np.array([0, 0, 1])
#   FOUR: the same and x3 = (.8, .6).   s03 = .8, s13 = .96, s23 = .6;   d03^2 = .4, d13^2 = .08, d23^2 = .8
FOUR = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [4.0, 3.0]])


def near(value, expected, tolerance=1e-14):
    assert abs(value - expected) <= tolerance * max(1, abs(expected)), (value, expected)


# ---------------------------------------------------------------- files


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, "an oracle may import from its own folder only"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[!t]*.py")), ids=lambda path: path.name)
def test_oracle_files_use_numpy_and_the_standard_library_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in imported_modules(tree):
        assert name == "numpy" or name in sys.stdlib_module_names
    # __import__ would lose the independence; float(), .item() the extended precision that gradients of losses need
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
    assert not names & {"__import__", "import_module"}
    if path.stem not in ("retrieval", "descent", "geometry"):
        assert not names & {"float", "item", "tolist"}


def test_every_oracle_says_what_it_computes():
    assert len(set(FOUND.values())) == len(FOUND) > 20
    assert all(function.__doc__ for function in FOUND.values())
    assert oracle_of("DroTopKPN") is losses.dro_top_k_pn


def test_extended_precision_is_available():
    # The tolerances of the derivatives need 64 bits of mantissa or more.
    assert np.finfo(np.longdouble).eps < 2e-19


# ---------------------------------------------------------------- similarities and pairs


def test_similarities_by_hand():
    # x = (3, 4), y = (0, 2): <x, y> = 8; unit vectors (.6, .8), (0, 1): cosine .8, |difference|^2 = .36 + .04
    x, y = np.array([3, 4], dtype=np.longdouble), np.array([0, 2], dtype=np.longdouble)
    near(similarity.dot(x, y), 8)
    near(similarity.cosine(x, y), 0.8)
    near(similarity.neg_euclidean(x, y), -sqrt(0.4))
    near(similarity.neg_squared_euclidean(x, y), -0.4)
    near(similarity.neg_euclidean(x, y, normalize=False), -sqrt(13))  # |(3, 2)|
    near(similarity.neg_squared_euclidean(x, y, normalize=False), -13)
    near(np.cos(similarity.angle(x, y)), 0.8)
    zero = 0 * x
    assert similarity.cosine(zero, y) == 0
    near(similarity.neg_euclidean(zero, y), -1)
    near(similarity.angle(zero, y), np.pi / 2)
    near(similarity.angle(zero, zero), np.pi / 2)
    near(similarity.angle(x, -x), np.pi)


def test_score_matrix_is_rectangular_and_ordered():
    S = similarity.scores(FOUR, FOUR[:2], "cosine")
    assert S.shape == (4, 2)
    assert S.dtype == np.longdouble
    np.testing.assert_allclose(S.astype(float), [[1, 0.6], [0.6, 1], [0, 0.8], [0.8, 0.96]], atol=1e-15)
    np.testing.assert_array_equal(S, similarity.scores(FOUR, FOUR[:2], similarity.cosine))


def test_pair_losses_by_hand():
    # hinge at s = .6: positive .2 + .5 - .6 = .1, negative .2 - .5 + .6 = .3; smooth: mu log(1 + e^(x / mu))
    near(pairs.hinge(0.6, +1), 0.1)
    near(pairs.hinge(0.6, -1), 0.3)
    assert pairs.hinge(0.9, +1) == 0
    near(pairs.hinge(0.6, +1, smooth=0.1), 0.1 * log(1 + exp(1)))
    # logistic at s - t = .1: positive (2/2) log(1 + e^-.2), negative (2/40) log(1 + e^4)
    near(pairs.logistic(0.6, +1), log(1 + exp(-0.2)))
    near(pairs.logistic(0.6, -1), log(1 + exp(4)) / 20)
    # squared at d = .7: positive (.7 - .2)^2 and cubed; negative (1 - .7)^2; beyond the margins 0
    near(pairs.squared(-0.7, +1, pos_margin=0.2), 0.25)
    near(pairs.squared(-0.7, +1, pos_margin=0.2, power=3), 0.125)
    near(pairs.squared(-0.7, -1), 0.09)
    assert pairs.squared(-1.7, -1) == 0
    # linear: 2 * (.1 + (.5 - .6)) = 0 and 2 * (.1 - (.5 - .6)) = .4; score: 3 * .6
    near(pairs.linear(0.6, +1, threshold=0.5, margin=0.1, scale=2), 0)
    near(pairs.linear(0.6, -1, threshold=0.5, margin=0.1, scale=2), 0.4)
    near(pairs.score(0.6, +1, scale=3), 1.8)
    near(pairs.score(0.6, -1, scale=3), 1.8)


def test_exponentials_do_not_overflow_or_vanish():
    far = np.longdouble(1e6)
    assert pairs.softplus(far) == far
    assert pairs.softplus(-far) == 0
    near(sets.log_sum([far, far]), 1e6 + log(2))
    near(sets.log_sum([-far, -far]), -1e6 + log(2))
    near(sets.log_one_plus_sum([far, 0]), 1e6)
    assert sets.log_one_plus_sum([]) == 0
    # log(1 + e^-60) = e^-60 to 26 digits: nothing of it may be lost beside the 1.
    small = np.exp(np.longdouble(-60))
    assert abs(sets.log_one_plus_sum([-60]) / small - 1) < 1e-17
    assert abs(pairs.softplus(np.longdouble(-60)) / small - 1) < 1e-17


# ---------------------------------------------------------------- sets

VALUES_AND_WEIGHTS = {
    "mean": (sets.mean, sets.mean_weights, {}),
    "worst": (sets.worst, sets.worst_weights, {}),
    "topk": (sets.topk, sets.topk_weights, {"k": 2.5}),
    "topk fraction": (sets.topk, sets.topk_weights, {"fraction": 0.3}),
    "kl": (sets.kl, sets.kl_weights, {"gamma": 0.2}),
    "kl ball": (sets.kl_ball, sets.kl_ball_weights, {"rho": 0.3}),
    "chi square": (sets.chi_square, sets.chi_square_weights, {"rho": 3}),
}
EVERY_SET = pytest.mark.parametrize(
    ("value", "share", "hyper"), VALUES_AND_WEIGHTS.values(), ids=VALUES_AND_WEIGHTS.keys()
)


def random_losses(generator, count, weighted):
    items = generator.normal(size=count)
    return items, generator.uniform(0.5, 2, size=count) if weighted else None


@EVERY_SET
def test_nothing_costs_nothing(value, share, hyper):
    assert value([], **hyper) == 0
    assert value([], zero_member=True, **hyper) == 0
    assert value([-1, 0, -2], zero="drop", **hyper) == 0
    assert value([3, 1], weights=[0, 0], **hyper) == 0
    np.testing.assert_array_equal(share([-1, 0, -2], zero="drop", **hyper), [0, 0, 0])


@EVERY_SET
def test_equal_losses(value, share, hyper):
    # Any p with sum 1 gives the common loss; ties share in proportion to w.
    near(value([0.7, 0.7, 0.7], weights=[1, 2, 1], **hyper), 0.7)
    np.testing.assert_allclose(
        share([0.7, 0.7, 0.7], weights=[1, 2, 1], **hyper).astype(float), [0.25, 0.5, 0.25], rtol=1e-15
    )


@EVERY_SET
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_are_the_gradient_and_a_distribution(value, share, hyper, weighted):
    # Danskin: the maximizer p* is the derivative of the value by the losses.
    generator = np.random.default_rng(GENERATOR)
    items, base = random_losses(generator, 7, weighted)
    p = share(items, weights=base, **hyper)
    near(np.sum(p), 1, 1e-17)
    assert np.all(p >= 0)
    slope = gradient(lambda z: value(z, weights=base, **hyper), items)
    np.testing.assert_allclose(p.astype(float), slope, atol=1e-12)


@EVERY_SET
def test_a_weight_is_a_number_of_copies(value, share, hyper):
    generator = np.random.default_rng(GENERATOR)
    items = generator.normal(size=4)
    copies = [1, 3, 0, 2]
    repeated = np.repeat(items, copies)
    near(value(items, weights=copies, **hyper), value(repeated, **hyper), 1e-17)
    parts = np.split(share(repeated, **hyper), np.cumsum(copies)[:-1])
    expected = [np.sum(part) for part in parts]
    np.testing.assert_allclose(share(items, weights=copies, **hyper), expected, atol=1e-17)


@EVERY_SET
def test_zero_member_and_dropping_by_their_definition(value, share, hyper):
    items, base = np.array([0.4, -0.3, 0.9, 0.0, -1.0]), np.array([1, 2, 0.5, 1, 1])
    near(value(items, weights=base, zero_member=True, **hyper), value([*items, 0], weights=[*base, 1], **hyper), 1e-18)
    near(value(items, weights=base, zero="drop", **hyper), value([0.4, 0.9], weights=[1, 0.5], **hyper), 1e-18)
    both = value(items, weights=base, zero="drop", zero_member=True, **hyper)
    near(both, value([0.4, 0.9, 0], weights=[1, 0.5, 1], **hyper), 1e-18)
    p = share(items, weights=base, zero="drop", zero_member=True, **hyper)
    expected = share([0.4, 0.9, 0], weights=[1, 0.5, 1], **hyper)
    np.testing.assert_array_equal(p, [expected[0], 0, expected[1], 0, 0])
    if value is not sets.kl:  # its value has the divergence subtracted
        near(np.sum(p * items), both, 1e-17)


@EVERY_SET
@pytest.mark.parametrize("weighted", [False, True])
def test_between_mean_and_maximum_and_translation(value, share, hyper, weighted):
    generator = np.random.default_rng(GENERATOR + 1)
    items, base = random_losses(generator, 9, weighted)
    result = value(items, weights=base, **hyper)
    assert sets.mean(items, base) <= result + 1e-17
    assert result <= np.max(items) + 1e-17
    near(value(items + 5, weights=base, **hyper), result + 5, 1e-15)  # items + 5 is rounded to double


def test_topk_by_hand():
    # losses 5, 3, 3, 1: mass 2.5 takes 5, 3 and half of the other 3: (5 + 3 + 1.5) / 2.5 = 3.8
    near(sets.topk([3, 5, 1, 3], k=2.5), 3.8)
    # the two tied items share the mass 1.5 that is left: p = 1/2.5 and .75/2.5 each
    np.testing.assert_allclose(sets.topk_weights([3, 5, 1, 3], k=2.5).astype(float), [0.3, 0.4, 0, 0.3])
    # weights 2, .5: mass 2 = .5 of the 5, 1.5 of the 3: (2.5 + 4.5) / 2
    near(sets.topk([3, 5], k=2, weights=[2, 0.5]), 3.5)
    # k < 1 is the maximum, k beyond W the mean, fraction .5 of W = 4 is k = 2
    near(sets.topk([3, 5, 1, 3], k=0.25), 5)
    near(sets.topk([3, 5, 1, 3], k=9), 3)
    near(sets.topk([3, 5, 1, 3], fraction=0.5), 4)
    # dropping first: two items are left of k = 3, so their mean
    near(sets.topk([3, -1, 0, 5], k=3, zero="drop"), 4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [0.5, 1, 2, 3.3, 6])
def test_topk_is_the_linear_program(k, weighted):
    # max sum p_i l_i, 0 <= p_i <= w_i / k, sum p = 1
    generator = np.random.default_rng(GENERATOR)
    items, base = random_losses(generator, 8, weighted)
    upper = np.ones(8) if base is None else base
    bounds = [(0, w / k) for w in upper]
    solution = linprog(-items, A_eq=np.ones((1, 8)), b_eq=[1], bounds=bounds)
    near(sets.topk(items, k=k, weights=base), -solution.fun, 1e-10)
    np.testing.assert_allclose(sets.topk_weights(items, k=k, weights=base).astype(float), solution.x, atol=1e-9)


def test_kl_by_hand_and_its_limits():
    # two items 0 and g log 3: mean of the exponentials (1 + 3) / 2 = 2, p = 1/4, 3/4
    gamma = 0.3
    items = [0, gamma * log(3)]
    near(sets.kl(items, gamma), gamma * log(2))
    near(sets.kl(items, gamma, normalized=False), gamma * log(4))
    np.testing.assert_allclose(sets.kl_weights(items, gamma).astype(float), [0.25, 0.75])
    # weights 3, 1: (3 + 3) / 4
    near(sets.kl(items, gamma, weights=[3, 1]), gamma * log(1.5))
    # large gamma: mean + variance / (2 gamma) + ...; small gamma: max - gamma log(n / ties)
    items = np.array([0.3, 1.0, -0.2, 1.0])
    average, variance = np.mean(items), np.var(items)
    near(sets.kl(items, 1e6), average + variance / 2e6, 1e-12)
    near(sets.kl(items, 1e-3), 1 - 1e-3 * log(2), 1e-15)
    np.testing.assert_allclose(sets.kl_weights(items, 1e-3).astype(float), [0, 0.5, 0, 0.5], atol=1e-15)


def test_kl_ball_by_hand_and_its_limits():
    # two items 0 and 1: p = (1 - q, q) with KL = log 2 + q log q + (1 - q) log(1 - q) = rho: value q
    q = 0.8
    rho = log(2) + q * log(q) + (1 - q) * log(1 - q)
    near(sets.kl_ball([0, 1], rho), q)
    np.testing.assert_allclose(sets.kl_ball_weights([0, 1], rho).astype(float), [0.2, 0.8])
    # rho >= log(W / W_ties): two of four items are at the maximum, so log 2 is enough
    items = [0.3, 1.0, -0.2, 1.0]
    assert sets.kl_ball(items, log(2) * (1 + 1e-12)) == 1
    assert 0.999 < sets.kl_ball(items, log(2) * (1 - 1e-6)) < 1
    # with weights 2, 1, 1, 3 of the four: W = 7, ties 1 + 3
    assert sets.kl_ball(items, log(7 / 4) * (1 + 1e-12), weights=[2, 1, 1, 3]) == 1
    assert sets.kl_ball(items, log(7 / 4) * (1 - 1e-6), weights=[2, 1, 1, 3]) < 1
    np.testing.assert_allclose(sets.kl_ball_weights(items, 5, weights=[2, 1, 1, 3]).astype(float), [0, 0.25, 0, 0.75])
    # small rho: mean + sqrt(2 rho Var) + (third central moment / Var) rho / 3 + ...
    near(sets.kl_ball(items, 0), np.mean(items))
    near(sets.kl_ball(items, 1e-10), np.mean(items) + sqrt(2e-10 * np.var(items)), 1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rho", [0.01, 0.2, 1.0])
def test_kl_ball_conditions_of_optimality(rho, weighted):
    generator = np.random.default_rng(GENERATOR)
    items, base = random_losses(generator, 8, weighted)
    q = (np.ones(8) if base is None else base).astype(np.longdouble)
    q = q / np.sum(q)
    p = sets.kl_ball_weights(items, rho, weights=base)
    divergence = np.sum(p * np.log(p / q))
    near(divergence, rho, 1e-17)
    # Stationarity: l_i - g log(p_i / q_i) is the same for all i, with g > 0.
    ratio = np.log(p / q)
    g = (items[0] - items[1]) / (ratio[0] - ratio[1])
    assert g > 0
    assert np.ptp(items - g * ratio) < 1e-15
    value = sets.kl_ball(items, rho, weights=base)
    near(np.sum(p * items), value, 1e-16)
    # The dual is above the value at every other temperature.
    for temperature in g * np.array([0.5, 0.99, 1.01, 2]):
        assert temperature * (rho + np.log(np.sum(q * np.exp(items / temperature)))) > value


@pytest.mark.filterwarnings(
    "ignore:Values in x were outside bounds:RuntimeWarning"
)  # scipy 1.11 says so of its own steps
@pytest.mark.parametrize("rho", [0.05, 0.7])
def test_kl_ball_is_the_convex_program(rho):
    generator = np.random.default_rng(GENERATOR + 2)
    items = generator.normal(size=6)
    base = generator.uniform(0.5, 2, size=6)
    q = base / base.sum()

    def divergence(p):
        return np.sum(p * np.log(np.maximum(p, 1e-300) / q))

    solution = minimize(
        lambda p: -p @ items,
        q,
        jac=lambda p: -items,
        bounds=[(1e-12, 1)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(6)},
            {"type": "ineq", "fun": lambda p: rho - divergence(p), "jac": lambda p: -np.log(p / q) - 1},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    near(sets.kl_ball(items, rho, weights=base), -solution.fun, 1e-7)


def test_chi_square_by_hand():
    # two items 0 and 1, n = 2: p = (1 - q, q), q^2 + (1 - q)^2 = 1/2 + rho/2, so q = 1/2 + sqrt(rho)/2
    near(sets.chi_square([0, 1], 0.25), 0.75)
    near(sets.chi_square([0, 1], 0), 0.5)
    assert sets.chi_square([0, 1], 1) == 1
    assert sets.chi_square([0, 1], 7) == 1
    # 0, 0, .1, .1, .5, .5 with rho = 4.5, n = 6: sum p^2 = 1/6 + 9/36 = 5/12. The support is the upper four,
    # with a, a, b, b: a + b = 1/2 and a^2 + b^2 = 5/24, so 2ab = 1/4 - 5/24 = 1/24 and
    # (b - a)^2 = 5/24 - 1/24 = 1/6. Value .2 a + b = .3 + .4 sqrt(1/6).
    # (eta = .1 - .4 a / (b - a) = .055 > 0: the zeros are indeed out.)
    items = [0.1, 0, 0.5, 0.1, 0, 0.5]
    near(sets.chi_square(items, 4.5), 0.3 + 0.4 * sqrt(1 / 6))
    a, b = 0.25 - sqrt(1 / 6) / 2, 0.25 + sqrt(1 / 6) / 2
    np.testing.assert_allclose(sets.chi_square_weights(items, 4.5).astype(float), [a, 0, b, a, 0, b], atol=1e-15)
    # Two ties at the maximum: reached from sum p^2 >= 1/2, i.e. rho >= 6.
    assert sets.chi_square(items, 6) == 0.5
    assert sets.chi_square(items, 5.999) < 0.5


@pytest.mark.parametrize("rho", [1e-6, 0.1, 0.7, 2.0, 3.5, 8.0, 30.0])
def test_chi_square_closed_form_where_it_holds(rho):
    # mean + sqrt(2 rho Var / n) is exact iff 2 rho (mean - min)^2 <= n Var, and strictly too large otherwise.
    seen = []
    for seed in range(10):
        items = np.random.default_rng(seed).normal(size=7).astype(np.longdouble)
        average, variance = np.mean(items), np.var(items)
        holds = bool(2 * rho * (average - np.min(items)) ** 2 <= 7 * variance)
        closed = average + np.sqrt(2 * rho * variance / 7)
        value = sets.chi_square(items, rho)
        seen.append(holds)
        if holds:
            near(value, closed, 1e-17)
        else:
            assert value < closed - 1e-10
    # (mean - min)^2 >= Var / (n - 1), so the condition fails for every list from rho = n (n - 1) / 2 on.
    if rho < 0.1:
        assert all(seen)
    if rho >= 21:
        assert not any(seen)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rho", [0.3, 2.0, 6.0])
def test_chi_square_conditions_of_optimality(rho, weighted):
    generator = np.random.default_rng(GENERATOR)
    items, base = random_losses(generator, 8, weighted)
    items = items.astype(np.longdouble)
    w = (np.ones(8) if base is None else base).astype(np.longdouble)
    n = np.sum(w)
    p = sets.chi_square_weights(items, rho, weights=base)
    near(np.sum(p**2 / w), 1 / n + 2 * rho / n**2, 1e-17)
    # Stationarity: l_i = eta + c p_i / w_i on the support, l_i <= eta off it, with one eta and one c > 0.
    inside = np.flatnonzero(p > 0)
    first, last = inside[np.argmax(items[inside])], inside[np.argmin(items[inside])]
    c = (items[first] - items[last]) / (p[first] / w[first] - p[last] / w[last])
    eta = items[first] - c * p[first] / w[first]
    assert c > 0
    np.testing.assert_allclose(items[inside], eta + c * p[inside] / w[inside], atol=1e-16)
    assert np.all(items[p == 0] <= eta + 1e-16)
    # The dual attains the value at eta and is above it elsewhere.
    value = sets.chi_square(items, rho, weights=base)

    def dual(at):
        return at + np.sqrt(1 + 2 * rho / n) * np.sqrt(np.sum(w * np.maximum(items - at, 0) ** 2) / n)

    near(dual(eta), value, 1e-16)
    for shift in (-0.3, -0.01, 0.01, 0.3):
        assert dual(eta + shift) > value


@pytest.mark.parametrize("rho", [0.3, 4.0, 12.0])
def test_chi_square_is_the_convex_program(rho):
    generator = np.random.default_rng(GENERATOR + 3)
    items = generator.normal(size=6)
    base = generator.uniform(0.5, 2, size=6)
    n = base.sum()
    radius = 1 / n + 2 * rho / n**2
    solution = minimize(
        lambda p: -p @ items,
        base / n,
        jac=lambda p: -items,
        bounds=[(0, 1)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(6)},
            {"type": "ineq", "fun": lambda p: radius - np.sum(p**2 / base), "jac": lambda p: -2 * p / base},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    near(sets.chi_square(items, rho, weights=base), -solution.fun, 1e-7)


# ---------------------------------------------------------------- derivatives


def test_gradient_of_known_functions():
    x = np.array([[0.3, -1.2], [2.0, 0.05]])

    def f(z):
        return np.sum(np.exp(z) * np.sin(3 * z)) + z[0, 0] * z[1, 1] ** 3

    expected = np.exp(x) * (np.sin(3 * x) + 3 * np.cos(3 * x))
    expected[0, 0] += x[1, 1] ** 3
    expected[1, 1] += 3 * x[0, 0] * x[1, 1] ** 2
    result = gradient(f, x)
    assert result.dtype == np.float64
    assert result.shape == x.shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-11)
    # A steep one: log(1 + e^(80 z)), derivative 80 / (1 + e^(-80 z)), fifth derivative of the order 80^5.
    dl_ds = gradient(lambda z: pairs.softplus(80 * z), np.array(0.01))
    near(dl_ds, 80 / (1 + exp(-0.8)), 1e-11)


def random_batch(classes=3, rows=7, dim=3):
    generator = np.random.default_rng(GENERATOR)
    E, vectors = generator.normal(size=(rows, dim)), generator.normal(size=(classes, dim))
    return E, np.arange(rows) % classes, vectors


NEEDED = {
    "drotopk": {"k": 2.5},
    "drotopkpn": {"k": 2.5},
    "drotrimmed": {"top": 1.5, "k": 2.5},
    "drotrimmedpn": {"wrong": 0.3, "k": 2.5},
    "drochisquare": {"rho": 2.0},
    "siglip": {"scale": 3.0, "bias": -1.0},  # a bias of -10 gives a large value, and its rounding
}


def vectors_of(name):
    """The argument for class vectors, where an oracle has one."""
    return {"proxies", "centers"} & set(inspect.signature(oracle_of(name)).parameters)


def bound_oracle(name, vectors):
    hyper = dict(NEEDED.get(plain(name), {}))
    hyper |= dict.fromkeys(vectors_of(name), vectors)
    return functools.partial(oracle_of(name), **hyper)


@pytest.mark.parametrize("name", FOUND)
def test_values_carry_extended_precision(name):
    # In double the rounding of f alone would leave 1e-10 between derivatives with different steps.
    E, y, vectors = random_batch()
    loss = bound_oracle(name, vectors)
    value = loss(E, y)
    assert isinstance(value, np.longdouble)
    assert np.isfinite(value)
    assert value > 0
    part = E[:2]  # two rows are enough to see it

    def f(rows):
        return loss(np.concatenate([rows, E[2:]]), y)

    fine, coarse = gradient(f, part, step=1e-6), gradient(f, part, step=2e-6)
    size = max(1, np.max(np.abs(fine)))
    assert np.max(np.abs(fine - coarse)) < 2e-12 * size


# ---------------------------------------------------------------- losses by hand

D01, D02, D12 = sqrt(0.8), sqrt(2), sqrt(0.4)  # THREE; also FOUR, where
D03, D13, D23 = sqrt(0.4), sqrt(0.08), sqrt(0.8)


def softplus(x):
    return log1p(exp(x))


# All pairs of THREE count twice (both orders), so a mean over ordered pairs is a mean over 01 | 02, 12.
# hinge(.2, .5) of the cosines: 01 .7 - .6 = .1 | 02 -.3 + 0 -> 0, 12 -.3 + .8 = .5.
HAND_THREE = [
    # squares: 01 d^2 = .8 | 02 max(1 - sqrt 2, 0) = 0, 12 (1 - sqrt .4)^2
    ("Contrastive", {}, (0.8 + 0 + (1 - D12) ** 2) / 3),
    ("Contrastive", {"reduction": "nonzero"}, 0.8 + (1 - D12) ** 2),
    ("Contrastive", {"pos_margin": 0.1, "neg_margin": 2, "power": 1}, (D01 - 0.1 + 2 - D02 + 2 - D12) / 3),
    # 01 .2 + .894 - 1.2 < 0 | 02 1.4 - 1.414 < 0, 12 1.4 - sqrt .4
    ("Margin", {}, (1.4 - D12) / 3),
    ("Margin", {"reduction": "nonzero"}, 1.4 - D12),
    ("Margin", {"beta": 1.0}, (D01 - 0.8 + 0 + 1.2 - D12) / 3),
    # s - .5: 01 .1 | 02 -.5, 12 .3, slopes 2 and 40, factors 2/2 and 2/40
    ("BinomialDeviance", {}, (softplus(-0.2) + softplus(-20) / 20 + softplus(12) / 20) / 3),
    ("DroWorst", {}, 0.5),
    # mass 2k over the ordered losses .5 .5 .1 .1 0 0
    ("DroTopK", {"k": 1}, 0.5),
    ("DroTopK", {"k": 1.5}, (0.5 + 0.5 + 0.1) / 3),
    ("DroTopK", {"k": 2}, 0.3),
    ("DroTopK", {"k": 40}, 0.2),
    ("DroTopK", {"fraction": 0.5}, (0.5 + 0.5 + 0.1) / 3),
    # the zeros dropped: k = 40 is the mean of .5 .5 .1 .1
    ("DroTopK", {"k": 40, "zero": "drop"}, 0.3),
    # h = min(k, |P|) = 1: (.1 + .5) / 2; h = 2: (.1 + .1 + .5 + .5) / 4
    ("DroTopKPN", {"k": 1}, 0.3),
    ("DroTopKPN", {"k": 9}, 0.3),
    # the items .1 .1 .5 .5, or with the zeros kept all six
    ("DroKL", {"gamma": 0.1}, 0.1 * log((exp(1) + exp(5)) / 2)),
    ("DroKL", {"gamma": 0.25, "zero": "keep"}, 0.25 * log((exp(0.4) + exp(2) + 1) / 3)),
    # anchors: 0: .1 and (0 dropped) 0; 1: .1 and .5; 2: no positive, and .5 alone. One item has its own loss.
    ("DroKLGrouped", {}, (0.1 + 0.1 + 0.5 + 0.5) / 3),
    ("DroKLGrouped", {"reduction": "sum"}, 1.2),
    # kept: anchor 2 has the negative losses 0 and .5
    (
        "DroKLGrouped",
        {"gamma": 0.25, "zero": "keep"},
        (0.1 + 0.1 + 0.5 + 0.25 * log((1 + exp(2)) / 2)) / 3,
    ),
    # mean .2, mean of squares .52/6, Var = .52/6 - .04 = .14/3; 2 * 3 * .2^2 = .24 <= 6 Var = .28
    ("DroChiSquare", {"rho": 3}, 0.2 + sqrt(2 * 3 * (0.14 / 3) / 6)),
    # see test_chi_square_by_hand
    ("DroChiSquare", {"rho": 4.5}, 0.3 + 0.4 * sqrt(1 / 6)),
    ("DroChiSquare", {"rho": 6}, 0.5),
    # dropped: .1 .1 .5 .5, mean .3, Var = .04, n = 4; 2 * .5 * .2^2 <= 4 * .04
    ("DroChiSquare", {"rho": 0.5, "zero": "drop"}, 0.3 + sqrt(0.04 / 4)),
    # both orders of the positive pair 01 give the same J
    ("LiftedStructure", {}, (D01 + log(exp(1 - D02) + exp(1 - D12))) ** 2 / 2),
    # anchor 0: d01 + 1 - d02 = .48; 1: d01 + 1 - d12; 2: nothing positive, only the two negative = .74
    (
        "GeneralizedLifted",
        {},
        ((D01 + 1 - D02) + (D01 + 1 - D12) + log(exp(1 - D02) + exp(1 - D12))) / 3,
    ),
    # cosine, margin 0: anchor 0: -.6 + 0 < 0; 1: -.6 + .8; 2: log(e^0 + e^.8)
    (
        "GeneralizedLifted",
        {"similarity": "cosine", "reduction": "sum", "margin": 0},
        0 + 0.2 + log(1 + exp(0.8)),
    ),
    # s - t: 01 .1 | 02 -.5, 12 .3
    (
        "MultiSimilarity",
        {},
        (
            (softplus(-0.2) / 2 + softplus(-25) / 50)
            + (softplus(-0.2) / 2 + softplus(15) / 50)
            + log(1 + exp(-25) + exp(15)) / 50
        )
        / 3,
    ),
    # miner: anchor 0: .6 - .1 < 0 no, 0 + .1 > .6 no; 1: .5 < .8 yes, .9 > .6 yes; 2: no positive, keeps none
    ("MultiSimilarity", {"epsilon": 0.1}, (softplus(-0.2) / 2 + softplus(15) / 50) / 3),
    # one item a side has weight 1: anchor 0: .894 - 1.414 + .2 < 0; 1: d01 - d12 + .2; 2: no positive
    ("HAP2S", {}, (D01 - D12 + 0.2) / 3),
    ("HAP2S", {"weights": "polynomial", "margin": 1}, (D01 - D02 + 1 + D01 - D12 + 1) / 3),
    # the triplets 0 1 2: .894 - 1.414 + .05 < 0, and 1 0 2: .894 - .632 + .05
    ("Triplet", {"mining": "all"}, (D01 - D12 + 0.05) / 2),
    ("Triplet", {"mining": "all", "reduction": "nonzero"}, D01 - D12 + 0.05),
    ("Triplet", {"mining": "all", "squared": True}, (0.8 - 0.4 + 0.05) / 2),
    (
        "Triplet",
        {"mining": "all", "smooth": 0.5},
        0.5 * (softplus(2 * (D01 - D02 + 0.05)) + softplus(2 * (D01 - D12 + 0.05))) / 2,
    ),
    # .894 < 1.414 < .894 + margin: from margin .52 on; 1 0 2 never (.632 < .894)
    ("Triplet", {"mining": "semihard"}, 0),
    ("Triplet", {"mining": "semihard", "margin": 0.6}, D01 - D02 + 0.6),
    # three anchors, of which 2 has no positive
    ("Triplet", {"mining": "hard"}, (D01 - D12 + 0.05) / 3),
    ("Triplet", {"mining": "hard", "reduction": "nonzero"}, D01 - D12 + 0.05),
    ("Triplet", {"mining": "hardest"}, D01 - D12 + 0.05),
    # 45 degrees: t = 1, 4 <x0 + x1, x2> - 4 <x0, x1> = 4 * .8 - 4 * .6, the same for (1, 0)
    ("Angular", {"degrees": 45}, softplus(0.8)),
    ("Angular", {}, softplus(4 * 0.8 * tan(radians(40)) ** 2 - 2 * 0.6 * (1 + tan(radians(40)) ** 2))),
    # (0 - .6) / .5 and (.8 - .6) / .5
    ("NTXent", {"temperature": 0.5}, (softplus(-1.2) + softplus(0.4)) / 2),
    # with one positive each, the same numbers; only two anchors have both sides
    ("SupCon", {"temperature": 0.5}, (softplus(-1.2) + softplus(0.4)) / 2),
    # margin .25, scale 10: 01 -10 * .65 * (.6 - .75) = .975
    #                     | 02 10 * .25 * -.25 = -.625, 12 10 * 1.05 * .55 = 5.775
    ("Circle", {"margin": 0.25, "scale": 10}, (softplus(0.975 - 0.625) + softplus(0.975 + 5.775)) / 2),
    # margin .4, scale 80: 01 has s = 1 - m: 0 | 02 -80 * .16 = -12.8, 12 80 * 1.2 * .4 = 38.4
    ("Circle", {}, (softplus(-12.8) + softplus(38.4)) / 2),
]


@pytest.mark.parametrize(("name", "hyper", "expected"), HAND_THREE)
def test_three_rows_by_hand(name, hyper, expected):
    near(oracle_of(name)(THREE, THREE_LABELS, **hyper), expected)


def test_logistic_pairs_in_the_dro_losses():
    # the numbers of BinomialDeviance: 01 softplus(-.2) = .598 | 02 ~ 0, 12 softplus(12) / 20 = .600
    near(losses.dro_worst(THREE, THREE_LABELS, pair=pairs.logistic), softplus(12) / 20)
    near(
        losses.dro_top_k(THREE, THREE_LABELS, k=2, pair=pairs.logistic),
        (softplus(12) / 20 + softplus(-0.2)) / 2,
    )


def test_top_k_of_each_sign_by_hand():
    # FOUR with labels 0 1 0 1: positive 02 s = 0: .7, 13 s = .96: 0; negative 01, 23 s = .6: .3, 03, 12 s = .8: .5
    # Ordered: positive .7 .7 0 0, negative .5 x 4, .3 x 4.
    labels = [0, 1, 0, 1]
    near(losses.dro_top_k_pn(FOUR, labels, k=3), (0.7 + 0.7 + 0 + 3 * 0.5) / 6)
    near(losses.dro_top_k_pn(FOUR, labels, k=2.5), (0.7 + 0.7 + 0 + 2.5 * 0.5) / 5)
    near(losses.dro_top_k_pn(FOUR, labels, k=50), (1.4 + 4 * 0.5) / 8)  # h = |P| = 4
    # labels 0 0 0 1: positive 01 .1, 02 .7, 12 0 (6 ordered); negative 03 .5, 13 .66, 23 .3 (6 ordered)
    near(losses.dro_top_k_pn(FOUR, [0, 0, 0, 1], k=3), (0.7 + 0.7 + 0.1 + 0.66 + 0.66 + 0.5) / 6)
    # all positive: 01 .1, 02 .7, 03 0, 12 0, 13 0, 23 .1; there is no negative pair to add
    near(losses.dro_top_k_pn(FOUR, [0, 0, 0, 0], k=3), (0.7 + 0.7 + 0.1) / 3)


def test_hap2s_weights_by_hand():
    # FOUR with labels 0 0 0 1: anchor 3 has no positive. gamma = .5: p ~ e^(2 d); one negative, of weight 1.
    def farthest(first, second, rule):
        p, q = rule(first), rule(second)
        return (p * first + q * second) / (p + q)

    for weights, rule in (("exponential", lambda d: exp(2 * d)), ("polynomial", lambda d: (1 + d) ** 10)):
        terms = [
            farthest(D01, D02, rule) - D03 + 1,
            farthest(D01, D12, rule) - D13 + 1,
            farthest(D02, D12, rule) - D23 + 1,
        ]
        near(losses.hap2s(FOUR, [0, 0, 0, 1], margin=1, weights=weights), sum(terms) / 4)
    # labels 0 0 1 2: anchors 0 and 1 only, one positive, negative 2 and 3 with q ~ e^(-2 d) or (1 + d)^-20
    for weights, rule in (("exponential", lambda d: exp(-2 * d)), ("polynomial", lambda d: (1 + d) ** -20)):
        terms = [D01 - farthest(D02, D03, rule) + 1, D01 - farthest(D12, D13, rule) + 1]
        near(losses.hap2s(FOUR, [0, 0, 1, 2], margin=1, weights=weights), sum(terms) / 4)


def test_sup_con_with_two_positive_by_hand():
    # FOUR with labels 0 0 0 1, temperature .5 (all cosines doubled); anchor 3 has no positive
    terms = [
        log(exp(1.2) + exp(0) + exp(1.6)) - (1.2 + 0) / 2,
        log(exp(1.2) + exp(1.6) + exp(1.92)) - (1.2 + 1.6) / 2,
        log(exp(0) + exp(1.6) + exp(1.2)) - (0 + 1.6) / 2,
    ]
    near(losses.sup_con(FOUR, [0, 0, 0, 1], temperature=0.5), sum(terms) / 3)


def test_semihard_and_hard_triplets_of_four_rows():
    # labels 0 1 0 1: positive 02 (1.414), 13 (.283). Anchor 1: p = 3, n = 0 (.894), 2 (.632); anchor 3: p = 1,
    # n = 0 (.632), 2 (.894); anchors 0, 2: p at 1.414, n at .894 and .632. Margin .5 reaches .783.
    labels = [0, 1, 0, 1]
    near(losses.triplet(FOUR, labels, margin=0.5, mining="semihard"), D13 - D12 + 0.5)
    # hard: anchors 0, 2: 1.414 - .632 + .5; 1, 3: .283 - .632 + .5
    near(losses.triplet(FOUR, labels, margin=0.5, mining="hard"), (D02 - D12 + D13 - D12 + 1) / 2)
    near(losses.triplet(FOUR, labels, margin=0.5, mining="hardest"), D02 - D12 + 0.5)
    # labels 0 0 0 1: the farther of two positive, and the one negative; anchor 3 has no positive
    expected = (D02 - D03 + D01 - D13 + D02 - D23 + 1.5) / 4
    near(losses.triplet(FOUR, [0, 0, 0, 1], margin=0.5, mining="hard"), expected)


def test_multi_similarity_miner_by_hand():
    # alpha = beta = 1, threshold 0: terms log(1 + sum_P e^-s) + log(1 + sum_N e^s)
    def mined(labels, epsilon):
        return losses.multi_similarity(FOUR, labels, alpha=1, beta=1, threshold=0, epsilon=epsilon)

    # labels 0 0 0 1; anchor 3 keeps none.
    # anchor 0: positive .6 and 0 below the negative .8: all kept. anchor 1: positive .6, .8, negative .96: all kept.
    # anchor 2: positive 0 and .8, negative .6: the .8 is kept iff .8 - epsilon < .6.
    zero = log(1 + exp(-0.6) + 1) + softplus(0.8)
    one = log(1 + exp(-0.6) + exp(-0.8)) + softplus(0.96)
    near(mined([0, 0, 0, 1], 0.1), (zero + one + softplus(0) + softplus(0.6)) / 4)
    near(mined([0, 0, 0, 1], 0.3), (zero + one + log(1 + 1 + exp(-0.8)) + softplus(0.6)) / 4)
    # labels 0 0 1 2; anchors 2 and 3 keep none.
    # anchor 0: positive .6, negative 0 (kept iff 0 + epsilon > .6) and .8. anchor 1: positive .6, negative .8, .96.
    one = softplus(-0.6) + log(1 + exp(0.8) + exp(0.96))
    near(mined([0, 0, 1, 2], 0.1), (softplus(-0.6) + softplus(0.8) + one) / 4)
    near(mined([0, 0, 1, 2], 0.7), (softplus(-0.6) + log(1 + 1 + exp(0.8)) + one) / 4)


def test_n_pair_by_hand():
    # classes 7 and 2 have two rows: a = (1,0), p = (2,1) and a = (0,1), p = (1,3); class 5 has one row.
    # <a7,p2> - <a7,p7> = 1 - 2, <a2,p7> - <a2,p2> = 1 - 3. Squares 1 + 5 + 1 + 10 + 2 = 19 over 5 rows.
    E, y = np.array([[1, 0], [0, 1], [1, 1], [2, 1], [1, 3]]), np.array([7, 2, 5, 7, 2])
    near(losses.n_pair(E, y), (softplus(-1) + softplus(-2)) / 2 + 0.02 * 19 / 5)
    # third members do not count, except in the squares: |(9, 9)|^2 = 162
    more, labels = np.vstack([E, [9, 9]]), np.append(y, 2)
    near(losses.n_pair(more, labels), (softplus(-1) + softplus(-2)) / 2 + 0.02 * 181 / 6)
    # one class with two rows: only the squares are left
    near(losses.n_pair(E[:4], y[:4], l2=0.5), 0.5 * 9 / 4)


def test_proxy_nca_by_hand():
    # proxies (1, 0) and (0, 1) (after normalization); row (.6, .8): squared distances .8 and .4
    near(losses.proxy_nca([[3, 4]], [0], proxies=[[1, 0], [0, 2]]), softplus(0.4))
    near(losses.proxy_nca([[3, 4]], [1], proxies=[[1, 0], [0, 2]]), softplus(-0.4))
    # a third proxy (-1, 0): squared distance 2 + 1.2; scale 2; and a second row (1, 0): 0, 2, 4
    value = losses.proxy_nca([[3, 4], [1, 0]], [0, 1], proxies=[[1, 0], [0, 2], [-1, 0]], scale=2)
    first = log(1 + exp(2 * (0.8 - 0.4)) + exp(2 * (0.8 - 3.2)))
    second = log(1 + exp(2 * (2 - 0)) + exp(2 * (2 - 4)))
    near(value, (first + second) / 2)


def test_proxy_anchor_by_hand():
    # proxies (1, 0), (0, 1), (-1, 0); row 0 (1, 0) of class 0, row 1 (.6, .8) of class 1; scale 2, margin .1
    # proxy 0: s = 1, .6; proxy 1: s = 0, .8; proxy 2: s = -1, -.6, without a row of its own
    value = losses.proxy_anchor([[2, 0], [3, 4]], [0, 1], proxies=[[1, 0], [0, 5], [-1, 0]], margin=0.1, scale=2)
    pull = softplus(-2 * 0.9) + softplus(-2 * 0.7)
    push = softplus(2 * 0.7) + softplus(2 * 0.1) + log(1 + exp(2 * -0.9) + exp(2 * -0.5))
    near(value, pull / 2 + push / 3)


def test_arc_face_by_hand():
    # centers (1, 0), (0, 1); scale 2, margin .5.
    # row (1, 0) of 0: theta = 0, target 2 cos .5, other 0
    # row (.6, .8) of 1: cos theta = .8: cos(theta + .5) = .8 cos .5 - .6 sin .5, other .6
    # row (-1, 0) of 0: theta = pi > pi - .5: target -1 - .5 sin .5, other 0
    E, y = np.array([[3, 0], [3, 4], [-1, 0]]), [0, 1, 0]
    terms = [
        softplus(-2 * cos(0.5)),
        softplus(2 * (0.6 - (0.8 * cos(0.5) - 0.6 * sin(0.5)))),
        softplus(2 * (1 + 0.5 * sin(0.5))),
    ]
    near(losses.arc_face(E, y, centers=[[1, 0], [0, 2]], scale=2), sum(terms) / 3)
    # margin 0 is plain cross-entropy of the cosines
    near(losses.arc_face(E[1:2], [0], centers=[[1, 0], [0, 2]], scale=2, margin=0), softplus(2 * 0.2))


@pytest.mark.parametrize("name", [name for name in FOUND if not vectors_of(name)])
def test_batches_without_one_of_the_sides(name):
    loss = bound_oracle(name, None)
    nothing_at_all = loss(FOUR[:1], [3], l2=0) if name == "npair" else loss(FOUR[:1], [3])
    assert nothing_at_all == 0
    all_positive, all_negative = [0, 0, 0, 0], [0, 1, 2, 3]
    hyper = {"l2": 0} if name == "npair" else {}
    for labels in (all_positive, all_negative):
        assert np.isfinite(loss(FOUR, labels, **hyper))
    if name in ("liftedstructure", "hap2s", "triplet", "npair", "angular", "ntxent", "supcon", "circle", "nca"):
        assert loss(FOUR, all_positive, **hyper) == 0
        assert loss(FOUR, all_negative, **hyper) == 0
    if name == "drotopkpn":
        assert loss(FOUR, all_negative) == 0


# ---------------------------------------------------------------- derivatives that are declared or known


def test_margin_derivative_by_beta():
    # THREE: only the negative pair 12 (both orders of three pairs) is active, with slope +1 in the threshold.
    def by(reduction):
        return gradient(lambda b: losses.margin(THREE, THREE_LABELS, beta=b[0], reduction=reduction), np.array([1.2]))

    np.testing.assert_allclose(by("mean"), [1 / 3], atol=1e-12)
    np.testing.assert_allclose(by("nonzero"), [1], atol=1e-12)


def test_cosine_derivative_on_the_circle():
    # x0 = (cos a, sin a) with a = 0; d s01 / d x0 = (x1 - s01 x0) / |x0| = (0, .8) / 2, for the row (2, 0).
    slope = gradient(lambda E: losses.dro_worst(E, [0, 0], pair=pairs.score), THREE[:2])
    np.testing.assert_allclose(slope[0], [0, 0.4], atol=1e-12)


def test_frozen_weights_of_hap2s():
    # With p constant, the gradient of sum p d is sum p grad d; margin 5 keeps every hinge open.
    E, y, _ = random_batch()
    declared = gradient(lambda Z: losses.hap2s(Z, y, margin=5, frozen=E), E)
    D = -similarity.scores(E, E, "neg_euclidean").astype(float)
    weights = np.zeros((7, 7))
    for i in range(7):
        positive, negative = (y == y[i]) & (np.arange(7) != i), y != y[i]
        weights[i, positive] = np.exp(D[i, positive] / 0.5) / np.exp(D[i, positive] / 0.5).sum()
        weights[i, negative] = -np.exp(-D[i, negative] / 0.5) / np.exp(-D[i, negative] / 0.5).sum()
    linear = gradient(lambda Z: np.sum(-weights * similarity.scores(Z, Z, "neg_euclidean")) / 7, E)
    np.testing.assert_allclose(declared, linear, atol=1e-12)
    assert losses.hap2s(E, y, frozen=E) == losses.hap2s(E, y)
    full = gradient(lambda Z: losses.hap2s(Z, y, margin=5), E)
    assert np.max(np.abs(full - declared)) > 1e-2


def test_frozen_factors_of_circle():
    # One positive and one negative score per anchor: value softplus(z), z = l_P + l_N, and the declared derivative
    # sigmoid(z) (-scale a_P grad s_P + scale a_N grad s_N), a_P = 1 + m - s_P, a_N = s_N + m.
    E, y, m, scale = FOUR[[0, 1, 2]], [0, 0, 1], 0.25, 10
    declared = gradient(lambda Z: losses.circle(Z, y, margin=m, scale=scale, frozen=E), E)

    def weight(z):
        return 1 / (1 + exp(-z))

    # from HAND_THREE: anchor 0 z = .35, a_P = .65, a_N = .25; anchor 1 z = 6.75, a_P = .65, a_N = 1.05
    def linear(Z):
        S = similarity.scores(Z, Z, "cosine")
        first = weight(0.35) * scale * (-0.65 * S[0, 1] + 0.25 * S[0, 2])
        second = weight(6.75) * scale * (-0.65 * S[1, 0] + 1.05 * S[1, 2])
        return (first + second) / 2

    np.testing.assert_allclose(declared, gradient(linear, E), atol=1e-12)
    assert losses.circle(E, y, frozen=E) == losses.circle(E, y)
    full = gradient(lambda Z: losses.circle(Z, y, margin=m, scale=scale), E)
    assert np.max(np.abs(full - declared)) > 1e-2


# ---------------------------------------------------------------- identities between losses


def test_grouped_kl_is_the_lifted_loss_at_gamma_one():
    # With every hinge open (margin 2 > 1 + threshold on the sphere), gamma = 1:
    # sum_i KL_i = sum_i [2 m + log sum_P e^(-s) - log |P_i| + log sum_N e^s - log |N_i|]: no threshold
    E, y, _ = random_batch(rows=9)
    lifted = losses.generalized_lifted(E, y, margin=0, similarity="cosine", reduction="sum")
    counts = [(np.sum(y == label) - 1, np.sum(y != label)) for label in y]
    offset = sum(2 * 2 - log(positive) - log(negative) for positive, negative in counts)
    for threshold in (0.1, 0.5):
        pair = functools.partial(pairs.hinge, margin=2, threshold=threshold)
        grouped = losses.dro_kl_grouped(E, y, gamma=1, pair=pair, reduction="sum")
        near(grouped, lifted + offset)


def test_multi_similarity_is_kl_with_a_zero_member():
    # (1/a) log(1 + sum e^(a l)) = KL of the list l and a zero member, without the normalization; l = +-(t - s)
    E, y, _ = random_batch()
    S = similarity.scores(E, E, "cosine")
    total = 0
    for i in range(7):
        positive = [pairs.linear(S[i, j], +1, threshold=0.5) for j in range(7) if j != i and y[j] == y[i]]
        negative = [pairs.linear(S[i, j], -1, threshold=0.5) for j in range(7) if y[j] != y[i]]
        total += sets.kl(positive, 1 / 2, normalized=False, zero_member=True)
        total += sets.kl(negative, 1 / 50, normalized=False, zero_member=True)
    near(losses.multi_similarity(E, y), total / 7, 1e-16)


def test_dro_losses_meet_in_their_limits():
    E, y, _ = random_batch()
    S = similarity.scores(E, E, "cosine")
    items = [pairs.hinge(S[i, j], +1 if y[i] == y[j] else -1) for i in range(7) for j in range(7) if i != j]
    average, largest = sum(items) / 42, max(items)
    near(losses.dro_worst(E, y), largest, 1e-18)
    near(losses.dro_top_k(E, y, k=1), largest, 1e-18)
    near(losses.dro_top_k(E, y, k=21), average, 1e-18)
    near(losses.dro_top_k(E, y, fraction=1), average, 1e-18)
    near(losses.dro_kl(E, y, gamma=1e8, zero="keep"), average, 1e-8)
    near(losses.dro_kl(E, y, gamma=1e-4), largest, 1e-3)
    near(losses.dro_chi_square(E, y, rho=0), average, 1e-18)
    near(losses.dro_chi_square(E, y, rho=42 * 41 / 2), largest, 1e-18)
    # the lengths of the rows do not matter to any loss of cosines or of unit vectors
    stretched = E * np.linspace(0.5, 2, 7)[:, None]
    for name in FOUND:
        if name != "npair" and not vectors_of(name):
            near(bound_oracle(name, None)(stretched, y), bound_oracle(name, None)(E, y), 1e-13)


def test_unnormalized_distances():
    # rows 0, 3 and 7 on a line, labels 0 0 1: d01 = 3, d02 = 7, d12 = 4
    E, y = np.array([[0.0], [3.0], [7.0]]), [0, 0, 1]
    near(losses.contrastive(E, y, neg_margin=5, normalize=False), (9 + 0 + 1) / 3)
    near(losses.margin(E, y, beta=5, normalize=False), (0 + 0 + 1.2) / 3)
    near(losses.triplet(E, y, margin=2, normalize=False), (0 + 1) / 2)
    near(losses.triplet(E, y, margin=8, squared=True, normalize=False), (0 + 9 - 16 + 8) / 2)
    near(losses.hap2s(E, y, margin=2, normalize=False), (0 + 1) / 3)
    near(losses.lifted_structure(E, y, normalize=False), (3 + log(exp(1 - 7) + exp(1 - 4))) ** 2 / 2)
    near(losses.generalized_lifted(E, y, margin=5, normalize=False), (1 + 4 + log(exp(-2) + exp(1))) / 3)


def test_average_precision_by_hand():
    # cosines of row 0: .6 with row 1 (positive), .8 with row 2 and -1 with row 3: rank 2 of 3, one negative before it
    rows, labels = [[1, 0], [0.6, 0.8], [0.8, 0.6], [-1, 0]], [0, 0, 1, 2]
    # row 1: its positive at .6, a negative at .96 before it; rows 2 and 3 have no positives
    near(losses.smooth_ap(rows, labels, temperature=1e-3), 0.5, 1e-12)
    # two steps of squared distance 0..4, centers 0, 2, 4: row 0 has 0.8 (positive), 0.4 and 4; row 1 has 0.8, 0.08, 3.2
    first, second = (0.6, 0.4), (0.6, 0.4)
    all_first, all_second = (0.6 + 0.8, 2.0), (0.6 + 0.96, 0.6 + 0.96 + 0.4 + 0.04 + 0.4)
    values = [
        1 - sum(h * sum(near_[: b + 1]) / whole[b] for b, h in enumerate(near_))
        for near_, whole in ((first, all_first), (second, all_second))
    ]
    near(losses.fast_ap(rows, labels, bins=2), sum(values) / 2, 1e-15)


def test_neighbors_and_tuplets_by_hand():
    # cosines s01 = .6, s02 = .8, s12 = .96; the only positives are 0 and 1; squared distances are 2 - 2s
    rows, labels = [[1, 0], [0.6, 0.8], [0.8, 0.6]], [0, 0, 1]
    near(losses.nca(rows, labels, scale=3), (softplus(3 * (0.8 - 0.4)) + softplus(3 * (0.8 - 0.08))) / 2)
    eased = np.cos(np.arccos(np.longdouble("0.6")) - np.longdouble("0.1"))
    near(losses.tuplet_margin(rows, labels, scale=3), (softplus(3 * (0.8 - eased)) + softplus(3 * (0.96 - eased))) / 2)


def test_classes_of_several_centers_by_hand():
    # one row (1, 0); class 0 has centers at cosines .6 and 0, class 1 at -1 and .8
    row, centers = [[2, 0]], [[0.6, 0.8, 0, 3], [-1, 0, 0.8, 0.6]]
    near(losses.cos_face([[2, 0]], [0], [[0.6, 0.8], [0.8, 0.6]], margin=0.3, scale=2), softplus(2 * (0.8 - 0.6 + 0.3)))
    near(losses.normalized_softmax([[2, 0]], [0], [[0.6, 0.8], [0.8, 0.6]], temperature=0.5), softplus(2 * (0.8 - 0.6)))
    turned = np.cos(np.arccos(np.longdouble("0.6")) + np.longdouble("0.5"))
    near(losses.sub_center_arc_face(row, [0], centers, scale=2), softplus(2 * (0.8 - turned)))
    soft = [0.6 / (1 + exp(-6)), (0.8 - exp(-18)) / (1 + exp(-18))]
    near(losses.soft_triple(row, [0], centers, scale=2, gamma=0.1, margin=0.3), softplus(2 * (soft[1] - soft[0] + 0.3)))
