"""What is known before the model is loaded: machine, rows and plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune import preflight
from finetune.batches import BatchOrder, collate
from finetune.env import cache_dir
from finetune.loop import Batch
from finetune.model import load_tokenizer
from finetune.planning import facts_of, find_machine, request_for
from finetune.recipe import Recipe
from finetune.sampling import pad_id
from finetune.screen import Screen
from finetune.source import Rows, StepSizes, load_rows, row_order
from offload.plan.plan import Plan, plan
from offload.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The rows of a run, their order, and the plan for them."""

    device: torch.device
    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows
    order: BatchOrder
    sizes: StepSizes
    plan: Plan

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows up."""
        return pad_id(self.tokenizer)

    def micro_batches(self, step: Sequence[Sequence[int]]) -> list[Batch]:
        """Return the micro-batches of some rows."""
        return [
            collate([self.rows.train[i] for i in part], pad_token_id=self.pad_token_id)
            for part in step
        ]


def prepare(recipe: Recipe, screen: Screen, machine_file: Path | None) -> Work:
    """Measure the machine, read the rows, and plan the step.

    Raises:
        SluiceError: What a run needs is missing, or does not fit.
    """
    device = torch.device(preflight.torch_device_name(recipe.offload))
    facts = facts_of(recipe.model)
    if machine_file is None:
        screen.note("Measuring this machine ...")
        machine = probe(device=device.type, seconds=PROBE_S, dtype=recipe.model.dtype)
    else:
        machine = find_machine(str(machine_file))
        preflight.require_same_machine(machine, device=device.type, dtype=recipe.model.dtype)
    preflight.require_ready(recipe, facts, machine)
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    rows = load_rows(
        recipe.data,
        tokenizer,
        seq_len=recipe.train.seq_len,
        seed=recipe.train.seed,
        cache_dir=cache_dir(),
    )
    for note in rows.notes:
        screen.note(note)
    order = row_order(recipe.train, rows.train)
    preflight.require_within_run(recipe, num_steps=order.num_steps)
    sizes = StepSizes.of(order, rows.train)
    return Work(
        device=device,
        tokenizer=tokenizer,
        rows=rows,
        order=order,
        sizes=sizes,
        plan=plan(facts, machine, request_for(recipe, facts, sizes)),
    )
