"""The figures of the study of gradient descent (Jaffe 2020), from the results of its runs."""

from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.figure import figure_file

Numbers = dict[str, Any]
STYLES = {
    "1/M_g printed": ("tab:blue", "-", 1.6),
    "1/M_g true": ("tab:blue", "o", 1.0),
    "1/M_f printed": ("tab:orange", "-", 6.0),
    "1/M_f true": ("black", "--", 1.2),
    "1/(2qλmax), stable form": ("tab:green", "-", 1.6),
}
FLOOR = 1e-30  # drawn for 0 on a logarithmic axis


def surface(found: Numbers, file: Path) -> None:
    """Draw Figure 1: the loss surface, with α varying by row and smoothing by column."""
    axis = np.asarray(found["axis"])
    names = {"0": "no smoothing"}
    with figure_file(file, (9.0, 6.0), 2, 3, subplot_kw={"projection": "3d"}) as axes:
        for ax, (name, values) in zip(axes.ravel(), found["values"].items(), strict=True):
            ax.plot_surface(*np.meshgrid(axis, axis), np.asarray(values), cmap="viridis", rcount=31, ccount=31)
            alpha, mu = (part.split(" ")[1] for part in name.split(", "))
            ax.set_title(f"α = {alpha}, {names.get(mu, f'μ = {mu}')}", fontsize=11, y=0.98)
            ax.set_xlabel("w₁", labelpad=-3)
            ax.set_ylabel("w₂", labelpad=-3)
            ax.set(xticks=(-2, 0, 2), yticks=(-2, 0, 2))
            ax.tick_params(labelsize=7, pad=-2)
            ax.view_init(elev=28, azim=-50)


def appendix(found: Numbers, file: Path) -> None:
    """Draw Figure 2: f, |w| and |∇f|² for the three steps, printed and true, and where the printed one fails."""
    titles = {"value": "f(w)", "norm": "|w|", "gradient": "|∇f(w)|²"}
    with figure_file(file, (15.0, 4.2), 1, 4) as axes:
        for ax, (key, title) in zip(axes[0], titles.items(), strict=False):
            for name, run in found["runs"].items():
                color, line, width = STYLES[name]
                shown = [max(x, FLOOR) for x in run[key]]
                if name.startswith("1/(2q"):
                    shown = shown[:6]  # beyond it f is below 1e-80
                ax.plot(shown, line, color=color, linewidth=width, markersize=4, zorder=8 - width, label=f"η = {name}")
            ax.set_yscale("linear" if key == "norm" else "log")
            ax.set_title(title)
            ax.set_xlabel("iteration")
        axes[0, 0].set_ylim(1e-6, 2)
        axes[0, 2].set_ylim(1e-8, 20)
        axes[0, 1].legend(fontsize=8, loc="center right")
        last = axes[0, 3]
        for name, run in found["counterexample"].items():
            color, line, width = STYLES[name]
            last.plot(run["value"], line, color=color, linewidth=width, markersize=4, label=f"η = {name}")
        last.set_title("f(w) from u = e₁, v = e₂/2, w = (.1, .1)", fontsize=10)
        last.set_xlabel("iteration")
        last.legend(fontsize=8)


def bounds(found: Numbers, file: Path) -> None:
    """Plot the bounds 2.8, 2.9 and 2.10 against the run."""
    with figure_file(file, (13.5, 4.2), 1, 3) as axes:
        first, second, third = axes[0]
        first.plot(found["iterate Frobenius"], "^-", color="tab:red", label="paper: |(I - B/λmax)ᵗ|_F |w¹|")
        first.plot(found["iterate spectral"], "s--", color="tab:orange", label="(1 + |λmin|/λmax)ᵗ |w¹|")
        first.plot(found["iterate"], "o-", color="black", label="|wᵗ|, η = 1/(2qλmax)")
        first.set(title="2.8: the iterate", yscale="log", xlabel="iteration")
        steps = np.arange(1, len(found["fall"]) + 1)
        live = [k for k, fall in enumerate(found["fall"]) if fall > 1e-15]
        second.plot(steps[live], np.asarray(found["fall printed"])[live], "^-", color="tab:red", label="printed bound")
        second.plot(steps[live], np.asarray(found["fall"])[live], "o-", color="black", label="fₜ - fₜ₊₁, η = 1/λmax")
        second.plot(steps[live], np.asarray(found["fall true"])[live], "s--", color="tab:orange", label="true bound")
        second.set(title="2.9: a lower bound on the decrease", yscale="log", xlabel="step")
        values = np.maximum(found["value"], FLOOR)
        third.plot(
            np.maximum(found["value from the sum of b"], FLOOR),
            color="tab:orange",
            linewidth=5,
            alpha=0.6,
            label="log(1 + exp(w¹'Bw¹ + Σ b))",
        )
        third.plot(values, "o-", color="black", markersize=4, label="f(wᵗ), η = 1/λmax")
        third.set(title="2.10: an equality, not a bound", yscale="log", xlabel="iteration")
        for ax in axes[0]:
            ax.legend(fontsize=8)


