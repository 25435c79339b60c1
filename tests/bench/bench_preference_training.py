"""Training on preferences against TRL's trainers: losses and metrics of the same steps.

    python -m tests.bench.bench_preference_training [--steps 10]        (pip install trl==1.16.0)

The quickstart's model in float32, with LoRA on its attention. TRL trains it with one micro-batch
per step; what its collator gives to each step is recorded, and the engine then trains a copy of
the same model on the same tokens, streamed, with the same AdamW. Printed are the largest
differences of any step, relative to the larger of 1 and TRL's value.
"""

import argparse
import copy
import math
import random
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from finetune.data.step_rows import StepRows
from finetune.recipe.extensions import ObjectiveSection, StepData
from finetune.recipe.recipe import recipes_dir
from offload.engine.engine import Engine
from tests.parity.steps import OPTIONS

LR, NUM_ROWS = 1e-3, 4
WORDS = ("red", "green", "blue", "stone", "river", "light", "paper", "music")
MODEL = str(recipes_dir() / "quickstart" / "model")
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
Batch = dict[str, torch.Tensor]


def rows(num: int, *, is_paired: bool) -> list[dict[str, Any]]:
    """Draw prompts, and answers in upper case over the same in lower case."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(num):
        prompt = "Say: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        answers = [prompt[5:].upper() + "!" * rng.randint(0, 3), prompt[5:]]
        if is_paired:
            found.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            found.append(
                {"prompt": prompt, "completion": answers[number % 2], "label": number % 2 == 0}
            )
    return found


class Norms(TrainerCallback):
    """Keeps the gradient norm of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep it."""
        if "grad_norm" in logs:
            self.found.append(float(logs["grad_norm"]))


def fresh() -> nn.Module:
    """Load the model, with adapters."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return get_peft_model(model, copy.deepcopy(LORA))


def trl_options(folder: str, *, num_steps: int) -> dict[str, Any]:
    """Return what all of TRL's trainers are given: one micro-batch a step, rows in their order."""
    return {
        "output_dir": folder,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": NUM_ROWS,
        "gradient_accumulation_steps": 1,
        "max_steps": num_steps,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def theirs(
    method: str, loss: str, num_steps: int, folder: str
) -> tuple[nn.Module, list[Batch], list[Mapping[str, float]]]:
    """Train with TRL; return the model before, the batches of its steps, and what it logs."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    torch.manual_seed(0)
    is_paired = method == "dpo"
    trainer_class, config_class = (DPOTrainer, DPOConfig) if is_paired else (KTOTrainer, KTOConfig)
    config = config_class(
        loss_type=[loss] if is_paired else loss,
        **trl_options(folder, num_steps=num_steps),
        router_aux_loss_coef=0.0,
    )
    norms = Norms()
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows(NUM_ROWS * num_steps, is_paired=is_paired)),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=LORA,
        callbacks=[norms],
    )
    before = fresh()  # TRL replaces the forward of its own
    before.load_state_dict(trainer.model.state_dict(), strict=True)
    batches: list[Batch] = []
    logs: list[Mapping[str, float]] = []
    compute = trainer._compute_loss

    def recorded(model: nn.Module, inputs: Batch, return_outputs: object) -> Any:
        batches.append({name: value.clone() for name, value in inputs.items()})
        found = compute(model, inputs, return_outputs)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        logs.append({**metrics, "loss": found.item()})
        return found

    trainer._compute_loss = recorded
    trainer.train()
    by_step = zip(logs, norms.found, strict=True)
    return before, batches, [{**log, "grad_norm": norm} for log, norm in by_step]


def batch(of: Batch, prefix: str = "") -> Batch:
    """Return rows as the engine takes them."""
    ids, mask = of[f"{prefix}input_ids"], of[f"{prefix}completion_mask"]
    return {
        "input_ids": ids,
        "attention_mask": of[f"{prefix}attention_mask"],
        "labels": ids.masked_fill(mask == 0, -100),
    }


def ours(
    method: str, loss: str, model: nn.Module, batches: list[Batch]
) -> list[Mapping[str, float]]:
    """Train on the same batches, each cut into two micro-batches; return what is measured."""
    section = ObjectiveSection.model_validate({"method": method, "loss": loss})
    engine: Any = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    found: list[Mapping[str, float]] = []
    for step in batches:
        whole = batch(step)
        num = len(whole["input_ids"])
        if method == "dpo":
            groups, values = torch.arange(num // 2).repeat(2), torch.arange(num) < num // 2
            scored: list[Batch] = []
        else:
            groups, values = torch.arange(num).repeat(2), torch.cat((step["label"], step["label"]))
            scored = [batch(step, "KL_")] if "KL_input_ids" in step else []
            if not scored:
                groups, values = groups[:num], values[:num]
        known = StepRows(groups_R=groups, values_R=values.float(), num_trained=num)
        # Chosen and rejected answers of one pair lie in different micro-batches.
        cut = [{name: part[at] for name, part in whole.items()} for at in halves(num)]
        objective = section.objective(StepData(rows=known, seq_len=256))
        result = engine.forward_backward(cut, objective=objective, scored=scored)
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append({**result.metrics, "loss": result.loss, "grad_norm": float(norm)})
    engine.detach()
    return found


def halves(num: int) -> tuple[slice, slice]:
    """Cut a step in two."""
    return slice(num // 2), slice(num // 2, None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    num_steps = parser.parse_args().steps
    table = Table("loss", "first", "last", "loss differs by", "metrics", "gradient norms")
    cases = [("dpo", loss) for loss in ("sigmoid", "ipo", "aot", "apo_zero", "sppo_hard")]
    for method, loss in [*cases, ("kto", "kto"), ("kto", "apo_zero_unpaired")]:
        with tempfile.TemporaryDirectory() as folder:
            model, batches, logs = theirs(method, loss, num_steps, folder)
        found = ours(method, loss, model, batches)
        assert len(found) == len(logs) == num_steps
        worst = {"loss": 0.0, "grad_norm": 0.0, "metrics": 0.0}
        for own, logged in zip(found, logs, strict=True):
            for name in own.keys() & logged.keys():
                apart = abs(own[name] - logged[name]) / max(1.0, abs(logged[name]))
                assert math.isfinite(apart), name
                kind = name if name in worst else "metrics"
                worst[kind] = max(worst[kind], apart)
        shown = [f"{worst[kind]:.1e}" for kind in ("loss", "metrics", "grad_norm")]
        table.add_row(
            f"{method} {loss}", f"{logs[0]['loss']:.5f}", f"{logs[-1]['loss']:.5f}", *shown
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
