"""The ops of an engine's steps, and the memory that they move things to."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from offload.engine.batch import LabelledBatch
from offload.engine.bound import Bound, EngineOptions
from offload.engine.model.layers import LayeredModel
from offload.engine.stash import by_place
from offload.errors import OffloadError
from offload.plan.schedule.op import Kind
from offload.plan.schedule.residency import NOTHING_SAVED, Saved
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Ring,
    Schedule,
    objective_schedule,
    training_schedule,
)


class Steps:
    """Lists the ops of steps with one model, as it was attached."""

    def __init__(
        self, layered: LayeredModel, bound: Bound, options: EngineOptions, *, trains_front: bool
    ) -> None:
        """Keep the parts; nothing is listed yet."""
        self._layered, self._bound, self._options = layered, bound, options
        self._trains_front = trains_front

    def schedule(
        self,
        batches: Sequence[LabelledBatch],
        *,
        ring: Ring,
        order: Order,
        passes: Passes | None = None,
    ) -> Schedule:
        """List the ops of a step given the ring's contents, and make room for what leaves.

        Args:
            batches: Those that are trained on.
            ring: What the slots hold.
            order: Of the loops.
            passes: Of a step with an objective; None for one without.

        Raises:
            OffloadError: The order is not possible with weights that train on the host, or with an
                objective.
        """
        if passes is not None and order is not Order.LAYER_MAJOR:
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
        input_bytes = self.input_bytes(batches) if self._options.stash == "host" else ()
        saved = self._saved(batches)
        list_ops: Callable[..., Schedule] = (
            partial(training_schedule, num_micro_batches=len(batches), order=order)
            if passes is None
            else partial(objective_schedule, passes=passes)
        )
        schedule = list_ops(
            replace(self._bound.sizes, updated=self._bound.updates.layers),
            ring=ring,
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

    def input_bytes(self, batches: Sequence[LabelledBatch]) -> tuple[int, ...]:
        """Return the size of a layer's input for each micro-batch."""
        config = self._layered.model.config.get_text_config()
        element_bytes = self._layered.model.dtype.itemsize
        return tuple(
            batch.inputs["input_ids"].numel() * config.hidden_size * element_bytes
            for batch in batches
        )

    def _saved(self, batches: Sequence[LabelledBatch]) -> Saved:
        """Return the layers that send their graphs, and those that keep or send their attention."""
        residency, found = self._options.residency, self._bound.executor.attention
        if not (residency.sends or residency.has_outputs):
            return NOTHING_SAVED
        layers = range(len(self._bound.sizes.layer_bytes))
        graphs = self._bound.executor.graph_sizes
        return residency.saved(
            [
                [sum(s.num_bytes(*row) for s in sizes for row in batch.rows) for batch in batches]
                if sizes
                else []
                for sizes in (found.get(layer, ()) for layer in layers)
            ],
            [[graphs.of(layer, b.shape) or 0 for b in batches] for layer in layers],
        )
