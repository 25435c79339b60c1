"""SFTTrainers of tiny models, TRL's and streamed, on the same rows. Needs TRL to train."""

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.doubles import tiny_tokenizer
from tests.parity.steps import EXPERTS, SHAPE, with_lora
from tests.parity.trainers import ARGUMENTS, STREAMING

TOKENIZER = tiny_tokenizer()
VOCABULARY = SHAPE | {"vocab_size": len(TOKENIZER)}


def texts(num: int = 17) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdef 123", k=draw.randint(4, 30))) for _ in range(num)]


ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": text} for text in texts()],
    "answers": [{"prompt": text[:3], "completion": text[3:]} for text in texts()],
    "chats": [
        {
            "messages": [
                {"role": "user", "content": text[:3]},
                {"role": "assistant", "content": text[3:]},
            ]
        }
        for text in texts()
    ],
}


def tiny_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**VOCABULARY, sliding_window=8))
    if kind == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**VOCABULARY, **EXPERTS))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**VOCABULARY))
    return LlamaForCausalLM(LlamaConfig(**VOCABULARY))


def made(
    folder: Path, rows: str, *, is_streamed: bool = True, model: str = "llama", **changes: Any
) -> Any:
    """Return a trainer; options of its constructor are taken out of `changes`."""
    from trl import SFTConfig, SFTTrainer

    from finetune.integrations.sft import SluiceSFTTrainer

    names = ("compute_metrics", "peft_config")
    options = {name: changes.pop(name) for name in names if name in changes}
    base = tiny_model(model)
    settings = ARGUMENTS | {"optim": "sgd", "bf16": False, "max_length": 24} | changes
    kind = SluiceSFTTrainer if is_streamed else SFTTrainer
    if is_streamed:
        options["streaming"] = STREAMING
    return kind(
        model=base if "peft_config" in options else with_lora(base),
        args=SFTConfig(output_dir=str(folder / kind.__name__), **settings),
        train_dataset=Dataset.from_list(ROWS[rows]),
        eval_dataset=Dataset.from_list(ROWS[rows][:7]),
        processing_class=TOKENIZER,
        **options,
    )


def trained(folder: Path, rows: str, **changes: Any) -> Any:
    """Return a trainer that has trained."""
    trainer = made(folder, rows, **changes)
    trainer.train()
    return trainer


def both(folder: Path, rows: str, *, model: str = "llama", **changes: Any) -> tuple[Any, Any]:
    plain, ours = (
        trained(folder, rows, is_streamed=one, model=model, **changes) for one in (False, True)
    )
    return plain, ours
