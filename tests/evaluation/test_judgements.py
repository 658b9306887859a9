"""Files of judgements and results: the layouts of TREC and BEIR, and lines that are malformed or hostile."""

from __future__ import annotations

import json
import re

import pytest

import nearfar as nf
from nearfar.evaluation import _judgements as judgements
from nearfar.evaluation import read_beir

QRELS = {"q1": {"a": 2, "b": -1}, "q2": {"c": 1}}
RUN = "q1 Q0 a 1 2.5 tag\nq1 Q0 b 2 1.5 tag\nq2 Q0 c 1 -3e-1 tag\n"


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def beir(folder):
    write(folder, "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t-1\nq2\tc\t1\n")
    lines = [{"_id": "a", "title": "An ant", "text": "on a leaf"}, {"_id": "b", "title": "", "text": "a bee"}]
    write(folder, "corpus.jsonl", "\n".join(map(json.dumps, [*lines, {"_id": "c", "text": "a cat"}])) + "\n")
    write(
        folder,
        "queries.jsonl",
        '{"_id": "q1", "text": "ant?"}\n\n{"_id": "q2", "text": "cat?"}\n{"_id": "q3", "text": ""}',
    )
    return folder


def test_every_layout_of_judgements_holds_the_same(tmp_path):
    folder = beir(tmp_path / "beir")
    plain = write(tmp_path, "q.txt", "q1 0 a 2\nq1 0 b -1\n\nq2\t0\tc\t1")
    for place in (plain, str(plain), folder, folder / "qrels" / "test.tsv", QRELS):
        assert judgements.read_qrels("x", place) == QRELS
    windows = write(tmp_path, "w.txt", "\ufeffq1 0 a 2\r\nq1 0 b -1\r\nq2 0 c 1\r\n")
    assert judgements.read_qrels("x", windows) == QRELS


def test_ids_of_beir_may_hold_blanks(tmp_path):
    path = write(tmp_path, "q.tsv", "query-id\tcorpus-id\tscore\nmy query\tits answer\t1 \n\n")
    assert judgements.read_qrels("x", path) == {"my query": {"its answer": 1}}


def test_a_folder_of_beir(tmp_path):
    found = read_beir(beir(tmp_path))
    assert found.queries == {"q1": "ant?", "q2": "cat?"}
    assert found.documents == {"a": "An ant on a leaf", "b": "a bee", "c": "a cat"}
    assert found.qrels == QRELS
    with pytest.raises(FileNotFoundError, match=r"dev\.tsv"):
        read_beir(tmp_path, split="dev")


@pytest.mark.parametrize("size", [1, 7, 1 << 22])
def test_results_are_read_in_chunks(tmp_path, monkeypatch, size):
    """The rank is not used, lines may be empty, and a line may go across chunks."""
    monkeypatch.setattr(judgements, "CHUNK", size)
    path = write(tmp_path, "r.trec", RUN.replace("q2 Q0", "\n  \nq2 Q0").replace("tag\n", "tag\r\n"))
    found = judgements.read_ranked("x", path, {"q1": 0, "q2": 1})
    assert found.query.tolist() == [0, 0, 1]
    assert [list(found.documents)[number] for number in found.document] == ["a", "b", "c"]
    assert found.score.tolist() == [2.5, 1.5, -0.3]
    with pytest.raises(ValueError, match="line 6 of"):
        judgements.read_ranked("x", write(tmp_path, "s.trec", path.read_bytes() + b"short line\n"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q1 Q0 a 1 2.5\n", "line 1 of .* must hold 6 words, but holds 5: 'q1 Q0 a 1 2.5'"),
        (RUN + "q1 Q0 d 1 2.5 my tag\n", "line 4 of .* must hold 6 words, but holds 7"),
        ("q1 Q0 a 1 2.5\nq1 Q0 b 1 2.5 my tag\n", "line 1 of .* holds 5"),
        (RUN + "q1 Q0 d 1 high tag\n", "score in line 4 of .* must be a finite number, but is 'high'"),
        (RUN + "\nq1 Q0 d 1 inf tag\n", "score in line 5 of .* must be a finite number, but is 'inf'"),
        (RUN + "q3 Q0 d 1 nan tag\n", "score in line 4 of "),
        (RUN + "q2 Q0 a 1 1 tag\nq1 Q0 a 3 9 tag\n", "'a' is ranked a second time for query 'q1' by line 5 of"),
        ("", "the run holds no results"),
        (RUN.encode() + b"q1 Q0 \xff 1 1 tag\n", "line 4 of .* is not UTF-8 text"),
        (RUN + "x" * (1 << 20) + "y\n", r"line 4 of .* has more than 1,048,576 characters"),
        (RUN + "x" * (1 << 20) + "y", r"line 4 of .* has more than 1,048,576 characters"),
        ("\x1b[2J\n", r"must hold 6 words, but holds 1: '\\\\x1b\[2J'"),
    ],
)
def test_malformed_results_are_named_by_line(tmp_path, text, message):
    path = write(tmp_path, "r.trec", text)
    with pytest.raises(ValueError, match=message) as error:
        nf.evaluate_retrieval(path, QRELS)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q1 0 a\n", "line 1 of .* must hold 4 words, but holds 3"),
        ("q1 0 a 1\nq1 0 b x\n", "grade in line 2 of .* must be a whole number, but is 'x'"),
        ("q1 0 a 1\nq1 0 b 1.5\n", "grade in line 2 of "),
        ("q1 0 a " + "9" * 5000, "grade in line 1 of "),
        ("q1 0 a 1\nq2 0 a 1\nq1 0 a 1\n", "line 3 of .* judges document 'a' for query 'q1' a second time"),
        ("query-id\tcorpus-id\tscore\nq1\ta\n", "line 2 of .* must hold 3 tab-separated columns, but holds 2"),
        ("query-id\tcorpus-id\tscore\n", "hold no judgements"),
        ("\n\n", "hold no judgements"),
    ],
)
def test_malformed_judgements_are_named_by_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        nf.evaluate_retrieval({"q1": {"a": 1.0}}, write(tmp_path, "q.txt", text))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"_id": "a"}', '{"_id": [], "text": ""}', '{"_id": "a", "text": 3}', "[" * 99999]
)
def test_malformed_texts_are_named_by_line(tmp_path, line):
    write(beir(tmp_path), "corpus.jsonl", '{"_id": "a", "text": "an ant"}\n' + line)
    with pytest.raises(ValueError, match=re.escape("corpus.jsonl must be a JSON object")) as error:
        read_beir(tmp_path)
    assert "line 2 of" in str(error.value)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        nf.evaluate_retrieval(tmp_path / "r.trec", QRELS)
    with pytest.raises(FileNotFoundError, match=r"test\.tsv"):
        nf.evaluate_retrieval({"q1": {"a": 1.0}}, tmp_path)