def extensions(found: Numbers, file: Path) -> None:
    """Draw the figure of the extensions: α > 0, μ ≠ 1, n > 1, d > 1, stochastic steps, CCP."""
    titles = {
        "alpha": "α > 0 (armijo)",
        "mu": "μ ≠ 1 (local safe step)",
        "n": "n = 40 triplets, five rules",
        "d": "d > 1, and the convex minimum",
        "sgd": "stochastic, by passes (safe step of each batch)",
        "ccp": "CCP and descent (armijo), d = 2",
    }
    with figure_file(file, (13.5, 7.6), 2, 3) as axes:
        for ax, (key, title) in zip(axes.ravel(), titles.items(), strict=True):
            for name, run in found[key].items():
                dashed = "not safe" in name
                ax.plot(
                    run.get("passes", range(len(run["value"]))),
                    run["value"],
                    "--" if dashed else "-",
                    color="black" if dashed else None,
                    label=name,
                )
            ax.set(title=title, yscale="log", ylabel="f", xlabel="passes" if key == "sgd" else "iteration")
            ax.minorticks_on()
            if key == "n":
                ax.set_ylim(0.15, 20)
            if key == "d":
                ax.axhline(found["reference"], color="black", linestyle=":", label="psd minimum, d ≥ 5")
            ax.legend(fontsize=9)


def saddles(found: Numbers, file: Path) -> None:
    """Plot the saddles 0 and ker B: the plane around 0, and how long starts near a saddle stay there."""
    plane = found["plane"]
    axis = np.asarray(plane["axis"])
    with figure_file(file, (12.0, 4.8), 1, 2) as axes:
        left, right = axes[0]
        drawn = left.contourf(axis, axis, np.asarray(plane["values"]), levels=24, cmap="viridis")
        left.figure.colorbar(drawn, ax=left, label="f(w)")
        for path in plane["paths"]:
            points = np.asarray(path)
            left.plot(points[:, 0], points[:, 1], color="white", linewidth=1.4)
            left.plot(*points[0], "o", color="tab:orange", markersize=6)
        left.plot(0, 0, "x", color="red", markersize=10, markeredgewidth=2.5)
        low = found["eigenvalues at 0"][0]
        left.set(
            title=f"0 is a strict saddle: lowest eigenvalue {low:.2f}", xlabel="w₁ (along u)", ylabel="w₂ (along v)"
        )
        left.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
        for name, values in found["runs"].items():
            right.plot(values, linestyle="--" if name.startswith("ker") else "-", label=f"start: {name}")
        right.set(title="starts beside a saddle leave it (safe step)", xlabel="iteration", ylabel="f(w)")
        right.legend(fontsize=9)


def rivals(found: Numbers, file: Path) -> None:
    """Plot accuracies with 95% intervals over splits."""
    with figure_file(file, (4.6 * len(found), 3.6), 1, len(found), sharey=True) as axes:
        for ax, (name, methods) in zip(axes[0], found.items(), strict=True):
            for place, (method, score) in enumerate(methods.items()):
                color = "tab:orange" if "triplet" in method else "tab:green" if "contrastive" in method else "tab:gray"
                ax.errorbar(score["mean"], place, xerr=score["half"], fmt="o", color=color, capsize=4)
                ax.annotate(
                    f"{score['mean']:.3f}",
                    (score["mean"], place),
                    xytext=(0, 7),
                    fontsize=8,
                    textcoords="offset points",
                    ha="center",
                )
            ax.set(title=name, xlabel="test accuracy", yticks=range(len(methods)), ylim=(-0.5, len(methods) - 0.3))
            ax.set_yticklabels(methods)
            ax.grid(axis="x", alpha=0.3)
