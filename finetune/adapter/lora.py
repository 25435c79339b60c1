"""LoRA adapters, by peft and in peft's format."""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel

from finetune.adapter.expert_lora import compute_beside
from finetune.adapter.linear_lora import compute_in_base_dtype, hold_in_bf16
from finetune.adapter.methods import is_adapted, leave_out_draws, method_config, task_type
from finetune.adapter.modules_to_save import Whole, whole_modules
from finetune.adapter.saved import (
    patterns_of_parameters,
    put,
    require_same_base,
    saved_config,
    saved_tensors,
)
from finetune.adapter.targets import chosen_targets
from finetune.adapter.virtual_tokens import refuse_virtual
from finetune.data.stops import Stops, eos_ids, write_generation_config
from finetune.errors import CheckpointError, ConfigError, read_by_library
from finetune.files.adapter import computed_settings, read_adapter_config
from finetune.files.manifest import whole_folder
from finetune.model.linears import linear_modules
from finetune.recipe.sections import AdapterSection
from finetune.report.model_card import MODEL_CARD
from offload.engine.host.materialize import values_shown
from offload.engine.host.store import Backing
from offload.engine.model.find_layers import find_towers
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import nearest

ALONE = "default"
"""peft's name of an adapter that is a model's only one, and that of all adapters in files."""
_OTHER_BASE = "name the base that the adapter was trained on"
_OTHER_RECIPE = "the `adapter` section of the run that trained it"


def linear_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last names of all linear layers inside the decoder layers."""
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in linear_modules(model)}))


def expert_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the fused expert weights, as peft's `target_parameters` names them."""
    found = {
        f"{_within_layer(name)}.{parameter_name}"
        for name, module in model.named_modules()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if name.endswith("experts") and parameter.dim() == 3
    }
    return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAdapter:
    """An adapter to be added to a model.

    Attributes:
        section: Of its recipe.
        seed: Of its initial weights.
    """

    section: AdapterSection
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """What an adapter is in one model: peft's settings, and the modules that they are to match."""

    config: PeftConfig
    linears: Collection[str]
    whole: Whole


def add_lora(
    model: PreTrainedModel, adapter: AdapterSection, *, seed: int, backing: Backing | None = None
) -> PeftModel:
    """Freeze the model and add an adapter, with weights drawn from `seed`; see `add_loras`."""
    return add_loras(model, {ALONE: NewAdapter(section=adapter, seed=seed)}, backing=backing)


def add_loras(
    model: PreTrainedModel, adapters: Mapping[str, NewAdapter], *, backing: Backing | None = None
) -> PeftModel:
    """Freeze the model and add adapters, all of which train and the first of which is active.

    Each has the weights that it would have as the only one: it is drawn from its own seed.

    `backing` stores the layers' weights, if they were loaded into one. DoRA starts from their
    values, which encoded weights do not expose.

    Args:
        model: Without adapters.
        adapters: By peft's name of each.
        backing: Of the layers' weights.

    Raises:
        ConfigError: A target that the model does not have, experts in a model without any, or an
            option that has no effect in this model.
    """
    chosen = {name: _chosen(model, one.section) for name, one in adapters.items()}
    adapted: PeftModel | None = None
    for name, one in chosen.items():
        with torch.random.fork_rng(devices=[]), patterns_of_parameters():
            torch.manual_seed(adapters[name].seed)
            if adapted is None:
                adapted = get_peft_model(model, one.config, adapter_name=name)
            else:
                adapted.add_adapter(name, one.config)
    assert adapted is not None, "a model is adapted by one adapter or more"
    for parameter_name, parameter in adapted.named_parameters():
        if not adapters.keys().isdisjoint(parameter_name.split(".")):
            parameter.requires_grad = True  # peft trains the active one alone
    leave_out_draws(adapted)
    adapted = compute_beside(adapted)
    by_peft = [name for name, one in adapters.items() if one.section.compute_dtype == "float32"]
    if len(by_peft) < len(adapters):
        compute_in_base_dtype(adapted, by_peft=by_peft)
    for name, new in adapters.items():
        if new.section.dtype == "bfloat16":
            hold_in_bf16(adapted, name)
    _start_from_base(adapted, backing)
    for name, one in chosen.items():
        section = adapters[name].section
        _require_adapted(adapted, name, one.linears, has_experts=section.experts)
        _require_wrapped(adapted, name, one.whole)
    return adapted


