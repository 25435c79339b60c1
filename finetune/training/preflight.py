"""Checks that fail before anything is loaded."""

import math
import resource
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.sources import hub_name
from finetune.data.steps import Steps
from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.model.config import commit_of, has_weights, is_on_hub, tokenizer_folder
from finetune.recipe.capabilities import broken_length_rules
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import ModelSection, OffloadSection
from finetune.report.format import shown_gib
from finetune.run.adapter_folder import read_adapter_config, require_adapter_files
from finetune.run.run_dir import RunDir
from finetune.training.ranks import Ranks
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    ROUNDED_BYTES,
    host_update_bytes,
    state_bytes,
)
from offload.plan.facts.trainable import (
    rounded_tensor_sizes,
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan

if TYPE_CHECKING:
    import torch


def reads_hub(recipe: Recipe) -> bool:
    """Return whether a recipe names a repository of the hub, or the revision of one."""
    model, data = recipe.model, recipe.data
    paths = (data.path, data.eval_path, *(source.path for source in data.mix))
    of_mix = (source.revision for source in data.mix)
    revisions = (model.revision, model.tokenizer_revision, data.revision, data.eval_revision)
    return (
        any(map(is_on_hub, (model.path, model.tokenizer)))
        or any(path is not None and hub_name(path) is not None for path in paths)
        or any(one is not None for one in (*revisions, *of_mix))
    )


def require_weights(model: ModelSection) -> None:
    """Refuse a directory without weights that can be read.

    Raises:
        ModelError: It is one.
    """
    path = model.path
    if model.init == "random" or path is None or is_on_hub(path) or has_weights(model):
        return
    from finetune.hub.repository import unreadable_weights

    names = [one.name for one in Path(path).iterdir()] if Path(path).is_dir() else []
    raise unreadable_weights(names, what=f"model.path: {path}", source=path)


def require_tokenizer(model: ModelSection) -> None:
    """Refuse a tokenizer that needs code of its repository.

    Raises:
        ModelError: It does.
    """
    if model.init == "random" or model.tokenizer_source is None:
        return
    from finetune.model.tokenizer import is_code, load_tokenizer

    if is_code(tokenizer_folder(model)):
        load_tokenizer(model)


def torch_device(offload: OffloadSection, ranks: Ranks) -> "torch.device":
    """Return this rank's device.

    Raises:
        ConfigError: CUDA was asked for and is not there, or there are fewer GPUs than ranks.
    """
    import torch

    name = torch_device_name(offload)
    if name == "cpu" or ranks.num == 1:
        return torch.device(name)
    num_cards = torch.cuda.device_count()
    num_local = ranks.nodes.count(ranks.nodes[ranks.index])
    if num_cards < num_local:
        per_machine = "--num_processes" if ranks.num_machines == 1 else "--nproc_per_node"
        raise ConfigError(
            f"{num_local} processes were launched for {num_cards} CUDA devices",
            limit="each process needs a card of its own",
            hint=f"`{per_machine} {num_cards}`",
        )
    return torch.device(name, ranks.local_index)


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


def require_loggers(log_to: Sequence[str]) -> None:
    """Check that the packages to which metrics are sent are installed.

    Raises:
        ConfigError: A package is missing.
    """
    for place in log_to:
        if find_spec(place) is None:
            raise ConfigError(
                f"report.log_to: {place}, but the package {place} is not installed",
                hint=f"`pip install 'sluice-finetune[{place}]'`, or `report.log_to: []`",
            )


def require_same_machine(machine: Machine, *, device: str, dtype: str) -> None:
    """Refuse the rates of another device, or of another type of weights.

    Raises:
        ConfigError: They would give a plan for something other than this run.
    """
    if (machine.device, machine.dtype) != (device, dtype):
        raise ConfigError(
            f"--machine holds rates of {machine.device} in {machine.dtype}",
            limit=f"this run computes on {device} in {dtype}",
            hint=f"`sluice probe --dtype {dtype} --save FILE` on this machine, or no `--machine`",
        )


def require_within_run(recipe: Recipe, *, num_steps: int) -> None:
    """Refuse settings that cannot take effect in a run of so many steps, once that is known.

    Raises:
        ConfigError: Such as a warm-up that never ends, or a profile that is never taken.
    """
    breach = next(broken_length_rules(recipe, num_steps=num_steps), None)
    if breach is not None:
        raise breach.error


def require_last_step(steps: Steps, *, num_ranks: int) -> None:
    """Refuse epochs whose last step has too few rows to be shared, or to be compared.

    Raises:
        DataError: It has.
    """
    number = steps.num - 1
    num_examples, num_rows = len(steps.order.rows(number)), steps.num_rows_in(number)
    is_mismatched = steps.comparison is not None and steps.comparison.prompt_lens is not None
    if num_examples < num_ranks:
        num, limit = num_examples, f"each of {num_ranks} processes needs a row of every step"
    elif is_mismatched and num_rows == 1:
        num, limit = 1, "each prompt is scored with the answer of another row of the step"
    else:
        return
    raise DataError(
        f"the last of {steps.num:,} steps has {num} row{'s' * (num > 1)} of the last epoch",
        limit=limit,
        hint=f"`train.steps: {number}` in place of `train.epochs` leaves it out"
        if number
        else "train on more rows",
    )


def adapter_to_go_on_from(path: Path, *, model: ModelSection) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of the adapter that a run goes on from, and what is to know of it.

    Args:
        path: A run's directory, or a folder in peft's format.
        model: The model of the run.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ModelError: Its weights are damaged.
    """
    run, folder, notes = RunDir(path), path, tuple[str, ...]()
    if run.recipe_file.exists():
        folder, notes = run.adapter, run.require_adapter()
    require_adapter_files(folder)
    config = read_adapter_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    who = f"The adapter in {folder} was trained"
    return folder, (*notes, *other_base(who, model, base, revision))


def other_base(
    who: str, model: ModelSection, base: str | None, revision: str | None
) -> tuple[str, ...]:
    """Return a note if an adapter was trained on another model, or at another commit of it.

    Args:
        who: The beginning of the note: what was trained.
        model: The model that it is put on.
        base: The model that it was trained on; None if that is not known.
        revision: Its commit on the hub; None if that is not known.
    """
    if base and model.path and base != model.path:
        return (f"{who} on {base}, and this is {model.path}: they have to be the same model",)
    commit = commit_of(model)
    if base and revision and commit and revision != commit:
        return (
            f"{who} on {base} at commit {revision}, and this is at {commit}: `model.revision:"
            f" {revision}` is the same",
        )
    return ()


def require_room(folder: Path, plan: Plan) -> None:
    """Check that a checkpoint and an adapter can be written, before the model is loaded.

    Raises:
        CheckpointError: The disk is too full, or files may not be as large as the optimizer's.
    """
    facts, spec = plan.facts, plan.request.typical.adapter
    weight_bytes = FP32_BYTES * trained_parameters(facts, spec)
    weight_bytes -= ROUNDED_BYTES * sum(rounded_tensor_sizes(facts, spec))
    shapes = trained_tensor_shapes(facts, spec)
    state_file_bytes = state_bytes(shapes, plan.request.typical.optimizer)
    needed_bytes = 2 * weight_bytes + state_file_bytes
    if spec.whole is not None:  # masters and states in one file, and the model
        dtype_bytes, num = plan.request.typical.dtype_bytes, spec.whole.num_parameters
        optimizer = plan.request.typical.optimizer
        each = host_update_bytes(dtype_bytes, optimizer, spec.whole.low_bytes)
        weight_bytes = math.ceil(num * (sum(each.values()) - each[HOST_GRADIENTS]))
        needed_bytes = weight_bytes + facts.num_parameters * dtype_bytes
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"{folder} needs {shown_gib(needed_bytes)} for a checkpoint and the result, and"
            f" {shown_gib(free_bytes)} is free",
            limit="a run keeps its newest checkpoint until the next one is whole",
            hint=f"free space (`df -h {folder}`), or `output.dir=...` on a larger disk",
        )
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest_bytes = max(weight_bytes, state_file_bytes)
    if most_bytes not in (resource.RLIM_INFINITY, -1) and largest_bytes > most_bytes:
        raise CheckpointError(
            f"{folder} needs a file of {shown_gib(largest_bytes)}, and files here have at most"
            f" {shown_gib(most_bytes)}",
            limit="a checkpoint has a file of weights and one of optimizer states",
            hint="raise the limit (`ulimit -f unlimited`)",
        )


def require_trainable(recipe: Recipe) -> None:
    """Check that the model can be trained as the recipe asks.

    Raises:
        UnsupportedModelError: It asks for a router loss of another kind than is known.
        ConfigError: It asks for a prefix, and layers keep anything but plain keys and values; or
            what the objective needs is not there.
    """
    _require_router_loss(recipe)
    recipe.objective.require_ready()
    if recipe.adapter.stated.kind == "prefix":
        from finetune.adapter.virtual_tokens import require_plain_cache
        from finetune.model.empty import empty_of

        require_plain_cache(empty_of(recipe.model), recipe.adapter)


def _require_router_loss(recipe: Recipe) -> None:
    """Refuse a router loss that the model lacks, or that cannot be computed layer by layer.

    Raises:
        UnsupportedModelError: Its router loss is of another kind.
    """
    if not recipe.train.router_loss_coef:
        return
    from finetune.model.empty import empty_of
    from finetune.model.load import set_router_loss
    from offload.engine.model.layers import LayeredModel

    empty = empty_of(recipe.model)
    set_router_loss(empty, recipe.train.router_loss_coef)
    LayeredModel(empty)
