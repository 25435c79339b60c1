"""A causal language model as a classifier of rows or tokens: transformers' own, around its decoder.

The decoder stays the object that it is, so that its weights wait where they were loaded to. The old
head is let go. The new one is drawn as transformers draws it where a checkpoint has none.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.errors import ModelError
from offload.plan.facts.trainable import SCORE

INITIALIZER_RANGE = 0.02
"""Standard deviation of new weights where a config has none; transformers' own default."""


def with_classifier_head(
    model: PreTrainedModel, *, num_outputs: int, seed: int, of_tokens: bool
) -> PreTrainedModel:
    """Return a classifier around a model's decoder.

    A token classifier's head has a bias, which starts at zero, and no dropout before it.

    Args:
        model: A causal language model, which is of no use afterwards.
        num_outputs: One of a reward model, or one for each class.
        seed: Of the head's weights.
        of_tokens: Whether it classifies tokens, and no rows.

    Raises:
        ModelError: transformers has no such classifier of this type of model.
    """
    require_classifier(model.config, of_tokens=of_tokens)
    config: Any = model.config
    config.num_labels = num_outputs
    kind: Any = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    if of_tokens:
        config.classifier_dropout = 0.0
    with torch.device("meta"):
        classifier: Any = kind.from_config(config, dtype=model.dtype)
    decoder: Any = model.base_model
    own = getattr(classifier, classifier.base_model_prefix)
    head = getattr(classifier, SCORE, None)
    has_bias = getattr(head, "bias", None) is not None
    if type(own) is not type(decoder) or type(head) is not nn.Linear or has_bias != of_tokens:
        raise ModelError(
            f"{type(classifier).__name__} is no {type(decoder).__name__} with a linear head"
            f" `{SCORE}`",
            limit="a head of rewards or classes follows the decoder of the causal language model",
            hint="another model",
        )
    setattr(classifier, classifier.base_model_prefix, decoder)
    embedding: Any = model.get_input_embeddings()
    device = embedding.weight.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weight = torch.empty_like(head.weight, device=device)
        weight.normal_(
            std=getattr(config.get_text_config(), "initializer_range", INITIALIZER_RANGE)
        )
    head.weight = nn.Parameter(weight)
    if of_tokens:
        head.bias = nn.Parameter(torch.zeros_like(head.bias, device=device))
    classifier.config = config
    classifier.generation_config = model.generation_config
    classifier.name_or_path = model.name_or_path
    for one in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(one, "output_router_logits", False):
            one.output_router_logits = False  # the classifier has no loss of its own
        if getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0  # it reads rows of one token, which it takes as they are
    found: PreTrainedModel = classifier
    return found


def require_classifier(config: PreTrainedConfig, *, of_tokens: bool) -> None:
    """Check that transformers has a classifier of a type of model.

    Raises:
        ModelError: It has none.
    """
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if of_tokens:
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(config) not in known:
        raise ModelError(
            f"transformers has no {'token' if of_tokens else 'sequence'} classification of"
            f" {config.model_type} models",
            limit="a reward model or a classifier is saved in its form, which others load",
            hint="another model",
        )