def held_by(model: PreTrainedModel, adapter: AdapterSection) -> tuple[frozenset[str], bool]:
    """Return the parameters that peft adapts in place of modules, and whether it ties a copy.

    A model holds several adapters if those that adapt parameters adapt the same ones, and if none
    has a tied copy of the embedding.
    """
    chosen = _chosen(model, adapter)
    parameters = getattr(chosen.config, "target_parameters", None)
    return frozenset(parameters or ()), chosen.whole.has_tied


def _chosen(model: PreTrainedModel, adapter: AdapterSection) -> _Chosen:
    """Return what an adapter is in a model that has none yet."""
    refuse_virtual(adapter.method)
    linears = _adapted_linears(model, adapter)
    experts = _expert_targets(model, adapter)
    whole = whole_modules(model, adapter.modules_to_save, linears=linear_modules(model))
    weights = _claimed_by_peft(model, linears, adapter)
    modules = {name.rsplit(".", 1)[-1] for name in linears if name not in weights}
    if adapter.method != "lora":
        return _of_method(model, adapter, modules, linears=linears, whole=whole)
    keys = _pattern_keys(linears, weights, experts)
    parameters = sorted({*experts, *weights.values()})
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # peft takes floats
        lora_dropout=adapter.dropout,
        rank_pattern=_pattern("rank_pattern", adapter.rank_pattern, keys),
        alpha_pattern=_pattern("alpha_pattern", adapter.alpha_pattern, keys),
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        # peft's own name for none
        target_modules=sorted(modules) if modules or parameters else DUMMY_TARGET_MODULES,
        exclude_modules=_in_towers(model, modules) or None,
        target_parameters=parameters or None,
        modules_to_save=list(whole.names) or None,
        ensure_weight_tying=whole.has_tied,
        task_type=task_type(model),
    )
    return _Chosen(config=config, linears=linears, whole=whole)


def _of_method(
    model: PreTrainedModel,
    adapter: AdapterSection,
    modules: Collection[str],
    *,
    linears: Collection[str],
    whole: Whole,
) -> _Chosen:
    """Return what an adapter of another method than LoRA is in a model."""
    if whole.has_tied:
        raise ConfigError(
            f"adapter.modules_to_save names an embedding whose weights the head shares, and"
            f" adapter.method is {adapter.method}",
            limit="peft keeps the two together for LoRA alone",
            hint="`adapter.method: lora`, or leave the embedding out of `modules_to_save`",
        )
    config = method_config(
        adapter,
        targets=modules,
        excluded=_in_towers(model, modules),
        modules_to_save=whole.names,
        model_type=str(model.config.model_type),
        task=task_type(model),
    )
    return _Chosen(config=config, linears=linears, whole=whole)


def _adapted_linears(model: PreTrainedModel, adapter: AdapterSection) -> dict[str, nn.Module]:
    """Return the linear layers that get an adapter, by full name."""
    known = linear_names(model)
    if adapter.targets and not known:
        raise ConfigError(
            f"nothing in a {model.config.model_type} model can get an adapter",
            limit="adapters go on linear layers (nn.Linear) inside the decoder layers",
            hint="`train.what: all`, or another model",
        )
    names = chosen_targets(adapter.targets, known=known, modules_to_save=adapter.modules_to_save)
    unknown = sorted(set(names) - set(known))
    if unknown or (adapter.targets and not names):
        raise ConfigError(
            f"adapter.targets: {', '.join(unknown) or adapter.targets} is not in this model",
            limit=f"its linear layers are {', '.join(known)}",
            hint="`adapter.targets: all-linear`",
        )
    linears = {
        name: m for name, m in linear_modules(model).items() if name.rsplit(".", 1)[-1] in names
    }
    setting = "dora: true" if adapter.dora else f"method: {adapter.method}"
    for name, module in linears.items():
        if setting != "method: lora" and type(module) is not nn.Linear:
            raise ConfigError(
                f"adapter.{setting}, but {name} is a {type(module).__name__}",
                limit="it is for plain linear layers",
                hint=f"leave `adapter.{setting.partition(':')[0]}` out",
            )
    return linears


