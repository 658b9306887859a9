"""The tables, the figure and the report of the study on photographs, from its JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from textwrap import fill
from typing import Any

import photographs_statistics as statistics
from photographs_methods import BASE, METHODS, Tuned
from study_tables import format_spread

from nearfar import losses
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar._utils.tables import markdown as table
from nearfar.sets.counts import multiple
from nearfar.studies import _training_figures as figures

Found = Mapping[str, Any]
NAMES = {"recall@1": "R@1", "recall@2": "R@2", "recall@4": "R@4", "recall@8": "R@8", "map_at_r": "MAP@R",
         "nmi": "NMI", "f1": "F1"}  # fmt: skip
SCORES = (
    "Test scores in percent, best mean rank first; ± is half a 95% t-interval over seeds, and brackets are the 95% "
    "interval of the paired difference over seeds and classes:"
)
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
VERDICTS = {"better": "holds", "worse": "does not", "cannot tell": "cannot tell"}


def draw(found: Found, folder: Path) -> None:
    """Draw the methods, best first, from the content of photographs-DATA.json."""
    data, score = found["data"], found["score"]
    rows = {name: {NAMES[score]: each["scores"][score]} for name, each in _sorted(found) if each["scores"][score]}
    figures.dots(
        folder / f"photographs-{data}.png", rows, [NAMES[score]], f"{NAMES[score]} on unseen classes of {data}, %"
    )


def tables(found: Found) -> str:
    """Every table of one data set: the setting, the tuning, test scores, differences, claims, and the doctor.

    Test scores are shown only when every method has at most one test run to go, so that early scores influence no
    choice.
    """
    parts = [_setting(found), f"Tuning: {NAMES[found['score']]} on the held-out training classes, one seed:"]
    parts.append(_tuning(found))
    done, wanted = count_tests(found)
    if done < wanted:
        parts.append(f"The test is not complete: {done} of {wanted} runs.")
    if is_tested(found):
        parts += _tested(found)
    parts += [
        "Findings of the doctor during training, in tuning and test together (a false alarm: a warning or an alarm "
        f"although the score is within {statistics.NEAR:g} points of the best run; missed: {statistics.FAR:g} points "
        "or more below it without a warning):",
        _doctor(found),
    ]
    return "\n\n".join(part if part.startswith("|") else fill(part, 120) for part in parts) + "\n"


def count_tests(found: Found) -> tuple[int, int]:
    """How many test runs there are, and how many there will be."""
    methods = found["methods"].values()
    return sum(each["scores"]["runs"] for each in methods), found["seeds"] * len(methods)


def is_tested(found: Found) -> bool:
    """Whether test scores may be shown: each method has two runs or more, and at most one to go."""
    least = min(each["scores"]["runs"] for each in found["methods"].values())
    return bool(least >= min(2, found["seeds"]) and least >= found["seeds"] - 1)


def _tested(found: Found) -> list[str]:
    """The test scores, the differences to multi-similarity, and the paper's claims."""
    parts = [
        _scores(found),
        "Differences to multi-similarity, paired by seed and class; in brackets the 95% interval over seeds and "
        "classes (two-level bootstrap):",
        _differences(found),
    ]
    if found["claims"]:
        parts += ["The claims of Qi et al. 2020 as paired differences of R@1:", claim_table(found["claims"])]
    return parts


def rank_table(studies: Sequence[Found]) -> str:
    """The methods by their mean rank over data sets, each ranked by the score that its methods were tuned by."""
    means = {each["data"]: _means(each) for each in studies}
    head = ("method", *(f"{each['data']}, by {NAMES[each['score']]}" for each in studies), "mean rank")
    rows = [(name, *(f"{rank:g}" for rank in row.values())) for name, row in statistics.ranks(means).items()]
    return table(head, rows)


def value_table(studies: Sequence[Found]) -> str:
    """The best value of each method's parameter over all data sets, and what the library's default loses against it.

    Values are compared by the score on held-out training classes, at the rate chosen on each data set. A default that
    was not among the four values has no cost.
    """
    rows = []
    for name, tuned in METHODS.items():
        tried = [_by_value(each, name) for each in studies]
        if not all(tried) or len(tuned.values) == 1:
            continue
        best, *_ = sorted(tuned.values, key=lambda value: -_over(tried, value))
        usual = _default(tuned)
        cost = "-" if usual not in tuned.values else f"{_over(tried, best) - _over(tried, usual):.1f}"
        each = [_label(tuned, max(scores, key=scores.__getitem__)) for scores in tried]
        rows.append((name, tuned.parameter, _label(tuned, usual), _label(tuned, best), *each, cost))
    head = ("method", "parameter", "default", "best over all", *(f"on {each['data']}" for each in studies), "cost")
    return table(head, rows)


def _by_value(found: Found, name: str) -> dict[float, float]:
    """The score, in percent, of each value of a method's parameter at the rate that was chosen."""
    tuned, chosen = METHODS[name], found["methods"].get(name, {}).get("chosen")
    if chosen is None:
        return {}
    scores = {tuned.default: chosen["held_out"][f"lr {chosen['rate']:g}"]}
    scores |= {v: chosen["held_out"][tuned.label(v)] for v in tuned.values if tuned.label(v) in chosen["held_out"]}
    return {value: 100 * score for value, score in scores.items() if score is not None}


