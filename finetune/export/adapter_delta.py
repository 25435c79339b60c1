"""What an adapter changes in a model, parameter by parameter, computed by peft.

The model is built without memory and peft puts the adapter on it, so that all of peft's rules
(ranks and scales by pattern, layers left out, transposed weights) apply. A layer is then given one
weight at a time in float32, merges it, and drops it.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from finetune.adapter.lora import (
    SavedTensors,
    put,
    require_same_base,
    saved_config,
    saved_tensors,
)
from finetune.errors import MergeError, ModelError, read_by_library
from finetune.files.tensors import DTYPES, Spec
from finetune.run.adapter_folder import methods, read_adapter_config

# ---------------------------------------------------------------------------------------------
# Which published tensors become which parameters of a model, and back, by transformers' own rules.
#
# transformers renames and fuses weights while it loads them: an expert's three matrices, published
# separately, become rows of two fused parameters. Its rules are run here on names and shapes for
# all tensors, and on values for the few tensors that are needed together. Each converted group is
# also converted back and must equal the published tensors bit for bit, so a rule that cannot be
# reversed ends in an error and not in wrong weights.


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Published tensors that are needed together."""

    # Their names by the rule's pattern, in the order in which the rule takes them.
    published: Mapping[str, Sequence[str]]
    parameters: tuple[str, ...]  # what they become
    converter: Any  # the rule; None where a tensor only changes its name
    # How many tensors of each pattern are stacked, such as the number of experts; any row of parts
    # can be converted alone. 1 where they cannot.
    num_parts: int = 1

    @property
    def names(self) -> list[str]:
        """All published names."""
        return [name for names in self.published.values() for name in names]

    def part(self, first: int, end: int) -> "Group":
        """Return a group of some of the stacked parts."""
        return Group(
            published={pattern: names[first:end] for pattern, names in self.published.items()},
            parameters=self.parameters,
            converter=self.converter,
            num_parts=end - first,
        )


