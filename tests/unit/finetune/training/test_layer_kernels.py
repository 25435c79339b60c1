"""A run's layer kernels are settled once, shown, and written into its recipe."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune.errors import ConfigError
from finetune.planning.request import facts_of, full_request, with_configured_backend
from finetune.recipe.recipe import Recipe, with_settings
from finetune.report.screen import Screen
from finetune.training import layer_kernels
from finetune.training.layer_kernels import LayerKernels, settled_layer_kernels, shown_fused
from offload.engine.pointwise.trial import Trial
from offload.plan.facts.workload import FusedPart
from offload.plan.machine.machine import named_machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RIGHT = Trial(name="Norm of A", part="norms", plain_s=2e-3, fused_s=1e-3)
WRONG = Trial(name="Rotary of B", part="rotary", reason="it is slower", plain_s=1e-3, fused_s=2e-3)
OTHERS: tuple[FusedPart, ...] = ("norms", "gates", "loss")


def recipe_for(kernels: str = "auto", **sections: Any) -> Recipe:
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
    kernels, shown = settled(monkeypatch, recipe_for(), (RIGHT,))
    assert kernels == "fused"
    assert "Norm of A: 1.00 ms, by the model's code 2.00 ms" in shown


def test_a_part_that_is_slower_is_plain_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, shown = settled(monkeypatch, recipe_for(), (RIGHT, WRONG))
    assert kernels == OTHERS
    assert "Rotary: the model's own code (Rotary of B: it is slower)" in shown
    recipe = with_settings(recipe_for(), {"model.layer_kernels": kernels})
    typical = full_request(recipe, facts_of(recipe.model), num_ranks=1).typical
    assert typical.layer_code == "fused"
    assert typical.plain_parts == frozenset(("rotary",))
    assert settled(monkeypatch, recipe, None)[0] == kernels  # a resumed run keeps it
    every = (WRONG, *(replace(WRONG, part=part) for part in OTHERS))
    assert settled(monkeypatch, recipe_for(), every)[0] == "plain"


def test_without_triton_auto_is_plain_and_fused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kernels, "_has_triton", lambda: False)
    kernels, shown = settled(monkeypatch, recipe_for(), None)
    assert kernels == "plain"
    assert "no Triton" in shown
    with pytest.raises(ConfigError, match=r"model\.layer_kernels: fused, but there is no Triton"):
        settled(monkeypatch, recipe_for("fused"), None)


def test_what_is_asked_for_compiled_or_trained_whole_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settled(monkeypatch, recipe_for("plain"), None)[0] == "plain"
    assert settled(monkeypatch, recipe_for("fused"), None)[0] == "fused"
    train = {"seq_len": 32, "grad_accum_steps": 2, "steps": 1}
    for other in ({"compile": True}, {"what": "all"}):
        assert settled(monkeypatch, recipe_for(train=train | other), None)[0] == "plain"


def test_a_cpu_computes_by_the_models_code() -> None:
    screen = Screen(Console(quiet=True), is_verbose=False)
    assert settled_layer_kernels(recipe_for(), CPU, screen) == "plain"
    with pytest.raises(ConfigError, match=r"fused, but cpu has no CUDA"):
        settled_layer_kernels(recipe_for("fused"), CPU, screen)
    host = replace(named_machine("rtx3090"), name="a processor", device="cpu")
    recipe = recipe_for("fused")
    with pytest.raises(ConfigError, match="fused, but a processor is a CPU"):
        with_configured_backend(recipe.model, facts_of(recipe.model), host)


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({"offload": {"device": "cpu"}}, "offload.device is cpu"),
        (
            {"train": {"seq_len": 32, "grad_accum_steps": 2, "steps": 1, "compile": True}},
            "train.compile is true",
        ),
    ],
)
def test_fused_with_a_cpu_or_with_compiled_layers_is_refused_by_name(
    sections: dict[str, Any], other: str
) -> None:
    with pytest.raises(ValueError, match=f"model.layer_kernels is fused and {other}"):
        recipe_for("fused", **sections)


def test_the_plan_takes_the_setting_and_compiled_layers_as_such() -> None:
    train = {"seq_len": 32, "grad_accum_steps": 2, "steps": 1, "compile": True}
    facts = facts_of(recipe_for().model)
    codes = {
        code: full_request(recipe, facts, num_ranks=1).typical.layer_code
        for code, recipe in {
            "auto": recipe_for(),
            "plain": recipe_for("plain"),
            "fused": recipe_for("fused"),
            "compiled": recipe_for(train=train),
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
