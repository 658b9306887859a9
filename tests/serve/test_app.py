"""The application of `nearfar serve` without a socket: timeouts, overload, failing searches, a missing network."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needs import need
from PIL import Image

from nearfar.evaluation import Index, Neighbors, calibrate
from nearfar.serve import Searcher
from nearfar.serve._answers import Answer
from nearfar.serve._middleware import LOOPBACK

need("fastapi", "prometheus_client", "uvicorn")
import nearfar.serve.app  # noqa: E402
from nearfar.serve.app import Limits, create_app  # noqa: E402

VECTOR = json.dumps({"vector": [1.0, 0.0, 0.0]}).encode()


async def ask(app, body=VECTOR, kind=b"application/json", slow=False, query=b"", host=b"localhost", told=None):
    """POST /search; status and JSON of the answer, whose headers are added to `told`."""
    headers = [(b"host", host), (b"content-type", kind), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/search", "raw_path": b"/search", "query_string": query,
             "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
    sent = []

    async def receive():
        if slow:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    if told is not None:
        told.update(sent[0]["headers"])
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def searcher(embed=None):
    return Searcher(Index(torch.eye(3)), embed)


def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_body_that_does_not_arrive():
    app = create_app(searcher(), limits=Limits(seconds=0.05))
    headers = {}
    answer = asyncio.run(ask(app, slow=True, told=headers))
    assert answer == (408, {"error": "the body did not arrive within 0.05 seconds."})
    assert b"retry-after" not in headers


def test_more_at_once_than_may_wait():
    """Two workers are held fast and two more wait; the fifth is sent away, and all others are answered."""
    free, begun = threading.Event(), threading.Semaphore(0)
    made = searcher()
    honest = made.index.search

    def held(x, k):
        begun.release()
        free.wait(30)
        return honest(x, k)

    made.index.search = held
    app = create_app(made, limits=Limits(workers=2, waiting=2))

    headers = {}

    async def many():
        first = [asyncio.create_task(ask(app)) for _ in range(4)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        while not all(task.get_coro().cr_await is not None for task in first):
            await asyncio.sleep(0)
        last = await ask(app, told=headers)
        free.set()
        return last, await asyncio.gather(*first)

    last, first = asyncio.run(many())
    assert last == (503, {"error": "too many searches are waiting; ask again in a moment."})
    assert headers[b"retry-after"] == b"1"
    assert [status for status, _ in first] == [200] * 4


def test_the_guide_names_the_limits():
    guide, usual = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text(encoding="utf-8"), Limits()
    assert f"a body that takes longer than {usual.seconds:g} seconds" in guide
    assert f"`--max-bytes` ({usual.body:,}), or a picture of more than `--max-pixels` ({usual.pixels:,})" in guide
    assert f"more than {usual.waiting} searches are waiting" in guide
    assert f"`--workers` searches run at once, {usual.workers} if" in guide


def test_a_search_that_fails_tells_nothing_outside(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)  # a server that another test ran turns it off
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)
    made = searcher()
    made.index.search = lambda x, k: 1 / 0
    with caplog.at_level(logging.ERROR):
        status, found = asyncio.run(ask(create_app(made)))
    assert (status, found) == (500, {"error": "the search failed; the server's log says why."})
    assert "ZeroDivisionError" in caplog.text


def test_an_index_without_a_network_takes_no_pictures():
    status, found = asyncio.run(ask(create_app(searcher()), body=png(4, 4), kind=b"image/png"))
    assert (status, list(found)) == (422, ["error"])
    assert found["error"].startswith("this index holds no network that embeds pictures: send a vector")


def test_searches_are_counted_for_those_who_want_to_stop():
    seen = []
    app = create_app(searcher(), answered=lambda: seen.append(1))
    assert asyncio.run(ask(app))[0] == 200
    assert asyncio.run(ask(app, body=b"{"))[0] == 422
    assert len(seen) == 2


def test_a_picture_has_as_many_pixels_as_are_allowed_and_no_more():
    app = create_app(searcher(lambda picture: torch.ones(3)), limits=Limits(pixels=16))
    assert asyncio.run(ask(app, body=png(16, 1), kind=b"image/png"))[0] == 200
    status, found = asyncio.run(ask(app, body=png(17, 1), kind=b"image/png"))
    assert (status, found["error"]) == (
        413, "the picture has 17 x 1 pixels, and 16 pixels are allowed; send a smaller one."
    )  # fmt: skip


@pytest.mark.parametrize(("word", "status"), [("000000002", 200), ("0000000002", 422), ("9" * 5000, 422)])
def test_a_count_has_nine_digits_at_most(word, status):
    """Python itself reads 4,300 digits and refuses more."""
    found = asyncio.run(ask(create_app(searcher()), query=f"k={word}".encode()))
    assert found[0] == status
    assert found[1].get("k", 2) == 2


@pytest.mark.parametrize("host", [b"LocalHost", b"LOCALHOST:80", b"[::1]", b"[::1]:80", b"127.0.0.1:80"])
def test_this_machine_may_be_called_by_each_of_its_names(host):
    """Names of a host have no case."""
    assert asyncio.run(ask(create_app(searcher(), hosts=LOOPBACK), host=host))[0] == 200


@pytest.mark.parametrize("host", [b"localhost.evil:80", b"evil:80", b"[::2]", b"[::1", b":80", b""])
def test_this_machine_may_be_called_by_no_other_name(host):
    assert asyncio.run(ask(create_app(searcher(), hosts=LOOPBACK), host=host))[0] == 421


def test_times_are_counted_up_to_1_2_and_5_of_each_decade():
    from nearfar.serve._middleware import Metrics

    made = Metrics(3)
    bounds = [digit * 10.0**power for power in (-3, -2, -1, 0) for digit in (1, 2, 5)]
    for seconds in bounds:
        made.record_search(1.01 * seconds)
    lines = made.text().decode().splitlines()
    counts = [int(float(line.split()[1])) for line in lines if line.startswith("nearfar_search_seconds_bucket")]
    assert counts == [*range(12), 12]


def test_a_body_has_as_many_bytes_as_are_allowed_and_no_more():
    for more, status in ((0, 200), (-1, 413)):
        app = create_app(searcher(), limits=Limits(body=len(VECTOR) + more))
        assert asyncio.run(ask(app))[0] == status


def test_a_search_takes_the_time_from_its_body_to_its_answer(monkeypatch):
    seen, clock = [], iter([100.0, 100.25])
    monkeypatch.setattr(nearfar.serve.app, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(nearfar.serve.app.Metrics, "record_search", lambda self, seconds: seen.append(seconds))
    assert asyncio.run(ask(create_app(searcher())))[0] == 200
    assert seen == [0.25]


def test_neighbors_that_were_not_found_are_no_answers():
    """An approximate index gives row -1 for them."""
    found = Neighbors(torch.tensor([[0.5, -torch.inf], [-torch.inf, -torch.inf]]), torch.tensor([[0, -1], [-1, -1]]))
    assert searcher().answers(found) == [[Answer(0, "0", 0.5, None)], []]


def test_strangers_are_unknown():
    """By the calibration of the index; the nearest are still named."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40).repeat_interleave(5)
    x = torch.randn(40, 16, generator=generator)[y] + 0.3 * torch.randn(200, 16, generator=generator)
    found = calibrate(x, y, 0.1, per="query")
    app = create_app(Searcher(Index(x, calibration=found)))
    for vector, known in ((x[0], True), (torch.randn(16, generator=generator), False)):
        status, answer = asyncio.run(ask(app, json.dumps({"vector": vector.tolist()}).encode()))
        assert (status, answer["known"], len(answer["results"])) == (200, known, 10)
        assert (answer["results"][0]["score"] > found.usable) == known
    assert "known" not in asyncio.run(ask(create_app(searcher())))[1]


def test_a_text_is_a_query_of_an_index_of_texts():
    """Its network gets the text itself; a picture, bytes that are no text and an empty one are refused."""
    seen = []

    def embed(text):
        seen.append(text)
        return torch.tensor([0.0, 1.0, 0.0])

    app = create_app(Searcher(Index(torch.eye(3)), embed, texts=True))
    status, found = asyncio.run(ask(app, " naïve question ".encode(), b"text/plain; charset=utf-8"))
    assert (status, found["results"][0]["row"], seen) == (200, 1, ["naïve question"])
    for body, kind, words in (
        (b"  ", b"text/plain", "the text is empty"),
        (b"\xff", b"text/plain", "the text is not UTF-8"),
        (png(4, 4), b"image/png", "no network that embeds pictures: send a text"),
    ):
        status, found = asyncio.run(ask(app, body, kind))
        assert status == 422
        assert words in found["error"]
