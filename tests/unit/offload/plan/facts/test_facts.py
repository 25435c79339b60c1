import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.facts.trainable import adapter_parameters, trained_tensor_shapes
from tests.builders import QWEN3_30B
from tests.counted import SMALL
from tests.counting import counted, on_meta, without_zeros

SHAPES = Path(__file__).parents[5] / "recipes" / "shapes"
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


def assert_equal_to_built(config: dict[str, Any]) -> None:
    facts, model = model_facts(config), on_meta(config)
    layers = model.get_submodule("model.layers")
    assert [without_zeros(layer) for layer in facts.layers] == [counted(x) for x in layers]
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if facts.model_type not in ("mixtral", "mistral", "olmoe", "llama"):
        assert [layer.window for layer in facts.layers] == windows


@pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
def test_counts_per_tensor_class_equal_the_built_model(config: dict[str, Any]) -> None:
    assert_equal_to_built(config)


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_counts_of_real_shapes_equal_the_built_model(path: Path) -> None:
    assert_equal_to_built(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
def test_a_config_written_by_transformers_is_read_the_same(config: dict[str, Any]) -> None:
    written = AutoConfig.for_model(**config).to_dict()
    assert model_facts(written) == model_facts(config)


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
    model = get_peft_model(on_meta(config), lora)
    made = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(facts, AdapterSpec(rank=3, targets=names, experts=experts)) == made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_all_linear_in_peft_means_the_names_that_facts_lists() -> None:
    config = TINY_CONFIGS["qwen2_moe"]
    model = get_peft_model(on_meta(config), LoraConfig(r=2, target_modules="all-linear"))
    adapted = {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert adapted == set(linear_names(model_facts(config)))


def test_an_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)'qwen3moe'.*hint: .*qwen3_moe") as e:
        model_facts(QWEN3_30B | {"model_type": "qwen3moe"})
    assert e.value.limit.startswith("known are deepseek_v2, deepseek_v3, gemma")


@pytest.mark.parametrize("key", sorted(QWEN3_30B.keys() - {"num_key_value_heads", "head_dim"}))
def test_a_config_without_a_needed_size_is_refused_by_the_key(key: str) -> None:
    config = {name: value for name, value in QWEN3_30B.items() if name != key}
    with pytest.raises(UnsupportedModelError, match=key):
        model_facts(config)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("hidden_size", "2048", "a whole number"),
        ("num_experts", True, "a whole number"),
        ("tie_word_embeddings", 1, "true or false"),
        ("mlp_only_layers", 3, "a list"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_key_and_value(
    key: str, value: object, limit: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"`{key}` is {value!r} .*must be {limit}"):
        model_facts(QWEN3_30B | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", value) for value in (10**9, 0, -1)),
        *(("num_attention_heads", value) for value in (0, 10**400)),
        *(("head_dim", value) for value in (0, -8)),
        ("hidden_size", 10**18),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", -1),
        ("partial_rotary_factor", "half"),
        ("partial_rotary_factor", 1e300),
    ],
)
def test_a_size_that_no_model_has_is_refused_by_the_key(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"`{key}` is ") as caught:
        model_facts(QWEN3_30B | {key: value})
    assert len(str(caught.value)) < 300


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
