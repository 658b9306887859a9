"""What keeps the code small: file length, import direction, frozen public names, no stray imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from needs import need

import nearfar as nf

SOURCE = Path(nf.__file__).parent
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import architecture as drawn  # noqa: E402

FILES = sorted(SOURCE.rglob("*.py"))
ORACLES = sorted((Path(__file__).parents[1] / "oracles").glob("[!t]*.py"))

PUBLIC = {
    "nearfar": """
        DegenerateBatchWarning Explanation CrossBatchMemory Distributed Nested Proximal Relation RobustLoss
        batches cached_step calibrate compare data diagnose distributed doctor evaluate evaluate_pairs
        evaluate_retrieval evaluation geometry inspect inspection
        groups linear links losses mine miners models pairs plot pml report runs sets similarity studies suggest_step
        train tune
    """,
    "nearfar.batches": "HardClasses MPerClass MinedNegatives Proximal QueryPairs Representatives Violations violations",
    "nearfar.plot": "class_confusion class_recall embedding_map gallery recall_curve weights",
    "nearfar.sets": """
        CalibratedKL ChiSquare Dual DetachedWeights KL KLBall Mean PowerWeights Remembered Sampled TopK
        Trimmed UncertaintySet Worst
    """,
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_file_is_one_idea(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400, f"{path.name} has {len(lines)} lines: two ideas?"
    assert ast.get_docstring(ast.parse("\n".join(lines))), f"{path.name} says not what it is for"
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (body[-1].end_lineno - body[0].lineno + 1) if body else 0
            assert length <= 45, f"{path.name}:{node.lineno} {node.name} is {length} lines long"


def test_every_room_has_one_place_in_at_most_ten_layers():
    places = [name for layer in drawn.LAYERS for name in layer]
    assert len(drawn.LAYERS) <= 10
    assert sorted(places) == sorted(drawn.rooms())
    assert set(drawn.WORDS) == set(places)


def test_rooms_import_from_lower_layers_or_from_their_left():
    places = [name for layer in drawn.LAYERS for name in layer]
    for name, others in drawn.rooms().items():
        for other in others:
            assert places.index(other) < places.index(name), f"{name} imports {other}, which stands above it"


def test_no_module_imports_itself_by_any_way_round():
    """Late imports and those for type checkers count too."""
    assert drawn.cycle(drawn.graph()) == []
    assert drawn.cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_the_top_of_the_package_is_the_algebra():
    """A reader sees the factors of the product there, and rooms."""
    assert {path.stem for path in SOURCE.glob("*.py")} == {
        "__init__", "__main__", "similarity", "pairs", "links", "miners"
    }  # fmt: skip


def test_a_dense_call_runs_through_ten_files():
    """The product's factors, the relation, the engine and what they share; a reader can hold that many."""
    files = drawn.files_of_call()
    assert len(files) <= 10, files
    assert {"losses/robust.py", "engines/dense.py", "miners.py", "sets/entropic.py"} <= set(files)


