"""The losses of a batch, by loops that read like their equations.

E is the matrix of embeddings (one row each), y the labels. s_ij is the similarity of rows i and j, d_ij
their distance. P_i = {j != i: y_j = y_i}, N_i = {j: y_j != y_i}. A pair (i, j), i != j, is ordered: it is
counted in both orders. mean_i is the mean over anchors: the sum over i divided by the number of all rows.
A mean over nothing is 0.
All arithmetic is in longdouble, so that differences of values give derivatives (see gradient.py).
"""

import itertools

import numpy as np

from . import pairs, sets
from .pairs import smooth_hinge, softplus
from .sets import log_one_plus_sum, log_sum
from .similarity import angle, dot, scores, unit

ZERO = np.longdouble(0)


def _positive(y, i):
    """P_i."""
    return [j for j in range(len(y)) if j != i and y[j] == y[i]]


def _negative(y, i):
    """N_i."""
    return [j for j in range(len(y)) if y[j] != y[i]]


def _positive_pairs(y):
    return [(i, j) for i in range(len(y)) for j in _positive(y, i)]


def _negative_pairs(y):
    return [(i, j) for i in range(len(y)) for j in _negative(y, i)]


def _average(values):
    return sum(values, ZERO) / len(values) if values else ZERO


def _above_zero(values):
    return [value for value in values if value > 0]


def _reduce(values, reduction, count):
    """sum / count ("mean"), sum ("sum"), or the mean over the values that are > 0 ("nonzero")."""
    if reduction == "nonzero":
        return _average(_above_zero(values))
    if reduction == "sum":
        return sum(values, ZERO)
    if reduction != "mean":
        raise ValueError(reduction)
    return sum(values, ZERO) / count if count else ZERO


def _distances(E, normalize=True):
    return -scores(E, E, "neg_euclidean", normalize=normalize)


def _pair_losses(S, y, pair):
    """The losses of all positive pairs, and of all negative pairs."""
    positive = [pair(S[i, j], +1) for i, j in _positive_pairs(y)]
    negative = [pair(S[i, j], -1) for i, j in _negative_pairs(y)]
    return positive, negative


def contrastive(E, y, pos_margin=0, neg_margin=1, power=2, reduction="mean", normalize=True):
    """mean over pairs of max(d_ij - pos_margin, 0)^power (positive) or max(neg_margin - d_ij, 0)^power (negative).

    reduction="nonzero": the mean over the positive pairs with loss > 0, plus the same of the negative pairs.
    """

    def pair(s, sign):
        return pairs.squared(s, sign, pos_margin, neg_margin, power)

    positive, negative = _pair_losses(-_distances(E, normalize), y, pair)
    if reduction == "nonzero":
        return _average(_above_zero(positive)) + _average(_above_zero(negative))
    return _reduce(positive + negative, reduction, len(positive + negative))


def margin(E, y, margin=0.2, beta=1.2, reduction="mean", normalize=True):
    """mean over pairs of max(0, margin + y_ij (d_ij - beta)), y_ij = +1 if positive and -1 if negative.

    reduction="nonzero": the mean over the pairs with loss > 0, positive and negative together.
    """
    D = _distances(E, normalize)
    losses = [np.maximum(margin + D[i, j] - beta, 0) for i, j in _positive_pairs(y)]
    losses += [np.maximum(margin - D[i, j] + beta, 0) for i, j in _negative_pairs(y)]
    return _reduce(losses, reduction, len(losses))


def binomial_deviance(E, y, threshold=0.5, slope_positive=2, slope_negative=40):
    """mean over pairs of (2/c) log(1 + e^(-y_ij c (s_ij - t))), y_ij = +1 and c = slope_positive if positive,
    y_ij = -1 and c = slope_negative if negative, t = threshold.
    """

    def pair(s, sign):
        return pairs.logistic(s, sign, threshold, slope_positive, slope_negative)

    positive, negative = _pair_losses(scores(E, E, "cosine"), y, pair)
    return _average(positive + negative)


def _all_pair_losses(E, y, pair):
    positive, negative = _pair_losses(scores(E, E, "cosine"), y, pair)
    return positive + negative


def dro_worst(E, y, pair=pairs.hinge, zero="keep"):
    """max over pairs of l_ij."""
    return sets.worst(_all_pair_losses(E, y, pair), zero=zero)


