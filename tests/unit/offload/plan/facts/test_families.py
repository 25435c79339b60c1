"""Every family, with its switches thrown, against the model that transformers builds."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from finetune.adapter.lora import add_lora, trained
from finetune.adapter.lora import linear_names as names_of_model
from finetune.recipe.sections import AdapterSection
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, ModelFacts, linear_names, model_facts
from offload.plan.facts.families import FAMILIES, REFUSED
from offload.plan.facts.linears import DeltaAttention, SoftmaxAttention
from offload.plan.facts.trainable import adapter_parameters, module_parameters
from tests.counting import counted, on_meta, without_zeros
from tests.parity.tiny_models import SPECIAL, small, tiny_config

Config = dict[str, Any]

TINY: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
HEADS: Config = TINY | {"head_dim": 16}
MOE: Config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: Config = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Config = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}
DELTA: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
GATED_EXPERT: Config = MOE | {"shared_expert_intermediate_size": 40}
GEMMA4: Config = HEADS | {
    "model_type": "gemma4_text",
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 50,
}

VARIANTS: dict[str, Config] = {
    "ministral": HEADS | {"model_type": "ministral"},
    "ministral3 tied": HEADS | {"model_type": "ministral3", "tie_word_embeddings": True},
    "qwen2 with layer types": TINY
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma": HEADS | {"model_type": "gemma"},
    "gemma untied": HEADS | {"model_type": "gemma", "tie_word_embeddings": False},
    "gemma2": HEADS | {"model_type": "gemma2", "sliding_window": 9},
    "gemma2 with biases": HEADS | {"model_type": "gemma2", "attention_bias": True},
    "gemma3 with biases": HEADS
    | {"model_type": "gemma3_text", "attention_bias": True, "layer_types": ["full_attention"] * 4},
    "gemma4": GEMMA4,
    "gemma4 that leaves sizes out": HEADS | {"model_type": "gemma4_text"},
    "gemma4 plain": GEMMA4 | {"hidden_size_per_layer_input": 0, "num_hidden_layers": 7},
    "gemma4 with keys for values": GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 2,  # the last is made full
    },
    "gemma4 with experts": GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "phi3": TINY | {"model_type": "phi3", "num_key_value_heads": None, "sliding_window": 7},
    "phi3 grouped": TINY | {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo": TINY | {"model_type": "olmo"},
    "olmo with biases": TINY | {"model_type": "olmo", "attention_bias": True},
    "olmo2": TINY | {"model_type": "olmo2", "tie_word_embeddings": True},
    "olmo3": TINY | {"model_type": "olmo3", "sliding_window": 8, "num_hidden_layers": 9},
    "granite": TINY | {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granitemoe": TINY
    | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2},
    "glm": HEADS | {"model_type": "glm"},
    "glm4": HEADS | {"model_type": "glm4", "attention_bias": False},
    "glm4_moe": HEADS | ROUTED | {"model_type": "glm4_moe", "n_shared_experts": 2},
    "glm4_moe with norms, biases and more dense layers": HEADS
    | ROUTED
    | {
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
    },
    "deepseek_v2": LATENT | ROUTED | {"model_type": "deepseek_v2", "mlp_bias": True},
    "deepseek_v2 with plain queries": LATENT
    | ROUTED
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": LATENT | ROUTED | {"model_type": "deepseek_v3"},
    "deepseek_v3 with biases, all of experts": LATENT
    | ROUTED
    | {"model_type": "deepseek_v3", "attention_bias": True, "first_k_dense_replace": 0},
    "qwen3_next": HEADS | DELTA | GATED_EXPERT | {"model_type": "qwen3_next"},
    "qwen3_next with dense layers": HEADS
    | DELTA
    | GATED_EXPERT
    | {
        "model_type": "qwen3_next",
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "attention_bias": True,
    },
    "qwen3_next, every third": HEADS
    | DELTA
    | GATED_EXPERT
    | {"model_type": "qwen3_next", "full_attention_interval": 3, "decoder_sparse_step": 2},
    "qwen3_5": HEADS | DELTA | {"model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3_5_moe": HEADS | DELTA | GATED_EXPERT | {"model_type": "qwen3_5_moe_text"},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about rotary settings of tiny models
        yield


def assert_equal_to_built(facts: ModelFacts, model: Any) -> None:
    layers = model.get_decoder().layers
    assert [without_zeros(layer) for layer in facts.layers] == [counted(x) for x in layers]
    inside = sum(p.numel() for p in layers.parameters())
    outside = sum(p.numel() for p in model.get_decoder().parameters()) - inside
    head = model.get_output_embeddings().weight
    is_tied = head is model.get_input_embeddings().weight
    assert facts.tie_word_embeddings is is_tied
    assert facts.head_parameters == (0 if is_tied else head.numel())
    assert facts.num_parameters == inside + outside + facts.head_parameters


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_counts_per_tensor_class_equal_the_built_model(config: Config) -> None:
    assert_equal_to_built(model_facts(config), on_meta(copy.deepcopy(config)))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_config_written_by_transformers_is_read_the_same(config: Config) -> None:
    written = AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    if config["model_type"].startswith("gemma4"):  # kept by layer there, not by its own name
        written |= {key: config[key] for key in config if "global" in key}
    assert model_facts(written) == model_facts(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_size_is_the_one_that_transformers_takes(model_type: str) -> None:
    theirs = CONFIG_MAPPING[model_type]().get_text_config().to_dict()
    ours = FAMILIES[model_type].defaults
    # what they derive from other sizes, or switch off, is none of the defaults
    given = {key: theirs[key] for key in ours if theirs.get(key)}
    assert {key: ours[key] for key in given} == given


def test_every_family_is_built_in_a_test() -> None:
    others = {"llama", "mistral", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "olmoe", "gpt_oss"}
    parts = {name for name in FAMILIES if "_vl" in name}  # tested below, as composites
    assert FAMILIES.keys() == {c["model_type"] for c in VARIANTS.values()} | others | parts


# -------------------------------------------------------------------------------------- composites

COMPOSITES = (
    "gemma3",
    "gemma4",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)


def built_composite(config: Config) -> Any:
    config = copy.deepcopy(config)
    with torch.device("meta"):
        built = AutoConfig.for_model(config.pop("model_type"), **config)
        try:
            return AutoModelForCausalLM.from_config(built)
        except ValueError:  # such a type is loaded as a model for text and images only
            model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(built)]
            return model_class._from_config(built)


@pytest.mark.parametrize(
    ("whole", "part"), [(None, None), (None, True), (True, None), (True, False), (False, True)]
)
@pytest.mark.parametrize("model_type", COMPOSITES)
def test_of_a_composite_the_text_part_is_counted(
    model_type: str, whole: bool | None, part: bool | None
) -> None:
    config = small(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {})).to_dict()
    for values, flag in ((config, whole), (config["text_config"], part)):
        values.pop("tie_word_embeddings", None)
        values |= {} if flag is None else {"tie_word_embeddings": flag}
    assert_equal_to_built(model_facts(config), built_composite(config))


def test_the_published_gemma_3_says_little_and_is_read() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    facts = model_facts({"model_type": "gemma3", "text_config": text})
    assert_equal_to_built(facts, on_meta(dict(text)))
    assert facts.num_parameters / 1e9 == pytest.approx(3.88, rel=1e-3)
    assert [layer.window for layer in facts.layers[:7]] == [1024] * 5 + [None, 1024]


def test_a_flat_config_of_a_composite_is_read_too() -> None:
    facts = model_facts(TINY | {"model_type": "qwen2_5_vl"})
    text = {"model_type": "qwen2_5_vl", "text_config": TINY | {"model_type": "qwen2_5_vl_text"}}
    assert facts.layers == model_facts(text).layers


# ---------------------------------------------------------------------------------- published sizes


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        (
            {
                "model_type": "deepseek_v3",
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "vocab_size": 129280,
            },
            671.0,
            37.6,
        ),
        (
            {
                "model_type": "qwen3_next",
                "hidden_size": 2048,
                "intermediate_size": 5120,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "vocab_size": 151936,
            },
            79.7,
            3.87,
        ),
        (
            {
                "model_type": "glm4_moe",
                "hidden_size": 4096,
                "intermediate_size": 10944,
                "moe_intermediate_size": 1408,
                "num_hidden_layers": 46,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_bias": True,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "vocab_size": 151552,
            },
            106.9,
            13.4,
        ),
        (
            {
                "model_type": "gemma2",
                "hidden_size": 3584,
                "intermediate_size": 14336,
                "num_hidden_layers": 42,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "vocab_size": 256000,
            },
            9.24,
            9.24,
        ),
        (
            {
                "model_type": "phi3",
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "vocab_size": 32064,
            },
            3.82,
            3.82,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_published_models_have_their_published_size(
    config: Config, billions: float, active_billions: float
) -> None:
    facts = model_facts(config)
    assert_equal_to_built(facts, on_meta(dict(config)))
    assert facts.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert facts.num_active_parameters / 1e9 == pytest.approx(active_billions, rel=1e-2)


# ---------------------------------------------------------------------------------- kinds, refusals


def test_the_kinds_of_attention_are_read_by_layer() -> None:
    latent = model_facts(VARIANTS["deepseek_v3"]).layers[0].attention
    assert isinstance(latent, SoftmaxAttention)
    assert (latent.qk_dim, latent.v_dim, latent.rotary_dim) == (10, 10, 4)
    kinds = [layer.attention for layer in model_facts(VARIANTS["qwen3_next, every third"]).layers]
    assert [isinstance(kind, DeltaAttention) for kind in kinds] == [True, True, False, True]
    gemma4 = model_facts(VARIANTS["gemma4 with keys for values"])
    assert [layer.window for layer in gemma4.layers] == [None, 512, None, None]
    glm = model_facts(VARIANTS["glm4"]).layers[0].attention
    assert isinstance(glm, SoftmaxAttention)
    assert glm.rotary_dim == 8
    assert [layer.window for layer in model_facts(VARIANTS["olmo3"]).layers[:5]] == [
        8,
        8,
        8,
        None,
        8,
    ]


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_the_engine_refuses_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' cannot") as caught:
        model_facts({"model_type": model_type})
    assert caught.value.hint == "train this model resident, with another tool"


def test_layers_that_share_keys_and_values_are_refused_with_their_number() -> None:
    config = {"model_type": "gemma4", "text_config": GEMMA4 | {"num_kv_shared_layers": 2}}
    with pytest.raises(UnsupportedModelError, match=r"(?s)_layers is 2.*hint: train") as e:
        model_facts(config)
    assert "another layer's keys and values" in e.value.limit


def test_a_list_of_too_few_layer_types_is_refused() -> None:
    config = VARIANTS["qwen3_5"] | {"layer_types": ["linear_attention"] * 3}
    with pytest.raises(UnsupportedModelError, match="`layer_types` names 3 layers"):
        model_facts(config)


# ---------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_targets_are_the_linear_layers_that_the_trainer_finds(config: Config) -> None:
    model = on_meta(copy.deepcopy(config))
    assert sorted(linear_names(model_facts(config))) == list(names_of_model(model))


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("deepseek_v3", False),
        ("qwen3_next", True),
        ("qwen3_5", False),
        ("phi3", False),
        ("gemma4 with experts", True),
        ("gemma4 with keys for values", False),
    ],
)
def test_as_many_parameters_get_adapters_as_peft_makes(name: str, experts: bool) -> None:
    config = VARIANTS[name]
    facts = model_facts(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
    adapted = add_lora(model, AdapterSection(rank=3, alpha=6, experts=experts), seed=0)
    made = sum(parameter.numel() for parameter in trained(adapted).values())
    spec = AdapterSpec(rank=3, targets=linear_names(facts), experts=experts)
    assert adapter_parameters(facts, spec) == made


def test_norms_that_train_whole_are_counted_one_by_one() -> None:
    facts = model_facts(VARIANTS["qwen3_next"])
    spec = AdapterSpec(rank=3, targets=("o_proj",), experts=False, modules=("norms",))
    model = on_meta(dict(VARIANTS["qwen3_next"]))
    sizes = [p.numel() for name, p in model.named_parameters() if "norm" in name]
    assert module_parameters(facts, spec) == sum(sizes)
    without = model_facts(VARIANTS["olmo"])
    assert module_parameters(without, spec) == 0


def test_the_sizes_of_tiny_models_fit_every_family() -> None:
    """The generic tiny config of each type, as the architectures' table is made with."""
    for model_type in FAMILIES:
        if "_vl" not in model_type:
            config = tiny_config(model_type).to_dict()
            assert_equal_to_built(model_facts(config), on_meta(copy.deepcopy(config)))
