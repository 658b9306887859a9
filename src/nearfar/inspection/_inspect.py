"""`inspect`: look through a data set for copies, wrong labels, odd classes and strangers."""

import csv
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nearfar._utils.checks import check_choice, check_number, check_seed, check_whole
from nearfar._utils.files import write_text
from nearfar._utils.progress import Watch
from nearfar.data._samples import Transform
from nearfar.evaluation import Neighbors, neighbors
from nearfar.inspection._classes import classes_like_two, pairs_like_one
from nearfar.inspection._copies import KINDS, Copies, find_copies
from nearfar.inspection._labels import Doubts, doubt_labels
from nearfar.inspection._samples import Material, read
from nearfar.similarity import unit

Action = Literal["keep", "ignore", "relabel"]
CUTS = {"wrong label": 0.5, "copy": 7.0, "copy of a vector": 4.0, "class like two": 1.3, "stranger": 2.0}
"""The score from which each kind is listed; benchmarks/RESULTS-decisions.md gives the precision at several."""
COLUMNS = ("name", "side", "action", "label", "kind", "score", "given", "note", "evidence")
SHOWN = 4  # examples of a class
ACCUSERS = 5  # neighbors named with a finding


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: "wrong label", "copy", "copy across sides" (such as train and test), "copy with another label",
            "stranger", "unreadable", "class like two" or "classes like one".
        rows: rows of the inspection, the accused one first, then the evidence: the neighbors that accuse it, or the
            sample that it copies; for classes, examples of both parts.
        score: see `inspect`; larger = more certain.
        action: what the corrections file says about the accused row.
        label: the class that a wrong label should be; of class findings, the names of the classes.
        note: how a copy was made.
        name: the name of a sample that has no row because it is unreadable.
    """

    kind: str
    rows: tuple[int, ...]
    score: float
    action: Action = "keep"
    label: str = ""
    note: str = ""
    name: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `inspect` found.

    Attributes:
        findings: by kind, the highest score first.
        material: the vectors, names, labels and pictures that were inspected; rows are its rows.
        wrong: [n] the probability that the label is wrong, of every row.
        suggested: [n] the most probable other class, a place in `material.classes`.
        noise: the share of wrong labels, as the mixture estimates it.
        far: [n] the score as a stranger.
        copies: candidate pairs with their scores.
    """

    findings: tuple[Finding, ...]
    material: Material = field(repr=False)
    wrong: Tensor = field(repr=False)
    suggested: Tensor = field(repr=False)
    noise: float
    far: Tensor = field(repr=False)
    copies: Copies = field(repr=False)

    def __repr__(self) -> str:
        return self.text()

    def of(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(each for each in self.findings if each.kind == kind)

    def counts(self) -> dict[str, int]:
        """The number of findings of each kind that occurs."""
        kinds = [each.kind for each in self.findings]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def given(self, row: int) -> str:
        """The name of the class that a row has; "" without labels."""
        return "" if self.material.y is None else self.material.classes[int(self.material.y[row])]

    def text(self) -> str:
        """The counts, and the estimated share of wrong labels, as lines."""
        m = self.material
        lines = [f"{len(m.names):,} samples, {len(m.classes):,} classes"]
        lines += [f"{count:,} x {kind}" for kind, count in self.counts().items()] or ["nothing found"]
        if m.y is not None and len(m.classes) > 1:
            lines.append(f"estimated share of wrong labels: {100 * self.noise:.1f}%")
        return "\n".join(lines)

    def corrections(self) -> str:
        """The findings about samples as CSV, which `data.corrections` of `nearfar train` reads; edit `action`."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for each in self.findings:
            if each.kind in ("class like two", "classes like one"):
                continue
            name, side, given = each.name or self._row(each.rows[0])
            evidence = "; ".join(self.material.names[row] for row in each.rows[1:])
            label = each.label if each.action == "relabel" else ""
            writer.writerow(
                (name, side, each.action, label, each.kind, f"{each.score:.4g}", given, each.note, evidence)
            )
        return out.getvalue()

    def _row(self, row: int) -> tuple[str, str, str]:
        return self.material.names[row], self.material.sides[row], self.given(row)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `corrections` to a CSV file, completely or not at all."""
        write_text(Path(path), self.corrections())
        return Path(path)


def inspect(
    source: Any,
    labels: Any = None,
    *,
    inputs: str | None = None,
    model: Any = None,
    transform: Transform | None = None,
    near: int = 20,
    cuts: Mapping[str, float] | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> Inspection:
    """Look through a data set for copies, wrong labels, classes that are two or one, and strangers.

    Scores, each with its measured precision in benchmarks/RESULTS-decisions.md:

    - wrong label: the probability that the label is wrong, `nearfar.inspection._labels`.
    - copies: how unlikely it is that two samples are so alike by chance, as -log10 of a probability, up to 16. Pictures
      are compared by their pixels, also mirrored and in parts; else vectors.
    - class like two: the distance of its two parts, 1 = that of neighboring classes. Classes like one: how far the
      nearest neighbors of two classes mix, 1 = as by chance. Both pass a test with a false-discovery rate of 5%.
    - stranger: the mean distance to the `near` neighbors, in robust standard deviations above the median; a group of
      more strangers than that is not seen.

    Memory grows with n: two copies of the vectors, the neighbors, and 3 KB per picture; never with n².

    Args:
        source: a path (a data set of `nf.data.open_data`, vectors, "glyphs"), a `DataSet`, `Samples`, `Vectors`, or
            vectors [n, d]. Pictures are embedded by `model`, else by the pretrained network lite0 if it is installed
            and they are photographs, else by their pixels.
        labels: [n] integers for vectors [n, d]; for a path, `labels` of `open_data`.
        inputs: for a path, `inputs` of `open_data`.
        model: a function from a batch to vectors.
        transform: from a sample (and a generator) to the input of `model`.
        near: number of neighbors of each row; at most half of the rows, since among all of them each class has one
            row less for its own rows, which alone would accuse every label.
        cuts: other scores than `CUTS` from which a kind is listed.
        seed: seed of samples and splits.
        watch: called as watch(what, done, total) during the work.

    >>> x = torch.eye(2).repeat_interleave(8, 0) + torch.linspace(0, 0.3, 32).reshape(16, 2)
    >>> found = inspect(x, [0] * 7 + [1] * 9)
    >>> found.of("wrong label")[0].rows[0]
    7
    """
    check_seed("inspect", seed)
    check_whole("inspect", "near", near)
    for kind, cut in (cuts or {}).items():
        check_choice("inspect", "cuts", kind, CUTS)
        check_number("inspect", f"cuts[{kind!r}]", cut)
    limits = {**CUTS, **(cuts or {})}
    tell: Watch = watch or (lambda what, done, total: None)
    material = read(source, labels, model, transform, inputs, watch)
    rows = len(material.x)
    if rows < 2:
        raise ValueError(f"inspect: at least two readable samples are needed, but {rows} came.")
    tell("searching neighbors", 0, 0)
    x = unit(material.x.float())
    z = unit(x - x.mean(dim=0))
    found = neighbors(x, k=min(near, rows // 2))
    tell("comparing candidates for copies", 0, 0)
    copies = find_copies(x, found, material.gray)
    tell("looking at labels and classes", 0, 0)
    y = material.y
    doubts = Doubts(torch.zeros(rows), torch.zeros(rows, dtype=torch.long), 0.0)
    findings: list[Finding] = []
    if y is not None:
        doubts = doubt_labels(z, y, found, seed=seed)
        findings += _wrong_labels(material, y, doubts, found, limits["wrong label"])
    findings += _copies(material, copies, doubts, limits["copy of a vector" if material.gray is None else "copy"])
    if y is not None:
        findings += _classes(material, z, y, found, limits["class like two"], seed)
    far = _distance(found)
    for row in (far >= limits["stranger"]).nonzero().flatten().tolist():
        findings.append(Finding("stranger", (row, *found.places[row, :ACCUSERS].tolist()), float(far[row])))
    findings += [Finding("unreadable", (), 1.0, "ignore", name=name) for name in material.unreadable]
    order = list(dict.fromkeys(each.kind for each in findings))
    findings.sort(key=lambda each: (order.index(each.kind), -each.score, each.rows))
    return Inspection(tuple(findings), material, doubts.score, doubts.label, doubts.noise, far, copies)


def _wrong_labels(material: Material, y: Tensor, doubts: Doubts, near: Neighbors, cut: float) -> Iterator[Finding]:
    """Rows whose label is probably wrong, with their nearest neighbors of the suggested class."""
    for row in (doubts.score >= cut).nonzero().flatten().tolist():
        label = int(doubts.label[row])
        places = near.places[row]
        accusers = places[y[places] == label][:ACCUSERS].tolist()
        yield Finding("wrong label", (row, *accusers), float(doubts.score[row]), "relabel", material.classes[label])


def _copies(material: Material, copies: Copies, doubts: Doubts, cut: float) -> Iterator[Finding]:
    """Pairs of copies. The accused is the one in train, else the one whose label is less probable, else the later.

    This is one order for all pairs, so that of several copies of a sample one is never accused.
    """

    def last(row: int) -> tuple[bool, float, int]:
        return material.sides[row] != "train", -round(float(doubts.score[row]), 2), -row

    y = [0] * len(material.names) if material.y is None else material.y.tolist()
    chosen = (copies.score >= cut).nonzero().flatten().tolist()
    for place in chosen:
        pair = sorted(copies.rows[place].tolist(), key=last)
        sides = [material.sides[row] for row in pair]
        kind = "copy across sides" if sides[0] != sides[1] else "copy"
        if y[pair[0]] != y[pair[1]]:
            kind = "copy with another label"
        note = "" if material.gray is None else KINDS[int(copies.kind[place])]
        yield Finding(kind, tuple(pair), float(copies.score[place]), "ignore", note=note)


def _classes(material: Material, z: Tensor, y: Tensor, near: Neighbors, cut: float, seed: int) -> Iterator[Finding]:
    """Classes that look like two, and pairs that look like one, with examples of both parts."""
    for label, score, side in classes_like_two(z, y, cut=cut, seed=seed):
        rows = (y == label).nonzero().flatten()
        examples = [row for part in (0, 1) for row in rows[side == part][:SHOWN].tolist()]
        yield Finding("class like two", tuple(examples), score, label=material.classes[label])
    for a, b, score in pairs_like_one(z, y, near, seed=seed):
        examples = [row for label in (a, b) for row in (y == label).nonzero().flatten()[:SHOWN].tolist()]
        names = f"{material.classes[a]}, {material.classes[b]}"
        yield Finding("classes like one", tuple(examples), score, label=names)


def _distance(near: Neighbors) -> Tensor:
    """The mean distance of each row to its neighbors, in robust standard deviations above the median."""
    distance = (2 - 2 * near.scores.double()).clamp_min(0).sqrt().mean(dim=1)
    above = distance - distance.median()
    spread = 1.4826 * above.abs().median()
    return (above / spread.clamp_min(1e-12)).float() if spread > 0 else torch.zeros(len(above))
