"""What can be known to fail before anything is loaded."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from finetune.env import world_size
from finetune.errors import ConfigError, FinetuneError, ModelError
from finetune.figures import shown_time
from finetune.model import has_weights, is_hub_reachable
from finetune.planning import full_request
from finetune.recipe import OffloadSection, Recipe
from offload.errors import DoesNotFitError
from offload.plan.bounds import r3_bound_s
from offload.plan.costs import price
from offload.plan.facts import ModelFacts
from offload.plan.machine import Machine
from offload.plan.plan import plan
from offload.plan.schedule import MIN_SLOTS


def require_one_process() -> None:
    """Refuse a launch with several processes.

    Raises:
        FinetuneError: There is more than one; each would train alone and overwrite the others.
    """
    if world_size() > 1:
        raise FinetuneError(
            f"{world_size()} processes were launched",
            limit="this version trains in one process",
            hint="run `sluice finetune RECIPE` without `accelerate launch`, or with"
            " `--num_processes 1`",
        )


def torch_device_name(offload: OffloadSection) -> str:
    """Return "cuda" or "cpu", `auto` taking CUDA where there is one.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if offload.device == "cuda" and not has_cuda:
        raise ConfigError(
            "offload.device: cuda, but PyTorch sees no CUDA device",
            limit="`cuda` needs an NVIDIA card, its driver and a CUDA build of PyTorch",
            hint="`offload.device: cpu`, or check `nvidia-smi`",
        )
    return "cuda" if has_cuda and offload.device != "cpu" else "cpu"


def require_trainable_cargo(offload: OffloadSection) -> None:
    """Refuse a codec that the engine cannot decode, and a tier that it cannot read.

    Raises:
        ConfigError: The codec or tier is not trained with yet.
    """
    if offload.tier == "disk":
        raise ConfigError(
            "offload.tier: disk cannot be trained from yet",
            limit="this version's engine reads layers from memory",
            hint="`offload.tier: ram`",
        )
    if offload.codec == "nf4":
        raise ConfigError(
            "offload.codec: nf4 can be planned with and not yet trained with",
            limit="this version moves layers in the model's own dtype",
            hint="`offload.codec: native`",
        )


def require_loggers(log_to: Sequence[str]) -> None:
    """Check that what metrics are to be sent to is installed.

    Raises:
        ConfigError: A package is missing.
    """
    for place in log_to:
        if find_spec(place) is None:
            raise ConfigError(
                f"report.log_to: {place}, but the package {place} is not installed",
                limit="metrics.jsonl is always written and needs nothing",
                hint=f"`pip install {place}`, or `report.log_to: []`",
            )


def require_same_machine(machine: Machine, *, device: str, dtype: str) -> None:
    """Refuse the rates of another device, or of another type of weights.

    Raises:
        ConfigError: They would give a plan for something else than what runs.
    """
    if (machine.device, machine.dtype) != (device, dtype):
        raise ConfigError(
            f"--machine holds rates of {machine.device} in {machine.dtype}",
            limit=f"this run computes on {device} in {dtype}",
            hint=f"`sluice probe --dtype {dtype} --save FILE` on this machine, or no `--machine`",
        )


def require_within_run(recipe: Recipe, *, num_steps: int) -> None:
    """Refuse settings that lie behind the last step, once it is known.

    Raises:
        ConfigError: A warm-up that never ends, or a profile that is never taken.
    """
    for name, value in (
        ("train.warmup_steps", recipe.train.warmup_steps),
        ("report.profile", recipe.report.profile or 0),
    ):
        if value > num_steps:
            raise ConfigError(
                f"{name}: {value} in a run of {num_steps} steps",
                limit="it must lie within the run",
                hint=f"`{name}: {num_steps}` or less, or more `train.epochs`",
            )


def require_ready(recipe: Recipe, facts: ModelFacts, machine: Machine) -> None:
    """Check that the weights can be had; if not, name all that is in the way of this run.

    Raises:
        ModelError: The weights are not here and cannot be fetched.
    """
    path = recipe.model.path
    if recipe.model.init == "random" or path is None or has_weights(path):
        return
    if Path(path).is_dir():
        raise ModelError(
            f"model.path: {path} holds no *.safetensors",
            limit="weights are read from safetensors files",
            hint="download the model again, or `model.init: random` for measurements",
        )
    if is_hub_reachable():
        return
    causes = [f"model.path: {path} has no weights on this machine and the hub cannot be reached"]
    if machine.device == "cpu":
        causes.append(f"on this CPU a step would take {_step_time(recipe, facts, machine)}")
    shortage = _shortage(recipe, facts, machine)
    if shortage is not None:
        causes.append(f"{shortage.what}; {shortage.limit}")
    raise ModelError(
        "\n  - ".join(causes),
        limit="training needs the weights, memory for them and a device that is fast enough",
        hint=f"download the model where there is a network (`hf download {path}`) and set"
        " `model.path: DIR`; `sluice plan RECIPE --machine rtx5090` needs no weights",
    )


def _shortage(recipe: Recipe, facts: ModelFacts, machine: Machine) -> DoesNotFitError | None:
    try:
        plan(facts, machine, full_request(recipe, facts))
    except DoesNotFitError as error:
        return error
    return None


def _step_time(recipe: Recipe, facts: ModelFacts, machine: Machine) -> str:
    request = full_request(recipe, facts)
    costs = price(facts, machine, request.typical)
    bound_s = r3_bound_s(costs, num_slots=MIN_SLOTS, num_micro_batches=request.num_micro_batches)
    return f"{shown_time(bound_s + costs.optimizer_s)} by the plan"
