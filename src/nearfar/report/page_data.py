"""The data of the page's scripts as JSON types: queries, classes, points of the map, curves and pictures."""

from __future__ import annotations

from typing import Any

from nearfar._utils.progress import Watch
from nearfar.evaluation.summary import Evaluation
from nearfar.report.confusion import Row
from nearfar.report.curves import curve_data, span
from nearfar.report.gallery import Query
from nearfar.report.inputs import Inputs
from nearfar.report.maps import Map
from nearfar.report.pictures import Pictures

__all__ = ["add_pictures", "page_data"]


def page_data(
    inputs: Inputs, evaluation: Evaluation, found: list[Query], layout: Map, table: list[Row], first: dict[int, int]
) -> dict[str, Any]:
    """Collect the data of the page's scripts, with rows by number and classes as indices into one list.

    Args:
        inputs: the inputs of the report.
        evaluation: tells which queries are lone.
        found: the queries of the gallery.
        layout: the points of the map.
        table: the worst classes.
        first: row -> its nearest other row, for each row on the map.
    """
    labels = inputs.y.tolist()
    shown = layout.rows.tolist()
    rows = sorted({row for query in found for row in (query.row, query.right, *query.near)})
    used = sorted({labels[row] for row in [*rows, *shown, *(first[row] for row in shown)]})
    place = {label: i for i, label in enumerate(used)}
    lone = evaluation.per_query.lone.tolist()
    return {
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


def add_pictures(
    data: dict[str, Any],
    inputs: Inputs,
    found: list[Query],
    layout: Map,
    table: list[Row],
    room: int,
    watch: Watch | None,
) -> int:
    """Add thumbnails and the map's atlas to `data`; return how many pictures could not be read."""
    if inputs.picture is None:
        return 0
    pictures = Pictures(inputs.picture, watch)
    rows = {row for query in found for row in (query.row, query.right, *query.near)} | {row.example for row in table}
    thumbnails = pictures.thumbnails(rows, int(0.76 * (room - 120_000)))
    if thumbnails.data:
        data["pictures"] = vars(thumbnails)
        spent = sum(len(text) + 12 for text in thumbnails.data.values())
        atlas = pictures.atlas(layout.rows.tolist(), min(1_800_000, room - 120_000 - spent))
        data["atlas"] = None if atlas is None else vars(atlas)
    return len(pictures.missing)
