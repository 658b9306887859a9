"""The study on photographs: equal budgets, one configuration tested once, tables from the runs' numbers."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from nearfar.runs import _parts as parts
from nearfar.studies import grid
from nearfar.studies._training import Method, open_study

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
QUALITY = ROOT / "benchmarks" / "quality"
if not QUALITY.exists():
    pytest.skip("benchmarks are not in a release", allow_module_level=True)
sys.path.insert(0, str(QUALITY))
import photographs  # noqa: E402
import photographs_statistics as statistics  # noqa: E402
import photographs_tables as pages  # noqa: E402
from ledger import Ledger  # noqa: E402
from photographs_methods import BASE, CLAIMS, METHODS, QUICK  # noqa: E402

RUNS = 3 * (2 + 1)  # of the tuning: three methods, two rates, one more value
HOW = {"data": "folder", "seeds": 2, "quick": True}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Decoded pictures of these tests are not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Twelve classes of six small pictures; half of the classes are for the test."""
    path = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(12):
        color = random.integers(0, 200, size=3)
        for place in range(6):
            noise = random.integers(0, 55, size=(32, 32, 3))
            (path / f"class{number:02d}").mkdir(exist_ok=True)
            Image.fromarray((color + noise).astype(np.uint8)).save(path / f"class{number:02d}" / f"{place}.png")
    return path


class _Sealed:
    """Samples that raise when one of them is read."""

    def __init__(self, samples):
        self.samples, self.labels, self.classes, self.names = samples, samples.labels, samples.classes, samples.names

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        raise AssertionError("a test sample was read")

    genuine = __getitem__


