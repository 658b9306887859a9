"""`nf.plot`: each picture shows the given numbers on the given axes, and refuses what it cannot draw."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import same_color, to_rgb
from matplotlib.figure import Figure
from PIL import Image

import nearfar as nf
from nearfar.plot._pair_weights import over_scores
from nearfar.plot.style import COLORS, MARKS, NEGATIVE, POSITIVE, words

NAMES = {0: "$a_$ & <b>", 1: "_hidden", 2: "a name that is far longer than any axis has room for"}


@pytest.fixture(autouse=True)
def no_window():
    """Draw into memory, and leave no figure behind."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def some_data(classes: int = 12, each: int = 8, width: int = 10):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat(each)
    centers = torch.randn(classes, width, generator=generator)
    return 0.7 * centers[labels] + torch.randn(len(labels), width, generator=generator), labels


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, 8, 8), dtype=np.uint8)


def pictures(ax):
    """Every picture of the room, drawn on `ax`."""
    x, y = some_data()
    found, loss = nf.evaluate(x, y), nf.losses.DroTopK(k=20)
    yield "recall_curve", lambda: nf.plot.recall_curve({"a": found, "$b": found}, ax=ax)
    yield "class_recall", lambda: nf.plot.class_recall(found, names=NAMES, ax=ax)
    yield "class_confusion", lambda: nf.plot.class_confusion(x, y, names=NAMES, ax=ax)
    yield "embedding_map", lambda: nf.plot.embedding_map(x, y, names=NAMES, ax=ax)
    yield "gallery", lambda: nf.plot.gallery(x, y, images=images(len(x)), names=NAMES, ax=ax)
    yield "weights", lambda: nf.plot.weights({"a": loss.explain(x, y), "$b": loss.explain(x, y)}, ax=ax)


def test_every_picture_draws_on_the_axis_it_is_given_and_returns_it():
    drawn = set()
    for number, name in enumerate(nf.plot.__all__):
        figure = Figure(layout="constrained")
        given = figure.add_subplot()
        draw = dict(pictures(given))[name]
        assert draw() is given, name
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")  # a formula out of "$" would fail here
        assert np.asarray(Image.open(buffer).convert("L")).std() > 5, (number, name)
        drawn.add(name)
    assert drawn == set(nf.plot.__all__)


def test_without_an_axis_there_is_a_new_figure_each_time():
    from matplotlib import pyplot

    for _, draw in pictures(None):
        before = pyplot.get_fignums()
        assert isinstance(draw(), Axes)
        assert len(pyplot.get_fignums()) == len(before) + 1


def test_one_sentence_where_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for _, draw in pictures(None):
        with pytest.raises(ImportError, match=r'is not installed; run pip install "nearfar\[plot\]"\.$'):
            draw()


# ---------------------------------------------------------------- recall


def test_bands_are_the_intervals():
    found = nf.evaluate(*some_data(), ks=(1, 4))
    ax = nf.plot.recall_curve(found, ax=Figure().subplots())
    (band,) = [each for each in ax.collections if isinstance(each, PolyCollection)]
    corners = band.get_paths()[0].vertices
    for place, k in enumerate((1, 4)):
        bar = found.intervals[f"recall@{k}"]
        here = corners[corners[:, 0] == place, 1]
        assert here.min() == pytest.approx(100 * bar.low)
        assert here.max() == pytest.approx(100 * bar.high)
    assert ax.lines[0].get_ydata() == pytest.approx([100 * found.recall[k] for k in (1, 4)])
    low, high = ax.get_ylim()
    assert low < corners[:, 1].min() < corners[:, 1].max() < high
    assert ax.get_legend() is None


def test_curves_of_several_ks_share_one_axis():
    x, y = some_data()
    several = {"few": nf.evaluate(x, y, ks=(1, 8), resamples=0), "more": nf.evaluate(x, y, ks=(1, 2, 8))}
    ax = nf.plot.recall_curve(several, ax=Figure().subplots())
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "8"]
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 2], [0, 1, 2]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["few", "more"]
    assert sum(isinstance(each, PolyCollection) for each in ax.collections) == 1  # none without intervals
    assert nf.plot.recall_curve(several, legend=False, ax=Figure().subplots()).get_legend() is None


# ---------------------------------------------------------------- weights


