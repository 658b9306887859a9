"""Write the tables and figures of docs/papers/beyond/floor.md and ladder.md from the results of floor.py and ladder.py.

python benchmarks/quality/floor_page.py
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from beyond_page import RESULTS, ROOT, fill, with_half

from nearfar._utils.figure import figure_file
from nearfar._utils.files import write_text
from nearfar.plot import style
from nearfar.studies._descent_rivals import interval

PAGES, IMAGES = ROOT / "docs" / "papers" / "beyond", ROOT / "docs" / "images"
ARMS = ("plain", "floor", "annealed", "semi-hard")
Runs = list[dict[str, Any]]


def cell(runs: Runs, key: str, digits: int = 1) -> str:
    """Mean ± half a 95% t-interval; the value alone of one run."""
    values = [run[key] for run in runs]
    return with_half(interval(values), digits) if len(values) > 1 else f"{values[0]:.{digits}f}" if values else "-"


def verdict(first: Runs, second: Runs, key: str) -> str:
    """The difference of runs of equal seeds, and whether its 95% interval leaves out zero."""
    pairs = [(a[key], b[key]) for a in first for b in second if a["seed"] == b["seed"]]
    if len(pairs) < 2:
        return "-"
    found = interval([a - b for a, b in pairs])
    word = "cannot tell" if abs(found["mean"]) <= found["half"] else "better" if found["mean"] > 0 else "worse"
    return f"{found['mean']:+.1f} ± {found['half']:.1f} ({word})"


def floor_lines(runs: Runs) -> list[str]:
    """R@1 of all arms; least V, the bound and the largest value of the runs with a floor."""
    settings = list(dict.fromkeys(run["setting"] for run in runs))
    few = {(s, a): [run for run in runs if (run["setting"], run["arm"]) == (s, a)] for s in settings for a in ARMS}
    first = ["| R@1 on unseen classes | untrained | plain | floor | annealed | semi-hard | floor less the better one |"]
    second = ["| with the floor | least V | least V, plain | bound of F₀ | F rises above F₀ | bound of the largest F |"]
    first.append("|---|--:|--:|--:|--:|--:|--:|")
    second.append("|---|--:|--:|--:|--:|--:|")
    for s in settings:
        arms = {a: few[s, a] for a in ARMS}
        best = max(ARMS[2:], key=lambda a: float(np.mean([run["recall@1"] for run in arms[a] or [{"recall@1": 0}]])))
        cells = [cell(arms["floor"], "untrained"), *(cell(arms[a], "recall@1") for a in ARMS)]
        first.append(f"| {s} | {' | '.join(cells)} | {verdict(arms['floor'], arms[best], 'recall@1')} |")
        rises = sum(run["largest F"] > run["first F"] for run in arms["floor"])
        least = [f"{min(run['least V'] for run in arms[a]):.4f}" for a in ("floor", "plain")]
        bounds = [f"{min(run[key] for run in arms['floor']):.3f}" for key in ("bound", "bound of the largest F")]
        second.append(
            f"| {s} | {' | '.join(least)} | {bounds[0]} | {rises} of {len(arms['floor'])} runs | {bounds[1]} |"
        )
    return [*first, "", *second]


def draw_floor(runs: Runs) -> None:
    """V of the batches along the runs, plain and with a floor, and the bound of the first value."""
    settings = list(dict.fromkeys(run["setting"] for run in runs))
    rows = -(-len(settings) // 3)
    with figure_file(IMAGES / "beyond-floor.png", (8.6, 2.6 * rows), rows, 3, sharex=True, sharey=True) as axes:
        for ax, setting in zip(np.ravel(axes), settings, strict=False):
            for arm, color in zip(("plain", "floor"), style.COLORS, strict=False):
                for run in runs:
                    if (run["setting"], run["arm"]) != (setting, arm):
                        continue
                    steps = 5 * np.arange(len(run["V"])) + 1
                    ax.plot(steps, run["V"], color=color, lw=0.8, label=arm if not run["seed"] else None)
                    if arm == "floor":
                        ax.axhline(run["bound"], color=style.GRAY, lw=0.8, ls="--",
                                   label="bound of F₀" if not run["seed"] else None)  # fmt: skip
            ax.set_title(setting, fontsize=8)
            ax.set(xlabel="step", ylabel="V", ylim=(0, 1))
            style.plain(ax)
        for ax in np.ravel(axes)[len(settings) :]:
            ax.set_axis_off()
        np.ravel(axes)[len(settings) - 1].legend(fontsize=7, frameon=False)


def ladder_lines(runs: Runs) -> list[str]:
    """Scores of CUB by base loss and arm, with differences to the plain loss; Spearman's correlation on STS-B."""
    keys = ("R@1", "R@1 of groups", "nDCG@20")
    lines = [f"| CUB, test classes | {' | '.join(f'{key} | less classes' for key in keys)} |", f"|---|{'--:|' * 6}"]
    for base in dict.fromkeys(run["base"] for run in runs if run["base"] != "STS-B"):
        of = {a: [r for r in runs if (r["base"], r["arm"]) == (base, a)] for a in {r["arm"] for r in runs}}
        for arm in dict.fromkeys(run["arm"] for run in runs if run["base"] == base):
            plain = of["classes"] if arm not in ("classes", "frozen") else []
            cells = [f"{cell(of[arm], key)} | {verdict(of[arm], plain, key)}" for key in keys]
            name = base if arm == "frozen" else f"{base}, {arm}"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    text = [run for run in runs if run["base"] == "STS-B"]
    of = {arm: [run for run in text if run["arm"] == arm] for arm in dict.fromkeys(run["arm"] for run in text)}
    lines += ["", "| STS-B, test pairs | Spearman, % | less one rung | less CoSENT |", "|---|--:|--:|--:|"]
    for arm, mine in of.items():
        rest = [
            verdict(mine, of.get(other, []), "Spearman") if arm != other else "-" for other in ("one rung, 3", "CoSENT")
        ]
        lines.append(f"| {arm} | {cell(mine, 'Spearman', 2)} | {' | '.join(rest)} |")
    return lines


def draw_ladder(runs: Runs) -> None:
    """R@1 of classes against R@1 of groups, mean over seeds, for groups of few and of most training classes."""
    titles = {"": "other groups in training", ", shared groups": "the same groups in training"}
    with figure_file(IMAGES / "beyond-ladder.png", (8.0, 3.2), 1, 2) as axes:
        for ax, (end, title) in zip(axes[0], titles.items(), strict=True):
            for base, color in (("frozen", style.GRAY), ("MultiSimilarity", style.COLORS[0])):
                mine = [run for run in runs if run["base"] == base + end]
                for arm in dict.fromkeys(run["arm"] for run in mine):
                    few = [run for run in mine if run["arm"] == arm]
                    place = [float(np.mean([run[key] for run in few])) for key in ("R@1", "R@1 of groups")]
                    ax.plot(*place, "o", color=color, ms=4)
                    ax.annotate(arm, place, fontsize=7, xytext=(4, 3), textcoords="offset points")
            ax.set(title=title, xlabel="R@1 of classes, %", ylabel="R@1 of groups, %")
            ax.margins(0.2)
            style.plain(ax)


def main() -> None:
    for name, lines, draw in (("floor", floor_lines, draw_floor), ("ladder", ladder_lines, draw_ladder)):
        runs = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]
        page = PAGES / f"{name}.md"
        write_text(page, fill(page.read_text(encoding="utf-8"), name, lines(runs)))
        draw(runs)


if __name__ == "__main__":
    main()
