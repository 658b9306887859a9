"""The HTTP application of `nearfar serve`: search, health, metrics, pictures and one page. Needs the extra `serve`.

Every refusal is JSON {"error": "one sentence"} with a 4xx status. Pictures are asked for by row, never by path.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nearfar import __version__
from nearfar._utils.page import document, hash_of
from nearfar.serve.answers import Answer, Searcher
from nearfar.serve.decode import PIXELS, RefusedError, decoded
from nearfar.serve.guard import Guard
from nearfar.serve.metrics import Metrics
from nearfar.serve.thumbnails import Thumbnails

__all__ = ["Limits", "create_app"]

USUAL = 10
"""Results where a request does not say how many."""
DRAINED = 1 << 27
"""Bytes of a body that is too large which are read and thrown away, so that its sender hears why."""
TAKEN = "send a picture as image/jpeg, image/png or image/webp, or a vector as application/json"


@dataclass(frozen=True)
class Limits:
    """What one request and one client may ask for.

    Args:
        body: bytes of a body.
        pixels: of a picture.
        seconds: that a body may take to arrive.
        workers: requests that are answered at once.
        waiting: requests that may wait for their turn.
        headers: seconds that headers may take to arrive; like the next two applied by `nearfar serve` alone.
        connections: at once.
        per_client: connections at once from one address; 0 for no limit.
    """

    body: int = 10_000_000
    pixels: int = PIXELS
    seconds: float = 30.0
    workers: int = 2
    waiting: int = 128
    headers: float = 10.0
    connections: int = 512
    per_client: int = 0


class _Service:
    """The handlers, and what they share."""

    def __init__(self, searcher: Searcher, thumbnails: Thumbnails, limits: Limits, title: str) -> None:
        self.searcher, self.thumbnails, self.limits = searcher, thumbnails, limits
        self.metrics = Metrics(len(searcher.index))
        self.turns, self.held = asyncio.Semaphore(limits.workers), 0
        self.answered: Callable[[], None] = lambda: None
        self.page, self.policy = _page(searcher, title)

    async def search(self, request: Request) -> JSONResponse:
        """POST /search: the neighbors of a picture or of a vector."""
        try:
            k = self._count(request.query_params.get("k"))
            work = await self._work(request, k)
            started = time.perf_counter()
            answers = await self._in_turn(work)
            self.metrics.searched(time.perf_counter() - started)
            return JSONResponse({"k": k, "results": [self._record(answer) for answer in answers]})
        finally:
            self.answered()

    async def _work(self, request: Request, k: int) -> Callable[[], list[Answer]]:
        """Read the body, and give what is to be done with it in a thread."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if not kind.startswith("image/") and kind != "application/json":
            raise RefusedError(415, f"the content type is {kind[:80]!r}: {TAKEN}.")
        body = await _body(request, self.limits)
        if not body:
            raise RefusedError(422, f"the body is empty: {TAKEN}.")
        if kind.startswith("image/"):
            return lambda: self.searcher.by_picture(decoded(body, self.limits.pixels), k)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(422, "the body is no JSON in UTF-8.") from None
        return lambda: self.searcher.by_vector(given, k)

    async def _in_turn(self, work: Callable[[], list[Answer]]) -> list[Answer]:
        if self.held >= self.limits.workers + self.limits.waiting:
            raise RefusedError(503, "too many searches are waiting; ask again in a moment.")
        self.held += 1
        try:
            async with self.turns:
                return await run_in_threadpool(work)
        finally:
            self.held -= 1

    def _count(self, word: str | None) -> int:
        most = self.searcher.most
        if word is None:
            return min(USUAL, most)
        if not (word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= most):
            raise RefusedError(422, f"k must be a whole number in 1..{most}, but came as {word[:40]!r}.")
        return int(word)

    def _record(self, answer: Answer) -> dict[str, Any]:
        return {**answer.record(), "picture": f"/picture/{answer.row}" if self.thumbnails.there else None}

    async def picture(self, row: str) -> Response:
        """GET /picture/ROW: the small picture of a row."""
        numbered = row.isascii() and row.isdigit() and len(row) < 16
        found = await run_in_threadpool(self.thumbnails.get, int(row)) if numbered else None
        if found is None:
            raise RefusedError(404, "there is no picture of this row.")
        return Response(found[1], media_type=found[0], headers={"Cache-Control": "max-age=3600"})

    async def health(self) -> dict[str, Any]:
        """GET /health: that the server answers, and for which index."""
        index = self.searcher.index
        return {
            "status": "ok",
            "vectors": len(index),
            "width": index.width,
            "kind": index.kind,
            "similarity": index.similarity,
            "fingerprint": index.fingerprint,
            "takes_pictures": self.searcher.embed is not None,
        }

    async def measured(self) -> Response:
        """GET /metrics: counters and times, as Prometheus reads them."""
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    async def front(self) -> HTMLResponse:
        """GET /: the page."""
        return HTMLResponse(self.page, headers={"Content-Security-Policy": self.policy})


