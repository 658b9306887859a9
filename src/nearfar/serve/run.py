"""`run`: an application under uvicorn until it is told to stop. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from nearfar.serve.app import Limits
from nearfar.serve.connections import Connection

__all__ = ["Countdown", "bind", "is_loopback", "run"]

GRACE = 10
"""Seconds that requests in progress have when the server stops."""
BACKLOG = 512
"""Connections that the system holds until the server takes them."""


class Countdown:
    """Counts answered searches, and calls `stop` after the last one that is wanted.

    Args:
        requests: how many; None for no end.

    >>> ended = []
    >>> countdown = Countdown(2)
    >>> countdown.stop = lambda: ended.append(True)
    >>> for _ in range(2): countdown()
    >>> ended
    [True]
    """

    def __init__(self, requests: int | None) -> None:
        self.left = requests
        self.stop: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        """One more is answered."""
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.stop()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 takes one that is free. Who connects before the server runs is kept waiting."""
    found = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        if found is not None:
            found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{host}:{port} cannot be listened on ({reason}); choose another --host or --port.") from None
    return found


def run(app: Any, listening: socket.socket, countdown: Countdown, limits: Limits, seconds: float | None = None) -> None:
    """Serve until a signal, the end of the countdown, or the given seconds."""
    config = uvicorn.Config(
        app,
        http=type("Limited", (Connection,), {"limits": limits}),
        ws="none",  # a WebSocket connection would escape the limits
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        lifespan="off",
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    async def serve() -> None:
        countdown.stop = stop
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, stop)
        await server.serve(sockets=[listening])

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        asyncio.run(serve())
