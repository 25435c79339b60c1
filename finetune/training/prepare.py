"""What is known before the model is loaded: the machine, the rows, and the plan of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from finetune.data.compared import (
    Comparison,
    require_classes,
    require_comparable,
    require_known_rows,
    require_known_tokens,
)
from finetune.data.dataset import Rows, load_rows
from finetune.data.order import BatchOrder, PackedOrder, RowCost
from finetune.data.steps import Steps, num_parts_of, with_virtual_tokens
from finetune.env import cache_dir, stores_dir
from finetune.errors import ConfigError
from finetune.model.config import processor_files
from finetune.model.tokenizer import load_tokenizer
from finetune.planning.candidates import chooser, requests_for, with_each_size
from finetune.planning.ranks import require_ranks_for
from finetune.planning.request import facts_of, find_machine, trained_spec
from finetune.recipe.recipe import (
    Recipe,
    with_settings,
)
from finetune.training import preflight
from finetune.training.expert_backend import fastest_expert_backend, resolve_expert_backend
from finetune.training.layer_kernels import settled_layer_kernels
from finetune.training.packing import settled_packing, shown_packing, shown_steps
from finetune.training.ranks import Ranks, micro_batches_by_shares, with_others
from finetune.training.run import Run
from finetune.training.samples import pad_id
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.trainable import layer_parameters
from offload.plan.facts.workload import WeightPlace
from offload.plan.machine.machine import Machine, Network
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest, Probe, with_images
from offload.plan.search import Choice
from offload.probe.load import shown_load
from offload.probe.machine import NO_GPU, PROBE_S, RUN_FILE_BYTES, disk_rate, probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.images.imaging import RowImages
    from finetune.planning.parallel import Shares
    from finetune.training.images import RunImages

PROBE_DISK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The data of a run."""

    tokenizer: "PreTrainedTokenizerBase"  # the model's
    rows: Rows  # the rows that are trained on, and those held out
    images: "RunImages | None" = None  # those of the rows; None if no row has any

    def held_out(self, steps: Steps) -> Steps | None:
        """Return steps of the held-out rows, cut as those that are trained on.

        None where there are no such rows, or where each row is learned by itself.
        """
        rows = self.rows.held_out
        if steps.comparison is None or rows is None:
            return None
        return steps.held_out(rows, steps.comparison.of_same_kind(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """How a run's steps are run, with the matching settings."""

    recipe: Recipe  # with the sizes of micro-batch and head chunk that were chosen, where left open
    steps: Steps  # the steps, cut by these sizes
    # The plan, the same for all ranks unless their shares or cards differ, and the alternatives
    # that were considered.
    choice: Choice
    # The requests that may still be chosen once layers are loaded and steps are cut: they differ in
    # the slots, and in where layer inputs wait.
    open_requests: tuple[PlanRequest, ...]
    cards: "Cards"  # what the ranks compute on, with settled expert kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run before its model is loaded."""

    run: Run  # with the settings that were chosen
    data: Data  # the run's rows
    planned: Planned  # the plan of its steps, by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """What the ranks of a run compute on."""

    # The machine of each rank; those with cards of a kind are planned alike.
    machines: tuple[Machine, ...]
    are_alike: bool  # whether there is one kind of card
    is_settled: bool  # whether the expert backend is

    def with_experts(self, main: Machine) -> "Cards":
        """Return the same with the main rank's expert backend; its rate is that of its own kind."""
        way = main.experts_implementation
        machines = tuple(
            main if machine == self.machines[0] else replace(machine, experts_implementation=way)
            for machine in self.machines
        )
        return replace(self, machines=machines, is_settled=True)


def prepare(run: Run, machine_file: Path | None) -> Prepared:
    """Measure the machine, read the rows, and plan a step.

    Args:
        run: The run.
        machine_file: A machine that was measured before; None measures this one.

    Raises:
        SluiceError: The machine, the rows or the plan do not allow the run.
    """
    facts = facts_of(run.recipe.model)
    cards = measured_everywhere(run, facts, machine_file)
    (run,) = settled([run], facts, cards)
    prepared = prepare_alone(run, facts, cards)
    planned = agreed(prepared.planned, run.ranks)
    return replace(prepared, run=with_plan(run, planned, planned.choice.plan), planned=planned)


def settled(runs: "Sequence[Run]", facts: ModelFacts, cards: "Cards") -> list[Run]:
    """Return runs with what their recipes left open before rows are read; say what was chosen.

    It is how ranks share a step, the kernels of the layers that the runs share, and packing.
    """
    first, main = runs[0], cards.machines[0]
    recipes = [with_way(run, facts, main) for run in runs]
    kernels = first.ranks.from_main(
        lambda: settled_layer_kernels(recipes[0], first.device, first.screen)
    )
    recipes = [with_settings(recipe, {"model.layer_kernels": kernels}) for recipe in recipes]
    return [
        replace(
            run,
            recipe=with_settings(
                recipe, {"data.packing": settled_packing(recipe, run.screen.note)}
            ),
        )
        for run, recipe in zip(runs, recipes, strict=True)
    ]


def prepare_alone(run: Run, facts: ModelFacts, cards: "Cards") -> Prepared:
    """Read the rows of a settled run, and plan its steps as if it were alone."""
    preflight.require_trainable(run.recipe)
    data = load_data(run, facts)
    return Prepared(run=run, data=data, planned=plan_steps(run, facts, data, cards))


def agreed(planned: Planned, ranks: Ranks) -> Planned:
    """Return the plan with those of the other ranks, where they differ."""
    plan = with_others(planned.choice.plan, ranks)
    return replace(planned, choice=replace(planned.choice, plan=plan))


def with_plan(run: Run, planned: Planned, plan: Plan) -> Run:
    """Return a run with what was chosen for it, once its results have room.

    Args:
        run: The run.
        planned: The plan of the run alone.
        plan: The plan of the step, which it may share with other runs.

    Raises:
        CheckpointError: The disk is too full.
    """
    if run.ranks.is_main:
        preflight.require_room(run.dir.path, plan)
    recipe = with_chosen(planned.recipe, plan)
    return replace(run, recipe=recipe, are_cards_alike=planned.cards.are_alike)


def measured_everywhere(run: Run, facts: ModelFacts, machine_file: Path | None) -> Cards:
    """Return what all ranks plan for.

    Of each machine the first rank of each kind of card measures it, one after the other; the others
    wait. Rates are those of the first card of a kind; of each memory there is as much as the
    machine has that has least.

    Raises:
        MachineError: One cannot be measured, or the file cannot be read.
        ConfigError: The file's rates are of another device, an expert backend cannot be used, or
            the machines compute on other kinds of devices.
    """
    ranks = run.ranks
    is_cuda = run.device.type == "cuda"
    cards = ranks.exchange(torch.cuda.get_device_name(run.device) if is_cuda else "a CPU")
    here = [rank for rank, node in enumerate(ranks.nodes) if node == ranks.nodes[ranks.index]]
    own_kinds = list(dict.fromkeys(cards[rank] for rank in here))
    if machine_file is not None and len(own_kinds) > 1:
        raise ConfigError(
            f"--machine {machine_file} on a machine with {' and '.join(own_kinds)}",
            limit="a file has the rates of one kind of card",
            hint="leave `--machine` out: each kind is measured",
        )
    places = list(zip(ranks.nodes, cards, strict=True))
    is_first = places.index(places[ranks.index]) == ranks.index
    found: list[tuple[Machine, bool] | None] = [None] * ranks.num
    num_turns = max(len({card for other, card in places if other == node}) for node in ranks.nodes)
    for turn in range(num_turns):
        is_due = is_first and own_kinds.index(cards[ranks.index]) == turn
        every = ranks.exchange(measure(run, facts, machine_file) if is_due else None)
        found = [before or new for before, new in zip(found, every, strict=True)]
    measured = [found[places.index(place)] for place in places]
    machines = [one[0] for one in measured if one is not None]
    main = machines[0]
    assert measured[0] is not None
    devices = sorted({machine.device for machine in machines})
    if len(devices) > 1:
        raise ConfigError(
            f"the machines of this run compute on {' and '.join(devices)}",
            limit="what trains must stay the same on all ranks, to the bit",
            hint="`offload.device: cpu`, or leave out the machines without a GPU",
        )
    network = _network(run, facts, main)
    kinds = [(card, machine.name) for card, machine in zip(cards, machines, strict=True)]
    way = main.experts_implementation

    def of_kind(kind: tuple[str, str]) -> Machine:
        alike = [machine for machine, one in zip(machines, kinds, strict=True) if one == kind]
        return replace(
            alike[0],
            network=network,
            vram_bytes=min(machine.vram_bytes for machine in alike),
            ram_bytes=min(machine.ram_bytes for machine in alike),
            pinned_bytes=min(machine.pinned_bytes for machine in alike),
            experts_implementation=way,
        )

    return Cards(
        machines=tuple(map(of_kind, kinds)),
        are_alike=len(set(kinds)) == 1,
        is_settled=measured[0][1],
    )


def _network(run: Run, facts: ModelFacts, main: Machine) -> Network | None:
    """Return what connects the ranks, measured with sums of a layer's size; None for a single one.

    A machine's file may know it, if it was measured between as many.
    """
    if run.ranks.num == 1:
        return main.network
    if main.network is not None and main.network.world_size == run.ranks.num:
        return main.network
    from finetune.training.process_group import measure_network  # it imports torch

    most = max(layer_parameters(facts, trained_spec(run.recipe, facts)))
    return measure_network(run.ranks, device=run.device, num_elements=most)


def measure(run: Run, facts: ModelFacts, machine_file: Path | None) -> tuple[Machine, bool]:
    """Return the rates of this rank's device, and whether its expert backend is settled.

    Args:
        run: The run.
        facts: The facts of its model.
        machine_file: A machine that was measured before; None measures this one.

    Raises:
        MachineError: It cannot be measured, or the file cannot be read.
        ConfigError: The file's rates are of another device, or an expert backend cannot be used.
    """
    recipe, device, dtype = run.recipe, run.device, run.recipe.model.dtype
    if device.type == "cpu" and recipe.offload.device == "auto":
        run.screen.note(f"{NO_GPU}, so its CPU trains: `sluice doctor` says why")
    if machine_file is None:
        run.screen.note("Measuring this machine ...")
        machine = probe(device=device.type, seconds=PROBE_S, dtype=dtype)
        if recipe.offload.load_tier == "disk":
            rate = disk_rate(stores_dir(), seconds=PROBE_DISK_S, file_bytes=RUN_FILE_BYTES)
            machine = replace(machine, disk_bytes_per_s=rate)
    else:
        machine = find_machine(str(machine_file), dtype=dtype)
        preflight.require_same_machine(machine, device=device.type, dtype=dtype)
    if machine.others_frac is not None and run.ranks.num == 1:  # of several each disturbs others
        run.screen.note(shown_load(f"{machine.name} was measured", machine.others_frac))
    resolved = resolve_expert_backend(
        recipe,
        facts,
        machine,
        device,
        resumed=run.dir if run.is_resumed and run.ranks.is_main else None,
        is_from_file=machine_file is not None,
    )
    return resolved or machine, resolved is not None


def with_way(run: Run, facts: ModelFacts, machine: Machine) -> Recipe:
    """Return the recipe with how its processes share a step, where that was left open; say why.

    Raises:
        SluiceError: Neither way is possible.
    """
    recipe, num = run.recipe, run.ranks.num
    if recipe.train.parallel != "auto":
        return recipe
    if num == 1 or (machine.device == "cpu" and not recipe.train.is_full):
        recipe = with_settings(recipe, {"train.parallel": "stream"})
    else:
        from finetune.planning.parallel import compare_ways  # several processes alone need it

        ways = compare_ways(recipe, facts, machine, num_ranks=num)
        recipe = with_settings(recipe, {"train.parallel": ways.faster.name})
        run.screen.note(f"train.parallel: {ways.reason}")
    require_ranks_for(recipe.train, num_ranks=num)
    return recipe


def load_data(run: Run, facts: ModelFacts) -> Data:
    """Read and tokenise the rows, the same on all ranks, and put virtual tokens in front.

    Raises:
        DataError: Rows are bad, or none; each is named by file and line.
        ModelError: There is no tokenizer.
    """
    recipe, ranks = run.recipe, run.ranks
    tokenizer = load_tokenizer(recipe.model)
    imaging = imaging_of(recipe, tokenizer)
    with ranks.first_here_first():
        rows = load_rows(
            recipe.data,
            tokenizer,
            seq_len=recipe.train.seq_len,
            seed=recipe.train.seed,
            cache_dir=cache_dir(),
            working=run.screen.working,
            formats=recipe.objective.read_formats,
            imaging=imaging,
        )
    require_known_rows(rows, tokenizer, facts.vocab_size)
    require_comparable(rows, recipe.objective)
    if recipe.model.num_classes is not None:
        require_classes(rows, recipe.model.num_classes, of_words=recipe.objective.classifies_tokens)
    ranks.require_same("the training rows", lambda: rows.data_hash)
    others = rows.held_out  # a machine may have another file of them
    ranks.require_same("the held-out rows", lambda: "" if others is None else others.digest())
    for note in (*rows.notes, *rows.prompted.notes):
        run.screen.note(note)
    num = recipe.adapter.num_in_rows
    rows = with_virtual_tokens(rows, first_id=facts.vocab_size, num=num)
    images = None
    if imaging is not None and rows.has_images:
        from finetune.training.images import images_of

        rows, images = images_of(run, rows, imaging, facts)
    rows = recipe.objective.planned(rows, seq_len=recipe.train.seq_len)
    return Data(tokenizer=tokenizer, rows=rows, images=images)


def imaging_of(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> "RowImages | None":
    """Return what makes tokens of images; None where the model has no processor for them."""
    if not processor_files(recipe.model):
        return None
    from finetune.images.imaging import RowImages

    return RowImages.of(recipe.model, tokenizer, max_tokens=recipe.image.max_tokens)


def plan_steps(run: Run, facts: ModelFacts, data: Data, cards: Cards) -> Planned:
    """Choose how the steps are run, among the options that the recipe leaves open.

    Where cards or shares differ, the main rank chooses the shares, and each its own plan. Where the
    expert backend is not settled, all are timed once a step fits.

    Raises:
        DoesNotFitError: No option fits.
        ConfigError: A setting has no effect in a run of so many steps.
    """
    recipe, ranks = run.recipe, run.ranks
    require_known_tokens(data.rows, facts.vocab_size)

    def steps_of(recipe: Recipe, shares: Sequence[int] = (1,) * ranks.num) -> Steps:
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
            order = PackedOrder.of(train, rows, min_parts=num, cost=cost, comparison=comparison)
        else:
            order = BatchOrder.of(train, rows, min_parts=ranks.num, comparison=comparison)
        own = partial(micro_batches_by_shares, index=ranks.index, shares=shares)
        pad = pad_id(data.tokenizer)
        return Steps.of(order, rows, own=own, pad_token_id=pad, comparison=comparison)

    sized = [(one, steps_of(one).sizes) for one in with_each_size(recipe, num_ranks=ranks.num)]
    requests = requests_for(recipe, facts, sized, num_ranks=ranks.num)
    if recipe.train.takes_features:
        features = _features_of(recipe, data, steps_of(sized[0][0]))
        requests = [replace(one, probe=features) for one in requests]
    requests = _with_what_is_known(requests, run, data)
    shares = _shared_out(run, facts, cards, requests)

    def chosen(machine: Machine, requests: Sequence[PlanRequest]) -> Choice:
        if shares is None:
            return chooser(run.recipe)(facts, machine, requests)
        from finetune.planning.parallel import own_choice

        return own_choice(facts, machine, shares, rank=ranks.index)

    choice = chosen(cards.machines[ranks.index], requests)
    recipe = with_settings(
        recipe, {"train.micro_batch_size": choice.plan.request.typical.micro_batch_size}
    )
    steps = steps_of(recipe)
    if shares is not None:
        recipe = with_settings(recipe, {"train.shares": shares.micro_batches})
        steps = steps_of(recipe, shares.micro_batches)
        requests = shares.of(ranks.index)
    preflight.require_within_run(recipe, num_steps=steps.num)
    preflight.require_last_step(steps, num_ranks=ranks.num)
    run.screen.note(shown_steps(steps))
    size = choice.plan.request.typical.micro_batch_size
    of_size = [one for one in requests if one.typical.micro_batch_size == size]
    if not cards.is_settled:
        load, main = choice.plan.request.typical, cards.machines[0]
        cards = cards.with_experts(
            ranks.from_main(
                lambda: fastest_expert_backend(recipe, facts, main, run.device, load, run.screen)
            )
        )
        choice = chosen(cards.machines[ranks.index], of_size)
    for note in shown_packing(steps.sizes):
        run.screen.detail(note)
    typical = choice.plan.request.typical
    return Planned(
        recipe=with_chosen(recipe, choice.plan),
        steps=steps,
        choice=choice,
        open_requests=tuple(
            one
            for one in of_size
            if one.typical.codec == typical.codec
            and one.typical.head_chunk_tokens == typical.head_chunk_tokens
            and one.typical.mlp_chunk_tokens == typical.mlp_chunk_tokens
            and one.typical.embeddings == typical.embeddings
            and one.typical.head == typical.head
        ),
        cards=cards,
    )


def _with_what_is_known(requests: list[PlanRequest], run: Run, data: Data) -> list[PlanRequest]:
    """Return requests with the machines of a run, and the images of its rows."""
    if run.ranks.num_machines > 1:
        requests = [replace(one, most_local_ranks=run.ranks.most_local) for one in requests]
    if data.images is not None:
        requests = [with_images(one, data.images.counted) for one in requests]
    return requests


def _features_of(recipe: Recipe, data: Data, steps: Steps) -> Probe:
    """Return what a probe of these rows keeps, and in how many passes it is computed."""
    held_out = data.held_out(steps) if recipe.output.eval_every is not None else None
    every = [one for one in (steps, held_out) if one is not None]
    return Probe(
        is_alone=recipe.train.is_head_alone,
        num_features=sum(int(one.rows.loss_tokens.sum()) for one in every),
        num_passes=sum(map(num_parts_of, every)),
    )


def _shared_out(
    run: Run, facts: ModelFacts, cards: Cards, requests: Sequence[PlanRequest]
) -> "Shares | None":
    """Return the main rank's choice of shares where cards or shares differ; otherwise None."""
    train = run.recipe.train
    if train.is_sharded or (cards.are_alike and isinstance(train.shares, str)):
        return None
    from finetune.planning.parallel import share_out

    sending = [_sending_update(one, sends_update=not cards.are_alike) for one in requests]
    return run.ranks.from_main(
        lambda: share_out(facts, cards.machines, sending, wanted=train.shares)
    )


def _sending_update(request: PlanRequest, *, sends_update: bool) -> PlanRequest:
    """Return a request whose ranks take the main rank's update, or make their own."""
    return replace(request, reduction=replace(request.reduction, sends_update=sends_update))


def with_chosen(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with what a plan has chosen: sizes of chunks, and where things are."""
    if recipe.train.is_sharded:  # head and MLPs are whole
        return recipe
    chosen = plan.request.typical
    return with_settings(
        recipe,
        {
            "offload.head_chunk": chosen.head_chunk_tokens,
            "offload.mlp_chunk": chosen.mlp_chunk_tokens or "whole",
            "offload.embeddings": _chosen_place(recipe.offload.embeddings, chosen.embeddings),
            "offload.head": _chosen_place(recipe.offload.head, chosen.head),
        },
    )


def _chosen_place(
    own: Literal["auto", "device", "host"], chosen: WeightPlace
) -> Literal["auto", "device", "host"]:
    """Return where a weight is by a plan; `auto` is left where it takes the device, its default."""
    return own if own == "auto" and chosen == "device" else chosen
