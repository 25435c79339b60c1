"""The step as a value: one list of ops, which is simulated for predictions and run for training.

Problem. L layers share C < L slots of device memory. Each layer is visited twice per optimizer
step, upwards in the forward and downwards in the backward, and every visit needs its layer's
weights in a slot.

Idea. The *vertical snake ring*: slot = layer mod C, and all micro-batches of a step pass through a
layer before the next layer is fetched. The visits run 0..L-1, L-1..0, 0..L-1, a snake. For this
order, evicting the least recently used layer is optimal and equals this fixed map. The last C
layers of the forward are still in their slots for the backward, and the first C for the next
forward, so a step loads 2 * (L - C) layers, whatever the number of micro-batches. Loads run up to
C - 1 layers ahead.

An encoded layer is decoded once per visit, into one buffer that all layers share. Its slot is free
as soon as it is decoded, so the next load overlaps with the visit itself. (A second buffer would
let decoding overlap with the previous visit, at the cost of one decoded layer of device memory.)

Layout. This module writes the step as a program that runs line by line: load, visit, load, visit.
Each line names the memory that it reads and writes; `offload.plan.schedule.op` derives lanes
and waits from it. Other transfers are lines too: layer inputs that are kept in host memory (the
*stash*), gradients of the layers' own weights, reads from disk.

Weights that train on the host. Clipping needs the norm of all gradients, so a layer's update cannot
start before the backward has ended. It need not end before the next forward either, but only before
the layer's next load: the update is a line ahead of that load, on the lane of the host.

Kept graphs. The last K layers are not checkpointed: they keep the graph of their forward visit. The
saved graph aliases the slot, which other layers overwrite in between if K > C (the decoding buffer,
if layers are decoded). This is safe because a layer has the same address and the same bytes for the
whole step, and its backward visit is a line that reads that address: it waits for the op that
restores the weights. The last layers are chosen so that no kept graph is alive during a recompute.

Sent graphs. Other layers are not checkpointed either: what autograd saved in their forward visit
leaves from a buffer for host memory, and comes back to one before their backward visit. The same
few buffers, two visits' worth, serve both ways.

Attention outputs. A recompute need not compute attention again if it is given the output of the
forward visit. That stays on the device, or it leaves and comes back through the same buffers.

Objectives. A loss of preferences compares rows with each other and with a reference model, so it is
known only after the last row. The log-probabilities of all label tokens are computed first, without
a graph, then the loss, then the gradient of each micro-batch. Rows that are only scored, and all
rows as the reference computes them, are further passes through the same visits: they add no load.

Head. The output head may wait in host memory too, and is then one more visit at the turn; see
below.

Ranks. Several processes may share a step, each with its own micro-batches. In layer-major order a
layer's gradients are final for the whole step once its backward visit ends, so they are added up
over the ranks while the layers below compute. What several layers, front or tail share follows at
the end. These ops have the same order on all ranks, whatever the number of their micro-batches.

Runs. The micro-batches of a step need not be of one run: each may be computed with an adapter of
its own. Runs that share the layers share every load.

Rejected. A dynamic cache: it needs the same number of loads, but slot addresses change, so
parameters would have to be bound again at each visit.

Rounds. In micro-batch-major order each micro-batch passes all layers, up and down, before the next
one begins: 2 * M * (L - C) loads, and the memory of one micro-batch for layer inputs and graphs. So
it pays where most layers fit, and in their place more graphs would. A plan weighs both orders.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from offload.plan.schedule.op import (
    KEPT_GRAPH,
    KEPT_OUTPUT,
    RECOMPUTE,
    SAVES,
    SENT_GRAPH,
    SENT_OUTPUT,
    Kind,
    Lane,
    Line,
    Op,
    Resource,
    Save,
    parallel,
)

# ---------------------------------------------------------------------------------------------
# The input embedding in host memory: how the rows of a micro-batch's tokens come to the device.
#
# Of the embedding a step reads the rows of its tokens alone. They are gathered on the host, each
# once, into one of a few page-locked buffers, copied to one of as many on the device, and looked up
# there by the front of the micro-batch.

NUM_ROW_BUFFERS = 2  # one is filled while another is copied, or looked up


def looked_up(front: Line, num_bytes: int) -> tuple[Line, Line, Line]:
    """Return the lines that bring the rows that a front reads, and the front's own.

    Args:
        front: It runs one micro-batch.
        num_bytes: Of the rows.
    """
    (op,) = front.ops
    buffer = op.micro_batch_index % NUM_ROW_BUFFERS
    gathered: Resource = ("gathered rows", buffer, 0)
    arrived: Resource = ("rows", buffer, 0)
    look_up = op._replace(kind=Kind.LOOK_UP, buffer=buffer, num_bytes=num_bytes)
    rows = look_up._replace(kind=Kind.ROWS)
    return (
        Line(ops=(look_up,), writes=(gathered,)),
        Line(ops=(rows,), reads=(gathered,), writes=(arrived,)),
        front._replace(ops=(op._replace(buffer=buffer),), reads=(*front.reads, arrived)),
    )


# ---------------------------------------------------------------------------------------------
# The update of a layer as lines of a step: on the host, before its load copies what is there.
#
# Source: of updates by the CPU, arXiv:2101.06840; here they take the norm and the learning rate of
# the step that has ended.

NUM_GRADIENT_BUFFERS = 2  # layers whose gradients are on the device: one fills, one leaves


def gradients_of(layer: int, sizes: "TransferSizes") -> tuple[Resource, ...]:
    """Return the device buffer of a layer's gradients; none if its own weights are frozen."""
    buffer: Resource = ("gradient", layer % NUM_GRADIENT_BUFFERS, 0)
    return (buffer,) if sizes.gradient_bytes[layer] else ()


