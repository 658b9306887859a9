"""PML's `utils.loss_and_miner_utils` itself."""

import sys

from nearfar.pml._theirs import whole

sys.modules[__name__] = whole(__name__)
