"""Kernels of experts: products and the choice of their tiles."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offload.engine.experts import autotune as choice
from offload.engine.experts import fused
from offload.engine.experts.autotune import (
    CANDIDATES,
    Trial,
    fastest,
    find_experts,
    reason_against,
    try_all,
    use,
)
from offload.engine.experts.products import FEW_SIZES, Loop, route
from offload.errors import UnsupportedModelError
from offload.plan.machine.machine import ExpertsImplementation
from tests.parity.architectures import SLACK, rel_error
from tests.parity.experts import KINDS, SIZES, Holder, step
from tests.tiers import mostly_slow

CPU = torch.device("cpu")
NUM_TOKENS = 96


def experts(*, width: int = 16, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return experts without weights, as those of a model whose weights are not loaded."""
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=width, num_experts=4, hidden_act="silu"
    )
    with torch.device("meta"):
        return Qwen3MoeExperts(config).to(dtype)


def tried(
    module: nn.Module,
    *candidates: ExpertsImplementation,
    ranks: Mapping[str, int] | None = None,
    device: torch.device = CPU,
) -> dict[str, Trial]:
    trials = try_all(
        module,
        candidates=candidates,
        device=device,
        num_tokens=NUM_TOKENS,
        experts_per_token=2,
        ranks=ranks or {},
    )
    assert [trial.implementation for trial in trials] == list(candidates)
    return {trial.implementation: trial for trial in trials}


class Calls:
    """Counts calls of an implementation, and what went through the last one."""

    def __init__(self, way: str) -> None:
        self._compute: Any = ALL_EXPERTS_FUNCTIONS[way]
        self.num = 0
        self.module: Any = None
        self.inputs: tuple[Any, ...] = ()

    def __call__(self, module: nn.Module, *inputs: Any, **keywords: Any) -> torch.Tensor:
        self.num += 1
        self.module, self.inputs = module, inputs
        out: torch.Tensor = self._compute(module, *inputs, **keywords)
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls("grouped_mm")
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", found)
    return found


@pytest.mark.parametrize("ranks", [{}, {"gate_up_proj": 4, "down_proj": 2}])
def test_each_way_that_can_run_has_a_time_and_no_reason(ranks: Mapping[str, int]) -> None:
    for trial in tried(experts(), "eager", "grouped_mm", ranks=ranks).values():
        assert trial.reason is None
        assert trial.seconds is not None
        assert 0 < trial.seconds < 10


def test_experts_that_are_transposed_and_biased_are_tried_too() -> None:
    config = GptOssConfig(hidden_size=32, intermediate_size=48, num_local_experts=4)
    with torch.device("meta"):
        module = GptOssExperts(config)
    ranks = {"gate_up_proj": 8, "down_proj": 8}
    trials = tried(module, "eager", "grouped_mm", ranks=ranks).values()
    assert [trial.reason for trial in trials] == [None, None]


def test_a_trial_has_the_sizes_of_the_run_and_counts_no_warm_up(calls: Calls) -> None:
    trials = try_all(
        experts(dtype=torch.bfloat16),
        candidates=["grouped_mm"],
        device=CPU,
        num_tokens=NUM_TOKENS,
        experts_per_token=3,
        ranks={},
    )
    assert trials[0].reason is None
    assert calls.num == 1 + 5
    hidden_TD, expert_TC, weight_TC = calls.inputs
    assert (hidden_TD.shape, expert_TC.shape) == ((NUM_TOKENS, 32), (NUM_TOKENS, 3))
    assert {hidden_TD.dtype, weight_TC.dtype, calls.module.down_proj.dtype} == {torch.bfloat16}
    assert set(expert_TC.flatten().tolist()) == {0, 1, 2, 3}
    assert float(calls.module.down_proj.std()) == pytest.approx(0.02, rel=0.1)


def test_the_time_is_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out_TD: torch.Tensor, way: str) -> torch.Tensor:
            ctx.way = way
            return out_TD.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            backwards.append(ctx.way)
            return gradients[0], None

    for way in ("grouped_mm", "batched_mm"):
        plain: Any = ALL_EXPERTS_FUNCTIONS[way]
        monkeypatch.setitem(
            ALL_EXPERTS_FUNCTIONS._global_mapping,
            way,
            lambda *given, plain=plain, way=way: Noted.apply(plain(*given), way),
        )
    tried(experts(), "grouped_mm", "batched_mm")  # type: ignore[arg-type]
    # warmed up one after the other, then in turn
    assert backwards == ["grouped_mm", "batched_mm"] * 6


