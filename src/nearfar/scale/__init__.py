"""Scale: rows of past batches (`Memory`), of other processes (`Gathered`), and batches in chunks (`cached_step`)."""

from nearfar.scale.cache import cached_step
from nearfar.scale.gather import Gathered
from nearfar.scale.memory import Memory, Staleness

__all__ = ["Gathered", "Memory", "Staleness", "cached_step"]
