"""`nf.calibrate` against loops over all pairs, on a population that is known, and on input that is hostile."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import retrieval as oracle
from scipy.stats import beta, f, norm, t
from sklearn.metrics import roc_curve

import nearfar as nf
from nearfar.evaluation import Calibration, _trials

torch.set_num_threads(1)


def problem(classes=30, each=8, noise=0.7, seed=0, width=8):
    """Classes of unequal size and spread, in random order."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), rng.integers(2, 2 * each - 1, classes))
    y = rng.permutation(y)
    spread = noise * np.exp(0.3 * rng.normal(size=classes))[y, None]
    x = rng.normal(size=(classes, width))[y] + spread * rng.normal(size=(len(y), width))
    return torch.from_numpy(x), torch.from_numpy(y)


def pairs_of(x, y, ref=None, ref_y=None, similarity="cosine"):
    """Lists of (score, class, class) of the positive and of the negative pairs, by two loops."""
    S = oracle.scores(x.tolist(), (x if ref is None else ref).tolist(), similarity)
    other = y if ref is None else ref_y
    found = [(float(S[i, j]), int(y[i]), int(other[j])) for i in range(len(y))
             for j in (range(i) if ref is None else range(len(other)))]  # fmt: skip
    return [p for p in found if p[1] == p[2]], [p for p in found if p[1] != p[2]]


def searches_of(x, y):
    """The best right and the best wrong answer of each row among the others."""
    S, positive, negative = oracle.scores(x.tolist(), x.tolist(), "cosine"), [], []
    for i in range(len(y)):
        others = [(float(S[i, j]), int(y[i]), int(y[j])) for j in range(len(y)) if j != i]
        positive += [max(p for p in others if p[1] == p[2])] if any(p[1] == p[2] for p in others) else []
        negative.append(max(p for p in others if p[1] != p[2]))
    return positive, negative


def cut_at(negative, share):
    return sorted((p[0] for p in negative), reverse=True)[math.floor(share * len(negative) + 1e-9)]


def slow_guarantee(negative, touched, far, confidence, mutual=False):
    """The docstring of `nearfar.evaluation._thresholds` in loops."""
    best = 0.0
    for step in range(400):
        level = 10 ** (-step / 40)
        if level > far * (1 + 1e-9) or level * len(negative) < 1 - 1e-9:
            continue
        cut = cut_at(negative, level)
        accepted = [p for p in negative if p[0] > cut]
        if not accepted:
            continue
        rate = len(accepted) / len(negative)
        error = [sum((p[1] == c) + (p[2] == c) for p in accepted) - rate * n for c, n in touched.items()]
        alike = (
            [sum({*p[1:]} == {a, b} for p in accepted) ** 2 for a in touched for b in touched if a < b]
            if mutual
            else [0]
        )
        x = len(accepted) ** 2 / max(sum(e**2 for e in error) - sum(alike), sum(alike))
        nu = max(1.0, sum(e**2 for e in error) ** 2 / sum(e**4 for e in error) - 1)
        x *= (norm.ppf(confidence) / t.ppf(confidence, nu)) ** 2
        if x > 0.05:
            best = max(best, level / f.ppf(confidence, 2 * x, 2 * x))
    return cut_at(negative, best) if best * len(negative) >= 1 else math.inf


def count_touched(negative):
    classes = sorted({c for p in negative for c in p[1:]})
    return {c: sum((p[1] == c) + (p[2] == c) for p in negative) for c in classes}


def check(found, positive, negative, touched, far, confidence=0.95, mutual=False):
    assert (found.positive, found.negative) == (len(positive), len(negative))
    assert found.threshold == pytest.approx(cut_at(negative, far), abs=1e-6)
    assert found.guaranteed == pytest.approx(slow_guarantee(negative, touched, far, confidence, mutual), abs=1e-6)
    for bar, cut in ((found.tar, found.threshold), (found.guaranteed_tar, found.guaranteed)):
        assert bar.value == pytest.approx(sum(p[0] > cut for p in positive) / len(positive), abs=1e-9)
    scores = np.array([p[0] for p in positive + negative])
    fpr, tpr, _ = roc_curve(np.repeat([1, 0], [len(positive), len(negative)]), scores, drop_intermediate=False)
    place = np.argmin(np.abs(fpr - (1 - tpr)))
    assert found.eer == pytest.approx((fpr[place] + 1 - tpr[place]) / 2, abs=2e-3)
    assert found.tar.value == pytest.approx(tpr[fpr <= far + 1e-12].max(), abs=1e-9)
    for cut, false, true in found.curve:
        assert false == pytest.approx(np.mean([p[0] > cut for p in negative]), abs=1e-9)
        assert true == pytest.approx(np.mean([p[0] > cut for p in positive]), abs=1e-9)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_equals_loops_over_all_pairs(similarity):
    x, y = problem()
    positive, negative = pairs_of(x, y, similarity=similarity)
    found = nf.calibrate(x, y, 0.03, similarity=similarity)
    assert found.threshold < found.guaranteed < math.inf
    check(found, positive, negative, count_touched(negative), 0.03)


