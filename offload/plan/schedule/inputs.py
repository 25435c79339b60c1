"""Layer inputs that wait in host memory for their backward visit: how they leave and come back."""

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane, Op


def stashed(layer: int, m: int, num_bytes: int, kept: tuple[Resource, ...]) -> Line:
    """Return the copy of a micro-batch's layer input to host memory, from where it is kept."""
    op = Op(lane=Lane.D2H, kind=Kind.STASH, layer=layer, micro_batch=m, num_bytes=num_bytes)
    return Line(ops=(op,), reads=kept, writes=(("stash", layer, m),))


def fetched(layer: int, m: int, num_bytes: int, buffer: int) -> Line:
    """Return the copy of a micro-batch's layer input back to a buffer on the device."""
    op = Op(lane=Lane.H2D, kind=Kind.FETCH, layer=layer, micro_batch=m, buffer=buffer)
    ops = (op._replace(num_bytes=num_bytes),)
    return Line(ops=ops, reads=(("stash", layer, m),), writes=(in_buffer(buffer),))


def in_buffer(buffer: int) -> Resource:
    """Return a buffer on the device that layer inputs come back to."""
    return ("fetched", buffer, 0)
