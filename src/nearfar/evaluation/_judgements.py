"""Read judgements and ranked results: TREC's qrels and run files, and folders in the layout of BEIR.

    qrels.txt          query 0 document grade                     words, separated by blanks
    run.trec           query Q0 document rank score tag           the rank is not used, as in trec_eval
    qrels/test.tsv     query-id, corpus-id, score                 BEIR: tabs, and this heading
    corpus.jsonl       {"_id": ..., "title": ..., "text": ...}    BEIR: one document a line; queries.jsonl alike

Files may come from others: an error is one sentence that names the line.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.checks import printable
from nearfar.data._tables import LONGEST, text_lines

Ranks = Mapping[str, Mapping[str, Any]]  # query -> document -> grade or score
CHUNK = 1 << 22  # characters that are read at a time
HEADING = ("query-id", "corpus-id", "score")


@dataclass(frozen=True)
class Collection:
    """A retrieval task in the layout of BEIR: the texts to embed, and the judgements.

    Attributes:
        queries: id -> text, of the judged queries.
        documents: id -> title and text.
        qrels: query -> document -> grade.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    qrels: dict[str, dict[str, int]]


@dataclass(frozen=True, eq=False)
class Ranked:
    """Results of the judged queries, one entry for each query and document."""

    documents: dict[str, int]  # document -> its number
    query: np.ndarray  # int64 [r], the number of the query
    document: np.ndarray  # int64 [r], the number of the document
    score: np.ndarray  # float64 [r], larger is better
    unjudged: int = 0  # number of queries without judgements, which were left out
    # of equal scores the document with the smaller number is first; otherwise the larger name is
    by_place: bool = False

    def order(self) -> np.ndarray:
        """The entries by query, best first."""
        tie = self.document
        if not self.by_place:
            names = sorted(self.documents, reverse=True)
            rank = np.empty(len(names), dtype=np.int64)
            rank[[self.documents[name] for name in names]] = np.arange(len(names))
            tie = rank[self.document]
        return np.lexsort((tie, -self.score, self.query))


def read_qrels(owner: str, qrels: Ranks | str | os.PathLike[str]) -> dict[str, dict[str, int]]:
    """Read judgements: a mapping, a file of TREC or BEIR, or a folder that holds qrels/test.tsv."""
    found: dict[str, dict[str, int]] = {}
    if isinstance(qrels, Mapping):
        for query, grades in qrels.items():
            found[str(query)] = {str(name): _whole(owner, query, name, grade) for name, grade in _items(owner, grades)}
    elif isinstance(qrels, str | os.PathLike):
        path = Path(qrels) / "qrels" / "test.tsv" if Path(qrels).is_dir() else Path(qrels)
        for number, query, document, word in _judgements(owner, path):
            where = f"line {number} of {path}"
            word = word.strip()
            if not word.lstrip("+-").isdecimal() or len(word) > 9:
                raise ValueError(f"{owner}: the grade in {where} must be a whole number, but is {printable(word)!r}.")
            grades = found.setdefault(query, {})
            if document in grades:
                raise ValueError(
                    f"{owner}: {where} judges document {printable(document)!r} for query {printable(query)!r} a "
                    "second time; keep one of the lines."
                )
            grades[document] = int(word)
    else:
        raise TypeError(f"{owner}: qrels must be a path or a mapping, but came as {type(qrels).__name__}.")
    if not any(found.values()):
        raise ValueError(f"{owner}: qrels must judge at least one document, but hold no judgements.")
    return found


