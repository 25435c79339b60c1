"""The predicted time of each part of a step, before anything is run.

Every operation of a layer is put on the roofline: matrix products at the rate of their size class,
everything else by the bytes that it reads and writes. A GPU computes while the host issues, so a
visit takes the longer of its work and what the host needs to issue it; on a CPU the two add up.
Passes and operators are counted in the code that runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from offload.plan.facts.facts import AdapterSpec, LayerFacts, ModelFacts, adapted_linears
from offload.plan.facts.linears import FP32_BYTES, Linear
from offload.plan.facts.optimizer import Shape
from offload.plan.facts.trainable import (
    EMBEDDING,
    NORMS,
    layer_module_sizes,
    module_parameters,
    outer_module_sizes,
    trained_tensor_shapes,
    trains_head,
    whole_linears,
)
from offload.plan.facts.workload import (
    Workload,
    head_bytes,
)
from offload.plan.machine.machine import (
    MEASURED,
    TALL_COLUMNS,
    ExpertsImplementation,
    Implementation,
    Machine,
    Rate,
)
from offload.plan.schedule.op import Route, Save
from offload.plan.schedule.schedule import NOTHING_SAVED, Passes, Residency, Saved
from offload.plan.time.adapters import branches, dora_norm, expert_branch, visit_norm, visit_scale
from offload.plan.time.attention import attention_backward, attention_work
from offload.plan.time.expert_passes import Launches, RowPasses
from offload.plan.time.optimizer import host_update_s, outer_update_s, rounding_work, update_work
from offload.plan.time.pointwise import NORM, NORM_WEIGHT, mlp_work, pointwise_work
from offload.plan.time.pricer import SUM_PASSES, Pricer
from offload.plan.time.roofline import Bound, VisitWork, Work, gemm

# ---------------------------------------------------------------------------------------------
# The predicted work of what comes after the layers: norm, head and loss, in chunks of tokens.
#
# Each chunk runs the model's own forward, whose mask code reads a number from the device: the host
# waits for the chunk before, and the device then for the host.

TAIL_OPS, TAIL_LOGIT_PASSES = 40, 9
# One operator reads the logits twice and writes their gradient, in place of TAIL_LOSS_OPS others.
FUSED_LOGIT_PASSES, TAIL_LOSS_OPS = 3, 8
# As of the tail, of what runs without a gradient.
SCORE_OPS, SCORE_LOGIT_PASSES, FUSED_SCORE_PASSES = 24, 4, 1


def _loss(at: Pricer, *, num_chunks: int, is_fused: bool) -> Work:
    """The passes over logits, and the operators of all chunks that are no product."""
    tokens, vocab = at.workload.label_tokens, at.facts.num_outputs
    if is_fused:
        num_bytes = FUSED_LOGIT_PASSES * at.workload.dtype_bytes * tokens * vocab
        num_ops = (TAIL_OPS - TAIL_LOSS_OPS) * num_chunks
        calls = Work(num_calls=num_chunks)
        return at.traffic(num_bytes, num_ops=num_ops, is_fused=True) + calls
    return at.new_memory(
        TAIL_LOGIT_PASSES * FP32_BYTES * tokens * vocab,
        num_ops=TAIL_OPS * num_chunks,
        tensor_bytes=FP32_BYTES * min(tokens, at.workload.head_chunk_tokens) * vocab,
    )


def tail_work(at: Pricer, *, is_fused: bool) -> Work:
    """Return the work of norm, head and loss, forward and backward."""
    tokens, hidden, vocab = at.workload.label_tokens, at.facts.hidden_size, at.facts.num_outputs
    num_chunks = math.ceil(tokens / at.workload.head_chunk_tokens)
    head = at.gemm(tokens, hidden, vocab) + at.gemm(tokens, vocab, hidden)
    norm_passes = NORM.forward + NORM.backward + NORM_WEIGHT.forward + NORM_WEIGHT.backward
    norm = at.traffic(norm_passes * FP32_BYTES * tokens * hidden, num_ops=0)
    tail = head + norm + _loss(at, num_chunks=num_chunks, is_fused=is_fused)
    trained = outer_module_sizes(at.facts, at.workload.adapter)
    if trains_head(at.facts, trained):
        sums = at.added_up(at.facts.num_outputs * hidden, num_tensors=1)
        tail = tail + at.gemm(hidden, tokens, vocab) + sums.times(num_chunks)
    return tail


def score_work(at: Pricer, *, is_fused: bool) -> Work:
    """Return the work of the tail's forward, and of the log-probabilities of the labels."""
    tokens, hidden, vocab = at.workload.label_tokens, at.facts.hidden_size, at.facts.num_outputs
    num_chunks = math.ceil(tokens / at.workload.head_chunk_tokens)
    norm_passes = NORM.forward + NORM_WEIGHT.forward
    norm = at.traffic(norm_passes * FP32_BYTES * tokens * hidden, num_ops=0)
    products = at.gemm(tokens, hidden, vocab) + norm
    if is_fused:
        num_bytes = FUSED_SCORE_PASSES * at.workload.dtype_bytes * tokens * vocab
        calls = Work(num_calls=num_chunks)
        return products + at.traffic(num_bytes, num_ops=SCORE_OPS * num_chunks) + calls
    return products + at.new_memory(
        SCORE_LOGIT_PASSES * FP32_BYTES * tokens * vocab,
        num_ops=SCORE_OPS * num_chunks,
        tensor_bytes=FP32_BYTES * min(tokens, at.workload.head_chunk_tokens) * vocab,
    )


