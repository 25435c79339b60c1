"""A sweep whose runs are shared by two processes, against each run by itself and one process."""

import signal
from pathlib import Path

import pytest
import yaml

from finetune.recipe.load import load_recipe
from tests.e2e.conftest import RecipeWriter
from tests.e2e.forked import Forked, Started
from tests.e2e.runs import assert_same_training, run
from tests.e2e.sweeps import assert_same_bits, learned, states

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(write_recipe: RecipeWriter, tmp_path: Path) -> Path:
    output = {"eval_every": 2, "checkpoint_every": 1, "keep_checkpoints": 8}
    adapter = {"experts": False, "dropout": 0.2}
    return write_recipe(
        output={**output, "dir": str(tmp_path / "sweep")}, adapter=adapter, train={"steps": 4}
    )


def on_two_ranks(forked: Forked, *words: object, module: str = "finetune.app") -> str:
    """Run the program on two ranks; return what they show."""
    ranks = forked.start_ranks(*words, module=module)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    return "".join(rank.shown for rank in ranks)


def alone_on_two_ranks(forked: Forked, run_dir: Path, machine_file: Path) -> Path:
    """Train a sweep's run again, by itself; return its directory."""
    content = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    alone = run_dir.parent.parent / f"alone-{run_dir.name}"
    content["output"]["dir"] = str(alone)
    file = alone.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(content))
    on_two_ranks(forked, "finetune", file, "--machine", machine_file)
    return alone


def test_runs_of_two_ranks_are_what_each_is_alone_also_after_a_kill(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    settings = ("train.lr=0.02,0.005", "adapter.rank=2,4", "--zip")
    words = ("sweep", recipe, *settings, "--machine", machine_file)
    shown = on_two_ranks(forked, *words)
    assert shown.count("Runs by their loss") == 1
    assert shown.count("Best recipe: ") == 1
    folder, whole = tmp_path / "sweep", tmp_path / "whole"
    folder.rename(whole)
    names = list(states(whole))
    for name in names:
        assert_same_bits(whole / name, alone_on_two_ranks(forked, whole / name, machine_file))
    more = (*words, "train.steps=8")
    ranks = forked.start_ranks(*more)
    ranks[0].wait_for(lambda: (folder / names[1] / "checkpoints" / "step-0000003").exists())
    ranks[1].end(signal.SIGKILL)
    assert ranks[0].end() == 1
    assert "rank 1 is gone" in ranks[0].shown
    killed, longer = tmp_path / "killed", tmp_path / "longer"
    on_two_ranks(forked, "sweep", folder, "--resume", "--machine", machine_file)
    folder.rename(killed)
    on_two_ranks(forked, *more)
    folder.rename(longer)
    for name in names:
        assert_same_bits(killed / name, longer / name)
    assert run(*more) == 0
    for name in names:
        assert_same_training(longer / name, folder / name)


def test_a_run_leaves_on_both_ranks_and_the_others_go_on(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    """One has no room on its disk, one diverges, and one is worse than the best."""
    settings = ("train.optimizer=sgd", "train.max_grad_norm=null", "train.steps=4")
    grid = ("adapter.alpha=8,16,1e12", "stop.worse_than_best_by=1e9", "stop.after_steps=2")
    ranks = forked.start_ranks(
        *("alpha-16", "sweep", recipe, *settings, *grid, "--machine", machine_file),
        module="tests.e2e.full_disk",
    )
    assert [rank.end() for rank in ranks] == [1, 1], [rank.shown for rank in ranks]
    folder = tmp_path / "sweep"
    found = states(folder)
    assert [one["status"] for one in found.values()] == ["finished", "failed", "failed"]
    assert "No space left on device" in str(found["alpha-16"]["why"])
    assert "must be finite" in str(found["alpha-1e12"]["why"])
    shown = "".join(rank.shown for rank in ranks)
    assert shown.count("alpha-16 has left") == 1
    assert len(learned(folder / "alpha-8")) == 4
    assert (folder / "alpha-8" / "adapter").exists()


def test_a_rule_stops_a_run_on_both_ranks(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    rule = ("stop.worse_than_best_by=0.0", "stop.after_steps=2")
    words = ("sweep", recipe, "train.lr=0.02,1e-6", *rule, "--machine", machine_file)
    shown = on_two_ranks(forked, *words)
    found = states(tmp_path / "sweep")
    assert [one["status"] for one in found.values()] == ["finished", "stopped"]
    assert found["lr-1e-6"]["steps"] == 2
    assert shown.count("lr-1e-6: stopped after step 2") == 1


def test_runs_of_unlike_ranks_are_what_one_process_trains(
    recipe: Path, machine_file: Path, slow_file: Path, tmp_path: Path, forked: Forked
) -> None:
    """A rank has two thirds of each run's micro-batches: as named, and since its card is faster.

    With named shares each run also has the bits that it has alone.
    """
    settings = ("train.lr=0.02,0.005", "adapter.rank=2,4", "--zip")
    words = ("sweep", recipe, "train.grad_accum_steps=6", *settings)
    folder, by_name, by_card = (tmp_path / name for name in ("sweep", "by name", "by card"))
    shown = on_two_ranks(forked, *words, "train.shares=[2,1]", "--machine", machine_file)
    assert shown.count("Best recipe: ") == 1
    folder.rename(by_name)
    more = {rank: ["--machine", file] for rank, file in enumerate((machine_file, slow_file))}
    ranks = forked.start_machines(*words, sizes=(1, 1), more=more)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    folder.rename(by_card)
    assert run(*words, "--machine", machine_file) == 0
    names = list(states(folder))
    assert len(names) == 2
    for name in names:
        assert load_recipe(str(by_card / name / "recipe.yaml"), []).train.shares == (4, 2)
        assert_same_training(by_name / name, folder / name)
        assert_same_training(by_card / name, folder / name)
        assert_same_bits(by_name / name, alone_on_two_ranks(forked, by_name / name, machine_file))


def test_a_sweep_of_two_machines_is_resumed_by_what_the_first_has(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    settings = ("train.lr=0.02,0.005", "adapter.rank=2,4", "--zip", "train.steps=8")
    words = ("sweep", recipe, *settings, "--machine", machine_file)
    caches = {rank: {"XDG_CACHE_HOME": str(tmp_path / f"cache-{rank}")} for rank in range(2)}
    other = tmp_path / "of the other"

    def on_two_machines(*words: object, more: dict[int, list[object]]) -> list[Started]:
        return forked.start_machines(*words, sizes=(1, 1), more=more, variables=caches)

    places: dict[int, list[object]] = {1: [f"output.dir={other}"]}
    whole = on_two_machines(*words, more=places)
    assert [rank.end() for rank in whole] == [0, 0], [rank.shown for rank in whole]
    folder = tmp_path / "sweep"
    folder.rename(tmp_path / "whole")
    ranks = on_two_machines(*words, more=places)
    names = list(states(tmp_path / "whole"))
    ranks[0].wait_for(lambda: (folder / names[1] / "checkpoints" / "step-0000003").exists())
    ranks[1].end(signal.SIGKILL)
    assert ranks[0].end() == 1
    again = on_two_machines(
        *("sweep", "--resume", "--machine", machine_file), more={0: [folder], 1: [other]}
    )
    assert [rank.end() for rank in again] == [0, 0], [rank.shown for rank in again]
    assert not other.exists()
    for name in names:
        assert_same_bits(folder / name, tmp_path / "whole" / name)
