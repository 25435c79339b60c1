from dataclasses import replace

import pytest
import torch
from rich.console import Console

from finetune.errors import ConfigError
from finetune.planning.request import facts_of, full_request
from finetune.planning.subject import model_subject
from finetune.report.format import shown_gib, shown_time
from finetune.report.plan import kept_line, machine_table, plan_json
from finetune.training.attach import too_large
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import plan


def test_a_machine_is_shown_with_how_it_multiplies_experts_and_why() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(machine_table(named_machine("rtx3060")))
    (line,) = [x for x in capture.get().splitlines() if "experts_implementation" in x]
    assert line.split() == [
        *("experts_implementation", "triton"),
        *("assumed", "until", "a", "run", "measures", "it"),
    ]


def test_layers_that_keep_their_graph_are_shown_with_what_they_save() -> None:
    settings = ["offload.kept_graphs=2", "offload.sent_graphs=none", "train.seq_len=64"]
    recipe = model_subject("tiny-qwen3", settings).recipe
    facts = facts_of(recipe.model)
    made = plan(facts, named_machine("rtx3060"), full_request(recipe, facts, num_ranks=1))
    line = kept_line(made)
    layers = made.costs.layers
    saved_s = made.request.num_micro_batches * sum(layer.recompute_s for layer in layers[-2:])
    assert f"2 of {len(layers)} layers" in line
    assert f"{shown_time(saved_s)} of recompute saved" in line
    assert plan_json(made)["schedule"]["kept_graphs"] == 2


def test_graphs_that_are_sent_are_shown_with_the_ram_that_they_take() -> None:
    recipe = model_subject("llama-3.1-8b", ["offload.codec=nf4", "train.seq_len=2048"]).recipe
    facts = facts_of(recipe.model)
    machine = named_machine("rtx4090", ram_bytes=64 * GIB)
    made = plan(facts, machine, full_request(recipe, facts, num_ranks=1))
    num_sent = made.residency.num_sent_graphs
    assert num_sent > 0
    num_bytes = made.request.num_micro_batches * num_sent * made.costs.layers[0].graph_bytes
    assert f", {num_sent} send it to RAM and back ({shown_gib(num_bytes)}): " in kept_line(made)
    assert plan_json(made)["schedule"]["sent_graphs"] == num_sent


def test_more_graphs_than_layers_are_refused_with_the_setting_for_all() -> None:
    recipe = model_subject("tiny-qwen3", ["offload.kept_graphs=99"]).recipe
    with pytest.raises(
        ConfigError, match=r"kept_graphs: 99 .*\n\nhint: `offload.kept_graphs: all`"
    ):
        full_request(recipe, facts_of(recipe.model), num_ranks=1)


def test_a_step_too_large_with_kept_graphs_names_them_first() -> None:
    settings = ["offload.kept_graphs=2", "offload.sent_graphs=none", "train.seq_len=64"]
    recipe = model_subject("tiny-qwen3", settings).recipe
    facts = facts_of(recipe.model)
    made = plan(facts, named_machine("rtx3060"), full_request(recipe, facts, num_ranks=1))
    error = too_large(made, torch.OutOfMemoryError("CUDA out of memory"))
    assert "slots and 2 kept graphs: CUDA out of memory" in str(error)
    assert "hint: `offload.kept_graphs: 0`" in str(error)
    without = replace(made, residency=made.residency._replace(num_kept_graphs=0))
    assert "kept" not in str(too_large(without, torch.OutOfMemoryError("CUDA out of memory")))
