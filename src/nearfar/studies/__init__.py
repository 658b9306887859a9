"""Studies: each redraws a paper's figures, checks its claims and writes what it found as PNG and JSON."""

__all__ = ["descent", "dro", "grid", "isometry", "noise", "profs"]  # submodules, imported by name
