"""Adds an adapter to the weights that it was trained on, in a few tensors' memory.

The base's files are read as published and written again with the same names. Tensors that the
adapter does not change are copied byte by byte. The others are read, converted to the model's form
if that differs (experts fused), added to in float32, rounded once, and converted back, experts a
few at a time. So memory holds the adapter and some pieces of a tensor, whatever the model's size,
and plain transformers loads the result as it loads the base.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, RootModel

from finetune.data.chat_template import merge_generation_config
from finetune.errors import MergeError, ModelError
from finetune.export.adapter_delta import Changes
from finetune.files.atomic import JsonFile, becoming, write_atomically
from finetune.files.shard_writer import Shards, new_shards
from finetune.files.tensors import Spec
from finetune.model.base_weights import BaseWeights
from finetune.model.config import model_folder, tokenizer_folder
from finetune.model.empty import empty_published
from finetune.model.renaming import Group, Renaming
from finetune.recipe.load import published_shape
from finetune.report.format import shown_gib
from finetune.report.model_card import MODEL_CARD, merged_card
from finetune.run.adapter_folder import refuse_classifier
from finetune.run.run_dir import RunDir
from offload.engine.codec import form_named
from offload.engine.host.pagelock import aligned_empty
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.facts.workload import to_pages

TOKENIZER_CONFIG = "tokenizer_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_TOKENIZER = ("tokenizer", "vocab", "merges.txt", "special_tokens", "added_tokens", "chat_template")
_TOKENIZER_SUFFIXES = (".tiktoken", ".model")


class NamedTemplate(BaseModel):
    """One chat template of several."""

    name: str
    template: str


class _TokenizerConfig(BaseModel):
    chat_template: str | list[NamedTemplate] | None = None


class _Any(RootModel[Any]):
    pass


_HINT = "download the model again, or restore the file from a copy"
TOKENIZER_SETTINGS = JsonFile(
    holds=_TokenizerConfig,
    error=ModelError,
    limit="it holds the tokenizer's settings, and perhaps its chat template",
    hint=_HINT,
)
_COMPANION = JsonFile(
    holds=_Any, error=ModelError, limit="it is copied next to the new weights", hint=_HINT
)


def copy_companions(base: Path, tokenizer: Path, folder: Path) -> None:
    """Copy what belongs to the weights: configs, code, licence, and the tokenizer that was used."""
    for file in sorted(base.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        is_named = file.name.startswith((".", "README"))
        if not is_weights and not is_named and not _is_tokenizer(file):
            _copy(file, folder)
    for file in sorted(tokenizer.iterdir()):
        if _is_tokenizer(file):
            _copy(file, folder)
    templates = tokenizer / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    settings = folder / TOKENIZER_CONFIG
    if (folder / "chat_template.jinja").exists() and settings.exists():
        # transformers prefers the file, and llama.cpp's converter the setting: leave one
        fields = TOKENIZER_SETTINGS.read(settings)
        if fields.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _copy(file: Path, folder: Path) -> None:
    """Copy a file; folders are left, unless they are called like a file.

    Raises:
        ModelError: It is damaged, or no file.
    """
    if file.is_dir() and not file.suffix:
        return
    if not file.is_file():
        raise _COMPANION.refusal(str(file), "it is no file")
    if file.suffix == ".json":
        _COMPANION.read(file)
    shutil.copyfile(file, folder / file.name)


def _is_tokenizer(file: Path) -> bool:
    return file.name.startswith(_TOKENIZER) or file.suffix in _TOKENIZER_SUFFIXES


def write_config(
    base: Path, folder: Path, *, is_untied: bool, is_as_published: bool = False
) -> None:
    """Copy config.json for plain weights, and for ones that are not shared if `is_untied`."""
    fields: dict[str, Any] = published_shape(str(base))
    if not is_as_published:
        fields.pop("quantization_config", None)
    if is_untied:
        for part in (fields, *(v for v in fields.values() if isinstance(v, dict))):
            if part is fields or "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


PIECE_ELEMENTS = 2**22

Progress = Callable[[int, int], None]
"""Called from time to time with the number of bytes written, and the total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """A merged model.

    Attributes:
        folder: Where it is.
        num_bytes: Its weights.
        changed: The published names of what the adapter changed.
        notes: What the user should know about it.
    """

    folder: Path
    num_bytes: int
    changed: tuple[str, ...]
    notes: tuple[str, ...]


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    as_published: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Write a model whose weights are the base's plus the adapter's changes.

    Args:
        base: A folder as published: config.json and safetensors.
        adapter: A LoRA in peft's format.
        out: A folder that is not there yet; it appears when it is whole.
        tokenizer: Where the tokenizer comes from; None, from the base.
        as_published: Whether weights are quantised again as the base's are.
        progress: Called as bytes are written.

    Raises:
        CheckpointError: The adapter is of a reward model.
        MergeError: The adapter does not belong to the base, `out` is there, the disk is full, or
            the base's form is not written.
        ModelError: The base is not complete, or in a form that cannot be merged into.
    """
    refuse_classifier(adapter, "merged")
    published = BaseWeights(base)
    model = empty_published(str(base), torch.float32).model
    renaming = Renaming(model, published.specs)
    ties = dict(model.all_tied_weights_keys)
    changes = Changes(empty_published(str(base), torch.float32).model, adapter)
    untied = _untied(ties, changes, renaming)
    changed = tuple(
        name
        for group in renaming.groups
        if not changes.names.isdisjoint(group.parameters)
        for name in group.names
    )
    specs: Mapping[str, Spec] = published.specs
    make_target: Callable[[BaseWeights, Shards], _Target] = _InFull
    if as_published:
        from finetune.export.as_published import AsPublished, specs_as_published

        specs, make_target = specs_as_published(published, changed), AsPublished
    specs = dict(specs) | {name: published.specs[source] for name, source in untied.items()}
    total_bytes = sum(spec.num_bytes for spec in specs.values())
    with becoming(out) as folder:
        _require_room(out.parent, total_bytes)
        with new_shards(folder, specs) as shards:
            target = make_target(published, shards)
            writer = _Writer(
                published, renaming, changes, target, progress or (lambda _done, _total: None)
            )
            writer.write_all(untied)
            notes = tuple(target.finish(folder))
            shards.finish()
        copy_companions(base, tokenizer or base, folder)
        write_config(base, folder, is_untied=bool(untied), is_as_published=as_published)
        merge_generation_config(base, adapter, folder)
        _require_whole(folder, untied)
    return Merged(
        folder=out,
        num_bytes=total_bytes,
        changed=changed,
        notes=(*notes, *_notes(untied)),
    )


class _Target(Protocol):
    """Where the tensors of a merged model go."""

    def write(self, name: str, values: torch.Tensor, *, first_row: int = 0) -> None:
        """Write a tensor, or its rows from `first_row` on."""

    def copy(self, name: str) -> None:
        """Write a tensor as the base has it."""

    def finish(self, folder: Path) -> Iterator[str]:
        """Write what is left, and yield what the user should know."""


class _InFull:
    """Writes a merged model's tensors as they are, whatever form the base has."""

    def __init__(self, published: BaseWeights, shards: Shards) -> None:
        self._published, self.write = published, shards.write
        self._shards = shards

    def copy(self, name: str) -> None:
        """Write a tensor's bytes, or of a quantised one its values."""
        self._published.copy(name, self._shards)

    def finish(self, _folder: Path) -> Iterator[str]:
        """Yield in which form the base is, and the model."""
        published = self._published
        if form := published.published:
            yield (
                f"The base is published in {form}: its weights were decoded as for training, and"
                f" the merged model is written in {published.decoded_dtype}, larger, and what was"
                f" trained but for one rounding. In {form} again (`--as-published`), weights would"
                " be rounded as nobody trained them."
            )


