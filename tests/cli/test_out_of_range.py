"""Numbers out of range (seeds, rows, widths, batches, processes) are refused in one sentence before any work."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from needs import need
from runs import config, tiny
from shell import run

import nearfar as nf
from nearfar import batches, doctor, evaluation, geometry, report
from nearfar._utils import memory
from nearfar._utils.checks import check_seed
from nearfar._utils.memory import check_room, free_memory
from nearfar._utils.workers import Workers
from nearfar.data import View, class_disjoint
from nearfar.distributed._cross_batch_memory import bytes_of
from nearfar.train import fit, parse
from nearfar.train._dry_run import dry_run

X, Y = torch.eye(8), torch.arange(8) // 2
SEEDED = {
    "config": lambda seed: parse({"training": {"seed": seed}}),
    "evaluate": lambda seed: nf.evaluate(X, Y, seed=seed),
    "compare": lambda seed: evaluation.compare(nf.evaluate(X, Y), nf.evaluate(X, Y), seed=seed),
    "verification": lambda seed: evaluation.verification(X, Y, seed=seed),
    "diagnose": lambda seed: doctor.diagnose(X, Y, seed=seed),
    "build_index": lambda seed: evaluation.build_index("nowhere", evaluation.Vectors(X), seed=seed),
    "report": lambda seed: report.build((X, Y), seed=seed),
    "MPerClass": lambda seed: batches.MPerClass(Y, classes=2, samples=2, seed=seed),
    "MinedNegatives": lambda seed: batches.MinedNegatives(Y, batch_size=4, seed=seed),
    "Representatives": lambda seed: batches.Representatives(Y, batch_size=4, seed=seed),
    "View": lambda seed: View(nf.data.Tensors(X, Y), lambda x, generator: x, seed=seed),
    "class_disjoint": lambda seed: class_disjoint(nf.data.Tensors(X, Y), 0.5, seed=seed),
    "thickness": lambda seed: geometry.thickness(X, seed=seed),
    "collapse": lambda seed: geometry.collapse(X, Y, seed=seed),
    "isometric_error": lambda seed: geometry.isometric_error(X, Y, seed=seed),
    "hausdorff_distance": lambda seed: geometry.hausdorff_distance(X, Y, seed=seed),
}


@pytest.mark.parametrize("where", SEEDED)
@pytest.mark.parametrize("seed", [10**24, 2**63, -1, 1.5, "3", True])
def test_a_seed_that_no_generator_takes_is_refused(where, seed):
    with pytest.raises(ValueError, match=r"seed must be a whole number") as caught:
        SEEDED[where](seed)
    said = str(caught.value)
    assert said.startswith(f"{where}: ")
    assert said.endswith(f"but came as {seed!r}.")
    assert "\n" not in said


@pytest.mark.parametrize("where", sorted(set(SEEDED) - {"build_index", "report"}))
def test_the_largest_seed_is_taken(where):
    SEEDED[where](2**63 - 1)


def test_the_largest_seed_trains_and_draws(tmp_path):
    check_seed("f", np.int64(3))
    assert fit(config(training={"seed": 2**63 - 1, "steps": 2}), tmp_path / "r", data=tiny()).finished
    need("sklearn")
    assert "<html" in report.build((torch.randn(40, 8), torch.arange(40) % 8), seed=2**63 - 1)


@pytest.mark.parametrize("words", [["evaluate", "v.npz"], ["report", "v.npz"], ["diagnose", "v.npz"],
                                   ["train", "--run", "r"]])  # fmt: skip
def test_the_command_line_says_so_too(words, tmp_path):
    np.savez(tmp_path / "v.npz", x=X.numpy(), y=Y.numpy())
    option = "--training.seed" if words[0] == "train" else "--seed"
    said = run(tmp_path, *words, option, 10**24, code=1)
    assert f"seed must be a whole number from 0 to 2^63 - 1, but came as {10**24}." in said


GIB = 2**30


@pytest.fixture
def gibibyte(monkeypatch):
    monkeypatch.setattr(memory, "_free_on_host", lambda: iter([GIB]))


def test_a_memory_that_cannot_be_held_is_refused_before_it_is_allocated(gibibyte):
    with pytest.raises(
        ValueError, match=r"^CrossBatchMemory: size=1,000,000,000 would take 37\.3 GiB of memory, but 1"
    ):
        nf.CrossBatchMemory(nf.losses.Contrastive(), size=10**9)
    held = nf.CrossBatchMemory(nf.losses.Contrastive(), size=10**6)
    with pytest.raises(ValueError, match=r"^CrossBatchMemory: size=1,000,000 rows of width 128 would take 3\.4 GiB"):
        held(torch.randn(8, 128), Y)
    assert not len(held.embeddings)
    assert torch.isfinite(held(torch.randn(8, 16), Y))


PROXIED = ["ArcFace", "CosFace", "NormalizedSoftmax", "ProxyAnchor", "ProxyNCA", "SoftTriple", "SubCenterArcFace"]


@pytest.mark.parametrize("name", PROXIED)
def test_proxies_that_cannot_be_held_are_refused_before_they_are_allocated(name, gibibyte):
    loss = getattr(nf.losses, name)
    width = 128 * getattr(loss(2, 128), "centers", 1)
    with pytest.raises(ValueError, match=rf"^{name}: classes=10,000,000 of width {width:,} would take [\d.,]+ GiB of"):
        loss(10**7, 128)
    with torch.device("meta"):
        assert loss(10**7, 128).proxies.is_meta


BIG = {
    "training.cross_batch_memory": ({"training": {"cross_batch_memory": 10**9}}, "of 1,000,000,000 rows of width 4"),
    "batches": ({"batches": {"name": "MPerClass", "classes": 4, "samples": 10**8}}, r"with 400,000,000 samples \[8\]"),
    "a sampler's": (
        {"batches": {"name": "Representatives", "batch_size": 10**8}, "loss": {"name": "Contrastive"}},
        r"batches with 100,000,000 samples \[8\]",
    ),
    "embedding_dim": ({"model": {"embedding_dim": 10**9}}, "embedding_dim=1,000,000,000 from 16 features"),
    "hidden": ({"model": {"hidden": 10**9}}, "hidden=1,000,000,000 from 8 features"),
}


@pytest.mark.parametrize("what", BIG)
def test_what_a_run_cannot_hold_is_refused_before_it_begins(what, tmp_path, gibibyte):
    changes, words = BIG[what]
    for act in (fit, dry_run):
        with pytest.raises(
            ValueError, match=rf"{words}.* would take [\d.,]+ GiB of memory, but 1.0 GiB are free on cpu"
        ):
            act(config(**changes), tmp_path / "r", data=tiny())
    assert not (tmp_path / "r").exists()


def test_a_run_says_what_its_memory_will_take(tmp_path):
    lines = dry_run(config(training={"cross_batch_memory": 500}), tmp_path / "r", data=tiny()).lines
    assert f"a memory of 500 rows of width 4, {bytes_of(500, 4) / 1024:.1f} KiB once it is full" in lines
    assert not any("a memory of" in line for line in dry_run(config(), tmp_path / "r", data=tiny()).lines)


def test_a_full_memory_takes_about_what_is_said():
    """At least the rows that are remembered, and no more than a few copies of them."""
    size, width = 20_000, 64
    held = nf.CrossBatchMemory(nf.losses.Contrastive(engine="tiled"), size=size)
    for seed in range(3):
        torch.manual_seed(seed)
        held(torch.randn(size // 2, width), torch.arange(size // 2))
    buffers = sum(each.numel() * each.element_size() for each in (*held.buffers(), held._written))
    assert buffers <= bytes_of(size, width) <= 8 * buffers


@pytest.mark.parametrize(("section", "key"), [("data", "workers"), ("training", "threads")])
def test_more_processes_than_a_machine_bears_are_refused(section, key, tmp_path):
    for act in (fit, dry_run):
        with pytest.raises(ValueError, match=rf"^config: {section}\.{key} must be at most [\d,]+ on \d+ cores"):
            act(config(**{section: {key: 10**6}}), tmp_path / "r", data=tiny())
    with pytest.raises(ValueError, match=r"jobs must be at most"):
        Workers(print, 10**6)
    assert "--processes must be at most" in run(tmp_path, "train", "--processes", 10**6, code=1)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"embedding_dim": 0}}, "model.embedding_dim must be a whole number above zero, but came as 0"),
        ({"model": {"hidden": 0}}, "model.hidden must be a whole number above zero, but came as 0"),
        ({"training": {"threads": 0}}, "training.threads must be a whole number above zero, but came as 0"),
    ],
)
def test_widths_and_threads_are_checked_with_the_configuration(tree, words):
    with pytest.raises(ValueError, match=f"^config: {words}"):
        parse(tree)


def test_free_memory_heeds_the_limit_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:   3145728 kB\n", encoding="ascii")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUPS", [(str(tmp_path), "memory.max", "memory.current")])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 3 * GIB
    assert free_memory(torch.device("cpu")) == min(3 * GIB, physical)
    for name, text in (("max", "max\n"), ("current", str(GIB)), ("stat", f"anon 5\ninactive_file {GIB // 2}\n")):
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert free_memory(torch.device("cpu")) == min(3 * GIB, physical)
    (tmp_path / "memory.max").write_text(str(2 * GIB), encoding="ascii")
    assert free_memory(torch.device("cpu")) == min(3 * GIB // 2, physical)
    with pytest.raises(
        ValueError, match=r"^f: it would take 1,000\.0 GiB of memory, but .* GiB are free on cpu; ask for"
    ):
        check_room("f", "it", 1000 * GIB)


def test_without_a_word_of_the_system_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "_free_on_host", lambda: iter(()))
    check_room("f", "it", 10**30)
