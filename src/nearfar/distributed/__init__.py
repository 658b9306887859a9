"""More pairs per step: past batches (`CrossBatchMemory`), several processes (`Distributed`), `cached_step`."""

from nearfar._utils.process_group import Group
from nearfar.distributed.cached_step import cached_step
from nearfar.distributed.cross_batch_memory import CrossBatchMemory, Staleness
from nearfar.distributed.gather import Distributed

__all__ = ["CrossBatchMemory", "Distributed", "Group", "Staleness", "cached_step"]
