"""The section of RESULTS-decisions.md about `nf.inspect`, from results/inspection.json.

python benchmarks/quality/inspection_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.files import write_text
from nearfar._utils.tables import markdown

HOME = Path(__file__).parents[1]
RESULTS = HOME / "results" / "inspection.json"
PAGE = HOME / "RESULTS-decisions.md"
HEADING = "## Inspection\n"
Rows = list[dict[str, Any]]


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def both(found: Mapping[str, float]) -> str:
    """Precision and recall in percent; a dash if nothing was chosen."""
    return f"{percent(found['precision'])} / {percent(found['recall'])}" if found["n"] else "- / 0.0"


def of_labels(rows: Rows) -> str:
    head = ["set", "planted", "estimated", "suggested class right", "AP", "at .3", "at .5", "at .7", "at .9"]
    head += ["cleanlab: AP", "its list", "mixture on its probabilities, at .5"]
    lines = [
        [row["set"], percent(row["rate"]), percent(row["noise"]), percent(row["suggestion"]), percent(row["AP"])]
        + [both(row[f"at {cut}"]) for cut in (0.3, 0.5, 0.7, 0.9)]
        + [percent(row["cleanlab"]["AP"]), both(row["cleanlab"]["issues"])]
        + [both(row["cleanlab"]["mixture"]["at 0.5"])]
        for row in rows
    ]
    return markdown(head, lines)


def of_bands(bands: Mapping[str, list[float]]) -> str:
    head = ["score from", *bands]
    expected = ["mean score, %", *(percent(total / max(1, n)) for n, _, total in bands.values())]
    right = ["planted, %", *(percent(hits / max(1, n)) for n, hits, _ in bands.values())]
    return markdown(head, [["labels", *(f"{n:,}" for n, _, _ in bands.values())], expected, right])


def of_evidence(rows: Rows) -> str:
    names = list(rows[0]["evidence"])
    lines = []
    for name in names:
        mean = np.mean([row["evidence"][name]["AP"] for row in rows])
        chosen = [row["evidence"][name]["at 0.5"] for row in rows]
        ends = [float(np.mean([each[key] for each in chosen])) for key in ("precision", "recall")]
        lines.append([name, percent(float(mean)), " / ".join(map(percent, ends))])
    return markdown(["evidence", "mean AP", "mean precision / recall at .5"], lines)


def of_copies(rows: Rows) -> str:
    """One table for pictures, one for vectors."""
    tables = []
    for way in ("pictures", "vectors"):
        mine = [row for row in rows if row["by"] == way]
        cuts = [key for key in mine[0] if key.startswith("at ")]
        kinds = list(mine[0]["recall by kind"])
        head = ["set", "copies among samples", *cuts, *(f"recall: {kind}" for kind in kinds)]
        lines = [
            [row["set"], f"{row['planted']} / {row['samples']:,}", *(both(row[cut]) for cut in cuts)]
            + [percent(row["recall by kind"][kind]) for kind in kinds]
            for row in mine
        ]
        tables.append(markdown(head, lines))
    return "\n\n".join(tables)


def of_classes(rows: Rows) -> str:
    cuts = [key for key in rows[0] if key.startswith("at ")]
    head = ["set", "planted", "AP, merged", *(f"merged, {cut}" for cut in cuts), "cut in two"]
    lines = [
        [row["set"], str(row["planted"]), percent(row["AP"])]
        + [both(cell) for cell in (*(row[cut] for cut in cuts), row["like one"]["at 0.0"])]
        for row in rows
    ]
    return markdown(head, lines)


def of_strangers(rows: Rows) -> str:
    cuts = [key for key in rows[0] if key.startswith("at ")]
    lines = [[row["set"], str(row["strangers"]), percent(row["AP"]), *(both(row[cut]) for cut in cuts)] for row in rows]
    return markdown(["set", "strangers", "AP", *cuts], lines)


def of_training(rows: Rows) -> str:
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        for mode in ("clean", "noisy", "ignored", "relabeled"):
            mine = [row for row in rows if (row["set"], row["labels"]) == (name, mode)]
            cells = []
            for score in ("recall@1", "map_at_r"):
                values = [100 * row[score] for row in mine]
                cells.append(f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}")
            lines.append([name, mode, str(len(mine)), *cells])
    return markdown(["set", "labels", "seeds", "recall@1", "MAP@R"], lines)


def section(found: Mapping[str, Any]) -> str:
    """The text of the section."""
    labels, seconds = found["labels"]["sets"], found["seconds"]
    times = [row["seconds"] for row in labels], [row["cleanlab"]["seconds"] for row in labels]
    spent = ", ".join(f"{part} {time:.0f} s" for part, time in seconds.items())
    return f"""{HEADING}
