"""Search the keys of a configuration with Optuna; trials are scored on held-out training classes alone."""

from nearfar.tune.results import Best, Tuned
from nearfar.tune.search import search
from nearfar.tune.space import Space, read_space, spaces

__all__ = ["Best", "Space", "Tuned", "read_space", "search", "spaces"]
