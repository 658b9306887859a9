"""`agree`: check, before ranks exchange rows, that all make the same call, in one small message of fixed size.

A rank with another loss, another dtype or invalid input would change what the others compute, or make a collective with
different sizes abort. `agree` finds the difference first, and all ranks raise the same error.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.process_group import Group
from nearfar.losses.robust import Call
from nearfar.relations.relation import Relation

EVERY = 100  # settings and parameter values are compared every `EVERY` calls; shapes and dtypes at each call
TOLERANCE = 1e-3
"""The allowed difference of values relative to the parameters' norm: above rounding, below another random seed."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class LossSummary:
    """A summary of a loss: a hash of its settings, and three numbers for its parameters, as of call `at`."""

    calls: int = 0
    at: int = -1
    settings: int = 0
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def update(self, loss: nn.Module) -> None:
        """Count a call, and every `EVERY` calls summarize the loss again."""
        if self.calls % EVERY == 0:
            self.at, self.settings, self.values = self.calls, _digest(_loss_lines(loss)), _sketch(loss)
        self.calls += 1


def agree(
    ranks: Group, loss: nn.Module, call: Call, summary: LossSummary, problem: Exception | None
) -> tuple[list[int], list[int]]:
    """Check that all ranks make the same call of the same loss; return their numbers of rows and of reference rows.

    The `summary` of the loss is updated. If ranks differ, all raise the same ValueError; the `problem` that a rank
    found in its own call is raised unchanged there.
    """
    summary.update(loss)
    # state that must be equal on all ranks at every call, such as the position in a ring buffer
    states = ((name, getattr(part, "_in_step", None)) for name, part in loss.named_modules())
    steps = [f"{name or 'the loss'} after {state}" for name, state in states if state is not None]
    mine = [] if problem is not None else [*_call_lines(call), *steps]
    counts = (0, 0) if problem is not None else (len(call.embeddings), len(call.reference))
    message = torch.tensor([int(problem is not None), *counts, _digest(mine), summary.at, summary.settings])
    message = torch.cat([message, torch.tensor(summary.values, dtype=torch.float64).view(torch.int64)])
    heard = ranks.gather(message.to(ranks.wire)).cpu()
    if _all_agree(heard):
        return heard[:, 1].tolist(), heard[:, 2].tolist()
    numbers = ((name, _sums(x, 0).tolist()) for name, x in loss.named_parameters())
    values = [f"{name} with values of length {math.sqrt(x[0]):.3g} (sum {x[1]:.3g})" for name, x in numbers]
    everyone = ranks.objects((None if problem is None else str(problem), mine + _loss_lines(loss) + values))
    raise problem or ValueError(_difference(everyone))


def _all_agree(heard: Tensor) -> bool:
    """Whether no rank has a problem and all messages agree; the result is the same on every rank."""
    wrong, kind, at, settings = heard[:, 0], heard[:, 3], heard[:, 4], heard[:, 5]
    if bool((wrong != 0).any() | (kind != kind[0]).any() | ((settings != settings[0]) & (at == at[0])).any()):
        return False
    values = heard[:, 6:].contiguous().view(torch.float64)[at == at[0]].tolist()
    return all(_is_close(other, values[0]) for other in values[1:])


def _is_close(a: list[float], b: list[float]) -> bool:
    """Whether two sketches could be of equal parameters; values that are not finite are reported elsewhere."""
    if not all(map(math.isfinite, (*a, *b))):
        return True
    return all(abs(x - y) <= TOLERANCE * max(a[0], b[0]) for x, y in zip(a, b, strict=True))


def _sketch(loss: nn.Module) -> tuple[float, float, float]:
    """The norm of all parameters and two fixed linear projections, which differ if the parameters differ."""
    found = [_sums(x, place) for place, x in enumerate(loss.parameters())]
    if not found:
        return (0.0, 0.0, 0.0)
    total = torch.stack(found).double().sum(dim=0).tolist()
    return (math.sqrt(total[0]), total[1], total[2])


@torch.no_grad()
def _sums(x: Tensor, place: int) -> Tensor:
    """[Σ x², uᵀXv with cosines, uᵀXv with sines] for X [rows, rest]."""
    x = x.detach().reshape(len(x) if x.ndim else 1, -1)
    x = x if x.dtype == torch.float64 else x.float()
    down, along = (torch.arange(1, n + 1, device=x.device, dtype=x.dtype) for n in x.shape)
    down, along = 1.1 * down + place, 0.7 * along
    return torch.stack(
        [torch.linalg.vector_norm(x).square(), down.cos() @ (x @ along.cos()), down.sin() @ (x @ along.sin())]
    )


