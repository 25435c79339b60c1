"""Fused operators of norms, rotations and activations: found in models and tried."""

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.utils.deprecation import deprecate_kwarg

from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.pointwise import ops, trial
from offload.engine.pointwise.layers import FusedLayers
from offload.engine.pointwise.magnitudes import row_norms
from offload.engine.pointwise.recognise import (
    GatedMlp,
    Norm,
    find_gated_mlp,
    find_norm,
    find_rotary,
)
from offload.engine.pointwise.trial import try_fused
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.facts import facts
from tests.counted import Counted
from tests.parity.steps import MODELS
from tests.tiers import mostly_slow


def norm(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(x.shape[-1], dtype=x.dtype)
    return ops.norm(x, weight, eps=1e-6, offset=0.0, is_cast_first=True)


def rotate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads = x.view(2, 3, 4, 8).transpose(1, 2)
    angles = torch.ones(1, 3, 8, dtype=x.dtype)
    return ops.rotate(heads, heads, angles, angles)


def norm_rotate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads = x.view(2, 3, 4, 8).transpose(1, 2)
    angles = torch.ones(1, 3, 8, dtype=x.dtype)
    return ops.norm_rotate(
        heads,
        heads,
        angles,
        angles,
        weights_D=(torch.ones(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)),
        eps=1e-6,
        offset=0.0,
        is_cast_first=True,
    )


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return ops.gated(gate, up, "silu")


def test_a_cross_entropy_passes_torchs_own_checks() -> None:
    arguments = (torch.randn(3, 32), torch.tensor([0, 5, 31]), torch.tensor(2.0))
    operator = torch.ops.sluice.cross_entropy
    for has_gradient in (True, False):
        torch.library.opcheck(
            operator, (*arguments, has_gradient), test_utils=("test_schema", "test_faketensor")
        )


FUNCTIONS: dict[str, Any] = {
    "norm": norm,
    "rotate": rotate,
    "norm_rotate": norm_rotate,
    "gated": gated,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operator_passes_torchs_own_checks(name: str) -> None:
    x = torch.randn(2, 3, 32)
    arguments: dict[str, tuple[Any, ...]] = {
        "norm": (x, torch.randn(32), 1e-6, 0.0, True),
        "rotate": (
            *(x.view(2, 3, 4, 8).transpose(1, 2),) * 2,
            *(torch.randn(2, 3, 8),) * 2,
            False,
        ),
        "norm_rotate": (
            *(x.view(2, 3, 4, 8).transpose(1, 2),) * 2,
            *(torch.randn(8),) * 2,
            *(torch.randn(2, 3, 8),) * 2,
            *(1e-6, 0.0, True),
        ),
        "gated": (x, x.clone(), "gelu"),
    }
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.sluice, name), arguments[name], test_utils=tests)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x,))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_without_values_are_those_with(name: str, dtype: torch.dtype) -> None:
    def found(x: torch.Tensor) -> list[Any]:
        y = FUNCTIONS[name](x)
        both = y if isinstance(y, tuple) else (y,)
        back = torch.autograd.grad([each.sum() for each in both], x)
        return [(t.shape, t.stride(), t.dtype) for t in (*both, *back)]

    values = found(torch.randn(2, 3, 32, dtype=dtype, requires_grad=True))
    with FakeTensorMode():
        assert found(torch.randn(2, 3, 32, dtype=dtype, requires_grad=True)) == values


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_is_one_operation_forward_and_backward(name: str) -> None:
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = Counted(), Counted()
    with forward:
        y = FUNCTIONS[name](x)
    first = y[0] if isinstance(y, tuple) else y
    gradient = torch.ones_like(first)
    with backward:
        torch.autograd.grad(first, x, gradient)
    assert forward.num_ops[name] == 1
    back = name if name == "rotate" else f"{name}_backward"
    assert backward.num_ops[back] == 1
    rows = 2 * 3
    small = 2 * 3 * 8 * 2 + 2 * 8 * 2 + 2 * rows * 4 * 4  # angles, weights, a factor per head
    expected = {
        "norm": (2 * x.nbytes + 32 * 2 + rows * 4, 3 * x.nbytes + 32 * 2 + rows * 4),
        "rotate": (4 * x.nbytes + 2 * 3 * 8 * 2, 4 * x.nbytes + 2 * 3 * 8 * 2),
        "norm_rotate": (4 * x.nbytes + small, 6 * x.nbytes + small),
        "gated": (3 * x.nbytes // 2, 5 * x.nbytes // 2),
    }
    assert (forward.num_bytes[name], backward.num_bytes[back]) == expected[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_keeps_what_it_says_and_nothing_is_written_over(name: str) -> None:
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    x = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    before = x.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = FUNCTIONS[name](x)
    first = y[0] if isinstance(y, tuple) else y
    kept = first.detach().clone()
    for _ in range(2):  # the second would see what the first has written over
        (one,) = torch.autograd.grad(first, x, torch.ones_like(first), retain_graph=True)
        (two,) = torch.autograd.grad(first, x, torch.ones_like(first), retain_graph=True)
        assert torch.equal(one, two)
    assert torch.equal(first.detach(), kept)
    assert torch.equal(x.detach(), before)
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    own.pop(x.untyped_storage().data_ptr(), None)
    tables = {"norm": 32 * 2 + 2 * 3 * 4, "rotate": 2 * 3 * 8 * 2 // 2, "gated": 0}
    tables["norm_rotate"] = tables["rotate"] + 2 * 8 * 2 + 2 * 2 * 3 * 4 * 4
    assert sum(own.values()) == tables[name]


# --------------------------------------------------------------------------------------- magnitudes


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


# ---------------------------------------------------------------------------------------- recognise


D = 16


class PlainNorm(nn.Module):
    """Llama's, but for what a test changes."""

    def __init__(self, **changed: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D), requires_grad=False)
        self.eps = changed.get("eps", 1e-5)
        self.momentum = 0.1  # a number that is not its eps
        self.power, self.offset = changed.get("power", 2.0), changed.get("offset", 0.0)
        self.mean, self.slope = changed.get("mean", 0.0), changed.get("slope", 1.0)
        self.limit = changed.get("limit", 1e9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = (wide - self.mean * wide.mean(-1, keepdim=True)).clamp(-self.limit, self.limit)
        scale = torch.rsqrt(wide.abs().pow(self.power).mean(-1, keepdim=True) + self.eps)
        normed = (wide * scale).to(x.dtype)
        if self.slope != 1.0 and x.requires_grad:  # the same values, other gradients
            normed = normed.detach() + self.slope * (normed - normed.detach())
        return (self.weight + self.offset) * normed


@pytest.mark.thorough
def test_a_norm_is_known_with_its_eps_and_offset() -> None:
    expected = Norm(eps=1e-5, offset=0.0, is_cast_first=True)
    assert find_norm(PlainNorm()) == expected
    found = find_norm(PlainNorm(offset=1.0, eps=1e-6))
    assert found == Norm(eps=1e-6, offset=1.0, is_cast_first=True)
    with FakeTensorMode():
        assert find_norm(PlainNorm()) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed",
    [{"power": 2.01}, {"offset": 0.5}, {"mean": 1.0}, {"slope": 1.01}, {"limit": 1e3}],
    ids=str,
)
def test_a_norm_that_differs_a_little_is_not_one(changed: dict[str, float]) -> None:
    assert find_norm(PlainNorm(**changed)) is None


def test_a_norm_whose_weight_trains_or_whose_forward_is_replaced_is_left_alone() -> None:
    trains, replaced = PlainNorm(), PlainNorm()
    trains.weight.requires_grad_()
    vars(replaced)["forward"] = lambda x: x
    assert find_norm(trains) is find_norm(replaced) is find_norm(nn.LayerNorm(D)) is None
    assert find_norm(nn.Linear(D, D)) is find_norm(nn.Dropout()) is None


class Mlp(nn.Module):
    """A gated MLP, but for what a test changes."""

    def __init__(self, act: str = "silu", **changed: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 24, bias=False), nn.Linear(D, 24, bias=False)
        self.c, self.act = nn.Linear(24, D, bias=False), ACT2FN[act]
        self.dropout = nn.Dropout(changed.get("dropout", 0.0))
        self.limit, self.scale = changed.get("limit", 1e9), changed.get("scale", 1.0)
        self.turned, self.residual = changed.get("turned", False), changed.get("residual", 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.a(x), self.b(x)
        if self.turned:
            gate, up = up, gate
        if self.limit < 1e9:
            gate = gate.clamp(max=self.limit)
        inner = self.dropout(self.act(gate) * up)
        y = self.c(inner if self.scale == 1.0 else self.scale * inner)
        return y + self.residual * x if self.residual else y


@pytest.mark.parametrize(
    ("act", "curve"),
    [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")],
)
def test_an_mlp_is_known_with_its_curve(act: str, curve: Any) -> None:
    expected = GatedMlp(first=("a", "b"), gate="a", down="c", curve=curve)
    assert find_gated_mlp(Mlp(act)) == expected
    turned = GatedMlp(first=("a", "b"), gate="b", down="c", curve=curve)
    assert find_gated_mlp(Mlp(act, turned=True)) == turned


@pytest.mark.parametrize(
    "changed",
    [
        {"act": "relu"},
        {"act": "quick_gelu"},
        {"dropout": 0.1},
        {"limit": 50.0},
        {"scale": 1.001},
        {"residual": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_training", [True, False])
def test_an_mlp_that_differs_a_little_is_not_one(
    changed: dict[str, Any], is_training: bool
) -> None:
    assert find_gated_mlp(Mlp(**changed).train(is_training)) is None


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def half_rotated(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def in_pairs(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turned(x: Any) -> Any:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(1) + other * sin.unsqueeze(1)

    return turned(q), turned(k)


def of_queries(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return half_rotated(q, k, cos, sin)[0], k


class Attention(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return half_rotated(q, k, cos, sin)


class Pairs(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return in_pairs(q, k, cos, sin)


class Queries(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return of_queries(q, k, cos, sin)


def test_a_rotation_is_known_by_what_it_computes() -> None:
    found = find_rotary(Attention())
    assert found is not None
    assert (found.name, found.is_partial) == ("half_rotated", False)
    assert (torch.bfloat16, torch.bfloat16) in found.dtypes
    assert (torch.bfloat16, torch.float32) not in found.dtypes  # the result would be in float32
    assert find_rotary(Pairs()) is find_rotary(Queries()) is find_rotary(nn.Linear(D, D)) is None


class Normed(nn.Module):
    """Attention that norms queries and keys head by head, up to where it has rotated them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.one, self.other = PlainNorm(), PlainNorm()
        for norm in (self.one, self.other):
            norm.weight.data = 1 + 0.3 * torch.randn(D)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(self.a(x).unflatten(-1, (-1, D))).transpose(1, 2)
        k = self.b(x).unflatten(-1, (-1, D)).transpose(1, 2)
        k = self.other(k)
        v = self.b(x)
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


class ReadBetween(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = self.one(x), self.other(x)
        q = self.one(x).transpose(1, 2)
        k = self.other(x).transpose(1, 2)
        v = q.sum()
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


class Sometimes(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = x.transpose(1, 2), x.transpose(1, 2)
        if self.training:
            q = self.one(q)
        k = self.other(k)
        q, k = half_rotated(q, k, cos, sin)
        return q, k


class OneNorm(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(x).transpose(1, 2)
        k = self.one(x).transpose(1, 2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k


class Mixed(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(x).transpose(2, 3)
        k = self.other(x).transpose(2, 3)
        q, k = half_rotated(q, k, cos, sin)
        return q, k


class InPlace(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(x).transpose(1, 2)
        k = self.other(x).transpose(1, 2)
        v = x.mul_(2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


class Scaled(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(x).transpose(1, 2) * 2
        k = self.other(x).transpose(1, 2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k


class Renamed(Normed):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q = self.one(x).transpose(1, 2)
        k = self.other(x).transpose(1, 2)
        turned, k = half_rotated(q, k, cos, sin)
        return turned, k, q


def test_norms_whose_results_are_only_rotated_are_known_by_the_code_between() -> None:
    found = find_rotary(Normed())
    assert found is not None
    assert found.norms == ("one", "other")
    for kind in (ReadBetween, Sometimes, OneNorm, Mixed, InPlace, Scaled, Renamed):
        other = find_rotary(kind())
        assert other is not None, kind
        assert other.norms is None, kind


def test_norms_are_computed_with_the_rotation_unless_something_listens_to_them() -> None:
    torch.manual_seed(0)
    attention = Normed()
    x, cos, sin = torch.randn(2, 5, D), torch.randn(2, 5, D), torch.randn(2, 5, D)
    fused = FusedLayers([attention])
    assert fused.counts(0) == {"Norm": 2, "Rotary": 1, "HeadNorms": 2}

    def visited() -> tuple[Any, Counter[str]]:
        with Counted() as counted, fused.visited(0), torch.no_grad():
            return attention(x, cos, sin), counted.num_ops

    with torch.no_grad():
        own = attention(x, cos, sin)
    joined, ops = visited()
    assert ops["norm_rotate"] == 1
    assert not ops["norm"] + ops["rotate"]
    heard = []
    hook = attention.other.register_forward_hook(lambda _, __, y: heard.append(y))
    apart, ops = visited()
    hook.remove()
    assert ops["norm"] == 2
    assert ops["rotate"] == 1
    assert all(map(torch.equal, joined, apart))
    torch.testing.assert_close(joined, own)
    torch.testing.assert_close(heard[0], attention.other(attention.b(x).unsqueeze(1)))
    attention.one.weight.requires_grad_()  # the norm's own code computes it, with its gradient
    with fused.visited(0):
        q, k, _ = attention(x, cos, sin)
    torch.testing.assert_close((q, k), own[:2])
    assert torch.autograd.grad(q.sum(), attention.one.weight)[0].norm() > 0
    assert not any("forward" in vars(module) for module in attention.modules())


class Renaming(Normed):
    """Attention whose arguments have older names too, as transformers wraps it from 5.24 on."""

    forward = deprecate_kwarg("angles", "99", new_name="cos")(Normed.forward)


class Wrapped(Normed):
    """Attention in a wrapper that may do anything."""

    @functools.wraps(Normed.forward)
    def forward(self, *args: Any) -> Any:  # type: ignore[override]  # mypy sees no signature
        return Normed.forward(self, *args)


@pytest.mark.filterwarnings("ignore:`angles` is deprecated:FutureWarning")
def test_a_rotation_is_fused_within_the_wrapper_that_renames_arguments_and_no_other() -> None:
    torch.manual_seed(0)
    attention = Renaming()
    x, cos, sin = torch.randn(2, 5, D), torch.randn(2, 5, D), torch.randn(2, 5, D)
    fused = FusedLayers([attention])
    with fused.visited(0), torch.no_grad(), Counted() as counted:
        by_old_name, by_new_name = attention(x, angles=cos, sin=sin), attention(x, cos, sin)
        both = attention(x, angles=sin, cos=cos, sin=sin)
    assert counted.num_ops["norm_rotate"] == 3
    torch.testing.assert_close(by_old_name, Normed.forward(attention, x, cos, sin))
    assert all(map(torch.equal, (*by_old_name, *by_new_name), (*by_new_name, *both)))
    assert find_rotary(Wrapped()) is None


class ByMethod(Normed):
    """Norms something else too, in a method."""

    def also(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.b(x))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        v = self.also(x)
        q = self.one(self.a(x).unflatten(-1, (-1, D))).transpose(1, 2)
        k = self.other(self.b(x).unflatten(-1, (-1, D))).transpose(1, 2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


class Inherited(Normed):
    """Norms something else too, in the code of its parent."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        v = super().forward(x, cos, sin)[1]
        q = self.one(self.a(x).unflatten(-1, (-1, D))).transpose(1, 2)
        k = self.other(self.b(x).unflatten(-1, (-1, D))).transpose(1, 2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


class Sharing(Normed):
    """Has a child that norms by the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.one)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        v = self.inner(self.b(x))
        q = self.one(self.a(x).unflatten(-1, (-1, D))).transpose(1, 2)
        k = self.other(self.b(x).unflatten(-1, (-1, D))).transpose(1, 2)
        q, k = half_rotated(q, k, cos, sin)
        return q, k, v


@pytest.mark.parametrize("kind", [ByMethod, Inherited, Sharing])
def test_a_norm_that_other_code_calls_as_well_is_not_left_to_the_rotation(
    kind: type[Normed],
) -> None:
    torch.manual_seed(0)
    attention = kind()
    x, cos, sin = torch.randn(2, 5, D), torch.randn(2, 5, D), torch.randn(2, 5, D)
    fused = FusedLayers([attention])
    with torch.no_grad():
        own = attention(x, cos, sin)
        with fused.visited(0):
            found = attention(x, cos, sin)
    torch.testing.assert_close(found, own)
    assert fused.counts(0) == {"Norm": 2, "Rotary": 1, "HeadNorms": 0}


@pytest.mark.thorough
def test_proofs_draw_nothing_from_torchs_generator_and_leave_modules_alone() -> None:
    mlp, norm = Mlp(), PlainNorm()
    before = [dict(vars(x)) for x in (mlp, norm)]
    state = torch.get_rng_state()
    find_gated_mlp(mlp)
    find_norm(norm)
    find_rotary(Attention())
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(x)) for x in (mlp, norm)] == before
    assert torch.equal(F.silu(torch.ones(1)), mlp.act(torch.ones(1)))


# ------------------------------------------------------- what a proof on a few tokens does not see


class LongNorm(PlainNorm):
    """Does something else for many tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 0.5 * y if x.shape[1] > 100 else y


class LoudNorm(PlainNorm):
    """Does something else for values above all that a proof draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 0.5 * y if x.abs().max() > 1e7 else y


class QuietNorm(PlainNorm):
    """Does something else when it is evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.training else 0.5 * y


class LongMlp(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.a(x), self.b(x)
        return self.c(self.act(gate) * (0.5 * up if gate.shape[1] > 100 else up))


class LongAttention(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return half_rotated_if_short(q, k, cos, sin)


def half_rotated_if_short(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return half_rotated(q, k, cos, 0.5 * sin if q.shape[2] > 100 else sin)


calls = 0


class Counting(nn.Module):
    """A copy of its forward would write to a copy of the globals."""

    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        global calls  # noqa: PLW0603
        calls += 1
        return half_rotated(q, k, cos, sin)


@pytest.mark.slow
def test_code_that_decides_by_its_tokens_or_mode_or_writes_globals_is_left_alone() -> None:
    norms = (LongNorm(), LoudNorm(), QuietNorm(), QuietNorm().eval())
    assert all(find_norm(norm) is None for norm in norms)
    assert find_gated_mlp(LongMlp()) is None
    assert find_rotary(LongAttention()) is find_rotary(Counting()) is None


class Curve(nn.Module):
    """An activation whose `repr` does not say what it computes."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.slope * x)


class FunctionMlp(Mlp):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.act = None
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.function(self.a(x)) * self.b(x))


def test_each_module_is_proven_that_differs_in_any_attribute() -> None:
    curved = [Mlp(), Mlp()]
    curved[0].act, curved[1].act = Curve(1.0), Curve(1.1)
    by_function = [FunctionMlp(F.silu), FunctionMlp(F.relu), FunctionMlp(F.silu)]
    fused = FusedLayers([*curved, *by_function])
    assert [fused.counts(i)["GatedMlp"] for i in range(5)] == [1, 0, 1, 0, 1]


# -------------------------------------------------------------------------------------------- trial


CPU, VOCABULARY = torch.device("cpu"), 500


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "NUM_TOKENS", 64)


def layers(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    with torch.device("meta"):
        model: Any = MODELS[name]()
    return list(model.to(dtype).requires_grad_(requires_grad=False).model.layers)


@pytest.mark.usefixtures("_small")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"),
    mostly_slow(
        itertools.product([torch.float32, torch.bfloat16], ["llama", "qwen3", "gemma3_text"]),
        (torch.bfloat16, "gemma3_text"),
    ),
)
def test_each_kind_of_part_is_right_and_timed(name: str, dtype: torch.dtype) -> None:
    trials = try_fused(layers(name, dtype), VOCABULARY, CPU)
    kinds = {one.name.split()[0] for one in trials}
    assert kinds == {"Norm", "Rotary", "GatedMlp", "cross-entropy"}
    assert all(one.reason in (None, "it is slower") for one in trials), trials
    assert all(one.plain_s and one.fused_s for one in trials)


@pytest.mark.usefixtures("_small")
@pytest.mark.slow
def test_norms_of_two_widths_are_tried_apart_and_equal_ones_once() -> None:
    names = [one.name for one in try_fused(layers("qwen3"), VOCABULARY, CPU)]
    assert names.count("Norm of Qwen3RMSNorm") == 2
    assert len(names) == 5


@pytest.mark.usefixtures("_small")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("norm", "Norm", "qwen3"),
        ("rotate", "Rotary", "llama"),
        ("norm_rotate", "Rotary", "qwen3"),
        ("gated", "GatedMlp", "qwen3"),
        ("cross_entropy", "cross-entropy", "qwen3"),
    ],
)
def test_an_operator_that_is_wrong_is_found(
    name: str, kind: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(ops, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return tuple(1.05 * x for x in found) if isinstance(found, tuple) else 1.05 * found

    monkeypatch.setattr(ops, name, wrong)
    trials = try_fused(layers(model), VOCABULARY, CPU)
    reasons = {one.name.split()[0]: one.reason for one in trials}
    assert reasons.pop(kind) == "its results are not those of the model's code"
    assert set(reasons.values()) <= {None, "it is slower"}


@pytest.mark.usefixtures("_small")
@pytest.mark.thorough
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.gated

    def wrong(gate: torch.Tensor, up: torch.Tensor, curve: Any) -> torch.Tensor:
        y = own(gate, up, curve)
        return y.detach() + 1.1 * (y - y.detach())

    monkeypatch.setattr(ops, "gated", wrong)
    (found,) = (one for one in try_fused(layers(), VOCABULARY, CPU) if one.name.startswith("Gated"))
    assert found.reason == "its results are not those of the model's code"


@pytest.mark.usefixtures("_small")
def test_an_operator_that_fails_or_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(ops, "norm", fails)
    times_s = iter([1.0, 2.0] * 100)
    monkeypatch.setattr(trial, "seconds_of", lambda *_: next(times_s))
    for one in try_fused(layers(), VOCABULARY, CPU):
        wanted = "RuntimeError: no compiler" if one.name.startswith("Norm") else "it is slower"
        assert one.reason == wanted


@pytest.mark.usefixtures("_small")
def test_a_tie_is_the_operators_and_each_trial_says_what_it_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s = iter([1.0, 1.02] * 100)
    monkeypatch.setattr(trial, "seconds_of", lambda *_: next(times_s))
    trials = try_fused(layers(), VOCABULARY, CPU)
    assert {one.part for one in trials} == {"norms", "rotary", "gates", "loss"}
    assert [one.reason for one in trials] == [None] * len(trials)


@pytest.mark.usefixtures("_small")
def test_of_layers_without_any_part_the_loss_alone_is_tried() -> None:
    (found,) = try_fused([nn.Linear(4, 4)], VOCABULARY, CPU)
    assert found.name == "cross-entropy"
