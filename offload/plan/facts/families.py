"""The model families: how each differs from a plain decoder.

A Hugging Face config has the sizes; the tensors that follow from them differ by family in a few
respects. `FAMILIES` lists exactly these. Defaults are those of transformers 5, for keys that
published configs omit; sizes that define a model have no default and must be in the config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from offload.plan.facts.config import Config
from offload.plan.facts.config_readers import Delta, Experts, GlobalHeads, Heads, Latent, Mlp

_HEADS, _MLP = Heads(), Mlp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a model type differs from the plain decoder.

    Attributes:
        defaults: Sizes of missing keys.
        attention: Its softmax attention.
        delta: Its layers of linear attention.
        mlp: Its dense layers.
        experts: Its mixtures of experts.
        has_mlp_beside_experts: Whether a layer with experts has the dense MLP too.
        num_norms: Norms of a layer, except those inside attention.
        has_norm_weights: Whether these norms, and the one before the head, have weights.
        has_norm_after_mlp: Whether a norm reads the output of a dense MLP before it is added.
        has_layer_inputs: Whether each layer has its own embedding, gated into its output.
        is_tied: Whether head and embedding are tied, if the config does not say.
        has_window_switch: Whether windows are off unless a flag is set.
        has_global_last: Whether the last layer attends to all tokens, whatever the config says.
        slides: Whether layer i has a window, if the config lists no layer types.
        is_linear: Whether layer i has linear attention, if the config lists no layer types.
    """

    defaults: Mapping[str, int] = field(default_factory=dict)
    attention: Heads | GlobalHeads | Latent = _HEADS
    delta: Delta | None = None
    mlp: Mlp = _MLP
    experts: Experts | None = None
    has_mlp_beside_experts: bool = False
    num_norms: int = 2
    has_norm_weights: bool = True
    has_norm_after_mlp: bool = False
    has_layer_inputs: bool = False
    is_tied: bool = False
    has_window_switch: bool = False
    has_global_last: bool = False
    slides: Callable[[int, Config], bool] = lambda _i, _config: True
    is_linear: Callable[[int, Config], bool] = lambda _i, _config: False


def _above(i: int, config: Config) -> bool:
    return i >= config.size_or("max_window_layers", 28)


def _not_each(key: str, default: int) -> Callable[[int, Config], bool]:
    """Return a pattern: all layers except every n-th."""
    return lambda i, config: (i + 1) % config.size_or(key, default, least=1) != 0


