"""How a run's experts are multiplied: as it was begun, as it is told, or in the fastest way here.

Ways differ in their last bits, so a run keeps the one that it was begun with. Nothing is tried
where there is nothing to choose: on a CPU the loop is the fastest (measured, tests/bench/LOG.md)
and gives the same bits at every start; a recipe's setting goes before what `--machine` holds, and
either is taken as it is, if it can compute the model's experts here.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.errors import CheckpointError, ConfigError, FinetuneError
from finetune.figures import shown_time, table_of
from finetune.model import experts_of
from finetune.planning import as_told, has_experts
from finetune.recipe import Recipe
from finetune.run_dir import RunDir
from finetune.screen import Screen
from offload.engine.experts.choice import CANDIDATES, fastest, reason_against, try_all
from offload.plan.costs import Workload
from offload.plan.expert_rate import with_measured_experts
from offload.plan.facts import ModelFacts, adapted_linears
from offload.plan.machine import ExpertsImplementation, Implementation, Machine

if TYPE_CHECKING:
    import torch


NO_INTERFACE = "they do not go through transformers' experts interface"
OWN_CODE = Implementation(value="eager", source="the model's own code")


def settled(
    recipe: Recipe,
    facts: ModelFacts,
    machine: Machine,
    device: "torch.device",
    *,
    resumed: RunDir | None,
    is_from_file: bool,
) -> Machine | None:
    """Return the machine as it multiplies experts, or None if the ways have to be tried first.

    Args:
        recipe: What the run is told.
        facts: Its model.
        machine: As it was probed, or read from a file.
        device: Where it computes.
        resumed: The run that goes on; None for a new one.
        is_from_file: Whether the machine was read from a file.

    Raises:
        ConfigError: What the recipe or the file says cannot compute this model here.
        CheckpointError: What the run was begun with cannot.
    """
    told = as_told(recipe.model, facts, machine)
    if not has_experts(facts):
        return machine
    begun = resumed.experts_implementation() if resumed is not None else None
    if begun is not None:
        way = Implementation(value=begun, source="as the run was begun")
    elif told is not machine:
        way = told.experts_implementation
    elif is_from_file:
        way = replace(machine.experts_implementation, source="as --machine says")
    elif device.type == "cpu":
        way = machine.experts_implementation
    elif resumed is not None:
        raise CheckpointError(
            f"{resumed.path} does not say how its experts were multiplied",
            limit="a resumed run continues to the bit, so it must be known",
            hint="start a new run with `output.name=...`",
        )
    else:
        return None
    is_wanted = told is not machine
    if way.value == "eager" and not is_wanted:
        return replace(machine, experts_implementation=way)
    experts = experts_of(recipe.model)
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
            f"the run multiplies experts by {way}, which cannot be here: {reason}",
            limit="a resumed run continues to the bit, so it computes as it was begun",
            hint="resume it where it was begun, or start a new run with `output.name=...`",
        )
    if is_wanted:
        return ConfigError(
            f"model.experts_implementation: {way} cannot multiply this model's experts: {reason}",
            limit="a setting must be able to take effect",
            hint="`model.experts_implementation: auto`",
        )
    return ConfigError(
        f"--machine says that experts are multiplied by {way}, which cannot be: {reason}",
        limit="a machine file stands for all that is measured at the start of a run",
        hint="`model.experts_implementation: eager`, or no `--machine`",
    )


def measured(
    recipe: Recipe,
    facts: ModelFacts,
    machine: Machine,
    device: "torch.device",
    load: Workload,
    screen: Screen,
) -> Machine:
    """Try all ways on one layer's experts, show them, and return the machine with the fastest.

    Raises:
        UnsupportedModelError: None can compute them here.
    """
    experts = experts_of(recipe.model)
    if experts is None:  # the model has code of its own, in which there is nothing to choose
        return replace(machine, experts_implementation=OWN_CODE)
    screen.note("Trying the ways to multiply experts ...")
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
    table = table_of(f"Experts of one layer, {load.num_tokens:,} tokens forward and backward")
    for trial in trials:
        shown = f"{trial.reason}" if trial.seconds is None else shown_time(trial.seconds)
        table.add_row(trial.implementation, shown + (" (taken)" if trial is best else ""))
    screen.show(table)
    return with_measured_experts(
        machine, facts, load, implementation=best.implementation, seconds=best.seconds
    )
