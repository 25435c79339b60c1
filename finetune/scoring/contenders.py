"""What rows are scored with: the base, adapters, and the checkpoints of a run.

peft holds several adapters of one base under names, but not any two: see `waves`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.adapter.methods import refuse_virtual
from finetune.errors import CheckpointError, ConfigError
from finetune.files.tensors import read_known_header
from finetune.planning.request import adapter_spec
from finetune.recipe.recipe import Recipe
from finetune.run.adapter_folder import WEIGHTS_FILE, read_adapter_config, refuse_classifier
from finetune.run.run_dir import RunDir
from finetune.training.preflight import adapter_to_go_on_from, other_base
from offload.plan.facts.facts import AdapterSpec, ModelFacts, linear_names
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.machine.machine import DTYPE_BYTES

BASE = "base"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint of a run that trains an adapter."""

    run: RunDir
    recipe: Recipe
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Something that rows are scored with."""

    name: str  # the name that is shown
    folder: Path | None = None  # the folder of an adapter in peft's format
    checkpoint: Checkpoint | None = None  # the checkpoint of a run; without either it is the base
    num_bytes: int = 0  # what it takes in device memory: peft holds adapters in fp32

    @property
    def is_base(self) -> bool:
        """Whether it is the model without adapters."""
        return self.folder is None and self.checkpoint is None


def contenders_of(
    recipe: Recipe, *, adapters: Sequence[Path], checkpoints: Path | None, has_base: bool
) -> tuple[tuple[Contender, ...], tuple[str, ...]]:
    """Return what rows are scored with, and what the user should know of it.

    Args:
        recipe: Of the base.
        adapters: Folders in peft's format, or directories of finished runs.
        checkpoints: A run's directory: all checkpoints that it has.
        has_base: Whether the base is scored too; it is, if there is nothing else.

    Raises:
        CheckpointError: An adapter or a checkpoint is missing or damaged, or the run has trained
            the model's own weights.
        ConfigError: Something is named twice.
    """
    found, notes = list[Contender](), list[str]()
    for path in adapters:
        folder, own = adapter_to_go_on_from(path, model=recipe.model)
        refuse_classifier(folder, "scored by the log-probabilities of tokens")
        notes += own
        num_bytes = _fp32_bytes(folder / WEIGHTS_FILE)
        found.append(Contender(name=str(path), folder=folder, num_bytes=num_bytes))
    if checkpoints is not None:
        found += _checkpoints_of(RunDir(checkpoints), recipe, notes)
    if has_base or not found:
        found.insert(0, Contender(name=BASE))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice", hint="name it once")
    return tuple(found), tuple(notes)


def _checkpoints_of(run: RunDir, recipe: Recipe, notes: list[str]) -> list[Contender]:
    if not run.recipe_file.exists():
        raise CheckpointError(
            f"--checkpoints {run.path} holds no run",
            limit="a run's directory holds recipe.yaml and checkpoints/",
            hint="name the directory that `sluice finetune` printed",
        )
    begun = run.recipe()
    if begun.train.is_full:
        raise CheckpointError(
            f"{run.path} trained the model's own weights (train.what: {begun.train.what}): each of"
            " its checkpoints is a base of its own",
            limit="adapters share the base that is loaded, other weights cannot",
            hint=f"`sluice score {run.model} ROWS` scores the trained model, by itself",
        )
    refuse_virtual(begun.adapter.stated)
    steps = run.checkpoints.steps()
    if not steps:
        raise CheckpointError(
            f"{run.path} has no checkpoint",
            limit="they are written every `output.checkpoint_every` steps and at the end",
            hint=f"`--adapter {run.path}` for a finished run's adapter",
        )
    for step in steps:
        run.checkpoints.require_whole(step)
    notes += other_base(
        f"The run in {run.path} trains", recipe.model, begun.model.path, begun.model.revision
    )
    return [
        Contender(
            name=f"step {step}",
            checkpoint=Checkpoint(run=run, recipe=begun, step=step),
            num_bytes=_fp32_bytes(run.checkpoints.trained_file(step)),
        )
        for step in steps
    ]


def _fp32_bytes(file: Path) -> int:
    places = read_known_header(file).values()
    return sum(FP32_BYTES * math.prod(place.spec.shape) for place in places)


# ---------------------------------------------------------------------------------------------
# Waves


def waves(contenders: Sequence[Contender], facts: ModelFacts) -> tuple[tuple[Contender, ...], ...]:
    """Divide contenders into as few groups as one model can hold; each is a pass of its own.

    peft holds two adapters together only if they are of one type, adapt the same parameters where
    they adapt parameters (fused experts), and none saves whole what the other adapts.
    Adapters of VeRA share projections, which a key determines.
    """
    found = list[list[Contender]]()
    needs = {one.name: _Needs.of(one, facts) for one in contenders}
    for one in contenders:
        own = needs[one.name]
        for wave in found:
            if all(own.fits(needs[other.name]) for other in wave):
                wave.append(one)
                break
        else:
            found.append([one])
    return tuple(map(tuple, found))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Needs:
    """What decides whether two adapters can be held together."""

    is_base: bool = False  # whether there is no adapter
    is_alone: bool = False  # whether it fits with no other adapter, nor with the base
    kind: str = "LORA"  # peft's type of adapter, and the key of VeRA's projections if it is not 0
    # What it adapts that is a parameter and no module; a run's own are not known before the model
    # is loaded, and count as those of no other adapter.
    parameters: frozenset[str] = frozenset()
    targets: frozenset[str] | None = frozenset()  # modules that it adapts
    whole: frozenset[str] = frozenset()  # modules that it saves whole

    @classmethod
    def of(cls, one: Contender, facts: ModelFacts) -> "_Needs":
        if one.is_base:
            return cls(is_base=True)
        if one.checkpoint is not None:
            adapter = one.checkpoint.recipe.adapter
            section = adapter.as_lora
            whole = frozenset(section.modules_to_save)
            return cls(
                kind=adapter.stated.peft_type,
                is_alone=bool(whole) and facts.tie_word_embeddings,
                parameters=frozenset([str(one.checkpoint.run.path)] if facts.has_experts else []),
                targets=frozenset(section.chosen_targets(linear_names(facts))),
                whole=whole,
            )
        assert one.folder is not None
        config = read_adapter_config(one.folder)
        targets = config.get("target_modules")
        return cls(
            is_alone=bool(config.get("ensure_weight_tying") and config.get("modules_to_save")),
            kind=f"{config['peft_type']} {config.get('projection_prng_key') or ''}".strip(),
            parameters=frozenset(config.get("target_parameters") or ()),
            targets=_last_names(targets) if isinstance(targets, list) else None,
            whole=_last_names(config.get("modules_to_save") or ()),
        )

    def fits(self, other: "_Needs") -> bool:
        """Return whether one model can hold both."""
        if self.is_alone or other.is_alone:
            return False
        if self.is_base or other.is_base:
            return True
        return (
            self.kind == other.kind
            and (not (self.parameters and other.parameters) or self.parameters == other.parameters)
            and _are_apart(self.whole, other.targets)
            and _are_apart(other.whole, self.targets)
        )


def _last_names(names: Sequence[str]) -> frozenset[str]:
    return frozenset(name.rsplit(".", 1)[-1] for name in names)


def _are_apart(whole: frozenset[str], targets: frozenset[str] | None) -> bool:
    """Return whether what is saved whole is not adapted; a pattern of names may match anything."""
    return not whole if targets is None else not (whole & targets)


def widest_spec(wave: Sequence[Contender], recipe: Recipe, facts: ModelFacts) -> AdapterSpec:
    """Return the adapter of a wave with the highest rank, which time and memory are priced by."""
    specs = [_spec(one, recipe, facts) for one in wave]
    return max(specs, key=lambda spec: (bool(spec.targets) or spec.experts, spec.rank))


def _spec(one: Contender, recipe: Recipe, facts: ModelFacts) -> AdapterSpec:
    is_in_base_dtype = recipe.adapter.as_lora.compute_dtype == "auto"
    if one.is_base:
        return AdapterSpec(rank=1, targets=(), experts=False, is_in_base_dtype=is_in_base_dtype)
    if one.checkpoint is not None:
        own = one.checkpoint.recipe
        return adapter_spec(own.adapter, facts, dtype_bytes=DTYPE_BYTES[recipe.model.dtype])
    assert one.folder is not None
    config: Mapping[str, Any] = read_adapter_config(one.folder)
    known, targets = linear_names(facts), config.get("target_modules")
    names = _last_names(targets) if isinstance(targets, list) else frozenset(known)
    return AdapterSpec(
        rank=config.get("r", 8) or 1,  # blocks of OFT may have a size in place of a number
        targets=tuple(name for name in known if name in names),
        experts=bool(config.get("target_parameters")) and facts.has_experts,
        is_dora=bool(config.get("use_dora")),
        is_in_base_dtype=is_in_base_dtype,
    )
