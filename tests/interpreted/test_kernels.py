"""The fused kernels under Triton's interpreter, against dense.

tests/engines/test_fused.py runs this file in its own process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from fuzz_calls import SMALL, everywhere
from interpreter import quicken, unfused
from table import ROWS

import nearfar as nf
from nearfar._utils.process_group import ALONE
from nearfar.engines import auto, cuda, operators
from nearfar.engines.dense import dense_pairs, dense_value
from nearfar.engines.finish import finish
from nearfar.engines.operator_call import OperatorCall
from nearfar.engines.spec import AROUND

assert os.environ["TRITON_INTERPRET"] == "1"  # before triton is imported, which reads it once
quicken()
# NumPy's, of exponentials that are masked afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

L, S, P, M = nf.losses, nf.sets, nf.pairs, nf.miners
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def robust(**more):
    return nf.RobustLoss(**({"pair": P.Hinge(0.3, 0.4), "over": S.KL(0.3)} | more))


OTHERS = {
    "anchor": lambda: robust(groups="anchor", reduction="nonzero"),
    "anchor-worst": lambda: robust(groups="anchor", over=S.Worst()),
    "anchor-mean": lambda: robust(groups="anchor", over=S.Mean(zero_member=True)),
    "sign-flat": lambda: robust(groups="sign", pair=P.Logistic(), over=S.KL(1e4)),
    "sign-worst": lambda: robust(groups="sign", pair=P.Logistic(), over=S.Worst()),
    "sign-mixed": lambda: robust(groups="sign", over=(S.TopK(3), S.Mean(zero="drop"))),
    "cubic": lambda: robust(groups="anchor_sign", pair=P.Squared(0.1, 0.9, 3.0), over=S.Mean(),
                            similarity=nf.similarity.NegSquaredEuclidean()),
    "long": lambda: robust(groups="anchor_sign", pair=P.Squared(0.5, 4.0), over=S.Mean(),
                           similarity=nf.similarity.NegEuclidean(normalize=False)),
    "long-squared": lambda: robust(pair=P.Squared(9.0, 25.0, 1.0), similarity=nf.similarity.NegSquaredEuclidean(
        normalize=False)),
    "cold": lambda: L.NTXent(temperature=0.01),
    "dropped": lambda: robust(groups="anchor_sign", over=S.KL(0.3, zero="drop", zero_member=True)),
    "learned": lambda: robust(groups="anchor_sign", pair=P.Hinge(0.2, 0.3, smooth=0.1, learn=True)),
    "learned-triplets": lambda: L.Triplet(pair=P.Hinge(0.2, 0.0, learn=True)),
    "worst-dropped": lambda: robust(groups="anchor_sign", over=S.Worst(zero="drop", zero_member=True)),
    "all-worst": lambda: robust(groups="anchor_sign", over=(S.Mean(), S.Worst()), members="all"),
    "apart": lambda: robust(groups="anchor_sign", link=nf.links.Add(apart=True)),
    "batch-hard-dot": lambda: L.Triplet(mining="hard", similarity=nf.similarity.Dot()),
    "semi-hard": lambda: L.Contrastive(miner=M.SemiHard(-1.2, 0.3)),
    "semi-hard-sign": lambda: robust(groups="sign", over=S.Mean(), miner=M.SemiHard(0.5, None)),
    "mined-worst": lambda: robust(groups="sign", over=S.Worst(), miner=M.SemiHard(0.3, 0.2)),
    "mined-anchor": lambda: robust(groups="anchor", miner=M.MultiSimilarity(0.05)),
    "miner-distance": lambda: L.MultiSimilarity(similarity=nf.similarity.NegEuclidean()),
}  # fmt: skip
# learned numbers of the wide side are tested in test_learned_numbers.py
LOSSES = {row.id: row.make for row in ROWS if not row.composed and row.id not in ("CLIP-learned", "SigLIP")} | OTHERS
NOT_SERVED = {
    "DroTopK-fraction", "DroTrimmed-rows", "FastAP", "HAP2S-polynomial", "SmoothAP", "Triplet-hardest",
}  # fmt: skip
served = pytest.mark.parametrize("name", [name for name in LOSSES if name not in NOT_SERVED])


@dataclass(frozen=True)
class Given:
    """Rows, references (None: the rows), their relation."""

    rows: torch.Tensor
    cols: torch.Tensor | None
    relation: nf.Relation


def plain(n=21, d=15, classes=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, d, generator=rng), torch.randint(0, classes, (n,), generator=rng)
    return Given(x, None, nf.Relation.from_labels(y))


def everything(n=14, m=30, d=5, seed=1, weights=True):
    """A reference, ids, ignored rows, sample weights of which some are 0."""
    rng = torch.Generator().manual_seed(seed)
    x, z = torch.randn(n, d, generator=rng), torch.randn(m, d, generator=rng)
    y, t = torch.randint(0, 6, (n,), generator=rng), torch.randint(0, 6, (m,), generator=rng)
    ids, ref_ids = torch.randint(0, 25, (n,), generator=rng), torch.randint(0, 25, (m,), generator=rng)
    w, v = torch.rand(n, generator=rng), torch.rand(m, generator=rng)
    w, v = w * (w > 0.1), v * (v > 0.1)
    more = {"ids": ids, "ref_ids": ref_ids, "ignore": 4} | ({"weights": w, "ref_weights": v} if weights else {})
    return Given(x, z, nf.Relation.from_labels(y, t, **more))


def weighted(n=18, d=3, seed=2):
    """The batch itself, with ignored rows and weights."""
    rng = torch.Generator().manual_seed(seed)
    x, y, w = torch.randn(n, d, generator=rng), torch.randint(0, 5, (n,), generator=rng), torch.rand(n, generator=rng)
    return Given(x, None, nf.Relation.from_labels(y, weights=w * (w > 0.15), ignore=2))


def memory(n=9, m=33, d=17, seed=3, ids=False):
    """A reference that begins with the rows."""
    rng = torch.Generator().manual_seed(seed)
    z, y = torch.randn(m, d, generator=rng), torch.randint(0, 4, (m,), generator=rng)
    known = torch.randint(0, 20, (m,), generator=rng)
    more = {"ids": known[:n], "ref_ids": known} if ids else {}
    return Given(z[:n].clone(), z, nf.Relation.from_labels(y[:n], y, reference_starts_with_batch=True, **more))


def represented(n=20, d=6, seed=4, among=False):
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, d, generator=rng), torch.randint(0, 5, (n,), generator=rng)
    chosen = torch.rand(n, generator=rng) > 0.6
    return Given(x, None, nf.Relation.from_labels(y, representatives=chosen, among_representatives=among))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Several tiles, several strips."""
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