def test_a_gallery_equals_loops():
    """Some classes are in the queries only, and some in the gallery only."""
    (x, y), (ref, ref_y) = problem(), problem(seed=1)
    positive, negative = pairs_of(x, y, ref, ref_y + 4)
    found = nf.calibrate(x, y, 0.05, ref_emb=ref, ref_labels=ref_y + 4)
    check(found, positive, negative, count_touched(negative), 0.05)
    assert found.classes == 34


def test_searches_equal_loops():
    """With each class as large a share of the wrong answers as it has rows."""
    x, y = problem(60, 6, 0.3)
    positive, negative = searches_of(x, y)
    sizes = dict(enumerate(np.bincount(y).tolist()))
    total = sum(sizes.values())
    touched = {c: n + sum(m * n / (total - m) for d, m in sizes.items() if d != c) for c, n in sizes.items()}
    found = nf.calibrate(x, y, 0.3, per="query")
    assert sum(touched.values()) == pytest.approx(2 * total)
    check(found, positive, negative, touched, 0.3, mutual=True)
    again = nf.calibrate(x, y, 0.3, per="query", ref_emb=x + 0, ref_labels=y)
    assert again.threshold == pytest.approx(found.threshold)  # what is wrong is the same; right is now each row itself
    assert again.tar.value == 1


def test_pair_lists_equal_rows():
    x, y = problem()
    positive, negative = pairs_of(x, y)
    listed = positive + negative
    classes = [p[1:] for p in listed]
    ours = nf.calibrate(x, y, 0.03)
    found = nf.evaluate_pairs([p[0] for p in listed], [a == b for a, b in classes], classes, 0.03)
    assert found.guaranteed == pytest.approx(ours.guaranteed, abs=1e-6)
    assert found.tar.value == pytest.approx(ours.tar.value)
    assert found.tar.high == pytest.approx(ours.tar.high)
    assert found.effective == pytest.approx(ours.effective)
    blind = nf.evaluate_pairs(
        torch.tensor([p[0] for p in listed]), torch.tensor([a == b for a, b in classes]), far=0.03
    )
    assert (blind.guaranteed, blind.rate, blind.effective, blind.classes) == (None, None, None, 0)
    assert blind.threshold == pytest.approx(ours.threshold, abs=1e-6)
    assert blind.usable == blind.threshold
    assert "not known" in repr(blind)


@pytest.mark.parametrize("per", ["pair", "query"])
def test_tiles_change_nothing(monkeypatch, per):
    x, y = problem()
    whole = nf.calibrate(x, y, 0.02, per=per)
    monkeypatch.setattr(_trials, "TILE", 1000)
    asked = []
    found = nf.calibrate(x, y, 0.02, per=per, watch=lambda *words: asked.append(words))
    assert len(asked) > 20
    assert asked[-1][1:] == (len(x), len(x))
    assert (found.positive, found.negative, found.tar) == (whole.positive, whole.negative, whole.tar)
    assert (found.threshold, found.guaranteed) == pytest.approx((whole.threshold, whole.guaranteed))


