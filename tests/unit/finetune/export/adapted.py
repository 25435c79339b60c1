"""Tiny published models and adapters on them, to be merged."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from finetune.adapter.lora import expert_parameters

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 5}
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **EXPERTS, moe_intermediate_size=24)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, **EXPERTS)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, **EXPERTS, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE)),
}
IDS = torch.arange(3, 27).view(2, 12)


def publish(model: Any, folder: Path, dtype: torch.dtype, **options: Any) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.to(dtype=dtype).save_pretrained(folder, max_shard_size="20KB", **options)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def train(base: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter with B that is not zero, on all linear layers and experts."""
    model = load(base)
    linear = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.get_decoder().named_modules()
            if type(module).__name__ in ("Linear", "Conv1D")
        }
    )
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": linear,
            "target_parameters": list(expert_parameters(model)) or None,
            "task_type": "CAUSAL_LM",
            **settings,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's about Conv1D and tied weights
        torch.manual_seed(1)  # else A depends on the tests before
        adapted = get_peft_model(model, config)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name or "lora_embedding_B" in name:
                    nn.init.normal_(parameter, std=0.1)
                elif "magnitude" in name or ".modules_to_save." in name:
                    parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
        adapted.save_pretrained(str(folder))
    return folder


def with_adapter(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load(base, dtype), str(adapter)).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS, use_cache=False).logits.float()
    return found


def rel(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
