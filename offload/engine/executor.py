"""Runs a schedule: each op of the plan, on its lane, behind what it waits for. It decides nothing.

The visit is the checkpoint. A forward visit keeps a layer's input and no graph; a backward visit
builds the layer's graph anew from that input and consumes it at once, while the weights still
stand in their slot. No saved tensor outlives its weights, so a slot can be overwritten without
any gradient noticing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from offload.engine.layers import Batch, Front, LayeredModel
from offload.engine.slab import Slab
from offload.engine.slots import Slots
from offload.engine.streams import Device, Event
from offload.plan.schedule import Kind, Op, Schedule
from offload.plan.timeline import Span, Timeline

IGNORED = -100
FRONT_LAYER = -1  # stands for the front where visits are seeded


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledBatch:
    """A micro-batch with what the tail needs, on the compute device.

    Attributes:
        inputs: input_ids (B, T) and optionally attention_mask, position_ids.
        positions: Where in the flattened (B * T) tokens a next token is to be predicted, (N,).
        next_tokens: That token, (N,).
    """

    inputs: Batch
    positions: torch.Tensor
    next_tokens: torch.Tensor

    @property
    def num_label_tokens(self) -> int:
        """Tokens with a loss."""
        return self.positions.numel()


def with_labels(batch: Batch, torch_device: torch.device) -> LabelledBatch:
    """Shift the labels, find the tokens that have one, and move all to the device.

    `batch` should be on the host, where finding the labelled tokens costs no synchronisation.
    """
    next_BT = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    positions = (next_BT != IGNORED).nonzero().flatten()
    return LabelledBatch(
        inputs=to_device({k: v for k, v in batch.items() if k != "labels"}, torch_device),
        positions=positions.to(torch_device, non_blocking=True),
        next_tokens=next_BT[positions].to(torch_device, non_blocking=True),
    )


def to_device(batch: Batch, torch_device: torch.device) -> dict[str, torch.Tensor]:
    """Move a batch's tensors to the device."""
    return {name: tensor.to(torch_device, non_blocking=True) for name, tensor in batch.items()}


@dataclass(kw_only=True)
class PassState:
    """What the ops of one pass hand to each other; lists are indexed by micro-batch.

    Attributes:
        hidden: Hidden states (B, T, D) on their way up.
        kept: Each layer's input, by layer and micro-batch, until its backward visit.
        gradient: Gradient of the loss by the hidden state, on its way down.
        losses: Sum over labelled tokens / num_label_tokens, one scalar tensor per chunk.
        logits: What a pass without labels asked for.
    """

    fronts: dict[int, Front] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradient: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


