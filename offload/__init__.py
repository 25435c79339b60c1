"""Stream the layers of a language model through a few slots of device memory, exactly.

    import offload
    engine = offload.attach(model, num_slots=3, device="cpu")
    result = engine.forward_backward(micro_batches)
    engine.detach()

Importing this package is light: torch is loaded by `attach`.
"""

from typing import TYPE_CHECKING

from offload.errors import (
    DoesNotFitError,
    MachineError,
    OffloadError,
    TransferError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from torch import nn

    from offload.engine.engine import Engine

__all__ = [
    "DoesNotFitError",
    "MachineError",
    "OffloadError",
    "TransferError",
    "UnsupportedModelError",
    "attach",
]


def attach(
    model: "nn.Module", *, num_slots: int, device: str = "cuda", head_chunk_tokens: int = 1024
) -> "Engine":
    """Take over a causal language model whose base weights are frozen.

    The frozen weights of its decoder layers move to one block of host memory (page-locked for a
    GPU) and are copied into `num_slots` slots on the device as they are needed. What trains, the
    embeddings and the head stay on the device.

    Args:
        model: A Hugging Face causal language model on the host, or a peft model around one.
        num_slots: Layers that are on the device at a time, at least 2. As many as there are
            layers means resident.
        device: Where to compute, "cuda", "cuda:1" or "cpu".
        head_chunk_tokens: Tokens whose logits exist at a time.

    Raises:
        UnsupportedModelError: The gradients could not be guaranteed to be right.
        TransferError: Host memory cannot be page-locked.
    """
    import torch

    from offload.engine.engine import Engine
    from offload.engine.streams import open_device

    return Engine(
        model,
        num_slots=num_slots,
        device=open_device(torch.device(device)),
        head_chunk_tokens=head_chunk_tokens,
    )
