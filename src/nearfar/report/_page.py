"""`build` and `write`: one self-contained HTML page about an embedding.

The scores come from `nearfar.evaluate`. The data of the page's scripts is a JSON block with `<`, `>` and `&` escaped,
and the page's content security policy forbids other scripts and all connections.
"""

import json
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from nearfar._utils.checks import check_choice, check_seed, check_whole
from nearfar._utils.files import atomic_write
from nearfar._utils.page import FOOTER, allow, document, hash_of
from nearfar._utils.progress import Watch
from nearfar.evaluation._calibration import Calibration
from nearfar.evaluation._evaluate import Evaluation, evaluate
from nearfar.evaluation.parallel import current_group, single_process
from nearfar.report import _sections as sections
from nearfar.report._confusion import Row, confusion
from nearfar.report._curves import curve_data, span
from nearfar.report._decision import decision
from nearfar.report._gallery import Query, gallery, nearest
from nearfar.report._inputs import ImageReader, Inputs, Names, Source, are_sentences, read_inputs
from nearfar.report._maps import MOST_FOR_TSNE, Map, flat_map, without_tsne
from nearfar.report._pictures import Pictures
from nearfar.report._similarities import SIMILARITIES, Metric

ROOM = 4_900_000  # characters of a page of up to 200 queries at most; with more queries, more in proportion
SCRIPTS = ("theme.js", "page.js", "gallery.js", "map.js")


class Options(TypedDict, total=False):
    """The keyword arguments of `build`, for the type of `write`."""

    names: Sequence[str] | None
    classes: Names | None
    images: Any
    outside: bool
    findings: Iterable[Any] | None
    calibration: Calibration | None
    title: str | None
    similarity: Metric
    ks: Sequence[int]
    clustering: bool
    queries: int
    near: int
    points: int
    seed: int
    watch: Watch | None


def build(
    source: Source,
    *,
    names: Sequence[str] | None = None,
    classes: Names | None = None,
    images: Any = None,
    outside: bool = False,
    findings: Iterable[Any] | None = None,
    calibration: Calibration | None = None,
    title: str | None = None,
    similarity: Metric = "cosine",
    ks: Sequence[int] = (1, 2, 4, 8),
    clustering: bool = False,
    queries: int = 200,
    near: int = 6,
    points: int = MOST_FOR_TSNE,
    seed: int = 0,
    watch: Watch | None = None,
) -> str:
    """Build the page and return it as text.

    Args:
        source: `(embeddings, labels)` (tensors, arrays or lists), `Vectors`, the path of a `vectors.npz` (x, y and
            optionally name, classes, images), or the path of a run folder (embeddings.npz and optionally
            journal.jsonl, config.yaml).
        names: one per row, such as file names.
        classes: names of the classes: a mapping from labels, a list for labels 0..max, or a list for the labels that
            occur, in ascending order.
        images: a folder in which `names` are files, an array [n, h, w] or [n, h, w, 3] of uint8, a list of arrays or
            paths, a mapping from names, or a function row -> PIL image, array or path. Unreadable pictures are left
            out and counted.
        outside: allow names that lead out of the folder `images`, by `..` or by a link; otherwise they are an error.
        findings: findings of the doctor, each with name, severity, evidence and remedy; by default those of the
            journal of a run folder.
        calibration: a threshold to show, with its curve and its cost (`nearfar.calibrate`).
        title: title of the page; by default the name of the file or folder.
        similarity: "cosine", "dot" or "euclidean".
        ks: which recall@K.
        clustering: add NMI, AMI and F1 (k-means, slower).
        queries: how many queries the gallery shows; up to 200 the page stays below 5 MB.
        near: how many neighbors each query shows.
        points: the most points on the map; t-SNE is drawn up to 3,000.
        seed: seed of the intervals, of the right answers in the gallery, and of the map.
        watch: called as watch(what, done, total) during the work; total is 0 if unknown.

    Raises:
        ValueError: if vectors are not finite, no query has a right answer, or lengths do not agree.
        FileNotFoundError: if the source does not exist.
    """
    check_choice("report", "similarity", similarity, SIMILARITIES)
    check_seed("report", seed)
    for name, value in (("queries", queries), ("near", near), ("points", points)):
        check_whole("report", name, value)
    tell: Watch = watch or (lambda what, done, total: None)
    inputs = read_inputs(source, names=names, classes=classes, images=images, outside=outside, title=title)
    x, y = inputs.x, inputs.y
    evaluation = evaluate(x, y, ks=ks, similarity=similarity, clustering=clustering, seed=seed, watch=watch)
    if current_group().rank:
        return ""
    with single_process():  # the ranks share the evaluation; only the first builds the page
        worst = [row.label for row in evaluation.worst]
        found = gallery(x, evaluation.per_query, worst, queries=queries, near=near, similarity=similarity, seed=seed)
        tell("laying out the map", 0, 0)
        layout = flat_map(x, y, worst, points=points, similarity=similarity, seed=seed)
        rows = np.union1d(layout.rows, np.flatnonzero(np.isin(y.numpy(), worst)))
        first = nearest(x, rows, similarity)
        table = confusion(x, y, evaluation, rows, first)
        limit, nearest_row = int(ROOM * max(1.0, queries / 200)), dict(zip(rows.tolist(), first.tolist(), strict=True))
        data, unread = page_data(inputs, evaluation, found, layout, table, nearest_row, limit=limit, watch=watch)
        doctor = _doctor_findings(source) if findings is None else list(findings)
        body = [
            sections.headline(inputs.title, evaluation, x.shape[1], similarity, inputs.journal.baselines),
            sections.scores(evaluation),
        ]
        body += [decision(calibration)] if calibration is not None else []
        body += [sections.findings(doctor)] if doctor is not None else []
        body += [sections.curves(inputs.journal)] if inputs.journal.panels else []
        body += [_gallery_section(evaluation, found), _map_section(len(x), layout)]
        body += [sections.confusion(table, inputs.classes, evaluation.classes <= len(table))]
        settings = {"similarity": similarity, "seed": seed, "queries in the gallery": len(found)}
        body += [sections.setup(inputs.config, settings, _missing(inputs, doctor, unread))]
        return _assemble(inputs.title, body, data)


