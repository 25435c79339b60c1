"""The step of ranks that each hold a part of the model (FSDP): layers are gathered, not loaded.

Each rank has 1/N of every layer. Before a visit it gathers the rest of the layer from the others,
and lets go of it afterwards. The micro-batches follow one another, each through all layers up and
down, so M of them gather 2 * M * L layers. After a layer's backward its gradients are added up, and
each rank keeps the sums of its own part. The embeddings, norm and head are gathered once for each
micro-batch and stay until its backward has ended.

On CUDA the next layer is gathered while one computes: two are on the device at a time. On a CPU the
forward waits for each layer. In the backward the next layer is asked for before the gradients of
the one before are sent, as torch's `fully_shard` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.plan.schedule.op import Kind, Line, Op
from offload.plan.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedSizes:
    """What each rank sends of a layer, and of all else."""

    layers: tuple[int, ...]  # bytes to gather each layer, in forward order
    rest: int  # bytes to gather what is around the layers
    gradients: tuple[int, ...]  # bytes to add up the gradients of each layer; 0 where it is frozen
    rest_gradients: int  # bytes to add up the gradients of what is around the layers


def sharded_schedule(
    sizes: ShardedSizes, *, num_micro_batches: int, trains_front: bool, is_ahead: bool
) -> Schedule:
    """List the ops of one optimizer step.

    Args:
        sizes: What crosses the network.
        num_micro_batches: Of the rank that has most of them.
        trains_front: Whether a gradient has to flow back through the embeddings.
        is_ahead: Whether the forward gathers a layer while the one before it computes.
    """
    program = _Program(sizes=sizes, is_ahead=is_ahead)
    for m in range(num_micro_batches):
        program.forward(m)
        program.backward(m, trains_front=trains_front)
    ring = tuple(range(len(sizes.layers)))
    return Schedule(lines=tuple(program.lines), ring_before=ring, ring_after=ring)


@dataclass(kw_only=True, slots=True)
class _Program:
    """The lines written so far, and which of them compute."""

    sizes: ShardedSizes
    is_ahead: bool
    lines: list[Line] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)

    def forward(self, m: int) -> None:
        """Write a micro-batch's way up."""
        rest = self._send(Kind.GATHER, None, self.sizes.rest, after=self.visits[-1:])
        self._compute(Kind.FRONT, m, after=rest)
        ahead = 2 if self.is_ahead else 1
        for layer, num_bytes in enumerate(self.sizes.layers):
            own = len(self.visits) - ahead  # the front is no layer, and leaves no room by ending
            gathered = self._send(
                Kind.GATHER, layer, num_bytes, after=self.visits[own : own + 1] if own >= 0 else ()
            )
            self._compute(Kind.FORWARD, m, layer, after=gathered)
        self._compute(Kind.TAIL, m)

    def backward(self, m: int, *, trains_front: bool) -> None:
        """Write its way down; the next layer is gathered while one computes."""
        sizes, last = self.sizes, len(self.sizes.layers) - 1
        gathered = self._send(Kind.GATHER, last, sizes.layers[last], after=self.visits[-1:])
        for layer in reversed(range(last + 1)):
            following: tuple[int, ...] = ()
            if layer:
                following = self._send(
                    Kind.GATHER, layer - 1, sizes.layers[layer - 1], after=self.visits[-1:]
                )
            self._compute(Kind.BACKWARD, m, layer, after=gathered)
            self._send(Kind.REDUCE, layer, sizes.gradients[layer], after=self.visits[-1:])
            gathered = following
        if trains_front:
            self._compute(Kind.FRONT_BACKWARD, m)
        self._send(Kind.REDUCE, None, sizes.rest_gradients, after=self.visits[-1:])

    def _send(
        self, kind: Kind, layer: int | None, num_bytes: int, *, after: Sequence[int]
    ) -> tuple[int, ...]:
        """Write an op of the network, if it has something to send; return its position."""
        if not num_bytes:
            return ()
        run = 0 if kind is Kind.REDUCE else None
        op = Op(kind=kind, layer=layer, num_bytes=num_bytes, run=run)
        return (self._add(op, after),)

    def _compute(
        self, kind: Kind, m: int, layer: int | None = None, *, after: Sequence[int] = ()
    ) -> None:
        op = Op(kind=kind, layer=layer, micro_batch=m)
        self.visits.append(self._add(op, after))

    def _add(self, op: Op, after: Sequence[int]) -> int:
        """Write an op that reads what these lines have written; return its position."""
        reads = tuple([("line", number, 0) for number in after])
        self.lines.append(Line(ops=(op,), reads=reads, writes=(("line", len(self.lines), 0),)))
        return len(self.lines) - 1
