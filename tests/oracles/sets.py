"""Worst cases of a list of losses over a set of weights: the value, and the weights p* that attain it.

Every function takes base weights w (all 1 by default; an item with w = 0 is absent), zero="drop" (items with
loss <= 0 are made absent first) and zero_member=True (after the dropping, one item of loss 0 and weight 1 joins).
W is the sum of w over what is then present. The value of an empty list is 0.
A `*_weights` function returns p* for the given items, in their order: 0 for the absent ones, and without the
share of the zero member. Where p* is not unique (ties), equal losses share in proportion to w.
"""

import numpy as np

NOTHING = np.longdouble(0)


def log_sum(exponents):
    """log sum_i e^(x_i), of at least one item, with the largest exponent taken out."""
    exponents = np.asarray(exponents, dtype=np.longdouble)
    largest = np.max(exponents)
    return largest + np.log(np.sum(np.exp(exponents - largest)))


def log_mean(exponents, weights):
    """log(sum_i w_i e^(x_i) / sum_i w_i); log1p keeps the digits of a mean near 1 (small exponents)."""
    exponents = np.asarray(exponents, dtype=np.longdouble)
    largest = np.max(exponents)
    above = np.sum(weights * np.expm1(exponents - largest)) / np.sum(weights)
    if above > -0.5:
        return largest + np.log1p(above)
    return log_sum(exponents + np.log(weights)) - np.log(np.sum(weights))


def log_one_plus_sum(exponents):
    """log(1 + sum_i e^(x_i)); 0 for no items."""
    exponents = np.asarray(exponents, dtype=np.longdouble)
    if len(exponents) == 0:
        return NOTHING
    largest = np.max(exponents)
    if largest <= 0:  # log1p keeps the digits of a sum that is small beside the 1
        return np.log1p(np.sum(np.exp(exponents)))
    return largest + np.log(np.exp(-largest) + np.sum(np.exp(exponents - largest)))


def softmax(exponents, weights=None):
    """p_i = w_i e^(x_i) / sum_k w_k e^(x_k)."""
    exponents = np.asarray(exponents, dtype=np.longdouble)
    factors = np.exp(exponents - np.max(exponents))
    if weights is not None:
        factors = factors * weights
    return factors / np.sum(factors)


def _present(losses, weights, zero, zero_member):
    """The losses and base weights that take part, and the place of each in the given list."""
    if zero not in ("keep", "drop"):
        raise ValueError(zero)
    losses = np.asarray(losses, dtype=np.longdouble)
    weights = np.ones(len(losses)) if weights is None else weights
    weights = np.asarray(weights, dtype=np.longdouble)
    places = [i for i in range(len(losses)) if weights[i] > 0 and (zero == "keep" or losses[i] > 0)]
    losses, weights = losses[places], weights[places]
    if zero_member:
        losses, weights = np.append(losses, NOTHING), np.append(weights, NOTHING + 1)
    return losses, weights, places


def _value(function, losses, weights, zero, zero_member):
    kept, base, _ = _present(losses, weights, zero, zero_member)
    return function(kept, base) if len(kept) > 0 else NOTHING


def _share(function, losses, weights, zero, zero_member):
    kept, base, places = _present(losses, weights, zero, zero_member)
    p = np.zeros(len(losses), dtype=np.longdouble)
    if len(kept) > 0:
        # The zero_member, if there is one, is the last item and has no place in the given list.
        p[places] = function(kept, base)[: len(places)]
    return p


def mean(losses, weights=None, zero="keep", zero_member=False):
    """sum_i w_i l_i / W."""
    return _value(lambda kept, base: np.sum(base * kept) / np.sum(base), losses, weights, zero, zero_member)


def mean_weights(losses, weights=None, zero="keep", zero_member=False):
    """p_i = w_i / W."""
    return _share(lambda kept, base: base / np.sum(base), losses, weights, zero, zero_member)


