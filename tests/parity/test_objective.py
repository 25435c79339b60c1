"""Steps whose loss is an objective's: a plain loop's gradients, however rows are cut."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from finetune.adapter.lora import add_noise
from finetune.data.step_rows import StepRows
from finetune.recipe.extensions import ObjectiveSection, StepData
from offload.engine.engine import Engine, EngineOptions
from offload.engine.objective import Reference, Scores, StepLoss
from offload.engine.passes.scoring import ScoreResult
from offload.errors import OffloadError
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Order
from tests.objectives import losses_of
from tests.parity import formulas as by_hand
from tests.parity.architectures import rel_error
from tests.parity.formulas import Answer, Loss
from tests.parity.objectives import (
    Batches,
    ByRow,
    Formula,
    adapted,
    against_scored,
    alone,
    attached,
    in_order,
    pairs,
    plain_scores,
    plain_step,
    sigmoid,
)
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    tiny,
)
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


Found = tuple[float, dict[str, torch.Tensor]]


def step(
    model: nn.Module,
    batches: Batches,
    formula: Formula = sigmoid,
    *,
    scored: Batches = (),
    options: EngineOptions = OPTIONS,
    num_steps: int = 1,
) -> Found:
    """Return the loss of the last of some steps, and the gradients of all."""
    model = copy.deepcopy(model)
    engine = attached(model, options)
    objective = ByRow(formula, num_trained=sum(len(alone_rows(batch)) for batch in batches))
    try:
        results = [
            engine.forward_backward(batches, objective=objective, scored=scored, dropout_seed=seed)
            for seed in range(num_steps)
        ]
        return results[-1].loss, gradients(model)  # type: ignore[arg-type] # as peft's models
    finally:
        engine.detach()


def alone_rows(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["row_lens"] if "row_lens" in batch else batch["input_ids"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "formula", mostly_slow([sigmoid, in_order, against_scored], against_scored)
)
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "qwen3_moe", "gemma3_text", "gpt_oss"], "qwen3_moe")
)
def test_reorder_gradients_are_those_of_a_plain_loop(name: str, formula: Formula) -> None:
    model = adapted(name)
    scored = pairs(1, 1, seed=7) if formula is against_scored else []
    loss, ours = step(model, pairs(1, 2), formula, scored=scored)
    plain_loss, truth = plain_step(model, pairs(3), formula, scored=scored)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert rel_error(ours, truth) < 3e-6


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe", "gemma3_text"], "qwen3_moe"))
def test_in_float64_gradients_are_exact_to_the_last_digits(name: str) -> None:
    model = tiny(name).double()
    model.config._experts_implementation = "eager"
    loss, ours = step(model, pairs(1, 2), in_order)
    plain_loss, truth = plain_step(model, pairs(3), in_order)
    assert loss == pytest.approx(plain_loss, rel=1e-14)
    assert rel_error(ours, truth) < 1e-14


@pytest.mark.parametrize("formula", mostly_slow([sigmoid, in_order, against_scored], in_order))
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
def test_a_step_is_the_same_however_its_rows_are_cut(name: str, formula: Formula) -> None:
    model, seed = adapted(name), 7
    loss, expected = step(model, pairs(4), formula, scored=pairs(4, seed=seed))
    engine = attached(model)
    for sizes, further in (((1, 1, 1, 1), (4,)), ((3, 1), (2, 2)), ((2, 2), (1, 3))):
        model.zero_grad()
        found_loss = engine.forward_backward(
            pairs(*sizes),
            objective=ByRow(formula, num_trained=8),
            scored=pairs(*further, seed=seed),
            dropout_seed=0,
        ).loss
        found = gradients(model)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert rel_error(found, expected) < 1e-6
    engine.detach()


@pytest.mark.thorough
def test_move_a_micro_batch_is_scored_alike_whatever_else_is_in_the_step() -> None:
    model = adapted("qwen3_moe")
    engine = attached(model)
    few, all_of_them = ByRow(sigmoid, num_trained=2), ByRow(sigmoid, num_trained=6)
    batches = pairs(1, 1, 1)
    engine.forward_backward(batches[1:2], objective=few, dropout_seed=0)
    engine.forward_backward(batches, objective=all_of_them, dropout_seed=0)
    engine.evaluate(batches[1:2], objective=few)
    engine.detach()
    step_alone, evaluated, together = few.seen[0], few.seen[1], all_of_them.seen[0]
    num = len(step_alone.policy_N)
    for name in ("policy_N", "reference_N"):
        scores_N = getattr(step_alone, name).detach()
        middle = (together.rows_N >= 2) & (together.rows_N < 4)
        assert int(middle.sum()) == num
        assert torch.equal(scores_N, getattr(together, name).detach()[middle])
        assert torch.equal(scores_N, getattr(evaluated, name))


LEVERS = {
    "kept": replace(OPTIONS, num_kept_graphs=2),
    "stashed": replace(OPTIONS, stash="host"),
    "sent": replace(OPTIONS, num_sent_graphs=2, num_kept_graphs=1),
    "outputs": replace(OPTIONS, num_kept_outputs=2, num_sent_outputs=2),
    "stashed, kept": replace(OPTIONS, stash="host", num_kept_graphs=2, num_slots=3),
    "all": replace(OPTIONS, stash="host", num_sent_graphs=1, num_kept_graphs=1, num_kept_outputs=2),
}


@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gemma3_text"], "qwen3_moe"))
@pytest.mark.parametrize("lever", mostly_slow(list(LEVERS), "stashed, kept"))
def test_move_streamed_is_resident(name: str, lever: str) -> None:
    model = adapted(name)
    resident = replace(OPTIONS, num_slots=NUM_LAYERS)
    batches, scored = pairs(1, 2), pairs(2, seed=7)
    expected = step(model, batches, against_scored, scored=scored, options=resident, num_steps=2)
    found = step(model, batches, against_scored, scored=scored, options=LEVERS[lever], num_steps=2)
    assert_equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{"layer_kernels": "fused"}, {"mlp_chunk_tokens": 8}], ids=["fused", "tiles"]
)
@pytest.mark.filterwarnings("ignore")
def test_layers_computed_in_other_ways_have_the_gradients_of_a_plain_loop(changes: Any) -> None:
    model, batches = adapted("gemma3_text"), pairs(1, 2)
    options = replace(OPTIONS, **changes)
    found = step(model, batches, in_order, options=options)
    _, truth = plain_step(model, pairs(3), in_order)
    assert rel_error(found[1], truth) < 3e-6
    assert_equal(
        found, step(model, batches, in_order, options=replace(options, num_slots=NUM_LAYERS))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("codec", mostly_slow(["nf4", "int8"], "nf4"))
def test_move_streamed_is_resident_where_layers_are_decoded(codec: Any) -> None:
    model = adapted("qwen3_moe")
    options = replace(OPTIONS, codec=codec)
    batches = pairs(1, 2)
    expected = step(model, batches, in_order, options=replace(options, num_slots=NUM_LAYERS))
    for changes in ({}, {"num_kept_graphs": 2}, {"stash": "host", "num_kept_graphs": 1}):
        found = step(model, batches, in_order, options=replace(options, **changes))
        assert_equal(found, expected)


@pytest.mark.thorough
def test_move_dropout_of_the_policy_is_repeated_and_the_reference_has_none() -> None:
    model = adapted("llama", dropout=0.3)
    batches = pairs(1, 2)
    expected = step(
        model, batches, options=replace(OPTIONS, num_slots=NUM_LAYERS, num_kept_graphs=NUM_LAYERS)
    )
    assert_equal(step(model, batches), expected)
    seen = []
    for dropping in (model, adapted("llama")):
        engine = attached(copy.deepcopy(dropping))
        objective = ByRow(sigmoid, num_trained=6)
        engine.forward_backward(batches, objective=objective, scored=pairs(1), dropout_seed=3)
        engine.detach()
        seen.append(objective.seen[0])
    with_dropout, without = seen
    is_scored = without.rows_N >= 6
    assert with_dropout.reference_N is not None
    assert without.reference_N is not None
    assert torch.equal(with_dropout.reference_N, without.reference_N)
    assert torch.equal(with_dropout.policy_N[is_scored], without.policy_N[is_scored])
    assert not torch.equal(with_dropout.policy_N[~is_scored], without.policy_N[~is_scored])


@pytest.mark.thorough
@pytest.mark.parametrize("num_micro_batches", mostly_slow([1, 4, 8], 4))
def test_a_reference_adds_no_load(num_micro_batches: int) -> None:
    engine = attached(tiny("llama"), replace(OPTIONS, num_slots=3))
    batches = pairs(*(1,) * num_micro_batches)
    objective = ByRow(sigmoid, num_trained=2 * num_micro_batches)
    engine.forward_backward(batches)  # from now on the ring is warm
    plain = engine.forward_backward(batches)
    result = engine.forward_backward(batches, objective=objective, scored=pairs(1, 1))
    kinds = [span.kind for span in result.timeline.spans]
    engine.detach()
    assert kinds.count(Kind.REFERENCE) == NUM_LAYERS * (num_micro_batches + 2)
    assert kinds.count(Kind.SCORE) == 2 * (num_micro_batches + 2)
    assert plain.num_loads == 2 * (NUM_LAYERS - 3)
    assert result.num_loads == plain.num_loads
    assert result.h2d_bytes == plain.h2d_bytes


# ------------------------------------------------------------------------------ objective reference


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


# ------------------------------------------------------------------------------------ top objective


VOCABULARY, K = 64, 5


@dataclass(frozen=True)
class Teacher:
    """K tokens at each label token of a step, and their probabilities; others share the rest."""

    ids_NK: torch.Tensor
    probabilities_NK: torch.Tensor

    @classmethod
    def drawn(cls, batches: Batches) -> "Teacher":
        """Draw what depends on a row alone, so that any cut of a step has the same teacher."""
        ids, probabilities = [], []
        for row in (row for batch in batches for row in alone(batch)):
            generator = torch.Generator().manual_seed(int(row["input_ids"].sum()))
            num = int((row["labels"][0, 1:] != -100).sum())
            logits_NV = 2 * torch.randn(num, VOCABULARY, generator=generator, dtype=torch.float64)
            top = logits_NV.softmax(1).topk(K, dim=1)
            ids.append(top.indices)
            probabilities.append(top.values)
            ids[-1][0, K - 2 :] = -1  # fewer than K at the first label of each row
            probabilities[-1][0, K - 2 :] = 0
        return cls(ids_NK=torch.cat(ids), probabilities_NK=torch.cat(probabilities))

    def loss(
        self, label_N: torch.Tensor, top_NK: torch.Tensor, others_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the KL divergence over K + 1 tokens, and half of a cross-entropy."""
        p_NK, rest_N = self.probabilities_NK, 1 - self.probabilities_NK.sum(1)
        terms_NK = p_NK * (p_NK.clamp(min=1e-300).log() - top_NK)
        kl_N = terms_NK.where(self.ids_NK >= 0, 0.0).sum(1) + rest_N * (rest_N.log() - others_N)
        return (kl_N - 0.5 * label_N).mean()


