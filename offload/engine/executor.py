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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from warnings import warn

import torch

from offload.engine.batch import Batch, LabelledBatch
from offload.engine.host.embedding import READERS
from offload.engine.model.layers import Front, LayerCall, LayeredModel
from offload.engine.model.visits import (
    Graph,
    Visited,
    attempt,
    visit_to_keep,
    visit_with_graph,
    visit_without_graph,
)
from offload.engine.passes.part import Part, PartTail, RunStep, Table, Transfers, add_losses
from offload.engine.passes.scoring import EachTail, ScoredPasses, Scoring, SwitchedModel
from offload.engine.randomness import (
    FRONT_LAYER,
    VisitRandomness,
    require_same_draws,
    same_randomness,
    seed_of,
)
from offload.engine.recompute import (
    NOTHING,
    GraphSizes,
    Recorded,
)
from offload.engine.results import Computing, PassState, Places, RunState
from offload.engine.streams import Device, Event
from offload.engine.verdict import Allowed, Mode
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import UnsupportedModelError
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import NUM_KEPT, Passes, Schedule

FILLED_BY = {Kind.LOAD: Kind.READ, Kind.ROWS: Kind.LOOK_UP}
"""Copies from host buffers, and what fills these on a thread that no stream makes wait."""


class Executor:
    """Runs a model's ops, with its weights and slots, on a device's lanes."""

    def __init__(
        self, *, model: LayeredModel, places: Places, device: Device, computing: Computing
    ) -> None:
        """Keep the parts; nothing is moved."""
        self._model = model
        self._sent, self._host_gradients = places.sent, places.host_gradients
        self._embedding, self._head = places.embedding, places.head
        self._device = device
        self._transfers = Transfers(places, device)
        self._computing = computing
        self._randomness = VisitRandomness(device.torch_device)
        self._graph_sizes: dict[Mode, GraphSizes] = {}
        # the last copy from each host buffer that a thread fills, of any pass
        self._copied: dict[tuple[Kind, int | None], Event] = {}
        self.adapter: str | None = None
        """The adapter that the model is switched to for passes of its own."""

    def step(
        self, schedule: Schedule, parts: Sequence[Part], *, is_stashed: bool
    ) -> tuple[PassState, list[Event]]:
        """Run the ops of a step; gradients are added to `.grad` of the trainable parameters.

        Args:
            schedule: From `step_schedule`, for the parts' passes and this ring.
            parts: What each run contributes; their states are filled.
            is_stashed: Whether layer inputs wait on the host, except those of kept graphs.

        Raises:
            OffloadError: A router loss is over a step whose micro-batches pass the layers one
                after another.
        """
        state = PassState(trains_front=schedule.trains_front)
        chunk_tokens = self._computing.head_chunk_tokens
        for part in parts:
            part.begin(self._model, schedule)
        tails = [PartTail(self._model, part, head_chunk_tokens=chunk_tokens) for part in parts]
        of = {number: i for i, part in enumerate(parts) for number in part.passes.all}

        def front(op: Op) -> None:
            part, number = parts[of[op.micro_batch_index]], op.micro_batch_index
            if number not in part.passes.trained:
                self._front_to_score(state, op, part.scored)
                return
            batch = part.batches[part.passes.micro_batch(number)]
            with part.model.around_layers():
                self._front(state, op, batch.inputs, part.visit_seed(FRONT_LAYER, number))

        def forward(op: Op) -> None:
            part = parts[of[op.micro_batch_index]]
            if op.micro_batch_index in part.passes.trained:
                with part.model.in_layer(op.layer_index):
                    self._forward(state, op, part, is_kept=True, is_stashed=is_stashed)
            else:
                self._forward_to_score(state, op, part, part.scored)

        def backward(op: Op) -> None:
            part = parts[of[op.micro_batch_index]]
            with part.model.in_layer(op.layer_index):
                self._backward(state, op, part)

        def reduce(op: Op) -> None:
            reducer = parts[op.run_index].run.reducer
            assert reducer is not None
            reducer.reduce(op.layer)

        def front_backward(op: Op) -> None:
            m = op.micro_batch_index
            state.fronts.pop(m).backward(state.gradient.pop(m))

        visits: Table = {
            Kind.FRONT: front,
            Kind.FORWARD: forward,
            Kind.REFERENCE: forward,
            Kind.SCORE: lambda op: tails[of[m := op.micro_batch_index]].score(state, m),
            Kind.OBJECTIVE: lambda op: tails[op.run_index].weigh(),
            Kind.TAIL: lambda op: tails[of[m := op.micro_batch_index]].train(state, m),
            Kind.BACKWARD: backward,
            Kind.FRONT_BACKWARD: front_backward,
            Kind.REDUCE: reduce,
        }
        return state, self._issue(schedule, state, visits)

    def score_each(self, schedule: Schedule, passes: ScoredPasses) -> list[Event]:
        """Run a forward schedule that scores labels under several adapters, without gradients.

        Args:
            schedule: A schedule of `forward_schedule`, with an op of each layer for each pass.
            passes: What is scored; it gets the scores.
        """
        state, alone = PassState(), self._alone(0)
        tail = EachTail(self._model, passes, head_chunk_tokens=self._computing.head_chunk_tokens)
        visits: Table = {
            Kind.FRONT: lambda op: self._front_to_score(state, op, passes),
            Kind.FORWARD: lambda op: self._forward_to_score(state, op, alone, passes),
            Kind.TAIL: lambda op: tail.score(state, op.micro_batch_index),
        }
        return self._issue_without_gradients(schedule, state, visits)

    def evaluate(
        self,
        schedule: Schedule,
        inputs: Batch,
        labels: LabelledBatch | None,
        read: Callable[[torch.Tensor], Any],
    ) -> tuple[Any, RunState]:
        """Run a forward schedule of one micro-batch without gradients.

        Args:
            schedule: A schedule of `forward_schedule`.
            inputs: The micro-batch.
            labels: The same with labels, for the loss; None to call `read` instead.
            read: Computes the output from that of the last layer (B, T, D).

        Returns:
            What `read` returned, if there are no labels; and the losses.
        """
        run, ones = RunState(), torch.ones((), device=self._device.torch_device)

        def front(_m: int) -> Front:
            self._randomness.seed(seed_of(0, FRONT_LAYER, 0))
            return self._model.front(inputs)

        def leave(hidden_BTD: torch.Tensor) -> Any:
            if labels is None:
                return read(hidden_BTD)
            chunk_tokens = self._computing.head_chunk_tokens
            return add_losses(self._model, run, hidden_BTD, labels, ones, chunk_tokens=chunk_tokens)

        return self.compute(schedule, front, leave)[0], run

    def compute(
        self,
        schedule: Schedule,
        front: Callable[[int], Front],
        read: Callable[[torch.Tensor], Any],
        *,
        models: Sequence[tuple[str | None, SwitchedModel]] = (),
    ) -> dict[int, Any]:
        """Run a forward schedule without gradients, on inputs of layers that the caller makes.

        Args:
            schedule: A schedule of `forward_schedule`.
            front: Computes what enters the layers, by micro-batch.
            read: Computes a micro-batch's output from that of its last layer (B, T, D).
            models: The adapter with which layers compute each micro-batch, and they themselves so
                switched; those that are active if none is given.

        Returns:
            The outputs by micro-batch.
        """
        state, last, outputs = PassState(), len(self._model.layers), dict[int, Any]()
        num = sum(op.kind is Kind.FRONT for op in schedule.ops)
        parts = [self._alone(num, *one) for one in models] or [self._alone(num)] * num

        def enter(op: Op) -> None:
            m = op.micro_batch_index
            with parts[m].model.around_layers():
                state.enter(m, front(m))

        def forward(op: Op) -> None:
            m = op.micro_batch_index
            with parts[m].model.in_layer(op.layer_index):
                self._forward(state, op, parts[m], is_kept=False, is_stashed=False)

        def leave(op: Op) -> None:
            m = op.micro_batch_index
            VISIT_CACHE.enter((op.kind, m))
            with parts[m].model.around_layers():
                outputs[m] = read(state.inputs.pop((last, m)))

        visits: Table = {Kind.FRONT: enter, Kind.FORWARD: forward, Kind.TAIL: leave}
        self._issue_without_gradients(schedule, state, visits)
        return outputs

    def graph_sizes(self, adapter: str | None = None) -> GraphSizes:
        """Return what autograd saves of layers whose graphs are sent, in the current mode.

        Args:
            adapter: The adapter that computes; None for those that are active.
        """
        return self._graph_sizes.setdefault(self.mode(adapter), GraphSizes())

    def allowed(self, adapter: str | None = None) -> Allowed:
        """Return what a step may do with each layer, in the model's current mode.

        Args:
            adapter: The adapter that computes; None for those that are active.
        """
        return self._model.verdict.of(self.mode(adapter))

    def mode(self, adapter: str | None = None) -> Mode:
        """Return the mode in which an adapter computes; None for those that are active."""
        return self.adapter if adapter is None else adapter, self._model.model.training

    def walk(self, schedule: Schedule, visits: Table) -> None:
        """Pass over the layers once without gradients, and call a function at each visit.

        Args:
            schedule: A schedule of `forward_schedule`, for one micro-batch.
            visits: The functions, by the kind of op.
        """
        self._issue_without_gradients(schedule, PassState(), visits)

    def measure(self, schedule: Schedule, inputs: Batch, layers: Collection[int]) -> None:
        """Find the size of graphs that are to be sent.

        Args:
            schedule: A schedule of `forward_schedule`, for one micro-batch.
            inputs: The micro-batch.
            layers: The layers to measure.
        """
        state, alone = PassState(), self._alone(1)
        sent = partial(visit_to_keep, is_sent=True)

        def forward(op: Op) -> None:
            layer = op.layer_index
            if layer not in layers:
                self._forward(state, op, alone, is_kept=False, is_stashed=False)
                return
            input_BTD, call = state.inputs.pop((layer, 0)), state.fronts[0].layer_calls[layer]
            visit = partial(self._visited, sent, layer, input_BTD, call, alone)
            visited, _ = self._randomness.visit(layer, alone.visit_seed(layer, 0), visit)
            if visited.saved is not None:
                self.graph_sizes().add(layer, state.fronts[0].shape, visited.saved.num_bytes)
            state.inputs[layer + 1, 0] = visited.output_BTD.contiguous()

        visits: Table = {
            Kind.FRONT: lambda op: self._front(state, op, inputs, alone.visit_seed(FRONT_LAYER, 0)),
            Kind.FORWARD: forward,
            Kind.TAIL: lambda _op: None,
        }
        self._issue_without_gradients(schedule, state, visits)

    def _issue_without_gradients(
        self, schedule: Schedule, state: PassState, visits: Table
    ) -> list[Event]:
        # tensors that modules cache, such as rotary tables, must work in a later training pass
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._issue(schedule, state, visits)

    def _issue(self, schedule: Schedule, state: PassState, visits: Table) -> list[Event]:
        table = visits | self._transfers.table(state)
        events: list[Event] = []
        with same_randomness(self._device.torch_device), VISIT_CACHE.in_pass():
            self._device.begin()
            for op in schedule.ops:
                body, waits = partial(table[op.kind], op), [events[i] for i in op.waits]
                if self._head is not None and op.kind in READERS:
                    body = partial(self._head.computing, body)
                copied = self._copied.pop((op.kind, op.buffer), None)
                if copied is not None:
                    waits.append(copied)
                events.append(self._device.submit(op.lane, waits, body))
            self._device.settle()
        for op, event in zip(schedule.ops, events, strict=True):
            if op.kind in FILLED_BY and op.buffer is not None:
                self._copied[FILLED_BY[op.kind], op.buffer] = event
        return events

    # -------------------------------------------------------------------------------------- visits

    def _alone(
        self, num_micro_batches: int, adapter: str | None = None, model: SwitchedModel | None = None
    ) -> Part:
        """Return what a pass without gradients works with."""
        return Part(
            run=RunStep(micro_batches=(), adapter=adapter),
            passes=Passes(num_trained=num_micro_batches, has_objective=False),
            batches=(),
            model=model or SwitchedModel(self._model),
            num_label_tokens=1,
            ids=range(num_micro_batches),
        )

    def _front(self, state: PassState, op: Op, inputs: Batch, seed: int) -> None:
        self._randomness.seed(seed)
        m = op.micro_batch_index
        with self._rows(op):
            front = self._model.front(inputs)
        state.enter(m, front)

    def _rows(self, op: Op) -> AbstractContextManager[None]:
        """Look tokens up in the rows that were brought for a front, if any were."""
        if self._embedding is None or op.buffer is None:
            return nullcontext()
        return self._embedding.present(op)

    def _forward(
        self, state: PassState, op: Op, part: Part, *, is_kept: bool, is_stashed: bool
    ) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        input_BTD = state.inputs[layer, m]
        if is_stashed:  # the output takes its place; see Note [Letting go]
            state.inputs.pop((layer + 1 - NUM_KEPT, m), None)
        call = state.fronts[m].layer_calls[layer]
        VISIT_CACHE.enter((op.kind, layer, part.run.adapter))
        visited, draws = self._randomness.visit(
            layer,
            part.visit_seed(layer, m),
            lambda: self._visit_forward(op, input_BTD, call, part),
        )
        graph = self._carried_graph(state, visited, op, part)
        if graph is not None:
            state.graphs[layer, m] = graph
        else:
            state.draws[layer, m] = draws
        if op.has_graph and graph is None:
            state.held[layer, m] = input_BTD
        if op.save.what == "output":
            state.attention[layer, m] = self._carried(visited.recorded, op)
        part.hear(layer, m, visited.router_logits)
        state.inputs[layer + 1, m] = visited.output_BTD.contiguous()
        if op.has_graph or not is_kept:
            del state.inputs[layer, m]

    def _front_to_score(self, state: PassState, op: Op, scored: Scoring | ScoredPasses) -> None:
        number = op.micro_batch_index
        VISIT_CACHE.enter((op.kind, number))
        with torch.no_grad(), scored.of_pass(number).around_layers(), self._rows(op):
            front = self._model.front(scored.batch(number).inputs)
        state.fronts[number] = front
        state.inputs[0, number] = front.hidden_BTD.contiguous()

    def _forward_to_score(
        self, state: PassState, op: Op, part: Part, scored: Scoring | ScoredPasses
    ) -> None:
        """Visit a layer with rows that are only scored: no graph, and their input is let go."""
        layer, number = op.layer_index, op.micro_batch_index
        input_BTD = state.inputs.pop((layer, number))
        call, model = state.fronts[number].layer_calls[layer], scored.of_pass(number)
        VISIT_CACHE.enter((layer, model))
        visit = partial(visit_without_graph, has_output=False)
        with model.in_layer(layer):
            visited = self._visited(visit, layer, input_BTD, call, part)
        state.inputs[layer + 1, number] = visited.output_BTD.contiguous()

    def _visit_forward(
        self, op: Op, input_BTD: torch.Tensor, call: LayerCall, part: Part
    ) -> Visited:
        """Visit a layer upwards."""
        visit: Callable[..., Visited] = partial(
            visit_without_graph, has_output=op.save.what == "output"
        )
        if op.has_graph:
            visit = partial(visit_to_keep, is_sent=op.save.is_sent)
        return self._visited(visit, op.layer_index, input_BTD, call, part)

    def _visited(
        self,
        visit: Callable[..., Visited],
        layer: int,
        input_BTD: torch.Tensor,
        call: LayerCall,
        part: Part,
    ) -> Visited:
        mlps = self.allowed(part.run.adapter).mlps.get(layer, ())
        return visit(self._model, layer, input_BTD=input_BTD, call=call, mlps=mlps)

    def _carried_graph(
        self, state: PassState, visited: Visited, op: Op, part: Part
    ) -> Graph | None:
        """Return the graph, moved to its buffer if it is sent; None if it cannot be sent."""
        graph, saved = visited.graph, visited.saved
        if graph is None or saved is None:
            return graph
        place = self._sent.place(op.layer_index, op.micro_batch_index)
        if saved.num_bytes > place.nbytes:
            shape = state.fronts[op.micro_batch_index].shape
            self.graph_sizes(part.run.adapter).add(op.layer_index, shape, saved.num_bytes)
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

    def _backward(self, state: PassState, op: Op, part: Part) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        self._host_gradients.gather(layer)
        VISIT_CACHE.enter((op.kind, layer, part.run.adapter))
        kept = state.graphs.pop((layer, m), None)
        if kept is not None:
            self._through(state, part, layer, m, kept)
            state.sent.pop((layer, m), None)
            return
        inputs = state.inputs if op.buffer is None else state.fetched
        kept_BTD = (state.held if op.has_graph else inputs).pop((layer, m))
        drawn = state.draws.pop((layer, m))
        recorded = state.attention.pop((layer, m), NOTHING)
        if state.gradient[m] is None and not (
            self._model.carried or (part.state.balance and self._model.hears(layer))
        ):
            return
        call, allowed = state.fronts[m].layer_calls[layer], self.allowed(part.run.adapter)
        compute = partial(
            visit_with_graph,
            self._model,
            layer,
            input_BTD=kept_BTD,
            call=call,
            mlps=allowed.mlps.get(layer, ()),
        )
        seed = part.visit_seed(layer, m)
        # none is left out where rows are computed one after the other
        is_together = self._model.is_together(layer, call)
        unread = allowed.unread.get(layer, ()) if is_together else ()
        recomputed, draws = self._randomness.visit(
            layer, seed, lambda: attempt(partial(compute, unread=unread, recorded=recorded))
        )
        if recomputed is None and recorded.tensors:
            recomputed, draws = self._randomness.visit(
                layer, seed, lambda: attempt(partial(compute, unread=unread))
            )
        if recomputed is None:
            self._model.verdict = self._model.verdict.reading(self.mode(part.run.adapter), layer)
            graph, draws = self._randomness.visit(layer, seed, compute)
        else:
            graph = recomputed
        require_same_draws(layer, drawn, draws)
        self._through(state, part, layer, m, graph)

    def _through(self, state: PassState, part: Part, layer: int, m: int, graph: Graph) -> None:
        """Take the gradients of a micro-batch through a layer, those of the router loss too."""
        of_others = (
            part.router_gradients(layer, m, graph.router_logits)
            if self._model.carried is None
            else self._model.carried.gradients(layer, state.fronts[m].layer_calls[layer])
        )
        self._pass_on(state, layer, m, graph.backward(state.gradient[m], of_others))

    def _pass_on(
        self, state: PassState, layer: int, m: int, gradient_BTD: torch.Tensor | None
    ) -> None:
        """Keep the gradient by a layer's input for the layer below, or the front if that trains.

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
        if layer == 0 and not state.trains_front:
            state.leave(m)
