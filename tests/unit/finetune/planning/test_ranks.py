"""Steps that several processes or GPUs can share, and those that they cannot."""

import re
from dataclasses import replace

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import full_requests
from finetune.planning.ranks import require_gpus, require_micro_batch_per_rank
from finetune.planning.subject import subject_of
from finetune.recipe.sections import TrainSection
from offload.plan.machine.machine import named_machine


def train_section(**settings: object) -> TrainSection:
    return TrainSection.model_validate({"steps": 1, "seq_len": 64, **settings})


def test_fewer_micro_batches_than_ranks_are_refused_with_the_fix() -> None:
    require_micro_batch_per_rank(train_section(grad_accum_steps=3), num_ranks=3)
    with pytest.raises(
        ConfigError,
        match=r"a step of 3 micro-batches for 4 processes; .*\n\n"
        r"hint: `train\.grad_accum_steps: 4`, or `--num_processes 3`",
    ):
        require_micro_batch_per_rank(train_section(grad_accum_steps=3), num_ranks=4)
    by_tokens = train_section(tokens_per_step=128, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"hint: `train\.tokens_per_step: 256`"):
        require_micro_batch_per_rank(by_tokens, num_ranks=2)


def test_gpus_that_cannot_share_a_step_are_refused_with_the_flag_that_asked_for_them() -> None:
    card = named_machine("rtx4090", dtype="bfloat16")
    train = train_section(grad_accum_steps=3)
    require_gpus(train, card, num_gpus=3, setting="--gpus")
    with pytest.raises(ConfigError, match=r"hint: `train\.grad_accum_steps: 4`, or `--gpus 3`"):
        require_gpus(train, card, num_gpus=4, setting="--gpus")
    with pytest.raises(ConfigError, match=r"train\.probe_steps: 9, with 2 .*\n\nhint: `--gpus 1`"):
        require_gpus(
            train_section(probe_steps=9, grad_accum_steps=2), card, num_gpus=2, setting="--gpus"
        )
    cpu = replace(card, name="desk", device="cpu")
    require_gpus(train, cpu, num_gpus=1, setting="--gpus")
    with pytest.raises(ConfigError, match=r"2 GPUs, but desk is a CPU; .*\n\nhint: `--gpus 1`"):
        require_gpus(train, cpu, num_gpus=2, setting="--gpus")


@pytest.mark.parametrize("what", ["all", ["model.layers.*"]])
def test_weights_of_the_model_train_sharded_over_several_gpus_or_in_one_process(what) -> None:
    card = named_machine("h100", dtype="bfloat16")
    train = train_section(what=what, grad_accum_steps=2)
    require_gpus(train, card, num_gpus=1, setting="--gpus")
    with pytest.raises(
        ConfigError,
        match=rf"train\.what: {re.escape(str(what))} and train\.parallel: stream, with 2 processes;"
        r" .* are sharded; .*\n\nhint: `train\.parallel: fsdp2`, or `--gpus 1`",
    ):
        require_gpus(train, card, num_gpus=2, setting="--gpus")
    for parallel in ("fsdp2", "auto"):
        sharded = train.model_copy(update={"parallel": parallel})
        require_gpus(sharded, card, num_gpus=2, setting="--gpus")


def test_no_plan_streams_weights_that_train_over_several_gpus() -> None:
    subject = subject_of("qwen3-8b", ["train.what=all", "train.parallel=auto"])
    with pytest.raises(ConfigError, match=r"train\.what: all and train\.parallel: auto, with 2"):
        full_requests(subject.recipe, subject.facts, num_ranks=2)