@dataclass(frozen=True)
class ToTeacher:
    teacher: Teacher
    reference: Reference | None = None

    @property
    def top_ids(self) -> torch.Tensor:
        return self.teacher.ids_NK

    def loss(self, scores: Scores) -> StepLoss:
        assert scores.top_NK is not None
        assert scores.others_N is not None
        found = scores.policy_N.double(), scores.top_NK.double(), scores.others_N.double()
        return StepLoss(value=self.teacher.loss(*found), metrics={})


def step_top(
    model: nn.Module,
    batches: Batches,
    options: EngineOptions = OPTIONS,
    *,
    reference: Reference | None = None,
    num_steps: int = 1,
) -> Found:
    model = copy.deepcopy(model)
    engine = attached(model, options)
    objective = ToTeacher(Teacher.drawn(batches), reference)
    try:
        results = [
            engine.forward_backward(batches, objective=objective, dropout_seed=seed)
            for seed in range(num_steps)
        ]
        return results[-1].loss, gradients(model)  # type: ignore[arg-type] # as peft's models
    finally:
        engine.detach()


def plain_step_top(model: Any, batches: Batches) -> Found:
    """Return loss and gradients by autograd over all rows at once, with all logits, in float64."""
    model = copy.deepcopy(model).double().eval()
    model.config._experts_implementation = "eager"
    teacher, parts = Teacher.drawn(batches), list[torch.Tensor]()
    labels = []
    for row in (row for batch in batches for row in alone(batch)):
        logits_TV = model(input_ids=row["input_ids"], use_cache=False).logits[0, :-1]
        is_label = row["labels"][0, 1:] != -100
        parts.append(logits_TV.log_softmax(-1)[is_label])
        labels.append(row["labels"][0, 1:][is_label])
    logps_NV, ids_NK = torch.cat(parts), teacher.ids_NK
    is_named_NV = torch.zeros(logps_NV.shape, dtype=torch.bool)
    for n, ids in enumerate(ids_NK.tolist()):
        is_named_NV[n, [token for token in ids if token >= 0]] = True
    others_N = (logps_NV.exp() * ~is_named_NV).sum(1).log()
    top_NK = logps_NV.gather(1, ids_NK.clamp(min=0))
    loss = teacher.loss(logps_NV.gather(1, torch.cat(labels)[:, None])[:, 0], top_NK, others_N)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "qwen3_moe", "gemma3_text", "gpt_oss"], "qwen3_moe")
)
def test_reorder_gradients_are_those_of_a_plain_loop_top(name: str) -> None:
    model = adapted(name)
    loss, ours = step_top(model, pairs(1, 2))
    plain_loss, truth = plain_step_top(model, pairs(3))
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert rel_error(ours, truth) < 3e-6


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_in_float64_gradients_are_exact_to_the_last_digits_top(name: str) -> None:
    model: Any = tiny(name).double()
    model.config._experts_implementation = "eager"
    loss, ours = step_top(model, pairs(1, 2))
    plain_loss, truth = plain_step_top(model, pairs(3))
    assert loss == pytest.approx(plain_loss, rel=1e-13)
    assert rel_error(ours, truth) < 1e-13


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
@pytest.mark.parametrize("chunk", mostly_slow([1, 7, 4096], 7))
def test_a_step_is_the_same_however_rows_and_chunks_of_the_head_are_cut(
    name: str, chunk: int
) -> None:
    model = adapted(name)
    loss, expected = step_top(model, pairs(4))
    for sizes in ((1, 1, 1, 1), (3, 1), (2, 2)):
        found_loss, found = step_top(
            model, pairs(*sizes), replace(OPTIONS, head_chunk_tokens=chunk)
        )
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert rel_error(found, expected) < 1e-6