def _sizes(
    *, positions: int, kv_heads: int | None = None, head_dim: int | None = None, **others: int
) -> Mapping[str, int]:
    named = {
        "max_position_embeddings": positions,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return others | {key: value for key, value in named.items() if value is not None}


_UNBIASED = Heads(bias_key=None)
_QKV_BIASED = Heads(bias_key=None, has_bias=True, is_output_biased=False)
_HEAD_NORMED = Heads(qk_norm="head")
_GATED = Heads(qk_norm="head", has_output_gate=True, rotary_frac=0.25)
_GLM = Heads(has_bias=True, is_output_biased=False, rotary_frac=0.5)
_NARROW_EXPERTS = Experts(width_key="intermediate_size")
_COUNTED = Experts(shared="counted")

_qwen = partial(Family, has_window_switch=True, slides=_above)
_QWEN2 = _qwen(
    defaults=_sizes(positions=32768, kv_heads=32, sliding_window=4096), attention=_QKV_BIASED
)
_QWEN2_VL = replace(
    _QWEN2,
    defaults=_sizes(positions=32768, kv_heads=8, sliding_window=4096, max_window_layers=80),
)
_QWEN3 = _qwen(
    defaults=_sizes(positions=32768, kv_heads=32, head_dim=128, sliding_window=4096),
    attention=_HEAD_NORMED,
)
_QWEN3_MOE = Family(
    defaults=_sizes(positions=32768, kv_heads=4, sliding_window=4096),
    attention=_HEAD_NORMED,
    experts=Experts(),
    has_window_switch=True,
)
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = Family(
    defaults=_sizes(positions=32768, kv_heads=4, head_dim=256, **_DELTA_SIZES),
    attention=_GATED,
    delta=Delta(),
    is_linear=_not_each("full_attention_interval", 4),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults=_sizes(positions=32768, kv_heads=2, head_dim=256, **_DELTA_SIZES),
    experts=Experts(shared="gated"),
)
_GEMMA = Family(defaults=_sizes(positions=8192, kv_heads=16, head_dim=256), is_tied=True)
_GEMMA3 = Family(
    defaults=_sizes(
        positions=131072,
        kv_heads=4,
        head_dim=256,
        sliding_window=4096,
        num_attention_heads=8,
        vocab_size=262_208,
    ),
    attention=_HEAD_NORMED,
    num_norms=4,
    has_norm_after_mlp=True,
    is_tied=True,
    slides=_not_each("sliding_window_pattern", 6),
)
_GEMMA4 = Family(
    defaults=_sizes(
        positions=131072,
        kv_heads=4,
        head_dim=256,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
    ),
    attention=GlobalHeads(),
    experts=Experts(has_router_scales=True),
    has_mlp_beside_experts=True,
    num_norms=4,
    has_norm_after_mlp=True,
    has_layer_inputs=True,
    is_tied=True,
    has_global_last=True,
    slides=lambda i, _config: (i + 1) % 6 != 0,
)
_MISTRAL = Family(
    defaults=_sizes(positions=131072, kv_heads=8, sliding_window=4096), attention=_UNBIASED
)
_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_READS_OTHERS = "layers that read another layer's keys and values cannot be visited alone"
_ONE_STATE = "one hidden state may go from layer to layer, and only layers may use it"
_NEXT_TOKENS = "its loss must be the mean cross-entropy of the next tokens"
_ONE_LIST = "one list, of its decoder layers, can be streamed"

# Composites whose own flag says whether the head is tied, and the flag's default. For those of
# qwen2 the text part's flag counts too; for those in `TEXT_TIED` only the text part's counts.
WHOLE_TIED: Mapping[str, bool] = {
    "gemma3": True,
    "gemma4": True,
    "mistral3": True,
    "qwen2_vl": False,
    "qwen2_5_vl": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}
TEXT_TIED = ("qwen3_5", "qwen3_5_moe")

RESIDENT_HINT = "train this model resident, with another tool"
# Model types that the engine refuses whatever their sizes, and why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _READS_OTHERS),
    **dict.fromkeys(("blt", "hrm_text", "musicgen", "musicgen_melody", "xlm"), _ONE_LIST),
    **dict.fromkeys(
        ("cpmant", "gemma3n", "gemma3n_text", "git", "glm_moe_dsa", "hy_v4", "inkling2_text"),
        _ONE_STATE,
    ),
    **dict.fromkeys(("mllama", "prophetnet", "reformer", "xlnet", "xmod", "zaya"), _ONE_STATE),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian"), _NEXT_TOKENS
    ),
    **dict.fromkeys(("mbart", "mvp", "pegasus", "plbart", "trocr", "whisper"), _NEXT_TOKENS),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults=_sizes(positions=2048), mlp=Mlp(bias_key="mlp_bias")),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": Family(
        defaults=_sizes(positions=262144, kv_heads=8, head_dim=128), attention=_UNBIASED
    ),
    "mixtral": Family(
        defaults=_sizes(positions=131072, kv_heads=8),
        attention=_UNBIASED,
        experts=_NARROW_EXPERTS,
    ),
    "qwen2": _QWEN2,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen2_moe": Family(
        defaults=_sizes(positions=32768, kv_heads=16, sliding_window=4096),
        attention=Heads(bias_key="qkv_bias", has_bias=True, is_output_biased=False),
        experts=Experts(shared="gated"),
        has_window_switch=True,
        slides=lambda i, config: i % 2 == 0 and not _above(i, config),
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, defaults=_sizes(positions=128000, kv_heads=32, head_dim=128)),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE, defaults=_sizes(positions=128000, kv_heads=16, sliding_window=4096)
    ),
    "qwen3_next": Family(
        defaults=_sizes(positions=32768, kv_heads=2, head_dim=256, **_DELTA_SIZES),
        attention=_GATED,
        delta=Delta(is_fused=True),
        experts=Experts(shared="gated"),
        is_linear=_not_each("full_attention_interval", 4),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        defaults=_sizes(positions=8192, kv_heads=4, head_dim=256, sliding_window=4096),
        attention=Heads(scores="capped"),
        num_norms=4,
        has_norm_after_mlp=True,
        slides=lambda i, _config: i % 2 == 0,
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "phi3": Family(
        defaults=_sizes(positions=4096),
        attention=Heads(bias_key=None, is_fused=True),
        mlp=Mlp(is_fused=True),
    ),
    "olmo": Family(defaults=_sizes(positions=2048), has_norm_weights=False),
    "olmo2": Family(
        defaults=_sizes(positions=2048),
        attention=Heads(qk_norm="whole"),
        has_norm_after_mlp=True,
    ),
    "olmo3": Family(
        defaults=_sizes(positions=2048, sliding_window=4096),
        attention=Heads(qk_norm="whole"),
        has_norm_after_mlp=True,
        slides=lambda i, _config: (i + 1) % 4 != 0,
    ),
    "olmoe": Family(
        defaults=_sizes(positions=4096),
        attention=Heads(qk_norm="whole"),
        experts=_NARROW_EXPERTS,
    ),
    "gpt_oss": Family(
        defaults=_sizes(positions=131072, kv_heads=8, head_dim=64, sliding_window=128),
        attention=Heads(has_bias=True, scores="sinks"),
        experts=Experts(width_key="intermediate_size", is_biased=True, is_clamped=True),
        slides=lambda i, _config: i % 2 == 0,
    ),
    "granite": Family(defaults=_sizes(positions=2048), mlp=Mlp(bias_key="mlp_bias")),
    "granitemoe": Family(defaults=_sizes(positions=2048), experts=_NARROW_EXPERTS),
    "glm": Family(
        defaults=_sizes(positions=131072, kv_heads=2, head_dim=128),
        attention=_GLM,
        mlp=Mlp(is_fused=True),
    ),
    "glm4": Family(
        defaults=_sizes(positions=131072, kv_heads=2, head_dim=128),
        attention=_GLM,
        mlp=Mlp(is_fused=True),
        num_norms=4,
        has_norm_after_mlp=True,
    ),
    "glm4_moe": Family(
        defaults=_sizes(positions=131072, kv_heads=8, first_k_dense_replace=1),
        attention=Heads(
            is_output_biased=False, qk_norm="head", qk_norm_key="use_qk_norm", rotary_frac=0.5
        ),
        experts=_COUNTED,
    ),
    "deepseek_v2": Family(
        defaults=_sizes(positions=2048, n_shared_experts=2, **_LATENT_SIZES),
        attention=Latent(),
        mlp=Mlp(bias_key="mlp_bias"),
        experts=Experts(shared="counted", shared_bias_key="mlp_bias"),
    ),
    "deepseek_v3": Family(
        defaults=_sizes(
            positions=4096, first_k_dense_replace=3, n_shared_experts=1, **_LATENT_SIZES
        ),
        attention=Latent(),
        experts=_COUNTED,
    ),
}
