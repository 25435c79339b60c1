"""Whether a request fits a machine: with how many slots, what is short, and what would fit.

The one home of these questions: the plan, the search among plans and the refusal all ask here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.errors import DoesNotFitError
from offload.plan.codec import EXACT_CODECS, ROUNDING, CodecName
from offload.plan.facts import ModelFacts
from offload.plan.machine import GIB, Machine
from offload.plan.memory import (
    STAGING,
    STASH,
    MemoryTerm,
    device_terms,
    host_terms,
    total_bytes,
    with_slots,
)
from offload.plan.schedule import MIN_SLOTS
from offload.plan.trained import EMBEDDING, HEAD, NORMS, ROUTER

if TYPE_CHECKING:
    from offload.plan.plan import PlanRequest

MIN_HINTED_SEQ_LEN = 128
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
    """The memory of a request, by the number of slots.

    Attributes:
        facts: The model.
        machine: Where it is to run.
        request: What was asked for.
        one_slot: Terms of device memory with a single slot, from which those of more follow.
        fixed_host: Terms of host memory; None where they grow with the slots.
    """

    facts: ModelFacts
    machine: Machine
    request: "PlanRequest"
    one_slot: tuple[MemoryTerm, ...]
    fixed_host: tuple[MemoryTerm, ...] | None

    @classmethod
    def of(cls, facts: ModelFacts, machine: Machine, request: "PlanRequest") -> "Needs":
        """Add up what a request takes."""
        one_slot = device_terms(
            facts,
            machine,
            request.largest,
            num_slots=1,
            num_micro_batches=request.rank_micro_batches,
            num_ranks=request.num_ranks,
            is_padded=request.is_masked,
            is_stashed=request.is_stashed,
            traced=request.traced,
        )
        needs = cls(
            facts=facts, machine=machine, request=request, one_slot=one_slot, fixed_host=None
        )
        # several ranks on a CPU count each other's slots as host memory
        is_fixed = machine.device == "cuda" or request.num_ranks == 1
        return replace(needs, fixed_host=needs.host(MIN_SLOTS)) if is_fixed else needs

    def device(self, num_slots: int) -> tuple[MemoryTerm, ...]:
        """Return the terms of each device's peak."""
        return with_slots(self.one_slot, min(num_slots, self.facts.num_layers))

    def host(self, num_slots: int) -> tuple[MemoryTerm, ...]:
        """Return the terms of the host's peak."""
        if self.fixed_host is not None:
            return self.fixed_host
        return host_terms(
            self.facts,
            self.machine,
            self.request.largest,
            num_workers=self.request.num_workers,
            num_stashed=self.request.num_stashed,
            num_ranks=self.request.num_ranks,
            num_slabs=self.request.num_slabs,
            rank_device_bytes=total_bytes(self.device(num_slots)),
        )

    @property
    def is_staged(self) -> bool:
        """Whether loads pass a ring of page-locked buffers: not all of the slab can be locked."""
        return bool(_size(self.host(MIN_SLOTS), STAGING))

    def shortages(self, num_slots: int) -> tuple[Shortage, ...]:
        """Return each memory that is too small; on a CPU there is only one memory."""
        machine, budget_bytes = self.machine, self.request.vram_budget_bytes
        is_cuda = machine.device == "cuda"
        device_bytes, host = total_bytes(self.device(num_slots)), self.host(num_slots)
        stash_bytes = self.request.num_ranks * _size(host, STASH)
        asked = [
            Shortage(
                what="of device memory" if is_cuda else "of memory for computing",
                needed_bytes=device_bytes,
                limit_bytes=min(machine.vram_bytes, budget_bytes or machine.vram_bytes),
                limit="may be used",
            ),
            Shortage(
                what="of page-locked memory for layer inputs",
                needed_bytes=stash_bytes if is_cuda else 0,
                limit_bytes=machine.pinned_bytes,
                limit="may be page-locked",
            ),
            Shortage(
                what="of RAM",
                needed_bytes=total_bytes(host) + (0 if is_cuda else device_bytes),
                limit_bytes=machine.ram_bytes,
                limit="of RAM is there",
            ),
        ]
        return tuple(one for one in asked if one.short_bytes > 0)

    @property
    def fewest_slots(self) -> int:
        """The number of slots that was asked for, or the smallest that a step can have."""
        wanted = self.request.num_slots
        return min(MIN_SLOTS if wanted is None else wanted, self.facts.num_layers)

    @property
    def most_slots(self) -> int | None:
        """The number of slots that was asked for, or the largest that fits; None if none does.

        More slots always take more memory, so half of the numbers are ruled out at a time.
        """
        fewest = self.fewest_slots
        if self.shortages(fewest):
            return None
        if self.request.num_slots is not None:
            return fewest
        low, high = fewest, self.facts.num_layers
        while low < high:
            middle = (low + high + 1) // 2
            if self.shortages(middle):
                high = middle - 1
            else:
                low = middle
        return low


def refusal(needs: Needs) -> DoesNotFitError:
    """Return the error for a request that does not fit: what is short, by how much, what fits."""
    num_slots, machine = needs.fewest_slots, needs.machine
    shortages = needs.shortages(num_slots)
    short = " and ".join(f"{_gib(s.needed_bytes)} {s.what}" for s in shortages)
    inputs = " and their inputs in RAM" if needs.request.is_stashed else ""
    inputs += ", its visits traced," if needs.request.traced else ""
    return DoesNotFitError(
        f"with {num_slots} slots of {needs.facts.num_layers} layers{inputs} the plan needs {short},"
        f" {' and '.join(_gib(s.short_bytes) for s in shortages)} too much",
        limit=" and ".join(f"{_gib(s.limit_bytes)} {s.limit}" for s in shortages)
        + f" on {machine.name}",
        hint=_nearest_fit(needs),
    )


def _nearest_fit(needs: Needs) -> str:
    """Name the nearest change that fits: first those that leave what is trained as it is."""
    wanted = needs.request.num_slots
    for words, request in _changes(needs.request):
        open_request = replace(request, num_slots=None)
        num_slots = Needs.of(needs.facts, needs.machine, open_request).most_slots
        if num_slots is None:
            continue
        if wanted is None or num_slots >= min(wanted, needs.facts.num_layers):
            return words
        slots = f"`offload.num_slots: {num_slots}`"
        return _joined(words, slots)
    return "a machine with more memory, or a smaller model"


def _changes(request: "PlanRequest") -> Iterator[tuple[str, "PlanRequest"]]:
    """Yield requests by how far they are from this one, each with the settings that make it.

    First come those that leave the training as it is, then rounded weights, then shorter sequences.
    """
    exact = [("", request), *_coded(request, PACKED)]
    for words, coded in exact:
        yield from _either_stash(words, coded)
    for num_ranks in range(request.num_ranks - 1, 0, -1):
        yield f"`--num_processes {num_ranks}`", replace(request, num_ranks=num_ranks)
    yield from _all_cut(exact)
    rounded = _coded(request, ROUNDED)
    for words, coded in rounded:
        yield from _either_stash(words, coded)
    yield from _all_cut(rounded)
    seq_len = request.largest.seq_len // 2
    while seq_len >= MIN_HINTED_SEQ_LEN:
        for words, coded in (*exact, *rounded):
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


def _size(terms: tuple[MemoryTerm, ...], name: str) -> int:
    return sum(term.num_bytes for term in terms if term.name == name)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
