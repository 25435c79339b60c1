"""What processes send each other: JSON, and the memory of tensors.

Nothing that a process reads can run code: of objects only those of `_KINDS` are made, validated
field by field. `pickle`, which torch's collectives of objects use, makes any object.

What JSON does not have is a pair of a type's name and its content: `["tuple", [1, 2]]`,
`["Machine", {...}]`. Of a tensor the pair has dtype and shape; its values follow apart, and are not
copied.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from finetune.planning.parallel import Shares
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import OffloadSection
from finetune.run.checkpoint import LossScale
from finetune.run.run_files import Evaluation, Evaluations
from offload.engine.host.slab import SlabHandle
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import TracedBytes
from offload.plan.plan import OtherRank

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (
        *(Evaluation, Evaluations, LossScale, Machine, OffloadSection, OtherRank, Recipe, Shares),
        *(SlabHandle, TracedBytes),
    )
} | {type(Path()).__name__: TypeAdapter(Path)}
_COLLECTIONS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (tuple, list, set, frozenset, dict)
}


def written(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value in JSON's words, and append its tensors and arrays, contiguous.

    Raises:
        TypeError: It has a part that is not sent.
    """
    kind, name = type(value), type(value).__name__
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _COLLECTIONS.values():
        return [
            name,
            [written(one, tensors) for one in (value.items() if kind is dict else value)],
        ]
    if kind is np.ndarray:
        return [name, written(torch.from_numpy(value.copy()), tensors)]
    if isinstance(value, torch.Tensor):
        is_plain = value.is_contiguous() and value.numel() > 1  # a single one has any strides
        own = value if is_plain else torch.empty(value.shape, dtype=value.dtype).copy_(value)
        tensors.append(own.detach())
        return ["Tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]]
    if name not in _KINDS:
        raise TypeError(f"a {name} is not sent to other processes")
    return [name, _KINDS[name].dump_python(value, mode="json", exclude_unset=True)]


def read(found: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value of what was written, and append its tensors, whose values are to come."""
    if not isinstance(found, (list, dict)):
        return found
    name, content = found  # a table of JSON is nothing that is sent
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](read(one, tensors) for one in content)
    if name == "ndarray":
        return read(content, tensors).numpy()
    if name == "Tensor":
        dtype, shape = content
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        return tensors[-1]
    return _KINDS[name].validate_json(json.dumps(content))
