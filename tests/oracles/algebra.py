"""Any product pair loss x set x groups x link x miner x reduction, by loops: its value and its closed gradient.

Factors are told by name and keywords, e.g. ("hinge", {"margin": 0.2}). S are the scores of n anchors against m
references, A and U [n, m] how often each pair is there as positive and as negative (0: not at all).

    F = reduction over groups of  link( max over p of sum p l - penalty ),   dF/dS = sum of (dF/dvalue) p* dl/ds

The gradient of a worst case in its losses is p* (Danskin). Where p* is not unique, equal losses share in proportion to
w; a hinge at its corner pulls nothing; the larger of two equal scores is both, by halves; two equal rows at distance 0
pull nothing.
"""

from dataclasses import dataclass, field

import numpy as np

from . import mining, pairs, sets
from .pairs import smooth_hinge, softplus
from .similarity import scores, unit

ZERO = np.longdouble(0)
SETS = {
    "mean": (sets.mean, sets.mean_weights),
    "worst": (sets.worst, sets.worst_weights),
    "kl": (sets.kl, sets.kl_weights),
    "kl_ball": (sets.kl_ball, sets.kl_ball_weights),
    "chi_square": (sets.chi_square, sets.chi_square_weights),
}


@dataclass(frozen=True)
class Product:
    """The factors of a loss. `everyone`: the wide side of an anchor holds its positive pairs too.

    `rule` (groups "positive" and "triplets") says what a triplet is judged by: compare="difference", "swap" or
    "angular" (with tan2), band (None, or the margin of the semi-hard band), balanced. What is not above `least` in size
    is 0: the smallest number of the precision that is to be compared with. What lies within `grain` of zero but is not
    zero cannot be told from it: a mean over values above zero raises `UnclearError`.
    """

    similarity: str
    normalize: bool
    positive: tuple
    negative: tuple
    over_positive: tuple
    over_negative: tuple
    groups: str = "batch"
    link: tuple = ("add", {})
    miner: tuple | None = None
    reduction: str = "mean"
    everyone: bool = False
    rule: dict = field(default_factory=dict)
    least: float = 0.0
    grain: float = 0.0

    def judged(self, S, sign):
        """l and dl/ds of scores S (any shape) that all carry one sign."""
        name, options = self.positive if sign > 0 else self.negative
        loss, slope = PAIRS[name]
        return self.floored(loss(S, sign, **options)), slope(S, sign, **options)

    def floored(self, x):
        """x, and 0 where it is not above `least` in size."""
        return np.where(np.abs(x) > self.least, x, 0)


@dataclass(frozen=True)
class Answer:
    """F (a number, or one an anchor), and the gradient of sum(told * F) in rows, references and the two thresholds."""

    value: np.ndarray
    rows: np.ndarray
    references: np.ndarray
    threshold_positive: np.ndarray
    threshold_negative: np.ndarray


# ---------------------------------------------------------------- one pair


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return np.exp(-softplus(-x))


def circle(s, sign, margin=0.4, scale=80):
    """-sign scale a (s - c).

    Positive: a = max(1 + margin - s, 0), c = 1 - margin; negative: a = max(s + margin, 0), c = margin. a is held
    constant.
    """
    return _circle_pace(s, sign, margin, scale) * (s - (1 - margin if sign > 0 else margin))


def _circle_pace(s, sign, margin=0.4, scale=80):
    pace = 1 + margin - s if sign > 0 else s + margin
    return -sign * scale * np.maximum(pace, 0)


def arc(s, sign, margin=0.5, scale=64):
    """-scale cos(theta + margin) if positive, a line beyond theta = pi - margin; scale cos(theta) if negative."""
    if sign < 0:
        return scale * s
    turned = s * np.cos(margin) - np.sqrt(np.maximum(1 - s * s, 0)) * np.sin(margin)
    return -scale * np.where(s >= -np.cos(margin), turned, s - margin * np.sin(margin))


def _arc_slope(s, sign, margin=0.5, scale=64):
    if sign < 0:
        return scale + ZERO * s
    inside = np.abs(s) < 1
    cotangent = np.where(inside, s / np.sqrt(np.where(inside, 1 - s * s, 1)), 0)
    return -scale * np.where(s >= -np.cos(margin), np.cos(margin) + cotangent * np.sin(margin), 1)


