"""Every loss compiles into one graph and never waits for the device: no read of data in forward or backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from table import IDS, ROWS, random_batch, tensors
from torch.utils._python_dispatch import TorchDispatchMode

import nearfar as nf
from nearfar._utils.checks import RECENT

L, M, S = nf.losses, nf.miners, nf.sets
rows = pytest.mark.parametrize("row", ROWS, ids=IDS)


@pytest.fixture(autouse=True)
def _clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def product(**more):
    return nf.RobustLoss(**({"pair": nf.pairs.Hinge(), "over": S.Mean()} | more))


OTHERS = {
    "hard": lambda: L.Contrastive(miner=M.Hard()),
    "semi-hard": lambda: L.Contrastive(miner=M.SemiHard()),
    "balanced-hard": lambda: L.Contrastive(miner=M.BalancedHard()),
    "distance-weighted": lambda: L.Contrastive(miner=M.DistanceWeighted(sample=False)),
    "triplets-mined": lambda: L.Triplet(miner=M.MultiSimilarity()),
    "swap": lambda: L.Triplet(swap=True),
    "kl-ball": lambda: product(over=S.KLBall(0.2)),
    "calibrated": lambda: product(over=S.CalibratedKL(0.1, 20)),
    "anchor": lambda: product(over=S.KL(0.3), groups="anchor", reduction="nonzero"),
    "none": lambda: product(over=S.ChiSquare(1.0), groups="anchor", reduction="none"),
    "top-k-drop": lambda: L.DroTopK(k=5, zero="drop"),
}
DRAWN = {
    "sampled": lambda: L.DroKL(samples=7),
    "sampled-as-in-paper": lambda: L.DroKL.as_in_paper(k_code=3),
    "distance-weighted": lambda: L.Margin(miner=M.DistanceWeighted()),
}


def measured(loss, embeddings, *args, **kwargs):
    leaf = embeddings.detach().clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    value.sum().backward()
    return value.detach(), leaf.grad


def check_compiled(loss, embeddings, *args, backend="aot_eager", tolerance=1e-12, **kwargs):
    wanted = measured(loss, embeddings, *args, **kwargs)
    found = measured(torch.compile(loss, fullgraph=RECENT, backend=backend), embeddings, *args, **kwargs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# variants that differ from another row in numbers alone make the same graph
SAME = ("logistic", "fraction", "short", "sum", "beyond")
# and these, but for the end of the forward pass, or for what has no gradient; the graph is made, but not lowered again
LIKE = ("nonzero", "keep", "smooth", "miner")


# numbers that are learned by default break the graph where the factors are made (docs/guides/own-loss.md)
LEARNED = ("CLIP-learned", "SigLIP")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.label not in SAME and row.id not in LEARNED], ids=lambda row: row.id
)
def test_every_loss_compiles_into_one_graph(row):
    embeddings, labels = tensors(*random_batch())
    check_compiled(row.loss(), embeddings, labels, backend="eager" if row.label in LIKE else "aot_eager")


@pytest.mark.parametrize("name", OTHERS)
def test_miners_and_other_products_compile_into_one_graph(name):
    embeddings, labels = tensors(*random_batch())
    # the KL ball's fifty steps are unrolled: one graph all the same, but slow to lower; miners have no gradient
    plain = name == "kl-ball" or OTHERS[name]().miner is not None
    check_compiled(OTHERS[name]().double(), embeddings, labels, backend="eager" if plain else "aot_eager")


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_losses_compile_into_one_graph(name):
    embeddings, labels = tensors(*random_batch())
    value, slope = measured(
        torch.compile(DRAWN[name]().double(), fullgraph=RECENT, backend="aot_eager"), embeddings, labels
    )
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()


def test_references_and_index_tuples_compile_into_one_graph():
    embeddings, labels = tensors(*random_batch())
    ids = torch.arange(10)
    reference = {
        "ref_emb": embeddings.detach().flip(0),
        "ref_labels": labels.flip(0),
        "ids": ids,
        "ref_ids": ids.flip(0),
    }
    check_compiled(L.DroTopK(k=3), embeddings, labels, **reference)
    check_compiled(L.LiftedStructure(), embeddings, labels, **reference)
    tile = nf.Relation.from_labels(labels).dense()
    listed = (*torch.nonzero(tile.positive, as_tuple=True), *torch.nonzero(tile.negative, as_tuple=True))
    check_compiled(L.MultiSimilarity(miner=None), embeddings, labels, listed)
    triples = tuple(torch.tensor(x) for x in ([0, 1, 2], [3, 4, 5], [6, 7, 8]))
    check_compiled(L.Triplet(margin=0.5), embeddings, labels, triples)


@pytest.mark.parametrize("k", [3, "B/2"])
def test_a_set_with_a_method_of_its_own_compiles_into_one_graph(k):
    """Also where a count becomes a number, which copies the set."""
    embeddings, labels = tensors(*random_batch())
    plain, own = L.DroTopK(k=k), L.DroTopK(k=k)
    for over in (own.over_positive, own.over_negative):
        object.__setattr__(over, "value", lambda losses, *rest, **more: losses.relu().sum(dim=1))
    assert not torch.equal(own(embeddings, labels), plain(embeddings, labels))
    check_compiled(own, embeddings, labels)


@pytest.mark.skipif(not RECENT, reason="a loss is one graph from PyTorch 2.11 on")
def test_a_second_batch_of_the_same_shape_needs_no_second_graph():
    """Nothing is baked in from the values: labels may change."""
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    loss = L.MultiSimilarity()
    compiled = torch.compile(loss, fullgraph=RECENT, backend=frames)
    for seed in range(3):
        embeddings, labels = tensors(*random_batch(seed))
        torch.testing.assert_close(compiled(embeddings, labels), loss(embeddings, labels))
    assert frames.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch warns of itself
@pytest.mark.parametrize("name", ["MultiSimilarity-miner"])
def test_inductor(name, tmp_path, monkeypatch):
    # of its own: what another run compiled for another set of instructions must not be found
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # no program is compiled first to try the processor's instructions out: the kernels do
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    row = next(row for row in ROWS if row.id == name)
    embeddings, labels = tensors(*random_batch())
    check_compiled(row.make(), embeddings.float(), labels, backend="inductor", tolerance=1e-5)


# ---------------------------------------------------------------- no read of the data

READS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "repeat_interleave",
)


class Reads(TorchDispatchMode):
    """Counts the operators that a GPU would have to finish before the host could go on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if any(name == word or name.startswith(f"{word}_") or name == f"_{word}2" for word in READS):
            self.found[name] += 1
        if name in ("index", "index_put", "_index_put_impl") and _by_mask(args[1]):
            self.found[f"{name} by a mask"] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(places: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in places)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.max()),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: torch.unique(x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.index_put((x > 0,), torch.tensor(1.0)),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_meter_sees_every_kind_of_read(read):
    with Reads() as reads:
        read(torch.tensor([1.0, -1.0, 2.0]))
    assert reads.found


def check_unread(loss, embeddings, *args, **kwargs):
    loss._warned = True  # the warning of an empty batch reads, on a CPU only
    with Reads() as reads:
        measured(loss, embeddings, *args, **kwargs)
    assert not reads.found


@rows
def test_no_loss_reads_its_data(row, unread):
    embeddings, labels = tensors(*random_batch())
    check_unread(row.loss(), embeddings, labels)


@pytest.mark.parametrize("name", [*OTHERS, *DRAWN])
def test_no_miner_and_no_set_reads_its_data(name, unread):
    embeddings, labels = tensors(*random_batch())
    check_unread((OTHERS | DRAWN)[name]().double(), embeddings, labels)


@pytest.mark.parametrize("row", [row for row in ROWS if row.reference], ids=lambda row: row.id)
def test_no_reference_is_read(row, unread):
    embeddings, labels = tensors(*random_batch())
    ids = torch.arange(10)
    check_unread(row.loss(), embeddings, labels, ref_emb=embeddings, ref_labels=labels, ids=ids, ref_ids=ids)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.composed], ids=lambda row: row.id)
def test_no_relation_and_no_index_tuple_is_read(row, unread):
    embeddings, labels = tensors(*random_batch())
    weights = torch.rand(10, dtype=torch.float64)
    check_unread(row.loss(), embeddings, nf.Relation.from_labels(labels, ignore=0, weights=weights))
    check_unread(row.loss(), embeddings, nf.Relation.from_multilabel(torch.eye(5)[labels]))
    listed = tuple(torch.tensor(x) for x in ([0, 1, 2], [3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3]))
    check_unread(row.loss(), embeddings, labels, listed)
    check_unread(row.loss(), embeddings, labels, (listed[0], listed[1], listed[1]))
