"""Run the studies isometry and descent in full, and write their tables and figures into docs/papers.

    python benchmarks/quality/papers.py                 run both: about two minutes of a core
    python benchmarks/quality/papers.py --pages         write the pages from benchmarks/results alone

It writes benchmarks/results/isometry.json and descent.json, docs/images/isometry-*.png and descent-*.png, and on each
page the parts between two marks. The tables of the other two papers are written by studies.py and photographs.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from nearfar._utils.files import write_text
from nearfar._utils.tables import round_numbers
from nearfar.studies import descent, isometry

ROOT = Path(__file__).parents[2]
RESULTS, IMAGES, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images", ROOT / "docs" / "papers"
FIGURES = {
    "isometry": ("toy", "collapse"),
    "descent": ("surface", "appendix", "bounds", "rivals"),
}
KEPT = {"isometry": ("toy", "collapse", "shrink", "moved", "descent"), "descent": ("rivals", "hyperplanes", "errata")}


def run(name, study):
    """Run a study, keep its figures and numbers, and how long it took."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        found = study.reproduce(folder)
        seconds = time.process_time() - begin
        for figure in FIGURES[name]:
            shutil.copy(Path(folder) / f"{name}-{figure}.png", IMAGES)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    about = {"command": f"nearfar reproduce {name}", "device": "CPU, one thread", "cpu_seconds": round(seconds)}
    kept = round_numbers({key: found[key] for key in KEPT[name]}, 7)
    text = json.dumps({**about, "versions": versions, **kept}, indent=1, ensure_ascii=False)
    write_text(RESULTS / f"{name}.json", text + "\n")


def markdown(head, rows):
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def short(value):
    """Two decimals, without the zero before the point; three of small numbers."""
    return f"{value:.3f}"[1:] if value < 0.05 else f"{value:.2f}".removeprefix("0")


def made(found):
    """How the numbers of a page were made."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"`{found['command']}`: {found['cpu_seconds']} seconds ({found['device']}; {versions})."


def toy(found):
    """The toy set."""
    toy, hard = found["toy"], found["toy"]["triplet"]
    return markdown(
        ["", "here", "in Xu et al. 2022"],
        [
            ["H", f"{toy['hardness']:.4f}, anchor {hard[0]}, positive {hard[1]}, negative {hard[2]}", "-"],
            ["d_iso", f"{toy['d_iso']:.4f}", "-"],
            ["d_haus", f"{toy['d_haus']:.4f}", "-"],
            ["c = d_haus / d_iso", f"{toy['ratio']:.3f}", ".53"],
            ["diameter / thickness, what c is made of", f"{toy['diameter_over_thickness']:.2f}", "-"],
            ["pairs that bind in every f*_iso", ", ".join(toy["binding"]), "three points"],
        ],
    )


def restricted(found):
    """The price of a set without collapsed maps."""
    found = found["collapse"]
    whole, kept = found["d_haus"], found["restricted"]["d_haus"]
    more = f"{kept:.3f} (+{kept / whole - 1:.1%}) for maps that keep all of the spread."
    return f"N = 20, n = 2: d_haus = {whole:.3f}; {more}"


def shrink(found):
    """The smallest shrink of classes that separates."""
    table = found["shrink"]["table"]
    widths = list(next(iter(table.values())))
    rows = [[rows, *(short(line[width]["shrink"]) for width in widths)] for rows, line in table.items()]
    return markdown(["N \\ n", *widths], rows)


def moved(found):
    """The least and the largest share of the spread that a nearest map keeps."""
    table = found["moved"]["table"]
    widths = sorted({width for line in table.values() for width in line}, key=int)

    def cell(each):
        return "-" if each is None else " to ".join(short(each[end]["total"]) for end in ("least", "largest"))

    return markdown(["N \\ n", *widths], [[rows, *(cell(line.get(w)) for w in widths)] for rows, line in table.items()])


def descents(found):
    """Final over initial spread, and the share of runs that reached zero."""
    head, rows = ["loss"], []
    for name, table in found["descent"]["table"].items():
        row = [name]
        for line in table.values():
            zero = {cell["zero"] for cell in line.values()}
            words = ", ".join(f"{cell['zero']:.0%}" for cell in line.values()) if zero != {1.0} else "all"
            row.append(f"{' / '.join(short(cell['total']) for cell in line.values())} ({words})")
        rows.append(row)
        head = ["loss", *(f"N = {count}: n = {' / '.join(line)}" for count, line in table.items())]
    return markdown(head, rows)


def rivals(found):
    """Accuracies of nearest neighbors and of support vector machines."""
    names = list(found["rivals"])
    rows = []
    for method in found["rivals"][names[0]]:
        cells = [found["rivals"][name][method] for name in names]
        rows.append([method, *(f"{short3(cell['mean'])} ± {short3(cell['half'])}" for cell in cells)])
    return markdown(["", *names], rows)


def hyperplanes(found):
    """The angles between hyperplanes."""
    pairs = ((name.replace(", ", " and "), each) for name, each in found["hyperplanes"].items())
    return markdown(
        ["normals", "\\|cos\\|"], [[name, f"{short3(each['mean'])} ± {short3(each['half'])}"] for name, each in pairs]
    )


def short3(value):
    """Three decimals, without the zero before the point."""
    return f"{value:.3f}".removeprefix("0")


PARTS = {
    "xu-2022.md": (
        "isometry",
        {"made": made, "toy": toy, "restricted": restricted, "shrink": shrink, "moved": moved, "descents": descents},
    ),
    "jaffe-2020.md": ("descent", {"made": made, "rivals": rivals, "hyperplanes": hyperplanes}),
}


def fill(text, name):
    """A page with its generated parts written again."""
    study, parts = PARTS[name]
    found = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))
    for part, make in parts.items():
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make(found)}\n\n{end}{rest.split(end)[1]}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="run nothing")
    parser.add_argument("--studies", nargs="+", choices=tuple(KEPT), default=tuple(KEPT))
    args = parser.parse_args()
    for name in () if args.pages else args.studies:
        run(name, {"isometry": isometry, "descent": descent}[name])
    for page in PARTS:
        write_text(PAGES / page, fill((PAGES / page).read_text(encoding="utf-8"), page))


if __name__ == "__main__":
    main()
