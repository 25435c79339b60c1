"""What passes work with, what their ops exchange, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from offload.engine.host.embedding import HostEmbedding, HostHead
from offload.engine.host.slab import Stash
from offload.engine.host.store import Backing
from offload.engine.host.weights import HostGradients, LateUpdates
from offload.engine.memory_meter import Arena
from offload.engine.model.layers import Front
from offload.engine.model.router import Balance
from offload.engine.model.visits import Graph
from offload.engine.recompute import Recorded, SavedTensors
from offload.engine.slots import Slots
from offload.engine.streams import Device, Event
from offload.plan.schedule.schedule import Schedule
from offload.plan.schedule.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """Where the ops of a pass move things from and to."""

    source: Backing  # the layers' weights
    slots: Slots  # where they compute
    stash: Stash  # layer inputs on the host
    sent: Stash  # graphs and attention outputs on the host
    host_gradients: HostGradients  # gradients of weights that train on the host
    updates: LateUpdates  # updates of those weights, each layer's before its load
    embedding: HostEmbedding | None  # the input embedding, if it is on the host
    head: HostHead | None  # the output head, if it is

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory of all but the layers, held from step to step."""
        return (
            *(() if self.embedding is None else self.embedding.arenas),
            *(() if self.head is None else (self.head.arena,)),
            *self.slots.arenas,
            *self.host_gradients.arenas,
            self.stash.arena,
            self.sent.arena,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Computing:
    """How visits are computed."""

    head_chunk_tokens: int  # tokens whose logits exist at a time
    leaves_out: bool  # whether recomputes leave out products that nothing reads
    records_attention: bool  # whether they may be given outputs of attention
    mlp_chunk_tokens: int | None  # tokens that an MLP computes at a time; None for all


@dataclass(kw_only=True)
class PassState:
    """What the ops of one pass exchange; lists are indexed by micro-batch."""

    # What the model passes to its layers; of hidden states the shape alone, but of passes that only
    # score.
    fronts: dict[int, Front] = field(default_factory=dict)
    # Layer inputs (B, T, D) on the device, by layer and micro-batch; the entry of layer L is the
    # input of the tail.
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # Inputs that came back from the stash.
    fetched: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # Graphs that forward visits kept for backward visits, by layer and micro-batch.
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    # What autograd saved for those of them that are sent away in between.
    sent: dict[tuple[int, int], SavedTensors] = field(default_factory=dict)
    # Inputs of layers whose graphs could not be sent: they are computed again.
    held: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # What forward visits recorded of it, by layer and micro-batch; of a sent one the tensors are in
    # a buffer that others use in between.
    attention: dict[tuple[int, int], Recorded] = field(default_factory=dict)
    # The generator states after forward visits; see `VisitRandomness.visit`.
    draws: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    # Gradient of the loss by the current hidden state in the backward; None below a layer that
    # passes none on, as in plain autograd.
    gradient: dict[int, torch.Tensor | None] = field(default_factory=dict)
    trains_front: bool = False  # whether a backward of fronts follows the first layer's

    def enter(self, m: int, front: Front) -> None:
        """Keep a front, and the first layer's input, whose memory is then not the front's too."""
        self.inputs[0, m] = front.hidden_BTD.detach().contiguous()
        self.fronts[m] = replace(front, hidden_BTD=without_memory(front.hidden_BTD))

    def leave(self, m: int) -> None:
        """Let go what is left of a micro-batch after its last visit."""
        del self.fronts[m], self.gradient[m]


def without_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape and type that passes gradients on, and has no memory."""
    return cast("torch.Tensor", _WithoutMemory.apply(x))  # type: ignore[no-untyped-call]


class _WithoutMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@dataclass(kw_only=True, slots=True)
class RunState:
    """What the ops of one pass find out about one run."""

    # Sum over labelled tokens / num_label_tokens, one scalar tensor per chunk; and the router loss
    # of each micro-batch.
    losses: list[torch.Tensor] = field(default_factory=list)
    balance: Balance | None = None  # the router loss, if the pass has one
    # Metrics of an objective, by name.
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


def measured(schedule: Schedule, events: Sequence[Event]) -> Timeline:
    """Return the measured times of a pass that has finished."""
    pairs = zip(schedule.ops, (event.span_s() for event in events), strict=True)
    return Timeline(spans=tuple(Span.of(op, start_s, end_s) for op, (start_s, end_s) in pairs))


class StepResult:
    """Result of a step. Reading `loss`, `metrics` or `timeline` waits for the device.

    Attributes:
        num_label_tokens: Divisor of the sum of the losses.
        num_loads: Layers copied from host to device.
        h2d_bytes: Bytes copied from host to device.
        d2h_bytes: Bytes copied from device to host.
    """

    def __init__(
        self,
        *,
        device: Device,
        schedule: Schedule,
        run: RunState,
        events: Sequence[Event],
        num_label_tokens: int,
    ) -> None:
        """Keep the parts; nothing is read yet."""
        self._device = device
        self._schedule = schedule
        self._losses = run.losses
        self._metrics = run.metrics
        self._events = events
        self.num_label_tokens = num_label_tokens
        self.num_loads = schedule.num_loads
        self.h2d_bytes = schedule.h2d_bytes
        self.d2h_bytes = schedule.d2h_bytes

    @property
    def loss(self) -> float:
        """Mean loss over the step's label tokens; with several processes, this one's share.

        With an objective, its value; plus the router loss, if the model has one.
        """
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the step's objective, by name; none without an objective."""
        return {name: float(value) for name, value in self._metrics.items()}

    @property
    def timeline(self) -> Timeline:
        """Start and end of each op as measured."""
        self._device.finish()
        return measured(self._schedule, self._events)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Result of an objective on rows that are not trained on."""

    loss: float  # the objective's value
    metrics: dict[str, float]  # its metrics, by name
    num_label_tokens: int  # number of label tokens
    num_loads: int  # layers copied from host to device