def _hinge_slope(s, sign, margin=0.2, threshold=0.5, smooth=0):
    x = margin + sign * (threshold - s)
    return -sign * (sigmoid(x / smooth) if smooth > 0 else np.where(x > 0, 1, 0))


def _logistic_slope(s, sign, threshold=0.5, slope_positive=2, slope_negative=40):
    slope = slope_positive if sign > 0 else slope_negative
    return -2 * sign * sigmoid(-sign * slope * (s - threshold))


def _squared_slope(s, sign, pos_margin=0, neg_margin=1, power=2):
    excess = np.maximum(-s - pos_margin if sign > 0 else neg_margin + s, 0)
    return -sign * power * np.where(excess > 0, np.where(excess > 0, excess, 1) ** (power - 1), 0)


PAIRS = {
    "hinge": (pairs.hinge, _hinge_slope),
    "logistic": (pairs.logistic, _logistic_slope),
    "squared": (pairs.squared, _squared_slope),
    "linear": (pairs.linear, lambda s, sign, threshold=0, margin=0, scale=1: -sign * scale + ZERO * s),
    "score": (pairs.score, lambda s, sign, scale=1: scale + ZERO * s),
    "circle": (circle, _circle_pace),  # its pace is held constant
    "arc": (arc, _arc_slope),
}


# ---------------------------------------------------------------- one group


def solved(over, losses, weights, orders=1, cap=None):
    """Value, p*, and how much measure the weight may rest on, of one group."""
    name, options = over
    losses, weights = np.asarray(losses, np.longdouble), np.asarray(weights, np.longdouble)
    if name == "expected":
        inner, more = options["of"]
        _, p, taken = solved((inner, more | {"zero": options.get("zero", more.get("zero", "keep"))}), losses, weights)
        return np.sum(p * losses), p, taken
    if name == "power":
        there = weights > 0
        height = np.where(there, options["power"] * np.log1p(np.where(there, losses, 0) / options["shift"]), 0)
        p = sets.kl_weights(height, 1, weights)
        return np.sum(p * losses), p, np.sum(weights)
    there = weights > 0
    if options.get("zero", "keep") == "drop":
        there = there & (losses > 0)
    size = np.sum(weights[there]) + (1 if options.get("zero_member") else 0)
    if name != "topk":
        value, share = SETS[name]
        lean = {key: x for key, x in options.items() if key != "normalized"}
        return value(losses, weights=weights, **options), share(losses, weights=weights, **lean), size
    plain = {key: x for key, x in options.items() if key not in ("k", "fraction")}
    taken = min(size, options["k"] * orders) if "k" in options else size * options["fraction"]
    taken = taken if cap is None else min(taken, cap)
    if not taken > 0:
        return ZERO, np.zeros(len(losses), np.longdouble), ZERO
    found = (sets.topk, sets.topk_weights)
    value, p = (f(losses, k=taken, weights=weights, **plain) for f in found)
    return value, p, taken


# ---------------------------------------------------------------- reductions: F and dF/dvalues


class UnclearError(ArithmeticError):
    """Whether a value is above zero is up to rounding."""


def reduced(values, measure, how, told, grain=0.0):
    """The mean (sum, mean over those above zero, or one an anchor) of values, and told dF/dvalues."""
    weight = np.asarray(measure, np.longdouble)
    if how == "nonzero":
        if np.any((values != 0) & (np.abs(values) < grain)):
            raise UnclearError(f"a value lies within {grain} of zero")
        weight = weight * (values > 0)
    if how == "none":
        if values.ndim == 1:
            return values * weight, told * weight
        count = np.sum(weight, axis=1)
        part = weight / np.where(count > 0, count, 1)[:, None]
        return np.sum(values * part, axis=1), told[:, None] * part
    part = weight if how == "sum" else weight / (np.sum(weight) or 1)
    return np.sum(values * part), told * part


# ---------------------------------------------------------------- links: terms and their derivatives


