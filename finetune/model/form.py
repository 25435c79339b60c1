"""Published weights that are quantised, read as the plain tensors that they represent.

Problem. transformers would build another model around such a checkpoint: other modules, packed
parameters, kernels that do not work on a CPU or a frozen slab. The engine needs the plain model,
and never all of it in memory at once.

Idea. Leave the model as it is and give transformers other tensors: objects that are dequantised
when they are read. It reads them one at a time (see `env.loading_one_by_one`), so only one is in
memory; transformers still handles names, fused experts, ties and dtypes. Packed tensors are
recognised by their names, so parts that were left unquantised pass unchanged.

What a `quant_method` means is in a module of `finetune.model.forms` of its name. It says by the
config alone what can be read, so that a plan refuses what a run would.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ModelError
from finetune.model.config import method_of, quantization_of, read_config
from finetune.recipe.load import load_shape
from finetune.recipe.sections import ModelSection
from offload.plan.facts.codec import CODECS
from offload.registry import Registry
from offload.tensors import Tensor, dtype

if TYPE_CHECKING:
    from torch import nn

Parts = Mapping[str, Tensor]
"""The parts of a packed tensor, by the suffix that their names add to its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a tensor is stored: as parts whose names begin with its own."""

    mark: re.Pattern[str]  # the suffix of a part that no plain tensor has
    name: str = ""  # what its own name has in place of the suffix
    parts: tuple[str, ...]  # the suffixes of the other parts; an empty one is the tensor's own name
    joint_parts: tuple[str, ...] = ()  # suffixes that a tensor has all of, or none
    # Returns the values. Raises a ValueError for parts that do not fit each other.
    dequantise: Callable[[Parts], Tensor]
    # Returns the shape of the values, and their type if it is not the model's; nothing is decoded.
    decoded: Callable[[Parts], tuple[Sequence[int], dtype | None]]
    # Returns parts for other values, in fp32, in the types and shapes of the given ones; what it
    # leaves out stays. None if they are not written. Raises a ValueError for parts that are not.
    quantise: Callable[[Tensor, Parts], Parts] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a codec can keep of a checkpoint as it is published, by its config alone."""

    codec: str  # keeps these weights to the bit
    # Returns whether a linear layer is one of them, by its published name from its layer on.
    is_in: Callable[[str], bool] = lambda _: True
    is_transposed: bool = False  # whether experts have features out last: (E, K, N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A way to publish quantised weights: a `quant_method`."""

    doc: str  # the variants that are read, as a refusal names them
    # Returns the packings by the `quantization_config`, the first that a tensor has the mark of
    # being its own. Raises a FieldError for what is not read.
    packings: Callable[[Mapping[str, Any]], Sequence[Packing]]
    # Returns what a codec keeps by the `quantization_config`; None for nothing.
    kept: Callable[[Mapping[str, Any]], Kept | None] = lambda _: None
    # Names that carry no weights, such as scales of activations.
    ignored: re.Pattern[str] = re.compile(r"(?!)")


class FieldError(Exception):
    """A field of a `quantization_config` has a value that is not read.

    Attributes:
        field: The dotted name of the field.
        value: The value of the field; None if it is missing.
    """

    def __init__(self, field: str, value: object) -> None:
        super().__init__(field, value)
        self.field, self.value = field, value


FORMS = Registry("forms", "finetune.model.forms", Form)


def require_fields(
    fields: Mapping[str, Any], known: Mapping[str, Collection[object] | None], place: str = ""
) -> None:
    """Refuse a field that is not known and says anything, or a value that is not read.

    Args:
        fields: The fields of a part of the `quantization_config`.
        known: The values that are read, by name; None for any, as the weights do not depend on it.
        place: The dotted name of the part, with a dot at its end.

    Raises:
        FieldError: There is one.
    """
    for name, value in fields.items():
        allowed = known.get(name, (None, False, "", [], {}))
        if allowed is not None and value not in allowed:
            raise FieldError(place + name, value)


def require_form(section: ModelSection) -> Mapping[str, Any] | None:
    """Refuse a model whose published weights are in a form that is not read, by its config alone.

    Returns:
        Its `quantization_config`, if a codec can keep what is published so.

    Raises:
        ModelError: They are, or the config is nowhere to be found.
        ConfigError: The file is not a config.
    """
    quantization = quantization_of(read_config(section)) or {}
    form, _ = form_of(quantization, str(section.path))
    return quantization if form.kept(quantization) else None