def _digest(lines: list[str]) -> int:
    """A 63-bit hash of all lines."""
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "big") >> 1


def _difference(everyone: list[tuple[str | None, list[str]]]) -> str:
    """The message that names the rank that differs and the difference; the same on every rank."""
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            return f"Distributed: rank {rank} brought what its loss cannot take, which stops all of them: {problem}"
    first = everyone[0][1]
    for rank, (_, other) in enumerate(everyone):
        for ours, theirs in zip(first, other, strict=False):
            if ours != theirs:
                return (
                    f"Distributed: ranks must make the same call, but rank 0 and rank {rank} differ: {ours} on rank 0, "
                    f"{theirs} on rank {rank}; make them the same on every rank."
                )
    return "Distributed: ranks must make the same call, but differ; make the loss and its call the same on every rank."


def _loss_lines(loss: nn.Module) -> list[str]:
    return list(_parts("Distributed", loss, 0))


def _call_lines(call: Call) -> list[str]:
    """The properties of a call that must be equal on all ranks: all except values and numbers of rows."""
    x, y = call.embeddings, call.labels
    lines = [
        f"embeddings of width {x.shape[1]}",
        f"embeddings of type {x.dtype}",
        f"embeddings on {x.device.type}",
        f"embeddings with{_gradient(x)} a gradient",
        f"reference rows {_kind(call.ref_emb)}",
        f"labels as {type(y).__name__ if isinstance(y, Relation) else _kind(y)}",
        *(f"{name} as {_kind(getattr(call, name))}" for name in ("ref_labels", "ids", "ref_ids")),
    ]
    if call.ref_emb is not None:
        lines.append(f"reference rows with{_gradient(call.ref_emb)} a gradient")
    if isinstance(y, Relation):
        lines += [f"a relation with {line}" for line in _relation_lines(y)]
    return lines


def _gradient(x: Tensor) -> str:
    return "" if x.requires_grad and torch.is_grad_enabled() else "out"


def _relation_lines(relation: Relation) -> Iterator[str]:
    """The options of a relation, except the number of rows and `width`."""
    given = relation._given
    options = {**vars(relation), **{field.name: getattr(given, field.name) for field in fields(given)}}
    for name in ("shape", "device", "orders", "width", "_width", "_given", "_projection"):
        del options[name]
    for name, x in options.items():
        if name.startswith("_") and (name[1:] in options or not isinstance(x, (*PLAIN, Tensor))):
            continue
        yield from _parts(name, x, 0)


def _kind(x: Tensor | None) -> str:
    """The dtype of a tensor and the shape of a row; all integer types count as one, since they travel as int64."""
    if x is None:
        return "none"
    floating = x.is_floating_point() or x.dtype == torch.bool
    return f"{x.dtype if floating else 'integers'}{list(x.shape[1:]) or ''}"


def _parts(name: str, x: Any, depth: int) -> Iterator[str]:
    """Yield lines that describe `x`: its class, its settings, the shapes of its parameters, and its parts recursively.

    Attributes whose names begin with an underscore are left out.
    """
    if isinstance(x, PLAIN):
        yield f"{name} = {x!r}"
    elif isinstance(x, Tensor):
        yield f"{name} as {_kind(x)}"
    elif isinstance(x, Mapping):
        for key in x:
            yield from _parts(f"{name}[{key!r}]", x[key], depth + 1)
    elif isinstance(x, list | tuple):
        for place, each in enumerate(x):
            yield from _parts(f"{name}[{place}]", each, depth + 1)
    else:
        yield f"{name} is {getattr(x, '__qualname__', type(x).__qualname__)}"
        if depth < 8 and not isinstance(x, type):
            for key, value in _settings(x):
                yield from _parts(f"{name}.{key}", value, depth + 1)


def _settings(x: Any) -> list[tuple[str, Any]]:
    """The attributes of an object by name: plain settings first, then parameters, then parts."""
    values = {key: value for key, value in getattr(x, "__dict__", {}).items() if not key.startswith("_")}
    if is_dataclass(x):
        values |= {field.name: getattr(x, field.name) for field in fields(x) if not field.name.startswith("_")}
    if isinstance(x, nn.Module):
        values |= x._modules | {key: _shape(value) for key, value in (x._parameters | x._buffers).items()}
    return sorted(values.items(), key=lambda item: (not isinstance(item[1], PLAIN), item[0]))


def _shape(x: Tensor | None) -> str | None:
    return None if x is None else f"{'learned ' if x.requires_grad else ''}{x.dtype} {list(x.shape)}"