def linked(link, positive, negative, has_positive, has_negative, losses, A, columns, has_columns):
    """Terms (values, measure or None for "each anchor") and, for each, a function from dF/dvalues to the derivatives
    in equal values [n], negative values [n], losses [n, m] of the positive pairs and column values [m]."""
    name, options = link
    nothing = (
        np.zeros_like(positive),
        np.zeros_like(negative),
        np.zeros_like(losses),
        np.zeros(A.shape[1], np.longdouble),
    )
    if name == "add" and options.get("apart"):
        return [
            (positive, has_positive, lambda g: (g, *nothing[1:])),
            (negative, None, lambda g: (nothing[0], g, *nothing[2:])),
        ]
    if name in ("add", "hinge", "softplus"):
        x = positive + negative + options.get("margin", 0)
        smooth = options.get("smooth", 0)
        if name == "add":
            v, slope = x, np.ones_like(x)
        elif name == "softplus" or smooth:
            v, slope = (smooth or 1) * softplus(x / (smooth or 1)), sigmoid(x / (smooth or 1))
        else:
            v, slope = smooth_hinge(x), np.where(x > 0, 1, 0)
        if options.get("both", name != "add"):
            both = has_positive & has_negative
            v, slope = np.where(both, v, 0), np.where(both, slope, 0)
        return [(v, None, lambda g: (g * slope, g * slope, *nothing[2:]))]
    if name == "per_positive":
        there = (A > 0) & has_negative[:, None]
        x = np.where(there, negative[:, None] + losses, 0)
        slope = np.where(there, sigmoid(x), 0)
        return [
            (
                np.where(there, softplus(x), 0),
                A,
                lambda g: (nothing[0], np.sum(g * slope, axis=1), g * slope, nothing[3]),
            )
        ]
    v, row, col = _lifted(negative, has_negative, columns, has_columns, losses, A)
    return [(v, A, lambda g: (nothing[0], np.sum(g * row, axis=1), g * (row + col), np.sum(g * col, axis=0)))]


def _lifted(negative, has_negative, columns, has_columns, losses, A):
    """1/2 max(log(e^u_i + e^c_j) + l_ij, 0)^2, and its derivatives in u_i and c_j (their sum is that in l_ij)."""
    v, row, col = (np.zeros(A.shape, np.longdouble) for _ in range(3))
    for i, j in np.argwhere(A > 0):
        ends = [x for x, has in ((negative[i], has_negative[i]), (columns[j], has_columns[j])) if has]
        if not ends:
            continue
        both = sets.log_sum(ends)
        excess = max(both + losses[i, j], 0)
        v[i, j] = excess**2 / 2
        row[i, j] = excess * np.exp(negative[i] - both) if has_negative[i] else 0
        col[i, j] = excess * np.exp(columns[j] - both) if has_columns[j] else 0
    return v, row, col


# ---------------------------------------------------------------- groups: dF/dl of positive and negative pairs


def _by_row(over, losses, measure):
    """Values [n] and p* [n, m] of one group a row."""
    found = [solved(over, losses[i], measure[i]) for i in range(len(losses))]
    values = np.array([value for value, _, _ in found], np.longdouble)
    return values, np.array([p for _, p, _ in found], np.longdouble).reshape(losses.shape)


def _whole(product, S, A, U, orders, told):
    """Groups that reach over the batch: "batch", "sign", "balanced"."""
    positive, negative = product.judged(S, +1)[0], product.judged(S, -1)[0]
    if product.groups == "batch":
        value, p, _ = solved(
            product.over_positive, np.where(A > 0, positive, negative).ravel(), (A + U).ravel(), orders
        )
        p = told * p.reshape(S.shape)
        return value, np.where(A > 0, p, 0), np.where(A > 0, 0, p)
    pull, p, near = solved(product.over_positive, positive.ravel(), A.ravel(), orders)
    cap = near if product.groups == "balanced" else None
    push, q, far = solved(product.over_negative, negative.ravel(), U.ravel(), orders, cap)
    if product.groups == "sign":
        near = far = whole = ZERO + 1
    else:
        whole = near + far if near + far > 0 else ZERO + 1
    value = (near * pull + far * push) / whole
    return value, told * near / whole * p.reshape(S.shape), told * far / whole * q.reshape(S.shape)


