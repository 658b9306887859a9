"""A fixture for tests that build networks of timm and torchvision."""

from __future__ import annotations

import pytest
from needs import need
from vision import mend


@pytest.fixture(scope="module")
def vision():
    """timm and torchvision, which on a CPU build of torch import only once two operators are declared."""
    mend()
    return need("timm", "torchvision")