def write(path: str | os.PathLike[str], source: Source, **options: Unpack[Options]) -> Path:
    """Write the page to `path`, completely or not at all; keyword arguments as in `build`."""
    target = Path(path)
    text = build(source, **options)
    if current_group().rank:
        return target
    with (
        atomic_write(target) as temporary,
        temporary.open("x", encoding="utf-8", errors="replace", newline="\n") as stream,
    ):
        stream.write(text)
    return target


def _doctor_findings(source: Source) -> list[Any] | None:
    """The doctor's findings on a run folder; None if it has no readable journal."""
    if not isinstance(source, str | os.PathLike) or not (Path(source) / "journal.jsonl").is_file():
        return None
    try:
        from nearfar.doctor import diagnose_run  # reading the configuration may need packages that a page does not

        return list(diagnose_run(Path(source)).findings)
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return None


def _missing(inputs: Inputs, findings: list[Any] | None, unread: int) -> list[str]:
    notes = []
    if not inputs.journal.panels:
        notes.append("Curves: there is no journal.")
    if findings is None:
        notes.append("The doctor’s findings: none were given.")
    if inputs.picture is None:
        notes.append("Pictures: there are none; names stand in their place.")
    elif unread:
        notes.append(f"{unread:,} pictures could not be read; names stand in their place.")
    if not inputs.config.strip():
        notes.append("config.yaml: there is none.")
    return notes


def _gallery_section(evaluation: Evaluation, found: list[Query]) -> str:
    failures = int(((evaluation.per_query.rank > 1) & ~evaluation.per_query.lone).sum())
    shown = sum(query.rank > 1 for query in found)
    lead = (
        f"{shown:,} of {failures:,} failures and {len(found) - shown:,} of {evaluation.queries - failures:,} "
        "right answers. "
        "The worst come first: by the rank of the first right answer, then by how far a wrong one scores above it."
    )
    return sections.section("gallery", "Retrieval gallery", lead, '<div id="gallery-body"></div>')


def _map_section(total: int, layout: Map) -> str:
    shown = len(layout.rows)
    lead = "Each mark is a sample; hollow where its nearest neighbor is of another class. "
    if shown < total:
        lead += f"{shown:,} of {total:,}: the worst classes and others drawn at random, whole. "
    lead += f"The two principal axes show {100 * layout.explained:.0f}% of the variance."
    if without_tsne():
        lead += " " + without_tsne()
    return sections.section("map", "Map", lead, '<div id="map-body"></div>')


