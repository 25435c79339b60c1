"""Plain gradient descent: no state, and no scale of its own; torch's without momentum."""

from offload.plan.facts.optimizer import Optimizer, States, Step
from offload.tensors import Tensor


def _update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
    weight.mul_(1 - step.lr * step.weight_decay).add_(gradient, alpha=-step.lr)


EXTENSION = Optimizer(
    doc="keeps nothing and scales no step",
    states=lambda _: {},
    update=_update,
    made_by="torch.optim:SGD",
    update_bytes=32,  # 5 passes
    num_ops=5,
    moments={},
    aliases=("sgd",),
)
