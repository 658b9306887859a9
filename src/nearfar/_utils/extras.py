"""Optional packages: imported on use, with an error of one sentence if they are missing."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any


def is_there(module: str) -> bool:
    """Whether a top-level module is installed; it is not imported.

    >>> is_there("torch"), is_there("no_such_module")
    (True, False)
    """
    return find_spec(module) is not None


def version_of(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command(extra: str) -> str:
    """The command that installs an extra.

    >>> print(command("onnx"))
    pip install "nearfar[onnx]"
    """
    return f'pip install "nearfar[{extra}]"'


def need(module: str, whose: str, extra: str, *, instead: str = "") -> Any:
    """Import an optional module, or raise an ImportError that says what needs it and which extra installs it.

    `whose` is the feature that needs it, and `instead` what can be done without it, if anything. A package that is
    installed but fails to import raises its own error.

    >>> need("no_such_module.part", "evaluate", "faiss", instead='leave backend="torch"')
    Traceback (most recent call last):
    ImportError: evaluate needs no_such_module, which is not installed; run pip install "nearfar[faiss]", or ...
    """
    package = module.split(".")[0]
    try:
        if is_there(package):
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
    otherwise = f", or {instead}" if instead else ""
    raise ImportError(f"{whose} needs {package}, which is not installed; run {command(extra)}{otherwise}.")
