"""Plans of full training, for tests of what they count."""

from dataclasses import replace
from typing import Literal

from finetune.recipe.load import load_shape
from offload.plan.facts.facts import AdapterSpec, ModelFacts, WholeWeights
from offload.plan.facts.trainable import all_weights
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import Plan, plan
from offload.plan.request import PlanRequest
from tests.builders import model_facts


def facts_of(name: str) -> ModelFacts:
    return model_facts(load_shape(name))


def workload(
    whole: WholeWeights, *, dtype_bytes: Literal[2, 4] = 2, optimizer: str = "adamw"
) -> Workload:
    return Workload(
        micro_batch_size=1,
        seq_len=2048,
        label_tokens=2048,
        head_chunk_tokens=1024,
        adapter=AdapterSpec.none(whole),
        optimizer=optimizer,
        dtype_bytes=dtype_bytes,
        codec="native",
    )


def planned(
    name: str,
    *,
    ram_gib: int,
    whole: WholeWeights | None = None,
    num_slots: int | None = None,
    optimizer: str = "adamw",
) -> Plan:
    facts = facts_of(name)
    load = workload(whole or all_weights(facts), optimizer=optimizer)
    machine = named_machine("rtx4090", dtype="bfloat16", ram_bytes=ram_gib * GIB)
    return plan(facts, machine, replace(request_of(load), num_slots=num_slots))


def request_of(load: Workload) -> PlanRequest:
    return PlanRequest(
        typical=load,
        largest=load,
        num_micro_batches=8,
        num_slots=None,
        num_kept_graphs=0,
        vram_budget_bytes=None,
        num_workers=1,
        is_stashed=False,
        is_on_disk=False,
        num_ranks=1,
        is_slab_shared=True,
    )
