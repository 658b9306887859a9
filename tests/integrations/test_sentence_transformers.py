"""`Loss` in sentence-transformers: equal to their losses, duplicates, chunks, and a run of their trainer."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import ranks_texts
import torch
import vision
from needs import need
from processes import together
from texts import encoder_folder
from torch import nn

import nearfar as nf
from nearfar.integrations.sentence_transformers import Loss

vision.mend()
need("sentence_transformers", "datasets", "accelerate")
import datasets  # noqa: E402
import sentence_transformers as st  # noqa: E402

try:
    from sentence_transformers.sentence_transformer import losses, modules
except ImportError:  # before sentence-transformers 6
    from sentence_transformers import losses
    from sentence_transformers import models as modules

L = nf.losses
NTXENT = L.NTXent(temperature=0.05)
ANCHORS = ["lost card", "cook soup", "loud song", "storm cloud", "the flight"]
POSITIVES = ["block the card", "oven recipe", "play radio", "umbrella", "hotel ticket beach"]
WRONG = ["bank", "my oven", "please play", "rain now", "what beach"]
WORSE = ["tell me", "to cook", "lion", "zebra cage", "doctor"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SentenceTransformer with one layer, of the words of tests/support/texts.py, without dropout."""
    folder = encoder_folder(tmp_path_factory.mktemp("text") / "encoder", pooling=None)
    first = modules.Transformer(str(folder))
    first.max_seq_length = 8
    return st.SentenceTransformer(modules=[first, modules.Pooling(16)], device="cpu").double().eval()


def features(model, *columns):
    tokenize = getattr(model, "preprocess", None) or model.tokenize
    return [tokenize(list(texts)) for texts in columns]


def measure(loss, model, columns, labels=None):
    """Value, and the gradients of the parameters of the network."""
    model.zero_grad()
    value = loss(features(model, *columns), labels)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def theirs(name, model, *args, **more):
    return getattr(losses, name)(model, *args, **more)


CLOSE = {"atol": 1e-10, "rtol": 1e-6}
SAME = {
    "pairs": ("MultipleNegativesRankingLoss", {}, (ANCHORS, POSITIVES), {}),
    "triplets": ("MultipleNegativesRankingLoss", {}, (ANCHORS, POSITIVES, WRONG), {}),
    "several negatives": ("MultipleNegativesRankingLoss", {}, (ANCHORS, POSITIVES, WRONG, WORSE), {}),
    "cached": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}, (ANCHORS, POSITIVES, WRONG), {"chunk": 2}),
    "cached, one chunk": ("CachedMultipleNegativesRankingLoss", {}, (ANCHORS, POSITIVES), {"chunk": 100}),
}


