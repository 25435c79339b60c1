"""The update of a layer as lines of a step: on the host before its load, or on the device after it.

On the host the weights are changed in memory, and the load copies what is there. On the device the
layer's gradients and optimizer states come up behind its old weights, the update is computed in the
slot before the layer's first visit, and new weights and states go down. Gradients come back to the
buffer that they left from in the backward, which has room for states too. There are two of these
buffers: while one is updated and leaves, the next layer's gradients and states arrive.

Source: of optimizer states on the host that pass through the device, arXiv:2101.06840, where the
CPU updates; here either place takes the same gradients, norm and learning rate: those of the step
that has ended.
"""

from collections.abc import Iterator

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane, Op


def host_update(layer: int, gradient_bytes: int) -> Line:
    """Return the update of a layer in host memory."""
    op = Op(lane=Lane.HOST, kind=Kind.UPDATE, layer=layer, num_bytes=gradient_bytes)
    return Line(ops=(op,), reads=(gradients_on_host(layer),), writes=(weights_on_host(layer),))


def device_update(
    layer: int,
    *,
    slot: int,
    buffer: int,
    gradient_bytes: int,
    state_bytes: int,
    layer_bytes: int,
    piece_bytes: int,
) -> Iterator[Line]:
    """Yield the lines that follow the load of a layer which is updated on the device."""
    brought, weights = gradients_on_device(buffer), slot_of(slot)
    op = Op(lane=Lane.H2D, kind=Kind.STATES, layer=layer, buffer=buffer)
    pieces = op.pieces(gradient_bytes + state_bytes, piece_bytes)
    yield Line(ops=pieces, reads=(gradients_on_host(layer),), writes=(brought,))
    op = Op(lane=Lane.COMPUTE, kind=Kind.UPDATE, layer=layer, slot=slot, buffer=buffer)
    yield Line(ops=(op._replace(num_bytes=gradient_bytes),), writes=(brought, weights))
    op = Op(lane=Lane.D2H, kind=Kind.UPDATED, layer=layer)
    pieces = op._replace(slot=slot).pieces(layer_bytes, piece_bytes)
    yield Line(ops=pieces, reads=(weights,), writes=(weights_on_host(layer),))
    pieces = op._replace(buffer=buffer).pieces(state_bytes, piece_bytes)
    yield Line(ops=pieces, reads=(brought,))


def slot_of(slot: int) -> Resource:
    """Return the weights in a slot."""
    return ("slot", slot, 0)


def weights_on_host(layer: int) -> Resource:
    """Return a layer's weights in host memory."""
    return ("weights", layer, 0)


def gradients_on_host(layer: int) -> Resource:
    """Return the sums of a layer's gradients in host memory."""
    return ("gradients on the host", layer, 0)


def gradients_on_device(buffer: int) -> Resource:
    """Return a buffer of a layer's gradients, and of its states while it is updated."""
    return ("gradient", buffer, 0)
