"""Studies: each reproduces a paper's figures, checks its claims and writes the results as PNG and JSON."""

__all__ = ["descent", "dro", "grid", "isometry", "noise", "profs"]  # submodules, imported by name
