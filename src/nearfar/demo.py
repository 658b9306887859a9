"""The demonstration: a linear head learns to retrieve handwritten digits, and one picture shows what it learnt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from nearfar.losses import DroTopK
from nearfar.pairs import Logistic
from nearfar.similarity import unit


def recall_at_1(embeddings: Tensor, labels: Tensor) -> float:
    """Share of rows whose nearest other row (cosine) has the same label, in per cent."""
    x = unit(embeddings.detach())
    scores = (x @ x.T).fill_diagonal_(-torch.inf)
    return 100 * (labels[scores.argmax(dim=1)] == labels).float().mean().item()


def run(folder: Path, *, seconds: float = 10.0, width: int = 4, seed: int = 0, console: Console | None = None) -> Path:
    """Train for so many seconds, print R@1 on held-out digits before and after, save the picture; gives its path."""
    console = console or Console()
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = _digits(seed)
    head = torch.nn.Linear(train_x.shape[1], width)
    before = head(test_x).detach()
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"digits: {len(train_x)} to learn from, {len(test_x)} held out; a linear head to {width} dimensions")
    _train(head, train_x, train_y, seconds, console)
    after = head(test_x).detach()
    picture = folder / "digits.png"
    _draw(before, after, test_y, picture)
    console.print(f"picture: {picture}")
    console.print(f"R@1 before: {recall_at_1(before, test_y):.1f}", highlight=False)
    console.print(f"R@1 after: {recall_at_1(after, test_y):.1f}", highlight=False)
    return picture


def _digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels, two thirds to learn from and one third held out."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    cut = 2 * len(x) // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def _train(head: torch.nn.Linear, x: Tensor, y: Tensor, seconds: float, console: Console) -> None:
    loss = DroTopK(k=160, pair=Logistic())
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    start = time.monotonic()
    step = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=seconds, state="")
        while (spent := time.monotonic() - start) < seconds:
            batch = torch.randint(len(x), (128,))
            value = loss(head(x[batch]), y[batch])
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            step += 1
            progress.update(task, completed=spent, state=f"step {step}  loss {value.item():.3f}")


def _draw(before: Tensor, after: Tensor, labels: Tensor, path: Path) -> None:
    """Two maps of the held-out digits, written to a temporary name first so that a failure leaves no half picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, x) in enumerate((("before", before), ("after", after)), start=1):
        axes = figure.add_subplot(1, 2, place)
        centred = unit(x) - unit(x).mean(dim=0)
        flat = (centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T).numpy()
        for digit in range(10):
            chosen = flat[(labels == digit).numpy()]
            axes.scatter(chosen[:, 0], chosen[:, 1], s=0)
            for right, up in chosen:
                axes.text(right, up, str(digit), color=f"C{digit}", fontsize=8, ha="center", va="center")
        axes.set_title(f"{title}: R@1 {recall_at_1(x, labels):.1f}%")
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.suptitle("Held-out digits on the unit sphere, first two principal axes")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)