def _assemble(title: str, body: list[str], data: str) -> str:
    here = files("nearfar.report")
    script = "\n".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    written = "\n".join(body)
    inside = f"""{sections.banner("report", _nav(written))}
<main id="main">
<noscript><p class="quiet">The gallery and the map need JavaScript, which is switched off.</p></noscript>
{written}
</main>
{FOOTER}
<dialog id="detail" aria-labelledby="detail-title"></dialog>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>"""
    return document(
        f"{title} · nearfar",
        inside,
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        head=allow(f"img-src data:; script-src {hash_of(script)}"),
    )


def _nav(body: str) -> str:
    titles = {
        "scores": "Scores",
        "decision": "Threshold",
        "findings": "Findings",
        "curves": "Training",
        "gallery": "Gallery",
        "map": "Map",
        "confusion": "Confusion",
        "setup": "Configuration",
    }
    there = [name for name in titles if f'<section id="{name}"' in body]
    return "".join(f'<a href="#{name}">{titles[name]}</a>' for name in there)


def page_data(
    inputs: Inputs,
    evaluation: Evaluation,
    found: list[Query],
    layout: Map,
    table: list[Row],
    first: dict[int, int],
    *,
    limit: int,
    watch: Watch | None,
) -> tuple[str, int]:
    """Collect the data of the page's scripts as JSON, with rows by number and classes as indices into one list.

    `first` maps each row of the map to its nearest other row. The data with its pictures may have `limit` characters.
    Returns the JSON text, and how many pictures could not be read.
    """
    labels = inputs.y.tolist()
    shown = layout.rows.tolist()
    rows = sorted({row for query in found for row in (query.row, query.right, *query.near)})
    used = sorted({labels[row] for row in [*rows, *shown, *(first[row] for row in shown)]})
    place = {label: i for i, label in enumerate(used)}
    lone = evaluation.per_query.lone.tolist()
    data: dict[str, Any] = {
        "classes": [inputs.classes[label] for label in used],
        "samples": {row: [place[labels[row]], inputs.names[row]] for row in rows},
        "queries": [_query(query) for query in found],
        "map": {
            "rows": shown,
            "classes": [place[labels[row]] for row in shown],
            "names": [inputs.names[row] for row in shown],
            "nearest": [-1 if lone[row] else place[labels[first[row]]] for row in shown],
            "pca": layout.pca.tolist(),
            "tsne": None if layout.tsne is None else layout.tsne.tolist(),
            "worst": [place[row.label] for row in table if row.label in place],
            "examples": [row.example for row in table if row.label in place],
        },
        "curves": [curve_data(panel, span(inputs.journal.panels)) for panel in inputs.journal.panels],
        "texts": inputs.picture is None and are_sentences(inputs.names),
        "pictures": None,
        "atlas": None,
    }
    unread = 0
    if inputs.picture is not None:
        room = limit - len(_json(data).encode(errors="replace"))
        unread = _add_pictures(data, inputs.picture, {*rows, *(row.example for row in table)}, shown, room, watch)
    return _json(data), unread


def _json(data: Any) -> str:
    """JSON with `<`, `>` and `&` escaped, so that no name can end the script block."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _query(query: Query) -> dict[str, Any]:
    return {
        "row": query.row,
        "rank": query.rank,
        "gap": None if query.gap is None else round(query.gap, 4),
        "near": query.near,
        "scores": [round(score, 4) for score in query.scores],
        "right": query.right,
        "rightScore": round(query.right_score, 4),
    }


def _add_pictures(
    data: dict[str, Any], read: ImageReader, rows: set[int], tiles: list[int], room: int, watch: Watch | None
) -> int:
    """Add thumbnails of `rows` and the map's atlas to `data`; return how many pictures could not be read."""
    pictures = Pictures(read, watch)
    thumbnails = pictures.thumbnails(rows, int(0.76 * (room - 120_000)))
    if thumbnails.data:
        data["pictures"] = vars(thumbnails)
        spent = sum(len(text) + 12 for text in thumbnails.data.values())
        atlas = pictures.atlas(tiles, min(1_800_000, room - 120_000 - spent))
        data["atlas"] = None if atlas is None else vars(atlas)
    return len(pictures.missing)
