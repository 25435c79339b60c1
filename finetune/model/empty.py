"""A model without memory for its weights, as transformers builds it from a config.

It is built on torch's meta device, where tensors have shapes and no memory. What a config says
about quantised weights is taken out of it first: the model is that which computes, and its weights
are read as what they decode to.
"""

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from finetune.errors import ModelError, reading_config
from finetune.files.shards import INDEX, SINGLE, read_weight_map
from finetune.files.tensors import read_bytes, read_header
from finetune.model.config import known_folder, read_config
from finetune.recipe.sections import ModelSection

_READ_BY_SCANS = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types whose kernels read the weight of `out_proj` themselves, where peft adapts none."""


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers inside the decoder layers, by full name.

    A subclass that computes something else, such as a router that returns scores and choices, is
    none of them; nor is one whose name is a number, which peft would take for a layer's.
    """
    decoder: nn.Module = model.get_decoder()
    if isinstance(decoder, nn.Linear):  # of modernbert-decoder, which calls its head so
        decoder = model.base_model
    left = "out_proj" if model.config.model_type in _READ_BY_SCANS else None
    prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is decoder)
    return {
        prefix + name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
        and _is_linear(type(module))
        and not name.rpartition(".")[2].isdigit()
        and name.rpartition(".")[2] != left
        and re.search(r"(^|\.)(layers?|h|blocks?)\.\d+\.", name)
    }


def _is_linear(kind: type[nn.Linear]) -> bool:
    """Return whether a class of linear layers computes their product, tried on a small one."""
    if kind.forward is nn.Linear.forward:
        return True
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            small, x = kind(3, 2), torch.randn(4, 3)
            found = small(x)
        except (TypeError, ValueError, AttributeError, RuntimeError):  # it is made of a config
            return False
        expected = nn.functional.linear(x, small.weight, small.bias)
    return isinstance(found, torch.Tensor) and torch.allclose(found, expected)


