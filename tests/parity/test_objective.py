"""Steps whose loss is an objective's: a plain loop's gradients, however rows are cut and streamed.

Grades: MOVE is to the bit, REORDER within rounding of a plain loop in float64.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.bound import EngineOptions
from offload.plan.schedule.op import Kind
from tests.parity.objectives import (
    Batches,
    ByRow,
    Formula,
    adapted,
    against_scored,
    attached,
    in_order,
    pairs,
    plain_step,
    sigmoid,
)
from tests.parity.steps import NUM_LAYERS, OPTIONS, assert_equal, gradients, rel_error, tiny
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
