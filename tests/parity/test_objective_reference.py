"""What an objective compares with: the model as it was before training, in the same visits.

Grades: MOVE is to the bit, REORDER within rounding of a plain loop in float64.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.adapter.lora import add_noise
from offload.engine.engine import Engine
from offload.engine.objective import Reference, Scores, StepLoss
from offload.errors import OffloadError
from offload.plan.schedule.schedule import Order
from tests.parity.objectives import (
    Batches,
    ByRow,
    in_order,
    pairs,
    plain_scores,
    plain_step,
    sigmoid,
)
from tests.parity.steps import MODELS, OPTIONS, SHAPE, gradients, rel_error, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(model: nn.Module, **changes: Any) -> Engine:
    return Engine(model, device=torch.device("cpu"), options=replace(OPTIONS, **changes))


def shaken(model: Any) -> Any:
    """Move all that trains away from where it began."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


def with_adapter(name: str = "llama", **config: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]} | config
    model = shaken(get_peft_model(MODELS[name](), LoraConfig(**options)))
    compute_in_base_dtype(model)
    return model


def scores(model: nn.Module, batches: Batches, reference: Reference, **changes: Any) -> Scores:
    """Return the scores of a step in training mode."""
    objective = ByRow(sigmoid, num_trained=2 * len(batches), reference=reference)
    engine = engine_of(model, **changes)
    engine.forward_backward(batches, objective=objective, dropout_seed=0)
    engine.detach()
    return objective.seen[0]


def by_row(scores: Scores) -> torch.Tensor:
    assert scores.reference_N is not None
    zeros_R = torch.zeros(scores.num_rows, dtype=scores.reference_N.dtype)
    return zeros_R.index_add(0, scores.rows_N, scores.reference_N)


WHOLE = ["embed_tokens", "lm_head", "norm", "input_layernorm"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    mostly_slow(
        {
            "dropout": ({"lora_dropout": 0.4},),
            "modules trained whole": ({"modules_to_save": WHOLE},),
            "adapters outside the layers": (
                {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
            ),
            "dora": ({"use_dora": True},),
        },
        "dropout",
        "modules trained whole",
    ),
)
def test_the_reference_scores_as_the_plain_model_without_adapters(config: Any) -> None:
    model = with_adapter(**config).double()
    batches = pairs(1, 1)
    found_R = by_row(scores(copy.deepcopy(model), batches, Reference()))
    with torch.no_grad(), model.eval().disable_adapter():
        expected_R = plain_scores(model, batches)
    assert torch.allclose(found_R, expected_R, rtol=1e-13, atol=0)


@pytest.mark.parametrize("outside", [[], ["embed_tokens", "lm_head"]])
def test_the_reference_may_be_another_adapter(outside: list[str]) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj", *outside])
    model = with_adapter(target_modules=["q_proj", "v_proj", *outside])
    model.add_adapter("before", config)
    compute_in_base_dtype(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".before." in name:
                parameter.normal_(std=0.2)
                parameter.requires_grad_(False)
    batches = pairs(1, 1)
    found_R = by_row(scores(copy.deepcopy(model), batches, Reference(adapter="before")))
    expected = copy.deepcopy(model).eval()
    expected.base_model.set_adapter("before")
    with torch.no_grad():
        expected_R = plain_scores(expected, batches)
        plain_R = plain_scores(model.eval(), batches)
    assert torch.allclose(found_R, expected_R, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found_R, plain_R, rtol=1e-2)


@pytest.mark.thorough
def test_the_reference_has_no_noise_of_neftune() -> None:
    plain, noisy = with_adapter(), with_adapter()
    add_noise(noisy, alpha=50.0)
    without, found = (scores(model, pairs(1), Reference()) for model in (plain, noisy))
    assert torch.equal(by_row(found), by_row(without))
    assert not torch.allclose(found.policy_N.detach(), without.policy_N.detach())


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "gemma3_text"], "gemma3_text"))
def test_reorder_modules_trained_whole_have_the_gradients_of_a_plain_loop(name: str) -> None:
    whole = WHOLE if name == "llama" else ["norm", "input_layernorm"]  # Gemma's head is tied
    model = with_adapter(name, modules_to_save=whole)
    _, truth = plain_step(model, pairs(3), in_order)
    levers: list[dict[str, Any]] = [{}, {"stash": "host", "num_kept_graphs": 2}]
    for changes in levers:
        streamed = copy.deepcopy(model)
        engine = engine_of(streamed, **changes)
        engine.forward_backward(pairs(1, 2), objective=ByRow(in_order, num_trained=6))
        ours = gradients(streamed)
        engine.detach()
        assert rel_error(ours, truth) < 3e-6


@pytest.mark.thorough
def test_packed_rows_are_scored_and_trained_as_each_is_alone() -> None:
    model = with_adapter("qwen3")
    (batch,) = pairs(3)
    lens = [12, 5, 9, 12, 7, 12]
    rows = [
        (ids[:, :num], labels[:, :num])
        for ids, labels, num in zip(
            batch["input_ids"].split(1), batch["labels"].split(1), lens, strict=True
        )
    ]
    packed = [
        {
            "input_ids": torch.cat([ids for ids, _ in part], dim=1),
            "labels": torch.cat([labels for _, labels in part], dim=1),
            "row_lens": torch.tensor([ids.shape[1] for ids, _ in part]),
        }
        for part in (rows[:2], rows[2:])
    ]
    loss, truth = plain_step(model, packed, in_order)
    engine = engine_of(model)
    result = engine.forward_backward(packed, objective=ByRow(in_order, num_trained=6))
    ours = gradients(model)
    engine.detach()
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert rel_error(ours, truth) < 3e-6