def _count(k, E):
    """k, or x times the number of rows where k is "xB"."""
    return np.longdouble(k.removesuffix("B")) * len(E) if isinstance(k, str) else k


def dro_top_k(E, y, k=None, fraction=None, effective=None, pair=pairs.hinge, zero="keep"):
    """(1/2k) sum of the 2k greatest l_ij over the (ordered) pairs; or of that fraction, or of `effective` a row."""
    mass = None if k is None else 2 * _count(k, E)
    mass = mass if effective is None else effective * len(E)
    return sets.topk(_all_pair_losses(E, y, pair), k=mass, fraction=fraction, zero=zero)


def dro_top_k_pn(E, y, k=None, effective=None, pair=pairs.hinge):
    """(sum of the h greatest positive l_ij + sum of the g greatest negative l_ij) / (h + g).

    Over (ordered) pairs, h = min(k, |P|), g = min(h, |N|), with fractional mass; 0 if there is no positive pair.
    """
    positive, negative = _pair_losses(scores(E, E, "cosine"), y, pair)
    if not positive:
        return ZERO
    k = _count(k, E) if effective is None else effective * len(E) / np.longdouble(2)
    h = min(k, len(positive))
    g = min(h, len(negative))
    total = h * sets.topk(positive, k=h)
    if g > 0:
        total = total + g * sets.topk(negative, k=g)
    return total / (h + g)


def dro_trimmed(E, y, top=None, k=None, top_fraction=None, fraction=None, pair=pairs.hinge, zero="keep"):
    """The mean of l_ij over the (ordered) pairs, sorted downwards, from the 2 top-th to the 2 (top + k)-th."""
    top, k = (None if x is None else 2 * _count(x, E) for x in (top, k))
    return sets.trimmed(_all_pair_losses(E, y, pair), top, k, top_fraction, fraction, zero=zero)


def dro_trimmed_pn(E, y, wrong, k, pair=pairs.hinge):
    """The mean of the positive l_ij but the greatest, a share 1 - (1 - wrong)^2, + that of the 2k greatest negative."""
    positive, negative = _pair_losses(scores(E, E, "cosine"), y, pair)
    kept = sets.trimmed(positive, top_fraction=1 - (1 - np.longdouble(wrong)) ** 2, fraction=1)
    return kept + sets.topk(negative, k=2 * _count(k, E))


def dro_kl(E, y, gamma=0.3, effective=None, pair=pairs.hinge, zero="drop"):
    """gamma * log(mean over pairs of e^(l_ij / gamma)); pairs with l_ij <= 0 are left out if zero="drop"."""
    if effective is not None:
        return sets.kl_effective(_all_pair_losses(E, y, pair), effective * len(E), zero=zero)
    return sets.kl(_all_pair_losses(E, y, pair), gamma, zero=zero)


def dro_kl_grouped(E, y, gamma=0.1, pair=pairs.hinge, zero="drop", reduction="mean"):
    """mean_i [ gamma log(mean_{j in P_i} e^(l_ij / gamma)) + gamma log(mean_{k in N_i} e^(l_ik / gamma)) ].

    Pairs with l_ij <= 0 are left out if zero="drop"; an empty mean gives the term 0.
    """
    S = scores(E, E, "cosine")
    values = []
    for i in range(len(y)):
        positive = [pair(S[i, j], +1) for j in _positive(y, i)]
        negative = [pair(S[i, k], -1) for k in _negative(y, i)]
        values.append(sets.kl(positive, gamma, zero=zero) + sets.kl(negative, gamma, zero=zero))
    return _reduce(values, reduction, len(y))


def dro_chi_square(E, y, rho=None, effective=None, pair=pairs.hinge, zero="keep"):
    """max sum p_ij l_ij: p >= 0, sum p_ij = 1, sum p_ij^2 <= 1/n + 2 rho/n^2, over the n (ordered) pairs."""
    if effective is not None:
        return sets.chi_square_effective(_all_pair_losses(E, y, pair), effective * len(E), zero=zero)
    return sets.chi_square(_all_pair_losses(E, y, pair), rho, zero=zero)


