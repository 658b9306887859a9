"""Ranked documents under graded judgements: every score against a slow oracle, ties, gaps, vectors, intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import retrieval as oracle

import nearfar as nf
from nearfar.evaluation import Vectors

KS = (1, 3, 10)
MEASURES = ("ndcg", "map", "mrr", "recall", "precision")
NAMES = st.sampled_from([f"d{number}" for number in range(12)])
QUERIES = st.sampled_from([f"q{number}" for number in range(5)])
RUNS = st.dictionaries(QUERIES, st.dictionaries(NAMES, st.integers(0, 4).map(float)), min_size=1)
QRELS = st.dictionaries(QUERIES, st.dictionaries(NAMES, st.integers(-1, 3), min_size=1), min_size=1)


def judge(run, qrels, **options):
    return nf.evaluate_retrieval(run, qrels, **{"ks": KS, "resamples": 0, **options})


def some(seed, queries=30, documents=60):
    rng = np.random.default_rng(seed)
    names = [f"d{number}" for number in range(documents)]
    run = {f"q{q}": dict(zip(names, rng.normal(size=documents).tolist(), strict=True)) for q in range(queries)}
    rng = np.random.default_rng(100)
    qrels = {
        f"q{q}": {names[d]: int(rng.integers(1, 4)) for d in rng.integers(0, documents, 5)} for q in range(queries)
    }
    return run, qrels


@given(RUNS, QRELS)
@settings(max_examples=100)
def test_every_score_is_that_of_the_equations(run, qrels):
    """With ties, negative grades, unjudged documents, queries without results and without right answers."""
    found = judge(run, qrels)
    assert found.ids == tuple(qrels)
    for k in KS:
        wanted = [oracle.judged(run, qrels, query, k) for query in qrels]
        for measure in MEASURES:
            column = [each[measure] for each in wanted]
            np.testing.assert_allclose(found.per_query[f"{measure}@{k}"], column, rtol=0, atol=1e-12)
            assert found.means[f"{measure}@{k}"] == pytest.approx(np.mean(column), abs=1e-12)
    assert found.missing == sum(not run.get(query) for query in qrels)
    assert found.unjudged == sum(query not in qrels for query, results in run.items() if results)
    assert found.relevant.tolist() == [sum(grade > 0 for grade in grades.values()) for grades in qrels.values()]


def test_a_table_worked_by_hand():
    run = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    found = judge(run, {"q": {"b": 2, "z": 1}}, ks=(2, 3)).means
    gain, best = 2 / np.log2(3), 2 + 1 / np.log2(3)
    assert found["ndcg@2"] == pytest.approx(gain / best)
    assert found["map@3"] == pytest.approx(0.5 / 2)
    assert found["mrr@3"] == found["precision@2"] == found["recall@3"] == 0.5
    assert found["precision@3"] == pytest.approx(1 / 3)


def test_of_equal_scores_the_larger_name_is_first():
    """trec_eval's rule; "d10" is smaller than "d9" as text."""
    assert judge({"q": {"d9": 1.0, "d10": 1.0}}, {"q": {"d9": 1}}).means["mrr@1"] == 1
    assert judge({"q": {"d9": 1.0, "d10": 1.0}}, {"q": {"d10": 1}}).means["mrr@1"] == 0


def test_the_order_of_queries_documents_and_lines_is_of_no_account(tmp_path):
    run, qrels = some(0)
    lines = [f"{q} Q0 {d} 0 {s!r} tag" for q, found in run.items() for d, s in found.items()]
    np.random.default_rng(0).shuffle(lines)
    (tmp_path / "r.trec").write_text("\n".join(lines), encoding="utf-8")
    assert (
        judge(tmp_path / "r.trec", qrels).per_query["map@10"].tolist() == judge(run, qrels).per_query["map@10"].tolist()
    )


def test_what_does_not_count():
    """Queries without judgements, documents that are judged wrong, documents of grade 0."""
    run, qrels = some(1)
    more = {**run, "other": {"d0": 1.0}}
    wider = {query: {**grades, "never": 0, "worse": -2} for query, grades in qrels.items()}
    assert judge(more, wider).means == judge(run, qrels).means
    assert judge(more, wider).unjudged == 1


def test_a_query_without_results_scores_zero():
    run, qrels = some(2, queries=4)
    whole, less = judge(run, qrels), judge({q: run[q] for q in list(run)[:3]}, qrels)
    assert less.missing == 1
    for name, value in less.per_query.items():
        assert value[3] == 0
        assert value[:3].tolist() == whole.per_query[name][:3].tolist()
    assert "1 without results, which score 0" in repr(less)
    assert "1 without a relevant document" in repr(judge(run, {**qrels, "q0": {"d1": 0}}))


