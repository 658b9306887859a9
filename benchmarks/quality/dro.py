"""Qi et al.'s ablations: recall against pair imbalance and against K, and grouped KL beside its kin.

python benchmarks/quality/dro.py --data glyphs --jobs 14 --folder out     runs; stops and goes on
python benchmarks/quality/dro.py --from out/dro-glyphs.json               the pages
"""

from __future__ import annotations

from studies import ROOT, main

from nearfar.studies import dro

if __name__ == "__main__":
    main(__doc__, dro, "DRO: imbalance, K, and grouped KL", ROOT / "benchmarks" / "RESULTS-dro.md")
