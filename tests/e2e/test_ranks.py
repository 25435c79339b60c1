"""Runs of several processes on this machine, against one process on the same rows."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.recipe.load import load_recipe
from finetune.training.process_group import LEAST_STEP_S
from offload.plan.machine.machine import Machine
from tests.e2e.conftest import RecipeWriter
from tests.e2e.faults import SECTIONS
from tests.e2e.forked import Forked, Started
from tests.e2e.full_runs import weights
from tests.e2e.ranks import accelerate_launch, output, torchrun
from tests.e2e.runs import (
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    adapter,
    assert_same_training,
    losses,
    rows_of,
    run,
)
from tests.e2e.sweeps import assert_same_bits, learned, states

DROPOUT = {"experts": False, "dropout": 0.2}


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def has_steps(run_dir: Path, number: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= number


# ------------------------------------------------------------------------------------------- words


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    ["sums", "main_first", "one_run_fails", "one_fails", "both_fail", "one_hangs"],
)
def test_two_ranks_talk(scene: str, forked) -> None:
    ranks = forked.start_ranks(scene, module="tests.e2e.scenes")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    if scene == "one_fails":
        silent_s, speaker_s = (float(rank.shown.split()[-1]) for rank in ranks)
        assert silent_s > speaker_s
    if scene == "both_fail":
        assert sum(rank.shown.count("shown") for rank in ranks) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_ranks_add_up_in_their_order(sizes, forked) -> None:
    ranks = forked.start_machines("sums_in_order", sizes=sizes, module="tests.e2e.scenes")
    assert [rank.end() for rank in ranks] == [0] * sum(sizes), [rank.shown for rank in ranks]


# ---------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path, write_recipe, machine_file, forked) -> None:
    # 3 micro-batches: one rank has two of them, the other one; a router loss over all three
    recipe = write_recipe(adapter=DROPOUT, output={"eval_every": 3})
    words = ("finetune", recipe, "--machine", machine_file, "train.router_loss_coef=0.5")
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    shown = "".join(rank.shown for rank in ranks)
    assert_same_training(tmp_path / "two", tmp_path / "one")
    assert shown.count("Adapter: ") == 1
    assert "Plan for 2 x " in shown
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "on"])
def test_two_ranks_share_a_last_step_of_few_rows(
    packing, tmp_path, write_recipe, machine_file, forked
) -> None:
    # 36 rows in steps of 17: the last has two, one for each rank
    train = {"steps": None, "epochs": 1, "micro_batch_size": 1, "grad_accum_steps": 17, "lr": 1e-3}
    recipe = write_recipe(train=train, data={"packing": packing})
    words = ("finetune", recipe, "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "two", tmp_path / "one")
    assert len(losses(tmp_path / "two")) == 3
    odd = forked.start_ranks(*words, f"output.dir={tmp_path / 'odd'}", "data.max_rows=39")
    assert [rank.end() for rank in odd] == [1, 1]
    shown = " ".join("".join(rank.shown for rank in odd).split())
    assert "the last of 3 steps has 1 row of the last epoch" in shown
    assert "each of 2 processes needs a row of every step" in shown
    assert "`train.steps: 2` in place of `train.epochs` leaves it out" in shown


@pytest.mark.slow
def test_gradients_have_the_same_bits_whichever_rank_is_slow(
    tmp_path, write_recipe, machine_file, forked, capsys
) -> None:
    # the front, the norm and the head train too, and belong to no layer
    adapter_section = {"experts": False, "modules_to_save": ["norms", "embed_tokens"]}
    words = ("finetune", write_recipe(adapter=adapter_section), "--machine", machine_file)
    settings = {
        "fp32": "train.reduce_dtype=fp32",
        "bf16": "train.reduce_dtype=bf16",
        "slow": "train.reduce_dtype=fp32",  # on rank 1
    }
    runs = {name: tmp_path / name for name in settings}
    for name, run_dir in runs.items():
        is_slow = name == "slow"
        ranks = forked.start_ranks(
            *([name] if is_slow else []),
            *(*words, settings[name], f"output.dir={run_dir}"),
            module="tests.e2e.broken_rank" if is_slow else "finetune.app",
        )
        assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    other, slow = adapter(runs["fp32"]), adapter(runs["slow"])
    assert learned(runs["slow"]) == learned(runs["fp32"])
    assert slow.keys() == other.keys()
    assert all(torch.equal(slow[key], other[key]) for key in other)
    rounded = adapter(runs["bf16"])
    assert any(not torch.equal(rounded[name], other[name]) for name in other)
    close = zip(losses(runs["bf16"]), losses(runs["fp32"]), strict=True)
    assert all(abs(a - b) < 0.01 * b for a, b in close)
    ops = json.loads((runs["fp32"] / "measured.json").read_text())["timeline"]
    sums = [op["layer"] for op in ops if op["lane"] == "network"]
    assert sums == [*reversed(range(max(s for s in sums if s is not None) + 1)), None]
    assert run(*words, settings["bf16"], f"output.dir={tmp_path / 'alone'}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train.reduce_dtype: bf16 has no effect: there is one process" in shown


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_stops_both_ranks_at_one_step_and_one_process_resumes(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        train={"steps": 24, "schedule": "constant", "lr": 0.001},
        adapter=DROPOUT,
        output={"checkpoint_every": 1000},
    )
    words = ("finetune", recipe, "--machine", machine_file)
    run_dir = tmp_path / "run"
    launched = accelerate_launch("cli.py", *words)
    wait_for(lambda: has_steps(run_dir, 3))
    launched.send_signal(signal.SIGINT)
    shown = output(launched)
    assert launched.returncode != 0
    assert shown.count("continue with `sluice finetune ") == 1
    done = len(losses(run_dir))
    assert 3 <= done < 24
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{done:07d}"]
    assert run(*words, "--resume") == 0
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(run_dir, tmp_path / "one")


@pytest.mark.slow
def test_two_ranks_resume_what_one_process_has_begun(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file)
    assert run(*words) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*6")
    last.rename(tmp_path / "the last checkpoint")
    shutil.rmtree(tmp_path / "run" / "adapter")
    ranks = forked.start_ranks(*words, "--resume")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert (tmp_path / "run" / "checkpoints" / last.name).is_dir()
    assert_same_training(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_two_ranks_measure_the_network_and_one_writes_it(tmp_path, cache, forked) -> None:
    file = tmp_path / "here.json"
    words = ("--dtype", "float32", "--save", file, "--anyway")  # each rank disturbs the other
    ranks = forked.start_ranks("probe", *words)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    network = Machine.from_json(file.read_text()).network
    assert network is not None
    assert network.world_size == 2
    assert network.latency_s.source == network.bytes_per_s.source == "measured"
    assert "network, 2 ranks: bytes_per_s" in ranks[0].shown
    assert "Measuring" not in ranks[1].shown


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.slow
def test_two_ranks_have_one_slab_and_a_killed_one_ends_the_other_with_an_error(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(train={"steps": 5000, "schedule": "constant"})
    ranks = forked.start_ranks("finetune", recipe, "--machine", machine_file)
    ranks[0].wait_for(lambda: has_steps(tmp_path / "run", 2))
    filled, opened = (slab_mappings(rank.pid) for rank in ranks)
    assert [access for access, _ in filled] == ["rw-s"]
    assert [access for access, _ in opened] == ["r--s"]
    assert filled[0][1] == opened[0][1]
    ranks[1].end(signal.SIGKILL)
    assert ranks[0].end() == 1
    survivor = ranks[0].shown
    assert "error (rank 0): rank 1 is gone or does not answer: " in survivor
    assert "hint: see what the others and the launcher show; `--resume`" in survivor
    assert "Traceback" not in survivor


def slab_mappings(pid: int) -> list[tuple[str, str]]:
    """Return access and inode of each mapping of a slab."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    words = [line.split() for line in lines if "sluice-slab" in line]
    return [(access, inode) for _, access, _, _, inode, *_ in words]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_rank_ends_the_launch_which_names_it(tmp_path, write_recipe, machine_file) -> None:
    recipe = write_recipe(train={"steps": 5000, "schedule": "constant"})
    launched = accelerate_launch("cli.py", "finetune", recipe, "--machine", machine_file)
    wait_for(lambda: has_steps(tmp_path / "run", 2))
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    victim = next(
        int(child)
        for child in children
        if b"RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    shown = output(launched)
    assert launched.returncode != 0
    assert "Signal 9 (SIGKILL) received" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("named", "error (rank 1): a copy failed; every copy must complete"),
        pytest.param(
            "memory",
            "error (rank 1): rank 1 ran out of device memory in a step",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("bug", "KeyError: 'layer'", marks=pytest.mark.exhaustive),
        # rank 0 is ahead, and waits for the sum of the layer
        ("late in a visit", "error (rank 1): a copy failed; every copy must complete"),
    ],
)
def test_a_rank_that_fails_in_a_visit_shows_why_and_ends_the_other(
    kind, what, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(train={"steps": 5000, "schedule": "constant"})
    words = (kind, "finetune", recipe, "--machine", machine_file)
    quiet, speaker = forked.start_ranks(*words, module="tests.e2e.broken_rank")
    assert [quiet.end(), speaker.end()] == [1, 1]
    assert what in speaker.shown
    assert "error" not in quiet.shown
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.slow
def test_an_error_of_all_ranks_is_shown_once(
    finished: Path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(adapter={"init_from": str(finished), "rank": 3})  # its own has 4
    ranks = forked.start_ranks("finetune", recipe, "--machine", machine_file)
    assert [rank.end() for rank in ranks] == [1, 1]
    shown = "".join(rank.shown for rank in ranks)
    assert shown.count("\nhint: ") == 1
    assert " ".join(shown.split()).count("it has shape (3, 32) here") == 1


@pytest.mark.slow
def test_ranks_with_other_rows_are_refused(
    tmp_path, write_recipe, machine_file, rows_file, forked
) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:-4]))
    words = ("finetune", write_recipe(), "--machine", machine_file)
    ranks = forked.start_ranks(*words, of_rank_1=[f"data.path={fewer}"])
    assert [rank.end() for rank in ranks] == [1, 1]
    shown = "".join(rank.shown for rank in ranks)
    assert shown.count("): the training rows on rank 1 are not those on rank 0") == 1
    assert shown.count("error (rank") == 1


