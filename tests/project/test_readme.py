"""README.md: one minute, in its order, with figures from the results and links that lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import nearfar as nf
from nearfar.runs._config import load
from nearfar.runs._parts import check

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 70


def test_it_says_first_what_people_ask_first():
    order = ("nf.losses.MultiSimilarity", "## Why switch", "from nearfar.pml import", "docs/images/scaling.png",
             "| losses |", "## Try it", "make demo", "make test")  # fmt: skip
    places = [TEXT.index(each) for each in order]
    assert places == sorted(places)


def test_figures_are_those_of_the_results():
    for page, makers in readme.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert readme.filled(text, *makers) == text, "run: python scripts/readme.py"
        assert readme.filled(re.sub(r"(\d)x\b", r"9\1x", text), *makers) == text


def test_the_picture_is_drawn_from_the_results():
    assert readme.PICTURE.with_suffix(".source").read_text(encoding="utf-8").strip() == readme.digest()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:\]\(|src=\")((?!https?:)[^)\"#]+)", TEXT))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_numbers_and_commands_are_true():
    assert int(re.search(r"\| losses \| over (\d+),", TEXT)[1]) < len(nf.losses.__all__)
    flags = re.search(r"nearfar train (.+) --run", TEXT)[1].removeprefix("--").split(" --")
    check(load(None, [tuple(flag.split()) for flag in flags]))
    for target in re.findall(r"^    make (\w+)", TEXT, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
