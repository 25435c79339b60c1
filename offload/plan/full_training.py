"""The memory of plain training of all weights, nothing offloaded: what a plan is held against."""

from offload.plan.memory import CONTEXT, MemoryTerm
from offload.plan.optimizer import state_bytes
from offload.plan.parts import FP32_BYTES


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
    """Return what layers save without checkpointing, at `features` hidden sizes per token."""
    return features * hidden_size * num_tokens * num_layers * dtype_bytes
