"""What the doctor's looks cost on this machine: the demo's training with and without them, in turns.

python benchmarks/quality/doctor_cost.py --steps 400
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from nearfar.train import fit, load

ROOT = Path(__file__).parents[2]


def seconds(steps: int, every: int) -> float:
    """Seconds a step, the first fifth left out."""
    flags = {"training.steps": steps, "training.diagnose_every": every, "training.evaluate_every": steps,
             "training.checkpoint_every": steps, "training.explain_every": 0}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = load(ROOT / "configs" / "glyphs.yaml", [(name, str(value)) for name, value in flags.items()])
        fit(config, Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    times = {line["step"]: line["time"] for line in lines if "time" in line}
    return (times[steps] - times[steps // 5]) / (steps - steps // 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = {every: list[float]() for every in (0, given.every)}
    for _ in range(given.rounds):
        for every, times in found.items():
            times.append(seconds(given.steps, every))
    without, with_looks = (statistics.median(times) for times in found.values())
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    look = (with_looks - without) * given.every
    print(f"{where}: a step {1e3 * without:.2f} ms, with a look every {given.every} steps {1e3 * with_looks:.2f} ms "
          f"({with_looks / without - 1:+.1%}); a look {1e3 * look:.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
