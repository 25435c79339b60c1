"""LoRA adapters, by peft and in peft's format."""

import copy
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype, hold_in_bf16
from finetune.adapter.methods import (
    is_adapted,
    leave_out_draws,
    method_config,
    refuse_virtual,
    task_type,
)
from finetune.data.chat_template import Stops, eos_ids, write_generation_config
from finetune.errors import CheckpointError, ConfigError, FinetuneError, read_by_library
from finetune.files.manifest import whole_folder
from finetune.model.empty import linear_modules
from finetune.recipe.adapters import AdapterSection, LoraSection
from finetune.report.model_card import MODEL_CARD
from finetune.run.adapter_folder import (
    WEIGHTS_FILE,
    methods,
    read_adapter_config,
    require_adapter_files,
)
from offload.engine.host.store import Backing
from offload.engine.host.weights import values_shown
from offload.engine.model.layers import LayeredModel, find_layers, find_towers
from offload.plan.facts.facts import nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, ROUTER, SCORE

# ---------------------------------------------------------------------------------------------
# A saved adapter: its settings and tensors, as all that reads adapters puts them on a model.
#
# peft loads a file by names. It renames them by transformers' rules for the weights of the model,
# passes over those that it finds no place for, and lets tensors named like weights of the base
# replace these. So each tensor is put here where peft would save it from, under the same name.

_OF_BASE = ".base_layer.weight"


