"""A run's expert backend: the one it began with, the configured one, or the fastest here.

Backends differ in their last bits, so a run keeps the one that it began with. Nothing is timed
where there is no choice: on a CPU the loop is the fastest (tests/bench/LOG_ARCHIVE.md) and gives
the same bits at every start. A recipe's setting takes precedence over that of `--machine`; either
is used as it is, if it can compute the model's experts here.

The trials are imported with the model's experts, because they import transformers.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.errors import CheckpointError, ConfigError, FinetuneError
from finetune.planning.request import with_backend, with_configured_backend
from finetune.recipe.recipe import Recipe
from finetune.report.format import shown_time
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from offload.plan.facts.facts import ModelFacts, adapted_linears
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import ExpertsImplementation, Implementation, Machine
from offload.plan.time.costs import with_measured_experts

if TYPE_CHECKING:
    import torch


NO_INTERFACE = "they do not go through transformers' experts interface"
OWN_CODE = Implementation(value="eager", source="the model's own code")


def resolve_expert_backend(
    recipe: Recipe,
    facts: ModelFacts,
    machine: Machine,
    device: "torch.device",
    *,
    resumed: RunDir | None,
    is_from_file: bool,
) -> Machine | None:
    """Return the machine with its expert backend, or None if backends have to be timed first.

    Args:
        recipe: The run's settings.
        facts: Its model.
        machine: As it was probed, or read from a file.
        device: Where it computes.
        resumed: The run that is continued; None for a new one.
        is_from_file: Whether the machine was read from a file.

    Raises:
        ConfigError: The backend of the recipe or the file cannot compute this model here.
        CheckpointError: The backend that the run began with cannot, or is not recorded.
    """
    configured = with_configured_backend(recipe, facts, machine)
    if not facts.has_experts:
        return machine
    begun = resumed.experts_implementation() if resumed is not None else None
    if begun is not None:
        way = Implementation(value=begun, source="as the run was begun")
    elif configured is not machine:
        way = configured.experts_implementation
    elif is_from_file:
        way = replace(machine.experts_implementation, source="as --machine says")
    elif device.type == "cpu" or recipe.train.is_full:
        way = with_backend(recipe, facts, machine).experts_implementation
    elif resumed is not None:
        raise CheckpointError(
            f"{resumed.path} does not record its expert kernels",
            limit="a resumed run continues to the bit, so they must be known",
            hint="start a new run with `output.name=...`",
        )
    else:
        return None
    is_wanted = configured is not machine
    if way.value == "eager" and not is_wanted:
        return replace(machine, experts_implementation=way)
    from finetune.model.empty import empty_of
    from offload.engine.experts.autotune import find_experts, reason_against

    experts = find_experts(empty_of(recipe.model))
    reason = NO_INTERFACE if experts is None else reason_against(way.value, experts, device)
    if experts is None and not is_wanted:
        way = OWN_CODE
    elif reason is not None:
        raise _refusal(way.value, reason, is_begun=begun is not None, is_wanted=is_wanted)
    return replace(machine, experts_implementation=way)


def _refusal(
    way: ExpertsImplementation, reason: str, *, is_begun: bool, is_wanted: bool
) -> FinetuneError:
    if is_begun:
        return CheckpointError(
            f"the run was begun with expert kernels {way}, which cannot run here: {reason}",
            limit="a resumed run continues to the bit, so it keeps its expert kernels",
            hint="resume it where it was begun, or start a new run with `output.name=...`",
        )
    if is_wanted:
        return ConfigError(
            f"model.experts_implementation: {way} cannot compute this model's experts: {reason}",
            hint="`model.experts_implementation: auto`",
        )
    return ConfigError(
        f"--machine names the expert kernels {way}, which cannot run here: {reason}",
        limit="a machine file replaces what is measured at the start of a run",
        hint="`model.experts_implementation: eager`, or no `--machine`",
    )


def fastest_expert_backend(
    recipe: Recipe,
    facts: ModelFacts,
    machine: Machine,
    device: "torch.device",
    load: Workload,
    screen: Screen,
) -> Machine:
    """Time all backends on one layer's experts, show them, return the machine with the fastest.

    Raises:
        UnsupportedModelError: None can compute the experts here.
    """
    from finetune.model.empty import empty_of
    from offload.engine.experts.autotune import CANDIDATES, fastest, find_experts, try_all

    experts = find_experts(empty_of(recipe.model))
    if experts is None:  # the model has its own code, without a choice of backend
        return replace(machine, experts_implementation=OWN_CODE)
    screen.note("Timing expert kernels ...")
    layer = next(layer for layer in facts.layers if layer.num_experts)
    adapted = [x for x in adapted_linears(layer, load.adapter) if x.group == "experts"]
    trials = try_all(
        experts,
        candidates=CANDIDATES,
        device=device,
        num_tokens=load.num_tokens,
        experts_per_token=layer.experts_per_token,
        ranks={linear.name: load.adapter.rank_of(linear) for linear in adapted},
    )
    best = fastest(trials)
    assert best.seconds is not None
    screen.detail(f"Experts of one layer, {load.num_tokens:,} tokens forward and backward:")
    for trial in trials:
        shown = f"{trial.reason}" if trial.seconds is None else shown_time(trial.seconds)
        taken = " (taken)" if trial is best else ""
        screen.detail(f"  {trial.implementation}: {shown}{taken}")
    return with_measured_experts(
        machine, facts, load, implementation=best.implementation, seconds=best.seconds
    )
