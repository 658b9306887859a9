"""Hard negative mining and isometric approximation (Xu et al. 2022): its figures, and tests of its claims.

`reproduce(folder)` draws Figures 1 to 6 and writes isometry.json: the toy set with H, d_haus and d_iso, the collapse at
N = 20 in the plane, collapse against N and n, and gradient descent on free points. docs/papers/xu-2022.md discusses
them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar import geometry
from nearfar._utils.files import write_text
from nearfar.geometry.constraints import Choice, Program, descend, settle
from nearfar.geometry.repair import class_means
from nearfar.studies import _isometry_figures as figures

__all__ = ["reproduce"]

TOY = ((0.0, 0.0), (2.0, 0.3), (0.8, 1.5), (1.1, 0.2), (2.6, 1.6))
TOY_LABELS = (0, 0, 0, 1, 1)
COUNTS = (6, 12, 20, 30)
WIDTHS = (1, 2, 4, 8, 16, 64, 256, 1024)
SOLVED = {6: (1, 2, 4, 8), 12: (1, 2, 4), 20: (1, 2), 30: (2,)}
"""For each number of rows, the dimensions for which the nearest separated map is computed, which takes minutes."""


def reproduce(folder: str | Path, *, quick: bool = False) -> dict[str, Any]:
    """Run the study, draw its figures, and write its results.

    Args:
        folder: the folder for isometry-*.png and isometry.json; created if missing.
        quick: one seed, few sizes and few steps: seconds instead of minutes.

    Returns:
        The content of isometry.json.
    """
    folder = Path(folder)
    found: dict[str, Any] = {
        "toy": toy(),
        "collapse": collapse(8 if quick else 20, 1 if quick else 4),
        "shrink": shrink_factors(2 if quick else 20, COUNTS[:2] if quick else COUNTS, WIDTHS[:4] if quick else WIDTHS),
        "moved": spread_ratios(1 if quick else 3, {6: (2,)} if quick else SOLVED),
        "descent": run_descents(1 if quick else 3, (8,) if quick else (8, 20, 40), 50 if quick else 1500),
    }
    for name in ("toy", "collapse", "shrink", "descent"):
        getattr(figures, name)(found[name], folder / f"isometry-{name}.png")
    write_text(folder / "isometry.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def separated() -> dict[str, Any]:
    """Figure 1: two separated classes, and an anchor, a positive and a negative."""
    x = torch.tensor([(0.0, 0.0), (0.9, 0.4), (0.3, 1.0), (3.2, 1.2), (3.7, 0.4)], dtype=torch.float64)
    hardness = geometry.hardness(x, torch.tensor(TOY_LABELS))
    return {"f": x.tolist(), "labels": list(TOY_LABELS), "triplet": [2, 0, 3], "hardness": hardness}


def toy(starts: int = 12) -> dict[str, Any]:
    """Figures 1 to 5: separated classes; the five points, their nearest separated maps, and the hardest triplet."""
    x, y = torch.tensor(TOY, dtype=torch.float64), torch.tensor(TOY_LABELS)
    both = geometry.constants(x, y, starts=starts)
    iso, haus = both.iso, both.haus
    hard = geometry.hardest_triplet(x, y)
    if hard is None:
        raise RuntimeError("isometry: the toy set has triplets.")
    gap = torch.cdist(x, x) - torch.cdist(iso.map, iso.map)
    nearest = settle_within(x, y, haus)
    return {
        "separated": separated(),
        "f": x.tolist(),
        "labels": y.tolist(),
        "hardness": hard.value,
        "triplet": [hard.anchor, hard.positive, hard.negative],
        "d_haus": haus.upper,
        "haus_map": nearest.tolist(),
        "longest": [i for i in range(5) if float((nearest - x)[i].norm()) > 0.995 * haus.upper],
        "d_iso": iso.upper,
        "iso_map": geometry.near_isometry(iso.map, x).move(iso.map).tolist(),
        "gaps": {f"{i}{j}": float(gap[i, j]) for i in range(5) for j in range(i + 1, 5)},
        "binding": binding_pairs(x, y, iso),
        "ratio": both.observed,
        "diameter_over_thickness": both.ratio,
    }


def settle_within(
    x: Tensor, y: Tensor, found: geometry.Separation, choose: Choice | None = None, slack: float = 1e-3
) -> Tensor:
    """Of the separated maps within (1 + slack) d_haus, the one that minimizes `choose`; None: the movement in total."""
    scale = float(torch.cdist(x, x).max())
    program = Program("haus", (x / scale).numpy(), y.numpy())
    ended = settle(program, (found.map / scale).numpy(), (1 + slack) * found.upper / scale, choose)
    moved = geometry.repair(torch.from_numpy(ended) * scale, y).map
    return moved if float((moved - x).norm(dim=1).max()) <= (1 + 10 * slack) * found.upper else found.map


def binding_pairs(x: Tensor, y: Tensor, iso: geometry.Separation) -> list[str]:
    """The pairs whose distance differs by d_iso in every nearest map, because f*_iso is not unique.

    Of each pair that does so in the map that was found, the difference is minimized over all nearest maps.
    """
    program, start = Program("iso", x.numpy(), y.numpy()), iso.map.numpy()
    apart = program.differences(start)[0]
    found = []
    for pair in np.flatnonzero(abs(apart) > 0.999 * iso.upper).tolist():
        sign = float(np.sign(apart[pair]))

        def difference(g: Any, pair: int = pair, sign: float = sign) -> tuple[float, Any]:
            apart, slopes = program.differences(g)
            return sign * apart[pair], sign * slopes[pair].reshape(g.shape)

        least = settle(program, start, (1 + 1e-5) * iso.upper, difference)
        if difference(least)[0] > 0.999 * iso.upper:
            found.append(f"{program.parts['i'][pair]}{program.parts['j'][pair]}")
    return found


def draw_rows(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gaussian rows with two balanced classes, independent of the rows."""
    noise = torch.Generator().manual_seed(1000 * rows + seed)
    return torch.randn(rows, width, generator=noise, dtype=torch.float64), torch.arange(rows) % 2


