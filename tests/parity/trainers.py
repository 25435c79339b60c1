"""Trainers of tiny models, plain and streamed, on the same rows, and what differs between them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune.integrations.trainer import SluiceTrainer, Streaming
from tests.parity.steps import tiny

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
STREAMING = Streaming(num_slots=2)

# 17 rows: with 2 in a micro-batch and 3 of these in a step, an epoch ends with a micro-batch of one
# row and is 3 steps
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "per_device_eval_batch_size": 3,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 3,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.4,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


def rows(num: int = 17, *, seed: int = 3) -> list[dict[str, list[int]]]:
    """Return rows of 5 to 14 tokens, a third of which are a prompt."""
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        ids = [draw.randrange(64) for _ in range(draw.randint(5, 14))]
        third = len(ids) // 3
        found.append({"input_ids": ids, "labels": [-100] * third + ids[third:]})
    return found


def collate(given: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them."""
    width = max(len(row["input_ids"]) for row in given)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (width - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in given]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in given]),
        "attention_mask": torch.tensor([padded([1] * len(row["labels"]), 0) for row in given]),
    }


def made(
    kind: type[Trainer], folder: Path, *, model: PeftModel | None = None, **changes: Any
) -> Any:
    """Return a trainer; options of its constructor are taken out of `changes`."""
    names = ("train_dataset", "eval_dataset", "data_collator", "callbacks", "compute_metrics")
    options: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows()),
        "eval_dataset": Dataset.from_list(rows(7, seed=5)),
        "data_collator": collate,
    }
    options |= {name: changes.pop(name) for name in names if name in changes}
    if issubclass(kind, SluiceTrainer):
        options["streaming"] = changes.pop("streaming", STREAMING)
    arguments = TrainingArguments(output_dir=str(folder / kind.__name__), **ARGUMENTS | changes)
    return kind(model=tiny("llama") if model is None else model, args=arguments, **options)


def adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return what trains."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def history(trainer: Any, name: str) -> list[float]:
    """Return what a trainer has logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """How far a streamed trainer is from the plain one.

    Attributes:
        losses: The largest relative difference of a logged loss.
        grad_norms: Of a logged norm of the gradients, before clipping.
        eval_losses: Of a loss of an evaluation.
        adapter: The largest difference of a weight, relative to the largest weight of its matrix.
    """

    losses: float
    grad_norms: float
    eval_losses: float
    adapter: float


def differences(plain: Any, ours: Any) -> Differences:
    """Compare two trainers that have trained; steps, epochs and learning rates are to be equal."""
    for name in ("step", "epoch", "learning_rate"):
        assert history(plain, name) == history(ours, name)
    trained, streamed = adapter(plain.model), adapter(ours.model)
    assert trained.keys() == streamed.keys()
    return Differences(
        losses=_furthest(history(plain, "loss"), history(ours, "loss")),
        grad_norms=_furthest(history(plain, "grad_norm"), history(ours, "grad_norm")),
        eval_losses=_furthest(history(plain, "eval_loss"), history(ours, "eval_loss")),
        adapter=max(
            float((trained[n] - streamed[n]).abs().max() / trained[n].abs().max()) for n in trained
        ),
    )


def _furthest(plain: Sequence[float], ours: Sequence[float]) -> float:
    assert len(plain) == len(ours)
    return max((abs(a - b) / abs(a) for a, b in zip(plain, ours, strict=True)), default=0.0)


class Heard(TrainerCallback):
    """What callbacks are called for, in order, and at which step."""

    NAMES = (
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_substep_end",
        "on_step_end",
        "on_prediction_step",
        "on_evaluate",
        "on_save",
        "on_log",
        "on_epoch_end",
        "on_train_end",
    )

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        for name in self.NAMES:
            setattr(self, name, self._hearing(name))

    def _hearing(self, name: str) -> Any:
        def hear(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.events.append((name, state.global_step))

        return hear
