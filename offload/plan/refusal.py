"""The error for a request that does not fit: which memory is too small, why, and what would fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, NATIVE, automatic_codecs, codecs_that
from offload.plan.facts.optimizer import optimizers_that
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, ROUTER, SCORE
from offload.plan.facts.workload import head_bytes, why_head_on_device, why_on_device
from offload.plan.fit import DEVICE, RAM, MemoryNeeds, Shortage
from offload.plan.machine.machine import GIB
from offload.plan.memory.memory import (
    EMBEDDINGS_IN_RAM,
    FEWER_SLOTS,
    FEWER_TARGETS,
    HEAD_IN_RAM,
    INPUTS_IN_RAM,
    MICRO_BATCH,
    ON_DISK,
    RANK,
    ROUNDED_LAYERS,
    SHRINKS,
    SLOTS,
    SMALLER_CHUNK,
    SMALLER_HOST_STATES,
    SMALLER_STATES,
    SMALLER_TILES,
    TIED_IN_RAM,
    MemoryTerm,
)
from offload.plan.request import (
    FEWEST_CHUNK_TOKENS,
    MLP_CHUNKS,
    PlanRequest,
    in_fewer_micro_batches,
    over_fewer_ranks,
    with_workload,
)
from offload.plan.schedule.schedule import MIN_SLOTS, Order

MIN_HINTED_SEQ_LEN = 128
NUM_NAMED_TERMS, NAMED_FRAC = 3, 0.05  # of a memory that is too small


def refusal(needs: MemoryNeeds) -> DoesNotFitError:
    """Return the error for a request that does not fit, with the nearest change that does."""
    fewest, machine = needs.fewest, needs.machine
    shortages = needs.shortages(fewest)
    short = " and ".join(f"{_gib(s.needed_bytes)} {s.what}" for s in shortages)
    kept = f", {fewest.num_kept_graphs} kept graphs" if fewest.num_kept_graphs else ""
    kept += " and their inputs in RAM" if needs.request.is_stashed else ""
    largest = needs.request.largest
    notes = {
        "the embedding in RAM": largest.embeddings == "host",
        "the head in RAM": largest.head == "host",
        "its visits traced": needs.request.traced is not None,
    }
    named = [note for note, holds in notes.items() if holds]
    kept += ", ".join(["", *named, ""]).rstrip() if named else ""
    return DoesNotFitError(
        f"with {fewest.num_slots} slots of {needs.facts.num_layers} layers{kept} the plan needs"
        f" {short},"
        f" {' and '.join(_gib(s.short_bytes) for s in shortages)} too much",
        limit=" and ".join(f"{_gib(s.limit_bytes)} {s.limit}" for s in shortages)
        + f" on {machine.name}{_left_to_others(needs, shortages)}"
        + "".join(_largest_terms(needs, shortage) for shortage in shortages),
        hint=", or ".join(filter(None, (_nearest_fit(needs), _freed(needs, shortages)))),
    )


def _freed(needs: MemoryNeeds, shortages: Sequence[Shortage]) -> str:
    """Say what others would have to free on a measured machine, if they have that much."""
    others = _others_bytes(needs) if needs.machine.is_measured else {}
    if any(short.short_bytes > others.get(short.what, 0) for short in shortages):
        return ""
    freed = " and ".join(f"{_gib(short.short_bytes)} {short.what}" for short in shortages)
    return f"close other programs, until {freed} more is free"


def _others_bytes(needs: MemoryNeeds) -> dict[str, int]:
    """Return what others have of each memory, unless a budget is what limits the plan."""
    machine, budget_bytes = needs.machine, needs.request.vram_budget_bytes
    is_budget = budget_bytes is not None and budget_bytes < machine.vram_bytes
    return {DEVICE: 0 if is_budget else machine.desktop_bytes, RAM: machine.system_bytes}


def _left_to_others(needs: MemoryNeeds, shortages: Sequence[Shortage]) -> str:
    """Say how much of each memory that is too small is not the plan's to use."""
    sizes = _others_bytes(needs)
    words = {DEVICE: "left to a desktop (`--headless`: none)", RAM: "left to the system"}
    if needs.machine.is_measured:
        words = dict.fromkeys(words, "in use by others")
    named = [
        f"{_gib(sizes[one.what])} {words[one.what]}" for one in shortages if sizes.get(one.what)
    ]
    return f", with {' and '.join(named)}" if named else ""


def _largest_terms(needs: MemoryNeeds, shortage: Shortage) -> str:
    """List the largest terms of a memory that is too small, and the settings that shrink them."""
    device, host = needs.device(needs.fewest), needs.host(needs.fewest)
    is_cuda = needs.machine.device == "cuda"
    terms = {DEVICE: device, RAM: host if is_cuda else (*host, *device)}.get(shortage.what, ())
    largest = sorted(terms, key=lambda term: -term.num_bytes)[:NUM_NAMED_TERMS]
    named = [term for term in largest if term.num_bytes >= NAMED_FRAC * shortage.needed_bytes]
    if not named:
        return ""
    words = {term.name: ", ".join(_effective(term, needs)) for term in named}
    return f"\n  Most {shortage.what} is for:" + "".join(
        f"\n  {_gib(term.num_bytes):>11}  {term.name}"
        + (f"; less with {words[term.name]}" if words[term.name] else "")
        for term in named
    )


