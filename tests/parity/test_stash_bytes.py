"""What micro-batches take on the device while their layer inputs wait on the host, counted."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.plan.schedule.schedule import NUM_FETCHED
from tests.parity.steps import OPTIONS

T, D, NUM_LAYERS = 64, 128, 7
INPUT_BYTES = T * D * 4


STASHED = replace(OPTIONS, stash="host")


def peak_bytes(
    options: EngineOptions, num_micro_batches: int, *, modules: list[str] | None = None
) -> int:
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
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules)
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    engine = Engine(model, device=torch.device("cpu"), options=options)
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
    ("options", "num_hidden", "modules"),
    [
        (OPTIONS, NUM_LAYERS + 1, None),
        (STASHED, NUM_FETCHED + 2, None),
        (STASHED, NUM_FETCHED + 2, ["embed_tokens"]),
    ],
    ids=["kept", "stashed", "stashed, with a gradient by the front"],
)
def test_each_micro_batch_takes_so_many_hidden_states(
    options: EngineOptions, num_hidden: int, modules: list[str] | None
) -> None:
    """As the plan counts: layer inputs, and the hidden state or its gradient.

    Of stashed ones two layers' buffers, the last layer's input and the tail's.
    """
    two, five = (peak_bytes(options, num, modules=modules) for num in (2, 5))
    assert (five - two) / 3 == pytest.approx(num_hidden * INPUT_BYTES, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("num_graphs", [0, 1, 3, NUM_LAYERS - 1])
def test_a_stash_saves_the_inputs_of_layers_that_keep_no_graph(num_graphs: int) -> None:
    """As the plan counts, whatever a graph takes: it holds its layer's input either way."""
    kept = peak_bytes(replace(OPTIONS, num_kept_graphs=num_graphs), 1)
    stashed = peak_bytes(replace(STASHED, num_kept_graphs=num_graphs), 1)
    num_left = max(0, NUM_LAYERS - NUM_FETCHED - max(1, num_graphs))
    assert kept - stashed == num_left * INPUT_BYTES
