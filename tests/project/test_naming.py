"""Naming: papers by their authors, no abandoned names, American spelling in what users type."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from needs import need

import nearfar as nf
from nearfar.cli.main import app
from nearfar.runs._config import flat, to_tree
from nearfar.runs._sections import Config

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TEXT = ("src", "tests", "docs", "configs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples", "scripts")
SUFFIXES = (".py", ".md", ".yaml", ".html", ".js", ".css")
OLD_AND_NEW = ("tests/project/test_naming.py",)
"""Files that must spell old names, because they refuse them."""

# 1,000 and .001 and 10_000 are numbers; 002, "004" and 002_cub.yaml are papers
PAPER = re.compile(r"(?<![\w.,])00[0-4](?![0-9]|[.,][0-9])")
SHARD = re.compile(r"-(?:\{+\d+\.\.[^}]*\}+|\d+)\.tar")
"""Files of a data set in shards, s-001.tar and s-{000..099}.tar, are no papers."""
PAPERS_FILE = re.compile(r"(?:^|/)00[0-4](?![0-9])")

PARTS = frozenset({"alike", "unlike", "atom", "optimiser", "normalise", "normalised", "steep"})
"""Words that no identifier has among its words, as in slope_alike."""
WHOLE = frozenset({"Gathered", "PerClass", "Keeper", "leading", "neck"})
"""Identifiers that are gone."""
KINDS = frozenset({"Filter", "Setting", "Given", "Projection", "Ranks", "Pairs", "Expected"})
"""Classes that are gone; as other names they would be fine."""
MODULES = frozenset({"mining", "pairing", "given", "projection", "ranks", "generators", "scale", "keeper", "setting"})

BRITISH = re.compile(
    r"""(?:normal|optim|initial|regular|minim|maxim|summar|visual|standard|general|special|organ|real|penal|random|vector
        |factor|quant|synchron|serial|local|memor|character|recogn|util|discret|linear|symmetr|parametr|binar|equal|final
        |major|minor|token|parallel|crystall|priorit|emphas|categor)is(?:e|ed|es|er|ers|ing|ation|ations)
      |(?:col|behavi|fav|neighb|hon|flav|harb|rum|vig)ours?(?:ed|ing|hood|able|ite)?
      |centre[sd]?|metres?|litres?|fibres?|grey(?:s|scale)?|catalogues?|dialogues?|analyse[drs]?|licence|defence|offence
      |artefacts?|programmes?|learnt|burnt|spelt|cheque|mould|sceptic\w*|judgement|towards|ageing
      |(?:label|model|cancel|travel|signal|channel|total)l(?:ed|ing|er|ers)""",
    re.VERBOSE,
)


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    if listed.returncode:
        pytest.skip("the sources are not in a repository", allow_module_level=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def words_of(name: str) -> list[str]:
    """Split an identifier: `slope_alike`, `PerClass` and `head-lr` into lower-case words.

    Digits stay where they are.
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def is_british(name: str) -> bool:
    return any(BRITISH.fullmatch(word) for word in words_of(name))


def numbered_papers(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if PAPER.search(SHARD.sub("", line))]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name in a module: variables, attributes, arguments, keywords, functions, classes and imports."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            found = getattr(node, field, None)
            if isinstance(found, str):
                yield from ((part, line) for part in found.split("."))


def given_up(tree: ast.AST) -> list[str]:
    wrong = [f"{name}, line {line}" for name, line in identifiers(tree) if name in WHOLE or PARTS & set(words_of(name))]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in KINDS]
    return wrong + [f"class {node.name}, line {node.lineno}" for node in classes]


def public_modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(nf.__path__, "nearfar."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            yield module.name


def public_names() -> Iterator[str]:
    """Modules, what they offer, and the parameters, fields and methods of that."""
    for name in public_modules():
        yield name
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ()):
            yield f"{name}.{each}"
            thing = getattr(module, each, None)  # a submodule that nobody has imported yet
            if str(getattr(thing, "__module__", "")).startswith("nearfar"):
                yield from (f"{name}.{each}.{part}" for part in _of(thing))


def _of(thing: object) -> Iterator[str]:
    if dataclasses.is_dataclass(thing):
        yield from (field.name for field in dataclasses.fields(thing))
    if inspect.isclass(thing):
        members = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
        yield from (key for key, _ in members)
        for key, value in [*members, ("__init__", vars(thing).get("__init__"))]:
            yield from (f"{key}({part}=)" for part in _parameters(value))
    else:
        yield from (f"{part}=" for part in _parameters(thing))


def _parameters(thing: object) -> list[str]:
    return list(inspect.signature(thing).parameters) if inspect.isfunction(thing) else []


def options() -> Iterator[str]:
    """Commands and their options."""
    command = typer.main.get_command(app)
    for name, each in command.commands.items():
        yield name
        for parameter in each.params:
            yield from parameter.opts


@pytest.mark.parametrize("name", tracked(*TEXT, "benchmarks/*.py"))
def test_papers_bear_their_authors_names(name):
    assert not PAPERS_FILE.search(name)
    if name.endswith(SUFFIXES) and name not in OLD_AND_NEW:
        assert numbered_papers((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", tracked("src/*.py"))
def test_no_name_that_was_given_up(name):
    assert not MODULES & {*Path(name).with_suffix("").parts}
    if name not in OLD_AND_NEW:
        assert given_up(ast.parse((ROOT / name).read_text(encoding="utf-8"))) == []


def test_public_names_are_american():
    need("pytorch_metric_learning", "fastapi", "prometheus_client", "uvicorn")
    names = [name.removeprefix("nearfar") for name in public_names()]
    assert len(names) > 1000
    assert [name for name in names if is_british(name)] == []


def test_keys_and_options_are_american():
    keys = [*flat(to_tree(Config())), *options()]
    assert "optimizer.lr" in keys
    assert "--trust-model" in keys
    assert [key for key in keys if is_british(key)] == []


def test_the_rules_can_fail():
    for text in ("as 002 prints it", 'transform: "004"', "configs/002_cub.yaml", "(000)", "001's proof", "in 003."):
        assert numbered_papers(text) == [text]
    for text in ("1,000 rows", ".001", "0.002", "10_000", "1_000", "12,003", "0x004", "v1.003", "0004"):
        assert numbered_papers(text) == []
    assert PAPERS_FILE.search("configs/paper/002_cub.yaml")
    for code in ("slope_alike = 1", "f(atom=2)", "x.had_unlike", "class Setting: ...", "from a import PerClass as P"):
        assert given_up(ast.parse(code))
    for code in ("MPerClass(2)", "x = Setting", "bottleneck = 1", "leads = 2", "y.positive"):
        assert not given_up(ast.parse(code))
    for name in (
        "optimiser",
        "normalise_rows",
        "colourMap",
        "class_centres",
        "Thresholds.learnt",
        "--grey",
        "labelled",
    ):
        assert is_british(name)
    for name in ("noise", "precision", "raise", "promise", "Fourier", "four_rows", "contour", "labeled", "center"):
        assert not is_british(name)
