"""The linear triplet and contrastive losses by plain loops: B is formed, sums are written out, minima are not.

A is d x m, u and v are n x m, w are weights that sum to 1. Extended precision throughout.
"""

import numpy as np

WIDE = np.longdouble


def b_matrix(u, v):
    """B = uu' - vv'."""
    u, v = np.asarray(u, dtype=WIDE), np.asarray(v, dtype=WIDE)
    return np.outer(u, u) - np.outer(v, v)


def softplus(s, mu):
    """mu log(1 + e^(s/mu)), and max(s, 0) for mu = 0."""
    if mu == 0:
        return max(s, WIDE(0))
    x = s / mu
    return mu * (np.log1p(np.exp(x)) if x <= 0 else x + np.log1p(np.exp(-x)))


def sigmoid(s, mu):
    """The slope of softplus."""
    if mu == 0:
        return WIDE(1) if s > 0 else WIDE(0)
    x = s / mu
    return 1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x))


def score(A, u, v, margin):
    """<A'A, B> + margin."""
    A = np.asarray(A, dtype=WIDE)
    return np.trace(A @ b_matrix(u, v) @ A.T) + margin


def triplet(A, u, v, margin, mu, weights=None, ridge=0.0):
    """sum_i w_i softplus(s_i) + ridge/2 |A|^2."""
    weights = [WIDE(1) / len(u)] * len(u) if weights is None else weights
    total = WIDE(ridge) / 2 * np.sum(np.asarray(A, dtype=WIDE) ** 2)
    for i in range(len(u)):
        total = total + weights[i] * softplus(score(A, u[i], v[i], margin), mu)
    return total


def triplet_gradient(A, u, v, margin, mu, weights=None, ridge=0.0):
    """2 A sum_i w_i q_i B_i + ridge A."""
    weights = [WIDE(1) / len(u)] * len(u) if weights is None else weights
    A = np.asarray(A, dtype=WIDE)
    total = ridge * A
    for i in range(len(u)):
        total = total + 2 * weights[i] * sigmoid(score(A, u[i], v[i], margin), mu) * A @ b_matrix(u[i], v[i])
    return total


def triplet_hessian(A, u, v, margin, mu):
    """The (dm x dm) second derivative, entry by entry: 2 q B in each row of A, and 4q(1-q)/mu vec(AB) vec(AB)'."""
    A = np.asarray(A, dtype=WIDE)
    d, m = A.shape
    H = np.zeros((d * m, d * m), dtype=WIDE)
    for i in range(len(u)):
        B = b_matrix(u[i], v[i])
        q = sigmoid(score(A, u[i], v[i], margin), mu)
        flat = (A @ B).reshape(-1)
        H = H + (4 * q * (1 - q) / mu * np.outer(flat, flat) + 2 * q * np.kron(np.eye(d), B)) / len(u)
    return H


def convex_part(A, u, v, margin, mu):
    """mean_i mu log(e^((|Au|^2 + margin)/mu) + e^(|Av|^2/mu))."""
    A = np.asarray(A, dtype=WIDE)
    total = WIDE(0)
    for i in range(len(u)):
        first, second = np.sum((A @ u[i]) ** 2) + margin, np.sum((A @ v[i]) ** 2)
        total = total + second + softplus(first - second, mu)
    return total / len(u)


def concave_part(A, v):
    """mean_i |A v_i|^2."""
    A = np.asarray(A, dtype=WIDE)
    return sum(np.sum((A @ row) ** 2) for row in v) / len(v)


def subproblem(A, anchor, u, v, margin, mu):
    """g(A) - h(A_k) - <grad h(A_k), A - A_k>, as it stands."""
    A, anchor = np.asarray(A, dtype=WIDE), np.asarray(anchor, dtype=WIDE)
    C = sum(np.outer(row, row) for row in v) / len(v)
    return convex_part(A, u, v, margin, mu) - concave_part(anchor, v) - np.sum(2 * anchor @ C * (A - anchor))


def dual(q, anchor, u, v, margin, mu):
    """mean(margin q + mu H2(q)) - tr(A_k C P(q)^-1 C A_k') + tr(A_k C A_k'), P = mean(q uu' + (1-q) vv')."""
    n, m = np.shape(u)
    C, P, total = np.zeros((m, m)), np.zeros((m, m)), 0.0
    for i in range(n):
        C += np.outer(v[i], v[i]) / n
        P += (q[i] * np.outer(u[i], u[i]) + (1 - q[i]) * np.outer(v[i], v[i])) / n
        for share in (q[i], 1 - q[i]):
            total -= mu * share * np.log(share) / n if share > 0 else 0.0
        total += margin * q[i] / n
    right = np.asarray(anchor, dtype=float) @ C
    return total - np.trace(right @ np.linalg.solve(P, right.T)) + np.trace(right @ np.asarray(anchor, dtype=float).T)


def contrastive(A, u, v, margin, mu):
    """(sum_i |A u_i|^2 + sum_j softplus(margin - |A v_j|^2)) / (n + k)."""
    A = np.asarray(A, dtype=WIDE)
    total = sum(np.sum((A @ row) ** 2) for row in u)
    for row in v:
        total = total + softplus(margin - np.sum((A @ row) ** 2), mu)
    return total / (len(u) + len(v))


def printed_m_f(w, u, v):
    """|w|^2 lmax(B)^2 + 2 lmax(B), as the paper has it."""
    top = np.linalg.eigvalsh(b_matrix(u, v).astype(float))[-1]
    return np.sum(np.square(w)) * top**2 + 2 * top


def printed_m_g(w, u, v):
    """|w|^2 (|u|^4 + |v|^4 + 4|u|^2|v|^2), as the paper has it."""
    a, b = np.sum(np.square(u)), np.sum(np.square(v))
    return np.sum(np.square(w)) * (a * a + b * b + 4 * a * b)
