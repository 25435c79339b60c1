"""The input embedding in host memory: how the rows of a micro-batch's tokens come to the device.

Of the embedding a step reads the rows of its tokens alone. They are gathered on the host, each
once, into one of a few page-locked buffers, copied to one of as many on the device, and looked up
there by the front of the micro-batch.
"""

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane

NUM_ROW_BUFFERS = 2  # one is filled while another is copied, or looked up


def looked_up(front: Line, num_bytes: int) -> tuple[Line, Line, Line]:
    """Return the lines that bring the rows that a front reads, and the front's own.

    Args:
        front: It runs one micro-batch.
        num_bytes: Of the rows.
    """
    (op,) = front.ops
    buffer = op.micro_batch_index % NUM_ROW_BUFFERS
    gathered: Resource = ("gathered rows", buffer, 0)
    arrived: Resource = ("rows", buffer, 0)
    look_up = op._replace(lane=Lane.HOST, kind=Kind.LOOK_UP, buffer=buffer, num_bytes=num_bytes)
    rows = look_up._replace(lane=Lane.H2D, kind=Kind.ROWS)
    return (
        Line(ops=(look_up,), writes=(gathered,)),
        Line(ops=(rows,), reads=(gathered,), writes=(arrived,)),
        front._replace(ops=(op._replace(buffer=buffer),), reads=(*front.reads, arrived)),
    )
