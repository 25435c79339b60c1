"""The time that an MLP computed in tiles of tokens takes in addition to one that is not.

The arithmetic of a forward is the same. Each tile launches the operators again, and reads again
what does not grow with its tokens, such as the casts of A and B: that is what a tile of no tokens
would take. Outputs and gradients of tiles are copied into one tensor, and each tile's gradients of
A and B are added up in fp32.

The backward computes each tile again with its graph, except the down product. So where something
reads the MLP's value, as a norm after it does, a recompute computes its other products twice; and a
layer whose graph was kept computes them once more than otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.plan.facts.facts import LayerFacts, adapted_linears
from offload.plan.facts.linears import FP32_BYTES, Linear
from offload.plan.time.adapters import branches
from offload.plan.time.pointwise import mlp_work
from offload.plan.time.pricer import SUM_PASSES, Pricer
from offload.plan.time.work import Work

_COPY_PASSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """What tiles add: to a forward, to a recompute, and to the backward of a kept graph.

    Attributes:
        forward: To a forward.
        recompute: To a recompute: of the MLP's value, if something reads it.
        again: The MLP in a backward whose graph was kept; with a recompute, it is part of that.
        backward: To a backward, besides.
    """

    forward: Work
    recompute: Work
    again: Work
    backward: Work


def tiling(at: Pricer, layer: LayerFacts) -> Tiling:
    """Price the tiles of a layer's MLP."""
    mlp = at.workload.tiled(layer)
    if not mlp:
        return Tiling(forward=Work(), recompute=Work(), again=Work(), backward=Work())
    adapted = [x for x in adapted_linears(layer, at.workload.adapter) if x in mlp]
    empty = replace(at, workload=replace(at.workload, micro_batch_size=0, packed_tokens=None))
    more = at.workload.num_tiles - 1
    downs = [x for x in mlp if x.is_down]
    hidden_bytes = at.workload.num_tokens * at.facts.hidden_size * at.workload.dtype_bytes
    copied = at.traffic(_COPY_PASSES * hidden_bytes, num_ops=at.workload.num_tiles)
    added = sum(x.adapter_parameters(at.workload.adapter.rank_of(x)) for x in adapted)
    sums = at.traffic(SUM_PASSES * FP32_BYTES * added, num_ops=2 * len(adapted))
    whole, down = _mlp(at, mlp, adapted), _products(at, downs)
    launched, down_launched = _mlp(empty, mlp, adapted).times(more), _products(empty, downs)
    inside = launched + down_launched.times(-more)  # a tile's graph leaves the down product out
    backward = mlp_work(empty, mlp).backward + _products(empty, mlp)
    backward = backward + branches(empty, adapted, left_out=()).backward
    is_read = at.workload.reads_output(mlp)
    return Tiling(
        forward=launched + copied,
        recompute=inside + (whole + copied if is_read else Work()),
        again=whole + down.times(-1) + inside,
        backward=backward.times(more) + sums.times(at.workload.num_tiles) + copied,
    )


def _mlp(at: Pricer, mlp: Sequence[Linear], adapted: Sequence[Linear]) -> Work:
    """Price an MLP's forward."""
    return (
        _products(at, mlp) + mlp_work(at, mlp).forward + branches(at, adapted, left_out=()).forward
    )


def _products(at: Pricer, linears: Sequence[Linear]) -> Work:
    return sum((at.matmul(linear) for linear in linears), start=Work())
