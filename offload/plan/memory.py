"""What stands in device and host memory at the peak of a step, in named terms.

A peak is a maximum over instants, not a sum of everything that ever exists: logits and a layer's
recompute never live together. `device_terms` lists the terms of the worst of three instants: a head
chunk, a backward visit, the optimizer.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from offload.plan.attention_kinds import SoftmaxAttention
from offload.plan.codec import decode_workspace_bytes
from offload.plan.costs import Workload
from offload.plan.expert_memory import experts_form, factor_bytes
from offload.plan.facts import (
    LayerFacts,
    ModelFacts,
    adapted_linears,
)
from offload.plan.machine import Machine
from offload.plan.optimizer import paged_bytes, state_bytes, temporary_bytes
from offload.plan.parts import FP32_BYTES
from offload.plan.record import record_bytes
from offload.plan.schedule import NUM_FETCHED, NUM_KEPT, NUM_STAGING, PIECE_BYTES
from offload.plan.traced import TracedBytes
from offload.plan.trained import (
    EMBEDDING,
    adapter_parameters,
    module_tensor_sizes,
    outer_module_sizes,
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.visit_memory import (
    adapter_input_bytes,
    dora_bytes,
    gradient_bytes,
    saved_bytes_per_token,
)

MIB = 2**20

# Terms that are asked for by name.
SLAB, STASH, STAGING = "slab", "stashed layer inputs", "staging"
DATA_WORKERS = "data workers"
PAGED_STATES = "paged optimizer states"
CONTEXT, FRAGMENTATION, OTHER_RANKS = "context", "fragmentation", "other ranks"
SLOTS, CUBLAS = "slots", "cuBLAS workspaces"
# What a trace finds in place of formulas.
VISIT, HEAD_CHUNK, RECORDED = "one visit", "head chunk", "recorded arguments"

# In fp32, behind the loss: the softmax's logarithm, and the gradients by it and by the logits.
LOGIT_COPIES = 3
CUBLAS_BYTES = 2 * 32 * MIB
FRAGMENTATION_FRAC = 0.03
LOADING_LAYERS = 2
WORKER_BYTES = 256 * MIB
# Gradients go to the other ranks in pieces of this size.
GRADIENT_BUCKET_BYTES = 64 * MIB
CUDA_PROCESS_BYTES = 1536 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """A named share of a peak."""

    name: str
    num_bytes: int


def total_bytes(terms: Iterable[MemoryTerm]) -> int:
    """Add up terms."""
    return sum(term.num_bytes for term in terms)


def layer_weight_bytes(facts: ModelFacts, *, dtype_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each layer's decoded weights, as they lie side by side."""
    sizes = {layer: record_bytes(layer, "native", dtype_bytes) for layer in set(facts.layers)}
    return tuple(sizes[layer] for layer in facts.layers)


# ---------------------------------------------------------------------------------------------
# Device


