"""What a recipe cannot be planned with: a model, a device or a number of processes."""

from dataclasses import replace

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import full_requests
from finetune.planning.ranks import GPUS, require_gpus
from finetune.planning.request import with_backend
from finetune.planning.subject import subject_of
from finetune.recipe.capabilities import OF_MODEL, OF_PROCESSES, OF_SHARED_WEIGHTS
from offload.plan.machine.machine import named_machine

PROBED = "objective.method=classify model.num_classes=2 data.too_long=drop"
PLACES = ("offload.embeddings", "offload.head")
BOTH = "`offload.embeddings: device` with `offload.head: device`"
STEP = "train.seq_len=64 train.tokens_per_step=192"

CHOOSING = ", with layers that choose tokens for others"
# A model, settings, GPUs of a card (0: a CPU), what is wrong, and what to write instead.
CASES = (
    (
        "qwen3-8b",
        "model.layer_kernels=fused",
        0,
        "model.layer_kernels is fused and the device is cpu",
        "`model.layer_kernels: auto`",
    ),
    (
        "qwen3-8b",
        "image.max_tokens=512",
        1,
        "image.max_tokens is 512 and the number of towers for images is 0",
        "`image.max_tokens: null`",
    ),
    (
        "tiny-qwen3-moe",
        "model.experts_implementation=triton",
        0,
        "model.experts_implementation is triton and the device is cpu",
        "`model.experts_implementation: auto`",
    ),
    (
        "qwen3-8b",
        "model.experts_implementation=grouped_mm",
        1,
        "model.experts_implementation is grouped_mm and the model is dense",
        "`model.experts_implementation: auto`",
    ),
    (
        "qwen3-8b",
        "train.router_loss_coef=0.01",
        1,
        "train.router_loss_coef is 0.01 and the model is dense",
        "`train.router_loss_coef: null`",
    ),
    (
        "qwen3-30b-a3b",
        "offload.mlp_chunk=512",
        1,
        "offload.mlp_chunk is 512 and each MLP is a mixture of experts",
        "`offload.mlp_chunk: auto`",
    ),
    (
        "qwen3-30b-a3b",
        "offload.codec=mxfp4",
        1,
        "offload.codec is mxfp4 and the form of the published weights is plain",
        "`offload.codec: auto`",
    ),
    *(
        (model, words, 1, f"{field} is host and the {what} is for the device alone: {why}", hint)
        for model, words, field, what, why, hint in (
            (
                "qwen3-8b",
                "train.what=all offload.embeddings=host",
                "offload.embeddings",
                "embedding",
                "it trains",
                "`offload.embeddings: device`",
            ),
            (
                "qwen3-8b",
                "train.what=all offload.head=host",
                "offload.head",
                "head",
                "it trains",
                "`offload.head: device`",
            ),
            (
                "qwen3-0.6b",
                "train.what=all offload.embeddings=host offload.head=host",
                "offload.embeddings",
                "embedding",
                "it trains",
                BOTH,
            ),
            (
                "qwen3-0.6b",
                "adapter.modules_to_save=[embed_tokens] offload.head=host",
                "offload.head",
                "head",
                "the embedding has the same weight: it trains",
                BOTH,
            ),
            (
                "qwen3-0.6b",
                "adapter.method=prompt offload.head=host",
                "offload.head",
                "head",
                "the embedding has the same weight: virtual tokens train, which it looks up",
                BOTH,
            ),
        )
    ),
    *(
        (
            "qwen3-0.6b",
            f"{here}=host {there}=device",
            1,
            f"{here} is host and {there} is device",
            f"`{there}: host`, or `{here}: device`",
        )
        for here, there in (PLACES, PLACES[::-1])
    ),
    (
        "qwen3-8b",
        "offload.kept_graphs=99",
        1,
        "offload.kept_graphs: 99 for a model of 36 layers",
        "`offload.kept_graphs: all`",
    ),
    (
        "tiny-qwen3",
        "train.seq_len=100000",
        1,
        "train.seq_len: 100000 for a qwen3 model",
        "`train.seq_len: 40960`",
    ),
    (
        "qwen3-8b",
        "train.parallel=fsdp2",
        1,
        "train.parallel is fsdp2 and the number of processes is 1",
        "`--gpus 2`, or `train.parallel: stream`",
    ),
    (
        "qwen3-8b",
        f"{PROBED} train.probe_steps=9",
        2,
        "train.probe_steps is 9 and the number of processes is 2",
        "`--gpus 1`, or `train.probe_steps: null`",
    ),
    (
        "qwen3-8b",
        f"{PROBED} train.what=head",
        2,
        "train.what is head and the number of processes is 2",
        "`--gpus 1`, or `train.what: adapter`",
    ),
    *(
        (
            "qwen3-8b",
            f"train.what={what} train.parallel={parallel}",
            2,
            f"train.what is {shown} and the number of processes is 2",
            "`train.parallel: fsdp2`, or `--gpus 1`",
        )
        for what, shown, parallel in (
            ("all", "all", "stream"),
            ("[model.layers.*]", "model.layers.*", "stream"),
        )
    ),
    (
        f"qwen3-8b{CHOOSING}",
        "train.compile=true",
        1,
        "train.compile is true and what layers read of others is more than keys and values",
        "`train.compile: false`",
    ),
    (
        "qwen3-8b",
        STEP,
        4,
        "a step of 3 micro-batches for 4 processes",
        "`train.tokens_per_step: 256`, or `--gpus 3`",
    ),
    (
        "qwen3-8b",
        "train.shares=[3,1]",
        1,
        "train.shares: [3, 1], with 1 process",
        "`train.shares: auto`, or `--gpus 2`",
    ),
)


