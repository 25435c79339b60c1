"""A model's layers bound to slots on a device: everything a pass needs."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from offload.engine.executor import Executor
from offload.engine.host.embedding import HostEmbedding, HostHead, own_weight, without_adapter
from offload.engine.host.pagelock import aligned_empty
from offload.engine.host.slab import Stash
from offload.engine.host.weights import HostWeights
from offload.engine.host_gradients import HostGradients, LateUpdates
from offload.engine.model import placement
from offload.engine.model.layers import LayeredModel
from offload.engine.results import Computing, Places
from offload.engine.slots import Slots
from offload.engine.streams import Device
from offload.errors import OffloadError
from offload.plan.facts.codec import CodecName
from offload.plan.facts.workload import FusedPart, WeightPlace
from offload.plan.machine.machine import Tier
from offload.plan.memory.memory import HEAD, LOCKED_TERMS, ROWS, SENT, STASH, locked_update_bytes
from offload.plan.plan import Plan
from offload.plan.schedule.schedule import MIN_SLOTS, Order, Residency, TransferSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerKernels = Literal["plain", "fused"]
_LOCKED = frozenset(LOCKED_TERMS) - {HEAD}  # it depends on the model's own head


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How a model is attached; see `offload.attach`.

    `leaves_out` is whether recomputes leave out products whose values nothing reads: no bit of a
    gradient depends on it. `mlp_chunk_tokens` is how many tokens an MLP computes at a time; None
    for all of a micro-batch. `layer_kernels` is what computes norms, rotary embedding and gated
    activations: the model's own code, or fused operators where that is proven to be the same, but
    for `plain_parts`.
    `joins_rows` is whether attention of packed rows is one call where torch's kernel computes it.
    `embeddings` is where the input embedding's weight is; of one on the host, rows are brought.
    `head` is where the output head's weight is; one on the host computes in the slots.
    `order` is that of a step's loops: over layers first, or over micro-batches.
    `locked_bytes` is what a plan page-locks in addition to layers and head: layer inputs, rows of
    the embedding, and what else of activations is sent.
    """

    num_slots: int
    codec: CodecName
    tier: Tier
    store_dir: Path | None
    stash: Literal["device", "host"]
    trained_weights: Literal["device", "host"]
    head_chunk_tokens: int
    num_kept_graphs: int
    leaves_out: bool = True
    num_kept_outputs: int = 0
    num_sent_outputs: int = 0
    num_sent_graphs: int = 0
    mlp_chunk_tokens: int | None = None
    layer_kernels: LayerKernels = "plain"
    plain_parts: frozenset[FusedPart] = frozenset()
    joins_rows: bool = False
    embeddings: WeightPlace = "device"
    head: WeightPlace = "device"
    locked_bytes: int = 0
    order: Order = Order.LAYER_MAJOR

    def others_to_lock(self, model: "PreTrainedModel") -> int:
        """Return what is to be page-locked after the layers, and has no other way to the device.

        Raises:
            UnsupportedModelError: As for `HostHead`.
        """
        if self.head == "device":
            return self.locked_bytes
        head = own_weight(model, model.get_output_embeddings(), embeddings=self.embeddings)
        return self.locked_bytes + head.nbytes

    @property
    def uses_host_lane(self) -> bool:
        """Whether a thread works on the host: on updates, or on rows of the embedding."""
        return self.trained_weights == "host" or self.embeddings == "host"

    @property
    def records_attention(self) -> bool:
        """Whether any attention is recorded; compiled layers are computed whole."""
        return self.leaves_out and bool(self.num_kept_outputs + self.num_sent_outputs)

    @property
    def residency(self) -> Residency:
        """What of the layers stays on the device; compiled layers' attention is computed whole."""
        records = self.records_attention
        return Residency(
            num_slots=self.num_slots,
            num_kept_graphs=self.num_kept_graphs,
            num_sent_graphs=self.num_sent_graphs,
            num_kept_outputs=self.num_kept_outputs if records else 0,
            num_sent_outputs=self.num_sent_outputs if records else 0,
        )

    @classmethod
    def planned(cls, plan: Plan) -> "EngineOptions":
        """Return the options with which an engine runs a plan."""
        asked = plan.request
        code = asked.typical.code_on(plan.machine.device)
        return cls(
            num_slots=plan.residency.num_slots,
            codec=asked.typical.codec,
            tier="disk" if asked.is_on_disk else "ram",
            store_dir=None,
            stash="host" if asked.is_stashed else "device",
            trained_weights="device" if asked.typical.adapter.whole is None else "host",
            head_chunk_tokens=asked.typical.head_chunk_tokens,
            num_kept_graphs=plan.residency.num_kept_graphs,
            leaves_out=asked.typical.leaves_out,
            num_kept_outputs=plan.residency.num_kept_outputs,
            num_sent_outputs=plan.residency.num_sent_outputs,
            num_sent_graphs=plan.residency.num_sent_graphs,
            layer_kernels="fused" if code == "fused" else "plain",
            plain_parts=asked.typical.plain_parts,
            mlp_chunk_tokens=asked.typical.mlp_chunk_tokens,
            embeddings=asked.typical.embeddings,
            head=asked.typical.head,
            locked_bytes=sum(one.num_bytes for one in plan.host_memory if one.name in _LOCKED)
            + locked_update_bytes(asked.typical),
            order=asked.order,
            joins_rows=any(
                asked.typical.joins_rows(layer.attention, is_cuda=plan.machine.device == "cuda")
                for layer in plan.facts.layers
            ),
        )

    def within(self, num_layers: int) -> "EngineOptions":
        """Return the options for a model of so many layers; it has no more slots than layers.

        Raises:
            OffloadError: There are too few slots, or more kept graphs or outputs than layers.
        """
        if self.num_slots < MIN_SLOTS:
            raise OffloadError(
                f"num_slots is {self.num_slots}",
                limit=f"a layer computes in one slot while the next arrives: at least {MIN_SLOTS}",
                hint=f"`num_slots={MIN_SLOTS}`",
            )
        for name in ("kept_graphs", "kept_outputs", "sent_outputs", "sent_graphs"):
            num = getattr(self, f"num_{name}")
            if not 0 <= num <= num_layers:
                raise OffloadError(
                    f"{name} is {num}",
                    limit=f"it counts layers, of which there are {num_layers}",
                    hint=f"`{name}={min(max(0, num), num_layers)}`",
                )
        return replace(self, num_slots=min(self.num_slots, num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Everything a pass needs.

    Attributes:
        executor: What runs the passes.
        places: Where their ops move things from and to.
        sizes: Sizes of the transfers, in bytes.
    """

    executor: Executor
    places: Places
    sizes: TransferSizes


def bind(
    model: nn.Module,
    layered: LayeredModel,
    host: HostWeights,
    *,
    device: Device,
    options: EngineOptions,
) -> Bound:
    """Allocate the slots, bind the layers to them, and move everything else to the device.

    Args:
        model: The model as attached, adapters included.
        layered: The model inside it.
        host: Where its layers are stored.
        device: Where it computes.
        options: How the model is attached.
    """
    records, torch_device = host.records, device.torch_device
    allocate_device = partial(_allocate, torch_device)
    placement.require_values(model, records)
    if options.layer_kernels == "fused":
        layered.fuse(options.plain_parts)
    layered.joins_rows = options.joins_rows
    host_gradients = HostGradients(
        records,
        host.layers if options.trained_weights == "host" else (),
        names={id(parameter): name for name, parameter in model.named_parameters()},
        allocate_host=host.blocks.allocate,
        allocate_device=allocate_device,
    )
    stash, sent, rows = (
        Stash(
            name,
            allocate_host=host.blocks.allocate,
            free_host=_freeing(host, device),
            torch_device=torch_device,
        )
        for name in (STASH, SENT, ROWS)
    )
    head, layered.unread_head = None, nullcontext
    head_module = layered.model.get_output_embeddings()
    if options.head == "host":
        head = HostHead(
            layered.model, head_module, blocks=host.blocks, embeddings=options.embeddings
        )
        layered.unread_head = head.unread
    layered.embedding = None
    if options.embeddings == "host":  # after the head, which holds a weight of both
        layered.embedding = HostEmbedding(
            layered.model,
            layered.model.get_input_embeddings(),
            rows=rows,
            head=without_adapter(head_module),
            is_head_on_host=head is not None,
        )
    on_host = [id(one.weight) for one in (layered.embedding, head) if one is not None]
    placement.move_the_rest(layered, records, torch_device, on_host=on_host)
    head_bytes = 0 if head is None else head.num_bytes
    slots = Slots(
        records,
        num_slots=options.num_slots,
        allocate_device=allocate_device,
        staging=host.staging,
        head_bytes=head_bytes,
    )
    if head is not None and slots.head is not None:
        head.compute_in(slots.head)
    places = Places(
        source=host.source,
        slots=slots,
        stash=stash,
        sent=sent,
        host_gradients=host_gradients,
        updates=LateUpdates(host_gradients),
        embedding=layered.embedding,
        head=head,
    )
    computing = Computing(
        head_chunk_tokens=min(options.head_chunk_tokens, layered.max_positions),
        leaves_out=options.leaves_out,
        records_attention=options.records_attention,
        mlp_chunk_tokens=options.mlp_chunk_tokens,
    )
    return Bound(
        executor=Executor(model=layered, places=places, device=device, computing=computing),
        places=places,
        sizes=TransferSizes(
            layer_bytes=tuple(record.num_bytes for record in records),
            gradient_bytes=host_gradients.gradient_bytes,
            decoded_bytes=tuple(record.decoded_bytes for record in records),
            piece_bytes=host.piece_bytes,
            num_staging=len(host.staging),
            head_bytes=head_bytes,
        ),
    )


def _allocate(torch_device: torch.device, num_bytes: int) -> torch.Tensor:
    if torch_device.type == "cpu":
        return aligned_empty(num_bytes)  # a disk is read straight into it
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch_device)


def _freeing(host: HostWeights, device: Device) -> Callable[[torch.Tensor], None]:
    """Return a function that frees host memory after the device has finished all issued work."""

    def free(block: torch.Tensor) -> None:
        device.finish()
        host.blocks.free(block)

    return free