def device_terms(  # noqa: PLR0913 - all that stands in memory
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_slots: int,
    num_micro_batches: int,
    num_ranks: int,
    is_padded: bool,
    is_stashed: bool,
    traced: TracedBytes | None = None,
) -> tuple[MemoryTerm, ...]:
    """List what stands in device memory at the worst instant of a step.

    Args:
        facts: The model.
        machine: The device; on a CPU these bytes are host memory.
        workload: One micro-batch.
        num_slots: Layer slots; at most one per layer is counted.
        num_micro_batches: Micro-batches of a rank's step, whose layer inputs are all kept.
        num_ranks: Processes that share the step, each with a device.
        is_padded: Whether batches hold padding, so that masks have to be written out.
        is_stashed: Whether layer inputs wait in host memory for the backward.
        traced: What a trace of this micro-batch found, in place of formulas.
    """
    always = (
        *_standing_terms(facts, workload, num_slots, is_traced=traced is not None),
        MemoryTerm(name="gradient bucket", num_bytes=_bucket_bytes(facts, workload, num_ranks)),
    )
    num_kept = NUM_KEPT + NUM_FETCHED if is_stashed else facts.num_layers
    recorded = traced.recorded if traced else recorded_bytes(facts, workload, is_padded=is_padded)
    kept = _kept_terms(
        facts,
        workload,
        num_kept=min(num_kept, facts.num_layers),
        num_micro_batches=num_micro_batches,
        recorded=recorded,
    )
    chunk_bytes = traced.head_chunk if traced else head_chunk_bytes(facts, workload)
    head = MemoryTerm(name=HEAD_CHUNK, num_bytes=chunk_bytes)
    update = MemoryTerm(
        name="optimizer temporaries",
        num_bytes=temporary_bytes(
            trained_tensor_shapes(facts, workload.adapter), workload.optimizer
        ),
    )
    visit: tuple[MemoryTerm, ...]
    if traced:
        visit = (MemoryTerm(name=VISIT, num_bytes=max(traced.visits)),)
    else:
        visit = _largest_visit(facts, machine, workload, is_padded=is_padded)
    worst = max(((*kept, *visit), (*kept, head), (update,)), key=total_bytes)
    used = total_bytes(always) + total_bytes(worst)
    overhead = [MemoryTerm(name=FRAGMENTATION, num_bytes=int(used * FRAGMENTATION_FRAC))]
    if machine.device == "cuda":
        overhead.append(MemoryTerm(name=CUBLAS, num_bytes=CUBLAS_BYTES))
    overhead.append(MemoryTerm(name=CONTEXT, num_bytes=machine.context_bytes))
    return tuple(term for term in (*always, *worst, *overhead) if term.num_bytes)


