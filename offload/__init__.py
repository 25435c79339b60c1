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
    SluiceError,
    StoreError,
    TransferError,
    UnsupportedModelError,
)
from offload.plan.request import HEAD_CHUNK_TOKENS

if TYPE_CHECKING:
    from torch import nn

    from offload.engine.engine import Engine
    from offload.engine.host.store import Backing

__all__ = [
    "CodecError",
    "DoesNotFitError",
    "MachineError",
    "OffloadError",
    "SluiceError",
    "StoreError",
    "TransferError",
    "UnsupportedModelError",
    "attach",
    "detach",
]


def attach(  # noqa: PLR0913 - the door to all of it
    model: "nn.Module",
    *,
    num_slots: int,
    codec: str = "native",
    tier: Literal["ram", "disk"] = "ram",
    device: str = "cuda",
    stash: Literal["device", "host"] = "device",
    trained_weights: Literal["device", "host"] = "device",
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS,
    kept_graphs: int = 0,
    kept_outputs: int = 0,
    sent_outputs: int = 0,
    sent_graphs: int = 0,
    mlp_chunk_tokens: int | None = None,
    layer_kernels: Literal["plain", "fused"] = "plain",
    embeddings: Literal["device", "host"] = "device",
    head: Literal["device", "host"] = "device",
    backing: "Backing | None" = None,
    store_dir: str | None = None,
) -> "Engine":
    """Take over a causal language model.

    The frozen weights of its decoder layers move to one block of host memory (page-locked for a
    GPU) and are copied into `num_slots` slots on the device as they are needed. What trains, the
    embeddings and the head stay on the device, unless the arguments say otherwise.

    Args:
        model: A Hugging Face causal language model on the host, or a peft model around one.
        num_slots: Layers that are on the device at a time, at least 2. As many as there are
            layers means resident.
        codec: How the layers' matrices are stored off the device, by the names that
            `offload.codec` of a recipe has: "native" is unchanged. Others are decoded once per
            visit. Trained weights are never encoded.
        tier: Where the layers are stored: in host memory, or in a file.
        device: Where to compute, "cuda", "cuda:1" or "cpu".
        stash: Where layer inputs are kept for the backward: on the device, or most on the host.
        trained_weights: Where the layers' trained weights are kept: on the device next to the
            slots, or on the host, streamed. Pass `engine.trained_parameters` to the optimizer.
        head_chunk_tokens: Tokens whose logits exist at a time. A head that trains in 16 bits adds
            its gradient up in 16 bits, chunk by chunk.
        kept_graphs: Number of last layers without activation checkpointing: their activations
            stay on the device for the backward, which recomputes those of the others.
        kept_outputs: Number of layers, the last checkpointed ones, whose attention is not computed
            again: its output and log-sum-exp stay on the device. Only fused attention is recorded.
        sent_outputs: Number of the layers below whose outputs go to host memory and come back.
        sent_graphs: Number of the layers below those with kept graphs that are not checkpointed
            either: what autograd saves of them goes to host memory and comes back.
        mlp_chunk_tokens: Tokens of a micro-batch that an MLP computes at a time, so that long
            sequences fit; None computes all at once. The gradients differ by rounding.
        layer_kernels: "fused" computes RMSNorms, rotary embedding and gated activations by fused
            operators where each is proven to compute what the model's own code does, within
            rounding: Triton kernels on CUDA, which no card has run yet; plain torch on a CPU, which
            is slower than "plain". An MLP that is computed some tokens at a time keeps its gate.
        embeddings: Where the input embedding's weight is: on the device, or on the host, from where
            each micro-batch brings the rows of its tokens. It trains there only with
            `trained_weights` "host".
        head: Where the output head's weight is: on the device, or on the host, from where a step
            copies it once over slots that are not needed meanwhile. It may train with
            `trained_weights` "host". One weight of embedding and head is in one place for both, and
            frozen on the host.
        backing: Where the layers were loaded to (`offload.engine.model.capture`); None copies
            them.
        store_dir: With tier "disk" and no backing: a directory for a file as large as the layers.

    Raises:
        UnsupportedModelError: Correct gradients cannot be guaranteed.
        TransferError: Memory cannot be page-locked, or the store cannot be written.
        CodecError: The codec cannot write these weights.
        OffloadError: Settings contradict each other, the device does not exist, or the model is
            already attached.
    """
    from offload.engine.engine import Engine, EngineOptions
    from offload.engine.streams import device_named

    opened = device_named(device)
    options = EngineOptions(
        num_slots=num_slots,
        codec=codec,
        tier=tier,
        store_dir=None if store_dir is None else Path(store_dir),
        stash=stash,
        trained_weights=trained_weights,
        head_chunk_tokens=head_chunk_tokens,
        num_kept_graphs=kept_graphs,
        num_kept_outputs=kept_outputs,
        num_sent_outputs=sent_outputs,
        num_sent_graphs=sent_graphs,
        mlp_chunk_tokens=mlp_chunk_tokens,
        layer_kernels=layer_kernels,
        joins_rows=opened.type == "cuda",
        embeddings=embeddings,
        head=head,
    )
    return Engine(model, device=opened, options=options, backing=backing)


def detach(model: "nn.Module") -> None:
    """Give an attached model its weights back, without its engine at hand.

    Args:
        model: Attached by `attach`.

    Raises:
        OffloadError: The model is not attached, or its engine was closed.
    """
    from offload.engine.model.seal import detach_model

    detach_model(model)
