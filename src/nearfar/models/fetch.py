"""Download of published weights: without a connection, an error at once instead of a minute of retries."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = ["fetching", "reachable"]

WAIT = 4.0
"""Seconds that a host has to answer."""


@contextmanager
def fetching(name: str, address: str | None) -> Iterator[None]:
    """Let a library download the weights of a network from `address`; None if nothing needs to be downloaded.

    If the host does not answer, the Hugging Face hub is set to offline mode and looks in its cache alone.

    Raises:
        OSError: the download failed; the message says what to do.
    """
    if address is None:
        yield
        return
    there = reachable(address)
    try:
        if not there and not _kept_by_a_hub(address):
            raise ConnectionError("no connection")
        with _offline(not there):
            yield
    except Exception as error:
        reason = " ".join(str(error).split())[:120] if there else f"{urlsplit(address).hostname} does not answer"
        raise OSError(
            f"models: the published weights of {name} could not be fetched ({reason}); name a file of them "
            "(weights=PATH, --model.weights PATH), or begin without (pretrained=False, --model.pretrained false)."
        ) from None


def reachable(address: str) -> bool:
    """Whether the host of an address accepts a connection within `WAIT` seconds; assumed so behind a proxy."""
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    parts, found = urlsplit(address), threading.Event()
    place = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))

    def knock() -> None:
        try:
            socket.create_connection(place, timeout=WAIT).close()
            found.set()
        except OSError:
            pass

    # in a thread of its own: the look-up of a name has no timeout
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(WAIT)
    return found.is_set()


def _hub() -> Any:
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return constants


def _kept_by_a_hub(address: str) -> bool:
    """Whether the library keeps a cache of its downloads and can use it offline."""
    hub = _hub()
    return hub is not None and address == hub.ENDPOINT


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    hub = _hub()
    if not wanted or hub is None:
        yield
        return
    before, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before
