"""Whether a request fits a machine: with how many slots, what is short, and what would fit.

The one home of these questions: the plan, the search among plans and the refusal all ask here.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.errors import DoesNotFitError
from offload.plan.codec import EXACT_CODECS, ROUNDING, CodecName
from offload.plan.facts import ModelFacts
from offload.plan.machine import GIB, Machine
from offload.plan.memory import (
    FEWER_SLOTS,
    INPUTS_IN_RAM,
    MICRO_BATCH,
    ON_DISK,
    OTHER_RANKS,
    ROUNDED_LAYERS,
    SHRINKS,
    SMALLER_CHUNK,
    STAGING,
    STASH,
    DeviceNeeds,
    MemoryTerm,
    device_needs,
    host_terms,
    input_bytes,
    total_bytes,
)
from offload.plan.schedule import MIN_SLOTS
from offload.plan.trained import EMBEDDING, HEAD, NORMS, ROUTER

if TYPE_CHECKING:
    from offload.plan.plan import PlanRequest

MIN_HINTED_SEQ_LEN = 128
FEWEST_CHUNK_TOKENS = 64  # fewer logits at a time save little, and each chunk reads the whole head
NUM_NAMED_TERMS, NAMED_FRAC = 3, 0.05  # of a memory that is too small
DEVICE, RAM = "of device memory", "of RAM"
GRAPH_RESERVE_FRAC = 0.1  # what autograd saves is within this of the formula, over what is tested
PACKED: CodecName = "bf16_packed"
ROUNDED: CodecName = "nf4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A memory that is too small.

    Attributes:
        what: Which, as in "of RAM".
        needed_bytes: What is asked of it.
        limit_bytes: What it has.
        limit: That it has no more, in words that follow its size.
    """

    what: str
    needed_bytes: int
    limit_bytes: int
    limit: str

    @property
    def short_bytes(self) -> int:
        """By how much it is too small."""
        return self.needed_bytes - self.limit_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The memory of a request, by the number of slots and of kept graphs.

    Attributes:
        facts: The model.
        machine: Where it is to run.
        request: What was asked for.
        on_device: What stands in device memory.
        fixed_host: Terms of host memory, with no kept graph; None where they grow with the slots.
    """

    facts: ModelFacts
    machine: Machine
    request: "PlanRequest"
    on_device: DeviceNeeds
    fixed_host: tuple[MemoryTerm, ...] | None

    @classmethod
    def of(cls, facts: ModelFacts, machine: Machine, request: "PlanRequest") -> "Needs":
        """Add up what a request takes."""
        on_device = device_needs(
            facts,
            machine,
            request.largest,
            num_micro_batches=request.rank_micro_batches,
            num_ranks=request.num_ranks,
            is_padded=request.is_masked,
            is_stashed=request.is_stashed,
            traced=request.traced,
        )
        needs = cls(
            facts=facts, machine=machine, request=request, on_device=on_device, fixed_host=None
        )
        # several ranks on a CPU count each other's slots as host memory
        is_fixed = machine.device == "cuda" or request.num_ranks == 1
        return replace(needs, fixed_host=needs.host(MIN_SLOTS, 0)) if is_fixed else needs

    def device(self, num_slots: int, num_kept_graphs: int) -> tuple[MemoryTerm, ...]:
        """Return the terms of each device's peak."""
        num_slots = min(num_slots, self.facts.num_layers)
        return self.on_device.terms(num_slots=num_slots, num_kept_graphs=num_kept_graphs)

    def host(self, num_slots: int, num_kept_graphs: int) -> tuple[MemoryTerm, ...]:
        """Return the terms of the host's peak; inputs of kept graphs do not wait there."""
        request = self.request
        terms = self.fixed_host or host_terms(
            self.facts,
            self.machine,
            request.largest,
            num_workers=request.num_workers,
            num_stashed=request.num_stashed,
            num_ranks=request.num_ranks,
            num_slabs=request.num_slabs,
            rank_device_bytes=total_bytes(self.device(num_slots, num_kept_graphs)),
        )
        if num_kept_graphs < 2 or not request.is_stashed:
            return terms
        num_inputs = (num_kept_graphs - 1) * request.num_stashed
        spared = num_inputs * input_bytes(self.facts, request.largest)
        spared_of = {STASH: spared, OTHER_RANKS: (request.num_ranks - 1) * spared}
        return tuple(
            replace(term, num_bytes=term.num_bytes - spared_of.get(term.name, 0)) for term in terms
        )

    @property
    def is_staged(self) -> bool:
        """Whether loads pass a ring of page-locked buffers: not all of the slab can be locked."""
        return bool(_size(self.host(MIN_SLOTS, self.fewest_graphs), STAGING))

    def shortages(self, num_slots: int, num_kept_graphs: int) -> tuple[Shortage, ...]:
        """Return each memory that is too small; on a CPU there is only one memory.

        Graphs that nobody asked for are counted with a reserve: a step that ran out of memory for
        them would have to be planned again.
        """
        machine, budget_bytes = self.machine, self.request.vram_budget_bytes
        is_cuda = machine.device == "cuda"
        device_bytes = total_bytes(self.device(num_slots, num_kept_graphs))
        if self.request.num_kept_graphs is None:
            device_bytes += int(GRAPH_RESERVE_FRAC * self.on_device.graph_bytes[num_kept_graphs])
        on_device = Shortage(
            what=DEVICE if is_cuda else "of memory for computing",
            needed_bytes=device_bytes,
            limit_bytes=min(machine.vram_bytes, budget_bytes or machine.vram_bytes),
            limit="may be used",
        )
        on_host = self._host_shortages(
            num_slots, num_kept_graphs, computing_bytes=0 if is_cuda else device_bytes
        )
        return (on_device, *on_host) if on_device.short_bytes > 0 else on_host

    def _host_shortages(
        self, num_slots: int, num_kept_graphs: int, *, computing_bytes: int = 0
    ) -> tuple[Shortage, ...]:
        host = self.host(num_slots, num_kept_graphs)
        is_locked = self.machine.device == "cuda"
        asked = (
            Shortage(
                what="of page-locked memory for layer inputs",
                needed_bytes=self.request.num_ranks * _size(host, STASH) if is_locked else 0,
                limit_bytes=self.machine.pinned_bytes,
                limit="may be page-locked",
            ),
            Shortage(
                what=RAM,
                needed_bytes=total_bytes(host) + computing_bytes,
                limit_bytes=self.machine.ram_bytes,
                limit="of RAM is there",
            ),
        )
        return tuple(one for one in asked if one.short_bytes > 0)

    @property
    def fewest_slots(self) -> int:
        """The number of slots that was asked for, or the smallest that a step can have."""
        wanted = self.request.num_slots
        return min(MIN_SLOTS if wanted is None else wanted, self.facts.num_layers)

    @property
    def fewest_graphs(self) -> int:
        """The number of kept graphs that was asked for, or the fewest with which a step fits.

        That is none, unless host memory is too small for the inputs that wait there: those of kept
        graphs do not, and the device may have room for so many.
        """
        may_choose = self._chooses_graphs and self.machine.device == "cuda"
        if not (may_choose and self.request.is_stashed and self._host_shortages(MIN_SLOTS, 0)):
            return self.request.num_kept_graphs or 0
        numbers = range(self.facts.num_layers + 1)
        fewest = bisect_left(
            numbers,
            True,  # noqa: FBT003
            key=lambda n: not self._host_shortages(MIN_SLOTS, n),
        )
        is_found = fewest < len(numbers) and not self.shortages(self.fewest_slots, fewest)
        return fewest if is_found else 0

    @property
    def _chooses_graphs(self) -> bool:
        """Whether their number is open, and what a layer saves is known.

        That is told from a trace, or from formulas that are checked for the families that are known
        by their config. Of a model of another type no graph is kept unasked.
        """
        is_known = self.facts.grade == "config" or self.request.traced is not None
        return is_known and self.request.num_kept_graphs is None

    def most_graphs(self, num_slots: int) -> int:
        """Return the number of kept graphs that was asked for, or the largest that fits."""
        fewest = self.fewest_graphs
        if not self._chooses_graphs:
            return fewest
        more = range(fewest + 1, self.facts.num_layers + 1)
        is_short = bisect_left(more, True, key=lambda n: bool(self.shortages(num_slots, n)))  # noqa: FBT003
        return fewest + is_short

    @property
    def most_slots(self) -> int | None:
        """The number of slots that was asked for, or the largest that fits; None if none does.

        More slots always take more memory, so half of the numbers are ruled out at a time.
        """
        fewest, num_graphs = self.fewest_slots, self.fewest_graphs
        if self.shortages(fewest, num_graphs):
            return None
        if self.request.num_slots is not None:
            return fewest
        low, high = fewest, self.facts.num_layers
        while low < high:
            middle = (low + high + 1) // 2
            if self.shortages(middle, num_graphs):
                high = middle - 1
            else:
                low = middle
        return low


