"""Options for several cards: copy the step, shard, split or stage the model, spread experts.

Cards of one workstation communicate over the links that also load their weights, at the rate of a
load while the other direction is busy. Through each link, a ring over N cards moves (N - 1) / N of
the bytes of an all-gather, and twice that share of the bytes of an all-reduce.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.plan.facts.facts import LayerFacts
from offload.plan.facts.trainable import trained_parameters
from offload.plan.memory.memory import (
    CONTEXT,
    SLAB,
    STASH,
    MemoryTerm,
    device_terms,
    input_bytes,
    total_bytes,
)
from offload.plan.plan import Plan, with_costs
from offload.plan.request import PlanRequest
from offload.plan.sharded import as_sharded, sharded_plan, shortages
from offload.plan.time.costs import LayerCost
from offload.plan.time.roofline import (
    all_reduce_bytes,
    tensor_parallel_bytes,
)
from offload.plan.what_if.option import (
    Figures,
    Option,
    figures_of,
    plan_anyway,
    priced,
    step_at_prices,
    without_price,
)

CUBLAS = "cuBLAS workspaces"
SOURCES = {
    "copy (data parallel)": "arXiv:2006.15704",
    "shard (FSDP)": "arXiv:2304.11277",
    "split (tensor parallel)": "arXiv:1909.08053, arXiv:2205.05198",
    "stage (pipeline)": "arXiv:1811.06965, arXiv:2104.04473",
    "expert parallel": "arXiv:2006.16668",
}


def second_cards(plan: Plan, *, num_cards: int) -> tuple[Option, ...]:
    """Price the options that share a plan's step among cards.

    Args:
        plan: Of one process, on one card.
        num_cards: Cards, two at least.
    """
    if plan.machine.device == "cpu":
        why = "one device: the CPU"
        return tuple(without_price(name, why, source) for name, source in SOURCES.items())
    cards = _Cards(plan=plan, num=num_cards)
    return (_copy(cards), _shard(cards), _split(cards), _stage(cards), _spread_experts(cards))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cards:
    """A plan of one card, and the number of cards."""

    plan: Plan
    num: int

    @property
    def arriving_frac(self) -> float:
        """Fraction of the whole that a card receives from the others."""
        return (self.num - 1) / self.num

    @property
    def bytes_per_s(self) -> float:
        """Rate of the exchange."""
        return self.plan.machine.h2d_duplex_bytes_per_s.value

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the card that has most, if they are shared."""
        return math.ceil(self.plan.request.num_micro_batches / self.num)

    @property
    def reduced_bytes(self) -> float:
        """Bytes that the all-reduce of the gradients moves through each link."""
        count = trained_parameters(self.plan.facts, self.plan.request.typical.adapter)
        return all_reduce_bytes(num_parameters=count, num_cards=self.num)

    def host_bytes(self, *, has_slab: bool) -> int:
        """Return the host memory of all processes: everything but the slab is per process."""
        terms = self.plan.host_memory
        own = sum(term.num_bytes for term in terms if term.name not in (SLAB, STASH))
        slab = sum(term.num_bytes for term in terms if term.name == SLAB)
        stash = sum(term.num_bytes for term in terms if term.name == STASH)
        return self.num * own + (slab + stash if has_slab else 0)

    def option(self, name: str, how: str, figures: Figures) -> Option:
        words = f"{self.num} cards, {how}"
        return priced(name, words, SOURCES[name], plan=self.plan, figures=figures)


def _copy(cards: _Cards) -> Option:
    """Data parallelism, which this tool offers: each card takes its share of the micro-batches."""
    name, plan = "copy (data parallel)", cards.plan
    request = replace(
        plan.request, num_slots=plan.num_slots, num_ranks=cards.num, is_slab_shared=True
    )
    made, short = plan_anyway(plan.facts, plan.machine, request)
    needed = 8e-9 * made.network_needed_bytes_per_s
    how = (
        f"`--num_processes {cards.num}`; {needed:,.2g} Gb/s between them hide the sums of gradients"
    )
    figures = figures_of(made)
    return Option(
        name=name,
        standing="a setting",
        how=how,
        source=SOURCES[name],
        figures=replace(figures, link_bytes=figures.link_bytes + int(cards.reduced_bytes)),
        fits=not short,
    )