TOP_LEVERS = {
    "kept": replace(OPTIONS, num_kept_graphs=2),
    "stashed, kept": replace(OPTIONS, stash="host", num_kept_graphs=2, num_slots=3),
    "nf4": replace(OPTIONS, codec="nf4"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gemma3_text"], "qwen3_moe"))
@pytest.mark.parametrize("lever", mostly_slow(list(TOP_LEVERS), next(iter(TOP_LEVERS))))
def test_move_streamed_is_resident_top(name: str, lever: str) -> None:
    model, options = adapted(name), TOP_LEVERS[lever]
    resident = replace(OPTIONS, num_slots=NUM_LAYERS, codec=options.codec)
    expected = step_top(model, pairs(1, 2), resident, num_steps=2)
    assert_equal(step_top(model, pairs(1, 2), options, num_steps=2), expected)


@pytest.mark.thorough
def test_a_reference_is_scored_by_its_labels_alone_and_changes_nothing() -> None:
    model = adapted("llama")
    assert_equal(step_top(model, pairs(1, 2), reference=Reference()), step_top(model, pairs(1, 2)))


@pytest.mark.thorough
@pytest.mark.parametrize("num_micro_batches", mostly_slow([1, 4, 8], 4))
def test_it_has_the_loads_of_plain_fine_tuning(num_micro_batches: int) -> None:
    engine = attached(tiny("llama"), replace(OPTIONS, num_slots=3))
    batches = pairs(*(1,) * num_micro_batches)
    engine.forward_backward(batches)  # from now on the ring is warm
    plain = engine.forward_backward(batches)
    found = engine.forward_backward(batches, objective=ToTeacher(Teacher.drawn(batches)))
    engine.detach()
    assert found.num_loads == plain.num_loads == 2 * (NUM_LAYERS - 3)
    assert found.h2d_bytes == plain.h2d_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ids: ids[1:], r"is \(\d+, 5\) of torch.int64"),
        (lambda ids: ids.int(), r"of torch.int32"),
        (lambda ids: ids.where(ids != ids[3, 1], ids[3, 0]), "with a token twice at label 3"),
        (lambda ids: ids.where(ids != ids[0, 0], -1), "without a token at some label"),
        (lambda ids: ids + VOCABULARY, "with the token 126, and the model predicts 64"),
    ],
)
def test_tokens_that_do_not_fit_the_labels_are_refused(change: Any, found: str) -> None:
    engine = attached(copy.deepcopy(adapted("llama")))
    teacher = Teacher.drawn(pairs(1))
    wrong = ToTeacher(replace(teacher, ids_NK=change(teacher.ids_NK)))
    try:
        with pytest.raises(OffloadError, match=found):
            engine.forward_backward(pairs(1), objective=wrong)
    finally:
        engine.detach()


