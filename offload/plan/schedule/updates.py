"""The update of a layer as lines of a step: on the host, before its load copies what is there.

Source: of updates by the CPU, arXiv:2101.06840; here they take the norm and the learning rate of
the step that has ended.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane, Op

if TYPE_CHECKING:
    from offload.plan.schedule.schedule import TransferSizes

NUM_GRADIENT_BUFFERS = 2  # layers whose gradients are on the device: one fills, one leaves


def leaving_gradients(layer: int, sizes: "TransferSizes") -> Iterator[Line]:
    """Yield the copies of a layer's gradients to the host, if its own weights train.

    Args:
        layer: Which layer.
        sizes: Of all layers.
    """
    num_bytes, buffered = sizes.gradient_bytes[layer], gradients_of(layer, sizes)
    if num_bytes:
        buffer = layer % NUM_GRADIENT_BUFFERS
        op = Op(lane=Lane.D2H, kind=Kind.GRADIENT, layer=layer, buffer=buffer)
        pieces = op.pieces(num_bytes, sizes.piece_bytes)
        yield Line(ops=pieces, reads=buffered, writes=(gradients_on_host(layer),))


def gradients_of(layer: int | None, sizes: "TransferSizes") -> tuple[Resource, ...]:
    """Return the device buffer of a layer's gradients; none if its own weights are frozen."""
    if layer is None or not sizes.gradient_bytes[layer]:
        return ()
    return (gradients_on_device(layer % NUM_GRADIENT_BUFFERS),)


def host_update(layer: int, sizes: "TransferSizes") -> Line:
    """Return the update of a layer in host memory.

    Args:
        layer: Which layer.
        sizes: Of all layers.
    """
    num_bytes = sizes.gradient_bytes[layer]
    op = Op(lane=Lane.HOST, kind=Kind.UPDATE, layer=layer, num_bytes=num_bytes)
    return Line(ops=(op,), reads=(gradients_on_host(layer),), writes=(weights_on_host(layer),))


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
    """Return a buffer of a layer's gradients."""
    return ("gradient", buffer, 0)


def rank_gradients(layer: int | None, run: int) -> Resource:
    """Return what a rank has added up of a layer's gradients, or of those outside the layers."""
    return ("gradients of a rank", -1 if layer is None else layer, run)