def _shard(cards: _Cards) -> Option:
    """Each card has 1/N of every layer, native: see `offload.plan.sharded`."""
    name, plan = "shard (FSDP)", cards.plan
    if plan.request.objective is not None or plan.request.others:
        return without_price(name, "for one run with a cross-entropy", SOURCES[name])
    request = replace(plan.request, num_ranks=cards.num, is_slab_shared=True)
    made = sharded_plan(plan.facts, plan.machine, as_sharded(request))
    return Option(
        name=name,
        standing="a setting" if _is_offered(request) else "not done here",
        how="`train.parallel: fsdp2`, native" if _is_offered(request) else "native layers",
        source=SOURCES[name],
        figures=Figures(
            step_s=made.step_s,
            vram_bytes=made.peak_bytes,
            ram_bytes=made.host_bytes,
            link_bytes=made.schedule.network_bytes,
        ),
        fits=not shortages(made),
    )


def _is_offered(request: PlanRequest) -> bool:
    """Return whether a run could be sharded; `finetune.recipe.sharded_rules` says why not."""
    typical, spec = request.typical, request.typical.adapter
    is_lora = not (spec.experts or spec.is_dora or spec.modules or spec.method)
    return is_lora and typical.optimizer in ("adamw", "sgd") and not typical.has_router_loss


def _split(cards: _Cards) -> Option:
    """Each card streams and computes 1/N of every layer, in this plan's own order.

    A layer waits for two gathers and two reduce-scatters in its forward, and for as many in the
    recompute and in the backward; loads use the link while a layer computes.
    """
    plan, typical = cards.plan, cards.plan.request.typical
    moved = tensor_parallel_bytes(
        num_tokens=int(typical.num_tokens * cards.arriving_frac),
        hidden_size=plan.facts.hidden_size,
        dtype_bytes=typical.dtype_bytes,
    )
    moved_s = moved / cards.bytes_per_s

    def shared(_: LayerFacts, cost: LayerCost) -> LayerCost:
        parts = 1 if cost.bound == "launch" else cards.num  # smaller kernels are no fewer launches
        return replace(
            cost,
            forward_s=cost.forward_s / parts + moved_s,
            reference_s=cost.reference_s / parts + moved_s,
            backward_s=cost.backward_s / parts + 2 * moved_s,
            recompute_s=cost.recompute_s / parts + moved_s,
            decode_s=cost.decode_s / cards.num,
        )

    compute_s = sum(c.forward_s + c.backward_s for c in plan.costs.layers) / cards.num
    exchange_s = 3 * moved_s * plan.facts.num_layers
    loading_frac = compute_s / (compute_s + exchange_s)
    costs = replace(
        plan.costs,
        h2d_bytes_per_s=plan.costs.h2d_bytes_per_s * cards.num * loading_frac,
        d2h_bytes_per_s=plan.costs.d2h_bytes_per_s * cards.num * loading_frac,
        fetch_bytes_per_s=plan.costs.fetch_bytes_per_s * cards.num * loading_frac,
        tail_s=plan.costs.tail_s / cards.num,
        score_s=plan.costs.score_s / cards.num,
        optimizer_s=plan.costs.optimizer_s / cards.num,
    )
    now, num_visits = figures_of(plan), plan.request.num_micro_batches * plan.facts.num_layers
    own = {term.name: 1 / cards.num for term in plan.device_memory} | {CONTEXT: 1.0, CUBLAS: 1.0}
    return cards.option(
        "split (tensor parallel)",
        "4 exchanges per layer and pass",
        Figures(
            step_s=step_at_prices(with_costs(plan, costs), shared),
            vram_bytes=_scaled(plan.device_memory, own),
            ram_bytes=cards.host_bytes(has_slab=True),
            link_bytes=now.link_bytes // cards.num + 3 * moved * num_visits,
        ),
    )