def collapse(rows: int, starts: int) -> dict[str, Any]:
    """Figure 6: of the nearest separated maps of many random rows in the plane, those with least and most spread."""
    x, y = draw_rows(rows, 2, 0)
    haus = geometry.hausdorff_distance(x, y, starts=starts)
    ends = {name: {"map": g.tolist(), **_kept_spread(x, g, y)} for name, g in extreme_spreads(x, y, haus).items()}
    kept = keep_spread(x, y, torch.tensor(ends["largest"]["map"], dtype=torch.float64))
    restricted = {"d_haus": float((kept - x).norm(dim=1).max()), **_kept_spread(x, kept, y)}
    return {"f": x.tolist(), "labels": y.tolist(), "d_haus": haus.upper, **ends, "restricted": restricted}


def extreme_spreads(x: Tensor, y: Tensor, haus: geometry.Separation) -> dict[str, Tensor]:
    """Of the maps within 1.001 d_haus, one with the least and one with the largest spread."""
    return {name: settle_within(x, y, haus, _spread(sign)) for name, sign in (("least", 1.0), ("largest", -1.0))}


def keep_spread(x: Tensor, y: Tensor, start: Tensor) -> Tensor:
    """A nearest map of the separated ones that have at least the spread of x, by SLSQP from `start`."""
    scale = float(torch.cdist(x, x).max())
    program = Program("haus", (x / scale).numpy(), y.numpy())
    whole = _spread(1.0)(program.f)[0] * 1.0001  # the repair may take a little

    def keep(rows: Any) -> tuple[float, Any]:
        found, gradient = _spread(1.0)(rows)
        return found - whole, gradient

    return geometry.repair(torch.from_numpy(descend(program, (start / scale).numpy(), keep)) * scale, y).map


