"""Virtual tokens in front of each row, whose embeddings train: prompt tuning and p-tuning, by peft.

Idea. A row begins with tokens V, V + 1, ..., which the vocabulary of V tokens does not have. The
embedding looks them up in what peft's own encoder returns, and all others where it always did. So
front, layers, packing and plan see rows that are longer by these tokens, and nothing else.

peft would put the same embeddings before those of a row itself. Its encoder is made a part of the
embedding, since what trains is inside the model.

Shapes: B rows, T tokens, D model dim, P virtual tokens.

Source: arXiv:2104.08691 (prompt tuning), arXiv:2103.10385 (p-tuning).
"""

from types import MethodType
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch.nn import functional
from transformers import PreTrainedModel

from finetune.errors import ConfigError
from finetune.recipe.sections import AdapterSection

ENCODER = "virtual_tokens"
"""Name of peft's encoder within the embedding."""
_VIRTUAL = ("prompt", "p", "prefix", "prefix_mlp", "multitask_prompt")


def add_virtual_tokens(model: PreTrainedModel, adapter: AdapterSection, *, seed: int) -> PeftModel:
    """Freeze the model and add virtual tokens, with an encoder drawn from `seed`.

    Args:
        model: Without adapters.
        adapter: Of method `prompt` or `p_tuning`.
        seed: Of the encoder's weights.

    Raises:
        ConfigError: The model looks tokens up elsewhere too, where virtual ones are not.
    """
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    of = ""
    if getattr(config, "hidden_size_per_layer_input", 0):
        of = "hidden_size_per_layer_input"
    elif "hash_moe" in (getattr(config, "mlp_layer_types", None) or ()):
        of = "hash_moe layers"
    elif embedding.num_embeddings != config.vocab_size:
        of = f"vocab_size {config.vocab_size}"
    if of:
        raise ConfigError(
            f"adapter.method: {adapter.method} for a {config.model_type} model",
            limit=f"by its config's {of} it has other tables of tokens than its embedding of"
            f" {embedding.num_embeddings:,}, which have no virtual ones",
            hint="`adapter.method: lora`",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, _config(adapter))
    encoder: Any = adapted.prompt_encoder[adapted.active_adapter]
    embedding.add_module(ENCODER, encoder)
    embedding.num_virtual_tokens = adapter.num_virtual_tokens
    vars(embedding)["forward"] = MethodType(_embedded, embedding)
    return adapted


def refuse_virtual(method: str) -> None:
    """Refuse a method with virtual tokens, by a recipe's or peft's name, where rows have none.

    Raises:
        ConfigError: It is one.
    """
    if method.lower().removesuffix("_tuning") in _VIRTUAL:
        raise ConfigError(
            f"an adapter of the method {method}, and rows without virtual tokens",
            limit="only a run that trains puts them in front, and `chat` and `generate` a prefix",
            hint="load the adapter with plain peft",
        )


def _config(adapter: AdapterSection) -> PeftConfig:
    settings: dict[str, Any] = {
        "num_virtual_tokens": adapter.num_virtual_tokens,
        "task_type": "CAUSAL_LM",
    }
    if adapter.method == "p_tuning":  # its MLP is as wide as the model
        return PromptEncoderConfig(**settings)
    return PromptTuningConfig(**settings)


def _embedded(embedding: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the embeddings (B, T, D) of tokens, virtual ones among them."""
    num, encoder = embedding.num_embeddings, getattr(embedding, ENCODER)
    found_BTD: torch.Tensor = type(embedding).forward(embedding, ids_BT.clamp(max=num - 1))
    tokens_P = torch.arange(embedding.num_virtual_tokens, device=ids_BT.device)
    table_PD = encoder(tokens_P.unsqueeze(0))[0]
    own_BTD = functional.embedding((ids_BT - num).clamp(min=0), table_PD).to(found_BTD.dtype)
    return torch.where((ids_BT >= num).unsqueeze(-1), own_BTD, found_BTD)
