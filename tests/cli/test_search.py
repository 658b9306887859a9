"""`nearfar search` with a photograph or a folder of them: the index's network, names, scores, the gallery."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from browser import Browser
from needs import need
from PIL import Image
from shell import run
from shop import network, photographs

from nearfar.evaluation import DiskIndex, Index, Vectors

HOSTILE = "<script>window.ran = 1<!--</script><img src=x onerror='window.ran = 2'>"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Photographs with a strange name among them, a network, vectors and two indices."""
    folder = tmp_path_factory.mktemp("shop")
    photographs(folder / "photos")
    (folder / "photos" / "kind0" / "0.jpg").rename(folder / "photos" / "kind0" / f"{HOSTILE.replace('/', '_')}.jpg")
    network(folder / "m.safetensors")
    network(folder / "other.safetensors", seed=1)
    run(folder, "embed", "m.safetensors", "photos", "-o", "v.npz", "--thumbnails", 24)
    run(folder, "index", "v.npz", "-o", "i.npz")
    run(folder, "index", "v.npz", "-o", "shop.index", "--model", "m.safetensors")
    return folder


def found(home, *words):
    run(home, "search", *words, "--json", "s.json")
    return json.loads((home / "s.json").read_text(encoding="utf-8"))


def test_a_photograph_finds_itself(home):
    """By the network in the index, and by one that is named; a folder finds what each of its photographs finds."""
    shown = run(home, "search", "shop.index", "photos/kind2/3.jpg", "-k", 2)
    assert re.search(r"3\.jpg │ kind2/3\.jpg \(1\.000\), \S+ \(0\.\d{3}\)", shown)
    one = found(home, "shop.index", "photos/kind2/3.jpg", "-k", 3)
    named = found(home, "i.npz", "photos/kind2/3.jpg", "-k", 3, "--model", "m.safetensors")
    for ours, theirs in zip(one[0]["neighbors"], named[0]["neighbors"], strict=True):
        assert (ours["row"], ours["name"]) == (theirs["row"], theirs["name"])
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)
    many = found(home, "shop.index", "photos/kind2", "-k", 3)
    assert [each["query"] for each in many] == [f"{n}.jpg" for n in range(5)]
    assert [each["neighbors"][0]["name"] for each in many] == [f"kind2/{n}.jpg" for n in range(5)]
    assert many[3]["query"] == one[0]["query"]
    assert [n["row"] for n in many[3]["neighbors"]] == [n["row"] for n in one[0]["neighbors"]]


def test_vectors_are_searched_as_before(home):
    shown = run(home, "search", "shop.index", "v.npz", "-k", 1)
    assert "and 10 more queries" in shown
    first = found(home, "shop.index", "v.npz", "-k", 2)
    want = Index(Vectors.load(home / "v.npz")).search(Vectors.load(home / "v.npz"), 2)
    assert [[n["row"] for n in each["neighbors"]] for each in first] == want.places.tolist()


def test_a_folder_of_vectors_is_indexed_and_searched(home):
    """Vectors that stay in their file, in float16; such a folder is no folder of photographs."""
    run(home, "embed", "m.safetensors", "photos", "-o", "all.vectors", "--dtype", "float16")
    run(home, "index", "all.vectors", "-o", "half.index", "--model", "m.safetensors")
    half = found(home, "half.index", "all.vectors", "-k", 1)
    assert [each["neighbors"][0]["row"] for each in half] == list(range(20))
    assert found(home, "half.index", "photos/kind2/3.jpg", "-k", 1)[0]["neighbors"][0]["name"] == "kind2/3.jpg"


@pytest.mark.parametrize("kind", ["int8", "bits", "ivf", "ivfpq", "hnsw"])
def test_the_recall_of_an_approximate_index_is_told(home, tmp_path, kind):
    need("faiss")
    words = r"Recall@10 against exact search, measured on 20 of its own vectors when it was built: 100\.0% with \d+ c"
    assert re.search(words, run(home, "index", "v.npz", "-o", tmp_path / "i", "--kind", kind, "--recall", 1))
    assert re.search(words, run(home, "search", tmp_path / "i", "v.npz", "-k", 1))
    again = run(
        home, "index", "v.npz", "-o", tmp_path / "i", "--kind", kind, "--recall", 1
    )  # there is nothing left to do
    assert re.search(words, again)


@pytest.mark.parametrize("words", [["shop.index"], ["i.npz", "--model", "m.safetensors", "--images", "photos"]])
@pytest.mark.browser
def test_the_gallery_in_a_browser(home, tmp_path, words):
    """It opens from disk without a word of complaint, runs nothing, fetches nothing, and shows every picture."""
    said = run(home, "search", words[0], "photos/kind0", "-k", 4, "--page", tmp_path / "g.html", *words[1:])
    assert said.strip().endswith(f"page: {tmp_path / 'g.html'}")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(tmp_path / "g.html", ".found")
        assert browser.ask("document.querySelectorAll('.found').length") == 5
        assert browser.ask("document.querySelectorAll('.answers li').length") == 20
        assert browser.ask("document.images.length") == 25
        assert browser.ask("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")
        assert browser.ask("document.scripts.length") == 0
        assert browser.ask("window.ran === undefined")
        assert HOSTILE.replace("/", "_") in browser.ask("document.body.textContent")
        assert browser.problems == []
        fetched = [url for url in browser.requests if not url.startswith("data:image/")]
        assert fetched == [(tmp_path / "g.html").as_uri()]
    finally:
        browser.close()


