"""More pairs per step: past batches (`CrossBatchMemory`), several processes (`Distributed`), `cached_step`."""

from nearfar.distributed.cached_step import cached_step
from nearfar.distributed.cross_batch_memory import CrossBatchMemory, Staleness
from nearfar.distributed.gather import Distributed

__all__ = ["CrossBatchMemory", "Distributed", "Staleness", "cached_step"]
