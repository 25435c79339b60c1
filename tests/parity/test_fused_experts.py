"""The Triton kernels of experts: interpreted on a CPU, as they are on a GPU (grade REORDER)."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.adapter.linear_lora import compute_beside
from offload.engine.engine import Engine
from offload.engine.experts import lora
from offload.engine.experts.launcher import LOW, TILES, Blocks
from offload.engine.experts.products import Gate, gate_of
from offload.engine.recompute import is_no_value
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.linears import Linear, Reads
from offload.plan.memory.visit import (
    experts_form,
    factor_bytes,
    gradient_features,
    saved_features,
)
from tests.parity.architectures import SLACK, micro_batches, rel_error, streamed
from tests.parity.experts import (
    CLAMPED,
    KINDS,
    ROUTINGS,
    SIZES,
    Sizes,
    adapted_by_peft,
    adapted_experts,
    chosen,
    step,
)
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

TWO_KINDS = ("gated", "transposed, biased, clamped")
GATED = [kind for kind in KINDS if kind != "without gate"]
CLOSE_KINDS = [
    pytest.param(k, marks=() if k in ("gated", "the other") else pytest.mark.exhaustive)
    for k in GATED
]
ODD = Sizes(20, 7, 3, 11, 3)
DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
pytest.importorskip("triton", reason="Triton is not installed")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from offload.engine.experts.kernels import find_tile  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def by(path: str, model: Any, device: str = "cpu") -> Any:
    """Return a copy of an adapted model that computes its experts in one way."""
    model = compute_beside(copy.deepcopy(model)).to(device)
    model.get_base_model().config._experts_implementation = path + lora.SUFFIX
    return model


def assert_close(ours: Any, reference: Any, *, limit: float) -> None:
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        tensor = tensor.cpu().double()
        error = (ours[name].cpu().double() - tensor).norm()
        assert error <= limit * tensor.norm(), (name, float(error / tensor.norm()))
        zero = tensor.flatten(1).norm(dim=1) == 0 if tensor.dim() > 1 else tensor == 0
        assert (ours[name].cpu()[zero] == 0).all(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "routing"),
    mostly_slow(
        list(itertools.product(TWO_KINDS, ROUTINGS)),
        ("transposed, biased, clamped", "idle experts"),
    ),
)
def test_kernels_compute_what_the_loop_does(kind: str, routing: str, device: str) -> None:
    """Output, and all gradients; experts without rows get none."""
    model = adapted_experts(kind, "eager", torch.float32, limit=CLAMPED)
    reference = step(by("eager", model.double()), routing, torch.float32, precision=torch.float64)
    ours = step(by("triton", model.float(), device), routing, torch.float32)
    assert_close(ours, reference, limit=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", mostly_slow(GATED, "gelu"))
def test_sizes_that_fill_no_block_are_computed_as_well(kind: str, device: str) -> None:
    """Hidden size 20, width 7, 3 experts of which a token takes all, ranks 3 and 80."""
    for rank in (3, 80):
        model = adapted_experts(kind, "eager", torch.float32, sizes=ODD, r=rank)
        reference = step(
            by("eager", model.double()), "mixed", torch.float32, precision=torch.float64, sizes=ODD
        )
        ours = step(by("triton", model.float(), device), "mixed", torch.float32, sizes=ODD)
        assert_close(ours, reference, limit=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWO_KINDS)
@pytest.mark.parametrize("tile", sorted({LOW, *TILES.values()}, key=str), ids=str)
def test_the_tiles_of_cards_compute_what_the_loop_does(
    tile: Blocks, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As high and wide as on a card, so that a gate's backward takes as many parts."""
    monkeypatch.setattr("offload.engine.experts.fused.blocks_for", lambda *_, **__: tile)
    wide = Sizes(64, 200, 3, 150, 2)
    adapted = adapted_experts(kind, "eager", torch.float32, limit=CLAMPED, sizes=wide)
    plain: Any = copy.deepcopy(adapted).unload()
    branched: Any = compute_beside(adapted)
    for model, holder, suffix in (
        (branched, branched.get_base_model(), lora.SUFFIX),
        (plain, plain, ""),
    ):
        exact = copy.deepcopy(model).double()
        true = step(exact, "mixed", torch.float32, precision=torch.float64, sizes=wide)
        holder.config._experts_implementation = "triton" + suffix
        assert_close(step(model, "mixed", torch.float32, sizes=wide), true, limit=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize("kind", CLOSE_KINDS)
def test_kernels_are_as_close_to_the_truth_as_peft(
    kind: str, dtype: torch.dtype, device: str
) -> None:
    """Grade REORDER: weights and inputs are of the dtype, the truth is float64."""
    squares = {"ours": 0.0, "peft": 0.0}
    for seed in range(32):
        model = adapted_experts(kind, "eager", dtype, seed=seed)
        exact = adapted_experts(kind, "eager", torch.float64, seed=seed)
        exact.load_state_dict({n: t.double() for n, t in model.state_dict().items()})
        true = step(exact, "mixed", dtype, seed=seed, precision=torch.float64)
        peft = step(model, "mixed", dtype, seed=seed)
        ours = step(by("triton", model, device), "mixed", dtype, seed=seed)
        squares["ours"] += rel_error({n: t.cpu() for n, t in ours.items()}, true) ** 2
        squares["peft"] += rel_error(peft, true) ** 2
        if seed >= 3 and squares["ours"] <= SLACK**2 * squares["peft"]:
            return
    pytest.fail(f"squared errors {squares}, the limit is {SLACK} in error")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_adapters_of_any_scaling_count_together(device: str) -> None:
    model = adapted_experts("gated", "eager", torch.float32)
    from peft import LoraConfig

    names = ["experts.gate_up_proj", "experts.down_proj"]
    more = LoraConfig(r=2, lora_alpha=16, target_modules=[], target_parameters=names)
    model.add_adapter("second", more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.copy_(torch.linspace(-0.2, 0.3, parameter.numel()).view_as(parameter))
    model.base_model.set_adapter(["default", "second"])
    reference = step(by("eager", model), "mixed", torch.float32)
    assert_close(step(by("triton", model, device), "mixed", torch.float32), reference, limit=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", mostly_slow(TWO_KINDS, "gated"))
def test_experts_without_an_adapter_compute_as_well(kind: str, device: str) -> None:
    """As for adapters on attention alone; a router trains, so weights have a gradient."""
    lora.register()
    model: Any = adapted_experts(kind, "eager", torch.float32).unload()
    reference = step(model, "mixed", torch.float32)
    model.config._experts_implementation = "triton"
    assert_close(step(model.to(device), "mixed", torch.float32), reference, limit=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_the_choice_of_an_expert_that_is_not_there_counts_for_nothing(device: str) -> None:
    model = by("triton", adapted_experts("gated", "eager", torch.float32), device)
    hidden_TD, expert_TC, weight_TC = (t.to(device) for t in chosen("mixed", torch.float32))
    weight_TC[::3, 1] = 0
    with torch.no_grad():
        right = model(hidden_TD, expert_TC, weight_TC)
        expert_TC[::3, 1] = SIZES.num_experts
        weight_TC[::3, 1] = torch.nan
        torch.testing.assert_close(model(hidden_TD, expert_TC, weight_TC), right)


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", mostly_slow(TWO_KINDS, "gated"))
def test_what_is_no_number_stays_so_and_in_its_own_token(kind: str, device: str) -> None:
    """A clamp must not make a number of it, nor a tile hand it on."""
    model = by("triton", adapted_experts(kind, "eager", torch.float32), device)
    hidden_TD, expert_TC, weight_TC = (t.to(device) for t in chosen("mixed", torch.float32))
    with torch.no_grad():
        right = model(hidden_TD, expert_TC, weight_TC)
        hidden_TD[3] = torch.nan
        found = model(hidden_TD, expert_TC, weight_TC)
    assert found[3].isnan().all()
    found[3] = right[3]
    assert torch.equal(found, right)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_has_the_same_bits_again(device: str) -> None:
    model = adapted_experts("gated", "eager", torch.bfloat16)
    first, again = (step(by("triton", model, device), "skewed", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


@pytest.mark.thorough
def test_factors_are_cast_once_in_a_visit_and_again_after_it() -> None:
    """By the kernels that the interpreter runs, with the same bits as without a visit."""
    model = by("triton", adapted_experts("gated", "eager", torch.bfloat16))
    casts: list[torch.dtype] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].dim() == 3:
                casts.append((kwargs or {})["dtype"])
            return func(*args, **(kwargs or {}))

    def stepped() -> Any:
        model.zero_grad()
        with Casts():
            return step(model, "mixed", torch.bfloat16)

    alone = stepped()
    assert len(casts) == 8  # A and B of two projections, forward and backward
    casts.clear()
    with VISIT_CACHE.in_pass():
        VISIT_CACHE.enter("visit")
        first, second = stepped(), stepped()
        assert casts == [torch.bfloat16] * 4
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(2)
        VISIT_CACHE.enter("the next")
        changed = stepped()
        assert len(casts) == 8
    assert all(torch.equal(alone[name], x[name]) for x in (first, second) for name in alone)
    assert not torch.equal(alone["out"], changed["out"])


@contextmanager
def deterministic() -> Iterator[None]:
    """Take kernels whose sums have one order; all of a CPU's have."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_streamed_step_is_the_resident_one_to_the_bit(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        # The interpreter writes weights back as they were, which an inspection takes for a change.
        monkeypatch.setattr(Engine, "_inspect", lambda *_args, **_more: None)
    small = {"num_hidden_layers": 3, "num_experts": 3} if device == "cpu" else {}
    adapted = adapted_by_peft(tiny_model("qwen3_moe", **small))
    model, batches = by("triton", adapted), micro_batches()[:1]
    with deterministic():
        loss, ours = streamed(model, batches, num_slots=2, device=device)
        resident_loss, resident = streamed(model, batches, num_slots=4, device=device)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in resident)
    loop_loss, reference = streamed(by("eager", adapted), batches, num_slots=4, device=device)
    assert loss == pytest.approx(loop_loss, rel=1e-6)
    assert rel_error(ours, reference) < 1e-5


@pytest.mark.thorough
def test_what_is_kept_is_what_the_gate_saw_and_a_rank_per_branch() -> None:
    rank, sizes = 4, SIZES
    model = by("triton", adapted_experts("gated", "eager", torch.float32, r=rank))
    hidden_TD, expert_TC, weight_TC = chosen("mixed", torch.float32)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(hidden_TD.requires_grad_(), expert_TC, weight_TC.requires_grad_())
    del out
    num_rows = sizes.num_tokens * sizes.num_choices
    inputs_bytes = 4 * (hidden_TD.numel() + 2 * weight_TC.numel()) + expert_TC.numel()
    found = sum(size for storage, size in kept.items() if storage not in own)
    assert found <= 4 * num_rows * (2 * sizes.width + 2 * rank) + inputs_bytes


class NoKernels:
    """Launches nothing: for what is allocated around it."""

    def __getattr__(self, _name: str) -> Self:
        return self

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda **_arguments: None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [Sizes(128, 192, 4, 512, 2), Sizes(64, 256, 4, 512, 2)])
@pytest.mark.parametrize("rank", [0, 16])
def test_a_step_takes_the_memory_that_the_plan_counts(
    rank: int, sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 5 % more with adapters, whose gradients do not all stand at the widest instant."""
    monkeypatch.setattr("offload.engine.experts.kernels", NoKernels())
    model = by("triton", adapted_experts("gated", "eager", dtype, sizes=sizes, r=max(rank, 1)))
    if not rank:
        model = model.unload()
        model.config._experts_implementation = "triton"
    live = LiveBytes()
    with Tracer(live):
        step(model, "mixed", dtype, sizes=sizes)
    projections: tuple[tuple[str, int, int, Reads], ...] = (
        ("gate_up_proj", sizes.hidden, 2 * sizes.width, "input"),
        ("down_proj", sizes.width, sizes.hidden, "gated"),
    )
    linears = [
        Linear(
            name=name,
            group="experts",
            d_in=d_in,
            d_out=d_out,
            num_experts=sizes.num_experts,
            active=sizes.num_choices,
            reads=reads,
        )
        for name, d_in, d_out, reads in projections
    ]
    form = experts_form("triton", is_adapted=rank > 0)
    per_row = saved_features(linears[1], form) + gradient_features(linears[1], form) + 2 * rank
    num_rows, b = sizes.num_tokens * sizes.num_choices, dtype.itemsize
    counted = num_rows * per_row * b + factor_bytes(
        linears if rank else [],
        spec=AdapterSpec(rank=rank, targets=(), experts=True),
        dtype_bytes=b,
        form=form,
    )
    inputs_and_output = 6 * sizes.num_tokens * sizes.hidden * b + 6 * 8 * num_rows
    assert live.peak_bytes <= counted + inputs_and_output
    assert counted <= 1.05 * live.peak_bytes


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_waits_for_nothing(dtype: torch.dtype) -> None:
    model = by("triton", adapted_experts("gated", "eager", dtype), "cuda")
    hidden_TD, expert_TC, weight_TC = (t.cuda() for t in chosen("mixed", dtype))
    for mode in ("default", "error"):  # the first time, kernels are loaded
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(
                hidden_TD.requires_grad_(), expert_TC, weight_TC.requires_grad_()
            ).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@triton.jit  # type: ignore[untyped-decorator]
def note_tile(end_E, out, num_experts, num_columns, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write what the tile of each program is."""
    expert, row, end, column = find_tile(end_E, num_experts, num_columns, EXPERTS, BLOCK_M)
    place = out + 4 * tl.program_id(0)
    tl.store(place, expert)
    tl.store(place + 1, row)
    tl.store(place + 2, end)
    tl.store(place + 3, column)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_m", mostly_slow([16, 32], 32))
def test_each_row_is_in_one_tile_of_its_expert(block_m: int, device: str) -> None:
    """Any sizes of experts, and programs too many."""
    for seed, num_experts in enumerate((1, 3, 8, 9)):
        generator = torch.Generator().manual_seed(seed)
        size_E = torch.randint(0, 12 * block_m, (num_experts,), generator=generator)
        size_E *= torch.rand(num_experts, generator=generator) > 0.3
        end_E, num_columns = size_E.cumsum(0).int(), 3
        num_tiles = -(-int(size_E.sum()) // block_m) + num_experts
        out = torch.zeros(num_tiles * num_columns, 4, dtype=torch.int32, device=device)
        experts = 1 << (num_experts - 1).bit_length()
        note_tile[(len(out),)](end_E.to(device), out, num_experts, num_columns, experts, block_m)
        found = [tuple(tile) for tile in out.tolist() if tile[0] < num_experts]
        ends = [0, *end_E.tolist()]
        assert sorted(found) == [
            (expert, row, ends[expert + 1], column)
            for expert in range(num_experts)
            for row in range(ends[expert], ends[expert + 1], block_m)
            for column in range(num_columns)
        ]


# ------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize(
    ("model_type", "gate"),
    [
        ("qwen3_moe", Gate(name="silu", is_interleaved=False)),
        ("mixtral", Gate(name="silu", is_interleaved=False)),
        ("deepseek_v3", Gate(name="silu", is_interleaved=False)),
        ("glm4_moe", Gate(name="silu", is_interleaved=False)),
        ("olmoe", Gate(name="silu", is_interleaved=False)),
        ("gpt_oss", Gate(name="clamped_swiglu", is_interleaved=True, alpha=1.702, limit=7.0)),
        ("nemotron_h", None),
    ],
)
def test_a_gate_is_told_by_what_it_computes(model_type: str, gate: Gate | None) -> None:
    experts = [
        module
        for module in tiny_model(model_type).modules()
        if isinstance(getattr(module, "down_proj", None), nn.Parameter)
    ]
    assert experts
    assert [gate_of(module) for module in experts] == [gate] * len(experts)


def test_the_limit_of_a_clamped_gate_and_gelu_by_tanh_are_told_too() -> None:
    clamped = adapted_experts("the other", "eager", torch.float32, limit=CLAMPED)
    assert gate_of(clamped.unload().experts) == Gate(
        name="clamped_swiglu", is_interleaved=True, alpha=1.702, limit=CLAMPED
    )
    gelu = adapted_experts("gelu", "eager", torch.float32)
    assert gate_of(gelu.unload().experts) == Gate(name="gelu_tanh", is_interleaved=False)


def test_a_gate_of_another_kind_and_weights_that_train_are_refused_by_name() -> None:
    model = by("triton", adapted_experts("without gate", "eager", torch.float32))
    with pytest.raises(UnsupportedModelError, match=r"NemotronHExperts has no gate that Triton's"):
        step(model, "mixed", torch.float32)
    model = by("triton", adapted_experts("gated", "eager", torch.float32))
    model.requires_grad_(requires_grad=True)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts has weights that train"):
        step(model, "mixed", torch.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_the_value_are_those_with_it_to_the_bit(device: str) -> None:
    model = by("triton", adapted_experts("gated", "eager", torch.float32), device)
    hidden_TD, expert_TC, weight_TC = (x.to(device) for x in chosen("skewed", torch.float32))
    hidden_TD.requires_grad_()
    weight_TC.requires_grad_()
    experts = model.get_base_model().experts
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradients(forward: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = hidden_TD + forward(hidden_TD, expert_TC, weight_TC)
        assert is_no_value(out) == (forward != experts)
        given = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
        return torch.autograd.grad(out, [hidden_TD, weight_TC, *trained], given)

    with_value, without = gradients(experts), gradients(experts.without_value)
    assert all(map(torch.equal, with_value, without))
