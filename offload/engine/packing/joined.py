"""Attention of all packed rows in one call, by torch's operator for rows of any lengths.

Problem. Row by row, attention of n rows is n calls of a kernel, each too small for a GPU, and a row
longer than a sliding window brings a mask of its tokens squared, which rules flash attention out.

Idea. `torch.nn.attention.varlen.varlen_attn` is passed the tokens of all rows end to end, where
each row ends, and a window as a number. It is flash attention: it keeps its output and a
log-sum-exp, has no mask, and takes keys and values of fewer heads as they are. Whether it computes
the same is known before a call: in 16 bits on CUDA, with heads that flash attention supports, rows
that are causal or see one window, and without dropout, biases, soft caps or sinks. All else is
computed row by row, float32 too. Whether rows are causal is read off each row's own mask, once for
each micro-batch: a mask is compared with that of a window, and no other is joined.

The operator takes different keywords in different versions of torch, so its signature is asked.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from offload.plan.facts.attention import can_join_rows

_NEEDED = {"scale", "window_size"}
_UNSUPPORTED = ("dropout", "position_bias", "softcap", "s_aux", "cache", "output_attentions")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedRows:
    """Rows end to end, as the operator takes them.

    Attributes:
        ends: Where rows begin, and the end of the last one: int32, (rows + 1,).
        longest: Tokens of the longest row.
        window: Tokens that a token sees, itself included; None for all before it.
    """

    ends: torch.Tensor
    longest: int
    window: int | None

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device) -> "JoinedRows":
        """Return causal rows; copies where they end to the device."""
        starts = [sum(lens[:number]) for number in range(len(lens) + 1)]
        is_pinned = device.type == "cuda"  # the host need not wait for the copy
        ends = torch.tensor(starts, dtype=torch.int32, pin_memory=is_pinned)
        ends = ends.to(device, non_blocking=True)
        return cls(ends=ends, longest=max(lens), window=None)

    def seeing(self, lens: Sequence[int], masks: Sequence[Any]) -> "JoinedRows | None":
        """Return the rows as their masks let them see; None if the operator cannot.

        Waits for the device if a row has a mask.
        """
        both = zip(lens, masks, strict=True)
        pairs = [(length, _seen_tokens(mask, length)) for length, mask in both]
        windows = {seen for length, seen in pairs if seen is not None and seen < length}
        window = min(windows, default=self.longest)
        if any(seen is None or (seen != window and length > window) for length, seen in pairs):
            return None
        return replace(self, window=window) if windows else self


def _seen_tokens(mask: Any, length: int) -> int | None:
    """Return how many tokens each token of a row sees, itself included; None if not all the same.

    Args:
        mask: (1, 1, T, T), where True is seen; None where all tokens before one are.
        length: Tokens of the row.
    """
    if mask is None:
        return length
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return None
    if mask.shape != (1, 1, length, length):
        return None
    num = int(mask[0, 0, -1].sum())
    causal = torch.ones_like(mask[0, 0]).tril()
    return num if torch.equal(mask[0, 0], causal.triu(1 - num)) else None


def joined_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: JoinedRows,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """Compute attention of all rows in one call; None if the operator does not compute it.

    Args:
        module: The attention, which calls `sdpa` if rows are not packed.
        query: (1, H, T, K), as are `key` and `value` with their heads.
        key: Of all tokens.
        value: Of all tokens.
        rows: Where rows end.
        options: What the model's attention is passed besides.

    Returns:
        Its output (1, T, H, K).
    """
    num_heads, num_kv_heads, features = query.shape[1], key.shape[1], query.shape[3]
    is_possible = (
        not any(_is_set(options.get(name)) for name in _UNSUPPORTED)
        and options.get("is_causal") in (None, True)
        and getattr(module, "is_causal", True)
        and features == key.shape[3] == value.shape[3]
        and num_heads % num_kv_heads == 0
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and can_join_rows(features)
        and _has_kernel(query.device, query.dtype, num_heads, num_kv_heads, features)
    )
    if not is_possible:
        return None
    return call_operator(query, key, value, rows=rows, scale=options.get("scaling"))


def _is_set(option: object) -> bool:
    return isinstance(option, torch.Tensor) or bool(option)


def call_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: JoinedRows,
    scale: float | None,
) -> torch.Tensor:
    """Call torch's operator; for the arguments see `joined_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    q_THK, k_THK, v_THK = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    left = -1 if rows.window is None else rows.window - 1
    more: dict[str, Any] = {}
    if "enable_gqa" in _keywords():  # other versions detect fewer key heads themselves
        more["enable_gqa"] = query.shape[1] != key.shape[1]
    output_THK = varlen_attn(
        q_THK,
        k_THK,
        v_THK,
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(left, 0),
        **more,
    )
    assert isinstance(output_THK, torch.Tensor)
    return output_THK.unsqueeze(0)


@cache
def _keywords() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _has_kernel(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, features: int
) -> bool:
    """Return whether flash attention computes such heads on a device, with gradients."""
    if not _keywords() >= _NEEDED:
        return False
    if device.type != "cuda":  # a kernel may have been registered for it
        return True
    q, k = (
        torch.empty(1, num, 8, features, device=device, dtype=dtype, requires_grad=True)
        for num in (num_heads, num_kv_heads)
    )
    is_causal, is_grouped = True, num_heads != num_kv_heads
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, is_causal, is_grouped)
    return torch.backends.cuda.can_use_flash_attention(params)
