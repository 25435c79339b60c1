"""What an adapter changes in a model, parameter by parameter, computed by peft.

The model is built without memory and peft puts the adapter on it, so that all of peft's rules
(ranks and scales by pattern, layers left out, transposed weights) apply. A layer is then given one
weight at a time in float32, merges it, and drops it.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from finetune.adapter.lora import (
    SavedTensors,
    put,
    require_same_base,
    saved_config,
    saved_tensors,
)
from finetune.errors import MergeError, read_by_library
from finetune.run.adapter_folder import methods, read_adapter_config

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
        empty = getattr(module, attribute)
        setattr(module, attribute, nn.Parameter(values, requires_grad=False))
        layer.merge()
        merged: torch.Tensor = getattr(module, attribute).detach()
        setattr(module, attribute, empty)
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