# ----------------------------------------------------------------------------------------- machines


ENDED_S = 30.0


@pytest.fixture
def caches(tmp_path: Path) -> dict[int, dict[str, str]]:
    """Return variables by rank of two machines with one rank each: a cache for each machine."""
    return {rank: {"XDG_CACHE_HOME": str(tmp_path / f"cache-{rank}")} for rank in range(2)}


def ended(ranks: list[Started]) -> list[int]:
    return [rank.end() for rank in ranks]


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
        assert shown.count("error (rank") == 1
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


# ------------------------------------------------------------------------------------ unequal ranks


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
    assert load_recipe(str(tmp_path / "run" / "recipe.yaml"), []).train.shares == (4, 2)
    assert "Ranks: each one's share" in ranks[0].shown
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
    assert "`train.shares: auto`, or `--num_processes 3`" in said


# -------------------------------------------------------------------------------------------- fsdp2


FSDP2 = "train.parallel=fsdp2"


def recipe_of(write_recipe: Any, *, is_full: bool = False, **output: object) -> Path:
    """Write a recipe that either engine runs: an adapter with dropout, or all weights."""
    recipe: Path = write_recipe(**SECTIONS, output={"eval_every": 3, **output})
    if is_full:
        content = yaml.safe_load(recipe.read_text())
        del content["adapter"]
        content["train"] |= {"what": "all", "lr": 0.003, "max_grad_norm": 0.5}
        recipe.write_text(yaml.safe_dump(content))
    return recipe