LOSS_OPS = 40
"""Kernels of a product, a loss over all rows with its metrics, and their gradients."""


def head_step_s(
    facts: ModelFacts, machine: Machine, workload: Workload, *, num_features: int
) -> float:
    """Return the seconds of a forward and backward of a head, which computes in fp32.

    Features are gathered in their own type and widened. The product of the forward and that of the
    gradient by the weights are bound by the features that they read, as products of few columns.

    Args:
        facts: Of the model.
        machine: Where it runs.
        workload: Of a micro-batch, for the type of features.
        num_features: Of a step.
    """
    at, size = Pricer(machine=machine, facts=facts, workload=workload), facts.hidden_size
    num_bytes = num_features * size * (3 * workload.dtype_bytes + FP32_BYTES)
    flops = 2 * 2.0 * num_features * size * max(TALL_COLUMNS, facts.num_outputs)
    products = Work(compute_s=flops / machine.tall_fp32_flops_per_s.value, flops=flops)
    return (products + at.traffic(num_bytes, num_ops=LOSS_OPS)).seconds(machine)


# ---------------------------------------------------------------------------------------------
# The MLP that computes virtual tokens, or a prefix's keys and values, before each micro-batch.
#
# It is peft's and computes in fp32, over few tokens: its products are bound by its weights. With
# its gradients these are as large for any batch.

_BETWEEN = 2  # a function between two linear layers reads its inputs and writes its outputs
_BACK_BETWEEN = 3  # its backward reads a gradient and what it has kept


def encoder_forward(at: Pricer) -> Work:
    """Return the lookup of P tokens, and of each linear layer a product with its bias."""
    linears = _linears(at.workload.adapter)
    if not linears:
        return Work()
    num, width = at.workload.adapter.virtual[0]
    work = at.traffic(2 * num * width * FP32_BYTES, num_ops=1)
    for d_out, d_in in linears:
        work += _product(at, num, d_in, d_out)
    return work + _between(at, _BETWEEN)


def encoder_backward(at: Pricer) -> Work:
    """Return the products by inputs and by weights, and the sums of all gradients."""
    spec = at.workload.adapter
    linears = _linears(spec)
    if not linears:
        return Work()
    num, num_weights = spec.virtual[0][0], 0
    work = Work()
    for d_out, d_in in linears:
        work += _product(at, num, d_out, d_in) + _product(at, d_out, num, d_in)
        work += at.traffic(num * d_out * FP32_BYTES, num_ops=1)  # the bias
        num_weights += (d_in + 1) * d_out
    num_weights += num * spec.virtual[0][1]
    added = 3 * num_weights * FP32_BYTES  # the new one is read, the sum read and written
    return work + _between(at, _BACK_BETWEEN) + at.traffic(added, num_ops=len(spec.virtual))


def _linears(spec: AdapterSpec) -> tuple[Shape, ...]:
    """Return (d_out, d_in) of the linear layers after the embedding; none of a table alone."""
    return tuple(shape for shape in spec.virtual[1:] if len(shape) > 1)


def _product(at: Pricer, m: int, k: int, n: int) -> Work:
    """Price (m, k) @ (k, n) in fp32, one side of which is short."""
    rate = at.machine.tall_fp32_flops_per_s.value
    roof = gemm(at.machine, m=m, k=k, n=n, dtype_bytes=FP32_BYTES, flops_per_s=rate)
    is_compute = roof.compute_s >= roof.memory_s
    return Work(
        compute_s=roof.compute_s if is_compute else 0.0,
        memory_s=0.0 if is_compute else roof.memory_s,
        flops=2.0 * m * k * n,
        num_ops=1,
    )


def _between(at: Pricer, num_passes: int) -> Work:
    """Price what is between the linear layers."""
    spec = at.workload.adapter
    widths = [d_out for d_out, _ in _linears(spec)[:-1]]
    num_bytes = num_passes * spec.virtual[0][0] * sum(widths) * FP32_BYTES
    return at.traffic(num_bytes, num_ops=len(widths))


# ---------------------------------------------------------------------------------------------
# The time that an MLP computed in tiles of tokens takes in addition to one that is not.
#
# The arithmetic of a forward is the same. Each tile launches the operators again, and reads again
# what does not grow with its tokens, such as the casts of A and B: that is what a tile of no tokens
# would take. Outputs and gradients of tiles are copied into one tensor, and each tile's gradients
# of A and B are added up in fp32.
#
# The backward computes each tile again with its graph, except the down product. So where something
# reads the MLP's value, as a norm after it does, a recompute computes its other products twice; and
# a layer whose graph was kept computes them once more than otherwise.