def _claimed_by_peft(
    model: PreTrainedModel, linears: Mapping[str, nn.Module], adapter: AdapterSection
) -> dict[str, str]:
    """Return linears that can only be adapted as parameters -> their weights' names in a layer.

    In some mixtures peft takes `gate_proj` to mean the routed experts, as before experts were
    fused, even where a shared expert or a dense layer has a linear of that name. It would adapt
    the experts and skip the linear. Naming the weight as a parameter avoids this.
    """
    probe = LoraConfig(target_modules=sorted({name.rsplit(".", 1)[-1] for name in linears}))
    convert_peft_config_for_transformers(probe, model=model, conversions=None)
    left_alone = set(probe.target_modules or ())
    claimed = [name for name in linears if name.rsplit(".", 1)[-1] not in left_alone]
    other = adapter.method if adapter.method != "lora" else None
    for setting, value in (
        ("method", other),
        ("dora", adapter.dora),
        ("dropout", adapter.dropout),
    ):
        if claimed and value:
            left = {name.rsplit(".", 1)[-1] for name in linears if name not in claimed}
            raise ConfigError(
                f"adapter.{setting}: {str(value).lower()}, and {claimed[0]} has an adapter",
                limit="in this model peft adapts it as a parameter: by LoRA, without dropout and"
                " DoRA",
                hint=f"`adapter.targets: [{', '.join(sorted(left))}]`",
            )
    return {name: f"{_within_layer(name)}.weight" for name in claimed}


def _expert_targets(model: PreTrainedModel, adapter: AdapterSection) -> tuple[str, ...]:
    """Return the fused expert weights that get an adapter."""
    experts = expert_parameters(model) if adapter.experts else ()
    if adapter.experts and not experts:
        raise ConfigError(
            f"adapter.experts: true, but {type(model).__name__} has no fused experts",
            limit="only mixture-of-experts models have them",
            hint="`adapter.experts: false`",
        )
    if experts and adapter.dropout:
        raise ConfigError(
            f"adapter.dropout: {adapter.dropout} with adapter.experts: true",
            limit="adapters on fused experts have no dropout",
            hint="`adapter.dropout: 0.0`",
        )
    return experts


def _pattern_keys(
    linears: Collection[str], weights: Mapping[str, str], experts: Sequence[str]
) -> dict[str, set[str]]:
    """Return a recipe's name of each adapted projection -> its names within a layer.

    peft matches suffixes of names, and saves patterns in alphabetical order: once loaded,
    `down_proj` would also match that of the experts. A name within the layer is unambiguous.
    """
    keys: dict[str, set[str]] = {}
    for name in linears:
        end = weights.get(name, _within_layer(name))
        keys.setdefault(name.rsplit(".", 1)[-1], set()).add(end)
    for name in experts:
        keys["experts." + name.rsplit(".", 1)[-1]] = {name}
    return keys


def _pattern(
    field_name: str, wanted: Mapping[str, float], keys: Mapping[str, Collection[str]]
) -> dict[str, float]:
    """Return peft's form of a pattern."""
    for name in wanted:
        if name not in keys:
            raise ConfigError(
                f"adapter.{field_name} names {name}, which has no adapter",
                limit=f"adapters are on {', '.join(keys)}",
                hint=f"`adapter.{field_name}: {{{nearest(name, keys)}: {wanted[name]}}}`",
            )
    return {re.escape(end): value for name, value in wanted.items() for end in sorted(keys[name])}


@torch.no_grad()
def _start_from_base(adapted: PeftModel, backing: Backing | None) -> None:
    """Set DoRA's magnitudes to the norms that its forward divides by, so training starts at base.

    peft computes the first norm in the weights' dtype and later ones in fp32. With 16-bit weights
    the outputs of the first step would be up to 0.2 % off.
    """
    layers = list(LayeredModel(adapted).layers)
    if backing is not None:
        backing.adopt([list(layer.parameters()) for layer in layers])
    for number, layer in enumerate(layers):
        found = [m for m in layer.modules() if isinstance(m, LoraLayer) and m.lora_magnitude_vector]
        with values_shown(backing, number) if backing is not None and found else nullcontext():
            for module in found:
                base: Any = module.get_base_layer()
                norms = torch.linalg.norm(base.weight.float(), dim=1)
                for magnitude in module.lora_magnitude_vector.values():
                    weight: Any = magnitude.weight
                    weight.copy_(norms)