# ------------------------------------------------------------------------------- shipped objectives


WIDTH, SEQ_LEN = 14, 40
PAIRED = ((2, 0, 1, 0, 3, 2, 1, 3), (1, 0, 1, 1, 0, 0, 0, 1))
RANKED = ((0, 1, 0, 1, 1, 0, 1, 1), (3, 2, 1, 5, 4, 2, 1, 3))
LABELLED = ((0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 0, 1, 1, 0, 1, 0))
SAMPLED = ((0, 1, 0, 1, 1, 0, 1, 1), (0.5, 1, 0, 0.25, -1, 2, 0, 1))
CUTS = ((8,), (1,) * 8, (5, 1, 2))
METHODS = ("dpo", "simpo", "cpo", "orpo", "kto", "grpo")  # those that compare answers


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of a recipe, and the same loss by hand."""

    settings: Mapping[str, Any]
    by_hand: Loss
    groups: tuple[tuple[int, ...], tuple[float, ...]] = PAIRED


def dpo(loss: str, formula: Loss, **settings: Any) -> Case:
    return Case(settings={"method": "dpo", "loss": loss, "beta": 0.4} | settings, by_hand=formula)


def grpo(loss: str, **settings: Any) -> Case:
    formula = partial(by_hand.grpo, loss, limit=3.0, longest=SEQ_LEN)
    names = {
        "beta": "b",
        "importance_sampling_mode": "mode",
        "clip_epsilon_high": "high",
    }
    return Case(
        settings={"method": "grpo", "loss": loss} | settings,
        by_hand=formula(**{names[name]: value for name, value in settings.items()}),
        groups=SAMPLED,
    )


def kto(loss: str, *, has_kl: bool) -> Case:
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    return Case(
        settings={"method": "kto", "loss": loss, "beta": 0.4} | weights,
        by_hand=by_hand.kto(0.4, 1.0, 1.5, has_kl=has_kl),
        groups=LABELLED,
    )


of_d, of_mean = by_hand.of_difference, by_hand.of_mean_difference
CASES = {
    "dpo sigmoid": dpo("sigmoid", of_d(by_hand.cdpo(0.4, 0.0))),
    "dpo sigmoid, smoothed": dpo(
        "sigmoid", of_d(by_hand.cdpo(0.4, 0.1), sft_weight=0.5), label_smoothing=0.1, sft_weight=0.5
    ),
    "dpo hinge": dpo("hinge", of_d(lambda d: torch.clamp(1 - 0.4 * d, min=0))),
    "dpo ipo": dpo("ipo", of_mean(lambda d: (d - 1 / 0.8) ** 2)),
    "dpo robust": dpo("robust", of_d(by_hand.robust(0.4, 0.2)), label_smoothing=0.2),
    "dpo sigmoid_norm": dpo("sigmoid_norm", of_mean(by_hand.cdpo(0.4, 0.0))),
    "dpo exo_pair": dpo("exo_pair", of_d(by_hand.exo(0.4, 1e-3))),
    "dpo nca_pair": dpo("nca_pair", by_hand.nca(0.4)),
    "dpo bco_pair": dpo("bco_pair", by_hand.bco(0.4)),
    "dpo sppo_hard": dpo("sppo_hard", by_hand.sppo(0.4)),
    "dpo aot": dpo("aot", by_hand.aot(0.4, 0.1, is_paired=True), label_smoothing=0.1),
    "dpo aot_unpaired": dpo("aot_unpaired", by_hand.aot(0.4, 0.0, is_paired=False)),
    "dpo apo_zero": dpo("apo_zero", by_hand.apo_zero(0.4)),
    "dpo apo_down": dpo("apo_down", by_hand.apo_down(0.4)),
    "dpo discopop": dpo("discopop", of_d(by_hand.discopop(0.4, 0.05))),
    "dpo plackett_luce": Case(
        settings={"method": "dpo", "loss": "plackett_luce", "beta": 0.4},
        by_hand=by_hand.plackett_luce(0.4),
        groups=RANKED,
    ),
    "simpo": Case(settings={"method": "simpo"}, by_hand=by_hand.simpo(2.0, 0.5)),
    "simpo, cross-entropy": Case(
        settings={"method": "simpo", "sft_weight": 0.3, "gamma": 1.0},
        by_hand=by_hand.simpo(2.0, 1.0, sft_weight=0.3),
    ),
    "cpo sigmoid": Case(
        settings={"method": "cpo", "loss": "sigmoid"}, by_hand=by_hand.cpo(by_hand.cdpo(0.1, 0.0))
    ),
    "cpo hinge": Case(
        settings={"method": "cpo", "loss": "hinge"},
        by_hand=by_hand.cpo(lambda d: torch.clamp(1 - 0.1 * d, min=0)),
    ),
    "cpo ipo": Case(
        settings={"method": "cpo", "loss": "ipo"},
        by_hand=by_hand.cpo(lambda d: (d - 5.0) ** 2, is_mean=True),
    ),
    "orpo": Case(settings={"method": "orpo"}, by_hand=by_hand.orpo(0.1)),
    "kto": kto("kto", has_kl=True),
    "kto apo_zero_unpaired": kto("apo_zero_unpaired", has_kl=False),
    "grpo dapo": grpo("dapo", beta=0.1, importance_sampling_mode="ratio", clip_epsilon_high=0.3),
    "grpo dapo, no reference": grpo("dapo"),
    "grpo grpo": grpo("grpo", beta=0.1, importance_sampling_mode="token_truncate"),
    "grpo grpo, masked": grpo("grpo", importance_sampling_mode="token_mask"),
    "grpo dr_grpo": grpo("dr_grpo", importance_sampling_mode="sequence_truncate"),
    "grpo dr_grpo, masked": grpo("dr_grpo", beta=0.1, importance_sampling_mode="sequence_mask"),
    "grpo rloo": grpo("rloo", beta=0.05, importance_sampling_mode="ratio"),
    "grpo rloo, masked": grpo("rloo", beta=0.05, importance_sampling_mode="sequence_mask"),
}


def test_every_loss_that_compares_answers_has_a_case() -> None:
    sections = [ObjectiveSection.model_validate(case.settings) for case in CASES.values()]
    offered = {(method, loss) for method in METHODS for loss in losses_of(method)}
    assert {(section.method, getattr(section, "loss", None)) for section in sections} == offered


# ------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens, those of the prompt without a label, and what is known of each labelled one."""

    ids: list[int]
    num_prompt: int
    sampler: list[float]

    @property
    def answer(self) -> list[int]:
        return self.ids[self.num_prompt :]


