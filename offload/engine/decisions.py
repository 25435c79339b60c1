"""Whether code takes a decision by the number of its tokens, or by their values; asked once each.

A part of a layer is proven on a few tokens and used on many. Code that branches on their number, or
on a value, may compute something else then. So it runs once on tensors without values whose numbers
of rows and tokens are symbols: torch notes each comparison of a symbol, and fails where a value
would be read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from offload.engine.internals import FakeTensorMode, enable_python_dispatcher, without_modes

T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

# Of code that is not ours: a value that is read, an operation that knows no symbols.
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def takes_decisions(compute: Callable[[int, int], object]) -> bool:
    """Return whether code decides by the number of rows or tokens, or by values; or may do so.

    Args:
        compute: Runs it, given symbols for the numbers of rows and of tokens. Tensors that it makes
            have no values.
    """
    # imports sympy
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    both = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[var-annotated]
    with without_modes():  # others know no symbols
        like = torch.empty(3, 5, device="cpu")
        try:
            # torch 2.11 folds the dimensions of a product in C++, which knows no symbols
            with enable_python_dispatcher(), mode, torch.no_grad():
                compute(*mode.from_tensor(like, symbolic_context=both).shape)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES:
            return True
    return bool(sizes.guards)


class Proven(Generic[T]):
    """What was proven of modules: once for those of the same code, attributes and sizes."""

    def __init__(self, known: dict[object, T]) -> None:
        """Begin with what the process knows of modules that depend on plain values alone.

        Args:
            known: That; it is added to.
        """
        self._known = known
        self._own: dict[object, T] = {}
        self._held: list[nn.Module] = []

    def of(self, module: nn.Module, prove: Callable[[], T], *, given: object = None) -> T:
        """Return what is proven of a module.

        Args:
            module: The module.
            prove: Finds it, from nothing but the module's code and attributes, and what is given.
            given: What else it depends on.
        """
        objects: list[object] = []
        key = _key_of(module, objects), given
        proven = self._own if objects else self._known
        if key not in proven:
            proven[key] = prove()
            self._held.append(module)  # objects that count by identity stay what they are
        return proven[key]


def _key_of(module: nn.Module, objects: list[object]) -> object:
    """Return what a proof depends on: code, and all attributes down to the shapes of parameters.

    What is no plain value counts by identity, and is added to `objects`: two functions may differ
    in anything.
    """
    own = vars(module).items()
    return type(module), tuple((name, _attribute(x, objects)) for name, x in own)


def _attribute(x: object, objects: list[object]) -> object:
    if isinstance(x, nn.Module):
        return _key_of(x, objects)
    if isinstance(x, nn.Parameter):
        return x.shape, x.dtype, x.requires_grad
    if isinstance(x, Mapping):
        return type(x), tuple((name, _attribute(value, objects)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return type(x), tuple(_attribute(value, objects) for value in x)
    if isinstance(x, set | frozenset):
        return type(x), frozenset(_attribute(value, objects) for value in x)
    if isinstance(x, _PLAIN):
        return type(x), repr(x)
    if type(x) is partial:  # of an activation, which each layer has its own of
        return partial, *(_attribute(part, objects) for part in (x.func, x.args, x.keywords))
    objects.append(x)
    return id(x)
