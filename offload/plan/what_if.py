"""The effect of other options for storing and moving a model on a step, compared with the plan.

Training a large model on a small card is logistics, and the options are few: recompute instead of
keeping, send, shard, split, stage, store in fewer bits. Each is priced by the functions that make
the plan itself. An option that is a setting is planned again with that setting and everything else
unchanged, including the number of slots: memory that an option frees is not spent. An option that
this tool does not offer is priced at its best: transfers that can overlap with compute cost no
time.

Cards of one workstation communicate over the links that also load their weights, at the rate of a
load while the other direction is busy. Through each link, a ring over N cards moves (N - 1) / N of
the bytes of an all-gather, and twice that share of the bytes of an all-reduce.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, NATIVE, codecs_that
from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.linears import FP32_BYTES, SoftmaxAttention
from offload.plan.facts.optimizer import (
    DEFAULT,
    OPTIMIZERS,
    optimizers_that,
    state_bytes,
)
from offload.plan.facts.trainable import (
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.facts.workload import WeightPlace, why_head_on_device, why_on_device
from offload.plan.fit import MemoryNeeds, fits
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import (
    CONTEXT,
    FRAGMENTATION_FRAC,
    SLAB,
    STASH,
    MemoryTerm,
    device_terms,
    input_bytes,
    total_bytes,
)
from offload.plan.plan import Plan, costs_of, laid_out, plan, with_costs
from offload.plan.request import PlanRequest, over_cards, with_workload
from offload.plan.schedule.op import KEPT_GRAPH, LINK, Route
from offload.plan.schedule.schedule import MIN_SLOTS
from offload.plan.sharded import as_sharded, sharded_plan, shortages
from offload.plan.time.costs import LayerCost, frozen_products, recomputed_products
from offload.plan.time.pointwise import pointwise_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import (
    Work,
    all_reduce_bytes,
    elementwise,
    layer_elementwise_bytes,
    tensor_parallel_bytes,
    unfused_softmax_bytes,
)

Standing = Literal["in the plan", "a setting", "not done here"]
VAST_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The time, memory and traffic of a step."""

    step_s: float  # seconds of a step, optimizer included
    vram_bytes: int  # peak of device memory, on each card
    ram_bytes: int  # peak of host memory, of all processes together
    # What crosses a card's link per step, both ways, to the host and to other cards.
    link_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One row of a what-if table."""

    name: str  # what the option does
    # Whether the plan uses it, a setting enables it, or this tool only prices it.
    standing: Standing
    how: str  # the setting, how the price is computed, or why there is none
    source: str  # the source of the idea or the formula
    # The figures of the same step with the option; if the plan uses it, of the step without it.
    figures: Figures | None
    fits: bool  # whether the figures are within the machine's memory


def figures_of(plan: Plan) -> Figures:
    """Return a plan's own figures."""
    return Figures(
        step_s=plan.step_s,
        vram_bytes=plan.peak_bytes,
        ram_bytes=plan.host_bytes,
        link_bytes=plan.schedule.h2d_bytes + plan.schedule.d2h_bytes,
    )


def replanned(
    name: str, how: str, source: str, *, plan: Plan, request: PlanRequest, is_in_plan: bool
) -> Option:
    """Return an option that is a setting: the plan of another request."""
    made, short = plan_anyway(plan.facts, plan.machine, request)
    return Option(
        name=name,
        standing="in the plan" if is_in_plan else "a setting",
        how=how,
        source=source,
        figures=figures_of(made),
        fits=not short,
    )