def rows_of_step() -> list[Row]:
    rng = torch.Generator().manual_seed(3)
    rows = []
    for number in range(8):
        num_prompt, num = 2 + number % 3, 3 + (5 * number) % 7
        ids = torch.randint(0, 64, (num_prompt + num,), generator=rng).tolist()
        drawn = (-4.2 + 1.6 * (torch.rand(num, generator=rng) - 0.5)).tolist()
        rows.append(Row(ids=ids, num_prompt=num_prompt, sampler=drawn))
    return rows


def mismatched(rows: Sequence[Row]) -> list[Row]:
    return [
        Row(
            ids=row.ids[: row.num_prompt] + rows[number - 1].answer,
            num_prompt=row.num_prompt,
            sampler=[],
        )
        for number, row in enumerate(rows)
    ]


def batches_of(rows: Sequence[Row], sizes: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width."""
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        labels[number, row.num_prompt : len(row.ids)] = torch.tensor(row.answer)
        mask[number, : len(row.ids)] = 1
    parts = zip(*(x.split(list(sizes)) for x in (ids, labels, mask)), strict=True)
    return [dict(zip(("input_ids", "labels", "attention_mask"), p, strict=True)) for p in parts]


# ------------------------------------------------------------------------------------ both computed


def logps(model: Any, row: Row) -> torch.Tensor:
    """Return the log-probability of each token of an answer, by its prompt."""
    logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
    return torch.stack(
        [
            logits[place - 1, row.ids[place]] - logits[place - 1].exp().sum().log()
            for place in range(row.num_prompt, len(row.ids))
        ]
    )


def plain(model: Any, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model).eval()
    rows, (groups, values) = rows_of_step(), case.groups
    answers = []
    for number, row in enumerate([*rows, *mismatched(rows)]):
        is_scored = number >= len(rows)
        with torch.no_grad(), model.disable_adapter():
            reference = logps(model, row)
        with torch.set_grad_enabled(not is_scored):
            policy = logps(model, row)
        answer = Answer(
            policy=policy,
            reference=reference,
            sampler=torch.tensor(row.sampler, dtype=torch.float32).double(),
            group=groups[number % len(rows)],
            value=values[number % len(rows)],
            is_scored=is_scored,
        )
        answers.append(answer)
    if case.settings["method"] != "kto":
        answers = answers[: len(rows)]
    loss = case.by_hand(answers)
    loss.backward()
    return loss.item(), gradients(model)


def streamed(
    model: Any, case: Case, cuts: Iterable[Sequence[int]]
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Yield the step's loss and gradients for each way to cut it."""
    model = copy.deepcopy(model)
    rows, (groups, values) = rows_of_step(), case.groups
    section = ObjectiveSection.model_validate(case.settings)
    scored = mismatched(rows) if section.scores_mismatched else []
    times = 2 if scored else 1
    step_rows = StepRows(
        groups_R=torch.tensor(groups * times),
        values_R=torch.tensor(values * times, dtype=torch.float64),
        num_trained=len(rows),
        sampler_N=torch.tensor([x for row in rows for x in row.sampler])
        if case.settings.get("importance_sampling_mode", "none") != "none"
        else None,
    )
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    try:
        for sizes in cuts:
            result = engine.forward_backward(
                batches_of(rows, sizes),
                objective=section.objective(StepData(rows=step_rows, seq_len=SEQ_LEN)),
                scored=batches_of(scored, sizes[::-1]) if scored else (),
                dropout_seed=0,
            )
            yield result.loss, gradients(model)
            model.zero_grad()
    finally:
        engine.detach()


FAST = ("dpo sigmoid", "dpo aot", "simpo", "cpo sigmoid", "orpo", "kto", "grpo dapo")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "of"),
    mostly_slow(
        [(name, of) for of in CASES for name in ("llama", "qwen3_moe")],
        *((("llama", "qwen3_moe")[number % 2], of) for number, of in enumerate(FAST)),
    ),
)
def test_reorder_each_loss_has_the_gradients_of_a_plain_loop_however_it_is_cut(
    name: str, of: str
) -> None:
    model = tiny(name).double()
    model.config._experts_implementation = "eager"
    loss, truth = plain(model, CASES[of])
    assert any(gradient.abs().max() > 1e-4 for gradient in truth.values())
    for found_loss, found in streamed(model, CASES[of], CUTS):
        assert found_loss == pytest.approx(loss, rel=1e-11)
        assert found.keys() == truth.keys()
        assert rel_error(found, truth) < 1e-11


