"""`nearfar serve` as a process: answers, refusals, the page in a browser, shutdown, kill -9."""

from __future__ import annotations

import base64
import io
import json
import socket
import sys
import time

import pytest
import torch
from browser import Browser
from hostile_files import bomb
from needs import need
from PIL import Image
from shell import run
from shop import network, other_mark, photographs, serve

from nearfar.evaluation import Vectors, open_index

need("fastapi", "prometheus_client", "uvicorn")
JPEG, JSON = "image/jpeg", "application/json"
BEGUN = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: 900\r\n\r\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A shop: twenty photographs, their vectors, and an index with the network in it."""
    folder = tmp_path_factory.mktemp("shop")
    photographs(folder / "photos")
    network(folder / "m.safetensors")
    run(folder, "embed", "m.safetensors", "photos", "-o", "v.npz", "--thumbnails", 24)
    run(folder, "index", "v.npz", "-o", "shop.index", "--model", "m.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(home):
    """One process for all tests of this file; the last of them kills it."""
    found = serve(home, "shop.index", "--max-results", 15, "--max-bytes", 1_000_000)
    yield found
    found.process.kill()
    found.process.communicate()


def photo(home, name="kind2/3.jpg"):
    return (home / "photos" / name).read_bytes()


def vector(home, row=3, **more):
    return json.dumps({"vector": Vectors.load(home / "v.npz").x[row].tolist(), **more}).encode()


def test_a_photograph_finds_itself_and_its_kind(home, server):
    status, headers, found = server.ask("POST", "/search?k=5", photo(home), JPEG)
    assert status == 200, found
    assert found["k"] == 5
    first = found["results"][0]
    assert (first["name"], first["label"]) == ("kind2/3.jpg", "kind2")
    assert first["score"] == pytest.approx(1, abs=1e-5)
    made = open_index(home / "shop.index")
    wanted = made.search(Vectors.load(home / "v.npz").x[[first["row"]]], 5)
    assert [each["row"] for each in found["results"]] == wanted.places[0].tolist()
    assert [each["score"] for each in found["results"]] == pytest.approx(wanted.scores[0].tolist(), abs=1e-5)
    assert headers["x-content-type-options"] == "nosniff"
    png = io.BytesIO()
    Image.open(io.BytesIO(photo(home))).save(png, "PNG")  # whatever it is called, its bytes tell what it is
    again = server.ask("POST", "/search?k=5", png.getvalue(), "image/whatever")[2]
    assert again == found


def test_a_vector_finds_its_row(home, server):
    mark = open_index(home / "shop.index").fingerprint
    for more in ({}, {"fingerprint": mark}, {"fingerprint": mark.split("/")[0]}):
        status, _, found = server.ask("POST", "/search", vector(home, **more), f"{JSON}; charset=utf-8")
        assert status == 200, found
        assert len(found["results"]) == 10
        assert found["results"][0]["row"] == 3


def test_health_and_metrics(home, server):
    status, _, found = server.ask("GET", "/health")
    assert (status, found["status"], found["vectors"], found["takes_pictures"]) == (200, "ok", 20, True)
    from prometheus_client.parser import text_string_to_metric_families as parsed

    def counted(text):
        families = {family.name: family for family in parsed(text.decode())}
        labels = {(s.labels["path"], s.labels["status"]): s.value for s in families["nearfar_requests"].samples
                  if s.name.endswith("_total")}  # fmt: skip
        times = {s.name: s.value for s in families["nearfar_search_seconds"].samples}
        return labels, times["nearfar_search_seconds_count"], families

    labels, searches, families = counted(server.ask("GET", "/metrics")[2])
    server.ask("POST", "/search", photo(home), JPEG)
    server.ask("POST", "/search", b"", JPEG)
    server.ask("GET", "/nowhere/else")
    more, after, _ = counted(server.ask("GET", "/metrics")[2])
    assert after == searches + 1
    for key in (("/search", "200"), ("/search", "422"), ("other", "404"), ("/metrics", "200")):
        assert more[key] == labels.get(key, 0) + 1
    assert families["nearfar_index_vectors"].samples[0].value == 20
    assert "nowhere" not in str(more)


REFUSED = {
    "no picture": ("POST", "/search", b"hello", JPEG, 422, "the picture cannot be read"),
    "half a picture": ("POST", "/search", "half", JPEG, 422, "the picture cannot be read"),
    "an svg": ("POST", "/search", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", 422, "cannot be read"),
    "a bomb": ("POST", "/search", bomb(9_000), "image/png", 413, "9,000 x 9,000 pixels, and 64,000,000 pixels are"),
    "a larger bomb": ("POST", "/search", bomb(60_000), "image/png", 413, "far more pixels"),
    "nothing": ("POST", "/search", b"", JPEG, 422, "the body is empty"),
    "no type": ("POST", "/search", b"abc", "", 415, "send a picture as image/jpeg"),
    "a form": ("POST", "/search", b"abc", "multipart/form-data; boundary=x", 415, "'multipart/form-data'"),
    "text": ("POST", "/search", b"abc", "text/html", 415, "'text/html'"),
    "sentence": ("POST", "/search", b"abc", "text/plain", 422, "no network that embeds texts: send a picture"),
    "no JSON": ("POST", "/search", b"{", JSON, 422, "not JSON"),
    "deep JSON": ("POST", "/search", b"[" * 100_000, JSON, 422, "not JSON"),
    "bytes": ("POST", "/search", b"\xff\xfe\xff", JSON, 422, "not JSON"),
    "a list": ("POST", "/search", b"[1, 2]", JSON, 422, 'must be {"vector": [numbers]}'),
    "words": ("POST", "/search", b'{"vector": ["a"]}', JSON, 422, "a list of numbers"),
    "truths": ("POST", "/search", b'{"vector": [true]}', JSON, 422, "a list of numbers"),
    "too short": ("POST", "/search", b'{"vector": [1, 2]}', JSON, 422, "2 numbers, and 8 are needed"),
    "NaN": ("POST", "/search", b'{"vector": [NaN,1,1,1,1,1,1,1]}', JSON, 422, "NaN"),
    "a googol": ("POST", "/search", b'{"vector": [1' + b"0" * 400 + b",1,1,1,1,1,1,1]}", JSON, 422, "beyond float32"),
    "beyond": ("POST", "/search", b'{"vector": [1e39,1,1,1,1,1,1,1]}', JSON, 422, "beyond float32"),
    "k = 0": ("POST", "/search?k=0", b"abc", JPEG, 422, "k must be a whole number in 1..15, but came as '0'"),
    "k = 16": ("POST", "/search?k=16", b"abc", JPEG, 422, "in 1..15"),
    "k = ten": ("POST", "/search?k=ten", b"abc", JPEG, 422, "in 1..15"),
    "k = ²": ("POST", "/search?k=%C2%B2", b"abc", JPEG, 422, "in 1..15"),
    "GET": ("GET", "/search", None, "", 405, "method is not allowed"),
    "DELETE": ("DELETE", "/", None, "", 405, "method is not allowed"),
    "elsewhere": ("GET", "/admin", None, "", 404, "there is nothing here"),
    "a path": ("GET", "/picture/../../../../etc/passwd", None, "", 404, "nothing here"),
    "a coded path": ("GET", "/picture/..%2f..%2f..%2fetc%2fpasswd", None, "", 404, "there is no"),
    "a name": ("GET", "/picture/kind2%2F3.jpg", None, "", 404, "there is no"),
    "a null": ("GET", "/picture/1%00", None, "", 404, "no picture of this row"),
    "row -1": ("GET", "/picture/-1", None, "", 404, "no picture of this row"),
    "row 20": ("GET", "/picture/20", None, "", 404, "no picture of this row"),
    "row 10^30": ("GET", f"/picture/1{30 * '0'}", None, "", 404, "no picture of this row"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence(home, server, case):
    method, path, body, kind, wanted, words = REFUSED[case]
    body = photo(home)[:400] if body == "half" else body
    status, _, found = server.ask(method, path, body, kind)
    assert status == wanted, found
    assert list(found) == ["error"]
    assert words in found["error"]
    assert len(found["error"].splitlines()) == 1
    assert found["error"].endswith(".")
    assert server.process.poll() is None


@pytest.mark.parametrize("told", [True, False], ids=["with its length", "in chunks"])
def test_fifty_megabytes_are_refused(server, told):
    body = bytes(50_000_000)
    parts = body if told else iter([body[at : at + 1_000_000] for at in range(0, len(body), 1_000_000)])
    status, _, found = server.ask("POST", "/search", parts, JPEG)
    assert status == 413
    assert found["error"].startswith("the body has more than 1,000,000 bytes")


def test_a_vector_of_another_network_is_refused(home, server):
    for mark, words in ((other_mark(), "networks with different weights"), ("no mark", "must be hexadecimal")):
        status, _, found = server.ask("POST", "/search", vector(home, fingerprint=mark), JSON)
        assert status == 409
        assert words in found["error"]


def test_another_name_for_this_machine_is_refused(server):
    """A page of a stranger can point a name of its own at 127.0.0.1 and ask from there."""
    for host, wanted in (("evil.example", 421), (f"localhost:{server.port}", 200), ("127.0.0.1", 200), ("", 421)):
        assert server.ask("GET", "/health", Host=host)[0] == wanted, host


def test_who_hangs_up_leaves_no_trace(home, server):
    for words in (BEGUN + b"ab", b"GET /health HTTP/1.1\r\nHo", b"\x00\xff\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            line.sendall(words)
    assert server.ask("POST", "/search", photo(home), JPEG)[0] == 200


def test_pictures_are_those_of_the_rows(home, server):
    status, headers, found = server.ask("GET", "/picture/13")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    shown = torch.tensor(list(Image.open(io.BytesIO(found)).convert("RGB").tobytes())).reshape(24, 24, 3).float()
    gaps = (Vectors.load(home / "v.npz").images.float() - shown).abs().mean(dim=(1, 2, 3))
    assert int(gaps.argmin()) == 13


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


# A file that is dropped on the page, as the browser itself would hand it over.
DROP = """
(() => {
  const bytes = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0));
  const held = new DataTransfer();
  held.items.add(new File([bytes], "mine.jpg", { type: "%s" }));
  const where = document.getElementById("drop");
  for (const kind of ["dragover", "drop"]) {
    where.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: held }));
  }
})()
"""


@pytest.mark.browser
def test_the_page_takes_a_photograph_by_drag_and_drop(home, server, chromium):
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
    chromium.wait("document.readyState === 'complete' && document.getElementById('drop') !== null")
    assert chromium.ask("document.querySelector('h1').textContent") == "shop.index"
    chromium.ask("document.getElementById('k').value = 4")
    chromium.ask(DROP % (base64.b64encode(photo(home)).decode(), JPEG))
    chromium.wait("document.querySelectorAll('.answers li').length === 4")
    chromium.wait("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")
    assert chromium.ask("document.querySelectorAll('.answers img').length") == 4
    assert chromium.ask("document.querySelector('.answers li span:last-of-type').textContent") == "kind2/3.jpg"
    assert chromium.ask("document.querySelector('.answers b').textContent") == "1.000"
    assert chromium.ask("document.getElementById('state').textContent") == ""
    assert chromium.problems == []
    outside = [url for url in chromium.requests if not url.startswith((f"http://127.0.0.1:{server.port}/", "blob:"))]
    assert [url for url in outside if not url.startswith("data:")] == []
    chromium.ask(DROP % (base64.b64encode(b"no picture").decode(), JPEG))
    chromium.wait("document.getElementById('state').textContent.startsWith('the picture cannot be read')")
    assert chromium.ask("document.querySelectorAll('.answers li').length") == 4  # the last answer stays
    chromium.ask(DROP % (base64.b64encode(b"text").decode(), "text/html"))
    chromium.wait("document.getElementById('state').textContent.includes('text/html')")


@pytest.mark.browser
def test_the_page_takes_a_chosen_file(home, server, chromium):
    chromium.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
    chromium.wait("document.readyState === 'complete' && document.getElementById('file') !== null")
    node = chromium.call("DOM.getDocument")["root"]["nodeId"]
    field = chromium.call("DOM.querySelector", nodeId=node, selector="#file")["nodeId"]
    chromium.call("DOM.setFileInputFiles", nodeId=field, files=[str(home / "photos" / "kind1" / "0.jpg")])
    chromium.wait("document.querySelectorAll('.answers li').length === 10")
    assert chromium.ask("document.querySelector('figcaption').textContent") == "0.jpg"


def test_a_server_that_was_killed_starts_again_and_answers_the_same(home, server):
    """The last user of the server; the next one stops by itself after two searches."""
    before = {path.name: path.read_bytes() for path in (home / "shop.index").iterdir()}
    answer = server.ask("POST", "/search?k=7", photo(home), JPEG)[2]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(
            b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: 9999\r\n\r\n"
        )
        server.process.kill()
        server.process.wait()
    assert {path.name: path.read_bytes() for path in (home / "shop.index").iterdir()} == before
    again = serve(home, "shop.index", "--requests", 2, "--images", "photos")
    try:
        assert again.ask("POST", "/search?k=7", photo(home), JPEG)[2] == answer
        assert again.ask("GET", "/picture/0")[1]["content-type"] == "image/jpeg"
        assert again.ask("POST", "/search", b"x", JPEG)[0] == 422
        end = time.monotonic() + 30
        while again.process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert again.process.returncode == 0
        assert again.process.stderr.read() == ""
    finally:
        again.process.kill()
        again.process.communicate()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.index"], "nearfar serve: Index: there is no file none.index."),
        (["v.npz"], "is not an index"),
        (["shop.index", "--host", "no.such.host.invalid"], "cannot listen on"),
        (["shop.index", "--images", "nowhere"], "there is no folder nowhere of pictures"),
        (["shop.index", "--model", "other.safetensors"], "networks with different weights; embed both with one"),
    ],
)
def test_errors_at_the_start(home, words, sentence):
    network(home / "other.safetensors", seed=1)
    assert sentence in run(home, "serve", *words, "--seconds", 0, code=1)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_one_sentence(home, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = run(home, "serve", "shop.index", "--seconds", 0, code=1)
    assert f'needs {package}, which is not installed; run pip install "nearfar[serve]".' in said


def test_it_listens_on_loopback_and_stops_after_some_seconds(home):
    said = run(home, "serve", "shop.index", "--port", 0, "--seconds", 0)
    assert said.startswith("serving DiskIndex(20 vectors of width 8, cosine, exact) at http://127.0.0.1:")
    run(home, "index", "v.npz", "-o", "i.npz")
    said = run(home, "serve", "i.npz", "--port", 0, "--seconds", 0, "--host", "0.0.0.0")
    assert "i.npz holds no network, so only vectors can be searched for" in said
    assert "there are no passwords and no encryption" in said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], 0),
        (["--max-per-client", 3], 3),
        (["--host", "0.0.0.0"], 64),
        (["--host", "0.0.0.0", "--max-per-client", 0], 0),
    ],
)
def test_connections_of_a_client(home, monkeypatch, words, wanted):
    given = []
    monkeypatch.setattr(
        "nearfar.serve._server.run", lambda app, listening, countdown, limits, seconds: given.append(limits)
    )
    run(home, "serve", "shop.index", "--port", 0, *words)
    assert [limits.per_client for limits in given] == [wanted]
