"""Whether code takes a decision by the number of its tokens, or by their values.

A part of a layer is proven on a few tokens and used on many. Code that branches on their number, or
on a value, may compute something else then. So it runs once on tensors without values whose numbers
of rows and tokens are symbols: torch notes each comparison of a symbol, and fails where a value
would be read.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Of code that is not ours: a value that is read, an operation that knows no symbols.
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def takes_decisions(compute: Callable[[int, int], object]) -> bool:
    """Return whether code decides by the number of rows or tokens, or by values; or may do so.

    Args:
        compute: Runs it, given symbols for the numbers of rows and of tokens. Tensors that it makes
            have no values.
    """
    # they import sympy
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    both = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[var-annotated]
    with _disable_current_modes():  # others know no symbols
        like = torch.empty(3, 5, device="cpu")
        try:
            with mode, torch.no_grad():
                compute(*mode.from_tensor(like, symbolic_context=both).shape)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES:
            return True
    return bool(sizes.guards)
