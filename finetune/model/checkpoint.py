"""A model from tensors: those of a published checkpoint, or those of a store."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        quantization = empty.quantization
        form = None if quantization is None else format_of(quantization, path)
        tensors = open_tensors([str(file) for file in weight_files(Path(path))])
        if form is not None:
            tensors = plain_tensors(tensors, form, path)
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


# ---------------------------------------------------------------------------------------------
# Published weights that are already quantised, read as the plain tensors that they represent.
#
# Problem. transformers would build another model around such a checkpoint: other modules, packed
# parameters, kernels that do not work on a CPU or a frozen slab. The engine needs the plain model,
# and never all of it in memory at once.
#
# Idea. Leave the model as it is and give transformers other tensors: objects that are dequantised
# when they are read. It reads them one at a time (see `env.loading_one_by_one`), so only one is in
# memory; transformers still handles names, fused experts, ties and dtypes. Packed tensors are
# recognised by their names, so parts that were left unquantised pass unchanged.
#
# How each is dequantised: bitsandbytes by its own `dequantize_4bit`, mxfp4 by transformers' own
# function, fp8 as it was published (a scale for each block of rows and columns; products in fp32).

Parts = Mapping[str, torch.Tensor]
"""The parts of a packed tensor, by the suffix that their names add to its own."""

_PACKED = (
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
"""Dtypes whose values are no weights by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a kind of checkpoint stores a tensor: parts whose names begin with the tensor's."""

    mark: re.Pattern[str]  # the suffix of a part that no plain tensor has
    parts: tuple[str, ...]  # the suffixes of the other parts; an empty one is the tensor's own name
    joint_parts: tuple[str, ...] = ()  # suffixes that a tensor has all of, or none
    # The suffixes of names that carry no values.
    ignored: re.Pattern[str] = re.compile(r"(?!)")  # matches nothing
    dequantise: Callable[[Parts], torch.Tensor]  # returns the values


def format_of(quantization: Mapping[str, Any], path: str) -> Format:
    """Return how a checkpoint is quantised, by the `quantization_config` of its config.json.

    Raises:
        ModelError: The method is not supported.
    """
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        return _BNB_4BIT
    if method == "mxfp4":
        return _MXFP4
    if method == "fp8" and quantization.get("weight_block_size"):
        return _fp8(*quantization["weight_block_size"])
    kind = "bitsandbytes with 8 bits" if method == "bitsandbytes" else method
    raise ModelError(
        f"model.path: {path} is quantised, its quant_method is {kind}",
        limit="of quantised weights, bitsandbytes with 4 bits, mxfp4 and fp8 in blocks can be read",
        hint="`model.path` of the model that it was made from; `offload.codec: nf4` packs it here",
    )


def plain_tensors(published: Mapping[str, Unread], form: Format, path: str) -> dict[str, Unread]:
    """Return the plain tensors of a quantised checkpoint, unread.

    Args:
        published: All tensors of the checkpoint.
        form: How it is quantised.
        path: Its name in errors.

    Raises:
        ModelError: A part of a packed tensor is missing.
    """
    tensors: dict[str, Unread] = {}
    inside: set[str] = set()
    for name in published:
        if mark := form.mark.search(name):
            base = name[: mark.start()]
            endings = (mark[0], *_endings(base, published, form, path))
            parts = {ending: published[base + ending] for ending in endings}
            tensors[base] = Unread(read=partial(_read_packed, form, parts))
            inside.update(base + ending for ending in endings)
        elif form.ignored.search(name):
            inside.add(name)
    for name in published.keys() - inside:
        dtype = published[name].read().dtype
        if dtype in _PACKED:  # a cast to a weight's dtype would give a wrong weight
            raise _torn(path, f"{name} ({dtype}) lacks the scales that belong to it")
        tensors[name] = published[name]
    return tensors


def _endings(
    base: str, published: Mapping[str, Unread], form: Format, path: str
) -> tuple[str, ...]:
    """Return the endings of the parts that a packed tensor must have."""
    has_joint = any(base + ending in published for ending in form.joint_parts)
    endings = form.parts + (form.joint_parts if has_joint else ())
    for ending in endings:
        if base + ending not in published:
            raise _torn(path, f"{base} lacks {base + ending}")
    return endings


def _read_packed(form: Format, parts: Mapping[str, Unread]) -> torch.Tensor:
    return form.dequantise({ending: part.read() for ending, part in parts.items()})


def _torn(path: str, what: str) -> ModelError:
    return ModelError(
        f"model.path: {path} is quantised, and {what}",
        limit="a quantised tensor is read from all of its parts",
        hint="download the model again",
    )


# ----------------------------------------------------------------------------------------- formats


def _dequantise_bnb(parts: Parts) -> torch.Tensor:
    """Return a tensor in the dtype that it was quantised from.

    It is dequantised flat, as it was packed. The CPU kernel of bitsandbytes 0.50 uses the scale of
    the wrong block if a row is not a whole number of blocks (of 48 or 96 weights, not of 40).
    """
    try:
        from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError as error:
        raise ModelError(
            f"bitsandbytes cannot be imported: {error}",
            limit="weights in its format are dequantised by it",
            hint="`pip install bitsandbytes`",
        ) from error

    state = QuantState.from_dict(
        {ending.lstrip("."): part for ending, part in parts.items() if ending},
        device=torch.device("cpu"),
    )
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])
    values: torch.Tensor = dequantize_4bit(parts[""].view(torch.uint8), state)
    return values.view(shape)


def _dequantise_mxfp4(parts: Parts) -> torch.Tensor:
    """Return a layer's experts, one at a time: transformers' function takes 8 bytes per weight."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = parts["_blocks"], parts["_scales"]
    values = torch.empty(0, dtype=torch.bfloat16)
    for number in range(len(blocks)):
        one = slice(number, number + 1)
        expert = convert_moe_packed_tensors(blocks[one], scales[one], dtype=values.dtype)
        if number == 0:
            values = expert.new_empty(len(blocks), *expert.shape[1:])
        values[one] = expert
    return values


def _fp8(rows: int, columns: int) -> Format:
    def dequantise(parts: Parts) -> torch.Tensor:
        packed, scales = parts[""], parts["_scale_inv"]
        if scales.dtype == torch.uint8:  # exponents
            scales = scales.view(torch.float8_e8m0fnu)
        grid = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return packed.float().mul_(grid[..., : packed.shape[-2], : packed.shape[-1]])

    return Format(
        mark=re.compile(r"(?<=\.weight)_scale_inv$"),
        parts=("",),
        ignored=re.compile(r"\.(activation|input)_scale$"),
        dequantise=dequantise,
    )


_BNB_4BIT = Format(
    mark=re.compile(r"\.quant_state\.bitsandbytes__(nf4|fp4)$"),
    parts=("", ".absmax", ".quant_map"),
    joint_parts=(".nested_absmax", ".nested_quant_map"),
    dequantise=_dequantise_bnb,
)
_MXFP4 = Format(
    mark=re.compile(r"_blocks$"),
    parts=("_scales",),
    dequantise=_dequantise_mxfp4,
)