def _spread(sign: float) -> Choice:
    """The sum of squared distances from the mean with its gradient, times a sign."""

    def choose(rows: Any) -> tuple[float, Any]:
        off = rows - rows.mean(axis=0)
        return sign * (off**2).sum(), 2 * sign * off

    return choose


def shrink_factors(seeds: int, counts: tuple[int, ...], widths: tuple[int, ...]) -> dict[str, Any]:
    """s* and H / diameter of random rows: the mean over seeds, for N rows (outer) in n dimensions (inner)."""
    table: dict[str, Any] = {}
    for rows in counts:
        table[str(rows)] = {}
        for width in widths:
            found = []
            for seed in range(seeds):
                x, y = draw_rows(rows, width, seed)
                found.append((geometry.repair(x, y).shrink, geometry.hardness(x, y) / float(torch.cdist(x, x).max())))
            shrink, hard = np.mean(found, axis=0)
            table[str(rows)][str(width)] = {"shrink": float(shrink), "hardness": float(hard)}
    return {"seeds": seeds, "table": table}


def spread_ratios(seeds: int, sizes: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    """The least and the largest share of the spread that a nearest separated map keeps, and those within classes."""
    table: dict[str, Any] = {}
    for rows, widths in sizes.items():
        table[str(rows)] = {}
        for width in widths:
            found = []
            for seed in range(seeds):
                x, y = draw_rows(rows, width, seed)
                ends = extreme_spreads(x, y, geometry.hausdorff_distance(x, y, starts=2))
                found.append({name: _kept_spread(x, g, y) for name, g in ends.items()})
            table[str(rows)][str(width)] = {
                name: {key: float(np.mean([each[name][key] for each in found])) for key in ("total", "within")}
                for name in ("least", "largest")
            }
    return {"seeds": seeds, "table": table}


def _kept_spread(x: Tensor, g: Tensor, y: Tensor) -> dict[str, float]:
    def rms(rows: Tensor) -> float:
        return float((rows**2).sum(dim=1).mean().sqrt())

    inside = rms(g - class_means(g, y)[y]) / rms(x - class_means(x, y)[y])
    return {"total": rms(g - g.mean(dim=0)) / rms(x - x.mean(dim=0)), "within": inside}


def run_descents(seeds: int, counts: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Gradient descent on free rows: the share of the spread that is left, and the share of runs that reached zero.

    Learning rate .05 for the mean over anchors; .005 for the hardest triplet, with ten times the steps.
    """
    losses = {"hardest, α = 0": (True, 0.0), "batch-hard, α = 0": (False, 0.0), "batch-hard, α = .2": (False, 0.2)}
    table: dict[str, Any] = {}
    for name, (hardest, margin) in losses.items():
        table[name] = {}
        for rows in counts:
            cells = {}
            for width in (2, 8, 64):
                ends = [_descend(*draw_rows(rows, width, seed), hardest, margin, steps) for seed in range(seeds)]
                total, zero = np.mean(ends, axis=0)
                cells[str(width)] = {"total": float(total), "zero": float(zero)}
            table[name][str(rows)] = cells
    return {"seeds": seeds, "steps": steps, "table": table}


def _descend(x: Tensor, y: Tensor, hardest: bool, margin: float, steps: int) -> tuple[float, bool]:
    """The share of the spread that is left, and whether the loss became 0."""
    start, zero = x.clone(), False
    x.requires_grad_()
    positive = y[:, None] == y[None, :]
    for _ in range(10 * steps if hardest else steps):
        square = ((x[:, None] - x[None]) ** 2).sum(dim=2)
        apart = (square + 1e-18).sqrt()
        far = apart.masked_fill(~positive, -1.0).amax(dim=1)
        near = apart.masked_fill(positive, torch.inf).amin(dim=1)
        each = (far - near + margin).clamp(min=0)
        loss = each.max() if hardest else each.mean()
        zero = float(loss.detach()) == 0
        if zero:
            break
        (slope,) = torch.autograd.grad(loss, x)
        with torch.no_grad():
            x -= (0.005 if hardest else 0.05) * slope
    return _kept_spread(start, x.detach(), y)["total"], zero