def lifted_structure(E, y, margin=1, normalize=True):
    """mean over positive pairs of max(J_ij, 0)^2 / 2.

    J_ij = d_ij + log(sum_{k in N_i} e^(margin - d_ik) + sum_{k in N_j} e^(margin - d_jk));
    the term is 0 (and counted) where there is no k at all.
    """
    D = _distances(E, normalize)
    values = []
    for i, j in _positive_pairs(y):
        exponents = [margin - D[i, k] for k in _negative(y, i)] + [margin - D[j, k] for k in _negative(y, j)]
        J = D[i, j] + log_sum(exponents) if exponents else ZERO
        values.append(np.maximum(J, 0) ** 2 / 2)
    return _average(values)


def generalized_lifted(E, y, margin=1, reduction="mean", similarity="neg_euclidean", normalize=True):
    """mean_i max(0, log sum_{j in P_i} e^(d_ij) + log sum_{k in N_i} e^(margin - d_ik)).

    An empty sum contributes 0 in place of its logarithm. d = -s for whichever similarity s is chosen.
    """
    options = {"normalize": normalize} if similarity == "neg_euclidean" else {}
    D = -scores(E, E, similarity, **options)
    values = []
    for i in range(len(y)):
        positive = [D[i, j] for j in _positive(y, i)]
        negative = [margin - D[i, k] for k in _negative(y, i)]
        inside = (log_sum(positive) if positive else ZERO) + (log_sum(negative) if negative else ZERO)
        values.append(np.maximum(inside, 0))
    return _reduce(values, reduction, len(y))


def multi_similarity(E, y, alpha=2, beta=50, threshold=0.5, epsilon=None):
    """mean_i [ A_i / alpha + B_i / beta ], A_i = log(1 + sum_{j in P_i} e^(-alpha (s_ij - threshold))).

    B_i = log(1 + sum_{k in N_i} e^(beta (s_ik - threshold))).
    With epsilon, j in P_i is kept iff s_ij - epsilon < max_{N_i} s_ik, and k in N_i iff
    s_ik + epsilon > min_{P_i} s_ij; an anchor without one of the sides keeps nothing.
    """
    S = scores(E, E, "cosine")
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if epsilon is not None:
            if not positive or not negative:
                continue
            hardest_positive = min(S[i, j] for j in positive)
            hardest_negative = max(S[i, k] for k in negative)
            positive = [j for j in positive if S[i, j] - epsilon < hardest_negative]
            negative = [k for k in negative if S[i, k] + epsilon > hardest_positive]
        pull = log_one_plus_sum([-alpha * (S[i, j] - threshold) for j in positive]) / alpha
        push = log_one_plus_sum([beta * (S[i, k] - threshold) for k in negative]) / beta
        values.append(pull + push)
    return _reduce(values, "mean", len(y))


def hap2s(E, y, margin=0.2, gamma=0.5, weights="exponential", power=10, frozen=None, normalize=True):
    """mean_i max(0, sum_{j in P_i} p_ij d_ij - sum_{k in N_i} q_ik d_ik + margin), anchors with both sides.

    exponential: p_ij ~ e^(d_ij / gamma), q_ik ~ e^(-d_ik / gamma), each normalized to sum 1;
    polynomial: p_ij ~ (1 + d_ij)^power, q_ik ~ (1 + d_ik)^(-2 power).
    p and q are constants for the gradient: they are taken at the embeddings `frozen` (E by default).
    """
    D = _distances(E, normalize)
    D0 = D if frozen is None else _distances(frozen, normalize)
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if not positive or not negative:
            continue
        if weights == "exponential":
            p, q = sets.softmax(D0[i, positive] / gamma), sets.softmax(-D0[i, negative] / gamma)
        elif weights == "polynomial":
            p = sets.softmax(power * np.log1p(D0[i, positive]))
            q = sets.softmax(-2 * power * np.log1p(D0[i, negative]))
        else:
            raise ValueError(weights)
        values.append(np.maximum(np.sum(p * D[i, positive]) - np.sum(q * D[i, negative]) + margin, 0))
    return _reduce(values, "mean", len(y))


