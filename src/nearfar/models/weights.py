"""Published weights: download them, read them without running code, load them without their classifier."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["Weights", "download", "is_reachable"]

WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which published files store the weights, if they store more."""
WAIT = 4.0
"""Seconds that a host has to answer."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The state dict of a file.

    Attributes:
        path: the file, for messages.
        state: tensors by name.
    """

    path: Path
    state: Mapping[str, Tensor]

    @staticmethod
    def read(path: Path) -> Weights:
        """Read a `.safetensors` file or one that `torch.save` wrote; no code in the file is run.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds anything but tensors by name.
        """
        if not path.is_file():
            raise FileNotFoundError(f"models: there is no file of weights {path}.")
        try:
            tensors = path.suffix == ".safetensors"
            state: Any = load_file(path) if tensors else torch.load(path, "cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise ValueError(
                f"models: the weights {path} cannot be read, because they hold more than tensors, which could run "
                "code; save a state_dict."
            ) from None
        except Exception as error:
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ValueError(
                f"models: the weights {path} cannot be read ({reason}); take a .safetensors file, or one that "
                "torch.save wrote of a state_dict."
            ) from None
        if state:
            state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), state)
        if (
            not isinstance(state, Mapping)
            or not state
            or not all(isinstance(value, Tensor) for value in state.values())
        ):
            raise ValueError(f"models: the weights {path} must be tensors by name; save a state_dict.")
        return Weights(path, {name.removeprefix("module."): value for name, value in state.items()})

    def load_into(self, network: nn.Module, classifier: Iterable[str] = ()) -> None:
        """Load the weights into a network; only layers named in `classifier` may be missing on either side.

        Raises:
            ValueError: names or shapes do not fit.
        """
        parts = tuple(f"{name}." for name in classifier)
        wanted, given = (
            {name: value for name, value in state.items() if not name.startswith(parts)}
            for state in (network.state_dict(), self.state)
        )
        # files published before torch counted batches have no num_batches_tracked
        missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
        surplus = [name for name in given if name not in wanted]
        other_shape = [name for name in given if name in wanted and given[name].shape != wanted[name].shape]
        for what, names in (("lacks", missing), ("has in addition", surplus), ("has in another shape", other_shape)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ValueError(
                    f"models: the weights {self.path} do not fit the trunk: the file {what} {names[0]}{more}; take the "
                    "file of this very network, or save the state_dict of its trunk."
                )
        network.load_state_dict(given, strict=False)


@contextmanager
def download(name: str, address: str | None) -> Iterator[None]:
    """Let a library download the weights of a network from `address`; None if nothing needs to be downloaded.

    If the host does not answer, the Hugging Face hub is set to offline mode, so that it looks in its cache only; from
    other hosts the download fails at once, instead of after a minute of retries.

    Raises:
        OSError: the download failed; the message says what to do.
    """
    if address is None:
        yield
        return
    hub, is_up = _hub(), is_reachable(address)
    before = getattr(hub, "HF_HUB_OFFLINE", None)
    try:
        if not is_up:
            if hub is None or address != hub.ENDPOINT:
                raise ConnectionError("no connection")
            hub.HF_HUB_OFFLINE = True
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:120] if is_up else f"{urlsplit(address).hostname} does not answer"
        raise OSError(
            f"models: the published weights of {name} could not be fetched ({reason}); name a file of them "
            "(weights=PATH, --model.weights PATH), or begin without (pretrained=False, --model.pretrained false)."
        ) from None
    finally:
        if hub is not None:
            hub.HF_HUB_OFFLINE = before


def is_reachable(address: str) -> bool:
    """Whether the host of an address accepts a connection within `WAIT` seconds; assumed so behind a proxy."""
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    parts, connected = urlsplit(address), threading.Event()
    host = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))

    def connect() -> None:
        try:
            socket.create_connection(host, timeout=WAIT).close()
            connected.set()
        except OSError:
            pass

    # in a thread of its own, because looking up a name has no timeout
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(WAIT)
    return connected.is_set()


def _hub() -> Any:
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return constants