def test_order_and_names_of_classes_do_not_matter():
    x, y = problem()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    ours, theirs = nf.calibrate(x, y, 0.02), nf.calibrate(x[order], 7 * y[order] - 3, 0.02)
    assert theirs.guaranteed == pytest.approx(ours.guaranteed)
    assert (theirs.tar, theirs.eer, theirs.kind) == (ours.tar, ours.eer, ours.kind)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(0.002, 0.3), st.floats(0.002, 0.3), st.floats(0.55, 0.99), st.floats(0.55, 0.99)
)
def test_stricter_wishes_never_give_laxer_thresholds(seed, far, other, confidence, more):
    x, y = problem(12, 5, seed=seed)
    less, most = sorted((far, other))
    strict, lax = nf.calibrate(x, y, less), nf.calibrate(x, y, most)
    assert strict.threshold >= lax.threshold
    assert strict.guaranteed >= lax.guaranteed
    sure, unsure = (nf.calibrate(x, y, far, level) for level in sorted((confidence, more), reverse=True))
    assert sure.guaranteed >= unsure.guaranteed >= unsure.threshold
    assert sure.rate.low <= unsure.rate.low <= far + 1e-12
    assert unsure.rate.high <= sure.rate.high


def test_the_guarantee_holds_on_a_known_population():
    """On 100 pairs of halves; the point threshold exceeds its wish in about half of them."""
    realized = []
    for draw in range(100):
        (x, y), (new, new_y) = problem(40, 4, seed=2 * draw), problem(40, 4, seed=2 * draw + 1)
        found = nf.calibrate(x, y, 0.01)
        S = torch.nn.functional.normalize(new) @ torch.nn.functional.normalize(new).T
        negative = S[(new_y[:, None] < new_y)]
        realized.append([(negative > cut).double().mean().item() / 0.01 for cut in (found.threshold, found.guaranteed)])
    point, sure = np.array(realized).T
    beyond = int((sure > 1).sum())
    assert beta.ppf(0.025, beyond, 101 - beyond) <= 0.05 if beyond else True
    assert np.median(sure) >= 0.3
    assert 0.3 < (point > 1).mean() < 0.7


def test_what_a_smaller_rate_guarantees_a_larger_one_does_too():
    """Half of the accepted pairs are of two classes alone, so that nothing is known about the larger rate by itself."""
    rng, n = np.random.default_rng(0), 4000
    first = rng.integers(60, size=n)
    classes = np.stack([first, (first + rng.integers(1, 60, n)) % 60], axis=1)
    scores = np.linspace(0.8, -1, n)
    classes[40:80] = 0, 1
    negative = [(s, a, b) for s, (a, b) in zip(scores.tolist(), classes.tolist(), strict=True)]
    found, less = (
        nf.evaluate_pairs([0.9, *scores], [1, *[0] * n], [(0, 0), *classes.tolist()], far) for far in (0.02, 0.01)
    )
    assert found.effective < 4.5 < less.effective
    assert found.guaranteed <= less.guaranteed < math.inf
    assert found.guaranteed == pytest.approx(slow_guarantee(negative, count_touched(negative), 0.02, 0.95), abs=1e-6)


def test_pairs_of_one_class_are_worth_fewer():
    """Copies of each sample make more pairs, and no more independent ones."""
    x, y = problem()
    once, thrice = nf.calibrate(x, y, 0.02), nf.calibrate(x.repeat(3, 1), y.repeat(3), 0.02)
    assert thrice.negative == 9 * once.negative
    assert thrice.effective == pytest.approx(once.effective, rel=0.02)
    assert thrice.guaranteed == pytest.approx(once.guaranteed, abs=0.02)


def test_ties_at_the_top_are_refused():
    """Two classes that are the same points: no threshold tells them apart, and none below is taken."""
    x = torch.eye(4).repeat_interleave(3, dim=0)
    y = torch.tensor([0] * 3 + [1] * 3 + [2] * 3 + [3] * 3)
    x[3:6] = x[:3]
    found = nf.calibrate(x, y, 0.02)
    assert (found.threshold, found.tar.value, found.guaranteed) == (1.0, 0.0, math.inf)
    with pytest.raises(ValueError, match="4 classes with 54 negative pairs are too few to guarantee"):
        _ = found.usable
    assert "none, because 4 classes are too few" in repr(found)
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Calibration.from_dict(record).to_dict() == found.to_dict()
    assert record["guaranteed"] == "inf"


def test_one_class_with_two_samples_has_no_interval(tmp_path):
    x, y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7])
    found = nf.calibrate(x, y, 0.2)
    assert math.isnan(found.tar.error)
    again = Calibration.load(found.save(tmp_path / "c.json"))
    assert math.isnan(again.tar.low)
    assert again.threshold == found.threshold


