"""Whether a run packs rows is settled once, and shown."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from finetune.data.order import PackedOrder, Packing, RowCost, StepSizes
from finetune.planning.request import facts_of, request_for
from finetune.recipe.recipe import Recipe, with_settings
from finetune.report.screen import Screen
from finetune.training.packing import settled_packing, shown_layers, shown_packing
from offload.plan.machine.machine import named_machine
from offload.plan.memory.visit import visit_bytes
from offload.plan.plan import plan


def recipe_for(packing: Any = "auto", **train: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "tiny-qwen3", "init": "random"},
            "data": {"path": "rows.jsonl", "packing": packing},
            "train": {"seq_len": 64, "tokens_per_step": 256, "steps": 1, **train},
            "output": {"name": "run"},
        }
    )


def settled(recipe: Recipe) -> tuple[str, str]:
    console = Console(record=True, width=200)
    found = settled_packing(recipe, Screen(console, is_verbose=True).note)
    return found, console.export_text()


def test_auto_packs() -> None:
    assert settled(recipe_for()) == ("on", "")


def test_auto_does_not_pack_compiled_layers_and_says_so() -> None:
    found, shown = settled(recipe_for(compile=True))
    assert found == "off"
    assert "Packing: off, as compiled layers do not keep packed rows apart" in shown


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_what_is_asked_for_is_taken(wanted: str) -> None:
    assert settled(recipe_for(wanted))[0] == wanted


@pytest.mark.parametrize(("switch", "meant"), [(True, "on"), (False, "off")])
def test_on_and_off_are_taken_as_yaml_reads_them(switch: object, meant: str) -> None:
    assert recipe_for(switch).data.packing == meant


def test_packing_compiled_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.packing is on and train\.compile is true"):
        recipe_for("on", compile=True)


SIZES = StepSizes(
    rows_per_step=4,
    typical_steps=(0,),
    typical_width=60,
    label_tokens=30,
    largest_width=64,
    most_label_tokens=64,
    num_micro_batches=5,
    packing=Packing(row_tokens=15, longest_row=50, rows_per_step=21, fill=0.9375, most_tokens=230),
)


def test_how_full_sequences_are_is_shown() -> None:
    assert shown_packing(SIZES) == (
        "Packing: sequences are 93.8% full; a typical step has 21 rows in 5 micro-batches of 60"
        " tokens",
    )


@pytest.mark.parametrize(
    ("num_together", "num_joined", "words"),
    [
        (4, 0, "in all layers, attention row by row"),
        (1, 0, "in 1 of 4 layers, attention row by row"),
        (0, 0, "take one by one"),
        (4, 4, r"in all layers, attention in one call (torch's varlen_attn)"),
        (3, 2, "varlen_attn) in 2 of them, row by row in the others; the others do not"),
    ],
)
def test_how_layers_compute_packed_rows_is_shown(
    num_together: int, num_joined: int, words: str
) -> None:
    assert words in shown_layers(num_together=num_together, num_joined=num_joined, num_layers=4)


def test_a_plan_counts_one_call_of_attention_and_no_mask_where_rows_are_joined() -> None:
    recipe = with_settings(recipe_for(), {"data.packing": "on"})
    facts = facts_of(recipe.model)
    load = request_for(recipe, facts, SIZES, num_ranks=1).typical
    kind: Any = facts.layers[0].attention
    kind = replace(kind, qk_dim=16, v_dim=16)
    assert load.num_attention_calls(kind, is_cuda=True) == 1
    assert load.num_attention_calls(kind, is_cuda=False) == 4
    unlike: list[Any] = [
        replace(kind, scores="sinks"),
        replace(kind, scores="capped"),
        replace(kind, qk_dim=24),
        replace(kind, qk_dim=12, v_dim=12),
        replace(kind, qk_dim=512, v_dim=512),
    ]
    assert {load.num_attention_calls(other, is_cuda=True) for other in unlike} == {4}
    assert replace(load, dtype_bytes=4).num_attention_calls(kind, is_cuda=True) == 4
    assert not replace(load, packed_tokens=None).joins_rows(kind, is_cuda=True)

    card = named_machine("rtx4090", dtype="bfloat16")
    windowed = replace(kind, window=load.seq_len // 2, num_kv_heads=1)
    layer = replace(facts.layers[0], attention=windowed)
    joined = visit_bytes(facts, card, layer, load, is_padded=False)
    masked = visit_bytes(facts, card, layer, replace(load, packed_tokens=None), is_padded=False)
    per_token = (kind.num_heads - 1) * 2 * 16 * load.dtype_bytes  # keys and values of one head
    assert joined.saved / load.num_tokens < masked.saved / load.seq_len - 0.9 * per_token


def test_a_plan_counts_the_tokens_of_packed_rows_and_attention_within_them() -> None:
    recipe = with_settings(recipe_for(), {"data.packing": "on"})
    facts = facts_of(recipe.model)
    request = request_for(recipe, facts, SIZES, num_ranks=1)
    machine = named_machine("rtx4090", dtype="bfloat16")
    assert request.num_micro_batches == 5
    assert plan(facts, machine, request).tokens_per_step == 300
    assert request.largest.num_tokens == 64
    assert request.largest.seq_len >= 50  # the longest row
    kept = {term.name: term.num_bytes for term in plan(facts, machine, request).device_memory}
    assert kept["kept layer inputs"] == 230 * facts.num_layers * facts.hidden_size * 2
    assert request.typical.num_rows == 4
    layer = facts.layers[0]
    alone = request.typical.output_bytes(layer, is_cuda=True)
    kind: Any = layer.attention
    assert alone == 4 * kind.num_heads * (15 * kind.v_dim * 2 + 4 * 32)


def test_the_cost_of_rows_is_that_of_the_models_products() -> None:
    facts = facts_of(recipe_for().model)
    cost = RowCost.of(facts)
    products = sum(2.0 * x.active * x.num_weights for y in facts.layers for x in y.linears)
    assert cost.flops_per_token == products
    assert cost(20) > 2 * cost(10)


def test_epochs_of_packed_rows_are_counted_in_tokens() -> None:
    class Rows:
        lengths = (10, 20, 30, 40)

        def __len__(self) -> int:
            return 4

    recipe = recipe_for("on", steps=None, epochs=6)
    cost = RowCost(flops_per_token=1.0)
    rows: Any = Rows()
    order = PackedOrder.of(recipe.train, rows, cost=cost)
    assert order.num_steps == 3  # 600 tokens in steps of 256
    visits = np.bincount([row for step in range(3) for row in order.rows(step)])
    assert visits.tolist() == [6, 6, 6, 6]
