"""`nearfar evaluate` and `nearfar compare`: score an embedding space, and compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar._utils.checks import check_choice
from nearfar._utils.console import Terminal, say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import Extra, check_one, check_suffix, load_labeled, parse_numbers, save_json
from nearfar.cli.launch import Processes, is_first, launch, share_evaluation

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from nearfar.evaluation import Comparison, Evaluation
    from nearfar.evaluation._scored import Scored

Source = Annotated[Path, typer.Argument(metavar="VECTORS|RUN", help="A vectors.npz, or a run folder.")]
Similarity = Annotated[str, typer.Option(help="Similarity: cosine, dot or euclidean.")]
Ties = Annotated[
    str, typer.Option(help="Order of equal scores: by position (place), or correct ones first (favorable).")
]
Unit = Annotated[str, typer.Option(help="Unit of the bootstrap: class (for unseen classes) or query.")]
Seed = Annotated[int, typer.Option(help="Seed of the bootstrap and of k-means.")]
Qrels = Annotated[
    Path | None, typer.Option(help="Judgements of documents: a qrels file of TREC or BEIR, or a folder of BEIR.")
]


def evaluate(
    vectors: Annotated[
        Path | None, typer.Argument(metavar="[VECTORS|RUN]", help="A vectors.npz, or a run folder.")
    ] = None,
    more: Extra = None,
    results: Annotated[
        Path | None, typer.Option("--run", help="Score ranked documents, a run file of TREC, by --qrels.")
    ] = None,
    qrels: Qrels = None,
    k: Annotated[
        list[int] | None,
        typer.Option("-k", help="K of recall@K; repeatable. Default: 1, 2, 4, 8; with --qrels: 1, 10, 100."),
    ] = None,
    data_set: Annotated[
        str | None, typer.Option(help="Use the K of cub, cars, sop, inshop, omniglot or glyphs.")
    ] = None,
    gallery: Annotated[Path | None, typer.Option(help="Vectors to search instead of the queries themselves.")] = None,
    similarity: Similarity = "cosine",
    clustering: Annotated[bool, typer.Option("--clustering", help="Also compute NMI, AMI and F1 of k-means.")] = False,
    ties: Ties = "place",
    unit: Unit = "class",
    seed: Seed = 0,
    dims: Annotated[
        str | None, typer.Option(help="Also score the first dimensions alone, at widths such as 64,128,256.")
    ] = None,
    codes: Annotated[str | None, typer.Option(help="Score vectors that are quantized to int8 or bits.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the full result to this JSON file.")] = None,
    per_query: Annotated[Path | None, typer.Option(help="With --qrels: write the scores of each query as CSV.")] = None,
    processes: Processes = None,
) -> None:
    """Score vectors or ranked documents, with confidence intervals.

    Vectors are scored by their classes: recall@K, MAP@R and others, and the worst classes. With --qrels, ranked
    documents are scored by judgements: nDCG, MAP, MRR, recall and precision at K. They come from a run file (--run), or
    from the vectors of queries and of documents (--gallery), whose names are their ids.
    """
    from nearfar.evaluation import evaluate as judge
    from nearfar.evaluation._fingerprint import check_same_network

    check_one("VECTORS", vectors, more)
    if results is not None or qrels is not None:
        if clustering or data_set or dims or codes or (ties, unit) != ("place", "class"):
            named = "--clustering, --data-set, --dims, --codes, --ties and --unit"
            raise ValueError(f"{named} need classes; leave them out with --qrels.")
        ranked = check_ranked(vectors, gallery, results, processes)
        score_ranked(ranked, need_qrels(qrels), k, similarity, seed, json, per_query)
        return
    if vectors is None or per_query is not None:
        raise ValueError("name VECTORS, or --run and --qrels (which --per-query needs).")
    if launch(processes):
        return
    queries = load_labeled(vectors)
    found_in = None if gallery is None else load_labeled(gallery)
    if found_in is not None:
        check_same_network("evaluate", (str(vectors), queries.fingerprint), (str(gallery), found_in.fingerprint))
        found_in = found_in.in_terms_of(queries)
    options: dict[str, Any] = {"similarity": similarity, "ties": ties, "unit": unit, "seed": seed}
    options |= {"dims": parse_numbers("--dims", dims)} if dims else {}
    with share_evaluation("evaluate"), Progress(f"evaluating {len(queries):,} vectors", shown=is_first()) as watch:
        x, ref = (None if each is None else quantized(each.x, codes) for each in (queries, found_in))
        found = judge(
            x,
            queries.y,
            ks=choose_ks(k, data_set),
            ref_emb=ref,
            ref_labels=None if found_in is None else found_in.y,
            clustering=clustering,
            watch=watch,
            **options,
        )
    if not is_first():
        return
    if json is not None:
        about = {
            "vectors": str(vectors),
            "gallery": None if gallery is None else str(gallery),
            "codes": codes,
            **options,
        }
        save_json(json, about | with_names(found.to_dict(), queries.class_names()))
    show(found, str(vectors), queries.class_names())


def show(found: Evaluation, title: str, names: dict[int, str]) -> None:
    """Print the scores, the curve over dimensions if there is one, the worst classes and the lone queries."""
    console = Terminal()
    console.print(score_table(found, title))
    if found.curve:
        console.print(curve_table(found))
    console.print(class_table(found, names))
    console.print(describe_lone(found))


def check_ranked(vectors: Path | None, gallery: Path | None, results: Path | None, processes: int | None) -> Any:
    """What `evaluate_retrieval` takes as its run: a run file, or the vectors of queries and documents."""
    from nearfar.evaluation import Vectors

    if processes is not None:
        raise ValueError("--qrels is scored in one process; leave --processes out.")
    if (results is None) == (vectors is None) or (vectors is None) != (gallery is None):
        raise ValueError("--qrels needs either --run, or the VECTORS of the queries and --gallery, the documents.")
    return results if vectors is None or gallery is None else (Vectors.load(vectors), Vectors.load(gallery))


def need_qrels(qrels: Path | None) -> Path:
    """Require judgements."""
    if qrels is None:
        raise ValueError("ranked documents are scored by judgements; name them with --qrels.")
    return qrels


def score_ranked(
    ranked: Any, qrels: Path, k: list[int] | None, similarity: str, seed: int, json: Path | None, per_query: Path | None
) -> None:
    """Score ranked documents by judgements, print the scores, and write them."""
    import csv
    import io

    from nearfar._utils.files import write_text
    from nearfar.evaluation import evaluate_retrieval
    from nearfar.evaluation._judged import RETRIEVAL_KS

    if per_query is not None:
        check_suffix("--per-query", per_query, {".csv": "a table"})
    title = str(ranked) if isinstance(ranked, Path) else "vectors"
    options: dict[str, Any] = {"similarity": similarity, "seed": seed}
    with Progress(f"scoring {title}"):
        found = evaluate_retrieval(ranked, qrels, ks=k or RETRIEVAL_KS, **options)
    if json is not None:
        save_json(json, {"run": title, "qrels": str(qrels), **options, **found.to_dict()})
    if per_query is not None:
        text = io.StringIO()
        columns = [found.ids, found.relevant.tolist(), *(column.tolist() for column in found.per_query.values())]
        head = ("query", "relevant", *found.per_query)
        csv.writer(text, lineterminator="\n").writerows([head, *zip(*columns, strict=True)])
        write_text(per_query, text.getvalue())
    console = Terminal()
    console.print(score_table(found, title))
    console.print(f"{found.about()}.")


def choose_ks(k: list[int] | None, data_set: str | None) -> tuple[int, ...]:
    """The given K, else those of the data set, else the usual ones."""
    from nearfar.data._benchmarks import KS
    from nearfar.data._samples import USUAL_KS

    if data_set is not None:
        check_choice("evaluate", "--data-set", data_set, KS)
    return tuple(k or ()) or (USUAL_KS if data_set is None else KS[data_set])


def score_table(found: Scored, title: str) -> Table:
    """A table of all scores in percent, with their intervals."""
    from rich.table import Table

    unit = "classes" if found.unit == "class" else "queries"
    of = f"queries of {found.classes:,} classes" if found.classes else "judged queries"
    table = Table(title=f"{title}: {found.queries:,} {of}", title_justify="left")
    table.add_column("score")
    table.add_column("%", justify="right")
    table.add_column(f"95% interval over {unit}", justify="right")
    for name, value in found.scores().items():
        bar, starts = found.intervals.get(name), found.intervals.get(f"{name} over starts")
        ends = f"{100 * bar.low:.1f} to {100 * bar.high:.1f}" if bar else "-"
        if starts:
            ends = f"{100 * starts.low:.1f} to {100 * starts.high:.1f} over k-means starts"
        table.add_row(name, f"{100 * value:.1f}", ends)
    return table


def quantized(x: Tensor, codes: str | None) -> Tensor:
    """The vectors, quantized if asked."""
    if codes is None:
        return x
    from nearfar.similarity import quantize

    check_choice("evaluate", "--codes", codes, ("int8", "bits"))
    return quantize(x.float(), codes)  # type: ignore[arg-type]


def curve_table(found: Evaluation) -> Table:
    """A table of recall@K and MAP@R of the first dimensions alone, with their intervals."""
    from rich.table import Table

    table = Table(title="The first dimensions alone", title_justify="left")
    first = f"recall@{min(found.recall)}"
    for column in ("dimensions", f"{first} %", "95% interval", "map_at_r %", "95% interval"):
        table.add_column(column, justify="right")
    for width, each in found.curve.items():
        row = [str(width)]
        for name in (first, "map_at_r"):
            bar = each.intervals.get(name)
            row += [f"{100 * each.scores()[name]:.1f}", f"{100 * bar.low:.1f} to {100 * bar.high:.1f}" if bar else "-"]
        table.add_row(*row)
    return table


def with_names(record: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """Add the names of the classes to the record of an evaluation."""
    for row in record["per_class"]:
        if row["label"] in names:
            row["name"] = names[row["label"]]
    return record


def class_table(found: Evaluation, names: dict[int, str]) -> Table:
    """A table of the ten classes with the lowest scores, by name if they have one."""
    from rich.table import Table

    table = Table(title=f"The worst {len(found.worst)} of {found.classes:,} classes", title_justify="left")
    for column in ("class", "queries", "recall@1 %", "R-precision %", "MAP@R %"):
        table.add_column(column, justify="right")
    for row in found.worst:
        shares = (f"{100 * share:.1f}" for share in (row.recall_at_1, row.r_precision, row.map_at_r))
        table.add_row(names.get(row.label, str(row.label)), str(row.queries), *shares)
    return table


def describe_lone(found: Evaluation) -> str:
    """A line about lone queries."""
    if not found.lone:
        return "No lone queries: every query has a right answer."
    one = found.lone == 1
    return (
        f"{found.lone:,} lone {'query' if one else 'queries'} (no other sample of {'its' if one else 'their'} class) "
        f"{'was' if one else 'were'} left out of every score."
    )


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Vectors or a run folder; with --qrels, a run file of TREC.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same of the same samples, or queries.")],
    score: Annotated[
        str | None,
        typer.Option(
            help="recall@K (default: recall@1), precision_at_1, r_precision, map_at_r or mrr; with --qrels ndcg@K "
            "(default: ndcg@10), map@K, mrr@K, recall@K or precision@K."
        ),
    ] = None,
    qrels: Qrels = None,
    similarity: Similarity = "cosine",
    unit: Unit = "class",
    seed: Seed = 0,
    processes: Processes = None,
) -> None:
    """Compare two embedding spaces: whether B is better than A, worse, or not distinguishable from it.

    This is a paired bootstrap over classes (or queries). Both spaces must hold the same samples in the same order.
    """
    from nearfar.evaluation import compare as judge
    from nearfar.evaluation import evaluate as score_of
    from nearfar.evaluation import evaluate_retrieval

    if qrels is not None:
        ks = (k_of(score),)
        ranked = [evaluate_retrieval(check_ranked(None, None, x, processes), qrels, ks=ks, resamples=0) for x in (a, b)]
        say(verdict(judge(*ranked, score=score, seed=seed), str(a), str(b), 0))
        return
    if launch(processes):
        return
    sides = [load_labeled(path) for path in (a, b)]
    names = [side.name for side in sides]
    if None not in names and names[0] != names[1]:
        raise ValueError(f"{a} and {b} are not of the same samples in the same order: their names differ.")
    found = []
    with share_evaluation("compare"):
        for path, side in zip((a, b), sides, strict=True):
            with Progress(f"evaluating {path}", shown=is_first()) as watch:
                options: dict[str, Any] = {"similarity": similarity, "resamples": 0, "watch": watch}
                found.append(score_of(side.x, side.y, ks=(1,), **options))
    if not is_first():
        return
    options = {"score": score, "unit": unit, "seed": seed}
    say(verdict(judge(*found, **options), str(a), str(b), found[0].classes))


def k_of(score: str | None) -> int:
    """The K of a score such as ndcg@10; 10 if there is none.

    >>> k_of("map@100"), k_of(None)
    (100, 10)
    """
    k = (score or "").partition("@")[2]
    return int(k) if k.isdecimal() and int(k) > 0 else 10


def verdict(found: Comparison, a: str, b: str, classes: int) -> str:
    """The comparison in one sentence."""
    gap = found.difference
    over = f"{classes:,} classes" if found.unit == "class" else "queries"
    numbers = (
        f"{found.score} {100 * found.a:.1f} and {100 * found.b:.1f}, difference {100 * gap.value:+.1f}, "
        f"95% interval over {over} {100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
    )
    if found.verdict == "cannot tell":
        return f"Cannot tell {b} from {a}: {numbers}."
    return f"{b} is {found.verdict} than {a}: {numbers}."