def worst(losses, weights=None, zero="keep", zero_member=False):
    """max_i l_i."""
    return _value(lambda kept, base: np.max(kept), losses, weights, zero, zero_member)


def _on_the_largest(losses, base):
    ties = np.where(losses == np.max(losses), base, NOTHING)
    return ties / np.sum(ties)


def worst_weights(losses, weights=None, zero="keep", zero_member=False):
    """p_i = w_i / (sum of w over the items at the maximum) there, and 0 elsewhere."""
    return _share(_on_the_largest, losses, weights, zero, zero_member)


def _mass(base, k, fraction):
    """The mass k to be spread, with the limits 0 < k <= W."""
    if (k is None) == (fraction is None):
        raise ValueError("give either k or fraction")
    return np.minimum(fraction * np.sum(base) if k is None else np.longdouble(k), np.sum(base))


def topk(losses, k=None, fraction=None, weights=None, zero="keep", zero_member=False):
    """sum_i t_i l_i / k, where the greatest losses come first and take t_i <= w_i until sum t_i = k."""

    def value(kept, base):
        mass = left = _mass(base, k, fraction)
        total = NOTHING
        for i in sorted(range(len(kept)), key=lambda i: -kept[i]):
            taken = np.minimum(base[i], left)
            total = total + taken * kept[i]
            left = left - taken
        return total / mass

    return _value(value, losses, weights, zero, zero_member)


def topk_weights(losses, k=None, fraction=None, weights=None, zero="keep", zero_member=False):
    """p_i = t_i / k; the items tied at the edge take what is left of k in proportion to w."""

    def share(kept, base):
        mass = _mass(base, k, fraction)
        p = np.zeros(len(kept), dtype=np.longdouble)
        for i in range(len(kept)):
            above = np.sum(base[kept > kept[i]])
            tied = np.sum(base[kept == kept[i]])
            filled = np.minimum(np.maximum((mass - above) / tied, 0), 1)
            p[i] = filled * base[i] / mass
        return p

    return _share(share, losses, weights, zero, zero_member)


def _ranks(base, top, k, top_fraction, fraction):
    """The masses at which the counted items begin and end, the greatest loss first."""
    whole = np.sum(base)
    begin = np.minimum(top_fraction * whole if top is None else np.longdouble(top), whole)
    return begin, np.minimum(begin + (fraction * whole if k is None else np.longdouble(k)), whole)


def trimmed(losses, top=None, k=None, top_fraction=None, fraction=None, weights=None, zero="keep", zero_member=False):
    """sum_i t_i l_i / sum_i t_i: the greatest losses come first, each w_i long; t_i is its part in [top, top + k]."""

    def value(kept, base):
        begin, end = _ranks(base, top, k, top_fraction, fraction)
        total = at = NOTHING
        for i in sorted(range(len(kept)), key=lambda i: -kept[i]):
            inside = max(NOTHING, np.minimum(at + base[i], end) - np.maximum(at, begin))
            total, at = total + inside * kept[i], at + base[i]
        return total / (end - begin) if end > begin else NOTHING

    return _value(value, losses, weights, zero, zero_member)


def trimmed_weights(
    losses, top=None, k=None, top_fraction=None, fraction=None, weights=None, zero="keep", zero_member=False
):
    """p_i = t_i / sum_i t_i; items that are tied share what they have together in proportion to w."""

    def share(kept, base):
        begin, end = _ranks(base, top, k, top_fraction, fraction)
        p = np.zeros(len(kept), dtype=np.longdouble)
        for i in range(len(kept)):
            above = np.sum(base[kept > kept[i]])
            tied = np.sum(base[kept == kept[i]])
            inside = max(NOTHING, np.minimum(above + tied, end) - np.maximum(above, begin))
            p[i] = inside / tied * base[i] / (end - begin) if end > begin else 0
        return p

    return _share(share, losses, weights, zero, zero_member)