def refusal(needs: Needs) -> DoesNotFitError:
    """Return the error for a request that does not fit: what is short, by how much, what fits."""
    num_slots, machine = needs.fewest_slots, needs.machine
    shortages = needs.shortages(num_slots, needs.fewest_graphs)
    short = " and ".join(f"{_gib(s.needed_bytes)} {s.what}" for s in shortages)
    kept = f", {needs.fewest_graphs} kept graphs" if needs.fewest_graphs else ""
    kept += " and their inputs in RAM" if needs.request.is_stashed else ""
    kept += ", its visits traced," if needs.request.traced else ""
    return DoesNotFitError(
        f"with {num_slots} slots of {needs.facts.num_layers} layers{kept} the plan needs {short},"
        f" {' and '.join(_gib(s.short_bytes) for s in shortages)} too much",
        limit=" and ".join(f"{_gib(s.limit_bytes)} {s.limit}" for s in shortages)
        + f" on {machine.name}"
        + "".join(_largest_terms(needs, shortage) for shortage in shortages),
        hint=_nearest_fit(needs),
    )


def _largest_terms(needs: Needs, shortage: Shortage) -> str:
    """List what takes most of a memory that is too small, and what makes it less."""
    num_slots, num_graphs = needs.fewest_slots, needs.fewest_graphs
    device, host = needs.device(num_slots, num_graphs), needs.host(num_slots, num_graphs)
    is_cuda = needs.machine.device == "cuda"
    terms = {DEVICE: device, RAM: host if is_cuda else (*host, *device)}.get(shortage.what, ())
    largest = sorted(terms, key=lambda term: -term.num_bytes)[:NUM_NAMED_TERMS]
    named = [term for term in largest if term.num_bytes >= NAMED_FRAC * shortage.needed_bytes]
    if not named:
        return ""
    words = {term.name: ", ".join(_effective(term, needs.request)) for term in named}
    return f"\n  Most {shortage.what} is for:" + "".join(
        f"\n  {_gib(term.num_bytes):>11}  {term.name}"
        + (f"; less with {words[term.name]}" if words[term.name] else "")
        for term in named
    )


