"""Ranks of several machines, all of them this one, against one process on the same rows.

What makes two machines of one is what their launchers say. Each has a cache of its own, and those
that are not rank 0's have no run directory.
"""

import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.forked import Forked, Started
from tests.e2e.ranks import output, torchrun
from tests.e2e.runs import adapter, assert_same_training, run
from tests.e2e.sweeps import assert_same_bits, learned

DROPOUT = {"experts": False, "dropout": 0.2}
ENDED_S = 30.0


@pytest.fixture
def caches(tmp_path: Path) -> dict[int, dict[str, str]]:
    """Return variables by rank of two machines with one rank each: a cache for each machine."""
    return {rank: {"XDG_CACHE_HOME": str(tmp_path / f"cache-{rank}")} for rank in range(2)}


def ended(ranks: list[Started]) -> list[int]:
    return [rank.end() for rank in ranks]


def has_steps(run_dir: Path, number: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= number


def slabs(ranks: list[Started]) -> list[str]:
    """Return the inode of each rank's slab."""
    lines = [Path(f"/proc/{rank.pid}/maps").read_text().splitlines() for rank in ranks]
    return [next(line.split()[4] for line in one if "sluice-slab" in line) for one in lines]


# ---------------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 2), marks=pytest.mark.exhaustive)])
def test_two_machines_train_as_one_process_does_and_twice_to_the_bit(
    sizes, tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    recipe = write_recipe(adapter=DROPOUT, output={"eval_every": 3}, train={"grad_accum_steps": 5})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    variables = {
        rank: {"XDG_CACHE_HOME": str(tmp_path / f"cache-{node}")} for rank, node in enumerate(nodes)
    }
    for name in ("two", "again"):
        more = {
            rank: [f"output.dir={tmp_path / name / str(node)}"] for rank, node in enumerate(nodes)
        }
        ranks = forked.start_machines(*words, sizes=sizes, more=more, variables=variables)
        assert ended(ranks) == [0] * len(nodes), [rank.shown for rank in ranks]
        assert [path.name for path in (tmp_path / name).iterdir()] == ["0"]  # one rank writes
    assert_same_training(tmp_path / "two" / "0", tmp_path / "one")
    assert_same_bits(tmp_path / "two" / "0", tmp_path / "again" / "0")


@pytest.mark.slow
def test_each_machine_has_a_slab_and_a_killed_rank_is_named_on_all(
    tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    train = {"steps": 5000, "schedule": "constant", "grad_accum_steps": 4}
    recipe = write_recipe(train=train)
    ranks = forked.start_machines("finetune", recipe, "--machine", machine_file, sizes=(2, 2))
    ranks[0].wait_for(lambda: has_steps(tmp_path / "run", 2))
    first, second, third, fourth = slabs(ranks)
    assert first == second != third == fourth
    ranks[3].end(signal.SIGKILL)
    start_s = time.monotonic()
    assert ended(ranks[:3]) == [1, 1, 1]
    assert time.monotonic() - start_s < ENDED_S
    first, second, third = (one.shown for one in ranks[:3])
    for shown in (first + second, third):  # one rank of each machine shows it
        assert shown.count("): rank 3 (machine 1) is gone or does not answer: ") == 1
        assert shown.count("error") == 1
        assert "Traceback" not in shown


@pytest.mark.slow
def test_machines_resume_what_one_process_has_begun_without_its_directory(
    tmp_path, write_recipe, machine_file, caches, forked: Forked
) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file)
    assert run(*words) == 0
    (tmp_path / "run").rename(tmp_path / "one")
    assert run(*words, f"output.dir={tmp_path / 'two'}") == 0
    (last,) = (tmp_path / "two" / "checkpoints").glob("step-*6")
    last.rename(tmp_path / "the last checkpoint")
    more = {rank: [f"output.dir={tmp_path / name}"] for rank, name in enumerate(("two", "none"))}
    ranks = forked.start_machines(*words, "--resume", sizes=(1, 1), more=more, variables=caches)
    assert ended(ranks) == [0, 0], [rank.shown for rank in ranks]
    assert not (tmp_path / "none").exists()
    assert_same_training(tmp_path / "two", tmp_path / "one")


@pytest.mark.long
@pytest.mark.slow
def test_two_launches_restart_a_killed_rank_and_go_on_to_the_bit(
    tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    words = ("finetune", write_recipe(adapter=DROPOUT), "--machine", machine_file)
    whole = forked.start_machines(*words, f"output.dir={tmp_path / 'whole'}", sizes=(1, 1))
    assert ended(whole) == [0, 0], [rank.shown for rank in whole]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launches = [
        torchrun(
            *("-m", "tests.e2e.broken_rank", "SIGKILL", *words),
            *(f"output.dir={tmp_path / str(node)}",),
            node=node,
            port=port,
            cache=tmp_path / f"cache-{node}",
        )
        for node in range(2)
    ]
    first, second = (output(launched) for launched in launches)
    assert [launched.returncode for launched in launches] == [0, 0], first + second
    assert "rank 1 (machine 1) is gone or does not answer" in first
    assert "The launcher has started the processes again" in first
    assert "Continuing from" in first
    assert not (tmp_path / "1").exists()
    assert learned(tmp_path / "0") == learned(tmp_path / "whole")
    trained, expected = adapter(tmp_path / "0"), adapter(tmp_path / "whole")
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.slow
def test_a_rank_without_host_memory_is_named_on_all_and_the_run_goes_on_later(
    tmp_path, write_recipe, machine_file, caches, forked: Forked
) -> None:
    what = "rank 1 ran out of host memory in a step"
    words = ("finetune", write_recipe(), "--machine", machine_file)
    broken = ("host memory", *words)
    ranks = forked.start_machines(
        *broken, sizes=(1, 1), variables=caches, module="tests.e2e.broken_rank"
    )
    ranks[0].wait_for(lambda: has_steps(tmp_path / "run", 2))
    start_s = time.monotonic()
    assert ended(ranks) == [1, 1]
    assert time.monotonic() - start_s < ENDED_S
    assert f"error (rank 1): {what}" in ranks[1].shown
    assert f"error (rank 0): rank 1 has failed: {what}" in ranks[0].shown
    assert all("Traceback" not in rank.shown for rank in ranks)
    assert run(*words, "--resume") == 0


@pytest.mark.slow
def test_a_machine_without_room_for_its_store_is_named_on_all(
    tmp_path, write_recipe, machine_file, caches, forked: Forked
) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file, "offload.codec=int8")
    limits = {1: 30_000}
    ranks = forked.start_machines(*words, sizes=(1, 1), variables=caches, limits_bytes=limits)
    start_s = time.monotonic()
    assert ended(ranks) == [1, 1], [rank.shown for rank in ranks]
    assert time.monotonic() - start_s < ENDED_S
    assert "error (rank 0): rank 1 has failed: " in ranks[0].shown
    assert "error (rank 1): " in ranks[1].shown
    assert all(".store" in rank.shown for rank in ranks), [rank.shown for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("train.lr=0.5", "settings on rank 1 are not those on rank 0: train.lr: 0.02 -> 0.5;"),
        ("output.eval_every=2", "on rank 0: output.eval_every: null -> 2;"),
        ("--resume", "on rank 0: `--resume` is given to one of them;"),
        ("number", "rank 1 has WORLD_SIZE 3; by the other ranks it is WORLD_SIZE 2"),
        ("threads", "rank 1 has torch's threads 2; by the other ranks it is torch's threads 1"),
        ("place", "rank 1 has LOCAL_RANK 1; by the other ranks it is LOCAL_RANK 0"),
    ],
)
def test_machines_that_differ_end_together_and_each_says_why(
    change, what, tmp_path, write_recipe, machine_file, caches, forked: Forked
) -> None:
    more: dict[int, list[str]] = {}
    if change == "place":
        caches[1]["LOCAL_RANK"] = "1"
    elif change == "number":
        caches[1]["WORLD_SIZE"] = "3"
    elif change != "threads":
        more = {1: [change]}
    words: list[object] = ["finetune", write_recipe(), "--machine", machine_file]
    module = "finetune.app"
    if change == "threads":
        words, module = ["threads", *words], "tests.e2e.broken_rank"
    start_s = time.monotonic()
    ranks = forked.start_machines(*words, sizes=(1, 1), more=more, variables=caches, module=module)
    assert ended(ranks) == [1, 1], [rank.shown for rank in ranks]
    assert time.monotonic() - start_s < ENDED_S
    shown = [" ".join(rank.shown.split()) for rank in ranks]
    assert all(what in one for one in shown), shown
    assert not (tmp_path / "run" / "checkpoints").exists()
