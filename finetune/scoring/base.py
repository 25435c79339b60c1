"""The base that is scored, how a wave on it is planned, and how it is put on an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.errors import ConfigError, ModelError
from finetune.files.atomic import expanded
from finetune.model.config import has_weights, is_hub_reachable
from finetune.planning.request import find_machine, full_request, with_backend
from finetune.planning.subject import Subject, is_model, subject_of
from finetune.scoring.contenders import Contender, widest_spec
from finetune.scoring.rows import Line
from finetune.scoring.scorer import Attaching
from finetune.training import preflight
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine
from offload.plan.request import PlanRequest
from offload.plan.scoring import ScorePlan, ScoreRequest, plan_scoring
from offload.probe.machine import PROBE_S, probe


def base_to_score(name: str, overrides: Sequence[str]) -> Subject:
    """Return what a name means: a recipe, or a model with its weights.

    Raises:
        ConfigError: It is neither, or a setting is wrong.
        ModelError: There are no weights.
    """
    if is_model(name):
        folder = expanded(name)
        path = str(folder.absolute()) if folder.is_dir() else name
        overrides = [f"model.path={path}", *overrides]
    subject = subject_of(name, overrides)
    if subject.recipe.model.head != "tokens":
        what = "reward model" if subject.recipe.objective.is_reward else "classifier"
        raise ConfigError(
            f"{name} trains a {what} (model.head: {subject.recipe.model.head})",
            limit="rows are scored by the log-probabilities of their tokens, which it has not",
            hint="evaluate it with `data.eval_path` and `output.eval_every`, or load its adapter"
            " with peft",
        )
    path_or_none, init = subject.recipe.model.path, subject.recipe.model.init
    if init == "random" or (path_or_none and has_weights(path_or_none)):
        return subject
    if path_or_none is None or Path(path_or_none).exists() or not is_hub_reachable():
        raise ModelError(
            f"{name} has no weights: model.path is {path_or_none}",
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
) -> ScorePlan:
    """Plan how a wave scores lines.

    Args:
        subject: The base.
        machine: Where.
        wave: What lines are scored with.
        lines: The lines.
        num_slots: Layers on the device at a time; None takes the recipe's, or as many as fit.

    Raises:
        DoesNotFitError: It does not fit.
    """
    wanted = _request(subject)
    request = ScoreRequest(
        workload=_workload(subject, wave, wanted),
        lengths=tuple(len(line.ids) for line in lines),
        num_labels=sum(line.num_labels for line in lines),
        num_adapters=len(wave),
        adapter_bytes=sum(one.num_bytes for one in wave),
        num_slots=wanted.num_slots if num_slots is None else num_slots,
        vram_budget_bytes=wanted.vram_budget_bytes,
        is_on_disk=wanted.is_on_disk,
    )
    return plan_scoring(subject.facts, machine, request)


def attaching(subject: Subject, machine: Machine, *, num_slots: int) -> Attaching:
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
    )


def _request(subject: Subject) -> PlanRequest:
    return full_request(subject.recipe, subject.facts, num_ranks=1)


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