def _judgements(owner: str, path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield line number, query, document and grade."""
    tab = None
    for first, lines in _chunks(owner, path):
        if first == 1 and tuple(lines[0].rstrip().split("\t")) == HEADING:
            tab, first, lines = "\t", 2, lines[1:]
        numbers, columns = _columns(owner, path, first, lines, 3 if tab else 4, tab)
        yield from zip(numbers, columns[0], columns[-2], columns[-1], strict=True)


def read_ranked(owner: str, run: Ranks | str | os.PathLike[str], queries: Mapping[str, int]) -> Ranked:
    """Read the results of the judged `queries` (name -> number): a mapping, or a run file of TREC."""
    documents: dict[str, int] = defaultdict(count().__next__)  # numbers names as they come
    parts: list[tuple[np.ndarray, ...]] = []
    others: set[str] = set()
    source: Iterator[tuple[Sequence[int] | None, Sequence[str], Sequence[str], Sequence[Any]]]
    if isinstance(run, Mapping):
        source = _from_mapping(owner, run)
    elif isinstance(run, str | os.PathLike):
        source = _from_file(owner, Path(run))
    else:
        raise TypeError(f"{owner}: run must be a path, a mapping or two Vectors, but came as {type(run).__name__}.")
    for numbers, names, found, scores in source:
        others.update(set(names) - queries.keys())
        query = np.fromiter(map(queries.get, names, repeat(-1)), np.int64, len(names))
        document = np.fromiter(map(documents.__getitem__, found), np.int64, len(names))
        score, judged = _finite(owner, run, numbers, names, scores), query >= 0
        lines = np.zeros(len(query), dtype=np.int64) if numbers is None else np.array(numbers, dtype=np.int64)
        parts.append(tuple(column[judged] for column in (query, document, score, lines)))
    if not parts:
        raise ValueError(f"{owner}: the run holds no results.")
    query, document, score, lines = (np.concatenate(column) for column in zip(*parts, strict=True))
    key = query * max(1, len(documents)) + document
    order = np.argsort(key, kind="stable")
    twice = np.flatnonzero(np.diff(key[order]) == 0)
    if len(twice):
        row = order[twice + 1].min()
        query_name, name = list(queries)[query[row]], list(documents)[document[row]]
        where = "" if numbers is None else f" by line {lines[row]} of {run}"
        raise ValueError(
            f"{owner}: document {printable(name)!r} is ranked a second time for query {printable(query_name)!r}"
            f"{where}; keep one of them."
        )
    return Ranked(dict(documents), query, document, score, len(others))


def _from_mapping(owner: str, run: Ranks) -> Iterator[tuple[None, list[str], list[str], list[Any]]]:
    for query, found in run.items():
        names, scores = zip(*_items(owner, found), strict=True) if found else ((), ())
        yield None, [str(query)] * len(names), [str(name) for name in names], list(scores)


def _from_file(owner: str, path: Path) -> Iterator[tuple[Sequence[int], list[str], list[str], list[str]]]:
    for first, lines in _chunks(owner, path):
        numbers, (query, _, document, _, score, _) = _columns(owner, path, first, lines, 6)
        yield numbers, query, document, score


def _finite(owner: str, run: Any, numbers: Sequence[int] | None, names: Sequence[str], scores: Sequence[Any]) -> Any:
    """Scores as float64; an error names the first that is no finite number."""
    try:
        found = np.fromiter(map(float, scores), np.float64, len(scores))
    except (TypeError, ValueError):
        found = np.array([_float(score) for score in scores])
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        row = wrong[0]
        where = f"of query {printable(names[row])!r}" if numbers is None else f"in line {numbers[row]} of {run}"
        raise ValueError(f"{owner}: the score {where} must be a finite number, but is {printable(scores[row])!r}.")
    return found


def _float(word: Any) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        return math.nan


def _chunks(owner: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield lists of lines, each with the number of its first line; a line longer than `LONGEST` is an error."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {path}.")
    number, rest = 1, ""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        while text := stream.read(CHUNK):
            text = rest + text
            try:
                text.encode()
            except UnicodeEncodeError as error:
                number += text.count("\n", 0, error.start)
                raise ValueError(f"{owner}: line {number} of {path} is not UTF-8 text; save it in UTF-8.") from None
            *lines, rest = text.split("\n")
            if len(rest) > LONGEST or max(map(len, lines), default=0) > LONGEST:
                number += next((place for place, line in enumerate(lines) if len(line) > LONGEST), len(lines))
                raise ValueError(f"{owner}: line {number} of {path} has more than {LONGEST:,} characters.")
            if lines:
                yield number, lines
            number += len(lines)
    if rest:
        yield number, [rest]


def _columns(
    owner: str, path: Path, first: int, lines: list[str], columns: int, tab: str | None = None
) -> tuple[Sequence[int], list[list[str]]]:
    """The line numbers and the columns of some lines; empty lines are left out.

    Lists of words are never kept: tens of millions of lists would keep the garbage collector busy.
    """
    numbers: Sequence[int] = range(first, first + len(lines))
    sizes = [len(line.split(tab)) for line in lines]
    if sizes.count(columns) < len(sizes):
        there = [place for place, line in enumerate(lines) if line.strip()]
        wrong = next((place for place in there if sizes[place] != columns), None)
        if wrong is not None:
            raise ValueError(
                f"{owner}: line {numbers[wrong]} of {path} must hold {columns} "
                f"{'tab-separated columns' if tab else 'words'}, but holds {sizes[wrong]}: "
                f"{printable(lines[wrong], 60)!r}."
            )
        numbers, lines = [numbers[place] for place in there], [lines[place] for place in there]
    words = (tab or "\n").join(lines).split(tab) if lines else []
    return numbers, [words[column::columns] for column in range(columns)]


def _items(owner: str, inner: Any) -> Any:
    if not isinstance(inner, Mapping):
        raise TypeError(f"{owner}: each query must map documents to numbers, but {type(inner).__name__} came.")
    return inner.items()


def _whole(owner: str, query: object, name: object, grade: object) -> int:
    value: Any = grade
    if isinstance(grade, bool) or not isinstance(grade, Real) or not abs(value) < 1e9 or value % 1:
        raise ValueError(
            f"{owner}: the grade of document {printable(name)!r} for query {printable(query)!r} must be a whole "
            f"number below 1e9, but is {grade!r}."
        )
    return int(value)


def read_beir(folder: str | os.PathLike[str], split: str = "test") -> Collection:
    """Read a folder in the layout of BEIR: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

    Args:
        folder: the folder.
        split: the name of the file of judgements; only its queries are read.
    """
    owner, home = "read_beir", Path(folder)
    qrels = read_qrels(owner, home / "qrels" / f"{split}.tsv")
    queries = {name: text for name, text in _texts(owner, home / "queries.jsonl") if name in qrels}
    return Collection(queries, dict(_texts(owner, home / "corpus.jsonl")), qrels)


def _texts(owner: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield id and text, after the title if there is one."""
    for number, line in enumerate(text_lines(owner, path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name, words = record["_id"], (record.get("title") or "", record["text"])
            if not isinstance(name, str | int) or not all(isinstance(word, str) for word in words):
                raise TypeError
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ValueError(
                f'{owner}: line {number} of {path} must be a JSON object with "_id" and "text", but is '
                f"{printable(line.strip(), 60)!r}."
            ) from None
        yield str(name), " ".join(filter(None, words))
