"""The most bytes of tensors that are live in a step of DPO, against what the plan counts.

Rows are long, so that log-probabilities of all pairs over the vocabulary would be many times what
there is: nothing of that size is ever made.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from offload.engine.engine import Engine
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.plan.facts.facts import model_facts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import named_machine
from offload.plan.request import ObjectiveCost
from offload.plan.schedule.schedule import Residency
from tests.builders import lora, request, workload
from tests.parity.objectives import ByRow, pairs, sigmoid
from tests.parity.steps import OPTIONS
from tests.tiers import mostly_slow

NUM_MICRO_BATCHES, HEAD_CHUNK, VOCABULARY = 3, 64, 4096
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
}
LENGTHS = (256, pytest.param(1024, marks=pytest.mark.slow))
# Before a step: weights, their slots and gradients; they are made outside of the count.
STANDING = {
    "slots",
    "embeddings, norm and head",
    "adapters",
    "gradients",
    "optimizer states",
    "fragmentation",
    "context",
}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Of a step: the most live bytes, and those of the largest tensor."""

    peak_bytes: int
    largest_bytes: int


def counted(length: int, *, num_scored: int = 0) -> Counted:
    torch.manual_seed(0)
    model = get_peft_model(
        Qwen3ForCausalLM(Qwen3Config(**CONFIG)),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    options = replace(OPTIONS, head_chunk_tokens=HEAD_CHUNK)
    engine = Engine(model.train(), device=torch.device("cpu"), options=options)
    batches = pairs(*(1,) * NUM_MICRO_BATCHES, width=length)
    scored = pairs(*(1,) * num_scored, width=length, seed=7)
    objective = ByRow(sigmoid, num_trained=2 * NUM_MICRO_BATCHES)
    memory = LiveBytes()
    try:
        # makes gradients and buffers
        engine.forward_backward(batches, objective=objective, scored=scored)
        with Tracer(memory):
            memory.reset_peak()
            engine.forward_backward(batches, objective=objective, scored=scored)
        return Counted(peak_bytes=memory.peak_bytes, largest_bytes=memory.largest_bytes)
    finally:
        engine.detach()


def planned(length: int, *, num_scored: int) -> dict[str, int]:
    micro_batch = workload(
        micro_batch_size=2,
        seq_len=length,
        label_tokens=2 * length - 8,
        head_chunk_tokens=HEAD_CHUNK,
        adapter=lora(rank=2),
        dtype_bytes=4,
    )
    asked = request(
        micro_batch,
        num_micro_batches=NUM_MICRO_BATCHES,
        num_slots=2,
        objective=ObjectiveCost(has_reference=True, scored_frac=num_scored / NUM_MICRO_BATCHES),
    )
    machine = replace(named_machine("rtx4090"), device="cpu")
    facts = model_facts({"model_type": "qwen3", **CONFIG})
    terms = MemoryNeeds.of(facts, machine, asked).device(Residency(num_slots=2))
    return {term.name: term.num_bytes for term in terms if term.name not in STANDING}


@pytest.mark.thorough
@pytest.mark.parametrize("num_scored", mostly_slow({"dpo": 0, "kto": NUM_MICRO_BATCHES}, "dpo"))
@pytest.mark.parametrize("length", LENGTHS)
def test_the_peak_of_a_step_with_a_reference_is_the_plans(length: int, num_scored: int) -> None:
    found = counted(length, num_scored=num_scored)
    plan = planned(length, num_scored=num_scored)
    assert sum(plan.values()) == pytest.approx(found.peak_bytes, rel=0.05), plan


@pytest.mark.thorough
@pytest.mark.parametrize("length", LENGTHS)
def test_no_tensor_of_a_step_holds_the_vocabulary_for_all_tokens(length: int) -> None:
    found = counted(length)
    of_all_bytes = 4 * 2 * NUM_MICRO_BATCHES * length * VOCABULARY
    assert found.largest_bytes <= 4 * max(HEAD_CHUNK * VOCABULARY, 2 * length * 256)
    assert found.peak_bytes < of_all_bytes / 2
