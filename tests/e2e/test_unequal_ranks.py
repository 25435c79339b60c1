"""Ranks whose cards or shares differ, against one process on the same rows.

What makes two kinds of card of this machine's CPU is a machine file of another name, with half of
its rates.
"""

import shutil

import pytest

from finetune.recipe.load import load_recipe
from tests.e2e.forked import Forked
from tests.e2e.runs import assert_same_training, run
from tests.e2e.sweeps import assert_same_bits

DROPOUT = {"experts": False, "dropout": 0.2}


@pytest.mark.slow
def test_a_slow_card_gets_fewer_micro_batches_and_trains_as_one_process_does(
    tmp_path, write_recipe, machine_file, slow_file, forked: Forked
) -> None:
    """Its own updates are wrong, as if it rounded in another way: all take the main rank's."""
    train = {"grad_accum_steps": 6, "steps": 3}
    recipe = write_recipe(adapter=DROPOUT, output={"eval_every": 3}, train=train)
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={tmp_path / 'one'}") == 0
    more = {
        rank: ["--machine", file, f"output.dir={tmp_path / name}"]
        for rank, (file, name) in enumerate([(machine_file, "two"), (slow_file, "none")])
    }
    words = ("drifts", "finetune", recipe)
    ranks = forked.start_machines(*words, sizes=(1, 1), more=more, module="tests.e2e.broken_rank")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "two", tmp_path / "one")
    shares = load_recipe(str(tmp_path / "two" / "recipe.yaml"), []).train.shares
    assert shares == (4, 2), ranks[0].shown
    assert "Ranks: each one's share" in ranks[0].shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train.shares=[1,2]",),
        ("train.shares=[1,2]", "train.router_loss_coef=0.1"),
        ("train.shares=[3,1]", "data.packing=on"),
    ],
    ids=["shares", "router loss", "packed"],
)
def test_shares_of_equal_cards_train_as_one_process_does_and_twice_to_the_bit(
    words, tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    recipe = write_recipe(adapter=DROPOUT, train={"grad_accum_steps": 6})
    start = ("finetune", recipe, "--machine", machine_file)
    assert run(*start, *words[1:], f"output.dir={tmp_path / 'one'}") == 0
    for name in ("two", "again"):
        ranks = forked.start_ranks(*start, *words, f"output.dir={tmp_path / name}")
        assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "two", tmp_path / "one")
    assert_same_bits(tmp_path / "two", tmp_path / "again")


@pytest.mark.slow
def test_a_run_goes_on_with_its_shares_and_on_other_ranks_with_others(
    tmp_path, write_recipe, machine_file, slow_file, forked: Forked
) -> None:
    """The machine files are exchanged before the resume: chosen anew, the shares would be too."""
    recipe = write_recipe(train={"grad_accum_steps": 6}, adapter={"experts": False})
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={tmp_path / 'one'}") == 0
    files = (machine_file, slow_file)
    more = {rank: ["--machine", file] for rank, file in enumerate(files)}
    ranks = forked.start_machines("finetune", recipe, sizes=(1, 1), more=more)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*6")
    last.rename(tmp_path / "the last checkpoint")
    more = {rank: ["--machine", file] for rank, file in enumerate(reversed(files))}
    ranks = forked.start_machines("finetune", recipe, "--resume", sizes=(1, 1), more=more)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert "this is the plan of rank 0, which takes 4" in " ".join(ranks[0].shown.split())
    assert_same_training(tmp_path / "run", tmp_path / "one")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / last.name)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert_same_training(tmp_path / "run", tmp_path / "one")


def test_shares_of_other_processes_are_refused(write_recipe, machine_file, capsys) -> None:
    words = ("--machine", machine_file, "train.shares=[2,1,1]")
    assert run("finetune", write_recipe(), *words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "train.shares: [2, 1, 1], with 1 process; it has a number for each of several processes"
        in said
    )
    assert "`--num_processes 3`, or `train.shares: auto`" in said
