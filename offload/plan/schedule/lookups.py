"""The input embedding in host memory: how the rows of a micro-batch's tokens come to the device.

Of the embedding a step reads the rows of its tokens alone. They are gathered on the host, each
once, into one of a few page-locked buffers, copied to one of as many on the device, and looked up
there by the front of the micro-batch.

If the embedding trains there, gradients by these rows go the other way through the same buffers:
after the last visit of a layer no front needs them any more. On the host they are added to the sums
for all rows, one micro-batch after the other. Of several ranks each adds up its own, of the rows
that its step has, and those that update the embedding then add up the sums of all ranks.
"""

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane, Op

ROW_SUMS: Resource = ("sums of gradients by rows", 0, 0)
NUM_ROW_BUFFERS = 2  # one is filled while another is copied, or looked up


def looked_up(front: Line, num_bytes: int) -> tuple[Line, Line, Line]:
    """Return the lines that bring the rows that a front reads, and the front's own.

    Args:
        front: It runs one micro-batch.
        num_bytes: Of the rows.
    """
    (op,) = front.ops
    buffer, gathered, arrived = _buffers(op)
    look_up = op._replace(lane=Lane.HOST, kind=Kind.LOOK_UP, buffer=buffer, num_bytes=num_bytes)
    rows = look_up._replace(lane=Lane.H2D, kind=Kind.ROWS)
    return (
        Line(ops=(look_up,), writes=(gathered,)),
        Line(ops=(rows,), reads=(gathered,), writes=(arrived,)),
        front._replace(ops=(op._replace(buffer=buffer),), reads=(*front.reads, arrived)),
    )


def sent_back(backward: Line, num_bytes: int) -> tuple[Line, Line, Line]:
    """Return the line of a front's backward, and those that take gradients by its rows away.

    Args:
        backward: Of one micro-batch.
        num_bytes: Of the gradients.
    """
    (op,) = backward.ops
    buffer, gathered, arrived = _buffers(op)
    leaving = op._replace(
        lane=Lane.D2H, kind=Kind.ROW_GRADIENTS, buffer=buffer, num_bytes=num_bytes
    )
    added = leaving._replace(lane=Lane.HOST, kind=Kind.ADD_ROWS)
    return (
        backward._replace(ops=(op._replace(buffer=buffer),), writes=(*backward.writes, arrived)),
        Line(ops=(leaving,), reads=(arrived,), writes=(gathered,)),
        Line(ops=(added,), reads=(gathered,), writes=(ROW_SUMS,)),
    )


def reduced_rows(num_bytes: int) -> tuple[Line, ...]:
    """Return the line that adds up the sums of all ranks; none with a single rank.

    Args:
        num_bytes: Of the sums that come from other ranks.
    """
    op = Op(lane=Lane.NETWORK, kind=Kind.REDUCE_ROWS, num_bytes=num_bytes)
    return (Line(ops=(op,), reads=(ROW_SUMS,)),) if num_bytes else ()


def _buffers(op: Op) -> tuple[int, Resource, Resource]:
    """Return the number of a micro-batch's buffers, and what is in them on the host and device."""
    buffer = op.micro_batch_index % NUM_ROW_BUFFERS
    return buffer, ("gathered rows", buffer, 0), ("rows", buffer, 0)
