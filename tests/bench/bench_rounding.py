"""Losses of adapters kept in float32, in bf16 rounded at random, and in bf16 rounded to nearest.

    python -m tests.bench.bench_rounding [--steps 300] [--seeds 3]

A small Qwen3 with random weights learns to repeat 16 rows of random tokens by LoRA of rank 8, with
AdamW at a usual learning rate, on this machine's CPU. Printed are losses, the mean of ten steps and
of all seeds: at the start, at three places, at the end.
"""

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.adapter.lora import add_lora, trained
from finetune.recipe.sections import AdapterSection, TrainSection
from finetune.training import optimizer
from finetune.training.optimizer import AdapterUpdate, learning_rate
from finetune.training.ranks import Ranks

NUM_ROWS, ROWS_PER_STEP, LEN, VOCAB = 16, 4, 24, 64
WINDOW = 10
SHAPE: Any = Qwen3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
)


def losses(kept_in: str, *, seed: int, num_steps: int, lr: float) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(seed)
    base: Any = Qwen3ForCausalLM(SHAPE)
    rows = torch.randint(VOCAB, (NUM_ROWS, LEN))
    section = AdapterSection.model_validate({"rank": 8, "alpha": 16, "dtype": kept_in})
    model = add_lora(base, section, seed=seed).train()
    train = TrainSection(grad_accum_steps=1, steps=num_steps, lr=lr, schedule="linear", seed=seed)
    weights = trained(model)
    rounded = weights if kept_in == "bfloat16" else ()
    update = AdapterUpdate(
        weights, train=train, loraplus_ratio=None, ranks=Ranks(), rounded=rounded
    )
    found = []
    for step in range(num_steps):
        ids = rows[torch.arange(ROWS_PER_STEP) + ROWS_PER_STEP * step % NUM_ROWS]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        update.gather(loss.item(), loss_scale=1.0)
        update.apply(lr=learning_rate(step, train, num_steps=num_steps))
        found.append(loss.item())
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    words = parser.parse_args()
    at_random = optimizer.round_at_random
    places = [words.steps * number // 4 - WINDOW for number in range(1, 5)]
    table = Table("kept in", "first", *(f"steps {p + 1}-{p + WINDOW}" for p in places), "by seed")
    for name, kept_in, rounding in (
        ("float32", "float32", at_random),
        ("bf16, at random", "bfloat16", at_random),
        ("bf16, to nearest", "bfloat16", lambda x, generator: x.bfloat16()),
    ):
        optimizer.round_at_random = rounding  # to compare with
        runs = [
            losses(kept_in, seed=seed, num_steps=words.steps, lr=words.lr)
            for seed in range(words.seeds)
        ]
        means = [statistics.mean(x for r in runs for x in r[p : p + WINDOW]) for p in places]
        ends = ", ".join(f"{statistics.mean(run[-WINDOW:]):.4f}" for run in runs)
        first = statistics.mean(run[0] for run in runs)
        table.add_row(name, f"{first:.4f}", *(f"{mean:.4f}" for mean in means), ends)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
