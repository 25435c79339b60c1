"""DoRA on linears that share an input, against its formula written out in autograd."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.pointwise.magnitudes import row_norms
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.facts import facts
from tests.counted import Counted

SHAPES = ((24, 3, 0.5), (8, 5, 1.5), (16, 2, 2.0))  # of a group: features out, rank, scaling
K = 12


def made(dtype: torch.dtype, *, bias: bool, is_new: bool = False) -> list[AdaptedLinear]:
    """Return a group whose magnitudes differ from the norms, unless the adapter is new."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    group = []
    for features, rank, scaling in SHAPES:
        weight_MK, b_MR = random(features, K).to(dtype), random(features, rank).float()
        norm_M = torch.linalg.norm(weight_MK.float(), dim=1)
        of_norm_M = 1.0 if is_new else (0.5 + torch.rand(features, generator=draw))
        low = LowRank(
            a_RK=random(rank, K).float().requires_grad_(),
            b_MR=(b_MR * (not is_new)).requires_grad_(),
            scaling=scaling,
        )
        group.append(
            AdaptedLinear(
                weight_MK=weight_MK,
                bias_M=random(features).to(dtype) if bias else None,
                branches=(low,),
                magnitude_M=(norm_M * of_norm_M).requires_grad_(),
            )
        )
    return group


def written_out(x: torch.Tensor, linears: list[AdaptedLinear]) -> list[torch.Tensor]:
    """The formula in float64."""
    outputs = []
    for one in linears:
        (low,), magnitude_M = one.branches, one.magnitude_M
        assert magnitude_M is not None
        merged_MK = one.weight_MK.double() + low.scaling * low.b_MR.double() @ low.a_RK.double()
        norm_M = merged_MK.detach().square().sum(dim=1).sqrt()
        y = F.linear(x.double(), merged_MK) * (magnitude_M.double() / norm_M)
        outputs.append(y if one.bias_M is None else y + one.bias_M.double())
    return outputs


def trained(linears: list[AdaptedLinear]) -> list[torch.Tensor]:
    found = [t for one in linears for low in one.branches for t in (low.a_RK, low.b_MR)]
    return found + [one.magnitude_M for one in linears if one.magnitude_M is not None]


@pytest.mark.parametrize("chunk", [2**18, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_a_group_computes_the_formula_and_its_gradients(
    bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(facts.NORM_ELEMENTS, "cpu", chunk)
    monkeypatch.setitem(facts.SUM_ELEMENTS, "cpu", chunk)
    torch.manual_seed(1)
    linears = made(torch.float32, bias=bias)
    x = torch.randn(2, 7, K).requires_grad_()
    ours, theirs = apply_linears(x, linears), written_out(x, linears)
    cotangents = [torch.randn_like(y) for y in ours]
    for y, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for y, same in zip(ours, apply_linears(x, linears), strict=True):
            assert torch.equal(y, same)
    wanted = [x, *trained(linears)]
    found = torch.autograd.grad(ours, wanted, cotangents)
    truth = torch.autograd.grad(theirs, wanted, [g.double() for g in cotangents])
    for gradient, true in zip(found, truth, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, true.float(), rtol=1e-5, atol=1e-5)


def test_norms_are_computed_once_in_a_pass_and_change_no_bit() -> None:
    linears, x = made(torch.bfloat16, bias=True), torch.randn(2, 7, K).bfloat16().requires_grad_()
    wanted = [x, *trained(linears)]

    def visited(visit: str) -> tuple[list[torch.Tensor], Counted]:
        VISIT_CACHE.enter(visit)
        with Counted() as counted:
            outputs = apply_linears(x, linears, key="group")
        return [*outputs, *torch.autograd.grad([y.sum() for y in outputs], wanted)], counted

    alone, _ = visited("up")
    VISIT_CACHE.enter(None)
    with VISIT_CACHE.in_pass():
        up, first = visited("up")
        down, later = visited("down")
    assert all(map(torch.equal, up, alone))
    assert all(map(torch.equal, down, alone))
    assert first.num_ops["linalg_vector_norm"] == len(SHAPES)
    assert "linalg_vector_norm" not in later.num_ops


def test_adapters_of_one_linear_have_norms_of_their_own_and_each_pass_new_ones() -> None:
    one, x = made(torch.float32, bias=False)[0], torch.randn(3, K)
    (low,) = one.branches
    other = replace(one, branches=(replace(low, b_MR=-low.b_MR.detach()),))
    with torch.no_grad():
        for _ in range(2):
            with VISIT_CACHE.in_pass():
                for linear in (one, other):
                    VISIT_CACHE.enter(linear)
                    (y,) = apply_linears(x, [linear], key="the same")
                    (true,) = written_out(x, [linear])
                    torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=1e-5)
            low.b_MR.mul_(3)


def test_norms_are_as_exact_where_a_branch_cancels_most_of_a_row() -> None:
    torch.manual_seed(0)
    a_RK, b_MR, left_MK = torch.randn(4, 512), torch.randn(64, 4), torch.randn(64, 512).double()
    branch_MK = 2.0 * b_MR.double() @ a_RK.double()
    left_MK *= branch_MK.norm() / left_MK.norm()
    for share in (0.3, 0.1, 0.01):
        weight_MK = (share * left_MK - branch_MK).float()
        found_M = row_norms(weight_MK, a_RK=a_RK, b_MR=b_MR, scaling=2.0)
        true_M = (weight_MK.double() + branch_MK).square().sum(dim=1).sqrt()
        torch.testing.assert_close(found_M.double(), true_M, rtol=2e-6, atol=0.0)
