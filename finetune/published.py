"""A model from tensors: those of a published checkpoint, or those of a store."""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.env import loading_one_by_one
from finetune.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_published(path: str, dtype: str) -> "PreTrainedModel":
    """Load a checkpoint, tensor by tensor; quantised ones as the plain model.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape; a file is missing or damaged;
            or the checkpoint is quantised in a way that cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.prequantised import format_of, plain_tensors

    with _named_errors(path), loading_one_by_one():
        config = AutoConfig.from_pretrained(path)
        quantization = _take_quantization(config)
        form = None if quantization is None else format_of(quantization, path)
        homes = _open(_weight_files(path))
        if form is not None:
            tensors = plain_tensors(homes, form, path)
            _require_all_experts(path, tensors)
            return model_around(tensors, path=path, dtype=dtype, source=path)
        _require_all_experts(path, homes)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _require_complete(path, *loaded, is_composite=type(config) is not type(loaded[0].config))
    model: PreTrainedModel = loaded[0]
    return model


def model_around(
    tensors: Mapping[str, Any], *, path: str, dtype: str, source: str
) -> "PreTrainedModel":
    """Build a model of these tensors, which stay where they are if they have its dtype.

    Args:
        tensors: By published names, or by the model's own.
        path: Where its config is.
        dtype: The model's.
        source: What errors name.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    _take_quantization(config)
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    kind: Any = type(empty)
    loaded = kind.from_pretrained(
        None,
        config=empty.config,
        state_dict=tensors,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _require_complete(source, *loaded, is_composite=type(config) is not type(empty.config))
    model: PreTrainedModel = loaded[0]
    model.name_or_path = model.config.name_or_path = path
    with contextlib.suppress(OSError):  # not every model comes with one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.path: {path} cannot be loaded: {str(error).splitlines()[0]}",
            limit="it must hold config.json and safetensors weights of a causal language model",
            hint="check `model.path`; an interrupted download is mended by downloading again",
        ) from error


def _take_quantization(config: "PreTrainedConfig") -> dict[str, Any] | None:
    """Return what a config says of quantised weights, and take it out of the config.

    With it, transformers would build the model of other modules.
    """
    found: dict[str, Any] | None = None
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            found = part.quantization_config or found
            del part.quantization_config
    return found


def _weight_files(path: str) -> list[str]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    with contextlib.suppress(OSError):
        return [str(cached_file(path, SAFE_WEIGHTS_NAME))]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
    files: list[str] = get_checkpoint_shard_files(path, index)[0]
    return files


def _open(files: Sequence[str]) -> dict[str, Any]:
    """Return the open file of each tensor; only headers are read."""
    from safetensors import safe_open

    homes: dict[str, Any] = {}
    for file in files:
        shard: Any = safe_open(file, framework="pt", device="cpu")
        homes |= dict.fromkeys(shard.keys(), shard)
    return homes


def _require_all_experts(path: str, names: Iterable[str]) -> None:
    """Refuse experts with a gap, which transformers would stack as if they were all.

    Tensors that are published one per expert are numbered from 0, as many of each kind.
    """
    numbers: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if found := re.fullmatch(r"(.*\bexperts\.)(\d+)(\..*)", name):
            numbers.setdefault(found[1], {}).setdefault(found[3], set()).add(int(found[2]))
    for prefix, kinds in numbers.items():
        num_experts = 1 + max(map(max, kinds.values()))
        for suffix, present in kinds.items():
            for number in range(num_experts):
                if number not in present:
                    raise _unmatched(path, "lacks", [f"{prefix}{number}{suffix}"])


def _require_complete(
    source: str, model: "PreTrainedModel", report: Mapping[str, Any], *, is_composite: bool
) -> None:
    """Refuse weights that leave part of the model at random, or that it has no place for.

    Of a checkpoint for more than text, only what belongs to the text is looked at. Layers that
    predict the tokens behind the next one are published behind the others, and not trained.
    """
    unexpected = {str(key) for key in report["unexpected_keys"]}
    if is_composite:
        own = (f"{model.base_model_prefix}.", "language_model.", "lm_head.")
        unexpected = {key for key in unexpected if key.startswith(own)}
    unexpected = {key for key in unexpected if not _is_in_further_layer(key, model.config)}
    for problem, names in (
        ("lacks", report["missing_keys"]),
        ("holds, unknown to the model,", unexpected),
        (
            "holds, in other sizes than its config's,",
            [key for key, *_ in report["mismatched_keys"]],
        ),
    ):
        if names:
            raise _unmatched(source, problem, names)


def _unmatched(source: str, problem: str, names: Collection[str]) -> ModelError:
    return ModelError(
        f"model.path: {source} {problem} {len(names)} tensors, such as {min(map(str, names))}",
        limit="weights and config must match",
        hint="download the model again, or give the config.json that belongs to it",
    )


def _is_in_further_layer(key: str, config: "PreTrainedConfig") -> bool:
    """Tell whether a tensor is of a layer behind the model's last, as many as the config says."""
    text = config.get_text_config(decoder=True)
    number = re.search(r"\.layers\.(\d+)\.", key)
    if number is None or not hasattr(text, "num_nextn_predict_layers"):
        return False
    num_layers: int = text.num_hidden_layers
    return num_layers <= int(number[1]) < num_layers + (text.num_nextn_predict_layers or 0)
