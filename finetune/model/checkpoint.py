"""A model from tensors: those of a published checkpoint, or those of a store."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from finetune.env import loading_one_by_one
from finetune.errors import ModelError, read_by_library, unmatched
from finetune.files.shards import weight_files
from finetune.files.tensors import Unread, open_tensors
from finetune.model.empty import Empty, empty_published

GENERATION_CONFIG = "generation_config.json"


def load_published(path: str, dtype: str) -> PreTrainedModel:
    """Load a checkpoint, tensor by tensor; quantised ones as the plain model.

    Args:
        path: The folder of its files.
        dtype: The type of the model.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape; a file is missing or damaged;
            or the checkpoint is quantised in a way that cannot be read.
    """
    with _named_errors(path), loading_one_by_one():
        kind: torch.dtype = getattr(torch, dtype)
        empty = empty_published(path, kind)
        tensors = open_tensors([str(file) for file in weight_files(Path(path))])
        if empty.quantization is not None:
            from finetune.model.form import find_packed

            published = {name: tensor.read for name, tensor in tensors.items()}
            packed, plain = find_packed(published, empty.quantization, path)
            decoded = {name: Unread(read=tensor.values) for name, tensor in packed.items()}
            tensors = decoded | {name: tensors[name] for name in plain}
        _require_all_experts(path, tensors)
        return _filled(empty, join_experts(tensors, empty.model, path), path, kind, source=path)


def model_around(
    tensors: Mapping[str, torch.Tensor], *, path: str, dtype: str, source: str
) -> PreTrainedModel:
    """Build a model from these tensors, which are not copied if they have its dtype.

    Args:
        tensors: By the model's own names.
        path: The folder of its config.
        dtype: The model's.
        source: Its name in errors.

    Raises:
        ModelError: A tensor is missing, unknown or of another shape.
    """
    kind: torch.dtype = getattr(torch, dtype)
    return _filled(empty_published(path, kind), tensors, path, kind, source=source)


def is_loaded(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is from the weights; transformers marks these to skip init."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def _filled(
    empty: Empty, tensors: Mapping[str, Any], path: str, dtype: torch.dtype, *, source: str
) -> PreTrainedModel:

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
    if os.path.lexists(Path(path, GENERATION_CONFIG)):  # not every model has one
        with read_by_library(
            f"the generation_config.json of {path} cannot be read",
            error=ModelError,
            limit="it holds how the model generates: samples are taken as it says",
            hint="correct it, download it again, or remove it",
        ):
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model


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
            limit="it must hold config.json and safetensors weights of a language model",
            hint="check `model.path`; if a download was interrupted, download the model again",
        ) from error


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
    source: str, model: PreTrainedModel, report: Mapping[str, Any], *, is_composite: bool
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


def _is_in_further_layer(key: str, config: PreTrainedConfig) -> bool:
    """Return whether a tensor is of one of the extra prediction layers that the config counts."""
    text = config.get_text_config(decoder=True)
    number = re.search(r"\.layers\.(\d+)\.", key)
    if number is None or not hasattr(text, "num_nextn_predict_layers"):
        return False
    num_layers: int = text.num_hidden_layers
    return num_layers <= int(number[1]) < num_layers + (text.num_nextn_predict_layers or 0)


# ---------------------------------------------------------------------------------------------
# Experts that are published separately, fused as in the model: one tensor per projection.
#
# transformers reads all experts of a layer, stacks those of each projection, and concatenates the
# stacks: three copies of most of the layer. Where it does nothing else, the fused tensor is filled
# here expert by expert from the mapped file, so it exists once. transformers' own table says which
# tensors belong where; any other conversion is left to transformers.


def join_experts(
    tensors: Mapping[str, Unread], model: PreTrainedModel, path: str
) -> dict[str, Unread]:
    """Return the tensors of a checkpoint with experts fused, under the model's names.

    Args:
        tensors: By published names.
        model: Perhaps without values.
        path: Name of the checkpoint in errors.

    Raises:
        ModelError: Experts have one projection and not the other.
    """
    transforms: Any = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    joining = {p: c for c in converters if _only_joins(c) for p in c.source_patterns}
    state = model.state_dict()
    rest, found = dict(tensors), dict[str, dict[str, dict[str, Unread]]]()
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if pattern in joining and target in state:
            found.setdefault(target, {}).setdefault(pattern, {})[name] = rest.pop(name)
    for target, kinds in found.items():
        patterns = joining[next(iter(kinds))].source_patterns
        _require_alike(path, patterns, kinds)
        parts = [list(kinds[pattern].items()) for pattern in patterns]
        rest[target] = Unread(read=partial(_join, path, parts))
    return rest


def _require_alike(
    path: str, patterns: Sequence[str], kinds: Mapping[str, Mapping[str, Unread]]
) -> None:
    """Check that there are as many tensors for each of these patterns, such as x.*.gate.weight."""
    most = max(kinds, key=lambda pattern: len(kinds[pattern]))
    ending = most.rpartition("*")[2]
    for pattern in patterns:
        missing = list(kinds[most])[len(kinds.get(pattern, {})) :]
        if missing:
            own_ending = pattern.rpartition("*")[2]
            names = [name.removesuffix(ending) + own_ending for name in missing]
            raise unmatched(path, "lacks", names)


def _only_joins(converter: Any) -> bool:
    """Return whether transformers stacks experts, and at most concatenates their rows."""
    kinds = [type(operation) for operation in converter.operations]
    dims = [operation.dim for operation in converter.operations if hasattr(operation, "dim")]
    is_one = len(converter.source_patterns) == 1
    return len(converter.target_patterns) == 1 and (kinds, dims) == (
        ([MergeModulelist], [0]) if is_one else ([MergeModulelist, Concatenate], [0, 1])
    )


def _join(path: str, kinds: Sequence[Sequence[tuple[str, Unread]]]) -> torch.Tensor:
    """Return (experts, rows of all kinds, columns).

    Raises:
        ModelError: An expert has another shape or dtype than the first.
    """
    first = [kind[0][1].read() for kind in kinds]
    num_rows = sum(len(part) for part in first)
    joined = first[0].new_empty(len(kinds[0]), num_rows, *first[0].shape[1:])
    for expert, named in zip(joined, zip(*kinds, strict=True), strict=True):
        parts = [part.read() for _, part in named]
        for (name, _), part, like in zip(named, parts, first, strict=True):
            if (part.shape, part.dtype) != (like.shape, like.dtype):
                raise unmatched(path, "holds, unlike the first expert's,", [name])
        torch.cat(parts, out=expert)
    return joined
