"""The ops of an engine's steps, and the memory that they move things to."""

from collections.abc import Sequence
from dataclasses import replace

from offload.engine.batch import LabelledBatch
from offload.engine.bound import Bound, EngineOptions
from offload.engine.host.stash import by_place
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.part import Part
from offload.errors import OffloadError
from offload.plan.schedule.op import Kind
from offload.plan.schedule.residency import NOTHING_SAVED, Saved
from offload.plan.schedule.schedule import (
    Order,
    Ring,
    Schedule,
    TransferSizes,
    forward_schedule,
    step_schedule,
)


class Steps:
    """Lists the ops of steps with one model, as it was attached."""

    def __init__(
        self, layered: LayeredModel, bound: Bound, options: EngineOptions, *, trains_front: bool
    ) -> None:
        """Keep the parts; nothing is listed yet."""
        self._layered, self._bound, self._options = layered, bound, options
        self._trains_front = trains_front

    def forward(self, ring: Ring, num: int = 1) -> Schedule:
        """List the ops of a pass without gradients over `num` micro-batches, given the ring."""
        return forward_schedule(self._bound.sizes, ring=ring, num_micro_batches=num)

    @property
    def _sizes(self) -> TransferSizes:
        """The sizes of transfers, with the updates that are left."""
        updates = self._bound.updates
        return replace(
            self._bound.sizes,
            updated=updates.layers,
        )

    def schedule(self, parts: Sequence[Part], *, ring: Ring, order: Order) -> Schedule:
        """List the ops of a step given the ring's contents, and make room for what leaves.

        Args:
            parts: What its runs contribute.
            ring: What the slots hold.
            order: Of the loops.

        Raises:
            OffloadError: The order is not possible with weights that train on the host, or with an
                objective.
        """
        if order is not Order.LAYER_MAJOR and any(part.scoring is not None for part in parts):
            raise OffloadError(
                f"order is {order.value}, and the step has an objective",
                limit="its loss is taken over all rows, before the first backward",
                hint="`order=Order.LAYER_MAJOR`",
            )
        if order is not Order.LAYER_MAJOR and any(self._bound.sizes.gradient_bytes):
            raise OffloadError(
                f"order is {order.value} where weights of the layers train on the host",
                limit="their gradients leave a layer once per step",
                hint="`order=Order.LAYER_MAJOR`",
            )
        batches = [batch for part in parts for batch in part.batches]
        input_bytes = self.input_bytes(batches) if self._options.stash == "host" else ()
        saved = self._saved(parts)
        schedule = step_schedule(
            replace(
                self._sizes,
                reduced=tuple(p.reducer.reduced for p in parts if p.reducer is not None),
                row_bytes=self._row_bytes(parts),
            ),
            ring=ring,
            runs=[part.passes for part in parts],
            order=order,
            trains_front=self._trains_front,
            input_bytes=input_bytes,
            num_kept_graphs=self._options.num_kept_graphs,
            saved=saved,
        )
        if saved.leaving:
            self._bound.sent.prepare(
                by_place(sorted(saved.leaving), saved.sent_bytes),
                num_buffers=schedule.num_carriers,
            )
        if schedule.num_fetch_buffers:
            stashed = {op.layer_index for op in schedule.ops if op.kind is Kind.STASH}
            self._bound.stash.prepare(
                by_place(sorted(stashed), lambda _: input_bytes),
                num_buffers=schedule.num_fetch_buffers,
            )
        return schedule

    def _row_bytes(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Return what each pass brings of the embedding, with room for it; nothing if none does."""
        embedding = self._layered.embedding
        if embedding is None:
            return ()
        each = [(part, number) for part in parts for number in part.passes.all]
        return embedding.prepare({number: part.given_ids(number) for part, number in each})

    def input_bytes(self, batches: Sequence[LabelledBatch]) -> tuple[int, ...]:
        """Return the size of a layer's input for each micro-batch."""
        config = self._layered.model.config.get_text_config()
        element_bytes = self._layered.model.dtype.itemsize
        return tuple(
            batch.inputs["input_ids"].numel() * config.hidden_size * element_bytes
            for batch in batches
        )

    def _saved(self, parts: Sequence[Part]) -> Saved:
        """Return the layers that send their graphs, and those that keep or send their attention."""
        residency = self._options.residency
        if not (residency.sends or residency.has_outputs):
            return NOTHING_SAVED
        found = [(self._bound.executor.found(part.adapter), part.batches) for part in parts]
        layers = range(len(self._bound.sizes.layer_bytes))
        outputs, graphs = [], []
        for layer in layers:
            sizes = [(known.attention.get(layer, ()), batches) for known, batches in found]
            is_recorded = all(calls for calls, _ in sizes)
            outputs.append(
                [
                    sum(call.num_bytes(*row) for call in calls for row in batch.rows)
                    for calls, batches in sizes
                    for batch in batches
                ]
                if is_recorded
                else []
            )
            graphs.append(
                [
                    known.graph_sizes.of(layer, batch.shape) or 0
                    for known, batches in found
                    for batch in batches
                ]
            )
        return residency.saved(tuple(map(tuple, outputs)), tuple(map(tuple, graphs)))
