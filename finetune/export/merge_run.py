"""Merges what a run has trained into the weights that it was trained on."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from finetune.errors import MergeError
from finetune.export.base_checkpoint import BaseWeights
from finetune.export.merge import Merged, Progress, merge
from finetune.model.config import cached_file
from finetune.run.run_dir import RunDir
from offload.engine.codecs.codec import codec_named
from offload.engine.host.mapping import aligned_empty
from offload.plan.facts.codec import CodecName
from offload.plan.facts.layer_layout import to_pages

_SAMPLE_ELEMENTS = 2**22


def merge_run(run_dir: Path, out: Path, *, progress: Progress | None = None) -> Merged:
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
    merged = merge(base, run.adapter, out, tokenizer=tokenizer, progress=progress)
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
            limit="an adapter is merged into published weights",
            hint="train with `model.path` and `model.init: pretrained`",
        )
    assert model.tokenizer_source is not None
    return local_folder(model.path), local_folder(model.tokenizer_source)


def _rounding(
    codec: CodecName, dtype: torch.dtype, base: Path, changed: Sequence[str]
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
    if codec == "native" or not matrices:
        return None
    name = max(matrices, key=lambda n: weights.specs[n].num_bytes)
    num_rows, *row = weights.specs[name].shape
    num_rows = min(num_rows, max(1, _SAMPLE_ELEMENTS // math.prod(row)))
    values = weights.read(name, 0, num_rows).to(dtype)
    form = codec_named(codec)
    num_bytes = form.num_bytes(values.shape, dtype)
    encoded = aligned_empty(to_pages(num_bytes))[:num_bytes]
    form.encode(values, encoded)
    decoded = torch.empty_like(values)
    form.decode(encoded, decoded)
    error = float((decoded.float() - values.float()).norm() / values.float().norm())
    return (name, error) if error else None


def local_folder(source: str) -> Path:
    """Return where a model's files are on this machine.

    Raises:
        MergeError: A hub id that was not downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    for name in ("config.json", "tokenizer_config.json"):
        found = cached_file(source, name)
        if found is not None:
            return found.parent
    raise MergeError(
        f"{source} is no local directory and not in the cache",
        limit="weights are read from this machine",
        hint=f"`hf download {source}`",
    )
