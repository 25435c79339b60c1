"""Which weights patterns choose, and how many they are."""

import pytest

from finetune.errors import ConfigError
from finetune.full.chosen_weights import choose_weights, counted
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
