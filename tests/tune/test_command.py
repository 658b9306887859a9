"""`nearfar tune` as a user runs it, and the page that it writes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from needs import need
from runs import config
from typer.testing import CliRunner

from nearfar.cli.main import app
from nearfar.report._curves import Axis
from nearfar.tune import _page as page
from nearfar.tune import spaces
from nearfar.tune._results import Best, Tuned
from nearfar.tune._trial import Outcome, Trial

CONFIG = """
data: {name: vectors, path: vectors.npz, transform: none, validation: 0.2}
model: {name: linear, embedding_dim: 4}
loss: SupCon
batches: {name: MPerClass, classes: 4, samples: 2}
training: {steps: 6, evaluate_every: 2, checkpoint_every: 6}
"""
SPACE = """
optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
loss:
  - {name: SupCon, temperature: {low: 0.05, high: 0.5}}
  - Contrastive
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(24), 6)
    np.savez("vectors.npz", x=random.normal(size=(24, 8))[y] + random.normal(size=(len(y), 8)), y=y)
    (tmp_path / "mine.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    return tmp_path


def nearfar(line: str):
    return CliRunner().invoke(app, line.split())


def test_a_user_searches_and_trains_the_best(here):
    need("optuna")
    done = nearfar("tune mine.yaml --space space.yaml --trials 2 --folder found --training.steps 4 --held-out 0.3")
    assert done.exit_code == 0, done.output
    assert "recall@1 on held-out training classes, best of 4 trials:" in done.output
    assert f"train the best: nearfar train {Path('found') / 'best.yaml'}" in done.output
    assert {path.name for path in (here / "found").iterdir()} == {
        "best.yaml", "best-SupCon.yaml", "best-Contrastive.yaml", "trials.json", "trials.jsonl", "tune.html"
    }  # fmt: skip
    trained = nearfar("train found/best.yaml --run run")
    assert trained.exit_code == 0, trained.output
    assert "steps: 4" in (here / "run" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--space none.yaml", "there is no file none.yaml"),
        ("--space space.yaml --score recall", "score must be one of 'recall@1', 'map_at_r', but came as 'recall'"),
        ("--space space.yaml --prune mean", "prune must be one of 'median', 'none', but came as 'mean'"),
        ("--space space.yaml --held-out 1.5", "held_out must lie between 0 and 1, both excluded, but came as 1.5."),
        ("--space space.yaml --held-out 0.01", "is one class, which every query finds"),
        ("--space space.yaml --trails 3", "there is no option --trails; did you mean '--trials'?"),
        ("--space space.yaml --batches.classes 40", "batches.classes is 40, more than there are to draw from"),
        ("--space space.yaml --optimizer.lrr 1", "there is no optimizer.lrr; did you mean 'lr'?"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_is_trained(here, flags, words):
    need("optuna")
    done = nearfar(f"tune mine.yaml --folder found {flags}")
    assert done.exit_code == 1
    said = str(done.exception) if str(done.exception) != "1" else done.output
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not (here / "found").exists()


class Tags(HTMLParser):
    """Collects the tags that open and close, and the scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.ids |= {value for name, value in attrs if name == "id"}


def searched(tmp_path) -> Tuned:
    evil = "<script>alert(1)</script>"
    space = {
        "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
        "model.weights": {"choices": [evil, None]},
        "loss": ["SupCon", "Margin"],
    }
    every = spaces(config(), space)
    trials = []
    for number in range(12):
        for each in every:
            values = {"optimizer.lr": 1e-1 * 0.6**number, "model.weights": evil}
            states = {3: Outcome("pruned"), 4: Outcome("diverged", 0.0, error=evil)}
            score = 0.9 - 0.05 * number
            trials.append(Trial(each.label, number, values, states.get(number, Outcome("done", score, (score,)))))
    losses = {each.label: Best.of(each, [one for one in trials if one.loss == each.label]) for each in every}
    return Tuned(tmp_path / "<b>", "recall@1", tuple(trials), losses)


def test_the_page_is_one_file_and_escapes_what_it_shows(tmp_path):
    need("optuna")
    text = page.build(searched(tmp_path))
    tags = Tags()
    tags.feed(text)
    assert tags.opened.count("script") == 1
    assert "b" not in tags.opened
    assert {"history", "losses", "keys", "trials", "setup"} <= tags.ids
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert text.count("at the edge</span>") == 2  # the best rate of each loss is the highest
    assert text.count('class="none"') == 4
    assert "importance" in text


def test_axes_have_round_ticks():
    assert [words for _, words in Axis(0.0, 10.0, 0, 100).ticks(5)] == ["0", "2", "4", "6", "8", "10"]
    assert [words for _, words in Axis(2.0, 64.0, 0, 100, log=True).ticks(5)] == ["3", "10", "30"]
    assert [words for _, words in Axis(0.9, 1.1, 0, 100, log=True).ticks(5)] != []
    assert [words for _, words in Axis(-0.5, 1.5, 0, 100, names=("hard", "semihard")).ticks(5)] == ["hard", "semihard"]