# ------------------------------------------------------------------------------------------- scores


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "ranks": {"r": 2},
    "targets": {"r": 3, "target_modules": ["v_proj", "down_proj"]},
    "dora": {"use_dora": True},
    "whole": {"modules_to_save": ["embed_tokens", "norm", "input_layernorm"]},
    "outside": {"target_modules": ["q_proj", "lm_head"]},
}


def with_adapters(name: str, configs: dict[str, dict[str, Any]]) -> Any:
    """Return a model with an adapter for each config, all with weights drawn at random."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    for number, (adapter, changes) in enumerate(configs.items()):
        options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "o_proj"], "lora_alpha": 8}
        config = LoraConfig(**options | changes)
        if number:
            model.add_adapter(adapter, config)
        else:
            model = get_peft_model(model, config, adapter_name=adapter)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(adapter in path.split(".") for adapter in configs):
                parameter += 0.1 * torch.randn(parameter.shape)
                parameter.requires_grad_(True)
    return model


def scored(
    model: nn.Module, adapters: Sequence[str | None], *, num: int = 3, **changes: Any
) -> ScoreResult:
    engine = Engine(model, device=torch.device("cpu"), options=replace(OPTIONS, **changes))
    try:
        return engine.score(micro_batches(num), adapters=adapters)
    finally:
        engine.detach()


def plainly(model: Any, adapter: str | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probabilities and greedy matches of each micro-batch by transformers and peft."""
    model = copy.deepcopy(model).eval()
    if adapter is None:
        model = model.unload()
    else:
        model.base_model.set_adapter(adapter)
    found = []
    for batch in micro_batches():
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        logps = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        is_label = labels != -100
        found.append((logps[is_label], (logits.argmax(-1) == labels)[is_label]))
    return found


