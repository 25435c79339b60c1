"""Which published tensors become which parameters of a model, and back, by transformers' own rules.

transformers renames and fuses weights while it loads them: an expert's three matrices, published
separately, become rows of two fused parameters. Its rules are run here on names and shapes for
all tensors, and on values for the few tensors that are needed together. Each converted group is
also converted back and must equal the published tensors bit for bit, so a rule that cannot be
reversed ends in an error and not in wrong weights.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from finetune.errors import ModelError
from finetune.files.tensors import DTYPES, Spec


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
        self._renamings = renamings
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

        Only the group's own rule is reversed: reversed renamings may act on names that they did not
        act on before, as `blocks` -> `layers` of kimi_k25's tower does on its text model.

        Raises:
            ModelError: The reversed rule makes other tensors than the published ones.
        """
        if group.converter is None:
            return {group.names[0]: parameters[group.parameters[0]]}
        self._model._weight_conversions = [group.converter]
        reverted = revert_weight_conversion(self._model, dict(parameters))
        # stacked parts come back numbered from 0, whichever they are
        whole = next(g for g in self.groups if g.parameters == group.parameters)
        numbered = {
            apply_renamings(as_first, self._renamings): name
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

    def published(
        self, group: Group, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return a group's published tensors, which become these parameters to the bit.

        Raises:
            ModelError: The reversed rule makes others.
        """
        tensors = self.backward(group, parameters)
        for name, value in self.forward(group, tensors).items():
            if not torch.equal(value, parameters[name]):
                raise _cannot_turn(group, f"{name} comes back otherwise than it was trained")
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
