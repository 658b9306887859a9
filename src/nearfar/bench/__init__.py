"""`nearfar bench`: time and memory of every loss beside pytorch-metric-learning and the two-product limit.

>>> from nearfar.bench import Plan, Patience, measure
>>> plan = Plan(losses=("SupCon",), sizes=(32,), width=8, peers=False, memory=False, patience=Patience(rounds=1))
>>> [(row.loss, row.rows, sorted(row.cells)) for row in measure(plan)]
[('SupCon', 32, ['auto'])]
"""

from nearfar.bench.memory import Limits, Peak, Task, peak
from nearfar.bench.pages import report, write
from nearfar.bench.results import Cell, Row, exponent, growth
from nearfar.bench.study import DeviceLostError, Plan, measure, offered
from nearfar.bench.subjects import PEER, SUBJECTS, Subject
from nearfar.bench.timing import Patience

__all__ = [
    "PEER",
    "SUBJECTS",
    "Cell",
    "DeviceLostError",
    "Limits",
    "Patience",
    "Peak",
    "Plan",
    "Row",
    "Subject",
    "Task",
    "exponent",
    "growth",
    "measure",
    "offered",
    "peak",
    "report",
    "write",
]