def slot_of(slot: int) -> Resource:
    """Return the weights in a slot."""
    return ("slot", slot, 0)


def weights_on_host(layer: int) -> Resource:
    """Return a layer's weights in host memory."""
    return ("weights", layer, 0)


def gradients_on_host(layer: int) -> Resource:
    """Return the sums of a layer's gradients in host memory."""
    return ("gradients on the host", layer, 0)


def rank_gradients(layer: int | None, run: int) -> Resource:
    """Return what a rank has added up of a layer's gradients, or of those outside the layers."""
    return ("gradients of a rank", -1 if layer is None else layer, run)


# ---------------------------------------------------------------------------------------------
# The output head in host memory: which slots it is copied to once per step, and when.
#
# Problem. The head of a large vocabulary takes a gigabyte or more of device memory all the time,
# and computes only between the last forward visit and the first backward visit.
#
# Idea. The head is one more visit at the turn of the snake ring. Its weight is copied over the
# slots of the layers that were visited longest ago, as they are needed again last. These layers are
# loaded again on the way down, each before its backward visit. So the head takes no memory of its
# own, and its copy runs while the last layers compute, as that of a layer does.
#
# Layout. The weight is one matrix, so its slots follow one another in memory. Where all slots are
# smaller than the head, their memory is as large as the head.
#
# Cost. On the link a step moves the head, and as many layers again as the head covers slots. In
# return the device has room for that many more slots, each of which saves two loads.
#
# Rejected. A buffer that is allocated for the head alone: unless it is given back it saves nothing,
# and a piece of a gigabyte rarely comes back to the allocator whole. Slices of the vocabulary
# through a small buffer: the loss then needs all logits twice.


def slots_bytes(num_slots: int, slot_bytes: int, head_bytes: int) -> int:
    """Return the memory of all slots; that of a head in host memory is within it."""
    return max(num_slots * slot_bytes, head_bytes)


def held_at_turn(num_layers: int, num_slots: int, slot: int) -> int:
    """Return the layer that a slot holds at the end of a sweep upwards, before the head."""
    oldest = num_layers - num_slots
    return oldest + (slot - oldest) % num_slots


