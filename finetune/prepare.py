"""What is known before the model is loaded: machine, rows and plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune import experts, preflight
from finetune.batches import BatchOrder, StepShare, collate
from finetune.choices import choose, requests_for, settled
from finetune.env import cache_dir, stores_dir
from finetune.model import load_tokenizer
from finetune.planning import facts_of, find_machine, has_experts
from finetune.ranks import Ranks, own_micro_batches
from finetune.recipe import Recipe, with_offload
from finetune.run_dir import RunDir
from finetune.sampling import pad_id
from finetune.screen import Screen
from finetune.source import Rows, StepSizes, load_rows, row_order
from offload.host_probe import RUN_FILE_BYTES, disk_rate
from offload.plan.facts import ModelFacts
from offload.plan.machine import ExpertsImplementation, Machine
from offload.plan.plan import Plan, PlanRequest
from offload.plan.search import Choice
from offload.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_S, PROBE_DISK_S = 5.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The rows of a run, their order, and the plan for them.

    Attributes:
        recipe: With the sizes of micro-batch and head chunk that were chosen, where left open.
        device: This rank's.
        tokenizer: The model's.
        rows: What is trained on and held out.
        order: Which rows each step trains on.
        micro_batch_ids: Which micro-batches of a step are this rank's.
        sizes: How large micro-batches are.
        choice: The plan, the same for all ranks, and what was weighed against it.
        requests: All that was weighed.
    """

    recipe: Recipe
    device: torch.device
    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows
    order: BatchOrder
    micro_batch_ids: tuple[int, ...]
    sizes: StepSizes
    choice: Choice
    requests: tuple[PlanRequest, ...]

    @property
    def plan(self) -> Plan:
        """How a step runs."""
        return self.choice.plan

    @property
    def ways(self) -> tuple[PlanRequest, ...]:
        """What may still be chosen once layers are loaded and steps cut: slots, inputs' place."""
        own = self.plan.request.typical
        return tuple(
            one
            for one in self.requests
            if one.typical.codec == own.codec
            and one.typical.micro_batch_size == own.micro_batch_size
            and one.typical.head_chunk_tokens == own.head_chunk_tokens
        )

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows up."""
        return pad_id(self.tokenizer)

    @property
    def experts_implementation(self) -> ExpertsImplementation | None:
        """How the model's experts are multiplied; None if it has none."""
        if not has_experts(self.plan.facts):
            return None
        return self.plan.machine.experts_implementation.value

    def share(self, step: Sequence[Sequence[int]]) -> StepShare:
        """Return this rank's share of a step with these rows."""
        own = (
            collate([self.rows.train[row] for row in step[i]], pad_token_id=self.pad_token_id)
            for i in self.micro_batch_ids
        )
        return StepShare.of(
            step, self.rows.train, micro_batches=own, micro_batch_ids=self.micro_batch_ids
        )


def prepare(
    recipe: Recipe,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    *,
    resumed: RunDir | None,
) -> Work:
    """Measure the machine, read the rows, choose how experts are multiplied, and plan the step.

    Args:
        recipe: What to do.
        ranks: The processes that do it together.
        screen: Where to show it.
        machine_file: A machine that was measured before; None measures this one.
        resumed: The run that goes on; None for a new one.

    Raises:
        SluiceError: What a run needs is missing, or does not fit.
    """
    device, facts = preflight.torch_device(recipe.offload, ranks), facts_of(recipe.model)
    machine, is_settled = ranks.from_main(
        lambda: _machine(recipe, facts, screen, device, machine_file, resumed)
    )
    preflight.require_ready(recipe, facts, machine, num_ranks=ranks.num)
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    with ranks.main_first():
        rows = load_rows(
            recipe.data,
            tokenizer,
            seq_len=recipe.train.seq_len,
            seed=recipe.train.seed,
            cache_dir=cache_dir(),
        )
    ranks.require_same("the training rows", lambda: rows.data_hash)
    for note in rows.notes:
        screen.note(note)
    sized = {
        one.train.sequences: (one, StepSizes.of(row_order(one.train, rows.train), rows.train))
        for one in settled(recipe, num_ranks=ranks.num)
    }
    requests = requests_for(recipe, facts, list(sized.values()), num_ranks=ranks.num)
    choice = choose(facts, machine, requests)
    recipe, sizes = sized[choice.plan.request.typical.micro_batch_size]
    order = row_order(recipe.train, rows.train)
    preflight.require_within_run(recipe, num_steps=order.num_steps)
    if not is_settled:  # it fits, so the ways to multiply experts are worth a trial
        choice = _tried(recipe, ranks, screen, device, requests, choice)
    own = own_micro_batches(order.num_micro_batches, index=ranks.index, num=ranks.num)
    return Work(
        recipe=with_offload(recipe, head_chunk=choice.plan.request.typical.head_chunk_tokens),
        device=device,
        tokenizer=tokenizer,
        rows=rows,
        order=order,
        micro_batch_ids=own,
        sizes=sizes,
        choice=choice,
        requests=tuple(requests),
    )


def _tried(
    recipe: Recipe,
    ranks: Ranks,
    screen: Screen,
    device: torch.device,
    requests: Sequence[PlanRequest],
    choice: Choice,
) -> Choice:
    """Choose again, for this size of micro-batch, with the fastest way to multiply experts."""
    facts, load = choice.plan.facts, choice.plan.request.typical
    measured = ranks.from_main(
        lambda: experts.measured(recipe, facts, choice.plan.machine, device, load, screen)
    )
    of_size = [r for r in requests if r.typical.micro_batch_size == load.micro_batch_size]
    return choose(facts, measured, of_size)


def _machine(
    recipe: Recipe,
    facts: ModelFacts,
    screen: Screen,
    device: torch.device,
    machine_file: Path | None,
    resumed: RunDir | None,
) -> tuple[Machine, bool]:
    """Return the rates of this rank's device, and whether it is settled how it multiplies experts.

    The other ranks wait.
    """
    dtype = recipe.model.dtype
    if machine_file is None:
        screen.note("Measuring this machine ...")
        machine = probe(device=device.type, seconds=PROBE_S, dtype=dtype)
        if recipe.offload.load_tier == "disk":
            rate = disk_rate(stores_dir(), seconds=PROBE_DISK_S, file_bytes=RUN_FILE_BYTES)
            machine = replace(machine, disk_bytes_per_s=rate)
    else:
        machine = find_machine(str(machine_file), dtype=dtype)
        preflight.require_same_machine(machine, device=device.type, dtype=dtype)
    settled = experts.settled(
        recipe, facts, machine, device, resumed=resumed, is_from_file=machine_file is not None
    )
    return settled or machine, settled is not None
