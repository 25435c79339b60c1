"""Facts of a model: from its config, without weights."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.adapter.lora import add_lora, linear_names, trained
from finetune.errors import ConfigError, ModelError
from finetune.hub.repository import is_hub_reachable
from finetune.model.classifier_head import with_classifier_head
from finetune.model.config import has_weights, read_config
from finetune.model.empty import (
    config_of,
    empty_from,
    empty_of,
    empty_published,
    empty_whole,
)
from finetune.model.facts import facts_from, facts_of
from finetune.model.tower import tower_facts
from finetune.planning.request import adapter_spec
from finetune.planning.request import facts_of as facts_of_config
from finetune.planning.request import facts_of as facts_of_section
from finetune.recipe.adapters import LoraSection
from finetune.recipe.sections import ModelSection
from offload.engine.model.inventory import inventory_of
from offload.engine.model.layers import LayeredModel
from offload.errors import SluiceError, UnsupportedModelError
from offload.plan.facts import facts as plan_facts
from offload.plan.facts.facts import AdapterSpec, ModelFacts, TensorClass
from offload.plan.facts.linears import Recurrence, SoftmaxAttention
from offload.plan.facts.trainable import (
    adapter_parameters,
    trained_parameters,
    trained_tensor_shapes,
)
from tests.parity.architectures import LACKS, micro_batches, read_table, reason_of, streamed
from tests.parity.tiny_models import (
    SPECIAL,
    class_of,
    small,
    tiny_config,
    tiny_model,
    with_adapters,
)
from tests.tiers import mostly_slow

ROOT = Path(__file__).parents[4]
TABLE = read_table(ROOT / "docs" / "architectures.md")
VERDICTS = {**TABLE.verdicts, **TABLE.images}
EXACT = [  # those that the installed transformers has
    name for name, verdict in VERDICTS.items() if verdict.is_exact and name in CONFIG_MAPPING
]
NOT_BY_DEFAULT = {"gemma4_assistant", "nougat"}  # transformers refuses its own default config
# Of each form of layer one type, in the default run.
FORMS = (
    "bamba",
    "bert",
    "cohere2_moe",
    "dbrx",
    "deepseek_v32",
    "falcon",
    "falcon_h1",
    "gemma4",
    "gpt2",
    "granitemoeshared",
    "inkling_text",
    "jetmoe",
    "kimi_k25",
    "lfm2_moe",
    "llama4",
    "longcat_flash",
    "mamba",
    "minimax_m2",
    "nemotron_h",
    "opt",
    "qwen3_5_moe",
    "qwen3_vl",
    "rwkv",
    "zamba2",
)
SHARING = ("zamba", "zamba2")  # their layers share weights, which the planner cannot count
# Linear layers of a tower that stands in the decoder: the trainer takes them for the decoder's own.
TOWER_IN_DECODER = ("evolla", "phi4_multimodal")
BY_CLASS: dict[str, TensorClass] = {"experts": "experts", "norm": "norms"}


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about tiny models
        yield


def tiny(model_type: str) -> Any:
    """Build a tiny model without memory; its class may be that of the text part."""
    with torch.device("meta"):
        return class_of(model_type)._from_config(tiny_config(model_type)).requires_grad_(False)


REFUSED = {
    name: verdict.reason
    for name, verdict in VERDICTS.items()
    if name.partition(",")[0] in CONFIG_MAPPING
    and not verdict.is_exact
    and not verdict.reason.startswith(LACKS)
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize(
    "model_type",
    mostly_slow(
        sorted(REFUSED),
        *("bart", "blt", "git", "inkling2_text", "kosmos-2.5", "pix2struct", "xmod"),
    ),
)
def test_a_plan_refuses_a_type_in_the_words_of_a_run(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        facts_of(tiny_model(model_type, seed=0))
    assert reason_of(caught.value) == REFUSED[model_type]


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS, "none that is known"])
def test_every_rope_type_is_planned_and_run_or_refused_by_both(rope_type: str) -> None:
    rope: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = tiny_config("llama").to_dict() | {"rope_parameters": rope}
    try:
        facts_from(config)
    except ModelError as error:
        with pytest.raises(ModelError, match=re.escape(error.what)):
            empty_from(config)
        return
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model = with_adapters(model, LayeredModel(model).layers, seed=0)
    assert streamed(model, micro_batches(), num_slots=2)[0] > 0


def counted(facts: ModelFacts, name: str) -> int:
    return sum(layer.parameters_by_class()[name] for layer in facts.layers)


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize(
    "model_type", mostly_slow(FORMS, "jetmoe", "llama4", "mamba", "qwen3_5_moe")
)
def test_types_of_every_form_are_counted_to_the_last_parameter(model_type: str) -> None:
    assert_counted(model_type)


@pytest.mark.usefixtures("quiet")
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", EXACT)
def test_every_type_that_can_be_trained_is_counted_to_the_last_parameter(model_type: str) -> None:
    assert_counted(model_type)


def assert_counted(model_type: str) -> None:
    model = tiny(model_type)
    if model_type in SHARING:
        with pytest.raises(UnsupportedModelError, match="has layers that share weights"):
            facts_of(model)
        return
    facts, stock = facts_of(model), inventory_of(LayeredModel(model), [])
    assert facts.num_parameters == stock.num_parameters
    assert facts.num_others >= 0
    assert all(layer.num_others >= 0 for layer in facts.layers)
    in_layers = Counter[TensorClass]()
    for row in stock.rows:
        in_layers[row.kind] += row.num_parameters if row.is_in_layers else 0
    for name, kind in BY_CLASS.items():
        assert counted(facts, name) == in_layers[kind], name
    # what is no product, such as a convolution, stands in the stock with the part that it is in
    assert counted(facts, "attention") <= in_layers["attention"]
    assert counted(facts, "mlp") <= in_layers["dense MLP"] + in_layers["other in layers"]
    beside = counted(facts, "shared_experts") + counted(facts, "router")
    assert beside <= in_layers["shared experts"] + in_layers["router"]
    stacked = [  # whatever the classes are called
        parameter.numel()
        for name, parameter in LayeredModel(model).layers.named_parameters()
        if parameter.dim() == 3 and re.search(r"expert|gate_up|down_proj", name)
    ]
    assert sum(stacked) <= counted(facts, "experts") + counted(facts, "shared_experts")
    if model_type not in TOWER_IN_DECODER:
        assert sorted(plan_facts.linear_names(facts)) == list(linear_names(model))


TOWERS = (
    *("gemma3", "gemma4", "glm4v", "internvl", "kimi_k25", "lfm2_vl", "mistral3"),
    *("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", mostly_slow(TOWERS, "qwen3_vl"))
def test_a_tower_is_what_a_model_has_beside_its_text_model(model_type: str) -> None:
    """Nothing of it is counted among what text passes through, and nothing twice."""
    kind = CONFIG_MAPPING[model_type]
    config = small(kind, SPECIAL.get(model_type, {}))
    facts = facts_from(config.to_dict())
    tower = facts.tower
    assert tower is not None
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    with torch.device("meta"):
        whole = model_class._from_config(config)
    sounds = (p for name, p in whole.named_parameters() if "audio" in name)
    num = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in sounds)
    assert facts.num_parameters + tower.num_parameters == num
    assert 0 < tower.block_parameters <= tower.num_parameters
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("model_type", "changes", "num_patches", "num_added"),
    [
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3, 5]}}, 4, 2),
        ("qwen3_5", {}, 4, 0),
        ("gemma3", {"vision_config": {"image_size": 896, "patch_size": 14}}, 16, 0),
        ("mistral3", {}, 4, 0),
        ("internvl", {}, 4, 0),
        ("smolvlm", {}, 4, 0),
        ("kimi_k25", {"vision_config": {"merge_kernel_size": [2, 3]}}, 6, 0),
        ("llava", {}, 1, 0),
    ],
)
def test_patches_are_merged_as_the_config_says(
    model_type: str, changes: dict[str, Any], num_patches: int, num_added: int
) -> None:
    whole = empty_whole({"model_type": model_type, **changes})
    tower = tower_facts(whole)
    assert tower is not None
    assert (tower.patches_per_token, tower.num_added) == (num_patches, num_added)


@pytest.mark.parametrize("model_type", ["qwen3", "chameleon", "no-such-type"])
def test_a_model_without_a_list_of_layers_over_patches_has_no_tower(model_type: str) -> None:
    assert tower_facts(empty_whole({"model_type": model_type})) is None


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
def test_the_forms_of_attention_are_told_apart() -> None:
    gpt2 = facts_of(tiny("gpt2")).layers[0]
    assert isinstance(gpt2.attention, SoftmaxAttention)
    assert gpt2.attention.rotary_dim == 0
    assert gpt2.attention.is_fused
    assert [x.reads for x in gpt2.linears] == ["input", "inside", "input", "plain"]
    bigcode = facts_of(tiny("gpt_bigcode")).layers[0].attention
    assert isinstance(bigcode, SoftmaxAttention)
    assert bigcode.num_kv_heads == 1
    mamba = facts_of(tiny("mamba")).layers[0].attention
    assert mamba == Recurrence(width=64, state_size=16)
    jamba = [type(layer.attention) for layer in facts_of(tiny("jamba")).layers]
    assert jamba == [Recurrence, SoftmaxAttention] * 2
    starcoder2 = facts_of(tiny("starcoder2")).layers[0]
    assert starcoder2.window == 8
    doubled = facts_of(tiny("longcat_flash")).layers[0].attention
    assert isinstance(doubled, SoftmaxAttention)
    assert doubled.num_heads == 2 * 4  # two blocks of it in a layer
    latent = facts_of(tiny("minicpm3")).layers[0].attention
    assert isinstance(latent, SoftmaxAttention)
    assert (latent.qk_dim, latent.rotary_dim, latent.num_rotated_heads) == (12, 4, 5)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", ["starcoder2", "stablelm", "ernie4_5_moe", "gpt_neox"])
def test_as_many_parameters_get_adapters_as_peft_makes(model_type: str) -> None:
    facts = facts_of(tiny(model_type))
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    experts = any(layer.num_experts for layer in facts.layers)
    adapted = add_lora(model, LoraSection(rank=3, alpha=6, experts=experts), seed=0)
    made = sum(parameter.numel() for parameter in trained(adapted).values())
    spec = AdapterSpec(rank=3, targets=plan_facts.linear_names(facts), experts=experts)
    assert adapter_parameters(facts, spec) == made


# ---------------------------------------------------------------------------------- from the recipe


def config_file(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(tiny_config(name).to_dict() | changes))
    return file


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("pix2struct", "Pix2StructForConditionalGeneration is an encoder with a decoder"),
        ("voxtral", r"(?s)a voxtral model is .*its text model alone \(`model_type: llama`\)"),
        ("t5", "a t5 model is an encoder with a decoder: T5Config"),
        ("vit", "a vit model is no language model: ViTConfig"),
        ("roformer", None),
    ],
)
def test_a_plan_refuses_a_class_that_cannot_be_trained_before_anything_is_measured(
    model_type: str, what: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(AutoConfig.for_model(model_type).to_json_string(False))
    section = ModelSection(path=str(tmp_path))
    if what is None:
        assert facts_of_section(section).model_type == model_type
        return
    with pytest.raises((ModelError, UnsupportedModelError), match=what):
        facts_of_section(section)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("method", ["quip", "hqq"])
def test_a_plan_refuses_quantised_weights_that_are_not_read(method: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, "llama", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=f"is quantised, its quant_method is {method}"):
        facts_of_section(ModelSection(path=str(file.parent)))
    facts_of_section(ModelSection(config=str(file), init="random"))


@pytest.mark.usefixtures("quiet")
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(set(CONFIG_MAPPING) - NOT_BY_DEFAULT))
def test_a_plan_of_any_type_of_transformers_is_refused_if_its_model_is_not_built(
    model_type: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return
    (tmp_path / "config.json").write_text(config.to_json_string(False))
    with pytest.raises(SluiceError):
        facts_of_section(ModelSection(path=str(tmp_path)))


@pytest.mark.usefixtures("quiet")
def test_a_type_that_nobody_knows_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = config_file(tmp_path, "llama", model_type="lama")
    section = ModelSection(config=str(file), init="random")
    with pytest.raises(ModelError, match=r"(?s)'lama' is not known.*nearest: `llama`"):
        facts_of_section(section)


@pytest.mark.usefixtures("quiet")
def test_a_config_of_which_nothing_can_be_built_is_refused() -> None:
    what = r"(?s)no model from .* a starcoder2 model .*hint: correct"
    with pytest.raises(ModelError, match=what):
        facts_from({"model_type": "starcoder2", "hidden_size": "wide"})


@pytest.mark.usefixtures("quiet")
def test_a_model_without_linear_layers_for_adapters_is_refused_plainly() -> None:
    spec = AdapterSpec(rank=3, targets=(), experts=False)
    with pytest.raises(UnsupportedModelError, match="nothing in a gpt2 model can get an adapter"):
        adapter_parameters(facts_of(tiny("gpt2")), spec)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", ["llama4_text", "dbrx"])
def test_an_adapter_on_experts_of_their_own_code_is_refused_by_a_plan(model_type: str) -> None:
    spec = AdapterSpec(rank=3, targets=(), experts=True)
    with pytest.raises(UnsupportedModelError, match=r"Experts does not go through"):
        adapter_parameters(facts_of(tiny(model_type)), spec)


@pytest.mark.usefixtures("quiet")
def test_auto_config_round_trip_is_what_the_planner_reads() -> None:
    config = tiny_config("starcoder2").to_dict()
    assert facts_from(config) == facts_of(tiny("starcoder2"))
    assert AutoConfig.for_model(**config).model_type == "starcoder2"


# ------------------------------------------------------------------------------------------- config


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-cache"))


def test_a_shipped_shape_stands_in_for_a_hub_id_that_is_not_here(offline: None) -> None:
    config = read_config(ModelSection(path="Qwen/Qwen3-30B-A3B"))
    assert config["num_experts"] == 128
    assert not has_weights(ModelSection(path="Qwen/Qwen3-30B-A3B"))


def test_a_hub_id_without_a_network_is_an_error_that_says_so(offline: None) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing is no local directory.*HF_HUB_OFFL"):
        read_config(ModelSection(path="nobody/nothing"))


def test_a_directory_without_a_config_is_named_as_the_setting_that_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.path: {tmp_path} holds no config\.json"):
        read_config(ModelSection(path=str(tmp_path)))


def test_a_config_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    "kind", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "mistral"]
)
def test_a_config_is_read_as_from_pretrained_reads_it(kind: str, tmp_path: Path) -> None:
    """transformers 5 writes an infinity as an object, which no field accepts (#41)."""
    config = CONFIG_MAPPING[kind]()
    if kind == "mistral":  # then transformers takes it for another type
        config.num_hidden_layers = 2
        config.layer_types = ["sliding_attention", "full_attention"]
    config.save_pretrained(tmp_path)
    wanted = AutoConfig.from_pretrained(tmp_path)
    found = config_of(ModelSection(path=str(tmp_path)))
    assert type(found) is type(wanted)
    assert found.to_json_string() == wanted.to_json_string()


def test_a_model_of_code_in_its_own_repository_is_refused_as_one() -> None:
    fields = {"model_type": "own_arch", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    with pytest.raises(ModelError) as error:
        empty_from(fields)
    assert error.value.what.startswith("model_type 'own_arch' is built by code of its own repos")
    assert error.value.limit == "no code of a repository is run (trust_remote_code)"


def test_a_direct_connection_proves_nothing_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    assert is_hub_reachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_hub_reachable()


# -------------------------------------------------------------------------------------------- empty


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "quantization_config": FP8,
}
BUILDERS = {
    "section": lambda folder: empty_of(ModelSection(path=str(folder), dtype="float32")),
    "fields": lambda folder: empty_from(json.loads((folder / "config.json").read_text())),
    "published": lambda folder: empty_published(str(folder), torch.float32).model,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_an_empty_model_is_plain_where_its_config_is_quantised(build: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    model = build(tmp_path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not hasattr(model.config, "quantization_config")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}


def test_what_a_config_says_about_quantised_weights_is_kept_for_their_reader(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    empty = empty_published(str(tmp_path), torch.bfloat16)
    assert empty.quantization == FP8
    assert not empty.is_composite


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_config_that_builds_no_model_is_one_error(build: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "vit"}))
    with pytest.raises(ModelError, match=r" is no language model: ViTConfig"):
        build(tmp_path)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("second", [None, 0.0, 0.5], ids=["one", "equal", "different"])
def test_two_tensors_that_differ_are_untied_in_facts_as_in_what_is_loaded(
    second: float | None, tmp_path: Path
) -> None:
    tiny_model("mistral3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "language_model.lm_head.weight" not in tensors
    if second is not None:
        embedding = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = embedding + second
        save_file(tensors, file, metadata={"format": "pt"})
    plain: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    is_tied = plain.lm_head.weight is plain.get_input_embeddings().weight
    assert is_tied is (second != 0.5)
    found = facts_of_section(ModelSection(path=str(tmp_path)))
    assert found.tie_word_embeddings is is_tied
    assert facts_of(plain).num_parameters == found.num_parameters
    empty: Any = empty_published(str(tmp_path), torch.float32).model
    assert (empty.lm_head.weight is empty.get_input_embeddings().weight) is is_tied


# ---------------------------------------------------------------------------------- classifier head


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}


def causal(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE | changes))
    return model


def test_it_gives_the_outputs_of_a_classifier_with_the_same_weights() -> None:
    ids = torch.arange(1, 13).view(2, 6)
    own: Any = with_classifier_head(causal(), num_outputs=1, seed=3, of_tokens=False)
    config = Qwen3Config(**SHAPE | {"num_labels": 1, "pad_token_id": 0})
    plain: Any = AutoModelForSequenceClassification.from_config(config)
    assert type(own) is type(plain)
    assert own.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(own.state_dict())
    with torch.no_grad():
        assert torch.equal(own(ids).logits, plain(ids).logits)


def test_a_token_classifier_has_a_bias_and_no_dropout() -> None:
    ids = torch.arange(1, 13).view(2, 6)
    own: Any = with_classifier_head(causal(), num_outputs=3, seed=3, of_tokens=True)
    plain: Any = AutoModelForTokenClassification.from_config(
        Qwen3Config(**SHAPE | {"num_labels": 3})
    )
    assert type(own) is type(plain)
    plain.load_state_dict(own.state_dict())
    assert own.score.bias.tolist() == [0, 0, 0]
    with torch.no_grad():
        assert torch.equal(own.train()(ids).logits, plain.eval()(ids).logits)


def test_the_decoder_is_the_same_object_and_its_embedding_is_tied_to_nothing() -> None:
    model = causal(tie_word_embeddings=True)
    decoder = model.get_decoder()
    own = with_classifier_head(model, num_outputs=1, seed=0, of_tokens=False)
    assert own.get_decoder() is decoder
    assert own.get_output_embeddings() is None
    assert own.config.pad_token_id == 0
    assert "score.weight" in dict(own.named_parameters())


def test_the_head_is_drawn_from_the_seed_alone_as_transformers_draws_it() -> None:
    def head(seed: int, **changes: Any) -> torch.Tensor:
        torch.manual_seed(seed + 11)
        own: Any = with_classifier_head(
            causal(**changes), num_outputs=1, seed=seed, of_tokens=False
        )
        weight: torch.Tensor = own.score.weight.detach()
        return weight

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))
    wide = head(1, hidden_size=4096, initializer_range=0.5, num_hidden_layers=1)
    assert wide.std().item() == pytest.approx(0.5, rel=0.05)


