"""Modules of `nearfar.pml`: those of pytorch-metric-learning, some with a few names replaced by ours.

`import nearfar.pml.X` gives PML's module X itself if nothing in it is ours. A module in `losses` or `miners`, such as
`nearfar.pml.losses.contrastive_loss`, has the names of PML's module, with our classes in place of the PML classes
that they derive from.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

HERE = "nearfar.pml"
THERE = "pytorch_metric_learning"
REPLACED = ("losses", "miners")  # packages in which some classes are nearfar's


def delegate(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for one of our modules, which add all names of PML's module of the same path."""
    theirs = import_module(module.replace(HERE, THERE, 1))

    def fetch(name: str) -> Any:
        if isinstance(getattr(theirs, name, None), ModuleType):
            return import_module(f"{module}.{name}")
        try:
            return getattr(theirs, name)
        except AttributeError as error:
            raise AttributeError(str(error).replace(THERE, HERE), name=name, obj=sys.modules[module]) from None

    return fetch, lambda: sorted({*vars(sys.modules[module]), *dir(theirs)})


class Finder(MetaPathFinder, Loader):
    """Finds modules that PML has and we do not."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module below `nearfar.pml`, if PML has a module of that path."""
        if not fullname.startswith(f"{HERE}.") or fullname.removeprefix(f"{HERE}.") in REPLACED:
            return None
        theirs = find_spec(fullname.replace(HERE, THERE, 1))
        return theirs and spec_from_loader(fullname, self, is_package=theirs.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """PML's own module, or a module with PML's names and our classes."""
        theirs = import_module(spec.name.replace(HERE, THERE, 1))
        package = spec.name.split(".")[2]
        if package not in REPLACED:
            spec.loader_state = theirs.__spec__
            return theirs
        module = ModuleType(spec.name, theirs.__doc__)
        ours = vars(import_module(f"{HERE}.{package}"))
        for name, value in vars(theirs).items():
            if not name.startswith("__"):
                setattr(module, name, ours.get(name, value))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of PML's own module; there is no code to run."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state
