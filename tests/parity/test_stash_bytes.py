"""What micro-batches take on the device while their layer inputs wait on the host, counted."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.tracing.allocator import LiveBytes
from offload.engine.tracing.tracer import Tracer
from offload.plan.schedule.schedule import NUM_FETCHED, NUM_KEPT
from tests.parity.steps import OPTIONS, with_lora

T, D, NUM_LAYERS = 64, 128, 7
INPUT_BYTES = T * D * 4


def peak_bytes(options: EngineOptions, num_micro_batches: int) -> int:
    """Return the most bytes of tensors that are live in a second step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=D,
        intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=64,
    )
    engine = Engine(
        with_lora(LlamaForCausalLM(config)), device=torch.device("cpu"), options=options
    )
    ids = torch.zeros(1, T, dtype=torch.long)
    batches = [{"input_ids": ids, "labels": ids}] * num_micro_batches
    memory = LiveBytes()
    try:
        with Tracer(memory):
            engine.forward_backward(batches)
            memory.reset_peak()
            engine.forward_backward(batches)
            return memory.peak_bytes
    finally:
        engine.detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_hidden"),
    [
        (OPTIONS, NUM_LAYERS + 1),
        (replace(OPTIONS, stash="host"), NUM_KEPT + NUM_FETCHED + 1),
    ],
    ids=["kept", "stashed"],
)
def test_each_micro_batch_takes_so_many_hidden_states(
    options: EngineOptions, num_hidden: int
) -> None:
    """As the plan counts: layer inputs, and the hidden state or its gradient.

    Of stashed ones two layers' buffers, the last layer's input and the tail's, and that of the
    first layer, which the front holds.
    """
    two, five = peak_bytes(options, 2), peak_bytes(options, 5)
    assert (five - two) / 3 == pytest.approx(num_hidden * INPUT_BYTES, rel=0.05)
