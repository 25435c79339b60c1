"""Weights as they are."""

from collections.abc import Sequence

from offload.plan.facts.codec import Codec
from offload.tensors import Tensor


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    parts[0].view(values.dtype).view(values.shape).copy_(values)


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    values.view(-1).copy_(parts[0].view(values.dtype), non_blocking=True)


EXTENSION = Codec(
    doc="is `model.dtype`",
    sizes=lambda num_weights, dtype_bytes: (dtype_bytes * num_weights,),
    write=_write,
    read=_read,
    dtypes=(),
    is_exact=True,
)