def triplet(E, y, margin=0.05, mining="all", smooth=0, reduction="mean", squared=False, normalize=True):
    """mean over triplets (a, p, n), p in P_a, n in N_a, of max(d_ap - d_an + margin, 0).

    smooth = mu > 0: mu log(1 + e^(x / mu)) in place of max(x, 0). squared=True: d is the squared distance.
    mining="all": every triplet. "semihard": those with d_ap < d_an < d_ap + margin. "hard": one triplet per
    anchor, the farthest p and the nearest n, mean over anchors. "hardest": the largest triplet loss.
    reduction="nonzero": the mean over the terms > 0.
    """
    name = "neg_squared_euclidean" if squared else "neg_euclidean"
    D = -scores(E, E, name, normalize=normalize)
    triplets = [(a, p, n) for a, p in _positive_pairs(y) for n in _negative(y, a)]

    def term(near, far):
        return smooth_hinge(near - far + margin, smooth)

    if mining == "all":
        terms = [term(D[a, p], D[a, n]) for a, p, n in triplets]
        return _reduce(terms, reduction, len(terms))
    if mining == "semihard":
        terms = [term(D[a, p], D[a, n]) for a, p, n in triplets if D[a, p] < D[a, n] < D[a, p] + margin]
        return _reduce(terms, reduction, len(terms))
    if mining == "hard":
        anchors = sorted({a for a, _, _ in triplets})
        terms = [term(np.max(D[a, _positive(y, a)]), np.min(D[a, _negative(y, a)])) for a in anchors]
        return _reduce(terms, reduction, len(y))
    if mining == "hardest":
        return max([term(D[a, p], D[a, n]) for a, p, n in triplets], default=ZERO)
    raise ValueError(mining)


def n_pair(E, y, l2=0.02):
    """mean over classes c of log(1 + sum_{c' != c} e^(<a_c, p_c'> - <a_c, p_c>)) + l2 * mean_i |x_i|^2.

    Over the classes with at least two rows: a_c is the first of them and p_c the second. Not normalized.
    """
    E = np.asarray(E, dtype=np.longdouble)
    rows = {}
    for i in range(len(y)):
        rows.setdefault(int(y[i]), []).append(i)
    couples = [members[:2] for members in rows.values() if len(members) >= 2]
    terms = []
    for a, p in couples:
        exponents = [dot(E[a], E[other]) - dot(E[a], E[p]) for _, other in couples if other != p]
        terms.append(log_one_plus_sum(exponents))
    return _average(terms) + l2 * _average([dot(x, x) for x in E])


def angular(E, y, degrees=40):
    """mean over positive (a, p) of log(1 + sum_{k in N_a} e^(4 t <x_a + x_p, x_k> - 2 (1 + t) <x_a, x_p>)).

    x are unit vectors and t = tan(degrees)^2.
    """
    X = [unit(x) for x in np.asarray(E, dtype=np.longdouble)]
    half_turn = 4 * np.arctan(np.longdouble(1))
    t = np.tan(degrees * half_turn / 180) ** 2
    terms = []
    for a, p in _positive_pairs(y):
        exponents = [4 * t * dot(X[a] + X[p], X[k]) - 2 * (1 + t) * dot(X[a], X[p]) for k in _negative(y, a)]
        terms.append(log_one_plus_sum(exponents))
    return _average(terms)


def nt_xent(E, y, temperature=0.07):
    """mean over positive pairs (i, j) of log(1 + sum_{k in N_i} e^((s_ik - s_ij) / temperature))."""
    S = scores(E, E, "cosine")
    terms = []
    for i, j in _positive_pairs(y):
        terms.append(log_one_plus_sum([(S[i, k] - S[i, j]) / temperature for k in _negative(y, i)]))
    return _average(terms)


def sup_con(E, y, temperature=0.1, reduction="nonzero"):
    """mean_i [ log sum_{k in P_i and N_i} e^(s_ik / temperature) - mean_{j in P_i} s_ij / temperature ].

    Over the anchors that have both sides (and a value > 0, which is then always the case).
    """
    S = scores(E, E, "cosine") / temperature
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if positive and negative:
            values.append(log_sum(S[i, positive + negative]) - np.sum(S[i, positive]) / len(positive))
    return _reduce(values, reduction, len(y))