def drawn_points(ax, color: str) -> np.ndarray:
    """[points, 2] all that is drawn in a color, lowest score first."""
    offsets = [
        np.asarray(each.get_offsets())
        for each in ax.collections
        if isinstance(each, PathCollection)
        and len(each.get_offsets())
        and same_color(each.get_edgecolor()[0][:3], color)
    ]
    points = np.concatenate(offsets)
    return points[np.lexsort((points[:, 1], points[:, 0]))]


@pytest.mark.parametrize("of", ["weights", "influence", "pull"])
def test_positive_and_negative_pairs_are_told_apart(of):
    x, y = some_data()
    found = nf.losses.DroKL(gamma=0.5).explain(x, y)
    ax = nf.plot.weights(found, of=of, ax=Figure().subplots())
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    for mask, color in ((same, POSITIVE), (y[:, None] != y, NEGATIVE)):
        points = torch.stack([found.scores[mask], getattr(found, of)[mask].abs()], dim=1).numpy()
        assert drawn_points(ax, color) == pytest.approx(points[np.lexsort((points[:, 1], points[:, 0]))])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["positive", "negative"]


def test_pairs_that_a_miner_left_out_are_drawn_at_zero():
    x, y = some_data()
    found = nf.losses.MultiSimilarity(miner=0.1).explain(x, y)
    assert int((found.signs > 0).sum()) == 12 * 8 * 7
    assert int((found.signs < 0).sum()) == 96 * 88
    scores, weights = over_scores(found, 1, "weights")
    assert len(scores) == 12 * 8 * 7
    assert bool((weights == 0).any())
    assert float(weights.sum()) > 0


def test_a_pair_shows_the_sum_of_its_triplets():
    x, y = some_data(classes=3, each=3, width=4)
    found = nf.losses.Triplet(mining="all").explain(x, y)
    expected = {1: torch.zeros(9, 9), -1: torch.zeros(9, 9)}
    for i, p, j in torch.nonzero(found.weights).tolist():
        expected[1][i, int(found.positives[i, p])] += found.weights[i, p, j]
        expected[-1][i, j] += found.weights[i, p, j]
    for sign, matrix in expected.items():
        scores, weights = over_scores(found, sign, "weights")
        there = found.signs == sign
        order = found.scores[there].argsort()
        assert torch.equal(scores, found.scores[there][order])
        torch.testing.assert_close(weights, matrix[there][order])


def test_several_losses_have_a_color_each():
    x, y = some_data()
    several = {"worst": nf.losses.DroWorst().explain(x, y), "mean": nf.losses.DroTopK(k=100_000).explain(x, y)}
    ax = nf.plot.weights(several, ax=Figure().subplots())
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == ["worst, positive", "worst, negative", "mean, positive", "mean, negative"]
    assert len(drawn_points(ax, COLORS[0])) == len(drawn_points(ax, COLORS[1])) == 96 * 95


# ---------------------------------------------------------------- maps, classes, gallery


def test_two_columns_are_drawn_as_they_are():
    x, y = some_data(classes=3, width=2)
    ax = nf.plot.embedding_map(x, y, ax=Figure().subplots())
    drawn = np.concatenate([np.asarray(each.get_offsets()) for each in ax.collections])
    assert drawn == pytest.approx(np.concatenate([x[y == label].numpy() for label in range(3)]))
    assert ax.get_xlabel() == "coordinate 1"
    assert "variance" in nf.plot.embedding_map(*some_data(), ax=Figure().subplots()).get_xlabel()


def test_classes_that_are_shown_have_their_own_color_and_mark():
    x, y = some_data()
    ax = nf.plot.embedding_map(x, y, show=[7, 3], names={7: "seven"}, ax=Figure().subplots())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["10 other classes", "seven", "class 3"]
    assert [len(each.get_offsets()) for each in ax.collections] == [80, 8, 8]
    few = nf.plot.embedding_map(x, y, show=[7], points=20, ax=Figure().subplots())
    assert few.get_legend().get_texts()[0].get_text() == "2 of 11 other classes"
    assert len(COLORS) == len(MARKS) == len(set(COLORS)) == len(set(MARKS)) == 8


