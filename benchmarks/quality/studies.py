"""Train the studies dro, profs and noise on several data sets, or write their reports from the results.

Without `--plan` it runs everything on glyphs and Omniglot, the most important parts first, with the same processes
throughout; call it again with the same folder to continue:

    python benchmarks/quality/studies.py --jobs 14 --seconds 560 --folder nearfar-studies

`--plan` runs other studies, in the order given, each as STUDY:DATA or STUDY:DATA:PARTS, such as Table 1 alone, or whole
networks on photographs (FOLDER holds the archives of CUB and of Flowers-102), in stretches of ten minutes:

    python benchmarks/quality/studies.py --plan profs:cub:table dro:cub noise:cub --path FOLDER --jobs 14
    python benchmarks/quality/studies.py --plan profs:cub:first profs:flowers:first profs:cub:ablation \
        profs:flowers:ablation --path FOLDER --checkpoints 10 --jobs 12 --seconds 300 --folder nearfar-whole
    python benchmarks/quality/studies.py --plan dro:cub dro:flowers --path FOLDER --steps 300 --checkpoints 10 \
        --jobs 5 --seconds 480 --folder nearfar-whole

`--from` writes benchmarks/RESULTS-*.md, benchmarks/results and the figures:

    python benchmarks/quality/studies.py --from nearfar-studies/dro-glyphs.json nearfar-studies/dro-vectors.json

`--probe` measures in a minute how fast runs are on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from study_tables import summary, tables

from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.studies import dro, noise, profs
from nearfar.studies._training import open_study, order_by_seed
from nearfar.studies._training_figures import stem
from nearfar.studies.grid import Trial, Workers

ROOT = Path(__file__).parents[2]
STUDIES = {"dro": dro, "noise": noise, "profs": profs}
TOPICS = {
    "dro": ("dro", "Robust losses: imbalance, K, and grouped KL"),
    "noise": ("robustness", "Wrong labels"),
    "profs": ("profs", "Alternating projections and hard negative classes"),
}
PLAN = (
    (profs, "glyphs", {"parts": ("table",)}),
    (profs, "omniglot", {"parts": ("table",)}),
    (dro, "glyphs", {}),
    (noise, "glyphs", {}),
    (profs, "omniglot", {}),
    (dro, "omniglot", {}),
    (profs, "glyphs", {}),
)
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def place_of(data, path):
    """The path of a data set: as given, none for glyphs, or `shared/data` in or beside the repository for omniglot."""
    if data == "glyphs":
        return None
    if path is not None or data != "omniglot":
        return path
    found = [folder / "shared" / "data" for folder in (ROOT, ROOT.parent)]
    return next((folder for folder in found if (folder / "omniglot_28.npz").is_file()), found[-1])


def train(args):
    """Run the studies of the plan one after the other, as long as there is time."""
    begin = time.monotonic()
    with Workers(args.jobs) as workers:
        for study, data, more in args.plan:
            left = None if args.seconds is None else args.seconds - (time.monotonic() - begin)
            if left is not None and left <= 0:
                print(f"{study.__name__} {data}: no time left; call again to continue", flush=True)
                continue
            how = {"seeds": args.seeds, "steps": args.steps, "quick": args.quick, "seconds": left, "jobs": workers}
            how |= {"precision": args.precision, "weights": args.weights, "checkpoints": args.checkpoints}
            try:
                found = study.reproduce(args.folder, data=data, path=place_of(data, args.path), **how, **more)
            except RuntimeError as error:  # there was no time to choose the learning rate
                print(error, flush=True)
                continue
            write_text(args.folder / f"{found['stem']}.md", tables(found))
            spent = sum(line["seconds"] for line in found["runs"])
            print(
                f"{found['study']} {data}: {len(found['runs'])} runs, {spent:.0f} s of runs; "
                f"{time.monotonic() - begin:.0f} s since the beginning",
                flush=True,
            )


def write_report(found, args):
    """Write the results and figures of one study on several data sets, and the generated part of its report."""
    study = found[0]["study"]
    topic, title = TOPICS[study]
    for each in found:
        STUDIES[study].draw(each, args.images)
        write_text(args.results / f"{stem(each)}.json", as_json(each, "runs", 7))
    full = "\n".join(f"## {each['data']}\n\n{tables(each)}" for each in found)
    write_text(args.results / f"{topic}.md", f"# {title}\n\n{full}")
    page = args.reports / f"RESULTS-{topic}.md"
    write_text(page, fill(page.read_text(encoding="utf-8"), summary(found)))
    print(f"{page} and {args.results / topic}.md")


def fill(text, generated):
    """The text with its generated part replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated}\n{END}{rest.split(END)[1]}"


def probe(args, steps=200):
    """Print how long a run takes when all processes are at work: a second round of runs, after everything is loaded."""
    how = {"data": "glyphs", "seeds": 1, "quick": True}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with Workers(args.jobs) as workers, open_study("probe", args.folder, jobs=workers, **how) as study:
        for rate in (1.0e-3, 1.1e-3):
            cells = order_by_seed(profs._table_cells(study, profs.LOSSES, steps, rate).values())
            trials = [Trial(trial.config) for trial in itertools.islice(itertools.cycle(cells), args.jobs)]
            start = time.monotonic()
            lines = list(workers.results(trials))
            wall, seconds = time.monotonic() - start, sorted(line["seconds"] for line in lines)
            print(
                f"{device}, {args.jobs} processes: {len(lines)} runs of {steps} steps in {wall:.1f} s, a run from "
                f"{seconds[0]:.1f} to {seconds[-1]:.1f} s, {steps * len(lines) / wall:.0f} steps/s in all; "
                f"errors: {sorted({line['error'] for line in lines if line['error']})}",
                flush=True,
            )


def step_of(text):
    """A step of the plan from STUDY:DATA[:PARTS]; the parts, joined by commas, are those of profs or dro."""
    name, _, rest = text.partition(":")
    data, _, parts = rest.partition(":")
    if name not in STUDIES or not data or (parts and name == "noise"):
        raise argparse.ArgumentTypeError(f"{text!r} is not STUDY:DATA; the studies are {', '.join(STUDIES)}")
    return STUDIES[name], data, {"parts": tuple(parts.split(","))} if parts else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=step_of, nargs="+", default=PLAN, help="STUDY:DATA ...")
    parser.add_argument("--path", type=Path, help="path of the data; glyphs needs none")
    parser.add_argument("--folder", type=Path, default=Path("nearfar-studies"), help="runs, numbers and figures")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no run after this time; call again to continue")
    parser.add_argument("--checkpoints", type=int, default=0, help="score the test classes so often")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16", "float64"))
    parser.add_argument("--weights", type=Path, help="a file of weights for the network's trunk")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--probe", action="store_true", help="measure the speed of runs on this machine")
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files: write the reports, run nothing")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--reports", type=Path, default=ROOT / "benchmarks", help="folder of RESULTS-*.md")
    args = parser.parse_args()
    if args.probe:
        probe(args)
    elif args.made:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in args.made]
        for study in dict.fromkeys(each["study"] for each in found):
            write_report([each for each in found if each["study"] == study], args)
    else:
        train(args)


if __name__ == "__main__":
    main()
