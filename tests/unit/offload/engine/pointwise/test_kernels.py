"""Kernels of fused operators, interpreted and compiled."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from offload.engine.experts.launcher import MAX_SHARED_BYTES
from offload.engine.pointwise import launcher, reference
from offload.engine.pointwise.recognise import MAX_FEATURES
from offload.engine.pointwise.reference import CURVES, Curve
from tests.compiled import compile_for
from tests.pointwise_launches import MODULE, launches
from tests.tiers import diagonal, mostly_slow

if importlib.util.find_spec("triton") is None:  # a CPU without it has no use for kernels
    pytest.skip("Triton is not installed", allow_module_level=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_DTYPES = mostly_slow(DTYPES, torch.float32, torch.bfloat16)
FORMS = [launcher, reference]
Result = tuple[torch.Tensor, ...]


def error(found: Result, truth: Result) -> float:
    """Return the root mean square of what tensors are off by."""
    assert all(torch.isfinite(x).all() for x in found)
    parts = [(a.double() - b).square().mean() for a, b in zip(found, truth, strict=True)]
    return float(torch.stack(parts).mean().sqrt())


def with_gradients(
    function: Callable[..., Any], inputs: Result, gradients: Result, dtype: torch.dtype
) -> Result:
    """Return a function's results and the gradients by its inputs, all computed in a dtype."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    backs = torch.autograd.grad(found, leaves, [g.to(dtype) for g in gradients])
    return *(x.detach() for x in found), *backs


def plain_norm(offset: float, *, is_cast_first: bool) -> Callable[..., torch.Tensor]:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if is_cast_first:
            return (weight + offset) * normed.to(x.dtype)
        return ((weight.to(wide.dtype) + offset) * normed).to(x.dtype)

    return norm


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize("is_cast_first", [True, False], ids=["cast first", "cast last"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (3, 130), (1, 1, 1)], ids=str)
def test_reorder_a_norm_is_as_exact_as_plain_code(
    shape: tuple[int, ...], offset: float, is_cast_first: bool, dtype: torch.dtype, ours: Any
) -> None:
    torch.manual_seed(0)
    scale = torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x, weight = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[-1]).to(dtype)
    gradient = torch.randn(shape).to(dtype)
    plain = plain_norm(offset, is_cast_first=is_cast_first)

    def of_x(x: torch.Tensor) -> torch.Tensor:
        return plain(x, weight.to(x.dtype))

    truth = with_gradients(of_x, (x,), (gradient,), torch.float64)
    y, inverse = ours.norm(x, weight, 1e-6, offset, is_cast_first)
    back = ours.norm_backward(gradient, x, weight, inverse, offset)
    slack = 2 * torch.finfo(torch.float32).eps * float(max(t.abs().max() for t in truth))
    for found, expected, own in zip(
        (y, back), truth, with_gradients(of_x, (x,), (gradient,), dtype), strict=True
    ):
        assert error((found,), (expected,)) <= 1.05 * error((own,), (expected,)) + slack