def proxy_nca(E, y, proxies, scale=1, own=True):
    """mean_i log(1 + sum_{c != y_i} e^(scale (s_ic - s_iy_i))), s_ic = -|x_i - proxy_c|^2 of unit vectors.

    Without the own proxy: the same less the 1.
    """
    S = scores(E, proxies, "neg_squared_euclidean")
    terms = []
    for i in range(len(y)):
        others = [c for c in range(len(proxies)) if c != y[i]]
        steps = [scale * (S[i, c] - S[i, y[i]]) for c in others]
        terms.append(log_one_plus_sum(steps) if own else log_sum(steps))
    return _average(terms)


def proxy_anchor(E, y, proxies, margin=0.1, scale=32):
    """(1/C+) sum_c A_c + (1/C) sum_c B_c.

    A_c = log(1 + sum_{y_i = c} e^(-scale (s_ci - margin))),
    B_c = log(1 + sum_{y_i != c} e^(scale (s_ci + margin))).
    s_ci is the cosine of proxy c and row i, C the number of proxies, C+ the number of classes present in y.
    """
    S = scores(proxies, E, "cosine")
    present = len({int(label) for label in y})
    pull = push = ZERO
    for c in range(len(proxies)):
        pull += log_one_plus_sum([-scale * (S[c, i] - margin) for i in range(len(y)) if y[i] == c])
        push += log_one_plus_sum([scale * (S[c, i] + margin) for i in range(len(y)) if y[i] != c])
    return (pull / present if present else ZERO) + push / len(proxies)


def circle(E, y, margin=0.4, scale=80, reduction="nonzero", frozen=None):
    """mean_i log(1 + sum_{j in P_i} e^(l_ij) * sum_{k in N_i} e^(l_ik)), over the anchors with a value > 0.

    An anchor needs both sides.
    l_ij = -scale a_ij (s_ij - (1 - margin)) with a_ij = max(1 + margin - s_ij, 0) for j in P_i, and
    l_ik = scale a_ik (s_ik - margin) with a_ik = max(s_ik + margin, 0) for k in N_i.
    The a are constants for the gradient: they are taken at the embeddings `frozen` (E by default).
    """
    S = scores(E, E, "cosine")
    S0 = S if frozen is None else scores(frozen, frozen, "cosine")
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if not positive or not negative:
            continue
        pull = [-scale * np.maximum(1 + margin - S0[i, j], 0) * (S[i, j] - (1 - margin)) for j in positive]
        push = [scale * np.maximum(S0[i, k] + margin, 0) * (S[i, k] - margin) for k in negative]
        values.append(softplus(log_sum(pull) + log_sum(push)))
    return _reduce(values, reduction, len(y))


def arc_face(E, y, centers, margin=0.5, scale=64):
    """mean_i log(1 + sum_{c != y_i} e^(scale cos(theta_ic) - z_i)), theta_ic the angle of row i and center c.

    z_i = scale cos(theta + margin) if theta <= pi - margin, else scale (cos(theta) - margin sin(margin)),
    where theta = theta_iy_i.
    """
    E, centers = np.asarray(E, dtype=np.longdouble), np.asarray(centers, dtype=np.longdouble)
    S = scores(E, centers, "cosine")
    half_turn = 4 * np.arctan(np.longdouble(1))
    margin = np.longdouble(margin)
    terms = []
    for i in range(len(y)):
        theta = angle(E[i], centers[y[i]])
        line = np.cos(theta) - margin * np.sin(margin)
        target = np.cos(theta + margin) if theta <= half_turn - margin else line
        others = [c for c in range(len(centers)) if c != y[i]]
        terms.append(log_one_plus_sum([scale * (S[i, c] - target) for c in others]))
    return _average(terms)


def _softmax_over_classes(S, y, scale, margin=0):
    """mean_i log(1 + sum_{c != y_i} e^(scale (S_ic - S_iy_i + margin)))."""
    terms = []
    for i in range(len(y)):
        others = [c for c in range(S.shape[1]) if c != y[i]]
        terms.append(log_one_plus_sum([scale * (S[i, c] - S[i, y[i]] + margin) for c in others]))
    return _average(terms)


def cos_face(E, y, centers, margin=0.35, scale=64):
    """Cross-entropy of scale cos(theta_ic), from which the own class has scale * margin taken off."""
    return _softmax_over_classes(scores(E, centers, "cosine"), y, scale, np.longdouble(margin))


def normalized_softmax(E, y, centers, temperature=0.05):
    """Cross-entropy of cos(theta_ic) / temperature."""
    return _softmax_over_classes(scores(E, centers, "cosine"), y, 1 / np.longdouble(temperature))


