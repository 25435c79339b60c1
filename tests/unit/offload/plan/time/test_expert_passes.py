"""Passes over routed rows: by the plan, from the operators that run, and from what the launcher
hands the fused kernels."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.adapter.linear_lora import compute_beside
from offload.engine.experts import fused, lora
from offload.engine.tracing.tracer import fake_copy
from offload.engine.tracing.visits import SilentLauncher, traced_experts
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import ExpertsImplementation, Implementation
from offload.plan.time.adapters import expert_branch
from offload.plan.time.costs import ROUTER_BACKWARD_OPS, ROUTER_OPS, routing_work
from offload.plan.time.expert_passes import RowPasses, way_of
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import Work
from tests.builders import byte_machine, qwen3_30b, workload
from tests.counted import Counted
from tests.parity.experts import Sizes, adapted_experts, chosen
from tests.tiers import mostly_slow

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


def _features(passes: RowPasses) -> float:
    return passes.features(
        width=SIZES.width,
        hidden=SIZES.hidden,
        rows_per_token=SIZES.num_choices,
        num_experts=SIZES.num_experts,
    )


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

    way = way_of("triton", is_adapted=True, is_ours=True, dtype_bytes=SIZE)
    passes = {"forward": way.forward, "backward": way.backward}.get(visit, way.recompute)
    features = _features(passes)
    if visit == "left out":
        features -= _features(way.down)
    branch = way.branch_backward if visit == "backward" else way.branch_forward
    sides = [(SIZES.hidden, 2 * SIZES.width), (SIZES.width, SIZES.hidden)]
    of_branches = sum(branch.d_in * d_in + branch.d_out * d_out for d_in, d_out in sides)
    assert NUM_ROWS * SIZE * features == pytest.approx(counted.of_rows, rel=0.1)
    assert NUM_ROWS * SIZE * of_branches == pytest.approx(counted.of_branches, rel=0.1)


# No side of a frozen product is narrow, nor the rows of an expert few.
LARGE = Sizes(512, 256, 4, 1024, 2)
RANK = 16
Parts = dict[str, tuple[float, float]]  # bytes and launches


def counted(implementation: str, dtype: torch.dtype, *, is_adapted: bool) -> Parts:
    """Count experts by themselves, without values."""
    model: Any = adapted_experts("gated", "eager", dtype, sizes=LARGE, r=RANK)
    if is_adapted:
        compute_beside(model)
        model.get_base_model().config._experts_implementation = implementation + lora.SUFFIX
    else:
        model = model.unload()
        model.config._experts_implementation = implementation
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    found = {name: Counted() for name in ("forward", "recompute", "backward")}
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(traced_experts(LARGE.num_experts, (9, 0)))
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        hidden_TD, weight_TC = (
            torch.empty(LARGE.num_tokens, size, dtype=dtype, requires_grad=True)
            for size in (LARGE.hidden, LARGE.num_choices)
        )
        expert_TC = torch.empty(LARGE.num_tokens, LARGE.num_choices, dtype=torch.long)
        with found["forward"], torch.no_grad():
            fake(hidden_TD, expert_TC, weight_TC)
        with found["recompute"]:
            out = fake(hidden_TD, expert_TC, weight_TC)
        gradient = torch.empty_like(out)
        with found["backward"]:
            out.backward(gradient)
    return {name: (one.total_bytes, one.total_ops) for name, one in found.items()}


def said(implementation: ExpertsImplementation, dtype: torch.dtype, *, is_adapted: bool) -> Parts:
    """Return what the plan says of the same."""
    facts = qwen3_30b(
        hidden_size=LARGE.hidden,
        moe_intermediate_size=LARGE.width,
        num_experts=LARGE.num_experts,
        num_experts_per_tok=LARGE.num_choices,
    )
    machine = replace(
        byte_machine(dtype.itemsize),
        has_grouped_gemm=True,
        experts_implementation=Implementation(value=implementation, source="test"),
    )
    load = workload(
        seq_len=LARGE.num_tokens,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(rank=RANK, targets=(), experts=is_adapted),
    )
    at = Pricer(machine=machine, facts=facts, workload=load)
    experts = [x for x in facts.layers[0].linears if x.group == "experts"]
    routing = routing_work(at, facts.layers[0])
    branches = [expert_branch(at, linear) for linear in experts] if is_adapted else []
    parts: Parts = {}
    for name in ("forward", "recompute", "backward"):
        work = sum((getattr(one, name) for one in branches), start=getattr(routing, name))
        products = sum((Work(num_ops=at.expert_launches(x)) for x in experts), start=work)
        router = ROUTER_BACKWARD_OPS if name == "backward" else ROUTER_OPS
        parts[name] = (work.memory_s, products.num_ops - router)
    return parts


CASES = [
    (implementation, dtype, is_adapted)
    for implementation in ("eager", "grouped_mm")
    for is_adapted in (True, False)
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(
    ("implementation", "dtype", "is_adapted"),
    mostly_slow(CASES, CASES[0], CASES[4], CASES[6]),
    ids=str,
)
def test_experts_by_torch_move_and_launch_what_the_plan_says_within_a_tenth(
    implementation: ExpertsImplementation, dtype: torch.dtype, *, is_adapted: bool
) -> None:
    found = counted(implementation, dtype, is_adapted=is_adapted)
    for name, (num_bytes, num_ops) in said(implementation, dtype, is_adapted=is_adapted).items():
        assert num_bytes == pytest.approx(found[name][0], rel=0.1), name
        assert num_ops == pytest.approx(found[name][1], abs=1), name
