"""A merged model in the form that its base is published in, and by how much that rounds it.

Tensors that the adapter does not change keep their bytes, and so does what is published besides
weights, such as scales of activations. The others are quantised again, in types and shapes of the
parts that the base has, by the packing that reads them; each is decoded once more and compared.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from finetune.errors import MergeError
from finetune.files.shard_writer import Shards
from finetune.files.tensors import Spec
from finetune.model.base_weights import BaseWeights

ERRORS = "quantisation_errors.json"
_HINT = "without `--as-published` the merged model is written in full"


class AsPublished:
    """Writes a merged model's tensors as the parts that its base has of each."""

    def __init__(self, published: BaseWeights, shards: Shards) -> None:
        """Write nothing yet."""
        self._published, self._shards = published, shards
        self._begun: dict[str, tuple[torch.Tensor, int]] = {}
        self._written: set[str] = set()
        self._errors: dict[str, float] = {}

    def write(self, name: str, values: torch.Tensor, *, first_row: int = 0) -> None:
        """Write a tensor, or its rows from `first_row` on; one that is quantised when it is whole.

        Raises:
            MergeError: It cannot be quantised as its base is.
        """
        if self._published.is_copied(name):
            self._shards.write(name, values, first_row=first_row)
            self._written.add(name)
            return
        shape = self._published.specs[name].shape
        whole, left = self._begun.pop(name, (torch.empty(0), shape[0]))
        whole = whole if len(whole) else torch.empty(shape)
        whole[first_row : first_row + len(values)] = values
        if left > len(values):
            self._begun[name] = whole, left - len(values)
            return
        parts, packing = self._published.parts(name), self._published.packing(name)
        if torch.equal(whole, self._published.read(name).float()):
            return
        assert packing.quantise is not None
        try:
            found = packing.quantise(whole, parts)
        except ValueError as error:
            raise _not_written(f"{name} {error}") from error
        decoded = packing.dequantise({**parts, **found}).to(values.dtype).float()
        self._errors[name] = float((decoded - whole).norm() / whole.norm().clamp(min=1e-30))
        for ending, part in found.items():
            own = name.removesuffix(packing.name) + ending
            self._shards.write(own, part.to(parts[ending].dtype).view(parts[ending].shape))
            self._written.add(own)

    def copy(self, name: str) -> None:
        """Leave a tensor as it is; `finish` copies its bytes."""

    def finish(self, folder: Path) -> Iterator[str]:
        """Copy all other bytes, write the errors to a file, and yield what there is to say."""
        for name in self._published.stored:
            if name not in self._written:
                self._shards.write_raw(name, self._published.raw(name))
        errors = dict(sorted(self._errors.items(), key=lambda row: -row[1]))
        if not errors:
            return
        (folder / ERRORS).write_text(json.dumps(errors, indent=2) + "\n")
        worst = next(iter(errors))
        mean = sum(errors.values()) / len(errors)
        yield (
            f"The merged model is written in {self._published.published} again, which rounds it as"
            f" nobody trained it: {len(errors)} matrices by {100 * mean:.2g} % of their norm on"
            f" average, at worst {worst} by {100 * errors[worst]:.2g} %; {ERRORS} has all."
        )


def specs_as_published(published: BaseWeights, changed: Iterable[str]) -> Mapping[str, Spec]:
    """Return the tensors that a base has, which are those that are written.

    Args:
        published: The base.
        changed: The names of what the adapter changes.

    Raises:
        MergeError: It is not quantised, or in a form that is not written.
    """
    if not published.published:
        raise _not_written("the base is published in full")
    for name in changed:
        if not published.is_copied(name) and published.packing(name).quantise is None:
            raise _not_written(f"the base is published in {published.published}")
    return published.stored


def _not_written(what: str) -> MergeError:
    return MergeError(
        what,
        limit="merged weights are written in fp8, NVFP4, MXFP4 along rows, or integers of groups"
        " or rows without zero points",
        hint=_HINT,
    )
