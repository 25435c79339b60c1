"""Facts of models by config, against models that are built."""

import copy
import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.lora import add_lora, trained
from finetune.adapter.lora import linear_names as linear_names_of_lora
from finetune.model.empty import compute_exactly, empty_from
from finetune.model.facts import MEMORY_TESTED
from finetune.recipe.adapters import LoraSection
from finetune.recipe.load import load_shape, shape_of, shipped_facts, shipped_shapes
from offload.engine.model.layers import LayeredModel
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import (
    AdapterSpec,
    LayerFacts,
    ModelFacts,
    adapted_linears,
    linear_names,
)
from offload.plan.facts.linears import (
    DELTA_CHUNK_TOKENS,
    DeltaAttention,
    Recurrence,
    SoftmaxAttention,
    seen_tokens,
)
from offload.plan.facts.optimizer import Shape
from offload.plan.facts.trainable import (
    adapter_parameters,
    module_parameters,
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.facts.workload import FusedPart, fused_parts
from offload.plan.machine.machine import Machine, named_machine
from offload.plan.memory.memory import device_terms, recorded_bytes
from offload.plan.memory.visit import adapter_input_bytes, cast_bytes, saved_bytes_per_token
from offload.plan.plan import plan
from offload.plan.schedule.op import Kind
from offload.plan.time.attention import attention_work
from offload.plan.time.costs import price
from offload.plan.time.roofline import layer_flops
from tests.builders import QWEN3_30B, adapter, lora, model_facts, qwen3_8b, request, workload
from tests.counted import SMALL
from tests.counting import counted, without_zeros
from tests.tiers import mostly_slow

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
TINY_MOE = TINY | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama with biases": TINY
    | {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": None,
    },
    "llama tied": TINY | {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "mistral": TINY | {"model_type": "mistral"},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": TINY | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": TINY_MOE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen2_moe without biases": TINY_MOE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "qkv_bias": False},
    "qwen3": TINY | {"model_type": "qwen3", "attention_bias": True},
    "qwen3_moe": TINY_MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "olmoe": TINY | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": TINY | {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16},
    "gpt_oss": TINY | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss without attention biases": TINY
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": False,
    },
}


def assert_equal_to_built(facts: ModelFacts, config: dict[str, Any]) -> None:
    model: Any = empty_from(config)
    decoder = model.get_decoder()
    layers = getattr(decoder, "language_model", decoder).layers
    assert [without_zeros(layer) for layer in facts.layers] == [counted(x) for x in layers]
    inside = sum(p.numel() for p in layers.parameters())
    outside = sum(p.numel() for p in decoder.parameters()) - inside
    head = model.get_output_embeddings().weight
    is_tied = head is model.get_input_embeddings().weight
    assert facts.tie_word_embeddings is is_tied
    assert facts.head_parameters == (0 if is_tied else head.numel())
    assert facts.num_parameters == inside + outside + facts.head_parameters
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if facts.model_type not in ("mixtral", "mistral", "olmoe", "phi3", "llama"):
        windows = [getattr(attention, "sliding_window", None) for attention in attentions]
        assert [layer.window for layer in facts.layers] == windows


@pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
def test_counts_per_tensor_class_equal_the_built_model(config: dict[str, Any]) -> None:
    assert_equal_to_built(model_facts(config), config)


@pytest.mark.parametrize("name", shipped_shapes())
def test_shipped_facts_have_the_counts_of_the_built_model(name: str) -> None:
    assert_equal_to_built(ModelFacts.from_json(shipped_facts()[name]), load_shape(name))


# Fields that size nothing, that no model is built without, or that stand for their default if null.
SIZES_NOTHING = {
    *("transformers_version", "return_dict", "id2label", "label2id", "initializer_range"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"),
    *("router_aux_loss_coef", "max_window_layers", "num_local_experts", "swiglu_alpha"),
    *("swiglu_limit", "hidden_act", "hidden_activation", "rope_parameters", "layer_types"),
    *("_sliding_window_pattern", "per_layer_config", "rope_interleave", "layers_block_type"),
    *("mlp_layer_types", "qk_head_dim", "time_step_limit", "moe_shared_expert_overlap"),
    "mtp_layers_block_type",
}


@pytest.mark.parametrize("name", shipped_shapes())
def test_a_config_is_a_shipped_shape_only_if_its_other_fields_size_nothing(name: str) -> None:
    shape = load_shape(name)
    text = shape.get("text_config", shape)

    def found(**changes: Any) -> str | None:
        changed = shape | ({"text_config": text | changes} if text is not shape else changes)
        return shape_of(changed, form=shape.get("quantization_config"))

    assert found() == found(use_cache=True, attention_bias=text.get("attention_bias")) == name
    with_images = shape | {"image_token_id": 9, "vision_config": {"depth": 1}}
    assert shape_of(with_images, form=shape.get("quantization_config")) == name
    for key, value in AutoConfig.for_model(**shape).get_text_config().to_dict().items():
        if value and key not in text and key not in SIZES_NOTHING:
            assert found(**{key: False}) is None, key  # where transformers has it on
    for other in ({"hidden_size": 8}, {"mlp_bias": True}, {"sliding_window": 7}):
        assert found(**other) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_slow(list(shipped_shapes()), "gpt-oss-20b", "tiny-qwen3-moe")
)
def test_shipped_facts_are_current(name: str) -> None:
    shipped = shipped_facts()
    assert shipped.keys() == shipped_shapes().keys()
    assert ModelFacts.from_json(shipped[name]) == model_facts(load_shape(name))