def test_vectors_are_searched_exactly():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 5, generator=generator), torch.randn(40, 5, generator=generator)
    queries = Vectors(x, name=[f"q{i}" for i in range(9)])
    documents = Vectors(y, name=[f"d{i}" for i in range(40)])
    qrels = {f"q{i}": {f"d{(7 * i) % 40}": 2, f"d{i}": 1} for i in range(8)}
    for similarity in ("cosine", "dot", "euclidean"):
        table = oracle.scores(x.tolist(), y.tolist(), similarity)
        run = {f"q{i}": {f"d{j}": table[i, j] for j in range(40)} for i in range(9)}
        found = judge((queries, documents), qrels, similarity=similarity)
        assert found.per_query["ndcg@10"].tolist() == pytest.approx(judge(run, qrels).per_query["ndcg@10"].tolist())
        assert (found.unjudged, found.missing) == (1, 0)


def test_of_equal_vectors_the_earlier_row_is_first():
    documents = Vectors(torch.ones(3, 2), name=["a", "b", "c"])
    assert judge((Vectors(torch.ones(1, 2), name=["q"]), documents), {"q": {"a": 1}}).means["mrr@1"] == 1


def test_intervals_and_comparison():
    run, qrels = some(3, queries=60)
    better = {q: {d: s + 2 * (d in qrels[q]) for d, s in found.items()} for q, found in run.items()}
    a, b = (nf.evaluate_retrieval(each, qrels, ks=(10,)) for each in (run, better))
    bar = a.intervals["ndcg@10"]
    assert bar.low < a.means["ndcg@10"] == bar.value < bar.high
    found = nf.compare(a, b)
    assert (found.score, found.verdict, found.unit) == ("ndcg@10", "better", "query")
    assert found.difference.value == pytest.approx(b.means["ndcg@10"] - a.means["ndcg@10"])
    assert nf.compare(b, a, score="recall@10").verdict == "worse"
    assert nf.compare(a, a).verdict == "cannot tell"
    assert not judge({"q": {"a": 1.0}}, {"q": {"a": 1}}, resamples=100).intervals, "a single query has no interval"


def test_only_evaluations_of_one_set_are_compared():
    run, qrels = some(4)
    a = judge(run, qrels)
    spaces = nf.evaluate(torch.eye(4), torch.tensor([0, 0, 1, 1]), resamples=0)
    for b in (judge(run, dict(list(qrels.items())[1:])), judge(run, {**qrels, "q0": {"d1": 1}}), spaces):
        with pytest.raises(ValueError, match="not of the same queries"):
            nf.compare(a, b)
    with pytest.raises(ValueError, match=r"score must be one of .*map@10.*'map@7'"):
        nf.compare(a, a, score="map@7")


def test_tables_for_people():
    run, qrels = some(5)
    found = nf.evaluate_retrieval(run, qrels, ks=(5,))
    assert "ndcg@5" in repr(found)
    assert "<svg" in found._repr_html_()
    record = found.to_dict()
    assert record["scores"] == found.means
    assert record["intervals"]["map@5"]["low"] == found.intervals["map@5"].low


@pytest.mark.parametrize(
    ("run", "qrels", "options", "message"),
    [
        ({"q": {"a": np.nan}}, {"q": {"a": 1}}, {}, "score of query 'q' must be a finite number, but is 'nan'"),
        ({"q": {"a": "x"}}, {"q": {"a": 1}}, {}, "score of query 'q' must be a finite number"),
        ({}, {"q": {"a": 1}}, {}, "run holds no results"),
        ({"q": {"a": 1.0}}, {}, {}, "hold no judgements"),
        ({"q": {"a": 1.0}}, {"q": {"a": 0.5}}, {}, "grade of document 'a' for query 'q' must be a whole number"),
        ({"q": {"a": 1.0}}, {"q": {"a": True}}, {}, "must be a whole number below 1e9, but is True"),
        ({"q": {"a": 1.0}}, {"q": {"a": 10**400}}, {}, "must be a whole number below 1e9, but is 1000"),
        ({"q": {"a": 1.0}}, {"q": {"a": 1}}, {"ks": 5}, "ks must be whole numbers from 1 on"),
        ({"q": {"a": 1.0}}, {"q": ["a"]}, {}, "each query must map documents to numbers, but list came"),
        ({"q": [("a", 1.0)]}, {"q": {"a": 1}}, {}, "each query must map documents to numbers, but list came"),
        ([], {"q": {"a": 1}}, {}, "run must be a path, a mapping or two Vectors, but came as list"),
        ({"q": {"a": 1.0}}, [], {}, "qrels must be a path or a mapping, but came as list"),
        ((1, 2), {"q": {"a": 1}}, {}, "two Vectors whose names are their ids"),
        ({"q": {"a": 1.0}}, {"q": {"a": 1}}, {"ks": (0,)}, "evaluate_retrieval: ks must be whole numbers from 1 on"),
    ],
)
def test_wrong_inputs(run, qrels, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        judge(run, qrels, **options)


def test_names_of_vectors_must_differ():
    side = Vectors(torch.eye(2), name=["a", "a"])
    with pytest.raises(ValueError, match="names of the queries must differ"):
        judge((side, Vectors(torch.eye(2), name=["b", "c"])), {"a": {"b": 1}})