def _effective(term: MemoryTerm, needs: MemoryNeeds) -> list[str]:
    """Return the settings that make a term smaller and are not in effect yet."""
    request, largest = needs.request, needs.request.largest
    is_tied = needs.facts.tie_word_embeddings
    may_move, may_move_head = _movable(needs)
    if term.name == SLOTS and term.num_bytes == head_bytes(needs.facts, largest):
        return []  # smaller or fewer slots would be as large
    has_no_effect = {
        MICRO_BATCH: largest.micro_batch_size == 1,
        FEWER_SLOTS: request.num_slots in (None, MIN_SLOTS),
        ROUNDED_LAYERS: not CODECS[largest.codec].is_exact or not _is_frozen(request),
        ON_DISK: not request.may_be_on_disk or not _is_frozen(request),
        RANK: not _is_frozen(request),
        FEWER_TARGETS: not _is_frozen(request),
        INPUTS_IN_RAM: request.is_stashed,
        EMBEDDINGS_IN_RAM: is_tied or not may_move,
        HEAD_IN_RAM: is_tied or not may_move_head,
        TIED_IN_RAM: not is_tied or not may_move_head,
        SMALLER_TILES: (largest.mlp_chunk_tokens or 0) <= MLP_CHUNKS[-1],
        SMALLER_CHUNK: largest.head_chunk_tokens <= FEWEST_CHUNK_TOKENS,
    }
    others = {
        ROUNDED_LAYERS: f"`offload.codec: {codecs_that(lambda codec: codec.is_suggested)[-1]}`",
        SMALLER_STATES: _optimizers("device"),
        SMALLER_HOST_STATES: _optimizers("RAM"),
    }
    found = (words for words in SHRINKS.get(term.name, ()) if not has_no_effect.get(words))
    return [others.get(words, words) for words in found]


def _optimizers(place: str) -> str:
    """Name the optimizers with small states in a place, as values of a setting."""
    found = optimizers_that(lambda optimizer: place in optimizer.is_small_in)
    return f"`train.optimizer: {'`, or `'.join(found)}`"


def _movable(needs: MemoryNeeds) -> tuple[bool, bool]:
    """Return whether embedding and head are in a device's memory of its own, and need not be."""
    largest, is_cuda = needs.request.largest, needs.machine.device == "cuda"
    why, why_head = (f(needs.facts, largest.adapter) for f in (why_on_device, why_head_on_device))
    may_move = is_cuda and largest.embeddings == "device" and not why
    return may_move, is_cuda and largest.head == "device" and not why_head


def _moved(needs: MemoryNeeds, request: PlanRequest) -> list[tuple[str, PlanRequest]]:
    """Return the request with what may go to RAM of the weights around the layers."""
    may_move, may_move_head = _movable(needs)
    if needs.facts.tie_word_embeddings:
        both = with_workload(request, embeddings="host", head="host")
        return [(TIED_IN_RAM, both)] if may_move_head else []
    moved = [("", request)]
    if may_move:
        moved.append((EMBEDDINGS_IN_RAM, with_workload(request, embeddings="host")))
    if may_move_head:
        moved += [
            (_joined(words, HEAD_IN_RAM), with_workload(one, head="host")) for words, one in moved
        ]
    return moved[1:]


def _nearest_fit(needs: MemoryNeeds) -> str:
    """Name the nearest change that fits; changes that leave the training as it is come first."""
    asked, wanted, fewer = needs.request, needs.request.num_slots, ""
    if asked.num_kept_graphs:
        freely = replace(needs, request=replace(asked, num_kept_graphs=None))
        if not freely.shortages(freely.fewest._replace(num_kept_graphs=0)):
            most = freely.with_graphs(freely.fewest.num_slots)
            return _graphs(needs, most.num_kept_graphs)
        asked, fewer = replace(asked, num_kept_graphs=0), _graphs(needs, 0)
    packed = _packed(asked, needs.facts.published)
    for words, request in _changes(asked, packed=packed, moved=_moved(needs, asked)):
        open_request = replace(request, num_slots=None)
        num_slots = MemoryNeeds.of(needs.facts, needs.machine, open_request).most_slots
        if num_slots is None:
            continue
        if wanted is None or num_slots >= wanted:
            return _joined(words, fewer)
        slots = f"`offload.num_slots: {num_slots}`"
        return _joined(words, slots, fewer)
    unlimited = replace(needs.request, vram_budget_bytes=None)
    if MemoryNeeds.of(needs.facts, needs.machine, unlimited).most_slots is not None:
        return "a larger `offload.vram_budget`, or none"
    return "a machine with more memory, or a smaller model"