def both(loss, given, low=torch.float32):
    """Value, gradients, and rows with pairs: of dense, and of fused."""
    relation = given.relation.projected(loss.anchors, among=loss.among_representatives)
    product, found = loss.product.at(len(given.rows)), []
    for engine in ("dense", "fused"):
        x = given.rows.clone().requires_grad_()
        z = None if given.cols is None else given.cols.clone().requires_grad_()
        rows, cols = product.similarity.prepared(x, z)
        if engine == "dense":
            pairs = dense_pairs(product, rows, cols, relation, None)
            value, had = dense_value(product, pairs), (pairs.had_positive, pairs.had_negative)
        else:
            assert unfused(product, relation) is None
            value, *had = finish(product, relation.layout(), rows, cols, low=low)
        leaves = [x, *(() if z is None else (z,)), *loss.parameters()]
        slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        found.append([value.detach(), *slopes, *had])
    return found


def called(product, given, rows, cols):
    return OperatorCall(product, given.relation.layout(), rows, cols, torch.float32, None, ALONE)


def same(loss, given, low=torch.float32, close=CLOSE):
    wanted, found = both(loss, given, low)
    for a, b in zip(found, wanted, strict=True):
        if not b.is_floating_point():
            assert torch.equal(a, b)
            continue
        size = float(b.abs().max()) or 1.0  # a gradient's small entries are sums of large ones
        torch.testing.assert_close(a / size, b / size, **close)


@served
def test_a_batch(name):
    same(LOSSES[name](), plain())


@served
def test_a_reference_with_ids_ignored_rows_and_weights(name):
    chosen = "TopK" in name or "Trimmed" in name  # the K largest are not weighted by the kernels
    same(LOSSES[name](), everything(weights=not chosen and name != "Angular"))


@pytest.mark.parametrize("k", [1, 40, 500])
def test_top_k_of_any_size(k):
    """Of fewer chunks than K, of more pairs than there are; ties at zero are many."""
    for loss in (L.DroTopK(k=k), L.DroTopKPN(k=max(2, k)), robust(groups="sign", over=S.TopK(k), pair=P.Logistic())):
        for given in (plain(30, 4), memory()):
            same(loss, given)


