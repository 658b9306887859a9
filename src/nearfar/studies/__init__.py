"""Studies that reproduce a paper's figures and check its claims; results are written as PNG and JSON."""

__all__ = ["descent", "dro", "grid", "isometry", "noise", "profs"]  # submodules, imported by name
