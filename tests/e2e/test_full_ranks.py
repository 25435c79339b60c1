"""All weights trained by two processes, each the owner of half of the layers, on this machine."""

import json
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.plan.machine.machine import Machine
from tests.e2e.broken_rank import FAILS_AT
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

KINDS = ("gradient", "update", "await", "reduce")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "sent"), [("sgd", "fp32"), ("adamw", "fp32"), ("sgd", "bf16"), ("adamw", "bf16")]
)
def test_two_ranks_train_as_plain_pytorch_does(
    optimizer, sent, tmp_path, write_recipe, machine_file, model_dir, forked
) -> None:
    """Each step has all six rows, so that the reference needs no order of rows.

    Gradients that are sent in bf16 are rounded twice, each time by at most 2^-9 of them.
    """
    file = six_rows(tmp_path)
    recipe = full_recipe(
        write_recipe, optimizer=optimizer, schedule="constant", warmup_steps=0, lr=0.01
    )
    words = ("finetune", recipe, "--machine", machine_file, f"data.path={file}")
    start_two(
        forked,
        *(*words, "data.eval_frac=null", "output.eval_every=null"),
        f"train.reduce_dtype={sent}",
    )
    rows = six_rows_as_tokens(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    plain = plain_run(model, rows, make(model.parameters(), lr=0.01, weight_decay=0.0))
    ours = rows_of(tmp_path / "run")
    rounded = sent == "bf16"
    losses_apart = REORDER if not rounded else 1e-6 if optimizer == "sgd" else 2e-3
    assert [row["loss"] for row in ours] == pytest.approx(plain[0], rel=losses_apart)
    norms_apart = 1e-4 if not rounded else 1e-3 if optimizer == "sgd" else 0.03
    assert [row["grad_norm"] for row in ours] == pytest.approx(plain[1], rel=norms_apart)
    assert min(plain[1]) > 0.5  # clipping is active
    found = weights(tmp_path / "run")
    largest = 0.0
    for name, parameter in model.named_parameters():
        trained = parameter.detach()
        error, change = (found[name] - trained).norm(), (trained - before[name]).norm()
        if sent == "fp32":
            assert error <= (REORDER if optimizer == "sgd" else 1e-3) * trained.norm(), name
        else:  # AdamW makes as long a step of a small gradient as of a large one
            assert error <= (2**-6 if optimizer == "sgd" else 0.2) * change, name
            largest = max(largest, float(error / change) if change else 0.0)
    assert (largest > 1e-3) == rounded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "train"),
    [
        ("float32", {"optimizer": "sgd"}),
        ("bfloat16", {"optimizer": "adamw"}),
        ("float32", {"optimizer": "adamw", "router_loss_coef": 0.5}),
        ("float32", {"optimizer": "sgd", "shares": [2, 1], "what": ["model.layers.*"]}),
    ],
    ids=["sgd", "bfloat16", "router loss", "shares"],
)
def test_two_ranks_train_as_one_process_does_and_twice_to_the_bit(
    dtype, train, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, dtype=dtype, **train)
    here = tmp_path / "here.json"
    here.write_text(replace(Machine.from_json(machine_file.read_text()), dtype=dtype).to_json())
    words = ("finetune", recipe, "--machine", here)
    alone = ("train.shares=auto",)
    assert run(*words, *alone, f"output.dir={tmp_path / 'one'}") == 0
    start_two(forked, *words, f"output.dir={tmp_path / 'two'}")
    assert_as_one(
        tmp_path / "two", tmp_path / "one", apart=REORDER if train["optimizer"] == "sgd" else 0.02
    )
    # no evaluation, and an exchange of slow and fast ranks
    again = tmp_path / "again"
    start_two(
        forked,
        *("slow", *words, f"output.dir={again}", "output.eval_every=null"),
        module="tests.e2e.broken_rank",
    )
    assert losses(again) == losses(tmp_path / "two")
    found, other = checkpoint(again, 6), checkpoint(tmp_path / "two", 6)
    assert found.keys() == other.keys() == checkpoint(tmp_path / "one", 6).keys()
    assert all(torch.equal(found[name], other[name]) for name in other)
    ops = json.loads((again / "measured.json").read_text())["timeline"]
    of = {kind: {op["layer"] for op in ops if op["kind"] == kind} for kind in KINDS}
    assert of["gradient"] == of["update"] == {0, 2}
    assert of["await"] == {1, 3}
    assert of["reduce"] >= {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_ends_the_other_and_the_run_resumes_to_the_bit(
    seed, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe, whole = full_recipe(write_recipe, steps=16), tmp_path / "whole"
    words = ("finetune", recipe, "--machine", machine_file)
    start_two(forked, *words, f"output.dir={whole}")
    metrics, chance = tmp_path / "run" / "metrics.jsonl", random.Random(seed)
    main, other = forked.start_ranks(*words)
    goal = chance.randrange(2, 6)
    other.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= goal)
    time.sleep(chance.random() * 0.1)
    assert other.end(signal.SIGKILL) == -signal.SIGKILL
    killed_s = time.monotonic()
    assert main.end() == 1
    assert time.monotonic() - killed_s < 40
    assert "rank 1 is gone or does not answer" in " ".join(main.shown.split()), main.shown
    start_two(forked, *words, "--resume")
    assert_same_runs(tmp_path / "run", whole)
    found, expected = checkpoint(tmp_path / "run", 16), checkpoint(whole, 16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_one_process_resumes_what_two_began_and_the_other_way_round(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, optimizer="adamw")
    words, begun = ("finetune", recipe, "--machine", machine_file), {}
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
def test_machines_train_with_owners_each_and_the_same_weights(
    sizes, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, optimizer="sgd")
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    more = {rank: [f"output.dir={tmp_path / 'none'}"] for rank in range(sizes[0], sum(sizes))}
    ranks = forked.start_machines(*words, sizes=sizes, more=more)
    assert [rank.end() for rank in ranks] == [0] * len(ranks), [rank.shown for rank in ranks]
    assert_as_one(tmp_path / "run", tmp_path / "one")
    before = checkpoint(tmp_path / "run", 6)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000006")
    ranks = forked.start_machines(*words, "--resume", sizes=sizes, more=more)
    assert [rank.end() for rank in ranks] == [0] * len(ranks), [rank.shown for rank in ranks]
    after = checkpoint(tmp_path / "run", 6)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every", "cause", "limit_s"),
    [
        ("named in an update", 2, "(rank 1): a copy failed", 20),
        ("named in an update", 1, "(rank 1): a copy failed", 20),  # before a checkpoint
        ("killed in an update", 2, "rank 1 is gone or does not answer: no sign of life", 40),
        ("hangs in an update", 2, "rank 1 is gone or does not answer: others have waited", 40),
    ],
)
def test_a_rank_that_does_not_come_to_an_update_ends_the_others_with_the_cause(
    kind, every, cause, limit_s, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe)
    often = ("output.eval_every=null", f"output.checkpoint_every={every}")
    words = ("finetune", recipe, "--machine", machine_file, *often)
    main, other = forked.start_ranks(kind, *words, module="tests.e2e.broken_rank")
    assert main.end() == 1
    ended_s = time.monotonic()
    assert other.end(signal.SIGKILL if kind.startswith("hangs") else None) != 0
    assert FAILS_AT in other.shown, (main.shown, other.shown)
    failed_s = float(other.shown.partition(FAILS_AT)[2].split()[0])
    assert ended_s - failed_s < limit_s
    assert cause in " ".join((main.shown + other.shown).split()), (main.shown, other.shown)
    start_two(forked, *words, "--resume")
    start_two(forked, *words, f"output.dir={tmp_path / 'whole'}")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