ZEROS = {"keep": True, "drop": False}
FEW = [
    "Margin",
    "DroKL",
    "MultiSimilarity-miner",
    "SupCon",
    "LiftedStructure",
    "Triplet",
    "Triplet-hard",
    "anchor",
]
few = pytest.mark.parametrize("name", FEW)


@few
def test_other_relations(name):
    """Each with two of three."""
    third = FEW.index(name) % 3
    for given in (g for i, g in enumerate((weighted, memory, represented)) if i != third):
        same(LOSSES[name](), given())


@pytest.mark.parametrize("name", ["SupCon", "DroKLGrouped", "Triplet-hard"])
def test_a_memory_with_ids(name):
    same(LOSSES[name](), memory(ids=True))


def test_angles_are_folded_only_where_their_losses_are_known():
    """What the kernel sees of a triplet's loss lacks ⟨x_a, x_p⟩."""
    losses = {
        zero: robust(pair=P.Identity(), over=S.KL(0.5, zero=zero), groups=L.Angular().product.groups) for zero in ZEROS
    }
    assert {zero: unfused(loss.product, plain().relation) is None for zero, loss in losses.items()} == ZEROS
    same(losses["keep"], plain())


@pytest.mark.parametrize("name", ["NTXent", "Contrastive"])
def test_representatives_among_each_other(name):
    same(LOSSES[name](), represented(among=True))


