"""Runs on texts: classes and pairs, resumed and in chunks, with one encoder or two."""

import numpy as np
import pytest
import torch
from runs import journal, weights
from texts import classes_file, encoder_folder, pairs_file, write_csv

import nearfar as nf
from nearfar.data import open_data
from nearfar.report import write
from nearfar.train import fit, load, open_run, parse
from nearfar.train._processes import SingleProcess
from nearfar.train._recipe import default_config
from nearfar.train._state import load_batches, prepare

pytest.importorskip("tokenizers")
ALONE = SingleProcess(torch.device("cpu"), "float32")
PLAN = {"steps": 12, "evaluate_every": 6, "checkpoint_every": 6, "diagnose_every": 0}


def settings(path, **changes):
    tree = {
        "data": {"path": str(path), "validation": 0.25},
        "model": {"name": "text:static", "embedding_dim": None},
        "batches": {"name": "MPerClass", "classes": 3, "samples": 3},
        "optimizer": {"lr": 0.01},
        "training": PLAN,
    }
    for name, values in changes.items():
        tree[name] = values if "name" in values or name == "model" else {**tree[name], **values}
    return parse(tree)


def test_classes_train_and_open_again(tmp_path):
    config = settings(classes_file(tmp_path / "a.csv"))
    assert fit(config, tmp_path / "whole").finished
    run = open_run(tmp_path / "whole")
    x = torch.stack([run.transform("lost bank card")])
    assert torch.isfinite(run.model.eval()(x)).all()
    page = write(tmp_path / "page.html", tmp_path / "whole").read_text(encoding="utf-8")
    assert open_data(None, tmp_path / "a.csv").test.texts[0] in page, "neighbors are shown as texts"


