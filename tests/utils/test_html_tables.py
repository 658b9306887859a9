"""HTML tables of results in notebooks: they hold the numbers, escape all text and run no script."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
import torch

import nearfar as nf
from nearfar._utils import html
from nearfar.doctor._findings import Diagnosis, Finding
from nearfar.evaluation import ClassRow

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"
TAGS = {"table", "thead", "tbody", "tr", "th", "td", "div", "p", "details", "summary", "svg", "g", "line", "circle"}
X = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9], [0.7, 0.8], [0.3, 0.4]])
Y = torch.tensor([0, 0, 1, 1, 0, 1])


class Reader(HTMLParser):
    """Collects tags, attributes and words, and fails on what is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.attributes, self.words, self.open = set(), [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(text: str) -> Reader:
    """Parsed, and checked to be harmless and without colors of its own."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert reader.tags <= TAGS
    for name, value in reader.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href", "class", "id")
        assert "#" not in value  # a color that suits a light notebook hides in a dark one
        assert "url" not in value
    return reader


def test_an_evaluation():
    found = nf.evaluate(X, Y, ks=(1, 2))
    words = read(found._repr_html_()).words
    assert words[0] == repr(found).splitlines()[0]
    for name, value in found.scores().items():
        assert words[words.index(name) + 1] == f"{100 * value:.1f}"
        bar = found.intervals[name]
        assert words[words.index(name) + 2] == f"{100 * bar.low:.1f} to {100 * bar.high:.1f}"
    assert "the classes that fare worst" in words


def test_an_evaluation_without_intervals_or_classes():
    relation = nf.Relation.from_matrix(Y[:, None] == (Y + 1) % 2)
    for found in (nf.evaluate(X, Y, resamples=0), nf.evaluate(X, relation)):
        read(found._repr_html_())
    assert "fare worst" not in found._repr_html_()


def test_an_explanation():
    found = nf.losses.DroTopK(k=2).explain(X, Y)
    words = read(found._repr_html_()).words
    assert words[0] == f"value {float(found.value):.6g}; the weight is spread over {found.effective_pairs:.1f} pairs"
    at = words.index("pairs")
    assert words[at + 1 : at + 3] == ["12", "18"]
    at = words.index("moved by the gradient")
    assert words[at + 1 : at + 3] == [str(found.active_positives), str(found.active_negatives)]
    i, j = divmod(int(found.pull.abs().argmax()), 6)
    at = words.index("share of the gradient", words.index("anchor"))
    sign = "positive" if Y[i] == Y[j] else "negative"
    assert words[at + 1 : at + 5] == [str(i), str(j), sign, f"{found.scores[i, j]:.3f}"]
    assert len(words[at + 1 :]) == 5 * int((found.pull != 0).sum())  # a line for each that is moved, of five words


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("rows", [0, 1, 2], ids=["empty", "one row", "no positive pair"])
def test_an_explanation_of_little(rows):
    found = nf.losses.DroTopK(k=2).explain(X[1 : 1 + rows], Y[1 : 1 + rows])
    assert read(found._repr_html_()).words[0].startswith("value 0")
    assert found.signs.shape == found.scores.shape


def test_an_explanation_of_triplets_and_of_a_value_an_anchor():
    read(nf.losses.Triplet().explain(X, Y)._repr_html_())
    each = nf.losses.MultiSimilarity(reduction="none").explain(X, Y)
    assert read(each._repr_html_()).words[0].startswith("value 6 anchors; ")


def test_a_diagnosis():
    told = Diagnosis((Finding("collapse", "alarm", "All rows are one.", "Lower optimizer.lr."),))
    words = read(told._repr_html_()).words
    assert words[0] == "Not healthy: 1 alarm."
    assert words[-4:] == ["alarm", "collapse", "All rows are one.", "Lower optimizer.lr."]
    assert read(Diagnosis(())._repr_html_()).words == ["Healthy."]


def test_hostile_words_are_escaped():
    found = dataclasses.replace(nf.evaluate(X, Y), per_class=(ClassRow(HOSTILE, 3, 0.0, 0.0, 0.0),))
    told = Diagnosis((Finding(HOSTILE, "alarm", HOSTILE, HOSTILE),))
    for shown, times in ((found, 1), (told, 3)):
        assert read(shown._repr_html_()).words.count(HOSTILE) == times
    for made in (html.table([HOSTILE], [[HOSTILE]], caption=HOSTILE), html.folded(HOSTILE, "")):
        assert HOSTILE in read(made).words
