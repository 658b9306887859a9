"""evaluate, compare, embed, index, search and export, through the app of the command line, in an empty folder."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from needs import need
from PIL import Image
from runs import config, tiny
from shell import TRUST, Flat, alone, run, saved

import nearfar as nf
from nearfar.evaluation import Index, Vectors
from nearfar.train import fit


def blobs(noise=1.0, seed=0, classes=30, each=6):
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, 8, generator=generator)
    y = torch.arange(classes).repeat_interleave(each)
    generator = torch.Generator().manual_seed(seed)
    return centers[y] + noise * torch.randn(len(y), 8, generator=generator), y


@pytest.fixture
def vectors(tmp_path):
    x, y = blobs()
    y[0] = 99  # a lone query
    Vectors(x, y, [f"sample {i}" for i in range(len(x))]).save(tmp_path / "v.npz")
    return tmp_path, x, y


def test_evaluate_prints_and_writes_what_evaluate_says(vectors):
    folder, x, y = vectors
    shown = run(folder, "evaluate", "v.npz", "-k", 1, "-k", 3, "--clustering", "--json", "out/e.json")
    found = nf.evaluate(x, y, ks=(1, 3), clustering=True)
    for name in ("recall@1", "recall@3", "map_at_r", "nmi"):
        assert re.search(rf"{name}\s*│\s*{100 * found.scores()[name]:.1f} ", shown), shown
    bar = found.intervals["recall@3"]
    assert f"{100 * bar.low:.1f} to {100 * bar.high:.1f}" in shown
    assert "over k-means starts" in shown
    assert "The worst 10 of 30 classes" in shown
    assert "1 lone query (no other sample of its class) was left out" in shown
    record = json.loads((folder / "out" / "e.json").read_text(encoding="utf-8"))
    assert record["scores"] == pytest.approx(found.scores())
    assert record["similarity"] == "cosine"
    assert len(record["per_class"]) == 30


def test_evaluate_with_options_and_a_gallery(vectors):
    folder, x, y = vectors
    g, z = blobs(seed=5)
    Vectors(g, z).save(folder / "g.npz")
    words = ["--similarity", "euclidean", "--ties", "favorable", "--unit", "query", "--seed", 3, "--json", "e.json"]
    shown = run(folder, "evaluate", "v.npz", "--gallery", "g.npz", *words)
    wanted = nf.evaluate(x, y, ref_emb=g, ref_labels=z, similarity="euclidean", ties="favorable", unit="query", seed=3)
    record = json.loads((folder / "e.json").read_text(encoding="utf-8"))
    assert record["scores"] == pytest.approx(wanted.scores())
    assert record["intervals"]["mrr"]["low"] == pytest.approx(wanted.intervals["mrr"].low)
    assert "over queries" in shown


def test_evaluate_the_first_dimensions_and_codes(vectors):
    folder, x, y = vectors
    shown = run(folder, "evaluate", "v.npz", "--dims", "2,1", "--codes", "int8", "-k", 1, "--json", "e.json")
    wanted = nf.evaluate(nf.similarity.quantize(torch.as_tensor(x).float(), "int8"), y, ks=(1,), dims=(1, 2))
    record = json.loads((folder / "e.json").read_text(encoding="utf-8"))
    assert record["scores"] == pytest.approx(wanted.scores())
    assert record["codes"] == "int8"
    assert list(record["curve"]) == ["1", "2"]
    for width, each in wanted.curve.items():
        bar = each.intervals["map_at_r"]
        row = rf"{width} │ +{100 * each.recall[1]:.1f} │ .* │ +{100 * each.map_at_r:.1f} │ +{100 * bar.low:.1f} to"
        assert re.search(row, shown), shown
    assert "--codes must be one of 'int8', 'bits'" in run(folder, "evaluate", "v.npz", "--codes", "int4", code=1)


@pytest.mark.parametrize(
    ("data_set", "ks"),
    [
        ("cub", (1, 2, 4, 8, 16, 32)),
        ("cars", (1, 2, 4, 8, 16, 32)),
        ("sop", (1, 10, 100, 1000)),
        ("inshop", (1, 10, 20, 30, 40, 50)),
    ],
)
def test_a_data_set_brings_its_ks(vectors, data_set, ks):
    folder, *_ = vectors
    run(folder, "evaluate", "v.npz", "--data-set", data_set, "--json", "e.json")
    record = json.loads((folder / "e.json").read_text(encoding="utf-8"))
    assert [name for name in record["scores"] if "@" in name] == [f"recall@{k}" for k in ks]
    run(folder, "evaluate", "v.npz", "--data-set", data_set, "-k", 3, "--json", "e.json")  # -k goes before it
    assert "recall@3" in json.loads((folder / "e.json").read_text(encoding="utf-8"))["scores"]


def test_evaluate_reads_a_run_folder(vectors):
    folder, *_ = vectors
    (folder / "run").mkdir()
    (folder / "v.npz").rename(folder / "run" / "embeddings.npz")
    assert "recall@8" in run(folder, "evaluate", "run")


def test_compare_gives_a_verdict(tmp_path):
    for name, noise, seed in (("good", 0.5, 1), ("bad", 2.5, 2), ("also good", 0.5, 3)):
        Vectors(*blobs(noise, seed)).save(tmp_path / f"{name}.npz")
    better = run(tmp_path, "compare", "bad.npz", "good.npz")
    assert better.startswith("good.npz is better than bad.npz: recall@1 ")
    assert "95% interval over 30 classes" in better
    assert run(tmp_path, "compare", "good.npz", "bad.npz", "--score", "map_at_r").startswith(
        "bad.npz is worse than good"
    )
    same = run(tmp_path, "compare", "good.npz", "also good.npz", "--score", "recall@4")
    assert same.startswith("Cannot tell also good.npz from good.npz: recall@4 ")


def test_compare_refuses_other_samples(tmp_path):
    x, y = blobs()
    Vectors(x, y, [f"a{i}" for i in range(len(x))]).save(tmp_path / "a.npz")
    Vectors(x, y, [f"b{i}" for i in range(len(x))]).save(tmp_path / "b.npz")
    Vectors(x[:50], y[:50]).save(tmp_path / "c.npz")
    assert "names differ" in run(tmp_path, "compare", "a.npz", "b.npz", code=1)
    assert "same queries" in run(tmp_path, "compare", "a.npz", "c.npz", code=1)
    assert "recall@K" in run(tmp_path, "compare", "a.npz", "a.npz", "--score", "recal", code=1)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".pt"])
@pytest.mark.filterwarnings("ignore")  # of torch's own exporters
def test_embed_an_npz_with_every_kind_of_model(tmp_path, suffix):
    model = Flat(12)
    saved(model, torch.randn(5, 3, 4), tmp_path / f"model{suffix}")
    x = np.random.default_rng(0).standard_normal((700, 3, 4))
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(700) % 9, name=np.array([f"n{i}" for i in range(700)]))
    shown = run(tmp_path, "embed", f"model{suffix}", TRUST, "d.npz", "-o", "out/v.npz", "--batch-size", 16)
    assert "700 vectors of width 6" in shown
    found = Vectors.load(tmp_path / "out" / "v.npz")
    with torch.no_grad():
        wanted = model.eval()(torch.from_numpy(x).float())
    torch.testing.assert_close(found.x, wanted, atol=1e-5, rtol=1e-4)
    assert found.y.tolist() == [i % 9 for i in range(700)]
    assert found.name[3] == "n3"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["v.npz"]  # the parts are gone


@pytest.mark.filterwarnings("ignore")
def test_embed_glyphs_then_evaluate_index_and_search(tmp_path):
    saved(Flat(32 * 32), torch.randn(2, 1, 32, 32), tmp_path / "m.pt2")
    shown = run(tmp_path, "embed", "m.pt2", TRUST, "glyphs:test", "-o", "v.npz")
    assert "6,808 vectors of width 6" in shown
    found = Vectors.load(tmp_path / "v.npz")
    assert found.images.shape == (6808, 32, 32)
    assert "GREEK" in found.name[0]
    assert "524 classes" in run(tmp_path, "evaluate", "v.npz")
    assert "6808 vectors of width 6, cosine, exact" in run(tmp_path, "index", "v.npz", "-o", "i.npz")
    Vectors(found.x[:12], name=found.name[:12]).save(tmp_path / "q.npz")
    shown = run(tmp_path, "search", "i.npz", "q.npz", "-k", 3, "--json", "s.json")
    assert "(1.000)" in shown
    assert "2 more queries" in shown
    record = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert [row["query"] for row in record] == list(found.name[:12])
    wanted = Index(found).search(found.x[:12], 3)
    assert [[near["row"] for near in row["neighbors"]] for row in record] == wanted.places.tolist()
    assert record[4]["neighbors"][1]["score"] == pytest.approx(float(wanted.scores[4, 1]), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_embed_a_folder_of_images(tmp_path):
    rng = np.random.default_rng(0)
    for label in ("wren", "auk"):
        (tmp_path / "birds" / label).mkdir(parents=True)
        for i in range(3):
            picture = Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8))
            picture.save(tmp_path / "birds" / label / f"{i}.png")
    (tmp_path / "birds" / "auk" / "notes.txt").write_text("no image", encoding="utf-8")
    saved(Flat(3 * 8 * 8), torch.randn(2, 3, 8, 8), tmp_path / "m.pt2")
    run(tmp_path, "embed", "m.pt2", TRUST, "birds", "-o", "v.npz", "--size", 8, "--thumbnails", 5)
    found = Vectors.load(tmp_path / "v.npz")
    assert found.name == ("auk/0.png", "auk/1.png", "auk/2.png", "wren/0.png", "wren/1.png", "wren/2.png")
    assert found.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.images.shape == (6, 5, 5, 3)
    run(tmp_path, "embed", "m.pt2", TRUST, "birds", "-o", "w.npz", "--size", 8, "--imagenet")
    assert not torch.equal(Vectors.load(tmp_path / "w.npz").x, found.x)
    (tmp_path / "birds" / "auk" / "9.png").write_text("broken", encoding="utf-8")
    assert "9.png cannot be read" in run(tmp_path, "embed", "m.pt2", TRUST, "birds", "-o", "v.npz", "--size", 8, code=1)


@pytest.mark.filterwarnings("ignore")
def test_export_writes_what_gives_the_same_vectors(tmp_path):
    onnxruntime = need("onnxruntime")
    need("onnxscript")
    model = Flat(12)
    saved(model, torch.randn(5, 3, 4), tmp_path / "m.pt2")
    shown = run(tmp_path, "export", "m.pt2", TRUST, "-o", "out/m.onnx")
    assert re.search(r"out/m\.onnx: onnxruntime agrees within \d", shown)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "m.onnx"), providers=["CPUExecutionProvider"])
    x = torch.randn(9, 3, 4)
    with torch.no_grad():
        wanted = model(x).numpy()
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], wanted, atol=1e-5)
    assert "cannot be exported again" in run(tmp_path, "export", "out/m.onnx", "-o", "n.onnx", code=1)
    assert "whole numbers" in run(tmp_path, "export", "m.pt2", TRUST, "-o", "n.onnx", "--shape", "3,x", code=1)
    assert "itself fails" in run(tmp_path, "export", "m.pt2", TRUST, "-o", "n.onnx", "--shape", "5,5", code=1)
    assert not (tmp_path / "n.onnx").exists()


def test_help_reads_well(tmp_path):
    shown = run(tmp_path, "--help")
    for command in ("evaluate", "compare", "embed", "index", "search", "export"):
        assert re.search(rf"{command}\s+\w.*\.", shown), shown
        assert ("[required]" in run(tmp_path, command, "--help")) == (command != "evaluate")
    assert "1 x 32 x 32" in run(tmp_path, "embed", "--help")


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_embedded_as_it_was_judged_and_exported(tmp_path):
    """The vectors of its test samples are those the run kept itself."""
    data = tiny()
    fit(config(), tmp_path / "run", data=data)
    np.savez(tmp_path / "d.npz", x=data.test.x.numpy(), y=data.test.labels)
    run(tmp_path, "embed", "run", "d.npz", "-o", "v.npz")
    found, kept = Vectors.load(tmp_path / "v.npz"), Vectors.load(tmp_path / "run")
    torch.testing.assert_close(found.x, kept.x, atol=1e-5, rtol=1e-4)
    assert torch.equal(found.y, kept.y)
    assert found.fingerprint == kept.fingerprint is not None
    assert "recall@1" in run(tmp_path, "evaluate", "run")
    assert run(tmp_path, "compare", "run", "v.npz").startswith("Cannot tell v.npz from run")
    assert "vectors of width" in run(tmp_path, "index", "run", "-o", "i.npz")
    need("onnxscript")
    assert "agrees within" in run(tmp_path, "export", "run", "-o", "m.onnx")
    run(tmp_path, "embed", "m.onnx", "d.npz", "-o", "w.npz")
    again = Vectors.load(tmp_path / "w.npz")
    torch.testing.assert_close(again.x, kept.x, atol=1e-4, rtol=1e-3)
    assert again.fingerprint == kept.fingerprint


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_approximate_index_says_what_it_misses(tmp_path, kind):
    need("faiss")
    generator = torch.Generator().manual_seed(0)
    Vectors(torch.randn(3000, 16, generator=generator)).save(tmp_path / "v.npz")
    Vectors(torch.randn(50, 16, generator=generator)).save(tmp_path / "q.npz")
    run(tmp_path, "index", "v.npz", "-o", "i.npz", "--kind", kind)
    shown = run(tmp_path, "search", "i.npz", "q.npz")
    stated = float(re.search(rf"Measured recall@10 of {kind} against exact search: ([\d.]+)% \(50 queries\)", shown)[1])
    measured = Index.load(tmp_path / "i.npz").measured_recall(Vectors.load(tmp_path / "q.npz"), 10)
    assert stated == pytest.approx(100 * measured, abs=0.05)


def test_names_are_printed_as_they_are(tmp_path):
    """Square brackets are markup to rich; a name is not."""
    Vectors(torch.eye(2), name=["[bold]x[/bold]", "[/y]"]).save(tmp_path / "v.npz")
    run(tmp_path, "index", "v.npz", "-o", "i.npz")
    shown = run(tmp_path, "search", "i.npz", "v.npz", "-k", 2)
    assert "[bold]x[/bold]" in shown
    assert "[/y]" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evaluate", "none.npz"], "there is no file none.npz"),
        (["evaluate", "bare.npz"], "holds no y"),
        (["evaluate", "text.npz"], "is not an .npz file"),
        (["evaluate", "v.npz", "-k", "0"], "whole numbers from 1 on"),
        (["evaluate", "v.npz", "--similarity", "cosin"], "did you mean 'cosine'"),
        (["evaluate", "v.npz", "--unit", "clas"], "did you mean 'class'"),
        (["evaluate", "v.npz", "--json", "text.npz/e.json"], "text.npz"),
        (["evaluate", "."], "holds no embeddings.npz"),
        (["embed", "none.onnx", "glyphs:test", "-o", "o.npz"], "there is no model none.onnx"),
        (["embed", ".", "glyphs:test", "-o", "o.npz"], "holds no config.yaml"),
        (["embed", "text.npz", "glyphs:test", "-o", "o.npz"], "must end in .onnx"),
        (["embed", "state.pt", "v.npz", "-o", "o.npz"], "is not a file of TorchScript"),
        (["embed", "state.pt2", "v.npz", "-o", "o.npz"], "is not a file of torch.export"),
        (["embed", "state.onnx", "v.npz", "-o", "o.npz"], "is not a file of ONNX"),
        (["evaluate", "v.npz", "--data-set", "cup"], "did you mean 'cub'"),
        (["export", "state.pt2", "-o", "o.onnx"], "is not a file of torch.export"),
        (["index", "v.npz", "-o", "i.npz", "--kind", "flat"], "must be one of"),
        (["search", "v.npz", "v.npz"], "is not an index"),
        (["search", "i.npz", "v.npz", "-k", "1000"], "1..180"),
    ],
)
def test_errors_are_one_sentence(tmp_path, words, sentence):
    if "state.onnx" in words:
        need("onnxruntime")
    broken(tmp_path)
    shown = run(tmp_path, *words, code=1)
    assert sentence in shown
    assert shown.startswith(f"nearfar {words[0]}: ")
    assert f"{words[0]}: {words[0]}:" not in shown


def test_as_a_user_runs_them(tmp_path):
    """In a process of their own. Of a file it cannot read torch's exporter logs pages, past Python's streams."""
    broken(tmp_path)
    assert "recall@32" in alone(tmp_path, "evaluate", "v.npz", "--data-set", "cub")
    assert "is not a file of torch.export" in alone(tmp_path, "embed", "state.pt2", "v.npz", "-o", "o.npz", code=1)


def broken(tmp_path):
    """A folder with sound files, and some that are not what their names say."""
    x, y = blobs()
    Vectors(x, y).save(tmp_path / "v.npz")
    Vectors(x).save(tmp_path / "bare.npz")
    Index(x).save(tmp_path / "i.npz")
    (tmp_path / "text.npz").write_text("text", encoding="utf-8")
    for suffix in (".pt", ".pt2", ".onnx"):
        torch.save({"weight": torch.ones(2)}, tmp_path / f"state{suffix}")


@pytest.mark.filterwarnings("ignore")
def test_embed_refuses_what_does_not_fit(tmp_path):
    saved(Flat(12), torch.randn(5, 3, 4), tmp_path / "m.pt2")
    Vectors(torch.ones(4, 5)).save(tmp_path / "d.npz")
    np.savez(tmp_path / "short.npz", x=np.ones((4, 3, 4)), y=np.arange(3))
    np.savez(tmp_path / "none.npz", z=np.ones(3))
    shown = run(tmp_path, "embed", "m.pt2", TRUST, "d.npz", "-o", "o.npz", code=1)
    assert "cannot take a batch of shape [4, 5]" in shown
    assert "one entry per sample" in run(tmp_path, "embed", "m.pt2", TRUST, "short.npz", "-o", "o.npz", code=1)
    assert "must hold the key x" in run(tmp_path, "embed", "m.pt2", TRUST, "none.npz", "-o", "o.npz", code=1)
    for data in ("glyph:test", "glyphs:all", "nowhere"):
        assert "not" in run(tmp_path, "embed", "m.pt2", TRUST, data, "-o", "o.npz", code=1)
    assert not (tmp_path / "o.npz").exists()


@pytest.fixture
def ranked(tmp_path):
    rng = np.random.default_rng(0)
    for name, gain in (("a", 0.0), ("b", 1.5)):
        lines = [f"q{q} Q0 d{d} 0 {rng.normal() + gain * (d == q)} tag\n" for q in range(50) for d in range(60)]
        (tmp_path / f"{name}.trec").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "q.txt").write_text("".join(f"q{q} 0 d{q} 1\n" for q in range(50)), encoding="utf-8")
    return tmp_path


def test_evaluate_and_compare_ranked_documents(ranked):
    words = ["--run", "a.trec", "--qrels", "q.txt", "-k", 1, "-k", 10]
    shown = run(ranked, "evaluate", *words, "--json", "e.json", "--per-query", "p.csv")
    found = nf.evaluate_retrieval(ranked / "a.trec", ranked / "q.txt", ks=(1, 10))
    for name, value in found.scores().items():
        assert re.search(rf"{name}\s*│\s*{100 * value:.1f} ", shown), shown
    assert "50 judged queries" in shown
    assert json.loads((ranked / "e.json").read_text(encoding="utf-8"))["scores"] == pytest.approx(found.means)
    head, *lines = (ranked / "p.csv").read_text(encoding="utf-8").splitlines()
    assert head.split(",")[:3] == ["query", "relevant", "ndcg@1"]
    assert len(lines) == 50
    assert [float(line.split(",")[3]) for line in lines] == found.per_query["ndcg@10"].tolist()
    other = nf.evaluate_retrieval(ranked / "b.trec", ranked / "q.txt", ks=(5,))
    shown = run(ranked, "compare", "a.trec", "b.trec", "--qrels", "q.txt", "--score", "mrr@5")
    assert shown.startswith("b.trec is better than a.trec: mrr@5")
    assert f"{100 * other.means['mrr@5']:.1f}" in shown


def test_evaluate_vectors_by_judgements(ranked):
    x, _ = blobs()
    Vectors(x[:50], name=[f"q{i}" for i in range(50)]).save(ranked / "queries.npz")
    Vectors(x[:60] + 0.1, name=[f"d{i}" for i in range(60)]).save(ranked / "documents.npz")
    shown = run(ranked, "evaluate", "queries.npz", "--gallery", "documents.npz", "--qrels", "q.txt", "-k", 10)
    sides = tuple(Vectors.load(ranked / f"{name}.npz") for name in ("queries", "documents"))
    assert f"{100 * nf.evaluate_retrieval(sides, ranked / 'q.txt', ks=(10,)).means['ndcg@10']:.1f}" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate"], "name VECTORS, or --run and --qrels"),
        (["evaluate", "--run", "a.trec"], "name them with --qrels"),
        (["evaluate", "--qrels", "q.txt"], "--qrels needs either --run, or the VECTORS"),
        (["evaluate", "v.npz", "--run", "a.trec", "--qrels", "q.txt"], "--qrels needs either --run, or the VECTORS"),
        (["evaluate", "--run", "a.trec", "--qrels", "q.txt", "--clustering"], "need classes; leave them out"),
        (["evaluate", "--run", "a.trec", "--qrels", "q.txt", "--processes", 2], "leave --processes out"),
        (
            ["evaluate", "--run", "a.trec", "--qrels", "q.txt", "--per-query", "q.txt"],
            "--per-query q.txt is what is read",
        ),
        (["evaluate", "--run", "q.txt", "--qrels", "q.txt"], "line 1 of q.txt must hold 6 words, but holds 4"),
        (["compare", "a.trec", "b.trec", "--qrels", "q.txt", "--score", "auc"], "score must be one of"),
        (["compare", "a.trec", "none.trec", "--qrels", "q.txt"], "there is no file none.trec"),
    ],
)
def test_ranked_documents_are_refused_in_one_sentence(ranked, words, message):
    assert message in run(ranked, *words, code=1)
