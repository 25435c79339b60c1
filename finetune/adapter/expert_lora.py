"""Adapters on fused experts: held, saved and loaded by peft, added to the frozen products."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import layer

from offload.engine.experts.branch import Branch
from offload.engine.experts.lora import take_branches
from offload.errors import UnsupportedModelError

NUM_DIMS = 3  # of a parameter that holds a matrix per expert


def compute_beside(model: PeftModel) -> PeftModel:
    """Let adapters on fused experts compute without the merged weights that peft builds for them.

    Names, initial values, scaling, files, merging and switching off stay peft's own; every active
    adapter counts. Adapters on single matrices (`target_parameters` of a linear layer) are left
    to peft.

    Args:
        model: With its adapters.

    Raises:
        UnsupportedModelError: The experts' code has no place for an adapter branch.
    """
    for module in model.modules():
        if type(module) is layer.ParamWrapper and module.get_param().dim() == NUM_DIMS:
            experts = module.get_base_layer()
            take_branches(experts)
            if module._did_swap_in_out_features == experts.is_transposed:
                raise UnsupportedModelError(
                    f"peft takes the inputs of {type(experts).__name__} for its outputs",
                    limit="A must be on the side of the inputs",
                    hint="`pip install 'peft>=0.19'`",
                )
            module.__class__ = ParamWrapper
    return model


class ParamWrapper(layer.ParamWrapper):
    """peft's wrapper of one fused parameter; passes its factors on instead of merging them.

    A module with several adapted parameters has nested wrappers, one for each parameter. peft also
    finds wrappers by class name, so this class must have the same name.
    """

    def forward(
        self,
        x: torch.Tensor,
        *args: Any,
        lora: Mapping[str, Branch] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the experts with this wrapper's branch and those of the wrappers around it."""
        self._check_forward_args(x, *args, **kwargs)  # type: ignore[no-untyped-call]  # peft's
        lora = dict(lora or {})
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
        elif not self.merged:
            branches = [self._branch(name) for name in self.active_adapters if name in self.lora_A]
            if branches:
                lora[self.parameter_name] = Branch.join(branches)
        result: torch.Tensor = self.base_layer(
            x, *args, **kwargs, **({"lora": lora} if lora else {})
        )
        return result

    def without_value(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output's graph without its values; see `offload.engine.recompute.unread`."""
        return ParamWrapper.forward(self, x, *args, has_value=False, **kwargs)

    def _branch(self, adapter: str) -> Branch:
        """Return an adapter's factors per expert: peft lays A out as (E R, K), B as (N, R E)."""
        a: Any = self.lora_A[adapter].weight
        b: Any = self.lora_B[adapter].weight
        return Branch(
            a_ERK=a.view(self.num_experts, -1, a.shape[1]),
            b_ERN=b.view(b.shape[0], -1, self.num_experts).permute(2, 1, 0),
            scaling=float(self.scaling[adapter]),
            key=(id(self), adapter),
        )
