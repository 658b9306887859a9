"""The tables and the figure of the study on photographs, from what it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from textwrap import fill
from typing import Any

from nearfar import losses
from nearfar.sets.counts import multiple
from nearfar.studies import _figures as figures
from nearfar.studies import _photographs_statistics as statistics
from nearfar.studies._desk import shown, table
from nearfar.studies._photographs_methods import METHODS, Tuned

Found = Mapping[str, Any]
NAMES = {"recall@1": "R@1", "recall@2": "R@2", "recall@4": "R@4", "recall@8": "R@8", "map_at_r": "MAP@R",
         "nmi": "NMI", "f1": "F1"}  # fmt: skip
VERDICTS = {"better": "holds", "worse": "does not", "cannot tell": "cannot tell"}


def draw(found: Found, folder: Path) -> None:
    """Draw the methods, best first, from the content of photographs-DATA.json."""
    data, score = found["data"], found["score"]
    rows = {name: {NAMES[score]: each["scores"][score]} for name, each in _sorted(found) if each["scores"][score]}
    figures.dots(
        folder / f"photographs-{data}.png", rows, [NAMES[score]], f"{NAMES[score]} on unseen classes of {data}, %"
    )


def markdown(found: Found) -> str:
    """How the runs were made, the tuning, the test scores with what follows from them, and the doctor.

    Test scores are shown once every method has at most one test run to go: what is looked at early, of some methods,
    tempts to choose by it.
    """
    parts = [_setting(found), f"Tuning: {NAMES[found['score']]} on the held-out training classes, one seed:"]
    parts.append(_tuning(found))
    done, wanted = tests(found)
    if done < wanted:
        parts.append(f"The test is not complete: {done} of {wanted} runs.")
    if tested(found):
        parts += _tested(found)
    parts += [
        "What the doctor said while the runs were trained, tuning and test together (a false alarm: a warning or an "
        f"alarm although the score is within {statistics.NEAR:g} points of the best run; missed: {statistics.FAR:g} "
        "points or more below it, and nothing was said):",
        _doctor(found),
    ]
    return "\n\n".join(part if part.startswith("|") else fill(part, 120) for part in parts) + "\n"


def tests(found: Found) -> tuple[int, int]:
    """How many test runs there are, and how many there will be."""
    methods = found["methods"].values()
    return sum(each["scores"]["runs"] for each in methods), found["seeds"] * len(methods)


def tested(found: Found) -> bool:
    """Whether test scores may be shown: each method has two runs or more, and at most one to go."""
    least = min(each["scores"]["runs"] for each in found["methods"].values())
    return bool(least >= min(2, found["seeds"]) and least >= found["seeds"] - 1)


def _tested(found: Found) -> list[str]:
    """The test scores, the differences to multi-similarity, and the paper's claims."""
    parts = [
        _scores(found),
        "Less multi-similarity, paired by seed and class; in brackets the 95% interval over seeds and classes "
        "(two-level bootstrap):",
        _differences(found),
    ]
    if found["claims"]:
        parts += ["What Qi et al. 2020 say, as paired differences of R@1:", claims(found["claims"])]
    return parts


def ranked(studies: Sequence[Found]) -> str:
    """The methods by their mean rank over data sets, each ranked by the score that its methods were tuned by."""
    tables = {
        each["data"]: {
            name: row["scores"][each["score"]]["mean"]
            for name, row in each["methods"].items()
            if row["scores"][each["score"]]
        }
        for each in studies
    }
    head = ("method", *(f"{each['data']}, by {NAMES[each['score']]}" for each in studies), "mean rank")
    rows = [(name, *(f"{rank:g}" for rank in row.values())) for name, row in statistics.ranks(tables).items()]
    return table(head, rows)


