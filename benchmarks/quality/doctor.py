"""The doctor, calibrated on runs made to collapse; its remedies tried; hard mining at two batch sizes.

python benchmarks/quality/doctor.py --parts calibration mining --jobs 15 --seconds 300 --out runs.json
python benchmarks/quality/doctor.py --parts rescue softened --ill calibration.json --out more.json
python benchmarks/quality/doctor.py --from runs.json more.json       thresholds, tables, results/doctor.{json,md}
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import doctor_pages as markdown
import doctor_plan as plan
import doctor_tables as tables
from doctor_runs import onset, run_all

from nearfar._utils.files import write_text

ROOT = Path(__file__).parents[2]
PARTS = {
    "calibration": plan.calibration,
    "again": plan.again,
    "mining": plan.mining,
    "largest": plan.largest,
    "softened": plan.softened,
    "prevented": plan.prevented,
}
READ = {
    "calibration": ("calibration", "again"),
    "rescue": ("rescue",),
    "softened": ("softened",),
    "prevented": ("prevented",),
    "mining": ("mining", "largest"),
}


def ill_settings(file):
    """One setting for each kind of collapse and each data set: the first that collapsed, in the order of the plan."""
    lines = {line["name"]: line for line in json.loads(file.read_text(encoding="utf-8")) if "truth" in line}
    chosen = {}
    for trial in plan.calibration():
        line = lines.get(trial.name)
        if trial.kind in plan.KINDS and line and onset(line["truth"]) is not None:
            chosen.setdefault((trial.kind, trial.data), trial.name)
    return set(chosen.values())


def trials_of(name, ill):
    if name == "rescue":
        return list(plan.rescue(ill_settings(ill)))
    found = list(PARTS[name]())
    if name in ("calibration", "again"):
        random.Random(0).shuffle(found)  # what a time limit leaves out is then no kind in particular
    return found


def train(args):
    lines, begin = [], time.monotonic()
    trials = [(part, trial) for part in args.parts for trial in trials_of(part, args.ill)][: args.most]
    for line in run_all(
        [replace(trial, about={"part": part} | trial.about) for part, trial in trials], args.jobs, args.seconds
    ):
        lines.append(line)
        write_text(args.out, json.dumps(lines))
    print(f"{len(lines)} of {len(trials)} runs in {time.monotonic() - begin:.0f} s")


def pages(args):
    """From JSON files of runs: the lines, the tables, results/doctor.json and doctor.md."""
    lines = [line for file in args.made for line in json.loads(file.read_text(encoding="utf-8")) if "truth" in line]
    part = {name: [line for line in lines if line["part"] in names] for name, names in READ.items()}
    found = {
        "machine": args.machine,
        "steps": plan.STEPS,
        "calibration": tables.calibration(
            list(tables.pooled(part["calibration"], part["rescue"], part["softened"])), part["prevented"]
        ),
        "rescue": tables.rescue(part["rescue"]),
        "softened": tables.softened(part["softened"]),
        "prevented": tables.prevented(part["prevented"]),
        "mining": tables.mining(part["mining"]),
    }
    write_text(args.results / "doctor.json", json.dumps(found, indent=1) + "\n")
    write_text(args.results / "doctor.md", markdown.page(found))
    write_text(args.page, markdown.filled(args.page.read_text(encoding="utf-8"), found))
    print(markdown.confusion(found["calibration"]), found["calibration"]["thresholds"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["calibration"])
    parser.add_argument("--ill", type=Path, help="a JSON file of the calibration, for the rescue")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--most", type=int, help="so many runs at most")
    parser.add_argument("--out", type=Path, default=Path("nearfar-doctor.json"))
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files of runs: write the tables")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    page = ROOT / "benchmarks" / "RESULTS-doctor.md"
    parser.add_argument("--page", type=Path, default=page, help="the page that shows the tables")
    parser.add_argument("--machine", default="", help="a sentence on where the runs were made, for the tables")
    args = parser.parse_args()
    (pages if args.made else train)(args)


if __name__ == "__main__":
    main()
