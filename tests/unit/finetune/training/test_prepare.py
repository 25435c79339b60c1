"""How processes share a step is settled once the machine is known, and said."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from finetune.planning.subject import subject_of
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from finetune.training.prepare import with_way
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, named_machine, with_interconnect


class EightRanks(Ranks):
    num = 8


CARDS = with_interconnect(named_machine("h100"), "nvlink", world_size=8)


def way_of(
    *overrides: str, ranks: Ranks, machine: Machine = CARDS, model: str = "qwen3-8b"
) -> tuple[str, str]:
    subject, shown = subject_of(model, overrides), io.StringIO()
    run = Run(
        recipe=subject.recipe,
        dir=RunDir(Path("none")),
        ranks=ranks,
        device=torch.device("cpu"),
        screen=Screen(Console(file=shown, width=400), is_verbose=False),
        is_resumed=False,
    )
    return with_way(run, subject.facts, machine).train.parallel, shown.getvalue()


AUTO = "train.parallel=auto"


def test_what_is_left_open_is_what_the_plan_says_is_faster_and_why() -> None:
    way, shown = way_of(AUTO, "train.what=all", ranks=EightRanks())
    assert way == "fsdp2"
    assert "train.parallel: fsdp2: stream is not possible, train.what: all" in shown
    little = replace(CARDS, ram_bytes=144 * GIB)
    with pytest.raises(DoesNotFitError, match="sharded over 8 ranks the plan needs"):
        way_of(AUTO, "train.what=all", ranks=EightRanks(), machine=little)
    way, shown = way_of(AUTO, ranks=EightRanks(), machine=replace(CARDS, vram_bytes=6 * GIB))
    assert way == "stream"
    assert "train.parallel: stream: fsdp2 is not possible" in shown
    assert way_of(AUTO, ranks=Ranks()) == ("stream", "")
    assert way_of("train.parallel=stream", ranks=EightRanks()) == ("stream", "")
    assert way_of("train.parallel=fsdp2", ranks=EightRanks()) == ("fsdp2", "")


def test_processes_on_a_cpu_stream_unless_they_are_told_otherwise(desk: Machine) -> None:
    assert way_of(AUTO, ranks=EightRanks(), machine=desk) == ("stream", "")
    large = replace(desk, ram_bytes=512 * GIB)
    assert way_of(AUTO, "train.what=all", ranks=EightRanks(), machine=large)[0] == "fsdp2"


@pytest.fixture
def desk() -> Machine:
    return replace(named_machine("h100"), device="cpu")
