"""All losses on photographs, each tuned with the same budget and tested once: the study, and the pages made from it.

python benchmarks/quality/photographs.py --path CUB --path-flowers FLOWERS --jobs 14 --seconds 560 --folder out
    runs; stops and goes on, as `nearfar reproduce photographs` does
python benchmarks/quality/photographs.py --from out/photographs-cub.json out/photographs-flowers.json [--papers ...]
    the pages: results/photographs-DATA.json and photographs_study.md, the figures, benchmarks/RESULTS-photographs.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from studies import BEGIN, END, ROOT

from nearfar._utils.files import write_text
from nearfar.studies import photographs
from nearfar.studies._desk import as_json
from nearfar.studies._photographs_methods import METHODS
from nearfar.studies._photographs_pages import claims, paper_claims, tested, values

PAPERS = {"dro": "Qi et al. 2020", "profs": "Can et al. 2019"}


def read(files):
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def pages(args):
    """Write the results, the figures, and the part of the page between the marks."""
    studies, papers, shown = read(args.made), read(args.papers), []
    for found in studies:
        name = f"photographs-{found['data']}"
        write_text(args.results / f"{name}.json", as_json(found))
        shown.append(f"### {found['data']}")
        if tested(found):  # not before: the picture shows test scores
            photographs.draw(found, args.images)
            shown.append(f"![{name}](../docs/images/{name}.png)")
        shown.append(photographs.markdown(found).rstrip())
    if len(studies) > 1:
        shown += ["### Ranks", photographs.ranked(studies)]
    for found in papers:
        title = f"### What {PAPERS[found['study']]} say, run as in the paper on {found['data']}"
        shown += [title, f"Paired differences of R@1, {found['seeds']} seeds:", claims(paper_claims(found))]
    text = "\n\n".join(shown) + "\n"
    write_text(
        args.results / "photographs_study.md", "# Photographs\n\n" + text.replace("../docs/images", "../../docs/images")
    )
    before, rest = args.page.read_text(encoding="utf-8").split(BEGIN)
    write_text(args.page, before + BEGIN + "\n\n" + text + "\n" + END + rest.split(END)[1])
    before, rest = args.which.read_text(encoding="utf-8").split(BEGIN)
    write_text(args.which, before + BEGIN + "\n\n" + values(studies) + "\n\n" + END + rest.split(END)[1])
    print(f"{args.page}, {args.which} and {args.results / 'photographs_study.md'}")


def train(args):
    found = photographs.reproduce(
        args.folder,
        data=args.data,
        path=args.path,
        path_flowers=args.path_flowers,
        seeds=args.seeds,
        steps=args.steps,
        jobs=args.jobs,
        quick=args.quick,
        seconds=args.seconds,
        precision=args.precision,
        weights=args.weights,
        methods=args.methods,
        parts=args.parts,
    )
    for name, each in found.items():
        write_text(args.folder / f"photographs-{name}.md", photographs.markdown(each))
        tested = sum(not line["held_out"] for line in each["runs"])
        failed = sum(line["error"] is not None for line in each["runs"])
        print(f"{name}: {len(each['runs'])} runs, {tested} of them tests, {failed} failed", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cub", help="cub, folder, or other pictures at --path")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--path-flowers", type=Path)
    parser.add_argument("--weights", type=Path, help="a file of weights of EfficientNet-Lite0")
    parser.add_argument("--folder", type=Path, default=Path("nearfar-photographs"), help="runs, numbers and figures")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no run after so many; call again to go on")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16", "float64"))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), metavar="METHOD", help="; ".join(METHODS))
    parser.add_argument("--parts", nargs="+", choices=photographs.PARTS, default=list(photographs.PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files: write the pages, run nothing")
    parser.add_argument(
        "--papers", type=Path, nargs="+", default=[], help="dro-DATA.json, profs-DATA.json: their claims"
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "RESULTS-photographs.md")
    parser.add_argument("--which", type=Path, default=ROOT / "docs" / "guides" / "which-loss.md")
    args = parser.parse_args()
    (pages if args.made else train)(args)


if __name__ == "__main__":
    main()
