"""A test whose package is missing is skipped and says why, or fails where all packages are demanded."""

from __future__ import annotations

import sys
from pathlib import Path

import needs
import pytest
from processes import count_passed, plain_pytest, run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder of tests of which some need a package of an extra that is not there."""
    files = {
        "test_plain.py": "def test_one():\n    '''\n    >>> 1\n    1\n    '''\n",
        "test_direct.py": "import halved\n\ndef test_one():\n    pass\n",
        "test_beside.py": "from helper import x\n\ndef test_one():\n    pass\n",
        "helper.py": "from halved.part import x\n",
        "test_inside.py": "from needs import need\n\ndef test_one():\n    need('halved')\n",
        "page.md": ">>> from halved import x\n",
        "test_broken.py": "import math, unheard_of\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    told = (
        (ROOT / "tests" / "support" / "needs.py")
        .read_text(encoding="utf-8")
        .replace('"faiss": "faiss"', '"halved": "faiss"')
    )
    (tmp_path / "tests" / "support").mkdir(parents=True)
    (tmp_path / "tests" / "support" / "needs.py").write_text(told, encoding="utf-8")
    for name in ("conftest.py", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


FILES = ["test_plain.py", "test_direct.py", "test_beside.py", "test_inside.py", "page.md"]


def test_what_needs_a_missing_package_is_skipped_with_the_reason(bare):
    done = run_python(bare, "-m", "pytest", "-q", "-rs", *FILES, NEARFAR_PACKAGES="")
    assert count_passed(done) == 2  # the test and its doctest
    assert "4 skipped" in done.stdout
    assert done.stdout.count("halved is not installed (the extra faiss)") == 2  # pytest joins those of one line


def test_imports_of_a_package_are_followed_beside_a_file_alone():
    source = ROOT / "src" / "nearfar"
    assert needs._imports(source / "serve" / "app.py") >= {"prometheus_client"}  # which middleware.py imports
    assert "prometheus_client" not in (source / "serve" / "app.py").read_text(encoding="utf-8")
    assert not needs._imports(source / "_utils" / "html.py")  # it imports Python's own html
    for path in sorted(source.rglob("*.py")):
        assert needs._imports(path) <= needs.EXTRAS.keys()
    assert needs._imports(ROOT / "docs" / "guides" / "search.md") >= {"faiss"}


def test_it_fails_where_all_packages_are_demanded(bare):
    done = run_python(
        bare, "-m", "pytest", "-q", *FILES, "--continue-on-collection-errors", NEARFAR_PACKAGES="required"
    )
    assert done.returncode == 1
    assert "NEARFAR_PACKAGES=required demands it" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_a_module_that_is_no_extra_is_an_error(bare):
    done = run_python(bare, "-m", "pytest", "-q", "test_broken.py", NEARFAR_PACKAGES="")
    assert done.returncode == 2
    assert "No module named 'unheard_of'" in done.stdout


def test_the_extras_are_those_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in set(needs.EXTRAS.values()):
        assert f"\n{extra} = [" in text, extra
    assert not set(needs.EXTRAS) & set(sys.stdlib_module_names)
    assert plain_pytest()["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
