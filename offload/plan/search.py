"""The choice among plans: the fastest step that fits, the plans that were rejected, and why.

Problem. Some settings change how a step runs but not what it computes: the exact codec in which
layers are stored, where their inputs are kept, the number of slots, how a step's sequences are cut
into micro-batches. The fastest setting depends on the model, the machine and its memory.

Idea. Each combination of settings is a `PlanRequest`; the search gets all that are allowed, the
plainest first. More slots never make a step slower, nor do more kept graphs, so each request takes
as many of both as fit; `offload.plan.split` divides the memory between them. R3, a lower bound on
the step time, orders the requests, and one is simulated only if its bound can still win. Among
steps of the same time, to one part in a million, the first request is chosen, so the same requests
give the same plan.

Of exact codecs the fastest is chosen, and of those that are as fast to one percent the one that
takes less of the host's memory: other programs have use for it, and a prediction is no finer than
that. Decoding is priced as one pass over a layer's bytes at the rate of fused kernels, once per
visit; no GPU has shown how fast the kernel of `bf16_packed` is.

On a CPU a codec that has to be decoded is chosen only to save memory. There, copies and decoding
run on the same processor, and decoding took eight times as long as copying (bench_codecs), while
the plan prices it by its bytes.

Rejected. Rounding codecs as candidates: they change what is trained, and a plan does not do that
unasked. They are listed among the what-ifs, with their rounding error.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds, Shortage
from offload.plan.machine.machine import GIB, Machine
from offload.plan.plan import Plan, costs_of, laid_out
from offload.plan.refusal import refusal
from offload.plan.request import (
    PlanRequest,
    in_half,
    in_larger_micro_batches,
    with_micro_batches,
    with_workload,
)
from offload.plan.schedule.op import LINK
from offload.plan.schedule.schedule import Residency
from offload.plan.split import SAME_FRAC, WORTH_FRAC, Split
from offload.plan.time.costs import Costs

NUM_REJECTED = 3
NO_SLOWER = ("memory", "link")  # changes that cannot make the chosen plan slower
ROUNDING_ERROR_FRAC = 1e-9  # between a bound and a simulated time that equals it


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One request, evaluated."""

    split: Split  # the request, its memory and its prices
    # What of the layers stays in device memory; if nothing fits, the least possible.
    residency: Residency
    shortages: tuple[Shortage, ...]  # the memories that are too small for it; empty if it fits
    bound_s: float  # the lower bound on its step time
    step_s: float | None = None  # its predicted step time; None if the bound ruled it out

    @classmethod
    def weighed(cls, split: Split, residency: Residency | None = None) -> "Candidate":
        """Evaluate a request with this residency, or its best one, or its least if none fits."""
        residency = residency or split.fastest or split.needs.fewest
        return cls(
            split=split,
            residency=residency,
            shortages=split.needs.shortages(residency),
            bound_s=split.bound_s(residency),
        )

    @property
    def needs(self) -> MemoryNeeds:
        """The request and its memory."""
        return self.split.needs

    @property
    def costs(self) -> Costs:
        """The prices of its ops."""
        return self.split.costs

    @property
    def request(self) -> PlanRequest:
        """The request."""
        return self.needs.request

    @property
    def least_s(self) -> float:
        """The predicted step time if it is known, otherwise its bound."""
        return self.bound_s if self.step_s is None else self.step_s

    @property
    def host_bytes(self) -> int:
        """The host memory of all its ranks at the peak."""
        return sum(term.num_bytes for term in self.needs.host(self.residency))

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second, padding included."""
        return self.request.tokens_per_step / self.least_s

    def simulated(self) -> "Candidate":
        """Return the candidate with its predicted step time."""
        return replace(self, step_s=self.split.step_s(self.residency))


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What another machine, step or codec would give."""

    # `memory`: one more GiB where the model computes; `link`: twice its rate; `tokens`: twice the
    # micro-batches of a step; `fewer_tokens`: half of them; `micro_batch`: larger ones, where
    # launches or memory take longer than a GPU's arithmetic; or a codec that rounds.
    change: str
    # The candidate that would be chosen then; if none fits, the one that is nearest to it.
    best: Candidate
    # Its predicted rate, with tokens counted as in the chosen plan; None if nothing fits.
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)  # no slots: alternatives are computed when they are read
class Choice:
    """A plan, and the alternatives that it was compared with.

    Attributes:
        plan: The plan that is chosen.
        chosen: Its candidate.
        candidates: All of them; none where there was nothing to choose.
        rounding: Codecs to list among the what-ifs, if they would be faster.
    """

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rounding: tuple[str, ...]

    @cached_property
    def rejected(self) -> tuple[Candidate, ...]:
        """The best of the other candidates, the fastest first, whether they fit or not."""
        return _rejected(self.candidates, self.chosen) if self.candidates else ()

    @cached_property
    def what_ifs(self) -> tuple[WhatIf, ...]:
        """What other changes would gain; this takes longer than the choice itself."""
        if not self.candidates:
            return ()
        return tuple(_what_ifs(self.candidates, self.chosen, self.rounding))


