"""Which way several GPUs share a step is taken by the plan's own arithmetic."""

from dataclasses import replace

import pytest

from finetune.errors import ConfigError
from finetune.planning.parallel import Ways, compare_ways, ways_json, ways_lines
from finetune.planning.ranks import require_ranks_for
from finetune.planning.subject import subject_of
from offload.errors import DoesNotFitError, SluiceError
from offload.plan.machine.machine import GIB, named_machine, with_interconnect


def ways_of(
    model: str, *overrides: str, card: str = "h100", between: str = "nvlink", num: int = 8
) -> Ways:
    subject = subject_of(model, overrides)
    machine = with_interconnect(named_machine(card), between, world_size=num)
    return compare_ways(subject.recipe, subject.facts, machine, num_ranks=num)


def test_where_nvlink_gathers_faster_than_the_link_loads_the_model_is_held_in_sum() -> None:
    found = ways_of("llama-3.1-70b")
    assert found.stream.plan is not None
    assert found.sharded.plan is not None
    assert found.faster is found.sharded
    assert found.sharded.plan.step_s < found.stream.plan.step_s
    assert found.reason.startswith("fsdp2: ")
    assert ways_json(found)["auto"] == "fsdp2"
    assert [line.split(": ")[1] for line in ways_lines(found)] == [
        "stream",
        "fsdp2",
        "auto takes fsdp2",
    ]


def test_over_a_slow_network_layers_are_streamed() -> None:
    found = ways_of("llama-3.1-70b", between="1")
    assert found.faster is found.stream
    assert found.reason.startswith("stream: ")


def test_weights_that_train_are_sharded_wherever_that_fits() -> None:
    found = ways_of("qwen3-8b", "train.what=[model.layers.*]")
    assert found.faster is found.sharded
    assert found.stream.why_not.startswith("train.what: ['model.layers.*'] and train.parallel: st")
    assert found.reason.startswith("fsdp2: stream is not possible, train.what: ['model.layers.*']")


@pytest.mark.parametrize(
    ("settings", "card", "num", "what", "hint"),
    [
        ((), "rtx4090", 2, r"sharded over 2 ranks the plan needs .* of 22\.68 GiB", ""),
        (
            ("train.optimizer=adafactor",),
            "h100",
            8,
            r"train\.optimizer is adafactor and train\.parallel is fsdp2",
            r"`train\.optimizer: adamw`, or ",
        ),
    ],
)
def test_what_cannot_be_sharded_of_weights_that_train_is_refused_with_the_fix(
    settings, card, num, what, hint
) -> None:
    found = ways_of("qwen3-8b", "train.what=all", *settings, card=card, between="pcie", num=num)
    one = r"`train\.parallel: stream` with one process"
    with pytest.raises(SluiceError, match=rf"{what}(.|\n)*\n\nhint: {hint}{one}"):
        _ = found.faster


def test_a_router_loss_of_weights_that_train_over_several_gpus_is_refused_with_the_fix() -> None:
    found = ways_of("qwen3-30b-a3b", "train.what=[model.layers.0.*]", "train.router_loss_coef=0.01")
    with pytest.raises(ConfigError, match=r"`train\.router_loss_coef: 0`, or `.*with one process"):
        _ = found.faster


def test_what_the_parts_cannot_do_is_streamed_and_said() -> None:
    found = ways_of("qwen3-8b", "offload.codec=nf4")
    assert found.faster is found.stream
    assert found.sharded.why_not.startswith("as offload.codec is nf4: parts of layers")


def test_where_neither_fits_the_error_is_that_of_the_stream() -> None:
    subject = subject_of("llama-3.1-70b", ())
    card = replace(named_machine("rtx4090"), vram_bytes=4 * GIB, ram_bytes=8 * GIB)
    machine = with_interconnect(card, "pcie", world_size=2)
    found = compare_ways(subject.recipe, subject.facts, machine, num_ranks=2)
    with pytest.raises(DoesNotFitError, match="slots of 80 layers"):
        _ = found.faster


def test_a_part_alone_is_refused() -> None:
    train = subject_of("qwen3-8b", ["train.parallel=fsdp2"]).recipe.train
    require_ranks_for(train, num_ranks=2)
    with pytest.raises(ConfigError, match=r"fsdp2, with one process; .*\n\nhint: `--gpus 2`, or"):
        require_ranks_for(train, num_ranks=1, setting="--gpus")
