"""`nearfar reproduce` on small replicas of the official layouts of Cars-196, SOP and In-Shop: from files to a table."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from typer.testing import CliRunner

from nearfar.cli.main import app
from nearfar.data import _benchmarks
from nearfar.studies import _training, dro, grid

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
EACH = 4


def picture(path, label):
    """A small picture in the color of its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([label, len(path.name), sum(path.name.encode())])
    pixels = np.full((40, 40, 3), (37 * label) % 200) + random.integers(0, 55, (40, 40, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def cars(folder):
    """Classes 1 to 6 and 99 to 104."""
    numbers = [number for number in (*range(1, 7), *range(99, 105)) for _ in range(EACH)]
    names = [f"car_ims/{place:06d}.jpg" for place in range(1, len(numbers) + 1)]
    kinds = [("relative_im_path", object), ("bbox_x1", object), ("class", object), ("test", object)]
    table = np.zeros((1, len(numbers)), dtype=kinds)
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        picture(folder / name, number)
        table[0, place] = (name, 1, number, 0)
    words = np.array([[f"Car {number}" for number in range(1, 197)]], dtype=object)
    savemat(folder / "cars_annos.mat", {"annotations": table, "class_names": words})


def sop(folder):
    """Six classes a side."""
    number = 0
    for side, first in (("train", 1), ("test", 11319)):
        rows = ["image_id class_id super_class_id path"]
        for label in range(first, first + 6):
            for place in range(EACH):
                number += 1
                rows.append(f"{number} {label} 1 bicycle_final/{label}_{place}.JPG")
                picture(folder / "bicycle_final" / f"{label}_{place}.JPG", label)
        (folder / f"Ebay_{side}.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")


def inshop(folder):
    """Six items for training, and six others whose pictures are queries and gallery by turns."""
    rows = []
    for label in range(12):
        for place in range(EACH):
            name = f"img/MEN/Denim/id_{label:08d}/01_{place}_front.jpg"
            picture(folder / name, label)
            rows.append((name, f"id_{label:08d}", "train" if label < 6 else ("query", "gallery")[place % 2]))
    lines = [str(len(rows)), "image_name item_id evaluation_status", *("   ".join(row) for row in rows)]
    (folder / "Eval").mkdir()
    (folder / "Eval" / "list_eval_partition.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


RECALLS = {"cars": (1, 2, 4, 8, 16, 32), "sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 40, 50)}
REPLICAS = {"cars": cars, "sop": sop, "inshop": inshop}


@pytest.fixture(params=REPLICAS)
def data(request, tmp_path, monkeypatch):
    """The name of a data set, its replica, and settings with which a run takes a moment."""
    REPLICAS[request.param](tmp_path)
    read = _benchmarks._data_set
    monkeypatch.setattr(_benchmarks, "_data_set", lambda name, sides, counts, check: read(name, sides, counts, False))
    sections = {"data": {"size": 16, "transform": "photographs"}, "model": {"name": "small", "embedding_dim": 8}}
    monkeypatch.setattr(_training, "photograph_settings", lambda: _training.Settings(sections, (1e-4, 1e-3, 1e-2)))
    return request.param, tmp_path


def reproduced(study, data, path, folder, *words):
    """The results of a command, and the table that is made of them."""
    command = ["reproduce", study, "--data", data, "--path", str(path), "--folder", str(folder), "--quick"]
    done = CliRunner().invoke(app, [*command, "--seeds", "1", "--steps", "2", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (file,) = folder.glob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [line["error"] for line in found["runs"]] == [None] * len(found["runs"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(QUALITY))
        return found, import_module("study_tables").tables(found)


@pytest.mark.skipif(not QUALITY.exists(), reason="benchmarks are not in a release")
def test_from_files_to_the_finished_table(data):
    name, path = data
    found, text = reproduced("dro", name, path, path / "dro", "--parts", "grouped,variants", "--width", "4")
    heads = " | ".join(f"R@{k}" for k in RECALLS[name])
    assert f"| method | {heads} | MAP@R | failed |" in text
    assert found["stem"] == f"dro-{name}-4"
    most = 12 if name == "inshop" else 23  # as many as the gallery holds, or all others
    measured = [k for k in RECALLS[name] if found["grouped"]["LS"][f"recall@{k}"] is not None]
    assert measured == [k for k in RECALLS[name] if k <= most]
    found, text = reproduced("profs", name, path, path / "profs", "--parts", "table")
    recalls = RECALLS[name] if name != "cars" else (1, 2, 4, 8, 10)
    assert f"| loss | batches | {' | '.join(f'R@{k}' for k in recalls)} | MAP@R | NMI | F1 | failed |" in text
    assert "| Triplet-hard | PROFS + HNCM |" in text


@pytest.mark.parametrize("data", ["cars"], indirect=True)
@pytest.mark.skipif(not QUALITY.exists(), reason="benchmarks are not in a release")
def test_whole_networks_in_stretches(data, tmp_path, monkeypatch):
    """The plan continues over calls, with results kept after each run, and begins nothing when it is complete."""
    _, path = data
    monkeypatch.syspath_prepend(str(QUALITY))
    studies, attempt, runs = import_module("studies"), grid.attempt, []
    monkeypatch.setattr(grid, "attempt", lambda trial: runs.append(trial) or attempt(trial))
    plan = ["studies.py", "--plan", "profs:cars:first", "dro:cars:grouped", "--path", str(path), "--seeds", "1"]
    plan += ["--steps", "2", "--checkpoints", "2", "--quick", "--folder", str(tmp_path / "out"), "--seconds"]
    counts = []
    for seconds in ("0.001", "600", "600"):
        monkeypatch.setattr("sys.argv", [*plan, seconds])
        studies.main()
        counts.append(len(runs))
    assert counts[0] < counts[1] == counts[2] == 2 * 5 + 4
    found = json.loads((tmp_path / "out" / "profs-cars.json").read_text(encoding="utf-8"))
    assert found["table"]["Triplet-hard"]["HNCM"]["best_recall@1"]["values"]
    page = (tmp_path / "out" / "profs-cars.md").read_text(encoding="utf-8")
    assert "| R@8 | R@10 | MAP@R | NMI | F1 | R@1 of the best checkpoint | failed |" in page


def test_the_command_says_what_it_takes():
    text = CliRunner().invoke(app, ["reproduce", "--help"], env={"COLUMNS": "200"}).output
    for word in ("vectors", "ablation", "--width", "--network", "--checkpoints"):
        assert word in text
    told = CliRunner().invoke(app, ["reproduce", "noise", "--parts", "k"])
    assert told.exit_code != 0
    assert "reproduce: noise has no parts; leave --parts out, or take profs or dro." in told.output.replace("\n", " ")


def test_inshop_has_batches_of_640(tmp_path, monkeypatch, request):
    """Tables 3 and 4 of Qi et al. 2020: B = 640 with K from it, and B = 80 for the grouped losses."""
    inshop(tmp_path)
    read, asked = _benchmarks._data_set, []
    monkeypatch.setattr(_benchmarks, "_data_set", lambda name, sides, counts, check: read(name, sides, counts, False))
    monkeypatch.setattr(grid, "run", lambda trials, file, **how: asked.extend(trials) or {})
    monkeypatch.setattr(_training.TrainingStudy, "choose_rate", lambda *_, **__: {"rate": 1e-4, "held_out": {}})
    found = dro.reproduce(tmp_path / "out", data="inshop", path=tmp_path, seeds=1, parts=("variants", "k"))
    assert found["batch"] == {"k": 640, "variants": 640}
    assert {trial.ks for trial in asked} == {RECALLS["inshop"]}
    counts = {trial.config.loss.options["k"] for trial in asked if "k" in trial.config.loss.options}
    assert counts == {*dro.KS, 2 * 640, 8 * 640}
