"""The peak of device memory in a step, in named terms; those of the host have names here too.

A peak is a maximum over instants, not a sum of everything that ever exists: logits and a layer's
recompute are never live together. `device_terms` lists the terms of the worst of these instants: a
head chunk and the first backward visit, each with all kept graphs; a visit that recomputes its
layer, without any of them; the optimizer.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Literal, NamedTuple

from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.linears import FP32_BYTES, Attention, DeltaAttention, SoftmaxAttention
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    HOST_STATES,
    LOW_HALVES,
    OPTIMIZERS,
    ROUNDING_BYTES,
    WEIGHTS,
    host_update_bytes,
    paged_bytes,
    state_bytes,
    temporary_bytes,
)
from offload.plan.facts.trainable import (
    EMBEDDING,
    adapter_bytes,
    module_tensor_sizes,
    outer_module_sizes,
    rounded_tensor_sizes,
    trained_parameters,
    trained_tensor_shapes,
    trains_head,
)
from offload.plan.facts.workload import (
    Workload,
    embedding_bytes,
    head_bytes,
    record_bytes,
    row_buffers_bytes,
)
from offload.plan.machine.machine import GIB, MIB, Machine
from offload.plan.memory.visit import VisitBytes, is_masked, is_masked_by_images, visit_bytes
from offload.plan.schedule.op import KEPT_OUTPUT, SENT_GRAPH, SENT_OUTPUT
from offload.plan.schedule.schedule import (
    NUM_CARRIED,
    NUM_FETCHED,
    NUM_GRADIENT_BUFFERS,
    NUM_STAGING,
    PIECE_BYTES,
    Residency,
    Saved,
    slots_bytes,
)

# ---------------------------------------------------------------------------------------------
# The memory of the real model's layers and head, as measured by a trace.
#
# Formulas hold for the code that they were derived from. A trace runs the installed code, without
# values: see `offload.engine.tracing`.

MemoryGrade = Literal["formula", "traced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBytes:
    """Peak device memory of each part, in addition to what was allocated before it."""

    visits: tuple[int, ...]  # bytes of each layer's backward visit, for one micro-batch
    head_chunk: int  # bytes of one chunk's norm, head, loss and backward
    # Bytes of what the model passes to all layers besides their inputs, for one micro-batch.
    recorded: int


# While the router loss of a layer is computed over the step: the softmax, the gradient of the
# logits, and their masked copies and gradients in fp32.
ROUTER_LOSS_COPIES = 2
ROUTER_LOSS_FP32_COPIES = 3


def router_loss_bytes(facts: ModelFacts, workload: Workload) -> float:
    """Return what the router loss over a step takes: that of one layer."""
    fp32_copies = ROUTER_LOSS_FP32_COPIES * FP32_BYTES / workload.dtype_bytes
    largest = max(router_bytes(layer, workload) for layer in facts.layers)
    return (ROUTER_LOSS_COPIES + fp32_copies) * largest


def router_bytes(layer: LayerFacts, workload: Workload) -> int:
    """Return the bytes of a layer's router logits for one micro-batch, if they have a loss."""
    if not workload.has_router_loss:
        return 0
    return workload.num_tokens * (layer.num_experts or 0) * workload.dtype_bytes


# Terms that are looked up by name.
SLAB, STASH, STAGING = "slab", "stashed layer inputs", "staging"
DATA_WORKERS = "data workers"
SENT, KEPT_OUTPUTS = "sent activations", "kept attention outputs"
CARRIERS = "buffers of sent activations"
PAGED_STATES = "paged optimizer states"
HOST_TEMPORARIES = "optimizer temporaries in RAM"
LAYER_GRADIENTS = "buffers of layers' gradients"
CONTEXT, FRAGMENTATION, OTHER_RANKS = "context", "fragmentation", "other ranks"
SLOTS, CUBLAS, KEPT_GRAPHS = "slots", "cuBLAS workspaces", "kept graphs"
UPDATE = "optimizer temporaries"
OUTER, EMBEDDINGS, ROWS = "embeddings, norm and head", "embeddings", "buffers of embedding rows"
HEAD = "output head"
SCORES, ROUTER_LOGITS = "one visit: attention scores", "router logits"
ROUTER_LOSS = "a layer's router loss"
# Of what trains, and of micro-batches: each run of a shared step has its own.
ADAPTERS, TRAINED_MODULES, GRADIENTS = "adapters", "trained modules", "gradients"
STATES, KEPT_INPUTS = "optimizer states", "kept layer inputs"
HIDDEN = "hidden states and their gradients"
SCORED_ROWS, SCORES_OF_LABELS = "rows that are only scored", "log-probabilities"
CARRIED, CARRIED_GRADIENTS = "values that layers share", "gradients of values that layers share"
IMAGES = "features of images"
# Terms that a trace measures; they replace formulas.
VISIT, HEAD_CHUNK, RECORDED = "one visit", "head chunk", "recorded arguments"

# In fp32, after the loss: the log-softmax, and the gradients of it and of the logits.
LOGIT_COPIES = 3
# If one operator computes the loss, the widest instant is the norm's backward, with so many of its
# tensors in fp32; logits and their gradient are still there, in the compute dtype.
NORM_COPIES = 5
# Of a label: its row and the gradient; of each pass its log-probability, alone and with all others.
LABEL_BYTES, SCORE_BYTES = 8 + FP32_BYTES, 2 * FP32_BYTES
# Of a token that a loss names at a label: its number; of each its log-probability, alone and with
# all others, and the gradient.
TOKEN_BYTES, TOP_BYTES = 8, 3 * FP32_BYTES
CUBLAS_BYTES = 2 * 32 * MIB
FRAGMENTATION_FRAC = 0.03
# Gradients are added up over ranks in pieces: what is sent, and what arrives.
GRADIENT_BUCKET_BYTES = 64 * MIB


