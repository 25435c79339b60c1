import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from finetune.errors import CheckpointError, ConfigError
from finetune.planning.request import facts_of, full_request, with_configured_backend
from finetune.recipe.load import load_shape
from finetune.recipe.recipe import Recipe
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from finetune.training.expert_backend import fastest_expert_backend, resolve_expert_backend
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import Implementation, Machine, named_machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CARD = named_machine("rtx3090")
HOST = replace(
    CARD,
    name="a processor",
    device="cpu",
    experts_implementation=Implementation(value="eager", source="a loop is the fastest on a CPU"),
)


def recipe_for(model: str = "tiny-qwen3-moe", way: str = "auto", **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"config": model, "init": "random", "experts_implementation": way},
        "adapter": {"experts": True, "rank_pattern": {"experts.down_proj": 4}},
        "data": {"path": "rows.jsonl"},
        "train": {"seq_len": 32, "grad_accum_steps": 2, "steps": 1},
        "output": {"name": "run"},
    }
    return Recipe.model_validate(values | sections)


@pytest.fixture
def odd_model(tmp_path: Path) -> str:
    """Experts of a width that grouped products cannot take."""
    file = tmp_path / "odd.yaml"
    file.write_text(yaml.safe_dump(load_shape("tiny-qwen3-moe") | {"moe_intermediate_size": 6}))
    return str(file)


def run_of(folder: Path, way: str | None) -> RunDir:
    run = RunDir(folder)
    run.start(recipe_for(), experts_implementation=way)
    return run


def settle(
    recipe: Recipe,
    machine: Machine,
    device: torch.device,
    *,
    resumed: RunDir | None = None,
    is_from_file: bool = False,
) -> Implementation | None:
    found = resolve_expert_backend(
        recipe,
        facts_of(recipe.model),
        machine,
        device,
        resumed=resumed,
        is_from_file=is_from_file,
    )
    if found is None:
        return None
    assert replace(found, experts_implementation=machine.experts_implementation) == machine
    return found.experts_implementation


def by(value: Any, source: str) -> Implementation:
    return Implementation(value=value, source=source)


# ------------------------------------------------------------------------------------------ settled


def test_a_new_run_on_a_card_has_to_try(tmp_path: Path) -> None:
    assert settle(recipe_for(), CARD, CUDA) is None


def test_a_new_run_on_a_cpu_loops_and_tries_nothing() -> None:
    assert settle(recipe_for(), HOST, CPU) == HOST.experts_implementation


def test_a_machine_file_stands_for_the_trial_too() -> None:
    card = replace(CARD, experts_implementation=by("grouped_mm", "assumed"))
    found = settle(recipe_for(), card, CUDA, is_from_file=True)
    assert found == by("grouped_mm", "as --machine says")


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
@pytest.mark.parametrize("is_from_file", [False, True])
def test_the_recipe_goes_before_the_machine(way: str, *, is_from_file: bool) -> None:
    for machine, device in ((CARD, CUDA), (HOST, CPU)):
        found = settle(recipe_for(way=way), machine, device, is_from_file=is_from_file)
        assert found == by(way, "as the recipe says")


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_a_resumed_run_goes_on_as_it_was_begun(way: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", way)
    for machine, device in ((CARD, CUDA), (HOST, CPU)):
        for is_from_file in (False, True):
            found = settle(recipe_for(), machine, device, resumed=run, is_from_file=is_from_file)
            assert found == by(way, "as the run was begun")


def test_a_resumed_run_that_would_have_to_guess_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", None)
    with pytest.raises(CheckpointError, match=r"run does not record its expert kernels"):
        settle(recipe_for(), CARD, CUDA, resumed=run)
    assert settle(recipe_for(), HOST, CPU, resumed=run) == HOST.experts_implementation


def test_a_model_without_experts_has_nothing_to_settle(tmp_path: Path) -> None:
    dense = recipe_for("tiny-qwen3", adapter={})
    run = run_of(tmp_path / "run", None)
    assert settle(dense, CARD, CUDA) == CARD.experts_implementation
    assert settle(dense, CARD, CUDA, resumed=run) == CARD.experts_implementation


# ------------------------------------------------------------------------------------------ refused


def test_a_setting_of_a_model_without_experts_is_refused() -> None:
    dense = recipe_for("tiny-qwen3", "grouped_mm", adapter={})
    message = (
        r"model\.experts_implementation: grouped_mm, but a qwen3 model has no experts"
        r"\n\nhint: `model\.experts_implementation: auto`"
    )
    with pytest.raises(ConfigError, match=message):
        settle(dense, HOST, CPU)
    with pytest.raises(ConfigError, match=message):
        with_configured_backend(dense.model, facts_of(dense.model), CARD)


def test_triton_on_a_cpu_is_refused_in_a_plan_too() -> None:
    recipe = recipe_for(way="triton")
    with pytest.raises(ConfigError, match="but a processor is a CPU; Triton's kernels run on CUDA"):
        with_configured_backend(recipe.model, facts_of(recipe.model), HOST)


def test_a_setting_that_cannot_compute_the_model_is_refused_with_the_reason(
    odd_model: str,
) -> None:
    message = (
        r"model\.experts_implementation: grouped_mm cannot compute this model's experts: rows of"
        r" down_proj have 12 bytes, not a multiple of 16\n\nhint: `model\.experts_impl.*: auto`"
    )
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        settle(recipe_for(odd_model, "grouped_mm"), CARD, CUDA)


def test_a_machine_file_that_cannot_compute_the_model_is_refused(odd_model: str) -> None:
    card = replace(CARD, experts_implementation=by("grouped_mm", "assumed"))
    message = (
        r"--machine names the expert kernels grouped_mm, which cannot run here: rows of"
        r" down_proj.*no `--machine`"
    )
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        settle(recipe_for(odd_model), card, CUDA, is_from_file=True)


def test_a_run_that_cannot_go_on_here_is_refused(odd_model: str, tmp_path: Path) -> None:
    message = (
        r"the run was begun with expert kernels (grouped_mm|triton), which cannot run here: \w.*"
        r"hint: resume it where it was begun, or start a new run with `output\.name=\.\.\.`"
    )
    for way, machine, device in (("grouped_mm", CARD, CUDA), ("triton", HOST, CPU)):
        run = run_of(tmp_path / way, way)
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            settle(recipe_for(odd_model), machine, device, resumed=run)


@pytest.mark.parametrize("text", ["{", '{"experts_implementation": "loop"}', "[]"])
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "eager")
    run.experts_file.write_text(text)
    with pytest.raises(CheckpointError, match=r"experts\.json holds '.*something changed it since"):
        settle(recipe_for(), HOST, CPU, resumed=run)


