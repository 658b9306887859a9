"""Texts from CSV, JSONL and Parquet files: classes, pairs, hard negatives, and one-sentence errors."""

import json

import numpy as np
import pytest
import torch
from needs import need
from texts import write_csv

from nearfar.data import Document, Texts, Tokens, open_data, part
from nearfar.data._registry import kind_of
from nearfar.data._splits import class_disjoint
from nearfar.data._texts import pairs, shorten
from nearfar.data._tokens import NOTHING, pad, vocabulary_of

ROWS = [
    ("red hat", "hat"),
    ("blue hat", "hat"),
    ("old shoe", "shoe"),
    ("new shoe", "shoe"),
    ("ring", "a"),
    ("gem", "a"),
]


def as_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def classes(request, tmp_path):
    path, rows = tmp_path / f"data.{request.param}", [dict(zip(("text", "label"), row, strict=True)) for row in ROWS]
    if request.param == "csv":
        return write_csv(path, ("text", "label"), ROWS)
    if request.param == "jsonl":
        return as_jsonl(path, rows)
    pandas = need("pandas", "pyarrow")
    pandas.DataFrame(rows).to_parquet(path)
    return path


def test_classes_are_read_alike_from_every_format(classes):
    data = open_data(None, classes)
    assert data.name == "data"
    assert data.about == "texts with classes, from the columns text and label"
    found = {(text, s.classes[y]) for s in (data.train, data.test) for text, y in zip(s.texts, s.labels, strict=True)}
    assert found == set(ROWS)
    assert set(data.train.classes).isdisjoint(data.test.classes)
    assert len(data.train.classes) + len(data.test.classes) == 3
    assert data.train.names == data.train.texts


def test_a_split_is_kept(tmp_path):
    rows = [("a", "x", "test"), ("b", "x", "train"), ("c", "y", "train")]
    data = open_data("texts", write_csv(tmp_path / "a.csv", ("text", "label", "split"), rows))
    assert (data.train.texts, data.test.texts) == (["b", "c"], ["a"])


def test_pairs_are_queries_and_documents_of_one_class():
    """The document d answers a and b, and e is no answer to a although it answers c."""
    found = pairs([("a", "d", "e"), ("b", "d", "f"), ("c", "e", "d")])
    assert found.texts == ["a", "d", "e", "b", "f", "c"]
    assert found.queries.tolist() == [True, False, False, True, False, True]
    assert found.records.tolist() == [[0, 1, 2], [3, 1, 4], [5, 2, 1]]
    y = found.labels
    assert y[0] == y[1] == y[3]
    assert y[2] == y[5]
    assert len({y[0], y[2], y[4]}) == 3
    assert not isinstance(found[0], Document)
    assert isinstance(found[1], Document)


def test_a_part_of_pairs_keeps_whole_records():
    whole = pairs([("a", "d", "e"), ("b", "f", "d"), ("c", "e", "f")])
    chosen = part(whole, np.flatnonzero(whole.labels == whole.labels[0]))
    assert [[chosen.texts[row] for row in record] for record in chosen.records] == [["a", "d", "e"]]
    assert chosen.labels[chosen.records[0, 0]] == chosen.labels[chosen.records[0, 1]]
    assert chosen.labels[chosen.records[0, 0]] != chosen.labels[chosen.records[0, 2]]


def test_pairs_are_split_by_queries(tmp_path):
    rows = [(f"q{i}", f"d{i}", f"n{i}") for i in range(20)]
    data = open_data(None, write_csv(tmp_path / "p.csv", ("query", "document", "negative"), rows))
    assert len(data.test.records) == 4
    assert len(data.train.records) == 16
    asked = [{s.texts[row] for row in s.records[:, 0]} for s in (data.train, data.test)]
    assert asked[0].isdisjoint(asked[1])
    for seed in range(4):
        rest, held = class_disjoint(data.train, 0.25, seed=seed)
        assert data.train.queries[held].sum() == 4, "only classes of queries are drawn"
        assert len(rest) + len(held) == len(data.train)


