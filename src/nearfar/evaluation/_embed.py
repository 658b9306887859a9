"""`embed`: run a model over a data set in batches; an interrupted run can be resumed."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar._utils.arrays import labels_of, tensor_of
from nearfar._utils.progress import Progress
from nearfar.data._tokens import pad
from nearfar.evaluation._chunks import Chunks, Part
from nearfar.evaluation._fingerprint import of_weights
from nearfar.evaluation._vectors import Vectors
from nearfar.evaluation.parallel import share

CHUNK = 16  # batches per file of a resumable run


def embed(
    model: Callable[..., Any],
    data: Any,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> Tensor | Vectors:
    """Embed all samples, in the order of the data: in evaluation mode, without gradients, as float32.

    Args:
        model: a module or any callable from a batch [b, ...] to vectors [b, d]. Its training modes are restored.
        data: a tensor or array [n, ...], or a dataset with a length whose items are samples, or (sample, label), or
            (sample, label, name); a sample that is None is left out.
        batch_size: samples per batch.
        device: where to run; a module is moved there. None: where the module is, else the CPU.
        progress: show a progress bar, or occasional plain lines if there is no terminal.
        resume: a folder for finished chunks, one file each. A run that was interrupted continues after the last of them
            and gives the same bytes as one that was not. The folder is left in place. A chunk is used only if its
            samples are unchanged: those of a tensor or array by their bytes, those of a dataset by its method
            `digest(rows)` for a range of rows; of a dataset without this method only the length is compared.

    Returns:
        [n, d] on the CPU; `Vectors` with y (and name, and a module's fingerprint) where the dataset gives labels.

    >>> embed(torch.nn.Identity(), torch.eye(3), batch_size=2)[2]
    tensor([0., 0., 1.])
    """
    parts = list(embed_chunks(model, data, batch_size=batch_size, device=device, progress=progress, resume=resume))
    sound = [part for part in parts if part]
    if not sound:
        raise ValueError(f"embed: all {_length(data)} samples were left out, so there is nothing to embed.")
    whole: dict[str, Any] = _concatenate(sound)
    x = torch.from_numpy(whole["x"])
    if "y" not in whole:
        return x
    weights = of_weights(model) if isinstance(model, nn.Module) else None
    return Vectors(x, whole["y"], whole.get("name"), fingerprint=weights or None)


def embed_chunks(
    model: Callable[..., Any],
    data: Any,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = True,
    resume: Path | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Part]:
    """Yield chunks of vectors x, with y and name if the dataset gives them; of several ranks, each yields its share.

    Chunks and their vectors are the same for any number of ranks. Other arguments as in `embed`.
    """
    rows = _length(data)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"embed: batch_size must be a whole number from 1 on, but came as {batch_size!r}.")
    place = _device(model, device)
    store = None
    if resume is not None:
        weights = of_weights(model) if isinstance(model, nn.Module) else None
        store = Chunks("embed", Path(resume))
        store.begin({"samples": rows, "batch_size": batch_size, "weights": weights}, _describe)
    step = CHUNK * batch_size
    mine = share(-(-rows // step), rank, world)
    total = min(mine.stop * step, rows) - min(mine.start * step, rows)
    with evaluation_mode(model, place), Progress("embedding", total, shown=progress) as bar:
        for number in mine:
            chosen = range(number * step, min((number + 1) * step, rows))
            # taken before the samples are read for the network, so that one that changes in between counts as changed
            digest = "" if store is None else _digest(data, chosen)
            part = None if store is None else store.read(number, digest)
            if part is None:
                part = _chunk(model, data, chosen, batch_size, place, bar.advance)
                if store is not None:
                    store.write(number, part, digest)
            else:
                bar.advance(len(chosen))
            yield part


def read_chunks(folder: Path, rows: int, batch_size: int) -> Iterator[Part]:
    """Yield all chunks of a resumable run over `rows` samples that its ranks have finished."""
    return Chunks("embed", folder).read_all(-(-rows // (CHUNK * batch_size)))


def _digest(data: Any, rows: range) -> str:
    """A digest of the contents of some samples; empty if the dataset has no method for it."""
    if isinstance(data, Tensor | np.ndarray):
        samples = data[rows.start : rows.stop]
        if isinstance(samples, Tensor):
            samples = samples.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(np.ascontiguousarray(samples).tobytes()).hexdigest()
    digest = getattr(data, "digest", None)
    return str(digest(rows)) if callable(digest) else ""


def _chunk(
    model: Callable[..., Any],
    data: Any,
    rows: range,
    batch_size: int,
    device: torch.device,
    tell: Callable[[int], None],
) -> Part:
    """Embed some samples, with their labels and names; empty if all of them are left out."""
    parts: list[Part] = []
    for start in range(rows.start, rows.stop, batch_size):
        chosen = range(start, min(start + batch_size, rows.stop))
        batch, extra, read = _batch(data, chosen)
        if read:
            with torch.no_grad():
                out = model(batch.to(device))
            parts.append({"x": _check_output(out, read), **extra})
        tell(len(chosen))
    return _concatenate(parts) if parts else {}


def _concatenate(parts: Sequence[Part]) -> Part:
    """Concatenate the chunks."""
    try:
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    except KeyError as error:
        raise ValueError(f"embed: all items of the dataset must have {error.args[0]!r}, but some lack it.") from None


def _batch(data: Any, rows: range) -> tuple[Tensor, Part, Sequence[int]]:
    """Collate samples: one tensor, their labels and names if there are any, and the rows that are not left out."""
    if isinstance(data, Tensor):
        return data[rows.start : rows.stop], {}, rows
    if isinstance(data, np.ndarray):
        return tensor_of(data[rows.start : rows.stop]), {}, rows
    samples = {row: item for row in rows if (item := data[row]) is not None}
    read, items = list(samples), list(samples.values())
    if not items or not isinstance(items[0], tuple | list):
        return _stack(items) if items else torch.empty(0), {}, read
    extra: Part = {}
    if len(items[0]) > 1:
        labels = [item[1].item() if isinstance(item[1], Tensor) else item[1] for item in items]
        extra["y"] = labels_of("embed", "labels", list(map(int, labels))).numpy()
    if len(items[0]) > 2:
        extra["name"] = np.array([str(item[2]) for item in items], dtype=np.str_)
    return _stack([item[0] for item in items]), extra, read


def _stack(samples: Sequence[Any]) -> Tensor:
    try:
        return torch.stack(pad([tensor_of(x) if isinstance(x, np.ndarray) else torch.as_tensor(x) for x in samples]))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"embed: samples of a batch must be tensors of one shape ({error}); convert them in the dataset."
        ) from None


def _check_output(out: Any, samples: Sequence[int]) -> np.ndarray:
    """Check the model's output for a batch of samples, and return it as float32 [b, d]."""
    rows = len(samples)
    if isinstance(out, np.ndarray):
        out = tensor_of(out)
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != rows or not out.is_floating_point():
        came = f"{out.dtype} of shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"embed: model must give floating vectors [{rows}, d] for {rows} samples, but gave {came}.")
    x = out.detach().float().cpu()
    bad = (~torch.isfinite(x).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        shown = ", ".join(str(samples[row]) for row in bad[:8]) + (", ..." if len(bad) > 8 else "")
        raise ValueError(
            f"embed: the vectors of {len(bad)} samples hold NaN or infinity (samples {shown}); "
            "look at these samples or at the network."
        )
    return np.ascontiguousarray(x.numpy())


def _length(data: Any) -> int:
    try:
        rows = len(data)
    except TypeError:
        raise TypeError(
            f"embed: data must have a length and an order, but came as {type(data).__name__}; "
            "pass a tensor, an array or a dataset with __len__ and __getitem__."
        ) from None
    if not rows:
        raise ValueError("embed: data holds no samples, so there is nothing to embed.")
    return rows


def _device(model: object, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluation_mode(model: object, device: torch.device | None = None) -> Iterator[None]:
    """Switch a module to evaluation mode within the block, on a device; then restore the mode of every submodule."""
    if not isinstance(model, nn.Module):
        yield
        return
    before = [(part, part.training) for part in model.modules()]
    model.eval()
    if device is not None:
        model.to(device)
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def _describe(plan: dict[str, Any]) -> str:
    weights = f", weights {plan['weights'][:8]}" if plan.get("weights") else ""
    return f"{plan.get('samples')} samples in batches of {plan.get('batch_size')}{weights}"
