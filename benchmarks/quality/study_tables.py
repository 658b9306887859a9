"""Tables of the studies dro, profs and noise, from the JSON files that `nearfar reproduce` writes.

`tables(found)` has every score of one data set, for benchmarks/results; `summary(studies)` compares several data sets
by R@1, for benchmarks/RESULTS-*.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from nearfar._utils.tables import markdown
from nearfar.studies import _training_figures as figures
from nearfar.studies import dro, profs
from nearfar.studies._training import HELD_OUT, spread, verdict

Found = Mapping[str, Any]
SCORES = (
    "Scores are in percent on the test classes, read once, after the last step; ± is half a 95% t-interval over seeds."
)
NAMES = {"map_at_r": "MAP@R", "nmi": "NMI", "f1": "F1", "best_recall@1": "R@1 of the best checkpoint"}
VERDICTS = {"better": "holds", "worse": "the opposite", "cannot tell": "cannot tell"}


def format_spread(found: Found | None, *, sign: bool = False) -> str:
    """Mean ± half of the interval.

    >>> format_spread({"mean": 71.26, "half": 0.41}), format_spread({"mean": 1.5, "half": None}, sign=True)
    ('71.3 ± 0.4', '+1.5')
    """
    if found is None:
        return "-"
    mean = f"{found['mean']:+.1f}" if sign else f"{found['mean']:.1f}"
    return mean if found["half"] is None else f"{mean} ± {found['half']:.1f}"


def scores_of(found: Found, usual: Sequence[str]) -> dict[str, str]:
    """The scores of a study, and their names in tables."""
    return {score: NAMES.get(score, score.replace("recall", "R")) for score in found.get("scores", usual)}


def format_difference(found: Found | None) -> str:
    """A difference and its verdict."""
    return "-" if found is None else f"{format_spread(found, sign=True)} ({found['verdict']})"


def differences_from(base: str, cells: Mapping[str, Any], score: str) -> dict[str, str]:
    """Each cell minus the cell `base`, paired by seed; "-" if a run is missing."""
    before, found = cells[base][score], {}
    for name, each in cells.items():
        paired = each[score] is not None and before is not None and len(each["keys"]) == len(each[score]["values"])
        found[name] = "-"
        if name != base and paired and len(before["values"]) == len(each["keys"]):
            step = spread([b - a for a, b in zip(before["values"], each[score]["values"], strict=True)])
            found[name] = format_difference(step | {"verdict": verdict(step)}) if step else "-"
    return found


def setting(found: Found) -> str:
    """A paragraph about how the runs of a study were made."""
    training, versions = found["training"], found["versions"]
    tried = ", ".join(f"{rate}: {mean:.1f}" for rate, mean in found["rate"]["held_out"].items())
    how = f" (mean R@1 on {HELD_OUT:.0%} of the training classes, held out: {tried})" if tried else ""
    failed = sum(line["error"] is not None for line in found["runs"])
    return (
        f"{found['data']}: {training['classes']} training classes with {training['samples']} samples; "
        f"{found['steps']} steps a run, Adam, cosine to 0, learning rate {found['rate']['rate']:g}{how}; "
        f"{found['seeds']} seeds; scores in percent on the test classes, read once, after the last step; ± is half a "
        f"95% t-interval over seeds. {len(found['runs'])} runs, {failed} failed. {found['device']}, "
        f"torch {versions['torch']}, python {versions['python']}."
    )


def short_setting(found: Found) -> str:
    """Size, steps, learning rate and machine of a study."""
    training, failed = found["training"], sum(line["error"] is not None for line in found["runs"])
    return (
        f"{training['classes']} training classes with {training['samples']} samples, {found['steps']} steps a run, "
        f"learning rate {found['rate']['rate']:g}, {found['seeds']} seeds; {len(found['runs'])} runs, {failed} failed. "
        f"{found['device']}, torch {found['versions']['torch']}."
    )


def tables(found: Found) -> str:
    """Every table of one data set."""
    make = {"dro": _dro, "profs": _profs, "noise": _noise}[found["study"]]
    return _join([setting(found), *make(found)])


def summary(studies: Sequence[Found]) -> str:
    """How the runs were made, R@1, and what the paper says, side by side for several data sets."""
    make = {"dro": _dro_summary, "profs": _profs_summary, "noise": _noise}[studies[0]["study"]]
    parts = [SCORES]
    for found in studies:
        parts += [f"### {found['data']}", *_pictures(found), short_setting(found), *make(found)]
    if studies[0]["study"] == "dro":
        parts += [
            "### The paper's claims",
            "Paired differences of R@1; above zero, the claim holds here.",
            _claims(studies),
        ]
    return _join(parts)


def _join(parts: Iterable[str]) -> str:
    """Paragraphs, wrapped unless they are tables, headings or pictures."""
    return "\n\n".join(part if part[0] in "|#!" else fill(part, 120) for part in parts) + "\n"


def _pictures(found: Found) -> list[str]:
    names = {"dro": ("imbalance", "k", "time"), "profs": ("table", "projection"), "noise": ("",)}[found["study"]]
    made = {"k": "by_k", "projection": "by_length"}
    names = tuple(name for name in names if not name or found.get(made.get(name, name)))
    files = [f"{figures.stem(found)}{name and '-'}{name}" for name in names]
    return [f"![{file}](../docs/images/{file}.png)" for file in files]


def _errors(cells: Iterable[Found]) -> str:
    return "; ".join(sorted({error for each in cells for error in each["errors"]})) or "-"


# DRO


def _dro(found: Found) -> list[str]:
    scores = scores_of(found, (*(f"recall@{k}" for k in dro.RECALLS), "map_at_r"))
    head = ("method", *scores.values(), "failed")

    def table(first: str, cells: Mapping[str, Any]) -> str:
        rows = [
            (name, *(format_spread(each[score]) for score in scores), _errors([each])) for name, each in cells.items()
        ]
        return markdown((first, *head[1:]), rows)

    parts = _imbalance(found)
    if found["by_k"]:
        base, size = _base(found), dro.batch_of(found, "k")
        steps = {k: text for k, text in differences_from(base, found["by_k"], "recall@1").items() if k != base}
        parts += [f"DRO-TopK against K at B = {size}:", table("K", found["by_k"])]
        parts += [
            f"R@1 minus that of K = {base}, paired by seed:",
            markdown([f"K = {k}" for k in steps], [list(steps.values())]),
        ]
    if found["grouped"]:
        parts += [f"Grouped KL beside related losses, B = {dro.SMALL}, {dro.NARROW} dimensions:"]
        parts += [table("method", found["grouped"])]
    parts += _variants(found, table) + _times(found)
    if found["claims"]:
        parts += [
            "The paper's claims as paired differences of R@1 (above zero: the claim holds here):",
            _claims([found]),
        ]
    return parts


def _base(found: Found) -> str:
    """K = 2B, or the largest K if that was not run."""
    wanted = str(2 * dro.batch_of(found, "k"))
    return wanted if wanted in found["by_k"] else list(found["by_k"])[-1]


def _variants(found: Found, table: Callable[[str, Mapping[str, Any]], str]) -> list[str]:
    if not found.get("variants"):
        return []
    return [f"All variants, B = {dro.batch_of(found, 'variants')}:", table("method", found["variants"])]


def _times(found: Found) -> list[str]:
    if not found.get("time"):
        return []
    head = ("ms, forward + backward", *(f"B = {each['rows']}" for each in found["time"]))
    rows = [(name, *(f"{each['ms'][name]:.2f}" for each in found["time"])) for name in found["time"][0]["ms"]]
    return ["The time of a step, one thread, d = 1,024:", markdown(head, rows)]


def _imbalance(found: Found) -> list[str]:
    sizes = found["sizes"]
    head = ("method", *(f"B = {size} (1 : {1 / found['ratios'][str(size)]:.0f})" for size in sizes))
    best = bool(found.get("checkpoints"))
    parts = ["R@1 against the ratio of positive to negative pairs, 5 samples a class, K = 2B:"]
    for score in ("recall@1", *(["best_recall@1"] if best else [])):
        rows = [
            (name, *(format_spread(each[str(size)][score]) for size in sizes))
            for name, each in found["imbalance"].items()
        ]
        parts += (
            [markdown(head, rows)]
            if score == "recall@1"
            else ["The same of the best checkpoint:", markdown(head, rows)]
        )
    return parts if sizes else []


def _dro_summary(found: Found) -> list[str]:
    scores = {"recall@1": "R@1", "map_at_r": "MAP@R"} | (
        {"best_recall@1": NAMES["best_recall@1"]} if found.get("checkpoints") else {}
    )

    def table(first: str, cells: Mapping[str, Any]) -> str:
        rows = [(name, *(format_spread(each[score]) for score in scores)) for name, each in cells.items()]
        return markdown((first, *scores.values()), rows)

    parts = _imbalance(found)
    if found["by_k"]:
        base = _base(found)
        steps = differences_from(base, found["by_k"], "recall@1")
        parts += [
            f"DRO-TopK against K at B = {dro.batch_of(found, 'k')}; the last column is R@1 minus that of K = {base}, "
            "by seed:",
            markdown(
                ("K", *scores.values(), f"less K = {base}"),
                [(k, *(format_spread(each[s]) for s in scores), steps[k]) for k, each in found["by_k"].items()],
            ),
        ]
    if found["grouped"]:
        parts += [f"Grouped KL beside related losses, B = {dro.SMALL}, {dro.NARROW} dimensions:"]
        parts += [table("method", found["grouped"])]
    return parts + _variants(found, table) + _times(found)


def _claims(studies: Sequence[Found]) -> str:
    rows: dict[str, list[str]] = {}
    for place, found in enumerate(studies):
        for each in found["claims"]:
            step = each["difference"]
            text = "-" if step is None else f"{format_spread(step, sign=True)} ({VERDICTS[step['verdict']]})"
            rows.setdefault(each["claim"], ["-"] * len(studies))[place] = text
    return markdown(("claim", *(found["data"] for found in studies)), [(claim, *row) for claim, row in rows.items()])


# PROFS


def _rule(found: Found) -> str:
    rule = found["rule"]
    return (
        f"Plain: {rule['batch'] // rule['samples']} classes x {rule['samples']}. PROFS: M = {rule['M']} steps a "
        f"projection (ρ = {rule['rho']}), a whole cycle is {rule['cycle']} steps, λ = {rule['proximal']:g}. NMI and "
        f"F1: k-means on whole test classes of at most {found['clustered']} samples."
    )


def _profs(found: Found) -> list[str]:
    parts, scores = [_rule(found)], scores_of(found, ("recall@1", "recall@10", "map_at_r", "nmi", "f1"))
    if found["table"]:
        rows = [
            (name, variant, *(format_spread(each[score]) for score in scores), _errors([each]))
            for name, row in found["table"].items()
            for variant, each in row.items()
        ]
        parts.append(markdown(("loss", "batches", *scores.values(), "failed"), rows))
        parts += ["Differences, paired by seed:", _profs_differences(found)]
    if found["by_length"]:
        rule = str(min(found["rule"]["M"], found["steps"]))
        paired = {name: differences_from(rule, row, "recall@1") for name, row in found["by_length"].items()}
        others = [length for length in map(str, found["lengths"]) if length != rule]
        rows = [(name, *(each[length] for length in others)) for name, each in paired.items()]
        parts += ["R@1 against M:", _lengths(found), f"R@1 minus that of M = {rule}, paired by seed:"]
        parts.append(markdown(("loss", *(f"M = {length}" for length in others)), rows))
    return parts


def _profs_differences(found: Found) -> str:
    names, last = list(found["overall"]), "PROFS + HNCM less plain"
    rows = [
        (
            loss,
            *(format_difference(row[name]["recall@1"]) for name in names),
            format_spread(row[last]["nmi"], sign=True),
        )
        for loss, row in found["differences"].items()
    ]
    overall = found["overall"]
    cells = (format_spread(overall[name]["recall@1"], sign=True) for name in names)
    rows.append(("mean over losses", *cells, format_spread(overall[last]["nmi"], sign=True)))
    return markdown(("loss", *(f"R@1, {name}" for name in names), f"NMI, {last}"), rows)


def _lengths(found: Found) -> str:
    rows = [
        (name, *(format_spread(row[str(length)]["recall@1"]) for length in found["lengths"]))
        for name, row in found["by_length"].items()
    ]
    return markdown(("loss", *(f"M = {length}" for length in found["lengths"])), rows)


def _profs_summary(found: Found) -> list[str]:
    """R@1 of every loss, its differences, and R@1 against M."""
    variants = found.get("variants", profs.VARIANTS)
    compared = profs.COMPARED[:2] if len(variants) == len(profs.VARIANTS) else profs.COMPARED_ALONE[1:]
    names, best = [f"{after} less {before}" for before, after in compared], bool(found.get("checkpoints"))
    table = {loss: row for loss, row in found["table"].items() if any(cell["recall@1"] for cell in row.values())}
    rows = []
    for loss, row in table.items():
        scores = [format_spread(row[each]["recall@1"]) if each in row else "-" for each in variants]
        steps = found["differences"].get(loss, {})
        rows.append((loss, *scores, *(format_difference(steps[name]["recall@1"]) if steps else "-" for name in names)))
    means = [format_spread(found["overall"][name]["recall@1"], sign=True) for name in names] if rows else []
    rows += [("mean over losses", *[""] * len(variants), *means)] if rows else []
    parts = [_rule(found).split(" NMI")[0]]
    parts += [markdown(("R@1", *variants, *names), rows)] if rows else []
    if best and rows:
        rows = [(loss, *(_best(row.get(each)) for each in variants)) for loss, row in table.items()]
        parts += [f"R@1 of the best of {found['checkpoints']} checkpoints, and what it has over the last:"]
        parts += [markdown(("R@1", *variants), rows)]
    return parts + (["R@1 with PROFS against M:", _lengths(found)] if found["by_length"] else [])


def _best(cell: Found | None) -> str:
    """R@1 of the best checkpoint, and the mean of what it has over the last."""
    if cell is None or cell["recall@1"] is None:
        return "-"
    best, last = cell["best_recall@1"], cell["recall@1"]
    return f"{format_spread(best)} ({best['mean'] - last['mean']:+.1f})"


# Wrong labels


def _noise(found: Found) -> list[str]:
    rows = [
        (
            name,
            *(format_spread(each["recall@1"]) for each in row.values()),
            format_spread(found["loss_of_recall"][name], sign=True),
            _errors(row.values()),
        )
        for name, row in found["table"].items()
    ]
    heads = [f"R@1, {100 * share:g}% wrong" for share in found["shares"]]
    last = f"{100 * found['shares'][-1]:g}% less {100 * found['shares'][0]:g}%"
    return [markdown(("loss", *heads, last, "failed"), rows)]
