"""Options for one card that this tool does not offer, or always uses: the step with each of them.

Times are those of the plan's own ops with other costs. Memory is the plan's own terms, plus what
the option would add.
"""

from dataclasses import replace
from math import prod

from offload.plan.facts.attention import SoftmaxAttention
from offload.plan.facts.facts import LayerFacts
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import state_bytes
from offload.plan.facts.trainable import (
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.fit import MemoryNeeds
from offload.plan.memory.memory import (
    FRAGMENTATION_FRAC,
    SLAB,
    STASH,
    total_bytes,
)
from offload.plan.plan import Plan
from offload.plan.time.costs import LayerCost, recomputed_products
from offload.plan.time.optimizer import BYTES_PER_WEIGHT
from offload.plan.time.pointwise import pointwise_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import elementwise, layer_elementwise_bytes, unfused_softmax_bytes
from offload.plan.time.work import Work
from offload.plan.what_if.full_training import activation_bytes, full_training_terms
from offload.plan.what_if.option import (
    Figures,
    Option,
    figures_of,
    plan_anyway,
    priced,
    step_at_prices,
    without_price,
)

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
                lambda _, cost: replace(
                    cost, backward_s=cost.back_s(has_graph=True), recompute_s=0.0
                ),
            ),
            vram_bytes=total_bytes(
                needs.device(plan.residency._replace(num_kept_graphs=plan.facts.num_layers))
            ),
        ),
        is_in_plan=True,
    )


def recompute_cheap(plan: Plan) -> Option:
    """Keep the outputs of products, and recompute what is between them, attention included."""
    at = Pricer(machine=plan.machine, facts=plan.facts, workload=plan.request.typical)
    products_s = {
        layer: recomputed_products(layer, at).seconds(plan.machine)
        for layer in set(plan.facts.layers)
    }
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
        + CPU_ADAMW_BYTES * sum(map(prod, shapes)) / at.host_memory_bytes_per_s.value
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
            ram_bytes=now.ram_bytes + state_bytes(shapes, "adamw") + 2 * copy_bytes,
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
    facts, typical, products_s = plan.facts, plan.request.typical, _products_s(plan)
    request = replace(plan.request, num_slots=facts.num_layers, num_kept_graphs=0, is_stashed=False)
    resident, _ = plan_anyway(facts, plan.machine, request)
    layers_s = step_at_prices(
        resident, lambda layer, cost: replace(cost, backward_s=cost.backward_s + products_s[layer])
    )
    update_bytes = BYTES_PER_WEIGHT["adamw"] * facts.num_parameters
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


def _products_s(plan: Plan) -> dict[LayerFacts, float]:
    """Return the seconds of the frozen products of a layer's forward, for one micro-batch."""
    at = Pricer(machine=plan.machine, facts=plan.facts, workload=plan.request.typical)
    return {
        layer: sum((at.matmul(linear) for linear in layer.linears), start=Work()).seconds(
            plan.machine
        )
        for layer in set(plan.facts.layers)
    }


def _with_fragments(num_bytes: int) -> int:
    return int(num_bytes * (1 + FRAGMENTATION_FRAC))
