"""Experts that are published separately, fused as in the model: one tensor per projection.

transformers reads all experts of a layer, stacks those of each projection, and concatenates the
stacks: three copies of most of the layer. Where it does nothing else, the fused tensor is filled
here expert by expert from the mapped file, so it exists once. transformers' own table says which
tensors belong where; any other conversion is left to transformers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import unmatched
from finetune.files.tensors import Unread

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def join_experts(
    tensors: Mapping[str, Unread], model: "PreTrainedModel", path: str
) -> dict[str, Unread]:
    """Return the tensors of a checkpoint with experts fused, under the model's names.

    Args:
        tensors: By published names.
        model: Perhaps without values.
        path: Name of the checkpoint in errors.

    Raises:
        ModelError: Experts have one projection and not the other.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

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
    from transformers.core_model_loading import Concatenate, MergeModulelist

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