def search(
    facts: ModelFacts,
    machine: Machine,
    requests: Sequence[PlanRequest],
    *,
    rounding: Sequence[str],
) -> Choice:
    """Choose among requests that give the same training result.

    Args:
        facts: The model.
        machine: The machine that it runs on.
        requests: The candidates, the plainest first; of equal times the first is chosen.
        rounding: Codecs to list among the what-ifs, if they would be faster.

    Raises:
        DoesNotFitError: None of them fits; the error is that of the nearest request.
    """
    candidates, chosen = _weighed_all(facts, machine, requests)
    if chosen is None:
        raise refusal(_nearest(candidates).needs)
    return Choice(
        plan=laid_out(chosen.needs, chosen.costs, chosen.residency),
        chosen=chosen,
        candidates=tuple(candidates),
        rounding=tuple(rounding),
    )


def fastest_step_s(facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]) -> float:
    """Return the step time of the plan that `search` chooses; infinite if none fits."""
    _, chosen = _weighed_all(facts, machine, requests)
    return math.inf if chosen is None else chosen.least_s


def nearest_request(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> PlanRequest:
    """Return the request that lacks the fewest bytes; the refusal is about this one."""
    candidates, _ = _weighed_all(facts, machine, requests)
    return _nearest(candidates).request


def _weighed_all(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> tuple[list[Candidate], Candidate | None]:
    """Evaluate all comparable requests, and find the one that is chosen."""
    all_needs = _comparable([MemoryNeeds.of(facts, machine, request) for request in requests])
    return _with_preferred([_weighed(needs) for needs in all_needs])


def _weighed(needs: MemoryNeeds) -> Candidate:
    return Candidate.weighed(
        Split(needs=needs, costs=costs_of(needs.facts, needs.machine, needs.request))
    )


def _comparable(all_needs: list[MemoryNeeds]) -> list[MemoryNeeds]:
    """Drop encoded requests if a CPU has room for one that is not encoded (see above)."""
    is_cpu = all_needs[0].machine.device == "cpu"
    plain = [needs for needs in all_needs if not needs.request.typical.is_encoded]
    return plain if is_cpu and any(needs.most_slots for needs in plain) else all_needs


def _with_preferred(
    candidates: Sequence[Candidate],
) -> tuple[list[Candidate], Candidate | None]:
    """Return the candidates by codec, with the one that is chosen; None if none fits.

    Of codecs with which a step is as fast, to `WORTH_FRAC`, the least in host memory is chosen.
    """
    by_codec: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_codec.setdefault(candidate.request.typical.codec, []).append(candidate)
    places = [(own, fastest(own)) for own in by_codec.values()]
    found = [own[place] for own, place in places if place is not None]
    ordered = [candidate for own in by_codec.values() for candidate in own]
    if not found:
        return ordered, None
    most_s = min(one.least_s for one in found) * (1 + WORTH_FRAC)
    near = [one for one in found if one.least_s <= most_s]
    return ordered, min(near, key=lambda one: one.host_bytes)


def fastest(candidates: list[Candidate]) -> int | None:
    """Return the index of the fastest candidate that fits, the first of equals; None if none fits.

    Args:
        candidates: The plainest first; each one that is simulated is replaced by the result.
    """
    fitting = [i for i, candidate in enumerate(candidates) if not candidate.shortages]
    tried: list[int] = []
    best_s, first = math.inf, -1
    for i in sorted(fitting, key=lambda i: (candidates[i].bound_s, i)):
        bound_s = candidates[i].bound_s
        is_no_faster = bound_s * (1 + ROUNDING_ERROR_FRAC) >= best_s
        if tried and (bound_s > best_s * (1 + SAME_FRAC) or (is_no_faster and i > first)):
            continue
        candidates[i] = candidates[i].simulated()
        tried.append(i)
        best_s = min(best_s, candidates[i].least_s)
        first = min(j for j in tried if candidates[j].least_s <= best_s * (1 + SAME_FRAC))
    return first if tried else None


def _nearest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: sum(shortage.short_bytes for shortage in c.shortages))


def _rejected(candidates: Sequence[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """Return the best of the others, and the chosen one with one more slot or graph."""
    others = [candidate for candidate in candidates if candidate is not chosen]
    now, request = chosen.residency, chosen.request
    for more, asked in (
        (now._replace(num_slots=now.num_slots + 1), request.num_slots),
        (now._replace(num_kept_graphs=now.num_kept_graphs + 1), request.num_kept_graphs),
    ):
        most = max(more.num_slots, more.num_kept_graphs)
        if asked is None and most <= chosen.needs.facts.num_layers:
            others.append(Candidate.weighed(chosen.split, more))
    while True:  # a step may be slower than its bound
        others.sort(key=lambda candidate: candidate.least_s)
        unknown = [c for c in others[:NUM_REJECTED] if not c.shortages and c.step_s is None]
        if not unknown:
            return tuple(others[:NUM_REJECTED])
        others[others.index(unknown[0])] = unknown[0].simulated()


# ---------------------------------------------------------------------------------------------
# What if


def _what_ifs(
    candidates: Sequence[Candidate], chosen: Candidate, rounding: Sequence[str]
) -> Iterator[WhatIf]:
    facts, machine = chosen.needs.facts, chosen.needs.machine
    request = chosen.request
    tokens = request.tokens_per_step

    def what_if(change: str, others: Iterable[Candidate], *, num_tokens: int = tokens) -> WhatIf:
        found = list(others)
        least_s = min((c.bound_s for c in found if not c.shortages), default=math.inf)
        if change in NO_SLOWER and chosen.least_s * (1 - SAME_FRAC) <= least_s < math.inf:
            return WhatIf(change=change, best=chosen, tokens_per_s=chosen.tokens_per_s)
        found, best = _with_preferred(found)
        if best is None:
            return WhatIf(change=change, best=_nearest(found), tokens_per_s=None)
        return WhatIf(change=change, best=best, tokens_per_s=num_tokens / best.least_s)

    yield what_if("memory", map(_with_more_memory, candidates))
    yield what_if("link", map(_with_faster_link, candidates))
    same_size = [
        c.request
        for c in candidates
        if c.request.typical.micro_batch_size == request.typical.micro_batch_size
    ]
    doubled = [with_micro_batches(r, 2) for r in same_size]
    each = (_weighed(MemoryNeeds.of(facts, machine, r)) for r in doubled)
    yield what_if("tokens", each, num_tokens=2 * tokens)
    halved = [one for r in same_size for one in in_half(r)]
    if halved:
        each = (_weighed(MemoryNeeds.of(facts, machine, r)) for r in halved)
        yield what_if("fewer_tokens", each, num_tokens=tokens // 2)
    larger = _in_larger_micro_batches(chosen)
    if larger:
        each = (_weighed(MemoryNeeds.of(facts, machine, r)) for r in larger)
        yield what_if("micro_batch", each, num_tokens=larger[0].tokens_per_step)
    for codec in rounding:
        coded = dict.fromkeys(with_workload(r, codec=codec) for r in same_size)
        found = what_if(codec, (_weighed(MemoryNeeds.of(facts, machine, r)) for r in coded))
        if found.tokens_per_s and found.best.least_s < chosen.least_s * (1 - SAME_FRAC):
            yield found


def _in_larger_micro_batches(chosen: Candidate) -> list[PlanRequest]:
    """Return the same step, or twice its tokens, with fewer launches and reads of the weights.

    None where a GPU's time is its arithmetic.
    """
    request, machine = chosen.request, chosen.needs.machine
    if machine.device == "cpu" or request.is_on_features or request.others or request.is_sharded:
        return []
    if chosen.costs.bound == "compute":
        return []
    return in_larger_micro_batches(request)


def _with_more_memory(candidate: Candidate) -> Candidate:
    """Evaluate the same request with one more GiB where the model computes."""
    needs, machine = candidate.needs, candidate.needs.machine
    ram_bytes = machine.ram_bytes + (0 if machine.device == "cuda" else GIB)
    budget_bytes = candidate.request.vram_budget_bytes
    larger = replace(
        needs,
        machine=replace(machine, vram_bytes=machine.vram_bytes + GIB, ram_bytes=ram_bytes),
        request=replace(
            needs.request, vram_budget_bytes=None if budget_bytes is None else budget_bytes + GIB
        ),
    )
    return Candidate.weighed(Split(needs=larger, costs=candidate.costs))


def _with_faster_link(candidate: Candidate) -> Candidate:
    """Evaluate the same request with both directions of the link at twice their rate."""
    faster = candidate.costs.faster(2, *LINK)
    return Candidate.weighed(Split(needs=candidate.needs, costs=faster))
