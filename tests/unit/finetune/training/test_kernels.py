"""Which kernels a run takes, and the memory that a traced visit takes."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from finetune.errors import CheckpointError, ConfigError
from finetune.model.facts import facts_of as facts_of_built
from finetune.planning.request import facts_of, full_request
from finetune.recipe.load import load_shape
from finetune.recipe.recipe import Recipe, with_settings
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from finetune.training import layer_kernels
from finetune.training.expert_backend import fastest_expert_backend, resolve_expert_backend
from finetune.training.layer_kernels import LayerKernels, settled_layer_kernels, shown_fused
from finetune.training.ranks import Ranks
from finetune.training.trace_memory import trace_memory
from offload.engine.model.layers import LayeredModel
from offload.engine.pointwise.trial import Trial
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts, linear_names
from offload.plan.facts.workload import FusedPart
from offload.plan.machine.machine import Implementation, Machine, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.request import PlanRequest
from tests.builders import lora, request, workload
from tests.parity.tiny_models import tiny_model, with_adapters

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
        r"model\.experts_implementation is grouped_mm and the model is dense; it has no experts"
        r"\n\nhint: `model\.experts_implementation: auto`"
    )
    with pytest.raises(ConfigError, match=message):
        settle(dense, HOST, CPU)


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
            recipe, facts, CARD, CPU, load, Screen(console, is_verbose=True)
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


# ------------------------------------------------------------------------------------ layer kernels


RIGHT = Trial(name="Norm of A", part="norms", plain_s=2e-3, fused_s=1e-3)
WRONG = Trial(name="Rotary of B", part="rotary", reason="it is slower", plain_s=1e-3, fused_s=2e-3)
OTHERS: tuple[FusedPart, ...] = ("norms", "gates", "loss")


def recipe_for_layer(kernels: str = "auto", **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"config": "tiny-qwen3", "init": "random", "layer_kernels": kernels},
        "data": {"path": "rows.jsonl"},
        "train": {"seq_len": 32, "grad_accum_steps": 2, "steps": 1},
        "output": {"name": "run"},
    }
    return Recipe.model_validate(values | sections)


def settled(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, trials: tuple[Trial, ...] | None
) -> tuple[LayerKernels, str]:
    """Return what a run on a card uses, and what is shown; without trials nothing is tried."""

    def tried(*_: object) -> tuple[Trial, ...]:
        assert trials is not None
        return trials

    monkeypatch.setattr("offload.engine.pointwise.trial.try_fused", tried)
    console = Console(record=True, width=200, quiet=False)
    found = settled_layer_kernels(recipe, CUDA, Screen(console, is_verbose=True))
    return found, console.export_text()


def test_auto_is_fused_on_a_card_where_every_trial_is_right_and_no_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, shown = settled(monkeypatch, recipe_for_layer(), (RIGHT,))
    assert kernels == "fused"
    assert "Norm of A: 1.00 ms, by the model's code 2.00 ms" in shown


def test_a_part_that_is_slower_is_plain_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, shown = settled(monkeypatch, recipe_for_layer(), (RIGHT, WRONG))
    assert kernels == OTHERS
    assert "Rotary: the model's own code (Rotary of B: it is slower)" in shown
    recipe = with_settings(recipe_for_layer(), {"model.layer_kernels": kernels})
    typical = full_request(recipe, facts_of(recipe.model), num_ranks=1).typical
    assert typical.layer_code == "fused"
    assert typical.plain_parts == frozenset(("rotary",))
    assert settled(monkeypatch, recipe, None)[0] == kernels  # a resumed run keeps it
    every = (WRONG, *(replace(WRONG, part=part) for part in OTHERS))
    assert settled(monkeypatch, recipe_for_layer(), every)[0] == "plain"


def test_without_triton_auto_is_plain_and_fused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kernels, "_has_triton", lambda: False)
    kernels, shown = settled(monkeypatch, recipe_for_layer(), None)
    assert kernels == "plain"
    assert "no Triton" in shown
    with pytest.raises(ConfigError, match=r"model\.layer_kernels: fused, but there is no Triton"):
        settled(monkeypatch, recipe_for_layer("fused"), None)


def test_what_is_asked_for_compiled_or_trained_whole_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settled(monkeypatch, recipe_for_layer("plain"), None)[0] == "plain"
    assert settled(monkeypatch, recipe_for_layer("fused"), None)[0] == "fused"
    train = {"seq_len": 32, "grad_accum_steps": 2, "steps": 1}
    for other in ({"compile": True}, {"what": "all"}):
        assert settled(monkeypatch, recipe_for_layer(train=train | other), None)[0] == "plain"


def test_a_cpu_computes_by_the_models_code() -> None:
    screen = Screen(Console(quiet=True), is_verbose=False)
    assert settled_layer_kernels(recipe_for_layer(), CPU, screen) == "plain"
    with pytest.raises(ConfigError, match=r"fused, but cpu has no CUDA"):
        settled_layer_kernels(recipe_for_layer("fused"), CPU, screen)


def test_the_plan_takes_the_setting_and_compiled_layers_as_such() -> None:
    train = {"seq_len": 32, "grad_accum_steps": 2, "steps": 1, "compile": True}
    facts = facts_of(recipe_for_layer().model)
    codes = {
        code: full_request(recipe, facts, num_ranks=1).typical.layer_code
        for code, recipe in {
            "auto": recipe_for_layer(),
            "plain": recipe_for_layer("plain"),
            "fused": recipe_for_layer("fused"),
            "compiled": recipe_for_layer(train=train),
        }.items()
    }
    assert all(code == found for code, found in codes.items())


def test_what_is_fused_and_what_is_not_is_said() -> None:
    layer = Counter({"Norm": 4, "GatedMlp": 1})
    (line,) = shown_fused([layer, layer], fuses_loss=True)
    assert (
        line
        == "Fused: the loss, and in 2 layers 8 norms, 2 gates; rotations by the model's own code"
    )
    (line,) = shown_fused([layer], fuses_loss=False)
    assert line == "Fused: in 1 layers 4 norms, 1 gates; rotations and loss by the model's own code"
    assert shown_fused([], fuses_loss=True) == ()


# ------------------------------------------------------------------------------------- trace memory


TRACE_MEMORY_CPU = replace(named_machine("rtx3060"), device="cpu", context_bytes=0)


def planned(model_type: str, *, num_slots: int | None, budget_bytes: int | None = None) -> Plan:
    facts = facts_of_built(tiny_model(model_type))
    micro_batch = workload(
        micro_batch_size=2,
        seq_len=64,
        label_tokens=32,
        adapter=lora(rank=2, targets=linear_names(facts)),
        dtype_bytes=4,
    )
    asked = request(
        micro_batch,
        num_micro_batches=3,
        num_slots=num_slots,
        vram_budget_bytes=budget_bytes,
        is_slab_shared=True,
    )
    return plan(facts, TRACE_MEMORY_CPU, asked)


def traced(first: Plan, *, ways: Sequence[PlanRequest] = ()) -> tuple[Plan, str]:
    base = tiny_model(first.facts.model_type)
    model: Any = with_adapters(base, LayeredModel(base).layers).train()
    all_ways = ways or [first.request, replace(first.request, is_stashed=True)]
    cpu = torch.device("cpu")
    return trace_memory(model, first, open_requests=all_ways, device=cpu, ranks=Ranks())


@pytest.mark.thorough
def test_a_plan_of_auto_slots_takes_as_many_as_fit_by_the_trace() -> None:
    first = planned("qwen3", num_slots=None)
    whole, note = traced(first)
    assert (first.memory_grade, whole.memory_grade) == ("formula", "traced")
    assert whole.num_slots == first.num_slots == 4
    assert "planned again" not in note
    found = {term.name: term.num_bytes for term in whole.device_memory}
    assert found["one visit"] > 0
    assert whole.peak_bytes == sum(found.values())
    budget_bytes = whole.peak_bytes - found["slots"] // 8
    assert budget_bytes > first.peak_bytes - found["slots"] // 4 * 2  # the formula has room for 3
    tight = planned("qwen3", num_slots=None, budget_bytes=budget_bytes)
    again, note = traced(tight)
    assert again.num_slots == 3
    assert again.peak_bytes <= budget_bytes
    assert (again.num_slots != tight.num_slots) == ("planned again: 3 slots" in note)


@pytest.mark.thorough
def test_a_number_of_slots_that_does_not_fit_by_the_trace_is_refused_with_one_that_does() -> None:
    first = planned("qwen3", num_slots=4)
    whole, _ = traced(first)
    roomy = replace(first, request=replace(first.request, vram_budget_bytes=whole.peak_bytes))
    assert traced(roomy)[0].num_slots == 4
    short = replace(roomy, request=replace(roomy.request, vram_budget_bytes=whole.peak_bytes - 1))
    with pytest.raises(
        DoesNotFitError,
        match=r"with 4 slots of 4 layers, its visits traced, the plan needs .* for computing",
    ) as error:
        traced(short, ways=[short.request])
    assert error.value.hint == "`offload.num_slots: 3`"


def test_a_model_that_no_fake_tensor_passes_keeps_its_formulas_and_says_why() -> None:
    first = planned("jetmoe", num_slots=2)
    kept, note = traced(first)
    assert kept is first
    assert note.startswith("Memory (formula): ")
    assert "could not be traced: RuntimeError: split_with_sizes" in note
