"""Small batches: the default call is recorded and replayed, on a GPU as a CUDA graph, on a CPU as a list of operators.

A loss of 128 rows runs some 200 short operators, and launching them takes longer than their work, as does autograd on a
CPU. After `WAIT` calls with equal shapes and settings, forward and backward are recorded once; later calls replay the
recording for their rows. The results are those of the dense engine. A changed setting makes a new recording, and
create_graph=True recomputes by plain autograd. engine="dense" is never recorded, nor is a loss with a custom class,
part or hook, which may do something that a recording cannot repeat.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.checks import RECENT, capturing
from nearfar._utils.cuda_graph import record
from nearfar._utils.files import first_line
from nearfar._utils.shortcuts import hooked_globally
from nearfar._utils.tape import Tape, trace
from nearfar._utils.tensors import uses_tf32
from nearfar.engines.auto import LEAST, choose
from nearfar.engines.known_gradient import KnownGradient, gradient
from nearfar.engines.recording_key import Settings, settings
from nearfar.groups._groupings import Product

__all__ = ["DEVICES", "PAIRS", "Replays", "call_key", "replayed", "settings", "watched", "widest"]

WAIT = 3  # number of calls with the same shapes before one is recorded
NUMBERS = count()
NEVER = -math.inf  # replaces the number of calls after a failed recording
CREDIT, COST, PAUSE = 32, 8, 128
"""A recording earns 1 for each call, up to `CREDIT`, and pays `COST` for one that must be computed as usual, because a
number that was read from a tensor differs. If it cannot pay, it is dropped, and not made again for `PAUSE` calls."""
MOST = 8  # maximum number of recordings of a loss; the least recently used is dropped first
PAIRS = 2**22
"""Largest n·m of a recorded call: the dense engine's matrices stay in the recording's memory."""
TRIPLETS = 2**24  # the same for n·m·m in losses over triplets
FUSED = 2**31  # largest number of pairs of a recorded fused call; beyond it kernels take longer than their launch
DEVICES = frozenset({"cpu", "cuda"} if RECENT else ())
TRACED = frozenset({"cpu"})  # devices on which operators are listed; the others capture a graph
TENSORS = frozenset({Tensor, nn.Parameter})

Given = tuple[Tensor | None, ...]
Run = Callable[[Any, Given], Any]
"""Computes a value, or without gradients several tensors, from a module or its twin and the tensors of a call."""


def replayed(loss: Any, core: Any, call: Any) -> Tensor | None:
    """The value of a call by a recording; None if the call must be computed as usual, by the `_value` of the loss.

    The engine and groups of the product in it, `core`, decide whether a recording is worth its memory.
    """
    given = (call.embeddings, call.labels, call.ref_emb, call.ref_labels, call.ids, call.ref_ids)
    device = call.embeddings.device
    if device.type in TRACED and len(call.embeddings) * len(call.reference) >= LEAST[device.type].operators:
        return None  # too large to be recorded there
    product = core.product
    if product.reduction == "none" or call.indices is not None or call.ranks is not None or call.labels is None:
        return None
    if not all(x is None or (type(x) in TENSORS and x.device == device) for x in given) or watched():
        return None
    told = settings(loss, product.parts, device)
    if told is None:
        return None
    key = (told, *call_key(given))
    large = loss._replays.remembered(key, lambda: _large(loss, core, call, product))
    if large is None:
        return None
    # the number of positives per row determines tensor sizes, so it is read before recording
    width = widest(call.labels, call.labels if call.ref_labels is None else call.ref_labels) if large else None
    key = (*key, width)
    low = torch.promote_types(call.embeddings.dtype, call.reference.dtype)
    kind, owner = type(call), call.owner  # not the call itself: a recording must not keep the network's activations

    def run(loss: Any, given: Given) -> Tensor:
        embeddings, labels, *rest = given
        value: Tensor = loss._value(kind(owner, embeddings, labels, None, *rest, low=low, width=width))
        return value

    value: Tensor | None = loss._replays.value(key, run, loss, given)
    if value is not None:
        core.heed()
    return value


def _large(loss: Any, core: Any, call: Any, product: Product) -> bool | None:
    """Whether a call must know its largest number of positives before it is recorded; None if it is not recorded."""
    n, m = len(call.embeddings), max([len(call.reference), *(len(x) for x in loss.parameters() if x.ndim)])
    if product.draws or product.remembers or core.engine not in ("auto", "fused") or not n * m:
        return None
    triplets, device = product.groups.scope in ("positive", "triplets"), call.embeddings.device.type
    most = LEAST[device].operators - 1 if device in TRACED else PAIRS
    if core.engine == "auto" and n * m <= most and (not triplets or n * m * m <= TRIPLETS):
        return False
    product, plan = core._planned(product, n)
    folds = [x.fold() for x in (product.over_positive, product.over_negative)]
    if (
        device in TRACED
        or loss is not core
        or core.composed
        or n * m > FUSED
        or any(fold is not None and fold.kind in ("top", "moments") for fold in folds)  # read how many members count
    ):
        return None
    way = choose(core, call, core._relation(call), product, plan)
    return True if way is not None and way.low is not None else None


def widest(labels: Tensor, others: Tensor) -> int:
    """The largest number of columns with a row's label, including its own; reads from the device."""
    ranked = others.sort().values
    return max(1, int((torch.searchsorted(ranked, labels, right=True) - torch.searchsorted(ranked, labels)).amax()))


