"""Adafactor: means of squares of rows and columns; a vector keeps all its squares. By torch.

torch makes steps relative to the size of a weight, at least to `eps[1]`. LoRA's B starts at zero,
and with the usual 1e-3 it would not move; with 1 the rate is the root mean square of a step, as it
is about in AdamW. (Tensors that are larger than 1 take larger steps.)

Sources: arXiv:1804.04235; torch/optim/_adafactor.py.
"""

from offload.plan.facts.optimizer import SQUARE, Optimizer, Shape, States, Step
from offload.tensors import Tensor

ROWS, COLUMNS = "rows", "columns"
BETA2_DECAY = -0.8


def _states(shape: Shape) -> dict[str, tuple[Shape, str]]:
    if len(shape) <= 1:
        return {SQUARE: (shape, "float32")}
    *others, rows, columns = shape
    sums = {ROWS: (*others, rows, 1), COLUMNS: (*others, 1, columns)}
    return {name: (of_sums, "float32") for name, of_sums in sums.items()}


def _update(weight: Tensor, gradient: Tensor, states: States, step: Step) -> None:
    import torch
    from torch.optim._adafactor import adafactor

    adafactor(
        [weight],
        [gradient],
        [states.get(ROWS)],
        [states.get(COLUMNS)],
        [states.get(SQUARE)],
        [torch.tensor(step.number - 1.0)],
        lr=step.lr,
        weight_decay=step.weight_decay,
        d=1.0,
        beta2_decay=BETA2_DECAY,
        eps1=None,  # type: ignore[arg-type]
        eps2=1.0,
        maximize=False,
    )


EXTENSION = Optimizer(
    doc="keeps sums of rows and columns",
    states=_states,
    update=_update,
    settings={"eps": [None, 1.0], "beta2_decay": BETA2_DECAY, "d": 1.0},
    is_by_tensor=True,
    core_s=21e-9,  # passes over a whole tensor
    made_by="torch.optim:Adafactor",
    options={"eps": (None, 1.0)},
    update_bytes=80,  # 17 passes: norms, a product, the update in place
    num_ops=24,
    is_small_in=("RAM",),
    option=("factored optimizer", "arXiv:1804.04235"),
    aliases=("adafactor",),
)