def _effective(term: MemoryTerm, request: "PlanRequest") -> list[str]:
    """Return what makes a term smaller and is not yet as the setting says."""
    largest = request.largest
    has_no_effect = {
        MICRO_BATCH: largest.micro_batch_size == 1,
        FEWER_SLOTS: request.num_slots in (None, MIN_SLOTS),
        ROUNDED_LAYERS: largest.codec not in EXACT_CODECS,
        ON_DISK: not request.may_be_on_disk,
        INPUTS_IN_RAM: request.is_stashed,
        SMALLER_CHUNK: largest.head_chunk_tokens <= FEWEST_CHUNK_TOKENS,
    }
    return [words for words in SHRINKS.get(term.name, ()) if not has_no_effect.get(words)]


def _nearest_fit(needs: Needs) -> str:
    """Name the nearest change that fits: first those that leave what is trained as it is."""
    asked, wanted, fewer = needs.request, needs.request.num_slots, ""
    if asked.num_kept_graphs:
        freely = replace(needs, request=replace(asked, num_kept_graphs=None))
        if not freely.shortages(freely.fewest_slots, 0):
            return f"`offload.kept_graphs: {freely.most_graphs(freely.fewest_slots)}`"
        asked, fewer = replace(asked, num_kept_graphs=0), "`offload.kept_graphs: 0`"
    for words, request in _changes(asked):
        open_request = replace(request, num_slots=None)
        num_slots = Needs.of(needs.facts, needs.machine, open_request).most_slots
        if num_slots is None:
            continue
        if wanted is None or num_slots >= min(wanted, needs.facts.num_layers):
            return _joined(words, fewer)
        slots = f"`offload.num_slots: {num_slots}`"
        return _joined(words, slots, fewer)
    return "a machine with more memory, or a smaller model"