class Renaming:
    """The groups of a checkpoint.

    Attributes:
        groups: All that the model takes, in the order of the files.
        others: Published tensors that the model does not have, such as a vision tower's.
    """

    def __init__(self, model: PreTrainedModel, specs: Mapping[str, Spec]) -> None:
        """Sort published names into groups.

        Args:
            model: Without memory.
            specs: The published tensors.

        Raises:
            ModelError: A parameter has no tensor, or one of another shape.
        """
        self._model = cast("Any", model)
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        state = self._state = model.state_dict()
        found: dict[str, dict[str, list[str]]] = {}
        rule_for: dict[str, Any] = {}
        self.others: list[str] = []
        for key in sorted(specs, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                self.others.append(key)
                continue
            if pattern is not None:
                rule_for[name] = rule_of[pattern]
            found.setdefault(name, {}).setdefault(pattern or key, []).append(key)
        self._model._weight_conversions = [rule for rule in rules if rule.was_used()]
        groups = [self._group(name, by, rule_for.get(name), specs) for name, by in found.items()]
        place = {name: number for number, name in enumerate(specs)}
        self.groups = sorted(groups, key=lambda group: min(place[name] for name in group.names))
        self._require_all()

    def forward(self, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a group's parameters, given its published tensors."""
        if group.converter is None:
            return {group.parameters[0]: tensors[group.names[0]]}
        converter = deepcopy(group.converter)
        first = group.parameters[0]
        for pattern, names in group.published.items():
            for name in names:
                converter.add_tensor(first, name, pattern, tensors[name])
        values = converter.convert(first, model=self._model, config=self._model.config)
        return {name: v[0] if isinstance(v, list) else v for name, v in values.items()}

    def backward(
        self, group: Group, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return a group's published tensors, given its parameters.

        Raises:
            ModelError: The reversed rule makes other tensors than the published ones.
        """
        if group.converter is None:
            return {group.names[0]: parameters[group.parameters[0]]}
        reverted = revert_weight_conversion(self._model, dict(parameters))
        # stacked parts come back numbered from 0, whichever they are
        whole = next(g for g in self.groups if g.parameters == group.parameters)
        numbered = {
            as_first: name
            for pattern, names in group.published.items()
            for as_first, name in zip(whole.published[pattern], names, strict=False)
        }
        prefix = f"{self._model.base_model_prefix}."
        tensors = {}
        for key, value in reverted.items():
            name = numbered.get(key, numbered.get(key.removeprefix(prefix)))
            if name is None:
                raise _cannot_turn(group, f"it makes {key}, which was not published")
            tensors[name] = value
        if len(tensors) != len(group.names):
            raise _cannot_turn(group, f"it makes {len(tensors)} tensors of {len(group.names)}")
        return tensors

    def require_reversible(
        self,
        group: Group,
        tensors: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        """Check that a group's parameters, converted back, equal the published ones bit for bit.

        Raises:
            ModelError: They are not.
        """
        if group.converter is None:
            return
        for name, value in self.backward(group, parameters).items():
            same = value.dtype == tensors[name].dtype and torch.equal(value, tensors[name])
            if not same:
                raise _cannot_turn(group, f"{name} comes out otherwise than it went in")

    def _group(
        self,
        first: str,
        published: Mapping[str, Sequence[str]],
        rule: Any,
        specs: Mapping[str, Spec],
    ) -> Group:
        """Run a rule on shapes to learn what it makes.

        Raises:
            ModelError: It makes tensors that differ from the model's.
        """
        converter = None
        if rule is not None:
            converter = deepcopy(rule)
            converter.collected_tensors.clear()
            converter.layer_targets.clear()
        group = Group(published=published, parameters=(first,), converter=converter)
        shapes = {
            name: torch.empty(specs[name].shape, dtype=DTYPES.get(specs[name].dtype), device="meta")
            for name in group.names
        }
        state = self._state
        try:
            made = self.forward(group, shapes)
        except (RuntimeError, ValueError) as error:  # as of experts of which some are missing
            raise ModelError(
                f"{group.names[0]} and {len(group.names) - 1} others do not make {first}:"
                f" {str(error).splitlines()[0]}",
                limit=f"the model of config.json has {tuple(state[first].shape)}",
                hint="download the model again",
            ) from error
        for name, value in made.items():
            if name not in state or state[name].shape != value.shape:
                wanted = tuple(state[name].shape) if name in state else "no such parameter"
                raise ModelError(
                    f"{group.names[0]} becomes {name} of {tuple(value.shape)}",
                    limit=f"the model of config.json has {wanted}",
                    hint="download the model again, or give the config.json that belongs to it",
                )
        return Group(
            published=published,
            parameters=tuple(made),
            converter=converter,
            num_parts=_num_parts(group, made),
        )

    def _require_all(self) -> None:
        """Refuse a checkpoint that leaves a parameter without values."""
        made = {name for group in self.groups for name in group.parameters}
        tied = dict(self._model.all_tied_weights_keys)
        for target, source in tied.items():
            if {target, source} & made:
                made |= {target, source}
        ignored = [re.compile(p) for p in self._model._keys_to_ignore_on_load_missing or ()]
        for name, _ in self._model.named_parameters():
            if name not in made and not any(pattern.search(name) for pattern in ignored):
                raise ModelError(
                    f"no published tensor becomes {name}",
                    limit="weights and config must match",
                    hint="download the model again, or give the config.json that belongs to it",
                )


def _num_parts(group: Group, made: Mapping[str, torch.Tensor]) -> int:
    """Return how many tensors are stacked, if that is the first thing done to them."""
    if group.converter is None or len(made) != 1:
        return 1
    first = group.converter.operations[0]
    counts = {len(names) for names in group.published.values()}
    (value,) = made.values()
    is_stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return counts.pop() if is_stacked and counts == {value.shape[0]} else 1


def _cannot_turn(group: Group, why: str) -> ModelError:
    return ModelError(
        f"transformers' rule for {group.parameters[0]} cannot be turned round: {why}",
        limit="merged weights are written under the names that were published",
        hint="another version of transformers, or load base and adapter with peft instead",
    )


_ADAPTER = "default"


class Changes:
    """The parameters that an adapter changes.

    Attributes:
        names: The names of those parameters in the model.
    """

    def __init__(self, model: PreTrainedModel, adapter: Path) -> None:
        """Put the adapter on the model.

        Args:
            model: Without memory; it is changed.
            adapter: A folder in peft's format.

        Raises:
            MergeError: It is not a LoRA, has tensors that do not fit the model, or lacks some.
        """
        names = {id(module): name for name, module in model.named_modules()}
        adapted, tensors = _adapted(model, adapter)
        self._adapter, self._saved_base = adapter, tensors.base
        self._layers: dict[str, BaseTunerLayer] = {}
        self._replaced: dict[str, torch.Tensor] = {}
        for module in adapted.modules():
            if isinstance(module, ModulesToSaveWrapper):
                prefix = names[id(module.original_module)]
                saved: Any = module.modules_to_save[_ADAPTER]
                for name, parameter in saved.named_parameters():
                    self._replaced[f"{prefix}.{name}"] = parameter.detach()
            elif isinstance(module, BaseTunerLayer):
                layer = _mergeable(module, adapter)
                prefix = names[id(layer.get_base_layer())]
                name = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
                self._layers[f"{prefix}.{name}"] = layer
        self.names = frozenset((*self._layers, *self._replaced))

    def has_rows(self, name: str) -> bool:
        """Return whether a parameter's rows can be merged separately, as those of experts can."""
        layer = self._layers.get(name)
        return isinstance(layer, ParamWrapper) and layer.num_experts > 1

    def are_one(self, name: str, other: str) -> bool:
        """Return whether two parameters that share a tensor are trained whole, as one."""
        first, second = self._replaced.get(name), self._replaced.get(other)
        return first is not None and second is not None and torch.equal(first, second)

    def merged(self, name: str, values: torch.Tensor, *, first_row: int = 0) -> torch.Tensor:
        """Return a parameter with its change, rounded once to its own type.

        Args:
            name: One of `names`.
            values: The parameter; if `has_rows`, some of its rows.
            first_row: Index of the first of these rows.

        Raises:
            MergeError: The sum is not finite in that type.
        """
        if name in self._replaced:
            merged = self._replaced[name]
        else:
            for key, saved in self._saved_base.items():
                if key.replace(".base_layer.", ".").endswith(f".{name}"):
                    require_same_base(self._adapter, name, saved, values, error=MergeError)
            merged = self._sum(self._layers[name], values.float(), first_row)
        merged = merged.to(values.dtype)
        if merged.shape != values.shape:
            raise MergeError(
                f"the adapter has {name} of {tuple(merged.shape)}",
                limit=f"the base has it of {tuple(values.shape)}",
                hint="name the base that the adapter was trained on",
            )
        # in one pass and without a copy; both are NaN if any value is
        if not all(map(math.isfinite, torch.stack(torch.aminmax(merged)).tolist())):
            raise MergeError(
                f"{name} has values that are not finite after the merge",
                limit=f"the base's type is {values.dtype}",
                hint="take an earlier adapter, or a base in bfloat16",
            )
        return merged

    @torch.no_grad()
    def _sum(self, layer: BaseTunerLayer, values: torch.Tensor, first_row: int) -> torch.Tensor:
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            rows = slice(first_row, first_row + len(values))
            lhs, rhs, scaling = layer.get_delta_factors(_ADAPTER)
            return torch.baddbmm(values, lhs[rows], rhs[rows], alpha=scaling)
        module: Any = layer.get_base_layer()
        attribute = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        empty = module._parameters[attribute]
        module._parameters[attribute] = nn.Parameter(values, requires_grad=False)
        layer.merge()
        merged: torch.Tensor = module._parameters[attribute].data
        module._parameters[attribute] = empty
        layer.merged_adapters.clear()
        return merged


def _adapted(model: PreTrainedModel, adapter: Path) -> tuple[PeftModel, SavedTensors]:
    """Put an adapter on a model without memory, and account for each of its tensors."""
    hint = "name the base that the adapter was trained on"
    kind = str(read_adapter_config(adapter)["peft_type"])
    every = methods()
    if every[kind].is_virtual:
        known = ", ".join(name for name, one in every.items() if not one.is_virtual)
        raise MergeError(
            f"{adapter} is of type {kind}",
            limit=f"{known} can be merged",
            hint="load it on its base with peft",
        )
    with (
        read_by_library(
            f"{adapter} cannot be put on this base",
            error=MergeError,
            limit="it must be an adapter that fits this base",
            hint=hint,
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # of tied weights, and transposed ones
        adapted = PeftModel(model, saved_config(adapter), _ADAPTER, low_cpu_mem_usage=True)
        tensors = saved_tensors(adapted, adapter, name=_ADAPTER, error=MergeError, hint=hint)
    put(adapted, tensors)
    return adapted, tensors


def _mergeable(layer: Any, adapter: Path) -> BaseTunerLayer:
    """Return a layer whose merge changes one parameter of the base and no other."""
    has_bias = isinstance(layer, LoraLayer) and any(layer.lora_bias.values())
    # IA3 scales what a layer returns, its bias too
    has_bias |= isinstance(layer, IA3Layer) and layer.get_base_layer().bias is not None
    is_known = isinstance(layer, ParamWrapper | Linear | Embedding)
    is_known |= not isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
    if is_known and not has_bias:
        assert isinstance(layer, BaseTunerLayer)
        return layer
    raise MergeError(
        f"{adapter} has {'a bias' if has_bias else f'a layer of {type(layer).__name__}'}",
        limit="adapters on linear layers, embeddings and experts can be merged, without a bias that"
        " they change",
        hint="load it together with its base by peft",
    )
