"""The runs of the study of gradient descent (Jaffe 2020): plain numbers for JSON and for figures."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.linear import TripletObjective, ccp, descend, psd_reference
from nearfar.linear._descent import Path, safe_step, size
from nearfar.studies._descent_errata import Array, Triplet

Numbers = dict[str, Any]
SURFACE = ((0.0, 0.1), (0.0, 0.1, 1.0))  # the α of the rows and the μ of the columns of Figure 1


def appendix_triplet() -> Triplet:
    """The triplet of Figure 2: seed 0, 8 features (the caption says 2), x, y, z and w uniform on [0, 1]."""
    stream = np.random.RandomState(0)  # the legacy stream, as in the published run
    x, y, z, w = (stream.uniform(0, 1, 8) for _ in range(4))
    return Triplet(x - y, x - z, w)


def surfaces(side: int = 61) -> Numbers:
    """Values of f on a square of w for one random triplet with two features: rows α, columns μ."""
    x, y, z = np.random.default_rng(0).uniform(0, 1, (3, 2))  # |u| is about |v|, so that both curvatures are visible
    axis = np.linspace(-2, 2, side)
    grid = torch.as_tensor(np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 1, 2))
    u, v = torch.as_tensor(x - y)[None], torch.as_tensor(x - z)[None]
    turned = np.linalg.eigvalsh(Triplet(x - y, x - z, np.zeros(2)).b).tolist()
    found: Numbers = {"axis": axis.tolist(), "u": (x - y).tolist(), "v": (x - z).tolist(), "eigenvalues": turned}
    found["values"] = {}
    for margin in SURFACE[0]:
        for mu in SURFACE[1]:
            f = TripletObjective(u, v, margin=margin, mu=mu)
            values = [float(f.value(w)) for w in grid]
            found["values"][f"alpha {margin:g}, mu {mu:g}"] = np.reshape(values, (side, side)).tolist()
    return found


def _trace(case: Triplet, step: Any, steps: int) -> Numbers:
    """Values f, |w|, |∇f|² along w ← w - step(case)·∇f; a step of None is the stable w ← w - Bw/λmax."""
    values, norms, gradients = [], [], []
    for _ in range(steps + 1):
        values.append(case.value())
        norms.append(float(np.linalg.norm(case.w)))
        gradients.append(float(case.gradient @ case.gradient))
        if step is None:
            case = case.at(case.w - case.b @ case.w / case.top())
        else:
            case = case.at(case.w - step(case) * case.gradient)
    return {"value": values, "norm": norms, "gradient": gradients}


def appendix(steps: int = 20) -> Numbers:
    """Figure 2: runs with the three steps of the paper as printed, and with the two corrected bounds."""
    case = appendix_triplet()
    near = Triplet(np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([0.1, 0.1]))
    return {
        "runs": {
            "1/M_g printed": _trace(case, lambda c: 1 / c.printed_m_g(), steps),
            "1/M_g true": _trace(case, lambda c: 1 / c.true_m_g(), steps),
            "1/M_f printed": _trace(case, lambda c: 1 / c.printed_m_f(), steps),
            "1/M_f true": _trace(case, lambda c: 1 / c.true_m_f(), steps),
            "1/(2qλmax), stable form": _trace(case, None, steps),
        },
        "counterexample": {
            "1/M_g printed": _trace(near, lambda c: 1 / c.printed_m_g(), steps),
            "1/M_g true": _trace(near, lambda c: 1 / c.true_m_g(), steps),
        },
    }


def bounds(steps: int = 12) -> Numbers:
    """The bounds 2.8, 2.9 and 2.10 along runs on the appendix triplet: the quantity, the printed and the true bound."""
    case = appendix_triplet()
    low, top = float(np.linalg.eigvalsh(case.b)[0]), case.top()
    turn = np.eye(8) - case.b / top
    norms = _trace(case, None, steps)["norm"]
    powers = [np.linalg.matrix_power(turn, t) for t in range(steps + 1)]
    falls, printed, true, values, predicted = [], [], [], [case.value()], [case.value()]
    start, total = float(case.w @ case.b @ case.w), 0.0
    for _ in range(steps):
        moved = case.at(case.w - case.gradient / top)
        X = (1 - case.q) * float(case.gradient @ case.gradient) / (case.q * top)
        falls.append(case.value() - moved.value())
        printed.append(float(np.logaddexp(np.log(case.q) + X, np.log1p(-case.q))))
        true.append(-float(np.log1p(case.q * np.expm1(-X))))
        total += case.change(1 / top)
        case = moved
        values.append(case.value())
        predicted.append(float(np.logaddexp(0.0, start + total)))
    return {
        "iterate": norms,
        "iterate Frobenius": [float(np.linalg.norm(power)) * norms[0] for power in powers],
        "iterate spectral": [max(1.0, 1 - low / top) ** t * norms[0] for t in range(steps + 1)],
        "fall": falls,
        "fall printed": printed,
        "fall true": true,
        "value": values,
        "value from the sum of b": predicted,
    }


def cloud(n: int, m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Differences u, v of n triplets: positives small in the first half of the features, negatives larger there."""
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(2, n, m, generator=generator, dtype=torch.float64)
    scale = torch.where(torch.arange(m) < (m + 1) // 2, 0.7, 1.3).to(u)
    return u * scale, v / scale


def _start(d: int, m: int, seed: int = 1) -> Tensor:
    return torch.randn(d, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _summary(path: Path) -> Numbers:
    return {
        "value": path.values,
        "norm": [each.norm for each in path.iterates],
        "gradient": [each.gradient for each in path.iterates],
        "certified": path.certified,
        "reason": path.reason,
    }


def extensions(steps: int = 80) -> Numbers:
    """The paper's open questions: α > 0, μ ≠ 1, n > 1, d > 1, stochastic steps, and CCP against descent."""
    found: Numbers = {}
    u, v = cloud(40, 5)
    A = _start(2, 5)

    def run(f: TripletObjective, start: Tensor = A, rule: str = "armijo") -> Numbers:
        return _summary(descend(f, start, steps=steps, rule=rule))

    found["alpha"] = {f"α = {a:g}": run(TripletObjective(u, v, margin=a)) for a in (0.0, 0.1, 1.0)}
    found["mu"] = {f"μ = {mu:g}": run(TripletObjective(u, v, mu=mu), rule="local") for mu in (1.0, 0.1, 0.03)}
    f = TripletObjective(u, v, margin=0.0)
    found["n"] = {rule: run(f, rule=rule) for rule in ("safe", "local", "armijo", "exact")}
    found["n"]["1/λmax(S), not safe"] = _unsafe(f, A, steps)
    strict = TripletObjective(u, v, mu=0.3, ridge=0.05)
    found["d"] = {f"d = {d}": run(strict, _start(d, 5)) for d in (1, 2, 5)}
    found["reference"] = psd_reference(strict).value
    found["ccp"] = {"descent": run(strict), "CCP": _summary(ccp(strict, A, steps=steps // 2))}
    found["sgd"] = _stochastic(steps)
    return found


def _unsafe(f: TripletObjective, A: Tensor, steps: int) -> Numbers:
    """The step of a single triplet, 1/λmax(Σ wqB), for n > 1, where it is not safe."""
    values = []
    for _ in range(steps + 1):
        value, gradient = f.value_and_gradient(A)
        values.append(float(value))
        wq = (f.weights * torch.sigmoid(f.products(A)[2] / f.mu))[:, None]
        top = float(torch.linalg.eigvalsh(f.u.T @ (wq * f.u) - f.v.T @ (wq * f.v))[-1])
        if top <= 0 or not np.isfinite(values[-1]) or values[-1] > 1e6:
            break
        A = A - gradient / top
    return {"value": values}


def _stochastic(steps: int) -> Numbers:
    """Full f along stochastic runs of several batch sizes, by passes over the data."""
    u, v = cloud(400, 5, seed=2)
    f, A = TripletObjective(u, v, mu=2.0, ridge=0.05), _start(2, 5)
    full = descend(f, A, steps=steps, rule="safe")
    found: Numbers = {"all 400": {"passes": list(range(len(full) + 1)), "value": full.values}}
    for batch in (8, 40):
        every = 400 // batch
        passes: list[int] = []
        values: list[float] = []

        def note(t: int, at: Tensor, _: object, every: int = every, p: Any = passes, x: Any = values) -> None:
            if t % every == 0:
                p.append(t // every)
                x.append(float(f.value(at)))

        generator = torch.Generator().manual_seed(0)
        descend(f, A, steps=steps * every, batch=batch, generator=generator, decay=0.0, callback=note)
        found[f"batches of {batch}"] = {"passes": passes, "value": values}
    return found


def saddles(steps: int = 120) -> Numbers:
    """The saddles A = 0 and ker B: their negative eigenvalues, and descents that start near them."""
    one = Triplet(np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.2, 0.0]), np.zeros(3))
    kernel = np.array([0.0, 0.0, 2.0])
    found: Numbers = {
        "eigenvalues at 0": np.linalg.eigvalsh(one.hessian()).tolist(),
        "eigenvalues on ker B": np.linalg.eigvalsh(one.at(kernel).hessian()).tolist(),
        "runs": {},
    }
    f = TripletObjective(torch.as_tensor(one.u)[None], torch.as_tensor(one.v)[None], margin=0.0)
    nudge = torch.as_tensor(np.random.default_rng(0).standard_normal((1, 3)))
    for name, center in (("0", torch.zeros(1, 3, dtype=torch.float64)), ("ker B", torch.as_tensor(kernel)[None])):
        for size_of in (1e-2, 1e-4, 1e-8):
            path = descend(f, center + size_of * nudge / size(nudge), steps=steps, rule="safe", tolerance=0.0)
            found["runs"][f"{name} + {size_of:g}"] = path.values
    found["plane"] = _plane(f)
    return found


def _plane(f: TripletObjective) -> Numbers:
    """Values of f on the first two features, and paths that start near 0."""
    axis = np.linspace(-1.6, 1.6, 61)
    grid = [[float(f.value(torch.tensor([[a, b, 0.0]], dtype=torch.float64))) for a in axis] for b in axis]
    paths = []
    for start in ((1.4, 0.02), (-1.4, 0.05), (0.9, -0.01), (0.02, 0.02), (-0.5, -0.3)):
        seen: list[Array] = []
        A = torch.tensor([[*start, 0.0]], dtype=torch.float64)
        for _ in range(150):
            seen.append(A[0, :2].numpy())
            gradient = f.gradient(A)
            A = A - safe_step(f, A, gradient) * gradient
        paths.append(np.array(seen).tolist())
    return {"axis": axis.tolist(), "values": grid, "paths": paths}
