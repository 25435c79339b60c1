"""DoRA on linears that share an input, against its formula written out in autograd."""

import pytest
import torch
from torch.nn import functional as F

from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.plan.facts import magnitudes

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
    monkeypatch.setitem(magnitudes.NORM_ELEMENTS, "cpu", chunk)
    monkeypatch.setitem(magnitudes.SUM_ELEMENTS, "cpu", chunk)
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