def test_the_page_walks_through_the_files_that_are_there():
    text = (drawn.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_/]+\.py)`", text):
        assert (SOURCE / name).is_file(), name
    call = text[text.index("## A call") : text.index("## A training run")]
    assert set(re.findall(r"^\| \d+ \| `(.+?)`", call, flags=re.MULTILINE)) == set(drawn.files_of_call())


def test_the_picture_is_of_these_sources():
    assert drawn.PICTURE.read_text(encoding="utf-8") == drawn.picture(), "run: python scripts/architecture.py"


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_frozen(module):
    __import__(module)
    assert set(sys.modules[module].__all__) == set(PUBLIC[module].split())
    for name in sys.modules[module].__all__:
        assert hasattr(sys.modules[module], name)


def public_modules() -> list[str]:
    """Those whose path has no part that begins with an underscore; commands are not for import."""
    names = [name for name in drawn.modules() if not any(part.startswith("_") for part in name.split("."))]
    return [name for name in names if not f"{name}.".startswith("nearfar.cli.")]


@pytest.mark.parametrize("name", public_modules())
def test_every_public_module_says_what_it_offers(name):
    if name.startswith("nearfar.serve."):
        need("fastapi", "prometheus_client", "uvicorn")
    elif name.startswith("nearfar.pml."):
        need("pytorch_metric_learning")
    module = import_module(name)
    if module.__name__ != name:
        return  # PML's module in its place
    assert "__all__" in vars(module), f"{name}: say __all__ = [...] after the imports"
    assert len(set(module.__all__)) == len(module.__all__)
    for each in module.__all__:
        assert hasattr(module, each) or f"{name}.{each}" in drawn.modules(), f"{name} has no {each}"
        assert not each.startswith("_")


def test_every_folder_of_the_package_is_a_package():
    """A folder without `__init__.py` is left out of the wheel."""
    for path in FILES:
        assert (path.parent / "__init__.py").is_file()


def test_dir_shows_the_public_names_and_no_other():
    """Before anything late is imported, and after."""
    script = (
        "import nearfar as nf; first = dir(nf); assert len(first) == len(nf.__all__) + 1\n"
        "for name in first: getattr(nf, name)\n"
        "import nearfar.bench, nearfar.cli.main; assert dir(nf) == first; print(*first)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert set(shown.split()) == {"__version__", *PUBLIC["nearfar"].split()}


def test_contract_keywords():
    """The constructor keywords users rely on (DESIGN): each call must work as written."""
    L = nf.losses
    for loss in (
        L.DroTopK(k=160, pair=nf.pairs.Hinge(margin=0.2, threshold=0.5), engine="dense"),
        L.DroTopKPN(k=160, pair=nf.pairs.Logistic(threshold=0.5, slope_positive=2, slope_negative=40)),
        L.DroKL(gamma=0.1, samples=None),
        L.DroKLGrouped(gamma=0.1),
        L.DroChiSquare(rho=1.0),
        L.MultiSimilarity(alpha=2, beta=50, threshold=0.5, miner=None),
        L.NTXent(temperature=0.07),
        L.SupCon(temperature=0.1),
        L.Triplet(margin=0.05, mining="hard", smooth=0.1, similarity=nf.similarity.NegSquaredEuclidean()),
        L.Contrastive(pos_margin=0, neg_margin=1),
        L.LiftedStructure(margin=1),
        L.ProxyNCA(classes=3, dim=2),
        L.ArcFace(classes=3, dim=2, margin=0.5, scale=64),
    ):
        assert isinstance(loss, __import__("torch").nn.Module)


def test_import_is_lean():
    """Nothing optional or heavy is imported with the package."""
    script = (
        "import sys, nearfar; "
        "heavy = {'matplotlib', 'sklearn', 'scipy', 'PIL', 'accelerate', 'rich', 'typer', 'pytorch_metric_learning', "
        "'torch._dynamo', 'triton'}; "
        "heavy &= set(sys.modules); "
        "print(sorted(heavy))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert shown.strip() == "[]"


def test_oracles_know_nothing_of_the_library():
    """An oracle that called the code it judges would agree with any mistake."""
    assert len(ORACLES) >= 5
    for path in ORACLES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                assert top == "numpy" or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_no_unfinished_words():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for word in ("TODO", "FIXME", "NotImplementedError"):
            assert word not in text, f"{path.name}: {word}"


def test_late_parts_are_there():
    """What is imported on first use is found all the same, and a wrong name is still an error."""
    assert nf.linear.TripletLearner is __import__("nearfar.linear", fromlist=["x"]).TripletLearner
    assert callable(nf.suggest_step)
    assert nf.pml.losses.TripletMarginLoss
    with pytest.raises(AttributeError, match="no attribute 'loses'"):
        _ = nf.loses
