"""Contenders of one wave on an engine, which scores lines under all of them in each sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.adapter.lora import add_alike, add_lora, load_adapter, set_trained
from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import ConfigError, ModelError
from finetune.files.atomic import expanded
from finetune.model.config import has_weights, is_on_hub
from finetune.model.load import load_model
from finetune.planning.request import find_machine, full_request, with_backend
from finetune.planning.subject import Subject, is_model, subject_of
from finetune.recipe.load import published_ids
from finetune.recipe.recipe import Recipe
from finetune.scoring.contenders import Contender, widest_spec
from finetune.scoring.rows import Line, LineScore
from finetune.training import preflight
from offload.engine.engine import Engine, EngineOptions
from offload.plan.facts.workload import WeightPlace, Workload
from offload.plan.machine.machine import ExpertsImplementation, Machine
from offload.plan.request import PlanRequest
from offload.plan.scoring import Cut, ScorePlan, ScoreRequest, plan_scoring
from offload.probe.machine import PROBE_S, probe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.images.live import LiveImages
    from offload.engine.batch import Batch
    from offload.engine.host.store import Backing
    from offload.engine.passes.scoring import TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What a wave gives some lines."""

    # The scores by contender in the order of the wave, and by line.
    lines: tuple[tuple[LineScore, ...], ...]
    num_loads: int  # layers copied to the device
    sweep_s: float  # measured seconds of all sweeps


class Scorer:
    """A base with the adapters of a wave, on an engine."""

    def __init__(
        self,
        engine: Engine,
        model: "PeftModel | PreTrainedModel",
        adapters: Sequence[str | None],
        *,
        pad_id: int,
    ) -> None:
        """Keep the parts.

        Args:
            engine: Runs the model.
            model: With the adapters, in evaluation mode.
            adapters: The model's name of each contender's adapter; None for the base.
            pad_id: Fills up lines.
        """
        self.engine, self.model = engine, model
        self._adapters, self._pad_id = tuple(adapters), pad_id

    def score(self, lines: Sequence[Line], sweeps: Sequence[Cut]) -> Scored:
        """Score lines under all contenders.

        Args:
            lines: Each with a label.
            sweeps: Micro-batches of each pass over the layers, as numbers of lines.
        """
        found: list[list[LineScore | None]] = [[None] * len(lines) for _ in self._adapters]
        num_loads, sweep_s = 0, 0.0
        for batches in sweeps:
            rows = [[lines[number] for number in numbers] for numbers in batches]
            made = [batch_of(one, pad_id=self._pad_id) for one in rows]
            result = self.engine.score(made, adapters=self._adapters)
            num_loads += result.num_loads
            sweep_s += result.pass_s
            for own, scores in zip(found, result.scores, strict=True):
                for numbers, tokens in zip(batches, scores, strict=True):
                    for number, score in zip(numbers, _by_row(tokens), strict=True):
                        own[number] = score
        whole = [tuple(score for score in own if score is not None) for own in found]
        assert all(len(own) == len(lines) for own in whole), "a line is in no sweep"
        return Scored(lines=tuple(whole), num_loads=num_loads, sweep_s=sweep_s)

    def close(self) -> None:
        """End the engine; the model cannot be used any more."""
        self.engine.close()


