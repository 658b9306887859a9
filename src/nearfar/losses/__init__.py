"""Every named loss, one class each: a recipe of `RobustLoss`. `docs/guides/which-loss.md` says which to use when.

A loss is public if its module names it in `__all__`; there is no second list of losses.
"""

from nearfar._utils.keywords import suggest_names
from nearfar.losses import (
    anchored,
    centers,
    dro,
    ladder,
    mean,
    nested,
    proxies,
    ranking,
    scored,
    softmax,
    spread,
    trimmed,
    triplet,
    two_towers,
)
from nearfar.losses.anchored import *
from nearfar.losses.centers import *
from nearfar.losses.dro import *
from nearfar.losses.ladder import *
from nearfar.losses.mean import *
from nearfar.losses.nested import *
from nearfar.losses.proxies import *
from nearfar.losses.ranking import *
from nearfar.losses.scored import *
from nearfar.losses.softmax import *
from nearfar.losses.spread import *
from nearfar.losses.trimmed import *
from nearfar.losses.triplet import *
from nearfar.losses.two_towers import *

__all__: list[str] = []
__all__ += anchored.__all__
__all__ += centers.__all__
__all__ += dro.__all__
__all__ += ladder.__all__
__all__ += mean.__all__
__all__ += nested.__all__
__all__ += proxies.__all__
__all__ += ranking.__all__
__all__ += scored.__all__
__all__ += softmax.__all__
__all__ += spread.__all__
__all__ += trimmed.__all__
__all__ += triplet.__all__
__all__ += two_towers.__all__
__getattr__ = suggest_names("nearfar.losses", __all__)
