"""Texts: a CSV, JSONL or Parquet file with a class for each text, or with pairs of a query and a document."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar.data._folders import halve, split_rows
from nearfar.data._samples import DataSet, Labels, describe, numbered
from nearfar.data._splits import class_disjoint
from nearfar.data._tables import check_rows, table, text_lines
from nearfar.data._tokens import Document

TEXT = ("text", "sentence", "utterance")
LABEL = ("label", "class", "intent")
QUERY = ("query", "anchor", "question")
DOCUMENT = ("document", "positive", "answer")
SCORE = ("score", "similarity")
NEGATIVE = "negative"  # then negative_1, negative_2, ... or, in JSONL and Parquet, one list called negatives
MORE = ("id", "split")
FORMATS = (".csv", ".jsonl", ".parquet")
LAYOUTS = "text and label, or query and document (and negative, negative_1, ...)"
TEST = 0.2  # the share of the queries for the test, in pairs without a split
NAMED = 200  # characters of a text that are its name
SEED = 0  # of the split of pairs


class Texts:
    """Texts with their classes; those of pairs also say which are queries, and which belong to one record.

    Args:
        texts: the texts.
        labels: integers [n], from 0 without gaps.
        classes: the name of each class.
        queries: bool [n], which texts are queries; the others are documents. None if there are no sides.
        records: int64 [m, 2 + k], the rows of a query, of a document that answers it, and of k that do not.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Any,
        classes: Sequence[str] | None = None,
        *,
        queries: NDArray[np.bool_] | None = None,
        records: Labels | None = None,
    ) -> None:
        self.texts, self.queries, self.records = texts, queries, records
        names = list(map(shorten, texts))
        self.labels, self.classes, self.names = describe("Texts", len(texts), labels, names, classes)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        text = self.texts[index]
        return text if self.queries is None or self.queries[index] else Document(text)

    def part(self, rows: Labels, labels: Labels | None = None) -> Texts:
        """Some of the texts; of pairs, all texts of the records whose queries are among them."""
        given, records = self.labels if labels is None else self.labels.copy(), None
        if labels is not None:
            given[rows] = labels
        if self.records is not None and self.queries is not None:
            records = self.records[np.isin(self.records[:, 0], rows)]
            rows = np.unique(records)
            records = np.searchsorted(rows, records)
        present, renumbered = np.unique(given[rows], return_inverse=True)
        return Texts(
            [self.texts[row] for row in rows.tolist()],
            renumbered.reshape(-1),
            [self.classes[label] for label in present.tolist()],
            queries=None if self.queries is None else self.queries[rows],
            records=records,
        )


def shorten(text: str) -> str:
    r"""The name of a text: one line with at most `NAMED` characters.

    >>> shorten("two  lines\nbecome one")
    'two lines become one'
    """
    line = " ".join(text[: 4 * NAMED].split())
    return line if len(line) <= NAMED else f"{line[: NAMED - 1]}…"


@dataclass(frozen=True)
class Layout:
    """Which columns of a file hold what."""

    text: tuple[str, ...]  # one column of texts; or a query, a document and the negatives
    label: str | None = None  # the column of classes

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text, self.label) if self.label else self.text

    def __str__(self) -> str:
        if self.label:
            return f"texts with classes, from the columns {self.text[0]} and {self.label}"
        wrong = len(self.text) - 2
        more = f" and {wrong} hard negative{'s' * (wrong > 1)}" if wrong else ""
        return f"pairs of a query and a document{more}, from the columns {', '.join(self.text)}"


def layout_of(columns: Sequence[str]) -> Layout | None:
    """The layout of data to train on that the names of the columns show; None if they show none.

    >>> print(layout_of(["id", "query", "positive", "negative"]))
    pairs of a query and a document and 1 hard negative, from the columns query, positive, negative
    """

    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in columns), None)

    text, label, query, document = map(first, (TEXT, LABEL, QUERY, DOCUMENT))
    if text and label and not (query and document):
        return Layout((text,), label)
    if query and document and not (text and label):
        return Layout((query, document, *(name for name in columns if name.split("_")[0] == NEGATIVE)))
    return None


