"""Models, requests and recipes to plan for; a test names only what it is about."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from finetune.recipe.adapters import ADAPTERS, AdapterSection, LoraSection
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.request import PlanRequest, with_workload
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import Order, TransferSizes, warm_ring
from offload.plan.schedule.simulate import simulate
from offload.plan.schedule.timeline import Timeline
from tests.schedules import training_schedule

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of the model of a config; a model that was asked for before is not built."""
    return _facts_of(json.dumps(config, sort_keys=True))


@cache
def _facts_of(config: str) -> ModelFacts:
    from finetune.model.facts import facts_from

    return facts_from(json.loads(config))


def qwen3_8b(**changes: Any) -> ModelFacts:
    """Return the facts of a dense model of 8 billion parameters."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    return model_facts(config | changes)


def qwen3_30b(**changes: Any) -> ModelFacts:
    """Return the facts of a mixture of experts of 30 billion parameters."""
    return model_facts(QWEN3_30B | changes)


def llama_7b(**changes: Any) -> ModelFacts:
    """Return the facts of the first Llama of 7 billion parameters: every head has its own keys."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    return model_facts(config | changes)


def lora(**changes: Any) -> AdapterSpec:
    """Return adapters of rank 16 on queries and values."""
    spec: dict[str, Any] = {"rank": 16, "targets": ("q_proj", "v_proj"), "experts": False}
    return AdapterSpec(**spec | changes)


def adapter(**changes: Any) -> LoraSection:
    """Return LoRA of rank 2 on all linears, for models of a few features."""
    return LoraSection(**{"rank": 2, "alpha": 4.0} | changes)


def of_method(method: str, **settings: Any) -> Any:
    """Return the adapter of a method with those settings that it has."""
    known = ADAPTERS[method].settings.model_fields
    own = {name: value for name, value in settings.items() if name in known}
    return AdapterSection.model_validate({"method": method} | own)


def workload(**changes: Any) -> Workload:
    """Return a micro-batch of one sequence of 2,048 tokens; every token of it has a label."""
    fields = {"micro_batch_size": 1, "seq_len": 2048} | changes
    settings: dict[str, Any] = {
        "label_tokens": fields["micro_batch_size"] * fields["seq_len"],
        "head_chunk_tokens": 1024,
        "adapter": lora(),
        "optimizer": "adamw",
        "dtype_bytes": 2,
        "codec": "native",
    }
    return Workload(**settings | fields)


def request(micro_batch: Workload | None = None, **changes: Any) -> PlanRequest:
    """Return a request for steps of 8 equal micro-batches, with as many slots as fit."""
    micro_batch = micro_batch or workload()
    settings: dict[str, Any] = {
        "typical": micro_batch,
        "largest": micro_batch,
        "num_micro_batches": 8,
        "num_slots": None,
        "num_kept_graphs": 0,
        "vram_budget_bytes": None,
        "num_workers": 0,
        "is_stashed": False,
        "is_on_disk": False,
        "num_ranks": 1,
        "is_slab_shared": False,
    }
    return PlanRequest(**settings | changes)


def slow_link() -> Machine:
    """Return a card of 10 GiB whose link is so slow that what crosses it decides the step."""
    link = Rate(value=2e9, source="drawn")
    return replace(named_machine("rtx4060ti"), vram_bytes=10 * GIB, h2d_bytes_per_s=link)


def byte_machine(dtype_bytes: int) -> Machine:
    """Return a machine that moves a byte a second and computes in no time: seconds are bytes."""
    one, endless = (Rate(value=value, source="test") for value in (1.0, 1e30))
    tall = Rate(value=2 * 16 / dtype_bytes, source="test")  # one pass over the long side
    return replace(
        named_machine("rtx4090"),
        memory_bytes_per_s=one,
        gemm_flops_per_s=endless,
        tall_gemm_flops_per_s=tall,
        tall_fp32_flops_per_s=tall,
        launch_s=Rate(value=0.0, source="test"),
    )


def ways_of(asked: PlanRequest) -> list[PlanRequest]:
    """Return a request in the exact forms of weights, inputs kept on the device or stashed."""
    return [
        replace(with_workload(asked, codec=codec), is_stashed=is_stashed)
        for codec in ("native", "bf16_packed")
        for is_stashed in (False, True)
    ]


def recipe_values(**changes: Any) -> dict[str, Any]:
    """Return the settings of a small valid recipe, with `section__field=value` changes."""
    values: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"path": "rows.jsonl"},
        "train": {"seq_len": 512, "grad_accum_steps": 4, "steps": 10},
        "output": {"name": "small"},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        values.setdefault(section, {})[field] = value
    return values


def simulated(num_layers: int, num_micro_batches: int, *, visit_s: float = 1.0) -> Timeline:
    """Return a streamed step: a visit takes a second, any other op a quarter of one."""
    schedule = training_schedule(
        TransferSizes.frozen([100] * num_layers, decoded_bytes=[400] * num_layers, num_staging=2),
        ring=warm_ring(2),
        num_micro_batches=num_micro_batches,
        order=Order.LAYER_MAJOR,
        trains_front=False,
        input_bytes=(5,) * num_micro_batches,
    )
    costs = {Lane.COMPUTE: visit_s}
    return simulate(schedule, lambda op: costs.get(op.lane, 0.25)).with_optimizer(2 * visit_s)
