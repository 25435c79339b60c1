"""Two real processes on a CPU, with gloo between them, against one process on the same rows."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.plan.machine.machine import Machine
from tests.e2e.ranks import accelerate_launch, output
from tests.e2e.runs import adapter, assert_same_training, losses, run
from tests.e2e.sweeps import learned

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
    assert ", shared by 2 ranks" in " ".join(shown.split())
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
    assert shown.count("continue with `--resume`") == 1
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
    ranks = forked.start_ranks("probe", "--dtype", "float32", "--save", file)
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
def test_an_error_of_all_ranks_is_shown_once(write_recipe, machine_file, forked) -> None:
    recipe = write_recipe(adapter={"dropout": 0.1})  # refused with experts, when it is added
    ranks = forked.start_ranks("finetune", recipe, "--machine", machine_file)
    assert [rank.end() for rank in ranks] == [1, 1]
    shown = "".join(rank.shown for rank in ranks)
    assert shown.count("\nhint: ") == 1
    assert shown.count("): adapter.dropout: 0.1 with adapter.experts: true") == 1


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
    assert shown.count("error") == 1