def test_lone_queries_have_no_right_answer():
    x, y = problem(20, 4)
    found = nf.calibrate(
        torch.cat([x, torch.randn(3, 8)]), torch.cat([y, torch.tensor([50, 51, 52])]), 0.1, per="query"
    )
    assert (found.positive, found.negative) == (len(y), len(y) + 3)


def test_a_file_keeps_everything(tmp_path):
    x, y = problem()
    found = nf.calibrate(nf.evaluation.Vectors(x, y, fingerprint="ab/cd"), far=0.03)
    again = Calibration.load(found.save(tmp_path / "c.json"))
    assert again == found
    assert again.fingerprint == "ab/cd"
    assert "holds for at least as many new classes of the same population" in repr(again)


@pytest.mark.parametrize(
    "change",
    [{"threshold": "low"}, {"knots": [[1]]}, {"knots": []}, {"tar": None}, {"guaranteed": "nan"}, {"eer": None},
     {"fingerprint": "no"}, {"more": 1}, {"curve": 3}, {"far": "inf"}, {"threshold": math.nan}],
)  # fmt: skip
def test_what_is_no_calibration_is_refused(tmp_path, change):
    record = nf.calibrate(*problem(), 0.03).to_dict() | change
    path = tmp_path / "c.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^Calibration: this is no calibration; make one .*\(in .*c.json\)\.$"):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '"far"', "[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^Calibration: this is no "):
        Calibration.load(path)


X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) // 3
NAN = torch.where(torch.arange(12)[:, None] == 5, torch.nan, X)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((NAN, Y, 0.1), "embeddings .*5"),
        ((X, Y * 0, 0.1), "calibrate: there are no negative pairs; pass at least two classes"),
        ((X, torch.arange(12), 0.1), "calibrate: there are no positive pairs"),
        ((X, Y, 1e-3), r"calibrate: far=0.001 is less than one of 54 negative pairs; pass 0.019 or more"),
        ((X, Y, 0), "far must be a share between 0 and 1"),
        ((X, Y, math.nan), "far must be a share between 0 and 1"),
        ((X, Y, 0.1, 0.5), "confidence must lie between 0.5 and 1"),
        ((X, Y, 0.1, 1.0), "confidence must lie between 0.5 and 1"),
        ((X, None, 0.1), "labels are needed"),
        ((X[:0], Y[:0], 0.1), "no rows"),
    ],
)
@pytest.mark.parametrize("per", ["pair", "query"])
def test_hostile_rows_are_named(given, words, per):
    if per == "query":
        words = words.replace("54 negative pairs; pass 0.019", "12 negative pairs; pass 0.083")
    with pytest.raises(ValueError, match=words):
        nf.calibrate(*given, per=per)


def test_more_pairs_than_are_held_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="per must be one of 'pair', 'query'"):
        nf.calibrate(X, Y, 0.1, per="class")
    monkeypatch.setitem(nf.calibrate.__globals__, "HELD", 5)
    with pytest.raises(ValueError, match=r"far=0\.5 of 72 pairs is more than 5 pairs, .* pass a smaller far"):
        nf.calibrate(X, Y, 0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([0.1, math.nan], [0, 1]), "scores must be finite, but 1 are NaN or infinite"),
        (([0.1, 0.2], [0, 1, 1]), r"one entry per pair, but came with shapes \[2\] and \[3\]"),
        (([], []), "one entry per pair"),
        (([0.1, 0.2], [0, 2]), "same must hold truth values, or 0 and 1"),
        (([0.1, 0.2], ["a", "b"]), "same must hold truth values, or 0 and 1"),
        (([0.1, 0.2], [1, 1]), "there are no negative pairs"),
        (([0.1, 0.2], [0, 0]), "there are no positive pairs"),
        (([0.1, 0.2], [0, 1], [[0, 1], [1, 2]]), "classes must be integers .* or disagree"),
        (([0.1, 0.2], [0, 1], [0, 1]), r"classes must be integers \[2, 2\]"),
        (([0.1, 0.2], [0, 1]), "far=0.001 is less than one of 1 negative pairs"),
    ],
)
def test_hostile_pairs_are_named(given, words):
    with pytest.raises(ValueError, match=words):
        nf.evaluate_pairs(*given)
