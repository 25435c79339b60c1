"""The streamed Trainers next to the plain ones: losses step by step, and what is apart at the end.

    python -m tests.bench.bench_trainer        (pip install ".[trl]")

Tiny models in fp32 on a CPU; 17 rows, 2 in a micro-batch, 3 of these in a step, 2 epochs, clipping
and weight decay. Each pair trains from the same weights on the same rows.
"""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import Trainer

from finetune.integrations.trainer import SluiceTrainer
from tests.parity.sft_trainers import both
from tests.parity.steps import MODELS, tiny
from tests.parity.trainers import differences, history, made

CONSOLE = Console(width=100, highlight=False)
OPTIMIZERS = ("sgd", "adamw_torch")


def by_transformers(folder: Path, model: str, optim: str) -> tuple[Any, Any]:
    """Train with transformers' Trainer, and with ours."""
    found = []
    for kind in (Trainer, SluiceTrainer):
        found.append(made(kind, folder, model=tiny(model), optim=optim))
        found[-1].train()
    return found[0], found[1]


def by_trl(folder: Path, case: str, optim: str) -> tuple[Any, Any]:
    """Train with TRL's SFTTrainer, and with ours."""
    packing = {"packing": True, "max_length": 32} if case == "packed" else {}
    return both(folder, "answers", model="qwen3", optim=optim, **packing)


def show(name: str, plain: Any, ours: Any) -> None:
    """Print what is apart."""
    found = differences(plain, ours)
    CONSOLE.print(
        f"{name:32} {found.losses:8.1e} {found.grad_norms:8.1e} {found.eval_losses:8.1e}"
        f" {found.adapter:8.1e}"
    )


def main() -> None:
    """Run all pairs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain, ours = by_transformers(folder, "qwen3", "adamw_torch")
        CONSOLE.print("step        plain     streamed")
        losses = zip(history(plain, "loss"), history(ours, "loss"), strict=True)
        for step, (a, b) in enumerate(losses, start=1):
            CONSOLE.print(f"{step:4} {a:12.7f} {b:12.7f}")
        CONSOLE.print(f"\n{'relative difference of':32}     loss     norm     eval  adapter")
        for optim in OPTIMIZERS:
            for model in MODELS:
                show(f"Trainer {model} {optim}", *by_transformers(folder, model, optim))
            for case in ("padded", "packed"):
                show(f"SFTTrainer {case} {optim}", *by_trl(folder, case, optim))


if __name__ == "__main__":
    main()