def _changes(
    request: PlanRequest,
    *,
    packed: Sequence[tuple[str, PlanRequest]],
    moved: Sequence[tuple[str, PlanRequest]],
) -> Iterator[tuple[str, PlanRequest]]:
    """Yield changed requests, the nearest first, each with the settings that change it.

    Requests that leave the training as it is come first: those in RAM, which are faster, then those
    on disk. Rounded weights come next, then shorter sequences. `packed` are those in exact forms of
    fewer bytes, `moved` those with more weights around the layers in RAM.
    """
    exact = [("", request), *packed, *moved]
    for words, coded in exact:
        yield from _either_stash(words, coded)
    for num, shared in over_fewer_ranks(request).items():
        yield f"`--num_processes {num}`", shared
    yield from _all_cut(exact)
    stored = _on_disk(exact)
    for words, placed in stored:
        yield from _either_stash(words, placed)
    yield from _all_cut(stored)
    rounded = _coded(request, codecs_that(lambda codec: codec.is_suggested)[-1:])
    for words, coded in rounded:
        yield from _either_stash(words, coded)
    yield from _all_cut(rounded)
    for fewer in in_fewer_micro_batches(request):
        yield from _either_stash(_tokens(fewer), fewer)
    seq_len = request.largest.seq_len // 2
    while seq_len >= MIN_HINTED_SEQ_LEN:
        for words, coded in (*exact, *stored, *rounded, *_on_disk(rounded)):
            largest = replace(coded.largest, seq_len=seq_len)
            shorter = replace(coded, largest=largest, traced=None)
            length = f"`train.seq_len: {seq_len}` with {_tokens(shorter)}"
            yield from _either_stash(_joined(words, length), shorter)
        seq_len //= 2


def _tokens(request: PlanRequest) -> str:
    """Return the setting of a step's tokens: with shorter rows it would have as many otherwise."""
    return f"`train.tokens_per_step: {request.num_micro_batches * request.largest.num_tokens}`"


def _packed(request: PlanRequest, published: str) -> list[tuple[str, PlanRequest]]:
    """Return the request in each exact form that takes fewer bytes than the weights' own."""
    is_plain = (request.largest.codec, request.largest.dtype_bytes) == (NATIVE, 2)
    return _coded(request, automatic_codecs(published) if is_plain else [])


def _coded(request: PlanRequest, codecs: Sequence[str]) -> list[tuple[str, PlanRequest]]:
    """Return the request with other codecs, if this run can use them and rounds nothing yet."""
    largest = request.largest
    is_encodable = set(largest.adapter.modules) <= {NORMS, ROUTER, EMBEDDING, HEAD, SCORE}
    if not is_encodable or largest.adapter.whole or not CODECS[largest.codec].is_exact:
        return []
    errors = {name: CODECS[name].rounding for name in codecs}
    return [
        (
            f"`offload.codec: {name}`"
            + (f" (rounds each weight, by {error:.1%} of their size)" if error else ""),
            with_workload(request, codec=name),
        )
        for name, error in errors.items()
    ]


def _on_disk(
    requests: Iterable[tuple[str, PlanRequest]],
) -> list[tuple[str, PlanRequest]]:
    """Return the requests with their layers in a file, if that is possible and not so already."""
    return [
        (
            _joined(words, "`offload.tier: disk`"),
            replace(request, is_on_disk=True, order=Order.LAYER_MAJOR),
        )
        for words, request in requests
        if request.may_be_on_disk and not request.is_on_disk and _is_frozen(request)
    ]


def _is_frozen(request: PlanRequest) -> bool:
    """Return whether the layers' own weights do not train."""
    return request.largest.adapter.whole is None


def _all_cut(
    requests: Iterable[tuple[str, PlanRequest]],
) -> Iterator[tuple[str, PlanRequest]]:
    """Yield requests with smaller micro-batches, the largest first."""
    for words, request in requests:
        largest = request.largest
        for size in range(largest.micro_batch_size - 1, 0, -1):
            num, rest = divmod(largest.micro_batch_size, size)
            if rest == 0:
                own = request.own_micro_batches
                cut = replace(
                    request,
                    largest=replace(largest, micro_batch_size=size),
                    num_micro_batches=request.num_micro_batches * num,
                    own_micro_batches=None if own is None else own * num,
                    traced=None,  # a trace is of one size
                )
                parts = f"`train.micro_batch_size: {size}` and {num} times as many"
                yield from _either_stash(_joined(words, parts), cut)


def _either_stash(words: str, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    yield words, request
    other = replace(request, is_stashed=not request.is_stashed, order=Order.LAYER_MAJOR)
    stash = f"`offload.stash: {'host' if other.is_stashed else 'device'}`"
    yield _joined(words, stash), other


def _graphs(needs: MemoryNeeds, number: int) -> str:
    """Return the setting of so many kept graphs, in place of `train.gradient_checkpointing`."""
    is_all = needs.request.num_kept_graphs == needs.facts.num_layers
    words = f"`offload.kept_graphs: {number}`"
    return _joined(words, "`train.gradient_checkpointing: auto`" if is_all else "")


def _joined(*words: str) -> str:
    return " with ".join(filter(None, words))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