def _anchor(product, S, A, U, anchors, told):
    positive, negative = product.judged(S, +1)[0], product.judged(S, -1)[0]
    values, p = _by_row(product.over_positive, np.where(A > 0, positive, negative), A + U)
    value, pull = reduced(values, anchors, product.reduction, told, product.grain)
    p = pull[:, None] * p
    return value, np.where(A > 0, p, 0), np.where(A > 0, 0, p)


def _anchor_sign(product, S, A, U, anchors, told):
    losses, negative = product.judged(S, +1)[0], product.judged(S, -1)[0]
    wide = A + U if product.everyone else U
    near, p = _by_row(product.over_positive, losses, A)
    far, q = _by_row(product.over_negative, negative, wide)
    mixes = product.link[0] == "lifted"
    ends, r = _by_row(product.over_negative, negative.T, wide.T) if mixes else (None, ZERO)
    has = (np.any(A > 0, axis=1), np.any(U > 0, axis=1))
    terms = linked(product.link, near, far, *has, losses, A, ends, np.any(wide > 0, axis=0))
    value, positive, other = ZERO, np.zeros_like(S), np.zeros_like(S)
    for values, measure, back in terms:
        counted = anchors if measure is None else anchors & measure if measure.ndim == 1 else measure
        part, pull = reduced(product.floored(values), counted, product.reduction, told, product.grain)
        g_near, g_far, g_losses, g_ends = back(pull)
        value = value + part
        positive = positive + g_near[:, None] * p + g_losses
        other = other + g_far[:, None] * q + (g_ends[:, None] * r).T
    return value, positive, other


GROUPS = {"anchor": _anchor, "anchor_sign": _anchor_sign}


# ---------------------------------------------------------------- triplets: dF/ds straight away


def _triplets(product, S, T, A, U):
    """Each positive pair's triplets: ((a, p), [n], scores, [(ds/ds_an, ds/ds_ap, ds/ds_pn)])."""
    compare, band = product.rule.get("compare", "difference"), product.rule.get("band")
    for a in range(len(S)):
        negative = [n for n in range(S.shape[1]) if U[a, n] > 0]
        hardest = sorted(negative, key=lambda n: -S[a, n])
        for turn, p in enumerate(j for j in range(S.shape[1]) if A[a, j] > 0):
            chosen = hardest[turn : turn + 1] if product.rule.get("balanced") else negative
            found = [(n, *_compared(compare, S[a, n], S[a, p], T[p, n], product.rule.get("tan2"))) for n in chosen]
            yield (a, p), [x for x in found if band is None or -band < x[1] < 0]


def _compared(compare, s_an, s_ap, s_pn, tan2):
    if compare == "difference":
        return s_an - s_ap, (1, -1, 0)
    if compare == "angular":
        return 4 * tan2 * (s_an + s_pn) - 2 * (1 + tan2) * s_ap, (4 * tan2, -2 * (1 + tan2), 4 * tan2)
    half = 0.5 if s_an == s_pn else 1.0
    return max(s_an, s_pn) - s_ap, (half * (s_an >= s_pn), -1, half * (s_pn >= s_an))


def _of_triplets(product, S, T, A, U, told):
    """F, dF/dS, dF/dT (scores among the references) and dF/dthreshold."""
    found = list(_triplets(product, S, T, A, U))
    members = [(a, p, *rest) for (a, p), some in found for rest in some]
    z = np.array([x[3] for x in members], np.longdouble)
    losses, slopes = product.judged(z, -1)
    if product.groups == "triplets":
        weights = [A[a, p] * U[a, n] for a, p, n, *_ in members]
        value, share, _ = solved(product.over_negative, losses, weights)
        share = told * share
    else:
        values, share, ends = np.zeros(S.shape, np.longdouble), np.zeros(len(z), np.longdouble), [0]
        for (a, p), some in found:
            here = slice(ends[-1], ends[-1] + len(some))
            values[a, p], share[here], _ = solved(product.over_negative, losses[here], [U[a, x[0]] for x in some])
            ends.append(here.stop)
        value, pull = reduced(values, A, product.reduction, told, product.grain)
        for ((a, p), _), first, last in zip(found, ends[:-1], ends[1:], strict=True):
            share[first:last] *= pull[a, p]
    G, H = np.zeros_like(S), np.zeros_like(T)
    for (a, p, n, _, (g_an, g_ap, g_pn)), g in zip(members, share * slopes, strict=True):
        G[a, n] += g * g_an
        G[a, p] += g * g_ap
        H[p, n] += g * g_pn
    return value, G, H, _threshold(product.negative, np.sum(share * slopes))