class _Writer:
    """Writes each tensor of the merged model to its place."""

    def __init__(
        self,
        published: BaseWeights,
        renaming: Renaming,
        changes: Changes,
        target: _Target,
        progress: Progress,
    ) -> None:
        self._published, self._renaming, self._changes = published, renaming, changes
        self._target, self._progress = target, progress

    def write_all(self, untied: Mapping[str, str]) -> None:
        """Write all tensors.

        Args:
            untied: Parameters that get a tensor of their own, and the one that they shared.
        """
        specs = self._published.specs
        total_bytes = sum(spec.num_bytes for spec in specs.values())
        done_bytes = 0
        for group in self._renaming.groups:
            if not self._changes.names.isdisjoint(group.parameters):
                self._write_changed(group)
            else:
                for name in group.names:
                    self._target.copy(name)
            done_bytes += sum(specs[name].num_bytes for name in group.names)
            self._progress(done_bytes, total_bytes)
        for name in self._renaming.others:
            self._target.copy(name)
        for name, source in untied.items():
            values = self._published.read(source)
            if name in self._changes.names:
                values = self._changes.merged(name, values)
            self._target.write(name, values)
        self._progress(total_bytes, total_bytes)

    def _write_changed(self, group: Group) -> None:
        if group.converter is None:
            self._write_renamed(group.names[0], group.parameters[0])
            return
        (step, num_parts) = (1, 1)
        if group.num_parts > 1 and self._changes.has_rows(group.parameters[0]):
            elements = sum(_num_elements(self._published.specs[name]) for name in group.names)
            num_parts = group.num_parts
            step = max(1, PIECE_ELEMENTS * num_parts // elements)
        for first in range(0, num_parts, step):
            part = group.part(first, first + step) if num_parts > 1 else group
            self._write_converted(part, first)

    def _write_converted(self, group: Group, first_row: int) -> None:
        tensors = {name: self._published.read(name) for name in group.names}
        values = self._renaming.forward(group, tensors)
        self._renaming.require_reversible(group, tensors, values)
        del tensors
        for name in self._changes.names.intersection(values):
            values[name] = self._changes.merged(name, values[name], first_row=first_row)
        for name, value in self._renaming.backward(group, values).items():
            self._target.write(name, value)

    def _write_renamed(self, name: str, parameter: str) -> None:
        spec = self._published.specs[name]
        if not self._changes.has_rows(parameter):
            merged = self._changes.merged(parameter, self._published.read(name))
            self._target.write(name, merged)
            return
        num_rows = spec.shape[0]
        step = max(1, PIECE_ELEMENTS * num_rows // _num_elements(spec))
        whole = None if self._published.is_copied(name) else self._published.read(name)
        for first in range(0, num_rows, step):
            stop = min(first + step, num_rows)
            values = self._published.read(name, first, stop) if whole is None else whole[first:stop]
            merged = self._changes.merged(parameter, values, first_row=first)
            self._target.write(name, merged, first_row=first)


def _num_elements(spec: Spec) -> int:
    return torch.Size(spec.shape).numel()


def _untied(ties: Mapping[str, str], changes: Changes, renaming: Renaming) -> dict[str, str]:
    """Return the parameters that shared a tensor and no longer can, and that tensor's name.

    A config ties either all tied parameters or none, so untying one pair unties all others.

    Raises:
        MergeError: Both are published, so it is unknown which one counts.
    """
    published = {
        parameter: group.names[0] for group in renaming.groups for parameter in group.parameters
    }
    parted = [
        pair
        for pair in ties.items()
        if not changes.names.isdisjoint(pair) and not changes.are_one(*pair)
    ]
    for target, source in parted:
        if target in published and source in published:
            raise MergeError(
                f"{target} and {source} share a tensor, the adapter changes one, and the base"
                " holds both",
                limit="of a shared tensor one is published",
                hint="save the base anew with transformers' save_pretrained",
            )
    pairs = [*ties.items(), *((source, target) for target, source in ties.items())]
    return {
        name: published[other]
        for name, other in (pairs if parted else ())
        if name not in published and other in published
    }


def _require_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise MergeError(
            f"the merged model takes {shown_gib(needed_bytes)} and {shown_gib(free_bytes)} is free",
            limit=f"it is written to {folder}",
            hint="`--out` on a larger disk, or free space (`df -h`)",
        )


def _require_whole(folder: Path, untied: Mapping[str, str]) -> None:
    """Check, by names and shapes, that the folder's model accepts the weights written there."""
    model = empty_published(str(folder), torch.float32).model
    Renaming(model, BaseWeights(folder).specs)
    still_tied = sorted(set(untied) & {*model.all_tied_weights_keys})
    if still_tied:
        raise MergeError(
            f"{still_tied[0]} shares its tensor with another in every model of this kind",
            limit="the adapter changes one of the two",
            hint="leave embeddings and head out of what is trained",
        )


def _notes(untied: Mapping[str, str]) -> Iterator[str]:
    if untied:
        name, shared = next(iter(untied.items()))
        others = f", and {len(untied) - 1} more likewise" if len(untied) > 1 else ""
        yield f"{name} shared the tensor {shared} and has its own now{others}."


_SAMPLE_ELEMENTS = 2**22


def merge_run(
    run_dir: Path, out: Path, *, as_published: bool = False, progress: Progress | None = None
) -> Merged:
    """Merge the adapter of a finished run into the model that it was trained on.

    Raises:
        CheckpointError: The directory holds no finished run.
        MergeError: See `merge`; or the run's model has no published weights.
        ModelError: See `merge`.
    """
    run = RunDir(run_dir)
    notes = run.require_adapter()
    base, tokenizer = base_and_tokenizer(run_dir)
    recipe = run.recipe()
    merged = merge(
        base,
        run.adapter,
        out,
        tokenizer=tokenizer,
        as_published=as_published,
        progress=progress,
    )
    if (card := run.adapter / MODEL_CARD).exists():
        form = BaseWeights(out).published
        write_atomically(out / MODEL_CARD, merged_card(recipe, card.read_text("utf-8"), form=form))
    rounding = _rounding(
        recipe.offload.layer_codec, getattr(torch, recipe.model.dtype), base, merged.changed
    )
    merged = replace(merged, notes=(*notes, *merged.notes))
    if rounding is None:
        return merged
    name, error = rounding
    note = (
        f"The adapter was trained with weights that were rounded to {recipe.offload.codec}"
        f" ({name} by {100 * error:.2g} % of its norm), and is merged into the published ones:"
        " what it learned to make up for that rounding is now too much. Compare the two before you"
        " use it."
    )
    return replace(merged, notes=(*merged.notes, note))


def base_and_tokenizer(run_dir: Path) -> tuple[Path, Path]:
    """Return where the model of a finished run is on this machine, and its tokenizer.

    Raises:
        CheckpointError: The directory holds no finished run.
        MergeError: The run's model has no published weights, or they are not here.
    """
    run = RunDir(run_dir)
    run.require_adapter()
    model = run.recipe().model
    if model.path is None or model.init == "random":
        raise MergeError(
            f"{run_dir} trained a model of random weights",
            limit="an adapter is merged into, or served with, published weights",
            hint="train with `model.path` and `model.init: pretrained`",
        )
    return model_folder(model), tokenizer_folder(model)


def _rounding(
    codec: str, dtype: torch.dtype, base: Path, changed: Sequence[str]
) -> tuple[str, float] | None:
    """Return by how much a codec changes a weight, relative to its norm; None if it does not.

    Args:
        codec: The codec that the layers were stored in.
        dtype: The dtype that they computed in.
        base: Where the weights are.
        changed: The weights that the adapter changes; the largest of a layer is examined, or its
            first rows.
    """
    weights = BaseWeights(base)
    matrices = [n for n in changed if re.search(r"\.\d+\.", n) and len(weights.specs[n].shape) > 1]
    if codec == NATIVE or CODECS[codec].published or not matrices:  # which are exact
        return None
    name = max(matrices, key=lambda n: weights.specs[n].num_bytes)
    num_rows, *row = weights.specs[name].shape
    num_rows = min(num_rows, max(1, _SAMPLE_ELEMENTS // math.prod(row)))
    values = weights.read(name, 0, num_rows).to(dtype)
    form = form_named(codec)
    num_bytes = form.num_bytes(values.shape, dtype)
    encoded = aligned_empty(to_pages(num_bytes))[:num_bytes]
    form.encode(values, encoded)
    decoded = torch.empty_like(values)
    form.decode(encoded, decoded)
    error = float((decoded.float() - values.float()).norm() / values.float().norm())
    return (name, error) if error else None
