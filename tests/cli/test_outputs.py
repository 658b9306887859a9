"""No command overwrites its input: every output of every command against every input, under all its names."""

from __future__ import annotations

import os
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from needs import need
from runs import config, tiny
from shell import TRUST, Flat, run, saved
from typer.testing import CliRunner

from nearfar._utils.files import protect, write_text
from nearfar.cli.commands.command import OUTPUTS
from nearfar.cli.main import app
from nearfar.runs._config import save
from nearfar.train import fit

pytestmark = pytest.mark.filterwarnings("ignore")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands
"""From typer's own registry: a new command is found by itself."""
EXAMPLES = {
    "bench": ["--quick"],
    "calibrate": ["v.npz", "--gallery", "g.npz", "--far", "0.2", "-o", "e.json"],
    "compare": ["v.npz", "v.npz"],
    "config": ["c.yaml"],
    "demo": ["--quick"],
    "diagnose": ["v.npz"],
    "inspect": ["v.npz"],
    "embed": ["m.pt", "d.npz", TRUST, "-o", "e.npz"],
    "evaluate": ["v.npz", "--gallery", "g.npz"],
    "export": ["s.safetensors", "-o", "e.safetensors"],
    "index": ["v.npz", "-o", "e.npz", "--calibration", "a.json"],
    "losses": [],
    "mine": ["v.npz", "--gallery", "g.npz", "--index", "i.npz"],
    "recommend": ["vectors", "--path", "v.npz"],
    "report": ["v.npz", "-o", "e.html", "--images", "photos", "--calibration", "a.json"],
    "reproduce": ["profs", "--quick", "--path", "photos", "--weights", "s.safetensors"],
    "search": ["i.npz", "v.npz", "--images", "photos"],
    "serve": ["i.npz", "--seconds", "0"],
    "train": ["c.yaml", "--apply-remedy", "run"],
    "tune": ["c.yaml", "--space", "space.yaml"],
}
"""For each command words with all its inputs; they need not succeed: outputs are looked at first."""
FILES = ("v.npz", "g.npz", "d.npz", "i.npz", "m.pt", "s.safetensors", "c.yaml", "space.yaml", "a.json")
FOLDERS = ("photos", "run", "v.vectors", "i.index")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A file or folder of every kind that a command reads."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 6)).astype(np.float32), np.arange(24) % 6
    for name in ("v.npz", "g.npz"):
        np.savez(home / name, x=x, y=y)
    np.savez(home / "d.npz", x=rng.normal(size=(6, 192)).astype(np.float32))
    saved(Flat(192), torch.randn(2, 192), home / "m.pt")
    fit(config(training={"steps": 1}), home / "run", data=tiny())
    run(home, "export", "run", "-o", "s.safetensors")
    run(home, "calibrate", "v.npz", "--far", "0.2", "-o", "a.json")
    run(home, "index", "v.npz", "-o", "i.npz")
    run(home, "index", "v.npz", "-o", "i.index")
    run(home, "embed", "m.pt", "d.npz", TRUST, "-o", "v.vectors")
    save(config(), home / "c.yaml")
    write_text(home / "space.yaml", "optimizer.lr: {low: 1e-4, high: 1e-2}\n")
    (home / "photos" / "cat").mkdir(parents=True)
    (home / "photos" / "cat" / "1.png").write_bytes(b"a picture")
    return home


@pytest.fixture
def place(home, tmp_path):
    return Path(shutil.copytree(home, tmp_path / "home"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def options(name: str) -> list[Any]:
    """The parameters of a command that are paths."""
    (kind,) = [each.callback for each in app.registered_commands if each.callback.__name__ == name]
    hints = typing.get_type_hints(kind)
    return [
        each for each in COMMANDS[name].params if Path in (hints.get(each.name), *typing.get_args(hints.get(each.name)))
    ]


def outputs(name: str) -> list[Any]:
    return [each for each in options(name) if each.name in OUTPUTS]


def inputs(name: str) -> list[str]:
    """What the example of a command reads."""
    return sorted({word for word in EXAMPLES[name] if word in (*FILES, *FOLDERS)})


def test_every_command_has_an_example_with_all_its_inputs():
    assert set(EXAMPLES) == set(COMMANDS)
    for name in COMMANDS:
        arguments = [each for each in options(name) if each.param_type_name == "argument"]
        assert sum(word in (*FILES, *FOLDERS) for word in EXAMPLES[name]) >= len(arguments), name


CASES = [(name, each.opts[0], source) for name in EXAMPLES for each in outputs(name) for source in inputs(name)]


def test_there_is_something_to_test():
    assert {name for name, *_ in CASES} == {
        "calibrate", "diagnose", "embed", "evaluate", "export", "index", "inspect", "mine", "report", "reproduce",
        "search", "train", "tune",
    }  # fmt: skip
    assert len(CASES) > 20


def names_of(folder: Path, source: str) -> dict[str, str]:
    """Other names of a file or folder."""
    (folder / "links").mkdir()
    suffix = Path(source).suffix
    (folder / "links" / f"soft{suffix}").symlink_to(folder / source)
    (folder / "links" / "above").symlink_to(folder)
    found = {
        "itself": source,
        "absolute": str(folder / source),
        "around": f"links/../{source}",
        "soft link": f"links/soft{suffix}",
        "linked folder": f"links/above/{source}",
    }
    if (folder / source).is_file():
        os.link(folder / source, folder / "links" / f"hard{suffix}")
        found["hard link"] = f"links/hard{suffix}"
    return found


@pytest.mark.parametrize(("name", "option", "source"), CASES)
def test_an_output_that_is_an_input_is_refused(name, option, source, place):
    before = contents(place)
    for kind, target in names_of(place, source).items():
        said = run(place, name, *EXAMPLES[name], option, target, code=1)
        assert f"{option} {target} is {source}, which is read here" in said or "is what is read here" in said, kind
    shutil.rmtree(place / "links")
    assert contents(place) == before


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["embed", "m.pt", "photos", TRUST, "-o"], "photos/cat/1.npz"),
        (["index", "v.vectors", "-o"], "v.vectors/1.npz"),
        (["search", "i.index", "v.npz", "--json"], "i.index/about.json"),
        (["report", "run", "-o"], "run/embeddings.html"),
        (["embed", "run", "d.npz", "-o"], "run/best.npz"),
    ],
)
def test_a_file_of_an_input_folder_is_refused(words, target, place):
    old = {
        "photos/cat/1.npz": "photos/cat/1.png",
        "v.vectors/1.npz": next(str(path.relative_to(place)) for path in place.glob("v.vectors/fields-*")),
        "run/embeddings.html": "run/embeddings.npz",
        "run/best.npz": "run/checkpoints/best.pt",
    }.get(target, target)
    if old != target:
        (place / target).symlink_to(place / old)
    os.link(place / old, place / f"hard{Path(target).suffix}")
    before = contents(place)
    for way in (target, f"hard{Path(target).suffix}"):
        assert "is a file of" in run(place, *words, way, code=1)
    assert contents(place) == before