_COPY_PASSES = 2


def tiling(at: Pricer, layer: LayerFacts) -> VisitWork:
    """Price what the tiles of a layer's MLP add.

    With a recompute, the MLP that a backward computes again is part of that.
    """
    mlp = at.workload.tiled(layer)
    if not mlp:
        return VisitWork()
    adapted = [x for x in adapted_linears(layer, at.workload.adapter) if x in mlp]
    empty = replace(at, workload=replace(at.workload, micro_batch_size=0, packed_tokens=None))
    more = at.workload.num_tiles - 1
    downs = [x for x in mlp if x.is_down]
    hidden_bytes = at.workload.num_tokens * at.facts.hidden_size * at.workload.dtype_bytes
    copied = at.traffic(_COPY_PASSES * hidden_bytes, num_ops=at.workload.num_tiles)
    added = sum(x.adapter_parameters(at.workload.adapter.rank_of(x)) for x in adapted)
    sums = at.traffic(SUM_PASSES * FP32_BYTES * added, num_ops=2 * len(adapted))
    whole, down = _mlp(at, mlp, adapted), _products(at, downs)
    launched, down_launched = _mlp(empty, mlp, adapted).times(more), _products(empty, downs)
    inside = launched + down_launched.times(-more)  # a tile's graph leaves the down product out
    backward = mlp_work(empty, mlp).backward + _products(empty, mlp)
    backward = backward + branches(empty, adapted, left_out=()).backward
    is_read = at.workload.reads_output(mlp)
    return VisitWork(
        forward=launched + copied,
        recompute=inside + (whole + copied if is_read else Work()),
        again=whole + down.times(-1) + inside,
        backward=backward.times(more) + sums.times(at.workload.num_tiles) + copied,
    )


def _mlp(at: Pricer, mlp: Sequence[Linear], adapted: Sequence[Linear]) -> Work:
    """Price an MLP's forward."""
    return (
        _products(at, mlp) + mlp_work(at, mlp).forward + branches(at, adapted, left_out=()).forward
    )


def _products(at: Pricer, linears: Sequence[Linear]) -> Work:
    return sum((at.matmul(linear) for linear in linears), start=Work())


Grade = Literal["spec", "probed", "calibrated"]

GRADIENT_PASSES = 4  # a new gradient is written and read, the sum so far read and written
FRONT_OPS = 60
OBJECTIVE_OPS = 20  # of a loss of pairs and its gradient
COPY_LATENCY_S = 2e-5
# Of a router besides its product: a softmax, the highest scores and their sum, and their gradients.
ROUTER_OPS, ROUTER_BACKWARD_OPS = 5, 9
PACKED_OPS = 2  # copies of an attention output and its log-sum-exp to the buffer they leave from
GRAPH_OPS = 30  # copies of a whole graph: 20 to 44 in layers of Llama, Qwen3, OLMo 2 and Gemma 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """One decoder layer, for one micro-batch."""

    forward_s: float  # forward without a graph
    backward_s: float  # recompute, and backward to the layer's input and its adapters
    recompute_s: float  # the part of `backward_s` that is saved if the layer is not checkpointed
    decode_s: float  # decoding: once per visit, whatever the number of micro-batches
    weight_bytes: int  # what one load moves
    bound: Bound  # what the forward spends most of its time on
    # What a recompute takes of a forward's time: it leaves out what is not read.
    recompute_frac: float = 1.0
    # What of `recompute_s` its attention's output saves; 0 without a fused kernel.
    attention_s: float = 0.0
    pack_s: float = 0.0  # copying that output to the buffer that it is sent from
    output_bytes: int = 0  # bytes of an attention's output and log-sum-exp
    graph_bytes: int = 0  # bytes of all that autograd saves of a visit; 0 if no graph is to be sent
    graph_pack_s: float = 0.0  # copying that to the buffer that it is sent from
    update_s: float = 0.0  # updating its weights, once per step; 0 if they are frozen
    reference_s: float = 0.0  # forward without adapters, as a reference computes it

    def forth_s(self, save: Save) -> float:
        """Return the seconds of a forward visit, with a copy of what is sent."""
        pack_s = self.graph_pack_s if save.what == "graph" else self.pack_s
        return self.forward_s + pack_s if save.is_sent else self.forward_s

    def back_s(self, save: Save) -> float:
        """Return the seconds of a backward visit, without what was saved."""
        if save.what == "graph":
            return self.backward_s - self.recompute_s
        return self.backward_s - self.attention_s if save.what == "output" else self.backward_s


class Speed(NamedTuple):
    """How fast copies are, while the device computes."""

    bytes_per_s: float = math.inf  # rate of the bytes
    latency_s: float = 0.0  # fixed time of each copy

    def seconds(self, num_bytes: float, *, num_copies: int = 1) -> float:
        """Return the time of so many bytes in so many copies, one after the other."""
        return num_copies * self.latency_s + num_bytes / self.bytes_per_s


