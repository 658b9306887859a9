"""benchmarks/RESULTS-speed.md: its tables and figures are those of the results, today's and those of a GPU session."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nearfar.bench import Cell, Plan, Row
from nearfar.bench._pages import keep
from nearfar.bench._study import about

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
sys.path.insert(0, str(ROOT / "benchmarks" / "speed"))
import speed_report as page  # noqa: E402

TEXT = page.PAGE.read_text(encoding="utf-8")


def test_figures_are_those_of_the_results():
    assert page.fill_blocks(TEXT) == TEXT, "run: python benchmarks/speed/speed_report.py"
    line = next(line for line in TEXT.splitlines() if line.startswith("| MultiSimilarity + miner |"))
    assert page.fill_blocks(TEXT.replace(line, "| by hand |")) == TEXT


@pytest.mark.parametrize("name", page.pictures())
def test_pictures_are_drawn_from_the_results(name):
    source = (page.IMAGES / f"{name}.source").read_text(encoding="utf-8").strip()
    assert source == page.digest(page.pictures()[name][0]), "run: python benchmarks/speed/speed_report.py"
    assert (page.IMAGES / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_block_is_on_the_page_once():
    for make in page.BLOCKS:
        assert TEXT.count(f"<!-- {make.__name__} -->") == TEXT.count(f"<!-- /{make.__name__} -->") == 1


# What a session brings


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Results of a session that nobody has run, beside copies of today's."""
    results, folder = tmp_path / "results", tmp_path / "session"
    results.mkdir()
    folder.mkdir()
    for name in ("bench_cpu.json", "gathered_cpu.md", "rank_work_cpu.md"):
        (results / name).write_text((page.RESULTS / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(page, "RESULTS", results)
    plan = Plan(losses=("SupCon",), width=512, engines=("auto", "dense", "fused"))
    peer, fused = Cell(0.004, 9.0, "", 200), Cell(0.0005, 2.0, "", 9)
    cells = {"auto": fused, "dense": Cell(failed="memory"), "fused": fused, "PML": peer}
    keep(folder / "small.json", [Row("SupCon", 128, 512, 1, 0.0001, 9, cells)], plan)
    keep(folder / "big.json", [Row("SupCon", 32768, 512, 1, 0.003, 9, cells, "bf16")], plan)
    cases = {
        "graphs": [{"case": "by hand, SupCon, auto", "ms": 0.2, "eager ms": 1.0, "ok": True},
                   {"case": "compiled, SupCon", "failed": "RuntimeError: it cannot be captured"}],
        "correctness": [{"case": "SupCon, fused, bf16, 203 rows", "value": 1e-4, "gradient": 2e-3, "ok": True},
                        {"case": "Margin, fused, bf16, 203 rows", "value": 1e-4, "gradient": 9e-1, "ok": False},
                        {"case": "Circle, fused, bf16, 203 rows", "failed": "memory"}],
    }  # fmt: skip
    for name, told in cases.items():
        (folder / f"{name}.json").write_text(json.dumps({"results": told}), encoding="utf-8")
    page.take(folder)
    return about(plan)


def test_a_session_fills_the_page(session):
    found = page.fill_blocks(TEXT)
    assert session["device"] in page.small_batches()
    assert "| SupCon | 0.50 | - | 8.0 | - | 9 | 200 |" in found
    assert "| SupCon | 0.50 | 0.2 | 2 |" in found
    assert "- captured by hand: 1 of 1 losses, median 0.20 ms, 0.20 to 0.20; failed: none" in found
    assert "- `torch.compile(mode='reduce-overhead')`: 0 of 1 losses, none; failed: SupCon" in found
    assert "| fused, bf16 | 9e-01 (Margin) |" in found
    assert "Failed: Circle, fused, bf16, 203 rows: memory." in found
    assert page.fill_blocks(found) == found


def test_every_result_of_a_session_is_in_a_table(session):
    found = page.gpu_tables()
    assert "| SupCon | 128 | float32 | 0.50 | memory | 0.50 | 4.00 | 0.10 | 5.0 | 8.0 | 9 | 200 | 2 |" in found
    assert "| SupCon | 32,768 | bf16 | 0.50 | memory | 0.50 | 4.00 | 3.00 | 0.2 | 8.0 | 9 | 200 | 2 |" in found
    assert "| SupCon | 1.00 | 0.20 | RuntimeError |" in found
    for line in ("| SupCon, 203 rows | 2e-03 |", "| Margin, 203 rows | 9e-01 |", "| Circle, 203 rows | memory |"):
        assert line in found


def test_all_results_of_the_gpu_are_kept():
    assert (page.RESULTS / "bench_gpu.md").read_text(encoding="utf-8") == page.gpu_tables()


def test_pictures_show_what_a_session_measured(session):
    rows, setting = page.pictures()["bench-gpu"]
    assert [(row.rows, row.precision) for row in rows] == [(128, "float32"), (32768, "bf16")]
    assert setting["config"]["width"] == 512


def test_empty_columns_are_left_out():
    row = Row("SupCon", 128, 8, 1, 0.1, 1, {"auto": Cell(1.0)})
    assert page.all_times([row]).splitlines()[0] == "| loss | B | precision | auto, ms | limit, ms | auto x limit |"