def kl(losses, gamma, weights=None, normalized=True, zero="keep", zero_member=False):
    """gamma * (log sum_i w_i e^(l_i / gamma) - log W); without log W if normalized=False."""

    def value(kept, base):
        if normalized:
            return gamma * log_mean(kept / gamma, base)
        # w e^x = e^(x + log w): every present weight is positive.
        return gamma * log_sum(kept / gamma + np.log(base))

    return _value(value, losses, weights, zero, zero_member)


def kl_weights(losses, gamma, weights=None, zero="keep", zero_member=False):
    """p_i = w_i e^(l_i / gamma) / sum_k w_k e^(l_k / gamma)."""
    return _share(lambda kept, base: softmax(kept / gamma, base), losses, weights, zero, zero_member)


def _root(increasing):
    """The x > 0 at which an increasing function changes its sign, by bisection to the last digit."""
    low = high = NOTHING + 1
    # The bounds on the number of doublings only stop a sign change lost in rounding at either end.
    for _ in range(1000):
        if increasing(high) >= 0:
            break
        high = 2 * high
    for _ in range(1000):
        if increasing(low) < 0:
            break
        low = low / 2
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return middle
        if increasing(middle) < 0:
            low = middle
        else:
            high = middle


def _kl_ball_slope(kept, base, rho):
    """b = 1/g at the optimal temperature g: p_i ~ w_i e^(b l_i) has KL(p || w/W) = rho, increasing in b."""
    below = kept - np.max(kept)  # <= 0: no exponential overflows

    def excess(b):
        p = softmax(b * below, base)
        return b * np.sum(p * below) - log_mean(b * below, base) - rho

    return _root(excess)


def _kl_ball_holds_the_largest(kept, base, rho):
    """Whether all of the mass can go to the maximum: rho >= log(W / W_ties), also with equal losses."""
    ties = np.sum(base[kept == np.max(kept)])
    return ties == np.sum(base) or rho >= np.log(np.sum(base) / ties)


def kl_ball(losses, rho, weights=None, zero="keep", zero_member=False):
    """max sum p_i l_i: sum p = 1, KL(p || w/W) <= rho  =  min_g g rho + g log(sum_i (w_i/W) e^(l_i/g))."""

    def value(kept, base):
        if _kl_ball_holds_the_largest(kept, base, rho):
            return np.max(kept)
        if rho == 0:  # only p = w/W is left, and g is infinite
            return np.sum(base * kept) / np.sum(base)
        largest = np.max(kept)
        b = _kl_ball_slope(kept, base, rho)
        return largest + (rho + log_mean(b * (kept - largest), base)) / b

    return _value(value, losses, weights, zero, zero_member)


def kl_ball_weights(losses, rho, weights=None, zero="keep", zero_member=False):
    """p_i ~ w_i e^(l_i / g), with g such that KL(p || w/W) = rho; the maximum alone if rho allows it."""

    def share(kept, base):
        if _kl_ball_holds_the_largest(kept, base, rho):
            return _on_the_largest(kept, base)
        if rho == 0:
            return base / np.sum(base)
        return softmax(_kl_ball_slope(kept, base, rho) * kept, base)

    return _share(share, losses, weights, zero, zero_member)


def _effective_share(kept, base, effective):
    """1/g and p_i ~ w_i e^(l_i / g) with sum p_i^2/w_i = 1/effective; g is 0 or infinite where no g does it."""
    below, ties = kept - np.max(kept), np.sum(base[kept == np.max(kept)])
    if effective <= ties or ties == np.sum(base):
        return np.inf, _on_the_largest(kept, base)
    if effective >= np.sum(base):
        return 0, base / np.sum(base)
    b = _root(lambda b: np.sum(softmax(b * below, base) ** 2 / base) - 1 / np.longdouble(effective))
    return b, softmax(b * below, base)


