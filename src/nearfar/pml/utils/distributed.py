"""PML's `utils.distributed`: ours where a name is defined here, else PML's own."""

from nearfar.pml._theirs import theirs

__all__: list[str] = []

__getattr__, __dir__ = theirs(__name__)
