"""The memory of training all weights without offloading, which plans are compared with."""

from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import state_bytes
from offload.plan.memory.memory import CONTEXT, MemoryTerm


def full_training_terms(
    *,
    num_parameters: int,
    dtype_bytes: int,
    activation_bytes: int,
    context_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """List the memory of training every weight with AdamW; below fp32 a master copy is kept."""
    master = FP32_BYTES * num_parameters if dtype_bytes != FP32_BYTES else 0
    return (
        MemoryTerm(name="weights", num_bytes=dtype_bytes * num_parameters),
        MemoryTerm(name="fp32 copy", num_bytes=master),
        MemoryTerm(name="gradients", num_bytes=dtype_bytes * num_parameters),
        MemoryTerm(name="optimizer states", num_bytes=state_bytes([(num_parameters,)], "adamw")),
        MemoryTerm(name="activations", num_bytes=activation_bytes),
        MemoryTerm(name=CONTEXT, num_bytes=context_bytes),
    )


def activation_bytes(
    *, features: int, num_tokens: int, hidden_size: int, num_layers: int, dtype_bytes: int
) -> int:
    """Return what layers save without checkpointing: `features` hidden sizes per token."""
    return features * hidden_size * num_tokens * num_layers * dtype_bytes
