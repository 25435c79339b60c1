"""Stream the layers of a language model through a few slots of device memory, exactly.

    import offload
    engine = offload.attach(model, num_slots=3, device="cpu")
    result = engine.forward_backward(micro_batches)
    engine.detach()

Importing this package is light: torch is loaded by `attach`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offload.errors import (
    CodecError,
    DoesNotFitError,
    MachineError,
    OffloadError,
    TransferError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from torch import nn

    from offload.engine.engine import Engine
    from offload.engine.host.store import Hold
    from offload.plan.codec import CodecName

__all__ = [
    "CodecError",
    "DoesNotFitError",
    "MachineError",
    "OffloadError",
    "TransferError",
    "UnsupportedModelError",
    "attach",
    "detach",
]


def attach(  # noqa: PLR0913 - the door to all of it
    model: "nn.Module",
    *,
    num_slots: int,
    codec: "CodecName" = "native",
    tier: Literal["ram", "disk"] = "ram",
    device: str = "cuda",
    stash: Literal["device", "host"] = "device",
    trained_weights: Literal["device", "host"] = "device",
    head_chunk_tokens: int = 1024,
    kept_graphs: int = 0,
    hold: "Hold | None" = None,
    store_dir: str | None = None,
) -> "Engine":
    """Take over a causal language model.

    The frozen weights of its decoder layers move to one block of host memory (page-locked for a
    GPU) and are copied into `num_slots` slots on the device as they are needed. What trains, the
    embeddings and the head stay on the device.

    Args:
        model: A Hugging Face causal language model on the host, or a peft model around one.
        num_slots: Layers that are on the device at a time, at least 2. As many as there are
            layers means resident.
        codec: How the layers' matrices are written while they wait: "native", as they are;
            "bf16", "fp16", "fp8", "int8" or "nf4", rounded to that; "bf16_packed", bf16 in three
            quarters of the bytes. They are read back once per visit. What trains stays as it is.
        tier: Where they wait: in host memory, or in a file.
        device: Where to compute, "cuda", "cuda:1" or "cpu".
        stash: Where the inputs of layers wait for the backward: on the device, or most on the host.
        trained_weights: Where weights of the layers live that train: on the device beside the
            slots, or on the host, streamed; then `engine.trained_parameters` go to the optimizer.
        head_chunk_tokens: Tokens whose logits exist at a time. A head that trains in 16 bits adds
            its gradient up in 16 bits, chunk by chunk.
        kept_graphs: Layers, from the last, whose activations stay on the device for the backward,
            which computes the others again.
        hold: Where the layers were loaded to (`offload.engine.host.stowing`); None copies them.
        store_dir: With tier "disk" and no hold: a directory for a file as large as the layers.

    Raises:
        UnsupportedModelError: The gradients could not be guaranteed to be right.
        TransferError: Memory cannot be page-locked, or the store not be written.
        CodecError: Weights cannot be written by the codec.
        OffloadError: Settings that do not go together, a device that is not there, or a model that
            is attached already.
    """
    from offload.engine.engine import Engine, EngineOptions
    from offload.engine.streams import device_named

    options = EngineOptions(
        num_slots=num_slots,
        codec=codec,
        tier=tier,
        store_dir=None if store_dir is None else Path(store_dir),
        stash=stash,
        trained_weights=trained_weights,
        head_chunk_tokens=head_chunk_tokens,
        num_kept_graphs=kept_graphs,
    )
    return Engine(model, device=device_named(device), options=options, hold=hold)


def detach(model: "nn.Module") -> None:
    """Give an attached model its weights back, where its engine is no longer at hand.

    Args:
        model: Attached by `attach`.

    Raises:
        OffloadError: It is not attached, or its engine was closed.
    """
    from offload.engine.engine import detach_model

    detach_model(model)
