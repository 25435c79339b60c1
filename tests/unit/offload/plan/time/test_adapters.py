"""What the plan says that branches of linear layers move, against what their code moves."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear

from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.facts.facts import AdapterSpec, model_facts
from offload.plan.facts.linears import Linear
from offload.plan.time.adapters import branches, visit_norm, visit_scale
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import Work
from tests.builders import byte_machine, workload
from tests.counted import SMALL, Counted
from tests.tiers import diagonal

T = 512
FACTS = model_facts(SMALL)
TARGETS = tuple(linear.name for linear in FACTS.layers[0].linears)
GROUPS = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]


def planned(
    names: tuple[str, ...], rank: int, dtype: torch.dtype, *, left_out: bool = False
) -> tuple[Work, Work]:
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(rank=rank, targets=TARGETS, experts=False, is_in_base_dtype=True),
    )
    at = Pricer(machine=byte_machine(dtype.itemsize), facts=FACTS, workload=load)
    adapted = [linear for linear in FACTS.layers[0].linears if linear.name in names]
    found = branches(at, adapted, left_out=adapted if left_out else ())
    return found.recompute, found.backward


def made(linear: Linear, rank: int, dtype: torch.dtype) -> AdaptedLinear:
    low = LowRank(
        a_RK=torch.randn(rank, linear.d_in, requires_grad=True),
        b_MR=torch.randn(linear.d_out, rank, requires_grad=True),
        scaling=2.0,
    )
    weight = torch.randn(linear.d_out, linear.d_in).to(dtype)
    return AdaptedLinear(weight_MK=weight, bias_M=None, branches=(low,))


def counted(
    names: tuple[str, ...], rank: int, dtype: torch.dtype, *, left_out: bool = False
) -> tuple[Counted, Counted]:
    """Count a micro-batch that is not the first: its gradients are added to what is there."""
    linears = [x for x in FACTS.layers[0].linears if x.name in names]
    group = [made(linear, rank, dtype) for linear in linears]
    x = torch.randn(1, T, linears[0].d_in).to(dtype).requires_grad_()
    _pass_through(group, x, has_value=not left_out)
    return _pass_through(group, x, has_value=not left_out)


def _pass_through(
    group: list[AdaptedLinear], x: torch.Tensor, *, has_value: bool = True, key: object = None
) -> tuple[Counted, Counted]:
    forward, backward = Counted(multiplies=False), Counted(multiplies=False)
    with forward:
        outputs = apply_linears(x, group, key=key, has_value=has_value)
    cotangents = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
    x.grad = None
    with backward:
        torch.autograd.backward(outputs, cotangents)
    return forward, backward


@pytest.mark.parametrize(
    ("names", "rank", "dtype"), diagonal(GROUPS, [16, 64], [torch.float32, torch.bfloat16])
)
def test_branches_move_what_the_plan_says_within_a_tenth(
    names: tuple[str, ...], rank: int, dtype: torch.dtype
) -> None:
    for said, found in zip(planned(names, rank, dtype), counted(names, rank, dtype), strict=True):
        assert said.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        assert said.num_ops == found.total_ops - len(names), found.num_ops  # but for W's products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q_proj", "down_proj"])
def test_a_branch_by_peft_moves_what_the_plan_says_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    (linear,) = (x for x in FACTS.layers[0].linears if x.name == name)
    adapter = AdapterSpec(rank=16, targets=(name,), experts=False)
    load = replace(
        workload(), micro_batch_size=1, seq_len=T, dtype_bytes=dtype.itemsize, adapter=adapter
    )
    tall = byte_machine(4).tall_fp32_flops_per_s
    machine = replace(byte_machine(dtype.itemsize), tall_fp32_flops_per_s=tall)
    said = branches(Pricer(machine=machine, facts=FACTS, workload=load), [linear], left_out=())
    base = torch.nn.Linear(linear.d_in, linear.d_out, bias=False, dtype=dtype)
    wrapped = LoraLinear(
        base.requires_grad_(requires_grad=False), "default", LoraConfig(r=16, lora_alpha=32), r=16
    )
    for low in (wrapped.lora_A, wrapped.lora_B):
        low["default"].to(torch.float32)
    x = torch.randn(1, T, linear.d_in).to(dtype).requires_grad_()

    def count() -> tuple[Counted, Counted]:
        x.grad = None
        forward, backward = Counted(multiplies=False), Counted(multiplies=False)
        with forward:
            y = wrapped(x)
        gradient = torch.randn_like(y)
        with backward:
            y.backward(gradient)
        return forward, backward

    count()
    forward, backward = count()  # its gradients are added to those of the first
    for work, found in ((said.forward, forward), (said.backward, backward)):
        assert work.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        if dtype is torch.bfloat16:  # without casts there are fewer
            assert work.num_ops == found.total_ops - 1, found.num_ops  # but for W's product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [16, 64])
def test_a_recompute_without_values_moves_what_the_plan_says_within_a_tenth(
    rank: int, dtype: torch.dtype
) -> None:
    said, backward = planned(("down_proj",), rank, dtype, left_out=True)
    found, after = counted(("down_proj",), rank, dtype, left_out=True)
    assert said.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
    assert said.num_ops == found.total_ops, found.num_ops
    assert backward.memory_s == pytest.approx(after.total_bytes, rel=0.1)
    assert backward.num_ops == after.total_ops - 1  # but for W's product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q_proj", "down_proj"])
def test_a_dropout_before_a_branch_moves_what_the_plan_says_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    (linear,) = (x for x in FACTS.layers[0].linears if x.name == name)
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=dtype.itemsize,
        adapter=AdapterSpec(
            rank=16, targets=TARGETS, experts=False, is_in_base_dtype=True, has_dropout=True
        ),
    )
    machine = replace(byte_machine(dtype.itemsize), device="cpu")
    said = branches(Pricer(machine=machine, facts=FACTS, workload=load), [linear], left_out=())
    one, x = made(linear, 16, dtype), torch.randn(1, T, linear.d_in).to(dtype).requires_grad_()

    def count() -> tuple[Counted, Counted]:
        x.grad = None
        forward, backward = Counted(multiplies=False), Counted(multiplies=False)
        with forward:
            (y,) = apply_linears(x, [one], x_branch=torch.dropout(x, 0.1, train=True))
        gradient = torch.randn_like(y)
        with backward:
            y.backward(gradient)
        return forward, backward

    count()
    forward, backward = count()  # its gradients are added to those of the first
    for work, found in ((said.forward, forward), (said.backward, backward)):
        assert work.memory_s == pytest.approx(found.total_bytes, rel=0.1), dict(found.num_bytes)
        assert work.num_ops == found.total_ops - 1, found.num_ops  # but for W's product


def with_magnitude(one: AdaptedLinear) -> AdaptedLinear:
    magnitude_M = torch.linalg.norm(one.weight_MK.float(), dim=1).requires_grad_()
    return replace(one, magnitude_M=magnitude_M)


@pytest.mark.parametrize(
    ("names", "rank", "dtype"), diagonal(GROUPS, [16, 64], [torch.float32, torch.bfloat16])
)
def test_dora_moves_what_the_plan_says_within_a_tenth(
    names: tuple[str, ...], rank: int, dtype: torch.dtype
) -> None:
    adapter = AdapterSpec(
        rank=rank, targets=TARGETS, experts=False, is_in_base_dtype=True, is_dora=True
    )
    load = replace(
        workload(), micro_batch_size=1, seq_len=T, dtype_bytes=dtype.itemsize, adapter=adapter
    )
    machine = replace(byte_machine(dtype.itemsize), device="cpu")
    at = Pricer(machine=machine, facts=FACTS, workload=load)
    linears = [linear for linear in FACTS.layers[0].linears if linear.name in names]
    said = branches(at, linears, left_out=())
    group = [with_magnitude(made(linear, rank, dtype)) for linear in linears]
    x = torch.randn(1, T, linears[0].d_in).to(dtype).requires_grad_()
    _pass_through(group, x)  # gradients of the next are added to its own
    with VISIT_CACHE.in_pass():
        VISIT_CACHE.enter("a visit")
        first, backward = _pass_through(group, x, key="group")
        later, again = _pass_through(group, x, key="group")
        VISIT_CACHE.enter("downwards")
        down, _ = _pass_through(group, x, key="group")
    assert again.num_bytes == backward.num_bytes
    assert first.total_ops > down.total_ops > later.total_ops
    assert not any("norm" in name for name in down.num_ops)
    scaled = sum((visit_scale(at, linear) for linear in linears), start=said.recompute)
    assert scaled.memory_s == pytest.approx(down.total_bytes, rel=0.1), dict(down.num_bytes)
    assert scaled.num_ops == down.total_ops - len(names), down.num_ops
    once = sum((visit_norm(at, linear) for linear in linears), start=scaled)
    assert once.memory_s == pytest.approx(first.total_bytes, rel=0.1), dict(first.num_bytes)
    assert once.num_ops == first.total_ops - len(names), first.num_ops
    assert said.backward.memory_s == pytest.approx(backward.total_bytes, rel=0.1)
    assert said.backward.num_ops == backward.total_ops - len(names), backward.num_ops