@pytest.mark.thorough
def test_a_router_loss_is_added_for_the_policy_alone() -> None:
    model: Any = tiny("qwen3_moe")
    model.get_base_model().config.output_router_logits = True
    balanced = copy.deepcopy(model)
    losses = {}
    for has_reference in (True, False):
        objective = ByRow(sigmoid, 4, reference=Reference() if has_reference else None)
        engine = engine_of(copy.deepcopy(balanced))
        total = engine.forward_backward(pairs(1, 1), objective=objective, dropout_seed=0).loss
        own = engine.evaluate(pairs(1, 1), objective=objective).loss
        engine.detach()
        losses[has_reference] = total - own
    assert losses[True] > 1e-4
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.num_elements = max([self.num_elements, *made])
        return result


@pytest.mark.thorough
def test_no_tensor_is_larger_than_the_logits_of_a_chunk() -> None:
    config = LlamaConfig(**SHAPE | {"vocab_size": 1000, "num_hidden_layers": 2})
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    batches = pairs(2, 2, width=40)
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    engine = engine_of(model.train())
    objective = ByRow(sigmoid, num_trained=8)
    engine.forward_backward(batches, objective=objective)  # inspects the model
    with Largest() as largest:
        result = engine.forward_backward(batches, objective=objective)
    engine.detach()
    assert result.num_label_tokens == num_labels
    weights = config.vocab_size * config.hidden_size
    assert largest.num_elements <= max(weights, OPTIONS.head_chunk_tokens * config.vocab_size)
    assert largest.num_elements < num_labels * config.vocab_size / 4


# ------------------------------------------------------------------------------------- refusals


def refused(model: nn.Module, match: str, *, num_kept: int = 0, **step: Any) -> None:
    engine = engine_of(model, num_kept_graphs=num_kept)
    step = {"objective": ByRow(sigmoid, num_trained=2)} | step
    try:
        with pytest.raises(OffloadError, match=match):
            engine.forward_backward(step.pop("micro_batches", pairs(1)), **step)
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        engine.detach()


@pytest.mark.thorough
def test_what_cannot_be_a_reference_is_refused_by_name() -> None:
    base = MODELS["llama"]()
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("o_proj" in name)
    refused(base, "LlamaForCausalLM has no adapter")
    unfrozen = with_adapter()
    unfrozen.base_model.model.model.norm.weight.requires_grad_()
    refused(unfrozen, r"model\.norm\.weight trains, and it is no adapter's")
    merged = with_adapter()
    merged.merge_adapter()
    refused(merged, "is merged into its weights")
    switched_off = with_adapter()
    switched_off.disable_adapter_layers()
    refused(switched_off, "the adapters of LlamaForCausalLM are switched off")
    missing = ByRow(sigmoid, num_trained=2, reference=Reference(adapter="other"))
    refused(with_adapter(), "adapter 'other', which LlamaForCausalLM lacks", objective=missing)
    trained = ByRow(sigmoid, num_trained=2, reference=Reference(adapter="default"))
    refused(
        with_adapter(), "default.*trains, and it is of the reference's adapter", objective=trained
    )


@pytest.mark.thorough
def test_what_an_objective_cannot_take_is_refused_by_name() -> None:
    model = with_adapter()
    (batch,) = pairs(1)
    labels = batch["labels"].clone()
    labels[1] = -100
    unlabelled = [*pairs(1), batch | {"labels": labels}]
    refused(model, "row 1 of micro-batch 1 has no token with a label", micro_batches=unlabelled)
    refused(model, "scored has 1 micro-batches, and there is no", objective=None, scored=[batch])
    refused(model, "order is micro_batch_major", order=Order.MICRO_BATCH_MAJOR)

    class Detached(ByRow):
        def loss(self, scores: Scores) -> StepLoss:
            return StepLoss(value=super().loss(scores).value.detach(), metrics={})

    refused(model, "Detached returns a loss without a graph", objective=Detached(sigmoid, 2))
    apart = ByRow(lambda ratio_R, _: ratio_R, num_trained=2)
    refused(model, r"ByRow returns a loss of shape \(2,\)", objective=apart)

    class Plain(ByRow):
        def loss(self, scores: Scores) -> StepLoss:
            of_tensor: Any = {"ratio": 1.5}
            return replace(super().loss(scores), metrics=of_tensor)

    refused(model, "Plain returns a ratio float", objective=Plain(sigmoid, 2))


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_is_returned_as_it_is() -> None:
    engine = engine_of(with_adapter())
    objective = ByRow(lambda ratio_R, _: ratio_R.sum() * float("nan"), num_trained=2)
    result = engine.forward_backward(pairs(1), objective=objective)
    engine.detach()
    assert result.loss != result.loss


@pytest.mark.thorough
def test_metrics_and_modes_are_as_before_a_step() -> None:
    model = with_adapter(lora_dropout=0.1)
    modes = {name: module.training for name, module in model.named_modules()}
    tables = [
        dict(vars(module)) for module in model.modules() if hasattr(module, "_active_adapter")
    ]
    engine = engine_of(model)
    objective = ByRow(sigmoid, num_trained=2)
    result = engine.forward_backward(pairs(1), objective=objective)
    assert set(result.metrics) == {"ratio"}
    assert engine.forward_backward(pairs(1)).metrics == {}
    assert {name: module.training for name, module in model.named_modules()} == modes
    after = [dict(vars(module)) for module in model.modules() if hasattr(module, "_active_adapter")]
    assert [table.get("_disable_adapters") for table in after] == [
        table.get("_disable_adapters") for table in tables
    ]
    engine.detach()