def test_a_page_without_pictures_and_names_that_lead_out(home, tmp_path):
    """A folder of pictures and an index whose names are paths to elsewhere: those have no picture."""
    Image.new("RGB", (9, 9), "red").save(tmp_path / "secret.png")
    (tmp_path / "inner").mkdir()
    Image.new("RGB", (9, 9), "blue").save(tmp_path / "inner" / "mine.png")
    names = ["../secret.png", str(tmp_path / "secret.png"), "mine.png"]
    Index(Vectors(torch.eye(3), name=names)).save(tmp_path / "i.npz")
    Vectors(torch.eye(3)).save(tmp_path / "q.npz")
    run(tmp_path, "search", "i.npz", "q.npz", "-k", 3, "--page", "g.html", "--images", "inner")
    page = (tmp_path / "g.html").read_text(encoding="utf-8")
    assert page.count("<img ") == 3  # mine.png, as an answer to each of the three
    said = run(tmp_path, "search", "i.npz", "q.npz", "-k", 3, "--page", "h.html")
    assert "page: h.html (without pictures: nearfar embed --thumbnails 96, or --images FOLDER" in " ".join(said.split())
    assert "<img " not in (tmp_path / "h.html").read_text(encoding="utf-8")


def product(path):
    """A random matrix times the pixels, as an ONNX file; exporting a module would take seconds."""
    onnx = need("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.random.default_rng(0).normal(size=(1200, 6)).astype(np.float32)
    steps = [helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["y"])]
    ends = (
        [helper.make_tensor_value_info(name, kind, shape)] for name, shape in (("x", ["b", 3, 20, 20]), ("y", None))
    )
    graph = helper.make_graph(steps, "product", *ends, [onnx.numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))


def test_a_model_without_preprocessing_is_fed_as_it_was_indexed(home, tmp_path):
    """What `embed` assumed is kept in the index, and used for photographs again."""
    product(tmp_path / "m.onnx")
    run(tmp_path, "embed", "m.onnx", home / "photos", "-o", "v.npz", "--imagenet")
    assert "different preprocessing" in run(tmp_path, "index", "v.npz", "-o", "i", "--model", "m.onnx", code=1)
    run(tmp_path, "index", "v.npz", "-o", "i", "--model", "m.onnx", "--imagenet")
    assert DiskIndex(tmp_path / "i").preprocessing == {"name": "assumed", "size": 20, "imagenet": True, "pixels": False}
    run(tmp_path, "search", "i", home / "photos" / "kind3", "-k", 1, "--json", "s.json")
    near = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert [each["neighbors"][0]["name"] for each in near] == [f"kind3/{n}.jpg" for n in range(5)]
    assert near[0]["neighbors"][0]["score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["search", "i.npz", "photos/kind1/0.jpg"], "i.npz holds no network to embed queries with; name its run"),
        (
            ["search", "shop.index", "photos/kind1/0.jpg", "--model", "other.safetensors"],
            "shop.index and other.safetensors come from networks with different weights; embed both with one",
        ),
        (["search", "shop.index", "none.jpg"], "there is no file or folder none.jpg"),
        (["search", "shop.index", "empty"], "empty holds no images"),
        (["search", "shop.index", "broken.jpg"], "broken.jpg cannot be read"),
        (["search", "shop.index", "photos/kind1/0.jpg", "-k", 21], "1..20"),
        (["search", "shop.index", "v.npz", "--model", "m.safetensors"], "v.npz holds vectors; leave it out"),
        (["search", "empty", "v.npz"], "empty holds no finished index"),
        (["search", "shop.index", "v.npz", "-k", 1, "--page", "photos"], "photos is a folder, which is never replaced"),
        (["index", "v.npz", "-o", "x.npz", "--kind", "ivfpq"], "ivfpq needs a folder"),
        (["index", "v.npz", "-o", "x.npz", "--model", "m.safetensors"], "--model needs a folder"),
        (["index", "v.npz", "-o", "x", "--model", "other.safetensors"], "networks with different weights"),
        (["index", "v.npz", "-o", "x", "--model", "v.npz"], "not v.npz"),
        (["index", "v.npz", "-o", "x", "--probes", 3], "--probes is for an index in a file"),
        (["index", "v.npz", "-o", "x", "--size", 9], "need --model"),
        (["index", "v.npz", "-o", "photos"], "photos exists and is not an empty folder"),
    ],
)
def test_errors(home, words, sentence):
    (home / "empty").mkdir(exist_ok=True)
    (home / "broken.jpg").write_bytes((home / "photos" / "kind1" / "0.jpg").read_bytes()[:300])
    assert sentence in run(home, *words, code=1)
    assert not (home / "x").exists()
