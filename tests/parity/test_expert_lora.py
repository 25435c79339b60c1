"""Adapters on fused experts: peft's result (grade REORDER), and no merged weights on the way."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PreTrainedModel

from finetune.adapter.linear_lora import compute_beside
from finetune.adapter.lora import add_lora, load_adapter, save_adapter
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.errors import UnsupportedModelError
from tests.builders import adapter
from tests.parity.architectures import (
    CLOSE,
    SEEDS,
    SLACK,
    Gradients,
    micro_batches,
    plain,
    rel_error,
    streamed,
    truth,
)
from tests.parity.experts import (
    CLAMPED,
    KINDS,
    ROUTINGS,
    TYPES,
    D,
    E,
    F,
    adapted_by_peft,
    adapted_experts,
    chosen,
    randomised,
    step,
)
from tests.parity.tiny_models import VOCABULARY, tiny_model
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
PATHS = ("eager", "grouped_mm")

# ------------------------------------------------------------------------------------ whole models


def tiny(model_type: str, path: str, *, seed: int = 0) -> PreTrainedModel:
    base = tiny_model(model_type, seed=seed)
    base.set_experts_implementation(path)
    return base


def experts_of(model: nn.Module) -> Gradients:
    return {n: p for n, p in model.named_parameters() if "experts" in n and p.requires_grad}


@pytest.mark.parametrize(
    ("model_type", "path"),
    mostly_slow(list(itertools.product(TYPES, PATHS)), ("gpt_oss", "grouped_mm")),
)
def test_a_step_has_the_gradients_that_peft_computes(model_type: str, path: str) -> None:
    """Grade REORDER, over seeds until rounding has averaged out; plain and through the engine."""
    batches, squares = micro_batches(), {"peft": 0.0, "plain": 0.0, "streamed": 0.0}
    for seed in SEEDS:
        peft_model = adapted_by_peft(tiny(model_type, path, seed=seed), seed=seed)
        model = compute_beside(copy.deepcopy(peft_model))
        true = truth(peft_model, batches)
        assert true is not None
        peft_loss, reference = plain(peft_model, batches)
        results = {
            "plain": plain(model, batches),
            "streamed": streamed(model, batches, num_slots=2),
        }
        squares["peft"] += rel_error(reference, true) ** 2
        for name, (loss, ours) in results.items():
            assert loss == pytest.approx(peft_loss, rel=1e-6)
            squares[name] += rel_error(ours, true) ** 2
            assert_each_close(ours, reference)
        if all(square <= SLACK**2 * squares["peft"] for square in squares.values()):
            return
    pytest.fail(f"squared errors {squares}, the limit is {SLACK} in error")


def assert_each_close(ours: Gradients, reference: Gradients) -> None:
    for name, tensor in reference.items():
        assert tensor.norm() > 0, name
        assert (ours[name] - tensor).norm() <= CLOSE * 10 * tensor.norm(), name


@pytest.mark.thorough
@pytest.mark.parametrize("path", mostly_slow(PATHS, "grouped_mm"))
def test_a_streamed_step_is_the_resident_one_to_the_bit(path: str) -> None:
    model = compute_beside(adapted_by_peft(tiny("qwen3_moe", path)))
    loss, ours = streamed(model, micro_batches(), num_slots=2)
    resident_loss, resident = streamed(model, micro_batches(), num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in resident)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "gpt_oss", "qwen3_moe"))
def test_a_saved_adapter_gives_the_same_logits_in_plain_peft(
    model_type: str, tmp_path: Path
) -> None:
    section = adapter(rank=4, alpha=8.0, targets=["o_proj"], experts=True)
    model = randomised(add_lora(tiny(model_type, "eager"), section, seed=0))
    save_adapter(model, tmp_path)
    elsewhere = PeftModel.from_pretrained(tiny_model(model_type), str(tmp_path))
    again = load_adapter(tiny_model(model_type), tmp_path)
    saved, loaded = experts_of(model), dict(elsewhere.named_parameters())
    assert saved
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    input_ids = torch.arange(3, 3 + VOCABULARY // 2).unsqueeze(0)
    with torch.no_grad():
        ours = model.eval()(input_ids=input_ids).logits
        torch.testing.assert_close(elsewhere(input_ids=input_ids).logits, ours, rtol=0, atol=2e-6)
        torch.testing.assert_close(again(input_ids=input_ids).logits, ours, rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_adapters_can_be_switched_off_merged_and_taken_off() -> None:
    base = tiny("qwen3_moe", "eager").eval()
    batch = {"input_ids": torch.arange(3, 23).unsqueeze(0)}
    with torch.no_grad():
        bare = base(**batch).logits
        model = compute_beside(adapted_by_peft(base)).eval()
        adapted = model(**batch).logits
        assert not torch.allclose(adapted, bare, atol=1e-3)
        with model.disable_adapter():
            assert torch.equal(model(**batch).logits, bare)
        model.merge_adapter()
        torch.testing.assert_close(model(**batch).logits, adapted, rtol=0, atol=2e-6)
        model.unmerge_adapter()
        torch.testing.assert_close(model(**batch).logits, adapted, rtol=0, atol=2e-6)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, adapted, rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_two_adapters_count_together_as_in_peft() -> None:
    first = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[])
    second = LoraConfig(
        r=2, lora_alpha=16, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[]
    )
    model: Any = compute_beside(get_peft_model(tiny("qwen3_moe", "eager"), first))
    model.add_adapter("second", second)  # finds our wrappers, by the name of their class
    randomised(model)
    peft_model = as_peft_computes(model)
    batch = {"input_ids": torch.arange(3, 23).unsqueeze(0)}
    logits = []
    with torch.no_grad():
        for active in ("default", "second", ["default", "second"]):
            for each in (model, peft_model):
                each.base_model.set_adapter(active)
            logits.append(model(**batch).logits)
            torch.testing.assert_close(logits[-1], peft_model(**batch).logits, rtol=0, atol=2e-6)
    assert not torch.allclose(logits[0], logits[2], atol=1e-4)
    assert not torch.allclose(logits[1], logits[2], atol=1e-4)


def as_peft_computes(model: Any) -> Any:
    """Return a copy in which peft merges in each forward."""
    from peft.tuners.lora import layer

    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, layer.ParamWrapper):
            module.__class__ = layer.ParamWrapper
    return model


# ----------------------------------------------------------------------------------- experts alone


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_what_peft_does_to_twelve_digits(kind: str, routing: str) -> None:
    """Grade REORDER with nothing to hide in: float64."""
    peft_model = adapted_experts(kind, "eager", torch.float64, limit=CLAMPED)
    model = compute_beside(copy.deepcopy(peft_model))
    reference, ours = (step(m, routing, torch.float64) for m in (peft_model, model))
    assert sum("lora" in name for name in reference) == 2 * len(KINDS[kind][1])
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_compute_what_the_loop_does(kind: str, routing: str) -> None:
    """Every routing; the grade is the next test's."""
    ours = {}
    for path in PATHS:
        model = compute_beside(adapted_experts(kind, path, torch.float32, limit=CLAMPED))
        ours[path] = step(model, routing, torch.float32)
    for name, tensor in ours["eager"].items():
        torch.testing.assert_close(ours["grouped_mm"][name], tensor, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_of_an_expert_that_is_not_there_counts_for_nothing(kind: str, path: str) -> None:
    """As in transformers' own loop, from 5.23 on."""
    model = compute_beside(adapted_experts(kind, path, torch.float32))
    hidden_TD, expert_TC, weight_TC = chosen("mixed", torch.float32)
    weight_TC[::3, 1] = 0
    with torch.no_grad():
        right = model(hidden_TD, expert_TC, weight_TC)
        expert_TC[::3, 1] = E
        weight_TC[::3, 1] = torch.nan
        torch.testing.assert_close(model(hidden_TD, expert_TC, weight_TC), right)


def test_experts_without_rows_get_no_gradient_whatever_a_grouped_product_leaves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some GPUs leave there what was in memory (pytorch issue 172439)."""
    grouped_mm = torch.nn.functional.grouped_mm

    def careless(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = grouped_mm(left, right, offs=offs)
        if right.dim() == 2:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    model = compute_beside(adapted_experts("gated", "grouped_mm", torch.float32))
    right = step(model, "idle experts", torch.float32)
    right = {name: tensor.clone() for name, tensor in right.items()}
    model.zero_grad()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    for name, tensor in step(model, "idle experts", torch.float32).items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_as_close_to_the_truth_as_peft(
    kind: str, path: str, dtype: torch.dtype
) -> None:
    """Grade REORDER: weights and inputs are of the dtype, the truth is float64.

    Grouped products in bf16 round the product and the branch each for itself, where peft rounds the
    merged weights. Squared, as behind an activation without a gate, the former counts for more.
    """
    slack = SLACK
    if (kind, path, dtype) == ("without gate", "grouped_mm", torch.bfloat16):
        slack = 1.25
    squares = {"ours": 0.0, "peft": 0.0}
    for seed in range(32):
        peft_model = adapted_experts(kind, path, dtype, seed=seed)
        model = compute_beside(copy.deepcopy(peft_model))
        exact = adapted_experts(kind, "eager", torch.float64, seed=seed)
        exact.load_state_dict({n: t.double() for n, t in peft_model.state_dict().items()})
        true = step(exact, "mixed", dtype, seed=seed, precision=torch.float64)
        squares["ours"] += rel_error(step(model, "mixed", dtype, seed=seed), true) ** 2
        squares["peft"] += rel_error(step(peft_model, "mixed", dtype, seed=seed), true) ** 2
        if seed >= 3 and squares["ours"] <= slack**2 * squares["peft"]:
            return
    pytest.fail(f"squared errors {squares}, the limit is {slack} in error")


@pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys did not match any targeted module"
)
@pytest.mark.parametrize("path", PATHS)
def test_rank_and_scaling_are_those_of_each_projection(path: str) -> None:
    patterns: dict[str, Any] = {
        "r": 4,
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"experts.down_proj": 21},
        "use_rslora": True,
    }
    peft_model = adapted_experts("gated", path, torch.float32, **patterns)
    shapes = {n: tuple(p.shape) for n, p in peft_model.named_parameters() if "lora_A" in n}
    assert set(shapes.values()) == {(4 * E, D), (3 * E, F)}
    model = compute_beside(copy.deepcopy(peft_model))
    reference, ours = (step(m, "mixed", torch.float32) for m in (peft_model, model))
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2e-4, atol=2e-5, msg=name)


def test_weights_that_train_too_get_the_gradient_that_peft_gives_them() -> None:
    peft_model = adapted_experts("transposed, biased, clamped", "eager", torch.float64)
    peft_model.requires_grad_(requires_grad=True)
    model = compute_beside(copy.deepcopy(peft_model))
    reference, ours = (step(m, "mixed", torch.float64) for m in (peft_model, model))
    assert {"down_proj", "gate_up_proj_bias"} <= {name.rsplit(".", 1)[-1] for name in reference}
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


# ---------------------------------------------------------------------------- memory, and the host


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["gated", "transposed, biased, clamped"])
def test_nothing_as_large_as_a_projection_is_ever_built(kind: str, path: str) -> None:
    """Of one token and adapters of rank 4, what is made is far smaller than E x D x F.

    Neither a delta, nor a gradient by frozen weights, nor a copy of either.
    """
    peft_model = adapted_experts(kind, path, torch.float32)
    projection_bytes, factor_bytes = 4 * E * D * F, 4 * 4 * E * max(D, 2 * F)
    model = compute_beside(copy.deepcopy(peft_model))
    ours, merged = LiveBytes(), LiveBytes()
    with Tracer(ours):
        step(model, "one token", torch.float32)
    assert ours.largest_bytes <= factor_bytes < projection_bytes
    assert ours.peak_bytes < projection_bytes
    with Tracer(merged):  # the count sees what peft builds
        step(peft_model, "one token", torch.float32)
    assert merged.largest_bytes >= 2 * projection_bytes


def test_what_is_kept_for_the_backward_grows_by_the_rank_alone() -> None:
    """Bytes saved by autograd for each routed row: activation, its parts, and R per branch."""

    def saved_bytes(rank: int) -> int:
        model = compute_beside(adapted_experts("gated", "eager", torch.float32, r=rank))
        hidden_TD, expert_TC, weight_TC = chosen("mixed", torch.float32)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        own = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(hidden_TD.requires_grad_(), expert_TC, weight_TC.requires_grad_())
        del out
        return sum(size for storage, size in kept.items() if storage not in own)

    num_rows = 40 * 2
    transposed_b = 4 * E * (2 * F + D)  # of each rank, once, whatever the number of rows
    assert saved_bytes(8) - saved_bytes(4) == 4 * (num_rows * 4 * 2 + transposed_b)
    inputs_bytes = 40 * D * 4
    assert saved_bytes(4) <= num_rows * (6 * F + 2 * 4 + 8) * 4 + inputs_bytes + 4 * transposed_b


@pytest.mark.thorough
@pytest.mark.parametrize("rank", mostly_slow([4, 8, 16], 4))
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_never_make_the_host_wait(kind: str, rank: int) -> None:
    """A fake tensor has no value to wait for, and its grouped products check strides as a GPU's."""
    outcome: dict[str, Any] = {}
    for path in PATHS:
        model = compute_beside(adapted_experts(kind, path, torch.bfloat16, r=rank))
        with FakeTensorMode():
            make_fake(model)
            hidden_TD = torch.randn(40, D, dtype=torch.bfloat16, requires_grad=True)
            weight_TC, expert_TC = torch.randn(40, E, dtype=torch.bfloat16).topk(2)
            try:
                model(hidden_TD, expert_TC, weight_TC.requires_grad_()).sum().backward()
            except DataDependentOutputException as error:
                outcome[path] = error
            else:
                outcome[path] = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None for gradient in outcome["grouped_mm"])
    assert isinstance(outcome["eager"], DataDependentOutputException)


def make_fake(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(fake, requires_grad=parameter.requires_grad))


# ---------------------------------------------------------------------------------------- refusals


def test_experts_that_take_no_branch_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Llama4TextExperts does not go through"):
        compute_beside(adapted_by_peft(tiny_model("llama4_text")))


def test_another_implementation_of_experts_is_refused_before_and_after() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'batched_mm'.*take one of eager, grouped_mm"):
        compute_beside(adapted_by_peft(tiny("qwen3_moe", "batched_mm")))
    model: Any = compute_beside(adapted_by_peft(tiny("qwen3_moe", "eager")))
    model.get_base_model().set_experts_implementation("batched_mm")
    with pytest.raises(TypeError, match="lora"):
        model(input_ids=torch.arange(3, 8).unsqueeze(0))
