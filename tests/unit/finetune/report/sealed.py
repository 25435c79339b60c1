"""A small plan whose prediction is sealed, and files that are changed after."""

from pathlib import Path

from offload.plan.machine.machine import named_machine
from offload.plan.plan import Plan, plan
from tests.builders import lora, qwen3_8b, request, workload

FACTS = qwen3_8b(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
)

WORKLOAD = workload(seq_len=64, adapter=lora(rank=4, targets=("q_proj",)))


def tiny_plan() -> Plan:
    asked = request(WORKLOAD, num_micro_batches=2, num_slots=2, is_slab_shared=True)
    return plan(FACTS, named_machine("rtx3060"), asked)


def forge(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.chmod(0o644)
    file.write_text(text.replace(old, new, 1))