def test_a_killed_run_continues_exactly(tmp_path):
    config = settings(classes_file(tmp_path / "a.csv"))
    fit(config, tmp_path / "whole")

    def stop(moment):
        if moment.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(config, tmp_path / "cut", callbacks=[stop])
    fit(config, tmp_path / "cut", resume=True)
    assert journal(tmp_path / "cut") == journal(tmp_path / "whole")
    whole, cut = (weights(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_step_on_pairs_compares_queries_with_all_documents(tmp_path):
    """The loss of a step is that of the queries against all documents of the batch, wrong ones included."""
    path = pairs_file(tmp_path / "p.csv", negatives=2)
    config = settings(path, batches={"name": "QueryPairs", "batch_size": 6})
    state = prepare(config, ALONE)
    _, (x, labels, indices) = next(load_batches(state))
    assert x.shape[0] == 4 * 6
    embeddings, scalars = state.step(x, state.target(labels))
    assert state.train.queries[indices[:6]].all()
    assert not state.train.queries[indices[6:]].any()
    plain = nf.losses.NTXent(temperature=0.07)(
        embeddings[:6], labels[:6], ref_emb=embeddings[6:], ref_labels=labels[6:]
    )
    torch.testing.assert_close(scalars["loss"], plain)
    scores = embeddings[:6] @ embeddings[6:].T / 0.07
    torch.testing.assert_close(plain, torch.nn.functional.cross_entropy(scores, torch.arange(6)))
    found = fit(config, tmp_path / "run")
    data = open_data(None, path).test
    assert found.test.queries == int(data.queries.sum())
    assert len(np.load(tmp_path / "run" / "embeddings.npz")["x"]) == len(data)


def test_chunks_of_pairs_give_the_same_step(tmp_path):
    path = pairs_file(tmp_path / "p.csv", negatives=1)
    rows = []
    for chunk in (None, 5):
        changes = {"training": {**PLAN, "chunk": chunk}, "optimizer": {"name": "sgd", "lr": 1.0}}
        state = prepare(settings(path, batches={"name": "QueryPairs", "batch_size": 6}, **changes), ALONE)
        _, (x, labels, _) = next(load_batches(state))
        state.step(x, state.target(labels))
        rows.append(state.bare_model.state_dict()["head.weight"])
    torch.testing.assert_close(*rows, atol=1e-6, rtol=0)


def test_pairs_teach_a_translation(tmp_path):
    """Queries and documents share no word; held-out queries combine words that other pairs have taught."""
    rows = [(f"red{a} blue{b}", f"rot{a} blau{b}") for a in range(8) for b in range(8)]
    path = write_csv(tmp_path / "p.csv", ("query", "document"), rows)
    plan = {**PLAN, "steps": 80, "evaluate_every": 40}
    config = settings(path, batches={"name": "QueryPairs", "batch_size": 32}, training=plan)
    found = fit(config, tmp_path / "run")
    (start,) = (line["baselines"] for line in journal(tmp_path / "run") if "baselines" in line)
    assert start["untrained"] < 0.4
    assert found.test.recall[1] > 0.9


@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
def test_a_transformer_trains(precision, tmp_path):
    pytest.importorskip("transformers")
    folder = encoder_folder(tmp_path / "encoder")
    model = {"name": f"text:{folder}", "embedding_dim": None}
    plan = {**PLAN, "steps": 4, "precision": precision, "chunk": 4}
    found = fit(settings(classes_file(tmp_path / "a.csv"), model=model, training=plan), tmp_path / "run")
    assert found.finished
    (folder / "config.json").unlink()
    assert open_run(tmp_path / "run").model is not None, "a run does not need the folder"


def test_two_encoders_train_apart(tmp_path):
    pytest.importorskip("transformers")
    names = {
        side: f"text:{encoder_folder(tmp_path / side, seed=seed)}" for seed, side in enumerate(("query", "document"))
    }
    config = settings(
        pairs_file(tmp_path / "p.csv"),
        model={**names, "embedding_dim": None},
        batches={"name": "QueryPairs", "batch_size": 6},
        training={**PLAN, "steps": 6},
    )
    before = prepare(config, ALONE).bare_model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    assert fit(config, tmp_path / "run").finished
    after = open_run(tmp_path / "run").model.state_dict()
    for side in names:
        name = next(key for key in before if key.startswith(f"trunk.{side}.network") and "word_embeddings" in key)
        assert not torch.equal(before[name], after[name])


def test_the_kind_of_texts_chooses_the_recipe(tmp_path):
    classes, pairs = classes_file(tmp_path / "a.csv"), pairs_file(tmp_path / "p.csv")
    found, words = default_config([("data.path", str(classes))])
    assert (found.data.name, found.model.name, found.model.embedding_dim) == ("texts", "text:static", None)
    assert "texts with classes, from the columns text and label" in words
    found, words = default_config([("data.path", str(pairs)), ("batches.batch_size", "6")])
    assert found.batches.name == "QueryPairs"
    assert found.batches.options == {"batch_size": 6}
    flags = [("data.path", str(pairs)), ("model.query", "text:a"), ("model.document", "text:b")]
    found, words = default_config(flags)
    assert (found.model.name, found.model.query) == (None, "text:a")


def test_what_does_not_fit_is_one_sentence(tmp_path):
    classes, pairs = classes_file(tmp_path / "a.csv"), pairs_file(tmp_path / "p.csv")
    cases = [
        (settings(pairs), "the data hold pairs, and batches is MPerClass; take --batches QueryPairs"),
        (settings(classes, batches={"name": "QueryPairs"}), "the data hold no pairs, and batches is QueryPairs"),
        (settings(classes, model={"name": "mlp"}), "the data hold texts, for which model.name must be text:static"),
        (
            settings(pairs, batches={"name": "QueryPairs"}, loss={"name": "ProxyAnchor"}),
            "a loss with proxies is for classes",
        ),
    ]
    for config, words in cases:
        with pytest.raises(ValueError, match=words):
            fit(config, tmp_path / "run")
    with pytest.raises(ValueError, match="two encoders of texts"):
        load(None, [("model.query", "text:a")])