def assert_plain(model: Any, result: ScoreResult, adapters: Sequence[str | None]) -> None:
    for adapter, found in zip(adapters, result.scores, strict=True):
        for one, (logps_N, is_greedy_N) in zip(found, plainly(model, adapter), strict=True):
            assert one.logps_N.dtype == torch.float32
            assert torch.allclose(one.logps_N, logps_N, rtol=1e-5, atol=1e-5), adapter
            assert torch.equal(one.is_greedy_N, is_greedy_N), adapter


def assert_same(found: ScoreResult, expected: ScoreResult) -> None:
    for ones, others in zip(found.scores, expected.scores, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one.logps_N, other.logps_N)
            assert torch.equal(one.is_greedy_N, other.is_greedy_N)
            assert torch.equal(one.rows_N, other.rows_N)


@pytest.mark.parametrize("is_training", mostly_slow([True, False], True))
def test_reorder_each_adapter_scores_as_plain_peft_with_it_alone(is_training: bool) -> None:
    model = with_adapters("llama", CONFIGS | {"drops": {"lora_dropout": 0.5}})
    plain = copy.deepcopy(model)
    compute_in_base_dtype(model)
    adapters = [None, *CONFIGS, "drops"]
    result = scored(model.train(is_training), adapters)
    assert_plain(plain, result, adapters)
    sums = {float(sum(one.logps_N.sum() for one in found)) for found in result.scores}
    assert len(sums) == len(adapters)  # no two adapters are alike


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gpt_oss"], "gpt_oss"))
def test_reorder_adapters_on_experts_score_as_plain_peft(name: str) -> None:
    configs = {n: {"r": r, "target_parameters": EXPERTS} for n, r in (("one", 2), ("two", 4))}
    model = with_adapters(name, configs | {"attention": {"r": 2}})
    adapters = ["two", None, "one", "attention"]
    plain = copy.deepcopy(model)
    assert_plain(plain, scored(compute_beside(model), adapters), adapters)


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe", "gemma3_text"], "qwen3_moe"))
def test_move_streamed_scores_are_those_of_the_resident_model(name: str) -> None:
    experts = {"target_parameters": EXPERTS} if name == "qwen3_moe" else {}
    model = with_adapters(name, {"one": experts, "two": {"r": 2} | experts})
    compute_in_base_dtype(compute_beside(model))
    adapters = [None, "two", "one"]
    resident = scored(copy.deepcopy(model), adapters, num_slots=NUM_LAYERS)
    assert_same(scored(copy.deepcopy(model), adapters), resident)
    for codec in ("int8", "nf4"):
        expected = scored(copy.deepcopy(model), adapters, codec=codec, num_slots=NUM_LAYERS)
        assert_same(scored(copy.deepcopy(model), adapters, codec=codec), expected)


