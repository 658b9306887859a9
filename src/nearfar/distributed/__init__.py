"""More pairs per step: past batches (`CrossBatchMemory`), several processes (`Distributed`), `cached_step`."""

from nearfar._utils.process_group import Group
from nearfar.distributed._cached_step import cached_step
from nearfar.distributed._cross_batch_memory import CrossBatchMemory, Staleness
from nearfar.distributed._gather import Distributed

__all__ = ["CrossBatchMemory", "Distributed", "Group", "Staleness", "cached_step"]
