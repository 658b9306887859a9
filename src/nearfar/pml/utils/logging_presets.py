"""PML's `utils.logging_presets` itself."""

import sys

from nearfar.pml._theirs import whole

sys.modules[__name__] = whole(__name__)
