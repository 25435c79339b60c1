"""The ops of a pass that copy, decode or update; they run on their lanes, and compute no layer."""

from collections.abc import Callable
from functools import partial

import torch

from offload.engine.recompute.attention_outputs import NOTHING
from offload.engine.results import PassState, Places
from offload.engine.streams import Device, copy_on_host
from offload.errors import UnsupportedModelError
from offload.plan.schedule.op import Kind, Op

Table = dict[Kind, Callable[[Op], None]]
"""The function that runs each kind of op in a pass."""


class Transfers:
    """Moves weights, layer inputs, graphs and gradients between their places."""

    def __init__(self, places: Places, device: Device) -> None:
        """Keep the parts; nothing is moved."""
        self._source, self._slots = places.source, places.slots
        self._stash, self._sent = places.stash, places.sent
        self._host_gradients = places.host_gradients
        self._updates = places.updates
        self._embedding, self._head = places.embedding, places.head
        self._device = device

    def table(self, state: PassState) -> Table:
        """Return what runs each kind of transfer in a pass."""
        looked_up: Table = {}
        if self._embedding is not None:
            looked_up[Kind.LOOK_UP] = self._embedding.look_up
            looked_up[Kind.ROWS] = partial(self._embedding.bring, device=self._device)
        if self._head is not None:
            looked_up[Kind.HEAD] = partial(self._head.bring, device=self._device)
        return looked_up | {
            Kind.READ: self._read,
            Kind.LOAD: self._load,
            Kind.DECODE: self._decode,
            Kind.STASH: partial(self._stash_input, state),
            Kind.FETCH: partial(self._fetch_input, state),
            Kind.SEND: partial(self._send, state),
            Kind.RETURN: partial(self._return, state),
            Kind.GRADIENT: self._gradient,
            Kind.UPDATE: lambda op: self._updates.run(op.layer_index),
        }

    def _read(self, op: Op) -> None:
        target = self._slots.staging(op.buffer_index, op.num_bytes)
        self._source.deliver(op.layer_index, op.offset, target, copy_on_host)

    def _load(self, op: Op) -> None:
        target = self._slots.target(op.slot_index, op.offset, op.num_bytes)
        if op.buffer is None:
            self._source.deliver(op.layer_index, op.offset, target, self._device.copy)
        else:
            self._device.copy(target, self._slots.staging(op.buffer, op.num_bytes))

    def _decode(self, op: Op) -> None:
        with torch.no_grad():
            self._slots.decode(op.layer_index, op.slot_index)

    def _stash_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        input_BTD, place = state.inputs[layer, m], self._stash.place(layer, m)
        if input_BTD.nbytes != place.nbytes:
            raise UnsupportedModelError(
                f"layer {layer} is given {tuple(input_BTD.shape)} of {input_BTD.dtype}",
                limit="inputs that wait on the host are (B, T, hidden_size) of the model's type",
                hint='`stash="device"`',
            )
        self._device.copy(place, _bytes(input_BTD))

    def _fetch_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        target = self._stash.buffer(op.buffer_index, op.num_bytes)
        self._device.copy(target, self._stash.place(layer, m))
        like_BTD = state.fronts[m].hidden_BTD
        state.fetched[layer, m] = target.view(like_BTD.dtype).view(like_BTD.shape)

    def _send(self, state: PassState, op: Op) -> None:
        place, buffer = self._sent_places(state, op)
        self._device.copy(place, buffer)

    def _return(self, state: PassState, op: Op) -> None:
        place, buffer = self._sent_places(state, op)
        self._device.copy(buffer, place)
        at = op.layer_index, op.micro_batch_index
        if at in state.sent:
            state.sent[at].is_in(buffer)
        else:
            state.attention[at] = state.attention.get(at, NOTHING).at(buffer)

    def _sent_places(self, state: PassState, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        """Return host and device memory of what was sent; none if it could not be."""
        at = op.layer_index, op.micro_batch_index
        num_bytes = (state.sent.get(at) or state.attention.get(at, NOTHING)).num_bytes
        return self._sent.place(*at)[:num_bytes], self._sent.buffer(op.carrier_index, num_bytes)

    def _gradient(self, op: Op) -> None:
        if not op.offset:
            self._host_gradients.measure(op.layer_index, op.buffer_index)
        sink, gradient = self._host_gradients.leaving(
            op.layer_index, op.buffer_index, op.offset, op.num_bytes
        )
        self._device.copy(sink, gradient)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
