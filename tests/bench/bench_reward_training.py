"""Training a reward model against TRL's trainer: losses and metrics of the same steps.

    python -m tests.bench.bench_reward_training [--steps 10]        (pip install trl==1.16.0)

The quickstart's model in float32 as a sequence classifier, with LoRA on its attention and a new
head. TRL trains it with one micro-batch per step; what its collator gives to each step is recorded,
and the engine then trains a copy of the same model on the same tokens, streamed, each step cut in
two, with the same AdamW. Printed are the largest differences of any step, relative to the larger of
1 and TRL's value.
"""

import argparse
import copy
import math
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.data.step_rows import StepRows
from finetune.recipe.extensions import ObjectiveSection, StepData
from offload.engine.engine import Engine
from tests.bench.bench_preference_training import (
    LR,
    MODEL,
    NUM_ROWS,
    Batch,
    Norms,
    halves,
    rows,
    trl_options,
)
from tests.parity.steps import OPTIONS

LORA = LoraConfig(
    task_type="SEQ_CLS",
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj", "o_proj"],
    modules_to_save=["score"],
)
NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/mean": "mean_reward",
    "rewards/min": "min_reward",
    "rewards/max": "max_reward",
}
"""Our names of metrics, and TRL's."""


def classifier() -> Any:
    """Load the model with a new head, which is drawn."""
    return AutoModelForSequenceClassification.from_pretrained(
        MODEL, num_labels=1, dtype=torch.float32
    )


def theirs(
    center: float, num_steps: int, folder: str, *, has_margins: bool
) -> tuple[nn.Module, list[Batch], list[Mapping[str, float]]]:
    """Train with TRL; return the model before, the batches of its steps, and what it logs."""
    from datasets import Dataset
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    torch.manual_seed(0)
    config = RewardConfig(
        center_rewards_coefficient=center or None,
        **trl_options(folder, num_steps=num_steps),
    )
    norms = Norms()
    pairs = rows(NUM_ROWS * num_steps, is_paired=True)
    if has_margins:
        pairs = [row | {"margin": (number % 3) / 4} for number, row in enumerate(pairs)]
    trainer = RewardTrainer(
        model=classifier(),
        args=config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=copy.deepcopy(LORA),
        callbacks=[norms],
    )
    before = get_peft_model(classifier(), copy.deepcopy(LORA))
    before.load_state_dict(trainer.model.state_dict(), strict=True)
    base: Any = before.get_base_model()
    base.config.pad_token_id = trainer.model.config.pad_token_id
    batches: list[Batch] = []
    logs: list[Mapping[str, float]] = []
    compute = trainer.compute_loss

    def recorded(model: nn.Module, inputs: Batch, *others: Any, **named: Any) -> Any:
        batches.append({name: value.clone() for name, value in inputs.items()})
        found = compute(model, inputs, *others, **named)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        logs.append({**metrics, "loss": found.item()})
        return found

    trainer.compute_loss = recorded
    trainer.train()
    by_step = zip(logs, norms.found, strict=True)
    return before, batches, [{**log, "grad_norm": norm} for log, norm in by_step]


def ours(center: float, model: nn.Module, batches: list[Batch]) -> list[Mapping[str, float]]:
    """Train on the same batches, each cut into two micro-batches; return what is measured."""
    section = ObjectiveSection.model_validate({"method": "reward", "beta": center})
    engine: Any = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    found: list[Mapping[str, float]] = []
    for step in batches:
        ids, mask = step["input_ids"], step["attention_mask"]
        num = len(ids)
        last = mask.sum(1) - 1
        labels = torch.full_like(ids, -100)
        labels[torch.arange(num), last] = ids[torch.arange(num), last]
        whole = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        margins = step.get("margin", torch.zeros(num // 2))
        known = StepRows(
            groups_R=torch.arange(num // 2).repeat(2),
            values_R=torch.cat((1 + margins.double(), torch.zeros(num // 2))),
            num_trained=num,
        )
        # The chosen and the rejected answer of a pair are in different micro-batches.
        cut = [{name: part[at] for name, part in whole.items()} for at in halves(num)]
        result = engine.forward_backward(
            cut, objective=section.objective(StepData(rows=known, seq_len=256))
        )
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {NAMES.get(name, name): value for name, value in result.metrics.items()}
        found.append({**metrics, "loss": result.loss, "grad_norm": float(norm)})
    engine.detach()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    num_steps = parser.parse_args().steps
    table = Table("reward", "first", "last", "loss differs by", "metrics", "gradient norms")
    for name, center, has_margins in (
        ("plain", 0.0, False),
        ("margins", 0.0, True),
        ("margins, centred by 0.01", 0.01, True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            model, batches, logs = theirs(center, num_steps, folder, has_margins=has_margins)
        found = ours(center, model, batches)
        assert len(found) == len(logs) == num_steps
        worst = {"loss": 0.0, "grad_norm": 0.0, "metrics": 0.0}
        for own, logged in zip(found, logs, strict=True):
            assert {*NAMES.values()} <= own.keys() & logged.keys()
            for metric in own.keys() & logged.keys():
                apart = abs(own[metric] - logged[metric]) / max(1.0, abs(logged[metric]))
                assert math.isfinite(apart), metric
                kind = metric if metric in worst else "metrics"
                worst[kind] = max(worst[kind], apart)
        shown = [f"{worst[kind]:.1e}" for kind in ("loss", "metrics", "grad_norm")]
        table.add_row(name, f"{logs[0]['loss']:.5f}", f"{logs[-1]['loss']:.5f}", *shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
