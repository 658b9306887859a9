"""Label noise: R@1 of ten losses when a share of the training labels is permuted at random.

`reproduce(folder)` trains each loss with 0, 10, 20 and 40 percent of wrong labels and several seeds. The chosen samples
exchange labels, so that classes keep their sizes; test labels stay right.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from nearfar.studies import _training_figures as figures
from nearfar.studies._training import Method, Options, TrainingStudy, difference, open_study, order_by_seed, tabulate

__all__ = ["draw", "reproduce"]

STEPS = 1000
SHARES = (0.0, 0.1, 0.2, 0.4)
BATCH, SAMPLES = 128, 4
RECALLS = (1, 2, 4, 8, 10)
LOSSES = {
    "Contrastive": Method({"name": "Contrastive"}),
    "BinomialDeviance": Method({"name": "BinomialDeviance"}),
    "Triplet, semi-hard": Method({"name": "Triplet", "mining": "semihard", "margin": 0.2}),
    "Triplet, hard": Method({"name": "Triplet", "mining": "hard", "margin": 0.2}),
    "MultiSimilarity": Method({"name": "MultiSimilarity"}),
    "SupCon": Method({"name": "SupCon"}),
    "ProxyAnchor": Method({"name": "ProxyAnchor"}),
    "DroTopK": Method({"name": "DroTopK", "k": 160, "pair": "Logistic"}),
    "DroKL": Method({"name": "DroKL", "gamma": 0.1}),
    "DroWorst": Method({"name": "DroWorst"}),
}
CHOOSERS = ("Contrastive", "MultiSimilarity")


def reproduce(folder: str | Path, *, steps: int | None = None, **options: Unpack[Options]) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figure, and write the results.

    Args:
        folder: the folder for noise-DATA.json, noise-DATA.png and the lines of all runs.
        steps: steps of each run; None: 1000.
        **options: `data`, `path`, `seeds`, `jobs`, `quick`, `seconds`, `precision`, `weights`, `network`, `width`,
            `checkpoints` and `changes`, as in `nearfar reproduce`; changes are sections of the configuration that
            replace the usual keys. Each seed has wrong labels of its own, the same for every loss.

    Returns:
        The content of noise-DATA.json.
    """
    with open_study("noise", folder, **options) as study:
        return _run(study, steps)


def _run(study: TrainingStudy, steps: int | None) -> dict[str, Any]:
    steps = steps or (30 if study.quick else STEPS)
    shares = SHARES[::3] if study.quick else SHARES
    losses = dict(list(LOSSES.items())[::4]) if study.quick else LOSSES
    batches = study.per_class(BATCH, SAMPLES)
    rate = study.choose_rate([LOSSES[name] for name in CHOOSERS], batches, steps=steps)
    cells = {
        (name, f"{share:g}"): study.trials(method, batches, steps=steps, rate=rate["rate"], score={"wrong": share})
        for share in shares
        for name, method in losses.items()
    }
    known = study.run(order_by_seed(cells.values()))
    found: dict[str, Any] = {
        "steps": steps,
        "rate": rate,
        "shares": list(shares),
        # smaller than `shares`, because a permutation may keep a label
        "wrong": {f"{line['wrong']:g}": line["wrong_share"] for line in known.values()},
        "table": tabulate(known, cells, study.scores(RECALLS, "map_at_r")),
        "loss_of_recall": {
            name: difference(known, cells[name, f"{shares[0]:g}"], cells[name, f"{shares[-1]:g}"], "recall@1")
            for name in losses
        },
    }
    return study.write(found, known, draw)


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the figure from the content of noise-DATA.json."""
    places = [100 * share for share in found["shares"]]
    series = {name: [each["recall@1"] for each in row.values()] for name, row in found["table"].items()}
    data = found["data"]
    panel = figures.Panel(f"{data}: wrong training labels", places, series, "wrong labels, %")
    figures.curves(folder / f"{figures.stem(found)}.png", panel)
