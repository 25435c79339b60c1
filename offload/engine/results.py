"""Results of passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.engine.executor import Executor, PassState
from offload.engine.streams import Device, Event
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.timeline import Timeline


class StepResult:
    """Result of a step. Reading `loss` or `timeline` waits for the device; the counts do not.

    Attributes:
        num_label_tokens: Divisor of the sum of the losses.
        num_loads: Layers copied from host to device.
        h2d_bytes: Bytes copied from host to device.
        d2h_bytes: Bytes copied from device to host.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        device: Device,
        schedule: Schedule,
        state: PassState,
        events: Sequence[Event],
        num_label_tokens: int,
    ) -> None:
        """Keep the parts; nothing is read yet."""
        self._executor = executor
        self._device = device
        self._schedule = schedule
        self._losses = state.losses
        self._events = events
        self.num_label_tokens = num_label_tokens
        self.num_loads = schedule.num_loads
        self.h2d_bytes = schedule.h2d_bytes
        self.d2h_bytes = schedule.d2h_bytes

    @property
    def loss(self) -> float:
        """Mean loss over the step's label tokens; with several processes, this one's share."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    @property
    def timeline(self) -> Timeline:
        """Start and end of each op as measured."""
        self._device.finish()
        return self._executor.timeline(self._schedule, self._events)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """Result of a pass without gradients.

    Attributes:
        loss_sum: Sum of the losses of the label tokens; 0 without labels.
        num_label_tokens: Number of label tokens.
        logits: (B, T, V), or (B, 1, V) if positions were given; None with labels.
        num_loads: Layers copied from host to device.
    """

    loss_sum: float
    num_label_tokens: int
    logits: torch.Tensor | None
    num_loads: int