def texts(path: Path) -> DataSet:
    """Read texts from a CSV, JSONL or Parquet file whose columns show its layout.

    Classes: text (or sentence, utterance) and label (or class, intent). Pairs: query (or anchor, question) and document
    (or positive, answer), and hard negatives in negative, negative_1, ... or, but for CSV, in a list called negatives.
    A column split says train or test, and the values of a column id must differ; other columns are not read.

    Queries that share a document, and documents that share a query, are one class, so that no right answer counts as a
    negative. Without a split, half of the classes, or a fifth of the queries with their documents, are for the test.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: columns are missing, a text is empty, an id occurs twice, or the file cannot be read.
    """
    found, layout, split = read_texts(path)
    if layout.label is not None:
        labels, classes = numbered(row[layout.label] for row in found)
        whole = Texts([row[layout.text[0]] for row in found], labels, classes)
        if split is None:
            return _named(halve(path.stem, whole), layout)
        train, test = (whole.part(np.array(rows)) for rows in split)
        return _named(DataSet(path.stem, train, test), layout)
    rows = [[row[column] for column in layout.text] for row in found]
    if split is not None:
        train, test = (pairs([rows[row] for row in side]) for side in split)
        return _named(DataSet(path.stem, train, test), layout)
    whole = pairs(rows)
    rest, held = class_disjoint(whole, TEST, seed=SEED)
    return _named(DataSet(path.stem, whole.part(rest), whole.part(held)), layout)


def _named(data: DataSet, layout: Layout) -> DataSet:
    return DataSet(data.name, data.train, data.test, about=str(layout))


def pairs(rows: Sequence[Sequence[str]]) -> Texts:
    """Texts of records [m][2 + k]: a query, a document that answers it, and k that do not.

    A text is one row on each side, however often it occurs.
    """
    places: dict[tuple[bool, str], int] = {}
    records = np.array(
        [[places.setdefault((column == 0, text), len(places)) for column, text in enumerate(row)] for row in rows]
    )
    labels = _components(len(places), records[:, :2])
    found = [text for _, text in places]
    queries = np.array([query for query, _ in places])
    first = np.unique(labels, return_index=True)[1]
    return Texts(found, labels, [shorten(found[row]) for row in first.tolist()], queries=queries, records=records)


def _components(count: int, edges: Labels) -> Labels:
    """The connected components of a graph, numbered in the order of their first node."""
    parent = list(range(count))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for a, b in edges.tolist():
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    return np.unique([root(node) for node in range(count)], return_inverse=True)[1].reshape(-1).astype(np.int64)


