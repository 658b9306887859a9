"""`nearfar serve`: search an index over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar._utils.console import say
from nearfar.cli.commands.embedding import Trust
from nearfar.cli.commands.search import Images, IndexPath, Network

if TYPE_CHECKING:
    from nearfar.evaluation import DiskIndex, Index

PER_CLIENT = 64  # maximum number of connections of one address, if addresses distinguish clients


def serve(
    index: IndexPath,
    host: Annotated[str, typer.Option(help="Address to listen on; only loopback is private.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    images: Images = None,
    model: Network = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest number of bytes in a request.")] = 10_000_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Largest number of pixels in a picture.")] = 64_000_000,
    max_results: Annotated[int, typer.Option(min=1, help="Largest number of neighbors in an answer.")] = 100,
    max_per_client: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Largest number of connections from one address; 0 for no limit, as behind a proxy. Default: 64; on "
            "loopback 0.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent searches.")] = 2,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after this many searches.")] = None,
    trust_model: Trust = False,
) -> None:
    """Answer searches over HTTP: POST /search, GET /health, GET /metrics, and a page for photographs or sentences.

    There are no passwords and no encryption. To give others access, put it behind a server that has them.
    """
    from nearfar._utils.extras import need

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package, "nearfar serve", "serve")
    from nearfar.cli.commands.photographs import network_of
    from nearfar.evaluation import open_index
    from nearfar.serve import Searcher, Thumbnails
    from nearfar.serve._middleware import LOOPBACK
    from nearfar.serve._server import Countdown, bind, is_loopback, run
    from nearfar.serve.app import Limits, create_app

    made = open_index(index)
    network = network_of(made, index, model, trust_model=trust_model)
    texts = network is not None and network.takes_texts
    searcher = Searcher(made, None if network is None else network.vector, texts=texts, max_results=max_results)
    countdown = Countdown(requests)
    if max_per_client is None:
        max_per_client = 0 if is_loopback(host) else PER_CLIENT
    limits = Limits(body=max_bytes, pixels=max_pixels, workers=workers, per_client=max_per_client)
    app = create_app(
        searcher,
        Thumbnails(made, images),
        limits=limits,
        title=index.name,
        hosts=LOOPBACK if is_loopback(host) else None,
        answered=countdown,
    )
    with bind(host, port) as listening:
        _greet(made, index, host, listening.getsockname()[1], network is not None)
        sys.stdout.flush()  # a parent process may wait for the address
        run(app, listening, countdown, limits, seconds)


def _greet(made: Index | DiskIndex, index: Path, host: str, port: int, pictures: bool) -> None:
    """Print the address, which optional parts the index lacks, and its threshold."""
    from nearfar.cli.commands.search import threshold_of
    from nearfar.serve._server import is_loopback

    if not pictures:
        say(f"{index} holds no network, so only vectors can be searched for (--model RUN).")
    if said := threshold_of(made):
        say(said)
    if not is_loopback(host):
        say("Anyone who can reach this address can search: there are no passwords and no encryption.")
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {made!r} at http://{shown}:{port} (Ctrl-C ends it)")