def test_attention_and_expert_weights_of_a_qwen_30b_layer_are_1_245_708_288_bytes() -> None:
    layer = model_facts(QWEN3_30B).layers[0]
    assert 2 * (layer.weights("attention") + layer.weights("experts")) == 1_245_708_288


def test_qwen_30b_has_30_5_billion_parameters_of_which_3_3_are_active() -> None:
    facts = model_facts(QWEN3_30B)
    assert facts.num_parameters / 1e9 == pytest.approx(30.53, rel=1e-3)
    assert facts.num_active_parameters / 1e9 == pytest.approx(3.35, rel=1e-2)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
@pytest.mark.parametrize(
    ("name", "experts"),
    [("llama tied", False), ("qwen2", False), ("qwen3_moe", True), ("gpt_oss", True)],
)
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), "all"])
def test_adapter_parameters_equal_those_that_peft_makes(
    name: str, experts: bool, targets: tuple[str, ...] | str
) -> None:
    config = TINY_CONFIGS[name] | {"tie_word_embeddings": False, "decoder_sparse_step": 1}
    facts = model_facts(config)
    names = linear_names(facts) if isinstance(targets, str) else targets
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None
    lora = LoraConfig(r=3, target_modules=list(names), target_parameters=fused)
    model = get_peft_model(empty_from(config), lora)
    made = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(facts, AdapterSpec(rank=3, targets=names, experts=experts)) == made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_all_linear_in_peft_means_the_names_that_facts_lists() -> None:
    config = TINY_CONFIGS["qwen2_moe"]
    model = get_peft_model(empty_from(config), LoraConfig(r=2, target_modules="all-linear"))
    adapted = {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert adapted == set(linear_names(model_facts(config)))


def test_a_target_that_no_layer_has_is_refused_with_the_nearest_name() -> None:
    spec = AdapterSpec(rank=4, targets=("q_prj",), experts=False)
    with pytest.raises(
        UnsupportedModelError, match=r"(?s)'q_prj'.*q_proj, k_proj.*\n\nhint: .*q_proj"
    ):
        adapter_parameters(model_facts(QWEN3_30B), spec)


def test_a_named_target_of_a_model_without_linear_layers_is_refused() -> None:
    facts = model_facts(TINY | {"model_type": "llama"})
    bare = replace(facts, layers=tuple(replace(layer, linears=()) for layer in facts.layers))
    for spec in (
        AdapterSpec(rank=4, targets=("q_proj",), experts=False),
        AdapterSpec(rank=4, targets=(), experts=False),
    ):
        with pytest.raises(UnsupportedModelError, match="nothing in a llama model can get an"):
            adapter_parameters(bare, spec)


def test_expert_adapters_on_a_dense_model_are_refused() -> None:
    spec = AdapterSpec(rank=4, targets=("q_proj",), experts=True)
    with pytest.raises(UnsupportedModelError, match="no experts"):
        adapter_parameters(model_facts(TINY_CONFIGS["qwen2"]), spec)


def test_a_kept_hash_is_of_the_value_however_it_was_made() -> None:
    first, second = model_facts(SMALL), model_facts(SMALL)
    spec = AdapterSpec(rank=3, targets=("q_proj",), experts=False)
    before = {first: "found"}
    assert before[second] == "found"
    assert first.layers[0] is second.layers[0]
    assert before[pickle.loads(pickle.dumps(first))] == "found"
    other = replace(first, layers=(replace(first.layers[0], num_others=1), *first.layers[1:]))
    assert other not in before
    assert trained_tensor_shapes(replace(first, layers=first.layers[:1] * 2), spec) == 2 * (
        trained_tensor_shapes(replace(first, layers=first.layers[:1]), spec)
    )


# ----------------------------------------------------------------------------------------- families


Config = dict[str, Any]

FAMILIES_TINY: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
HEADS: Config = FAMILIES_TINY | {"head_dim": 16}
MOE: Config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: Config = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Config = FAMILIES_TINY | {
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
    "qwen2 with layer types": FAMILIES_TINY
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
    "phi3": FAMILIES_TINY
    | {"model_type": "phi3", "num_key_value_heads": None, "sliding_window": 7},
    "phi3 grouped": FAMILIES_TINY | {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo": FAMILIES_TINY | {"model_type": "olmo"},
    "olmo with biases": FAMILIES_TINY | {"model_type": "olmo", "attention_bias": True},
    "olmo2": FAMILIES_TINY | {"model_type": "olmo2", "tie_word_embeddings": True},
    "olmo3": FAMILIES_TINY | {"model_type": "olmo3", "sliding_window": 8, "num_hidden_layers": 9},
    "granite": FAMILIES_TINY | {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granitemoe": FAMILIES_TINY
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


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about rotary settings of tiny models
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_counts_per_tensor_class_equal_the_built_model_families(config: Config) -> None:
    assert_equal_to_built(model_facts(config), copy.deepcopy(config))


@pytest.mark.usefixtures("quiet")
def test_the_published_gemma_3_says_little_and_is_read() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    facts = model_facts({"model_type": "gemma3", "text_config": text})
    assert_equal_to_built(facts, dict(text))
    assert facts.num_parameters / 1e9 == pytest.approx(3.88, rel=1e-3)
    assert [layer.window for layer in facts.layers[:7]] == [1024] * 5 + [None, 1024]


# ---------------------------------------------------------------------------------- published sizes


@pytest.mark.usefixtures("quiet")
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
    assert_equal_to_built(facts, dict(config))
    assert facts.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert facts.num_active_parameters / 1e9 == pytest.approx(active_billions, rel=1e-2)


# ---------------------------------------------------------------------------------- kinds, refusals


@pytest.mark.usefixtures("quiet")
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


# ---------------------------------------------------------------------------------------- adapters


@pytest.mark.usefixtures("quiet")
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
    adapted = add_lora(model, LoraSection(rank=3, alpha=6, experts=experts), seed=0)
    made = sum(parameter.numel() for parameter in trained(adapted).values())
    spec = AdapterSpec(rank=3, targets=linear_names(facts), experts=experts)
    assert adapter_parameters(facts, spec) == made


@pytest.mark.usefixtures("quiet")
def test_norms_that_train_whole_are_counted_one_by_one() -> None:
    facts = model_facts(VARIANTS["qwen3_next"])
    spec = AdapterSpec(rank=3, targets=("o_proj",), experts=False, modules=("norms",))
    model = empty_from(dict(VARIANTS["qwen3_next"]))
    sizes = [p.numel() for name, p in model.named_parameters() if "norm" in name]
    assert module_parameters(facts, spec) == sum(sizes)
    without = model_facts(VARIANTS["olmo"])
    assert module_parameters(without, spec) == 0


# ---------------------------------------------------------------------------------------- attention


ATTENTION_SMALL: Config = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
    "pad_token_id": 0,
}
ATTENTION_LATENT: Config = {
    key: ATTENTION_SMALL[key] for key in ATTENTION_SMALL if key != "head_dim"
} | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
ATTENTION_DELTA: Config = ATTENTION_SMALL | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, Config] = {
    "plain": ATTENTION_SMALL | {"model_type": "qwen3"},
    "fused projections": ATTENTION_SMALL | {"model_type": "phi3"},
    "latent": ATTENTION_LATENT,
    "latent, plain queries": ATTENTION_LATENT | {"q_lora_rank": None},
    "latent, experts": ATTENTION_LATENT | {"first_k_dense_replace": 0},
    "latent, values as wide as keys": ATTENTION_LATENT
    | {"model_type": "glm4_moe_lite", "v_head_dim": 48},
    "soft caps": ATTENTION_SMALL | {"model_type": "gemma2", "layer_types": ["full_attention"]},
    "sinks": ATTENTION_SMALL
    | EXPERTS
    | {"model_type": "gpt_oss", "layer_types": ["full_attention"]},
    "output gate": ATTENTION_DELTA | {"layer_types": ["full_attention"]},
    "delta rule": ATTENTION_DELTA,
    "delta rule, equal heads": ATTENTION_DELTA | {"linear_num_key_heads": 8},
    "state space in chunks": ATTENTION_SMALL
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "experts of two products": ATTENTION_SMALL
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["moe"],
        "moe_intermediate_size": 192,
        "moe_shared_expert_intermediate_size": 384,
        "n_routed_experts": 4,
    },
}
NUM_TOKENS = 512


def built(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    made = AutoConfig.for_model(**copy.deepcopy(config))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype).requires_grad_(False)
    compute_exactly(model)  # as it is when it trains
    return model


# ------------------------------------------------------------------------------------------- FLOPs


def executed_flops(layer: LayerFacts, seq_len: int) -> float:
    """What torch counts: all pairs of tokens, no triangular systems, a convolution's ends."""
    kind, tokens = layer.attention, float(seq_len)
    flops = 2.0 * tokens * sum(x.active * x.d_in * x.d_out for x in layer.linears)
    if isinstance(kind, SoftmaxAttention):
        return flops + 4 * kind.width * tokens * tokens
    assert isinstance(kind, DeltaAttention)
    ends = 2 * kind.conv_tokens * kind.conv_features * (kind.conv_tokens - 1)
    return flops + tokens * kind.flops_per_token(seq_len) - system_flops(kind, seq_len) + ends


def system_flops(kind: DeltaAttention, seq_len: int) -> float:
    width = kind.num_value_heads * (kind.key_dim + kind.value_dim)
    return float(seq_len * DELTA_CHUNK_TOKENS * width)


def table_flops(counter: FlopCounterMode) -> int:
    """Return those of rotary angles: some versions of transformers make them by a product.

    It is made once for all layers, before them, and is no part of any.
    """
    counts = counter.get_flop_counts()
    tables = [name for name in counts if name.endswith(".model.rotary_emb")]
    return sum(sum(counts[name].values()) for name in tables)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "name", [name for name, config in KINDS.items() if config["model_type"] != "nemotron_h"]
)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    seq_len = 2 * DELTA_CHUNK_TOKENS
    config = KINDS[name] | {"num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = 2 * config["layer_types"]
    facts, model = model_facts(config), built(config)
    model.set_attn_implementation("eager")  # of fused attention torch counts no FLOPs on a CPU
    model.set_experts_implementation("eager")
    tokens = torch.randint(0, 32, (1, seq_len))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, use_cache=False)
    head = 2.0 * seq_len * facts.hidden_size * facts.vocab_size
    expected = head + sum(executed_flops(layer, seq_len) for layer in facts.layers)
    extra = counter.get_total_flops() - table_flops(counter) - expected
    kinds = [layer.attention for layer in facts.layers]
    deltas = [kind for kind in kinds if isinstance(kind, DeltaAttention)]
    # other versions of transformers multiply by a system's inverse: twice the work, and counted
    assert extra in (0, 2 * sum(system_flops(kind, seq_len) for kind in deltas))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["plain", "latent, experts"])
