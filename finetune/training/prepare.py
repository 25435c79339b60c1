"""What is known before the model is loaded: the machine, the rows, and the plan of a step."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.compared.groups import require_classes, require_comparable, require_known_tokens
from finetune.data.compared.step_layout import Comparison
from finetune.data.dataset import Rows, load_rows
from finetune.data.packing import PackedOrder, RowCost
from finetune.data.steps import BatchOrder, Steps
from finetune.env import cache_dir, stores_dir
from finetune.errors import ConfigError
from finetune.model.tokenizer import load_tokenizer
from finetune.planning.candidates import choose, requests_for, with_each_size
from finetune.planning.request import find_machine, trained_spec
from finetune.recipe.recipe import Recipe, with_micro_batch_size, with_offload
from finetune.recipe.row_formats import formats_of
from finetune.training import preflight
from finetune.training.expert_backend import fastest_expert_backend, resolve_expert_backend
from finetune.training.packing import shown_packing
from finetune.training.ranks import own_micro_batches
from finetune.training.run import Run
from finetune.training.samples import pad_id
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.trainable import layer_parameters
from offload.plan.machine.machine import Machine, Network
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest
from offload.plan.search import Choice
from offload.probe.host import RUN_FILE_BYTES, disk_rate
from offload.probe.machine import PROBE_S, probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_DISK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The data of a run.

    Attributes:
        tokenizer: The model's.
        rows: What is trained on and held out.
    """

    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """How a run's steps are run, with the matching settings.

    Attributes:
        recipe: With the sizes of micro-batch and head chunk that were chosen, where left open.
        steps: As these sizes cut them.
        choice: The plan, the same for all ranks, and the alternatives that were considered.
        open_requests: What may still be chosen once layers are loaded and steps cut: the slots, and
            where layer inputs wait.
    """

    recipe: Recipe
    steps: Steps
    choice: Choice
    open_requests: tuple[PlanRequest, ...]


def measured_everywhere(
    run: Run, facts: ModelFacts, machine_file: Path | None
) -> tuple[Machine, bool]:
    """Return the machine that all ranks plan for, and whether its expert backend is settled.

    The first rank of each machine measures it, the others wait. Rates are the main rank's; of each
    memory there is as much as the machine has that has least.

    Raises:
        MachineError: One cannot be measured, or the file cannot be read.
        ConfigError: The file's rates are of another device, an expert backend cannot be used, or
            the machines compute on other kinds of devices.
    """
    ranks = run.ranks
    every = ranks.exchange(measure(run, facts, machine_file) if ranks.is_first_here else None)
    found = [one for one in every if one is not None]
    (main, is_settled), machines = found[0], [machine for machine, _ in found]
    devices = sorted({machine.device for machine in machines})
    if len(devices) > 1:
        raise ConfigError(
            f"the machines of this run compute on {' and '.join(devices)}",
            limit="what trains must stay the same on all ranks, to the bit",
            hint="`offload.device: cpu`, or leave out the machines without a GPU",
        )
    return replace(
        main,
        network=_network(run, facts, main),
        vram_bytes=min(machine.vram_bytes for machine in machines),
        ram_bytes=min(machine.ram_bytes for machine in machines),
        pinned_bytes=min(machine.pinned_bytes for machine in machines),
    ), is_settled


def _network(run: Run, facts: ModelFacts, main: Machine) -> Network | None:
    """Return what connects the ranks, measured with sums of a layer's size; None for a single one.

    A machine's file may know it, if it was measured between as many.
    """
    if run.ranks.num == 1:
        return main.network
    if main.network is not None and main.network.num_ranks == run.ranks.num:
        return main.network
    from finetune.training.world.network_probe import measure_network  # it imports torch

    most = max(layer_parameters(facts, trained_spec(run.recipe, facts)))
    return measure_network(run.ranks, device=run.device, num_elements=most)


def measure(run: Run, facts: ModelFacts, machine_file: Path | None) -> tuple[Machine, bool]:
    """Return the rates of this rank's device, and whether its expert backend is settled.

    Args:
        run: The run.
        facts: Its model.
        machine_file: A machine that was measured before; None measures this one.

    Raises:
        MachineError: It cannot be measured, or the file cannot be read.
        ConfigError: The file's rates are of another device, or an expert backend cannot be used.
    """
    recipe, device, dtype = run.recipe, run.device, run.recipe.model.dtype
    if machine_file is None:
        run.screen.note("Measuring this machine ...")
        machine = probe(device=device.type, seconds=PROBE_S, dtype=dtype)
        if recipe.offload.load_tier == "disk":
            rate = disk_rate(stores_dir(), seconds=PROBE_DISK_S, file_bytes=RUN_FILE_BYTES)
            machine = replace(machine, disk_bytes_per_s=rate)
    else:
        machine = find_machine(str(machine_file), dtype=dtype)
        preflight.require_same_machine(machine, device=device.type, dtype=dtype)
    resolved = resolve_expert_backend(
        recipe,
        facts,
        machine,
        device,
        resumed=run.dir if run.is_resumed and run.ranks.is_main else None,
        is_from_file=machine_file is not None,
    )
    return resolved or machine, resolved is not None