def plan_for(model: str, words: str, num_gpus: int) -> None:
    """Go as far as the requests of a plan."""
    subject = subject_of(model.removesuffix(CHOOSING), words.split())
    if model.endswith(CHOOSING):
        subject = replace(subject, facts=replace(subject.facts, num_carried_indices=1))
    card = named_machine("rtx4090", dtype=subject.recipe.model.dtype)
    machine = card if num_gpus else replace(card, device="cpu")
    num = max(1, num_gpus)
    require_gpus(subject.recipe.train, machine, num_gpus=num, setting=GPUS)
    with_backend(subject.recipe, subject.facts, machine)
    full_requests(subject.recipe, subject.facts, num_ranks=num)


@pytest.mark.parametrize(("model", "words", "num_gpus", "what", "hint"), CASES)
def test_what_a_plan_cannot_have_is_named_with_its_fix(
    model: str, words: str, num_gpus: int, what: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(model, words, num_gpus)
    assert (caught.value.what, caught.value.hint.replace("--num_processes", GPUS)) == (what, hint)
    assert caught.value.limit


@pytest.mark.parametrize(
    ("model", "words", "num_gpus"),
    [
        ("qwen3-8b", "offload.mlp_chunk=512", 1),
        ("qwen3-8b", STEP, 3),
        ("qwen3-8b", "train.what=all", 1),
        ("qwen3-8b", "train.what=all train.parallel=fsdp2", 2),
        ("qwen3-8b", "train.parallel=fsdp2", 2),
        ("tiny-qwen3-moe", "train.router_loss_coef=0.01", 0),
        ("gpt-oss-20b", "offload.codec=mxfp4", 1),
    ],
)
def test_what_a_plan_can_have_is_taken(model: str, words: str, num_gpus: int) -> None:
    plan_for(model, words, num_gpus)


def test_each_row_has_a_case() -> None:
    found = [(what, hint) for *_, what, hint in CASES]
    for row in (*OF_MODEL, *OF_PROCESSES, *OF_SHARED_WEIGHTS):
        hint = row.hint.format(option=GPUS) or row.fix
        assert any(
            what.startswith(row.field) and f" and {row.other} is " in what and hint in said
            for what, said in found
        ), row


def test_several_gpus_of_a_machine_without_one_are_refused() -> None:
    train = subject_of("tiny-qwen3-moe", []).recipe.train
    cpu = replace(named_machine("rtx3060"), device="cpu", name="a processor")
    require_gpus(train, cpu, num_gpus=1, setting=GPUS)
    with pytest.raises(ConfigError, match="2 GPUs, but a processor is a CPU") as caught:
        require_gpus(train, cpu, num_gpus=2, setting=GPUS)
    assert caught.value.hint == f"`{GPUS} 1`, or a named card"
