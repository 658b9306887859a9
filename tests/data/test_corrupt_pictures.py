"""Pictures that cannot be read: training may draw another in their place, everything else leaves them out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from runs import config
from typer.testing import CliRunner

from nearfar import report
from nearfar.cli.main import app
from nearfar.data import ByName, CorruptImageError, Labeled, Pictures, View, genuine, open_data, part, transforms
from nearfar.doctor._callback import _draw_samples as drawn
from nearfar.evaluation import evaluate
from nearfar.train import fit
from nearfar.train._scores import embed_samples, score

pytestmark = pytest.mark.filterwarnings("ignore::nearfar.data.CorruptImageWarning")
PLAIN = transforms.get("none", train=False)
CUT = 8
"""Files cut short, of the twelve of the class `bee`."""


@pytest.fixture
def photographs(tmp_path):
    """Two classes of twelve for the test, one of which loses eight files; two whole classes to learn from."""
    random = np.random.default_rng(0)
    for side, names in (("train", ("ant", "cow", "doe", "elk")), ("test", ("bee", "fox"))):
        for name in names:
            (tmp_path / "data" / side / name).mkdir(parents=True)
            for i in range(12):
                file = tmp_path / "data" / side / name / f"{i:02}.png"
                Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file)
                if name == "bee" and i < CUT:
                    file.write_bytes(file.read_bytes()[:40])
    return tmp_path / "data"


def flat(x):
    return x.flatten(1)


class Flat(torch.nn.Module):
    """Pixels as they are."""

    def forward(self, x):
        return flat(x)


# ------------------------------------------------------------------------------------------ the mechanism


def test_the_sample_itself_or_none(photographs):
    test = open_data("folder", photographs, on_corrupt="skip").test
    assert isinstance(test[0], Image.Image)  # another stands in, as training wants it
    assert genuine(test, 0) is None
    assert genuine(test, CUT).tobytes() == test[CUT].tobytes()
    chosen = part(test, [3, 9, 20])
    assert [genuine(chosen, i) is None for i in range(3)] == [True, False, False]
    wrapped = Labeled(Pictures(test.paths, test.labels, on_corrupt="skip"), test.labels)
    assert genuine(wrapped, 0) is None
    assert genuine(wrapped, 9).size == (4, 4)
    named = ByName(chosen)
    assert list(named) == ["bee/03.png", "bee/09.png", "fox/08.png"]
    assert named["bee/03.png"] is None
    assert named["fox/08.png"].tobytes() == test[20].tobytes()
    with pytest.raises(CorruptImageError, match=r"bee/00\.png cannot be read"):
        genuine(open_data("folder", photographs).test, 0)


def test_a_view_without_substitutes_leaves_them_out(photographs):
    test = open_data("folder", photographs, on_corrupt="skip").test
    view = View(test, PLAIN, substitutes=False)
    x, labels, indices = view.__getitems__([7, 8, 20])
    assert (x.shape, labels.tolist(), indices.tolist()) == ((2, 3, 4, 4), [0, 1], [8, 20])
    assert torch.equal(x[1], View(test, PLAIN)[20][0])
    none = view.__getitems__([0, 1])
    assert [len(part) for part in none] == [0, 0, 0]
    with pytest.raises(LookupError, match=r"bee/00\.png cannot be read"):
        view[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_vectors_are_of_what_was_read(photographs, workers):
    test = open_data("folder", photographs, on_corrupt="skip").test
    x, rows = embed_samples(Flat(), test, PLAIN, workers=workers, batch_size=3)
    assert rows.tolist() == list(range(CUT, 24))
    assert torch.equal(x[0], PLAIN(test[CUT], None).flatten())


def test_nothing_readable_is_an_error(photographs):
    bees = part(open_data("folder", photographs, on_corrupt="skip").test, range(CUT))
    with pytest.raises(CorruptImageError, match=r"none of the 8 samples can be read, the first is bee/00\.png"):
        embed_samples(Flat(), bees, PLAIN)


# ----------------------------------------------------------------------------------------------- the scores


def test_scores_are_those_of_the_readable_files(photographs):
    test = open_data("folder", photographs, on_corrupt="skip").test
    found = score(Flat(), test, PLAIN, ks=(1,))
    for place in found.left_out:
        (photographs / "test" / place).unlink()
    alone = open_data("folder", photographs).test
    x, rows = embed_samples(Flat(), alone, PLAIN)
    wanted = evaluate(x, torch.from_numpy(alone.labels), ks=(1,), resamples=0)
    assert len(rows) == 24 - CUT
    assert found.evaluation.to_dict() == wanted.to_dict()
    assert found.left_out == tuple(f"bee/{i:02}.png" for i in range(CUT))
    deep = score(Flat(), alone, PLAIN, ks=(1, len(rows) - 1, len(rows)))
    assert [*deep.evaluation.recall] == [1, len(rows) - 1]  # as many as there are others to find
    # with eight copies of one picture in the test set, each of them finds another copy
    copies = evaluate(flat(torch.stack([View(test, PLAIN)[i][0] for i in range(24)])), torch.from_numpy(test.labels))
    assert copies.recall[1] > found.evaluation.recall[1]


def test_a_gallery_loses_its_own(photographs):
    data = open_data("folder", photographs, on_corrupt="skip")
    queries = part(data.test, [8, 9, 20, 21])
    found = score(Flat(), queries, PLAIN, gallery=data.test, ks=(1,))
    assert found.evaluation.recall[1] == 1  # each finds itself in the gallery
    deep = score(Flat(), queries, PLAIN, gallery=data.test, ks=(1, 24 - CUT, 25 - CUT))
    assert [*deep.evaluation.recall] == [1, 24 - CUT]
    assert len(found.rows) == 4
    assert len(found.left_out) == CUT
    assert found.notice() == (
        "left out, as 8 samples cannot be read: bee/00.png, bee/01.png, bee/02.png, bee/03.png, bee/04.png, ..."
    )


def test_a_run_leaves_them_out_and_says_so(photographs, tmp_path):
    (photographs / "test" / "bee" / "00.png").rename(photographs / "test" / "bee" / "0\x1b[2J.png")
    plan = config(
        data={"name": "folder", "path": str(photographs), "on_corrupt": "skip", "transform": "none", "validation": 0},
        batches={"name": "MPerClass", "classes": 2, "samples": 2},
        training={"steps": 1, "diagnose_every": 0},
    )
    with (tmp_path / "told").open("w", encoding="utf-8") as stream:
        fit(plan, tmp_path / "run", console=Console(file=stream, width=200))
    told = (tmp_path / "told").read_text(encoding="utf-8")
    assert "left out, as 8 samples cannot be read: bee/0\\x1b[2J.png, bee/01.png" in told
    with np.load(tmp_path / "run" / "embeddings.npz") as stored:
        assert (len(stored["x"]), len(stored["y"]), len(stored["name"])) == (16, 16, 16)
        assert stored["name"].tolist() == [f"bee/{i:02}.png" for i in range(CUT, 12)] + [
            f"fox/{i:02}.png" for i in range(12)
        ]
        assert stored["y"].tolist() == [0] * 4 + [1] * 12
    scores = json.loads((tmp_path / "run" / "scores.json").read_text(encoding="utf-8"))
    assert len(scores["left_out"]) == CUT
    assert scores["queries"] == 16


def test_the_doctor_looks_at_what_can_be_read(photographs):
    setting = SimpleNamespace(
        train=open_data("folder", photographs, on_corrupt="skip").test, plain=PLAIN, config=config()
    )
    x, y = drawn(setting, 24)
    assert (len(x), sorted(y.tolist())) == (16, [0] * 4 + [1] * 12)
    assert len(torch.unique(flat(x), dim=0)) == 16  # no copies


def test_the_page_shows_each_row_its_own_picture(photographs, tmp_path):
    """Rows of embeddings.npz are fewer than the samples: pictures are found by name, not by place."""
    plan = config(
        data={"name": "folder", "path": str(photographs), "on_corrupt": "skip", "transform": "none", "validation": 0},
        batches={"name": "MPerClass", "classes": 2, "samples": 2},
        training={"steps": 1, "diagnose_every": 0},
    )
    fit(plan, tmp_path / "run", console=Console(quiet=True))
    answer = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")])
    assert answer.exit_code == 0, answer.output
    by_command = (tmp_path / "page.html").read_text(encoding="utf-8")
    by_folder = report.build(tmp_path / "run", images=photographs / "test")
    assert "pictures could not be read" not in by_command
    assert by_command == by_folder