def _require_adapted(
    adapted: PeftModel, adapter: str, linears: Collection[str], *, has_experts: bool
) -> None:
    """Check that an adapter is on these linears, on the experts if wanted, and nowhere else.

    Raises:
        ConfigError: peft has interpreted the targets differently.
    """
    named = adapted.get_base_model().named_modules()
    found = {name for name, m in named if is_adapted(m, adapter)}
    found = {name.replace(".base_layer", "") for name in found}
    experts = {name for name in found if name.endswith("experts")} if has_experts else set()
    odd = found ^ {*linears, *experts}
    if odd:
        clear = {_last_name(name) for name in linears} - {_last_name(name) for name in odd}
        raise ConfigError(
            f"adapter.targets would not adapt {min(odd)} as it should",
            limit=f"peft adapts by the last part of a name, which {len(odd)} modules of this model"
            " share with others",
            hint=f"`adapter.targets: [{', '.join(sorted(clear))}]`",
        )


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _require_wrapped(adapted: PeftModel, adapter: str, whole: Whole) -> None:
    """Check that peft has copied exactly these modules, and kept tied weights tied.

    Raises:
        ConfigError: Suffixes of names match something else too, or tied weights were untied.
    """
    base: Any = adapted.get_base_model()
    wrapped = {
        name
        for name, m in base.named_modules()
        if isinstance(m, ModulesToSaveWrapper) and adapter in m.modules_to_save
    }
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    heads = {name for name, m in base.named_modules() if m is head} if whole.has_tied else set()
    odd = wrapped ^ (whole.modules | heads)
    if whole.has_tied and embedding.weight is not head.weight:
        odd |= heads
    if odd:
        raise ConfigError(
            f"adapter.modules_to_save would not train {min(odd)} as it should",
            limit=f"by peft's rules {len(odd)} modules of this model are taken or left by mistake",
            hint="`adapter.modules_to_save: []`",
        )


