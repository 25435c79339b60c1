"""Adapters on linear layers: held, saved and loaded by peft, computed at the base's precision."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.lora import layer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from finetune.errors import ConfigError
from offload.engine.experts.lora import take_branches
from offload.engine.experts.products import Branch
from offload.engine.internals import bare, has_hooks, num_writes, refer
from offload.engine.low_rank import AdaptedLinear, LowRank, apply_linears
from offload.engine.visit_cache import VISIT_CACHE
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
        """Return the output's graph without its values; see `offload.engine.recompute`."""
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


T = TypeVar("T")

# Linears of one module that read the same tensor in most models. Whether they do is checked at each
# call; where they do not, each computes by itself.
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


def compute_in_base_dtype(model: nn.Module, *, by_peft: Collection[str] = ()) -> None:
    """Compute the adapters of linear layers at the precision of the weights that they adapt.

    Names, initial values, scaling, files, merging and switching off stay peft's own. Its forward
    stays too where a layer is not plain LoRA or DoRA on a plain frozen linear layer: DoRA after a
    dropout or of several adapters at once, adapters with a bias, other kinds of layers, base
    weights that train.

    Args:
        model: With its adapters.
        by_peft: Names of adapters that peft computes nevertheless.
    """
    for parent in model.modules():
        adapted: dict[str, Any] = {
            name: module
            for name, module in parent.named_children()
            if type(module) is layer.Linear and type(module.get_base_layer()) is nn.Linear
        }
        for names in _groups(adapted):
            family = Family([adapted[name] for name in names], by_peft=by_peft)
            for name in names:
                adapted[name].__class__ = Linear
                vars(adapted[name])["family"] = family


def compute_by_peft(model: nn.Module) -> None:
    """Give the adapters of linear layers peft's own forward back."""
    for module in model.modules():
        if type(module) is Linear:
            del vars(module)["family"]
            module.__class__ = layer.Linear  # type: ignore[assignment]