def with_slots(one_slot: Iterable[MemoryTerm], num_slots: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of `device_terms` with one slot as they are with more of them."""
    terms = {term.name: term.num_bytes for term in one_slot}
    overhead = terms.get(FRAGMENTATION, 0) + terms.get(CUBLAS, 0) + terms.get(CONTEXT, 0)
    used = sum(terms.values()) - overhead + (num_slots - 1) * terms[SLOTS]
    terms |= {SLOTS: num_slots * terms[SLOTS], FRAGMENTATION: int(used * FRAGMENTATION_FRAC)}
    return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in terms.items())


def _bucket_bytes(facts: ModelFacts, workload: Workload, num_ranks: int) -> int:
    if num_ranks == 1:
        return 0
    return min(GRADIENT_BUCKET_BYTES, FP32_BYTES * trained_parameters(facts, workload.adapter))


def _standing_terms(
    facts: ModelFacts, workload: Workload, num_slots: int, *, is_traced: bool
) -> tuple[MemoryTerm, ...]:
    b, kinds = workload.dtype_bytes, set(facts.layers)
    slot_bytes = max(workload.cargo_bytes(layer) for layer in kinds)
    gradients = FP32_BYTES * trained_parameters(facts, workload.adapter)
    adapters = FP32_BYTES * adapter_parameters(facts, workload.adapter)
    modules = module_tensor_sizes(facts, workload.adapter)
    # traced visits and head chunks hold those of their own modules; the front is not traced
    outside = outer_module_sizes(facts, workload.adapter)
    new_gradient = outside.get(EMBEDDING, 0) if is_traced else max(modules, default=0)
    copy_bytes = b if b == FP32_BYTES else b + FP32_BYTES
    shapes = trained_tensor_shapes(facts, workload.adapter)
    states = state_bytes(shapes, workload.optimizer)
    decoded, workspace = 0, 0
    if workload.is_encoded:
        decoded = max(layer_weight_bytes(facts, dtype_bytes=b))
        workspace = decode_workspace_bytes(workload.codec)
    return (
        MemoryTerm(name=SLOTS, num_bytes=min(num_slots, facts.num_layers) * slot_bytes),
        MemoryTerm(name="decoded layer", num_bytes=decoded),
        MemoryTerm(name="decode workspace", num_bytes=workspace),
        MemoryTerm(name="embeddings, norm and head", num_bytes=facts.outer_parameters * b),
        MemoryTerm(name="adapters", num_bytes=adapters),
        MemoryTerm(name="trained modules", num_bytes=copy_bytes * sum(modules)),
        MemoryTerm(name="a module's new gradient", num_bytes=b * new_gradient),
        MemoryTerm(name="gradients", num_bytes=gradients),
        MemoryTerm(name="optimizer states", num_bytes=states),
    )


def _kept_terms(
    facts: ModelFacts,
    workload: Workload,
    *,
    num_kept: int,
    num_micro_batches: int,
    recorded: int,
) -> tuple[MemoryTerm, ...]:
    """List layer inputs, those of `num_kept` layers at a time, and what stands beside them."""
    hidden_bytes = input_bytes(facts, workload)
    return (
        MemoryTerm(
            name="kept layer inputs",
            num_bytes=num_kept * num_micro_batches * hidden_bytes,
        ),
        MemoryTerm(
            name="hidden states and their gradients",
            num_bytes=(num_micro_batches + 1) * hidden_bytes,
        ),
        MemoryTerm(name=RECORDED, num_bytes=num_micro_batches * recorded),
    )


def input_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return the size of a layer's input for one micro-batch."""
    return workload.num_tokens * facts.hidden_size * workload.dtype_bytes


def recorded_bytes(facts: ModelFacts, workload: Workload, *, is_padded: bool) -> int:
    """Return what one micro-batch's masks, rotary tables and positions take until its last visit.

    A full causal mask without padding is not written out, nor is a window that the sequence does
    not exceed, but where scores are: there the mask is added to them, and has their type.
    """
    kinds = {
        (kind.rotary_dim, kind.window, kind.scores != "fused")
        for kind in (layer.attention for layer in facts.layers)
        if isinstance(kind, SoftmaxAttention)
    }
    per_token = 8 + facts.num_layers * facts.layer_input_features * workload.dtype_bytes
    for rotary_dim, window, is_written_out in kinds:
        per_token += 2 * rotary_dim * workload.dtype_bytes
        if is_written_out:
            per_token += workload.seq_len * workload.dtype_bytes
        elif _is_masked(window, workload, is_padded=is_padded):
            per_token += workload.seq_len
    return per_token * workload.num_tokens


def _is_masked(window: int | None, workload: Workload, *, is_padded: bool) -> bool:
    return is_padded or (window is not None and window < workload.seq_len)


def head_chunk_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what a chunk takes: its logits as the loss copies them, and what enters the norm.

    That is within 1 % of a trace for qwen3, llama and mixtral, and those with experts of qwen3.
    """
    tokens, b = min(workload.head_chunk_tokens, workload.label_tokens), workload.dtype_bytes
    hidden_bytes = FP32_BYTES if b == FP32_BYTES else FP32_BYTES + b
    return tokens * (
        LOGIT_COPIES * FP32_BYTES * facts.vocab_size + hidden_bytes * facts.hidden_size
    )


def _largest_visit(
    facts: ModelFacts, machine: Machine, workload: Workload, *, is_padded: bool
) -> tuple[MemoryTerm, ...]:
    visits = (
        _visit_terms(facts, machine, layer, workload, is_padded=is_padded)
        for layer in set(facts.layers)
    )
    return max(visits, key=total_bytes)


def _visit_terms(
    facts: ModelFacts, machine: Machine, layer: LayerFacts, workload: Workload, *, is_padded: bool
) -> tuple[MemoryTerm, ...]:
    """List one backward visit: what recompute saves, and the widest gradients beside it."""
    tokens, b = workload.num_tokens, workload.dtype_bytes
    adapted = adapted_linears(layer, workload.adapter)
    is_masked = _is_masked(layer.window, workload, is_padded=is_padded)
    experts = [linear for linear in adapted if linear.group == "experts"]
    spec = workload.adapter
    form = experts_form(machine.experts_implementation.value, is_adapted=bool(experts))
    return (
        MemoryTerm(
            name="one visit: saved activations",
            num_bytes=tokens
            * saved_bytes_per_token(
                facts,
                layer,
                seq_len=workload.seq_len,
                dtype_bytes=b,
                is_masked=is_masked,
                form=form,
                is_cpu=machine.device == "cpu",
            ),
        ),
        MemoryTerm(
            name="one visit: adapter inputs",
            num_bytes=tokens * adapter_input_bytes(adapted, spec=spec, dtype_bytes=b),
        ),
        MemoryTerm(
            name="one visit: gradients",
            num_bytes=tokens
            * gradient_bytes(
                facts,
                layer,
                seq_len=workload.seq_len,
                dtype_bytes=b,
                form=form,
            ),
        ),
        MemoryTerm(
            name="one visit: DoRA's norm", num_bytes=dora_bytes(adapted, spec=spec, dtype_bytes=b)
        ),
        MemoryTerm(
            name="one visit: factors of expert adapters",
            num_bytes=factor_bytes(experts, spec=spec, dtype_bytes=b, form=form),
        ),
    )


# ---------------------------------------------------------------------------------------------
# Host


def host_terms(
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_workers: int,
    num_stashed: int,
    num_ranks: int,
    num_slabs: int,
    rank_device_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """List what stands in host memory while training: of one rank by name, of the others together.

    On a CPU the process itself is counted with the device's terms, and both come from the same
    memory.

    Args:
        facts: The model.
        machine: Where all ranks run.
        workload: One micro-batch.
        num_workers: Data workers of each rank.
        num_stashed: Micro-batches whose layer inputs each rank keeps here.
        num_ranks: Processes that share the step.
        num_slabs: Slabs that they have between them; 0 where layers lie on disk.
        rank_device_bytes: Device memory of each, which on a CPU is host memory too.
    """
    kinds = Counter(facts.layers)
    cargo_bytes = sum(num * workload.cargo_bytes(layer) for layer, num in kinds.items())
    largest = max(layer.num_parameters for layer in kinds)
    slab, is_cuda = cargo_bytes if num_slabs else 0, machine.device == "cuda"
    stash = (facts.num_layers - 1) * num_stashed * input_bytes(facts, workload)
    is_short = num_slabs * slab + num_ranks * stash > machine.pinned_bytes
    staging = 0
    if is_cuda and (is_short or not num_slabs):  # loads pass a ring that can be page-locked
        staging = NUM_STAGING * min(max(map(workload.cargo_bytes, kinds)), PIECE_BYTES)
    terms = (
        MemoryTerm(name=SLAB, num_bytes=slab),
        MemoryTerm(name=STASH, num_bytes=stash),
        MemoryTerm(name=STAGING, num_bytes=staging),
        MemoryTerm(name="loading", num_bytes=LOADING_LAYERS * largest * workload.dtype_bytes),
        MemoryTerm(name=DATA_WORKERS, num_bytes=num_workers * WORKER_BYTES),
        MemoryTerm(
            name=PAGED_STATES,
            num_bytes=paged_bytes(
                trained_tensor_shapes(facts, workload.adapter), workload.optimizer
            ),
        ),
        MemoryTerm(name="process", num_bytes=CUDA_PROCESS_BYTES if is_cuda else 0),
    )
    rank_bytes = total_bytes(terms) + (0 if is_cuda else rank_device_bytes)
    others_bytes = (num_ranks - 1) * rank_bytes - (num_ranks - num_slabs) * slab
    others = MemoryTerm(name=OTHER_RANKS, num_bytes=others_bytes)
    return tuple(term for term in (*terms, others) if term.num_bytes)
