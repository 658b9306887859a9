"""Every example runs for five steps; every shipped configuration is valid and names existing parts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forks
import pytest
import torch
from needs import need
from safetensors.torch import load_file
from vision import mend

import nearfar
from nearfar.cli.demo import recipe
from nearfar.runs._config import flat, read_yaml, to_tree
from nearfar.runs._parts import check, make_loss
from nearfar.train import load

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINER = ROOT / "examples" / "hugging_face_trainer.py"
SOURCES = str(Path(nearfar.__file__).parents[1])
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def ran(code: str, folder: Path) -> str:
    """What a process prints that runs `code` in a folder."""
    path = os.pathsep.join([str(ROOT / "tests" / "support"), SOURCES])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    told["CUDA_VISIBLE_DEVICES"] = ""  # a GPU rounds a sum in one order today and in another tomorrow
    done = forks.ran(f"import runpy, sys; from vision import mend; mend()\n{code}", cwd=folder, env=told)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path != TRAINER], ids=lambda path: path.stem)
def test_example_runs_for_five_steps(path, tmp_path):
    if path.stem == "lightning_module":
        mend()
        need("lightning")
    if path.stem == "sentence_transformers_trainer":
        mend()
        need("sentence_transformers", "datasets", "accelerate")
    shown = ran(f"sys.argv[1:] = ['--steps', '5']; runpy.run_path({str(path)!r}, run_name='__main__')", tmp_path)
    assert re.search(r"loss \d+\.\d{4}", shown), shown


def test_the_trainer_of_hugging_face_saves_resumes_and_evaluates(tmp_path):
    """Cut back to its first checkpoint and resumed, a run ends with the very weights it had."""
    main = f"main = runpy.run_path({str(TRAINER)!r})['main']; from pathlib import Path; here = Path('run')"
    cut = "(here / 'checkpoint-4').rename('whole'); main(4, here, True)"
    shown = ran(f"{main}; main(4, here, False); {cut}", tmp_path)
    assert len(re.findall(r"loss \d+\.\d{4} on average over 4 steps", shown)) == 2, shown
    first, second = re.findall(r"R@1 on unseen characters (\d+\.\d)", shown)
    assert first == second
    whole, resumed = (load_file(tmp_path / place / "model.safetensors") for place in ("whole", "run/checkpoint-4"))
    start = load_file(tmp_path / "run/checkpoint-2/model.safetensors")
    assert "loss.pair_positive.offset" in whole
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(start["network.head.weight"], whole["network.head.weight"])


def test_there_are_examples_for_five_ways():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_reads(path):
    config = load(path)
    check(config)
    make_loss(config, classes=10)


def test_the_demo_is_a_configuration_too():
    assert to_tree(load(ROOT / "configs" / "glyphs.yaml")) == to_tree(recipe())


@pytest.mark.parametrize(("paper", "page"), [("can2019", "can-2019"), ("qi2020", "qi-2020")])
def test_the_papers_settings(paper, page):
    """The configurations of a paper have the values of the table on its page, which names the sections."""
    text = (ROOT / "docs" / "papers" / f"{page}.md").read_text(encoding="utf-8").split("\n## Settings\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    (_, *names, _, section), *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert (section, len(rows) >= 9) == ("section", True)
    files = {file.stem: load(file) for file in CONFIGS if file.stem.startswith(f"{paper}_")}
    assert sorted(files) == sorted(f"{paper}_{name}" for name in names)
    for key, *values, _, section in rows:
        assert section
        for name, value in zip(names, values, strict=True):
            found = flat(to_tree(files[f"{paper}_{name}"]))[key.strip("`")]
            assert found == read_yaml(key, value), f"{name}: {key}"
