"""The commands on texts: train, embed, index, search by a sentence, export, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
import vision
from needs import need
from runs import journal
from shell import alone, run
from texts import classes_file, encoder_folder, pairs_file, write_csv

vision.mend()
need("tokenizers", "transformers", "sentence_transformers")
from nearfar.data import Document  # noqa: E402
from nearfar.evaluation import Vectors  # noqa: E402
from nearfar.train import open_run  # noqa: E402

STEPS = ("--training.steps", 4, "--training.evaluate_every", 4, "--batches.classes", 3, "--data.validation", 0.25)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run on classes, the vectors of all texts, and two indices of them."""
    folder = tmp_path_factory.mktemp("texts")
    classes_file(folder / "a.csv")
    run(folder, "train", "--data.path", "a.csv", "--run", "r", *STEPS)
    run(folder, "embed", "r", "a.csv", "-o", "v.npz")
    run(folder, "index", "v.npz", "-o", "i.npz")
    run(folder, "index", "v.npz", "-o", "all.index", "--model", "r")
    return folder


def found(home, *words):
    run(home, "search", *words, "--json", "s.json")
    return json.loads((home / "s.json").read_text(encoding="utf-8"))


def test_a_sentence_finds_itself(home):
    made = Vectors.load(home / "v.npz")
    sentence = made.name[7]
    for words in (("all.index",), ("i.npz", "--model", "r")):
        (one,) = found(home, words[0], sentence, *words[1:])
        assert one["query"] == sentence
        assert one["neighbors"][0]["score"] == pytest.approx(1, abs=1e-5)
        same = [row for row in range(len(made.x)) if torch.allclose(made.x[row], made.x[7], atol=1e-6)]
        assert one["neighbors"][0]["row"] in same


def test_files_of_texts_are_queries(home):
    (home / "q.txt").write_text("lost bank card\n\nplay a song\n", encoding="utf-8")
    assert [one["query"] for one in found(home, "all.index", "q.txt")] == ["lost bank card", "play a song"]
    write_csv(home / "q.csv", ("text",), [("lost bank card",)])
    assert len(found(home, "all.index", "q.csv")) == 1
    page = run(home, "search", "all.index", "lost bank card", "--page", "s.html")
    assert "s.html" in page
    assert "lost bank card" in (home / "s.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("search", "all.index", "nowhere.csv"), "there is no file or folder nowhere.csv."),
        (("search", "i.npz", "a sentence"), "i.npz holds no network that reads it as a sentence"),
        (("search", "i.npz", "a.csv"), "holds no network to embed queries with"),
        (("export", "r", "-o", "m.onnx"), "reads texts, whose tokenizer no graph can hold"),
        (("embed", "r", "q.npz", "-o", "w.npz"), "there is no file"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, reason, home):
    assert reason in run(home, *words, code=1)


def test_an_exported_folder_gives_the_vectors_of_the_run(home):
    import sentence_transformers

    run(home, "export", "r", "-o", "folder")
    made = Vectors.load(home / "v.npz")
    theirs = sentence_transformers.SentenceTransformer(str(home / "folder"), device="cpu").encode(list(made.name))
    torch.testing.assert_close(torch.from_numpy(theirs), made.x, atol=1e-5, rtol=0)
    run(home, "export", "r", "-o", "m.safetensors")
    run(home, "embed", "m.safetensors", "a.csv", "-o", "again.npz")
    assert torch.equal(Vectors.load(home / "again.npz").x, made.x)


def test_documents_and_queries_have_their_own_encoder(tmp_path):
    pairs_file(tmp_path / "p.csv")
    for seed, side in enumerate(("query", "document")):
        encoder_folder(tmp_path / side, seed=seed)
    sides = [part for side in ("query", "document") for part in (f"--model.{side}", f"text:{side}")]
    steps = ("--training.steps", 2, "--training.evaluate_every", 2, "--batches.batch_size", 8)
    run(tmp_path, "train", "--data.path", "p.csv", "--run", "r", *sides, *steps)
    write_csv(tmp_path / "d.csv", ("document",), [("lost bank card",)])
    write_csv(tmp_path / "q.csv", ("query",), [("lost bank card",)])
    made = open_run(tmp_path / "r")
    for name, text in (("d", Document("lost bank card")), ("q", "lost bank card")):
        run(tmp_path, "embed", "r", f"{name}.csv", "-o", f"{name}.npz")
        with torch.no_grad():
            wanted = made.model.eval()(made.transform(text)[None])
        torch.testing.assert_close(Vectors.load(tmp_path / f"{name}.npz").x, wanted, atol=1e-6, rtol=0)


def test_a_dry_run_describes_texts(home):
    said = " ".join(run(home, "train", "--data.path", "a.csv", "--dry-run", *STEPS).split())
    assert "texts with classes, from the columns text and label" in said
    assert "texts of 3 classes" in said
    assert "test: 24 texts of 3 classes, 8 in each" in said
    text = run(home, "config", "--data.path", "a.csv")
    assert "name: text:static" in text
    assert "name: texts" in text
    assert "NTXent" in run(home, "recommend", "texts", "--path", "a.csv")
    pairs_file(home / "p.csv")
    assert "name: QueryPairs" in run(home, "recommend", "texts", "--path", "p.csv")


def test_a_report_shows_texts_and_reads_no_file_that_a_text_names(home):
    """A text is never taken for the path of a picture."""
    run(home, "report", "r", "-o", "page.html")
    page = (home / "page.html").read_text(encoding="utf-8")
    assert '"texts":true' in page
    assert '"pictures":null' in page


def test_two_processes_train_on_pairs_as_one(tmp_path):
    need("accelerate")
    pairs_file(tmp_path / "p.csv", negatives=1)
    steps = ("--training.steps", 3, "--training.evaluate_every", 3, "--training.diagnose_every", 0)
    words = ("train", "--data.path", "p.csv", "--batches.batch_size", 6, *steps)
    losses = []
    for name, more in (("one", ()), ("two", ("--processes", 2))):
        alone(tmp_path, *words, "--run", name, *more)
        losses.append([line["loss"] for line in journal(tmp_path / name) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
