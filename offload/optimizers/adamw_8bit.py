"""AdamW with moments in 8 bits, by bitsandbytes: 2 bytes of state per weight in place of 8.

Moments are a byte each, with a scale for each block of 256 elements, but those of tensors of fewer
than 4,096 elements stay in fp32. Weights in RAM are updated by torch's fused AdamW.

Sources: arXiv:2110.02861; bitsandbytes 0.50 optim/optimizer.py.
"""

import math
from functools import cache

from offload.optimizers import adamw
from offload.plan.facts.optimizer import (
    BLOCK,
    MEAN,
    SCALE,
    SQUARE,
    Optimizer,
    Shape,
    States,
    Step,
)
from offload.tensors import Tensor, device

MIN_ELEMENTS = 4096
IS_SIGNED = {MEAN: True, SQUARE: False}


def states(shape: Shape) -> dict[str, tuple[Shape, str]]:
    """Return codes and scales of both moments; a scale of zero makes any code a zero."""
    if math.prod(shape) < MIN_ELEMENTS:
        return adamw.states(shape)
    blocks = (-(-math.prod(shape) // BLOCK),)
    return {
        **dict.fromkeys(IS_SIGNED, (shape, "uint8")),
        **{name + SCALE: (blocks, "float32") for name in IS_SIGNED},
    }


def _update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    if MEAN + SCALE not in states:
        adamw.update(weight, gradient, states, step)
        return
    codes = _codes(weight.device)
    moments = {
        name: dequantize_blockwise(
            states[name], absmax=states[name + SCALE], code=code, blocksize=BLOCK
        )
        for name, code in codes.items()
    }
    adamw.update(weight, gradient, moments, step)
    for name, code in codes.items():
        quants, found = quantize_blockwise(moments[name], code=code, blocksize=BLOCK)
        states[name].copy_(quants)
        states[name + SCALE].copy_(found.absmax)


@cache
def _codes(where: device) -> dict[str, Tensor]:
    """Return the 256 values that a byte of a moment can have, for a scale of 1."""
    from bitsandbytes.functional import create_dynamic_map

    return {name: create_dynamic_map(signed=one).to(where) for name, one in IS_SIGNED.items()}


EXTENSION = Optimizer(
    doc="keeps its moments in 8 bits (bitsandbytes)",
    states=states,
    update=_update,
    settings={**adamw.SETTINGS, "block": BLOCK},
    core_s=23e-9,  # to 8 bits and back
    made_by="bitsandbytes.optim.adamw:AdamW8bit",
    update_bytes=28,  # 3 passes, and two bytes of state twice
    num_ops=14,
    is_small_in=("device", "RAM"),
    option=("8-bit optimizer", "arXiv:2110.02861"),
    aliases=("adamw_8bit", "adamw_bnb_8bit"),
)