def _stage(cards: _Cards) -> Option:
    """Each card holds its share of the layers; micro-batches pass from one to the next.

    While the pipeline fills and drains, cards wait: the time is (M + N - 1) / M of the shared work.
    Each micro-batch decodes each layer again, since micro-batches do not wait for each other.
    """
    plan, request, num = cards.plan, cards.plan.request, cards.num
    micro_batches, costs = request.num_micro_batches, plan.costs
    layers_s = sum(c.forward_s + c.backward_s + 2 * c.decode_s for c in costs.layers)
    layers_s += sum(map(costs.scoring_s, range(plan.facts.num_layers)))
    batch_s = layers_s + costs.fronts_s + costs.front_backward_s + costs.tails_s
    num_layers = math.ceil(plan.facts.num_layers / num)
    terms = device_terms(
        replace(plan.facts, layers=plan.facts.layers[:num_layers]),
        plan.machine,
        request.largest,
        num_slots=num_layers,
        num_micro_batches=min(num, micro_batches),
        num_ranks=1,
        is_padded=request.is_masked,
        is_stashed=False,
    )
    neighbours = 1 if num == 2 else 2
    return cards.option(
        "stage (pipeline)",
        f"{num - 1} of {micro_batches + num - 1} turns idle",
        Figures(
            step_s=(micro_batches + num - 1) * batch_s / num + costs.optimizer_s / num,
            vram_bytes=total_bytes(terms),
            ram_bytes=cards.host_bytes(has_slab=False),
            link_bytes=2 * neighbours * micro_batches * input_bytes(plan.facts, request.typical),
        ),
    )


def _spread_experts(cards: _Cards) -> Option:
    """Each card loads 1/N of the experts and everything else; rows are sent to experts and back.

    A row is sent to a card once, however many of its experts are there.
    """
    name, plan = "expert parallel", cards.plan
    facts = plan.facts
    if not any(layer.num_experts for layer in facts.layers):
        return without_price(name, "the model has no experts", SOURCES[name])
    request = replace(
        plan.request,
        num_slots=plan.num_slots,
        num_micro_batches=cards.num_micro_batches,
        vram_budget_bytes=None,
    )
    made, _ = plan_anyway(facts, plan.machine, request)
    moved = {layer: _routed_bytes(cards, layer) for layer in set(facts.layers)}

    def exchanged(layer: LayerFacts, cost: LayerCost) -> LayerCost:
        moved_s = moved[layer] / cards.bytes_per_s
        return replace(
            cost,
            forward_s=cost.forward_s + moved_s,
            reference_s=cost.reference_s + moved_s,
            backward_s=cost.backward_s + 2 * moved_s,
            recompute_s=cost.recompute_s + moved_s,
        )

    total = sum(layer.num_parameters for layer in facts.layers)
    experts = sum(layer.weights("experts") for layer in facts.layers)
    own_frac = 1 - cards.arriving_frac * experts / total
    costs = replace(made.costs, h2d_bytes_per_s=made.costs.h2d_bytes_per_s / own_frac)
    exchange_bytes = 3 * cards.num_micro_batches * sum(moved[layer] for layer in facts.layers)
    figures = figures_of(made)
    return cards.option(
        name,
        "rows sent to experts and back",
        Figures(
            step_s=step_at_prices(with_costs(made, costs), exchanged)
            + cards.reduced_bytes / cards.bytes_per_s,
            vram_bytes=_scaled(made.device_memory, {"slots": own_frac, "decoded layer": own_frac}),
            ram_bytes=cards.host_bytes(has_slab=True),
            link_bytes=int(own_frac * made.schedule.h2d_bytes)
            + (figures.link_bytes - made.schedule.h2d_bytes)
            + int(exchange_bytes + cards.reduced_bytes),
        ),
    )


def _routed_bytes(cards: _Cards, layer: LayerFacts) -> float:
    """Return the bytes of rows sent to other cards and back, per forward of a layer."""
    if not layer.num_experts:
        return 0.0
    others = min(layer.experts_per_token * cards.arriving_frac, cards.num - 1)
    return 2 * others * input_bytes(cards.plan.facts, cards.plan.request.typical)


def _scaled(terms: tuple[MemoryTerm, ...], shares: Mapping[str, float]) -> int:
    return sum(int(term.num_bytes * shares.get(term.name, 1.0)) for term in terms)