def create_app(
    searcher: Searcher,
    thumbnails: Thumbnails | None = None,
    *,
    limits: Limits | None = None,
    title: str = "Search",
    hosts: frozenset[str] | None = None,
    answered: Callable[[], None] | None = None,
) -> FastAPI:
    """Create the ASGI application of a search server.

    Args:
        searcher: what answers.
        thumbnails: pictures of the answers; by default those of the index.
        limits: of a request.
        title: heading of the page.
        hosts: names under which it may be called, against pages that point a name of theirs at a loopback address; None
            for any.
        answered: called after each search.
    """
    app = FastAPI(title="nearfar serve", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    service = _Service(searcher, thumbnails or Thumbnails(searcher.index), limits or Limits(), title)
    service.answered = answered or service.answered
    app.add_api_route("/search", service.search, methods=["POST"], response_model=None)
    app.add_api_route("/picture/{row}", service.picture, methods=["GET"], response_model=None)
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.measured, methods=["GET"], response_model=None)
    app.add_api_route("/", service.front, methods=["GET"], response_model=None)
    app.exception_handler(RefusedError)(_refused)
    app.exception_handler(HTTPException)(_unknown)
    app.exception_handler(ClientDisconnect)(_gone)
    app.add_middleware(Guard, metrics=service.metrics, hosts=hosts)
    return app


async def _refused(request: Request, error: RefusedError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse({"error": str(error)}, error.status, headers=headers)


async def _unknown(request: Request, error: HTTPException) -> Response:
    words = {
        404: "there is nothing here; there are POST /search, GET /health, GET /metrics and GET /.",
        405: "this method is not allowed here; there are POST /search, GET /health, GET /metrics and GET /.",
    }
    return JSONResponse({"error": words.get(error.status_code, "the request cannot be answered.")}, error.status_code)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)


async def _body(request: Request, limits: Limits) -> bytes:
    """Read a body; one that is too large or too slow is refused, and never held as a whole."""
    declared = request.headers.get("content-length", "")
    large = declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.body
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                size += len(part)
                if large or size > limits.body:
                    large = True
                    parts.clear()
                    if size > DRAINED:
                        break
                else:
                    parts.append(part)
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {limits.seconds:g} seconds.") from None
    if large:
        raise RefusedError(
            413, f"the body has more than {limits.body:,} bytes, which is the limit; send a smaller one."
        )
    return b"".join(parts)


def _page(searcher: Searcher, title: str) -> tuple[str, str]:
    """The page, and the policy that allows its script and nothing else."""
    here = files("nearfar.serve")
    html, css, script = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    index, whole = searcher.index, title.encode("utf-8", errors="replace").decode("utf-8")
    body = Template(html).substitute(
        title=escape(whole),
        about=f"{len(index):,} vectors, {index.similarity}, {index.kind}.",
        most=searcher.most,
        usual=min(USUAL, searcher.most),
        version=__version__,
        js=script,
    )
    page = document(f"{whole} · nearfar", body.rstrip(), style=css, head='<link rel="icon" href="data:,">')
    allowed = f"script-src {hash_of(script)}; style-src 'unsafe-inline'; img-src 'self' blob: data:; connect-src 'self'"
    return page, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
