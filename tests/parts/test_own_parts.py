"""User-defined parts give their own values on every engine and at every size, or are refused in one sentence."""

from __future__ import annotations

import ast
import inspect
from itertools import islice
from pathlib import Path

import pytest
import torch
from own_parts import ANCHORS, CASES, DRAWN, EXAMPLES, Case, family, leaves, other, robust
from processes import interpreted
from ways import lower_thresholds, takes_operators

import nearfar as nf
from nearfar import links
from nearfar._utils.shortcuts import Part, swift, touched
from nearfar.engines.auto import INSTALLED
from nearfar.engines.learned import Carried, Formed
from nearfar.sets.stream import Collected

L, S, P, M = nf.losses, nf.sets, nf.pairs, nf.miners
CLOSE = {"atol": 1e-9, "rtol": 1e-9, "equal_nan": True}
NEVER = 2**60
SENTENCE = r'^\w+: engine="tiled" cannot serve this loss, because .*; use engine="dense"\.$'
cases = pytest.mark.parametrize("case", CASES, ids=str)


def batch(n=24, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=rng, dtype=torch.float64), torch.randint(0, max(3, n // 4), (n,), generator=rng)


def measured(loss, embeddings, labels, more=()):
    """Value, and gradients of embeddings, of the loss's parameters and of `more`."""
    leaf = embeddings.clone().requires_grad_()
    wanted = [leaf, *loss.parameters(), *more]
    value = loss(leaf, labels)
    slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
    return [value.detach(), *slopes]


def on(loss, engine, tile=None):
    loss.engine, loss.tile = engine, tile
    return loss


def check(loss, monkeypatch, given=None, more=()):
    """The loss on every engine, below and above both thresholds of "auto", against dense; whether "tiled" serves it."""
    given = batch() if given is None else given
    wanted = measured(on(loss.double(), "dense"), *given, more)
    for few, many in ((1, NEVER), (1, 1)):
        lower_thresholds(monkeypatch, few, many)
        same(measured(on(loss, "auto", 7), *given, more), wanted)
    try:
        found = measured(on(loss, "tiled", 7), *given, more)
    except ValueError as error:
        with pytest.raises(ValueError, match=SENTENCE):
            raise error from None
        return wanted, False
    same(found, wanted)
    return wanted, True


def refused(loss):
    with pytest.raises(ValueError, match=SENTENCE):
        on(loss.double(), "tiled")(*batch())


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# ---------------------------------------------------------------- every part, every method


def test_every_built_in_part_is_among_the_examples():
    assert leaves(Part) == set(EXAMPLES) | DRAWN | {Formed, Carried}


@cases
def test_a_subclass_with_one_method_of_its_own_equals_dense(case, monkeypatch):
    for way in case.losses():
        check(way(case.made()), monkeypatch)


@cases
def test_an_object_with_one_method_of_its_own_equals_dense(case, monkeypatch):
    way = next(case.losses())
    _, served = check(way(case.patched()), monkeypatch)
    assert not served


MOVED = {
    P.PairLoss: {"forward"},
    S.UncertaintySet: {"value", "_value"},
    nf.similarity.Similarity: {"forward", "scores", "finish"},
    links.Link: {"forward"},
    M.Miner: {"forward"},
    nf.groups.Grouping: {"split", "join"},
}


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_what_is_written_anew_is_seen(kind):
    """The other tests would hold for methods that nobody calls."""
    for name in MOVED.get(family(kind), {"__call__"} if "__call__" in vars(kind) else {"all"}):
        case = Case(kind, name)
        moved = [
            not torch.allclose(*(on(way(x).double(), "dense")(*batch()) for x in (case.made(), case.plain())))
            for way in case.losses()
        ]
        assert any(moved), case


def test_a_subclass_has_no_shortcuts_but_its_own():
    class Twice(S.KL):
        def _value(self, l, w, mass):
            return 2 * super()._value(l, w, mass)

    class Told(Twice, swift=True):
        stream = S.KL.stream

    assert S.KL.swift
    assert not Twice.swift
    assert Told.swift
    assert isinstance(Twice(0.1).stream(1, torch.zeros(1)), Collected)
    assert not isinstance(Told(0.1).stream(1, torch.zeros(1)), Collected)
    assert Told(0.1).fold() is None
    assert nf.similarity.Cosine.norms is False
    assert type("Own", (nf.similarity.Cosine,), {}).norms is True
    assert not swift([S.DetachedWeights(Twice(0.1))])


def test_a_pair_loss_may_say_that_it_is_swift(monkeypatch):
    """One that writes its form beside its losses takes the operators, and keeps its numbers."""

    class Steep(P.PairLoss, swift=True):
        def forward(self, s, sign):
            return -3.0 * sign * s

        def form(self, sign):
            return P.PairForm("line", -3.0 * sign, 0.0)

    _, served = check(L.MultiSimilarity(pair=Steep()), monkeypatch)
    assert served
    relation = nf.Relation.from_labels(batch()[1])
    assert takes_operators(L.MultiSimilarity(pair=Steep()).product, relation)
    assert not takes_operators(L.MultiSimilarity(pair=type("Own", (Steep,), {})()).product, relation)


@pytest.mark.skipif(not INSTALLED, reason="the kernels need Triton, which is built for Linux on x86, and PyTorch 2.11")
def test_parts_of_ones_own_on_the_fused_engine():
    assert " passed" in interpreted("tests/interpreted/test_own_parts.py")


# ---------------------------------------------------------------- single objects

MODULES = [kind for kind in EXAMPLES if issubclass(kind, torch.nn.Module)]
modules = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


@modules
@pytest.mark.parametrize("when", ["before", "after", "backward"])
def test_a_hook_is_heard_on_every_engine(kind, when, monkeypatch):
    case = Case(kind, "forward")
    way, part, heard = next(case.losses()), case.plain(), []
    if when == "before":
        part.register_forward_pre_hook(lambda module, given: heard.append(1) or other(lambda: given)())
    elif when == "after":
        part.register_forward_hook(lambda module, given, found: heard.append(1) or other(lambda: found)())
    elif family(kind) is not P.PairLoss:
        return  # scores, pairs and terms are no tensors that a backward hook could follow
    else:
        part.register_full_backward_hook(
            lambda module, into, out: heard.append(1) or tuple(2 * x if torch.is_tensor(x) else x for x in into)
        )
    _, served = check(way(part), monkeypatch)
    assert heard
    assert not served
    assert "has a hook" in touched([part])


def numbers(kind):
    """The attributes of a part that are numbers."""
    held = vars(EXAMPLES[kind](kind))
    return [name for name, x in held.items() if isinstance(x, float) and (kind, name) not in FIXED]


def put(part, name, number):
    """Set a number; those of sets and miners without asking them."""
    (setattr if isinstance(part, P.PairLoss) else object.__setattr__)(part, name, number)


FIXED = {(P.Hinge, "start"), (M.DistanceWeighted, "cutoff")}
"""Not settings, or numbers that dense takes as numbers only."""


@modules
def test_a_number_may_be_learnt(kind, monkeypatch):
    for name in numbers(kind) if family(kind) is not M.Miner else ():  # through a miner nothing is learned
        for way in islice(Case(kind, "forward").losses(), 1, 4):
            part = EXAMPLES[kind](kind)
            start = getattr(part, name)
            setattr(part, name, torch.nn.Parameter(torch.tensor(start, dtype=torch.float64)))
            check(way(part), monkeypatch)


@pytest.mark.parametrize("kind", [k for k in EXAMPLES if k is not S.CalibratedKL], ids=lambda kind: kind.__name__)
def test_a_number_may_be_a_tensor_with_a_gradient(kind, monkeypatch):
    for name in numbers(kind):
        part = EXAMPLES[kind](kind)
        number = torch.tensor(getattr(part, name), dtype=torch.float64, requires_grad=True)
        put(part, name, number)
        check(next(Case(kind, "").losses())(part), monkeypatch, more=(number,))


REPLACED = {
    "over": (S.KL(0.2), S.TopK(3), S.Sampled(S.KL(0.2), 5), (S.Worst(zero_member=True), S.ChiSquare(1.0))),
    "pair": (P.Logistic(), P.Linear(), (P.AngularMargin(scale=2.0), P.Squared(0.0, 0.3))),
    "similarity": (nf.similarity.NegEuclidean(), nf.similarity.Dot()),
    "miner": (M.Hard(), M.MultiSimilarity(), None),
    "link": (links.HingeLink(0.3), links.LiftedLink(), links.Add(apart=True)),
    "groups": (nf.groups.Batch(), "sign", nf.groups.Anchor(), "anchor_sign"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_after_construction_counts(name, monkeypatch):
    for part in REPLACED[name]:
        for groups in ("batch", "anchor_sign"):
            loss = robust(groups=groups)
            setattr(loss, name, part)
            if not loss.product.draws:
                check(loss, monkeypatch)
            elif not loss.product.groups.per_anchor:
                refused(loss)


class Wide(links.Add):
    """Reads what a lean way would leave out: the losses of pairs that are not positive."""

    def forward(self, sides):
        (terms,) = super().forward(sides)
        return (links.Terms(terms.values + sides.losses.mean(dim=1), terms.measure),)


class Mixed(links.Add):
    """Looks at other anchors."""

    def forward(self, sides):
        (terms,) = super().forward(sides)
        return (links.Terms(terms.values / terms.values.sum(), terms.measure),)


class Ends(links.LiftedLink):
    """Takes the columns for the anchors, which they are where a batch is its own reference."""

    def forward(self, sides):
        (terms,) = super().forward(sides)
        return (links.Terms(terms.values + (sides.negative + sides.columns)[:, None], terms.measure),)


@pytest.mark.parametrize("link", [Wide, Mixed, Ends])
def test_a_link_of_ones_own_is_given_all_it_may_read(link, monkeypatch):
    _, served = check(robust(link=link(), **ANCHORS), monkeypatch)
    assert not served


def test_a_link_that_says_so_is_swept_in_strips(monkeypatch):
    own = type("Own", (Wide,), {"strips": True})
    _, served = check(robust(link=own(), **ANCHORS), monkeypatch)
    assert served


# ---------------------------------------------------------------- at the size where "auto" changes engine


class Tripled(P.Linear):
    def forward(self, s, sign):
        return 3 * super().forward(s, sign)


class Shifted(S.KL):
    def _value(self, l, w, mass):
        return super()._value(l, w, mass) + 0.2


class Half(nf.similarity.Cosine):
    def finish(self, dot, rows, cols):
        return 0.5 * dot


class Bent(nf.similarity.Cosine):
    def forward(self, x, y):
        return torch.tanh(super().forward(x, y))


def learnt():
    pair = P.Hinge()
    pair.margin = torch.nn.Parameter(torch.tensor(0.2))
    return L.DroKL(pair=pair)


def heard():
    loss = L.BinomialDeviance()
    loss.pair_positive.register_forward_hook(lambda module, given, found: 2 * found)
    return loss


AT_SIZE = {
    "pair loss": lambda: L.MultiSimilarity(pair=Tripled(0.5)),
    "set": lambda: robust(over=Shifted(0.1)),
    "set an anchor": lambda: robust(over=Shifted(0.1), **ANCHORS),
    "worst": lambda: robust(over=Case(S.Worst, "_value").made()),
    "top-k": lambda: robust(over=Case(S.TopK, "_weights").made()),
    "finish": lambda: L.DroTopK(k=9, similarity=Half()),
    "forward": lambda: L.SupCon(similarity=Bent()),
    "learnt": learnt,
    "hook": heard,
    "link": lambda: robust(link=Wide(), **ANCHORS),
    "miner": lambda: L.MultiSimilarity(miner=Case(M.MultiSimilarity, "forward").made()),
}


@pytest.mark.parametrize("name", AT_SIZE)
def test_a_part_of_ones_own_keeps_its_value_across_512_rows(name):
    for n in (510, 515):
        given = batch(n)
        loss = AT_SIZE[name]().double()
        same(measured(on(loss, "auto"), *given), measured(on(loss, "dense"), *given))


def test_built_in_parts_take_the_operators():
    """The gate costs nobody their speed: every loss of the table with plain labels goes where it went."""
    relation = nf.Relation.from_labels(batch()[1])
    lean = {name: takes_operators(getattr(L, name)(**more).product.at(64), relation) for name, more in {
        "Contrastive": {}, "Margin": {}, "BinomialDeviance": {}, "DroWorst": {}, "DroTopK": {"k": 5},
        "DroTopKPN": {"k": 6}, "DroKL": {}, "DroKLGrouped": {}, "DroChiSquare": {"rho": 1.0}, "LiftedStructure": {},
        "DroTrimmed": {"top": 2, "k": 6},
        "GeneralizedLifted": {}, "MultiSimilarity": {}, "HAP2S": {}, "Triplet": {}, "Angular": {}, "NTXent": {},
        "SupCon": {}, "Circle": {},
    }.items()}  # fmt: skip
    assert all(lean.values()), [name for name, found in lean.items() if not found]


# ---------------------------------------------------------------- the gate is the only one


def part_classes():
    found, todo = set(), [Part]
    while todo:
        kind = todo.pop()
        found.add(kind.__name__)
        todo += kind.__subclasses__()
    return found


def asked(node):
    """The names of the classes that an `isinstance`, an `exactly` or a comparison of `type(x)` tests for."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "exactly"):
        return {x.id for kind in node.args[1:] for x in ast.walk(kind) if isinstance(x, ast.Name)}
    if isinstance(node, ast.Compare) and any(
        isinstance(x, ast.Call) and getattr(x.func, "id", "") == "type" for x in ast.walk(node)
    ):
        return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return set()


def test_engines_ask_parts_and_never_for_their_class():
    here = Path(inspect.getfile(nf)).parent
    kinds = part_classes()
    assert {"Hinge", "KL", "AnchorSign", "SemiHardBand"} <= kinds
    for path in [*(here / "engines").glob("*.py"), *(here / "sets").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = asked(node) & kinds
            assert not found, f"{path.name}:{node.lineno} tests for {found}; ask the part"