def test_the_page_of_a_run_may_be_written_anew(place):
    for _ in range(2):
        run(place, "report", "run", "-o", "run/report.html")
        run(place, "evaluate", "run", "--json", "run/evaluation.json")


def test_two_outputs_in_one_file_are_refused(place):
    said = run(place, "search", "i.npz", "v.npz", "--json", "p.html", "--page", "./p.html", code=1)
    assert "both name" in said
    assert not (place / "p.html").exists()


RUN = sorted(set(COMMANDS) - {"bench", "demo", "losses", "reproduce", "train", "tune"})


@pytest.mark.parametrize("name", RUN)
def test_an_input_is_left_as_it_is(name, place, monkeypatch):
    """Each command is run to its end, with a file of vectors for each further path that it may read."""
    if name == "serve":
        need("fastapi")
    monkeypatch.chdir(place)
    before = contents(place)
    further = [each.opts[0] for each in options(name) if each.name not in OUTPUTS and each.param_type_name == "option"]
    shown = CliRunner().invoke(app, [name, *EXAMPLES[name]])
    assert shown.exit_code in (0, 2), shown.output
    for option in further:
        CliRunner().invoke(app, [name, *EXAMPLES[name], option, "g.npz"])
    assert {path: data for path, data in contents(place).items() if path in before} == before


def test_nothing_that_a_command_calls_may_write_over_an_input(tmp_path):
    read = tmp_path / "read.txt"
    read.write_text("mine", encoding="utf-8")
    (tmp_path / "soft").symlink_to(read)
    os.link(read, tmp_path / "hard")
    with protect([read, tmp_path / "missing"]):
        for name in ("read.txt", "soft", "hard"):
            with pytest.raises(FileExistsError, match=r"an input, which is never replaced; name another file\.$"):
                write_text(tmp_path / name, "theirs")
        write_text(tmp_path / "missing", "new")
    assert read.read_text(encoding="utf-8") == "mine"
    write_text(read, "later")


def test_a_search_does_not_replace_the_configuration_that_it_began_with(place):
    need("optuna")
    (place / "found").mkdir()
    shutil.copy(place / "c.yaml", place / "found" / "best.yaml")
    said = run(place, "tune", "found/best.yaml", "--space", "space.yaml", "--folder", "found", code=1)
    assert "found/best.yaml is read" in said or "an input, which is never replaced" in said
    assert os.listdir(place / "found") == ["best.yaml"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "c.yaml", "--data.name", "folder", "--data.path", "photos", "--run", "photos"],
        ["tune", "c.yaml", "--data.path", "photos", "--space", "space.yaml", "--folder", "photos"],
    ],
)
def test_results_do_not_go_into_the_folder_of_the_data(words, place):
    before = contents(place)
    assert "photos is what is read here" in run(place, *words, code=1)
    assert contents(place) == before


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["export", "s.safetensors", "-o", "m.tflite"], r"end in .onnx (a graph) or end in .safetensors (weights)"),
        (["export", "s.safetensors", "-o", "m.onnx", "--format", "safetensors"], r"end in .safetensors (weights)"),
        (["embed", "m.pt", "d.npz", TRUST, "-o", "v.csv"], r"end in .npz (a file) or end in .vectors (a folder)"),
        (["index", "v.npz", "-o", "i.faiss"], "end in .npz (a file) or end in .index (a folder) or have no suffix"),
        (["report", "v.npz", "-o", "page.pdf"], "end in .html (a page)"),
        (["search", "i.npz", "v.npz", "--page", "page.png"], "end in .html (a page)"),
    ],
)
def test_a_suffix_that_says_another_format_is_refused(words, allowed, place):
    before = contents(place)
    said = run(place, *words, code=1)
    assert f"must {allowed}" in said
    assert contents(place) == before


def test_a_folder_is_for_networks_of_texts(place):
    before = contents(place)
    assert "a folder is for networks of texts" in run(place, "export", "s.safetensors", "-o", "m", code=1)
    assert contents(place) == before


def test_the_suffix_chooses_the_format_of_an_export(place):
    assert "parameters" in run(place, "export", "run", "-o", "w.safetensors")
    assert "parameters" in run(place, "export", "run", "-o", "w2.safetensors", "--format", "safetensors")
