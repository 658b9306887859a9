"""Check `nf.evaluate_retrieval` against pytrec_eval on Cranfield; coverage of its intervals; time of a large run.

python benchmarks/quality/retrieval_scores.py --data FOLDER [--wordllama FOLDER]   results/retrieval_scores.{json,md}

FOLDER holds text/cranfield_*; `--wordllama` the unpacked wheel of wordllama 0.4.0, for a run from vectors. Needs
pytrec-eval-terrier. Queries of Cranfield are numbered 1, 2, ... in their order, as in the qrels, not by their `num`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytrec_eval
import torch
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

import nearfar as nf
from nearfar._utils.figure import figure_file
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json, markdown
from nearfar.evaluation import Vectors
from nearfar.evaluation._bootstrap import intervals

RESULTS = Path(__file__).parents[1] / "results" / "retrieval_scores.json"
PICTURE = RESULTS.parents[2] / "docs" / "images" / "retrieval-scores.png"
KS = (1, 3, 5, 10, 100, 1000)
THEIRS = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
SHOWN = ("ndcg@10", "map@100", "mrr@10", "recall@100", "precision@10")


def cranfield(folder):
    documents = (folder / "cranfield_documents.xml").read_text(encoding="utf-8")
    texts = re.findall(r"<docno>\s*(\d+)\s*</docno>.*?<text>(.*?)</text>", documents, re.S)
    queries = re.findall(r"<title>(.*?)</title>", (folder / "cranfield_queries.xml").read_text(encoding="utf-8"), re.S)
    return dict(texts), {str(number): text for number, text in enumerate(queries, start=1)}


def lexical(documents, queries, bm25):
    """Scores [queries, documents] of tf-idf (cosine) or BM25."""
    counter = CountVectorizer(stop_words="english")
    x, q = counter.fit_transform(documents.values()), counter.transform(queries.values())
    if not bm25:
        weigh = TfidfTransformer(sublinear_tf=True).fit(x)
        return (weigh.transform(q) @ weigh.transform(x).T).toarray()
    length = np.asarray(x.sum(axis=1)).ravel()
    frequency = np.bincount(x.indices, minlength=x.shape[1])
    x = x.tocsr().astype(float)
    row = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    x.data = x.data * 2.2 / (x.data + 1.2 * (0.25 + 0.75 * length[row] / length.mean()))
    x.data *= np.log1p((x.shape[0] - frequency + 0.5) / (frequency + 0.5))[x.indices]
    return (q @ x.T).toarray()


def embed(folder, texts):
    """Mean token vectors of WordLlama, read from its two files."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    table = load_file(next(folder.rglob("*256.safetensors")))["embedding.weight"].astype(np.float32)
    encode = Tokenizer.from_file(str(next(folder.rglob("*tokenizer_config.json"))))
    words = [encode.encode(text, add_special_tokens=False).ids for text in texts.values()]
    rows = [table[ids].mean(axis=0) if ids else 0 * table[0] for ids in words]  # two documents are empty
    return Vectors(torch.from_numpy(np.stack(rows)), name=list(texts))


def as_run(scores, documents, queries):
    names = list(documents)
    return {
        query: {names[place]: float(row[place]) for place in np.argsort(-row, kind="stable")[:1000]}
        for query, row in zip(queries, scores, strict=True)
    }


