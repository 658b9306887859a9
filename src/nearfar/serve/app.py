"""The HTTP application of `nearfar serve`: search, health, metrics, pictures and one page. Needs the extra `serve`.

Every refusal is JSON {"error": "one sentence"} with a 4xx status. Pictures are asked for by row, never by path.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from nearfar.serve._answers import Answer, Searcher
from nearfar.serve._middleware import Guard, Metrics
from nearfar.serve._pictures import PIXELS, RefusedError, Thumbnails, decode

__all__ = ["Limits", "create_app"]

DEFAULT_COUNT = 10
"""Results of a request that does not set k."""
DRAINED = 1 << 27
"""Bytes of a too large body that are read and dropped, so that the client receives the refusal."""
ACCEPTED = (
    "send a picture as image/jpeg, image/png or image/webp, a text as text/plain, or a vector as application/json"
)
LONGEST = 100_000
"""Characters of a text that are read."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request and one client.

    Args:
        body: bytes of a body.
        pixels: pixels of a picture.
        seconds: seconds that a body may take to arrive.
        workers: maximum number of requests processed at once.
        waiting: maximum number of requests that wait for processing.
        headers: seconds that headers may take to arrive; this and the next two are applied by `nearfar serve` alone.
        connections: connections at once.
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
    """The handlers of all paths, with their shared state."""

    def __init__(self, searcher: Searcher, thumbnails: Thumbnails, limits: Limits, title: str) -> None:
        self.searcher, self.thumbnails, self.limits = searcher, thumbnails, limits
        self.metrics = Metrics(len(searcher.index))
        self.turns, self.active = asyncio.Semaphore(limits.workers), 0
        self.answered: Callable[[], None] = lambda: None
        self.page, self.policy = _make_page(searcher, title)

    async def search(self, request: Request) -> JSONResponse:
        """POST /search: the neighbors of a picture, of a text or of a vector."""
        try:
            k = self._count(request.query_params.get("k"))
            work = await self._work(request, k)
            started = time.perf_counter()
            answers = await self._in_turn(work)
            self.metrics.record_search(time.perf_counter() - started)
            known = self.searcher.index.knows(answers[0].score if answers else -math.inf)
            verdict = {} if known is None else {"known": known}
            return JSONResponse({"k": k, **verdict, "results": [self._record(answer) for answer in answers]})
        finally:
            self.answered()

    async def _work(self, request: Request, k: int) -> Callable[[], list[Answer]]:
        """Read the body, and return the search to run in a thread."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if not kind.startswith("image/") and kind not in ("application/json", "text/plain"):
            raise RefusedError(415, f"the content type is {kind[:80]!r}: {ACCEPTED}.")
        body = await _read_body(request, self.limits)
        if not body:
            raise RefusedError(422, f"the body is empty: {ACCEPTED}.")
        if kind.startswith("image/"):
            return lambda: self.searcher.by_picture(decode(body, self.limits.pixels), k)
        if kind == "text/plain":
            return lambda: self.searcher.by_text(_text(body), k)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(422, "the body is not JSON in UTF-8.") from None
        return lambda: self.searcher.by_vector(given, k)

    async def _in_turn(self, work: Callable[[], list[Answer]]) -> list[Answer]:
        if self.active >= self.limits.workers + self.limits.waiting:
            raise RefusedError(503, "too many searches are waiting; ask again in a moment.")
        self.active += 1
        try:
            async with self.turns:
                return await run_in_threadpool(work)
        finally:
            self.active -= 1

    def _count(self, word: str | None) -> int:
        most = self.searcher.most
        if word is None:
            return min(DEFAULT_COUNT, most)
        if not (word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= most):
            raise RefusedError(422, f"k must be a whole number in 1..{most}, but came as {word[:40]!r}.")
        return int(word)

    def _record(self, answer: Answer) -> dict[str, Any]:
        return {**asdict(answer), "picture": f"/picture/{answer.row}" if self.thumbnails.available else None}

    async def picture(self, row: str) -> Response:
        """GET /picture/ROW: the small picture of a row."""
        numbered = row.isascii() and row.isdigit() and len(row) < 16
        found = await run_in_threadpool(self.thumbnails.get, int(row)) if numbered else None
        if found is None:
            raise RefusedError(404, "there is no picture of this row.")
        return Response(found[1], media_type=found[0], headers={"Cache-Control": "max-age=3600"})

    async def health(self) -> dict[str, Any]:
        """GET /health: the state of the server, and its index."""
        index = self.searcher.index
        return {
            "status": "ok",
            "vectors": len(index),
            "width": index.width,
            "kind": index.kind,
            "similarity": index.similarity,
            "fingerprint": index.fingerprint,
            "takes_pictures": self.searcher.takes == "pictures",
            "takes_texts": self.searcher.takes == "texts",
            "threshold": None if index.calibration is None else index.calibration.usable,
        }

    async def show_metrics(self) -> Response:
        """GET /metrics: counters and times in the format of Prometheus."""
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    async def show_page(self) -> HTMLResponse:
        """GET /: the search page."""
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
        searcher: answers the searches.
        thumbnails: pictures of the answers; by default those of the index.
        limits: limits of requests and clients.
        title: heading of the page.
        hosts: allowed names of the server, which keeps out pages that point their own name at a loopback address;
            None for any.
        answered: called after each search.
    """
    app = FastAPI(title="nearfar serve", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    service = _Service(searcher, thumbnails or Thumbnails(searcher.index), limits or Limits(), title)
    service.answered = answered or service.answered
    app.add_api_route("/search", service.search, methods=["POST"], response_model=None)
    app.add_api_route("/picture/{row}", service.picture, methods=["GET"], response_model=None)
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.show_metrics, methods=["GET"], response_model=None)
    app.add_api_route("/", service.show_page, methods=["GET"], response_model=None)
    app.exception_handler(RefusedError)(_answer_refusal)
    app.exception_handler(HTTPException)(_answer_http_error)
    app.exception_handler(ClientDisconnect)(_answer_disconnect)
    app.add_middleware(Guard, metrics=service.metrics, hosts=hosts)
    return app


