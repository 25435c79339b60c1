"""The plan's memory, traced: its largest micro-batch on the loaded model, without values.

Formulas describe the code of the models that they were made for; a trace runs this model's own
code. It comes after loading, so it may only change what is still open then: the numbers of slots
and of kept graphs, and where layer inputs wait. A number that the recipe names is kept or refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from finetune.planning.candidates import choose
from finetune.report.format import shown_graphs, shown_mib
from finetune.training.ranks import Ranks
from offload.engine.tracing.visits import trace_visits
from offload.errors import UnsupportedModelError
from offload.plan.memory.memory import TracedBytes
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def trace_memory(
    model: "PeftModel | PreTrainedModel",
    plan: Plan,
    *,
    open_requests: Sequence[PlanRequest],
    device: torch.device,
    ranks: Ranks,
) -> tuple[Plan, str]:
    """Return the plan with its memory traced, by the main rank for all, and a note about it.

    Args:
        model: With what trains, as it is to be attached.
        plan: The plan as formulas made it.
        open_requests: The requests that may still be chosen, the plan's own request among it.
        device: The device that this rank computes on.
        ranks: The processes that share the plan; the main one traces.

    Raises:
        DoesNotFitError: As traced, the step takes more memory than there is.
    """
    found = ranks.from_main(lambda: _trace(model, plan.request, device))
    if isinstance(found, str):
        return plan, f"Memory (formula): {_shown(plan)}; it could not be traced: {found}"
    traced_requests = [replace(request, traced=found) for request in open_requests]
    traced = choose(plan.facts, plan.machine, traced_requests).plan
    note = f"Memory (traced): {_shown(traced)}; by formula {shown_mib(plan.peak_bytes)}"
    if _settings(traced) != _settings(plan):
        note += f"; planned again: {_settings(traced)} in place of {_settings(plan)}"
    return traced, note


def _trace(
    model: "PeftModel | PreTrainedModel", request: PlanRequest, device: torch.device
) -> TracedBytes | str:
    """Trace the largest micro-batch; return the reason if torch or the model cannot be traced."""
    largest, is_cuda = request.largest, device.type == "cuda"
    try:
        return trace_visits(
            model,
            batch_size=largest.micro_batch_size,
            seq_len=largest.seq_len,
            is_padded=request.is_masked,
            head_chunk_tokens=min(largest.head_chunk_tokens, largest.label_tokens),
            capability=torch.cuda.get_device_capability(device) if is_cuda else None,
            plain_parts=largest.plain_parts
            if largest.code_on("cuda" if is_cuda else "cpu") == "fused"
            else None,
            mlp_chunk_tokens=largest.mlp_chunk_tokens,
        )
    except (RuntimeError, UnsupportedModelError) as error:
        # torch raises a RuntimeError (NotImplementedError is one) for operations that need values
        # or have no meta implementation. A model part that fails with it is refused.
        reason = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _shown(plan: Plan) -> str:
    where = "of device memory" if plan.machine.device == "cuda" else "for computing"
    return f"{shown_mib(plan.peak_bytes)} {where} at the peak"


def _settings(plan: Plan) -> str:
    place = "in RAM" if plan.request.is_stashed else "on the device"
    graphs = f"{shown_graphs(plan.num_kept_graphs)}, " if plan.num_kept_graphs else ""
    return f"{plan.num_slots} slots, {graphs}inputs {place}"