def _center_cosines(E, centers):
    """[rows, classes, centers of a class], from [classes, centers * dim]."""
    E, centers = np.asarray(E, dtype=np.longdouble), np.asarray(centers, dtype=np.longdouble)
    dim = E.shape[1]
    return np.array([[[dot(unit(x), unit(c[k : k + dim])) for k in range(0, len(c), dim)] for c in centers] for x in E])


def sub_center_arc_face(E, y, centers, margin=0.5, scale=64):
    """ArcFace with cos(theta_ic) = the largest cosine of row i with a center of class c."""
    S = _center_cosines(E, centers).max(axis=2)
    half_turn, margin = 4 * np.arctan(np.longdouble(1)), np.longdouble(margin)
    terms = []
    for i in range(len(y)):
        theta = np.arccos(S[i, y[i]])
        line = np.cos(theta) - margin * np.sin(margin)
        target = np.cos(theta + margin) if theta <= half_turn - margin else line
        others = [c for c in range(S.shape[1]) if c != y[i]]
        terms.append(log_one_plus_sum([scale * (S[i, c] - target) for c in others]))
    return _average(terms)


def soft_triple(E, y, centers, scale=20, gamma=0.1, margin=0.01):
    """Softmax over classes of S_ic = sum_k p_k cos_k, p = softmax of cos_k / gamma over the centers k of class c."""
    cosines = _center_cosines(E, centers)
    chances = np.exp((cosines - cosines.max(axis=2, keepdims=True)) / np.longdouble(gamma))
    chances = chances / chances.sum(axis=2, keepdims=True)
    return _softmax_over_classes((chances * cosines).sum(axis=2), y, scale, np.longdouble(margin))


def tuplet_margin(E, y, margin=0.1, scale=64, reduction="mean"):
    """mean over positive pairs of log(1 + sum_{k in N_i} e^(scale (cos(theta_ik) - cos(theta_ij - margin))))."""
    E = np.asarray(E, dtype=np.longdouble)
    S, margin = scores(E, E, "cosine"), np.longdouble(margin)
    values = []
    for i, j in _positive_pairs(y):
        target = np.cos(angle(E[i], E[j]) - margin)
        values.append(log_one_plus_sum([scale * (S[i, k] - target) for k in _negative(y, i)]))
    return _reduce(values, reduction, len(values))


def nca(E, y, scale=1, reduction="mean"):
    """mean over anchors with positives of -log( sum_{j in P_i} e^(scale s_ij) / sum_{k in P_i, N_i} e^(scale s_ik) ).

    s_ij = -|x_i - x_j|^2 of unit rows.
    """
    S = scale * scores(E, E, "neg_squared_euclidean")
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if positive:
            values.append(log_sum(S[i, positive + negative]) - log_sum(S[i, positive]))
    return _reduce(values, reduction, len(values))


def fast_ap(E, y, bins=10, similarity="neg_squared_euclidean", reduction="mean"):
    """1 - (1 / |P_i|) sum_b h+_b H+_b / H_b: h_b counts triangles around 4 b / bins, H_b is h_0 + ... + h_b."""
    D, width = -scores(E, E, similarity), np.longdouble(4 if "squared" in similarity else 2) / bins
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        if not positive:
            continue
        precision, near, both = ZERO, ZERO, ZERO
        for b in range(bins + 1):
            here = [sum((max(ZERO, 1 - abs(D[i, j] / width - b)) for j in side), ZERO) for side in (positive, negative)]
            near, both = near + here[0], both + sum(here)
            precision = precision + (here[0] * near / both if both > 0 else ZERO)
        values.append(1 - precision / len(positive) if negative else ZERO)
    return _reduce(values, reduction, len(values))


def smooth_ap(E, y, temperature=0.01, reduction="mean"):
    """1 - (1 / |P_i|) sum_{p in P_i} (rank of p within P_i) / (rank of p within P_i and N_i), steps as sigmoids."""
    S = scores(E, E, "cosine") / np.longdouble(temperature)
    values = []
    for i in range(len(y)):
        positive, negative = _positive(y, i), _negative(y, i)
        ratios = []
        for p in positive:
            near, far = (
                sum((np.exp(-softplus(S[i, p] - S[i, j])) for j in side if j != p), ZERO)
                for side in (positive, negative)
            )
            ratios.append((1 + near) / (1 + near + far))
        if positive:
            values.append(1 - _average(ratios))
    return _reduce(values, reduction, len(values))