@pytest.mark.parametrize(("n", "d"), [(1, 4), (2, 1), (5, 33), (16, 16), (40, 70)])
def test_odd_sizes(n, d):
    for name in ("NTXent", "DroKL-keep"):
        same(LOSSES[name](), plain(n, d, classes=max(2, n // 4)))


@pytest.mark.parametrize("given", [plain(), everything()], ids=["batch", "reference"])
def test_rows_of_other_strides(given):
    rows, cols = (None if x is None else x.T.contiguous().T for x in (given.rows, given.cols))
    for name in ("Contrastive", "Triplet", "DroWorst", "MultiSimilarity"):
        same(LOSSES[name](), replace(given, rows=rows, cols=cols))


@pytest.mark.parametrize(
    "name", ["MultiSimilarity-miner", "BinomialDeviance", "LiftedStructure", "Triplet-smooth", "cold"]
)
def test_half_precision_products(name):
    """Smooth losses: a rounding moves a pair across the kink of a hinge. bfloat16 cannot be tried here: Triton's
    interpreter multiplies its bits."""
    same(LOSSES[name](), plain(), torch.float16, {"atol": 3e-3, "rtol": 3e-3})


@pytest.mark.parametrize("name", ["MultiSimilarity", "SupCon", "DroKL", "Contrastive-nonzero", "anchor", "learned"])
def test_positive_pairs_may_be_folded(name, monkeypatch):
    """As where a compiler does not know how many there are."""
    monkeypatch.setattr("nearfar.engines.rows.GATHERED", (0, 0))
    loss, given = LOSSES[name](), everything() if name in ("SupCon", "DroKL", "learned") else plain()
    rows, cols = loss.product.similarity.prepared(given.rows, given.cols)
    assert called(loss.product, given, rows, cols).gathered is None
    same(loss, given)


@few
def test_batches_with_nothing_to_learn(name):
    x = plain(6).rows
    for labels, more in (
        (torch.arange(6), {}),
        (torch.zeros(6, dtype=torch.int64), {}),
        (torch.zeros(6, dtype=torch.int64), {"ignore": 0}),
        (torch.arange(6) // 2, {"weights": torch.zeros(6)}),
    ):
        same(LOSSES[name](), Given(x, None, nf.Relation.from_labels(labels, **more)))


@pytest.mark.parametrize("name", ["MultiSimilarity", "Triplet-hard", "DroWorst", "DroKL", "Contrastive", "Triplet"])
def test_nan_shows(name):
    """Of a row without positive pairs, which would show it by themselves."""
    loss, labels = LOSSES[name](), torch.arange(21) // 3
    labels[20] = 99
    rows = loss.product.similarity.prepare(plain().rows).clone()
    rows[20, 2] = float("nan")
    layout = nf.Relation.from_labels(labels).layout()
    value, *_ = finish(loss.product, layout, rows, rows, low=torch.float32)
    assert torch.isnan(value)


def test_very_cold_softmax_does_not_underflow():
    loss = L.NTXent(temperature=1e-3)
    wanted, found = both(loss, plain())
    assert torch.isfinite(found[1]).all()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)


# ---------------------------------------------------------------- the loss as it is called


def measured(loss, x, *args, **more):
    leaf = x.clone().requires_grad_()
    value = loss(leaf, *args, **more)
    value.backward()
    return value.detach(), leaf.grad


def test_a_call_goes_to_the_kernels(monkeypatch):
    heard = []
    work = cuda.Kernels.fold
    monkeypatch.setattr(cuda.Kernels, "fold", lambda self: heard.append(1) or work(self))
    given = plain()
    y = torch.arange(21) // 3
    for a, b in zip(
        *(measured(L.MultiSimilarity(engine=engine), given.rows, y) for engine in ("fused", "dense")), strict=True
    ):
        torch.testing.assert_close(a, b, **CLOSE)
    assert heard == [1]
    # float64, an index tuple and a closed interval of scores are for other engines
    for loss, x, more in (
        (L.MultiSimilarity(engine="fused"), given.rows.double(), {}),
        (L.MultiSimilarity(engine="fused"), given.rows, {"indices": (torch.tensor([0]), torch.tensor([1])) * 2}),
        (L.MultiSimilarity(engine="fused", reduction="sum", miner=M.Hard()), given.rows, {}),
    ):
        dense = type(loss)(engine="dense", reduction=loss.reduction, miner=loss.miner)
        torch.testing.assert_close(loss(x, y, **more), dense(x, y, **more), **CLOSE)
    assert heard == [1]


@pytest.mark.parametrize("name", ["Contrastive", "distance", "mined", "DroKL", "DroChiSquare"])
@pytest.mark.parametrize("references", [False, True])
def test_tiles_without_weights_are_skipped(name, references, monkeypatch):
    """Far classes, in order, of which two overlap: most tiles have no negative pair with a loss."""
    make = {
        "Contrastive": lambda: robust(groups="anchor_sign", pair=P.Hinge(0.1, 0.5), over=S.Mean()),
        "distance": lambda: L.Margin(beta=1.0),
        "mined": lambda: L.MultiSimilarity(miner=M.MultiSimilarity(0.05)),
        "DroKL": lambda: L.DroKL(),
        "DroChiSquare": lambda: L.DroChiSquare(rho=1.0),
    }[name]
    labels, rng = torch.arange(140) // 35, torch.Generator().manual_seed(0)
    x = torch.nn.functional.one_hot((labels - 1).clamp(min=0), 6) + 0.05 * torch.randn(140, 6, generator=rng)
    z, y = (x[20:].clone(), labels[20:]) if references else (None, None)
    seen, made = [], cuda.Kernels.fold
    monkeypatch.setattr(cuda.Kernels, "fold", lambda self: seen.append(made(self)) or seen[-1])
    same(make(), Given(x, z, nf.Relation.from_labels(labels, y)))
    shares = [float(found[7].count_nonzero() / len(found[7])) for found in seen if len(found[7])]
    assert 0 < min(shares) < 0.5  # of symmetric pairs, those below the diagonal are never computed
    assert references or min(shares) < 0.4


def test_half_precision_rows_use_half_precision_products(monkeypatch):
    kinds = []
    made = cuda.Kernels.fold
    monkeypatch.setattr(cuda.Kernels, "fold", lambda self: kinds.append(self.spec.dtype) or made(self))
    x, y = plain().rows, torch.arange(21) // 3
    L.SupCon(engine="fused")(x.half(), y)
    L.SupCon(engine="fused")(x, y)
    L.SupCon(engine="fused")(x.half(), y, ref_emb=x, ref_labels=y)
    assert kinds == [2, 0, 0]


def test_there_is_no_second_derivative():
    x = plain().rows.requires_grad_()
    for loss in (L.SupCon(engine="fused"), L.Triplet(engine="fused"), L.Triplet(mining="hard", engine="fused")):
        value = loss(x, torch.arange(21) // 3)
        with pytest.raises(RuntimeError, match=r'"fused" has no second derivative, .*; use engine="dense"\.$'):
            torch.autograd.grad(value, x, create_graph=True)


def test_auto_takes_the_kernels_where_they_were_measured_to_be_fastest(monkeypatch):
    monkeypatch.setattr(auto, "_for_kernels", everywhere)
    monkeypatch.setattr(auto, "LEAST", {"cpu": auto.Least(200, 200)})
    heard, work = [], cuda.Kernels.fold
    monkeypatch.setattr(cuda.Kernels, "fold", lambda self: heard.append(1) or work(self))
    x, y = plain().rows, torch.arange(21) // 3
    for make in (L.SupCon, L.Margin):
        loss, dense = make(), make(engine="dense")
        for more in ({}, {"ref_emb": x.flip(0), "ref_labels": y.flip(0)}):
            for a, b in zip(measured(loss, x, y, **more), measured(dense, x, y, **more), strict=True):
                torch.testing.assert_close(a, b, **CLOSE)
        for a, b in zip(loss.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(loss(x, y), dense(x, y), **CLOSE)
    assert len(heard) == 6
    measured(L.SupCon(), x[:14], y[:14])  # fewer pairs
    assert len(heard) == 6
    leaf = x.clone().requires_grad_()  # second derivatives are dense's
    second = []
    for engine in ("auto", "dense"):
        (slope,) = torch.autograd.grad(L.SupCon(engine=engine)(leaf, y), leaf, create_graph=True)
        second += torch.autograd.grad(slope.square().sum(), leaf)
    torch.testing.assert_close(*second, atol=1e-4, rtol=1e-4)


def test_a_part_of_ones_own_is_not_fused():
    class Own(P.Linear):
        def forward(self, s, sign):
            return 2 * super().forward(s, sign)

    hooked = L.SupCon()
    hooked.pair_negative.register_forward_hook(lambda module, given, found: 2 * found)
    for loss in (L.MultiSimilarity(pair=Own(0.5)), hooked):
        assert unfused(loss.product, plain().relation) == "a part allows no shortcut"
        loss.engine = "fused"
        wanted = loss(plain().rows, torch.arange(21) // 3)
        loss.engine = "dense"
        torch.testing.assert_close(wanted, loss(plain().rows, torch.arange(21) // 3), **CLOSE)


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_is_not_served_says_why(name):
    assert unfused(LOSSES[name]().product, plain().relation)


def test_matrices_are_not_served():
    hot = nf.Relation.from_multilabel(torch.eye(5))
    assert unfused(L.SupCon().product, hot) == "pairs are given by a matrix"
    pairs = nf.Relation.from_labels(torch.arange(5), weights=torch.rand(5, 5))
    assert unfused(L.SupCon().product, pairs) == "pairs are given by a matrix"


# ---------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize("make", [lambda: L.SupCon(engine="fused"), lambda: L.Margin(engine="fused")])
def test_compiled_it_is_one_graph(make):
    torch._dynamo.reset()
    x, y = plain().rows, torch.arange(21) // 3
    net = torch.nn.Linear(15, 7)
    step = torch.compile(lambda x, y: loss(net(x), y), fullgraph=True, backend="aot_eager")
    loss = make()
    step(x, y).backward()
    compiled = [net.weight.grad.clone(), *(p.grad.clone() for p in loss.parameters())]
    net.weight.grad = None
    loss.zero_grad()
    loss(net(x), y).backward()
    for a, b in zip(compiled, [net.weight.grad, *(p.grad for p in loss.parameters())], strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    torch._dynamo.reset()


def test_operators_are_registered_soundly():
    given = everything()
    call = called(L.SupCon().product, given, given.rows, given.cols)
    spec, _ = call.spec(call.product.negative, "all", sums=AROUND)
    rows, cols = given.rows.requires_grad_(), given.cols.requires_grad_()
    single, pairs, place = replace(spec, given=0), call.pairs, call.positives.place
    far = replace(single, similarity=1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    near, real = call.near.detach().requires_grad_(), call.positives.measure.float()
    rest = [torch.zeros_like(x) for x in (rows, cols)]
    for operator, numbers, *args in (
        (operators.fold, spec, rows, cols, None, None, None, pairs),
        (operators.fold, spec, rows, cols, None, near, None, [*pairs, place, real]),
        (operators.hardest, spec, rows.detach(), cols.detach(), None, None, None, pairs),
        (operators.near, single, rows, cols, None, None, None, [*pairs[:2], place]),
        (operators.near, far, rows, cols, None, None, None, [*pairs[:2], place, *rest]),
    ):
        torch.library.opcheck(operator.registered, (*args, *numbers.lists()), test_utils=checks)
