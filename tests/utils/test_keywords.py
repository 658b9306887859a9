"""Unknown names: one sentence with the right one, also for names of pytorch-metric-learning."""

from __future__ import annotations

import inspect

import pytest
import torch

import nearfar as nf
from nearfar._utils.keywords import CLASSES, FROM_PML
from nearfar.runs import parse
from nearfar.runs._parts import check

L, M, B = nf.losses, nf.miners, nf.batches
LABELS = torch.arange(8) // 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: L.Contrastive(margin=1.0), "Contrastive: there is no margin=; write pos_margin= and neg_margin=."),
        (lambda: B.MPerClass(LABELS, m=4), "MPerClass: there is no m=; write samples=."),
        (lambda: B.MPerClass(LABELS, batch_size=4), "MPerClass: there is no batch_size=; write classes= and samples=."),
        (lambda: L.ProxyAnchor(num_classes=4), "ProxyAnchor: there is no num_classes=; write classes=."),
        (lambda: L.ArcFace(4, embedding_size=4), "ArcFace: there is no embedding_size=; write dim=."),
        (lambda: L.ProxyAnchor(num_proxies=4), "ProxyAnchor: there is no num_proxies=; write classes=."),
        (lambda: L.ProxyAnchor(4, 4, alpha=32), "ProxyAnchor: there is no alpha=; write scale=."),
        (lambda: L.NCA(softmax_scale=1), "NCA: there is no softmax_scale=; write scale=."),
        (lambda: L.Triplet(smooth_loss=True), "Triplet: there is no smooth_loss=; write smooth=."),
        (lambda: L.NTXent(distance=None), "NTXent: there is no distance=; write similarity=."),
        (lambda: L.NTXent(reducer=None), "NTXent: there is no reducer=; write reduction=."),
        (
            lambda: M.DistanceWeighted(nonzero_loss_cutoff=1.0),
            "DistanceWeighted: there is no nonzero_loss_cutoff=; write upper=.",
        ),
        (lambda: L.Triplet(margn=0.1), "Triplet: there is no margn=; did you mean 'margin'?"),
        (lambda: nf.sets.KL(gama=0.1), "KL: there is no gama=; did you mean 'gamma'?"),
        (lambda: nf.pairs.Hinge(treshold=0.1), "Hinge: there is no treshold=; did you mean 'threshold'?"),
        (
            lambda: nf.pairs.Linear(xyz=0.1),
            "Linear: there is no xyz=; there are threshold, margin, scale.",
        ),
        (lambda: M.Hard(xyz=0.1), "Hard: there is no xyz=; it takes none."),
        (lambda: L.ProxyNCA(4), "ProxyNCA: missing a required argument: 'dim'."),
        (lambda: L.NTXent(0.1), "NTXent: too many positional arguments."),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_right_one(make, says):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value) == says


def test_every_answer_exists_and_no_question_does():
    places = {kind.__name__: kind for module in (M, B, L) for kind in vars(module).values() if inspect.isclass(kind)}
    for owner, words in FROM_PML.items():
        for old, new in words.items():
            if owner:
                known = inspect.signature(places[owner]).parameters
                assert old not in known
                assert set(new.split("= and ")) <= set(known), (owner, old)
    assert set(CLASSES.values()) <= set(places)


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (
            nf.losses,
            "TripletMarginLoss",
            "module 'nearfar.losses' has no attribute 'TripletMarginLoss'; write Triplet.",
        ),
        (nf.losses, "SupConLoss", "module 'nearfar.losses' has no attribute 'SupConLoss'; write SupCon."),
        (nf.miners, "BatchHardMiner", "module 'nearfar.miners' has no attribute 'BatchHardMiner'; write Hard."),
        (
            nf.batches,
            "MPerClassSampler",
            "module 'nearfar.batches' has no attribute 'MPerClassSampler'; write MPerClass.",
        ),
        (nf, "loses", "module 'nearfar' has no attribute 'loses'; did you mean 'losses'?"),
    ],
)
def test_an_unknown_class_is_answered_with_ours(module, name, says):
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"loss": {"name": "ContrastiveLoss"}}, "config: loss.name is 'ContrastiveLoss'; write Contrastive."),
        (
            {"loss": {"name": "Contrastive", "margin": 1.0}},
            "config: Contrastive has no loss.margin; write pos_margin= and neg_margin=.",
        ),
        (
            {"loss": {"name": "DroKL", "pair": {"name": "Hinge", "treshold": 1}}},
            "config: Hinge has no loss.pair.treshold; did you mean 'threshold'?",
        ),
    ],
)
def test_a_configuration_is_answered_likewise(tree, says):
    with pytest.raises(ValueError) as error:
        check(parse(tree))
    assert str(error.value) == says
