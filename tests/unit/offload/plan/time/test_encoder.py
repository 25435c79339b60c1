"""The MLP of virtual tokens and prefixes is priced by what torch counts of peft's own."""

from typing import Any

import pytest
import torch
from peft import PrefixEncoder, PrefixTuningConfig, PromptEncoder, PromptEncoderConfig, TaskType
from torch.utils.flop_counter import FlopCounterMode

from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.trainable import prefix_spec, trained_parameters, virtual_shapes
from offload.plan.machine.machine import named_machine
from offload.plan.plan import plan
from offload.plan.time.costs import encoder_backward, encoder_forward, price
from offload.plan.time.pricer import Pricer
from tests.builders import byte_machine, qwen3_8b, request, workload

NUM = 20
FACTS = qwen3_8b(num_hidden_layers=2)
SIZES: dict[str, Any] = {
    "task_type": TaskType.CAUSAL_LM,
    "num_virtual_tokens": NUM,
    "num_layers": 2,
    "num_transformer_submodules": 1,
}
# keys of 8 heads with 128 features each; of p-tuning as wide as the model
SPECS = {
    "prefix_mlp": prefix_spec(FACTS, num_past=NUM, has_encoder=True),
    "p_tuning": AdapterSpec(
        rank=1, targets=(), experts=False, virtual=virtual_shapes(NUM, 4096, has_encoder=True)
    ),
}


def encoder_of(name: str) -> torch.nn.Module:
    if name == "p_tuning":
        of_tokens = PromptEncoderConfig(**SIZES, token_dim=4096, encoder_hidden_size=4096)
        return PromptEncoder(of_tokens)
    of_keys = PrefixTuningConfig(
        **SIZES, token_dim=1024, encoder_hidden_size=1024, prefix_projection=True
    )
    return PrefixEncoder(of_keys)


@pytest.mark.parametrize("name", SPECS)
def test_flops_and_weights_are_those_of_peft_s_encoder(name: str) -> None:
    at = Pricer(
        machine=named_machine("rtx4090"), facts=FACTS, workload=workload(adapter=SPECS[name])
    )
    with torch.device("meta"):
        encoder, tokens = encoder_of(name), torch.arange(NUM).unsqueeze(0)
    with FlopCounterMode(display=False) as forward:
        made = encoder(tokens)
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert encoder_forward(at).flops == forward.get_total_flops() > 0
    assert encoder_backward(at).flops == backward.get_total_flops() > 0
    assert trained_parameters(FACTS, SPECS[name]) == sum(p.numel() for p in encoder.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_bytes_are_mostly_those_of_its_weights_and_gradients(name: str) -> None:
    """Read once for each product, and a new gradient written, read and added to the sum."""
    at = Pricer(machine=byte_machine(2), facts=FACTS, workload=workload(adapter=SPECS[name]))
    in_linears = 4 * sum(a * b for a, b in (s for s in SPECS[name].virtual[1:] if len(s) > 1))
    forward_s, backward_s = (
        work(at).seconds(at.machine) for work in (encoder_forward, encoder_backward)
    )
    assert in_linears < forward_s < 1.1 * in_linears
    assert 5 * in_linears < backward_s < 1.1 * 5 * in_linears


def test_a_table_alone_has_no_products_and_a_step_with_an_encoder_takes_longer() -> None:
    machine = named_machine("rtx4090")
    table = prefix_spec(FACTS, num_past=NUM, has_encoder=False)
    at = Pricer(machine=machine, facts=FACTS, workload=workload(adapter=table))
    assert (encoder_forward(at).num_ops, encoder_backward(at).num_ops) == (0, 0)
    plain, with_mlp = (
        price(FACTS, machine, workload(adapter=one)) for one in (table, SPECS["prefix_mlp"])
    )
    # 4 layers' widths of 1,024 and one more, squared, in fp32
    weights_s = 4 * 5 * 1024**2 / machine.memory_bytes_per_s.value
    assert with_mlp.front_s >= plain.front_s
    more_s = with_mlp.front_backward_s - plain.front_backward_s
    assert with_mlp.front_backward_s > 5 * weights_s
    of_table, of_mlp = (
        plan(FACTS, machine, request(workload(adapter=one))).step_s
        for one in (table, SPECS["prefix_mlp"])
    )
    assert of_mlp >= of_table + 8 * more_s