def head_slots(layer_bytes: Sequence[int], num_slots: int, head_bytes: int) -> range:
    """Return the slots that the head is copied to, one after another; none without a head.

    Of all places it is that whose layers were visited longest ago at the end of a sweep upwards.

    Args:
        layer_bytes: What each layer takes in a slot.
        num_slots: Slots, each as large as the largest layer.
        head_bytes: Of the head; 0 if it is not copied.
    """
    if not head_bytes:
        return range(0)
    num_covered = min(num_slots, -(-head_bytes // max(layer_bytes)))

    def newest(start: int) -> int:
        slots = range(start, start + num_covered)
        return max(held_at_turn(len(layer_bytes), num_slots, slot) for slot in slots)

    start = min(range(num_slots - num_covered + 1), key=newest)
    return range(start, start + num_covered)


def head_copies(slots: range, sizes: "TransferSizes") -> Iterator[Line]:
    """Yield the copies of the head over its slots, a line for each slot.

    The end of the weight is in the last of its slots, or after it.
    """
    slot_bytes = max(sizes.layer_bytes)
    for number, slot in enumerate(slots):
        start = number * slot_bytes
        end = sizes.head_bytes if slot == slots[-1] else start + slot_bytes
        copy = Op(kind=Kind.HEAD, slot=slot)
        pieces = copy.pieces(end - start, sizes.head_piece_bytes)
        ops = tuple(piece._replace(offset=start + piece.offset) for piece in pieces)
        yield Line(ops=ops, writes=(slot_of(slot),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The passes of one run through each layer's visits in a step.

    They are numbered within the step: the micro-batches that are trained on, run after run; then,
    run after run, those that are only scored and all of the run's as its reference computes them.
    """

    num_trained: int  # micro-batches that are trained on; 0 for an evaluation
    num_scored: int = 0  # micro-batches that are only scored
    has_reference: bool = False  # whether a reference scores all of them too
    has_objective: bool = True  # whether the loss is taken over all of the run's rows at once
    first_trained: int = 0  # number of the first that is trained on
    first_further: int | None = None  # number of the first that is not; None if they follow at once

    @property
    def num_policy(self) -> int:
        """How many are computed as the model is."""
        return self.num_trained + self.num_scored

    @property
    def num_further(self) -> int:
        """How many are not trained on."""
        return self.num_scored + self.num_policy * self.has_reference

    @property
    def trained(self) -> range:
        """Those with a gradient."""
        return range(self.first_trained, self.first_trained + self.num_trained)

    @property
    def scored(self) -> range:
        """Those of the model without one."""
        return range(self._further, self._further + self.num_scored)

    @property
    def reference(self) -> range:
        """Those of the reference."""
        return range(self._further + self.num_scored, self._further + self.num_further)

    @property
    def all(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.trained, *self.scored, *self.reference)

    def micro_batch(self, number: int) -> int:
        """Return whose rows a pass computes: an index into those trained on, then those scored."""
        if number in self.trained:
            return number - self.first_trained
        return (number - self._further + self.num_trained) % self.num_policy

    @property
    def _further(self) -> int:
        following = self.first_trained + self.num_trained
        return following if self.first_further is None else self.first_further


def numbered(runs: Sequence[Passes]) -> tuple[Passes, ...]:
    """Return the passes of a step's runs with their numbers in the step."""
    first, further = 0, sum(run.num_trained for run in runs)
    found = []
    for run in runs:
        found.append(replace(run, first_trained=first, first_further=further))
        first, further = first + run.num_trained, further + run.num_further
    return tuple(found)


class Residency(NamedTuple):
    """How many layers' weights, graphs and attention outputs are on the device at a time.

    A tuple, since a search makes and looks up tens of thousands.
    """

    num_slots: int  # layers whose weights are on the device at a time
    num_kept_graphs: int = 0  # how many layers, the last ones, are not checkpointed
    # How many of the layers below are not checkpointed either: what autograd saved of them goes to
    # host memory and comes back.
    num_sent_graphs: int = 0
    # How many layers, the last of all others, keep the output of their attention on the device, so
    # that it is not computed again.
    num_kept_outputs: int = 0
    num_sent_outputs: int = 0  # how many of the rest send theirs to host memory and get it back

    @property
    def has_outputs(self) -> bool:
        """Whether any attention is kept or sent."""
        return bool(self.num_kept_outputs or self.num_sent_outputs)

    @property
    def sends(self) -> bool:
        """Whether any layer's graph or output of attention leaves the device."""
        return bool(self.num_sent_graphs or self.num_sent_outputs)

    def sent_graphs(self, num_layers: int) -> frozenset[int]:
        """Return the layers that send their graphs, spread evenly below those that keep theirs."""
        return _spread(range(num_layers - self.num_kept_graphs), self.num_sent_graphs)

    def saved(
        self, output_bytes: tuple[tuple[int, ...], ...], graph_bytes: tuple[tuple[int, ...], ...]
    ) -> "Saved":
        """Return what each layer saves.

        Layers that send are spread evenly, so that each copy has the time of several visits.

        Args:
            output_bytes: By layer and micro-batch; none for a layer whose attention is not fused.
            graph_bytes: The same of what autograd saves of a layer; none where no graph is sent.
        """
        num_layers = len(output_bytes)
        first_graph, graphs = num_layers - self.num_kept_graphs, self.sent_graphs(num_layers)
        able = [i for i in range(first_graph) if output_bytes[i] and i not in graphs]
        num_below = max(0, len(able) - self.num_kept_outputs)
        return Saved(
            which={
                KEPT_OUTPUT: able[num_below:],
                SENT_OUTPUT: _spread(tuple(able[:num_below]), self.num_sent_outputs),
                KEPT_GRAPH: range(first_graph, num_layers),
                SENT_GRAPH: graphs,
            },
            output_bytes=output_bytes,
            graph_bytes=graph_bytes,
        )


@dataclass(frozen=True, kw_only=True)  # no slots: what is asked of again is kept
class Saved:
    """What each layer saves on the way up: the checkpointing of a step."""

    # The layers by what they save; those that are left out are computed again.
    which: Mapping[Save, Collection[int]] = field(default_factory=lambda: dict.fromkeys(SAVES, ()))
    # Bytes of an attention's output and log-sum-exp, by layer and micro-batch.
    output_bytes: tuple[tuple[int, ...], ...] = ()
    # Bytes of what autograd saves, by layer and micro-batch.
    graph_bytes: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def layers(self) -> tuple[Save, ...]:
        """What each layer saves, in forward order; empty if sizes of none are known."""
        found = [RECOMPUTE] * len(self.output_bytes)
        for save, layers in self.which.items():
            for layer in layers:
                found[layer] = save
        return tuple(found)

    def of(self, layer: int) -> Save:
        """Return what a layer saves."""
        return self.layers[layer] if self.layers else RECOMPUTE

    @property
    def leaving(self) -> list[int]:
        """The layers that send anything, in forward order."""
        return sorted([*self.which[SENT_OUTPUT], *self.which[SENT_GRAPH]])

    def sent_bytes(self, layer: int) -> tuple[int, ...]:
        """Return what a layer that sends anything sends, by micro-batch."""
        sizes = self.graph_bytes if self.layers[layer].what == "graph" else self.output_bytes
        return sizes[layer]


NOTHING_SAVED = Saved()


@lru_cache(maxsize=2**14)
def _spread(layers: tuple[int, ...] | range, num: int) -> frozenset[int]:
    """Choose so many of some layers, at equal distances; all if there are fewer.

    The first is chosen before the last: what it sends comes back last.
    """
    num = min(num, len(layers))
    return frozenset(
        [
            layer
            for place, layer in enumerate(reversed(layers))
            if (place + 1) * num // len(layers) > place * num // len(layers)
        ]
    )


PIECE_BYTES = 64 * 2**20  # a longer copy would delay others on the same copy engine
NUM_STAGING = 4  # page-locked staging buffers, if not all layers can be page-locked
MIN_SLOTS = 2  # one layer computes while the next is loaded
NUM_KEPT = 2  # inputs of a micro-batch on the device, if others are stashed: read and written
NUM_FETCHED = 2  # visits whose stashed inputs are on the device: one is read, one arrives
NUM_CARRIED = 2  # visits whose sent graphs or attention outputs are on the device


class Order(StrEnum):
    """Which loop is the outer one: layers, or micro-batches."""

    LAYER_MAJOR = "layer_major"
    MICRO_BATCH_MAJOR = "micro_batch_major"


Ring = tuple[int | None, ...]
"""The layer that each slot holds; None for an empty slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """Bytes that each rank sends so that the gradients of all ranks are added up."""

    # Bytes of what each layer has alone, in forward order: final once its backward has ended.
    layers: tuple[int, ...]
    rest: int  # bytes of all else: final once the whole backward has

    @classmethod
    def of(
        cls, layers: tuple[int, ...], rest: int, *, element_bytes: int, world_size: int
    ) -> "Reduced":
        """Return what an all-reduce sends that no other can undercut: 2 (N - 1) / N of its data.

        Args:
            layers: Elements that each layer has alone.
            rest: All others.
            element_bytes: Of an element on the network.
            world_size: N.
        """

        def sent(num_elements: int) -> int:
            return 2 * (world_size - 1) * -(-num_elements // world_size) * element_bytes

        return cls(layers=tuple(map(sent, layers)), rest=sent(rest))


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSizes:
    """What crosses the link and the network, and in which portions."""

    layer_bytes: tuple[int, ...]  # what one load of each layer moves, in forward order
    # Gradients of each layer's own weights that go to the host; 0 if frozen.
    gradient_bytes: tuple[int, ...]
    decoded_bytes: tuple[int, ...]  # size of each layer once decoded; 0 if it computes in its slot
    piece_bytes: int  # the largest copy; larger ones are split
    # Staging buffers of `piece_bytes` that loads pass through; 0 if the layers are in page-locked
    # memory.
    num_staging: int
    # Layers that are updated by the gradients of the step before, each where it is first loaded.
    updated: frozenset[int] = frozenset()
    # What of each run's gradients crosses the network; none with a single rank.
    reduced: tuple[Reduced, ...] = ()
    # Bytes of the input embedding's rows, by pass; empty if the device has all of them.
    row_bytes: tuple[int, ...] = ()
    # Bytes of the output head, if it is copied over slots; 0 if the device has it.
    head_bytes: int = 0

    def head_slots(self, num_slots: int) -> range:
        """Return the slots that the head is copied to; none if the device has it."""
        return head_slots(self.layer_bytes, num_slots, self.head_bytes)

    @property
    def head_piece_bytes(self) -> int:
        """The largest copy of the head, of a draft's too."""
        return min(self.piece_bytes, PIECE_BYTES)

    @classmethod
    def frozen(
        cls,
        layer_bytes: Sequence[int],
        *,
        decoded_bytes: Sequence[int] | None = None,
        num_staging: int = 0,
    ) -> "TransferSizes":
        """Return the sizes for frozen layers; without `decoded_bytes` none is encoded."""
        return cls(
            layer_bytes=tuple(layer_bytes),
            gradient_bytes=(0,) * len(layer_bytes),
            decoded_bytes=tuple(decoded_bytes or [0] * len(layer_bytes)),
            piece_bytes=PIECE_BYTES,
            num_staging=num_staging,
        )


@dataclass(frozen=True, kw_only=True)  # no slots: the ops are listed once
class Schedule:
    """The serial program of one pass, the ring it started from and the ring it leaves."""

    lines: tuple[Line, ...]
    ring_before: Ring
    ring_after: Ring

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of all lanes in issue order, each with its waits."""
        return parallel(self.lines)

    @property
    def num_loads(self) -> int:
        """Layers copied from host to device."""
        first = (line.ops[0] for line in self.lines)
        return sum(op.kind is Kind.LOAD and op.offset == 0 for op in first)

    @property
    def is_staged(self) -> bool:
        """Whether loads pass a staging ring."""
        return any(op.kind is Kind.READ for op in self.ops)

    @property
    def trains_front(self) -> bool:
        """Whether gradients flow back through the embeddings."""
        return any(op.kind is Kind.FRONT_BACKWARD for op in self.ops)

    @property
    def num_fetch_buffers(self) -> int:
        """Device buffers that stashed inputs come back to."""
        fetches = (op.buffer for op in self.ops if op.kind is Kind.FETCH)
        return max((buffer + 1 for buffer in fetches if buffer is not None), default=0)

    @property
    def num_carriers(self) -> int:
        """Device buffers that graphs and attention outputs leave from and come back to."""
        return max((op.carrier + 1 for op in self.ops if op.carrier is not None), default=0)

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied from host to device."""
        return sum(op.num_bytes for op in self.ops if op.kind.lane is Lane.H2D)

    @property
    def d2h_bytes(self) -> int:
        """Bytes copied from device to host."""
        return sum(op.num_bytes for op in self.ops if op.kind.lane is Lane.D2H)

    @property
    def network_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return sum(op.num_bytes for op in self.ops if op.kind.lane is Lane.NETWORK)


def head_schedule(ring: Ring) -> Schedule:
    """Return the one op of a step of a head on features, which moves and visits no layer."""
    head = Op(kind=Kind.TAIL, micro_batch=0)
    return Schedule(lines=(Line(ops=(head,)),), ring_before=ring, ring_after=ring)


def cold_ring(num_slots: int) -> Ring:
    """Return a ring whose slots are all empty."""
    return (None,) * num_slots


def warm_ring(num_slots: int) -> Ring:
    """Return the ring at the end of a training step: layers 0..C-1."""
    return tuple(range(num_slots))


def without_trained(ring: Ring, sizes: TransferSizes) -> Ring:
    """Return the ring without the layers whose weights train: in a slot they would be stale."""
    return tuple(None if i is None or sizes.gradient_bytes[i] else i for i in ring)


def step_schedule(
    sizes: TransferSizes,
    *,
    ring: Ring,
    runs: Sequence[Passes],
    order: Order = Order.LAYER_MAJOR,
    trains_front: bool,
    input_bytes: tuple[int, ...],
    saved: Saved = NOTHING_SAVED,
) -> Schedule:
    """List the ops of one step of runs that share the layers, without the optimizers.

    However many runs and passes there are, a step in layer-major order has the same loads; where
    nothing is trained, those of `forward_schedule`.

    Args:
        sizes: What crosses the link.
        ring: What the slots hold at the start; its length is the number of slots.
        runs: The passes of each; they are numbered here.
        order: Layer-major, or micro-batch-major, which knows no objective.
        trains_front: Whether a gradient has to flow back through the embeddings.
        input_bytes: Size of a layer's input by micro-batch that is trained on, if inputs are
            stashed in host memory for their backward visit; empty if they stay on the device.
        saved: The outputs and graphs that layers save, so that less is computed again.
    """
    assert len(sizes.reduced) in (0, len(runs))
    assert order is Order.LAYER_MAJOR or not any(sizes.gradient_bytes)
    assert order is Order.LAYER_MAJOR or not any(run.has_objective for run in runs)
    assert sizes.updated.isdisjoint(ring), "a slot would hold weights of before the update"
    num_layers, runs = len(sizes.layer_bytes), numbered(runs)
    program = _Program(
        sizes=sizes,
        ring=list(ring),
        input_bytes=input_bytes,
        saved=saved,
        run_of={m: i for i, _ in enumerate(sizes.reduced) for m in runs[i].trained},
    )
    trained = tuple(number for run in runs for number in run.trained)
    assert not input_bytes or len(input_bytes) == len(trained)
    scoring = [run for run in runs if run.num_further]
    further = [number for run in scoring for number in (*run.scored, *run.reference)]
    groups = [trained] if order is Order.LAYER_MAJOR else [(m,) for m in trained]
    for group in groups:
        program.decoded = None  # each round is alike, at the price of decoding a layer once more
        program.outside(Kind.FRONT, group)
        program.apart(Kind.FRONT, further)
        for layer in range(num_layers):
            program.forward(layer, group, is_kept=True)
            for run in scoring:
                program.scored(layer, run)
        for number, run in enumerate(runs):
            program.tail(number, run, [m for m in run.trained if m in group])
        for layer in reversed(range(num_layers)):
            if trained:
                program.backward(layer, group)
            if group is groups[-1] and sizes.reduced:
                program.reduce(layer)
            if trained and sizes.gradient_bytes[layer]:
                program.gradients(layer)
        if trained and trains_front:
            program.outside(Kind.FRONT_BACKWARD, group)
    program.reduce(None)
    return program.schedule(ring)


def forward_schedule(sizes: TransferSizes, *, ring: Ring, num_micro_batches: int) -> Schedule:
    """List the ops of one pass without gradients, for evaluation and generation.

    The pass ends at the top of the snake, so the next pass upwards starts with reloads, which its
    own schedule counts.
    """
    group = tuple(range(num_micro_batches))
    program = _Program(sizes=sizes, ring=list(ring), input_bytes=())
    program.outside(Kind.FRONT, group)
    for layer in range(len(sizes.layer_bytes)):
        program.forward(layer, group, is_kept=False)
    program.outside(Kind.TAIL, group)
    return program.schedule(ring)


# ---------------------------------------------------------------------------------------------
# The serial program


@dataclass(kw_only=True, slots=True)
class _Program:
    """The lines of a pass that are written so far, and the ring after them."""

    sizes: TransferSizes
    ring: list[int | None]
    input_bytes: tuple[int, ...]
    saved: Saved = NOTHING_SAVED
    run_of: Mapping[int, int] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    decoded: int | None = None
    are_updated: set[int] = field(default_factory=set)
    num_pieces: int = 0
    num_fetches: int = 0
    num_carried: int = 0
    has_head: bool = False

    def schedule(self, ring_before: Ring) -> Schedule:
        """Return the pass.

        Layers whose weights train may change after any pass, so the ring after it does not hold
        them.
        """
        left = without_trained(tuple(self.ring), self.sizes)
        return Schedule(lines=tuple(self.lines), ring_before=ring_before, ring_after=left)

    def outside(self, kind: Kind, group: Sequence[int]) -> None:
        """Write the ops before the first layer or after the last."""
        num_layers = len(self.sizes.layer_bytes)
        for m in group:
            op = Op(kind=kind, micro_batch=m)
            is_tail = kind in (Kind.SCORE, Kind.TAIL)
            reads = (*self._head(), *self._kept(num_layers, m)) if is_tail else ()
            writes = self._kept(0, m) if kind is Kind.FRONT else ()
            if kind in (Kind.TAIL, Kind.FRONT_BACKWARD):
                writes = self._added_up(None, m)
            self._add(Line(ops=(op,), reads=reads, writes=writes))

    def apart(self, kind: Kind, group: Sequence[int]) -> None:
        """Write ops that touch no memory of other lanes, but for the head."""
        for m in group:
            reads = self._head() if kind is Kind.SCORE else ()
            self._add(Line(ops=(Op(kind=kind, micro_batch=m),), reads=reads))

    def _head(self) -> tuple[Resource, ...]:
        """Write the copy of the head over its slots, unless it is there; return what reads it."""
        slots = self.sizes.head_slots(len(self.ring))
        if slots and not self.has_head:
            self.has_head = True
            for slot in slots:
                self.ring[slot] = None
            self.lines += head_copies(slots, self.sizes)
        return tuple(map(slot_of, slots))

    def _add(self, line: Line) -> None:
        """Write a line outside the layers, with those that bring rows of the embedding for it."""
        (op,) = line.ops
        lines: tuple[Line, ...] = (line,)
        if op.kind is Kind.FRONT and self.sizes.row_bytes:
            lines = looked_up(line, self.sizes.row_bytes[op.micro_batch_index])
        self.lines += lines

    def tail(self, number: int, run: Passes, group: Sequence[int]) -> None:
        """Write what comes after the last layer for micro-batches of a run."""
        if run.has_objective:
            self.outside(Kind.SCORE, group)
            self.apart(Kind.SCORE, [*run.scored, *run.reference])
            self.lines.append(Line(ops=(Op(kind=Kind.OBJECTIVE, run=number),)))
        self.outside(Kind.TAIL, group)

    def scored(self, layer: int, passes: Passes) -> None:
        """Write the passes of a visit that no backward visit follows."""
        slot, weights = self.load(layer)
        for kind, group in (Kind.FORWARD, passes.scored), (Kind.REFERENCE, passes.reference):
            for number in group:
                op = Op(kind=kind, layer=layer, micro_batch=number, slot=slot)
                self.lines.append(Line(ops=(op,), reads=(weights,)))

    def forward(self, layer: int, group: Sequence[int], *, is_kept: bool) -> None:
        """Write a forward visit; `is_kept` if a backward visit will follow."""
        slot, weights = self.load(layer)
        save = self.saved.of(layer) if is_kept else RECOMPUTE
        is_stashed = is_kept and self._is_stashed(layer)
        for m in group:
            carrier, carried = self._carrier(group) if save.is_sent else (None, ())
            op = Op(
                kind=Kind.FORWARD,
                layer=layer,
                micro_batch=m,
                slot=slot,
                save=save,
                carrier=carrier,
            )
            read, written = self._kept(layer, m), self._kept(layer + 1, m)
            self.lines.append(Line((op,), (weights, *read), (*written, *carried)))
            if is_stashed:
                self._moved(Kind.STASH, layer, m, read)
            if carrier is not None:
                self._moved(Kind.SEND, layer, m, carried, carrier=carrier)

    def backward(self, layer: int, group: Sequence[int]) -> None:
        """Write a backward visit."""
        slot, weights = self.load(layer)
        save, is_stashed = self.saved.of(layer), self._is_stashed(layer)
        gradients = gradients_of(layer, self.sizes) if self.sizes.gradient_bytes[layer] else ()
        for m in group:
            # A graph holds its own input, which no other op overwrites.
            buffer, source = None, () if save.what == "graph" else self._kept(layer, m)
            if is_stashed:
                buffer = self.num_fetches % (NUM_FETCHED * len(group))
                source = (("fetched", buffer, 0),)
                self.num_fetches += 1
                self._moved(Kind.FETCH, layer, m, source, buffer=buffer)
            carrier, carried = self._carrier(group) if save.is_sent else (None, ())
            if carrier is not None:
                self._moved(Kind.RETURN, layer, m, carried, carrier=carrier)
            op = Op(
                kind=Kind.BACKWARD,
                layer=layer,
                micro_batch=m,
                slot=slot,
                buffer=buffer,
                save=save,
                carrier=carrier,
            )
            added = self._added_up(layer, m) if self.run_of else ()
            self.lines.append(Line((op,), (weights, *source, *carried), (*gradients, *added)))

    def reduce(self, layer: int | None) -> None:
        """Write the sums over ranks of a layer's gradients, or of those that are final last."""
        for run, sizes in enumerate(self.sizes.reduced):
            num_bytes = sizes.rest if layer is None else sizes.layers[layer]
            if num_bytes:
                op = Op(kind=Kind.REDUCE, layer=layer, run=run, num_bytes=num_bytes)
                own = (rank_gradients(layer, run),)
                layers = range(len(sizes.layers)) if layer is None else ()
                read = (*own, *(rank_gradients(i, run) for i in layers))
                self.lines.append(Line(ops=(op,), reads=read, writes=own))

    def gradients(self, layer: int) -> None:
        """Write the copy of the gradients of a layer's own weights to the host."""
        buffered = gradients_of(layer, self.sizes)
        op = Op(kind=Kind.GRADIENT, layer=layer, buffer=buffered[0][1])
        pieces = op.pieces(self.sizes.gradient_bytes[layer], self.sizes.piece_bytes)
        self.lines.append(Line(ops=pieces, reads=buffered, writes=(gradients_on_host(layer),)))

    def _added_up(self, layer: int | None, m: int) -> tuple[Resource, ...]:
        """Return the gradients that an op adds to, if they are added up over ranks later."""
        return (rank_gradients(layer, self.run_of[m]),) if m in self.run_of else ()

    def load(self, layer: int) -> tuple[int, Resource]:
        """Write the load and decoding of a layer, unless its weights are already in place.

        An update that is due is written ahead of the load.

        Returns:
            The layer's slot, and the resource that a visit reads.
        """
        slot = layer % len(self.ring)
        held: Resource = ("slot", slot, 0)
        if self.sizes.decoded_bytes[layer] and self.decoded == layer:
            return slot, _DECODED
        if self.ring[slot] != layer:
            self.ring[slot], self.has_head = layer, False
            is_due = layer in self.sizes.updated and layer not in self.are_updated
            if is_due:
                num_bytes = self.sizes.gradient_bytes[layer]
                op = Op(kind=Kind.UPDATE, layer=layer, num_bytes=num_bytes)
                gradients, weights = (gradients_on_host(layer),), (weights_on_host(layer),)
                self.lines.append(Line(ops=(op,), reads=gradients, writes=weights))
            self._copy(layer, slot, held)
            self.are_updated.add(layer)
        if not self.sizes.decoded_bytes[layer]:
            return slot, held
        self.decoded = layer
        op = Op(
            kind=Kind.DECODE,
            layer=layer,
            slot=slot,
            num_bytes=self.sizes.decoded_bytes[layer],
        )
        self.lines.append(Line((op,), (held,), (_DECODED,)))
        return slot, _DECODED

    def _copy(self, layer: int, slot: int, held: Resource) -> None:
        """Write the copies that fill a slot: one line, or two for each piece that is staged."""
        sizes = self.sizes
        total = sizes.layer_bytes[layer]
        weights = (weights_on_host(layer),) if layer in sizes.updated else ()
        load = Op(Kind.LOAD, layer=layer, slot=slot, num_bytes=total)
        loads = (load,) if total <= sizes.piece_bytes else load.pieces(total, sizes.piece_bytes)
        if not sizes.num_staging:
            self.lines.append(Line(loads, weights, (held,)))
            return
        for piece in loads:
            buffer = self.num_pieces % sizes.num_staging
            staged: tuple[Resource, ...] = (("staging", buffer, 0),)
            self.num_pieces += 1
            read = piece._replace(kind=Kind.READ, slot=None, buffer=buffer)
            self.lines.append(Line((read,), weights, staged))
            self.lines.append(Line((piece._replace(buffer=buffer),), staged, (held,)))

    def _carrier(self, group: Sequence[int]) -> tuple[int, tuple[Resource, ...]]:
        """Take the next buffer for what a layer sends."""
        carrier = self.num_carried % (NUM_CARRIED * len(group))
        self.num_carried += 1
        return carrier, (("carried", carrier, 0),)

    def _moved(
        self,
        kind: Kind,
        layer: int,
        m: int,
        device: tuple[Resource, ...],
        *,
        buffer: int | None = None,
        carrier: int | None = None,
    ) -> None:
        """Write the copy of a layer's input, graph or attention output to the host, or back."""
        is_input, is_leaving = kind in (Kind.STASH, Kind.FETCH), kind in (Kind.STASH, Kind.SEND)
        op = Op(
            kind=kind,
            layer=layer,
            micro_batch=m,
            buffer=buffer,
            carrier=carrier,
            num_bytes=self.input_bytes[m] if is_input else self.saved.sent_bytes(layer)[m],
        )
        host: tuple[Resource, ...] = (("stash" if is_input else "sent", layer, m),)
        reads, writes = (device, host) if is_leaving else (host, device)
        self.lines.append(Line(ops=(op,), reads=reads, writes=writes))

    def _is_stashed(self, layer: int) -> bool:
        """Return whether a layer's inputs leave the device.

        The last layer needs its inputs again at once, and a graph holds its own.
        """
        is_last = layer == len(self.sizes.layer_bytes) - 1
        return bool(self.input_bytes) and not is_last and self.saved.of(layer).what != "graph"

    def _kept(self, layer: int, m: int) -> tuple[Resource, ...]:
        """Return the device buffer of a layer's input, if there are only a few."""
        return (("kept", layer % NUM_KEPT, m),) if self.input_bytes else ()


_DECODED: Resource = ("decoded", 0, 0)