def batch_of(lines: Sequence[Line], *, pad_id: int) -> "Batch":
    """Return lines as a micro-batch, filled up at the right: no token of a line sees what follows.

    So a mask for the padding would change nothing.
    """
    width = max(len(line.ids) for line in lines)
    fill = [width - len(line.ids) for line in lines]
    ids = [[*line.ids, *[pad_id] * num] for line, num in zip(lines, fill, strict=True)]
    labels = [[*line.labels, *[IGNORE_INDEX] * num] for line, num in zip(lines, fill, strict=True)]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def _by_row(tokens: "TokenScores") -> list[LineScore]:
    """Add up the scores of each row of a micro-batch, in float64."""
    zeros_R = torch.zeros(tokens.num_rows, dtype=torch.float64)
    logps_R = zeros_R.index_add(0, tokens.rows_N, tokens.logps_N.double())
    missed_R = zeros_R.index_add(0, tokens.rows_N, (~tokens.is_greedy_N).double())
    counts_R = torch.bincount(tokens.rows_N, minlength=tokens.num_rows)
    return [
        LineScore(logp=logp, num_tokens=num, is_greedy=missed == 0)
        for logp, num, missed in zip(
            logps_R.tolist(), counts_R.tolist(), missed_R.tolist(), strict=True
        )
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attaching:
    """How a base is loaded and put on an engine."""

    recipe: Recipe  # the recipe of the base
    device: str  # "cuda" or "cpu"
    codec: str  # the codec in which the layers wait
    num_slots: int  # layers on the device at a time
    head_chunk_tokens: int  # tokens whose logits exist at a time
    # The expert kernels; None for a model without experts.
    experts_implementation: ExpertsImplementation | None
    embeddings: WeightPlace  # where the input embedding is
    head: WeightPlace  # where the output head is
    images: "LiveImages | None" = None  # those of the lines; None if no line has any

    def open(self, wave: Sequence[Contender], *, pad_id: int) -> Scorer:
        """Load the base, add the adapters of a wave, and attach the model.

        Raises:
            CheckpointError: An adapter or a checkpoint is damaged, or of another model.
            ModelError: Weights are missing or damaged.
        """
        recipe = self.recipe
        loaded = load_model(
            recipe.model,
            codec=self.codec,
            device=self.device,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation=self.experts_implementation,
        )
        if self.images is not None:
            self.images.put_in_front(loaded.model)
        model, names = with_adapters(loaded.model, wave, recipe=recipe, backing=loaded.backing)
        model.eval().requires_grad_(requires_grad=False)
        for path, parameter in model.named_parameters():
            # what trains stays on the device, in its own precision, whatever the layers' codec
            parameter.requires_grad_(not {*path.split(".")}.isdisjoint(names.values()))
        options = EngineOptions(
            num_slots=self.num_slots,
            codec=self.codec,
            tier=recipe.offload.load_tier,
            store_dir=None,
            stash="device",
            trained_weights="device",
            head_chunk_tokens=self.head_chunk_tokens,
            num_kept_graphs=0,
            layer_kernels="fused" if recipe.model.kernels == "fused" else "plain",
            plain_parts=recipe.model.plain_parts,
            embeddings=self.embeddings,
            head=self.head,
        )
        device = torch.device(self.device)
        engine = Engine(model, device=device, options=options, backing=loaded.backing)
        adapters = [names.get(one.name) for one in wave]
        return Scorer(engine, model, adapters, pad_id=pad_id)


def with_adapters(
    base: "PreTrainedModel",
    wave: Sequence[Contender],
    *,
    recipe: Recipe,
    backing: "Backing | None",
) -> "tuple[PeftModel | PreTrainedModel, dict[str, str]]":
    """Return a base with the adapters of a wave, and their names in it by those of contenders."""
    model: PeftModel | PreTrainedModel = base
    names, adapted, compute_dtype = dict[str, str](), None, recipe.adapter.as_lora.compute_dtype
    checkpoints = [(one, one.checkpoint) for one in wave if one.checkpoint is not None]
    for one, checkpoint in checkpoints:
        section, seed = checkpoint.recipe.adapter, checkpoint.recipe.train.seed
        compute_dtype = section.as_lora.compute_dtype
        name = names[one.name] = f"sluice_{len(names)}" if adapted else "default"
        if adapted is None:
            adapted = model = add_lora(base, section, seed=seed, backing=backing)
        else:
            add_alike(adapted, like="default", name=name)
        set_trained(adapted, checkpoint.run.checkpoints.trained(checkpoint.step), name=name)
    for one in wave:
        if one.folder is not None:
            name = names[one.name] = f"sluice_{len(names)}"
            adapted = model = load_adapter(adapted or base, one.folder, name=name)
    if adapted is not None and compute_dtype == "auto":
        compute_in_base_dtype(adapted)
    return model, names


def base_to_score(name: str, overrides: Sequence[str]) -> Subject:
    """Return what a name means: a recipe, or a model with its weights.

    Raises:
        ConfigError: It is neither, or a setting is wrong.
        ModelError: There are no weights.
    """
    if is_model(name):
        folder = expanded(name)
        path = str(folder.absolute()) if folder.is_dir() else published_ids().get(name, name)
        overrides = [f"model.path={path}", *overrides]
    subject = subject_of(name, overrides)
    if subject.recipe.model.head != "tokens":
        what = "classifier" if subject.recipe.objective.has_classes else "reward model"
        raise ConfigError(
            f"{name} trains a {what} (model.head: {subject.recipe.model.head})",
            limit="rows are scored by the log-probabilities of their tokens, which it has not",
            hint="evaluate it with `data.eval_path` and `output.eval_every`, or load its adapter"
            " with peft",
        )
    model = subject.recipe.model
    if model.init == "pretrained" and not is_on_hub(model.path) and not has_weights(model):
        raise ModelError(
            f"{name} has no weights: model.path is {model.path}",
            limit="rows are scored with the weights of a model, in safetensors files",
            hint="a directory with config.json and *.safetensors, or a recipe of one",
        )
    return subject


def machine_here(subject: Subject, file: Path | None) -> Machine:
    """Return this machine, with the expert backend that the recipe sets.

    Args:
        subject: The base.
        file: A machine that was measured before; None measures this one.

    Raises:
        MachineError: It cannot be measured, or the file cannot be read.
        ConfigError: The file's rates are of another device.
    """
    recipe = subject.recipe
    device, dtype = preflight.torch_device_name(recipe.offload), recipe.model.dtype
    if file is None:
        machine = probe(device=device, seconds=PROBE_S, dtype=dtype)
    else:
        machine = find_machine(str(file), dtype=dtype)
        preflight.require_same_machine(machine, device=device, dtype=dtype)
    return with_backend(recipe, subject.facts, machine)


def plan_wave(
    subject: Subject,
    machine: Machine,
    wave: Sequence[Contender],
    lines: Sequence[Line],
    *,
    num_slots: int | None = None,
    has_images: bool = False,
) -> ScorePlan:
    """Plan how a wave scores lines.

    Args:
        subject: The base.
        machine: Where.
        wave: What lines are scored with.
        lines: The lines.
        num_slots: Layers on the device at a time; None takes the recipe's, or as many as fit.
        has_images: Whether a line has an image.

    Raises:
        DoesNotFitError: It does not fit.
    """
    wanted = _request(subject)
    request = ScoreRequest(
        workload=replace(_workload(subject, wave, wanted), has_images=has_images),
        lengths=tuple(len(line.ids) for line in lines),
        num_labels=sum(line.num_labels for line in lines),
        num_adapters=len(wave),
        adapter_bytes=sum(one.num_bytes for one in wave),
        num_slots=wanted.num_slots if num_slots is None else num_slots,
        vram_budget_bytes=wanted.vram_budget_bytes,
        is_on_disk=wanted.is_on_disk,
    )
    return plan_scoring(subject.facts, machine, request)


def attaching(
    subject: Subject, machine: Machine, *, num_slots: int, images: "LiveImages | None" = None
) -> Attaching:
    """Return how the base is loaded and attached."""
    recipe, has_experts = subject.recipe, subject.facts.has_experts
    return Attaching(
        recipe=recipe,
        device=machine.device,
        codec=recipe.offload.layer_codec,
        num_slots=num_slots,
        head_chunk_tokens=_request(subject).typical.head_chunk_tokens,
        embeddings=_request(subject).typical.embeddings,
        head=_request(subject).typical.head,
        experts_implementation=machine.experts_implementation.value if has_experts else None,
        images=images,
    )


def _request(subject: Subject) -> PlanRequest:
    return full_request(subject.recipe, subject.facts)


def _workload(subject: Subject, wave: Sequence[Contender], wanted: PlanRequest) -> Workload:
    recipe = subject.recipe
    return replace(
        wanted.typical,
        adapter=widest_spec(wave, recipe, subject.facts),
        packed_tokens=None,
        has_router_loss=False,
        mlp_chunk_tokens=None,
        layer_code="fused" if recipe.model.kernels == "fused" else "plain",
    )
