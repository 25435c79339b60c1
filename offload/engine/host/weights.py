"""The host side of an attached model: where its layers are stored, and how they are transferred.

Three things are decided here, once, and each is reported in a note:

- where the layers are: in the slab, or in a store on disk;
- how they are copied: straight from page-locked memory, through a ring of page-locked buffers that
  a thread fills, or pageable by the driver (see `pagelock`);
- which NUMA node that memory and the threads are near (see `numa`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import nn

from offload.engine.codecs.codec import NATIVE, Codec
from offload.engine.host import numa, pagelock
from offload.engine.host.numa import bind_memory
from offload.engine.host.pagelock import aligned_empty, trim_heap
from offload.engine.host.slab import (
    Field,
    HostBlocks,
    Record,
    Slab,
    give_back,
    lay_out,
)
from offload.engine.host.store import Store, StoreWriter
from offload.engine.memory_meter import Arena
from offload.errors import OffloadError
from offload.plan.machine.machine import Tier
from offload.plan.memory.memory import SLAB, STAGING
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES


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
    shown = [field.parameter.data for field in record.fields]
    if record.decoded_bytes:
        give_back(record, _in_memory(backing, layer), torch.device("cpu"))
    try:
        yield
    finally:
        for field, tensor in zip(record.fields, shown, strict=True):
            field.parameter.data = tensor


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
        codecs: Sequence[Sequence[Codec]],
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
        return sum(values._version for values in self._shown.values())

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
        codecs: Sequence[Sequence[Codec]],
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


def _require_codecs(backing: Slab | Store, codecs: Sequence[Sequence[Codec]]) -> None:
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
    codecs: Sequence[Sequence[Codec]],
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
                    writer.put(layer, index, parameter.data)
            writer.finish({}, {})
        store = Store(path, identity={})
    for layer, group in enumerate(groups):
        for parameter, tensor in zip(group, store.layer_tensors(layer), strict=True):
            parameter.data = tensor
    store.adopt(groups)
    return store
