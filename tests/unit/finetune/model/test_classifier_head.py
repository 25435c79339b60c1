"""A reward head: transformers' classifier around a decoder, drawn from a seed, and its plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
)

from finetune.errors import ModelError
from finetune.model.classifier_head import with_classifier_head
from finetune.model.empty import empty_of
from finetune.planning.request import adapter_spec, facts_of
from finetune.recipe.sections import AdapterSection, ModelSection
from offload.plan.facts.trainable import trained_parameters, trained_tensor_shapes

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
        facts_of(section)
    with pytest.raises(ModelError, match="no sequence classification of granite models"):
        empty_of(section)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_plan_counts_the_parameters_of_the_model_that_is_trained(
    is_tied: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=is_tied)
    config.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), head="reward", dtype="float32")
    facts, model = facts_of(section), empty_of(section)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.num_outputs == 1
    adapter = AdapterSection(modules_to_save=("score",))
    spec = adapter_spec(adapter, facts, dtype_bytes=4)
    without = adapter_spec(AdapterSection(), facts, dtype_bytes=4)
    assert trained_parameters(facts, spec) - trained_parameters(facts, without) == 32
    assert (1, 32) in trained_tensor_shapes(facts, spec)


def test_the_plan_counts_the_bias_of_a_head_for_tokens(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), head="token_classes", num_classes=3, dtype="float32")
    facts, model = facts_of(section), empty_of(section)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    spec = adapter_spec(AdapterSection(modules_to_save=("score",)), facts, dtype_bytes=4)
    without = adapter_spec(AdapterSection(), facts, dtype_bytes=4)
    assert trained_parameters(facts, spec) - trained_parameters(facts, without) == 3 * 33
    assert {(3, 32), (3,)} <= {*trained_tensor_shapes(facts, spec)}
