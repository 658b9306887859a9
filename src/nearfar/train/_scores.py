"""Score a network during and after training: embed samples, `nf.evaluate` them, and compare with baselines."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearfar._utils.checks import printable
from nearfar._utils.process_group import Group, ProcessGroup
from nearfar._utils.progress import Watch
from nearfar.batches import MinedNegatives
from nearfar.data._loading import Batch, View, collate
from nearfar.data._pictures import CorruptImageError
from nearfar.data._samples import Labels, Samples, Transform
from nearfar.distributed._gather import JointRows
from nearfar.evaluation import Evaluation, evaluate, mine
from nearfar.evaluation._embed import evaluation_mode
from nearfar.evaluation.parallel import current_group, split_over
from nearfar.train._state import TrainState

BASELINES = "baselines"  # the key of the baselines in the journal, at step 0
NAMES = {"input": "input vectors", "untrained": "untrained network", "trained": "trained network"}
"""Name of each baseline in messages."""

NOTHING: Batch = (torch.empty(0), torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
"""The empty batch of a rank that has no batch in the last turn."""
FIRST = 5  # how many names of left-out samples a message lists


def embed_samples(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    batch_size: int = 256,
    hold: bool = False,
    watch: Watch | None = None,
) -> tuple[Tensor, Labels]:
    """Embed samples: return float32 [m, d] on `device` in the order of the samples, and the samples' numbers [m].

    With `hold` the samples are held on the device, if they fit, and transformed there. Samples that cannot be read (if
    `on_corrupt` is "skip") are left out. The model's training modes are restored.

    Over several ranks (`nearfar.evaluation.parallel`) each turn embeds one batch on every rank and gathers the vectors.
    The batches, and so the vectors, are those of one process.
    """
    device, group = torch.device(device), current_group()
    view = View(samples, transform, substitutes=False, device=device if hold else None)
    cuts = [range(i, min(i + batch_size, len(samples))) for i in range(0, len(samples), batch_size)]
    loader: DataLoader[Any] = DataLoader(
        view,
        batch_sampler=cuts[group.rank :: group.world],  # type: ignore[arg-type]
        num_workers=workers if view.held is None else 0,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    parts: list[Tensor] = []
    rows: list[Tensor] = []
    with evaluation_mode(model, device), torch.inference_mode():
        batches = iter(loader)
        for turn in range(-(-len(cuts) // group.world)):
            _, _, indices = batch = next(batches, NOTHING)
            x = model(view.render(batch[0], indices, device)).float() if len(indices) else None
            x, numbers = _gather_batches(group, x, indices.to(device))
            if x is not None and len(x):
                parts.append(x)
                rows.append(numbers.cpu())
            if watch is not None:
                seen = min((turn + 1) * group.world * batch_size, len(samples))
                watch("embedding", seen, len(samples))
    if not parts:
        raise CorruptImageError(
            f"evaluate: none of the {len(samples)} samples can be read, the first is {samples.names[0]}; mend the data."
        )
    return torch.cat(parts).clone(), torch.cat(rows).numpy()


def _gather_batches(group: ProcessGroup, x: Tensor | None, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    """Concatenate the vectors [t, d] and the sample numbers [t] of all ranks; `x` is None on a rank without a batch."""
    if group.world > 1:
        shapes = group.gather(torch.tensor([0, 0] if x is None else list(x.shape), device=rows.device))
        joint = JointRows(group, shapes[:, 0].tolist())
        x = joint(torch.zeros(0, int(shapes[:, 1].max()), device=rows.device) if x is None else x)
        rows = joint(rows)
    return x, rows


@dataclass(frozen=True, eq=False)
class Score:
    """The result of `score`."""

    evaluation: Evaluation
    x: Tensor  # [m, d] the vectors
    rows: Labels  # [m] the samples' numbers
    left_out: tuple[str, ...]  # names of the samples that cannot be read, those of the gallery included

    def notice(self) -> str:
        """The message about the samples that were left out; empty if there are none."""
        if not self.left_out:
            return ""
        first = ", ".join(map(printable, self.left_out[:FIRST])) + (", ..." if len(self.left_out) > FIRST else "")
        count = len(self.left_out)
        return f"left out, as {count:,} sample{'s' * (count > 1)} cannot be read: {first}"


def score(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    gallery: Samples | None = None,
    ks: tuple[int, ...] = (1, 2, 4, 8),
    resamples: int = 0,
    watch: Watch | None = None,
    **options: Any,
) -> Score:
    """Embed and `evaluate` the samples, in their gallery if there is one; `options` go to `embed_samples`.

    Where some of the samples are queries, the others are their gallery.
    """
    x, rows = embed_samples(model, samples, transform, watch=watch, **options)
    y = torch.from_numpy(samples.labels[rows]).to(x.device)
    asked = queries_of(samples, rows)
    if asked is not None:
        here = torch.from_numpy(asked).to(x.device)
        depths = tuple(k for k in ks if k <= int((~here).sum())) or (1,)
        sides: Any = {"ref_emb": x[~here], "ref_labels": y[~here], "resamples": resamples, "watch": watch}
        return Score(evaluate(x[here], y[here], ks=depths, **sides), x, rows, _absent(samples, rows))
    if gallery is None:
        depths = tuple(k for k in ks if k < len(x)) or (1,)
        return Score(evaluate(x, y, ks=depths, resamples=resamples, watch=watch), x, rows, _absent(samples, rows))
    reference, found = embed_samples(model, gallery, transform, watch=watch, **options)
    there = torch.from_numpy(gallery.labels[found]).to(x.device)
    depths = tuple(k for k in ks if k <= len(reference)) or (1,)
    evaluation = evaluate(x, y, ks=depths, ref_emb=reference, ref_labels=there, resamples=resamples, watch=watch)
    return Score(evaluation, x, rows, _absent(samples, rows) + _absent(gallery, found))


def queries_of(samples: Samples, rows: Labels) -> NDArray[np.bool_] | None:
    """Which of some samples are queries; None if all are queries and answers of each other."""
    found: NDArray[np.bool_] | None = getattr(samples, "queries", None)
    return None if found is None else found[rows]


def chance_recall(labels: Labels, gallery: Labels | None = None) -> float:
    """R@1 of a random order: the mean share of right rows among all others, over the queries that have any.

    >>> chance_recall(np.array([0, 0, 1, 1, 2]))
    0.25
    >>> chance_recall(np.array([0, 1, 2]), gallery=np.array([0, 0, 1, 1, 1]))
    0.5
    """
    rows, own = (labels, 1) if gallery is None else (gallery, 0)
    right = np.bincount(rows, minlength=int(labels.max()) + 1)[labels] - own
    asked = right > 0
    return float(right[asked].mean() / (len(rows) - own)) if asked.any() else 0.0


def _absent(samples: Samples, rows: Labels) -> tuple[str, ...]:
    """The names of the samples whose numbers are not in `rows`."""
    return tuple(samples.names[row] for row in np.setdiff1d(np.arange(len(samples)), rows).tolist())


def measure_baselines(state: TrainState, watch: Watch | None = None) -> dict[str, float]:
    """R@1 on the test classes of the input, if it is a vector, and of the untrained network, by name.

    It draws no random numbers and does not affect the run.
    """
    data, found = state.data, {}
    subjects: dict[str, nn.Module] = {"untrained": state.bare_model}
    if state.inputs.is_vector:
        subjects = {"input": nn.Flatten(), **subjects}
    for name, model in subjects.items():
        prefixed = None if watch is None else _with_prefix(watch, NAMES[name])
        scored = score(model, data.test, state.plain, gallery=data.gallery, ks=(1,), watch=prefixed, **state.evaluating)
        found[name] = round(scored.evaluation.recall[1], 6)
    return found


def _with_prefix(watch: Watch, name: str) -> Watch:
    return lambda what, done, total: watch(f"{name}, {what}", done, total)


def read_baselines(entries: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """The baselines in a journal; None if it has none."""
    return next((dict(entry[BASELINES]) for entry in entries if isinstance(entry.get(BASELINES), Mapping)), None)


def describe_baselines(found: Mapping[str, float]) -> str:
    """Format the baselines as a line of text.

    >>> describe_baselines({"input": 0.973, "untrained": 0.41})
    'R@1 on the test classes: input vectors 97.3, untrained network 41.0'
    """
    return "R@1 on the test classes: " + ", ".join(f"{NAMES[name]} {100 * value:.1f}" for name, value in found.items())


@contextmanager
def share_evaluations(state: TrainState, model: nn.Module) -> Iterator[None]:
    """Distribute the evaluations within the block over the ranks of a run, all with the first rank's network.

    Weights are equal on all ranks, but running statistics of batch norms come from each rank's own rows until DDP
    copies the first rank's at the next step. They are copied here.
    """
    if state.machine.num_processes == 1:
        yield
        return
    group = Group("train")
    with torch.no_grad():
        for value in model.state_dict().values():
            if isinstance(value, Tensor):
                first = group.copy_from(0, value.detach().clone(memory_format=torch.contiguous_format))
                if group.rank:
                    value.copy_(first)
    with split_over(group):
        yield


def refresh_negatives(state: TrainState, step: int, watch: Watch) -> None:
    """Mine hard negatives of the training samples with the present network, if the sampler takes them and is due."""
    sampler = state.sampler
    if not isinstance(sampler, MinedNegatives) or step % sampler.every:
        return
    if state.sharded is not None:
        state.sharded.gather()
    with share_evaluations(state, state.bare_model):
        x, rows = embed_samples(state.bare_model, state.train, state.plain, watch=watch, **state.evaluating)
        ranks = (1, 2 * sampler.k)  # some are left out by the margin
        found = mine(
            x, torch.from_numpy(state.train.labels[rows]).to(x.device), k=sampler.k, ranks=ranks, margin=sampler.margin
        )
    places = found.places.cpu()
    table = torch.full((len(state.train), sampler.k), -1)
    table[rows] = torch.where(places < 0, -1, torch.from_numpy(rows)[places.clamp_min(0)])
    sampler.update(table)
