"""Runs a schedule: each op of the plan on its lane, after the ops it waits for. Decides nothing.

Each visit is an activation checkpoint. A forward visit keeps a layer's input and no graph. A
backward visit rebuilds the layer's graph from that input and consumes it at once, while the weights
are still in their slot. Where the plan says so, a forward visit keeps its graph instead. The
graph's saved tensors alias the slot, they are no copy. So other layers may use the slot in between,
but the layer's own weights must be back for its backward visit. Autograd cannot detect that a slot
was overwritten: the schedule's waits guarantee that the right weights are there, as for any visit.

Note [Letting go]: device memory that a transfer reads is released only by a compute op that waits
for that transfer. The allocator may then reuse the memory for whatever is computed next, and no
`record_stream` is needed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offload.engine.attention_outputs import (
    NOTHING,
    OutputSize,
    Recorded,
    Recorder,
)
from offload.engine.batch import Batch, LabelledBatch
from offload.engine.host.source import LayerSource
from offload.engine.host_gradients import HostGradients, LateUpdates
from offload.engine.low_rank import VISIT_CACHE
from offload.engine.model.inspection import Inspection
from offload.engine.model.layers import Front, LayeredModel
from offload.engine.model.recorded_args import Call
from offload.engine.model.visit import Graph, attempt, visit_with_graph
from offload.engine.randomness import FRONT_LAYER, VisitRandomness, require_same_draws
from offload.engine.seeding import NEWEST, Seeding
from offload.engine.slots import Slots
from offload.engine.stash import Stash
from offload.engine.streams import Device, Event, copy_on_host
from offload.engine.tiled import TiledMlp, tiled
from offload.engine.unread import Unread
from offload.errors import UnsupportedModelError
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import NUM_KEPT, Schedule
from offload.plan.schedule.timeline import Span, Timeline


@dataclass(kw_only=True)
class PassState:
    """What the ops of one pass exchange; lists are indexed by micro-batch.

    Attributes:
        fronts: What the model passes to its layers.
        inputs: Layer inputs (B, T, D) on the device, by layer and micro-batch; the entry of
            layer L is the input of the tail.
        fetched: Inputs that came back from the stash.
        graphs: Graphs that forward visits kept for backward visits, by layer and micro-batch.
        attention: What forward visits recorded of it, by layer and micro-batch; of a sent one the
            tensors are in a buffer that others use in between.
        draws: The generator states after forward visits; see `VisitRandomness.visit`.
        gradient: Gradient of the loss by the current hidden state in the backward; None below a
            layer that passes none on, as in plain autograd.
        losses: Sum over labelled tokens / num_label_tokens, one scalar tensor per chunk; and the
            router loss of each micro-batch.
        routing: Router logits of the forward, then the loss's gradient by them; by micro-batch
            and layer.
        outputs: Outputs of a pass without labels.
    """

    fronts: dict[int, Front] = field(default_factory=dict)
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    fetched: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    attention: dict[tuple[int, int], Recorded] = field(default_factory=dict)
    draws: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    gradient: dict[int, torch.Tensor | None] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    routing: dict[int, dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


_Table = dict[Kind, Callable[[Op], None]]
"""The function that runs each kind of op in a pass."""


class Executor:
    """Runs a model's ops, with its weights and slots, on a device's lanes."""

    def __init__(  # noqa: PLR0913 - everything that runs a pass
        self,
        *,
        model: LayeredModel,
        source: LayerSource,
        slots: Slots,
        stash: Stash,
        sent: Stash,
        host_gradients: HostGradients,
        updates: LateUpdates,
        device: Device,
        head_chunk_tokens: int,
        leaves_out: bool,
        records_attention: bool,
        mlp_chunk_tokens: int | None,
    ) -> None:
        """Keep the parts; nothing is moved."""
        self._model = model
        self._source = source
        self._slots = slots
        self._stash, self._sent = stash, sent
        self._host_gradients = host_gradients
        self._updates = updates
        self._device = device
        self._head_chunk_tokens = head_chunk_tokens
        self._randomness = VisitRandomness(device.torch_device)
        self._last_layer = len(model.layers) - 1
        self._leaves_out, self._records_attention = leaves_out, records_attention
        self._mlp_chunk_tokens = mlp_chunk_tokens
        self._mlps: dict[bool, dict[int, tuple[TiledMlp, ...]]] = {}
        self._unread: dict[bool, dict[int, tuple[Unread, ...]]] = {}
        self._attention: dict[bool, dict[int, tuple[OutputSize, ...]]] = {}

    def train(
        self,
        schedule: Schedule,
        batches: Sequence[LabelledBatch],
        *,
        num_label_tokens: int,
        seed: int,
        seeding: Seeding,
        is_stashed: bool,
        ids: Sequence[int],
    ) -> tuple[PassState, list[Event]]:
        """Run a training schedule; gradients are added to `.grad` of the trainable parameters.

        Args:
            schedule: From `training_schedule`, for this many micro-batches and this ring.
            batches: The micro-batches.
            num_label_tokens: Divisor of the sum of the losses.
            seed: Dropout is seeded by (seed, layer, id), so that the recompute repeats it.
            seeding: How these become a generator's seed.
            is_stashed: Whether layer inputs wait on the host, except those of kept graphs.
            ids: Number of each micro-batch in the whole step.
        """
        # Filled on the device: `torch.tensor` would copy the number and wait for the device.
        num_items = torch.full((), num_label_tokens, device=self._device.torch_device)
        state, inputs = PassState(), [batch.inputs for batch in batches]
        step = _Step(seed=seed, seeding=seeding, ids=ids, is_kept=True, is_stashed=is_stashed)

        visits: _Table = {
            Kind.FRONT: lambda op: self._front(state, op, inputs, step),
            Kind.FORWARD: lambda op: self._forward(state, op, step),
            Kind.TAIL: lambda op: self._tail(state, op, batches, num_items, num_label_tokens),
            Kind.BACKWARD: lambda op: self._backward(state, op, step),
            Kind.FRONT_BACKWARD: lambda op: _front_backward(state, op),
        }
        return state, self._issue(schedule, state, visits)

    def evaluate(
        self,
        schedule: Schedule,
        inputs: Sequence[Batch],
        labels: Sequence[LabelledBatch],
        read: Callable[[torch.Tensor], Any],
    ) -> tuple[PassState, list[Event]]:
        """Run a forward schedule without gradients.

        Args:
            schedule: From `forward_schedule`.
            inputs: The micro-batches.
            labels: The same with labels, for the loss; empty to call `read` instead.
            read: Computes a micro-batch's output from that of its last layer (B, T, D).
        """
        state = PassState()
        step = _Step(
            seed=0, seeding=NEWEST, ids=range(len(inputs)), is_kept=False, is_stashed=False
        )

        def tail(op: Op) -> None:
            m = op.micro_batch_index
            hidden_BTD = state.inputs.pop((self._last_layer + 1, m))
            if labels:
                ones = torch.ones((), device=self._device.torch_device)
                self._loss(state, hidden_BTD, labels[m], ones, None)
            else:
                state.outputs[m] = read(hidden_BTD)

        visits: _Table = {
            Kind.FRONT: lambda op: self._front(state, op, inputs, step),
            Kind.FORWARD: lambda op: self._forward(state, op, step),
            Kind.TAIL: tail,
        }
        # tensors that modules cache, such as rotary tables, must work in a later training pass
        with torch.inference_mode(mode=False), torch.no_grad():
            return state, self._issue(schedule, state, visits)

    @property
    def unread(self) -> dict[int, tuple[Unread, ...]]:
        """By layer, the products that a recompute leaves out in the model's current mode."""
        return self._unread.setdefault(self._model.model.training, {})

    @property
    def attention(self) -> dict[int, tuple[OutputSize, ...]]:
        """By layer, the calls of attention that a recompute can be given, in the current mode."""
        return self._attention.setdefault(self._model.model.training, {})

    @property
    def mlps(self) -> dict[int, tuple[TiledMlp, ...]]:
        """By layer, the MLPs that are computed in tiles in the model's current mode."""
        return self._mlps.setdefault(self._model.model.training, {})

    def inspect(self, schedule: Schedule, inputs: Batch, *, has_labels: bool) -> bool:
        """Pass over the layers once to see whether they can be computed one by one.

        Args:
            schedule: From `forward_schedule`, for one micro-batch.
            inputs: A micro-batch.
            has_labels: Whether a loss will be computed.

        Returns:
            Whether all of the model could be inspected.

        Raises:
            UnsupportedModelError: They cannot; no gradient was touched.
        """
        inspections: list[Inspection] = []
        are_inspected: list[bool] = []

        def front(_op: Op) -> None:
            inspections.append(
                Inspection(
                    self._model,
                    inputs,
                    has_labels=has_labels,
                    mlp_chunk_tokens=self._mlp_chunk_tokens,
                )
            )

        def inspect_layer(op: Op) -> None:
            inspection, layer = inspections[0], op.layer_index
            if has_labels and self._records_attention:
                self.attention[layer] = inspection.attention(layer)
            found, self.mlps[layer] = inspection.visit(layer)
            if has_labels:
                self.unread[layer] = found if self._leaves_out else ()

        visits: _Table = {
            Kind.FRONT: front,
            Kind.FORWARD: inspect_layer,
            Kind.TAIL: lambda _op: are_inspected.append(inspections[0].around()),
        }
        with torch.inference_mode(mode=False), torch.no_grad():  # as for `evaluate`
            self._issue(schedule, PassState(), visits)
        return are_inspected[0]

    def timeline(self, schedule: Schedule, events: Sequence[Event]) -> Timeline:
        """Return the measured times of a pass that has finished."""
        return Timeline(
            spans=tuple(
                Span.of(op, start_s=start_s, end_s=end_s)
                for op, (start_s, end_s) in zip(
                    schedule.ops, (event.span_s() for event in events), strict=True
                )
            )
        )

    def _issue(self, schedule: Schedule, state: PassState, visits: _Table) -> list[Event]:
        table: _Table = {
            **visits,
            Kind.READ: self._read,
            Kind.LOAD: self._load,
            Kind.DECODE: self._decode,
            Kind.STASH: partial(self._stash_input, state),
            Kind.FETCH: partial(self._fetch_input, state),
            Kind.SEND: partial(self._send, state),
            Kind.RETURN: partial(self._return, state),
            Kind.GRADIENT: self._gradient,
            Kind.UPDATE: self._update,
        }
        events: list[Event] = []
        with torch.random.fork_rng(devices=self._rng_devices()):
            self._device.begin()
            try:
                for op in schedule.ops:
                    body = partial(table[op.kind], op)
                    events.append(self._device.submit(op.lane, [events[i] for i in op.waits], body))
                self._device.settle()
            finally:
                VISIT_CACHE.enter(None)
        return events

    # ----------------------------------------------------------------------------------- transfers

    def _read(self, op: Op) -> None:
        target = self._slots.staging(op.buffer_index, op.num_bytes)
        self._source.deliver(op.layer_index, op.offset, target, copy_on_host)

    def _load(self, op: Op) -> None:
        target = self._slots.target(op.slot_index, op.offset, op.num_bytes)
        if op.buffer is None:
            self._source.deliver(op.layer_index, op.offset, target, self._device.copy)
        else:
            self._device.copy(target, self._slots.staging(op.buffer, op.num_bytes))

    def _decode(self, op: Op) -> None:
        with torch.no_grad():
            self._slots.decode(op.layer_index, op.slot_index)

    def _stash_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        input_BTD, place = state.inputs[layer, m], self._stash.place(layer, m)
        if input_BTD.nbytes != place.nbytes:
            raise UnsupportedModelError(
                f"layer {layer} is given {tuple(input_BTD.shape)} of {input_BTD.dtype}",
                limit="inputs that wait on the host are (B, T, hidden_size) of the model's type",
                hint='`stash="device"`',
            )
        self._device.copy(place, _bytes(input_BTD))

    def _fetch_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        target = self._stash.buffer(op.buffer_index, op.num_bytes)
        self._device.copy(target, self._stash.place(layer, m))
        like_BTD = state.fronts[m].hidden_BTD
        state.fetched[layer, m] = target.view(like_BTD.dtype).view(like_BTD.shape)

    def _send(self, state: PassState, op: Op) -> None:
        place, buffer, _ = self._sent_output(state, op)
        self._device.copy(place, buffer)

    def _return(self, state: PassState, op: Op) -> None:
        place, buffer, recorded = self._sent_output(state, op)
        self._device.copy(buffer, place)
        state.attention[op.layer_index, op.micro_batch_index] = recorded.at(buffer)

    def _sent_output(self, state: PassState, op: Op) -> tuple[torch.Tensor, torch.Tensor, Recorded]:
        layer, m = op.layer_index, op.micro_batch_index
        recorded = state.attention[layer, m]
        place = self._sent.place(layer, m)[: recorded.num_bytes]
        return place, self._sent.buffer(op.carrier_index, recorded.num_bytes), recorded

    def _update(self, op: Op) -> None:
        self._updates.run(op.layer_index)

    def _gradient(self, op: Op) -> None:
        if not op.offset:
            self._host_gradients.measure(op.layer_index, op.buffer_index)
        sink, gradient = self._host_gradients.leaving(
            op.layer_index, op.buffer_index, op.offset, op.num_bytes
        )
        self._device.copy(sink, gradient)

    # -------------------------------------------------------------------------------------- visits

    def _front(self, state: PassState, op: Op, inputs: Sequence[Batch], step: "_Step") -> None:
        m = op.micro_batch_index
        self._randomness.seed(_visit_seed(step, FRONT_LAYER, m))
        front = self._model.front(inputs[m])
        state.fronts[m] = front
        state.inputs[0, m] = front.hidden_BTD.detach().contiguous()

    def _forward(self, state: PassState, op: Op, step: "_Step") -> None:
        layer, m = op.layer_index, op.micro_batch_index
        input_BTD = state.inputs[layer, m]
        if step.is_stashed:  # the output takes its place; see Note [Letting go]
            state.inputs.pop((layer + 1 - NUM_KEPT, m), None)
        call = state.fronts[m].calls[layer]
        VISIT_CACHE.enter((op.kind, layer))
        compute = partial(
            self._visit_forward,
            layer,
            input_BTD,
            call,
            has_graph=op.has_graph,
            has_output=op.has_output,
        )
        (output_BTD, router_logits, graph, recorded), draws = self._randomness.visit(
            layer, _visit_seed(step, layer, m), compute
        )
        if graph is not None:
            state.graphs[layer, m] = graph
        else:
            state.draws[layer, m] = draws
        if op.has_output:
            state.attention[layer, m] = self._carried(recorded, op)
        if router_logits and step.is_kept:
            state.routing.setdefault(m, {})[layer] = router_logits
        state.inputs[layer + 1, m] = output_BTD.contiguous()
        if op.has_graph or not step.is_kept:
            del state.inputs[layer, m]

    def _visit_forward(
        self,
        layer: int,
        input_BTD: torch.Tensor,
        call: Call,
        *,
        has_graph: bool,
        has_output: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor], Graph | None, Recorded]:
        """Return a layer's output, its router logits, and graph or attention if they are kept."""
        mlps = self.mlps.get(layer, ())
        if has_graph:
            graph = visit_with_graph(self._model, layer, input_BTD=input_BTD, call=call, mlps=mlps)
            return graph.output, graph.router_logits, graph, NOTHING
        recorder = Recorder() if has_output else None
        with (
            torch.no_grad(),
            self._model.listening(layer) as router_logits,
            tiled(mlps),
            recorder or nullcontext(),
        ):
            output_BTD = self._model.layer_forward(layer, input_BTD, call)
        recorded = recorder.recorded() if recorder else NOTHING
        return output_BTD, router_logits, None, recorded

    def _carried(self, recorded: Recorded, op: Op) -> Recorded:
        """Return what a forward visit recorded, in its buffer if it is sent; if it has room."""
        if op.carrier is None:
            return recorded
        place = self._sent.place(op.layer_index, op.micro_batch_index)
        if recorded.num_bytes > place.nbytes:
            return NOTHING
        with torch.no_grad():
            return recorded.packed(self._sent.buffer(op.carrier, recorded.num_bytes))

    def _tail(
        self,
        state: PassState,
        op: Op,
        batches: Sequence[LabelledBatch],
        num_items: torch.Tensor,
        num_label_tokens: int,
    ) -> None:
        m, batch = op.micro_batch_index, batches[op.micro_batch_index]
        hidden_BTD = state.inputs.pop((self._last_layer + 1, m))
        gradient_BTD = torch.zeros_like(hidden_BTD)
        self._loss(state, hidden_BTD, batch, num_items, gradient_BTD.flatten(0, 1))
        state.gradient[m] = gradient_BTD
        self._balance(state, m, batch, num_label_tokens)

    def _loss(
        self,
        state: PassState,
        hidden_BTD: torch.Tensor,
        batch: LabelledBatch,
        num_items: torch.Tensor,
        gradient_ND: torch.Tensor | None,
    ) -> None:
        """Add the loss of the labelled tokens by chunks, and write its gradient if requested."""
        flat_ND = hidden_BTD.flatten(0, 1)
        chunks = zip(
            batch.positions.split(self._head_chunk_tokens),
            batch.next_tokens.split(self._head_chunk_tokens),
            strict=True,
        )
        for positions_N, next_N in chunks:
            if not positions_N.numel():
                continue
            loss = self._model.tail_loss(
                flat_ND,
                positions_N=positions_N,
                next_N=next_N,
                num_items=num_items,
                gradient_ND=gradient_ND,
            )
            state.losses.append(loss)

    def _balance(
        self, state: PassState, m: int, batch: LabelledBatch, num_label_tokens: int
    ) -> None:
        """Add the router loss of a micro-batch, and keep its gradients for the backward visits."""
        if self._model.router_loss is None:
            return
        loss, state.routing[m] = self._model.router_loss.loss(
            state.routing[m],
            batch.inputs.get("attention_mask"),
            batch.num_label_tokens / num_label_tokens,
        )
        state.losses.append(loss)

    def _backward(self, state: PassState, op: Op, step: "_Step") -> None:
        layer, m = op.layer_index, op.micro_batch_index
        router_gradients = state.routing.get(m, {}).pop(layer, [])
        self._host_gradients.gather(layer)
        VISIT_CACHE.enter((op.kind, layer))
        if op.has_graph:
            graph = state.graphs.pop((layer, m))
            self._pass_on(state, layer, m, graph.backward(state.gradient[m], router_gradients))
            return
        kept_BTD = (state.inputs if op.buffer is None else state.fetched).pop((layer, m))
        drawn = state.draws.pop((layer, m))
        recorded = state.attention.pop((layer, m), NOTHING)
        if state.gradient[m] is None and not router_gradients:
            return
        compute = partial(
            visit_with_graph,
            self._model,
            layer,
            input_BTD=kept_BTD,
            call=state.fronts[m].calls[layer],
            mlps=self.mlps.get(layer, ()),
        )
        seed, unread = _visit_seed(step, layer, m), self.unread.get(layer, ())
        recomputed, draws = self._randomness.visit(
            layer, seed, lambda: attempt(partial(compute, unread=unread, recorded=recorded))
        )
        if recomputed is None and recorded.tensors:
            recomputed, draws = self._randomness.visit(
                layer, seed, lambda: attempt(partial(compute, unread=unread))
            )
        if recomputed is None:
            self.unread[layer] = ()
            graph, draws = self._randomness.visit(layer, seed, compute)
        else:
            graph = recomputed
        require_same_draws(layer, drawn, draws)
        self._pass_on(state, layer, m, graph.backward(state.gradient[m], router_gradients))

    def _pass_on(
        self, state: PassState, layer: int, m: int, gradient_BTD: torch.Tensor | None
    ) -> None:
        """Keep the gradient by a layer's input for the layer below.

        Raises:
            UnsupportedModelError: There is none, although the weights below have gradients.
        """
        if gradient_BTD is None and self._host_gradients.parameters:
            raise UnsupportedModelError(
                f"layer {layer} passes no gradient on to its input",
                limit="weights that train on the host have a gradient in each step",
                hint='`trained_weights="device"`, and freeze what is below it',
            )
        state.gradient[m] = gradient_BTD

    def _rng_devices(self) -> list[torch.device]:
        torch_device = self._device.torch_device
        return [torch_device] if torch_device.type == "cuda" else []


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Values common to all visits of a pass."""

    seed: int
    seeding: Seeding
    ids: Sequence[int]
    is_kept: bool
    is_stashed: bool


def _visit_seed(step: _Step, layer: int, m: int) -> int:
    """Return the dropout seed of one visit."""
    return step.seeding.of_visit(step.seed, layer, step.ids[m])


def _front_backward(state: PassState, op: Op) -> None:
    m = op.micro_batch_index
    state.fronts.pop(m).backward(state.gradient.pop(m))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