def test_flops_of_a_token_are_the_products_and_half_of_all_pairs(name: str) -> None:
    facts = model_facts(KINDS[name])
    (layer,) = facts.layers
    assert isinstance(layer.attention, SoftmaxAttention)
    attention = 2 * layer.attention.width * 64
    products = 2 * sum(linear.active * linear.d_in * linear.d_out for linear in layer.linears)
    whole = layer_flops(facts, layer, num_tokens=64, context_tokens=64, count="causal")
    assert whole == 64 * (products + attention)


@pytest.mark.usefixtures("quiet")
def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3: 128 heads, queries and keys of 128 + 64, values of 128."""
    kind = SoftmaxAttention(
        num_heads=128,
        num_kv_heads=128,
        qk_dim=192,
        v_dim=128,
        rotary_dim=64,
        num_rotated_heads=129,
    )
    assert kind.flops_per_token(4096) == 2 * 128 * (192 + 128) * 2048


@pytest.mark.usefixtures("quiet")
def test_a_delta_rule_by_hand() -> None:
    """Qwen3-Next: 32 value heads, 128 features each, chunks of 64, 8,192 convolved features."""
    kind = DeltaAttention(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_tokens=4
    )
    head = 2 * 64 * 128 * 2 + 64 * 256 + 2 * 64 * 128 + 3 * 2 * 128 * 128
    assert kind.flops_per_token(4096) == 32 * head + 2 * 4 * 8192
    assert kind.flops_per_token(65) * 65 == 32 * head * 128 + 65 * 2 * 4 * 8192


@pytest.mark.usefixtures("quiet")
def test_a_window_bounds_what_a_token_sees() -> None:
    mean = sum(min(i, 16) for i in range(1, 65)) / 64
    assert seen_tokens(64, 16) == pytest.approx(mean - 0.5, abs=0.5)
    assert seen_tokens(64, 64) == seen_tokens(64, None) == 32
    plain = model_facts(KINDS["plain"]).layers[0].attention
    assert isinstance(plain, SoftmaxAttention)
    kind = replace(plain, window=16)
    assert kind.flops_per_token(64) == 4 * kind.width * seen_tokens(64, 16)


# ------------------------------------------------------------------------------------------ memory


class _CaughtError(Exception):
    pass


def arguments_of(model: Any, layer: Any, hidden: torch.Tensor) -> tuple[Any, Any]:
    """Return the arguments that the model gives its first layer."""
    caught: list[tuple[Any, Any]] = []

    def catch(_module: Any, args: Any, kwargs: Any) -> None:
        caught.append((args, kwargs))
        raise _CaughtError

    hook = layer.register_forward_pre_hook(catch, with_kwargs=True)
    with pytest.raises(_CaughtError), torch.no_grad():
        model(inputs_embeds=hidden.detach(), use_cache=False)
    hook.remove()
    args, kwargs = caught[0]
    if args:
        return (hidden, *args[1:]), kwargs
    return (), kwargs | {"hidden_states": hidden}


def storages(values: Any) -> Iterator[int]:
    if isinstance(values, torch.Tensor):
        yield values.untyped_storage().data_ptr()
    elif isinstance(values, dict):
        yield from storages(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from storages(value)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
@pytest.mark.parametrize(
    ("name", "is_adapted", "dropout"),
    [
        pytest.param(
            *(name, is_adapted, dropout),
            marks=() if is_adapted and not dropout else pytest.mark.slow,
        )
        for name in KINDS
        for is_adapted, dropout in ((False, 0.0), (True, 0.0), (True, 0.1))
        if not (dropout and name.startswith("latent"))  # refused: peft adapts it as a parameter
    ],
)
def test_saved_bytes_are_those_that_autograd_saves(
    name: str, is_adapted: bool, dropout: float, dtype: torch.dtype
) -> None:
    config = KINDS[name]
    facts, base = model_facts(config), built(config, dtype)
    (layer,) = facts.layers
    targets, cast = linear_names_of_lora(base), 0
    if is_adapted:
        add_lora(base, adapter(rank=2, dropout=dropout), seed=0)
        base.train()
    hidden = torch.randn(1, NUM_TOKENS, 128, dtype=dtype, requires_grad=True)
    module = base.model.layers[0]
    args, kwargs = arguments_of(base, module, hidden)
    known = {*storages([hidden, *base.parameters(), *base.buffers()]), *storages([args, kwargs])}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(*args, **kwargs)
    assert output.requires_grad
    predicted = saved_bytes_per_token(
        facts,
        layer,
        seq_len=NUM_TOKENS,
        dtype_bytes=dtype.itemsize,
        is_masked=False,
        form="plain",
        is_cpu=True,
    )
    if is_adapted:
        spec = AdapterSpec(
            rank=2,
            targets=targets,
            experts=False,
            is_in_base_dtype=True,
            has_dropout=dropout > 0,
        )
        adapted = adapted_linears(layer, spec)
        b = dtype.itemsize
        predicted += adapter_input_bytes(adapted, spec=spec, dtype_bytes=b, is_cpu=True)
        cast = cast_bytes(adapted, spec=spec, dtype_bytes=dtype.itemsize)
    assert NUM_TOKENS * predicted + cast == pytest.approx(
        sum(saved.values()), rel=0.1 if is_adapted else 0.05
    )


@pytest.mark.usefixtures("quiet")
def test_masks_of_scores_that_are_written_out_and_inputs_of_layers_are_recorded() -> None:
    spec = AdapterSpec(rank=2, targets=("q_proj",), experts=False)
    micro_batch = workload(seq_len=512, head_chunk_tokens=512, adapter=spec)
    recorded = {
        name: recorded_bytes(model_facts(KINDS[name]), micro_batch, is_padded=False) / 512
        for name in ("plain", "soft caps", "delta rule")
    }
    tables = 2 * 32 * 2
    assert recorded == {"plain": 8 + tables, "soft caps": 8 + tables + 512 * 2, "delta rule": 8}
    gemma4 = ATTENTION_SMALL | {"model_type": "gemma4_text", "layer_types": ["full_attention"]}
    sizes = [
        recorded_bytes(
            model_facts(gemma4 | {"hidden_size_per_layer_input": size}),
            micro_batch,
            is_padded=False,
        )
        for size in (0, 8)
    ]
    assert sizes[1] - sizes[0] == 512 * 8 * 2


@pytest.mark.usefixtures("quiet")
def test_on_a_card_latent_attention_keeps_no_scores() -> None:
    facts = model_facts(ATTENTION_LATENT)
    sizes = [
        saved_bytes_per_token(
            facts,
            facts.layers[0],
            seq_len=seq_len,
            dtype_bytes=2,
            is_masked=False,
            form="plain",
            is_cpu=is_cpu,
        )
        for seq_len, is_cpu in ((512, False), (1024, False), (512, True), (1024, True))
    ]
    assert sizes[0] == sizes[1] < sizes[2]
    assert sizes[3] - sizes[2] == 8 * 512 * 4


# -------------------------------------------------------------------------------------------- time


def work(kind: Any, seq_len: int = 4096) -> Any:
    card = named_machine("rtx4090")
    return attention_work(kind, card, num_tokens=seq_len, seq_len=seq_len, dtype_bytes=2)


@pytest.mark.usefixtures("quiet")
def test_on_a_cpu_latent_attention_is_not_fused() -> None:
    kind = model_facts(ATTENTION_LATENT).layers[0].attention
    cpu = replace(named_machine("rtx4090"), device="cpu")
    there = attention_work(kind, cpu, num_tokens=512, seq_len=512, dtype_bytes=4)
    assert there.flops == 2 * work(kind, 512).flops
    assert there.memory_s > 0 == work(kind, 512).memory_s


@pytest.mark.usefixtures("quiet")
def test_attention_is_priced_by_kind() -> None:
    softmax = model_facts(KINDS["plain"]).layers[0].attention
    assert isinstance(softmax, SoftmaxAttention)
    fused, written = work(softmax), work(replace(softmax, scores="sinks"))
    assert written.flops == 2 * fused.flops
    assert written.memory_s > 0 == fused.memory_s
    delta = model_facts(ATTENTION_DELTA).layers[0].attention
    assert work(delta, 8192).compute_s == pytest.approx(2 * work(delta).compute_s)
    assert work(softmax, 8192).compute_s == pytest.approx(4 * fused.compute_s)
    nothing = work(Recurrence(width=0, state_size=0))
    assert nothing.flops == nothing.memory_s == 0
    assert work(Recurrence(width=64, state_size=16)).flops == 6 * 64 * 16 * 4096


# -------------------------------------------------------------------------------------------- fused


FUSED_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    **FUSED_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "use_qk_norm": True,
}
FUSED_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # facts leave out their rotation
BUILT = [
    name for name in sorted(MEMORY_TESTED) if "_vl" not in name
]  # as causal models of their own


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(BUILT, "gemma3_text", "gpt_oss"))
def test_facts_say_what_is_proven(name: str) -> None:
    sizes = SIZES | ({"num_key_value_heads": 4} if name in FUSED_LATENT else {})
    config = AutoConfig.for_model(name, **sizes)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layered = LayeredModel(model.requires_grad_(requires_grad=False))
    layered.fuse()
    assert layered.fused is not None
    facts = model_facts(config.to_dict() | {"model_type": name})
    for number, layer in enumerate(facts.layers):
        found, said = layered.fused.counts(number), fused_parts(layer, lora())
        assert len(said.norms) == found["Norm"]
        assert len(said.head_norms) == found["HeadNorms"]
        assert all(x.num_weights == config.head_dim for x in said.head_norms)
        assert len(said.downs) == found["GatedMlp"]
        assert said.has_rotary == bool(found["Rotary"]) or (
            name in FUSED_LATENT and not said.has_rotary
        )


@pytest.mark.usefixtures("quiet")
def test_what_trains_and_what_is_not_known_on_paper_is_the_models_own_code() -> None:
    config = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
    facts = model_facts(config)
    layer = facts.layers[0]
    assert not fused_parts(layer, lora(modules=("norms",))).norms
    assert not fused_parts(layer, lora(modules=("up_proj",))).downs
    assert fused_parts(layer, lora(modules=("q_proj",))).downs


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("part", "kind"), [("norms", "Norm"), ("rotary", "Rotary"), ("gates", "GatedMlp"), ("loss", "")]
)
def test_a_part_that_is_plain_is_so_by_plan_and_in_the_engine(part: FusedPart, kind: str) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layered = LayeredModel(model.requires_grad_(requires_grad=False))
    layered.fuse(frozenset((part,)))
    assert layered.fused is not None
    assert {"Norm", "Rotary", "GatedMlp"} - set(layered.fused.counts(0)) == {kind} - {""}
    assert layered.fuses_loss == (part != "loss")
    facts = model_facts(config.to_dict() | {"model_type": "qwen3"})
    load = replace(workload(), layer_code="fused", plain_parts=frozenset((part,)))
    said = load.kept_fused(facts.layers[0], "cuda")
    assert (
        len(said.head_norms)
        == layered.fused.counts(0)["HeadNorms"]
        == 2 * (part in ("gates", "loss"))
    )
    found = {"norms": bool(said.norms), "rotary": said.has_rotary, "gates": bool(said.downs)}
    assert found | {"loss": load.fuses_loss("cuda")} == {
        name: name != part for name in ("norms", "rotary", "gates", "loss")
    }


# ---------------------------------------------------------------------------------------- trainable


TRAINABLE_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
TRAINABLE_MOE = TRAINABLE_TINY | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CONFIGS = {
    "qwen3": TRAINABLE_TINY | {"model_type": "qwen3"},
    "llama tied": TRAINABLE_TINY | {"model_type": "llama", "tie_word_embeddings": True},
    "gemma3_text": TRAINABLE_TINY | {"model_type": "gemma3_text"},
    "qwen3_moe": TRAINABLE_MOE | {"model_type": "qwen3_moe"},
    "qwen2_moe": TRAINABLE_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "olmoe": TRAINABLE_TINY | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": TRAINABLE_TINY
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
}
SECTIONS = {
    "DoRA": adapter(dora=True),
    "patterns": adapter(rank_pattern={"q_proj": 5, "o_proj": 1}),
    "norms and embeddings": adapter(modules_to_save=("norms", "embed_tokens")),
    "linears": adapter(modules_to_save=("o_proj", "q_proj")),
    "router": adapter(
        modules_to_save=("router",), rank_pattern={"experts.down_proj": 1, "v_proj": 4}
    ),
    "head": adapter(modules_to_save=("lm_head",)),
}
TRAINABLE_REFUSED = {(name, "router") for name in ("qwen3", "llama tied", "gemma3_text")} | {
    (name, "head") for name in ("llama tied", "gemma3_text")
}


def spec_of(facts: ModelFacts, section: LoraSection, *, experts: bool) -> AdapterSpec:
    return AdapterSpec(
        rank=3,
        targets=tuple(n for n in linear_names(facts) if n not in section.modules_to_save),
        experts=experts,
        rank_pattern=tuple(section.rank_pattern.items()),
        is_dora=section.dora,
        modules=section.modules_to_save,
    )


def made_by_peft(config: dict[str, Any], section: LoraSection, *, experts: bool) -> list[Shape]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    adapted = add_lora(model, section.model_copy(update={"rank": 3, "experts": experts}), seed=0)
    return [tuple(parameter.shape) for parameter in trained(adapted).values()]


@pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")
@pytest.mark.parametrize(
    ("name", "section"),
    [
        pytest.param(name, section, id=f"{name}-{what}")
        for name in CONFIGS
        for what, section in SECTIONS.items()
        if (name, what) not in TRAINABLE_REFUSED
    ],
)
def test_what_trains_has_the_shapes_that_peft_makes(name: str, section: LoraSection) -> None:
    facts = model_facts(CONFIGS[name])
    experts = facts.layers[0].num_experts > 0 and not section.dora
    spec = spec_of(facts, section, experts=experts)
    made = made_by_peft(CONFIGS[name], section, experts=experts)
    assert sorted(trained_tensor_shapes(facts, spec)) == sorted(made)
    assert trained_parameters(facts, spec) == sum(map(math.prod, made))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("qwen3", {"modules": ("router",)}, "names 'router', which a qwen3 model has not"),
        ("qwen3", {"modules": ("norm",)}, r"(?s)'norm'.*hint: .*\[norms\]"),
        ("llama tied", {"modules": ("lm_head",)}, "names lm_head, which is embed_tokens"),
        (
            "qwen3",
            {"rank_pattern": (("q_prj", 4),)},
            r"(?s)rank_pattern names 'q_prj'.*name q_proj",
        ),
        ("qwen3_moe", {"alpha_pattern": ("experts.down_proj",)}, "which has no adapter"),
        ("qwen3", {"targets": ()}, "nothing gets an adapter"),
    ],
)
def test_what_a_model_has_not_is_refused_by_name(
    name: str, changes: dict[str, Any], text: str
) -> None:
    facts = model_facts(CONFIGS[name])
    spec = replace(spec_of(facts, LoraSection(), experts=False), **changes)
    with pytest.raises(UnsupportedModelError, match=text):
        trained_parameters(facts, spec)


# ---------------------------------------------------------------------------------- memory and time

QWEN_8B = qwen3_8b()
PLAIN = AdapterSpec(rank=16, targets=linear_names(QWEN_8B), experts=False)


def terms(spec: AdapterSpec, *, dtype_bytes: int = 2) -> dict[str, int]:
    found = device_terms(
        QWEN_8B,
        named_machine("rtx5090"),
        workload(adapter=spec, dtype_bytes=dtype_bytes),
        num_slots=4,
        num_micro_batches=2,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
    )
    return {term.name: term.num_bytes for term in found}


@pytest.mark.parametrize(("dtype_bytes", "copy_bytes"), [(2, 6), (4, 4)])
def test_a_module_that_trains_whole_is_priced_with_its_master_gradient_and_states(
    dtype_bytes: int, copy_bytes: int
) -> None:
    spec = replace(PLAIN, modules=("lm_head", "norms"))
    count, head = module_parameters(QWEN_8B, spec), QWEN_8B.head_parameters
    assert count == head + QWEN_8B.final_norm_parameters + 36 * (2 * 4096 + 2 * 128)
    without, found = terms(PLAIN, dtype_bytes=dtype_bytes), terms(spec, dtype_bytes=dtype_bytes)
    assert "trained modules" not in without
    assert found["trained modules"] == copy_bytes * count
    assert found["a module's new gradient"] == dtype_bytes * head
    assert found["adapters"] == without["adapters"]
    assert found["gradients"] - without["gradients"] == 4 * count
    assert found["optimizer states"] - without["optimizer states"] == 8 * count


def test_dora_is_priced_with_its_magnitudes_and_the_norm_of_the_widest_weight() -> None:
    dora = replace(PLAIN, is_dora=True)
    magnitudes = adapter_parameters(QWEN_8B, dora) - adapter_parameters(QWEN_8B, PLAIN)
    assert magnitudes == 36 * sum(linear.d_out for linear in QWEN_8B.layers[0].linears)
    assert terms(dora)["one visit: DoRA's norm"] == 4 * (12288**2 + 4 * 4096 * 12288)


@pytest.mark.parametrize(
    ("modules", "goes_back"),
    [((), False), (("o_proj",), False), (("norms",), True), (("embed_tokens",), True)],
)
def test_gradients_go_back_through_the_front_when_anything_outside_the_layers_trains(
    modules: tuple[str, ...], goes_back: bool
) -> None:
    micro_batch = workload(adapter=replace(PLAIN, modules=modules))
    made = plan(QWEN_8B, big(), request(micro_batch, num_micro_batches=4, num_slots=4))
    kinds = [op.kind for op in made.schedule.ops]
    assert kinds.count(Kind.FRONT_BACKWARD) == (4 if goes_back else 0)


def big() -> Machine:
    return replace(named_machine("h100"), ram_bytes=2**40, vram_bytes=2**40, pinned_bytes=2**40)


@pytest.mark.parametrize(
    ("changes", "slower"),
    [
        ({"is_dora": True}, {"layers", "optimizer_s"}),
        ({"modules": ("o_proj",)}, {"layers", "optimizer_s"}),
        ({"modules": ("lm_head",)}, {"tail_s", "optimizer_s", "front_backward_s"}),
        ({"modules": ("embed_tokens",)}, {"front_backward_s", "optimizer_s"}),
        ({"rank_pattern": (("down_proj", 256),)}, {"layers", "optimizer_s"}),
    ],
)
def test_each_option_costs_time_where_it_works(changes: dict[str, Any], slower: set[str]) -> None:
    before = price(QWEN_8B, big(), workload(adapter=PLAIN))
    after = price(QWEN_8B, big(), workload(adapter=replace(PLAIN, **changes)))
    times = {
        "layers": lambda costs: costs.layers[0].backward_s,
        "tail_s": lambda costs: costs.tail_s,
        "optimizer_s": lambda costs: costs.optimizer_s,
        "front_backward_s": lambda costs: costs.front_backward_s,
    }
    assert {name for name, of in times.items() if of(after) > of(before)} == slower
    assert not any(of(after) < of(before) for of in times.values())


def test_dora_takes_the_memory_that_the_plan_says() -> None:
    from peft import LoraConfig, get_peft_model

    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(256, 768, bias=False, dtype=dtype)
        model = get_peft_model(
            torch.nn.Sequential(linear), LoraConfig(r=8, target_modules=["0"], use_dora=True)
        )
        x = torch.randn(1, 256, dtype=dtype, requires_grad=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            model(x)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        copies = {torch.float32: 3, torch.bfloat16: 4}[dtype]
        assert peak == pytest.approx(4 * (256**2 + copies * 256 * 768), rel=0.05)