`benchmarks/quality/inspection.py`, [results/inspection.json](results/inspection.json), {found["device"]};
CPU time: {spent}, without the features of the photographs. What
[`nf.inspect`](../docs/guides/inspection.md) finds of what was planted. Cells are **precision / recall** in percent. The sets have errors and duplicates of their own, which count as
false here: precision is a lower bound.

### Wrong labels

A share of the labels is replaced by others, drawn evenly: CUB (classes 1-100, EfficientNet-Lite0 features), Flowers-102
(classes 1-50, the same), CLINC150 (WordLlama vectors). Beside it: confident learning (cleanlab) on the probabilities of
a logistic regression (3 folds) on the same vectors, with its list of label issues. The last column puts these
probabilities into our mixture.

{of_labels(labels)}

The ranking is about as good as that of cleanlab; the decision is better, because the mixture estimates the share of
wrong labels, so that .5 means the same at every share. Scoring takes {min(times[0]):.1f} to {max(times[0]):.1f} s
after the search for neighbors, cleanlab with its regression {min(times[1]):.0f} to {max(times[1]):.0f} s. Over all of
these cases, the score beside the share of planted labels:

{of_bands(found["labels"]["bands"])}

Which evidence: mean over the {len(labels)} cases. Pair weights are those of a worst case over a Kullback-Leibler ball
(exp(s/γ) over the neighbors, in place of votes). They concentrate on few neighbors, and accuse less reliably.

{of_evidence(labels)}

### Copies

Of a twentieth of the photographs (classes 1-50) one copy each: JPEG of quality 25 to 60 at 40 to 80% of the side,
mirrored, a part of 60 to 90% of the area, and combinations. Recall by kind is at the default cut (7 for pictures, 4 for
vectors).

{of_copies(found["copies"])}

By pixels nearly all copies are found. Vectors alone see mirrored pictures, but not strong compression. Flowers-102 has
near duplicates of its own: of the 51 pairs above 7 that were not planted, about 45 show the same shot or plant by eye.

### Classes

A tenth of the classes is merged with another one, and a tenth cut in two at random; `at` is the score (the test
alone: 0).

{of_classes(found["classes"])}

Many intents of CLINC150 have two phrasings, so the test alone lists them; the score tells them from merged classes.
Flowers-102 has too few rows a class for the test of classes that were cut in two.

### Strangers

{of_strangers(found["strangers"])}

**Weak.** The score ranks, but no cut is precise; a group of more strangers than there are neighbors (20) is not seen.
The corrections file therefore keeps strangers.

### Training without what was found

A linear head that begins as the identity, 500 steps of `nearfar train` with its defaults for vectors; 20% of the
training labels wrong; `data.corrections` from `nf.inspect` at its default cut, with all its rows as ignore or as
relabel. Scores on unseen classes, mean ± standard deviation over seeds.

{of_training(found["training"])}

On CLINC150 all that the wrong labels cost comes back. On CUB, where this head hardly learns, they cost little, and
corrections change no more than another seed. Relabeling is no better than ignoring.
"""


def main() -> None:
    """Replace the section, or append it."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition(HEADING)
    rest = after[after.index("\n## ") + 1 :] if "\n## " in after else ""
    text = section(json.loads(RESULTS.read_text(encoding="utf-8")))
    write_text(PAGE, "\n".join(filter(None, [before.rstrip("\n") + "\n", text, rest])))


if __name__ == "__main__":
    main()
