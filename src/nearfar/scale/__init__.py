"""Scale: rows of past batches (`CrossBatchMemory`), of other processes (`Distributed`), and batches in chunks (`cached_step`)."""

from nearfar.scale.cache import cached_step
from nearfar.scale.gather import Distributed
from nearfar.scale.memory import CrossBatchMemory, Staleness

__all__ = ["Distributed", "CrossBatchMemory", "Staleness", "cached_step"]
