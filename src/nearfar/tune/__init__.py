"""Search the keys of a configuration with Optuna; trials are scored on held-out training classes alone."""

from nearfar.tune._results import Best, Tuned
from nearfar.tune._search import search
from nearfar.tune._space import Space, read_space, spaces

__all__ = ["Best", "Space", "Tuned", "read_space", "search", "spaces"]
