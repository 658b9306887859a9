"""Files around the package (citation, workflows, hooks, templates, version policy) agree with the project."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import nearfar as nf

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = PROJECT.get("urls", {}).get("Source")
"""The one address of the project; None until it has one."""
ADDRESS = re.compile(
    r"""(?:[\w-]+\.)+[a-z]{2,}/[^\s"'<>)\]]*nearfar[^\s"'<>)\]]*             # a path on a forge
      |\bnearfar[\w-]*\.(?:(?:readthedocs|github|gitlab)\.)?(?:com|org|net|io|dev|ai)\b
      |\w@[\w.:/-]*nearfar|\bnearfar[\w.+-]*@\w                              # of a mailbox, of ssh""",
    re.VERBOSE | re.IGNORECASE,
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAPERS = {
    "Xu Hsieh Vundurthy Cohen Choset Li": 2022,
    "Qi Yan Wang Yang": 2020,
    "Jaffe": 2020,
    "Can Gürbüz Alatan": 2019,
}


def read(path: Path) -> dict:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> list[dict]:
    return [step for job in read(path)["jobs"].values() for step in job.get("steps", [])]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_citation_and_changelog_are_of_this_version():
    found = read(ROOT / "CITATION.cff")
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "version"} <= set(found)
    assert str(found["version"]) == nf.__version__
    assert PROJECT["dynamic"] == ["version"]  # setuptools reads it from the package
    newest = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert newest == nf.__version__
    assert (found["license"], found["title"]) == (PROJECT["license"], PROJECT["name"])
    assert found["authors"] == [{"name": "The nearfar developers"}]
    assert found.get("repository-code") == HOME


def test_the_citation_names_the_four_papers():
    papers = read(ROOT / "CITATION.cff")["references"]
    assert {" ".join(who["family-names"] for who in each["authors"]): each["year"] for each in papers} == PAPERS
    for each in papers:
        assert each["type"] in ("article", "report")
        assert each["title"]
        assert all(set(who) == {"given-names", "family-names"} for who in each["authors"])


def foreign(text: str) -> list[str]:
    """Addresses of nearfar that do not begin with its own."""
    own = HOME and HOME.partition("://")[2] + "/"
    return [found for found in ADDRESS.findall(text) if not own or not f"{found.rstrip('.')}/".startswith(own)]


def test_no_address_but_our_own():
    """Others could register an address that is not ours, and receive the reports of our users."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    if listed.returncode:
        pytest.skip("the sources are not in a repository")
    found = {}
    for path in (ROOT / name for name in listed.stdout.split("\0") if name):
        if path.is_file() and (others := foreign(path.read_text(encoding="utf-8", errors="ignore"))):
            found[path.relative_to(ROOT).as_posix()] = others
    assert found == {}


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("see https://{}.com/{}/issues.", True),
        ("see https://{}.com/{}s/issues.", True),
        ("git@{}.com:{}", True),
        ("security@{1}.org", True),
        ("{1}@mail.org", True),
        ("{1}.readthedocs.io", True),
        ("import {1}.data", False),
        ("src/{1}/serve", False),
        ("@{1}.hook", False),
    ],
)
def test_what_an_address_is(monkeypatch, words, seen):
    own, words = (each.format("forge", "nearfar") for each in ("https://{}.com/{}", words))
    assert bool(foreign(words)) == seen
    monkeypatch.setitem(globals(), "HOME", own)
    assert bool(foreign(words)) == (seen and f"{own}/" not in words)


def test_the_package_says_what_it_runs_on():
    told = {each.rsplit(" :: ", 1)[-1] for each in PROJECT["classifiers"]}
    assert {"Linux", "MacOS", "Windows", "Typed"} <= told
    assert {each for each in told if re.fullmatch(r"3\.\d+", each)} == set(pythons())
    assert PROJECT["requires-python"] == f">={min(pythons(), key=lambda word: int(word[2:]))}"
    assert (Path(nf.__file__).parent / "py.typed").is_file()


def pythons() -> list[str]:
    return read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["linux"]["strategy"]["matrix"]["python"]


def test_there_is_a_workflow_each():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]
    systems = read(WORKFLOWS[2])["jobs"]["core"]["strategy"]["matrix"]["system"]
    assert [each.split("-")[0] for each in systems] == ["macos", "windows"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path):
    """Targets of the Makefile, files of tests, actions by their major version; no more rights than needed."""
    found = read(path)
    assert found["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    ran = " ".join(step["run"] for step in steps(path) if "run" in step)
    assert set(re.findall(r"\bmake (\w+)", ran)) <= targets
    assert all((ROOT / name).is_dir() for name in re.findall(r"\btests/\S+", ran))
    for step in steps(path):
        assert re.fullmatch(r"(actions|pypa)/[\w-]+@(v|release/v)\d+", step.get("uses", "actions/x@v1"))


def test_what_each_workflow_is_for():
    runs = {path.stem: [step.get("run") for step in steps(path)] for path in WORKFLOWS}
    assert "make test" in runs["test"]
    assert "make site" in runs["docs"]
    assert "make dist" in runs["release"]
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    assert release["jobs"]["test"]["uses"] == "./.github/workflows/test.yml"
    assert release["jobs"]["build"]["needs"] == "test"
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["needs"], publish["if"]) == ("build", "vars.PYPI_PROJECT != ''")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert not re.search(r"password:|secrets\.", text)


def test_hooks_run_the_pinned_tools():
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "mypy"}
    for hook in hooks:
        for each in map(Requirement, hook.get("additional_dependencies", [])):
            assert str(each.specifier) == f"=={pins()[each.name]}"
        assert "additional_dependencies" in hook or hook["entry"].startswith(".venv/bin/")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_of_issues(path):
    found = read(path)
    assert {"name", "description", "body"} <= set(found)
    for part in found["body"]:
        assert part["type"] in ("textarea", "checkboxes")
        assert part["attributes"]["label"]
    assert len({part["id"] for part in found["body"]}) == len(found["body"])


def test_a_hole_is_not_reported_as_an_issue():
    assert "SECURITY.md" in read(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["description"]
    assert "in private" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/versions.md", ".github/pull_request_template.md"])
def test_links_of_the_pages_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        page, _, place = target.partition("#")
        found = ((ROOT / name).parent / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", found, flags=re.MULTILINE)
        assert not place or place in {each.lower().replace(" ", "-") for each in headings}
    assert "semantic versioning" in text or name != "docs/versions.md"