def kl_effective(losses, effective, weights=None, zero="keep", zero_member=False):
    """g log(sum_i (w_i/W) e^(l_i/g)), with the g at which the weights have sum p_i^2/w_i = 1/effective."""

    def value(kept, base):
        b, p = _effective_share(kept, base, effective)
        largest = np.max(kept)
        if b in (0, np.inf):
            return np.sum(p * kept)
        return largest + log_mean(b * (kept - largest), base) / b

    return _value(value, losses, weights, zero, zero_member)


def kl_effective_weights(losses, effective, weights=None, zero="keep", zero_member=False):
    """p_i ~ w_i e^(l_i / g) with sum p_i^2/w_i = 1/effective."""
    return _share(lambda kept, base: _effective_share(kept, base, effective)[1], losses, weights, zero, zero_member)


def chi_square_effective(losses, effective, weights=None, zero="keep", zero_member=False):
    """max sum p_i l_i: p >= 0, sum p = 1, sum p_i^2/w_i <= 1/effective."""
    p = chi_square_effective_weights(losses, effective, weights, zero, zero_member)
    return np.sum(p * np.asarray(losses, dtype=np.longdouble))


def chi_square_effective_weights(losses, effective, weights=None, zero="keep", zero_member=False):
    """The weights of the chi-square ball with 1/n + 2 rho/n^2 = 1/effective, n the measure that is left."""

    def share(kept, base):
        n = np.sum(base)
        return _chi_square_share(kept, base, n * (n / np.minimum(np.longdouble(effective), n) - 1) / 2)

    return _share(share, losses, weights, zero, zero_member)


def _chi_square_share(kept, base, rho):
    """p_i = w_i r_i / sum_k w_k r_k, r_i = (l_i - eta)_+, eta the minimizer of the dual.

    The dual g(eta) = eta + sqrt(1 + 2 rho/n) sqrt(E r^2), E = average with weights w/n, is convex and
    g'(eta) = 1 - sqrt(1 + 2 rho/n) E r / sqrt(E r^2). With E r^2 = (E r)^2 + Var r, g' <= 0 means
    2 rho (E r)^2 >= n Var r. Both sides of this comparison are computed without cancellation, and as the
    root in x = max l - eta > 0 of an increasing sign, it can be bisected.
    """
    n = np.sum(base)
    below = kept - np.max(kept)
    ties = np.sum(base[below == 0])
    if ties == n or 1 / n + 2 * rho / n**2 >= 1 / ties:  # g' <= 0 up to the maximum: eta = max l
        return _on_the_largest(kept, base)
    if rho == 0:  # eta -> -infinity
        return base / n

    def residual(x):
        return np.maximum(below + x, 0)

    def descent(x):
        r = residual(x)
        average = np.sum(base * r) / n
        return 2 * rho * average**2 - np.sum(base * (r - average) ** 2)

    r = residual(_root(descent))
    return base * r / np.sum(base * r)


def chi_square(losses, rho, weights=None, zero="keep", zero_member=False):
    """max sum p_i l_i: p >= 0, sum p = 1, sum p_i^2/w_i <= 1/n + 2 rho/n^2, n = W.

    = min_eta eta + sqrt(1 + 2 rho/n) sqrt(sum_i w_i (l_i - eta)_+^2 / n). Evaluated as sum p_i l_i at the p
    that belongs to the minimizing eta: for a small rho eta is far below the losses and the dual cancels.
    """

    def value(kept, base):
        largest = np.max(kept)
        return largest + np.sum(_chi_square_share(kept, base, rho) * (kept - largest))

    return _value(value, losses, weights, zero, zero_member)


def chi_square_weights(losses, rho, weights=None, zero="keep", zero_member=False):
    """p_i = w_i (l_i - eta)_+ / sum_k w_k (l_k - eta)_+, eta the minimizer of the dual."""
    return _share(lambda kept, base: _chi_square_share(kept, base, rho), losses, weights, zero, zero_member)