def read_texts(path: Path, *, alone: bool = False) -> tuple[list[dict[str, Any]], Layout, list[list[int]] | None]:
    """The rows of a file, its layout, and the rows of its training and test side if it says so.

    With `alone` one column of texts, queries or documents is enough.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"texts: {path} must end in one of {', '.join(FORMATS)}.")
    if path.suffix.lower() == ".csv":
        columns = csv_columns(path)
        layout = _need_layout(path, columns, alone)
        unique = "id" if "id" in columns else None
        rows: list[dict[str, Any]] = list(table("texts", path, layout.columns, None, unique=unique))
    else:
        rows = [_spread(row) for row in (_jsonl(path) if path.suffix.lower() == ".jsonl" else _parquet(path))]
        if not rows:
            raise ValueError(f"texts: {path} holds no rows.")
        columns = list(rows[0])
        layout = _need_layout(path, columns, alone)
        wanted = [name for name in (*layout.columns, *MORE) if name in columns]
        rows = [{name: _word(row.get(name)) for name in wanted} for row in rows]
        check_rows("texts", path, rows, wanted, unique="id" if "id" in wanted else None, first=1)
    blank = next((row for row, held in enumerate(rows) if not all(held[name].strip() for name in layout.text)), None)
    if blank is not None:
        raise ValueError(f"texts: sample {blank} of {path} is an empty text; fill it, or leave the row out.")
    split = None
    if "split" in columns and not alone:
        split = split_rows("texts", path, [row["split"] for row in rows])
    return rows, layout, split


@dataclass(frozen=True)
class Corpus:
    """Texts to embed, with the numbers and the names of their classes if they have any."""

    texts: Texts
    labeled: bool


def corpus(path: Path) -> Corpus:
    """Read texts to embed: as `texts` does, or one column of texts, queries or documents, or a .txt file of lines."""
    if path.suffix.lower() == ".txt":
        lines = [line.strip() for line in text_lines("texts", path)]
        return _unlabeled(path, [line for line in lines if line], documents=False)
    rows, layout, _ = read_texts(path, alone=True)
    if layout.label is not None:
        labels, classes = numbered(row[layout.label] for row in rows)
        return Corpus(Texts([row[layout.text[0]] for row in rows], labels, classes), labeled=True)
    if len(layout.text) > 1:
        return Corpus(pairs([[row[column] for column in layout.text] for row in rows]), labeled=True)
    return _unlabeled(path, [row[layout.text[0]] for row in rows], documents=layout.text[0] in DOCUMENT)


def _unlabeled(path: Path, found: list[str], *, documents: bool) -> Corpus:
    if not found:
        raise ValueError(f"texts: {path} holds no texts.")
    queries = np.full(len(found), not documents)
    return Corpus(Texts(found, np.zeros(len(found), dtype=np.int64), ("",), queries=queries), labeled=False)


def _need_layout(path: Path, columns: Sequence[str], alone: bool) -> Layout:
    found = layout_of(columns)
    graded = next((name for name in (*SCORE, *LABEL) if name in columns), None)
    if found is not None and found.label is None and graded is not None:
        raise ValueError(
            f"texts: {path} holds pairs with a column {graded}, but all pairs must be right; leave the wrong ones "
            "and the column out, or name a column of wrong documents negative."
        )
    single = next((name for name in (*TEXT, *QUERY, *DOCUMENT) if name in columns), None)
    if found is None and alone and single is not None:
        return Layout((single,))
    if found is None:
        held = printable(", ".join(map(str, columns))) or "none"
        raise ValueError(f"texts: {path} must have the columns {LAYOUTS}, but has {held}; rename its columns.")
    return found


def csv_columns(path: Path) -> list[str]:
    """The names in the first line of a CSV file."""
    try:
        return next(csv.reader(text_lines("texts", path), skipinitialspace=True), [])
    except csv.Error as error:
        raise ValueError(f"texts: {path} cannot be read as a CSV file ({error}).") from None


def _jsonl(path: Path) -> list[Mapping[str, Any]]:
    rows = list[Mapping[str, Any]]()
    for number, line in enumerate(text_lines("texts", path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f'texts: line {number} of {path} is no JSON object; write one such as {{"text": ...}}.')
        rows.append(row)
    return rows


def _parquet(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"texts: there is no file {path}; correct the path.")
    parquet = need("pyarrow.parquet", "reading .parquet", "hf", instead="save the table as CSV")
    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has errors of many kinds
        reason = printable(" ".join(str(error).split())[:160])
        raise ValueError(f"texts: {path} cannot be read as a Parquet file ({reason}).") from None
    return rows


def _spread(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose list of negatives has become columns."""
    wrong = row.get(f"{NEGATIVE}s")
    if not isinstance(wrong, list):
        return dict(row)
    rest = {name: value for name, value in row.items() if name != f"{NEGATIVE}s"}
    return rest | {f"{NEGATIVE}_{place}": value for place, value in enumerate(wrong, start=1)}


def _word(value: Any) -> str | None:
    """A value as text; None if it is neither text nor a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None