# Settings that make a term smaller; terms that no setting changes are not listed.
SEQ_LEN, MICRO_BATCH = "a shorter `train.seq_len`", "a smaller `train.micro_batch_size`"
TOKENS, RANK = "fewer `train.tokens_per_step`", "a smaller `adapter.rank`"
FEWER_TARGETS = "fewer `adapter.targets`"
FEWER_WEIGHTS = "fewer weights in `train.what`"
FEWER_SLOTS, ROUNDED_LAYERS = "fewer `offload.num_slots`", "layers that are rounded"
SMALLER_STATES, SMALLER_HOST_STATES = "smaller states", "smaller states in RAM"
ON_DISK, INPUTS_IN_RAM = "`offload.tier: disk`", "`offload.stash: host`"
SMALLER_CHUNK, SMALLER_TILES = "a smaller `offload.head_chunk`", "a smaller `offload.mlp_chunk`"
EMBEDDINGS_IN_RAM, HEAD_IN_RAM = "`offload.embeddings: host`", "`offload.head: host`"
TIED_IN_RAM = f"{EMBEDDINGS_IN_RAM} and {HEAD_IN_RAM}"
NO_OUTPUTS = "`offload.attention_outputs: none`"
NO_SENT_GRAPHS = "`offload.sent_graphs: none`"
SHRINKS: Mapping[str, tuple[str, ...]] = {
    OUTER: (EMBEDDINGS_IN_RAM, HEAD_IN_RAM, TIED_IN_RAM),
    SLOTS: (FEWER_SLOTS, ROUNDED_LAYERS),
    ADAPTERS: (RANK, FEWER_TARGETS),
    GRADIENTS: (RANK, FEWER_TARGETS),
    STATES: (SMALLER_STATES, RANK),
    UPDATE: (RANK,),
    TRAINED_MODULES: ("fewer `adapter.modules_to_save`",),
    KEPT_INPUTS: (INPUTS_IN_RAM, TOKENS),
    HIDDEN: (TOKENS,),
    RECORDED: (SEQ_LEN, TOKENS),
    CARRIED: (TOKENS,),
    CARRIED_GRADIENTS: (TOKENS,),
    IMAGES: (TOKENS,),
    SCORED_ROWS: (TOKENS,),
    KEPT_GRAPHS: ("fewer `offload.kept_graphs`",),
    KEPT_OUTPUTS: (NO_OUTPUTS,),
    CARRIERS: (NO_SENT_GRAPHS, NO_OUTPUTS),
    HEAD_CHUNK: (SMALLER_CHUNK,),
    VISIT: (SEQ_LEN, MICRO_BATCH),
    "one visit: saved activations": (SEQ_LEN, MICRO_BATCH),
    SCORES: (f"{SEQ_LEN}, by its square", MICRO_BATCH),
    "one visit: adapter inputs": (SEQ_LEN, MICRO_BATCH, FEWER_TARGETS),
    "one visit: gradients": (SEQ_LEN, MICRO_BATCH),
    "one visit: a tile of the MLP": (SMALLER_TILES,),
    "one visit: DoRA's norm": ("`adapter.dora: false`",),
    "one visit: adapters on whole weights": ("`adapter.method: lora`",),
    "one visit: adapter factors": (RANK,),
    SLAB: (ON_DISK, ROUNDED_LAYERS),
    LOW_HALVES: (FEWER_WEIGHTS,),
    HOST_GRADIENTS: (FEWER_WEIGHTS,),
    HOST_STATES: (SMALLER_HOST_STATES, FEWER_WEIGHTS),
    STASH: (TOKENS, "`offload.stash: device`"),
    SENT: (NO_SENT_GRAPHS, NO_OUTPUTS, TOKENS),
    DATA_WORKERS: ("fewer `data.num_workers`",),
    OTHER_RANKS: ("fewer `--num_processes`",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """A named share of a peak."""

    name: str
    num_bytes: int


def total_bytes(terms: Iterable[MemoryTerm]) -> int:
    """Add up terms."""
    return sum(term.num_bytes for term in terms)


def layer_weight_bytes(facts: ModelFacts, *, dtype_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each layer's decoded weights, stored one after another."""
    sizes = {layer: record_bytes(layer, NATIVE, dtype_bytes) for layer in set(facts.layers)}
    return tuple(sizes[layer] for layer in facts.layers)


# ---------------------------------------------------------------------------------------------
# Device


class Instant(StrEnum):
    """When the device's memory may be at its peak."""

    RECOMPUTE = "a visit that recomputes its layer, before any graph is kept"
    CHUNK = "a head chunk"
    VISIT = "a visit whose graph was kept"
    SCORED_CHUNK = "a head chunk, while rows are scored"
    SCORED_VISIT = "a visit without a graph, while rows are scored"
    UPDATE = "the optimizer"


ALWAYS = frozenset(Instant)
IN_PASS = ALWAYS - {Instant.UPDATE}
WITH_GRAPHS = IN_PASS - {Instant.RECOMPUTE}
SCORING = frozenset({Instant.SCORED_CHUNK, Instant.SCORED_VISIT})


class Row(NamedTuple):
    """A term of device memory, and the instants at which it is live."""

    name: str
    num_bytes: int
    at: Set[Instant] = ALWAYS


@dataclass(frozen=True, kw_only=True)  # no slots: sums are computed once
class DeviceNeeds:
    """The use of device memory, by what of the layers stays there.

    A search asks for the peak of thousands of residencies, and for the terms of a few.
    """

    slot_bytes: int  # the size of a slot
    rows: tuple[Row, ...]  # all terms that do not depend on the residency
    graph_bytes: tuple[int, ...]  # what kept graphs take, by their number
    # Bytes of the output and log-sum-exp of each layer's attention for one micro-batch; 0 where it
    # is computed again.
    output_bytes: tuple[int, ...]
    # Bytes of all that autograd saves of each layer for one micro-batch.
    sent_graph_bytes: tuple[int, ...]
    # Bytes of each layer's router logits for one micro-batch, if they wait with its graph for a
    # router loss over the step.
    router_bytes: tuple[int, ...]
    # The micro-batches of a rank that pass the layers together, if all were as large as the
    # largest.
    num_micro_batches: float
    # Bytes of an output head that is copied over the slots, with its gradient there; 0 if the
    # device has it.
    head_bytes: int = 0

    def live(self, at: Set[Instant]) -> tuple[MemoryTerm, ...]:
        """List the terms that are live at exactly these instants."""
        rows = (row for row in self.rows if row.at == at)
        return tuple(MemoryTerm(name=row.name, num_bytes=row.num_bytes) for row in rows)

    @cached_property
    def _saved(self) -> Callable[[Residency], Saved]:
        """What each residency saves: a search asks for the same ones again."""
        outputs = tuple((size,) if size else () for size in self.output_bytes)
        graphs = tuple((size,) for size in self.sent_graph_bytes)
        return cache(lambda residency: residency.saved(outputs, graphs))

    def sent_bytes(self, residency: Residency) -> int:
        """Return what the sent graphs and outputs take in the host's memory."""
        saved = self._saved(residency)
        graphs = sum(map(self.sent_graph_bytes.__getitem__, saved.which[SENT_GRAPH]))
        outputs = sum(map(self.output_bytes.__getitem__, saved.which[SENT_OUTPUT]))
        return int(self.num_micro_batches * (graphs + outputs))

    def sent_graphs_bytes(self, residency: Residency) -> int:
        """Return what of it is of whole graphs."""
        graphs = residency.sent_graphs(len(self.sent_graph_bytes))
        sizes = map(self.sent_graph_bytes.__getitem__, graphs)
        return int(self.num_micro_batches * sum(sizes))

    def _saved_bytes(self, residency: Residency) -> tuple[int, int, int]:
        """Return router logits and outputs that wait for the backward, and buffers of what leaves.

        What a graph that is being sent takes besides is less than a recompute's visit.
        """
        saved, num = self._saved(residency), self.num_micro_batches
        kept = sum(map(self.output_bytes.__getitem__, saved.which[KEPT_OUTPUT]))
        graph = max(map(self.sent_graph_bytes.__getitem__, saved.which[SENT_GRAPH]), default=0)
        output = max(map(self.output_bytes.__getitem__, saved.which[SENT_OUTPUT]), default=0)
        largest = max(graph, output)
        routers = sum(map(self.router_bytes.__getitem__, saved.which[SENT_GRAPH]))
        return int(num * routers), int(num * kept), int(NUM_CARRIED * num * largest)

    @cached_property
    def _bytes_at(self) -> Mapping[Instant, int]:
        """What the rows take at each instant, but for those that leave no fragments."""
        rows = [row for row in self.rows if row.name not in WHOLE]
        return {at: sum([row.num_bytes for row in rows if at in row.at]) for at in Instant}

    @cached_property
    def _instants(self) -> tuple[int, int, int, int]:
        """A recomputing visit, the worst instant with graphs, the update, and what is whole."""
        sizes = self._bytes_at
        whole = sum([row.num_bytes for row in self.rows if row.name in WHOLE])
        with_graphs = max([sizes[at] for at in WITH_GRAPHS])
        return sizes[Instant.RECOMPUTE], with_graphs, sizes[Instant.UPDATE], whole

    def peak_bytes(self, residency: Residency) -> int:
        """Return the sum of `terms`."""
        num_slots, num_graphs, *others = residency
        visit, with_graphs, update, whole = self._instants
        saved = sum(self._saved_bytes(residency)) if any(others) else 0
        worst = max(visit + saved, with_graphs + saved + self.graph_bytes[num_graphs], update)
        used = max(num_slots * self.slot_bytes, self.head_bytes) + worst
        return used + int(used * FRAGMENTATION_FRAC) + whole

    def terms(self, residency: Residency) -> tuple[MemoryTerm, ...]:
        """List the terms of the worst instant; more slots or graphs never need less memory."""
        routers, outputs, carriers = self._saved_bytes(residency)
        rows = (
            Row(SLOTS, slots_bytes(residency.num_slots, self.slot_bytes, self.head_bytes)),
            *self.rows,
            Row(ROUTER_LOGITS, routers, IN_PASS),
            Row(KEPT_OUTPUTS, outputs, IN_PASS),
            Row(CARRIERS, carriers, IN_PASS),
            Row(KEPT_GRAPHS, self.graph_bytes[residency.num_kept_graphs], WITH_GRAPHS),
        )
        fragile = [row for row in rows if row.name not in WHOLE]
        live = [[row for row in fragile if at in row.at] for at in Instant]
        worst = max(live, key=lambda rows: sum([row.num_bytes for row in rows]))
        used = sum([row.num_bytes for row in worst])
        whole = [row for row in rows if row.name in WHOLE]
        terms = (*worst, Row(FRAGMENTATION, int(used * FRAGMENTATION_FRAC)), *whole)
        return tuple(MemoryTerm(name=x.name, num_bytes=x.num_bytes) for x in terms if x.num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Passes that only score, until the loss over all rows is known; then they are gone.

    Each has one hidden state and the arguments of its layers. The log-probabilities, and the
    gradient by each, stay. Those of several tokens at a label are taken from a copy of the logits
    in fp32, whatever computes a cross-entropy.
    """

    extra_passes: float  # micro-batches that only score, for each that is trained on
    num_top: int  # tokens at each label, further to its own, whose log-probabilities are taken
    is_tempered: bool = False  # whether logits are divided by a temperature, into a copy

    def rows(self, num_labels: float, scored_bytes: float) -> tuple[Row, ...]:
        """List the memory of a step.

        Args:
            num_labels: Label tokens of the step.
            scored_bytes: Hidden states of all its micro-batches, and what their layers are passed.
        """
        scores = num_labels * (LABEL_BYTES + (1 + self.extra_passes) * SCORE_BYTES)
        if self.num_top:  # further to the label's: those of each of them, and of all others
            scores += num_labels * (self.num_top * TOKEN_BYTES + (self.num_top + 1) * TOP_BYTES)
        return (
            Row(SCORES_OF_LABELS, int(scores), IN_PASS),
            Row(SCORED_ROWS, int(self.extra_passes * scored_bytes), SCORING),
        )


def device_terms(  # noqa: PLR0913 - everything that uses memory
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_slots: int,
    num_micro_batches: float,
    is_reduced: bool,
    is_padded: bool,
    is_stashed: bool,
    traced: TracedBytes | None = None,
) -> tuple[MemoryTerm, ...]:
    """List the terms of device memory at the worst instant of a step that keeps no graph.

    Args:
        facts: The model.
        machine: The device; on a CPU these bytes are host memory.
        workload: One micro-batch.
        num_slots: Layer slots, at most one per layer.
        num_micro_batches: Micro-batches of a rank's step, whose layer inputs are all kept; a
            fraction where not all of them are as large as the largest.
        is_reduced: Whether gradients are added up over ranks.
        is_padded: Whether batches contain padding, so that masks have to be materialized.
        is_stashed: Whether layer inputs are kept in host memory until the backward.
        traced: What a trace of this micro-batch measured, in place of formulas.
    """
    needs = device_needs(
        facts,
        machine,
        workload,
        num_micro_batches=num_micro_batches,
        is_reduced=is_reduced,
        is_padded=is_padded,
        is_stashed=is_stashed,
        traced=traced,
    )
    return needs.terms(Residency(num_slots=num_slots))


def device_needs(  # noqa: PLR0913 - everything that uses memory
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_micro_batches: float,
    is_reduced: bool,
    is_padded: bool,
    is_stashed: bool,
    traced: TracedBytes | None,
    scoring: Scoring | None = None,
    are_others_scored: bool = False,
) -> DeviceNeeds:
    """Add up the memory of a step on each device; for the arguments see `device_terms`.

    With `scoring` the loss is taken over all rows of the step. Where only those of other runs are
    scored, this run's visits without a graph may be while they wait.
    """
    num_layers, is_cuda = facts.num_layers, machine.device == "cuda"
    # of stashed ones: those that come back, and the last layer's, which do not leave
    num_kept = min(NUM_FETCHED + 1, num_layers) if is_stashed else num_layers
    recorded = traced.recorded if traced else recorded_bytes(facts, workload, is_padded=is_padded)
    recorded += workload.adapter.past_bytes  # and gradients by a prefix
    recorded += image_mask_bytes(facts, workload, is_padded=is_padded)
    kinds = set(facts.layers)
    visits = {x: visit_bytes(facts, machine, x, workload, is_padded=is_padded) for x in kinds}
    widest = max(visits.values(), key=lambda visit: visit.beside_saved)
    outputs = {x: workload.output_bytes(x, is_cuda=is_cuda) for x in kinds}
    routers = {x: router_bytes(x, workload) for x in kinds}
    beside = replace(widest, saved=0, scores=0, adapter_inputs=0, factors=0)
    is_fused = workload.fuses_loss(machine.device)
    chunk_bytes = (
        traced.head_chunk if traced else head_chunk_bytes(facts, workload, is_fused=is_fused)
    )
    if scoring and (scoring.num_top or scoring.is_tempered):
        wide_bytes = head_chunk_bytes(facts, workload, is_fused=False)
        chunk_bytes = max(chunk_bytes, wide_bytes)
    most = max(traced.visits) if traced else 0
    visit = _visit_rows(visits.values(), Instant.RECOMPUTE)
    graph_bytes = [0]
    for number, layer in enumerate(reversed(facts.layers), start=1):
        # plus the last layer's output, and of others the inputs that would otherwise be stashed
        num_hidden = (number == 1) + (1 < number <= num_layers + 1 - num_kept)
        # the largest traced visit, gradients included, exceeds any graph
        graph = most or visits[layer].graph + routers[layer]
        one_bytes = graph + num_hidden * input_bytes(facts, workload)
        graph_bytes.append(graph_bytes[-1] + int(num_micro_batches * one_bytes))
    gradient_bytes = FP32_BYTES * trained_parameters(facts, workload.adapter)
    bucket_bytes = min(GRADIENT_BUCKET_BYTES, 2 * gradient_bytes)
    rows = [
        *_standing_rows(facts, workload, is_traced=traced is not None),
        Row("gradient bucket", bucket_bytes if is_reduced else 0),
        *_kept_rows(
            facts,
            workload,
            num_kept=num_kept,
            num_micro_batches=num_micro_batches,
            recorded=recorded,
        ),
    ]
    if scoring:
        rows += scoring.rows(
            num_micro_batches * workload.label_tokens,
            num_micro_batches
            * (input_bytes(facts, workload) + recorded + carried_bytes(facts, workload))
            + image_bytes(facts, workload, num_micro_batches=num_micro_batches),
        )
    if scoring or are_others_scored:
        without = [replace(x, gradients=0) for x in visits.values()]
        forward = _visit_rows(without, Instant.SCORED_VISIT)
        if most:
            size = min(sum([row.num_bytes for row in forward]), most)
            forward = (Row(VISIT, size, {Instant.SCORED_VISIT}),)
        rows += forward
    rows += (Row(VISIT, most, {Instant.RECOMPUTE}),) if traced else visit
    rows += () if traced else _visit_rows([beside], Instant.VISIT)
    return DeviceNeeds(
        slot_bytes=max(workload.cargo_bytes(layer) for layer in kinds),
        rows=(
            *rows,
            Row(HEAD_CHUNK, chunk_bytes, {Instant.CHUNK, Instant.SCORED_CHUNK}),
            Row(UPDATE, _update_bytes(facts, workload), {Instant.UPDATE}),
            Row(CUBLAS, CUBLAS_BYTES if is_cuda else 0),
            Row(CONTEXT, machine.context_bytes),
        ),
        graph_bytes=tuple(graph_bytes),
        output_bytes=tuple(outputs[layer] for layer in facts.layers),
        sent_graph_bytes=tuple(visits[layer].sent_graph for layer in facts.layers),
        router_bytes=tuple(routers[layer] for layer in facts.layers),
        num_micro_batches=num_micro_batches,
        head_bytes=head_bytes(facts, workload),
    )


def _update_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return the temporary memory of an update; of weights in bf16 it includes fp32 copies."""
    shapes = trained_tensor_shapes(facts, workload.adapter)
    rounded = rounded_tensor_sizes(facts, workload.adapter)
    in_rounding = ROUNDING_BYTES * max(rounded, default=0)
    return FP32_BYTES * sum(rounded) + max(temporary_bytes(shapes, workload.optimizer), in_rounding)


def _standing_rows(facts: ModelFacts, workload: Workload, *, is_traced: bool) -> tuple[Row, ...]:
    b = workload.dtype_bytes
    gradients = FP32_BYTES * trained_parameters(facts, workload.adapter)
    modules = module_tensor_sizes(facts, workload.adapter)
    # traced visits and head chunks include those of their own modules; the front is not traced
    outside = outer_module_sizes(facts, workload.adapter)
    layer_gradients = 0
    if (whole := workload.adapter.whole) is not None:
        gradients, modules = FP32_BYTES * whole.num_outer, ()
        layer_gradients = math.ceil(NUM_GRADIENT_BUFFERS * b * max(whole.layers))
    new_gradient = b * (outside.get(EMBEDDING, 0) if is_traced else max(modules, default=0))
    copy_bytes = FP32_BYTES + (0 if b == FP32_BYTES or workload.adapter.num_past else b)
    shapes = trained_tensor_shapes(facts, workload.adapter)
    states = state_bytes(shapes, workload.optimizer)
    decoded, workspace = 0, 0
    on_host = embedding_bytes(facts, workload) + head_bytes(facts, workload)
    if workload.is_encoded:
        decoded = max(layer_weight_bytes(facts, dtype_bytes=b))
        workspace = CODECS[workload.codec].workspace_bytes
    return (
        Row("decoded layer", decoded),
        Row("decode workspace", workspace),
        Row(OUTER, facts.outer_parameters * b - on_host),
        Row(ROWS, row_buffers_bytes(facts, workload)),
        Row(ADAPTERS, adapter_bytes(facts, workload.adapter)),
        Row(TRAINED_MODULES, copy_bytes * sum(modules)),
        Row("a module's new gradient", new_gradient),
        Row(GRADIENTS, gradients),
        Row(LAYER_GRADIENTS, layer_gradients),
        Row(STATES, states),
    )


def _kept_rows(
    facts: ModelFacts,
    workload: Workload,
    *,
    num_kept: int,
    num_micro_batches: float,
    recorded: int,
) -> tuple[Row, ...]:
    """List layer inputs, of `num_kept` layers at a time, and what is live along with them."""
    hidden_bytes = input_bytes(facts, workload)
    return (
        Row(KEPT_INPUTS, int(num_kept * num_micro_batches * hidden_bytes), IN_PASS),
        Row(HIDDEN, int((num_micro_batches + 1) * hidden_bytes), IN_PASS),
        Row(RECORDED, int(num_micro_batches * recorded), IN_PASS),
        Row(CARRIED, int(num_micro_batches * carried_bytes(facts, workload)), IN_PASS),
        Row(
            CARRIED_GRADIENTS,
            int(num_micro_batches * workload.num_tokens * workload.dtype_bytes)
            * facts.carried_gradient_features,
            {Instant.RECOMPUTE, Instant.VISIT},
        ),
        Row(ROUTER_LOSS, int(router_loss_bytes(facts, workload)), IN_PASS),
        Row(IMAGES, image_bytes(facts, workload, num_micro_batches=num_micro_batches), IN_PASS),
    )


def input_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return the size of a layer's input for one micro-batch."""
    dtype_bytes = FP32_BYTES if facts.has_fp32_inputs else workload.dtype_bytes
    return workload.num_tokens * facts.hidden_size * facts.num_streams * dtype_bytes


def carried_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return the bytes of what layers compute for later ones, of one micro-batch."""
    index_bytes = 4 * facts.num_carried_indices * min(facts.index_top_k, workload.seq_len)  # int32
    return workload.num_tokens * (facts.carried_features * workload.dtype_bytes + index_bytes)


def image_bytes(facts: ModelFacts, workload: Workload, *, num_micro_batches: float) -> int:
    """Return the bytes of the features of images: each micro-batch's where a layer adds some.

    They are as many as its tokens for each such layer, kept until its backward visit; those that
    take the places of tokens are there for the one micro-batch in the front.
    """
    if not workload.has_images or facts.tower is None:
        return 0
    rows = num_micro_batches * facts.tower.num_added + 1
    return int(rows * workload.num_tokens) * facts.hidden_size * workload.dtype_bytes


def image_mask_bytes(facts: ModelFacts, workload: Workload, *, is_padded: bool) -> int:
    """Return the bytes of the masks that one micro-batch has for its images alone."""
    windows = {
        layer.window for layer in facts.layers if isinstance(layer.attention, SoftmaxAttention)
    }
    masked = [
        window
        for window in windows
        if is_masked_by_images(facts, window, workload)
        and not is_masked(window, workload, is_padded=is_padded)
    ]
    return len(masked) * workload.num_tokens * workload.num_keys


def recorded_bytes(facts: ModelFacts, workload: Workload, *, is_padded: bool) -> int:
    """Return the bytes of one micro-batch's masks, rotary tables and positions.

    They are live until its last visit. A full causal mask without padding is not materialized, nor
    is a window that the sequence does not exceed, unless the scores are materialized: then the mask
    is added to them, and has their dtype.
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
            per_token += workload.num_keys * workload.dtype_bytes
        elif is_masked(window, workload, is_padded=is_padded):
            per_token += workload.num_keys
    return per_token * workload.num_tokens + workload.adapter.past_bytes


def head_chunk_bytes(facts: ModelFacts, workload: Workload, *, is_fused: bool) -> int:
    """Return the bytes of a head chunk: the copies of its logits, and the norm's input.

    A head of the model's own that trains has a new gradient then, of its whole table. This is
    within 1 % of a trace for qwen3 and llama.
    """
    spec, b = workload.adapter, workload.dtype_bytes
    tokens = min(workload.head_chunk_tokens, workload.label_tokens)
    logit_bytes = 2 * b if is_fused else LOGIT_COPIES * FP32_BYTES
    hidden_bytes = FP32_BYTES if b == FP32_BYTES else FP32_BYTES + b
    if is_fused:
        hidden_bytes += NORM_COPIES * FP32_BYTES
    logits = tokens * (logit_bytes * facts.num_outputs + hidden_bytes * facts.hidden_size)
    is_new = spec.whole is not None and trains_head(facts, outer_module_sizes(facts, spec))
    return logits + (b * facts.num_outputs * facts.hidden_size if is_new else 0)


def _visit_rows(visits: Iterable[VisitBytes], at: Instant) -> tuple[Row, ...]:
    """List the largest of some backward visits: what its recompute saves, and its gradients."""
    listed = [
        (
            Row("one visit: saved activations", one.saved, {at}),
            Row(SCORES, one.scores, {at}),
            Row("one visit: adapter inputs", one.adapter_inputs, {at}),
            Row("one visit: gradients", one.gradients, {at}),
            Row("one visit: a tile of the MLP", one.tile, {at}),
            Row("one visit: DoRA's norm", one.dora, {at}),
            Row("one visit: adapters on whole weights", one.update, {at}),
            Row("one visit: adapter factors", one.factors, {at}),
        )
        for one in visits
    ]
    return max(listed, key=lambda rows: sum([row.num_bytes for row in rows]))


# ---------------------------------------------------------------------------------------------
# The device memory of a step that several runs share.
#
# What trains is there once for each run: its adapter, gradients, optimizer states and master
# copies. So are the inputs of all micro-batches, and what kept graphs and outputs of attention
# hold. The model is there once, and only one visit, head chunk or update works at a time: the
# largest counts.

SUMMED = frozenset(
    {
        ADAPTERS,
        TRAINED_MODULES,
        GRADIENTS,
        STATES,
        KEPT_INPUTS,
        HIDDEN,
        RECORDED,
        CARRIED,
        CARRIED_GRADIENTS,
        IMAGES,
        ROUTER_LOGITS,
        ROUTER_LOSS,
        SCORED_ROWS,
        SCORES_OF_LABELS,
    }
)
"""Terms of which each run has its own; of the others the largest counts."""

WHOLE = frozenset({CUBLAS, CONTEXT})
"""Terms that leave no fragments."""


def shared_needs(runs: Sequence[DeviceNeeds]) -> DeviceNeeds:
    """Return the needs of a step of several runs, on the same device and with the same layers.

    Sizes by micro-batch become those of the whole step.
    """
    if len(runs) == 1:
        return runs[0]

    def added_up(sizes_of: Callable[[DeviceNeeds], tuple[int, ...]]) -> tuple[int, ...]:
        layers = zip(*map(sizes_of, runs), strict=True)
        return tuple(
            int(sum(run.num_micro_batches * size for run, size in zip(runs, sizes, strict=True)))
            for sizes in layers
        )

    return replace(
        runs[0],
        rows=_together([run.rows for run in runs]),
        graph_bytes=tuple(map(sum, zip(*(run.graph_bytes for run in runs), strict=True))),
        output_bytes=tuple(
            size if all(run.output_bytes[layer] for run in runs) else 0
            for layer, size in enumerate(added_up(lambda run: run.output_bytes))
        ),
        sent_graph_bytes=added_up(lambda run: run.sent_graph_bytes),
        router_bytes=added_up(lambda run: run.router_bytes),
        num_micro_batches=1.0,
    )


def own_bytes(run: DeviceNeeds) -> int:
    """Return what a run has on the device for itself: what trains, and its layer inputs."""
    return sum(row.num_bytes for row in run.rows if row.name in SUMMED)


def _together(runs: Sequence[tuple[Row, ...]]) -> tuple[Row, ...]:
    """Return all rows, each as the sum over the runs or as the largest of them.

    Of what is live at one instant alone, all rows are those of the run that has most of it.
    """
    sizes: dict[tuple[str, frozenset[Instant]], list[int]] = {}
    largest: dict[frozenset[Instant], tuple[Row, ...]] = {}
    for rows in runs:
        for at in (frozenset({instant}) for instant in Instant):
            alone = tuple([row for row in rows if row.at == at])
            before = largest.get(at, ())
            largest[at] = max(before, alone, key=lambda some: sum(row.num_bytes for row in some))
        for row in rows:
            if len(row.at) > 1:
                sizes.setdefault((row.name, frozenset(row.at)), []).append(row.num_bytes)
    summed = (
        Row(name, sum(some) if name in SUMMED else max(some), at)
        for (name, at), some in sizes.items()
    )
    return (*summed, *(row for rows in largest.values() for row in rows))


FEATURES = "features of a linear probe"
LOADING_LAYERS = 2
WORKER_BYTES = 256 * MIB
CUDA_PROCESS_BYTES = 2048 * MIB  # 15 runs on an H200, torch 2.11, CUDA 13: 1.8 to 2.2 GiB resident
ADAFACTOR_COPIES = 3  # in fp32, of a tensor: itself, its gradient, its step


LOCKED_TERMS = (STASH, SENT, ROWS, HEAD)
"""Terms of host memory that are page-locked in addition to the layers, if a GPU computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    """What one run of a step has in host memory."""

    workload: Workload  # its largest micro-batch
    num_workers: int  # its data workers of each rank
    num_stashed: int  # micro-batches whose layer inputs each rank stashes in host memory
    feature_bytes: int = 0  # what a head reads that learns alone before the first step


def host_terms(
    facts: ModelFacts,
    machine: Machine,
    runs: Sequence[HostLoad],
    *,
    local_ranks: int,
    num_slabs: int,
    rank_device_bytes: int,
) -> tuple[MemoryTerm, ...]:
    """List the terms of host memory in training: one rank's by name, those of the others as a sum.

    On a CPU the process itself is counted with the device's terms, and both use the same memory.

    Args:
        facts: The model.
        machine: The machine that they run on.
        runs: What each run of the step has there; layers are the same for all.
        local_ranks: Processes that share the step on this machine.
        num_slabs: Slabs of all of them together; 0 if layers are on disk.
        rank_device_bytes: Device memory of each rank, which on a CPU is host memory too.
    """
    kinds, workload = Counter(facts.layers), runs[0].workload
    cargo_bytes = sum(num * workload.cargo_bytes(layer) for layer, num in kinds.items())
    largest = max(layer.num_parameters for layer in kinds)
    num_workers = sum(run.num_workers for run in runs)
    slab, is_cuda = cargo_bytes if num_slabs else 0, machine.device == "cuda"
    stash = (facts.num_layers - 1) * sum(
        run.num_stashed * input_bytes(facts, run.workload) for run in runs
    )
    rows = max(row_buffers_bytes(facts, run.workload) for run in runs)
    head = head_bytes(facts, workload)
    locked = stash + rows + head + locked_update_bytes(workload)
    is_short = num_slabs * slab + local_ranks * locked > machine.pinned_bytes
    staging = 0
    if is_cuda and (is_short or not num_slabs):  # loads pass through a page-locked ring
        staging = NUM_STAGING * min(max(map(workload.cargo_bytes, kinds)), PIECE_BYTES)
    embedding = embedding_bytes(facts, workload)
    terms = (
        MemoryTerm(name=SLAB, num_bytes=slab),
        *_whole_host_terms(facts, workload, is_cuda=is_cuda),
        MemoryTerm(name=EMBEDDINGS, num_bytes=embedding),
        MemoryTerm(name=ROWS, num_bytes=rows),
        MemoryTerm(name=HEAD, num_bytes=head),
        MemoryTerm(name=STASH, num_bytes=stash),
        MemoryTerm(name=STAGING, num_bytes=staging),
        MemoryTerm(name="loading", num_bytes=LOADING_LAYERS * largest * workload.dtype_bytes),
        MemoryTerm(name=DATA_WORKERS, num_bytes=num_workers * WORKER_BYTES),
        MemoryTerm(name=FEATURES, num_bytes=sum(run.feature_bytes for run in runs)),
        MemoryTerm(
            name=PAGED_STATES,
            num_bytes=sum(
                paged_bytes(
                    trained_tensor_shapes(facts, run.workload.adapter), run.workload.optimizer
                )
                for run in runs
            ),
        ),
        MemoryTerm(name="process", num_bytes=CUDA_PROCESS_BYTES if is_cuda else 0),
    )
    rank_bytes = total_bytes(terms) + (0 if is_cuda else rank_device_bytes)
    others_bytes = (local_ranks - 1) * rank_bytes - (local_ranks - num_slabs) * slab
    others_bytes -= (
        local_ranks - max(1, num_slabs)
    ) * embedding  # with layers on disk it is shared
    others = MemoryTerm(name=OTHER_RANKS, num_bytes=others_bytes)
    return tuple(term for term in (*terms, others) if term.num_bytes)


def locked_update_bytes(workload: Workload) -> int:
    """Return the page-locked memory that updates of layers need in addition to the layers.

    Gradients arrive there from the device.
    """
    whole = workload.adapter.whole
    if whole is None:
        return 0
    b, optimizer, low_bytes = workload.dtype_bytes, workload.optimizer, whole.low_bytes
    each = host_update_bytes(b, optimizer, low_bytes)[HOST_GRADIENTS]
    return math.ceil(each * sum(whole.layers))


def _whole_host_terms(
    facts: ModelFacts, workload: Workload, *, is_cuda: bool
) -> tuple[MemoryTerm, ...]:
    """List what weights that train take in RAM in addition to themselves.

    If a device computes with them, weights around the layers are there too, and their gradients in
    fp32.
    """
    whole = workload.adapter.whole
    if whole is None:
        return ()
    b, low_bytes = workload.dtype_bytes, whole.low_bytes
    each = host_update_bytes(b, workload.optimizer, low_bytes)
    gradients = each[HOST_GRADIENTS] * sum(whole.layers)
    gradients += FP32_BYTES * whole.num_outer if is_cuda else 0
    copies = each[WEIGHTS] * whole.num_outer if is_cuda else 0
    in_layers = [linear.num_weights for layer in facts.layers for linear in layer.linears]
    largest = max(*in_layers, facts.embedding_parameters if whole.num_outer else 0)
    temporaries = ADAFACTOR_COPIES * FP32_BYTES * largest
    num = whole.num_parameters
    outer = host_update_bytes(b, workload.optimizer, low_bytes)
    states = each[HOST_STATES] * sum(whole.layers) + outer[HOST_STATES] * whole.num_outer
    return (
        MemoryTerm(name=LOW_HALVES, num_bytes=math.ceil(each[LOW_HALVES] * num)),
        MemoryTerm(name=HOST_GRADIENTS, num_bytes=math.ceil(gradients)),
        MemoryTerm(name=HOST_STATES, num_bytes=math.ceil(states)),
        MemoryTerm(
            name=HOST_TEMPORARIES,
            num_bytes=temporaries if OPTIMIZERS[workload.optimizer].is_by_tensor else 0,
        ),
        MemoryTerm(name="weights around the layers, in RAM", num_bytes=math.ceil(copies)),
    )


# ---------------------------------------------------------------------------------------------
# What the key-value caches of a generation take in device memory.
#
# Softmax attention keeps a key and a value of each token, in the compute dtype. With a window it
# keeps what the window sees, after a prompt all of it until the next token. A delta rule keeps a
# state of fixed size, in fp32, and the last features of its convolution.

STAYING = (
    *(SLOTS, CUBLAS, CONTEXT, "decoded layer", "decode workspace"),
    *("embeddings, norm and head", "adapters", "trained modules"),
)
"""Terms of a step's peak that are there while a model generates too."""


def layer_cache_bytes(
    attention: Attention, *, num_tokens: int, num_new: int, dtype_bytes: int
) -> int | None:
    """Return what a layer keeps of one row after a pass.

    Args:
        attention: The layer's token mixing.
        num_tokens: Tokens of the row so far.
        num_new: Those of them that were computed in the newest pass.
        dtype_bytes: Of an element in the compute dtype.

    Returns:
        Bytes; None where they differ by model: of other recurrences, and of latent attention, of
        which some models keep the features before their projection and others keys and values.
    """
    if isinstance(attention, SoftmaxAttention) and not attention.is_latent:
        width = attention.num_kv_heads * (attention.qk_dim + attention.v_dim)
        if attention.window is not None:
            num_tokens = min(num_tokens, attention.window - 1 + num_new)
        return 0 if attention.reads_shared else num_tokens * width * dtype_bytes
    if isinstance(attention, DeltaAttention):
        state = attention.num_value_heads * attention.key_dim * attention.value_dim
        conv = attention.conv_features * attention.conv_tokens
        return state * FP32_BYTES + conv * dtype_bytes
    return None


def cache_bytes(
    facts: ModelFacts, *, prompt_tokens: int, new_tokens: int, dtype_bytes: int
) -> int | None:
    """Return the most that the caches of one row take: after its prompt, or at its end.

    Args:
        facts: The model.
        prompt_tokens: Of the row.
        new_tokens: That are generated after it.
        dtype_bytes: Of an element in the compute dtype.

    Returns:
        Bytes; None where a layer's are not known.
    """
    passes = (prompt_tokens, prompt_tokens), (prompt_tokens + new_tokens - 1, 1)
    totals = []
    for num_tokens, num_new in passes:
        layers = [
            layer_cache_bytes(
                layer.attention, num_tokens=num_tokens, num_new=num_new, dtype_bytes=dtype_bytes
            )
            for layer in facts.layers
        ]
        known = [num_bytes for num_bytes in layers if num_bytes is not None]
        if len(known) < len(layers):
            return None
        totals.append(sum(known))
    return max(totals)


def fitting_rows(
    facts: ModelFacts,
    terms: Iterable[MemoryTerm],
    *,
    limit_bytes: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype_bytes: int,
) -> int | None:
    """Return how many rows have room for their caches in device memory; None if that is not known.

    The arguments are those of `require_room`.
    """
    row_bytes = cache_bytes(
        facts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, dtype_bytes=dtype_bytes
    )
    return None if row_bytes is None else free_bytes(terms, limit_bytes) // row_bytes


def free_bytes(terms: Iterable[MemoryTerm], limit_bytes: int) -> int:
    """Return the device memory that is free where a model generates."""
    return max(0, limit_bytes - total_bytes(term for term in terms if term.name in STAYING))


def require_room(
    facts: ModelFacts,
    terms: Iterable[MemoryTerm],
    *,
    limit_bytes: int,
    num_rows: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype_bytes: int,
) -> None:
    """Check that the caches of some rows fit into device memory, where their size is known.

    Args:
        facts: The model.
        terms: Of the peak of a step in device memory.
        limit_bytes: Device memory that may be used.
        num_rows: Rows that are generated together.
        prompt_tokens: Of the longest of them.
        new_tokens: That are generated after it.
        dtype_bytes: Of an element in the compute dtype.

    Raises:
        DoesNotFitError: They do not.
    """
    row_bytes = cache_bytes(
        facts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, dtype_bytes=dtype_bytes
    )
    free = free_bytes(terms, limit_bytes)
    if row_bytes is None or num_rows * row_bytes <= free:
        return
    num_fitting = free // row_bytes
    raise DoesNotFitError(
        f"the key-value caches of {num_rows} rows of {prompt_tokens} tokens and {new_tokens} new"
        f" ones take {num_rows * row_bytes / GIB:.2f} GiB",
        limit=f"{free / GIB:.2f} GiB of device memory is free next to the slots",
        hint=f"at most {num_fitting} rows at a time"
        if num_fitting
        else "a smaller `--max-new-tokens`, a shorter prompt, or fewer `offload.num_slots`",
    )