def worst_difference(found, run, qrels):
    """The largest absolute difference of a score of a query from pytrec_eval's."""
    cuts = ",".join(map(str, KS))
    measures = {f"{name}.{cuts}" for name in THEIRS.values()} | {"recip_rank"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    worst = {}
    for measure, name in THEIRS.items():
        gaps = [
            abs(found.per_query[f"{measure}@{k}"][row] - theirs[query][f"{name}_{k}"])
            for row, query in enumerate(found.ids)
            for k in KS
        ]
        worst[measure] = max(gaps)
    for k in KS:  # their reciprocal rank has no k
        shown = [
            {**run, query: dict(sorted(run[query].items(), key=lambda d: (d[1], d[0]))[-k:])} for query in found.ids
        ]
        cut = {query: each[query] for query, each in zip(found.ids, shown, strict=True)}
        ranks = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(cut)
        gaps = [
            abs(found.per_query[f"mrr@{k}"][row] - ranks[query]["recip_rank"]) for row, query in enumerate(found.ids)
        ]
        worst["mrr"] = max(worst.get("mrr", 0), *gaps)
    return worst


def coverage(values, draws, sizes, seed=0):
    """How often the interval of n queries drawn from all holds the mean over all."""
    rng, rows = np.random.default_rng(seed), []
    for size in sizes:
        inside = 0
        for draw in range(draws):
            chosen = values[rng.integers(len(values), size=size)]
            (bar,) = intervals(chosen[:, None], np.arange(size), unit="query", resamples=1000, seed=draw)
            inside += bar.low <= values.mean() <= bar.high
        rows.append({"queries": size, "inside": inside / draws})
    return rows


def large(queries=10_000, results=1_000):
    """Seconds to read and score a run file of that size."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.trec"
        with path.open("w", encoding="utf-8") as stream:
            for query in range(queries):
                found = zip(
                    rng.choice(100_000, results, replace=False).tolist(), rng.random(results).tolist(), strict=True
                )
                stream.write("".join(f"q{query} Q0 d{d} 0 {score:.6f} tag\n" for d, score in found))
        qrels = {f"q{q}": dict.fromkeys((f"d{d}" for d in rng.integers(100_000, size=20)), 1) for q in range(queries)}
        wall, cpu = time.perf_counter(), time.process_time()
        nf.evaluate_retrieval(path, qrels, ks=(10, 100, 1000))
        size = path.stat().st_size
    return {"lines": queries * results, "MB": size / 1e6, "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall}  # fmt: skip


def main():
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--wordllama", type=Path)
    reader.add_argument("--draws", type=int, default=1000)
    given = reader.parse_args()
    folder = given.data / "text"
    documents, queries = cranfield(folder)
    path = folder / "cranfield_qrels.txt"
    qrels = nf.evaluation._judgements.read_qrels("benchmark", path)
    table = {name: lexical(documents, queries, name == "BM25") for name in ("tf-idf", "BM25")}
    sources = {name: as_run(scores, documents, queries) for name, scores in table.items()}
    sources["BM25, rounded to whole numbers"] = as_run(table["BM25"].round(), documents, queries)
    if given.wordllama is not None:
        sides = embed(given.wordllama, queries), embed(given.wordllama, documents)
        sources["WordLlama"] = as_run((nf.similarity.Cosine()(sides[0].x, sides[1].x)).numpy(), documents, queries)
        found = nf.evaluate_retrieval(sides, path, ks=KS, resamples=0)
        print("from vectors:", found.means["ndcg@10"])
    results, scored = [], {}
    for name, run in sources.items():
        scored[name] = found = nf.evaluate_retrieval(run, path, ks=KS)
        results.append({"run": name, **{score: found.means[score] for score in SHOWN},
                        "worst": worst_difference(found, run, qrels),
                        "curve": [vars(found.intervals[f"ndcg@{k}"]) for k in KS]})  # fmt: skip
        print(results[-1])
    sizes, better = (25, 50, 100, 200), list(scored)[-1]
    covered = {name: coverage(scored["BM25"].per_query[name], given.draws, sizes) for name in SHOWN}
    change = scored[better].per_query["ndcg@10"] - scored["BM25"].per_query["ndcg@10"]
    covered["difference of ndcg@10, centered"] = coverage(change - change.mean(), given.draws, sizes)
    record = {"documents": len(documents), "queries": len(queries), "judgements": sum(map(len, qrels.values())),
              "coverage": covered, "large": large(), "results": results}  # fmt: skip
    write_text(RESULTS, as_json(record))
    write_text(RESULTS.with_suffix(".md"), tables(record))
    draw(record)


def draw(record):
    """The picture of docs/guides/retrieval-scores.md: nDCG@k of the runs, with intervals over queries."""
    with figure_file(PICTURE, (6.4, 3.6)) as ((axes,),):
        shown = [row for row in record["results"] if "rounded" not in row["run"]]
        for place, row in enumerate(shown):
            x = [k * 1.08 ** (place - 1) for k in KS]
            value, low, high = (
                np.array([100 * each[end] for each in row["curve"]]) for end in ("value", "low", "high")
            )
            axes.errorbar(x, value, [value - low, high - value], marker="o", capsize=3, label=row["run"])
        axes.set(xscale="log", xlabel="k", ylabel="nDCG@k, %", xticks=KS, xticklabels=KS)
        axes.minorticks_off()
        axes.legend(frameon=False)


def tables(record):
    worst = max(gap for row in record["results"] for gap in row["worst"].values())
    rows = [[row["run"], *(f"{100 * row[score]:.1f}" for score in SHOWN), f"{max(row['worst'].values()):.1g}"]
            for row in record["results"]]  # fmt: skip
    inside = [[name, *(f"{100 * each['inside']:.1f}" for each in row)] for name, row in record["coverage"].items()]
    sizes = [f"{each['queries']} queries" for each in next(iter(record["coverage"].values()))]
    big = record["large"]
    what = f"{record['documents']:,} documents, {record['queries']} queries, {record['judgements']:,} judgements"
    return f"""Cranfield: {what}.
The largest difference of any score of any query at k = {", ".join(map(str, KS))} from pytrec_eval is {worst:.1g}.

{markdown(["run", *SHOWN, "largest difference"], rows)}

How often a 95% interval from queries drawn with replacement holds the mean over all queries, in percent (BM25; the last
line is the paired difference, less its mean: 100 minus it is how often `compare` errs where both are equal):

{markdown(["score", *sizes], inside)}

A run file of {big["lines"]:,} lines ({big["MB"]:.0f} MB) is read and scored in {big["cpu"]:.0f} s of CPU time.
"""


if __name__ == "__main__":
    main()