def _threshold(pair, total):
    """dF/dthreshold of a loss of (threshold - s): minus dF/ds, summed."""
    return -total if pair[0] in ("hinge", "logistic", "linear") else ZERO


# ---------------------------------------------------------------- from rows to the answer


def mined(product, S, A, U, dim):
    """The measures after the miner."""
    if product.miner is None:
        return A, U
    name, options = product.miner
    if name != "distance_weighted":
        return getattr(mining, name)(S, A, U, **options)
    D = -S if product.similarity == "neg_euclidean" else np.sqrt(np.maximum(2 - 2 * S, 0))
    if product.similarity == "neg_squared_euclidean":
        D = np.sqrt(-S)
    return A, mining.distance_weighted(D, U, dim, **options) * np.sum(A, axis=1)[:, None]


def _scores(product, X, Y):
    options = {"normalize": product.normalize} if product.similarity.startswith("neg") else {}
    name = "cosine" if product.similarity == "dot" and product.normalize else product.similarity
    return scores(X, Y, name, **options)


def _pulled(product, X, Y, G):
    """Gradient in X of sum G_ij s(x_i, y_j)."""
    whole = product.normalize or product.similarity == "cosine"
    V = np.array([unit(y) if whole else y for y in Y], np.longdouble).reshape(Y.shape)
    result = np.zeros_like(X)
    for i, x in enumerate(X):
        u = unit(x) if whole else x
        if product.similarity in ("cosine", "dot"):
            g = G[i] @ V
        else:
            away = u - V
            length = np.sqrt(np.sum(away * away, axis=1))
            factor = (
                np.where(length > 0, 1 / np.where(length > 0, length, 1), 0)
                if "squared" not in product.similarity
                else 2
            )
            g = -(G[i] * factor) @ away
        size = np.sqrt(np.sum(x * x))
        if whole:
            g = (g - u * np.sum(g * u)) / size if size > 0 else np.zeros_like(g)
        result[i] = g
    return result


def answer(product, E, R, A, U, orders=1, told=1):
    """The loss of rows E against references R (None: the rows themselves), which the measures A and U speak of."""
    X = np.asarray(E, np.longdouble)
    Y = X if R is None else np.asarray(R, np.longdouble)
    A, U = np.asarray(A, np.longdouble), np.asarray(U, np.longdouble)
    told = np.asarray(told, np.longdouble)
    anchors = np.any(A > 0, axis=1) | np.any(U > 0, axis=1)
    S = _scores(product, X, Y)
    A, U = mined(product, S, A, U, X.shape[1])
    H = None
    if product.groups in ("positive", "triplets"):
        T = _scores(product, Y, Y)
        value, G, H, negative = _of_triplets(product, S, T, A, U, told)
        positive = ZERO
    else:
        if product.groups in GROUPS:
            value, g_positive, g_negative = GROUPS[product.groups](product, S, A, U, anchors, told)
        else:
            value, g_positive, g_negative = _whole(product, S, A, U, orders, told)
        g_positive, g_negative = g_positive * product.judged(S, +1)[1], g_negative * product.judged(S, -1)[1]
        positive, negative = (
            _threshold(product.positive, np.sum(g_positive)),
            _threshold(product.negative, np.sum(g_negative)),
        )
        G = g_positive + g_negative
    rows, references = _pulled(product, X, Y, G), _pulled(product, Y, X, G.T)
    if H is not None:
        references = references + _pulled(product, Y, Y, H) + _pulled(product, Y, Y, H.T)
    return Answer(value, rows + references if R is None else rows, references, positive, negative)
