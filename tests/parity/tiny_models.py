"""A tiny random model of every causal language model type of transformers, and image-text type.

One generic set of sizes serves most types: each name is used where a type's config has a field of
that name, also in its sub-configs. `SPECIAL` holds what a type needs besides. Four layers and more,
so that all of a hybrid pattern occurs (mamba and attention, sliding and full, dense and experts).
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from offload.engine.model.layers import LayeredModel

NUM_LAYERS = 4
VOCABULARY = 64

GENERIC: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "is_decoder": True,
    # encoders and decoders
    "decoder_layers": NUM_LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    # mixtures of experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    "v_head_dim": 8,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    # per-layer embeddings
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    # towers of composites
    "depth": 2,
    "num_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "out_hidden_size": 32,
    "num_mel_bins": 8,
    "num_image_tokens": 4,
    "projector_hidden_size": 32,
    "projection_dim": 32,
    "text_hidden_size": 32,
}

_TOWERS = {"vision_config", "high_res_vision_config", "qformer_config", "audio_config"}
_PARTS = {*_TOWERS, "text_config"}  # which SPECIAL may have sizes of their own for
_FEW_LAYERS = {"num_hidden_layers": 2}  # towers have other numbers of layers than the text
_TEXT_ONLY = {"gemma3n"}  # its vision tower needs timm, and is not trained

_FEW_KV = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 1, 1]}
_MROPES = {"full_attention": _MROPE, "sliding_attention": _MROPE}
_ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
# fields of published configs that their classes lack
_PUBLISHED = dict.fromkeys(
    ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    ("vision_start_token_id", "audio_token_id"),
)
_TEXT_MROPE = {"text_config": {"rope_parameters": _MROPE}}
_HALF = ["linear_attention", "full_attention"] * 2
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        **{"codebook_dim": 32, "codebook_size": 8, "image_token_offset": 40},
        "audio_token_offset": 48,
    },
    "axk1": _FEW_KV,
    "axk2": _FEW_KV,
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 5}, "base_channels": 32},
    "cohere_compass": {"text_config": {"rope_parameters": _MROPES}},
    "cosmos3_edge": _TEXT_MROPE,
    "cohere_compass_text": {"rope_parameters": _MROPES},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"] * 2}},
    "deepseek_v2": _FEW_KV,
    "deepseek_v3": _FEW_KV,
    "deepseek_v32": _FEW_KV,
    "dots3_note": _FEW_KV,
    "dots3_note_text": _FEW_KV,
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 8],
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        }
    },
    "florence2": {
        "vision_config": {"patch_size": (7, 3, 3, 3), "num_heads": (2,) * 4, "embed_dim": (32,) * 4}
        | {"num_groups": (2,) * 4}
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "glm46v": _TEXT_MROPE,
    "glm4_moe_lite": _FEW_KV,
    "glm4v": _TEXT_MROPE,
    "glm4v_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0]}}},
    "glm5_next": {
        **_FEW_KV,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "index_topk": 16,
        "index_kpool": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "hc_mult": 2,
    },
    "glm_moe_dsa": _FEW_KV,
    "glm_ocr": _TEXT_MROPE,
    "glmga": _TEXT_MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        "vision_config": {"image_size": 32, "hidden_size": 64},
    },
    "granitemoehybrid": {"layer_types": _HALF},
    "hy_v4_vl": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0]}}},
    "hunyuan_vl": {"text_config": {"rope_parameters": _MROPE}},
    "inkling_mm_model": {"vision_config": {"patch_size": 2}},
    "janus": {"base_channels": 32, "num_embeddings": 64, "image_token_embed_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "longcat_flash": {"num_layers": 4, "head_dim": 4, **_FEW_KV},
    "kimi_k25": _FEW_KV,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "minicpm3": _FEW_KV,
    "mistral4": _FEW_KV,
    "mistral_large4": _FEW_KV,
    "molmo2": {"image_size": [16, 16], "vision_feature_layer": [0, 1]},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 8, 8)}},
    "minimax": {"layer_types": _HALF},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8},
    "nemotron_h_omni": {
        **{"video_temporal_patch_size": 2, "audio_config": None, "mamba_num_heads": 8},
        **{"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8},
    },
    "paddleocr_vl": _TEXT_MROPE,
    "phi4_multimodal": {"num_attention_heads": 4},
    "qwen2_5_omni_thinker": _TEXT_MROPE,
    "qwen2_5_vl": _TEXT_MROPE,
    "qwen2_vl": {**_TEXT_MROPE, "vision_config": {"embed_dim": 32, "hidden_size": 32}},
    "qwen3_vl": _TEXT_MROPE,
    "qwen3_vl_moe": _TEXT_MROPE,
    "sarvam_mla": _FEW_KV,
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 6, "lru_width": 32, "attention_window_size": 8},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local", "local", "local"],
        "feed_forward_size": 48,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": _FEW_KV,
    "zamba": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
_SHARES = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CHOOSES = {
    "indexer_types": ["full", "shared", "shared", "full"],
    **{"index_topk": 5, "index_n_heads": 2, "index_head_dim": 8},
}
SHARED_KEYS = "layers that share keys and values (E2B, E4B)"
SHARED_INDICES = "layers that read the tokens that others choose"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{f"{name}, {SHARED_KEYS}": _SHARES for name in ("gemma3n_text", "gemma4", "gemma4_text")},
    **{f"{name}, {SHARED_INDICES}": _CHOOSES for name in ("glm_moe_dsa", "hy_v4")},
}
"""Settings of published models that change the verdict of their type, which is before a comma."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small config, without dropout, of what the type's causal language model is built of.

    For some composites that is the text part alone.
    """
    base = model_type.partition(",")[0]
    special = SPECIAL.get(base, SPECIAL.get(base.removesuffix("_text"), {}))
    special = {**special, **SETTINGS.get(model_type, {})}
    config_class = CONFIG_MAPPING[_built_as(model_type)]
    model_class = class_of(_built_as(model_type))
    if not issubclass(config_class, model_class.config_class):
        config_class = model_class.config_class
    return small(config_class, special)


def small(config_class: type[PreTrainedConfig], special: Mapping[str, Any]) -> PreTrainedConfig:
    """Fill the fields that a config class has, and those of its sub-configs."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    names = set(defaults)
    values: dict[str, Any] = {
        name: {int: 0, bool: False}.get(type(defaults[name]), 0.0)
        for name in names
        if _is_dropout(name)
    }
    for name, value in {**GENERIC, **special}.items():
        own_name = config_class.attribute_map.get(name, name)
        if own_name in names:
            values[own_name] = value
    for name, part in _sub_configs(config_class).items():
        own = special.get(name, {})
        if name in names and (name not in values or name in _PARTS) and own is not None:
            few = _FEW_LAYERS if name in _TOWERS else {}
            values[name] = small(part, {**few, **special, **own})
    return config_class(**values)