def _changes(request: "PlanRequest") -> Iterator[tuple[str, "PlanRequest"]]:
    """Yield requests by how far they are from this one, each with the settings that make it.

    First come those that leave the training as it is, on disk after those in RAM, which are faster;
    then rounded weights, then shorter sequences.
    """
    exact = [("", request), *_coded(request, PACKED)]
    for words, coded in exact:
        yield from _either_stash(words, coded)
    for num_ranks in range(request.num_ranks - 1, 0, -1):
        yield f"`--num_processes {num_ranks}`", replace(request, num_ranks=num_ranks)
    yield from _all_cut(exact)
    stored = _on_disk(exact)
    for words, placed in stored:
        yield from _either_stash(words, placed)
    yield from _all_cut(stored)
    rounded = _coded(request, ROUNDED)
    for words, coded in rounded:
        yield from _either_stash(words, coded)
    yield from _all_cut(rounded)
    seq_len = request.largest.seq_len // 2
    while seq_len >= MIN_HINTED_SEQ_LEN:
        for words, coded in (*exact, *stored, *rounded, *_on_disk(rounded)):
            shorter = replace(coded, largest=replace(coded.largest, seq_len=seq_len), traced=None)
            yield from _either_stash(_joined(words, f"`train.seq_len: {seq_len}`"), shorter)
        seq_len //= 2


def _coded(request: "PlanRequest", codec: CodecName) -> list[tuple[str, "PlanRequest"]]:
    """Return the request in another form, where this run can have it and has none like it."""
    largest = request.largest
    is_encodable = set(largest.adapter.modules) <= {NORMS, ROUTER, EMBEDDING, HEAD}
    is_packed_twice = codec == PACKED and (largest.codec, largest.dtype_bytes) != ("native", 2)
    if not is_encodable or largest.codec not in EXACT_CODECS or is_packed_twice:
        return []
    words = f"`offload.codec: {codec}`"
    if codec in ROUNDING:
        words += f" (rounds each weight, by {ROUNDING[codec]:.1%} of their size)"
    return [(words, with_codec(request, codec))]


def _on_disk(
    requests: Iterable[tuple[str, "PlanRequest"]],
) -> list[tuple[str, "PlanRequest"]]:
    """Return the requests with their layers in a file, where they are not and could be."""
    return [
        (_joined(words, "`offload.tier: disk`"), replace(request, is_on_disk=True))
        for words, request in requests
        if request.may_be_on_disk and not request.is_on_disk
    ]


def _all_cut(
    requests: Iterable[tuple[str, "PlanRequest"]],
) -> Iterator[tuple[str, "PlanRequest"]]:
    """Yield requests with smaller micro-batches, the largest of these first."""
    for words, request in requests:
        largest = request.largest
        for size in range(largest.micro_batch_size - 1, 0, -1):
            num, rest = divmod(largest.micro_batch_size, size)
            if rest == 0:
                cut = replace(
                    request,
                    largest=replace(largest, micro_batch_size=size),
                    num_micro_batches=request.num_micro_batches * num,
                    traced=None,  # a trace is of one size
                )
                parts = f"`train.micro_batch_size: {size}` and {num} times as many"
                yield from _either_stash(_joined(words, parts), cut)


def _either_stash(words: str, request: "PlanRequest") -> Iterator[tuple[str, "PlanRequest"]]:
    yield words, request
    other = replace(request, is_stashed=not request.is_stashed)
    stash = f"`offload.stash: {'host' if other.is_stashed else 'device'}`"
    yield _joined(words, stash), other


def _joined(*words: str) -> str:
    return " with ".join(filter(None, words))


def with_codec(request: "PlanRequest", codec: CodecName) -> "PlanRequest":
    """Return the same request for layers that wait in another form."""
    return replace(
        request,
        typical=replace(request.typical, codec=codec),
        largest=replace(request.largest, codec=codec),
    )


def with_head_chunk(request: "PlanRequest", num_tokens: int) -> "PlanRequest":
    """Return the same request with fewer or more logits at a time."""
    return replace(
        request,
        typical=replace(request.typical, head_chunk_tokens=num_tokens),
        largest=replace(request.largest, head_chunk_tokens=num_tokens),
    )


def _size(terms: tuple[MemoryTerm, ...], name: str) -> int:
    return sum(term.num_bytes for term in terms if term.name == name)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
