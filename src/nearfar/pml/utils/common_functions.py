"""PML's `utils.common_functions` itself."""

import sys

from nearfar.pml._theirs import whole

sys.modules[__name__] = whole(__name__)
