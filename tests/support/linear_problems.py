"""Small linear triplet and contrastive problems: random ones, and any that hypothesis draws."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from nearfar.linear import ContrastiveObjective, TripletObjective


def problem(seed, n=7, m=4, d=2, kind="triplet", scale=1.0, **how):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    u, v, A = draw(n, m), 1.3 * draw(n + (kind == "contrastive"), m), draw(d, m)
    objective = (TripletObjective if kind == "triplet" else ContrastiveObjective)(u, v, **how)
    return objective, scale * A, u, v


def hessian(objective, A):
    """The full (dm x dm) matrix, a column a product."""
    columns = [objective.hessian_vector(A, row.reshape(A.shape)).ravel() for row in torch.eye(A.numel()).to(A)]
    return torch.stack(columns, dim=1)


NUMBERS = st.floats(-1e3, 1e3, allow_nan=False, allow_subnormal=False)


@st.composite
def problems(draw):
    """Any finite rows: zeros, copies, huge and tiny ones, all μ, both losses."""
    n, m, d = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    matrix = lambda rows: torch.tensor(  # noqa: E731
        draw(st.lists(st.lists(NUMBERS, min_size=m, max_size=m), min_size=rows, max_size=rows)), dtype=torch.float64
    )
    u, v, A = matrix(n), matrix(n), matrix(d)
    mu = draw(st.sampled_from([0.0, 1e-3, 0.03, 1.0, 100.0]))
    kind = draw(st.sampled_from([TripletObjective, ContrastiveObjective]))
    ridge = draw(st.sampled_from([0.0, 0.1]))
    return kind(u, v, margin=draw(st.sampled_from([0.0, 1.0, 50.0])), mu=mu, ridge=ridge), A
