"""Means of gradients that are rounded to the nearest bf16 after each update.

Where gradients vanish, a mean over 10 (AdamW) or 100 (Lion) of them falls by a tenth or a
hundredth per step, and half the distance to the next bf16 number is at most a part in 256. A
mean of squares over 1,000 would not fall at all, so it is never kept so.
"""

from offload.plan.facts.optimizer import MEAN, OPTIMIZERS, Optimizer, States, Step
from offload.tensors import Tensor


def with_mean_in_bf16(name: str, *, doc: str, core_s: float) -> Optimizer:
    """Return an optimizer of weights in RAM with the mean of another in bf16.

    It computes in fp32, as that does.
    """
    other = OPTIMIZERS[name]
    update_in_fp32 = other.update
    assert update_in_fp32 is not None

    def update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        mean = states[MEAN].float()
        update_in_fp32(weight, gradient, {**states, MEAN: mean}, step)
        states[MEAN].copy_(mean)

    return Optimizer(
        doc=doc,
        states=lambda shape: {**other.states(shape), MEAN: (shape, "bfloat16")},
        update=update,
        settings={**other.settings, "mean": "bfloat16"},
        core_s=core_s,
        instead=name,
    )
