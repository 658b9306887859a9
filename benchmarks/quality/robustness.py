"""R@1 of ten losses when 0, 10, 20 and 40 per cent of the training labels are wrong.

python benchmarks/quality/robustness.py --data glyphs --jobs 14 --folder out     runs; stops and goes on
python benchmarks/quality/robustness.py --from out/noise-glyphs.json             the pages
"""

from __future__ import annotations

from studies import ROOT, main

from nearfar.studies import noise

if __name__ == "__main__":
    main(__doc__, noise, "Wrong labels", ROOT / "benchmarks" / "RESULTS-robustness.md")
