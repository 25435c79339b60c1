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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from warnings import warn

import torch

from offload.engine.batch import ROW_LENS, Batch, LabelledBatch
from offload.engine.low_rank import VISIT_CACHE
from offload.engine.model.inspection import Inspection
from offload.engine.model.layers import LayerCall, LayeredModel
from offload.engine.model.router import STEP, RouterScope, require_whole_step
from offload.engine.model.visit import (
    Graph,
    Visited,
    attempt,
    visit_to_keep,
    visit_to_send,
    visit_with_graph,
    visit_without_graph,
)
from offload.engine.packing.check import PackedTrial
from offload.engine.passes.scoring import ScoredTail, Scoring
from offload.engine.passes.tail import Tail
from offload.engine.passes.transfers import Table, Transfers
from offload.engine.randomness import FRONT_LAYER, VisitRandomness, require_same_draws
from offload.engine.recompute.attention_outputs import (
    NOTHING,
    OutputSize,
    Recorded,
)
from offload.engine.recompute.sent_graphs import GraphSizes
from offload.engine.recompute.tiled import TiledMlp
from offload.engine.recompute.unread import Unread
from offload.engine.results import Computing, PassState, Places
from offload.engine.seeding import NEWEST, Seeding
from offload.engine.streams import Device, Event
from offload.errors import UnsupportedModelError
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import NUM_KEPT, Schedule
from offload.plan.schedule.timeline import Span, Timeline


