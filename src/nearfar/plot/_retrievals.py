"""A figure of queries and their nearest neighbors as small pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar._utils.checks import check_choice, check_seed, check_whole
from nearfar.evaluation._evaluate import evaluate
from nearfar.plot._maps import rows_and_labels
from nearfar.plot.style import NEGATIVE, POSITIVE, axis, class_words, frame
from nearfar.report._gallery import Query
from nearfar.report._gallery import gallery as chosen_queries
from nearfar.report._inputs import image_reader
from nearfar.report._pictures import Pictures, has_black_background, invert_if, is_drawing
from nearfar.report._similarities import SIMILARITIES, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP = 1.25  # the distance of neighboring pictures, in widths of a picture


def gallery(
    embeddings: Any,
    labels: Any = None,
    *,
    images: Any,
    queries: int = 6,
    near: int = 6,
    names: Mapping[int, str] | None = None,
    similarity: Metric = "cosine",
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Plot one query per row: its picture, then its neighbors, right ones in solid blue, wrong ones in dashed orange.

    The worst failures come first, and a quarter of the queries are right answers drawn at random, as in
    `nf.report`.

    Args:
        embeddings: [n, d] a tensor, an array, lists or `Vectors`.
        labels: [n] integers; by default the y of `Vectors`.
        images: [n, h, w] or [n, h, w, 3] of uint8, a list of arrays or paths, or a function row -> picture.
        queries: how many queries.
        near: how many neighbors each query shows.
        names: label -> name of the class, written above each picture.
        similarity: "cosine", "dot" or "euclidean".
        seed: seed for drawing right answers.
        ax: the axis to draw on; a new figure if None.
    """
    check_choice("plot.gallery", "similarity", similarity, SIMILARITIES)
    check_seed("plot.gallery", seed)
    check_whole("plot.gallery", "queries", queries)
    check_whole("plot.gallery", "near", near)
    x, y = rows_and_labels("plot.gallery", embeddings, labels)
    read = image_reader(images, [str(row) for row in range(len(x))])
    if read is None:
        raise TypeError("plot.gallery: images must hold one picture per row, but came as None.")
    found = evaluate(x, y, ks=(1,), similarity=similarity, resamples=0)
    worst = [row.label for row in found.worst]
    shown = chosen_queries(x, found.per_query, worst, queries=queries, near=near, similarity=similarity, seed=seed)
    pictures = _read(Pictures(read), shown)
    width, height = (near + 0.2) * STEP + 1.2, (len(shown) - 1) * STEP + 1.5
    ax = axis(ax, (0.72 * width, 0.72 * height))
    for line, query in enumerate(shown):
        _line(ax, line, query, y.numpy(), pictures, names)
    ax.set_xlim(-0.6, width - 0.6)
    ax.set_ylim(height - 0.85, -0.85)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _read(source: Pictures, shown: list[Query]) -> dict[int, Any]:
    """Arrays by row; drawings on a black background are inverted."""
    rows = {row for query in shown for row in (query.row, *query.near)}
    found = {row: picture for row in sorted(rows) if (picture := source.small(row)) is not None}
    ink = bool(found) and is_drawing(found.values()) and has_black_background(found.values())
    return {row: np.asarray(invert_if(picture, ink)) for row, picture in found.items()}


def _line(ax: Axes, line: int, query: Query, y: np.ndarray, pictures: dict[int, Any], names: Any) -> None:
    for place, row in enumerate((query.row, *query.near)):
        left = place * STEP + (0.2 * STEP if place else 0)  # a gap after the query
        right = y[row] == y[query.row]
        if row in pictures:
            box = (left - 0.5, left + 0.5, line * STEP + 0.5, line * STEP - 0.5)
            ax.imshow(pictures[row], cmap="gray", vmin=0, vmax=255, extent=box, interpolation="nearest")
        color, style = ("#222222", "-") if not place else (POSITIVE, "-") if right else (NEGATIVE, "--")
        width = 1.8 if place else 0.8
        ax.add_patch(frame(left, line * STEP, 1.0, edgecolor=color, linestyle=style, linewidth=width))
        word = class_words(int(y[row]), names, most=14)
        ax.text(left, line * STEP - 0.53, word, ha="center", va="bottom", fontsize=6, color=color)