def form_of(quantization: Mapping[str, Any], path: str) -> tuple[Form, Sequence[Packing]]:
    """Return the form of a checkpoint, and how its tensors are packed.

    Args:
        quantization: The `quantization_config` of its config.json.
        path: The name of the checkpoint in errors.

    Raises:
        ModelError: It is not read.
    """
    method = method_of(quantization)
    name, wrong = method.replace("-", "_"), ""
    if name in FORMS:
        try:
            return FORMS[name], FORMS[name].packings(quantization)
        except FieldError as error:
            seen = "missing" if error.value is None else repr(error.value)
            wrong = f" with {error.field}: {seen}"
    raise ModelError(
        f"model.path: {path} is quantised, its quant_method is {method}{wrong}",
        limit=f"of quantised weights, {'; '.join(FORMS[one].doc for one in FORMS)} can be read",
        hint="`model.path` of the model that it was made from; `offload.codec: nf4` packs it here",
    )


_NUM_STACK_DIMS = 3
_LAYERS = "layers."


def kept_parameters(
    model: "nn.Module", quantization: Mapping[str, Any]
) -> tuple[str, frozenset[str]]:
    """Return the codec that keeps published weights to the bit, and which parameters it keeps.

    Args:
        model: Perhaps without values.
        quantization: The `quantization_config` of its checkpoint, in a form that is read.

    Returns:
        The codec, or the `quant_method` if none keeps any; names of parameters.
    """
    kept = FORMS[method_of(quantization).replace("-", "_")].kept(quantization)
    found = frozenset(_kept_names(model, kept)) if kept else frozenset()
    return kept.codec if kept and found else method_of(quantization), found


def kept_in(folder: Path) -> Callable[["nn.Module"], Collection[str]]:
    """Return what gives the names of parameters that a codec keeps, of the model of a folder."""
    quantization = quantization_of(load_shape(str(folder))) or {}
    return lambda model: kept_parameters(model, quantization)[1]


def _kept_names(model: "nn.Module", kept: Kept) -> Iterator[str]:
    for name, module in model.named_modules():
        if _LAYERS not in name:
            continue
        place = name[name.find(_LAYERS) :]
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == _NUM_STACK_DIMS:
                is_in = vars(module).get("is_transposed") == kept.is_transposed
                is_in = is_in and kept.is_in(f"{place}.0.down_proj")
            else:
                is_in = own == "weight" and parameter.ndim > 1 and kept.is_in(place)
            if is_in and CODECS[kept.codec].fits(parameter.shape):
                yield f"{name}.{own}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A tensor that is quantised."""

    packing: Packing  # how the tensor is stored
    read: Callable[[], Parts]  # returns the stored parts, mapped
    what: str  # the names of the tensor and of its checkpoint, in errors

    def values(self) -> Tensor:
        """Return what it decodes to.

        Raises:
            ModelError: Its parts do not fit each other.
        """
        try:
            return self.packing.dequantise(self.read())
        except ValueError as error:
            raise _torn(self.what, str(error)) from error


def find_packed(
    published: Mapping[str, Callable[[], Tensor]], quantization: Mapping[str, Any], path: str
) -> tuple[dict[str, Packed], list[str]]:
    """Return the tensors of a checkpoint that are quantised, and the names of plain ones.

    Args:
        published: A function for each tensor of the checkpoint, by name, that returns it mapped.
        quantization: The `quantization_config` of its config.json.
        path: The name of the checkpoint in errors.

    Raises:
        ModelError: Its form is not read, or a part of a packed tensor is missing.
    """
    form, packings = form_of(quantization, path)
    packed: dict[str, Packed] = {}
    inside = {name for name in published if form.ignored.search(name)}
    for packing in packings:
        for name in published:
            if name in inside or not (mark := packing.mark.search(name)):
                continue
            base = name[: mark.start()]
            parts = {
                ending: published[base + ending]
                for ending in (mark[0], *_endings(base, published, packing, path))
            }
            what = f"{path} is quantised, and {base}{packing.name}"
            packed[base + packing.name] = Packed(
                packing=packing, read=partial(_read, parts), what=what
            )
            inside.update(base + ending for ending in parts)
    plain = [name for name in published if name not in inside]
    for name in plain:
        kind = str(published[name]().dtype)
        if kind.startswith(_CODES):  # a cast to a weight's type would give a wrong weight
            raise _torn(f"{path} is quantised, and {name}", f"({kind}) lacks the scales of it")
    return packed, plain


_CODES = ("torch.uint8", "torch.int8", "torch.int32", "torch.float8")
"""Types whose values are no weights by themselves."""


def _endings(base: str, published: Collection[str], packing: Packing, path: str) -> Iterator[str]:
    """Yield the endings of the other parts that a packed tensor must have."""
    has_joint = any(base + ending in published for ending in packing.joint_parts)
    for ending in packing.parts + (packing.joint_parts if has_joint else ()):
        if base + ending not in published:
            raise _torn(f"{path} is quantised, and {base}{packing.name}", f"lacks {base + ending}")
        yield ending


def _read(parts: Mapping[str, Callable[[], Tensor]]) -> Parts:
    return {ending: read() for ending, read in parts.items()}


def _torn(what: str, problem: str) -> ModelError:
    return ModelError(
        f"model.path: {what} {problem}",
        limit="a quantised tensor is read from all of its parts",
        hint="download the model again",
    )
