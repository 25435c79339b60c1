"""The host side of an attached model: where its layers are stored, and how they are transferred.

Three things are decided here, once, and each is reported in a note:

- where the layers are: in the slab, or in a store on disk;
- how they are copied: straight from page-locked memory, through a ring of page-locked buffers that
  a thread fills, or pageable by the driver (see `pagelock`);
- which NUMA node that memory and the threads are near (see `numa`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import nn

from offload.engine.codec import NATIVE, Form
from offload.engine.host import numa, pagelock
from offload.engine.host.numa import bind_memory
from offload.engine.host.pagelock import aligned_empty, trim_heap
from offload.engine.host.slab import (
    Allocate,
    Field,
    HostBlocks,
    Record,
    Slab,
    give_back,
    lay_out,
)
from offload.engine.host.store import Store, StoreWriter
from offload.engine.internals import bare, num_writes, refer
from offload.engine.memory_meter import Arena
from offload.errors import OffloadError
from offload.plan.facts.optimizer import HOST_GRADIENTS
from offload.plan.machine.machine import Tier
from offload.plan.memory.memory import LAYER_GRADIENTS, SLAB, STAGING
from offload.plan.schedule.schedule import NUM_GRADIENT_BUFFERS, NUM_STAGING, PIECE_BYTES

# ---------------------------------------------------------------------------------------------
# Trained weights that are streamed: they are kept and updated on the host.
#
# A parameter of a streamed layer aliases a slot, so neither its values nor its gradient can stay
# there. Each trained parameter has a *master*, a parameter over the layer's record in host memory.
# The optimizer gets the master, and a step fills the master's `.grad`.
#
# On the device, one of a few buffers accumulates a layer's gradients over the micro-batches; it is
# copied to the host when the visit is over, and measured on the way, for clipping.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerUpdate:
    """What the update of a layer reads and writes in host memory."""

    layer: int  # which layer
    weights: Mapping[str, torch.Tensor]  # name -> weight, to be changed in place
    # Name -> gradient of the step that has ended; it may be overwritten.
    gradients: Mapping[str, torch.Tensor]


class HostGradients:
    """The masters of all layers, and the memory of their gradients on both sides."""

    def __init__(
        self,
        records: Sequence[Record],
        layers: Sequence[torch.Tensor],
        *,
        names: Mapping[int, str],
        allocate_host: Allocate,
        allocate_device: Allocate,
    ) -> None:
        """Make a master for each streamed parameter that trains.

        Args:
            records: One per layer.
            layers: The layers' records in host memory, uint8; none if no streamed weight trains.
            names: id of a parameter -> its name in the model.
            allocate_host: Returns uint8 host memory for device-to-host copies.
            allocate_device: Returns uint8 memory on the compute device.
        """
        self.parameters: dict[str, nn.Parameter] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self._weights: list[dict[str, Field]] = [{} for _ in records]
        for record, layer, weights in zip(records, layers, self._weights, strict=False):
            for field in record.fields:
                if field.parameter.requires_grad:
                    name = names[id(field.parameter)]
                    self.parameters[name] = nn.Parameter(field.view(layer))
                    weights[name] = field
        self._names, self._layers = names, list(layers)
        self._gradients = [
            lay_out([f.parameter for f in record.fields if f.parameter.requires_grad])
            for record in records
        ]
        self.gradient_bytes = tuple(record.num_bytes for record in self._gradients)
        on_host = allocate_host(sum(self.gradient_bytes))
        self._sinks = on_host.split(list(self.gradient_bytes))
        self._buffers = [
            allocate_device(max(self.gradient_bytes)) for _ in range(NUM_GRADIENT_BUFFERS)
        ]
        self.arenas: tuple[Arena, ...] = (
            Arena(name=HOST_GRADIENTS, blocks=[on_host]),
            Arena(name=LAYER_GRADIENTS, blocks=self._buffers),
        )

    def on_host(self, layer: int) -> LayerUpdate:
        """Return what an update of a layer changes."""
        weights = {name: self.parameters[name].detach() for name in self._weights[layer]}
        gradients = {
            self._names[id(field.parameter)]: field.view(self._sinks[layer])
            for field in self._gradients[layer].fields
        }
        return LayerUpdate(layer=layer, weights=weights, gradients=gradients)

    def gather(self, layer: int) -> None:
        """Accumulate a layer's gradients in its buffer, from zero at the start of the visit."""
        for field in self._gradients[layer].fields:
            if field.parameter.grad is None:
                field.parameter.grad = field.view(self._buffers[layer % NUM_GRADIENT_BUFFERS])
                field.parameter.grad.zero_()

    def leaving(
        self, layer: int, buffer: int, offset: int, num_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the host memory and the device memory of a piece of a layer's gradients."""
        end = offset + num_bytes
        return self._sinks[layer][offset:end], self._buffers[buffer][offset:end]

    def measure(self, layer: int, buffer: int) -> None:
        """Compute the norm of each of a layer's gradients, in fp32, where they are."""
        for field in self._gradients[layer].fields:
            gradient = field.view(self._buffers[buffer])
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self.norms[self._names[id(field.parameter)]] = norm

    def layer_of(self) -> dict[str, int]:
        """Return the layer of each master, by its name."""
        return {
            self._names[id(field.parameter)]: layer
            for layer, record in enumerate(self._gradients)
            for field in record.fields
        }

    def require_clear(self) -> None:
        """Check that no gradient of an earlier step is left.

        Raises:
            OffloadError: A master has one, which the step would overwrite; or a parameter has one
                from before the model was attached, so the step's would bypass the buffer.
        """
        for field in (field for record in self._gradients for field in record.fields):
            name = self._names[id(field.parameter)]
            with torch.DisableTorchFunctionSubclass():  # it is sealed between passes
                is_left = field.parameter.grad is not None
            if is_left or self.parameters[name].grad is not None:
                raise OffloadError(
                    f"{name} still has the gradient of an earlier step",
                    limit="gradients of weights on the host are written anew, not added",
                    hint="`optimizer.zero_grad(set_to_none=True)` after `optimizer.step()`, of an"
                    " optimizer over `engine.trained_parameters`; `model.zero_grad()` before"
                    " `offload.attach`",
                )

    def let_go(self) -> None:
        """Detach the buffers from the layers' parameters."""
        for record in self._gradients:
            for field in record.fields:
                field.parameter.grad = None

    def publish(self) -> None:
        """Give the masters the gradients that have arrived."""
        for record, sink in zip(self._gradients, self._sinks, strict=True):
            for field in record.fields if sink.numel() else ():
                self.parameters[self._names[id(field.parameter)]].grad = field.view(sink)


class LateUpdates:
    """Updates of layers that are made in the next step, each where its layer is first loaded.

    Clipping needs the norm of all gradients, which is known once a step's backward has ended. Then
    an update of all weights would take its time with the device idle. The first layers of the next
    forward need few of them, so each layer's update waits until its own load: a line of the
    schedule. It is made on the host before the load. Whoever reads weights before that calls
    `flush`.

    Attributes:
        layer_of: The layer of each master, by its name.
        norms: Norms of the newest step's gradients, fp32 scalars by name.
    """

    def __init__(self, gradients: HostGradients) -> None:
        """Nothing is to be made."""
        self.layer_of, self.norms = gradients.layer_of(), gradients.norms
        self._gradients = gradients
        self._update: Callable[[LayerUpdate], None] | None = None
        self._layers: set[int] = set()

    @property
    def layers(self) -> frozenset[int]:
        """The layers that are still to be updated."""
        return frozenset(self._layers)

    def defer(self, update: Callable[[LayerUpdate], None]) -> None:
        """Let the layers be updated late; those of the step before are updated now.

        Gradients stay where the step has put them until then; `.grad` may be let go of.

        Args:
            update: Updates a layer. It is called once per layer, on another thread, and depends on
                nothing that changes later.
        """
        self.flush()
        self._update, self._layers = update, set(self.layer_of.values())

    def run(self, layer: int) -> None:
        """Update a layer on the host."""
        assert self._update is not None
        self._update(self._gradients.on_host(layer))
        self._layers.remove(layer)

    def flush(self) -> None:
        """Update all layers that are left, in order."""
        for layer in sorted(self._layers):
            self.run(layer)


@contextmanager
def values_shown(backing: Slab | Store, layer: int) -> Iterator[None]:
    """Let a layer's parameters show their values instead of placeholders, inside a block.

    They are decoded to separate host memory, the size of one layer. Changes to them are lost.

    Args:
        backing: Where the layers are stored; it has adopted the parameters.
        layer: Which layer.

    Raises:
        TransferError: The layer cannot be read.
    """
    record = backing.records[layer]
    shown = [bare(field.parameter) for field in record.fields]
    if record.decoded_bytes:
        give_back(record, _in_memory(backing, layer), torch.device("cpu"))
    try:
        yield
    finally:
        for field, tensor in zip(record.fields, shown, strict=True):
            refer(field.parameter, tensor)


def _in_memory(backing: Slab | Store, layer: int) -> torch.Tensor:
    """Return a layer's record in host memory, uint8; one that is on disk is read."""
    if isinstance(backing, Slab):
        return backing.layer(layer)
    memory = aligned_empty(backing.records[layer].num_bytes)
    backing.read_into(layer, memory)
    return memory


class HostWeights:
    """The layers' weights on the host, and the memory that they pass through.

    Attributes:
        records: Layout of each layer.
        source: The engine's access to them.
        staging: Buffers that loads go through; none if the link reads the layers themselves.
        blocks: Other host memory that the link uses.
        slab_bytes: Host memory that holds layers; 0 if a store does.
        pinned_bytes: Page-locked bytes of the slab, plus the staging buffers.
        notes: What was decided and why, for the user.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        codecs: Sequence[Sequence[Form]],
        *,
        backing: Slab | Store | None,
        tier: Tier,
        store_dir: Path | None,
        torch_device: torch.device,
        others_bytes: int,
    ) -> None:
        """Move the layers to their tier, and page-lock.

        Args:
            groups: The parameters to stream, per layer.
            codecs: How each of them is to be encoded, unless it is in a backing.
            backing: Where they are already; None if each has memory of its own.
            tier: Where they are to be stored.
            store_dir: Where a store is written if the tier is disk and they are in memory; it is
                removed at the end.
            torch_device: Where layers compute.
            others_bytes: What is page-locked after the layers, and has to be.

        Raises:
            OffloadError: The tier contradicts where the layers are.
            TransferError: The store cannot be written.
        """
        _require_consistent(backing, tier, store_dir)
        self._place = numa.place_near(torch_device)
        self._given = backing
        self._store_dir = store_dir
        with numa.thread_on(self._place.cpus):
            self._backing = self._settled(groups, codecs, backing, tier, torch_device)
            self._lock = self._page_lock(torch_device, others_bytes=others_bytes)
        reasons = self._lock.reason, self._place.reason
        self.notes = (*self._tier_notes(), *filter(None, reasons))
        if self._place.node is not None and isinstance(self._backing, Slab):
            self.notes += (self._backing.policy,) if self._backing.policy else ()
        locker = pagelock.open_locker(torch_device, None)
        self.blocks = HostBlocks(
            locker=locker, before_touch=self._bind, is_anywhere=self._place.node is None
        )
        self.records: tuple[Record, ...] = self._backing.records
        is_store = isinstance(self._backing, Store)
        self.source: Slab | Store = self._backing
        self.staging = self._lock.buffers
        if is_store and torch_device.type == "cuda" and not self.staging:
            self.staging = tuple(aligned_empty(PIECE_BYTES) for _ in range(NUM_STAGING))
        self._shown: dict[tuple[int, int], torch.Tensor] = {}
        self.slab_bytes = 0 if is_store else self._backing.num_bytes
        self.pinned_bytes = self._lock.num_bytes

    @property
    def layers(self) -> list[torch.Tensor]:
        """The layers' records in writable memory.

        Raises:
            OffloadError: They are on disk.
        """
        if isinstance(self._backing, Store):
            raise OffloadError(
                'trained_weights is "host" and tier is "disk"',
                limit="weights that train are updated in memory",
                hint='`tier="ram"`, or train an adapter',
            )
        return [self._backing.layer(layer) for layer in range(len(self.records))]

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Host memory for layers and staging buffers."""
        slab = [self._backing.memory] if isinstance(self._backing, Slab) else []
        return (Arena(name=SLAB, blocks=slab), Arena(name=STAGING, blocks=self.staging))

    @property
    def is_staged(self) -> bool:
        """Whether a thread issues the loads: from staging buffers, or because the driver blocks.

        A copy from pageable memory returns only when the stream has reached it. Issued by the
        caller's thread, it would delay the visits that should run concurrently.
        """
        return bool(self.staging) or self._lock.mode is pagelock.LockMode.PAGEABLE

    @property
    def piece_bytes(self) -> int:
        """The size of the largest copy."""
        return self.staging[0].numel() if self.staging else PIECE_BYTES

    @property
    def prepare_thread(self) -> Callable[[], object]:
        """Return a function that binds its thread near the device, without a reference to self."""
        return partial(numa.bind_thread, self._place.cpus)

    def nearby(self) -> AbstractContextManager[str]:
        """Bind the calling thread near the device inside a block."""
        return numa.thread_on(self._place.cpus)

    @property
    def num_writes(self) -> int:
        """Counter that grows when tensors that `shown` returned are written to."""
        return sum(map(num_writes, self._shown.values()))

    def shown(self, layer: int, field: Field) -> torch.Tensor | None:
        """Return a field's values if they are in this process's memory and not encoded, else None.

        Each tensor has its own storage over the same memory: otherwise saving one would save all.
        """
        if isinstance(self._backing, Store) or self._backing.is_opened or field.codec is not NATIVE:
            return None
        if not field.num_bytes:
            return torch.empty(field.shape, dtype=field.dtype)
        if (layer, field.offset) not in self._shown:
            memory = field.written(self._backing.layer(layer)).numpy()
            values = torch.frombuffer(memory, dtype=field.dtype).view(field.shape)
            self._shown[layer, field.offset] = values
        return self._shown[layer, field.offset].detach()

    def give_back(self, torch_device: torch.device) -> None:
        """Give all layers' parameters memory of their own again."""
        for layer, record in enumerate(self.records):
            give_back(record, _in_memory(self._backing, layer), torch_device)

    def close(self) -> None:
        """Unlock, stop reading, and stop sharing."""
        self.blocks.close()
        try:
            self._lock.release()
        finally:
            self._backing.close()
            if self._given is not None and self._given is not self._backing:
                self._given.close()

    def _settled(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        codecs: Sequence[Sequence[Form]],
        backing: Slab | Store | None,
        tier: Tier,
        torch_device: torch.device,
    ) -> Slab | Store:
        """Move the layers to their tier, unless they are there."""
        if backing is None and tier == "disk":
            backing = _written(groups, codecs, self._store_dir, torch_device)
        elif backing is not None:
            backing.adopt(groups)
            _require_codecs(backing, codecs)
        if (tier == "disk" and isinstance(backing, Store)) or isinstance(backing, Slab):
            return backing
        records = backing.records if backing else tuple(map(lay_out, groups, codecs))
        slab = Slab(records, before_touch=self._bind, encoding_device=torch_device)
        if isinstance(backing, Store):
            backing.move_to(slab)
        else:
            for layer in range(len(slab.records)):
                slab.take(layer)
                trim_heap()  # of what the layer was in
        return slab

    def _page_lock(self, torch_device: torch.device, *, others_bytes: int) -> pagelock.PageLock:
        largest_bytes = max(record.num_bytes for record in self._backing.records)
        if isinstance(self._backing, Store):
            locker = pagelock.open_locker(torch_device, None)
            return pagelock.lock_ring(largest_bytes, "layers lie on disk", locker)
        return pagelock.page_lock(
            self._backing.address,
            self._backing.num_bytes,
            largest_bytes,
            pagelock.open_locker(torch_device, self._backing.descriptor),
            others_bytes=others_bytes,
        )

    def _bind(self, address: int, num_bytes: int) -> str:
        return bind_memory(address, num_bytes, self._place.node)

    def _tier_notes(self) -> tuple[str, ...]:
        if isinstance(self._backing, Slab):
            return (
                (f"layers cannot be shared: {self._backing.reason}",)
                if self._backing.reason
                else ()
            )
        how = f"{self._backing.mode} reads" + (
            f": {self._backing.reason}" if self._backing.reason else ""
        )
        return (f"layers are read from {self._backing.path} ({how})",)


def _require_codecs(backing: Slab | Store, codecs: Sequence[Sequence[Form]]) -> None:
    """Refuse layers that were loaded in another form than requested.

    Raises:
        OffloadError: The forms differ.
    """
    found = {field.codec.name for record in backing.records for field in record.fields}
    wanted = {codec.name for layer in codecs for codec in layer}
    if found != wanted:
        raise OffloadError(
            f"the layers were loaded as {' and '.join(sorted(found))}, and"
            f" {' and '.join(sorted(wanted))} is asked for",
            limit="what is loaded stays in the form that it has",
            hint="load them with the same codec",
        )


def _require_consistent(backing: Slab | Store | None, tier: Tier, store_dir: Path | None) -> None:
    """Refuse settings that contradict each other: none is ignored.

    Raises:
        OffloadError: Two settings contradict each other.
    """
    is_written = tier == "disk" and backing is None
    if is_written and store_dir is None:
        raise OffloadError(
            'tier is "disk" and the layers lie in memory',
            limit="they are written to a file first, as large as they are",
            hint='`store_dir="DIR"` on a fast drive, or `tier="ram"`',
        )
    if tier == "disk" and isinstance(backing, Slab):
        raise OffloadError(
            'tier is "disk" and the layers were loaded to memory',
            limit="the disk tier reads a store",
            hint='`tier="ram"`, or load them to a store',
        )
    if store_dir is not None and not is_written:
        raise OffloadError(
            f"store_dir is {store_dir} and no store is written",
            limit='one is where `tier` is "disk" and the layers lie in memory',
            hint="leave `store_dir` away",
        )


def _written(
    groups: Sequence[Sequence[nn.Parameter]],
    codecs: Sequence[Sequence[Form]],
    store_dir: Path | None,
    torch_device: torch.device,
) -> Store:
    """Write layers that are in memory to a store whose file is unlinked once it is open."""
    assert store_dir is not None
    with NamedTemporaryFile(dir=store_dir, suffix=".store") as file:
        path = Path(file.name)
        names = [
            [f"weight {index} of layer {layer}" for index in range(len(group))]
            for layer, group in enumerate(groups)
        ]
        records = list(map(lay_out, groups, codecs))
        writer = StoreWriter(path, records, names, encoding_device=torch_device)
        with closing(writer):  # what is finished stays
            for layer, group in enumerate(groups):
                for index, parameter in enumerate(group):
                    writer.put(layer, index, bare(parameter))
            writer.finish({}, {})
        store = Store(path, identity={})
    for layer, group in enumerate(groups):
        for parameter, tensor in zip(group, store.layer_tensors(layer), strict=True):
            refer(parameter, tensor)
    store.adopt(groups)
    return store
