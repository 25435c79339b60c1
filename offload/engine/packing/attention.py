"""Attention of packed rows, none of which sees another, by the model's own attention function.

Transformers looks attention up by the name in a config, at each call. While a layer computes packed
rows, the name is that of the function below. It cuts queries, keys and values at the rows' ends and
calls, for each row, what the name meant before, with the mask that the row would have alone. So a
fused kernel sees a causal row without a mask, a window or a sink is the model's own, and nothing of
T x T exists but a row's own mask, where its model makes one.

On CUDA one kernel computes all rows at once where it gives the same, as
`offload.engine.packing.check` says.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.engine.packing.check import JoinedRows, PackedCall, joined_attention

NAME = "sluice_packed_rows"
JOINING = "sdpa"  # whose mask and scale are all that it reads
_FIELD = "_attn_implementation_internal"  # the public property sets sub-configs too


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The rows of the layer that is being computed, and how attention took them.

    Attributes:
        lens: Tokens of each row.
        masks: Each row's mask as it is alone; None for none.
        joined: The rows for one call; None to take them one by one.
        names: What a config called the layer's attention.
        has_joined: Whether all calls so far took them at once; None before the first.
    """

    lens: tuple[int, ...]
    masks: tuple[Any, ...]
    joined: JoinedRows | None
    names: dict[int, str | None]
    has_joined: bool | None = None


class _Current(threading.local):
    rows: _Rows | None = None


_current = _Current()


@contextmanager
def rows_apart(layer: nn.Module, call: PackedCall, *, joins: bool) -> Iterator[_Rows]:
    """Let a layer's attention keep rows apart meanwhile; yields how it did.

    Args:
        layer: The layer.
        call: Its rows.
        joins: Whether one call may compute all rows, where it can.
    """
    _register()
    found = (getattr(module, "config", None) for module in layer.modules())
    configs = {id(config): config for config in found if hasattr(config, _FIELD)}
    names = {key: getattr(config, _FIELD) for key, config in configs.items()}
    joined = call.joined if joins else None
    rows = _Rows(lens=call.lens, masks=call.masks, joined=joined, names=names)
    before, _current.rows = _current.rows, rows
    try:
        for config in configs.values():
            setattr(config, _FIELD, NAME)
        yield rows
    finally:
        for key, config in configs.items():
            setattr(config, _FIELD, names[key])
        _current.rows = before


def attention_by_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of packed rows; an attention function of transformers.

    Args:
        module: The attention.
        query: (1, H, T, K), as are `key` and `value` with their heads and features.
        key: Of all tokens.
        value: Of all tokens.
        attention_mask: Left aside: each row has its own.
        options: What the model's attention is passed besides.

    Returns:
        Its output (1, T, H, K), and no weights.
    """
    del attention_mask
    rows = _current.rows
    assert rows is not None, "only `rows_apart` names this function"
    name = rows.names[id(module.config)]
    if name == JOINING and rows.joined is not None:
        output = joined_attention(module, query, key, value, rows=rows.joined, options=options)
        if output is not None:
            rows.has_joined = rows.has_joined is not False
            return output, None
    rows.has_joined = False
    own = _own(module, name)
    parts = zip(*(x.split(rows.lens, dim=2) for x in (query, key, value)), rows.masks, strict=True)
    outputs = [own(module, q, k, v, mask, **options)[0] for q, k, v, mask in parts]
    return torch.cat(outputs, dim=1), None


def _own(module: nn.Module, name: str | None) -> Callable[..., Sequence[torch.Tensor]]:
    """Return the function that a module calls if rows are not packed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    code = sys.modules[type(module).__module__]
    eager: Any = getattr(code, "eager_attention_forward", None)
    own: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name or "eager", eager)
    if own is None:
        raise NotImplementedError(f"{type(module).__name__} has no attention function to call")
    return own  # type: ignore[no-any-return]


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_by_rows)
