"""From the runs of the doctor's benchmark to its lines, the confusion on runs it was not fitted on, and the tables."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import doctor_plan as plan
from doctor_runs import collapsed, onset

from nearfar.doctor import Thresholds, diagnose_journal
from nearfar.doctor.course import Case, judged, seen
from nearfar.train import parse

DELAY = 0.05
GRID = {
    "looks": (1, 2, 3),
    "lost_alarm": (0.3, 0.4, 0.5, 0.6, 0.7),
    "lost_warning": (0.5, 0.6, 0.7, 0.8, 0.9),
    "lost_least": (0.0, 0.05, 0.1, 0.15),
}
"""What is chosen on half of the settings; other lines were fixed before."""
TRUTH = ("collapsed", "healthy", "neither")
MEANT = ("semihard", "hard, annealed")
"""Ways of mining that are meant to be healthy; plain hard mining at these rates is not."""
T95 = {1: 12.706, 2: 4.303}
"""Student's t at 95%, by degrees of freedom: two and three seeds."""


def pooled(calibration, rescue, softened):
    """All runs to calibrate on: one line each, with its setting, and whether it was meant to be healthy."""
    for line in calibration:
        yield line | {"setting": line["name"], "meant": line["kind"] == "sound"}
    for line in softened:
        yield line | {"setting": line["name"].rsplit(", seed", 1)[0], "meant": line["arm"] in MEANT}
    for line in rescue:
        yield line | {"meant": False}
        if line.get("cured"):
            again = {"name": f"{line['name']}, after the remedy", "setting": f"{line['setting']}, after the remedy"}
            cured = (
                {**line["tree"], "loss": {"name": "Triplet", "margin": 0.2}}
                if line["kind"] != "decay"
                else line["tree"]
            )
            yield line | line["cured"] | again | {"meant": True, "tree": cured}


def group(line):
    """The truth: collapsed; healthy: meant to be, and at no look collapsed; else neither (ill, or only for a while)."""
    if onset(line["truth"]) is not None:
        return "collapsed"
    return "healthy" if line["meant"] and not any(collapsed(line["truth"])) else "neither"


_READ = {}


def read(journal, tree):
    """The looks and the case of a run, read once."""
    if id(journal) not in _READ:
        _READ[id(journal)] = journal, seen(journal), Case.of(parse(tree))
    return _READ[id(journal)][1:]


def findings(line, limits):
    """(step, names) of every look with a finding above a note."""
    sights, case = read(line["journal"], line["tree"])
    for i in range(2, len(sights) + 1):
        recent = [*sights[:1], *sights[max(1, i - 4) : i]] if i > 5 else sights[:i]
        names = [each.name for each in judged(recent, limits, case) if each.severity != "note"]
        if names:
            yield sights[i - 1].step, names


def named(line, limits):
    """The first such look, or None."""
    return next(findings(line, limits), None)


def in_time(line, limits):
    """Whether a collapse is named before a twentieth of the run has passed since its onset."""
    first = named(line, limits)
    return first is not None and first[0] <= onset(line["truth"]) + DELAY * line["tree"]["training"]["steps"]


def halves(lines):
    """Settings, not runs, are split: of each group every second one, in the order of their names."""
    by_group = {}
    for setting in sorted({line["setting"] for line in lines}):
        which = sorted({group(line) for line in lines if line["setting"] == setting})[0]
        by_group.setdefault(which, []).append(setting)
    fitted = {setting for settings in by_group.values() for setting in settings[::2]}
    return [x for x in lines if x["setting"] in fitted], [x for x in lines if x["setting"] not in fitted]