_CLASSES: tuple[tuple[Any, Any], ...] = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
)
"""Which types a class of transformers builds, and the class; the first that knows a type does."""
_OTHER_KINDS = (
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "an encoder with a decoder"),
    (MODEL_FOR_MASKED_LM_MAPPING, "a masked language model"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Empty:
    """A model without values."""

    model: PreTrainedModel  # the model on the meta device
    quantization: Mapping[str, Any] | None  # what its config says about quantised weights
    is_composite: bool  # whether its checkpoint is for more than text


def empty_of(section: ModelSection) -> PreTrainedModel:
    """Build the model of a recipe, in its dtype, with the head that it trains.

    Raises:
        ModelError: Its config is nowhere to be found, or transformers builds no model from it.
        ConfigError: The file is not a config.
    """
    dtype: torch.dtype = getattr(torch, section.dtype)
    folder = known_folder(section)
    model = _empty(config_of(section), source=_source(section), dtype=dtype, folder=folder).model
    if section.num_outputs:
        from finetune.model.classifier_head import with_classifier_head

        with torch.device("meta"):
            return with_classifier_head(
                model,
                num_outputs=section.num_outputs,
                seed=0,
                of_tokens=section.head == "token_classes",
            )
    return model


def empty_from(fields: Mapping[str, Any], *, folder: Path | None = None) -> PreTrainedModel:
    """Build a language model from the fields of a config.

    Args:
        fields: The fields of config.json.
        folder: The folder of the weights; None if they are random or not here.

    Raises:
        ModelError: transformers has none of this type, or not of these sizes.
    """
    source = f"a {fields.get('model_type')} model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that only matter to generation
        config = _config_from(fields, source=source)
        return _empty(config, source=source, dtype=torch.float32, folder=folder).model


def empty_whole(fields: Mapping[str, Any]) -> PreTrainedModel | None:
    """Build the model for images and text of a config, without values.

    None if it has none, or transformers builds none here.
    """
    source = f"a {fields.get('model_type')} model"
    with warnings.catch_warnings(), suppress(ModelError):
        warnings.simplefilter("ignore")
        config = _config_from(fields, source=source)
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            with reading_config(source), torch.device("meta"):
                _take_quantization(config)
                model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
                return model
    return None


def empty_published(path: str, dtype: torch.dtype) -> Empty:
    """Build the model of a folder that holds weights.

    Raises:
        ModelError: transformers builds no model from its config.
    """
    with reading_config(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return _empty(config, source=path, dtype=dtype, folder=Path(path))


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
    model_type = str(fields.get("model_type"))
    if model_type not in CONFIG_MAPPING and "auto_map" in fields:
        raise ModelError(
            f"model_type {model_type!r} is built by code of its own repository, and not known to"
            f" transformers {transformers.__version__}",
            limit="no code of a repository is run (trust_remote_code)",
            hint="`pip install -U transformers` if a newer version knows it; or another model",
        )
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING, n=3, cutoff=0.0)
        raise ModelError(
            f"model_type {model_type!r} is not known to transformers {transformers.__version__}",
            limit="its own code builds the model; none of a model's repository is run",
            hint=f"nearest: `{'`, `'.join(near)}`; or a version that knows it",
        )
    with reading_config(source):
        return AutoConfig.for_model(model_type, **others)


def model_class(config: PreTrainedConfig, *, source: str) -> Any:
    """Return the class of transformers that builds a model of a config: `AutoModelFor...`.

    A model for images and text is trained on text: its towers are left where they are.

    Raises:
        ModelError: No class of language models knows the config.
    """
    for known, kind in _CLASSES:
        if type(config) in known:
            return kind
    found = next((what for known, what in _OTHER_KINDS if type(config) in known), None)
    text = config.get_text_config(decoder=True)
    hint = "a model of such a class, such as `Qwen/Qwen3-8B`"
    if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = f"its text model alone (`model_type: {text.model_type}`), if it is published"
    raise ModelError(
        f"{source} is {found or 'no language model'}: {type(config).__name__}",
        limit="a causal language model is trained, or a model for images and text, as transformers"
        " lists them (AutoModelForCausalLM, AutoModelForImageTextToText)",
        hint=hint,
    )


def _empty(
    config: PreTrainedConfig, *, source: str, dtype: torch.dtype, folder: Path | None
) -> Empty:
    kind = model_class(config, source=source)
    with reading_config(source), torch.device("meta"):
        quantization = _take_quantization(config)
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    if folder is not None:
        _untie(model, _files_of(folder))
    is_composite = type(config) is not type(model.config)
    return Empty(model=model, quantization=quantization, is_composite=is_composite)


def _untie(model: PreTrainedModel, files: Mapping[str, Path]) -> None:
    """Give each of two tied weights a tensor of its own if a checkpoint holds two that differ.

    transformers does so while it loads them, whatever the config says.

    Args:
        model: Without values.
        files: The file of each published tensor.
    """
    ties: dict[str, str] = model.all_tied_weights_keys
    if not (ties and files):
        return
    rules: Any = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    prefix, state = model.base_model_prefix, model.state_dict()
    published = {
        rename_source_key(name, renamings, [], prefix, state)[0]: name
        for name in files
        if not re.search(r"\.\d+\.", name)  # in a layer
    }
    for target, source in list(ties.items()):
        pair = [published[name] for name in (target, source) if name in published]
        if len(pair) < 2 or _are_equal(pair, files):
            continue
        owner, _, name = target.rpartition(".")
        alone = nn.Parameter(torch.empty_like(model.get_parameter(target)))
        setattr(model.get_submodule(owner), name, alone)
        del ties[target]


def _are_equal(names: Sequence[str], files: Mapping[str, Path]) -> bool:
    """Return whether two tensors have the same bytes; not if a file is not here."""
    if not all(files[name].exists() for name in names):
        return False
    first, second = (read_header(files[name])[name] for name in names)
    pieces = zip(read_bytes(first), read_bytes(second), strict=True)
    return first.spec == second.spec and all(a == b for a, b in pieces)


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, as far as this machine knows them."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return dict.fromkeys(read_header(single), single)
    if index.is_file():
        return {name: index.with_name(file) for name, file in read_weight_map(index).items()}
    return {}


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


_CAP = "attn_logit_softcapping"


def implementation_of(config: PreTrainedConfig) -> str:
    """Return the attention implementation that computes what a model's config says.

    torch's fused attention has no soft caps. Some versions of transformers choose it for models
    that have them (gemma2) and silently drop the caps, which makes it a different model.
    """
    chosen = str(config._attn_implementation)
    is_capped = bool(vars(config.get_text_config()).get(_CAP))
    return "eager" if is_capped and chosen == "sdpa" else chosen


def compute_exactly(model: PreTrainedModel) -> None:
    """Set a model's attention to the `implementation_of` its config."""
    implementation = implementation_of(model.config)
    if implementation != model.config._attn_implementation:
        model.set_attn_implementation(implementation)


def auto_class(model: PreTrainedModel) -> str:
    """Return the name of transformers' class that loads a model by the config of its checkpoint."""
    for end in ("ForSequenceClassification", "ForTokenClassification"):
        if type(model).__name__.endswith(end):
            return f"AutoModel{end}"
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    is_causal = isinstance(model, causal.get(type(model.config), ()))  # FSDP2 makes subclasses
    return f"AutoModelFor{'CausalLM' if is_causal else 'ImageTextToText'}"
