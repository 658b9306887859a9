"""Constructor arguments are settings: read, shown, set, and followed by the next call, on every engine."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import settings_cases as cases
import torch
from processes import interpreted
from settings_cases import CASES, FIXED, IDS, given, make, measured, other, part, same
from ways import untiled

import nearfar as nf
from nearfar._utils.checks import RECENT
from nearfar.engines.auto import INSTALLED

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.sets
every = pytest.mark.parametrize(("kind", "name"), CASES, ids=IDS)
changing = pytest.mark.parametrize(
    ("kind", "name"),
    [case for case in CASES if case[1] not in FIXED],
    ids=[x for x in IDS if x.split("-")[1] not in FIXED],
)


@every
def test_an_argument_is_read_and_shown_under_its_own_name(kind, name):
    loss = make(kind, **given(kind, name))
    settings = part(loss, kind)
    wanted = given(kind, name).get(name, inspect.signature(kind).parameters[name].default)
    found = getattr(settings, name)
    if wanted is None and name in ("pair", "similarity"):  # the usual part stands for itself
        assert found is None or isinstance(found, P.PairLoss | nf.similarity.Similarity)
    elif isinstance(found, torch.Tensor):
        assert float(found.detach()) == wanted
    else:
        assert found == wanted
    assert f"{name}=" in repr(settings)
    assert "\n" not in repr(settings)


@changing
def test_a_setting_that_is_set_counts(kind, name):
    """Value and gradient are those of a loss that is made with it."""
    value, engines = other(kind, name), ("dense", "tiled", "auto")
    loss = make(kind, **given(kind, name))
    before = measured(loss)
    setattr(part(loss, kind), name, value)
    loss.double()  # as `make` does, for what begins to be learned
    wanted = make(kind, **(given(kind, name) | {name: value}))
    shown = f"{value:g}" if (kind, name) == (L.Margin, "beta") else repr(value)  # of what is learned
    assert f"{name}={shown}" in repr(part(loss, kind))
    if name == "engine":
        assert loss.engine == value
        return
    after = measured(wanted)
    assert len(before) != len(after) or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for engine in engines:
        if engine == "tiled" and untiled(loss.product) is not None:
            continue
        for one in (loss, wanted):
            one.engine, one.tile = engine, 5
        same(measured(loss), measured(wanted))


@changing
def test_a_bad_value_is_refused_as_by_the_constructor(kind, name):
    loss = make(kind, **given(kind, name))
    settings, before = part(loss, kind), measured(loss)
    shown = repr(settings)
    for bad in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)) as refused:
            make(kind, **(given(kind, name) | {name: bad}))
        with pytest.raises(refused.type) as error:
            setattr(settings, name, bad)
        assert str(error.value) == str(refused.value)
        assert name in str(error.value)
    assert repr(settings) == shown
    same(measured(loss), before, 0.0)


@pytest.mark.parametrize("kind", [kind for kind in cases.kinds() if FIXED & set(cases.arguments(kind))])
def test_the_size_of_what_is_learned_is_fixed(kind):
    loss = make(kind, **given(kind))
    for name in FIXED & set(cases.arguments(kind)):
        with pytest.raises(AttributeError, match=f"{kind.__name__}: {name} cannot change, as .* make a new"):
            setattr(loss, name, 7)


# numbers that are learned by default break the graph (docs/guides/own-loss.md)
@pytest.mark.parametrize("kind", [getattr(L, name) for name in cases.PRODUCTS if name != "SigLIP"])
def test_a_compiled_loss_follows(kind):
    torch._dynamo.reset()
    loss = make(kind, **given(kind))
    compiled = torch.compile(loss, backend="eager", fullgraph=RECENT)
    same(measured(loss, call=compiled), measured(loss))
    names = [name for name in cases.arguments(kind) if isinstance(getattr(loss, name), float) and name != "beta"]
    if not names:
        return
    for name in names[:2]:
        setattr(loss, name, other(kind, name))
    changed = given(kind) | {name: other(kind, name) for name in names[:2]}
    same(measured(loss, call=compiled), measured(make(kind, **changed)))


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (it is built for Linux on x86)")
def test_the_kernels_follow():
    assert " passed" in interpreted("tests/interpreted/test_settings.py")


def test_copies_have_settings_of_their_own():
    for loss in (L.Margin(), L.NTXent(pair=P.Hinge(learn=True)), L.ArcFace(5, 4), L.Triplet(mining="hard", anneal=3)):
        name = "margin" if hasattr(loss, "margin") else "temperature"
        for other_loss in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            same(measured(other_loss.double()), measured(copy.deepcopy(loss).double()))
            setattr(other_loss, name, 0.77)
            assert getattr(loss, name) != 0.77
            assert list(other_loss.state_dict()) == list(loss.state_dict())


def test_what_is_learned_stays_when_a_setting_changes():
    loss = L.Margin()
    (offset,) = loss.parameters()
    with torch.no_grad():
        offset.fill_(0.25)
    loss.margin = 0.4
    assert [x is offset for x in loss.parameters()] == [True]
    assert list(loss.state_dict()) == ["pair_positive.offset"]
    assert float(loss.beta.detach()) == pytest.approx(0.95)
    loss.beta = 0.7
    assert [x is offset for x in loss.parameters()] == [True]
    assert float(loss.beta.detach()) == pytest.approx(0.7)
    arc = L.ArcFace(5, 4)
    proxies = arc.proxies
    arc.margin, arc.pair, arc.similarity = 0.2, P.Linear(), nf.similarity.Dot()
    assert arc.proxies is proxies
    assert list(arc.state_dict()) == ["proxies"]


def test_a_given_part_is_a_setting_and_may_be_changed_itself():
    loss = L.DroKL(pair=P.Hinge(0.3, 0.4))
    loss.pair.margin = 0.1
    same(measured(loss), measured(L.DroKL(pair=P.Hinge(0.1, 0.4))))
    assert L.DroKL().pair.margin == 0.2


def test_a_made_part_refuses_changes_and_keeps_its_hooks():
    loss = L.Triplet()
    with pytest.raises(AttributeError, match="Triplet: its Hinge is made from its settings; set those, or give a part"):
        loss.pair_negative.margin = 0.3
    with pytest.raises(AttributeError):
        L.Triplet(mining="hard").product.link.margin = 0.3
    with pytest.raises(AttributeError):
        loss.pair_positive = P.Linear()
    heard = []
    handle = loss.pair_negative.register_forward_hook(lambda *given: heard.append(1))
    loss.margin = 0.3
    measured(loss)
    assert heard
    handle.remove()
    heard.clear()
    measured(loss)
    assert not heard


NEAR = [
    (lambda: L.NTXent(), "temprature", "NTXent: there is no setting temprature; did you mean 'temperature'?"),
    (lambda: L.Contrastive(), "margin", "Contrastive: there is no setting margin; write pos_margin= and neg_margin=."),
    (lambda: L.Triplet(), "margins", "Triplet: there is no setting margins; did you mean 'margin'?"),
    (lambda: M.SemiHard(), "treshold", "SemiHard: there is no setting treshold; did you mean 'threshold'?"),
    (lambda: P.Hinge(), "magrin", "Hinge: there is no setting magrin; did you mean 'margin'?"),
]


@pytest.mark.parametrize(("loss", "name", "says"), NEAR, ids=[name for _, name, _ in NEAR])
def test_a_name_near_that_of_a_setting_is_an_error(loss, name, says):
    with pytest.raises(AttributeError) as error:
        setattr(loss(), name, 1.0)
    assert str(error.value) == says


def test_other_attributes_are_free():
    class Mine(L.NTXent):
        def __init__(self, scale):
            self.temperatures = [scale]
            super().__init__(temperature=0.2)
            self.temperatur = scale
            self.table = torch.nn.Linear(2, 2)

    loss = Mine(3.0)
    loss.note, loss.temperatur = "mine", 4.0
    assert (loss.temperatures, loss.temperature, loss.temperatur, loss.note) == ([3.0], 0.2, 4.0, "mine")
    same(
        measured(loss.double()),
        [*measured(L.NTXent(temperature=0.2)), torch.zeros(2, 2).double(), torch.zeros(2).double()],
    )
    with pytest.raises(AttributeError, match="did you mean 'temperature'"):
        loss.temperture = 1.0


def test_a_subclass_with_its_own_factors_has_its_own_settings():
    class Sharp(nf.losses.recipe.Recipe):
        sharpness: float = 2.0

        def factors(self):
            return {"pair": P.Linear(), "over": S.KL(1 / self.sharpness), "groups": "anchor_sign"}

    loss = Sharp(sharpness=4.0)
    loss.sharpness = 3.0
    assert list(inspect.signature(Sharp).parameters) == ["sharpness", "pair", "miner", "similarity", "engine"]
    wanted = nf.RobustLoss(pair=P.Linear(), over=S.KL(1 / 3.0), groups="anchor_sign")
    same(measured(loss), measured(wanted))


def test_one_of_two_that_exclude_each_other_takes_the_other_back():
    loss = L.DroTrimmed(top=2, k=6)
    loss.fraction = 0.3
    assert (loss.k, loss.fraction, loss.top) == (None, 0.3, 2)
    loss.k = 7
    assert (loss.k, loss.fraction) == (7, None)
    with pytest.raises(ValueError, match="fraction must lie in"):
        loss.fraction = 3.0
    assert (loss.k, loss.fraction) == (7, None)


def test_a_draw_follows_its_setting():
    miner = M.DistanceWeighted()
    miner.sample = False
    assert not L.Contrastive(miner=miner).product.draws


def test_a_number_that_is_no_number_is_refused_by_the_constructor():
    with pytest.raises(ValueError, match="Triplet: margin must be a number, but came as 'abc'"):
        L.Triplet(margin="abc")
    with pytest.raises(ValueError, match="HingeLink: margin must be a number, but came as 'abc'"):
        nf.links.HingeLink("abc")