def _over(tried: Sequence[Mapping[float, float]], value: float) -> float:
    """The mean over data sets; a value that failed on one of them is the last."""
    return sum(scores.get(value, -100.0) for scores in tried) / len(tried)


def _default(tuned: Tuned) -> float | None:
    """The parameter's default in the library; None if it has none."""
    if "." in tuned.parameter:
        return tuned.default
    kind = getattr(losses, tuned.loss["name"])
    usual = signature(kind).parameters[tuned.parameter].default
    if usual is None:  # of `DroTopK`, which has it where neither k nor fraction is given
        usual = kind().product.over_positive.k
    return multiple(usual) if tuned.batches else float(usual)


def _label(tuned: Tuned, value: float | None) -> str:
    return "-" if value is None else f"{value:g}{'B' if tuned.batches else ''}"


def claim_table(listed: Iterable[Found]) -> str:
    """Claims with the figure: holds, does not, or cannot tell."""
    rows = []
    for each in listed:
        step = each["difference"]
        rows.append((each["claim"], format_step(step), "-" if step is None else VERDICTS[step["verdict"]]))
    return table(("claim", "difference", "verdict"), rows)


def paper_claims(found: Found) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020 or Can et al. 2019 from the content of dro-DATA.json or profs-DATA.json."""
    if found["study"] == "dro":
        return list(found["claims"])
    return [
        {"claim": f"{name}: {pair.replace(' less ', ' beats ')}", "difference": row[pair]["recall@1"]}
        for name, row in found["differences"].items()
        for pair in row
    ]


def format_step(step: Found | None) -> str:
    """Format a difference with its interval.

    >>> format_step({"mean": 1.25, "low": 0.5, "high": 2.0}), format_step({"mean": -1.0, "half": 0.5})
    ('+1.2 [+0.5, +2.0]', '-1.0 ± 0.5')
    """
    if step is None or "low" not in step:
        return format_spread(None if step is None else dict(step), sign=True)
    return f"{step['mean']:+.1f} [{step['low']:+.1f}, {step['high']:+.1f}]"


def write_report(
    studies: Sequence[Found], papers: Sequence[Found], *, images: Path, results: Path, page: Path, which: Path
) -> None:
    """Write the results, the figures, and the generated parts of the report and of the guide `which`."""
    full = []
    for found in studies:
        name = f"photographs-{found['data']}"
        write_text(results / f"{name}.json", as_json(found, "runs", 7))
        full.append(f"## {found['data']}")
        if is_tested(found):  # not before: the picture shows test scores
            draw(found, images)
            full.append(f"![{name}](../../docs/images/{name}.png)")
        full.append(tables(found).rstrip())
    full += ["## Ranks", rank_table(studies)] if len(studies) > 1 else []
    for found in papers:
        paper = {"dro": "Qi et al. 2020", "profs": "Can et al. 2019"}[found["study"]]
        full += [f"## Claims of {paper}, run as in the paper on {found['data']}"]
        full += [f"Paired differences of R@1, {found['seeds']} seeds:", claim_table(paper_claims(found))]
    write_text(results / "photographs_study.md", "# Photographs\n\n" + "\n\n".join(full) + "\n")
    for file, text in ((page, summary(studies)), (which, value_table(studies))):
        before, rest = file.read_text(encoding="utf-8").split(BEGIN)
        write_text(file, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    print(f"{page}, {which} and {results / 'photographs_study.md'}")


def summary(studies: Sequence[Found]) -> str:
    """The test scores of every method on all data sets, and the claims of Qi et al. 2020."""
    parts = [_short_setting(found) for found in studies]
    done = [found for found in studies if is_tested(found)]
    if not done:
        return "\n\n".join([*parts, "The test is not complete."])
    parts += [f"![photographs-{found['data']}](../docs/images/photographs-{found['data']}.png)" for found in done]
    methods = [name for name in METHODS if all(name in found["methods"] for found in done)]
    means = {found["data"]: _means(found) for found in done}
    ranks = statistics.ranks(means)
    head = [f"{found['data']}, {score}" for found in done for score in ("R@1", "MAP@R", f"MAP@R less {BASE}")]
    rows = [(name, *(cell for found in done for cell in _scores_of(found["methods"][name])), f"{ranks[name]['mean']:g}")
            for name in ranks if name in methods]  # fmt: skip
    parts += [fill(SCORES, 120), table(("method", *head, "mean rank"), rows)]
    by_claim: dict[str, list[str]] = {}
    for found in done:
        for each in found["claims"]:
            step = each["difference"]
            text = "-" if step is None else f"{format_step(step)} ({VERDICTS[step['verdict']]})"
            by_claim.setdefault(each["claim"], []).append(text)
    if by_claim:
        claims = table(
            ("claim", *(found["data"] for found in done)), [(claim, *row) for claim, row in by_claim.items()]
        )
        parts += ["The claims of Qi et al. 2020 as paired differences of R@1:", claims]
    return "\n\n".join(parts)


def _short_setting(found: Found) -> str:
    """Size and machine of the study on one data set."""
    training, failed = found["training"], sum(line["error"] is not None for line in found["runs"])
    return (
        f"{found['data']}: {training['classes']} training classes with {training['samples']} photographs; "
        f"{len(found['runs'])} runs of {found['steps']} steps, {failed} failed. {found['device']}."
    )


def _means(found: Found) -> dict[str, float]:
    """The mean of each method in the score that methods were tuned by."""
    score = found["score"]
    return {name: row["scores"][score]["mean"] for name, row in found["methods"].items() if row["scores"][score]}


def _scores_of(method: Found) -> tuple[str, ...]:
    """R@1, MAP@R, and the difference of MAP@R to the base method."""
    scores, step = method["scores"], method["difference"].get("map_at_r")
    return (*(format_spread(scores[score]) for score in ("recall@1", "map_at_r")), format_step(step))


def _sorted(found: Found) -> list[tuple[str, Found]]:
    """The methods, best first by the score that they were tuned by; those without runs last."""

    def place(item: tuple[str, Found]) -> float:
        spread = item[1]["scores"][found["score"]]
        return -spread["mean"] if spread else 1.0

    return sorted(found["methods"].items(), key=place)


def _setting(found: Found) -> str:
    training, versions, (classes, samples) = found["training"], found["versions"], found["batch"]
    failed = sum(line["error"] is not None for line in found["runs"])
    tuning = [line for line in found["runs"] if line["held_out"]]
    network = next((line["config"]["model"] for line in found["runs"]), {"name": "-", "embedding_dim": 0})
    paces = [line["journal"]["images_per_second"] for line in found["runs"] if not line["error"]]
    pace = sorted(each for each in paces if each)
    seeds = f"{found['seeds']} seed{'s' * (found['seeds'] > 1)}"
    rates = ", ".join(f"{rate:g}" for rate in found["rates"])
    speed = f", {pace[len(pace) // 2]:,.0f} images/s a run (median)" if pace else ""
    return (
        f"{found['data']}: {training['classes']} training classes with {training['samples']} photographs; network "
        f"{network['name']}, {network['embedding_dim']} dimensions; {found['steps']} steps a run, {classes} classes x "
        f"{samples}, Adam, cosine to 0. Tuned by {NAMES[found['score']]} on {found['held_out']:.0%} of the training "
        f"classes, held out, the same budget for each method: rates {rates} "
        f"at the default of its parameter, then its other values at the best rate. Then {seeds} on all "
        f"training classes; the test classes are read once a run, after the last step, of the one configuration that "
        f"the ledger holds; ± is half a 95% t-interval over seeds. {len(found['runs'])} runs ({len(tuning)} of the "
        f"tuning), {failed} failed. {found['device']}{speed}, torch {versions['torch']}, python {versions['python']}."
    )


def _tuning(found: Found) -> str:
    """Every configuration that was tried: the rates at the default of the parameter, then its other values."""
    rates, rows = [f"lr {rate:g}" for rate in found["rates"]], []
    for name, each in found["methods"].items():
        chosen = each["chosen"] or {"held_out": {}, "rate": None}
        scores = {words: "-" if score is None else f"{100 * score:.1f}" for words, score in chosen["held_out"].items()}
        others = [f"{words}: {score}" for words, score in scores.items() if words not in rates]
        best = max((score for score in chosen["held_out"].values() if score is not None), default=None)
        shown = "-" if best is None else f"{100 * best:.1f}"
        rows.append((name, *(scores.get(rate, "-") for rate in rates), ", ".join(others) or "-", shown))
    return table(("method", *rates, "at the best rate", "best"), rows)


def _scores(found: Found) -> str:
    rows = []
    for name, each in _sorted(found):
        chosen, cells = each["chosen"], each["scores"]
        choice = (
            ("-", "-", "-") if chosen is None else (f"{chosen['rate']:g}", each["parameter"], str(chosen["budget"]))
        )
        rows.append((name, *(format_spread(cells[score]) for score in NAMES), *choice, str(cells["runs"])))
    return table(("method", *NAMES.values(), "rate", "parameter", "tuning runs", "test runs"), rows)


def _differences(found: Found) -> str:
    rows = []
    for name, each in _sorted(found):
        steps = each["difference"]
        if steps and any(steps.values()):
            cells = [f"{format_step(step)} ({step['verdict']})" if step else "-" for step in steps.values()]
            rows.append((name, *cells))
    return table(("method", "R@1", "MAP@R"), rows)


def _doctor(found: Found) -> str:
    rows = []
    for name, row in found["doctor"].items():
        names = ", ".join(f"{each} ({count})" for each, count in row["names"].items()) or "-"
        step = "-" if row["step"] is None else f"{row['step']:g}"
        counts = (row["runs"], row["named"], row["collapsed"])
        rows.append((name, *map(str, counts), step, str(row["false"]), str(row["missed"]), names))
    head = ("method", "runs", "named", "as collapsed", "at step (median)", "false alarms", "missed", "findings")
    return table(head, rows)
