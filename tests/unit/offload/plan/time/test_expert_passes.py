"""Passes over routed rows, counted from what the launcher hands the fused kernels."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.adapter.expert_lora import compute_beside
from offload.engine.experts import fused, lora
from offload.engine.tracing.experts import SilentLauncher
from offload.plan.time.expert_passes import way_of
from tests.parity.experts import Sizes, adapted_experts, chosen

SIZES = Sizes(512, 256, 4, 64, 2)
NUM_ROWS, SIZE = SIZES.num_tokens * SIZES.num_choices, torch.bfloat16.itemsize
# Of the kernels: what each reads or writes besides the rows and matrices of a large product.
MOVED = {"activate": ("out", "gates"), "activate_backward": ("gates", "of_gates", "out")}


class Count(TorchDispatchMode):
    """Bytes of kernels and of sums over tokens, in this way: routed rows, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rows = self.of_branches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sum.dim_IntList and out.shape[-1] == SIZES.hidden:
            self.of_rows += NUM_ROWS * SIZES.hidden * SIZE  # the tokens that it writes are fewer
        if func in (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar):
            self.of_branches += sum(_bytes(x) for x in tree_leaves(out))
        return out


class _Kernels:
    """In place of the module of kernels: what is launched is counted."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def __getattr__(self, name: str) -> "_Kernel":
        return _Kernel(self._count, name)


class _Kernel:
    def __init__(self, count: Count, name: str) -> None:
        self._count, self._name = count, name

    def __getitem__(self, grid: object) -> "_Kernel":
        return self

    def __call__(self, **given: Any) -> None:
        if self._name in MOVED:
            self._count.of_rows += sum(_bytes(given[name]) for name in MOVED[self._name])
        elif self._name == "sum_outer":
            self._count.of_branches += NUM_ROWS * given["num_n"] * SIZE
        elif given["num_n"] < SIZES.hidden:  # rows times A or B
            self._count.of_branches += NUM_ROWS * given["num_k"] * SIZE
        else:
            self._count.of_rows += _bytes(given["out"])


def _bytes(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


@pytest.mark.parametrize("visit", ["forward", "recompute", "left out", "backward"])
def test_fused_kernels_move_what_the_plan_says_within_a_tenth(visit: str) -> None:
    model: Any = compute_beside(adapted_experts("gated", "eager", torch.bfloat16, sizes=SIZES))
    model.get_base_model().config._experts_implementation = lora.TRITON + lora.SUFFIX
    hidden_TD, expert_TC, weight_TC = chosen("mixed", torch.bfloat16, sizes=SIZES)
    hidden_TD.requires_grad_()
    counted = Count()

    class Counting(SilentLauncher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._kernels = _Kernels(counted)

    def forward(*, has_graph: bool = True) -> torch.Tensor:
        wrapper = model.get_base_model().experts
        run = wrapper.without_value if visit == "left out" else wrapper
        with torch.set_grad_enabled(has_graph):
            out: torch.Tensor = run(hidden_TD, expert_TC, weight_TC)
        return out

    with mock.patch.object(fused, "Launcher", Counting):
        if visit == "backward":
            out = forward()
            counted.of_rows = counted.of_branches = 0
            with counted:
                out.backward(torch.ones_like(out))
        else:
            with counted:
                forward(has_graph=visit != "forward")

    way = way_of("triton")
    passes = {"forward": way.forward, "backward": way.backward}.get(visit, way.recompute)
    features = passes.features(width=SIZES.width, hidden=SIZES.hidden)
    if visit == "left out":
        features -= way.down.features(width=SIZES.width, hidden=SIZES.hidden)
    branch = way.branch_backward if visit == "backward" else way.branch_forward
    sides = [(SIZES.hidden, 2 * SIZES.width), (SIZES.width, SIZES.hidden)]
    of_branches = sum(branch.d_in * d_in + branch.d_out * d_out for d_in, d_out in sides)
    assert NUM_ROWS * SIZE * features == pytest.approx(counted.of_rows, rel=0.1)
    assert NUM_ROWS * SIZE * of_branches == pytest.approx(counted.of_branches, rel=0.1)
