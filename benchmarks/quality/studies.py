"""What the benchmarks of training share: run a study on several data sets, or make its pages from what it found.

profs.py, dro.py and robustness.py beside it call it. Called itself it runs everything that the pages in docs/ show, in
the order of what matters, with the same processes throughout; call it again, with the same folder, to go on:

    python benchmarks/quality/studies.py --jobs 14 --seconds 560 --folder nearfar-studies

`--plan` runs other studies, in the order given, each as STUDY:DATA, or profs:DATA:table for Table 1 alone:

    python benchmarks/quality/studies.py --plan profs:cub:table dro:cub noise:cub --path FOLDER --jobs 14
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

from nearfar._utils.files import write_text
from nearfar.studies import dro, noise, profs
from nearfar.studies._desk import as_json, in_rounds, open_desk
from nearfar.studies.grid import Trial, Workers

ROOT = Path(__file__).parents[2]
PLAN = (
    (profs, "glyphs", {"parts": ("table",)}),
    (profs, "omniglot", {"parts": ("table",)}),
    (dro, "glyphs", {}),
    (noise, "glyphs", {}),
    (profs, "omniglot", {}),
    (dro, "omniglot", {}),
    (profs, "glyphs", {}),
)
STUDIES = {"dro": dro, "noise": noise, "profs": profs}
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def place_of(data, path):
    """Where a data set lies: as told (glyphs are drawn), or for omniglot in `shared/data` in or beside this tree."""
    if data == "glyphs":
        return None
    if path is not None or data != "omniglot":
        return path
    found = [folder / "shared" / "data" for folder in (ROOT, ROOT.parent)]
    return next((folder for folder in found if (folder / "omniglot_28.npz").is_file()), found[-1])


def arguments(text):
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["glyphs"])
    parser.add_argument("--path", type=Path, help="where the data lie; glyphs needs none")
    parser.add_argument("--folder", type=Path, default=Path("nearfar-studies"), help="runs, numbers and figures")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no run after so many; call again to go on")
    parser.add_argument(
        "--precision", choices=("float32", "bf16", "fp16", "float64"), help="if not what suits the data"
    )
    parser.add_argument("--weights", type=Path, help="a file of weights for the network's trunk")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files: write the pages, run nothing")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, help="the page in docs/, if not the usual one")
    return parser


def train(args, plan, workers):
    """Studies on data sets, one after the other, as long as there is time."""
    begin = time.monotonic()
    for study, data, more in plan:
        left = None if args.seconds is None else args.seconds - (time.monotonic() - begin)
        if left is not None and left <= 0:
            print(f"{study.__name__} {data}: no time left; call again to go on", flush=True)
            continue
        how = {"seeds": args.seeds, "steps": args.steps, "quick": args.quick, "seconds": left}
        how |= {"precision": args.precision, "weights": args.weights}
        try:
            found = study.reproduce(args.folder, data=data, path=place_of(data, args.path), jobs=workers, **how, **more)
        except RuntimeError as error:  # not even the rate could be chosen in time
            print(error, flush=True)
            continue
        write_text(args.folder / f"{found['study']}-{data}.md", study.markdown(found))
        spent = sum(line["seconds"] for line in found["runs"])
        print(
            f"{found['study']} {data}: {len(found['runs'])} runs, {spent:.0f} s of runs; "
            f"{time.monotonic() - begin:.0f} s since the beginning",
            flush=True,
        )


def pages(args, study, title, page):
    """From JSON: results/NAME.md and results/STUDY-DATA.json, the figures, and the results part of a page in docs/."""
    tables, shown = [], []
    for file in args.made:
        found = json.loads(file.read_text(encoding="utf-8"))
        name = f"{found['study']}-{found['data']}"
        study.draw(found, args.images)
        write_text(args.results / f"{name}.json", as_json(found))
        tables.append(f"## {found['data']}\n\n{study.markdown(found)}")
        pictures = [f"![{each.stem}](../docs/images/{each.name})" for each in sorted(args.images.glob(f"{name}*.png"))]
        shown.append("\n\n".join([f"### {found['data']}", *pictures, study.markdown(found)]))
    write_text(args.results / f"{page.stem}.md", f"# {title}\n\n" + "\n".join(tables))
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    write_text(page, before + BEGIN + "\n\n" + "\n".join(shown) + "\n" + END + rest.split(END)[1])
    print(f"{page} and {args.results / page.stem}.md")


def probe(args, steps=200):
    """How long a run takes when all processes are at work: a second round of runs, after everything is loaded."""
    how = {"data": args.data[0], "path": place_of(args.data[0], args.path), "seeds": 1, "quick": True, "seconds": None}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with Workers(args.jobs) as workers, open_desk("probe", args.folder, jobs=workers, **how) as desk:
        for rate in (1.0e-3, 1.1e-3):
            cells = in_rounds(profs._table_cells(desk, profs.LOSSES, steps, rate).values())
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


def main(text, study, title, page, **more):
    parser = arguments(text)
    for name, (options, _) in more.items():
        parser.add_argument(f"--{name}", **options)
    args = parser.parse_args()
    if getattr(args, "probe", False):
        probe(args)
    elif args.made:
        pages(args, study, title, args.page or page)
    else:
        passed = {name: getattr(args, name) for name, (_, wanted) in more.items() if wanted}
        with Workers(args.jobs) as workers:
            train(args, [(study, data, passed) for data in args.data], workers)


def planned(text):
    """A step of the plan from STUDY:DATA[:PARTS]; the parts, joined by commas, are those of profs."""
    name, _, rest = text.partition(":")
    data, _, parts = rest.partition(":")
    if name not in STUDIES or not data or (parts and name != "profs"):
        raise argparse.ArgumentTypeError(f"{text!r} is no STUDY:DATA; the studies are {', '.join(STUDIES)}")
    return STUDIES[name], data, {"parts": tuple(parts.split(","))} if parts else {}


if __name__ == "__main__":
    words = arguments(__doc__)
    words.add_argument("--plan", type=planned, nargs="+", default=PLAN, help="STUDY:DATA ...")
    given = words.parse_args()
    with Workers(given.jobs) as processes:
        train(given, given.plan, processes)
