"""Linears with low-rank branches, against the formula written out in autograd."""

import pytest
import torch
from torch.nn import functional as F

from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.visit_cache import VISIT_CACHE

SHAPES = ((24, 3), (8, 5), (16, 2))  # of a group: features out, rank
K = 12


def made(dtype: torch.dtype, *, bias: bool = True, num_adapters: int = 1) -> list[AdaptedLinear]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [
        AdaptedLinear(
            weight_MK=random(features, K).to(dtype),
            bias_M=random(features).to(dtype) if bias else None,
            branches=tuple(
                LowRank(
                    a_RK=random(rank + i, K).float().requires_grad_(),
                    b_MR=random(features, rank + i).float().requires_grad_(),
                    scaling=0.5 + i,
                )
                for i in range(num_adapters)
            ),
        )
        for features, rank in SHAPES
    ]


def written_out(
    x: torch.Tensor, linears: list[AdaptedLinear], x_branch: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The formula in float64."""
    x64 = x.double()
    branch = x64 if x_branch is None else x_branch.double()
    outputs = []
    for one in linears:
        bias = None if one.bias_M is None else one.bias_M.double()
        y = F.linear(x64, one.weight_MK.double(), bias)
        for low in one.branches:
            y = y + low.scaling * (branch @ low.a_RK.double().t()) @ low.b_MR.double().t()
        outputs.append(y)
    return outputs


def factors(linears: list[AdaptedLinear]) -> list[torch.Tensor]:
    return [t for one in linears for low in one.branches for t in (low.a_RK, low.b_MR)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_branch_is_rounded_before_the_larger_product_adds_to_it(bias: bool) -> None:
    """In bf16 an output errs by little more than its own rounding: W x was not rounded before."""
    torch.manual_seed(1)
    small = LowRank(a_RK=0.1 * torch.randn(4, 256), b_MR=0.1 * torch.randn(320, 4), scaling=1.5)
    weight_MK, bias_M = torch.randn(320, 256).bfloat16(), 0.1 * torch.randn(320)
    one = AdaptedLinear(
        weight_MK=weight_MK, bias_M=bias_M.bfloat16() if bias else None, branches=(small,)
    )
    x = torch.randn(1, 300, 256).bfloat16()
    (y,), (true,) = apply_linears(x, [one]), written_out(x, [one])
    rounding = (true.bfloat16().double() - true).norm()
    assert (y.double() - true).norm() <= 1.05 * rounding


@pytest.mark.parametrize("num_adapters", [1, 2])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_group_computes_the_formula_and_its_gradients(
    num_adapters: int, has_dropout: bool, bias: bool
) -> None:
    torch.manual_seed(1)
    linears = made(torch.float32, bias=bias, num_adapters=num_adapters)
    x = torch.randn(2, 7, K).requires_grad_()
    dropped = F.dropout(x, 0.4) if has_dropout else None
    ours = apply_linears(x, linears, x_branch=dropped)
    theirs = written_out(x, linears, dropped)
    cotangents = [torch.randn_like(y) for y in ours]
    for y, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=1e-5)
    wanted = [x, *factors(linears)]
    found = torch.autograd.grad(ours, wanted, cotangents, retain_graph=has_dropout)
    truth = torch.autograd.grad(theirs, wanted, [g.double() for g in cotangents])
    for gradient, true in zip(found, truth, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, true.float(), rtol=1e-5, atol=1e-5)


def test_an_output_that_nothing_reads_has_no_part_in_the_gradients() -> None:
    torch.manual_seed(1)
    linears = made(torch.float32)
    x = torch.randn(7, K).requires_grad_()
    ours, theirs = apply_linears(x, linears)[1], written_out(x, linears)[1]
    cotangent = torch.randn_like(ours)
    found = torch.autograd.grad(ours, [x, *factors(linears)], cotangent, allow_unused=True)
    truth = torch.autograd.grad(
        theirs, [x, *factors(linears)], cotangent.double(), allow_unused=True
    )
    for gradient, true in zip(found, truth, strict=True):
        if true is None:
            assert gradient is None or not gradient.any()
        else:
            assert gradient is not None
            torch.testing.assert_close(gradient, true.float(), rtol=1e-5, atol=1e-5)


def test_outputs_may_be_changed_in_place() -> None:
    torch.manual_seed(1)
    linears = made(torch.float32)
    x = torch.randn(2, 7, K).requires_grad_()
    ours, *_ = apply_linears(x, linears)
    theirs, *_ = written_out(x, linears)
    found = torch.autograd.grad(ours.mul_(3).sin().sum(), [x, *factors(linears[:1])])
    truth = torch.autograd.grad((theirs * 3).sin().sum(), [x, *factors(linears[:1])])
    for gradient, true in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient, true.float(), rtol=1e-4, atol=1e-4)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    linears = made(torch.float32)
    for low in linears[0].branches:
        low.a_RK.requires_grad_(False)
    x = torch.randn(7, K)
    sum(y.sum() for y in apply_linears(x, linears)).backward()  # type: ignore[union-attr]
    assert linears[0].branches[0].a_RK.grad is None
    assert linears[0].branches[0].b_MR.grad is not None
    assert linears[1].branches[0].a_RK.grad is not None


def test_in_bf16_each_gradient_is_fp32_and_near_the_formula() -> None:
    torch.manual_seed(1)
    linears = made(torch.bfloat16)
    x = torch.randn(64, K).bfloat16().requires_grad_()
    ours, theirs = apply_linears(x, linears), written_out(x, linears)
    cotangents = [torch.randn_like(y) for y in ours]
    wanted = [x, *factors(linears)]
    found = torch.autograd.grad(ours, wanted, cotangents)
    truth = torch.autograd.grad(theirs, wanted, [g.double() for g in cotangents])
    for tensor, gradient, true in zip(wanted, found, truth, strict=True):
        assert gradient.dtype == tensor.dtype
        error = (gradient.double() - true.double()).norm() / true.double().norm()
        assert error < 2**-7


def test_a_visit_casts_factors_once_and_the_next_visit_casts_them_anew() -> None:
    linears = made(torch.bfloat16)
    x = torch.randn(3, K).bfloat16()
    try:
        VISIT_CACHE.enter("forward of a layer")
        with torch.no_grad():
            first = apply_linears(x, linears, key="group")
            for tensor in factors(linears):
                tensor.zero_()
            again = apply_linears(x, linears, key="group")
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            VISIT_CACHE.enter("another")
            later = apply_linears(x, linears, key="group")
    finally:
        VISIT_CACHE.enter(None)
    for y, one in zip(later, linears, strict=True):
        assert torch.equal(y, F.linear(x, one.weight_MK, one.bias_M))


def test_without_a_visit_nothing_is_kept() -> None:
    linears = made(torch.float32)
    x = torch.randn(3, K)
    with torch.no_grad():
        apply_linears(x, linears, key="group")
        for tensor in factors(linears):
            tensor.zero_()
        outputs = apply_linears(x, linears, key="group")
    for y, one in zip(outputs, linears, strict=True):
        assert torch.equal(y, F.linear(x, one.weight_MK, one.bias_M))