def computed_by_peft(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of layers whose adapters peft computes, in float32."""
    found = {
        type(module.get_base_layer()).__name__
        for module in model.modules()
        if isinstance(module, layer.Linear) and not isinstance(module, Linear)
    }
    return tuple(sorted(found))


def hold_in_bf16(adapted: PeftModel, adapter: str) -> None:
    """Round an adapter's tensors to bf16, but not the modules that are trained whole.

    Raises:
        ConfigError: peft computes some of it, which would be in bf16 as well.
    """
    own = (Linear, ParamWrapper)
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, layer.LoraLayer) and not isinstance(module, own):
            raise ConfigError(
                f"adapter.dtype: bfloat16, and peft computes the adapter of {name}",
                limit="it would round each product to bfloat16 as well",
                hint="`adapter.dtype: float32`",
            )
    for name, parameter in adapted.named_parameters():
        if adapter in name.split(".") and not is_trained_whole(name):
            refer(parameter, bare(parameter).bfloat16())


def is_trained_whole(name: str) -> bool:
    """Return whether a trained parameter is that of a module trained whole, by its name."""
    return ".modules_to_save." in name


def _groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Divide the adapted linears of one module into those that read one input."""
    left = list(names)
    groups = []
    for shared in SHARED_INPUTS:
        found = tuple(name for name in left if name in shared)
        if found:
            groups.append(found)
            left = [name for name in left if name not in found]
    return groups + [(name,) for name in left]


class Linear(layer.Linear):
    """peft's adapted linear layer, which computes together with those that read the same input."""

    family: "Family"

    @property
    def siblings(self) -> "Siblings":
        """The layers that this one computes with, for the adapters that are active."""
        return self._once("siblings", lambda: self.family.of(tuple(self.active_adapters)))

    @property
    def is_adapted(self) -> bool:
        """Whether an active adapter has a branch here; where it has none, adapters are off."""
        return not self.disable_adapters and bool(self._active())

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output, (..., out_features)."""
        if args or kwargs or not self.is_plain(x):
            result: torch.Tensor = super().forward(x, *args, **kwargs)
            return result
        return self.siblings.output(self, x)

    def without_value(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output's graph without its values; see `offload.engine.recompute`."""
        if args or kwargs or self.siblings.are_several or not self.is_plain(x):
            return Linear.forward(self, x, *args, **kwargs)
        if self.adapted().magnitude_M is not None:  # its gradient reads the value
            return Linear.forward(self, x)
        return self.siblings.output(self, x, has_value=False)

    def is_plain(self, x: torch.Tensor) -> bool:
        """Return whether this is plain LoRA or DoRA on a frozen linear of the dtype of `x`."""
        return (
            x.dim() > 1
            and not (self.disable_adapters or self.merged)  # layers may switch it in a visit
            and self._once("plain", self._plain_dtype) == x.dtype
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """Return what does not change within a visit; for a small layer it takes longer to find."""
        return VISIT_CACHE.once((what, id(self)), make)

    def _plain_dtype(self) -> torch.dtype | None:
        """Return the dtype in which this is plain, on a frozen linear; None if in none."""
        base: Any = self.get_base_layer()
        active = self._active()
        is_frozen = not any(parameter.requires_grad for parameter in base.parameters())
        is_plain = (
            all(_is_bare(one) for one in (base, *self._factors()))
            and is_frozen
            and bool(active)
            and self.family.by_peft.isdisjoint(active)
            and not any(self.lora_bias[name] for name in active)
            and not (len(active) > 1 and self.drops())
            and self._has_plain_variant(active)
        )
        return base.weight.dtype if is_plain else None

    def _has_plain_variant(self, active: list[str]) -> bool:
        """Return whether there is no other kind of LoRA than DoRA, and that alone, undropped."""
        variants: Any = self.lora_variant
        kinds = {type(variants[name]) for name in active if name in variants}
        if not kinds:
            return True
        if kinds != {DoraLinearVariant} or len(active) > 1 or self.drops():
            return False
        return _is_bare(self.lora_magnitude_vector[active[0]], DoraLinearLayer)

    def _factors(self) -> list[nn.Module]:
        """Return the modules that hold A and B; what they do beyond a product would be skipped."""
        return [of[name] for of in (self.lora_A, self.lora_B) for name in self._active()]

    def drops(self) -> bool:
        """Return whether the branches read the input after a dropout, which each layer draws."""
        return self._once("drops", self._drops)

    def _drops(self) -> bool:
        dropouts = [self.lora_dropout[name] for name in self._active()]
        return self.training and not all(isinstance(one, nn.Identity) for one in dropouts)

    def dropped(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what the branch reads, if a dropout comes before it."""
        if not self.drops():
            return None
        (name,) = self._active()
        dropped: torch.Tensor = self.lora_dropout[name](x)
        return dropped

    def adapted(self) -> AdaptedLinear:
        """Return the layer as it is computed."""
        return self._once("adapted", self._adapted)

    def _adapted(self) -> AdaptedLinear:
        base: Any = self.get_base_layer()
        a: Any = self.lora_A
        b: Any = self.lora_B
        branches = tuple(
            LowRank(a_RK=a[name].weight, b_MR=b[name].weight, scaling=float(self.scaling[name]))
            for name in self._active()
        )
        magnitudes: Any = self.lora_magnitude_vector
        first = self._active()[0]  # with DoRA the only one
        return AdaptedLinear(
            weight_MK=base.weight,
            bias_M=base.bias,
            branches=branches,
            magnitude_M=magnitudes[first].weight if first in magnitudes else None,
        )

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]


class Family:
    """Linears of one module that may read the same input, and which of them each adapter adapts.

    An adapter computes as if it were the model's only one: together are those that it adapts.
    """

    def __init__(self, members: list[Linear], *, by_peft: Collection[str]) -> None:
        """Take the layers in the order of their model, and the adapters that peft computes."""
        self.by_peft = frozenset(by_peft)
        self._members = members
        self._siblings: dict[tuple[str, ...], Siblings] = {}

    def of(self, adapters: tuple[str, ...]) -> "Siblings":
        """Return those that adapters adapt; these are active now."""
        if adapters not in self._siblings:
            adapted = [member for member in self._members if member.is_adapted]
            self._siblings[adapters] = Siblings(adapted)
        return self._siblings[adapters]


class Siblings:
    """Linears that are expected to read the same input.

    The first that is called computes all outputs, the others take theirs. If one of them is called
    with another input, none shares any more. Outputs that nobody took, as after an error, are
    dropped when the first is called again.
    """

    def __init__(self, members: list[Any]) -> None:
        """Take the layers in the order of their model."""
        self._members = members
        self._share = self.are_several
        self._input: tuple[torch.Tensor, int, bool] | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return len(self._members) > 1

    def output(self, member: Linear, x: torch.Tensor, *, has_value: bool = True) -> torch.Tensor:
        """Return the output of a member for the input x, (..., K), or that of one without value."""
        if id(member) in self._outputs:
            if self._is_input(x):
                return self._take(member)
            self._share = False
        self._forget()
        dropped = member.dropped(x)
        if dropped is not None or not self._share or not self._all_plain(x):
            (y,) = apply_linears(
                x, [member.adapted()], x_branch=dropped, key=id(member), has_value=has_value
            )
            return y
        outputs = apply_linears(x, [one.adapted() for one in self._members], key=id(self))
        self._input = (x, num_writes(x), torch.is_grad_enabled())
        self._outputs = {id(one): y for one, y in zip(self._members, outputs, strict=True)}
        return self._take(member)

    def _is_input(self, x: torch.Tensor) -> bool:
        assert self._input is not None
        known, version, has_grad = self._input
        return x is known and num_writes(x) == version and has_grad == torch.is_grad_enabled()

    def _all_plain(self, x: torch.Tensor) -> bool:
        return all(one.is_plain(x) and not one.drops() for one in self._members)

    def _take(self, member: Linear) -> torch.Tensor:
        output = self._outputs.pop(id(member))
        if not self._outputs:
            self._forget()
        return output

    def _forget(self) -> None:
        self._input = None
        self._outputs = {}


def _is_bare(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a module is of this kind and nothing else, without hooks."""
    return type(module) is kind and not has_hooks(module)
