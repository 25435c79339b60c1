"""A stand-in for torch's attention of rows of any lengths, which computes on CUDA alone.

It is registered as the operator's kernel on the CPU, so the operator's own front, schema and
gradient run. Forward and backward are written out in float32, one row after the other.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch


@dataclass(kw_only=True)
class VariableLength:
    """The stand-in: what it was asked, and whether rows see those before them."""

    windows: list[tuple[int, int]] = field(default_factory=list)
    num_backwards: int = 0
    leaks: bool = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: list[int] | None = None,
        *_others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return output (T, H, K), log-sum-exp (H, T), and the state of dropout that is off."""
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert max_q == max_k == int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
        assert int(cu_seq_q[-1]) == len(query)
        assert window_size is not None
        assert is_causal == (window_size == [-1, 0])
        self.windows.append((window_size[0], window_size[1]))
        output, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
        for rows in self._rows(cu_seq_q):
            scores_HTT, _ = _scores(query[rows], key[rows], scale, window_size)
            sums[:, rows] = scores_HTT.logsumexp(-1)
            v = _heads(value[rows], query.shape[1])
            output[rows] = (scores_HTT.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        return output, sums, torch.zeros(2, dtype=torch.uint64)

    def backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool,
        rng_state: torch.Tensor,
        scale: float | None = None,
        window_size: list[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients, from output and log-sum-exp as they were returned."""
        self.num_backwards += 1
        num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
        grads = [torch.empty_like(x) for x in (query, key, value)]
        for rows in self._rows(cu_seq_q):
            scores_HTT, factor = _scores(query[rows], key[rows], scale, window_size or [-1, -1])
            p = (scores_HTT - lse[:, rows, None]).exp()
            q, o, g = (x[rows].float().transpose(0, 1) for x in (query, out, grad_out))
            k, v = (_heads(x[rows], num_heads) for x in (key, value))
            ds = p * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * factor
            of_k, of_v = (x.unflatten(0, (-1, group)).sum(1) for x in (ds.mT @ q, p.mT @ g))
            for grad, found in zip(grads, (ds @ k, of_k, of_v), strict=True):
                grad[rows] = found.transpose(0, 1).to(grad.dtype)
        return grads[0], grads[1], grads[2]

    def _rows(self, ends: torch.Tensor) -> list[slice]:
        starts = [0, int(ends[-1])] if self.leaks else ends.tolist()
        return [slice(*pair) for pair in pairwise(starts)]


def _heads(x_TGK: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_TGK.float().transpose(0, 1).repeat_interleave(num_heads // x_TGK.shape[1], 0)


def _scores(
    q_THK: torch.Tensor, k_TGK: torch.Tensor, scale: float | None, window: list[int]
) -> tuple[torch.Tensor, float]:
    """Return scores (H, T, T), where what is not seen is minus infinity, and their factor."""
    factor = q_THK.shape[-1] ** -0.5 if scale is None else scale
    scores_HTT = q_THK.float().transpose(0, 1) @ _heads(k_TGK, q_THK.shape[1]).mT * factor
    at = torch.arange(len(q_THK))
    back = at[:, None] - at
    unseen = back < -window[1] if window[1] >= 0 else torch.zeros_like(back, dtype=torch.bool)
    if window[0] >= 0:
        unseen |= back > window[0]
    return scores_HTT.masked_fill(unseen, -torch.inf), factor


@contextmanager
def variable_length(*, leaks: bool = False) -> Iterator[VariableLength]:
    """Let torch's operator compute on the CPU, by the stand-in."""
    from torch.nn.attention import varlen

    double, operators = (
        VariableLength(leaks=leaks),
        (varlen._varlen_attn, varlen._varlen_attn_backward),
    )
    kernels = (double.forward, double.backward)
    with ExitStack() as stack:
        for operator, kernel in zip(operators, kernels, strict=True):
            operator.register_kernel("cpu", _called(kernel))
            stack.enter_context(operator.set_kernel_enabled("cpu", enabled=True))
            stack.callback(operator.register_kernel, "cpu", operator._init_fn)
        yield double


def _called(kernel: Any) -> Any:
    return lambda *args: kernel(*args)