class Executor:
    """Binds a model, its slab and its slots to a device's lanes."""

    def __init__(
        self,
        *,
        model: LayeredModel,
        slab: Slab,
        slots: Slots,
        device: Device,
        head_chunk_tokens: int,
    ) -> None:
        """Keep the parts; nothing is moved."""
        self._model = model
        self._slab = slab
        self._slots = slots
        self._device = device
        self._head_chunk_tokens = head_chunk_tokens

    def train(
        self,
        schedule: Schedule,
        batches: Sequence[LabelledBatch],
        *,
        num_label_tokens: int,
        seed: int,
    ) -> tuple[PassState, list[Event]]:
        """Run a training schedule; gradients are added to `.grad` of the trainable parameters.

        Args:
            schedule: From `training_schedule`, for this many micro-batches and this ring.
            batches: The micro-batches.
            num_label_tokens: What the sum of the losses is divided by.
            seed: Dropout is seeded by (seed, layer, micro-batch), so that the recompute repeats it.
        """
        num_items = torch.tensor(num_label_tokens, device=self._device.torch_device)
        state = PassState()

        def run(op: Op) -> None:
            m = _given(op.micro_batch)
            if op.kind is Kind.FRONT:
                self._front(state, m, batches[m].inputs, seed=seed)
            elif op.kind is Kind.FORWARD:
                self._forward(state, _given(op.layer), m, seed=seed, is_kept=True)
            elif op.kind is Kind.TAIL:
                self._tail(state, m, batches[m], num_items)
            elif op.kind is Kind.BACKWARD:
                self._backward(state, _given(op.layer), m, seed=seed)
            else:
                _front_backward(state, m)

        with torch.random.fork_rng(devices=self._rng_devices()):
            return state, self._issue(schedule, run)

    def evaluate(
        self,
        schedule: Schedule,
        inputs: Sequence[Batch],
        labels: Sequence[LabelledBatch],
        positions: torch.Tensor | None,
    ) -> tuple[PassState, list[Event]]:
        """Run a forward schedule without gradients.

        Args:
            schedule: From `forward_schedule`.
            inputs: The micro-batches.
            labels: The same with labels, for the loss; empty for logits.
            positions: For logits: one token position per row (B,), or None for all tokens.
        """
        state = PassState()

        def run(op: Op) -> None:
            m = _given(op.micro_batch)
            if op.kind is Kind.FRONT:
                self._front(state, m, inputs[m], seed=0)
            elif op.kind is Kind.FORWARD:
                self._forward(state, _given(op.layer), m, seed=0, is_kept=False)
            elif labels:
                ones = torch.ones((), device=self._device.torch_device)
                self._loss(state, state.hidden.pop(m), labels[m], ones, None)
            else:
                hidden_BTD = state.hidden.pop(m)
                if positions is not None:
                    rows = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
                    hidden_BTD = hidden_BTD[rows, positions].unsqueeze(1)
                state.logits[m] = self._model.tail_logits(hidden_BTD)

        with torch.no_grad(), torch.random.fork_rng(devices=self._rng_devices()):
            return state, self._issue(schedule, run)

    def timeline(self, schedule: Schedule, events: Sequence[Event]) -> Timeline:
        """Return the measured times of a pass that has finished."""
        return Timeline(
            spans=tuple(
                Span(
                    lane=op.lane,
                    kind=op.kind,
                    layer=op.layer,
                    micro_batch=op.micro_batch,
                    num_bytes=op.num_bytes,
                    start_s=start_s,
                    end_s=end_s,
                )
                for op, (start_s, end_s) in zip(
                    schedule.ops, (event.span_s() for event in events), strict=True
                )
            )
        )

    def _issue(self, schedule: Schedule, run: Callable[[Op], None]) -> list[Event]:
        self._device.begin()
        events: list[Event] = []
        for op in schedule.ops:
            body = self._load if op.kind is Kind.LOAD else run
            waits = [events[i] for i in op.waits]
            events.append(self._device.submit(op.lane, waits, partial(body, op)))
        return events

    def _load(self, op: Op) -> None:
        source = self._slab.layer(_given(op.layer))
        self._device.copy(self._slots.target(_given(op.slot), source.numel()), source)

    def _front(self, state: PassState, m: int, inputs: Batch, *, seed: int) -> None:
        self._seed_visit(seed, FRONT_LAYER, m)
        front = self._model.front(inputs)
        state.fronts[m] = front
        state.hidden[m] = front.hidden_BTD.detach()

    def _forward(self, state: PassState, layer: int, m: int, *, seed: int, is_kept: bool) -> None:
        hidden_BTD = state.hidden[m]
        if is_kept:
            state.kept[layer, m] = hidden_BTD
        self._seed_visit(seed, layer, m)
        with torch.no_grad():
            state.hidden[m] = self._model.layer_forward(
                layer, hidden_BTD, state.fronts[m].calls[layer]
            )

    def _tail(
        self, state: PassState, m: int, batch: LabelledBatch, num_label_tokens: torch.Tensor
    ) -> None:
        hidden_BTD = state.hidden.pop(m)
        gradient_BTD = torch.zeros_like(hidden_BTD)
        self._loss(state, hidden_BTD, batch, num_label_tokens, gradient_BTD.flatten(0, 1))
        state.gradient[m] = gradient_BTD

    def _loss(
        self,
        state: PassState,
        hidden_BTD: torch.Tensor,
        batch: LabelledBatch,
        num_label_tokens: torch.Tensor,
        gradient_ND: torch.Tensor | None,
    ) -> None:
        """Add the loss of the labelled tokens, chunk by chunk, and write its gradient if wanted."""
        flat_ND = hidden_BTD.flatten(0, 1)
        chunks = zip(
            batch.positions.split(self._head_chunk_tokens),
            batch.next_tokens.split(self._head_chunk_tokens),
            strict=True,
        )
        for positions_N, next_N in chunks:
            if not positions_N.numel():
                continue
            chunk_1ND = flat_ND[positions_N].unsqueeze(0)
            self._model.check_loss_once(chunk_1ND, next_N.unsqueeze(0))
            chunk_1ND.requires_grad_(gradient_ND is not None)
            loss = self._model.tail_loss(chunk_1ND, next_N.unsqueeze(0), num_label_tokens)
            if gradient_ND is not None:
                loss.backward()
                assert chunk_1ND.grad is not None
                gradient_ND[positions_N] = chunk_1ND.grad[0]
            state.losses.append(loss.detach())

    def _backward(self, state: PassState, layer: int, m: int, *, seed: int) -> None:
        input_BTD = state.kept.pop((layer, m)).detach().requires_grad_()
        self._seed_visit(seed, layer, m)
        with torch.enable_grad():
            output_BTD = self._model.layer_forward(layer, input_BTD, state.fronts[m].calls[layer])
        output_BTD.backward(state.gradient[m])
        assert input_BTD.grad is not None
        state.gradient[m] = input_BTD.grad

    def _seed_visit(self, seed: int, layer: int, micro_batch: int) -> None:
        """Seed dropout for one visit, on the host and on this device."""
        visit_seed = hash((seed, layer, micro_batch)) & 0x7FFF_FFFF_FFFF_FFFF
        torch.default_generator.manual_seed(visit_seed)
        if self._device.torch_device.type == "cuda":
            with torch.cuda.device(self._device.torch_device):
                torch.cuda.manual_seed(visit_seed)

    def _rng_devices(self) -> list[torch.device]:
        torch_device = self._device.torch_device
        return [torch_device] if torch_device.type == "cuda" else []


def _front_backward(state: PassState, m: int) -> None:
    hidden_BTD = state.fronts.pop(m).hidden_BTD
    if hidden_BTD.requires_grad:  # not where only the head trains
        hidden_BTD.backward(state.gradient.pop(m))


def _given(index: int | None) -> int:
    assert index is not None
    return index