def saved_config(folder: Path) -> PeftConfig:
    """Return an adapter's settings for inference, as peft holds them.

    All values come from the file, so its initialisation is not run again: it may read weights that
    are encoded, or not there yet.

    Raises:
        CheckpointError: A file is missing or damaged, or a setting is not understood.
        ModelError: The weights are damaged.
    """
    require_adapter_files(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of settings that are off, unknown to peft
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    config.base_model_name_or_path = None  # readers compare it with their base, and peft would warn
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True
    return config


@contextmanager
def patterns_of_parameters() -> Iterator[None]:
    """Silence peft's warning that patterns match nothing; it checks modules, not parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """The tensors of an adapter's file."""

    own: Mapping[str, torch.Tensor]  # the tensors by their names in the model
    # Weights of the base that peft saves with an adapter on them, by their names in the model: such
    # as those of an embedding.
    base: Mapping[str, torch.Tensor]


def saved_tensors(
    adapted: PeftModel, folder: Path, *, name: str, error: type[FinetuneError], hint: str
) -> SavedTensors:
    """Return the tensors of a saved adapter that a model has the place for.

    Args:
        adapted: With an adapter of the same settings.
        folder: In peft's format.
        name: The adapter's in the model.
        error: Raised if they are not those of the model.
        hint: What to do then.

    Raises:
        FinetuneError: Of this kind: a tensor is missing, has no place or is of another shape.
    """
    found = load_file(folder / WEIGHTS_FILE)
    state = adapted.state_dict()
    places = _places(adapted, state, name)
    if not places.keys() <= found.keys():  # of transformers 4, whose experts were not fused
        renamed = convert_peft_adapter_state_dict_for_transformers(
            adapted, adapted.peft_config[name], dict(found), name
        )
        found = renamed if places.keys() <= renamed.keys() else found
    base = {key: tensor for key, tensor in found.items() if _is_adapted_base(key, places)}
    for problem, names in (
        ("lacks", places.keys() - found.keys()),
        ("holds, and the model has no place for,", found.keys() - places.keys() - base.keys()),
    ):
        if names:
            raise error(
                f"{folder} {problem} {len(names)} tensors, such as {min(names)}",
                limit="an adapter holds its own tensors, and modules that were trained whole",
                hint=hint,
            )
    own = {place: found[key] for key, place in places.items()}
    for key, tensor in (own | base).items():
        if tensor.shape != state[key].shape:
            raise error(
                f"{folder} has {key} of shape {tuple(tensor.shape)}",
                limit=f"it has shape {tuple(state[key].shape)} here",
                hint=hint,
            )
    return SavedTensors(own=own, base=base)


def put(adapted: PeftModel, tensors: SavedTensors) -> None:
    """Give an adapter the values of a saved one, in float32 where it has no memory yet."""
    for key, tensor in tensors.own.items():
        path, _, name = key.rpartition(".")
        module = adapted.get_submodule(path)
        place: torch.Tensor = getattr(module, name)
        if not place.is_meta:
            with torch.no_grad():
                place.copy_(tensor)
        elif isinstance(place, nn.Parameter):
            setattr(module, name, nn.Parameter(tensor.float(), requires_grad=False))
        else:
            setattr(module, name, tensor.float())


def require_same_base(
    folder: Path, key: str, saved: torch.Tensor, own: torch.Tensor, *, error: type[FinetuneError]
) -> None:
    """Check that a weight of the base in an adapter's file is that of the base here.

    Raises:
        FinetuneError: Of this kind: it is not.
    """
    if saved.shape != own.shape or not torch.equal(saved.to(own.dtype), own):
        raise error(
            f"{folder} holds {key}, and the base has other values of it",
            limit="an adapter is added to the weights of its base",
            hint="name the base that the adapter was trained on; if the weight was trained too,"
            " plain peft's `merge_and_unload()` writes a whole model",
        )


def _places(adapted: PeftModel, state: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return each name in an adapter's file -> the name in the model that it is saved from."""
    places: dict[str, str] = get_peft_model_state_dict(
        adapted,
        state_dict={key: key for key in state},
        adapter_name=name,
        save_embedding_layers=False,
    )
    return places


def _is_adapted_base(key: str, places: Mapping[str, str]) -> bool:
    prefix = key.removesuffix(_OF_BASE)
    return prefix != key and any(place.startswith(f"{prefix}.") for place in places)


# ---------------------------------------------------------------------------------------------
# Modules trained whole alongside LoRA: norms, routers, embeddings, the head, linear layers.
#
# peft calls them `modules_to_save`: a module gets a trainable copy, which is saved with the
# adapter. Plain peft restores the copy on load, so none of our code is needed. The original stays
# where it was, frozen, and is streamed with its layer.


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Modules that are trained whole."""

    modules: frozenset[str]  # their full names
    # What is passed to peft: suffixes of names that match these modules and no others.
    names: tuple[str, ...]
    has_tied: bool  # whether the head is tied to a trained embedding, so that both are one copy


def whole_modules(
    model: "PreTrainedModel", wanted: Sequence[str], *, linears: Mapping[str, nn.Module]
) -> Whole:
    """Find what a recipe wants to be trained whole.

    Args:
        model: Without adapters.
        wanted: `norms`, `router`, `embed_tokens`, `lm_head`, of a reward model its head `score`, or
            last names of linear layers.
        linears: Linear layers inside the decoder layers, by full name.

    Raises:
        ConfigError: The model has no such module, or it is tied to another.
    """
    known = _known(model, linears) if wanted else {}
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if is_tied and HEAD in wanted:
        raise ConfigError(
            f"adapter.modules_to_save names {HEAD}, which is {EMBEDDING} in this model",
            limit="tied weights are trained as one, by the name of the embedding",
            hint=f"`adapter.modules_to_save: [{EMBEDDING}]`",
        )
    if is_tied and EMBEDDING in wanted and (type(head) is not nn.Linear or head.bias is not None):
        raise ConfigError(
            f"adapter.modules_to_save names {EMBEDDING}, which is tied to a {type(head).__name__}",
            limit="peft ties a plain linear head, without a bias, to a trained embedding",
            hint="leave it out of `adapter.modules_to_save`",
        )
    for name in wanted:
        if not known.get(name):
            there = [choice for choice, modules in known.items() if modules]
            raise ConfigError(
                f"adapter.modules_to_save names {name}, which {type(model).__name__} has not",
                limit=f"it may hold {', '.join(there)}",
                hint=f"`adapter.modules_to_save: [{nearest(name, there)}]`",
            )
    modules = frozenset(module for name in wanted for module in known[name])
    return Whole(
        modules=modules,
        names=tuple(sorted({_end(model, name) for name in modules})),
        has_tied=is_tied and EMBEDDING in wanted,
    )


def _known(model: "PreTrainedModel", linears: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return what may be trained whole, by a recipe's name: full names of modules."""
    names = {module: name for name, module in model.named_modules()}
    decoder, head = cast("nn.Module", model.get_decoder()), model.get_output_embeddings()
    known = {
        NORMS: {names[m] for m in decoder.modules() if "Norm" in type(m).__name__ and _owns(m)},
        ROUTER: {names[router] for block in decoder.modules() for router in _routers(block)},
        EMBEDDING: {names[model.get_input_embeddings()]},
        HEAD: set() if head is None else {names[head]},
        SCORE: {SCORE} & {name for name, _ in model.named_children()},
    }
    for name in linears:
        known.setdefault(name.rsplit(".", 1)[-1], set()).add(name)
    return known


def _routers(block: nn.Module) -> list[nn.Module]:
    """Return the modules next to fused experts that have a row of weights for each expert."""
    children = dict(block.named_children())
    experts = [m for name, m in children.items() if name.endswith("experts")]
    counts = {p.shape[0] for m in experts for p in m.parameters(recurse=False) if p.dim() == 3}
    return [
        child
        for child in children.values()
        if child not in experts
        and any(p.dim() == 2 and p.shape[0] in counts for p in child.parameters(recurse=False))
    ]


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _end(model: "PreTrainedModel", name: str) -> str:
    """Return a module's name from its layer on, or all of it for one outside the layers."""
    owner, attribute = find_layers(model, model.config.get_text_config())
    prefix = next(f"{n}." if n else "" for n, m in model.named_modules() if m is owner)
    return re.sub(rf"^{re.escape(prefix + attribute)}\.\d+\.", "", name)


# ---------------------------------------------------------------------------------------------
# NEFTune: uniform noise on the token embeddings while training.
#
# A micro-batch's embeddings (B, T, D) get noise from -m to m, m = alpha / sqrt(T x D). T is the
# width of the micro-batch, padding included, as in transformers' trainer. The engine runs a
# micro-batch's embeddings once per step, with the generator seeded for them, and layers that are
# computed again start from their kept input: forward, recompute and a resumed run see one noise.
#
# Source: arXiv:2310.05914, algorithm 1.


def add_noise(model: "PreTrainedModel", *, alpha: float) -> RemovableHandle:
    """Add noise to what the model's input embeddings return, in training mode only.

    Args:
        model: Without peft's wrapper.
        alpha: Scale of the noise; 5 to 15 are usual.

    Returns:
        A handle that removes the noise.
    """

    def noisy(module: nn.Module, _: object, embedded_BTD: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded_BTD
        num_tokens, width = embedded_BTD.shape[1:]
        # torch's own fp32 arithmetic, so that the draws are transformers' to the bit
        most = (alpha / torch.tensor(num_tokens * width).sqrt()).item()
        return embedded_BTD + torch.empty_like(embedded_BTD).uniform_(-most, most)

    return model.get_input_embeddings().register_forward_hook(noisy)


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
    """An adapter to be added to a model."""

    section: AdapterSection  # the section `adapter` of its recipe
    seed: int  # the seed of its initial weights


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
    sections = {name: new.section.as_lora for name, new in adapters.items()}
    by_peft = [name for name, one in sections.items() if one.compute_dtype == "float32"]
    if len(by_peft) < len(adapters):
        compute_in_base_dtype(adapted, by_peft=by_peft)
    for name, section in sections.items():
        if section.dtype == "bfloat16":
            hold_in_bf16(adapted, name)
    _start_from_base(adapted, backing)
    for name, one in chosen.items():
        _require_adapted(adapted, name, one.linears, has_experts=sections[name].experts)
        _require_wrapped(adapted, name, one.whole)
    return adapted


def add_pattern(model: PreTrainedModel) -> PeftModel:
    """Freeze the model, and add an adapter of rank 1 on all linears that others may later be on.

    Those are the linears of the layers, but for routers and those that peft takes for experts, and
    the head. The adapter is named `ALONE`; it computes nothing, and does not train.

    Args:
        model: Without adapters.
    """
    linears, head = linear_modules(model), model.get_output_embeddings()
    claimed = _claimed_by_peft(model, linears, LoraSection())
    names = [name for name in linears if name not in claimed]
    names += [name for name, module in model.named_modules() if module is head]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights: an adapter on the head is no tie
        adapted = get_peft_model(model, LoraConfig(r=1, target_modules=names), adapter_name=ALONE)
    compute_in_base_dtype(adapted)
    return adapted.requires_grad_(requires_grad=False)


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
    refuse_virtual(adapter.stated)
    lora = adapter.as_lora
    linears = _adapted_linears(model, adapter)
    experts = _expert_targets(model, lora)
    whole = whole_modules(model, lora.modules_to_save, linears=linear_modules(model))
    weights = _claimed_by_peft(model, linears, adapter)
    modules = {name.rsplit(".", 1)[-1] for name in linears if name not in weights}
    if adapter.stated.kind == "modules":
        config = _of_method(model, adapter, modules, whole=whole)
        return _Chosen(config=config, linears=linears, whole=whole)
    keys = _pattern_keys(linears, weights, experts)
    parameters = sorted({*experts, *weights.values()})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes floats
        lora_dropout=lora.dropout,
        rank_pattern=_pattern("rank_pattern", lora.rank_pattern, keys),
        alpha_pattern=_pattern("alpha_pattern", lora.alpha_pattern, keys),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
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
    whole: Whole,
) -> PeftConfig:
    """Return peft's settings of an adapter of another method than LoRA."""
    if whole.has_tied:
        raise ConfigError(
            f"adapter.modules_to_save names an embedding whose weights the head shares, and"
            f" adapter.method is {adapter.method}",
            limit="peft keeps the two together for LoRA alone",
            hint="`adapter.method: lora`, or leave the embedding out of `modules_to_save`",
        )
    return method_config(
        adapter,
        targets=modules,
        excluded=_in_towers(model, modules),
        modules_to_save=whole.names,
        model_type=str(model.config.model_type),
        task=task_type(model),
    )


def _adapted_linears(model: PreTrainedModel, adapter: AdapterSection) -> dict[str, nn.Module]:
    """Return the linear layers that get an adapter, by full name."""
    known, lora = linear_names(model), adapter.as_lora
    if lora.targets and not known:
        raise ConfigError(
            f"nothing in a {model.config.model_type} model can get an adapter",
            limit="adapters go on linear layers (nn.Linear) inside the decoder layers",
            hint="`train.what: all`, or another model",
        )
    names = lora.chosen_targets(known)
    unknown = sorted(set(names) - set(known))
    if unknown or (lora.targets and not names):
        raise ConfigError(
            f"adapter.targets: {', '.join(unknown) or lora.targets} is not in this model",
            limit=f"its linear layers are {', '.join(known)}",
            hint="`adapter.targets: all-linear`",
        )
    linears = {
        name: m for name, m in linear_modules(model).items() if name.rsplit(".", 1)[-1] in names
    }
    setting = "dora: true" if lora.dora else f"method: {adapter.method}"
    is_for_plain = lora.dora or adapter.stated.kind == "modules"
    for name, module in linears.items():
        if is_for_plain and type(module) is not nn.Linear:
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
    lora = adapter.as_lora
    for setting, value in (
        ("method", adapter.method if adapter.stated.kind == "modules" else ""),
        ("dora", lora.dora),
        ("dropout", lora.dropout),
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


def _expert_targets(model: PreTrainedModel, adapter: LoraSection) -> tuple[str, ...]:
    """Return the fused expert weights that get an adapter."""
    experts = expert_parameters(model) if adapter.experts else ()
    if adapter.experts and not experts:
        raise ConfigError(
            f"adapter.experts: true, but {type(model).__name__} has no fused experts",
            limit="only mixture-of-experts models have them",
            hint="`adapter.experts: false`",
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
    revision: str | None = None,
) -> None:
    """Write an adapter as peft does and generation_config.json, whole and with a manifest.

    Args:
        model: With its adapter.
        folder: Where to.
        adapter: Which of the model's; the files do not say.
        tensors: Its values, by the model's names; None takes those of the model.
        stops: Where generation stops; None writes no generation config.
        revision: The commit of the base on the hub, by which peft loads it.

    Raises:
        CheckpointError: The folder cannot be written; what was there before is unchanged.
    """
    model.peft_config[adapter].revision = revision
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
    refuse_virtual(methods()[str(read_adapter_config(folder)["peft_type"])])
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
    for name in ("peft_type", *sorted(methods()[kind].computed.split())):
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