def plain_rotary(cos: torch.Tensor, sin: torch.Tensor) -> Callable[..., Result]:
    def turned(x: torch.Tensor) -> torch.Tensor:
        c, s = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
        rotated, rest = x[..., : c.shape[-1]], x[..., c.shape[-1] :]
        half = c.shape[-1] // 2
        other = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
        return torch.cat((rotated * c + other * s, rest), -1)

    def rotate(q: torch.Tensor, k: torch.Tensor) -> Result:
        return turned(q), turned(k)

    return rotate


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize(("rotated", "num_b"), diagonal([24, 8], [1, 2]))
def test_reorder_a_rotation_is_as_exact_as_plain_code(
    num_b: int, rotated: int, dtype: torch.dtype, ours: Any
) -> None:
    torch.manual_seed(0)
    # a third of a wider tensor, as a product of all three gives, and heads after tokens
    q, k = (torch.randn(2, 7, 3 * heads, 24)[:, :, :heads].transpose(1, 2) for heads in (5, 2))
    q, k = q.to(dtype), k.to(dtype)
    cos, sin = torch.randn(num_b, 7, rotated).to(dtype), torch.randn(num_b, 7, rotated).to(dtype)
    gradients = (torch.randn(2, 5, 7, 24).to(dtype), torch.randn(2, 2, 7, 24).to(dtype))
    before = q.clone()
    found = (*ours.rotate(q, k, cos, sin, False), *ours.rotate(*gradients, cos, sin, True))
    plain = plain_rotary(cos, sin)
    truth = with_gradients(plain, (q, k), gradients, torch.float64)
    own = with_gradients(plain, (q, k), gradients, dtype)
    assert error(found, truth) <= 1.05 * error(own, truth)
    assert torch.equal(q, before)
    assert [x.stride() for x in found[:2]] == [torch.empty_like(x).stride() for x in (q, k)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize("is_cast_first", [True, False], ids=["cast first", "cast last"])
@pytest.mark.parametrize(("rotated", "num_b"), diagonal([24, 8], [1, 2]))
def test_norms_with_a_rotation_have_the_bits_of_one_after_the_other(
    num_b: int, rotated: int, is_cast_first: bool, dtype: torch.dtype, ours: Any
) -> None:
    """So they are as exact; also where heads lie by tokens, in a wider tensor, or not."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 7, 3 * heads, 24)[:, :, :heads].transpose(1, 2) for heads in (5, 2))
    q, k = q.to(dtype), k.to(dtype).contiguous()
    weights = [(1 + 0.3 * torch.randn(24)).to(dtype) for _ in "qk"]
    cos, sin = torch.randn(num_b, 7, rotated).to(dtype), torch.randn(num_b, 7, rotated).to(dtype)
    of_k = torch.randn(2, 7, 2, 24).to(dtype).transpose(1, 2)
    gradients = (torch.randn(2, 5, 7, 24).to(dtype), of_k)
    form = (1e-6, 1.0, is_cast_first)
    found = ours.norm_rotate(q, k, *weights, cos, sin, *form)
    normed = [ours.norm(x, w, *form) for x, w in zip((q, k), weights, strict=True)]
    wanted = ours.rotate(normed[0][0], normed[1][0], cos, sin, False)
    inverses = [inverse.transpose(1, 2) for _, inverse in normed]
    assert all(map(torch.equal, found, (*wanted, *inverses)))
    assert [x.stride() for x in found[:2]] == [torch.empty_like(x).stride() for x in (q, k)]
    back = ours.norm_rotate_backward(*gradients, q, k, *weights, cos, sin, *found[2:], 1.0)
    turned = ours.rotate(*gradients, cos, sin, True)
    for of_x, g, x, w, (_, inverse) in zip(back, turned, (q, k), weights, normed, strict=True):
        assert torch.equal(of_x, ours.norm_backward(g, x, w, inverse, 1.0))
        assert of_x.stride() == torch.empty_like(x).stride()


def plain_gate(curve: Curve) -> Callable[..., torch.Tensor]:
    if curve == "silu":
        return lambda gate, up: F.silu(gate) * up
    form = "tanh" if curve == "gelu_tanh" else "none"
    return lambda gate, up: F.gelu(gate, approximate=form) * up


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("size", mostly_slow([1.0, 30.0], 30.0))
def test_reorder_a_gate_is_as_exact_as_plain_code(
    size: float, curve: Curve, dtype: torch.dtype, ours: Any
) -> None:
    torch.manual_seed(0)
    gate, up = (size * torch.randn(3, 2, 2 * 2100)).to(dtype).chunk(2, -1)
    gradient = torch.randn(3, 2, 2100).to(dtype)
    found = (ours.gated(gate, up, curve), *ours.gated_backward(gradient, gate, up, curve))
    truth = with_gradients(plain_gate(curve), (gate, up), (gradient,), torch.float64)
    own = with_gradients(plain_gate(curve), (gate, up), (gradient,), dtype)
    slack = 4 * torch.finfo(torch.float32).eps * size**2
    for each in zip(found, truth, own, strict=True):
        assert error(each[:1], each[1:2]) <= 1.05 * error(each[2:], each[1:2]) + slack


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_v", [7, 5001])
def test_reorder_a_cross_entropy_is_as_exact_as_plain_code(
    num_v: int, dtype: torch.dtype, ours: Any
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(6, 2 * num_v) * torch.logspace(-1, 2, 6).unsqueeze(1)).to(dtype)
    logits = logits[:, :num_v]  # rows that do not touch
    logits[3, 2:5] = -float("inf")  # tokens that a model never predicts
    labels = torch.tensor([0, 1, 6, 6, num_v - 1, 3])

    def losses(logits: torch.Tensor) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, reduction="none")

    def plain(dtype: torch.dtype) -> Result:
        leaf = logits.to(dtype).requires_grad_()
        (losses(leaf).sum() / 13).backward()
        assert leaf.grad is not None
        return losses(leaf).detach(), leaf.grad

    found = ours.cross_entropy(logits, labels, torch.tensor(13.0), True)
    slack = 2 * torch.finfo(torch.float32).eps * float(logits.double().clamp(-1e3).abs().max())
    for mine, expected, own in zip(found, plain(torch.float64), plain(dtype), strict=True):
        assert error((mine,), (expected,)) <= 1.05 * error((own,), (expected,)) + slack
    assert found[1].dtype == dtype
    only_losses, nothing = ours.cross_entropy(logits, labels, torch.tensor(13.0), False)
    assert torch.equal(only_losses, found[0])
    assert not nothing.numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
def test_each_token_may_have_a_divisor_of_its_own(ours: Any) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 50), torch.tensor([3, 0, 49, 7])
    divisors = torch.tensor([2.0, -0.25, float("inf"), -float("inf")])
    _, together = ours.cross_entropy(logits, labels, divisors, True)
    for row, divisor in enumerate(divisors):
        part = slice(row, row + 1)
        _, alone = ours.cross_entropy(logits[part], labels[part], divisor, True)
        assert torch.equal(together[part], alone)
    assert together[:2].abs().sum() > 0
    assert together[2:].abs().sum() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_a_loss_that_is_not(bad: float, ours: Any) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4500] = bad
    losses, _ = ours.cross_entropy(logits, torch.tensor([1, 1]), torch.tensor(1.0), True)
    assert not torch.isfinite(losses[0])
    assert torch.isfinite(losses[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
def test_reorder_rows_that_are_not_dense_are_read_where_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 40).to(dtype)
    weight = torch.randn(40).to(dtype)
    for view in (x[:, :2], x.transpose(0, 1), x[::2], torch.randn(1, 1, 40).expand(3, 2, 40)):
        dense = view.to(dtype).contiguous()
        y, inverse = launcher.norm(view.to(dtype), weight, 1e-6, 0.0, True)
        expected, _ = launcher.norm(dense, weight, 1e-6, 0.0, True)
        assert torch.equal(y, expected)
        back = launcher.norm_backward(view.to(dtype), view.to(dtype), weight, inverse, 0.0)
        assert torch.equal(back, launcher.norm_backward(dense, dense, weight, inverse, 0.0))
        both = launcher.gated(view.to(dtype), view.to(dtype), "silu")
        assert torch.equal(both, launcher.gated(dense, dense, "silu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("ours", FORMS, ids=["kernel", "reference"])
def test_nothing_comes_of_no_rows(ours: Any) -> None:
    none, weight = torch.empty(2, 0, 8), torch.ones(8)
    y, inverse = ours.norm(none, weight, 1e-6, 0.0, True)
    assert (y.shape, inverse.shape) == ((2, 0, 8), (2, 0))
    assert ours.norm_backward(none, none, weight, inverse, 0.0).shape == none.shape
    assert ours.gated(none, none, "silu").shape == none.shape
    assert ours.gated_backward(none, none, none, "silu")[1].shape == none.shape
    heads, angles = torch.empty(2, 3, 0, 8), torch.empty(2, 0, 8)
    assert ours.rotate(heads, heads, angles, angles, False)[0].shape == heads.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_of_zeros_and_one_of_the_largest_numbers_are_normed_to_finite_ones() -> None:
    rows = torch.tensor([[0.0] * 8, [3e38] * 8, [1e-30] * 8])
    for ours in FORMS:
        y, inverse = ours.norm(rows, torch.ones(8), 1e-6, 0.0, True)
        assert torch.isfinite(y).all()
        assert torch.isfinite(inverse).all()


# ----------------------------------------------------------------------------------------- compiled


if importlib.util.find_spec("triton") is None:  # not imported: others may want it interpreted
    pytest.skip("Triton is not installed", allow_module_level=True)
COMPILED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = ("stride_", "row *", "own + first")
LOADED_BYTES = 16  # by one instruction of a thread, where rows are whole lines of memory


def check(capability: int, dtype: torch.dtype, **sizes: Any) -> None:
    """Check that nothing spills, that all fits, and that 16-bit rows are read in wide words."""
    found = compile_for(capability, launches(dtype, **sizes), module=MODULE)
    names = {each.launch.kernel for each in found}
    assert names == {
        *("norm", "norm_backward", "rotate", "norm_rotate_backward"),
        *("gate_up", "gate_up_backward", "cross_entropy"),
    }
    for each in found:
        assert each.spilled_bytes == 0, each
        assert each.shared_bytes <= each.max_shared_bytes, each
        rows = [x for x in each.accesses if any(one in x.source for one in ROWS)]
        assert rows or "rotate" in each.launch.kernel
        if dtype.itemsize == 2:
            assert all(access.num_bytes == LOADED_BYTES for access in rows), each


def test_kernels_for_a_card_that_is_not_there_take_no_more_than_it_has() -> None:
    check(89, torch.bfloat16, hidden=4096, head=128, width=12288)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
def test_kernels_launch_on_all_cards(capability: int, dtype: torch.dtype) -> None:
    check(capability, dtype, hidden=4096, head=128, width=12288)
    check(capability, dtype, hidden=2880, head=64, width=2880)
    check(capability, dtype, hidden=MAX_FEATURES, head=256, width=28672)
