"""What facts say of fused parts, against what is proven on the modules of each family."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import model_facts
from offload.plan.facts.families import FAMILIES
from offload.plan.facts.workload import NOTHING, FusedPart, fused_parts
from tests.builders import lora, workload
from tests.tiers import mostly_slow

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    **EXPERTS,
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
LATENT = ("deepseek_v2", "deepseek_v3")  # facts leave out their rotation
BUILT = [name for name in FAMILIES if "_vl" not in name]  # as causal models of their own


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about sizes of tiny models
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(BUILT, "gemma3_text", "gpt_oss"))
def test_facts_say_what_is_proven(name: str) -> None:
    sizes = SIZES | ({"num_key_value_heads": 4} if name in LATENT else {})
    config = AutoConfig.for_model(name, **sizes)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layered = LayeredModel(model.requires_grad_(requires_grad=False))
    layered.fuse()
    assert layered.fused is not None
    facts = model_facts(config.to_dict() | {"model_type": name})
    for number, layer in enumerate(facts.layers):
        found, said = layered.fused.counts(number), fused_parts(facts, layer, lora())
        assert len(said.norms) == found["Norm"]
        assert len(said.head_norms) == found["HeadNorms"]
        assert all(x.num_weights == config.head_dim for x in said.head_norms)
        assert len(said.downs) == found["GatedMlp"]
        assert said.has_rotary == bool(found["Rotary"]) or (name in LATENT and not said.has_rotary)


def test_what_trains_and_what_is_not_known_on_paper_is_the_models_own_code() -> None:
    config = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
    facts = model_facts(config)
    layer = facts.layers[0]
    assert not fused_parts(facts, layer, lora(modules=("norms",))).norms
    assert not fused_parts(facts, layer, lora(modules=("up_proj",))).downs
    assert fused_parts(facts, layer, lora(modules=("q_proj",))).downs
    assert fused_parts(replace(facts, grade="built"), layer, lora()) == NOTHING


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
    said = load.kept_fused(facts, facts.layers[0], "cuda")
    assert (
        len(said.head_norms)
        == layered.fused.counts(0)["HeadNorms"]
        == 2 * (part in ("gates", "loss"))
    )
    found = {"norms": bool(said.norms), "rotary": said.has_rotary, "gates": bool(said.downs)}
    assert found | {"loss": load.fuses_loss("cuda")} == {
        name: name != part for name in ("norms", "rotary", "gates", "loss")
    }
