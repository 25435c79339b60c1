"""A round of learning by reward against TRL's trainer: its loss and gradients on the same answers.

    python -m tests.bench.bench_grpo_training                        (pip install trl==1.16.0)

The quickstart's model learns first letters by reward for three rounds, each of 16 prompts with 8
answers that it samples. TRL's GRPOTrainer is given the adapter as it was before the last round, and
the tokens, rewards and log-probabilities of that round, and computes its loss and gradients, all in
one micro-batch. Printed are both, and their differences.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.bench.bench_preference_training import MODEL
from tests.command import run

NUM_ROUNDS, NUM_ANSWERS, MOST, SEQ_LEN = 3, 8, 8, 56
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, KL": {"loss": "grpo", "beta": 0.04},
    "dr_grpo, temperature 0.7": {"loss": "dr_grpo", "temperature": 0.7},
    "dapo, old log-probabilities": {"importance_sampling_mode": "ratio"},
}


def ours(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Learn by reward; return the metrics of the last round."""
    words = [f"objective.{name}={value}" for name, value in settings.items()]
    words += [f"train.steps={NUM_ROUNDS}", f"output.dir={folder}", "output.eval_every=null"]
    words += ["output.checkpoint_every=1", "adapter.experts=false", "train.warmup_steps=0"]
    assert run("finetune", "quickstart_grpo", *words) == 0
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(rows[-1])
    return found


def theirs(settings: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Return the loss and the norm of the gradients that TRL computes for the last round."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        report_to=[],
        loss_type=settings.get("loss", "dapo"),
        scale_rewards="none" if settings.get("loss") == "dr_grpo" else "group",
        beta=settings.get("beta", 0.0),
        temperature=settings.get("temperature", 1.0),
        num_generations=NUM_ANSWERS,
        max_completion_length=SEQ_LEN if settings.get("loss") == "dr_grpo" else MOST,
        per_device_train_batch_size=16 * NUM_ANSWERS,
        bf16=False,
        gradient_checkpointing=False,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    trainer: Any = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=targets),
    )
    trainer.current_gradient_accumulation_steps = 1  # as its `train` sets it
    trainer.aux_loss_enabled = False  # else it adds the router's loss, which is off here
    model = trainer.model.float().train()
    adapter = load_file(folder / "checkpoints" / f"step-{NUM_ROUNDS - 1:07d}/trained.safetensors")
    left = model.load_state_dict(adapter, strict=False).unexpected_keys
    assert not left, left
    loss = trainer._compute_loss(model, inputs_of(folder, tokenizer, settings))
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss), float(torch.cat(gradients).norm())


def inputs_of(folder: Path, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL's loss reads of the last round: prompts padded left, answers right."""
    round_file = folder / "rounds" / f"{NUM_ROUNDS:06d}.jsonl"
    lines = [json.loads(line) for line in round_file.read_text().splitlines()]
    kept = json.loads((folder / "rounds" / "open.json").read_text())["answers"]
    answers = [one for several in kept for one in several]
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": line["prompt"]}],
                add_generation_prompt=True,
                tokenize=False,
            ),
            add_special_tokens=False,
        )
        for line in lines
    ]
    longest, most = max(map(len, prompts)), max(len(one["tokens"]) for one in answers)
    pad = tokenizer.pad_token_id

    def right(values: list[Any], fill: Any) -> list[Any]:
        return [*values, *[fill] * (most - len(values))]

    rewards = torch.tensor([line["reward"] for line in lines]).view(-1, NUM_ANSWERS)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if settings.get("loss") != "dr_grpo":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[pad] * (longest - len(one)) + one for one in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([right(one["tokens"], pad) for one in answers]),
        "completion_mask": torch.tensor([right([1] * len(one["tokens"]), 0) for one in answers]),
        "advantages": advantages.flatten(),
        "num_items_in_batch": torch.tensor(sum(len(one["tokens"]) for one in answers)),
    }
    if settings.get("importance_sampling_mode") == "ratio":
        old = [right(one["logprobs"], 0.0) for one in answers]
        inputs["old_per_token_logps"] = torch.tensor(old)
    if settings.get("beta"):
        inputs["ref_per_token_logps"] = reference_of(inputs)
    return inputs


def reference_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities (B, T) of the answers by the base."""
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    num = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        logits = base(input_ids=ids, attention_mask=mask).logits[:, -num - 1 : -1]
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][:, :, None])[:, :, 0]


def main() -> None:
    """Print losses and gradient norms of both."""
    table = Table("", "loss", "TRL's", "gradient norm", "TRL's", "relative")
    for name, settings in CASES.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "run"
            row = ours(settings, folder)
            loss, norm = theirs(settings, folder)
        own_norm = row["grad_norm"]
        figures = (row["loss"], loss, own_norm, norm)
        table.add_row(name, *map("{:.6f}".format, figures), f"{abs(own_norm / norm - 1):.1e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
