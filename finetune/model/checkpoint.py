"""A model from tensors: those of a published checkpoint, or those of a store."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.env import loading_one_by_one
from finetune.errors import ModelError, read_by_library, unmatched
from finetune.files.shards import INDEX, SINGLE, read_weight_map, weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from finetune.model.empty import Empty

GENERATION_CONFIG = "generation_config.json"


def load_published(path: str, dtype: str) -> "PreTrainedModel":
    """Load a checkpoint, tensor by tensor; quantised ones as the plain model.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape; a file is missing or damaged;
            or the checkpoint is quantised in a way that cannot be read.
    """
    import torch

    from finetune.files.tensors import open_tensors
    from finetune.model.dequantize import format_of, plain_tensors
    from finetune.model.empty import empty_published
    from finetune.model.fuse_experts import join_experts

    with _named_errors(path), loading_one_by_one():
        kind: torch.dtype = getattr(torch, dtype)
        empty = empty_published(path, kind)
        quantization = empty.quantization
        form = None if quantization is None else format_of(quantization, path)
        tensors = open_tensors(_weight_files(path))
        if form is not None:
            tensors = plain_tensors(tensors, form, path)
        _require_all_experts(path, tensors)
        return _filled(empty, join_experts(tensors, empty.model, path), path, kind, source=path)


def weights_folder(path: str) -> Path:
    """Return the folder with a model's config and shards; one on the hub is downloaded.

    Raises:
        ModelError: A file is missing.
    """
    from transformers.utils.hub import cached_file

    with _named_errors(path):
        _weight_files(path)
        return Path(str(cached_file(path, "config.json"))).parent


def model_around(
    tensors: Mapping[str, "torch.Tensor"], *, path: str, dtype: str, source: str
) -> "PreTrainedModel":
    """Build a model from these tensors, which are not copied if they have its dtype.

    Args:
        tensors: By the model's own names.
        path: Where its config is.
        dtype: The model's.
        source: Its name in errors.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape.
    """
    import torch

    from finetune.model.empty import empty_published

    kind: torch.dtype = getattr(torch, dtype)
    return _filled(empty_published(path, kind), tensors, path, kind, source=source)


def is_loaded(parameter: "torch.nn.Parameter") -> bool:
    """Return whether a parameter is from the weights; transformers marks these to skip init."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def _filled(
    empty: "Empty", tensors: Mapping[str, Any], path: str, dtype: "torch.dtype", *, source: str
) -> "PreTrainedModel":
    from transformers import GenerationConfig

    kind: Any = type(empty.model)
    loaded = kind.from_pretrained(
        None,
        config=empty.model.config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _require_complete(source, *loaded, is_composite=empty.is_composite)
    model: PreTrainedModel = loaded[0]
    model.name_or_path = model.config.name_or_path = path
    if _has_generation_config(path):
        with read_by_library(
            f"the generation_config.json of {path} cannot be read",
            error=ModelError,
            limit="it holds how the model generates: samples are taken as it says",
            hint="correct it, download it again, or remove it",
        ):
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _has_generation_config(path: str) -> bool:
    """Return whether a model has a generation config; not every model does."""
    from transformers.utils.hub import cached_file

    if Path(path).is_dir():
        return os.path.lexists(Path(path, GENERATION_CONFIG))
    with contextlib.suppress(OSError):
        return cached_file(path, GENERATION_CONFIG) is not None
    return False


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise ModelError(
                f"model.path: {path} cannot be loaded: there is no memory left for one tensor more",
                limit="loading takes about twice the largest tensor in addition to the layers",
                hint="free memory, or let layers wait in fewer bytes: `offload.codec: nf4`",
            ) from error
        raise ModelError(
            f"model.path: {path} cannot be loaded: {str(error).splitlines()[0]}",
            limit="it must hold config.json and safetensors weights of a causal language model",
            hint="check `model.path`; if a download was interrupted, download the model again",
        ) from error


def _weight_files(path: str) -> list[str]:
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    if Path(path).is_dir():
        return [str(file) for file in weight_files(Path(path))]
    with contextlib.suppress(OSError):
        return [str(cached_file(path, SINGLE))]
    index = cached_file(path, INDEX)
    read_weight_map(Path(str(index)))
    files: list[str] = get_checkpoint_shard_files(path, index)[0]
    return files


def _require_all_experts(path: str, names: Iterable[str]) -> None:
    """Refuse experts with a gap in their numbers: transformers would stack them as if complete."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := re.fullmatch(r"(.*\bexperts\.)(\d+)(\..*)", name):
            numbers.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (prefix, suffix), present in numbers.items():
        missing = set(range(max(present))) - present
        if missing:
            raise unmatched(path, "lacks", [f"{prefix}{i}{suffix}" for i in missing])


def _require_complete(
    source: str, model: "PreTrainedModel", report: Mapping[str, Any], *, is_composite: bool
) -> None:
    """Refuse weights that leave part of the model random, or that do not belong to the model.

    Of a checkpoint for more than text, only the text part is checked. Multi-token prediction layers
    are published after the model's layers, and are not trained.
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
            raise unmatched(source, problem, names)


def _is_in_further_layer(key: str, config: "PreTrainedConfig") -> bool:
    """Return whether a tensor is of one of the extra prediction layers that the config counts."""
    text = config.get_text_config(decoder=True)
    number = re.search(r"\.layers\.(\d+)\.", key)
    if number is None or not hasattr(text, "num_nextn_predict_layers"):
        return False
    num_layers: int = text.num_hidden_layers
    return num_layers <= int(number[1]) < num_layers + (text.num_nextn_predict_layers or 0)