def test_the_confusion_counts_nearest_neighbors():
    x, y = some_data()
    found = nf.evaluate(x, y)
    ax = nf.plot.class_confusion(x, y, evaluation=found, ax=Figure().subplots())
    unit = torch.nn.functional.normalize(x, dim=1)
    scores = (unit @ unit.T).fill_diagonal_(-2)
    taken_for = y[scores.argmax(dim=1)]
    worst = [row.label for row in found.worst]
    expected = [[int(((y == a) & (taken_for == b)).sum()) for b in worst] for a in worst]
    expected = [[*row, 8 - sum(row)] for row in expected]
    assert [text.get_text() for text in ax.texts] == [str(n) if n else "" for row in expected for n in row]
    assert [tick.get_text() for tick in ax.get_xticklabels()][-1] == "any other"


def test_bars_are_the_worst_classes():
    found = nf.evaluate(*some_data())
    ax = nf.plot.class_recall(found, ax=Figure().subplots())
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([100 * row.recall_at_1 for row in found.worst])


def test_the_gallery_frames_right_and_wrong_answers():
    x, y = some_data()
    ax = nf.plot.gallery(x, y, images=images(len(x)), queries=4, near=3, ax=Figure().subplots())
    assert len(ax.images) == len(ax.patches) == 4 * 4
    told = [text.get_text() for text in ax.texts]
    for line in range(4):
        asked, *found = range(4 * line, 4 * line + 4)
        for place in found:
            color = POSITIVE if told[place] == told[asked] else NEGATIVE
            assert same_color(ax.patches[place].get_edgecolor(), color)


# ---------------------------------------------------------------- words and colors


def test_words_are_taken_as_they_are():
    assert words("$5") == r"\$5"
    assert words("_x") == " _x"  # matplotlib leaves labels with a leading underscore out of legends
    assert len(words("x" * 99)) == 28
    assert words("Larus " + "x" * 40 + " argentatus").endswith("argentatus")
    assert words("a\x1b[2J") == r"a\x1b[2J"


def luminance(color: str) -> float:
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot(channels, (0.2126, 0.7152, 0.0722)))


def test_no_color_is_too_pale_for_white_paper():
    assert min(1.05 / (luminance(color) + 0.05) for color in COLORS) > 2


# ---------------------------------------------------------------- what cannot be drawn


@pytest.mark.parametrize(
    ("draw", "error", "sentence"),
    [
        (lambda x, y: nf.plot.recall_curve(x), TypeError, "evaluation must be an Evaluation .*, but came as Tensor"),
        (lambda x, y: nf.plot.recall_curve({}), TypeError, "but came as a mapping to nothing"),
        (lambda x, y: nf.plot.weights({"a": x}), TypeError, "be an Explanation or .*, but came as a mapping to Tensor"),
        (lambda x, y: nf.plot.weights(nf.losses.DroWorst().explain(x, y), of="mass"), ValueError, "of must be"),
        (lambda x, y: nf.plot.embedding_map(x), ValueError, "labels are needed"),
        (lambda x, y: nf.plot.embedding_map(x, y[:5]), ValueError, "labels must have"),
        (lambda x, y: nf.plot.embedding_map(x * torch.nan, y), ValueError, "embeddings"),
        (lambda x, y: nf.plot.embedding_map(x, y, show=[99]), ValueError, "but label 99 has no rows"),
        (lambda x, y: nf.plot.embedding_map(x, y, show=range(9)), ValueError, "up to 8 labels .* but 9 came"),
        (lambda x, y: nf.plot.embedding_map(x, y, similarity="l1"), ValueError, "similarity must be"),
        (lambda x, y: nf.plot.class_confusion(x, y, evaluation=nf.evaluate(x, y.flip(0))), ValueError, "other rows"),
        (lambda x, y: nf.plot.class_recall(x), TypeError, "but came as Tensor"),
        (lambda x, y: nf.plot.gallery(x, y, images=None), TypeError, "images must hold one picture per row"),
        (lambda x, y: nf.plot.gallery(x, y, images=images(3)), ValueError, "one entry per row"),
        (lambda x, y: nf.plot.gallery(x, y, images=images(96), near=0), ValueError, "near must be a whole number"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(draw, error, sentence):
    with pytest.raises(error, match=sentence) as raised:
        draw(*some_data())
    assert "\n" not in str(raised.value)
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []  # no empty figure is left in the notebook
