"""The library door: attach a model, run steps on it, detach it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from offload.engine.executor import Executor, PassState, to_device, with_labels
from offload.engine.layers import Batch, LayeredModel
from offload.engine.slab import Record, Slab, lay_out
from offload.engine.slots import Slots
from offload.engine.streams import Device, Event
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.schedule import (
    MIN_SLOTS,
    Order,
    Ring,
    Schedule,
    cold_ring,
    forward_schedule,
    training_schedule,
)
from offload.plan.timeline import Timeline


class StepResult:
    """What a step gave. Reading `loss` or `timeline` waits for the device; the counts do not."""

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

    @property
    def loss(self) -> float:
        """Mean loss over the label tokens of the whole step."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    @property
    def timeline(self) -> Timeline:
        """Start and end of each op as measured."""
        self._device.finish()
        return self._executor.timeline(self._schedule, self._events)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What a pass without gradients gave.

    Attributes:
        loss_sum: Sum of the losses of the label tokens; 0 without labels.
        num_label_tokens: How many those are.
        logits: (B, T, V), or (B, 1, V) where positions were asked for; None with labels.
        num_loads: Layers copied from host to device.
    """

    loss_sum: float
    num_label_tokens: int
    logits: torch.Tensor | None
    num_loads: int


class Engine:
    """A model whose decoder layers are streamed through C slots. See `offload.attach`."""

    def __init__(
        self, model: nn.Module, *, num_slots: int, device: Device, head_chunk_tokens: int
    ) -> None:
        """Move the frozen weights of the layers into the slab and bind them to the slots."""
        if num_slots < MIN_SLOTS:
            raise OffloadError(
                f"num_slots is {num_slots}",
                limit=f"a layer computes in one slot while the next arrives: at least {MIN_SLOTS}",
                hint=f"`num_slots={MIN_SLOTS}`",
            )
        self._device = device
        self._layered = LayeredModel(model)
        num_slots = min(num_slots, len(self._layered.layers))
        self._home = _only_device(model)
        torch_device = device.torch_device
        records = [lay_out(group) for group in _streamed_parameters(self._layered)]
        self._slab = Slab(records)
        for layer in range(len(records)):
            self._slab.take(layer)
        if torch_device.type == "cuda":
            self._slab.page_lock()
        slots = Slots(records, num_slots=num_slots, torch_device=torch_device)
        _move_the_rest(model, records, torch_device)
        self._executor = Executor(
            model=self._layered,
            slab=self._slab,
            slots=slots,
            device=device,
            head_chunk_tokens=min(head_chunk_tokens, self._layered.max_positions),
        )
        self._model = model
        self._trains_front = _trains_front(self._layered)
        self._checkpointing = _switch_off_checkpointing(model)
        self._ring: Ring = cold_ring(num_slots)
        self._is_attached = True
        self.layer_bytes = tuple(record.num_bytes for record in records)
        self.slab_bytes = self._slab.num_bytes
        self.slot_bytes = slots.num_bytes

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        *,
        dropout_seed: int | None = None,
        num_label_tokens: int | None = None,
        order: Order = Order.LAYER_MAJOR,
    ) -> StepResult:
        """Add the gradients of one optimizer step to `.grad` of the trainable parameters.

        The loss is the sum over all label tokens of the step divided by their number.

        Args:
            micro_batches: Each with input_ids (B, T) and labels (B, T; -100 for none), optionally
                attention_mask and position_ids; best on the host.
            dropout_seed: Seeds dropout; None draws one from torch's generator.
            num_label_tokens: What the sum of the losses is divided by; None counts those of the
                micro-batches. Where several processes share a step, it is the number of all.
            order: Layer-major, or micro-batch-major as a baseline.

        Raises:
            UnsupportedModelError: The model passes a layer something that could carry state; no
                gradient was touched.
            OffloadError: No token has a label, or the engine is detached.
            TransferError: A copy failed; gradients may be partial and the caller should zero them.
        """
        self._require_attached()
        labelled = [with_labels(batch, self._device.torch_device) for batch in micro_batches]
        if num_label_tokens is None:
            num_label_tokens = sum(batch.num_label_tokens for batch in labelled)
        if num_label_tokens == 0:
            raise OffloadError(
                f"none of the {len(micro_batches)} micro-batches has a token with a label",
                limit="a step needs at least one label that is not -100, behind the first token",
                hint="look at `labels`: the prompt may be all that was left",
            )
        if dropout_seed is None:
            dropout_seed = int(torch.randint(2**31, ()).item())
        schedule = training_schedule(
            layer_bytes=self.layer_bytes,
            ring=self._ring,
            num_micro_batches=len(micro_batches),
            order=order,
            trains_front=self._trains_front,
        )
        with self._consistent(schedule):
            state, events = self._executor.train(
                schedule, labelled, num_label_tokens=num_label_tokens, seed=dropout_seed
            )
        return self._result(schedule, state, events, num_label_tokens)

    def forward(self, batch: Batch, *, positions: torch.Tensor | None = None) -> ForwardResult:
        """Run one batch without gradients, in the mode (`train` or `eval`) that the model is in.

        Args:
            batch: As for `forward_backward`. With labels the loss is computed, else logits.
            positions: Without labels: the token position of each row to compute logits for, (B,).
        """
        self._require_attached()
        torch_device = self._device.torch_device
        labels = [with_labels(batch, torch_device)] if "labels" in batch else []
        schedule = forward_schedule(
            layer_bytes=self.layer_bytes, ring=self._ring, num_micro_batches=1
        )
        inputs = to_device({k: v for k, v in batch.items() if k != "labels"}, torch_device)
        if positions is not None:
            positions = positions.to(torch_device)
        with self._consistent(schedule):
            state, _ = self._executor.evaluate(schedule, [inputs], labels, positions)
            self._device.finish()
        return ForwardResult(
            loss_sum=float(torch.stack(state.losses).sum()) if state.losses else 0.0,
            num_label_tokens=sum(batch.num_label_tokens for batch in labels),
            logits=state.logits.get(0),
            num_loads=schedule.num_loads,
        )

    def wait(self) -> None:
        """Wait until the device has done all that was issued."""
        self._device.finish()

    def close(self) -> None:
        """End the lanes and unlock the memory, without another copy of the layers.

        What trains stays as it is; the layers' frozen weights are left wherever they were.
        """
        if self._is_attached:
            self._is_attached = False
            self._device.close()
            self._slab.close()

    def detach(self) -> None:
        """Give the layers' parameters memory of their own, where the model came from.

        The layers take their memory twice until the engine is let go.
        """
        if not self._is_attached:
            return
        self.close()
        for layer in range(len(self.layer_bytes)):
            self._slab.give_back(layer, self._home)
        self._model.to(self._home)
        for module in self._checkpointing:
            _set_checkpointing(module, is_on=True)

    def _result(
        self,
        schedule: Schedule,
        state: PassState,
        events: Sequence[Event],
        num_label_tokens: int,
    ) -> StepResult:
        return StepResult(
            executor=self._executor,
            device=self._device,
            schedule=schedule,
            state=state,
            events=events,
            num_label_tokens=num_label_tokens,
        )

    @contextmanager
    def _consistent(self, schedule: Schedule) -> Iterator[None]:
        """Note what the ring holds afterwards; nothing is known of it when the pass fails."""
        try:
            yield
        except BaseException:
            self._ring = cold_ring(len(self._ring))
            self._device.abort()
            raise
        self._ring = schedule.ring_after

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise OffloadError(
                "the engine is detached",
                limit="a detached engine cannot run",
                hint="call `offload.attach(model, ...)` again",
            )


def _streamed_parameters(layered: LayeredModel) -> list[list[nn.Parameter]]:
    """Return each layer's frozen parameters that nothing else uses.

    Raises:
        UnsupportedModelError: Nothing in the layers is frozen.
    """
    in_layers = Counter(id(p) for layer in layered.layers for p in layer.parameters())
    owners = Counter(
        id(p) for module in layered.model.modules() for p in module.parameters(recurse=False)
    )
    groups = [
        [
            p
            for p in layer.parameters()
            if not p.requires_grad and in_layers[id(p)] == 1 and owners[id(p)] == 1
        ]
        for layer in layered.layers
    ]
    if not any(groups):
        raise UnsupportedModelError(
            f"{type(layered.model).__name__} has no frozen parameter in its layers",
            limit="only frozen weights are streamed",
            hint="freeze the base model and add an adapter, e.g. `peft.get_peft_model(model, ...)`",
        )
    return groups


def _only_device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise UnsupportedModelError(
            f"the model's parameters are on {sorted(map(str, devices))}",
            limit="they must be on one device, with values",
            hint='load it on the host: `from_pretrained(..., device_map="cpu")`',
        )
    return devices.pop()


def _move_the_rest(model: nn.Module, records: Sequence[Record], torch_device: torch.device) -> None:
    """Move parameters outside the slots, and all buffers, to the compute device."""
    streamed = {id(field.parameter) for record in records for field in record.fields}
    for parameter in model.parameters():
        if id(parameter) not in streamed:
            parameter.data = parameter.data.to(torch_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(torch_device))


def _trains_front(layered: LayeredModel) -> bool:
    """Tell whether anything outside the layers trains."""
    in_layers = {id(parameter) for parameter in layered.layers.parameters()}
    return any(p.requires_grad and id(p) not in in_layers for p in layered.model.parameters())


def _switch_off_checkpointing(model: nn.Module) -> list[nn.Module]:
    """Switch Hugging Face's gradient checkpointing off, a visit being the checkpoint; say where."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        _set_checkpointing(module, is_on=False)
    return switched


def _set_checkpointing(module: nn.Module, *, is_on: bool) -> None:
    cast("Any", module).gradient_checkpointing = is_on
