"""Plans of recipes on cards as they were settled: what a change must not move by mistake.

    python -m tests.golden.plans    write tests/golden/plans.json by the code as it is

A change that is meant to move plans writes them anew, and its commit says why. Machines are the
named cards with 64 GiB of RAM, so nothing is measured.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.errors import DoesNotFitError
from offload.plan.plan import Plan
from tests.bench.bench_launches import planned
from tests.bench.record import ROOT

FILE = Path(__file__).with_name("plans.json")
RECIPES = (
    *("qwen30b_lora_5090", "qwen30b_qlora_4060ti", "qwen30b_dpo_5090", "gptoss_20b_16gb"),
    *("qwen3_8b_lora_3060", "qwen3_8b_full_4090", "qwen3_8b_kto_4090", "qwen3_32b_24gb"),
    *("llama31_70b_24gb", "gemma3_4b_8gb"),
)
CHANGES = {"qwen3_8b_full_4090": ["model.path=Qwen/Qwen3-4B"]}  # 8B takes 128 GiB of RAM
CARDS = ("rtx3060", "rtx3090", "rtx4090", "rtx5090")


def pairs() -> Iterator[str]:
    """Yield the names of all pairs of a recipe and a card."""
    for recipe in RECIPES:
        yield from (f"{recipe} {card}" for card in CARDS)


def figures(pair: str) -> Mapping[str, Any] | None:
    """Return what a plan decides and predicts, sizes in bytes and times in seconds.

    Args:
        pair: A recipe and a card.

    Returns:
        The figures; None if nothing fits.
    """
    recipe, card = pair.split()
    try:
        plan = planned(str(ROOT / f"recipes/{recipe}.yaml"), card, CHANGES.get(recipe, []))
    except DoesNotFitError:
        return None
    return _figures(plan)


def _figures(plan: Plan) -> Mapping[str, Any]:
    request, residency, schedule = plan.request, plan.residency, plan.schedule
    return {
        "codec": request.typical.codec,
        "order": request.order.value,
        "micro_batches": request.num_micro_batches,
        "micro_batch_size": request.typical.micro_batch_size,
        "seq_len": request.typical.seq_len,
        "inputs_in_ram": request.is_stashed,
        "on_disk": request.is_on_disk,
        "head_chunk": request.typical.head_chunk_tokens,
        "slots": plan.num_slots,
        "kept_graphs": plan.num_kept_graphs,
        "kept_outputs": residency.num_kept_outputs,
        "sent_outputs": residency.num_sent_outputs,
        "sent_graphs": residency.num_sent_graphs,
        "loads": schedule.num_loads,
        "h2d_bytes": schedule.h2d_bytes,
        "d2h_bytes": schedule.d2h_bytes,
        "break_even_tokens": plan.break_even_tokens,
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "phases_s": dict(plan.predict().phases()),
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "device_memory": {term.name: term.num_bytes for term in plan.device_memory},
        "host_memory": {term.name: term.num_bytes for term in plan.host_memory},
    }


def written() -> Mapping[str, Any]:
    """Return the figures of each pair as they were settled."""
    found: Mapping[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Write the file."""
    lines = (f"{json.dumps(pair)}: {json.dumps(figures(pair))}" for pair in pairs())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
