"""Lion: the sign of a mean of gradients, with one moment in fp32; bitsandbytes' on the device.

Source: arXiv:2302.06675.
"""

from offload.plan.facts.optimizer import MEAN, Optimizer, States, Step
from offload.tensors import Tensor

BETAS = (0.9, 0.99)


def _update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
    mean, (beta1, beta2) = states[MEAN], BETAS
    direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
    weight.mul_(1 - step.lr * step.weight_decay).add_(direction, alpha=-step.lr)
    mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


EXTENSION = Optimizer(
    doc="keeps one moment",
    states=lambda shape: {MEAN: (shape, "float32")},
    update=_update,
    settings={"betas": list(BETAS)},
    made_by="bitsandbytes.optim.lion:Lion",
    update_bytes=32,  # one kernel: 5 passes
    num_ops=14,
    is_small_in=("RAM",),
    aliases=("lion_32bit",),
)