def card_call(run_dir: Path) -> str:
    """Return the call in the card of a run's result."""
    (card,) = (file for name in ("adapter", "model") for file in run_dir.glob(f"{name}/README.md"))
    return card.read_text().split("```python\n")[1].split("```")[0]


def assert_close_runs(one: Path, other: Path) -> None:
    """Compare losses and norms of each step (REORDER)."""
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=LOSS_TOLERANCE), name


@pytest.mark.thorough
def test_two_parts_train_as_one_stream_does(tmp_path, write_recipe, machine_file, forked) -> None:
    # 3 micro-batches: one rank has two of them, and of the held-out rows one has none
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "parts", tmp_path / "stream")


@pytest.mark.slow
def test_plain_peft_answers_with_what_two_parts_have_trained(
    tmp_path, write_recipe, machine_file, model_dir, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert adapter(tmp_path / "parts").keys() == adapter(tmp_path / "stream").keys()
    tokens, logits = torch.arange(2, 42).reshape(2, 20), []
    for name in ("parts", "stream", None):
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if name is not None:
            model = PeftModel.from_pretrained(model, tmp_path / name / "adapter")
        with torch.no_grad():
            logits.append(model.eval()(tokens).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 0.01  # it has learned something


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_either_engine_goes_on_from_a_checkpoint_of_the_other(
    is_full, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=is_full)
    words = ("finetune", recipe, "--machine", machine_file)
    parts, stream, whole = (tmp_path / name for name in ("parts", "stream", "whole"))
    ranks = forked.start_ranks(*words, f"output.dir={parts}", FSDP2)
    assert run(*words, f"output.dir={stream}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_close_runs(parts, stream)
    loading = [card_call(run_dir) for run_dir in (parts, stream)]
    assert loading[0] == loading[1]
    shutil.copytree(stream, whole)
    for run_dir in (parts, stream):  # the checkpoint before the last is of step 4
        shutil.rmtree(run_dir / "checkpoints" / "step-0000006")
    ranks = forked.start_ranks(*words, f"output.dir={stream}", "--resume", FSDP2)
    assert run(*words, f"output.dir={parts}", "--resume", "train.parallel=stream") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    for run_dir in (parts, stream):
        assert len(list(run_dir.glob("predicted*.json"))) == 2
        assert_close_runs(run_dir, whole)
        read = weights if is_full else adapter
        trained, expected = read(run_dir), read(whole)
        assert trained.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (trained[name] - tensor).norm() <= WEIGHT_TOLERANCE * tensor.norm(), name


@pytest.mark.thorough
def test_two_processes_do_not_stream_weights_that_train(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe, is_full=True), "--machine", machine_file)
    ranks = forked.start_ranks(*words)
    assert [rank.end() for rank in ranks] == [1, 1]
    shown = " ".join("".join(rank.shown for rank in ranks).split())
    assert "train.what is all and the number of processes is 2" in shown
    assert "hint: `train.parallel: fsdp2`, or `--num_processes 1`" in shown
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("checkpoints/*"))
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0


@pytest.mark.slow
def test_all_weights_in_bf16_train_in_parts_as_in_one_stream(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=True)
    here = tmp_path / "here.json"
    here.write_text(machine_file.read_text().replace('"float32"', '"bfloat16"'))
    words = ("finetune", recipe, "--machine", here, "model.dtype=bfloat16")
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "stream"), rel=1e-3)
    assert all(w.dtype is torch.bfloat16 for w in weights(tmp_path / "parts").values())


@pytest.mark.slow
def test_chosen_weights_train_in_parts_and_all_are_saved(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=True)
    words = ("finetune", recipe, "--machine", machine_file, "train.what=[last_2_layers]")
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_close_runs(tmp_path / "parts", tmp_path / "stream")
    trained, expected = weights(tmp_path / "parts"), weights(tmp_path / "stream")
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (trained[name] - tensor).norm() <= WEIGHT_TOLERANCE * tensor.norm(), name


@pytest.mark.slow
def test_a_main_rank_that_is_stopped_in_a_step_ends_the_other_with_the_cause(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file, FSDP2)
    ranks = forked.start_ranks(*words, "train.steps=2000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    ranks[0].wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4)
    ranks[0].signal(signal.SIGSTOP)
    start_s = time.monotonic()
    assert ranks[1].end() == 1
    assert time.monotonic() - start_s < LEAST_STEP_S + ENDED_S
    assert "error (rank 1): rank 0 is gone or does not answer" in ranks[1].shown
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].end() == 1
    assert "is gone or does not answer" in ranks[0].shown
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


# -------------------------------------------------------------------------------------- sweep ranks


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