def moved(
    name: str, how: str, source: str, *, plan: Plan, request: PlanRequest, is_in_plan: bool
) -> Option:
    """Return an option that is a setting: a weight in another place, with the plan's residency.

    Device memory that it frees is listed, and not spent on graphs: what these gain is less than the
    error of a prediction, and `auto` moves such a weight only where a step would not fit otherwise.
    Where the residency does not fit with it, the request is planned.
    """
    needs = MemoryNeeds.of(plan.facts, plan.machine, request)
    if needs.shortages(plan.residency):
        return replanned(name, how, source, plan=plan, request=request, is_in_plan=is_in_plan)
    costs = costs_of(plan.facts, plan.machine, request)
    return Option(
        name=name,
        standing="in the plan" if is_in_plan else "a setting",
        how=how,
        source=source,
        figures=figures_of(laid_out(needs, costs, plan.residency)),
        fits=True,
    )


def priced(
    name: str, how: str, source: str, *, plan: Plan, figures: Figures, is_in_plan: bool = False
) -> Option:
    """Return an option that no setting enables."""
    return Option(
        name=name,
        standing="in the plan" if is_in_plan else "not done here",
        how=how,
        source=source,
        figures=figures,
        fits=not _short(figures.vram_bytes, figures.ram_bytes, plan.machine, plan.request),
    )


def without_price(name: str, why: str, source: str) -> Option:
    """Return an option that does not apply here, and why."""
    return Option(
        name=name, standing="not done here", how=why, source=source, figures=None, fits=False
    )


def step_at_prices(plan: Plan, change: Callable[[LayerFacts, LayerCost], LayerCost]) -> float:
    """Simulate the plan's ops with other costs for its layers."""
    pairs = tuple(zip(plan.facts.layers, plan.costs.layers, strict=True))
    changed = {pair: change(*pair) for pair in set(pairs)}
    layers = tuple(changed[pair] for pair in pairs)
    return with_costs(plan, replace(plan.costs, layers=layers)).step_s


# ---------------------------------------------------------------------------------------------
# Without regard to memory


def plan_anyway(
    facts: ModelFacts, machine: Machine, request: PlanRequest
) -> tuple[Plan, tuple[str, ...]]:
    """Plan a request; if it does not fit, plan with the fewest slots and unlimited memory.

    Returns:
        The plan, and the names of the memories that are too small for it.
    """
    if fits(facts, machine, request):  # a refusal searches for what would fit, which is slow
        return plan(facts, machine, request), ()
    num_slots = MIN_SLOTS if request.num_slots is None else request.num_slots
    num_graphs = request.num_kept_graphs or 0
    freely = replace(
        request,
        num_slots=num_slots,
        num_kept_graphs=num_graphs,
        vram_budget_bytes=None,
        has_outputs=False,
        has_sent_graphs=False,
    )
    vast = replace(machine, vram_bytes=VAST_BYTES, ram_bytes=VAST_BYTES)
    try:
        made = plan(facts, vast, freely)  # the limit of page-locked memory is unchanged
    except DoesNotFitError:
        made = plan(facts, replace(vast, pinned_bytes=VAST_BYTES), freely)
    short = _short(made.peak_bytes, made.host_bytes, machine, request)
    made = replace(made, machine=machine, request=replace(request, num_slots=num_slots))
    return made, tuple(short or ["page-locked RAM"])


def _short(vram_bytes: int, ram_bytes: int, machine: Machine, request: PlanRequest) -> list[str]:
    """Name the memories that are too small; on a CPU there is only one."""
    ram_bytes += vram_bytes if machine.device == "cpu" else 0
    limit_bytes = min(machine.vram_bytes, request.vram_budget_bytes or machine.vram_bytes)
    return [
        *(["VRAM"] if vram_bytes > limit_bytes else []),
        *(["RAM"] if ram_bytes > machine.ram_bytes else []),
    ]


