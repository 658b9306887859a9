"""More pairs a step: past batches (`CrossBatchMemory`), other processes (`Distributed`), chunks (`cached_step`)."""

from nearfar.scale.cache import cached_step
from nearfar.scale.gather import Distributed
from nearfar.scale.memory import CrossBatchMemory, Staleness

__all__ = ["CrossBatchMemory", "Distributed", "Staleness", "cached_step"]
