"""The plan of ranks whose cards or shares differ, by the command line."""

import json

import pytest

from tests.command import run

WORDS = ("plan", "qwen3-1.7b", "train.tokens_per_step=16384")
TWO = ("--machine", "rtx3090,rtx4060ti")


@pytest.mark.thorough
def test_each_machine_has_its_share_and_the_slowest_is_waited_for(capsys) -> None:
    assert run(*WORDS, *TWO, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["ranks"]
    assert (first["machine"], second["machine"]) == ("rtx3090", "rtx4060ti")
    num = found["schedule"]["num_micro_batches"]
    assert first["num_micro_batches"] + second["num_micro_batches"] == num
    assert first["num_micro_batches"] > second["num_micro_batches"]
    step_s = found["predicted"]["step_s"]
    waiting, slowest = sorted((first, second), key=lambda rank: rank["alone_s"])
    assert waiting["alone_s"] + waiting["waits_s"] == pytest.approx(step_s, rel=0.01)
    assert waiting["waits_for"] == found["ranks"].index(slowest)
    assert slowest["waits_for"] is None
    assert run(*WORDS, *TWO, "--json", "train.shares=equal") == 0
    equal = json.loads(capsys.readouterr().out)
    assert equal["predicted"]["step_s"] > step_s
    assert equal["energy"]["board_w"] == 350 + 165
    assert equal["energy"]["at_most_j_per_token"] * 16384 == pytest.approx(
        (350 + 165) * equal["predicted"]["step_s"]
    )


def test_gpus_of_a_machine_take_the_shares_that_are_named(capsys) -> None:
    words = ("--machine", "rtx3090", "--gpus", "2", "train.shares=[5,3]")
    assert run(*WORDS, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 micro-batches; this is the plan of rank 0, which takes 5" in shown
    assert "Ranks: each one's share, and its step before it waits for others" in shown
    assert " for rank 0" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TWO, "--gpus", "2"), "--gpus with --machine rtx3090,rtx4060ti; each of several"),
        ((*TWO, "--what-if"), "--what-if with --machine rtx3090,rtx4060ti; each of several"),
        ((*TWO, "--runs", "2"), "--machine rtx3090,rtx4060ti with several runs"),
        ((*TWO, "train.shares=[1,1,1]"), "train.shares: [1, 1, 1], with 2 processes"),
        (("--machine", "rtx3090", "train.shares=[3,1]"), "[3, 1], with 1 process; it has"),
        (("--machines", "rtx3090", "train.shares=[3,1]"), "train.shares: [3, 1] with --machines"),
        ((*TWO, "train.seq_len=16384"), "a step of 1 micro-batches for 2 processes"),
        ((*TWO, "train.shares=[2,1]"), "train.shares: [2, 1] for a step of 8 micro-batches"),
    ],
)
def test_what_several_machines_cannot_do_is_refused(
    words: tuple[str, ...], said: str, capsys
) -> None:
    assert run(*WORDS, *words) == 1
    assert said in " ".join(capsys.readouterr().err.split())