def full_training_terms(
    *,
    num_parameters: int,
    dtype_bytes: int,
    activation_bytes: int,
    context_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """List the memory of training every weight with AdamW; below fp32 a master copy is kept."""
    master = FP32_BYTES * num_parameters if dtype_bytes != FP32_BYTES else 0
    return (
        MemoryTerm(name="weights", num_bytes=dtype_bytes * num_parameters),
        MemoryTerm(name="fp32 copy", num_bytes=master),
        MemoryTerm(name="gradients", num_bytes=dtype_bytes * num_parameters),
        MemoryTerm(name="optimizer states", num_bytes=state_bytes([(num_parameters,)], DEFAULT)),
        MemoryTerm(name="activations", num_bytes=activation_bytes),
        MemoryTerm(name=CONTEXT, num_bytes=context_bytes),
    )


def activation_bytes(
    *, features: int, num_tokens: int, hidden_size: int, num_layers: int, dtype_bytes: int
) -> int:
    """Return what layers save without checkpointing: `features` hidden sizes per token."""
    return features * hidden_size * num_tokens * num_layers * dtype_bytes


# ---------------------------------------------------------------------------------------------
# Options for one card that this tool does not offer, or always uses: the step with each of them.
#
# Times are those of the plan's own ops with other costs. Memory is the plan's own terms, plus what
# the option would add.

# Memory-bound operations of a backward visit, in forwards: one recompute, and two for the backward.
VISIT_FORWARDS = 3
# A fused AdamW on a CPU: weight, gradient and two moments read, all but the gradient written.
CPU_ADAMW_BYTES = 7 * FP32_BYTES
UNFUSED_SCORE_BYTES = 4  # for each pair of tokens and head, in the layer of the backward visit


def recompute_all(plan: Plan) -> Option:
    """Backward visits recompute their layers; otherwise all graphs are kept until the backward."""
    needs = MemoryNeeds.of(plan.facts, plan.machine, plan.request)
    return priced(
        "recompute all",
        "graphs of all layers on the card",
        "arXiv:1604.06174",
        plan=plan,
        figures=replace(
            figures_of(plan),
            step_s=step_at_prices(
                plan,
                lambda _, cost: replace(cost, backward_s=cost.back_s(KEPT_GRAPH), recompute_s=0.0),
            ),
            vram_bytes=total_bytes(
                needs.device(plan.residency._replace(num_kept_graphs=plan.facts.num_layers))
            ),
        ),
        is_in_plan=True,
    )


def recompute_cheap(plan: Plan) -> Option:
    """Keep the outputs of products, and recompute what is between them, attention included."""
    products_s = _seconds(plan, recomputed_products)
    largest = plan.request.largest
    features = sum(x.active * x.d_out for layer in plan.facts.layers for x in layer.linears)
    kept_bytes = features * largest.num_tokens * largest.dtype_bytes
    kept_bytes *= plan.request.num_micro_batches
    return priced(
        "recompute the cheap part",
        "results of products on the card",
        "arXiv:2205.05198",
        plan=plan,
        figures=replace(
            figures_of(plan),
            step_s=step_at_prices(
                plan,
                lambda layer, cost: replace(
                    cost,
                    backward_s=cost.backward_s - products_s[layer],
                    recompute_s=max(0.0, cost.recompute_s - products_s[layer]),
                ),
            ),
            vram_bytes=plan.peak_bytes + _with_fragments(kept_bytes),
        ),
    )


def offload_optimizer(plan: Plan) -> Option:
    """Gradients leave the card, the CPU updates, weights come back; nothing overlaps with it."""
    name, source, at = "offload optimizer", "arXiv:2101.06840", plan.machine
    if at.device == "cpu":
        return without_price(name, "the CPU has it already", source)
    largest, now = plan.request.largest, figures_of(plan)
    copy_bytes = FP32_BYTES * trained_parameters(plan.facts, largest.adapter)
    shapes = trained_tensor_shapes(plan.facts, largest.adapter)
    update_s = (
        copy_bytes / at.d2h_bytes_per_s.value
        + CPU_ADAMW_BYTES * sum(map(math.prod, shapes)) / at.host_memory_bytes_per_s.value
        + copy_bytes / at.h2d_bytes_per_s.value
    )
    states_bytes = state_bytes(shapes, largest.optimizer)
    return priced(
        name,
        "AdamW on the CPU, nothing beside it",
        source,
        plan=plan,
        figures=Figures(
            step_s=now.step_s - plan.costs.optimizer_s + update_s,
            vram_bytes=now.vram_bytes - _with_fragments(states_bytes),
            ram_bytes=now.ram_bytes + state_bytes(shapes, DEFAULT) + 2 * copy_bytes,
            link_bytes=now.link_bytes + 2 * copy_bytes,
        ),
    )


def one_kernel_each(plan: Plan) -> Option:
    """Norms, additions and SwiGLU read and write each tensor once."""
    typical = plan.request.typical
    at = Pricer(machine=plan.machine, facts=plan.facts, workload=typical)

    def fused(layer: LayerFacts, cost: LayerCost) -> LayerCost:
        downs = (x for x in layer.linears if x.is_down and x.group != "experts")
        num_bytes = layer_elementwise_bytes(
            num_tokens=typical.num_tokens,
            hidden_size=plan.facts.hidden_size,
            mlp_width=sum(linear.d_in for linear in downs),
            dtype_bytes=typical.dtype_bytes,
        )
        roof = elementwise(plan.machine, num_elements=num_bytes, num_passes=1, dtype_bytes=1)
        passes = pointwise_work(at, layer)
        saved_s = max(0.0, passes.forward.memory_s - roof.time_s)
        saved_back_s = max(0.0, passes.backward.memory_s - 2 * roof.time_s)
        return replace(
            cost,
            forward_s=cost.forward_s - saved_s,
            backward_s=cost.backward_s - saved_s - saved_back_s,
            recompute_s=max(0.0, cost.recompute_s - saved_s),
        )

    return priced(
        "fused norms and SwiGLU",
        "each tensor read and written once",
        "arXiv:2410.10989",
        plan=plan,
        figures=replace(figures_of(plan), step_s=step_at_prices(plan, fused)),
    )


def unfused_attention(plan: Plan) -> Option:
    """Scores are materialized; PyTorch does so silently if no fused kernel supports a call."""
    name, source = "attention not fused", "arXiv:2205.14135"
    typical, largest = plan.request.typical, plan.request.largest
    heads = {layer: _fused_heads(layer) for layer in set(plan.facts.layers)}
    if not any(heads.values()):
        return without_price(name, "nor is it in this model", source)

    def unfused(layer: LayerFacts, cost: LayerCost) -> LayerCost:
        num_bytes = typical.micro_batch_size * unfused_softmax_bytes(
            num_heads=heads[layer], seq_len=typical.seq_len, dtype_bytes=typical.dtype_bytes
        )
        moved_s = num_bytes / plan.machine.memory_bytes_per_s.value
        return replace(
            cost,
            forward_s=cost.forward_s + moved_s,
            backward_s=cost.backward_s + VISIT_FORWARDS * moved_s,
            recompute_s=cost.recompute_s + moved_s,
        )

    num_scores = largest.micro_batch_size * max(heads.values()) * largest.seq_len**2
    return priced(
        name,
        "scores written and read",
        source,
        plan=plan,
        figures=replace(
            figures_of(plan),
            step_s=step_at_prices(plan, unfused),
            vram_bytes=plan.peak_bytes + _with_fragments(UNFUSED_SCORE_BYTES * num_scores),
        ),
    )


def train_all(plan: Plan) -> Option:
    """Every weight trains on one card: one more product for each gradient, and states for all.

    Of activations only layer inputs are counted: everything else is recomputed.
    """
    facts, typical = plan.facts, plan.request.typical
    products_s = _seconds(plan, frozen_products)
    request = replace(plan.request, num_slots=facts.num_layers, num_kept_graphs=0, is_stashed=False)
    resident, _ = plan_anyway(facts, plan.machine, request)
    layers_s = step_at_prices(
        resident, lambda layer, cost: replace(cost, backward_s=cost.backward_s + products_s[layer])
    )
    update_bytes = OPTIMIZERS[DEFAULT].update_bytes * facts.num_parameters
    terms = full_training_terms(
        num_parameters=facts.num_parameters,
        dtype_bytes=typical.dtype_bytes,
        activation_bytes=activation_bytes(
            features=1,
            num_tokens=typical.num_tokens * plan.request.num_micro_batches,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype_bytes=typical.dtype_bytes,
        ),
        context_bytes=plan.machine.context_bytes,
    )
    update_s = update_bytes / plan.machine.memory_bytes_per_s.value
    waiting = (term for term in plan.host_memory if term.name in (SLAB, STASH))
    return priced(
        "train all weights",
        "AdamW, nothing offloaded",
        "arXiv:1910.02054",
        plan=plan,
        figures=Figures(
            step_s=layers_s - plan.costs.optimizer_s + update_s,
            vram_bytes=total_bytes(terms),
            ram_bytes=plan.host_bytes - total_bytes(waiting),
            link_bytes=0,
        ),
    )


# ---------------------------------------------------------------------------------------------


def _fused_heads(layer: LayerFacts) -> int:
    """Return the number of heads whose scores a fused kernel does not materialize."""
    kind = layer.attention
    return kind.num_heads if isinstance(kind, SoftmaxAttention) and kind.scores == "fused" else 0


def _seconds(plan: Plan, work: Callable[[Pricer, LayerFacts], Work]) -> dict[LayerFacts, float]:
    """Return the seconds of some work of each kind of layer, for one micro-batch."""
    at = Pricer(machine=plan.machine, facts=plan.facts, workload=plan.request.typical)
    return {layer: work(at, layer).seconds(plan.machine) for layer in set(plan.facts.layers)}


def _with_fragments(num_bytes: int) -> int:
    return int(num_bytes * (1 + FRAGMENTATION_FRAC))


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
    request = over_cards(_held(plan), cards.num)
    made, short = plan_anyway(plan.facts, plan.machine, request)
    needed = 8e-9 * made.network_needed_bytes_per_s
    how = (
        f"{cards.num} cards, `--num_processes {cards.num}`; {needed:,.2g} Gb/s between them hide"
        " the sums of gradients"
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
    request = over_cards(plan.request, cards.num)
    made = sharded_plan(plan.facts, plan.machine, as_sharded(request))
    return Option(
        name=name,
        standing="a setting" if _is_offered(plan.facts, request) else "not done here",
        how=f"{cards.num} cards, `train.parallel: fsdp2`, native"
        if _is_offered(plan.facts, request)
        else f"{cards.num} cards, native layers",
        source=SOURCES[name],
        figures=Figures(
            step_s=made.step_s,
            vram_bytes=made.peak_bytes,
            ram_bytes=made.host_bytes,
            link_bytes=made.schedule.network_bytes,
        ),
        fits=not shortages(made),
    )


def _is_offered(facts: ModelFacts, request: PlanRequest) -> bool:
    """Return whether a run could be sharded; `finetune.recipe.capabilities` says why not."""
    typical, spec = request.typical, request.typical.adapter
    is_lora = not (spec.experts or spec.is_dora or spec.modules or spec.method)
    may_cut = OPTIMIZERS[typical.optimizer].moments is not None
    carries = facts.carried_features or facts.num_carried_indices
    return is_lora and may_cut and not (typical.has_router_loss or carries)


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
        plan.costs.faster(cards.num * loading_frac, *LINK),
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
        is_reduced=False,
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
    costs = made.costs.faster(1 / own_frac, Route.LOAD)
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


# ---------------------------------------------------------------------------------------------
# All options of a plan

NUM_CARDS = 2  # what fits a workstation


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWays:
    """A plan's figures, and those of the other options."""

    plan: Figures
    options: tuple[Option, ...]


def what_if(plan: Plan, *, num_cards: int) -> OtherWays:
    """Price every option against a plan.

    Args:
        plan: Of one process, at the planner's own costs.
        num_cards: Cards of the options that use several.
    """
    assert not plan.request.has_other_ranks
    if plan.request.typical.adapter.whole is not None:  # on one card
        fewer = recompute_cheap(plan), _send_activations(plan), _offload_weights(plan)
        return OtherWays(plan=figures_of(plan), options=(*fewer, unfused_attention(plan)))
    return OtherWays(
        plan=figures_of(plan),
        options=(
            recompute_all(plan),
            recompute_cheap(plan),
            _send_activations(plan),
            _offload_weights(plan),
            *_elsewhere(plan),
            offload_optimizer(plan),
            *_extensions(plan),
            one_kernel_each(plan),
            unfused_attention(plan),
            train_all(plan),
            *second_cards(plan, num_cards=num_cards),
        ),
    )


def _held(plan: Plan) -> PlanRequest:
    """Return the plan's request with the number of slots that it chose."""
    return replace(plan.request, num_slots=plan.num_slots)


def _send_activations(plan: Plan) -> Option:
    is_done = plan.request.is_stashed
    return replanned(
        "send activations",
        f"`offload.stash: {'device' if is_done else 'host'}`",
        "arXiv:1602.08124",
        plan=plan,
        request=replace(_held(plan), is_stashed=not is_done),
        is_in_plan=is_done,
    )


def _offload_weights(plan: Plan) -> Option:
    is_done = plan.num_slots < plan.facts.num_layers
    return replanned(
        "offload weights",
        f"`offload.num_slots: {'all' if is_done else MIN_SLOTS}`",
        "arXiv:2104.07857",
        plan=plan,
        request=replace(plan.request, num_slots=plan.facts.num_layers if is_done else MIN_SLOTS),
        is_in_plan=is_done,
    )


def _elsewhere(plan: Plan) -> Iterator[Option]:
    """Price the embedding and the head in the other place, if a device has memory of its own."""
    facts, typical = plan.facts, plan.request.typical
    places = {"embeddings": typical.embeddings, "head": typical.head}
    rows, copied = "rows of a step's tokens are gathered in RAM", "copied over slots once per step"
    why = why_on_device(facts, typical.adapter)
    ways: list[tuple[str, tuple[str, ...], str, str]] = [
        ("offload embeddings", ("embeddings",), rows, why),
        (
            "offload the head",
            ("head",),
            f"it is {copied}",
            why_head_on_device(facts, typical.adapter),
        ),
    ]
    if facts.tie_word_embeddings:
        both, source = ("embeddings", "head"), f"{rows}, and all are {copied}"
        ways = [("offload embeddings and head", both, source, why)]
    for name, settings, source, why_not in ways:
        if why_not or plan.machine.device == "cpu":
            continue
        is_done = places[settings[0]] == "host"
        wanted: WeightPlace = "device" if is_done else "host"
        yield moved(
            name,
            " and ".join(f"`offload.{setting}: {wanted}`" for setting in settings),
            source,
            plan=plan,
            request=with_workload(_held(plan), **dict.fromkeys(settings, wanted)),
            is_in_plan=is_done,
        )


def _extensions(plan: Plan) -> Iterator[Option]:
    """Price codecs and optimizers that are compared, or the default in place of the plan's."""
    options = {
        **{("codec", NATIVE, n): CODECS[n].option for n in codecs_that(lambda one: one.option)},
        **{
            ("optimizer", DEFAULT, n): OPTIMIZERS[n].option
            for n in optimizers_that(lambda one: one.option)
        },
    }
    for (kind, default, name), option in options.items():
        is_done = getattr(plan.request.typical, kind) == name
        wanted = default if is_done else name
        assert option is not None, "only such are compared"
        yield replanned(
            option[0],
            f"`{'offload' if kind == 'codec' else 'train'}.{kind}: {wanted}`",
            option[1],
            plan=plan,
            request=with_workload(_held(plan), **{kind: wanted}),
            is_in_plan=is_done,
        )
