"""Prices against what a card took: the committed profiles of an H200, part by part.

They are of peft's branches in fp32, of layers and loss by the models' own code, and of experts by
Triton's kernels; 6 layers of each model, and 8,192 tokens a micro-batch.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from offload.plan.facts.facts import AdapterSpec, model_facts
from offload.plan.machine.machine import Implementation, Machine, Rate, named_machine
from offload.plan.time.costs import price, with_measured_experts
from tests.bench.gpu.models import ATTENTION, fields
from tests.bench.record import ROOT
from tests.builders import workload

RESULTS = ROOT / "tests/bench/results"
TOLERANCE = 0.15
ADAPTERS = {
    "qwen3-8b": AdapterSpec(
        rank=16, targets=(*ATTENTION, "gate_proj", "up_proj", "down_proj"), experts=False
    ),
    "qwen3-30b-a3b": AdapterSpec(rank=8, targets=ATTENTION, experts=True),
}


def rows(code: str, case: str) -> dict[str, dict[str, Any]]:
    (file,) = RESULTS.glob(f"*-{code}.jsonl")
    each = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["part"]: row for row in each if row["case"] == case}


PROFILE = rows("cffe8a3b", "profile")
TRIAL = rows("374ebad4", "probe")["experts, 8192 tokens"]


def took(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a layer's visits and of the head, of one micro-batch."""
    phases, num = row["phases_s"], row["num_micro_batches"]
    return {
        "forward": phases["forward"] / row["num_layers"] / num,
        "backward": phases["backward"] / row["num_layers"] / num,
        "head and loss": phases["head and loss"] / num,
    }


def named() -> Machine:
    """Return the card as a plan knows it by name, with the expert kernels of the profile."""
    triton = Implementation(value="triton", source="as the profile")
    return replace(named_machine("h200"), experts_implementation=triton)


def probed(shape: str) -> Machine:
    """Return the card with the rates that its probe and its trial of experts found."""
    rates: dict[str, float] = PROFILE[shape]["rates"]["bfloat16"]
    changes: dict[str, Any] = {name: Rate(value=x, source="measured") for name, x in rates.items()}
    machine = replace(named(), **changes)
    if shape != "qwen3-30b-a3b":
        return machine
    return with_measured_experts(
        machine,
        model_facts(fields(shape)),
        workload(seq_len=8192, adapter=ADAPTERS[shape]),
        implementation="triton",
        seconds=TRIAL["seconds"]["triton"],
    )


@pytest.mark.parametrize("grade", ["named", "probed"])
@pytest.mark.parametrize("shape", ADAPTERS)
def test_each_part_is_priced_within_15_percent_of_what_a_card_took(shape: str, grade: str) -> None:
    machine = named() if grade == "named" else probed(shape)
    load = replace(
        workload(seq_len=8192, adapter=ADAPTERS[shape]), label_tokens=8191, head_chunk_tokens=1024
    )
    costs = price(model_facts(fields(shape)), machine, load)
    layer = costs.layers[0]
    said = {
        "forward": layer.forward_s,
        "backward": layer.backward_s,
        "head and loss": costs.tail_s,
    }
    assert said == pytest.approx(took(PROFILE[shape]), rel=TOLERANCE)
