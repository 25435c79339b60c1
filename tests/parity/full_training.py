"""Loops of full training on the host, for tests of what they compute."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.data.steps import StepShare
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import LossScale
from finetune.training.full.update import FullUpdate
from finetune.training.loop import Loop
from finetune.training.ranks import Ranks
from offload.engine.engine import Engine
from offload.plan.facts.optimizer import Optimizer
from tests.parity.steps import MODELS, SHAPE

Batch = dict[str, torch.Tensor]
LR, MAX_NORM = 3e-3, 0.25  # the norm of these gradients is larger in each step
NUM_MICRO_BATCHES = 3


def model_of(name: str = "qwen3") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def wider_model() -> nn.Module:
    """Return a model whose matrices are large enough for states in 8 bits."""
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**shape)).train()


def step_of(number: int) -> list[Batch]:
    """Rows of a simple language (each token is a function of the last), so that a loss can fall."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for width in (9, 12, 15):
        ids = torch.randint(0, 64, (2, width), generator=generator)
        for place in range(1, width):
            ids[:, place] = (5 * ids[:, place - 1] + 3) % 64
        labels = ids.clone()
        labels[:, :2] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def num_labels(batches: Sequence[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def share_of(batches: Sequence[Batch]) -> StepShare:
    return StepShare(
        micro_batches=tuple(batches),
        micro_batch_ids=tuple(range(len(batches))),
        num_tokens=num_labels(batches),
        num_label_tokens=num_labels(batches),
    )


def loop_of(
    model: nn.Module,
    *,
    max_norm: float | None = MAX_NORM,
    optimizer: Optimizer = "adamw",
    lr: float = LR,
    **options: Any,
) -> Loop:
    train = TrainSection(
        what="all",
        grad_accum_steps=NUM_MICRO_BATCHES,
        steps=1000,
        optimizer=optimizer,
        lr=lr,
        schedule="constant",
        max_grad_norm=max_norm,
        weight_decay=0.0,
    )
    engine = attached(model, **options)
    return Loop(
        model=model,
        engine=engine,
        update=FullUpdate(engine, train=train),
        train=train,
        num_steps=1000,
        ranks=Ranks(),
    )


def attached(model: nn.Module, **options: Any) -> Engine:
    """Return an engine of a model whose weights train on the host."""
    options = {"num_slots": 2, **options, "trained_weights": "host"}
    return offload.attach(model, device="cpu", head_chunk_tokens=7, **options)


def engine_of(loop: Loop) -> Engine:
    assert isinstance(loop.engine, Engine)
    return loop.engine


def run(loop: Loop, numbers: Sequence[int]) -> list[float]:
    return [loop.step(number, share_of(step_of(number))).loss for number in numbers]


def values_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.weights.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_skips_alike(loops: Sequence[Loop], rows: Callable[[int], list[Batch]]) -> None:
    """Train two float16 models whose loss has so large a factor that a step overflows."""
    found = []
    for loop in loops:
        loop.scaling = LossScale(factor=2.0**24)
        records = [loop.step(number, share_of(rows(number))) for number in range(12)]
        num_skipped = [record.is_skipped for record in records].count(True)
        assert 0 < num_skipped < 12
        found.append((num_skipped, [record.loss for record in records], values_of(loop)))
    (num, losses, ours), (other_num, other_losses, theirs) = found
    assert (num, losses) == (other_num, other_losses)
    assert_same(ours, theirs)
