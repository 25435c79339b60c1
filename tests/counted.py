"""What code reads and writes, counted from the operations that it really runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.recompute import is_no_value

NARROW = 256  # a product with a side shorter than this is not a large one
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.addmm.out,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
_GROUPED = torch.ops.aten._grouped_mm.default
# Rows that indices choose: read as often as they are written, whatever the tensor has besides.
_GATHERS = {torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor}

SMALL: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32,
}


class Counted(TorchDispatchMode):
    """Counts the bytes that each operation reads and writes, and the operations.

    Each operation reads its arguments and writes its results, once each; views take nothing,
    and an element that is expanded to many counts once; of a gather and of a sum by indices the
    rows count that they name. Large matrix products are left out, but
    for what an added-to result is read for: the plan prices them by arithmetic. An operation
    that torch does not show in parts, such as fused attention, counts as its arguments and
    results.
    """

    def __init__(self, *, multiplies: bool = True) -> None:
        """Start from zero.

        Args:
            multiplies: Whether matrix products are computed. Otherwise they are zero: where only
                counts are asked for, products in 16 bits would take a CPU nearly all of the time.
        """
        super().__init__()
        self._multiplies = multiplies
        self.num_bytes: Counter[str] = Counter()
        self.num_ops: Counter[str] = Counter()

    @property
    def total_bytes(self) -> int:
        """Bytes of all operations."""
        return sum(self.num_bytes.values())

    @property
    def total_ops(self) -> int:
        """Operations that run a kernel."""
        return sum(self.num_ops.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._multiplies or func not in _PRODUCTS:
            result = func(*args, **kwargs)
        else:
            result = _zero_product(func, args, kwargs)
        given = {key: value for key, value in kwargs.items() if key != "out"}
        used = args[1:] if kwargs.get("beta") == 0 else args  # what nothing is added to is not read
        read = [t for t in tree_leaves((used, given)) if isinstance(t, torch.Tensor)]
        written = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        name = func.overloadpacket.__name__
        if any(map(is_no_value, written)) or not _moves(func, read, written):
            return result
        self.num_ops[name] += 1
        if (func in _PRODUCTS or func is _GROUPED) and _is_large(read):
            beta_read = _memory(read[0]) if func is torch.ops.aten.addmm_.default else 0
            self.num_bytes[name] += beta_read
            return result
        self.num_bytes[name] += _moved(func, read, written)
        return result


def _zero_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    if func._schema.is_mutable:
        written: torch.Tensor = kwargs.get("out", args[0])
        return written.zero_()
    *_, left, right = args
    product: torch.Tensor = left.new_zeros(*left.shape[:-1], right.shape[-1])
    return product


def _moved(func: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
    if func in _GATHERS:
        return 2 * sum(map(_memory, written)) + sum(map(_memory, read[1:]))
    if func is torch.ops.aten.index_add_.default:
        *_, indices, values = read  # rows of the result are read and written
        return _memory(indices) + _memory(values) + 2 * values.numel() * written[0].itemsize
    return sum(map(_memory, (*read, *written)))


def _memory(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _moves(func: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation runs a kernel: views, shapes and empty memory do not."""
    name = func.overloadpacket.__name__
    if not written or name in (
        "detach",
        "alias",
        "empty",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "t",
    ):
        return False
    if func._schema.is_mutable:
        return True
    places = {t.untyped_storage()._cdata for t in read}  # those without values have no address
    return any(t.untyped_storage()._cdata not in places for t in written)


def _is_large(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no side of a product is narrow."""
    return all(min(t.shape[-2:]) >= NARROW for t in tensors if t.dim() >= 2)
