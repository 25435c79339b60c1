"""Stream the layers of a language model through a few slots of device memory, exactly.

    import offload
    engine = offload.attach(model, num_slots=3, device="cpu")
    result = engine.forward_backward(micro_batches)
    engine.detach()

Importing this package is light: torch is loaded by `attach`.
"""

from typing import TYPE_CHECKING, Literal

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
    model: "nn.Module",
    *,
    num_slots: int,
    device: str = "cuda",
    stash: Literal["device", "host"] = "device",
    trained_weights: Literal["device", "host"] = "device",
    head_chunk_tokens: int = 1024,
) -> "Engine":
    """Take over a causal language model.

    The frozen weights of its decoder layers move to one block of host memory (page-locked for a
    GPU) and are copied into `num_slots` slots on the device as they are needed. What trains, the
    embeddings and the head stay on the device.

    Args:
        model: A Hugging Face causal language model on the host, or a peft model around one.
        num_slots: Layers that are on the device at a time, at least 2. As many as there are
            layers means resident.
        device: Where to compute, "cuda", "cuda:1" or "cpu".
        stash: Where the inputs of layers wait for the backward: "host" takes device memory for a
            few of them only, and the link's other direction for the rest.
        trained_weights: Where weights of the layers live that train: on the device beside the
            slots, or on the host, streamed like the frozen ones. Then their gradients arrive on
            the host too: give `engine.trained_parameters` to the optimizer.
        head_chunk_tokens: Tokens whose logits exist at a time.

    Raises:
        UnsupportedModelError: The gradients could not be guaranteed to be right.
        TransferError: Host memory cannot be page-locked.
    """
    import torch

    from offload.engine.engine import Engine, EngineOptions
    from offload.engine.streams import open_device

    return Engine(
        model,
        device=open_device(torch.device(device), is_staged=False),
        options=EngineOptions(
            num_slots=num_slots,
            stash=stash,
            trained_weights=trained_weights,
            head_chunk_tokens=head_chunk_tokens,
        ),
    )
