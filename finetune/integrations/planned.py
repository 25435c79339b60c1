"""The plan of a Trainer's steps, from its model and arguments: what `Streaming.of` attaches.

plan = plan_steps(model, args, seq_len=2048)
print(plan.num_slots, plan.step_s, plan.peak_bytes)
trainer = SluiceTrainer(model, args, streaming=Streaming.of(plan), ...)
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from transformers import TrainingArguments

from finetune.errors import ConfigError
from finetune.model.facts import facts_from
from finetune.planning.candidates import HEAD_CHUNKS, choose, with_forms
from offload.plan.facts.codec import CodecName
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.optimizer import Optimizer
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.request import HEAD_CHUNK_TOKENS, PlanRequest, with_head_chunk
from offload.probe.machine import PROBE_S, probe

_SLOTS = "`Streaming(num_slots=...)` without a plan"
_STATES: dict[str, Optimizer] = {
    "adafactor": "adafactor",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}


def plan_steps(
    model: PeftModel,
    args: TrainingArguments,
    *,
    seq_len: int,
    codec: CodecName = "native",
    compute_dtype: Literal["float32", "auto"] = "float32",
    machine: Machine | None = None,
) -> Plan:
    """Plan the steps of a Trainer: the fastest that fits, with its predicted time and memory.

    Args:
        model: With a LoRA adapter, on the host.
        args: Sizes of micro-batches and steps are read off it.
        seq_len: Tokens of the longest row; all are counted as if they were so long.
        codec: How the layers' matrices are stored off the device.
        compute_dtype: What adapters of linear layers are computed in; see `Streaming`.
        machine: Where; None measures this one, which takes some seconds.

    Raises:
        ConfigError: The adapter or the model's dtype is none that can be planned.
        DoesNotFitError: It does not fit, with what would.
        MachineError: This machine cannot be measured.
    """
    base: Any = model.get_base_model()
    config = base.config.to_dict()
    facts = facts_from(config)
    dtype = _dtype(base)
    if machine is None:
        device = "cuda" if args.device.type == "cuda" else "cpu"
        machine = probe(device=device, seconds=PROBE_S, dtype=str(dtype).removeprefix("torch."))
    num_rows = args.per_device_train_batch_size
    workload = Workload(
        micro_batch_size=num_rows,
        seq_len=seq_len,
        label_tokens=num_rows * seq_len,
        head_chunk_tokens=HEAD_CHUNK_TOKENS,
        adapter=replace(
            _adapter_spec(model, facts),
            is_in_base_dtype=compute_dtype == "auto" and _has_plain_branches(model),
        ),
        optimizer=_STATES.get(str(getattr(args.optim, "value", args.optim)), "adamw"),
        dtype_bytes=dtype.itemsize,
        codec=codec,
    )
    request = PlanRequest(
        typical=workload,
        largest=workload,
        num_micro_batches=args.gradient_accumulation_steps,
        num_slots=None,
        num_kept_graphs=None,
        vram_budget_bytes=None,
        num_workers=args.dataloader_num_workers,
        is_stashed=False,
        is_on_disk=False,
        num_ranks=1,
        is_slab_shared=False,
        is_masked=True,
        has_outputs=base.config._attn_implementation == "sdpa",  # no other is recorded
        has_sent_graphs=True,
    )
    ways = [
        with_head_chunk(replace(request, is_stashed=is_stashed), num_tokens)
        for num_tokens in HEAD_CHUNKS
        for is_stashed in (False, True)
    ]
    has_dropout = workload.adapter.has_dropout
    forms = with_forms(
        facts, ways, may_tile=not has_dropout, may_move_embeddings=True, may_move_head=True
    )
    return choose(facts, machine, forms).plan


def _dtype(base: nn.Module) -> torch.dtype:
    """Return what the layers compute in: the dtype of the frozen weights.

    Raises:
        ConfigError: There are several, or it is none that rates are measured for.
    """
    found = {p.dtype for p in base.parameters() if not p.requires_grad and p.is_floating_point()}
    if found not in ({torch.float32}, {torch.bfloat16}):
        raise ConfigError(
            f"the frozen weights are of {', '.join(sorted(map(str, found)))}",
            limit="layers are planned in float32 or bfloat16",
            hint=f"`from_pretrained(..., dtype=torch.bfloat16)`, or {_SLOTS}",
        )
    return found.pop()


def _has_plain_branches(model: PeftModel) -> bool:
    """Return whether no adapter has a bias, or a variant of LoRA that peft alone computes."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kinds = {type(kind) for layer in layers for kind in layer.lora_variant.values()}
    configs: list[Any] = list(model.peft_config.values())
    has_bias = any(config.lora_bias or config.bias != "none" for config in configs)
    return not has_bias and kinds <= {DoraLinearVariant}


def _adapter_spec(model: PeftModel, facts: ModelFacts) -> AdapterSpec:
    """Read off a model what of it trains.

    Raises:
        ConfigError: It is another adapter than LoRA, or several.
    """
    configs: list[Any] = list(model.peft_config.values())
    config = configs[0]
    if len(configs) != 1 or not isinstance(config, LoraConfig):
        raise ConfigError(
            f"the model has the adapters {', '.join(str(c.peft_type.value) for c in configs)}",
            limit="the steps of one LoRA adapter are planned",
            hint=_SLOTS,
        )
    adapted = (name for name, module in model.named_modules() if isinstance(module, LoraLayer))
    linears = {
        linear.name for layer in facts.layers for linear in layer.linears if linear.is_module
    }
    names = dict.fromkeys(name.rpartition(".")[2] for name in adapted)
    return AdapterSpec(
        rank=max([config.r, *(config.rank_pattern or {}).values()]),
        targets=tuple(name for name in names if name in linears),
        experts=bool(config.target_parameters),
        is_dora=config.use_dora,
        modules=tuple(config.modules_to_save or ()),
        has_dropout=config.lora_dropout > 0,
    )
