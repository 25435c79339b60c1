"""AdamW with two moments in fp32, by torch.

Source: arXiv:1711.05101.
"""

from offload.plan.facts.optimizer import MEAN, SQUARE, Optimizer, Shape, States, Step
from offload.tensors import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8  # as torch.optim.AdamW
SETTINGS = {"betas": list(BETAS), "eps": EPS}


def states(shape: Shape) -> dict[str, tuple[Shape, str]]:
    """Return both moments."""
    return {MEAN: (shape, "float32"), SQUARE: (shape, "float32")}


def update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
    """Update a weight by torch's fused kernel."""
    import torch
    from torch.optim.adamw import adamw

    adamw(
        [weight],
        [gradient],
        [states[MEAN]],
        [states[SQUARE]],
        [],
        [torch.full((), step.number - 1.0, device=weight.device)],
        fused=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=EPS,
        maximize=False,
    )


EXTENSION = Optimizer(
    doc="keeps two moments",
    states=states,
    update=update,
    settings=SETTINGS,
    made_by="torch.optim:AdamW",
    update_bytes=92,  # unfused: 20 passes
    num_ops=14,
    is_joint=True,
    moments={MEAN: "exp_avg", SQUARE: "exp_avg_sq"},
)
