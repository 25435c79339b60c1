"""What can be known to fail before anything is loaded."""

from finetune.env import world_size
from finetune.errors import ConfigError, FinetuneError, ModelError
from finetune.model import has_weights, is_hub_reachable
from finetune.planning import full_request
from finetune.recipe import OffloadSection, Recipe
from offload.errors import DoesNotFitError
from offload.plan.costs import price, r3_bound_s
from offload.plan.facts import ModelFacts
from offload.plan.machine import Machine
from offload.plan.plan import MIN_SLOTS, plan

_HOUR_S = 3600


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
    """Refuse a codec that the engine cannot decode.

    Raises:
        ConfigError: The codec can be planned with, and not yet trained with.
    """
    if offload.codec == "nf4":
        raise ConfigError(
            "offload.codec: nf4 can be planned with and not yet trained with",
            limit="this version moves layers in the model's own dtype",
            hint="`offload.codec: native`",
        )


def require_ready(recipe: Recipe, facts: ModelFacts, machine: Machine) -> None:
    """Check that the weights can be had and that the plan fits, and name all that is in the way.

    Raises:
        ModelError: The weights are not here and cannot be fetched.
        DoesNotFitError: The weights are here and memory is short.
    """
    shortage = _shortage(recipe, facts, machine)
    path = recipe.model.path
    is_missing = (
        recipe.model.init == "pretrained"
        and path is not None
        and not has_weights(path)
        and not is_hub_reachable()
    )
    if not is_missing:
        if shortage is not None:
            raise shortage
        return
    causes = [f"model.path: {path} has no weights on this machine and the hub cannot be reached"]
    if machine.device == "cpu":
        causes.append(f"on this CPU a step would take {_step_hours(recipe, facts, machine)}")
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


def _step_hours(recipe: Recipe, facts: ModelFacts, machine: Machine) -> str:
    request = full_request(recipe, facts)
    costs = price(facts, machine, request.typical)
    bound_s = r3_bound_s(costs, num_slots=MIN_SLOTS, num_micro_batches=request.num_micro_batches)
    return f"{(bound_s + costs.optimizer_s) / _HOUR_S:.1f} hours by the plan"