def trained(model: nn.Module, adapter: str | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name.

    Args:
        model: With its adapters.
        adapter: The adapter whose parameters to return, by the names that they have in a model
            with no other; None returns all, by their own names.
    """
    training = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if adapter is None:
        return training
    paths = {name: name.split(".") for name in training}
    return {
        ".".join(ALONE if part == adapter else part for part in path): training[name]
        for name, path in paths.items()
        if adapter in path
    }


def base_eos(model: PeftModel | PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens at which the base model stops, before it is trained."""
    return eos_ids(_generation_fields(model), source="the base's generation config")


def save_adapter(
    model: PeftModel,
    folder: Path,
    *,
    adapter: str = ALONE,
    tensors: Mapping[str, torch.Tensor] | None = None,
    stops: Stops | None = None,
) -> None:
    """Write an adapter as peft does and generation_config.json, whole and with a manifest.

    Args:
        model: With its adapter.
        folder: Where to.
        adapter: Which of the model's; the files do not say.
        tensors: Its values, by the model's names; None takes those of the model.
        stops: Where generation stops; None writes no generation config.

    Raises:
        CheckpointError: The folder cannot be written; what was there before is unchanged.
    """
    with whole_folder(folder, unlisted=(MODEL_CARD,)) as partial:
        model.save_pretrained(str(partial), selected_adapters=[adapter], state_dict=tensors)
        if adapter != ALONE:  # peft puts it into a folder of its own
            for file in (partial / adapter).iterdir():
                file.rename(partial / file.name)
            (partial / adapter).rmdir()
        if stops is not None:
            write_generation_config(partial, _generation_fields(model), stops)


def _generation_fields(model: PeftModel | PreTrainedModel) -> dict[str, Any]:
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    fields: dict[str, Any] = base.generation_config.to_diff_dict()
    return fields


def load_adapter(
    model: PreTrainedModel | PeftModel, folder: Path, *, name: str = "default"
) -> PeftModel:
    """Put a saved adapter on a base model, for inference; only the folder is searched for it.

    Args:
        model: The base, or with other adapters.
        folder: In peft's format.
        name: The adapter's among those of the model.

    Raises:
        CheckpointError: It is damaged, or of another model.
        ModelError: Its weights are damaged.
    """
    refuse_virtual(str(read_adapter_config(folder)["peft_type"]))
    with (
        read_by_library(
            f"{folder} cannot be put on this model",
            error=CheckpointError,
            limit="the adapter must be of this model",
            hint=_OTHER_BASE,
        ),
        patterns_of_parameters(),
    ):
        config = saved_config(folder)
        if isinstance(model, PeftModel):
            adapted = model
            adapted.add_adapter(name, config)
        else:
            adapted = get_peft_model(model, config, adapter_name=name)
        tensors = saved_tensors(adapted, folder, name=name, error=CheckpointError, hint=_OTHER_BASE)
    state = adapted.state_dict()
    for key, tensor in tensors.base.items():
        require_same_base(folder, key, tensor, state[key], error=CheckpointError)
    put(adapted, tensors)
    return compute_beside(adapted)


def add_alike(model: PeftModel, *, like: str, name: str) -> None:
    """Add an adapter with the settings of another of the model's; its values are of no meaning."""
    with torch.random.fork_rng(devices=[]), patterns_of_parameters():
        model.add_adapter(name, copy.deepcopy(model.peft_config[like]))
    compute_beside(model)


def set_trained(model: PeftModel, tensors: Mapping[str, torch.Tensor], *, name: str) -> None:
    """Give an adapter the values that a run has trained, as its checkpoints hold them.

    Args:
        model: With this adapter.
        tensors: By the names of the run's parameters, whose adapter is named `default`.
        name: The adapter's in this model.

    Raises:
        CheckpointError: The adapter has other tensors.
    """
    own = {
        ".".join("default" if part == name else part for part in path.split(".")): parameter
        for path, parameter in model.named_parameters()
        if name in path.split(".")
    }
    odd = sorted(own.keys() ^ tensors.keys())
    odd += [path for path in own.keys() & tensors.keys() if own[path].shape != tensors[path].shape]
    if odd:
        raise CheckpointError(
            f"a checkpoint and the adapter of its recipe differ in {len(odd)} tensors, such as"
            f" {odd[0]}",
            limit="a checkpoint holds all that its run trains",
            hint="name the model that the run has trained on",
        )
    with torch.no_grad():
        for path, parameter in own.items():
            parameter.copy_(tensors[path])


def load_into(model: PeftModel, folder: Path, *, adapter: str = ALONE) -> None:
    """Give an adapter the values of a saved one, which must have the same tensors and scales.

    Args:
        model: With its adapter.
        folder: In peft's format.
        adapter: Which of the model's.

    Raises:
        CheckpointError: The saved one is damaged, or another kind of adapter.
        ModelError: Its weights are damaged.
    """
    here: Any = model.peft_config[adapter]
    there: Any = saved_config(folder)
    kind = str(here.peft_type.value)
    for name in ("peft_type", *sorted(computed_settings(kind))):
        values = [getattr(one, name, None) for one in (there, here)]
        shown, own = (sorted(v) if isinstance(v, set | list) else v for v in values)
        if (shown or None) != (own or None):
            raise CheckpointError(
                f"{name} is {shown} in {folder}, and {own} in this recipe",
                limit="a run goes on from an adapter of the same kind and scale",
                hint=_OTHER_RECIPE,
            )
    put(
        model, saved_tensors(model, folder, name=adapter, error=CheckpointError, hint=_OTHER_RECIPE)
    )


def _in_towers(model: PreTrainedModel, modules: Collection[str]) -> list[str]:
    """Return image and audio tower modules that a target's name also matches; none is trained."""
    inside = {module for tower in find_towers(model) for module in tower.modules()}
    return [
        name
        for name, module in model.named_modules()
        if module in inside and name.rsplit(".", 1)[-1] in modules
    ]


def _within_layer(name: str) -> str:
    """Return a module's name from its layer on: model.layers.3.mlp.experts -> mlp.experts."""
    return re.sub(r"^.*\blayers?\.\d+\.", "", name)
