"""A model without memory for its weights, as transformers builds it from a config.

It is built on torch's meta device, where tensors have shapes and no memory. What a config says
about quantised weights is taken out of it first: the model is that which computes, and its weights
are read as what they decode to.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.errors import ModelError, reading_config
from finetune.model.classifier_head import with_classifier_head
from finetune.model.config import read_config
from finetune.recipe.sections import ModelSection

_OTHER_KINDS = (
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "a model of images and text"),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "an encoder with a decoder"),
    (MODEL_FOR_MASKED_LM_MAPPING, "a masked language model"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Empty:
    """A model without values.

    Attributes:
        model: On the meta device.
        quantization: What its config says about quantised weights.
        is_composite: Whether its checkpoint is for more than text.
    """

    model: PreTrainedModel
    quantization: Mapping[str, Any] | None
    is_composite: bool


def empty_of(section: ModelSection) -> PreTrainedModel:
    """Build the model of a recipe, in its dtype, with the head that it trains.

    Raises:
        ModelError: Its config is nowhere to be found, or transformers builds no model from it.
        ConfigError: The file is not a config.
    """
    dtype: torch.dtype = getattr(torch, section.dtype)
    model = _empty(config_of(section), source=_source(section), dtype=dtype).model
    if section.num_outputs:
        with torch.device("meta"):
            return with_classifier_head(
                model,
                num_outputs=section.num_outputs,
                seed=0,
                of_tokens=section.head == "token_classes",
            )
    return model


def empty_from(fields: Mapping[str, Any]) -> PreTrainedModel:
    """Build a causal language model from the fields of a config.

    Raises:
        ModelError: transformers has none of this type, or not of these sizes.
    """
    source = f"a {fields.get('model_type')} model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that only matter to generation
        config = _config_from(fields, source=source)
        return _empty(config, source=source, dtype=torch.float32).model


def empty_published(path: str, dtype: torch.dtype) -> Empty:
    """Build the model of a folder or hub id that holds weights.

    Raises:
        ModelError: transformers builds no model from its config.
    """
    with reading_config(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return _empty(config, source=path, dtype=dtype)


def config_of(section: ModelSection) -> PreTrainedConfig:
    """Return the config of a recipe's model.

    Raises:
        ModelError: It is nowhere to be found, or transformers does not read it.
        ConfigError: The file is not a config.
    """
    return _config_from(read_config(section), source=_source(section))


def _source(section: ModelSection) -> str:
    return str(section.config or section.path)


def _config_from(fields: Mapping[str, Any], *, source: str) -> PreTrainedConfig:
    others = {key: value for key, value in fields.items() if key != "model_type"}
    with reading_config(source):
        return AutoConfig.for_model(str(fields.get("model_type")), **others)


def _require_causal(config: PreTrainedConfig, *, source: str) -> None:
    """Refuse a config that transformers builds no causal language model of, and say what it is.

    Raises:
        ModelError: Its class is of another kind.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    kind = next((what for kinds, what in _OTHER_KINDS if type(config) in kinds), None)
    text = config.get_text_config(decoder=True)
    hint = "a causal language model, such as `Qwen/Qwen3-8B`"
    if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = f"its text model alone (`model_type: {text.model_type}`), if it is published"
    raise ModelError(
        f"{source} is {kind or 'no language model'}: {type(config).__name__}",
        limit="a causal language model is trained, as transformers lists them"
        " (AutoModelForCausalLM)",
        hint=hint,
    )


def _empty(config: PreTrainedConfig, *, source: str, dtype: torch.dtype) -> Empty:
    _require_causal(config, source=source)
    with reading_config(source), torch.device("meta"):
        quantization = _take_quantization(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    is_composite = type(config) is not type(model.config)
    return Empty(model=model, quantization=quantization, is_composite=is_composite)


def _take_quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return what a config says about quantised weights, and remove it from the config.

    With it, transformers would build the model from other modules.
    """
    found: dict[str, Any] | None = None
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            found = part.quantization_config or found
            del part.quantization_config
    return found