def test_drawing_it_leaves_the_generator_as_it_was() -> None:
    model = causal()
    state = torch.random.get_rng_state()
    with_classifier_head(model, num_outputs=1, seed=1, of_tokens=False)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_classifier_with_another_head_is_refused() -> None:
    config = RobertaConfig(**SHAPE, is_decoder=True)
    with pytest.raises(ModelError, match="RobertaForSequenceClassification is no RobertaModel"):
        with_classifier_head(
            AutoModelForCausalLM.from_config(config), num_outputs=1, seed=0, of_tokens=False
        )


def test_a_type_without_a_classifier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite", **SHAPE}))
    section = ModelSection(path=str(tmp_path), head="reward")
    with pytest.raises(ModelError, match="no sequence classification of granite models"):
        facts_of_config(section)
    with pytest.raises(ModelError, match="no sequence classification of granite models"):
        empty_of(section)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_plan_counts_the_parameters_of_the_model_that_is_trained(
    is_tied: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=is_tied)
    config.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), head="reward", dtype="float32")
    facts, model = facts_of_config(section), empty_of(section)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.num_outputs == 1
    adapter = LoraSection(modules_to_save=("score",))
    spec = adapter_spec(adapter, facts, dtype_bytes=4)
    without = adapter_spec(LoraSection(), facts, dtype_bytes=4)
    assert trained_parameters(facts, spec) - trained_parameters(facts, without) == 32
    assert (1, 32) in trained_tensor_shapes(facts, spec)


def test_the_plan_counts_the_bias_of_a_head_for_tokens(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), head="token_classes", num_classes=3, dtype="float32")
    facts, model = facts_of_config(section), empty_of(section)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    spec = adapter_spec(LoraSection(modules_to_save=("score",)), facts, dtype_bytes=4)
    without = adapter_spec(LoraSection(), facts, dtype_bytes=4)
    assert trained_parameters(facts, spec) - trained_parameters(facts, without) == 3 * 33
    assert {(3, 32), (3,)} <= {*trained_tensor_shapes(facts, spec)}