def test_a_list_of_negatives_is_read_as_columns(tmp_path):
    rows = [{"anchor": f"q{i}", "positive": f"d{i}", "negatives": [f"a{i}", f"b{i}"]} for i in range(6)]
    data = open_data(None, as_jsonl(tmp_path / "p.jsonl", rows))
    assert data.train.records.shape[1] == 4
    assert "2 hard negatives" in data.about


def test_kinds_of_csv_are_told_apart(tmp_path):
    assert kind_of(write_csv(tmp_path / "a.csv", ("path", "label"), [("x.png", "a")])) == "manifest"
    assert kind_of(write_csv(tmp_path / "b.csv", ("text", "label"), ROWS)) == "texts"
    assert kind_of(write_csv(tmp_path / "c.csv", ("question", "answer"), ROWS)) == "texts"


BAD = {
    "columns": ("title,price\na,1\n", "must have the columns text and label, or query and document"),
    "empty": ("text,label\n,a\nb,c\n", "row 2 .* must fill text, label"),
    "blank": ("text,label\n' ',a\n\u00a0,c\n", "sample 1 .* is an empty text"),
    "twice": ("id,text,label\n1,a,b\n1,c,d\n", "1 stands in rows 2 and 3"),
    "split": ("text,label,split\na,b,dev\n", "must be train or test"),
    "nothing": ("text,label\n", "holds no rows"),
    "one side": ("text,label,split\na,b,train\n", "no sample .* is for test"),
    "scores": ("query,document,score\na,b,0.5\n", "pairs with a column score, but all pairs must be right"),
    "marks": ("question,answer,label\na,b,0\n", "pairs with a column label"),
    "one query": ("query,document\na,b\n", "two classes or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_csv_is_one_sentence(case, tmp_path):
    content, words = BAD[case]
    path = tmp_path / "bad.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as error:
        open_data("texts", path)
    assert str(error.value).count("\n") == 0


def test_bad_files_are_one_sentence(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\ncaf\xe9,a\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        open_data("texts", path)
    path = tmp_path / "a.jsonl"
    for content, words in {
        '{"text": 1': "line 1 .* is no JSON object",
        '{"text": "a"}\n': "must have the columns",
        '{"text": "a", "label": null}\n': "row 1 .* must fill",
        '{"text": ["a"], "label": "b"}\n': "row 1 .* must fill",
        '{"query": "a", "document": "b", "negatives": ["c"]}\n{"query": "a", "document": "b"}': "row 2 .* must fill",
    }.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            open_data(None, path)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="cannot be read as a Parquet file"):
        open_data(None, path)
    with pytest.raises(ValueError, match=r"must end in one of \.csv"):
        open_data("texts", tmp_path / "a.txt")


def test_long_texts_have_short_names():
    assert len(shorten("word " * 500)) == 200
    assert len(Texts(["word " * 500, "b"], [0, 1]).names[0]) == 200


def test_a_vocabulary_is_the_words_of_the_texts():
    pytest.importorskip("tokenizers")
    made = vocabulary_of(["red shoes", "red hat"])
    assert made == vocabulary_of(["red hat", "red shoes"])
    tokens = Tokens(made, length=3)
    assert tokens("Red, red shoes hat!").tolist() == [1, 1, 3]
    assert tokens("").tolist() == [0]
    assert tokens("unknown hat").tolist() == [0, 2]
    assert tokens.describe() != Tokens(made, length=4).describe()
    assert tokens.describe() != Tokens(vocabulary_of(["blue"]), length=3).describe()
    with pytest.raises(TypeError, match="takes texts, but Tensor came"):
        tokens(torch.ones(3))


def test_padding_fills_short_rows():
    rows = pad([torch.tensor([1, 2, 3]), torch.tensor([4])])
    assert torch.stack(rows).tolist() == [[1, 2, 3], [4, NOTHING, NOTHING]]
    pictures = [torch.ones(2, 2), torch.ones(2, 2)]
    assert pad(pictures) == pictures