class Executor:
    """Runs a model's ops, with its weights and slots, on a device's lanes."""

    def __init__(
        self, *, model: LayeredModel, places: Places, device: Device, computing: Computing
    ) -> None:
        """Keep the parts; nothing is moved."""
        self._model = model
        self._sent, self._host_gradients = places.sent, places.host_gradients
        self._device = device
        self._transfers = Transfers(places, device)
        self._tail = Tail(model, head_chunk_tokens=computing.head_chunk_tokens)
        self._computing = computing
        self._randomness = VisitRandomness(device.torch_device)
        self._last_layer = len(model.layers) - 1
        self._graph_sizes: dict[bool, GraphSizes] = {}
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
        router_loss: RouterScope = STEP,
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
            router_loss: What a router loss is taken over.

        Raises:
            OffloadError: It is over a step whose micro-batches pass the layers one after another.
        """
        # Filled on the device: `torch.tensor` would copy the number and wait for the device.
        num_items = torch.full((), num_label_tokens, device=self._device.torch_device)
        inputs = [batch.inputs for batch in batches]
        state = PassState()
        self._balance(state, schedule, router_loss, batches, num_label_tokens)
        step = _Step(seed=seed, seeding=seeding, ids=ids, is_kept=True, is_stashed=is_stashed)

        visits: Table = {
            Kind.FRONT: lambda op: self._front(state, op, inputs, step),
            Kind.FORWARD: lambda op: self._forward(state, op, step),
            Kind.TAIL: lambda op: self._tail.train(
                state, m := op.micro_batch_index, batches[m], num_items
            ),
            Kind.BACKWARD: lambda op: self._backward(state, op, step),
            Kind.FRONT_BACKWARD: lambda op: _front_backward(state, op),
        }
        return state, self._issue(schedule, state, visits)

    def score(
        self,
        schedule: Schedule,
        scoring: Scoring,
        *,
        seed: int,
        seeding: Seeding,
        is_stashed: bool,
        ids: Sequence[int],
        router_loss: RouterScope = STEP,
    ) -> tuple[PassState, list[Event]]:
        """Run the schedule of an objective; gradients are added as by `train`.

        Args:
            schedule: From `objective_schedule`, for these passes and this ring.
            scoring: What is scored.
            seed: As for `train`.
            seeding: As for `train`.
            is_stashed: As for `train`.
            ids: Number in the whole step of each micro-batch that is trained on.
            router_loss: As for `train`.
        """
        step = _Step(seed=seed, seeding=seeding, ids=ids, is_kept=True, is_stashed=is_stashed)
        state, trained = PassState(), scoring.passes.trained
        batches = [scoring.batch(m) for m in trained]
        inputs = [batch.inputs for batch in batches]
        self._balance(state, schedule, router_loss, batches, scoring.num_label_tokens)
        tail = ScoredTail(self._model, scoring, head_chunk_tokens=self._computing.head_chunk_tokens)

        def front(op: Op) -> None:
            if op.micro_batch_index in trained:
                self._front(state, op, inputs, step)
            else:
                self._front_to_score(state, op, scoring)

        def forward(op: Op) -> None:
            if op.micro_batch_index in trained:
                self._forward(state, op, step)
            else:
                self._forward_to_score(state, op, scoring)

        def train_tail(op: Op) -> None:
            m = op.micro_batch_index
            tail.train(state, m)
            self._tail.balance(state, m)

        visits: Table = {
            Kind.FRONT: front,
            Kind.FORWARD: forward,
            Kind.REFERENCE: forward,
            Kind.SCORE: lambda op: tail.score(state, op.micro_batch_index),
            Kind.OBJECTIVE: lambda _op: tail.weigh(state),
            Kind.TAIL: train_tail,
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
                self._tail.loss(state, hidden_BTD, labels[m], ones, None)
            else:
                state.outputs[m] = read(hidden_BTD)

        visits: Table = {
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
    def graph_sizes(self) -> GraphSizes:
        """What autograd saves of layers whose graphs are sent, in the current mode."""
        return self._graph_sizes.setdefault(self._model.model.training, GraphSizes())

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
        packed: list[PackedTrial] = []

        def front(_op: Op) -> None:
            inspections.append(
                Inspection(
                    self._model,
                    inputs,
                    has_labels=has_labels,
                    mlp_chunk_tokens=self._computing.mlp_chunk_tokens,
                )
            )
            if ROW_LENS in inputs:
                packed.append(PackedTrial(self._model, inputs["input_ids"]))

        def inspect_layer(op: Op) -> None:
            inspection, layer = inspections[0], op.layer_index
            if has_labels and self._computing.records_attention:
                self.attention[layer] = inspection.attention(layer)
            found, self.mlps[layer] = inspection.visit(layer)
            if has_labels:
                self.unread[layer] = found if self._computing.leaves_out else ()
            for trial in packed:
                if trial.visit(layer):
                    self._model.together.add(layer)

        visits: Table = {
            Kind.FRONT: front,
            Kind.FORWARD: inspect_layer,
            Kind.TAIL: lambda _op: are_inspected.append(inspections[0].around()),
        }
        with torch.inference_mode(mode=False), torch.no_grad():  # as for `evaluate`
            self._issue(schedule, PassState(), visits)
        return are_inspected[0]

    def measure(self, schedule: Schedule, inputs: Batch, layers: Collection[int]) -> None:
        """Find the size of graphs that are to be sent.

        Args:
            schedule: From `forward_schedule`, for one micro-batch.
            inputs: The micro-batch.
            layers: The layers to measure.
        """
        state = PassState()
        step = _Step(seed=0, seeding=NEWEST, ids=(0,), is_kept=False, is_stashed=False)

        def forward(op: Op) -> None:
            layer = op.layer_index
            if layer not in layers:
                self._forward(state, op, step)
                return
            input_BTD, call = state.inputs.pop((layer, 0)), state.fronts[0].layer_calls[layer]
            visit = partial(self._visited, visit_to_send, layer, input_BTD, call)
            visited, _ = self._randomness.visit(layer, _visit_seed(step, layer, 0), visit)
            if visited.saved is not None:
                self.graph_sizes.add(layer, state.fronts[0].shape, visited.saved.num_bytes)
            state.inputs[layer + 1, 0] = visited.output_BTD.contiguous()

        visits: Table = {
            Kind.FRONT: lambda op: self._front(state, op, [inputs], step),
            Kind.FORWARD: forward,
            Kind.TAIL: lambda _op: None,
        }
        with torch.inference_mode(mode=False), torch.no_grad():  # as for `evaluate`
            self._issue(schedule, state, visits)

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

    def _issue(self, schedule: Schedule, state: PassState, visits: Table) -> list[Event]:
        table = visits | self._transfers.table(state)
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
        call = state.fronts[m].layer_calls[layer]
        VISIT_CACHE.enter((op.kind, layer))
        visited, draws = self._randomness.visit(
            layer, _visit_seed(step, layer, m), lambda: self._visit_forward(op, input_BTD, call)
        )
        graph = self._carried_graph(state, visited, op)
        if graph is not None:
            state.graphs[layer, m] = graph
        else:
            state.draws[layer, m] = draws
        if op.has_graph and graph is None:
            state.held[layer, m] = input_BTD
        if op.has_output:
            state.attention[layer, m] = self._carried(visited.recorded, op)
        if visited.router_logits and state.balance is not None:
            state.balance.hear(layer, m, visited.router_logits)
        state.inputs[layer + 1, m] = visited.output_BTD.contiguous()
        if op.has_graph or not step.is_kept:
            del state.inputs[layer, m]

    def _front_to_score(self, state: PassState, op: Op, scoring: Scoring) -> None:
        number = op.micro_batch_index
        VISIT_CACHE.enter((op.kind, number))
        with torch.no_grad(), scoring.of_pass(number).around_layers():
            front = self._model.front(scoring.batch(number).inputs)
        state.fronts[number] = front
        state.inputs[0, number] = front.hidden_BTD.contiguous()

    def _forward_to_score(self, state: PassState, op: Op, scoring: Scoring) -> None:
        """Visit a layer with rows that are only scored: no graph, and their input is let go."""
        layer, number = op.layer_index, op.micro_batch_index
        input_BTD = state.inputs.pop((layer, number))
        call = state.fronts[number].layer_calls[layer]
        VISIT_CACHE.enter((op.kind, layer, "scored"))
        visit = partial(visit_without_graph, has_output=False)
        with scoring.of_pass(number).in_layer(layer):
            visited = self._visited(visit, layer, input_BTD, call)
        state.inputs[layer + 1, number] = visited.output_BTD.contiguous()

    def _balance(
        self,
        state: PassState,
        schedule: Schedule,
        scope: RouterScope,
        batches: Sequence[LabelledBatch],
        num_label_tokens: int,
    ) -> None:
        """Begin the router loss of a step, if the model has one."""
        if self._model.router_loss is not None and batches:
            require_whole_step(schedule, scope)
            state.balance = self._model.router_loss.balance(scope, batches, num_label_tokens)

    def _visit_forward(self, op: Op, input_BTD: torch.Tensor, call: LayerCall) -> Visited:
        """Visit a layer upwards."""
        visit: Callable[..., Visited] = partial(visit_without_graph, has_output=op.has_output)
        if op.has_graph:
            visit = visit_to_keep if op.carrier is None else visit_to_send
        return self._visited(visit, op.layer_index, input_BTD, call)

    def _visited(
        self, visit: Callable[..., Visited], layer: int, input_BTD: torch.Tensor, call: LayerCall
    ) -> Visited:
        mlps = self.mlps.get(layer, ())
        return visit(self._model, layer, input_BTD=input_BTD, call=call, mlps=mlps)

    def _carried_graph(self, state: PassState, visited: Visited, op: Op) -> Graph | None:
        """Return the graph, moved to its buffer if it is sent; None if it cannot be sent."""
        graph, saved = visited.graph, visited.saved
        if graph is None or saved is None:
            return graph
        place = self._sent.place(op.layer_index, op.micro_batch_index)
        if saved.num_bytes > place.nbytes:
            shape = state.fronts[op.micro_batch_index].shape
            self.graph_sizes.add(op.layer_index, shape, saved.num_bytes)
            warn(
                f"the graph of layer {op.layer_index} takes {saved.num_bytes} bytes and not"
                f" {place.nbytes}, as counted on: the layer is computed again in this step",
                stacklevel=2,
            )
        if saved.num_bytes > place.nbytes or not saved.is_unwritten:
            return None
        saved.move_to(self._sent.buffer(op.carrier_index, saved.num_bytes))
        graph.let_go()
        state.sent[op.layer_index, op.micro_batch_index] = saved
        return graph

    def _carried(self, recorded: Recorded, op: Op) -> Recorded:
        """Return what a forward visit recorded, in its buffer if it is sent; if it has room."""
        if op.carrier is None:
            return recorded
        place = self._sent.place(op.layer_index, op.micro_batch_index)
        if recorded.num_bytes > place.nbytes:
            return NOTHING
        with torch.no_grad():
            return recorded.packed(self._sent.buffer(op.carrier, recorded.num_bytes))

    def _backward(self, state: PassState, op: Op, step: "_Step") -> None:
        layer, m = op.layer_index, op.micro_batch_index
        self._host_gradients.gather(layer)
        VISIT_CACHE.enter((op.kind, layer))
        kept = state.graphs.pop((layer, m), None)
        if kept is not None:
            self._through(state, layer, m, kept)
            state.sent.pop((layer, m), None)
            return
        inputs = state.inputs if op.buffer is None else state.fetched
        kept_BTD = (state.held if op.has_graph else inputs).pop((layer, m))
        drawn = state.draws.pop((layer, m))
        recorded = state.attention.pop((layer, m), NOTHING)
        if state.gradient[m] is None and not (state.balance and self._model.hears(layer)):
            return
        call = state.fronts[m].layer_calls[layer]
        compute = partial(
            visit_with_graph,
            self._model,
            layer,
            input_BTD=kept_BTD,
            call=call,
            mlps=self.mlps.get(layer, ()),
        )
        seed, unread = _visit_seed(step, layer, m), self._left_out(layer, call)
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
        self._through(state, layer, m, graph)

    def _left_out(self, layer: int, call: LayerCall) -> tuple[Unread, ...]:
        """Return the products that a recompute leaves out; none if it is one of row after row."""
        return self.unread.get(layer, ()) if self._model.is_together(layer, call) else ()

    def _through(self, state: PassState, layer: int, m: int, graph: Graph) -> None:
        """Take the gradients of a micro-batch through a layer, those of the router loss too."""
        of_router = []
        if state.balance is not None:
            of_router = state.balance.gradients(layer, m, graph.router_logits)
        self._pass_on(state, layer, m, graph.backward(state.gradient[m], of_router))

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
