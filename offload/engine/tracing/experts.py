"""Traces mixtures of experts whose kernels cannot run on fake tensors, by their output shapes.

A loop over experts reads the number of rows of each, and fake tensors have no values: here all
experts get the same number. Saved tensors do not depend on the routing. Temporary memory for one
expert at a time grows with the largest expert, so a trace underestimates it.

Triton kernels are not launched. Their launcher allocates all their outputs, so these are counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.experts import fused
from offload.engine.experts.gates import Gate
from offload.engine.experts.launcher import Launcher
from offload.engine.experts.products import Loop
from offload.engine.experts.routing import Routing
from offload.engine.experts.tiles import Blocks, blocks_for
from offload.engine.tracing.cuda_kernels import Capability


@contextmanager
def traced_experts(num_experts: int, capability: Capability | None) -> Iterator[None]:
    """Let every implementation of experts run on fake tensors.

    Args:
        num_experts: Of a layer.
        capability: Of the GPU, which determines the kernels' layout; None without one.
    """

    def blocks_there(_: object, dtype: torch.dtype, *, rows_per_expert: int) -> Blocks:
        return blocks_for(capability, dtype, rows_per_expert=rows_per_expert)

    with (
        mock.patch.object(Loop, "_read_sizes", staticmethod(_even_sizes)),
        mock.patch.object(fused, "Launcher", SilentLauncher),
        mock.patch.object(fused, "blocks_for", blocks_there),
        _Answers(num_experts),
    ):
        yield


def _even_sizes(routing: Routing) -> list[int]:
    num_rows, num_experts = routing.token_S.numel(), routing.end_E.numel()
    ends = [num_rows * i // num_experts for i in range(num_experts + 1)]
    return [end - start for start, end in pairwise(ends)]


class SilentLauncher(Launcher):
    """Allocates the kernels' outputs, and launches none."""

    def __init__(self, routing: Routing, gate: Gate, blocks: Blocks) -> None:
        """Keep the kernels' configuration."""
        self._kernels = _Silence()
        self._routing, self._gate, self._blocks = routing, gate, blocks
        self._num_rows, self._num_experts = routing.token_S.numel(), routing.end_E.numel()


class _Silence:
    """A module of kernels that do nothing, and keep nothing that they are given."""

    def __getattr__(self, name: str) -> "_Silence":
        return self

    def __getitem__(self, grid: object) -> "_Silence":
        return self

    def __call__(self, **_: object) -> None:
        return None


class _Answers(TorchDispatchMode):
    """Answers what torch and transformers' own loops ask of values."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._num_experts = num_experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.nonzero.default:  # which experts have rows, or which rows an expert has
            found, num_experts = args[0], self._num_experts
            is_choice = found.dim() == 2 and min(found.shape) > 1
            num_rows = -(-found.numel() // num_experts) if is_choice else num_experts
            return torch.empty(num_rows, found.dim(), dtype=torch.long)
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(*args[:3])
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


def _grouped(left: torch.Tensor, right: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
    """Return what grouped products do: torch's own answer for fake tensors is for bfloat16."""
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (end_E.numel(), *shape))