def fit(lines):
    """The lines that name most collapses in time without a false alarm; of those the fewest looks, then the middle.

    The middle of the values of a line that are as good, with the lines before it at their middle.
    """
    ill, well = ([line for line in lines if group(line) == which] for which in ("collapsed", "healthy"))
    tried = {}
    for values in itertools.product(*GRID.values()):
        chosen = dict(zip(GRID, values, strict=True))
        if chosen["lost_alarm"] > chosen["lost_warning"]:
            continue
        limits = replace(Thresholds(), **chosen)
        false = sum(named(line, limits) is not None for line in well)
        tried[values] = false, sum(in_time(line, limits) for line in ill)
    good = [values for values, found in tried.items() if found == best(tried)]
    chosen = []
    for place in range(len(GRID)):
        values = sorted({each[place] for each in good})
        chosen.append(values[0] if place == 0 else values[len(values) // 2])
        good = [each for each in good if each[place] == chosen[-1]]
    return dict(zip(GRID, chosen, strict=True)), tried


def confusion(lines, limits):
    """Counts by truth: runs, those named at some look, in time, and those not healthy by their whole journal."""
    table = {which: {"runs": 0, "named": 0, "in time": 0, "at the end": 0} for which in TRUTH}
    for line in lines:
        row = table[group(line)]
        row["runs"] += 1
        row["named"] += named(line, limits) is not None
        row["in time"] += group(line) == "collapsed" and in_time(line, limits)
        whole = diagnose_journal(line["journal"], config=parse(line["tree"]), thresholds=limits)
        row["at the end"] += not whole.healthy
    return table


def about(line, limits, half):
    """One run in a few words and numbers."""
    first, truth = named(line, limits), line["truth"]
    return {
        "run": line["name"],
        "seed": line["tree"]["training"]["seed"],
        "kind": line["kind"],
        "half": half,
        "truth": group(line),
        "onset": onset(truth),
        "named": None if first is None else first[0],
        "as": [] if first is None else first[1],
        "R@1 start": truth[0][2],
        "R@1 end": truth[-1][2],
        "rank end": truth[-1][1],
        "spread end": truth[-1][3],
        "test R@1": line["test"],
    }


def interval(values):
    """Mean and half of a 95% interval (Student's t) over seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def shown(values):
    mean, half = interval(values)
    return f"{100 * mean:.1f}" if math.isnan(half) else f"{100 * mean:.1f} ± {100 * half:.1f}"


def best(tried):
    """(0, most): no false alarm, and so many collapses named in time."""
    return 0, max(right for false, right in tried.values() if false == 0)


def calibration(lines, apart):
    """Lines chosen on half of the settings, judged on the other half, and on runs that had no part in the choice."""
    first, second = halves(lines)
    chosen, tried = fit(first)
    limits = replace(Thresholds(), **chosen)
    return {
        "thresholds": chosen,
        "as good": [dict(zip(GRID, values, strict=True)) for values, found in tried.items() if found == best(tried)],
        "tried": len(tried),
        "fitted on": confusion(first, limits),
        "judged on": confusion(second, limits),
        "apart": confusion([line | {"meant": line["arm"] in MEANT} for line in apart], limits),
        "runs": [about(line, limits, half) for half, part in (("fitted", first), ("judged", second)) for line in part],
    }


def rescue(lines):
    """Before and after the remedy, a setting a row."""
    rows = []
    for setting in sorted({line["setting"] for line in lines}, key=lambda name: _order(name)):
        runs = [line for line in lines if line["setting"] == setting]
        cured = [line for line in runs if line.get("cured")]
        row = {"setting": setting, "kind": runs[0]["kind"], "seeds": len(runs), "named": len(cured)}
        row["collapsed before"] = sum(onset(line["truth"]) is not None for line in runs)
        row["start"] = [line["truth"][0][2] for line in runs]
        row["before"] = [line["truth"][-1][2] for line in runs]
        row["after"] = [line["cured"]["truth"][-1][2] for line in cured]
        row["collapsed after"] = sum(onset(line["cured"]["truth"]) is not None for line in cured)
        row["test before"] = [line["test"] for line in runs]
        row["test after"] = [line["cured"]["test"] for line in cured]
        row["remedy"] = sorted({"; ".join(line["remedy"]) for line in cured})
        row["said"] = sorted({line["said"] for line in runs})
        rows.append(row)
    return rows


def _order(name):
    kind = name.split(", ")[2].split(":")[0]
    return plan.KINDS.index(kind) if kind in plan.KINDS else len(plan.KINDS), name


def softened(lines):
    """Plain, annealed and semi-hard: R@1 over seeds."""
    keys = sorted({(line["data"], line["rate"]) for line in lines})
    rows = []
    for data, rate in keys:
        row = {"data": data, "rate": rate}
        for line in lines:
            if (line["data"], line["rate"]) == (data, rate):
                arm = row.setdefault(line["arm"], {"held-out": [], "test": [], "spread": [], "collapsed": 0})
                arm["held-out"].append(line["truth"][-1][2])
                arm["test"].append(line["test"])
                arm["spread"].append(line["truth"][-1][3])
                arm["collapsed"] += onset(line["truth"]) is not None
        rows.append(row)
    return rows


def prevented(lines):
    """Where plain hard mining collapses: it, annealed, and semi-hard."""
    rows = {}
    for line in lines:
        row = rows.setdefault((line["setting"], line["arm"]), {"start": [], "held-out": [], "test": [], "collapsed": 0})
        row["start"].append(line["truth"][0][2])
        row["held-out"].append(line["truth"][-1][2])
        row["test"].append(line["test"])
        row["collapsed"] += onset(line["truth"]) is not None
    return [{"setting": setting, "arm": arm} | row for (setting, arm), row in rows.items()]


def mining(lines):
    """Hard and hardest mining by rows, width and margin: what is left of the space."""
    rows = {}
    for line in lines:
        if line.get("test") is None:
            continue
        key = tuple(line[name] for name in ("mining", "rows", "width", "margin"))
        row = rows.setdefault(key, {"spread": [], "start spread": [], "rank": [], "R@1": [], "start": [], "test": []})
        first, last = line["truth"][0], line["truth"][-1]
        for name, value in (("start", first[2]), ("R@1", last[2]), ("rank", last[1]), ("spread", last[3])):
            row[name].append(value)
        row["start spread"].append(first[3])
        row["test"].append(line["test"])
    return [dict(zip(("mining", "rows", "width", "margin"), key, strict=True)) | row for key, row in rows.items()]
