"""Whether a step can be shared: by processes of a launcher, or by GPUs that are planned for."""

from finetune.errors import ConfigError
from finetune.recipe.capabilities import OF_PROCESSES, OF_SHARED_WEIGHTS, PROCESSES, require
from finetune.recipe.sections import TrainSection
from offload.plan.machine.machine import Machine

LAUNCHED = "--num_processes"  # of accelerate
GPUS = "--gpus"  # of commands that plan


def require_micro_batch_per_rank(
    train: TrainSection, *, num_ranks: int, setting: str = LAUNCHED
) -> None:
    """Refuse a step that leaves a rank without work.

    Args:
        train: The recipe's section.
        num_ranks: Processes that share the step.
        setting: The option or command that sets their number.

    Raises:
        ConfigError: It has fewer micro-batches than there are ranks.
    """
    is_auto = train.micro_batch_size == "auto"  # at least one sequence each
    num_micro_batches = train.global_batch_size if is_auto else train.num_micro_batches
    if num_micro_batches < num_ranks:
        rows = num_ranks if is_auto else train.sequences * num_ranks
        more = (
            f"train.grad_accum_steps: {num_ranks}"
            if train.tokens_per_step is None
            else f"train.tokens_per_step: {rows * train.seq_len}"
        )
        raise ConfigError(
            f"a step of {num_micro_batches} micro-batches for {num_ranks} processes",
            limit="each needs at least one micro-batch of the step",
            hint=f"`{more}`, or `{setting} {num_micro_batches}`",
        )


def require_shares(train: TrainSection, *, num_ranks: int, setting: str = LAUNCHED) -> None:
    """Refuse shares of another number of processes, or of a single one.

    Args:
        train: The recipe's section.
        num_ranks: Processes that share the step.
        setting: The option or command that sets their number.

    Raises:
        ConfigError: They are not as many.
    """
    shares = train.shares
    if not isinstance(shares, str) and (len(shares) != num_ranks or num_ranks == 1):
        raise ConfigError(
            f"train.shares: {list(shares)}, with {num_ranks} process{'es' * (num_ranks > 1)}",
            limit="it has a number for each of several processes",
            hint=f"`train.shares: auto`, or `{setting} {max(2, len(shares))}`",
        )


def require_ranks_for(train: TrainSection, *, num_ranks: int, setting: str = LAUNCHED) -> None:
    """Refuse several processes that would each train a head or stream weights that train, or one.

    Args:
        train: The recipe's section.
        num_ranks: Processes that share the step.
        setting: The option or command that sets their number.

    Raises:
        ConfigError: There are several, or one that is to share the model.
    """
    rows = (*OF_PROCESSES, *(OF_SHARED_WEIGHTS if train.parallel == "stream" else ()))
    values = {PROCESSES: num_ranks, **{f"train.{name}": value for name, value in train}}
    require(rows, values.__getitem__, option=setting)


def require_gpus(train: TrainSection, machine: Machine, *, num_gpus: int, setting: str) -> None:
    """Refuse a number of GPUs that cannot share a step.

    Args:
        train: The recipe's section.
        machine: One of the GPUs, with the host of all.
        num_gpus: How many there are.
        setting: The option or command that sets their number.

    Raises:
        ConfigError: The machine computes on its CPU, or the step cannot be shared.
    """
    require_shares(train, num_ranks=num_gpus, setting=setting)
    if num_gpus == 1:
        require_ranks_for(train, num_ranks=1, setting=setting)
        return
    if machine.device == "cpu":
        raise ConfigError(
            f"{num_gpus} GPUs, but {machine.name} is a CPU",
            limit="each GPU of a machine takes its share of a step",
            hint=f"`{setting} 1`, or a named card",
        )
    require_ranks_for(train, num_ranks=num_gpus, setting=setting)
    require_micro_batch_per_rank(train, num_ranks=num_gpus, setting=setting)
