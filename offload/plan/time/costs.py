"""The predicted time of each part of a step, before anything is run.

Every operation of a layer is put on the roofline: matrix products at the rate of their size class,
everything else by the bytes that it reads and writes. A GPU computes while the host issues, so a
visit takes the longer of its work and what the host needs to issue it; on a CPU the two add up.
Passes and operators are counted in the code that runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from offload.plan.facts.facts import LayerFacts, ModelFacts, adapted_linears
from offload.plan.facts.head import (
    head_bytes,
)
from offload.plan.facts.linears import FP32_BYTES, Linear
from offload.plan.facts.trainable import (
    EMBEDDING,
    NORMS,
    layer_module_sizes,
    module_parameters,
    outer_module_sizes,
    trained_tensor_shapes,
    whole_linears,
)
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import MEASURED, Machine
from offload.plan.schedule.passes import Passes
from offload.plan.schedule.residency import NOTHING_SAVED, Residency, Saved
from offload.plan.time.adapters import branches, dora_norm
from offload.plan.time.attention import attention_backward, attention_work
from offload.plan.time.encoder import encoder_backward, encoder_forward
from offload.plan.time.expert_passes import Launches, RowPasses
from offload.plan.time.optimizer import outer_update_s, rounding_work, update_work
from offload.plan.time.pointwise import pointwise_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.tail import has_fused_loss, score_work, tail_work
from offload.plan.time.tiles import tiling
from offload.plan.time.work import Bound, Work

Grade = Literal["spec", "probed", "calibrated"]

GRADIENT_PASSES = 4  # a new gradient is written and read, the sum so far read and written
FRONT_OPS = 60
OBJECTIVE_OPS = 20  # of a loss of pairs and its gradient
H2D_LATENCY_S = 2e-5
# Of a router besides its product: a softmax, the highest scores and their sum, and their gradients.
ROUTER_OPS, ROUTER_BACKWARD_OPS = 5, 9
PACKED_OPS = 2  # copies of an attention output and its log-sum-exp to the buffer they leave from
GRAPH_OPS = 30  # copies of a whole graph: 20 to 44 in layers of Llama, Qwen3, OLMo 2 and Gemma 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """One decoder layer, for one micro-batch.

    Attributes:
        forward_s: Forward without a graph.
        backward_s: Recompute, and backward to the layer's input and its adapters.
        recompute_s: The part of `backward_s` that is saved if the layer is not checkpointed.
        recompute_frac: What a recompute takes of a forward's time: it leaves out what is not read.
        attention_s: What of `recompute_s` its attention's output saves; 0 without a fused kernel.
        pack_s: Copying that output to the buffer that it is sent from.
        output_bytes: Of that output and its log-sum-exp.
        graph_bytes: Of all that autograd saves of a visit; 0 if no graph is to be sent.
        graph_pack_s: Copying that to the buffer that it is sent from.
        reference_s: Forward without adapters, as a reference computes it.
        update_s: Updating its weights, once per step; 0 if they are frozen.
        decode_s: Decoding: once per visit, whatever the number of micro-batches.
        weight_bytes: What one load moves.
        forward_flops: Of the forward.
        backward_flops: Of recompute and backward.
        bound: What the forward spends most of its time on.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    decode_s: float
    weight_bytes: int
    forward_flops: float
    backward_flops: float
    bound: Bound
    recompute_frac: float = 1.0
    attention_s: float = 0.0
    pack_s: float = 0.0
    output_bytes: int = 0
    graph_bytes: int = 0
    graph_pack_s: float = 0.0
    update_s: float = 0.0
    reference_s: float = 0.0

    def forth_s(self, *, is_sent: bool, has_graph: bool = False) -> float:
        """Return the seconds of a forward visit, with a copy of what is sent."""
        pack_s = self.graph_pack_s if has_graph else self.pack_s
        return self.forward_s + pack_s if is_sent else self.forward_s

    def back_s(self, *, has_graph: bool, has_output: bool = False) -> float:
        """Return the seconds of a backward visit, without the parts that were kept or sent."""
        if has_graph:
            return self.backward_s - self.recompute_s
        return self.backward_s - self.attention_s if has_output else self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """All durations that the simulation needs.

    Attributes:
        grade: How the numbers were obtained.
        layers: In forward order.
        front_s: Embeddings and masks of one micro-batch.
        front_backward_s: Gradient of the embeddings for one micro-batch, if they train.
        tail_s: Norm, head and loss of one micro-batch, forward and backward.
        optimizer_s: Clipping and update, once per step.
        h2d_bytes_per_s: Rate of a load while the device computes; a CPU's from disk is a read.
        h2d_latency_s: Fixed time of a load.
        d2h_bytes_per_s: Rate of a copy to the host while the device computes.
        fetch_bytes_per_s: Rate of the copy back.
        read_bytes_per_s: Rate at which staging buffers are filled, from memory or from a file.
        head_bytes: Of an output head that is copied over slots; 0 if the device has it.
        look_up_bytes_per_s: Rate at which rows of the embedding are gathered in host memory.
        duplex_frac: Of the rates to the device, what is left if copies leave it meanwhile.
        top_s: Of it, what log-probabilities of several tokens at each label add to a cross-entropy.
        score_s: Norm, head and log-probabilities of one micro-batch; 0 without an objective.
        objective_s: Its loss and the gradient by the log-probabilities, once per step.
        num_scored: Micro-batches that are only scored, for each that is trained on.
        num_references: Micro-batches that a reference scores, for each that is trained on.
        network_latency_s: Fixed time of adding up gradients over ranks.
        network_bytes_per_s: Rate at which each rank sends meanwhile.
        runs: Of each run of a shared step, of which the rest is then the mean; none for one run.
    """

    grade: Grade
    layers: tuple[LayerCost, ...]
    front_s: float
    tail_s: float
    optimizer_s: float
    h2d_bytes_per_s: float
    h2d_latency_s: float
    d2h_bytes_per_s: float
    fetch_bytes_per_s: float
    read_bytes_per_s: float
    front_backward_s: float = 0.0
    duplex_frac: float = 1.0
    score_s: float = 0.0
    objective_s: float = 0.0
    top_s: float = 0.0
    num_scored: float = 0.0
    num_references: float = 0.0
    network_latency_s: float = 0.0
    network_bytes_per_s: float = math.inf
    look_up_bytes_per_s: float = math.inf
    head_bytes: int = 0
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
        return replace(
            self,
            h2d_bytes_per_s=self.h2d_bytes_per_s * self.duplex_frac,
            fetch_bytes_per_s=self.fetch_bytes_per_s * self.duplex_frac,
            duplex_frac=1.0,
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
        if self.runs:
            outputs = _by_run(self.runs, [_output_bytes(run.costs) for run in self.runs])
            graphs = _by_run(self.runs, [_graph_bytes(run.costs) for run in self.runs])
        else:
            outputs = _by_micro_batch(_output_bytes(self), num_micro_batches)
            graphs = _by_micro_batch(_graph_bytes(self), num_micro_batches)

        def saved(residency: Residency) -> Saved:
            is_any = residency.has_outputs or residency.sends
            return residency.saved(outputs, graphs) if is_any else NOTHING_SAVED

        return saved

    def load_s(self, layer: int) -> float:
        """Seconds of one load of a layer."""
        return self.h2d_latency_s + self.layers[layer].weight_bytes / self.h2d_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """One run of a shared step: the costs of its ops, and its passes through each visit."""

    costs: Costs
    passes: Passes


def _output_bytes(costs: Costs) -> tuple[int, ...]:
    return tuple(one.output_bytes for one in costs.layers)


def _graph_bytes(costs: Costs) -> tuple[int, ...]:
    return tuple(one.graph_bytes for one in costs.layers)


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
    return _sum([*products, sums, at.added_up(sum(sizes), num_tensors=len(sizes))])


def _whole_gradients(at: Pricer, layer: LayerFacts) -> Work:
    """Gradients of all weights of a layer: each product's once more, and their sums."""
    products = [at.matmul(linear) for linear in layer.linears]
    sums = at.traffic(2 * layer.normed_features * at.workload.num_tokens * FP32_BYTES, num_ops=0)
    gradient_bytes = GRADIENT_PASSES * at.workload.dtype_bytes * layer.num_parameters
    num_tensors = len(layer.linears) + len(layer.norms)
    return _sum([*products, sums, at.traffic(gradient_bytes, num_ops=num_tensors)])


def _attention(at: Pricer, layer: LayerFacts) -> Work:
    """Token mixing."""
    load, kind = at.workload, layer.attention
    num, n, b, past = load.num_tokens, load.seq_len, load.dtype_bytes, load.adapter.num_past
    work = attention_work(kind, at.machine, num_tokens=num, seq_len=n, dtype_bytes=b, num_past=past)
    num_calls = load.num_attention_calls(kind, is_cuda=at.machine.device == "cuda")
    return replace(work, num_ops=work.num_ops * num_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingWork:
    """Passes over routed rows: of a forward, of a recompute, and of the backward after it."""

    forward: Work
    recompute: Work
    backward: Work


def routing_work(at: Pricer, layer: LayerFacts, left_out: Sequence[Linear] = ()) -> RoutingWork:
    """Gathering of routed rows from tokens, their activation, and the sum back into tokens."""
    if not layer.num_experts:
        return RoutingWork(forward=Work(), recompute=Work(), backward=Work())
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
    return RoutingWork(
        forward=counted(way.forward, way.forward_launches, ROUTER_OPS) + calls,
        recompute=recompute + calls,
        backward=counted(way.backward, way.backward_launches, ROUTER_BACKWARD_OPS) + calls,
    )


def _sum(works: list[Work]) -> Work:
    return sum(works, start=Work())


def recomputed_products(layer: LayerFacts, at: Pricer) -> Work:
    """Products of a recompute; for those left out also less the sum with the hidden state."""
    left_out = at.workload.left_out(layer)
    products = [at.matmul(linear) for linear in layer.linears if linear not in left_out]
    features = sum(3 * x.d_out for x in left_out)  # a sum reads two and writes one
    num_bytes = at.workload.num_tokens * features * at.workload.dtype_bytes
    return _sum([*products, at.traffic(-num_bytes, num_ops=-len(left_out))])


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerWork:
    """The operations of a layer, for one micro-batch.

    Attributes:
        first: A forward without adapters.
        forward: A forward without a graph.
        recompute: A forward with one.
        given: A recompute that is given the output of its attention.
        backward: The backward after it.
        again: What a backward computes again for tiles of an MLP.
    """

    first: Work
    forward: Work
    recompute: Work
    given: Work
    backward: Work
    again: Work


def layer_work(at: Pricer, layer: LayerFacts) -> _LayerWork:
    """Count what a layer computes and moves, and the operations that it launches."""
    adapted, left_out = adapted_linears(layer, at.workload.adapter), at.workload.left_out(layer)
    products = _sum([at.matmul(linear) for linear in layer.linears])
    attention = _attention(at, layer)
    pointwise, routing = pointwise_work(at, layer), routing_work(at, layer, left_out)
    added = branches(at, adapted, left_out=left_out)
    norms = _sum([dora_norm(at, linear) for linear in adapted])
    others, tiles = attention + pointwise.forward + norms, tiling(at, layer)
    first = products + others + routing.forward + tiles.forward
    recompute = recomputed_products(layer, at) + others + routing.recompute
    backward = products + attention_backward(layer.attention, attention)
    backward += _module_gradients(at, layer)
    given = recomputed_products(layer, at) + pointwise.forward + routing.recompute + norms
    return _LayerWork(
        first=first,
        forward=first + added.forward,
        recompute=recompute + added.recompute + tiles.recompute,
        given=given + added.recompute,
        backward=backward + pointwise.backward + routing.backward + added.backward + tiles.backward,
        again=tiles.again,
    )


def _layer_cost(layer: LayerFacts, at: Pricer, graph_bytes: int) -> LayerCost:
    work, machine = layer_work(at, layer), at.machine
    forward, recompute, backward = work.forward, work.recompute, work.backward
    cargo_bytes = at.workload.cargo_bytes(layer)
    decoded_bytes = cargo_bytes + layer.num_parameters * at.workload.dtype_bytes
    decode = at.traffic(decoded_bytes, num_ops=len(layer.linears), is_fused=True)
    backward_s = (recompute + backward).seconds(machine)
    output_bytes = at.workload.output_bytes(layer, is_cuda=machine.device == "cuda")
    given_s = (work.given + backward).seconds(machine)
    return LayerCost(
        forward_s=forward.seconds(machine),
        backward_s=backward_s,
        recompute_s=backward_s - (backward + work.again).seconds(machine),
        decode_s=decode.seconds(machine) if at.workload.is_encoded else 0.0,
        weight_bytes=cargo_bytes,
        reference_s=work.first.seconds(machine),
        forward_flops=forward.flops,
        backward_flops=recompute.flops + backward.flops,
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
    is_fused = has_fused_loss(at) and not has_top
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


def _front_backward(at: Pricer) -> Work:
    """The gradient of a trained embedding, which is as large as the embedding for any batch."""
    trained = outer_module_sizes(at.facts, at.workload.adapter)
    return at.added_up(trained.get(EMBEDDING, 0), num_tensors=1) if trained else Work()


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
    return Costs(
        grade="probed" if is_measured else "spec",
        layers=tuple(shapes[layer] for layer in facts.layers),
        front_s=(
            at.traffic(embedded_bytes, num_ops=front_ops)
            + encoder_forward(at).times(workload.num_rows)
        ).seconds(machine),
        front_backward_s=(
            _front_backward(at) + encoder_backward(at).times(workload.num_rows)
        ).seconds(machine),
        tail_s=tail_work(at, is_fused=has_fused_loss(at)).awaited_s(machine),
        optimizer_s=_optimizer(at).seconds(machine),
        h2d_bytes_per_s=load_bytes_per_s,
        h2d_latency_s=H2D_LATENCY_S,
        d2h_bytes_per_s=d2h.value,
        fetch_bytes_per_s=h2d.value,
        read_bytes_per_s=read_bytes_per_s,
        duplex_frac=machine.h2d_duplex_bytes_per_s.value / h2d.value,
        look_up_bytes_per_s=in_memory,
        head_bytes=head_bytes(facts, workload),
    )
