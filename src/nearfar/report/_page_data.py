"""The data of the page's scripts as JSON types: queries, classes, points of the map, curves and pictures."""

from __future__ import annotations

import json
from typing import Any

from nearfar._utils.progress import Watch
from nearfar.evaluation._evaluate import Evaluation
from nearfar.report._confusion import Row
from nearfar.report._curves import curve_data, span
from nearfar.report._gallery import Query
from nearfar.report._inputs import ImageReader, Inputs
from nearfar.report._maps import Map
from nearfar.report._pictures import Pictures


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

    Args:
        inputs: the inputs of the report.
        evaluation: defines which queries are lone.
        found: the queries of the gallery.
        layout: the points of the map.
        table: the worst classes.
        first: row -> its nearest other row, for each row on the map.
        limit: characters that the data with its pictures may have.
        watch: called as watch(what, done, total) during the work.

    Returns:
        The JSON text, and how many pictures could not be read.
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
