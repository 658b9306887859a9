"""`nearfar bench`: time and memory of every loss beside pytorch-metric-learning and the two-product limit.

>>> from nearfar.bench import Plan, Patience, measure
>>> plan = Plan(losses=("SupCon",), sizes=(32,), width=8, peers=False, memory=False, patience=Patience(rounds=1))
>>> [(row.loss, row.rows, sorted(row.cells)) for row in measure(plan)]
[('SupCon', 32, ['auto'])]
"""

from nearfar.bench._memory import Limits, Peak, Task, peak
from nearfar.bench._pages import report, write
from nearfar.bench._results import Cell, Row, exponent, growth
from nearfar.bench._study import DeviceLostError, Plan, measure, offered
from nearfar.bench._subjects import PEER, SUBJECTS, Subject
from nearfar.bench._timing import Patience

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
