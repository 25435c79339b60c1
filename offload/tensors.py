"""torch's types, for annotations in modules that do not import it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor as Tensor
    from torch import device as device
    from torch import dtype as dtype
else:
    Tensor = device = dtype = object
