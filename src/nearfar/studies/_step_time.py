"""Figure 3 of Qi et al. 2020: the time of a step of each method against the batch size, at d = 1,024."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nearfar import losses, miners, pairs, similarity
from nearfar.bench import Patience
from nearfar.bench._subjects import Step
from nearfar.bench._timing import LIMIT, threads, time_in_turns
from nearfar.studies import _training_figures as figures

WIDTH, EACH = 1024, 5


def losses_of(size: int) -> dict[str, Step]:
    """The methods of the figure for a batch size, with the margin loss, K = 2B and γ = .1."""
    hinge: dict[str, Any] = {"pair": pairs.Hinge(), "similarity": similarity.Cosine()}
    return {
        "DRO-TopK": losses.DroTopK(k=2 * size),
        "DRO-TopK-PN": losses.DroTopKPN(k=2 * size),
        "DRO-KL": losses.DroKL(gamma=0.1, samples=4 * size),
        "semi-hard": losses.BinomialDeviance(miner=miners.SemiHard(), **hinge),
        "distance-weighted": losses.BinomialDeviance(miner=miners.DistanceWeighted(), **hinge),
        "MS": losses.MultiSimilarity(),
        "LS": losses.GeneralizedLifted.as_in_paper(),
    }


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows [size, 1024] that need a gradient, and their labels: five rows a class."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(size) // EACH)[torch.randperm(size, generator=generator)]
    return torch.randn(size, WIDTH, generator=generator).requires_grad_(), labels


def measure(sizes: Sequence[int], rounds: int = 9) -> list[dict[str, Any]]:
    """For each batch size the median milliseconds of a step of each method; they take turns, on one thread."""
    found = []
    with threads(1):
        for size in sizes:
            timed = time_in_turns(losses_of(size), *batch(size), Patience(rounds, 60))
            ms = {name: 1e3 * seconds for name, seconds in timed.seconds.items() if name != LIMIT}
            found.append({"rows": size, "rounds": timed.rounds, "ms": ms})
    return found


def draw(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the figure from the content of dro-DATA.json."""
    series = {
        name: [{"values": [each["ms"][name]], "mean": each["ms"][name], "half": None} for each in found]
        for name in found[0]["ms"]
    }
    sizes = [each["rows"] for each in found]
    figures.curves(file, figures.Panel(f"one thread, d = {WIDTH}", sizes, series, "B", ylabel="ms, forward + backward"))