def _text(body: bytes) -> str:
    """The text of a body, cut to `LONGEST` characters."""
    try:
        found = body.decode("utf-8")[:LONGEST].strip()
    except UnicodeDecodeError:
        raise RefusedError(422, "the text is not UTF-8.") from None
    if not found:
        raise RefusedError(422, "the text is empty: send a sentence.")
    return found


async def _answer_refusal(request: Request, error: RefusedError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse({"error": str(error)}, error.status, headers=headers)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    words = {
        404: "there is nothing here; there are POST /search, GET /health, GET /metrics and GET /.",
        405: "this method is not allowed here; there are POST /search, GET /health, GET /metrics and GET /.",
    }
    return JSONResponse({"error": words.get(error.status_code, "the request cannot be answered.")}, error.status_code)


async def _answer_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)


async def _read_body(request: Request, limits: Limits) -> bytes:
    """Read a body; one that is too large or too slow is refused and never held in full."""
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
        raise RefusedError(413, f"the body has more than {limits.body:,} bytes, the limit; send a smaller one.")
    return b"".join(parts)


def _make_page(searcher: Searcher, title: str) -> tuple[str, str]:
    """The page, and a content security policy that allows its script and nothing else."""
    here = files("nearfar.serve")
    html, css, script = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    index, whole = searcher.index, title.encode("utf-8", errors="replace").decode("utf-8")
    body = Template(html).substitute(
        title=escape(whole),
        about=f"{len(index):,} vectors, {index.similarity}, {index.kind}.",
        most=searcher.most,
        picture="hidden" if searcher.takes == "texts" else "",
        sentence="" if searcher.takes == "texts" else "hidden",
        usual=min(DEFAULT_COUNT, searcher.most),
        version=__version__,
        js=script,
    )
    page = document(f"{whole} · nearfar", body.rstrip(), style=css, head='<link rel="icon" href="data:,">')
    allowed = f"script-src {hash_of(script)}; style-src 'unsafe-inline'; img-src 'self' blob: data:; connect-src 'self'"
    return page, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