def test_what_fails_shows_its_reason_and_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise ValueError("no such kernel\nand more of it")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", fail)
    found = tried(experts(), "grouped_mm", "eager")
    assert found["grouped_mm"].reason == "ValueError: no such kernel"
    assert found["grouped_mm"].seconds is None
    assert found["eager"].seconds is not None


def test_memory_that_runs_out_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", fail)
    assert tried(experts(), "grouped_mm")["grouped_mm"].reason == "device memory ran out"


def test_rows_that_grouped_products_cannot_take_are_told_without_running_them(
    calls: Calls,
) -> None:
    odd = experts(width=6)
    reason = "rows of down_proj have 24 bytes, not a multiple of 16"
    assert reason_against("grouped_mm", odd, CPU) == reason
    assert reason_against("eager", odd, CPU) is None
    assert tried(odd, "grouped_mm", "eager")["grouped_mm"].reason == reason
    assert calls.num == 0


def test_torch_refuses_the_rows_that_are_told() -> None:
    rows, weights = torch.randn(8, 6), torch.randn(2, 6, 6)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def test_triton_is_told_not_to_run_on_a_cpu() -> None:
    assert reason_against("triton", experts(), CPU)
    assert tried(experts(), "triton", "eager")["triton"].seconds is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks",
    mostly_slow({"frozen": {}, "lora": {"gate_up_proj": 4, "down_proj": 4}}, "frozen"),
)
def test_triton_is_made_known_before_it_is_tried(
    ranks: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for name in ("triton", "triton+lora"):
        monkeypatch.delitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, raising=False)
    monkeypatch.setattr(fused, "reason_against", lambda _experts, _device: None)  # interpreted
    monkeypatch.setattr(choice, "NUM_ROUNDS", 1)
    monkeypatch.setattr(f"{__name__}.NUM_TOKENS", 8)
    assert tried(experts(), "triton", ranks=ranks)["triton"].reason is None


def test_nothing_is_left_of_a_trial_that_went_well_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StorageWeakRef] = []

    def fail(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        seen.extend(StorageWeakRef(x.untyped_storage()) for x in (*inputs, *module.parameters()))
        error = ValueError("no such kernel")
        raise error  # which holds this frame, which holds it

    def compute(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        seen.extend(StorageWeakRef(x.untyped_storage()) for x in (*inputs, *module.parameters()))
        out: torch.Tensor = plain(module, *inputs)
        return out

    plain: Any = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", fail)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", compute)
    module = experts()
    before = copy.deepcopy(module.config.__dict__)
    tried(module, "batched_mm", "grouped_mm")  # type: ignore[arg-type]
    assert len(seen) == (1 + 6) * 5
    assert all(storage.expired() for storage in seen)
    assert all(parameter.device.type == "meta" for parameter in module.parameters())
    assert module.config.__dict__ == before


def test_a_trial_draws_no_random_number_of_the_run() -> None:
    state = torch.get_rng_state()
    tried(experts(), "eager", "grouped_mm")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_fastest_is_taken() -> None:
    trials = [
        Trial(implementation="eager", seconds=2.0),
        Trial(implementation="grouped_mm", seconds=1.0),
        Trial(implementation="triton", reason="no Triton"),
    ]
    assert fastest(trials).implementation == "grouped_mm"


def test_where_nothing_can_run_all_reasons_are_named() -> None:
    trials = [
        Trial(implementation="eager", reason="device memory ran out"),
        Trial(implementation="triton", reason="no Triton"),
    ]
    message = r"eager: device memory ran out; triton: no Triton; .*hint: .*`train\.seq_len`"
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        fastest(trials)


def test_a_model_without_experts_has_none() -> None:
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=8,
    )
    with torch.device("meta"):
        assert find_experts(Qwen3ForCausalLM(config)) is None
    module = experts()
    assert find_experts(nn.Sequential(nn.Linear(2, 2), module)) is module