def values(studies: Sequence[Found]) -> str:
    """Which value of each method's parameter is best over data sets, and what the library's default costs beside it.

    By the score on held-out training classes, at the rate that was chosen on each data set; test classes say nothing
    here. A default that was not among the four values has no cost.
    """
    rows = []
    for name, tuned in METHODS.items():
        tried = [_by_value(each, name) for each in studies]
        if not all(tried):
            continue
        best, *_ = sorted(tuned.values, key=lambda value: -_over(tried, value))
        usual = _default(tuned)
        cost = "-" if usual not in tuned.values else f"{_over(tried, best) - _over(tried, usual):.1f}"
        each = [_shown(tuned, max(scores, key=scores.__getitem__)) for scores in tried]
        rows.append((name, tuned.parameter, _shown(tuned, usual), _shown(tuned, best), *each, cost))
    head = ("method", "parameter", "default", "best over all", *(f"on {each['data']}" for each in studies), "cost")
    return table(head, rows)


def _by_value(found: Found, name: str) -> dict[float, float]:
    """The score, in percent, of each value of a method's parameter at the rate that was chosen."""
    tuned, chosen = METHODS[name], found["methods"].get(name, {}).get("chosen")
    if chosen is None:
        return {}
    scores = {tuned.default: chosen["held_out"][f"lr {chosen['rate']:g}"]}
    scores |= {v: chosen["held_out"][tuned.shown(v)] for v in tuned.values if tuned.shown(v) in chosen["held_out"]}
    return {value: 100 * score for value, score in scores.items() if score is not None}


def _over(tried: Sequence[Mapping[float, float]], value: float) -> float:
    """The mean over data sets; a value that failed on one of them is the last."""
    return sum(scores.get(value, -100.0) for scores in tried) / len(tried)


def _default(tuned: Tuned) -> float | None:
    """The parameter's default in the library; None if it has none."""
    kind = getattr(losses, tuned.loss["name"])
    usual = signature(kind).parameters[tuned.parameter].default
    if usual is None:  # of `DroTopK`, which has it where neither k nor fraction is given
        usual = kind().product.over_positive.k
    return multiple(usual) if tuned.batches else float(usual)


def _shown(tuned: Tuned, value: float | None) -> str:
    return "-" if value is None else f"{value:g}{'B' if tuned.batches else ''}"


def claims(listed: Iterable[Found]) -> str:
    """Claims with the figure: holds, does not, or cannot tell."""
    rows = []
    for each in listed:
        step = each["difference"]
        rows.append((each["claim"], step_of(step), "-" if step is None else VERDICTS[step["verdict"]]))
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


def step_of(step: Found | None) -> str:
    """Format a difference with its interval.

    >>> step_of({"mean": 1.25, "low": 0.5, "high": 2.0}), step_of({"mean": -1.0, "half": 0.5}), step_of(None)
    ('+1.2 [+0.5, +2.0]', '-1.0 ± 0.5', '-')
    """
    if step is None or "low" not in step:
        return shown(None if step is None else dict(step), sign=True)
    return f"{step['mean']:+.1f} [{step['low']:+.1f}, {step['high']:+.1f}]"


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
        f"{found['data']}: {training['classes']} classes and {training['samples']} photographs to learn from; network "
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
        told = "-" if best is None else f"{100 * best:.1f}"
        rows.append((name, *(scores.get(rate, "-") for rate in rates), ", ".join(others) or "-", told))
    return table(("method", *rates, "at the best rate", "best"), rows)


def _scores(found: Found) -> str:
    rows = []
    for name, each in _sorted(found):
        chosen, cells = each["chosen"], each["scores"]
        told = ("-", "-", "-") if chosen is None else (f"{chosen['rate']:g}", each["parameter"], str(chosen["budget"]))
        rows.append((name, *(shown(cells[score]) for score in NAMES), *told, str(cells["runs"])))
    return table(("method", *NAMES.values(), "rate", "parameter", "tuning runs", "test runs"), rows)


def _differences(found: Found) -> str:
    rows = []
    for name, each in _sorted(found):
        steps = each["difference"]
        if steps and any(steps.values()):
            cells = [f"{step_of(step)} ({step['verdict']})" if step else "-" for step in steps.values()]
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
