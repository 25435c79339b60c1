"""Modules are known by what they compute: those that differ a little keep their own code."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.activations import ACT2FN

from offload.engine.pointwise.layers import FusedLayers
from offload.engine.pointwise.recognise import (
    GatedMlp,
    Norm,
    find_gated_mlp,
    find_norm,
    find_rotary,
)
from tests.counted import Counted

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
