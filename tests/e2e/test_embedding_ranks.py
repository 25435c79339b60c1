"""An input embedding that trains in RAM: the processes of a machine have it and update it once."""

import json
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import EMBEDDING_GRADIENTS, EMBEDDINGS
from tests.e2e.broken_rank import FAILS_AT, REVERSED
from tests.e2e.full_runs import assert_same_runs, checkpoint, full_recipe, weights
from tests.e2e.runs import losses, rows_of, run
from tests.e2e.two_ranks import (
    REORDER,
    assert_as_one,
    plain_run,
    six_rows,
    six_rows_as_tokens,
    start_two,
)

ON_HOST = "offload.embeddings=host"
TOKENS = "model.embed_tokens.weight"


def assert_same_checkpoints(one: Path, other: Path, step: int) -> None:
    found, expected = checkpoint(one, step), checkpoint(other, step)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def computing_in(dtype: str, machine_file: Path, folder: Path) -> Path:
    """Return the file of a machine of this type."""
    here = folder / "here.json"
    here.write_text(replace(Machine.from_json(machine_file.read_text()), dtype=dtype).to_json())
    return here


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["fp32", "bf16"])
def test_two_ranks_train_it_as_plain_pytorch_does(
    sent, tmp_path, write_recipe, machine_file, model_dir, forked
) -> None:
    """Each step has all six rows, so that the reference needs no order of rows."""
    recipe = full_recipe(
        write_recipe, optimizer="sgd", schedule="constant", warmup_steps=0, lr=0.01
    )
    words = ("finetune", recipe, "--machine", machine_file, f"data.path={six_rows(tmp_path)}")
    start_two(
        forked,
        *(*words, ON_HOST, "data.eval_frac=null", "output.eval_every=null"),
        f"train.reduce_dtype={sent}",
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain_losses, plain_norms = plain_run(model, six_rows_as_tokens(model_dir), optimizer)
    ours, rounded = rows_of(tmp_path / "run"), sent == "bf16"
    assert [row["loss"] for row in ours] == pytest.approx(plain_losses, rel=REORDER)
    norms_apart = 1e-3 if rounded else REORDER
    assert [row["grad_norm"] for row in ours] == pytest.approx(plain_norms, rel=norms_apart)
    assert min(plain_norms) > 0.5  # clipping is active
    found = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        trained = parameter.detach()
        error, change = (found[name] - trained).norm(), (trained - before[name]).norm()
        assert error <= (2**-6 * change if rounded else REORDER * trained.norm()), name
    table = weights(tmp_path / "run")[TOKENS] - before[TOKENS]
    assert 10 < int(table.any(dim=1).sum()) < len(table)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "train"),
    [
        ("float32", {"optimizer": "adamw"}),
        ("bfloat16", {"optimizer": "adamw"}),
        ("float16", {"optimizer": "lion"}),
        ("float32", {"optimizer": "sgd", "shares": [2, 1], "what": ["*embed_tokens*", "*.mlp.*"]}),
    ],
    ids=["float32", "bfloat16", "float16", "shares"],
)
def test_move_two_ranks_train_it_to_the_bit_as_on_their_devices(
    dtype, train, tmp_path, write_recipe, machine_file, forked
) -> None:
    """Each rank adds up its micro-batches in order, and the owner the ranks, in either place.

    A rank that has no token of a row adds zeros to it on the device, and nothing in RAM.
    """
    recipe = full_recipe(write_recipe, dtype=dtype, **train)
    words = ("finetune", recipe, "--machine", computing_in(dtype, machine_file, tmp_path))
    host, device, slow = (tmp_path / name for name in ("host", "device", "slow"))
    start_two(forked, *words, ON_HOST, f"output.dir={host}")
    start_two(forked, *words, "offload.embeddings=device", f"output.dir={device}")
    assert_same_runs(host, device)
    for ours, theirs in zip(rows_of(host), rows_of(device), strict=True):
        for name in ("grad_norm", "eval_loss"):
            assert ours.get(name) == theirs.get(name)
    assert_same_checkpoints(host, device, 6)
    start_two(
        forked,
        *("slow", *words, ON_HOST, f"output.dir={slow}", "output.eval_every=null"),
        module="tests.e2e.broken_rank",
    )
    assert_same_runs(slow, host)
    assert_same_checkpoints(slow, host, 6)


@pytest.mark.slow
def test_move_either_rank_may_be_its_owner(tmp_path, write_recipe, machine_file, forked) -> None:
    """The second rank updates it here, in memory that the first one has made and fills."""
    recipe = full_recipe(write_recipe, optimizer="adamw")
    words = ("finetune", recipe, "--machine", machine_file)
    host, device = tmp_path / "host", tmp_path / "device"
    start_two(forked, *words, "offload.embeddings=device", f"output.dir={device}")
    other = (REVERSED, *words, ON_HOST, f"output.dir={host}")
    start_two(forked, *other, module="tests.e2e.broken_rank")
    assert_same_runs(host, device)
    shutil.rmtree(host / "checkpoints" / "step-0000006")
    start_two(forked, *other, "--resume", module="tests.e2e.broken_rank")
    assert_same_runs(host, device)
    assert_same_checkpoints(host, device, 6)