def test_a_run_written_over_another_forgets_how_that_one_multiplied(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "grouped_mm")
    assert json.loads(run.experts_file.read_text()) == {"experts_implementation": "grouped_mm"}
    run.start(recipe_for(), experts_implementation=None)
    assert run.experts_implementation() is None


# ----------------------------------------------------------------------------------------- measured


def moe_facts() -> ModelFacts:
    return facts_of(recipe_for().model)


def test_the_fastest_way_and_its_rate_are_the_machine_s_and_all_are_shown() -> None:
    recipe, facts, console = recipe_for(), moe_facts(), Console(width=100)
    load = full_request(recipe, facts, num_ranks=1).typical
    with console.capture() as capture:
        machine = fastest_expert_backend(
            recipe, facts, CARD, CPU, load, Screen(console, is_verbose=False)
        )
    lines = [line.strip() for line in capture.get().splitlines() if line.strip()]
    assert lines[:2] == [
        "Timing expert kernels ...",
        "Experts of one layer, 32 tokens forward and backward:",
    ]
    shown = {line.partition(":")[0]: line.removesuffix(" (taken)") for line in lines[2:]}
    times_ms = {way: float(line.split()[1]) for way, line in shown.items() if line.endswith(" ms")}
    assert list(times_ms) == ["eager", "grouped_mm"]
    assert shown["triton"].split(maxsplit=1)[1]  # why not
    best = min(times_ms, key=lambda way: times_ms[way])
    assert [line.partition(":")[0] for line in lines if line.endswith(" ms (taken)")] == [best]
    assert machine.experts_implementation == by(best, "measured")
    assert machine.expert_gemm_flops_per_s.source == "measured"
    assert machine.expert_gemm_flops_per_s.value < CARD.expert_gemm_flops_per_s.value


def test_where_the_model_s_own_code_computes_there_is_nothing_to_choose() -> None:
    facts, own = moe_facts(), by("eager", "the model's own code")
    outside = recipe_for("tiny-qwen3")  # stands for a mixture outside transformers' interface
    load, console = full_request(recipe_for(), facts, num_ranks=1).typical, Console()
    with console.capture() as capture:
        machine = fastest_expert_backend(
            outside, facts, CARD, CPU, load, Screen(console, is_verbose=False)
        )
    assert (machine, capture.get()) == (replace(CARD, experts_implementation=own), "")
    found = resolve_expert_backend(outside, facts, CARD, CUDA, resumed=None, is_from_file=True)
    assert found == replace(CARD, experts_implementation=own)
    for way in ("eager", "triton"):
        with pytest.raises(ConfigError, match=rf"{way} cannot .* transformers' experts interface"):
            resolve_expert_backend(
                recipe_for("tiny-qwen3", way), facts, CARD, CUDA, resumed=None, is_from_file=False
            )