def spread_floor(E, y, inner="SupCon", floor=0.5, weight=1, **more):
    """A loss + weight [log(floor / V)]_+, V = mean over pairs i != j of 1 - cos^2 (and a millionth)."""
    S, n = scores(E, E, "cosine"), len(y)
    sines = [1 - S[i, j] ** 2 for i in range(n) for j in range(n) if i != j]
    spread = _average(sines) if sines else 1
    barrier = max(ZERO, np.log(np.longdouble(floor) / (spread + np.longdouble(1e-6))))
    return {"SupCon": sup_con, "Triplet": triplet}[inner](E, y, **more) + weight * barrier


def _towers(E, y, R, ry):
    """Scores [n, m], and the positive and the negative pairs: of rows with one another, or with references R."""
    S = scores(E, E if R is None else R, "cosine")
    ry = y if R is None else ry
    every = [(i, j) for i in range(len(y)) for j in range(len(ry)) if R is not None or i != j]
    return S, [(i, j) for i, j in every if y[i] == ry[j]], [(i, j) for i, j in every if y[i] != ry[j]]


def clip(E, y, temperature=0.07, R=None, ry=None):
    """mean over positive pairs (i, j) of half the sum of two cross-entropies, each against the negatives of one end.

    (1/2) [ log(1 + sum_{k in N_i} e^((s_ik - s_ij)/t)) + log(1 + sum_{k in N_j} e^((s_kj - s_ij)/t)) ], t = temperature
    """
    S, positive, negative = _towers(E, y, R, ry)
    terms = []
    for i, j in positive:
        row = log_one_plus_sum([(S[a, b] - S[i, j]) / temperature for a, b in negative if a == i])
        column = log_one_plus_sum([(S[a, b] - S[i, j]) / temperature for a, b in negative if b == j])
        terms.append((row + column) / 2)
    return _average(terms)


def siglip(E, y, scale=10, bias=-10, R=None, ry=None):
    """(1/n) sum over pairs of log(1 + e^(-z)) if positive, log(1 + e^z) if negative, z = scale s_ij + bias."""
    S, positive, negative = _towers(E, y, R, ry)
    terms = [softplus(-(scale * S[i, j] + bias)) for i, j in positive]
    terms += [softplus(scale * S[i, j] + bias) for i, j in negative]
    return sum(terms, ZERO) / len(y)


def nested(E, y, inner="SupCon", dims=(2, 3), weights=(1, 1)):
    """sum_k weights_k times the loss of the first dims_k columns."""
    return sum(weight * {"SupCon": sup_con}[inner](E[:, :dim], y) for dim, weight in zip(dims, weights, strict=True))


def ladder(E, y, relevance=None, rungs=(0,), weights=None, margin=0.05, unknown=None):
    """sum over rungs r of weight_r times the mean over triplets of [d_xa - d_xb + margin]_+.

    The triplets of a rung have rel(x, a) > r >= rel(x, b). Without a relevance [n, n], equal labels have 1 and
    others 0. Pairs marked in unknown [n, n] form no triplets.
    """
    D, n, total = -scores(E, E, "neg_euclidean"), len(y), ZERO
    for r, weight in zip(rungs, weights or [1] * len(rungs), strict=True):
        terms = []
        for x, a, b in itertools.permutations(range(n), 3):
            if unknown is not None and (unknown[x, a] or unknown[x, b]):
                continue
            near, far = (int(y[x] == y[j]) if relevance is None else relevance[x, j] for j in (a, b))
            if near > r >= far:
                terms.append(max(ZERO, D[x, a] - D[x, b] + margin))
        total = total + weight * _average(terms)
    return total


def cosent(E, y, temperature=0.05, R=None, ry=None):
    """log(1 + sum over positive pairs (i, j) and negative pairs (k, l) of e^((s_kl - s_ij)/temperature))."""
    S, positive, negative = _towers(E, y, R, ry)
    return log_one_plus_sum([(S[k] - S[i]) / temperature for i in positive for k in negative])