@pytest.mark.thorough
def test_move_an_adapter_scores_among_others_as_it_does_alone() -> None:
    model = with_adapters("llama", CONFIGS)
    compute_in_base_dtype(model)
    adapters = [None, *CONFIGS]
    together = scored(copy.deepcopy(model), adapters)
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    for number, adapter in enumerate(adapters):
        alone = engine.score(micro_batches(), adapters=[adapter])
        assert_same(replace(together, scores=together.scores[number : number + 1]), alone)
    engine.detach()


@pytest.mark.thorough
def test_the_loads_depend_on_neither_the_adapters_nor_the_micro_batches() -> None:
    model = with_adapters("llama", CONFIGS)
    for num, adapters in ((1, [None]), (1, [None, *CONFIGS]), (3, [None, *CONFIGS])):
        engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
        first, second = (engine.score(micro_batches(num), adapters=adapters) for _ in range(2))
        engine.detach()
        assert first.num_loads == second.num_loads == NUM_LAYERS  # the ring holds the last ones
        assert first.num_passes == num * len(adapters)


def test_scoring_changes_neither_the_model_nor_its_gradients() -> None:
    model = with_adapters("llama", {"one": {"lora_dropout": 0.5}, "two": {}}).train()
    model.base_model.set_adapter("two")
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    before = torch.get_rng_state()
    engine.score(micro_batches(), adapters=["one", None])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert model.active_adapters == ["two"]
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.forward_backward(micro_batches())
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    assert graded
    assert all(".two." in name for name in graded)


def test_a_model_without_adapters_is_scored_as_it_is() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]()
    model.requires_grad_(False)
    result = scored(model, [None])
    with torch.no_grad():
        batch = micro_batches()[0]
        expected = model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
    labels = batch["labels"][:, 1:]
    logps = expected[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    (scores, *_) = result.scores[0]
    assert torch.allclose(scores.logps_N, logps[labels != -100], rtol=1e-5, atol=1e-5)
    assert scores.num_rows == 2
    assert scores.rows_N.tolist() == [0] * 8 + [1] * 5


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([], "adapters is empty"),
        (["one", "one"], "adapters names 'one' twice"),
        ([None, None], "adapters names None twice"),
        (["three"], "LlamaForCausalLM has no adapter 'three'"),
    ],
)
def test_adapters_that_cannot_be_scored_are_refused(adapters: list[Any], message: str) -> None:
    with pytest.raises(OffloadError, match=message):
        scored(with_adapters("llama", {"one": {}}), adapters)


def test_an_adapter_that_is_merged_is_refused() -> None:
    model = with_adapters("llama", {"one": {}, "two": {}})
    model.merge_adapter(["one"])
    with pytest.raises(OffloadError, match="is merged into its weights"):
        scored(model, ["two"])
