"""Whether a request fits a machine, with how many slots, and which memory is too small.

The plan, the search among plans and the refusal all use this module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import (
    HEAD,
    LOCKED_TERMS,
    OTHER_RANKS,
    SENT,
    SLAB,
    STAGING,
    STASH,
    DeviceNeeds,
    HostLoad,
    MemoryTerm,
    Scoring,
    device_needs,
    host_terms,
    input_bytes,
    locked_update_bytes,
    shared_needs,
)
from offload.plan.request import PlanRequest
from offload.plan.schedule.schedule import MIN_SLOTS, Order, Residency

DEVICE, RAM = "of device memory", "of RAM"
LOCKED = "of page-locked memory"
GRADIENTS = f"{LOCKED} for gradients of the model's weights"
GRAPH_RESERVE_FRAC = 0.1  # error of the formula for what autograd saves, over all tests


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A memory that is too small."""

    what: str  # the memory's name, with "of" before it, e.g. "of RAM".
    needed_bytes: int  # bytes that the request needs
    limit_bytes: int  # bytes that are available
    limit: str  # the part of the message that follows the available size

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing."""
        return self.needed_bytes - self.limit_bytes


@dataclass(frozen=True, kw_only=True)  # no slots: some properties are computed once
class MemoryNeeds:
    """The memory of a request, by the number of slots and of layers that are not checkpointed."""

    facts: ModelFacts  # the model
    machine: Machine  # the machine that it runs on
    request: PlanRequest  # the request
    on_device: DeviceNeeds  # the use of device memory

    @classmethod
    def of(cls, facts: ModelFacts, machine: Machine, request: PlanRequest) -> "MemoryNeeds":
        """Add up the memory of a request; there are at most as many slots as layers."""
        request = request.within(facts.num_layers)
        scored = any(run.objective is not None for run in request.runs)
        on_device = shared_needs(
            [_run_needs(facts, machine, run, are_others_scored=scored) for run in request.runs]
        )
        return cls(facts=facts, machine=machine, request=request, on_device=on_device)

    def device(self, residency: Residency) -> tuple[MemoryTerm, ...]:
        """Return the terms of each device's peak."""
        return self.on_device.terms(residency)

    def host(self, residency: Residency) -> tuple[MemoryTerm, ...]:
        """Return the terms of the host's peak; inputs of graphs are not stashed there."""
        sizes = self._host_sizes(residency).items()
        return tuple(MemoryTerm(name=name, num_bytes=num_bytes) for name, num_bytes in sizes)

    def _host_sizes(self, residency: Residency) -> dict[str, int]:
        """Return the bytes of each term of the host's peak, by its name."""
        request = self.request
        sizes = dict(self._fixed_sizes or self._sizes_with(residency))
        if not (residency.sends or request.is_stashed):
            return sizes
        num_others = request.local_ranks - 1
        if residency.sends:
            sent_bytes = self.on_device.sent_bytes(residency)
            if OTHER_RANKS in sizes:
                sizes[OTHER_RANKS] += num_others * sent_bytes
            sizes[SENT] = sent_bytes
        num_layers = self.facts.num_layers  # the last one's input never leaves
        num_graphs = max(0, residency.num_kept_graphs - 1)
        num_graphs += len(residency.sent_graphs(num_layers) - {num_layers - 1})
        if num_graphs and request.is_stashed:
            spared = num_graphs * sum(
                run.num_stashed * input_bytes(self.facts, run.largest) for run in request.runs
            )
            for name, spared_bytes in ((STASH, spared), (OTHER_RANKS, num_others * spared)):
                if name in sizes:
                    sizes[name] -= spared_bytes
        return sizes

    @cached_property
    def _fixed_sizes(self) -> dict[str, int]:
        """The bytes of each term of host memory, by its name; none if they grow with the slots.

        Several ranks on a CPU count each other's slots as host memory.
        """
        is_fixed = self.machine.device == "cuda" or self.request.local_ranks == 1
        return self._sizes_with(self.least) if is_fixed else {}

    def _sizes_with(self, residency: Residency) -> dict[str, int]:
        """Return the bytes of each term, by its name, with all layers checkpointed."""
        request = self.request
        terms = host_terms(
            self.facts,
            self.machine,
            [
                HostLoad(
                    workload=run.largest,
                    num_workers=run.num_workers,
                    num_stashed=run.num_stashed,
                    feature_bytes=run.feature_bytes(self.facts.hidden_size),
                )
                for run in request.runs
            ],
            local_ranks=request.local_ranks,
            num_slabs=request.num_slabs,
            rank_device_bytes=self.on_device.peak_bytes(residency),
        )
        return {term.name: term.num_bytes for term in terms}

    @cached_property
    def is_staged(self) -> bool:
        """Whether loads pass through page-locked buffers, as not all of the slab can be locked."""
        fewest = self.least._replace(num_kept_graphs=self._fewest_graphs)
        return bool(self._host_sizes(fewest).get(STAGING))

    def shortages(self, residency: Residency) -> tuple[Shortage, ...]:
        """Return each memory that is too small; on a CPU there is only one memory.

        Graphs that the request does not set are counted with a reserve, and so are those that are
        sent: a step that ran out of memory because of them would have to be planned again.
        """
        is_cuda = self.machine.device == "cuda"
        device_bytes, limit_bytes = self._device_bytes(residency), self._limit_bytes
        on_host = self._host_shortages(residency, computing_bytes=0 if is_cuda else device_bytes)
        if device_bytes <= limit_bytes:
            return on_host
        on_device = Shortage(
            what=DEVICE if is_cuda else "of memory for computing",
            needed_bytes=device_bytes,
            limit_bytes=limit_bytes,
            limit="may be used",
        )
        return (on_device, *on_host)

    @cached_property
    def is_short(self) -> Callable[[Residency], bool]:
        """Whether any memory is too small: a search asks for the same residencies again."""
        limit_bytes = self._limit_bytes
        is_fixed = bool(self._fixed_sizes) and self.machine.device == "cuda"
        is_stashed = self.request.is_stashed

        @cache
        def is_short(residency: Residency) -> bool:
            if self._device_bytes(residency) > limit_bytes:
                return True
            # what is not sent nor stashed takes no room on the host
            if is_fixed and not (residency.sends or is_stashed):
                return bool(self._host_short)
            return bool(self.shortages(residency))

        return is_short

    @cached_property
    def _host_short(self) -> tuple[Shortage, ...]:
        """What the host lacks of a step that sends nothing."""
        return self._host_shortages(self.least)

    @cached_property
    def _limit_bytes(self) -> int:
        """Device memory that may be used."""
        return min(
            self.machine.vram_bytes, self.request.vram_budget_bytes or self.machine.vram_bytes
        )

    def _device_bytes(self, residency: Residency) -> int:
        """Return the peak of device memory, with the reserve."""
        device_bytes = self.on_device.peak_bytes(residency)
        if self.request.num_kept_graphs is None:
            graph_bytes = self.on_device.graph_bytes[residency.num_kept_graphs]
            device_bytes += int(GRAPH_RESERVE_FRAC * graph_bytes)
        return device_bytes

    def _host_shortages(
        self, residency: Residency, *, computing_bytes: int = 0
    ) -> tuple[Shortage, ...]:
        host = self._host_sizes(residency)
        is_locked, machine = self.machine.device == "cuda", self.machine
        reserve_bytes = int(GRAPH_RESERVE_FRAC * self.on_device.sent_graphs_bytes(residency))
        reserve_bytes *= self.request.local_ranks
        locked_ranks = self.request.local_ranks if is_locked else 0
        inputs_bytes = locked_ranks * host.get(STASH, 0)
        fixed, fixed_bytes = f"{LOCKED} for the head" if HEAD in host else GRADIENTS, 0
        if HEAD in host or self._gradient_bytes:  # unlike layers, these have no ring to go through
            fixed_bytes = locked_ranks * (self._rank_locked_bytes(host) - host.get(SENT, 0))
        sent_bytes = 0
        if is_locked and residency.sends:
            sent_bytes = self._locked_bytes(host) + reserve_bytes
        ram_bytes = sum(host.values()) + reserve_bytes + computing_bytes
        inputs, sent = f"{LOCKED} for layer inputs", f"{LOCKED} for sent activations"
        asked = (
            (inputs, inputs_bytes, machine.pinned_bytes, "may be page-locked"),
            (sent, sent_bytes, machine.pinned_bytes, "may be page-locked"),
            (fixed, fixed_bytes, machine.pinned_bytes, "may be page-locked"),
            (RAM, ram_bytes, machine.ram_bytes, "of RAM is there"),
        )
        return tuple(
            Shortage(what=what, needed_bytes=needed, limit_bytes=limit_bytes, limit=limit)
            for what, needed, limit_bytes, limit in asked
            if needed > limit_bytes
        )

    @cached_property
    def _gradient_bytes(self) -> int:
        """Page-locked memory of a rank for gradients of layers' own weights."""
        return locked_update_bytes(self.request.largest)

    def _rank_locked_bytes(self, host: Mapping[str, int]) -> int:
        """Return the page-locked memory of a rank without layers."""
        return sum([host.get(name, 0) for name in LOCKED_TERMS]) + self._gradient_bytes

    def _locked_bytes(self, host: Mapping[str, int]) -> int:
        """Return the page-locked memory of all ranks: what is sent locks no slab out."""
        staging = host.get(STAGING, 0)
        each = self._rank_locked_bytes(host) + staging
        slabs = 0 if staging else self.request.num_slabs * host.get(SLAB, 0)
        return slabs + self.request.local_ranks * each

    @cached_property
    def least(self) -> Residency:
        """The least that a step of this model can have on the device."""
        return Residency(num_slots=min(MIN_SLOTS, self.facts.num_layers))

    @property
    def fewest(self) -> Residency:
        """What the request asks for, or the least with which a step fits."""
        return Residency(num_slots=self._fewest_slots, num_kept_graphs=self._fewest_graphs)

    @property
    def _fewest_slots(self) -> int:
        wanted = self.request.num_slots
        return self.least.num_slots if wanted is None else wanted

    @cached_property
    def _fewest_graphs(self) -> int:
        """The requested number of kept graphs, or the smallest with which a step fits.

        The smallest is 0 unless host memory is too small for the stashed inputs. The inputs of kept
        graphs are not stashed, and the device may have room for enough graphs.
        """
        may_choose = self.chooses_graphs and self.machine.device == "cuda"
        may_help = may_choose and self.request.is_stashed
        if not (may_help and self._host_shortages(self.least)):
            return self.request.num_kept_graphs or 0
        numbers = range(self.facts.num_layers + 1)
        lacking = (
            bool(self._host_shortages(self.least._replace(num_kept_graphs=n))) for n in numbers
        )
        fewest = next((n for n, lacks in enumerate(lacking) if not lacks), len(numbers))
        found = Residency(num_slots=self._fewest_slots, num_kept_graphs=fewest)
        return fewest if fewest < len(numbers) and not self.is_short(found) else 0

    @property
    def chooses_outputs(self) -> bool:
        """Whether attention may be kept or sent, and its size is known, from tested formulas."""
        return self.request.has_outputs and self.facts.is_memory_tested

    @property
    def may_send(self) -> bool:
        """Whether activations may leave the device, which has a memory of its own.

        They do only where all micro-batches pass a layer together: the host has a place for each.
        """
        return self.machine.device == "cuda" and self.request.order is Order.LAYER_MAJOR

    @property
    def chooses_sent_graphs(self) -> bool:
        """Whether graphs may be sent, and their size is known."""
        return self.request.has_sent_graphs and self.may_send and self.facts.is_memory_tested

    @property
    def chooses_graphs(self) -> bool:
        """Whether the number of kept graphs is open, and the size of a graph is known.

        The size is known from a trace, or from formulas that are tested for the model's type. Of
        other models no graph is kept unless the request asks.
        """
        is_known = self.facts.is_memory_tested or self.request.traced is not None
        return is_known and self.request.num_kept_graphs is None

    def with_graphs(
        self, num_slots: int, *, num_sent_outputs: int = 0, num_sent_graphs: int = 0
    ) -> Residency:
        """Return these slots with the requested number of kept graphs, or the largest that fits."""
        fewest = Residency(
            num_slots=num_slots,
            num_kept_graphs=self._fewest_graphs,
            num_sent_outputs=num_sent_outputs,
            num_sent_graphs=num_sent_graphs,
        )
        if not self.chooses_graphs:
            return fewest
        most = self._most(fewest, "num_kept_graphs", self.facts.num_layers)
        return fewest._replace(num_kept_graphs=most)

    def with_outputs(self, residency: Residency) -> Residency:
        """Return the same with as many kept outputs of attention as fit."""
        most = self._most(residency, "num_kept_outputs", self.most_outputs(residency))
        return residency._replace(num_kept_outputs=most)

    def with_outputs_first(self, residency: Residency) -> Residency:
        """Return the same with all outputs of attention, and graphs in the rest of the memory."""
        fewest = residency._replace(num_kept_graphs=self._fewest_graphs)
        most = self.with_outputs(fewest)
        if most.num_kept_outputs < self.most_outputs(fewest) or not self.chooses_graphs:
            return most
        num_graphs = self._most(most, "num_kept_graphs", self.facts.num_layers)
        more = most._replace(num_kept_graphs=num_graphs)
        return more._replace(num_kept_outputs=self.most_outputs(more))

    def most_sent(self, residency: Residency) -> int:
        """Return how many of the layers that keep nothing could send their outputs."""
        limit = self.most_outputs(residency) - residency.num_kept_outputs
        return self._most(residency._replace(num_sent_outputs=0), "num_sent_outputs", limit)

    def most_sent_graphs(self, residency: Residency) -> int:
        """Return how many of the layers that do not keep their graphs could send them."""
        limit = self.facts.num_layers - residency.num_kept_graphs
        return self._most(residency._replace(num_sent_graphs=0), "num_sent_graphs", limit)

    def _most(self, residency: Residency, name: str, limit: int) -> int:
        """Return how large a number of a residency may be; a larger one takes more memory."""
        number = Residency._fields.index(name)
        before, low, after = residency[:number], residency[number], residency[number + 1 :]
        high = max(low, limit)
        while low < high:
            middle = (low + high + 1) // 2
            if self.is_short(Residency._make((*before, middle, *after))):
                high = middle - 1
            else:
                low = middle
        return low

    def most_outputs(self, residency: Residency) -> int:
        """Return how many layers compute attention again, and could be spared it."""
        num_layers = self.facts.num_layers
        others = set(range(num_layers - residency.num_kept_graphs))
        others -= residency.sent_graphs(num_layers)
        return len(others & self._with_output)

    @cached_property
    def _with_output(self) -> frozenset[int]:
        """The layers whose attention has an output that could be kept."""
        return frozenset([i for i, size in enumerate(self.on_device.output_bytes) if size])

    @property
    def most_slots(self) -> int | None:
        """The requested number of slots, or the largest that fits; None if none fits."""
        fewest = self.fewest
        if self.is_short(fewest):
            return None
        if self.request.num_slots is not None:
            return fewest.num_slots
        return self._most(fewest, "num_slots", self.facts.num_layers)


def fits(facts: ModelFacts, machine: Machine, request: PlanRequest) -> bool:
    """Return whether there is any plan for a request."""
    return MemoryNeeds.of(facts, machine, request).most_slots is not None


def _run_needs(
    facts: ModelFacts, machine: Machine, run: PlanRequest, *, are_others_scored: bool
) -> DeviceNeeds:
    objective, scoring = run.objective, None
    if objective is not None:
        scoring = Scoring(
            extra_passes=run.extra_passes,
            num_top=objective.num_top,
            is_tempered=objective.is_tempered,
        )
    return device_needs(
        facts,
        machine,
        run.largest,
        num_micro_batches=run.largest_micro_batches,
        is_reduced=run.has_other_ranks,
        is_padded=run.is_masked,
        is_stashed=run.is_stashed,
        traced=run.traced,
        scoring=scoring,
        are_others_scored=are_others_scored,
    )