@pytest.mark.parametrize("name", SAME)
def test_nt_xent_is_their_ranking_loss(model, name):
    kind, settings, columns, more = SAME[name]
    found = measure(Loss(model, NTXENT, **more), model, columns)
    assert len(found) > 10
    torch.testing.assert_close(found, measure(theirs(kind, model, **settings), model, columns), **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs has a new name
def test_clip_is_their_symmetric_ranking_loss(model):
    found = measure(Loss(model, L.CLIP(temperature=0.05)), model, (ANCHORS, POSITIVES))
    wanted = measure(theirs("MultipleNegativesSymmetricRankingLoss", model), model, (ANCHORS, POSITIVES))
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("chunk", [None, 2])
def test_nested_is_their_matryoshka_loss(model, chunk):
    found = measure(Loss(model, nf.Nested(NTXENT, dims=(16, 8, 4)), chunk=chunk), model, (ANCHORS, POSITIVES))
    inner = theirs("MultipleNegativesRankingLoss", model)
    wanted = measure(theirs("MatryoshkaLoss", model, inner, [16, 8, 4]), model, (ANCHORS, POSITIVES))
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_triplet_loss_of_own_negatives_is_theirs(model, chunk):
    mine = L.Triplet(margin=5.0, similarity=nf.similarity.NegEuclidean(normalize=False))
    columns = ANCHORS, POSITIVES, WRONG
    other = theirs("TripletLoss", model, distance_metric=lambda x, y: (x - y).norm(dim=1))  # 5.0 adds 1e-6 to it
    found = measure(Loss(model, mine, in_batch=False, chunk=chunk), model, columns)
    torch.testing.assert_close(found, measure(other, model, columns), **CLOSE)
    twice = measure(Loss(model, mine, in_batch=False), model, (*columns, WORSE))
    each = [measure(other, model, (ANCHORS, POSITIVES, x)) for x in (WRONG, WORSE)]
    torch.testing.assert_close(twice, [(a + b) / 2 for a, b in zip(*each, strict=True)], **CLOSE)


@pytest.mark.parametrize("labels", [[0.9, 0.1, 0.5, 0.5, 1.0], [5.0, 5.0, 5.0, 5.0, 5.0], [3, 1, 2, 2, 0]])
@pytest.mark.parametrize("chunk", [None, 3])
def test_cosent_is_theirs(model, labels, chunk):
    labels = torch.tensor(labels)
    found = measure(Loss(model, L.CoSENT(), chunk=chunk), model, (ANCHORS, POSITIVES), labels)
    wanted = measure(theirs("CoSENTLoss", model), model, (ANCHORS, POSITIVES), labels)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_labelled_pairs_are_listed_pairs(model):
    mine = L.Contrastive(similarity=nf.similarity.NegEuclidean(), neg_margin=0.5)
    labels = torch.tensor([1, 0, 1, 1, 0])
    value = Loss(model, mine)(features(model, ANCHORS, POSITIVES), labels)
    rows, others = (model(x)["sentence_embedding"] for x in features(model, ANCHORS, POSITIVES))
    far = (nn.functional.normalize(rows) - nn.functional.normalize(others)).norm(dim=1)
    wanted = torch.where(labels == 1, far.square(), (0.5 - far).relu().square()).mean()
    torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("chunk", [None, 2])
def test_labels_are_classes(model, chunk):
    labels = torch.tensor([0, 0, 1, 1, 0])
    value = Loss(model, L.SupCon(), chunk=chunk)(features(model, ANCHORS), labels)
    rows = model(features(model, ANCHORS)[0])["sentence_embedding"]
    torch.testing.assert_close(value, L.SupCon()(rows, labels))


def test_equal_texts_are_no_negatives(model):
    """A duplicate of a pair changes nothing but its weight, however it is padded."""
    anchors, positives = [*ANCHORS, ANCHORS[0], "my card"], [*POSITIVES, "bank", POSITIVES[0]]
    value = Loss(model, NTXENT)(features(model, anchors, positives))
    rows, others = (model(x)["sentence_embedding"] for x in features(model, anchors, positives))
    ids = torch.tensor([0, 1, 2, 3, 4, 0, 0])  # one anchor twice, and one positive twice
    torch.testing.assert_close(value, NTXENT(rows, ids, ref_emb=others, ref_labels=ids))
    plain = Loss(model, NTXENT, duplicates=False)(features(model, anchors, positives))
    wanted = theirs("MultipleNegativesRankingLoss", model)(features(model, anchors, positives), None)
    torch.testing.assert_close(plain, wanted, **CLOSE)
    assert plain != value


def test_a_hard_negative_that_is_a_positive_elsewhere_is_a_positive_there(model):
    value = Loss(model, NTXENT)(features(model, ANCHORS, POSITIVES, [POSITIVES[1], *WRONG[1:]]))
    rows, *others = (
        model(x)["sentence_embedding"] for x in features(model, ANCHORS, POSITIVES, [POSITIVES[1], *WRONG[1:]])
    )
    ids = torch.arange(10)
    ids[5] = 1
    torch.testing.assert_close(value, NTXENT(rows, ids[:5], ref_emb=torch.cat(others), ref_labels=ids))


def test_chunks_repeat_the_dropout(model):
    columns = ANCHORS, POSITIVES
    model.train()
    try:
        found = []
        for loss in (Loss(model, NTXENT, chunk=5), Loss(model, NTXENT)):
            torch.manual_seed(0)
            found.append(measure(loss, model, columns))
        torch.testing.assert_close(*found, **CLOSE)
        torch.manual_seed(1)
        assert measure(Loss(model, NTXENT), model, columns)[0] != found[0][0]
    finally:
        model.eval()


def test_a_loss_learns_and_wraps(model):
    mine = L.CLIP(learn=True)
    loss = Loss(model, nf.Nested(mine, dims=(8, 16)), chunk=2).double()
    loss(features(model, ANCHORS, POSITIVES)).backward()
    assert mine.log_scale.grad is not None
    assert any(x is mine.log_scale for x in loss.parameters())
    with torch.no_grad():
        assert not loss(features(model, ANCHORS, POSITIVES)).requires_grad
    assert "Nested" in loss.get_config_dict()["loss"]


def test_their_trainer_may_replace_the_model(model):
    """It sets every submodule of a loss again when it wraps the network."""
    for mine in (L.Margin(), L.SigLIP(), L.Contrastive(miner=nf.miners.Hard()), nf.CrossBatchMemory(L.Margin(), 8)):
        loss, wrapped = Loss(model, mine), nn.Sequential(model)
        names = [name for name, _ in mine.named_parameters()]
        st.SentenceTransformerTrainer.override_model_in_loss(_Trainer(), loss, wrapped)
        assert loss.model is wrapped
        assert [name for name, _ in mine.named_parameters()] == names


class _Trainer:
    def override_model_in_loss(self, loss, model):
        return st.SentenceTransformerTrainer.override_model_in_loss(self, loss, model)


REFUSED = [
    ((ANCHORS,), None, {}, "one column of texts needs a column of labels"),
    ((ANCHORS, POSITIVES, WRONG), [1, 0, 1, 0, 1], {}, "labels need one or two columns of texts, but 3 came"),
    ((ANCHORS, POSITIVES), [0.5, 0.0, 1.0, 0.1, 1.0], {}, "need a loss of scores"),
    ((ANCHORS, POSITIVES), None, {"in_batch": False}, "needs a column of negatives"),
    ((ANCHORS, POSITIVES), None, {"chunk": 0}, "chunk must be a whole number above zero"),
]


@pytest.mark.parametrize(("columns", "labels", "settings", "words"), REFUSED)
def test_what_does_not_fit_is_one_sentence(model, columns, labels, settings, words):
    with pytest.raises(ValueError, match=words):
        Loss(model, NTXENT, **settings)(features(model, *columns), None if labels is None else torch.tensor(labels))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_their_trainer_trains_with_it(model, tmp_path, chunk):
    torch.manual_seed(0)
    mine = L.CLIP(learn=True)
    loss = Loss(model.float(), mine, chunk=chunk)
    data = datasets.Dataset.from_dict({"anchor": ANCHORS, "positive": POSITIVES})
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=5, learning_rate=3e-3, report_to=[],
        logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = st.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    trainer.train()
    seen = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    assert seen[-1] < 0.5 * seen[0]
    assert mine.log_scale.item() != 0
    model.double().eval()


def test_two_ranks_equal_one_process(tmp_path):
    wanted = ranks_texts.step(0, 1)
    for found in together("ranks_texts", "step", 2, tmp_path):
        for name, values in wanted.items():
            torch.testing.assert_close(
                found[name], values, atol=1e-10, rtol=1e-10, msg=lambda x, name=name: f"{name}: {x}"
            )