AT_ONCE = Speed()


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """All durations that the simulation needs."""

    grade: Grade  # how the numbers were obtained
    layers: tuple[LayerCost, ...]  # the prices of the layers, in forward order
    front_s: float  # embeddings and masks of one micro-batch
    tail_s: float  # norm, head and loss of one micro-batch, forward and backward
    optimizer_s: float  # clipping and update, once per step
    # The speed of copies by their route; one that is left out takes no time. The network's is that
    # of adding up gradients over ranks.
    speeds: Mapping[Route, Speed]
    front_backward_s: float = 0.0  # gradient of the embeddings for one micro-batch, if they train
    # The part of the rates to the device that is left if copies leave it meanwhile.
    duplex_frac: float = 1.0
    # Norm, head and log-probabilities of one micro-batch; 0 without an objective.
    score_s: float = 0.0
    objective_s: float = 0.0  # its loss and the gradient by the log-probabilities, once per step
    # Seconds of the tail that log-probabilities of several tokens at each label add to a
    # cross-entropy.
    top_s: float = 0.0
    num_scored: float = 0.0  # micro-batches that are only scored, for each that is trained on
    # Micro-batches that a reference scores, for each that is trained on.
    num_references: float = 0.0
    head_bytes: int = 0  # bytes of an output head that is copied over slots; 0 if the device has it
    # The costs of each run of a shared step, of which the rest is then the mean; none for one run.
    runs: tuple["RunCosts", ...] = ()

    @property
    def bound(self) -> Bound:
        """What sets most of the time of all layers' forward."""
        times: dict[Bound, float] = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
        for layer in self.layers:
            times[layer.bound] += layer.forward_s
        return max(times, key=lambda bound: times[bound])

    @property
    def num_passes(self) -> float:
        """Micro-batches that a layer is visited with upwards, for each that is trained on."""
        return 1 + self.num_scored + self.num_references

    @property
    def fronts_s(self) -> float:
        """Time of the front of all passes of a micro-batch."""
        return self.num_passes * self.front_s

    @property
    def tails_s(self) -> float:
        """Time after the last layer of all passes of a micro-batch."""
        return self.tail_s + self.num_passes * self.score_s

    def scoring_s(self, layer: int) -> float:
        """Return the time of a micro-batch's share of a layer's passes that only score."""
        one = self.layers[layer]
        return self.num_scored * one.forward_s + self.num_references * one.reference_s

    def given(self, residency: Residency) -> "Costs":
        """Return the costs with this residency; what is sent slows the link's other direction."""
        return self.while_sending() if residency.sends else self

    def while_sending(self) -> "Costs":
        """Return the costs of a step that sends graphs or outputs of attention."""
        if self.duplex_frac == 1:
            return self
        slower = self.faster(self.duplex_frac, Route.LOAD, Route.FETCH)
        return replace(slower, duplex_frac=1.0)

    def speed(self, route: Route) -> Speed:
        """Return the speed of a route."""
        return self.speeds.get(route, AT_ONCE)

    def at(self, speeds: Mapping[Route, Speed]) -> "Costs":
        """Return the costs with other speeds of these routes."""
        return replace(self, speeds={**self.speeds, **speeds})

    def faster(self, factor: float, *routes: Route) -> "Costs":
        """Return the costs with the rates of these routes times a factor."""
        speeds = {route: self.speed(route) for route in routes}
        return self.at(
            {
                route: speed._replace(bytes_per_s=factor * speed.bytes_per_s)
                for route, speed in speeds.items()
            }
        )

    def without_objective(self) -> "Costs":
        """Return the costs of the same step with a cross-entropy, a loss that needs one pass."""
        return replace(
            self,
            tail_s=self.tail_s - self.top_s,
            top_s=0.0,
            score_s=0.0,
            objective_s=0.0,
            num_scored=0.0,
            num_references=0.0,
        )

    def saved(self, residency: Residency, *, num_micro_batches: int) -> Saved:
        """Return what checkpointed layers keep or send; runs have their own micro-batches."""
        return self.saver(num_micro_batches=num_micro_batches)(residency)

    def saver(self, *, num_micro_batches: int) -> Callable[[Residency], Saved]:
        """Return the same for any residency: a search asks for thousands."""
        outputs, graphs = (
            _by_run(self.runs, [_sizes(run.costs, name) for run in self.runs])
            if self.runs
            else _by_micro_batch(_sizes(self, name), num_micro_batches)
            for name in ("output_bytes", "graph_bytes")
        )

        def saved(residency: Residency) -> Saved:
            return residency.saved(outputs, graphs) if any(residency[1:]) else NOTHING_SAVED

        return saved

    def load_s(self, layer: int) -> float:
        """Seconds of one load of a layer."""
        return self.speed(Route.LOAD).seconds(self.layers[layer].weight_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """One run of a shared step: the costs of its ops, and its passes through each visit."""

    costs: Costs
    passes: Passes


def _sizes(costs: Costs, name: str) -> tuple[int, ...]:
    return tuple(getattr(layer, name) for layer in costs.layers)


def _by_run(
    runs: Sequence[RunCosts], sizes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return sizes by layer and micro-batch of a shared step; none where a run has nothing."""
    return tuple(
        tuple(
            size
            for run, size in zip(runs, of_runs, strict=True)
            for _ in range(run.passes.num_trained)
        )
        if all(of_runs)
        else ()
        for of_runs in zip(*sizes, strict=True)
    )


@lru_cache(maxsize=64)
def _by_micro_batch(sizes: tuple[int, ...], num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return sizes by layer and micro-batch; none for a layer that has nothing."""
    return tuple((size,) * num_micro_batches if size else () for size in sizes)


def _module_gradients(at: Pricer, layer: LayerFacts) -> Work:
    """Gradients of modules that are trained in full: a product each, accumulated in fp32."""
    spec, tokens = at.workload.adapter, at.workload.num_tokens
    if spec.whole is not None:
        return _whole_gradients(at, layer).times(spec.whole.frac_of(at.facts))
    products = [at.gemm(x.d_in, tokens, x.d_out) for x in whole_linears(layer, spec)]
    sizes = layer_module_sizes(layer, spec)
    normed = layer.normed_features if NORMS in spec.modules else 0
    sums = at.traffic(2 * normed * tokens * FP32_BYTES, num_ops=0)
    return sum((*products, sums, at.added_up(sum(sizes), num_tensors=len(sizes))), start=Work())


def _whole_gradients(at: Pricer, layer: LayerFacts) -> Work:
    """Gradients of all weights of a layer: each product's once more, and their sums."""
    products = [at.matmul(linear) for linear in layer.linears]
    sums = at.traffic(2 * layer.normed_features * at.workload.num_tokens * FP32_BYTES, num_ops=0)
    gradient_bytes = GRADIENT_PASSES * at.workload.dtype_bytes * layer.num_parameters
    num_tensors = len(layer.linears) + len(layer.norms)
    return sum((*products, sums, at.traffic(gradient_bytes, num_ops=num_tensors)), start=Work())


def _attention(at: Pricer, layer: LayerFacts) -> Work:
    """Token mixing."""
    load, kind = at.workload, layer.attention
    num, n, b, past = load.num_tokens, load.seq_len, load.dtype_bytes, load.adapter.num_past
    work = attention_work(kind, at.machine, num_tokens=num, seq_len=n, dtype_bytes=b, num_past=past)
    num_calls = load.num_attention_calls(kind, is_cuda=at.machine.device == "cuda")
    return replace(work, num_ops=work.num_ops * num_calls)


def routing_work(at: Pricer, layer: LayerFacts, left_out: Sequence[Linear] = ()) -> VisitWork:
    """Gathering of routed rows from tokens, their activation, and the sum back into tokens."""
    if not layer.num_experts:
        return VisitWork()
    way = at.way
    downs = [x for x in layer.linears if x.group == "experts" and x.is_down]
    width, hidden = sum(x.d_in for x in downs), at.facts.hidden_size
    rows = at.workload.num_tokens * layer.experts_per_token
    num_experts = min(layer.num_experts, rows)

    def counted(passes: RowPasses, launches: Launches, router_ops: int, sign: int = 1) -> Work:
        features = passes.features(
            width=width,
            hidden=hidden,
            rows_per_token=layer.experts_per_token,
            num_experts=num_experts,
        )
        return at.traffic(
            sign * rows * features * at.workload.dtype_bytes,
            num_ops=sign * launches.of(num_experts) + router_ops,
            is_fused=way.is_fused,
        )

    recompute = counted(way.recompute, way.forward_launches, ROUTER_OPS)
    if any(down in left_out for down in downs):
        recompute = recompute + counted(way.down, way.down_launches, 0, sign=-1)
    calls = Work(num_calls=way.num_calls)
    return VisitWork(
        forward=counted(way.forward, way.forward_launches, ROUTER_OPS) + calls,
        recompute=recompute + calls,
        backward=counted(way.backward, way.backward_launches, ROUTER_BACKWARD_OPS) + calls,
    )


def frozen_products(at: Pricer, layer: LayerFacts) -> Work:
    """Products of a forward."""
    return _products(at, layer.linears)


def recomputed_products(at: Pricer, layer: LayerFacts) -> Work:
    """Products of a recompute; for those left out also less the sum with the hidden state."""
    left_out = at.workload.left_out(layer)
    products = [at.matmul(linear) for linear in layer.linears if linear not in left_out]
    features = sum(3 * x.d_out for x in left_out)  # a sum reads two and writes one
    num_bytes = at.workload.num_tokens * features * at.workload.dtype_bytes
    return sum((*products, at.traffic(-num_bytes, num_ops=-len(left_out))), start=Work())


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerWork:
    """The operations of a layer, for one micro-batch."""

    visits: VisitWork  # operations of its visits
    first: Work  # operations of a forward without adapters
    given: Work  # operations of a recompute that is given the output of its attention


def layer_work(at: Pricer, layer: LayerFacts) -> _LayerWork:
    """Count what a layer computes and moves, and the operations that it launches."""
    adapted, left_out = adapted_linears(layer, at.workload.adapter), at.workload.left_out(layer)
    products, attention = frozen_products(at, layer), _attention(at, layer)
    norms = sum((dora_norm(at, linear) for linear in adapted), start=Work())
    added, tiles = branches(at, adapted, left_out=left_out), tiling(at, layer)
    others = pointwise_work(at, layer) + routing_work(at, layer, left_out)
    others += VisitWork(
        forward=products + norms,
        recompute=recomputed_products(at, layer) + norms,
        backward=products + _module_gradients(at, layer),
    )
    mixing = VisitWork(
        forward=attention,
        recompute=attention,
        backward=attention_backward(layer.attention, attention),
    )
    base = others + mixing + tiles
    return _LayerWork(
        visits=base + added, first=base.forward, given=others.recompute + added.recompute
    )


def _layer_cost(layer: LayerFacts, at: Pricer, graph_bytes: int) -> LayerCost:
    work, machine = layer_work(at, layer), at.machine
    visits, forward, recompute = work.visits, work.visits.forward, work.visits.recompute
    backward = visits.backward
    cargo_bytes = at.workload.cargo_bytes(layer)
    decoded_bytes = cargo_bytes + layer.num_parameters * at.workload.dtype_bytes
    decode = at.traffic(decoded_bytes, num_ops=len(layer.linears), is_fused=True)
    backward_s = (recompute + backward).seconds(machine)
    output_bytes = at.workload.output_bytes(layer, is_cuda=machine.device == "cuda")
    given_s = (work.given + backward).seconds(machine)
    return LayerCost(
        forward_s=forward.seconds(machine),
        backward_s=backward_s,
        recompute_s=backward_s - (backward + visits.again).seconds(machine),
        decode_s=decode.seconds(machine) if at.workload.is_encoded else 0.0,
        weight_bytes=cargo_bytes,
        reference_s=work.first.seconds(machine),
        bound=forward.bound(machine),
        recompute_frac=recompute.seconds(machine) / forward.seconds(machine),
        attention_s=max(0.0, backward_s - given_s) if output_bytes else 0.0,
        pack_s=at.traffic(2 * output_bytes, num_ops=PACKED_OPS).seconds(machine),
        output_bytes=output_bytes,
        graph_bytes=graph_bytes,
        graph_pack_s=at.traffic(2 * graph_bytes, num_ops=GRAPH_OPS).seconds(machine),
    )


def with_objective(
    costs: Costs,
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_scored: float,
    num_references: float,
    has_top: bool = False,
) -> Costs:
    """Return the costs of a step whose loss is taken over all its rows.

    Args:
        costs: Of a step without an objective.
        facts: The model.
        machine: Its rates.
        workload: One micro-batch.
        num_scored: Micro-batches that are only scored, for each that is trained on.
        num_references: Micro-batches that a reference scores, for each that is trained on.
        has_top: Whether log-probabilities of several tokens are taken at each label, which no fused
            operator does.
    """
    at = Pricer(machine=machine, facts=facts, workload=workload)
    is_fused = workload.fuses_loss(machine.device) and not has_top
    tail_s = tail_work(at, is_fused=is_fused).awaited_s(machine)
    return replace(
        costs,
        tail_s=tail_s,
        top_s=tail_s - costs.tail_s,
        score_s=score_work(at, is_fused=is_fused).awaited_s(machine),
        objective_s=at.traffic(0, num_ops=OBJECTIVE_OPS).seconds(machine),
        num_scored=num_scored,
        num_references=num_references,
    )


def _optimizer(at: Pricer) -> Work:
    spec, shapes = at.workload.adapter, trained_tensor_shapes(at.facts, at.workload.adapter)
    if spec.whole is not None:
        return Work(
            memory_s=outer_update_s(
                at.machine,
                spec.whole,
                dtype_bytes=at.workload.dtype_bytes,
                optimizer=at.workload.optimizer,
            )
        )
    update = update_work(at.machine, shapes, at.workload.optimizer)
    update += rounding_work(at.machine, at.facts, spec)
    b, modules = at.workload.dtype_bytes, 0 if spec.num_past else module_parameters(at.facts, spec)
    copied = 0 if b == FP32_BYTES else modules * (FP32_BYTES + b)
    return update + at.traffic(copied, num_ops=0)  # compute copies are cast from fp32


def price(
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    is_duplex: bool = False,
    num_disk_readers: int = 0,
    graph_bytes: Mapping[LayerFacts, int] = MappingProxyType({}),
) -> Costs:
    """Price one micro-batch of this model on this machine.

    On a CPU copies have their rate during compute. The grade is "probed" if all rates were
    measured. Layers on a disk whose rate is unknown are priced as if in memory.

    Args:
        facts: The model.
        machine: Its rates.
        workload: One micro-batch.
        is_duplex: Whether the link is busy in both directions at once.
        num_disk_readers: Processes that read the layers from disk at once; 0 if they are in memory.
        graph_bytes: What autograd saves of each kind of layer, if its graph may be sent.
    """
    at = Pricer(machine=machine, facts=facts, workload=workload)
    shapes = {x: _layer_cost(x, at, graph_bytes.get(x, 0)) for x in set(facts.layers)}
    front_ops = FRONT_OPS * workload.num_rows  # it runs on each packed row alone
    embedded_bytes = 2 * workload.num_tokens * facts.hidden_size * workload.dtype_bytes
    is_cuda = machine.device == "cuda"
    h2d = machine.h2d_duplex_bytes_per_s if is_duplex or not is_cuda else machine.h2d_bytes_per_s
    d2h = machine.d2h_bytes_per_s if is_cuda else machine.h2d_duplex_bytes_per_s
    load_bytes_per_s = h2d.value
    read_bytes_per_s = in_memory = machine.host_memory_bytes_per_s.value / 2  # each in and out
    disk, is_measured = machine.disk_bytes_per_s, machine.is_measured
    if num_disk_readers:
        is_measured = is_measured and disk is not None and disk.source == MEASURED
    if num_disk_readers and disk is not None:
        read_bytes_per_s = disk.value / num_disk_readers
        load_bytes_per_s = load_bytes_per_s if is_cuda else read_bytes_per_s
    trained = outer_module_sizes(facts, workload.adapter)
    # the gradient of a trained embedding is as large as the embedding for any batch
    embedding = at.added_up(trained.get(EMBEDDING, 0), num_tensors=1) if trained else Work()
    return Costs(
        grade="probed" if is_measured else "spec",
        layers=tuple(shapes[layer] for layer in facts.layers),
        front_s=(
            at.traffic(embedded_bytes, num_ops=front_ops)
            + encoder_forward(at).times(workload.num_rows)
        ).seconds(machine),
        front_backward_s=(embedding + encoder_backward(at).times(workload.num_rows)).seconds(
            machine
        ),
        tail_s=tail_work(at, is_fused=workload.fuses_loss(machine.device)).awaited_s(machine),
        optimizer_s=_optimizer(at).seconds(machine),
        speeds={
            Route.LOOK_UP: Speed(in_memory),
            Route.READ: Speed(read_bytes_per_s),
            Route.LOAD: Speed(load_bytes_per_s, COPY_LATENCY_S),
            Route.FETCH: Speed(h2d.value, COPY_LATENCY_S),
            Route.LEAVE: Speed(d2h.value, COPY_LATENCY_S),
        },
        duplex_frac=machine.h2d_duplex_bytes_per_s.value / h2d.value,
        head_bytes=head_bytes(facts, workload),
    )


def with_updates(costs: Costs, machine: Machine, workload: Workload) -> Costs:
    """Return the costs of a step with the updates of weights of its layers, if any train."""
    whole = workload.adapter.whole
    if whole is None:
        return costs
    layers = (
        replace(
            cost,
            update_s=host_update_s(
                machine,
                number,
                dtype_bytes=workload.dtype_bytes,
                optimizer=workload.optimizer,
                low_bytes=whole.low_bytes,
            ),
        )
        for cost, number in zip(costs.layers, whole.layers, strict=True)
    )
    return replace(costs, layers=tuple(layers))


# ---------------------------------------------------------------------------------------------
# The costs of a step that several runs share.
#
# Each visit of a micro-batch takes what it takes in its run alone: its own adapter, length and
# loss. Loads and decoding are those of one run. The simulation prices each op by its run. The bound
# R3, by which a search orders what it simulates, adds up all micro-batches of a visit, so it needs
# their mean alone; where inputs or graphs leave the device it is that of as many equal
# micro-batches.


def shared_costs(runs: Sequence[RunCosts]) -> Costs:
    """Return the costs of a step of several runs on one machine.

    Times of a micro-batch are the mean over all that are trained on, those of a step are sums.
    """
    first, numbers = runs[0].costs, [run.passes.num_trained for run in runs]
    total = sum(numbers)

    def mean(values: Iterable[float]) -> float:
        return sum(n * value for n, value in zip(numbers, values, strict=True)) / total

    # Passes that only score are all counted as one of a reference for each micro-batch.
    has_scores = any(run.costs.num_passes > 1 for run in runs)
    num_passes = 1 + has_scores
    of_runs = [run.costs for run in runs]
    of_layers = list(zip(*(costs.layers for costs in of_runs), strict=True))
    means = {
        layers: _mean_layer(layers, numbers, runs=of_runs, has_scores=has_scores)
        for layers in set(of_layers)
    }
    return replace(
        first,
        layers=tuple(means[layers] for layers in of_layers),
        front_s=mean(costs.fronts_s for costs in of_runs) / num_passes,
        front_backward_s=mean(costs.front_backward_s for costs in of_runs),
        tail_s=mean(costs.tail_s for costs in of_runs),
        score_s=mean(costs.num_passes * costs.score_s for costs in of_runs) / num_passes,
        objective_s=sum(run.costs.objective_s for run in runs),
        optimizer_s=sum(run.costs.optimizer_s for run in runs),
        num_scored=0.0,
        num_references=float(has_scores),
        runs=tuple(runs),
    )


def _mean_layer(
    layers: Sequence[LayerCost], numbers: Sequence[int], *, runs: Sequence[Costs], has_scores: bool
) -> LayerCost:
    """Return the mean of a layer's visits; what only scores is counted as a reference's."""
    total, first = sum(numbers), layers[0]

    def mean(value_of: Callable[[LayerCost], float]) -> float:
        values = map(value_of, layers)
        return sum(n * value for n, value in zip(numbers, values, strict=True)) / total

    scoring_s = sum(
        n * (run.num_scored * layer.forward_s + run.num_references * layer.reference_s)
        for n, run, layer in zip(numbers, runs, layers, strict=True)
    )
    return replace(
        first,
        forward_s=mean(lambda layer: layer.forward_s),
        backward_s=mean(lambda layer: layer.backward_s),
        recompute_s=mean(lambda layer: layer.recompute_s),
        recompute_frac=mean(lambda layer: layer.recompute_frac),
        attention_s=mean(lambda layer: layer.attention_s),
        pack_s=mean(lambda layer: layer.pack_s),
        graph_pack_s=mean(lambda layer: layer.graph_pack_s),
        output_bytes=int(mean(lambda layer: layer.output_bytes)),
        graph_bytes=int(mean(lambda layer: layer.graph_bytes)),
        reference_s=scoring_s / total if has_scores else mean(lambda layer: layer.reference_s),
    )


def with_norms(
    costs: Costs,
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    *,
    num_micro_batches: int,
) -> Costs:
    """Return the costs of a micro-batch with its share of the norms and the scales of DoRA.

    The first micro-batch of a layer's visit computes scales; upwards it computes the norms as well.
    A graph that is kept has both.
    """
    adapter = workload.adapter
    if not (adapter.is_dora and adapter.are_branches_grouped):
        return costs
    at = Pricer(machine=machine, facts=facts, workload=workload)
    num, kinds = max(1, num_micro_batches), set(facts.layers)

    def seconds(layer: LayerFacts, work: Callable[[Pricer, Linear], Work]) -> float:
        adapted = adapted_linears(layer, adapter)
        total = sum((work(at, linear) for linear in adapted), start=Work())
        return total.seconds(machine) / num

    norms_s = {layer: seconds(layer, visit_norm) for layer in kinds}
    scales_s = {layer: seconds(layer, visit_scale) for layer in kinds}
    layers = (
        replace(
            cost,
            forward_s=cost.forward_s + norms_s[layer] + scales_s[layer],
            backward_s=cost.backward_s + scales_s[layer],
            recompute_s=cost.recompute_s + scales_s[layer],
        )
        for cost, layer in zip(costs.layers, facts.layers, strict=True)
    )
    return replace(costs, layers=tuple(layers))


def with_measured_experts(
    machine: Machine,
    facts: ModelFacts,
    workload: Workload,
    *,
    implementation: ExpertsImplementation,
    seconds: float,
) -> Machine:
    """Return the machine with the rate that makes the price of a layer's experts the measured time.

    Work outside the products (gathering and adding up rows, activations) is priced separately and
    is subtracted first, otherwise it would count twice. The rate is at most that of large products.

    Args:
        machine: With assumed expert kernels and rate.
        facts: A model with experts.
        workload: One micro-batch.
        implementation: The expert kernels that were measured.
        seconds: Forward and backward of one layer's experts on that micro-batch.
    """
    machine = replace(
        machine, experts_implementation=Implementation(value=implementation, source="measured")
    )
    at = Pricer(machine=machine, facts=facts, workload=workload)
    layer = next(layer for layer in facts.layers if layer.num_experts)
    experts = [linear for linear in layer.linears if linear.group == "experts"]
    adapted = [x for x in adapted_linears(layer, workload.adapter) if x.group == "experts"]
    routing = routing_work(at, layer)
    others = [routing.recompute, routing.backward]  # the measured forward has a graph
    for branch in (expert_branch(at, linear) for linear in adapted):
        others += [branch.recompute, branch.backward]
    rows = workload.num_tokens * layer.experts_per_token
    tiled_frac = at.tiled(rows, layer.num_experts) / rows
    flops = 2 * tiled_frac * sum(at.experts(linear).flops for linear in experts)
    flops += sum(work.flops for work in others)
    other_s = sum(work.memory_s for work in others)
    products_s = max(seconds - other_s, flops / machine.gemm_flops_per_s.value)
    rate = Rate(value=flops / products_s, source="measured")
    return replace(machine, expert_gemm_flops_per_s=rate)