def load_data(run: Run) -> Data:
    """Read and tokenise the rows, the same on all ranks.

    Raises:
        DataError: Rows are bad, or none; each is named by file and line.
        ModelError: There is no tokenizer.
    """
    recipe, ranks = run.recipe, run.ranks
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    with ranks.first_here_first():
        rows = load_rows(
            recipe.data,
            tokenizer,
            seq_len=recipe.train.seq_len,
            seed=recipe.train.seed,
            cache_dir=cache_dir(),
            working=run.screen.working,
            formats=formats_of(recipe.objective),
        )
    require_comparable(rows, recipe.objective)
    if recipe.model.num_classes is not None:
        require_classes(rows, recipe.model.num_classes, of_words=recipe.objective.classifies_tokens)
    ranks.require_same("the training rows", lambda: rows.data_hash)
    for note in rows.notes:
        run.screen.note(note)
    return Data(tokenizer=tokenizer, rows=rows)


def plan_steps(
    run: Run, facts: ModelFacts, data: Data, machine: Machine, *, is_backend_settled: bool
) -> Planned:
    """Choose how the steps are run, among the options that the recipe leaves open.

    Where the expert backend is not settled, all are timed once a step fits.

    Raises:
        DoesNotFitError: No option fits.
        ConfigError: A setting has no effect in a run of so many steps.
    """
    recipe, ranks = run.recipe, run.ranks
    require_known_tokens(data.rows, facts.vocab_size)

    def steps_of(recipe: Recipe) -> Steps:
        train, rows = recipe.train, data.rows.train
        comparison = Comparison.of(
            rows,
            is_mismatched=recipe.objective.scores_mismatched,
            seq_len=train.seq_len,
            has_classes=recipe.objective.classifies_tokens,
        )
        order: BatchOrder | PackedOrder
        if recipe.data.packing == "on":
            cost, num = RowCost.of(facts), ranks.num
            order = PackedOrder.of(train, rows, num_ranks=num, cost=cost, comparison=comparison)
        else:
            order = BatchOrder.of(train, rows, comparison=comparison)
        own = partial(own_micro_batches, index=ranks.index, num=ranks.num)
        pad = pad_id(data.tokenizer)
        return Steps.of(order, rows, own=own, pad_token_id=pad, comparison=comparison)

    sized = [(one, steps_of(one).sizes) for one in with_each_size(recipe, num_ranks=ranks.num)]
    requests = requests_for(recipe, facts, sized, num_ranks=ranks.num)
    if ranks.num_machines > 1:
        requests = [replace(one, most_local_ranks=ranks.most_local) for one in requests]
    choice = choose(facts, machine, requests)
    recipe = with_micro_batch_size(recipe, choice.plan.request.typical.micro_batch_size)
    steps = steps_of(recipe)
    preflight.require_within_run(recipe, num_steps=steps.num)
    size = choice.plan.request.typical.micro_batch_size
    of_size = [one for one in requests if one.typical.micro_batch_size == size]
    if not is_backend_settled:
        load = choice.plan.request.typical
        timed = ranks.from_main(
            lambda: fastest_expert_backend(recipe, facts, machine, run.device, load, run.screen)
        )
        choice = choose(facts, timed, of_size)
    for note in shown_packing(steps.sizes):
        run.screen.note(note)
    chosen = choice.plan.request.typical
    return Planned(
        recipe=with_chosen(recipe, choice.plan),
        steps=steps,
        choice=choice,
        open_requests=tuple(
            one
            for one in of_size
            if one.typical.codec == chosen.codec
            and one.typical.head_chunk_tokens == chosen.head_chunk_tokens
            and one.typical.mlp_chunk_tokens == chosen.mlp_chunk_tokens
        ),
    )


def with_chosen(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the sizes of head chunk and MLP tile that a plan has chosen."""
    chosen = plan.request.typical
    return with_offload(
        recipe,
        head_chunk=chosen.head_chunk_tokens,
        mlp_chunk=chosen.mlp_chunk_tokens or "whole",
    )
