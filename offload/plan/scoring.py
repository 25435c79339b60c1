"""The plan of scoring rows under several adapters: sizes, sweeps, memory and time.

A sweep is one forward pass over the layers. Its time hardly depends on the slots, as each layer is
visited once, so device memory is worth most as hidden states: each micro-batch has one for each
adapter from the first layer to the last, and what does not fit into a sweep takes another, with
all its loads. So the plan takes the fewest sweeps, and slots from what is left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, codecs_that
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import Workload, embedding_bytes, head_bytes
from offload.plan.machine.machine import GIB, Machine
from offload.plan.memory.memory import (
    CONTEXT,
    CUBLAS,
    CUBLAS_BYTES,
    FRAGMENTATION,
    FRAGMENTATION_FRAC,
    HEAD_CHUNK,
    OUTER,
    SLOTS,
    VISIT,
    MemoryTerm,
    carried_bytes,
    head_chunk_bytes,
    image_bytes,
    input_bytes,
    layer_weight_bytes,
    recorded_bytes,
    total_bytes,
)
from offload.plan.memory.visit import visit_bytes
from offload.plan.schedule.schedule import (
    MIN_SLOTS,
    Ring,
    Schedule,
    cold_ring,
    forward_schedule,
    slots_bytes,
)
from offload.plan.schedule.simulate import merged_s
from offload.plan.step import duration_of, load_sizes
from offload.plan.time.costs import Costs, price, with_norms, with_objective

# Each layer is visited once: more slots than let loads run ahead of visits of unequal times are of
# no use, unless all layers stay from sweep to sweep.
FEW_SLOTS = (MIN_SLOTS, 3, 4)
MICRO_BATCH_TOKENS = (1024, 2048, 4096, 8192, 16_384)
LABEL_BYTES, SCORE_BYTES = 8, 4 + 1  # of a token: its label; under each adapter score, if greedy

Cut = tuple[tuple[int, ...], ...]
"""Micro-batches, each the numbers of its rows."""


def cut_rows(lengths: Sequence[int], *, max_tokens: int) -> Cut:
    """Divide rows into micro-batches of rows of like length, longest first.

    Args:
        lengths: Tokens of each row.
        max_tokens: Of a micro-batch, padding included; a longer row is one by itself.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches, taken = list[tuple[int, ...]](), list[int]()
    for row in order:
        if taken and (len(taken) + 1) * lengths[taken[0]] > max_tokens:
            batches.append(tuple(taken))
            taken = []
        taken.append(row)
    return (*batches, tuple(taken)) if taken else tuple(batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """What is to be scored."""

    workload: Workload  # how layers compute; its sizes are replaced by those of micro-batches
    lengths: tuple[int, ...]  # tokens of each row
    num_labels: int  # tokens of all rows that are scored
    num_adapters: int  # how often each row is scored, the base without adapters included
    adapter_bytes: int  # bytes of all adapters in device memory
    num_slots: int | None  # layers on the device at a time; None takes as many as fit
    vram_budget_bytes: int | None  # device memory that may be used; None takes all of the machine's
    is_on_disk: bool  # whether the layers are stored in a file


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorePlan:
    """How rows are scored."""

    num_slots: int  # layers on the device at a time
    sweeps: tuple[Cut, ...]  # micro-batches of each pass over the layers
    num_loads: int  # layers copied to the device, from empty slots
    device_memory: tuple[MemoryTerm, ...]  # terms of the peak in device memory
    sweep_s: float  # predicted seconds of all sweeps

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory."""
        return total_bytes(self.device_memory)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all sweeps."""
        return sum(map(len, self.sweeps))


def plan_scoring(facts: ModelFacts, machine: Machine, request: ScoreRequest) -> ScorePlan:
    """Choose micro-batches, sweeps and slots, the fastest that fit.

    Raises:
        DoesNotFitError: Not even one micro-batch fits, or the layers do not fit in RAM.
    """
    _require_ram(facts, machine, request)
    drafts = [_Draft.of(facts, machine, request, tokens) for tokens in _sizes(request)]
    plans = [plan for draft in drafts for plan in draft.plans()]
    if not plans:
        raise _too_small(drafts[0])
    return min(plans, key=lambda plan: (plan.sweep_s, plan.num_slots, plan.num_micro_batches))


def _sizes(request: ScoreRequest) -> list[int]:
    """Return the sizes of micro-batches to choose from: the longest row, and larger ones."""
    longest = max(request.lengths)
    return [longest, *(size for size in MICRO_BATCH_TOKENS if size > longest)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A plan without its slots."""

    facts: ModelFacts  # the model
    machine: Machine  # the machine
    request: ScoreRequest  # the request
    cut: Cut  # the micro-batches
    largest: Workload  # the one with most tokens, as a workload
    typical: Workload  # the mean one
    token_bytes: float  # what all passes of a token hold until the last layer

    @classmethod
    def of(
        cls, facts: ModelFacts, machine: Machine, request: ScoreRequest, max_tokens: int
    ) -> "_Draft":
        lengths = request.lengths
        cut = cut_rows(lengths, max_tokens=max_tokens)
        widest = max(cut, key=lambda rows: len(rows) * lengths[rows[0]])
        num_padded = sum(len(rows) * lengths[rows[0]] for rows in cut)
        one = replace(request.workload, micro_batch_size=1, seq_len=max(lengths))
        recorded = recorded_bytes(facts, one, is_padded=False)
        held = input_bytes(facts, one) + recorded + carried_bytes(facts, one)
        held += image_bytes(facts, one, num_micro_batches=1)
        return cls(
            facts=facts,
            machine=machine,
            request=request,
            cut=cut,
            largest=replace(
                request.workload,
                micro_batch_size=len(widest),
                seq_len=lengths[widest[0]],
                label_tokens=sum(lengths[row] for row in widest),
            ),
            typical=replace(
                request.workload,
                micro_batch_size=max(1, round(len(lengths) / len(cut))),
                seq_len=max(1, num_padded // len(lengths)),
                label_tokens=max(1, request.num_labels // len(cut)),
            ),
            token_bytes=request.num_adapters * held / one.num_tokens
            + SCORE_BYTES * request.num_adapters
            + LABEL_BYTES,
        )

    def plans(self) -> Iterator[ScorePlan]:
        """Give the plan of each number of slots that fits and takes no more sweeps than fewer."""
        num_layers, wanted = self.facts.num_layers, self.request.num_slots
        numbers = {min(num, num_layers) for num in (*FEW_SLOTS, num_layers)}
        if wanted is not None:
            numbers = {min(wanted, num_layers)}
        costs, fewest = self._costs(), 0
        for num_slots in sorted(numbers):
            sweeps = self._sweeps(num_slots)
            fewest = fewest or len(sweeps)
            # residency saves the loads of all sweeps but the first, so it may be worth more of them
            if not sweeps or (len(sweeps) > fewest and num_slots < num_layers):
                continue
            sweep_s, num_loads = self._time(sweeps, num_slots, costs)
            yield ScorePlan(
                num_slots=num_slots,
                sweeps=sweeps,
                num_loads=num_loads,
                device_memory=self.terms(num_slots, max(map(self.hidden_bytes, sweeps))),
                sweep_s=sweep_s,
            )

    def hidden_bytes(self, batches: Cut) -> int:
        """Return what the passes of a sweep hold: hidden states and arguments of layers."""
        tokens = sum(len(rows) * self.request.lengths[rows[0]] for rows in batches)
        return int(tokens * self.token_bytes)

    def terms(self, num_slots: int, hidden_bytes: int) -> tuple[MemoryTerm, ...]:
        """List the terms of device memory."""
        facts, load, is_cuda = self.facts, self.largest, self.machine.device == "cuda"
        visits = [
            visit_bytes(facts, self.machine, layer, load, is_padded=False)
            for layer in set(facts.layers)
        ]
        slot_bytes = max(load.cargo_bytes(layer) for layer in set(facts.layers))
        head = head_bytes(facts, load)
        on_host = embedding_bytes(facts, load) + head
        sizes = {
            SLOTS: slots_bytes(num_slots, slot_bytes, head),
            OUTER: facts.outer_parameters * load.dtype_bytes - on_host,
            "adapters": self.request.adapter_bytes,
            "hidden states": hidden_bytes,
            # what a graph would save is no less than what a visit without one has at a time
            VISIT: max(one.graph + one.own_input + one.dora + one.update for one in visits)
            + input_bytes(facts, load),
            HEAD_CHUNK: head_chunk_bytes(
                facts, load, is_fused=load.fuses_loss(self.machine.device)
            ),
        }
        if load.is_encoded:
            sizes["decoded layer"] = max(layer_weight_bytes(facts, dtype_bytes=load.dtype_bytes))
            sizes["decode workspace"] = CODECS[load.codec].workspace_bytes
        sizes[FRAGMENTATION] = int(FRAGMENTATION_FRAC * sum(sizes.values()))
        sizes |= {CUBLAS: CUBLAS_BYTES if is_cuda else 0, CONTEXT: self.machine.context_bytes}
        return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in sizes.items() if size)

    @property
    def limit_bytes(self) -> int:
        """Device memory that may be used."""
        budget, vram = self.request.vram_budget_bytes, self.machine.vram_bytes
        return vram if budget is None else min(vram, budget)

    def _sweeps(self, num_slots: int) -> tuple[Cut, ...]:
        """Divide the micro-batches into sweeps that fit; none if not even one fits alone."""
        free = self.limit_bytes - total_bytes(self.terms(num_slots, 0))
        free = int(free / (1 + FRAGMENTATION_FRAC))
        sweeps, taken, used = list[Cut](), list[tuple[int, ...]](), 0
        for rows in self.cut:
            size = self.hidden_bytes((rows,))
            if size > free:
                return ()
            if used + size > free:
                sweeps.append(tuple(taken))
                taken, used = [], 0
            taken.append(rows)
            used += size
        return (*sweeps, tuple(taken))

    def _costs(self) -> Costs:
        costs = price(
            self.facts,
            self.machine,
            self.typical,
            num_disk_readers=1 if self.request.is_on_disk else 0,
        )
        scored = with_objective(
            costs, self.facts, self.machine, self.typical, num_scored=1, num_references=0
        )
        return replace(scored, tail_s=scored.score_s)

    def _time(self, sweeps: Sequence[Cut], num_slots: int, costs: Costs) -> tuple[float, int]:
        """Return the seconds and the loads of all sweeps."""
        load = self.typical
        sizes = load_sizes(self.facts, load, costs)
        sizes = replace(
            sizes,
            piece_bytes=max(sizes.layer_bytes),
            head_bytes=head_bytes(self.facts, load),
        )
        schedules, seconds, num_loads = dict[Ring, Schedule](), 0.0, 0
        ring = cold_ring(num_slots)
        for batches in sweeps:
            if ring not in schedules:
                schedules[ring] = forward_schedule(sizes, ring=ring, num_micro_batches=1)
            schedule = schedules[ring]
            num = len(batches)
            one_s = duration_of(
                with_norms(costs, self.facts, self.machine, load, num_micro_batches=num)
            )
            durations_s = [sum(map(one_s, line.ops)) for line in schedule.lines]
            seconds += merged_s(
                schedule, durations_s, num_micro_batches=num * self.request.num_adapters
            )
            num_loads += schedule.num_loads
            ring = schedule.ring_after
        return seconds, num_loads


def _require_ram(facts: ModelFacts, machine: Machine, request: ScoreRequest) -> None:
    """Check that the layers fit in RAM where they wait there.

    Raises:
        DoesNotFitError: They do not.
    """
    load = request.workload
    waiting = 0 if request.is_on_disk else sum(map(load.cargo_bytes, facts.layers))
    waiting += embedding_bytes(facts, load) + head_bytes(facts, load)
    also = ", the embedding" if load.embeddings == "host" else ""
    also += ", the head" if load.head == "host" else ""
    also = " and".join(also.rsplit(",", 1))
    if waiting > machine.ram_bytes:
        raise DoesNotFitError(
            f"the layers{also} take {waiting / GIB:.2f} GiB of RAM",
            limit=f"{machine.ram_bytes / GIB:.2f} GiB of RAM is there on {machine.name}",
            hint="`offload.tier=disk`, or"
            f" `offload.codec={codecs_that(lambda codec: codec.is_suggested)[-1]}`",
        )


def _too_small(draft: _Draft) -> DoesNotFitError:
    """Return the error that the longest row alone does not fit under all adapters."""
    wanted = draft.request.num_slots
    num_slots = min(wanted or MIN_SLOTS, draft.facts.num_layers)
    hidden_bytes = max(draft.hidden_bytes((rows,)) for rows in draft.cut)
    needed = total_bytes(draft.terms(num_slots, hidden_bytes))
    fix = "fewer adapters at a time, or shorter rows: a smaller `train.seq_len=`"
    if wanted is not None and wanted > MIN_SLOTS:
        fix = f"`offload.num_slots={MIN_SLOTS}`"
    return DoesNotFitError(
        f"scoring a row of {max(draft.request.lengths):,} tokens under"
        f" {draft.request.num_adapters} adapters with {num_slots} slots needs"
        f" {needed / GIB:.2f} GiB of device memory",
        limit=f"{draft.limit_bytes / GIB:.2f} GiB may be used on {draft.machine.name}",
        hint=fix,
    )