@pytest.mark.slow
def test_it_is_there_once_its_sums_with_one_rank_and_rows_alone_cross(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, optimizer="adamw")
    words = ("finetune", recipe, "--machine", machine_file, ON_HOST)
    start_two(forked, *words)
    measured, predicted = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("measured", "predicted")
    )
    terms = {term["name"]: term["num_bytes"] for term in measured["memory"] if term["is_on_host"]}
    planned = predicted["calibrated"]["predicted"]
    in_ram, table = planned["host_memory"], weights(tmp_path / "run")[TOKENS]
    assert terms[EMBEDDINGS] == in_ram[EMBEDDINGS] == table.nbytes
    assert 0 < terms[EMBEDDING_GRADIENTS] <= in_ram[EMBEDDING_GRADIENTS]
    ops = measured["timeline"]
    (summed,) = [op for op in ops if op["kind"] == "reduce_rows"]
    assert summed["lane"] == "network"
    width = table.shape[1]
    rows = [op["num_bytes"] // (4 * width) for op in ops if op["kind"] == "row_gradients"]
    num_rows = (summed["num_bytes"] - 8) / (8 + 4 * width)
    assert max(rows) <= num_rows <= sum(rows)
    assert num_rows < len(table)
    last = max(op["end_s"] for op in ops if op["kind"] == "add_rows")
    assert summed["start_s"] >= last


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_ends_the_other_and_the_run_resumes_to_the_bit(
    seed, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe, whole = full_recipe(write_recipe, dtype="bfloat16", steps=16), tmp_path / "whole"
    machine = computing_in("bfloat16", machine_file, tmp_path)
    words = ("finetune", recipe, "--machine", machine, ON_HOST)
    start_two(forked, *words, f"output.dir={whole}")
    metrics, chance = tmp_path / "run" / "metrics.jsonl", random.Random(seed)
    ranks = forked.start_ranks(*words)
    killed, other = ranks[seed], ranks[1 - seed]
    goal = chance.randrange(2, 6)
    other.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= goal)
    time.sleep(chance.random() * 0.1)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    killed_s = time.monotonic()
    assert other.end() == 1
    assert time.monotonic() - killed_s < 40
    assert f"rank {seed} is gone or does not answer" in " ".join(other.shown.split()), other.shown
    start_two(forked, *words, "--resume")
    assert_same_runs(tmp_path / "run", whole)
    assert_same_checkpoints(tmp_path / "run", whole, 16)


@pytest.mark.slow
def test_one_process_resumes_what_two_began_and_the_other_way_round(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, optimizer="adamw")
    words, begun = ("finetune", recipe, "--machine", machine_file, ON_HOST), {}
    for name in ("one", "two"):
        begun[name] = (*words, f"output.dir={tmp_path / name}")
    assert run(*begun["one"]) == 0
    start_two(forked, *begun["two"])
    shutil.copytree(tmp_path / "one", tmp_path / "whole")
    for name in ("one", "two"):
        (last,) = (tmp_path / name / "checkpoints").glob("step-*6")
        shutil.rmtree(last)
        shutil.rmtree(tmp_path / name / "model")
    assert run(*begun["two"], "--resume") == 0
    start_two(forked, *begun["one"], "--resume")
    for name in ("one", "two"):
        assert checkpoint(tmp_path / name, 6).keys() == checkpoint(tmp_path / "whole", 6).keys()
        assert_as_one(tmp_path / name, tmp_path / "whole", apart=0.02)
        close = zip(losses(tmp_path / name), losses(tmp_path / "whole"), strict=True)
        assert all(a == pytest.approx(b, rel=1e-4) for a, b in close)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_machines_have_it_each_and_the_same_rows(
    sizes, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, optimizer="sgd")
    words = ("finetune", recipe, "--machine", machine_file, ON_HOST)
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    more = {rank: [f"output.dir={tmp_path / 'none'}"] for rank in range(sizes[0], sum(sizes))}
    ranks = forked.start_machines(*words, sizes=sizes, more=more)
    assert [rank.end() for rank in ranks] == [0] * len(ranks), [rank.shown for rank in ranks]
    assert_as_one(tmp_path / "run", tmp_path / "one")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000006")
    ranks = forked.start_machines(*words, "--resume", sizes=sizes, more=more)
    assert [rank.end() for rank in ranks] == [0] * len(ranks), [rank.shown for rank in ranks]
    assert_same_checkpoints(tmp_path / "run", tmp_path / "whole", 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause", "limit_s"),
    [
        ("named in adding rows", "(rank 1): a copy failed", 20),
        ("killed in adding rows", "rank 1 is gone or does not answer", 40),
        ("hangs in adding rows", "rank 1 is gone or does not answer: others have waited", 40),
        ("killed in updating rows (rank 0)", "rank 0 is gone or does not answer", 40),
        ("hangs in updating rows (rank 0)", "rank 0 is gone or does not answer: others have", 40),
        ("named in updating rows (rank 0)", "(rank 0): a copy failed", 20),
    ],
)
def test_a_rank_that_fails_at_its_rows_ends_the_other_with_the_cause(
    kind, cause, limit_s, tmp_path, write_recipe, machine_file, forked
) -> None:
    """Rank 0 is the owner, for whose update the other one waits."""
    recipe = full_recipe(write_recipe)
    often = ("output.eval_every=null", "output.checkpoint_every=2")
    words = ("finetune", recipe, "--machine", machine_file, ON_HOST, *often)
    ranks = forked.start_ranks(kind, *words, module="tests.e2e.broken_rank")
    failing, other = reversed(ranks) if not kind.endswith("(rank 0)") else ranks
    assert other.end() == 1
    ended_s = time.monotonic()
    assert failing.end(signal.SIGKILL if kind.startswith("hangs") else None) != 0
    assert FAILS_AT in failing.shown, (failing.shown, other.shown)
    failed_s = float(failing.shown.partition(FAILS_AT)[2].split()[0])
    assert ended_s - failed_s < limit_s
    assert cause in " ".join((failing.shown + other.shown).split()), (failing.shown, other.shown)
    start_two(forked, *words, "--resume")
    start_two(forked, *words, f"output.dir={tmp_path / 'whole'}")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