@pytest.fixture(scope="module")
def study(pictures, tmp_path_factory):
    """Tuned while test samples cannot be read, with results kept; then tested."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        opened = grid._open

        def sealed(*told):
            data = opened(*told)
            return replace(data, test=_Sealed(data.test))

        patch.setattr(grid, "_open", sealed)
        tuned = photographs.reproduce(folder, path=pictures, parts=["tuning"], **HOW)["folder"]
        other = tmp_path_factory.mktemp("sealed")
        shutil.copy(folder / "photographs.jsonl", other)
        failed = photographs.reproduce(other, path=pictures, methods=[BASE], **HOW)["folder"]
    return folder, tuned, failed, photographs.reproduce(folder, path=pictures, **HOW)["folder"]


def test_tuning_reads_no_test_sample(study):
    _, tuned, failed, _ = study
    assert [line["error"] for line in tuned["runs"]] == [None] * RUNS
    assert {line["held_out"] for line in tuned["runs"]} == {0.2}
    assert all(each["scores"]["runs"] == 0 for each in tuned["methods"].values())
    # the same seal stops what does read them, so it would have told
    errors = [line["error"] for line in failed["runs"] if not line["held_out"]]
    assert errors == ["AssertionError: a test sample was read"] * 2


def test_every_method_has_the_same_budget_and_is_tested_once(study):
    folder, _, _, found = study
    assert [line["error"] for line in found["runs"]] == [None] * (RUNS + 3 * 2)
    ledger = json.loads((folder / "photographs-folder-chosen.json").read_text(encoding="utf-8"))
    assert set(ledger) == set(QUICK) == set(found["methods"])
    assert {entry["budget"] for entry in ledger.values()} == {3}
    for name, entry in ledger.items():
        tested = [line for line in found["runs"] if line["method"] == name and not line["held_out"]]
        assert [line["config"]["training"]["seed"] for line in tested] == [0, 1]
        assert {line["config"]["optimizer"]["lr"] for line in tested} == {entry["rate"]}
        tuned = {
            (line["config"]["optimizer"]["lr"], line["config"]["loss"][METHODS[name].parameter]): line["scores"][
                "map_at_r"
            ]
            for line in found["runs"]
            if line["method"] == name and line["held_out"]
        }
        size = 5 * found["batch"][0] if METHODS[name].batches else 1
        assert tuned[entry["rate"], entry["value"] * size] == max(
            score for (rate, _), score in tuned.items() if rate == entry["rate"]
        )


def test_another_configuration_of_a_tested_method_is_refused(study, pictures):
    folder, _, _, _ = study
    before = (folder / "photographs.jsonl").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"may be tested with one configuration, in which .* is 6, but 7 came; go on"):
        photographs.reproduce(folder, path=pictures, steps=7, **HOW)
    assert (folder / "photographs.jsonl").read_text(encoding="utf-8") == before


def test_a_finished_study_runs_nothing(study, pictures, monkeypatch):
    folder, _, _, found = study
    monkeypatch.setattr(grid, "attempt", lambda trial: pytest.fail("a run began"))
    again = photographs.reproduce(folder, path=pictures, **HOW)["folder"]
    assert again["methods"] == found["methods"]
    assert json.loads((folder / "photographs-folder.json").read_text(encoding="utf-8"))["score"] == "map_at_r"


def test_no_run_begins_when_time_is_up(pictures, tmp_path):
    found = photographs.reproduce(tmp_path, path=pictures, seconds=-1.0, **HOW)["folder"]
    assert found["runs"] == []
    assert {each["chosen"] for each in found["methods"].values()} == {None}
    assert "0 runs" in pages.tables(found)


def test_tables(study):
    folder, _, _, found = study
    kept = json.loads((folder / "photographs-folder.json").read_text(encoding="utf-8"))
    page = pages.tables(kept)
    assert page == pages.tables(found)
    assert "| method | R@1 | R@2 | R@4 | R@8 | MAP@R | NMI | F1 | rate | parameter | tuning runs | test runs |" in page
    mean = np.mean(
        [line["scores"]["recall@1"] for line in found["runs"] if line["method"] == BASE and not line["held_out"]]
    )
    assert f"| {BASE} | {100 * mean:.1f} ± " in page
    assert "| DRO-TopK (hinge) beats MS |" in page
    assert (folder / "photographs-folder.png").read_bytes().startswith(b"\x89PNG")
    assert "| method | folder, by MAP@R | folder, by MAP@R | mean rank |" in pages.rank_table([found, found])


def test_test_scores_are_shown_when_hardly_any_is_missing(study):
    _, _, _, found = study
    page = pages.tables({**found, "seeds": found["seeds"] + 1})
    assert "The test is not complete: 6 of 9 runs." in page
    assert "| R@1 |" in page
    page = pages.tables({**found, "seeds": found["seeds"] + 2})
    assert "The test is not complete: 6 of 12 runs." in page
    assert "| R@1 |" not in page
    first, *_ = found["methods"]
    fewer = {**found["methods"][first], "scores": {**found["methods"][first]["scores"], "runs": 1}}
    page = pages.tables({**found, "methods": {**found["methods"], first: fewer}})
    assert "The test is not complete: 5 of 6 runs." in page
    assert "| R@1 |" not in page  # one method with a single seed
    lines = [line for line in page.splitlines() if line.startswith(f"| {BASE} |")]
    chosen = found["methods"][BASE]["chosen"]
    assert f"| {100 * max(chosen['held_out'].values()):.1f} |" in lines[0]


def test_the_best_value_and_what_the_default_costs():
    """Two data sets on which values differ; the default of Margin's beta is 1.2, chi-square's rho 40 batches."""
    beta = {"lr 5e-05": 0.50, "lr 2e-05": 0.1, "beta = 0.6": 0.52, "beta = 0.9": 0.55, "beta = 1.4": 0.40}
    other = {**beta, "beta = 0.6": 0.60, "lr 5e-05": 0.54}
    rho = {"lr 5e-05": 0.5, "rho = 4B": 0.6}
    studies = [
        {
            "data": name,
            "methods": {
                "margin": {"chosen": {"rate": 5e-5, "held_out": told}},
                "DRO-chi-square, hinge": {"chosen": {"rate": 5e-5, "held_out": rho}},
                "circle": {"chosen": None},
            },
        }
        for name, told in (("a", beta), ("b", other))
    ]
    text = pages.value_table(studies)
    assert "| margin | beta | 1.2 | 0.6 | 0.9 | 0.6 | 4.0 |" in text  # 56 and 52 on average
    assert "| DRO-chi-square, hinge | rho | 40B | 4B | 4B | 4B | 10.0 |" in text
    assert "circle" not in text
    assert METHODS["margin"].default == 1.2


def test_the_page_of_losses_is_written_from_the_results():
    results = QUALITY.parent / "results"
    found = [
        json.loads((results / f"photographs-{name}.json").read_text(encoding="utf-8")) for name in ("cub", "flowers")
    ]
    page = (ROOT / "docs" / "guides" / "which-loss.md").read_text(encoding="utf-8")
    assert pages.value_table(found) in page


def test_the_difference_is_that_of_the_scores(study):
    _, _, _, found = study
    runs = {name: [line for line in found["runs"] if line["method"] == name and not line["held_out"]] for name in QUICK}
    step = found["methods"]["triplet, hard"]["difference"]["recall@1"]
    plain = [
        b["scores"]["recall@1"] - a["scores"]["recall@1"]
        for a, b in zip(runs[BASE], runs["triplet, hard"], strict=True)
    ]
    assert step["mean"] == pytest.approx(100 * np.mean(plain), abs=0.02)  # classes are kept with four digits
    assert step["low"] <= step["mean"] <= step["high"]
    assert (step["seeds"], step["classes"]) == (2, 6)


def test_a_line_is_small_and_tells_the_course(study):
    _, _, _, found = study
    for line in found["runs"]:
        assert len(json.dumps(line)) < 6000
        assert line["journal"]["loss"][-1][0] == 6
        assert line["journal"]["looks"][0][0] == 0
        assert line["device"] in ("CPU",) or line["peak_memory"] > 0
        assert set(line["versions"]) == {"nearfar", "torch", "python"}
        assert sum(line["classes"]["queries"]) == line["queries"]


def test_intervals_over_seeds_and_classes():
    random = np.random.default_rng(0)
    many, even = np.ones(50), np.full((4, 50), 0.3)
    assert statistics.bootstrap(even, many) == pytest.approx((0.3, 0.3))
    by_class = np.tile(random.normal(size=50), (4, 1))
    by_seed = np.tile(random.normal(size=(4, 1)), (1, 50))
    for steps, units in ((by_class, by_class[0]), (by_seed, by_seed[:, 0])):
        low, high = statistics.bootstrap(steps, many)
        error = units.std() / np.sqrt(len(units))
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.25)
        assert low < units.mean() < high
    heavy = np.array([[1.0, 0.0]])
    assert statistics.bootstrap(np.repeat(heavy, 2, 1), np.array([9.0, 9, 1, 1]))[1] == 1.0


def line(score, held_out=0.0, **findings):
    course = {name.replace("_", " "): {"severity": s, "first": at, "last": at} for name, (s, at) in findings.items()}
    return {"error": None, "held_out": held_out, "scores": {"recall@1": score}, "journal": {"findings": course}}


def test_the_doctors_record():
    lines = [
        ("a", line(0.60)),
        ("a", line(0.59, total_collapse=("alarm", 40))),  # a false alarm
        ("b", line(0.10, total_collapse=("alarm", 20), few_pull=("note", 20))),
        ("b", line(0.20, class_collapse=("alarm", 60))),
        ("b", line(0.30)),  # nobody said so
        ("b", line(0.30, held_out=0.2)),  # the best of the tuning
        ("b", line(0.0) | {"error": "ValueError"}),
    ]
    found = statistics.record(lines, "recall@1")
    assert found["a"] == {"runs": 2, "named": 1, "collapsed": 1, "false": 1, "missed": 0, "step": 40} | {
        "names": {"total collapse": 1}
    }
    assert (found["b"]["runs"], found["b"]["named"], found["b"]["missed"], found["b"]["false"]) == (4, 2, 1, 0)
    assert found["b"]["step"] == 40
    assert found["b"]["names"] == {"total collapse": 1, "class collapse": 1}


def test_one_seed_has_no_verdict():
    """With one seed the bootstrap draws classes alone, which says nothing about other seeds."""
    one, two = (SimpleNamespace(key=key) for key in "ab")
    scores = {"a": [0.1] * 9, "b": [0.2] * 9}
    known = {key: {"classes": {"queries": [5] * 9, "recall@1": found}} for key, found in scores.items()}
    verdicts = [statistics.difference(known, [one] * n, [two] * n, "recall@1")["verdict"] for n in (1, 2)]
    assert verdicts == ["cannot tell", "better"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_at_every_value_is_a_loss(name, pictures, tmp_path):
    tuned = METHODS[name]
    assert len(set(tuned.values)) == (4 if tuned.parameter else 1)
    assert tuned.default in tuned.values
    how = {"data": "folder", "path": pictures, "seeds": 1, "jobs": 1, "quick": False, "seconds": None}
    with open_study("photographs", tmp_path, **how) as study:
        for value in tuned.values:
            method = tuned.at(value, batch=80, steps=600)
            config = study.config(method, study.per_class(80, 5), steps=600, rate=5e-5, loss_lr_mult=tuned.loss_lr_mult)
            parts.check(config)
            parts.make_loss(config, classes=8)
            assert (config.model.name, config.model.embedding_dim, config.model.freeze_norms) == ("lite0", 512, True)
            assert (config.optimizer.warmup, config.training.baselines) == (50, False)


def test_the_plan_is_the_issues():
    assert len(METHODS) == 29
    assert METHODS["semi-hard pairs"].at(0.3, batch=80, steps=600).loss["miner"] == {"name": "SemiHard", "margin": 0.3}
    assert METHODS["LS"].at(0.0, batch=80, steps=600).loss == {
        "name": "GeneralizedLifted",
        "margin": 0.0,
        "similarity": "Cosine",
    }
    assert {("MS beats LS", BASE, "LS"), ("DRO-KL-G beats LS", "DRO-KL-G, hinge", "LS")} <= {*CLAIMS}
    assert METHODS["DRO-TopK, hinge"].at(8.0, batch=80, steps=600).loss["k"] == 640
    assert METHODS["triplet, hard, annealed"].at(0.2, batch=80, steps=600).loss["anneal"] == 300
    assert METHODS["DRO-TopK-PN, binomial"].label(0.5) == "k = 0.5B"
    assert {name for _, *names in CLAIMS for name in names} <= set(METHODS)


def test_the_ledger_keeps_what_was_first(tmp_path):
    from nearfar.train import parse

    ledger, config = Ledger(tmp_path / "chosen.json"), parse({"loss": "Margin"})
    ledger.fix("margin", config, {"rate": 1e-3})
    again = Ledger(tmp_path / "chosen.json")
    assert again["margin"]["rate"] == 1e-3
    again.fix("margin", parse({"loss": "Margin", "training": {"seed": 4}, "data": {"path": "elsewhere"}}), {})
    with pytest.raises(
        ValueError, match=r"'margin' may be tested with one configuration, in which optimizer\.lr is 0\.001"
    ):
        again.fix("margin", parse({"loss": "Margin", "optimizer": {"lr": 0.1}}), {})
    assert "contrastive" not in again
    kept = json.loads(again.file.read_text(encoding="utf-8"))
    del kept["margin"]["config"]["training.diagnose_every"]  # written before there was such a key
    again.file.write_text(json.dumps(kept), encoding="utf-8")
    older = Ledger(again.file)
    older.fix("margin", config, {})
    with pytest.raises(ValueError, match=r"in which loss\.margin is None, but 0\.3 came"):
        older.fix("margin", parse({"loss": {"name": "Margin", "margin": 0.3}}), {})


def test_a_choice_waits_for_runs_that_failed_for_another_reason_than_their_own(study):
    folder, _, _, _ = study
    known = grid.lines(folder / "photographs.jsonl")
    keys = [key for key, each in known.items() if each["held_out"]][:3]
    trials = {value: SimpleNamespace(key=key) for value, key in enumerate(keys)}
    plan = photographs.Tuning(SimpleNamespace(data="folder"), Ledger(folder / "none.json"), (), 6)

    def scored(*scores):
        return {key: {"error": None, "scores": {"map_at_r": score}} for key, score in zip(keys, scores, strict=False)}

    assert plan.best(scored(0.1, 0.3, 0.3), trials) == 1  # the first of equal ones
    assert plan.best(scored(0.1, 0.3), trials) is None  # one is missing
    failed = {"error": "OutOfMemoryError: CUDA out of memory", "scores": {}}
    assert plan.best(scored(0.1, 0.3, 0.2) | {keys[2]: failed}, trials) is None
    lost = {"error": "NotFiniteError: train: the loss was nan at step 3", "scores": {}}
    assert plan.best(scored(0.1, 0.3, 0.2) | {keys[1]: lost}, trials) == 2
    assert plan.best(dict.fromkeys(keys, lost), trials) is None


def test_claims_of_the_other_studies():
    step = {"mean": 1.0, "half": 0.5, "verdict": "better"}
    profs = {"study": "profs", "differences": {"N-pair": {"PROFS less plain": {"recall@1": step}}}}
    assert "| N-pair: PROFS beats plain | +1.0 ± 0.5 | holds |" in pages.claim_table(pages.paper_claims(profs))
    dro = {"study": "dro", "claims": [{"claim": "MS beats LS", "difference": step | {"verdict": "worse"}}]}
    assert "| MS beats LS | +1.0 ± 0.5 | does not |" in pages.claim_table(pages.paper_claims(dro))


def test_pages(study, tmp_path, monkeypatch):
    """The benchmark's script writes the part of a page between its marks, the results and the figures."""
    folder, _, _, found = study
    for name in ("images", "results"):
        (tmp_path / name).mkdir()
    page, which = tmp_path / "page.md", tmp_path / "which.md"
    for file in (page, which):
        file.write_text("# Before\n\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n", encoding="utf-8")
    told = ["photographs.py", "--from", str(folder / "photographs-folder.json"), "--page", str(page)]
    told += ["--which", str(which)]
    told += ["--images", str(tmp_path / "images"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", told)
    runpy.run_path(str(QUALITY / "photographs.py"), run_name="__main__")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Before")
    assert text.endswith("<!-- results: end -->\nafter\n")
    assert "\nold\n" not in text
    assert pages.summary([found]) in text
    assert pages.tables(found).rstrip() in (tmp_path / "results" / "photographs_study.md").read_text(encoding="utf-8")
    assert pages.value_table([found]) in which.read_text(encoding="utf-8")
    assert (tmp_path / "images" / "photographs-folder.png").is_file()
    kept = json.loads((tmp_path / "results" / "photographs-folder.json").read_text(encoding="utf-8"))
    assert len(kept["runs"]) == len(found["runs"])


def test_the_command(pictures, tmp_path, monkeypatch):
    told = ["photographs.py", "--data", "folder", "--path", str(pictures), "--folder", str(tmp_path / "new"), "--quick"]
    monkeypatch.setattr(sys, "argv", [*told, "--seconds", "-1", "--methods", BASE, "--seeds", "1"])
    photographs.main()
    kept = json.loads((tmp_path / "new" / "photographs-folder.json").read_text(encoding="utf-8"))
    assert (list(kept["methods"]), kept["seeds"]) == ([BASE], 1)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_scene_suits_the_machine(gpu, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    how = {"data": "folder", "path": pictures, "seeds": 1, "jobs": 1, "quick": False, "seconds": None}
    batches = {"name": "MPerClass", "classes": 4, "samples": 2}
    with open_study("dro", tmp_path, **how) as study, open_study("dro", tmp_path, **how, precision="fp16") as other:
        config = study.config(Method({"name": "Margin"}), batches, steps=100, rate=1e-4)
        assert config.training.precision == ("bf16" if gpu else "float32")
        assert config.optimizer.warmup == 25
        assert (config.optimizer.head_lr_mult, config.training.diagnose_every) == (10.0, None)
        changed = other.config(Method({"name": "Margin"}), batches, steps=100, rate=1e-4)
        assert changed.training.precision == "fp16"
        assert changed.training.baselines is False  # what was not told stays
    with open_study("dro", tmp_path, **how, weights=tmp_path / "lite0.pth") as study:
        config = study.config(Method({"name": "Margin"}), batches, steps=100, rate=1e-4)
        assert (config.model.weights, config.model.name) == (str(tmp_path / "lite0.pth"), "lite0")


def test_wrong_arguments(pictures, tmp_path):
    words: Sequence[tuple[dict[str, object], str]] = (
        ({"methods": ["MS"]}, "methods must be"),
        ({"parts": ["tune"]}, "parts must be"),
        ({}, "no path of cub or flowers came"),
    )
    for more, told in words:
        with pytest.raises(ValueError, match=told):
            photographs.reproduce(tmp_path, **more)


@pytest.mark.parametrize("topic", ["dro", "profs", "robustness", "photographs"])
def test_reports_are_written_from_the_results(topic):
    from study_tables import summary

    results = QUALITY.parent / "results"
    name = "noise" if topic == "robustness" else topic
    files = [each for each in (f"{name}-{data}.json" for data in ("glyphs", "omniglot", "vectors", "cub", "flowers"))
             if (results / each).exists()]  # fmt: skip
    found = [json.loads((results / file).read_text(encoding="utf-8")) for file in files]
    report = (QUALITY.parent / f"RESULTS-{topic}.md").read_text(encoding="utf-8")
    generated = pages.summary(found) if topic == "photographs" else summary(found)
    assert f"<!-- results: begin -->\n\n{generated.rstrip()}\n\n<!-- results: end -->" in report
