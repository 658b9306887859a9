"""`cached_step`: the gradient of a batch that does not fit into memory, computed in chunks (gradient caching)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from nearfar._utils.checks import check_choice, check_whole
from nearfar._utils.process_group import in_touch, several
from nearfar._utils.rng import State, set_states, states
from nearfar.losses.robust import Labels

Inputs = Any  # a tensor [b, ...], or a list, tuple or dict of such, as the encoder takes them


def cached_step(
    encoder: nn.Module,
    inputs: Inputs,
    labels: Labels,
    loss: Callable[..., Tensor],
    chunk: int,
    *,
    bn: Literal["refuse", "frozen"] = "refuse",
    scaler: Any = None,
    **more: Any,
) -> Tensor:
    """Back-propagate loss(encoder(inputs), labels) while holding the activations of only `chunk` samples.

    First every chunk is embedded without a graph, then the loss gives dF/dE [b, d], then every chunk is embedded again
    with the same random numbers, and its part of dF/dE is back-propagated. It costs one more forward pass. The gradient
    is added to all parameters. It equals that of a plain step whose encoder runs chunk by chunk (with the same dropout
    masks), and without randomness that of a plain step. Call the optimizer afterwards.

    Under DDP pass the wrapped encoder and `Distributed(loss)`: gradients are averaged once, with the last chunk. Under
    `torch.autocast` both passes use it.

    Args:
        encoder: any module with output [b, d]; called as encoder(x), with *x for a tuple or list, **x for a dict.
        inputs: a tensor [b, ...], or a tuple, list or dict of tensors with b samples each; other entries are passed on.
        labels: [b] integers, or a `Relation`.
        loss: any loss of the package, called once with all b embeddings; its parameters get their gradient too.
        chunk: the number of samples that the encoder receives at a time.
        bn: batch normalization in training mode would use the statistics of a chunk, twice: "refuse" raises an error,
            "frozen" runs such layers in evaluation mode during the step.
        scaler: a `torch.amp.GradScaler` for fp16.
        more: further arguments of the loss, such as ids=.

    Returns:
        The loss, detached from the graph.
    """
    check_whole("cached_step", "chunk", chunk)
    check_choice("cached_step", "bn", bn, ("refuse", "frozen"))
    chunks = Chunks("cached_step", encoder, cut_samples("cached_step", inputs, chunk), bn=bn)
    embeddings = chunks.embed().requires_grad_()
    with torch.enable_grad(), in_touch("cached_step"):
        value = loss(embeddings, labels, **more)
        scaled = value if scaler is None else scaler.scale(value)
        torch.autograd.backward(scaled)
    grad = embeddings.grad
    if grad is None:
        raise ValueError("cached_step: the loss has no gradient in the embeddings; leave torch.no_grad().")
    chunks.pull(grad)
    return value.detach()


class Chunks:
    """The chunks of a batch, embedded without a graph, and once more to back-propagate the gradient of the rows.

    The second time repeats the random numbers and the autocast of the first.

    Args:
        owner: the name in messages.
        encoder: the module that embeds, wrapped by DDP or not.
        parts: the inputs of each chunk.
        bn: see `cached_step`.
        embed: embeds one chunk, given the encoder and its inputs.
    """

    def __init__(
        self,
        owner: str,
        encoder: nn.Module,
        parts: list[Inputs],
        *,
        bn: str = "refuse",
        embed: Callable[[nn.Module, Inputs], Tensor] | None = None,
    ) -> None:
        self.owner, self.encoder, self.parts, self.bn, self.rows_of = owner, encoder, parts, bn, embed or _embed
        self.device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
        self.before = list[State]()
        kind = self.device.type
        self.autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    @torch.no_grad()
    def embed(self) -> Tensor:
        """The rows [b, d] of all chunks."""
        rows = list[Tensor]()
        with self._ready():
            for part in self.parts:
                self.before.append(states(self.device))
                rows.append(self.rows_of(self.encoder, part))
        return torch.cat(rows)

    def pull(self, grad: Tensor) -> None:
        """Back-propagate the gradient [b, d] of the rows to the parameters of the encoder."""
        start, (dtype, enabled) = 0, self.autocast
        with self._ready(), torch.autocast(self.device.type, dtype, enabled=enabled), torch.enable_grad():
            for number, (part, state) in enumerate(zip(self.parts, self.before, strict=True)):
                last = number == len(self.parts) - 1
                with _replay_random(state, self.device), _skip_averaging(self.encoder, last=last):
                    again = self.rows_of(self.encoder, part)
                    torch.autograd.backward(again, grad[start : start + len(again)].to(again.dtype))
                start += len(again)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with _freeze_norms(self.owner, self.encoder, self.bn), in_touch(self.owner):
            yield


def _embed(encoder: nn.Module, part: Inputs) -> Tensor:
    if isinstance(part, Mapping):
        rows = encoder(**part)
    elif isinstance(part, tuple | list):
        rows = encoder(*part)
    else:
        rows = encoder(part)
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        came = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"cached_step: the encoder must give embeddings [b, d], but gave {came}.")
    return rows


def cut_samples(owner: str, inputs: Inputs, chunk: int) -> list[Inputs]:
    """Cut the inputs into chunks; entries that are not tensors are part of every chunk."""
    tensors = [inputs] if isinstance(inputs, Tensor) else [x for x in _entries(owner, inputs) if isinstance(x, Tensor)]
    sizes = {len(x) for x in tensors if x.ndim}
    if len(sizes) != 1 or not (sum(sizes) or several()):  # with several ranks, one may have no rows
        raise ValueError(
            f"{owner}: inputs must hold tensors of one number of samples, above zero, but hold {sorted(sizes)}."
        )
    count = sizes.pop()
    return [_cut(inputs, slice(i, min(i + chunk, count))) for i in range(0, max(count, 1), chunk)]


def _entries(owner: str, inputs: Inputs) -> Sequence[Any]:
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    if isinstance(inputs, tuple | list):
        return inputs
    raise TypeError(
        f"{owner}: inputs must be a tensor, or a tuple, list or dict of them, but came as {type(inputs).__name__}."
    )


def _cut(inputs: Inputs, here: slice) -> Inputs:
    def cut(x: Any) -> Any:
        return x[here] if isinstance(x, Tensor) and x.ndim else x

    if isinstance(inputs, Tensor):
        return inputs[here]
    if isinstance(inputs, Mapping):
        return {name: cut(x) for name, x in inputs.items()}
    return [cut(x) for x in inputs]


@contextmanager
def _replay_random(state: State, device: torch.device) -> Iterator[None]:
    """Draw the random numbers that follow `state` within the block, then restore the generators."""
    now = states(device)
    set_states(state, device)
    try:
        yield
    finally:
        set_states(now, device)


def _skip_averaging(encoder: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Under DDP, skip the averaging of gradients for all chunks but the last."""
    if last or not hasattr(encoder, "no_sync"):
        return nullcontext()
    context: AbstractContextManager[Any] = encoder.no_sync()  # type: ignore[operator]
    return context


@contextmanager
def _freeze_norms(owner: str, encoder: nn.Module, bn: str) -> Iterator[None]:
    found = [
        (name, module)
        for name, module in encoder.named_modules()
        if isinstance(module, _NormBase)
        and module.training
        and (isinstance(module, _BatchNorm) or module.track_running_stats)
    ]
    if found and bn == "refuse":
        raise ValueError(
            f"{owner}: {found[0][0] or 'the encoder'} ({type(found[0][1]).__name__}) normalizes by its batch, "
            'which would be a chunk; pass bn="frozen" to use its running statistics, or take GroupNorm or LayerNorm.'
        )
    for _, module in found:
        module.eval()
    try:
        yield
    finally:
        for _, module in found:
            module.train()