def let_cublas_allocate(device: torch.device) -> None:
    """Multiply forward and backward: each thread's cuBLAS keeps a workspace, of 32 MiB in tests."""
    weight, bias = (torch.ones(n, device=device, requires_grad=True) for n in ((16, 16), 16))
    nn.functional.linear(weight, weight, bias).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [{}, {"gate_up_proj": 16, "down_proj": 16}])
def test_a_card_tries_all_ways_and_keeps_no_memory(ranks: Mapping[str, int]) -> None:
    device = torch.device("cuda")
    let_cublas_allocate(device)
    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=16)
    with torch.device("meta"):
        module = Qwen3MoeExperts(config).to(torch.bfloat16)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trials = try_all(
        module,
        candidates=CANDIDATES,
        device=device,
        num_tokens=2048,
        experts_per_token=8,
        ranks=ranks,
    )
    assert [trial.reason for trial in trials] == [None, None, None]
    assert all(trial.seconds for trial in trials)
    del trials
    assert torch.cuda.memory_allocated() - allocated < 4 * 2**20  # half of the tokens' states
    assert torch.cuda.memory_reserved() - reserved < 64 * 2**20


# ----------------------------------------------------------------------------------------- products


NUM_EXPERTS, PRODUCTS_NUM_TOKENS, K, N = 4, 70, 24, 16


class Sizes(TorchDispatchMode):
    """Notes with how many rows matrices are multiplied, or over how many they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left = args[-2]
            self.rows.add(left.shape[1] if left.stride(0) == 1 else left.shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "is_even"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_few_different_numbers_of_rows_are_multiplied_in_16_bits(
    dtype: torch.dtype, is_even: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    expert_TC = torch.randint(NUM_EXPERTS - 1, (PRODUCTS_NUM_TOKENS, 2), generator=generator)
    products = Loop(route(expert_TC, num_experts=NUM_EXPERTS))
    hidden_TK = torch.randn(PRODUCTS_NUM_TOKENS, K, generator=generator).to(dtype)
    weight_EKN = torch.randn(NUM_EXPERTS, K, N, generator=generator).to(dtype)
    with Sizes() as sizes:
        up_SN = products.sum((products.rows(hidden_TK), weight_EKN))
        down_TK = products.sum(
            (up_SN, weight_EKN.mT), (up_SN, weight_EKN.mT.contiguous()), to_tokens=True
        )
        outer_EKN = products.outer(products.rows(hidden_TK), up_SN)
    assert sizes.rows
    assert all(size % FEW_SIZES == 0 for size in sizes.rows) == is_even
    for i in range(NUM_EXPERTS):
        rows_K = hidden_TK[torch.nonzero(expert_TC == i)[:, 0]].double()
        rows_N = rows_K @ weight_EKN[i].double()
        torch.testing.assert_close(
            outer_EKN[i].double(), rows_K.T @ rows_N, rtol=0.05, atol=0.05 * float(K)
        )
    up_TCN = (hidden_TK[:, None, None].double() @ weight_EKN[expert_TC].double())[:, :, 0]
    down = 2 * (up_TCN[:, :, None] @ weight_EKN.mT[expert_TC].double()).sum(dim=(1, 2))
    assert (down_TK.double() - down).norm() < 0.01 * down.norm()


@pytest.mark.parametrize("kind", ["gated", "transposed, biased, clamped", "without gate"])
def test_experts_without_adapters_are_as_close_to_the_truth_as_transformers_own(kind: str) -> None:
    """Grade REORDER: in 16 bits a CPU multiplies them by our products."""
    squares = {"ours": 0.0, "own": 0.0}
    for seed in range(32):
        torch.manual_seed(seed)
        holder = Holder(KINDS[kind][0], "eager", limit=7.0, sizes=SIZES).bfloat16()
        own = step(holder, "mixed", torch.bfloat16, seed=seed)
        use("eager", holder.experts)
        ours = step(holder, "mixed", torch.bfloat16, seed=seed)
        assert not torch.equal(ours["weight"], own["weight"]), "by transformers' loop again"
        true = step(holder.double(), "mixed", torch.bfloat16, seed=seed, precision=torch.float64)
        squares["ours"] += rel_error(ours, true) ** 2
        squares["own"] += rel_error(own, true) ** 2
        if seed >= 3 and squares["ours"] <= SLACK**2 * squares["own"]:
            return
    pytest.fail(f"squared errors {squares}, the limit is {SLACK} in error")