def watched() -> bool:
    """Whether anomaly mode, hooks or dispatch modes observe single operations, or a capture is in progress."""
    return (
        torch.is_anomaly_enabled()
        or hooked_globally()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # such as those of a checkpoint
        or capturing()
    )


def call_key(given: Given) -> tuple[Hashable, ...]:
    """What the kernels of a call depend on: shapes and dtypes, what has a gradient, torch's settings, the stream."""
    (x,) = given[:1]
    assert x is not None  # noqa: S101 - the embeddings
    shapes = tuple(None if x is None else (x.shape, x.dtype, x.requires_grad) for x in given)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    kernels = uses_tf32(), torch.are_deterministic_algorithms_enabled()
    return shapes, torch.is_grad_enabled(), x.device, stream, torch.is_inference_mode_enabled(), *kernels


class Replays:
    """The recordings of one loss; a copy of the loss starts without any."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, float | Recording] = OrderedDict()
        self._lock = threading.Lock()
        self._made: dict[Hashable, Any] = {}
        self.seen: Settings | None = None
        """The settings at the last call."""

    def number(self, told: Hashable) -> int:
        """A number for these settings, which is faster to look up than they are."""
        found: int = self.remembered(told, lambda: next(NUMBERS))
        return found

    def remembered(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave at the first call with this key."""
        if key not in self._made:
            if len(self._made) >= 8 * MOST:
                self._made.clear()
            self._made[key] = make()
        return self._made[key]

    def __deepcopy__(self, memo: Any) -> Replays:
        return Replays()

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def value(self, key: Hashable, run: Run, loss: nn.Module, given: Given) -> Any:
        """The result of `run(loss, given)` by a recording; None if there is none for it, or another thread uses it.

        The key is equal for calls that differ only in the values of `given`, the embeddings first, and of the loss's
        parameters. The result is a 0-dim tensor; without gradients, it may be a tuple of tensors.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found = self._recording(key, run, loss, given)
            with torch.no_grad():
                results = None if found is None else found.replay(given)
            if found is None or results is None:
                if found is not None and not found.pays():
                    self._known[key] = -PAUSE
                return None
            if not found.leaves:
                return results[0]
            learned = _learned(loss) if self.seen is None else [x for x in self.seen.learned if x.requires_grad]
            inputs, (value, known) = (*given, *learned), results
            slopes: list[Tensor | None] = [None] * len(inputs)
            for place, slope in zip(found.leaves, known, strict=True):
                slopes[place] = slope
            again = partial(_again, partial(run, loss), len(given))
            return KnownGradient.apply((value, slopes), again, *inputs)  # type: ignore[no-untyped-call]
        finally:
            self._lock.release()

    def _recording(self, key: Hashable, run: Run, loss: nn.Module, given: Given) -> Recording | None:
        """The recording for this key, made once the key came often enough; after a failure it is not tried again."""
        found = self._known.get(key, 0)
        if not isinstance(found, Recording):
            found += 1
            if found > WAIT:
                found = _tried(run, loss, given)
            self._known[key] = found
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found if isinstance(found, Recording) else None


def _tried(run: Run, loss: nn.Module, given: Given) -> Recording | float:
    try:
        return Recording(run, loss, given)
    except RuntimeError as error:
        if given[0] is not None and given[0].device.type not in TRACED:
            warnings.warn(
                f"{type(loss).__name__}: this call could not be recorded on the GPU ({first_line(error)}); it is "
                'computed anew each time, which is slower; engine="dense" never records.',
                stacklevel=2,
            )
        return NEVER


class Recording:
    """Forward and backward of one call, recorded with copies of its tensors and a twin of the loss."""

    def __init__(self, run: Run, loss: nn.Module, given: Given) -> None:
        wanted = torch.is_grad_enabled()
        loss = _twin(loss)
        learned = _learned(loss)
        contiguous = torch.contiguous_format
        mine = tuple(None if x is None else x.detach().clone(memory_format=contiguous) for x in given)
        self.credit = 0
        self.leaves = [
            place for place, x in enumerate((*given, *learned)) if wanted and x is not None and x.requires_grad
        ]
        """Indices of the tensors, given and learned, that need a gradient."""

        def body() -> tuple[Any, tuple[Tensor | None, ...]]:
            # gradients are at least float32, so that a scaled loss is scaled before rounding
            rows = [_leaf(x, place in self.leaves) for place, x in enumerate(mine)]
            every = (*rows, *learned)
            with torch.set_grad_enabled(bool(self.leaves)):
                value = run(loss, tuple(rows))
            if not self.leaves:
                return value, ()
            leaves = [x for place, x in enumerate(every) if x is not None and place in self.leaves]
            return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True)

        like = mine[0]
        assert like is not None  # noqa: S101 - the embeddings
        # a replay advances the random state by itself: neither this run of the body nor a failed recording may
        with torch.random.fork_rng([like.device] if like.is_cuda else []):
            self.tape = trace(body, mine)[0] if like.device.type in TRACED else _capture(body, mine, like)

    def replay(self, given: Given) -> Any:
        """Value and gradients for other tensors of the same shapes; None if they must be computed as usual."""
        found = self.tape([None if x is None else x.contiguous() for x in given])
        if found is not None:
            self.credit = min(self.credit + 1, CREDIT)
        return found

    def pays(self) -> bool:
        """Pay for a call that had to be computed as usual; whether the recording is still worth its memory."""
        self.credit -= COST
        return self.credit >= 0


def _capture(body: Callable[[], Any], mine: Given, like: Tensor) -> Tape:
    """Record `body` as a graph, which reads from the tensors `mine`."""
    start, (found, slopes) = record(body, like)

    def replay(given: Sequence[Tensor | None]) -> Any:
        for old, x in zip(mine, given, strict=True):
            if old is not None and x is not None:
                old.copy_(x)
        start()
        value = found.clone() if isinstance(found, Tensor) else tuple(x.clone() for x in found)
        return value, [None if x is None else x.clone() for x in slopes]

    return replay


def _again(run: Callable[[Given], Tensor], many: int, inputs: Given, grad_output: Tensor) -> list[Tensor | None]:
    """The gradient by plain autograd, with a graph; `many` of the inputs are the tensors of the call."""
    return gradient(run(inputs[:many]), inputs, grad_output, create_graph=True)


def _learned(loss: nn.Module) -> list[Tensor]:
    """The parameters that require a gradient."""
    return [x for x in loss.parameters() if x.requires_grad]


def _twin(loss: nn.Module) -> Any:
    """A copy of the loss that shares the memory of parameters and buffers, and what is read from the GPU later.

    Autograd ties a parameter to the stream of its earlier use, which must not enter a recording. New parameters are
    tied to the recording's stream. The loss itself is not changed, because another thread may be using it.
    """
    mine: dict[int, Any] = {id(x): nn.Parameter(x.detach(), requires_grad=x.requires_grad) for x in loss.parameters()}
    shared = (*loss.buffers(), *(x._deferred for x in loss.modules() if hasattr(x, "_deferred")))
    return copy.deepcopy(loss, mine | {id(x): x for x in shared})


def _leaf(x: Tensor | None, wanted: bool) -> Tensor | None:
    """A leaf tensor that requires a gradient if wanted, at least in float32."""
    if x is None or not wanted:
        return x
    return x.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
