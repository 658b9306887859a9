"""Write a matplotlib figure to a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearfar._utils.extras import need
from nearfar._utils.files import atomic_write


@contextmanager
def figure_file(
    file: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, *, dpi: int = 110, **how: Any
) -> Iterator[Any]:
    """Give axes [rows, columns] of a figure, which is saved as a complete PNG file when the block ends."""
    need("matplotlib", "the figures of a study or a benchmark", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(rows, columns, squeeze=False, **how)
    with atomic_write(file) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
