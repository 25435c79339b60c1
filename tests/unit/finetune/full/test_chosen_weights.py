"""Which weights patterns choose, and how many they are."""

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from finetune.errors import ConfigError
from finetune.full.weights import choose_weights, counted
from finetune.model.empty import empty_of
from finetune.planning.request import facts_of
from finetune.recipe.sections import ModelSection
from offload.plan.facts.trainable import EMBEDDING, NORMS, all_weights

TINY = ModelSection(config="tiny-qwen3", init="random", dtype="float32")
TINY_MOE = ModelSection(config="tiny-qwen3-moe", init="random", dtype="float32")


@pytest.mark.parametrize("section", [TINY, TINY_MOE])
def test_a_star_counts_what_the_facts_count(section: ModelSection) -> None:
    found, facts = counted(section, ("*",)), facts_of(section)
    expected = all_weights(facts)
    assert found.layers == expected.layers
    assert dict(found.outer) == dict(expected.outer)


def test_patterns_choose_by_whole_names() -> None:
    model = empty_of(TINY)
    choose_weights(model, ["model.layers.1.*", "model.norm.weight"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.norm.weight" in trained
    assert all(name.startswith("model.layers.1.") for name in trained - {"model.norm.weight"})
    found = counted(TINY, ("model.layers.1.*", "model.norm.weight"))
    assert [number > 0 for number in found.layers] == [i == 1 for i in range(len(found.layers))]
    assert set(dict(found.outer)) == {NORMS}


def test_a_tied_embedding_is_counted_once() -> None:
    model = empty_of(TINY)
    assert model.config.tie_word_embeddings
    found = counted(TINY, ("model.layers.0.*", "model.embed_tokens.weight"))
    size = model.config.vocab_size * model.config.hidden_size
    assert dict(found.outer) == {EMBEDDING: size}


def test_weights_outside_of_layers_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="chooses no weight of a layer"):
        counted(TINY, ("model.norm.weight",))


def names_of(model: object, what: list[str]) -> set[str]:
    choose_weights(model, what)  # type: ignore[arg-type]
    return {name for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]


def with_biases() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def test_groups_choose_biases_norms_and_last_layers() -> None:
    model = with_biases()
    attention = ("q_proj", "k_proj", "v_proj")
    biases = {f"model.layers.{n}.self_attn.{name}.bias" for n in range(3) for name in attention}
    assert names_of(model, ["biases"]) == biases
    ends = ("input_layernorm", "post_attention_layernorm")
    norms = {f"model.layers.{n}.{end}.weight" for n in range(3) for end in ends}
    assert names_of(model, ["norms"]) == norms | {"model.norm.weight"}
    assert names_of(model, ["norms", "biases"]) == norms | biases | {"model.norm.weight"}
    last = {
        n for n, _ in model.named_parameters() if n.startswith(("model.layers.1", "model.layers.2"))
    }
    assert names_of(model, ["last_2_layers"]) == last
    assert names_of(model, ["last_2_layers", "lm_head.*"]) == last | {"lm_head.weight"}


def test_norms_of_queries_and_keys_are_counted() -> None:
    model = empty_of(TINY)
    norms = names_of(model, ["norms"])
    assert "model.layers.0.self_attn.q_norm.weight" in norms
    found = counted(TINY, ("norms",))
    assert found.num_parameters == sum(
        p.numel() for name, p in model.named_parameters() if "norm" in name
    )


@pytest.mark.parametrize(
    ("group", "limit"),
    [("biases", "weights only"), ("last_99_layers", r"it has \d+ layers")],
)
def test_a_group_that_a_model_does_not_have_is_refused(group: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.what: {group}(.|\n)*{limit}"):
        choose_weights(empty_of(TINY), [group])