def _sub_configs(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Return the sub-configs' classes by field name."""
    found: dict[str, Any] = {
        **config_class.sub_configs,
        **getattr(config_class, "sub_configs_defaults", {}),
    }
    classes: dict[str, Any] = {}
    for name, spec in found.items():
        kind: Any = (
            spec.get_config_class(spec.model_type) if hasattr(spec, "config_class") else spec
        )
        if not dataclasses.is_dataclass(kind):  # AutoConfig, in older versions
            default = getattr(config_class(), name)
            text_type = config_class.model_type.replace("_assistant", "_text")
            kind = CONFIG_MAPPING[text_type] if default is None else type(default)
        if dataclasses.is_dataclass(kind):
            classes[name] = kind
    return classes


def _is_dropout(name: str) -> bool:
    return name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop", "jitter_noise"))


def _built_as(model_type: str) -> str:
    base = model_type.partition(",")[0]
    return f"{base}_text" if base in _TEXT_ONLY else base


def class_of(model_type: str) -> Any:
    """Return transformers' causal class of a type, or else its class for images and text."""
    kind = CONFIG_MAPPING[model_type]
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return known[kind] if kind in known else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]


def tiny_model(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build the model on the CPU, all of its weights a little random, none of them trainable.

    Weights are moved from their initial values, for a gate that starts at zero would hide errors.
    """
    config: Any = tiny_config(model_type)
    for name in _PUBLISHED.get(model_type, ()):
        setattr(config, name, 3)
    if model_type.endswith("_assistant"):  # as published it cannot be built: all layers share
        config.text_config.num_kv_shared_layers = 0
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = class_of(_built_as(model_type))._from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
                parameter.requires_grad_(False)
    return model.train()


def with_adapters(model: PreTrainedModel, layers: nn.ModuleList, *, seed: int = 0) -> nn.Module:
    """Put LoRA on every linear module of the layers; train small parameters where peft refuses."""
    inside = set(layers.modules())
    names = [
        name
        for name, module in model.named_modules()
        if module in inside and type(module).__name__ in ("Linear", "Conv1D")
    ]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's about Conv1D and patterns that match nothing
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=names))
        except ValueError:  # no linear modules, or state spaces that peft leaves alone
            for parameter in layers.parameters():
                parameter.requires_grad_(parameter.ndim < 2)
            return model
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at the start: half of the gradients would be zero
                nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def balanced(model_type: str, *, seed: int = 0, coefficient: float = 0.5) -> nn.Module:
    """Return a model whose router loss is large enough to see, adapters on its routers too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base: Any = tiny_model(model_type, seed=seed, output_router_logits=True)
        base.router_aux_loss_coef = coefficient
        return with_adapters(base, LayeredModel(base).layers, seed=seed)
