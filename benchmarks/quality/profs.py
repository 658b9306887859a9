"""PROFS and hard negative classes against plain batches, on glyphs and Omniglot: Can et al.'s Table 1 and Figure 1.

python benchmarks/quality/profs.py --data glyphs omniglot --jobs 14 --folder out     runs; stops and goes on
python benchmarks/quality/profs.py --from out/profs-glyphs.json out/profs-omniglot.json     the pages
python benchmarks/quality/profs.py --probe --jobs 14     how fast runs are here, in a minute
"""

from __future__ import annotations

from studies import ROOT, main

from nearfar.studies import profs

if __name__ == "__main__":
    main(
        __doc__,
        profs,
        "PROFS: alternating projections and hard negative classes",
        ROOT / "benchmarks" / "RESULTS-profs.md",
        parts=({"nargs": "+", "default": list(profs.PARTS), "choices": profs.PARTS}, True),
        probe=({"action": "store_true"}, False),
    )
